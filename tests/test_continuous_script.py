"""ppo_continuous_mujoco.py as its users meet it: command line, training loop, evaluation, playing; and what the loop
hands to the mathematics, watched from outside on environments of known values."""

from __future__ import annotations

import dataclasses
import io
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
from envs.normalize import NormalizeObservation, RunningMeanStd
from envs.subproc_vec_env import SubprocVecEnv
from tests import known_values
from tests.conftest import (
    ROOT,
    assert_same,
    can_compile,
    columns,
    load_script,
    minibatches_of,
    run_program,
    spy,
    tiny_args,
    weights,
)
from tests.known_values import known_value

Run = Callable[..., dict[str, Any]]
Main = Callable[..., tuple[int, str, str]]
# What the environment says is what PPO sees.
PLAIN = {"norm_obs": False, "norm_reward": False, "norm_adv": "none"}
KNOWN = {"env_id": "KnownValues-v0", "reset_steps": 5}


def edited(script: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """A copy of the script with another text in one place."""
    source, copy = Path(str(script.__file__)).read_text(), folder / "my_copy.py"
    assert source.count(old) == 1, old
    copy.write_text(source.replace(old, new))
    return load_script(copy)


# ---- command line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "play"])
def test_help_lists_every_flag_and_what_it_means(continuous: ModuleType, run_main: Main, command: str) -> None:
    code, out, _ = run_main(command, "--help")
    assert code == 0
    text = re.sub(r"[\s│]+", " ", out)
    source = Path(str(continuous.__file__)).read_text()
    source = source.partition("class PlayArgs")[2] if command == "play" else source
    for field in dataclasses.fields(continuous.Args if command == "train" else continuous.PlayArgs):
        flag = field.name.replace("_", "-")
        assert f"--{flag}" in text, flag
        (comment, *_) = re.findall(rf"^    {field.name}: .*  # (.+)$", source, re.MULTILINE)
        assert re.sub(r"\s+", " ", comment)[:40] in text, flag
    for group in ["run", "environments", "ppo"] if command == "train" else []:
        assert f"{group} options" in text.lower()


def test_presets_layer_from_left_to_right_and_flags_win(continuous: ModuleType) -> None:
    for name, values in continuous.PRESETS.items():
        args = continuous.parse_args(["--configs", name])
        assert {key: getattr(args, key) for key in values} == values, name
    ant, debug = continuous.PRESETS["ant"], continuous.PRESETS["debug"]
    args = continuous.parse_args(["--configs", "ant", "debug", "--num-minibatches", "2", "--seed", "9"])
    assert (args.num_minibatches, args.seed) == (2, 9)
    assert args.update_epochs == debug["update_epochs"] != ant["update_epochs"]
    assert args.gae_lambda == ant["gae_lambda"]
    assert continuous.parse_args(["--configs", "debug", "ant"]).update_epochs == ant["update_epochs"]
    assert continuous.preset("ant", "debug", num_minibatches=2, seed=9) == args


def test_a_program_can_train_twice_in_one_process(continuous: ModuleType, tmp_path: Path) -> None:
    """A sweep, as docs/copying.md has it; the second run is what it would have been alone."""
    settings = {"env_id": "InvertedPendulum-v5", "total_timesteps": 512, "num_envs": 2, "hidden_sizes": (8, 8)}
    results = [
        continuous.train(continuous.preset("debug", learning_rate=rate, logdir=str(tmp_path / str(i)), **settings))
        for i, rate in enumerate((1e-3, 1e-2, 1e-3))
    ]
    first, other, again = (weights(result["logdir"]) for result in results)
    assert_same(again, first)
    assert not torch.equal(other["actor_log_std"], first["actor_log_std"])
    assert {result["global_step"] for result in results} == {512}


# ---- a run and what it leaves ---------------------------------------------------------------------------------------


def test_a_run_leaves_the_files_it_promises(
    continuous: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under its own name, so that a copy's runs are told apart; with finite numbers under the promised names."""
    monkeypatch.chdir(tmp_path)
    args = tiny_args(continuous, tmp_path, eval_every=64, save_every=64, seed=3)
    result = continuous.train(dataclasses.replace(args, logdir=None))
    (logdir,) = Path("runs").glob("TwoQueue-v0__*")
    assert re.fullmatch(rf"TwoQueue-v0__{continuous.SCRIPT}__3__\d{{8}}-\d{{6}}", logdir.name)
    assert result["logdir"] == str(logdir)
    for name in ("config.json", "progress.csv", "best.pt", "best.json", "latest.pt"):
        assert (logdir / name).stat().st_size > 0, name
    assert list(logdir.glob("events.out.tfevents.*"))
    config = json.loads((logdir / "config.json").read_text())
    assert (config["args"]["seed"], config["versions"]["torch"]) == (3, torch.__version__)
    progress = columns(logdir)
    assert progress["global_step"] == [64, 128, 192]
    for name, values in progress.items():
        assert np.isfinite(values).all(), name
    for name in (
        "train/policy_loss", "train/value_loss", "train/entropy", "train/approx_kl", "train/old_approx_kl",
        "train/clip_fraction", "train/explained_variance", "train/value_abs_error", "train/grad_norm",
        "train/learning_rate", "rollout/episodic_return", "rollout/episodic_length", "rollout/LTA_return",
        "eval/mean_return", "eval/std_return", "eval/mean_length", "time/sps",
    ):  # fmt: skip
        assert name in progress
    assert progress["counters/train_steps"] == [16, 32, 48]
    assert progress["counters/rollouts"] == [1, 2, 3]
    assert progress["counters/epochs"] == [2, 4, 6]
    assert progress["counters/minibatch_updates"] == [4, 8, 12]  # 2 epochs of 2 minibatches
    out = capsys.readouterr().out
    assert "3 updates of 4 environments (SubprocVecEnv) x 16 steps, 2 epochs x 2 minibatches" in out
    assert str(logdir) in out


def test_there_are_exactly_num_updates_and_the_learning_rate_falls(run_tiny: Run) -> None:
    """200 steps asked for, batches of 64: three updates (192), at 1, 2/3 and 1/3 of the learning rate."""
    expected = {"linear": [0.003, 0.002, 0.001], "none": [0.003] * 3,
                "exponential": [0.003 * 0.01 ** (u / 3) for u in range(3)]}  # fmt: skip
    for decay, rates in expected.items():
        progress = columns(run_tiny(total_timesteps=200, learning_rate=0.003, lr_decay=decay)["logdir"])
        assert progress["global_step"] == [64, 128, 192]
        np.testing.assert_allclose(progress["train/learning_rate"], rates)


def test_normalisers_have_the_discount_of_training_and_stand_still_in_evaluation(
    continuous: ModuleType, tmp_path: Path
) -> None:
    """With another gamma than the critic's, the scaled returns would not have a spread of 1."""
    args = tiny_args(continuous, tmp_path, gamma=0.9)
    vec_env = continuous.make_envs(args, 2)
    assert isinstance(vec_env, NormalizeObservation)
    assert (vec_env.training, vec_env.env.gamma) == (True, 0.9)
    evaluation = continuous.make_envs(args, 2, vec_env.statistics)
    assert not evaluation.training
    assert evaluation.statistics is vec_env.statistics
    assert not hasattr(evaluation.env, "gamma")
    vec_env.close()
    evaluation.close()


def test_returns_are_the_tasks_own_whatever_the_normalisers_do(run_tiny: Run) -> None:
    """In KnownValues-v0 each step earns 1: return equals length, and the long-term average is 1."""
    result = run_tiny(**KNOWN)
    progress = columns(result["logdir"])
    assert progress["rollout/episodic_return"] == progress["rollout/episodic_length"]
    assert set(progress["rollout/LTA_return"]) == set(progress["rollout/mean_reward"]) == {1.0}
    assert all(1 < length < 5 for length in progress["rollout/episodic_length"])
    assert progress["eval/mean_return"][-1] == progress["eval/mean_length"][-1] == result["mean_return"]


def test_episodes_are_counted_and_the_best_average_is_kept(run_tiny: Run) -> None:
    progress = columns(run_tiny(num_envs=2, num_steps=32, reset_steps=128, total_timesteps=64 * 9)["logdir"])
    assert progress["counters/resets"] == [2 * (rollout // 4) for rollout in range(1, 10)]
    averages = np.nan_to_num(progress["rollout/LTA_return"], nan=-math.inf)
    assert progress["train/best_LTA"] == list(np.maximum.accumulate(averages))


@pytest.mark.parametrize(("every", "expected"), [(0, [192]), (100, [128, 192]), (64, [64, 128, 192])])
def test_evaluations_come_at_the_next_crossing_and_at_the_end(run_tiny: Run, every: int, expected: list[float]) -> None:
    progress = columns(run_tiny(eval_every=every)["logdir"])
    steps = zip(progress["global_step"], progress["eval/mean_return"], strict=True)
    assert [step for step, score in steps if not math.isnan(score)] == expected


def test_the_best_checkpoint_is_of_the_best_evaluation(
    run_tiny: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"env_id": "Target-v0", "reset_steps": None, "eval_every": 64, "learning_rate": 0.02}
    results = [run_tiny(total_timesteps=640, seed=seed, **settings) for seed in (1, 2)]
    for result in results:
        progress, logdir = columns(result["logdir"]), Path(result["logdir"])
        assert result["best_return"] == max(progress["eval/mean_return"])
        best = torch.load(logdir / "best.pt", weights_only=True)["run"]
        assert best["best_return"] == best["mean_return"] == result["best_return"]
        assert progress["eval/mean_return"][progress["global_step"].index(best["global_step"])] == result["best_return"]
        assert json.loads((logdir / "best.json").read_text())["score"] == result["best_return"]
    winner = max(results, key=lambda result: result["best_return"])
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert winner["logdir"] in last_line


# ---- what the loop hands to the mathematics -------------------------------------------------------------------------


def test_an_exact_critic_gives_zero_advantages_in_the_training_loop(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across terminations, time limits, both at once, and the ends of rollouts: final observations are looked up, not
    those after the reset, and terminations are not bootstrapped."""
    original = continuous.Agent.get_value  # stays in the graph
    monkeypatch.setattr(
        continuous.Agent, "get_value",
        lambda self, obs: known_value(obs[:, 0].double(), 0.9).float() + 0 * original(self, obs),
    )  # fmt: skip
    calls = spy(monkeypatch, continuous, "compute_gae")
    run_tiny(gamma=0.9, **KNOWN, **PLAIN)
    assert len(calls) == 3
    ends: Counter[tuple[float, float]] = Counter()
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
    calls = spy(monkeypatch, continuous, "take_steps")
    run_tiny(env_id="Target-v0", reset_steps=None, num_minibatches=4, update_epochs=3, total_timesteps=64, **PLAIN)
    minibatches = [tuple(x.obs.flatten().tolist()) for x in minibatches_of(calls)]
    assert [len(minibatch) for minibatch in minibatches] == [16] * 12
    epochs = [minibatches[i : i + 4] for i in range(0, 12, 4)]
    everything = [sorted(x for minibatch in epoch for x in minibatch) for epoch in epochs]
    assert len(set(everything[0])) == 64
    assert everything[0] == everything[1] == everything[2]
    assert epochs[0] != epochs[1] != epochs[2]


def test_rows_of_a_minibatch_belong_together_and_start_at_ratio_1(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each update's first minibatch the stored log-probabilities and values are the agent's own, so the KL is 0."""
    first: list[dict[str, float]] = []
    original = continuous.take_steps

    def recorded(agent: Any, args: Any, weights: Any, adam: Any, some: Any) -> Any:
        if float(adam["step"]) % 4 == 0:
            batch = type(some)(*(x[0] for x in some))
            with torch.no_grad():
                policy, values = agent(batch.obs)
            first.append({
                "log_probs": float((policy.log_prob(batch.actions) - batch.log_probs).abs().max()),
                "values": float((values - batch.values).abs().max()),
                "returns": float((batch.advantages + batch.values - batch.returns).abs().max()),
            })  # fmt: skip
        return original(agent, args, weights, adam, some)

    monkeypatch.setattr(continuous, "take_steps", recorded)
    run_tiny(env_id="Target-v0", reset_steps=None, learning_rate=0.02, **PLAIN)
    assert len(first) == 3
    assert max(max(differences.values()) for differences in first) < 1e-5


class Recorder(VectorWrapper):
    """Keeps the actions that the environments got, and the rewards they answered."""

    def __init__(self, env: Any, log: dict[str, list[np.ndarray]]) -> None:
        super().__init__(env)
        self.log, self.statistics = log, env.statistics

    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        self.log["actions"].append(np.array(actions))
        self.log["rewards"].append(np.array(result[1]))
        return result

    def get_state(self) -> Any:
        return self.env.get_state()  # type: ignore[attr-defined]


def test_environments_get_clipped_actions_and_the_loss_the_sampled_ones(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: dict[str, list[np.ndarray]] = {"actions": [], "rewards": []}
    make_envs = continuous.make_envs

    def recorded_envs(args: Any, num_envs: int, statistics: Any = None, *rest: Any) -> Any:
        vec_env = make_envs(args, num_envs, statistics, *rest)
        return Recorder(vec_env, log) if statistics is None else vec_env

    monkeypatch.setattr(continuous, "make_envs", recorded_envs)
    calls, gae_calls = spy(monkeypatch, continuous, "take_steps"), spy(monkeypatch, continuous, "compute_gae")
    settings = {"log_std_init": 0.5, "total_timesteps": 64, "num_minibatches": 1, "update_epochs": 1}
    run_tiny(env_id="Target-v0", reset_steps=None, **settings, **PLAIN)
    (batch,) = minibatches_of(calls)
    given = np.array(log["actions"]).reshape(64, 1)
    assert np.abs(given).max() == 1.0
    assert batch.actions.abs().max() > 1.5
    np.testing.assert_array_equal(np.sort(given[:, 0]), np.sort(np.clip(batch.actions.numpy()[:, 0], -1, 1)))
    (((rewards, *_), _),) = gae_calls
    np.testing.assert_array_equal(rewards.numpy(), np.array(log["rewards"], dtype=np.float32))


def test_rewards_divided_by_time(continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward 1 a step becomes 1, 1/2, 1/3, ... from the start of each episode; reported returns stay the task's."""
    calls = spy(monkeypatch, continuous, "compute_gae")
    result = run_tiny(time_scaled_reward=True, **KNOWN, **PLAIN)
    step_in_episode = np.zeros(4)
    for (rewards, _, _, terminations, truncations, *_), _ in calls:
        for t in range(16):
            step_in_episode += 1
            np.testing.assert_allclose(rewards[t].numpy(), 1 / step_in_episode, rtol=1e-6)
            step_in_episode[(terminations + truncations)[t].numpy() > 0] = 0
    progress = columns(result["logdir"])
    assert progress["rollout/episodic_return"] == progress["rollout/episodic_length"]


def test_average_reward_mode_subtracts_a_running_average_and_does_not_discount(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rho starts at the first rollout's mean reward, then moves a tenth of the way to each new one."""
    calls = spy(monkeypatch, continuous, "compute_gae")
    values = {"total_timesteps": 320, "reset_steps": None, "gamma": 0.5}
    progress = columns(run_tiny(average_reward_rate=0.1, norm_reward=False, **values)["logdir"])
    rho = progress["rollout/mean_reward"][0]
    for i, ((targets, *_, gamma, _), _) in enumerate(calls):
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
    run_tiny(average_reward_rate=0.1, norm_reward=False, **values)
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
    for rate in (None, 0.1):
        run_tiny(average_reward_rate=rate, total_timesteps=64, **KNOWN, **PLAIN)
    terminations, truncations = (x.bool() for x in calls[0][0][3:5])
    assert (terminations & truncations).any()
    assert (truncations & ~terminations).any()
    assert torch.equal(calls[1][0][4].bool(), truncations & ~terminations)


@pytest.mark.parametrize(("norm_adv", "dim"), [("batch", None), ("per_env", 0)])
def test_advantages_are_normalized_over_the_scope(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch, norm_adv: str, dim: int | None
) -> None:
    """The minibatches' advantages are together those of the batch, normalised once, and not again in the loss."""
    gae_calls, calls = spy(monkeypatch, continuous, "compute_gae"), spy(monkeypatch, continuous, "take_steps")
    run_tiny(env_id="Target-v0", norm_adv=norm_adv, update_epochs=1, total_timesteps=64)
    ((_, (raw, _)),) = gae_calls
    expected = (raw - raw.mean(dim, keepdim=True)) / (raw.std(dim, keepdim=True) + 1e-8)
    given = torch.cat([minibatch.advantages for minibatch in minibatches_of(calls)])
    torch.testing.assert_close(given.sort()[0], expected.flatten().sort()[0])


# ---- the update -----------------------------------------------------------------------------------------------------


def test_the_critic_can_have_a_learning_rate_of_its_own(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's first step moves every weight with a gradient by its learning rate; both fall alike."""
    calls = spy(monkeypatch, continuous, "take_steps")
    settings = {"num_minibatches": 1, "update_epochs": 1, "log_std_init": -1.0, "total_timesteps": 128}
    run_tiny(learning_rate=1e-3, critic_learning_rate=5e-3, **settings)
    run_tiny(learning_rate=1e-3, **settings)
    (before, *_), (after, *_) = (call[0][2:] for call in calls[:2])
    moved = (after - before).abs()
    rates = [args[3]["learning_rate"] for args, _ in calls]
    assert rates[0].unique().tolist() == pytest.approx([1e-3, 5e-3])
    torch.testing.assert_close(rates[1], rates[0] / 2)
    assert float(moved[rates[0] < 2e-3].max()) == pytest.approx(1e-3, rel=0.05)
    assert float(moved[rates[0] > 2e-3].max()) == pytest.approx(5e-3, rel=0.05)
    (agent, *_), _ = calls[0]
    critic = sum(p.numel() for name, p in agent.named_parameters() if name.startswith("critic"))
    assert int((rates[0] > 2e-3).sum()) == critic
    assert rates[2].unique().tolist() == pytest.approx([1e-3])


def test_the_kl_limit_ends_an_update_after_the_epoch_that_exceeds_it(run_tiny: Run) -> None:
    settings = {"env_id": "Target-v0", "reset_steps": None, "learning_rate": 0.03, "update_epochs": 8}
    stopped = run_tiny(target_kl=0.02, **settings)
    progress = columns(stopped["logdir"])
    assert 3 <= stopped["epochs"] == progress["counters/epochs"][-1] < 3 * 8
    assert progress["counters/minibatch_updates"][-1] == 2 * stopped["epochs"]
    free, generous = run_tiny(**settings), run_tiny(target_kl=1e9, **settings)
    assert free["epochs"] == generous["epochs"] == 3 * 8
    assert_same(weights(free["logdir"]), weights(generous["logdir"]))
    assert max(columns(free["logdir"])["train/approx_kl"]) > 0.02


# ---- equal seeds, equal runs ----------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_runs_and_different_ones_do_not(run_tiny: Run) -> None:
    """Whatever the number of workers, and however often it is evaluated and saved on the way."""
    first, again, other = run_tiny(), run_tiny(num_workers=2, eval_every=64, save_every=64), run_tiny(seed=2)
    assert_same(weights(again["logdir"]), weights(first["logdir"]))
    assert not torch.equal(weights(other["logdir"])["actor_log_std"], weights(first["logdir"])["actor_log_std"])


def test_batched_robots_and_those_in_processes_agree_bit_for_bit(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrapper that does nothing sends the task from MuJoCo's threads to processes."""
    monkeypatch.chdir(tmp_path)  # MuJoCo may write its log
    settings, make_env = {"env_id": "Hopper-v5", "reset_steps": 12}, continuous.make_env
    results = [run_tiny(**settings), run_tiny(num_workers=2, **settings)]
    kinds = [continuous.make_envs(tiny_args(continuous, tmp_path, **settings), 2).unwrapped]
    monkeypatch.setattr(continuous, "make_env", lambda *args: gym.Wrapper(make_env(*args)))
    results.append(run_tiny(**settings))
    kinds.append(continuous.make_envs(tiny_args(continuous, tmp_path, **settings), 2).unwrapped)
    assert [type(vec_env) for vec_env in kinds] == [MujocoBatchVecEnv, SubprocVecEnv]
    for vec_env in kinds:
        vec_env.close()
    for result in results[1:]:
        assert_same(weights(result["logdir"]), weights(results[0]["logdir"]))
        assert result["mean_return"] == results[0]["mean_return"]


def test_an_environment_that_cannot_be_saved_can_be_trained_and_resumed(run_tiny: Run) -> None:
    """By the name of its module too, which is then imported. Its constructor knows no render_mode."""
    settings = {"env_id": "tests.known_values:Plain-v0", "reset_steps": None, "learning_rate": 0.01}
    with pytest.warns(UserWarning, match="cannot be saved, because PlainEnv lacks get_state"):
        result = run_tiny(**settings)
    assert result["mean_return"] > 0
    assert columns(result["logdir"])["eval/mean_length"][-1] == 1000
    with pytest.warns(UserWarning, match="cannot be saved"):
        resumed = run_tiny(**settings, logdir=result["logdir"], resume=True, total_timesteps=256)
    assert resumed["global_step"] == 256


def test_a_run_may_be_trained_in_a_thread(continuous: ModuleType, tmp_path: Path) -> None:
    args = tiny_args(continuous, tmp_path / "run", env_id="InvertedPendulum-v5", reset_steps=None)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(continuous.train, args).result()["global_step"] == 192


def test_a_reward_that_the_environment_calls_raw_is_not_mistaken_for_ours(
    run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = known_values.KnownValuesEnv.step
    monkeypatch.setattr(
        known_values.KnownValuesEnv, "step", lambda self, action: (*step(self, action)[:4], {"raw_reward": 1000.0})
    )
    for norm_reward in (False, True):
        progress = columns(run_tiny(norm_reward=norm_reward, **KNOWN)["logdir"])
        assert 1 <= max(progress["rollout/episodic_return"]) <= 10


# ---- a wrapper in make_env -------------------------------------------------------------------------------------------

WRAPPERS = {
    "reward": ("TransformReward({}, lambda reward: 3 * reward)", {**KNOWN}),
    "observation": ("TransformObservation({}, lambda obs: np.append(obs, 1).astype(np.float32), "
                    "gym.spaces.Box(-np.inf, np.inf, (2,)))", {**KNOWN}),
    "dict": ("FlattenObservation({})", {"env_id": "Dict-v0", "reset_steps": 5}),
    "robot": ("TransformReward({}, lambda reward: 3 * reward)", {"env_id": "Hopper-v5", "reset_steps": 5}),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_in_make_env_takes_effect_in_training_evaluation_and_play(
    continuous: ModuleType, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of a copy. Rewards that are tripled are tripled in what is logged and in what is evaluated."""
    monkeypatch.chdir(tmp_path)  # MuJoCo may write its log
    wrapper, settings = WRAPPERS[kind]
    line = re.search(r"^    env = (gym\.make\(.*\))$", Path(str(continuous.__file__)).read_text(), re.MULTILINE)
    assert line is not None
    copy = edited(continuous, tmp_path, line[0], f"    env = gym.wrappers.{wrapper.format(line[1])}")
    logdir = copy.train(tiny_args(copy, tmp_path / "run", **settings))["logdir"]
    progress, factor = columns(logdir), 3 if kind in ("reward", "robot") else 1
    returns = copy.play(copy.PlayArgs(logdir=logdir, episodes=2, seed=10_000))
    assert np.mean(returns) == pytest.approx(progress["eval/mean_return"][-1])
    if kind == "robot":  # up for 5 steps, each worth about 1
        assert all(12 < x < 18 for x in [*progress["rollout/episodic_return"], progress["eval/mean_return"][-1]])
        return
    lengths = np.array([*progress["rollout/episodic_length"], progress["eval/mean_length"][-1]])
    np.testing.assert_allclose(
        [*progress["rollout/episodic_return"], progress["eval/mean_return"][-1]], factor * lengths
    )
    inputs = {"reward": 1, "observation": 2, "dict": 3}[kind]
    assert weights(logdir)["critic.0.weight"].shape == (8, inputs)


# ---- evaluation and playing -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(continuous: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short finished run of KnownValues-v0."""
    logdir = tmp_path_factory.mktemp("finished") / "run"
    continuous.train(tiny_args(continuous, logdir, eval_every=64, eval_episodes=4, **KNOWN))
    return logdir


def test_a_run_starts_from_the_policy_that_it_is_given(continuous: ModuleType, run_tiny: Run, tmp_path: Path) -> None:
    """Its statistics of observations included, and with any settings."""
    start = Path(run_tiny()["logdir"]) / "latest.pt"
    going_on = run_tiny(init_from=str(start), total_timesteps=64, learning_rate=1e-9, gamma=0.5)
    before, after = (continuous.load(path) for path in (start, Path(going_on["logdir"]) / "latest.pt"))
    for name, weight in before["agent"].items():
        torch.testing.assert_close(after["agent"][name], weight, rtol=0, atol=1e-7)
    assert after["statistics"]["count"] == pytest.approx(before["statistics"]["count"] + 4 + 64)  # a reset and steps
    assert after["run"]["global_step"] == 64
    with pytest.raises(continuous.UsageError, match="another network"):
        run_tiny(init_from=str(start), hidden_sizes=(8,))


def test_evaluation_is_repeatable_frozen_and_on_its_own_seeds(continuous: ModuleType, finished: Path) -> None:
    checkpoint = continuous.load(finished / "latest.pt")
    args, statistics = continuous.Args(**checkpoint["args"]), RunningMeanStd((1,))
    vec_env = continuous.make_envs(args, 4, statistics)
    agent = continuous.Agent(vec_env, args)
    continuous.load_policy(checkpoint, agent, statistics)
    random_state, frozen = torch.get_rng_state(), statistics.get_state()
    first, again = (continuous.evaluate(agent, vec_env) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert torch.equal(torch.get_rng_state(), random_state)  # training goes on as if nothing had happened
    assert_same(statistics.get_state(), frozen)
    # the lengths are those of the task: episode i starts at k drawn with seed 10 000 + i, and is cut after 5 steps
    expected = [min(5, int(np.random.default_rng(10_000 + i).integers(1, 9))) for i in range(4)]
    assert first[0].tolist() == first[1].tolist() == expected
    assert columns(finished)["eval/mean_return"][-1] == np.mean(expected)
    # the agent sees k on the scale of the statistics
    statistics.set_state({"mean": np.array([2.0]), "var": np.array([4.0]), "count": 1.0})
    seen, policy = list[float](), agent.policy
    agent.policy = lambda obs: (seen.append(float(obs[0])), policy(obs))[1]
    continuous.evaluate(agent, vec_env)
    k = np.random.default_rng(10_000).integers(1, 9) - np.arange(expected[0])
    np.testing.assert_allclose(seen[: expected[0]], (k - 2) / 2)
    vec_env.close()


def test_evaluation_takes_the_mode_of_the_policy(continuous: ModuleType, tmp_path: Path) -> None:
    """On Target-v0 the return tells the actions. Those of a fresh agent have mean 0 and deviation 1, z: the mode earns
    -1/12, and clip(z) that minus E[clip(z)^2] = 1 - 2 phi(1) = 0.516, while z itself would earn -1.08."""
    args = tiny_args(continuous, tmp_path, env_id="Target-v0", norm_obs=False)
    vec_env = continuous.make_envs(args, 200, RunningMeanStd((1,)))
    agent = continuous.Agent(vec_env, args)
    mode, sampled = (continuous.evaluate(agent, vec_env, deterministic=d)[0].mean() for d in (True, False))
    vec_env.close()
    assert mode == pytest.approx(-1 / 12, abs=0.03)
    assert sampled == pytest.approx(-0.60, abs=0.12)


def test_play_prints_each_episode_and_their_mean(finished: Path, run_main: Main) -> None:
    argv = ["play", "--logdir", str(finished), "--episodes", "3"]
    code, out, _ = run_main(*argv)
    assert code == 0
    returns = [float(x) for x in re.findall(r"^episode \d: return (\S+), \d+ steps$", out, re.MULTILINE)]
    assert f"mean return {np.mean(returns):.2f}" in out.splitlines()[-1]
    assert returns == [min(5, int(np.random.default_rng(i).integers(1, 9))) for i in range(3)]
    assert run_main(*argv)[1] == out
    assert run_main(*argv, "--checkpoint", "latest", "--stochastic")[0] == 0
    assert run_main("play", "--episodes", "3", "--checkpoint", str(finished / "best.pt"))[1] == out


def test_play_plays_the_policy_and_the_statistics_of_the_checkpoint(continuous: ModuleType, run_tiny: Run) -> None:
    logdir = run_tiny(env_id="Hopper-v5", reset_steps=40, learning_rate=0.01)["logdir"]
    play = {"logdir": logdir, "checkpoint": "latest", "episodes": 2, "seed": 10_000}
    returns = continuous.play(continuous.PlayArgs(**play))
    assert np.mean(returns) == pytest.approx(columns(logdir)["eval/mean_return"][-1], rel=1e-5)
    assert continuous.play(continuous.PlayArgs(**play, stochastic=True)) != returns


def test_gifs_have_the_pictures_the_size_and_the_speed_that_were_asked_for(
    finished: Path, run_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As KnownValues-v0 shows 20 pictures a second, 10 are every second of its steps."""
    monkeypatch.setattr(
        known_values.SmallEnv, "render", lambda self: np.full((400, 600, 3), int(self.state[0]) * 30, np.uint8)
    )
    argv = ["play", "--logdir", str(finished), "--episodes", "2", "--save-gif", "--gif-dir", str(tmp_path / "gifs")]
    for flags, pictures, duration in (
        ([], 5, 50),
        (["--gif-fps", "10"], 3, 100),
        (["--gif-fps", "50"], 5, 50),
        (["--gif-frames", "2"], 2, 50),
    ):
        code, out, _ = run_main(*argv, *flags, "--seed", "0")  # which starts at k = 7
        assert code == 0
        path = tmp_path / "gifs" / "episode_001_return_5_steps_5.gif"
        assert str(path) in out
        with PIL.Image.open(path) as gif:
            assert (gif.size, getattr(gif, "n_frames", 1)) == ((320, 213), pictures)
            assert (gif.info["duration"], gif.info["loop"]) == (duration, 0)
        assert len(list((tmp_path / "gifs").iterdir())) == 2


def test_a_robot_can_be_filmed(continuous: ModuleType, tmp_path: Path) -> None:
    """In a process of its own, because MuJoCo chooses its graphics when it is imported."""
    flags = (
        "--env-id InvertedPendulum-v5 --reset-steps 8 --num-envs 2 --num-steps 16 --num-minibatches 2 --no-compile "
        "--total-timesteps 32 --eval-episodes 1 --logdir run"
    )
    assert continuous.main(f"{flags} --logdir {tmp_path}/run".split()) == 0
    result = run_program(continuous, tmp_path, "play", "--logdir", "run", "--save-gif")
    if result.returncode and re.search("EGL|OpenGL", result.stderr):
        pytest.skip("MuJoCo cannot render here")
    assert result.returncode == 0, result.stderr
    (path,) = (tmp_path / "run" / "gifs").glob("*.gif")
    with PIL.Image.open(path) as gif:
        assert gif.size == (320, 320)
        assert getattr(gif, "n_frames", 1) > 1


# ---- what is printed, and how a run ends ----------------------------------------------------------------------------


def test_a_terminal_shows_one_live_line(run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    run_tiny()
    live = terminal.getvalue().split("\r\033[K")[1:]
    assert len(live) == 3
    assert [text.startswith(f"{64 * i} steps, ") for i, text in enumerate(live, 1)] == [True] * 3
    assert "\n" not in live[0] + live[1]
    assert live[2].count("\n") == 3  # the last one, the summary, and the best of all runs
    assert re.search(r"return -\d+\.\d\d, evaluation nan, KL \S+, \d+\.\d min left$", live[1])


def test_a_run_goes_on_without_a_standard_output(continuous: ModuleType, tmp_path: Path) -> None:
    flags = "--configs debug --env-id InvertedPendulum-v5 --num-envs 2 --total-timesteps 512 --logdir run"
    command = f"{sys.executable} {continuous.__file__} {flags} >&-"
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, shell=True, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 0, result.stderr
    assert len(columns(tmp_path / "run")["global_step"]) == 4


def test_a_signal_in_the_last_update_does_not_make_a_finished_run_an_unfinished_one(
    continuous: ModuleType, run_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_gae = continuous.compute_gae

    def signalled(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return compute_gae(*args)

    monkeypatch.setattr(continuous, "compute_gae", signalled)
    flags = "--env-id TwoQueue-v0 --num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 64 --no-compile"
    before = signal.getsignal(signal.SIGTERM)
    try:
        code, out, _ = run_main(*flags.split(), "--reset-steps", "10", "--logdir", str(tmp_path / "run"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, "64 steps in" in out) == (128 + signal.SIGTERM, True)
    assert (tmp_path / "run" / "best.json").exists()


@pytest.mark.parametrize("what", ["reward", "obs"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_names_its_environment_and_changes_no_checkpoint(
    continuous: ModuleType, run_main: Main, tmp_path: Path, what: str, value: float
) -> None:
    """Environment 2 has seed 3, which is poisoned in its 20th step: in the second update."""
    values = {"env_id": f"Poison-{what}-{value}-v0", "save_every": 64, "reset_steps": 100}
    args = tiny_args(continuous, tmp_path / "run", **values)
    with pytest.raises(FloatingPointError, match=r"of environment 2 is not finite in step 20 of its episode"):
        continuous.train(args)
    state = continuous.load(tmp_path / "run" / "latest.pt")
    assert state["run"]["global_step"] == 64
    assert all(torch.isfinite(x).all() for x in state["agent"].values())


def test_a_gradient_that_is_not_finite_changes_no_checkpoint(run_tiny: Run, tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"gradient is not finite after step .*: lower --learning-rate"):
        run_tiny(logdir=tmp_path / "run", learning_rate=1e9, max_grad_norm=None, save_every=64, total_timesteps=640)
    latest = tmp_path / "run" / "latest.pt"
    assert not latest.exists() or all(torch.isfinite(x).all() for x in weights(latest.parent).values())


def test_a_lost_worker_ends_the_run_with_the_command_that_resumes_it_or_is_replaced(
    continuous: ModuleType, run_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, died = known_values.KnownValuesEnv.step, tmp_path / "died"

    def deadly(self: Any, action: Any) -> Any:
        if not died.exists() and self.np_random.random() < 0.1:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, action)

    monkeypatch.setattr(known_values.KnownValuesEnv, "step", deadly)
    flags = "--env-id KnownValues-v0 --reset-steps 5 --num-envs 4 --num-steps 16 --num-minibatches 2 --no-compile "
    flags += "--total-timesteps 320 --hidden-sizes 8 --save-every 1 --num-workers 2"
    code, _, err = run_main(*flags.split(), "--logdir", str(tmp_path / "a"))
    assert code == 1
    assert "SIGKILL" in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].endswith(f"--resume --logdir {tmp_path / 'a'}")
    died.unlink()
    code, _, err = run_main(*flags.split(), "--logdir", str(tmp_path / "b"), "--on-worker-failure", "restart")
    assert (code, died.exists()) == (0, True), err
    assert columns(tmp_path / "b")["global_step"][-1] == 320


# ---- does it learn --------------------------------------------------------------------------------------------------


def test_it_solves_a_task_of_known_optimum(run_tiny: Run) -> None:
    """Target-v0: the best return is 0, doing nothing earns -0.083; 12 000 steps must come within 0.01 of the best."""
    result = run_tiny(
        env_id="Target-v0", num_envs=16, num_steps=32, num_minibatches=8, update_epochs=10, total_timesteps=12_288,
        learning_rate=3e-3, eval_episodes=100, reset_steps=None, hidden_sizes=(16,),
    )  # fmt: skip
    assert result["mean_return"] > -0.01


def test_it_learns_to_leave_no_queue_waiting_without_discounting(run_tiny: Run) -> None:
    """The average-reward mode on the continuing task. A policy that serves a queue whenever one waits has the least
    mean backlog, 1.33; actions that are noise have 4.5."""
    result = run_tiny(
        num_envs=16, num_steps=64, num_minibatches=8, update_epochs=4, total_timesteps=20_480, learning_rate=3e-3,
        average_reward_rate=0.1, norm_reward=False, reset_steps=512, hidden_sizes=(16,), eval_episodes=16,
    )  # fmt: skip
    assert result["mean_return"] / 512 > -1.7
    assert result["average_reward"] == pytest.approx(columns(result["logdir"])["rollout/mean_reward"][-1], abs=1.0)


@pytest.mark.slow
def test_half_cheetah_learns_to_run(continuous: ModuleType, tmp_path: Path) -> None:
    """200 000 steps of its preset, compiled, as a user would start it: a return of more than 800."""
    flags = ["--configs", "halfcheetah", "--total-timesteps", "200704", "--logdir", str(tmp_path / "run")]
    assert continuous.train(continuous.parse_args(flags))["mean_return"] > 800


@can_compile
@pytest.mark.slow
def test_a_compiled_run_is_repeatable_and_close_to_an_eager_one(run_tiny: Run) -> None:
    compiled, again, eager = run_tiny(compile=True), run_tiny(compile=True), run_tiny()
    assert_same(weights(again["logdir"]), weights(compiled["logdir"]))
    for name, tensor in weights(eager["logdir"]).items():
        torch.testing.assert_close(weights(compiled["logdir"])[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
