"""Cage2VecEnv and Cage2Env as environments: contract, determinism, draws, state, errors, invariants."""

from __future__ import annotations

import copy
import pickle
import re
import shutil
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
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.cage2 import ACTION_NAMES, DRAW_NAMES, HOSTS, NUM_ACTIONS, RED_AGENTS, Cage2Env, Cage2VecEnv, simulator
from envs.cage2.memory import Memory
from envs.cage2.workflow import WorkflowEnv
from tests.conftest import ROOT, assert_plain, assert_same, python

MIXTURE = {"b_line": 0.5, "meander": 0.4, "sleep": 0.1}
USER0, OP_SERVER0 = HOSTS.index("User0"), HOSTS.index("Op_Server0")
SLEEP = np.zeros(2, int)


def random_actions(num_steps: int, num_envs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(NUM_ACTIONS, size=(num_steps, num_envs))


def begun(num_envs: int, *args: Any, seed: int = 0, **kwargs: Any) -> Cage2VecEnv:
    env = Cage2VecEnv(num_envs, *args, **kwargs)
    env.reset(seed=seed)
    return env


def rollout(env: Any, actions: np.ndarray, draws: np.ndarray | None = None) -> list[tuple[np.ndarray, ...]]:
    """Observations, rewards, truncations and draws of every step."""
    steps = []
    for t, action in enumerate(actions):
        obs, rewards, terminations, truncations, _ = env.step(action, None if draws is None else draws[t])
        assert not np.any(terminations)
        steps.append((np.copy(obs), np.copy(rewards), np.copy(truncations), np.copy(env.draws)))
    return steps


def test_names_and_order_of_hosts_and_actions() -> None:
    assert (len(HOSTS), len(ACTION_NAMES)) == (13, 145)
    assert (HOSTS[0], HOSTS[7], HOSTS[12]) == ("Defender", "Op_Server0", "User4")
    expected = {
        0: "Sleep", 1: "Monitor", 2: "Analyse Defender", 15: "Remove Defender", 28: "DecoyApache Defender",
        51: "DecoyFemitter User2", 116: "DecoyTomcat User2", 131: "DecoyVsftpd User4", 144: "Restore User4",
    }  # fmt: skip
    assert {index: ACTION_NAMES[index] for index in expected} == expected


def test_environments_are_registered_and_pass_gymnasiums_checker() -> None:
    check_env(gym.make("CAGE2-v0", red_agent="meander", green=True).unwrapped)
    single = gym.make("CAGE2-v0", max_steps=3)
    single.reset(seed=0)
    assert [single.step(0)[3] for _ in range(3)] == [False, False, True]
    many: Any = gym.make_vec("CAGE2-v0", num_envs=4, vectorization_mode="vector_entry_point", red_agent="sleep")
    assert (type(many), many.num_envs, many.observation_space.shape) == (Cage2VecEnv, 4, (4, 52))
    assert many.single_action_space == gym.spaces.Discrete(145)


@pytest.mark.parametrize(("state_in_info", "max_steps", "num_steps"), [(False, 100, 250), (True, 7, 20)])
def test_a_batch_gives_what_gymnasiums_gives(state_in_info: bool, max_steps: int, num_steps: int) -> None:
    """Environment n has seed + n. All is in Gymnasium's own format; episodes end in different steps."""
    kwargs: dict[str, Any] = {"red_agent": MIXTURE, "green": True, "max_steps": max_steps}
    ours = Cage2VecEnv(6, **kwargs, state_in_info=state_in_info)
    single = [partial(Cage2Env, **kwargs, state_in_info=state_in_info)] * 6
    theirs = SyncVectorEnv(single, autoreset_mode=ours.metadata["autoreset_mode"])

    assert_same(ours.reset(seed=5), theirs.reset(seed=5))
    state = ours.get_state()
    state["steps"] = np.arange(6, dtype=state["steps"].dtype) % 5
    ours.set_state(state)
    for n, env in enumerate(theirs.envs):
        env.unwrapped.set_state({name: values[n : n + 1] for name, values in state.items()})
    ended = []
    for actions in random_actions(num_steps, 6):
        step = ours.step(actions)
        assert_same(step, theirs.step(actions))
        ended.append(int(step[3].sum()))
    assert set(ended) == {0, 1, 2}


def test_arrays_are_fresh_and_the_true_state_is_a_live_read_only_view() -> None:
    env = Cage2VecEnv(2, "b_line")
    first, _ = env.reset(seed=0)
    true_state = env.true_state()
    before = true_state["red_access"].copy()
    assert not np.shares_memory(first, env.step(SLEEP)[0])
    for _ in range(20):
        env.step(SLEEP)
    assert (true_state["red_access"] != before).any()
    with pytest.raises(ValueError, match="read-only"):
        true_state["red_access"][0, 0] = 2


def test_the_true_state_of_a_copy_is_the_copys_own() -> None:
    env = begun(2)
    env.step(SLEEP)
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        for _ in range(2):
            other.step(SLEEP)
        assert (env.true_state()["steps"].tolist(), other.true_state()["steps"].tolist()) == ([1, 1], [3, 3])
        assert np.shares_memory(other.draws, other._states)


def test_true_state_follows_the_game() -> None:
    env = begun(1, "b_line")
    state = env.true_state()
    assert state["red_access"].tolist() == [[0] * 8 + [2] + [0] * 4]
    assert not state["clearable"].any()  # the foothold cannot be ended
    for _ in range(30):
        env.step([0])
    assert (state["steps"][0], state["ot_up"][0], state["clearable"][0, OP_SERVER0]) == (30, False, True)
    sessions = state["red_sessions"][0].sum(axis=1) - (np.arange(13) == USER0)
    np.testing.assert_array_equal(state["clearable"][0], sessions > 0)
    env.step([ACTION_NAMES.index("Restore Op_Server0")])
    assert (state["ot_up"][0], state["clearable"][0, OP_SERVER0]) == (True, False)
    env.step([ACTION_NAMES.index("DecoyApache Defender")])
    assert state["decoys"][0, 0] == 1


def test_single_info_tells_the_true_state_by_name() -> None:
    env = Cage2Env("b_line")
    env.reset(seed=0)
    *_, info = env.step(51)
    assert (info["red_agent"], info["red_action"]) == ("b_line", "DiscoverRemoteSystems User")
    assert info["blue_action"] == "DecoyFemitter User2"
    assert info["decoys"][HOSTS.index("User2")] == 0b10
    assert (info["red_access"].shape, info["red_sessions"].shape) == ((13,), (13, 3))


def test_constructor_seed_and_reset_seed_agree_and_later_resets_go_on() -> None:
    first, second = Cage2VecEnv(2, "meander", seed=4), begun(2, "meander", seed=4)
    first.reset()
    actions = random_actions(30, 2)
    once = rollout(first, actions)
    assert_same(once, rollout(second, actions))
    first.reset(seed=4)
    assert_same(rollout(first, actions), once)
    first.reset()
    assert any((a[3] != b[3]).any() for a, b in zip(rollout(first, actions), once, strict=True))
    first.reset(seed=[None, 9])
    assert first.np_random_seed == (4, 9)
    first.set_state(first.get_state())
    assert first.np_random_seed == (-1, -1)
    assert Cage2VecEnv(2).np_random_seed != Cage2VecEnv(2).np_random_seed
    one, other, restored = (Cage2Env() for _ in range(3))
    one.reset(), other.reset()
    assert one.get_state()["rng"] != other.get_state()["rng"]
    restored.set_state(one.get_state())
    one.reset(), restored.reset()
    assert_same(restored.get_state(), one.get_state())


@pytest.mark.parametrize("red_agent", [*RED_AGENTS, MIXTURE])
def test_recorded_draws_repeat_an_episode_in_batch_and_single(red_agent: Any) -> None:
    """A tape of the draws gives bit-identical steps on other seeds, in a batch and alone, across an autoreset."""
    actions = random_actions(130, 5)
    source = begun(5, red_agent, green=True, seed=1)
    agents = [RED_AGENTS[i] for i in source.true_state()["red_agent"]]
    recorded = rollout(source, actions)
    tape = np.stack([step[3] for step in recorded])
    assert tape.shape == (130, 5, len(DRAW_NAMES))

    other = Cage2VecEnv(5, red_agent, green=True, seed=999)
    other.reset(options={"red_agent": agents})
    assert_same(rollout(other, actions, tape), recorded)
    for n in range(5):
        env = Cage2Env(red_agent, green=True)
        env.reset(seed=77, options={"red_agent": agents[n]})
        for t in range(100):
            obs, reward, _, truncated, _ = env.step(actions[t, n], tape[t, n])
            assert (reward, truncated) == (recorded[t][1][n], t == 99)
            if not truncated:
                np.testing.assert_array_equal(obs, recorded[t][0][n])


@pytest.mark.parametrize("mixture", [MIXTURE, {"b_line": 1 / 3, "meander": 2 / 3, "sleep": 0.0}])
def test_mixture_is_drawn_per_episode_in_its_proportions(mixture: dict[str, float]) -> None:
    env, counts = begun(3000, mixture, max_steps=1), np.zeros(3)
    for _ in range(4):
        counts += np.bincount(env.true_state()["red_agent"], minlength=3)
        env.step(np.zeros(3000, int))
    p = np.array([mixture[name] for name in RED_AGENTS])
    assert (np.abs(counts - 12000 * p) <= 4 * np.sqrt(12000 * p * (1 - p))).all()


def test_a_restored_run_continues_bit_for_bit() -> None:
    """In a batch. (Single ones: test_cage2_workflow.py, in processes.)"""
    actions = random_actions(150, 6)
    env, other = (begun(6, MIXTURE, green=True, seed=seed) for seed in (8, 1234))
    rollout(env, actions[:70])
    saved = env.get_state()
    assert_plain(saved)
    kept, unbroken = copy.deepcopy(saved), rollout(env, actions[70:])
    assert_same(saved, kept)
    other.set_state(saved)
    assert_same(rollout(other, actions[70:]), unbroken)


IMPOSSIBLE = simulator.free_tape(2)
IMPOSSIBLE[1, DRAW_NAMES.index("red_target")] = USER0  # B_line begins with one of User1 to User4
SEED = "seed must be a whole number >= 0"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("make", {"num_envs": 0}, "num_envs must be a whole number of at least 1, but it is 0."),
    ("make", {"num_envs": 2.5}, "num_envs must be a whole number of at least 1, but it is 2.5."),
    ("make", {"max_steps": 0}, "max_steps must be a whole number of at least 1, but it is 0."),
    ("make", {"red_agent": "bline"}, "There is no red agent 'bline'; choose from b_line, meander, sleep."),
    ("make", {"red_agent": {"b_line": 0.5, "meander": 0.6}}, "must be >= 0 and sum to 1, but"),
    ("make", {"red_agent": {"b_line": 1.5, "meander": -0.5}}, "must be >= 0 and sum to 1, but"),
    ("make", {"version": "2.1"}, "There is no version '2.1'; choose from head, leaderboard."),
    ("make", {"wrapper": "Cardiff"}, "There is no wrapper 'Cardiff'; choose from challenge, cardiff."),
    ("make", {"render_mode": "depth"}, "There is no render mode 'depth'; choose from ansi, rgb_array, human, or None."),
    ("make", {"seed": -1}, SEED),
    *(("reset", {"seed": seed}, f"{SEED} or 2 of") for seed in (1.5, -1, [1], [1, 2.5], "abc")),
    ("reset", {"options": {"reset_mask": np.array([True, False])}}, "reset_mask"),
    ("reset", {"options": {"red_agent": "nobody"}}, "but it is 'nobody'"),
    ("reset", {"options": {"red_agent": ["sleep"]}}, "a list of 2 of them"),
    ("step", {"actions": [0, 145]}, "The action of environment 1 is 145, but must be in 0..144."),
    ("step", {"actions": [-1, 0]}, "The action of environment 0 is -1, but must be in 0..144."),
    ("step", {"actions": [0, 0, 0]}, "must be whole numbers of shape (2,), but they are int64 of shape (3,)."),
    ("step", {"actions": [0.0, 1.0]}, "but they are float64 of shape (2,)."),
    ("step", {"actions": 5}, "but they are int64 of shape ()."),
    ("step", {"draws": np.zeros((2, 5), int)}, "shape (2, 5)"),
    ("step", {"draws": np.zeros((2, 6))}, "float64"),
    ("step", {"draws": np.full((2, 6), 13)}, "must lie in -2..12"),
    ("step", {"draws": np.full((2, 6), 3)}, "red agents below 3"),
    ("step", {"draws": IMPOSSIBLE}, "'red_target': 8"),
]


