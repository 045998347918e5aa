"""Gymnasium's MuJoCo v5 tasks, many robots in one process, bit for bit the same numbers.

    envs = MujocoBatchVecEnv("HalfCheetah-v5", num_envs=16)
    obs, infos = envs.reset(seed=1)
    obs, rewards, terminations, truncations, infos = envs.step(actions)

MuJoCo 4.0 steps a batch of simulations on its own thread pool (`_mujoco_simulations`): no processes, no Python
loop over robots. What is left for Python is one row-wise formula per task (`_mujoco_tasks`). Every constant, and
the noise of every reset, comes from one instance made by `gymnasium.make`.
"""

import ctypes
import difflib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Self

# Without a display, OpenGL draws with EGL. MuJoCo reads this when it is imported, which fails where EGL is missing.
if not {"MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
    try:
        ctypes.CDLL("libEGL.so.1")
        os.environ["MUJOCO_GL"] = "egl"
    except OSError:
        pass

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils import seeding
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from envs._mujoco_simulations import Array, Simulations
from envs._mujoco_tasks import TASKS, Infos


def _pass_on_warning(message: str) -> None:
    """Turn MuJoCo's messages into Python warnings, and drop its note that HalfCheetah's model uses `settotalmass`: that
    is Gymnasium's model, not the user's. MuJoCo itself would print them, and write a file MUJOCO_LOG.TXT."""
    if "settotalmass" in message:
        return
    try:
        warnings.warn(f"MuJoCo: {message}", stacklevel=2)
    except Warning as error:  # warnings are errors here, but no exception can pass through MuJoCo's C code
        print(error, file=sys.stderr)


if mujoco.get_mju_user_warning() is None:
    mujoco.set_mju_user_warning(_pass_on_warning)


def is_plain_task(env: gym.Env) -> bool:
    """Whether `env` is what `gymnasium.make` returns for one of TASKS, with any arguments, so that
    `MujocoBatchVecEnv.like(env, ...)` computes the same: nobody has wrapped it, changed an attribute or replaced a
    method. (An edit of Gymnasium's own files goes unnoticed: copy the class and register it.)"""
    spec = env.unwrapped.spec
    if spec is None or spec.id not in TASKS or not type(env.unwrapped).__module__.startswith("gymnasium.envs.mujoco."):
        return False
    for kind in type(env.unwrapped).__mro__[:-1]:  # without `object`
        if any(getattr(x, "__module__", kind.__module__) != kind.__module__ for x in vars(kind).values()):
            return False
    *wrappers, inner = _layers(env)
    if not {type(wrapper) for wrapper in wrappers} <= {TimeLimit, OrderEnforcing}:
        return False
    twin = gym.make(spec.id, max_episode_steps=_time_limit(env), **spec.kwargs)
    *twin_wrappers, twin_inner = _layers(twin)
    same = [type(wrapper) for wrapper in wrappers] == [type(wrapper) for wrapper in twin_wrappers]
    same = same and all(map(_same_attributes, (*wrappers, inner), (*twin_wrappers, twin_inner)))
    twin.close()
    return same


def _layers(env: Any) -> list[Any]:
    """`env`, the wrappers below and the innermost environment, without Gymnasium's checker, which changes nothing."""
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return [layer for layer in layers if type(layer) is not PassiveEnvChecker]


def _time_limit(env: gym.Env) -> int:
    """The number of steps after which an episode is cut, or -1, which means to `gymnasium.make` that none is."""
    return env.get_wrapper_attr("_max_episode_steps") if env.has_wrapper_attr("_max_episode_steps") else -1


def _same_attributes(layer: Any, twin: Any) -> bool:
    ignored = {"env", "_cached_spec", "_elapsed_steps", "_has_reset", "_np_random", "_np_random_seed"}  # set by use
    mine, its = ({k: v for k, v in vars(part).items() if k not in ignored} for part in (layer, twin))
    return mine.keys() == its.keys() and all(_same_value(mine[name], its[name]) for name in mine)


def _same_value(value: Any, twin: Any) -> bool:
    if type(value) is not type(twin):
        return False
    if isinstance(value, mujoco.MjModel):
        return _model_bytes(value) == _model_bytes(twin)
    if isinstance(value, mujoco.MjData | MujocoRenderer):
        return True
    return data_equivalence(value, twin)


def _model_bytes(model: mujoco.MjModel) -> bytes:
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return buffer.tobytes()


class MujocoBatchVecEnv(VectorEnv[Array, Array, Array]):
    """`num_envs` copies of a Gymnasium MuJoCo v5 task, to the last bit a SyncVectorEnv of `gymnasium.make`.

    Args:
        env_id: one of `TASKS`.
        num_envs: number of environments N.
        num_threads: threads that simulate, the caller's included; None: the CPUs this process may use.
            The numbers do not depend on it.
        autoreset_mode: any of Gymnasium's three. With SAME_STEP a step that ends an episode returns the next
            episode's first observation, and the last one in `infos["final_obs"]`.
        make_kwargs: passed on to `gymnasium.make` (ctrl_cost_weight, max_episode_steps, ...).

    Observations are (N, d) float64, rewards (N,) float64, terminations and truncations (N,) bool. Returned
    arrays are fresh, but masks in `infos` that say the same may be one array. Where the physics blows up, MuJoCo
    warns and sets that simulation back to the model's defaults, and the episode goes on, as in Gymnasium.

    Raises:
        ValueError: `env_id` is not one of the tasks, or a number is out of range.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        num_threads: int | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        **make_kwargs: Any,
    ) -> None:
        if env_id not in TASKS:
            closest = difflib.get_close_matches(env_id, TASKS, n=1, cutoff=0.0)[0]
            raise ValueError(f"{env_id!r} is none of {', '.join(TASKS)}; the closest is {closest!r}.")
        if num_threads is None:
            num_threads = len(os.sched_getaffinity(0))
        if num_envs < 1 or num_threads < 1:
            raise ValueError(f"num_envs={num_envs} and num_threads={num_threads} must both be at least 1.")
        self._template = gym.make(env_id, **make_kwargs)
        env: Any = self._template.unwrapped
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**env.metadata, "autoreset_mode": self.autoreset_mode}
        self.spec = self._template.spec
        self.single_observation_space = self._template.observation_space
        self.single_action_space = self._template.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

        self._env_id = env_id
        self._sims = Simulations(env.model, num_envs, min(num_threads, num_envs))
        self._task = TASKS[env_id](env, self._sims)
        self._frame_skip: int = env.frame_skip
        self._time_limit = (self.spec and self.spec.max_episode_steps) or np.iinfo(np.int64).max
        self._elapsed = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.bool_)  # episodes that wait for their reset; none in SAME_STEP
        self._position = self._task.position()
        self._restored_obs: Array | None = None  # between set_state() and a step: what was returned last
        self._generators, self._seeds = map(list, zip(*(seeding.np_random() for _ in range(num_envs)), strict=True))
        self._everywhere = np.ones(num_envs, np.bool_)
        self._everywhere.flags.writeable = False
        self._masks: Infos = {}
        self._process = os.getpid()
        self._ready_in: int | None = None  # the process in which step() may be called: ours, from reset to close

        # Gymnasium's own reset_model draws the noise of a reset; only what it does with it is replaced.
        self._drawn: list[Array] = []
        env.set_state = lambda qpos, qvel: self._drawn.extend((qpos, qvel))
        env._get_obs = lambda: None

    @classmethod
    def like(cls, env: gym.Env, num_envs: int, num_threads: int | None = None) -> Self:
        """`num_envs` copies of `env`, for which `is_plain_task` must hold."""
        spec = env.unwrapped.spec
        assert spec is not None
        return cls(spec.id, num_envs, num_threads, max_episode_steps=_time_limit(env), **spec.kwargs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, Infos]:
        """Begin episodes; environment n is seeded with `seed + n` or `seed[n]`, or else its stream goes on.

        `options={"reset_mask": mask}`, a bool array (N,), resets only where it is true.

        Raises:
            ResetNeeded: the first reset leaves environments out.
            ValueError: the mask, or the number of seeds, does not fit.
        """
        self._check_usable()
        seeds = [int(seed) + n for n in range(self.num_envs)] if isinstance(seed, int | np.integer) else seed
        if seeds is not None and len(seeds) != self.num_envs:
            raise ValueError(f"There are {self.num_envs} environments but {len(seeds)} seeds.")
        mask = (options or {}).get("reset_mask", self._everywhere)
        if getattr(mask, "shape", None) != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise ValueError(f"options['reset_mask'] must be a bool array ({self.num_envs},), not all false.")
        if self._ready_in is None and not mask.all():
            raise ResetNeeded("The first reset must be of all environments; options['reset_mask'] leaves some out.")
        mask = mask.copy()  # it becomes part of the infos
        for n, own_seed in enumerate(seeds or ()):
            if mask[n] and own_seed is not None:
                self._generators[n], self._seeds[n] = seeding.np_random(own_seed)
        self._begin_episodes(mask)
        self._ready_in = self._process
        if self._restored_obs is not None:
            self._restored_obs[mask] = self._task.observe()[mask]
        return self._last_obs(), self._merge((self._task.reset_info(), mask))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment's random generator; -1 where `set_state` has replaced it."""
        return tuple(self._seeds)

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Every environment's random generator."""
        return tuple(self._generators)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, Infos]:
        """Apply actions (N, number of actuators) for `frame_skip` substeps of the physics.

        Raises:
            ResetNeeded: before the first reset, or in DISABLED mode after an end that was not reset.
            ValueError: the actions have another shape.
        """
        if self._ready_in != os.getpid():
            self._check_usable()
            raise ResetNeeded("Cannot call env.step() before calling env.reset()")
        sims, task = self._sims, self._task
        actions = np.ascontiguousarray(actions)
        if actions.shape != sims.ctrl.shape:
            raise ValueError(f"Actions must have shape {sims.ctrl.shape}, got {actions.shape}.")
        begins, ids = None, None  # where this step is a reset (or ends with one); who is simulated
        if self.autoreset_mode is not AutoresetMode.SAME_STEP and self._ended.any():
            if self.autoreset_mode is AutoresetMode.DISABLED:
                raise ResetNeeded(f"Environments {np.flatnonzero(self._ended).tolist()} ended: reset them first.")
            begins, ids = self._ended, np.flatnonzero(~self._ended).astype(np.int32)

        self._restored_obs = None
        sims.ctrl[...] = actions
        sims.step(self._frame_skip, ids)
        if task.contact_forces:
            sims.compute_contact_forces(ids)
        before, self._position = self._position, task.position()
        rewards, terminations, info = task.score(actions, before, self._position)
        rewards = rewards.astype(np.float64, copy=False)  # whatever the actions were
        self._elapsed += 1
        truncations = self._elapsed >= self._time_limit
        if begins is not None:
            rewards[begins], terminations[begins], truncations[begins] = 0.0, False, False
        ended = terminations | truncations

        final: Infos = {}
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            self._ended = ended
        elif np.count_nonzero(ended):
            begins, last_obs = ended, task.observe()
            final_obs = np.full(self.num_envs, None, dtype=object)
            for n in np.flatnonzero(ended):
                final_obs[n] = last_obs[n]
            final = {
                "final_obs": final_obs,
                "final_info": self._merge(({key: values.copy() for key, values in info.items()}, ended)),
            }
            final |= {"_final_obs": ended, "_final_info": ended}
        if begins is None:
            self._masks = self._masks or {"_" + key: self._everywhere for key in info}
            info |= self._masks
        else:
            self._begin_episodes(begins)
            info = self._merge((info, ~begins), (task.reset_info(), begins)) | final
        return task.observe(), rewards, terminations, truncations, info

    def _last_obs(self) -> Array:
        return self._task.observe() if self._restored_obs is None else self._restored_obs.copy()

    def _begin_episodes(self, mask: Array) -> None:
        env: Any = self._template.unwrapped
        ids = np.flatnonzero(mask).astype(np.int32)
        self._sims.reset(ids)
        for n in ids:
            env._np_random = self._generators[n]
            env.reset_model()
            self._sims.qpos[n], self._sims.qvel[n] = self._drawn
            self._drawn.clear()
        self._sims.forward(ids)
        self._elapsed[ids] = 0
        self._ended = self._ended & ~mask
        self._position[mask] = self._task.position()[mask]  # of the others, set_state() has put back better ones

    def _merge(self, *parts: tuple[Infos, Array]) -> Infos:
        """Gymnasium's vector infos of (fresh arrays, where they hold): zeros, and a false mask, elsewhere."""
        merged: Infos = {}
        for info, mask in parts:
            inside, outside = np.flatnonzero(mask), np.flatnonzero(~mask)
            for key, values in info.items() if len(inside) else ():
                if key in merged:
                    merged[key][inside] = values[inside]
                    merged["_" + key] = merged["_" + key] | mask
                else:
                    values[outside] = 0
                    merged[key], merged["_" + key] = values, mask
        return merged

    def get_state(self) -> dict[str, Any]:
        """Everything a continued run depends on: physics (with the warm start), clocks, random streams."""
        self._check_usable()
        return {
            "env_id": self._env_id,
            "physics": self._sims.state.copy(),
            "position": self._position.copy(),
            "observations": self._last_obs(),
            "elapsed": self._elapsed.copy(),
            "ended": self._ended.copy(),
            "generators": [generator.bit_generator.state for generator in self._generators],
            "was_reset": self._ready_in is not None,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from the `get_state()` of an environment of the same task and size.

        Raises:
            ValueError: the state is of another task, or of another number of environments.
        """
        self._check_usable()
        mine, given = (self._env_id, self._sims.state.shape), (state["env_id"], state["physics"].shape)
        if given != mine:
            raise ValueError(f"The state is of {given[0]} {given[1]}, the environment is {mine[0]} {mine[1]}.")
        self._sims.state[...] = state["physics"]
        # not recomputed, since MuJoCo's derived positions lie one substep behind its state
        self._position = state["position"].copy()
        self._restored_obs = state["observations"].copy()
        self._elapsed, self._ended = state["elapsed"].copy(), state["ended"].copy()
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = saved
        self._seeds = [-1] * self.num_envs
        self._ready_in = self._process if state["was_reset"] else None

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the threads and free the simulations."""
        self._ready_in = None
        self._template.close()
        self._sims.close()

    def _check_usable(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("This MujocoBatchVecEnv is closed: make a new one.")
        if os.getpid() != self._process:
            raise RuntimeError("The threads of a MujocoBatchVecEnv do not survive a fork: make one in the child.")
