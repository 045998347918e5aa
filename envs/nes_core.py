"""Three NES emulators behind one small interface, loaded without gym, without patches and without torch.

    core = make_core("nes_py")            # or "fceumm"; `available_backends()` says what this Python has
    core.power_on()
    core.step(RIGHT | A)                  # one frame, 1/60 s
    x = core.ram[0x6D] * 256 + core.ram[0x86]
    state = core.save()                   # a uint8 array; core.load(state) continues bit for bit

| backend  | emulator                                    | needs                                | frames/s   |
|----------|--------------------------------------------|-------------------------------------|------------|
| `nes_py` | nes-py 8 through ctypes (Python 3.11, 3.12) | `pip install nes-py` (and g++)       | about 900  |
| `nes_py` | the same, optimised by the Makefile         | `make nes_py`                        | about 1700 |
| `nes_py` | nes-py 9, a Cython class (Python >= 3.13)   | `pip install nes-py`                 | about 1300 |
| `fceumm` | FCEUmm, the core inside stable-retro        | `pip install --no-deps stable-retro` | about 5200 |

nes-py 8 and 9 compute the same RAM bit for bit; FCEUmm's timing differs, so a policy belongs to the backend
it was trained on. The cartridge is the file that gym-super-mario-bros carries; neither package is imported
for it, only found.
"""

import ctypes
import weakref
from functools import cache
from typing import Any, Protocol

import numpy as np
from PIL import Image

from envs.fceumm_core import FceummCore
from envs.nes_common import (
    GRAY,
    INSTALL,
    RAM_SIZE,
    SCREEN_HEIGHT,
    SCREEN_WIDTH,
    MarioBackendError,
    library_path,
    rom_path,
    view,
)


class NesCore(Protocol):
    """What an environment needs from an emulator."""

    @property
    def ram(self) -> np.ndarray:
        """(2048,) uint8: the console's work RAM, live. Write with `poke`, so that `save` knows of it."""

    def power_on(self) -> None:
        """Start the cartridge as if the console had just been switched on (always the same way)."""

    def step(self, buttons: int) -> None:
        """Emulate one frame with these buttons held (a sum of `A`, `B`, `START`, ..., `RIGHT`)."""

    def poke(self, address: int, value: int) -> None:
        """Write one byte of RAM."""

    def save(self) -> np.ndarray:
        """Return the whole machine as a one-dimensional uint8 array that any process can `load`."""

    def load(self, state: np.ndarray) -> None:
        """Continue from a saved machine, bit for bit. The picture is valid again after the next step."""

    def rgb(self) -> Image.Image:
        """Return the picture of the last frame stepped, 256 x 240, mode RGB."""

    def gray(self) -> Image.Image:
        """Return the last frame stepped in shades of grey (`GRAY`), 256 x 240, mode L."""

    def close(self) -> None:
        """Give the emulator's memory back."""


def available_backends() -> list[str]:
    """Return the backends installed for this Python, the fastest first; [] without the cartridge."""
    try:
        rom_path()
    except MarioBackendError:
        return []
    found = {"fceumm": library_path("fceumm"), "nes_py": library_path("nes_py") or library_path("nes_py9")}
    return [name for name, library in found.items() if library is not None]


def resolve_backend(backend: str) -> str:
    """Turn "auto" into a backend's name: nes_py, which a plain install brings, before the optional fceumm.

    Raises:
        ValueError: the name is none of "auto", "nes_py", "fceumm".
        MarioBackendError: it is not installed.
    """
    if backend not in ("auto", *INSTALL):
        raise ValueError(f"backend={backend!r} is unknown; choose one of 'auto', 'nes_py', 'fceumm'")
    rom_path()
    wanted = ["nes_py", "fceumm"] if backend == "auto" else [backend]
    for name in wanted:
        if name in available_backends():
            return name
    raise MarioBackendError(f"no emulator for backend={backend!r} in this Python: {INSTALL[wanted[0]]}")


def make_core(backend: str = "auto") -> NesCore:
    """Return a new emulator with the cartridge inserted, not yet switched on; see `resolve_backend`."""
    name = resolve_backend(backend)
    try:
        return FceummCore() if name == "fceumm" else NesPyCore()
    except (OSError, ImportError, AttributeError) as error:
        raise MarioBackendError(f"the {name} emulator does not load ({error}); {INSTALL[name]}") from error


