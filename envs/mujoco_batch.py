"""Gymnasium's MuJoCo v5 tasks, many robots in one process, bit for bit the same numbers.

    envs = MujocoBatchVecEnv("HalfCheetah-v5", num_envs=16)
    obs, infos = envs.reset(seed=1)
    obs, rewards, terminations, truncations, infos = envs.step(actions)

MuJoCo 4.0 steps a batch of simulations on its own thread pool, so there are no processes and no Python loop over
robots: what is left for Python is one row-wise formula per task. Every formula below keeps the floating-point order
of Gymnasium's scalar code (its sums are pairwise, its norms a BLAS dot product, its `x**2` the C library's `pow`), and
every constant, and the noise of a reset, comes from one instance made by `gymnasium.make`.
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

# ----------------------------------------------------------------------------------------------- the simulations


class _BatchConfig(ctypes.Structure):
    _fields_ = [("num_threads", ctypes.c_int), ("persistent", ctypes.c_bool)]


def _load_mujoco() -> ctypes.CDLL:
    """MuJoCo's C library, found as what the Python bindings are linked with, so that both are the same copy."""
    lib = ctypes.CDLL(mujoco._batch.__file__)
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "mjb_makeBatch": (
            pointer,
            [pointer, integer, ctypes.POINTER(_BatchConfig), ctypes.c_char_p, integer],
        ),
        "mjb_deleteBatch": (None, [pointer]),
        "mjb_state": (pointer, [pointer]),
        "mjb_output": (pointer, [pointer, ctypes.c_char_p, pointer, pointer]),
        "mjb_reset": (integer, [pointer, pointer, integer, pointer, integer]),
        "mjb_forward": (integer, [pointer, pointer, integer, integer]),
        "mjb_step": (integer, [pointer, pointer, integer, integer, integer]),
        "mjb_apply": (integer, [pointer, pointer, integer, pointer, pointer, integer]),
        "mjb_status": (ctypes.POINTER(ctypes.c_int), [pointer]),
        "mjb_error": (ctypes.c_char_p, [pointer, integer]),
        "mjb_getData": (None, [pointer, integer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


_LIB = _load_mujoco()
_RNE_POST_CONSTRAINT = ctypes.cast(_LIB.mj_rnePostConstraint, ctypes.c_void_p)
_STAGE_NONE, _STAGE_ALL = int(mujoco.mjtStage.mjSTAGE_NONE), int(mujoco.mjtStage.mjSTAGE_ACC)
_INTEGRATION = int(mujoco.mjtState.mjSTATE_INTEGRATION)


def _delete_batch(batch: int, owner: int) -> None:
    # A forked child has the memory but not the threads: joining them there would wait for ever.
    if os.getpid() == owner:
        _LIB.mjb_deleteBatch(batch)


class Simulations:
    """`num` simulations of one model on a thread pool: MuJoCo's batch, through its C interface.

    `mujoco.batch.Batch` is the same engine in Python clothes, but it has no `mjb_apply`, which Gymnasium's contact
    forces need. The batch is persistent (one MjData each, as in Gymnasium), since those forces are computed from what
    the last substep left behind.

    Attributes:
        state: (num, size of mjSTATE_INTEGRATION) float64, live: a write is the simulation's state at its next call.
        qpos, qvel, ctrl, motion: views of its columns; `motion` is qpos and qvel side by side.
    """

    def __init__(self, model: mujoco.MjModel, num: int, num_threads: int) -> None:
        reason = ctypes.create_string_buffer(1000)
        config = _BatchConfig(num_threads, True)
        batch = _LIB.mjb_makeBatch(model._address, num, config, reason, len(reason))
        if not batch:
            raise RuntimeError(f"MuJoCo could not make a batch of {num} simulations: {reason.value.decode()}")
        self.num = num
        self._batch = batch
        self._shapes = mujoco.MjData(model)
        self.close = weakref.finalize(self, _delete_batch, batch, os.getpid())

        size = mujoco.mj_stateSize(model, _INTEGRATION)
        self.state = self._view(_LIB.mjb_state(batch), (size,))
        # mj_getState writes the components in the order of their bits: time, qpos, qvel, act, ...
        ctrl = mujoco.mj_stateSize(model, _INTEGRATION & (int(mujoco.mjtState.mjSTATE_CTRL) - 1))
        self.motion = self.state[:, 1 : 1 + model.nq + model.nv]
        self.qpos, self.qvel = self.motion[:, : model.nq], self.motion[:, model.nq :]
        self.ctrl = self.state[:, ctrl : ctrl + model.nu]

    def _view(self, address: int, shape: tuple[int, ...]) -> Array:
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_double))
        return np.ctypeslib.as_array(pointer, (self.num, *shape))

    def field(self, name: str) -> Array:
        """(num, ...) live, read-only array of a derived MjData field, copied out after every call."""
        view = self._view(
            _LIB.mjb_output(self._batch, name.encode(), None, None), getattr(self._shapes, name).shape
        )
        view.flags.writeable = False
        return view

    def step(self, num_substeps: int, ids: Array | None = None) -> None:
        """`num_substeps` calls of mj_step for the simulations `ids` (sorted int32; None: all)."""
        self._check(_LIB.mjb_step(self._batch, *self._ids(ids), num_substeps, _STAGE_NONE))

    def compute_contact_forces(self, ids: Array | None = None) -> None:
        """Fill `cfrc_ext` from the last substep, as Gymnasium does after each of its steps.

        mj_rnePostConstraint(model, data) takes the first two of the four arguments a batch function is given;
        mjb_apply does not copy fields out, a forward pass of no stages does, and computes nothing else.
        """
        self._check(_LIB.mjb_apply(self._batch, *self._ids(ids), _RNE_POST_CONSTRAINT, None, 0))
        self._check(_LIB.mjb_forward(self._batch, *self._ids(ids), _STAGE_NONE))

    def reset(self, ids: Array) -> None:
        """mj_resetData, without computing anything."""
        self._check(_LIB.mjb_reset(self._batch, *self._ids(ids), None, _STAGE_NONE))

    def forward(self, ids: Array | None = None) -> None:
        """mj_forward."""
        self._check(_LIB.mjb_forward(self._batch, *self._ids(ids), _STAGE_ALL))

    def copy_data(self, index: int, data: mujoco.MjData) -> None:
        """Write simulation `index`, derived fields included, into `data`."""
        _LIB.mjb_getData(self._batch, index, data._address)

    def _ids(self, ids: Array | None) -> tuple[int | None, int]:
        return (None, self.num) if ids is None else (ids.ctypes.data, len(ids))

    def _check(self, num_failed: int) -> None:
        if num_failed:
            status = _LIB.mjb_status(self._batch)
            first = next(i for i in range(self.num) if status[i])
            reason = _LIB.mjb_error(self._batch, first).decode()
            raise RuntimeError(f"MuJoCo failed in {num_failed} of {self.num} simulations; {first}: {reason}")


