"""Nothing is lost: a run that was killed, anywhere and any number of times, ends as the unbroken run, to the last bit.

Children are forked from the test process, which has everything imported; they are real processes and die real deaths.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from envs.mario import available_backends
from tests.conftest import (
    assert_same,
    can_compile,
    columns,
    domain,
    fork,
    load_script,
    rows,
    script_paths,
    tiny_args,
    tiny_flags,
    wait,
    wait_until,
    weights,
)

Run = Callable[..., dict[str, Any]]


def assert_same_run(broken: Path, unbroken: Path) -> None:
    """Weights, optimiser, normalisers, environments, generators, counters, scores and logs are those of one run."""
    for name in ("latest.pt", "best.pt"):
        states = [torch.load(logdir / name, weights_only=True) for logdir in (broken, unbroken)]
        for state in states:
            del state["args"], state["run"]["seconds"], state["run"]["csv_size"]  # which the column of times sways
            drop_derived(state["envs"])
        assert_same(*states, where=name)
    scores = [json.loads((logdir / "best.json").read_text()) | {"logdir": ""} for logdir in (broken, unbroken)]
    assert_same(*scores, where="best.json")
    logs = [{k: v for k, v in columns(logdir).items() if not k.startswith("time/")} for logdir in (broken, unbroken)]
    assert_same(*logs, where="progress.csv")


def drop_derived(state: Any) -> None:
    """MuJoCo's derived arrays, where Gymnasium's own robots are saved, have entries that nothing has written to. An
    emulator's own bytes hold the phase of a noise that is only heard; what it plays, frames and weights show."""
    if isinstance(state, dict):
        state.pop("derived", None)
        state.pop("core", None)
    for inner in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        drop_derived(inner)


def die_at(module: Any, name: str, call: int, half_done: Callable[..., Any] | None = None) -> Callable[[], None]:
    """A preparation of the child: in its `call`-th call of `module.name` it kills itself."""

    def prepare() -> None:
        original, count = getattr(module, name), 0

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                if half_done is not None:
                    half_done(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, deadly)

    return prepare


def half_a_checkpoint(state: Any, path: str) -> None:
    Path(path).write_bytes(b"PK\x03\x04 half a checkpoint")


def start(script: ModuleType, logdir: Path, values: dict[str, Any], prepare: Callable[[], Any] = int) -> int:
    """Start the run in a process of its own, or continue it if it has begun."""

    def work() -> None:
        prepare()
        script.train(tiny_args(script, logdir, resume=(logdir / "latest.pt").exists(), **values))

    return fork(work, logdir.parent / "output.txt")


