"""The rules of Super Mario Bros as its RAM tells them: how a stage starts, what progress, death and goal are.

`MarioGame` plays the cartridge frame by frame on any `NesCore`, hides the frames in which the game ignores
the controller, and reports the same facts on every backend. Addresses are those of the public disassembly of
the game. It knows nothing of rewards, observations or Gymnasium: that is `envs/mario.py`.
"""

from typing import Any

import numpy as np

from envs.nes_common import START
from envs.nes_core import NesCore

STAGES = tuple(f"{world}-{stage}" for world in range(1, 9) for stage in range(1, 5))
LAST_LEVEL = len(STAGES) - 1

_PLAYER_STATE, _FLOAT_STATE, _ENEMIES, _PAGE, _X, _Y_HIGH = 0x0E, 0x1D, slice(0x16, 0x1C), 0x6D, 0x86, 0xB5
_ENEMY_DATA_LOW, _ENEMY_DATA_HIGH, _SWIMMING, _IN_THE_CLOUDS = 0xE9, 0xEA, 0x704, 0x743
_CHANGE_AREA_TIMER, _STATUS, _LIVES, _STAGE, _WORLD = 0x6DE, 0x756, 0x75A, 0x75C, 0x75F
_AREA, _GAME_MODE, _TASK, _PRELEVEL_TIMER = 0x760, 0x770, 0x772, 0x7A0
_SCORE, _COINS, _CLOCK = slice(0x7DE, 0x7E3), slice(0x7ED, 0x7EF), slice(0x7F8, 0x7FB)

_LOSING_A_LIFE, _DYING, _UNDER_CONTROL = 6, 11, 8
_BUSY = (0, 1, 2, 3, 4, 5, 7)  # entering an area, a pipe, a vine or the castle: the controller is ignored
_IN_THE_AIR = (1, 2)  # jumping, falling
_GOALS = (0x2D, 0x31)  # Bowser and the flagpole among the enemies; sliding near anything else is a vine
_TITLE, _VICTORY = 0, 2  # game modes: before a game, after an axe
_PLAYING = 3  # a game's task once a stage has been loaded
_NO_LIVES = 255
_JUMP = 64  # pixels in one decision that no legs can run: a pipe or a maze's loop moved Mario
_MAX_BUSY_FRAMES = 6000

_start_states: dict[tuple[str, str], np.ndarray] = {}  # computed once per process, then only loaded


