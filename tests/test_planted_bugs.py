"""Would the tests notice? Each mutant is the script with one bug planted in it, and a named test must catch it.

The same bugs are exercises for a learner: plant one in a copy (`cp ppo_continuous_mujoco.py my_copy.py`), or let
somebody else do it, and find it with `pytest --script my_copy.py`.
"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from tests import test_continuous_script, test_ppo_math, test_resume, test_teaching_numbers
from tests.conftest import ROOT, load_script, tiny_runner

FILES = {module.__name__.rpartition(".")[2]: module
         for module in (test_continuous_script, test_ppo_math, test_resume, test_teaching_numbers)}  # fmt: skip


class Bug(NamedTuple):
    old: str  # text of the script, found in it once
    new: str  # what stands there instead
    caught_by: str  # the beginning of file::test, or of a test of test_ppo_math
    case: str = ""  # in the parameters of that test


LOOP = "test_continuous_script::"
SIX_CASES = "test_the_six_cases_of_the_clipped_objective"
ADAM = "test_a_step_is_that_of_torchs_adam"
KNOWN_VALUES = LOOP + "test_an_exact_critic_gives_zero_advantages_in_the_training_loop"
EXTENDED = "test_resume::test_a_run_may_be_extended"

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
        "(advantages.std(dim,", "(advantages.var(dim,", "test_normalized_advantages_by_hand"
    ),
    "advantages keep their mean": Bug(
        "return (advantages - advantages.mean(dim, keepdim=True)) /",
        "return advantages /",
        "test_normalized_advantages_by_hand",
    ),
    "per-environment normalisation takes the wrong axis": Bug(
        "dim=0 if args.norm_adv", "dim=1 if args.norm_adv", LOOP + "test_advantages_are_normalized_over_the_scope"
    ),
    "advantages are never normalised": Bug(
        'if args.norm_adv == "minibatch":',
        "if False:",
        "test_the_loss_normalizes_advantages_only_if_it_is_asked_to",
    ),
    "advantages are always normalised": Bug(
        'if args.norm_adv == "minibatch":',
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
    "the ratio is upside down": Bug(
        "= policy.log_prob(batch.actions) - batch.log_probs",
        "= batch.log_probs - policy.log_prob(batch.actions)",
        SIX_CASES,
    ),
    "the ratio is of stale log-probabilities": Bug(
        "policy.log_prob(batch.actions) -", "policy.log_prob(batch.actions).detach() -", SIX_CASES
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
        "batch.values + (values - batch.values).clamp",
        "batch.returns + (values - batch.returns).clamp",
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
    "metrics are not detached": Bug(
        "{name: value.detach() for name, value in metrics.items()}",
        "metrics",
        "test_before_the_first_step_the_ratio_is_1_and_nothing_is_clipped",
    ),
    "explained variance forgets the error": Bug(
        "(returns - values).var(correction=0) / variance",
        "values.var(correction=0) / variance",
        "test_explained_variance_cases",
    ),
    # --- optimiser
    "Adam's mean is corrected too little": Bug("math.log(0.9))", "math.log(0.8))", ADAM),
    "Adam's steps are not counted": Bug('adam["step"] += 1', 'adam["step"] += 0.5', ADAM),
    "Adam's square is a mean": Bug("gradient**2 -", "gradient.abs() -", ADAM),
    "Adam divides by the square": Bug("(square.sqrt() + 1e-5)", "(square + 1e-5)", ADAM),
    "gradients are not clipped": Bug("if args.max_grad_norm is not None:", "if False:", ADAM),
    "small gradients are scaled up": Bug(
        '/ metrics["grad_norm"]).clamp(max=1.0)', '/ metrics["grad_norm"])', "test_small_gradients_are_not_scaled_up"
    ),
    # --- agent
    "each action dimension has a log-probability of its own": Bug(
        "Independent(components, 1,", "Independent(components, 0,", "test_values_log_probs_and_entropies_are_one_number"
    ),
    "the deviation is upside down": Bug(
        "self.actor_log_std.exp().expand_as",
        "(-self.actor_log_std).exp().expand_as",
        "test_log_std_init_is_the_logarithm",
    ),
    "a batch of one loses its dimension": Bug(
        "self.critic(obs).squeeze(-1)",
        "self.critic(obs).squeeze()",
        "test_values_log_probs_and_entropies_are_one_number",
    ),
    "the policy starts with large means": Bug(
        "action_dim], output_std=0.01)", "action_dim], output_std=1.0)", "test_layers_start_orthogonal_with_zero_biases"
    ),
    # --- the loop
    "the reset observation is bootstrapped": Bug("next_values[times, indices] = agent", "_ = agent", KNOWN_VALUES),
    "a time limit is stored as a termination": Bug(
        "(rewards, terminated, truncated, infos", "(rewards, terminated | truncated, truncated, infos", KNOWN_VALUES
    ),
    "the action is clipped before its log-probability": Bug(
        "rows.append((obs, actions,",
        "rows.append((obs, actions.clamp(-1, 1),",
        LOOP + "test_environments_get_clipped_actions_and_the_loss_the_sampled_ones",
    ),
    "the environment gets unclipped actions": Bug(
        ".clip(space.low, space.high)  # detail 27",
        "  # detail 27",
        LOOP + "test_environments_get_clipped_actions_and_the_loss_the_sampled_ones",
    ),
    "transitions are drawn with replacement": Bug(
        "torch.randperm(len(batch.obs),",
        "torch.randint(len(batch.obs), (len(batch.obs),),",
        LOOP + "test_every_transition_is_used_once_an_epoch_in_a_fresh_order",
    ),
    "rows of a minibatch are of different transitions": Bug(
        "x.index_select(0, order)",
        "x.index_select(0, order[torch.randperm(len(order))])",
        LOOP + "test_rows_of_a_minibatch_belong_together_and_start_at_ratio_1",
    ),
    "one update too many": Bug(
        "while run.global_step < all_steps",
        "while run.global_step <= all_steps",
        LOOP + "test_there_are_exactly_num_updates",
    ),
    "the learning rate starts one update late": Bug(
        "progress = run.global_step /",
        "progress = (run.global_step + args.batch_size) /",
        LOOP + "test_there_are_exactly_num_updates",
    ),
    "the critic's learning rate is everybody's": Bug(
        'name.startswith("critic")', "True", LOOP + "test_the_critic_can_have_a_learning_rate_of_its_own"
    ),
    "the KL limit stops nothing": Bug(
        "if args.target_kl is not None and", "if False and", LOOP + "test_the_kl_limit_ends_an_update"
    ),
    "the average-reward mode discounts": Bug(
        "rewards, gamma = rewards - run.average_reward, 1.0",
        "rewards = rewards - run.average_reward",
        LOOP + "test_average_reward_mode",
    ),
    "a fall ends the average-reward mode's life": Bug(
        "torch.zeros_like(terminated), truncated * (1 - terminated)",
        "terminated, truncated * (1 - terminated)",
        LOOP + "test_with_an_average_reward_life",
    ),
    "a time limit ends the average-reward mode's life after a fall": Bug(
        "torch.zeros_like(terminated), truncated * (1 - terminated)",
        "torch.zeros_like(terminated), truncated",
        LOOP + "test_with_an_average_reward_a_fall_on_the_time_limit",
    ),
    "evaluation samples its actions": Bug(
        "policy.mode if deterministic", "policy.mode if not deterministic", LOOP + "test_evaluation_takes_the_mode"
    ),
    "evaluation moves the statistics": Bug(
        "statistics is None and args.norm_obs, ", "args.norm_obs, ", LOOP + "test_normalisers_have_the_discount"
    ),
    "thresholds must be hit exactly": Bug(
        "step // every > (step - advance) // every",
        "step % every == 0",
        "test_teaching_numbers::test_thresholds_are_crossed_where_multiples_are_missed",
    ),
    # --- resume
    "random numbers are not restored": Bug('torch.set_rng_state(checkpoint["generator"])', "pass", EXTENDED, "Hopper"),
    "environments begin anew": Bug("RANK == 0 and vec_env.set_state(state)", "RANK == 0", EXTENDED, "Hopper"),
    "Adam's step is not restored": Bug(
        'for name, x in checkpoint["adam"].items()}',
        'for name, x in (checkpoint["adam"] | {"step": torch.zeros(())}).items()}',
        EXTENDED,
        "Hopper",
    ),
    "rows after the checkpoint stay": Bug(
        'log.truncate(saved["run"]["csv_size"])',
        "pass",
        "test_resume::test_a_run_killed_at_an_awkward_moment",
        "logged and not saved",
    ),
    "the statistics of a checkpoint are not loaded": Bug(
        'statistics.set_state(tree_map(np.asarray, checkpoint["statistics"]))',
        "pass",
        LOOP + "test_play_plays_the_policy_and_the_statistics",
    ),
}


def run_test(script: ModuleType, bug: Bug, folder: Path) -> None:
    """Call the tests whose names begin so, with all their parameters in which the case occurs; raises what they
    raise."""
    file, _, name = bug.caught_by.rpartition("::")
    functions = [f for key, f in vars(FILES[file or "test_ppo_math"]).items() if key.startswith(name)]
    assert functions, name
    for function in functions:
        cases = [mark.args for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        for values in itertools.product(*(rows for _, rows in cases)):
            if bug.case not in str(values):
                continue
            with pytest.MonkeyPatch.context() as monkeypatch:
                folder = folder / "next"  # of the one before: each has a folder of its own
                folder.mkdir()
                fixtures = {"script": script, "continuous": script, "tmp_path": folder, "monkeypatch": monkeypatch,
                            "run_tiny": tiny_runner(script, folder)}  # fmt: skip
                arguments = {key: fixtures[key] for key in inspect.signature(function).parameters if key in fixtures}
                for (names, _), row in zip(cases, values, strict=True):
                    arguments |= {names: row} if isinstance(names, str) else dict(zip(names, row, strict=True))
                function(**arguments)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(continuous: ModuleType, name: str, tmp_path: Path) -> None:
    """That the same test passes without the bug is seen where it runs."""
    bug, mutant = BUGS[name], tmp_path / "mutant.py"
    source = Path(str(continuous.__file__)).read_text()
    if source.count(bug.old) != 1:
        assert Path(str(continuous.__file__)).parent != ROOT, f"{bug.old!r} stands {source.count(bug.old)} times there"
        pytest.skip(f"the copy does not have {bug.old!r} (once)")
    mutant.write_text(source.replace(bug.old, bug.new))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_test(load_script(mutant), bug, tmp_path)


def test_there_are_enough_bugs_and_each_is_its_own() -> None:
    source = (ROOT / "ppo_continuous_mujoco.py").read_text()
    assert [bug.old for bug in BUGS.values() if source.count(bug.old) != 1] == []
    assert len(BUGS) >= 55
    assert len({(bug.old, bug.new) for bug in BUGS.values()}) == len(BUGS)
