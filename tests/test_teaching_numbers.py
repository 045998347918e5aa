"""Worked examples that people learn PPO from, recomputed: the right numbers, and wrong rules shown to be wrong.

Several numbers come from public course notes and guides whose own arithmetic does not hold; the tests keep both the
example and the correction. `docs/` quotes these numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.conftest import columns, minibatches_of, spy
from tests.known_values import SmallEnv
from tests.test_ppo_math import column, gae, table_loss

Run = Callable[..., dict[str, Any]]

# Two environments of three steps that end in a termination: rewards (3, 2), the same values in both.
REWARDS = torch.tensor([[5.0, -8.0], [4.0, -7.0], [3.0, -5.0]])
VALUES = torch.tensor([[2.0, 2.0], [3.0, 3.0], [2.5, 2.5]])
ENDS = torch.tensor([[False, False], [False, False], [True, True]])


def advantages_of_the_example(script: ModuleType, gamma: float, gae_lambda: float, **changed: Any) -> torch.Tensor:
    arrays = {"rewards": REWARDS, "values": VALUES, "terminations": ENDS} | changed
    return gae(script, arrays.pop("rewards"), arrays.pop("values"), 0.0, gamma, gae_lambda, **arrays)[0]


# ---- per-environment advantages -------------------------------------------------------------------------------------
def test_residuals_and_advantages_of_the_two_environments(script: ModuleType) -> None:
    # 5 + 0.99*3 - 2, 4 + 0.99*2.5 - 3, 3 - 2.5; and -8 + 0.99*3 - 2, -7 + 0.99*2.5 - 3, -5 - 2.5
    expected = torch.tensor([[5.97, -7.03], [3.475, -7.525], [0.5, -7.5]])
    torch.testing.assert_close(advantages_of_the_example(script, 0.99, 0.0), expected)
    # gamma lambda = 0.9405: 3.475 + 0.9405*0.5 = 3.945, 5.97 + 0.9405*3.945 = 9.681; the same for environment 1
    expected = torch.tensor([[9.681, -20.741], [3.945, -14.579], [0.5, -7.5]])
    torch.testing.assert_close(advantages_of_the_example(script, 0.99, 0.95), expected, rtol=0, atol=1e-3)
    # gamma = lambda = 1: the rewards still to come minus V
    expected = torch.tensor([[10.0, -22.0], [4.0, -15.0], [0.5, -7.5]])
    torch.testing.assert_close(advantages_of_the_example(script, 1.0, 1.0), expected)


def test_no_gamma_lambda_or_final_value_gives_the_printed_table(script: ModuleType) -> None:
    """The notes print residuals and advantages of both environments. In the last step the two are the same number by
    definition, whatever gamma, lambda and V(s_3) are."""
    printed_residuals = [(3.5, 2.5, 1.5), (-10.0, -11.0, -8.5)]
    printed_advantages = [(8.2, 4.7, 2.2), (-22.5, -12.5, -1.5)]
    assert all(delta[-1] != a[-1] for delta, a in zip(printed_residuals, printed_advantages, strict=True))
    for gamma, gae_lambda, last_value in itertools.product((0.0, 0.5, 0.99, 1.0), (0.0, 0.5, 0.95, 1.0), (0.0, 2.0)):
        advantages, _ = gae(script, REWARDS, VALUES, last_value, gamma, gae_lambda)
        residuals, _ = gae(script, REWARDS, VALUES, last_value, gamma, 0.0)
        assert torch.equal(advantages[-1], residuals[-1])


def test_gae_over_the_interleaved_list_is_another_thing(script: ModuleType) -> None:
    """Rows s0e0, s0e1, s1e0, s1e1, ... treated as one trajectory mix the environments: for environment 0
    -3.99, -2.67, 0.5 instead of 9.68, 3.95, 0.5. Its good first action would be punished."""
    interleaved = {"rewards": REWARDS, "values": VALUES, "terminations": ENDS}
    columns_of_one = {name: array.reshape(-1, 1) for name, array in interleaved.items()}
    of_environment_0 = advantages_of_the_example(script, 0.99, 0.95, **columns_of_one).view(3, 2)[:, 0]
    torch.testing.assert_close(of_environment_0, torch.tensor([-3.99, -2.67, 0.5]), rtol=0, atol=0.01)
    assert float(of_environment_0[0]) < 0 < float(advantages_of_the_example(script, 0.99, 0.95)[0, 0])


def test_order_of_the_parallel_example(continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flattened, environments stand side by side: s0e0, s0e1, s1e0, ..., of which the permutation makes minibatches."""
    gae_calls, calls = spy(monkeypatch, continuous, "compute_gae"), spy(monkeypatch, continuous, "take_steps")
    monkeypatch.setattr(torch, "randperm", lambda n, device: torch.tensor([2, 1, 5, 4, 3, 0]))
    sizes = {"num_envs": 2, "num_steps": 3, "num_minibatches": 2, "total_timesteps": 6, "update_epochs": 1}
    run_tiny(env_id="Target-v0", norm_adv="none", **sizes)
    ((_, (advantages, _)),) = gae_calls
    names = {float(advantages[t, n]): f"s{t}e{n}" for t in range(3) for n in range(2)}
    minibatches = [[names[x] for x in minibatch.advantages.tolist()] for minibatch in minibatches_of(calls)]
    assert minibatches == [["s1e0", "s0e1", "s2e1"], ["s2e0", "s1e1", "s0e0"]]


