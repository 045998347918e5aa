"""Would the replay notice a wrong rule? Each mutant changes one rule, and the sample of recordings must catch it.

Mutants are the package's own source with one line changed, run as plain Python (compiling each would take seconds).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numba
import pytest

from envs import cage2
from envs.cage2 import scenario
from tests.cage2_replay import SAMPLE, replay

MODULES = ("scenario", "state", "rules", "red_agents", "outcome", "simulator")  # in order of their imports


class Mutant(NamedTuple):
    old: str  # text that stands once in the modules
    new: str  # what stands there instead
    recording: str = "bline_nogreen_reduced"  # that shows it


MUTANTS = {
    "EternalBlue works on Enterprise1": Mutant("[BLUE_KEEP, _server]", "[[BLUE_KEEP, ETERNAL_BLUE], _server]"),
    "BlueKeep works on User3": Mutant(
        "[SQL_INJECTION, USER4] =", "[SQL_INJECTION, USER4] = GENUINE[BLUE_KEEP, USER3] =", "bline_nogreen_react"
    ),
    "an account of Defender can be guessed": Mutant(
        "DEFENDER] = SSH_REFUSED", "DEFENDER] = SSH_SESSION", "meander_nogreen_react"
    ),
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
    "Restore ends the foothold on User0": Mutant(
        "= 1 if host == USER0 else 0\n    e.decoys", "= 0\n    e.decoys", "bline_nogreen_random"
    ),
    "Impact works after a Restore of Op_Server0": Mutant("if e.ot_pid_known:", "if True:"),
    "Remove ends SSH sessions too": Mutant(
        "e.sessions[host, REMOVABLE] = 0\n    if e.compromised", "e.sessions[host, :2] = 0\n    if e.compromised"
    ),
    "Remove marks the host clean": Mutant("e.compromised[host] = SUSPECT", "e.compromised[host] = CLEAN"),
    "SSH sessions can be removed": Mutant("OTHER_USER] += 1\n    else:", "REMOVABLE] += 1\n    else:"),
    "undetected shells can be removed": Mutant(
        "OTHER_USER] += 1\n    e.malware", "REMOVABLE] += 1\n    e.malware", "meander_nogreen_reduced"
    ),
    "an SSHD decoy answers twice": Mutant("10 if exploit == SSH_BRUTE_FORCE else 2", "2", "bline_nogreen_targeted"),
    "escalation needs no file": Mutant("PRIVILEGED] += 1\n        e.malware[host] = True", "PRIVILEGED] += 1"),
    "User0 routes to Operational": Mutant(
        "(ENTERPRISE0, ENTERPRISE1, ENTERPRISE2):",
        "(ENTERPRISE0, ENTERPRISE1, ENTERPRISE2, USER0):",
        "bline_nogreen_targeted",
    ),
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
    "Meander never doubts Operational": Mutant(
        "doubtful = e.escalated_hosts & SUBNET_HOSTS[OPERATIONAL]", "doubtful = 0", "meander_nogreen_reduced"
    ),
    "Meander scans again and again": Mutant("        e.scanned_ips |= bit(target)\n", "", "meander_nogreen_sleep"),
    "user sessions cost too": Mutant("privileged > 0:\n            cost", "user + privileged > 0:\n            cost"),
    "a shell is seen before a scan": Mutant(
        "num_ports >= 3:", "num_ports >= 3 and not e.shell_seen[host]:", "meander_green_react"
    ),
    "the Cardiff wrapper hides events behind a new decoy": Mutant(
        "if deployed and not e.cardiff:", "if deployed:", "meander_nogreen_reduced"
    ),
    "the Cardiff wrapper shows a new decoy as a scan": Mutant(
        "if e.cardiff and e.events[host] == 0:", "if False:", "meander_nogreen_reduced"
    ),
    "an exploit leaves a known compromise as it was": Mutant(
        "if activity == EXPLOITED:", "if activity == EXPLOITED and e.compromised[host] == 0:"
    ),
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
