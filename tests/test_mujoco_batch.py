"""MujocoBatchVecEnv is Gymnasium's SyncVectorEnv to the last bit, and behaves when things go wrong."""

import copy
import gc
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs._mujoco_simulations import Simulations
from envs.mujoco_batch import TASKS, MujocoBatchVecEnv, is_plain_task

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, and blow-ups, make MuJoCo write MUJOCO_LOG.TXT into the working folder."""
    monkeypatch.chdir(tmp_path)


def sync(env_id: str, num_envs: int, mode: AutoresetMode, **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gym.make(env_id, **kwargs) for _ in range(num_envs)], autoreset_mode=mode)


def assert_identical(actual: Any, expected: Any, where: str) -> None:
    """Same keys, dtypes, shapes and bits (signs of zeros too; any NaN equals any), through nested infos."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_identical(actual[key], value, f"{where}[{key!r}]")
    elif expected is None:
        assert actual is None, where
    elif isinstance(expected, (tuple, list)) or expected.dtype == object:
        assert len(actual) == len(expected), where
        for n, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_identical(one, other, f"{where}[{n}]")
    else:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        np.testing.assert_array_equal(actual, expected, err_msg=where)
        assert actual.dtype.kind != "f" or (np.signbit(actual) == np.signbit(expected))[expected == 0].all(), where


def random_actions(rng: np.random.Generator, envs: gym.vector.VectorEnv, step: int) -> np.ndarray:
    """Some calm, some outside the bounds; float32 as policies send them, and now and then float64."""
    actions = rng.normal(size=envs.action_space.shape) * rng.uniform(0.0, 2.0)
    return actions.astype(np.float64 if step % 5 == 0 else np.float32)


def assert_same_run(env_id: str, mode: AutoresetMode, num_steps: int, num_envs: int = 3, **kwargs: Any) -> list[int]:
    """Run both side by side; return in how many steps each environment ended an episode."""
    expected, actual = (
        sync(env_id, num_envs, mode, **kwargs),
        MujocoBatchVecEnv(env_id, num_envs, 2, mode, **kwargs),
    )
    assert actual.single_observation_space == expected.single_observation_space
    assert actual.action_space == expected.action_space
    assert actual.metadata == expected.metadata
    rng = np.random.default_rng(0)
    ends = np.zeros(num_envs, int)
    assert_identical(actual.reset(seed=7), expected.reset(seed=7), "reset")
    for step in range(num_steps):
        if step == 60:  # time limits from now on at different times
            mask = np.arange(num_envs) == num_envs - 1
            results = [envs.reset(options={"reset_mask": mask.copy()}) for envs in (actual, expected)]
            assert_identical(*results, "masked reset")
        if step == 30:
            assert_identical(actual.reset(), expected.reset(), "reset without seed")
            seeds = [11, None, 13][:num_envs]
            assert_identical(actual.reset(seed=seeds), expected.reset(seed=seeds), "reset with seeds")
        actions = random_actions(rng, expected, step)
        result = actual.step(actions)
        assert_identical(result, expected.step(actions), f"{env_id} step {step}")
        ends += result[2] | result[3]
    actual.close()
    expected.close()
    return ends.tolist()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("env_id", TASKS)