@pytest.mark.parametrize(("method", "kwargs", "message"), REFUSED)
def test_bad_input_gets_a_sentence_and_changes_nothing(method: str, kwargs: dict[str, Any], message: str) -> None:
    env = begun(2, "b_line")
    env.step(SLEEP)
    before = env.get_state()
    calls: dict[str, Callable[..., Any]] = {
        "make": Cage2VecEnv,
        "reset": env.reset,
        "step": lambda actions=SLEEP, draws=None: env.step(np.array(actions), draws),
    }
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        calls[method](**kwargs)
    assert str(error.value).count("\n") == 0
    assert_same(env.get_state(), before)


def test_what_does_not_fit_or_is_outside_an_episode_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("in 0..144, but it is 145")):
        begun_single(max_steps=1).step(145)
    with pytest.raises(ValueError, match="does not fit 3 CAGE2 environments"):
        Cage2VecEnv(3).set_state(begun(2).get_state())
    for wrapper in (partial(Memory, memory=True), WorkflowEnv):
        with pytest.raises(ValueError, match="restart in the last step of an episode"):
            wrapper(SyncVectorEnv([Cage2Env]))  # they read final observations
    single, ended, many, restored = Cage2Env(), begun_single(max_steps=1), Cage2VecEnv(2), Cage2VecEnv(2)
    for env in (single, many):
        with pytest.raises(ValueError, match="render_mode="):
            env.render()
    ended.step(0)
    ended.set_state(ended.get_state())
    restored.set_state(many.get_state())
    single.set_state(Cage2VecEnv(1).get_state())  # of a game that has not begun
    for env, action in ((single, 0), (ended, 0), (many, SLEEP), (restored, SLEEP)):
        with pytest.raises(ResetNeeded):
            env.step(action)  # type: ignore[attr-defined]
    restored.set_state(begun(2).get_state())
    restored.step(SLEEP)