# ------------------------------------------------------------------------------------------------------ the tasks


class Task(NamedTuple):
    """What one task adds to the physics. Arrays have one row per simulation and are freshly made.

    observe() -> observations. position() -> what velocities are measured with, read before and after a step.
    score(actions, before, after) -> rewards, terminations, the step's infos. reset_info() -> the infos of a reset.
    """

    observe: Callable[[], Array]
    score: Callable[[Array, Array, Array], tuple[Array, Array, Infos]]
    position: Callable[[], Array]
    reset_info: Callable[[], Infos] = dict
    contact_forces: bool = False


def _sum_of_squares(values: Array) -> Array:
    # Along a contiguous last axis NumPy sums each row in the same pairwise order as a single vector.
    return np.add.reduce(np.square(values), axis=1)


def _norm(vectors: Array) -> Array:
    # np.linalg.norm of one vector is the root of a BLAS dot product, which may fuse multiply and add; so is vecdot.
    return np.sqrt(np.vecdot(vectors, vectors))


def _clip(values: Array, low: float, high: float) -> Array:
    return np.minimum(np.maximum(values, low), high)


def _half_cheetah(env: Any, sims: Simulations) -> Task:
    skip = int(env._exclude_current_positions_from_observation)

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        x_velocity = (after - before) / env.dt
        forward_reward = env._forward_reward_weight * x_velocity
        ctrl_cost = env._ctrl_cost_weight * _sum_of_squares(actions)
        info = {
            "x_position": after.copy(),
            "x_velocity": x_velocity,
            "reward_forward": forward_reward,
            "reward_ctrl": -ctrl_cost,
        }
        return forward_reward - ctrl_cost, np.zeros(sims.num, np.bool_), info

    def position() -> Array:
        return sims.qpos[:, 0].copy()

    return Task(sims.motion[:, skip:].copy, score, position, lambda: {"x_position": position()})


