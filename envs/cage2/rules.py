"""The rules, one function each: what the actions of Blue, Green and red do (SPEC 6, 8).

Every function takes one environment's record `e` (see `state.py`) and changes it in place. Compiled by Numba.
"""

from numba import njit

from .scenario import (  # isort: skip
    ANALYSE, BEST_EXPLOITS_FIRST, CLEAN, DECOYS_AGAINST, DECOY_CHECKS, DECOY_FITS, DECOY_OPENS,
    DETECTION_PROBABILITY, ENTERPRISE0, ENTERPRISE1, ENTERPRISE2, EXPLOIT_NEEDS_ANY, EXPLOIT_PORT,
    FAILURE, FIRST_DECOY, GENUINE, GREEN_ACTS_PROBABILITY, GREEN_TARGETS, HARAKA_RCE, LINK,
    LISTENING, MONITOR, NO_SERVICE, NUM_DECOYS, NUM_EXPLOITS, NUM_HOSTS, OPERATIONAL, OP_SERVER0,
    OTHER_USER, PRIVILEGED, PRIVILEGED_SHELL, REMOVABLE, REMOVE, RESTORE, SLEEP, SSH_BRUTE_FORCE,
    SSH_REFUSED, SSH_SESSION, SUBNET_HOSTS, SUBNET_OF, SUCCESS, SUSPECT, TOP_EXPLOIT_PROBABILITY, UNKNOWN,
    USER0, VSFTPD,
)  # fmt: skip
from .state import (  # isort: skip
    FREE, GREEN_TARGET, NONE, RED_DETECT, RED_ESC_REMOVABLE, RED_EXPLOIT, draw_event, draw_member,
    next_uniform, size_of,
)  # fmt: skip

# ---------------------------------------------------------------- shared facts


@njit
def bit(member):
    """The bit set with this one member."""
    return 1 << int(member)


@njit
def has_session(e, host):
    """Whether red holds any session on the host."""
    return e.sessions[host, REMOVABLE] + e.sessions[host, OTHER_USER] + e.sessions[host, PRIVILEGED] > 0


@njit
def operational_is_reachable(e):
    """Operational is routed only through a session, of any privilege, on an Enterprise server (SPEC 1)."""
    for host in (ENTERPRISE0, ENTERPRISE1, ENTERPRISE2):  # noqa: SIM110  (Numba knows no any())
        if has_session(e, host):
            return True
    return False


@njit
def is_reachable(e, host):
    """User and Enterprise can always be reached from User0, Operational through Enterprise (SPEC 1)."""
    return SUBNET_OF[host] != OPERATIONAL or operational_is_reachable(e)


@njit
def open_ports(e, host):
    """The set of ports on which something listens: genuine services and decoys (SPEC 6.1)."""
    ports = LISTENING[host]
    for decoy in range(NUM_DECOYS):
        if e.decoys[host] & bit(decoy):
            ports |= DECOY_OPENS[decoy]
    return ports


@njit
def record_events(e, host, count, ports):
    """Connections which Blue's monitor sees on `ports` of the host in this step."""
    e.events[host] += count
    e.event_ports[host] |= ports


@njit
def record_port_scan(e, host):
    """One connection for each listening socket; stacked Vsftpd decoys each have their own (SPEC 6.2, 8)."""
    ports = open_ports(e, host)
    single = size_of(LISTENING[host]) + size_of(int(e.decoys[host]) & ~bit(VSFTPD))
    record_events(e, host, single + e.num_vsftpd[host], ports)
    return ports


# ---------------------------------------------------------------- Blue (SPEC 6.1)


