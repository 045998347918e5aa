"""Whatever happens to a worker, an environment or the parent: SubprocVecEnv says so, in time, and cleans up."""

from __future__ import annotations

import ctypes
import errno
import gc
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import NoAsyncCallError
from gymnasium.spaces import Box, Discrete

from envs._worker_pool import CLOSE_SECONDS
from envs.subproc_vec_env import SubprocVecEnv, WorkerError
from tests.test_subproc_vec_env import CONTEXTS, MODES, CountEnv

ROOT = Path(__file__).parent.parent
LINUX = sys.platform == "linux"

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.xdist_group("faults"),
    pytest.mark.skipif(not LINUX, reason="looks into /proc and /dev/shm"),
]


class UnpicklableError(Exception):
    """Refuses to be pickled, as exceptions that hold sockets, locks or C objects do."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class OwnWordsError(RuntimeError):
    """Ignores the text that it is made with."""

    def __init__(self, *_: Any) -> None:
        super().__init__("fixed text")


class OwnArgumentsError(RuntimeError):
    """Cannot be made of a text."""

    def __init__(self, result: Any) -> None:
        super().__init__(f"code {result.code}")


def fail(kind: str) -> None:
    """Bring about a fault."""
    if kind == "exception":
        raise ValueError("the door is stuck")
    if kind == "unpicklable":
        raise UnpicklableError("a secret")
    if kind == "key error":
        raise KeyError("door")
    if kind == "os error":
        raise FileNotFoundError(2, "no such door")
    if kind == "own words":
        raise OwnWordsError
    if kind == "own arguments":
        raise OwnArgumentsError(SimpleNamespace(code=7))
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "nameless signal":
        os.kill(os.getpid(), signal.SIGRTMIN + 6)
    if kind == "sigsegv":
        ctypes.string_at(0)
    if kind == "sys.exit":
        sys.exit(3)
    if kind == "os._exit":
        os._exit(3)
    if kind == "hang":
        while True:
            time.sleep(0.01)
    if kind == "hang in C":
        ctypes.PyDLL(None).usleep(60_000_000)  # keeps the GIL, so that no Python code of this process runs
    raise AssertionError(kind)


class FaultyEnv(CountEnv):
    """Fails as told: in its constructor, in reset, or in its second step."""

    def __init__(self, kind: str, place: str, once: Path | None = None) -> None:
        super().__init__(limit=50)
        self.kind, self.place, self.once = kind, place, once
        self.fail_in("constructor")

    def fail_in(self, place: str) -> None:
        if self.place != place or (self.once is not None and self.once.exists()):
            return
        if self.once is not None:
            self.once.touch()
        fail(self.kind)

    def reset(self, **kwargs: Any) -> tuple[int, dict]:
        self.fail_in("reset")
        return super().reset(**kwargs)

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.fail_in("every step")
        if self.count == 1:
            self.fail_in("step")
        return super().step(action)


def four_envs(kind: str, place: str, once: Path | None = None, **kwargs: Any) -> SubprocVecEnv:
    """Environment 3, the second one of worker 1, is the faulty one."""
    env_fns = [partial(CountEnv, 50)] * 3 + [partial(FaultyEnv, kind, place, once)]
    return SubprocVecEnv(env_fns, 2, **{"step_timeout": 20.0, "autoreset_mode": "SameStep", **kwargs})


def children() -> set[int]:
    """The living direct and indirect children of this process that are workers."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)) and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes()
                parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            except OSError:
                continue
            if int(parent) == os.getpid() and b"resource_tracker" not in arguments and b"forkserver" not in arguments:
                found.add(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process still runs: one that has ended and that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_dead(pids: list[int], seconds: float) -> list[int]:
    """The processes that still live after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(is_alive, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


@pytest.fixture(autouse=True, scope="module")
def what_other_tests_left_is_frozen() -> Iterator[None]:
    """Else the collections around each test would go through all of it again, and forks would copy it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """After each test, no worker and no shared memory is left."""
    gc.collect()
    workers_before, memory_before = children(), set(os.listdir("/dev/shm"))
    yield
    gc.collect()
    assert not wait_until_dead(list(children() - workers_before), 2.0)
    deadline = time.monotonic() + 2.0
    while (left := set(os.listdir("/dev/shm")) - memory_before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def close_in_time(envs: SubprocVecEnv, timeout: float | None = None) -> None:
    pids = [worker.process.pid for worker in envs._pool.workers if worker.process is not None]
    start = time.monotonic()
    envs.close(timeout=timeout)
    assert time.monotonic() - start < 5.0
    assert not wait_until_dead(pids, 0.1)


# ---- faults of one environment ----------------------------------------------------------------------------------

RAISED = {
    "exception": (ValueError, "ValueError during {} in environment 3 .*the door is stuck(?s:.)*in fail"),
    "unpicklable": (UnpicklableError, "UnpicklableError during {} in environment 3 .*a secret(?s:.)*in fail"),
    "key error": (KeyError, "KeyError during {} in environment 3 .*'door'(?s:.)*in fail"),
    "os error": (WorkerError, "FileNotFoundError during {} in environment 3 .*no such door(?s:.)*in fail"),
    "sys.exit": (WorkerError, "SystemExit during {} in environment 3 .*3(?s:.)*in fail"),
}
GONE = {
    "sigkill": (WorkerError, r"Worker 1 \(process \d+\) was killed by SIGKILL .* during {}, in environment 3"),
    "nameless signal": (WorkerError, f"was killed by signal {signal.SIGRTMIN + 6} during {{}}, in environment 3"),
    "sigsegv": (WorkerError, "was killed by SIGSEGV during {}, in environment 3"),
    "os._exit": (WorkerError, "exited with code 3 during {}, in environment 3"),
    "hang": (multiprocessing.TimeoutError, "did not answer within step_timeout=1.0 s .* in environment 3"),
    "hang in C": (multiprocessing.TimeoutError, "did not answer within step_timeout=1.0 s .* in environment 3"),
}
TRACED = ("sigsegv", "hang", "hang in C")  # the place in the code is on stderr
FAULTS = RAISED | GONE
# How a fault is noticed does not depend on how the worker was started: elsewhere a fault of each nature will do.
SOME = ("unpicklable", "sigkill", "hang in C")
CASES = [("fork", kind) for kind in FAULTS] + [(context, kind) for context in CONTEXTS[1:] for kind in SOME]


@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize(("context", "kind"), CASES)
def test_a_fault_in_step_is_reported_with_its_cause(context: str, kind: str, capfd: Any) -> None:
    envs = four_envs(kind, "step", context=context)
    if kind.startswith("hang"):
        envs._pool.step_timeout = 1.0
    envs.reset(seed=10)
    envs.step([5, 6, 7, 8])
    error, text = FAULTS[kind]
    start = time.monotonic()
    with pytest.raises(error, match=text.format("step")) as caught:
        envs.step([5, 6, 7, 8])
    assert time.monotonic() - start < 5.0
    assert isinstance(caught.value, WorkerError)
    assert "seed 13, last action 8" in str(caught.value)
    assert ("in fail" in capfd.readouterr().err) == (kind in TRACED) or context != "fork"
    with pytest.raises(WorkerError, match="Nothing but close"):
        envs.step([5, 6, 7, 8])
    close_in_time(envs)


@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_in_reset_is_reported_with_its_cause(kind: str) -> None:
    envs = four_envs(kind, "reset")
    if kind.startswith("hang"):
        envs._pool.step_timeout = 1.0
    error, text = FAULTS[kind]
    with pytest.raises(error, match=text.format("reset")) as caught:
        envs.reset(seed=10)
    assert "last action" not in str(caught.value)  # there was none
    close_in_time(envs)


@pytest.mark.parametrize(
    ("context", "kind"), [*CASES[: len(FAULTS)], ("forkserver", "exception"), ("spawn", "sigkill")]
)
def test_a_fault_in_a_constructor_is_reported_with_its_cause(context: str, kind: str) -> None:
    error, text = FAULTS[kind]
    text = text.format("construction")
    start = time.monotonic()
    with pytest.raises(error, match=text) as caught:
        four_envs(kind, "constructor", context=context, step_timeout=1.0 if kind.startswith("hang") else 20.0)
    assert isinstance(caught.value, WorkerError)
    assert time.monotonic() - start < 15.0


def test_what_a_constructor_raises_does_not_wait_for_another_that_hangs() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"ValueError during construction in environment 1 .*the door"):
        SubprocVecEnv([partial(FaultyEnv, kind, "constructor") for kind in ("hang", "exception")], 2)
    assert time.monotonic() - start < 8.0


class DeepEnv(CountEnv):
    """Raises from forty calls down, with a message of forty lines."""

    def step(self, action: int) -> Any:
        return self.deeper(40)

    def deeper(self, depth: int) -> Any:
        if depth == 0:
            raise ValueError("the door is stuck\n" * 40)
        return self.deeper(depth - 1)


@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("env_fn", [partial(FaultyEnv, "exception", "every step"), DeepEnv])
def test_what_environments_raise_is_reported_in_25_lines_the_cause_first_without_our_frames(env_fn: Any) -> None:
    envs = SubprocVecEnv([CountEnv] + [env_fn] * 15, 2)
    envs.reset()
    with pytest.raises(ValueError, match=r"^ValueError during step in environment 1 \(.*the door is stuck") as caught:
        envs.step([0] * 16)
    text = str(caught.value)
    assert "in environment 15 " in text or "  ..." in text
    assert text.count("Traceback") == 1
    assert "_subproc_worker" not in text
    assert len(text.splitlines()) <= 25
    close_in_time(envs)


@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("kind", ["sigkill", "hang"])
@pytest.mark.parametrize("raises_first", [False, True])
def test_an_exception_is_reported_even_if_another_worker_is_lost(kind: str, raises_first: bool) -> None:
    env_fns = [partial(FaultyEnv, kind, "step"), partial(FaultyEnv, "exception", "step")]
    envs = SubprocVecEnv(env_fns[:: -1 if raises_first else 1], 2)
    envs.reset()
    envs.step([0, 0])
    envs._pool.step_timeout = 1.0
    envs.step_async([0, 0])
    while envs._pool.workers[0 if raises_first else 1].done.get_value() == 0:  # until the exception is there
        time.sleep(0.01)
    with pytest.raises(ValueError, match=r"step in environment [01] .*the door is stuck"):
        envs.step_wait()
    close_in_time(envs)


class OddEnv(CountEnv):
    """Returns from `step` what it is told: a lambda that takes what CountEnv returns."""

    def __init__(self, change: Callable[[tuple], Any]) -> None:
        super().__init__()
        self.change = change

    def step(self, action: int) -> Any:
        return self.change(super().step(action))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda result: None, "cannot unpack"),
        (lambda result: (*result[:4], {"lock": threading.Lock()}), "cannot pickle.*lock"),
        (lambda result: ([1, 2], *result[1:]), "expected an array of shape"),
        (lambda result: (result[0], "much", *result[2:]), "much|invalid type"),
    ],
)
def test_what_no_step_may_return_is_an_error_of_its_environment(change: Any, text: str) -> None:
    envs = SubprocVecEnv([CountEnv, CountEnv, partial(OddEnv, change), CountEnv], 2, context="fork")
    envs.reset()
    with (
        pytest.warns(UserWarning, match="Worker-2"),
        pytest.raises(WorkerError, match=f"step in environment 2 .*({text})") as caught,
    ):
        envs.step([0, 0, 0, 0])
    assert isinstance(caught.value, TypeError | ValueError)
    processes = [worker.process for worker in envs._pool.workers]
    processes[1].join(5)
    assert [process.is_alive() for process in processes] == [True, False]  # as the warning has it
    close_in_time(envs)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_worker_that_is_killed_or_stopped_is_noticed(how: signal.Signals) -> None:
    envs = four_envs("none", "nowhere")
    envs.reset()
    envs._pool.step_timeout = 1.0
    os.kill(envs._pool.workers[0].process.pid, how)
    text = "was killed by SIGKILL" if how == signal.SIGKILL else "did not answer within step_timeout"
    with pytest.raises(WorkerError, match=f"Worker 0 .*{text}.*none of its environments 0 to 1 running"):
        envs.step([0, 0, 0, 0])
    close_in_time(envs)


