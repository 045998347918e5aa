"""What runs inside one worker process of SubprocVecEnv: a loop that steps its share of the environments in place.

A worker never outlives its parent, never dies of a signal meant for its parent, and leaves a trace of what it was
doing when it crashes or hangs. Its replies travel as follows: arrays in shared memory, everything else (infos,
results of calls, error texts) pickled through a pipe, and a semaphore says that a command or a reply is there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, parent_process, reduction
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np
from gymnasium import Env, Wrapper
from gymnasium.vector import AutoresetMode

from envs._shared_memory import SharedBatch, map_tree, write_tree

# Columns of SharedBatch.control, one row per worker.
COMMAND, REPLY, RUNNING = 0, 1, 2
STEP, MESSAGE = 0, 1  # COMMAND: step with the shared actions, or read a (name, data) message from the pipe
EMPTY, PICKLED = 0, 1  # REPLY: all is in shared memory, or an (errors, result) message is in the pipe
IDLE = -1  # RUNNING: the index of the environment whose code is running now, or IDLE

SPINS = 200  # about 100 us of polling before a worker sleeps: waking a sleeper costs tens of us, a step often fewer
PARENT_CHECK_SECONDS = 1.0
PR_SET_PDEATHSIG = 1  # Linux's prctl option: signal me when the thread that created me is gone


@dataclass
class WorkerSetup:
    """Everything a worker needs to start; pickled under forkserver and spawn."""

    index: int
    env_indices: range
    env_fns: list[Callable[[], Env]]
    pipe: connection.Connection
    go: Semaphore
    done: Semaphore
    crash_pipe: connection.Connection
    autoreset_mode: AutoresetMode
    episode_statistics: bool
    spin: bool
    die_with_creator: bool
    inherited: list[
        connection.Connection
    ]  # the parent's ends of other pipes, which a fork copies into the worker


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
        kind, value, _ = sys.exc_info()
        assert kind is not None
        try:
            message = str(value)
        except Exception:
            message = "(its message could not be formatted)"
        return cls(env_index, kind.__module__, kind.__qualname__, message, traceback.format_exc())


def worker_main(setup: WorkerSetup) -> None:
    """Build the environments, attach to the shared memory and obey commands until told to close."""
    watch_parent(setup.die_with_creator)
    # Ctrl-C and SIGTERM often reach the whole process group. What they mean is the parent's to decide (it may want one
    # more step and every environment's state for a checkpoint), so they do nothing here. Handlers, not SIG_IGN, since
    # programs that environments start would inherit the latter.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    faulthandler.enable(setup.crash_pipe.fileno(), all_threads=False)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, setup.crash_pipe.fileno(), all_threads=False)
    for pipe in setup.inherited:
        pipe.close()

    worker = Worker(setup)
    try:
        if worker.start():
            worker.serve()
    finally:
        for env in worker.envs:
            try:
                env.close()
            except BaseException:
                traceback.print_exc()


def watch_parent(die_with_creator: bool) -> None:
    """Make this process end within about a second of its parent's end, whatever it is doing.

    On Linux the kernel sees to it, even while an environment holds the GIL in C code; but it watches the parent's
    *thread*, hence `die_with_creator`, which is false if that was not its main thread. Elsewhere, a thread watches.
    """
    if die_with_creator and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent, parent_pid = parent_process(), os.getppid()
    assert parent is not None

    def watch() -> None:
        if hasattr(signal, "pthread_sigmask"):  # the request for a trace is for the main thread
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        while os.getppid() == parent_pid and not connection.wait([parent.sentinel], PARENT_CHECK_SECONDS):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


class Worker:
    """The environments of one worker and their counters. "Slot" s holds environment `env_indices[s]`."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.envs: list[Env] = []
        self.needs_reset = [False] * len(setup.env_indices)  # NEXT_STEP: the next step resets instead
        self.returns = [0.0] * len(setup.env_indices)
        self.lengths = [0] * len(setup.env_indices)

    def start(self) -> bool:
        """Construct the environments and attach to the shared memory; return whether to go on."""
        pipe = self.setup.pipe
        for env_index, env_fn in zip(self.setup.env_indices, self.setup.env_fns, strict=True):
            try:
                self.envs.append(env_fn())
            except BaseException:
                pipe.send(([EnvError.current(env_index)], None))
                return False
        first = self.envs[0]
        spaces = [(env.observation_space, env.action_space) for env in self.envs]
        pipe.send(([], (spaces, dict(first.metadata), first.render_mode)))
        arguments = pipe.recv()
        if arguments is None:
            return False
        self.shared = SharedBatch(*arguments, descriptor=reduction.recv_handle(pipe))
        self.shared.close()
        self.control = memoryview(self.shared.control[self.setup.index])
        indices = self.setup.env_indices
        self.actions = map_tree(self.shared.actions, lambda array: array[indices.start : indices.stop])
        # array[i, ...] stays a view where array[i] would be a scalar
        self.observations = [
            map_tree(self.shared.observations, lambda array, i=i: array[i, ...]) for i in indices
        ]
        pipe.send(([], None))
        return True

    def serve(self) -> None:
        """Obey commands until told to close, or until an environment raised in `step` or `reset`."""
        setup, control = self.setup, self.control
        relax = getattr(os, "sched_yield", lambda: None)
        while True:
            for _ in range(SPINS if setup.spin else 0):
                if setup.go.acquire(False):
                    break
                relax()  # gives the core away if the parent or another worker wants it
            else:
                setup.go.acquire()

            name, errors, result = "step", [], None
            if control[COMMAND] == STEP:
                errors, result = self.step()
            else:
                name, data = setup.pipe.recv()
                if name == "close":
                    return
                errors, result = getattr(self, name)(data)
            control[RUNNING] = IDLE

            if not errors and not result:
                control[REPLY] = EMPTY
                setup.done.release()
                continue
            control[REPLY] = PICKLED
            message = self.pickle(errors, result)
            setup.done.release()  # before sending: what does not fit the pipe waits there until the parent reads
            setup.pipe.send_bytes(message)
            if errors and name in ("step", "reset"):
                return

    def pickle(self, errors: list[EnvError], result: Any) -> Any:
        """Return the reply pickled; what cannot be pickled is an error of the environment that made it."""
        try:
            return reduction.ForkingPickler.dumps((errors, result))
        except Exception:
            env_index = next(
                (i for i, value in result or [] if not _can_pickle(value)), self.setup.env_indices[0]
            )
            return reduction.ForkingPickler.dumps(([*errors, EnvError.current(env_index)], None))

    def step(self) -> tuple[list[EnvError], list[tuple[int, dict[str, Any]]]]:
        """Step every environment with its row of the shared actions; return errors and the non-empty infos."""
        errors, infos = [], []
        mode, shared, control = self.setup.autoreset_mode, self.shared, self.control
        single_action = isinstance(self.actions, np.ndarray)
        for slot, (env_index, env) in enumerate(zip(self.setup.env_indices, self.envs, strict=True)):
            control[RUNNING] = env_index
            try:
                if self.needs_reset[slot]:
                    observation, info = self.begin_episode(slot)
                    reward, terminated, truncated = 0.0, False, False
                else:
                    # A copy, because an environment may keep its action, and the next step overwrites this row.
                    action = (
                        self.actions[slot].copy()
                        if single_action
                        else map_tree(self.actions, lambda array, slot=slot: array[slot].copy())
                    )
                    observation, reward, terminated, truncated, info = env.step(action)
                    self.returns[slot] += float(reward)
                    self.lengths[slot] += 1
                    if terminated or truncated:
                        if self.setup.episode_statistics and "episode" not in info:
                            info = {**info, "episode": {"r": self.returns[slot], "l": self.lengths[slot]}}
                        if mode == AutoresetMode.SAME_STEP:
                            final = {"final_obs": observation, "final_info": info}
                            observation, reset_info = self.begin_episode(slot)
                            info = {**final, **reset_info}
                        elif mode == AutoresetMode.NEXT_STEP:
                            self.needs_reset[slot] = True
                write_tree(self.observations[slot], observation)
                shared.rewards[env_index] = reward
                shared.terminations[env_index] = terminated
                shared.truncations[env_index] = truncated
                if info:
                    infos.append((env_index, info))
            except BaseException:
                errors.append(EnvError.current(env_index))
        return errors, infos

    def begin_episode(self, slot: int, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset one environment and its counters; return its first observation and info."""
        observation, info = self.envs[slot].reset(**kwargs)
        self.needs_reset[slot], self.returns[slot], self.lengths[slot] = False, 0.0, 0
        return observation, info

    def reset(
        self, requests: list[tuple[int, dict[str, Any]]]
    ) -> tuple[list[EnvError], list[tuple[int, Any]]]:
        """Reset the environments in `requests` (index, keyword arguments); return errors and the non-empty infos."""

        def reset_one(slot: int, kwargs: dict[str, Any]) -> dict[str, Any]:
            observation, info = self.begin_episode(slot, **kwargs)
            write_tree(self.observations[slot], observation)
            return info

        errors, infos = self.for_each(requests, reset_one)
        return errors, [(env_index, info) for env_index, info in infos if info]

    def call(
        self, requests: list[tuple[int, tuple[str, Any, Any]]]
    ) -> tuple[list[EnvError], list[tuple[int, Any]]]:
        """Call a method of the environments, or read an attribute; return errors and results."""

        def call_one(slot: int, request: tuple[str, Any, Any]) -> Any:
            name, args, kwargs = request
            attribute = self.envs[slot].get_wrapper_attr(name)
            return attribute(*args, **kwargs) if callable(attribute) else attribute

        return self.for_each(requests, call_one)

    def set_attr(
        self, requests: list[tuple[int, tuple[str, Any]]]
    ) -> tuple[list[EnvError], list[tuple[int, Any]]]:
        """Set an attribute of the environments."""
        return self.for_each(requests, lambda slot, request: self.envs[slot].set_wrapper_attr(*request))

    def get_state(self, requests: list[tuple[int, None]]) -> tuple[list[EnvError], list[tuple[int, Any]]]:
        """Return what `set_state` needs to continue as if nothing had happened."""

        def get_one(slot: int, _: None) -> dict[str, Any]:
            owner, wrappers = state_layers(self.envs[slot])
            return {
                "env": owner.get_state(),
                "wrappers": [plain_attributes(wrapper) for wrapper in wrappers],
                "needs_reset": self.needs_reset[slot],
                "episode_return": self.returns[slot],
                "episode_length": self.lengths[slot],
            }

        return self.for_each(requests, get_one)

    def set_state(
        self, requests: list[tuple[int, dict[str, Any]]]
    ) -> tuple[list[EnvError], list[tuple[int, Any]]]:
        """Restore what `get_state` returned."""

        def set_one(slot: int, state: dict[str, Any]) -> None:
            owner, wrappers = state_layers(self.envs[slot])
            owner.set_state(state["env"])
            for wrapper, attributes in zip(wrappers, state["wrappers"], strict=True):
                vars(wrapper).update(attributes)
            self.needs_reset[slot] = state["needs_reset"]
            self.returns[slot], self.lengths[slot] = state["episode_return"], state["episode_length"]

        return self.for_each(requests, set_one)

    def for_each(
        self, requests: list[tuple[int, Any]], action: Callable[[int, Any], Any]
    ) -> tuple[list[EnvError], list[tuple[int, Any]]]:
        """Run `action(slot, request)` for each (environment index, request); return errors and (index, result)s."""
        errors, results = [], []
        for env_index, request in requests:
            self.control[RUNNING] = env_index
            try:
                results.append((env_index, action(env_index - self.setup.env_indices.start, request)))
            except BaseException:
                errors.append(EnvError.current(env_index))
        return errors, results


def _can_pickle(value: Any) -> bool:
    try:
        reduction.ForkingPickler.dumps(value)
    except Exception:
        return False
    return True


def state_layers(env: Env) -> tuple[Any, list[Wrapper]]:
    """Return the outermost layer of `env` that has both `get_state` and `set_state`, and the wrappers around it.

    Raises:
        TypeError: if no layer has both.
    """
    layer, wrappers = env, []
    while not (hasattr(type(layer), "get_state") and hasattr(type(layer), "set_state")):
        if not isinstance(layer, Wrapper):
            raise TypeError(
                f"{env} cannot be saved: {type(layer).__name__} has no pair of methods get_state() and set_state(state); "
                "give the environment both, or do without exact resume for it."
            )
        wrappers.append(layer)
        layer = layer.env
    return layer, wrappers


def plain_attributes(wrapper: Wrapper) -> dict[str, Any]:
    """Return the numbers, flags, strings and arrays that a wrapper holds (TimeLimit's step counter, for one)."""
    plain = (bool, int, float, str, np.generic, np.ndarray, type(None))
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in vars(wrapper).items()
        if isinstance(value, plain)
    }
