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
    assert set(counts) == set(cage2_replay.ARRAYS)
    assert sum(compared for compared, _ in counts.values()) >= 229 * np.load(recording)["reward"].size
    assert {name: wrong for name, (_, wrong) in counts.items() if wrong} == {}


def test_the_sample_covers_both_versions_and_fits_the_repository() -> None:
    files = list(SAMPLE.glob("*"))
    assert sum(file.stat().st_size for file in files) <= 400 * 1024
    names = {file.stem for file in files}
    assert {"bline_nogreen_react", "meander_green_react", "lb_bline_nogreen_react", "sleep_green_random"} <= names


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_command_reports_every_array_and_fails_on_one_wrong_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: int
) -> None:
    with np.load(SAMPLE / "meander_nogreen_sleep.npz") as file:
        trace = {name: file[name] for name in file.files}
    trace["reward"][3, 50] -= 0.1 * wrong
    np.savez_compressed(tmp_path / "meander_nogreen_sleep.npz", **trace)
    assert cage2_replay.main([str(tmp_path)]) == wrong
    line, summary = capsys.readouterr().out.splitlines()
    assert all(f"{name} " in line for name in cage2_replay.ARRAYS)
    assert f"reward 800/{wrong} " in line
    assert summary.startswith("1 files")
    assert f"{wrong} mismatches" in summary


def test_the_command_says_when_there_is_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cage2_replay.main([str(tmp_path)]) == 2
    assert "There is no .npz recording" in capsys.readouterr().err
    path = tmp_path / "purple_nogreen_sleep.npz"
    path.write_bytes((SAMPLE / "meander_nogreen_sleep.npz").read_bytes())
    with pytest.raises(ValueError, match=r"purple_nogreen_sleep\.npz is not named"):
        cage2_replay.replay(path)
