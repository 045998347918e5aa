"""The running normalisers: right statistics, right scale at episode ends, shared with evaluation, saved exactly."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import envs.queueing  # noqa: F401  (registers TwoQueue-v0)
from envs.normalize import ClipAction, NormalizeObservation, NormalizeReward, RunningMeanStd
from envs.subproc_vec_env import SubprocVecEnv
from tests.conftest import assert_same

NUM_ENVS = 3
ACTIONS = np.zeros((NUM_ENVS, 1), np.float32)


def vec(env_id: str = "KnownValues-v0", limit: int | None = 5, kind: Any = SyncVectorEnv) -> Any:
    """KnownValues-v0: observation k = steps left, reward 1; ends by termination or after `limit` steps."""
    return kind([lambda: gym.make(env_id, max_episode_steps=limit)] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.floats(-1e3, 1e3))
def test_running_statistics_are_those_of_all_samples_at_once(seed: int, sizes: list[int], offset: float) -> None:
    rng = np.random.default_rng(seed)
    batches = [rng.normal(offset, 2.0, (size, 2)) for size in sizes]
    running = RunningMeanStd((2,))
    running.count = 0.0  # without the prior, for an exact comparison
    for batch in batches:
        running.update(batch)
    samples = np.concatenate(batches)
    np.testing.assert_allclose(running.mean, samples.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(running.var, samples.var(0), rtol=1e-6, atol=1e-9)
    assert running.count == len(samples)


@pytest.mark.parametrize(
    ("batch", "mean", "var"),
    [
        (np.array([[4.0], [6.0]]), 5.0, 1.0),  # the prior, of mean 0 and variance 1, weighs 1e-4 of a sample
        (np.array([[300.0], [300.25], [301.0]], np.float16), 300.4, 3.1887),  # squares overflow float16
        (np.array([[1e20], [0.0]], np.float32), 5e19, 2.5e39),  # and float32
    ],
)
def test_the_prior_fades_at_once_and_squares_are_summed_in_double(batch: Any, mean: float, var: float) -> None:
    running = RunningMeanStd((1,))
    assert (running.mean.tolist(), running.var.tolist()) == ([0.0], [1.0])
    running.update(batch)
    np.testing.assert_allclose([*running.mean, *running.var], [mean, var], rtol=2e-3)


def test_observations_are_scaled_by_what_was_seen_so_far_and_final_ones_too_without_being_counted() -> None:
    """Beside an unwrapped twin: (x - mean) / sqrt(var + 1e-8) with the statistics of all observations up to now."""
    wrapped, plain, reference = NormalizeObservation(vec()), vec(), RunningMeanStd((1,))
    (ours, infos), (raw, raw_infos) = wrapped.reset(seed=1), plain.reset(seed=1)
    num_ended = 0
    for _ in range(30):
        reference.update(raw)

        def expected(obs: np.ndarray) -> np.ndarray:
            return ((obs - reference.mean) / np.sqrt(reference.var + 1e-8)).astype(np.float32)

        np.testing.assert_array_equal(ours, expected(raw), strict=True)
        assert wrapped.single_observation_space.contains(ours[0])
        assert ("final_obs" in infos) == ("final_obs" in raw_infos)
        for n in np.flatnonzero(raw_infos.get("_final_obs", np.zeros(NUM_ENVS))):
            np.testing.assert_array_equal(infos["final_obs"][n], expected(raw_infos["final_obs"][n]), strict=True)
            num_ended += 1
        (ours, _, _, _, infos), (raw, _, _, _, raw_infos) = wrapped.step(ACTIONS), plain.step(ACTIONS)
    assert num_ended > 10
    count = wrapped.statistics.count
    wrapped.reset(options={"reset_mask": np.arange(NUM_ENVS) == 0})
    assert wrapped.statistics.count == count + 1


def test_extreme_observations_are_clipped_to_the_limit() -> None:
    wrapped = NormalizeObservation(vec(), clip=3.0)
    wrapped.reset(seed=1)
    np.testing.assert_array_equal(wrapped.normalize(np.array([[1e9], [-1e9]])), [[3.0], [-3.0]])
    rewards = NormalizeReward(ClipAction(vec("WholeNumbers-v0")), 0.9, clip=1.0)  # of actions within -3 and 3
    rewards.reset()
    np.testing.assert_allclose(rewards.step(np.array([[5], [-5], [2]]))[1], [1.0, -1.0, 0.762], rtol=1e-3)


def test_evaluation_shares_the_statistics_of_training_and_leaves_them_alone() -> None:
    training = NormalizeObservation(vec())
    frozen, plain = NormalizeObservation(vec(), statistics=training.statistics, training=False), vec()
    training.reset(seed=1)
    for _ in range(2):
        training.step(ACTIONS)
        before = training.statistics.get_state()
        (ours, _), (raw, _) = frozen.reset(seed=5), plain.reset(seed=5)
        for _ in range(10):
            np.testing.assert_array_equal(ours, training.normalize(raw))
            ours, raw = frozen.step(ACTIONS)[0], plain.step(ACTIONS)[0]
        assert_same(training.statistics.get_state(), before)


def test_only_boxes_and_only_steps_that_are_transitions_can_be_normalized() -> None:
    with pytest.raises(TypeError, match="Box"):
        NormalizeObservation(SyncVectorEnv([lambda: gym.make("FrozenLake-v1")]))
    with pytest.raises(ValueError, match="SAME_STEP"):
        NormalizeReward(SyncVectorEnv([lambda: gym.make("KnownValues-v0")]), 0.9)


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return_which_starts_anew_at_either_end() -> None:
    wrapped = NormalizeReward(vec(), 0.9, clip=1.5)
    wrapped.reset(seed=1)
    returns, reference, num_ended, num_clipped = np.zeros(NUM_ENVS), RunningMeanStd(), 0, 0
    for _ in range(40):
        _, rewards, terminated, truncated, _ = wrapped.step(ACTIONS)
        returns = 0.9 * returns + 1.0
        reference.update(returns)
        expected = 1.0 / np.sqrt(reference.var + 1e-8)
        np.testing.assert_allclose(rewards, min(expected, 1.5), rtol=1e-14)
        num_clipped += bool(expected > 1.5)
        returns[terminated | truncated] = 0
        num_ended += int((terminated | truncated).sum())
        np.testing.assert_equal(wrapped.statistics.get_state(), reference.get_state())
    assert num_ended > 10
    assert 0 < num_clipped < 40
    wrapped.reset(options={"reset_mask": np.arange(NUM_ENVS) == 0})
    assert np.flatnonzero(wrapped.returns == 0).tolist() == [0, *np.flatnonzero(returns[1:] == 0) + 1]
    wrapped.reset()
    assert not wrapped.returns.any()


def test_a_restored_stack_continues_bit_for_bit() -> None:
    first, second = (NormalizeObservation(NormalizeReward(vec(kind=SubprocVecEnv), 0.9)) for _ in range(2))
    first.reset(seed=1)
    for _ in range(7):
        first.step(ACTIONS)
    state = first.get_state()
    saved = copy.deepcopy(state)
    expected = [first.step(ACTIONS) for _ in range(15)]
    second.reset(seed=99)
    second.set_state(state)
    assert_same([second.step(ACTIONS) for _ in range(15)], expected)
    states = [state, first.get_state()]
    copies = [saved, copy.deepcopy(states[1])]
    first.reset()
    second.reset()
    assert_same(states, copies)  # a copy, and not changed by who goes on from it
    first.close()
    second.close()
