"""MujocoBatchVecEnv is Gymnasium's SyncVectorEnv to the last bit, and behaves when things go wrong."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs.mujoco_batch import TASKS, MujocoBatchVecEnv, is_plain_task
from tests.conftest import assert_plain, assert_same, python

SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
tasks = pytest.mark.parametrize("env_id", TASKS)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, and blow-ups, make MuJoCo write MUJOCO_LOG.TXT into the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MUJOCO_GL", raising=False)  # other processes choose their own


def sync(env_id: str, num_envs: int, mode: AutoresetMode = SAME, **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gym.make(env_id, **kwargs) for _ in range(num_envs)], autoreset_mode=mode)


def begun(env_id: str, num_envs: int, num_threads: int | None = 1, seed: int = 0, **kwargs: Any) -> MujocoBatchVecEnv:
    envs = MujocoBatchVecEnv(env_id, num_envs, num_threads, **kwargs)
    envs.reset(seed=seed)
    return envs


class Actions:
    """Some calm, some outside the bounds; float32 as policies send them, and now and then float64."""

    def __init__(self, envs: gym.vector.VectorEnv, seed: int = 0) -> None:
        self.shape, self.rng, self.number = envs.action_space.shape, np.random.default_rng(seed), 0

    def __call__(self) -> np.ndarray:
        self.number += 1
        actions = self.rng.normal(size=self.shape) * self.rng.uniform(0.0, 2.0)
        return actions.astype(np.float64 if self.number % 5 == 1 else np.float32)


# ---- the same numbers -----------------------------------------------------------------------------------------------
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("HalfCheetah-v5", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 1}),
    ("HalfCheetah-v5", {"frame_skip": 3, "forward_reward_weight": 2, "reset_noise_scale": 0.3}),
    ("Swimmer-v5", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.3}),
    ("Ant-v5", {"include_cfrc_ext_in_observation": False, "main_body": "front_left_leg"}),
    ("Ant-v5", {"terminate_when_unhealthy": False, "contact_force_range": (-3.0, 5.0), "healthy_reward": 2}),
    ("Ant-v5", {"exclude_current_positions_from_observation": False, "contact_cost_weight": 0.1}),
    ("Humanoid-v5", {"include_cinert_in_observation": False, "contact_cost_range": (0.1, 0.2)}),
    ("Humanoid-v5", {"include_cvel_in_observation": False, "include_qfrc_actuator_in_observation": False}),
    ("HumanoidStandup-v5", {"include_cfrc_ext_in_observation": False, "impact_cost_weight": 1e-3}),
    ("Hopper-v5", {"healthy_state_range": (-2.0, 2.0), "healthy_reward": 3, "terminate_when_unhealthy": 1}),
    ("Walker2d-v5", {"terminate_when_unhealthy": False, "healthy_angle_range": (-0.2, 0.3)}),
    ("Reacher-v5", {"reward_control_weight": 0.3, "reward_dist_weight": 2}),
    ("Pusher-v5", {"reward_near_weight": 0.1, "frame_skip": 2}),
    ("InvertedPendulum-v5", {"reset_noise_scale": 0.1}),
    ("InvertedDoublePendulum-v5", {"healthy_reward": 3}),
]
# (task, arguments, autoreset mode, number of environments, steps, episodes that each must end at least)
RUNS: list[tuple[str, dict[str, Any], AutoresetMode, int, int, int]] = [
    *((env_id, {"max_episode_steps": 45}, mode, 3, 250, 3) for env_id in TASKS for mode in (SAME, NEXT)),
    *((env_id, {"max_episode_steps": 17, **options}, SAME, 3, 120, 5) for env_id, options in OPTIONS),
    *((env_id, {"max_episode_steps": 25}, DISABLED, 3, 120, 3) for env_id in ("Ant-v5", "HalfCheetah-v5", "Hopper-v5")),
    # one or two environments: sums must be taken in the same order
    *((env_id, {"max_episode_steps": 40}, SAME, number, 150, 2)
      for env_id in ("Humanoid-v5", "Hopper-v5", "Reacher-v5") for number in (1, 2)),
    # the registered time limit
    *((env_id, {}, SAME, 2, 1100, 1) for env_id in ("HalfCheetah-v5", "Hopper-v5")),
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]} {run[2].value} {run[3]} {' '.join(run[1])}")
def test_a_run_equals_sync_vector_env_bit_for_bit(run: Any) -> None:
    env_id, kwargs, mode, num_envs, num_steps, least = run
    expected = sync(env_id, num_envs, mode, **kwargs)
    actual = MujocoBatchVecEnv(env_id, num_envs, 2, mode, **kwargs)
    assert actual.single_observation_space == expected.single_observation_space
    assert actual.action_space == expected.action_space
    assert actual.metadata == expected.metadata
    actions, ends, kept = Actions(expected), np.zeros(num_envs, int), []

    def both_reset(**how: Any) -> None:
        given = copy.deepcopy(how)
        kept.append(actual.reset(**given))
        assert_same(kept[-1], expected.reset(**how), str(how))
        kept.append(copy.deepcopy(kept[-1]))
        for mask in given.get("options", {}).values():
            mask[:] = ~mask  # the caller's to use again
        assert actual.np_random_seed == expected.np_random_seed

    both_reset(seed=7)
    for step in range(num_steps):
        if step == 60:  # time limits from now on at different times
            for seed in (None, 5):
                both_reset(seed=seed, options={"reset_mask": np.arange(num_envs) == num_envs - 1})
        if step == 30:
            both_reset()
            both_reset(seed=[11, None, 13][:num_envs])
        action = actions()
        result = actual.step(action)
        assert_same(result, expected.step(action), f"step {step}")
        kept += [result, copy.deepcopy(result)]
        ended = result[2] | result[3]
        ends += ended
        if mode is DISABLED and ended.any():
            with pytest.raises(ResetNeeded, match="reset them first"):
                actual.step(action)
            both_reset(options={"reset_mask": ended})
    assert ends.min() >= least
    assert_same(kept[::2], kept[1::2])  # what was returned is not written again
    assert [g.random() for g in actual.np_random] == [g.random() for g in expected.np_random]
    actual.close()
    expected.close()


@pytest.mark.parametrize("env_id", ["Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "InvertedPendulum-v5"])
@pytest.mark.parametrize("velocity", [1e30, np.nan, 3e3])
@pytest.mark.filterwarnings("ignore:MuJoCo:UserWarning")
def test_exploding_physics_goes_on_as_in_gymnasium(env_id: str, velocity: float) -> None:
    expected, actual = sync(env_id, 3), MujocoBatchVecEnv(env_id, 3, 2)
    assert_same(actual.reset(seed=2), expected.reset(seed=2))
    actions = Actions(expected)
    for step in range(30):
        action = actions()
        if step == 5:
            expected.envs[1].unwrapped.data.qvel[0] = velocity
            actual._sims.qvel[1, 0] = velocity
        if step == 15:
            action[0, 0] = np.nan
        assert_same(actual.step(action), expected.step(action), f"step {step}")


# ---- saved and restored; which environments it can stand for --------------------------------------------------------
@pytest.mark.parametrize("mode", [SAME, NEXT])
@tasks
def test_a_restored_run_continues_bit_for_bit(env_id: str, mode: AutoresetMode) -> None:
    unbroken = begun(env_id, 3, 2, autoreset_mode=mode, max_episode_steps=41)
    actions = Actions(unbroken)
    unbroken.step(actions())
    unbroken.reset(options={"reset_mask": np.array([True, False, False])})
    for step in range(100):
        terminated, truncated = unbroken.step(actions())[2:4]
        if step > 35 and (terminated | truncated).any():
            break  # in NEXT_STEP mode an environment waits for its reset now, others are under way
    assert set((terminated | truncated).tolist()) == {True, False}
    state = unbroken.get_state()
    assert_plain(state)
    saved, plan = pickle.dumps(state), [actions() for _ in range(60)]
    expected = [unbroken.step(action) for action in plan]
    fresh = MujocoBatchVecEnv(env_id, 3, 1, mode, max_episode_steps=41)
    for envs, given in ((fresh, pickle.loads(saved)), (unbroken, state)):
        envs.set_state(given)
        assert envs.np_random_seed == (-1, -1, -1)
        assert_same([envs.step(action) for action in plan], expected)
    assert pickle.dumps(state) == saved  # it can be restored again


@tasks
def test_a_masked_reset_after_a_restore_returns_the_other_rows_as_they_were(env_id: str) -> None:
    """Not recomputed ones: after a step MuJoCo's derived positions and forces lag the coordinates by one sub-step."""
    unbroken, restored, again = all_envs = [begun(env_id, 3) for _ in range(3)]
    actions = Actions(unbroken)
    for _ in range(8):
        obs = unbroken.step(actions())[0]
    state = unbroken.get_state()
    kept = copy.deepcopy(state)
    restored.set_state(state)
    again.set_state(pickle.loads(pickle.dumps(restored.get_state())))

    def all_reset(n: int) -> np.ndarray:
        results = [envs.reset(options={"reset_mask": np.arange(3) == n})[0] for envs in all_envs]
        assert_same(results[1:], results[:1] * 2)
        return results[1]

    first = all_reset(1)
    before = first.copy()
    assert_same(all_reset(0)[2], obs[2])
    assert_same([first, state], [before, kept])
    action = actions()
    results = [envs.step(action) for envs in all_envs]
    assert_same(results[1:], results[:1] * 2)
    all_reset(2)