def test_a_run_equals_sync_vector_env_bit_for_bit(env_id: str, mode: AutoresetMode) -> None:
    ends = assert_same_run(env_id, mode, 250, max_episode_steps=45)
    assert min(ends) >= 3


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Hopper-v5"])
def test_the_registered_time_limit_is_met_as_in_sync_vector_env(env_id: str) -> None:
    assert min(assert_same_run(env_id, AutoresetMode.SAME_STEP, 1100, num_envs=2)) >= 1


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("HalfCheetah-v5", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 1}),
        ("HalfCheetah-v5", {"frame_skip": 3, "forward_reward_weight": 2, "reset_noise_scale": 0.3}),
        ("Swimmer-v5", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.3}),
        ("Ant-v5", {"include_cfrc_ext_in_observation": False, "main_body": "front_left_leg"}),
        (
            "Ant-v5",
            {"terminate_when_unhealthy": False, "contact_force_range": (-3.0, 5.0), "healthy_reward": 2},
        ),
        ("Ant-v5", {"exclude_current_positions_from_observation": False, "contact_cost_weight": 0.1}),
        ("Humanoid-v5", {"include_cinert_in_observation": False, "contact_cost_range": (0.1, 0.2)}),
        (
            "Humanoid-v5",
            {"include_cvel_in_observation": False, "include_qfrc_actuator_in_observation": False},
        ),
        ("HumanoidStandup-v5", {"include_cfrc_ext_in_observation": False, "impact_cost_weight": 1e-3}),
        ("Hopper-v5", {"healthy_state_range": (-2.0, 2.0), "healthy_reward": 3, "terminate_when_unhealthy": 1}),
        ("Walker2d-v5", {"terminate_when_unhealthy": False, "healthy_angle_range": (-0.2, 0.3)}),
        ("Reacher-v5", {"reward_control_weight": 0.3, "reward_dist_weight": 2}),
        ("Pusher-v5", {"reward_near_weight": 0.1, "frame_skip": 2}),
        ("InvertedPendulum-v5", {"reset_noise_scale": 0.1}),
        ("InvertedDoublePendulum-v5", {"healthy_reward": 3}),
    ],
)
def test_options_of_the_tasks_mean_what_they_mean_in_gymnasium(env_id: str, kwargs: dict[str, Any]) -> None:
    ends = assert_same_run(env_id, AutoresetMode.SAME_STEP, 120, max_episode_steps=17, **kwargs)
    assert min(ends) >= 5


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("env_id", ["Humanoid-v5", "Hopper-v5", "Reacher-v5"])
def test_one_or_two_environments_sum_in_the_same_order(env_id: str, num_envs: int) -> None:
    assert min(assert_same_run(env_id, AutoresetMode.SAME_STEP, 150, num_envs, max_episode_steps=40)) >= 2


@pytest.mark.parametrize("env_id", ["Ant-v5", "HalfCheetah-v5", "Hopper-v5"])
def test_disabled_autoreset_equals_sync_and_insists_on_resets(env_id: str) -> None:
    mode = AutoresetMode.DISABLED
    both = (
        MujocoBatchVecEnv(env_id, 3, 2, mode, max_episode_steps=25),
        sync(env_id, 3, mode, max_episode_steps=25),
    )
    assert_identical(*(envs.reset(seed=1) for envs in both), "reset")
    rng = np.random.default_rng(1)
    num_resets = 0
    for step in range(120):
        if step == 10:
            assert_identical(*(envs.reset(options={"reset_mask": np.eye(3, dtype=bool)[2]}) for envs in both), "")
        actions = random_actions(rng, both[1], step)
        results = [envs.step(actions) for envs in both]
        assert_identical(*results, f"step {step}")
        ended = results[0][2] | results[0][3]
        if ended.any():
            with pytest.raises(ResetNeeded, match="reset them first"):
                both[0].step(actions)
            assert_identical(*(envs.reset(options={"reset_mask": ended.copy()}) for envs in both), "masked reset")
            num_resets += 1
    assert num_resets >= 6


@pytest.mark.parametrize("env_id", ["Ant-v5", "Hopper-v5", "InvertedDoublePendulum-v5"])
def test_numbers_do_not_depend_on_the_number_of_threads(env_id: str) -> None:
    runs = []
    for num_threads in (1, 2, 5, None):
        envs = MujocoBatchVecEnv(env_id, 5, num_threads, max_episode_steps=50)
        envs.reset(seed=3)
        rng = np.random.default_rng(3)
        runs.append([envs.step(random_actions(rng, envs, step)) for step in range(80)])
    for run in runs[1:]:
        assert_identical(run, runs[0], env_id)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("env_id", TASKS)
