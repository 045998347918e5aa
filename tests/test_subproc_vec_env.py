"""SubprocVecEnv keeps the contract of Gymnasium's vector environments: it does what SyncVectorEnv does, bit for bit."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, iterate

from envs.subproc_vec_env import SubprocVecEnv

CONTEXTS = ["fork", "forkserver", "spawn"]
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
# The server then imports once what every worker needs, which makes these tests several times faster.
multiprocessing.set_forkserver_preload(["tests.test_subproc_vec_env", "tests.test_subproc_faults"])
UNIT = Box(-np.inf, np.inf, (2,), np.float32)


class EchoEnv(gym.Env):
    """Returns each action as the next observation, so that whatever is lost on the way in or out shows."""

    def __init__(self, space: gym.Space) -> None:
        self.observation_space = self.action_space = space
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert action in self.action_space
        self.actions.append(action)
        return action, 0.0, False, False, {}


class CountEnv(gym.Env):
    """Observes how many steps it has made, from `start`; its episodes end after `limit`; its reward is the action."""

    observation_space = Discrete(100)
    action_space = Discrete(100)

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.count = (options or {}).pop("start", 0)
        return self.count, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.count += 1
        return self.count, float(action), self.count >= self.limit, False, {}


class ReusingEnv(CountEnv):
    """Counts its steps in one array and one dict for ever."""

    observation_space = UNIT

    def __init__(self) -> None:
        super().__init__()
        self.observation, self.info = np.zeros(2, np.float32), {"steps": [0]}

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self.observation[:] = self.info["steps"][0] = 0
        return self.observation, self.info

    def step(self, action: int) -> Any:
        _, *result, _ = super().step(action)
        self.observation[:] = self.info["steps"][0] = self.count
        return self.observation, *result, self.info


class NoiseEnv(gym.Env):
    """A random walk whose future is its position and its generator: what `get_state` returns."""

    observation_space = UNIT
    action_space = Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = self.np_random.normal(size=2).astype(np.float32)
        return self.position, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position = self.position + action + self.np_random.normal(size=2).astype(np.float32)
        return self.position, float(self.position.sum()), bool(self.np_random.random() < 0.1), False, {}

    def get_state(self) -> dict[str, Any]:
        return {"generator": self.np_random.bit_generator.state, "position": self.position.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.np_random.bit_generator.state = state["generator"]
        self.position = state["position"].copy()


class InfoEnv(NoiseEnv):
    """Returns infos of every kind: mostly the same numbers, now and then other keys, types and sizes."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, reward, over, truncated, _ = super().step(action)
        first, second = float(observation[0]), observation[1]
        info: dict[str, Any] = {"x": first, "y": second, "n": int(first), "ok": first > 0, "i": np.int32(first)}
        draw = self.np_random.integers(10)
        if draw == 0:
            info = {}
        elif draw == 1:
            info["name"] = "rare"
        elif draw == 2:
            info = {"x": first, "n": 2**62 + 1, "nested": {"array": np.arange(3) * first}}
        return observation, reward, over, truncated, info


def make(num_envs: int, env: Any, num_workers: int | None = 2, **kwargs: Any) -> SubprocVecEnv:
    return SubprocVecEnv([env] * num_envs, num_workers, **kwargs)


def random_steps(envs: Any, num_steps: int, seed: int = 0) -> list[tuple]:
    """The returns of `num_steps` steps with random actions; resets by mask under DISABLED."""
    envs.action_space.seed(seed)
    returns = []
    for _ in range(num_steps):
        returns.append(envs.step(envs.action_space.sample()))
        ended = returns[-1][2] | returns[-1][3]
        if envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED and ended.any():
            returns.append(envs.reset(options={"reset_mask": ended}))
    return returns


def assert_same(first: Any, second: Any) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert data_equivalence(one, other, exact=True), f"{one}\n!=\n{other}"