def test_normalization_keeps_the_ranking_but_not_the_signs(script: ModuleType) -> None:
    """Of the six printed advantages, -1.5 lies above the mean (-3.57), so it becomes +0.18: reinforced."""
    printed = torch.tensor([8.2, -22.5, 4.7, -12.5, 2.2, -1.5])
    normalized = script.normalize_advantages(printed)
    assert torch.equal(printed.argsort(), normalized.argsort())
    assert float(normalized[-1]) == pytest.approx(0.18, abs=0.005)


def test_a_reward_level_is_no_credit_once_the_critic_knows_it(script: ModuleType) -> None:
    """One environment always pays +10, another -10, five steps. A critic that knows nothing calls every action of the
    first good (44.4 ... 10) and of the second bad; a converged critic sees 0 in both: it was luck, not credit."""
    rewards = torch.tensor([[10.0, -10.0]]).expand(5, 2)
    ends = torch.zeros(5, 2, dtype=torch.bool)
    ends[-1] = True
    naive, _ = gae(script, rewards, torch.zeros(5, 2), 0.0, 0.99, 0.95, terminations=ends)
    torch.testing.assert_close(naive[:, 0], -naive[:, 1])
    # 10 (1 - 0.9405^5) / (1 - 0.9405) = 44.4
    torch.testing.assert_close(naive[[0, -1], 0], torch.tensor([44.4, 10.0]), rtol=0, atol=0.01)
    exact = rewards * (1 - 0.99 ** torch.arange(5, 0, -1)[:, None]) / (1 - 0.99)
    informed, _ = gae(script, rewards, exact, 0.0, 0.99, 0.95, terminations=ends)
    torch.testing.assert_close(informed, torch.zeros(5, 2), rtol=0, atol=1e-4)


def test_averaging_rewards_over_environments_gives_another_gradient(script: ModuleType) -> None:
    """Advantages are taken in each environment, and only the loss is averaged."""
    gradients: list[Any] = []
    for rewards in (REWARDS, REWARDS.mean(1, keepdim=True).expand(3, 2)):
        advantages = advantages_of_the_example(script, 0.99, 0.95, rewards=rewards, values=torch.zeros(3, 2))
        gradients.append(table_loss(script, [1.0] * 6, advantages.flatten().tolist())[2].log_probs.grad)
    assert float(gradients[0][0]) < 0 < float(gradients[1][0])  # descent: s0e0 is reinforced, or punished by mistake
    torch.testing.assert_close(gradients[0].sum(), gradients[1].sum())  # the difference is who gets the credit


