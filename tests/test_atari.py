"""Atari games: envs/atari.py against the emulator itself, and what ppo_atari_mario.py makes of lives and points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import PIL.Image
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from envs.atari import FIRE, AtariGame
from tests.conftest import assert_same, columns, command_line, spy, tiny_args

pytest.importorskip("ale_py", reason="needs pip install ale-py opencv-python-headless")
cv2 = pytest.importorskip("cv2", reason="needs pip install ale-py opencv-python-headless")
GAME: dict[str, Any] = {"env_id": "ALE/SpaceInvaders-v5", "num_steps": 16, "total_timesteps": 32, "minibatch_growth": 1,
                        "update_epochs": 1, "amp": False, "reset_steps": 30, "noop_max": 30}  # fmt: skip
NOOP = 0


def begun(name: str, seed: int = 0, **options: Any) -> AtariGame:
    env = AtariGame(f"ALE/{name}-v5", **options)
    env.reset(seed=seed)
    return env


def play(env: gym.Env, steps: int, seed: int = 0) -> list[Any]:
    """Everything that `steps` random actions lead to, new games included."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(rng.integers(4))
        seen.append((obs, float(reward), terminated, truncated, dict(info)))
        if terminated or truncated:
            seen.append(env.reset()[0])
    return seen


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version.*", "ignore:.*not having a spec.*")
def test_gymnasium_accepts_a_game(capfd: pytest.CaptureFixture[str]) -> None:
    env = AtariGame("ALE/Pong-v5", render_mode="rgb_array")
    assert capfd.readouterr() == ("", "")  # no banner
    check_env(env)
    for action in (-1, 99, 0.9, None):
        with pytest.raises(ValueError, match="takes the integers 0 to 5"):
            env.step(action)
    screen: Any = env.render()
    assert (screen.shape, screen.dtype, env.metadata["render_fps"]) == ((210, 160, 3), np.uint8, 15)


def test_a_frame_is_the_brightest_of_the_last_two_of_four_grey_ones_at_84_by_84() -> None:
    """Recomputed from the emulator's own screens."""
    env = AtariGame("ALE/Breakout-v5", noop_max=0, sticky_action_probability=0.0)
    raw: Any = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0, obs_type="grayscale").unwrapped
    obs, _ = env.reset(seed=0)
    raw.reset(seed=0)
    pictures, total = [], 0.0
    for step, action in enumerate([FIRE, 2, 2, 3, 2, 3, 3, 2]):
        if step > 0:  # reset() has pressed FIRE
            obs, reward, *_ = env.step(action)
            total += float(reward)
        screens = []
        for _ in range(4):
            screen, reward, *_ = raw.step(action)
            screens.append(screen)
            total -= reward
        pictures.append(cv2.resize(np.maximum(*screens[2:]), (84, 84), interpolation=cv2.INTER_AREA))
        np.testing.assert_array_equal(obs, [pictures[max(0, step - 3 + i)] for i in range(4)])  # the oldest first
    assert total == 0
    assert len({picture.tobytes() for picture in pictures}) > 4  # something moved


def test_every_life_begins_with_fire_and_the_game_goes_on_to_the_last() -> None:
    """In Breakout a ball that nobody meets is lost after about 24 steps; but it never flies unless FIRE is pressed."""
    env = begun("Breakout", seed=136)  # whose first FIRE would be lost to sticky actions
    lost, terminated, step = [], False, 0
    while not terminated:
        obs, _, terminated, truncated, info = env.step(NOOP)
        step += 1
        assert not truncated
        assert step < 200
        if info.get("life_lost"):
            lost.append((step, terminated))
            assert (obs == obs[0]).all()  # a new life knows no frames of the last
    assert [over for _, over in lost] == [False] * 4 + [True]
    assert all(15 < gap < 35 for gap in np.diff([0, *(step for step, _ in lost)]))
    without_lives = begun("Freeway")
    without_lives._lives -= 1  # as if the first step won one
    assert (without_lives._begins_with_fire, [without_lives.step(1)[4] for _ in range(20)]) == (False, [{}] * 20)


