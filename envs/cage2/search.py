"""Which workflow to try next: a Gaussian process over all 120 orders, and an upper confidence bound (GP-UCB).

Pure functions of what was seen so far: the orders tried (indices into `ORDERS`), their returns and standard errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from .workflow import NUM_TYPES, ORDERS, RANKS

PAIRS = np.array(list(itertools.combinations(range(NUM_TYPES), 2)))

# DISCORDANT[a, b]: how many of the 10 pairs of types orders a and b rank differently (Kendall's tau distance).
PAIR_SIGNS = np.sign(RANKS[:, PAIRS[:, 0]] - RANKS[:, PAIRS[:, 1]])  # (120, 10)
DISCORDANT = (len(PAIRS) - PAIR_SIGNS @ PAIR_SIGNS.T) // 2


def mallows_kernel(scale: float) -> np.ndarray:
    """exp(-scale * DISCORDANT), (120, 120) (Jiao & Vert 2015). Positive definite: it is a Gaussian kernel on
    PAIR_SIGNS, whose squared distances are 4 times the number of discordant pairs."""
    return np.exp(-scale * DISCORDANT)


def gp_posterior(
    kernel: np.ndarray, tried: Sequence[int], values: np.ndarray, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation, (120,) each, of a Gaussian process of prior mean 0 and covariance `kernel` at all
    orders, after `values` were seen at the orders `tried` with noise of these variances (Rasmussen & Williams 2006,
    algorithm 2.1)."""
    tried = list(tried)
    factor = np.linalg.cholesky(kernel[np.ix_(tried, tried)] + np.diag(noise))  # K + noise = L L'
    half = np.linalg.solve(factor, kernel[tried])  # L^-1 k(tried, all)
    mean = half.T @ np.linalg.solve(factor, values)
    return mean, np.sqrt(np.maximum(kernel.diagonal() - (half**2).sum(0), 0))


def posterior_returns(
    tried: Sequence[int], returns: Sequence[float], errors: Sequence[float], scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean return and its standard deviation, (120,) each, after at least one order was tried: `gp_posterior` of
    standardised returns, each with the standard error of its evaluation as noise."""
    mean, std = np.mean(returns), np.std(returns) or 1.0
    values, noise = (np.array(returns) - mean) / std, (np.array(errors) / std) ** 2 + 1e-6
    scaled_mean, scaled_std = gp_posterior(mallows_kernel(scale), tried, values, noise)
    return mean + std * scaled_mean, std * scaled_std


def srinivas_beta(t: int, delta: float = 0.1) -> float:
    """The beta of the t-th choice with which the regret's bound holds with probability 1 - delta (Srinivas et al. 2010,
    theorem 1)."""
    return 2 * math.log(len(ORDERS) * t**2 * math.pi**2 / (6 * delta))


def next_order(
    tried: Sequence[int],
    returns: Sequence[float],
    errors: Sequence[float],
    scale: float = 0.2,
    beta: float | None = 4.0,
    num_random: int = 3,
    seed: int = 1,
) -> int:
    """The order to try next: the first `num_random` by chance, then the one not yet tried of the largest upper
    confidence bound mean + sqrt(beta) std (GP-UCB, Srinivas et al. 2010). beta None: a fifth of their schedule, as in
    their experiments."""
    if len(tried) < max(num_random, 1):
        drawn = np.random.default_rng(seed).permutation(len(ORDERS))
        return next(int(order) for order in drawn if order not in tried)
    mean, std = posterior_returns(tried, returns, errors, scale)
    bound = mean + math.sqrt(srinivas_beta(len(tried) + 1) / 5 if beta is None else beta) * std
    bound[list(tried)] = -np.inf
    return int(bound.argmax())
