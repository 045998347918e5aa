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
from envs.state import NoState
from envs.subproc_vec_env import SubprocVecEnv, WorkerError
from tests.test_subproc_vec_env import CONTEXTS, MODES, CountEnv

ROOT = Path(__file__).parent.parent
SEMAPHORES = f"mp{os.getpid()}"  # what the names of our semaphores, and of our scripts' ones, in /dev/shm begin with

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.xdist_group("faults"),
    pytest.mark.filterwarnings("ignore:.*ERROR", "ignore:.*WARN"),
]


class UnpicklableError(Exception):
    """Refuses to be pickled, as exceptions that hold sockets, locks or C objects do."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class OwnArgumentsError(RuntimeError):
    """Cannot be made of a text."""

    def __init__(self, result: Any) -> None:
        super().__init__(f"code {result.code}")


# What happens, as what it is caught, and what is said of it ({}: in which call).
NO_ANSWER = "did not answer within step_timeout=1.0 s .*"
FAULTS: dict[str, tuple[Any, type[BaseException], str]] = {
    "exception": (ValueError("the door is stuck"), ValueError, "the door is stuck"),
    "unpicklable": (UnpicklableError("a secret"), UnpicklableError, "a secret"),
    "key error": (KeyError("door"), KeyError, "'door'"),
    "os error": (FileNotFoundError(2, "no such door"), WorkerError, "no such door"),
    "own arguments": (OwnArgumentsError(SimpleNamespace(code=7)), OwnArgumentsError, "code 7"),
    "sys.exit": (SystemExit(3), WorkerError, "3"),
    "sigkill": (lambda: os.kill(os.getpid(), signal.SIGKILL), WorkerError, "was killed by SIGKILL .* during {}"),
    "sigsegv": (lambda: ctypes.string_at(0), WorkerError, "was killed by SIGSEGV during {}"),
    "os._exit": (lambda: os._exit(3), WorkerError, "exited with code 3 during {}"),
    "hang": (lambda: time.sleep(60), multiprocessing.TimeoutError, f"{NO_ANSWER} during {{}}"),
    # keeps the GIL, so that no Python code of it runs
    "hang in C": (lambda: ctypes.PyDLL(None).usleep(60_000_000), multiprocessing.TimeoutError, NO_ANSWER),
}
EXCEPTIONS = {kind for kind, (fault, *_) in FAULTS.items() if isinstance(fault, BaseException)}


def fail(kind: str) -> None:
    if kind in EXCEPTIONS:
        raise FAULTS[kind][0]
    FAULTS[kind][0]()


class FaultyEnv(CountEnv):
    """Fails as told: in its constructor, in reset, its second step, every step or close; or only `once`, a file."""

    def __init__(self, kind: str, place: str, once: Path | None = None) -> None:
        super().__init__(limit=50)
        self.kind, self.place, self.once = kind, place, once
        self.fail_in("constructor")

    def fail_in(self, place: str) -> None:
        if self.place != place or (self.once is not None and self.once.exists()):
            return
        if self.once is not None:
            self.once.touch()
        if self.kind != "nothing":
            fail(self.kind)

    def reset(self, **kwargs: Any) -> tuple[int, dict]:
        self.fail_in("reset")
        return super().reset(**kwargs)

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.fail_in("every step")
        if self.count == 1:
            self.fail_in("step")
        return super().step(action)

    def close(self) -> None:
        self.fail_in("close")


def four_envs(kind: str = "none", place: str = "nowhere", once: Path | None = None, **kwargs: Any) -> SubprocVecEnv:
    """Environment 3, the second one of worker 1, is the faulty one."""
    env_fns = [partial(CountEnv, 50)] * 3 + [partial(FaultyEnv, kind, place, once)]
    return SubprocVecEnv(env_fns, 2, **{"step_timeout": 20.0, "autoreset_mode": "SameStep", **kwargs})


# ---- what is left -----------------------------------------------------------------------------------------------
def workers() -> set[str]:
    """The names of our living workers."""
    return {child.name for child in multiprocessing.active_children() if child.name.startswith("SubprocVecEnv")}


def is_alive(pid: int) -> bool:
    """Whether a process still runs: one that has ended and that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def are_dead(pids: Any, seconds: float = 2.0) -> bool:
    """Whether none of these processes lives after so many seconds."""
    return becomes_true(lambda: not any(map(is_alive, pids)), seconds)


