"""What only ppo_continuous_mujoco.py has: normalisers, rewards by time and by average, robots, its evaluation and play;
and its faults and its learning, watched on environments of known values.

What all scripts have in common is tested in test_ppo_math.py, test_loops.py, test_command_line.py, test_resume.py and
test_checkpoint_files.py.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from envs.normalize import NormalizeObservation, RunningMeanStd
from tests import known_values
from tests.conftest import TARGET_RUN, assert_same, columns, run_program, spy, tiny_args, tiny_flags, weights

Run = Callable[..., dict[str, Any]]
Main = Callable[..., tuple[int, str, str]]
# What the environment says is what PPO sees.
PLAIN = {"norm_obs": False, "norm_reward": False, "norm_adv": "none"}
KNOWN = {"env_id": "KnownValues-v0", "reset_steps": 5}
TARGET = {"env_id": "Target-v0", "reset_steps": None}


def test_normalisers_have_the_discount_and_stand_still_in_evaluation(continuous: ModuleType, tmp_path: Path) -> None:
    """With another gamma than the critic's, the scaled returns would not have a spread of 1."""
    args = tiny_args(continuous, tmp_path, gamma=0.9)
    vec_env = continuous.make_envs(args, 2)
    evaluation = continuous.make_envs(args, 2, vec_env.statistics)
    assert isinstance(vec_env, NormalizeObservation)
    assert (vec_env.training, vec_env.env.gamma) == (True, 0.9)
    assert (evaluation.training, evaluation.statistics) == (False, vec_env.statistics)
    assert not hasattr(evaluation.env, "gamma")
    plain = continuous.make_envs(tiny_args(continuous, tmp_path, norm_obs=False), 2)
    assert (vec_env.clip, vec_env.env.clip, plain.clip, plain.training) == (10.0, 10.0, np.inf, False)
    plain.close()
    vec_env.close()
    evaluation.close()


