"""The mathematics of PPO, on every script (or on yours: `pytest --script my_copy.py tests/test_ppo_math.py`).

Expected values are worked out by hand in the comments, or come from a slower and plainer formula beside the test.
"""

from __future__ import annotations

import copy
import itertools
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import SPACES, Sample, column, domain, flat, gae, make_batch, make_sample, with_args


class TableAgent(nn.Module):
    """An agent whose log pi(a|s), V(s) and entropy are free numbers, one of each for each observation 0, 1, 2, ..."""

    def __init__(self, log_probs: torch.Tensor, values: torch.Tensor, entropies: torch.Tensor) -> None:
        super().__init__()
        self.log_probs, self.values = nn.Parameter(log_probs.clone()), nn.Parameter(values.clone())
        self.entropies = nn.Parameter(entropies.clone())

    def policy(self, obs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(log_prob=lambda actions: self.log_probs[obs], entropy=lambda: self.entropies[obs])

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.values[obs]

    def forward(self, obs: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return self.policy(obs), self.get_value(obs)


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
    zeros, old_log_probs = torch.zeros(len(ratios)), torch.linspace(-2.0, -1.0, len(ratios))  # any old policy will do

    def tensor(x: Any) -> torch.Tensor:
        return zeros if x is None else torch.tensor(x, dtype=torch.float32)

    agent = TableAgent(old_log_probs + tensor(ratios).log(), tensor(values), tensor(entropies))
    args = {"norm_adv": "none", "ent_coef": 0.0, "vf_coef": 0.0, "clip_coef": 0.2, "clip_vloss": False} | args
    batch = make_batch(
        script, obs=torch.arange(len(ratios)), actions=zeros, log_probs=old_log_probs, values=tensor(old_values),
        advantages=tensor(advantages), returns=tensor(returns),
    )  # fmt: skip
    loss, metrics = script.ppo_loss(agent, with_args(script, **args), batch)
    loss.backward()
    return loss.detach(), metrics, agent


# ---- advantages -----------------------------------------------------------------------------------------------------
# Rewards and values 1, 2, 3; gamma = 0.5, lambda = 0.5, so gamma lambda = 0.25. The rollout ends in a state of value 4.
#   delta_2 = 3 + 0.5*4 - 3 = 2.0        A_2 = 2.0
#   delta_1 = 2 + 0.5*3 - 2 = 1.5        A_1 = 1.5 + 0.25*2.0 = 2.0
#   delta_0 = 1 + 0.5*2 - 1 = 1.0        A_0 = 1.0 + 0.25*2.0 = 1.5
BY_HAND: dict[str, tuple[Any, Any, Any]] = {  # terminations, truncations, advantages
    "no end": ((0, 0, 0), (0, 0, 0), (1.5, 2.0, 2.0)),
    # delta_1 = 2 - 2 = 0, A_1 = 0, A_0 = 1.0 + 0.25*0 = 1.0; step 2 is untouched
    "a termination": ((0, 1, 0), (0, 0, 0), (1.0, 0.0, 2.0)),
    # Cut in a state of value 8 (not 3, the value of the reset state in the next row): delta_1 = 2 + 0.5*8 - 2 = 4,
    # A_1 = 4 (nothing of step 2), A_0 = 1.0 + 0.25*4 = 2.0
    "a truncation": ((0, 0, 0), (0, 1, 0), (2.0, 4.0, 2.0)),
    "a termination on the time limit": ((0, 1, 0), (0, 1, 0), (1.0, 0.0, 2.0)),
    # delta_2 = 3 - 3 = 0: the state after the rollout belongs to the next episode; A_1 = 1.5, A_0 = 1 + 0.25*1.5
    "a termination in the last row": ((0, 0, 1), (0, 0, 0), (1.375, 1.5, 0.0)),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_gae_of_three_steps_worked_by_hand(script: ModuleType, case: str) -> None:
    terminations, truncations, expected = BY_HAND[case]
    ends, cuts = column(*terminations).bool(), column(*truncations).bool()
    final_values = {(1, 0): 8.0} if cuts.any() else {}
    advantages, returns = gae(script, column(1, 2, 3), column(1, 2, 3), 4.0, 0.5, 0.5, ends, cuts, final_values)
    torch.testing.assert_close(advantages, column(*expected))
    torch.testing.assert_close(returns, column(*expected) + column(1, 2, 3))  # A + V


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
    share = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
    return {
        "rewards": random().round(), "values": values, "next_values": next_values, "terminations": terminations,
        "truncations": truncations, "gamma": draw(share), "gae_lambda": draw(share),
    }  # fmt: skip


@settings(max_examples=100)
@given(rollout=rollouts())
def test_gae_equals_its_definition_as_a_double_sum(script: ModuleType, rollout: dict[str, Any]) -> None:
    """A_t = sum over l >= 0 of (gamma lambda)^l delta_{t+l}, up to the end of the episode or of the rollout. Whole
    rewards and flags as numbers, as many a program keeps them, are rounded to no other type."""
    r, v, v_next, terminated, truncated, gamma, gae_lambda = rollout.values()
    expected = torch.zeros_like(r)
    for t, n in itertools.product(range(r.shape[0]), range(r.shape[1])):
        for k in range(t, r.shape[0]):
            future = 0.0 if terminated[k, n] else gamma * v_next[k, n]
            expected[t, n] += (gamma * gae_lambda) ** (k - t) * (r[k, n] + future - v[k, n])
            if terminated[k, n] or truncated[k, n]:
                break
    numbers = {name: rollout[name].to(torch.float32) for name in ("terminations", "truncations")}
    for changes in ({}, numbers | {"rewards": r.to(torch.int64)}):
        advantages, returns = script.compute_gae(**rollout | changes)
        torch.testing.assert_close(advantages, expected)
        torch.testing.assert_close(returns, expected + v)


def test_normalized_advantages_by_hand(script: ModuleType) -> None:
    """Over the batch the environments keep their differences of level; over each environment they lose them."""
    # mean (1 + 2 + 6) / 3 = 3; deviations -2, -1, 3; sample variance (4 + 1 + 9) / 2 = 7
    three = torch.tensor([-2.0, -1.0, 3.0]) / math.sqrt(7)
    torch.testing.assert_close(script.normalize_advantages(torch.tensor([1.0, 2.0, 6.0])), three)
    assert torch.equal(script.normalize_advantages(torch.full((4,), 3.0)), torch.zeros(4))
    advantages = torch.tensor([[0.0, 10.0], [2.0, 14.0]])
    # batch: mean 6.5, sample variance (42.25 + 12.25 + 20.25 + 56.25) / 3 = 131 / 3
    expected = torch.tensor([[-6.5, 3.5], [-4.5, 7.5]]) / math.sqrt(131 / 3)
    torch.testing.assert_close(script.normalize_advantages(advantages), expected)
    # per environment: (0, 2) -> -+1 / sqrt(2), (10, 14) -> -+2 / sqrt(8): the same numbers
    expected = torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) / math.sqrt(2)
    torch.testing.assert_close(script.normalize_advantages(advantages, dim=0), expected)


# ---- the loss -------------------------------------------------------------------------------------------------------
def test_the_loss_normalizes_advantages_only_if_it_is_asked_to(script: ModuleType) -> None:
    # At ratio 1 the policy loss is -mean(A): 0 for normalised advantages, and the gradient is -A / batch size.
    plain = torch.tensor([1.0, 2.0, 6.0])
    normalized = torch.tensor([-2.0, -1.0, 3.0]) / math.sqrt(7)
    # "batch": already normalised over the batch, so the loss must leave them alone
    for norm_adv, advantages in (("minibatch", normalized), ("none", plain), ("batch", plain)):
        loss, _, agent = table_loss(script, [1.0] * 3, plain.tolist(), norm_adv=norm_adv)
        torch.testing.assert_close(loss, -advantages.mean(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(agent.log_probs.grad, -advantages / 3)


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
def test_the_six_clip_cases(script: ModuleType, advantage: float, ratio: float, objective: float, slope: float) -> None:
    loss, metrics, agent = table_loss(script, [ratio], [advantage])
    torch.testing.assert_close(loss, torch.tensor(-objective))
    torch.testing.assert_close(metrics["policy_loss"], torch.tensor(-objective))
    torch.testing.assert_close(agent.log_probs.grad, torch.tensor([-slope]))


def test_the_clip_fraction_counts_ratios_outside_the_interval_on_both_sides(script: ModuleType) -> None:
    for clip_coef, outside in ((0.2, 4), (0.6, 1)):
        ratios = [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0, 1.0]
        _, metrics, _ = table_loss(script, ratios, [1.0] * 8, clip_coef=clip_coef)
        assert float(metrics["clip_fraction"]) == outside / 8


def test_the_kl_estimators_by_hand(script: ModuleType) -> None:
    # ratios 2 and 1/2: log ratios +0.693, -0.693. k1 = -mean(log rho) = 0; k3 = mean(rho - 1 - log rho)
    # = ((2 - 1 - 0.693) + (0.5 - 1 + 0.693)) / 2 = (0.307 + 0.193) / 2 = 0.25
    # ratio 1/e: an action that became less likely; the old policy had more of it, k1 = +1; k3 = 1/e - 1 + 1
    for ratios, k1, k3 in (([2.0, 0.5], 0.0, 0.25), ([math.exp(-1)], 1.0, math.exp(-1))):
        _, metrics, _ = table_loss(script, ratios, [1.0] * len(ratios))
        torch.testing.assert_close(metrics["old_approx_kl"], torch.tensor(k1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(metrics["approx_kl"], torch.tensor(k3))


def test_the_value_loss_is_half_the_mean_squared_error(script: ModuleType) -> None:
    # errors 2 and -4: 0.5 * (4 + 16) / 2 = 5, times vf_coef 0.5; the gradient in V is vf_coef * error / batch size
    loss, metrics, agent = table_loss(script, [1.0, 1.0], [0.0, 0.0], [3.0, 1.0], [0.0, 0.0], [1.0, 5.0], vf_coef=0.5)
    torch.testing.assert_close(metrics["value_loss"], torch.tensor(5.0))
    torch.testing.assert_close(loss, torch.tensor(2.5))
    torch.testing.assert_close(agent.values.grad, torch.tensor([0.5, -1.0]))


@pytest.mark.parametrize(
    ("clip_vloss", "value", "target", "expected", "slope"),
    [
        # V_old = 1, eps = 0.2, so V may count up to 1.2
        (True, 2.0, 3.0, 1.62, 0.0),  # (2 - 3)^2 = 1, (1.2 - 3)^2 = 3.24: the clipped one, which V cannot change
        (True, 2.0, 0.0, 2.0, 2.0),  # 4 against 1.44: the free one
        (True, 1.1, 0.0, 0.605, 1.1),  # inside, 1.21 both ways
        (False, 2.0, 3.0, 0.5, -1.0),
    ],
)
def test_the_clipped_value_loss_takes_the_larger_error(
    script: ModuleType, clip_vloss: bool, value: float, target: float, expected: float, slope: float
) -> None:
    loss, _, agent = table_loss(script, [1.0], [0.0], [value], [1.0], [target], vf_coef=1.0, clip_vloss=clip_vloss)
    torch.testing.assert_close(loss, torch.tensor(expected))
    torch.testing.assert_close(agent.values.grad, torch.tensor([slope]))


def test_the_entropy_bonus_pulls_the_entropy_up(script: ModuleType) -> None:
    loss, metrics, agent = table_loss(script, [1.0, 1.0], [0.0, 0.0], entropies=[2.0, 4.0], ent_coef=0.1)
    torch.testing.assert_close(metrics["entropy"], torch.tensor(3.0))
    torch.testing.assert_close(loss, torch.tensor(-0.3))
    torch.testing.assert_close(agent.entropies.grad, torch.tensor([-0.05, -0.05]))  # descent raises it


def test_explained_variance_cases(script: ModuleType) -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert script.explained_variance(returns, returns) == 1
    assert script.explained_variance(torch.full((4,), 3.0), returns) == 0  # the mean, or any other constant
    # V = -R: errors 2R, variance 4 Var(R): 1 - 4 = -3, worse than a constant
    assert script.explained_variance(-returns, returns) == pytest.approx(-3)
    # It is blind to a constant error, which is why the mean absolute error is logged beside it.
    assert script.explained_variance(returns + 100, returns) == 1
    for constant in (0.0, 0.1, 2.0, -99.7):  # of which float32 makes small variances
        assert math.isnan(script.explained_variance(torch.randn(2048), torch.full((2048,), constant)))


# ---- the loss of a real agent, and steps of the optimiser -----------------------------------------------------------
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
    assert float((torch.stack(singles).mean(0) - whole).norm()) < 1e-4 * float(whole.norm())


def test_policy_and_value_gradients_go_where_they_belong(script: ModuleType) -> None:
    """Without a value loss the critic's own weights get no gradient, without advantages the actor's; shared ones do."""
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


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e6, None])
def test_a_step_is_that_of_torchs_adam(script: ModuleType, max_grad_norm: float | None) -> None:
    """Five minibatches beside torch.optim.Adam with epsilon 1e-5 (detail 3); gradients are clipped to their joint norm,
    small ones are not scaled up, and the logged norm is that before clipping."""
    agent, batch, args = real_batch(script, max_grad_norm=max_grad_norm, vf_coef=30.0)
    other = copy.deepcopy(agent)
    optimizer = torch.optim.Adam(other.parameters(), lr=1e-4, eps=1e-5)
    weights, adam = flat(agent, 1e-4)
    start = weights.clone()
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:8] for i in range(5)])
    metrics = script.take_steps(agent, args, weights, adam, script.Batch(*(x[order] for x in batch)))
    for i, rows in enumerate(order):
        loss, expected = script.ppo_loss(other, args, script.Batch(*(x[rows] for x in batch)))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), max_grad_norm or math.inf)
        optimizer.step()
        assert max_grad_norm != 0.5 or norm > 1
        for name, value in (expected | {"grad_norm": norm}).items():
            torch.testing.assert_close(metrics[name][i], value, rtol=1e-3, atol=1e-5)
    # Where a gradient is zero but for rounding, a step of Adam has any sign: so all weights are judged as one.
    means = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in other.parameters()])
    assert float((adam["mean"] - means).norm()) < 0.01 * float(means.norm())
    expected_weights = nn.utils.parameters_to_vector(other.parameters()).detach()
    assert float((weights - expected_weights).norm()) < 0.01 * float((weights - start).norm())
    assert float(adam["step"]) == 5


