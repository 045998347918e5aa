"""Several processes learn what one process with all environments would, and none outlives the others.

Ranks are forked from the test process, as torchrun would start them; the last tests use torchrun itself.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from envs.normalize import RunningMeanStd
from tests.conftest import ROOT, assert_same, load_script
from tests.test_resume import fork, rows, wait, wait_for_updates
from tests.test_subproc_faults import is_alive

# Two updates of 64 or 100 transitions, in minibatches of a half; the second update shows that the ranks' weights,
# statistics and random numbers stayed equal.
COMMON = {
    "num_minibatches": 2,
    "update_epochs": 2,
    "eval_every": 0,
    "eval_episodes": 2,
    "save_every": 0,
    "compile": False,
}
TINY: dict[str, dict[str, Any]] = {
    "ppo_continuous_mujoco": {"env_id": "Hopper-v5", "num_envs": 4, "num_steps": 16, "total_timesteps": 128,
                              "hidden_sizes": (8, 8), "reset_steps": 10},
    "ppo_cage2_parallel": {"num_envs": 4, "num_steps": 25, "total_timesteps": 200, "max_steps": 20,
                           "hidden_sizes": (8, 8)},
    "ppo_atari_mario": {"num_envs": 2, "num_steps": 16, "total_timesteps": 64, "feature_dim": 16, "noop_max": 3,
                        "minibatch_growth": 2, "max_episode_steps": 10, "backend": "nes_py", "capture_video": False,
                        "amp": False},
}  # fmt: skip


@pytest.fixture
def ranked(script: ModuleType) -> ModuleType:
    if not hasattr(script, "Ranks"):
        pytest.skip(f"{script.__name__} has no Ranks")
    return script


def tiny(script: ModuleType, logdir: Path, **values: Any) -> Any:
    """Arguments of a short run of the script, or of a copy of it."""
    name = script.FORMAT.partition("/")[0]
    return script.Args(**(COMMON | TINY[name] | {"logdir": str(logdir)} | values))


def run_ranks(size: int, work: Callable[[], int | None], output: Path) -> list[int]:
    """Run `work` in `size` processes that find each other; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(size):

        def ranked_work(rank: int = rank) -> int | None:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            torch.set_num_threads(1)
            return work()

        pids.append(fork(ranked_work, output))
    return [wait(pid) for pid in pids]


def progress(logdir: Path) -> list[dict[str, float]]:
    with open(logdir / "progress.csv") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def assert_close_runs(one: Path, other: Path) -> None:
    """Metrics of all updates and the final weights agree to the rounding of float32. But Adam makes a step of almost
    its whole size from a gradient that is almost zero, so a weight may differ by a tenth of a learning rate."""
    for row, other_row in zip(progress(one), progress(other), strict=True):
        assert row.keys() == other_row.keys()
        for name, value in row.items():
            assert other_row[name] == pytest.approx(value, rel=2e-3, abs=2e-5, nan_ok=True), name
    first, second = (torch.load(logdir / "latest.pt", weights_only=True)["agent"] for logdir in (one, other))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=5e-5)


def test_two_ranks_learn_what_one_process_would(ranked: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    ranked.train(tiny(ranked, tmp_path / "one"))
    assert run_ranks(2, lambda: ranked.train(tiny(ranked, tmp_path / "two"))["signal"], output) == [0, 0], (
        output.read_text()
    )
    assert_close_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    "values",
    [
        {"norm_adv_scope": "batch", "target_kl": 1e-4, "learning_rate": 3e-3},
        {"norm_adv_scope": "per_env", "optimizer": "separate", "max_grad_norm": None},
        {"norm_adv": False, "average_reward": True, "norm_reward": False, "clip_vloss": True, "vec_env": "sync"},
    ],
    ids=["kl_limit", "per_env", "average_reward"],
)
def test_two_ranks_learn_the_same_with_other_settings(
    continuous: ModuleType, tmp_path: Path, values: dict[str, Any]
) -> None:
    output = tmp_path / "output.txt"
    continuous.train(tiny(continuous, tmp_path / "one", **values))
    codes = run_ranks(2, lambda: continuous.train(tiny(continuous, tmp_path / "two", **values))["signal"], output)
    assert codes == [0, 0], output.read_text()
    assert_close_runs(tmp_path / "one", tmp_path / "two")
    if "target_kl" in values:
        assert min(row["train/update_epochs_done"] for row in progress(tmp_path / "two")) < 2


