"""Super Mario Bros on the real emulators: what is installed is tested, nothing stands in for it."""

from __future__ import annotations

import copy
import hashlib
import signal
import warnings
from collections.abc import Iterable
from itertools import cycle, repeat
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from envs import nes_common, nes_core
from envs.mario import ACTION_SETS, REWARDS, STAGES, MarioBackendError, MarioEnv, RewardTerms, available_backends
from envs.nes_common import GRAY, RIGHT, START, A, B
from envs.nes_core import make_core
from tests.conftest import assert_plain, assert_same

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

PLAYER_IS_BELOW_THE_SCREEN = {0xB5: 2}
TIME_20 = {0x7F8: 0, 0x7F9: 2, 0x7FA: 0}


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


def begin(stage: str, backend: str, **options: Any) -> MarioEnv:
    env = MarioEnv(stage, backend, **options)
    env.reset(seed=0)
    return env


def play(env: MarioEnv, actions: list[int]) -> list[tuple[np.ndarray, float, bool, bool, dict[str, Any]]]:
    """Step through the actions; at an episode's end reset and go on."""
    steps = []
    for action in actions:
        steps.append(env.step(action))
        if steps[-1][2] or steps[-1][3]:
            env.reset()
    return steps


def play_episode(env: MarioEnv, actions: Iterable[int]) -> tuple[float, dict[str, Any]]:
    """Play until the end; return the sum of rewards and the last info."""
    total = 0.0
    for action in actions:
        _, reward, terminated, truncated, info = env.step(action)
        total += reward
        if terminated or truncated:
            return total, info
    raise AssertionError("the actions ran out before the episode did")


def poke(env: MarioEnv, values: dict[int, int]) -> None:
    """Write into the console's memory what the game would in a situation that is hard to play into."""
    for address, value in values.items():
        env._game.core.poke(address, value)


def random_actions(count: int, seed: int = 0) -> list[int]:
    choices, shares = [WALK, RUN, RUN_JUMP, JUMP, LEFT], [0.1, 0.3, 0.4, 0.1, 0.1]
    return np.random.default_rng(seed).choice(choices, count, p=shares).tolist()


# ---- Gymnasium's contract -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"obs": "rgb64", "reward": "flag1000", "max_pool": True, "full_info": True}])
def test_env_checker_is_content(backend: str, options: dict[str, Any]) -> None:
    env = MarioEnv("1-1", backend, noop_max=5, sticky_action_probability=0.25, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)  # the render check wants an id from gymnasium.register


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "9-1"}, "9-1"),
        ({"stage": "1-1,5"}, "choose among 1-1 to 8-4"),
        ({"stage": 11}, "choose among 1-1 to 8-4"),
        ({"backend": "snes"}, "nes_py"),
        ({"action_set": "all"}, "right_only, simple, complex"),
        ({"obs": "rgb84"}, "gray64"),
        ({"frame_stack": 0}, "at least 1"),
        ({"skip": 0}, "skip=0"),
        ({"skip": 26}, "skip=26"),
        ({"skip": 1, "max_pool": True}, "skip=1"),
        ({"reward": "score"}, "shaped, landed, flag1000"),
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
    assert ACTION_SETS["complex"][7:] == (64 | A, 64 | B, 64 | A | B, 32, 16)  # left, then down and up
    number, one_hot = begin("1-1", fceumm), begin("1-1", fceumm)
    assert_same(number.step(RUN), one_hot.step(np.eye(7)[RUN]))
    for wrong in (7, -1, 2.7, None, [0, 1], np.array([0, 0])):
        with pytest.raises(ValueError, match="integers 0 to 6"):
            number.step(wrong)


def test_an_episode_begins_with_a_reset_and_ends_with_the_only_info(backend: str) -> None:
    env = MarioEnv("1-1", backend, max_episode_steps=5)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(NOOP)
    first, info = env.reset(seed=0)
    assert info == {}
    steps = [env.step(RUN) for _ in range(5)]
    assert [step[2:4] for step in steps] == [(False, False)] * 4 + [(False, True)]
    assert [step[4] for step in steps[:4]] == [{}] * 4
    place, counts = {"x_pos", "max_x", "time", "world", "stage"}, {"coins", "score", "life", "status"}
    assert set(steps[4][4]) == place | counts | {"flag_get", "death", "stuck"}
    assert all(type(value) in (int, bool, float) for value in steps[4][4].values())
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(NOOP)
    assert_same(env.reset(seed=0)[0], first)
    steps = play(begin("1-1", backend, max_episode_steps=5, stuck_steps=5), [NOOP] * 10 + [RUN] * 10)
    assert_same(steps[5:10] + steps[15:], steps[:5] + steps[10:15])
    env.close(), env.close()
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(NOOP)
    assert_same(env.reset(seed=0)[0], first)