def test_a_restored_run_continues_bit_for_bit(env_id: str, mode: AutoresetMode) -> None:
    num_envs, rng = 3, np.random.default_rng(5)
    unbroken = MujocoBatchVecEnv(env_id, num_envs, 2, mode, max_episode_steps=41)
    unbroken.reset(seed=5)
    unbroken.step(random_actions(rng, unbroken, 0))
    unbroken.reset(options={"reset_mask": np.array([True, False, False])})
    for step in range(100):
        terminated, truncated = unbroken.step(random_actions(rng, unbroken, step))[2:4]
        if step > 35 and (terminated | truncated).any():
            break  # in NEXT_STEP mode an environment waits for its reset now, others are under way
    assert (terminated | truncated).any()
    assert not (terminated | truncated).all()
    saved = pickle.dumps(unbroken.get_state())
    plan = [random_actions(rng, unbroken, step) for step in range(60)]
    expected = [unbroken.step(actions) for actions in plan]

    fresh = MujocoBatchVecEnv(env_id, num_envs, 1, mode, max_episode_steps=41)
    fresh.set_state(pickle.loads(saved))
    assert_identical([fresh.step(actions) for actions in plan], expected, "fresh environment")
    unbroken.set_state(pickle.loads(saved))
    assert_identical([unbroken.step(actions) for actions in plan], expected, "the same environment, later")


@pytest.mark.parametrize("env_id", TASKS)
def test_a_masked_reset_after_a_restore_returns_the_other_rows_as_they_were(env_id: str) -> None:
    """Not recomputed ones: after a step MuJoCo's derived positions and forces lag the coordinates by one sub-step."""
    unbroken, restored, again = (MujocoBatchVecEnv(env_id, 3, 1) for _ in range(3))
    unbroken.reset(seed=1)
    rng = np.random.default_rng(1)
    for step in range(8):
        obs = unbroken.step(random_actions(rng, unbroken, step))[0]
    restored.set_state(unbroken.get_state())
    again.set_state(pickle.loads(pickle.dumps(restored.get_state())))
    for mask in (np.array([False, True, False]), np.array([True, False, False])):
        expected = unbroken.reset(options={"reset_mask": mask})[0]
        assert_identical(restored.reset(options={"reset_mask": mask})[0], expected, env_id)
        assert_identical(again.reset(options={"reset_mask": mask})[0], expected, env_id)
    assert_identical(expected[2], obs[2], env_id)
    actions = random_actions(rng, unbroken, 0)
    assert_identical(restored.step(actions), unbroken.step(actions), env_id)
    mask = np.array([False, False, True])
    results = [envs.reset(options={"reset_mask": mask})[0] for envs in (restored, unbroken)]
    assert_identical(*results, env_id)


def test_a_saved_state_is_a_copy_made_of_plain_values() -> None:
    envs = MujocoBatchVecEnv("Ant-v5", 2, 1)
    envs.reset(seed=0)
    state = envs.get_state()
    before = pickle.dumps(state)
    envs.step(np.ones((2, 8)))
    envs.reset()
    assert pickle.dumps(state) == before

    def check(value: Any) -> None:
        if isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                check(item)
        else:
            assert value is None or isinstance(value, (int, float, bool, str, np.ndarray)), type(value)

    check(state)
    with pytest.raises(ValueError, match=r"Ant-v5 .*Hopper-v5"):
        MujocoBatchVecEnv("Hopper-v5", 2, 1).set_state(state)
    with pytest.raises(ValueError, match=r"\(2, \d+\).*\(3, \d+\)"):
        MujocoBatchVecEnv("Ant-v5", 3, 1).set_state(state)


