"""What runs inside a worker process of SubprocVecEnv: a loop that steps its share of the environments in place.

A worker never outlives its parent, ignores the signals that are meant for its parent, and leaves a trace of where it
was when it crashes or hangs. Numbers travel in shared memory, all else (results of calls, texts of errors, infos of
other than numbers) as pickled messages through a pipe; two semaphores say that a command or a reply is there.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import fcntl
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, parent_process, reduction
from multiprocessing.synchronize import Semaphore
from typing import Any

from gymnasium import Env
from gymnasium.vector import AutoresetMode

from envs import state as env_state
from envs._shared_memory import SharedBatch, copies_of_rows, map_tree, row_of, write_tree

# Columns of SharedBatch.control, one row per worker.
COMMAND, REPLY, RUNNING = 0, 1, 2
STEP, MESSAGE = 0, 1  # COMMAND: step with the shared actions, or read a (name, requests) message from the pipe
EMPTY, PICKLED = 0, 1  # REPLY: all is in shared memory, or an (errors, results) message is in the pipe
IDLE = -1  # RUNNING: the index of the environment whose code is running, or IDLE

FAILED = object()  # in place of what an environment's step returns

POLL_SECONDS = 0.0005  # of polling before going to sleep: to wake a sleeper takes tens of us, a small step less
SMALL_MESSAGE = 4_096  # bytes that fit the pipe's buffer on any system
PARENT_CHECK_SECONDS = 1.0

PARENTS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
Requests = list[tuple[int, Any]]  # (environment index, arguments)
Results = list[tuple[int, Any]]  # (environment index, result)


@dataclass
class WorkerSetup:
    """Everything a worker needs to start; pickled under forkserver and spawn."""

    index: int
    env_indices: range
    env_fns: list[Callable[[], Env]]
    pipe: connection.Connection
    go: Semaphore  # the parent's: a command is there
    done: Semaphore  # the worker's: it has been obeyed
    crash_pipe: connection.Connection
    autoreset_mode: AutoresetMode
    episode_statistics: bool
    poll: bool  # before going to sleep
    inherited: list[connection.Connection]  # the parent's ends of pipes, which fork copies into the worker


@dataclass
class EnvError:
    """An exception in an environment, as text: the exception object itself may not survive pickling."""

    env_index: int
    module: str
    name: str
    message: str
    trace: str

    @classmethod
    def current(cls, env_index: int) -> EnvError:
        """Describe the exception that is being handled."""
        kind, value, _ = sys.exc_info()
        assert kind is not None
        try:
            message = str(value)
        except Exception:
            message = "(its text cannot be formatted)"
        return cls(env_index, kind.__module__, kind.__qualname__, message, traceback.format_exc())


def poll(semaphore: Semaphore) -> bool:
    """Try for POLL_SECONDS to acquire `semaphore` without going to sleep; return whether that succeeded."""
    end = time.monotonic() + POLL_SECONDS
    while not semaphore.acquire(False):
        if time.monotonic() > end:
            return False
        os.sched_yield()  # leave this core to another process that wants it
    return True


def keep_blocking(pipe: connection.Connection) -> None:
    """Undo what a socket object made of this end has done to it if the program has a socket.setdefaulttimeout: from
    then on, a read that has to wait would fail at once."""
    os.set_blocking(pipe.fileno(), True)


def worker_main(setup: WorkerSetup) -> None:
    """Construct the environments, attach to the shared memory, and obey commands until the parent says close."""
    # Ctrl-C, SIGTERM and the end of a terminal often reach the whole process group. What they mean is for the parent
    # to decide, which may want one more step and every environment's state for a checkpoint; so here they do nothing.
    # (Handlers rather than SIG_IGN, because programs that environments start would inherit SIG_IGN.)
    for number in PARENTS_SIGNALS:
        signal.signal(number, lambda *_: None)
    watch_parent()
    faulthandler.enable(setup.crash_pipe.fileno(), all_threads=False)
    faulthandler.register(signal.SIGUSR1, setup.crash_pipe.fileno(), all_threads=False)
    for pipe in setup.inherited:
        pipe.close()

    worker = Worker(setup)
    try:
        if worker.start():
            worker.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone, or this worker is not wanted any more
    finally:
        for env in worker.envs:
            try:
                env.close()
            except BaseException:
                traceback.print_exc()


def watch_parent() -> None:
    """Make this process end when its parent does, whatever it is doing then.

    A pipe tells: the parent holds its other end (and, under fork, so do the workers started after this one, which
    therefore end before it). The kernel kills this process when that end closes, even while an environment holds the
    GIL in C code. The thread is for the case that a process forked by the parent has inherited that end and lives on.
    """
    parent, starter = parent_process(), os.getppid()  # under forkserver these are two
    assert parent is not None
    assert parent.pid is not None
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)

    signs = [parent.sentinel]
    with contextlib.suppress(AttributeError, OSError):  # Python's C library, or the kernel, may be too old for it
        signs.append(os.pidfd_open(parent.pid))

    def watch() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # a request for a trace is for the main thread
        while os.getppid() == starter and not connection.wait(signs, PARENT_CHECK_SECONDS):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


class Worker:
    """The environments of one worker. "Slot" s holds environment `env_indices[s]`."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.first = setup.env_indices.start
        self.envs: list[Env] = []
        self.needs_reset = [False] * len(setup.env_indices)  # under NEXT_STEP: the next step resets instead
        self.returns = [0.0] * len(setup.env_indices)
        self.lengths = [0] * len(setup.env_indices)

    def start(self) -> bool:
        """Construct the environments and attach to the shared memory; return whether that succeeded."""
        pipe, env_indices, spaces = self.setup.pipe, self.setup.env_indices, list[Any]()
        try:
            for env_fn in self.setup.env_fns:
                self.envs.append(env_fn())
                spaces.append((self.envs[-1].observation_space, self.envs[-1].action_space))
            pipe.send(([], (spaces, dict(self.envs[0].metadata), self.envs[0].render_mode)))
        except BaseException:
            pipe.send(([EnvError.current(env_indices[min(len(spaces), len(env_indices) - 1)])], None))
            return False
        name, arguments = pipe.recv()
        if name == "close":
            return False
        descriptor = reduction.recv_handle(pipe)
        keep_blocking(pipe)
        self.attach(SharedBatch(*(*arguments, descriptor)))
        pipe.send(([], None))
        return True

    def attach(self, shared: SharedBatch) -> None:
        """Take views of this worker's rows; memoryviews where single numbers are written, being twice as fast."""
        shared.close()
        rows = slice(self.first, self.setup.env_indices.stop)
        self.control = shared.control[self.setup.index].data
        self.rewards: Any = shared.rewards[rows].data
        self.terminations: Any = shared.terminations[rows].data
        self.truncations: Any = shared.truncations[rows].data
        self.info_table = shared.info_table
        self.has_info: Any = shared.info_table.present[rows].data
        self.actions = map_tree(shared.actions, lambda array: array[rows])
        self.observations = [row_of(shared.observations, i) for i in self.setup.env_indices]

    def serve(self) -> None:
        """Obey commands until told to close, or until an environment has raised in `step` or `reset`."""
        setup, control = self.setup, self.control
        while True:
            if not (setup.poll and poll(setup.go)):
                setup.go.acquire()
            name, requests = ("step", None) if control[COMMAND] == STEP else setup.pipe.recv()
            if name == "close":
                return
            errors, results = getattr(self, name)(requests)
            control[RUNNING] = IDLE

            message = self.pickle(errors, results) if errors or results else b""
            control[REPLY] = PICKLED if message else EMPTY
            # What does not fit the pipe waits there until the parent, once told, reads; what fits is better sent
            # first, so that the parent does not wake only to wait.
            if 0 < len(message) <= SMALL_MESSAGE:
                setup.pipe.send_bytes(message)
            setup.done.release()
            if len(message) > SMALL_MESSAGE:
                setup.pipe.send_bytes(message)
            if errors and name in ("step", "reset"):
                return

    def pickle(self, errors: list[EnvError], results: Results) -> bytes:
        """Return the reply as bytes; a result that cannot be pickled joins `errors`, as one of its environment."""
        with contextlib.suppress(Exception):
            return pickle.dumps((errors, results))
        for env_index, result in results:
            try:
                pickle.dumps(result)
            except Exception:
                errors.append(EnvError.current(env_index))
        return pickle.dumps((errors, []))

    def step(self, requests: Requests | None) -> tuple[list[EnvError], Results]:
        """Step every environment; return errors and the infos to be pickled.

        Args:
            requests: the actions, if they are not in the shared memory.
        """
        errors: list[EnvError] = []
        infos: Results = []
        # Copies, since an environment may keep its action, and the next one overwrites the shared row.
        if requests is None:
            actions = copies_of_rows(self.actions, len(self.envs))
        else:
            actions = [action for _, action in requests]
        # First all environments, then all that is done with their results: each loop is faster without the other.
        results: list[Any] = []
        for slot, env in enumerate(self.envs):
            self.control[RUNNING] = self.first + slot
            try:
                if self.needs_reset[slot]:
                    observation, info = self.begin_episode(slot)
                    results.append((observation, 0.0, False, False, info))
                else:
                    results.append(env.step(actions[slot]))
                    self.lengths[slot] += 1
            except BaseException:
                errors.append(EnvError.current(self.first + slot))
                results.append(FAILED)
        write_info, has_info = self.info_table.write, self.has_info
        for slot, result in enumerate(results):
            if result is FAILED:
                continue
            env_index = self.first + slot
            try:
                observation, reward, terminated, truncated, info = result
                self.returns[slot] += float(reward)
                self.rewards[slot] = reward
                self.terminations[slot] = terminated
                self.truncations[slot] = truncated
                if terminated or truncated:
                    self.control[RUNNING] = env_index
                    observation, info = self.end_episode(slot, observation, info)
                    has_info[slot] = False
                else:
                    has_info[slot] = bool(info) and write_info(env_index, info)
                if info and not has_info[slot]:
                    infos.append((env_index, info))
                write_tree(self.observations[slot], observation)
            except BaseException:
                errors.append(EnvError.current(env_index))
        return errors, infos

    def begin_episode(self, slot: int, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset an environment and its counters; return its first observation and info."""
        observation, info = self.envs[slot].reset(**kwargs)
        self.needs_reset[slot], self.returns[slot], self.lengths[slot] = False, 0.0, 0
        return observation, info

    def end_episode(self, slot: int, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Do what the autoreset mode asks for; return the observation and info that the step hands out."""
        if self.setup.episode_statistics and "episode" not in info:
            info = {**info, "episode": {"r": self.returns[slot], "l": self.lengths[slot]}}
        if self.setup.autoreset_mode == AutoresetMode.SAME_STEP:
            final = copy.deepcopy({"final_obs": observation, "final_info": info})  # reset may fill the same array again
            first_observation, reset_info = self.begin_episode(slot)
            return first_observation, {**final, **reset_info}
        self.needs_reset[slot] = self.setup.autoreset_mode == AutoresetMode.NEXT_STEP
        return observation, info

    def reset(self, requests: Requests) -> tuple[list[EnvError], Results]:
        """Reset environments with the keyword arguments in `requests`; return errors and the non-empty infos."""

        def reset_one(slot: int, kwargs: dict[str, Any]) -> dict[str, Any]:
            observation, info = self.begin_episode(slot, **kwargs)
            write_tree(self.observations[slot], observation)
            return info

        errors, infos = self.for_each(requests, reset_one)
        return errors, [(env_index, info) for env_index, info in infos if info]

    def await_reset(self, requests: Requests) -> tuple[list[EnvError], Results]:
        """Under NEXT_STEP, let the next step reset these environments."""
        for env_index, _ in requests:
            self.needs_reset[env_index - self.first] = True
        return [], []

    def call(self, requests: Requests) -> tuple[list[EnvError], Results]:
        """Call a method of environments, or read an attribute."""

        def call_one(slot: int, request: tuple[str, Any, Any]) -> Any:
            name, args, kwargs = request
            attribute = self.envs[slot].get_wrapper_attr(name)
            return attribute(*args, **kwargs) if callable(attribute) else attribute

        return self.for_each(requests, call_one)

    def set_attr(self, requests: Requests) -> tuple[list[EnvError], Results]:
        """Set an attribute of environments."""
        return self.for_each(requests, lambda slot, request: self.envs[slot].set_wrapper_attr(*request))

    def get_state(self, requests: Requests) -> tuple[list[EnvError], Results]:
        """Return what `set_state` needs to continue as if nothing had happened."""

        def get_one(slot: int, _: None) -> dict[str, Any]:
            return {
                **env_state.get_state(self.envs[slot]),
                "needs_reset": self.needs_reset[slot],
                "episode_return": self.returns[slot],
                "episode_length": self.lengths[slot],
            }

        return self.for_each(requests, get_one)

    def set_state(self, requests: Requests) -> tuple[list[EnvError], Results]:
        """Restore what `get_state` returned."""

        def set_one(slot: int, state: dict[str, Any]) -> None:
            env_state.set_state(self.envs[slot], state)
            self.needs_reset[slot] = state["needs_reset"]
            self.returns[slot], self.lengths[slot] = state["episode_return"], state["episode_length"]

        return self.for_each(requests, set_one)

    def for_each(self, requests: Requests, action: Callable[[int, Any], Any]) -> tuple[list[EnvError], Results]:
        """Run `action(slot, arguments)` for each request; return errors and results."""
        errors: list[EnvError] = []
        results: Results = []
        for env_index, arguments in requests:
            self.control[RUNNING] = env_index
            try:
                # a copy, since environments that were given one object would share it here
                results.append((env_index, action(env_index - self.first, copy.deepcopy(arguments))))
            except BaseException:
                errors.append(EnvError.current(env_index))
        return errors, results
