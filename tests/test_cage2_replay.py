"""Our simulator equals the real CybORG on its recordings: all of the shared ones, else the sample in the repository."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import cage2_replay

SAMPLE = Path(__file__).parent / "data" / "cage2_sample"
SHARED = Path(__file__).parents[2] / "shared" / "cage2" / "traces"
RECORDINGS = sorted(SHARED.glob("*.npz")) or sorted(SAMPLE.glob("*.npz"))


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


def run_replay(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.cage2_replay", str(directory)]
    root = Path(__file__).parents[1]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def test_command_reports_every_array_of_a_good_recording(tmp_path: Path) -> None:
    (tmp_path / "meander_nogreen_sleep.npz").symlink_to(SAMPLE / "meander_nogreen_sleep.npz")
    done = run_replay(tmp_path)
    assert done.returncode == 0
    line, summary = done.stdout.splitlines()
    assert all(f"{name} " in line for name in cage2_replay.ARRAYS)
    assert "reward 800/0" in line
    assert summary.startswith("1 files")
    assert "0 mismatches" in summary


def test_command_fails_on_one_wrong_value(tmp_path: Path) -> None:
    with np.load(SAMPLE / "meander_nogreen_sleep.npz") as file:
        trace = {name: file[name] for name in file.files}
    trace["reward"][3, 50] -= 0.1
    np.savez_compressed(tmp_path / "meander_nogreen_sleep.npz", **trace)
    done = run_replay(tmp_path)
    assert done.returncode == 1
    assert "reward 800/1" in done.stdout
    assert "1 mismatches" in done.stdout


def test_command_says_when_there_is_nothing_to_replay(tmp_path: Path) -> None:
    done = run_replay(tmp_path)
    assert done.returncode == 2
    assert "There is no .npz recording" in done.stderr


def test_a_misnamed_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "purple_nogreen_sleep.npz"
    path.write_bytes((SAMPLE / "meander_nogreen_sleep.npz").read_bytes())
    with pytest.raises(ValueError, match=r"purple_nogreen_sleep\.npz is not named"):
        cage2_replay.replay(path)
