"""Cage2VecEnv and Cage2Env as environments: contract, determinism, draws, state, errors, invariants."""

import copy
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numba
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.cage2 import ACTION_NAMES, DRAW_NAMES, HOSTS, NUM_ACTIONS, RED_AGENTS, Cage2Env, Cage2VecEnv, simulator
from envs.cage2.memory import Memory
from envs.cage2.render import describe
from envs.cage2.workflow import WorkflowEnv
from envs.subproc_vec_env import SubprocVecEnv

MIXTURE = {"b_line": 0.5, "meander": 0.4, "sleep": 0.1}
USER0 = HOSTS.index("User0")


def random_actions(num_steps: int, num_envs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(NUM_ACTIONS, size=(num_steps, num_envs))


def rollout(env: Any, actions: np.ndarray, draws: np.ndarray | None = None) -> list[tuple[np.ndarray, ...]]:
    """Observations, rewards, truncations and draws of every step."""
    steps = []
    for t, action in enumerate(actions):
        obs, rewards, terminations, truncations, _ = env.step(action, None if draws is None else draws[t])
        assert not np.any(terminations)
        steps.append((np.copy(obs), np.copy(rewards), np.copy(truncations), np.copy(env.draws)))
    return steps


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal nested dicts and lists of arrays and values."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple) or (isinstance(ours, np.ndarray) and ours.dtype == object):
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    else:
        np.testing.assert_array_equal(ours, theirs)


# ---------------------------------------------------------------- contract


def test_names_and_order_of_hosts_and_actions() -> None:
    assert len(HOSTS) == 13
    assert len(ACTION_NAMES) == 145
    assert (HOSTS[0], HOSTS[7], HOSTS[12]) == ("Defender", "Op_Server0", "User4")
    expected = {
        0: "Sleep", 1: "Monitor", 2: "Analyse Defender", 15: "Remove Defender", 28: "DecoyApache Defender",
        51: "DecoyFemitter User2", 116: "DecoyTomcat User2", 131: "DecoyVsftpd User4", 144: "Restore User4",
    }  # fmt: skip
    assert {index: ACTION_NAMES[index] for index in expected} == expected


def test_single_environment_passes_gymnasiums_checker() -> None:
    check_env(gym.make("CAGE2-v0", red_agent="meander", green=True).unwrapped)


def test_environments_are_registered() -> None:
    single = gym.make("CAGE2-v0", max_steps=3)
    single.reset(seed=0)
    assert [single.step(0)[3] for _ in range(3)] == [False, False, True]
    many = gym.make_vec("CAGE2-v0", num_envs=4, vectorization_mode="vector_entry_point", red_agent="sleep")
    assert isinstance(many, Cage2VecEnv)
    assert many.num_envs == 4


def test_vector_environment_announces_spaces_and_autoreset() -> None:
    env = Cage2VecEnv(3)
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert env.observation_space.shape == (3, 52)
    assert env.single_action_space == gym.spaces.Discrete(145)
    obs, infos = env.reset(seed=0)
    assert infos == {}
    assert obs.dtype == np.float32
    assert not obs.any()
    obs, rewards, terminations, truncations, infos = env.step(env.action_space.sample())
    assert env.observation_space.contains(obs)
    assert (rewards.dtype, terminations.dtype, truncations.dtype) == (np.float64, np.bool_, np.bool_)
    assert infos == {}


@pytest.mark.parametrize("state_in_info", [False, True])
def test_vector_environment_gives_what_gymnasiums_gives_for_single_ones(state_in_info: bool) -> None:
    """Observations, rewards, final observations and infos, in Gymnasium's own format."""
    kwargs: dict[str, Any] = {"red_agent": MIXTURE, "green": True, "max_steps": 7, "state_in_info": state_in_info}
    ours = Cage2VecEnv(4, **kwargs)
    theirs = SyncVectorEnv([partial(Cage2Env, **kwargs)] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
    obs, infos = ours.reset(seed=5)
    expected, expected_infos = theirs.reset(seed=5)
    for constant in ("hosts", "action_names"):  # names belong to the reset of single environments alone
        for key in (constant, f"_{constant}"):
            expected_infos.pop(key, None)
    np.testing.assert_array_equal(obs, expected)
    assert_same(infos, expected_infos)
    for actions in random_actions(20, 4):
        step, expected_step = ours.step(actions), theirs.step(actions)
        for a, b in zip(step[:4], expected_step[:4], strict=True):
            np.testing.assert_array_equal(a, b)
        expected_infos = expected_step[4]
        for constant in ("hosts", "action_names"):
            for key in (constant, f"_{constant}"):
                expected_infos.pop(key, None)
        assert_same(step[4], expected_infos)


def test_infos_where_some_episodes_end_and_texts_of_many_environments() -> None:
    """`describe`, environment by environment, is what the batch says; ends come at different steps."""
    env = Cage2VecEnv(200, MIXTURE, green=True, max_steps=5, seed=0, state_in_info=True)
    env.reset()
    shifted = env.get_state()
    shifted["steps"] = np.arange(200, dtype=shifted["steps"].dtype) % 5
    env.set_state(shifted)
    for actions in random_actions(6, 200):
        before = env.get_state()
        _, _, _, truncations, infos = env.step(actions)
        assert 0 < truncations.sum() < 200
        for n in range(200):
            expected = describe(env._states[n])
            assert_same({key: infos[key][n] for key in expected}, expected)
            assert all(infos[f"_{key}"][n] and infos["final_info"][f"_{key}"][n] == truncations[n] for key in expected)
            if not truncations[n]:
                assert infos["final_info"]["red_action"][n] is None
                assert not infos["final_info"]["red_sessions"][n].any()
        one = int(np.flatnonzero(truncations)[0])  # its last step once more, without the restart
        single = Cage2Env(MIXTURE, green=True, max_steps=5)
        single.set_state({name: values[one : one + 1] for name, values in before.items()})
        expected = single.step(int(actions[one]))[4]
        assert_same({key: infos["final_info"][key][one] for key in expected}, expected)


def test_subproc_vec_env_holds_25_of_them() -> None:
    actions = random_actions(12, 25)
    ours = Cage2VecEnv(25, "meander", max_steps=10)
    theirs = SubprocVecEnv(
        [partial(Cage2Env, "meander", max_steps=10, state_in_info=False)] * 25,
        num_workers=2,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    try:
        np.testing.assert_array_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
        for action in actions:
            for a, b in zip(ours.step(action)[:4], theirs.step(action)[:4], strict=True):
                np.testing.assert_array_equal(a, b)
    finally:
        theirs.close()


def test_arrays_are_fresh_and_the_true_state_is_a_live_read_only_view() -> None:
    env = Cage2VecEnv(2, "b_line")
    first, _ = env.reset(seed=0)
    true_state = env.true_state()
    second = env.step(np.array([0, 0]))[0]
    assert not np.shares_memory(first, second)
    before = true_state["red_access"].copy()
    for _ in range(20):
        env.step(np.array([0, 0]))
    assert (true_state["red_access"] != before).any()
    with pytest.raises(ValueError, match="read-only"):
        true_state["red_access"][0, 0] = 2


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
def test_the_true_state_of_a_copy_is_the_copys_own(clone: Callable[[Any], Any]) -> None:
    env = Cage2VecEnv(2, seed=0)
    env.reset()
    for _ in range(3):
        env.step([0, 0])
    other = clone(env)
    for _ in range(2):
        other.step([0, 0])
    assert other.true_state()["steps"].tolist() == [5, 5]
    assert env.true_state()["steps"].tolist() == [3, 3]
    assert np.shares_memory(other.draws, other._states)


def test_a_state_saved_before_the_first_reset_still_asks_for_it() -> None:
    env = Cage2VecEnv(2, seed=0)
    env.set_state(env.get_state())
    with pytest.raises(ResetNeeded):
        env.step([0, 0])
    env.reset()
    env.set_state(env.get_state())
    env.step([0, 0])


def test_a_reset_by_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="reset_mask"):
        Cage2VecEnv(2, seed=0).reset(options={"reset_mask": np.array([True, False])})


def test_true_state_follows_the_game() -> None:
    env = Cage2VecEnv(1, "b_line", seed=0)
    env.reset()
    state = env.true_state()
    assert state["red_access"].tolist() == [[0] * 8 + [2] + [0] * 4]
    assert not state["clearable"].any()  # the foothold cannot be ended
    for _ in range(30):
        env.step(np.array([0]))
    attacked = np.flatnonzero(state["clearable"][0])
    assert HOSTS.index("Op_Server0") in attacked
    assert not state["ot_up"][0]
    assert state["steps"].tolist() == [30]
    sessions = state["red_sessions"][0].sum(axis=1) - (np.arange(13) == USER0)
    np.testing.assert_array_equal(state["clearable"][0], sessions > 0)
    env.step(np.array([ACTION_NAMES.index("Restore Op_Server0")]))
    assert not state["clearable"][0, HOSTS.index("Op_Server0")]
    assert state["ot_up"][0]
    env.step(np.array([28]))  # Apache on Defender
    assert state["decoys"][0, 0] == 1


def test_single_info_tells_the_true_state_by_name() -> None:
    env = Cage2Env("b_line")
    _, info = env.reset(seed=0)
    assert info["hosts"] == HOSTS
    assert info["action_names"] == ACTION_NAMES
    *_, info = env.step(51)
    assert info["blue_action"] == "DecoyFemitter User2"
    assert info["red_action"] == "DiscoverRemoteSystems User"
    assert info["red_agent"] == "b_line"
    assert info["decoys"][HOSTS.index("User2")] == 0b10
    assert info["red_access"].shape == (13,)
    assert info["red_sessions"].shape == (13, 3)


# ---------------------------------------------------------------- determinism and draws


def test_environment_n_of_a_batch_is_the_single_environment_with_seed_plus_n() -> None:
    actions = random_actions(250, 3)
    vec = Cage2VecEnv(3, MIXTURE, green=True)
    vec.reset(seed=11)
    batch = rollout(vec, actions)
    for n in range(3):
        env = Cage2Env(MIXTURE, green=True)
        env.reset(seed=11 + n)
        for t in range(250):
            obs, reward, _, truncated, _ = env.step(actions[t, n])
            assert reward == batch[t][1][n]
            if truncated:
                obs, _ = env.reset()
            np.testing.assert_array_equal(obs, batch[t][0][n])


def test_constructor_seed_and_reset_seed_agree_and_later_resets_go_on() -> None:
    first, second = Cage2VecEnv(2, "meander", seed=4), Cage2VecEnv(2, "meander")
    first.reset()
    second.reset(seed=4)
    actions = random_actions(30, 2)
    assert_same(rollout(first, actions), rollout(second, actions))
    first.reset()
    assert any((a[3] != b[3]).any() for a, b in zip(rollout(first, actions), rollout(second, actions), strict=True))


def test_seeds_are_known_and_wrong_ones_refused() -> None:
    vec = Cage2VecEnv(3, "sleep", seed=4)
    vec.reset(seed=[None, 9, None])
    assert vec.np_random_seed == (4, 9, 6)
    for wrong in (1.5, -1, [1, 2], [1, 2.5, 3], "abc"):
        with pytest.raises(ValueError, match="seed must be a whole number >= 0 or 3 of them"):
            vec.reset(seed=wrong)
    vec.set_state(vec.get_state())
    assert vec.np_random_seed == (-1, -1, -1)


@pytest.mark.parametrize("wrapper", [partial(Memory, memory=True), WorkflowEnv])
def test_what_reads_final_observations_needs_environments_that_restart_at_once(wrapper: Any) -> None:
    with pytest.raises(ValueError, match="restart in the last step of an episode"):
        wrapper(SyncVectorEnv([Cage2Env]))


@pytest.mark.parametrize("red_agent", [*RED_AGENTS, MIXTURE])
def test_recorded_draws_repeat_an_episode_in_batch_and_single(red_agent: Any) -> None:
    """A tape of the draws gives bit-identical steps on other seeds, in a batch and alone, across an autoreset."""
    num_envs, num_steps = 5, 130
    actions = random_actions(num_steps, num_envs)
    source = Cage2VecEnv(num_envs, red_agent, green=True, seed=1)
    source.reset()
    agents = [RED_AGENTS[i] for i in source.true_state()["red_agent"]]
    recorded = rollout(source, actions)
    tape = np.stack([step[3] for step in recorded])
    assert tape.shape == (num_steps, num_envs, len(DRAW_NAMES))

    copy = Cage2VecEnv(num_envs, red_agent, green=True, seed=999)
    copy.reset(options={"red_agent": agents})
    assert_same(rollout(copy, actions, tape), recorded)

    for n in range(num_envs):
        env = Cage2Env(red_agent, green=True)
        env.reset(seed=77, options={"red_agent": agents[n]})
        for t in range(100):
            obs, reward, _, truncated, _ = env.step(actions[t, n], tape[t, n])
            assert reward == recorded[t][1][n]
            assert truncated == (t == 99)
            if not truncated:
                np.testing.assert_array_equal(obs, recorded[t][0][n])


def test_an_impossible_injected_draw_is_refused_and_changes_nothing() -> None:
    env = Cage2VecEnv(2, "b_line", seed=0)
    env.reset()
    env.step(np.zeros(2, int))
    before = env.get_state()
    draws = simulator.free_tape(2)
    draws[1, DRAW_NAMES.index("red_target")] = USER0  # B_line begins with one of User1 to User4
    with pytest.raises(ValueError, match=r"In environment 1, .*'red_target': 8"):
        env.step(np.zeros(2, int), draws)
    assert_same(env.get_state(), before)


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        (np.zeros((2, 5), int), r"shape \(2, 6\).*shape \(2, 5\)"),
        (np.zeros((2, 6)), "float64"),
        (np.full((2, 6), 13), "must lie in -2..12"),
        (np.full((2, 6), 3), "red agents below 3"),
    ],
)
def test_a_malformed_tape_is_refused(draws: np.ndarray, message: str) -> None:
    env = Cage2VecEnv(2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        env.step(np.zeros(2, int), draws)


def test_mixture_is_drawn_per_episode_in_its_proportions() -> None:
    env = Cage2VecEnv(3000, MIXTURE, max_steps=1, seed=0)
    env.reset()
    counts = np.zeros(3)
    for _ in range(4):
        counts += np.bincount(env.true_state()["red_agent"], minlength=3)
        env.step(np.zeros(3000, int))
    p = np.array([MIXTURE[name] for name in RED_AGENTS])
    assert (np.abs(counts - 12000 * p) < 4 * np.sqrt(12000 * p * (1 - p))).all()


def test_an_agent_of_zero_probability_never_plays() -> None:
    env = Cage2VecEnv(5000, {"b_line": 1 / 3, "meander": 2 / 3, "sleep": 0.0}, seed=2)
    env.reset()
    assert set(env.true_state()["red_agent"]) == {0, 1}


# ---------------------------------------------------------------- saving and restoring


def test_a_restored_run_continues_bit_for_bit_in_batch_and_single() -> None:
    actions = random_actions(150, 6)
    env = Cage2VecEnv(6, MIXTURE, green=True, seed=8)
    env.reset()
    rollout(env, actions[:70])
    saved = env.get_state()
    unbroken = rollout(env, actions[70:])
    other = Cage2VecEnv(6, MIXTURE, green=True, seed=1234)
    other.set_state(saved)
    assert_same(rollout(other, actions[70:]), unbroken)

    single = Cage2Env("meander")
    single.reset(seed=0)
    for action in actions[:40, 0]:
        single.step(action)
    saved = single.get_state()
    unbroken_steps = [single.step(action)[:4] for action in actions[40:90, 0]]
    copy = Cage2Env("meander")
    copy.set_state(saved)
    for action, expected in zip(actions[40:90, 0], unbroken_steps, strict=True):
        assert_same(list(copy.step(action)[:4]), list(expected))


def test_the_state_is_made_of_plain_arrays_and_is_a_copy() -> None:
    env = Cage2VecEnv(2, seed=0)
    env.reset()
    state = env.get_state()
    assert all(isinstance(value, np.ndarray) and value.dtype.names is None for value in state.values())
    rng = state["rng"].copy()
    rollout(env, random_actions(60, 2))
    np.testing.assert_array_equal(state["rng"], rng)
    assert (env.get_state()["rng"] != rng).any()


def test_a_state_of_another_size_is_refused() -> None:
    small, large = Cage2VecEnv(2), Cage2VecEnv(3)
    small.reset(seed=0)
    with pytest.raises(ValueError, match="does not fit 3 CAGE2 environments"):
        large.set_state(small.get_state())


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "num_envs must be a whole number of at least 1, but it is 0."),
        ({"num_envs": 2.5}, "num_envs must be a whole number of at least 1, but it is 2.5."),
        ({"max_steps": 0}, "max_steps must be a whole number of at least 1, but it is 0."),
        ({"red_agent": "bline"}, "There is no red agent 'bline'; choose from b_line, meander, sleep."),
        ({"red_agent": {"b_line": 0.5, "meander": 0.6}}, "must be >= 0 and sum to 1, but"),
        ({"red_agent": {"b_line": 1.5, "meander": -0.5}}, "must be >= 0 and sum to 1, but"),
        ({"version": "2.1"}, "There is no version '2.1'; choose from head, leaderboard."),
        ({"wrapper": "Cardiff"}, "There is no wrapper 'Cardiff'; choose from challenge, cardiff."),
        ({"render_mode": "human"}, "There is no render mode 'human'; choose from ansi, rgb_array, or None."),
        ({"seed": -1}, "seed must be a whole number >= 0"),
    ],
)
def test_bad_settings_get_one_clear_sentence(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        Cage2VecEnv(**kwargs)
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.array([0, 145, 0]), "The action of environment 1 is 145, but must be in 0..144."),
        (np.array([0, 0, -1]), "The action of environment 2 is -1, but must be in 0..144."),
        (np.array([0, 0]), "actions must be whole numbers of shape (3,), but they are int64 of shape (2,)."),
        (np.array([0.0, 1.0, 2.0]), "but they are float64 of shape (3,)."),
        (5, "but they are int64 of shape ()."),
    ],
)
def test_bad_actions_get_one_clear_sentence(actions: Any, message: str) -> None:
    env = Cage2VecEnv(3)
    env.reset(seed=0)
    before = env.get_state()
    with pytest.raises(ValueError, match=re.escape(message)):
        env.step(actions)
    assert_same(env.get_state(), before)


