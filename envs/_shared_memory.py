"""The memory that SubprocVecEnv shares with its workers: NumPy arrays in one anonymous file.

Having no name, the file cannot be left behind in `/dev/shm`, whoever is killed when.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector.utils import create_empty_array

CONTROL_COLUMNS = 8  # of int64: a cache line for each worker, since processes that share one take it from each other
MAX_INFO_KEYS = 32


# ---- nested spaces and arrays ---------------------------------------------------------------------------------------


def check_numeric(space: Space) -> None:
    """Raise TypeError, or ValueError for a space that is not Gymnasium's, if an element of `space` is not made of
    arrays of a fixed size, nested in dicts and tuples."""
    if isinstance(space, Dict | Tuple):
        for part in space.spaces.values() if isinstance(space, Dict) else space.spaces:
            check_numeric(part)
    elif not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        in_gymnasium = type(space).__module__.startswith("gymnasium.spaces")
        raise (TypeError if in_gymnasium else ValueError)(
            f"The space {space} has a dynamic shape so its not possible to make a static shared memory. "
            "SubprocVecEnv serves Box, Discrete, MultiDiscrete, MultiBinary and Dict or Tuple of them: wrap the "
            "environment so that all is numeric, or use gymnasium.vector.SyncVectorEnv."
        )


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


def write_tree(target: Any, value: Any) -> None:
    """Copy `value` into the arrays of `target`, which is nested in the same way.

    NumPy alone would silently broadcast many a wrong shape, and wrap integers beyond the target's type.
    """
    if isinstance(target, np.ndarray):
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        if array.shape != target.shape:
            raise ValueError(f"expected an array of shape {target.shape}, got one of shape {array.shape}")
        if array.dtype == target.dtype:
            target[...] = array
        elif array.dtype.kind not in "iu" or target.dtype.kind not in "iu":
            np.copyto(target, array)  # float64 is rounded to float32; that 0.9 is not 0 is a TypeError
        else:
            target[...] = array
            if (differs := target != array).any():
                raise TypeError(f"{array[differs][0]} does not fit {target.dtype}")
    elif isinstance(target, dict):
        for key, part in target.items():
            write_tree(part, value[key])
    else:
        for part, part_value in zip(target, value, strict=True):
            write_tree(part, part_value)


# ---- the file -------------------------------------------------------------------------------------------------------


class SharedBatch:
    """All environments' arrays. Parent and workers take the same ones, in the same order, from the same file.

    Attributes:
        control: (num_workers, CONTROL_COLUMNS) int64; `envs/_subproc_worker.py` names the columns.

    and after `add_spaces`:
        rewards: (num_envs,) float64. terminations, truncations: (num_envs,) bool.
        infos: an InfoTable.
        observations: nested arrays (num_envs, *shape) of the observation space's dtypes.
        actions: nested arrays (num_envs, *shape) of the action space's dtypes.
    """

    def __init__(self, file: Connection, num_envs: int, num_workers: int) -> None:
        self.file, self.num_envs = file, num_envs
        self.size = 0  # of what has been taken from the file
        self.control = self._array((num_workers, CONTROL_COLUMNS), np.int64)

    def add_spaces(self, observation_space: Space, action_space: Space) -> None:
        self.rewards = self._array((self.num_envs,), np.float64)
        self.terminations = self._array((self.num_envs,), np.bool_)
        self.truncations = self._array((self.num_envs,), np.bool_)
        values = self._array((self.num_envs, MAX_INFO_KEYS), np.float64)
        self.infos = InfoTable(values, self._array((self.num_envs,), np.bool_))
        self.observations = create_empty_array(observation_space, self.num_envs, self._array)
        self.actions = create_empty_array(action_space, self.num_envs, self._array)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The next array of the file, on pages of its own. The parent, which comes first, makes room."""
        start, count = self.size, int(np.prod(shape))
        num_bytes = max(1, count * np.dtype(dtype).itemsize)
        self.size += -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if os.fstat(self.file.fileno()).st_size < self.size:
            os.ftruncate(self.file.fileno(), self.size)
        pages = mmap.mmap(self.file.fileno(), num_bytes, offset=start)
        return np.frombuffer(pages, dtype, count).reshape(shape)


# ---- infos ----------------------------------------------------------------------------------------------------------

InfoLayout = dict[str, type]  # key -> type of its value


class InfoTable:
    """Infos that consist of the same few floats at every step, as rows of the shared memory.

    MuJoCo's environments return such infos, and pickling, unpickling and merging them costs more than the physics of
    a small robot. Infos of another layout are pickled.

    Args:
        values: (num_envs, MAX_INFO_KEYS) float64.
        present: (num_envs,) bool, which environments' last info is in their row.
    """

    def __init__(self, values: np.ndarray, present: np.ndarray) -> None:
        self.values, self.present = values, present
        self.bytes = values.data.cast("B")
        self.use_layout({})

    def use_layout(self, layout: InfoLayout) -> None:
        self.layout, self.keys, self.types = layout, [*layout], [*layout.values()]
        self.row = struct.Struct(f"{len(layout)}d")

    def write(self, env_index: int, info: dict[str, Any]) -> bool:
        """Write `info` to its environment's row if it has the table's layout; return whether."""
        if [*info] != self.keys or [*map(type, info.values())] != self.types:
            return False
        self.row.pack_into(self.bytes, env_index * MAX_INFO_KEYS * 8, *info.values())
        return True

    def read(self) -> dict[str, Any]:
        """Return the infos, if all environments' are here, in Gymnasium's vector format."""
        infos: dict[str, Any] = {}
        columns = self.values[:, : len(self.layout)].T.copy()
        for (key, kind), column in zip(self.layout.items(), columns, strict=True):
            infos[key] = column.astype(kind, copy=False)
            infos[f"_{key}"] = self.present.copy()
        return infos

    def read_each(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the infos that are here one by one, each with the number of its environment."""
        infos = []
        for n in np.flatnonzero(self.present).tolist():
            numbers = zip(self.layout.items(), self.values[n], strict=False)
            infos.append((n, {key: kind(number) for (key, kind), number in numbers}))
        return infos


def info_layout(info: dict[str, Any]) -> InfoLayout:
    """Return the layout of infos like this one, or {} if they do not fit an InfoTable."""
    layout = {key: type(value) for key, value in info.items()}
    fits = len(layout) <= MAX_INFO_KEYS and {*layout.values()} <= {float, np.float64, np.float32}
    return layout if fits else {}
