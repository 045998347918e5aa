"""The real CybORG 2.1 behind the interface of `Cage2Env`, for those who have installed it (SPEC 14).

    env = CybORGEnv(red_agent="meander")
    envs = make_cyborg_vec_env(25, red_agent="meander")  # 25 of them in processes

It runs at some 600 steps/s and is here for checking what was learnt on the simulator of this package. Old gym
never enters: the wrapper of the challenge is called directly.
"""

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled, ResetNeeded
from gymnasium.vector import AutoresetMode

from envs.subproc_vec_env import SubprocVecEnv

from .scenario import ACTION_NAMES, HOSTS, NUM_ACTIONS, NUM_HOSTS, OBS_SIZE, RED_AGENTS
from .simulator import VERSIONS, WRAPPERS, red_mixture
from .vec_env import red_agent_indices

INSTALL_HINT = (
    "CybORG is not installed: clone github.com/cage-challenge/cage-challenge-2, then run `pip install "
    "--no-deps -e cage-challenge-2/CybORG` and `pip install gym==0.26.2 prettytable pyyaml paramiko docutils` "
    "(it was written for numpy < 2; the package called cyborg on PyPI is something else)."
)
PRIVILEGED_USERS = ("root", "SYSTEM")


def make_cyborg(red_agent: str, green: bool) -> tuple[Any, Any]:
    """A CybORG playing Scenario2 against this red agent, and the challenge's wrapper around it.

    Raises DependencyNotInstalled, with what to install, where CybORG is missing.
    """
    try:
        import CybORG
        from CybORG.Agents import B_lineAgent, SleepAgent
        from CybORG.Agents.SimpleAgents.GreenAgent import GreenAgent
        from CybORG.Agents.SimpleAgents.Meander import RedMeanderAgent
        from CybORG.Agents.Wrappers.ChallengeWrapper import ChallengeWrapper
    except ImportError as error:
        raise DependencyNotInstalled(f"{INSTALL_HINT} ({error})") from error
    scenario = Path(CybORG.__file__).parent / "Shared" / "Scenarios" / "Scenario2.yaml"
    agents = {"Red": {"b_line": B_lineAgent, "meander": RedMeanderAgent, "sleep": SleepAgent}[red_agent]}
    if green:
        agents["Green"] = GreenAgent
    cyborg = CybORG.CybORG(str(scenario), "sim", agents=agents)
    return cyborg, ChallengeWrapper(env=cyborg, agent_name="Blue")


