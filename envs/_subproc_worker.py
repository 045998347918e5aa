"""What runs inside a worker process of SubprocVecEnv: a loop that steps its share of the environments in place.

Numbers travel in shared memory; all else (results of calls, texts of errors, infos of other than floats) as pickled
messages through a pipe; two semaphores say that a command or a reply is there. A worker never outlives its parent,
and leaves signals to it.
"""

from __future__ import annotations

import copy
import faulthandler
import fcntl
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.vector import AutoresetMode

from envs import _shared_memory, state
from envs._shared_memory import SharedBatch, copies_of_rows, map_tree, row_of, write_tree

# Columns of the control array, one row per worker.
COMMAND = 0  # STEP, or MESSAGE: a (name, requests) message is in the pipe
REPLY = 1  # EMPTY: all is in shared memory; or MESSAGE: an (errors, results) message is in the pipe
RUNNING = 2  # the index of the environment whose code is running, or NONE
STEP, EMPTY, MESSAGE, NONE = 0, 0, 1, -1

POLL_SECONDS = 0.0005  # of polling before going to sleep: to wake a sleeper takes tens of us, a small step less
OUR_FILES = {__file__, _shared_memory.__file__, state.__file__}

Requests = list[tuple[int, Any]]  # (environment index, arguments)


@dataclass
class EnvError:
    """An exception in an environment, as text: the exception object itself may not survive pickling."""

    env_index: int
    module: str
    name: str
    message: str
    trace: str  # without our own frames; empty if there are no others

    @classmethod
    def of(cls, error: BaseException, env_index: int) -> EnvError:
        kind, trace = type(error), error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in OUR_FILES:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(kind, error, trace)) if trace is not None else ""
        return cls(env_index, kind.__module__, kind.__qualname__, str(error), text)


def poll(semaphore: Semaphore) -> bool:
    """Try for POLL_SECONDS to acquire `semaphore` without going to sleep; return whether that succeeded."""
    end = time.monotonic() + POLL_SECONDS
    while not semaphore.acquire(False):
        if time.monotonic() > end:
            return False
        os.sched_yield()  # leave this core to another process that wants it
    return True


def end_with_parent() -> None:
    """Make this process, and what its environments start, end when the parent does, whatever they are doing then.

    The parent holds the other end of a pipe. When that end closes, the kernel kills this process group, even while an
    environment holds the GIL in C code. The thread is for the case that a process forked by the parent has inherited
    that end and lives on.
    """
    parent: Any = parent_process()
    os.setpgid(0, 0)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    parent_fd = os.pidfd_open(parent.pid)

    def watch() -> None:
        connection.wait([parent_fd])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@dataclass