# ---- the agent ------------------------------------------------------------------------------------------------------
def test_values_log_probs_and_entropies_are_one_number_a_sample(script: ModuleType) -> None:
    sample = make_sample(script)
    policy, values = sample.agent(sample.obs)
    for x in (values, policy.log_prob(sample.actions), policy.entropy()):
        assert x.shape == (16,)
    torch.testing.assert_close(sample.agent.get_value(sample.obs), values)
    torch.testing.assert_close(sample.agent.policy(sample.obs).mode, policy.mode)
    assert sample.agent.get_value(sample.obs[:1]).shape == (1,)  # squeeze(-1), not squeeze()


def test_layers_start_orthogonal_with_zero_biases(script: ModuleType) -> None:
    """W W^T = gain^2 I (or W^T W where W is tall); gain sqrt(2), but 0.01 at the policy's head, 1 at the critic's."""
    gains = set()
    for name, layer in make_sample(script).agent.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        weight = layer.weight.detach().flatten(1)
        gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        gain = math.sqrt(float(gram[0, 0]))
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(layer.bias, torch.zeros_like(layer.bias)), name
        gains.add(round(gain, 4))
    assert gains == {0.01, 1.0, 1.4142}


def lively(script: ModuleType, space: type) -> tuple[Sample, Any, torch.Tensor]:
    """A sample, its policy away from the start, 20,000 actions of the first observation; skips other action spaces."""
    sample = make_sample(script)
    if not isinstance(SPACES[domain(script)][1], space):
        pytest.skip(f"the actions of {script.__name__} are no {space.__name__}")
    weights, _ = flat(sample.agent, 0.0)
    weights += 0.1 * torch.randn(len(weights), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    with torch.no_grad():
        policy, one = sample.agent.policy(sample.obs), sample.agent.policy(sample.obs[:1])
        return sample, policy, torch.stack([one.sample()[0] for _ in range(20_000)])


ENTROPIES = {  # of seven actions, nats
    1.051: [0.05, 0.70, 0.15, 0.03, 0.03, 0.02, 0.02],
    1.939: [0.15, 0.17, 0.14, 0.13, 0.16, 0.12, 0.13],  # a guide prints 1.95, more than ln 7 allows
    0.635: [0.02, 0.85, 0.08, 0.02, 0.01, 0.01, 0.01],  # a guide prints 0.60
    1.946: [1 / 7] * 7,  # ln 7: the most that seven actions can have
}


def test_a_categorical_policy_is_that_of_its_probabilities(script: ModuleType) -> None:
    sample, policy, many = lively(script, Discrete)
    n = int(SPACES[domain(script)][1].n)  # type: ignore[union-attr]
    log_probs = torch.stack([policy.log_prob(torch.full((16,), a)) for a in range(n)], 1)
    probs = log_probs.exp()
    torch.testing.assert_close(probs.sum(1), torch.ones(16))
    torch.testing.assert_close(policy.log_prob(sample.actions), log_probs[torch.arange(16), sample.actions])
    torch.testing.assert_close(policy.entropy(), -(probs * log_probs).sum(1))
    assert torch.equal(policy.mode, probs.argmax(1))
    for entropy, seven in ENTROPIES.items():
        computed = type(policy)(logits=torch.tensor([seven]).log()).entropy()
        torch.testing.assert_close(computed, torch.tensor([entropy]), rtol=0, atol=0.0006)
    torch.testing.assert_close(many.bincount(minlength=n) / len(many), probs[0], rtol=0, atol=0.02)


def test_a_gaussian_policy_is_that_of_its_mean_and_deviation(script: ModuleType) -> None:
    sample, policy, many = lively(script, Box)
    normal = torch.distributions.Normal(policy.mean, policy.stddev)
    torch.testing.assert_close(policy.log_prob(sample.actions), normal.log_prob(sample.actions).sum(-1))
    torch.testing.assert_close(policy.entropy(), (0.5 + 0.5 * math.log(2 * math.pi) + policy.stddev.log()).sum(-1))
    torch.testing.assert_close(policy.mode, policy.mean)
    torch.testing.assert_close(many.mean(0), policy.mean[0], rtol=0, atol=0.03)
    torch.testing.assert_close(many.std(0), policy.stddev[0], rtol=0.03, atol=0)


def test_log_std_init_is_the_logarithm_of_the_deviation(script: ModuleType) -> None:
    deviations = []
    for log_std in (0.0, -2.0):
        sample = make_sample(script, log_std_init=log_std)
        if not isinstance(SPACES[domain(script)][1], Box):
            pytest.skip(f"the actions of {script.__name__} have no deviation")
        deviations.append(sample.agent.policy(sample.obs).stddev)
    torch.testing.assert_close(deviations[0] * math.exp(-2.0), deviations[1])