# ---- the same as SyncVectorEnv ----------------------------------------------------------------------------------
HALF_CHEETAH = partial(gym.make, "HalfCheetah-v5", max_episode_steps=7)
ENVS = [partial(gym.make, "CartPole-v1"), HALF_CHEETAH, NoiseEnv, InfoEnv]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("env", ENVS, ids=["CartPole", "HalfCheetah", "NoiseEnv", "InfoEnv"])
def test_equals_sync_vector_env_bit_for_bit(env: Any, mode: AutoresetMode) -> None:
    with_processes, reference = make(5, env, autoreset_mode=mode), SyncVectorEnv([env] * 5, autoreset_mode=mode)
    assert with_processes.metadata == reference.metadata
    assert_same(with_processes.reset(seed=3), reference.reset(seed=3))
    assert_same(random_steps(with_processes, 150), random_steps(reference, 150))
    assert_same(with_processes.reset(seed=[1, 2, 3, 4, None]), reference.reset(seed=[1, 2, 3, 4, None]))
    assert with_processes.np_random_seed == reference.np_random_seed
    with_processes.close()


@pytest.mark.parametrize(("context", "num_workers"), [("fork", 1), ("fork", 4), ("forkserver", 3), ("spawn", 3)])
def test_results_do_not_depend_on_processes(context: str, num_workers: int) -> None:
    envs = make(4, InfoEnv, num_workers, context=context, autoreset_mode="SameStep")
    reference = SyncVectorEnv([InfoEnv] * 4, autoreset_mode="SameStep")
    assert_same(envs.reset(seed=1), reference.reset(seed=1))
    assert_same(random_steps(envs, 30), random_steps(reference, 30))
    envs.close()


def test_infos_of_mujoco_are_not_pickled() -> None:
    envs = make(3, HALF_CHEETAH)
    envs.reset()
    for _ in range(3):
        *_, infos = envs.step(envs.action_space.sample())
    assert infos["_x_position"].all()
    assert all(worker.results == [] for worker in envs._pool.workers)
    envs.close()


class OddInfoEnv(CountEnv):
    """Info `x` is `usual`, but after the first step `odd`."""

    def __init__(self, odd: Any, usual: float) -> None:
        super().__init__()
        self.odd, self.usual = odd, usual

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        *result, _ = super().step(action)
        return *result, {"x": self.odd if self.count > 1 else self.usual}  # type: ignore[return-value]


@pytest.mark.parametrize("usual", [3, 2.5])
@pytest.mark.parametrize("odd", [3, 0.5, "n/a", None, np.arange(3), {"y": 1}], ids=str)
def test_an_info_of_several_types_is_what_gymnasium_makes_of_it(odd: Any, usual: float) -> None:
    env_fns = [partial(OddInfoEnv, x, usual) for x in (odd, usual)]
    ours, theirs = SubprocVecEnv(env_fns), SyncVectorEnv(env_fns)
    ours.reset()
    theirs.reset()
    for _ in range(4):
        try:
            expected = theirs.step([0, 0])[4]
        except Exception as error:  # Gymnasium cannot merge a dict with a number either
            with pytest.raises(type(error)):
                ours.step([0, 0])
            break
        assert data_equivalence(ours.step([0, 0])[4], expected)
    ours.close()


NUMERIC_SPACES = [
    Box(-1, 1, (), np.float64),
    Box(0, 255, (8, 8, 3), np.uint8),
    Box(-1, 1, (3,), np.float16),
    Box(np.array([0, 0, 1]), np.array([1, 0, 1]), dtype=np.bool_),
    Box(np.array([-np.inf, 0]), np.array([np.inf, 10]), dtype=np.int32),
    Discrete(7),
    Discrete(5, start=-2),
    Discrete(n=4, dtype=np.int32, start=1),
    MultiDiscrete([[2, 3], [3, 2]], start=[[10, 20], [30, 40]]),
    MultiDiscrete([2, 3], dtype=np.uint16),
    MultiBinary([2, 3]),
    Tuple((Discrete(5), Tuple((Box(0, 1, (3,)), Discrete(2))))),
    Tuple((Discrete(3), Dict(position=Box(0, 1), velocity=Discrete(2)))),
    Dict(a=Box(0, 1, (3, 3)), b=Dict(c=Box(-100, 100, (2,)), d=MultiBinary(4)), e=Discrete(4)),
]


@pytest.mark.parametrize("space", NUMERIC_SPACES, ids=str)
def test_actions_and_observations_of_every_numeric_space_arrive_unchanged(space: gym.Space) -> None:
    envs = make(3, partial(EchoEnv, space))
    assert envs.observation_space == envs.action_space == batch_space(space, 3)
    observations, _ = envs.reset()
    assert observations in envs.observation_space
    for _ in range(3):
        actions = envs.action_space.sample()
        observations, *_ = envs.step(actions)
        assert data_equivalence(observations, actions, exact=True)
    received = envs.get_attr("actions")
    for env_index, last in enumerate(iterate(envs.action_space, actions)):
        assert data_equivalence(received[env_index][-1], last)
        # an environment may keep its actions: later ones must not have overwritten the first
        assert len(received[env_index]) == 3
    envs.close()


