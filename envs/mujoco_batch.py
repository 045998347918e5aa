"""Gymnasium's MuJoCo v5 tasks, many robots in one process, bit for bit the same numbers.

    envs = MujocoBatchVecEnv("HalfCheetah-v5", num_envs=16)
    obs, infos = envs.reset(seed=1)
    obs, rewards, terminations, truncations, infos = envs.step(actions)

MuJoCo 4.0 steps a batch of simulations on its own thread pool: no processes, no Python loop over robots.
What is left for Python is one row-wise formula per task. Each keeps the floating-point order of Gymnasium's
scalar code (its sums are pairwise, its norms a BLAS dot product, its `x**2` the C library's `pow`). Every
constant, and the noise of every reset, comes from one instance made by `gymnasium.make`.
"""

import ctypes
import difflib
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
import mujoco
import mujoco._batch
import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

Array = NDArray[Any]
Infos = dict[str, Any]

# -------------------------------------------------------------------------------------------- the simulations

_INTEGRATION, _CTRL = int(mujoco.mjtState.mjSTATE_INTEGRATION), int(mujoco.mjtState.mjSTATE_CTRL)
_NO_STAGE, _ALL_STAGES = int(mujoco.mjtStage.mjSTAGE_NONE), int(mujoco.mjtStage.mjSTAGE_ACC)


class _BatchConfig(ctypes.Structure):
    _fields_ = [("num_threads", ctypes.c_int), ("persistent", ctypes.c_bool)]


def _load_mujoco() -> ctypes.CDLL:
    """MuJoCo's C library, through the Python bindings that are linked with it: surely the same copy."""
    lib = ctypes.CDLL(mujoco._batch.__file__)
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    signatures: list[tuple[str, Any, list[Any]]] = [
        ("mjb_makeBatch", pointer, [pointer, integer, ctypes.POINTER(_BatchConfig), text, integer]),
        ("mjb_deleteBatch", None, [pointer]),
        ("mjb_state", pointer, [pointer]),
        ("mjb_output", pointer, [pointer, text, pointer, pointer]),
        ("mjb_reset", integer, [pointer, pointer, integer, pointer, integer]),
        ("mjb_forward", integer, [pointer, pointer, integer, integer]),
        ("mjb_step", integer, [pointer, pointer, integer, integer, integer]),
        ("mjb_apply", integer, [pointer, pointer, integer, pointer, pointer, integer]),
        ("mjb_status", ctypes.POINTER(integer), [pointer]),
        ("mjb_error", text, [pointer, integer]),
        ("mjb_getData", None, [pointer, integer, pointer]),
    ]
    for name, result, arguments in signatures:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


_LIB = _load_mujoco()
_RNE_POST_CONSTRAINT = ctypes.cast(_LIB.mj_rnePostConstraint, ctypes.c_void_p)


def _delete_batch(batch: int, owner: int) -> None:
    # A forked child has the memory but not the threads: to join them there would be to wait for ever.
    if os.getpid() == owner:
        _LIB.mjb_deleteBatch(batch)


