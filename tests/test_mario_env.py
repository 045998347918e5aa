"""Super Mario Bros on the real emulators: what is installed is tested, nothing stands in for it."""

import hashlib
import signal
import subprocess
import sys
import warnings
from itertools import cycle, repeat
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from envs import nes_common, nes_core
from envs.mario import (
    ACTION_SETS,
    REWARDS,
    STAGES,
    MarioBackendError,
    MarioEnv,
    RewardTerms,
    available_backends,
)
from envs.nes_common import GRAY, RIGHT, START, A, B
from envs.nes_core import NesCore, make_core

NOOP, WALK, RUN, RUN_JUMP, JUMP, LEFT = 0, 1, 3, 4, 5, 6  # of the "simple" action set

# Runs found by a search over save states: how many decisions to jump (running right), to run, to jump, ...
GOAL_RUNS = {
    ("fceumm", "1-1"): (
        "13 13 13 4 11 2 8 2 21 1 6 7 5 5 10 11 2 9 9 4 8 7 7 11 4 10 2 4 9 1 1 13 6 3 11 9 4 7 16 1 3 15 8 10 13 7 2 "
    ),
    ("fceumm", "1-4"): ("13 5 10 6 4 4 1 14 1 11 12 19 11 3 9 5 2 8 10 2 2 16 12 8 5 2 5 2 7 2 12 4 9 1 "),
    ("nes_py", "1-1"): (
        "13 13 13 4 11 2 8 2 4 18 3 7 8 4 16 2 5 1 10 1 1 7 9 5 2 7 20 7 8 17 16 3 8 1 2 1 7 7 2 4 "
        "1 14 1 16 7 5 1 11 8 1 7 4 4 "
    ),
}
MAZE_RUN = "0 9 23 3 1 9 4 16 15 19 7"  # into the loop of 4-4, on fceumm


def decode(run: str) -> list[int]:
    lengths = map(int, run.split())
    return [action for length, action in zip(lengths, cycle([RUN_JUMP, RUN]), strict=False) for _ in range(length)]


def require(backend: str) -> None:
    if backend not in available_backends():
        pytest.skip(f"the {backend} emulator is not installed: {nes_core.INSTALL[backend]}")