def test_the_flag_at_the_end_reaches_the_first_step(script: ModuleType) -> None:
    # delta = 1 + 0.99*110 - 100 = 9.9, 1 + 0.99*120 - 110 = 9.8, 1000 - 120 = 880
    # A_1 = 9.8 + 0.9405*880 = 837.44, A_0 = 9.9 + 0.9405*837.44 = 797.51
    rewards, values, ends = column(1, 1, 1000), column(100, 110, 120), column(0, 0, 1).bool()
    residuals, _ = gae(script, rewards, values, 0.0, 0.99, 0.0, terminations=ends)
    torch.testing.assert_close(residuals, column(9.9, 9.8, 880))
    advantages, _ = gae(script, rewards, values, 0.0, 0.99, 0.95, terminations=ends)
    torch.testing.assert_close(advantages, column(797.51, 837.44, 880), rtol=0, atol=0.01)
    # The guide's code stored "ended after step t" and masked step t with row t + 1 of it (0 after the last row): the
    # end arrives one step early, and the flag never reaches the steps before it.
    early = column(0, 1, 0).bool()
    shifted, _ = gae(script, rewards, values, 0.0, 0.99, 0.95, terminations=early)
    torch.testing.assert_close(shifted[:2], column(9.9 - 0.9405 * 109, -109.0))
    torch.testing.assert_close(shifted[0], torch.tensor([-92.6], dtype=torch.float64), rtol=0, atol=0.02)
    # and the last row, no longer marked, is bootstrapped with a value from the next episode: 939.4 if that is 60
    shifted, _ = gae(script, rewards, values, 60.0, 0.99, 0.95, terminations=early)
    torch.testing.assert_close(shifted[2], torch.tensor([939.4], dtype=torch.float64))


# ---- time limits ----------------------------------------------------------------------------------------------------
def test_ignoring_the_value_after_the_rollout_is_wrong(script: ModuleType) -> None:
    """r = 1 for ever, gamma = 0.99, so V = 100 exactly: nothing was better or worse than expected. A last value of 0
    invents disappointments from -77.5 to -99."""
    rewards, values = column(*[1.0] * 5), column(*[100.0] * 5)
    right, _ = gae(script, rewards, values, 100.0, 0.99, 0.95)
    torch.testing.assert_close(right, column(*[0.0] * 5), rtol=0, atol=1e-12)
    wrong, _ = gae(script, rewards, values, 0.0, 0.99, 0.95)
    # delta_4 = 1 - 100 = -99, the others 0; A_0 = 0.9405^4 * -99 = -77.5
    torch.testing.assert_close(wrong[[0, -1]], column(-77.46, -99.0), rtol=0, atol=0.01)


def test_never_bootstrapping_at_a_time_limit_is_wrong(script: ModuleType) -> None:
    """The same, cut by a time limit in step 2: as a truncation 0, 0, 0; called a termination -87.6, -93.1, -99."""
    rewards, values, cut = column(1, 1, 1), column(100, 100, 100), column(0, 0, 1).bool()
    right, _ = gae(script, rewards, values, 0.0, 0.99, 0.95, truncations=cut, final_values={(2, 0): 100.0})
    torch.testing.assert_close(right, column(0, 0, 0), rtol=0, atol=1e-12)
    wrong, _ = gae(script, rewards, values, 0.0, 0.99, 0.95, terminations=cut)
    torch.testing.assert_close(wrong, column(-87.57, -93.11, -99), rtol=0, atol=0.01)


@pytest.mark.parametrize("num_steps", [4, 8, 16])
def test_bootstrapping_does_not_depend_on_rollout_and_episode_lengths(script: ModuleType, num_steps: int) -> None:
    """ "Bootstrap if and only if rollouts and episodes differ in length" is wrong: 8-step episodes, three lengths."""
    cut = torch.zeros(num_steps, 1, dtype=torch.bool)
    cut[7::8] = True
    rewards, values = torch.ones(num_steps, 1), torch.full((num_steps, 1), 100.0)
    final_values = {(t, 0): 100.0 for t in range(7, num_steps, 8)}
    advantages, _ = gae(script, rewards, values, 100.0, 0.99, 0.95, truncations=cut, final_values=final_values)
    torch.testing.assert_close(advantages, torch.zeros(num_steps, 1), rtol=0, atol=1e-4)


