"""Our simulator equals the real CybORG 2.1 on its recordings, and the replay would notice a wrong rule; free-running
statistics are those of the real CybORG, as they were measured on it.

The recordings are all of the shared ones, else the sample in the repository. Each recorded step's random outcomes
(Green's target, red's choice of target and exploit, detection, escalated session) are injected with Blue's action;
everything else must follow. "red_choice" counts whether the recorded red action is one that our red agent could have
chosen, and "red_stage" B_line's stage counter, "draw_rates" whether detection, choice of exploit and Green's rest came
about as often as our probabilities say.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest

from envs import cage2
from envs.cage2 import ACTION_NAMES, DECOYS, DRAW_NAMES, HOSTS, NUM_ACTIONS, RED_AGENTS, Cage2VecEnv, scenario
from envs.cage2.memory import DECOY_SLOTS, REDUCED_HOSTS
from envs.cage2.scenario import BEST_EXPLOITS_FIRST, GREEN_TARGETS
from tests.conftest import ROOT

SAMPLE = ROOT / "tests" / "data" / "cage2_sample"
RECORDINGS = sorted((ROOT.parent / "shared/cage2/traces").glob("*.npz")) or sorted(SAMPLE.glob("*.npz"))


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
    """Replay one file, or only so many episodes of it, through both wrappers: for each array, how many values were
    compared and how many differed, up to the first step with a mismatch with `stop_at_first`. `modules` is the
    simulator to test, an object with the modules of `envs.cage2` (default: that one)."""
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


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_every_recorded_value_is_reproduced(recording: Path) -> None:
    counts = replay(recording)
    assert len(counts) == 17  # arrays
    assert sum(compared for compared, _ in counts.values()) >= 229 * np.load(recording)["reward"].size
    assert {name: wrong for name, (_, wrong) in counts.items() if wrong} == {}


def test_the_sample_covers_both_versions_and_fits_the_repository() -> None:
    files = list(SAMPLE.glob("*"))
    assert sum(file.stat().st_size for file in files) <= 400 * 1024
    names = {file.stem for file in files}
    assert {"bline_nogreen_react", "meander_green_react", "lb_bline_nogreen_react", "sleep_green_random"} <= names


# ---- would it notice a wrong rule? ----------------------------------------------------------------------------------
# Each mutant changes one rule, and the sample of recordings must catch it. Mutants are the package's own source with
# one line changed, run as plain Python (compiling each would take seconds).
MODULES = ("scenario", "state", "rules", "red_agents", "outcome", "simulator")  # in order of their imports


class Mutant(NamedTuple):
    old: str  # text that stands once in the modules
    new: str  # what stands there instead
    recording: str = "bline_nogreen_reduced"  # that shows it


MUTANTS = {
    "EternalBlue works on Enterprise1": Mutant("[BLUE_KEEP, _server]", "[[BLUE_KEEP, ETERNAL_BLUE], _server]"),
    "BlueKeep works on User3": Mutant("USER4] =", "USER4] = GENUINE[BLUE_KEEP, USER3] =", "bline_nogreen_react"),
    "an account of Defender can be guessed": Mutant("] = SSH_REFUSED", "] = SSH_SESSION", "meander_nogreen_react"),
    "Vsftpd opens port 21": Mutant('Decoy("Vsftpd", 21, 80,', 'Decoy("Vsftpd", 21, 21,'),
    "Vsftpd does not stack": Mutant("e.num_vsftpd[host] += 1", "e.num_vsftpd[host] = 1"),
    "Femitter runs on Linux": Mutant("21, 21, WINDOWS", "21, 21, ANY_OS", "bline_nogreen_random"),
    "User3 and User4 lead to Enterprise1": Mutant(
        "= ENTERPRISE1, ENTERPRISE1, ENTERPRISE0, ENTERPRISE0",
        "= ENTERPRISE0, ENTERPRISE0, ENTERPRISE1, ENTERPRISE1",
        "meander_nogreen_sleep",
    ),
    "Green scans no Enterprise2": Mutant(
        "USER4, ENTERPRISE0, ENTERPRISE1, ENTERPRISE2)", "USER4, ENTERPRISE0, ENTERPRISE1)", "bline_green_random"
    ),
    "a privileged User0 costs 0.1": Mutant("10, 0, 1, 1, 1, 1]", "10, 1, 1, 1, 1, 1]", "sleep_green_random"),
    "Restore is free": Mutant("RESTORE_COST = 10", "RESTORE_COST = 0", "bline_nogreen_react"),
    "Restore leaves decoys standing": Mutant("    e.decoys[host] = 0\n", ""),
    "Restore leaves malware": Mutant("    e.malware[host] = False\n", ""),
    "Restore clears red's port list": Mutant("restored[host] = True", "restored[host] = True\n    e.ports[host] = 0"),
    "Restore ends the foothold on User0": Mutant("] = 1 if host == USER0 else 0", "] = 0", "bline_nogreen_random"),
    "Impact works after a Restore of Op_Server0": Mutant("if e.ot_pid_known:", "if True:"),
    "Remove ends SSH sessions too": Mutant("REMOVABLE] = 0\n    if e.compromised", ":2] = 0\n    if e.compromised"),
    "Remove marks the host clean": Mutant("e.compromised[host] = SUSPECT", "e.compromised[host] = CLEAN"),
    "SSH sessions can be removed": Mutant("OTHER_USER] += 1\n    else:", "REMOVABLE] += 1\n    else:"),
    "undetected shells can be removed": Mutant(
        "OTHER_USER] += 1\n    e.malware", "REMOVABLE] += 1\n    e.malware", "meander_nogreen_reduced"
    ),
    "an SSHD decoy answers twice": Mutant("10 if exploit == SSH_BRUTE_FORCE else 2", "2", "bline_nogreen_targeted"),
    "escalation needs no file": Mutant("PRIVILEGED] += 1\n        e.malware[host] = True", "PRIVILEGED] += 1"),
    "User0 routes to Operational": Mutant("in (ENTERPRISE0,", "in (USER0, ENTERPRISE0,", "bline_nogreen_targeted"),
    "leaderboard port lists on HEAD": Mutant("if e.leaderboard:", "if True:"),
    "HEAD port lists on the leaderboard": Mutant("if e.leaderboard:", "if False:", "lb_bline_nogreen_reduced"),
    "Haraka is gone after a Restore on HEAD": Mutant("if e.leaderboard and exploit", "if exploit"),
    "Haraka stays after a Restore on the leaderboard": Mutant(
        "if e.leaderboard and exploit == HARAKA_RCE", "if False and exploit == HARAKA_RCE", "lb_bline_nogreen_react"
    ),
    "B_line retries the exploit of Enterprise": Mutant(
        "EXPLOIT, ITS_ENTERPRISE_HOST, 2", "EXPLOIT, ITS_ENTERPRISE_HOST, 5"
    ),
    "B_line attacks an Op_Server0 it has not found": Mutant(
        "if e.scan_was_empty and not e.op_server_attacked:", "if False:", "bline_nogreen_targeted"
    ),
    "Meander never doubts Enterprise": Mutant("e.escalated_hosts & ENTERPRISE_SERVERS", "0", "meander_nogreen_react"),
    "Meander never doubts Operational": Mutant("& SUBNET_HOSTS[OPERATIONAL]", "& 0", "meander_nogreen_reduced"),
    "Meander scans again and again": Mutant("        e.scanned_ips |= bit(target)\n", "", "meander_nogreen_sleep"),
    "user sessions cost too": Mutant("privileged > 0:\n            cost", "user + privileged > 0:\n            cost"),
    "a shell is seen before a scan": Mutant(
        "num_ports >= 3:", "num_ports >= 3 and not e.shell_seen[host]:", "meander_green_react"
    ),
    "the Cardiff wrapper hides events behind a new decoy": Mutant(" and not e.cardiff", "", "meander_nogreen_reduced"),
    "the Cardiff wrapper shows a new decoy as a scan": Mutant("if e.cardiff", "if False", "meander_nogreen_reduced"),
    "an exploit leaves a known compromise as it was": Mutant("EXPLOITED:", "EXPLOITED and e.compromised[host] == 0:"),
    "Analyse reports what red does after it": Mutant(
        "if e.malware_found_on == host:", "if e.blue_action == 2 + host and e.malware[host]:"
    ),
}


def load_as_python(old: str = "", new: str = "") -> SimpleNamespace:
    """The simulator's modules without compilation, with `old` replaced by `new`."""
    package, modules = "cage2_mutant", {}
    paths = {name: Path(cage2.__file__).with_name(f"{name}.py") for name in MODULES}
    sources = {name: path.read_text() for name, path in paths.items()}
    assert not old or sum(source.count(old) for source in sources.values()) == 1, old
    numba.config.DISABLE_JIT = True
    try:
        for name in MODULES:
            module = ModuleType(f"{package}.{name}")
            module.__package__, module.__file__ = package, str(paths[name])
            sys.modules[module.__name__] = modules[name] = module
            source = sources[name].replace(old, new) if old else sources[name]
            exec(compile(source, str(paths[name]), "exec"), module.__dict__)
    finally:
        numba.config.DISABLE_JIT = False
        for name in MODULES:
            sys.modules.pop(f"{package}.{name}", None)
    return SimpleNamespace(**modules)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("rule", MUTANTS)
