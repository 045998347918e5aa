"""The state of an environment and of all wrappers around it, as plain values that a checkpoint can hold.

    state = get_state(env)   # a copy: dicts, lists, tuples, numbers, strings and arrays
    set_state(env, state)    # now `env`, or one that was made and reset in the same way, goes on bit for bit

An environment can be saved if it, or a wrapper of it, has `get_state()` and `set_state(state)`, or if it is one of
Gymnasium's `MujocoEnv`. Of the wrappers around that layer the attributes are saved: TimeLimit's counter of steps,
random generators, stacked frames, whatever a user's own wrapper remembers (its settings too, for nothing tells them
from the rest). Not saved: spaces, with the generators that they sample from; functions and methods, whatever they
hold; other environments.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import deque
from collections.abc import Collection
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from gymnasium import Env, Space, Wrapper
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import PassiveEnvChecker


class NoState(TypeError):
    """An environment cannot be saved; the text says why in one sentence."""


def get_state(env: Env) -> dict[str, Any]:
    """The state of `env` and its wrappers. Raises NoState if some part of it cannot be saved."""
    inner, wrappers = _layers(env)
    if _is_mujoco(inner):
        state = _mujoco_state(inner)
    else:
        try:
            own_state = inner.get_state()
        except NotImplementedError as error:
            raise NoState(f"{env} cannot be saved, because its get_state() raises NotImplementedError.") from error
        state = _to_plain(own_state, f"The state of {type(inner).__name__}")
    try:
        return {"env": state, "wrappers": [_attributes(wrapper) for wrapper in wrappers]}
    except RecursionError:
        raise NoState(f"{env} cannot be saved, because a wrapper holds something that is a part of itself.") from None


def set_state(env: Env, state: dict[str, Any]) -> None:
    """Restore what `get_state` returned, sharing nothing with it. Raises ValueError for another number of wrappers."""
    inner, wrappers = _layers(env)
    if len(wrappers) != len(state["wrappers"]):
        raise ValueError(f"the state has {len(state['wrappers'])} wrappers, this environment {len(wrappers)}")
    if _is_mujoco(inner):
        _set_mujoco_state(inner, state["env"])
    else:
        inner.set_state(_from_plain(state["env"]))
    for wrapper, attributes in zip(wrappers, state["wrappers"], strict=True):
        _set_attributes(wrapper, attributes)


def _layers(env: Env) -> tuple[Any, list[Wrapper]]:
    """The outermost layer that can be asked for its state, and the wrappers around it."""
    layer: Any = env
    wrappers: list[Wrapper] = []
    while not (_is_mujoco(layer) or _has_state(layer)):
        if not isinstance(layer, Wrapper):
            raise NoState(
                f"{env} cannot be saved, because {type(layer).__name__} lacks get_state() and set_state(state): "
                "give it both, or train without exact resume."
            )
        wrappers.append(layer)
        layer = layer.env
    return layer, wrappers


def _has_state(layer: Any) -> bool:
    """Whether `layer` has get_state() and set_state(state). Others have methods of these names that take something
    else, such as a robot's set_state(qpos, qvel)."""
    for name, arguments in (("get_state", ()), ("set_state", ({},))):
        try:
            inspect.signature(getattr(type(layer), name)).bind(layer, *arguments)
        except (AttributeError, TypeError):
            return False
        except ValueError:  # compiled code may not tell what it takes
            pass
    return True


# ---- attributes of wrappers ---------------------------------------------------------------------------------------

# What belongs to no state: how a wrapper was made, pictures, tools.
UNSAVED_NAMES = {"_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs", "metadata", "_metadata"}
UNSAVED_NAMES_OF_GYMNASIUM = UNSAVED_NAMES | {"frame_list", "recorded_frames", "render_history"}
UNSAVED_TYPES = (
    *(Env, Space, EnvSpec, type, np.dtype, ModuleType, FunctionType, BuiltinFunctionType, MethodType, partial),
    *(PurePath, logging.Logger),
)
# The key of a dict that stands for a value of another type: "generator", "object", "scalar", "deque" or "dict".
KIND = "__kind__"


def _attributes(holder: Any, unsaved: Collection[str] = ()) -> dict[str, Any]:
    """Copies of the attributes of `holder`. A random generator, and an object with attributes of its own, such as the
    statistics of Gymnasium's NormalizeObservation, are restored in place."""
    if isinstance(holder, PassiveEnvChecker):
        return {}  # it compares the first steps of this very environment
    state: dict[str, Any] = {}
    names = UNSAVED_NAMES_OF_GYMNASIUM if type(holder).__module__.startswith("gymnasium.") else UNSAVED_NAMES
    for name, value in vars(holder).items():
        if name in names or name in unsaved or isinstance(value, UNSAVED_TYPES):
            continue
        if _is_view(value) and _is_mujoco(getattr(holder, "unwrapped", None)):
            continue  # of the simulation's own memory, as `data.qpos` is: it moves with the simulation
        where = f"{type(holder).__name__}.{name}"
        if isinstance(value, np.random.Generator):
            state[name] = {KIND: "generator", "state": _to_plain(value.bit_generator.state, where)}
        elif _has_only_attributes(value):
            state[name] = {KIND: "object", "attributes": _attributes(value)}
        else:
            state[name] = _to_plain(value, where)
    return state