def test_max_episode_steps_truncates() -> None:
    limited, free = (AtariGame("ALE/Breakout-v5", skip=3, max_episode_steps=limit) for limit in (50, 0))
    assert (free._max_steps, free.metadata["render_fps"], free.render()) == (36_000, 20, None)  # half an hour
    assert (free.env.noop_max, free.env.env.repeat_action_probability) == (30, 0.25)  # type: ignore[attr-defined]
    assert free._game.ale.getInt("max_num_frames_per_episode") == 0
    for seed in range(2):
        limited.reset(seed=seed)
        free.reset(seed=seed)
        for step in range(50):
            ours, theirs = limited.step(step % 4), free.step(step % 4)
            np.testing.assert_array_equal(ours[0], theirs[0])  # that of the last step, too: its value is asked for
            assert ours[2:4] == (False, step == 49)


def test_a_restored_game_goes_on_to_the_bit() -> None:
    """Sticky actions, waiting before the next games, frames and lives included."""
    env, other = begun("Breakout", seed=3), begun("Breakout", seed=4)
    for _ in range(40):  # whatever the other one did last does not stick
        env.step(2)  # right
        other.step(3)  # left
        other.set_state(env.get_state())
        assert_same(other.step(3), env.step(3))
        assert_same(other.get_state(), env.get_state())
    play(env, 60)  # lives are lost
    state = env.get_state()
    expected = play(env, 300, seed=1)
    other = AtariGame("ALE/Breakout-v5")
    other.set_state(state)
    assert_same(other.get_state(), state)
    assert_same(play(other, 300, seed=1), expected)
    assert any(isinstance(entry, np.ndarray) for entry in expected)  # a game has ended meanwhile


def test_equal_seeds_give_equal_games_and_others_do_not() -> None:
    env = AtariGame("ALE/Breakout-v5")

    def game(seed: int) -> list[Any]:
        return [env.reset(seed=seed)[0], *play(env, 40)]

    first = game(1)
    assert_same(game(1), first)
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(game(2)[1:], first[1:], strict=True))


def test_options_out_of_range_and_states_with_other_frames_are_refused() -> None:
    for name, value in {"frame_stack": 0, "sticky_action_probability": 1.0, "skip": 0, "max_episode_steps": -1}.items():
        with pytest.raises(ValueError, match=f"{name}={value}"):
            AtariGame("ALE/Pong-v5", **{name: value})  # type: ignore[arg-type]
    state = AtariGame("ALE/Pong-v5", frame_stack=2).get_state()
    with pytest.raises(ValueError, match="holds 2 frames, not 4"):
        AtariGame("ALE/Pong-v5").set_state(state)


def test_unknown_games_are_refused_with_the_closest_name(mario: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = dict.fromkeys(["ALE/Breakout-v4", "ALE/", "ALE/nothing", "ALE/Pong-v5 --frame-stack 0"], "")
    wrong |= {"ALE/Breakou-v5": "Did you mean: `Breakout`?", "ALE/Backgammon-v5": "use noop_max=0"}
    for flags, message in wrong.items():
        code, _, error = command_line(mario, capsys)("--env-id", *flags.split())
        assert (code, error.startswith("error: ")) == (2, True)
        assert message in error


def test_the_flags_of_the_games_reach_them(mario: ModuleType, tmp_path: Path) -> None:
    flags = {"frame_stack": 2, "skip": 3, "noop_max": 5, "sticky_action_probability": 0.5}
    env: Any = mario.make_env(tiny_args(mario, tmp_path, **GAME | flags))
    known = (len(env.reset()[0]), env.env.frame_skip, env.env.noop_max, env.env.env.repeat_action_probability)
    assert known == tuple(flags.values())


Learn = Callable[..., tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]]