def _hopper(env: Any, sims: Simulations, bounded_state: bool = True) -> Task:
    skip = int(env._exclude_current_positions_from_observation)
    initial_z = env.init_qpos[1]

    def position() -> Array:
        return sims.qpos[:, 0].copy()

    def observe() -> Array:
        obs = sims.motion[:, skip:].copy()
        velocity = obs[:, -env.model.nv :]
        velocity[:] = _clip(velocity, -10, 10)
        return obs

    def reset_info() -> Infos:
        return {"x_position": position(), "z_distance_from_origin": sims.qpos[:, 1] - initial_z}

    def healthy() -> Array:
        (min_z, max_z), (min_angle, max_angle) = env._healthy_z_range, env._healthy_angle_range
        z, angle = sims.qpos[:, 1], sims.qpos[:, 2]
        upright = (min_z < z) & (z < max_z) & (min_angle < angle) & (angle < max_angle)
        if bounded_state:
            (low, high), state = env._healthy_state_range, sims.motion[:, 2:]
            upright &= ((low < state) & (state < high)).all(axis=1)
        return upright

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        x_velocity = (after - before) / env.dt
        is_healthy = healthy()
        forward_reward = env._forward_reward_weight * x_velocity
        healthy_reward = is_healthy * env._healthy_reward
        ctrl_cost = env._ctrl_cost_weight * _sum_of_squares(actions)
        info = {
            **reset_info(),
            "x_velocity": x_velocity,
            "reward_forward": forward_reward,
            "reward_ctrl": -ctrl_cost,
            "reward_survive": healthy_reward,
        }
        terminated = ~is_healthy & env._terminate_when_unhealthy
        return forward_reward + healthy_reward - ctrl_cost, terminated, info

    return Task(observe, score, position, reset_info)


def _walker2d(env: Any, sims: Simulations) -> Task:
    return _hopper(env, sims, bounded_state=False)


def _plane_info(sims: Simulations) -> Infos:
    xy = sims.qpos[:, :2]
    return {"x_position": xy[:, 0].copy(), "y_position": xy[:, 1].copy(), "distance_from_origin": _norm(xy)}


def _swimmer(env: Any, sims: Simulations) -> Task:
    skip = 2 * env._exclude_current_positions_from_observation

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        x_velocity, y_velocity = ((after - before) / env.dt).T
        forward_reward = env._forward_reward_weight * x_velocity
        ctrl_cost = env._ctrl_cost_weight * _sum_of_squares(actions)
        info = {
            **_plane_info(sims),
            "x_velocity": x_velocity,
            "y_velocity": y_velocity,
            "reward_forward": forward_reward,
            "reward_ctrl": -ctrl_cost,
        }
        return forward_reward - ctrl_cost, np.zeros(sims.num, np.bool_), info

    return Task(sims.motion[:, skip:].copy, score, sims.qpos[:, :2].copy, lambda: _plane_info(sims))


