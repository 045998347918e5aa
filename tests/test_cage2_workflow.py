"""Workflows: what counts as keeping to an order, what it earns, when training stops, and the search for the best."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from envs.cage2 import ACTION_NAMES, HOSTS, search, workflow
from tests.conftest import assert_same, columns, command_line, fork, spy, tiny_args, tiny_flags, wait
from tests.test_resume import die_at

USER_FIRST = "user,defender,enterprise,op_server,op_host"
USER_LAST = "defender,enterprise,op_server,op_host,user"


def type_of(host: str) -> str:
    return host.lower().rstrip("01234")


def test_there_are_120_orders_of_the_five_types_and_no_others() -> None:
    assert len(set(workflow.ORDERS)) == 120
    assert [workflow.UNIT_TYPES[unit] for unit in workflow.TYPE_OF_HOST] == [type_of(host) for host in HOSTS]
    for order, ranks, one_hot in zip(workflow.ORDERS, workflow.RANKS, workflow.ONE_HOTS, strict=True):
        assert [order[rank] for rank in ranks] == list(workflow.UNIT_TYPES)
        shown = one_hot.reshape(5, 5)  # row: place, column: type
        assert [workflow.UNIT_TYPES[unit] for unit in shown.argmax(1)] == list(order)
        assert shown.sum() == 5
    assert workflow.ORDERS[workflow.parse_workflow(f" {USER_FIRST}")] == tuple(USER_FIRST.split(","))
    wrong = {
        "defender,enterprise,op_server,op_host,users": "'users'.*did you mean user",
        "defender,enterprise,op_server,op_host": "once",
        "user,user,defender,enterprise,op_host": "once",
        "": "''",
    }
    for text, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            workflow.parse_workflow(text)


# ---- compliance and the early stop ----------------------------------------------------------------------------------
def plain_reading(action: int, clearable: np.ndarray, order: int) -> list[str]:
    """The verdicts on an action where these hosts can be cleaned, by the words of the definition."""
    verb, _, host = ACTION_NAMES[action].partition(" ")
    types = workflow.ORDERS[order]
    # red's sessions on User0 cost nothing: they are nothing to repair
    sick = {type_of(name) for name, bad in zip(HOSTS, clearable, strict=True) if bad and name != "User0"}
    if verb not in ("Remove", "Restore"):
        return []
    if not sick:
        return ["needless"]
    compliant = not any(types.index(other) < types.index(type_of(host)) for other in sick)
    strict = type_of(host) == min(sick, key=types.index)
    return ["compliant"] * compliant + ["strict"] * strict + ["judged"]


def check(module: Any = workflow) -> None:
    rng = np.random.default_rng(0)
    actions, clearable, orders = rng.integers(0, 145, 2000), rng.random((2000, 13)) < 0.15, rng.integers(0, 120, 2000)
    rows = module.judge_fixes(actions, clearable, module.RANKS[orders])
    for row, *case in zip(rows, actions, clearable, orders, strict=True):
        assert [name for name, holds in zip(workflow.VERDICTS, row, strict=True) if holds] == plain_reading(*case)
    # 3 of 4 judged fixes comply, 1 of 1 does, and an episode of needless ones alone says nothing
    metrics = module.fix_metrics(np.array([[3, 2, 4, 0], [0, 0, 0, 6], [1, 1, 1, 0]]))
    expected = {"compliance": 0.875, "compliance_micro": 0.8, "strict_compliance": 0.75, "needless_fixes": 2.0}
    assert metrics == pytest.approx(expected)
    assert all(math.isnan(value) for value in module.fix_metrics(np.zeros((0, 4), int)).values())
    assert float(module.compliance_of(np.array([2, 2, 100, 5]))) == 0.02  # a sweep of all types, and then spam


PLANTED = {
    "User0 counts": ('UNITS[HOSTS.index("User0")] = 0', "pass"),
    "the order is turned round": (".min(axis=1)", ".max(axis=1)"),
    "equal rank is a violation": ("(rank <= highest)", "(rank < highest)"),
    "lower types count": ("judged & (rank <= highest)", "judged & (rank >= highest)"),
    "needless fixes are judged": ("(fixed >= 0) & (highest < NUM_TYPES)", "(fixed >= 0)"),
    "analysing is fixing": ('startswith(("Remove ",', 'startswith(("Analyse ", "Remove ",'),
    "removing is no fix": ('startswith(("Remove ", "Restore "))', 'startswith("Restore ")'),
    "nothing judged is half": ("np.maximum(judged, 1), np.nan)", "np.maximum(judged, 1), 0.5)"),
    "needless fixes lower compliance": (
        "counts[..., verdict] / np.maximum(judged, 1)",
        "counts[..., verdict] / np.maximum(judged + counts[..., NEEDLESS], 1)",
    ),
}


def test_fixes_are_judged_as_defined_and_counted_as_by_hand() -> None:
    check()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    source = Path(str(workflow.__file__)).read_text()
    assert source.count(PLANTED[name][0]) == 1
    mutant = ModuleType("envs.cage2.mutant")
    mutant.__package__ = "envs.cage2"
    exec(compile(source.replace(*PLANTED[name]), "mutant", "exec"), mutant.__dict__)
    with pytest.raises(AssertionError):
        check(mutant)


def counts(compliant: float, judged: int = 100) -> list[int]:
    return [round(compliant * judged), 0, judged, 0]


def stops(*environments: list[list[int]], threshold: float = 0.95, fewest: int = 10) -> bool:
    """Whether training stops, by each environment's last five of at least ten episodes; the first may have fewer."""
    episodes = np.array([fewest] + [10] * (len(environments) - 1))
    return workflow.is_compliant(np.array(environments), episodes, threshold, 10)


