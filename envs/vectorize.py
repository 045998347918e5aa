"""One function from an environment to many: whichever of our vector environments steps it fastest."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from envs.episodes import EpisodeStatistics
from envs.mujoco_batch import MujocoBatchVecEnv, is_plain_task
from envs.subproc_vec_env import SubprocVecEnv


def follow_robot(env: gym.Env) -> gym.Env:
    """`env`, filmed by the camera that follows the robot, if it has one: MuJoCo's default camera stands still."""
    robot: Any = env.unwrapped
    if env.render_mode is not None and hasattr(robot, "mujoco_renderer"):
        robot.mujoco_renderer.camera_id = 0 if robot.model.ncam else -1
    return env


def vectorize(
    env_fn: Callable[[], gym.Env],
    num_envs: int,
    num_workers: int | None = None,
    step_timeout: float = 300.0,
    on_worker_failure: Literal["raise", "restart"] = "raise",
) -> EpisodeStatistics:
    """`num_envs` environments that begin the next episode in the step that ends one (SAME_STEP).

    What `env_fn` returns is stepped by MuJoCo's own threads if it is one of Gymnasium's MuJoCo tasks without any
    further wrapper and is not rendered; in one loop if its class itself (not one that it inherits from) has a method
    `vectorized(num_envs)`; by `SubprocVecEnv` otherwise. `num_workers` is the number of threads or
    processes (None: one for each CPU); the other arguments are those of `SubprocVecEnv` and act there alone.
    `unwrapped.spec` is that of the environment, with its time limit. Raises what `env_fn` raises, and
    gymnasium.error.Error if a window is asked for where there is no display.
    """
    try:
        env = env_fn()
    except TypeError as error:
        if not any(x in str(error) for x in ("unexpected keyword argument 'render_mode'", "() takes no arguments")):
            raise
        raise gym.error.Error(f"This environment is not drawn, for its class takes no render_mode: {error}") from error
    env.close()  # before others like it are made: it may hold a port or a device
    vec_env: VectorEnv
    if is_plain_task(env) and env.render_mode is None:
        vec_env = MujocoBatchVecEnv.like(env, num_envs, num_workers)
    elif "vectorized" in vars(type(env)):
        vec_env = env.vectorized(num_envs)  # type: ignore[attr-defined]
    else:
        draws = env.render_mode == "human" and "ansi" not in env.metadata.get("render_modes", ())  # others print a text
        if draws and not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
            raise gym.error.Error("There is no display to open a window on; a film needs none (--save-gif).")
        env_fns = [lambda: follow_robot(env_fn())] * num_envs
        vec_env = SubprocVecEnv(
            env_fns, num_workers, context="fork", autoreset_mode=AutoresetMode.SAME_STEP,
            step_timeout=step_timeout, on_worker_failure=on_worker_failure,
        )  # fmt: skip
    vec_env.spec = env.spec
    return EpisodeStatistics(vec_env)
