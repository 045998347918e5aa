"""ppo_atari_mario.py on the real game: agent, training, evaluation, play and what its flags do.

What all scripts have in common is tested in test_ppo_math.py, test_loops.py, test_command_line.py, test_resume.py and
test_checkpoint_files.py. nes_py, which is slow, stands back where FCEUmm is installed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from envs.atari import AtariError, AtariGame
from envs.mario_game import MarioGame
from tests.conftest import FASTEST_EMULATOR, columns, command_line, make_sample, minibatches_of, spy, tiny_args, weights
from tests.test_mario_env import GOAL_RUNS, NOOP, RUN, decode, require

BACKENDS: list[Any] = [FASTEST_EMULATOR]
if FASTEST_EMULATOR == "fceumm":
    BACKENDS.append(pytest.param("nes_py", marks=pytest.mark.slow))
STILL = {"noop_max": 0, "sticky_action_probability": 0.0}  # no chance in a game


def make_agent(mario: ModuleType, input_shape: tuple[int, ...] = (4, 64, 64)) -> Any:
    torch.manual_seed(0)
    pictures = Box(0, 255, input_shape, np.uint8)
    spaces = SimpleNamespace(single_observation_space=pictures, single_action_space=Discrete(7))
    return mario.Agent(spaces, mario.Args(amp=False))


class Scripted(torch.nn.Module):
    """An agent that plays given actions, `moves[t]` at step t (a number for all environments, or one for each)."""

    def __init__(self, moves: list[Any]) -> None:
        super().__init__()
        self.device_holder = torch.nn.Parameter(torch.zeros(1))
        self.moves: Iterator[Any] = iter(moves)

    def policy(self, obs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(mode=torch.as_tensor(next(self.moves)).expand(len(obs)))


def play_out(mario: ModuleType, agent: Any, folder: Path, num_envs: int = 1, seed: int = 10_000, **values: Any) -> Any:
    """(returns, lengths, last infos) of an evaluation on games with these arguments."""
    deterministic = values.pop("deterministic", True)
    vec_env = mario.make_envs(tiny_args(mario, folder, **values), num_envs)
    try:
        return mario.evaluate(agent, vec_env, seed, deterministic)
    finally:
        vec_env.close()


PRESETS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {  # sizes of batch and minibatch, number of updates
    "rgb64": ((4096, 256, 2441), {
        "seed": 0, "eval_every": 100_000, "save_every": 100_000, "eval_episodes": 10, "num_envs": 32,
        "lr_decay": "none", "clip_coef": 0.2, "ent_coef": 0.03, "feature_dim": 512, "obs": "rgb64",
        "minibatch_growth": 1, "reward": "flag1000", "shared_cnn": True, "clip_vloss": False, "target_kl": None,
    }),
    # CleanRL's, close to those of Schulman et al. 2017, table 5
    "atari": ((1024, 256, 9765), {
        "num_envs": 8, "num_minibatches": 4, "lr_decay": "linear", "clip_coef": 0.1, "clip_vloss": True,
        "ent_coef": 0.01, "noop_max": 30, "sign_reward": True, "episodic_life": True,
    }),
}  # fmt: skip
BOTH = {"total_timesteps": 10_000_000, "num_steps": 128, "update_epochs": 4, "learning_rate": 2.5e-4, "gamma": 0.99,
        "gae_lambda": 0.95, "vf_coef": 0.5, "max_grad_norm": 0.5, "skip": 4, "ent_decay": "none"}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_exactly_the_published_values(mario: ModuleType, name: str) -> None:
    args, (sizes, expected) = mario.parse_args(["--configs", name]), PRESETS[name]
    expected = expected | BOTH
    assert {name: getattr(args, name) for name in expected} == expected
    assert (args.batch_size, args.batch_size // args.num_minibatches, args.num_updates) == sizes


def test_missing_atari(mario: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("envs.atari.importlib.util.find_spec", lambda name: None)
    code, _, message = command_line(mario, capsys)("--env-id", "ALE/Pong-v5")
    assert (code, "Traceback" in message) == (2, False)
    assert "pip install ale-py opencv-python-headless" in message
    with pytest.raises(AtariError):
        AtariGame("ALE/Pong-v5")


FLAGS_OF_GAMES: dict[str, tuple[Any, Any]] = {  # flag -> (not its default, what the game then knows)
    "env_id": ("Mario-1-2,4-1", lambda env: env.stages == ("1-2", "4-1")),
    "obs": ("gray84", lambda env: env.observation_space.shape == (4, 84, 84)),
    "frame_stack": (2, lambda env: env.observation_space.shape == (2, 64, 64)),
    "action_set": ("complex", lambda env: env.action_space.n == 12),
    "skip": (3, lambda env: (env.skip, env.metadata["render_fps"]) == (3, 20)),
    "max_pool": (True, lambda env: env.max_pool),
    "mask_score": (True, lambda env: env.mask_score),
    "show_buttons": (False, lambda env: not env.show_buttons),
    "reward": ("flag1000", lambda env: env.reward_terms.flag == 1000),
    "stuck_steps": (7, lambda env: env.stuck_steps == 7),
    "reset_steps": (9, lambda env: env.max_episode_steps == 9),
    "noop_max": (5, lambda env: env.noop_max == 5),
    "sticky_action_probability": (0.5, lambda env: env.sticky_action_probability == 0.5),
}


def test_every_flag_of_the_games_reaches_them(mario: ModuleType) -> None:
    usual = mario.make_env(mario.Args(backend="nes_py"))
    for name, (value, knows) in FLAGS_OF_GAMES.items():
        env = mario.make_env(mario.Args(**{"backend": "nes_py", name: value}))
        assert knows(env), name
        assert not knows(usual), name
        env.close()
    assert mario.make_env(mario.Args(backend="nes_py", reset_steps=None)).max_episode_steps == 0
    usual.close()


@pytest.mark.parametrize(
    ("channels", "side", "sizes", "flat"),
    [(3, 64, [(32, 15, 15), (64, 6, 6), (64, 4, 4)], 1024), (4, 84, [(32, 20, 20), (64, 9, 9), (64, 7, 7)], 3136)],
)
def test_shapes_of_the_convolutions(mario: ModuleType, channels: int, side: int, sizes: Any, flat: int) -> None:
    agent = make_agent(mario, (channels, side, side))
    seen: list[tuple[float, ...]] = []
    layers = [m for m in agent.actor_cnn.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[1:])))
    agent.actor_cnn.register_forward_pre_hook(lambda module, inputs: seen.append((float(inputs[0].max()),)))
    agent.get_value(torch.full((2, channels, side, side), 255, dtype=torch.uint8))
    assert seen.pop(0) == (1.0,)  # bytes become shares
    assert (seen, layers[-1].in_features) == ([*sizes, (512,)], flat)
    assert [layer.padding for layer in layers[:3]] == [(0, 0)] * 3


def test_bfloat16_changes_little(mario: ModuleType) -> None:
    sample = make_sample(mario, 64)
    agent, obs = sample.agent, sample.obs
    exact, value = agent(obs)
    agent.amp = True
    rounded, rounded_value = agent(obs)
    for one, other in ((exact.logits, rounded.logits), (value, rounded_value)):
        assert one.dtype == other.dtype == torch.float32
        assert 0 < float((one - other).detach().abs().max()) < 0.02 * max(1.0, float(one.detach().abs().max()))


def test_separate_networks_have_twice_the_weights_and_share_nothing(mario: ModuleType) -> None:
    samples = make_sample(mario), make_sample(mario, shared_cnn=False)
    shared, separate = (sample.agent for sample in samples)
    sizes = [sum(p.numel() for p in agent.parameters()) for agent in (shared, separate)]
    heads = 7 * 512 + 7 + 512 + 1
    assert sizes[1] - heads == 2 * (sizes[0] - heads)
    separate.get_value(samples[1].obs).sum().backward()
    assert all((p.grad is None) == name.startswith("actor") for name, p in separate.named_parameters())


@pytest.fixture(scope="module")
def run(mario: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: 6 updates of 2 x 8 steps, episodes of at most 6 steps."""
    logdir = tmp_path_factory.mktemp("mario") / "run"
    mario.train(tiny_args(mario, logdir, total_timesteps=96, reset_steps=6, eval_every=32))
    return logdir