def _ant(env: Any, sims: Simulations) -> Task:
    skip = 2 * env._exclude_current_positions_from_observation
    body_xy = sims.field("xpos")[:, env.model.body(env._main_body).id, :2]
    raw_forces = sims.field("cfrc_ext").reshape(sims.num, -1)

    def observe() -> Array:
        motion = sims.motion[:, skip:]
        if not env._include_cfrc_ext_in_observation:
            return motion.copy()
        # the first six numbers belong to the world body
        return np.concatenate((motion, _clip(raw_forces[:, 6:], *env._contact_force_range)), axis=1)

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        x_velocity, y_velocity = ((after - before) / env.dt).T
        (min_z, max_z), z = env._healthy_z_range, sims.qpos[:, 2]
        is_healthy = np.isfinite(sims.motion).all(axis=1) & (min_z <= z) & (z <= max_z)
        forward_reward = x_velocity * env._forward_reward_weight
        healthy_reward = is_healthy * env._healthy_reward
        ctrl_cost = env._ctrl_cost_weight * _sum_of_squares(actions)
        contact_cost = env._contact_cost_weight * _sum_of_squares(
            _clip(raw_forces, *env._contact_force_range)
        )
        info = {
            **_plane_info(sims),
            "x_velocity": x_velocity,
            "y_velocity": y_velocity,
            "reward_forward": forward_reward,
            "reward_ctrl": -ctrl_cost,
            "reward_contact": -contact_cost,
            "reward_survive": healthy_reward,
        }
        rewards = (forward_reward + healthy_reward) - (ctrl_cost + contact_cost)
        return rewards, ~is_healthy & env._terminate_when_unhealthy, info

    return Task(observe, score, body_xy.copy, lambda: _plane_info(sims), contact_forces=True)


def _humanoid_observe(env: Any, sims: Simulations) -> Callable[[], Array]:
    parts = [sims.motion[:, 2 * env._exclude_current_positions_from_observation :]]
    for name, world in (("cinert", 10), ("cvel", 6), ("qfrc_actuator", 6), ("cfrc_ext", 6)):
        # without the world body (of the actuator forces: without the free joint), which never says anything
        if getattr(env, f"_include_{name}_in_observation") is True:
            parts.append(sims.field(name).reshape(sims.num, -1)[:, world:])
    return lambda: np.concatenate(parts, axis=1)


def _humanoid(env: Any, sims: Simulations) -> Task:
    mass, total_mass, centers = env.model.body_mass.copy(), env.model.body_mass.sum(), sims.field("xipos")
    forces = sims.field("cfrc_ext").reshape(sims.num, -1)
    tendon_length, tendon_velocity = sims.field("ten_length"), sims.field("ten_velocity")

    def mass_center() -> Array:
        return (np.einsum("b,nbj->nj", mass, centers) / total_mass)[:, :2]

    def reset_info() -> Infos:
        tendons = {"tendon_length": tendon_length.copy(), "tendon_velocity": tendon_velocity.copy()}
        return _plane_info(sims) | tendons

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        x_velocity, y_velocity = ((after - before) / env.dt).T
        (min_z, max_z), z = env._healthy_z_range, sims.qpos[:, 2]
        is_healthy = (min_z < z) & (z < max_z)
        forward_reward = env._forward_reward_weight * x_velocity
        healthy_reward = is_healthy * env._healthy_reward
        ctrl_cost = env._ctrl_cost_weight * _sum_of_squares(sims.ctrl)
        contact_cost = _clip(env._contact_cost_weight * _sum_of_squares(forces), *env._contact_cost_range)
        info = {
            **reset_info(),
            "x_velocity": x_velocity,
            "y_velocity": y_velocity,
            "reward_survive": healthy_reward,
            "reward_forward": forward_reward,
            "reward_ctrl": -ctrl_cost,
            "reward_contact": -contact_cost,
        }
        rewards = (forward_reward + healthy_reward) - (ctrl_cost + contact_cost)
        return rewards, ~is_healthy & env._terminate_when_unhealthy, info

    return Task(_humanoid_observe(env, sims), score, mass_center, reset_info, contact_forces=True)