def test_a_reset_that_fills_the_same_arrays_again_leaves_the_final_ones_alone() -> None:
    """Where a time limit cuts an episode, its value is that of the state it reached, not of the next one's first."""
    listing = partial(gym.wrappers.TransformObservation, ReusingEnv(), np.ndarray.tolist, UNIT)
    envs = SubprocVecEnv([ReusingEnv, listing], autoreset_mode=AutoresetMode.SAME_STEP, context="fork")
    envs.reset()
    for _ in range(3):
        obs, _, terminated, _, infos = envs.step([0, 0])
    envs.close()
    assert terminated.all()
    assert (obs == 0).all()
    np.testing.assert_array_equal(np.stack(infos["final_obs"]), np.full((2, 2), 3, np.float32), strict=True)
    assert [steps for (steps,) in infos["final_info"]["steps"]] == [3, 3]


def test_bad_reset_masks_are_refused() -> None:
    envs = make(3, CountEnv, autoreset_mode="Disabled")
    for mask in (np.array([True]), np.array([[True, True, True]]), np.zeros(3, bool), np.array([1, 1, 0]), [True] * 3):
        options = {"reset_mask": mask}
        boolean = isinstance(mask, np.ndarray) and mask.dtype == np.bool_
        with pytest.raises(ValueError if boolean else TypeError, match="reset_mask"):
            envs.reset(options=options)
        assert "reset_mask" in options  # the caller's dict is the caller's
    envs.reset()
    envs.close()


# ---- arguments --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("num_envs", "num_workers", "limit", "sizes"),
    [(1, 1, None, [1]), (5, 2, 5, [2, 3]), (7, 3, None, [2, 2, 3]), (4, 9, 2, [2, 2]), (2, 9, None, [1, 1])],
)
def test_environments_are_dealt_evenly_and_in_order(num_envs: int, num_workers: int, limit: Any, sizes: Any) -> None:
    env_fns = [partial(CountEnv, limit) for limit in range(1, num_envs + 1)]
    envs = SubprocVecEnv(env_fns, num_workers, max_concurrency=limit)
    assert [len(worker.env_indices) for worker in envs._pool.workers] == sizes
    assert envs.get_attr("limit") == tuple(range(1, num_envs + 1))
    envs.close()


class NamelessSpace(gym.Space):
    """Not one of Gymnasium's."""


def echo(*spaces: gym.Space) -> dict[str, Any]:
    return {"env_fns": [partial(EchoEnv, space) for space in spaces]}


DYNAMIC = "has a dynamic shape .*wrap the environment so that all is numeric"
OTHER = r"need the same spaces, but environment 1 has .*, environment 0 \(Box"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"env_fns": []}, ValueError, "at least one environment"),
    ({"num_workers": 0}, ValueError, "`num_workers` must be a positive or None, got 0"),
    ({"num_workers": True}, ValueError, "`num_workers` must be an integer or None, got"),
    ({"max_concurrency": "2"}, ValueError, "`max_concurrency` must be an integer or None, got"),
    ({"on_worker_failure": "ignore"}, ValueError, "'raise' or 'restart', got 'ignore'"),
    ({"step_timeout": 0.0}, ValueError, "`step_timeout` must be a positive number of seconds or None, got 0.0"),
    ({"autoreset_mode": "Sometimes"}, ValueError, "Sometimes"),
    ({"context": "thread"}, ValueError, "thread"),
    (echo(Text(5)), TypeError, DYNAMIC),
    (echo(Sequence(Discrete(3))), TypeError, DYNAMIC),
    (echo(Dict(a=Discrete(2), b=Graph(Box(-1, 1), None))), TypeError, DYNAMIC),
    (echo(NamelessSpace()), ValueError, DYNAMIC),
    *((echo(Box(0, 1, (2,)), space), RuntimeError, OTHER) for space in (Box(0, 2, (2,)), Box(0, 1, (3,)), Discrete(2))),
]