def pids_of(envs: SubprocVecEnv) -> list[int]:
    return [worker.process.pid for worker in envs._pool.workers if worker.process is not None]


def close_in_time(envs: SubprocVecEnv, seconds: float = 5.0, **kwargs: Any) -> None:
    pids, start = pids_of(envs), time.monotonic()
    envs.close(**kwargs)
    assert time.monotonic() - start < seconds
    assert are_dead(pids, 0.1)


def in_dev_shm() -> set[str]:
    """The semaphores with our prefix. Arrays are in a file without a name; other processes' names are not our doing."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"sem.{SEMAPHORES}-")}


@pytest.fixture(autouse=True, scope="module")
def what_other_tests_left_is_frozen() -> Iterator[None]:
    """Else the collections around each test would go through all of it again, and forks would copy it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, no worker and no shared memory is left."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "semprefix", f"/{SEMAPHORES}")
    before = workers() | in_dev_shm()
    yield
    gc.collect()
    assert becomes_true(lambda: workers() | in_dev_shm() <= before, 2.0), workers() | in_dev_shm()


def test_what_is_left_would_be_seen() -> None:
    envs = SubprocVecEnv([CountEnv] * 2, 2, context="forkserver")
    assert (len(workers()), len(in_dev_shm())) == (2, 4)  # two semaphores each; under fork they have no names
    envs.close()


# ---- faults of one environment ----------------------------------------------------------------------------------
# How a fault is noticed does not depend on how the worker was started: elsewhere a fault of each nature will do.
CASES = [
    *[("fork", place, kind) for place in ("constructor", "reset", "step") for kind in FAULTS],
    *[(context, "step", kind) for context in CONTEXTS[1:] for kind in ("unpicklable", "sigkill", "hang in C")],
    *[("forkserver", "constructor", "exception"), ("spawn", "constructor", "sigkill")],
]


@pytest.mark.parametrize(("context", "place", "kind"), CASES)
def test_a_fault_is_reported_with_its_cause(context: str, place: str, kind: str) -> None:
    _, caught_as, text = FAULTS[kind]
    if kind in EXCEPTIONS:
        name = type(FAULTS[kind][0]).__name__
        text = rf"^{name} during {{}} in environment 3.*: .*{text}.*\n\nTraceback(?s:.)*in fail"
    else:
        text = rf"Worker 1 \(process \d+\) {text}.*, in environment 3"
    made: list[SubprocVecEnv] = []
    start = time.monotonic()
    with pytest.raises(caught_as, match=text.format("construction" if place == "constructor" else place)) as caught:
        make_and_step_twice(made, context, place, kind)
    assert time.monotonic() - start < 15.0
    assert isinstance(caught.value, WorkerError)
    assert ("(last action 8)" in str(caught.value)) == (place == "step")
    assert len(made) == (place != "constructor")
    for envs in made:
        with pytest.raises(WorkerError, match="Nothing but close"):
            envs.step([5, 6, 7, 8])
        close_in_time(envs)


def make_and_step_twice(made: list[SubprocVecEnv], context: str, place: str, kind: str) -> None:
    step_timeout = 1.0 if kind.startswith("hang") else 20.0
    at_first = step_timeout if place == "constructor" else 20.0  # spawning may take a second
    what_to_do = "restart" if kind in EXCEPTIONS else "raise"  # an exception is raised either way
    made.append(four_envs(kind, place, context=context, step_timeout=at_first, on_worker_failure=what_to_do))
    made[0]._pool.step_timeout = step_timeout
    reset_and_step(made[0], 2)


def reset_and_step(envs: SubprocVecEnv, num_steps: int) -> None:
    envs.reset(seed=10)
    for _ in range(num_steps):
        envs.step(np.arange(5, 5 + envs.num_envs))


class DeepEnv(CountEnv):
    """Raises from forty calls down, with a message of forty lines."""

    def step(self, action: int, depth: int = 40) -> Any:
        if depth > 0:
            return self.step(action, depth - 1)
        raise ValueError("the door is stuck\n" * 40)


def test_what_environments_raise_is_reported_in_25_lines_the_cause_first_without_our_frames() -> None:
    envs = SubprocVecEnv([CountEnv] + [DeepEnv] * 15, 16)
    envs.reset()
    envs.step_async([0] * 16)
    assert becomes_true(lambda: all(worker.done.get_value() > 0 for worker in envs._pool.workers), 20.0)
    with pytest.raises(ValueError, match=r"^ValueError during step in environment 1 \(.*the door is stuck") as caught:
        envs.step_wait()
    text = str(caught.value)
    assert "14 other environments raised as well" in text
    assert text.count("Traceback") == 1
    assert "_subproc_worker" not in text
    assert len(text.splitlines()) <= 25
    close_in_time(envs)


