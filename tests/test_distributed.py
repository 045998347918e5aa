"""Several processes, each with environments and minibatches of its own, learn one policy together, and none outlives
the others. n processes need not equal one; they must stay in step, and learn as well.

Ranks are forked from the test process, as torchrun would start them; the last tests use torchrun itself.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, TARGET_RUN, assert_same, columns, fork, rows, tiny_args, tiny_flags, wait
from tests.test_subproc_faults import is_alive


def run_ranks(script: ModuleType, work: Callable[[], int | None], output: Path) -> list[int]:
    """Run `work` in two processes that find each other; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def ranked_work(rank: int) -> int | None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        script.RANK, script.WORLD_SIZE = rank, 2  # type: ignore[attr-defined]  # which the script read when imported
        torch.set_num_threads(1)
        return work()

    return [wait(pid) for pid in [fork(partial(ranked_work, rank), output) for rank in range(2)]]


def train_ranks(script: ModuleType, logdir: Path, before: Callable[[], Any] = int, **values: Any) -> None:
    """Train with two ranks; raises AssertionError if one of them fails."""
    output = logdir.parent / "output.txt"

    def work() -> None:
        before()
        script.train(tiny_args(script, logdir, **values))

    assert run_ranks(script, work, output) == [0, 0], output.read_text()[-3000:]


def test_ranks_see_different_things_and_step_along_the_mean_of_their_gradients(
    script: ModuleType, tmp_path: Path
) -> None:
    """All have the same weights, moments and metrics at the end of a run, from environments, actions and minibatches
    of their own. What Adam's mean takes in at the first step is the mean of the gradients of each."""
    take_steps = script.take_steps

    def record() -> None:
        first: dict[str, torch.Tensor] = {}

        def recorded(agent: Any, args: Any, weights: torch.Tensor, adam: Any, some: Any) -> Any:
            loss, metrics = script.ppo_loss(agent, args, type(some)(*(x[0] for x in some)))
            own = torch.autograd.grad(loss, list(agent.parameters()))
            result = take_steps(agent, args, weights, adam, some)
            if not first:
                first.update(gradient=torch.cat([x.flatten() for x in own]), applied=adam["mean"] / 0.1,
                             entropy=metrics["entropy"], logged=result["entropy"][0])  # fmt: skip
            seen = [some.obs, some.actions, some.advantages]
            torch.save([first, seen, [weights, adam, result]], tmp_path / f"{script.RANK}.pt")
            return result

        script.take_steps = recorded  # type: ignore[attr-defined]

    one_call = {"num_minibatches": 1} | ({"minibatch_growth": 1} if hasattr(script.Args, "minibatch_growth") else {})
    train_ranks(script, tmp_path / "run", before=record, max_grad_norm=None, **one_call)
    firsts, seen, common = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    assert_same(*common)
    assert any(not torch.equal(x, y) for x, y in zip(*seen, strict=True))
    assert columns(tmp_path / "run")["global_step"] == [tiny_args(script, tmp_path).batch_size * i for i in (1, 2, 3)]
    gradients, applied, entropies, logged = (torch.stack([x[name] for x in firsts]) for name in firsts[0])
    torch.testing.assert_close(applied, gradients.mean(0).expand_as(applied), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(applied[1], applied[0], rtol=0, atol=0)
    torch.testing.assert_close(logged, entropies.mean().expand(2))
    assert not torch.equal(gradients[0], gradients[1])


def test_a_run_of_two_ranks_can_be_resumed_by_two_and_by_one(continuous: ModuleType, tmp_path: Path) -> None:
    """The first process goes on where it was, the other ones with new episodes."""
    train_ranks(continuous, tmp_path / "run", total_timesteps=192)
    before = continuous.load(tmp_path / "run" / "latest.pt")["adam"]["step"]
    train_ranks(continuous, tmp_path / "run", total_timesteps=384, resume=True)
    assert columns(tmp_path / "run")["global_step"] == [64 * update for update in range(1, 7)]
    assert continuous.load(tmp_path / "run" / "latest.pt")["adam"]["step"] == 2 * before
    args = tiny_args(continuous, tmp_path / "run", total_timesteps=448, resume=True)
    assert continuous.train(args)["global_step"] == 448


@pytest.mark.parametrize(
    "values",
    [
        {"env_id": "Target-v0", "target_kl": 0.02, "learning_rate": 0.03, "update_epochs": 8},
        {"average_reward_rate": 0.1, "norm_reward": False},
    ],
    ids=["target_kl", "average_reward_rate"],
)
def test_what_is_decided_by_all_ranks_is_decided_alike(
    continuous: ModuleType, tmp_path: Path, values: dict[str, Any]
) -> None:
    """Else they would wait for each other's messages for ever, or drift apart."""
    train_ranks(continuous, tmp_path / "run", **values)
    if "target_kl" in values:
        assert columns(tmp_path / "run")["counters/epochs"][-1] < 24


def test_two_ranks_learn_as_well_as_one_process(continuous: ModuleType, tmp_path: Path) -> None:
    """Target-v0: the best return is 0, doing nothing earns -0.083."""
    train_ranks(continuous, tmp_path / "run", **TARGET_RUN)
    assert columns(tmp_path / "run")["eval/mean_return"][-1] > -0.01


def test_what_cannot_be_shared_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "WORLD_SIZE", 3)
    with pytest.raises(script.UsageError):
        tiny_args(script, Path("unused"))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "^error: .* already holds a run"),  # which only rank 0 can find
        # rank 1 has environments 2 and 3; the seed of environment 2 is the one that poisons
        ({"env_id": "Poison-reward-nan-v0", "reset_steps": 100}, "The reward of environment"),
    ],
    ids=["a mistake", "a number that is not finite"],
)
def test_a_fault_of_one_rank_ends_all(
    continuous: ModuleType, tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    output = tmp_path / "output.txt"
    if not values:
        continuous.train(tiny_args(continuous, tmp_path / "run"))
    flags = tiny_flags(continuous, tmp_path / "run", **values)
    assert 0 not in run_ranks(continuous, lambda: continuous.main(flags), output)
    assert re.search(sentence, output.read_text(), re.MULTILINE)


# ---- torchrun -------------------------------------------------------------------------------------------------------


def torchrun(script: ModuleType, logdir: Path, *flags: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script.__file__)]
    argv += [*tiny_flags(script, logdir, total_timesteps=10_000_000, save_every=256), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_updates(process: subprocess.Popen[str], logdir: Path, updates: int) -> None:
    """Wait until so many are logged; a process that ends before is a failure, and one that takes 100 s is ended."""
    deadline = time.monotonic() + 100
    while rows(logdir) < updates:
        if time.monotonic() > deadline:
            process.terminate()
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


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
def test_a_rank_that_dies_stops_all_and_sigterm_saves_and_ends_all(continuous: ModuleType, tmp_path: Path) -> None:
    logdir = tmp_path / "run"
    process = torchrun(continuous, logdir)
    wait_for_updates(process, logdir, 3)
    ranks = [pid for pid in children(process.pid) if "--logdir" in Path(f"/proc/{pid}/cmdline").read_text()]
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
    updates = rows(logdir) + 3
    process = torchrun(continuous, logdir, "--resume", "--save-every", "0")
    wait_for_updates(process, logdir, updates)
    members = family(process.pid)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert survivors(members) == []
    assert continuous.load(logdir / "latest.pt")["run"]["rollouts"] >= updates
