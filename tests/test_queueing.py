"""The tasks with queues: their law, their contract, their saved state, and policies of known quality."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs.queueing import QueueEnv


def begun(seed: int = 0, continuous: bool = False, **settings: Any) -> QueueEnv:
    env = QueueEnv(continuous=continuous, **settings)
    env.reset(seed=seed)
    return env


@pytest.mark.filterwarnings("ignore:.*maximum value is infinity:UserWarning")
@pytest.mark.parametrize("is_box", [True, False])
@pytest.mark.parametrize("setup", [True, False])
def test_gymnasium_finds_no_fault(is_box: bool, setup: bool) -> None:
    check_env(QueueEnv(continuous=is_box, setup=setup), skip_render_check=True)


def test_certain_arrivals_and_services_make_it_countable_by_hand() -> None:
    """Every step a job comes to queue 0 and none to queue 1; service never fails. First the server serves, then the
    job arrives: serving queue 0 keeps it at 1 job, serving queue 1, which stays empty, lets it grow by 1 a step."""
    env = QueueEnv(arrival_probs=(0.999999, 0.0), service_probs=(1.0, 1.0), continuous=False)
    obs, _ = env.reset(seed=0)
    assert (obs.tolist(), obs.dtype) == ([0.0, 0.0], np.float32)
    steps = [env.step(queue)[:2] for queue in (0, 0, 0, 1, 1, 1)]
    assert [(obs.tolist(), reward) for obs, reward in steps] == [([n, 0.0], -n) for n in (1.0, 1.0, 1.0, 2.0, 3.0, 4.0)]


def test_the_sign_of_a_continuous_action_chooses_the_queue() -> None:
    env = begun(continuous=True, arrival_probs=(0.0, 0.0), service_probs=(1.0, 1.0))
    for action, left in ((-0.3, [4.0, 5.0]), (0.3, [5.0, 4.0]), (0.0, [4.0, 5.0])):
        env.backlog[:] = 5
        assert env.step(np.array([action], dtype=np.float32))[0].tolist() == left


def test_a_step_that_turns_the_server_serves_nobody_and_its_place_is_seen() -> None:
    env = begun(arrival_probs=(0.0, 0.0, 0.0), service_probs=(1.0, 1.0, 1.0), setup=True)
    env.backlog[:] = 5
    steps = [env.step(queue)[0].tolist() for queue in (0, 2, 2, 1)]
    assert steps == [[4, 5, 5, 1, 0, 0], [4, 5, 5, 0, 0, 1], [4, 5, 4, 0, 0, 1], [4, 5, 4, 0, 1, 0]]
    free = begun(arrival_probs=(0.0, 0.0), service_probs=(1.0, 1.0))
    free.backlog[:] = 5
    assert free.step(1)[0].tolist() == [5, 4]


def test_frequencies_of_arrivals_and_services_are_the_given_ones() -> None:
    env = begun(1, arrival_probs=(0.2, 0.3), service_probs=(0.9, 0.5))
    changes = np.zeros((20_000, 2))
    for change in changes:
        env.backlog[:] = 50
        change[:] = env.step(1)[0] - 50
    # queue 1 after a step: +1 with 0.3 * 0.5, -1 with 0.5 * 0.7
    np.testing.assert_allclose((changes > 0).mean(0), [0.2, 0.15], atol=0.01)
    np.testing.assert_allclose((changes < 0).mean(0), [0.0, 0.35], atol=0.01)


def mean_backlog(env: Any, policy: Any, steps: int = 20_000) -> float:
    """Of a policy, which is asked with the backlogs and the server's place."""
    env.reset(seed=0)
    return -sum(env.step(policy(env.backlog, env.place))[1] for _ in range(steps)) / steps


def test_the_longer_queue_first_beats_chance_and_one_queue_only_is_unstable() -> None:
    rng = np.random.default_rng(0)
    longest = mean_backlog(begun(), lambda backlog, place: int(backlog[1] > backlog[0]))
    assert longest < 2.5
    assert mean_backlog(begun(), lambda backlog, place: int(rng.integers(2))) > 1.5 * longest
    # queue 1 grows by 0.4 a step: after 20 000 steps 8000 jobs, 4000 on average
    assert mean_backlog(begun(), lambda backlog, place: 0) > 1000


def test_of_three_queues_with_setup_the_longest_first_is_unstable_and_emptying_one_is_not() -> None:
    env = gym.make("ThreeQueue-v0", continuous=False).unwrapped
    longest = [mean_backlog(env, lambda backlog, place: int(backlog.argmax()), steps) for steps in (512, 20_000)]
    emptying = [mean_backlog(env, lambda backlog, place: place if backlog[place] else int(backlog.argmax()), steps)
                for steps in (512, 20_000)]  # fmt: skip
    assert 20 < longest[0] < longest[1] / 20
    assert max(emptying) < 5


def test_equal_seeds_and_restored_states_give_equal_runs() -> None:
    def run(env: QueueEnv) -> list[float]:
        return [env.step(t // 5 % 2)[1] for t in range(50)]

    first, second, other = (begun(seed, setup=True) for seed in (3, 3, 4))
    assert run(first) == run(second) != run(other)
    state = first.get_state()
    expected = run(first)
    assert other.reset()[0].tolist() == [0, 0, 1, 0]
    for _ in range(2):
        other.set_state(state)
        assert run(other) == expected


def test_an_impossible_task_or_queue_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"arrival_probs": (0.6, 0.6)}, "load is 1.26"),
        ({"arrival_probs": (0.5, 0.5), "service_probs": (1.0, 1.0)}, "load is 1.00"),
        ({"arrival_probs": (0.1, 1.1)}, "arrival_probs"),
        ({"service_probs": (0.9,)}, "service_probs"),
        ({"service_probs": (0.9, -0.1)}, "service_probs"),
        ({"arrival_probs": (0.1, 0.1), "service_probs": (0.9, 0.0)}, "load is inf"),
        ({"render_mode": "rgb_array"}, "render_mode='rgb_array': choose 'ansi' or None"),
    ]
    for kwargs, message in wrong:
        with pytest.raises(gym.error.UnsupportedMode if "render_mode" in kwargs else ValueError, match=message):
            QueueEnv(**kwargs)
    for action in (-1, 2, 1.9):
        with pytest.raises(ValueError, match=f"action {action}: the queues are 0 to 1"):
            begun().step(action)
    assert begun(render_mode="ansi").render() == "queues:    0    0"
    with pytest.raises(ValueError, match="the queues are 0 to 1"):
        begun(continuous=True).step([1.0, 0.0])
