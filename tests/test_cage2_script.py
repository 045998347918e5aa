"""ppo_cage2_parallel.py: what Blue remembers, what its actions mean, how runs are trained, resumed, scored and played.

The mathematics that all scripts share is tested in test_ppo_math.py. `pytest --script my_copy.py` runs this file on a
copy of the script.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from envs.cage2 import ACTION_NAMES, DECOYS, HOSTS, Cage2VecEnv
from envs.cage2.memory import DECOY_SLOTS
from tests.conftest import ROOT, assert_same, can_compile, command_line, spy
from tests.test_resume import fork, wait

BEST = ROOT / "results" / "cage2_best.pt"
WINNER = -54.57  # the score of the challenge's winner: the sum of nine mean returns


def tiny_args(script: ModuleType, logdir: Path, **values: Any) -> Any:
    """Arguments of a run of about a second: four updates of 8 x 25 steps, episodes of 20."""
    tiny: dict[str, Any] = {
        "logdir": str(logdir), "total_timesteps": 800, "num_envs": 8, "num_steps": 25, "num_minibatches": 2,
        "update_epochs": 2, "max_steps": 20, "eval_every": 0, "eval_episodes": 4, "save_every": 0, "compile": False,
        "hidden_sizes": (8, 8), "num_workers": 1,
    }  # fmt: skip
    return script.Args(**(tiny | values))


@pytest.fixture
def run_main(cage2: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    return command_line(cage2, capsys)


@pytest.fixture
def quiet(cage2: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without curves.png, most of the time of so short a run; inherited by forked children."""
    monkeypatch.setattr(cage2, "plot_curves", lambda logdir: None)


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_every_preset_is_accepted(cage2: ModuleType) -> None:
    for name in cage2.PRESETS:
        args = cage2.parse_args(["--configs", name])
        cage2.validate(args)
        assert all(getattr(args, key) == value for key, value in cage2.PRESETS[name].items()), name


def test_the_document_preset_has_the_documents_sizes(cage2: ModuleType) -> None:
    args = cage2.parse_args(["--configs", "document"])
    assert (args.num_envs, args.num_steps, args.max_steps, args.batch_size) == (25, 100, 100, 2500)
    assert (args.update_epochs, args.minibatch_size, args.hidden_sizes) == (4, 2500, (64, 64))
    assert (args.learning_rate, args.gamma, args.clip_coef, args.ent_coef) == (0.002, 0.99, 0.2, 0.01)
    assert args.total_timesteps == 1250 * 100  # episodes of 100 steps
    assert args.red_agent == "meander"
    assert not args.finite_horizon
    vec_env = cage2.make_envs(args)
    assert vec_env.single_observation_space.shape == (52,)
    assert vec_env.single_action_space.n == 145


