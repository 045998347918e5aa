"""Would the tests notice? Each mutant is the script with one bug planted in it, and a named test must catch it.

The same bugs are exercises for a learner: plant one in a copy (`cp ppo_continuous_mujoco.py my_copy.py`), or let
somebody else do it, and find it with `pytest --script my_copy.py`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests import test_ppo_math, test_teaching_numbers
from tests.conftest import ROOT, load_script
from tests.test_resume import fork, wait


class Bug(NamedTuple):
    old: str  # text of the script, found in it once
    new: str  # what stands there instead
    caught_by: str  # file::test, or test of test_ppo_math


LOOP = "test_continuous_script::"
SIX_CASES = "test_the_six_cases_of_the_clipped_objective"
KNOWN_VALUES = LOOP + "test_an_exact_critic_gives_zero_advantages_in_the_training_loop"

BUGS = {
    # --- advantages
    "a termination is bootstrapped": Bug(
        "next_values * (1 - terminated) - values",
        "next_values - values",
        "test_a_termination_drops_the_next_value_and_cuts_the_recursion",
    ),
    "a time limit is not bootstrapped": Bug(
        "(1 - terminated) - values",
        "(1 - ended) - values",
        "test_a_truncation_keeps_the_final_value_and_cuts_the_recursion",
    ),
    "the recursion runs across episodes": Bug(
        "decay = gamma * gae_lambda * (1 - ended)",
        "decay = gamma * gae_lambda + 0 * ended",
        "test_a_termination_drops_the_next_value_and_cuts_the_recursion",
    ),
    "the recursion runs across time limits": Bug(
        "gae_lambda * (1 - ended)",
        "gae_lambda * (1 - terminated)",
        "test_a_truncation_keeps_the_final_value_and_cuts_the_recursion",
    ),
    "lambda is forgotten": Bug("decay = gamma * gae_lambda", "decay = gamma", "test_gae_of_three_steps_worked_by_hand"),
    "gamma is forgotten in the residual": Bug(
        "rewards + gamma * next_values", "rewards + next_values", "test_gae_of_three_steps_worked_by_hand"
    ),
    "the recursion runs forwards": Bug(
        "reversed(range(len(rewards)))", "range(len(rewards))", "test_gae_of_three_steps_worked_by_hand"
    ),
    "advantages are the critic's targets": Bug(
        "return advantages, advantages + values",
        "return advantages, advantages",
        "test_gae_of_three_steps_worked_by_hand",
    ),
    "advantages are divided by their variance": Bug(
        "(std + 1e-8)\n\n", "(std**2 + 1e-8)\n\n", "test_normalized_advantages_by_hand"
    ),
    "advantages keep their mean": Bug(
        "return (advantages - mean) /", "return advantages /", "test_normalized_advantages_by_hand"
    ),
    "per-environment normalisation takes the wrong axis": Bug(
        "dims = (0,) if per_env", "dims = (1,) if per_env", "test_normalization_scopes"
    ),
    "advantages are never normalised": Bug(
        'if args.norm_adv and args.norm_adv_scope == "minibatch":',
        "if False:",
        "test_the_loss_normalizes_advantages_only_if_it_is_asked_to",
    ),
    "advantages are always normalised": Bug(
        'if args.norm_adv and args.norm_adv_scope == "minibatch":',
        "if True:",
        "test_the_loss_normalizes_advantages_only_if_it_is_asked_to",
    ),
    # --- loss
    "the policy loss has the wrong sign": Bug("policy_loss = -torch.min", "policy_loss = torch.min", SIX_CASES),
    "the larger objective counts": Bug("-torch.min(ratio", "-torch.max(ratio", SIX_CASES),
    "nothing is clipped": Bug("clipped_ratio * advantages)", "ratio * advantages)", SIX_CASES),
    "only the clipped ratio counts": Bug("torch.min(ratio * adv", "torch.min(clipped_ratio * adv", SIX_CASES),
    "the ratio is clipped above only": Bug(
        "ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)", "ratio.clamp(max=1 + args.clip_coef)", SIX_CASES
    ),
    "the ratio is upside down": Bug("= log_probs - old_log_probs", "= old_log_probs - log_probs", SIX_CASES),
    "the ratio is of stale log-probabilities": Bug(
        "= log_probs - old_log_probs", "= log_probs.detach() - old_log_probs", SIX_CASES
    ),
    "the ratio is not exponentiated": Bug("ratio = log_ratio.exp()", "ratio = 1 + log_ratio", SIX_CASES),
    "the entropy bonus is a penalty": Bug(
        "- args.ent_coef * entropy", "+ args.ent_coef * entropy", "test_the_entropy_bonus_pulls_the_entropy_up"
    ),
    "the value loss is not halved": Bug(
        "value_loss = 0.5 * squared_error", "value_loss = squared_error", "test_the_value_loss_is_half_the_mean"
    ),
    "the value loss is maximised": Bug(
        "+ args.vf_coef * value_loss", "- args.vf_coef * value_loss", "test_the_value_loss_is_half_the_mean"
    ),
    "the clipped value loss takes the smaller error": Bug(
        "torch.max(squared_error", "torch.min(squared_error", "test_the_clipped_value_loss_takes_the_larger_error"
    ),
    "values are clipped around the target": Bug(
        "old_values + (values - old_values).clamp",
        "returns + (values - returns).clamp",
        "test_the_clipped_value_loss_takes_the_larger_error",
    ),
    "k1 has the wrong sign": Bug(
        '"old_approx_kl": -log_ratio', '"old_approx_kl": log_ratio', "test_the_kl_estimators_by_hand"
    ),
    "k3 has the wrong sign": Bug(
        "(ratio - 1 - log_ratio)", "(ratio - 1 + log_ratio)", "test_the_kl_estimators_by_hand"
    ),
    "the clip fraction sees one side": Bug(
        "(ratio - 1).abs() > args.clip_coef",
        "(ratio - 1) > args.clip_coef",
        "test_the_clip_fraction_counts_ratios_outside_the_interval_on_both_sides",
    ),
    "a metric is not detached": Bug(
        '"value_loss": value_loss.detach()', '"value_loss": value_loss', "test_metrics_and_targets_carry_no_gradient"
    ),
    "explained variance forgets the error": Bug(
        "(returns - values).var(correction=0) / variance",
        "values.var(correction=0) / variance",
        "test_explained_variance_cases",
    ),
    # --- agent
    "the log-probability has the wrong sign of log std": Bug(
        "(0.5 * z * z + log_std +", "(0.5 * z * z - log_std +", "test_gaussian_log_probs_and_entropy_equal"
    ),
    "log-probabilities are averaged over dimensions": Bug(
        "0.5 * math.log(2 * math.pi)).sum(-1)",
        "0.5 * math.log(2 * math.pi)).mean(-1)",
        "test_gaussian_log_probs_and_entropy_equal",
    ),
    "the entropy lacks a half": Bug(
        "math.log(2 * math.pi * math.e)", "math.log(2 * math.pi)", "test_the_entropy_of_a_gaussian_is_its_closed_form"
    ),
    "a batch of one loses its dimension": Bug(
        "self.critic(obs).squeeze(-1)", "self.critic(obs).squeeze()", "test_stored_log_probs_are_those_of_the_sampled"
    ),
    "the policy starts with large means": Bug(
        "action_dim], output_std=0.01)", "action_dim], output_std=1.0)", "test_layers_start_orthogonal_with_zero_biases"
    ),
    "tanh is too flat": Bug("2 * torch.sigmoid(2 * x) - 1", "2 * torch.sigmoid(x) - 1", "test_tanh_is_tanh"),
    # --- the loop
    "the reset observation is bootstrapped": Bug(
        "next_values[list(times), list(indices)] = final_values", "pass", KNOWN_VALUES
    ),
    "a time limit is stored as a termination": Bug(
        "truncated_rows[t] = terminated, truncated",
        "truncated_rows[t] = terminated | truncated, truncated",
        KNOWN_VALUES,
    ),
    "the action is clipped before its log-probability": Bug(
        "action_rows[t] = action.cpu().numpy()",
        "action_rows[t] = action.cpu().numpy().clip(-1, 1)",
        LOOP + "test_environments_get_clipped_actions_and_the_loss_the_sampled_ones",
    ),
    "the environment gets unclipped actions": Bug(
        "action_rows[t].clip(action_space.low, action_space.high)",
        "action_rows[t]",
        LOOP + "test_environments_get_clipped_actions_and_the_loss_the_sampled_ones",
    ),
    "transitions are drawn with replacement": Bug(
        "torch.randperm(args.batch_size,",
        "torch.randint(args.batch_size, (args.batch_size,),",
        LOOP + "test_every_transition_is_used_once_an_epoch_in_a_fresh_order",
    ),
    "rows of a minibatch are of different transitions": Bug(
        "x[order].unflatten(",
        "x[torch.randperm(len(x))].unflatten(",
        LOOP + "test_rows_of_a_minibatch_belong_together_and_start_at_ratio_1",
    ),
    "one update too many": Bug(
        "while counters.update < args.num_updates",
        "while counters.update <= args.num_updates",
        LOOP + "test_there_are_exactly_num_updates",
    ),
    "the learning rate starts one update late": Bug(
        "(counters.update - 1) / args.num_updates",
        "counters.update / args.num_updates",
        LOOP + "test_there_are_exactly_num_updates",
    ),
    "small gradients are scaled up": Bug(
        "(args.max_grad_norm / norm).clamp(max=1.0)",
        "(args.max_grad_norm / norm)",
        LOOP + "test_small_gradients_are_not_scaled_up",
    ),
    "the KL limit stops nothing": Bug(
        "float(metrics[APPROX_KL]) > args.target_kl", "False", LOOP + "test_the_kl_limit_ends_an_update"
    ),
    "the average-reward mode discounts": Bug(
        "gae_rewards, gamma = rewards - counters.average_reward, 1.0",
        "gae_rewards = rewards - counters.average_reward",
        LOOP + "test_average_reward_mode",
    ),
    "a fall ends the average-reward mode's life": Bug(
        "torch.zeros_like(terminations), truncations & ~terminations",
        "terminations, truncations & ~terminations",
        LOOP + "test_with_an_average_reward_life",
    ),
    "a time limit ends the average-reward mode's life after a fall": Bug(
        "torch.zeros_like(terminations), truncations & ~terminations",
        "torch.zeros_like(terminations), truncations",
        LOOP + "test_with_an_average_reward_a_fall_on_the_time_limit",
    ),
    "evaluation samples its actions": Bug(
        "if not deterministic:", "if deterministic:", LOOP + "test_evaluation_takes_the_mode_of_the_policy"
    ),
    "thresholds must be hit exactly": Bug(
        "step // every > (step - advance) // every",
        "step % every == 0",
        "test_teaching_numbers::test_thresholds_are_crossed_where_multiples_are_missed",
    ),
}  # fmt: skip

# The mathematics is checked in moments; of the bugs of the loop, which take pytest and a run each, a few every time.
ALWAYS = ("the reset observation is bootstrapped", "the action is clipped before its log-probability")


def run_function(script: ModuleType, test: str) -> None:
    """Call the tests of the mathematics whose names begin so, with all their parameters; raises what they raise."""
    file, _, name = test.rpartition("::")
    module = {"": test_ppo_math, "test_teaching_numbers": test_teaching_numbers}[file]
    functions = [function for key, function in vars(module).items() if key.startswith(name)]
    assert functions, test
    for function in functions:
        cases = [mark.args for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        for values in itertools.product(*(rows for _, rows in cases)):
            arguments: dict[str, Any] = {}
            for (names, _), row in zip(cases, values, strict=True):
                arguments |= {names: row} if isinstance(names, str) else dict(zip(names, row, strict=True))
            function(script=script, **arguments)


def run_pytest(script: Path, test: str, output: Path) -> int:
    """Pytest's exit code for one test of the loop, in a forked process: 0 passed, 1 failed."""
    file, _, name = test.rpartition("::")
    argv = [str(ROOT / "tests" / f"{file}.py"), "-k", name, "--script", str(script), "-x", "-q"]
    argv += ["-p", "no:cacheprovider", "-m", "not slow", "--rootdir", str(ROOT)]
    return wait(fork(lambda: int(pytest.main(argv)), output), 300)