class Simulations:
    """`num` simulations of one model on a thread pool: MuJoCo's batch through its C interface.

    `mujoco.batch.Batch` wraps the same engine, but not `mjb_apply`, which Gymnasium's contact forces need.
    The batch is persistent (one MjData each): those forces are computed from what the last substep left.

    Attributes:
        state: (num, size of mjSTATE_INTEGRATION) float64, live: a write counts from the next call on.
        motion, qpos, qvel, ctrl: views of its columns; `motion` is qpos and qvel side by side.
    """

    def __init__(self, model: mujoco.MjModel, num: int, num_threads: int) -> None:
        reason = ctypes.create_string_buffer(1000)
        config = _BatchConfig(num_threads, True)
        self._batch = _LIB.mjb_makeBatch(model._address, num, config, reason, len(reason))
        if not self._batch:
            raise RuntimeError(f"MuJoCo could not make {num} simulations: {reason.value.decode()}")
        self.close = weakref.finalize(self, _delete_batch, self._batch, os.getpid())
        self.num = num
        self._template = mujoco.MjData(model)
        self.state = self._view(_LIB.mjb_state(self._batch), (mujoco.mj_stateSize(model, _INTEGRATION),))
        # The components lie in the order of their bits: time, qpos, qvel, act, ...
        ctrl = mujoco.mj_stateSize(model, _INTEGRATION & (_CTRL - 1))
        self.motion = self.state[:, 1 : 1 + model.nq + model.nv]
        self.qpos, self.qvel = self.motion[:, : model.nq], self.motion[:, model.nq :]
        self.ctrl = self.state[:, ctrl : ctrl + model.nu]

    def _view(self, address: int, shape: tuple[int, ...]) -> Array:
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_double))
        return np.ctypeslib.as_array(pointer, (self.num, *shape))

    def field(self, name: str) -> Array:
        """(num, ...) live array of a derived MjData field, which every call copies out: only for reading."""
        address = _LIB.mjb_output(self._batch, name.encode(), None, None)
        return self._view(address, getattr(self._template, name).shape)

    def step(self, num_substeps: int, ids: Array | None = None) -> None:
        """`num_substeps` times mj_step for the simulations `ids` (sorted int32; None: all)."""
        self._check(_LIB.mjb_step(self._batch, *self._ids(ids), num_substeps, _NO_STAGE))

    def compute_contact_forces(self, ids: Array | None = None) -> None:
        """Fill `cfrc_ext` from the last substep with mj_rnePostConstraint, as Gymnasium does after each step.

        That function takes the first two of the four arguments mjb_apply gives. mjb_apply does not copy
        fields out; a forward pass of no stages does, and computes nothing.
        """
        self._check(_LIB.mjb_apply(self._batch, *self._ids(ids), _RNE_POST_CONSTRAINT, None, 0))
        self._check(_LIB.mjb_forward(self._batch, *self._ids(ids), _NO_STAGE))

    def reset(self, ids: Array) -> None:
        """mj_resetData, computing nothing."""
        self._check(_LIB.mjb_reset(self._batch, *self._ids(ids), None, _NO_STAGE))

    def forward(self, ids: Array | None = None) -> None:
        """mj_forward."""
        self._check(_LIB.mjb_forward(self._batch, *self._ids(ids), _ALL_STAGES))

    def copy_data(self, index: int, data: mujoco.MjData) -> None:
        """Write simulation `index`, derived fields included, into `data`."""
        _LIB.mjb_getData(self._batch, index, data._address)

    def _ids(self, ids: Array | None) -> tuple[int | None, int]:
        return (None, self.num) if ids is None else (ids.ctypes.data, len(ids))

    def _check(self, num_failed: int) -> None:
        if num_failed:
            status = _LIB.mjb_status(self._batch)
            first = next(i for i in range(self.num) if status[i])
            reason = " ".join(_LIB.mjb_error(self._batch, first).decode().split())
            raise RuntimeError(
                f"MuJoCo failed in {num_failed} of {self.num} simulations, at number {first}: {reason}"
            )


# -------------------------------------------------------------------------------------------------- the tasks


class Task(NamedTuple):
    """What a task adds to the physics. All arrays have one row per environment and are freshly made.

    observe(): the observations. position(): what score() compares, read before and after a step.
    score(actions, before, after): rewards, terminations, infos of a step. reset_info(): infos of a reset.
    """

    observe: Callable[[], Array]
    score: Callable[[Array, Array, Array], tuple[Array, Array, Infos]]
    position: Callable[[], Array]
    reset_info: Callable[[], Infos] = dict
    contact_forces: bool = False


def _sum_of_squares(rows: Array) -> Array:
    # Along a contiguous last axis NumPy sums each row in the same pairwise order as it sums one vector.
    return np.add.reduce(np.square(rows), axis=1)


def _norm(rows: Array) -> Array:
    # np.linalg.norm of a vector is the root of a BLAS dot product, which may fuse multiply and add: so here.
    return np.sqrt(np.vecdot(rows, rows))


