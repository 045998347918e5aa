"""Saving and restoring environments, so that a continued run is the unbroken one.

An environment can be saved if some layer of it has `get_state()` and `set_state(state)`, or if it is a `MujocoEnv`,
and if `plain_attributes` can save the wrappers around that layer. `make` is `gymnasium.make` with the state of all
layers made accessible; `envs.vector_state` handles whole vector environments.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv

from envs._plain_state import NoState, plain, plain_attributes, restored, set_attributes, state_layers
from envs.mujoco_batch import without_deprecation_note

INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION  # coordinates, velocities, controls, warm start


def make(env_id: str, **kwargs: Any) -> gym.Env:
    """`gymnasium.make(env_id, **kwargs)` inside `SaveState`."""
    with without_deprecation_note():
        return SaveState(gym.make(env_id, **kwargs))


class SaveState(gym.Wrapper):
    """Offers the state of an environment and of all its wrappers (the time limit's counter) as one.

    `state` is a property as well, because Gymnasium's vector environments read and write attributes. For an environment
    that cannot be saved it is None, with a warning that says why (an exception would end Gymnasium's worker), while
    the methods raise NoState. Other exceptions of an environment's own `get_state` are faults, and go through.
    """

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:  # Gymnasium's vector environments keep it over a reset, which may write into it
            obs = copy.deepcopy(obs)
        return obs, reward, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        env, wrappers = _layers(self.env)
        if isinstance(env, MujocoEnv):
            inner = _mujoco_state(env)
        else:  # plain, because `torch.load` reads nothing else from a file that may be anybody's
            inner = plain(env.get_state(), f"The state of {type(env).__name__}")
        return {"env": inner, "wrappers": [plain_attributes(wrapper) for wrapper in wrappers]}

    def set_state(self, state: dict[str, Any]) -> None:
        env, wrappers = _layers(self.env)
        if isinstance(env, MujocoEnv):
            _set_mujoco_state(env, state["env"])
        else:
            env.set_state(restored(state["env"]))
        for wrapper, attributes in zip(wrappers, state["wrappers"], strict=True):
            set_attributes(wrapper, attributes)

    @property
    def state(self) -> dict[str, Any] | None:
        try:
            return self.get_state()
        except NoState as error:
            warnings.warn(str(error), stacklevel=2)
            return None

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.set_state(state)


def _layers(env: gym.Env) -> tuple[Any, list[gym.Wrapper]]:
    """The layer that holds the state and the wrappers around it; MuJoCo's own `set_state(qpos, qvel)` is not one."""
    if not isinstance(env.unwrapped, MujocoEnv):
        return state_layers(env)
    wrappers: list[gym.Wrapper] = []
    while isinstance(env, gym.Wrapper):
        wrappers.append(env)
        env = env.env
    return env, wrappers


def _mujoco_state(env: MujocoEnv) -> dict[str, Any]:
    integration = np.empty(mujoco.mj_stateSize(env.model, INTEGRATION))
    mujoco.mj_getState(env.model, env.data, integration, INTEGRATION)
    derived = {name: value.copy() for name, value in _arrays(env.data).items()}
    state = {"integration": integration, "derived": derived, "rng": env.np_random.bit_generator.state}
    if not type(env).__module__.startswith("gymnasium.envs.mujoco."):  # whose tasks keep all else in the simulation
        state["attributes"] = plain_attributes(env, unsaved=("model", "data", "mujoco_renderer"))
    return state


def _set_mujoco_state(env: MujocoEnv, state: dict[str, Any]) -> None:
    mujoco.mj_setState(env.model, env.data, state["integration"], INTEGRATION)
    # After mj_step the positions of bodies lag the coordinates by one sub-step, and rewards are computed from them;
    # mj_forward, which the arrays of contacts need for their size, lets them catch up. So they are put back.
    mujoco.mj_forward(env.model, env.data)
    for name, value in _arrays(env.data).items():
        saved = state["derived"].get(name)  # a contact may have begun in that sub-step: its arrays are nowhere saved
        if saved is not None and value.shape == saved.shape:
            value[...] = saved
    env.np_random.bit_generator.state = state["rng"]
    set_attributes(env, state.get("attributes", {}))


def _arrays(data: mujoco.MjData) -> dict[str, np.ndarray]:
    """The numerical arrays of a simulation by name, as live views."""
    arrays = {name: getattr(data, name) for name in dir(data) if not name.startswith("_")}
    return {name: a for name, a in arrays.items() if isinstance(a, np.ndarray) and a.dtype.kind in "fiu" and a.size}
