"""What an environment's record says, for people: a dict, a text table, and a picture of the network."""

from functools import cache
from typing import Any

import numpy as np

from .scenario import (  # isort: skip
    ACCESS_LEVELS, ACTION_NAMES, ACTIVITIES, COMPROMISED, DECOYS, ENTERPRISE, EXPLOITS, FAILURE, HOSTS,
    RED_ACTIONS, RED_AGENTS, SUBNETS, SUBNET_OF, USER, USER0,
)  # fmt: skip

AGENT_TEXTS, ACTION_TEXTS = np.array(RED_AGENTS, object), np.array(ACTION_NAMES, object)
RED_ACTION = ["red_action", "red_subnet", "red_target", "red_exploit", "red_success"]  # what makes up its text


def describe(states: np.ndarray) -> dict[str, np.ndarray]:
    """The true states of environments after their last step, from their records `states` (N,).

    Keys: `red_agent`, `blue_action`, `red_action`, (N,) object arrays of text; `red_access` (N, 13) uint8, 0 none, 1
    user, 2 privileged; `red_sessions` (N, 13, 3) int32, red's removable user, other user and privileged sessions;
    `clearable` (N, 13) bool, whether Blue can end a red session there (see `Cage2VecEnv.true_state`); `decoys` (N, 13)
    uint8, bit k for decoy k of `DECOYS`. Arrays are copies.
    """
    return {
        "red_agent": AGENT_TEXTS[states["red_agent"]],
        "blue_action": ACTION_TEXTS[states["blue_action"]],
        "red_action": np.array([red_action_text(*fields) for fields in states[RED_ACTION].tolist()], object),
        "red_access": states["red_access"].copy(),
        "clearable": states["clearable"].astype(np.bool_),
        "red_sessions": states["sessions"].copy(),
        "decoys": states["decoys"].copy(),
    }


@cache
def red_action_text(action: int, subnet: int, target: int, exploit: int, success: int) -> str:
    """Red's last action, its target, its exploit and whether it failed, as one phrase."""
    text = RED_ACTIONS[action]
    if subnet >= 0:
        text += f" {SUBNETS[subnet]}"
    if target >= 0:
        text += f" {HOSTS[target]}"
    if exploit >= 0:
        text += f" by {EXPLOITS[exploit].name}"
    return text + (" (failed)" if success == FAILURE else "")


def decoy_names(decoys: int) -> list[str]:
    """Names of the decoys in a bit set."""
    return [decoy.name for k, decoy in enumerate(DECOYS) if decoys >> k & 1]


def rewards_of(state: Any) -> tuple[float, float]:
    """The last step's reward and the episode's return; 0 - x, since -0 is shown as -0.0."""
    return 0.0 - state.cost_tenths / 10, 0.0 - state.episode_cost_tenths / 10