class CybORGEnv(gym.Env):
    """One game of the real CybORG with the arguments and spaces of `Cage2Env`.

    CybORG draws from Python's global `random`, which `reset(seed=...)` seeds: an episode repeats if nothing
    else in the process draws from it, so use one process for each environment. Infos hold `red_agent`,
    `blue_action`, `red_access` and `clearable` as those of `Cage2Env` do. `version` must be that of the
    installed CybORG; None accepts either. Only the official wrapper comes with CybORG. Its state cannot be
    saved, and it draws nothing.
    """

    def __init__(
        self,
        red_agent: str | Mapping[str, float] = "b_line",
        green: bool = False,
        version: str | None = "head",
        wrapper: str = "challenge",
        max_steps: int = 100,
        state_in_info: bool = True,
    ) -> None:
        if wrapper != "challenge":
            raise ValueError(f"CybORG has no wrapper {wrapper!r}; of {', '.join(WRAPPERS)} use challenge.")
        if version is not None and version not in VERSIONS:
            raise ValueError(f"There is no version {version!r}; choose from {', '.join(VERSIONS)}, or None.")
        if max_steps < 1:
            raise ValueError(f"max_steps must be a whole number of at least 1, but it is {max_steps!r}.")
        self._mixture = red_mixture(red_agent)
        self._green, self._version, self._max_steps = green, version, max_steps
        self._games: dict[str, tuple[Any, Any]] = {}  # by red agent, which CybORG cannot change after construction
        self._cyborg: Any = None
        self._wrapper: Any = None
        self._steps = max_steps  # of this episode; an ended one, until reset()
        self._state_in_info = state_in_info
        self.observation_space = spaces.Box(0.0, 1.0, (OBS_SIZE,), np.float32)
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self._play_against(RED_AGENTS[int(np.argmax(self._mixture))])  # reports a missing CybORG at once

    def _play_against(self, red_agent: str) -> None:
        if red_agent not in self._games:
            self._games[red_agent] = make_cyborg(red_agent, self._green)
        self._cyborg, self._wrapper = self._games[red_agent]

    def _red_sessions(self) -> Mapping[int, Any]:
        return self._cyborg.environment_controller.state.sessions["Red"]

    def _check_installed_rules(self) -> None:
        """The version string of both rule sets is 2.1; only HEAD has `clearports`."""
        is_head = any(hasattr(session, "clearports") for session in self._red_sessions().values())
        installed = "head" if is_head else "leaderboard"
        if self._version not in (None, installed):
            raise ValueError(f"The installed CybORG plays by the rules of {installed!r}, not {self._version!r}.")
        if self._wrapper.action_space.n != NUM_ACTIONS:
            raise ValueError(
                f"The installed CybORG has {self._wrapper.action_space.n} actions, not {NUM_ACTIONS}; use "
                "the cage-challenge-2 repository at commit 26ce1c1 or 606813b."
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; `options={"red_agent": name}` sets its red agent."""
        super().reset(seed=seed)
        chosen = (options or {}).get("red_agent")
        if chosen is not None:
            agent = int(red_agent_indices(chosen, 1)[0])
        else:
            agent = int(self.np_random.choice(len(RED_AGENTS), p=self._mixture))
        self._red_agent = RED_AGENTS[agent]
        self._play_against(self._red_agent)
        if seed is not None:
            random.seed(seed)
        obs = self._wrapper.reset()
        self._check_installed_rules()
        self._steps = 0
        return self._checked(obs), self._info(blue_action=0)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take an action, a whole number in 0..144."""
        if self._steps >= self._max_steps:
            raise ResetNeeded("Call reset() before step(), and again when an episode has ended.")
        if not self.action_space.contains(action):
            raise ValueError(f"The action must be a whole number in 0..{NUM_ACTIONS - 1}, but it is {action!r}.")
        obs, reward, _, _ = self._wrapper.step(int(action))  # CybORG never ends an episode
        self._steps += 1
        truncated = self._steps >= self._max_steps
        return self._checked(obs), float(reward), False, truncated, self._info(int(action))

    def _checked(self, obs: Any) -> np.ndarray:
        obs = np.asarray(obs, np.float32)
        if obs.shape != (OBS_SIZE,):
            raise ValueError(f"The installed CybORG gives observations of shape {obs.shape} instead of ({OBS_SIZE},).")
        return obs

    def _info(self, blue_action: int) -> dict[str, Any]:
        if not self._state_in_info:
            return {}
        red_access, clearable = np.zeros(NUM_HOSTS, np.uint8), np.zeros(NUM_HOSTS, np.bool_)
        for number, session in self._red_sessions().items():
            host = HOSTS.index(session.host)
            level = 2 if session.username in PRIVILEGED_USERS else 1
            red_access[host] = max(red_access[host], level)
            clearable[host] |= number != 0  # session 0 is the foothold on User0
        shown = {"red_agent": self._red_agent, "blue_action": ACTION_NAMES[blue_action]}
        return shown | {"red_access": red_access, "clearable": clearable}


def make_cyborg_vec_env(
    num_envs: int, num_workers: int | None = None, context: str | None = None, **settings: Any
) -> SubprocVecEnv:
    """`num_envs` CybORGEnvs with these settings, by default each in a process of its own, since games of one process
    share their random numbers; SAME_STEP autoreset like `Cage2VecEnv`."""
    env_fns = [partial(CybORGEnv, **{"state_in_info": False, **settings})] * num_envs
    num_workers = num_workers or num_envs
    return SubprocVecEnv(env_fns, num_workers=num_workers, context=context, autoreset_mode=AutoresetMode.SAME_STEP)
