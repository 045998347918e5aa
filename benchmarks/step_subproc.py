"""How fast does SubprocVecEnv step 16 environments? Prints steps per second, the median of eight seconds.

PYTHONPATH=CHECKOUT python benchmarks/step_subproc.py CartPole-v1        # that checkout's SubprocVecEnv
PYTHONPATH=CHECKOUT python benchmarks/step_subproc.py "images 64x64x3"

`benchmarks.stepping` compares this checkout's with its peers, `benchmarks.speed` with another checkout's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from envs.subproc_vec_env import SubprocVecEnv

Step = Callable[[Any], Any]


class ImageEnv(gym.Env):
    """64 x 64 RGB images at next to no cost, so that what is measured is their way to the learner."""

    observation_space = Box(0, 255, (64, 64, 3), np.uint8)
    action_space = Discrete(12)

    def __init__(self) -> None:
        self.images = np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), dtype=np.uint8)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.count = 0
        return self.images[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        return self.images[self.count % 8], 0.0, False, self.count == 500, {}


def step_for(seconds: float, step: Step, actions: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Step for so many seconds; returns environment steps per second. `actions` are batches, in whole passes."""
    count, start = 0, clock()
    while (elapsed := clock() - start) < seconds:
        for batch in actions:
            step(batch)
        count += len(actions) * len(actions[0])
    return count / elapsed


def planned(envs: Any, num: int = 64) -> list[np.ndarray]:
    """Random actions of all environments, to use over and over."""
    envs.action_space.seed(0)
    return [envs.action_space.sample() for _ in range(num)]


def main(task: str) -> None:
    env_fn: Callable[[], gym.Env] = ImageEnv if task == "images 64x64x3" else partial(gym.make, task)
    envs = SubprocVecEnv([env_fn] * 16, context="fork")
    envs.reset(seed=0)
    actions = planned(envs)
    print(statistics.median(step_for(1.0, envs.step, actions) for _ in range(8)))
    envs.close()


if __name__ == "__main__":
    main(sys.argv[1])
