"""Scenario2 of the CAGE Challenge 2 as tables: hosts, services, decoys, exploits, actions and rewards.

Nothing here acts; `rules.py` and `red_agents.py` read these tables. "SPEC n" in this package means section n
of the behavioural specification of the real simulator (`SPEC.md` beside this file, read from CybORG 2.1, MIT
licence). Hosts are numbered in one order everywhere: in observations, in blocks of actions and in every (...,
13) array. A set of hosts, ports or exploits is an integer whose bit i says "contains i".
"""

from typing import NamedTuple

import numpy as np

# ---------------------------------------------------------------- hosts and subnets (SPEC 1)

HOSTS = (
    "Defender", "Enterprise0", "Enterprise1", "Enterprise2",
    "Op_Host0", "Op_Host1", "Op_Host2", "Op_Server0",
    "User0", "User1", "User2", "User3", "User4",
)  # fmt: skip
NUM_HOSTS = len(HOSTS)
DEFENDER, ENTERPRISE0, ENTERPRISE1, ENTERPRISE2 = 0, 1, 2, 3
OP_SERVER0 = 7
USER0, USER1, USER2, USER3, USER4 = 8, 9, 10, 11, 12


def host_set(*hosts: int) -> int:
    """The bit set that contains exactly these hosts."""
    return sum(1 << host for host in hosts)


SUBNETS = ("Enterprise", "Operational", "User")  # the order in which Meander sweeps those it knows
ENTERPRISE, OPERATIONAL, USER = 0, 1, 2
SUBNET_OF = np.array([ENTERPRISE] * 4 + [OPERATIONAL] * 4 + [USER] * 5)
SUBNET_HOSTS = np.array([host_set(*np.flatnonzero(s == SUBNET_OF).tolist()) for s in range(len(SUBNETS))])
ENTERPRISE_SERVERS = host_set(ENTERPRISE0, ENTERPRISE1, ENTERPRISE2)

WINDOWS = host_set(ENTERPRISE1, ENTERPRISE2, USER0, USER1, USER2)
LINUX = host_set(*range(NUM_HOSTS)) & ~WINDOWS

LINK = np.full(NUM_HOSTS, -1)  # the host whose address an escalation here gives away
LINK[[USER1, USER2, USER3, USER4]] = ENTERPRISE1, ENTERPRISE1, ENTERPRISE0, ENTERPRISE0
LINK[ENTERPRISE2] = OP_SERVER0

# ---------------------------------------------------------------- ports (SPEC 1)

PORTS = (21, 22, 25, 53, 68, 80, 135, 139, 443, 445, 3389, 3390)


def port_set(*ports: int) -> int:
    """The bit set of these port numbers."""
    return sum(1 << PORTS.index(port) for port in ports)


_LISTENING = {
    DEFENDER: (22, 53, 68),  # 53 both over TCP and over UDP, which nothing can tell
    ENTERPRISE1: (22, 80, 135, 139, 443, 445, 3389),
    ENTERPRISE2: (22, 80, 135, 139, 443, 445, 3389),
    USER0: (21, 22),
    USER1: (21, 22),
    USER2: (135, 139, 445, 3389),
    USER3: (25, 80, 443, 3389),
    USER4: (22, 25, 80, 443, 3390),
}  # every other host runs SSH alone
LISTENING = np.array([port_set(*_LISTENING.get(host, (22,))) for host in range(NUM_HOSTS)])

# ---------------------------------------------------------------- exploits (SPEC 6.3)


class Exploit(NamedTuple):
    """Red considers it where its list has `port` and, if any are named, one of `needs_any`."""

    name: str
    weight: float
    port: int  # where it connects
    needs_any: tuple[int, ...] = ()


EXPLOITS = (
    Exploit("EternalBlue", 2, 139),
    Exploit("BlueKeep", 1, 3389),
    Exploit("HTTPRFI", 3, 80),
    Exploit("HTTPSRFI", 4, 443),
    Exploit("SSHBruteForce", 0.1, 22),
    Exploit("SQLInjection", 5, 3390, needs_any=(80, 443)),
    Exploit("HarakaRCE", 6, 25),
    Exploit("FTPDirectoryTraversal", 7, 21),
)
NUM_EXPLOITS = len(EXPLOITS)
ETERNAL_BLUE, BLUE_KEEP, HTTP_RFI, HTTPS_RFI, SSH_BRUTE_FORCE, SQL_INJECTION, HARAKA_RCE, FTP_TRAVERSAL = range(8)
EXPLOIT_PORT = np.array([port_set(exploit.port) for exploit in EXPLOITS])
EXPLOIT_NEEDS_ANY = np.array([port_set(*exploit.needs_any) for exploit in EXPLOITS])  # 0: nothing more
BEST_EXPLOITS_FIRST = np.array(sorted(range(NUM_EXPLOITS), key=lambda i: -EXPLOITS[i].weight))

TOP_EXPLOIT_PROBABILITY = 0.75
DETECTION_PROBABILITY = 0.95
GREEN_ACTS_PROBABILITY = 0.5
GREEN_TARGETS = host_set(USER0, USER1, USER2, USER3, USER4, ENTERPRISE0, ENTERPRISE1, ENTERPRISE2)

