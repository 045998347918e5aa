"""Nothing is lost: a run that was killed, anywhere and any number of times, ends as the unbroken run, to the last bit.

Children are forked from the test process, which has everything imported; they are real processes and die real deaths.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from envs.mario import available_backends
from tests.conftest import ROOT, assert_same, domain, load_script, script_paths, tiny_args, weights

Run = Callable[..., dict[str, Any]]
# 24 updates of 4 x 16 steps, saved after every second one, evaluated after every fifth.
KILLABLE = {"total_timesteps": 24 * 64, "save_every": 128, "eval_every": 320}


def fork(work: Callable[[], int | None], output: Path) -> int:
    """Run `work` in a child process, its output in a file; returns the child's id. Exit code: what it returns, or 1."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code = work() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, seconds: float = 100) -> int:
    """The exit code of a child, minus the signal if one ended it; it is killed after `seconds`, and that fails."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {seconds} s")


def wait_until(pid: int, condition: Callable[[], bool], output: Path) -> None:
    """Wait for `condition`; a child that ends before is a failure, and one that takes 100 s is killed."""
    deadline = time.monotonic() + 100
    while not condition():
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, os.WNOHANG)
        assert not done, (status, output.read_text()[-2000:])
        time.sleep(0.001)


def wait_for_updates(process: subprocess.Popen[str], logdir: Path, updates: int) -> None:
    """Wait until so many are logged; a process that ends before is a failure, and one that takes 100 s is ended."""
    deadline = time.monotonic() + 100
    while rows(logdir) < updates:
        if time.monotonic() > deadline:
            process.terminate()
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def rows(logdir: Path) -> int:
    """Updates logged so far."""
    path = logdir / "progress.csv"
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


def assert_same_run(broken: Path, unbroken: Path) -> None:
    """Weights, optimiser, normalisers, environments, generators, counters, scores and logs are those of one run."""
    for name in ("latest.pt", "best.pt"):
        states = [torch.load(logdir / name, weights_only=True) for logdir in (broken, unbroken)]
        for state in states:
            del state["args"], state["counters"]["seconds"]
            drop_derived(state["ranks"])
        assert_same(*states, where=name)
    for name in ("progress.csv", "eval.csv"):
        assert (broken / name).read_bytes() == (unbroken / name).read_bytes(), name


def drop_derived(state: Any) -> None:
    """MuJoCo's derived arrays, where Gymnasium's own robots are saved, have entries that nothing has written to. An
    emulator's own bytes hold the phase of a noise that is only heard; what it plays, frames and weights show."""
    if isinstance(state, dict):
        state.pop("derived", None)
        state.pop("core", None)
    for inner in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        drop_derived(inner)


def child_of(continuous: ModuleType, logdir: Path, values: dict[str, Any], prepare: Any = None) -> int:
    """Start the run in a process of its own, or continue it if it has begun."""
    args = tiny_args(continuous, logdir, resume=(logdir / "latest.pt").exists(), **values)

    def work() -> None:
        if prepare is not None:
            prepare()
        continuous.train(args)

    return fork(work, logdir.parent / "output.txt")