def test_replay_catches_a_wrong_rule(rule: str) -> None:
    old, new, recording = MUTANTS[rule]
    counts = replay(SAMPLE / f"{recording}.npz", load_as_python(old, new), stop_at_first=True)
    assert sum(wrong for _, wrong in counts.values()) > 0, f"nobody noticed that {rule}"


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_the_unchanged_rules_pass_as_plain_python() -> None:
    assert {f"{name}.py" for name in MODULES} == {*cage2.simulator._RULE_FILES}  # what an edit compiles anew
    counts = replay(SAMPLE / "meander_green_react.npz", load_as_python(), episodes=2)
    assert all(compared > 0 for array, (compared, _) in counts.items() if array != "red_stage")
    assert all(wrong == 0 for _, wrong in counts.values())


@pytest.mark.parametrize(
    ("table", "wrong", "recording"),
    [
        ("DETECTION_PROBABILITY", 0.9, "bline_nogreen_react"),
        ("TOP_EXPLOIT_PROBABILITY", 0.65, "bline_nogreen_react"),
        ("GREEN_ACTS_PROBABILITY", 0.4, "meander_green_react"),
        ("BEST_EXPLOITS_FIRST", scenario.BEST_EXPLOITS_FIRST[::-1], "bline_nogreen_react"),
    ],
)
def test_replay_sees_a_wrong_chance(monkeypatch: pytest.MonkeyPatch, table: str, wrong: object, recording: str) -> None:
    """Injected outcomes hide the simulator's own probabilities; the frequencies of the recording tell on them."""
    path = SAMPLE / f"{recording}.npz"
    assert replay(path)["draw_rates"][1] == 0
    monkeypatch.setattr(scenario, table, wrong)
    assert replay(path)["draw_rates"][1] > 0


