"""What a vector of environments tells about its episodes: the task's own rewards, returns and lengths."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from envs.state import NoState


def begun_by(options: Any) -> Any:
    """The environments that a reset with these options begins, as an index. Ask before the reset: Gymnasium's
    environments take the mask out of them."""
    return (options or {}).get("reset_mask", slice(None))


class EpisodeStatistics(VectorWrapper):
    """Adds to the infos of every step, each (num_envs,): `raw_reward`, the reward before any wrapper around this one
    changes it; `episode_return` and `episode_length` of the episodes under way, those that just ended included; and
    `worker_restarted`, which of them were lost with their worker. And of the episodes that have just ended and were not
    lost: `ended_envs`, the indices of their environments, and `ended`, (return, length, return / length) of each.

    Put it next to the environments, which must not have NEXT_STEP, whose resets are steps. An observation or a reward
    that is not finite raises FloatingPointError before anything can learn from it. `set_state` returns whether the
    environments go on where they were saved: it is False if they could not be saved, about which `get_state` warns, or
    are more or fewer now. It raises gymnasium.error.Error for others' states.
    """

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        if env.metadata.get("autoreset_mode") is AutoresetMode.NEXT_STEP:
            raise ValueError("EpisodeStatistics needs environments with another autoreset_mode than NEXT_STEP.")
        self.returns = np.zeros(self.num_envs)
        self.lengths = np.zeros(self.num_envs, np.int64)

    def reset(self, *, seed=None, options=None):
        begun = begun_by(options)
        obs, infos = self.env.reset(seed=seed, options=options)
        self._begin(begun)
        self._check("observation", obs)
        return obs, infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        self.returns, self.lengths = self.returns + rewards, self.lengths + 1  # new ones: the infos keep them
        self._check("reward", rewards)
        for n in np.flatnonzero(truncations & ~terminations & ("final_obs" in infos)):
            self._check("final observation", infos["final_obs"][n], int(n))
        infos |= {"raw_reward": rewards, "episode_return": self.returns, "episode_length": self.lengths}
        ended = np.flatnonzero(terminations | truncations)
        lost = infos.setdefault("worker_restarted", np.zeros(self.num_envs, bool))
        infos["ended_envs"] = [n for n in ended if not lost[n]]
        infos["ended"] = [
            (self.returns[n], self.lengths[n], self.returns[n] / self.lengths[n]) for n in infos["ended_envs"]
        ]
        if ended.size:
            self._begin(ended)
        self._check("observation", obs)  # the first of an episode is that of step 0, its reset
        return obs, rewards, terminations, truncations, infos

    def _begin(self, envs: Any) -> None:
        """Count anew in these environments, in new arrays: the last infos keep theirs."""
        self.returns, self.lengths = self.returns.copy(), self.lengths.copy()
        self.returns[envs], self.lengths[envs] = 0.0, 0

    def _check(self, name: str, numbers: Any, env: int | None = None) -> None:
        """Raise FloatingPointError if a number is not finite: of all environments, or of the one with index `env`."""
        if isinstance(numbers, dict | tuple):
            for part in numbers.values() if isinstance(numbers, dict) else numbers:
                self._check(name, part, env)
        elif (numbers := np.asarray(numbers)).dtype.kind == "f" and not np.isfinite(numbers).all():
            if env is None:  # then of the first whose row has one
                env = int(np.isfinite(numbers).reshape(self.num_envs, -1).all(1).argmin())
            step = self.lengths[env]
            raise FloatingPointError(f"The {name} of environment {env} is not finite in step {step} of its episode.")

    def get_state(self) -> dict[str, Any]:
        try:
            state = self.env.get_state()  # type: ignore[attr-defined]
        except NoState as error:
            warnings.warn(f"A resumed run will begin new episodes: {error}", stacklevel=2)
            state = None
        return {"returns": self.returns.copy(), "lengths": self.lengths.copy(), "env": state}

    def set_state(self, state: dict[str, Any]) -> bool:
        if state["env"] is None or len(state["lengths"]) != self.num_envs:
            return False
        try:
            self.env.set_state(state["env"])  # type: ignore[attr-defined]
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # but no lost worker's WorkerError
            sentence = "The saved environments are not these (flags, make_env): begin a new run with --init-from."
            raise gym.error.Error(f"{sentence} ({error})") from error
        self.returns, self.lengths = np.array(state["returns"]), np.array(state["lengths"])
        return True
