"""The state of a whole vector environment, ours or Gymnasium's over environments from `envs.save_state.make`."""

from __future__ import annotations

import warnings
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv

from envs._plain_state import NoState
from envs._worker_pool import WorkerError


def get_vector_state(vec_env: VectorEnv) -> Any:
    """The state of a vector environment, ours or Gymnasium's over environments from `make`; None if it has none.

    Gymnasium's have one in SAME_STEP only: in other modes they do not tell which environments wait for their reset.
    """
    if hasattr(vec_env, "get_state"):
        try:
            return vec_env.get_state()
        except NoState as error:
            # Not a worker's whole report: the environment's own words are the same each time, and so are shown once.
            own_words = error.errors[0].message if isinstance(error, WorkerError) else str(error)
            warnings.warn(own_words, stacklevel=2)
            return None
    if vec_env.metadata.get("autoreset_mode") is not AutoresetMode.SAME_STEP:
        return None
    if not hasattr(vec_env, "get_attr"):  # a vector wrapper of Gymnasium's
        warnings.warn(f"{vec_env} cannot be saved, because it lacks get_state() and set_state(state).", stacklevel=2)
        return None
    states = list(vec_env.get_attr("state"))
    return None if any(state is None for state in states) else states


def set_vector_state(vec_env: VectorEnv, state: Any) -> bool:
    """Restore what `get_vector_state` returned. Returns False if there was nothing to restore."""
    if state is None:
        return False
    if hasattr(vec_env, "set_state"):
        return vec_env.set_state(state) is not False  # our wrappers report on the environments inside
    vec_env.set_attr("state", state)  # type: ignore[attr-defined]
    return True
