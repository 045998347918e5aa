"""The mathematics of PPO, on every script (or on yours: `pytest --script my_copy.py tests/test_ppo_math.py`).

Expected values are worked out by hand in the comments, or come from a slower and plainer formula beside the test.
"""

from __future__ import annotations

import copy
import itertools
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import SPACES, Sample, domain, flat, make_batch, make_sample, with_args
from tests.known_values import known_value

# ---- helpers --------------------------------------------------------------------------------------------------------


def column(*numbers: float) -> torch.Tensor:
    """One environment's numbers over time, (num_steps, 1)."""
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def gae(
    script: ModuleType,
    rewards: torch.Tensor,
    values: torch.Tensor,
    last_values: Any,
    gamma: float,
    gae_lambda: float,
    terminations: torch.Tensor | None = None,
    truncations: torch.Tensor | None = None,
    final_values: dict[tuple[int, int], float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """compute_gae where V(s') is the next row's V, `last_values` after the last row, and `final_values[t, n]` after
    the steps named there (episodes cut by a time limit)."""
    no = torch.zeros_like(rewards, dtype=torch.bool)
    next_values = torch.cat([values[1:], torch.as_tensor(last_values, dtype=values.dtype).expand(1, values.shape[1])])
    for (t, n), value in (final_values or {}).items():
        next_values[t, n] = value
    terminations = no if terminations is None else terminations
    truncations = no if truncations is None else truncations
    return script.compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda)


class FakeAgent(nn.Module):
    """What a loss asks of an agent: `policy` and `get_value`, and both at once."""

    policy: Any
    get_value: Any

    def forward(self, obs: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return self.policy(obs), self.get_value(obs)


class TableAgent(FakeAgent):
    """An agent whose log pi(a|s), V(s) and entropy are free numbers, one of each for each observation 0, 1, 2, ..."""

    def __init__(self, log_probs: torch.Tensor, values: torch.Tensor, entropies: torch.Tensor) -> None:
        super().__init__()
        self.log_probs, self.values = nn.Parameter(log_probs.clone()), nn.Parameter(values.clone())
        self.entropies = nn.Parameter(entropies.clone())

    def policy(self, obs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(log_prob=lambda actions: self.log_probs[obs], entropy=lambda: self.entropies[obs])

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.values[obs]


def table_loss(
    script: ModuleType,
    ratios: Any,
    advantages: Any,
    values: Any = None,
    old_values: Any = None,
    returns: Any = None,
    entropies: Any = None,
    **args: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], TableAgent]:
    """ppo_loss of a TableAgent whose pi / pi_old are `ratios`; the agent's parameters then hold gradients."""
    log_ratio = torch.log(torch.tensor(ratios, dtype=torch.float32))
    old_log_probs = torch.linspace(-2.0, -1.0, len(ratios))  # any old policy will do
    zeros = torch.zeros(len(ratios))

    def tensor(x: Any) -> torch.Tensor:
        return zeros if x is None else torch.tensor(x, dtype=torch.float32)

    agent = TableAgent(old_log_probs + log_ratio, tensor(values), tensor(entropies))
    args = {"norm_adv": "none", "ent_coef": 0.0, "vf_coef": 0.0, "clip_coef": 0.2, "clip_vloss": False} | args
    batch = make_batch(
        script, obs=torch.arange(len(ratios)), actions=zeros, log_probs=old_log_probs, values=tensor(old_values),
        advantages=tensor(advantages), returns=tensor(returns),
    )  # fmt: skip
    loss, metrics = script.ppo_loss(agent, with_args(script, **args), batch)
    loss.backward()
    return loss.detach(), metrics, agent


# ---- advantages: hand-worked numbers --------------------------------------------------------------------------------


def test_gae_of_three_steps_worked_by_hand(script: ModuleType) -> None:
    # gamma = 0.5, lambda = 0.5, so gamma lambda = 0.25. The rollout ends after step 2 in a state of value 4.
    #   delta_2 = 3 + 0.5*4 - 3 = 2.0        A_2 = 2.0
    #   delta_1 = 2 + 0.5*3 - 2 = 1.5        A_1 = 1.5 + 0.25*2.0 = 2.0
    #   delta_0 = 1 + 0.5*2 - 1 = 1.0        A_0 = 1.0 + 0.25*2.0 = 1.5
    advantages, returns = gae(script, column(1, 2, 3), column(1, 2, 3), 4.0, gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(advantages, column(1.5, 2.0, 2.0))
    torch.testing.assert_close(returns, column(2.5, 4.0, 5.0))  # A + V


def test_a_termination_drops_the_next_value_and_cuts_the_recursion(script: ModuleType) -> None:
    # As above, but step 1 terminated: delta_1 = 2 - 2 = 0, A_1 = 0, A_0 = 1.0 + 0.25*0 = 1.0; step 2 is untouched.
    ends = column(0, 1, 0).bool()
    advantages, _ = gae(script, column(1, 2, 3), column(1, 2, 3), 4.0, 0.5, 0.5, terminations=ends)
    torch.testing.assert_close(advantages, column(1.0, 0.0, 2.0))


def test_a_truncation_keeps_the_final_value_and_cuts_the_recursion(script: ModuleType) -> None:
    # Step 1 was cut by a time limit in a state of value 8 (not 3, the value of the reset state in the next row):
    # delta_1 = 2 + 0.5*8 - 2 = 4, A_1 = 4 (nothing of step 2), A_0 = 1.0 + 0.25*4 = 2.0.
    ends = column(0, 1, 0).bool()
    advantages, _ = gae(script, column(1, 2, 3), column(1, 2, 3), 4.0, 0.5, 0.5, None, ends, {(1, 0): 8.0})
    torch.testing.assert_close(advantages, column(2.0, 4.0, 2.0))


def test_a_termination_on_the_time_limit_is_a_termination(script: ModuleType) -> None:
    ends = column(0, 1, 0).bool()
    both, _ = gae(script, column(1, 2, 3), column(1, 2, 3), 4.0, 0.5, 0.5, ends, ends, {(1, 0): 8.0})
    only, _ = gae(script, column(1, 2, 3), column(1, 2, 3), 4.0, 0.5, 0.5, ends)
    torch.testing.assert_close(both, only, rtol=0, atol=0)


def test_a_termination_in_the_last_row_drops_the_bootstrap(script: ModuleType) -> None:
    # delta_2 = 3 - 3 = 0: the state after the rollout belongs to the next episode.
    advantages, _ = gae(script, column(1, 2, 3), column(1, 2, 3), 4.0, 0.5, 0.5, column(0, 0, 1).bool())
    torch.testing.assert_close(advantages, column(1.375, 1.5, 0.0))  # A_1 = 1.5 + 0, A_0 = 1 + 0.25*1.5


# ---- advantages: against plainer formulas ---------------------------------------------------------------------------


@st.composite
def rollouts(draw: st.DrawFn) -> dict[str, Any]:
    """A random rollout of up to 9 steps and 4 environments, with random ends, all in float64."""
    num_steps, num_envs = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def random() -> torch.Tensor:
        return torch.randn((num_steps, num_envs), dtype=torch.float64, generator=generator)

    def flags() -> torch.Tensor:
        return torch.rand((num_steps, num_envs), generator=generator) < draw(st.sampled_from([0.0, 0.2, 0.6]))

    terminations, truncations = flags(), flags()
    values, final_values, last_values = random(), random(), random()[:1]
    next_values = torch.where(terminations | truncations, final_values, torch.cat([values[1:], last_values]))
    return {
        "rewards": random(), "values": values, "next_values": next_values, "terminations": terminations,
        "truncations": truncations, "gamma": draw(st.floats(0, 1)), "gae_lambda": draw(st.floats(0, 1)),
    }  # fmt: skip


@settings(max_examples=60)
@given(rollout=rollouts())
def test_gae_equals_its_definition_as_a_double_sum(script: ModuleType, rollout: dict[str, Any]) -> None:
    """A_t = sum over l >= 0 of (gamma lambda)^l delta_{t+l}, up to the end of the episode or of the rollout."""
    r, v, v_next, terminated, truncated, gamma, gae_lambda = rollout.values()
    expected = torch.zeros_like(r)
    for t, n in itertools.product(range(r.shape[0]), range(r.shape[1])):
        for k in range(t, r.shape[0]):
            future = 0.0 if terminated[k, n] else gamma * v_next[k, n]
            expected[t, n] += (gamma * gae_lambda) ** (k - t) * (r[k, n] + future - v[k, n])
            if terminated[k, n] or truncated[k, n]:
                break
    advantages, returns = script.compute_gae(**rollout)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + v)


@settings(max_examples=30)
@given(rollout=rollouts())
def test_gae_takes_flags_as_numbers_and_whole_rewards(script: ModuleType, rollout: dict[str, Any]) -> None:
    """As many a program keeps them: nothing is rounded to the type of the rewards."""
    rollout["rewards"] = rollout["rewards"].round()
    numbers = {name: rollout[name].to(torch.float32) for name in ("terminations", "truncations")}
    expected = script.compute_gae(**rollout)
    given_numbers = script.compute_gae(**rollout | numbers | {"rewards": rollout["rewards"].to(torch.int64)})
    torch.testing.assert_close(given_numbers, expected, rtol=0, atol=0)


@settings(max_examples=40)
@given(rollout=rollouts())
def test_gae_of_many_environments_is_that_of_each_on_its_own(script: ModuleType, rollout: dict[str, Any]) -> None:
    advantages, returns = script.compute_gae(**rollout)
    for n in range(advantages.shape[1]):
        alone = {key: x[:, n : n + 1] if isinstance(x, torch.Tensor) else x for key, x in rollout.items()}
        own_advantages, own_returns = script.compute_gae(**alone)
        torch.testing.assert_close(advantages[:, n : n + 1], own_advantages, rtol=0, atol=0)
        torch.testing.assert_close(returns[:, n : n + 1], own_returns, rtol=0, atol=0)


@settings(max_examples=30)
@given(rollout=rollouts())
def test_gae_with_lambda_0_is_the_one_step_residual(script: ModuleType, rollout: dict[str, Any]) -> None:
    advantages, _ = script.compute_gae(**rollout | {"gae_lambda": 0.0})
    future = rollout["gamma"] * rollout["next_values"] * ~rollout["terminations"]
    torch.testing.assert_close(advantages, rollout["rewards"] + future - rollout["values"])


@settings(max_examples=30)
@given(rollout=rollouts())
def test_gae_with_lambda_1_makes_the_returns_sampled_returns(script: ModuleType, rollout: dict[str, Any]) -> None:
    """R_t = r_t + gamma R_{t+1}, from V of the final state, or 0 after a termination."""
    _, returns = script.compute_gae(**rollout | {"gae_lambda": 1.0})
    expected = torch.zeros_like(returns)
    for t, n in itertools.product(reversed(range(returns.shape[0])), range(returns.shape[1])):
        future = rollout["next_values"][t, n] * ~rollout["terminations"][t, n]
        last = t == returns.shape[0] - 1
        if not (last or rollout["terminations"][t, n] or rollout["truncations"][t, n]):
            future = expected[t + 1, n]
        expected[t, n] = rollout["rewards"][t, n] + rollout["gamma"] * future
    torch.testing.assert_close(returns, expected)


def test_discounted_one_step_residuals_telescope_to_the_k_step_advantage(script: ModuleType) -> None:
    """sum over l < k of gamma^l delta_{t+l} = r_t + ... + gamma^(k-1) r_{t+k-1} + gamma^k V(s_{t+k}) - V(s_t)."""
    gamma, generator = 0.9, torch.Generator().manual_seed(1)
    rewards = torch.randn((7, 1), dtype=torch.float64, generator=generator)
    values = torch.randn((8, 1), dtype=torch.float64, generator=generator)
    deltas, _ = gae(script, rewards, values[:-1], values[-1], gamma, gae_lambda=0.0)
    for k in range(1, 8):
        telescoped = sum(gamma**j * deltas[j, 0] for j in range(k))
        k_step = sum(gamma**j * rewards[j, 0] for j in range(k)) + gamma**k * values[k, 0] - values[0, 0]
        torch.testing.assert_close(telescoped, k_step)


# ---- advantages: an exact critic sees no advantage, however an episode or a rollout ends ----------------------------


def collect(mode: AutoresetMode, num_steps: int, gamma: float, critic: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """A rollout of KnownValues-v0 under a time limit of 5 steps: compute_gae's arguments, and which rows are steps.

    Under NEXT_STEP the step after an end only resets: its action is ignored, its reward is 0, and it leads from one
    episode into another. It is no transition; marked as an end it separates the episodes, and it is left out.
    """
    envs = SyncVectorEnv([lambda: gym.make("KnownValues-v0", max_episode_steps=5)] * 3, autoreset_mode=mode)
    obs, _ = envs.reset(seed=7)
    rows: dict[str, list[Any]] = {name: [] for name in ("r", "v", "v_next", "terminated", "truncated", "valid")}
    ended = np.zeros(3, dtype=bool)
    for _ in range(num_steps):
        next_obs, reward, terminated, truncated, infos = envs.step(np.zeros((3, 1), dtype=np.float32))
        reached = next_obs.copy()
        if mode is AutoresetMode.SAME_STEP:
            for n in np.flatnonzero(terminated | truncated):
                reached[n] = infos["final_obs"][n]
            valid = np.ones(3, dtype=bool)
        else:
            valid, truncated = ~ended, truncated | ended
        ended = terminated | truncated if mode is AutoresetMode.SAME_STEP else (terminated | truncated) & valid
        for name, x in zip(rows, (reward, critic(obs), critic(reached), terminated, truncated, valid), strict=True):
            rows[name].append(torch.as_tensor(np.asarray(x).reshape(3)))
        obs = next_obs
    envs.close()
    stacked = {name: torch.stack(row) for name, row in rows.items()}
    valid_rows = stacked.pop("valid")
    names = ("rewards", "values", "next_values", "terminations", "truncations")
    return dict(zip(names, stacked.values(), strict=True)) | {"gamma": gamma, "gae_lambda": 0.95}, valid_rows


@pytest.mark.parametrize("num_steps", [1, 7, 40])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP], ids=lambda mode: mode.value)
def test_an_exact_critic_gives_zero_advantages(script: ModuleType, mode: AutoresetMode, num_steps: int) -> None:
    rollout, valid = collect(mode, num_steps, 0.9, lambda obs: known_value(obs.astype(np.float64), 0.9))
    advantages, returns = script.compute_gae(**rollout)
    if num_steps == 40:  # every way to end really occurs, also on both grounds at once
        assert rollout["terminations"][valid].sum() > 5
        assert (rollout["truncations"] & ~rollout["terminations"])[valid].sum() > 5
        assert (rollout["truncations"] & rollout["terminations"])[valid].any()
    torch.testing.assert_close(advantages[valid], torch.zeros_like(advantages[valid]), rtol=0, atol=1e-12)
    torch.testing.assert_close(returns[valid], rollout["values"][valid])
    if mode is AutoresetMode.NEXT_STEP and num_steps == 40:
        # The reset rows do need leaving out: delta = 0 + gamma V(first state) - V(final state).
        assert advantages[~valid].abs().min() > 0.1


def test_both_autoreset_modes_give_the_same_advantages(script: ModuleType) -> None:
    """Also for a wrong critic, transition by transition, up to the last episode that both rollouts saw end."""
    results = []
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        rollout, valid = collect(mode, 60, 0.9, lambda obs: np.sin(3.0 * obs.astype(np.float64)))
        advantages, _ = script.compute_gae(**rollout)
        results.append([advantages[valid[:, n], n] for n in range(3)])
        ends = [(rollout["terminations"] | rollout["truncations"])[valid[:, n], n] for n in range(3)]
    for n, (same, following) in enumerate(zip(*results, strict=True)):
        length = int(ends[n].nonzero()[-1]) + 1  # NEXT_STEP saw fewer transitions
        assert length > 30
        torch.testing.assert_close(same[:length], following[:length], rtol=0, atol=0)


# ---- normalised advantages ------------------------------------------------------------------------------------------


def test_normalized_advantages_by_hand(script: ModuleType) -> None:
    # mean (1 + 2 + 6) / 3 = 3; deviations -2, -1, 3; sample variance (4 + 1 + 9) / 2 = 7.
    normalized = script.normalize_advantages(torch.tensor([1.0, 2.0, 6.0]))
    torch.testing.assert_close(normalized, torch.tensor([-2.0, -1.0, 3.0]) / math.sqrt(7))


def test_normalization_keeps_the_order_and_survives_equal_advantages(script: ModuleType) -> None:
    advantages = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(script.normalize_advantages(advantages).argsort(), advantages.argsort())
    assert torch.equal(script.normalize_advantages(torch.full((4,), 3.0)), torch.zeros(4))


def test_normalization_scopes(script: ModuleType) -> None:
    """Over the batch the environments keep their differences of level; over each environment they lose them."""
    advantages = torch.tensor([[0.0, 10.0], [2.0, 14.0]])
    # batch: mean 6.5, sample variance (42.25 + 12.25 + 20.25 + 56.25) / 3 = 131 / 3
    expected = torch.tensor([[-6.5, 3.5], [-4.5, 7.5]]) / math.sqrt(131 / 3)
    torch.testing.assert_close(script.normalize_advantages(advantages), expected)
    # per environment: (0, 2) -> -+1 / sqrt(2), (10, 14) -> -+2 / sqrt(8): the same numbers
    expected = torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) / math.sqrt(2)
    torch.testing.assert_close(script.normalize_advantages(advantages, dim=0), expected)


