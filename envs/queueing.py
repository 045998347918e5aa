"""A small continuing task: one server, two queues, and no end.

Each step the server serves one waiting job of the chosen queue (with that queue's success probability); then
each queue receives a job with its arrival probability. The reward is minus the total number of waiting jobs, so
the long-run average reward is minus the mean backlog. The episode never terminates: any limit on its length is
the experimenter's (`max_episode_steps`, a truncation), which makes it the smallest task on which a wrong
treatment of time limits shows. Serving the longer queue keeps both queues short; serving only one lets the
other grow without bound whenever its arrivals are positive.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class TwoQueueEnv(gymnasium.Env):
    """Observation: the two backlogs, float32 (2,). Action: Discrete(2) or, with `continuous=True`, Box (1,)
    whose sign chooses the queue. Reward: -(backlog of queue 0 + backlog of queue 1) after the step, in jobs.

    Raises ValueError if a probability lies outside [0, 1], if the load is 1 or more (queues then grow under any
    policy), and for a render mode or an action that does not exist.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(
        self,
        arrival_probs: tuple[float, float] = (0.3, 0.4),
        service_probs: tuple[float, float] = (0.95, 0.95),
        continuous: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.arrival_probs, self.service_probs = np.asarray(arrival_probs), np.asarray(service_probs)
        for name, probs in (("arrival_probs", arrival_probs), ("service_probs", service_probs)):
            if len(probs) != 2 or not all(0 <= p <= 1 for p in probs):
                raise ValueError(f"{name} must be two probabilities in [0, 1], not {probs}.")
        load = sum(a / s if s else np.inf for a, s in zip(arrival_probs, service_probs, strict=True) if a)
        if load >= 1:
            raise ValueError(
                f"The load is {load:.2f}: so many steps of service arrive in each step, which the server has not. "
                f"Lower arrival_probs {arrival_probs} or raise service_probs {service_probs}."
            )
        self.observation_space = spaces.Box(0.0, np.inf, (2,), np.float32)
        self.action_space: spaces.Space = spaces.Box(-1.0, 1.0, (1,), np.float32) if continuous else spaces.Discrete(2)
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode={render_mode!r}: choose 'ansi' or None.")
        self.continuous = continuous
        self.render_mode = render_mode
        self.backlog = np.zeros(2, dtype=np.int64)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.backlog[:] = 0
        return self.backlog.astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        queue = int(action[0] > 0) if self.continuous else int(action)
        if queue not in (0, 1):
            raise ValueError(f"action {action}: the queues are 0 and 1.")
        draws = self.np_random.random(3)
        if self.backlog[queue] > 0 and draws[0] < self.service_probs[queue]:
            self.backlog[queue] -= 1
        self.backlog += draws[1:] < self.arrival_probs
        return self.backlog.astype(np.float32), -float(self.backlog.sum()), False, False, {}

    def render(self) -> str | None:
        return None if self.render_mode is None else f"queues: {self.backlog[0]:4d} {self.backlog[1]:4d}"

    def get_state(self) -> dict[str, Any]:
        return {"backlog": self.backlog.copy(), "rng": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.backlog[:] = state["backlog"]
        self.np_random.bit_generator.state = state["rng"]