class EnvWorker:
    """Some environments, and what it takes to obey the parent. "Slot" s holds environment `env_indices[s]`."""

    index: int
    env_indices: range
    env_fns: list[Callable[[], Env]]
    autoreset_mode: AutoresetMode
    poll: bool  # before going to sleep
    memory: tuple[connection.Connection, int, int]  # arguments of SharedBatch
    pipe: connection.Connection
    go: Semaphore  # the parent's: a command is there
    done: Semaphore  # the worker's: it has been obeyed

    def main(self) -> None:
        """Obey commands until the parent says close. This is where the new process begins."""
        # Batch systems send signals to all processes of a job, and Ctrl-C may come before this one has a group of its
        # own. What they mean is for the parent to decide, which may want one more step and all states for a checkpoint.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that environments start would inherit
        end_with_parent()
        # Old environments draw from this generator, which a fork copies: else all workers would draw the same numbers.
        np.random.seed(np.random.randint(2**31) + self.index)
        faulthandler.enable(2, all_threads=False)  # where a crash happened, on stderr
        self.shared = SharedBatch(*self.memory)
        self.control = self.shared.control[self.index].data
        self.envs: list[Env] = []
        self.needs_reset = [False] * len(self.env_indices)  # under NEXT_STEP: the next step resets instead
        try:
            self.serve()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the parent is gone, or this worker is not wanted any more
        finally:
            for env in self.envs:
                try:
                    env.close()
                except BaseException:
                    traceback.print_exc()

    def serve(self) -> None:
        while True:
            if not (self.poll and poll(self.go)):
                self.go.acquire()
            name, requests = ("step", []) if self.control[COMMAND] == STEP else self.pipe.recv()
            if name == "close":
                return
            self.errors: list[EnvError] = []
            self.results: list[tuple[int, bytes]] = []  # (environment index, pickled result)
            if name == "step":
                self.step(requests)
            else:
                self.for_each(requests, getattr(self, name))
            self.control[RUNNING] = NONE
            message = pickle.dumps((self.errors, self.results)) if self.errors or self.results else b""
            self.control[REPLY] = MESSAGE if message else EMPTY
            self.done.release()
            if message:  # sent afterwards, since a large one waits in the pipe until the parent, once told, reads it
                self.pipe.send_bytes(message)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def step(self, requests: Requests) -> None:
        """Step every environment with the shared actions or, if there are any, with those in `requests`."""
        # Copies, since an environment may keep its action, and the next one overwrites the shared row.
        actions = [action for _, action in requests] or copies_of_rows(self.actions, len(self.envs))
        # First all environments, then all that is done with their results: each loop is faster without the other.
        results: list[Any] = []
        for slot, env in enumerate(self.envs):
            self.control[RUNNING] = self.env_indices[slot]
            try:
                if self.needs_reset[slot]:
                    observation, info = self.begin_episode(slot)
                    results.append((observation, 0.0, False, False, info))
                else:
                    results.append(env.step(actions[slot]))
            except BaseException as error:
                self.errors.append(EnvError.of(error, self.env_indices[slot]))
                return  # the next environment may hang, and nobody would hear of this
        write_info, has_info = self.infos.write, self.has_info
        for slot, result in enumerate(results):
            env_index = self.env_indices[slot]
            try:
                observation, reward, terminated, truncated, info = result
                self.rewards[slot] = float(reward)
                self.terminations[slot] = terminated
                self.truncations[slot] = truncated
                if terminated or truncated:
                    self.control[RUNNING] = env_index
                    observation, info = self.end_episode(slot, observation, info)
                    has_info[slot] = False
                else:
                    has_info[slot] = bool(info) and write_info(env_index, info)
                if info and not has_info[slot]:
                    self.results.append((env_index, pickle.dumps(info)))
                write_tree(self.observations[slot], observation)
            except BaseException as error:
                self.errors.append(EnvError.of(error, env_index))
                return

    def begin_episode(self, slot: int, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.needs_reset[slot] = False
        return self.envs[slot].reset(**kwargs)

    def end_episode(self, slot: int, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Do what the autoreset mode asks for; return the observation and info that the step hands out."""
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            write_tree(self.observations[slot], observation)  # of the space's type, whatever the environment returns
            final_obs = map_tree(self.observations[slot], lambda array: array.copy()[()])  # numbers as NumPy scalars
            final = {"final_obs": final_obs, "final_info": copy.deepcopy(info)}  # reset may fill the same arrays again
            first_observation, reset_info = self.begin_episode(slot)
            return first_observation, {**final, **reset_info}
        self.needs_reset[slot] = self.autoreset_mode == AutoresetMode.NEXT_STEP
        return observation, info

    # ---- all other commands: methods that are called for one environment after the other ----------------------------

    def for_each(self, requests: Requests, method: Callable[[int, Any], Any]) -> None:
        """Run `method(slot, arguments)` for each request, up to the first that raises."""
        for env_index, arguments in requests:
            self.control[RUNNING] = env_index
            try:
                # a copy, since environments that were given one object would share it here
                result = method(env_index - self.env_indices.start, copy.deepcopy(arguments))
                self.results.append((env_index, pickle.dumps(result)))
            except BaseException as error:
                self.errors.append(EnvError.of(error, env_index))
                return

    def construction(self, slot: int, _: None) -> tuple[Any, ...]:
        env = self.env_fns[slot]()
        self.envs.append(env)
        return env.observation_space, env.action_space, dict(env.metadata), env.render_mode

    def attach(self, _: int, spaces: tuple[Any, Any]) -> None:
        """Take views of this worker's rows; memoryviews where single numbers are written, being twice as fast."""
        shared = self.shared
        shared.add_spaces(*spaces)
        rows = slice(self.env_indices.start, self.env_indices.stop)
        self.rewards: Any = shared.rewards[rows].data
        self.terminations: Any = shared.terminations[rows].data
        self.truncations: Any = shared.truncations[rows].data
        self.infos = shared.infos
        self.has_info: Any = shared.infos.present[rows].data
        self.actions = map_tree(shared.actions, lambda array: array[rows])
        self.observations = [row_of(shared.observations, i) for i in self.env_indices]

    def use_info_layout(self, _: int, layout: _shared_memory.InfoLayout) -> None:
        self.infos.use_layout(layout)

    def reset(self, slot: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        observation, info = self.begin_episode(slot, **kwargs)
        write_tree(self.observations[slot], observation)
        return info

    def restart(self, slot: int, observation_before: Any) -> dict[str, Any]:
        """Instead of the step in which the worker before this one was lost: truncate the episode where it was."""
        self.begin_episode(slot)  # so that the new environment can be asked for its state at once
        self.rewards[slot], self.terminations[slot], self.truncations[slot] = 0.0, False, True
        self.has_info[slot] = False
        observation, info = self.end_episode(slot, observation_before, {"worker_restarted": True})
        write_tree(self.observations[slot], observation)
        return {**info, "worker_restarted": True}

    def call(self, slot: int, request: tuple[str, Any, Any]) -> Any:
        name, args, kwargs = request
        attribute = self.envs[slot].get_wrapper_attr(name)
        return attribute(*args, **kwargs) if callable(attribute) else attribute

    def set_attr(self, slot: int, request: tuple[str, Any]) -> None:
        self.envs[slot].set_wrapper_attr(*request)

    def get_state(self, slot: int, _: None) -> dict[str, Any]:
        return {**state.get_state(self.envs[slot]), "needs_reset": self.needs_reset[slot]}

    def set_state(self, slot: int, saved: dict[str, Any]) -> None:
        state.set_state(self.envs[slot], saved)
        self.needs_reset[slot] = saved["needs_reset"]
