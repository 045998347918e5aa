"""The running normalisers: right statistics, right scale at episode ends, frozen in evaluation, saved exactly."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import envs.queueing  # noqa: F401  (registers TwoQueue-v0)
from envs.normalize import NormalizeObservation, NormalizeReward, RunningMeanStd
from envs.subproc_vec_env import SubprocVecEnv

NUM_ENVS = 3


def known_values(limit: int = 5) -> SyncVectorEnv:
    """KnownValues-v0: observation k = steps left, reward 1; ends by termination or after `limit` steps."""
    env_fns = [lambda: gym.make("KnownValues-v0", max_episode_steps=limit)] * NUM_ENVS
    return SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)


def actions() -> np.ndarray:
    return np.zeros((NUM_ENVS, 1), dtype=np.float32)


# ---- statistics -----------------------------------------------------------------------------------------------------


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


def test_the_prior_fades_at_once() -> None:
    running = RunningMeanStd()
    assert (float(running.mean), float(running.var)) == (0.0, 1.0)
    running.update(np.array([4.0, 6.0]))  # mean 5, variance 1; the prior weighs 1e-4 of a sample
    assert float(running.mean) == pytest.approx(5.0, abs=1e-3)
    assert float(running.var) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_samples_of_low_precision_are_summed_in_double(dtype: Any) -> None:
    batch = np.array([[300.0], [300.25], [301.0]], dtype)
    running, double = RunningMeanStd((1,)), RunningMeanStd((1,))
    running.update(batch)
    double.update(batch.astype(np.float64))
    np.testing.assert_equal(running.get_state(), double.get_state())


def test_a_large_but_finite_observation_leaves_a_finite_variance() -> None:
    running = RunningMeanStd((2,))
    running.update(np.array([[1e20, 1.0], [0.0, 3.0]], np.float32))
    np.testing.assert_allclose(running.var, [2.5e39, 1.0], rtol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("batch", [[[1e200], [0.0]], [[1e200]], [[1e308], [1e308]]])
def test_what_overflows_double_precision_is_left_out(batch: Any) -> None:
    running = RunningMeanStd((1,))
    running.update(np.array([[1.0], [3.0]]))
    before = running.get_state()
    running.update(np.array(batch))
    np.testing.assert_equal(running.get_state(), before)


# ---- observations ---------------------------------------------------------------------------------------------------


def test_observations_are_scaled_by_what_was_seen_so_far() -> None:
    """Beside an unwrapped twin: (x - mean) / sqrt(var + 1e-8) with the statistics of all observations up to now."""
    wrapped, plain, reference = NormalizeObservation(known_values()), known_values(), RunningMeanStd((1,))
    for step in range(30):
        if step == 0:
            (ours, _), (raw, _) = wrapped.reset(seed=1), plain.reset(seed=1)
        else:
            ours, raw = wrapped.step(actions())[0], plain.step(actions())[0]
        reference.update(raw)
        expected = (raw - reference.mean) / np.sqrt(reference.var + 1e-8)
        np.testing.assert_array_equal(ours, expected.astype(np.float32))
        assert ours.dtype == np.float32
        assert wrapped.single_observation_space.contains(ours[0])
    assert reference.var[0] > 1


def test_final_observations_are_on_the_same_scale_but_not_counted() -> None:
    wrapped, plain = NormalizeObservation(known_values()), known_values()
    wrapped.reset(seed=1)
    plain.reset(seed=1)
    seen = 0
    for _ in range(30):
        count = wrapped.statistics.count
        infos, raw_infos = wrapped.step(actions())[4], plain.step(actions())[4]
        assert wrapped.statistics.count == pytest.approx(count + NUM_ENVS)
        for n in range(NUM_ENVS):
            if "final_obs" not in raw_infos or not raw_infos["_final_obs"][n]:
                assert "final_obs" not in infos or infos["final_obs"][n] is None
                continue
            seen += 1
            expected = wrapped.normalize(raw_infos["final_obs"][n])
            np.testing.assert_array_equal(infos["final_obs"][n], expected)
            assert infos["final_obs"][n] != raw_infos["final_obs"][n]
    assert seen > 10


def test_extreme_observations_are_clipped_to_the_limit() -> None:
    wrapped = NormalizeObservation(known_values(), clip=3.0)
    wrapped.reset(seed=1)
    np.testing.assert_array_equal(wrapped.normalize(np.array([[1e9], [-1e9]])), [[3.0], [-3.0]])


def test_evaluation_leaves_the_statistics_alone() -> None:
    training = NormalizeObservation(known_values())
    training.reset(seed=1)
    for _ in range(10):
        training.step(actions())
    statistics = training.own_state()
    frozen = NormalizeObservation(known_values(), training=False)
    frozen.set_own_state(statistics)
    plain = known_values()
    (ours, _), (raw, _) = frozen.reset(seed=5), plain.reset(seed=5)
    for _ in range(10):
        np.testing.assert_array_equal(ours, training.normalize(raw))
        ours, raw = frozen.step(actions())[0], plain.step(actions())[0]
    np.testing.assert_equal(frozen.own_state(), statistics)


def test_only_boxes_can_be_normalized() -> None:
    envs = SyncVectorEnv([lambda: gym.make("FrozenLake-v1")])
    with pytest.raises(TypeError, match="Box"):
        NormalizeObservation(envs)
    envs.close()


# ---- rewards --------------------------------------------------------------------------------------------------------


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    gamma = 0.9
    wrapped, plain = NormalizeReward(known_values(), gamma, clip=1e9), known_values()
    wrapped.reset(seed=1)
    plain.reset(seed=1)
    returns, reference, ends = np.zeros(NUM_ENVS), RunningMeanStd(), 0
    for _ in range(40):
        _, ours, _, _, infos = wrapped.step(actions())
        _, raw, terminated, truncated, _ = plain.step(actions())
        returns = gamma * returns + raw
        reference.update(returns)
        np.testing.assert_array_equal(ours, raw / np.sqrt(reference.var + 1e-8))
        np.testing.assert_array_equal(infos["raw_reward"], raw)
        returns[terminated | truncated] = 0  # either end starts a new sum
        ends += int((terminated | truncated).sum())
    assert ends > 10


def test_the_return_of_a_constant_reward_by_hand() -> None:
    """Reward 1, gamma 0.5, no end: the sums are 1, 1.5, 1.75 in all environments, of mean 4.25/3, variance 0.0972."""
    env_fns = [lambda: gym.make("KnownValues-v0")] * NUM_ENVS
    wrapped = NormalizeReward(SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP), 0.5, clip=2.5)
    wrapped.reset(seed=[4, 5, 13])
    for env in wrapped.env.envs:  # type: ignore[attr-defined]
        env.unwrapped.state[0] = 8
    rewards = [wrapped.step(actions())[1] for _ in range(3)]
    assert wrapped.returns.tolist() == [1.75] * 3
    assert float(wrapped.statistics.var) == pytest.approx(0.0972, abs=1e-3)
    np.testing.assert_array_equal(rewards[2], [2.5] * 3)  # 1 / sqrt(0.0972) = 3.2, clipped


def test_the_scale_depends_on_gamma() -> None:
    """With the wrong gamma it is the scale of another problem: at 0.99 the sums grow ten times as far as at 0.9."""
    deviations = []
    for gamma in (0.9, 0.99):
        wrapped = NormalizeReward(SyncVectorEnv([lambda: gym.make("TwoQueue-v0")] * NUM_ENVS), gamma)
        wrapped.reset(seed=0)
        for _ in range(400):
            wrapped.step(actions())
        deviations.append(float(wrapped.statistics.var) ** 0.5)
    assert deviations[1] > 3 * deviations[0]


def test_rewards_are_not_scaled_by_evaluation_statistics() -> None:
    frozen = NormalizeReward(known_values(), 0.9, training=False)
    frozen.reset(seed=1)
    before = frozen.statistics.get_state()
    np.testing.assert_allclose(frozen.step(actions())[1], 1.0)  # variance 1, as at the start
    np.testing.assert_equal(frozen.statistics.get_state(), before)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_scale_does_not_depend_on_when_environments_reset(mode: AutoresetMode) -> None:
    """The row of a reset in NEXT_STEP, whose reward of 0 nobody earned, is not counted."""
    env_fns = [lambda: gym.make("KnownValues-v0", max_episode_steps=5)] * NUM_ENVS
    wrapped = NormalizeReward(SyncVectorEnv(env_fns, autoreset_mode=mode), 0.9)
    wrapped.reset(seed=1)
    returns, reference, resetting = np.zeros(NUM_ENVS), RunningMeanStd(), np.zeros(NUM_ENVS, bool)
    for _ in range(40):
        terminated, truncated, infos = wrapped.step(actions())[2:]
        ended = terminated | truncated
        returns = 0.9 * returns + infos["raw_reward"]
        reference.update(returns[~resetting])
        returns[ended] = 0
        if mode is AutoresetMode.NEXT_STEP:
            assert infos["raw_reward"].tolist() == [0.0 if reset else 1.0 for reset in resetting]
            resetting = ended
        elif mode is AutoresetMode.DISABLED and ended.any():
            wrapped.reset(options={"reset_mask": ended})
        np.testing.assert_equal(wrapped.statistics.get_state(), reference.get_state())


def test_a_reset_by_mask_counts_the_first_observations_alone() -> None:
    env = NormalizeObservation(
        SyncVectorEnv([lambda: gym.make("InvertedPendulum-v5")] * 3, autoreset_mode=AutoresetMode.DISABLED)
    )
    env.reset(seed=0)
    before = env.own_state()["count"]
    env.reset(options={"reset_mask": np.array([False, True, False])})
    assert env.own_state()["count"] == before + 1


def test_a_reset_starts_new_sums_where_it_resets() -> None:
    wrapped = NormalizeReward(SyncVectorEnv([lambda: gym.make("TwoQueue-v0")] * NUM_ENVS), 0.9)
    wrapped.reset(seed=1)
    for _ in range(20):
        wrapped.step(actions())
    before = wrapped.returns.copy()
    assert before.all()
    wrapped.reset(options={"reset_mask": np.array([False, True, False])})
    assert wrapped.returns.tolist() == [before[0], 0.0, before[2]]
    wrapped.reset()
    assert not wrapped.returns.any()


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("what", ["obs", "reward"])
def test_one_broken_environment_shows_and_spoils_no_other(what: str, value: float) -> None:
    """Neither may an infinity be clipped to 10 and look healthy, nor a nan reach the statistics of all."""
    env_fns = [lambda: gym.make(f"Poison-{what}-{value}-v0")] * NUM_ENVS
    envs = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
    wrapped = NormalizeReward(NormalizeObservation(envs), 0.99)
    wrapped.reset(seed=2)  # environment 1 gets seed 3, the poisoned one
    for _ in range(20):
        obs, rewards, *_ = wrapped.step(actions())
    broken = ~np.isfinite(obs).all(1) if what == "obs" else ~np.isfinite(rewards)
    assert broken.tolist() == [False, True, False]
    healthy = wrapped.env.own_state(), wrapped.statistics.get_state()  # type: ignore[attr-defined]
    for statistics in healthy:
        assert np.isfinite(statistics["mean"]).all()
        assert np.isfinite(statistics["var"]).all()


def test_an_environment_counts_again_after_one_nan_reward() -> None:
    """Also where episodes never end, and the sum of its rewards would be nan for ever."""
    env_fns = [lambda: gym.make("Poison-reward-nan-v0")] * NUM_ENVS
    wrapped = NormalizeReward(SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP), 0.99)
    wrapped.reset(seed=2)
    counts = []
    for _ in range(22):
        wrapped.step(actions() + 1)
        counts.append(round(wrapped.statistics.count))
    assert np.diff(counts)[-4:].tolist() == [NUM_ENVS, NUM_ENVS - 1, NUM_ENVS, NUM_ENVS]  # the 20th is nan
    assert wrapped.returns[1] == pytest.approx(1.99)  # 1 * 0.99 + 1, from zero again


# ---- saved and restored ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_a_restored_stack_continues_bit_for_bit(mode: AutoresetMode) -> None:
    def stack() -> Any:
        env_fns = [lambda: gym.make("KnownValues-v0", max_episode_steps=5)] * NUM_ENVS
        envs = SubprocVecEnv(env_fns, num_workers=1, autoreset_mode=mode)
        return NormalizeReward(NormalizeObservation(envs), 0.9)

    first, second = stack(), stack()
    try:
        first.reset(seed=1)
        for _ in range(7):
            first.step(actions())
        while not np.logical_or(*first.step(actions())[2:4]).any():
            pass  # in NEXT_STEP an environment waits for its reset now
        state = first.get_state()
        expected = [first.step(actions()) for _ in range(15)]
        second.reset(seed=99)
        second.set_state(state)
        for step in expected:
            for one, other in zip(second.step(actions())[:4], step[:4], strict=True):
                np.testing.assert_array_equal(one, other)
    finally:
        first.close()
        second.close()


def test_a_state_from_before_resets_were_left_out_still_loads() -> None:
    wrapped = NormalizeReward(known_values(), 0.9)
    wrapped.reset(seed=1)
    wrapped.step(actions())
    state = wrapped.own_state()
    del state["ended"]
    wrapped.set_own_state(state)
    assert wrapped.own_state()["ended"].tolist() == [False] * NUM_ENVS


def test_states_are_copies() -> None:
    wrapped = NormalizeReward(NormalizeObservation(known_values()), 0.9)
    wrapped.reset(seed=1)
    wrapped.step(actions())
    states = wrapped.own_state(), wrapped.env.own_state()  # type: ignore[attr-defined]
    saved = [{key: np.array(value) for key, value in state.items()} for state in states]
    for _ in range(5):
        wrapped.step(actions())
    np.testing.assert_equal([{k: np.array(v) for k, v in state.items()} for state in states], saved)
    wrapped.set_own_state(states[0])
    wrapped.step(actions())
    np.testing.assert_equal({k: np.array(v) for k, v in states[0].items()}, saved[0])
