"""Atari games: envs/atari.py against the emulator itself, and what ppo_atari_mario.py makes of lives and points."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import PIL.Image
import PIL.ImageSequence
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import ppo_atari_mario as script
from envs.atari import FIRE, AtariError, AtariGame
from tests.conftest import assert_same

installed = all(importlib.util.find_spec(package) for package in ("ale_py", "cv2"))
needs_ale = pytest.mark.skipif(not installed, reason="needs pip install ale-py opencv-python-headless")
TINY: dict[str, Any] = {
    "env_id": "ALE/SpaceInvaders-v5", "num_envs": 2, "num_steps": 16, "total_timesteps": 32, "num_minibatches": 2,
    "minibatch_growth": 1,
    "update_epochs": 1, "num_workers": 1, "feature_dim": 16, "eval_every": 0, "eval_episodes": 2, "video_episodes": 1,
    "max_episode_steps": 30, "amp": False,
}  # fmt: skip
NOOP = 0


def tiny(logdir: Path, **values: Any) -> script.Args:
    return script.Args(**(TINY | {"logdir": str(logdir)} | values))


def play(env: gym.Env, steps: int, seed: int) -> list[Any]:
    """Everything that `steps` random actions lead to, new games included."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(rng.integers(4))
        seen.append((obs, float(reward), terminated, truncated, dict(info)))
        if terminated or truncated:
            seen.append(env.reset()[0])
    return seen


# ---- the environment ------------------------------------------------------------------------------------------------


@needs_ale
@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version.*", "ignore:.*not having a spec.*")
def test_gymnasium_accepts_a_game() -> None:
    env = AtariGame("ALE/Pong-v5", render_mode="rgb_array")
    check_env(env)
    for action in (-1, 99, 0.9, None):
        with pytest.raises(ValueError, match="takes the integers 0 to 5"):
            env.step(action)
    screen: Any = env.render()
    assert (screen.shape, screen.dtype) == ((210, 160, 3), np.uint8)
    assert env.metadata["render_fps"] == 15


@needs_ale
def test_a_frame_is_the_brightest_of_the_last_two_of_four_grey_ones_at_84_by_84() -> None:
    """Recomputed from the emulator's own screens."""
    import cv2

    env = AtariGame("ALE/Breakout-v5", noop_max=0, sticky_action_probability=0.0)
    raw: Any = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0, obs_type="grayscale").unwrapped
    first, _ = env.reset(seed=0)
    raw.reset(seed=0)
    actions, pictures, total = [FIRE, 2, 2, 3, 2, 3, 3, 2], [], 0.0
    obs = first
    for step, action in enumerate(actions):
        if step > 0:  # reset() has pressed FIRE
            obs, reward, *_ = env.step(action)
            total += float(reward)
        screens = []
        for _ in range(4):
            screen, reward, *_ = raw.step(action)
            screens.append(screen)
            total -= reward
        pictures.append(cv2.resize(np.maximum(*screens[2:]), (84, 84), interpolation=cv2.INTER_AREA))
        expected = [pictures[max(0, step - 3 + i)] for i in range(4)]  # the oldest first
        np.testing.assert_array_equal(obs, expected)
    assert total == 0
    assert len({picture.tobytes() for picture in pictures}) > 4  # something moved


@needs_ale
def test_every_life_begins_with_fire_and_the_game_goes_on_to_the_last() -> None:
    """In Breakout a ball that nobody meets is lost after about 24 steps; but it never flies unless FIRE is pressed."""
    env = AtariGame("ALE/Breakout-v5")
    env.reset(seed=0)
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


@needs_ale
def test_a_game_without_fire_and_lives_loses_none() -> None:
    env = AtariGame("ALE/Freeway-v5", noop_max=0, max_episode_steps=20)
    env.reset(seed=0)
    seen = [env.step(1) for _ in range(19)]
    assert [info for *_, info in seen] == [{}] * 19


@needs_ale
def test_max_episode_steps_truncates() -> None:
    limited, free = AtariGame("ALE/Pong-v5", max_episode_steps=50), AtariGame("ALE/Pong-v5")
    for seed in range(2):
        limited.reset(seed=seed)
        free.reset(seed=seed)
        for step in range(50):
            ours, theirs = limited.step(step % 6), free.step(step % 6)
            np.testing.assert_array_equal(ours[0], theirs[0])  # that of the last step, too: its value is asked for
            assert ours[2:4] == (False, step == 49)


@needs_ale
@pytest.mark.parametrize("steps", [1, 60])  # 60: after lost lives
def test_a_restored_game_goes_on_to_the_bit(steps: int) -> None:
    """Sticky actions, waiting before the next games, frames and lives included."""
    env = AtariGame("ALE/Breakout-v5")
    env.reset(seed=3)
    play(env, steps, seed=0)
    state = env.get_state()
    expected = play(env, 300, seed=1)
    other = AtariGame("ALE/Breakout-v5")
    other.reset(seed=4)
    play(other, 40, seed=2)
    other.set_state(state)
    assert_same(other.get_state(), state)
    assert_same(play(other, 300, seed=1), expected)
    assert sum(isinstance(entry, np.ndarray) for entry in expected) >= 1  # a game has ended meanwhile