def _humanoid_standup(env: Any, sims: Simulations) -> Task:
    forces = sims.field("cfrc_ext").reshape(sims.num, -1)
    tendon_length, tendon_velocity = sims.field("ten_length"), sims.field("ten_velocity")
    initial_z = env.init_qpos[2]

    def reset_info() -> Infos:
        return {
            "x_position": sims.qpos[:, 0].copy(),
            "y_position": sims.qpos[:, 1].copy(),
            "z_distance_from_origin": sims.qpos[:, 2] - initial_z,
            "tendon_length": tendon_length.copy(),
            "tendon_velocity": tendon_velocity.copy(),
        }

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        uph_cost = after / env.model.opt.timestep
        ctrl_cost = env._ctrl_cost_weight * _sum_of_squares(sims.ctrl)
        impact_cost = _clip(env._impact_cost_weight * _sum_of_squares(forces), *env._impact_cost_range)
        info = {
            **reset_info(),
            "reward_linup": uph_cost,
            "reward_quadctrl": -ctrl_cost,
            "reward_impact": -impact_cost,
        }
        return uph_cost - ctrl_cost - impact_cost + 1, np.zeros(sims.num, np.bool_), info

    return Task(_humanoid_observe(env, sims), score, sims.qpos[:, 2].copy, reset_info, contact_forces=True)


def _reacher(env: Any, sims: Simulations) -> Task:
    xpos = sims.field("xpos")
    fingertip, target = (xpos[:, env.model.body(name).id] for name in ("fingertip", "target"))

    def observe() -> Array:
        theta = sims.qpos[:, :2].copy()
        parts = (
            np.cos(theta),
            np.sin(theta),
            sims.qpos[:, 2:],
            sims.qvel[:, :2],
            (fingertip - target)[:, :2],
        )
        return np.concatenate(parts, axis=1)

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
        # Gymnasium squares scalars, and a scalar's ** is the C library's pow, which is not always v * v
        return np.array([value**2 for value in values.tolist()])

    def observe() -> Array:
        angles = sims.qpos[:, 1:].copy()
        velocity, force = _clip(sims.qvel, -10, 10), _clip(constraint_force[:, :1], -10, 10)
        return np.concatenate((sims.qpos[:, :1], np.sin(angles), np.cos(angles), velocity, force), axis=1)

    def score(actions: Array, before: Array, after: Array) -> tuple[Array, Array, Infos]:
        x, y = after[:, 0], after[:, 2]
        terminated = y <= 1
        distance_penalty = 0.01 * square(x) + square(y - 2)
        velocity_penalty = 1e-3 * square(sims.qvel[:, 1]) + 5e-3 * square(sims.qvel[:, 2])
        alive_bonus = env._healthy_reward * (~terminated).astype(np.int64)
        info = {
            "reward_survive": alive_bonus,
            "distance_penalty": -distance_penalty,
            "velocity_penalty": -velocity_penalty,
        }
        return alive_bonus - distance_penalty - velocity_penalty, terminated, info

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
    "Walker2d-v5": _walker2d,
}

# ----------------------------------------------------------------------------------------- the vector environment