def _clip(values: Array, low: float, high: float) -> Array:
    return np.minimum(np.maximum(values, low), high)  # np.clip, without its microseconds of argument handling


def _locomotion(
    env: Any,
    sims: Simulations,
    observe: Callable[[], Array],
    position: Callable[[], Array],
    reset_info: Callable[[], Infos],
    healthy: Callable[[], Array] | None = None,
    contact_cost: Callable[[], Array] | None = None,
    torques: Array | None = None,
) -> Task:
    """Run along x: forward reward + healthy reward - control cost - contact cost, where a task has them."""
    dt: float = env.dt

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        velocity = (after - before) / dt
        x_velocity = velocity if velocity.ndim == 1 else velocity[:, 0]
        rewards = forward_reward = env._forward_reward_weight * x_velocity
        costs = ctrl_cost = env._ctrl_cost_weight * _sum_of_squares(actions if torques is None else torques)
        info = reset_info()
        info |= {"x_velocity": x_velocity, "reward_forward": forward_reward, "reward_ctrl": -ctrl_cost}
        if velocity.ndim == 2:
            info["y_velocity"] = velocity[:, 1]
        terminated = np.zeros(sims.num, np.bool_)
        if healthy is not None:
            is_healthy = healthy()
            info["reward_survive"] = is_healthy * env._healthy_reward
            rewards = forward_reward + info["reward_survive"]
            terminated = ~is_healthy & env._terminate_when_unhealthy
        if contact_cost is not None:
            contact = contact_cost()
            info["reward_contact"] = -contact
            costs = ctrl_cost + contact
        return rewards - costs, terminated, info

    return Task(observe, score, position, reset_info, contact_forces=contact_cost is not None)


def _half_cheetah(env: Any, sims: Simulations) -> Task:
    skip, x = int(env._exclude_current_positions_from_observation), sims.qpos[:, 0]
    return _locomotion(env, sims, sims.motion[:, skip:].copy, x.copy, lambda: {"x_position": x.copy()})


def _hopper(env: Any, sims: Simulations) -> Task:
    skip = int(env._exclude_current_positions_from_observation)
    x, z, angle = sims.qpos[:, 0], sims.qpos[:, 1], sims.qpos[:, 2]
    (min_z, max_z), (min_angle, max_angle) = env._healthy_z_range, env._healthy_angle_range
    state_range = getattr(env, "_healthy_state_range", None)  # Hopper has one, Walker2d none
    initial_z = env.init_qpos[1]

    def observe() -> Array:
        obs = sims.motion[:, skip:].copy()
        obs[:, -env.model.nv :] = _clip(sims.qvel, -10, 10)
        return obs

    def healthy() -> Array:
        upright = (min_z < z) & (z < max_z) & (min_angle < angle) & (angle < max_angle)
        if state_range is not None:
            state = sims.motion[:, 2:]
            upright &= ((state_range[0] < state) & (state < state_range[1])).all(axis=1)
        return upright

    def reset_info() -> Infos:
        return {"x_position": x.copy(), "z_distance_from_origin": z - initial_z}

    return _locomotion(env, sims, observe, x.copy, reset_info, healthy)


def _plane_info(sims: Simulations) -> Infos:
    xy = sims.qpos[:, :2]
    return {"x_position": xy[:, 0].copy(), "y_position": xy[:, 1].copy(), "distance_from_origin": _norm(xy)}


def _swimmer(env: Any, sims: Simulations) -> Task:
    skip = 2 * env._exclude_current_positions_from_observation
    observe, position = sims.motion[:, skip:].copy, sims.qpos[:, :2].copy
    return _locomotion(env, sims, observe, position, lambda: _plane_info(sims))