def test_a_run_that_may_stop_early_can_be_explained_and_played_at_other_lengths(
    quiet: None, run_main: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Three updates of a probe hold fewer episodes than the stop asks for, and so would games that are longer."""
    flags = ["--configs", "document", "workflow", "--no-compile"]
    code, out, err = run_main(*flags, "--explain")
    assert (code, "50 updates" in out) == (0, True), err
    assert (
        run_main(*flags, "--min-episodes", "1", "--total-timesteps", "5000", "--logdir", str(tmp_path / "run"))[0] == 0
    )
    play = ["play", "--logdir", str(tmp_path / "run"), "--episodes", "1", "--max-steps", "120"]
    code, out, err = run_main(*play)
    assert (code, len(json.loads(out.splitlines()[-1])["returns"])) == (0, 1), err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env-id", "CartPole-v1"], ["CAGE2-v0", "'CartPole-v1'"]),
        (["--num-envs", "25", "--num-minibatches", "7"], ["7", "2500"]),
        (["--max-steps", "0"], ["--max-steps", "0"]),
        (["--reward-scale", "-1"], ["--reward-scale", "-1"]),
        (["--configs", "documents"], ["documents", "document"]),
        (["--total-timesteps", "100"], ["100", "25600"]),
        (["play", "--logdir", "/nowhere"], ["/nowhere"]),
        (["--init-from", "/nowhere.pt"], ["no checkpoint /nowhere.pt"]),
        (["--init-from", str(BEST), "--hidden-sizes", "8"], [str(BEST), "of other inputs, actions or layers"]),
        (["--alignment", "10"], ["--alignment needs --workflow"]),
        (["--min-episodes", "3"], ["--min-episodes needs --workflow"]),
        (["--workflow", "any", "--alignment", "inf"], ["--alignment", "below 1e38", "inf"]),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(
    run_main: Callable[..., tuple[int, str, str]], flags: list[str], words: list[str]
) -> None:
    code, _, error = run_main(*flags)
    assert code == 2
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    assert all(word in error for word in words), error


def test_sigterm_saves_and_exits_with_143(
    cage2: ModuleType, quiet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update in which it comes is finished."""
    logdir, output, compute_gae = tmp_path / "run", tmp_path / "output.txt", cage2.compute_gae

    def signalled(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return compute_gae(*args)

    monkeypatch.setattr(cage2, "compute_gae", signalled)
    argv = ["--configs", "debug", "--num-envs", "4", "--logdir", str(logdir)]
    assert wait(fork(lambda: cage2.main(argv), output)) == 143, output.read_text()
    assert f"continue with --resume --logdir {logdir}" in output.read_text()
    assert cage2.read_csv(logdir / "progress.csv")["global_step"].tolist() == [400]
    assert cage2.load_checkpoint(logdir / "latest.pt")["counters"]["global_step"] == 400


@can_compile
def test_a_compiled_run_is_close_to_an_eager_one(
    cage2: ModuleType,
    quiet: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--compile is the default, so all results are of it."""
    calls, runs = spy(monkeypatch, torch, "compile"), []
    for compiled in (True, False):
        logdir = tmp_path / str(compiled)
        cage2.train(tiny_args(cage2, logdir, compile=compiled, num_minibatches=1))
        runs.append(cage2.load_checkpoint(logdir / "latest.pt")["agent"])
    assert [function.__name__ for (function, *_), _ in calls] == ["take_steps"]
    assert "so --compile is off" not in capsys.readouterr().out
    for name, tensor in runs[1].items():
        torch.testing.assert_close(runs[0][name], tensor, rtol=1e-3, atol=1e-4, msg=name)


# ---- actions --------------------------------------------------------------------------------------------------------


def test_reduced_actions_are_four_verbs_on_nine_hosts(cage2: ModuleType) -> None:
    hosts = ["Defender", "Enterprise0", "Enterprise1", "Enterprise2", "Op_Server0", "User1", "User2", "User3", "User4"]
    vec_env = cage2.make_envs(cage2.Args(num_envs=36))
    vec_env.reset(seed=0)
    names = [ACTION_NAMES[action] for action in vec_env.game_actions(np.arange(36))]
    assert names[:27] == [f"{verb} {host}" for verb in ("Analyse", "Remove", "Restore") for host in hosts]
    assert [name.split()[1] for name in names[27:]] == hosts
    assert all(name.startswith("Decoy") for name in names[27:])


def test_next_decoys_start_one_after_the_other_and_again_after_a_restore(cage2: ModuleType) -> None:
    """What can run where is the specification's table (SPEC 6.1); the true state confirms that it runs."""
    expected = {"Defender": 4, "Enterprise0": 4, "Enterprise1": 1, "Enterprise2": 1, "Op_Server0": 4,
                "User1": 4, "User2": 4, "User3": 2, "User4": 1}  # fmt: skip
    vec_env = cage2.make_envs(cage2.Args(num_envs=9, red_agent="sleep"))
    game = vec_env.env
    vec_env.reset(seed=0)
    hosts = [HOSTS.index(name) for name in expected]
    decoy, restore = np.arange(27, 36), np.arange(18, 27)

    def standing() -> list[int]:
        return [int(game.true_state()["decoys"][n, host]).bit_count() for n, host in enumerate(hosts)]

    for count in range(1, 7):  # asked for more than there is room for: nothing more happens
        vec_env.step(decoy)
        assert standing() == [min(count, most) for most in expected.values()]
    vec_env.step(restore)
    assert standing() == [0] * 9
    vec_env.step(decoy)
    assert standing() == [1] * 9


def test_the_first_decoy_is_the_one_against_reds_favourite(cage2: ModuleType) -> None:
    vec_env = cage2.make_envs(cage2.Args(num_envs=36))
    vec_env.reset(seed=0)
    first = {ACTION_NAMES[a].split()[1]: ACTION_NAMES[a].split()[0] for a in vec_env.game_actions(np.arange(36))[27:]}
    # The openings of the challenge's winner: actions 51 and 55.
    assert first["User2"] == "DecoyFemitter"
    assert first["Enterprise0"] == "DecoyHarakaSMPT"


def test_full_actions_are_the_games_own(cage2: ModuleType) -> None:
    vec_env = cage2.make_envs(cage2.Args(num_envs=145, actions="full"))
    vec_env.reset(seed=0)
    assert vec_env.single_action_space.n == 145
    np.testing.assert_array_equal(vec_env.game_actions(np.arange(145)), np.arange(145))


# ---- memory ---------------------------------------------------------------------------------------------------------


def remembered(history: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """Blue's memory after these (action, observation) pairs of one episode, by plain counting."""
    after = len(history)
    fading = 0.8
    verbs = [ACTION_NAMES[action].split() for action, _ in history]

    def trace(times: list[int]) -> float:  # 1 in the last step, 0.8 a step earlier, ...
        return fading ** (after - 1 - times[-1]) if times else 0.0

    traces = {}
    for host, name in enumerate(HOSTS):
        for verb in ("Analyse", "Remove", "Restore"):
            traces[verb, host] = trace([t for t, words in enumerate(verbs) if words == [verb, name]])
        bits = [tuple(obs[4 * host : 4 * host + 2]) for _, obs in history]
        for kind, pattern in (("Scan", (1, 0)), ("Exploit", (1, 1))):
            times = [t for t, seen in enumerate(bits) if seen == pattern]
            traces[kind, host] = trace(times)
            traces[f"ever {kind}", host] = float(bool(times))
    kinds = ("Analyse", "Remove", "Restore", "Scan", "Exploit", "ever Scan", "ever Exploit")
    memory = [traces[kind, host] for kind in kinds for host in range(13)]
    for host, d in DECOY_SLOTS:
        started = [t for t, w in enumerate(verbs) if w == [f"Decoy{DECOYS[d].name}", HOSTS[host]]]
        restored = [t for t, w in enumerate(verbs) if w == ["Restore", HOSTS[host]]]
        memory.append(float(bool(started) and started[-1] > max(restored, default=-1)))
    return np.array([*memory, 0.7**after, 0.95**after], np.float32)


@pytest.mark.parametrize("actions", ["reduced", "full"])
def test_memory_equals_a_plain_count_over_blues_own_history(cage2: ModuleType, actions: str) -> None:
    """Also that it starts anew with each episode, that the final observation has the memory of the episode that ended,
    and that nothing but observations and actions enters: the oracle sees nothing else."""
    vec_env = cage2.make_envs(cage2.Args(num_envs=6, actions=actions, max_steps=25))
    rng = np.random.default_rng(0)
    obs, _ = vec_env.reset(seed=3)
    assert obs.shape == (6, 186) == vec_env.observation_space.shape
    history: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(6)]
    endings = 0
    for _ in range(60):
        action = rng.integers(0, vec_env.single_action_space.n, 6)
        game_actions = vec_env.game_actions(action)
        obs, _, terminated, truncated, infos = vec_env.step(action)
        assert not terminated.any()
        for n in range(6):
            last = infos["final_obs"][n] if truncated[n] else obs[n]
            history[n].append((int(game_actions[n]), last[:52]))
            np.testing.assert_allclose(last[52:], remembered(history[n]), rtol=1e-5, atol=1e-12)
            if truncated[n]:
                endings += 1
                history[n] = []
                np.testing.assert_array_equal(obs[n][:52], 0)
                np.testing.assert_allclose(obs[n][52:], remembered([]))
    assert endings == 12


def test_the_true_state_does_not_leak_into_the_inputs(cage2: ModuleType) -> None:
    """Two games that differ in truth (B_line and Meander, and what they hold), shown the same observations."""

    class SameView(Cage2VecEnv):
        shown = np.random.default_rng(1).integers(0, 2, (50, 4, 52)).astype(np.float32)
        count = 0

        def step(self, actions: Any, draws: Any = None) -> Any:
            _, rewards, terminated, truncated, infos = super().step(actions, draws)
            SameView.count += 1
            return self.shown[(SameView.count - 1) % 50].copy(), rewards, terminated, truncated, infos

    inputs, truths = [], []
    for red_agent in ("b_line", "meander"):
        SameView.count = 0
        game = SameView(4, red_agent, state_in_info=True)
        vec_env = cage2.Memory(game, memory=True, reduced_to=cage2.REDUCED_HOSTS)
        vec_env.reset(seed=5)
        rng = np.random.default_rng(2)
        inputs.append([vec_env.step(rng.integers(0, 36, 4))[0] for _ in range(50)])
        truths.append(game.true_state()["red_access"].copy())
    np.testing.assert_array_equal(*inputs)
    assert (truths[0] != truths[1]).any()


@pytest.mark.parametrize(
    "settings",
    [{}, {"green": True}, {"version": "head"}, {"wrapper": "cardiff"}, {"red_agent": "meander"}, {"max_steps": 7}],
    ids=str,
)
def test_without_memory_observations_and_rewards_are_those_of_the_game_with_these_settings(
    cage2: ModuleType, settings: dict[str, Any]
) -> None:
    vec_env = cage2.make_envs(cage2.Args(num_envs=50, memory=False, **settings))
    defaults = {"red_agent": cage2.RED_MIXTURE, "version": "leaderboard"}
    games = [Cage2VecEnv(50, **defaults | settings), Cage2VecEnv(50, **defaults)]
    for env in (vec_env, *games):
        obs, _ = env.reset(seed=1)
        assert not obs.any()
    rng, differ = np.random.default_rng(0), False
    for _ in range(50):
        actions = rng.integers(0, 36, 50)
        game_actions = vec_env.game_actions(actions)
        played = [vec_env.step(actions)[:4], *(game.step(game_actions)[:4] for game in games)]
        assert_same(played[0], played[1])
        differ |= any((a != b).any() for a, b in zip(played[1], played[2], strict=True))
    assert differ == bool(settings)


def test_a_finite_horizon_terminates_and_shows_the_time(cage2: ModuleType) -> None:
    vec_env = cage2.make_envs(cage2.Args(num_envs=2, max_steps=10, finite_horizon=True))
    obs, _ = vec_env.reset(seed=0)
    assert obs.shape == (2, 187)
    for step in range(1, 11):
        obs, _, terminated, truncated, infos = vec_env.step(np.zeros(2, int))
        assert not truncated.any()
        assert terminated.all() == (step == 10)
        shown = infos["final_obs"][0] if step == 10 else obs[0]
        assert shown[-1] == np.float32(step / 10)
    assert obs[0, -1] == 0


# ---- policy ---------------------------------------------------------------------------------------------------------


def test_gumbel_noise_samples_from_the_policy_and_zeros_take_its_mode(cage2: ModuleType) -> None:
    torch.manual_seed(0)
    vec_env = cage2.make_envs(cage2.Args(num_envs=1))
    agent = cage2.Agent(vec_env, cage2.Args())
    with torch.no_grad():
        agent.actor[-1].weight.mul_(400)  # far from uniform
        obs = torch.rand(1, 186)
        probabilities = torch.softmax(agent.actor(obs), -1)[0]
        noise = cage2.gumbel_noise((100_000, 36), "cpu", torch.Generator().manual_seed(1))
        frequencies = agent.get_action(obs, noise).bincount(minlength=36) / 100_000
        standard_error = (probabilities * (1 - probabilities) / 100_000).sqrt()
        assert ((frequencies - probabilities).abs() < 5 * standard_error + 1e-4).all()
        assert probabilities.max() > 0.15
        assert agent.get_action(obs, torch.zeros(1, 36)).item() == probabilities.argmax()


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_cells_are_prefixes_and_equal_separate_shorter_episodes(cage2: ModuleType) -> None:
    """The claim on which `evaluate` rests: with equal seeds, episodes of 30 and of 100 steps begin alike."""
    torch.manual_seed(0)
    args = cage2.Args(num_envs=1, eval_episodes=5)
    agent = cage2.Agent(cage2.make_envs(args), args)
    long = cage2.evaluate(agent, args)
    assert list(long["cells"]) == [f"{red}_{h}" for red in ("b_line", "meander", "sleep") for h in (30, 50, 100)]
    assert long["score"] == pytest.approx(sum(mean for mean, _ in long["cells"].values()))
    for horizon in (30, 50):
        short = cage2.evaluate(agent, replace(args, max_steps=horizon))["cells"]
        for red in ("b_line", "meander", "sleep"):
            assert short[f"{red}_{horizon}"] == long["cells"][f"{red}_{horizon}"]
    assert cage2.evaluate(agent, args) == long  # fixed seeds
    timed = replace(args, finite_horizon=True)  # Blue sees how long an episode is, so none stands for a shorter one
    cells = cage2.evaluate(cage2.Agent(cage2.make_envs(timed), timed), timed)["cells"]
    assert list(cells) == ["b_line_100", "meander_100", "sleep_100"]


def test_prefix_returns_by_hand(cage2: ModuleType) -> None:
    rewards = np.full((100, 2), -1.0)
    rewards[40, 1] = -5.0
    cells = cage2.prefix_returns({"b_line": rewards})
    assert cells == {"b_line_30": [-30.0, 0.0], "b_line_50": [-52.0, 2.0], "b_line_100": [-102.0, 2.0]}
    short = cage2.prefix_returns({"sleep": rewards[:40]})
    assert short == {"sleep_30": [-30.0, 0.0], "sleep_40": [-40.0, 0.0]}
    long = cage2.prefix_returns({"b_line": np.concatenate([rewards, rewards[:20]])})
    assert long == cells | {"b_line_120": [-122.0, 2.0]}  # else what happens after 100 steps would not count
    assert cage2.prefix_returns({"b_line": rewards}, finite_horizon=True) == {"b_line_100": [-102.0, 2.0]}


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_leaves_what_the_docstring_says(cage2: ModuleType, tmp_path: Path) -> None:
    result = cage2.train(tiny_args(cage2, tmp_path / "run", eval_every=400, capture_video=True))
    run = tmp_path / "run"
    names = ("config.json", "progress.csv", "timing.csv", "eval.csv", "best.pt", "latest.pt", "curves.png")
    assert all((run / name).stat().st_size > 0 for name in names)
    assert list(run.glob("videos/*.gif"))
    progress = cage2.read_csv(run / "progress.csv")
    np.testing.assert_array_equal(progress["global_step"], [200, 400, 600, 800])
    np.testing.assert_array_equal(progress["rollout/resets"], [8, 16, 24, 40])
    np.testing.assert_allclose(progress["train/ent_coef"], [1e-3, 7.5e-4, 5e-4, 2.5e-4], rtol=1e-5)
    assert result["global_step"] == 800
    assert result["best_return"] == cage2.read_csv(run / "eval.csv")["eval/score"].max()


def test_both_vector_environments_train_the_same_weights(cage2: ModuleType, quiet: None, tmp_path: Path) -> None:
    agents = []
    for kind in ("batch", "subproc"):
        cage2.train(tiny_args(cage2, tmp_path / kind, vec_env=kind, red_agent="meander"))
        agents.append(torch.load(tmp_path / kind / "latest.pt", weights_only=True)["agent"])
    assert_same(*agents)


def test_seconds_of_training_halve_the_loss_of_the_untrained_policy(
    cage2: ModuleType, quiet: None, tmp_path: Path
) -> None:
    """Against B_line for 30 steps; the difference must be ten standard errors too."""
    args = tiny_args(cage2, tmp_path / "run", total_timesteps=30_000, num_envs=32, num_steps=30, max_steps=30,
                     red_agent="b_line", hidden_sizes=(64, 64), update_epochs=4, learning_rate=4e-3,
                     eval_episodes=200)  # fmt: skip
    torch.manual_seed(args.seed)
    untrained = cage2.evaluate(cage2.Agent(cage2.make_envs(args), args), args, deterministic=False)
    cage2.train(args)
    trained_agent = cage2.Agent(cage2.make_envs(args), args)
    trained_agent.load_state_dict(torch.load(tmp_path / "run" / "latest.pt", weights_only=True)["agent"])
    trained = cage2.evaluate(trained_agent, args, deterministic=False, seed=77_000)
    gain = trained["mean_return"] - untrained["mean_return"]
    error = math.hypot(untrained["std_return"], trained["std_return"]) / math.sqrt(200)
    assert gain > 10 * error
    assert trained["mean_return"] > untrained["mean_return"] / 2


# ---- playing --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def trained(cage2: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run."""
    run = tmp_path_factory.mktemp(cage2.SCRIPT) / "run"
    cage2.train(tiny_args(cage2, run))
    return run


def test_the_standard_error_of_several_opponents_is_that_of_strata(cage2: ModuleType) -> None:
    """Three opponents, two episodes each: variances 2, 0 and 8 over 2 episodes, so sqrt(1 + 0 + 4) / 3."""
    returns = np.array([[-10.0, -12.0], [-50.0, -50.0], [0.0, -4.0]])
    assert cage2.stratified_error(returns) == pytest.approx(math.sqrt(5) / 3)
    assert math.isnan(cage2.stratified_error(returns[:, :1]))


def test_play_of_one_episode_is_still_json(run_main: Callable[..., tuple[int, str, str]], trained: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    code, output, _ = run_main("play", "--logdir", str(trained), "--episodes", "1", "--red-agent", "meander")
    summary = json.loads(output.splitlines()[-1], parse_constant=refuse)
    assert code == 0
    assert summary["standard_error"] is None


def test_play_ends_with_the_summary_as_json(run_main: Callable[..., tuple[int, str, str]], trained: Path) -> None:
    flags = ["play", "--logdir", str(trained), "--episodes", "3", "--red-agent", "meander", "--version", "head"]
    code, output, _ = run_main(*flags)
    summary = json.loads(output.splitlines()[-1])
    assert code == 0
    assert len(summary["returns"]) == 3
    assert summary["mean_return"] == pytest.approx(np.mean(summary["returns"]))
    assert summary["standard_error"] == pytest.approx(np.std(summary["returns"], ddof=1) / math.sqrt(3))
    assert "Blue, actions per episode" in output
    assert "meander: DiscoverRemoteSystems User" in output
    assert json.loads(run_main(*flags)[1].splitlines()[-1]) == summary
    subproc = json.loads(run_main(*flags, "--backend", "subproc")[1].splitlines()[-1])
    assert subproc == summary
    everyone = json.loads(run_main("play", "--logdir", str(trained), "--episodes", "2")[1].splitlines()[-1])
    assert list(everyone["cells"]) == ["b_line_20", "meander_20", "sleep_20"]
    assert everyone["score"] == pytest.approx(sum(mean for mean, _ in everyone["cells"].values()))
    assert len(everyone["returns"]) == 6


def test_play_draws(run_main: Callable[..., tuple[int, str, str]], trained: Path, tmp_path: Path) -> None:
    code, _, _ = run_main("play", "--logdir", str(trained), "--episodes", "1", "--red-agent", "b_line",
                          "--save-gif", "--gif-dir", str(tmp_path), "--save-heatmap")  # fmt: skip
    assert code == 0
    assert len(list(tmp_path.glob("*/b_line_001_return_*.gif"))) == 1
    assert (trained / "actions.png").stat().st_size > 0
    text = run_main("play", "--logdir", str(trained), "--episodes", "1", "--red-agent", "b_line", "--render")[1]
    assert "Step 1 of 20" in text
    assert "Op_Server0" in text


def test_play_says_how_to_install_cyborg(run_main: Callable[..., tuple[int, str, str]], trained: Path) -> None:
    try:
        import CybORG  # noqa: F401
    except ImportError:
        code, _, error = run_main("play", "--logdir", str(trained), "--backend", "cyborg")
        assert code == 2
        assert "github.com/cage-challenge/cage-challenge-2" in error
        assert len(error.strip().splitlines()) == 1
    else:
        code, output, _ = run_main("play", "--logdir", str(trained), "--backend", "cyborg", "--episodes", "2",
                                   "--red-agent", "sleep", "--version", "head")  # fmt: skip
        assert code == 0
        assert len(json.loads(output.splitlines()[-1])["returns"]) == 2


# ---- the shipped policy ---------------------------------------------------------------------------------------------


def test_the_shipped_policy_beats_the_winner(cage2: ModuleType) -> None:
    """One network for all red agents, 200 episodes against each, seeds that no training run evaluates on."""
    assert BEST.stat().st_size < 300 * 1024
    checkpoint = cage2.load_checkpoint(BEST)
    args = replace(cage2.known_args(checkpoint["args"]), eval_episodes=200)
    assert (args.version, args.green, args.red_agent, args.wrapper) == ("leaderboard", False, "mixed", "challenge")
    agent = cage2.Agent(cage2.make_envs(replace(args, num_envs=1)), args)
    agent.load_state_dict(checkpoint["agent"])
    result = cage2.evaluate(agent, args, seed=500_000)
    assert result["cells"]["sleep_100"][0] == 0
    assert result["score"] > WINNER
