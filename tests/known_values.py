"""Small environments whose answers are known exactly, to hold a training loop against."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class SmallEnv(gymnasium.Env):
    """Box observations and actions, and all state in `self.state` and the generator, so that it can be saved."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, obs_dim: int = 1, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.render_mode = render_mode
        self.state = np.zeros(obs_dim)

    def begin(self) -> None:
        """Set `state` to that of a new episode."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.begin()
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        return self.state.astype(np.float32)

    def render(self) -> np.ndarray | None:
        """A picture (16, 16, 3) uint8 in which the state is a level of grey; no graphics library is needed."""
        if self.render_mode is None:
            return None
        return np.full((16, 16, 3), int(abs(self.state[0]) * 25) % 256, dtype=np.uint8)

    def get_state(self) -> dict[str, Any]:
        return {"state": self.state.copy(), "rng": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = np.array(state["state"])
        self.np_random.bit_generator.state = state["rng"]


class KnownValuesEnv(SmallEnv):
    """Every step earns 1, and the episode terminates in k steps, where k is the observation (1,), float32.

    So V(k) = 1 + gamma + ... + gamma^(k-1) = (1 - gamma^k) / (1 - gamma) under every policy. Episodes start at
    k = 1 .. 8; under a time limit of 5 some terminate early, some terminate on the limit, and some are truncated
    while k = 1, 2 or 3 steps were still to come, and worth something.
    """

    def begin(self) -> None:
        self.state[0] = self.np_random.integers(1, 9)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.state[0] -= 1
        return self.observe(), 1.0, bool(self.state[0] == 0), False, {}


class TargetEnv(SmallEnv):
    """Episodes of one step: the reward is minus the squared distance of the action from half the observation.

    The observation is uniform in [-1, 1], so the best return is 0, at action = obs / 2; always answering 0 earns
    -E[(obs/2)^2] = -1/12 = -0.083.
    """

    def begin(self) -> None:
        self.state[0] = self.np_random.uniform(-1, 1)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.observe(), -float((float(action[0]) - self.state[0] / 2) ** 2), True, False, {}


class PoisonEnv(SmallEnv):
    """Fine until its step number `at`, then `what` ("reward" or "obs") is `value`, if its seed is 3."""

    def __init__(self, what: str = "reward", value: float = np.nan, at: int = 20, render_mode: Any = None) -> None:
        super().__init__(obs_dim=2, render_mode=render_mode)
        self.what, self.value, self.at, self.poisoned = what, value, at, False

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if seed is not None:
            self.poisoned = seed == 3
            self.state[:] = 0  # state[0]: steps since the seed, over all episodes
        return super().reset(seed=seed)

    def begin(self) -> None:
        self.state[1] = self.np_random.normal()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.state[0] += 1
        self.state[1] = self.np_random.normal()
        obs, reward = self.observe(), float(action[0])
        if self.poisoned and self.state[0] == self.at:
            if self.what == "reward":
                reward = self.value
            else:
                obs[1] = self.value
        return obs, reward, False, False, {}


class PlainEnv(gymnasium.Env):
    """As a newcomer writes one: its constructor takes nothing, and it cannot be saved. The reward is the action."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space: Any = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(1, np.float32), float(action[0]), False, False, {}


class WholeNumbersEnv(PlainEnv):
    action_space = spaces.Box(-3, 3, (1,), np.int64)


class DictEnv(KnownValuesEnv):
    """KnownValues-v0 whose observation is a dict of two."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space: Any = spaces.Dict({"k": box, "pair": spaces.Box(-np.inf, np.inf, (2,), np.float32)})

    def observe(self) -> Any:
        k = self.state.astype(np.float32)
        return {"k": k, "pair": np.append(k, -k)}


CLASSES = {"KnownValues": KnownValuesEnv, "Target": TargetEnv, "Poison": PoisonEnv, "Plain": PlainEnv,
           "WholeNumbers": WholeNumbersEnv, "Dict": DictEnv}  # fmt: skip
for _name, _class in CLASSES.items():
    gymnasium.register(f"{_name}-v0", entry_point=_class)