@pytest.fixture
def quiet(continuous: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without curves.png, as in `run_tiny`; inherited by forked children."""
    monkeypatch.setattr(continuous, "plot_curves", lambda logdir: None)


# ---- kill -9 --------------------------------------------------------------------------------------------------------


# Runs of some 20 updates, with a checkpoint after every second one.
MUJOCO = {"num_envs": 4, "num_steps": 16, "total_timesteps": 24 * 64, "save_every": 128, "eval_every": 320}
CAGE2 = {"num_envs": 4, "num_steps": 25, "total_timesteps": 24 * 100, "save_every": 200, "eval_every": 500,
         "max_steps": 20, "num_workers": 2}  # fmt: skip
MARIO = {"num_envs": 2, "num_steps": 8, "minibatch_growth": 2, "total_timesteps": 20 * 16, "save_every": 32,
         "eval_every": 80, "feature_dim": 16, "stuck_steps": 15, "noop_max": 3, "capture_video": False,
         "num_workers": 2}  # fmt: skip
KILLED: dict[str, dict[str, dict[str, Any]]] = {
    "ppo_continuous_mujoco": {
        "subproc": MUJOCO | {"env_id": "TwoQueue-v0", "vec_env": "subproc", "num_workers": 2, "reset_steps": 10},
        "batch": MUJOCO | {"env_id": "Hopper-v5", "vec_env": "batch", "reset_steps": 30},
        "sync": MUJOCO | {"env_id": "Hopper-v5", "vec_env": "sync", "reset_steps": 30},
        "async": MUJOCO | {"env_id": "TwoQueue-v0", "vec_env": "async", "reset_steps": 10},
        "compiled": MUJOCO | {"env_id": "Hopper-v5", "vec_env": "batch", "reset_steps": 30, "compile": True},
    },
    "ppo_cage2_parallel": {
        "batch": CAGE2 | {"vec_env": "batch"},
        "subproc": CAGE2 | {"vec_env": "subproc"},
        "workflow": CAGE2 | {"vec_env": "batch", "workflow": "any"},
    },
    "ppo_atari_mario": {
        "nes_py": MARIO | {"backend": "nes_py"},
        "fceumm": MARIO | {"backend": "fceumm"},
        "atari": {name: value for name, value in MARIO.items() if name != "stuck_steps"}
        | {"env_id": "ALE/Breakout-v5", "max_episode_steps": 40, "eval_every": 0},
    },
}


def cases() -> list[Any]:
    """(script, kind, kills): each script's first kind is killed more often than the others, but all 20 times where
    that is slow; nes_py, which plays every episode again when it is restored, is slow at 20 too, and so is each
    compiling."""
    params = []
    for name, kinds in KILLED.items():
        for i, kind in enumerate(kinds):
            usual = 3 if i > 0 else 5 if kind == "nes_py" else 20
            for kills in [usual] if kind == "compiled" else sorted({usual, 20}):
                marks = [pytest.mark.slow] if kind == "compiled" or kills > usual else []
                params.append(pytest.param(name, kind, kills, id=f"{name}-{kind}-{kills}", marks=marks))
    return params


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "kind", "kills"), cases())
def test_a_run_killed_at_random_moments_ends_as_the_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str, kind: str, kills: int
) -> None:
    """Wherever kill -9 strikes, collecting, learning, evaluating or saving, and however often."""
    paths = [path for path in script_paths(request.config) if domain(path) == name]
    if not paths:
        pytest.skip(f"no copy of {name} under test")
    if kind == "fceumm" and kind not in available_backends():
        pytest.skip("FCEUmm is not installed: make fceumm")
    if kind == "atari":
        pytest.importorskip("ale_py", reason="needs pip install ale-py opencv-python-headless")
    script = load_script(paths[0])
    monkeypatch.setattr(script, "plot_curves", lambda logdir: None)
    common = {"num_minibatches": 2, "update_epochs": 2, "eval_episodes": 2, "compile": False}
    common |= {} if name == "ppo_atari_mario" else {"hidden_sizes": (8, 8)}

    def train(logdir: Path) -> None:
        values = common | KILLED[name][kind]
        script.train(script.Args(**values, logdir=str(logdir), resume=(logdir / "latest.pt").exists()))

    def reached(updates: int) -> bool:
        return rows(logdir) >= updates and (logdir / "latest.pt").exists()

    output, logdir, rng, killed = tmp_path / "output.txt", tmp_path / "broken", random.Random(0), 0
    output.touch()
    assert wait(fork(lambda: train(tmp_path / "unbroken"), output)) == 0, output.read_text()[-2000:]
    while killed < kills:
        before = rows(logdir)
        pid = fork(lambda: train(logdir), output)
        target = min(before, 16) + rng.choice([0, 0, 1, 1, 2])  # some die before their first update is done
        wait_until(pid, partial(reached, target), output)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL:
            killed += 1
        else:
            break  # it was faster; the run is complete
    assert killed >= kills // 2
    assert wait(fork(lambda: train(logdir), output)) == 0, output.read_text()[-2000:]
    assert_same_run(logdir, tmp_path / "unbroken")


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


@pytest.mark.parametrize(
    "moment", ["collecting", "learning", "evaluating", "writing", "linking", "renaming", "drawing", "ranking"]
)
def test_a_run_killed_at_an_awkward_moment_ends_as_the_unbroken_one(
    continuous: ModuleType, quiet: None, run_tiny: Run, tmp_path: Path, moment: str
) -> None:
    """`writing`: half of a checkpoint is on the disk. `drawing`, `ranking`: the last update is done and saved."""
    values = {"total_timesteps": 6 * 64, "save_every": 64, "eval_every": 128, "vec_env": "sync"}
    unbroken = Path(run_tiny(logdir=tmp_path / "unbroken", **values)["logdir"])
    prepare = {
        "collecting": die_at(continuous, "check_finite", 3),
        "learning": die_at(continuous, "ppo_gradients", 10),
        "evaluating": die_at(continuous, "evaluate", 2),
        "writing": die_at(torch, "save", 4, lambda state, file: file.write(b"PK\x03\x04 half a checkpoint")),
        "linking": die_at(os, "link", 3),
        "renaming": die_at(os, "replace", 3),
        "drawing": die_at(continuous, "plot_curves", 1),
        "ranking": die_at(continuous, "update_leaderboard", 1),
    }[moment]
    logdir = tmp_path / "broken"
    assert wait(child_of(continuous, logdir, values, prepare)) == -signal.SIGKILL
    assert wait(child_of(continuous, logdir, values)) == 0, (tmp_path / "output.txt").read_text()[-2000:]
    assert_same_run(logdir, unbroken)
    index = (tmp_path / "best").glob("*/index.json")
    assert '"broken"' in next(index).read_text()


def test_a_kill_while_the_log_is_cut_back_loses_no_row(script: ModuleType, tmp_path: Path) -> None:
    """A resumed run drops the rows after its checkpoint; it dies before the shorter file is in place, or finds a file
    that was opened and not yet written to."""
    text = "global_step,x\n64,1.0\n128,2.0\n192,3.0\n"
    (tmp_path / "progress.csv").write_text(text)
    (tmp_path / "eval.csv").touch()

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        os.replace = die
        script.Logger(tmp_path, 128)

    assert wait(fork(work, tmp_path / "output.txt")) == -signal.SIGKILL
    assert (tmp_path / "progress.csv").read_text() == text
    logger = script.Logger(tmp_path, 128)
    logger.writer.close()
    assert (tmp_path / "progress.csv").read_text() == text.removesuffix("192,3.0\n")
    assert (tmp_path / "eval.csv").read_text() == ""


def test_tensorboard_shows_one_curve_without_holes_or_doubled_points(
    continuous: ModuleType, quiet: None, tmp_path: Path
) -> None:
    """Killed twice: what was logged up to the checkpoint is there, what came after it is there once."""
    logdir, values = tmp_path / "run", KILLABLE | {"vec_env": "sync", "total_timesteps": 8 * 64}
    for call in (4, 3):
        assert wait(child_of(continuous, logdir, values, die_at(continuous, "check_finite", call))) == -signal.SIGKILL
        time.sleep(1.1)  # event files are named by the second
    assert wait(child_of(continuous, logdir, values)) == 0
    events = EventAccumulator(str(logdir))
    events.Reload()
    steps = [event.step for event in events.Scalars("train/value_loss")]
    assert steps == [64 * update for update in range(1, 9)]


# ---- continuing on purpose ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "vec_env"),
    [
        ("TwoQueue-v0", "sync"),
        ("TwoQueue-v0", "async"),
        ("TwoQueue-v0", "subproc"),
        ("Hopper-v5", "batch"),
        ("Hopper-v5", "sync"),
        ("Hopper-v5", "subproc"),
    ],
)
def test_a_run_may_be_extended_and_is_then_the_longer_run(run_tiny: Run, env_id: str, vec_env: str) -> None:
    """At a constant learning rate: three updates and three more are six."""
    values = {"env_id": env_id, "vec_env": vec_env, "reset_steps": 10, "eval_every": 64, "anneal_lr": False}
    whole = Path(run_tiny(total_timesteps=384, **values)["logdir"])
    parts = Path(run_tiny(total_timesteps=192, **values)["logdir"])
    result = run_tiny(logdir=parts, total_timesteps=384, resume=True, **values)
    assert (result["update"], result["global_step"]) == (6, 384)
    assert_same_run(parts, whole)


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "separate", "critic_learning_rate": 1e-3},
        {"average_reward": True, "norm_reward": False},
        {"time_scaled_reward": True, "norm_reward": False},
    ],
    ids=["two optimisers", "average reward", "time-scaled reward"],
)
def test_what_other_settings_keep_is_restored_too(run_tiny: Run, values: dict[str, Any]) -> None:
    common = {"vec_env": "sync", "eval_every": 64, "anneal_lr": False} | values
    whole = Path(run_tiny(total_timesteps=384, **common)["logdir"])
    parts = Path(run_tiny(total_timesteps=192, **common)["logdir"])
    run_tiny(logdir=parts, total_timesteps=384, resume=True, **common)
    assert_same_run(parts, whole)


def test_an_extended_run_anneals_towards_its_new_end(run_tiny: Run) -> None:
    """The learning rate is a function of the share of updates done: 1, 2/3, 1/3, then 3/6, 2/6, 1/6 to go."""
    first = run_tiny(total_timesteps=192, learning_rate=6e-4)
    run_tiny(logdir=first["logdir"], total_timesteps=384, learning_rate=6e-4, resume=True)
    header, *lines = (Path(first["logdir"]) / "progress.csv").read_text().splitlines()
    column = header.split(",").index("train/learning_rate")
    rates = [float(line.split(",")[column]) for line in lines]
    assert rates == pytest.approx([6e-4, 4e-4, 2e-4, 3e-4, 2e-4, 1e-4])


def test_workers_evaluations_and_saves_may_change_and_do_not_matter(run_tiny: Run) -> None:
    whole = run_tiny(total_timesteps=384, vec_env="subproc", anneal_lr=False)
    first = run_tiny(total_timesteps=192, vec_env="subproc", anneal_lr=False)
    changes = {"num_workers": 2, "eval_every": 64, "save_every": 64}
    run_tiny(logdir=first["logdir"], total_timesteps=384, vec_env="subproc", anneal_lr=False, resume=True, **changes)
    assert_same(weights(first["logdir"]), weights(whole["logdir"]))


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(run_tiny: Run) -> None:
    first = run_tiny()
    logdir = Path(first["logdir"])
    before = {name: (logdir / name).read_bytes() for name in ("progress.csv", "eval.csv", "best.pt")}
    config = json.loads((logdir / "config.json").read_text())
    again = run_tiny(logdir=logdir, resume=True)
    resumed = json.loads((logdir / "config.json").read_text())
    assert resumed.pop("resumed") == [{name: config[name] for name in ("versions", "commit", "command")}]
    assert resumed.pop("args") | {"resume": False} == config.pop("args")
    assert resumed == config  # how the run began
    assert again["mean_return"] == first["mean_return"]
    assert again["update"] == 3
    assert {name: (logdir / name).read_bytes() for name in before} == before


FLAGS = (
    "--env-id TwoQueue-v0 --vec-env sync --num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 2 "
    "--no-compile --eval-episodes 2 --eval-every 0 --reset-steps 10 --torch-threads 1"
)


@pytest.mark.parametrize("style", ["--logdir {}", "--logdir={}"])
def test_the_command_line_takes_the_arguments_from_the_run(
    continuous: ModuleType, quiet: None, run_main: Any, tmp_path: Path, style: str
) -> None:
    """`--resume --logdir D` is enough, and --total-timesteps extends."""
    logdir = style.format(tmp_path / "run").split()
    assert run_main(*FLAGS.split(), *logdir, "--total-timesteps", "192")[0] == 0
    code, out, err = run_main("--resume", *logdir, "--total-timesteps", "320")
    assert (code, err) == (0, "")
    assert "continuing after step 192" in out
    assert rows(tmp_path / "run") == 5
    assert run_main("--resume", *logdir)[0] == 0  # complete: nothing to do
    assert rows(tmp_path / "run") == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--num-envs 8", ("--num-envs", "4", "8")),
        ("--seed 2", ("--seed", "1", "2")),
        ("--gamma 0.9", ("--gamma", "0.99", "0.9")),
        ("--env-id Target-v0", ("--env-id", "TwoQueue-v0", "Target-v0")),
        ("--hidden-sizes 16 16", ("--hidden-sizes", "(64, 64)", "(16, 16)")),
    ],
)
def test_what_would_make_it_another_run_is_refused_with_both_values(
    continuous: ModuleType, quiet: None, run_main: Any, tmp_path: Path, change: str, named: tuple[str, ...]
) -> None:
    logdir = ["--logdir", str(tmp_path / "run")]
    assert run_main(*FLAGS.split(), *logdir, "--total-timesteps", "128")[0] == 0
    before = (tmp_path / "run" / "latest.pt").read_bytes()
    code, _, err = run_main("--resume", *logdir, *change.split())
    assert code == 2
    assert err.count("\n") == 1
    for word in named:
        assert word in err
    assert (tmp_path / "run" / "latest.pt").read_bytes() == before


def test_a_folder_with_a_run_is_not_overwritten(quiet: None, run_main: Any, tmp_path: Path) -> None:
    argv = [*FLAGS.split(), "--logdir", str(tmp_path / "run"), "--total-timesteps", "64"]
    assert run_main(*argv)[0] == 0
    before = (tmp_path / "run" / "progress.csv").read_bytes()
    code, _, err = run_main(*argv)
    assert code == 2
    assert "--resume" in err
    assert (tmp_path / "run" / "progress.csv").read_bytes() == before


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda x: str(int(x))
)
def test_a_signal_ends_the_run_cleanly_and_it_can_go_on(
    continuous: ModuleType, quiet: None, run_tiny: Run, tmp_path: Path, signum: int, code: int
) -> None:
    """The update under way is finished and saved, the message says how to continue, and the end is the same."""
    logdir, output = tmp_path / "run", tmp_path / "output.txt"
    argv = [*FLAGS.split(), "--logdir", str(logdir), "--total-timesteps", str(64 * 4000), "--no-anneal-lr"]

    def run() -> int:
        if signum == signal.SIGHUP:
            signal.signal(signum, signal.SIG_DFL)  # under nohup it would be ignored
        return continuous.main(argv)

    pid = fork(run, output)
    wait_until(pid, lambda: rows(logdir) >= 3, output)
    os.kill(pid, signum)
    assert wait(pid) == code
    state = torch.load(logdir / "latest.pt", weights_only=True)
    assert state["counters"]["update"] == rows(logdir) < 4000
    text = output.read_text()
    assert "Traceback" not in text
    assert f"--resume --logdir {logdir}" in text.splitlines()[-1].replace("\r", "")

    steps = state["counters"]["global_step"]
    resumed = ["--resume", "--logdir", str(logdir), "--total-timesteps", str(steps + 128)]
    assert wait(fork(lambda: continuous.main(resumed), output)) == 0
    whole = fork(
        lambda: continuous.main([*argv[:-5], "--logdir", str(tmp_path / "whole"), "--total-timesteps",
                                 str(steps + 128), "--no-anneal-lr"]), output
    )  # fmt: skip
    assert wait(whole) == 0, output.read_text()[-2000:]
    assert_same(weights(logdir), weights(tmp_path / "whole"))


@pytest.mark.parametrize("vec_env", ["subproc", "async"])
def test_ctrl_c_in_a_terminal_reaches_the_workers_too_and_all_is_saved(
    continuous: ModuleType, tmp_path: Path, vec_env: str
) -> None:
    flags = ["--env-id", "TwoQueue-v0", "--vec-env", vec_env, "--num-envs", "2", "--num-steps", "16",
             "--num-minibatches", "2", "--no-compile", "--logdir", str(tmp_path / "run")]  # fmt: skip
    process = subprocess.Popen([sys.executable, str(continuous.__file__), *flags], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)  # fmt: skip
    wait_for_updates(process, tmp_path / "run", 3)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "stopping after this update" in output
    assert continuous.load_checkpoint(tmp_path / "run" / "latest.pt")["counters"]["update"] == rows(tmp_path / "run")


def test_a_signal_before_the_first_update_leaves_a_run_to_continue(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logdir, output, logger = tmp_path / "run", tmp_path / "output.txt", script.Logger

    def signalled(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return logger(*args, **kwargs)

    monkeypatch.setattr(script, "Logger", signalled)
    argv = ["--configs", "debug", "--logdir", str(logdir)]
    assert wait(fork(lambda: script.main(argv), output)) == 143, output.read_text()
    assert "Traceback" not in output.read_text()
    assert f"continue with --resume --logdir {logdir}" in output.read_text()
    assert torch.load(logdir / "latest.pt", weights_only=True)["counters"]["update"] == 0


def test_a_second_interrupt_stops_at_once(continuous: ModuleType, quiet: None, tmp_path: Path) -> None:
    logdir, started = tmp_path / "run", tmp_path / "started"

    def stuck(*args: Any) -> NoReturn:
        started.touch()
        while True:
            time.sleep(60)

    def work() -> int:
        continuous.compute_gae = stuck
        return continuous.main([*FLAGS.split(), "--logdir", str(logdir), "--total-timesteps", "640"])

    output = tmp_path / "output.txt"
    pid = fork(work, output)
    wait_until(pid, started.exists, output)
    os.kill(pid, signal.SIGINT)
    # The first one waits for the update to be finished. Two that arrive together would be one.
    wait_until(pid, lambda: "stopping after this update" in output.read_text(), output)
    time.sleep(0.3)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGINT)
    assert wait(pid) == 130, output.read_text()
    assert "Traceback" not in output.read_text()
    assert torch.load(logdir / "latest.pt", weights_only=True)["counters"]["update"] == 0
