"""The memory that SubprocVecEnv shares with its workers: NumPy views of one anonymous file.

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

CACHE_LINE = 64  # bytes; processes that write to one line take it from each other at every write
CONTROL_COLUMNS = 8  # of int64: a cache line for each worker
MAX_INFO_KEYS = 32


# ---- nested spaces and arrays ---------------------------------------------------------------------------------------


def map_space(space: Space, leaf: Callable[[Space], Any]) -> Any:
    """Return the nested dicts and tuples of `leaf(part)` over the parts of `space`, which must be numeric."""
    if isinstance(space, Dict):
        return {key: map_space(part, leaf) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(map_space(part, leaf) for part in space.spaces)
    if not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        in_gymnasium = type(space).__module__.startswith("gymnasium.spaces")
        raise (TypeError if in_gymnasium else ValueError)(
            f"The space {space} has a dynamic shape so its not possible to make a static shared memory. "
            "SubprocVecEnv serves Box, Discrete, MultiDiscrete, MultiBinary and Dict or Tuple of them: wrap the "
            "environment so that all is numeric, or use gymnasium.vector.SyncVectorEnv."
        )
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


def write_tree(target: Any, value: Any, casting: Any = "unsafe") -> None:
    """Copy `value` into the arrays of `target`, which is nested in the same way.

    NumPy alone would silently broadcast many a wrong shape, and wrap integers beyond the target's type.
    """
    if isinstance(target, np.ndarray):
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        if array.shape != target.shape:
            error = ValueError if array.shape else TypeError
            raise error(f"expected an array of shape {target.shape}, got one of shape {array.shape}")
        if array.dtype == target.dtype:
            target[...] = array
        elif array.dtype.kind not in "iu" or target.dtype.kind not in "iu":
            np.copyto(target, array, casting)
        else:
            target[...] = array
            if (differs := target != array).any():
                raise TypeError(f"{array[differs][0]} does not fit {target.dtype}")
    elif isinstance(target, dict):
        for key, part in target.items():
            write_tree(part, value[key], casting)
    else:
        for part, part_value in zip(target, value, strict=True):
            write_tree(part, part_value, casting)


# ---- the file -------------------------------------------------------------------------------------------------------


def anonymous_file() -> Connection:
    """A new file without a name, in memory. It is a Connection only because multiprocessing knows how to hand the
    descriptor of one to a process, whichever way that is started."""
    return Connection(os.memfd_create("SubprocVecEnv"))


def map_file(file: Connection, layout: np.dtype) -> np.ndarray:
    """The beginning of the file as an array () of `layout`. The parent, which comes first, makes room."""
    if os.fstat(file.fileno()).st_size < layout.itemsize:
        os.ftruncate(file.fileno(), layout.itemsize)
    return np.frombuffer(mmap.mmap(file.fileno(), layout.itemsize), layout)[0, ...]


def map_control(file: Connection, num_workers: int) -> np.ndarray:
    """(num_workers, CONTROL_COLUMNS) int64; `envs/_subproc_worker.py` names the columns."""
    return map_file(file, np.dtype([("control", np.int64, (num_workers, CONTROL_COLUMNS))]))["control"]


class SharedBatch:
    """Views of all environments' arrays; parent and workers build the same ones from the same arguments.

    Attributes:
        observations: nested arrays (num_envs, *shape) of the observation space's dtypes.
        actions: nested arrays (num_envs, *shape) of the action space's dtypes, but single reals as float64: those
            reach the environment as np.float64, which is a Python float, and keep what precision the caller gave.
        rewards: (num_envs,) float64. terminations, truncations: (num_envs,) bool.
        infos: an InfoTable.
    """

    def __init__(
        self, file: Connection, observation_space: Space, action_space: Space, num_envs: int, num_workers: int
    ) -> None:
        fields: list[tuple[str, Any, tuple[int, ...]]] = [
            ("control", np.int64, (num_workers, CONTROL_COLUMNS)),
            ("rewards", np.float64, (num_envs,)),
            ("info values", np.float64, (num_envs, MAX_INFO_KEYS)),
            ("has info", np.bool_, (num_envs,)),
            ("terminations", np.bool_, (num_envs,)),
            ("truncations", np.bool_, (num_envs,)),
        ]

        def add_field(part: Space, single_real: Any) -> int:
            shape, is_single_real = part.shape or (), part.shape == () and np.issubdtype(part.dtype, np.floating)
            fields.append((f"array {len(fields)}", single_real if is_single_real else part.dtype, (num_envs, *shape)))
            return len(fields) - 1

        actions = map_space(action_space, lambda part: add_field(part, single_real=np.float64))
        observations = map_space(observation_space, lambda part: add_field(part, single_real=part.dtype))
        formats, offsets = [np.dtype((dtype, shape)) for _, dtype, shape in fields], [0]
        for part in formats:  # each begins a cache line
            offsets.append(offsets[-1] + -(-part.itemsize // CACHE_LINE) * CACHE_LINE)
        names, size = [name for name, _, _ in fields], offsets.pop()
        memory = map_file(file, np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size}))
        arrays = [memory[name] for name in names]
        _, self.rewards, info_values, has_info, self.terminations, self.truncations = arrays[:6]
        self.infos = InfoTable(info_values, has_info)
        self.actions = _arrays_of(actions, arrays)
        self.observations = _arrays_of(observations, arrays)


def _arrays_of(places: Any, arrays: list[np.ndarray]) -> Any:
    """Replace the numbers in nested dicts and tuples by the arrays at these places of the list."""
    if isinstance(places, dict):
        return {key: _arrays_of(part, arrays) for key, part in places.items()}
    return tuple(_arrays_of(part, arrays) for part in places) if isinstance(places, tuple) else arrays[places]


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
        """Return the infos in Gymnasium's vector format, as if environments whose info is elsewhere had none."""
        count = np.count_nonzero(self.present)
        if count == 0:
            return {}
        columns = self.values[:, : len(self.layout)].T.copy()
        if count < len(self.present):
            columns[:, ~self.present] = 0
        infos: dict[str, Any] = {}
        for (key, kind), column in zip(self.layout.items(), columns, strict=True):
            infos[key] = column.astype(kind, copy=False)
            infos[f"_{key}"] = self.present.copy()
        return infos

    def read_each(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the same infos one by one, each with the number of its environment."""
        rows = [
            (n, zip(self.layout.items(), self.values[n], strict=False)) for n in np.flatnonzero(self.present).tolist()
        ]
        return [(n, {key: kind(value) for (key, kind), value in row}) for n, row in rows]


def info_layout(info: dict[str, Any]) -> InfoLayout:
    """Return the layout of infos like this one, or {} if they do not fit an InfoTable."""
    layout = {key: type(value) for key, value in info.items()}
    fits = len(layout) <= MAX_INFO_KEYS and {*layout.values()} <= {float, np.float64, np.float32}
    return layout if fits else {}
