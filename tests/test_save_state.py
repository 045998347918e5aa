"""Saving and restoring Gymnasium's own environments and wrappers (envs/save_state.py)."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as vector_wrappers

from envs._plain_state import NoState
from envs.save_state import SaveState, make
from envs.subproc_vec_env import SubprocVecEnv
from envs.vector_state import get_vector_state, set_vector_state
from tests.known_values import PoisonEnv
from tests.test_subproc_vec_env import ReusingEnv


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Ant-v5", "Hopper-v5"])
def test_a_restored_simulation_goes_on_bit_for_bit(env_id: str) -> None:
    """From every state of a random walk, among them those where a contact begins or ends in the last sub-step."""
    env, other = make(env_id), make(env_id)
    env.reset(seed=1)
    env.action_space.seed(1)
    other.reset(seed=2)
    for step in range(150):
        other.state = env.state
        action = env.action_space.sample()
        ours, theirs = env.step(action), other.step(action)
        np.testing.assert_array_equal(theirs[0], ours[0], err_msg=f"step {step}")
        assert theirs[1:4] == ours[1:4], step
        if ours[2] or ours[3]:
            other.state = env.state
            np.testing.assert_array_equal(env.reset()[0], other.reset()[0])
    env.close()
    other.close()


class GoalEnv(InvertedPendulumEnv):
    """A robot of a user's own, which remembers more than its simulation does."""

    def reset_model(self) -> np.ndarray:
        self.goal = self.np_random.normal(size=1)
        return super().reset_model()

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return np.append(obs, self.goal), reward - abs(float(obs[0] - self.goal[0])), *rest


def test_what_a_robot_of_ones_own_remembers_is_saved(continuous: ModuleType) -> None:
    env, other = SaveState(GoalEnv()), SaveState(GoalEnv())
    env.reset(seed=1)
    state = through_a_file(env.state, continuous)
    other.state = state
    np.testing.assert_equal(other.step(np.ones(1))[:4], env.step(np.ones(1))[:4])
    np.testing.assert_equal(other.reset()[0], env.reset()[0])


# ---- wrappers -------------------------------------------------------------------------------------------------------


class Average:
    def __init__(self) -> None:
        self.value, self.recent = np.zeros(2), deque([0.0], maxlen=2)