@pytest.mark.parametrize(("kwargs", "error", "text"), REFUSED)
def test_wrong_arguments_leave_no_process(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SubprocVecEnv(**{"env_fns": [CountEnv], **kwargs})
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("SubprocVecEnv")]


NESTED = Dict(a=UNIT, b=UNIT)
TOO_MUCH = r"-?\d+ does not fit u?int\d+"
BAD_ACTIONS: list[tuple[gym.Space, Any, str, Any]] = [  # and ones that fit, as int64, which is what agents return
    (UNIT, np.zeros(2), r"expected an array of shape \(2, 2\), got one of shape \(2,\)", None),
    (UNIT, 0, r"expected an array of shape \(2, 2\), got one of shape \(\)", None),
    (Discrete(2), [0.9, 1.7], "same_kind", None),
    (Discrete(2), np.array([0.9, 1.7]), "same_kind", None),
    (NESTED, {"a": np.zeros((2, 2))}, "'b'", None),
    (NESTED, np.zeros((2, 2)), "indices|index", None),
    (NESTED, {"a": np.zeros((2, 2)), "b": np.zeros(2)}, "expected an array of shape", None),
    (Discrete(4, dtype=np.uint8), [-1, -1], TOO_MUCH, [3, 3]),
    (MultiDiscrete([2, 300], dtype=np.uint16), [[0, 65_536]] * 2, TOO_MUCH, [[1, 299]] * 2),
    (MultiBinary(2), [[256, 257]] * 2, TOO_MUCH, [[0, 1]] * 2),
    (Box(-(2**31), 2**31 - 1, (2,), np.int32), [[2**31, 0]] * 2, TOO_MUCH, [[-5, 7]] * 2),
    (Discrete(2, dtype=np.int32), [2**32] * 2, TOO_MUCH, [1, 1]),
]


@pytest.mark.parametrize(("space", "bad", "text", "good"), BAD_ACTIONS)
def test_bad_actions_are_refused_and_do_no_harm(space: gym.Space, bad: Any, text: str, good: Any) -> None:
    envs = make(2, partial(EchoEnv, space))
    envs.reset()
    with pytest.raises((TypeError, ValueError, KeyError, IndexError), match=text):
        envs.step(bad if good is None else np.array(bad))
    fits = envs.action_space.sample() if good is None else np.array(good)
    assert data_equivalence(envs.step(fits)[0], fits if good is None else fits.astype(space.dtype))
    envs.close()


class TypeEnv(EchoEnv):
    """Ends at once, with the type of its action in `info`."""

    def step(self, action: Any) -> Any:
        return np.reshape(action, self.action_space.shape), 0.0, True, False, {"type": type(action).__name__}


@pytest.mark.parametrize("shape", [(), (1,)])
def test_single_real_actions_may_come_as_plain_numbers_and_arrive_as_such(shape: tuple[int, ...]) -> None:
    envs = make(2, partial(TypeEnv, Box(-1, 1, shape)), autoreset_mode="Disabled")
    envs.reset()
    observations, *_, infos = envs.step([0.25, 0.5])  # as AsyncVectorEnv hands them on
    assert observations.ravel().tolist() == [0.25, 0.5]
    assert infos["type"].tolist() == ["float", "float"]
    envs.close()


def test_results_are_the_callers_or_with_copy_false_the_shared_arrays() -> None:
    action = np.zeros((2, 2), np.float32)
    for copy in (True, False):
        envs = make(2, NoiseEnv, copy=copy)
        envs.reset()
        first, second = envs.step(action), envs.step(action)
        assert {np.shares_memory(one, other) for one, other in zip(first[:4], second[:4], strict=True)} == {not copy}
        envs.close()
        assert np.isfinite(first[0]).all()  # the memory outlives the environments as long as someone looks at it