def test_the_stop_on_the_documents_example_of_25_environments_and_at_its_edges() -> None:
    """The four environments it shows have 94.75 % on average, not 95.2: the other 21 must carry the stop."""
    shown = [[counts(compliance)] * 5 for compliance in (0.92, 0.96, 0.94, 0.97)]
    others, perfect = [[counts(0.95)] * 5] * 20, [counts(1.0)] * 5
    assert not stops(*shown)
    assert stops(*shown, *others, perfect)
    assert not stops(*shown, *others, others[0])
    assert not stops(*shown, *others, perfect, fewest=9)
    # The stop looks at the last episodes of each environment, if there are enough fixes
    nothing, once = [0] * 4, counts(1.0, judged=1)
    assert not stops([once] * 5)  # 5 fixes in all
    assert stops([once] * 5, [once] * 5)  # 10
    # an episode without a judged fix is left out, and so is an environment without any
    assert stops([counts(1.0), *[nothing] * 4], [nothing] * 5)
    assert not stops([nothing] * 5, threshold=0.0)
    # environments count alike, however many fixes they made: (1 + 0.5) / 2
    two = [counts(1.0, 1000)] * 5, [counts(1.0, 9), counts(0.0, 2), *[nothing] * 3]
    assert not stops(*two, threshold=0.76)
    assert stops(*two, threshold=0.75)


# ---- the wrapper ----------------------------------------------------------------------------------------------------
def games(cage2: ModuleType, num_envs: int, seed: int = 0, **settings: Any) -> Any:
    vec_env = cage2.make_envs(cage2.Args(**settings), num_envs)
    vec_env.reset(seed=seed)
    return vec_env


