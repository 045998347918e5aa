"""Our simulator equals the real CybORG on its recordings: all of the shared ones, else the sample in the repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import cage2_replay
from tests.cage2_replay import SAMPLE
from tests.conftest import ROOT

RECORDINGS = sorted((ROOT.parent / "shared/cage2/traces").glob("*.npz")) or sorted(SAMPLE.glob("*.npz"))


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_every_recorded_value_is_reproduced(recording: Path) -> None:
    counts = cage2_replay.replay(recording)
    assert len(counts) == 17  # arrays
    assert sum(compared for compared, _ in counts.values()) >= 229 * np.load(recording)["reward"].size
    assert {name: wrong for name, (_, wrong) in counts.items() if wrong} == {}


def test_the_sample_covers_both_versions_and_fits_the_repository() -> None:
    files = list(SAMPLE.glob("*"))
    assert sum(file.stat().st_size for file in files) <= 400 * 1024
    names = {file.stem for file in files}
    assert {"bline_nogreen_react", "meander_green_react", "lb_bline_nogreen_react", "sleep_green_random"} <= names
