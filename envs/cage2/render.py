"""What an environment's record says, for people: a dict, a text table, and a picture of the network."""

from typing import Any

import numpy as np

from .scenario import (
    ACCESS_LEVELS, ACTION_NAMES, ACTIVITIES, COMPROMISED, DECOYS, EXPLOITS, FAILURE, HOSTS, RED_ACTIONS, RED_AGENTS,
    SUBNET_OF, SUBNETS,
)  # fmt: skip


def describe(state: Any) -> dict[str, Any]:
    """The true state of one environment after its last step.

    Keys: `red_agent`, `blue_action`, `red_action` as text; `red_access` (13,) uint8, 0 none, 1 user, 2 privileged;
    `red_sessions` (13, 3) int32, red's removable user, other user and privileged sessions; `decoys` (13,) uint8, bit k for
    decoy k of `DECOYS`. Arrays are copies.
    """
    return {
        "red_agent": RED_AGENTS[state.red_agent],
        "blue_action": ACTION_NAMES[state.blue_action],
        "red_action": red_action_text(state),
        "red_access": state.red_access.copy(),
        "red_sessions": state.sessions.copy(),
        "decoys": state.decoys.copy(),
    }


def red_action_text(state: Any) -> str:
    """Red's last action, its target, its exploit and whether it failed, as one phrase."""
    text = RED_ACTIONS[state.red_action]
    if state.red_subnet >= 0:
        text += f" {SUBNETS[state.red_subnet]}"
    if state.red_target >= 0:
        text += f" {HOSTS[state.red_target]}"
    if state.red_exploit >= 0:
        text += f" by {EXPLOITS[state.red_exploit].name}"
    return text + (" (failed)" if state.red_success == FAILURE else "")


def decoy_names(decoys: int) -> list[str]:
    """Names of the decoys in a bit set."""
    return [decoy.name for k, decoy in enumerate(DECOYS) if decoys >> k & 1]


def headline(state: Any) -> str:
    """Step, red agent and the reward of the last step."""
    reward = state.cost_tenths / -10
    return f"Step {state.steps} of {state.max_steps}   red agent {RED_AGENTS[state.red_agent]}   reward {reward:.1f}"


def render_ansi(state: Any) -> str:
    """A text table: for each host, what red holds, which decoys stand, and what Blue sees."""
    lines = [
        headline(state),
        f"Blue: {ACTION_NAMES[state.blue_action]}{' (failed)' if state.blue_success == FAILURE else ''}",
        f"Red:  {red_action_text(state)}",
        f"{'Host':<12}{'Subnet':<13}{'Red holds':<12}{'Blue sees':<10}{'Remembers':<12}Decoys",
    ]
    for host, name in enumerate(HOSTS):
        lines.append(
            f"{name:<12}{SUBNETS[SUBNET_OF[host]]:<13}{ACCESS_LEVELS[state.red_access[host]]:<12}"
            f"{ACTIVITIES[state.activity[host]]:<10}{COMPROMISED[state.compromised[host]]:<12}"
            f"{', '.join(decoy_names(state.decoys[host]))}".rstrip()
        )
    if not state.ot_up:
        lines.append("The OT service of Op_Server0 is down: -10 a step.")
    return "\n".join(lines)


def render_rgb(state: Any) -> np.ndarray:
    raise NotImplementedError