@pytest.mark.parametrize("kind", ["sigkill", "hang"])
@pytest.mark.parametrize(("raises_first", "num_workers"), [(False, 2), (True, 2), (True, 1)])
def test_an_exception_is_reported_even_if_a_worker_is_lost(kind: str, raises_first: bool, num_workers: int) -> None:
    env_fns = [partial(FaultyEnv, kind, "step"), partial(FaultyEnv, "exception", "step")]
    envs = SubprocVecEnv(env_fns[:: -1 if raises_first else 1], num_workers)
    envs.reset()
    envs.step([0, 0])
    envs.step_async([0, 0])
    raising = envs._pool.workers[0 if raises_first else 1]
    assert becomes_true(lambda: raising.done.get_value() > 0, 20.0)  # until the exception is there
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"step in environment [01] .*the door is stuck"):
        envs.step_wait()
    assert time.monotonic() - start < 5.0  # without waiting for the one that hangs
    close_in_time(envs)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "cannot unpack"),
        ((1, 0.0, False, False, {"lock": threading.Lock()}), "cannot pickle.*lock"),
        (([1, 2], 0.0, False, False, {}), "expected an array of shape"),
        ((1, None, False, False, {}), "real number"),
        ((1, "much", False, False, {}), "much"),
        ((0.9, 0.0, False, False, {}), "Cannot cast"),
    ],
)
def test_what_no_step_may_return_is_an_error_of_its_environment(result: Any, text: str) -> None:
    class OddEnv(CountEnv):
        def step(self, action: int) -> Any:
            return result

    envs = SubprocVecEnv([CountEnv, CountEnv, OddEnv, CountEnv], 2, context="fork")
    envs.reset()
    with pytest.raises(WorkerError, match=f"step in environment 2 .*({text})") as caught:
        envs.step([0, 0, 0, 0])
    assert isinstance(caught.value, TypeError | ValueError)
    close_in_time(envs)


@pytest.mark.parametrize(("how", "text"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, NO_ANSWER)])
def test_an_idle_worker_that_is_killed_or_stopped_is_noticed(how: signal.Signals, text: str) -> None:
    envs = four_envs()
    envs.reset()
    envs._pool.step_timeout = 1.0
    os.kill(pids_of(envs)[0], how)
    with pytest.raises(WorkerError, match=f"Worker 0 .*{text}.*none of its environments running"):
        envs.step([0, 0, 0, 0])
    close_in_time(envs)


@pytest.mark.parametrize(("how", "text"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "did not answer")])
@pytest.mark.parametrize("reading", [True, False])  # the long message is its reply, or a command to it
def test_a_worker_that_is_lost_in_the_middle_of_a_long_message_is_reported(how: Any, text: str, reading: bool) -> None:
    envs = SubprocVecEnv([CountEnv] * 2, 2, step_timeout=3.0)
    envs.set_attr("big", bytes(4_000_000))
    pool = envs._pool
    if reading:
        pool.request("call", [(n, ("big", (), {})) for n in range(2)], pool.workers)
        assert becomes_true(lambda: pool.workers[0].pipe.poll(0), 20.0)  # now it waits in the middle of its reply
    os.kill(pids_of(envs)[0], how)
    with pytest.raises(WorkerError, match=rf"Worker 0 .*{text} .*during (call|set_attr)"):
        pool.collect("call", pool.workers) if reading else envs.set_attr("big", bytes(4_000_000))
    close_in_time(envs)


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


# ---- close ------------------------------------------------------------------------------------------------------
HANGS = partial(FaultyEnv, "hang", "every step")
HANGS_IN_C = partial(FaultyEnv, "hang in C", "every step")
STUBBORN = partial(FaultyEnv, "hang", "close")