class ForkingEnv(CountEnv):
    """Starts a process, which inherits all that its worker holds open, and dies."""

    def __init__(self, pid_file: Path) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        pid_file.write_text(str(child))
        os._exit(3)


def test_a_constructor_that_dies_is_noticed_even_if_its_child_lives(tmp_path: Path) -> None:
    start = time.monotonic()
    try:
        with pytest.raises(WorkerError, match=r"Worker 1 .*exited with code 3 during construction"):
            SubprocVecEnv([CountEnv, partial(ForkingEnv, tmp_path / "pid")], 2, step_timeout=30.0)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert time.monotonic() - start < 15.0


@pytest.mark.timeout(20)
def test_a_worker_that_is_stopped_does_not_block_a_large_request() -> None:
    envs = four_envs("none", "nowhere", step_timeout=1.0)
    os.kill(envs._pool.workers[0].process.pid, signal.SIGSTOP)
    with pytest.raises(multiprocessing.TimeoutError, match=r"Worker 0 .*did not answer .* during set_attr"):
        envs.set_attr("big", bytes(4_000_000))
    close_in_time(envs)


class BigEnv(CountEnv):
    big = bytes(4_000_000)


@pytest.mark.parametrize(
    ("how", "end"), [(signal.SIGKILL, "collect"), (signal.SIGSTOP, "collect"), (signal.SIGSTOP, "close")]
)
def test_a_worker_that_is_killed_or_stopped_in_a_large_reply_is_reported(how: signal.Signals, end: str) -> None:
    envs = SubprocVecEnv([BigEnv, BigEnv], 2, step_timeout=0.5)
    pool = envs._pool
    pool.request("call", [(n, ("big", (), {})) for n in range(2)], pool.workers)
    wait_until(lambda: pool.workers[0].pipe.poll(0))  # now the worker waits in the middle of its reply
    os.kill(pool.workers[0].process.pid, how)
    if end == "collect":
        text = "was killed by SIGKILL" if how == signal.SIGKILL else "did not answer"
        with pytest.raises(WorkerError, match=f"Worker 0 .*{text} .*during call"):
            pool.collect("call", pool.workers)
    close_in_time(envs)


