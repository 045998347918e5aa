"""The memory that SubprocVecEnv shares with its workers: NumPy views of one anonymous file.

Having no name, the file cannot be left behind in `/dev/shm`, whoever is killed when. Its descriptor travels to each
worker through the worker's own pipe, so fork, forkserver and spawn all attach in the same way, and so does a worker
that is started later in place of a dead one.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

CACHE_LINE = 64  # bytes; processes that write to one line take it from each other at every write
MAX_INFO_KEYS = 32
MAX_LAYOUT_BYTES = 4096


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


def copies_of_rows(tree: Any, num_rows: int) -> list[Any]:
    """Return copies of the rows of `tree`; those of arrays (n,) are NumPy scalars."""
    tree = map_tree(tree, np.ndarray.copy)
    return list(tree) if isinstance(tree, np.ndarray) else [map_tree(tree, itemgetter(n)) for n in range(num_rows)]


def write_tree(target: Any, value: Any, casting: Any = None) -> None:
    """Copy `value` into the arrays of `target`, which is nested in the same way.

    Raises:
        ValueError: if a shape differs (NumPy alone would silently broadcast many a wrong shape), or the nesting.
        TypeError: for a single number in place of an array, or numbers that `casting` (`np.copyto`'s) does not allow.
            With a `casting`, integers may be of any type if their values fit.
    """
    if isinstance(target, np.ndarray):
        shape = value.shape if isinstance(value, np.ndarray) else np.shape(value)
        if shape != target.shape:
            error = ValueError if shape else TypeError
            raise error(f"expected an array of shape {target.shape}, got one of shape {shape}")
        if casting is None:
            target[...] = value
            return
        array = np.asarray(value)
        if array.dtype == target.dtype or array.dtype.kind not in "iu" or target.dtype.kind not in "iu":
            np.copyto(target, array, casting)
            return
        np.copyto(target, array, "unsafe")
        if (differs := target != array).any():
            raise TypeError(f"the action {array[differs][0]} does not fit {target.dtype}")
    else:
        try:
            if isinstance(target, dict):
                parts = [(part, value[key]) for key, part in target.items()]
            else:
                parts = [*zip(target, value, strict=True)]
        except (IndexError, KeyError, TypeError, ValueError):
            kind = f"a dict with the keys {[*target]}" if isinstance(target, dict) else f"a tuple of {len(target)}"
            raise ValueError(f"expected {kind}, got {value!r:.100}") from None
        for part, part_value in parts:
            write_tree(part, part_value, casting)


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
        info_table: an InfoTable.
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
        # Closes the descriptor, once, be it only when this is garbage; the memory goes with the last view of it.
        self.close = weakref.finalize(self, os.close, self.descriptor)

    def _place_arrays(self) -> None:
        observation_space, action_space, num_envs, num_workers = self.arguments

        def cell(part: Space) -> Any:
            return np.float64 if part.shape == () and np.issubdtype(part.dtype, np.floating) else part.dtype

        self._used = 0
        self.control = self._array((num_workers, CACHE_LINE // 8), np.int64)
        self.rewards = self._array((num_envs,), np.float64)
        self.terminations = self._array((num_envs,), np.bool_)
        self.truncations = self._array((num_envs,), np.bool_)
        self.info_table = InfoTable(
            self._array((num_envs, MAX_INFO_KEYS), np.float64),
            self._array((num_envs,), np.bool_),
            self._array((MAX_LAYOUT_BYTES,), np.uint8),
        )
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


class InfoTable:
    """Infos that consist of the same few numbers at every step, as rows of the shared memory.

    MuJoCo's environments return such infos, and pickling, unpickling and merging them costs more than the physics of
    a small robot. The first info that fits decides the layout for all environments: its keys, and the types of their
    values (reals take a cell as float64, integers as int64, both without loss). Other infos are pickled.

    Args:
        cells: (num_envs, MAX_INFO_KEYS) float64, some really int64.
        present: (num_envs,) bool, which environments' last info is in their row.
        layout: (MAX_LAYOUT_BYTES,) uint8, the pickled layout, or zeros as long as there is none.
    """

    def __init__(self, cells: np.ndarray, present: np.ndarray, layout: np.ndarray) -> None:
        self.cells, self.present, self.layout = cells, present, layout.data
        self.types: dict[str, tuple[Any, type]] = {}  # key -> types of its cell and of its value

    def choose_layout(self, info: dict[str, Any]) -> None:
        """Make `info` decide the layout, if it fits. Only the parent does this."""
        types = {key: (cell_type(type(value)), type(value)) for key, value in info.items()}
        if len(types) > MAX_INFO_KEYS or any(cell is None for cell, _ in types.values()):
            return
        pickled = pickle.dumps(types)
        if len(pickled) <= MAX_LAYOUT_BYTES:
            self.types = types
            self.layout[1 : len(pickled)] = pickled[1:]
            self.layout[:1] = pickled[:1]  # last, so that no worker reads half of it

    def write(self, env_index: int, info: dict[str, Any]) -> bool:
        """Write `info` to its environment's row if it has the layout's keys and types; return whether."""
        if not self.types:
            if not self.layout[0]:
                return False
            self.types = pickle.loads(self.layout)
            self.keys, self.kinds = [*self.types], [kind for _, kind in self.types.values()]
            self.row = struct.Struct("".join("d" if cell is np.float64 else "q" for cell, _ in self.types.values()))
            self.bytes = self.cells.data.cast("B")
        if [*info] != self.keys or [*map(type, info.values())] != self.kinds:
            return False
        try:
            self.row.pack_into(self.bytes, env_index * MAX_INFO_KEYS * 8, *info.values())
        except struct.error:  # an integer beyond int64
            return False
        return True

    def read(self, rows: slice) -> dict[str, Any]:
        """Return some environments' infos in Gymnasium's vector format, as if the others had none."""
        if not self.types:
            return {}
        present = self.present.copy()
        present[: rows.start] = present[rows.stop :] = False
        count = np.count_nonzero(present)
        if count == 0:
            return {}
        columns = self.cells[:, : len(self.types)].T.copy()
        if count < len(present):
            columns[:, ~present] = 0
        infos: dict[str, Any] = {}
        for (key, (cell, kind)), column in zip(self.types.items(), columns, strict=True):
            infos[key] = column if kind is np.float64 else column.view(cell).astype(kind, copy=False)
            infos[f"_{key}"] = present.copy()
        return infos

    def read_each(self, rows: slice) -> list[tuple[int, dict[str, Any]]]:
        """Return the same infos one by one, each with the number of its environment."""
        views = {np.float64: self.cells, np.int64: self.cells.view(np.int64)}
        columns = [(key, views[cell][:, i], kind) for i, (key, (cell, kind)) in enumerate(self.types.items())]
        present = (n for n in range(rows.start, rows.stop) if self.present[n])
        return [(n, {key: kind(column[n]) for key, column, kind in columns}) for n in present]

    def contradicts(self, info: dict[str, Any]) -> bool:
        """Whether a value of `info` is of another type than the layout has for its key."""
        return any(key in self.types and type(value) is not self.types[key][1] for key, value in info.items())


def cell_type(kind: type) -> type | None:
    """Return the type of a cell that holds a value of type `kind` without loss, or None."""
    if kind in (bool, int) or issubclass(kind, np.integer):
        return np.int64
    return np.float64 if kind in (float, np.float64, np.float32, np.float16) else None
