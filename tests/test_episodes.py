"""From an environment to many: which stepping `vectorize` chooses, and what `EpisodeStatistics` tells and refuses."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import PIL.Image
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs.cage2 import Cage2Env
from envs.episodes import EpisodeStatistics
from envs.mujoco_batch import MujocoBatchVecEnv, is_plain_task
from envs.record_gif import RecordGif
from envs.subproc_vec_env import SubprocVecEnv
from envs.vectorize import follow_robot, vectorize
from tests.known_values import KnownValuesEnv, PlainEnv, PoisonEnv, SmallEnv

STEPPING: dict[str, tuple[Callable[[], gym.Env], type]] = {
    "plain": (partial(gym.make, "Hopper-v5", ctrl_cost_weight=0.1), MujocoBatchVecEnv),
    "wrapped": (lambda: gym.wrappers.ClipAction(gym.make("Hopper-v5")), SubprocVecEnv),
    "rendered": (partial(gym.make, "Hopper-v5", render_mode="rgb_array"), SubprocVecEnv),
    "another class": (lambda: type("Mine", (Cage2Env,), {})(), SubprocVecEnv),
    "another task": (partial(gym.make, "KnownValues-v0"), SubprocVecEnv),
}


@pytest.mark.parametrize("name", STEPPING)
def test_plain_mujoco_tasks_are_stepped_by_threads_and_all_else_by_processes(name: str) -> None:
    env_fn, kind = STEPPING[name]
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    vec_env = vectorize(env_fn, 2, 1)
    assert kind is SubprocVecEnv or len(os.listdir("/proc/self/task")) <= threads  # the caller's is the one
    assert type(vec_env.env) is kind
    assert vec_env.num_envs == 2
    assert vec_env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert vec_env.unwrapped.spec == env_fn().spec
    vec_env.close()


def test_arguments_reach_the_processes_and_errors_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alone() -> gym.Env:
        (tmp_path / "port").mkdir()  # fails while another one has it
        monkeypatch.setattr(env := KnownValuesEnv(), "close", (tmp_path / "port").rmdir)
        return env

    socket.setdefaulttimeout(9.0)  # is not to reach the pipes
    vectorize(alone, 1, step_timeout=20.0).close()
    socket.setdefaulttimeout(None)
    vec_env: Any = vectorize(partial(gym.make, "KnownValues-v0"), 3, 2, 7.0, "restart").env
    assert (vec_env.num_workers, vec_env._pool.step_timeout, vec_env.on_worker_failure) == (2, 7.0, "restart")
    vec_env.close()
    with pytest.raises(gym.error.NameNotFound, match="Hoper"):
        vectorize(partial(gym.make, "Hoper-v5"), 2)
    for undrawn in (partial(BadEnd, True), type("Bare", (), {})):
        with pytest.raises(gym.error.Error, match="takes no render_mode"):
            vectorize(partial(undrawn, render_mode="rgb_array"), 1)
    with pytest.raises(TypeError, match="truncated"):
        vectorize(BadEnd, 1)
    robot: Any = follow_robot(gym.make("HalfCheetah-v5", render_mode="rgb_array")).unwrapped
    assert robot.mujoco_renderer.camera_id == 0
    monkeypatch.setattr(type(gym.make("Hopper-v5").unwrapped), "reset_model", lambda env: env.data.qpos)
    assert not is_plain_task(gym.make("Hopper-v5"))
    monkeypatch.setattr(os, "environ", {"WAYLAND_DISPLAY": "wayland-0"})
    vectorize(partial(KnownValuesEnv, render_mode="human"), 1).close()
    monkeypatch.setattr(os, "environ", {})
    vectorize(lambda: gym.Wrapper(Cage2Env(render_mode="human")), 1).close()  # prints
    with pytest.raises(gym.error.Error, match="There is no display"):
        vectorize(partial(gym.make, "Hopper-v5", render_mode="human"), 1)


def test_returns_and_lengths_are_those_of_each_episode_also_in_the_step_that_ends_it() -> None:
    vec_env = vectorize(partial(gym.make, "KnownValues-v0", max_episode_steps=5), 3, 1)  # earns 1 a step
    vec_env.reset(seed=1)
    lengths, num_ended, kept = np.zeros(3), 0, []
    for step in range(20):
        if step == 10:
            vec_env.reset()
            lengths[:] = 0
        _, rewards, terminations, truncations, infos = vec_env.step(np.zeros((3, 1), np.float32))
        lengths += 1
        assert infos["raw_reward"].tolist() == rewards.tolist() == [1.0] * 3
        assert infos["episode_return"].tolist() == infos["episode_length"].tolist() == lengths.tolist()
        kept += [infos["episode_return"], lengths.copy()]
        lengths[terminations | truncations] = 0
        num_ended += int((terminations | truncations).sum())
    assert num_ended > 5
    np.testing.assert_array_equal(kept[::2], kept[1::2])  # infos are not written again
    vec_env.close()


def test_an_episode_that_is_lost_with_its_worker_is_not_counted() -> None:
    vec_env: Any = vectorize(partial(gym.make, "KnownValues-v0", max_episode_steps=50), 2, 2, 60.0, "restart")
    vec_env.reset(seed=1)
    os.kill(vec_env.env._pool.workers[0].process.pid, signal.SIGKILL)
    _, _, terminations, truncations, infos = vec_env.step(np.zeros((2, 1), np.float32))
    assert truncations[0]
    assert len(infos["ended"]) == terminations[1] + truncations[1]
    vec_env.close()


def test_a_reset_by_mask_begins_episodes_only_where_it_resets() -> None:
    env_fns = [partial(gym.make, "Poison-v0", max_episode_steps=5)] * 3
    vec_env = EpisodeStatistics(SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.DISABLED))
    vec_env.reset(seed=1)
    for _ in range(4):
        vec_env.step(np.ones((3, 1)))
    vec_env.reset(options={"reset_mask": np.array([False, True, False])})
    assert vec_env.lengths.tolist() == [4, 0, 4]
    assert vec_env.returns.tolist() == [4.0, 0.0, 4.0]
    assert vec_env.step(np.full((3, 1), 6.0))[4]["ended"] == [(10.0, 5, 2.0)] * 2


class Drawn(PlainEnv):
    """Ends after so many steps, and draws how many there were; an episode of 70 earns 70, and is dark."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 125}
    render_mode = "rgb_array"

    def __init__(self, length: int) -> None:
        self.length, self.count = length, 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        return np.zeros(1, np.float32), self.length / 70, self.count % self.length == 0, False, {}

    def render(self) -> Any:
        return np.full((9, 9, 3), self.count + 100 * (self.length < 70), np.uint8)


