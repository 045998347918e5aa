"""The memory that SubprocVecEnv shares with its workers: NumPy views of one anonymous file.

Having no name, the file cannot be left behind in `/dev/shm`, whoever is killed when. Its descriptor travels to each
worker through the worker's own pipe, so fork, forkserver and spawn all attach in the same way, and so does a worker
that is started later in place of a dead one.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

CACHE_LINE = 64  # bytes; processes that write to one line take it from each other at every write
MAX_INFO_KEYS = 32

InfoLayout = tuple[tuple[str, type], ...]  # the keys of an info, and the types of their values


def require_numeric(space: Space, role: str) -> None:
    """Check that `space` is Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of them.

    Raises:
        ValueError: for a custom space. TypeError: for a Gymnasium space without a fixed numeric shape.
    """
    if isinstance(space, Dict | Tuple):
        for part in space.spaces.values() if isinstance(space, Dict) else space.spaces:
            require_numeric(part, role)
    elif not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        in_gymnasium = type(space).__module__.startswith("gymnasium.spaces")
        raise (TypeError if in_gymnasium else ValueError)(
            f"The {role} space {space} has a dynamic shape so its not possible to make a static shared memory. "
            "SubprocVecEnv serves Box, Discrete, MultiDiscrete, MultiBinary and Dict or Tuple of them: wrap the "
            f"environment so that its {role}s are numeric, or use gymnasium.vector.SyncVectorEnv."
        )


def map_space(space: Space, leaf: Callable[[Space], Any]) -> Any:
    """Return the nested dicts and tuples of `leaf(part)` over the numeric parts of `space`."""
    if isinstance(space, Dict):
        return {key: map_space(part, leaf) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(map_space(part, leaf) for part in space.spaces)
    return leaf(space)


def map_tree(tree: Any, leaf: Callable[[np.ndarray], Any]) -> Any:
    """Return `tree`, nested dicts and tuples of arrays, with `leaf` applied to every array."""
    if isinstance(tree, np.ndarray):
        return leaf(tree)
    if isinstance(tree, dict):
        return {key: map_tree(part, leaf) for key, part in tree.items()}
    return tuple(map_tree(part, leaf) for part in tree)


def row_of(tree: Any, index: int) -> Any:
    """Return views of row `index` of every array of `tree`."""
    return map_tree(tree, lambda array: array[index, ...])  # without the dots, a number would come as a copy


def rows_of(tree: Any, rows: slice) -> Any:
    """Return views of some rows of every array of `tree`; of all rows the arrays themselves."""
    return map_tree(tree, lambda array: array if rows == slice(0, len(array)) else array[rows])


def rows_of_infos(infos: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Return some rows of infos in Gymnasium's vector format."""
    return {key: rows_of_infos(part, rows) if isinstance(part, dict) else part[rows] for key, part in infos.items()}


def copy_of_row(tree: Any, index: int) -> Any:
    """Return copies of row `index` of every array of `tree`."""
    return map_tree(tree, lambda array: array[index].copy())


def write_tree(target: Any, value: Any) -> None:
    """Copy `value` into the arrays of `target`, which is nested in the same way.

    Raises:
        ValueError: if a shape differs (NumPy alone would broadcast many a wrong shape without a word).
        TypeError: for a single number in place of an array.
    """
    if isinstance(target, np.ndarray):
        shape = value.shape if isinstance(value, np.ndarray) else np.shape(value)
        if shape != target.shape:
            error = ValueError if shape else TypeError
            raise error(f"expected an array of shape {target.shape}, got one of shape {shape}")
        target[...] = value
    elif isinstance(target, dict):
        for key, part in target.items():
            write_tree(part, value[key])
    else:
        for part, part_value in zip(target, value, strict=True):
            write_tree(part, part_value)