@needs_ale
def test_a_restored_game_knows_the_action_that_sticks() -> None:
    """Whatever the restoring game did last: the first frames after 40 restores."""
    env, other = AtariGame("ALE/Breakout-v5"), AtariGame("ALE/Breakout-v5")
    env.reset(seed=3)
    other.reset(seed=4)
    for _ in range(40):
        env.step(2)  # right
        other.step(3)  # left
        other.set_state(env.get_state())
        assert_same(other.step(3), env.step(3))
        assert_same(other.get_state(), env.get_state())


@needs_ale
def test_equal_seeds_give_equal_games_and_others_do_not() -> None:
    env = AtariGame("ALE/Breakout-v5")

    def game(seed: int) -> list[Any]:
        return [env.reset(seed=seed)[0], *play(env, 40, seed=0)]

    first = game(1)
    assert_same(game(1), first)
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(game(2)[1:], first[1:], strict=True))


@needs_ale
@pytest.mark.parametrize(
    "options", [{"frame_stack": 0}, {"sticky_action_probability": 1.0}, {"skip": 0}, {"max_episode_steps": -1}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).replace("skip", "frame_skip")):
        AtariGame("ALE/Pong-v5", **options)


@needs_ale
def test_the_flags_of_the_games_reach_them(tmp_path: Path) -> None:
    flags = {"frame_stack": 2, "skip": 3, "noop_max": 5, "sticky_action_probability": 0.5}
    env: Any = script.make_env(tiny(tmp_path, **flags))
    known = (len(env.reset()[0]), env.env.frame_skip, env.env.noop_max, env.env.env.repeat_action_probability)
    assert known == tuple(flags.values())


@needs_ale
def test_a_state_with_other_frames_is_refused() -> None:
    state = AtariGame("ALE/Pong-v5", frame_stack=2).get_state()
    with pytest.raises(ValueError, match="holds 2 frames, not 4"):
        AtariGame("ALE/Pong-v5").set_state(state)


# ---- the command line -----------------------------------------------------------------------------------------------


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("envs.atari.importlib.util.find_spec", lambda name: None)
    assert script.main(["--env-id", "ALE/Pong-v5"]) == 2
    message = capsys.readouterr().err
    assert "pip install ale-py opencv-python-headless" in message
    assert "Traceback" not in message
    with pytest.raises(AtariError):
        AtariGame("ALE/Pong-v5")


@needs_ale
def test_an_unknown_game_is_refused_with_the_closest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--env-id", "ALE/Breakou-v5"]) == 2
    assert "Did you mean: `Breakout`?" in capsys.readouterr().err
    for flags in (["ALE/Breakout-v4"], ["ALE/"], ["ALE/not a name"], ["ALE/Pong-v5", "--frame-stack", "0"]):
        assert script.main(["--env-id", *flags]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--env-id", "ALE/Pong-v5", "--obs", "rgb64"], ["--obs", "ALE/Pong-v5"]),
        (["--env-id", "ALE/Pong-v5", "--configs", "document"], ["--obs", "ALE/Pong-v5"]),
        (["--no-episodic-life"], ["--episodic-life", "Mario-1-1"]),
    ],
)
def test_flags_of_the_other_kind_of_game_are_refused(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(argv) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words)


@needs_ale
def test_an_undiscounted_game_is_refused_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--env-id", "ALE/Breakout-v5", "--gamma", "1"]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in ("--gamma 1", "set --gamma below 1."))


