"""ppo_atari_mario.py on the real game: training, exact resume, evaluation, videos, play and what it refuses.

The emulator is nes_py, which a plain install brings; what is tested on fceumm too is skipped by name without it.
What all scripts have in common is tested in test_ppo_math.py.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import PIL.Image
import PIL.ImageSequence
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_atari_mario as mario
from envs.mario_game import MarioGame
from tests.conftest import can_compile, spy
from tests.test_mario_env import GOAL_RUNS, NOOP, RUN, decode, require
from tests.test_resume import fork, rows, wait, wait_until

BACKENDS = ["nes_py", "fceumm"]
ENTROPIES = [  # of seven actions, nats
    ([0.05, 0.70, 0.15, 0.03, 0.03, 0.02, 0.02], 1.051),
    ([0.15, 0.17, 0.14, 0.13, 0.16, 0.12, 0.13], 1.939),  # a guide prints 1.95, more than ln 7 allows
    ([0.02, 0.85, 0.08, 0.02, 0.01, 0.01, 0.01], 0.635),  # a guide prints 0.60
    ([1 / 7] * 7, 1.946),  # ln 7: the most that seven actions can have
]
# a run of seconds: 4 updates of 2 x 8 steps, episodes of at most 6 steps, an evaluation after every second update
TINY: dict[str, Any] = {
    "total_timesteps": 64, "num_envs": 2, "num_steps": 8, "num_minibatches": 2, "minibatch_growth": 2,
    "update_epochs": 2, "num_workers": 1, "feature_dim": 16, "max_episode_steps": 6, "noop_max": 3, "eval_every": 32,
    "eval_episodes": 2, "video_episodes": 2, "save_every": 1, "backend": "nes_py",
}  # fmt: skip


def tiny(logdir: Path, **values: Any) -> mario.Args:
    return mario.Args(**(TINY | {"logdir": str(logdir)} | values))


def command_line(args: dict[str, Any]) -> list[str]:
    return [word for name, value in args.items() for word in (mario.flag(name), str(value))]


def make_agent(input_shape: tuple[int, ...] = (4, 64, 64), **values: Any) -> mario.Agent:
    torch.manual_seed(0)
    spaces: Any = SimpleNamespace(
        single_observation_space=gym.spaces.Box(0, 255, input_shape, np.uint8),
        single_action_space=gym.spaces.Discrete(7),
    )
    return mario.Agent(spaces, mario.Args(**({"amp": False} | values)))


def pictures(batch_size: int, channels: int = 4, side: int = 64) -> torch.Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(0, 256, (batch_size, channels, side, side), dtype=np.uint8))


class Scripted(torch.nn.Module):
    """An agent that plays given actions, `moves[t]` at step t (a number for all environments, or one for each)."""

    def __init__(self, moves: list[Any]) -> None:
        super().__init__()
        self.device_holder = torch.nn.Parameter(torch.zeros(1))
        self.moves: Iterator[Any] = iter(moves)

    def get_action(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(next(self.moves)).expand(len(obs))


def scores(success_rate: float = 0.0, mean_return: float = 0.0) -> dict[str, Any]:
    """What an evaluation returns."""
    return {"success_rate": success_rate, "mean_return": mean_return, "std_return": 0, "mean_length": 1, "frames": []}


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_the_documents_preset_has_exactly_its_values() -> None:
    args = mario.parse_args(["--configs", "document"])
    expected = {
        "seed": 0, "total_timesteps": 10_000_000, "eval_every": 100_000, "save_every": 100_000, "eval_episodes": 10,
        "num_envs": 32, "num_steps": 128, "minibatch_size": 256, "update_epochs": 4, "learning_rate": 2.5e-4,
        "anneal_lr": False, "gamma": 0.99, "gae_lambda": 0.95, "clip_coef": 0.2, "vf_coef": 0.5, "ent_coef": 0.03,
        "anneal_ent": False, "max_grad_norm": 0.5, "feature_dim": 512, "obs": "rgb64", "skip": 4, "video_episodes": 3,
        "video_fps": 16, "minibatch_growth": 1, "reward": "document", "shared_cnn": True, "clip_vloss": False,
        "target_kl": None,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected
    assert (args.batch_size, args.num_updates) == (4096, 2441)


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (["document", "explore"], {"ent_coef": 0.05, "learning_rate": 1e-4, "gamma": 0.99, "num_envs": 32}),
        (["document", "fast"], {"num_envs": 8, "minibatch_size": 128, "update_epochs": 3,
                                "total_timesteps": 2_000_000}),
        (["debug"], {"num_envs": 4, "num_steps": 64, "minibatch_size": 64, "update_epochs": 2, "gamma": 0.95,
                     "total_timesteps": 100_000, "eval_every": 10_000, "save_every": 10_000}),
        (["explore", "defaults"], {"ent_coef": 0.05}),  # a layer changes only what it names
    ],
)  # fmt: skip
def test_presets_layer_from_left_to_right(configs: list[str], expected: dict[str, Any]) -> None:
    args = mario.parse_args(["--configs", *configs])
    assert {name: getattr(args, name) for name in expected} == expected


def test_flags_win_over_presets() -> None:
    args = mario.parse_args(["--configs", "document", "debug", "--num-envs", "6", "--no-shared-cnn"])
    assert (args.num_envs, args.shared_cnn, args.total_timesteps) == (6, False, 100_000)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--configs", "documents"], ["documents", "did you mean document?"]),
        (["--env-id", "Breakout"], ["Breakout", "Mario-1-1"]),
        (["--env-id", "Mario-9-1"], ["9-1", "1-1 to 8-4"]),
        (["--num-minibatches", "7"], ["--num-minibatches 7", "8192"]),
        (["--num-minibatches", "2"], ["--minibatch-growth 4 must divide --num-minibatches 2"]),
        (["--minibatch-growth", "0"], ["--minibatch-growth must be at least 1, not 0"]),
        (["--sticky-action-probability", "1.5"], ["1.5", "below 1"]),
        (["--gamma", "1", "--stuck-steps", "0"], ["--gamma 1", "--stuck-steps"]),
        (["--skip", "0"], ["skip=0"]),
        (["--skip", "26"], ["skip=26", "1 to 25"]),
        (["play", "--logdir", "/nowhere", "--render", "--save-gif"], ["choose one"]),
        (["--feature-dim", "0"], ["--feature-dim must be at least 1, not 0"]),
        (["--total-timesteps", "1000"], ["1000", "8192"]),
        (["--resume"], ["--logdir"]),
        (["play", "--logdir", "/nowhere"], ["/nowhere/best.pt"]),
        (["play", "--logdir", "/nowhere", "--episodes", "0"], ["--episodes must be at least 1, not 0"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert mario.main(argv) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words)
    assert "Traceback" not in message


def test_a_missing_emulator_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("envs.nes_core.available_backends", list)
    assert mario.main(["--backend", "fceumm"]) == 2
    assert "pip install --no-deps stable-retro" in capsys.readouterr().err


def test_the_program_exits_with_the_code_of_main(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(mario.__file__), "--skip", "0"])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(mario.__file__), run_name="__main__")


@pytest.mark.parametrize(("limit", "probed"), [(0, 48), (6, 6), (100, 48)])
def test_explain_evaluates_for_no_longer_than_its_three_updates(
    limit: int, probed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A game of Mario's may last for minutes."""
    limits: list[int] = []

    def evaluate(agent: Any, args: mario.Args, **options: Any) -> dict[str, Any]:
        limits.append(args.max_episode_steps)
        return scores()

    monkeypatch.setattr(mario, "evaluate", evaluate)
    monkeypatch.setattr(mario, "plot_curves", lambda logdir: None)
    values = TINY | {"max_episode_steps": limit, "logdir": tmp_path / "run"}
    assert mario.main(["--explain", *command_line(values)]) == 0
    assert limits == [probed] * 2
    output = capsys.readouterr().out
    assert "Mario-1-1: 4 updates of 16 transitions (2 environments x 8 steps)" in output
    assert re.search(r"[\d,]+ steps/s in a probe: about \d+\.\d minutes without the evaluations", output)
    assert not (tmp_path / "run").exists()