def test_a_film_is_of_one_episode_of_the_first_environment_and_plays_in_real_time(tmp_path: Path) -> None:
    """Whether it ended or was left: here after 70, 3 and 2 steps. 125 steps a second are every seventh of them."""
    envs = SyncVectorEnv([partial(Drawn, 70), partial(Drawn, 4)], autoreset_mode=AutoresetMode.DISABLED)
    films = RecordGif(envs, tmp_path, fps=20)
    for steps in (70, 3, 2):
        films.reset()
        for _ in range(steps):
            if (ended := films.step(np.zeros((2, 1), np.float32))[2])[1]:
                films.reset(options={"reset_mask": ended & [False, True]})
    films.close()
    names = [f"episode_{i:03d}_return_{n}_steps_{n}.gif" for i, n in ((1, 70), (2, 3), (3, 2))]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with PIL.Image.open(tmp_path / names[0]) as gif:
        assert (gif.n_frames, sum(gif.seek(i) or gif.info["duration"] for i in range(10))) == (10, 560)
        assert gif.convert("L").getpixel((0, 0)) < 100
        gif.seek(0)
        assert gif.convert("L").getpixel((0, 0)) == 0  # before the first step
    envs.metadata = {"render_fps": None}
    lost = RecordGif(envs, tmp_path / names[0], fps=10)  # which is no folder
    assert lost.hundredths == 10
    lost.reset()
    lost.step(np.zeros((2, 1), np.float32))
    with pytest.raises(FileExistsError):
        lost.close()
    assert envs.closed