@njit
def blue_acts(e, action):
    """Carry out one of Blue's 145 actions and note whether it succeeded (SPEC 2, 6.1)."""
    e.blue_action = action
    e.blue_success = SUCCESS
    e.deployed_on = NONE
    e.malware_found_on = NONE
    if action == SLEEP:
        e.blue_success = UNKNOWN
    elif action != MONITOR:
        block, host = (action - 2) // NUM_HOSTS, (action - 2) % NUM_HOSTS
        if block == ANALYSE:
            analyse(e, host)
        elif block == REMOVE:
            remove(e, host)
        elif block == RESTORE:
            restore(e, host)
        else:
            deploy_decoy(e, host, block - FIRST_DECOY)


@njit
def analyse(e, host):
    """Analyse finds malicious files, even those that a killed shell has left behind (SPEC 6.1)."""
    if e.malware[host]:
        e.malware_found_on = host


@njit
def remove(e, host):
    """Remove kills the user shells whose process Blue has seen; their files stay (SPEC 6.1, 10)."""
    e.sessions[host, REMOVABLE] = 0
    if e.compromised[host] != CLEAN:
        e.compromised[host] = SUSPECT


@njit
def restore(e, host):
    """Restore re-images the host: sessions, decoys and malware go, the OT service starts (SPEC 6.1).

    The restarted OT service has a process number that Impact does not know, so red can never stop it again
    (SPEC 6.4).
    """
    e.sessions[host, REMOVABLE] = 0
    e.sessions[host, OTHER_USER] = 0
    e.sessions[host, PRIVILEGED] = 1 if host == USER0 else 0
    e.decoys[host] = 0
    e.num_vsftpd[host] = 0
    e.malware[host] = False
    e.restored[host] = True
    e.compromised[host] = CLEAN
    if host == OP_SERVER0:
        e.ot_up = True
        e.ot_pid_known = False


@njit
def deploy_decoy(e, host, decoy):
    """A decoy starts if it fits the operating system and the port that it checks is free (SPEC 6.1)."""
    if DECOY_FITS[decoy] & bit(host) and not open_ports(e, host) & DECOY_CHECKS[decoy]:
        e.decoys[host] |= bit(decoy)
        if decoy == VSFTPD:
            e.num_vsftpd[host] += 1
        e.deployed_on = host
    else:
        e.blue_success = FAILURE


# ---------------------------------------------------------------- Green (SPEC 8)


@njit
def green_acts(e):
    """Half of the time, scan the ports of a random User or Enterprise host (SPEC 8)."""
    if not e.green:
        return
    target = e.tape[GREEN_TARGET]
    asleep = next_uniform(e) >= GREEN_ACTS_PROBABILITY if target == FREE else target == NONE
    if not asleep:
        record_port_scan(e, draw_member(e, GREEN_TARGET, GREEN_TARGETS))


# ---------------------------------------------------------------- red: discovery (SPEC 6.2)


@njit
def discover_remote_systems(e, subnet):
    """Red learns every address of a subnet that it can reach, unseen by Blue (SPEC 6.2)."""
    if subnet == OPERATIONAL and not operational_is_reachable(e):
        return FAILURE
    e.known_ips |= SUBNET_HOSTS[subnet]
    return SUCCESS


@njit
def discover_network_services(e, host):
    """Red lists the open ports of a host; the list of an unreachable host stays as it was (SPEC 6.2)."""
    e.scan_was_empty = not is_reachable(e, host)
    if not e.scan_was_empty:
        ports = record_port_scan(e, host)
        if e.leaderboard:  # there, the ports of decoys long gone stay on the list
            ports |= e.ports[host]
        e.ports[host] = ports
        e.scanned[host] = True
    return SUCCESS


# ---------------------------------------------------------------- red: exploits (SPEC 6.3)


@njit
def exploit_options(ports):
    """The set of exploits that red considers for a list of open ports (SPEC 6.3, step 2)."""
    options = 0
    for exploit in range(NUM_EXPLOITS):
        needs_any = EXPLOIT_NEEDS_ANY[exploit]
        if ports & EXPLOIT_PORT[exploit] and (needs_any == 0 or ports & needs_any):
            options |= bit(exploit)
    return options