def anonymous_file(size: int) -> int:
    """Return the descriptor of a new file of `size` zero bytes without a name, in memory where that is possible."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("SubprocVecEnv")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class SharedBatch:
    """Views of the shared memory; parent and workers build the same ones from the same arguments.

    Attributes:
        observations: nested arrays (num_envs, *shape) of the observation space's dtypes.
        actions: nested arrays (num_envs, *shape) of the action space's dtypes, but single reals as float64: those
            reach the environment as np.float64, which is a Python float, and keep what precision the caller gave.
        rewards: (num_envs,) float64. terminations, truncations: (num_envs,) bool.
        control: (num_workers, 8) int64, a cache line per worker; its columns are named in `envs/_subproc_worker.py`.
        infos: (num_envs, MAX_INFO_KEYS) float64, some really int64; has_info: (num_envs,) bool; see InfoWriter.
        descriptor: of the anonymous file.
    """

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        num_envs: int,
        num_workers: int,
        descriptor: int | None = None,
    ) -> None:
        self.arguments = (observation_space, action_space, num_envs, num_workers)
        self.descriptor = descriptor
        # The first pass only adds up the size, the second places the arrays.
        self._memory: mmap.mmap | None = None
        self._place_arrays()
        if self.descriptor is None:
            self.descriptor = anonymous_file(self._used)
        self._memory = mmap.mmap(self.descriptor, self._used)
        self._place_arrays()

    def _place_arrays(self) -> None:
        observation_space, action_space, num_envs, num_workers = self.arguments

        def cell(part: Space) -> Any:
            return np.float64 if part.shape == () and np.issubdtype(part.dtype, np.floating) else part.dtype

        self._used = 0
        self.control = self._array((num_workers, CACHE_LINE // 8), np.int64)
        self.rewards = self._array((num_envs,), np.float64)
        self.terminations = self._array((num_envs,), np.bool_)
        self.truncations = self._array((num_envs,), np.bool_)
        self.infos = self._array((num_envs, MAX_INFO_KEYS), np.float64)
        self.has_info = self._array((num_envs,), np.bool_)
        self.actions = map_space(action_space, lambda part: self._array((num_envs, *(part.shape or ())), cell(part)))
        self.observations = map_space(
            observation_space, lambda part: self._array((num_envs, *(part.shape or ())), part.dtype)
        )

    def _array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        start, count = self._used, int(np.prod(shape))
        self._used += -(-count * np.dtype(dtype).itemsize // CACHE_LINE) * CACHE_LINE
        if self._memory is None:
            return np.empty(0)
        return np.frombuffer(self._memory, dtype, count, start).reshape(shape)

    def close(self) -> None:
        """Close the descriptor; the memory itself goes with the last view of it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class InfoWriter:
    """Writes infos that consist of the same few numbers at every step as rows of the shared memory.

    MuJoCo's environments return such infos at each step, and pickling, unpickling and merging them costs more than
    the physics of a small robot. Reals take a cell as float64, integers as int64, both without loss.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows.data.cast("B")
        self.row_bytes = rows.strides[0]
        self.layout: InfoLayout | None = None

    def write(self, slot: int, info: dict[str, Any]) -> bool:
        """Write `info` to row `slot` if it has the keys of the first info that could be written; return whether.

        As in Gymnasium's own vector infos, the first value of a key decides the type of all.
        """
        if self.layout is None:
            formats = [cell_format(type(value)) for value in info.values()]
            if None in formats or len(info) > MAX_INFO_KEYS:
                return False
            self.layout = tuple(zip(info, map(type, info.values()), strict=True))
            self.keys = [*info]
            self.cells = struct.Struct("".join(map(str, formats)))
        elif [*info] != self.keys:
            return False
        try:
            self.cells.pack_into(self.rows, slot * self.row_bytes, *info.values())
        except (struct.error, TypeError):  # not a number after all, or an integer beyond int64
            return False
        return True


def cell_format(kind: type) -> str | None:
    """Return the `struct` format of a cell that holds a value of this type without loss, or None."""
    if issubclass(kind, int | np.integer):
        return "q"
    return "d" if issubclass(kind, float | np.float32 | np.float16) else None


def read_infos(batch: SharedBatch, layouts: dict[InfoLayout, list[int]], rows: slice) -> dict[str, Any]:
    """Return the rows that InfoWriters wrote in Gymnasium's vector format.

    Args:
        layouts: which environments (indices) write their rows in which layout.
        rows: of the environments to read; the others, which may be stepping, count as having no info.
    """
    infos: dict[str, Any] = {}
    num_envs = len(batch.has_info)
    for layout, env_indices in layouts.items():
        present = np.zeros(num_envs, dtype=np.bool_)
        present[env_indices] = batch.has_info[env_indices]
        present[: rows.start] = present[rows.stop :] = False
        if not present.any():
            continue
        for column, (key, kind) in enumerate(layout):
            numbers = batch.infos if cell_format(kind) == "d" else batch.infos.view(np.int64)
            if key not in infos:
                infos[key], infos[f"_{key}"] = np.zeros(num_envs, kind), np.zeros(num_envs, np.bool_)
            np.copyto(infos[key], numbers[:, column], where=present, casting="unsafe")
            infos[f"_{key}"] |= present
    return infos
