"""The block of memory that SubprocVecEnv shares with its workers: NumPy views, no names, no pickling.

The memory is an anonymous file: it has no entry in `/dev/shm` that could be left behind, whoever is killed when,
and its descriptor travels to each worker through the worker's own pipe, so that fork, forkserver and spawn (and
a worker started later, in place of a dead one) all attach in the same way.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

CACHE_LINE = 64  # bytes; two processes writing to one line would steal it from each other on every write


def require_numeric(space: Space, role: str) -> None:
    """Raise unless `space` is Box, Discrete, MultiDiscrete, MultiBinary or a Dict or Tuple of those.

    Raises:
        ValueError: for a custom space. TypeError: for a Gymnasium space without a fixed numeric shape.
    """
    if isinstance(space, Dict | Tuple):
        for part in space.spaces.values() if isinstance(space, Dict) else space.spaces:
            require_numeric(part, role)
    elif not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        in_gymnasium = type(space).__module__.startswith("gymnasium.spaces")
        raise (TypeError if in_gymnasium else ValueError)(
            f"SubprocVecEnv keeps {role}s in shared memory and so needs numeric spaces (Box, Discrete, MultiDiscrete, "
            f"MultiBinary, and Dict or Tuple of them), but an environment has the {role} space {space}: wrap the "
            f"environment so that its {role}s are numeric, or use gymnasium.vector.SyncVectorEnv."
        )


def map_space(space: Space, leaf: Callable[[Space], Any]) -> Any:
    """Return the nested dict/tuple of `leaf(part)` over the numeric parts of `space`."""
    if isinstance(space, Dict):
        return {key: map_space(part, leaf) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(map_space(part, leaf) for part in space.spaces)
    return leaf(space)


def map_tree(tree: Any, leaf: Callable[[np.ndarray], Any]) -> Any:
    """Return `tree` (nested dicts and tuples of arrays) with `leaf` applied to every array."""
    if isinstance(tree, dict):
        return {key: map_tree(part, leaf) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(part, leaf) for part in tree)
    return leaf(tree)


def write_tree(target: Any, value: Any) -> None:
    """Copy `value` into the arrays of `target`, which has the same nesting.

    Raises:
        ValueError: if a shape differs (NumPy would otherwise broadcast a wrong shape without a word).
    """
    if isinstance(target, dict):
        for key, part in target.items():
            write_tree(part, value[key])
    elif isinstance(target, tuple):
        for part, part_value in zip(target, value, strict=True):
            write_tree(part, part_value)
    else:
        if np.shape(value) != target.shape:
            raise ValueError(f"expected an array of shape {target.shape}, got shape {np.shape(value)}")
        target[...] = value


def anonymous_file(size: int) -> int:
    """Return the descriptor of a new nameless file of `size` zero bytes, in memory where the system allows."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("SubprocVecEnv")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class SharedBatch:
    """Views into the shared memory; parent and workers build the same ones from the same arguments.

    Attributes:
        observations: nested arrays, each (num_envs, *shape) of the observation space's dtype.
        actions: nested arrays, each (num_envs, *shape) of the action space's dtype.
        rewards: (num_envs,) float64. terminations, truncations: (num_envs,) bool.
        control: (num_workers, CACHE_LINE / 8) int64; column meanings are in `envs/_subproc_worker.py`.
        observation_bytes: the memory under `observations`, as (num_bytes,) uint8.
        descriptor: of the anonymous file, to be sent to workers.
    """

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        num_envs: int,
        num_workers: int,
        descriptor: int | None = None,
    ) -> None:
        def batched(part: Space) -> tuple[tuple[int, ...], np.dtype]:
            assert part.shape is not None
            assert part.dtype is not None
            return (num_envs, *part.shape), part.dtype

        self.arguments = (observation_space, action_space, num_envs, num_workers)
        fixed = [
            ((num_workers, CACHE_LINE // 8), np.dtype(np.int64)),
            ((num_envs,), np.dtype(np.float64)),
            ((num_envs,), np.dtype(np.bool_)),
            ((num_envs,), np.dtype(np.bool_)),
        ]
        leaves: list[tuple[tuple[int, ...], np.dtype]] = list(fixed)
        map_space(action_space, lambda part: leaves.append(batched(part)))
        map_space(observation_space, lambda part: leaves.append(batched(part)))
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in leaves]
        padded = [-(-size // CACHE_LINE) * CACHE_LINE for size in sizes]
        starts = np.concatenate([[0], np.cumsum(padded)]).tolist()

        self.descriptor = anonymous_file(max(starts[-1], 1)) if descriptor is None else descriptor
        memory = mmap.mmap(self.descriptor, max(starts[-1], 1))
        arrays: Iterator[np.ndarray] = (
            np.frombuffer(memory, dtype=dtype, count=int(np.prod(shape)), offset=start).reshape(shape)
            for (shape, dtype), start in zip(leaves, starts, strict=False)
        )
        self.control, self.rewards = next(arrays), next(arrays)
        self.terminations, self.truncations = next(arrays), next(arrays)
        self.actions = map_space(action_space, lambda part: next(arrays))
        first_observation = len(fixed) + len(list(_leaves(self.actions)))
        self.observations = map_space(observation_space, lambda part: next(arrays))
        self.observation_bytes = np.frombuffer(memory, dtype=np.uint8)[starts[first_observation] :]

    def close(self) -> None:
        """Close the descriptor; the memory itself goes with the last view of it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _leaves(tree: Any) -> Iterator[np.ndarray]:
    if isinstance(tree, dict | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(part)
    else:
        yield tree