# ---- agent ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "side", "sizes", "flat"),
    [(3, 64, [(32, 15, 15), (64, 6, 6), (64, 4, 4)], 1024), (4, 84, [(32, 20, 20), (64, 9, 9), (64, 7, 7)], 3136)],
)
def test_shapes_of_the_convolutions(channels: int, side: int, sizes: list[tuple[int, ...]], flat: int) -> None:
    network = mario.cnn((channels, side, side), 512)
    x, seen = pictures(2, channels, side).float(), []
    for layer in network:
        x = layer(x)
        if isinstance(layer, torch.nn.Conv2d):
            seen.append(tuple(x.shape[1:]))
    linear: Any = network[-2]
    assert (seen, linear.in_features, tuple(x.shape)) == (sizes, flat, (2, 512))


def test_only_padding_would_give_what_the_guide_says_of_its_convolutions() -> None:
    """16 x 16, 8 x 8, 8 x 8 and 4,096 numbers from 64 x 64 pixels: with padding 2, 1 and 1, which ours have not."""
    network = mario.cnn((3, 64, 64), 512)
    convolutions = [layer for layer in network if isinstance(layer, torch.nn.Conv2d)]
    assert [layer.padding for layer in convolutions] == [(0, 0)] * 3
    x, seen = pictures(2, 3, 64).float(), []
    for layer, padding in zip(convolutions, (2, 1, 1), strict=True):
        x = layer(torch.nn.functional.pad(x, [padding] * 4))
        seen.append(tuple(x.shape[1:]))
    assert (seen, x[0].numel()) == ([(32, 16, 16), (64, 8, 8), (64, 8, 8)], 4096)


