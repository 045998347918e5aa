"""What environments and wrappers hold, as plain values that a checkpoint can keep, and back again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from gymnasium import Env, Space, Wrapper
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import PassiveEnvChecker


class NoState(TypeError):
    """An environment cannot be saved; the text says why."""


def state_layers(env: Env) -> tuple[Any, list[Wrapper]]:
    """Return the outermost layer of `env` that has `get_state` and `set_state`, and the wrappers around it.

    Raises:
        NoState: if no layer has both.
    """
    layer: Any = env
    wrappers: list[Wrapper] = []
    while not (hasattr(type(layer), "get_state") and hasattr(type(layer), "set_state")):
        if not isinstance(layer, Wrapper):
            raise NoState(
                f"{env} cannot be saved, because {type(layer).__name__} lacks get_state() and set_state(state): "
                "give it both, or train without exact resume."
            )
        wrappers.append(layer)
        layer = layer.env
    return layer, wrappers


# What a wrapper holds that is no part of its state: how it was made, pictures, tools.
UNSAVED_NAMES = {
    *("_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs", "metadata", "_metadata"),
    *("frame_list", "recorded_frames", "render_history"),
}
UNSAVED_TYPES = (
    *(Env, Space, EnvSpec, type, np.dtype, ModuleType, FunctionType, BuiltinFunctionType, MethodType, partial),
    *(PurePath, logging.Logger),
)


KINDS = {"generator", "object", "scalar", "deque", "dict"}  # of what a dict stands for: its first key


class _Empty:
    pass


def has_only_attributes(value: Any) -> bool:
    """Whether `value` is an object that holds nothing in slots or in C, where its class would need more space."""
    same_size = type(value).__basicsize__ == _Empty.__basicsize__
    return hasattr(value, "__dict__") and same_size and not isinstance(value, Enum)


def plain_attributes(holder: Any, unsaved: Collection[str] = (), inside: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return copies of what a wrapper holds, such as TimeLimit's step counter, made of plain values.

    What is no plain value is a dict with one of KINDS as its first key. A random generator, and an object with
    attributes of its own, such as the statistics of NormalizeObservation, are restored in place by `set_attributes`.

    Args:
        unsaved: names of attributes to leave out.
        inside: the objects of which `holder` is a part.

    Raises:
        NoState: for an attribute of any other kind, and for one of those objects.
    """
    if isinstance(holder, PassiveEnvChecker):
        return {}  # it compares the first steps of this very environment
    state: dict[str, Any] = {}
    for name, value in vars(holder).items():
        if name in UNSAVED_NAMES or name in unsaved or isinstance(value, UNSAVED_TYPES):
            continue
        if type(value).__module__.startswith("pygame"):  # a window and its clock
            continue
        where = f"{type(holder).__name__}.{name}"
        if isinstance(value, np.random.Generator):
            state[name] = {"generator": value.bit_generator.state}
        elif has_only_attributes(value):
            if any(value is outer for outer in (*inside, holder)):
                raise NoState(f"{where} is what it is a part of, and that cannot be saved.")
            state[name] = {"object": plain_attributes(value, inside=(*inside, holder))}
        else:
            state[name] = plain(value, where)
    return state


def set_attributes(holder: Any, state: dict[str, Any]) -> None:
    """Restore what `plain_attributes` returned, sharing nothing with it."""
    for name, saved in state.items():
        match saved:
            case {"generator": content}:
                getattr(holder, name).bit_generator.state = content
            case {"object": content}:
                set_attributes(getattr(holder, name), content)
            case _:
                vars(holder)[name] = restored(saved)


def plain(value: Any, where: str) -> Any:
    """Return a copy of `value` made of what `torch.load(weights_only=True)` reads; `restored` is its inverse.

    Raises:
        NoState: for a value of any other kind; the text says that `where` holds it.
    """
    if isinstance(value, np.generic):
        if value.dtype.kind in "biufc":
            return {"scalar": np.asarray(value)}  # a Python number would compute in another precision
        value = value.item()
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(plain(item, where) for item in value)
    if type(value) is deque:
        return {"deque": [plain(item, where) for item in value], "maxlen": value.maxlen}
    if type(value) is dict:
        if all(type(key) in (int, str) for key in value) and not KINDS & value.keys():
            return {key: plain(item, where) for key, item in value.items()}
        return {"dict": [[plain(key, where), plain(item, where)] for key, item in value.items()]}
    raise NoState(
        f"{where} holds a {type(value).__name__}, which cannot be saved: use numbers, strings, arrays, lists, tuples, "
        "dicts and deques, give it get_state() and set_state(state), or train without exact resume."
    )


def restored(saved: Any) -> Any:
    """Return what `plain` was given, sharing nothing with `saved`."""
    match saved:
        case np.ndarray():
            return saved.copy()
        case list() | tuple():
            return type(saved)(restored(item) for item in saved)
        case {"scalar": array}:
            return array[()]
        case {"deque": items, "maxlen": maxlen}:
            return deque(map(restored, items), maxlen)
        case {"dict": items}:
            return {restored(key): restored(item) for key, item in items}
        case dict():
            return {key: restored(item) for key, item in saved.items()}
    return saved
