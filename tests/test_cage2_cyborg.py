"""The adapter to the real CybORG, against a small stand-in with CybORG's interface (SPEC 0, 2, 3, 10, 14).

The stand-in plays by our own rules and has nothing of its own but the old gym interface: `reset()` returns observations
only, `step(a)` four values, observations are int64, `done` stays False, and Python's global `random` is the only seed.
"""

from __future__ import annotations

import random
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled, ResetNeeded
from gymnasium.utils.env_checker import check_env

from envs.cage2 import HOSTS, Cage2Env
from envs.cage2.cyborg import CybORGEnv, make_cyborg_vec_env
from tests.conftest import assert_same

scenarios_built: list[tuple[str, str, dict[str, str]]] = []


class HeadSession(SimpleNamespace):
    """A red session of the HEAD version; one of the leaderboard's is plain."""

    def clearports(self) -> None:
        """Only here to be found."""


class FakeCybORG:
    session_class: type = HeadSession

    def __init__(self, path: str, mode: str, agents: dict[str, type]) -> None:
        scenarios_built.append((path, mode, {side: agent.__name__ for side, agent in agents.items()}))
        names = {"B_lineAgent": "b_line", "RedMeanderAgent": "meander", "SleepAgent": "sleep"}
        self.game = Cage2Env(names[agents["Red"].__name__], green="Green" in agents)
        self.environment_controller = SimpleNamespace(state=SimpleNamespace(sessions={"Red": {}}))

    def write_sessions(self, info: dict[str, Any]) -> None:
        """Red's session table as CybORG keeps it: by number, session 0 being the foothold."""
        table = {0: self.session_class(host="User0", username="SYSTEM")}
        for host, classes in enumerate(info["red_sessions"].tolist()):
            users = ["root"] * (classes[2] - (HOSTS[host] == "User0")) + ["user"] * (classes[0] + classes[1])
            for username in users:
                table[len(table)] = SimpleNamespace(host=HOSTS[host], username=username)
        self.environment_controller.state.sessions["Red"] = table


class FakeChallengeWrapper:
    num_actions = 145

    def __init__(self, agent_name: str, env: FakeCybORG) -> None:
        assert agent_name == "Blue"
        self.cyborg = env
        self.action_space = SimpleNamespace(n=self.num_actions)

    def reset(self) -> np.ndarray:
        obs, info = self.cyborg.game.reset(seed=random.getrandbits(32))
        self.cyborg.write_sessions(info)
        return obs.astype(np.int64)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        assert type(action) is int
        obs, reward, _, _, info = self.cyborg.game.step(action)
        self.cyborg.write_sessions(info)
        return obs.astype(np.int64), reward, False, {}