def test_a_batch_of_one_keeps_its_dimension() -> None:
    action, log_prob, entropy, value = make_agent().get_action_and_value(pictures(1))
    assert [tuple(x.shape) for x in (action, log_prob, entropy, value)] == [(1,)] * 4


def test_the_policy_starts_nearly_uniform() -> None:
    entropy = make_agent().get_action_and_value(pictures(32))[2].detach()
    assert 1.93 < float(entropy.mean()) <= math.log(7)  # 1.9459; no policy of seven actions has more


def test_gumbel_noise_samples_the_softmax_and_no_noise_gives_its_mode() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0])
    noise = mario.gumbel_noise((200_000, 3), "cpu", torch.Generator().manual_seed(0))
    frequencies = (logits + noise).argmax(-1).bincount(minlength=3) / 200_000
    torch.testing.assert_close(frequencies, logits.softmax(0), atol=0.005, rtol=0)  # 4.5 standard errors
    agent, obs = make_agent(), pictures(8)
    mode = agent.actor_logits(agent.features(agent.actor_cnn, obs)).argmax(-1)
    assert torch.equal(agent.get_action(obs, torch.zeros(8, 7)), mode)


def test_bfloat16_changes_little() -> None:
    agent, obs = make_agent(), pictures(64)
    exact = agent.get_action_and_value(obs, torch.arange(64) % 7)
    agent.amp = True
    rounded = agent.get_action_and_value(obs, torch.arange(64) % 7)
    for one, other in zip(exact[1:], rounded[1:], strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert 0 < float((one - other).detach().abs().max()) < 0.02 * max(1.0, float(one.detach().abs().max()))


def test_separate_networks_have_twice_the_weights_and_share_nothing() -> None:
    shared, separate = make_agent(), make_agent(shared_cnn=False)
    sizes = [sum(p.numel() for p in agent.parameters()) for agent in (shared, separate)]
    heads = 7 * 512 + 7 + 512 + 1
    assert sizes[1] - heads == 2 * (sizes[0] - heads)
    separate.get_value(pictures(2)).sum().backward()
    assert all(p.grad is None for p in [*separate.actor_cnn.parameters(), *separate.actor_logits.parameters()])
    assert all(p.grad is not None for p in separate.critic_cnn.parameters())


# ---- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads Linux's /proc")
def test_workers_are_small_because_they_do_not_import_torch() -> None:
    vec_env: Any = mario.make_envs(mario.Args(**(TINY | {"num_envs": 4, "num_workers": 2})))
    try:
        vec_env.reset(seed=0)
        for worker in vec_env._pool.workers:
            lines = Path(f"/proc/{worker.process.pid}/smaps_rollup").read_text().splitlines()
            private = sum(int(line.split()[1]) for line in lines if line.startswith("Private"))
            assert private < 60_000  # KiB; importing torch alone takes 145,000
    finally:
        vec_env.close()


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished tiny run."""
    logdir = tmp_path_factory.mktemp("mario") / "run"
    result = mario.train(tiny(logdir))
    assert (result["update"], result["global_step"], result["minibatch_updates"]) == (4, 64, 12)
    return logdir


def test_a_run_leaves_its_record(run: Path) -> None:
    assert {path.name for path in run.iterdir()} >= {
        "config.json", "progress.csv", "timing.csv", "eval.csv", "best.pt", "latest.pt", "curves.png", "videos",
    }  # fmt: skip
    config = json.loads((run / "config.json").read_text())
    assert config["args"]["backend"] == "nes_py"
    progress = mario.read_csv(run / "progress.csv")
    assert progress["global_step"].tolist() == [16, 32, 48, 64]
    assert progress["train/learning_rate"] == pytest.approx([5e-4, 3.75e-4, 2.5e-4, 1.25e-4])
    assert progress["train/ent_coef"] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert progress["rollout/resets"].tolist() == [2, 4, 8, 10]  # 2 environments; an episode ends every 6 steps
    assert (progress["rollout/episodic_length"] == 6).all()
    assert (progress["rollout/success_rate"] == 0).all()
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance"):
        assert np.isfinite(progress[f"train/{name}"]).all(), name
    evaluation = mario.read_csv(run / "eval.csv")
    assert evaluation["global_step"].tolist() == [32, 64]
    assert {"eval/success_rate", "eval/mean_return", "eval_sampled/success_rate"} <= evaluation.keys()


def test_tensorboard_shows_the_evaluation_episodes(run: Path) -> None:
    events = EventAccumulator(str(run), size_guidance={"images": 0}).Reload()
    images = events.Images("eval/episodes")
    assert [image.step for image in images] == [32, 64]
    with PIL.Image.open(io.BytesIO(images[-1].encoded_image_string)) as gif:
        assert (gif.format, gif.size) == ("GIF", (2 * 128, 120))  # two episodes at half size
        # 6 frames at 16 a second in a GIF's hundredths of a second; equal ones are stored as one that lasts longer
        assert sum(frame.info["duration"] for frame in PIL.ImageSequence.Iterator(gif)) == 6 * 60
    assert (run / "videos" / "step_64.gif").read_bytes() == images[-1].encoded_image_string
    assert {"train/entropy", "eval/success_rate", "rollout/success_rate", "time/sps"} <= set(events.Tags()["scalars"])


def test_play_prints_json_and_writes_gifs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["play", "--logdir", str(run), "--checkpoint", "latest", "--episodes", "2", "--save-gif"]
    assert mario.main([*argv, "--stochastic", "--gif-dir", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["success_rate"], len(summary["returns"])) == (0.0, 2)
    assert summary["mean_return"] == pytest.approx(np.mean(summary["returns"]))
    gifs = sorted(tmp_path.glob("run_*/*.gif"))
    names = [f"episode_{i + 1:03d}_return_{r:.0f}_steps_6.gif" for i, r in enumerate(summary["returns"])]
    assert [gif.name for gif in gifs] == names
    with PIL.Image.open(gifs[0]) as gif:
        assert gif.size == (256, 240)  # the full screen
        # 15 frames a second, the game's pace: 6.67 hundredths round to 7
        assert sum(frame.info["duration"] for frame in PIL.ImageSequence.Iterator(gif)) == 6 * 70


def test_play_takes_another_stage(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same seed, same waiting: only the stage can make the pictures differ."""
    argv = ["play", "--logdir", str(run), "--checkpoint", "latest", "--episodes", "1", "--save-gif"]

    def picture(*stage: str) -> bytes:
        folder = tmp_path / "-".join(["gif", *stage])
        assert mario.main([*argv, "--gif-dir", str(folder), *stage]) == 0
        (gif,) = folder.glob("run_*/*.gif")
        return gif.read_bytes()

    own = picture()
    assert picture("--env-id", "Mario-1-1") == own
    assert picture("--env-id", "Mario-4-1") != own
    assert mario.main([*argv, "--env-id", "Mario-9-1"]) == 2
    assert "9-1" in capsys.readouterr().err


def test_a_run_of_short_rollouts_and_small_minibatches_can_be_played(run: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(run / "latest.pt", weights_only=True)
    checkpoint["args"] |= {"num_steps": 15, "num_minibatches": 32, "track": True}
    torch.save(checkpoint, tmp_path / "short.pt")
    argv = ["play", "--logdir", str(tmp_path), "--checkpoint", str(tmp_path / "short.pt"), "--episodes", "1"]
    assert mario.main(argv) == 0


def test_a_finished_folder_is_not_overwritten(run: Path) -> None:
    with pytest.raises(mario.UsageError, match="already holds a run"):
        mario.train(tiny(run))
    with pytest.raises(mario.UsageError, match=r"--gamma from 0\.95 to 0\.9"):
        mario.train(tiny(run, resume=True, gamma=0.9))


@pytest.mark.parametrize(("probabilities", "entropy"), ENTROPIES)
def test_the_policys_entropy_is_that_of_its_probabilities(probabilities: list[float], entropy: float) -> None:
    agent = make_agent(feature_dim=16)
    with torch.no_grad():
        agent.actor_logits.weight.zero_()
        agent.actor_logits.bias.copy_(torch.tensor(probabilities).log())
        computed = agent.get_action_and_value(pictures(2))[2]
    torch.testing.assert_close(computed, torch.full((2,), entropy), rtol=0, atol=0.0006)
    assert float(computed[0]) <= math.log(7) + 1e-6


def test_a_network_fed_with_colours_last_refuses() -> None:
    """The guide's pseudo-code hands (32, 64, 64, 3) to the convolution; torch wants (32, 3, 64, 64)."""
    agent = make_agent(input_shape=(3, 64, 64), feature_dim=16)
    assert agent.get_value(pictures(32, channels=3)).shape == (32,)
    with pytest.raises(RuntimeError, match="expected input"):
        agent.get_value(pictures(32, channels=3).permute(0, 2, 3, 1))


@can_compile
@pytest.mark.slow
def test_a_compiled_run_is_close_to_an_eager_one_before_and_after_the_minibatches_grow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frames come in the same order only as long as the policies agree, so the learning rate is small."""
    runs = []
    for compiled in (True, False):
        args = tiny(tmp_path / str(compiled), compile=compiled, capture_video=False, learning_rate=1e-5, amp=False,
                    num_minibatches=4)  # fmt: skip
        mario.train(args)
        runs.append(mario.load_checkpoint(tmp_path / str(compiled) / "latest.pt"))
    assert "so --compile is off" not in capsys.readouterr().out
    assert runs[0]["counters"]["minibatch_updates"] == (2 * 4 + 2 * 2) * 2  # two updates before, two after
    for name, tensor in runs[1]["agent"].items():
        torch.testing.assert_close(runs[0]["agent"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


FLAGS_OF_GAMES: dict[str, tuple[Any, Any]] = {  # flag -> (not its default, what the game then knows)
    "env_id": ("Mario-1-2,4-1", lambda env: env.stages == ("1-2", "4-1")),
    "obs": ("gray84", lambda env: env.observation_space.shape == (4, 84, 84)),
    "frame_stack": (2, lambda env: env.observation_space.shape == (2, 64, 64)),
    "action_set": ("complex", lambda env: env.action_space.n == 12),
    "skip": (3, lambda env: env.skip == 3),
    "max_pool": (True, lambda env: env.max_pool),
    "mask_score": (True, lambda env: env.mask_score),
    "show_buttons": (False, lambda env: not env.show_buttons),
    "reward": ("document", lambda env: env.reward_terms.flag == 1000),
    "stuck_steps": (7, lambda env: env.stuck_steps == 7),
    "max_episode_steps": (9, lambda env: env.max_episode_steps == 9),
    "noop_max": (5, lambda env: env.noop_max == 5),
    "sticky_action_probability": (0.5, lambda env: env.sticky_action_probability == 0.5),
}


@pytest.mark.parametrize("name", FLAGS_OF_GAMES)
def test_a_flag_of_the_games_reaches_them(name: str) -> None:
    value, knows = FLAGS_OF_GAMES[name]
    usual = mario.make_env(mario.Args(backend="nes_py"))
    env = mario.make_env(mario.Args(**{"backend": "nes_py", name: value}))
    assert knows(env)
    assert not knows(usual)
    env.close()
    usual.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rollouts_success_rate_is_the_share_of_its_episodes_that_reach_the_flag(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One game plays a recorded run to the flag; the other stands still, which ends its episodes without one."""
    require(backend)
    recorded = decode(GOAL_RUNS[backend, "1-1"])
    moves = iter([torch.tensor([move, NOOP]) for move in recorded])
    decide = mario.Agent.get_action_and_value

    def play_the_recorded_run(agent: mario.Agent, obs: torch.Tensor, action: Any = None, noise: Any = None) -> Any:
        return decide(agent, obs, next(moves) if action is None else action)

    monkeypatch.setattr(mario.Agent, "get_action_and_value", play_the_recorded_run)
    mario.train(tiny(tmp_path / "run", backend=backend, num_steps=len(recorded), total_timesteps=2 * len(recorded),
                     noop_max=0, sticky_action_probability=0.0, max_episode_steps=0, stuck_steps=60, eval_every=0,
                     eval_episodes=1, num_minibatches=2, minibatch_growth=1, update_epochs=1,
                     capture_video=False, amp=False))  # fmt: skip
    progress = mario.read_csv(tmp_path / "run" / "progress.csv")
    assert progress["rollout/resets"].item() > 1
    assert progress["rollout/success_rate"].item() == pytest.approx(1 / progress["rollout/resets"].item())


def test_a_flag_in_the_step_of_the_time_limit_is_no_success_of_the_whole_game(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MarioGame, "frame", lambda game, buttons: (False, True, False))  # a flag in every frame
    monkeypatch.setattr(mario, "plot_curves", lambda logdir: None)
    values = {"env_id": "Mario-full", "noop_max": 0, "total_timesteps": 16, "minibatch_growth": 1}
    mario.train(tiny(tmp_path / "run", capture_video=False, **values))
    progress, evaluation = (mario.read_csv(tmp_path / "run" / name) for name in ("progress.csv", "eval.csv"))
    assert progress["rollout/episodic_return"] == evaluation["eval/mean_return"] == pytest.approx(6 * 5)  # six flags
    assert progress["rollout/success_rate"] == evaluation["eval/success_rate"] == 0


def test_a_rollout_stores_pictures_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 x 128 pictures of (3, 64, 64) are 48 MiB as bytes and would be 192 as floats."""
    assert 32 * 128 * 3 * 64 * 64 == 48 * 2**20
    calls = spy(monkeypatch, mario, "ppo_gradients")
    monkeypatch.setattr(mario, "plot_curves", lambda logdir: None)
    mario.train(tiny(tmp_path / "run", capture_video=False, total_timesteps=16, minibatch_growth=1))
    assert {minibatch[0].dtype for (_, minibatch, _), _ in calls} == {torch.uint8}


def test_the_best_policy_reaches_most_flags_and_among_those_the_highest_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deterministic actions; what sampled ones earn is only logged."""
    results = [(0.5, 10.0), (0.5, 20.0), (0.4, 99.0), (0.5, 15.0)]
    remaining = iter(results)

    def evaluate(agent: Any, args: Any, deterministic: bool = True, **options: Any) -> dict[str, Any]:
        return scores(*next(remaining)) if deterministic else scores(0.9, 90.0)

    monkeypatch.setattr(mario, "evaluate", evaluate)
    monkeypatch.setattr(mario, "plot_curves", lambda logdir: None)
    mario.train(tiny(tmp_path / "run", eval_every=16, capture_video=False))
    logged = mario.read_csv(tmp_path / "run" / "eval.csv")
    assert [*zip(logged["eval/success_rate"], logged["eval/mean_return"], strict=True)] == results
    assert logged["eval_sampled/success_rate"].tolist() == [0.9] * 4
    counters = mario.load_checkpoint(tmp_path / "run" / "best.pt")["counters"]
    assert (counters["best_step"], counters["best_success_rate"], counters["best_return"]) == (32, 0.5, 20.0)
    (index,) = tmp_path.glob("best/*/index.json")
    assert [entry["score"] for entry in json.loads(index.read_text())] == [[0.5, 20.0]]


def test_sigterm_saves_and_exits_with_143(tmp_path: Path) -> None:
    logdir, output = tmp_path / "run", tmp_path / "output.txt"
    argv = command_line(TINY | {"logdir": logdir, "total_timesteps": 100_000, "eval_every": 0, "save_every": 0})
    pid = fork(lambda: mario.main(["--no-capture-video", *argv]), output)
    wait_until(pid, lambda: rows(logdir) > 0, output)
    os.kill(pid, signal.SIGTERM)
    assert wait(pid) == 128 + signal.SIGTERM
    assert f"continue with --resume --logdir {logdir}" in output.read_text()
    assert mario.load_checkpoint(logdir / "latest.pt")["counters"]["update"] == rows(logdir) < 6250


def test_kept_checkpoints_and_the_remaining_options_train(tmp_path: Path) -> None:
    """Separate networks, 84 x 84 pictures, per-environment advantages, value clipping and a KL limit, in one run."""
    options: dict[str, Any] = {
        "shared_cnn": False, "obs": "gray84", "norm_adv_scope": "per_env", "clip_vloss": True, "target_kl": 1e-9,
        "reward": "document", "action_set": "right_only", "amp": False, "total_timesteps": 32, "eval_every": 0,
        "keep_checkpoints": True, "capture_video": False, "anneal_lr": False,
    }  # fmt: skip
    mario.train(tiny(tmp_path / "run", **options))
    assert sorted(path.name for path in (tmp_path / "run").glob("step_*.pt")) == ["step_16.pt", "step_32.pt"]
    progress = mario.read_csv(tmp_path / "run" / "progress.csv")
    assert (progress["train/update_epochs_done"] < 2).all()  # no update changes the policy by as little as 1e-9
    assert (progress["train/learning_rate"] == 5e-4).all()
    first, second = (mario.load_checkpoint(tmp_path / "run" / f"step_{step}.pt")["agent"] for step in (16, 32))
    assert not torch.equal(first["critic_cnn.0.weight"], second["critic_cnn.0.weight"])


def test_a_run_starts_from_the_policy_that_it_is_given(run: Path, tmp_path: Path) -> None:
    start = run / "latest.pt"
    options = {"total_timesteps": 16, "eval_every": 0, "capture_video": False, "learning_rate": 1e-30}
    mario.train(tiny(tmp_path / "next", init_from=str(start), **options))
    before, after = (mario.load_checkpoint(path)["agent"] for path in (start, tmp_path / "next" / "latest.pt"))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    with pytest.raises(mario.UsageError, match="of other inputs, actions or layers"):
        mario.train(tiny(tmp_path / "other", init_from=str(start), feature_dim=8))


def test_a_kept_checkpoint_that_the_disk_refuses_leaves_no_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_disk(source: Path, target: Path) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mario.shutil, "copyfile", full_disk)
    args = tiny(tmp_path / "run", total_timesteps=16, eval_every=0, keep_checkpoints=True, capture_video=False)
    assert mario.train(args)["saved"]
    assert "step_16.pt was not written (No space left on device); the run goes on." in capsys.readouterr().err
    assert not [*(tmp_path / "run").glob("step_*")]


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_only_starts_sticky_actions_and_sampling_tell_episodes_apart(tmp_path: Path) -> None:
    """The console knows no chance: without these, ten deterministic evaluation episodes are one episode."""
    agent = make_agent()
    still = tiny(tmp_path, noop_max=0, sticky_action_probability=0.0, eval_episodes=4, max_episode_steps=25)
    with torch.no_grad():
        agent.actor_logits.bias += torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])  # run and jump to the right
        agent.actor_logits.weight *= 30

    def different(args: mario.Args, **options: Any) -> int:
        return len(set(mario.evaluate(agent, args, **options)["returns"]))

    assert different(still) == 1
    assert different(still, deterministic=False) > 1
    assert different(mario.replace(still, noop_max=30, sticky_action_probability=0.25)) > 1


