"""FCEUmm, a fast and exact NES emulator, through the libretro core that the stable-retro package carries.

stable-retro is not imported, only found: its core is called through libretro's C interface, in which the core
calls the frontend back for the controller's buttons and hands it each frame. The numbers below are those of
libretro.h. See `NesCore` in `envs/nes_core.py` for what a core does. A restored console repeats RAM and pictures bit
for bit; the one thing that may differ is the noise generator's phase, which can only be heard.
"""

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from envs.nes_common import (
    DOWN,
    GRAY,
    LEFT,
    RAM_SIZE,
    RIGHT,
    SCREEN_HEIGHT,
    SCREEN_WIDTH,
    SELECT,
    START,
    UP,
    A,
    B,
    MarioBackendError,
    library_path,
    rom_path,
    view,
)


class _GameInfo(ctypes.Structure):
    _fields_ = [
        ("path", ctypes.c_char_p),
        ("data", ctypes.c_char_p),
        ("size", ctypes.c_size_t),
        ("meta", ctypes.c_char_p),
    ]


class _Variable(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char_p), ("value", ctypes.c_char_p)]


class _FceummLibrary:
    """The FCEUmm library as a libretro frontend sees it: one console, kept in the process's global
    variables."""

    _OPTIONS = {b"fceumm_overscan": b"disabled"}  # else it crops the screen's border, which nes-py shows
    _JOYPAD = (B, 0, SELECT, START, UP, DOWN, LEFT, RIGHT, A)  # our bit for each of libretro's button numbers

    def __init__(self) -> None:
        # PyDLL keeps the GIL: a frame calls back into Python some twenty times, and taking the GIL anew for
        # each would wait for every other thread of the process.
        self._library = library = ctypes.PyDLL(str(library_path("fceumm")))
        self.owner: FceummCore | None = None
        self._buttons = 0
        self._video = (0, 0)  # address and bytes per row of the last frame, RGB 5-6-5
        number, size, address = ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
        callbacks = {
            "environment": ctypes.PYFUNCTYPE(ctypes.c_bool, number, address)(self._environment),
            "video_refresh": ctypes.PYFUNCTYPE(None, address, number, number, size)(self._video_refresh),
            "input_poll": ctypes.PYFUNCTYPE(None)(lambda: None),
            "input_state": ctypes.PYFUNCTYPE(ctypes.c_int16, *[number] * 4)(self._input_state),
            "audio_sample": ctypes.PYFUNCTYPE(None, ctypes.c_int16, ctypes.c_int16)(lambda left, right: None),
            "audio_sample_batch": ctypes.PYFUNCTYPE(size, address, size)(lambda samples, count: count),
        }
        self._keep_alive: list[Any] = [callbacks]
        for name, callback in callbacks.items():
            getattr(library, f"retro_set_{name}")(callback)
        library.retro_init()
        library.retro_load_game.restype = ctypes.c_bool
        rom = rom_path().read_bytes()
        game = _GameInfo(str(rom_path()).encode(), rom, len(rom), None)
        self._keep_alive += [game, rom]
        if not library.retro_load_game(ctypes.byref(game)):
            raise MarioBackendError(f"FCEUmm does not accept the cartridge {rom_path()}")
        library.retro_get_memory_data.restype = ctypes.c_void_p
        library.retro_serialize_size.restype = ctypes.c_size_t
        library.retro_serialize.argtypes = library.retro_unserialize.argtypes = [address, size]
        library.retro_serialize.restype = library.retro_unserialize.restype = ctypes.c_bool
        self.ram = view(library.retro_get_memory_data(number(2)), RAM_SIZE)  # RETRO_MEMORY_SYSTEM_RAM
        self._run = library.retro_run
        self._escaped: BaseException | None = None
        self.state_size = library.retro_serialize_size()
        self.first_state = self.save()
        five, six = (np.arange(32) * 255 + 15) // 31, (np.arange(64) * 255 + 31) // 63
        color = np.arange(1 << 16)
        rgb = np.stack([five[color >> 11], six[color >> 5 & 63], five[color & 31]], -1).astype(np.uint8)
        self.to_rgb = np.concatenate([rgb[:, ::-1], np.zeros_like(rgb[:, :1])], -1).view(np.uint32)[:, 0]
        self.to_gray = np.asarray(Image.fromarray(rgb[None]).convert("L", GRAY))[0].copy()

    def _environment(self, command: int, data: int) -> bool:
        if command == 10:  # SET_PIXEL_FORMAT: accept RGB 5-6-5
            return ctypes.cast(data, ctypes.POINTER(ctypes.c_int))[0] == 2
        if command == 15:  # GET_VARIABLE
            variable = ctypes.cast(data, ctypes.POINTER(_Variable))[0]
            if variable.key in self._OPTIONS:
                variable.value = self._OPTIONS[variable.key]
                return True
        return False

    def _video_refresh(self, address: int, width: int, height: int, pitch: int) -> None:
        self._video = (address, pitch)

    def _input_state(self, port: int, device: int, index: int, button: int) -> int:
        return int(port == 0 and device == 1 and button < 9 and self._buttons & self._JOYPAD[button] != 0)

    def run(self, buttons: int) -> None:
        """Emulate one frame.

        A signal that arrives meanwhile (Ctrl-C) has its Python handler run in one of the callbacks, and what it raises
        cannot pass through C: ctypes hands it to `sys.unraisablehook`, from where it is raised again here.
        """
        self._buttons = buttons
        self._hook, sys.unraisablehook = sys.unraisablehook, self._catch
        try:
            self._run()
        finally:
            sys.unraisablehook = self._hook
        if self._escaped is not None:
            escaped, self._escaped = self._escaped, None
            raise escaped

    def _catch(self, unraisable: Any) -> None:
        if "ctypes callback" in (unraisable.err_msg or ""):
            self._escaped = unraisable.exc_value
        else:  # of a destructor, say, that happened to run now: not this frame's affair
            self._hook(unraisable)

    def save(self) -> np.ndarray:
        state = np.empty(self.state_size, np.uint8)
        if not self._library.retro_serialize(state.ctypes.data, self.state_size):
            raise RuntimeError(f"FCEUmm failed to save its state of {self.state_size} bytes")
        return state

    def load(self, state: np.ndarray) -> None:
        state = np.ascontiguousarray(state, np.uint8)
        if state.size != self.state_size or not self._library.retro_unserialize(state.ctypes.data, state.size):
            raise ValueError(f"no FCEUmm state: it has {state.size} bytes, this FCEUmm writes {self.state_size}")

    def picture(self, table: np.ndarray) -> np.ndarray:
        """Return the last frame, (240, 256), with every colour replaced by its entry in `table`."""
        address, pitch = self._video
        rows = view(address, SCREEN_HEIGHT * pitch).view(np.uint16).reshape(SCREEN_HEIGHT, -1)
        pixels = rows[:, :SCREEN_WIDTH]
        return np.take(table, pixels, mode="clip")  # "clip" skips the bounds check; no index is out of bounds


