"""Free-running statistics of the simulator against those of the real CybORG, as they were measured on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from envs.cage2 import ACTION_NAMES, DECOYS, DRAW_NAMES, HOSTS, NUM_ACTIONS, RED_AGENTS, Cage2VecEnv
from envs.cage2.memory import DECOY_SLOTS, REDUCED_HOSTS
from envs.cage2.scenario import BEST_EXPLOITS_FIRST, GREEN_TARGETS

EPISODES = 4000

REDUCED = [0, *(block + host for block in (2, 15, 132) for host in REDUCED_HOSTS)]
REDUCED += [ACTION_NAMES.index(f"Decoy{DECOYS[d].name} {HOSTS[h]}") for h, d in DECOY_SLOTS if h in REDUCED_HOSTS]
POLICIES: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "sleep": lambda num_envs, rng: np.zeros(num_envs, np.int64),
    "random": lambda num_envs, rng: rng.integers(NUM_ACTIONS, size=num_envs),
    "reduced": lambda num_envs, rng: rng.choice(REDUCED, size=num_envs),
}

# version red green blue: mean and standard error after 30, 50 and 100 steps, of 400 episodes, or of 100 (leaderboard
# meander, and red asleep)
REAL = """
head b_line nogreen sleep      -216.45 1.02  -478.45 1.02  -1133.45 1.02
head b_line nogreen random     -155.82 3.85  -343.16 7.84  -749.21 17.17
head b_line nogreen reduced    -88.79 3.57   -188.14 7.38  -371.71 13.82
head b_line green sleep        -217.44 0.96  -479.44 0.96  -1134.43 0.96
head b_line green random       -160.17 3.86  -349.78 7.90  -745.97 17.44
head b_line green reduced      -93.32 3.70   -196.23 7.56  -387.58 14.29
head meander nogreen sleep     -41.07 1.10   -270.92 3.55  -974.22 3.53
head meander nogreen random    -32.56 0.71   -158.07 4.43  -566.69 14.50
head meander nogreen reduced   -29.28 0.62   -108.00 3.27  -314.51 9.55
head meander green sleep       -41.15 1.08   -271.65 3.62  -975.41 3.51
head meander green random      -34.09 0.75   -170.81 4.52  -593.20 14.09
head meander green reduced     -27.99 0.45   -104.96 3.14  -311.48 9.55
leaderboard b_line nogreen random   -155.35 3.90  -341.49 8.00  -741.94 17.76
leaderboard b_line nogreen reduced  -93.96 3.73   -192.92 7.58  -367.43 14.08
leaderboard meander nogreen random   -32.99 1.24  -171.95 8.57  -578.60 29.23
leaderboard meander nogreen reduced  -28.07 0.80  -90.91 3.88   -302.82 17.65
head sleep nogreen sleep       0 0  0 0  0 0
head sleep nogreen random      -2.57 0.15  -4.25 0.20  -8.65 0.28
head sleep nogreen reduced     -5.01 0.18  -8.36 0.25  -16.92 0.38
head sleep green random        -2.47 0.15  -4.17 0.18  -8.64 0.27
head sleep green reduced       -5.01 0.21  -8.79 0.27  -17.41 0.40
"""
CELLS = {
    tuple(words[:4]): np.array(words[4:], float).reshape(3, 2) for words in map(str.split, REAL.strip().splitlines())
}


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_mean_returns_are_those_of_the_real_simulator(cell: tuple[str, str, str, str]) -> None:
    """Within four combined standard errors after 30, 50 and 100 steps."""
    version, red_agent, green, blue = cell
    env = Cage2VecEnv(EPISODES, red_agent, green=green == "green", version=version, seed=20_000)
    rng = np.random.default_rng(7)
    env.reset()
    rewards = np.empty((100, EPISODES))
    for step in range(100):
        _, rewards[step], *_ = env.step(POLICIES[blue](EPISODES, rng))
    for horizon, (real_mean, real_error) in zip((30, 50, 100), CELLS[cell], strict=True):
        returns = rewards[:horizon].sum(axis=0)
        error = np.hypot(real_error, returns.std(ddof=1) / np.sqrt(EPISODES))
        assert abs(returns.mean() - real_mean) <= 4 * error, f"{horizon} steps: {returns.mean():.2f}, {real_mean}"


def share_is(count: int, total: int, probability: float) -> bool:
    """Whether a count lies within four standard deviations of its expectation."""
    assert total > 1000
    return abs(count - total * probability) <= 4 * np.sqrt(total * probability * (1 - probability))


def test_draws_come_about_as_often_as_the_specification_says() -> None:
    env = Cage2VecEnv(EPISODES, {"b_line": 0.5, "meander": 0.5}, green=True, seed=3)
    rng = np.random.default_rng(1)
    env.reset()
    b_line = env.true_state()["red_agent"] == RED_AGENTS.index("b_line")
    drawn = []
    for _ in range(100):
        env.step(POLICIES["random"](EPISODES, rng))
        drawn.append(env.draws.copy())
    draws = dict(zip(DRAW_NAMES, np.moveaxis(drawn, 2, 0), strict=True))  # (100, EPISODES) each
    green, detected = draws["green_target"], draws["red_detect"][draws["red_detect"] >= 0]
    assert share_is(np.count_nonzero(green >= 0), green.size, 0.5)
    scanned = [host for host in range(13) if GREEN_TARGETS >> host & 1]
    assert set(np.unique(green)) == {-1, *scanned}
    assert all(share_is(np.count_nonzero(green == host), green.size, 1 / 16) for host in scanned)
    assert share_is(np.count_nonzero(detected), detected.size, 0.95)
    first_users = draws["red_target"][1][b_line]
    assert all(share_is(np.count_nonzero(first_users == host), first_users.size, 0.25) for host in (9, 10, 11, 12))
    assert set(np.unique(draws["red_exploit"])) == {-1, *BEST_EXPLOITS_FIRST}


def test_exploits_are_chosen_with_the_stated_probabilities() -> None:
    """B_line's first exploit of its user host, by host: the table of SPEC 6.3."""
    env = Cage2VecEnv(20_000, "b_line", max_steps=3, seed=9)
    env.reset()
    for _ in range(2):
        env.step(np.zeros(20_000, int))
    targets = env.draws[:, DRAW_NAMES.index("red_target")].copy()
    env.step(np.zeros(20_000, int))
    chosen = env.draws[:, DRAW_NAMES.index("red_exploit")]
    ftp, haraka, sql, https, http, eternal, keep, ssh = BEST_EXPLOITS_FIRST
    table = {
        9: {ftp: 0.75, ssh: 0.25},
        10: {eternal: 0.75, keep: 0.25},
        11: {haraka: 0.75, https: 0.25 / 3, http: 0.25 / 3, keep: 0.25 / 3},
        12: {haraka: 0.75, sql: 0.0625, https: 0.0625, http: 0.0625, ssh: 0.0625},
    }
    for host, probabilities in table.items():
        on_host = chosen[targets == host]
        assert set(np.unique(on_host)) == set(probabilities)
        for exploit, probability in probabilities.items():
            assert share_is(np.count_nonzero(on_host == exploit), on_host.size, probability)