class Memory(gym.Wrapper):
    """Rewards depend on all kinds of things that it remembers, and observations on a random generator of its own."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.average, self.generator = Average(), np.random.default_rng()
        self.visits: dict[Any, Any] = {"pairs": [], (np.int64(3), 1): (0, np.float64(0.5))}
        self.window, self.clock, self.decay = deque([0.0], maxlen=2), 0, np.float32(0.9)
        self.function = abs

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        self.average.value *= 0.9
        self.average.value += obs
        self.average.recent.append(float(obs[1]))
        self.visits["pairs"].append((obs, len(self.visits["pairs"])))
        self.visits[3, 1] = (self.visits[3, 1][0] + 1, self.visits[3, 1][1] / 2)
        self.window.append(reward)
        self.clock += 1
        memory = sum(self.average.recent) + sum(pair[1] for pair in self.visits["pairs"]) + sum(self.visits[3, 1])
        memory += sum(self.window) + self.clock
        # a number of NumPy's decides in which precision it is computed
        obs = self.decay * obs.astype(np.float64) + self.visits[3, 1][1] * self.generator.normal(size=2).astype("f4")
        return obs, self.function(reward) + memory + self.average.value.sum(), *rest


WRAPPERS: dict[str, Callable[..., gym.Env]] = {
    "frames": partial(wrappers.FrameStackObservation, stack_size=4),
    "delay": partial(wrappers.DelayObservation, delay=3),
    "observations": wrappers.NormalizeObservation,
    "rewards": wrappers.NormalizeReward,
    "statistics": wrappers.RecordEpisodeStatistics,
    "time": wrappers.TimeAwareObservation,
    "clip": wrappers.ClipAction,
    "dtype": partial(wrappers.DtypeObservation, dtype=np.float64),
    "own": Memory,
}


def wrapped(name: str) -> gym.Env:
    return SaveState(WRAPPERS[name](gym.make("Poison-v0", max_episode_steps=6)))


def through_a_file(state: Any, script: ModuleType) -> Any:
    """What the scripts do with states."""
    file = io.BytesIO()
    torch.save(script.to_tensors(state), file)
    file.seek(0)
    return script.to_arrays(torch.load(file, weights_only=True))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_restored_wrapper_goes_on_bit_for_bit(name: str, continuous: ModuleType) -> None:
    def run(env: gym.Env, actions: np.ndarray) -> list[Any]:
        results = []
        for action in actions:
            obs, reward, terminated, truncated, _ = env.step(action)
            results.append([obs.tolist(), float(reward), terminated, truncated])
            if terminated or truncated:
                results.append(env.reset()[0].tolist())
        return results

    env, other, rng = wrapped(name), wrapped(name), np.random.default_rng(1)
    env.reset(seed=1)
    other.reset(seed=2)
    run(other, rng.uniform(-1, 1, (3, 1)))
    for steps in (0, 1, 8):
        run(env, rng.uniform(-1, 1, (steps, 1)))
        other.set_state(through_a_file(env.get_state(), continuous))  # type: ignore[attr-defined]
        actions = rng.uniform(-1, 1, (9, 1))
        assert run(other, actions) == run(env, actions)


def test_a_restored_wrapper_goes_on_bit_for_bit_in_another_process() -> None:
    env_fns = [lambda: WRAPPERS["frames"](gym.make("Poison-v0"))] * 2
    envs, others = SubprocVecEnv(env_fns, 1), SubprocVecEnv(env_fns, 2)
    for seed, vec_env in enumerate((envs, others)):
        vec_env.reset(seed=seed)
        vec_env.step(np.ones((2, 1)))
    others.set_state(envs.get_state())
    np.testing.assert_array_equal(others.step(np.ones((2, 1)))[0], envs.step(np.ones((2, 1)))[0])
    envs.close()
    others.close()


def test_a_state_in_memory_shares_nothing_with_the_environment() -> None:
    env: Any = SaveState(Memory(gym.make("Poison-v0")))
    env.reset(seed=1)
    env.env.buffer = np.zeros(3)
    for _ in range(3):
        env.step(np.ones(1))
    state = env.get_state()
    saved = copy.deepcopy(state)
    for _ in range(2):
        env.step(np.ones(1))
        env.env.buffer += 1.0
        np.testing.assert_equal(state, saved)
        env.set_state(state)


@pytest.mark.parametrize("value", [{1, 2}, AutoresetMode.DISABLED, object(), [np.array([None])], [Average()]])
def test_what_cannot_be_saved_is_named(value: Any) -> None:
    env: Any = make("Poison-v0")
    env.env.thing = value
    env.reset()
    with pytest.raises(NoState, match=r"OrderEnforcing\.thing holds a \w+"):
        env.get_state()
    with pytest.warns(UserWarning, match=r"OrderEnforcing\.thing"):
        assert env.state is None


def test_what_refers_back_to_what_holds_it_is_named() -> None:
    env: Any = make("Poison-v0")
    env.env.average = Average()
    env.env.average.part = Average()  # type: ignore[attr-defined]
    env.env.average.part.whole = env.env.average
    env.reset()
    with pytest.raises(NoState, match=r"Average\.whole is what it is a part of"):
        env.get_state()


def test_what_belongs_to_no_state_is_left_out() -> None:
    env: Any = SaveState(wrappers.RenderCollection(gym.make("Poison-v0", render_mode="rgb_array")))
    env.reset()
    for n, value in enumerate([env.observation_space, env.spec, gym, len, partial(len, ""), int, lambda: 0, env.reset]):
        setattr(env.env, f"thing{n}", value)
    names = [name for attributes in env.get_state()["wrappers"] for name in attributes]
    assert "pop_frames" in names
    assert not [name for name in names if "thing" in name or name in ("env", "spec", "frame_list")]


# ---- vector environments --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*lacks get_state")
@pytest.mark.parametrize("vector", [AsyncVectorEnv, SyncVectorEnv, SubprocVecEnv])
def test_an_environment_that_cannot_be_saved_has_no_state_and_lives_on(vector: Any) -> None:
    vec_env = vector([partial(make, "Pendulum-v1")] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    vec_env.reset(seed=1)
    assert get_vector_state(vec_env) is None
    vec_env.step(np.zeros((2, 1), np.float32))
    vec_env.close()


def test_the_warning_says_what_is_missing() -> None:
    vec_env = SubprocVecEnv([partial(gym.make, "CartPole-v1")])
    vec_env.reset()
    with pytest.warns(UserWarning, match=r"CartPoleEnv lacks get_state\(\) and set_state\(state\)[^\n]*$"):
        assert get_vector_state(vec_env) is None
    vec_env.close()


class Recent(PoisonEnv):
    """Its state holds what `torch.load` would refuse."""

    recent: deque[int] = deque(maxlen=4)

    def get_state(self) -> dict[str, Any]:
        return {"recent": self.recent, np.int64(3): np.float32(0.1), "like ours": {"deque": [], "maxlen": 2}}

    def set_state(self, state: dict[str, Any]) -> None:
        assert (type(state[3]), state["recent"].maxlen, type(state["like ours"])) == (np.float32, 4, dict)
        self.recent = state["recent"]


def test_a_state_of_any_plain_values_comes_back_from_a_file(continuous: ModuleType) -> None:
    vec_env = SubprocVecEnv([Recent])
    vec_env.reset()
    vec_env.set_attr("recent", deque([1, 2], maxlen=4))
    state = through_a_file(get_vector_state(vec_env), continuous)
    vec_env.set_attr("recent", None)
    assert set_vector_state(vec_env, state)
    assert vec_env.get_attr("recent") == (deque([1, 2], maxlen=4),)
    vec_env.close()


class Opaque(PoisonEnv):
    def get_state(self) -> dict[str, Any]:
        return {"rng": np.random.default_rng()}


def test_a_state_that_no_checkpoint_can_hold_is_refused_when_it_is_saved() -> None:
    vec_env = SubprocVecEnv([Opaque])
    vec_env.reset()
    with pytest.warns(UserWarning, match="The state of Opaque holds a Generator, which cannot be saved"):
        assert get_vector_state(vec_env) is None
    vec_env.close()


@pytest.mark.filterwarnings("ignore:.*share an object")
@pytest.mark.parametrize("vector", [AsyncVectorEnv, SyncVectorEnv, SubprocVecEnv])
def test_a_final_observation_outlives_the_reset_that_fills_the_same_array(vector: Any) -> None:
    """Its value is bootstrapped, and Gymnasium's vector environments keep the array itself."""
    vec_env = vector([lambda: SaveState(ReusingEnv())] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    vec_env.reset(seed=1)
    infos = [vec_env.step(np.zeros(2, int))[4] for _ in range(3)][2]
    np.testing.assert_array_equal(np.stack(infos["final_obs"]), np.full((2, 2), 3.0))
    vec_env.close()


@pytest.mark.parametrize("vector", [AsyncVectorEnv, SyncVectorEnv])
def test_gymnasiums_vector_environments_are_saved_only_where_no_reset_is_due(vector: Any) -> None:
    states = {}
    for mode in AutoresetMode:
        vec_env = vector([partial(make, "Poison-v0")] * 2, autoreset_mode=mode)
        vec_env.reset(seed=1)
        states[mode] = get_vector_state(vec_env)
        assert set_vector_state(vec_env, states[mode]) == (mode is AutoresetMode.SAME_STEP)
        vec_env.close()
    assert [mode for mode, state in states.items() if state is not None] == [AutoresetMode.SAME_STEP]


class Faulty(PoisonEnv):
    def get_state(self) -> dict[str, Any]:
        return {"state": len(3)}  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("vector", [AsyncVectorEnv, SyncVectorEnv, SubprocVecEnv])
def test_a_fault_in_get_state_is_not_taken_for_a_missing_one(vector: Any) -> None:
    vec_env = vector([lambda: SaveState(Faulty())] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    vec_env.reset(seed=1)
    with pytest.raises(TypeError, match="has no len"):
        get_vector_state(vec_env)
    vec_env.close()


def test_a_vector_wrapper_without_a_state_is_said_and_has_none() -> None:
    vec_env = SyncVectorEnv([partial(make, "Poison-v0")] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    wrapped = vector_wrappers.RecordEpisodeStatistics(vec_env)
    with pytest.warns(UserWarning, match=r"cannot be saved, because it lacks get_state\(\)"):
        assert get_vector_state(wrapped) is None
    wrapped.close()
