"""The two-queue task: its law, its contract, its saved state, and policies of known quality."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs.queueing import TwoQueueEnv


def mean_backlog(env: gym.Env, policy: Any, steps: int = 20_000) -> float:
    """The average cost of a policy (backlogs -> action) over one long episode."""
    obs, _ = env.reset(seed=0)
    total = 0.0
    for _ in range(steps):
        obs, reward, terminated, truncated, _ = env.step(policy(obs))
        assert not terminated
        assert not truncated
        total -= float(reward)
    return total / steps


@pytest.mark.filterwarnings("ignore:.*maximum value is infinity:UserWarning")
@pytest.mark.parametrize("is_box", [True, False])
def test_gymnasium_finds_no_fault(is_box: bool) -> None:
    check_env(TwoQueueEnv(continuous=is_box), skip_render_check=True)


def test_certain_arrivals_and_services_make_it_countable_by_hand() -> None:
    """Every step a job comes to queue 0 and none to queue 1; service never fails. First the server serves, then the
    job arrives: serving queue 0 keeps it at 1 job, serving queue 1 lets it grow by 1 a step."""
    env = TwoQueueEnv(arrival_probs=(0.999999, 0.0), service_probs=(1.0, 1.0), continuous=False)
    obs, _ = env.reset(seed=0)
    assert obs.tolist() == [0.0, 0.0]
    assert obs.dtype == np.float32
    for _ in range(5):
        obs, reward, *_ = env.step(0)
        assert (obs.tolist(), reward) == ([1.0, 0.0], -1.0)
    for step in range(5):
        obs, reward, *_ = env.step(1)
        assert (obs.tolist(), reward) == ([2.0 + step, 0.0], -2.0 - step)


def test_the_sign_of_a_continuous_action_chooses_the_queue() -> None:
    env = TwoQueueEnv(arrival_probs=(0.0, 0.0), service_probs=(1.0, 1.0))
    for action, left in (([-0.3], [4.0, 5.0]), ([0.3], [5.0, 4.0]), ([0.0], [4.0, 5.0])):
        env.reset(seed=0)
        env.backlog[:] = 5
        assert env.step(np.array(action, dtype=np.float32))[0].tolist() == left


@pytest.mark.parametrize("action", [-1, 2])
def test_there_are_two_queues(action: int) -> None:
    env = TwoQueueEnv(continuous=False)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=f"action {action}: the queues are 0 and 1"):
        env.step(action)


def test_an_unknown_render_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="render_mode='rgb_array': choose 'ansi' or None"):
        TwoQueueEnv(render_mode="rgb_array")


def test_an_empty_queue_stays_empty_when_served() -> None:
    env = TwoQueueEnv(arrival_probs=(0.0, 0.0), continuous=False)
    env.reset(seed=0)
    assert env.step(1)[0].tolist() == [0.0, 0.0]


def test_frequencies_of_arrivals_and_services_are_the_given_ones() -> None:
    env = TwoQueueEnv(arrival_probs=(0.2, 0.3), service_probs=(0.9, 0.5), continuous=False)
    obs, _ = env.reset(seed=1)
    arrivals, served = np.zeros(2), 0
    for _ in range(20_000):
        env.backlog[:] = 50
        obs, *_ = env.step(1)
        arrivals += [obs[0] - 50, obs[1] > 50]
        served += obs[1] < 50
    # queue 1 after a step: +1 with 0.3 * 0.5, -1 with 0.5 * 0.7
    np.testing.assert_allclose(arrivals / 20_000, [0.2, 0.15], atol=0.01)
    assert served / 20_000 == pytest.approx(0.35, abs=0.01)


def test_the_longer_queue_first_beats_chance_and_one_queue_only_is_unstable() -> None:
    env = TwoQueueEnv(continuous=False)
    rng = np.random.default_rng(0)
    longest = mean_backlog(env, lambda obs: int(obs[1] > obs[0]))
    alternating = mean_backlog(env, lambda obs: int(rng.integers(2)))
    one_only = mean_backlog(env, lambda obs: 0)
    assert longest < 2.5
    assert alternating > 1.5 * longest
    assert one_only > 1000  # queue 1 grows by 0.4 a step: after 20 000 steps 8000 jobs, 4000 on average


def test_equal_seeds_give_equal_runs_and_different_ones_do_not() -> None:
    runs = []
    for seed in (3, 3, 4):
        env = TwoQueueEnv()
        env.reset(seed=seed)
        runs.append([env.step(np.zeros(1))[1] for _ in range(50)])
    assert runs[0] == runs[1] != runs[2]


def test_a_restored_state_continues_bit_for_bit() -> None:
    first, second = TwoQueueEnv(), TwoQueueEnv()
    first.reset(seed=1)
    for _ in range(10):
        first.step(np.zeros(1))
    state = first.get_state()
    expected = [first.step(np.zeros(1))[0].tolist() for _ in range(50)]
    second.reset(seed=2)
    second.set_state(state)
    assert [second.step(np.zeros(1))[0].tolist() for _ in range(50)] == expected


def test_the_limit_of_an_episode_is_the_experimenters() -> None:
    env = gym.make("TwoQueue-v0", max_episode_steps=7)
    env.reset(seed=0)
    ends = [env.step(np.zeros(1, dtype=np.float32))[2:4] for _ in range(7)]
    assert ends == [(False, False)] * 6 + [(False, True)]
    assert gym.spec("TwoQueue-v0").max_episode_steps is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arrival_probs": (0.6, 0.6)}, "load is 1.26"),
        ({"arrival_probs": (0.5, 0.5), "service_probs": (1.0, 1.0)}, "load is 1.00"),
        ({"arrival_probs": (0.1, 1.1)}, "arrival_probs"),
        ({"service_probs": (0.9,)}, "service_probs"),
        ({"service_probs": (0.9, -0.1)}, "service_probs"),
        ({"arrival_probs": (0.1, 0.1), "service_probs": (0.9, 0.0)}, "load is inf"),
    ],
)
def test_an_impossible_task_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwoQueueEnv(**kwargs)
