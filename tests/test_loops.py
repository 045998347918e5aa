"""The training loop of each script, watched from outside on its own environments: what it hands to the mathematics,
how often it updates and evaluates, and what a run leaves."""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import (
    ROOT,
    assert_same,
    can_compile,
    columns,
    domain,
    minibatches_of,
    spy,
    tiny_args,
    tiny_runner,
    weights,
)

# Rollouts in which episodes are cut by their time limit, and terminate too where the domain knows that. The learning
# rate is so small that a run's agent is the same from its first step to its last: what the loop stored can be computed
# again.
RUNS: dict[str, dict[str, Any]] = {
    "ppo_continuous_mujoco": {"env_id": "KnownValues-v0", "num_envs": 4, "num_steps": 16, "reset_steps": 5,
                              "norm_obs": False, "norm_reward": False, "total_timesteps": 128},
    "ppo_cage2_parallel": {"num_envs": 4, "num_steps": 25, "max_steps": 10, "reward_scale": 0.5,
                           "total_timesteps": 200},
    "ppo_atari_mario": {"num_envs": 2, "num_steps": 16, "reset_steps": 6, "stuck_steps": 2, "minibatch_growth": 1,
                        "amp": False, "total_timesteps": 64},
}  # fmt: skip
COMMON: dict[str, Any] = {"learning_rate": 1e-9, "num_minibatches": 4, "update_epochs": 3}


@dataclass
class Watched:
    """A finished run of two updates."""

    name: str
    args: Any
    agent: Any  # as it was all along
    first_obs: np.ndarray
    steps: list[tuple[Any, ...]]  # what each call of vec_env.step returned
    actions: list[np.ndarray]  # what it was given
    gae: list[tuple[Any, Any]]  # arguments and result of compute_gae, an update each
    minibatches: list[Any]
    updates: list[tuple[Any, Any]]  # arguments and result of take_steps


def watch(script: ModuleType, folder: Path) -> Watched:
    name = domain(script)
    args = tiny_args(script, folder / "watched", **(RUNS[name] | COMMON))
    seen: dict[str, list[Any]] = {"first": [], "steps": [], "actions": []}
    make_envs = script.make_envs

    def make_watched(*given: Any, **options: Any) -> Any:
        vec_env = make_envs(*given, **options)
        if seen["first"]:  # evaluations make environments of their own, later
            return vec_env
        game = vec_env.unwrapped if name == "ppo_continuous_mujoco" else vec_env  # below what clips actions
        game_step = game.step

        def watched_actions(actions: Any) -> Any:
            seen["actions"].append(np.array(actions))
            return game_step(actions)

        game.step = watched_actions
        step, reset = vec_env.step, vec_env.reset

        def watched_step(actions: Any) -> Any:
            seen["steps"].append(copy.deepcopy(step(actions)))
            return seen["steps"][-1]

        def watched_reset(**options: Any) -> Any:
            seen["first"].append(copy.deepcopy(reset(**options)))
            return seen["first"][-1]

        vec_env.step, vec_env.reset = watched_step, watched_reset
        return vec_env

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "make_envs", make_watched)
        gae, updates = spy(patch, script, "compute_gae"), spy(patch, script, "take_steps")
        script.train(args)
    steps = seen["steps"][: 2 * args.num_steps]
    return Watched(name, args, updates[0][0][0], seen["first"][0][0], steps, seen["actions"], gae,
                   minibatches_of(updates), updates)  # fmt: skip