# Runs of 20 updates, with a checkpoint after every second one and an evaluation after every fifth.
MUJOCO = {"total_timesteps": 20 * 64, "save_every": 128, "eval_every": 320}
CAGE2 = {"total_timesteps": 20 * 100, "save_every": 200, "eval_every": 500}
MARIO = {"total_timesteps": 20 * 16, "save_every": 32, "eval_every": 80}
KILLED: dict[str, tuple[str, dict[str, Any]]] = {
    "queues in processes": ("ppo_continuous_mujoco", MUJOCO | {"num_workers": 2}),
    "robots in threads": ("ppo_continuous_mujoco", MUJOCO | {"env_id": "Hopper-v5", "num_workers": 2}),
    "robots, compiled": ("ppo_continuous_mujoco", MUJOCO | {"env_id": "Hopper-v5", "compile": True}),
    "CAGE2": ("ppo_cage2_parallel", CAGE2),
    "CAGE2 with a workflow": ("ppo_cage2_parallel", CAGE2 | {"workflow": "any", "finite_horizon": True}),
    "CAGE2, compiled": ("ppo_cage2_parallel", CAGE2 | {"compile": True}),
    "Mario on nes_py, slow": ("ppo_atari_mario", MARIO | {"backend": "nes_py"}),  # which plays all episodes again
    "Mario on fceumm": ("ppo_atari_mario", MARIO | {"backend": "fceumm", "num_workers": 2}),
    "Mario, compiled": ("ppo_atari_mario", MARIO | {"compile": True}),
}
SLOW = [pytest.mark.slow, can_compile]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=SLOW if kind.endswith(("compiled", "slow")) else ()) for kind in KILLED]
)
def test_a_run_killed_at_random_moments_ends_alike(tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> None:
    """Eight times, once in the middle of a save; and wherever else kill -9 strikes."""
    name, values = KILLED[kind]
    paths = [path for path in script_paths(request.config) if domain(path) == name]
    if not paths:
        pytest.skip(f"no copy of {name} under test")
    if "fceumm" in kind and "fceumm" not in available_backends():
        pytest.skip("FCEUmm is not installed: make fceumm")
    script, logdir, output = load_script(paths[0]), tmp_path / "broken", tmp_path / "output.txt"
    output.touch()
    assert wait(start(script, tmp_path / "unbroken", values), 300) == 0, output.read_text()[-2000:]
    rng = random.Random(kind)
    for i in range(8):
        if i == 3:
            assert wait(start(script, logdir, values, die_at(torch, "save", 2, half_a_checkpoint)), 300) == -9
            continue
        target = max(rows(logdir) - rng.choice([1, 0]), 0) + rng.choice([0, 1])  # some die before their first update
        pid = start(script, logdir, values)
        wait_until(pid, partial(lambda n: rows(logdir) >= n, min(target, 17)), output)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert wait(start(script, logdir, values), 300) == 0, output.read_text()[-2000:]
    assert_same_run(logdir, tmp_path / "unbroken")


MOMENTS: dict[str, Callable[[ModuleType], Callable[[], None]]] = {
    "learning": lambda script: die_at(script, "take_steps", 10),
    "evaluating": lambda script: die_at(script, "evaluate", 2),
    "the best is next": lambda script: die_at(script, "save", 3),  # of 1 and 2 latest.pt, then best.pt of update 3
    "logged and not saved": lambda script: die_at(script, "save", 4),
    "writing": lambda script: die_at(torch, "save", 4, half_a_checkpoint),
    "renaming": lambda script: die_at(os, "replace", 3),
    "the last line": lambda script: die_at(json, "loads", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_an_awkward_moment_ends_alike(continuous: ModuleType, tmp_path: Path, moment: str) -> None:
    values, output = {"total_timesteps": 6 * 64, "save_every": 64, "eval_every": 192}, tmp_path / "output.txt"
    assert wait(start(continuous, tmp_path / "unbroken", values)) == 0, output.read_text()[-2000:]
    logdir = tmp_path / "broken"
    assert wait(start(continuous, logdir, values, MOMENTS[moment](continuous))) == -signal.SIGKILL
    assert wait(start(continuous, logdir, values)) == 0, output.read_text()[-2000:]
    assert_same_run(logdir, tmp_path / "unbroken")


def test_tensorboard_shows_one_curve_without_holes_or_doubled_points(continuous: ModuleType, tmp_path: Path) -> None:
    """What was logged up to the checkpoint is there, what came after it is there once."""
    logdir, values = tmp_path / "run", {"total_timesteps": 8 * 64, "save_every": 128}
    assert wait(start(continuous, logdir, values, die_at(continuous, "compute_gae", 6))) == -signal.SIGKILL
    time.sleep(1.1)  # event files are named by the second
    assert wait(start(continuous, logdir, values)) == 0
    events = EventAccumulator(str(logdir))
    events.Reload()
    assert [event.step for event in events.Scalars("train/value_loss")] == [64 * update for update in range(1, 9)]
    logged = {name for name, column in columns(logdir).items() if np.isfinite(column).any()}
    assert set(events.Tags()["scalars"]) == logged - {"global_step"}


@pytest.mark.parametrize("values", [
    {}, {"env_id": "Hopper-v5"}, {"critic_learning_rate": 1e-3}, {"average_reward_rate": 0.1, "norm_reward": False},
    {"time_scaled_reward": True, "norm_reward": False},
], ids=str)  # fmt: skip
def test_a_run_may_be_extended_and_is_then_the_longer_run(run_tiny: Run, values: dict[str, Any]) -> None:
    """At a constant learning rate three updates and three more are six, whatever workers, evaluations and saves."""
    values = {"eval_every": 64, "lr_decay": "none"} | values
    whole = Path(run_tiny(total_timesteps=384, **values)["logdir"])
    parts = Path(run_tiny(total_timesteps=192, **values)["logdir"])
    result = run_tiny(logdir=parts, total_timesteps=384, resume=True, num_workers=2, save_every=64, **values)
    assert (result["rollouts"], result["global_step"]) == (6, 384)
    assert_same_run(parts, whole)


def test_an_extended_run_anneals_towards_its_new_end(run_tiny: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate falls with the updates done: 1, 2/3, 1/3, then 3/6, 2/6, 1/6. Another --num-envs begins new episodes."""
    first = run_tiny(total_timesteps=192, learning_rate=6e-4)
    run_tiny(logdir=first["logdir"], total_timesteps=384, learning_rate=6e-4, resume=True, num_envs=8, num_steps=8)
    assert columns(first["logdir"])["train/learning_rate"] == pytest.approx([6e-4, 4e-4, 2e-4, 3e-4, 2e-4, 1e-4])
    assert "--num-envs is 8 from now on; it was 4." in capsys.readouterr().out


def test_a_run_whose_log_is_gone_goes_on_with_a_new_one(run_tiny: Run) -> None:
    logdir = Path(run_tiny(total_timesteps=128)["logdir"])
    (logdir / "progress.csv").unlink()
    run_tiny(logdir=logdir, total_timesteps=256, resume=True)
    assert list(columns(logdir)["global_step"]) == [192, 256]


@pytest.mark.parametrize("style", ["--logdir {}", "--logdir={}"])
def test_the_command_line_resumes_a_run(continuous: ModuleType, run_main: Any, tmp_path: Path, style: str) -> None:
    """`--resume --logdir D` is enough, flags given now win and are told. A finished run stays as it is."""
    run, logdir = tmp_path / "run", style.format(tmp_path / "run").split()
    assert run_main(*tiny_flags(continuous, run))[0] == 0
    code, out, err = run_main("--resume", *logdir, "--total-timesteps", "320")
    assert (code, err) == (0, "")
    assert "--total-timesteps is 320 from now on; it was 192." in out
    assert rows(run) == 5
    before = {name: (run / name).read_bytes() for name in ("progress.csv", "latest.pt", "best.pt", "best.json")}
    assert run_main("--resume", *logdir)[0] == 0  # complete: nothing to do
    assert {name: (run / name).read_bytes() for name in before} == before
    assert json.loads((run / "config.json").read_text())["args"]["num_steps"] == 16


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=lambda x: str(int(x)))
@pytest.mark.parametrize("eval_every", [0, 64])
def test_a_signal_ends_the_run(continuous: ModuleType, tmp_path: Path, signum: int, code: int, eval_every: int) -> None:
    """Before the first evaluation and after it: the update under way is finished and saved; the end is the same. As
    Ctrl-C in a terminal does, the signal reaches the workers too."""
    logdir, output = tmp_path / "run", tmp_path / "output.txt"

    def main(folder: str, **values: Any) -> int:
        os.setsid()
        signal.signal(signum, signal.SIG_DFL)  # under nohup, or in the background of a shell, it may be ignored
        values |= {"lr_decay": "none", "eval_every": eval_every, "num_workers": 2}
        return continuous.main(tiny_flags(continuous, tmp_path / folder, **values))

    pid = fork(lambda: main("run", total_timesteps=64 * 4000), output)
    wait_until(pid, lambda: rows(logdir) >= 3, output)
    os.killpg(pid, signum)
    assert wait(pid) == code, output.read_text()
    state = torch.load(logdir / "latest.pt", weights_only=True)
    assert state["run"]["rollouts"] == rows(logdir) < 4000
    assert "Traceback" not in output.read_text()
    steps = state["run"]["global_step"] + 128
    for folder, resume in (("run", True), ("whole", False)):
        pid = fork(lambda folder=folder, resume=resume: main(folder, total_timesteps=steps, resume=resume), output)  # type: ignore[misc]
        assert wait(pid) == 0
    assert_same(weights(logdir), weights(tmp_path / "whole"))


@pytest.mark.parametrize(("steps", "closed"), [(64, ()), (640, (1, 2))])
def test_a_signal_in_the_first_update(continuous: ModuleType, tmp_path: Path, steps: int, closed: Any) -> None:
    """Which finishes the run if it is the last one. Without a reader (Ctrl-C in `2>&1 | tee`) the exit code is 1."""
    reader, writer = os.pipe()
    os.close(reader)

    def work() -> int:
        def interrupt(*args: Any) -> Any:
            for output in closed:
                os.dup2(writer, output)
            os.kill(os.getpid(), signal.SIGTERM)
            return compute_gae(*args)

        compute_gae, continuous.compute_gae = continuous.compute_gae, interrupt
        return continuous.main(tiny_flags(continuous, tmp_path / "run", total_timesteps=steps, eval_every=0))

    assert wait(fork(work, tmp_path / "output.txt")) == (1 if closed else 128 + signal.SIGTERM)
    assert torch.load(tmp_path / "run" / "latest.pt", weights_only=True)["run"]["global_step"] == 64
    finished = "64 steps in" in (tmp_path / "output.txt").read_text()
    assert finished == (tmp_path / "run" / "best.json").exists() == (steps == 64)


def test_a_second_interrupt_stops_at_once(continuous: ModuleType, tmp_path: Path) -> None:
    started, output = tmp_path / "started", tmp_path / "output.txt"

    def work() -> int:
        continuous.compute_gae = lambda *args: (started.touch(), time.sleep(60))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the foreground
        return continuous.main(tiny_flags(continuous, tmp_path / "run"))

    pid = fork(work, output)
    wait_until(pid, started.exists, output)
    os.kill(pid, signal.SIGINT)
    time.sleep(0.5)  # the first one waits for the update to be finished
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGINT)
    assert wait(pid) == -signal.SIGINT, output.read_text()
    assert "Traceback" not in output.read_text()