@pytest.mark.parametrize(
    ("env_fn", "kwargs", "others_close"),
    [(HANGS, {"timeout": 1.0}, True), (STUBBORN, {"timeout": 1.0}, True), (HANGS, {"terminate": True}, False)],
)
@pytest.mark.parametrize("place", [0, 1])
def test_hangs_and_closing(env_fn: Any, kwargs: dict[str, Any], others_close: bool, place: int, tmp_path: Path) -> None:
    env_fns: list[Any] = [partial(FaultyEnv, "nothing", "close", tmp_path / "closed")]
    env_fns.insert(place, env_fn)
    envs = SubprocVecEnv(env_fns, 2)
    envs.reset()
    if env_fn is HANGS:
        envs.step_async([0, 0])
    close_in_time(envs, CLOSE_SECONDS, **kwargs)
    assert (tmp_path / "closed").exists() == others_close


def test_a_constructor_that_raises_waits_for_no_other_and_all_that_were_made_are_closed(tmp_path: Path) -> None:
    start = time.monotonic()
    hangs, raises = (partial(FaultyEnv, kind, "constructor") for kind in ("hang", "exception"))
    with pytest.raises(ValueError, match=r"ValueError during construction in environment 2: the door is stuck"):
        SubprocVecEnv([hangs, partial(FaultyEnv, "nothing", "close", tmp_path / "closed"), raises], 2)
    assert time.monotonic() - start < 8.0
    assert (tmp_path / "closed").exists()


def test_a_full_dev_shm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", no_room)
    with pytest.raises(OSError, match="/dev/shm is full"):
        SubprocVecEnv([CountEnv] * 2, 2)


def test_too_few_file_descriptors_are_named() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too few file descriptors .*raise `ulimit -n` \(16 workers\)"):
            SubprocVecEnv([CountEnv] * 16, 16, context="fork")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("closed", [True, False])
def test_one_that_is_closed_or_garbage_collected_takes_its_workers_and_memory_along(closed: bool) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        envs = four_envs()
        envs.reset()
        pids = pids_of(envs)
        if closed:
            envs.close()
        del envs
        gc.collect()
        assert are_dead(pids, 1.0)
    assert len(os.listdir("/proc/self/fd")) <= open_before


@pytest.mark.parametrize("closing", [False, True])
def test_a_forked_child_that_drops_or_closes_it_leaves_the_workers_alone(closing: bool) -> None:
    envs = four_envs()
    envs.reset()
    child = os.fork()
    if child == 0:
        if closing:
            envs.close()
        del envs
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert envs.step([1, 2, 3, 4])[1].tolist() == [1, 2, 3, 4]
    close_in_time(envs)


