"""ppo_cage2_parallel.py: what Blue remembers, what its actions mean, how runs are trained, resumed, scored and played.

The mathematics that all scripts share is tested in test_ppo_math.py. `pytest --script my_copy.py` runs this file on a
copy of the script.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import PIL.Image
import pytest
import torch

from envs.cage2 import ACTION_NAMES, DECOYS, HOSTS, Cage2Env, Cage2VecEnv
from envs.cage2.memory import DECOY_SLOTS, Memory
from envs.cage2.scores import summarize
from envs.vectorize import vectorize
from tests.conftest import assert_same, command_line, spy, tiny_args


def test_the_documents_preset_has_its_sizes(cage2: ModuleType) -> None:
    args = cage2.parse_args(["--configs", "workflow25"])
    assert (args.num_envs, args.num_steps, args.max_steps, args.batch_size) == (25, 100, 100, 2500)
    assert (args.update_epochs, args.num_minibatches, args.hidden_sizes) == (4, 1, (64, 64))
    assert (args.learning_rate, args.gamma, args.clip_coef, args.ent_coef) == (0.002, 0.99, 0.2, 0.01)
    assert args.total_timesteps == 1250 * 100  # episodes of 100 steps
    assert (cage2.preset("head").version, cage2.preset("search").red_agent) == ("head", "meander")
    vec_env = cage2.make_envs(cage2.preset("workflow25", workflow=None, compliance_threshold=None), 2)
    assert vec_env.single_observation_space.shape == (52,)
    assert vec_env.single_action_space.n == 145


def test_actions_are_four_verbs_on_nine_hosts_or_the_games_own(cage2: ModuleType) -> None:
    hosts = ["Defender", "Enterprise0", "Enterprise1", "Enterprise2", "Op_Server0", "User1", "User2", "User3", "User4"]
    vec_env = cage2.make_envs(cage2.Args(), 36)
    vec_env.reset(seed=0)
    names = [ACTION_NAMES[action] for action in vec_env.game_actions(np.arange(36))]
    assert names[:27] == [f"{verb} {host}" for verb in ("Analyse", "Remove", "Restore") for host in hosts]
    first_decoys = {host: verb for verb, host in (name.split() for name in names[27:])}
    assert list(first_decoys) == hosts
    assert all(verb.startswith("Decoy") for verb in first_decoys.values())
    assert [DECOYS[d].name for host, d in DECOY_SLOTS if host == 10] == ["Femitter", "Tomcat", "Apache", "SSHD"]
    # against Red's favourite: the openings of the challenge's winner, actions 51 and 55
    assert (first_decoys["User2"], first_decoys["Enterprise0"]) == ("DecoyFemitter", "DecoyHarakaSMPT")
    vec_env = cage2.make_envs(cage2.Args(actions="full"), 145)
    vec_env.reset(seed=0)
    assert vec_env.single_action_space.n == 145
    np.testing.assert_array_equal(vec_env.game_actions(np.arange(145)), np.arange(145))


def test_next_decoys_start_one_after_the_other_and_again_after_a_restore(cage2: ModuleType) -> None:
    """What can run where is the specification's table (SPEC 6.1); the true state confirms that it runs."""
    expected = {"Defender": 4, "Enterprise0": 4, "Enterprise1": 1, "Enterprise2": 1, "Op_Server0": 4,
                "User1": 4, "User2": 4, "User3": 2, "User4": 1}  # fmt: skip
    vec_env = cage2.make_envs(cage2.Args(red_agent="sleep"), 9)
    game = vec_env.unwrapped
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
    and that nothing of the true state enters: the oracle sees observations and actions alone."""
    vec_env = cage2.make_envs(cage2.Args(actions=actions, max_steps=25), 6)
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
    state = vec_env.get_state()
    kept = copy.deepcopy(state)
    for _ in range(2):
        vec_env.step(action)
        assert_same(state, kept)
        vec_env.set_state(state)
    np.testing.assert_allclose(vec_env.reset()[0][:, 52:], [remembered([])] * 6)


def test_without_memory_observations_and_rewards_are_those_of_the_game_with_these_settings(cage2: ModuleType) -> None:
    mixture = {"b_line": 0.5, "meander": 0.45, "sleep": 0.05}
    defaults, different = {"red_agent": mixture, "version": "leaderboard"}, set()
    for settings in ({}, {"green": True}, {"version": "head"}, {"wrapper": "cardiff"}, {"red_agent": "meander"},
                     {"max_steps": 7}):  # fmt: skip
        vec_env = cage2.make_envs(cage2.Args(memory=False, **settings), 50)
        game, rng, steps = Cage2VecEnv(50, **defaults | settings), np.random.default_rng(0), b""
        assert_same(vec_env.reset(seed=1)[0], game.reset(seed=1)[0])
        for _ in range(50):
            actions = rng.integers(0, 36, 50)
            step = game.step(vec_env.game_actions(actions))[:4]
            assert_same(vec_env.step(actions)[:4], step)
            steps += b"".join(x.tobytes() for x in step)
        different.add(steps)
    assert len(different) == 6


class Stamped(gym.ObservationWrapper):
    """Shows a number before or after the game's bits."""

    def __init__(self, env: gym.Env, first: bool) -> None:
        super().__init__(env)
        self.first, self.observation_space = first, gym.spaces.Box(0.0, 1.0, (53,), np.float64)

    def observation(self, obs: np.ndarray) -> np.ndarray:
        return np.insert(obs.astype(float), 0 if self.first else 52, 0.3)