def changed(name: str, value: Any, env_id: str = "Hopper-v5") -> gym.Env:
    env: Any = gym.make(env_id)
    setattr(env.unwrapped.model.opt if name == "gravity" else env.unwrapped, name, value)
    return env


def stepped(env: gym.Env) -> gym.Env:
    env.reset(seed=0)
    env.step(env.action_space.sample())
    return env


class MyHopper(HopperEnv):
    """Under Gymnasium's name for its own."""


PLAIN: dict[str, tuple[bool, Any]] = {
    "re-registered": (False, lambda: gym.make(gym.envs.registration.EnvSpec("Hopper-v5", MyHopper))),
    **{env_id: (True, partial(gym.make, env_id)) for env_id in TASKS},
    "after steps": (True, lambda: stepped(gym.make("Hopper-v5"))),
    "arguments": (True, lambda: gym.make("Ant-v5", ctrl_cost_weight=0.1, max_episode_steps=7)),
    "rendering": (True, lambda: gym.make("Ant-v5", render_mode="rgb_array", width=64)),
    "no time limit": (True, lambda: gym.make("Ant-v5", max_episode_steps=-1)),
    "no checker": (True, lambda: gym.make("Ant-v5", disable_env_checker=True)),
    "same gravity": (True, lambda: changed("gravity", (0, 0, -9.81))),
    "other gravity": (False, lambda: changed("gravity", (0, 0, -3.7))),
    "wrapper": (False, lambda: gym.Wrapper(gym.make("Hopper-v5"))),
    "Gymnasium's wrapper": (False, lambda: gym.wrappers.ClipAction(gym.make("Hopper-v5"))),
    "second time limit": (False, lambda: gym.wrappers.TimeLimit(gym.make("Hopper-v5"), 7)),
    "frames": (False, lambda: gym.make("Hopper-v5", render_mode="rgb_array_list")),
    "changed weight": (False, lambda: changed("_healthy_reward", 2.0)),
    "replaced method": (False, lambda: changed("step", None)),
    "other task": (False, lambda: gym.make("CartPole-v1")),
    "older task": (False, lambda: gym.make("HalfCheetah-v4")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN)
def test_only_what_gymnasium_makes_is_plain_and_a_batch_like_it_computes_the_same(name: str) -> None:
    plain, env_fn = PLAIN[name]
    assert is_plain_task(env_fn()) == plain
    if plain:
        batch = MujocoBatchVecEnv.like(env_fn(), 2, 1)
        reference = SyncVectorEnv([env_fn] * 2, autoreset_mode=SAME)
        assert_same(batch.reset(seed=3), reference.reset(seed=3))
        actions = Actions(reference)
        for step in range(20):
            action = actions()
            assert_same(batch.step(action), reference.step(action), f"step {step}")


# ---- mistakes and faults --------------------------------------------------------------------------------------------
WRONG: list[tuple[Any, str]] = [
    (lambda: MujocoBatchVecEnv("HalfCheeta-v5", 2), "the closest is 'HalfCheetah-v5'"),
    (lambda: MujocoBatchVecEnv("CartPole-v1", 2), "is none of Ant-v5"),
    (lambda: MujocoBatchVecEnv("Hopper-v5", 0), "num_envs=0"),
    (lambda: MujocoBatchVecEnv("Hopper-v5", 2, -1), "num_threads=-1"),
    (lambda: begun("Hopper-v5", 2, seed=[1, 2, 3]), "2 environments but 3 seeds"),
    (lambda: begun("Hopper-v5", 2).set_state(begun("Ant-v5", 2).get_state()), r"Ant-v5 .*Hopper-v5"),
    (lambda: begun("Ant-v5", 3).set_state(begun("Ant-v5", 2).get_state()), r"\(2, \d+\).*\(3, \d+\)"),
    *((lambda shape=shape: begun("Hopper-v5", 2).step(np.zeros(shape)), r"must have shape \(2, 3\), got")
      for shape in ((3,), (2, 4), (3, 3), (2, 3, 1))),
    *((lambda mask=mask: begun("Hopper-v5", 2).reset(options={"reset_mask": mask}), "reset_mask")
      for mask in (np.zeros(2, bool), np.ones(3, bool), [True, False], np.ones(2, int))),
]  # fmt: skip


def test_mistakes_are_answered_in_one_sentence() -> None:
    for call, message in WRONG:
        with pytest.raises(ValueError, match=message):
            call()
    envs = MujocoBatchVecEnv("Hopper-v5", 2, 1)
    for how in (copy.copy, copy.deepcopy, pickle.dumps):  # it would step the original's robots, or read freed memory
        with pytest.raises(TypeError, match=r"live in C memory.*use get_state\(\) and set_state\(\)"):
            how(envs._sims)
    envs.set_state(envs.get_state())  # which never began
    with pytest.raises(ResetNeeded):
        envs.step(np.zeros((2, 3)))
    with pytest.raises(ResetNeeded, match="first reset must be of all"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.reset()
    for dtype in (np.float16, np.float32, np.longdouble, np.int8):
        assert envs.step(np.zeros((2, 3), dtype))[1].dtype == np.float64
    envs.close()
    envs.close()
    for call in (envs.reset, envs.get_state, lambda: envs.step(np.zeros((2, 3)))):
        with pytest.raises(ClosedEnvironmentError):
            call()


def test_close_and_garbage_collection_end_the_threads() -> None:
    def num_threads() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/task"))

    before = num_threads()
    closed, dropped = (begun("Hopper-v5", 8, 4) for _ in range(2))
    assert num_threads() == before + 6
    closed.close()
    assert num_threads() == before + 3
    del dropped
    assert num_threads() == before


# ---- in a process of its own ----------------------------------------------------------------------------------------
QUIET = """
import gymnasium as gym, numpy as np
from functools import partial
from envs.mujoco_batch import MujocoBatchVecEnv
from envs.subproc_vec_env import SubprocVecEnv
if __name__ == "__main__":
    gym.make("HalfCheetah-v5")
    env_fns = [partial(gym.make, "HalfCheetah-v5")] * 2
    for envs in (MujocoBatchVecEnv("HalfCheetah-v5", 2), SubprocVecEnv(env_fns, context="spawn")):
        envs.reset(seed=0)
        envs.step(np.zeros((2, 6), np.float32))
        envs.close()
"""
BATCH = """
import gymnasium as gym, numpy as np, os, sys
from envs.mujoco_batch import MujocoBatchVecEnv
envs = MujocoBatchVecEnv("Hopper-v5", 4, 2, width=64, height=48)
envs.reset(seed=0)
"""
UNSTABLE = """
envs._sims.qvel[:, 0] = 1e30
envs.step(np.zeros((4, 3)))
"""
FORK = """
if os.fork() == 0:
    try:
        envs.step(np.zeros((4, 3)))
    except RuntimeError as error:
        sys.exit(7 if "fork" in str(error) else 1)
    sys.exit(2)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
envs.step(np.zeros((4, 3)))
print("parent goes on")
"""


def test_a_user_sees_no_noise_and_finds_no_log_file(tmp_path: Path) -> None:
    """Neither in this process nor in workers that make Gymnasium's own HalfCheetah."""
    (tmp_path / "main.py").write_text(QUIET)
    done = python("main.py", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["main.py"]


@pytest.mark.parametrize("how", ["default", "error"])
def test_other_warnings_of_mujoco_become_warnings_also_from_its_own_threads(tmp_path: Path, how: str) -> None:
    """Where warnings are errors they cannot be raised, since no exception passes through C code: they are printed."""
    done = python("-c", BATCH + UNSTABLE, folder=tmp_path, PYTHONWARNINGS=how)
    assert "MuJoCo: Nan, Inf or huge value in QVEL" in done.stderr
    assert ("UserWarning" in done.stderr) == (how == "default")
    assert done.returncode == 0
    assert not [*tmp_path.iterdir()]


def test_a_forked_child_is_told_and_can_leave_while_the_parent_goes_on(tmp_path: Path) -> None:
    done = python("-c", BATCH + FORK, folder=tmp_path)
    assert done.stdout == "parent goes on\n", done.stderr
