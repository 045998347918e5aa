"""What the training loop of each script hands to the mathematics, watched from outside on its own environments.

The learning rate is far below the precision of float32, so that a run's agent is the same from its first step to its
last, and what the loop stored can be computed again.
"""

from __future__ import annotations

import copy
import itertools
import re
import sys
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, assert_same, domain, spy, weights, with_args

# Rollouts in which episodes are cut by their time limit, and terminate too where the domain knows that.
COMMON: dict[str, Any] = {"num_minibatches": 4, "update_epochs": 3, "eval_every": 0, "eval_episodes": 2,
                          "save_every": 0, "learning_rate": 1e-30, "compile": False, "num_workers": 1,
                          "capture_video": False}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "ppo_continuous_mujoco": {"env_id": "KnownValues-v0", "vec_env": "sync", "num_envs": 4, "num_steps": 16,
                              "reset_steps": 5, "norm_obs": False, "norm_reward": False, "hidden_sizes": (8, 8)},
    "ppo_cage2_parallel": {"num_envs": 4, "num_steps": 25, "max_steps": 10, "reward_scale": 0.5,
                           "hidden_sizes": (8, 8)},
    "ppo_atari_mario": {"num_envs": 2, "num_steps": 16, "backend": "nes_py", "max_episode_steps": 6, "stuck_steps": 4,
                        "noop_max": 3, "minibatch_growth": 1, "feature_dim": 16, "amp": False},
}  # fmt: skip
TERMINATE = {"ppo_continuous_mujoco", "ppo_atari_mario"}


@dataclass
class Watched:
    """A finished run of two updates."""

    name: str
    args: Any
    agent: Any  # as it was all along
    checkpoint: dict[str, Any]
    first_obs: np.ndarray
    steps: list[tuple[Any, ...]]  # what each call of vec_env.step returned
    gae: list[tuple[Any, Any]]  # arguments and result of compute_gae, an update each
    minibatches: list[list[torch.Tensor]]  # of every optimiser step
    actions: list[np.ndarray]  # what each call of vec_env.step was given
    action_space: Any
    rates: list[list[float]]  # the learning rates of every optimiser step
    ent_coefs: list[float]  # the weight of the entropy bonus in every loss


@pytest.fixture(scope="module")
def watched(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    tmp_path = tmp_path_factory.mktemp("watched")
    name = domain(Path(str(script.__file__)))
    args = with_args(script, **(COMMON | RUNS[name]), logdir=str(tmp_path / "run"))
    args.total_timesteps = 2 * args.batch_size
    seen: dict[str, list[Any]] = {"first": [], "steps": [], "actions": [], "ent_coefs": []}
    make_envs, ppo_gradients = script.make_envs, script.ppo_gradients

    def noted_gradients(agent: Any, minibatch: Any, args: Any) -> Any:
        seen["ent_coefs"].append(float(args.ent_coef))  # now: it is annealed in place
        return ppo_gradients(agent, minibatch, args)

    def make_watched(*given: Any, **options: Any) -> Any:
        vec_env = make_envs(*given, **options)
        step, reset = vec_env.step, vec_env.reset

        def watched_step(actions: Any) -> Any:
            seen["actions"].append(np.array(actions))
            seen["steps"].append(copy.deepcopy(step(actions)))
            return seen["steps"][-1]

        def watched_reset(**options: Any) -> Any:
            seen["first"].append(copy.deepcopy(reset(**options)))
            return seen["first"][-1]

        if not seen["first"]:  # evaluations make environments of their own, later
            vec_env.step, vec_env.reset = watched_step, watched_reset
        return vec_env

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "make_envs", make_watched)
        patch.setattr(script, "plot_curves", lambda logdir: None)
        patch.setattr(script, "ppo_gradients", noted_gradients)
        gae, gradients, adam = (spy(patch, script, name) for name in ("compute_gae", "ppo_gradients", "adam_step"))
        script.train(args)
    checkpoint = script.load_checkpoint(tmp_path / "run" / "latest.pt")
    vec_env = make_envs(args)
    agent, action_space = script.Agent(vec_env, args), vec_env.single_action_space
    vec_env.close()
    agent.load_state_dict(checkpoint["agent"])
    rates = [[float(rate) for rate in given[3]] for given, _ in adam]
    minibatches = [list(minibatch) for (_, minibatch, _), _ in gradients]
    steps = seen["steps"][: 2 * args.num_steps]
    return Watched(name, args, agent, checkpoint, seen["first"][0][0], steps, gae, minibatches, seen["actions"],
                   action_space, rates, seen["ent_coefs"])  # fmt: skip


