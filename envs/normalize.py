"""Running normalisation of observations and rewards, as vector wrappers whose state can be saved.

Details 28-31 of the "37 implementation details": observations are centred and scaled by
their running mean and standard deviation and clipped; rewards are divided by the running standard deviation of
the discounted return and clipped. Gymnasium's `NormalizeObservation` refuses environments that reset within the step
that ends an episode (SAME_STEP); this one normalises the final observation there. Both of ours take resets of some
environments only, hand over the untouched reward and offer their statistics to a checkpoint; with `training=False`
the statistics stand still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from envs.vector_state import get_vector_state, set_vector_state

Gather = Callable[[np.ndarray], list[np.ndarray]]  # an array in each of several processes -> the arrays of all


class RunningMeanStd:
    """Mean and variance of a stream of batches, merged by Chan et al.'s parallel formula (1979).

    With `gather`, several processes keep one statistic: each absorbs the batches of all, in the same order.
    """

    def __init__(self, shape: tuple[int, ...] = (), gather: Gather | None = None) -> None:
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = 1e-4  # a trace of a prior of mean 0 and variance 1, which the first batch outweighs
        self.gather = gather

    def update(self, batch: np.ndarray) -> None:
        """Absorb `batch` (batch_size, *shape)."""
        batch = np.asarray(batch, np.float64)  # squares of float32 overflow at 2e19, of float16 at 256
        size = batch.shape[0]
        mean = np.add.reduce(batch, 0) / max(size, 1)
        centred = batch - mean
        var = np.add.reduce(centred * centred, 0) / max(size, 1)
        if self.gather is None:
            self.merge(mean, var, size)
            return
        for moments in self.gather(np.concatenate([np.ravel(mean), np.ravel(var), [size]])):
            mean, var = moments[:-1].reshape(2, *self.mean.shape)
            self.merge(mean, var, moments[-1])

    def merge(self, mean: np.ndarray, var: np.ndarray, count: float) -> None:
        """Absorb a stream of which only mean, variance (each `shape`) and length are known; leave it out if the
        variance would overflow."""
        if count == 0:
            return
        total = self.count + count
        delta = mean - self.mean
        var = (self.var * self.count + var * count + delta * delta * (self.count * count / total)) / total
        if not np.isfinite(np.add.reduce(var, None)):
            return  # an infinite variance would turn every later observation into a healthy-looking 0
        self.mean = self.mean + delta * (count / total)
        self.var, self.count = var, total

    def get_state(self) -> dict[str, Any]:
        return {"mean": self.mean.copy(), "var": self.var.copy(), "count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.mean, self.var = np.array(state["mean"]), np.array(state["var"])
        self.count = float(state["count"])


def _clip_finite(values: np.ndarray, limit: float) -> np.ndarray:
    """Clip to [-limit, limit], except infinities, which become nan: they are a fault, and must not look healthy."""
    clipped = np.minimum(np.maximum(values, -limit), limit)
    infinite = np.isinf(values)
    return np.where(infinite, np.nan, clipped) if infinite.any() else clipped


class _SaveableWrapper(VectorWrapper):
    """A vector wrapper that can be frozen and passes state requests through to what it wraps."""

    def __init__(self, env: VectorEnv, training: bool) -> None:
        super().__init__(env)
        self.training = training

    def own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def set_own_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        """This wrapper's statistics under "own", the wrapped environments' state, or None, under "env"."""
        return {"own": self.own_state(), "env": get_vector_state(self.env)}

    def set_state(self, state: dict[str, Any]) -> bool:
        """Restore what `get_state` returned; False if the environments themselves could not be saved."""
        self.set_own_state(state["own"])
        return set_vector_state(self.env, state["env"])


class NormalizeObservation(_SaveableWrapper):
    """Observations become float32 (x - mean) / sqrt(var + epsilon), clipped to [-clip, clip].

    With `training=False` the statistics stand still; evaluation copies them with `set_own_state`. The final
    observation of an ended episode (`infos["final_obs"]`) is normalised too but not counted: the learner sees
    it only through the critic's bootstrap, so it must be on the critic's scale.
    """

    def __init__(
        self,
        env: VectorEnv,
        training: bool = True,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        gather: Gather | None = None,
    ) -> None:
        super().__init__(env, training)
        self.clip, self.epsilon = clip, epsilon
        shape = env.single_observation_space.shape
        if not isinstance(env.single_observation_space, spaces.Box) or shape is None:
            raise TypeError(f"NormalizeObservation needs Box observations, not {env.single_observation_space}.")
        self.single_observation_space = spaces.Box(-clip, clip, shape, np.float32)
        self.observation_space = spaces.Box(-clip, clip, (self.num_envs, *shape), np.float32)
        self.statistics = RunningMeanStd(shape, gather)

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        """(..., *shape) -> float32 (..., *shape) with the statistics as they stand."""
        scaled = (obs - self.statistics.mean) / np.sqrt(self.statistics.var + self.epsilon)
        return _clip_finite(scaled, self.clip).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        begun = (options or {}).get("reset_mask", slice(None))  # read now, for Gymnasium takes it out
        obs, infos = self.env.reset(seed=seed, options=options)
        self._count(obs[begun])
        return self.normalize(obs), infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        self._count(obs)
        if "final_obs" in infos:
            final_obs = infos["final_obs"].copy()
            for n in np.flatnonzero(infos["_final_obs"]):
                final_obs[n] = self.normalize(final_obs[n])
            infos["final_obs"] = final_obs
        return self.normalize(obs), rewards, terminations, truncations, infos

    def _count(self, obs: np.ndarray) -> None:
        if self.training:
            finite = np.isfinite(obs)
            # A broken environment must not poison the statistics of all: its row is left out, and stays visible.
            self.statistics.update(obs if finite.all() else obs[finite.reshape(len(obs), -1).all(1)])

    def own_state(self) -> dict[str, Any]:
        return self.statistics.get_state()

    def set_own_state(self, state: dict[str, Any]) -> None:
        self.statistics.set_state(state)


class NormalizeReward(_SaveableWrapper):
    """Rewards become r / sqrt(var(discounted return) + epsilon), clipped to [-clip, clip].

    The discounted return of each environment restarts at either end of an episode and at a reset; a step that only
    resets (NEXT_STEP) is not counted. `gamma` must be the gamma of training, or the scale is that of another
    problem. The untouched rewards stay in `infos["raw_reward"]`, (num_envs,), so that what is reported is always
    the task's own reward.
    """

    def __init__(
        self,
        env: VectorEnv,
        gamma: float,
        training: bool = True,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        gather: Gather | None = None,
    ) -> None:
        super().__init__(env, training)
        self.gamma, self.clip, self.epsilon = gamma, clip, epsilon
        self.returns = np.zeros(self.num_envs)
        self._ended = np.zeros(self.num_envs, np.bool_)  # their next step only resets; never in SAME_STEP
        self._same_step = env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
        self.statistics = RunningMeanStd(gather=gather)

    def reset(self, *, seed=None, options=None):
        begun = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))  # Gymnasium takes it out
        obs, infos = self.env.reset(seed=seed, options=options)
        self.returns[begun] = 0.0
        self._ended[begun] = False
        return obs, infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        self.returns = self.returns * self.gamma + rewards
        finite = np.isfinite(self.returns)
        if self.training:
            self.statistics.update(self.returns[finite & ~self._ended])
        ended = terminations | truncations
        self.returns[ended | ~finite] = 0.0  # a nan would stay for ever where episodes never end
        if not self._same_step:
            self._ended = ended
        infos["raw_reward"] = rewards
        scaled = _clip_finite(rewards / np.sqrt(self.statistics.var + self.epsilon), self.clip)
        return obs, scaled, terminations, truncations, infos

    def own_state(self) -> dict[str, Any]:
        return {"returns": self.returns.copy(), "ended": self._ended.copy(), **self.statistics.get_state()}

    def set_own_state(self, state: dict[str, Any]) -> None:
        self.returns = np.array(state["returns"])
        self._ended = np.array(state.get("ended", np.zeros(self.num_envs, np.bool_)))  # older ones are of SAME_STEP
        self.statistics.set_state(state)