@pytest.fixture(scope="module")
def watched(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watch(script, tmp_path_factory.mktemp("loop"))


def value_of(agent: Any, obs: Any) -> torch.Tensor:
    with torch.no_grad():
        return agent.get_value(torch.as_tensor(np.asarray(obs)))


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
    assert max(distances) > 1e-3  # so the test can tell the two observations apart
    assert (terminations_seen > 0) == (watched.name != "ppo_cage2_parallel")


def test_every_transition_is_used_once_an_epoch_in_a_fresh_order_and_with_its_own_numbers(watched: Watched) -> None:
    args = watched.args
    per_update = args.update_epochs * args.num_minibatches
    assert len(watched.minibatches) == 2 * per_update
    for update, (given, (advantages, returns)) in enumerate(watched.gae):
        rows = torch.stack([given[1], advantages, returns], -1).flatten(0, 1)
        minibatches = watched.minibatches[update * per_update : (update + 1) * per_update]
        orders = []
        for start in range(0, per_update, args.num_minibatches):
            epoch = minibatches[start : start + args.num_minibatches]
            assert {len(minibatch.obs) for minibatch in epoch} == {args.batch_size // args.num_minibatches}
            orders.append(torch.cat([torch.stack([x.values, x.advantages, x.returns], -1) for x in epoch]).tolist())
            assert sorted(orders[-1]) == sorted(rows.tolist())
        assert all(one != other for one, other in itertools.combinations(orders, 2))
        for minibatch in minibatches:  # the agent has not changed, so the ratio of every row is 1
            with torch.no_grad():
                policy, values = watched.agent(minibatch.obs)
                log_probs = policy.log_prob(minibatch.actions)
            torch.testing.assert_close(log_probs, minibatch.log_probs, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values, minibatch.values, rtol=1e-4, atol=1e-4)


def test_what_is_learnt_from_is_the_action_that_was_sampled(watched: Watched) -> None:
    """Not the most probable one. The environment gets it clipped to its limits, the loss as it was (detail 27)."""
    args = watched.args
    values = torch.cat([given[1] for given, _ in watched.gae]).flatten().tolist()
    taken = np.concatenate(watched.actions[: 2 * args.num_steps]).reshape(len(values), -1)
    per_update = args.update_epochs * args.num_minibatches
    learnt: list[tuple[float, ...]] = []
    for start in (0, per_update):  # the first epoch of each update has every transition once
        for minibatch in watched.minibatches[start : start + args.num_minibatches]:
            stored = minibatch.actions.numpy().reshape(len(minibatch.actions), -1)
            learnt += [(value, *row) for value, row in zip(minibatch.values.tolist(), stored.tolist(), strict=True)]
    if watched.name == "ppo_continuous_mujoco":
        assert max(abs(action) for _, action in learnt) > 1.5
        learnt = [(value, min(max(action, -1.0), 1.0)) for value, action in learnt]
    assert sorted(learnt) == sorted((value, *action) for value, action in zip(values, taken.tolist(), strict=True))


@pytest.mark.parametrize(("norm_adv", "dim"), [("batch", None), ("per_env", 0)])
def test_advantages_are_normalized_over_the_scope(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm_adv: str, dim: int | None
) -> None:
    """The minibatches' advantages are together those of the batch, normalised once, and not again in the loss."""
    gae_calls, calls = spy(monkeypatch, script, "compute_gae"), spy(monkeypatch, script, "take_steps")
    batch_size = tiny_args(script, tmp_path).batch_size
    script.train(tiny_args(script, tmp_path, norm_adv=norm_adv, update_epochs=1, total_timesteps=batch_size))
    ((_, (raw, _)),) = gae_calls
    expected = (raw - raw.mean(dim, keepdim=True)) / (raw.std(dim, keepdim=True) + 1e-8)
    given = torch.cat([minibatch.advantages for minibatch in minibatches_of(calls)])
    torch.testing.assert_close(given.sort()[0], expected.flatten().sort()[0])


def test_one_optimiser_serves_the_whole_run(watched: Watched) -> None:
    """Adam's step count is that of the run: made anew for each update, it would correct its bias again and again."""
    taken = 0
    for (_, _, _, adam, some), _ in watched.updates:
        assert adam["step"] == taken
        taken += len(some.obs)
    checkpoint = torch.load(Path(watched.args.logdir) / "latest.pt", weights_only=True)
    assert checkpoint["adam"]["step"] == taken == checkpoint["run"]["minibatch_updates"]
    assert taken == 2 * watched.args.update_epochs * watched.args.num_minibatches


DECAYS = {"linear": [1, 2 / 3, 1 / 3], "none": [1, 1, 1], "exponential": [1, 0.01 ** (1 / 3), 0.01 ** (2 / 3)]}


@pytest.mark.parametrize(
    ("decay", "bonus_decay", "every", "evaluated"),
    [("linear", "none", 0, [3]), ("none", "exponential", 1.5, [2, 3]), ("exponential", "linear", 0.4, [1, 2, 3])],
)
def test_there_are_exactly_num_updates_with_their_rates_and_evaluations(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decay: str, bonus_decay: str, every: float,
    evaluated: list[int],
) -> None:  # fmt: skip
    """Of three and a half batches: three updates, evaluated at the next one after so many batches, and at the end."""
    batch = tiny_args(script, tmp_path).batch_size
    values = {"total_timesteps": batch * 7 // 2, "lr_decay": decay, "eval_every": int(every * batch)}
    has_bonus = hasattr(script.Args, "ent_decay")
    args = tiny_args(script, tmp_path, **values | ({"ent_decay": bonus_decay} if has_bonus else {}))
    calls = spy(monkeypatch, script, "take_steps")
    script.train(args)
    progress = columns(tmp_path)
    assert progress["global_step"] == [batch, 2 * batch, 3 * batch]
    np.testing.assert_allclose(progress["train/learning_rate"], args.learning_rate * np.array(DECAYS[decay]), rtol=1e-5)
    if has_bonus:
        np.testing.assert_allclose(progress["train/ent_coef"], args.ent_coef * np.array(DECAYS[bonus_decay]), rtol=1e-5)
        used = [float(given[1].ent_coef) for given, _ in calls[:: len(calls) // 3]]
        np.testing.assert_allclose(used, progress["train/ent_coef"], rtol=1e-5)
        replace(args, ent_coef=torch.ones((), requires_grad=True))  # like one on a GPU: numpy cannot read it
    assert (np.flatnonzero(np.isfinite(progress["eval/mean_return"])) + 1).tolist() == evaluated
    args.logdir, args.num_steps = str(tmp_path / "longer"), 2 * args.num_steps  # what follows from it is computed anew
    assert script.train(args)["global_step"] == 2 * batch


def test_best_is_of_deterministic_actions(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three here, and the first of two equals; sampled actions would be better still."""
    name = "score" if hasattr(script, "score") else "evaluate"
    original, values = getattr(script, name), iter([1.0, 3.0, 3.0])

    def judged(*given: Any, deterministic: bool = True) -> Any:
        if name == "score":
            return original(*given) | {"score": next(values)}
        returns, *others = original(*given, deterministic=deterministic)
        return np.full_like(returns, next(values) if deterministic else 9.0), *others

    monkeypatch.setattr(script, name, judged)
    batch = tiny_args(script, tmp_path).batch_size
    logdir = Path(tiny_runner(script, tmp_path)(eval_every=batch)["logdir"])
    best, latest = (torch.load(logdir / f"{which}.pt", weights_only=True)["run"] for which in ("best", "latest"))
    assert (best["global_step"], latest["global_step"]) == (2 * batch, 3 * batch)
    args = tiny_args(script, tmp_path)
    problem = getattr(args, "game", f"{args.env_id} {getattr(args, 'reset_steps', None)}")
    assert json.loads((logdir / "best.json").read_text()) == {"problem": problem, "score": 3.0}


def test_a_run_begins_with_the_weights_that_it_is_given(script: ModuleType, tmp_path: Path) -> None:
    run = tiny_runner(script, tmp_path)
    start = Path(run()["logdir"]) / "latest.pt"
    begun = weights(run(init_from=start, learning_rate=1e-9, seed=2)["logdir"])
    for name, tensor in weights(start.parent).items():
        torch.testing.assert_close(begun[name], tensor, rtol=0, atol=1e-6)


def test_a_run_leaves_the_files_it_promises(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under its own name, so that a copy's runs are told apart; with finite numbers under the promised names."""
    monkeypatch.chdir(tmp_path)
    name, batch = domain(script), tiny_args(script, tmp_path).batch_size
    own = {"reset_steps": 6, "minibatch_growth": 1} if name == "ppo_atari_mario" else {}
    args = tiny_args(script, tmp_path, eval_every=batch, seed=3, **own)
    result = script.train(replace(args, logdir=None))
    (logdir,) = Path("runs").iterdir()
    assert re.fullmatch(rf"{args.env_id}__{script.SCRIPT}__3__\d{{8}}-\d{{6}}", logdir.name)
    assert (result["logdir"], result["global_step"]) == (str(logdir), 3 * batch)
    for file in ("config.json", "progress.csv", "best.pt", "best.json", "latest.pt"):
        assert (logdir / file).stat().st_size > 0, file
    assert list(logdir.glob("events.out.tfevents.*"))
    config = json.loads((logdir / "config.json").read_text())
    assert (config["args"]["seed"], config["versions"]["torch"]) == (3, torch.__version__)
    assert config["command"] == sys.argv
    progress = columns(logdir)
    for column, values in progress.items():
        assert np.isfinite(values).all(), column
    promised = (
        "train: policy_loss value_loss entropy approx_kl old_approx_kl clip_fraction explained_variance "
        "value_abs_error grad_norm learning_rate; rollout: episodic_return episodic_length mean_reward; "
        "eval: mean_return std_return mean_length; time: sps"
    )
    for group, _, metrics in (part.partition(": ") for part in promised.split("; ")):
        assert {f"{group}/{metric}" for metric in metrics.split()} <= progress.keys()
    steps = args.num_steps * np.arange(1, 4)
    limit = args.max_steps if name == "ppo_cage2_parallel" else args.reset_steps
    assert progress["counters/train_steps"] == steps.tolist()
    assert progress["counters/rollouts"] == [1, 2, 3]
    assert progress["counters/epochs"] == [2, 4, 6]
    assert progress["counters/minibatch_updates"] == [4, 8, 12]  # 2 epochs of 2 minibatches
    assert progress["counters/resets"] == (args.num_envs * (steps // limit)).tolist()
    assert set(progress["rollout/episodic_length"]) == {limit}
    printed = capsys.readouterr().out
    assert f"3 updates of {args.num_envs} environments" in printed
    assert str(logdir) in printed
    assert "compiles" not in printed  # only a run that does says so


def test_what_is_logged_is_of_these_steps_values_and_targets(watched: Watched) -> None:
    progress, calls = columns(watched.args.logdir), len(watched.updates) // 2
    for update, (given, (_, returns)) in enumerate(watched.gae):
        values = given[1]
        explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
        assert progress["train/explained_variance"][update] == pytest.approx(float(explained), rel=1e-3, abs=1e-4)
        error = float((values - returns).abs().mean())
        assert progress["train/value_abs_error"][update] == pytest.approx(error, rel=1e-4)
        results = [result for _, result in watched.updates[update * calls : (update + 1) * calls]]
        for name in results[0]:
            mean = float(torch.cat([result[name] for result in results]).mean())
            assert progress[f"train/{name}"][update] == pytest.approx(mean, rel=1e-4, abs=1e-6), name


PAGES = {"ppo_continuous_mujoco": "mujoco", "ppo_cage2_parallel": "cage2", "ppo_atari_mario": "mario"}


def test_every_metric_that_is_logged_is_explained_on_a_page(watched: Watched) -> None:
    logged = set(columns(watched.args.logdir)) - {"global_step"}
    logged = {re.sub(r"^eval/[a-z_]+_\d+$", "eval/{red}_{steps}", name) for name in logged}
    pages = [(ROOT / "docs" / f"{page}.md").read_text() for page in ("metrics", PAGES[watched.name])]
    assert logged <= set(re.findall(r"^\| `((?:\w+)/[\w{}]+)`", "\n".join(pages), re.MULTILINE))


def test_equal_seeds_give_equal_runs_and_different_ones_do_not(script: ModuleType, tmp_path: Path) -> None:
    """However often it is evaluated and saved, which draws nothing of the run's, and by however many workers."""
    run = tiny_runner(script, tmp_path)
    often = {"eval_every": 1, "save_every": 1, "num_workers": 2}
    first, again, other = (weights(run(**values)["logdir"]) for values in ({}, often, {"seed": 2}))
    assert_same(again, first)
    assert any(not torch.equal(x, y) for x, y in zip(other.values(), first.values(), strict=True))


def test_how_often_is_evaluated_and_saved(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tiny_args(script, tmp_path).batch_size
    saved, made = spy(monkeypatch, script, "save"), spy(monkeypatch, script, "make_envs")
    # at what it passes, and after the first update and at the end
    for save_every, expected in ((batch, 4), (2 * batch, 3), (3 * batch // 2, 4), (0, 2)):
        saved.clear()
        values = {"total_timesteps": 4 * batch, "save_every": save_every, "eval_every": 0, "eval_episodes": 7}
        script.train(tiny_args(script, tmp_path / str(save_every), **values))
        assert [path.name for (path, _), _ in saved].count("latest.pt") == expected
    assert {arguments[1] for arguments, _ in made} == {tiny_args(script, tmp_path).num_envs, 7}
    assert all(vec_env.unwrapped.closed for _, vec_env in made)


@can_compile
def test_a_compiled_run_is_repeatable_and_close_to_an_eager_one(continuous: ModuleType, tmp_path: Path) -> None:
    """--compile is the default, so all results are of it."""
    compare_compiled_and_eager(continuous, tmp_path)


@can_compile
@pytest.mark.slow
def test_so_it_is_in_every_script(script: ModuleType, tmp_path: Path) -> None:
    compare_compiled_and_eager(script, tmp_path)


def compare_compiled_and_eager(script: ModuleType, tmp_path: Path) -> None:
    """The learning rate is small, because what follows is the same only as long as the policies agree."""
    run = tiny_runner(script, tmp_path)
    values = {"learning_rate": 1e-4} | ({"amp": False} if hasattr(script.Args, "amp") else {})
    compiled, again, eager = (weights(run(compile=x, **values)["logdir"]) for x in (True, True, False))
    assert_same(again, compiled)
    for name, tensor in eager.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_an_episode_that_is_lost_with_its_worker_is_played_anew(script: ModuleType, tmp_path: Path) -> None:
    """Here the third step of the evaluation says so, and the environments go on to their limit of 10 steps."""
    args = tiny_args(script, tmp_path, **{"max_steps" if "cage2" in domain(script) else "reset_steps": 10})
    vec_env = script.make_envs(args, 2)
    step, number = vec_env.step, itertools.count(1)

    def losing(actions: np.ndarray) -> Any:
        *result, truncated, infos = step(actions)
        lost = np.full(2, next(number) == 3)
        return *result, truncated | lost, infos | {"worker_restarted": lost}

    vec_env.step = losing
    assert script.evaluate(script.Agent(vec_env, args), vec_env)[1].tolist() == [10, 10]