def test_a_run_leaves_its_record(mario: ModuleType, run: Path) -> None:
    progress = columns(run)
    assert progress["global_step"] == [16, 32, 48, 64, 80, 96]
    assert progress["counters/minibatch_updates"] == [4, 8, 12, 16, 20, 24]
    assert set(progress["rollout/success_rate"]) == {0}
    for kind in ("eval", "eval_sampled"):
        for name in ("mean_return", "std_return", "mean_length", "success_rate"):
            assert np.isfinite(progress[f"{kind}/{name}"]).tolist() == [False, True] * 3


@pytest.mark.parametrize(("success", "expected"), [(math.nan, 4), (0.8, 4), (0.9, 2)])
def test_minibatches_grow_above_80_percent(
    mario: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, success: float, expected: int
) -> None:
    args = tiny_args(mario, tmp_path, total_timesteps=16, reset_steps=60)  # 4 minibatches, and no episode ends
    mario.train(args)
    state = mario.load(tmp_path / "latest.pt")
    state["run"]["training_success"] = success
    mario.save(tmp_path / "latest.pt", state)
    calls = spy(monkeypatch, mario, "take_steps")
    mario.train(replace(args, resume=True, total_timesteps=48))
    assert columns(tmp_path)["counters/minibatch_updates"] == [4, 4 + expected, 4 + 2 * expected]
    assert {len(minibatch.obs) for minibatch in minibatches_of(calls)} == {32 // expected}


@pytest.mark.parametrize("backend", BACKENDS)
def test_rollout_success_rate(mario: ModuleType, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One game plays a recorded run to the flag; the other stands still, which ends its episodes without one."""
    require(backend)
    recorded = decode(GOAL_RUNS[backend, "1-1"])
    moves, sample = iter([torch.tensor([move, NOOP]) for move in recorded]), mario.Categorical.sample
    monkeypatch.setattr(
        mario.Categorical, "sample", lambda self: next(moves) if len(self.logits) == 2 else sample(self)
    )  # fmt: skip
    values = STILL | {"num_steps": len(recorded), "total_timesteps": 2 * len(recorded), "update_epochs": 1,
                      "reset_steps": None, "stuck_steps": 60, "eval_episodes": 1}  # fmt: skip
    mario.train(tiny_args(mario, tmp_path / "run", backend=backend, **values))
    progress = columns(tmp_path / "run")
    assert progress["counters/resets"][0] > 1
    kept = mario.load(tmp_path / "run" / "latest.pt")["run"]["training_success"]  # by which minibatches grow
    assert progress["rollout/success_rate"][0] == pytest.approx(1 / progress["counters/resets"][0]) == kept


def test_a_flag_is_success_in_training_evaluation_and_play(
    mario: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the run knows its emulator, and play plays the episodes that it is told, as it is told."""
    monkeypatch.setattr(MarioGame, "frame", lambda game, buttons: (False, True, False))  # a flag in every frame
    logdir = tmp_path / "run"
    mario.train(tiny_args(mario, logdir, noop_max=0, total_timesteps=16, backend="auto"))
    progress = columns(logdir)
    assert [progress[f"{kind}/success_rate"] for kind in ("rollout", "eval", "eval_sampled")] == [[1]] * 3
    assert mario.load(logdir / "latest.pt")["args"]["backend"] in ("nes_py", "fceumm")
    calls = spy(monkeypatch, mario, "evaluate")
    mario.play(mario.PlayArgs(logdir=str(logdir), episodes=2, seed=7, stochastic=True))
    assert [arguments[2:] for arguments, _ in calls] == [(7, False), (8, False)]
    assert len(re.findall(r"episode \d: return \S+, 1 steps, flag reached", capsys.readouterr().out)) == 2


def test_the_policy_of_another_emulator_or_network_is_refused(mario: ModuleType, run: Path, tmp_path: Path) -> None:
    start = run / "latest.pt"
    (other,) = {"nes_py", "fceumm"} - {mario.load(start)["args"]["backend"]}
    require(other)
    for values in ({"backend": other}, {"shared_cnn": False}):
        with pytest.raises(mario.UsageError, match="needs its own flags"):
            mario.train(tiny_args(mario, tmp_path / "other", init_from=str(start), **values))


def test_a_lost_episode_is_not_counted(mario: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time limit says so here; the game itself goes on from its reset."""
    make_envs = mario.make_envs

    def losing(args: Any, *given: Any) -> Any:
        vec_env = make_envs(args, *given)
        step = vec_env.env.step  # below what counts episodes

        def lose(actions: np.ndarray) -> Any:
            *result, truncated, infos = step(actions)
            return *result, truncated, infos | {"worker_restarted": truncated}

        vec_env.env.step = lose if given == (args.num_envs,) else step  # the evaluation's stay
        return vec_env

    monkeypatch.setattr(mario, "make_envs", losing)
    mario.train(tiny_args(mario, tmp_path / "run", reset_steps=3, noop_max=0, eval_episodes=1))
    progress = columns(tmp_path / "run")
    assert progress["counters/resets"] == [0] * 3
    assert np.isnan(progress["rollout/episodic_return"]).all()


def test_a_flag_on_the_limit_is_no_success(mario: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MarioGame, "frame", lambda game, buttons: (False, True, False))  # a flag in every frame
    values = {"env_id": "Mario-full", "noop_max": 0, "total_timesteps": 16, "reset_steps": 6}
    mario.train(tiny_args(mario, tmp_path / "run", **values))
    progress = columns(tmp_path / "run")
    assert progress["rollout/episodic_return"] == progress["eval/mean_return"] == pytest.approx([6 * 5])  # six flags
    assert progress["rollout/success_rate"] == progress["eval/success_rate"] == [0]


def test_the_remaining_options_train(mario: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together: separate networks, pictures that stay bytes, a KL limit, a constant learning rate."""
    options = {
        "shared_cnn": False, "obs": "gray84", "norm_adv": "per_env", "clip_vloss": True, "target_kl": 1e-9,
        "reward": "flag1000", "action_set": "right_only", "lr_decay": "none", "learning_rate": 0.01,
        "minibatch_growth": 1,
    }  # fmt: skip
    calls = spy(monkeypatch, mario, "take_steps")
    result = mario.train(tiny_args(mario, tmp_path / "run", **options))
    assert {minibatch.obs.dtype for minibatch in minibatches_of(calls)} == {torch.uint8}  # floats are four times as big
    assert 3 <= result["epochs"] < 6  # nearly every epoch changes the policy by more than 1e-9
    assert columns(tmp_path / "run")["train/learning_rate"] == pytest.approx([0.01] * 3)
    assert [name for name in weights(tmp_path / "run") if name.startswith("critic_cnn")]


def test_only_starts_sticky_actions_and_sampling_tell_episodes_apart(mario: ModuleType, tmp_path: Path) -> None:
    """The console knows no chance: without these, ten deterministic evaluation episodes are one episode."""
    agent = make_agent(mario)
    with torch.no_grad():
        agent.actor_logits.bias += torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])  # run and jump to the right
        agent.actor_logits.weight *= 30

    def different(**values: Any) -> int:
        return len(set(play_out(mario, agent, tmp_path, 4, **STILL | {"reset_steps": 25} | values)[0]))

    assert different() == 1 < different(deterministic=False)
    assert different(noop_max=30, sticky_action_probability=0.25) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_flag_counts_as_success(mario: ModuleType, backend: str, tmp_path: Path) -> None:
    require(backend)
    moves, limits = decode(GOAL_RUNS[backend, "1-1"]), {"reset_steps": None, "stuck_steps": 0}
    returns, lengths, infos = play_out(mario, Scripted(moves), tmp_path, backend=backend, **STILL, **limits)
    assert infos[0]["flag_get"]
    assert returns[0] > 300  # 3,100 pixels and the flag, less the clock, over 10
    assert lengths[0] <= len(moves)


def test_an_ended_episode_earns_nothing_more(mario: ModuleType, tmp_path: Path) -> None:
    """The first runs into the first enemy, the second waits until the limit."""
    still = STILL | {"reset_steps": 60}
    together = play_out(mario, Scripted([[RUN, NOOP]] * 60), tmp_path, 2, **still)
    assert together[1][0] < 60 == together[1][1]
    alone = play_out(mario, Scripted([RUN] * 60), tmp_path, 1, **still)
    assert [x[0] for x in together] == [x[0] for x in alone]  # return, length, infos


def test_play_films_the_stage(mario: ModuleType, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same seed, same waiting: only the stage can make the pictures differ."""
    main = command_line(mario, capsys)
    argv = ["play", "--logdir", str(run), "--checkpoint", "latest", "--save-gif", "--gif-dir"]

    def films(*flags: str) -> list[bytes]:
        folder = tmp_path / "-".join(["gif", *flags])
        code, out, err = main(*argv, str(folder), *flags)
        assert code == 0, err
        paths = sorted(folder.glob("*.gif"))
        assert len(paths) == len(re.findall(r"return -?\d+\.\d\d, 6 steps, no flag: as far as x \d+ in [14]-1", out))
        with PIL.Image.open(paths[0]) as gif:
            assert gif.size == (256, 240)  # the full screen
        return [path.read_bytes() for path in paths]

    sampled, again = (films("--episodes", "2", "--stochastic") for _ in range(2))
    assert (len(sampled), sampled == again) == (2, True)
    own = films()
    assert films("--env-id", "Mario-1-1") == own
    assert films("--env-id", "Mario-4-1") != own
    code, _, err = main(*argv, str(tmp_path), "--env-id", "Mario-9-1")
    assert (code, "9-1" in err) == (2, True)


@pytest.mark.slow
def test_mario_learns_to_get_further(mario: ModuleType, tmp_path: Path) -> None:
    settings = {"num_envs": 32, "num_steps": 64, "num_minibatches": 8, "update_epochs": 4, "feature_dim": 512,
                "reset_steps": None, "num_workers": None, "backend": FASTEST_EMULATOR}  # fmt: skip
    mario.train(tiny_args(mario, tmp_path / "run", total_timesteps=20_480, minibatch_growth=4, **settings))
    returns = columns(tmp_path / "run")["rollout/episodic_return"]
    assert np.mean(returns[-2:]) > 1.5 * returns[0]
    assert math.isfinite(columns(tmp_path / "run")["eval/mean_return"][-1])