def value_of(agent: Any, obs: Any) -> torch.Tensor:
    obs = torch.as_tensor(np.asarray(obs))
    with torch.no_grad():
        return agent.get_value(obs if obs.dtype == torch.uint8 else obs.float())


def test_what_follows_a_step_is_the_final_observation_and_never_that_of_the_reset(watched: Watched) -> None:
    """And terminations are not truncations, and rewards and values belong to their step."""
    args, terminations_seen, distances = watched.args, 0, []
    before = watched.first_obs
    assert len(watched.gae) == 2
    for update, (given, _) in enumerate(watched.gae):
        rewards, values, next_values, terminations, truncations, gamma, gae_lambda = given
        assert (gamma, gae_lambda) == (args.gamma, args.gae_lambda)
        for t in range(args.num_steps):
            obs, reward, terminated, truncated, infos = watched.steps[update * args.num_steps + t]
            scaled = torch.as_tensor(reward * getattr(args, "reward_scale", 1.0), dtype=torch.float32)
            torch.testing.assert_close(rewards[t], scaled)
            assert terminations[t].tolist() == terminated.tolist()
            assert truncations[t].tolist() == truncated.tolist()
            torch.testing.assert_close(values[t], value_of(watched.agent, before), rtol=1e-4, atol=1e-4)
            after, reset = value_of(watched.agent, obs), value_of(watched.agent, obs)
            for n in np.flatnonzero(truncated & ~terminated):
                after[n] = value_of(watched.agent, infos["final_obs"][n][None])[0]
                distances.append(abs(float(after[n] - reset[n])))
            known = torch.as_tensor(~terminated)  # the value behind a termination is multiplied by 0
            torch.testing.assert_close(next_values[t][known], after[known], rtol=1e-4, atol=1e-4)
            terminations_seen += int(terminated.sum())
            before = obs
    assert max(distances) > 1e-2  # so the test can tell the two observations apart
    assert (terminations_seen > 0) == (watched.name in TERMINATE)