def _ant(env: Any, sims: Simulations) -> Task:
    motion = sims.motion[:, 2 * env._exclude_current_positions_from_observation :]
    body_xy, z = sims.field("xpos")[:, env.model.body(env._main_body).id, :2], sims.qpos[:, 2]
    forces = sims.field("cfrc_ext").reshape(sims.num, -1)
    min_z, max_z = env._healthy_z_range

    def observe() -> Array:
        if not env._include_cfrc_ext_in_observation:
            return motion.copy()
        # the first six numbers belong to the world
        return np.concatenate((motion, _clip(forces[:, 6:], *env._contact_force_range)), axis=1)

    def healthy() -> Array:
        return np.isfinite(sims.motion).all(axis=1) & (min_z <= z) & (z <= max_z)

    def contact_cost() -> Array:
        return env._contact_cost_weight * _sum_of_squares(_clip(forces, *env._contact_force_range))

    return _locomotion(env, sims, observe, body_xy.copy, lambda: _plane_info(sims), healthy, contact_cost)


def _humanoid_observe(env: Any, sims: Simulations) -> Callable[[], Array]:
    parts = [sims.motion[:, 2 * env._exclude_current_positions_from_observation :]]
    # without the world's ten inertias, six velocities and six forces, and without the six of the free joint
    for name, skip in (("cinert", 10), ("cvel", 6), ("qfrc_actuator", 6), ("cfrc_ext", 6)):
        if getattr(env, f"_include_{name}_in_observation") is True:
            parts.append(sims.field(name).reshape(sims.num, -1)[:, skip:])
    return lambda: np.concatenate(parts, axis=1)


def _tendon_info(sims: Simulations) -> Callable[[], Infos]:
    length, velocity = sims.field("ten_length"), sims.field("ten_velocity")
    return lambda: {"tendon_length": length.copy(), "tendon_velocity": velocity.copy()}


def _humanoid(env: Any, sims: Simulations) -> Task:
    mass, total_mass = env.model.body_mass.copy(), env.model.body_mass.sum()
    body_centers, z = sims.field("xipos"), sims.qpos[:, 2]
    forces = sims.field("cfrc_ext").reshape(sims.num, -1)
    observe, tendon_info = _humanoid_observe(env, sims), _tendon_info(sims)
    min_z, max_z = env._healthy_z_range

    def center_of_mass() -> Array:
        return (np.einsum("b,nbj->nj", mass, body_centers) / total_mass)[:, :2]

    def healthy() -> Array:
        return (min_z < z) & (z < max_z)

    def contact_cost() -> Array:
        return _clip(env._contact_cost_weight * _sum_of_squares(forces), *env._contact_cost_range)

    def reset_info() -> Infos:
        return _plane_info(sims) | tendon_info()

    return _locomotion(env, sims, observe, center_of_mass, reset_info, healthy, contact_cost, sims.ctrl)


def _humanoid_standup(env: Any, sims: Simulations) -> Task:
    x, y, z = sims.qpos[:, 0], sims.qpos[:, 1], sims.qpos[:, 2]
    forces = sims.field("cfrc_ext").reshape(sims.num, -1)
    observe, tendon_info = _humanoid_observe(env, sims), _tendon_info(sims)
    initial_z, timestep = env.init_qpos[2], env.model.opt.timestep

    def reset_info() -> Infos:
        place = {"x_position": x.copy(), "y_position": y.copy(), "z_distance_from_origin": z - initial_z}
        return place | tendon_info()

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        uph = after / timestep
        ctrl_cost = env._ctrl_cost_weight * _sum_of_squares(sims.ctrl)
        impact_cost = _clip(env._impact_cost_weight * _sum_of_squares(forces), *env._impact_cost_range)
        info = {"reward_linup": uph, "reward_quadctrl": -ctrl_cost, "reward_impact": -impact_cost}
        return uph - ctrl_cost - impact_cost + 1, np.zeros(sims.num, np.bool_), reset_info() | info

    return Task(observe, score, z.copy, reset_info, contact_forces=True)


def _reacher(env: Any, sims: Simulations) -> Task:
    xpos = sims.field("xpos")
    fingertip, target = (xpos[:, env.model.body(name).id] for name in ("fingertip", "target"))

    def observe() -> Array:
        theta, gap = sims.qpos[:, :2].copy(), (fingertip - target)[:, :2]
        return np.concatenate((np.cos(theta), np.sin(theta), sims.qpos[:, 2:], sims.qvel[:, :2], gap), axis=1)

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        reward_dist = -_norm(after) * env._reward_dist_weight
        reward_ctrl = -_sum_of_squares(actions) * env._reward_control_weight
        info = {"reward_dist": reward_dist, "reward_ctrl": reward_ctrl}
        return reward_dist + reward_ctrl, np.zeros(sims.num, np.bool_), info

    return Task(observe, score, lambda: fingertip - target)


