"""ppo_continuous_mujoco.py as its users meet it: command line, training loop, evaluation, playing; and what the loop
hands to the mathematics, watched from outside on environments of known values."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import PIL.Image
import pytest
import torch
from gymnasium.vector import VectorWrapper

from envs.mujoco_batch import MujocoBatchVecEnv
from envs.normalize import NormalizeObservation, NormalizeReward
from envs.subproc_vec_env import SubprocVecEnv
from tests import known_values
from tests.conftest import ROOT, assert_same, can_compile, run_program, spy, tiny_args, weights
from tests.known_values import known_value

Run = Callable[..., dict[str, Any]]
Main = Callable[..., tuple[int, str, str]]
PLAIN = {"norm_obs": False, "norm_reward": False, "norm_adv": False}  # what the environment says is what PPO sees


def columns(logdir: Path | str, file: str = "progress.csv") -> dict[str, list[float]]:
    with open(Path(logdir) / file) as stream:
        rows = list(csv.DictReader(stream))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


# ---- command line ---------------------------------------------------------------------------------------------------


def test_help_lists_every_flag_and_what_it_means(continuous: ModuleType, run_main: Main) -> None:
    code, out, _ = run_main("--help")
    assert code == 0
    text = re.sub(r"[\s│]+", " ", out)
    for field in dataclasses.fields(continuous.Args):
        assert f"--{field.name.replace('_', '-')}" in text, field.name
    source = Path(str(continuous.__file__)).read_text()
    body = source[source.index("class Args:") : source.index("def batch_size")]
    descriptions = re.findall(r'^    """(.+)"""$', body, re.MULTILINE)
    assert len(descriptions) == len(dataclasses.fields(continuous.Args))
    for description in descriptions:
        assert re.sub(r"\s+", " ", description)[:40] in text, description


def test_help_of_play(continuous: ModuleType, run_main: Main) -> None:
    code, out, _ = run_main("play", "--help")
    assert code == 0
    for field in dataclasses.fields(continuous.PlayArgs):
        assert f"--{field.name.replace('_', '-')}" in out, field.name


def test_presets_are_runs_that_can_start(continuous: ModuleType) -> None:
    for name, values in continuous.PRESETS.items():
        args = continuous.parse_args(["--configs", name])
        continuous.validate(args)
        for key, value in values.items():
            assert getattr(args, key) == value, (name, key)


def test_presets_layer_from_left_to_right_and_flags_win(continuous: ModuleType) -> None:
    fast, debug = continuous.PRESETS["fast"], continuous.PRESETS["debug"]
    assert {"num_minibatches", "total_timesteps"} <= fast.keys() & debug.keys()
    args = continuous.parse_args(["--configs", "fast", "debug", "explore", "--num-minibatches", "2", "--seed", "9"])
    assert args.num_minibatches == 2
    assert args.seed == 9
    assert args.total_timesteps == debug["total_timesteps"]
    assert args.ent_coef == continuous.PRESETS["explore"]["ent_coef"]
    args = continuous.parse_args(["--configs", "debug", "fast"])
    assert args.total_timesteps == fast["total_timesteps"]
    assert args.update_epochs == debug["update_epochs"]


def test_an_unknown_preset_names_the_closest(run_main: Main) -> None:
    code, _, err = run_main("--configs", "exlpore")
    assert code == 2
    assert "did you mean explore?" in err
    assert "exlpore" in err


WRONG = {
    "--total-timesteps 100": "2048",
    "--num-envs 0": "--num-envs must be at least 1, not 0",
    "--num-steps -3": "--num-steps must be at least 1, not -3",
    "--num-minibatches 7": "--num-minibatches 7 does not divide the batch of 2048",
    "--num-minibatches 2048": "2048",
    "--update-epochs 0": "--update-epochs",
    "--eval-episodes 0": "--eval-episodes",
    "--torch-threads 0": "--torch-threads",
    "--num-workers 0": "--num-workers",
    "--learning-rate 0": "--learning-rate must be positive",
    "--learning-rate nan": "--learning-rate",
    "--learning-rate inf": "--learning-rate must be positive and below 1e38, not inf",
    "--ent-coef inf": "--ent-coef must be at least 0 and below 1e38, not inf",
    "curves --logdir /nowhere": "/nowhere has no progress.csv",
    "--critic-learning-rate -1": "--critic-learning-rate",
    "--clip-coef 0": "--clip-coef",
    "--max-grad-norm 0": "--max-grad-norm",
    "--target-kl -0.1": "--target-kl",
    "--eval-every -1": "--eval-every",
    "--save-every -1": "--save-every",
    "--ent-coef -0.1": "--ent-coef",
    "--vf-coef -1": "--vf-coef",
    "--seed -1": "--seed",
    "--gamma 1.5": "--gamma must be in [0, 1], not 1.5",
    "--gamma 1": "--average-reward",
    "--gae-lambda -0.1": "--gae-lambda",
    "--reset-steps 0": "--reset-steps must be at least 1, not 0",
    "--average-reward": "--no-norm-reward",
    "--time-scaled-reward": "--no-norm-reward",
    "--env-id HalfCheeta-v5": "did you mean HalfCheetah-v5?",
    "--env-id ALE/Pong-v5": "ALE/Pong-v5 is for ppo_atari_mario.py",
    "--env-id xyz": "There is no environment 'xyz'; try Ant-v5, Half",
    "--env-id nowhere:Env-v0": "nowhere:Env-v0 cannot be made here",
    "--env-id WholeNumbers-v0": "actions that are real numbers; those of WholeNumbers-v0 are int64",
    "--log-std-init nan": "--log-std-init must be between -20 and 20",
    "--log-std-init 1000": "--log-std-init must be between -20 and 20",
    "--env-id TwoQueue-v0 --vec-env batch": "subproc",
    "--env-id CartPole-v1": "Box",
    "--device cuda:99": "--device cuda:99 is not available",
    "--device mps": "--device mps",
    "--resume": "--logdir",
    "--resume --logdir /nonexistent/run": "/nonexistent/run",
    "--logdir /proc/nothing": "/proc/nothing",
    "--hidden-sizes 0": "--hidden-sizes",
    "--clip-obs 0": "--clip-obs",
    "--clip-reward -1": "--clip-reward",
    "--average-reward-rate 2 --average-reward --no-norm-reward": "--average-reward-rate",
    "--no-norm-obs --clip-obs 5": "--clip-obs needs --norm-obs",
    "--no-norm-reward --clip-reward 5": "--clip-reward needs --norm-reward",
    "--average-reward-rate 0.5": "--average-reward-rate needs --average-reward",
    "--no-anneal-lr --lr-decay exponential": "--lr-decay needs --anneal-lr",
    "--seed 4294967296": "--seed must be in [0, 2**32)",
    "--num-steps 1 --num-envs 64 --norm-adv-scope per_env": "per_env would normalise single advantages",
    "--configs queue --capture-video": "There are no pictures of TwoQueue-v0 here",
    "--env-id Ant-v3": "Ant-v3 cannot be made here",
    "play --logdir /nowhere --seed -1": "--seed must be in [0, 2**32), not -1",
    "play --logdir /nowhere --render --save-gif": "--render shows the episodes and --save-gif writes them",
    "--num-envs many": "--num-envs",
    "--no-such-flag": "no-such-flag",
    "--lr-decay cubic": "--lr-decay",
}


@pytest.mark.parametrize("flags", WRONG)
def test_a_wrong_value_is_refused_in_one_sentence(
    continuous: ModuleType, run_main: Main, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*args: Any) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr(continuous, "compute_gae", too_late)
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(*flags.split())
    message = re.sub(r"[\s│╭╮╰╯─]+", " ", err)
    assert code == 2
    assert WRONG[flags] in message
    assert "Traceback" not in out + err
    if err.startswith("error:"):  # ours; the last three are refused by tyro, in a box
        assert err.count("\n") == 1
        assert len(err) < 330
    assert not out
    assert not list(tmp_path.glob("runs/*/latest.pt"))


def test_minibatches_of_one_can_be_normalised_over_the_batch(run_tiny: Run) -> None:
    assert run_tiny(norm_adv_scope="batch", num_minibatches=64)["update"] == 3


def test_observations_of_several_dimensions_are_refused(continuous: ModuleType, tmp_path: Path) -> None:
    class MatrixEnv(gym.Env):
        observation_space, action_space = gym.spaces.Box(-1, 1, (2, 3)), gym.spaces.Box(-1, 1, (1,))

        def __init__(self, render_mode: str | None = None) -> None:
            self.render_mode = render_mode

    gym.register("Matrix-v0", entry_point=MatrixEnv)
    try:
        with pytest.raises(continuous.UsageError, match="one-dimensional Box observations and actions; Matrix-v0 has"):
            continuous.train(tiny_args(continuous, tmp_path / "run", env_id="Matrix-v0", vec_env="sync"))
    finally:
        gym.registry.pop("Matrix-v0")


def test_a_run_cannot_be_resumed_to_end_in_its_past(continuous: ModuleType, run_tiny: Run) -> None:
    logdir = run_tiny()["logdir"]
    with pytest.raises(continuous.UsageError, match=r"--total-timesteps 128: .* has done 192 already"):
        run_tiny(logdir=logdir, total_timesteps=128, resume=True)


def test_a_run_to_be_resumed_can_be_explained(run_tiny: Run, run_main: Main) -> None:
    logdir = str(run_tiny()["logdir"])
    before = {path: path.read_bytes() for path in Path(logdir).iterdir()}
    code, out, _ = run_main("--resume", "--logdir", logdir, "--explain")
    assert (code, "3 updates of 64 transitions" in out) == (0, True)
    assert {path: path.read_bytes() for path in Path(logdir).iterdir()} == before


@pytest.mark.parametrize("words", [["--explain"], ["play", "--logdir", "runs/none"]], ids=" ".join)
def test_what_one_process_does_is_refused_under_torchrun(
    words: list[str], run_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, err = run_main(*words)
    assert (code, "leave torchrun out" in err) == (2, True)


def test_explain_prints_the_sizes_and_leaves_nothing(
    run_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--env-id Target-v0 --vec-env sync --configs debug --no-compile --explain --total-timesteps 10240"
    code, out, _ = run_main(*flags.split())
    assert code == 0
    assert "40 updates of 256 transitions (4 environments x 64 steps)" in out
    assert "2 epochs x 4 minibatches of 64" in out
    assert re.search(r"[\d,]+ steps/s in a probe: about \d+\.\d minutes", out)
    assert not list(tmp_path.iterdir())


# ---- a run and what it leaves ---------------------------------------------------------------------------------------


def test_a_run_leaves_the_files_it_promises(
    continuous: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under its own name, so that a copy's runs are told apart; with finite numbers under the promised names."""
    monkeypatch.chdir(tmp_path)
    result = continuous.train(
        dataclasses.replace(tiny_args(continuous, tmp_path, eval_every=64, save_every=64), logdir=None, seed=3)
    )
    (logdir,) = Path("runs").glob("TwoQueue-v0__*")
    stem = Path(str(continuous.__file__)).stem
    assert re.fullmatch(rf"TwoQueue-v0__{stem}__3__\d{{8}}-\d{{6}}", logdir.name)
    assert result["logdir"] == str(logdir)
    for name in ("config.json", "progress.csv", "timing.csv", "eval.csv", "best.pt", "latest.pt", "latest.prev.pt"):
        assert (logdir / name).stat().st_size > 0, name
    assert list(logdir.glob("events.out.tfevents.*"))
    with PIL.Image.open(logdir / "curves.png") as image:
        assert image.width > 500
        assert len(image.convert("L").getcolors() or []) > 10  # something is drawn
    config = json.loads((logdir / "config.json").read_text())
    assert config["args"]["seed"] == 3
    assert config["versions"]["torch"] == torch.__version__

    progress, timing, evaluation = columns(logdir), columns(logdir, "timing.csv"), columns(logdir, "eval.csv")
    assert progress["global_step"] == timing["global_step"] == [64, 128, 192]
    for name in (
        "train/policy_loss", "train/value_loss", "train/entropy", "train/approx_kl", "train/old_approx_kl",
        "train/clip_fraction", "train/explained_variance", "train/value_abs_error", "train/grad_norm",
        "train/learning_rate", "train/update_epochs_done", "rollout/episodic_return", "rollout/episodic_length",
        "rollout/LTA_return", "rollout/resets", "rollout/mean_reward", "counters/train_steps", "counters/rollouts",
        "counters/minibatch_updates",
    ):  # fmt: skip
        assert np.isfinite(progress[name]).all(), name
    assert progress["counters/train_steps"] == [16, 32, 48]
    assert progress["counters/rollouts"] == [1, 2, 3]
    assert progress["counters/minibatch_updates"] == [4, 8, 12]  # 2 epochs of 2 minibatches
    assert progress["train/update_epochs_done"] == [2, 2, 2]
    assert np.isfinite(evaluation["eval/mean_return"]).all()
    assert evaluation["global_step"] == [64, 128, 192]
    shares = [timing[f"time/{name}_share"] for name in ("env", "inference", "update")]
    assert np.allclose(np.sum(shares, axis=0), 1)
    assert (np.array(shares) > 0).all()
    out = capsys.readouterr().out
    assert "3 updates of 64 transitions (4 environments x 16 steps), 2 epochs x 2 minibatches of 32" in out
    assert str(logdir) in out