def test_single_environment_refuses_bad_actions_and_steps_past_the_end() -> None:
    env = Cage2Env(max_steps=1)
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=re.escape("in 0..144, but it is 145")):
        env.step(145)
    env.step(0)
    with pytest.raises(ResetNeeded):
        env.step(0)


def test_vector_environment_asks_for_reset_and_refuses_unknown_agents_there() -> None:
    env = Cage2VecEnv(2)
    with pytest.raises(ResetNeeded):
        env.step(np.zeros(2, int))
    with pytest.raises(ValueError, match="but it is 'nobody'"):
        env.reset(options={"red_agent": "nobody"})
    with pytest.raises(ValueError, match="a list of 2 of them"):
        env.reset(options={"red_agent": ["sleep"]})
    with pytest.raises(ValueError, match="seed must be"):
        env.reset(seed=[1, 2, 3])


# ---------------------------------------------------------------- invariants


BATCHES = st.fixed_dictionaries(
    {
        "red_agent": st.sampled_from([*RED_AGENTS, MIXTURE]),
        "green": st.booleans(),
        "version": st.sampled_from(["head", "leaderboard"]),
        "wrapper": st.sampled_from(["challenge", "cardiff"]),
    }
)
# Uniform actions rarely meet red, so most are drawn from those that do something to the hosts on red's way.
ACTIONS = st.one_of(st.integers(0, 144), st.sampled_from([133, 134, 135, 139, 140, 141, 18, 22, 23, 24, 92, 93]))
ENCODABLE = {(0, 0), (1, 0), (1, 1)}


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.integers(0, 2**32), st.lists(ACTIONS, min_size=1, max_size=120))
def test_no_sequence_of_actions_breaks_the_invariants(batch: dict[str, Any], seed: int, actions: list[int]) -> None:
    env = Cage2VecEnv(4, **batch, seed=seed)
    env.reset()
    state = env.true_state()
    for action in actions:
        obs, rewards, terminations, truncations, infos = env.step(np.full(4, action))
        assert (state["red_sessions"][:, USER0, 2] >= 1).all()
        assert (state["red_sessions"] >= 0).all()
        assert set(np.unique(obs)) <= {0.0, 1.0}
        activity = obs.reshape(-1, 4)[:, :2]
        assert {tuple(bits) for bits in activity.astype(int).tolist()} <= ENCODABLE
        assert (rewards <= 0).all()
        assert (rewards >= -15.7).all()  # every host but User0 privileged, OT down, Restore
        np.testing.assert_array_equal(rewards, np.round(rewards, 1))
        assert not terminations.any()
        privileged = state["red_sessions"][..., 2] > 0
        any_session = state["red_sessions"].sum(axis=2) > 0
        np.testing.assert_array_equal(state["red_access"], np.where(privileged, 2, any_session))
        assert infos == {} or truncations.any()