# ---- free-running statistics ----------------------------------------------------------------------------------------
EPISODES = 4000

REDUCED = [0, *(block + host for block in (2, 15, 132) for host in REDUCED_HOSTS)]
REDUCED += [ACTION_NAMES.index(f"Decoy{DECOYS[d].name} {HOSTS[h]}") for h, d in DECOY_SLOTS if h in REDUCED_HOSTS]
POLICIES: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "sleep": lambda num_envs, rng: np.zeros(num_envs, np.int64),
    "random": lambda num_envs, rng: rng.integers(NUM_ACTIONS, size=num_envs),
    "reduced": lambda num_envs, rng: rng.choice(REDUCED, size=num_envs),
}

# version red green blue: mean and standard error after 30, 50 and 100 steps, of 400 episodes, or of 100 (leaderboard
# meander, and red asleep)
REAL = """
head b_line nogreen sleep      -216.45 1.02  -478.45 1.02  -1133.45 1.02
head b_line nogreen random     -155.82 3.85  -343.16 7.84  -749.21 17.17
head b_line nogreen reduced    -88.79 3.57   -188.14 7.38  -371.71 13.82
head b_line green sleep        -217.44 0.96  -479.44 0.96  -1134.43 0.96
head b_line green random       -160.17 3.86  -349.78 7.90  -745.97 17.44
head b_line green reduced      -93.32 3.70   -196.23 7.56  -387.58 14.29
head meander nogreen sleep     -41.07 1.10   -270.92 3.55  -974.22 3.53
head meander nogreen random    -32.56 0.71   -158.07 4.43  -566.69 14.50
head meander nogreen reduced   -29.28 0.62   -108.00 3.27  -314.51 9.55
head meander green sleep       -41.15 1.08   -271.65 3.62  -975.41 3.51
head meander green random      -34.09 0.75   -170.81 4.52  -593.20 14.09
head meander green reduced     -27.99 0.45   -104.96 3.14  -311.48 9.55
leaderboard b_line nogreen random   -155.35 3.90  -341.49 8.00  -741.94 17.76
leaderboard b_line nogreen reduced  -93.96 3.73   -192.92 7.58  -367.43 14.08
leaderboard meander nogreen random   -32.99 1.24  -171.95 8.57  -578.60 29.23
leaderboard meander nogreen reduced  -28.07 0.80  -90.91 3.88   -302.82 17.65
head sleep nogreen sleep       0 0  0 0  0 0
head sleep nogreen random      -2.57 0.15  -4.25 0.20  -8.65 0.28
head sleep nogreen reduced     -5.01 0.18  -8.36 0.25  -16.92 0.38
head sleep green random        -2.47 0.15  -4.17 0.18  -8.64 0.27
head sleep green reduced       -5.01 0.21  -8.79 0.27  -17.41 0.40
"""
CELLS = {tuple(row[:4]): np.array(row[4:], float).reshape(3, 2) for row in map(str.split, REAL.strip().splitlines())}


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_mean_returns_are_those_of_the_real_simulator(cell: tuple[str, str, str, str]) -> None:
    """Within four combined standard errors after 30, 50 and 100 steps."""
    version, red_agent, green, blue = cell
    env = Cage2VecEnv(EPISODES, red_agent, green=green == "green", version=version, seed=20_000)
    rng = np.random.default_rng(7)
    env.reset()
    rewards = np.empty((100, EPISODES))
    for step in range(100):
        _, rewards[step], *_ = env.step(POLICIES[blue](EPISODES, rng))
    for horizon, (real_mean, real_error) in zip((30, 50, 100), CELLS[cell], strict=True):
        returns = rewards[:horizon].sum(axis=0)
        error = np.hypot(real_error, returns.std(ddof=1) / np.sqrt(EPISODES))
        assert abs(returns.mean() - real_mean) <= 4 * error, f"{horizon} steps: {returns.mean():.2f}, {real_mean}"