class MarioGame:
    """One game on one console.

    Args:
        core: the emulator; this object is its only user.
        backend: the emulator's name, which tells start states of different emulators apart.
        landed: count new ground only while Mario stands on something, climbs or swims.
    """

    def __init__(self, core: NesCore, backend: str, landed: bool = False) -> None:
        self.core, self.backend, self.landed = core, backend, landed
        self.stage = ""  # "1-1" to "8-4", or "full"; "" while nothing is being played
        self.level = 0  # 0 for 1-1 to 31 for 8-4
        self.x = self.clock = 0  # Mario's position in pixels; ticks left, a tick being 24 frames
        self.best_x: dict[int, int] = {}  # the furthest x reached in each area of each stage
        self.best_x_of_life: dict[int, int] = {}  # the same since Mario last died
        self.advancing = False  # whether Mario was further than ever in this life when `measure` last looked

    def start(self, stage: str) -> None:
        """Go to the first frame of `stage` in which Mario obeys ("full" starts with 1-1, and goes on from
        there)."""
        key = (self.backend, stage)
        if key not in _start_states:
            self._run_start_screen(stage)
            _start_states[key] = self.core.save()
        self.core.load(_start_states[key])
        self.core.step(0)  # so that there is a picture
        self.stage, self.best_x, self.best_x_of_life = stage, {}, {}
        self.level = _level(self.core.ram.tobytes())
        self.measure()

    def _run_start_screen(self, stage: str) -> None:
        """Press start, and replace the stage the game is about to load; some 120 frames."""
        core = self.core
        core.power_on()
        core.step(0)
        for _ in range(_MAX_BUSY_FRAMES):
            ram = core.ram.tobytes()
            clock = _number(ram[_CLOCK])
            if clock > 0 and ram[_PLAYER_STATE] == _UNDER_CONTROL:
                return
            core.step(START if ram[_GAME_MODE] == _TITLE else 0)  # later on, it would pause the game
            if stage != "full" and clock == 0:
                world, number = int(stage[0]), int(stage[2])
                # in worlds 1, 2, 4 and 7 the short walk into a pipe before the second stage is an area of its own
                area = number + (world in (1, 2, 4, 7) and number >= 2)
                for address, value in ((_WORLD, world), (_STAGE, number), (_AREA, area)):
                    core.poke(address, value - 1)
            core.step(0)
            core.poke(_PRELEVEL_TIMER, 0)
        raise RuntimeError(f"stage {stage} does not start on backend {self.backend} in {2 * _MAX_BUSY_FRAMES} frames")

    def frame(self, buttons: int) -> tuple[bool, bool, bool]:
        """Play one frame, and those after it in which the game ignores the controller.

        Returns:
            (death, goal, waited): whether Mario began to die, whether he reached the flag or the axe, and whether
            frames without buttons followed.
        """
        core = self.core
        core.step(buttons)
        ram = core.ram.tobytes()  # a copy of bytes, once, is quicker to read than single array elements
        below = ram[_Y_HIGH] > 1 and not ram[_IN_THE_CLOUDS]  # a fall from the clouds only leads back to the ground
        death = below or ram[_PLAYER_STATE] in (_LOSING_A_LIFE, _DYING)
        goal = not death and (
            ram[_GAME_MODE] == _VICTORY or (ram[_FLOAT_STATE] == 3 and any(enemy in _GOALS for enemy in ram[_ENEMIES]))
        )
        if self.stage == "full" and death:
            core.poke(_PLAYER_STATE, _LOSING_A_LIFE)  # skip the fall: the next frame takes the life
            core.step(0)
            self.best_x_of_life.clear()
        over = goal and self.level == LAST_LEVEL if self.stage == "full" else death or goal
        return death, goal, not over and self._skip_busy_frames()

    def _skip_busy_frames(self) -> bool:
        """Run until Mario obeys again, shortening the waits: pipes, doors, the castle walk, black screens. Returns
        whether there was anything to wait for."""
        core = self.core
        if 1 < core.ram[_CHANGE_AREA_TIMER] < 255:
            core.poke(_CHANGE_AREA_TIMER, 1)
        for waited in range(_MAX_BUSY_FRAMES):
            ram = core.ram.tobytes()
            busy = ram[_PLAYER_STATE] in _BUSY or ram[_GAME_MODE] == _VICTORY or ram[_TASK] != _PLAYING
            if not busy or ram[_LIVES] == _NO_LIVES:
                return waited > 0
            core.poke(_PRELEVEL_TIMER, 0)
            core.step(0)
        raise RuntimeError(f"Mario did not obey again within {_MAX_BUSY_FRAMES} frames of stage {self.stage}")

    def is_over(self, death: bool, goal: bool) -> bool:
        """Whether the game ended with this frame; a single stage also ends when a warp zone leads out of it. Call it
        after measure(), which knows a new clock by the level that this notes."""
        ram = self.core.ram.tobytes()
        level, self.level = self.level, _level(ram)
        if self.stage == "full":
            return (goal and level == LAST_LEVEL) or ram[_LIVES] == _NO_LIVES
        return death or goal or self.level != level

    def measure(self) -> tuple[int, int]:
        """Return (pixels, ticks) since the last call: ground reached for the first time, and clock ticks
        passed.

        Where Mario's position jumps (a pipe, a maze's loop, a new area) no ground is covered: that counts
        nothing, and only moves the mark up if he comes out ahead of it. A clock wound up for a new life or
        stage counts nothing.
        """
        ram = self.core.ram.tobytes()
        x, level = ram[_PAGE] * 256 + ram[_X], _level(ram)
        # Where an area's enemies stand in the cartridge tells areas apart. (The byte called AreaPointer does not: it
        # is the area that the next pipe leads to, and changes on the way to that pipe.)
        area = level << 16 | ram[_ENEMY_DATA_HIGH] << 8 | ram[_ENEMY_DATA_LOW]
        best, best_of_life = self.best_x.get(area, x), self.best_x_of_life.get(area, x)
        flying = self.landed and ram[_FLOAT_STATE] in _IN_THE_AIR and not ram[_SWIMMING]
        reached = min(best_of_life, x) if flying else x
        self.best_x[area], self.best_x_of_life[area] = max(best, reached), max(best_of_life, reached)
        jumped = abs(x - self.x) > _JUMP
        self.advancing = reached > best_of_life and not jumped
        pixels = 0 if jumped else max(0, reached - best)
        clock = _number(ram[_CLOCK])
        ticks = max(0, self.clock - clock) if level == self.level else 0
        self.x, self.clock = x, clock
        return pixels, ticks

    def facts(self) -> dict[str, int]:
        """Return what the screen's top rows say, and Mario's place and size, as plain integers."""
        ram = self.core.ram.tobytes()
        return {
            "x_pos": self.x,
            "max_x": max(x for area, x in self.best_x.items() if area >> 16 == self.level),
            "time": self.clock,
            "world": ram[_WORLD] + 1,
            "stage": ram[_STAGE] + 1,
            "coins": _number(ram[_COINS]),
            "score": _number(ram[_SCORE]) * 10,
            "life": ram[_LIVES],
            "status": min(ram[_STATUS], 2),
        }

    def get_state(self) -> dict[str, Any]:
        """Return the console's state and this object's counters."""
        counters = {"stage": self.stage, "level": self.level, "x": self.x, "clock": self.clock}
        marks = {"best_x": dict(self.best_x), "best_x_of_life": dict(self.best_x_of_life)}
        return {"backend": self.backend, "core": self.core.save(), **marks, **counters}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `get_state()`.

        Raises:
            ValueError: the state was saved on another backend.
        """
        if state["backend"] != self.backend:
            raise ValueError(
                f"this state was saved on backend {state['backend']!r}, but this environment runs on "
                f"{self.backend!r}; construct it with backend={state['backend']!r}"
            )
        self.core.load(state["core"])
        self.best_x, self.best_x_of_life = dict(state["best_x"]), dict(state["best_x_of_life"])
        self.stage, self.level, self.x, self.clock = (state[name] for name in ("stage", "level", "x", "clock"))


def _level(ram: bytes) -> int:
    """Return the number of the stage that is being played, 0 to 31."""
    return ram[_WORLD] * 4 + ram[_STAGE]


def _number(digits: bytes) -> int:
    """Return a number that the game keeps as one decimal digit per byte."""
    value = 0
    for digit in digits:
        value = value * 10 + digit
    return value