def test_equal_seeds_give_equal_evaluations(tmp_path: Path) -> None:
    agent, args = make_agent(), tiny(tmp_path, noop_max=30, eval_episodes=3, max_episode_steps=20)
    results = [mario.evaluate(agent, args, deterministic=False, seed=seed) for seed in (1, 1, 2)]
    assert results[0] == results[1]
    assert results[0]["returns"] != results[2]["returns"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_flag_counts_as_success(backend: str, tmp_path: Path) -> None:
    require(backend)
    moves = decode(GOAL_RUNS[backend, "1-1"])
    args = tiny(tmp_path, backend=backend, noop_max=0, sticky_action_probability=0.0, eval_episodes=1,
                max_episode_steps=0, stuck_steps=0)  # fmt: skip
    agent: Any = Scripted(moves)
    evaluation = mario.evaluate(agent, args)
    assert evaluation["success_rate"] == 1.0
    assert evaluation["mean_return"] > 300  # 3,100 pixels and the flag, less the clock, over 10
    assert evaluation["lengths"][0] <= len(moves)


def test_an_ended_episode_earns_nothing_more_and_goes_on_showing_its_last_frame(tmp_path: Path) -> None:
    args = tiny(tmp_path, noop_max=0, sticky_action_probability=0.0, max_episode_steps=60, skip=4)
    agent: Any = Scripted([[RUN, NOOP]] * 60)  # the first runs into the first enemy, the second waits
    evaluation = mario.evaluate(agent, args, render_mode="rgb_array")
    end = evaluation["lengths"][0]
    assert end < 60 == evaluation["lengths"][1] == len(evaluation["frames"])
    alone: Any = Scripted([RUN] * 60)
    assert evaluation["returns"][0] == mario.evaluate(alone, mario.replace(args, eval_episodes=1))["returns"][0]
    assert evaluation["frames"][0].shape == (240, 2 * 256, 3)
    small = mario.evaluate(Scripted([[RUN, NOOP]] * 60), args, render_mode="rgb_array", shrink=2)["frames"]
    assert all(np.array_equal(a, b[::2, ::2]) for a, b in zip(small, evaluation["frames"], strict=True))
    left = [frame[:, :256] for frame in evaluation["frames"]]
    assert not np.array_equal(left[0], left[end - 1])
    assert all(np.array_equal(frame, left[end - 1]) for frame in left[end:])


# ---- learning -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_mario_learns_to_get_further(backend: Any, tmp_path: Path) -> None:
    require(backend)
    args = mario.Args(total_timesteps=20_480, eval_every=0, eval_episodes=2, capture_video=False, backend=backend)
    mario.train(mario.replace(args, num_steps=64, num_minibatches=8, logdir=str(tmp_path / "run")))
    returns = mario.read_csv(tmp_path / "run" / "progress.csv")["rollout/episodic_return"]
    assert np.mean(returns[-2:]) > 1.5 * returns[0]
