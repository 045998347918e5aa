"""Saving and restoring Gymnasium's own MuJoCo tasks (envs/save_state.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from envs.save_state import get_vector_state, make
from envs.subproc_vec_env import SubprocVecEnv


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Ant-v5", "Hopper-v5"])
def test_a_restored_simulation_goes_on_bit_for_bit(env_id: str) -> None:
    """From every state of a random walk, among them those where a contact begins or ends in the last sub-step."""
    env, other = make(env_id), make(env_id)
    env.reset(seed=1)
    env.action_space.seed(1)
    other.reset(seed=2)
    for step in range(150):
        other.state = env.state
        action = env.action_space.sample()
        ours, theirs = env.step(action), other.step(action)
        np.testing.assert_array_equal(theirs[0], ours[0], err_msg=f"step {step}")
        assert theirs[1:4] == ours[1:4], step
        if ours[2] or ours[3]:
            other.state = env.state
            np.testing.assert_array_equal(env.reset()[0], other.reset()[0])
    env.close()
    other.close()


@pytest.mark.parametrize("vector", [AsyncVectorEnv, SyncVectorEnv, SubprocVecEnv])
def test_an_environment_that_cannot_be_saved_has_no_state_and_lives_on(vector: Any) -> None:
    vec_env = vector([partial(make, "Pendulum-v1")] * 2)
    vec_env.reset(seed=1)
    assert get_vector_state(vec_env) is None
    vec_env.step(np.zeros((2, 1), np.float32))
    vec_env.close()