@pytest.fixture(autouse=True)
def _cyborg_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package CybORG with the import paths of the real one in place."""

    def module(name: str, *classes: str, **members: Any) -> None:
        created = ModuleType(name)
        created.__dict__.update({known: type(known, (), {}) for known in classes}, **members)
        monkeypatch.setitem(sys.modules, name, created)

    scenarios_built.clear()
    module("CybORG", CybORG=FakeCybORG, __file__="/opt/cage/CybORG/__init__.py")
    module("CybORG.Agents", "B_lineAgent", "SleepAgent")
    module("CybORG.Agents.SimpleAgents")
    module("CybORG.Agents.SimpleAgents.GreenAgent", "GreenAgent")
    module("CybORG.Agents.SimpleAgents.Meander", "RedMeanderAgent")
    module("CybORG.Agents.Wrappers")
    module("CybORG.Agents.Wrappers.ChallengeWrapper", ChallengeWrapper=FakeChallengeWrapper)


def test_without_cyborg_one_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "CybORG", None)
    with pytest.raises(DependencyNotInstalled, match=r"pip install --no-deps -e cage-challenge-2/CybORG") as error:
        CybORGEnv()
    assert "\n" not in str(error.value)


def test_it_is_a_gymnasium_environment_that_builds_scenario2_with_the_right_agents() -> None:
    env, ours = CybORGEnv("b_line"), Cage2Env("b_line")
    check_env(env, skip_render_check=True)
    assert (env.observation_space, env.action_space) == (ours.observation_space, ours.action_space)
    scenarios_built.clear()
    CybORGEnv("meander", green=True)
    CybORGEnv("sleep")
    scenario = str(Path("/opt/cage/CybORG/Shared/Scenarios/Scenario2.yaml"))
    agents: list[dict[str, str]] = [{"Red": "RedMeanderAgent", "Green": "GreenAgent"}, {"Red": "SleepAgent"}]
    assert scenarios_built == [(scenario, "sim", sides) for sides in agents]


def test_observations_rewards_and_true_state_pass_through_and_episodes_are_truncated() -> None:
    env, twin = CybORGEnv("meander", max_steps=100), Cage2Env("meander")
    obs, info = env.reset(seed=5)
    assert (obs.any(), info["red_agent"]) == (False, "meander")
    random.seed(5)
    twin.reset(seed=random.getrandbits(32))
    for step in range(100):
        action = (0, 134, 22, 51, 3)[step % 5]
        *result, info = env.step(np.int64(action))
        obs, reward, _, _, expected = twin.step(action)
        assert_same(result, [obs, reward, False, step == 99])
        for name in ("red_access", "clearable", "blue_action", "red_agent"):
            np.testing.assert_array_equal(info[name], expected[name])
    assert info["red_access"].max() == 2
    assert info["clearable"][8]
    with pytest.raises(ResetNeeded):
        env.step(0)


def test_equal_seeds_repeat_and_a_mixture_draws_the_red_agent() -> None:
    env = CybORGEnv({"b_line": 0.5, "meander": 0.5}, max_steps=10)

    def run(seed: int) -> list[Any]:
        _, info = env.reset(seed=seed)
        return [info["red_agent"], *(env.step(0)[0].tolist() for _ in range(10))]

    runs = [run(seed) for seed in range(30)]
    assert runs == [run(seed) for seed in range(30)]
    assert len({random.random() for _ in "ab" if env.reset()}) == 2
    assert 5 < [agent for agent, *_ in runs].count("meander") < 25
    assert len(scenarios_built) == 2  # one game for each red agent, kept between episodes
    assert env.reset(options={"red_agent": "sleep"})[1]["red_agent"] == "sleep"


def test_the_installed_version_is_recognised_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for session, version, other in ((HeadSession, "head", "leaderboard"), (SimpleNamespace, "leaderboard", "head")):
        monkeypatch.setattr(FakeCybORG, "session_class", session)
        CybORGEnv(version=version).reset(seed=0)
        CybORGEnv(version=None).reset(seed=0)
        with pytest.raises(ValueError, match=f"by the rules of '{version}', not '{other}'"):
            CybORGEnv(version=other).reset(seed=0)
    monkeypatch.setattr(FakeChallengeWrapper, "num_actions", 158)
    with pytest.raises(ValueError, match="has 158 actions, not 145"):
        CybORGEnv(version=None).reset(seed=0)


def test_bad_settings_get_one_clear_sentence() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"wrapper": "cardiff"}, "CybORG has no wrapper 'cardiff'"),
        ({"version": "old"}, "There is no version 'old'"),
        ({"red_agent": "bline"}, "There is no red agent 'bline'"),
        ({"max_steps": 0}, "max_steps must be a whole number of at least 1"),
    ]
    for kwargs, message in wrong:
        with pytest.raises(ValueError, match=message):
            CybORGEnv(**kwargs)


def test_many_run_in_processes_and_restart_in_the_same_step() -> None:
    with closing(make_cyborg_vec_env(4, 2, "fork", red_agent="b_line", max_steps=5, state_in_info=True)) as envs:
        obs, _ = envs.reset(seed=3)
        assert obs.shape == (4, 52)
        for step in range(10):
            obs, _, terminations, truncations, infos = envs.step(np.zeros(4, int))
            assert (truncations == (step % 5 == 4)).all()
            assert not terminations.any()
            assert ("final_obs" in infos) == (step % 5 == 4)
        assert (obs.any(), infos["final_obs"][0].any()) == (False, True)
        assert "red_access" in infos