def render_ansi(state: Any) -> str:
    """A text table: for each host, what red holds, which decoys stand, and what Blue sees."""
    reward, episode_return = rewards_of(state)
    lines = [
        f"Step {state.steps} of {state.max_steps}, red agent {RED_AGENTS[state.red_agent]}, "
        f"reward {reward:.1f}, return {episode_return:.1f}",
        f"Blue: {ACTION_NAMES[state.blue_action]}{' (failed)' if state.blue_success == FAILURE else ''}",
        f"Red:  {red_action_text(*state[RED_ACTION].item())}",
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


# ---------------------------------------------------------------- the picture

WIDTH, HEIGHT = 760, 440
_SCALE = 2  # drawn twice as large and reduced, for smooth edges
_PANEL_X = {"User": 16, "Enterprise": 266, "Operational": 516}
_PANEL_WIDTH, _CARD_HEIGHT, _FIRST_CARD_Y = 228, 56, 92
_INK, _FAINT, _PAPER, _PANEL, _CARD = "#1f2933", "#7b8794", "#ffffff", "#eef1f5", "#ffffff"
_RED, _BLUE = "#d64545", "#2563c9"
_ACCESS_COLOURS = ("#57ae5b", "#f0a431", "#d64545")  # red holds nothing, a user session, the host
_BELIEF_COLOURS = ("#cbd2d9", "#8a6fc2", "#f0a431", "#d64545")  # Blue remembers No, Unknown, User, Privileged


def _card_corner(host: int) -> tuple[int, int]:
    row = sum(SUBNET_OF[other] == SUBNET_OF[host] for other in range(host))
    return _PANEL_X[SUBNETS[SUBNET_OF[host]]] + 8, _FIRST_CARD_Y + row * (_CARD_HEIGHT + 6)


def _attack_path(target: int) -> list[tuple[float, float]]:
    """Corners of the line from User0 to another host, through the gaps between the subnets."""
    x, y = _card_corner(USER0)
    start = (x + _PANEL_WIDTH - 16, y + _CARD_HEIGHT / 2)
    gap = x + _PANEL_WIDTH + 3
    x, y = _card_corner(target)
    middle = y + _CARD_HEIGHT / 2
    if SUBNET_OF[target] == USER:
        return [start, (gap, start[1]), (gap, middle), (x + _PANEL_WIDTH - 12, middle)]
    if SUBNET_OF[target] == ENTERPRISE:
        return [start, (gap, start[1]), (gap, middle), (x - 4, middle)]
    above, next_gap = _FIRST_CARD_Y - 9, gap + 250
    corners = [(gap, start[1]), (gap, above), (next_gap, above), (next_gap, middle)]
    return [start, *corners, (x - 4, middle)]


def render_rgb(state: Any) -> np.ndarray:
    """The network as a picture (440, 760, 3) uint8.

    Each host is a card: the bar at its left is what red holds (green nothing, orange a user session, red the
    host), the dot at its right what Blue remembers, the word beside it what Blue has just seen. Decoys are
    named in blue. Frames mark the targets of the last actions, and an arrow leads from User0 to red's.
    """
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * _SCALE, HEIGHT * _SCALE), _PAPER)
    pen = ImageDraw.Draw(image)

    def write(x: float, y: float, text: str, colour: str = _INK, size: int = 12, anchor: str = "lm") -> None:
        font = ImageFont.load_default(size * _SCALE)
        pen.text((x * _SCALE, y * _SCALE), text, colour, font, anchor=anchor)

    def box(x: float, y: float, width: float, height: float, fill: str, frame: str | None = None) -> None:
        corners = tuple(_SCALE * value for value in (x, y, x + width, y + height))
        pen.rounded_rectangle(corners, 6 * _SCALE, fill, frame, 2 * _SCALE if frame else 0)

    def line(points: list[tuple[float, float]], colour: str, width: int) -> None:
        pen.line([(x * _SCALE, y * _SCALE) for x, y in points], colour, width * _SCALE, joint="curve")

    def arrow(points: list[tuple[float, float]], colour: str) -> None:
        line(points, colour, 2)
        (x, y), back = points[-1], 7 if points[-2][0] > points[-1][0] else -7
        head = ((x, y), (x + back, y - 5), (x + back, y + 5))
        pen.polygon([(px * _SCALE, py * _SCALE) for px, py in head], colour)

    write(16, 22, f"Step {state.steps} / {state.max_steps}", size=17)
    write(160, 22, f"red agent {RED_AGENTS[state.red_agent]}", _FAINT, 13)
    reward, episode_return = rewards_of(state)
    write(WIDTH - 16, 22, f"return {episode_return:.1f}", size=17, anchor="rm")
    write(WIDTH - 160, 22, f"reward {reward:.1f}", _FAINT, 13, anchor="rm")
    line([(130, 65), (WIDTH - 130, 65)], _FAINT, 3)  # the backbone between the subnets
    for subnet, x in _PANEL_X.items():
        box(x, 44, _PANEL_WIDTH, 360, _PANEL)
        write(x + _PANEL_WIDTH / 2, 66, subnet, size=14, anchor="mm")

    blue_target = (state.blue_action - 2) % len(HOSTS) if state.blue_action >= 2 else None
    for host, name in enumerate(HOSTS):
        x, y = _card_corner(host)
        box(x, y, _PANEL_WIDTH - 16, _CARD_HEIGHT, _CARD, _BLUE if host == blue_target else None)
        box(x + 5, y + 7, 7, _CARD_HEIGHT - 14, _ACCESS_COLOURS[state.red_access[host]])
        write(x + 20, y + 17, name, size=13)
        write(x + 20, y + 40, " ".join(decoy_names(state.decoys[host])), _BLUE, 10)
        seen = ACTIVITIES[state.activity[host]]
        write(x + 190, y + 17, seen if seen != "None" else "", _FAINT, 11, anchor="rm")
        box(x + 196, y + 12, 10, 10, _BELIEF_COLOURS[state.compromised[host]])
        if name == "Op_Server0" and not state.ot_up:
            write(x + 190, y + 40, "OT down", _RED, 11, anchor="rm")

    if state.red_target >= 0:
        x, y = _card_corner(state.red_target)
        corners = tuple(_SCALE * v for v in (x - 3, y - 3, x + _PANEL_WIDTH - 13, y + _CARD_HEIGHT + 3))
        pen.rounded_rectangle(corners, 8 * _SCALE, None, _RED, 2 * _SCALE)
        if state.red_target != USER0:
            arrow(_attack_path(state.red_target), _RED)

    write(276, 358, "Blue believes", _FAINT, 11)
    for x, text, colour in zip((276, 312, 376, 420), COMPROMISED, _BELIEF_COLOURS, strict=True):
        box(x, 374, 10, 10, colour)
        write(x + 13, 379, text, _FAINT, 10)
    write(526, 358, "Red holds", _FAINT, 11)
    for k, (text, colour) in enumerate(zip(ACCESS_LEVELS, _ACCESS_COLOURS, strict=True)):
        box(526 + 60 * k, 370, 6, 18, colour)
        write(536 + 60 * k, 379, text, _FAINT, 10)

    blue_text = ACTION_NAMES[state.blue_action] + (" (failed)" if state.blue_success == FAILURE else "")
    write(16, 422, "Blue", _BLUE, 13)
    write(52, 422, blue_text, size=13)
    write(266, 422, "Red", _RED, 13)
    write(298, 422, red_action_text(*state[RED_ACTION].item()), size=13)
    return np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS))
