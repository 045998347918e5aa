"""The scripted attackers of the challenge, B_line and Meander, and how they act (SPEC 7)."""

import numpy as np
from numba import njit

from .rules import (  # isort: skip
    bit, discover_network_services, discover_remote_systems, exploit_remote_service, impact,
    privilege_escalate,
)  # fmt: skip
from .scenario import (  # isort: skip
    B_LINE, ENTERPRISE, ENTERPRISE0, ENTERPRISE1, ENTERPRISE2, ENTERPRISE_SERVERS, ESCALATE, EXPLOIT,
    FAILURE, IMPACT, MEANDER, OPERATIONAL, OP_SERVER0, RED_SLEEP, SCAN, SUBNET_HOSTS, SUCCESS, SWEEP,
    UNKNOWN, USER, USER1, USER2, USER3, USER4, host_set,
)  # fmt: skip
from .state import NONE, RED_TARGET, draw_member, lowest_member

USER_TARGETS = host_set(USER1, USER2, USER3, USER4)

# B_line's script: the action of each stage, its target, and the stage to go to when it failed.
ITS_USER_HOST, ITS_ENTERPRISE_HOST = -2, -3
B_LINE_SCRIPT = (
    (SWEEP, USER, 0),
    (SCAN, ITS_USER_HOST, 1),
    (EXPLOIT, ITS_USER_HOST, 2),
    (ESCALATE, ITS_USER_HOST, 2),
    (SCAN, ITS_ENTERPRISE_HOST, 2),
    (EXPLOIT, ITS_ENTERPRISE_HOST, 2),
    (ESCALATE, ITS_ENTERPRISE_HOST, 5),
    (SWEEP, ENTERPRISE, 5),
    (SCAN, ENTERPRISE2, 5),
    (EXPLOIT, ENTERPRISE2, 5),
    (ESCALATE, ENTERPRISE2, 9),
    (SCAN, OP_SERVER0, 9),
    (EXPLOIT, OP_SERVER0, 9),
    (ESCALATE, OP_SERVER0, 12),
    (IMPACT, OP_SERVER0, 13),
)
STAGE_ACTION, STAGE_TARGET, STAGE_AFTER_FAILURE = (np.array(column) for column in zip(*B_LINE_SCRIPT, strict=True))
LAST_STAGE = len(B_LINE_SCRIPT) - 1
FIRST_SCAN_OF_USER, FIRST_OP_SERVER_EXPLOIT = 1, 12


@njit
def red_acts(e):
    """Choose red's action from the result of its last one, then carry it out (SPEC 5, 7)."""
    if e.red_agent == B_LINE:
        b_line_chooses(e)
    elif e.red_agent == MEANDER:
        meander_chooses(e)
    carry_out(e)


@njit
def decide(e, action, target):
    """Write down red's choice; the target is a subnet for a sweep, else a host."""
    e.red_action = action
    e.red_subnet = target if action == SWEEP else NONE
    e.red_target = NONE if action == SWEEP else target


@njit
def carry_out(e):
    """Execute the action red has chosen and keep its result."""
    action, host = e.red_action, e.red_target
    e.red_exploit = NONE
    if action == RED_SLEEP:
        e.red_success = UNKNOWN
    elif action == SWEEP:
        e.red_success = discover_remote_systems(e, e.red_subnet)
    elif action == SCAN:
        e.red_success = discover_network_services(e, host)
    elif action == EXPLOIT:
        e.red_success = exploit_remote_service(e, host)
    elif action == ESCALATE:
        e.red_success = privilege_escalate(e, host)
    else:
        e.red_success = impact(e)


@njit
def b_line_chooses(e):
    """B_line follows a script of 15 stages straight to Op_Server0, stepping back on failure (SPEC 7.1)."""
    if e.red_success == SUCCESS:
        e.stage = min(e.stage + 1, LAST_STAGE)
    else:
        e.stage = STAGE_AFTER_FAILURE[e.stage]
    if e.stage == FIRST_OP_SERVER_EXPLOIT:
        if e.scan_was_empty and not e.op_server_attacked:
            e.stage = FIRST_SCAN_OF_USER  # it never found the server, so it begins again with its user host
        else:
            e.op_server_attacked = True
    if e.stage == FIRST_SCAN_OF_USER and e.user_target == NONE:
        e.user_target = draw_member(e, RED_TARGET, USER_TARGETS)
    target = STAGE_TARGET[e.stage]
    if target == ITS_USER_HOST:
        target = e.user_target
    elif target == ITS_ENTERPRISE_HOST:  # the neighbour that its user host gave away
        target = ENTERPRISE1 if e.user_target == USER1 or e.user_target == USER2 else ENTERPRISE0
    decide(e, STAGE_ACTION[e.stage], target)


@njit
def meander_digests(e):
    """Meander takes back what it noted when choosing, if its last action failed (SPEC 7.2)."""
    if e.red_action == EXPLOIT:
        host = bit(e.red_target)
        if e.red_success == SUCCESS:
            e.host_ip_map |= host
        else:
            e.exploited_ips &= ~host
            doubtful = e.escalated_hosts & SUBNET_HOSTS[OPERATIONAL]
            if doubtful == 0:
                doubtful = e.escalated_hosts & ENTERPRISE_SERVERS
            e.escalated_hosts &= ~doubtful
            e.exploited_ips &= ~doubtful
    elif (e.red_action == ESCALATE or e.red_action == IMPACT) and e.red_success == FAILURE:
        host = bit(e.red_target)
        e.escalated_hosts &= ~host
        e.exploited_ips &= ~(host & e.host_ip_map)


@njit
def meander_chooses(e):
    """Meander takes the network subnet by subnet: the first of five rules with a candidate (SPEC 7.2)."""
    meander_digests(e)
    new_subnets = e.known_subnets & ~e.scanned_subnets
    unscanned = e.known_ips & ~e.scanned_ips
    unescalated = e.known_hosts & ~e.escalated_hosts & ~(e.host_ip_map & ~e.exploited_ips)
    unexploited = e.known_ips & ~e.exploited_ips
    action, target = RED_SLEEP, NONE  # never seen: the real agent raises NotImplementedError then
    if e.escalated_hosts & bit(OP_SERVER0):
        action, target = IMPACT, OP_SERVER0
    elif new_subnets:
        action, target = SWEEP, lowest_member(new_subnets)
        e.scanned_subnets |= bit(target)
    elif unscanned:
        action, target = SCAN, draw_member(e, RED_TARGET, unscanned)
        e.scanned_ips |= bit(target)
    elif unescalated:
        action, target = ESCALATE, draw_member(e, RED_TARGET, unescalated)
        e.escalated_hosts |= bit(target)
    elif unexploited:
        action, target = EXPLOIT, draw_member(e, RED_TARGET, unexploited)
        e.exploited_ips |= bit(target)
    decide(e, action, target)