@pytest.mark.parametrize("env_id", ["Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "InvertedPendulum-v5"])
@pytest.mark.parametrize("velocity", [1e30, np.nan, 3e3])
def test_exploding_physics_goes_on_as_in_gymnasium(env_id: str, velocity: float) -> None:
    expected, actual = sync(env_id, 3, AutoresetMode.SAME_STEP), MujocoBatchVecEnv(env_id, 3, 2)
    assert_identical(actual.reset(seed=2), expected.reset(seed=2), "reset")
    rng = np.random.default_rng(2)
    for step in range(30):
        actions = random_actions(rng, expected, step)
        if step == 5:
            expected.envs[1].unwrapped.data.qvel[0] = velocity
            actual._sims.qvel[1, 0] = velocity
        if step == 15:
            actions[0, 0] = np.nan
        assert_identical(actual.step(actions), expected.step(actions), f"step {step}")


def test_an_engine_error_in_one_simulation_is_reported_with_its_number() -> None:
    # a ball that touches the floor needs more memory than this model grants
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><size memory='2K'/><worldbody><geom type='plane' size='9 9 1'/>"
        "<body pos='0 0 3'><freejoint/><geom size='.3'/></body></worldbody></mujoco>"
    )
    sims = Simulations(model, 3, 2)
    sims.reset(np.arange(3, dtype=np.int32))
    sims.step(1)
    sims.qpos[1, 2] = 0.1
    with pytest.raises(RuntimeError, match=r"MuJoCo failed in 1 of 3 simulations, at number 1: .*out of memory"):
        sims.step(1)


def test_returned_arrays_are_not_written_again() -> None:
    envs = MujocoBatchVecEnv("Hopper-v5", 4, 2)
    kept = [envs.reset(seed=0)]
    rng = np.random.default_rng(0)
    kept += [envs.step(random_actions(rng, envs, step)) for step in range(3)]
    snapshot = pickle.dumps(kept)
    for step in range(30):
        envs.step(random_actions(rng, envs, step))
    assert_identical(kept, pickle.loads(snapshot), "earlier results")


def test_seeds_and_generators_are_those_of_the_single_environments() -> None:
    envs, reference = MujocoBatchVecEnv("Hopper-v5", 3, 1), SyncVectorEnv([lambda: gym.make("Hopper-v5")] * 3)
    for vec_env in (envs, reference):
        vec_env.reset(seed=[7, 8, 9])
        vec_env.reset(seed=[None, 5, None])
    assert envs.np_random_seed == reference.np_random_seed == (7, 5, 9)
    assert [g.random() for g in envs.np_random] == [g.random() for g in reference.np_random]
    envs.set_state(envs.get_state())
    assert envs.np_random_seed == (-1, -1, -1)


class Bare(gym.Wrapper):
    """A wrapper that a user adds, without RecordConstructorArgs."""


def with_attribute(env_id: str, name: str, value: Any) -> gym.Env:
    env = gym.make(env_id)
    setattr(env.unwrapped, name, value)
    return env


def with_gravity(value: float) -> gym.Env:
    env: Any = gym.make("Hopper-v5")
    env.unwrapped.model.opt.gravity[2] = value
    return env


PLAIN: dict[str, tuple[bool, Any]] = {
    **{env_id: (True, partial(gym.make, env_id)) for env_id in TASKS},
    "after steps": (True, lambda: stepped(gym.make("Hopper-v5"))),
    "arguments": (True, lambda: gym.make("Ant-v5", ctrl_cost_weight=0.1, max_episode_steps=7)),
    "rendering": (True, lambda: gym.make("Ant-v5", render_mode="rgb_array", width=64)),
    "no time limit": (True, lambda: gym.make("Ant-v5", max_episode_steps=-1)),
    "no checker": (True, lambda: gym.make("Ant-v5", disable_env_checker=True)),
    "same gravity": (True, lambda: with_gravity(-9.81)),
    "other gravity": (False, lambda: with_gravity(-3.7)),
    "wrapper": (False, lambda: Bare(gym.make("Hopper-v5"))),
    "Gymnasium's wrapper": (False, lambda: gym.wrappers.ClipAction(gym.make("Hopper-v5"))),
    "second time limit": (False, lambda: gym.wrappers.TimeLimit(gym.make("Hopper-v5"), 7)),
    "frames": (False, lambda: gym.make("Hopper-v5", render_mode="rgb_array_list")),
    "changed weight": (False, lambda: with_attribute("Hopper-v5", "_healthy_reward", 2.0)),
    "replaced method": (False, lambda: with_attribute("Hopper-v5", "step", None)),
    "other task": (False, lambda: gym.make("CartPole-v1")),
    "older task": (False, lambda: gym.make("HalfCheetah-v4")),
}


def stepped(env: gym.Env) -> gym.Env:
    env.reset(seed=0)
    env.step(env.action_space.sample())
    return env


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN)
def test_only_what_gymnasium_makes_is_plain_and_a_batch_like_it_computes_the_same(name: str) -> None:
    plain, env_fn = PLAIN[name]
    assert is_plain_task(env_fn()) == plain
    if plain:
        batch = MujocoBatchVecEnv.like(env_fn(), 2, 1)
        reference = SyncVectorEnv([env_fn] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        assert_identical(batch.reset(seed=3), reference.reset(seed=3), name)
        rng = np.random.default_rng(3)
        for step in range(20):
            actions = random_actions(rng, reference, step)
            assert_identical(batch.step(actions), reference.step(actions), f"{name} {step}")


def test_mistakes_are_answered_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="the closest is 'HalfCheetah-v5'"):
        MujocoBatchVecEnv("HalfCheeta-v5", 2)
    with pytest.raises(ValueError, match="is none of Ant-v5"):
        MujocoBatchVecEnv("CartPole-v1", 2)
    with pytest.raises(ValueError, match="num_envs=0"):
        MujocoBatchVecEnv("Hopper-v5", 0)
    with pytest.raises(ValueError, match="num_threads=-1"):
        MujocoBatchVecEnv("Hopper-v5", 2, -1)
    with pytest.raises(ValueError, match="use 'rgb_array'"):
        MujocoBatchVecEnv("Hopper-v5", 2, render_mode="rgb_array_list")
    envs = MujocoBatchVecEnv("Hopper-v5", 2, 1)
    with pytest.raises(ResetNeeded):
        envs.step(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="2 environments but 3 seeds"):
        envs.reset(seed=[1, 2, 3])
    for mask in (np.zeros(2, bool), np.ones(3, bool), [True, False], np.ones(2, int)):
        with pytest.raises(ValueError, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})
    with pytest.raises(ResetNeeded, match="first reset must be of all"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.reset()
    for shape in ((3,), (2, 4), (3, 3), (2, 3, 1)):
        with pytest.raises(ValueError, match=r"must have shape \(2, 3\), got"):
            envs.step(np.zeros(shape))
    for dtype in (np.float16, np.float32, np.longdouble, np.int8):
        assert envs.step(np.zeros((2, 3), dtype))[1].dtype == np.float64
    envs.close()
    envs.close()
    for call in (envs.reset, envs.get_state, envs.render, lambda: envs.step(np.zeros((2, 3)))):
        with pytest.raises(ClosedEnvironmentError):
            call()


def test_simulations_cannot_be_copied_or_pickled() -> None:
    """A copy would step the original's robots, and read freed memory when that is gone."""
    env = MujocoBatchVecEnv("InvertedPendulum-v5", 2)
    for how in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"use get_state\(\) and set_state\(\)"):
            how(env._sims)
    with pytest.raises(TypeError, match="live in C memory"):
        copy.deepcopy(env)
    env.close()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_close_and_garbage_collection_end_the_threads() -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    before = num_threads()
    closed, dropped = (MujocoBatchVecEnv("Hopper-v5", 8, 4) for _ in range(2))
    closed.reset(seed=0)
    dropped.reset(seed=0)
    assert num_threads() == before + 6
    closed.close()
    assert num_threads() == before + 3
    del dropped
    gc.collect()
    assert num_threads() == before


