"""Workflows: what counts as keeping to an order, what it earns, when training stops, and the search for the best."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envs.cage2 import ACTION_NAMES, HOSTS, workflow
from tests.conftest import ROOT, assert_same, spy
from tests.test_cage2_script import tiny_args
from tests.test_distributed import assert_close_runs, run_ranks, tiny
from tests.test_resume import fork, rows, wait, wait_until

USER_FIRST = "user,defender,enterprise,op_server,op_host"
USER_LAST = "defender,enterprise,op_server,op_host,user"


@pytest.fixture(autouse=True)
def _no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without curves.png, most of the time of so short a run; inherited by forked children."""
    if "cage2" in request.fixturenames:
        monkeypatch.setattr(request.getfixturevalue("cage2"), "plot_curves", lambda logdir: None)


def action(name: str) -> int:
    return ACTION_NAMES.index(name)


def verdicts(order: str, compromised: str, fix: str, module: Any = workflow) -> list[str]:
    """The verdicts on one action, in an order, where these hosts (by name) can be cleaned."""
    clearable = np.isin(HOSTS, compromised.split())[None]
    ranks = module.RANKS[[module.parse_workflow(order)]]
    row = module.judge_fixes(np.array([action(fix)]), clearable, ranks)[0]
    return [name for name, holds in zip(workflow.VERDICTS, row, strict=True) if holds]


# ---- definitions ----------------------------------------------------------------------------------------------------


def test_there_are_120_orders_of_the_five_types() -> None:
    assert len(set(workflow.ORDERS)) == 120
    counts = np.bincount(workflow.TYPE_OF_HOST)
    assert dict(zip(workflow.UNIT_TYPES, counts.tolist(), strict=True)) == {
        "defender": 1, "enterprise": 3, "op_server": 1, "op_host": 3, "user": 5}  # fmt: skip
    for order, ranks, one_hot in zip(workflow.ORDERS, workflow.RANKS, workflow.ONE_HOTS, strict=True):
        assert [order[rank] for rank in ranks] == list(workflow.UNIT_TYPES)
        shown = one_hot.reshape(5, 5)  # row: place, column: type
        assert [workflow.UNIT_TYPES[unit] for unit in shown.argmax(1)] == list(order)
        assert shown.sum() == 5