def test_returns_are_the_tasks_own_whatever_the_normalisers_do(run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In KnownValues-v0 each step earns 1: return equals length, LTA is 1. Its own raw_reward is not taken for ours."""
    step, env = known_values.KnownValuesEnv.step, known_values.KnownValuesEnv
    monkeypatch.setattr(env, "step", lambda self, action: (*step(self, action)[:4], {"raw_reward": 1000.0}))
    for norm_reward in (True, False):
        result = run_tiny(norm_reward=norm_reward, **KNOWN)
        progress = columns(result["logdir"])
        assert progress["rollout/episodic_return"] == progress["rollout/episodic_length"]
        assert set(progress["rollout/LTA_return"]) == set(progress["rollout/mean_reward"]) == {1.0}
        assert all(1 < length < 5 for length in progress["rollout/episodic_length"])
        assert progress["eval/mean_return"][-1] == progress["eval/mean_length"][-1] == result["mean_return"]


def test_average_reward_mode(continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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
    both = [columns(run_tiny(average_reward_rate=0.1, gamma=gamma)["logdir"]) for gamma in (0.99, 1.0)]
    assert both[0]["train/average_reward"] == both[1]["train/average_reward"]  # normalised as with 0.99
    flags = f"--resume --logdir {run_tiny(norm_reward=False)['logdir']} --average-reward-rate 0.1 --total-timesteps 320"
    later = columns(continuous.train(continuous.parse_args(flags.split()))["logdir"])
    first = later["train/average_reward"].count(0.0)  # as many updates were without
    assert later["train/average_reward"][first] == pytest.approx(later["rollout/mean_reward"][first], rel=1e-5)


def test_the_horizon_grows_over_the_run(continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 / (1 - gamma) is 10 in the first of four updates and doubles from one to the next: 160 at their end."""
    calls = spy(monkeypatch, continuous, "compute_gae")
    run_tiny(total_timesteps=4 * 64, gamma=0.9, horizon_growth=16)
    assert [1 / (1 - gamma) for (*_, gamma, _), _ in calls] == pytest.approx([10, 20, 40, 80])


def test_no_fall_ends_an_average_reward(continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a fall, worth 0, would be worth the average, more than a hard step. One in the limit's step is one too."""
    calls = spy(monkeypatch, continuous, "compute_gae")
    for rate in (0, 0.1):
        run_tiny(average_reward_rate=rate, total_timesteps=64, **KNOWN, **PLAIN)
    falls, limits = (x.bool() for x in calls[0][0][3:5])
    assert min((falls & limits).sum(), (falls & ~limits).sum(), (limits & ~falls).sum()) > 0
    (_, v, next_v, terminations, truncations, _, _), _ = calls[1]
    assert not terminations.any()
    assert torch.equal(truncations.bool(), limits & ~falls)
    goes_on = ~(limits & ~falls)[:-1]
    torch.testing.assert_close(next_v[:-1][goes_on], v[1:][goes_on])  # across falls too


def test_the_best_average_is_kept(run_tiny: Run) -> None:
    progress = columns(run_tiny(num_envs=2, num_steps=32, reset_steps=128, total_timesteps=64 * 9)["logdir"])
    averages = np.nan_to_num(progress["rollout/LTA_return"], nan=-np.inf)
    assert progress["train/best_LTA"] == list(np.maximum.accumulate(averages))
    np.testing.assert_array_equal(np.isnan(progress["rollout/episodic_return"]), np.isinf(averages))  # none is repeated


def test_the_critics_learning_rate(continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's first step moves every weight with a gradient by its learning rate; both fall alike."""
    calls = spy(monkeypatch, continuous, "take_steps")
    settings = {"num_minibatches": 1, "update_epochs": 1, "log_std_init": -1.0, "total_timesteps": 128}
    run_tiny(learning_rate=1e-3, critic_learning_rate=5e-3, **settings)
    run_tiny(learning_rate=1e-3, **settings)
    (before, *_), (after, *_) = (call[0][2:] for call in calls[:2])
    moved = (after - before).abs()
    rates = [args[3]["learning_rate"] for args, _ in calls]
    assert rates[0].unique().tolist() == pytest.approx([1e-3, 5e-3])
    assert rates[2].unique().tolist() == pytest.approx([1e-3])
    torch.testing.assert_close(rates[1], rates[0] / 2)
    assert float(moved[rates[0] < 2e-3].max()) == pytest.approx(1e-3, rel=0.05)
    assert float(moved[rates[0] > 2e-3].max()) == pytest.approx(5e-3, rel=0.05)
    (agent, *_), _ = calls[0]
    critic = sum(p.numel() for name, p in agent.named_parameters() if name.startswith("critic"))
    assert int((rates[0] > 2e-3).sum()) == critic


def test_the_kl_limit_ends_an_update_after_the_epoch_that_exceeds_it(
    continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TARGET | {"learning_rate": 0.03, "update_epochs": 8}
    stopped = run_tiny(target_kl=0.02, **settings)
    progress = columns(stopped["logdir"])
    assert 3 <= stopped["epochs"] == progress["counters/epochs"][-1] < 3 * 8
    assert progress["counters/minibatch_updates"][-1] == 2 * stopped["epochs"]
    free, generous = run_tiny(**settings), run_tiny(target_kl=1e9, **settings)
    assert free["epochs"] == generous["epochs"] == 3 * 8
    assert_same(weights(free["logdir"]), weights(generous["logdir"]))
    assert max(columns(free["logdir"])["train/approx_kl"]) > 0.02
    steps, kls = continuous.take_steps, itertools.cycle([0.0, 0.0, 0.03])  # of that epoch, not of all so far
    monkeypatch.setattr(continuous, "take_steps", lambda *a: steps(*a) | {"approx_kl": torch.full((2,), next(kls))})
    assert run_tiny(target_kl=0.02, **settings)["epochs"] == 3 * 3


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


@pytest.fixture(scope="module")
def finished(continuous: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short finished run of KnownValues-v0."""
    logdir = tmp_path_factory.mktemp("finished") / "run"
    continuous.train(tiny_args(continuous, logdir, eval_every=64, eval_episodes=4, **KNOWN))
    return logdir


def lengths_from(seed: int, episodes: int) -> list[int]:
    """Of episodes of KnownValues-v0: one starts at k drawn with its seed, and is cut after 5 steps."""
    return [min(5, int(np.random.default_rng(seed + i).integers(1, 9))) for i in range(episodes)]


def test_best_is_of_the_best_evaluation(run_tiny: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = TARGET | {"eval_every": 64, "learning_rate": 0.02, "total_timesteps": 640}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "best.json").write_text(json.dumps({"problem": "Target-v0", "score": 1e9}))
    results = [run_tiny(seed=seed, **settings) for seed in (1, 2)]
    for result in results:
        progress, logdir = columns(result["logdir"]), Path(result["logdir"])
        assert result["best_return"] == max(progress["eval/mean_return"])
        best = torch.load(logdir / "best.pt", weights_only=True)["run"]
        assert best["best_return"] == best["mean_return"] == result["best_return"]
        assert progress["eval/mean_return"][progress["global_step"].index(best["global_step"])] == result["best_return"]
        assert json.loads((logdir / "best.json").read_text())["score"] == result["best_return"]
    assert max(results, key=lambda result: result["best_return"])["logdir"] in capsys.readouterr().out.splitlines()[-1]


def test_without_a_time_limit_a_lost_episode_gets_its_1000_steps_too(continuous: ModuleType, tmp_path: Path) -> None:
    values = {"num_workers": 3, "step_timeout": 70.0, "on_worker_failure": "restart"}
    args = tiny_args(continuous, tmp_path, reset_steps=None, **values)
    vec_env, processes = continuous.make_envs(args, 4), []
    assert (vec_env.unwrapped.num_workers, vec_env.unwrapped._pool.step_timeout) == (3, 70.0)

    def step(actions: np.ndarray, step: Any = vec_env.step) -> Any:
        processes.append(vec_env.unwrapped._pool.workers[0].process)
        if len(processes) == 900:
            processes[0].kill()
        return step(actions)

    vec_env.step = step
    assert continuous.evaluate(continuous.Agent(vec_env, args), vec_env)[1].tolist() == [1000] * 4
    assert processes[0] != processes[-1]


def test_tracking_is_given_the_project_and_the_runs_name(run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: given.append(options)))
    logdir = run_tiny(track="robots")["logdir"]
    assert (given[0]["project"], given[0]["id"], given[0]["sync_tensorboard"]) == ("robots", Path(logdir).name, True)
    assert given[0]["reinit"] == "finish_previous"  # the next run of a sweep is one of its own
    assert (given[0]["resume"], given[0]["config"]["track"]) == ("allow", "robots")


def test_a_run_starts_from_the_policy_that_it_is_given(continuous: ModuleType, run_tiny: Run, tmp_path: Path) -> None:
    """Its statistics of observations included, and with any settings."""
    start = Path(run_tiny()["logdir"]) / "latest.pt"
    going_on = run_tiny(init_from=str(start), total_timesteps=64, learning_rate=1e-9, gamma=0.5)
    before, after = (continuous.load(path) for path in (start, Path(going_on["logdir"]) / "latest.pt"))
    assert after["statistics"]["count"] == pytest.approx(before["statistics"]["count"] + 4 + 64)  # a reset and steps
    assert after["run"]["global_step"] == 64
    with pytest.raises(continuous.UsageError, match="another network"):
        run_tiny(init_from=str(start), hidden_sizes=[8])
    start.unlink()  # a resumed run needs it no more
    assert run_tiny(logdir=going_on["logdir"], resume=True, init_from=str(start), total_timesteps=128)["rollouts"] == 2


def test_evaluation_is_repeatable_frozen_and_on_its_own_seeds(continuous: ModuleType, finished: Path) -> None:
    checkpoint = continuous.load(finished / "latest.pt")
    args, statistics = continuous.Args(**checkpoint["args"]), RunningMeanStd((1,))
    vec_env = continuous.make_envs(args, 4, statistics)
    agent = continuous.Agent(vec_env, args)
    continuous.load_policy(checkpoint, agent, statistics)
    frozen = statistics.get_state()
    first, again = (continuous.evaluate(agent, vec_env) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert_same(statistics.get_state(), frozen)
    expected = lengths_from(10_000, 4)
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
    assert f"mean return {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}" == out.splitlines()[-1]
    assert returns == lengths_from(0, 3)
    assert run_main(*argv)[1] == out == run_main(*argv[:1], *argv[3:], "--checkpoint", str(finished / "best.pt"))[1]
    assert run_main(*argv, "--checkpoint", "latest", "--stochastic")[0] == 0
    assert "return -" in run_main(*argv, "--env-id", "Target-v0")[1] != out  # another task of the same shapes


def test_play_plays_the_policy_and_the_statistics_of_the_checkpoint(continuous: ModuleType, run_tiny: Run) -> None:
    logdir = run_tiny(env_id="Hopper-v5", reset_steps=40, learning_rate=0.01)["logdir"]
    play = {"logdir": logdir, "checkpoint": "latest", "episodes": 2, "seed": 10_000}
    returns = continuous.play(continuous.PlayArgs(**play))
    progress = columns(logdir)
    assert np.mean(returns) == pytest.approx(progress["eval/mean_return"][-1], rel=1e-5)
    assert np.std(returns) == pytest.approx(progress["eval/std_return"][-1], rel=1e-3)
    sampled, again = (continuous.play(continuous.PlayArgs(**play, stochastic=True)) for _ in range(2))
    assert sampled == again != returns
    play |= {"episodes": 1, "seed": 10_001}
    assert continuous.play(continuous.PlayArgs(**play, stochastic=True)) == sampled[1:]


def test_gifs_are_as_asked_for(finished: Path, run_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As KnownValues-v0 shows 20 pictures a second, 10 are every second of its steps."""
    monkeypatch.setattr(
        known_values.SmallEnv, "render", lambda self: np.full((400, 600, 3), int(self.state[0]) * 30, np.uint8)
    )
    argv = ["play", "--logdir", str(finished), "--episodes", "2", "--save-gif", "--gif-dir", str(tmp_path / "gifs")]
    for flags, pictures, duration in (
        ([], 5, 50),
        (["--gif-fps", "10"], 3, 100),
        (["--gif-fps", "15"], 3, 100),
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
    monkeypatch.setenv("DISPLAY", ":0")  # so that it gets as far as to film
    code, _, err = run_main(*argv, "--render")
    assert (code, "A film needs environments that draw" in err) == (2, True), err


def test_a_robot_can_be_filmed(continuous: ModuleType, run_tiny: Run, tmp_path: Path) -> None:
    """In a process of its own, because MuJoCo chooses its graphics when it is imported."""
    run_tiny(env_id="InvertedPendulum-v5", reset_steps=8, total_timesteps=64, logdir=tmp_path / "run")
    result = run_program(continuous, tmp_path, "play", "--logdir", "run", "--save-gif")
    if result.returncode and re.search("EGL|OpenGL", result.stderr):
        pytest.skip("MuJoCo cannot render here")
    assert result.returncode == 0, result.stderr
    (path,) = (tmp_path / "run" / "gifs").glob("*.gif")
    with PIL.Image.open(path) as gif:
        assert gif.size == (320, 320)
        assert getattr(gif, "n_frames", 1) > 1


def test_a_terminal_shows_one_live_line(run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with a clock that moves on by 30 s when it is read, twice an update."""
    terminal = io.StringIO()
    monkeypatch.setattr(time, "perf_counter", itertools.count(0, 30).__next__)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    result = run_tiny()
    progress = columns(result["logdir"])
    assert (result["seconds"], progress["time/sps"]) == (90, pytest.approx([64 / 30] * 3))
    live = terminal.getvalue().replace("\033[?7h", "").split("\r\033[K\033[?7l")[1:]  # cut off, not wrapped
    assert [text.partition(" steps, ")[0] for text in live] == ["64", "128", "192"]
    assert "\n" not in live[0] + live[1]
    assert live[2].count("\n") == 3  # the last one, the summary, and the best of all runs
    assert live[0].endswith("KL 0.0000")  # no estimate from the update that warms up
    assert re.search(r"return -\d+\.\d\d, evaluation nan, KL \S+, 0\.5 min left$", live[1])
    assert f"KL {progress['train/approx_kl'][1]:.4f}, " in live[1]


NOT_FINITE = {  # environment 2 has seed 3, which is poisoned in its 20th step: in the second update
    "of environment 2 is not finite in step 20 of its episode": {"env_id": "Poison-v0", "reset_steps": 100},
    "gradient is not finite after step .*: lower --learning-rate": {"learning_rate": 1e9, "max_grad_norm": None},
}


@pytest.mark.parametrize("text", NOT_FINITE)
def test_a_number_that_is_not_finite_changes_no_checkpoint(
    continuous: ModuleType, run_main: Main, tmp_path: Path, text: str
) -> None:
    values = {"save_every": 64, "total_timesteps": 640} | NOT_FINITE[text]
    code, _, err = run_main(*tiny_flags(continuous, tmp_path / "run", **values))
    assert (code, err.count("\n")) == (1, 1)
    assert re.match(f"error: .*{text}", err)
    latest = tmp_path / "run" / "latest.pt"
    assert latest.exists() or "gradient" in text
    assert not latest.exists() or all(torch.isfinite(x).all() for x in weights(latest.parent).values())


def test_a_lost_worker_ends_the_run_with_the_command_that_resumes_it_or_is_replaced(
    continuous: ModuleType, run_main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, died = known_values.KnownValuesEnv.step, tmp_path / "died"

    def deadly(self: Any, action: Any) -> Any:
        if not died.exists() and any(tmp_path.glob("*/latest.pt")):  # there is something to resume
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, action)

    monkeypatch.setattr(known_values.KnownValuesEnv, "step", deadly)
    values = KNOWN | {"total_timesteps": 320, "save_every": 1, "num_workers": 2}
    code, _, err = run_main("train", *tiny_flags(continuous, tmp_path / "a", **values))
    assert code == 1
    assert "SIGKILL" in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].endswith(f"--env-id KnownValues-v0 --resume --logdir {tmp_path / 'a'}")
    died.unlink()
    code, _, err = run_main(*tiny_flags(continuous, tmp_path / "b", **values, on_worker_failure="restart"))
    assert (code, died.exists()) == (0, True), err
    assert columns(tmp_path / "b")["global_step"][-1] == 320


def test_it_solves_a_task_of_known_optimum(run_tiny: Run) -> None:
    """Target-v0: the best return is 0, doing nothing earns -0.083; 12 000 steps must come within 0.01 of the best."""
    assert run_tiny(**TARGET_RUN)["mean_return"] > -0.01


def test_it_learns_to_leave_no_queue_waiting_without_discounting(run_tiny: Run) -> None:
    """With average reward. Serving a queue whenever one waits has the least mean backlog, 1.33; noise has 4.5."""
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
