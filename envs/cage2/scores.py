"""The table of the challenge: returns of 30, 50 and 100 steps against each red agent, and their sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .workflow import fix_metrics

HORIZONS = (30, 50, 100)  # the episode lengths of the published scores


def summarize(
    episodes: dict[str, tuple[Any, ...]], max_steps: int, finite_horizon: bool, has_workflow: bool
) -> dict[str, float]:
    """The numbers of an evaluation: means over the episodes; of the returns against each red agent within the first 30,
    50 and 100 steps, and of all `max_steps`; and score, the sum of these cells.

    `episodes` are, for each red agent, rewards (num_steps, num_episodes), lengths (num_episodes,) and, with a workflow,
    fixes by verdict (num_episodes, 4). Nothing in the game or in Blue's inputs tells how long an episode will be, so
    the first 30 steps of a longer one are an episode of 30 steps, and one set of episodes fills every row of the table.
    With a finite horizon Blue does see how long, and only the whole episode counts. That the red agents differ is no
    noise: the standard error is that of strata of fixed size.
    """
    rewards, lengths, fixes = zip(*episodes.values(), strict=True)
    returns = np.array([part.sum(0) for part in rewards])  # (num_red_agents, num_episodes)
    variances = returns.var(1) / (returns.shape[1] - 1 or math.nan)
    shorter = [] if finite_horizon else [horizon for horizon in HORIZONS if horizon < max_steps]
    cells = {
        f"{red_agent}_{horizon}": part[:horizon].sum(0).mean()
        for red_agent, part in zip(episodes, rewards, strict=True)
        for horizon in (*shorter, max_steps)
    }
    summary = {
        "score": sum(cells.values()),
        "mean_return": returns.mean(),
        "std_return": returns.std(),
        "standard_error": np.sqrt(variances.sum()) / len(returns),
        "mean_length": np.mean(lengths),
    } | cells
    if has_workflow:
        summary |= fix_metrics(np.concatenate(fixes))
    return {name: float(value) for name, value in summary.items()}