# ---- faults of the parent ---------------------------------------------------------------------------------------
def run_script(body: str, env: Any, context: str) -> None:
    """Make `envs` with 3 workers in a thread, which they must outlive, print their ids, and run `body`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits "ignore SIGINT"
    multiprocessing.current_process()._config["semprefix"] = os.environ["SEMPREFIX"]
    made: list[SubprocVecEnv] = []
    thread = threading.Thread(target=lambda: made.append(SubprocVecEnv([env] * 6, 3, context=context)))
    thread.start()
    thread.join()
    made[0].reset(seed=0)
    print(*pids_of(made[0]), flush=True)
    exec(body, {**globals(), "envs": made.pop()})


def start_script(body: str, env: str = "CountEnv", context: str = "fork") -> tuple[Any, list[int]]:
    """Start a Python process that runs `body` with its `envs`; return it and the ids of its workers."""
    program = f"from tests.test_subproc_faults import *; run_script({body!r}, {env}, {context!r})"
    process: Any = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SEMPREFIX": f"/{SEMAPHORES}"}, start_new_session=True,
    )  # fmt: skip
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 3, process.communicate()[1]
    return process, pids


class ProgramEnv(CountEnv):
    """Runs a program, as simulators in other languages do, and has no time to close it."""

    def __init__(self) -> None:
        super().__init__()
        self.program = subprocess.Popen(["sleep", "60"])


FORK = "child = os.fork()\nif child == 0:\n    os.close(1); os.close(2); time.sleep(60); os._exit(0)\n"
SCRIPTS = {
    "idle": ("CountEnv", ""),
    "with programs": ("ProgramEnv", ""),
    "busy": ("HANGS_IN_C", "envs.step_async([0] * 6)\n"),
    "with a child": ("CountEnv", FORK),  # which has inherited all that the parent held open, and lives on
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("doing", SCRIPTS)
def test_no_worker_outlives_a_parent_that_is_killed(context: str, doing: str) -> None:
    env, body = SCRIPTS[doing]
    process, pids = start_script("child = None\n" + body + "print(child, flush=True)\ntime.sleep(60)", env, context)
    child = process.stdout.readline()
    assert all(map(is_alive, pids))
    process.kill()
    assert are_dead(pids)
    if doing == "with a child":  # multiprocessing's tracker of shared memory, an heir of stderr, waits for that
        os.kill(int(child), signal.SIGKILL)
    process.communicate(timeout=10)  # none of its children holds its output open


def test_signals_to_all_processes_are_the_parents_to_handle_and_a_script_that_forgets_to_close_ends() -> None:
    body = (
        "seen = []\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):\n"
        "    signal.signal(number, lambda number, frame: seen.append(number))\n"
        "print('ready', flush=True)\n"
        "for n in range(4):\n"
        "    while len(seen) == n:\n"
        "        envs.step([0] * 6)\n"
        "    print('seen', flush=True)\n"
        "for _ in range(100):\n"
        "    envs.step([0] * 6)\n"
        "print('limits', *envs.get_attr('limit'), flush=True)\n"
    )
    process, pids = start_script(body)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        assert process.stdout.readline() in ("ready\n", "seen\n")
        for pid in [*pids, process.pid]:
            os.kill(pid, number)
    output, errors = process.communicate(timeout=20)  # generous: the machine may be busy
    assert (output, errors, process.returncode) == ("seen\nlimits 3 3 3 3 3 3\n", "", 0)
    assert are_dead(pids)


@pytest.mark.parametrize(("env", "context"), [("CountEnv", "forkserver"), ("HANGS_IN_C", "fork")])
def test_ctrl_c_that_nobody_handles_ends_everything_in_time(env: str, context: str) -> None:
    process, pids = start_script("while True:\n    envs.step([0] * 6)", env, context)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)  # generous: the machine may be busy
    # Only the parent reports it. The interrupted line may itself have been handling an error, which is then shown too.
    assert [line for line in errors.splitlines() if not line.startswith(" ")].count("KeyboardInterrupt") == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert are_dead(pids)


@pytest.mark.parametrize("semaphore", ["go", "done"])
def test_ctrl_c_in_the_middle_of_a_step_leaves_only_close(semaphore: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def press_ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    envs = four_envs()
    envs.reset()
    with monkeypatch.context() as patch:
        patch.setattr(envs._pool.workers[1], semaphore, SimpleNamespace(release=press_ctrl_c, acquire=press_ctrl_c))
        with pytest.raises(KeyboardInterrupt):
            envs.step([1, 2, 3, 4])
    with pytest.raises(NoAsyncCallError):
        envs.step_wait()
    with pytest.raises(WorkerError, match=r"Nothing but close\(\) .*`step` was interrupted"):
        envs.step([1, 2, 3, 4])
    close_in_time(envs)


# ---- restarts ---------------------------------------------------------------------------------------------------
class GateEnv(CountEnv):
    """Waits in `step` until a file exists."""

    def __init__(self, gate: Path) -> None:
        super().__init__(limit=50)
        self.gate = gate

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        while not self.gate.exists():
            time.sleep(0.01)
        return super().step(action)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", ["sigkill", "hang"])
def test_a_lost_worker_is_replaced_and_only_its_episodes_end(kind: str, mode: Any, tmp_path: Path) -> None:
    envs = four_envs(kind, "step", tmp_path / "failed", autoreset_mode=mode, on_worker_failure="restart")
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
    seeds = envs.np_random_seed
    assert seeds[:2] == (10, 11)
    assert not {12, 13}.intersection(seeds)  # which might lead to the same end again
    close_in_time(envs)


def test_a_replacement_ends_its_episodes_even_if_the_wait_for_others_timed_out(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env_fns = [partial(FaultyEnv, "sigkill", "every step", tmp_path / "failed"), partial(GateEnv, gate)]
    envs = SubprocVecEnv(env_fns, 2, on_worker_failure="restart", autoreset_mode="SameStep")
    envs.reset(seed=10)
    envs.step_async([1, 2])
    with pytest.raises(multiprocessing.TimeoutError, match=r"`step_wait` has timed out after 0.2 second"):
        envs.step_wait(timeout=0.2)
    gate.touch()
    _, rewards, _, truncations, infos = envs.step_wait()
    assert (rewards.tolist(), truncations.tolist()) == ([0, 2], [True, False])
    assert infos["worker_restarted"].tolist() == [True, False]
    _, rewards, _, truncations, infos = envs.step([1, 2])
    assert (rewards.tolist(), truncations.tolist(), infos) == ([1, 2], [False, False], {})
    close_in_time(envs)


@pytest.mark.parametrize("masked", [False, True])
def test_a_worker_lost_in_reset_is_replaced_and_reset_again_but_for_a_mask(masked: bool) -> None:
    envs = four_envs(autoreset_mode="Disabled", on_worker_failure="restart")
    envs.reset()
    envs.step([0, 0, 0, 0])
    os.kill(pids_of(envs)[1], signal.SIGKILL)
    envs._pool.workers[1].process.join()
    with pytest.raises(NoState, match="a worker is lost"):
        envs.get_state()
    if masked:
        with pytest.raises(WorkerError, match=r"Worker 1 .*was killed by SIGKILL"):
            envs.reset(options={"reset_mask": np.array([False, False, False, True])})
    else:
        assert envs.reset(seed=10)[0].tolist() == [0, 0, 0, 0]
        assert envs.np_random_seed == (10, 11, 12, 13)
        assert envs.step([0, 0, 0, 0])[0].tolist() == [1, 1, 1, 1]
    close_in_time(envs)


GAVE_UP = "Gave up after 3 restarts without a finished step"


@pytest.mark.parametrize(
    ("kind", "place", "text"),
    [
        ("sigkill", "reset", f"{GAVE_UP}.* was killed by SIGKILL .* during reset"),
        ("sigkill", "every step", f"{GAVE_UP}.* was killed by SIGKILL .* during step"),
        ("os._exit", "second constructor", f"{GAVE_UP}.* exited with code 3 during construction"),
        ("exception", "second constructor", "ValueError during construction in environment 1: the door is stuck"),
    ],
)
def test_a_worker_that_dies_again_and_again_ends_the_run(kind: str, place: str, text: str, tmp_path: Path) -> None:
    def env_fn() -> gym.Env:
        if place != "second constructor":
            return FaultyEnv(kind, place)
        if (tmp_path / "made").exists():
            fail(kind)
        (tmp_path / "made").touch()
        return FaultyEnv("sigkill", "every step")

    envs = SubprocVecEnv([CountEnv, env_fn], 2, on_worker_failure="restart", context="fork", autoreset_mode="SameStep")
    with pytest.raises(WorkerError, match=text):
        reset_and_step(envs, 10)
    with pytest.raises(NoAsyncCallError):  # in place of the results of a step that was never finished
        envs.step_wait()
    with pytest.raises(WorkerError, match="Nothing but close"):
        envs.step([0, 0])
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


@pytest.mark.parametrize(
    ("seconds", "pause", "min_restarts"),
    [(0.0, 0.1, 5), pytest.param(180.0, 0.5, 100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_transitions_are_valid_while_workers_are_killed(seconds: float, pause: float, min_restarts: int) -> None:
    """And nothing grows."""
    num_envs = 8
    env_fns = [partial(TraceableEnv, n) for n in range(num_envs)]
    envs = SubprocVecEnv(env_fns, 3, autoreset_mode="SameStep", on_worker_failure="restart", step_timeout=20.0)
    stop = threading.Event()

    def kill_now_and_then() -> None:
        while not stop.wait(pause):
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
                index, pid, episode, count, _ = observations[n]
                if restarted[n]:
                    assert (rewards[n], terminations[n], truncations[n]) == (0, False, True)
                    assert led_to.tolist() == observations[n].tolist()
                    assert (*following[n][[0, 3, 4]], following[n][1] != pid) == (n, 0, -1, True)
                    continue
                ends = (count + 1) % (11 + n) == 0
                assert (rewards[n], terminations[n], truncations[n]) == (actions[n] / 7, ends, False)
                assert led_to.tolist() == [index, pid, episode, count + 1, actions[n]]
                assert not ends or following[n].tolist() == [n, pid, episode + 1, 0, -1]
                assert ends or infos["count"][n] == count + 1
            observations, restarts = following, restarts + int(restarted.any())
            if restarts == 3 and not descriptors:  # everything has been made once by now
                descriptors = len(os.listdir("/proc/self/fd"))
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    finally:
        stop.set()
        killer.join()
    envs.step(generator.integers(0, 1000, num_envs))  # replaces who was killed last
    assert restarts >= min_restarts > 3
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= memory + 30_000  # KB
    assert len(workers()) == 3
    close_in_time(envs)
