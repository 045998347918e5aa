"""Replay recordings of the real CybORG 2.1 on our simulator and count every difference.

Each recorded step's random outcomes (Green's target, red's choice of target and exploit, detection, escalated
session) are injected with Blue's action; everything else must follow. "red_choice" counts whether the recorded red
action is one that our red agent could have chosen, and "red_stage" B_line's stage counter, "draw_rates" whether
detection, choice of exploit and Green's rest came about as often as our probabilities say.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from envs import cage2
from envs.cage2 import scenario

SAMPLE = Path(__file__).parent / "data" / "cage2_sample"


def parse_name(path: Path) -> tuple[str, bool, bool]:
    """Red agent, whether Green acts, whether leaderboard rules: from `[lb_]{red}_{green}_{blue}.npz`."""
    parts = path.stem.split("_")
    leaderboard = parts[0] == "lb"
    red, green = parts[leaderboard : leaderboard + 2]
    return red.replace("bline", "b_line"), {"green": True, "nogreen": False}[green], leaderboard


def hidden_state(
    states: np.ndarray, rewards: np.ndarray, trace: dict[str, np.ndarray], t: int, red_agent: str, rules: ModuleType
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What is so after step t in our game and was so in the recorded one, by array."""
    num_envs = len(states)
    recorded = {name: values[:, t] for name, values in trace.items() if values.ndim > 1}
    alike = ("red_success", "blue_success", "red_access", "decoys", "malware", "ot_known", "ot_up")
    options = np.array([[int(rules.exploit_options(int(ports))) for ports in row] for row in states["ports"]])
    possible = states["impossible_draw"] == 0  # red did what was recorded, and every recorded outcome was possible
    for name in ("red_action", "red_target", "red_subnet", "red_exploit"):
        possible &= states[name] == recorded[name]
    return {name: (states[name], recorded[name]) for name in alike} | {
        "reward": (rewards.astype(np.float32), recorded["reward"]),
        "red_sessions": (states["sessions"], recorded["red_sessions"]),
        "n_vsftpd": (states["num_vsftpd"], recorded["n_vsftpd"]),
        "red_options": (options, recorded["red_options"]),
        "red_known_ip": ((states["known_ips"][:, None] >> np.arange(scenario.NUM_HOSTS)) & 1, recorded["red_known_ip"]),
        "red_choice": (possible, np.ones(num_envs, bool)),
        "red_stage": (states["stage"] if red_agent == "b_line" else np.full(num_envs, -1), recorded["red_state"]),
    }


class DrawRates:
    """How often the recorded outcome of each kind of two-way draw came about, against our probability."""

    def __init__(self, modules: Any) -> None:
        self.modules, tables = modules, modules.scenario
        self.probability = {
            "green_target": tables.GREEN_ACTS_PROBABILITY,
            "red_exploit": tables.TOP_EXPLOIT_PROBABILITY,
            "red_detect": tables.DETECTION_PROBABILITY,
        }
        self.count: Counter[str] = Counter()
        self.total: Counter[str] = Counter()

    def add(self, states: np.ndarray) -> None:
        """Take in the outcomes of one step (N,)."""
        outcome = {name: states["draws"][:, i] for i, name in enumerate(self.modules.state.DRAW_NAMES)}
        ports = states["ports"][np.arange(len(states)), states["red_target"]]
        best = np.array([self._best_exploit(int(listed)) for listed in ports])
        for name, made, happened in (
            ("green_target", states["green"] == 1, outcome["green_target"] >= 0),
            ("red_detect", outcome["red_detect"] >= 0, outcome["red_detect"] == 1),
            ("red_exploit", outcome["red_exploit"] >= 0, outcome["red_exploit"] == best),
        ):
            self.total[name] += int(np.count_nonzero(made))
            self.count[name] += int(np.count_nonzero(made & happened))

    def _best_exploit(self, ports: int) -> int:
        options = int(self.modules.rules.exploit_options(ports))
        return next((int(x) for x in self.modules.scenario.BEST_EXPLOITS_FIRST if options >> int(x) & 1), -1)

    def result(self) -> tuple[int, int]:
        """Kinds of draws compared, and those five standard deviations off (by chance once in 2 million)."""
        compared = wrong = 0
        for name, p in self.probability.items():
            n = self.total[name]
            compared += n > 0
            wrong += abs(self.count[name] - n * p) > 5 * (n * p * (1 - p)) ** 0.5 + 1
        return compared, wrong


def replay(
    path: Path, modules: Any = None, episodes: int | None = None, stop_at_first: bool = False
) -> dict[str, tuple[int, int]]:
    """Replay one file, through both wrappers.

    Args:
        path: the recording.
        modules: the simulator to test, an object with the modules of `envs.cage2` (default: that one).
        episodes: replay only so many.
        stop_at_first: return after the first step with a mismatch.

    Returns, for each array, how many values were compared and how many differed.
    """
    modules = modules or cage2
    with np.load(path) as file:
        trace = {name: file[name][:episodes] for name in file.files}
    num_envs, num_steps = trace["blue_action"].shape
    red_agent, green, leaderboard = parse_name(path)
    compared: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    rates = DrawRates(modules)

    def compare(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        compared[name] += theirs.size
        wrong[name] += int(np.count_nonzero(ours != theirs))

    for wrapper, obs_name in (("challenge", "obs"), ("cardiff", "obs_cardiff")):
        states = modules.simulator.new_states(
            num_envs, red_agent, green, "leaderboard" if leaderboard else "head", wrapper, max_steps=num_steps
        )
        modules.simulator.start(states)
        obs = np.zeros((num_envs, scenario.OBS_SIZE), np.float32)
        compare(obs_name, obs, trace[obs_name][:, 0])
        for t in range(num_steps):
            actions = trace["blue_action"][:, t].astype(np.int64)
            tape = np.full((num_envs, modules.state.NUM_DRAWS), modules.state.FREE, np.int8)
            for slot, name in enumerate(modules.state.DRAW_NAMES[:-1]):  # the red agent is drawn between episodes
                tape[:, slot] = trace[name][:, t]
            rewards, _ = modules.simulator.step(states, actions, tape, obs)
            compare(obs_name, obs, trace[obs_name][:, t + 1])
            if wrapper == "challenge":
                for name, pair in hidden_state(states, rewards, trace, t, red_agent, modules.rules).items():
                    compare(name, *pair)
                rates.add(states)
            if stop_at_first and any(wrong.values()):
                break
        compared["draw_rates"], wrong["draw_rates"] = rates.result()
        if stop_at_first and any(wrong.values()):
            break
    return {name: (compared[name], wrong[name]) for name in compared}
