"""What one environment remembers: a record of a structured array, its random stream, and its episode start.

A batch is one array of `STATE` records, 1 KiB each at most, so that saving it saves everything: the game, the
memory of the red agent and the random generator. Compiled code reads `e.sessions[host, PRIVILEGED]` as the
rules are written.
"""

import numpy as np
from numba import njit

from .scenario import NUM_HOSTS, PRIVILEGED, RED_AGENTS, UNKNOWN, USER, USER0

# Every random draw has a name and a slot of the tape (SPEC 11); an outcome found there replaces it.
DRAW_NAMES = ("green_target", "red_target", "red_exploit", "red_detect", "red_esc_removable", "red_agent")
NUM_DRAWS = len(DRAW_NAMES)
GREEN_TARGET, RED_TARGET, RED_EXPLOIT, RED_DETECT, RED_ESC_REMOVABLE, RED_AGENT = range(NUM_DRAWS)
FREE = -2  # on the tape: draw it yourself
NONE = -1  # among outcomes: no draw was made (of green_target: Green slept); among targets: no target

_byte, _count, _set, _index = "u1", "i4", "i4", "i8"
STATE = np.dtype((np.record, np.dtype([
    # settings, constant for the environment
    ("max_steps", _count), ("leaderboard", _byte), ("cardiff", _byte), ("green", _byte),
    ("red_mixture", "f8", len(RED_AGENTS)),      # probability of each red agent at the start of an episode
    # random stream
    ("rng", "u8"),
    ("tape", "i1", NUM_DRAWS),                   # outcomes to use in this step, or FREE
    ("draws", "i1", NUM_DRAWS),                  # outcomes of this step, or NONE
    ("impossible_draw", _byte),                  # the tape asked for an outcome that cannot happen here
    # from here on, all starts anew with each episode: the network (SPEC 4)
    ("steps", _count),
    ("sessions", _count, (NUM_HOSTS, 3)),        # red sessions: removable user, other user, privileged
    ("decoys", _byte, NUM_HOSTS),                # set of decoys
    ("num_vsftpd", _count, NUM_HOSTS),           # Vsftpd decoys stack
    ("malware", _byte, NUM_HOSTS),
    ("restored", _byte, NUM_HOSTS),
    ("ot_up", _byte), ("ot_pid_known", _byte),
    ("red_access", _byte, NUM_HOSTS),            # derived: 0 none, 1 user, 2 privileged
    ("clearable", _byte, NUM_HOSTS),             # derived: a session is here that Restore would end
    # connection events of this step (SPEC 10)
    ("events", _count, NUM_HOSTS), ("event_ports", _set, NUM_HOSTS), ("shell_seen", _byte, NUM_HOSTS),
    # Blue
    ("blue_action", _count), ("blue_success", _byte),
    ("deployed_on", _index),                     # host on which a decoy was started in this step
    ("malware_found_on", _index),                # host on which Analyse found malware in this step
    ("compromised", _byte, NUM_HOSTS),           # the wrapper's memory
    ("activity", _byte, NUM_HOSTS),
    ("cost_tenths", _count), ("episode_cost_tenths", _count),  # of the last step, and since the episode began
    # what red knows
    ("known_ips", _set), ("known_hosts", _set), ("known_subnets", _set), ("ot_known", _byte),
    ("ports", _set, NUM_HOSTS), ("scanned", _byte, NUM_HOSTS),
    # red's last action
    ("red_agent", _index), ("red_action", _index), ("red_target", _index), ("red_subnet", _index),
    ("red_exploit", _index), ("red_success", _byte), ("scan_was_empty", _byte),
    # B_line (SPEC 7.1)
    ("stage", _index), ("user_target", _index), ("op_server_attacked", _byte),
    # Meander (SPEC 7.2)
    ("scanned_subnets", _set), ("scanned_ips", _set), ("exploited_ips", _set), ("escalated_hosts", _set),
    ("host_ip_map", _set),
], align=True)))  # fmt: skip

SETTINGS = ("max_steps", "leaderboard", "cardiff", "green", "red_mixture")
CHANGING = tuple(name for name in STATE.names or () if name not in SETTINGS)  # all that a saved state must hold


# ---------------------------------------------------------------- random numbers

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)


@njit
def next_uniform(e):
    """A float in [0, 1) from the environment's own SplitMix64 stream (Steele, Lea & Flood 2014)."""
    e.rng = e.rng + _GOLDEN
    z = e.rng
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    z = z ^ (z >> _S31)
    return (z >> _S11) * 2.0**-53


@njit
def size_of(bits):
    """Number of members of a bit set."""
    size = 0
    while bits:
        bits &= bits - 1
        size += 1
    return size


@njit
def draw_member(e, slot, candidates):
    """A member of the bit set `candidates`, uniformly, or the one that the tape names."""
    outcome = int(e.tape[slot])
    if outcome == FREE:
        outcome = 0
        skip = int(next_uniform(e) * size_of(candidates))
        while not (candidates >> outcome) & 1 or skip > 0:
            skip -= (candidates >> outcome) & 1
            outcome += 1
    elif outcome < 0 or not (candidates >> outcome) & 1:
        e.impossible_draw = True
        outcome = lowest_member(candidates)
    e.draws[slot] = outcome
    return outcome


@njit
def lowest_member(candidates):
    """The lowest member of a bit set that is not empty."""
    member = 0
    while not (candidates >> member) & 1:
        member += 1
    return member


@njit
def draw_event(e, slot, probability):
    """True with this probability, or what the tape says (0 or 1)."""
    outcome = int(e.tape[slot])
    if outcome == FREE:
        outcome = int(next_uniform(e) < probability)
    elif outcome != 0 and outcome != 1:
        e.impossible_draw = True
        outcome = 1
    e.draws[slot] = outcome
    return outcome == 1


# ---------------------------------------------------------------- start of an episode


def _fresh_episode() -> np.ndarray:
    """The record of an episode that has just begun (SPEC 4); its settings and random stream mean nothing."""
    fresh = np.zeros(1, STATE)
    e = fresh[0]
    e.sessions[USER0, PRIVILEGED] = 1  # red's foothold, which nothing ends
    e.red_access[USER0] = 2
    e.known_ips = e.known_hosts = 1 << USER0
    e.known_subnets = 1 << USER
    e.ot_up = e.ot_pid_known = True
    e.blue_success = e.red_success = UNKNOWN
    e.deployed_on = e.malware_found_on = NONE
    e.red_target = e.red_subnet = e.red_exploit = e.user_target = NONE
    return fresh


FRESH_EPISODE = _fresh_episode().view(np.uint8)  # (RECORD_SIZE,) bytes
RECORD_SIZE = STATE.itemsize
EPISODE_START = dict(STATE.fields or {})["steps"][1]  # the byte of a record from which a new episode is copied


@njit
def meet_red_agent(e, red_agent):
    """Play this episode against `red_agent`, or against one drawn from the mixture if it is FREE."""
    if red_agent == FREE:
        u = next_uniform(e)
        for agent in range(len(RED_AGENTS)):
            if e.red_mixture[agent] > 0.0 and u >= 0.0:  # the last one with any probability takes rounding errors
                red_agent = agent
                u -= e.red_mixture[agent]
    e.red_agent = red_agent
    e.draws[RED_AGENT] = red_agent
