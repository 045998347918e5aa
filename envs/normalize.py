"""Running normalisation of observations and rewards, as vector wrappers whose state can be saved.

Details 28-31 of the "37 implementation details": observations are centred and scaled by their running mean and standard
deviation and clipped; rewards are divided by the running standard deviation of the discounted return and clipped.
Unlike Gymnasium's, these wrappers normalise the final observation of an episode that ends in SAME_STEP mode, and can be
saved. They trust their numbers to be finite: `EpisodeStatistics` sees to that.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from envs.episodes import begun_by


class RunningMeanStd:
    """Mean and variance of a stream of batches."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = 1e-4  # the trace of a prior of mean 0 and variance 1, as in Gymnasium

    def update(self, batch: np.ndarray) -> None:
        """Absorb `batch` (batch_size, *shape)."""
        deviations = np.asarray(batch, np.float64) - self.mean  # squares of float32 overflow at 2e19
        sums, squares = np.add.reduce(deviations, 0), np.add.reduce(deviations * deviations, 0)
        total = self.count + len(deviations)
        shift = sums / total
        self.var = (self.var * self.count + squares) / total - shift * shift
        self.mean, self.count = self.mean + shift, total

    def get_state(self) -> dict[str, Any]:
        return {"mean": np.array(self.mean), "var": np.array(self.var), "count": float(self.count)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.mean, self.var, self.count = np.array(state["mean"]), np.array(state["var"]), float(state["count"])


def clip(values: np.ndarray, low: Any, high: Any) -> np.ndarray:
    return np.minimum(np.maximum(values, low), high)  # np.clip, without its microseconds of argument handling


class ClipAction(VectorWrapper):
    """Actions are clipped to the limits of their space, of all environments at once."""

    def step(self, actions):
        space: Any = self.single_action_space
        return self.env.step(clip(actions, space.low, space.high))

    def get_state(self) -> dict[str, Any]:
        return self.env.get_state()  # type: ignore[attr-defined]

    def set_state(self, state: dict[str, Any]) -> Any:
        return self.env.set_state(state)  # type: ignore[attr-defined]


class NormalizeObservation(VectorWrapper):
    """Observations become float32 (x - mean) / sqrt(var + epsilon), clipped to [-clip, clip].

    For evaluation, pass the `statistics` of training and `training=False`: they are shared, and stand still. The final
    observation of an ended episode (`infos["final_obs"]`) is normalised too but not counted: the learner sees
    it only through the critic's bootstrap, so it must be on the critic's scale.
    """

    def __init__(
        self,
        env: VectorEnv,
        statistics: RunningMeanStd | None = None,
        training: bool = True,
        clip: float = 10.0,
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__(env)
        shape = env.single_observation_space.shape
        if not isinstance(env.single_observation_space, spaces.Box) or shape is None:
            raise TypeError(f"NormalizeObservation needs Box observations, not {env.single_observation_space}.")
        self.single_observation_space = spaces.Box(-clip, clip, shape, np.float32)
        self.observation_space = spaces.Box(-clip, clip, (self.num_envs, *shape), np.float32)
        self.statistics = RunningMeanStd(shape) if statistics is None else statistics
        self.training, self.clip, self.epsilon = training, clip, epsilon

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        """(..., *shape) -> float32 (..., *shape) with the statistics as they stand."""
        scaled = (obs - self.statistics.mean) / np.sqrt(self.statistics.var + self.epsilon)
        return clip(scaled, -self.clip, self.clip).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        begun = begun_by(options)
        obs, infos = self.env.reset(seed=seed, options=options)
        if self.training:
            self.statistics.update(obs[begun])
        return self.normalize(obs), infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        if self.training:
            self.statistics.update(obs)
        if "final_obs" in infos:
            final_obs = infos["final_obs"].copy()
            for n in np.flatnonzero(infos["_final_obs"]):
                final_obs[n] = self.normalize(final_obs[n])
            infos["final_obs"] = final_obs
        return self.normalize(obs), rewards, terminations, truncations, infos

    def get_state(self) -> dict[str, Any]:
        """The statistics and the state of the wrapped environments."""
        return {"statistics": self.statistics.get_state(), "env": self.env.get_state()}  # type: ignore[attr-defined]

    def set_state(self, state: dict[str, Any]) -> Any:
        self.statistics.set_state(state["statistics"])
        return self.env.set_state(state["env"])  # type: ignore[attr-defined]


class NormalizeReward(VectorWrapper):
    """Rewards become r / sqrt(var(discounted return) + epsilon), clipped to [-clip, clip].

    The discounted return of each environment restarts when an episode ends, terminated or truncated, and at a reset.
    `gamma` must be the gamma that training begins with, or the scale is that of another problem. For SAME_STEP only,
    where every step is a transition.
    """

    def __init__(self, env: VectorEnv, gamma: float, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__(env)
        if env.metadata.get("autoreset_mode") is not AutoresetMode.SAME_STEP:
            raise ValueError("NormalizeReward needs environments with autoreset_mode=AutoresetMode.SAME_STEP.")
        self.gamma, self.clip, self.epsilon = gamma, clip, epsilon
        self.statistics = RunningMeanStd()
        self.returns = np.zeros(self.num_envs)

    def reset(self, *, seed=None, options=None):
        begun = begun_by(options)
        obs, infos = self.env.reset(seed=seed, options=options)
        self.returns[begun] = 0.0
        return obs, infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        self.returns = self.returns * self.gamma + rewards
        self.statistics.update(self.returns)
        self.returns[terminations | truncations] = 0.0
        scaled = clip(rewards / math.sqrt(self.statistics.var + self.epsilon), -self.clip, self.clip)
        return obs, scaled, terminations, truncations, infos

    def get_state(self) -> dict[str, Any]:
        """Statistics, returns so far and the state of the wrapped environments."""
        env = self.env.get_state()  # type: ignore[attr-defined]
        return {"statistics": self.statistics.get_state(), "returns": self.returns.copy(), "env": env}

    def set_state(self, state: dict[str, Any]) -> Any:
        self.statistics.set_state(state["statistics"])
        restored = self.env.set_state(state["env"])  # type: ignore[attr-defined]
        if restored is not False:  # as it is where there are more or fewer environments now
            self.returns = state["returns"].copy()
        return restored