@pytest.mark.filterwarnings("ignore:.*Calling `close`")
@pytest.mark.parametrize("during", ["step", "close"])
@pytest.mark.parametrize("hung", [0, 1])
def test_an_environment_that_hangs_keeps_no_other_from_closing(tmp_path: Path, hung: int, during: str) -> None:
    env_fns: list[Any] = [partial(DiaryEnv, tmp_path / "closed")]
    env_fns.insert(hung, partial(FaultyEnv, "hang", "step") if during == "step" else StubbornEnv)
    envs = SubprocVecEnv(env_fns, 2)
    envs.reset()
    envs.step([0, 0])
    if during == "step":
        envs.step_async([0, 0])
    close_in_time(envs, timeout=1.0)
    assert (tmp_path / "closed").exists()


@pytest.mark.filterwarnings("ignore:.*Calling `close`")
def test_terminate_does_not_wait_for_a_step() -> None:
    envs = four_envs("hang", "step")
    envs.reset()
    envs.step([0, 0, 0, 0])
    envs.step_async([0, 0, 0, 0])
    start = time.monotonic()
    envs.close(terminate=True)
    assert time.monotonic() - start < CLOSE_SECONDS


class StubbornEnv(CountEnv):
    """Does not close."""

    def close(self) -> None:
        fail("hang")