@njit
def choose_exploit(e, host):
    """The best exploit for red's port list with probability 0.75, else another; NONE if none (SPEC 6.3)."""
    options = exploit_options(e.ports[host])
    if options == 0:
        return NONE
    best = 0
    while not options & bit(BEST_EXPLOITS_FIRST[best]):
        best += 1
    top = BEST_EXPLOITS_FIRST[best]
    if options == bit(top):
        return top
    if e.tape[RED_EXPLOIT] != FREE:
        return draw_member(e, RED_EXPLOIT, options)
    if next_uniform(e) >= TOP_EXPLOIT_PROBABILITY:
        return draw_member(e, RED_EXPLOIT, options & ~bit(top))
    e.draws[RED_EXPLOIT] = top
    return top


@njit
def exploit_remote_service(e, host):
    """Choose an exploit, connect, and meet a genuine service, a decoy or nothing (SPEC 6.3)."""
    if not e.scanned[host]:
        return FAILURE
    exploit = choose_exploit(e, host)
    e.red_exploit = exploit
    if exploit == NONE or not is_reachable(e, host):
        return FAILURE
    genuine = GENUINE[exploit, host]
    port = EXPLOIT_PORT[exploit]
    if genuine == NO_SERVICE:
        if e.decoys[host] & DECOYS_AGAINST[exploit]:
            record_events(e, host, 10 if exploit == SSH_BRUTE_FORCE else 2, port)
        return FAILURE
    if genuine == SSH_REFUSED:
        record_events(e, host, 10, port)
        return FAILURE
    if genuine == SSH_SESSION:
        record_events(e, host, 11, port)
        e.sessions[host, OTHER_USER] += 1
    else:
        record_events(e, host, 1, port)
        if e.leaderboard and exploit == HARAKA_RCE and e.restored[host]:
            return FAILURE  # there, the backup image of the mail server is not the vulnerable one
        open_reverse_shell(e, host, genuine == PRIVILEGED_SHELL)
    e.known_hosts |= bit(host)
    return SUCCESS


@njit
def open_reverse_shell(e, host, privileged):
    """A shell that calls home to red's port 4444, which Blue's monitor mostly notices (SPEC 6.3)."""
    detected = draw_event(e, RED_DETECT, DETECTION_PROBABILITY)
    if detected:
        e.events[host] += 1
        e.shell_seen[host] = True
    if privileged:
        e.sessions[host, PRIVILEGED] += 1
    elif detected:
        e.sessions[host, REMOVABLE] += 1  # Blue knows the process, so it can remove it
    else:
        e.sessions[host, OTHER_USER] += 1
    e.malware[host] = True


# ---------------------------------------------------------------- red: escalation and impact (SPEC 6.4)


@njit
def privilege_escalate(e, host):
    """Raise a user session to privileged unless there is one; learn the linked address (SPEC 6.4)."""
    if not has_session(e, host):
        return FAILURE
    if e.sessions[host, PRIVILEGED] == 0:
        removable, other = e.sessions[host, REMOVABLE], e.sessions[host, OTHER_USER]
        from_removable = removable > 0
        if removable > 0 and other > 0:
            from_removable = draw_event(e, RED_ESC_REMOVABLE, removable / (removable + other))
        e.sessions[host, REMOVABLE if from_removable else OTHER_USER] -= 1
        e.sessions[host, PRIVILEGED] += 1
        e.malware[host] = True
    e.known_ips |= bit(host)
    e.known_subnets |= bit(SUBNET_OF[host])
    if LINK[host] >= 0:
        e.known_ips |= bit(LINK[host])
    if host == OP_SERVER0:
        e.ot_known = True
    return SUCCESS


@njit
def impact(e):
    """Stop the OT service of Op_Server0; after a Restore of it, this only seems to work (SPEC 6.4)."""
    if not (has_session(e, OP_SERVER0) and e.ot_known):
        return FAILURE
    if e.ot_pid_known:
        e.ot_up = False
    return SUCCESS
