"""What runs inside a worker process of SubprocVecEnv: a loop that steps its share of the environments in place.

A worker never outlives its parent, ignores the signals that are meant for its parent, and leaves a trace of where it
was when it crashes or hangs. Numbers travel in shared memory, all else (results of calls, texts of errors, infos of
other than numbers) as pickled messages through a pipe; two semaphores say that a command or a reply is there.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from functools import partial
from multiprocessing import connection, parent_process, reduction
from multiprocessing.synchronize import Semaphore
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from gymnasium import Env, Space, Wrapper
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import PassiveEnvChecker

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

give_way = getattr(os, "sched_yield", lambda: None)  # leaves this core to another process that wants it

PARENTS_SIGNALS = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
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
        give_way()
    return True


def worker_main(setup: WorkerSetup) -> None:
    """Construct the environments, attach to the shared memory, and obey commands until the parent says close."""
    # Ctrl-C, SIGTERM and the end of a terminal often reach the whole process group. What they mean is for the parent
    # to decide, which may want one more step and every environment's state for a checkpoint; so here they do nothing.
    # (Handlers rather than SIG_IGN, because programs that environments start would inherit SIG_IGN.)
    for number in PARENTS_SIGNALS:
        signal.signal(number, lambda *_: None)
    watch_parent()
    faulthandler.enable(setup.crash_pipe.fileno(), all_threads=False)
    if hasattr(faulthandler, "register"):
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
    therefore end before it). On Linux the kernel itself can kill this process when that end
    closes, even while an environment holds the GIL in C code. The thread is for other systems, and for the case that
    a process which the parent forked has inherited that end and lives on.
    """
    parent, parent_pid = parent_process(), os.getppid()
    assert parent is not None
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        if hasattr(signal, "pthread_sigmask"):  # a request for a trace is for the main thread
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        while os.getppid() == parent_pid and not connection.wait([parent.sentinel], PARENT_CHECK_SECONDS):
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
        self.attach(SharedBatch(*(*arguments, reduction.recv_handle(pipe))))
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
        """Return the reply as bytes; a result that cannot be pickled is an error of its environment."""
        with contextlib.suppress(Exception):
            return pickle.dumps((errors, results))
        for env_index, result in results:
            try:
                pickle.dumps(result)
            except Exception:
                errors = [*errors, EnvError.current(env_index)]
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
            env, wrappers = state_layers(self.envs[slot])
            return {
                "env": env.get_state(),
                "wrappers": [plain_attributes(wrapper) for wrapper in wrappers],
                "needs_reset": self.needs_reset[slot],
                "episode_return": self.returns[slot],
                "episode_length": self.lengths[slot],
            }

        return self.for_each(requests, get_one)

    def set_state(self, requests: Requests) -> tuple[list[EnvError], Results]:
        """Restore what `get_state` returned."""

        def set_one(slot: int, state: dict[str, Any]) -> None:
            env, wrappers = state_layers(self.envs[slot])
            env.set_state(state["env"])
            for wrapper, attributes in zip(wrappers, state["wrappers"], strict=True):
                set_attributes(wrapper, attributes)
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
                results.append((env_index, action(env_index - self.first, arguments)))
            except BaseException:
                errors.append(EnvError.current(env_index))
        return errors, results


class NoState(TypeError):
    """An environment cannot be saved; the text says why."""


def state_layers(env: Env) -> tuple[Any, list[Wrapper]]:
    """Return the outermost layer of `env` that has `get_state` and `set_state`, and the wrappers around it.

    Raises:
        NoState: if no layer has both.
    """
    layer: Any = env
    wrappers: list[Wrapper] = []
    while not (hasattr(type(layer), "get_state") and hasattr(type(layer), "set_state")):
        if not isinstance(layer, Wrapper):
            raise NoState(
                f"{env} cannot be saved, because {type(layer).__name__} lacks get_state() and set_state(state): "
                "give it both, or train without exact resume."
            )
        wrappers.append(layer)
        layer = layer.env
    return layer, wrappers


# What a wrapper holds that is no part of its state: how it was made, pictures, tools.
UNSAVED_NAMES = {
    *("_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs", "metadata", "_metadata"),
    *("frame_list", "recorded_frames", "render_history", "window", "clock"),
}
UNSAVED_TYPES = (
    *(Env, Space, EnvSpec, type, np.dtype, ModuleType, FunctionType, BuiltinFunctionType, MethodType, partial),
    *(PurePath, logging.Logger),
)


class _Empty:
    pass


def has_only_attributes(value: Any) -> bool:
    """Whether `value` is an object that holds nothing in slots or in C, where its class would need more space."""
    same_size = type(value).__basicsize__ == _Empty.__basicsize__
    return hasattr(value, "__dict__") and same_size and not isinstance(value, Enum)


def plain_attributes(holder: Any, unsaved: Collection[str] = ()) -> dict[str, Any]:
    """Return copies of what a wrapper holds, such as TimeLimit's step counter, made of plain values.

    Dicts have the kind of what they stand for as their first key. A random generator, and an object with attributes
    of its own, such as the statistics of NormalizeObservation, are restored in place by `set_attributes`.

    Raises:
        NoState: for an attribute of any other kind.
    """
    if isinstance(holder, PassiveEnvChecker):
        return {}  # it compares the first steps of this very environment
    state: dict[str, Any] = {}
    for name, value in vars(holder).items():
        if name in UNSAVED_NAMES or name in unsaved or isinstance(value, UNSAVED_TYPES):
            continue
        if isinstance(value, np.random.Generator):
            state[name] = {"generator": value.bit_generator.state}
        elif has_only_attributes(value):
            state[name] = {"object": plain_attributes(value)}
        else:
            state[name] = plain(value, f"{type(holder).__name__}.{name}")
    return state


def set_attributes(holder: Any, state: dict[str, Any]) -> None:
    """Restore what `plain_attributes` returned, sharing nothing with it."""
    for name, saved in state.items():
        match saved:
            case {"generator": content}:
                getattr(holder, name).bit_generator.state = content
            case {"object": content}:
                set_attributes(getattr(holder, name), content)
            case _:
                vars(holder)[name] = restored(saved)


def plain(value: Any, where: str) -> Any:
    """Return a copy of `value` made of what `torch.load(weights_only=True)` reads; `restored` is its inverse.

    Raises:
        NoState: for a value of any other kind; the text says that `where` holds it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(plain(item, where) for item in value)
    if type(value) is deque:
        return {"deque": [plain(item, where) for item in value], "maxlen": value.maxlen}
    if type(value) is dict:
        return {"dict": {plain(key, where): plain(item, where) for key, item in value.items()}}
    raise NoState(
        f"{where} holds a {type(value).__name__}, which cannot be saved: use numbers, strings, arrays, lists, tuples, "
        "dicts and deques, give it get_state() and set_state(state), or train without exact resume."
    )


def restored(saved: Any) -> Any:
    """Return what `plain` was given, sharing nothing with `saved`."""
    match saved:
        case np.ndarray():
            return saved.copy()
        case list() | tuple():
            return type(saved)(restored(item) for item in saved)
        case {"deque": items, "maxlen": maxlen}:
            return deque(map(restored, items), maxlen)
        case {"dict": items}:
            return {key: restored(item) for key, item in items.items()}
    return saved