@pytest.fixture
def learn(mario: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Learn:
    """Train on a game with a policy that always takes one action, sampled or not, in `tmp_path`: rewards and
    terminations of the first rollout as the learner saw them, and the run's progress."""

    def train(name: str, action: int, **values: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]:
        chosen = lambda policy: torch.full((len(policy.logits),), action)  # noqa: E731
        monkeypatch.setattr(mario.Categorical, "sample", chosen)
        monkeypatch.setattr(mario.Categorical, "mode", property(chosen))
        calls = spy(monkeypatch, mario, "compute_gae")
        mario.train(tiny_args(mario, tmp_path, **GAME | {"env_id": f"ALE/{name}-v5"} | values))
        rewards, _, _, terminations, *_ = calls[0][0]
        return rewards, terminations, columns(tmp_path)

    return train


@pytest.mark.parametrize("sign_reward", [True, False])
def test_it_learns_signs_and_reports_points(mario: ModuleType, learn: Learn, tmp_path: Path, sign_reward: bool) -> None:
    """Phoenix: the first shot hits a bird of 20 points."""
    values = {"sign_reward": sign_reward, "episodic_life": not sign_reward, "num_steps": 12, "total_timesteps": 24}
    rewards, _, progress = learn("Phoenix", FIRE, **values)
    assert rewards.sum(0).tolist() == ([1, 1] if sign_reward else [20, 20])
    assert mario.load(tmp_path / "best.pt")["envs"]["returns"].tolist() == [20, 20]
    assert (progress["eval/mean_return"], progress["rollout/mean_reward"]) == ([20], [pytest.approx(20 / 12)])


@pytest.mark.parametrize("episodic_life", [True, False])
def test_a_lost_life_ends_the_learners_episode_alone(learn: Learn, episodic_life: bool) -> None:
    """Breakout, nobody hitting the ball: the learner sees five terminations a game, the record one episode."""
    values = {"episodic_life": episodic_life, "num_steps": 140, "total_timesteps": 280, "reset_steps": None}
    _, terminations, progress = learn("Breakout", NOOP, **values)
    assert terminations.sum(0).tolist() == ([5, 5] if episodic_life else [1, 1])
    assert progress["counters/resets"] == [2]
    for name in ("rollout/episodic_length", "eval/mean_length"):
        assert progress[name][0] == pytest.approx(5 * 24, abs=10)


def test_a_life_lost_on_the_time_limit_is_a_termination(mario: ModuleType, learn: Learn, tmp_path: Path) -> None:
    """In that step the info is already the next episode's; that a life was lost stands in its final_info."""
    values = {"num_envs": 1, "num_minibatches": 1, "episodic_life": True}

    def first_loss(limit: int | None) -> tuple[int, bool]:
        """The step that costs the first life, and whether the time limit cuts the episode in it."""
        game = GAME | values | {"env_id": "ALE/Breakout-v5", "reset_steps": limit}
        env = mario.make_env(tiny_args(mario, tmp_path, **game))
        env.reset(seed=1)
        step, truncated, info = 0, False, {}
        while not (truncated or info):
            *_, truncated, info = env.step(NOOP)
            step += 1
        return step, truncated and bool(info)

    steps, _ = first_loss(None)
    limit = next(limit for limit in range(steps, steps + 40) if first_loss(limit) == (steps, True))
    sizes = {"reset_steps": limit, "num_steps": steps, "total_timesteps": steps, "seed": 1}
    _, terminations, progress = learn("Breakout", NOOP, **values, **sizes)
    assert terminations.flatten().tolist() == [False] * (steps - 1) + [True]
    assert progress["counters/resets"] == [1]


def test_play_films_a_game(mario: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mario.train(tiny_args(mario, tmp_path, **GAME))
    code, out, _ = command_line(mario, capsys)("play", "--logdir", str(tmp_path), "--save-gif", "--gif-frames", "10")
    assert (code, "flag" in out) == (0, False)
    (gif,) = (tmp_path / "gifs").glob("*.gif")
    with PIL.Image.open(gif) as picture:
        assert picture.size == (160, 210)