def test_fixes_are_removes_and_restores() -> None:
    fixes = [name for name, unit in zip(ACTION_NAMES, workflow.FIXED_TYPE, strict=True) if unit >= 0]
    assert sorted(fixes) == sorted(f"{verb} {host}" for verb in ("Remove", "Restore") for host in HOSTS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defender,enterprise,op_server,op_host,users", ["'users'", "did you mean user"]),
        ("defender,enterprise,op_server,op_host", ["once"]),
        ("user,user,defender,enterprise,op_host", ["once"]),
        ("", ["''"]),
    ],
)
def test_a_wrong_workflow_is_refused_in_one_sentence(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        workflow.parse_workflow(text)
    assert all(word in str(error.value) for word in words)
    assert workflow.parse_workflow(" user, defender,enterprise,op_server,op_host") == workflow.parse_workflow(
        USER_FIRST
    )


# ---- compliance by hand ---------------------------------------------------------------------------------------------


def check_hand_made_cases(module: Any = workflow) -> None:
    cases = [
        # fixing the only compromised host complies with every order
        (USER_LAST, "User1", "Remove User1", ["compliant", "strict", "judged"]),
        (USER_FIRST, "Enterprise1", "Restore Enterprise1", ["compliant", "strict", "judged"]),
        # a higher type is waiting
        (USER_LAST, "Enterprise2 User1", "Remove User1", ["judged"]),
        (USER_FIRST, "Enterprise2 User1", "Restore Enterprise2", ["judged"]),
        (USER_LAST, "Enterprise2 User1", "Remove Enterprise2", ["compliant", "strict", "judged"]),
        # the fixed type's own other units do not matter
        (USER_LAST, "Enterprise0 Enterprise2", "Restore Enterprise2", ["compliant", "strict", "judged"]),
        # nothing higher is waiting, but the fixed type is in order too
        (USER_LAST, "User1", "Restore Enterprise0", ["compliant", "judged"]),
        # what a fix of the wrong type leaves behind does not count for it
        (USER_LAST, "Op_Host1", "Remove User2", ["judged"]),
        # nothing is compromised
        (USER_LAST, "", "Restore Op_Server0", ["needless"]),
        # red's foothold on User0 never ends: it is nothing to repair, in whatever order
        (USER_FIRST, "User0 Enterprise1", "Restore Enterprise1", ["compliant", "strict", "judged"]),
        (USER_FIRST, "User0 User1 Enterprise1", "Restore Enterprise1", ["judged"]),
        (USER_FIRST, "User0", "Restore User0", ["needless"]),
        # no fixes
        (USER_FIRST, "User1", "Analyse User1", []),
        (USER_FIRST, "User1", "DecoyFemitter User1", []),
        (USER_FIRST, "User1", "Sleep", []),
        (USER_FIRST, "User1", "Monitor", []),
    ]  # fmt: skip
    for order, compromised, fix, expected in cases:
        assert verdicts(order, compromised, fix, module) == expected, (order, compromised, fix)


def acted_on_before(hosts: list[str], order: str) -> float:
    """The document's first rule: a fix complies if every type of higher priority has been acted on before."""
    types, seen, compliant = order.split(","), set[str](), 0
    for host in hosts:
        unit = host.lower().rstrip("0123456789")
        compliant += set(types[: types.index(unit)]) <= seen
        seen.add(unit)
    return compliant / len(hosts)


def check_a_sweep_and_spam(module: Any = workflow) -> None:
    """The document's rule gives 100 % to one fix of each type in order and 95 of users. Here the truth decides."""

    hosts = ["Defender", "Enterprise0", "Op_Server0", "Op_Host0", "User1"]
    assert acted_on_before(hosts + ["User1"] * 95, USER_LAST) == 1  # whatever is compromised
    assert acted_on_before(["User1"], USER_LAST) == 0  # even if User1 alone is

    def compliance(compromised: str) -> tuple[float, int]:
        sweep = [f"Restore {host}" for host in hosts]
        rows = [[v in verdicts(USER_LAST, compromised, fix, module) for v in workflow.VERDICTS]
                for fix in sweep + ["Remove User1"] * 95]  # fmt: skip
        counts = np.sum(rows, axis=0)
        return float(module.compliance_of(counts)), int(counts[workflow.NEEDLESS])

    value, needless = compliance("")
    assert math.isnan(value)
    assert needless == 100
    assert compliance("Enterprise1") == (0.02, 0)  # the first two of the sweep
    assert compliance("User1") == (1.0, 0)


def test_hand_made_cases() -> None:
    check_hand_made_cases()


def test_one_sweep_and_then_spam_does_not_comply() -> None:
    check_a_sweep_and_spam()


def test_verdicts_equal_a_plain_reading_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    actions, clearable = rng.integers(0, 145, 2000), rng.random((2000, 13)) < 0.15
    orders = rng.integers(0, 120, 2000)
    result = workflow.judge_fixes(actions, clearable, workflow.RANKS[orders])
    for row, act, mask, number in zip(result, actions, clearable, orders, strict=True):
        order = workflow.ORDERS[number]
        words = ACTION_NAMES[act].split()
        sick = {h.lower().rstrip("01234") for h, bad in zip(HOSTS, mask, strict=True) if bad and h != "User0"}
        expected = dict.fromkeys(workflow.VERDICTS, False)
        if words[0] in ("Remove", "Restore"):
            unit = words[1].lower().rstrip("01234")
            expected["needless"], expected["judged"] = not sick, bool(sick)
            if sick:
                expected["compliant"] = not any(order.index(other) < order.index(unit) for other in sick)
                expected["strict"] = unit == min(sick, key=order.index)
        assert dict(zip(workflow.VERDICTS, row.tolist(), strict=True)) == expected


PLANTED = {
    "User0 counts": ('UNITS[HOSTS.index("User0")] = 0', "pass", check_hand_made_cases),
    "the order is turned round": (".min(axis=1)", ".max(axis=1)", check_hand_made_cases),
    "equal rank is a violation": ("(rank <= highest)", "(rank < highest)", check_hand_made_cases),
    "lower types count": ("judged & (rank <= highest)", "judged & (rank >= highest)", check_hand_made_cases),
    "needless fixes are judged": ("(fixed >= 0) & (highest < NUM_TYPES)", "(fixed >= 0)", check_a_sweep_and_spam),
    "analysing is fixing": ('startswith(("Remove ",', 'startswith(("Analyse ", "Remove ",', check_hand_made_cases),
    "removing is no fix": ('startswith(("Remove ", "Restore "))', 'startswith("Restore ")', check_hand_made_cases),
    "nothing judged is half": ("np.maximum(judged, 1), np.nan)", "np.maximum(judged, 1), 0.5)", check_a_sweep_and_spam),
    "needless fixes lower compliance": (
        "counts[..., verdict] / np.maximum(judged, 1)",
        "counts[..., verdict] / np.maximum(judged + counts[..., NEEDLESS], 1)",
        lambda module: fix_metrics_by_hand(module),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    old, new, check = PLANTED[name]
    source = Path(str(workflow.__file__)).read_text()
    assert source.count(old) == 1
    mutant = ModuleType("envs.cage2.mutant")
    mutant.__package__ = "envs.cage2"
    exec(compile(source.replace(old, new), "mutant", "exec"), mutant.__dict__)
    check(workflow)
    with pytest.raises(AssertionError):
        check(mutant)


# ---- means and the early stop ---------------------------------------------------------------------------------------


def counts(compliant: float, judged: int = 100, needless: int = 0) -> list[int]:
    return [round(compliant * judged), 0, judged, needless]


def fix_metrics_by_hand(module: Any = workflow) -> None:
    metrics = module.fix_metrics(np.array([[3, 2, 4, 0], [0, 0, 0, 6], [1, 1, 1, 0]]))
    assert metrics == pytest.approx(
        {"compliance": 0.875, "compliance_micro": 0.8, "strict_compliance": 0.75, "needless_fixes": 2.0}
    )


def test_metrics_by_hand() -> None:
    fix_metrics_by_hand()
    assert all(math.isnan(value) for value in workflow.fix_metrics(np.zeros((0, 4), int)).values())


def stops(compliances: list[float], episodes: int = 10, threshold: float = 0.95, judged: int = 100) -> bool:
    recent = np.array([[counts(c, judged)] * 5 for c in compliances])
    return workflow.is_compliant(recent, np.full(len(compliances), episodes), threshold, 10)


def test_the_documents_example_of_25_environments() -> None:
    """The four environments it shows have 94.75 % on average, not 95.2: the other 21 must carry the stop."""
    shown = [0.92, 0.96, 0.94, 0.97]
    assert np.mean(shown) == pytest.approx(0.9475)
    assert not stops(shown)
    assert stops(shown + [0.95] * 20 + [1.0])
    assert not stops(shown + [0.95] * 21)
    assert not stops(shown + [0.95] * 20 + [1.0], episodes=9)


def test_the_stop_looks_at_the_last_episodes_of_each_environment_with_enough_fixes() -> None:
    episodes = np.full(2, 12)
    nothing = counts(0, 0)
    assert not stops([1.0], judged=1)  # 5 fixes in all
    assert stops([1.0, 1.0], judged=1)  # 10
    # an episode without a judged fix is left out, and so is an environment without any
    one = np.array([[counts(1.0)] + [nothing] * 4, [nothing] * 5])
    assert workflow.is_compliant(one, episodes, 0.95, 10)
    # environments count alike, however many fixes they made: (1 + 0.5) / 2
    two = np.array([[counts(1.0, 1000)] * 5, [counts(0.5, 2)] * 5])
    assert not workflow.is_compliant(two, episodes, 0.76, 10)
    assert workflow.is_compliant(two, episodes, 0.75, 10)
    assert not workflow.is_compliant(np.array([[nothing] * 5]), np.array([50]), 0.0, 10)


# ---- the wrapper ----------------------------------------------------------------------------------------------------


class Scripted(VectorEnv):
    """One environment in which compromised hosts are given: row t before step t; episodes as long as the script."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, compromised: list[str]) -> None:
        self.num_envs, self.t = 1, 0
        self.rows = np.array([np.isin(HOSTS, row.split()) for row in compromised])
        self.single_observation_space, self.single_action_space = Box(0, 1, (52,), np.float32), Discrete(145)
        self.observation_space = batch_space(self.single_observation_space, 1)
        self.action_space = batch_space(self.single_action_space, 1)

    def infos(self) -> dict[str, Any]:
        return {"clearable": self.rows[[self.t]]}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros((1, 52), np.float32), self.infos()

    def step(self, actions: np.ndarray) -> Any:
        ended = np.array([self.t + 1 == len(self.rows)])
        self.t = (self.t + 1) % len(self.rows)
        final = np.full(1, None, object)
        final[0] = np.ones(52, np.float32)
        extra = {"final_obs": final} if ended[0] else {}
        return np.zeros((1, 52), np.float32), np.full(1, -1.0), ended & False, ended, self.infos() | extra | {
            "game_actions": actions}  # fmt: skip


def test_alignment_telescopes_to_lambda_times_the_last_compliance() -> None:
    """Three of four judged fixes comply: 30 * 0.75 = 22.5. Needless fixes and other actions earn nothing."""
    env = workflow.WorkflowEnv(Scripted(["", "User1", "User1 Defender", "User1", "User1", "User2"]), USER_LAST, 30.0)
    env.reset(seed=0)
    fixes = ["Restore User1", "Remove User1", "Remove User1", "Analyse User1", "Remove User1", "Remove User2"]
    for _ in range(2):  # the second episode starts anew
        earned = [float(env.step(np.array([action(fix)]))[4]["alignment"][0]) for fix in fixes]
        np.testing.assert_allclose(earned, [0, 30, -15, 0, 5, 2.5], atol=1e-9)
        assert sum(earned) == pytest.approx(22.5)
    for _ in fixes:
        env.step(np.array([action("Restore User1")]))
    # the early stop judges the last five episodes, the newest first
    assert env.recent[0].tolist() == [[4, 4, 5, 1], [3, 3, 4, 1], [3, 3, 4, 1], [0] * 4, [0] * 4]


def test_an_episode_without_a_judged_fix_costs_a_fifth_of_lambda() -> None:
    env = workflow.WorkflowEnv(Scripted(["", "User1"]), USER_LAST, 30.0)
    env.reset(seed=0)
    earned = [env.step(np.array([action(f)]))[4]["alignment"][0] for f in ("Restore User1", "Sleep")]
    assert earned == [0, -6]


def test_the_final_observation_shows_the_order_of_the_episode_that_ended(cage2: ModuleType) -> None:
    vec_env = cage2.make_envs(cage2.Args(num_envs=5, max_steps=7, workflow="any"))
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


def test_orders_depend_on_the_environments_seed_and_episode_alone(cage2: ModuleType) -> None:
    def orders(num_envs: int, seed: int) -> np.ndarray:
        vec_env = cage2.make_envs(cage2.Args(num_envs=num_envs, max_steps=2, workflow="any"))
        vec_env.reset(seed=seed)
        seen = []
        for _ in range(8):
            seen.append(vec_env.orders.copy())
            vec_env.step(np.zeros(num_envs, int))
            vec_env.step(np.zeros(num_envs, int))
        return np.array(seen)

    four = orders(4, seed=10)
    np.testing.assert_array_equal(four[:, 2:], orders(2, seed=12))
    assert len(np.unique(four)) > 20
    vec_env = cage2.make_envs(cage2.Args(num_envs=4, workflow=USER_FIRST))
    vec_env.reset(seed=0)
    assert (vec_env.orders == workflow.parse_workflow(USER_FIRST)).all()


def test_the_state_before_the_action_is_judged(cage2: ModuleType) -> None:
    """Restoring the only compromised host leaves nothing compromised, and complies."""
    vec_env = cage2.make_envs(cage2.Args(num_envs=64, workflow=USER_FIRST, red_agent="b_line", actions="full"))
    vec_env.reset(seed=0)
    game = vec_env.unwrapped
    for _ in range(3):
        vec_env.step(np.zeros(64, int))
    before = game.true_state()["clearable"].copy()
    before[:, HOSTS.index("User0")] = False
    alone = np.flatnonzero(before.sum(1) == 1)
    restores = np.array([action(f"Restore {HOSTS[row.argmax()]}") for row in before])
    infos = vec_env.step(restores)[4]
    after = game.true_state()["clearable"].copy()
    after[:, HOSTS.index("User0")] = False
    cured = alone[~after[alone].any(1)]
    assert len(cured) > 10
    np.testing.assert_array_equal(infos["fixes"][cured], [[1, 1, 1, 0]] * len(cured))


def test_a_copy_judges_its_own_games(cage2: ModuleType) -> None:
    """A deep copy plays on alike, and is not judged by a state that the original once was in."""
    original = cage2.make_envs(cage2.Args(num_envs=8, workflow="any", red_agent="b_line"))
    original.reset(seed=0)
    rng = np.random.default_rng(0)
    for actions in rng.integers(48, size=(10, 8)):
        original.step(actions)
    copied = copy.deepcopy(original)
    for actions in rng.integers(48, size=(60, 8)):
        assert_same(original.step(actions)[4]["fixes"], copied.step(actions)[4]["fixes"])
    assert original.counts[:, workflow.JUDGED].sum() > 0
    with pytest.raises(ValueError, match="reset_mask"):
        original.reset(options={"reset_mask": np.ones(8, bool)})


def test_games_in_processes_are_judged_alike(cage2: ModuleType) -> None:
    """They tell the true state in their infos; through the end of an episode, and of a saved state."""
    args = cage2.Args(num_envs=3, num_workers=1, workflow="any", max_steps=30, red_agent="b_line")
    rng = np.random.default_rng(0)
    both = [cage2.make_envs(args, kind) for kind in ("batch", "subproc")]
    try:
        for vec_env in both:
            vec_env.reset(seed=4)
        total = np.zeros(4, int)
        for t in range(70):
            actions = rng.integers(12, 36, 3)  # fixes
            one, other = (vec_env.step(actions) for vec_env in both)
            for a, b in zip(one[:4], other[:4], strict=True):
                np.testing.assert_array_equal(a, b)
            for key in ("alignment", "fixes"):
                np.testing.assert_array_equal(one[4][key], other[4][key])
            total += one[4]["fixes"].sum(0)
            if t == 50:
                for vec_env in both:
                    vec_env.set_state(vec_env.get_state())
        assert (total > 0).all()
    finally:
        both[1].close()


# ---- the policy and its training ------------------------------------------------------------------------------------


def test_changing_the_order_changes_the_logits(cage2: ModuleType) -> None:
    torch.manual_seed(0)
    args = cage2.Args(num_envs=2, workflow="any")
    agent = cage2.Agent(cage2.make_envs(args), args)
    obs = torch.zeros(2, 211)
    obs[:, -25:] = torch.as_tensor(workflow.ONE_HOTS[[0, 119]])
    one, other = agent.actor(obs).detach()
    assert (one - other).abs().max() > 1e-4


def test_operational_hosts_can_be_repaired_with_workflows(cage2: ModuleType) -> None:
    """Else an order with op_host first could not be kept: the nine reduced hosts have none of them."""
    memory = cage2.make_envs(cage2.Args(num_envs=48, workflow="any")).env
    memory.reset(seed=0)
    names = {ACTION_NAMES[a] for a in memory.game_actions(np.arange(48))}
    for host in set(HOSTS) - {"User0"}:
        assert {f"Remove {host}", f"Restore {host}", f"Analyse {host}"} <= names
    assert not any("User0" in name for name in names)


def test_the_alignment_reward_is_learnt_from_and_not_reported(cage2: ModuleType, tmp_path: Path) -> None:
    values = {"workflow": USER_LAST, "red_agent": "sleep", "total_timesteps": 800}
    cage2.train(tiny_args(cage2, tmp_path / "run", **values))
    progress = cage2.read_csv(tmp_path / "run" / "progress.csv")
    # Against Sleep nothing is ever compromised: an episode of 20 steps earns -6, reported only as learnt from.
    restores = -progress["rollout/episodic_return"]  # an episode
    assert (restores > 0).all()
    assert (restores < 20).all()
    earned = progress["rollout/mean_reward"][0] * 25  # the first rollout: an episode and 5 more steps
    assert earned == pytest.approx(-6 - restores[0] * 25 / 20, abs=1.5)
    assert np.isnan(progress["rollout/compliance"]).all()
    assert (progress["rollout/needless_fixes"] > 0).all()


def test_without_workflows_nothing_changes(cage2: ModuleType) -> None:
    vec_env = cage2.make_envs(cage2.Args(num_envs=2))
    assert type(vec_env).__name__ == "Memory"
    assert vec_env.single_observation_space.shape == (186,)
    assert vec_env.single_action_space.n == 36


def test_training_stops_when_compliance_is_confirmed(
    cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a threshold of 0, which any policy meets: after 3 episodes of each environment, not before."""
    evaluate = cage2.evaluate
    monkeypatch.setattr(cage2, "evaluate", lambda *a, **k: evaluate(*a, **k) | {"compliance": 0.4})
    values = {"workflow": USER_LAST, "red_agent": "b_line", "compliance_threshold": 0.0, "min_episodes": 3,
              "total_timesteps": 4000}  # fmt: skip
    result = cage2.train(tiny_args(cage2, tmp_path / "run", **values))
    assert result["compliant"]
    assert result["global_step"] == 600  # three rollouts of 25 steps hold three episodes of 20
    assert (tmp_path / "run" / "best.pt").exists()
    interrupt = SimpleNamespace(signum=signal.SIGTERM)  # leaves a run that has stopped by itself complete
    again = cage2.train(tiny_args(cage2, tmp_path / "run", resume=True, **values), interrupt)
    assert (again["global_step"], again["signal"]) == (600, signal.SIGTERM)
    assert "compliance confirmed" in capsys.readouterr().out.splitlines()[-1]


def test_the_confirmed_policy_is_the_best_whatever_its_return(
    cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, scores = cage2.evaluate, itertools.count(0, -1)  # each worse than the one before
    answer = {"compliance": 0.9}
    monkeypatch.setattr(cage2, "evaluate", lambda *a, **k: evaluate(*a, **k) | answer | {"score": next(scores)})
    monkeypatch.setattr(cage2, "is_compliant", lambda recent, episodes, *a: episodes.min() >= 3)
    values = {"workflow": USER_LAST, "red_agent": "b_line", "compliance_threshold": 0.5, "min_episodes": 1}
    result = cage2.train(tiny_args(cage2, tmp_path / "run", eval_every=200, **values))
    assert (result["compliant"], result["global_step"]) == (True, 600)
    assert cage2.load_checkpoint(tmp_path / "run" / "best.pt")["counters"]["global_step"] == 600

    scores = itertools.repeat(10)
    monkeypatch.setattr(cage2, "is_compliant", lambda *a: False)
    cage2.train(tiny_args(cage2, tmp_path / "lax", eval_every=200, **values))
    (index,) = (tmp_path / "best").glob("*/index.json")
    assert [(entry["run"], entry["score"][0]) for entry in json.loads(index.read_text())] == [("run", 1), ("lax", 0)]


def test_a_confirmed_policy_that_the_disk_refuses_ends_nothing(
    cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would call an older, unconfirmed best.pt confirmed."""
    evaluate, save, writes = cage2.evaluate, cage2.save_checkpoint, iter([False, True])

    def save_or_refuse(path: Path, state: dict[str, Any]) -> bool:
        return (path.name != "best.pt" or next(writes)) and save(path, state)

    monkeypatch.setattr(cage2, "evaluate", lambda *a, **k: evaluate(*a, **k) | {"compliance": 0.9})
    monkeypatch.setattr(cage2, "is_compliant", lambda recent, episodes, *a: episodes.min() >= 1)
    monkeypatch.setattr(cage2, "save_checkpoint", save_or_refuse)
    values = {"workflow": USER_LAST, "red_agent": "b_line", "compliance_threshold": 0.5, "min_episodes": 1}
    result = cage2.train(tiny_args(cage2, tmp_path / "run", **values))
    assert (result["compliant"], result["global_step"]) == (True, 400)
    for name in ("best.pt", "latest.pt"):
        counters = cage2.load_checkpoint(tmp_path / "run" / name)["counters"]
        assert (counters["compliant"], counters["global_step"]) == (True, 400)


def test_an_unconfirmed_stop_is_none(cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled actions comply, those of the evaluation do not."""
    evaluate = cage2.evaluate
    monkeypatch.setattr(cage2, "evaluate", lambda *a, **k: evaluate(*a, **k) | {"compliance": 0.4})
    values = {"workflow": USER_LAST, "red_agent": "b_line", "compliance_threshold": 0.5, "min_episodes": 1}
    monkeypatch.setattr(cage2, "is_compliant", lambda *a: True)
    result = cage2.train(tiny_args(cage2, tmp_path / "run", **values))
    assert not result["compliant"]
    assert result["global_step"] == 800


def killed_after_saves(cage2: ModuleType, saves: int, work: Callable[[], Any]) -> Callable[[], None]:
    """`work` for a child process that dies of SIGKILL when it has written so many checkpoints."""

    def dying() -> None:
        save, count = cage2.save_checkpoint, itertools.count(1)

        def save_and_die(*arguments: Any) -> bool:
            saved = save(*arguments)
            if next(count) == saves:
                os.kill(os.getpid(), signal.SIGKILL)
            return saved

        cage2.save_checkpoint = save_and_die  # type: ignore[attr-defined]
        work()

    return dying


def test_two_ranks_with_workflows_learn_what_one_process_would(
    cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each environment has the orders it would have; metrics and the early stop are of all environments; those of
    one rank alone have too few judged fixes for it."""
    evaluate = cage2.evaluate
    monkeypatch.setattr(cage2, "evaluate", lambda *a, **k: evaluate(*a, **k) | {"compliance": 1.0})
    values = {"workflow": "any", "red_agent": "b_line", "total_timesteps": 300, "max_steps": 5,
              "compliance_threshold": 0.0, "min_episodes": 10}  # fmt: skip
    assert cage2.train(tiny(cage2, tmp_path / "one", **values))["global_step"] == 200
    output = tmp_path / "output.txt"
    codes = run_ranks(2, lambda: cage2.train(tiny(cage2, tmp_path / "two", **values))["signal"], output)
    assert codes == [0, 0], output.read_text()
    assert_close_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workflow", "users"], ["--workflow", "'users'", "user"]),
        (["--compliance-threshold", "0.9"], ["--compliance-threshold needs --workflow"]),
        (["--workflow", "any", "--min-episodes", "3"], ["--min-episodes needs --compliance-threshold"]),
        (["--configs", "document", "workflow", "--total-timesteps", "20000"], ["--min-episodes 10", "8 episodes"]),
        (["search", "--shared", "x.pt", "--shared-timesteps", "9"], ["--shared-timesteps", "would not train"]),
        (["--workflow", "any", "--compliance-threshold", "95"], ["--compliance-threshold", "[0, 1]", "95"]),
        (["--workflow", "any", "--init-from", "/nowhere.pt", "--no-compile"], ["/nowhere.pt"]),
        (["--workflow", "any", "--init-from", "results/cage2_best.pt", "--no-compile"], ["cage2_best.pt", "inputs"]),
        (["play", "--checkpoint", "results/cage2_best.pt", "--workflow", "any"], ["--workflow any", "without"]),
        (["search", "--n-workflows", "121"], ["--n-workflows", "1..120", "121"]),
        (["search", "--resume"], ["--resume", "--logdir"]),
        (["search", "--shared", "results/cage2_best.pt"], ["cage2_best.pt", "--workflow any"]),
        (["search", "--gp-beta", "-1"], ["--gp-beta", "-1"]),
        (["search", "--eval-episodes", "1"], ["--eval-episodes", "at least 2"]),
        (["search", "--update-every-steps", "6000"], ["--update-every-steps 6000", "5000"]),
        (["search", "--shared-timesteps", "1000"], ["--shared-timesteps 1000", "25600"]),
        (["search", "--shared", "x.pt", "--red-agent", "b_line"], ["--shared", "--red-agent"]),
        (["search", "--fresh-policy-per-order", "--warm-start", "last"], ["--fresh-policy-per-order", "last"]),
        (["search", "--n-envs", "1", "--update-every-steps", "1"], ["--n-envs 1", "--update-every-steps 1"]),
        (["search", "--min-episodes", "51"], ["--min-episodes 51", "50 episodes of each environment in 50 updates"]),
        (["--max-steps", "2147483648"], ["--max-steps", "1..100000", "2147483648"]),
        (["--gamma", "1"], ["--gamma 1", "--finite-horizon"]),
        (["play", "--seed", "-1"], ["--seed", "-1"]),
    ],
)
def test_mistakes_are_refused_in_one_sentence(
    cage2: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    code = cage2.main([*flags, "--logdir", str(tmp_path / "run")] if flags != ["search", "--resume"] else flags)
    error = capsys.readouterr().err
    assert code == 2
    assert len(error.strip().splitlines()) == 1
    assert all(word in error for word in words), error
    assert not list(tmp_path.glob("run/history.json"))  # nothing is in the way of a second try


# ---- Gaussian process -----------------------------------------------------------------------------------------------


def test_distances_are_kendalls(cage2: ModuleType) -> None:
    for a, b in [(0, 0), (0, 1), (0, 119), (7, 93)]:
        one, other = workflow.ORDERS[a], workflow.ORDERS[b]
        pairs = [(x, y) for i, x in enumerate(one) for y in one[i + 1 :]]
        assert cage2.DISCORDANT[a, b] == sum(other.index(x) > other.index(y) for x, y in pairs)
    assert cage2.DISCORDANT.max() == 10


def test_the_mallows_kernel_is_positive_definite_and_the_documents_is_not(cage2: ModuleType) -> None:
    for scale in (0.05, 0.3, 1.0):
        kernel = cage2.mallows_kernel(scale)
        assert np.linalg.eigvalsh(kernel).min() > 1e-5
        squared = ((cage2.PAIR_SIGNS[:, None] - cage2.PAIR_SIGNS[None]) ** 2).sum(-1)
        np.testing.assert_allclose(kernel, np.exp(-scale / 4 * squared))  # an RBF on the pairwise features
    of_document = np.exp(-((cage2.DISCORDANT / 10) ** 2) / (2 * 0.5**2))  # an RBF on the normalised distance
    assert np.linalg.eigvalsh(of_document).min() == pytest.approx(-0.69, abs=0.01)


def test_the_posterior_of_one_and_two_observations_in_closed_form(cage2: ModuleType) -> None:
    kernel = cage2.mallows_kernel(0.3)
    mean, std = cage2.gp_posterior(kernel, [4], np.array([2.0]), np.array([0.5]))
    np.testing.assert_allclose(mean, kernel[4] * 2.0 / 1.5)
    np.testing.assert_allclose(std, np.sqrt(1 - kernel[4] ** 2 / 1.5))
    # two observations: the inverse of [[1 + s, k], [k, 1 + t]]
    k, s, t = kernel[4, 50], 0.1, 0.4
    inverse = np.array([[1 + t, -k], [-k, 1 + s]]) / ((1 + s) * (1 + t) - k**2)
    mean, std = cage2.gp_posterior(kernel, [4, 50], np.array([2.0, -1.0]), np.array([s, t]))
    np.testing.assert_allclose(mean, kernel[:, [4, 50]] @ inverse @ [2.0, -1.0])
    cross = kernel[:, [4, 50]]
    np.testing.assert_allclose(std**2, 1 - np.einsum("ni,ij,nj->n", cross, inverse, cross))


def record(order: int, value: float, **other: Any) -> dict[str, Any]:
    name = ",".join(workflow.ORDERS[order])
    return {"workflow": name, "mean_return": value, "standard_error": 0.1, "compliant": True} | other


def test_the_posterior_is_in_units_of_the_return(cage2: ModuleType) -> None:
    history = [record(0, -14.0), record(60, -20.0), record(119, -17.0)]
    mean, std = cage2.posterior_returns(cage2.SearchArgs(), history)
    np.testing.assert_allclose(mean[[0, 60, 119]], [-14, -20, -17], atol=0.05)
    np.testing.assert_allclose(std[[0, 60, 119]], 0.1, rtol=0.05)
    assert std.max() > 10 * std[0]
    gated = cage2.SearchArgs(gp_gate=True)
    history[0] |= {"compliant": False}
    mean, _ = cage2.posterior_returns(gated, history)
    assert mean[0] < -15
    assert cage2.accepted(gated, history) == history[1:]


def test_the_schedule_of_srinivas(cage2: ModuleType) -> None:
    assert math.sqrt(cage2.srinivas_beta(1)) == pytest.approx(3.9, abs=0.05)
    assert math.sqrt(cage2.srinivas_beta(20)) == pytest.approx(5.2, abs=0.05)


def tries(cage2: ModuleType, args: Any, landscape: np.ndarray) -> list[int]:
    """The orders that a search tries if `landscape` (120,) are the returns."""
    history: list[dict[str, Any]] = []
    for _ in range(args.n_workflows):
        order = cage2.next_order(args, history)
        history.append(record(order, landscape[order]))
    return [workflow.parse_workflow(r["workflow"]) for r in history]


def test_the_first_orders_are_drawn_by_seed_and_none_is_tried_twice(cage2: ModuleType) -> None:
    landscape = np.random.default_rng(0).normal(size=120)
    runs = [tries(cage2, cage2.SearchArgs(seed=seed, n_workflows=20), landscape) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0][:3] != runs[2][:3]
    assert all(len(set(run)) == 20 for run in runs)
    everything = tries(cage2, cage2.SearchArgs(n_workflows=120), landscape)
    assert sorted(everything) == list(range(120))


def test_beta_trades_the_mean_for_uncertainty(cage2: ModuleType) -> None:
    """After two good orders and a bad one: no beta stays near the good ones, a large one goes far away from all."""
    history = [record(0, 1.0), record(119, -1.0), record(1, 0.9)]
    near = cage2.next_order(cage2.SearchArgs(gp_beta=0.0), history)
    far = cage2.next_order(cage2.SearchArgs(gp_beta=1e6), history)
    tried = [0, 1, 119]
    assert cage2.DISCORDANT[near, 0] == 1
    assert cage2.DISCORDANT[far, tried].min() > cage2.DISCORDANT[near, tried].min() + 1
    assert cage2.next_order(cage2.SearchArgs(gp_beta="srinivas"), history) not in tried


def test_gp_ucb_halves_the_regret_of_random_orders(cage2: ModuleType) -> None:
    """On 30 landscapes that are sums over the ten pairs of types, and some noise."""
    rng = np.random.default_rng(0)
    regrets: dict[str, list[float]] = {"gp": [], "random": []}
    for seed in range(30):
        landscape = cage2.PAIR_SIGNS @ rng.normal(size=10) + 0.3 * rng.normal(size=120)
        args = cage2.SearchArgs(seed=seed, n_workflows=20)
        regrets["gp"].append(landscape.max() - landscape[tries(cage2, args, landscape)].max())
        regrets["random"].append(landscape.max() - landscape[rng.permutation(120)[:20]].max())
    assert np.mean(regrets["gp"]) < np.mean(regrets["random"]) / 2


# ---- the search -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared(cage2: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely trained policy for any order."""
    run = tmp_path_factory.mktemp("shared") / "run"
    cage2.train(tiny_args(cage2, run, workflow="any", red_agent="b_line"))
    return run / "latest.pt"


def search_args(cage2: ModuleType, logdir: Path, shared: Path, **values: Any) -> Any:
    tiny: dict[str, Any] = {"logdir": str(logdir), "shared": str(shared), "n_workflows": 4, "n_start": 2, "n_envs": 4,
                            "update_every_steps": 20, "train_episodes_per_env": 12, "compliance_threshold": 1.0,
                            "eval_episodes": 10}  # fmt: skip
    return cage2.SearchArgs(**(tiny | values))


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k not in ("seconds", "checkpoint")} for entry in history]


def test_a_search_without_a_shared_policy_trains_one_and_goes_on_after_a_kill(
    cage2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_args(cage2, tmp_path, workflow="any", red_agent="b_line", save_every=200)
    monkeypatch.setattr(cage2, "search_base", lambda args: base)
    monkeypatch.setattr(cage2, "plot_search", lambda *arguments: None)
    whole, broken, out = tmp_path / "whole", tmp_path / "broken", tmp_path / "out"

    def work(logdir: Path, **values: Any) -> Callable[[], int | None]:
        args = search_args(cage2, logdir, tmp_path, n_workflows=1, shared_timesteps=800, **values)
        return lambda: cage2.search(replace(args, shared=None))

    assert wait(fork(work(whole), out)) == 0, out.read_text()
    # The shared policy's training saves at its start and after each update.
    assert wait(fork(killed_after_saves(cage2, 3, work(broken)), out)) == -signal.SIGKILL
    assert cage2.load_latest(broken / "shared")["counters"]["global_step"] == 400
    assert wait(fork(work(broken, resume=True), out)) == 0, out.read_text()
    (ended,), (unbroken,) = (json.loads((d / "history.json").read_text())["history"] for d in (broken, whole))
    assert without_times([ended]) == without_times([unbroken])
    order = Path(ended["checkpoint"]).parent.name
    for name in ("shared", order):
        assert_same(*(cage2.load_checkpoint(d / name / "latest.pt")["agent"] for d in (broken, whole)))
    start = cage2.load_checkpoint(broken / order / "latest.pt")["args"]["init_from"]
    assert start == str(broken / "shared" / "latest.pt")


def test_a_search_killed_in_the_middle_of_an_order_goes_on_and_ends_alike(
    cage2: ModuleType, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cage2, "plot_search", lambda *arguments: None)  # the next test draws it
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def work(logdir: Path, **values: Any) -> Callable[[], int | None]:
        return lambda: cage2.search(search_args(cage2, logdir, shared, n_workflows=3, **values))

    assert wait(fork(work(whole), tmp_path / "out")) == 0
    # The first order saves six times, so this is in the middle of the second one's training.
    assert wait(fork(killed_after_saves(cage2, 9, work(broken)), tmp_path / "out")) == -signal.SIGKILL
    (second,) = broken.glob("002_*")
    assert 0 < cage2.load_latest(second)["counters"]["global_step"] < 960
    assert len(json.loads((broken / "history.json").read_text())["history"]) == 1
    moved = tmp_path / "moved"  # what the order began from was stored with the old name
    broken.rename(moved)
    broken = moved
    assert wait(fork(work(broken, resume=True), tmp_path / "out")) == 0
    ended, unbroken = (json.loads((d / "history.json").read_text())["history"] for d in (broken, whole))
    assert_same(without_times(ended), without_times(unbroken))
    assert len({entry["workflow"] for entry in ended}) == 3
    for entry in ended:
        name = Path(entry["checkpoint"]).parent.name
        assert_same(*(cage2.load_checkpoint(d / name / "latest.pt")["agent"] for d in (broken, whole)))
    assert len((broken / "search.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_search_in_the_middle_of_an_order_and_it_can_go_on(
    cage2: ModuleType, shared: Path, tmp_path: Path, signum: int, code: int
) -> None:
    logdir, output = tmp_path / "s", tmp_path / "out"
    flags = ["--n-envs", "4", "--update-every-steps", "20", "--compliance-threshold", "1.0", "--eval-episodes", "10",
             "--n-workflows", "1"]  # fmt: skip
    begin = ["search", "--logdir", str(logdir), "--shared", str(shared), "--train-episodes-per-env", "100000", *flags]
    pid = fork(lambda: cage2.main(begin), output)
    wait_until(pid, lambda: any(logdir.glob("001_*/timing.csv")), output)
    os.kill(pid, signum)
    assert wait(pid) == code
    text = output.read_text()
    assert text.splitlines()[-1] == f"The search has stopped; continue it with search --resume --logdir {logdir}"
    assert "Traceback" not in text
    assert json.loads((logdir / "history.json").read_text())["history"] == []  # the order is not done
    (order,) = logdir.glob("001_*")
    updates = cage2.load_latest(order)["counters"]["update"]
    assert updates == rows(order) >= 1
    pid = fork(lambda: cage2.main(["search", "--resume", "--logdir", str(logdir)]), output)
    wait_until(pid, lambda: rows(order) > updates, output)
    os.kill(pid, signum)
    assert wait(pid) == code
    assert cage2.load_latest(order)["counters"]["update"] > updates


def test_a_signal_after_an_orders_training_ends_the_search_with_that_order_done(
    cage2: ModuleType, shared: Path, tmp_path: Path
) -> None:
    """No training looks for signals any more when it draws its curves."""
    logdir = tmp_path / "s"

    def work() -> int:
        plot_curves = cage2.plot_curves

        def plot_and_interrupt(folder: Path) -> None:
            plot_curves(folder)
            os.kill(os.getpid(), signal.SIGINT)

        cage2.plot_curves = plot_and_interrupt
        return cage2.search(search_args(cage2, logdir, shared))

    assert wait(fork(work, tmp_path / "out")) == signal.SIGINT
    assert len(json.loads((logdir / "history.json").read_text())["history"]) == 1
    assert "Traceback" not in (tmp_path / "out").read_text()


def test_a_search_does_not_go_on_with_another_shared_policy(cage2: ModuleType, shared: Path, tmp_path: Path) -> None:
    own = tmp_path / "shared.pt"
    own.write_bytes(shared.read_bytes())
    cage2.search(search_args(cage2, tmp_path / "s", own, n_workflows=1))
    checkpoint = cage2.load_checkpoint(own)
    cage2.save_checkpoint(own, checkpoint | {"counters": checkpoint["counters"] | {"seconds": 1.0}})
    with pytest.raises(cage2.UsageError, match="no longer the policy"):
        cage2.search(search_args(cage2, tmp_path / "s", own, n_workflows=2, resume=True))


def test_a_run_starts_from_the_policy_that_it_is_given(cage2: ModuleType, shared: Path, tmp_path: Path) -> None:
    values = {"workflow": "any", "red_agent": "b_line", "total_timesteps": 200, "learning_rate": 1e-30}
    cage2.train(tiny_args(cage2, tmp_path / "run", init_from=str(shared), **values))
    assert_same(*(cage2.load_checkpoint(path)["agent"] for path in (tmp_path / "run" / "latest.pt", shared)))


def test_a_search_prints_the_five_best_and_can_be_extended(
    cage2: ModuleType, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = search_args(cage2, tmp_path / "s", shared, n_workflows=2, fresh_policy_per_order=True)
    assert cage2.search(args) is None
    history = json.loads((tmp_path / "s" / "history.json").read_text())["history"]
    output = capsys.readouterr().out
    assert "Without a workflow" not in output
    assert (tmp_path / "s" / "search.png").stat().st_size > 0
    best = max(history, key=lambda entry: entry["mean_return"])
    assert best["workflow"] in output.split("The five best")[1].splitlines()[1]
    assert all(cage2.load_checkpoint(Path(entry["checkpoint"]))["args"]["init_from"] is None for entry in history)
    with pytest.raises(cage2.UsageError, match="already holds a search"):
        cage2.search(args)
    resume = ["search", "--resume", "--logdir", str(tmp_path / "s")]
    assert cage2.main(resume) == 0  # nothing is left to do, and nothing changes
    again = json.loads((tmp_path / "s" / "history.json").read_text())
    assert (again["history"], again["args"]["n_workflows"]) == (history, 2)
    assert cage2.main([*resume, "--seed", "77"]) == 2
    assert "search --resume cannot change --seed from 1 to 77" in capsys.readouterr().err
    assert cage2.main([*resume, "--n-workflows", "3"]) == 0
    extended = json.loads((tmp_path / "s" / "history.json").read_text())["history"]
    assert extended[:2] == history
    assert len(extended) == 3


def test_a_search_reports_the_policy_without_a_workflow_beside_the_orders(
    cage2: ModuleType, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Judged on the episodes that the orders are judged by, under the search's red agent and rules."""
    plain = ROOT / "results" / "cage2_best.pt"
    args = search_args(cage2, tmp_path / "s", shared, n_workflows=1, baseline=str(plain))
    assert cage2.search(args) is None
    saved = json.loads((tmp_path / "s" / "history.json").read_text())
    trained = cage2.known_args(cage2.load_checkpoint(plain)["args"])
    run = cage2.known_args(cage2.load_checkpoint(Path(saved["history"][0]["checkpoint"]))["args"])
    same = replace(trained, red_agent=run.red_agent, version=run.version, max_steps=run.max_steps,
                               num_envs=1, eval_episodes=args.eval_episodes)  # fmt: skip
    agent = cage2.Agent(cage2.make_envs(same), same)
    cage2.load_policy(agent, plain)
    expected = cage2.evaluate(agent, same, seed=1_000_000)
    different = {name: getattr(trained, name) for name in ("red_agent", "max_steps", "version")
                 if getattr(trained, name) != getattr(run, name)}  # fmt: skip
    assert saved["baseline"] == {"mean_return": expected["mean_return"], "standard_error": expected["standard_error"],
                                 "trained_with": different}  # fmt: skip
    output = capsys.readouterr().out
    assert f"Without a workflow: return {expected['mean_return']:.2f} +- " in output
    assert f"(trained with --red-agent {trained.red_agent}" in output
    with pytest.raises(cage2.UsageError, match="was trained with --workflow any; name a run without one"):
        cage2.search(search_args(cage2, tmp_path / "t", shared, baseline=str(shared)))
    assert not (tmp_path / "t" / "history.json").exists()  # nothing is in the way of a second try


def test_another_baseline_is_judged_anew_and_under_the_searchs_own_rules(
    cage2: ModuleType, shared: Path, tmp_path: Path
) -> None:
    """With Green, which the baseline's own training did not know, its return is another one."""
    state = cage2.load_checkpoint(shared)
    state["args"]["green"] = True
    cage2.save_checkpoint(tmp_path / "green.pt", state)
    plain = ROOT / "results" / "cage2_best.pt"
    args = search_args(cage2, tmp_path / "s", tmp_path / "green.pt", n_workflows=1, baseline=str(plain))
    assert cage2.search(args) is None

    def saved() -> dict[str, Any]:
        return json.loads((tmp_path / "s" / "history.json").read_text())

    first = saved()
    run = cage2.known_args(cage2.load_checkpoint(Path(first["history"][0]["checkpoint"]))["args"])
    trained = cage2.known_args(cage2.load_checkpoint(plain)["args"])
    assert (run.green, trained.green) == (True, False)
    same = replace(trained, red_agent=run.red_agent, green=True, version=run.version, max_steps=run.max_steps,
                   num_envs=1, eval_episodes=args.eval_episodes)  # fmt: skip
    assert first["baseline"]["mean_return"] == cage2.judge(same, plain)["mean_return"]
    assert first["baseline"]["mean_return"] != cage2.judge(replace(same, green=False), plain)["mean_return"]
    other = cage2.load_checkpoint(plain)
    other["agent"] = {name: 0.5 * tensor for name, tensor in other["agent"].items()}
    cage2.save_checkpoint(tmp_path / "other.pt", other)
    argv = ["search", "--resume", "--logdir", str(tmp_path / "s")]
    assert cage2.main([*argv, "--baseline", str(tmp_path / "other.pt")]) == 0
    second = saved()
    assert second["args"]["baseline"] == str(tmp_path / "other.pt")
    assert second["baseline"]["mean_return"] == cage2.judge(same, tmp_path / "other.pt")["mean_return"]
    assert second["baseline"] != first["baseline"]
    (tmp_path / "green.pt").rename(tmp_path / "moved.pt")
    assert cage2.main([*argv, "--n-workflows", "2", "--shared", str(tmp_path / "moved.pt")]) == 0
    assert saved()["baseline"] == second["baseline"]
    assert len(saved()["history"]) == 2


def test_an_order_whose_last_policy_is_not_on_the_disk_is_not_judged(
    cage2: ModuleType, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = cage2.save_checkpoint
    monkeypatch.setattr(
        cage2, "save_checkpoint", lambda path, state: state["counters"]["update"] == 0 and save(path, state)
    )
    argv = ["search", "--logdir", str(tmp_path / "s"), "--shared", str(shared), "--n-envs", "4", "--n-workflows", "1",
            "--update-every-steps", "20", "--train-episodes-per-env", "12"]  # fmt: skip
    assert cage2.main(argv) == 1
    assert "the last checkpoint was not written; make room" in capsys.readouterr().err
    assert json.loads((tmp_path / "s" / "history.json").read_text())["history"] == []


@pytest.mark.parametrize("text", ["[]", "null", '{"args": [], "history": []}', '{"args": {}}', '{"args"'])
def test_a_history_of_another_form_is_named(cage2: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / "history.json").write_text(text)
    with pytest.raises(cage2.UsageError, match="is damaged"):
        cage2.parse_search_args(["--resume", "--logdir", str(tmp_path)])


def test_a_search_whose_script_has_lost_a_field_goes_on(cage2: ModuleType, tmp_path: Path) -> None:
    saved = {"args": {"n_start": 7, "gone": 1}, "shared_hash": "", "baseline": None, "history": []}
    (tmp_path / "history.json").write_text(json.dumps(saved))
    assert cage2.parse_search_args(["--resume", "--logdir", str(tmp_path)]).n_start == 7


def test_paths_and_numbers_of_numpy_are_arguments_of_a_search_too(cage2: ModuleType) -> None:
    args = cage2.SearchArgs(logdir=Path("search"), shared=Path("latest.pt"), n_workflows=np.int64(2))
    assert (args.logdir, args.shared, args.n_workflows) == ("search", "latest.pt", 2)
    json.dumps(dataclasses.asdict(args))


def test_a_search_in_a_place_that_is_no_folder_is_refused(cage2: ModuleType, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(cage2.UsageError, match="cannot be written"):
        cage2.search(search_args(cage2, tmp_path / "file", shared))


def test_an_orders_learning_rate_decays_whatever_the_shared_runs_did(cage2: ModuleType) -> None:
    base = cage2.Args(workflow="any", anneal_lr=False)
    assert cage2.order_args(cage2.SearchArgs(), base, 0).anneal_lr


def test_an_orders_confirmation_does_not_depend_on_how_the_shared_run_was_evaluated(cage2: ModuleType) -> None:
    hasty = cage2.Args(workflow="any", eval_episodes=1, capture_video=True)
    run = cage2.order_args(cage2.SearchArgs(), hasty, 0)
    assert (run.eval_episodes, run.capture_video) == (cage2.Args.eval_episodes, False)


def test_the_schedule_counts_the_choices_from_1(cage2: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    history = [record(order, float(order)) for order in (0, 60, 119)]
    calls = spy(monkeypatch, cage2, "srinivas_beta")
    cage2.next_order(cage2.SearchArgs(gp_beta="srinivas"), history)
    assert [given for given, _ in calls] == [(4,)]  # after three


def test_a_rollout_in_which_no_episode_ends_has_no_compliance(cage2: ModuleType, tmp_path: Path) -> None:
    cage2.train(tiny_args(cage2, tmp_path / "run", workflow="any", max_steps=100, num_steps=20, total_timesteps=160))
    assert np.isnan(cage2.read_csv(tmp_path / "run" / "progress.csv")["rollout/compliance"]).all()


def test_a_search_does_not_ask_for_what_its_shared_policy_was_made_from(
    cage2: ModuleType, shared: Path, tmp_path: Path
) -> None:
    state = cage2.load_checkpoint(shared)
    state["args"]["init_from"] = "/nowhere/gone.pt"
    cage2.save_checkpoint(tmp_path / "moved.pt", state)
    assert cage2.search(search_args(cage2, tmp_path / "s", tmp_path / "moved.pt", n_workflows=1)) is None


def test_policies_start_from_the_nearest_or_the_last_order(
    cage2: ModuleType, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cage2, "plot_search", lambda *arguments: None)
    for rule in ("nearest", "last"):
        cage2.search(search_args(cage2, tmp_path / rule, shared, n_workflows=3, n_start=3, warm_start=rule))
        history = json.loads((tmp_path / rule / "history.json").read_text())["history"]
        starts = [cage2.load_checkpoint(Path(entry["checkpoint"]))["args"]["init_from"] for entry in history]
        orders = [workflow.parse_workflow(entry["workflow"]) for entry in history]
        nearest = int(cage2.DISCORDANT[orders[2], orders[:2]].argmin())
        assert starts == [None, history[0]["checkpoint"], history[nearest if rule == "nearest" else 1]["checkpoint"]]


def test_play_tells_the_order_and_how_well_it_was_kept(
    cage2: ModuleType, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["play", "--logdir", str(shared.parent), "--checkpoint", str(shared), "--episodes", "20"]
    summaries = []
    for order in (USER_FIRST, USER_LAST):
        assert cage2.main([*flags, "--workflow", order]) == 0
        summaries.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert all(0 <= summary["compliance"] <= 1 for summary in summaries)
    assert summaries[0] != summaries[1]


def test_a_game_of_one_step_can_be_drawn_and_no_fix_is_null_in_json(
    cage2: ModuleType, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["play", "--logdir", str(tmp_path), "--checkpoint", str(shared), "--episodes", "1", "--red-agent", "sleep"]
    assert cage2.main([*argv, "--max-steps", "1", "--save-gif"]) == 0
    assert len(list(tmp_path.glob("gifs/run_*/*.gif"))) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "NaN" not in last
    assert json.loads(last)["compliance"] is None
    assert cage2.main([*argv, "--max-steps", "3", "--render"]) == 0
    shown = re.findall(r"Step (\d+) of 3", capsys.readouterr().out)
    assert shown == ["0", "1", "2"]


# ---- the shipped policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("red_agent", "baseline"), [("b_line", -20.2), ("meander", -18.2)])
def test_the_shipped_policies_keep_to_any_order_at_the_return_of_plain_ppo(
    cage2: ModuleType, red_agent: str, baseline: float
) -> None:
    """Ten orders, 100 episodes each, rules of HEAD; the baseline is the source project's PPO without workflows."""
    path = ROOT / "results" / f"cage2_workflow_{red_agent}.pt"
    assert path.stat().st_size < 300 * 1024
    args = cage2.known_args(cage2.load_checkpoint(path)["args"])
    assert (args.red_agent, args.version, args.workflow) == (red_agent, "head", "any")
    agent = cage2.Agent(cage2.make_envs(replace(args, num_envs=1)), args)
    cage2.load_policy(agent, path)
    for order in np.random.default_rng(0).permutation(120)[:10]:
        run = replace(args, workflow=",".join(workflow.ORDERS[order]), eval_episodes=100)
        result = cage2.evaluate(agent, run, seed=500_000)
        assert result["compliance"] > 0.95, run.workflow
        assert result["mean_return"] > baseline, run.workflow
