"""The state of environments with wrappers around them goes through a file and continues bit for bit (envs/state.py)."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv
from gymnasium.vector import AutoresetMode
from torch.utils._pytree import tree_map

from envs.state import NoState, get_state, set_state
from envs.subproc_vec_env import SubprocVecEnv, WorkerError
from tests.known_values import PoisonEnv


def through_a_file(state: Any) -> Any:
    """What a checkpoint does with a state."""
    file = io.BytesIO()
    torch.save(tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, state), file)
    file.seek(0)
    return tree_map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, torch.load(file, weights_only=True))


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Ant-v5", "Hopper-v5"])
def test_a_restored_simulation_goes_on_bit_for_bit(env_id: str) -> None:
    """From every state of a random walk, among them those where a contact begins or ends in the last sub-step."""
    env, other = gym.make(env_id), gym.make(env_id, reset_noise_scale=0.5)
    env.reset(seed=1)
    env.action_space.seed(1)
    other.reset(seed=2)
    for step in range(150):
        set_state(other, get_state(env))
        action = env.action_space.sample()
        ours, theirs = env.step(action), other.step(action)
        np.testing.assert_array_equal(theirs[0], ours[0], err_msg=f"step {step}")
        assert theirs[1:4] == ours[1:4], step
        if ours[2] or ours[3]:
            set_state(other, get_state(env))
            np.testing.assert_array_equal(env.reset()[0], other.reset()[0])
    env.close()
    other.close()


class GoalEnv(InvertedPendulumEnv):
    """A robot of a user's own: its model is new in each episode, it remembers more, and a part of the simulation."""

    def __init__(self) -> None:
        super().__init__()
        self.cart = self.data.qpos[:1]

    def reset_model(self) -> np.ndarray:
        self.goal = self.np_random.normal(size=1)
        self.model.body_mass[2], self.model.opt.viscosity = self.np_random.uniform(1, 9, 2)
        return super().reset_model()

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return np.append(obs, self.goal), reward - abs(float(self.cart[0] - self.goal[0])), *rest


def test_what_a_robot_of_ones_own_remembers_is_saved() -> None:
    env, other = GoalEnv(), GoalEnv()
    env.reset(seed=1)
    set_state(other, through_a_file(get_state(env)))
    for _ in range(2):
        np.testing.assert_equal(other.step(np.ones(1))[:4], env.step(np.ones(1))[:4])
    np.testing.assert_equal(other.reset()[0], env.reset()[0])


class Average:
    def __init__(self) -> None:
        self.value, self.recent = np.zeros(2), deque([0.0], maxlen=2)