# ---- calls and states -------------------------------------------------------------------------------------------
def test_calls_attributes_and_rendering() -> None:
    envs = make(3, lambda: gym.wrappers.TimeLimit(PaintEnv(), 10))
    assert envs.render_mode == "rgb_array"
    envs.reset(seed=5)
    frames = envs.render()
    assert isinstance(frames, tuple)
    assert [frame.shape for frame in frames] == [(4, 4, 3)] * 3
    assert envs.get_attr("gravity") == (9.8, 9.8, 9.8)
    envs.set_attr("gravity", [9.81, 3.72, 1.62])
    assert envs.get_attr("gravity") == (9.81, 3.72, 1.62)
    envs.set_attr("gravity", 0.5)
    assert envs.call("gravity") == (0.5, 0.5, 0.5)
    assert envs.np_random_seed == (5, 6, 7)
    assert [type(generator) for generator in envs.np_random] == [np.random.Generator] * 3
    with pytest.raises(ValueError, match="Got `2` values for 3 environments"):
        envs.set_attr("gravity", [1, 2])
    with pytest.raises(ValueError, match="length must match num_envs=3 but got length=2"):
        envs.reset(seed=[1, 2])
    with pytest.raises(Exception, match=r"(?i)pickle"):
        envs.set_attr("gravity", lambda: 9.81)
    with pytest.raises(AttributeError, match="no_such_thing"):
        envs.get_attr("no_such_thing")
    with pytest.raises(ValueError, match="use `step` directly"):
        envs.call("step", 0)
    big = [np.full(400_000, n) for n in range(3)]  # more than a pipe holds
    envs.set_attr("big", big)
    assert all(map(np.array_equal, envs.get_attr("big"), big))
    envs.step([0, 0, 0])  # and mistaken calls did no harm
    envs.close()


def test_environments_share_no_arguments() -> None:
    envs = make(4, CountEnv)  # which takes it out of the options that it is given
    assert envs.reset(options={"start": 1})[0].tolist() == [1, 1, 1, 1]
    envs.close()


def test_what_old_environments_draw_globally_differs_between_workers_and_repeats() -> None:
    class OldEnv(CountEnv):
        def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
            return 0, np.random.random(), False, False, {}

    rewards = []
    for _ in range(2):
        np.random.seed(1)
        envs = SubprocVecEnv([OldEnv] * 4, 2, context="fork")
        envs.reset()
        rewards.append(envs.step([0] * 4)[1].tolist())
        envs.close()
    assert rewards[0] == rewards[1]
    assert len(set(rewards[0])) == 4


def test_calls_out_of_order_are_refused() -> None:
    envs = make(2, CountEnv, on_worker_failure="restart")
    with pytest.raises(NoAsyncCallError, match="Calling `reset_wait` without any prior call to `reset_async`"):
        envs.reset_wait()
    envs.reset()
    with pytest.raises(NoAsyncCallError, match="Calling `step_wait` without any prior call to `step_async`"):
        envs.step_wait()
    envs.step_async([0, 0])
    for method, arguments in [("reset_async", ()), ("step_async", ([0, 0],))]:
        message = f"Calling `{method}` while waiting for a pending call to `step` to complete"
        with pytest.raises(AlreadyPendingCallError, match=message):
            getattr(envs, method)(*arguments)
    with pytest.raises(AlreadyPendingCallError):
        envs.set_attr("limit", 3)
    assert envs.step_wait()[0].tolist() == [1, 1]
    envs.step_async([0, 0])
    with pytest.warns(UserWarning, match="Calling `close` while waiting for a pending call to `step` to complete"):
        envs.close()
    for method in (envs.reset, partial(envs.step, [0, 0]), envs.step_wait, envs.render, envs.get_state):
        with pytest.raises(ClosedEnvironmentError):
            method()
    envs.close()


class PaintEnv(CountEnv):
    """Renders its gravity."""

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    gravity = 9.8

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), self.gravity)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_restored_state_continues_bit_for_bit_with_another_number_of_workers(mode: AutoresetMode) -> None:
    env = lambda: gym.wrappers.TimeLimit(NoiseEnv(), 7)  # noqa: E731
    first = make(5, env, 2, autoreset_mode=mode)
    first.reset(seed=1)
    random_steps(first, 10)
    state = first.get_state()
    some = {"reset_mask": np.array([True, False, False, True, False])}

    def go_on(envs: SubprocVecEnv) -> list[tuple]:
        return [envs.reset(options=some), *random_steps(envs, 40, seed=9)]

    expected = go_on(first)
    second = make(5, env, 3, autoreset_mode=mode)
    second.set_state(state)
    assert_same(go_on(second), expected)
    first.set_state(state)  # and again where it came from
    assert_same(go_on(first), expected)
    assert any(step[3].any() for step in expected[1:] if len(step) == 5)  # TimeLimit's counter was in it
    smaller = make(2, env)
    with pytest.raises(ValueError, match="This state is of 5 environments, but here are 2"):
        smaller.set_state(state)
    smaller.close()
    first.close()
    second.close()