def test_alignment_telescopes_to_lambda_times_the_last_compliance(cage2: ModuleType) -> None:
    """Here 7 times an episode's share of compliant fixes, -1.4 where none was judged; the last five, newest first."""
    settings = {"workflow": "any", "red_agent": "b_line", "max_steps": 12, "alignment": 7.0}
    vec_env, rng = games(cage2, 16, **settings), np.random.default_rng(0)
    episodes: list[np.ndarray] = []
    for _ in range(7):
        earned = np.zeros(16)
        for _ in range(12):
            actions = np.where(rng.random(16) < 0.2, rng.integers(12, 36, 16), 0)  # a fix, or Sleep
            _, _, _, truncated, infos = vec_env.step(actions)
            earned += infos["alignment"]
        assert truncated.all()
        compliant, _, judged, _ = infos["fixes"].T
        np.testing.assert_allclose(earned, np.where(judged, 7 * compliant / np.maximum(judged, 1), -1.4), atol=1e-9)
        episodes.append(infos["fixes"])
    state, vec_env.recent = vec_env.get_state(), None
    vec_env.set_state(state)
    np.testing.assert_array_equal(vec_env.recent, np.stack(episodes[:1:-1], axis=1))
    assert {0, 1} < set(np.array(episodes)[..., workflow.JUDGED].flat)
    assert 0 < np.sum(episodes, (0, 1))[workflow.COMPLIANT] < np.sum(episodes, (0, 1))[workflow.JUDGED]
    vec_env.reset()
    assert vec_env.recent.any()
    vec_env.reset(seed=0)
    assert not vec_env.recent.any()
    assert not vec_env.episodes.any()


def test_the_final_observation_shows_the_order_of_the_episode_that_ended(cage2: ModuleType) -> None:
    vec_env = cage2.make_envs(cage2.Args(max_steps=7, workflow="any"), 5)
    obs, _ = vec_env.reset(seed=3)
    assert obs.shape == (5, 211) == vec_env.observation_space.shape
    changed = 0
    for _ in range(3):
        before = obs[:, -25:]
        for _ in range(7):
            np.testing.assert_array_equal(obs[:, -25:], before)
            np.testing.assert_array_equal(before, workflow.ONE_HOTS[vec_env.orders])
            obs, _, _, truncated, infos = vec_env.step(np.zeros(5, int))
        assert truncated.all()
        np.testing.assert_array_equal(np.stack(infos["final_obs"])[:, -25:], before)
        changed += int((obs[:, -25:] != before).any(1).sum())
    assert changed > 10
    orders = vec_env.orders.copy()
    vec_env.reset()  # before their end: they begin anew, with their order
    np.testing.assert_array_equal(vec_env.orders, orders)


def test_orders_depend_on_the_environments_seed_and_episode_alone(cage2: ModuleType) -> None:
    def orders(vec_env: Any) -> np.ndarray:
        seen = []
        for _ in range(8):
            seen.append(vec_env.orders.copy())
            vec_env.step(np.zeros(vec_env.num_envs, int))
        return np.array(seen)

    last_two, other, all_four = (
        games(cage2, number, seed, max_steps=1, workflow="any") for number, seed in ((2, 12), (4, 1), (4, 10))
    )
    state, four = all_four.get_state(), orders(all_four)
    np.testing.assert_array_equal(four[:, 2:], orders(last_two))
    for _ in range(2):
        other.set_state(state)
        np.testing.assert_array_equal(orders(other), four)
    assert len(np.unique(four)) > 20
    one, another = (cage2.make_envs(cage2.Args(workflow="any"), 4).seeds for _ in range(2))
    assert (one != another).any()
    seeds = other.seeds.tolist()
    other.reset(seed=[7, None, None, None])
    assert other.seeds.tolist() == [7, *seeds[1:]]
    assert cage2.Args(workflow=USER_FIRST.replace(",", ", ")).workflow == USER_FIRST
    assert (games(cage2, 4, workflow=USER_FIRST).orders == workflow.parse_workflow(USER_FIRST)).all()


def test_the_state_before_the_action_is_judged(cage2: ModuleType) -> None:
    """Restoring the only compromised host leaves nothing compromised, and complies."""
    vec_env = games(cage2, 64, workflow=USER_FIRST, red_agent="b_line", actions="full")
    others = np.array(HOSTS) != "User0"
    for _ in range(3):
        vec_env.step(np.zeros(64, int))
    before = vec_env.unwrapped.true_state()["clearable"] & others
    infos = vec_env.step(np.array([ACTION_NAMES.index(f"Restore {HOSTS[row.argmax()]}") for row in before]))[4]
    cured = (before.sum(1) == 1) & ~(vec_env.unwrapped.true_state()["clearable"] & others).any(1)
    assert cured.sum() > 10
    np.testing.assert_array_equal(infos["fixes"][cured], [[1, 1, 1, 0]] * cured.sum())