def test_the_saved_state_of_other_wrappers_is_refused() -> None:
    kinds = (gym.wrappers.NormalizeObservation, gym.wrappers.ClipAction)
    saved, other = (vectorize(partial(lambda kind: kind(gym.make("Poison-v0")), kind), 1, 1) for kind in kinds)
    saved.reset(seed=1)
    with pytest.raises(gym.error.Error, match="The saved environments are not these"):
        other.set_state(saved.get_state())
    saved.close()
    other.close()


class BadEnd(SmallEnv):
    """The observation that its first episode ends with is not finite, if its seed is 3; it ends as told."""

    def __init__(self, truncated: bool) -> None:
        super().__init__(obs_dim=2)
        self.truncated = truncated

    def begin(self) -> None:
        self.state[:] = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.state[0] += 1
        over = bool(self.state[0] == 4)
        obs = np.array([1.0, np.nan if over and self.np_random_seed == 3 else 0.0], np.float32)
        return obs, 0.0, over and not self.truncated, over, {}


FAULTS: dict[str, tuple[Callable[[], gym.Env], str]] = {
    f"{what} {value}": (partial(PoisonEnv, what, value, at=4), f"The {name} of environment 1 is not finite in step 4 ")
    for what, name in (("reward", "reward"), ("obs", "observation"))
    for value in (np.nan, np.inf, -np.inf)
} | {
    "truncated": (partial(BadEnd, True), "The final observation of environment 1 is not finite in step 4 "),
    "first": (
        lambda: gym.wrappers.TransformObservation(PoisonEnv(), lambda obs: obs * np.nan, None),
        "The observation of environment 0 is not finite in step 0 ",
    ),
}


def run(env_fn: Callable[[], gym.Env], num_steps: int = 6) -> None:
    vec_env = EpisodeStatistics(SyncVectorEnv([env_fn] * 3, autoreset_mode=AutoresetMode.SAME_STEP))
    vec_env.lengths[:] = 9  # as of steps before a reset
    vec_env.reset(seed=2)  # environment 1 gets seed 3, the poisoned one
    for _ in range(num_steps):
        vec_env.step(np.zeros((3, 1), np.float32))


def nested(env: gym.Env) -> gym.Env:
    space = spaces.Dict(parts=spaces.Tuple((spaces.Discrete(2), env.observation_space)))
    return gym.wrappers.TransformObservation(env, lambda obs: {"parts": (1, obs)}, space)


@pytest.mark.parametrize("name", FAULTS)
def test_a_number_that_is_not_finite_is_named_with_its_environment_and_step(name: str) -> None:
    """Also as a part of a Dict's or a Tuple's."""
    env_fn, text = FAULTS[name]
    for make in (env_fn, lambda: nested(env_fn())):
        with pytest.raises(FloatingPointError, match=text):
            run(make)


def test_what_nobody_learns_from_may_be_anything_and_a_sum_may_overflow() -> None:
    run(partial(BadEnd, False))  # the value of a terminal state is not asked for
    vec_env = EpisodeStatistics(SyncVectorEnv([PoisonEnv] * 2, autoreset_mode=AutoresetMode.DISABLED))
    vec_env._check("observation", np.full((2, 2), 3e38, np.float32))
    with pytest.raises(ValueError, match="another autoreset_mode than NEXT_STEP"):
        EpisodeStatistics(SyncVectorEnv([PoisonEnv]))
