"""Continuing tasks: one server, several queues, and no end.

Each step the server serves one waiting job of the chosen queue (with that queue's success probability); then
each queue receives a job with its arrival probability. The reward is minus the total number of waiting jobs, so
the long-run average reward is minus the mean backlog. The episode never terminates: any limit on its length is
the experimenter's (`max_episode_steps`, a truncation), which makes these the smallest tasks on which a wrong
treatment of time limits shows.

TwoQueue-v0: two queues. Serving the longer one keeps both short; serving only one lets the other grow without bound.
ThreeQueue-v0: three queues, and a step in which the server turns to another queue serves nobody. Serving the longest
one then turns too often and is itself unstable; emptying a queue before turning to the next keeps all short.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class QueueEnv(gymnasium.Env):
    """Observation: the backlogs of the n queues, float32 (n,), and with `setup` n zeros and ones more, whose one shows
    where the server stands. Action: Discrete(n) or, with `continuous=True`, Box (n - 1,): the first of the queues whose
    number is largest, where queue 0 always has 0 (so for two queues the sign chooses; clipped to the Box, numbers above
    1 are equal). Reward: minus the sum of the backlogs after the step, in jobs. With `setup`, a step that turns the
    server to another queue serves no job.

    Raises ValueError if a probability lies outside [0, 1], if the load is 1 or more (queues then grow under any
    policy), and for an action that does not exist; gymnasium.error.UnsupportedMode for such a render mode.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(
        self,
        arrival_probs: tuple[float, ...] = (0.3, 0.4),
        service_probs: tuple[float, ...] = (0.95, 0.95),
        setup: bool = False,
        continuous: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.arrival_probs, self.service_probs = np.asarray(arrival_probs), np.asarray(service_probs)
        n = len(arrival_probs)
        for name, probs in (("arrival_probs", arrival_probs), ("service_probs", service_probs)):
            if len(probs) != n or n < 2 or not all(0 <= p <= 1 for p in probs):
                raise ValueError(f"{name} must be {max(n, 2)} probabilities in [0, 1], not {probs}.")
        load = sum(a / s if s else np.inf for a, s in zip(arrival_probs, service_probs, strict=True) if a)
        if load >= 1:
            raise ValueError(
                f"The load is {load:.2f}: so many steps of service arrive in each step, which the server has not. "
                f"Lower arrival_probs {arrival_probs} or raise service_probs {service_probs}."
            )
        self.observation_space = spaces.Box(0.0, np.inf, (2 * n if setup else n,), np.float32)
        choice = spaces.Box(-1.0, 1.0, (n - 1,), np.float32) if continuous else spaces.Discrete(n)
        self.action_space: spaces.Space = choice
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise gymnasium.error.UnsupportedMode(f"render_mode={render_mode!r}: choose 'ansi' or None.")
        self.setup, self.continuous, self.render_mode = setup, continuous, render_mode
        self.backlog, self.place = np.zeros(n, dtype=np.int64), 0

    def observation(self) -> np.ndarray:
        here = np.arange(len(self.backlog)) == self.place
        return np.concatenate([self.backlog, here] if self.setup else [self.backlog]).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.backlog[:], self.place = 0, 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        n = len(self.backlog)
        fits = np.shape(action) == self.action_space.shape
        queue = np.argmax([0.0, *action]) if fits and self.continuous else action
        if not fits or queue not in range(n):
            raise ValueError(f"action {action}: the queues are 0 to {n - 1}.")
        turning, self.place = self.setup and queue != self.place, int(queue)
        draws = self.np_random.random(n + 1)
        if not turning and self.backlog[self.place] > 0 and draws[0] < self.service_probs[self.place]:
            self.backlog[self.place] -= 1
        self.backlog += draws[1:] < self.arrival_probs
        return self.observation(), -float(self.backlog.sum()), False, False, {}

    def render(self) -> str | None:
        return None if self.render_mode is None else "queues:" + "".join(f" {jobs:4d}" for jobs in self.backlog)

    def get_state(self) -> dict[str, Any]:
        return {"backlog": self.backlog.copy(), "place": self.place, "rng": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.backlog[:], self.place = state["backlog"], state["place"]
        self.np_random.bit_generator.state = state["rng"]