def test_the_value_of_a_cost_of_1_for_ever(script: ModuleType) -> None:
    """Fitting V to its own targets converges to -1 / (1 - gamma), for rollouts of any length that bootstrap. With gamma
    = 1 the targets sink for ever, 5 rewards a round at most; with the average subtracted they stay."""

    def fitted(reward: float, v: float, gamma: float, rounds: int) -> float:
        for _ in range(rounds):
            v = float(gae(script, column(*[reward] * 5), column(*[v] * 5), v, gamma, 0.95)[1].mean())
        return v

    for gamma, value in ((0.9, -10.0), (0.99, -100.0)):
        assert fitted(-1.0, 0.0, gamma, 400) == pytest.approx(value, rel=1e-3)
    assert fitted(-1.0, 0.0, 1.0, 100) < -250
    # the level of differential values is arbitrary, and so stays
    assert fitted(-1.0 - (-1.0), 3.0, 1.0, 100) == pytest.approx(3.0)


# ---- ratio, clip, KL, value loss ------------------------------------------------------------------------------------
def test_the_examples_of_ratio_surrogate_and_target(script: ModuleType) -> None:
    # pi 0.3, pi_old 0.2, A = 50: 1.5 * 50 = 75, clipped 1.2 * 50 = 60, and the smaller counts
    loss, metrics, _ = table_loss(script, [0.3 / 0.2], [50.0])
    assert float(loss) == pytest.approx(-60.0)
    assert float(metrics["clip_fraction"]) == 1.0
    # to first order: rho = 1.1 changes the surrogate by 0.1 A (within the clip)
    before, after = (float(table_loss(script, [ratio], [7.0])[0]) for ratio in (1.0, 1.1))
    assert before - after == pytest.approx(0.1 * 7.0, rel=1e-5)
    # V_old = 100, A = -50: target A + V_old = 50; squared error 50^2 = 2500, and our loss is half of it
    advantages, returns = gae(script, column(50.0), column(100.0), 0.0, 0.0, 0.0)
    assert (float(advantages), float(returns)) == (-50.0, 50.0)
    _, metrics, _ = table_loss(script, [1.0], [0.0], [100.0], [100.0], [50.0])
    assert float(metrics["value_loss"]) == 1250.0


def softmax_gradient(script: ModuleType, logits: torch.Tensor, action: int, old: float, advantage: float) -> Any:
    """The gradient of ppo_loss for one action of a softmax policy: d log pi(a) / d logits = one_hot(a) - pi."""
    pi = logits.softmax(0)
    _, _, agent = table_loss(script, [float(pi[action]) / old], [advantage])
    return agent.log_probs.grad * (torch.nn.functional.one_hot(torch.tensor(action), len(pi)) - pi)


def test_clipping_does_not_bound_the_policy_change(script: ModuleType) -> None:
    """Two actions of a softmax that share a logit: the good one's gradient stops at 1 + eps, but the step that got it
    there was long enough to leave 1.2 far behind, and nothing in the clipped loss brings it back."""
    logits, ratios = torch.zeros(2), []
    for _ in range(5):
        logits -= 3.0 * softmax_gradient(script, logits, action=0, old=0.5, advantage=1.0)
        ratios.append(float(logits.softmax(0)[0] / 0.5))
    assert ratios[0] > 1.8  # one step: far outside
    assert ratios == [ratios[0]] * 5  # and there it stays: zero gradient, no pull


def normals(generator: torch.Generator) -> torch.Tensor:
    """log N(a; 0.2, 1) - log N(a; 0, 1) of 256 actions a from N(0, 1): KL = 0.2^2 / 2 = 0.02."""
    return 0.2 * torch.randn(256, generator=generator) - 0.02


def coins(generator: torch.Generator) -> torch.Tensor:
    """The same of (0.5, 0.5) against (0.6, 0.4): KL = -(ln 1.2 + ln 0.8) / 2 = 0.0204."""
    return torch.tensor([0.6 / 0.5, 0.4 / 0.5]).log()[torch.randint(2, (256,), generator=generator)]