def test_a_copy_judges_its_own_games(cage2: ModuleType) -> None:
    """A deep copy plays on alike, and is not judged by a state that the original once was in."""
    original = games(cage2, 8, workflow="any", red_agent="b_line")
    rng = np.random.default_rng(0)
    for actions in rng.integers(48, size=(10, 8)):
        original.step(actions)
    copied = copy.deepcopy(original)
    for actions in rng.integers(48, size=(60, 8)):
        assert_same(original.step(actions)[4]["fixes"], copied.step(actions)[4]["fixes"])
    assert original.counts[:, workflow.JUDGED].sum() > 0
    with pytest.raises(ValueError, match="reset_mask"):
        original.reset(options={"reset_mask": np.ones(8, bool)})
    wrong = [([0] * 7 + [48], r"environment 7 is 48, .* 0\.\.47"), ([-1] * 8, r"environment 0 is -1, .* 0\.\.47"),
             ([0] * 7, r"shape \(8,\), .* \(7,\)"), ([0.0] * 8, "whole numbers .* float64")]  # fmt: skip
    for actions, message in wrong:
        with pytest.raises(ValueError, match=message):
            original.step(actions)


def test_games_in_processes_are_judged_alike(cage2: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They tell the true state in their infos; through the end of an episode, and of a saved state."""
    settings: dict[str, Any] = {"num_workers": 1, "workflow": "any", "max_steps": 30, "red_agent": "b_line"}
    settings["on_worker_failure"], make_env = "restart", cage2.make_env
    both, rng, total = [games(cage2, 3, 4, **settings)], np.random.default_rng(0), np.zeros(4, int)
    monkeypatch.setattr(cage2, "make_env", lambda *args: gym.Wrapper(make_env(*args)))
    both.append(games(cage2, 3, 4, **settings))
    try:
        for t in range(70):
            actions = rng.integers(12, 36, 3)  # fixes
            one, other = (vec_env.step(actions) for vec_env in both)
            assert_same(one[:4], other[:4])
            for key in ("alignment", "fixes"):
                np.testing.assert_array_equal(one[4][key], other[4][key])
            total += one[4]["fixes"].sum(0)
            if t == 35:
                for vec_env in both:
                    state = vec_env.get_state()
                    for _ in range(20):
                        vec_env.step(np.zeros(3, int))
                    vec_env.set_state(state)
            if t == 50:
                both[0].reset(), both[1].reset()
        assert (total > 0).all()
        for action in (20, 0):  # an episode that is lost with its worker earns nothing for a fix, nor for having none
            recent, episodes = both[1].recent.copy(), both[1].episodes + 1
            both[1].unwrapped._pool.workers[0].process.kill()
            infos = both[1].step(np.full(3, action))[4]
            assert infos["worker_restarted"].all()
            assert not infos["alignment"].any()
            np.testing.assert_array_equal(both[1].recent, recent)
            np.testing.assert_array_equal(both[1].episodes, episodes)
    finally:
        both[1].close()
    monkeypatch.setattr(cage2, "make_env", lambda *args: gym.Wrapper(make_env(cage2.Args(), *args[1:])))
    with pytest.raises(ValueError, match="state_in_info=True"):
        games(cage2, 3, 4, **settings)


# ---- the policy and its training ------------------------------------------------------------------------------------
def test_operational_hosts_can_be_repaired_with_workflows_and_else_nothing_changes(cage2: ModuleType) -> None:
    """Else an order with op_host first could not be kept: the nine reduced hosts have none of them."""
    names = {ACTION_NAMES[a] for a in games(cage2, 48, workflow="any").env.game_actions(np.arange(48))}
    for host in set(HOSTS) - {"User0"}:
        assert {f"Remove {host}", f"Restore {host}", f"Analyse {host}"} <= names
    assert not any("User0" in name for name in names)
    plain = games(cage2, 2)
    assert (type(plain).__name__, plain.single_observation_space.shape) == ("Memory", (186,))
    assert plain.single_action_space.n == 36


def test_alignment_is_learnt_not_reported(cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against Sleep nothing is ever compromised: an episode of 20 steps earns -6, reported only as learnt from."""
    calls, judged = spy(monkeypatch, cage2, "compute_gae"), spy(monkeypatch, cage2, "fix_metrics")
    cage2.train(tiny_args(cage2, tmp_path / "run", workflow=USER_LAST, red_agent="sleep", reward_scale=0.5))
    assert [len(arguments[0]) for arguments, _ in judged] == [4, 4, 4]  # the episodes that have ended in each rollout
    progress = {name: np.array(column) for name, column in columns(tmp_path / "run").items()}
    restores = -progress["rollout/episodic_return"]  # an episode
    assert (restores > 0).all()
    assert (restores < 20).all()
    earned = float(calls[0][0][0].sum(0).mean())  # the first rollout: an episode and 5 more steps
    assert earned == pytest.approx(0.5 * (-6 - restores[0] * 25 / 20), abs=0.75)
    raw = float(calls[0][0][0].mean()) / 0.5 + 4 * 6 / 100  # a mean over 100 steps, in which four episodes ended
    assert progress["rollout/mean_reward"][0] == pytest.approx(raw, abs=1e-5)
    assert np.isnan(progress["rollout/compliance"]).all()


THREE_EPISODES = {"compliance_threshold": 0.0, "min_episodes": 3, "num_envs": 8, "total_timesteps": 2000}
THIRD = {"eval_every": 100, "total_timesteps": 1000}
# compliance in the evaluation, a stand-in for `is_compliant`, arguments, and after how many steps training stops
STOPS: dict[str, tuple[float, Any, dict[str, Any], range | None]] = {
    # which any policy meets: in the third rollout of 25 steps, or later, but not before
    "a threshold of 0": (0.4, None, THREE_EPISODES, range(600, 2000)),
    # by the threshold itself; it is the best, whatever the returns of those before it
    "confirmed": (0.5, lambda recent, episodes, *others: episodes.min() >= 3, THIRD, range(300, 1000)),
    # sampled actions comply, those of the evaluation do not
    "unconfirmed": (0.4, lambda *args: True, {}, None),
}


@pytest.mark.parametrize("name", STOPS)
def test_compliance_ends_a_run(cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    evaluated, sampled_comply, values, stop = STOPS[name]
    score, falling = cage2.score, itertools.count(0, -1)
    monkeypatch.setattr(cage2, "score", lambda *a: score(*a) | {"compliance": evaluated, "score": next(falling)})
    monkeypatch.setattr(cage2, "is_compliant", sampled_comply or cage2.is_compliant)
    settings = {"workflow": USER_LAST, "red_agent": "b_line", "compliance_threshold": 0.5, "min_episodes": 1} | values
    result = cage2.train(tiny_args(cage2, tmp_path, **settings))
    assert result["compliant"] == (stop is not None)
    if stop is None:
        assert result["global_step"] == 300  # all of them
    else:
        assert result["global_step"] in stop
        assert cage2.load(tmp_path / "best.pt")["run"]["global_step"] == result["global_step"]
        assert cage2.train(tiny_args(cage2, tmp_path, resume=True, **settings)) == result
        other = {"min_episodes": 999} if name == "confirmed" else {"compliance_threshold": 0.95}
        more = tiny_args(cage2, tmp_path, resume=True, **settings | other)
        assert cage2.train(more)["global_step"] > result["global_step"]


@pytest.mark.parametrize(("loss", "error", "compliant"), [(0.9, 1, True), (1.1, 1, False), (0, math.nan, True)])
def test_a_return_below_the_first_evaluations_by_more_than_its_error_stops_nothing(
    cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float, error: float, compliant: bool
) -> None:
    score, returns = cage2.score, itertools.chain([-10.0], itertools.repeat(-10.0 - loss))
    judged = {"compliance": 0.9, "standard_error": error}
    monkeypatch.setattr(cage2, "score", lambda *a, **k: score(*a, **k) | judged | {"mean_return": next(returns)})
    monkeypatch.setattr(cage2, "is_compliant", lambda *args: True)
    settings = {"workflow": USER_LAST, "red_agent": "b_line", "compliance_threshold": 0.5, "min_episodes": 1}
    assert cage2.train(tiny_args(cage2, tmp_path, **settings))["compliant"] == compliant


# ---- which order next: envs/cage2/search.py -------------------------------------------------------------------------
def test_distances_are_kendalls_and_the_mallows_kernel_positive_definite_unlike_the_documents() -> None:
    for a, b in [(0, 0), (0, 1), (0, 119), (7, 93)]:
        one, other = workflow.ORDERS[a], workflow.ORDERS[b]
        pairs = [(x, y) for i, x in enumerate(one) for y in one[i + 1 :]]
        assert search.DISCORDANT[a, b] == sum(other.index(x) > other.index(y) for x, y in pairs)
    assert search.DISCORDANT.max() == 10
    for scale in (0.05, 0.3, 1.0):
        kernel = search.mallows_kernel(scale)
        assert np.linalg.eigvalsh(kernel).min() > 1e-5
        squared = ((search.PAIR_SIGNS[:, None] - search.PAIR_SIGNS[None]) ** 2).sum(-1)
        np.testing.assert_allclose(kernel, np.exp(-scale / 4 * squared))  # an RBF on the pairwise features
    of_document = np.exp(-((search.DISCORDANT / 10) ** 2) / (2 * 0.5**2))  # an RBF on the normalised distance
    assert np.linalg.eigvalsh(of_document).min() == pytest.approx(-0.69, abs=0.01)


def test_the_posterior_of_two_observations_in_closed_form() -> None:
    kernel = search.mallows_kernel(0.3)
    # the inverse of [[1 + s, k], [k, 1 + t]]
    k, s, t = kernel[4, 50], 0.1, 0.4
    inverse = np.array([[1 + t, -k], [-k, 1 + s]]) / ((1 + s) * (1 + t) - k**2)
    mean, std = search.gp_posterior(kernel, [4, 50], np.array([2.0, -1.0]), np.array([s, t]))
    cross = kernel[:, [4, 50]]
    np.testing.assert_allclose(mean, cross @ inverse @ [2.0, -1.0])
    np.testing.assert_allclose(std**2, 1 - np.einsum("ni,ij,nj->n", cross, inverse, cross))
    # and in units of the return
    mean, std = search.posterior_returns([0, 60, 119], [-14.0, -20.0, -17.0], [0.1] * 3, 0.2)
    np.testing.assert_allclose(mean[[0, 60, 119]], [-14, -20, -17], atol=0.05)
    np.testing.assert_allclose(std[[0, 60, 119]], 0.1, rtol=0.05)
    assert std.max() > 10 * std[0]
    tenth = search.posterior_returns([0, 60, 119], [-1.4, -2.0, -1.7], [0.01] * 3, 0.2)
    np.testing.assert_allclose(tenth, (mean / 10, std / 10))


def tries(landscape: np.ndarray, number: int, seed: int = 1) -> list[int]:
    """The orders that a search tries if `landscape` (120,) are the returns."""
    tried: list[int] = []
    for _ in range(number):
        tried.append(search.next_order(tried, landscape[tried].tolist(), [0.1] * len(tried), seed=seed))
    return tried


def test_the_first_orders_are_drawn_by_seed_and_none_is_tried_twice() -> None:
    landscape = np.random.default_rng(0).normal(size=120)
    runs = [tries(landscape, 20, seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0][:3] != runs[2][:3]
    assert all(len(set(run)) == 20 for run in runs)
    assert sorted(tries(landscape, 120)) == list(range(120))


def test_beta_trades_the_mean_for_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two good orders and a bad one no beta stays near the good ones, a large one leaves. Srinivas' schedule."""
    tried, seen = [0, 119, 1], ([1.0, -1.0, 0.9], [0.1] * 3)
    near, far = (search.next_order(tried, *seen, beta=beta) for beta in (0.0, 1e6))
    assert search.DISCORDANT[near, 0] == 1
    assert search.DISCORDANT[far, tried].min() > search.DISCORDANT[near, tried].min() + 1
    assert search.next_order(tried, *seen, beta=None) not in tried
    assert [math.sqrt(search.srinivas_beta(t)) for t in (1, 20)] == pytest.approx([3.9, 5.2], abs=0.05)
    monkeypatch.setattr(search, "srinivas_beta", lambda t: 20.0 if t == 4 else 0.0)
    schedule, fifth, whole = (search.next_order(tried, *seen, beta=beta) for beta in (None, 4.0, 20.0))
    assert schedule == fifth != whole  # a fifth of it, at the fourth order
    mean, std = np.eye(120)[5] * 5, np.eye(120)[6]
    with monkeypatch.context() as patch:
        patch.setattr(search, "posterior_returns", lambda *args: (mean, std))
        assert [search.next_order(tried, *seen, beta=beta) for beta in (9.0, 36.0)] == [5, 6]  # 3 and 6 deviations
    assert search.next_order([0], [-14.0], [0.1], num_random=1) == 119  # one return has no deviation


def test_gp_ucb_halves_the_regret_of_random_orders() -> None:
    """On 30 landscapes that are sums over the ten pairs of types, and some noise."""
    rng = np.random.default_rng(0)
    regrets: dict[str, list[float]] = {"gp": [], "random": []}
    for seed in range(30):
        landscape = search.PAIR_SIGNS @ rng.normal(size=10) + 0.3 * rng.normal(size=120)
        regrets["gp"].append(landscape.max() - landscape[tries(landscape, 20, seed)].max())
        regrets["random"].append(landscape.max() - landscape[rng.permutation(120)[:20]].max())
    assert np.mean(regrets["gp"]) < np.mean(regrets["random"]) / 2


# ---- the search of the script ---------------------------------------------------------------------------------------
def run_search(cage2: ModuleType, folder: Path, n_workflows: int = 3, **values: Any) -> list[dict[str, Any]]:
    """The history of a search of orders with tiny trainings."""
    options = cage2.SearchArgs(n_workflows=n_workflows, n_start=2, judge_episodes=4, shared_timesteps=2 * 256 * 25)
    values = {"workflow": "any", "red_agent": "meander", "save_every": 100, "num_minibatches": 1} | values
    return cage2.search(options, tiny_args(cage2, folder, **values))


def test_a_search_is_made_of_its_options_and_of_the_flags_of_training(
    cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, judged, chosen, loaded = (spy(monkeypatch, cage2, x) for x in ("train", "score", "next_order", "load"))
    values = {"n_start": 1, "judge_episodes": 3, "gp_scale": 0.5, "gp_beta": 9.0}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (values | {"n_workflows": 2}).items()]
    own = {"total_timesteps": 100, "num_minibatches": 1, "seed": 7, "max_steps": 40}
    flags += [*tiny_flags(cage2, tmp_path / "search", **own), "--configs", "workflow25"]
    code, out, err = command_line(cage2, capsys)("search", *flags, "--shared-timesteps", "25600")
    assert (code, err) == (0, "")
    (shared, *_), *orders = [arguments for arguments, _ in trained]
    assert (shared.total_timesteps, shared.workflow, shared.red_agent) == (25_600, "any", "meander")
    assert (shared.num_envs, shared.learning_rate, shared.compliance_threshold) == (256, 3e-3, None)  # not of an order
    start = str(tmp_path / "search" / "shared" / "latest.pt")
    made_of = [(args.learning_rate, args.ent_coef, args.total_timesteps, args.init_from) for args, *_ in orders]
    assert made_of == [(2e-3, 0.01, 100, start)] * 2  # of that preset, which lies over the preset search
    assert [arguments[3:] for arguments, _ in chosen] == [(0.5, 9.0, 1, 7)] * 2
    history = json.loads((tmp_path / "search" / "history.json").read_text())["history"]
    assert chosen[1][0][1:3] == ([history[0]["mean_return"]], [history[0]["standard_error"]])
    assert [record["confirmed"] for record in history] == [result["compliant"] for _, result in trained[1:]]
    assert {path.name for (path,), _ in loaded} == {"latest.pt"}
    last = [(args.workflow, seed) for (_, args, episodes, *seed), _ in judged if episodes == 3]
    assert last == [(record["workflow"], [1_000_000]) for record in history]  # on episodes that have confirmed nothing
    returns = re.findall(r": return (\S+) ", out.partition("Orders by return")[2])
    assert returns == sorted(returns, key=float, reverse=True)
    trained.clear()
    options = cage2.SearchArgs(n_workflows=1, judge_episodes=3, shared_timesteps=9, fresh_policy_per_order=True)
    args = tiny_args(cage2, tmp_path / "fresh", workflow="any")
    cage2.search(options, args)
    assert [args.init_from for (args, *_), _ in trained] == [None]
    with pytest.raises(cage2.UsageError, match="two ways to start"):
        cage2.search(options, replace(args, init_from="x.pt"))
    for wrong in (["--shared-timesteps", "9"], ["--init-from", "y.pt"]):
        assert command_line(cage2, capsys)("search", *wrong, "--logdir", str(tmp_path / "x"))[0] == 2
    assert not (tmp_path / "x").exists()  # so that the corrected command can have it
    for refused in (["--resume"], ["--workflow", "any"], ["--workflow=any"]):
        code, _, err = command_line(cage2, capsys)("search", *refused)
        assert (code, "leave out --resume, --workflow" in err) == (2, True)


def test_a_stopped_order_is_not_judged(cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(cage2, "train", lambda args, signals: signals.append(signal.SIGINT) or {"logdir": "x"})
    options, args = cage2.SearchArgs(fresh_policy_per_order=True), tiny_args(cage2, tmp_path, workflow="any")
    assert cage2.search(options, args, signals) == []
    signals.clear()
    assert cage2.search(cage2.SearchArgs(), replace(args, logdir=str(tmp_path / "shared")), signals) == []
    assert len(signals) == 1  # of the shared training, after which none begins
    with pytest.raises(cage2.UsageError, match=r"holds a search of gp_scale = 0\.2: go on"):
        cage2.search(replace(options, gp_scale=0.9), args)


def test_a_search_killed_anywhere_goes_on_and_ends_alike(cage2: ModuleType, tmp_path: Path) -> None:
    """In the shared training, in that of an order, and between orders; and it can be extended."""
    output = tmp_path / "output.txt"
    broken, whole = tmp_path / "broken", run_search(cage2, tmp_path / "whole")
    assert len({record["workflow"] for record in whole}) == 3
    for call in (2, 3, 4):  # updates of 25 steps: two of the shared training, three of each order's

        def work(call: int = call) -> None:
            die_at(cage2, "compute_gae", call)()
            run_search(cage2, broken)

        assert wait(fork(work, output)) == -signal.SIGKILL, output.read_text()[-2000:]
    run_search(cage2, broken)
    assert_same(*(json.loads((tmp_path / x / "history.json").read_text())["history"] for x in ("broken", "whole")))
    assert len(run_search(cage2, broken, 4)) == 4
    with pytest.raises(cage2.UsageError, match="of learning_rate = "):
        run_search(cage2, broken, learning_rate=1.0)


def test_a_damaged_history_is_named(cage2: ModuleType, tmp_path: Path) -> None:
    for text in (b"no json", b"{}", b"[]", b'{"settings": [], "history": []}', b"\xff"):
        (tmp_path / "history.json").write_bytes(text)
        with pytest.raises(OSError, match=r"history\.json"):
            run_search(cage2, tmp_path)
