"""Gymnasium's MuJoCo v5 tasks as row-wise formulas: what each observes and scores, for all robots at once.

Each formula keeps the floating-point order of Gymnasium's scalar code: its sums are pairwise, its norms a BLAS dot
product, its `x**2` the C library's `pow`. Every constant is read from an environment made by Gymnasium.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from envs._mujoco_simulations import Array, Simulations
from envs.normalize import clip

Infos = dict[str, Any]


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
            terminated = ~is_healthy & bool(env._terminate_when_unhealthy)
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
        obs[:, -env.model.nv :] = clip(sims.qvel, -10, 10)
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
        return np.concatenate((motion, clip(forces[:, 6:], *env._contact_force_range)), axis=1)

    def healthy() -> Array:
        return np.isfinite(sims.motion).all(axis=1) & (min_z <= z) & (z <= max_z)

    def contact_cost() -> Array:
        return env._contact_cost_weight * _sum_of_squares(clip(forces, *env._contact_force_range))

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
        return clip(env._contact_cost_weight * _sum_of_squares(forces), *env._contact_cost_range)

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
        impact_cost = clip(env._impact_cost_weight * _sum_of_squares(forces), *env._impact_cost_range)
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
        clipped = clip(sims.qvel, -10, 10), clip(constraint_force[:, :1], -10, 10)
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