def begun_single(*args: Any, **kwargs: Any) -> Cage2Env:
    env = Cage2Env(*args, **kwargs)
    env.reset(seed=0)
    return env


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
    env = begun(4, **batch, seed=seed)
    state = env.true_state()
    for action in actions:
        obs, rewards, terminations, truncations, infos = env.step(np.full(4, action))
        assert (state["red_sessions"][:, USER0, 2] >= 1).all()
        assert (state["red_sessions"] >= 0).all()
        assert set(np.unique(obs)) <= {0.0, 1.0}
        assert {tuple(activity) for activity in obs.reshape(-1, 4)[:, :2].astype(int).tolist()} <= ENCODABLE
        assert (rewards <= 0).all()
        assert (rewards >= -15.7).all()  # every host but User0 privileged, OT down, Restore
        np.testing.assert_array_equal(rewards, np.round(rewards, 1))
        assert not terminations.any()
        privileged = state["red_sessions"][..., 2] > 0
        any_session = state["red_sessions"].sum(axis=2) > 0
        np.testing.assert_array_equal(state["red_access"], np.where(privileged, 2, any_session))
        assert infos == {} or truncations.any()
        np.testing.assert_array_equal(state["clearable"], state["red_sessions"].sum(axis=2) > (np.arange(13) == USER0))