def test_the_preset_has_the_published_values() -> None:
    """CleanRL's, close to those of Schulman et al. 2017, table 5."""
    args = script.parse_args(["--configs", "atari"])
    expected = {
        "num_envs": 8, "num_steps": 128, "update_epochs": 4, "minibatch_size": 256, "learning_rate": 2.5e-4,
        "anneal_lr": True, "gamma": 0.99, "gae_lambda": 0.95, "clip_coef": 0.1, "clip_vloss": True, "ent_coef": 0.01,
        "vf_coef": 0.5, "max_grad_norm": 0.5, "skip": 4, "noop_max": 30, "sign_reward": True, "episodic_life": True,
        "anneal_ent": False, "total_timesteps": 10_000_000,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Rewards and terminations of each rollout as the learner saw them, added while a run goes on."""
    seen: list[dict[str, torch.Tensor]] = []
    original = script.compute_gae

    def spy(rewards: Any, values: Any, next_values: Any, terminations: Any, *others: Any) -> Any:
        seen.append({"rewards": rewards.clone(), "terminations": terminations.clone()})
        return original(rewards, values, next_values, terminations, *others)

    monkeypatch.setattr(script, "compute_gae", spy)
    monkeypatch.setattr(script, "plot_curves", lambda logdir: None)  # most of the time of so short a run
    return seen


def always(action: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every agent take this action."""
    original = script.Agent.get_action_and_value

    def take(agent: Any, obs: torch.Tensor, given: Any = None, noise: Any = None) -> Any:
        if given is None:
            given = torch.full((len(obs),), action)
        return original(agent, obs, given)

    monkeypatch.setattr(script.Agent, "get_action_and_value", take)
    monkeypatch.setattr(script.Agent, "get_action", lambda agent, obs, noise: torch.full((len(obs),), action))


@needs_ale
@pytest.mark.parametrize("sign_reward", [True, False])
def test_a_run_learns_from_signs_and_reports_points(
    sign_reward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollouts: list[dict[str, torch.Tensor]]
) -> None:
    """Phoenix: the first shot hits a bird of 20 points."""
    always(FIRE, monkeypatch)
    values = {"env_id": "ALE/Phoenix-v5", "sign_reward": sign_reward, "num_steps": 12, "total_timesteps": 24}
    script.train(tiny(tmp_path / "run", capture_video=False, **values))
    assert rollouts[0]["rewards"].sum(0).tolist() == ([1, 1] if sign_reward else [20, 20])
    points = script.load_checkpoint(tmp_path / "run" / "latest.pt")["ranks"][0]["episodes"][1]
    assert points.tolist() == [20, 20]
    evaluation = script.read_csv(tmp_path / "run" / "eval.csv")
    assert evaluation["eval/mean_return"][-1] == 20
    assert math.isnan(evaluation["eval/success_rate"][-1])
    assert (tmp_path / "run" / "best.pt").exists()


@needs_ale
@pytest.mark.parametrize("episodic_life", [True, False])
def test_a_lost_life_ends_the_learners_episode_alone(
    episodic_life: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollouts: list[dict[str, torch.Tensor]]
) -> None:
    """Breakout, nobody hitting the ball: the learner sees five terminations a game, the record one episode."""
    always(NOOP, monkeypatch)
    values = {"env_id": "ALE/Breakout-v5", "num_steps": 140, "total_timesteps": 280, "max_episode_steps": 0}
    script.train(tiny(tmp_path / "run", capture_video=False, episodic_life=episodic_life, **values))
    assert rollouts[0]["terminations"].sum(0).tolist() == ([5, 5] if episodic_life else [1, 1])
    progress = script.read_csv(tmp_path / "run" / "progress.csv")
    assert progress["rollout/resets"].tolist() == [2]
    assert progress["rollout/episodic_length"][0] == pytest.approx(5 * 24, abs=10)
    lengths = script.read_csv(tmp_path / "run" / "eval.csv")["eval/mean_length"]
    assert lengths[0] == pytest.approx(5 * 24, abs=10)


@needs_ale
def test_a_life_lost_in_the_step_of_the_time_limit_is_a_termination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollouts: list[dict[str, torch.Tensor]]
) -> None:
    """In that step the info is already the next episode's; that a life was lost stands in its final_info."""
    always(NOOP, monkeypatch)
    values = {"env_id": "ALE/Breakout-v5", "num_envs": 1, "num_minibatches": 1, "capture_video": False}

    def first_loss(limit: int) -> tuple[int, bool]:
        """The step that costs the first life, and whether the time limit cuts the episode in it."""
        env = script.make_env(tiny(tmp_path, **values, max_episode_steps=limit))
        env.reset(seed=1)
        step, truncated = 0, False
        info: dict[str, Any] = {}
        while not (truncated or info):
            *_, truncated, info = env.step(NOOP)
            step += 1
        env.close()
        return step, truncated and bool(info)

    steps, _ = first_loss(0)
    limit = next(limit for limit in range(steps, steps + 40) if first_loss(limit) == (steps, True))
    args = tiny(tmp_path / "run", **values, max_episode_steps=limit, num_steps=steps, total_timesteps=steps, seed=1)
    script.train(args)
    assert rollouts[0]["terminations"].flatten().tolist() == [False] * (steps - 1) + [True]
    progress = script.read_csv(tmp_path / "run" / "progress.csv")
    assert progress["rollout/resets"].tolist() == [1]


@needs_ale
def test_play_writes_the_beginning_of_a_game_as_a_gif(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "MAX_VIDEO_FRAMES", 10)
    script.train(tiny(tmp_path / "run"))
    with PIL.Image.open(*(tmp_path / "run" / "videos").glob("*.gif")) as picture:
        assert picture.size == (2 * 80, 105)  # both evaluation episodes, though video_episodes is 1: it is the last
    capsys.readouterr()
    argv = ["play", "--logdir", str(tmp_path / "run"), "--episodes", "1"]
    assert script.main([*argv, "--max-episode-steps", "7", "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert script.main([*argv, "--save-gif"]) == 0
    output = capsys.readouterr().out
    assert "flag" not in output
    assert '"success_rate": null' in output
    (gif,) = (tmp_path / "run" / "gifs").glob("run_*/*.gif")
    with PIL.Image.open(gif) as picture:
        assert picture.size == (160, 210)
        # equal frames are stored as one that lasts longer
        assert sum(frame.info["duration"] for frame in PIL.ImageSequence.Iterator(picture)) == 10 * 70
