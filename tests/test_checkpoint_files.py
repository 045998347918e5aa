"""Damaged, foreign and hostile files, full and read-only disks, concurrent runs, and numbers that are not finite."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, make_sample, run_program, tiny_args, weights
from tests.test_resume import fork, wait

Run = Callable[..., dict[str, Any]]


def state_of(script: ModuleType, number: int) -> dict[str, Any]:
    """A state with everything that a checkpoint may hold: tensors, arrays, numbers, strings, None, nesting."""
    return {
        "format": script.FORMAT, "number": number, "none": None, "score": -math.inf, "text": "π",
        "tensor": torch.arange(300.0) + number, "nested": [np.arange(4), (1, 2.5), {"x": np.float64(0.1)}],
    }  # fmt: skip


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "latest.pt"
    assert script.save_checkpoint(path, state_of(script, 1))
    state = script.to_arrays(script.load_checkpoint(path))
    assert state["number"] == 1
    assert state["none"] is None
    assert state["score"] == -math.inf
    assert state["text"] == "π"
    np.testing.assert_array_equal(state["tensor"], np.arange(300.0) + 1)
    np.testing.assert_array_equal(state["nested"][0], np.arange(4))
    assert state["nested"][1:] == [(1, 2.5), {"x": 0.1}]
    assert [p.name for p in tmp_path.iterdir()] == ["latest.pt"]


def test_the_checkpoint_before_is_kept(script: ModuleType, tmp_path: Path) -> None:
    for number in range(4):
        script.save_checkpoint(tmp_path / "latest.pt", state_of(script, number))
    assert script.load_checkpoint(tmp_path / "latest.pt")["number"] == 3
    assert script.load_checkpoint(tmp_path / "latest.prev.pt")["number"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.prev.pt", "latest.pt"]


def test_a_file_system_without_links_costs_the_one_before_only(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(script.os, "link", no_links)
    for number in range(3):
        assert script.save_checkpoint(tmp_path / "latest.pt", state_of(script, number))
    assert script.load_checkpoint(tmp_path / "latest.pt")["number"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["latest.pt"]


def refused(script: ModuleType, path: Path) -> str:
    """The one sentence with which a file is refused."""
    with pytest.raises(script.UsageError) as error:
        script.load_checkpoint(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_truncated_files_are_refused(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "latest.pt"
    script.save_checkpoint(path, state_of(script, 1))
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "damaged" in refused(script, path)


def test_flipped_bits_are_refused_or_harmless(script: ModuleType, tmp_path: Path) -> None:
    """A bit in the padding may change nothing; a bit of the contents may not go unnoticed."""
    path = tmp_path / "latest.pt"
    script.save_checkpoint(path, state_of(script, 1))
    whole, rng, noticed = path.read_bytes(), random.Random(0), 0
    expected = script.load_checkpoint(path)["tensor"]
    contents = whole.index(np.float32(250).tobytes() + np.float32(251).tobytes())
    for position in [contents, contents + 1, *(rng.randrange(len(whole)) for _ in range(60))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            state = script.load_checkpoint(path)
        except script.UsageError:
            noticed += 1
            continue
        assert position not in (contents, contents + 1)
        assert torch.equal(state["tensor"], expected)
        assert state["number"] == 1
    assert noticed > 20


class Hostile:
    """Unpickling this would create a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_code_in_a_file_is_not_executed(script: ModuleType, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    path = tmp_path / "latest.pt"
    torch.save({"format": script.FORMAT, "payload": Hostile(str(trap))}, path)
    refused(script, path)
    path.write_bytes(pickle.dumps(Hostile(str(trap))))  # not even a zip archive
    refused(script, path)
    torch.save(Hostile(str(trap)), path, _use_new_zipfile_serialization=False)
    refused(script, path)
    assert not trap.exists()
    with pytest.raises(Exception, match="File exists"):  # the trap does work
        pickle.loads(pickle.dumps(Hostile(str(tmp_path))))


def test_other_files_are_refused_by_name(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "latest.pt"
    assert "no checkpoint" in refused(script, path)
    path.mkdir()
    assert "no checkpoint" in refused(script, path)
    path.rmdir()
    path.write_text("hello")
    assert "damaged or not a checkpoint" in refused(script, path)
    torch.save(torch.nn.Linear(2, 2).state_dict(), path)  # some other project's weights
    assert script.FORMAT in refused(script, path)
    torch.save(torch.zeros(3), path)
    assert script.FORMAT in refused(script, path)
    for other in ("ppo_other_script/1", script.FORMAT.replace("/", "/9")):
        torch.save({"format": other}, path)
        message = refused(script, path)
        assert other in message
        assert script.FORMAT in message


def test_a_damaged_latest_falls_back_to_the_one_before(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        script.save_checkpoint(tmp_path / "latest.pt", state_of(script, number))
    latest = tmp_path / "latest.pt"
    latest.write_bytes(latest.read_bytes()[:500])
    assert script.load_latest(tmp_path)["number"] == 1
    assert capsys.readouterr().err == ""  # who only reads says nothing and changes nothing
    assert latest.stat().st_size == 500
    latest.unlink()
    assert script.load_latest(tmp_path)["number"] == 1
    (tmp_path / "latest.prev.pt").write_bytes(b"")
    with pytest.raises(script.UsageError, match="damaged"):
        script.load_latest(tmp_path)


def test_the_save_after_a_fallback_leaves_the_good_checkpoint_alone(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        script.save_checkpoint(tmp_path / "latest.pt", state_of(script, number))
    (tmp_path / "latest.pt").write_bytes(b"torn")
    assert script.load_latest(tmp_path, repair=True)["number"] == 1
    assert "Falling back to latest.prev.pt" in capsys.readouterr().err
    script.save_checkpoint(tmp_path / "latest.pt", state_of(script, 7))
    saved = [script.load_checkpoint(tmp_path / name)["number"] for name in ("latest.prev.pt", "latest.pt")]
    assert saved == [1, 7]


def test_a_run_resumes_from_the_checkpoint_before_and_ends_the_same(
    run_tiny: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"total_timesteps": 384, "save_every": 64, "vec_env": "sync"}
    whole = run_tiny(**values)
    damaged = run_tiny(**values)
    latest = Path(damaged["logdir"]) / "latest.pt"
    latest.write_bytes(latest.read_bytes()[:-10])
    result = run_tiny(logdir=damaged["logdir"], resume=True, **values)
    assert "Falling back to latest.prev.pt" in capsys.readouterr().err
    assert result["update"] == 6
    for name, tensor in weights(whole["logdir"]).items():
        assert torch.equal(weights(result["logdir"])[name], tensor)
    assert (Path(whole["logdir"]) / "progress.csv").read_bytes() == (latest.parent / "progress.csv").read_bytes()


# ---- disks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no free byte."""
    with open(folder / "filler", "ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass


def test_a_full_disk_costs_a_checkpoint_and_not_the_old_one(
    script: ModuleType, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_disk / "latest.pt"
    assert script.save_checkpoint(path, state_of(script, 1))
    fill(small_disk)
    assert not script.save_checkpoint(path, state_of(script, 2))
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert str(path) in warning
    assert warning.count("\n") == 1
    assert script.load_checkpoint(path)["number"] == 1
    assert sorted(p.name for p in small_disk.iterdir()) == ["filler", "latest.pt"]
    (small_disk / "filler").unlink()
    assert script.save_checkpoint(path, state_of(script, 3))
    assert script.load_checkpoint(path)["number"] == 3


def test_a_disk_that_turns_read_only_costs_a_checkpoint(
    script: ModuleType, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_disk / "latest.pt"
    assert script.save_checkpoint(path, state_of(script, 1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert not script.save_checkpoint(path, state_of(script, 2))
    assert "Read-only" in capsys.readouterr().err
    assert script.load_checkpoint(path)["number"] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_outlives_a_disk_that_is_full_for_a_while(
    continuous: ModuleType, run_tiny: Run, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full from the second update to the fifth: the run goes on, and its last checkpoint is good."""
    calls, original = [0], continuous.check_finite

    def checked(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            fill(small_disk)
        if calls[0] == 6:
            (small_disk / "filler").unlink()
        original(*args, **kwargs)

    monkeypatch.setattr(continuous, "check_finite", checked)
    logdir = small_disk / "run"
    result = run_tiny(logdir=logdir, total_timesteps=8 * 64, save_every=64, vec_env="sync")
    assert result["update"] == 8
    assert continuous.load_checkpoint(logdir / "latest.pt")["counters"]["update"] == 8


def test_a_run_whose_last_checkpoint_was_refused_has_failed(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "latest.tmp").mkdir(parents=True)  # nobody can write there, as on a full disk
    argv = ["--configs", "debug", "--no-compile", "--logdir", str(tmp_path / "run"), "--eval-episodes", "1"]
    argv += ["--total-timesteps", "512", "--num-envs", "4", "--num-steps", "16"]
    assert script.main(argv) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: latest.pt was not written: {tmp_path / 'run'} has lost")


def test_a_read_only_folder_is_refused_before_training(continuous: ModuleType, small_disk: Path, run_main: Any) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, _, err = run_main("--env-id", "TwoQueue-v0", "--no-compile", "--logdir", str(small_disk / "run"))
    assert code == 2
    assert str(small_disk / "run") in err
    assert err.count("\n") == 1


def test_a_picture_that_the_disk_refuses_costs_a_warning(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with script.outlive_disk_errors(tmp_path / "curves.png"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert capsys.readouterr().err == (
        f"warning: {tmp_path / 'curves.png'} was not written (No space left on device); the run goes on.\n"
    )
    with pytest.raises(ValueError, match="a bug"), script.outlive_disk_errors(tmp_path / "curves.png"):
        raise ValueError("a bug")


def test_a_picture_and_a_leaderboard_that_the_disk_refuses_cost_no_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(logdir: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(script, "plot_curves", refuse)
    (tmp_path / "best").touch()  # so that no folder can be made there
    argv = ["--configs", "debug", "--no-compile", "--logdir", str(tmp_path / "run"), "--eval-episodes", "1"]
    argv += ["--total-timesteps", "512", "--num-envs", "4", "--num-steps", "16"]
    assert script.main(argv) == 0
    error = capsys.readouterr().err
    assert f"{tmp_path / 'run' / 'curves.png'} was not written (No space left on device); the run goes on." in error
    assert f"{tmp_path / 'best'} was not written (Not a directory); the run goes on." in error


# ---- the folder and the process of a run ----------------------------------------------------------------------------


def test_a_best_policy_that_the_disk_refuses_is_not_the_best_yet(
    continuous: ModuleType, run_tiny: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no later policy would be saved unless it beats one that is nowhere."""
    scores, writes = iter([10.0, 50.0, 30.0, 20.0]), iter([True, False, True])
    evaluate, save = continuous.evaluate, continuous.save_checkpoint

    def save_or_refuse(path: Path, state: dict[str, Any]) -> bool:
        return (path.name != "best.pt" or next(writes)) and save(path, state)

    monkeypatch.setattr(continuous, "evaluate", lambda *a, **k: evaluate(*a, **k) | {"mean_return": next(scores)})
    monkeypatch.setattr(continuous, "save_checkpoint", save_or_refuse)
    result = run_tiny(total_timesteps=256, eval_every=64)
    counters = continuous.load_checkpoint(Path(result["logdir"]) / "best.pt")["counters"]
    assert (counters["global_step"], counters["best_return"]) == (192, 30.0)
    (index,) = tmp_path.glob("best/*/index.json")
    (entry,) = json.loads(index.read_text())
    assert (entry["score"], entry["step"]) == (30.0, 192)


def test_the_best_policy_of_a_lost_part_of_a_run_stays_the_best(
    continuous: ModuleType, run_tiny: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after an evaluation and before the next save, a run on another device need not find that policy again."""
    evaluate = continuous.evaluate

    def scores(*values: float) -> None:
        remaining = iter(values)
        found = lambda *a, **k: evaluate(*a, **k) | {"mean_return": next(remaining)}  # noqa: E731
        monkeypatch.setattr(continuous, "evaluate", found)

    logdir = tmp_path / "run"
    scores(60.0, 90.0)
    run_tiny(logdir=logdir, total_timesteps=128, eval_every=64, save_every=64)
    os.replace(logdir / "latest.prev.pt", logdir / "latest.pt")  # as if the last save had not been
    scores(50.0, 70.0)
    run_tiny(logdir=logdir, total_timesteps=192, eval_every=64, save_every=64, resume=True)
    counters = continuous.load_checkpoint(logdir / "best.pt")["counters"]
    assert (counters["global_step"], counters["best_return"]) == (128, 90.0)
    indices = [json.loads(index.read_text()) for index in tmp_path.glob("best/*/index.json")]  # of runs of two lengths
    assert [(entry["score"], entry["step"]) for (entry,) in indices] == [(90.0, 128)] * 2


def test_a_link_to_a_disk_that_is_not_mounted_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(tmp_path / "scratch" / "runs")
    with pytest.raises(script.UsageError, match="The run folder runs/ cannot be written"):
        script.open_run(script.Args())


def test_a_row_that_was_cut_off_is_not_read(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "eval.csv").write_text("global_step,x,y\n64,1,2\n128,3,4\n192,5")
    assert script.read_csv(tmp_path / "eval.csv")["x"].tolist() == [1, 3]
    (tmp_path / "eval.csv").write_text("global_step,x,y\n64,1,2\n128,3,4")  # or 4.5, or 42
    assert script.read_csv(tmp_path / "eval.csv")["y"].tolist() == [2]


def test_a_run_on_a_gpu_keeps_the_random_state_of_its_own(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu, restored = torch.device("cpu"), torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([device.index, 7]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append((state.tolist(), device)))
    of_gpu, of_cpu = script.to_tensors(script.random_states(gpu)), script.to_tensors(script.random_states(cpu))
    for states, device in ((of_gpu, gpu), (of_gpu, cpu), (of_cpu, gpu), (of_cpu, cpu)):
        torch.rand(3)
        script.set_random_states(states, device)
        assert torch.equal(torch.get_rng_state(), states["torch"])
    assert restored == [([1, 7], gpu)]


def test_a_machine_without_git_can_train(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    logdir, checkpoint, lock = script.open_run(script.Args(logdir=str(tmp_path / "run")))
    os.close(lock)
    assert checkpoint is None
    assert json.loads((logdir / "config.json").read_text())["commit"] == ""


def test_a_folder_in_use_is_refused_until_its_process_is_gone(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a second start as by --resume. A lock that a killed process held is free at once."""
    args = script.Args(logdir=str(tmp_path / "run"))

    def hold() -> None:
        script.open_run(args)
        (tmp_path / "held").touch()
        time.sleep(100)

    pid = fork(hold, tmp_path / "output.txt")
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    for resume in (False, True):  # even before the checkpoint is read, which may be about to change
        with pytest.raises(script.UsageError, match=r"run is in use by another process: wait for it, or choose"):
            script.open_run(dataclasses.replace(args, resume=resume))
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    os.close(script.open_run(args)[2])


def test_a_refused_resume_lets_go_of_the_folder(continuous: ModuleType, run_tiny: Run, tmp_path: Path) -> None:
    """Else nobody could continue it as long as the refused process, a notebook say, lives."""
    run_tiny(logdir=tmp_path / "run", vec_env="sync")
    args = tiny_args(continuous, tmp_path / "run", vec_env="sync", resume=True, gamma=0.5)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(continuous.UsageError, match="cannot change --gamma"):
        continuous.train(args)
    assert len(os.listdir("/proc/self/fd")) == before
    again = dataclasses.replace(args, gamma=0.99)
    pid = fork(lambda: os.close(continuous.open_run(again)[2]), tmp_path / "output.txt")
    assert wait(pid) == 0, (tmp_path / "output.txt").read_text()


# Of the arguments of all scripts those that a resumed run may change, since it stays the same run.
CHANGEABLE = {"total_timesteps", "logdir", "resume", "device", "torch_threads", "num_workers", "eval_every",
              "save_every", "keep_checkpoints", "track", "capture_video", "video_episodes", "video_fps", "hints",
              "explain"}  # fmt: skip


def test_a_resumed_run_may_change_nothing_else(script: ModuleType, tmp_path: Path) -> None:
    args, changed = script.Args(), set()
    for name, value in dataclasses.asdict(args).items():
        saved = dataclasses.asdict(args) | {name: "another"}
        try:
            script.check_continuation(args, tmp_path, {"args": saved, "counters": {"update": 0}, "ranks": [None]})
            changed.add(name)
        except script.UsageError as error:
            assert str(error) == f"--resume cannot change {script.flag(name)} from another to {value}."  # noqa: PT017
    assert changed == CHANGEABLE & saved.keys()


def test_a_run_with_an_argument_that_the_script_has_lost_is_refused(script: ModuleType, tmp_path: Path) -> None:
    """It was begun by another copy, and would become another run."""
    saved = dataclasses.asdict(script.Args()) | {"gone": 1}
    with pytest.raises(script.UsageError, match="has --gone 1, which this script lacks: resume it with its own"):
        script.check_continuation(script.Args(), tmp_path, {"args": saved, "counters": {"update": 0}, "ranks": [None]})


def test_an_argument_that_was_saved_before_it_existed_is_named(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = dataclasses.asdict(script.Args(gamma=0.5))
    assert script.known_args(saved | {"gone": 1}).gamma == 0.5
    assert capsys.readouterr().err == ""
    assert script.known_args({"gamma": 0.5} | {k: v for k, v in saved.items() if k != "ent_coef"}).gamma == 0.5
    assert capsys.readouterr().err == ("warning: saved before --ent-coef existed: at the default, unless given now.\n")


def test_two_runs_begun_in_the_same_second_have_folders_of_their_own(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened = [script.open_run(script.Args()) for _ in range(2)]
    for _, _, lock in opened:
        os.close(lock)
    assert opened[0][0] != opened[1][0]
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_only_a_damaged_checkpoint_makes_way_for_the_one_before(script: ModuleType, tmp_path: Path) -> None:
    """One of another script, which a resumed run would replace, is refused."""
    torch.save({"format": script.FORMAT, "args": {}}, tmp_path / "latest.prev.pt")
    torch.save({"format": "another/1"}, tmp_path / "latest.pt")
    with pytest.raises(script.UsageError, match="holds another/1"):
        script.load_latest(tmp_path)


def test_weights_of_another_network_are_refused_in_one_sentence(script: ModuleType, tmp_path: Path) -> None:
    agent = make_sample(script).agent
    state = agent.state_dict()
    name = next(iter(state))
    with pytest.raises(script.UsageError, match=f"x.pt holds a policy of other inputs, actions or layers .*{name}"):
        script.load_weights(agent, {"agent": state | {name: torch.zeros(1, 2, 3)}}, Path("x.pt"))


def test_a_damaged_row_of_a_log_is_dropped_on_resume(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "eval.csv").write_text("global_step,x\n64,1\nx\x00y,2\n128,3\n19")
    script.Logger(tmp_path, step=128).writer.close()
    assert (tmp_path / "eval.csv").read_text() == "global_step,x\n64,1\n128,3\n"


def test_a_damaged_leaderboard_costs_a_warning_and_no_run(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = board(script, tmp_path, "run0", 1.0)
    (folder / "index.json").write_text('[{"score": 1.')
    with script.outlive_disk_errors(tmp_path / "best"):
        board(script, tmp_path, "run1", 2.0)
    assert re.search(r"best was not written \(Expecting .*\); the run goes on", capsys.readouterr().err)


def test_files_that_cannot_be_written_end_in_one_sentence(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: Any) -> Any:
        return (tmp_path / "file" / "picture.gif").write_bytes(b"")

    def broken(args: Any) -> Any:
        raise BrokenPipeError(32, "a worker is gone")

    def not_finite(args: Any) -> Any:
        raise FloatingPointError("a number is not finite")

    (tmp_path / "file").touch()
    monkeypatch.setattr(script, "train", refuse)
    assert script.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: [Errno 20] Not a directory")
    assert len(error.splitlines()) == 1
    monkeypatch.setattr(script, "train", not_finite)
    assert script.main([]) == 1
    assert capsys.readouterr().err == "error: a number is not finite\n"
    monkeypatch.setattr(script, "train", broken)
    with pytest.raises(BrokenPipeError):  # no file's fault: the whole trace is wanted
        script.main([])


def test_a_second_ctrl_c_ends_without_a_trace(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: Any) -> Any:
        interrupt = script.Interrupt()
        try:
            for _ in range(2):  # as torchrun and a closed terminal send theirs
                os.kill(os.getpid(), signal.SIGTERM)
                assert interrupt.signum == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        finally:
            interrupt.restore()

    monkeypatch.setattr(script, "train", interrupted)
    assert script.main([]) == 130
    assert capfd.readouterr().err.strip() == "stopping after this update; Ctrl-C to stop at once"


def test_words_that_nobody_hears_end_no_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        monkeypatch.setattr(sys, "stdout", gone)
        script.complain("a" * 100_000)
        script.announce("a" * 100_000)


def test_a_signal_when_nobody_listens_is_only_a_request(script: ModuleType, tmp_path: Path) -> None:
    """Standard error may be a pipe whose reader the same Ctrl-C has ended."""

    def work() -> int:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        interrupt = script.Interrupt()
        os.kill(os.getpid(), signal.SIGINT)
        return 7 if interrupt.signum == signal.SIGINT else 1

    assert wait(fork(work, tmp_path / "output.txt")) == 7


def test_a_log_of_an_older_version_keeps_its_columns(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "progress.csv").write_text("global_step,a,gone,b\n64,1,2,3\n")
    logger = script.Logger(tmp_path, step=64)
    logger.write("progress.csv", 128, {"new": 9.0, "b": 6.0, "a": 4.0})
    logger.writer.close()
    assert (tmp_path / "progress.csv").read_text() == "global_step,a,gone,b\n64,1,2,3\n128,4.0,nan,6.0\n"


def test_a_run_outlives_whoever_reads_its_output(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed terminal, the end of `| tee`: the next line must not keep the run from its last checkpoint."""
    logger = script.Logger(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody_listens:
        monkeypatch.setattr(sys, "stdout", nobody_listens)
        logger.line("step 64", final=True)
        monkeypatch.undo()
        assert os.readlink(f"/proc/self/fd/{writer}") == os.devnull  # so the line did try; closing flushes once more
    logger.writer.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_line_is_cut_to_the_terminals_width_and_the_last_one_is_not(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, terminal = script.Logger(tmp_path), Terminal()
    logger.writer.close()
    monkeypatch.setattr(script.shutil, "get_terminal_size", lambda: os.terminal_size((40, 24)))
    monkeypatch.setattr(sys, "stdout", terminal)
    logger.line("x" * 50)
    logger.line("y" * 50, final=True)
    assert terminal.getvalue() == "\r\033[K" + "x" * 39 + "\r\033[K" + "y" * 50 + "\n"


def test_a_warning_takes_the_place_of_the_live_line(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has no end yet: what is printed after it would stand behind it."""

    def warn() -> None:
        with script.outlive_disk_errors(tmp_path / "curves.png"):
            raise OSError(errno.ENOSPC, "No space left on device")

    warning = f"warning: {tmp_path}/curves.png was not written (No space left on device); the run goes on.\n"
    warn()
    assert capsys.readouterr().err == warning
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    warn()
    assert script.main(["--configs"]) == 2
    shown, error = terminal.getvalue().split("\r\033[K")[1:]
    assert shown == warning
    assert error.startswith("error: --configs needs the name of a preset")


def test_without_a_terminal_there_is_a_line_every_ten_seconds_and_the_last_one(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = script.Logger(tmp_path)
    logger.writer.close()
    for now, text in ((100.0, "a"), (109.0, "b"), (111.0, "c"), (120.0, "d"), (120.0, "e")):
        monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda now=now: now))
        logger.line(text, final=text == "e")
    assert capsys.readouterr().out == "a\nc\ne\n"


def test_a_row_that_is_lost_does_not_cost_tensorboard(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = script.Logger(tmp_path)
    (tmp_path / "progress.csv").mkdir()
    logger.write("progress.csv", 64, {"a": 1.0})
    assert "progress.csv lacks step 64" in capsys.readouterr().err
    assert logger.writer is not None
    logger.writer.close()


def test_as_a_program_it_trains_and_plays(script: ModuleType, tmp_path: Path) -> None:
    short = {"num_steps": 8, "max_episode_steps": 20, "max_steps": 20, "reset_steps": 20, "eval_episodes": 2}
    batch = script.PRESETS["debug"]["num_envs"] * 8
    known = {"total_timesteps": batch, "logdir": "run"} | {k: v for k, v in short.items() if hasattr(script.Args, k)}
    flags = [word for name, value in known.items() for word in (script.flag(name), str(value))]
    trained = run_program(script, tmp_path, "--configs", "debug", "--no-compile", *flags)
    assert (trained.returncode, trained.stderr) == (0, "")
    assert f"{batch:,} steps in " in trained.stdout.splitlines()[-1]
    played = run_program(script, tmp_path, "play", "--logdir", "run", "--episodes", "1")
    assert (played.returncode, played.stderr) == (0, "")
    assert len(json.loads(played.stdout.splitlines()[-1])) > 1


def test_as_a_program_it_exits_with_2_and_no_traceback(script: ModuleType, tmp_path: Path) -> None:
    done = run_program(script, tmp_path, "--num-envs", "4", "--num-steps", "32", "--num-minibatches", "7")
    assert (done.returncode, done.stdout) == (2, "")
    batch = "128 (num_envs 4 x num_steps 32)"
    assert done.stderr == f"error: --num-minibatches 7 does not divide the batch of {batch}.\n"


def test_help_that_nobody_reads_to_its_end_is_no_error(script: ModuleType) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(script.__file__), "--help"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, env=variables, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_a_program_whose_output_nobody_reads_ends_well(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`play ... | head -1`; what Python still holds in a buffer must not fail when it ends."""
    logdir = run_tiny()["logdir"]
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, str(continuous.__file__), "play", "--logdir", logdir, "--episodes", "2"]
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--configs"], "--configs needs the name of a preset: defaults"),
        (["--configs", "--seed", "1"], "--configs needs the name of a preset: defaults"),
        (["--configs=nothing"], "There is no preset 'nothing'"),
        (["--config", "debug"], "There is no --config; did you mean --configs?"),
        (["--no-norm-adv", "--norm-adv-scope", "batch"], "--norm-adv-scope batch needs --norm-adv"),
        (["--learning-rate", "1e39"], "--learning-rate must be positive and below 1e38, not 1e+39"),
        (["play"], "play needs --logdir, a run folder, or --checkpoint"),
        (["play", "--logdir", "/nowhere", "--gif-dir", "gifs"], "--gif-dir needs --save-gif"),
        (["play", "--logdir", "/nowhere", "--gif-fps", "5"], "--gif-fps needs --save-gif"),
        (["play", "--logdir", "/nowhere", "--save-gif", "--gif-fps", "60"], "--gif-fps must be in [1, 50], not 60"),
        (["play", "--logdir", "/nowhere", "--render", "--save-gif"], "choose one"),
    ],
)
def test_what_is_missing_is_named(
    script: ModuleType, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert script.main(argv) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_presets_may_be_named_in_several_ways(script: ModuleType) -> None:
    expected = script.parse_args(["--configs", "debug", "fast"])
    assert script.parse_args(["--configs=debug", "--configs", "fast"]) == expected
    with pytest.raises(SystemExit) as end:
        script.main(["--configs", "debug", "-h"])  # no preset
    assert end.value.code == 0


def test_a_preset_named_again_on_resume_does_not_shorten_the_run(script: ModuleType, tmp_path: Path) -> None:
    args = dataclasses.replace(script.parse_args(["--configs", "debug"]), total_timesteps=7_000_000)
    script.save_checkpoint(tmp_path / "latest.pt", {"format": script.FORMAT, "args": dataclasses.asdict(args)})
    again = ["--configs", "debug", "--resume", "--logdir", str(tmp_path)]
    assert script.parse_args(again).total_timesteps == 7_000_000
    assert script.parse_args([*again, "--total-timesteps", "8000000"]).total_timesteps == 8_000_000
    assert script.parse_args(again).num_envs == args.num_envs


def test_before_the_first_evaluation_play_names_the_latest_checkpoint(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latest.pt").touch()
    with pytest.raises(script.UsageError, match="before the first evaluation; use --checkpoint latest"):
        script.find_checkpoint(str(tmp_path), "best")
    assert script.find_checkpoint(str(tmp_path), "latest") == tmp_path / "latest.pt"
    assert script.find_checkpoint(None, "a/b.pt") == Path("a/b.pt")
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    assert script.find_checkpoint("run", "latest.pt") == Path("latest.pt")
    Path("run/latest.pt").touch()  # the folder's own comes first
    assert script.find_checkpoint("run", "latest.pt") == Path("run/latest.pt")
    assert script.find_checkpoint(str(tmp_path), str(tmp_path / "latest.pt")) == tmp_path / "latest.pt"


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_processes_that_would_share_a_gpu_are_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    args = script.Args(device=device)
    script.validate(args)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(script.UsageError, match="has 1 GPU for 2 processes; each needs its own"):
        script.validate(args)


def test_other_tables_in_the_folder_stay_as_they_are(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("year,value\n1999,2\nlater,3\n")
    (tmp_path / "eval.csv").write_text("global_step,x\n64,1\n128,2\n")
    script.Logger(tmp_path, step=64).writer.close()
    assert (tmp_path / "data.csv").read_text() == "year,value\n1999,2\nlater,3\n"
    assert (tmp_path / "eval.csv").read_text() == "global_step,x\n64,1\n"


def test_a_run_can_be_interrupted_in_the_main_thread_and_begun_in_any(script: ModuleType) -> None:
    with ThreadPoolExecutor() as pool:
        interrupt = pool.submit(script.Interrupt).result()
    interrupt.restore()
    assert interrupt.signum is None


def test_a_rank_without_a_world_is_the_only_process(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell may have kept it from another run."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = script.Ranks(script.Args())
    assert (ranks.rank, ranks.size) == (0, 1)


def test_a_signal_that_nohup_has_ignored_stays_ignored(script: ModuleType) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupt = script.Interrupt()
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupt.signum is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signum == signal.SIGTERM
        interrupt.restore()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the best of all runs -------------------------------------------------------------------------------------------


def board(script: ModuleType, parent: Path, run: str, score: float, **settings: Any) -> Path:
    """Enter a run with this score; returns the folder of its leaderboard."""
    logdir = parent / run
    logdir.mkdir(exist_ok=True)
    (logdir / "best.pt").write_text(run)
    before = set(parent.glob("best/*"))
    script.update_leaderboard(logdir, script.Args(**settings), score, step=7)
    folders = set(parent.glob("best/*"))
    return next(iter((folders - before) or folders))


def test_the_five_best_runs_of_a_problem_stand_in_order_at_full_precision(script: ModuleType, tmp_path: Path) -> None:
    scores = [-15.8437, -15.8351, -15.84369999999, 3.0, -100.0, -15.9, 1 / 3]
    for i, score in enumerate(scores):
        folder = board(script, tmp_path, f"run{i}", score, seed=i)  # seeds share a board
    entries = json.loads((folder / "index.json").read_text())
    assert [entry["score"] for entry in entries] == sorted(scores, reverse=True)[:5]
    assert [entry["run"] for entry in entries] == ["run3", "run6", "run1", "run2", "run0"]
    assert sorted(p.name for p in folder.glob("*.pt")) == sorted(entry["file"] for entry in entries)
    for entry in entries:
        assert (folder / entry["file"]).read_text() == entry["run"]
        assert entry["step"] == 7
        assert folder.name.endswith(entry["config"])
    assert not list(folder.glob("*.tmp"))


def test_a_run_that_is_continued_from_within_its_folder_keeps_its_name(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = board(script, tmp_path, "run", 1.0)
    monkeypatch.chdir(tmp_path / "run")
    script.update_leaderboard(Path("."), script.Args(), 2.0, step=8)
    (entry,) = json.loads((folder / "index.json").read_text())
    assert (entry["run"], entry["score"], entry["file"]) == ("run", 2.0, "run.pt")


def test_a_run_that_is_continued_replaces_its_own_entry(script: ModuleType, tmp_path: Path) -> None:
    board(script, tmp_path, "run", 1.0)
    board(script, tmp_path, "other", 2.0)
    folder = board(script, tmp_path, "run", 3.0)
    entries = json.loads((folder / "index.json").read_text())
    assert [(entry["run"], entry["score"]) for entry in entries] == [("run", 3.0), ("other", 2.0)]


def test_other_settings_are_another_board(script: ModuleType, tmp_path: Path) -> None:
    board(script, tmp_path, "run0", 1.0, gamma=0.99)
    board(script, tmp_path, "run1", 1.0, gamma=0.9)
    board(script, tmp_path, "run2", 1.0, gamma=0.9, total_timesteps=10**9)  # longer runs are no match
    board(script, tmp_path, "run3", 1.0, gamma=0.9, torch_threads=2)
    board(script, tmp_path, "run4", 1.0, gamma=0.9, eval_episodes=99)  # its best is less a matter of luck
    assert len(list(tmp_path.glob("best/*/index.json"))) == 4


def test_concurrent_runs_take_turns(script: ModuleType, tmp_path: Path) -> None:
    """Two processes enter 25 runs each; at no moment is the index anything but complete."""

    def enter(worker: int) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(worker)
            for i in range(25):
                board(script, tmp_path, f"run{worker}_{i}", rng.random())

        return work

    children = [fork(enter(worker), tmp_path / "output.txt") for worker in (0, 1)]
    readings = 0
    while any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in children):
        for index in tmp_path.glob("best/*/index.json"):
            assert len(json.loads(index.read_text())) <= 5
            readings += 1
    assert [wait(pid) for pid in children] == [0, 0], (tmp_path / "output.txt").read_text()
    assert readings > 0
    (index,) = tmp_path.glob("best/*/index.json")
    entries = json.loads(index.read_text())
    generators = [random.Random(worker) for worker in (0, 1)]
    expected = sorted((rng.random() for rng in generators for _ in range(25)), reverse=True)[:5]
    assert [entry["score"] for entry in entries] == expected
    assert sorted(p.name for p in index.parent.glob("*.pt")) == sorted(entry["file"] for entry in entries)


# ---- numbers that are not finite ------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalized", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("what", ["obs", "reward"])
def test_a_number_that_is_not_finite_stops_the_run_before_the_weights(
    continuous: ModuleType, run_tiny: Run, tmp_path: Path, what: str, value: float, normalized: bool
) -> None:
    """Environment 2 (seed 3) breaks in its 20th step, the fourth of the second rollout. The message names it and its
    last action, the rollout is kept for a post-mortem, and the checkpoint is that of the first update."""
    logdir = tmp_path / "run"
    with pytest.raises(FloatingPointError) as error:
        run_tiny(
            env_id=f"Poison-{what}-{value}-v0", logdir=logdir, vec_env="sync", reset_steps=100, save_every=64,
            norm_obs=normalized, norm_reward=normalized,
        )  # fmt: skip
    name, step = ("obs", 4) if what == "obs" else ("rewards", 3)  # obs[4] is what step 3 led to
    with np.load(logdir / "postmortem.npz") as postmortem:
        bad = ~np.isfinite(postmortem[name]).reshape(16, 4, -1)
        action = postmortem["actions"][3, 2].tolist()
    assert np.flatnonzero(bad.any((0, 2))).tolist() == [2]
    message = f"{name} of environment 2: a number is not finite at step {step} of the rollout, after action {action};"
    assert str(error.value).startswith(message)
    state = continuous.load_checkpoint(logdir / "latest.pt")
    assert state["counters"]["update"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in state["agent"].values())


@pytest.mark.parametrize(("value", "normalized"), [(np.nan, True), (np.inf, False)])
def test_a_broken_final_observation_stops_the_run_too(
    continuous: ModuleType, run_tiny: Run, tmp_path: Path, value: float, normalized: bool
) -> None:
    """It is seen by the critic alone, in the bootstrap at a time limit; its tanh makes a number of an infinite one."""
    logdir = tmp_path / "run"
    message = "next_values of environment 2: a number is not finite at step 3 of the rollout"
    with pytest.raises(FloatingPointError, match=message):
        run_tiny(env_id=f"Poison-obs-{value}-v0", logdir=logdir, vec_env="sync", reset_steps=20, save_every=64,
                 norm_obs=normalized)  # fmt: skip
    state = continuous.load_checkpoint(logdir / "latest.pt")
    assert state["counters"]["update"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in state["agent"].values())
    assert (logdir / "postmortem.npz").exists()


def test_only_an_action_of_this_rollout_is_named_as_the_cause(script: ModuleType, tmp_path: Path) -> None:
    actions, fine, broken = torch.arange(6.0).view(3, 2), torch.zeros(3, 2, 4), torch.zeros(3, 2, 4)
    broken[0, 1, 2] = math.inf  # what the last rollout, or a reset, led to
    message = "obs of environment 11: a number is not finite at step 0 of the rollout; the"
    with pytest.raises(FloatingPointError, match=message):
        script.check_finite(tmp_path / "postmortem.npz", 10, actions, obs=broken)
    with pytest.raises(
        FloatingPointError, match=r"rewards of environment 11: .* step 0 of the rollout, after action 1\.0;"
    ):
        script.check_finite(tmp_path / "postmortem.npz", 10, actions, obs=fine, rewards=broken[:, :, 2])


def test_a_full_disk_does_not_hide_what_is_not_finite(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FloatingPointError, match="rewards of environment 0"):
        script.check_finite(
            tmp_path / "gone" / "postmortem.npz", 0, torch.zeros(1, 1), rewards=torch.full((1, 1), math.nan)
        )
    assert "postmortem.npz was not written" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_no_weight_and_stops_the_run(
    continuous: ModuleType, run_tiny: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    adam_step, changes, minibatches = continuous.adam_step, [], []
    ppo_gradients = continuous.ppo_gradients

    def recorded(agent: Any, minibatch: Any, args: Any) -> Any:
        minibatches.append(minibatch)
        return ppo_gradients(agent, minibatch, args)

    def broken(networks: Any, gradients: Any, *args: Any) -> Any:
        if len(changes) == 2:
            gradients[0][0] = bad
        before = networks[0].clone()
        norm = adam_step(networks, gradients, *args)
        changes.append(not torch.equal(networks[0], before))
        return norm

    monkeypatch.setattr(continuous, "ppo_gradients", recorded)
    monkeypatch.setattr(continuous, "adam_step", broken)
    with pytest.raises(FloatingPointError, match="gradient is not finite; it changed no weight"):
        run_tiny(logdir=tmp_path / "run", vec_env="sync")
    assert changes == [True, True, False, True]  # the run ends with the epoch
    with np.load(tmp_path / "run" / "postmortem.npz") as postmortem:
        for saved, given in zip(postmortem.values(), minibatches[2], strict=True):
            np.testing.assert_array_equal(saved, given)
    assert continuous.load_checkpoint(tmp_path / "run" / "latest.pt")["counters"]["update"] == 0


def test_arguments_of_a_checkpoint_make_the_same_agent(continuous: ModuleType, run_tiny: Run) -> None:
    """What `play` relies on: the arguments come back with their types, tuples as tuples and None as None."""
    result = run_tiny(vec_env="sync", hidden_sizes=(5, 7, 3), max_grad_norm=None)
    saved = continuous.load_checkpoint(Path(result["logdir"]) / "best.pt")["args"]
    args = tiny_args(continuous, Path(result["logdir"]), vec_env="sync", hidden_sizes=(5, 7, 3), max_grad_norm=None)
    assert saved == dataclasses.asdict(args)
    assert isinstance(saved["hidden_sizes"], tuple)


def test_paths_lists_and_numbers_of_numpy_are_arguments_too(continuous: ModuleType, tmp_path: Path) -> None:
    """As a program gives them, one that sweeps over learning rates say."""
    values = {"logdir": tmp_path / "run", "seed": np.int64(3), "learning_rate": np.float32(0.5), "vec_env": "sync"}
    args = dataclasses.replace(tiny_args(continuous, tmp_path / "run"), hidden_sizes=[5, 7], **values)
    assert (args.logdir, args.seed, args.learning_rate) == (str(tmp_path / "run"), 3, 0.5)
    assert args.hidden_sizes == (5, 7)
    continuous.train(args)
    resumed = continuous.train(dataclasses.replace(args, logdir=tmp_path / "run", resume=True, total_timesteps=384))
    checkpoint = continuous.load_checkpoint(resumed["logdir"] + "/latest.pt")
    assert continuous.save_checkpoint(resumed["logdir"] + "/copy.pt", checkpoint)
    assert continuous.load_checkpoint(tmp_path / "run" / "copy.pt")["counters"]["update"] == 6