def test_an_environment_is_small_and_stepping_is_fast() -> None:
    """A floor far below the benchmark's figure (millions a second), to catch a fall back to interpreted code."""
    assert simulator.new_states(1).nbytes < 4096
    env, actions = begun(25, "meander"), random_actions(400, 25)
    rollout(env, actions[:100])
    start = time.process_time()  # other processes do not count
    for action in actions:
        env.step(action)
    assert 400 * 25 / (time.process_time() - start) > 100_000


def test_without_any_writable_cache_folder_it_still_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    subtract = lambda a, b: a - b  # noqa: E731
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(subtract)
    assert simulator._compile(subtract)(5, 3) == 2


@pytest.mark.slow
def test_an_edited_rule_is_compiled_anew(tmp_path: Path) -> None:
    """Numba's own cache looks at one file only; a changed price in another must not be overlooked."""
    shutil.copytree(ROOT / "envs", tmp_path / "envs", ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "envs" / "cage2" / "scenario.py"
    program = "from envs.cage2 import Cage2Env; env = Cage2Env('sleep'); env.reset(seed=0); print(env.step(132)[1])"
    for price, reward in (("RESTORE_COST = 10", -1.0), ("RESTORE_COST = 25", -2.5)):
        table.write_text(table.read_text().replace("RESTORE_COST = 10", price))
        cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
        assert float(python("-c", program, folder=tmp_path, **cache).stdout) == reward


def test_text_rendering_names_what_happened() -> None:
    env = begun_single("b_line", render_mode="ansi")
    assert "reward 0.0, return 0.0\nBlue: Sleep\nRed:  Sleep\n" in env.render()
    total = sum(env.step(action)[1] for action in [51] + [0] * 30)
    text = env.render()
    assert f", return {total:.1f}\n" in text
    assert text.startswith("Step 31 of 100, red agent b_line, reward -1")
    assert "Red:  Impact Op_Server0" in text
    assert re.search(r"User2 +User +\w+ +\w+ +\w+ +Femitter", text)
    assert "The OT service of Op_Server0 is down" in text


def test_pictures_have_one_size_and_show_changes() -> None:
    env = begun(2, "meander", render_mode="rgb_array")
    before: Any = env.render()
    for _ in range(40):
        env.step([0, 28])
    pictures: Any = [*before, *env.render()]
    assert [(picture.shape, picture.dtype) for picture in pictures] == [((440, 760, 3), np.uint8)] * 4
    assert len({picture.tobytes() for picture in pictures}) == 3