@pytest.mark.parametrize(
    ("sample", "kl", "sd_1", "sd_3"), [(normals, 0.02, 0.0125, 0.0018), (coins, 0.0204, 0.0127, 0.00017)]
)
def test_the_two_kl_estimators(script: ModuleType, sample: Any, kl: float, sd_1: float, sd_3: float) -> None:
    """Both average to the divergence; k1 scatters far more and is negative for every twentieth batch, k3 for none."""
    generator, k1, k3 = torch.Generator().manual_seed(0), np.zeros(1000), np.zeros(1000)
    for i in range(1000):
        metrics = table_loss(script, sample(generator).exp().tolist(), [0.0] * 256)[1]
        k1[i], k3[i] = float(metrics["old_approx_kl"]), float(metrics["approx_kl"])
    assert k1.mean() == pytest.approx(kl, abs=0.001)
    assert k3.mean() == pytest.approx(kl, abs=0.0001)
    assert (k1.std(), k3.std()) == (pytest.approx(sd_1, rel=0.1), pytest.approx(sd_3, rel=0.1))
    assert 0.02 < (k1 < 0).mean() < 0.12
    assert k3.min() > 0


def test_kl_is_not_symmetric(script: ModuleType) -> None:
    """P = (0.5, 0.5), Q = (0.9, 0.1): KL(P||Q) = 0.511, KL(Q||P) = 0.368. k3 on samples of the old policy estimates
    KL(old||new): exactly so when the batch holds each action as often as the old policy takes it."""
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    for old, new, batch, printed in ((p, q, [0, 1] * 5, 0.511), (q, p, [0] * 9 + [1], 0.368)):
        kl = float(old @ np.log(old / new))
        assert round(kl, 3) == printed
        _, metrics, _ = table_loss(script, (new / old)[batch].tolist(), [0.0] * 10)
        assert float(metrics["approx_kl"]) == pytest.approx(kl, rel=1e-5)