def run_python(code: str, folder: Path, script: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"}
    return subprocess.run(
        [sys.executable, script] if script else [sys.executable, "-c", code],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_user_sees_no_noise_and_finds_no_log_file(tmp_path: Path) -> None:
    """Neither in this process nor in workers that make Gymnasium's own HalfCheetah."""
    (tmp_path / "main.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "from functools import partial\n"
        "from envs.mujoco_batch import MujocoBatchVecEnv\n"
        "from envs.subproc_vec_env import SubprocVecEnv\n"
        "if __name__ == '__main__':\n"
        "    gym.make('HalfCheetah-v5')\n"
        "    env_fns = [partial(gym.make, 'HalfCheetah-v5')] * 2\n"
        "    for envs in (MujocoBatchVecEnv('HalfCheetah-v5', 2), SubprocVecEnv(env_fns, context='spawn')):\n"
        "        envs.reset(seed=0)\n"
        "        envs.step(np.zeros((2, 6), np.float32))\n"
        "        envs.close()\n"
    )
    done = run_python("", tmp_path, script="main.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["main.py"]


@pytest.mark.parametrize("how", ["default", "error"])
def test_other_warnings_of_mujoco_become_warnings_also_from_its_own_threads(tmp_path: Path, how: str) -> None:
    """Where warnings are errors they cannot be raised, since no exception passes through C code: they are printed."""
    code = (
        "import numpy as np\n"
        "from envs.mujoco_batch import MujocoBatchVecEnv\n"
        "envs = MujocoBatchVecEnv('Hopper-v5', 4, 2)\n"
        "envs.reset(seed=0)\n"
        "envs._sims.qvel[:, 0] = 1e30\n"
        "envs.step(np.zeros((4, 3)))\n"
    )
    done = run_python(code, tmp_path, PYTHONWARNINGS=how)
    assert "MuJoCo: Nan, Inf or huge value in QVEL" in done.stderr
    assert ("UserWarning" in done.stderr) == (how == "default")
    assert done.returncode == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_and_can_leave_while_the_parent_goes_on(tmp_path: Path) -> None:
    code = (
        "import os, sys, numpy as np\n"
        "from envs.mujoco_batch import MujocoBatchVecEnv\n"
        "envs = MujocoBatchVecEnv('Hopper-v5', 4, 2)\n"
        "envs.reset(seed=0)\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        envs.step(np.zeros((4, 3)))\n"
        "    except RuntimeError as error:\n"
        "        sys.exit(7 if 'fork' in str(error) else 1)\n"
        "    sys.exit(2)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 7\n"
        "envs.step(np.zeros((4, 3)))\n"
        "print('parent goes on')\n"
    )
    done = run_python(code, tmp_path)
    assert done.stdout == "parent goes on\n", done.stderr


def test_render_shows_environment_0_as_gymnasium_does(tmp_path: Path) -> None:
    code = (
        "import gymnasium as gym, numpy as np\n"
        "from envs.mujoco_batch import MujocoBatchVecEnv\n"
        "one = gym.make('Hopper-v5', render_mode='rgb_array', width=64, height=48)\n"
        "envs = MujocoBatchVecEnv('Hopper-v5', 3, width=64, height=48)\n"
        "one.reset(seed=4), envs.reset(seed=4)\n"
        "first = one.render()\n"
        "for _ in range(12):\n"
        "    one.step(np.ones(3)), envs.step(np.ones((3, 3)))\n"
        "(frame,) = envs.render()\n"
        "assert frame.shape == (48, 64, 3) and frame.dtype == np.uint8\n"
        "assert (frame == one.render()).all() and (frame != first).any()\n"
        "print('same picture')\n"
    )
    done = run_python(code, tmp_path)  # on a machine without a display, where EGL is chosen
    if "GL" in done.stderr and "same picture" not in done.stdout:
        pytest.skip("this machine cannot render")
    assert done.stdout == "same picture\n", done.stderr