def _pusher(env: Any, sims: Simulations) -> Task:
    xpos = sims.field("xpos")
    tips_arm, puck, goal = (xpos[:, env.model.body(name).id] for name in ("tips_arm", "object", "goal"))

    def observe() -> Array:
        return np.concatenate((sims.qpos[:, :7], sims.qvel[:, :7], tips_arm, puck, goal), axis=1)

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        reward_near = -_norm(after - tips_arm) * env._reward_near_weight
        reward_dist = -_norm(after - goal) * env._reward_dist_weight
        reward_ctrl = -_sum_of_squares(actions) * env._reward_control_weight
        info = {"reward_dist": reward_dist, "reward_ctrl": reward_ctrl, "reward_near": reward_near}
        return reward_dist + reward_ctrl + reward_near, np.zeros(sims.num, np.bool_), info

    return Task(observe, score, puck.copy)


def _inverted_pendulum(env: Any, sims: Simulations) -> Task:
    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        terminated = ~np.isfinite(sims.motion).all(axis=1) | (np.abs(after) > 0.2)
        reward = (~terminated).astype(np.int64)
        return reward.astype(np.float64), terminated, {"reward_survive": reward}

    return Task(sims.motion.copy, score, sims.qpos[:, 1].copy)


def _inverted_double_pendulum(env: Any, sims: Simulations) -> Task:
    tip, constraint_force = sims.field("site_xpos")[:, 0], sims.field("qfrc_constraint")

    def square(values: Array) -> Array:
        # Gymnasium squares scalars here, and a scalar's ** is the C library's pow: not always values * values
        return np.array([value**2 for value in values.tolist()])

    def observe() -> Array:
        angles = sims.qpos[:, 1:].copy()
        clipped = _clip(sims.qvel, -10, 10), _clip(constraint_force[:, :1], -10, 10)
        return np.concatenate((sims.qpos[:, :1], np.sin(angles), np.cos(angles), *clipped), axis=1)

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        x, y = after[:, 0], after[:, 2]
        terminated = y <= 1
        distance = 0.01 * square(x) + square(y - 2)
        velocity = 1e-3 * square(sims.qvel[:, 1]) + 5e-3 * square(sims.qvel[:, 2])
        alive = env._healthy_reward * (~terminated).astype(np.int64)
        info = {"reward_survive": alive, "distance_penalty": -distance, "velocity_penalty": -velocity}
        return alive - distance - velocity, terminated, info

    return Task(observe, score, tip.copy)


TASKS: dict[str, Callable[[Any, Simulations], Task]] = {
    "Ant-v5": _ant,
    "HalfCheetah-v5": _half_cheetah,
    "Hopper-v5": _hopper,
    "Humanoid-v5": _humanoid,
    "HumanoidStandup-v5": _humanoid_standup,
    "InvertedDoublePendulum-v5": _inverted_double_pendulum,
    "InvertedPendulum-v5": _inverted_pendulum,
    "Pusher-v5": _pusher,
    "Reacher-v5": _reacher,
    "Swimmer-v5": _swimmer,
    "Walker2d-v5": _hopper,
}

# ------------------------------------------------------------------------------------- the vector environment