_fceumm_library = cache(_FceummLibrary)


class FceummCore:
    """A console of its own for each environment, although the library holds one per process.

    Whoever acts while another core owns the library's console saves the other's state and loads its own,
    about 10 microseconds. Only one thread of a process may use these cores.
    """

    def __init__(self) -> None:
        self._library = _fceumm_library()
        self._parked = self._library.first_state  # this core's state while it does not own the console

    def _claim(self) -> _FceummLibrary:
        library = self._library
        if library.owner is not self:
            if library.owner is not None:
                library.owner._parked = library.save()
            library.load(self._parked)
            library.owner = self
        return library

    @property
    def ram(self) -> np.ndarray:
        return self._claim().ram

    def power_on(self) -> None:
        self.load(self._library.first_state)

    def step(self, buttons: int) -> None:
        self._claim().run(buttons)

    def poke(self, address: int, value: int) -> None:
        self._claim().ram[address] = value

    def save(self) -> np.ndarray:
        return self._claim().save()

    def load(self, state: np.ndarray) -> None:
        self._claim().load(state)

    def rgb(self) -> Image.Image:
        pixels = self._picture(self._library.to_rgb)
        return Image.frombuffer("RGB", (SCREEN_WIDTH, SCREEN_HEIGHT), pixels, "raw", "BGRX", 0, 1)

    def gray(self) -> Image.Image:
        return Image.fromarray(self._picture(self._library.to_gray))

    def _picture(self, table: np.ndarray) -> np.ndarray:
        if self._library.owner is not self:  # states hold no picture, so it cannot be swapped in
            raise RuntimeError("this picture is gone: another environment of the process has played since")
        return self._library.picture(table)

    def close(self) -> None:
        if self._library.owner is self:
            self._library.owner = None