# ---- optimiser and baseline -----------------------------------------------------------------------------------------
def descend(kind: type[torch.optim.Optimizer], joint: bool, target: float, limit: float = 0.5) -> Any:
    """How far 50 steps take the 8 numbers of an actor that descends, beside a critic of 8 numbers, against the gradient
    of mean(sin(actor)) + 0.5 mean((critic - target)^2): only the critic's error has the scale of `target`. Gradients
    are clipped to `limit`: under one norm (`joint`), or the actor's and the critic's each for itself."""
    generator = torch.Generator().manual_seed(0)
    actor, critic = (torch.nn.Parameter(torch.randn(8, generator=generator)) for _ in range(2))
    start, groups = actor.detach().clone(), [[actor, critic]] if joint else [[actor], [critic]]
    optimizers = [kind(group, lr=1e-2, **{"eps": 1e-5} if kind is torch.optim.Adam else {}) for group in groups]
    for _ in range(50):
        actor.grad, critic.grad = actor.detach().cos() / 8, (critic.detach() - target) / 8
        for group, optimizer in zip(groups, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(group, limit)
            optimizer.step()
    return (actor.detach() - start).norm()


def test_parameter_groups_of_equal_learning_rate_are_one_group() -> None:
    """So "one optimiser or two groups" cannot be what makes a policy loss small."""
    one, two = (descend(torch.optim.Adam, joint, 10.0, limit=math.inf) for joint in (True, False))
    assert torch.equal(one, two)


def test_joint_clipping_lets_a_large_value_error_slow_the_actor() -> None:
    """Under one norm of 0.5 a large critic error scales the actor's gradient down, and a plain gradient step with it.
    Adam divides a constant factor out again, until the scaled gradients come near its epsilon. With a norm each, the
    critic's scale is no concern of either."""
    kinds: list[type[torch.optim.Optimizer]] = [torch.optim.SGD, torch.optim.Adam]
    cases = itertools.product(kinds, (True, False), (1.0, 1000.0, 100_000.0))
    movement = {(kind.__name__, joint, target): float(descend(kind, joint, target)) for kind, joint, target in cases}
    assert movement["SGD", True, 1000.0] < 0.05 * movement["SGD", True, 1.0]
    assert movement["Adam", True, 1000.0] > 0.8 * movement["Adam", True, 1.0]  # the factor is 0.001 there,
    assert movement["Adam", True, 100_000.0] < 0.2 * movement["Adam", True, 1.0]  # and 0.00001 here
    for name, target in itertools.product(("SGD", "Adam"), (1000.0, 100_000.0)):
        assert movement[name, False, target] == pytest.approx(movement[name, False, 1.0])


def test_a_baseline_of_1000_under_rewards_of_990_to_1010_saves_nearly_all_variance(script: ModuleType) -> None:
    """And leaves the expected gradient alone: E[b grad log pi] = b grad sum over a of pi(a) = b grad 1 = 0."""
    logits, means, variances = torch.zeros(3, dtype=torch.float64), [], []
    pi = logits.softmax(0)
    for baseline in (0.0, 1000.0):
        # A grad log pi(a) for each action a: what ppo_loss, at a ratio of 1, descends along
        rewards = enumerate((990.0, 1000.0, 1010.0))
        samples = -torch.stack([softmax_gradient(script, logits, a, float(pi[a]), r - baseline) for a, r in rewards])
        means.append(pi @ samples)
        variances.append(float((pi @ (samples - means[-1]) ** 2).sum()))
    for mean in means:  # pi (reward - 1000): the third action gains what the first one loses
        torch.testing.assert_close(mean, torch.tensor([-10 / 3, 0, 10 / 3], dtype=torch.float64), rtol=0, atol=1e-9)
    # without: about 1000^2 * 2/3; with: (10^2 * 2/3 * 2/3) - |mean|^2 = 44.4 - 22.2
    assert variances[0] == pytest.approx(666_688.9, rel=1e-3)
    assert variances[1] == pytest.approx(22.2, rel=1e-2)


# ---- sizes, schedules, environments ---------------------------------------------------------------------------------
def test_sizes_of_the_examples(script: ModuleType) -> None:
    args = script.Args(num_envs=32, num_steps=128, total_timesteps=10_000_000, num_minibatches=16, update_epochs=4)
    assert (args.batch_size, args.batch_size // args.num_minibatches, args.num_updates) == (4096, 256, 2441)
    assert args.num_minibatches * args.update_epochs == 64  # optimiser steps an update
    args = script.Args(num_envs=10, num_steps=32, num_minibatches=4)
    assert (args.batch_size, args.batch_size // args.num_minibatches) == (320, 80)


class GrowingQueue(SmallEnv):
    """A backlog of 10, 20, 30, ..., whatever is done."""

    def begin(self) -> None:
        self.state[0] = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.state[0] += 10
        return self.observe(), -self.state[0], False, False, {}


def test_time_scaling_hides_growth(continuous: ModuleType, run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog of 10, 20, ..., 100 in steps 1 ... 10 becomes a flat -10 in three episodes; the return is raw."""
    spec = gym.envs.registration.EnvSpec("Growing-v0", lambda **settings: GrowingQueue(obs_dim=1))
    monkeypatch.setitem(gym.registry, "Growing-v0", spec)
    calls = spy(monkeypatch, continuous, "compute_gae")
    sizes = {"num_steps": 15, "reset_steps": 10, "total_timesteps": 120}
    result = run_tiny(env_id="Growing-v0", norm_reward=False, time_scaled_reward=True, **sizes)
    assert torch.equal(torch.cat([rewards for (rewards, *_), _ in calls]), torch.full((30, 4), -10.0))
    progress = columns(result["logdir"])
    assert (progress["rollout/episodic_return"], progress["rollout/LTA_return"]) == ([-550] * 2, [-55] * 2)
    run_tiny(env_id="Growing-v0", time_scaled_reward=True, **sizes)
    assert calls[2][0][0][1:].abs().max() < 2  # normalised too