# ---- pictures -------------------------------------------------------------------------------------------------------
def area_average(picture: np.ndarray, side: int) -> np.ndarray:
    """Average (240, 256, 3) down to (side, side, 3): each cell is the mean of the pixels whose centres it holds."""

    def shares(size: int) -> np.ndarray:
        centres = (np.arange(size) + 0.5) * side / size  # in cells; one on an edge belongs to the cell before it
        inside = np.ceil(centres) == np.arange(side)[:, None] + 1
        return inside / inside.sum(1, keepdims=True)

    return np.einsum("rh,hwc,sw->rsc", shares(240), picture, shares(256), optimize=True)


SHAPES: Any = {("gray64", None): (4, 64, 64), ("rgb64", None): (3, 64, 64), ("gray84", None): (4, 84, 84),
               ("rgb64", 2): (6, 64, 64)}  # fmt: skip


@pytest.mark.parametrize(("obs", "stack"), SHAPES)
def test_an_observation_is_the_last_screens_the_oldest_first(backend: str, obs: str, stack: int | None) -> None:
    env = MarioEnv("1-1", backend, obs=obs, frame_stack=stack, render_mode="rgb_array")
    shape, channels = SHAPES[obs, stack], 3 if obs == "rgb64" else 1
    frames = env.reset(seed=0)[0].reshape(-1, channels, *shape[1:])
    assert all(np.array_equal(frames[0], frame) for frame in frames)
    assert env.observation_space.shape == shape
    pictures: list[Any] = []
    for action in [RUN] * 12:
        observation = env.step(action)[0]
        pictures.append(env.render())
    assert (observation.shape, observation.dtype, pictures[-1].shape) == (shape, np.uint8, (240, 256, 3))
    assert not np.array_equal(pictures[-4], pictures[-1])
    averages = [area_average(picture, shape[1]) for picture in pictures[-shape[0] // channels :]]
    expected = [x.transpose(2, 0, 1) if channels == 3 else (x @ GRAY[:3])[None] for x in averages]
    assert np.abs(observation - np.concatenate(expected)).max() < 2.0


def test_grey_tells_apart_what_the_usual_luma_does_not(fceumm: str) -> None:
    colors = np.array([(206, 77, 8), (0, 170, 0), (90, 150, 255)])  # Goombas and ground; hills; sky
    picture: Any = begin("1-1", fceumm, render_mode="rgb_array").render()
    assert all((picture == color).all(-1).any() for color in colors)
    luma, grey = colors @ (0.299, 0.587, 0.114), colors @ GRAY[:3]
    assert abs(luma[0] - luma[1]) < 10
    assert np.abs(np.diff(grey, append=grey[0])).min() > 50


def test_max_pool_takes_the_brighter_of_the_last_two_frames(fceumm: str) -> None:
    pooled = begin("1-1", fceumm, obs="rgb64", max_pool=True)
    single = begin("1-1", fceumm, obs="rgb64", skip=1, render_mode="rgb_array")
    moved = 0
    for _ in range(10):
        observation, pictures = pooled.step(RUN)[0], []
        for _ in range(4):
            single.step(RUN)
            pictures.append(single.render())
        expected = area_average(np.maximum(pictures[-2], pictures[-1]), 64)
        assert np.abs(observation.transpose(1, 2, 0) - expected).max() < 2.0
        moved += not np.array_equal(pictures[-2], pictures[-1])
    assert moved >= 5
    whole = begin("full", fceumm, max_pool=True, full_info=True)
    while not (step := whole.step(WALK))[4]["death"]:
        pass
    assert_same(step[0][-1:], whole._look())  # the next life's first screen, and nothing of the last one's


def test_mask_score_blanks_the_top_rows_only(fceumm: str) -> None:
    plain, masked = (MarioEnv("1-1", fceumm, mask_score=mask).reset(seed=0)[0] for mask in (False, True))
    assert plain[:, :9].any()
    assert not masked[:, :9].any()
    assert np.array_equal(plain[:, 9:], masked[:, 9:])


@pytest.mark.parametrize(("obs", "rows", "width"), [("gray64", 4, 16), ("rgb64", 4, 16), ("gray84", 5, 21)])
def test_show_buttons_paints_what_is_held_and_nothing_else(fceumm: str, obs: str, rows: int, width: int) -> None:
    plain, shown = (begin("1-1", fceumm, obs=obs, show_buttons=show) for show in (False, True))
    assert not shown.reset(seed=0)[0][:, :rows].any()
    # A, B, left, right
    held = [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]]
    for action, expected in enumerate(held):
        newest = shown.step(action)[0][-1]
        assert np.array_equal(newest[rows:], plain.step(action)[0][-1][rows:])
        quarters = [newest[:rows, i * width : (i + 1) * width] for i in range(4)]
        assert [set(quarter.flat) for quarter in quarters] == [{255 * on} for on in expected], action
    assert not shown.reset()[0][:, :rows].any()


# ---- stages, goals, deaths ------------------------------------------------------------------------------------------
WITH_300_TICKS = "1-3 1-4 2-3 2-4 3-2 3-3 3-4 4-3 5-1 5-3 5-4 6-3 6-4 7-3 8-1 8-3"


def test_every_stage_starts_and_obeys(backend: str) -> None:
    for stage in STAGES:
        env = MarioEnv(stage, backend, full_info=True)
        _, info = env.reset()
        assert f"{info['world']}-{info['stage']}" == stage
        assert (info["x_pos"], info["life"], info["coins"], info["score"]) == (40, 2, 0, 0)
        assert info["time"] == (300 if stage in WITH_300_TICKS else 400)
        assert play(env, [RUN] * 5)[-1][4]["x_pos"] > 50


def test_random_stages_are_drawn_from_the_seed(fceumm: str) -> None:
    def stages(seed: int, option: str) -> list[tuple[int, int]]:
        env = MarioEnv(option, fceumm, full_info=True)
        infos = [env.reset(seed=seed)[1]] + [env.reset()[1] for _ in range(15)]
        return [(info["world"], info["stage"]) for info in infos]

    assert stages(1, "random") == stages(1, "random") != stages(2, "random")
    assert len(set(stages(1, "random"))) > 5
    assert set(stages(1, "1-1, 4-2")) == {(1, 1), (4, 2)}


class Ending(NamedTuple):
    stage: str
    actions: list[int]  # none: the recorded run to the goal
    event: str  # the one of the three that is true at the end; "" for none
    max_x: range
    memory: dict[int, int] = {}
    facts: dict[str, int] = {}


TO_THE_FIRST_PIPE = [RUN] * 13 + [RUN_JUMP] * 13 + [WALK] * 60  # over the Goomba
INTO_THE_FIRST_PIT = decode(GOAL_RUNS["fceumm", "1-1"])[:100] + [WALK] * 60
OF_WORLD_4 = {0x75F: 3, 0x756: 3, 0x7ED: 1, 0x7EE: 2}  # memory: world, more than fire, 12 coins
ENDINGS = {
    "the goal of 1-1": Ending("1-1", [], "flag_get", range(3161, 3162)),
    "the goal of 1-4": Ending("1-4", [], "flag_get", range(2259, 2260)),
    "a Goomba": Ending("1-1", [RUN] * 60, "death", range(250, 350)),
    "a pit": Ending("1-1", INTO_THE_FIRST_PIT, "death", range(1100, 1140), facts={"score": 100}),  # of one Goomba
    "standing still": Ending("1-1", [NOOP] * 20, "stuck", range(40, 41), facts={"life": 2}),
    "a pipe in the way": Ending("1-1", TO_THE_FIRST_PIPE, "stuck", range(434, 435)),
    "the game's clock": Ending("1-1", [NOOP] * 200, "death", range(40, 41), TIME_20, {"time": 0}),
    # the world is now 4, which is what a warp pipe does
    "a warp": Ending("1-2", [NOOP], "", range(40, 41), OF_WORLD_4, {"world": 4, "status": 2, "coins": 12}),
}
ON_NES = [("nes_py", name) for name in ENDINGS if name not in ("the goal of 1-4", "a pit")]  # recorded on FCEUmm


@pytest.mark.parametrize(("backend", "name"), [*(("fceumm", name) for name in ENDINGS), *ON_NES], indirect=["backend"])
def test_how_an_episode_ends_and_what_it_is_worth(backend: str, name: str) -> None:
    """Ground and clock, and 50 for the flag or against death and standstill, a tenth of all."""
    ending = ENDINGS[name]
    env = begin(ending.stage, backend, stuck_steps=0 if ending.event == "death" else 20)
    poke(env, ending.memory)
    env._game.measure()
    start_clock = env._game.clock
    total, info = play_episode(env, ending.actions or decode(GOAL_RUNS[backend, ending.stage]))
    assert {name for name in ("flag_get", "death", "stuck") if info[name]} == {ending.event} - {""}
    assert info | ending.facts == info
    assert info["max_x"] in ending.max_x
    pixels, ticks, lost = info["max_x"] - 40, start_clock - info["time"], ending.event in ("death", "stuck")
    assert total == pytest.approx((pixels - ticks + 50 * info["flag_get"] - 50 * lost) / 10)


FIVE_ENEMIES_AND_SLIDING = dict.fromkeys(range(0x16, 0x1C), 6) | {0x1D: 3}


@pytest.mark.parametrize(
    ("memory", "death", "goal"),
    [
        (PLAYER_IS_BELOW_THE_SCREEN, True, False),
        ({**PLAYER_IS_BELOW_THE_SCREEN, 0x743: 1}, False, False),  # of the clouds: he falls back to the ground
        (FIVE_ENEMIES_AND_SLIDING, False, False),  # down a vine
        *(({**FIVE_ENEMIES_AND_SLIDING, flagpole: 0x31}, False, True) for flagpole in (0x16, 0x1A, 0x1B)),
    ],
)
def test_what_a_frame_means(fceumm: str, monkeypatch: pytest.MonkeyPatch, memory: Any, death: bool, goal: bool) -> None:
    env = begin("2-1", fceumm)
    poke(env, memory)
    monkeypatch.setattr(env._game.core, "step", lambda buttons: None)  # the game would clear away what it did not make
    assert env._game.frame(0)[:2] == (death, goal)


@pytest.mark.parametrize(("stage", "following"), [("1-1", (1, 2)), ("1-4", (2, 1))])
def test_the_whole_game_goes_on_after_a_flag_and_an_axe(fceumm: str, stage: str, following: tuple[int, int]) -> None:
    """The step that reaches it ends where Mario can move again; the clock that the castle counts down earns nothing."""
    env = begin(stage, fceumm, full_info=True, stuck_steps=0)
    state = env.get_state()
    state["game"]["stage"] = "full"
    env.set_state(state)
    steps = play(env, decode(GOAL_RUNS["fceumm", stage]))
    assert [step[2] for step in steps if step[4]["flag_get"]] == [False]
    last = steps[-1][4]
    assert (last["world"], last["stage"]) == following
    assert (last["x_pos"], last["life"], last["time"]) == (40, 2, 400)
    assert steps[-1][1] == pytest.approx(5.0, abs=1.0)
    assert play(env, [RUN] * 5)[-1][4]["x_pos"] > 40


def test_three_deaths_end_the_whole_game(fceumm: str) -> None:
    env, deaths, terminated = begin("full", fceumm, full_info=True, stuck_steps=0), 0, False
    while not terminated:
        _, reward, terminated, _, info = env.step(RUN)
        deaths += info["death"]
        assert not (info["death"] and reward > -3.0)
    assert (deaths, info["life"]) == (3, 255)
    game = begin("full", fceumm)._game
    game.level = 31
    assert game.is_over(False, True)  # the axe of 8-4


def test_a_death_in_the_whole_game_begins_a_life_of_its_own(fceumm: str) -> None:
    """It is no standstill, even in the twentieth decision without new ground; no button is held after the wait; the
    next life is stuck by its own ground, but paid only for what no life has seen."""
    env = begin("full", fceumm, stuck_steps=20, full_info=True)
    play(env, [RUN] * 15)
    env._steps_without_progress = 19
    poke(env, PLAYER_IS_BELOW_THE_SCREEN)
    _, reward, terminated, _, info = env.step(RUN_JUMP)
    assert (reward <= -5, terminated, info["death"], info["stuck"], info["life"]) == (True, False, True, False, 1)
    assert (env._steps_without_progress, env._held_buttons) == (0, 0)
    assert all(reward <= 0 for _, reward, *_ in play(env, [RUN] * 14))
    assert env._steps_without_progress == 0


# ---- reward ---------------------------------------------------------------------------------------------------------
def test_walking_to_and_fro_earns_nothing(backend: str) -> None:
    env = begin("1-1", backend, full_info=True, stuck_steps=0)
    ahead = play(env, [WALK] * 12)[-1][4]
    steps = play(env, ([LEFT] * 8 + [WALK] * 8) * 4)
    swing = [step[4]["x_pos"] for step in steps]
    assert max(swing) - min(swing) > 10
    ground, ticks = max(step[4]["max_x"] for step in steps) - ahead["max_x"], ahead["time"] - steps[-1][4]["time"]
    assert sum(step[1] for step in steps) == pytest.approx((ground - ticks) / 10)
    assert ground < max(swing) - min(swing)  # four rounds pay less than one way


def test_a_mazes_loop_pays_once(fceumm: str) -> None:
    env = begin("4-4", fceumm, full_info=True)
    way = play(env, decode(MAZE_RUN))
    before, after = way[-2][4], way[-1][4]
    assert before["x_pos"] - after["x_pos"] > 900  # the wrong path: the castle puts Mario back by four pages
    assert (after["max_x"], way[-1][1] <= 0) == (before["max_x"], True)
    again = play(env, decode(MAZE_RUN)[:40])
    assert again[-1][4]["x_pos"] > after["x_pos"] + 150
    assert all(reward <= 0 for _, reward, *_ in again)


@pytest.mark.parametrize(
    ("memory", "marks"),
    [
        ({0x6D: 1}, {0: 256}),  # the second pipe of a pair: Mario is a page ahead
        ({0x75C: 2, 0x7F8: 3, 0x7F9: 0, 0x7FA: 0}, {0: 0, 2 << 16: 0}),  # 1-3, with 300 on its clock, not 400
        ({0x750: 0x65}, {0: 0}),  # the game names the area that the next pipe leads to: not the one he is in
    ],
)
def test_being_moved_pays_and_costs_nothing(fceumm: str, memory: dict[int, int], marks: dict[int, int]) -> None:
    env = begin("full", fceumm)
    play(env, [RUN] * 15)
    game = env._game
    ((area, x),) = game.best_x.items()
    poke(env, memory)
    assert game.measure() == (0, 0)
    assert not game.advancing
    assert game.best_x == {area + level: x + pixels for level, pixels in marks.items()}


def test_reward_terms_and_scale(fceumm: str) -> None:
    assert REWARDS["landed"] == REWARDS["shaped"]._replace(landed=True)
    returns = []
    for reward in ("flag1000", RewardTerms(2.0, 0.0, 0.0, -7.0, 0.5)):
        env = begin("1-1", fceumm, reward=reward)
        start_clock = env._game.clock
        total, info = play_episode(env, repeat(RUN))
        returns.append(total)
    pixels, ticks = info["max_x"] - 40, start_clock - info["time"]
    assert returns == pytest.approx([pixels - 0.1 * ticks - 15, 0.5 * (2.0 * pixels - 7.0)])


def test_a_jump_counts_where_it_lands_and_a_fall_nowhere(fceumm: str) -> None:
    """In 1-3 this way ends in the pit behind the first cliff."""
    reached = {}
    for reward in ("shaped", "landed"):
        env = begin("1-3", fceumm, reward=reward)
        start_x, start_clock = env._game.x, env._game.clock
        total, info = play_episode(env, ([RUN_JUMP] * 5 + [RUN] * 3) * 10)
        reached[reward] = info["max_x"]
        assert 10 * total == pytest.approx(info["max_x"] - start_x - (start_clock - info["time"]) - 50)
    assert info["x_pos"] == reached["shaped"] > reached["landed"] + 100
    assert sum(step[1] for step in play(begin("2-2", fceumm, reward="landed"), [RUN_JUMP] * 20)) > 5  # in water


# ---- randomness and saved states ------------------------------------------------------------------------------------
def test_seeds_change_nothing_unless_an_option_draws(fceumm: str) -> None:
    """The emulator has no randomness: ten greedy evaluations of a policy would be one episode, ten times."""

    def trace(seed: int, **options: Any) -> str:
        env = MarioEnv("1-1", fceumm, full_info=True, **options)
        env.reset(seed=seed)
        return repr([(step[0].tobytes(), step[1], step[4]) for step in play(env, random_actions(60))])

    assert len({trace(seed) for seed in range(3)}) == 1
    for options in ({"noop_max": 30}, {"sticky_action_probability": 0.25}):
        assert len({trace(seed, **options) for seed in range(5)}) >= 4
        assert trace(3, **options) == trace(3, **options)


def test_sticky_actions_hold_buttons_a_quarter_of_the_frames(fceumm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = begin("1-1", fceumm, sticky_action_probability=0.25, stuck_steps=0)
    pressed: list[int] = []
    frame = env._game.frame
    monkeypatch.setattr(env._game, "frame", lambda buttons: pressed.append(buttons) or frame(buttons))
    late = []
    for decision in range(600):
        pressed.clear()
        action = (NOOP, JUMP)[decision % 2]
        env.step(action)
        wanted = env.buttons[action]
        late.append([buttons != wanted for buttons in pressed[:2]])
        assert pressed == sorted(pressed, key=lambda buttons: buttons == wanted)  # once obeyed, obeyed to the end
    # The first frame sees the last decision's buttons with probability 1/4 (less 1/256, when that one never came).
    first, second = np.mean(late, 0)
    assert 0.19 < first < 0.31
    assert 0.03 < second < 0.1


def test_noop_starts_wait_zero_to_noop_max_frames(fceumm: str) -> None:
    env, frames = MarioEnv("1-1", fceumm, noop_max=3), []
    for seed in range(40):
        env.reset(seed=seed)
        frames.append(int(env._game.core.ram[0x09]))  # the game's frame counter
    assert sorted(set(frames)) == list(range(min(frames), min(frames) + 4))
    assert begin("1-1", fceumm, noop_max=300).step(NOOP)[1] >= -0.1  # the clock of the waiting costs nothing


def test_a_restored_environment_goes_on_bit_for_bit_and_is_not_disturbed_by_others(backend: str) -> None:
    """Step by step in turn with the one that was saved: emulators of one process share nothing."""
    before, after = (200, 200) if backend == "fceumm" else (60, 60)  # nes_py restores by playing it all again
    draws = {"noop_max": 30, "sticky_action_probability": 0.25}
    modes = ("rgb_array", "rgb_array", None)
    env, restored, blind = (MarioEnv("1-1,1-2", backend, full_info=True, render_mode=x, **draws) for x in modes)
    untouched = env.get_state()
    env.reset(seed=3)
    play(env, random_actions(before, 1))
    state, picture = env.get_state(), env.render()
    assert_plain(state)
    kept = copy.deepcopy(state)
    restored.set_state(state)
    assert_same(restored.get_state(), state)
    assert_same(restored.render(), picture)
    for action in random_actions(after, 2):
        assert_same(play(restored, [action]), play(env, [action]))
    assert_same(state, kept)
    blind.set_state(state)
    assert blind.render() is None
    restored.set_state(untouched)
    with pytest.raises(ResetNeeded):
        restored.step(NOOP)


def test_a_state_of_another_backend_or_shape_is_refused(fceumm: str) -> None:
    env = begin("1-1", fceumm)
    with pytest.raises(ValueError, match=r"\(4, 84, 84\).*\(4, 64, 64\)"):
        env.set_state(begin("1-1", fceumm, obs="gray84").get_state())
    state = env.get_state()
    kept = copy.deepcopy(state)
    for _ in range(2):
        play(env, [RUN] * 15)
        assert_same(state, kept)
        env.set_state(state)
    for wrong, message in (({"backend": "nes_py"}, r"'nes_py'.*'fceumm'"), ({"core": np.zeros(100)}, "100 bytes")):
        with pytest.raises(ValueError, match=message):
            env.set_state({**state, "game": {**state["game"], **wrong}})


# ---- emulators ------------------------------------------------------------------------------------------------------
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


def test_ctrl_c_is_not_swallowed_by_the_emulator(backend: str) -> None:
    """A handler's exception must reach the caller, although libretro cores call Python from C."""

    def play_until_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        for _ in range(20_000):
            core.step(0)

    core = make_core(backend)
    core.power_on()
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                play_until_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize(
    ("missing", "backend", "command"),
    [
        ("nes_py stable_retro", "auto", "pip install nes-py"),
        ("stable_retro", "fceumm", "pip install --no-deps stable-retro"),
        ("gym_super_mario_bros", "auto", "pip install gym-super-mario-bros"),
    ],
)
def test_a_missing_package_is_named(missing: str, backend: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = nes_common._package_folder
    monkeypatch.setattr(nes_common, "_package_folder", lambda name: None if name in missing.split() else found(name))
    nes_common.rom_path.cache_clear()
    with pytest.raises(MarioBackendError, match=command):
        MarioEnv("1-1", backend)
    assert not {"nes_py" if backend == "auto" else backend} & set(available_backends())
    monkeypatch.undo()
    nes_common.rom_path.cache_clear()
