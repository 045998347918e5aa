"""Checkpoints and run folders: nothing damaged is taken for whole, nothing in a file is executed or overwritten."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import assert_same, command_line, domain, fork, rows, tiny_args, tiny_runner, wait_until


def state_of(script: ModuleType, number: int = 1) -> dict[str, Any]:
    """A state with everything that a checkpoint may hold: tensors, arrays, numbers, strings, None, nesting."""
    return {
        "format": script.FORMAT, "args": {}, "agent": {}, "number": number,
        "none": None, "score": -math.inf, "text": "π",
        "tensor": torch.arange(300.0), "envs": [{"obs": torch.arange(4), "returns": (1, 2.5), "x": {"y": 0.1}}],
    }  # fmt: skip


def test_a_checkpoint_outlives_a_full_disk(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, state = tmp_path / "latest.pt", state_of(script)
    script.save(path, state)
    assert [p.name for p in tmp_path.iterdir()] == ["latest.pt"]

    def full(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        script.save(path, state_of(script, 2))
    assert_same(script.load(path), state)


def test_the_file_is_complete_at_every_moment(script: ModuleType, tmp_path: Path) -> None:
    """A child saves again and again, and is killed anywhere in it."""
    path, rng, numbers = tmp_path / "latest.pt", random.Random(0), set[int]()
    script.save(path, state_of(script, 0))

    def work() -> None:
        for number in range(1, 100_000):
            script.save(path, state_of(script, number) | {"ballast": torch.zeros(100_000)})

    for _ in range(5):
        before = path.stat().st_ino
        pid = fork(work, tmp_path / "output.txt")
        wait_until(pid, lambda before=before: path.stat().st_ino != before, tmp_path / "output.txt")  # type: ignore[misc]
        for _ in range(rng.randrange(2000)):  # a moment
            os.stat(path)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        numbers.add(script.load(path)["number"])
    assert min(numbers) >= 1


def refused(script: ModuleType, path: Path) -> str:
    """The one sentence with which a file is refused."""
    with pytest.raises((OSError, script.UsageError), match=re.escape(str(path))) as error:
        script.load(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_truncated_and_foreign_files_are_refused(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "latest.pt"
    script.save(path, state_of(script))
    whole = path.read_bytes()
    parts = [whole[:n] for n in (0, 1, 100, len(whole) // 2, len(whole) - 1)]
    for content in (*parts, b"a text\n" * 50, os.urandom(999)):
        path.write_bytes(content)
        assert "damaged" in refused(script, path)
    assert "gone.pt is no file" in refused(script, tmp_path / "gone.pt")
    refused(script, tmp_path)  # a folder
    for foreign in ({"format": "another/1"}, {"agent": {}}, [1, 2], torch.zeros(3)):
        torch.save(foreign, path)
        assert script.FORMAT in refused(script, path)


def test_flipped_bits_are_refused_or_harmless(script: ModuleType, tmp_path: Path) -> None:
    """A bit in the padding may change nothing; a bit of the contents may not go unnoticed."""
    path, state, rng = tmp_path / "latest.pt", state_of(script), random.Random(0)
    script.save(path, state)
    whole, noticed = path.read_bytes(), 0
    contents = whole.index(np.float32(250).tobytes() + np.float32(251).tobytes())
    for position in [contents, contents + 1, *(rng.randrange(len(whole)) for _ in range(100))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = script.load(path)
        except OSError:
            noticed += 1
            continue
        assert position not in (contents, contents + 1)
        assert_same(found, state)
    assert noticed > 20


class Hostile:
    """Unpickling this would create a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_is_not_executed(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not on loading, and not by the commands that load: one sentence, exit code 1 or 2."""
    trap, path, run_main = tmp_path / "executed", tmp_path / "latest.pt", command_line(script, capsys)
    torch.save(state_of(script) | {"payload": Hostile(trap)}, path)
    refused(script, path)
    for argv in (
        ["--resume", "--logdir", str(tmp_path)],
        ["play", "--logdir", str(tmp_path), "--checkpoint", "latest"],
        ["--init-from", str(path), "--configs", "debug", "--logdir", str(tmp_path / "new")],
    ):
        code, _, err = run_main(*argv)
        assert (code, err.startswith("error: "), err.count("\n")) == (1, True, 1), err
    assert not trap.exists()


@pytest.fixture(scope="module")
def finished(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of each script."""
    return Path(tiny_runner(script, tmp_path_factory.mktemp("finished"))()["logdir"])


LIES: dict[str, Any] = {
    "no arguments": lambda state: state.pop("args"),
    "arguments of another kind": lambda state: state["args"].update(num_envs="many"),
    "no weights": lambda state: state.update(agent={}),
    "weights of another shape": lambda state: state.update(agent={"critic.0.weight": torch.zeros(1)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_checkpoint_that_lies_ends_in_one_sentence(
    script: ModuleType, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lie: str
) -> None:
    """Of the right format, with contents that do not fit."""
    state = script.load(finished / "latest.pt")
    LIES[lie](state)
    script.save(tmp_path / "latest.pt", state)
    for argv in (["--resume"], ["play", "--checkpoint", "latest"]):
        code, out, err = command_line(script, capsys)(*argv, "--logdir", str(tmp_path))
        assert code in (1, 2)
        assert "Traceback" not in out + err
        assert re.sub(r"[\s│╭╮╰╯─]+", " ", err).strip()


def test_play_and_resume_import_no_module_that_only_the_file_names(
    continuous: ModuleType, tmp_path: Path, run_main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that somebody sent runs no code; with --env-id on the command line, it is the user who asks for it."""
    (tmp_path / "sent_module.py").write_text(
        "from pathlib import Path\nimport gymnasium\nimport tests.known_values\nPath('ran').touch()\n"
        "gymnasium.register('Sent-v0', entry_point=tests.known_values.KnownValuesEnv)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    env_id, logdir = "sent_module:Sent-v0", tmp_path / "run"
    state = continuous.load(Path(tiny_runner(continuous, tmp_path)(env_id="KnownValues-v0")["logdir"]) / "latest.pt")
    logdir.mkdir()
    continuous.save(logdir / "latest.pt", state | {"args": state["args"] | {"env_id": env_id}})
    commands = [["--resume"], ["play", "--checkpoint", "latest"]]
    for argv in commands:
        code, _, err = run_main(*argv, "--logdir", str(logdir))
        assert (code, err.count("\n")) == (2, 1)
        assert f"--env-id {env_id}" in err
        assert not Path("ran").exists()
    monkeypatch.setattr(sys, "argv", ["--env-id", env_id])
    for argv in commands:
        assert run_main(*argv, "--logdir", str(logdir), "--env-id", env_id)[0] == 0
    assert Path("ran").exists()


def test_a_folder_in_use_is_refused_until_its_process_is_gone(script: ModuleType, tmp_path: Path) -> None:
    """Also to `--resume`; and a process that dies leaves no lock behind."""
    logdir, output = tmp_path / "run", tmp_path / "output.txt"
    args = tiny_args(script, logdir)
    longer = {"total_timesteps": 1000 * args.batch_size, "save_every": args.batch_size}
    pid = fork(lambda: bool(script.train(tiny_args(script, logdir, **longer))), output)
    wait_until(pid, lambda: rows(logdir) >= 2, output)
    for values in ({}, {"resume": True}):
        with pytest.raises(script.UsageError, match="in use by another run"):
            script.train(tiny_args(script, logdir, **longer | values))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert script.train(tiny_args(script, logdir, resume=True, total_timesteps=(rows(logdir) + 1) * args.batch_size))


KEPT: dict[str, dict[str, Any]] = {
    "ppo_continuous_mujoco": {"seed": 2, "env_id": "InvertedPendulum-v5", "reset_steps": 7, "norm_reward": False},
    "ppo_atari_mario": {"seed": 2, "env_id": "Mario-4-1", "reward": "landed", "reset_steps": 7, "skip": 3,
                        "stuck_steps": 9, "noop_max": 1, "sticky_action_probability": 0.5},
    "ppo_cage2_parallel": {"seed": 2, "version": "head", "wrapper": "cardiff", "red_agent": "sleep", "green": True,
                           "max_steps": 9, "finite_horizon": True, "actions": "full", "memory": False,
                           "workflow": "any"},
}  # fmt: skip


def test_a_run_is_neither_overwritten_nor_hurt_by_a_refused_resume(script: ModuleType, tmp_path: Path) -> None:
    run = tiny_runner(script, tmp_path)
    logdir = Path(run()["logdir"])
    before = {path.name: path.read_bytes() for path in logdir.iterdir()}
    with pytest.raises(script.UsageError, match="holds a run: --resume it or choose another"):
        run(logdir=logdir)
    steps = 4 * tiny_args(script, tmp_path).batch_size
    other = {"feature_dim": 8} if hasattr(script.Args, "feature_dim") else {"hidden_sizes": (16,)}
    with pytest.raises(script.UsageError, match="another network"):
        run(logdir=logdir, resume=True, total_timesteps=steps, **other)
    for name, value in KEPT[domain(script)].items():
        with pytest.raises(script.UsageError, match=f"A resumed run keeps its {name}"):
            run(logdir=logdir, resume=True, total_timesteps=steps, **{name: value})
    assert {path.name: path.read_bytes() for path in logdir.iterdir()} == before
    assert run(logdir=logdir, resume=True, total_timesteps=steps)["global_step"] == steps


def test_files_that_cannot_be_written(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    for logdir in ("/proc/nothing", str(tmp_path / "file")):
        code, _, err = command_line(script, capsys)("--configs", "debug", "--no-compile", "--logdir", logdir)
        assert (code, err.count("\n"), logdir in err) == (1, 1, True), err


def test_files_of_no_text_cost_no_run(script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the folder of a run that goes on, and in its neighbours."""
    logdir = Path(tiny_runner(script, tmp_path)()["logdir"])
    for name in ("progress.csv", "config.json", "best.json"):
        (logdir / name).write_bytes(b"\xff\xfe\x00 rubbish \x80")
    for i, rubbish in enumerate((b"", b"[1]", b"{}", b'{"problem": 3}', b"\xff")):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "best.json").write_bytes(rubbish)
    more = str(4 * tiny_args(script, tmp_path).batch_size)
    code, out, err = command_line(script, capsys)("--resume", "--logdir", str(logdir), "--total-timesteps", more)
    assert (code, err) == (0, ""), out + err
    assert script.load(logdir / "latest.pt")["run"]["rollouts"] == 4


def test_a_run_of_a_larger_machine_plays_here(script: ModuleType, tmp_path: Path) -> None:
    """Its GPU and its threads may be missing, and flags that it had."""
    logdir = script.train(tiny_args(script, tmp_path / "run"))["logdir"]
    state = torch.load(Path(logdir, "latest.pt"), weights_only=True)
    state["args"] |= {"device": "cuda", "of_another_day": 1} | (
        {"torch_threads": 4096} if "torch_threads" in state["args"] else {}
    )
    script.save(tmp_path / "run" / "latest.pt", state)
    assert script.play(script.PlayArgs(logdir=logdir, checkpoint="latest"))