def test_memory_refuses_bits_that_a_wrapper_has_moved(cage2: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    make_env = cage2.make_env
    for first, memory in ((False, True), (True, True), (True, False)):
        monkeypatch.setattr(cage2, "make_env", lambda *given, first=first: Stamped(make_env(*given), first))
        vec_env = cage2.make_envs(cage2.Args(num_workers=1, memory=memory), 2)
        assert vec_env.reset(seed=0)[0].dtype == np.float32
        refusal: Any = pytest.raises(ValueError, match="Memory reads the game's 52 bits")
        with refusal if first and memory else contextlib.nullcontext():
            vec_env.step(np.zeros(2, int))
        vec_env.close()


def test_a_finite_horizon_terminates_and_shows_the_time(cage2: ModuleType, tmp_path: Path) -> None:
    vec_env = cage2.make_envs(cage2.Args(max_steps=10, finite_horizon=True), 2)
    obs, _ = vec_env.reset(seed=0)
    assert obs.shape == (2, 187)
    for step in range(1, 11):
        obs, _, terminated, truncated, infos = vec_env.step(np.zeros(2, int))
        assert not truncated.any()
        assert terminated.all() == (step == 10)
        assert (infos["final_obs"] if step == 10 else obs)[0][-1] == np.float32(step / 10)
    assert obs[0, -1] == 0
    vec_env.step(np.zeros(2, int))
    assert vec_env.reset()[0][0, -1] == 0
    cage2.train(tiny_args(cage2, tmp_path, max_steps=40, finite_horizon=True))
    assert len({line.count(",") for line in (tmp_path / "progress.csv").read_text().splitlines()}) == 1
    games: Any = vectorize(lambda: gym.Wrapper(Cage2Env()), 2, 2, 60.0, "restart")
    lost = Memory(games, True, (), 100)
    lost.reset(seed=0)
    os.kill(games.env._pool.workers[0].process.pid, signal.SIGKILL)
    assert [x.tolist() for x in lost.step(np.zeros(2, int))[2:4]] == [[False, False], [True, False]]
    assert lost.steps.tolist() == [0, 1]
    lost.close()


def test_cells_equal_separate_shorter_episodes(cage2: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim on which `summarize` rests: with equal seeds, episodes of 30 and of 100 steps begin alike."""
    torch.manual_seed(0)
    args = cage2.Args()
    agent = cage2.Agent(cage2.make_envs(args, 1), args)
    calls = spy(monkeypatch, cage2, "evaluate")
    long = cage2.score(agent, args, 5)
    assert [seed for (_, _, seed), _ in calls] == [10_000, 10_005, 10_010]
    assert [{*env.unwrapped.true_state()["red_agent"].tolist()} for (_, env, _), _ in calls] == [{0}, {1}, {2}]
    cells = [f"{red}_{h}" for red in ("b_line", "meander", "sleep") for h in (30, 50, 100)]
    assert set(cells) <= long.keys()
    assert long["score"] == pytest.approx(sum(long[cell] for cell in cells))
    for horizon in (30, 50):
        short = cage2.score(agent, replace(args, max_steps=horizon), 5)
        for red in ("b_line", "meander", "sleep"):
            assert short[f"{red}_{horizon}"] == long[f"{red}_{horizon}"]
    assert cage2.score(agent, args, 5) == long  # fixed seeds
    make_env = cage2.make_env
    monkeypatch.setattr(cage2, "make_env", lambda *given: gym.wrappers.TimeLimit(make_env(*given), 30))
    ended = cage2.score(agent, replace(args, num_workers=1), 5)
    assert ended == ended | {"b_line_50": long["b_line_30"], "b_line_100": long["b_line_30"]}  # where a wrapper ends it


def test_summaries_by_hand() -> None:
    rewards = np.full((100, 2), -1.0)
    rewards[40, 1] = -5.0
    lengths, fixes = np.array([100, 100]), np.zeros((2, 4), int)
    summary = summarize({"b_line": (rewards, lengths, fixes)}, 100, False, False)
    assert [summary[f"b_line_{h}"] for h in (30, 50, 100)] == [-30, -52, -102]
    assert (summary["score"], summary["mean_return"], summary["std_return"]) == (-184, -102, 2)
    # Blue sees how long an episode is, so none stands for a shorter one
    summary = summarize({"b_line": (rewards, lengths, fixes)}, 100, True, False)
    assert summary["score"] == summary["b_line_100"] == -102
    assert "b_line_30" not in summary
    # The standard error of several opponents is that of strata: three, of variances 2, 0 and 8 over 2 episodes
    returns = {"b_line": [-10.0, -12.0], "meander": [-50.0, -50.0], "sleep": [0.0, -4.0]}
    episodes = {
        red: (np.array([rewards]), np.array([1, 1 + 2 * k]), np.full((2, 4), k))
        for k, (red, rewards) in enumerate(returns.items())
    }
    summary = summarize(episodes, 100, False, True)
    assert summary["standard_error"] == pytest.approx(math.sqrt(1 + 0 + 4) / 3)
    assert (summary["mean_length"], summary["needless_fixes"]) == (2, 1)
    assert summary["std_return"] == pytest.approx(np.std([*returns.values()]))


def test_seconds_of_training_halve_the_loss_of_the_untrained_policy(cage2: ModuleType, tmp_path: Path) -> None:
    """Against B_line for 30 steps; the difference must be ten standard errors too."""
    args = tiny_args(cage2, tmp_path / "run", total_timesteps=30_000, num_envs=32, num_steps=30, max_steps=30,
                     red_agent="b_line", hidden_sizes=(64, 64), update_epochs=4, learning_rate=4e-3)  # fmt: skip
    vec_env = cage2.make_envs(args, 200)
    agent = cage2.Agent(vec_env, args)
    untrained = cage2.evaluate(agent, vec_env, deterministic=False)[0].sum(0)
    cage2.train(args)
    cage2.load_policy(cage2.load(tmp_path / "run" / "latest.pt"), agent)
    trained = cage2.evaluate(agent, vec_env, seed=77_000, deterministic=False)[0].sum(0)
    assert trained.mean() - untrained.mean() > 10 * math.hypot(untrained.std(), trained.std()) / math.sqrt(200)
    assert trained.mean() > untrained.mean() / 2


def test_play_prints_and_writes_gifs(cage2: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And tells how well an order was kept."""
    run_main = command_line(cage2, capsys)
    cage2.train(tiny_args(cage2, tmp_path / "run", workflow="any"))
    argv = ["play", "--logdir", str(tmp_path / "run"), "--episodes", "2"]
    code, out, err = run_main(*argv)
    assert code == 0, err
    for red_agent in ("b_line", "meander", "sleep"):
        assert len(re.findall(rf"{red_agent}, episode \d: return \S+, 20 steps", out)) == 2
    assert run_main(*argv)[1] == out
    sampled, again, later = (run_main(*argv, "--stochastic", "--seed", seed)[1] for seed in "001")
    assert sampled == again
    first, second = (re.findall(r"b_line, episode \d: (.*)", text) for text in (sampled, later))
    assert first[0] != first[1] == second[0]  # of the second seed
    needless = [float(text) for text in re.findall(r"sleep.* needless_fixes (\S+)", sampled)]
    assert needless[0] != needless[1]
    assert needless[2] == pytest.approx(np.mean(needless[:2]))
    assert len({out, run_main(*argv, "--seed", "5")[1], sampled}) == 3
    argv += ["--red-agent", "b_line", "--workflow", "user,defender,enterprise,op_server,op_host"]
    code, out, err = run_main(*argv, "--save-gif", "--gif-dir", str(tmp_path / "gifs"))
    assert (code, "compliance" in out) == (0, True), err
    assert [PIL.Image.open(path).size for path in (tmp_path / "gifs").glob("b_line_*.gif")] == [(760, 440)] * 2
    assert "Op_Server0" in run_main(*argv, "--render")[1]
    cage2.train(tiny_args(cage2, tmp_path / "meander", red_agent="meander"))
    assert cage2.play(cage2.PlayArgs(str(tmp_path / "meander"))).keys() == {"meander"}
    code, _, err = run_main(*argv[:-1], "user")
    assert (code, "Traceback" not in err) == (2, True), err