@settings(max_examples=25, deadline=None)
@given(BATCHES, st.integers(0, 2**32), st.permutations(range(6)))
def test_equal_seeds_repeat_and_permuted_environments_give_permuted_results(
    batch: dict[str, Any], seed: int, order: list[int]
) -> None:
    actions = random_actions(40, 6, seed)
    runs = []
    for permutation in (np.arange(6), np.arange(6), np.array(order)):
        env = Cage2VecEnv(6, **batch)
        env.reset(seed=[seed + int(n) for n in permutation])
        runs.append(rollout(env, actions[:, permutation]))
    assert_same(runs[0], runs[1])
    for straight, permuted in zip(runs[0], runs[2], strict=True):
        for a, b in zip(straight, permuted, strict=True):
            np.testing.assert_array_equal(a[order], b)


# ---------------------------------------------------------------- size, speed, pictures


def test_an_environment_takes_less_than_4_kib() -> None:
    assert simulator.new_states(1).nbytes < 4096


def test_stepping_is_fast() -> None:
    """A floor far below the benchmark's figure (millions a second), to catch a fall back to interpreted code."""
    env = Cage2VecEnv(25, "meander", seed=0)
    env.reset()
    actions = random_actions(400, 25)
    rollout(env, actions[:100])
    start = time.process_time()  # other processes do not count
    for action in actions:
        env.step(action)
    assert 400 * 25 / (time.process_time() - start) > 100_000