@pytest.mark.parametrize("values", [{}, {"norm_adv": False}, {"norm_adv_scope": "batch"}], ids=str)
def test_each_rank_computes_the_gradient_of_its_part_of_a_minibatch(
    ranked: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    original, output = ranked.ppo_gradients, tmp_path / "output.txt"
    args = tiny(ranked, tmp_path / "two", **values)
    growth = getattr(args, "minibatch_growth", 1)  # in the second of the two updates

    def checked(agent: Any, minibatch: Any, loss_args: Any) -> Any:
        assert len(minibatch) == 6
        assert {len(x) for x in minibatch} <= {args.minibatch_size // 2, args.minibatch_size // 2 * growth}
        return original(agent, minibatch, loss_args)

    monkeypatch.setattr(ranked, "ppo_gradients", checked)
    assert run_ranks(2, lambda: ranked.train(args)["signal"], output) == [0, 0], output.read_text()


def test_four_ranks_of_one_environment_each(continuous: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    continuous.train(tiny(continuous, tmp_path / "one"))
    assert run_ranks(4, lambda: continuous.train(tiny(continuous, tmp_path / "four"))["signal"], output) == [0] * 4, (
        output.read_text()
    )
    assert_close_runs(tmp_path / "one", tmp_path / "four")


def test_a_run_of_two_ranks_resumes_exactly_and_only_with_two(
    continuous: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two updates and then two more are four in one go, to the last bit."""
    output = tmp_path / "output.txt"

    def train(name: str, **values: Any) -> list[int]:
        return run_ranks(2, lambda: continuous.train(tiny(continuous, tmp_path / name, **values))["signal"], output)

    settings: dict[str, Any] = {"anneal_lr": False}
    assert train("whole", total_timesteps=256, **settings) == [0, 0], output.read_text()
    assert train("broken", total_timesteps=128, **settings) == [0, 0]
    assert train("broken", total_timesteps=256, resume=True, **settings) == [0, 0]
    whole, broken = (torch.load(tmp_path / name / "latest.pt", weights_only=True) for name in ("whole", "broken"))
    for key in ("agent", "optimizer", "ranks"):
        assert_same(broken[key], whole[key], key)
    assert len(whole["ranks"]) == 2
    assert (tmp_path / "broken" / "progress.csv").read_text() == (tmp_path / "whole" / "progress.csv").read_text()
    with pytest.raises(continuous.UsageError, match=r"is a run of 2 processes and cannot go on with 1\."):
        continuous.train(tiny(continuous, tmp_path / "broken", resume=True, **settings))


def test_environments_that_cannot_be_split_are_refused(continuous: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(continuous.UsageError, match="--num-envs 4 and minibatches of 32 cannot be split evenly over 3"):
        continuous.validate(tiny(continuous, Path("unused")))


def test_a_mistake_found_by_rank_0_ends_all_ranks_with_one_sentence(continuous: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    (tmp_path / "run").write_text("not a folder")
    argv = ["--configs", "debug", "--no-compile", "--env-id", "Hopper-v5", "--logdir", str(tmp_path / "run")]
    assert run_ranks(2, lambda: continuous.main(argv), output) == [2, 2]
    assert len(re.findall("^error: .* cannot be written", output.read_text(), re.M)) == 1


def test_a_number_that_is_not_finite_names_the_environment_of_the_whole_run(
    continuous: ModuleType, tmp_path: Path
) -> None:
    """Rank 1 has environments 2 and 3; the seed of environment 2 is the one that poisons."""
    values = {"env_id": "Poison-reward-nan-v0", "vec_env": "sync", "reset_steps": 100}
    output = tmp_path / "output.txt"
    codes = run_ranks(2, lambda: continuous.train(tiny(continuous, tmp_path / "run", **values))["signal"], output)
    assert 0 not in codes
    assert "rewards of environment 2: a number is not finite at step 3" in output.read_text()
    assert (tmp_path / "run" / "postmortem_1.npz").exists()


@pytest.mark.parametrize("sizes", [(3, 5), (8, 0), (1, 1)])
def test_merged_statistics_are_those_of_all_batches(sizes: tuple[int, int]) -> None:
    """`gather` hands each process the moments of both; an empty batch, left when rows were faulty, counts nothing."""
    rng = np.random.default_rng(1)
    alone, merged = RunningMeanStd((2,)), RunningMeanStd((2,))
    moments: list[np.ndarray] = []
    recorder = RunningMeanStd((2,), gather=lambda x: (moments.append(x), [x])[1])
    for _ in range(3):
        parts = [rng.normal(3, 2, (size, 2)) for size in sizes]
        alone.update(np.concatenate(parts))
        moments.clear()
        for part in parts:
            recorder.update(part)
        merged.gather = lambda x: list(moments)
        merged.update(parts[0])
    for name in ("mean", "var", "count"):
        np.testing.assert_allclose(getattr(merged, name), getattr(alone, name), rtol=1e-12)


# ---- torchrun -------------------------------------------------------------------------------------------------------


def torchrun(script: ModuleType, logdir: Path, *flags: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script.__file__)]
    argv += ["--configs", "debug", "--env-id", "Hopper-v5", "--eval-every", "0", "--save-every", "256", "--num-workers",
             "1", "--logdir", str(logdir), *flags]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def family(pid: int) -> list[int]:
    """All processes below `pid`."""
    return [member for child in children(pid) for member in (child, *family(child))]


def survivors(pids: list[int], seconds: float = 5) -> list[int]:
    """Those that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    while pids and time.monotonic() < deadline:
        pids = [pid for pid in pids if is_alive(pid)]
        time.sleep(0.05)
    return pids


@pytest.mark.timeout(240)
def test_a_rank_that_dies_stops_all_within_30_seconds_and_the_run_goes_on_until_sigterm_saves_and_ends_all(
    continuous: ModuleType, tmp_path: Path
) -> None:
    logdir, flags = tmp_path / "run", ("--vec-env", "subproc", "--total-timesteps", "1000000")
    process = torchrun(continuous, logdir, *flags)
    wait_for_updates(process, logdir, 3)
    ranks = [pid for pid in children(process.pid) if "--configs" in Path(f"/proc/{pid}/cmdline").read_text()]
    members = family(process.pid)
    assert len(ranks) == 2
    assert len(members) >= 4  # and their workers
    os.kill(ranks[1], signal.SIGKILL)
    killed = time.monotonic()
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - killed < 30
    assert process.returncode != 0
    assert "SIGKILL" in output, output
    assert survivors(members) == []
    reached = torch.load(logdir / "latest.pt", weights_only=True)["counters"]["global_step"]
    updates = rows(logdir) + 3
    process = torchrun(continuous, logdir, *flags, "--resume", "--save-every", "0")
    wait_for_updates(process, logdir, updates)
    members = family(process.pid)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert survivors(members) == []
    assert f"continuing after step {reached:,}" in output
    assert "continue with --resume" in output
    assert torch.load(logdir / "latest.pt", weights_only=True)["counters"]["update"] >= updates


@pytest.mark.timeout(240)
def test_a_mistake_in_one_rank_is_shown_with_its_traceback(continuous: ModuleType, tmp_path: Path) -> None:
    """A copy of the script whose rank 1 raises in its second update."""
    source = Path(str(continuous.__file__)).read_text()
    faulty = tmp_path / "faulty.py"
    bug = 'assert ranks.rank != 1 or counters.update < 2, "planted"'
    marker = "        counters.update += 1\n"
    assert source.count(marker) == 1
    faulty.write_text(source.replace(marker, f"{marker}        {bug}\n"))
    process = torchrun(load_script(faulty), tmp_path / "run", "--no-compile")
    output = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert "AssertionError: planted" in output
    assert bug in output