def test_the_loss_normalizes_advantages_only_if_it_is_asked_to(script: ModuleType) -> None:
    # At ratio 1 the policy loss is -mean(A): 0 for normalised advantages, and the gradient is -A / batch size.
    advantages = [1.0, 2.0, 6.0]
    normalized = torch.tensor([-2.0, -1.0, 3.0]) / math.sqrt(7)
    loss, _, agent = table_loss(script, [1.0] * 3, advantages, norm_adv="minibatch")
    torch.testing.assert_close(loss, torch.tensor(0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(agent.log_probs.grad, -normalized / 3)
    for elsewhere in ("none", "batch"):  # already normalised over the batch: the loss must leave them alone
        loss, _, agent = table_loss(script, [1.0] * 3, advantages, norm_adv=elsewhere)
        torch.testing.assert_close(loss, torch.tensor(-3.0))
        torch.testing.assert_close(agent.log_probs.grad, -torch.tensor(advantages) / 3)


# ---- the clipped surrogate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "ratio", "objective", "slope"),
    [
        # min(rho A, clip(rho, 0.8, 1.2) A) and its slope in log pi, which is rho A where rho is free and 0 where not
        (+2.0, 0.5, +1.0, +1.0),  # a good action made rarer: back up, however far it has gone
        (+2.0, 1.1, +2.2, +2.2),
        (+2.0, 1.5, +2.4, 0.0),  # a good action made much more likely: 1.2 * 2, and no more to earn
        (-2.0, 0.5, -1.6, 0.0),  # a bad action made much rarer: 0.8 * -2, and no more to earn
        (-2.0, 1.1, -2.2, -2.2),
        (-2.0, 1.5, -3.0, -3.0),  # a bad action made more likely: back down, unclipped
    ],
)
def test_the_six_cases_of_the_clipped_objective(
    script: ModuleType, advantage: float, ratio: float, objective: float, slope: float
) -> None:
    loss, metrics, agent = table_loss(script, [ratio], [advantage])
    torch.testing.assert_close(loss, torch.tensor(-objective))
    torch.testing.assert_close(metrics["policy_loss"], torch.tensor(-objective))
    torch.testing.assert_close(agent.log_probs.grad, torch.tensor([-slope]))


def test_the_clip_fraction_counts_ratios_outside_the_interval_on_both_sides(script: ModuleType) -> None:
    _, metrics, _ = table_loss(script, [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0, 1.0], [1.0] * 8)
    assert float(metrics["clip_fraction"]) == 4 / 8
    _, metrics, _ = table_loss(script, [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0, 1.0], [1.0] * 8, clip_coef=0.6)
    assert float(metrics["clip_fraction"]) == 1 / 8


def test_the_kl_estimators_by_hand(script: ModuleType) -> None:
    # ratios 2 and 1/2: log ratios +0.693, -0.693. k1 = -mean(log rho) = 0; k3 = mean(rho - 1 - log rho)
    # = ((2 - 1 - 0.693) + (0.5 - 1 + 0.693)) / 2 = (0.307 + 0.193) / 2 = 0.25
    _, metrics, _ = table_loss(script, [2.0, 0.5], [1.0, 1.0])
    torch.testing.assert_close(metrics["old_approx_kl"], torch.tensor(0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(metrics["approx_kl"], torch.tensor(0.25))
    # ratio 1/e: an action that became less likely; the old policy had more of it, k1 = +1.
    _, metrics, _ = table_loss(script, [math.exp(-1)], [1.0])
    torch.testing.assert_close(metrics["old_approx_kl"], torch.tensor(1.0))
    torch.testing.assert_close(metrics["approx_kl"], torch.tensor(math.exp(-1)))  # 1/e - 1 + 1


# ---- value loss, entropy, and their sum -----------------------------------------------------------------------------


def test_the_value_loss_is_half_the_mean_squared_error(script: ModuleType) -> None:
    # errors 2 and -4: 0.5 * (4 + 16) / 2 = 5, times vf_coef 0.5; the gradient in V is vf_coef * error / batch size
    loss, metrics, agent = table_loss(script, [1.0, 1.0], [0.0, 0.0], [3.0, 1.0], [0.0, 0.0], [1.0, 5.0], vf_coef=0.5)
    torch.testing.assert_close(metrics["value_loss"], torch.tensor(5.0))
    torch.testing.assert_close(loss, torch.tensor(2.5))
    torch.testing.assert_close(agent.values.grad, torch.tensor([0.5, -1.0]))


def test_the_clipped_value_loss_takes_the_larger_error(script: ModuleType) -> None:
    # V_old = 1, eps = 0.2, so V may count up to 1.2.
    #   V = 2, R = 3:   (2 - 3)^2 = 1, (1.2 - 3)^2 = 3.24: the clipped one, which V cannot change: gradient 0
    #   V = 2, R = 0:   4 against 1.44: the free one, gradient vf_coef (V - R) = 2
    #   V = 1.1, R = 0: inside, 1.21 both ways
    common = {"old_values": [1.0], "vf_coef": 1.0, "clip_vloss": True}
    loss, _, agent = table_loss(script, [1.0], [0.0], [2.0], returns=[3.0], **common)
    torch.testing.assert_close(loss, torch.tensor(1.62))
    torch.testing.assert_close(agent.values.grad, torch.tensor([0.0]))
    loss, _, agent = table_loss(script, [1.0], [0.0], [2.0], returns=[0.0], **common)
    torch.testing.assert_close(loss, torch.tensor(2.0))
    torch.testing.assert_close(agent.values.grad, torch.tensor([2.0]))
    loss, _, _ = table_loss(script, [1.0], [0.0], [1.1], returns=[0.0], **common)
    torch.testing.assert_close(loss, torch.tensor(0.605))
    loss, _, _ = table_loss(script, [1.0], [0.0], [2.0], returns=[3.0], **common | {"clip_vloss": False})
    torch.testing.assert_close(loss, torch.tensor(0.5))


def test_the_entropy_bonus_pulls_the_entropy_up(script: ModuleType) -> None:
    loss, metrics, agent = table_loss(script, [1.0, 1.0], [0.0, 0.0], entropies=[2.0, 4.0], ent_coef=0.1)
    torch.testing.assert_close(metrics["entropy"], torch.tensor(3.0))
    torch.testing.assert_close(loss, torch.tensor(-0.3))
    torch.testing.assert_close(agent.entropies.grad, torch.tensor([-0.05, -0.05]))  # descent raises it


# ---- the loss of a real agent ---------------------------------------------------------------------------------------


def real_batch(script: ModuleType, **args: Any) -> tuple[Any, Any, Any]:
    """A fresh agent, a batch of 16 of its own actions, and arguments."""
    sample = make_sample(script, **{"norm_adv": "none", "ent_coef": 0.0} | args)
    with torch.no_grad():
        policy, values = sample.agent(sample.obs)
    generator = torch.Generator().manual_seed(3)
    advantages, returns = torch.randn(16, generator=generator), torch.randn(16, generator=generator)
    batch = make_batch(script, obs=sample.obs, actions=sample.actions, log_probs=policy.log_prob(sample.actions),
                       values=values, advantages=advantages, returns=returns)  # fmt: skip
    return sample.agent, batch, sample.args


def gradient(script: ModuleType, agent: Any, batch: Any, args: Any) -> torch.Tensor:
    """d ppo_loss / d parameters, one vector."""
    agent.zero_grad()
    script.ppo_loss(agent, args, batch)[0].backward()
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in agent.parameters()])


def test_before_the_first_step_the_ratio_is_1_and_nothing_is_clipped(script: ModuleType) -> None:
    agent, batch, args = real_batch(script, norm_adv="minibatch")
    loss, metrics = script.ppo_loss(agent, args, batch)
    for name in ("approx_kl", "old_approx_kl", "clip_fraction"):
        assert float(metrics[name]) == pytest.approx(0, abs=1e-7)
    assert abs(float(metrics["policy_loss"])) < 1e-6  # -mean of normalised advantages
    assert math.isfinite(loss.item())
    assert not any(metric.requires_grad for metric in metrics.values())


def test_the_gradient_of_a_batch_is_the_mean_of_the_gradients_of_its_samples(script: ModuleType) -> None:
    agent, batch, args = real_batch(script, ent_coef=0.01)
    whole = gradient(script, agent, batch, args)
    singles = [gradient(script, agent, script.Batch(*(x[i : i + 1] for x in batch)), args) for i in range(16)]
    torch.testing.assert_close(torch.stack(singles).mean(0), whole, rtol=1e-4, atol=1e-6)


def test_a_step_against_the_gradient_improves_the_objective(script: ModuleType) -> None:
    agent, batch, args = real_batch(script)
    weights, _ = flat(agent, 0.0)
    before, _ = script.ppo_loss(agent, args, batch)
    step = gradient(script, agent, batch, args)
    weights -= 1e-3 * step
    after, _ = script.ppo_loss(agent, args, batch)
    assert float((before - after).detach()) == pytest.approx(1e-3 * float(step @ step), rel=0.2)


def test_good_actions_become_likelier_and_bad_ones_rarer(script: ModuleType) -> None:
    agent, batch, args = real_batch(script, vf_coef=0.0)
    weights, _ = flat(agent, 0.0)
    start = weights.clone()
    for sign in (1.0, -1.0):
        one = script.Batch(*(x[:1] for x in batch))._replace(advantages=torch.tensor([sign]))
        weights -= 1e-4 * gradient(script, agent, one, args)
        moved = agent.policy(one.obs).log_prob(one.actions) - one.log_probs
        weights.copy_(start)
        assert float(moved.detach()) * sign > 0


def test_policy_and_value_gradients_go_where_they_belong(script: ModuleType) -> None:
    """Without a value loss the critic's own weights get no gradient; without advantages the actor's get none. What
    both share learns from both."""
    agent, batch, args = real_batch(script, vf_coef=0.0)
    sizes, names = [p.numel() for p in agent.parameters()], [name for name, _ in agent.named_parameters()]

    def moved(vector: torch.Tensor) -> set[str]:
        return {name for name, part in zip(names, vector.split(sizes), strict=True) if bool(part.any())}

    by_policy = moved(gradient(script, agent, batch, args))
    args.vf_coef = 0.5
    by_value = moved(gradient(script, agent, batch._replace(advantages=torch.zeros(16)), args))
    assert by_policy | by_value == set(names)
    assert not [name for name in by_policy if name.startswith("critic")]
    assert [name for name in by_value if name.startswith("critic")]
    if not by_policy & by_value:
        assert not [name for name in by_value if name.startswith("actor")]


def test_values_log_probs_and_entropies_are_one_number_a_sample(script: ModuleType) -> None:
    sample = make_sample(script)
    policy, values = sample.agent(sample.obs)
    for x in (values, policy.log_prob(sample.actions), policy.entropy()):
        assert x.shape == (16,)
    torch.testing.assert_close(sample.agent.get_value(sample.obs), values)
    torch.testing.assert_close(sample.agent.policy(sample.obs).mode, policy.mode)
    assert sample.agent.get_value(sample.obs[:1]).shape == (1,)  # squeeze(-1), not squeeze()


# ---- explained variance ---------------------------------------------------------------------------------------------


def test_explained_variance_cases(script: ModuleType) -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert script.explained_variance(returns, returns) == 1
    assert script.explained_variance(torch.full((4,), 3.0), returns) == 0  # the mean, or any other constant
    # V = -R: errors 2R, variance 4 Var(R): 1 - 4 = -3, worse than a constant
    assert script.explained_variance(-returns, returns) == pytest.approx(-3)
    for constant in (0.0, 0.1, 2.0, -99.7):  # of which float32 makes small variances
        assert math.isnan(script.explained_variance(torch.randn(2048), torch.full((2048,), constant)))
    # It is blind to a constant error, which is why the mean absolute error is logged beside it.
    assert script.explained_variance(returns + 100, returns) == 1


# ---- initial weights ------------------------------------------------------------------------------------------------


def test_layers_start_orthogonal_with_zero_biases(script: ModuleType) -> None:
    """W W^T = gain^2 I (or W^T W where W is tall); gain sqrt(2), but 0.01 at the policy's head, 1 at the critic's."""
    agent = make_sample(script).agent
    layers = [(name, m) for name, m in agent.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    gains = set()
    for name, layer in layers:
        weight = layer.weight.detach().flatten(1)
        gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        gain = math.sqrt(float(gram[0, 0]))
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(layer.bias, torch.zeros_like(layer.bias)), name
        gains.add(round(gain, 4))
    assert gains == {0.01, 1.0, 1.4142}


# ---- the policy, by its action space --------------------------------------------------------------------------------


def lively(script: ModuleType, space: type, **args: Any) -> tuple[Sample, Any]:
    """A sample whose policy is away from its start, and that policy. Skips scripts with other action spaces."""
    sample = make_sample(script, **args)
    if not isinstance(SPACES[domain(script)][1], space):
        pytest.skip(f"the actions of {script.__name__} are no {space.__name__}")
    weights, _ = flat(sample.agent, 0.0)
    weights += 0.1 * torch.randn(len(weights), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return sample, sample.agent.policy(sample.obs)


def test_a_categorical_policy_is_that_of_its_probabilities(script: ModuleType) -> None:
    sample, policy = lively(script, Discrete, amp=False)
    n = int(SPACES[domain(script)][1].n)  # type: ignore[union-attr]
    log_probs = torch.stack([policy.log_prob(torch.full((16,), a)) for a in range(n)], 1)
    probs = log_probs.exp()
    torch.testing.assert_close(probs.sum(1), torch.ones(16))
    torch.testing.assert_close(policy.log_prob(sample.actions), log_probs[torch.arange(16), sample.actions])
    torch.testing.assert_close(policy.entropy(), -(probs * log_probs).sum(1))
    assert torch.equal(policy.mode, probs.argmax(1))
    torch.manual_seed(0)
    with torch.no_grad():
        many = sample.agent.policy(sample.obs[:1].expand(2_000, *sample.obs.shape[1:])).sample()
    torch.testing.assert_close(many.bincount(minlength=n) / 2_000, probs[0], rtol=0, atol=0.05)


def test_a_gaussian_policy_is_that_of_its_mean_and_deviation(script: ModuleType) -> None:
    sample, policy = lively(script, Box)
    normal = torch.distributions.Normal(policy.mean, policy.stddev)
    torch.testing.assert_close(policy.log_prob(sample.actions), normal.log_prob(sample.actions).sum(-1))
    torch.testing.assert_close(policy.entropy(), (0.5 + 0.5 * math.log(2 * math.pi) + policy.stddev.log()).sum(-1))
    torch.testing.assert_close(policy.mode, policy.mean)
    torch.manual_seed(0)
    with torch.no_grad():
        many = sample.agent.policy(sample.obs[:1].expand(20_000, -1)).sample()
    torch.testing.assert_close(many.mean(0), policy.mean[0], rtol=0, atol=0.03)
    torch.testing.assert_close(many.std(0), policy.stddev[0], rtol=0.03, atol=0)


def test_log_std_init_is_the_logarithm_of_the_deviation(script: ModuleType) -> None:
    deviations = []
    for log_std in (0.0, -2.0):  # the entropy of 2 dimensions: 2 * 1.41894, and 2 * (1.41894 - 2) < 0
        sample = make_sample(script, log_std_init=log_std)
        if not hasattr(sample.args, "log_std_init"):
            pytest.skip(f"{script.__name__} has no --log-std-init")
        deviations.append(sample.agent.policy(sample.obs).stddev)
    torch.testing.assert_close(deviations[0] * math.exp(-2.0), deviations[1])


# ---- steps of the optimiser -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [0.5, None])
def test_a_step_is_that_of_torchs_adam(script: ModuleType, max_grad_norm: float | None) -> None:
    """Five minibatches beside torch.optim.Adam with epsilon 1e-5 (detail 3); gradients are clipped to their joint norm,
    and the logged norm is that before clipping."""
    agent, batch, args = real_batch(script, max_grad_norm=max_grad_norm, vf_coef=3.0)
    other = copy.deepcopy(agent)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01, eps=1e-5)
    weights, adam = flat(agent, 0.01)
    start = weights.clone()
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:8] for i in range(5)])
    metrics = script.take_steps(agent, args, weights, adam, script.Batch(*(x[order] for x in batch)))
    for i, rows in enumerate(order):
        loss, expected = script.ppo_loss(other, args, script.Batch(*(x[rows] for x in batch)))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), max_grad_norm or math.inf)
        optimizer.step()
        assert max_grad_norm is None or norm > 1
        for name, value in (expected | {"grad_norm": norm}).items():
            torch.testing.assert_close(metrics[name][i], value, rtol=1e-3, atol=1e-5)
    # Where a gradient is zero but for rounding, a step of Adam has any sign: so all weights are judged as one.
    expected_weights = nn.utils.parameters_to_vector(other.parameters()).detach()
    assert float((weights - expected_weights).norm()) < 0.01 * float((weights - start).norm())
    assert float(adam["step"]) == 5


def test_small_gradients_are_not_scaled_up(script: ModuleType) -> None:
    results = []
    for limit in (None, 1e6):
        agent, batch, args = real_batch(script, max_grad_norm=limit)
        weights, adam = flat(agent, 0.01)
        script.take_steps(agent, args, weights, adam, script.Batch(*(x[None] for x in batch)))
        results.append(adam["mean"])
    torch.testing.assert_close(*results, rtol=0, atol=0)