def abs_difference(a: int, b: int) -> int:
    return abs(a - b)


def test_without_any_writable_cache_folder_it_still_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(abs_difference)
    assert simulator._compile(abs_difference)(3, 5) == 2


@pytest.mark.slow
def test_an_edited_rule_is_compiled_anew(tmp_path: Path) -> None:
    """Numba's own cache looks at one file only; a changed price in another must not be overlooked."""
    root = Path(__file__).parents[1]
    shutil.copytree(root / "envs", tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        "import numpy as np; from envs.cage2 import Cage2VecEnv; env = Cage2VecEnv(1, 'sleep'); env.reset(seed=0); "
        "print(env.step(np.array([132]))[1][0])"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    rewards = []
    for price in ("RESTORE_COST = 10", "RESTORE_COST = 25"):
        table = tmp_path / "envs" / "cage2" / "scenario.py"
        table.write_text(table.read_text().replace("RESTORE_COST = 10", price))
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        rewards.append(float(done.stdout))
    assert rewards == [-1.0, -2.5]


def test_text_rendering_names_what_happened() -> None:
    env = Cage2Env("b_line", render_mode="ansi")
    env.reset(seed=0)
    assert "reward 0.0, return 0.0" in env.render()
    env.step(51)
    for _ in range(30):
        env.step(0)
    text = env.render()
    assert text.startswith("Step 31 of 100, red agent b_line, reward -1")
    assert "Red:  Impact Op_Server0" in text
    assert re.search(r"User2 +User +\w+ +\w+ +\w+ +Femitter", text)
    assert "The OT service of Op_Server0 is down" in text


def test_pictures_have_one_size_and_show_changes() -> None:
    env = Cage2VecEnv(2, "meander", render_mode="rgb_array", seed=0)
    env.reset()
    before = env.render()
    assert before is not None
    assert len(before) == 2
    assert before[0].shape == (440, 760, 3)
    assert before[0].dtype == np.uint8
    for _ in range(40):
        env.step(np.array([0, 28]))
    after = env.render()
    assert after is not None
    assert all(picture.shape == (440, 760, 3) and (picture != before[0]).any() for picture in after)
    assert (after[0] != after[1]).any()


def test_rendering_without_a_mode_says_what_to_do() -> None:
    for env in (Cage2Env(), Cage2VecEnv(1)):
        with pytest.raises(ValueError, match="render_mode="):
            env.render()
