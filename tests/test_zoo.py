"""Each checkpoint of zoo/ plays as its row says it does."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import common, zoo
from envs.mario import available_backends
from tests.conftest import ROOT

CHECKPOINTS = sorted(ROOT.glob("zoo/*.pt"))


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_a_checkpoint_plays_as_its_row_says(path: Path) -> None:
    row = json.loads(path.with_suffix(".json").read_text())
    if row["script"] == "ppo_atari_mario" and "fceumm" not in available_backends():
        pytest.skip("it has learnt on FCEUmm: make fceumm")
    ten = zoo.score(path, row["script"], 10)["mean_return"]  # of the 100 in the row: no others, so the bound is narrow
    assert abs(ten - row["mean_return"]) < 1.5 * row["std_return"] + 1


def test_the_table_has_a_row_for_each_and_all_are_small() -> None:
    page = (ROOT / "zoo" / "README.md").read_text()
    assert CHECKPOINTS
    assert all(f"`{path.name}`" in page for path in CHECKPOINTS)
    assert sum(path.stat().st_size for path in CHECKPOINTS) < 40e6


def test_a_checkpoint_holds_only_what_play_needs() -> None:
    for path in CHECKPOINTS:
        row = json.loads(path.with_suffix(".json").read_text())
        assert importlib.import_module(row["script"]).load(path).keys() <= {"format", "args", "agent", "statistics"}


@pytest.mark.skipif("fceumm" not in available_backends(), reason="they have learnt on FCEUmm: make fceumm")
def test_the_table_of_stages_marks_what_a_net_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "QUICK_RESULTS", tmp_path)
    zoo.write_stages([ROOT / "zoo" / "Mario-1-1.pt"], ("1-1", "8-1"), episodes=5)
    page = (tmp_path / "mario_stages.md").read_text()
    flags = json.loads((tmp_path / "mario_stages.json").read_text())["flags"]["Mario-1-1"]
    assert flags["1-1"] >= 2  # it has learnt this stage, and of the other one nothing
    assert flags["8-1"] == 0
    assert f"| 1-1 | Mario-1-1 **{flags['1-1']}** | none |" in page
    assert "| 8-1 | none | none |" in page
