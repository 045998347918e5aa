"""Running normalisation of observations and rewards, as vector wrappers whose state can be saved.

Details 28-31 of the "37 implementation details": observations are centred and scaled by their running mean and standard
deviation and clipped; rewards are divided by the running standard deviation of the discounted return and clipped.
Unlike Gymnasium's, these wrappers normalise the final observation of an episode that ends in SAME_STEP mode, take
resets of some environments only, hand over the untouched reward, and leave out what is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from envs.state import NoState

Gather = Callable[[np.ndarray], list[np.ndarray]]  # an array in each of several processes -> the arrays of all


class RunningMeanStd:
    """Mean and variance of a stream of batches. With `gather`, several processes keep one statistic of all batches."""

    def __init__(self, shape: tuple[int, ...] = (), gather: Gather | None = None) -> None:
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = 1e-4  # a trace of a prior of mean 0 and variance 1, which the first batch outweighs
        self.gather = gather

    def update(self, batch: np.ndarray) -> bool:
        """Absorb `batch` (batch_size, *shape); rows that are not finite are left out, and False is returned."""
        deviations = np.asarray(batch, np.float64) - self.mean  # squares of float32 overflow at 2e19
        squares = np.add.reduce(deviations * deviations, 0)
        finite = math.isfinite(np.add.reduce(squares, None))
        if not finite:
            deviations = deviations[np.isfinite(deviations).reshape(len(deviations), -1).all(1)]
            squares = np.add.reduce(deviations * deviations, 0)
        sums, size = np.add.reduce(deviations, 0), len(deviations)
        if self.gather is not None:
            moments = np.sum(self.gather(np.concatenate([np.ravel(sums), np.ravel(squares), [size]])), axis=0)
            sums, squares = moments[:-1].reshape(2, *self.mean.shape)
            size = moments[-1]
        total = self.count + size
        shift = sums / total
        var = (self.var * self.count + squares) / total - shift * shift
        if math.isfinite(np.add.reduce(var, None)):  # else every later observation would be a healthy-looking 0
            self.mean, self.var, self.count = self.mean + shift, var, total
        return finite

    def get_state(self) -> dict[str, Any]:
        return {"mean": np.array(self.mean), "var": np.array(self.var), "count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.mean, self.var, self.count = np.array(state["mean"]), np.array(state["var"]), float(state["count"])


def _clip(values: np.ndarray, limit: float, finite: bool) -> np.ndarray:
    """Clip to [-limit, limit]. Infinities become nan: they are a fault, and must not look healthy."""
    clipped = np.minimum(np.maximum(values, -limit), limit)
    return clipped if finite else np.where(np.isinf(values), np.nan, clipped)


def _state_of(env: VectorEnv) -> Any:
    if not hasattr(type(env), "get_state"):
        raise NoState(f"{env} cannot be saved, because it lacks get_state() and set_state(state).")
    return env.get_state()  # type: ignore[attr-defined]


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
        gather: Gather | None = None,
    ) -> None:
        super().__init__(env)
        shape = env.single_observation_space.shape
        if not isinstance(env.single_observation_space, spaces.Box) or shape is None:
            raise TypeError(f"NormalizeObservation needs Box observations, not {env.single_observation_space}.")
        self.single_observation_space = spaces.Box(-clip, clip, shape, np.float32)
        self.observation_space = spaces.Box(-clip, clip, (self.num_envs, *shape), np.float32)
        self.statistics = RunningMeanStd(shape, gather) if statistics is None else statistics
        self.training, self.clip, self.epsilon = training, clip, epsilon

    def normalize(self, obs: np.ndarray, finite: bool = False) -> np.ndarray:
        """(..., *shape) -> float32 (..., *shape) with the statistics as they stand. `finite`: it is known to be."""
        scaled = (obs - self.statistics.mean) / np.sqrt(self.statistics.var + self.epsilon)
        return _clip(scaled, self.clip, finite).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        begun = (options or {}).get("reset_mask", slice(None))  # read now, for Gymnasium takes it out
        obs, infos = self.env.reset(seed=seed, options=options)
        if self.training:
            self.statistics.update(obs[begun])
        return self.normalize(obs), infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        finite = self.training and self.statistics.update(obs)
        if "final_obs" in infos:
            final_obs = infos["final_obs"].copy()
            for n in np.flatnonzero(infos["_final_obs"]):
                final_obs[n] = self.normalize(final_obs[n])
            infos["final_obs"] = final_obs
        return self.normalize(obs, finite), rewards, terminations, truncations, infos

    def get_state(self) -> dict[str, Any]:
        """The statistics and the state of the wrapped environments. Raises NoState if those have none."""
        return {"statistics": self.statistics.get_state(), "env": _state_of(self.env)}

    def set_state(self, state: dict[str, Any]) -> Any:
        self.statistics.set_state(state["statistics"])
        return self.env.set_state(state["env"])  # type: ignore[attr-defined]


class NormalizeReward(VectorWrapper):
    """Rewards become r / sqrt(var(discounted return) + epsilon), clipped to [-clip, clip].

    The discounted return of each environment restarts at either end of an episode and at a reset; a step that only
    resets (NEXT_STEP) is not counted. `gamma` must be the gamma of training, or the scale is that of another
    problem. The untouched rewards stay in `infos["raw_reward"]`, (num_envs,).
    """

    def __init__(
        self, env: VectorEnv, gamma: float, clip: float = 10.0, epsilon: float = 1e-8, gather: Gather | None = None
    ) -> None:
        super().__init__(env)
        self.gamma, self.clip, self.epsilon = gamma, clip, epsilon
        self.statistics = RunningMeanStd(gather=gather)
        self.returns = np.zeros(self.num_envs)
        self.next_step_resets = np.zeros(self.num_envs, np.bool_)  # only ever true in NEXT_STEP
        self._in_next_step_mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP) is AutoresetMode.NEXT_STEP

    def reset(self, *, seed=None, options=None):
        begun = (options or {}).get("reset_mask", slice(None))  # read now, for Gymnasium takes it out
        obs, infos = self.env.reset(seed=seed, options=options)
        self.returns[begun] = 0.0
        self.next_step_resets[begun] = False
        return obs, infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        self.returns = self.returns * self.gamma + rewards
        finite = self.statistics.update(self.returns[~self.next_step_resets])
        ended = terminations | truncations
        self.returns[ended] = 0.0
        if not finite:  # a nan would stay for ever where episodes never end
            self.returns[~np.isfinite(self.returns)] = 0.0
        if self._in_next_step_mode:
            self.next_step_resets = ended
        infos["raw_reward"] = rewards
        scaled = _clip(rewards / math.sqrt(self.statistics.var + self.epsilon), self.clip, finite)
        return obs, scaled, terminations, truncations, infos

    def get_state(self) -> dict[str, Any]:
        """Statistics, returns so far and the state of the wrapped environments. Raises NoState if those have none."""
        own = {"returns": self.returns.copy(), "next_step_resets": self.next_step_resets.copy()}
        return {"statistics": self.statistics.get_state(), **own, "env": _state_of(self.env)}

    def set_state(self, state: dict[str, Any]) -> Any:
        self.statistics.set_state(state["statistics"])
        restored = self.env.set_state(state["env"])  # type: ignore[attr-defined]
        if restored:  # not where there are more or fewer environments now
            self.returns, self.next_step_resets = state["returns"].copy(), state["next_step_resets"].copy()
        return restored