def test_there_are_exactly_num_updates_and_the_learning_rate_falls_from_1_to_1_over_n(run_tiny: Run) -> None:
    """200 steps asked for, batches of 64: three updates (192), at 1, 2/3 and 1/3 of the learning rate."""
    linear = columns(run_tiny(total_timesteps=200, learning_rate=0.003)["logdir"])
    assert linear["global_step"] == [64, 128, 192]
    np.testing.assert_allclose(linear["train/learning_rate"], [0.003, 0.002, 0.001])
    constant = columns(run_tiny(total_timesteps=200, learning_rate=0.003, anneal_lr=False)["logdir"])
    np.testing.assert_allclose(constant["train/learning_rate"], [0.003] * 3)
    falling = columns(run_tiny(total_timesteps=200, learning_rate=0.003, lr_decay="exponential")["logdir"])
    np.testing.assert_allclose(falling["train/learning_rate"], [0.003 * 0.01 ** (u / 3) for u in range(3)])


def test_normalisers_have_the_discount_and_the_limits_of_training(continuous: ModuleType, tmp_path: Path) -> None:
    """With another gamma than the critic's, the scaled returns would not have a spread of 1."""
    args = tiny_args(continuous, tmp_path, vec_env="sync", gamma=0.9, clip_obs=3.0, clip_reward=2.0)
    vec_env = continuous.make_envs(args)
    assert isinstance(vec_env, NormalizeReward)
    assert isinstance(vec_env.env, NormalizeObservation)
    assert (vec_env.gamma, vec_env.clip, vec_env.env.clip) == (0.9, 2.0, 3.0)


@pytest.mark.parametrize(("env_id", "kind"), [("Hopper-v5", MujocoBatchVecEnv), ("TwoQueue-v0", SubprocVecEnv)])
def test_environments_run_in_parallel_unless_told_otherwise(
    continuous: ModuleType, tmp_path: Path, env_id: str, kind: type
) -> None:
    vec_env = continuous.make_envs(tiny_args(continuous, tmp_path, env_id=env_id))
    vec_env.close()
    assert isinstance(vec_env.unwrapped, kind)


