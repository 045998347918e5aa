"""What a step costs and what Blue sees of it (SPEC 3, 9, 10), one record `e` at a time like `rules.py`."""

from numba import njit

from .scenario import (  # isort: skip
    ACTIVITY_BITS, COMPROMISED_BITS, EXPLOITED, NUM_HOSTS, OTHER_USER, OT_DOWN_COST, PRIVILEGED,
    PRIVILEGED_COST, PRIVILEGED_LEVEL, QUIET, REMOVABLE, RESTORE, RESTORE_COST, SCANNED, USER0, USER_LEVEL,
)  # fmt: skip
from .state import size_of

# ---------------------------------------------------------------- reward (SPEC 9)


@njit
def settle_costs(e):
    """The price of this step in tenths, and the derived views of who holds what (SPEC 9)."""
    cost = 0 if e.ot_up else OT_DOWN_COST
    if e.blue_action >= 2 + RESTORE * NUM_HOSTS:
        cost += RESTORE_COST
    for host in range(NUM_HOSTS):
        user = e.sessions[host, REMOVABLE] + e.sessions[host, OTHER_USER]
        privileged = e.sessions[host, PRIVILEGED]
        if privileged > 0:
            cost += PRIVILEGED_COST[host]
        e.red_access[host] = 2 if privileged > 0 else int(user > 0)
        foothold = 1 if host == USER0 else 0
        e.clearable[host] = user + privileged > foothold
    e.cost_tenths = cost
    e.episode_cost_tenths += cost


# ---------------------------------------------------------------- observation (SPEC 3, 10)


@njit
def activity_shown(e, host):
    """What the monitor makes of the connections of this step: the first rule of SPEC 10 that applies."""
    deployed = e.deployed_on == host
    num_events = e.events[host] + deployed
    if num_events == 0:
        return QUIET
    if e.cardiff and e.events[host] == 0:
        return QUIET
    num_ports = size_of(e.event_ports[host]) + e.shell_seen[host]  # the shell's own port is a fresh one
    if num_events >= 3 and num_ports >= 3:
        return SCANNED
    if e.shell_seen[host]:
        return EXPLOITED
    if num_events >= 3 and num_ports == 1:
        return EXPLOITED
    if deployed and not e.cardiff:
        return QUIET
    return SCANNED


@njit
def observe(e, out):
    """Update the wrapper's memory of compromised hosts; write 52 observation bits to `out` (SPEC 3, 10)."""
    for host in range(NUM_HOSTS):
        activity = activity_shown(e, host)
        e.activity[host] = activity
        if activity == EXPLOITED:
            e.compromised[host] = USER_LEVEL
        if e.malware_found_on == host:
            e.compromised[host] = PRIVILEGED_LEVEL
        level = e.compromised[host]
        out[4 * host] = ACTIVITY_BITS[activity, 0]
        out[4 * host + 1] = ACTIVITY_BITS[activity, 1]
        out[4 * host + 2] = COMPROMISED_BITS[level, 0]
        out[4 * host + 3] = COMPROMISED_BITS[level, 1]