class NesPyCore:
    """nes-py, versions 8 and 9.

    nes-py can copy its state to one slot inside itself, but offers no way to take it out. So what `save`
    returns is the console's whole input history since it was switched on: one uint32 a frame. The emulator is
    deterministic, so that replaying it is exact (some 0.03 s for a stage's start). The slot makes the common case
    quick: `load` keeps the last state it loaded there, and returns to it in microseconds.
    """

    _POKE = 1 << 31  # history entries with this bit are RAM writes: address << 8 | value; others are buttons

    def __init__(self) -> None:
        self._history: list[int] = []
        self._slot: list[int] | None = None
        self._emulator: Any = None
        self._insert_cartridge()

    def _insert_cartridge(self) -> None:
        self.close()
        self._emulator = _NesPy8() if library_path("nes_py") else _NesPy9()

    @property
    def ram(self) -> np.ndarray:
        return self._emulator.ram

    def power_on(self) -> None:
        if self._history or self._emulator is None:  # the reset button leaves RAM as it is, so take a new console
            self._insert_cartridge()
        self._emulator.reset()
        self._history, self._slot = [], None

    def step(self, buttons: int) -> None:
        self._history.append(buttons)
        self._emulator.step(buttons)

    def poke(self, address: int, value: int) -> None:
        self._history.append(self._POKE | address << 8 | value)
        self.ram[address] = value

    def save(self) -> np.ndarray:
        return np.array(self._history, np.uint32).view(np.uint8)

    def load(self, state: np.ndarray) -> None:
        history = np.ascontiguousarray(state).view(np.uint32).tolist()
        known = 0 if self._slot is None else len(self._slot)
        if known and history[:known] == self._slot:
            self._emulator.restore()
            self._history = history[:known]
            self._replay(history[known:])
        else:
            if history != self._history or self._emulator is None:  # else it is in that state already
                self.power_on()
                self._replay(history)
            self._emulator.backup()
            self._slot = history

    def _replay(self, history: list[int]) -> None:
        for entry in history:
            if entry & self._POKE:
                self.poke(entry >> 8 & 0x7FF, entry & 0xFF)
            else:
                self.step(entry)

    def rgb(self) -> Image.Image:
        return self._emulator.rgb()

    def gray(self) -> Image.Image:
        return self._emulator.rgb().convert("L", GRAY)

    def close(self) -> None:
        if self._emulator is not None:
            self._emulator.close()
        self._emulator = self._slot = None


@cache
def _nes_py8_library() -> ctypes.CDLL:
    """Load nes-py 8's C library, which lets go of the GIL, so that two threads can run an emulator each."""
    library = ctypes.CDLL(str(library_path("nes_py")))
    pointer = ctypes.c_void_p
    library.Initialize.argtypes, library.Initialize.restype = [ctypes.c_wchar_p], pointer
    library.Controller.argtypes, library.Controller.restype = [pointer, ctypes.c_uint], pointer
    for name in ("Screen", "Memory", "Reset", "Step", "Backup", "Restore", "Close"):
        function = getattr(library, name)
        function.argtypes, function.restype = [pointer], pointer if name in ("Screen", "Memory") else None
    return library


class _NesPy8:
    """nes-py 8.x: a C++ console behind nine C functions."""

    def __init__(self) -> None:
        self._library = _nes_py8_library()
        console = self._library.Initialize(str(rom_path()))
        self._console = ctypes.c_void_p(console)
        self.ram = view(self._library.Memory(console), RAM_SIZE)
        self._screen = view(self._library.Screen(console), SCREEN_HEIGHT * SCREEN_WIDTH * 4)
        self._buttons = view(self._library.Controller(console, 0), 1)
        self._step = self._library.Step
        self.close = weakref.finalize(self, self._library.Close, self._console)
        self.close.atexit = False

    def step(self, buttons: int) -> None:
        self._buttons[0] = buttons
        self._step(self._console)

    def reset(self) -> None:
        self._library.Reset(self._console)

    def backup(self) -> None:
        self._library.Backup(self._console)

    def restore(self) -> None:
        self._library.Restore(self._console)

    def rgb(self) -> Image.Image:
        return Image.frombuffer("RGB", (SCREEN_WIDTH, SCREEN_HEIGHT), self._screen, "raw", "BGRX", 0, 1)


class _NesPy9:
    """nes-py 9.x: the same console as a Cython class."""

    def __init__(self) -> None:
        from nes_py._native import NativeEmulator

        self._console = NativeEmulator(str(rom_path()))
        self.ram = self._console.ram_buffer()
        self.step = self._console.frame_advance
        self.reset = self._console.reset
        self.backup = self._console.backup
        self.restore = self._console.restore
        self.close = self._console.close

    def rgb(self) -> Image.Image:
        pixels = self._console.copy_screen_rgb()
        return Image.frombuffer("RGB", (SCREEN_WIDTH, SCREEN_HEIGHT), pixels, "raw", "RGB", 0, 1)
