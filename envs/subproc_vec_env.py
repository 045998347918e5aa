"""SubprocVecEnv: many environments, few processes, shared memory; no hangs, no orphans, no lost causes.

    envs = SubprocVecEnv(
        [partial(gym.make, "CartPole-v1")] * 16, autoreset_mode="SameStep", episode_statistics=True
    )
    observations, infos = envs.reset(seed=1)  # (16, 4) float32; environment n is seeded with 1 + n
    observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

It takes the place of `gymnasium.vector.AsyncVectorEnv` (same keywords, methods and errors) and differs from it in this:
a process steps several environments, one after the other, so that there need be no more processes than cores;
actions, observations, rewards and flags are never pickled; no environment is ever created in the calling process;
and every wait has a limit and notices a dead worker.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, reduction
from typing import Any, Literal

import numpy as np
from gymnasium import Env, Space, logger
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper, batch_differing_spaces, batch_space, clear_mpi_env_vars

from envs._shared_memory import SharedBatch, map_tree, require_numeric, write_tree
from envs._subproc_worker import (
    COMMAND,
    IDLE,
    MESSAGE,
    PICKLED,
    REPLY,
    RUNNING,
    STEP,
    EnvError,
    WorkerSetup,
    worker_main,
)

LIVENESS_SECONDS = 0.05  # how often a wait looks whether the worker still lives
CLOSE_SECONDS = 2.0  # how long close() waits for environments to close before it kills their worker


class WorkerError(RuntimeError):
    """A worker process died or hung, or an environment in it raised (then it is of that exception's type as well)."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError, if mixed in, would show the repr


def as_kind(message: str, kind: Any) -> WorkerError:
    """Return a WorkerError that `except kind` catches too, if `kind` is an exception class that allows it."""
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return type(kind.__name__, (WorkerError, kind), {"__module__": kind.__module__})(message)
        except TypeError:  # e.g. OSError, whose instances are laid out differently
            pass
    return WorkerError(message)


class WorkerHandle:
    """The parent's side of one worker: its process, its ends of the pipes, and what it is expected to answer."""

    def __init__(self, index: int, env_indices: range) -> None:
        self.index = index
        self.env_indices = env_indices
        self.pending = False
        self.process: Any = None

    def start(self, context: Any, daemon: bool, others: list[WorkerHandle], **options: Any) -> None:
        """Start the process; its pipes are made just before, so that few processes inherit their ends."""
        self.go, self.done = context.Semaphore(0), context.Semaphore(0)
        self.pipe, worker_pipe = context.Pipe()
        self.crash_pipe, worker_crash_pipe = context.Pipe(duplex=False)
        method = context.get_start_method()
        inherited = [p for w in [self, *others] for p in (w.pipe, w.crash_pipe)] if method == "fork" else []
        in_main_thread = threading.current_thread() is threading.main_thread()
        setup = WorkerSetup(
            index=self.index,
            env_indices=self.env_indices,
            pipe=worker_pipe,
            go=self.go,
            done=self.done,
            crash_pipe=worker_crash_pipe,
            die_with_creator=in_main_thread or method == "forkserver",
            inherited=inherited,
            **options,
        )
        name = f"SubprocVecEnv-worker-{self.index}"
        self.process = context.Process(target=worker_main, args=(setup,), name=name, daemon=daemon)
        with clear_mpi_env_vars():
            self.process.start()
        worker_pipe.close()
        worker_crash_pipe.close()

    def kill(self) -> None:
        """End the process at once."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(CLOSE_SECONDS)

    def crash_trace(self) -> str:
        """Return what the worker's faulthandler wrote."""
        text = b""
        while self.crash_pipe.poll(0):
            chunk = os.read(self.crash_pipe.fileno(), 1 << 16)
            if not chunk:
                break
            text += chunk
        return text.decode(errors="replace")


class SubprocVecEnv(VectorEnv):
    """A vector of `len(env_fns)` environments in `num_workers` processes. See the module's docstring for an example.

    Args:
        env_fns: one function per environment that creates it, in the worker. It need only survive cloudpickle under
            forkserver and spawn. All environments must have equal action spaces.
        num_workers: processes; each steps its share of the environments in turn. Default: one per CPU core that this
            process may use, and never more than there are environments.
        shared_memory: accepted so that calls written for AsyncVectorEnv work; the memory is always shared.
        copy: return fresh arrays. With False the arrays returned are the shared ones, which the next step overwrites.
        context: "fork", "forkserver", "spawn" or None for Python's default on this platform. Fork starts fastest and
            takes least memory; the other two run the caller's main script again in each worker, as far as its
            `if __name__ == "__main__":`.
        daemon: whether workers are daemonic (such processes may not have multiprocessing children of their own).
        worker: not supported: AsyncVectorEnv's custom worker functions serve one environment each.
        observation_mode: "same", "different" or (batched space, single space), as in AsyncVectorEnv.
        autoreset_mode: what happens when an episode ends. The default is AsyncVectorEnv's, NEXT_STEP; the training
            scripts use SAME_STEP, where `infos["final_obs"]` and `infos["final_info"]` hold what the reset replaced.
        max_concurrency: upper limit of `num_workers`.
        step_timeout: seconds after which a worker that has not finished a step (or a reset, call or constructor) counts
            as hung. None waits for ever.
        on_worker_failure: "raise", or "restart": see `step_wait`.
        episode_statistics: add `"episode": {"r": return, "l": length}` to the last info of each episode (which
            SAME_STEP delivers in `final_info`), unless the environment has put it there.

    Raises:
        TypeError, ValueError: for arguments or spaces that cannot be served.
        RuntimeError: if the environments' spaces do not match.
        WorkerError: if a constructor raises, exits, crashes or hangs.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env]],
        num_workers: int | None = None,
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: None = None,
        observation_mode: str | tuple[Space, Space] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        step_timeout: float | None = 300.0,
        on_worker_failure: Literal["raise", "restart"] = "raise",
        episode_statistics: bool = False,
    ) -> None:
        if not env_fns:
            raise ValueError("SubprocVecEnv needs at least one environment, got an empty `env_fns`.")
        if worker is not None:
            raise ValueError(
                "SubprocVecEnv takes no custom `worker`: its workers step several environments each."
            )
        if on_worker_failure not in ("raise", "restart"):
            raise ValueError(f"`on_worker_failure` must be 'raise' or 'restart', got {on_worker_failure!r}.")
        for name, limit in (("num_workers", num_workers), ("max_concurrency", max_concurrency)):
            if limit is not None and not isinstance(limit, int | np.integer):
                raise ValueError(f"`{name}` must be an integer or None, got {type(limit)}.")
            if limit is not None and limit < 1:
                raise ValueError(f"`{name}` must be a positive or None, got {limit}.")
        self.num_envs = len(env_fns)
        self.copy = copy
        self.observation_mode = observation_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.step_timeout = step_timeout
        self.on_worker_failure = on_worker_failure
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.num_workers = min(num_workers or cores, max_concurrency or self.num_envs, self.num_envs)

        self._env_fns = [CloudpickleWrapper(env_fn) for env_fn in env_fns]
        self._context = multiprocessing.get_context(context)
        self._start_options = {
            "autoreset_mode": self.autoreset_mode,
            "episode_statistics": episode_statistics,
            "spin": self.num_workers <= cores,
        }
        self._daemon = daemon
        self._state = "default"
        self._failure: str | None = None  # why nothing but close() is possible any more
        self._seeds: list[int | None] = [None] * self.num_envs
        bounds = [w * self.num_envs // self.num_workers for w in range(self.num_workers + 1)]
        self._workers = [WorkerHandle(w, range(bounds[w], bounds[w + 1])) for w in range(self.num_workers)]
        # Runs when this object is collected and at exit, but not in a process forked from this one.
        self._kill_workers = multiprocessing.util.Finalize(self, _kill_all, (self._workers,), exitpriority=10)
        try:
            for handle in self._workers:
                self._start(handle)
            described = [self._handshake(handle) for handle in self._workers]
            self._adopt_spaces([space for spaces, _, _ in described for space in spaces])
            self.metadata = {**described[0][1], "autoreset_mode": self.autoreset_mode}
            self.render_mode = described[0][2]
            self._shared = SharedBatch(
                self.single_observation_space, self.single_action_space, self.num_envs, self.num_workers
            )
            for handle in self._workers:
                self._attach(handle)
        except BaseException:
            self.close(terminate=True)
            raise

    # ---- starting ---------------------------------------------------------------------------------------------

    def _start(self, worker: WorkerHandle) -> None:
        others = [w for w in self._workers if w is not worker and w.process is not None]
        env_fns = [self._env_fns[i] for i in worker.env_indices]
        worker.start(self._context, self._daemon, others, env_fns=env_fns, **self._start_options)

    def _handshake(self, worker: WorkerHandle) -> Any:
        """Wait until the worker has constructed its environments; return their spaces, metadata and render mode."""
        errors, description = self._receive(worker, "constructor", self._deadline())
        if errors:
            raise self._environment_failure(errors, "its constructor")
        return description

    def _attach(self, worker: WorkerHandle) -> None:
        """Hand the shared memory to the worker."""
        worker.pipe.send(self._shared.arguments)
        reduction.send_handle(worker.pipe, self._shared.descriptor, worker.process.pid)
        self._receive(worker, "constructor", self._deadline())
        self._shared.control[worker.index, RUNNING] = IDLE

    def _adopt_spaces(self, spaces: list[tuple[Space, Space]]) -> None:
        """Check that the environments' spaces fit together, and set the vector environment's own."""
        mode = self.observation_mode
        observation_spaces = [observation_space for observation_space, _ in spaces]
        self.single_action_space = spaces[0][1]
        for index, (observation_space, action_space) in enumerate(spaces):
            require_numeric(observation_space, "observation")
            require_numeric(action_space, "action")
            if action_space != self.single_action_space:
                raise RuntimeError(
                    f"All environments must have the same action space, but environment {index} has {action_space} and "
                    f"environment 0 has {self.single_action_space}."
                )
        self.action_space = batch_space(self.single_action_space, self.num_envs)

        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(space, Space) for space in mode):
                raise TypeError(f"Expected `observation_mode` to hold two Spaces, got {mode}.")
            self.observation_space, self.single_observation_space = mode
        elif mode == "same":
            self.single_observation_space = observation_spaces[0]
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        elif mode == "different":
            self.single_observation_space = observation_spaces[0]
        else:
            raise ValueError(
                "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
                f"space, actual got {mode}"
            )
        fits = operator.eq if mode == "same" else is_space_dtype_shape_equiv
        for index, space in enumerate(observation_spaces):
            if not fits(self.single_observation_space, space):
                raise RuntimeError(
                    f"With observation_mode={mode!r} the sub-environments observation spaces are not equivalent: "
                    f"environment {index} has {space}, not {self.single_observation_space}. If this is intentional, "
                    "use `observation_mode='different'` instead."
                    if mode == "same"
                    else f"With observation_mode={mode!r} all observation spaces need one shape and dtype, but environment "
                    f"{index} has {space}, not like {self.single_observation_space}."
                )
        if mode == "different":
            self.observation_space = batch_differing_spaces(observation_spaces)

    # ---- reset and step ---------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments; see `reset_async`. Return observations (num_envs, ...) and infos."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin to reset all environments, or those where the boolean array `options["reset_mask"]` (num_envs,) is set.

        Args:
            seed: environment n is seeded with `seed + n`, or with `seed[n]`; None leaves its generator as it is.
            options: handed to every environment's `reset`, without the mask.
        """
        self._assert_free("reset_async")
        if seed is None:
            seed = [None] * self.num_envs
        elif isinstance(seed, int | np.integer):
            seed = [int(seed) + n for n in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got length={len(seed)}."
            )
        mask = np.ones(self.num_envs, dtype=np.bool_)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = self._checked_mask(options.pop("reset_mask"))
        requests = {n: {"seed": seed[n], "options": options} for n in np.flatnonzero(mask).tolist()}
        for n, request in requests.items():
            if request["seed"] is not None:
                self._seeds[n] = request["seed"]
        self._request("reset", requests)
        self._state = "reset"

    def _checked_mask(self, mask: Any) -> np.ndarray:
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
        if mask.dtype != np.bool_:
            raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
        if mask.shape != (self.num_envs,):
            raise ValueError(
                f"`options['reset_mask']` must have shape `({self.num_envs},)`, got {mask.shape}"
            )
        if not mask.any():
            raise ValueError(f"`options['reset_mask']` must contain at least one True value, got {mask}")
        return mask

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for `reset_async`; return observations and infos. Errors as in `step_wait`."""
        infos = self._infos(self._collect("reset", timeout))
        return self._observations(), infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every environment once; see `step_async` and `step_wait`."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step with `actions`, an element of `action_space`: (num_envs, ...) or a Dict or Tuple of such.

        Raises:
            AlreadyPendingCallError: if another call is pending. ClosedEnvironmentError: after `close`.
            ValueError: if `actions` has the wrong shape.
        """
        self._assert_free("step_async")
        write_tree(self._shared.actions, actions)
        self._dispatch(self._workers, STEP)
        self._state = "step"

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Wait for `step_async`.

        Returns:
            observations (num_envs, ...), rewards (num_envs,) float64, terminations and truncations (num_envs,) bool, and
            infos in Gymnasium's vector format.

        Raises:
            NoAsyncCallError: if no step is pending. ClosedEnvironmentError: after `close`.
            multiprocessing.TimeoutError: after `timeout` seconds; the step stays pending and can be waited for again.
            WorkerError: if an environment raised (it is then of that exception's type too), or a worker died or took
                longer than `step_timeout`. It names the environment, its seed, its last action and where it was.
        """
        infos = self._infos(self._collect("step", timeout))
        shared, fresh = self._shared, (np.copy if self.copy else np.asarray)
        return (
            self._observations(),
            fresh(shared.rewards),
            fresh(shared.terminations),
            fresh(shared.truncations),
            infos,
        )

    def _observations(self) -> Any:
        return map_tree(self._shared.observations, np.copy) if self.copy else self._shared.observations

    def _infos(self, results: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for env_index, info in results:
            infos = self._add_info(infos, info, env_index)
        return infos

    # ---- calls, attributes, states ----------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return a tuple of `environment.name(*args, **kwargs)`, or of the attribute `name`, over the environments."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a `call`."""
        self._assert_free("call_async")
        if name in ("reset", "step", "close"):
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._request("call", dict.fromkeys(range(self.num_envs), (name, args, kwargs)))
        self._state = "call"

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for `call_async` and return its results. Errors as in `step_wait`."""
        return tuple(result for _, result in self._collect("call", timeout))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return the attribute `name` of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set the attribute `name` of every environment, to `values[n]` if `values` is a list or tuple."""
        self._assert_free("set_attr")
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._request("set_attr", {n: (name, value) for n, value in enumerate(values)})
        self._collect_now("set_attr")

    def render(self) -> tuple[Any, ...] | None:
        """Return what every environment renders."""
        return self.call("render")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment's random generator."""
        return self.get_attr("np_random_seed")

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of every environment's random generator."""
        return self.get_attr("np_random")

    def get_state(self) -> dict[str, Any]:
        """Return everything `set_state` needs to go on bit for bit, in plain numbers, strings, lists, dicts and arrays.

        Raises:
            TypeError: if an environment lacks `get_state()` and `set_state(state)`.
        """
        self._assert_free("get_state")
        self._request("get_state", dict.fromkeys(range(self.num_envs)))
        return {
            "envs": [state for _, state in self._collect_now("get_state")],
            "observations": self._shared.observation_bytes.copy(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned, from a vector environment made with the same arguments.

        Raises:
            ValueError: if the state is of another number of environments or other observations.
        """
        self._assert_free("set_state")
        for what, size, own_size in (
            ("environments", len(state["envs"]), self.num_envs),
            ("bytes of observations", len(state["observations"]), len(self._shared.observation_bytes)),
        ):
            if size != own_size:
                raise ValueError(f"This state holds {size} {what}, but this vector environment {own_size}.")
        self._request("set_state", dict(enumerate(state["envs"])))
        self._collect_now("set_state")
        self._shared.observation_bytes[:] = state["observations"]

    # ---- talking to workers -----------------------------------------------------------------------------------

    def _assert_free(self, method: str) -> None:
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if self._failure is not None:
            raise WorkerError(f"Only close() is possible after this failure: {self._failure}")
        if self._state != "default":
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `{self._state}` to complete.",
                self._state,
            )

    def _deadline(self) -> float:
        return time.monotonic() + (float("inf") if self.step_timeout is None else self.step_timeout)

    def _dispatch(self, workers: list[WorkerHandle], command: int) -> None:
        deadline = self._deadline()
        for worker in workers:
            self._shared.control[worker.index, COMMAND] = command
            worker.pending, worker.deadline, worker.reply = True, deadline, ([], None)
            worker.go.release()

    def _request(self, name: str, requests: dict[int, Any]) -> None:
        """Send each worker the message (name, its part of `requests`)."""
        self._dispatch(self._workers, MESSAGE)
        for worker in self._workers:
            part = [(n, requests[n]) for n in worker.env_indices if n in requests]
            try:
                worker.pipe.send((name, part))
            except (BrokenPipeError, ConnectionResetError):
                pass  # a dead worker is noticed, and reported in full, when its reply is waited for

    def _collect_now(self, name: str) -> list[tuple[int, Any]]:
        self._state = name
        return self._collect(name, None)

    def _collect(self, name: str, timeout: float | None) -> list[tuple[int, Any]]:
        """Wait for every worker's reply to `name`; return the (environment index, result)s."""
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if self._state != name:
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        patience = time.monotonic() + (float("inf") if timeout is None else timeout)
        for worker in self._workers:
            if worker.pending:
                self._await_reply(worker, name, patience, timeout)
        self._state = "default"
        errors = [error for worker in self._workers for error in worker.reply[0]]
        if errors:
            failure = self._environment_failure(errors, name)
            if name in ("reset", "step"):
                self._failure = str(failure)
                for error in errors:
                    logger.error(
                        "Received the following error from Worker-%s - Shutting it down", error.env_index
                    )
                    logger.error("%s", error.trace)
                logger.error("Raising the last exception back to the main process.")
            raise failure
        return [result for worker in self._workers for result in worker.reply[1] or []]

    def _await_reply(self, worker: WorkerHandle, name: str, patience: float, timeout: float | None) -> None:
        while True:
            now = time.monotonic()
            wait = max(0.0, min(LIVENESS_SECONDS, worker.deadline - now, patience - now))
            if worker.done.acquire(True, wait):
                break
            if not worker.process.is_alive() and not worker.done.acquire(False):
                raise self._lost(worker, name)
            if time.monotonic() >= worker.deadline:
                raise self._lost(worker, name, hung=True)
            if time.monotonic() >= patience:
                raise multiprocessing.TimeoutError(
                    f"The call to `{name}_wait` has timed out after {timeout} second(s)."
                )
        if self._shared.control[worker.index, REPLY] == PICKLED:
            worker.reply = self._receive(worker, name, worker.deadline)
        worker.pending = False

    def _receive(self, worker: WorkerHandle, name: str, deadline: float) -> Any:
        """Return the next message from the worker's pipe, which is expected now."""
        wait = None if deadline == float("inf") else max(LIVENESS_SECONDS, deadline - time.monotonic())
        ready = connection.wait([worker.pipe, worker.process.sentinel], wait)
        if not ready:
            raise self._lost(worker, name, hung=True)
        try:
            return worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._lost(worker, name) from None

    # ---- failures ---------------------------------------------------------------------------------------------

    def _environment_failure(self, errors: list[EnvError], name: str) -> WorkerError:
        """Return the error that reports exceptions raised by environments."""
        parts = [
            f"{error.name} in {name} of {self._describe(error.env_index)}: {error.message}\n\n{error.trace}"
            for error in errors
        ]
        last = errors[-1]
        module = sys.modules.get("__main__" if last.module == "__mp_main__" else last.module)
        return as_kind("\n".join(parts), getattr(module, last.name, None))

    def _lost(self, worker: WorkerHandle, name: str, hung: bool = False) -> WorkerError:
        """Kill what is left of a worker that died or hung; return the error that reports it."""
        if hung and hasattr(signal, "SIGUSR1"):
            os.kill(worker.process.pid, signal.SIGUSR1)  # ask for a trace of where it is
            worker.crash_pipe.poll(0.5)
            time.sleep(0.02)
        worker.kill()
        trace = worker.crash_trace()
        code = worker.process.exitcode
        if hung:
            cause = f"did not finish within step_timeout={self.step_timeout} s and was killed"
        elif code is not None and code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
            cause += " (the system's answer to a lack of memory, among others)" if code == -9 else ""
        else:
            cause = f"exited with code {code}"
        running = int(self._shared.control[worker.index, RUNNING]) if hasattr(self, "_shared") else IDLE
        first, last = worker.env_indices[0], worker.env_indices[-1]
        where = (
            self._describe(running)
            if running != IDLE
            else f"environments {first} to {last}, none of them running"
        )
        self._failure = (
            f"Worker {worker.index} (process {worker.process.pid}) {cause} during {name}, in {where}."
            + (f"\n\n{trace}" if trace else "")
        )
        self._state = "default"
        return as_kind(self._failure, multiprocessing.TimeoutError if hung else None)

    def _describe(self, env_index: int) -> str:
        text = f"environment {env_index} (seed {self._seeds[env_index]}"
        if hasattr(self, "_shared"):
            text += f", last action {map_tree(self._shared.actions, lambda array: array[env_index].tolist())}"
        return text + ")"

    # ---- the end ----------------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments and end the workers, in at most `timeout` seconds (default 2) and a little more.

        Args:
            timeout: how long environments may take to finish what they do and close; then their worker is killed.
            terminate: kill the workers without closing the environments.
        """
        deadline = time.monotonic() + (0.0 if terminate else CLOSE_SECONDS if timeout is None else timeout)
        if self._state != "default":
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._state}` to complete.")
        for worker in [] if terminate else self._workers:
            try:
                while worker.pending and time.monotonic() < deadline and worker.process.is_alive():
                    self._await_reply(worker, self._state, deadline, timeout)
                self._dispatch([worker], MESSAGE)
                worker.pipe.send(("close", None))
            except (WorkerError, multiprocessing.TimeoutError, OSError):
                pass  # killed below
        for worker in self._workers:
            if worker.process is not None:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill_workers()
        if hasattr(self, "_shared"):
            self._shared.close()

    def __del__(self) -> None:
        """Nothing to do: the finalizer that kills the workers also runs when this object is collected."""


def _kill_all(workers: list[WorkerHandle]) -> None:
    for worker in workers:
        if worker.process is not None:
            worker.kill()
            worker.pipe.close()
            worker.crash_pipe.close()