def test_torch_has_the_threads_that_were_asked_for(run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    run_tiny(total_timesteps=64, vec_env="sync", torch_threads=3)
    assert threads == [3]


def test_the_exact_kl_is_from_the_policy_before_the_update_to_the_one_after(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spy(monkeypatch, continuous, "gaussian_kl")
    result = run_tiny(total_timesteps=64, vec_env="sync", learning_rate=0.01, log_std_init=-0.5)
    (((old_mean, old_log_std, mean, log_std), kl),) = calls
    assert torch.equal(old_log_std, torch.full_like(log_std, -0.5))
    assert torch.equal(log_std, weights(result["logdir"])["actor_log_std"])
    assert not log_std.isclose(old_log_std).any()
    assert old_mean.abs().max() < 0.1 < (mean - old_mean).abs().max()  # a head of gain 0.01, and after learning
    assert columns(result["logdir"])["train/exact_kl"] == [kl]


def test_the_best_long_term_average_is_the_highest_so_far(run_tiny: Run) -> None:
    progress = columns(run_tiny(total_timesteps=640)["logdir"])
    averages, best = progress["rollout/LTA_return"], progress["train/best_LTA"]
    assert best == list(np.maximum.accumulate(averages))
    assert len(set(averages)) > len(set(best)) > 1


def test_rollouts_of_32_steps_with_resets_every_512_give_one_reset_in_16_rollouts(run_tiny: Run) -> None:
    result = run_tiny(num_envs=2, num_steps=32, reset_steps=512, total_timesteps=2 * 32 * 33, vec_env="sync")
    resets = columns(result["logdir"])["rollout/resets"]
    assert resets == [2 * (rollout // 16) for rollout in range(1, 34)]


def test_returns_are_the_tasks_own_whatever_the_normalisers_do(run_tiny: Run) -> None:
    """In KnownValues-v0 each step earns 1: return equals length, and the long-term average is 1."""
    result = run_tiny(env_id="KnownValues-v0", vec_env="sync", reset_steps=5, norm_reward=True, norm_obs=True)
    progress = columns(result["logdir"])
    assert progress["rollout/episodic_return"] == progress["rollout/episodic_length"]
    assert set(progress["rollout/LTA_return"]) == {1.0}
    assert set(progress["rollout/mean_reward"]) == {1.0}
    assert all(1 < length < 5 for length in progress["rollout/episodic_length"])
    assert 1 <= result["mean_return"] <= 5
    evaluation = columns(result["logdir"], "eval.csv")
    assert evaluation["eval/mean_return"] == evaluation["eval/mean_length"]


@pytest.mark.parametrize(("every", "expected"), [(0, [192]), (100, [128, 192]), (64, [64, 128, 192])])
def test_evaluations_come_at_the_next_crossing_and_at_the_end(run_tiny: Run, every: int, expected: list[float]) -> None:
    assert columns(run_tiny(eval_every=every)["logdir"], "eval.csv")["global_step"] == expected


def test_the_best_checkpoint_is_of_the_best_evaluation(run_tiny: Run) -> None:
    result = run_tiny(env_id="Target-v0", vec_env="sync", eval_every=64, learning_rate=0.01, total_timesteps=640)
    evaluation = columns(result["logdir"], "eval.csv")
    assert result["best_return"] == max(evaluation["eval/mean_return"])
    best = torch.load(Path(result["logdir"]) / "best.pt", weights_only=True)["counters"]
    assert best["best_return"] == result["best_return"]
    where = evaluation["eval/mean_return"].index(result["best_return"])
    step = evaluation["global_step"][where]
    assert best["global_step"] == best["best_step"] == result["best_step"] == step
    assert step < 640  # so the leaderboard could name the last step instead
    (index,) = (Path(result["logdir"]).parent / "best").glob("*/index.json")
    (entry,) = json.loads(index.read_text())
    assert (entry["step"], entry["score"]) == (step, result["best_return"])


# ---- what the loop hands to the mathematics -------------------------------------------------------------------------


def exact_critic(continuous: ModuleType, monkeypatch: pytest.MonkeyPatch, gamma: float) -> None:
    """Give the agent the exact values of KnownValues-v0 (and keep its own network in the graph)."""
    original = continuous.Agent.get_value

    def get_value(self: Any, obs: torch.Tensor) -> torch.Tensor:
        return known_value(obs[:, 0].double(), gamma).float() + 0 * original(self, obs)

    monkeypatch.setattr(continuous.Agent, "get_value", get_value)


@pytest.mark.parametrize("vec_env", ["sync", "subproc"])
def test_an_exact_critic_gives_zero_advantages_in_the_training_loop(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch, vec_env: str
) -> None:
    """Across terminations, time limits, both at once, and the ends of rollouts: final observations are looked up, not
    those after the reset, and terminations are not bootstrapped."""
    exact_critic(continuous, monkeypatch, gamma=0.9)
    calls = spy(monkeypatch, continuous, "compute_gae")
    run_tiny(env_id="KnownValues-v0", vec_env=vec_env, reset_steps=5, gamma=0.9, **PLAIN)
    assert len(calls) == 3
    ends: Counter[tuple[bool, bool]] = Counter()
    for (rewards, _, _, terminations, truncations, gamma, gae_lambda), (advantages, _) in calls:
        assert (gamma, gae_lambda) == (0.9, 0.95)
        assert torch.equal(rewards, torch.ones(16, 4))
        torch.testing.assert_close(advantages, torch.zeros(16, 4), rtol=0, atol=1e-5)
        ends.update(zip(terminations.flatten().tolist(), truncations.flatten().tolist(), strict=True))
    assert min(ends[True, False], ends[False, True], ends[True, True], ends[False, False]) > 0


def test_every_transition_is_used_once_an_epoch_in_a_fresh_order(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target-v0 shows a new random number every step, so that an observation identifies its transition."""
    calls = spy(monkeypatch, continuous, "ppo_gradients")
    run_tiny(env_id="Target-v0", vec_env="sync", num_minibatches=4, update_epochs=3, total_timesteps=64, **PLAIN)
    epochs = [[tuple(x.flatten().tolist()) for (_, (x, *_), _), _ in calls[i : i + 4]] for i in range(0, 12, 4)]
    assert len(calls) == 12
    for epoch in epochs:
        assert [len(minibatch) for minibatch in epoch] == [16] * 4
    everything = [sorted(x for minibatch in epoch for x in minibatch) for epoch in epochs]
    assert len(set(everything[0])) == 64
    assert everything[0] == everything[1] == everything[2]
    assert epochs[0] != epochs[1] != epochs[2]


def test_rows_of_a_minibatch_belong_together_and_start_at_ratio_1(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each update's first minibatch the stored log-probabilities and values are the agent's own, so the KL is 0."""
    original, first = continuous.ppo_gradients, []

    def recorded(agent: Any, minibatch: Any, args: Any) -> Any:
        if recorded.calls % 4 == 0:  # type: ignore[attr-defined]
            obs, actions, log_probs, values, advantages, returns = minibatch
            with torch.no_grad():
                _, own_log_probs, _, own_values = agent.get_action_and_value(obs, actions)
            first.append((log_probs - own_log_probs, values - own_values, returns - advantages - values))
            metrics = continuous.ppo_loss(agent, *minibatch, args=args)[1]
            assert float(metrics["approx_kl"]) == pytest.approx(0, abs=1e-6)
            assert float(metrics["clip_fraction"]) == 0
        recorded.calls += 1  # type: ignore[attr-defined]
        return original(agent, minibatch, args)

    recorded.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(continuous, "ppo_gradients", recorded)
    run_tiny(env_id="Target-v0", vec_env="sync", learning_rate=0.02, **PLAIN)
    assert len(first) == 3
    for differences in first:
        for difference in differences:
            torch.testing.assert_close(difference, torch.zeros(32), rtol=0, atol=1e-5)


class Recorder(VectorWrapper):
    """Keeps the actions that the environments got, and what they answered."""

    def __init__(self, env: Any, log: dict[str, list[np.ndarray]]) -> None:
        super().__init__(env)
        self.log = log

    def get_attr(self, name: str) -> Any:
        return self.env.get_attr(name)

    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        self.log["actions"].append(np.array(actions))
        self.log["rewards"].append(np.array(result[1]))
        return result


def test_environments_get_clipped_actions_and_the_loss_the_sampled_ones(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: dict[str, list[np.ndarray]] = {"actions": [], "rewards": []}
    make_envs = continuous.make_envs

    def recorded_envs(args: Any, training: bool = True, **settings: Any) -> Any:
        vec_env = make_envs(args, training, **settings)
        return Recorder(vec_env, log) if training else vec_env

    monkeypatch.setattr(continuous, "make_envs", recorded_envs)
    calls = spy(monkeypatch, continuous, "ppo_gradients")
    gae_calls = spy(monkeypatch, continuous, "compute_gae")
    run_tiny(
        env_id="Target-v0", vec_env="sync", log_std_init=0.5, total_timesteps=64, num_minibatches=1, update_epochs=1,
        save_every=0, **PLAIN,
    )  # fmt: skip
    (((_, (_, sampled, *_), _), _),) = calls
    given = np.array(log["actions"]).reshape(64, 1)
    assert np.abs(given).max() == 1.0
    assert sampled.abs().max() > 1.5
    np.testing.assert_array_equal(np.sort(given[:, 0]), np.sort(np.clip(sampled.numpy()[:, 0], -1, 1)))
    (((rewards, *_), _),) = gae_calls
    np.testing.assert_array_equal(rewards.numpy(), np.array(log["rewards"], dtype=np.float32))


def test_rewards_divided_by_time(continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward 1 a step becomes 1, 1/2, 1/3, ... from the start of each episode; reported returns stay the task's."""
    calls = spy(monkeypatch, continuous, "compute_gae")
    result = run_tiny(env_id="KnownValues-v0", vec_env="sync", reset_steps=5, time_scaled_reward=True, **PLAIN)
    step_in_episode = np.zeros(4)
    for (rewards, _, _, terminations, truncations, *_), _ in calls:
        for t in range(16):
            step_in_episode += 1
            np.testing.assert_allclose(rewards[t].numpy(), 1 / step_in_episode, rtol=1e-6)
            step_in_episode[(terminations | truncations)[t].numpy()] = 0
    progress = columns(result["logdir"])
    assert progress["rollout/episodic_return"] == progress["rollout/episodic_length"]


def test_average_reward_mode_subtracts_a_running_average_and_does_not_discount(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rho starts at the first rollout's mean reward, then moves a tenth of the way to each new one."""
    calls = spy(monkeypatch, continuous, "compute_gae")
    values = {"total_timesteps": 320, "vec_env": "sync", "reset_steps": None, "gamma": 0.5}
    result = run_tiny(average_reward=True, norm_reward=False, **values)
    assert "--gamma 0.5 means nothing with --average-reward" in capsys.readouterr().out
    progress = columns(result["logdir"])
    rho = progress["rollout/mean_reward"][0]
    for i, ((targets, _, _, _, _, gamma, _), _) in enumerate(calls):
        rho += 0.1 * (progress["rollout/mean_reward"][i] - rho)
        assert gamma == 1.0
        assert progress["train/average_reward"][i] == pytest.approx(rho, rel=1e-5)
        assert float(targets.mean()) == pytest.approx(progress["rollout/mean_reward"][i] - rho, abs=1e-4)
    assert len(calls) == 5
    assert rho < -0.5


def test_with_an_average_reward_life_goes_on_after_a_fall(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a fall would be worth the average, and so more than a hard step: the value of 0 is that of earning rho."""
    calls = spy(monkeypatch, continuous, "compute_gae")
    values = {"env_id": "Hopper-v5", "total_timesteps": 128, "num_steps": 64, "num_envs": 2, "reset_steps": None}
    run_tiny(average_reward=True, norm_reward=False, **values)
    (_, v, next_v, terminations, truncations, _, _), _ = calls[0]
    assert not terminations.any()
    assert not truncations.any()
    torch.testing.assert_close(next_v[:-1], v[1:])  # across falls too
    run_tiny(**values)
    assert calls[1][0][3].any()  # there were some


def test_with_an_average_reward_a_fall_on_the_time_limit_is_a_fall(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spy(monkeypatch, continuous, "compute_gae")
    values = {"env_id": "KnownValues-v0", "vec_env": "sync", "reset_steps": 5, "total_timesteps": 64, **PLAIN}
    for average_reward in (False, True):
        run_tiny(average_reward=average_reward, **values)
    terminations, truncations = calls[0][0][3:5]
    assert (terminations & truncations).any()
    assert (truncations & ~terminations).any()
    assert torch.equal(calls[1][0][4], truncations & ~terminations)


@pytest.mark.parametrize("scope", ["batch", "per_env"])
def test_advantages_are_normalized_over_the_scope(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    """The minibatches' advantages are together those of the batch, normalised once, and not again in the loss."""
    gae_calls = spy(monkeypatch, continuous, "compute_gae")
    calls = spy(monkeypatch, continuous, "ppo_gradients")
    run_tiny(env_id="Target-v0", vec_env="sync", norm_adv_scope=scope, update_epochs=1, total_timesteps=64)
    ((_, (raw, _)),) = gae_calls
    dims = (0, 1) if scope == "batch" else (0,)
    expected = (raw - raw.mean(dims, keepdim=True)) / (raw.std(dims, keepdim=True) + 1e-8)
    given = torch.cat([minibatch[4] for (_, minibatch, _), _ in calls])
    torch.testing.assert_close(given.sort()[0], expected.flatten().sort()[0])


# ---- the update -----------------------------------------------------------------------------------------------------


@pytest.fixture
def steps_taken(continuous: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[float, torch.Tensor]]]:
    """(learning rate, clipped gradient) of each network at every optimiser step."""
    record: list[list[tuple[float, torch.Tensor]]] = []
    adam_step = continuous.adam_step

    def recorded(parameters: Any, gradients: Any, moments: Any, rates: Any, args: Any) -> Any:
        before = [mean.clone() for mean, _, _ in moments]
        norm = adam_step(parameters, gradients, moments, rates, args)
        # what the running mean, of which a tenth is new, has taken in
        clipped = [old + (mean - old) / 0.1 for old, (mean, _, _) in zip(before, moments, strict=True)]
        record.append(list(zip(map(float, rates), clipped, strict=True)))
        return norm

    monkeypatch.setattr(continuous, "adam_step", recorded)
    return record


def test_gradients_are_clipped_to_their_joint_norm(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch, steps_taken: Any
) -> None:
    """g becomes g * max / |g| where |g| > max, and the logged norm is that before clipping."""
    calls = spy(monkeypatch, continuous, "ppo_gradients")
    result = run_tiny(vec_env="sync", norm_reward=False, max_grad_norm=0.5, total_timesteps=64)
    assert len(steps_taken) == len(calls) == 4
    norms = []  # before clipping
    for groups, (_, (gradients, _)) in zip(steps_taken, calls, strict=True):
        applied = torch.cat([gradient for _, gradient in groups])
        assert float(applied.norm()) == pytest.approx(0.5, rel=1e-4)
        raw = torch.cat(gradients)
        torch.testing.assert_close(applied / applied.norm(), raw / raw.norm(), rtol=1e-4, atol=1e-6)
        norms.append(float(raw.norm()))
    assert min(norms) > 1
    assert columns(result["logdir"])["train/grad_norm"] == pytest.approx([np.mean(norms)], rel=1e-4)


def test_small_gradients_are_not_scaled_up_and_none_means_no_clipping(run_tiny: Run, steps_taken: Any) -> None:
    unclipped = run_tiny(vec_env="sync", norm_reward=False, max_grad_norm=None, total_timesteps=64)
    norms = [float(torch.cat([g for _, g in groups]).norm()) for groups in steps_taken]
    assert columns(unclipped["logdir"])["train/grad_norm"][0] == pytest.approx(np.mean(norms), rel=1e-4)
    assert min(norms) > 1
    generous = run_tiny(vec_env="sync", norm_reward=False, max_grad_norm=1e6, total_timesteps=64)
    assert_same(weights(generous["logdir"]), weights(unclipped["logdir"]))


def test_separate_optimizers_clip_and_step_each_network_on_its_own(run_tiny: Run, steps_taken: Any) -> None:
    """A joint norm of 0.5 is used up by the critic's large error; separate ones leave the actor its own 0.5."""
    settings = {"vec_env": "sync", "norm_reward": False, "max_grad_norm": 1e-3, "total_timesteps": 128}
    run_tiny(optimizer="separate", learning_rate=1e-3, critic_learning_rate=5e-3, **settings)
    rates = [[lr for lr, _ in groups] for groups in steps_taken]
    np.testing.assert_allclose(rates, [[1e-3, 5e-3]] * 4 + [[0.5e-3, 2.5e-3]] * 4)  # annealed alike
    for groups in steps_taken:
        assert [float(gradient.norm()) for _, gradient in groups] == pytest.approx([1e-3, 1e-3], rel=1e-3)
    steps_taken.clear()
    run_tiny(optimizer="shared", **settings)
    for groups in steps_taken:
        assert float(torch.cat([gradient for _, gradient in groups]).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_the_kl_limit_ends_an_update_before_the_step_that_would_break_it(run_tiny: Run, steps_taken: Any) -> None:
    settings = {"env_id": "Target-v0", "vec_env": "sync", "learning_rate": 0.03, "update_epochs": 8}
    stopped = run_tiny(target_kl=0.02, **settings)
    progress = columns(stopped["logdir"])
    assert len(steps_taken) == stopped["minibatch_updates"] < 3 * 8 * 2
    assert progress["counters/minibatch_updates"][-1] == len(steps_taken)
    assert min(progress["train/update_epochs_done"]) < 8
    assert max(progress["train/approx_kl"]) <= 0.02  # of the steps that were taken
    steps_taken.clear()
    free, generous = run_tiny(**settings), run_tiny(target_kl=1e9, **settings)
    assert len(steps_taken) == 2 * 3 * 8 * 2
    assert_same(weights(free["logdir"]), weights(generous["logdir"]))
    assert max(columns(free["logdir"])["train/approx_kl"]) > 0.02


@pytest.mark.parametrize(("rounding", "taken"), [(0.0, 3), (2e-3, 0)], ids=["epoch", "update"])
def test_the_kl_limit_may_leave_an_epoch_or_an_update_without_a_step(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch, rounding: float, taken: int
) -> None:
    """One minibatch an epoch: the first step is at a KL of 0 and goes too far for a second. In bfloat16 even the first
    minibatch may have a KL, by rounding."""
    original = continuous.ppo_gradients

    def rounded(*args: Any) -> Any:
        gradients, metrics = original(*args)
        metrics[continuous.APPROX_KL] += rounding
        return gradients, metrics

    monkeypatch.setattr(continuous, "ppo_gradients", rounded)
    settings = {"env_id": "Target-v0", "vec_env": "sync", "learning_rate": 0.1, "num_minibatches": 1}
    result = run_tiny(update_epochs=4, target_kl=1e-3, **settings)
    assert (result["update"], result["minibatch_updates"]) == (3, taken)
    assert (Path(result["logdir"]) / "best.pt").exists()


def test_the_kl_limit_ends_an_epoch_in_its_middle(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where later minibatches, of another compiled call, would keep to it."""
    original, calls = continuous.ppo_gradients, []

    def third_too_far(*args: Any) -> Any:
        gradients, metrics = original(*args)
        calls.append(metrics)
        metrics[continuous.APPROX_KL] = 1.0 if len(calls) == 3 else 0.0
        return gradients, metrics

    monkeypatch.setattr(continuous, "ppo_gradients", third_too_far)
    result = run_tiny(vec_env="sync", total_timesteps=64, num_minibatches=8, target_kl=0.5)
    assert (len(calls), result["minibatch_updates"]) == (3, 2)


# ---- equal seeds, equal runs ----------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_runs_and_different_ones_do_not(run_tiny: Run) -> None:
    """Whatever the number of workers, and however often it is evaluated and saved on the way."""
    first, again, other = run_tiny(), run_tiny(num_workers=2, eval_every=64, save_every=64), run_tiny(seed=2)
    assert_same(weights(again["logdir"]), weights(first["logdir"]))
    progress = [(Path(result["logdir"]) / "progress.csv").read_bytes() for result in (first, again, other)]
    assert progress[0] == progress[1] != progress[2]
    assert not torch.equal(
        weights(other["logdir"])["actor_mean.0.weight"], weights(first["logdir"])["actor_mean.0.weight"]
    )


def test_vector_environments_agree_bit_for_bit_on_the_queues(run_tiny: Run) -> None:
    results = [run_tiny(vec_env=kind) for kind in ("sync", "async", "subproc")]
    for result in results:
        assert all(torch.isfinite(tensor).all() for tensor in weights(result["logdir"]).values())
        assert_same(weights(result["logdir"]), weights(results[0]["logdir"]))


@pytest.mark.parametrize("env_id", ["InvertedPendulum-v5", "Hopper-v5"])
def test_batched_robots_and_those_of_gymnasium_agree_bit_for_bit(
    run_tiny: Run, env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo may write its log
    settings = {"env_id": env_id, "reset_steps": 12}
    runs = [
        run_tiny(vec_env=kind, num_workers=workers, **settings)
        for kind, workers in (("sync", 1), ("batch", 1), ("batch", 2), ("subproc", 2))
    ]
    expected = weights(runs[0]["logdir"])
    assert all(torch.isfinite(tensor).all() for tensor in expected.values())
    for run in runs[1:]:
        assert_same(weights(run["logdir"]), expected)
        assert run["mean_return"] == runs[0]["mean_return"]


def test_an_environment_that_cannot_be_saved_can_be_trained_and_resumed(
    run_tiny: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, reset = list[Any](), SubprocVecEnv.reset
    monkeypatch.setattr(
        SubprocVecEnv, "reset", lambda self, **kwargs: (seeds.append(kwargs["seed"]), reset(self, **kwargs))[1]
    )
    settings = {"env_id": "Pendulum-v1", "vec_env": "subproc", "reset_steps": None, "save_every": 1}
    with pytest.warns(UserWarning, match="cannot be saved, because PendulumEnv lacks get_state") as warned:
        result = run_tiny(**settings)
    assert math.isfinite(result["mean_return"])
    assert result["global_step"] == 192
    texts = [str(w.message) for w in warned if "cannot be saved" in str(w.message)]
    assert len(texts) > 3  # one a save, of which Python shows those that are equal only once
    assert len(set(texts)) == 1
    with pytest.warns(UserWarning, match="cannot be saved"):
        resumed = run_tiny(**settings, logdir=result["logdir"], resume=True, total_timesteps=256)
    assert resumed["global_step"] == 256
    assert "Pendulum-v1 has no state in the checkpoint (a warning said why); new ep" in capsys.readouterr().out
    assert seeds == [1, 1, 1 + 192]  # the new episodes are not those of the start


@pytest.mark.parametrize("vec_env", ["subproc", "sync"])
def test_an_environment_as_simple_as_can_be_is_trained(run_tiny: Run, vec_env: str) -> None:
    """By the name of its module too, which is then imported. Its constructor knows no render_mode."""
    result = run_tiny(env_id="tests.known_values:Plain-v0", vec_env=vec_env, reset_steps=None, learning_rate=0.01)
    assert result["mean_return"] > 0
    assert columns(result["logdir"], "eval.csv")["eval/mean_length"] == [1000]


@pytest.mark.parametrize("vec_env", ["async", "sync", "subproc", "batch"])
def test_a_run_may_be_trained_in_a_thread(continuous: ModuleType, tmp_path: Path, vec_env: str) -> None:
    args = tiny_args(continuous, tmp_path / "run", env_id="InvertedPendulum-v5", vec_env=vec_env, reset_steps=None)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(continuous.train, args).result()["saved"]


def test_an_id_without_a_version_is_trained_and_evaluated(run_tiny: Run) -> None:
    result = run_tiny(env_id="gymnasium:Pendulum", vec_env="sync", reset_steps=None)
    assert result["global_step"] == 192


@pytest.mark.parametrize("state", [{"kind": {1, 2}}, {"name": np.array(["a"])}, [object()]], ids=str)
def test_a_state_that_no_checkpoint_can_hold_is_said_and_costs_exact_resume_alone(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    monkeypatch.setattr(known_values.KnownValuesEnv, "get_state", lambda self: state)
    with pytest.warns(UserWarning, match="The state of KnownValuesEnv holds a"):
        result = run_tiny(env_id="KnownValues-v0", vec_env="sync")
    assert continuous.load_checkpoint(Path(result["logdir"]) / "latest.pt")["counters"]["update"] == 3


def test_a_reward_that_the_environment_calls_raw_is_not_mistaken_for_ours(
    run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = known_values.KnownValuesEnv.step
    monkeypatch.setattr(
        known_values.KnownValuesEnv, "step", lambda self, action: (*step(self, action)[:4], {"raw_reward": 1000.0})
    )
    result = run_tiny(env_id="KnownValues-v0", vec_env="sync", norm_reward=False)
    assert 1 <= max(columns(result["logdir"])["rollout/episodic_return"]) <= 10


# ---- evaluation and playing -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(continuous: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short finished run of KnownValues-v0."""
    logdir = tmp_path_factory.mktemp("finished") / "run"
    values = {"env_id": "KnownValues-v0", "vec_env": "sync", "reset_steps": 5, "eval_every": 64, "eval_episodes": 4}
    continuous.train(tiny_args(continuous, logdir, **values))
    return logdir


def test_a_run_starts_from_the_policy_that_it_is_given(continuous: ModuleType, run_tiny: Run, tmp_path: Path) -> None:
    """Its statistics of observations included, and with any settings."""
    start = Path(run_tiny()["logdir"]) / "latest.pt"
    going_on = run_tiny(init_from=str(start), total_timesteps=64, learning_rate=1e-30, gamma=0.5)
    before, after = (continuous.load_checkpoint(path) for path in (start, Path(going_on["logdir"]) / "latest.pt"))
    for name, weight in before["agent"].items():
        assert torch.equal(after["agent"][name], weight)
    counts = [state["observation_statistics"]["count"] for state in (before, after)]
    num_envs = before["args"]["num_envs"]
    assert counts[1] == pytest.approx(counts[0] + num_envs + 64)  # a reset and the steps
    assert after["counters"]["global_step"] == 64
    for values, message in (
        ({"init_from": str(tmp_path / "gone.pt")}, "There is no checkpoint"),
        ({"init_from": str(start), "hidden_sizes": (8,)}, "of other inputs, actions or layers"),
        ({"init_from": str(start), "norm_obs": False}, "was trained with --norm-obs; it takes that here too"),
    ):
        with pytest.raises(continuous.UsageError, match=message):
            run_tiny(**values)


def test_evaluation_is_repeatable_frozen_and_on_its_own_seeds(continuous: ModuleType, finished: Path) -> None:
    checkpoint = continuous.load_checkpoint(finished / "latest.pt")
    args = continuous.Args(**checkpoint["args"])
    agent = continuous.Agent(continuous.make_envs(args, training=False), args)
    agent.load_state_dict(checkpoint["agent"])
    statistics = continuous.to_arrays(checkpoint["observation_statistics"])
    random_state = torch.get_rng_state()
    first, again = (continuous.evaluate(agent, args, statistics) for _ in range(2))
    sampled = continuous.evaluate(agent, args, statistics, deterministic=False)
    assert first == again
    assert torch.equal(torch.get_rng_state(), random_state)  # training goes on as if nothing had happened
    # the lengths are those of the task: episode i starts at k drawn with seed 10 000 + i, and is cut after 5 steps
    expected = [min(5, int(np.random.default_rng(10_000 + i).integers(1, 9))) for i in range(4)]
    assert first["lengths"] == sampled["lengths"] == expected
    assert first["returns"] == [float(length) for length in expected]
    assert first["mean_return"] == pytest.approx(np.mean(expected))
    assert first["std_return"] == pytest.approx(np.std(expected))
    # the agent sees k on the scale of the statistics, which stand still
    seen: list[float] = []

    def act(obs: torch.Tensor) -> torch.Tensor:
        seen.append(float(obs))
        return obs[:, 0]

    frozen = {"mean": np.array([2.0]), "var": np.array([4.0]), "count": 1.0}
    continuous.evaluate(Choose(act), dataclasses.replace(args, eval_episodes=1), frozen)
    k = np.random.default_rng(10_000).integers(1, 9) - np.arange(expected[0])
    np.testing.assert_allclose(seen, (k - 2) / 2)


def test_evaluation_takes_the_mode_of_the_policy(continuous: ModuleType, tmp_path: Path) -> None:
    """On Target-v0 the return tells the actions. Those of a fresh agent have mean 0 and deviation 1, z: the mode earns
    -1/12, and clip(z) that minus E[clip(z)^2] = 1 - 2 phi(1) = 0.516, while z itself would earn -1.08."""
    args = tiny_args(continuous, tmp_path, env_id="Target-v0", norm_obs=False, eval_episodes=200)
    agent = continuous.Agent(continuous.make_envs(args, training=False), args)
    mode, sampled = (continuous.evaluate(agent, args, {}, deterministic=d)["mean_return"] for d in (True, False))
    assert mode == pytest.approx(-1 / 12, abs=0.03)
    assert sampled == pytest.approx(-0.60, abs=0.12)


def test_play_prints_its_summary_as_json_on_the_last_line(finished: Path, run_main: Main) -> None:
    code, out, _ = run_main("play", "--logdir", str(finished), "--episodes", "3")
    lines = out.strip().splitlines()
    summary = json.loads(lines[-1])
    assert code == 0
    assert len(lines) == 4
    assert len(summary["returns"]) == 3
    assert summary["mean_return"] == pytest.approx(np.mean(summary["returns"]))
    assert summary["standard_error"] == pytest.approx(np.std(summary["returns"], ddof=1) / 3**0.5)
    assert run_main("play", "--logdir", str(finished), "--episodes", "3")[1] == out
    latest = run_main("play", "--logdir", str(finished), "--episodes", "3", "--checkpoint", "latest", "--stochastic")
    assert latest[0] == 0
    by_path = run_main("play", "--logdir", str(finished), "--episodes", "3", "--checkpoint", str(finished / "best.pt"))
    assert by_path[1] == out


def test_play_writes_a_gif_an_episode(finished: Path, run_main: Main, tmp_path: Path) -> None:
    argv = ["play", "--logdir", str(finished), "--episodes", "2", "--save-gif", "--gif-fps", "25"]
    code, out, _ = run_main(*argv, "--gif-dir", str(tmp_path / "gifs"))
    gifs = sorted((tmp_path / "gifs").glob("run_*/episode_*.gif"))
    assert code == 0
    assert len(gifs) == 2
    returns = json.loads(out.strip().splitlines()[-1])["returns"]
    for i, (path, value) in enumerate(zip(gifs, returns, strict=True)):
        assert path.name == f"episode_{i + 1:03d}_return_{value:.0f}_steps_{value:.0f}.gif"
        with PIL.Image.open(path) as gif:
            assert gif.size == (16, 16)
            assert gif.info.get("duration", 40) == 40
        assert str(path) in out


def test_play_without_a_run_says_so(run_main: Main, finished: Path, tmp_path: Path) -> None:
    for argv, named in (
        (["--logdir", str(tmp_path)], str(tmp_path / "best.pt")),
        (["--logdir", str(finished), "--checkpoint", "nothing.pt"], "nothing.pt"),
    ):
        code, _, err = run_main("play", *argv)
        assert code == 2
        assert named in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_play_says_that_there_are_no_pictures(run_tiny: Run, run_main: Main) -> None:
    logdir = run_tiny(env_id="TwoQueue-v0", reset_steps=10)["logdir"]
    code, _, err = run_main("play", "--logdir", logdir, "--save-gif")
    assert code == 2
    assert "There are no pictures of TwoQueue-v0 here" in err
    assert err.count("\n") == 1


def test_play_refuses_to_play_no_episodes(run_main: Main, finished: Path) -> None:
    code, _, err = run_main("play", "--logdir", str(finished), "--episodes", "0")
    assert code == 2
    assert "--episodes" in err


def test_videos_of_evaluations(run_tiny: Run) -> None:
    result = run_tiny(env_id="KnownValues-v0", vec_env="sync", capture_video=True, eval_every=100)
    videos = sorted(path.name for path in (Path(result["logdir"]) / "videos").iterdir())
    assert videos == ["step_128.gif", "step_192.gif"]


def test_a_robot_can_be_filmed(continuous: ModuleType, tmp_path: Path) -> None:
    """In a process of its own, because MuJoCo chooses its graphics when it is imported."""
    flags = (
        "--env-id InvertedPendulum-v5 --reset-steps 8 --num-envs 2 --num-steps 16 --num-minibatches 2 --no-compile "
        "--total-timesteps 32 --eval-episodes 1 --capture-video --logdir run"
    )
    result = run_program(continuous, tmp_path, *flags.split(), MUJOCO_GL="egl")
    if result.returncode and re.search("EGL|OpenGL", result.stderr):
        pytest.skip("MuJoCo cannot render here with MUJOCO_GL=egl")
    assert result.returncode == 0, result.stderr
    with PIL.Image.open(tmp_path / "run" / "videos" / "step_32.gif") as gif:
        assert gif.size == (480, 480)
        assert getattr(gif, "n_frames", 1) > 1


# ---- helpers of the loop --------------------------------------------------------------------------------------------


def test_stability_is_a_slope_that_is_not_significantly_positive(continuous: ModuleType) -> None:
    """Only the last half of the steps counts; 200 steps of 10 episodes."""
    noise, t = np.random.default_rng(0).normal(size=(200, 10)), np.arange(200.0)[:, None]
    assert continuous.is_stable(5 + noise)
    assert not continuous.is_stable(5 + noise + 0.1 * t)
    assert continuous.is_stable(5 + noise - 0.1 * t)
    assert continuous.is_stable(np.where(t < 100, t, 100) + noise)  # grew, then settled
    assert not continuous.is_stable(np.where(t < 100, 0, t - 100) + noise)
    assert not continuous.is_stable(t + np.zeros(10))  # without noise every slope is significant
    assert continuous.is_stable(np.full((512, 10), 0.1))  # which rounding must not make a slope


class Choose(torch.nn.Module):
    """Serves, in TwoQueue-v0, the queue that `rule` names given the backlogs (batch, 2): below 0 the first."""

    def __init__(self, rule: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rule, self.device_holder = rule, torch.nn.Parameter(torch.zeros(1))

    def get_action(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.rule(obs)[:, None]


def test_a_policy_that_neglects_a_queue_is_not_stable(continuous: ModuleType, tmp_path: Path) -> None:
    """Always serving queue 0 lets queue 1 grow by 0.4 a step; over resets every 512 steps its mean does not move. Where
    the longer queue is served, a slope lies three standard errors above 0 once in 200 evaluations or so."""
    args = tiny_args(continuous, tmp_path, reset_steps=512, eval_episodes=10, norm_obs=False)
    rules = {"longer": lambda obs: obs[:, 1] - obs[:, 0], "first": lambda obs: -torch.ones(len(obs))}
    scores = {name: [continuous.evaluate(Choose(rule), args, {}, seed=1000 * i) for i in range(6)]
              for name, rule in rules.items()}  # fmt: skip
    assert [score["stable"] for score in scores["first"]] == [0] * 6
    assert sum(score["stable"] for score in scores["longer"]) >= 5
    returns = {name: np.mean([score["mean_return"] for score in scores[name]]) for name in rules}
    assert returns["first"] / 512 == pytest.approx(-0.4 * 512 / 2, rel=0.05)
    assert returns["longer"] / 512 == pytest.approx(-1.33, abs=0.1)


def test_stable_is_nan_where_episodes_cannot_be_compared(run_tiny: Run) -> None:
    assert math.isnan(run_tiny(env_id="KnownValues-v0", vec_env="sync")["stable"])  # they end
    assert math.isnan(run_tiny(eval_episodes=4)["stable"])  # too few to judge by
    result = run_tiny(eval_episodes=5)
    assert result["stable"] in (0, 1)
    assert columns(result["logdir"], "eval.csv")["eval/stable"] == [result["stable"]]


def test_gif_time_is_in_hundredths_of_a_second(continuous: ModuleType, tmp_path: Path) -> None:
    """30 frames/s would be 33.3 ms, which GIF rounds to 30; browsers slow down below 20."""
    frames = [np.full((8, 8, 3), 20 * i, dtype=np.uint8) for i in range(5)]
    for fps, milliseconds in ((20, 50), (30, 30), (15, 70), (1000, 20)):
        continuous.save_gif(frames, tmp_path / f"{fps}.gif", fps)
        with PIL.Image.open(tmp_path / f"{fps}.gif") as gif:
            assert gif.info["duration"] == milliseconds
            assert gif.info["loop"] == 0
            assert getattr(gif, "n_frames", 1) == 5


# Trains with each of two compilers: a missing one, and one that tells its version and then fails. In a process of its
# own, because torch remembers what it found out of a compiler.
FAILING_COMPILERS = """
import sys
from pathlib import Path

import torch

from tests.conftest import load_script, tiny_args

script = load_script(Path(sys.argv[1]))
script.plot_curves = lambda logdir: None
for name in ("missing", "broken"):
    with torch._inductor.config.patch({"cpp.cxx": (None, str(Path(name).resolve())), "fx_graph_cache": False}):
        script.train(tiny_args(script, Path(name + "-run"), compile=True))
"""


def test_a_run_whose_compiler_fails_warns_and_goes_on_without(
    continuous: ModuleType, run_tiny: Run, tmp_path: Path
) -> None:
    """--compile is a default, and a compiler can be missing, or miss Python's headers, or stumble over spaces in the
    path of torch."""
    (tmp_path / "broken").write_text(
        "#!/bin/sh\n[ $1 = --version ] && exec g++ --version\n"
        "echo x.h:12:10: fatal error: Python.h: No such file or directory\nfalse\n"
    )
    (tmp_path / "broken").chmod(0o755)
    command = [sys.executable, "-c", FAILING_COMPILERS, str(continuous.__file__)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    reasons = re.findall(
        r"^warning: torch.compile failed \((.*)\), so --compile is off\.$", result.stdout, re.MULTILINE
    )
    assert len(reasons) == 2
    assert "No working C++ compiler found" in reasons[0]
    assert "Python.h: No such file or directory" in reasons[1]
    eager = weights(run_tiny()["logdir"])
    for name in ("missing", "broken"):
        assert_same(weights(tmp_path / f"{name}-run"), eager)


@can_compile
def test_compiling_leaves_mistakes_of_the_function_alone(script: ModuleType) -> None:
    """A copy whose loss cannot be compiled, or not be run, says so; only a failing compiler is passed over."""
    compiled = script.compiler(script.Args(compile=True), torch.device("cpu"))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(lambda x: print(x.sum().item()))(torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        compiled(lambda x: x + torch.ones(4))(torch.ones(3))


# ---- does it learn --------------------------------------------------------------------------------------------------


def test_it_solves_a_task_of_known_optimum(run_tiny: Run) -> None:
    """Target-v0: the best return is 0, doing nothing earns -0.083; 12 000 steps must come within 0.01 of the best."""
    result = run_tiny(
        env_id="Target-v0", vec_env="sync", num_envs=16, num_steps=32, num_minibatches=8, update_epochs=10,
        total_timesteps=12_288, learning_rate=3e-3, eval_episodes=100, reset_steps=None, hidden_sizes=(16,),
    )  # fmt: skip
    assert result["mean_return"] > -0.01


def test_it_learns_to_leave_no_queue_waiting_without_discounting(run_tiny: Run) -> None:
    """The average-reward mode on the continuing task. A policy that serves a queue whenever one waits has the least
    mean backlog, 1.33; actions that are noise have 4.5."""
    result = run_tiny(
        vec_env="sync", num_envs=16, num_steps=64, num_minibatches=8, update_epochs=4, total_timesteps=20_480,
        learning_rate=3e-3, average_reward=True, norm_reward=False, reset_steps=512, hidden_sizes=(16,),
        eval_episodes=16,
    )  # fmt: skip
    assert result["mean_return"] / 512 > -1.7
    assert result["stable"] == 1
    assert result["average_reward"] == pytest.approx(columns(result["logdir"])["rollout/mean_reward"][-1], abs=1.0)


def test_play_plays_the_policy_and_the_statistics_of_the_checkpoint(
    continuous: ModuleType, run_tiny: Run, run_main: Main
) -> None:
    logdir = str(run_tiny(env_id="Hopper-v5", vec_env="batch", reset_steps=40, learning_rate=0.01)["logdir"])
    checkpoint = continuous.load_checkpoint(Path(logdir) / "latest.pt")
    args = dataclasses.replace(continuous.known_args(checkpoint["args"]), eval_episodes=1)
    agent = continuous.Agent(continuous.make_envs(args, training=False), args)
    agent.load_state_dict(checkpoint["agent"])
    statistics = continuous.to_arrays(checkpoint["observation_statistics"])
    expected = [continuous.evaluate(agent, args, statistics, seed=seed)["mean_return"] for seed in (5, 6)]
    returns = []
    for flags in ([], ["--stochastic"]):
        play = ["play", "--logdir", logdir, "--checkpoint", "latest", "--episodes", "2", "--seed", "5", *flags]
        code, out, err = run_main(*play)
        assert code == 0, err
        returns.append(json.loads(out.splitlines()[-1])["returns"])
    assert returns[0] == expected
    assert returns[1] != expected


@pytest.mark.slow
def test_half_cheetah_learns_to_run(continuous: ModuleType, tmp_path: Path) -> None:
    """200 000 steps of the preset `fast`, compiled, as a user would start it: a return of more than 800."""
    args = continuous.parse_args(["--configs", "fast", "--logdir", str(tmp_path / "run")])
    result = continuous.train(dataclasses.replace(args, total_timesteps=200_704))
    assert result["mean_return"] > 800


@can_compile
@pytest.mark.slow
def test_a_compiled_run_is_repeatable_and_close_to_an_eager_one(
    run_tiny: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled, again, eager = run_tiny(compile=True), run_tiny(compile=True), run_tiny()
    assert_same(weights(again["logdir"]), weights(compiled["logdir"]))
    apart = run_tiny(compile=True, target_kl=1e9)  # gradient and step, compiled each by itself
    assert "so --compile is off" not in capsys.readouterr().out
    for name, tensor in weights(compiled["logdir"]).items():
        torch.testing.assert_close(weights(apart["logdir"])[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    for name, tensor in weights(eager["logdir"]).items():
        torch.testing.assert_close(weights(compiled["logdir"])[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_the_environments_under_test_are_registered() -> None:
    for env_id in ("KnownValues-v0", "Target-v0", "TwoQueue-v0"):
        assert gym.spec(env_id).max_episode_steps is None


def test_a_signal_in_the_last_update_does_not_make_a_finished_run_an_unfinished_one(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute_gae = continuous.compute_gae

    def signalled(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return compute_gae(*args)

    monkeypatch.setattr(continuous, "compute_gae", signalled)
    result = run_tiny(vec_env="sync", total_timesteps=64)
    assert (result["signal"], result["update"]) == (signal.SIGTERM, 1)
    assert re.search(r"evaluation \S+ \+- \S+; run folder", capsys.readouterr().out.splitlines()[-1])
    assert list(Path(result["logdir"]).parent.glob("best/*/index.json"))


# ---- hints ----------------------------------------------------------------------------------------------------------

HEALTHY = {"train/approx_kl": 0.01, "train/clip_fraction": 0.1, "train/entropy": 1.0, "train/advantage_std": 0.5,
           "train/explained_variance": 0.8, "rollout/resets": 10.0}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "progress", "said"),
    [
        ({}, 0.5, None),
        ({"rollout/resets": 0.0}, 0.0, "no episode has ended yet"),
        ({"train/advantage_std": 1e-5}, 0.5, "advantages differ by 1e-05 only"),
        ({"train/approx_kl": 0.11}, 0.5, "(KL 0.11, 10% clipped): lower --learning-rate"),
        ({"train/clip_fraction": 0.51}, 0.5, "(KL 0.01, 51% clipped): lower --learning-rate"),
        ({"train/approx_kl": 0.1, "train/clip_fraction": 0.5}, 0.5, None),
        ({"train/entropy": -2.1}, 0.4, "the entropy has fallen to -2.10 early"),
        ({"train/entropy": -2.1}, 0.6, None),
        ({"train/explained_variance": -3.0}, 0.2, "the critic explains 0% of the returns"),
        ({"train/explained_variance": -3.0}, 0.05, None),
        ({"train/explained_variance": math.nan}, 0.5, None),
    ],
)
def test_a_hint_names_what_looks_wrong(
    script: ModuleType, change: dict[str, float], progress: float, said: str | None
) -> None:
    advice = script.hint(HEALTHY | change, progress, lowest_entropy=-2.0)
    assert advice is None if said is None else said in advice


def test_hints_are_printed_at_evaluations_unless_switched_off(
    continuous: ModuleType, run_tiny: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run_tiny(reset_steps=1000)  # no episode ends
    assert "hint: no episode has ended yet" in capsys.readouterr().out
    run_tiny(reset_steps=1000, hints=False)
    assert "hint:" not in capsys.readouterr().out