class Memory(gym.Wrapper):
    """Rewards depend on all kinds of things that it remembers, and observations on a random generator of its own."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.average, self.generator = Average(), np.random.default_rng()
        self.visits: dict[Any, Any] = {"pairs": [], (np.int64(3), 1): (0, np.float64(0.5)), "__kind__": "deque"}
        self.frame_list, self.clock, self.decay = deque([0.0], maxlen=2), 0, np.float32(0.9)  # a name of Gymnasium's
        self.function = abs

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        self.average.value *= 0.9
        self.average.value += obs
        self.average.recent.append(float(obs[1]))
        self.visits["pairs"].append((obs, len(self.visits["pairs"])))
        self.visits[3, 1] = (self.visits[3, 1][0] + 1, self.visits[3, 1][1] / 2)
        self.frame_list.append(reward)
        self.clock += 1
        memory = sum(self.average.recent) + sum(pair[1] for pair in self.visits["pairs"]) + sum(self.visits[3, 1])
        memory += sum(self.frame_list) + self.clock
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


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_restored_wrapper_goes_on_bit_for_bit(name: str) -> None:
    def run(env: gym.Env, actions: np.ndarray) -> list[Any]:
        results = []
        for action in actions:
            obs, reward, terminated, truncated, _ = env.step(action)
            results.append([obs.tolist(), float(reward), terminated, truncated])
            if terminated or truncated:
                results.append(env.reset()[0].tolist())
        return results

    env, other = (WRAPPERS[name](gym.make("Poison-v0", max_episode_steps=6)) for _ in range(2))
    rng = np.random.default_rng(1)
    env.reset(seed=1)
    other.reset(seed=2)
    run(other, rng.uniform(-1, 1, (3, 1)))
    for steps in (0, 1, 8):
        run(env, rng.uniform(-1, 1, (steps, 1)))
        set_state(other, through_a_file(get_state(env)))
        actions = rng.uniform(-1, 1, (9, 1))
        assert run(other, actions) == run(env, actions)


def test_a_state_in_memory_shares_nothing_with_the_environment() -> None:
    env: Any = Memory(gym.make("Poison-v0"))
    env.reset(seed=1)
    env.buffer = np.zeros(3)
    for _ in range(3):
        env.step(np.ones(1))
    state = get_state(env)
    saved = copy.deepcopy(state)
    for _ in range(2):
        env.step(np.ones(1))
        env.buffer += 1.0
        np.testing.assert_equal(state, saved)
        set_state(env, state)


def test_what_belongs_to_no_state_is_left_out() -> None:
    env: Any = wrappers.RenderCollection(gym.make("Poison-v0", render_mode="rgb_array"))
    env.reset()
    for n, value in enumerate([env.observation_space, env.spec, gym, len, partial(len, ""), int, lambda: 0, env.reset]):
        setattr(env.env, f"thing{n}", value)
    names = [name for attributes in get_state(env)["wrappers"] for name in attributes]
    assert "pop_frames" in names
    assert not [name for name in names if "thing" in name or name in ("env", "spec", "frame_list")]


class Opaque(PoisonEnv):
    def get_state(self) -> dict[str, Any]:
        return {"rng": np.random.default_rng()}


def with_attribute(value: Any) -> gym.Env:
    env: Any = gym.make("Poison-v0")
    env.thing = value
    return env


def with_a_cycle() -> gym.Env:
    env: Any = with_attribute(Average())
    env.thing.part = Average()
    env.thing.part.whole = env.thing
    return env


CANNOT = [
    (partial(gym.make, "CartPole-v1"), r"CartPoleEnv lacks get_state\(\) and set_state\(state\)"),
    (Opaque, "The state of Opaque holds a Generator, which cannot be saved"),
    (type("Robot", (PoisonEnv,), {"set_state": lambda self, qpos, qvel: None}), r"Robot lacks get_state\(\)"),
    (type("Unwritten", (PoisonEnv,), {"get_state": gym.Env.render}), r"get_state\(\) raises NotImplementedError"),
    (with_a_cycle, "a wrapper holds something that is a part of itself"),
    *(
        (partial(with_attribute, value), r"OrderEnforcing\.thing holds a \w+")
        for value in ({1, 2}, AutoresetMode.DISABLED, object(), [np.array([None])], [Average()])
    ),
]


@pytest.mark.parametrize(("env_fn", "text"), CANNOT)
def test_what_cannot_be_saved_is_named_in_one_sentence(env_fn: Any, text: str) -> None:
    env = env_fn()
    env.reset()
    with pytest.raises(NoState, match=text) as caught:
        get_state(env)
    assert "\n" not in str(caught.value)


class Faulty(PoisonEnv):
    def get_state(self) -> dict[str, Any]:
        return {"state": len(3)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env_fn", "kind", "text"),
    [(Opaque, NoState, r"^The state of Opaque holds a Generator[^\n]*$"), (Faulty, TypeError, "has no len")],
)
def test_it_is_named_across_processes_and_told_from_a_fault(env_fn: Any, kind: type[Exception], text: str) -> None:
    vec_env = SubprocVecEnv([env_fn] * 2, 1)
    vec_env.reset()
    with pytest.raises(kind, match=text) as caught:
        vec_env.get_state()
    assert isinstance(caught.value, NoState) == (kind is NoState)
    assert kind is TypeError or isinstance(caught.value, WorkerError)
    if kind is NoState:  # the environments live on
        vec_env.step(np.zeros((2, 1), np.float32))
    vec_env.close()


class Recent(PoisonEnv):
    """Its state holds what `torch.load` would refuse."""

    recent: deque[int] = deque(maxlen=4)

    def get_state(self) -> dict[str, Any]:
        return {"recent": self.recent, np.int64(3): np.float32(0.1), "like ours": {"__kind__": "deque"}}

    def set_state(self, state: dict[str, Any]) -> None:
        assert (type(state[3]), state["recent"].maxlen, type(state["like ours"])) == (np.float32, 4, dict)
        self.recent = state["recent"]


def test_a_state_of_any_plain_values_comes_back_from_a_file() -> None:
    env, other = Recent(), Recent()
    env.recent = deque([1, 2], maxlen=4)
    set_state(other, through_a_file(get_state(env)))
    assert (other.recent, other.recent is env.recent) == (env.recent, False)