@contextmanager
def _without_deprecation_note() -> Iterator[None]:
    """MuJoCo tells every maker of a HalfCheetah that `settotalmass` is deprecated, on the screen and in a file
    MUJOCO_LOG.TXT in the working folder. It is Gymnasium's model, not the user's: anything else is passed on."""

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
    """`num_envs` copies of a Gymnasium MuJoCo v5 task, equal to a SyncVectorEnv of `gymnasium.make` to the last bit.

    Args:
        env_id: one of `TASKS`.
        num_envs: number of environments N.
        num_threads: threads that simulate, the caller's included; None: the CPUs this process may use. The numbers
            do not depend on it.
        autoreset_mode: any of Gymnasium's three; SAME_STEP returns the reset observation in the step where an
            episode ends, and the last one in `infos["final_obs"]`.
        make_kwargs: passed on to `gymnasium.make` (ctrl_cost_weight, max_episode_steps, ...).

    Observations are (N, d) float64, rewards (N,) float64, terminations and truncations (N,) bool; all returned arrays
    are fresh, except that the all-true masks of `infos` are one read-only array. Episodes whose physics blows up go on
    as in Gymnasium: MuJoCo warns and resets that simulation to the model's defaults.

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
            raise ValueError(
                f"MujocoBatchVecEnv has no task {env_id!r}; the closest is {closest!r} (all: {', '.join(TASKS)})."
            )
        if num_threads is None:
            num_threads = (
                len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            )
        if num_envs < 1 or num_threads < 1:
            raise ValueError(
                f"num_envs and num_threads must be at least 1, got num_envs={num_envs}, num_threads={num_threads}."
            )
        with _without_deprecation_note():
            self._template = gym.make(env_id, **{"render_mode": "rgb_array", **make_kwargs})
        env: Any = self._template.unwrapped
        self._template.reset(seed=0)  # a wrapped environment renders only after its reset
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**env.metadata, "autoreset_mode": self.autoreset_mode}
        self.spec, self.render_mode = self._template.spec, env.render_mode
        self.single_observation_space = self._template.observation_space
        self.single_action_space = self._template.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

        self._sims = Simulations(env.model, num_envs, min(num_threads, num_envs))
        self._task = TASKS[env_id](env, self._sims)
        self._frame_skip: int = env.frame_skip
        limit = self._template.spec.max_episode_steps if self._template.spec else None
        self._max_episode_steps = limit or np.iinfo(np.int64).max
        self._elapsed = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.bool_)
        self._position = self._task.position()
        self._generators = [seeding.np_random()[0] for _ in range(num_envs)]
        self._everywhere = np.ones(num_envs, np.bool_)
        self._everywhere.flags.writeable = False
        self._ready_in: int | None = None  # the process in which step() may be called
        self._process = os.getpid()

        # Gymnasium's own reset_model draws the noise; only where it puts the result is redirected.
        self._drawn: list[Array] = []
        env.set_state = lambda qpos, qvel: self._drawn.extend((qpos, qvel))
        env._get_obs = lambda: None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, Infos]:
        """Begin new episodes; environment n is seeded with `seed + n`, or `seed[n]`, or goes on with its stream.

        `options={"reset_mask": mask}` with a bool array (N,) resets only where it is true.
        """
        self._check_usable()
        seeds = [seed + n for n in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is not None and len(seeds) != self.num_envs:
            raise ValueError(f"A list of seeds must have num_envs={self.num_envs} entries, got {len(seeds)}.")
        mask = (options or {}).get("reset_mask", self._everywhere)
        if getattr(mask, "shape", None) != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise ValueError(
                f"options['reset_mask'] must be a bool array ({self.num_envs},) with a true entry."
            )
        for n, own_seed in enumerate(seeds or ()):
            if mask[n] and own_seed is not None:
                self._generators[n] = seeding.np_random(own_seed)[0]
        self._begin_episodes(mask)
        self._ready_in = self._process
        return self._task.observe(), self._merge((self._task.reset_info(), mask))

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, Infos]:
        """Apply actions (N, number of actuators), each for `frame_skip` substeps of the physics.

        Raises:
            ResetNeeded: before the first reset, or in DISABLED mode after an end that was not reset.
            ValueError: the actions have another shape.
        """
        if self._ready_in != os.getpid():
            self._check_usable()
            raise ResetNeeded("Cannot call env.step() before calling env.reset()")
        actions = np.ascontiguousarray(actions)
        if actions.shape != self._sims.ctrl.shape:
            raise ValueError(f"Actions must have shape {self._sims.ctrl.shape}, got {actions.shape}.")
        waiting = self._ended if self._ended.any() else None
        if waiting is not None and self.autoreset_mode is AutoresetMode.DISABLED:
            raise ResetNeeded(
                f"Episodes of environments {np.flatnonzero(waiting).tolist()} ended: reset them first."
            )
        going_on = None if waiting is None else np.flatnonzero(~waiting).astype(np.int32)

        self._sims.ctrl[...] = actions
        self._sims.step(self._frame_skip, going_on)
        if self._task.contact_forces:
            self._sims.compute_contact_forces(going_on)
        before, self._position = self._position, self._task.position()
        rewards, terminations, info = self._task.score(actions, before, self._position)
        self._elapsed += 1
        truncations = self._elapsed >= self._max_episode_steps
        ended = terminations | truncations

        final: Infos = {}
        if waiting is not None:  # NEXT_STEP: for these, the step is their reset
            for values in (rewards, terminations, truncations, ended):
                values[waiting] = 0
        elif self.autoreset_mode is AutoresetMode.SAME_STEP and ended.any():
            waiting, last_obs = ended, self._task.observe()
            final_obs = np.full(self.num_envs, None, dtype=object)
            for n in np.flatnonzero(ended):
                final_obs[n] = last_obs[n]
            final = {
                "final_obs": final_obs,
                "_final_obs": ended.copy(),
                "final_info": self._merge((info, ended)),
                "_final_info": ended.copy(),
            }
        if waiting is None:
            for key in tuple(info):
                info["_" + key] = self._everywhere
        else:
            self._begin_episodes(waiting)
            info = self._merge((info, ~waiting), (self._task.reset_info(), waiting)) | final
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            self._ended = ended
        return self._task.observe(), rewards, terminations, truncations, info

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
        """Gymnasium's vector infos from (arrays, where they hold): zeros and a false mask elsewhere."""
        merged: Infos = {}
        for info, mask in parts:
            if not mask.any():
                continue
            for key, values in info.items():
                if key not in merged:
                    merged[key], merged["_" + key] = np.zeros_like(values), np.zeros(self.num_envs, np.bool_)
                merged[key][mask] = values[mask]
                merged["_" + key] |= mask
        return merged

    def get_state(self) -> dict[str, Any]:
        """Everything a continued run depends on: physics with the solver's warm start, clocks, random streams."""
        self._check_usable()
        return {
            "env_id": self.spec.id if self.spec else "",
            "physics": self._sims.state.copy(),
            "position": self._position.copy(),
            "elapsed": self._elapsed.copy(),
            "ended": self._ended.copy(),
            "generators": [generator.bit_generator.state for generator in self._generators],
            "was_reset": self._ready_in is not None,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `get_state()` of an environment of the same task and size.

        Raises:
            ValueError: the state is of another task, or of another number of environments.
        """
        self._check_usable()
        mine = (self.spec.id if self.spec else "", self._sims.state.shape)
        other = (state["env_id"], state["physics"].shape)
        if mine != other:
            raise ValueError(
                f"This state is of {other[0]} with physics {other[1]}, not of {mine[0]} with {mine[1]}."
            )
        self._sims.state[...] = state["physics"]
        self._sims.forward()  # for render(): fills the derived fields, and spoils the warm start, hence again:
        self._sims.state[...] = state["physics"]
        # not recomputed: MuJoCo's derived positions lie one substep behind its state
        self._position = state["position"].copy()
        self._elapsed, self._ended = state["elapsed"].copy(), state["ended"].copy()
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = saved
        self._ready_in = self._process if state["was_reset"] else None

    def render(self) -> tuple[Any, ...] | None:
        """One frame, of environment 0: a tuple of one (height, width, 3) uint8 array."""
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
                "A MujocoBatchVecEnv has threads, which do not survive a fork: make it in the child."
            )