def parameters() -> list[Any]:
    """The names of the bugs; slow are those of the loop, but for a few."""
    slow = [name for name, bug in BUGS.items() if bug.caught_by.startswith(LOOP) and name not in ALWAYS]
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in BUGS]


@pytest.mark.parametrize("name", parameters())
def test_a_planted_bug_is_caught(continuous: ModuleType, name: str, tmp_path: Path) -> None:
    bug, mutant, output = BUGS[name], tmp_path / "mutant.py", tmp_path / "output.txt"
    source = Path(str(continuous.__file__)).read_text()
    if source.count(bug.old) != 1:
        assert Path(str(continuous.__file__)).parent != ROOT, f"{bug.old!r} stands {source.count(bug.old)} times there"
        pytest.skip(f"the copy does not have {bug.old!r} (once)")
    mutant.write_text(source.replace(bug.old, bug.new))
    if bug.caught_by.startswith(LOOP):
        code = run_pytest(mutant, bug.caught_by, output)
        assert (code, "AssertionError" in output.read_text()) == (1, True), f"{bug.caught_by}: {output.read_text()}"
        return
    run_function(continuous, bug.caught_by)  # passes on the script itself
    try:
        run_function(load_script(mutant), bug.caught_by)
    except AssertionError:
        return
    pytest.fail(f"{bug.caught_by} let pass: {name}")


def test_the_loop_without_a_bug_passes(continuous: ModuleType, tmp_path: Path) -> None:
    """So that a mutant which fails does so for its bug."""
    healthy, output = tmp_path / "healthy.py", tmp_path / "output.txt"
    healthy.write_text(Path(str(continuous.__file__)).read_text())
    tests = {BUGS[name].caught_by.removeprefix(LOOP) for name in ALWAYS}
    assert run_pytest(healthy, LOOP + " or ".join(sorted(tests)), output) == 0, output.read_text()


def test_there_are_enough_bugs_and_each_is_its_own() -> None:
    source = (ROOT / "ppo_continuous_mujoco.py").read_text()
    assert [bug.old for bug in BUGS.values() if source.count(bug.old) != 1] == []
    assert len(BUGS) >= 40
    assert len({(bug.old, bug.new) for bug in BUGS.values()}) == len(BUGS)