# What an exploit meets on the genuine services of a host.
NO_SERVICE, USER_SHELL, PRIVILEGED_SHELL, SSH_SESSION, SSH_REFUSED = range(5)
GENUINE = np.full((NUM_EXPLOITS, NUM_HOSTS), NO_SERVICE)
GENUINE[SSH_BRUTE_FORCE] = SSH_SESSION
GENUINE[SSH_BRUTE_FORCE, DEFENDER] = SSH_REFUSED  # it has no account with a guessable password
GENUINE[SSH_BRUTE_FORCE, [USER2, USER3]] = NO_SERVICE
for _server in (ENTERPRISE1, ENTERPRISE2):
    GENUINE[[HTTPS_RFI, HTTP_RFI], _server] = USER_SHELL
    GENUINE[BLUE_KEEP, _server] = PRIVILEGED_SHELL
GENUINE[FTP_TRAVERSAL, [USER0, USER1]] = PRIVILEGED_SHELL
GENUINE[ETERNAL_BLUE, USER2] = PRIVILEGED_SHELL
GENUINE[BLUE_KEEP, USER2] = USER_SHELL
for _server in (USER3, USER4):
    GENUINE[HARAKA_RCE, _server] = PRIVILEGED_SHELL
    GENUINE[[HTTPS_RFI, HTTP_RFI], _server] = USER_SHELL
GENUINE[SQL_INJECTION, USER4] = PRIVILEGED_SHELL

# ---------------------------------------------------------------- decoys (SPEC 6.1)


class Decoy(NamedTuple):
    """A decoy service: it starts if nothing uses the port it `checks`, and listens on the port it `opens`."""

    name: str
    checks: int
    opens: int
    fits: int  # set of hosts whose operating system can run it
    stops: int  # the exploit that runs into it


ANY_OS = WINDOWS | LINUX
DECOYS = (
    Decoy("Apache", 80, 80, ANY_OS, HTTP_RFI),
    Decoy("Femitter", 21, 21, WINDOWS, FTP_TRAVERSAL),
    Decoy("HarakaSMPT", 25, 25, LINUX, HARAKA_RCE),
    Decoy("Smss", 139, 139, WINDOWS, ETERNAL_BLUE),
    Decoy("SSHD", 22, 22, ANY_OS, SSH_BRUTE_FORCE),
    Decoy("Svchost", 3389, 3389, WINDOWS, BLUE_KEEP),
    Decoy("Tomcat", 443, 443, ANY_OS, HTTPS_RFI),
    Decoy("Vsftpd", 21, 80, LINUX, HTTP_RFI),  # the real one mixes up its ports: in effect a second Apache
)
NUM_DECOYS = len(DECOYS)
VSFTPD = 7
DECOY_CHECKS = np.array([port_set(decoy.checks) for decoy in DECOYS])
DECOY_OPENS = np.array([port_set(decoy.opens) for decoy in DECOYS])
DECOY_FITS = np.array([decoy.fits for decoy in DECOYS])
DECOYS_AGAINST = np.array([  # the set of decoys that catch each exploit
    sum(1 << d for d, decoy in enumerate(DECOYS) if decoy.stops == exploit) for exploit in range(NUM_EXPLOITS)
])  # fmt: skip

# ---------------------------------------------------------------- Blue's actions (SPEC 2)

SLEEP, MONITOR = 0, 1
ANALYSE, REMOVE, FIRST_DECOY, RESTORE = 0, 1, 2, 10  # blocks of 13 hosts; the decoys are blocks 2 to 9
BLOCKS = ("Analyse", "Remove", *(f"Decoy{decoy.name}" for decoy in DECOYS), "Restore")
ACTION_NAMES = ("Sleep", "Monitor", *(f"{block} {host}" for block in BLOCKS for host in HOSTS))
NUM_ACTIONS = len(ACTION_NAMES)  # 145

# ---------------------------------------------------------------- red's side (SPEC 7)

RED_AGENTS = ("b_line", "meander", "sleep")
B_LINE, MEANDER = 0, 1

RED_ACTIONS = (
    "Sleep", "DiscoverRemoteSystems", "DiscoverNetworkServices", "ExploitRemoteService", "PrivilegeEscalate",
    "Impact",
)  # fmt: skip
RED_SLEEP, SWEEP, SCAN, EXPLOIT, ESCALATE, IMPACT = range(6)
FAILURE, SUCCESS, UNKNOWN = 0, 1, 2  # how an action went; sleeping tells nothing

# Classes of red sessions on a host (SPEC 4).
REMOVABLE, OTHER_USER, PRIVILEGED = 0, 1, 2
ACCESS_LEVELS = ("none", "user", "privileged")

# ---------------------------------------------------------------- rewards (SPEC 9), in tenths, so exact

PRIVILEGED_COST = np.array([1, 10, 10, 10, 1, 1, 1, 10, 0, 1, 1, 1, 1])
OT_DOWN_COST = 100
RESTORE_COST = 10

# ---------------------------------------------------------------- observation (SPEC 3)

OBS_SIZE = 4 * NUM_HOSTS
QUIET, SCANNED, EXPLOITED = range(3)
ACTIVITIES = ("None", "Scan", "Exploit")
ACTIVITY_BITS = np.array([[0, 0], [1, 0], [1, 1]], np.float32)
CLEAN, SUSPECT, USER_LEVEL, PRIVILEGED_LEVEL = range(4)
COMPROMISED = ("No", "Unknown", "User", "Privileged")
COMPROMISED_BITS = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], np.float32)