def test_every_transition_is_used_once_an_epoch_in_a_fresh_order_and_with_its_own_numbers(watched: Watched) -> None:
    args, size = watched.args, watched.args.minibatch_size
    assert len(watched.minibatches) == 2 * args.update_epochs * args.num_minibatches
    per_update = args.update_epochs * args.num_minibatches
    for update, (given, (advantages, returns)) in enumerate(watched.gae):
        rows = torch.stack([given[1], advantages, returns], -1).flatten(0, 1)
        minibatches = watched.minibatches[update * per_update : (update + 1) * per_update]
        orders = []
        for start in range(0, per_update, args.num_minibatches):
            epoch = minibatches[start : start + args.num_minibatches]
            assert [len(minibatch[0]) for minibatch in epoch] == [size] * args.num_minibatches
            used = torch.stack([torch.cat([minibatch[i] for minibatch in epoch]) for i in (3, 4, 5)], -1)
            orders.append(used.tolist())
            assert sorted(orders[-1]) == sorted(rows.tolist())
        assert all(one != other for one, other in itertools.combinations(orders, 2))
        for obs, actions, log_probs, values, *_ in minibatches:
            with torch.no_grad():
                _, own_log_probs, _, own_values = watched.agent.get_action_and_value(obs, actions)
            # The agent has not changed, so the ratio of every row is 1.
            torch.testing.assert_close(own_log_probs, log_probs, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(own_values, values, rtol=1e-4, atol=1e-4)


def test_what_is_learnt_from_is_the_action_that_was_taken(watched: Watched) -> None:
    """Not the most probable one, and the environment gets it clipped to its limits (detail 27)."""
    args = watched.args
    values = torch.cat([given[1] for given, _ in watched.gae]).flatten().tolist()
    taken = np.concatenate(watched.actions[: 2 * args.num_steps]).reshape(len(values), -1)
    per_update = args.update_epochs * args.num_minibatches
    learnt: list[tuple[float, ...]] = []
    for start in (0, per_update):  # the first epoch of each update has every transition once
        for _, actions, _, old_values, *_ in watched.minibatches[start : start + args.num_minibatches]:
            stored = actions.numpy().reshape(len(actions), -1)
            if hasattr(watched.action_space, "low"):
                stored = np.clip(stored, watched.action_space.low, watched.action_space.high)
            learnt += [(value, *action) for value, action in zip(old_values.tolist(), stored.tolist(), strict=True)]
    assert sorted(learnt) == sorted((value, *action) for value, action in zip(values, taken.tolist(), strict=True))


def test_a_reward_that_is_not_finite_stops_the_run_before_the_weights(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the fourth step of the second rollout; the checkpoint is that of the first update."""
    values = COMMON | RUNS[domain(Path(str(script.__file__)))] | {"save_every": 1, "logdir": str(tmp_path)}
    args = with_args(script, **values)
    args.total_timesteps = 2 * args.batch_size
    make_envs, number = script.make_envs, itertools.count()

    def make_broken(*given: Any, **options: Any) -> Any:
        vec_env = make_envs(*given, **options)
        step = vec_env.step

        def broken_step(actions: Any) -> Any:
            obs, rewards, *others = step(actions)
            broken = next(number) == args.num_steps + 3
            return obs, np.where([False, broken, *[False] * (len(rewards) - 2)], np.nan, rewards), *others

        vec_env.step = broken_step
        return vec_env

    monkeypatch.setattr(script, "make_envs", make_broken)
    with pytest.raises(FloatingPointError, match="rewards of environment 1: a number is not finite at step 3"):
        script.train(args)
    assert script.load_checkpoint(tmp_path / "latest.pt")["counters"]["update"] == 1


def test_learning_rate_and_entropy_bonus_decay_where_they_are_used(watched: Watched) -> None:
    """Of two updates the second is made with half of each."""
    args, half = watched.args, len(watched.rates) // 2
    assert len(watched.rates) == len(watched.ent_coefs) == len(watched.minibatches)
    for used, annealing in ((watched.rates[:half], 1.0), (watched.rates[half:], 0.5)):
        assert used == [[pytest.approx(args.learning_rate * annealing, rel=1e-6, abs=0)]] * half
    last = 0.5 if getattr(args, "anneal_ent", False) else 1.0
    expected = [args.ent_coef] * half + [args.ent_coef * last] * half
    assert watched.ent_coefs == pytest.approx(expected)
    assert args.ent_coef > 0 or watched.name == "ppo_continuous_mujoco"


def test_steps_per_second_are_those_of_an_update(watched: Watched, script: ModuleType) -> None:
    timing = script.read_csv(Path(watched.args.logdir) / "timing.csv")
    seconds = np.diff(timing["time/seconds"], prepend=0.0)
    np.testing.assert_allclose(timing["time/sps"] * seconds, watched.args.batch_size, rtol=1e-6)


def test_one_optimiser_serves_the_whole_run(watched: Watched) -> None:
    """Adam's step count is that of the run: made anew for each update, it would correct its bias again and again."""
    steps = len(watched.minibatches)
    assert watched.checkpoint["counters"]["minibatch_updates"] == steps
    assert watched.checkpoint["counters"]["epochs"] == 2 * watched.args.update_epochs
    assert [float(step) for _, _, step in watched.checkpoint["optimizer"]] == [steps]


def test_what_is_logged_of_the_critic_is_of_these_values_and_targets(watched: Watched, script: ModuleType) -> None:
    progress = script.read_csv(Path(watched.args.logdir) / "progress.csv")
    for update, (given, (advantages, returns)) in enumerate(watched.gae):
        values = given[1]
        expected = {
            "value_mean": values.mean(), "return_mean": returns.mean(), "return_variance": returns.var(correction=0),
            "value_abs_error": (values - returns).abs().mean(), "advantage_std": advantages.std(),
            "explained_variance": 1 - (returns - values).var(correction=0) / returns.var(correction=0),
        }  # fmt: skip
        for name, number in expected.items():
            assert progress[f"train/{name}"][update] == pytest.approx(float(number), rel=1e-4), name


PAGES = {"ppo_continuous_mujoco": "mujoco", "ppo_cage2_parallel": "cage2", "ppo_atari_mario": "mario"}


def documented(page: str) -> set[str]:
    """The metrics that have a row in a table of a page."""
    return set(re.findall(r"^\| `((?:\w+)/[\w{}]+)`", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE))


def test_every_metric_that_is_logged_is_explained_on_a_page(watched: Watched) -> None:
    files = [Path(watched.args.logdir) / f"{name}.csv" for name in ("progress", "timing", "eval")]
    logged = {column for file in files for column in file.read_text().splitlines()[0].split(",")[1:]}
    if watched.name == "ppo_cage2_parallel":
        logged = {re.sub(r"^eval/[a-z_]+_\d+$", "eval/{red}_{steps}", name) for name in logged}
    assert logged <= documented("metrics") | documented(PAGES[watched.name])


def test_every_metric_that_is_explained_exists() -> None:
    """Under its name in the source of a script, or, where names are put together, in part."""
    sources = "".join(path.read_text() for path in ROOT.glob("ppo_*.py"))
    for name in documented("metrics").union(*map(documented, PAGES.values())):
        assert f'"{name}"' in sources or f'"{name.partition("/")[2]}"' in sources or "{" in name, name


def test_curves_are_drawn_on_demand(watched: Watched, script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert not (Path(watched.args.logdir) / "curves.png").exists()
    assert script.main(["curves", "--logdir", str(watched.args.logdir)]) == 0
    assert (Path(watched.args.logdir) / "curves.png").stat().st_size > 10_000


# ---- what goes on beside the learning -------------------------------------------------------------------------------


def test_evaluations_saves_and_films_do_not_matter_to_the_learning(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None draws from the generators of the run: a resumed run may change how often they happen."""
    monkeypatch.setattr(script, "plot_curves", lambda logdir: None)
    values = COMMON | RUNS[domain(Path(str(script.__file__)))] | {"learning_rate": 1e-3}
    often = {"eval_every": 1, "save_every": 1, "capture_video": True}
    for name, more in (("seldom", {}), ("often", often)):
        args = with_args(script, **(values | more), logdir=str(tmp_path / name))
        args.total_timesteps = 2 * args.batch_size
        script.train(args)
    assert_same(weights(tmp_path / "often"), weights(tmp_path / "seldom"))


def test_a_run_on_weights_and_biases_goes_on_when_it_is_resumed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in notes what the optional package is asked for; the real one wants an account, or hundreds of MB."""
    started, finished = list[dict[str, Any]](), list[int]()
    wandb: Any = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.init = lambda **options: started.append(options)
    wandb.finish = lambda: finished.append(len(started))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(script, "plot_curves", lambda logdir: None)
    values = COMMON | RUNS[domain(Path(str(script.__file__)))] | {"track": True}
    args = with_args(script, **values, logdir=str(tmp_path / "run"))
    for updates in (1, 2):
        script.train(replace(args, total_timesteps=updates * args.batch_size, resume=updates == 2))
    other = with_args(script, **values, logdir=str(tmp_path / "other"))
    script.train(replace(other, total_timesteps=args.batch_size))
    first, resumed, second = (options["id"] for options in started)
    assert first == resumed != second
    assert [options["resume"] for options in started] == ["allow"] * 3
    assert finished == [1, 2, 3]  # each before the next one begins