def share_is(count: int, total: int, probability: float) -> bool:
    """Whether a count lies within four standard deviations of its expectation."""
    assert total > 1000
    return abs(count - total * probability) <= 4 * np.sqrt(total * probability * (1 - probability))


def test_draws_come_about_as_often_as_the_specification_says() -> None:
    env = Cage2VecEnv(EPISODES, {"b_line": 0.5, "meander": 0.5}, green=True, seed=3)
    rng = np.random.default_rng(1)
    env.reset()
    b_line = env.true_state()["red_agent"] == RED_AGENTS.index("b_line")
    drawn = []
    for _ in range(100):
        env.step(POLICIES["random"](EPISODES, rng))
        drawn.append(env.draws.copy())
    draws = dict(zip(DRAW_NAMES, np.moveaxis(drawn, 2, 0), strict=True))  # (100, EPISODES) each
    green, detected = draws["green_target"], draws["red_detect"][draws["red_detect"] >= 0]
    assert share_is(np.count_nonzero(green >= 0), green.size, 0.5)
    scanned = [host for host in range(13) if GREEN_TARGETS >> host & 1]
    assert set(np.unique(green)) == {-1, *scanned}
    assert all(share_is(np.count_nonzero(green == host), green.size, 1 / 16) for host in scanned)
    assert share_is(np.count_nonzero(detected), detected.size, 0.95)
    first_users = draws["red_target"][1][b_line]
    assert all(share_is(np.count_nonzero(first_users == host), first_users.size, 0.25) for host in (9, 10, 11, 12))
    assert set(np.unique(draws["red_exploit"])) == {-1, *BEST_EXPLOITS_FIRST}


def test_exploits_are_chosen_with_the_stated_probabilities() -> None:
    """B_line's first exploit of its user host, by host: the table of SPEC 6.3."""
    env = Cage2VecEnv(20_000, "b_line", max_steps=3, seed=9)
    env.reset()
    for _ in range(2):
        env.step(np.zeros(20_000, int))
    targets = env.draws[:, DRAW_NAMES.index("red_target")].copy()
    env.step(np.zeros(20_000, int))
    chosen = env.draws[:, DRAW_NAMES.index("red_exploit")]
    ftp, haraka, sql, https, http, eternal, keep, ssh = BEST_EXPLOITS_FIRST
    table = {
        9: {ftp: 0.75, ssh: 0.25},
        10: {eternal: 0.75, keep: 0.25},
        11: {haraka: 0.75, https: 0.25 / 3, http: 0.25 / 3, keep: 0.25 / 3},
        12: {haraka: 0.75, sql: 0.0625, https: 0.0625, http: 0.0625, ssh: 0.0625},
    }
    for host, probabilities in table.items():
        on_host = chosen[targets == host]
        assert set(np.unique(on_host)) == set(probabilities)
        for exploit, probability in probabilities.items():
            assert share_is(np.count_nonzero(on_host == exploit), on_host.size, probability)
