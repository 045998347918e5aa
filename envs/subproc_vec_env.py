"""SubprocVecEnv: many environments, few processes, shared memory; no hangs, no orphans, no lost causes.

    envs = SubprocVecEnv(
        [partial(gym.make, "CartPole-v1")] * 16, autoreset_mode="SameStep", episode_statistics=True
    )
    observations, infos = envs.reset(seed=1)  # (16, 4) float32; environment n is seeded with 1 + n
    observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

It can stand in for `gymnasium.vector.AsyncVectorEnv`: same keywords, methods and errors. The differences: a process
steps several environments in turn, so that there need be no more processes than cores; what an environment sends
at every step goes through shared memory and is not pickled; no environment is created in the calling process; and
every wait has a limit and notices a dead worker. `envs/_worker_pool.py` holds the parent's side of the processes,
`envs/_subproc_worker.py` their own, `envs/_shared_memory.py` what lies between.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from gymnasium import Env, Space, logger
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envs._shared_memory import SharedBatch, copies_of_rows, map_tree, require_numeric, row_of, write_tree
from envs._subproc_worker import Requests, Results
from envs._worker_pool import Worker, WorkerError, WorkerPool

__all__ = ["SubprocVecEnv", "WorkerError"]

StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]
WHOLE = 2  # the part of the environments that is neither half 0 nor half 1


@dataclass
class Part:
    """All environments, or one half of them: who steps them, and views of their rows of the shared memory."""

    rows: slice
    workers: list[Worker]
    actions: Any
    observations: Any
    results: tuple[Any, ...]  # what `step` returns, but for the infos
    observations_before: Any
    restarted: set[Worker] = field(default_factory=set)  # in place of lost ones, since the pending call began


class SubprocVecEnv(VectorEnv):
    """`len(env_fns)` environments in `num_workers` processes.

    Args:
        env_fns: one function per environment, which creates it, in a worker. Under forkserver and spawn it must
            survive cloudpickle; under fork, what several of them hold in common is shared by a worker's environments.
        num_workers: number of processes. Default: one per CPU core that this process may use. Never more than
            there are environments. More than cores can pay if a step costs much more in some environments.
        shared_memory: accepted for the sake of calls written for AsyncVectorEnv; memory is always shared.
        copy: return fresh arrays. With False the arrays are the shared ones, which the next step overwrites.
        context: "fork", "forkserver", "spawn", or None for Python's default. Fork starts fastest and takes the
            least memory; the others run the main script again in each worker, up to `if __name__ == "__main__":`.
        daemon: whether workers are daemonic processes, which may not start multiprocessing children themselves.
        worker: a custom worker function serves one environment by AsyncVectorEnv's own protocol, so with it you get
            an AsyncVectorEnv, which knows only the keywords that the two have in common.
        observation_mode: "same", "different" or (batched space, single space), as in AsyncVectorEnv.
        autoreset_mode: what follows the end of an episode; AsyncVectorEnv's default. The PPO scripts use SAME_STEP:
            the ending step returns the next episode's first observation and keeps what it replaces in
            `infos["final_obs"]` and `infos["final_info"]`.
        max_concurrency: an upper limit of `num_workers`.
        step_timeout: seconds after which a worker that has not finished a step (or a reset, call or construction)
            counts as hung; None means never.
        on_worker_failure: "raise", or "restart": a worker that died or hung in `step` or `reset` is replaced, its
            episodes come back as truncated, with reward 0, the observation before the step as the final one, and
            `infos["worker_restarted"]` set; other environments lose nothing. New environments know nothing of
            earlier `set_attr`s. A worker lost in `reset` raises if a mask spares some of its environments, whose
            episodes nobody could then end; so does one lost again and again, 4 times, without finishing a step.
        episode_statistics: add "episode": {"r": return, "l": length} to an episode's last info (that is in
            `final_info` under SAME_STEP), unless the environment did, or was lost with its worker.

    Raises:
        TypeError, ValueError: for arguments or spaces that cannot be served.
        RuntimeError: if the environments' spaces do not fit together.
        WorkerError: if a constructor raises (it is then also of that exception's type), exits, crashes or hangs.
    """

    def __new__(
        cls, env_fns: Sequence[Callable[[], Env]], num_workers: int | None = None, *, worker: Any = None, **options: Any
    ) -> Any:
        """Hand over to AsyncVectorEnv if there is a custom `worker`."""
        if worker is None:
            return super().__new__(cls)
        if num_workers is not None:
            raise ValueError("A custom `worker` serves one environment, so give no `num_workers` with it.")
        return AsyncVectorEnv(env_fns, worker=worker, **options)

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env]],
        num_workers: int | None = None,
        *,
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
            raise ValueError("`env_fns` is empty, but SubprocVecEnv needs at least one environment.")
        if on_worker_failure not in ("raise", "restart"):
            raise ValueError(f"`on_worker_failure` must be 'raise' or 'restart', got {on_worker_failure!r}.")
        if step_timeout is not None and not step_timeout > 0:
            raise ValueError(f"`step_timeout` must be a positive number of seconds or None, got {step_timeout}.")
        for name, limit in (("num_workers", num_workers), ("max_concurrency", max_concurrency)):
            if limit is not None and not isinstance(limit, int | np.integer):
                raise ValueError(f"`{name}` must be an integer or None, got {type(limit)}.")
            if limit is not None and limit < 1:
                raise ValueError(f"`{name}` must be a positive or None, got {limit}.")

        self.num_envs = len(env_fns)
        cores = len(os.sched_getaffinity(0))
        self.num_workers = min(num_workers or cores, max_concurrency or self.num_envs, self.num_envs)
        self.copy = copy
        self.observation_mode = observation_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.on_worker_failure = on_worker_failure
        self._pending: dict[int, str] = {}  # the call that each part is busy with: "reset", "step", "send", ...
        self._pool = WorkerPool(
            owner=self,
            env_fns=env_fns,
            num_workers=self.num_workers,
            context=context,
            daemon=daemon,
            step_timeout=step_timeout,
            autoreset_mode=self.autoreset_mode,
            episode_statistics=episode_statistics,
            poll=self.num_workers <= cores,
        )
        try:
            descriptions = self._pool.start()
            self._adopt_spaces([spaces for description in descriptions for spaces in description[0]])
            _, metadata, self.render_mode = descriptions[0]
            self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
            self._shared = SharedBatch(
                self.single_observation_space, self.single_action_space, self.num_envs, self.num_workers
            )
            self._pool.attach(self._shared)
        except BaseException:
            self.close()
            raise
        self._observations_before = map_tree(self._shared.observations, np.copy)  # the step; kept for restarts
        middle, workers = self.num_workers // 2, self._pool.workers
        self._parts = [self._part(some) for some in (workers[:middle], workers[middle:], workers)]

    def _part(self, workers: list[Worker]) -> Part:
        rows = slice(workers[0].env_indices.start, workers[-1].env_indices.stop) if workers else slice(0)

        def some(tree: Any) -> Any:
            return map_tree(tree, lambda array: array[rows])

        shared, observations = self._shared, some(self._shared.observations)
        results = (observations, *some((shared.rewards, shared.terminations, shared.truncations)))
        return Part(rows, workers, some(shared.actions), observations, results, some(self._observations_before))

    def _adopt_spaces(self, spaces: list[tuple[Space, Space]]) -> None:
        """Check that the environments' (observation, action) spaces fit together, and set the vector's spaces."""
        mode = self.observation_mode
        self.single_observation_space, self.single_action_space = spaces[0]
        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(space, Space) for space in mode):
                raise TypeError(f"Expected both elements of `observation_mode` to be Spaces, got {mode}.")
            self.observation_space, self.single_observation_space = mode
        elif mode not in ("same", "different"):
            raise ValueError(
                "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
                f"space, actual got {mode}"
            )
        for index, (observation_space, action_space) in enumerate(spaces):
            require_numeric(observation_space, "observation")
            require_numeric(action_space, "action")
            if action_space != self.single_action_space:
                raise RuntimeError(
                    f"All environments need the same action space, but that of environment {index} is {action_space} "
                    f"and that of environment 0 is {self.single_action_space}."
                )
            if mode == "same" and observation_space != self.single_observation_space:
                raise RuntimeError(
                    "With observation_mode='same', the sub-environments observation spaces are not equivalent: "
                    f"environment {index} has {observation_space}, environment 0 {self.single_observation_space}. "
                    "If this is intentional, use `observation_mode='different'` instead."
                )
            if not is_space_dtype_shape_equiv(observation_space, self.single_observation_space):
                raise RuntimeError(
                    f"All observations need the same shape and dtype, but environment {index} has {observation_space} "
                    f"where {self.single_observation_space} is expected."
                )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        if mode == "same":
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        elif mode == "different":
            self.observation_space = batch_differing_spaces([space for space, _ in spaces])

    # ---- reset and step ---------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset environments, see `reset_async`; return observations (num_envs, ...) and infos."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin to reset all environments, or those where `options["reset_mask"]`, (num_envs,) bool, is True.

        Args:
            seed: environment n is seeded with `seed + n`, or `seed[n]`; None leaves its generator as it is.
            options: what every environment's `reset` gets as options, without the mask.
        """
        self._assert_free("reset_async")
        if seed is None or isinstance(seed, int | np.integer):
            seed = [None if seed is None else int(seed) + n for n in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(
                "If seeds are passed as a list the length must match "
                f"num_envs={self.num_envs} but got length={len(seed)}."
            )
        chosen: Sequence[int] = range(self.num_envs)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            chosen = self._masked(options.pop("reset_mask"))
        self._resets = [(n, {"seed": seed[n], "options": options}) for n in chosen]
        for n in chosen:
            if seed[n] is not None:
                self._pool.seeds[n] = seed[n]
        self._begin("reset", self._resets)

    def _masked(self, mask: Any) -> list[int]:
        # The words are AsyncVectorEnv's.
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"`options['reset_mask']` must have shape `({self.num_envs},)`, got {mask.shape}")
        if mask.dtype != np.bool_:
            raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
        if not mask.any():
            raise ValueError(
                "`options['reset_mask']` must contain a boolean array with at least one True value, "
                f"got reset_mask={mask}"
            )
        return np.flatnonzero(mask).tolist()

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for `reset_async`; return observations (num_envs, ...) and infos. Raises as `step_wait` does."""

        part = self._parts[WHOLE]

        def reset_again(worker: Worker) -> None:
            part.restarted.add(worker)
            self._pool.request("reset", self._resets, [worker])
            self._pool.collect("reset", [worker])

        infos = self._merge({}, self._collect("reset", timeout, reset_again))
        while part.restarted:
            infos = self._merge(infos, [(n, {"worker_restarted": True}) for n in part.restarted.pop().env_indices])
        return self._fresh(part.observations), infos

    def step(self, actions: Any) -> StepReturn:
        """Step every environment once: `step_async`, then `step_wait`."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step of every environment.

        Args:
            actions: an element of `action_space`: an array (num_envs, ...), or a dict or tuple of such. Of any
                integer type where integers are wanted; float64 is rounded to the space's type, mostly float32.

        Raises:
            ClosedEnvironmentError: after `close`. AlreadyPendingCallError: if another call is pending.
            ValueError, TypeError: if `actions` has the wrong shape or nesting, is a single number, or has fractions
                where integers are wanted, or integers beyond the space's type.
        """
        self._assert_free("step_async")
        self._begin_step(actions, WHOLE, "step")

    def step_wait(self, timeout: float | None = None) -> StepReturn:
        """Wait for `step_async`.

        Returns:
            observations (num_envs, ...); rewards, (num_envs,) float64; terminations and truncations, (num_envs,)
            bool; and infos in Gymnasium's vector format.

        Raises:
            ClosedEnvironmentError: after `close`. NoAsyncCallError: if no step is pending.
            multiprocessing.TimeoutError: after `timeout` seconds; the step stays pending and can be waited for.
            WorkerError: if an environment raised (it is then also of that exception's type), or a worker died, or
                it took longer than `step_timeout` (then it is also a multiprocessing.TimeoutError). The text names
                the environment, its seed, its last action and the place in the code. Only `close` is possible then,
                as it is after a KeyboardInterrupt in the middle of any call.
        """
        return self._end_step(WHOLE, "step", timeout)

    def send(self, actions: Any, half: int) -> None:
        """Begin a step of one half of the environments, so that the caller can work for the other half meanwhile.

        Half 0 is the first half of the workers and what they step, `half_rows(0)`; half 1 the rest. On two
        cores, which the workers fill, it does not pay: see `results/vec_env.md`.

        Args:
            actions: as for `step_async`, but only the rows `half_rows(half)`.

        Raises:
            ValueError: with a single worker, or if `half` is not 0 or 1. Otherwise as `step_async`.
        """
        self.half_rows(half)
        self._assert_free("send", half)
        self._begin_step(actions, half, "send")

    def recv(self, half: int, timeout: float | None = None) -> StepReturn:
        """Wait for `send`; return what `step_wait` does, of this half only. Raises as `step_wait` does."""
        return self._end_step(half, "send", timeout)

    def half_rows(self, half: int) -> slice:
        """Return which environments `send` and `recv` mean by half 0 or 1."""
        if half not in (0, 1):
            raise ValueError(f"`half` must be 0 or 1, got {half!r}.")
        if self.num_workers == 1:
            raise ValueError("`send` and `recv` need a worker for each half: set `num_workers` to 2 or more.")
        return self._parts[half].rows

    def _begin_step(self, actions: Any, part_index: int, name: str) -> None:
        part = self._parts[part_index]
        requests: Requests | None = None
        if self.on_worker_failure == "restart":
            write_tree(part.observations_before, part.observations)
        try:
            write_tree(part.actions, actions, "same_kind")  # 0.9 is not action 0
        except ValueError:
            # For spaces of shape (1,), numbers are taken in place of arrays of one number. Environments then get what
            # AsyncVectorEnv would hand them: each its number as it came.
            count = part.rows.stop - part.rows.start
            if not isinstance(part.actions, np.ndarray) or part.actions.shape != (count, 1):
                raise
            if np.shape(actions) != (count,):
                raise
            write_tree(part.actions, np.reshape(actions, (-1, 1)), "same_kind")
            requests = list(enumerate(actions, part.rows.start))
        self._pool.acted = True
        self._begin(name, requests, part_index)

    def _end_step(self, part_index: int, name: str, timeout: float | None) -> StepReturn:
        part, table = self._parts[part_index], self._shared.info_table

        def begin_anew(worker: Worker) -> None:
            part.restarted.add(worker)
            self._begin_anew(worker)

        pickled = self._collect(name, timeout, begin_anew, part_index)
        if any(table.contradicts(info) for _, info in pickled):
            # Whose info comes first decides the type of a key's array: so in the environments' order.
            results = sorted([*table.read_each(part.rows), *pickled], key=lambda result: result[0])
            infos = self._merge({}, results)
        else:
            infos = self._merge(table.read(part.rows), pickled)
        if pickled and not table.types:
            table.choose_layout(pickled[0][1])
        while part.restarted:
            infos = self._truncate(part.restarted.pop(), infos)
        if part_index != WHOLE:
            infos = rows_of_infos(infos, part.rows)
        return (*self._fresh(part.results), infos)

    def _fresh(self, tree: Any) -> Any:
        return map_tree(tree, np.ndarray.copy) if self.copy else tree

    def _merge(self, infos: dict[str, Any], results: Results) -> dict[str, Any]:
        for env_index, info in results:
            infos = self._add_info(infos, info, env_index)
        return infos

    # ---- after the loss of a worker -----------------------------------------------------------------------------

    def _may_replace(self, worker: Worker, method: str) -> bool:
        everything_ends = method == "step" or {n for n, _ in self._resets}.issuperset(worker.env_indices)
        return everything_ends and self.on_worker_failure == "restart"

    def _begin_anew(self, worker: Worker) -> None:
        """Begin new episodes in the new environments of a worker that was lost during a step."""
        rows = slice(worker.env_indices.start, worker.env_indices.stop)
        self._shared.info_table.present[rows] = False
        for n in worker.env_indices:
            if self._pool.seeds[n] is not None:  # the same one might lead to the same end: take one that no other has
                self._pool.seeds[n] = 1 + max(seed for seed in self._pool.seeds if seed is not None)
        resets = [(n, {"seed": self._pool.seeds[n]}) for n in worker.env_indices]
        self._pool.request("reset", resets, [worker])
        self._pool.collect("reset", [worker])
        if self.autoreset_mode != AutoresetMode.SAME_STEP:
            worker.reply = ([], [])
            if self.autoreset_mode == AutoresetMode.NEXT_STEP:
                self._pool.request("await_reset", resets, [worker])
                self._pool.collect("await_reset", [worker])

    def _truncate(self, worker: Worker, infos: dict[str, Any]) -> dict[str, Any]:
        """End the episodes of a lost worker as the autoreset mode has it: truncated where they were before the step."""
        shared = self._shared
        before = copies_of_rows(self._observations_before, self.num_envs)
        for n in worker.env_indices:
            shared.rewards[n], shared.terminations[n], shared.truncations[n] = 0.0, False, True
            info: dict[str, Any] = {"worker_restarted": True}
            if self.autoreset_mode == AutoresetMode.SAME_STEP:
                info = {"final_obs": before[n], "final_info": info, **info}
            else:
                write_tree(row_of(shared.observations, n), before[n])
            infos = self._add_info(infos, info, n)
        return infos

    # ---- calls, attributes, states ------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return `environment.name(*args, **kwargs)`, or the attribute `name`, of every environment."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a `call`. Raises as `step_async` does."""
        self._assert_free("call_async")
        if name in ("reset", "step", "close"):
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._begin("call", [(n, (name, args, kwargs)) for n in range(self.num_envs)])

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for `call_async`; return a tuple of num_envs results. Raises as `step_wait` does."""
        return tuple(result for _, result in self._collect("call", timeout))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return the attribute `name` of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set the attribute `name` of every environment: to `values[n]` if `values` is a list or tuple.

        Raises:
            ValueError: if there are not `num_envs` values.
        """
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._call_workers("set_attr", [(n, (name, value)) for n, value in enumerate(values)])

    def render(self) -> tuple[Any, ...] | None:
        """Return what every environment renders."""
        return self.call("render")

    @property  # type: ignore[misc]
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment's random generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of every environment's random generator."""
        return self.get_attr("np_random")

    def get_state(self) -> dict[str, Any]:
        """Return all that `set_state` needs for a bit-identical continuation, as plain numbers, strings and arrays.

        Raises:
            WorkerError, also a TypeError: if an environment lacks `get_state()` or `set_state(state)`.
        """
        states = self._call_workers("get_state", [(n, None) for n in range(self.num_envs)])
        observations = map_tree(self._shared.observations, np.copy)  # a reset by mask returns those that it spares
        return {"envs": [state for _, state in states], "seeds": list(self._pool.seeds), "observations": observations}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned. Workers may be more or fewer than they were then.

        Raises:
            ValueError: if the state is of another number of environments.
        """
        if len(state["envs"]) != self.num_envs:
            raise ValueError(f"This state is of {len(state['envs'])} environments, but here are {self.num_envs}.")
        # One environment of each worker at a time, which thus has all of `step_timeout`: an emulator that can only
        # play its episode once more takes long.
        for i in range(len(self._pool.workers[-1].env_indices)):  # the last has as many as any
            indices = [n for worker in self._pool.workers for n in worker.env_indices[i : i + 1]]
            self._call_workers("set_state", [(n, state["envs"][n]) for n in indices])
        self._pool.seeds[:] = state["seeds"]
        write_tree(self._shared.observations, state["observations"])

    # ---- the pending call ---------------------------------------------------------------------------------------

    def _assert_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if os.getpid() != self._pool.process:
            raise RuntimeError("A SubprocVecEnv obeys only the process that made it: make one in the child.")

    def _assert_free(self, method: str, part_index: int = WHOLE) -> None:
        self._assert_running()
        if self._pool.failure is not None:
            raise WorkerError(f"Nothing but close() is possible after this: {self._pool.failure}")
        if self._pending and (part_index in self._pending or WHOLE in (part_index, *self._pending)):
            pending = next(iter(self._pending.values()))
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `{pending}` to complete.", pending
            )

    def _begin(self, name: str, requests: Requests | None, part_index: int = WHOLE) -> None:
        part = self._parts[part_index]
        part.restarted.clear()
        try:
            self._pool.request("step" if name == "send" else name, requests, part.workers)
            self._pending[part_index] = name
        except BaseException as error:
            if any(worker.pending for worker in part.workers):  # otherwise a request could not be pickled
                self._interrupted(name, error)
            raise

    def _interrupted(self, name: str, error: BaseException) -> None:
        """Allow nothing but `close`, after Ctrl-C say: nobody knows which workers have begun, or answered."""
        self._pool.failure = f"`{name}` was interrupted by {error!r}."

    def _call_workers(self, name: str, requests: Requests) -> Results:
        self._assert_free(name)
        self._begin(name, requests)
        return self._collect(name)

    def _collect(
        self,
        name: str,
        timeout: float | None = None,
        begin_anew: Callable[[Worker], None] | None = None,
        part_index: int = WHOLE,
    ) -> Results:
        """Wait for the pending call `name`; where a worker is lost and may be replaced, do so and `begin_anew`."""
        self._assert_running()
        if self._pending.get(part_index) != name:
            if name == "send":
                text = f"Calling `recv` for half {part_index} without any prior call to `send`."
                raise NoAsyncCallError(text, "recv")
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        method = "step" if name == "send" else name
        failure = self._pool.failure  # of the other half: no replacement in this one mends it
        while True:
            try:
                results = self._pool.collect(method, self._parts[part_index].workers, timeout)
                del self._pending[part_index]
                return results
            except WorkerError as error:
                if error.worker is not None and begin_anew is not None and self._may_replace(error.worker, method):
                    try:
                        self._pool.replace(error, begin_anew)
                        self._pool.failure = failure
                    except BaseException:
                        del self._pending[part_index]
                        raise
                    continue
                del self._pending[part_index]
                report = error
                if error.worker is not None:  # what another worker's environment raised tells more, and may be why
                    report = self._pool.environment_error(method, self._parts[part_index].workers) or error
                if method in ("reset", "step"):
                    # As AsyncVectorEnv does: the workers concerned have closed their environments by now.
                    for env_error in report.errors:
                        logger.error(
                            "Received the following error from Worker-%s - Shutting it down", env_error.env_index
                        )
                        logger.error("%s", env_error.trace)
                    if report.errors:
                        logger.error("Raising the last exception back to the main process.")
                raise report from error.__cause__ if report is error else error
            except multiprocessing.TimeoutError:  # the call stays pending
                raise
            except BaseException as error:
                self._pending.pop(part_index, None)
                self._interrupted(name, error)
                raise

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments and end the workers; never wait much longer than `timeout`.

        Args:
            timeout: seconds (default 2) that environments may take to finish and close, before they are killed.
            terminate: kill them at once.
        """
        for name in set(self._pending.values()):
            logger.warn(f"Calling `close` while waiting for a pending call to `{name}` to complete.")
        self._pool.close(timeout, terminate)

    def __del__(self) -> None:
        """Leave it to the pool's finalizer, which does the right thing in forked processes too."""


def rows_of_infos(infos: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Return some rows of infos in Gymnasium's vector format."""
    return {key: rows_of_infos(part, rows) if isinstance(part, dict) else part[rows] for key, part in infos.items()}