def test_environments_are_closed_even_if_another_ones_constructor_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the door is stuck"):
        SubprocVecEnv([partial(DiaryEnv, tmp_path / "closed"), partial(FaultyEnv, "exception", "constructor")], 2)
    assert (tmp_path / "closed").exists()


class DiaryEnv(CountEnv):
    """Leaves a file when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        self.path.touch()


def test_too_few_file_descriptors_are_named() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too few file descriptors .*raise `ulimit -n` \(16 workers\)"):
            SubprocVecEnv([CountEnv] * 16, 16, context="fork")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_full_dev_shm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", no_room)
    with pytest.raises(OSError, match="/dev/shm is full"):
        SubprocVecEnv([CountEnv] * 2, 2)


# ---- faults of the parent ---------------------------------------------------------------------------------------


class SleepEnv(CountEnv):
    """Sleeps in `step`, holding the GIL; as hard to wake as a simulator in C."""

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        fail("hang in C")
        return super().step(action)


def start_script(tmp_path: Path, body: str, env: str = "CountEnv", arguments: str = "") -> subprocess.Popen:
    """Start a Python process that makes `envs` with 3 workers, prints their ids, then runs `body`."""
    path = tmp_path / "script.py"
    path.write_text(
        "import gc, os, signal, sys, threading, time\n"
        "from envs.subproc_vec_env import SubprocVecEnv\n"
        "from tests.test_subproc_vec_env import CountEnv\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "from tests.test_subproc_faults import GateEnv, SleepEnv\n"
        # A test run started in the background inherits "ignore SIGINT", and Python then leaves it at that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def main():\n"
        f"    envs = SubprocVecEnv([{env}] * 6, 3, {arguments})\n"
        "    envs.reset(seed=0)\n"
        "    print(*[worker.process.pid for worker in envs._pool.workers], flush=True)\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
        + "if __name__ == '__main__':\n    main()\n"
    )
    return subprocess.Popen(
        [sys.executable, path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def worker_pids(process: subprocess.Popen) -> list[int]:
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 3, process.communicate()[1]
    return pids


@pytest.mark.parametrize(("context", "busy"), [("fork", False), ("fork", True), ("forkserver", True), ("spawn", True)])
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path, context: str, busy: bool) -> None:
    body = "envs.step_async([0] * 6)\ntime.sleep(60)" if busy else "time.sleep(60)"
    process = start_script(tmp_path, body, "SleepEnv" if busy else "CountEnv", f"context='{context}'")
    pids = worker_pids(process)
    assert all(map(is_alive, pids))
    process.kill()
    assert not wait_until_dead(pids, 2.0)
    process.communicate(timeout=10)  # and none of its children holds its output open


@pytest.mark.parametrize("context", CONTEXTS[:2])
def test_a_process_that_the_parent_forked_keeps_no_worker_alive(tmp_path: Path, context: str) -> None:
    body = (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(1); os.close(2); time.sleep(60); os._exit(0)\n"
        "print(child, flush=True)\n"
        "time.sleep(60)"
    )
    process = start_script(tmp_path, body, arguments=f"context='{context}'")
    pids = worker_pids(process)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    assert not wait_until_dead(pids, 2.5)
    assert is_alive(child)
    os.kill(child, signal.SIGKILL)  # which multiprocessing's tracker of shared memory, an heir of stderr, waits for
    process.communicate(timeout=10)


def test_workers_made_in_a_thread_outlive_the_thread_but_not_the_parent(tmp_path: Path) -> None:
    body = (
        "made = []\n"
        "thread = threading.Thread(target=lambda: made.append(SubprocVecEnv([CountEnv] * 3, 3)))\n"
        "thread.start(); thread.join()\n"
        "time.sleep(0.3)\n"
        "made[0].reset()\n"
        "print(*[worker.process.pid for worker in made[0]._pool.workers], flush=True)\n"
        "time.sleep(60)"
    )
    process = start_script(tmp_path, body)
    pids = worker_pids(process) + worker_pids(process)
    assert all(map(is_alive, pids))
    process.kill()
    assert not wait_until_dead(pids, 2.0)
    process.communicate(timeout=10)


def test_signals_to_the_whole_group_are_the_parents_to_handle(tmp_path: Path) -> None:
    body = (
        "seen = []\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "    signal.signal(number, lambda number, frame: seen.append(number))\n"
        "print('ready', flush=True)\n"
        "for n in range(3):\n"
        "    while len(seen) == n:\n"
        "        envs.step([0] * 6)\n"
        "    print('seen', flush=True)\n"
        "for _ in range(100):\n"
        "    envs.step([0] * 6)\n"
        "print('limits', *envs.get_attr('limit'), flush=True)\n"
        "envs.close()\n"
    )
    process = start_script(tmp_path, body)
    pids = worker_pids(process)
    assert process.stdout is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert process.stdout.readline() in ("ready\n", "seen\n")
        os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=10)
    assert output == "seen\nlimits 3 3 3 3 3 3\n", errors
    assert (process.returncode, errors) == (0, "")
    assert not wait_until_dead(pids, 2.0)


@pytest.mark.parametrize("env", ["CountEnv", "SleepEnv"])
def test_ctrl_c_that_nobody_handles_ends_everything_in_time(tmp_path: Path, env: str) -> None:
    process = start_script(tmp_path, "while True:\n    envs.step([0] * 6)", env)
    pids = worker_pids(process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)  # generous: the machine may be busy
    # Only the parent reports it. The interrupted line may itself have been handling an error, which is then shown too.
    assert [line for line in errors.splitlines() if not line.startswith(" ")].count("KeyboardInterrupt") == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not wait_until_dead(pids, 2.0)


class Interrupting:
    """A semaphore during whose `release` or `acquire` Ctrl-C is pressed."""

    def __init__(self, semaphore: Any, too_early: bool) -> None:
        self.semaphore, self.too_early = semaphore, too_early

    def release(self) -> None:
        if not self.too_early:
            self.semaphore.release()
        raise KeyboardInterrupt

    def acquire(self, *arguments: Any) -> bool:
        if not self.too_early:
            self.semaphore.acquire()
        raise KeyboardInterrupt


@pytest.mark.parametrize("too_early", [False, True])
@pytest.mark.parametrize("semaphore", ["go", "done"])
def test_ctrl_c_in_the_middle_of_a_step_leaves_only_close(semaphore: str, too_early: bool) -> None:
    envs = four_envs("none", "nowhere", step_timeout=3.0)
    envs.reset()
    interrupted = envs._pool.workers[1]
    real = getattr(interrupted, semaphore)
    setattr(interrupted, semaphore, Interrupting(real, too_early))
    with pytest.raises(KeyboardInterrupt):
        envs.step([1, 2, 3, 4])
    setattr(interrupted, semaphore, real)
    with pytest.raises(NoAsyncCallError):
        envs.step_wait()
    with pytest.raises(WorkerError, match=r"Nothing but close\(\) .*`step` was interrupted"):
        envs.step([1, 2, 3, 4])
    close_in_time(envs, timeout=0.3)  # the worker may never answer


def test_a_script_that_forgets_to_close_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    process = start_script(tmp_path, "envs.step([0] * 6)\nmain.envs = envs", arguments="context='forkserver'")
    pids = worker_pids(process)
    _, errors = process.communicate(timeout=20)  # generous: the machine may be busy
    assert (process.returncode, errors) == (0, "")
    assert not wait_until_dead(pids, 2.0)


@pytest.mark.filterwarnings("ignore:.*ERROR")
def test_a_lost_worker_is_not_blamed_on_what_another_one_answered_before(tmp_path: Path) -> None:
    """That worker still steps when the other one is found dead; its last reply is to a call that failed."""
    (gate := tmp_path / "gate").touch()
    envs = SubprocVecEnv([partial(FaultyEnv, "os._exit", "step"), partial(GateEnv, gate)], 2, step_timeout=20.0)
    envs.reset(seed=0)
    with pytest.raises(WorkerError, match="lacks get_state"):
        envs.get_state()
    envs.step(np.array([0, 0]))
    gate.unlink()
    with pytest.raises(WorkerError, match=r"Worker 0 \(process \d+\) exited with code 3 during step"):
        envs.step(np.array([0, 0]))
    envs.close(terminate=True)


def test_a_default_timeout_of_sockets_does_not_hurry_the_workers() -> None:
    """A program may have set one for its downloads; pipes to workers must still wait."""
    socket.setdefaulttimeout(30.0)
    try:
        envs = SubprocVecEnv([BigEnv, BigEnv], 2)
        assert all(os.get_blocking(worker.pipe.fileno()) for worker in envs._pool.workers)
        envs.set_attr("cargo", [BigEnv.big] * 2)  # more than the pipe's buffer, so that both sides have to wait
        assert envs.get_attr("cargo") == (BigEnv.big,) * 2
        envs.close()
    finally:
        socket.setdefaulttimeout(None)


def test_a_vector_environment_that_is_garbage_collected_takes_its_workers_and_memory_along() -> None:
    open_before = set(os.listdir("/proc/self/fd"))
    envs = four_envs("none", "nowhere")
    pids = [worker.process.pid for worker in envs._pool.workers]
    envs.reset()
    del envs
    gc.collect()
    assert not wait_until_dead(pids, 1.0)
    assert set(os.listdir("/proc/self/fd")) <= open_before


@pytest.mark.parametrize("kind", ["own words", "own arguments"])
def test_an_exception_with_a_constructor_of_its_own_is_reported_in_full(kind: str) -> None:
    envs = four_envs(kind, "reset")
    expected = {"own words": "fixed text", "own arguments": "code 7"}[kind]
    with pytest.raises(WorkerError, match=rf"environment 3 \(seed 3.*{expected}(.|\n)*in fail") as caught:
        envs.reset(seed=0)
    assert isinstance(caught.value, {"own words": OwnWordsError, "own arguments": OwnArgumentsError}[kind])
    close_in_time(envs)


def test_an_argument_that_cannot_be_pickled_changes_nothing() -> None:
    envs = four_envs("none", "nowhere", step_timeout=3.0)
    envs.reset()
    for _ in range(3):
        with pytest.raises(Exception, match=r"(?i)pickle"):
            envs.set_attr("limit", lambda: 50)
        assert envs.step([1, 2, 3, 4])[1].tolist() == [1, 2, 3, 4]
    close_in_time(envs)


def test_a_replacement_that_cannot_be_made_ends_it(tmp_path: Path) -> None:
    once, broken = tmp_path / "once", tmp_path / "broken"

    def env_fn() -> gym.Env:
        if broken.exists():
            raise ValueError("the workshop is closed")
        return FaultyEnv("sigkill", "step", once)

    envs = SubprocVecEnv([CountEnv, env_fn], 2, on_worker_failure="restart", context="fork", autoreset_mode="SameStep")
    envs.reset()
    broken.touch()
    envs.step([0, 0])
    with pytest.raises(WorkerError, match="the workshop is closed"):
        envs.step([0, 0])
    with pytest.raises(NoAsyncCallError):  # in place of the results of a step that was never finished
        envs.step_wait()
    with pytest.raises(WorkerError, match="Nothing but close"):
        envs.step([0, 0])
    close_in_time(envs)


class GateEnv(CountEnv):
    """Waits in `step` until a file exists."""

    def __init__(self, gate: Path) -> None:
        super().__init__(limit=50)
        self.gate = gate

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        while not self.gate.exists():
            time.sleep(0.01)
        return super().step(action)


def test_a_forked_child_can_neither_command_the_workers_nor_end_them() -> None:
    envs = four_envs("none", "nowhere")
    envs.reset()
    envs.step_async([1, 2, 3, 4])
    child = os.fork()
    if child == 0:
        try:
            for use in (partial(envs.step, [0] * 4), envs.step_wait, envs.reset, envs.get_state):
                with pytest.raises(RuntimeError, match="obeys only the process that made it: make one in the child"):
                    use()
            envs.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert envs.step_wait()[1].tolist() == [1, 2, 3, 4]
    assert envs.step([1, 2, 3, 4])[1].tolist() == [1, 2, 3, 4]
    close_in_time(envs)


def test_making_and_closing_many_leaks_nothing() -> None:
    def cycle() -> None:
        envs = four_envs("none", "nowhere")
        envs.reset()
        envs.step([0, 0, 0, 0])
        envs.close()

    cycle()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        cycle()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


# ---- restarts ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*WARN")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("context", "kind"), [("fork", "sigkill"), ("fork", "hang")])
def test_a_lost_worker_is_replaced_and_only_its_episodes_end(
    context: str, kind: str, mode: Any, tmp_path: Path
) -> None:
    envs = four_envs(
        kind, "step", tmp_path / "failed", context=context, autoreset_mode=mode, on_worker_failure="restart"
    )
    if kind == "hang":
        envs._pool.step_timeout = 1.0
    envs.reset(seed=10)
    assert envs.step([1, 2, 3, 4])[0].tolist() == [1, 1, 1, 1]
    observations, rewards, terminations, truncations, infos = envs.step([1, 2, 3, 4])
    same_step = mode.name == "SAME_STEP"
    assert observations.tolist() == ([2, 2, 0, 0] if same_step else [2, 2, 1, 1])
    assert rewards.tolist() == [1, 2, 0, 0]
    assert terminations.tolist() == [False] * 4
    assert truncations.tolist() == [False, False, True, True]
    assert infos["worker_restarted"].tolist() == [False, False, True, True]
    if same_step:
        assert infos["final_obs"].tolist() == [None, None, 1, 1]
        assert infos["_final_info"].tolist() == [False, False, True, True]
    else:
        assert "final_obs" not in infos
    if mode.name == "DISABLED":
        envs.reset(options={"reset_mask": truncations})
    *_, infos = envs.step([1, 2, 3, 4])
    assert "worker_restarted" not in infos
    assert envs.call("count") == ((3, 3, 0, 0) if mode.name == "NEXT_STEP" else (3, 3, 1, 1))
    assert envs.np_random_seed == (10, 11, 14, 15)  # new seeds, and of no other environment
    close_in_time(envs)


@pytest.mark.filterwarnings("ignore:.*WARN")
def test_a_replacement_ends_its_episodes_even_if_the_wait_for_others_timed_out(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env_fns = [partial(FaultyEnv, "sigkill", "every step", tmp_path / "failed"), partial(GateEnv, gate)]
    envs = SubprocVecEnv(env_fns, 2, on_worker_failure="restart", autoreset_mode="SameStep")
    envs.reset(seed=10)
    envs.step_async([1, 2])
    with pytest.raises(multiprocessing.TimeoutError):
        envs.step_wait(timeout=0.2)
    gate.touch()
    _, rewards, _, truncations, infos = envs.step_wait()
    assert (rewards.tolist(), truncations.tolist()) == ([0, 2], [True, False])
    assert infos["worker_restarted"].tolist() == [True, False]
    _, rewards, _, truncations, infos = envs.step([1, 2])
    assert (rewards.tolist(), truncations.tolist(), infos) == ([1, 2], [False, False], {})
    close_in_time(envs)


@pytest.mark.filterwarnings("ignore:.*WARN")
def test_a_worker_lost_in_reset_is_replaced_and_reset_again(tmp_path: Path) -> None:
    envs = four_envs("sigkill", "reset", tmp_path / "failed", on_worker_failure="restart")
    observations, infos = envs.reset(seed=10)
    assert observations.tolist() == [0, 0, 0, 0]
    assert infos["worker_restarted"].tolist() == [False, False, True, True]
    assert envs.np_random_seed == (10, 11, 12, 13)
    assert envs.reset()[1] == {}
    close_in_time(envs)


@pytest.mark.filterwarnings("ignore:.*WARN")
@pytest.mark.parametrize(("chosen", "replaced"), [(3, False), (2, True)])
def test_a_worker_lost_in_a_masked_reset_is_replaced_only_if_all_its_environments_were_to_be_reset(
    chosen: int, replaced: bool
) -> None:
    envs = four_envs("none", "nowhere", autoreset_mode="Disabled", on_worker_failure="restart")
    envs.reset()
    envs.step([0, 0, 0, 0])
    os.kill(envs._pool.workers[1].process.pid, signal.SIGKILL)
    options = {"reset_mask": np.arange(4) >= chosen}
    if replaced:
        observations, infos = envs.reset(options=options)
        assert observations.tolist() == [1, 1, 0, 0]
        assert infos["worker_restarted"].tolist() == [False, False, True, True]
        assert envs.step([0, 0, 0, 0])[0].tolist() == [2, 2, 1, 1]
    else:
        with pytest.raises(WorkerError, match=r"Worker 1 .*was killed by SIGKILL"):
            envs.reset(options=options)
    close_in_time(envs)


@pytest.mark.filterwarnings("ignore:.*WARN")
@pytest.mark.parametrize("place", ["reset", "every step", "constructor"])
def test_a_worker_that_dies_again_and_again_ends_the_run_with_the_cause(place: str, tmp_path: Path) -> None:
    if place == "constructor":
        envs = SubprocVecEnv([CountEnv, partial(SecondTimeEnv, tmp_path / "made")], 2, on_worker_failure="restart")
        os.kill(envs._pool.workers[1].process.pid, signal.SIGKILL)
        actions, text = [0, 0], "exited with code 3 during construction"
    else:
        envs = four_envs("sigkill", place, on_worker_failure="restart")
        actions, text = [0, 0, 0, 0], f"was killed by SIGKILL .* during {place.split()[-1]}"
    with pytest.raises(WorkerError, match=f"Gave up after 3 restarts without a finished step.*{text}"):
        reset_and_step(envs, actions)
    close_in_time(envs)


def reset_and_step(envs: SubprocVecEnv, actions: list[int]) -> None:
    envs.reset()
    for _ in range(10):
        envs.step(actions)


class SecondTimeEnv(CountEnv):
    """Can be made once only."""

    def __init__(self, made: Path) -> None:
        super().__init__()
        if made.exists():
            os._exit(3)
        made.touch()


@pytest.mark.filterwarnings("ignore:.*ERROR")
def test_an_exception_is_raised_even_if_workers_are_restarted() -> None:
    envs = four_envs("exception", "step", on_worker_failure="restart")
    envs.reset()
    envs.step([0, 0, 0, 0])
    with pytest.raises(ValueError, match="the door is stuck"):
        envs.step([0, 0, 0, 0])
    close_in_time(envs)


class TraceableEnv(gym.Env):
    """Each observation tells (environment, process, episode, step, last action), so that every mix-up shows."""

    observation_space = Box(-1, np.inf, (5,), np.float64)
    action_space = Discrete(1000)

    def __init__(self, index: int) -> None:
        self.index, self.episode, self.count = index, 0, 0

    def observe(self, action: int) -> np.ndarray:
        return np.array([self.index, os.getpid(), self.episode, self.count, action], np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self.observe(-1), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        return self.observe(action), action / 7, self.count % (11 + self.index) == 0, False, {"count": self.count}


def soak(seconds: float, seconds_between_kills: float, min_restarts: int) -> None:
    """Step while a killer kills random workers; check every transition, and that nothing grows."""
    num_envs = 8
    env_fns = [partial(TraceableEnv, n) for n in range(num_envs)]
    envs = SubprocVecEnv(env_fns, 3, autoreset_mode="SameStep", on_worker_failure="restart", step_timeout=20.0)
    stop = threading.Event()

    def kill_now_and_then() -> None:
        while not stop.wait(seconds_between_kills):
            try:
                # Not one that was just replaced: on a busy machine it might be killed 4 times before its first step.
                victim = random.choice([worker for worker in envs._pool.workers if worker.failures == 0])
                os.kill(victim.process.pid, signal.SIGKILL)
            except (ProcessLookupError, ValueError, AttributeError, IndexError):
                pass  # is just being replaced

    observations, _ = envs.reset(seed=0)
    generator = np.random.default_rng(0)
    descriptors = memory = restarts = 0
    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end or restarts < min_restarts:
            actions = generator.integers(0, 1000, num_envs)
            following, rewards, terminations, truncations, infos = envs.step(actions)
            restarted = infos.get("worker_restarted", np.zeros(num_envs, bool))
            for n in range(num_envs):
                led_to = infos["final_obs"][n] if terminations[n] or truncations[n] else following[n]
                if restarted[n]:
                    assert truncations[n] and not terminations[n]  # noqa: PT018
                    assert rewards[n] == 0
                    assert led_to.tolist() == observations[n].tolist()
                    assert following[n].tolist() == [n, following[n][1], 1, 0, -1]
                    assert following[n][1] != observations[n][1]
                else:
                    index, pid, episode, count, _ = observations[n]
                    assert led_to.tolist() == [index, pid, episode, count + 1, actions[n]]
                    assert rewards[n] == actions[n] / 7
                    assert not truncations[n]
                    assert terminations[n] == ((count + 1) % (11 + n) == 0)
                    if terminations[n]:
                        assert following[n].tolist() == [n, pid, episode + 1, 0, -1]
                    else:
                        assert infos["count"][n] == count + 1
            observations, restarts = following, restarts + int(restarted.any())
            if restarts == 3 and not descriptors:  # everything has been made once by now
                descriptors = len(os.listdir("/proc/self/fd"))
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    finally:
        stop.set()
        killer.join()
    assert restarts >= min_restarts > 3
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= memory + 30_000  # KB
    assert len(children()) <= 3
    close_in_time(envs)


@pytest.mark.filterwarnings("ignore:.*WARN")
def test_every_transition_is_valid_while_workers_are_killed() -> None:
    soak(seconds=0.0, seconds_between_kills=0.1, min_restarts=5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*WARN")
def test_soak_of_three_minutes_with_a_kill_every_half_second() -> None:
    soak(seconds=180.0, seconds_between_kills=0.5, min_restarts=100)