@contextmanager
def without_deprecation_note() -> Iterator[None]:
    """Drop MuJoCo's note, on the screen and in a file MUJOCO_LOG.TXT in the working folder, that the model of
    HalfCheetah uses `settotalmass`: Gymnasium's model, not the user's. Other messages become warnings."""

    def pass_on(message: str) -> None:
        if "settotalmass" not in message:
            warnings.warn(message, stacklevel=2)

    previous = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(pass_on)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(previous)


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
    arrays are fresh, but masks in `infos` that say the same may be one array. Where the physics
    blows up, MuJoCo warns (on the screen and in MUJOCO_LOG.TXT) and sets that simulation back to the model's
    defaults, and the episode goes on, as in Gymnasium.

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
            num_threads = (
                len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            )
        if num_envs < 1 or num_threads < 1:
            raise ValueError(f"num_envs={num_envs} and num_threads={num_threads} must both be at least 1.")
        with without_deprecation_note():
            self._template = gym.make(env_id, **{"render_mode": "rgb_array", **make_kwargs})
        env: Any = self._template.unwrapped
        self._template.reset(seed=0)  # it will not render before
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**env.metadata, "autoreset_mode": self.autoreset_mode}
        self.spec, self.render_mode = self._template.spec, env.render_mode
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
        self._generators = [seeding.np_random()[0] for _ in range(num_envs)]
        self._everywhere = np.ones(num_envs, np.bool_)
        self._everywhere.flags.writeable = False
        self._masks: Infos = {}
        self._process = os.getpid()
        self._ready_in: int | None = (
            None  # the process in which step() may be called: ours, from reset to close
        )

        # Gymnasium's own reset_model draws the noise of a reset; only what it does with it is replaced.
        self._drawn: list[Array] = []
        env.set_state = lambda qpos, qvel: self._drawn.extend((qpos, qvel))
        env._get_obs = lambda: None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, Infos]:
        """Begin episodes; environment n is seeded with `seed + n` or `seed[n]`, or else its stream goes on.

        `options={"reset_mask": mask}`, a bool array (N,), resets only where it is true.
        """
        self._check_usable()
        seeds = [seed + n for n in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is not None and len(seeds) != self.num_envs:
            raise ValueError(f"There are {self.num_envs} environments but {len(seeds)} seeds.")
        mask = (options or {}).get("reset_mask", self._everywhere)
        if getattr(mask, "shape", None) != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise ValueError(f"options['reset_mask'] must be a bool array ({self.num_envs},), not all false.")
        mask = mask.copy()  # it becomes part of the infos
        for n, own_seed in enumerate(seeds or ()):
            if mask[n] and own_seed is not None:
                self._generators[n] = seeding.np_random(own_seed)[0]
        self._begin_episodes(mask)
        self._ready_in = self._process
        return self._task.observe(), self._merge((self._task.reset_info(), mask))

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
                raise ResetNeeded(
                    f"Environments {np.flatnonzero(self._ended).tolist()} ended: reset them first."
                )
            begins, ids = self._ended, np.flatnonzero(~self._ended).astype(np.int32)

        sims.ctrl[...] = actions
        sims.step(self._frame_skip, ids)
        if task.contact_forces:
            sims.compute_contact_forces(ids)
        before, self._position = self._position, task.position()
        rewards, terminations, info = task.score(actions, before, self._position)
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
        self._position = self._task.position()

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
            raise ValueError(
                f"The state is of {given[0]} {given[1]}, the environment is {mine[0]} {mine[1]}."
            )
        self._sims.state[...] = state["physics"]
        self._sims.forward()  # for render(): fills the derived fields, but touches the warm start
        self._sims.state[...] = state["physics"]
        # not recomputed, since MuJoCo's derived positions lie one substep behind its state
        self._position = state["position"].copy()
        self._elapsed, self._ended = state["elapsed"].copy(), state["ended"].copy()
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = saved
        self._ready_in = self._process if state["was_reset"] else None

    def render(self) -> tuple[Any, ...] | None:
        """A tuple of one frame, of environment 0: (height, width, 3) uint8 in the default mode rgb_array."""
        self._check_usable()
        env: Any = self._template.unwrapped
        self._sims.copy_data(0, env.data)
        return (self._template.render(),)

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the threads and free the simulations."""
        self._ready_in = None
        self._template.close()
        self._sims.close()

    def _check_usable(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("This MujocoBatchVecEnv is closed: make a new one.")
        if os.getpid() != self._process:
            raise RuntimeError(
                "The threads of a MujocoBatchVecEnv do not survive a fork: make one in the child."
            )
