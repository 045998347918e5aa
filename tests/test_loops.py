"""What the training loop of each script hands to the mathematics, watched from outside on its own environments.

The learning rate is so small that a run's agent is the same from its first step to its last, and what the loop stored
can be computed again.
"""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, assert_same, columns, domain, minibatches_of, spy, tiny_args, weights

# Rollouts in which episodes are cut by their time limit, and terminate too where the domain knows that.
RUNS: dict[str, dict[str, Any]] = {
    "ppo_continuous_mujoco": {"env_id": "KnownValues-v0", "num_envs": 4, "num_steps": 16, "reset_steps": 5,
                              "norm_obs": False, "norm_reward": False, "total_timesteps": 128},
    "ppo_cage2_parallel": {"num_envs": 4, "num_steps": 25, "max_steps": 10, "reward_scale": 0.5,
                           "total_timesteps": 200},
    "ppo_atari_mario": {"num_envs": 2, "num_steps": 16, "reset_steps": 6, "stuck_steps": 2, "minibatch_growth": 1,
                        "amp": False, "total_timesteps": 64},
}  # fmt: skip
COMMON: dict[str, Any] = {"learning_rate": 1e-9, "num_minibatches": 4, "update_epochs": 3}
TERMINATE = {"ppo_continuous_mujoco", "ppo_atari_mario"}


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


@pytest.fixture(scope="module")
def watched(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    name = domain(script)
    args = tiny_args(script, tmp_path_factory.mktemp("watched") / "run", **(RUNS[name] | COMMON))
    seen: dict[str, list[Any]] = {"first": [], "steps": [], "actions": [], "agents": []}
    make_envs = script.make_envs

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
        gae, updates = spy(patch, script, "compute_gae"), spy(patch, script, "take_steps")
        script.train(args)
    steps = seen["steps"][: 2 * args.num_steps]
    return Watched(name, args, updates[0][0][0], seen["first"][0][0], steps, seen["actions"], gae,
                   minibatches_of(updates), updates)  # fmt: skip


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
    assert (terminations_seen > 0) == (watched.name in TERMINATE)


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
            used = [torch.stack([x.values, x.advantages, x.returns], -1) for x in epoch]
            orders.append(torch.cat(used).tolist())
            assert sorted(orders[-1]) == sorted(rows.tolist())
        assert all(one != other for one, other in itertools.combinations(orders, 2))
        for minibatch in minibatches:  # the agent has not changed, so the ratio of every row is 1
            with torch.no_grad():
                policy, values = watched.agent(minibatch.obs)
                log_probs = policy.log_prob(minibatch.actions)
            torch.testing.assert_close(log_probs, minibatch.log_probs, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values, minibatch.values, rtol=1e-4, atol=1e-4)


def test_what_is_learnt_from_is_the_action_that_was_taken(watched: Watched) -> None:
    """Not the most probable one, and the environment gets it clipped to its limits (detail 27)."""
    args = watched.args
    values = torch.cat([given[1] for given, _ in watched.gae]).flatten().tolist()
    taken = np.concatenate(watched.actions[: 2 * args.num_steps]).reshape(len(values), -1)
    per_update = args.update_epochs * args.num_minibatches
    learnt: list[tuple[float, ...]] = []
    for start in (0, per_update):  # the first epoch of each update has every transition once
        for minibatch in watched.minibatches[start : start + args.num_minibatches]:
            stored = minibatch.actions.numpy().reshape(len(minibatch.actions), -1)
            if watched.name == "ppo_continuous_mujoco":
                stored = np.clip(stored, -1, 1)
            learnt += [
                (value, *action) for value, action in zip(minibatch.values.tolist(), stored.tolist(), strict=True)
            ]
    assert sorted(learnt) == sorted((value, *action) for value, action in zip(values, taken.tolist(), strict=True))


def test_the_learning_rate_decays_and_one_optimiser_serves_the_whole_run(watched: Watched) -> None:
    """Of two updates the second is made with half the rate; Adam's step count is that of the run: made anew for each
    update, it would correct its bias again and again."""
    args, taken = watched.args, 0
    for i, ((_, _, _, adam, some), _) in enumerate(watched.updates):
        annealing = 1.0 if i < len(watched.updates) // 2 else 0.5
        assert adam["learning_rate"].unique().tolist() == [pytest.approx(args.learning_rate * annealing)]
        assert adam["step"] == taken
        taken += len(some.obs)
    checkpoint = torch.load(Path(args.logdir) / "latest.pt", weights_only=True)
    run = checkpoint["run"]
    counted = run.get("minibatch_updates", run["epochs"] * watched.args.num_minibatches)  # Mario's minibatches grow
    assert checkpoint["adam"]["step"] == taken == counted
    assert checkpoint["run"]["epochs"] == 2 * args.update_epochs


def test_what_is_logged_of_the_critic_is_of_these_values_and_targets(watched: Watched) -> None:
    progress = columns(watched.args.logdir)
    for update, (given, (_, returns)) in enumerate(watched.gae):
        values = given[1]
        explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
        assert progress["train/explained_variance"][update] == pytest.approx(float(explained), rel=1e-3, abs=1e-4)
        error = float((values - returns).abs().mean())
        assert progress["train/value_abs_error"][update] == pytest.approx(error, rel=1e-4)


PAGES = {"ppo_continuous_mujoco": "mujoco", "ppo_cage2_parallel": "cage2", "ppo_atari_mario": "mario"}


def documented(page: str) -> set[str]:
    """The metrics that have a row in a table of a page."""
    return set(re.findall(r"^\| `((?:\w+)/[\w{}]+)`", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE))


def test_every_metric_that_is_logged_is_explained_on_a_page(watched: Watched) -> None:
    logged = set(columns(watched.args.logdir)) - {"global_step"}
    logged = {re.sub(r"^eval/[a-z_]+_\d+$", "eval/{red}_{steps}", name) for name in logged}
    assert logged <= documented("metrics") | documented(PAGES[watched.name])


def test_evaluations_and_saves_do_not_matter_to_the_learning(script: ModuleType, tmp_path: Path) -> None:
    """None draws from the generators of the run: a resumed run may change how often they happen."""
    values = RUNS[domain(script)] | COMMON | {"learning_rate": 1e-3}
    for name, more in (("seldom", {}), ("often", {"eval_every": 1, "save_every": 1})):
        script.train(tiny_args(script, tmp_path / name, **(values | more)))
    assert_same(weights(tmp_path / "often"), weights(tmp_path / "seldom"))
