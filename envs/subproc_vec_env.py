"""SubprocVecEnv: many environments, few processes, shared memory; no hangs, no orphans, no lost causes.

    envs = SubprocVecEnv([partial(gym.make, "CartPole-v1")] * 16, autoreset_mode="SameStep")
    observations, infos = envs.reset(seed=1)  # (16, 4) float32; environment n is seeded with 1 + n
    observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

What happens in a step:
1. `step_async` writes the actions into the shared memory and releases a semaphore of each worker.
2. Each worker steps its environments in turn and writes observations, rewards, ends and numeric infos into its rows
   (`EnvWorker.step` in envs/_subproc_worker.py).
3. The parent waits for all, looking now and then who still lives (`WorkerPool.collect` in envs/_worker_pool.py), and
   `step_wait` copies the arrays and merges the infos.

It can stand in for `gymnasium.vector.AsyncVectorEnv`, for numeric spaces: same errors, same methods but for
`call_async` and `call_wait`, same keywords but for `daemon`, `worker` and `observation_mode`. The differences: a
process steps several environments in turn, so that there need be no more processes than cores; what an environment
sends at every step is not pickled; a final observation must fit its space as all others do; no environment is created
in the calling process; and every wait has a limit and notices a dead worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing import TimeoutError
from typing import Any, Literal

import numpy as np
from gymnasium import Env, Space, logger
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envs._shared_memory import check_numeric, copies_of_rows, info_layout, map_tree, write_tree
from envs._subproc_worker import Requests
from envs._worker_pool import Worker, WorkerError, WorkerPool
from envs.state import NoState

MAX_RESTARTS = 3  # of one worker, without a step finished in between
StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class SubprocVecEnv(VectorEnv):
    """`len(env_fns)` environments in `num_workers` processes.

    Args:
        env_fns: one function per environment, which creates it, in a worker. Under forkserver and spawn it must
            survive cloudpickle; under fork, what several of them hold in common is shared by a worker's environments.
        num_workers: number of processes, at most one per environment. Default: one per CPU core this process may use.
        copy: return fresh arrays. With False the arrays are the shared ones, which the next step overwrites.
        context: "fork", "forkserver", "spawn", or None for Python's default. Fork starts fastest and takes the
            least memory; the others run the main script again in each worker, up to `if __name__ == "__main__":`.
        autoreset_mode: what follows the end of an episode. With SAME_STEP the step that ends an episode returns the
            next one's first observation and keeps what it replaces in `infos["final_obs"]` and `infos["final_info"]`.
        step_timeout: seconds after which a worker that has not finished any call counts as hung; None means never.
        on_worker_failure: "raise", or "restart": a worker that is lost in `step`, or in a `reset` without a mask, is
            replaced. Episodes that a step cost come back as truncated, with reward 0, the observation before the step
            as the final one, and `infos["worker_restarted"]` set; other environments lose nothing. New environments
            know nothing of earlier `set_attr`s. A worker that is lost 4 times without finishing a step raises.
        max_concurrency: an upper limit of `num_workers`. shared_memory: always is. Both are AsyncVectorEnv's.

    Raises:
        TypeError, ValueError, RuntimeError: for arguments or spaces that cannot be served or do not fit together.
        WorkerError: if a constructor raises (it is then also of that exception's type), exits, crashes or hangs.
        OSError: if /dev/shm is full or the process has no file descriptor left.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env]],
        num_workers: int | None = None,
        *,
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        step_timeout: float | None = 300.0,
        on_worker_failure: Literal["raise", "restart"] = "raise",
    ) -> None:
        if not env_fns:
            raise ValueError("`env_fns` is empty, but SubprocVecEnv needs at least one environment.")
        if on_worker_failure not in ("raise", "restart"):
            raise ValueError(f"`on_worker_failure` must be 'raise' or 'restart', got {on_worker_failure!r}.")
        if step_timeout is not None and not step_timeout > 0:
            raise ValueError(f"`step_timeout` must be a positive number of seconds or None, got {step_timeout}.")
        for name, limit in (("num_workers", num_workers), ("max_concurrency", max_concurrency)):
            if isinstance(limit, bool) or not isinstance(limit, int | np.integer | None):
                raise ValueError(f"`{name}` must be an integer or None, got {type(limit)}.")
            if limit is not None and limit < 1:
                raise ValueError(f"`{name}` must be a positive or None, got {limit}.")
        self.num_envs = len(env_fns)
        num_workers = num_workers or len(os.sched_getaffinity(0))
        self.num_workers = min(num_workers, max_concurrency or self.num_envs, self.num_envs)
        self.copy = copy
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.on_worker_failure = on_worker_failure
        self.advice = ""  # what the program tells its user to do after a WorkerError, as a note on it
        self._pending: str | None = None  # the call that the workers are busy with: "reset", "step", ...
        self._pool = WorkerPool(self, env_fns, context, step_timeout)
        try:
            descriptions = self._pool.start(self._pool.workers)
            self._adopt_spaces([description[:2] for description in descriptions])
            _, _, metadata, self.render_mode = descriptions[0]
            self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
            self._shared = self._pool.attach(self.single_observation_space, self.single_action_space)
        except BaseException:
            self.close()
            raise
        shared = self._shared
        self._results = (shared.observations, shared.rewards, shared.terminations, shared.truncations)
        self._observations_before = map_tree(shared.observations, np.copy)  # a lost episode's final ones

    def _adopt_spaces(self, spaces: list[tuple[Space, Space]]) -> None:
        """Set the vector's spaces to the (observation, action) spaces of the environments, which must be the same."""
        self.single_observation_space, self.single_action_space = spaces[0]
        for index, (observation_space, action_space) in enumerate(spaces):
            check_numeric(observation_space)
            check_numeric(action_space)
            if (observation_space, action_space) != spaces[0]:
                text = f"environment {index} has {observation_space} and {action_space}, environment 0 {spaces[0]}."
                raise RuntimeError(f"All environments need the same spaces, but {text}")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    # ---- step -------------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> StepReturn:
        """Step every environment once: `step_async`, then `step_wait`."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step of every environment with an element of `action_space`: an array (num_envs, ...), or a dict or
        tuple of such. Of any integer type where integers are wanted; float64 is rounded to the space's type.
        """
        self._assert_free("step_async")
        if self.on_worker_failure == "restart":
            write_tree(self._observations_before, self._shared.observations)
        requests: Requests | None = None
        target: Any = self._shared.actions
        one_real_each = isinstance(target, np.ndarray) and target.dtype.kind == "f" and target.size == self.num_envs
        if one_real_each and np.shape(actions) == (self.num_envs,):
            # Environments get what AsyncVectorEnv would hand them: each its number as it came.
            requests, actions = list(enumerate(actions)), np.reshape(actions, target.shape)
        write_tree(target, actions)
        self._begin("step", requests)

    def step_wait(self, timeout: float | None = None) -> StepReturn:
        """Wait for `step_async`; return observations (num_envs, ...), rewards (num_envs,) float64, terminations and
        truncations (num_envs,) bool, and infos in Gymnasium's vector format.

        Raises:
            multiprocessing.TimeoutError: after `timeout` seconds; the step stays pending and can be waited for.
            WorkerError: if an environment raised (it is then also of that exception's type), a worker died, or it
                took longer than `step_timeout` (it is then also a TimeoutError). Only `close` is possible then.
        """
        pickled, table = self._collect("step", timeout), self._shared.infos
        num_shared, infos = np.count_nonzero(table.present), {}
        if num_shared == self.num_envs:
            infos = table.read()
        elif num_shared or pickled:  # in the environments' order: whose info comes first decides the type of a key
            infos = self._merge(sorted([*table.read_each(), *pickled], key=lambda result: result[0]))
        results = map_tree(self._results, np.ndarray.copy) if self.copy else self._results
        if pickled and not table.layout and (layout := info_layout(pickled[0][1])):
            self._pool.use_info_layout(layout)
        return (*results, infos)

    def _merge(self, results: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for env_index, info in results:
            infos = self._add_info(infos, info, env_index)
        return infos

    # ---- reset ------------------------------------------------------------------------------------------------------

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

        Environment n is seeded with `seed + n`, or `seed[n]`; None leaves its generator as it is.
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
            raise ValueError("`options['reset_mask']` must contain a boolean array with at least one True value")
        return np.flatnonzero(mask).tolist()

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for `reset_async`; return observations (num_envs, ...) and infos. Raises as `step_wait` does."""
        infos, observations = self._merge(self._collect("reset", timeout)), self._shared.observations
        return map_tree(observations, np.ndarray.copy) if self.copy else observations, infos

    # ---- calls, attributes, states ----------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return `environment.name(*args, **kwargs)`, or the attribute `name`, of every environment."""
        if name in ("reset", "step", "close"):
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        results = self._command("call", [(n, (name, args, kwargs)) for n in range(self.num_envs)])
        return tuple(result for _, result in results)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return the attribute `name` of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set the attribute `name` of every environment: to `values[n]` if `values` is a list or tuple."""
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._command("set_attr", [(n, (name, value)) for n, value in enumerate(values)])

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

        Raises a WorkerError that is also an `envs.state.NoState` if an environment cannot be saved, and NoState if a
        worker is lost that the next step is to replace.
        """
        self._assert_free("get_state")
        if self.on_worker_failure == "restart" and not all(x.process.is_alive() for x in self._pool.workers):
            raise NoState("a worker is lost, and the next step replaces it.")
        states = [state for _, state in self._command("get_state", [(n, None) for n in range(self.num_envs)])]
        observations = map_tree(self._shared.observations, np.copy)  # a reset by mask returns those that it spares
        return {"envs": states, "observations": observations}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned. Workers may be more or fewer than they were then."""
        if len(state["envs"]) != self.num_envs:
            raise ValueError(f"This state is of {len(state['envs'])} environments, but here are {self.num_envs}.")
        self._command("set_state", list(enumerate(state["envs"])))
        write_tree(self._shared.observations, state["observations"])

    # ---- the pending call -------------------------------------------------------------------------------------------

    def _command(self, name: str, requests: Requests) -> list[tuple[int, Any]]:
        self._assert_free(name)
        self._begin(name, requests)
        return self._collect(name)

    def _assert_running(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _assert_free(self, method: str) -> None:
        self._assert_running()
        if self._pending is not None:
            text = f"Calling `{method}` while waiting for a pending call to `{self._pending}` to complete."
            raise AlreadyPendingCallError(text, self._pending)
        if self._pool.failure is not None:
            raise WorkerError(f"Nothing but close() is possible after this: {self._pool.failure}")

    def _begin(self, name: str, requests: Requests | None) -> None:
        self._pool.request(name, requests, self._pool.workers)
        self._pending = name

    def _collect(self, name: str, timeout: float | None = None) -> list[tuple[int, Any]]:
        """Wait for the pending call `name`, and replace workers that are lost in it if that is wanted."""
        self._assert_running()
        if self._pending != name:
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        self._pending = None
        lost: Worker | None = None
        while True:
            try:
                if lost is not None:  # here, since the new worker may be lost as well
                    self._replace(lost, name)
                return self._pool.collect(name, self._pool.workers, timeout)
            except WorkerError as error:
                lost = self._lost_but_replaceable(error, name)
                logger.warn("%s\nA new worker takes its place.", error)
            except TimeoutError:  # only the patience of this call has ended
                self._pending = name
                raise

    # ---- after the loss of a worker ---------------------------------------------------------------------------------

    def _lost_but_replaceable(self, error: WorkerError, name: str) -> Worker:
        """Return the worker whose loss `error` reports if another may take its place, or raise that error."""
        worker = error.worker
        # A reset with a mask would leave the other environments of a new worker without an episode.
        begins_all = name == "step" or (name == "reset" and len(self._resets) == self.num_envs)
        if self.on_worker_failure == "restart" and worker is not None and begins_all:
            if worker.failures <= MAX_RESTARTS:
                return worker
            error = WorkerError(f"Gave up after {MAX_RESTARTS} restarts without a finished step. {error}")
        if self.advice:
            error.add_note(self.advice)
        raise error

    def _replace(self, worker: Worker, name: str) -> None:
        """Put a new worker in the place of one that was lost during a reset or a step, and let it finish that."""
        self._pool.restart(worker)
        if name == "reset":
            self._pool.run("reset", self._resets, [worker])
        else:
            before = copies_of_rows(self._observations_before, self.num_envs)
            self._pool.run("restart", list(enumerate(before)), [worker])

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments and end the workers: kill those that take longer than `timeout` seconds (default 2),
        or with `terminate` all at once."""
        if self._pending is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._pending}` to complete.")
        self._pool.close(timeout, terminate)

    def __del__(self) -> None:
        """Leave it to the pool's finalizer, which does the right thing in forked processes too."""