@pytest.fixture(params=["nes_py", "fceumm"])
def backend(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return request.param


@pytest.fixture
def fceumm() -> str:
    require("fceumm")
    return "fceumm"


def play(env: MarioEnv, actions: list[int]) -> list[tuple[np.ndarray, float, bool, bool, dict[str, Any]]]:
    """Step through the actions; at an episode's end reset and go on."""
    steps = []
    for action in actions:
        step = env.step(action)
        steps.append(step)
        if step[2] or step[3]:
            env.reset()
    return steps


def play_episode(env: MarioEnv, actions: Any) -> tuple[float, dict[str, Any]]:
    """Play until the end; return the sum of rewards and the last info."""
    total = 0.0
    for action in actions:
        _, reward, terminated, truncated, info = env.step(action)
        total += reward
        if terminated or truncated:
            return total, info
    raise AssertionError("the actions ran out before the episode did")


def play_frames(core: NesCore, count: int) -> None:
    for _ in range(count):
        core.step(0)


def random_actions(count: int, seed: int = 0) -> list[int]:
    return (
        np.random.default_rng(seed)
        .choice([WALK, RUN, RUN_JUMP, JUMP, LEFT], count, p=[0.1, 0.3, 0.4, 0.1, 0.1])
        .tolist()
    )


def same(first: list, second: list) -> bool:
    return all(np.array_equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(first, second, strict=True))


# Gymnasium's contract


@pytest.mark.parametrize("options", [{}, {"obs": "rgb64", "reward": "document", "max_pool": True, "full_info": True}])
def test_env_checker_is_content(backend: str, options: dict[str, Any]) -> None:
    env = MarioEnv("1-1", backend, noop_max=5, sticky_action_probability=0.25, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)  # the render check wants an id from gymnasium.register


@pytest.mark.parametrize(
    ("obs", "stack", "shape"),
    [
        ("gray64", None, (4, 64, 64)),
        ("rgb64", None, (3, 64, 64)),
        ("gray84", None, (4, 84, 84)),
        ("rgb64", 2, (6, 64, 64)),
    ],
)
def test_observation_shapes(fceumm: str, obs: str, stack: int | None, shape: tuple[int, ...]) -> None:
    env = MarioEnv("1-1", fceumm, obs=obs, frame_stack=stack)
    observation, _ = env.reset(seed=0)
    assert observation.shape == shape == env.observation_space.shape
    assert observation.dtype == np.uint8
    assert observation.std() > 20  # a picture, not a blank


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "9-1"}, "9-1"),
        ({"stage": "1-1,5"}, "choose among 1-1 to 8-4"),
        ({"backend": "snes"}, "nes_py"),
        ({"action_set": "all"}, "right_only, simple, complex"),
        ({"stage": 11}, "choose among 1-1 to 8-4"),
        ({"obs": "rgb84"}, "gray64"),
        ({"frame_stack": 0}, "at least 1"),
        ({"skip": 0}, "skip=0"),
        ({"skip": 1, "max_pool": True}, "skip=1"),
        ({"reward": "score"}, "shaped, document"),
        ({"stuck_steps": -1}, "0 to switch it off"),
        ({"noop_max": -3}, "noop_max=-3"),
        ({"noop_max": 301}, "noop_max=301: wait at most 300 frames"),
        ({"sticky_action_probability": 1.0}, "below 1"),
        ({"render_mode": "human"}, "rgb_array"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MarioEnv(**options)


def test_actions_are_integers_or_one_hot(fceumm: str) -> None:
    assert [len(ACTION_SETS[name]) for name in ("right_only", "simple", "complex")] == [5, 7, 12]
    assert ACTION_SETS["simple"] == (0, RIGHT, RIGHT | A, RIGHT | B, RIGHT | A | B, A, 64)
    number, one_hot = MarioEnv("1-1", fceumm), MarioEnv("1-1", fceumm)
    number.reset(seed=0)
    one_hot.reset(seed=0)
    assert same([number.step(RUN)], [one_hot.step(np.eye(7)[RUN])])
    for wrong in (7, -1, 2.7, None, [0, 1], np.array([0, 0])):
        with pytest.raises(ValueError, match="integers 0 to 6"):
            number.step(wrong)


def test_stepping_outside_an_episode_is_refused(fceumm: str) -> None:
    env = MarioEnv("1-1", fceumm, max_episode_steps=1)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(0)
    env.reset()
    assert env.step(0)[2:4] == (False, True)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(0)


def test_info_is_empty_until_the_episode_ends(fceumm: str) -> None:
    env = MarioEnv("1-1", fceumm, max_episode_steps=5)
    assert env.reset(seed=0)[1] == {}
    infos = [env.step(RUN)[4] for _ in range(5)]
    assert infos[:4] == [{}] * 4
    assert set(infos[4]) == {
        "x_pos",
        "max_x",
        "time",
        "world",
        "stage",
        "coins",
        "score",
        "life",
        "status",
        "flag_get",
        "death",
        "stuck",
        "document_reward",
        "document_return",
    }
    assert all(type(value) in (int, bool, float) for value in infos[4].values())


# Pictures


def area_average(picture: np.ndarray, side: int) -> np.ndarray:
    """Average (240, 256, 3) down to (side, side, 3): each cell is the mean of the pixels whose centres it holds."""

    def shares(size: int) -> np.ndarray:
        edges = np.arange(side + 1)[:, None] * size / side
        centres = np.arange(size) + 0.5
        inside = (centres > edges[:-1]) & (centres <= edges[1:])
        return inside / inside.sum(1, keepdims=True)

    rows = np.tensordot(shares(240), picture.astype(float), axes=1)
    return np.tensordot(rows, shares(256), axes=(1, 1)).transpose(0, 2, 1)


@pytest.mark.parametrize("obs", ["gray64", "gray84", "rgb64"])
def test_observation_is_the_average_of_the_screen(backend: str, obs: str) -> None:
    env = MarioEnv("1-1", backend, obs=obs, render_mode="rgb_array")
    env.reset(seed=0)
    observation = play(env, [RUN] * 12)[-1][0]
    picture = env.render()
    assert picture is not None
    assert picture.shape == (240, 256, 3)
    expected = area_average(picture, env.observation_space.shape[-1])
    if obs == "rgb64":
        newest = observation.transpose(1, 2, 0)
    else:
        newest, expected = observation[-1], expected @ GRAY[:3]
    assert np.abs(newest - expected).max() < 2.0


def test_grey_tells_apart_what_the_usual_luma_does_not(fceumm: str) -> None:
    colors = np.array([(206, 77, 8), (0, 170, 0), (90, 150, 255)])  # Goombas and ground; hills; sky
    env = MarioEnv("1-1", fceumm, render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture is not None
    assert all((picture == color).all(-1).any() for color in colors)
    luma, grey = colors @ (0.299, 0.587, 0.114), colors @ GRAY[:3]
    assert abs(luma[0] - luma[1]) < 10
    assert np.abs(np.diff(grey, append=grey[0])).min() > 50


def test_max_pool_takes_the_brighter_of_the_last_two_frames(fceumm: str) -> None:
    pooled = MarioEnv("1-1", fceumm, obs="rgb64", max_pool=True)
    single = MarioEnv("1-1", fceumm, obs="rgb64", skip=1, render_mode="rgb_array")
    pooled.reset(seed=0)
    single.reset(seed=0)
    moved = 0
    for _ in range(10):
        observation = pooled.step(RUN)[0]
        pictures = []
        for _ in range(4):
            single.step(RUN)
            pictures.append(single.render())
        expected = area_average(np.maximum(pictures[-2], pictures[-1]), 64)
        assert np.abs(observation.transpose(1, 2, 0) - expected).max() < 2.0
        moved += not np.array_equal(pictures[-2], pictures[-1])
    assert moved >= 5


def test_frames_are_stacked_oldest_first(fceumm: str) -> None:
    env = MarioEnv("1-1", fceumm)
    first, _ = env.reset(seed=0)
    assert all(np.array_equal(first[0], frame) for frame in first)
    steps = [step[0] for step in play(env, [RUN] * 6)]
    assert np.array_equal(steps[5], np.stack([steps[k][-1] for k in (2, 3, 4, 5)]))
    assert not np.array_equal(steps[5][0], steps[5][3])


def test_mask_score_blanks_the_top_rows_only(fceumm: str) -> None:
    plain, masked = (MarioEnv("1-1", fceumm, mask_score=mask).reset(seed=0)[0] for mask in (False, True))
    assert not masked[:, :9].any()
    assert plain[:, :9].any()
    assert np.array_equal(plain[:, 9:], masked[:, 9:])


@pytest.mark.parametrize("obs", ["gray64", "rgb64", "gray84"])
def test_show_buttons_paints_what_is_held_and_nothing_else(fceumm: str, obs: str) -> None:
    plain, shown = (MarioEnv("1-1", fceumm, obs=obs, show_buttons=show) for show in (False, True))
    rows = 5 if obs == "gray84" else 4
    width = plain.observation_space.shape[-1] // 4
    first = shown.reset(seed=0)[0]
    assert np.array_equal(first[:, rows:], plain.reset(seed=0)[0][:, rows:])
    assert not first[:, :rows].any()
    held = {NOOP: [0, 0, 0, 0], 1: [0, 0, 0, 1], 2: [1, 0, 0, 1], RUN: [0, 1, 0, 1], 5: [1, 0, 0, 0], 6: [0, 0, 1, 0]}
    for action, expected in held.items():
        newest = shown.step(action)[0][-1]
        assert np.array_equal(newest[rows:], plain.step(action)[0][-1][rows:])
        quarters = [newest[:rows, i * width : (i + 1) * width] for i in range(4)]
        assert [set(quarter.flat) for quarter in quarters] == [{255 * on} for on in expected], action


def test_a_held_jump_button_jumps_once_and_only_show_buttons_tells(backend: str) -> None:
    """Standing with A held looks like standing without, but A then jumps only from the latter."""
    env = MarioEnv("1-1", backend, show_buttons=True, stuck_steps=0, mask_score=True)
    env.reset(seed=0)
    jump, rows = 5, 4
    for action in [jump] * 20:  # a jump takes about 10 decisions
        held = env.step(action)[0]
    assert len({frame.tobytes() for frame in held}) == 1  # he stands
    still = env.step(jump)[0]
    assert np.array_equal(still[:, rows:], held[:, rows:])
    assert (still[-1, :rows, :16] == 255).all()
    released = env.step(NOOP)[0]
    assert np.array_equal(released[-1, rows:], held[-1, rows:])
    assert not released[-1, :rows].any()
    assert not np.array_equal(env.step(jump)[0][-1, rows:], held[-1, rows:])


# Stages, goals, deaths


def test_every_stage_starts_and_obeys(backend: str) -> None:
    env = MarioEnv("random", backend, full_info=True)
    for stage in STAGES:
        _, info = env.reset(options={"stage": stage})
        assert f"{info['world']}-{info['stage']}" == stage
        assert (info["x_pos"], info["life"], info["coins"], info["score"]) == (40, 2, 0, 0)
        assert info["time"] in (300, 400)
        assert play(env, [RUN] * 5)[-1][4]["x_pos"] > 50


def test_random_stages_are_drawn_from_the_seed(fceumm: str) -> None:
    def stages(seed: int, option: str) -> list[tuple[int, int]]:
        env = MarioEnv(option, fceumm, full_info=True)
        infos = [env.reset(seed=seed)[1]] + [env.reset()[1] for _ in range(15)]
        return [(info["world"], info["stage"]) for info in infos]

    assert stages(1, "random") == stages(1, "random") != stages(2, "random")
    assert len(set(stages(1, "random"))) > 5
    assert set(stages(1, "1-1, 4-2")) == {(1, 1), (4, 2)}


@pytest.mark.parametrize(("backend", "stage"), list(GOAL_RUNS), indirect=["backend"])
def test_a_recorded_run_reaches_the_goal(backend: str, stage: str) -> None:
    env = MarioEnv(stage, backend)
    env.reset(seed=0)
    total, info = play_episode(env, decode(GOAL_RUNS[backend, stage]))
    assert (info["flag_get"], info["death"], info["stuck"]) == (True, False, False)
    assert (f"{info['world']}-{info['stage']}") == stage
    start_clock, goal_x = {"1-1": (400, 3161), "1-4": (300, 2259)}[stage]
    assert info["max_x"] == goal_x
    pixels, ticks = goal_x - 40, start_clock - info["time"]
    assert total == pytest.approx((pixels - ticks + 50) / 10)
    assert info["document_return"] == pytest.approx(pixels - 0.1 * ticks + 1000)


def test_a_goomba_kills(backend: str) -> None:
    env = MarioEnv("1-1", backend)
    env.reset(seed=0)
    total, info = play_episode(env, repeat(RUN))
    assert (info["flag_get"], info["death"], info["stuck"]) == (False, True, False)
    assert 250 < info["x_pos"] < 350
    assert env._game.core.ram[0xB5] == 1  # on the screen: not a fall
    assert total == pytest.approx((info["max_x"] - 40 - (400 - info["time"]) - 50) / 10)
    assert info["document_return"] == pytest.approx(info["max_x"] - 40 - 0.1 * (400 - info["time"]) - 15)


def test_a_pit_kills(fceumm: str) -> None:
    env = MarioEnv("1-1", fceumm, full_info=True)
    env.reset(seed=0)
    for action in decode(GOAL_RUNS["fceumm", "1-1"]):
        if env.step(action)[4]["x_pos"] > 960:
            break
    _, info = play_episode(env, repeat(WALK))
    assert (info["death"], info["flag_get"]) == (True, False)
    assert 1100 < info["x_pos"] < 1140  # the first pit
    assert env._game.core.ram[0xB5] > 1  # below the screen


def test_standing_still_is_stuck_and_costs_a_death(backend: str) -> None:
    env = MarioEnv("1-1", backend, stuck_steps=20)
    env.reset(seed=0)
    steps = play(env, [NOOP] * 20)
    assert [step[2] for step in steps] == [False] * 19 + [True]
    assert (steps[-1][4]["stuck"], steps[-1][4]["death"], steps[-1][4]["life"]) == (True, False, 2)
    ticks = 400 - steps[-1][4]["time"]
    assert sum(step[1] for step in steps) == pytest.approx((-ticks - 50) / 10)


def test_the_step_limit_truncates(fceumm: str) -> None:
    env = MarioEnv("1-1", fceumm, max_episode_steps=7)
    env.reset(seed=0)
    steps = play(env, [RUN] * 7)
    assert [step[2:4] for step in steps] == [(False, False)] * 6 + [(False, True)]
    assert not steps[-1][4]["death"]


def test_the_games_clock_kills(fceumm: str) -> None:
    env = MarioEnv("1-1", fceumm, stuck_steps=0)
    env.reset(seed=0)
    for address, digit in ((0x7F8, 0), (0x7F9, 2), (0x7FA, 0)):
        env._game.core.poke(address, digit)
    env._game.measure()
    total, info = play_episode(env, repeat(NOOP))
    assert (info["death"], info["time"], info["max_x"]) == (True, 0, 40)
    assert total == pytest.approx((-20 - 50) / 10)


def test_a_warp_out_of_the_stage_ends_the_episode_without_the_flag(fceumm: str) -> None:
    env = MarioEnv("1-2", fceumm)
    env.reset(seed=0)
    env._game.core.poke(0x75F, 3)  # what a warp pipe does: world 4
    _, reward, terminated, _, info = env.step(NOOP)
    assert (terminated, info["world"], info["flag_get"], info["death"]) == (True, 4, False, False)
    assert reward == 0.0


def test_the_whole_game_goes_on_after_flag_and_death(fceumm: str) -> None:
    env = MarioEnv("full", fceumm, full_info=True, stuck_steps=0)
    env.reset(seed=0)
    steps = play(env, decode(GOAL_RUNS["fceumm", "1-1"]))
    flags = [step[4] for step in steps if step[4]["flag_get"]]
    assert len(flags) == 1
    assert not any(step[2] for step in steps)
    last = steps[-1][4]
    assert (last["world"], last["stage"], last["life"], last["time"]) == (1, 2, 2, 400)
    assert steps[-1][1] == pytest.approx(5.0, abs=1.0)  # the flag; nothing for the clock that the castle counts down

    deaths, info = 0, {}
    for _ in range(1000):
        _, reward, terminated, _, info = env.step(RUN)
        deaths += info["death"]
        assert not (info["death"] and reward > -4.0)
        if terminated:
            break
    assert (deaths, info["life"]) == (3, 255)


def test_the_whole_game_goes_on_after_an_axe(fceumm: str) -> None:
    """The step that reaches it ends where the next world has been loaded and Mario can move."""
    env = MarioEnv("1-4", fceumm, full_info=True)
    env.reset(seed=0)
    state = env.get_state()
    state["game"]["stage"] = "full"
    env.set_state(state)
    steps = play(env, decode(GOAL_RUNS["fceumm", "1-4"]))
    assert [step[2] for step in steps if step[4]["flag_get"]] == [False]
    last = steps[-1][4]
    assert (last["world"], last["stage"], last["x_pos"], last["time"]) == (2, 1, 40, 400)
    assert steps[-1][1] == pytest.approx(5.0, abs=1.0)
    _, _, _, _, info = env.step(RUN)
    assert info["x_pos"] > last["x_pos"]


# Reward


def test_walking_to_and_fro_earns_nothing(backend: str) -> None:
    env = MarioEnv("1-1", backend, full_info=True, stuck_steps=0)
    env.reset(seed=0)
    ahead = [step[4] for step in play(env, [WALK] * 12)]
    steps = play(env, ([LEFT] * 8 + [WALK] * 8) * 4)
    swing = [step[4]["x_pos"] for step in steps]
    assert max(swing) - min(swing) > 10
    ground = max(info["max_x"] for _, _, _, _, info in steps) - ahead[-1]["max_x"]
    ticks = ahead[-1]["time"] - steps[-1][4]["time"]
    assert sum(step[1] for step in steps) == pytest.approx((ground - ticks) / 10)
    assert sum(step[4]["document_reward"] for step in steps) == pytest.approx(ground - 0.1 * ticks)
    assert ground < max(swing) - min(swing)  # four rounds pay less than one way


def test_a_mazes_loop_pays_once(fceumm: str) -> None:
    env = MarioEnv("4-4", fceumm, full_info=True)
    env.reset(seed=0)
    way = play(env, decode(MAZE_RUN))
    before, after = way[-2][4], way[-1][4]
    assert before["x_pos"] - after["x_pos"] > 900  # the wrong path: the castle puts Mario back by four pages
    assert (after["max_x"], way[-1][1] <= 0) == (before["max_x"], True)
    again = play(env, decode(MAZE_RUN)[:40])
    assert again[-1][4]["x_pos"] > after["x_pos"] + 150
    assert all(reward <= 0 for _, reward, _, _, _ in again)


def test_a_pipe_ahead_pays_nothing(fceumm: str) -> None:
    env = MarioEnv("1-1", fceumm)
    env.reset(seed=0)
    play(env, [RUN] * 15)
    game = env._game
    (area,), x = game.best_x, game.x
    game.core.poke(0x6D, 1)  # what the second pipe of a pair does: Mario is a page ahead
    assert game.measure()[0] == 0
    assert game.best_x == {area: x + 256}


def test_the_area_that_the_next_pipe_leads_to_is_not_the_area(fceumm: str) -> None:
    """The game names it in RAM long before the pipe; ground in front of Mario is still new ground."""
    env = MarioEnv("1-1", fceumm)
    env.reset(seed=0)
    play(env, [RUN] * 15)
    marks = len(env._game.best_x)
    env._game.core.poke(0x750, 0x65)
    (step,) = play(env, [RUN])
    assert 0 < step[1] < 2
    assert len(env._game.best_x) == marks


def test_a_stage_with_less_time_on_its_clock_costs_nothing(fceumm: str) -> None:
    env = MarioEnv("full", fceumm)
    env.reset(seed=0)
    assert env._game.clock > 301
    for address, value in ((0x75C, 2), (0x7F8, 3), (0x7F9, 0), (0x7FA, 0)):  # 1-3, 300 on the clock
        env._game.core.poke(address, value)
    assert env._game.measure() == (0, 0)


def test_a_new_life_is_stuck_by_its_own_ground_and_paid_for_new_ground_only(fceumm: str) -> None:
    env = MarioEnv("full", fceumm, stuck_steps=20, full_info=True)
    env.reset(seed=0)
    play(env, [RUN] * 15)
    env._game.core.poke(0xB5, 2)  # into a pit
    _, reward, terminated, _, info = env.step(RUN_JUMP)
    assert (reward <= -5, terminated, info["death"], info["life"]) == (True, False, True, 1)
    again = play(env, [RUN] * 14)
    assert all(step[1] <= 0 for step in again)  # no new ground
    assert env._steps_without_progress == 0  # but not stuck


def test_a_death_in_the_whole_game_is_not_counted_as_standing_still(fceumm: str) -> None:
    env = MarioEnv("full", fceumm, stuck_steps=20, full_info=True)
    env.reset(seed=0)
    play(env, [RUN] * 15)
    env._steps_without_progress = 19
    env._game.core.poke(0xB5, 2)  # into a pit, in the twentieth decision without new ground
    _, _, terminated, _, info = env.step(NOOP)
    assert (terminated, info["death"], info["stuck"], env._steps_without_progress) == (False, True, False, 0)


def test_a_fall_from_the_clouds_is_no_death(fceumm: str) -> None:
    env = MarioEnv("2-1", fceumm)
    for clouds in (1, 0):
        env.reset(seed=0)
        env._game.core.poke(0x743, clouds)
        env._game.core.poke(0xB5, 2)
        assert env._game.frame(0)[0] is (clouds == 0)


def test_the_flag_counts_among_five_enemies_too(fceumm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = MarioEnv("1-1", fceumm)
    for slot in (0x16, 0x1A, 0x1B):  # the castle's flag takes the sixth slot where five enemies have the others
        env.reset(seed=0)
        for address in range(0x16, 0x1C):
            env._game.core.poke(address, 0x31 if address == slot else 0x06)
        env._game.core.poke(0x1D, 3)
        with monkeypatch.context() as patch:
            patch.setattr(
                env._game.core, "step", lambda buttons: None
            )  # the game would clear away what it did not make
            assert env._game.frame(0)[1]


def test_no_button_is_held_after_a_wait(fceumm: str) -> None:
    env = MarioEnv("full", fceumm, skip=1)
    env.reset(seed=0)
    play(env, [RUN_JUMP] * 3)
    assert env._held_buttons & A
    env._game.core.poke(0xB5, 2)
    env.step(RUN_JUMP)
    assert env._held_buttons == 0


def test_reward_terms_and_scale(fceumm: str) -> None:
    returns = {}
    for name, terms in {**REWARDS, "own": RewardTerms(2.0, 0.0, 0.0, -7.0, 0.5)}.items():
        env = MarioEnv("1-1", fceumm, reward=terms if name == "own" else name)
        env.reset(seed=0)
        returns[name], info = play_episode(env, repeat(RUN))
    assert returns["document"] == pytest.approx(info["document_return"])
    scaled = MarioEnv("1-1", fceumm, reward="document", reward_scale=0.01)
    scaled.reset(seed=0)
    assert play_episode(scaled, repeat(RUN))[0] == pytest.approx(returns["document"] / 100)
    assert returns["own"] == pytest.approx(0.5 * (2.0 * (info["max_x"] - 40) - 7.0))


def test_backends_agree_on_what_a_walk_to_the_first_pipe_is_worth() -> None:
    returns = {}
    for backend in ("nes_py", "fceumm"):
        require(backend)
        env = MarioEnv("1-1", backend, stuck_steps=30)
        env.reset(seed=0)
        actions = [RUN] * 13 + [RUN_JUMP] * 13 + [WALK] * 60  # over the goomba, against the pipe
        returns[backend], info = play_episode(env, actions)
        assert (info["stuck"], info["max_x"]) == (True, 434)
    assert returns["nes_py"] == pytest.approx(returns["fceumm"])


# Randomness


def test_seeds_change_nothing_unless_an_option_draws(fceumm: str) -> None:
    """The emulator has no randomness: ten greedy evaluations of a policy would be one episode, ten times."""
    actions = random_actions(60)

    def trace(seed: int, **options: Any) -> str:
        env = MarioEnv("1-1", fceumm, full_info=True, **options)
        env.reset(seed=seed)
        return repr([(step[0].tobytes(), step[1], step[4]) for step in play(env, actions)])

    assert len({trace(seed) for seed in range(3)}) == 1
    for options in ({"noop_max": 30}, {"sticky_action_probability": 0.25}):
        assert len({trace(seed, **options) for seed in range(5)}) >= 4
        assert trace(3, **options) == trace(3, **options)


def test_sticky_actions_hold_the_last_buttons_a_quarter_of_the_frames(fceumm: str) -> None:
    env = MarioEnv("1-1", fceumm, sticky_action_probability=0.25, stuck_steps=0)
    env.reset(seed=0)
    pressed: list[int] = []
    frame = env._game.frame

    def record(buttons: int) -> tuple[bool, bool]:
        pressed.append(buttons)
        return frame(buttons)

    env._game.frame = record  # type: ignore[method-assign]
    late = []
    for decision in range(600):
        pressed.clear()
        action = (NOOP, JUMP)[decision % 2]
        env.step(action)
        wanted = env.buttons[action]
        late.append(pressed[0] != wanted)
        assert pressed == sorted(pressed, key=lambda buttons: buttons == wanted)  # once obeyed, obeyed to the end
    # The first frame sees the last decision's buttons with probability 1/4 (less 1/256, when that one never came).
    assert 0.19 < np.mean(late) < 0.31


def test_noop_starts_wait_zero_to_noop_max_frames(fceumm: str) -> None:
    env = MarioEnv("1-1", fceumm, noop_max=3)
    frames = []
    for seed in range(40):
        env.reset(seed=seed)
        frames.append(int(env._game.core.ram[0x09]))  # the game's frame counter
    assert sorted(set(frames)) == list(range(min(frames), min(frames) + 4))


# Determinism and checkpoints

TRACE = """
import hashlib, sys
sys.path[:0] = {path!r}
from envs.mario import MarioEnv
env = MarioEnv("1-1", {backend!r}, noop_max=30, sticky_action_probability=0.25)
digest = hashlib.sha256(env.reset(seed=5)[0].tobytes())
for action in {actions!r}:
    observation, reward, terminated, truncated, info = env.step(action)
    digest.update(observation.tobytes() + repr((reward, terminated, info)).encode())
    if terminated:
        env.reset()
print(digest.hexdigest(), *sorted({{"torch", "gym", "cv2", "stable_retro", "numba"}} & set(sys.modules)))
"""


def test_another_process_sees_the_same_and_imports_little(backend: str) -> None:
    program = TRACE.format(path=sys.path, backend=backend, actions=random_actions(80))
    outputs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout]
    env = MarioEnv("1-1", backend, noop_max=30, sticky_action_probability=0.25)
    for _ in range(2):  # a reset leaves nothing behind
        digest = hashlib.sha256(env.reset(seed=5)[0].tobytes())
        for observation, reward, terminated, _, info in play(env, random_actions(80)):
            digest.update(observation.tobytes() + repr((reward, terminated, info)).encode())
        outputs.append(digest.hexdigest() + "\n")
    assert outputs[0] == outputs[1] == outputs[2]


def test_environments_of_one_process_do_not_disturb_each_other(backend: str) -> None:
    alone, together = [], []
    for seed in range(3):
        env = MarioEnv("1-1", backend)
        env.reset(seed=0)
        alone.append(play(env, random_actions(30, seed)))
    envs = [MarioEnv("1-1", backend) for _ in range(3)]
    for env in envs:
        env.reset(seed=0)
    streams = [random_actions(30, seed) for seed in range(3)]
    for actions in zip(*streams, strict=True):
        together.append([env.step(action) for env, action in zip(envs, actions, strict=True)])
    for n in range(3):
        assert same(alone[n], [steps[n] for steps in together])
    for env in envs:
        env.close()


def test_a_restored_environment_repeats_itself_bit_for_bit(backend: str) -> None:
    before, after = (200, 200) if backend == "fceumm" else (60, 60)  # nes_py restores by playing it all again
    options = {
        "noop_max": 30,
        "sticky_action_probability": 0.25,
        "full_info": True,
        "render_mode": "rgb_array",
    }
    env = MarioEnv("1-1,1-2", backend, **options)
    env.reset(seed=3)
    play(env, random_actions(before, 1))
    state = env.get_state()
    picture = env.render()
    unbroken = play(env, random_actions(after, 2))

    restored = MarioEnv("1-1,1-2", backend, **options)
    restored.set_state(state)
    assert np.array_equal(restored.render(), picture)
    blind = MarioEnv("1-1,1-2", backend, **{**options, "render_mode": None})
    blind.set_state(state)
    assert blind.render() is None
    assert same(unbroken, play(restored, random_actions(after, 2)))


def test_a_state_holds_only_plain_values_and_arrays(backend: str) -> None:
    env = MarioEnv("1-1", backend)
    untouched = env.get_state()
    env.reset(seed=0)
    start = env.step(RUN)[0]
    pending = [env.get_state()]
    env.set_state(untouched)
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.set_state(pending[0])
    assert not np.array_equal(env.step(RUN)[0], start)
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            assert all(isinstance(key, str | int) for key in value)
            pending += value.values()
        else:
            assert value is None or type(value) in (int, float, bool, str, np.ndarray)


def test_a_state_of_another_backend_or_shape_is_refused(fceumm: str) -> None:
    env, other = MarioEnv("1-1", fceumm), MarioEnv("1-1", fceumm, obs="gray84")
    env.reset(seed=0)
    other.reset(seed=0)
    with pytest.raises(ValueError, match=r"\(4, 84, 84\).*\(4, 64, 64\)"):
        env.set_state(other.get_state())
    state = env.get_state()
    state["game"]["backend"] = "nes_py"
    with pytest.raises(ValueError, match=r"'nes_py'.*'fceumm'"):
        env.set_state(state)
    state = env.get_state()
    state["game"]["core"] = state["game"]["core"][:100]
    with pytest.raises(ValueError, match="100 bytes"):
        env.set_state(state)


# Emulators


def test_a_core_repeats_ram_and_picture_after_load(backend: str) -> None:
    core = make_core(backend)
    env = MarioEnv("1-1", backend)
    env.reset(seed=0)
    core.load(env.get_state()["game"]["core"])
    buttons = [env.buttons[action] for action in random_actions(200)]

    def trace() -> list[bytes]:
        frames = []
        for pressed in buttons:
            core.step(pressed)
            frames.append(core.ram.tobytes() + core.gray().tobytes() + core.rgb().tobytes())
        return frames

    state = core.save()
    first = trace()
    core.load(state)
    assert trace() == first
    assert len(set(first)) == len(buttons)
    core.close()


def test_every_build_of_nes_py_computes_the_same_memory_and_pictures() -> None:
    """The digest is of nes-py 8.2.1 as pip compiles it; no other compilation may differ, `make nes_py` included."""
    if nes_core.library_path("nes_py") is None:
        pytest.skip(f"nes-py 8 is not installed: {nes_core.INSTALL['nes_py']}")
    core = make_core("nes_py")
    core.power_on()
    digest = hashlib.sha256()
    for frame in range(1000):
        in_the_menu = START if frame % 20 < 5 else 0
        core.step(in_the_menu if frame < 120 else RIGHT | (A if frame % 40 > 8 else 0))
        digest.update(core.ram.tobytes() + core.rgb().tobytes())
    core.close()
    assert digest.hexdigest() == "9c338ea443ce30dff2cb5ee3b0e0f003b76a3213d06bed5674cf0a398faf954a"


def test_a_picture_that_another_environment_overwrote_is_not_passed_off_as_ours(fceumm: str) -> None:
    first, second = make_core(fceumm), make_core(fceumm)
    for core in (first, second):
        core.power_on()
        core.step(0)
    with pytest.raises(RuntimeError, match="another environment"):
        first.rgb()
    assert second.rgb().size == (256, 240)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_ctrl_c_is_not_swallowed_by_the_emulator(backend: str) -> None:
    """A handler's exception must reach the caller, although libretro cores call Python from C."""

    class Interrupted(Exception):
        pass

    def interrupt(signum: int, frame: Any) -> None:
        raise Interrupted

    def play_until_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        play_frames(core, 20_000)

    core = make_core(backend)
    core.power_on()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(5):
            with pytest.raises(Interrupted):
                play_until_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_what_a_destructor_raises_during_a_frame_is_not_the_frames(
    fceumm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fragile:
        def __del__(self) -> None:
            raise ZeroDivisionError

    class Buttons(int):
        """Asked for in the middle of a frame, from C."""

        def __and__(self, other: int) -> int:
            Fragile()
            return int(self) & other

    core = make_core(fceumm)
    core.power_on()
    reported: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_type))
    core.step(Buttons(START))
    assert reported
    assert {*reported} == {ZeroDivisionError}


def test_a_closed_environment_can_be_reset(backend: str) -> None:
    env = MarioEnv("1-1", backend)
    first, _ = env.reset(seed=0)
    env.close()
    env.close()
    with pytest.raises(ResetNeeded):
        env.step(0)
    assert np.array_equal(env.reset(seed=0)[0], first)


@pytest.mark.parametrize(
    ("missing", "backend", "command"),
    [
        ("nes_py stable_retro", "auto", "pip install nes-py"),
        ("stable_retro", "fceumm", "pip install --no-deps stable-retro"),
        ("gym_super_mario_bros", "auto", "pip install gym-super-mario-bros"),
    ],
)
def test_a_missing_package_is_named_with_its_command(
    missing: str, backend: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = nes_common._package_folder
    monkeypatch.setattr(nes_common, "_package_folder", lambda name: None if name in missing.split() else found(name))
    nes_common.rom_path.cache_clear()
    with pytest.raises(MarioBackendError, match=command):
        MarioEnv("1-1", backend)
    assert not {"nes_py" if backend == "auto" else backend} & set(available_backends())
    monkeypatch.undo()
    nes_common.rom_path.cache_clear()
