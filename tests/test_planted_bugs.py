"""Would the tests notice? Each mutant is the script with one bug planted in it, and a named test must catch it.

The same bugs are exercises for a learner: plant one in a copy (`cp ppo_continuous_mujoco.py my_copy.py`), or let
somebody else do it, and find it with `pytest --script my_copy.py`.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.conftest import ROOT, load_script, tiny_runner
from tests.test_loops import watch


class Bug(NamedTuple):
    old: str  # text of the script, found in it once
    new: str  # what stands there instead
    caught_by: str  # a key of the table below


# The beginning of file::test, and what occurs in its parameters -> name of a bug that it catches -> old text, new text
CAUGHT: dict[str, dict[str, tuple[str, str]]] = {
    "test_ppo_math::test_gae_of_three_steps_worked_by_hand[a termination]": {
        "a termination is bootstrapped": ("next_values * terminations.logical_not() - values", "next_values - values"),
        "the recursion runs across episodes": ("terminations.logical_or(truncations)", "torch.zeros_like(values)"),
    },
    "test_ppo_math::test_gae_of_three_steps_worked_by_hand[a truncation]": {
        "a time limit is not bootstrapped": ("logical_not() -", "logical_or(truncations).logical_not() -"),
        "the recursion runs across time limits": ("terminations.logical_or(truncations)", "terminations"),
    },
    "test_ppo_math::test_gae_of_three_steps_worked_by_hand[no end]": {
        "lambda is forgotten": ("decay = gamma * gae_lambda", "decay = gamma"),
        "gamma is forgotten in the residual": ("rewards + gamma * next_values", "rewards + next_values"),
        "the recursion runs forwards": ("reversed(range(len(rewards) - 1))", "range(len(rewards) - 1)"),
        "advantages are the critic's targets": ("advantages, advantages + values", "advantages, advantages"),
    },
    "test_ppo_math::test_normalized_advantages_by_hand": {
        "advantages are divided by their variance": ("(advantages.std(dim,", "(advantages.var(dim,"),
        "advantages keep their mean": ("(advantages - advantages.mean(dim, keepdim=True)) /", "advantages /"),
    },
    "test_loops::test_advantages_are_normalized_over_the_scope[per_env]": {
        "per-environment normalisation takes the wrong axis": ('"per_env": 0}', '"per_env": 1}'),
    },
    "test_ppo_math::test_the_loss_normalizes_advantages_only_if_it_is_asked_to": {
        "advantages are never normalised": ('normalizing = args.norm_adv == "minibatch"', "normalizing = False"),
        "advantages are always normalised": ('normalizing = args.norm_adv == "minibatch"', "normalizing = True"),
    },
    "test_ppo_math::test_the_six_clip_cases": {
        "the policy loss has the wrong sign": ("policy_loss = -torch.min", "policy_loss = torch.min"),
        "the larger objective counts": ("-torch.min(ratio", "-torch.max(ratio"),
        "nothing is clipped": ("clipped_ratio * advantages)", "ratio * advantages)"),
        "only the clipped ratio counts": ("torch.min(ratio * adv", "torch.min(clipped_ratio * adv"),
        "the ratio is clipped above only": ("ratio.clamp(1 - args.clip_coef, 1 +", "ratio.clamp(max=1 +"),
        "the ratio is upside down": (
            "= policy.log_prob(batch.actions) - batch.log_probs",
            "= batch.log_probs - policy.log_prob(batch.actions)",
        ),
        "the ratio is of stale log-probabilities": ("log_prob(batch.actions) -", "log_prob(batch.actions).detach() -"),
        "the ratio is not exponentiated": ("ratio = log_ratio.exp()", "ratio = 1 + log_ratio"),
    },
    "test_ppo_math::test_the_entropy_bonus_pulls_the_entropy_up": {
        "the entropy bonus is a penalty": ("- args.ent_coef * entropy", "+ args.ent_coef * entropy"),
    },
    "test_ppo_math::test_the_value_loss_is_half_the_mean": {
        "the value loss is not halved": ("value_loss = 0.5 * squared_error", "value_loss = squared_error"),
        "the value loss is maximised": ("+ args.vf_coef * value_loss", "- args.vf_coef * value_loss"),
    },
    "test_ppo_math::test_the_clipped_value_loss_takes_the_larger_error": {
        "the clipped value loss takes the smaller error": ("torch.max(squared_error", "torch.min(squared_error"),
        "values are clipped around the target": (
            "batch.values + (values - batch.values).clamp",
            "batch.returns + (values - batch.returns).clamp",
        ),
    },
    "test_ppo_math::test_the_kl_estimators_by_hand": {
        "k1 has the wrong sign": ('"old_approx_kl": -log_ratio', '"old_approx_kl": log_ratio'),
        "k3 has the wrong sign": ("(ratio - 1 - log_ratio)", "(ratio - 1 + log_ratio)"),
    },
    "test_ppo_math::test_the_clip_fraction_counts_ratios_outside_the_interval_on_both_sides": {
        "the clip fraction sees one side": ("(ratio - 1).abs() > args.clip_coef", "(ratio - 1) > args.clip_coef"),
    },
    "test_ppo_math::test_before_the_first_step_the_ratio_is_1_and_nothing_is_clipped": {
        "metrics are not detached": ("{name: value.detach() for name, value in metrics.items()}", "metrics"),
    },
    "test_ppo_math::test_explained_variance_cases": {
        "explained variance forgets the error": ("(returns - values).var(", "values.var("),
    },
    "test_ppo_math::test_a_step_is_that_of_torchs_adam[0.5]": {
        "Adam's mean is corrected too little": ("math.log(0.9))", "math.log(0.8))"),
        "Adam's steps are not counted": ('adam["step"] += 1', 'adam["step"] += 0.5'),
        "Adam's square is a mean": ("gradient**2 -", "gradient.abs() -"),
        "Adam divides by the square": ("(v_hat.sqrt() + 1e-5)", "(v_hat + 1e-5)"),
        "gradients are not clipped": ("if args.max_grad_norm is not None:", "if False:"),
    },
    "test_ppo_math::test_a_step_is_that_of_torchs_adam[1000000.0]": {
        "small gradients are scaled up": ('/ metrics["grad_norm"]).clamp(max=1.0)', '/ metrics["grad_norm"])'),
    },
    "test_ppo_math::test_values_log_probs_and_entropies_are_one_number": {
        "each action dimension has a log-probability of its own": ("(components, 1,", "(components, 0,"),
        "a batch of one loses its dimension": ("self.critic(obs).squeeze(-1)", "self.critic(obs).squeeze()"),
    },
    "test_ppo_math::test_log_std_init_is_the_logarithm": {
        "the deviation is upside down": ("self.actor_log_std.exp().expand_as", "(-self.actor_log_std).exp().expand_as"),
    },
    "test_ppo_math::test_layers_start_orthogonal_with_zero_biases": {
        "the policy starts with large means": ("action_dim], output_gain=0.01)", "action_dim], output_gain=1.0)"),
    },
    "test_loops::test_what_follows_a_step_is_the_final_observation": {
        "the reset observation is bootstrapped": ("next_values[times, envs] = agent", "_ = agent"),
        "a time limit is stored as a termination": ("(rewards, terminated,", "(rewards, terminated | truncated,"),
    },
    "test_loops::test_what_is_learnt_from_is_the_action_that_was_sampled": {
        "the action is clipped before its log-probability": ("obs, actions, *map", "obs, actions.clamp(-1, 1), *map"),
        "the environment gets unclipped actions": ("vec_env = ClipAction(vec_env)", "vec_env = vec_env"),
    },
    "test_loops::test_every_transition_is_used_once_an_epoch": {
        "transitions are drawn with replacement": (
            "torch.randperm(len(batch.obs),",
            "torch.randint(len(batch.obs), (len(batch.obs),),",
        ),
        "rows of a minibatch are of different transitions": (
            "Batch(*(x[indices] for x in batch))",
            "Batch(*(x[indices[:, torch.randperm(indices.shape[1])]] for x in batch))",
        ),
    },
    "test_loops::test_there_are_exactly_num_updates[linear]": {
        "one update too many": ("while run.global_step < all_steps", "while run.global_step <= all_steps"),
        "the learning rate starts one update late": ("= run.global_step /", "= (run.global_step + args.batch_size) /"),
    },
    "test_continuous_script::test_the_critics_learning_rate": {
        "the critic's learning rate is everybody's": ('name.startswith("critic")', "True"),
    },
    "test_continuous_script::test_the_kl_limit_ends_an_update": {
        "the KL limit stops nothing": ("if args.target_kl is not None and", "if False and"),
    },
    "test_continuous_script::test_average_reward_mode": {
        "the average-reward mode discounts": ("- run.average_reward, 1.0", "- run.average_reward, gamma"),
    },
    "test_continuous_script::test_no_fall_ends_an_average_reward": {
        "a fall ends the average-reward mode's life": ("torch.zeros_like(terminated), trunc", "terminated, trunc"),
        "a time limit ends the average-reward mode's life after a fall": ("truncated * (1 - terminated)", "truncated"),
    },
    "test_continuous_script::test_evaluation_takes_the_mode": {
        "evaluation samples its actions": ("policy.mode if deterministic", "policy.mode if not deterministic"),
    },
    "test_continuous_script::test_normalisers_have_the_discount": {
        "evaluation moves the statistics": ("args.norm_obs and statistics is None", "args.norm_obs"),
    },
    "test_loops::test_there_are_exactly_num_updates[none]": {
        "thresholds must be hit exactly": ("eval_every or math.inf) < args.batch_size", "eval_every or math.inf) == 0"),
    },
    "test_resume::test_a_run_may_be_extended[Hopper]": {
        "random numbers are not restored": ('torch.set_rng_state(checkpoint["generator"])', "pass"),
        "environments begin anew": ("if vec_env.set_state(tree_map(", "if (lambda state: True)(tree_map("),
        "Adam's step is not restored": ('checkpoint["adam"]', '(checkpoint["adam"] | {"step": torch.zeros(())})'),
    },
    "test_resume::test_a_run_killed_at_an_awkward_moment[logged and not saved]": {
        "rows after the checkpoint stay": ("log.truncate(min(run.csv_size, log.tell()))", "log.tell()"),
    },
    "test_continuous_script::test_play_plays_the_policy_and_the_statistics": {
        "the statistics of a checkpoint are not loaded": (
            'statistics.set_state(tree_map(np.asarray, checkpoint["statistics"]))',
            "pass",
        ),
    },
}
BUGS = {name: Bug(*texts, test) for test, bugs in CAUGHT.items() for name, texts in bugs.items()}


def run_test(script: ModuleType, caught_by: str, folder: Path) -> None:
    """Call the tests whose names begin so, with all parameters in which the case occurs; raises what they raise."""
    file, _, name = caught_by.partition("::")
    name, _, case = name.rstrip("]").partition("[")
    functions = [f for key, f in vars(importlib.import_module(f"tests.{file}")).items() if key.startswith(name)]
    if not functions:
        raise LookupError(caught_by)
    for function in functions:
        cases = [mark.args for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        for values in itertools.product(*(rows for _, rows in cases)):
            if case not in str(values):
                continue
            folder = folder / "next"  # of the one before: each has a folder of its own
            folder.mkdir()
            with pytest.MonkeyPatch.context() as monkeypatch:
                wanted = inspect.signature(function).parameters
                fixtures: dict[str, Any] = {"script": script, "continuous": script, "monkeypatch": monkeypatch,
                                            "tmp_path": folder, "run_tiny": tiny_runner(script, folder)}  # fmt: skip
                fixtures |= {"watched": watch(script, folder)} if "watched" in wanted else {}
                arguments = {key: fixtures[key] for key in wanted if key in fixtures}
                for (names, _), row in zip(cases, values, strict=True):
                    arguments |= {names: row} if isinstance(names, str) else dict(zip(names, row, strict=True))
                function(**arguments)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(continuous: ModuleType, name: str, tmp_path: Path) -> None:
    """That the same test passes without the bug is seen where it runs."""
    bug, mutant, original = BUGS[name], tmp_path / "mutant.py", Path(str(continuous.__file__))
    source = original.read_text()
    if source.count(bug.old) != 1:
        assert original.parent != ROOT, f"{bug.old!r} stands {source.count(bug.old)} times there"
        pytest.skip(f"the copy does not have {bug.old!r} (once)")
    mutant.write_text(source.replace(bug.old, bug.new))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_test(load_script(mutant), bug.caught_by, tmp_path)


def test_there_are_enough_bugs_and_each_is_its_own() -> None:
    source = (ROOT / "ppo_continuous_mujoco.py").read_text()
    assert [bug.old for bug in BUGS.values() if source.count(bug.old) != 1] == []
    assert len(BUGS) == sum(map(len, CAUGHT.values())) >= 55
    assert len({(bug.old, bug.new) for bug in BUGS.values()}) == len(BUGS)