def _set_attributes(holder: Any, state: dict[str, Any]) -> None:
    for name, saved in state.items():
        match saved:
            case {"__kind__": "generator", "state": generator_state}:
                getattr(holder, name).bit_generator.state = _from_plain(generator_state)
            case {"__kind__": "object", "attributes": attributes}:
                _set_attributes(getattr(holder, name), attributes)
            case _:
                vars(holder)[name] = _from_plain(saved)


def _has_only_attributes(value: Any) -> bool:
    """Whether `value` is of a class written in Python that extends no other, so that its attributes are all it has."""
    return hasattr(value, "__dict__") and type(value).__mro__[1:] == (object,)


def _is_view(value: Any) -> bool:
    """Whether `value` is an array whose memory belongs to a library that is not NumPy."""
    while isinstance(value, np.ndarray) and value.base is not None:
        value = value.base
    return type(value).__name__ == "PyCapsule"


def _to_plain(value: Any, where: str) -> Any:
    """A copy of `value` made of what `torch.load(weights_only=True)` reads; `where` names it if there is none."""
    if isinstance(value, np.generic):
        if value.dtype.kind in "biufc":
            return {KIND: "scalar", "value": np.asarray(value)}  # a Python number would compute in another precision
        value = value.item()
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(_to_plain(item, where) for item in value)
    if type(value) is deque:
        return {KIND: "deque", "items": [_to_plain(item, where) for item in value], "maxlen": value.maxlen}
    if type(value) is dict:
        if KIND not in value and all(type(key) in (int, str) for key in value):
            return {key: _to_plain(item, where) for key, item in value.items()}
        return {KIND: "dict", "items": [(_to_plain(key, where), _to_plain(item, where)) for key, item in value.items()]}
    raise NoState(
        f"{where} holds a {type(value).__name__}, which cannot be saved: use numbers, strings, arrays, lists, tuples, "
        "dicts and deques, put a wrapper with get_state() and set_state(state) around, or train without exact resume."
    )


def _from_plain(saved: Any) -> Any:
    """What `_to_plain` was given, sharing nothing with `saved`."""
    match saved:
        case np.ndarray():
            return saved.copy()
        case list() | tuple():
            return type(saved)(_from_plain(item) for item in saved)
        case {"__kind__": "scalar", "value": array}:
            return array[()]
        case {"__kind__": "deque", "items": items, "maxlen": maxlen}:
            return deque(map(_from_plain, items), maxlen)
        case {"__kind__": "dict", "items": items}:
            return {_from_plain(key): _from_plain(item) for key, item in items}
        case dict():
            return {key: _from_plain(item) for key, item in saved.items()}
    return saved


# ---- MuJoCo ---------------------------------------------------------------------------------------------------------


def _is_mujoco(env: Any) -> bool:
    module = sys.modules.get("gymnasium.envs.mujoco.mujoco_env")  # not imported here: most environments do without
    return module is not None and isinstance(env, module.MujocoEnv)


def _mujoco_state(env: Any) -> dict[str, Any]:
    import mujoco

    integration = np.empty(mujoco.mj_stateSize(env.model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(env.model, env.data, integration, mujoco.mjtState.mjSTATE_INTEGRATION)
    return {
        "integration": integration,
        "derived": {name: value.copy() for name, value in _arrays(env.data).items()},
        "model": {name: value.copy() for name, value in _parameters(env.model).items()},
        "options": {name: _to_plain(getattr(env.model.opt, name), name) for name in _public(env.model.opt)},
        "rng": env.np_random.bit_generator.state,
        "attributes": _attributes(env, unsaved=("model", "data", "mujoco_renderer", "_np_random")),
    }


def _set_mujoco_state(env: Any, state: dict[str, Any]) -> None:
    import mujoco

    for name, value in _parameters(env.model).items():
        value[...] = state["model"][name]
    for name, value in state["options"].items():
        setattr(env.model.opt, name, value)
    mujoco.mj_setState(env.model, env.data, state["integration"], mujoco.mjtState.mjSTATE_INTEGRATION)
    # After mj_step the positions of bodies lag the coordinates by one sub-step, and rewards are computed from them;
    # mj_forward, which the arrays of contacts need for their size, lets them catch up. So they are put back.
    mujoco.mj_forward(env.model, env.data)
    for name, value in _arrays(env.data).items():
        saved = state["derived"].get(name)  # a contact may have begun in that sub-step: its arrays are nowhere saved
        if saved is not None and value.shape == saved.shape:
            value[...] = saved
    env.np_random.bit_generator.state = state["rng"]
    _set_attributes(env, state["attributes"])


def _public(holder: Any) -> list[str]:
    return [name for name in dir(holder) if not name.startswith("_")]


def _arrays(holder: Any) -> dict[str, np.ndarray]:
    """The arrays of numbers of a simulation or its model by name, as live views."""
    arrays = {name: getattr(holder, name) for name in _public(holder)}
    return {name: a for name, a in arrays.items() if isinstance(a, np.ndarray) and a.dtype.kind in "fiu" and a.size}


def _parameters(model: Any) -> dict[str, np.ndarray]:
    """Masses, frictions, sizes, ..., of which some tasks draw new ones at every reset; not the corners of meshes, which
    may be megabytes."""
    return {name: a for name, a in _arrays(model).items() if a.dtype.kind == "f" and not name.startswith("mesh_")}
