"""Each checkpoint of zoo/ plays as its row says it does."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.zoo import score
from envs.mario import available_backends
from tests.conftest import ROOT

CHECKPOINTS = sorted(ROOT.glob("zoo/*.pt"))


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_a_checkpoint_plays_as_its_row_says(path: Path) -> None:
    row = json.loads(path.with_suffix(".json").read_text())
    if row["script"] == "ppo_atari_mario" and "fceumm" not in available_backends():
        pytest.skip("it has learnt on FCEUmm: make fceumm")
    three = score(path, row["script"], 3)["mean_return"]  # of the 100 in the row: no others, so the bound is narrow
    assert abs(three - row["mean_return"]) < 1.5 * row["std_return"] + 1


def test_the_table_has_a_row_for_each_and_all_are_small() -> None:
    page = (ROOT / "zoo" / "README.md").read_text()
    assert CHECKPOINTS
    assert all(f"`{path.name}`" in page for path in CHECKPOINTS)
    assert sum(path.stat().st_size for path in CHECKPOINTS) < 40e6


def test_a_checkpoint_holds_only_what_play_needs() -> None:
    for path in CHECKPOINTS:
        row = json.loads(path.with_suffix(".json").read_text())
        assert importlib.import_module(row["script"]).load(path).keys() <= {"format", "args", "agent", "statistics"}
