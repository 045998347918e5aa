"""What the NES emulators have in common: buttons, screen and colours, and where their files are installed."""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np

# Buttons, in the NES controller's own bit order; they add up.
A, B, SELECT, START, UP, DOWN, LEFT, RIGHT = (1 << bit for bit in range(8))
SCREEN_HEIGHT, SCREEN_WIDTH, RAM_SIZE = 240, 256, 0x800
# How much of red, green and blue a grey picture holds, and an offset. In the usual luma (0.30, 0.59, 0.11) a Goomba's
# brown and a hill's green are equally dark, 108 and 100, so the one is lost before the other; here they are 167 and 51.
GRAY = (0.7, 0.3, 0.0, 0.0)
INSTALL = {
    "nes_py": "install it with `pip install nes-py gym-super-mario-bros` (on Python < 3.13 this needs g++)",
    "fceumm": "run `make fceumm` (`pip install --no-deps stable-retro` and gym-super-mario-bros)",
}


class MarioBackendError(ImportError):
    """The asked emulator or the cartridge is not installed; the message says what to install."""


def _package_folder(package: str) -> Path | None:
    """Return where a package is installed, without importing it, or None."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


@cache
def rom_path() -> Path:
    """Return the path of the Super Mario Bros cartridge inside the gym-super-mario-bros package.

    Raises:
        MarioBackendError: the package is not installed or holds no such file.
    """
    folder = _package_folder("gym_super_mario_bros")
    path = folder / "_roms" / "super-mario-bros.nes" if folder else None
    if path is None or not path.is_file():
        raise MarioBackendError(
            "the Super Mario Bros cartridge is missing: `pip install gym-super-mario-bros` brings it"
        )
    return path


def library_path(backend: str) -> Path | None:
    """Return the file of a backend's compiled emulator, or None if it is not installed for this Python."""
    package, pattern = {
        "nes_py": ("nes_py", "lib_nes_env*.so"),
        "nes_py9": ("nes_py", "_native.*so"),
        "fceumm": ("stable_retro", "cores/fceumm_libretro.so"),
    }[backend]
    folder = _package_folder(package)
    return min(folder.glob(pattern), default=None) if folder else None


def view(address: int, size: int) -> np.ndarray:
    """Return `size` bytes at `address` as a live, writable uint8 array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
