"""REINFORCE in a corridor: the policy gradient in its plainest form, on a task whose exact gradient is known.

    python -m docs.figures reinforce     # draws and prints what docs/ppo.md shows of this file

Seven cells in a row, twenty steps, two actions. An episode starts in the middle; an action moves one cell to the left
or to the right and, with probability 0.1, to the other side. Arriving in cell i pays i / 6. The policy is a table of
logits, one row per cell. The task is so small that the expected return can be computed by going backwards through time
and differentiated by torch, so every estimate of the gradient can be held against the truth.
"""

from __future__ import annotations

import torch

from ppo_continuous_mujoco import compute_gae

CELLS, NUM_STEPS, SLIP = 7, 20, 0.1
START = CELLS // 2


def exact_values(logits: torch.Tensor) -> torch.Tensor:
    """V_t(s) for t = 0 ... NUM_STEPS, (NUM_STEPS + 1, CELLS), by backward induction; differentiable in `logits`."""
    cells = torch.arange(CELLS)
    left, right = (cells - 1).clamp(min=0), (cells + 1).clamp(max=CELLS - 1)
    intended_right = logits.softmax(-1)[:, 1]
    goes_right = intended_right * (1 - SLIP) + (1 - intended_right) * SLIP
    rewards = cells / (CELLS - 1)
    values = [torch.zeros(CELLS, dtype=logits.dtype)]
    for _ in range(NUM_STEPS):
        worth = rewards + values[-1]  # of arriving in each cell
        values.append(goes_right * worth[right] + (1 - goes_right) * worth[left])
    return torch.stack(values[::-1])


def exact_gradient(logits: torch.Tensor) -> torch.Tensor:
    """The gradient of the expected return J = V_0(start) with respect to the logits, (CELLS, 2)."""
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(exact_values(leaf)[0, START], leaf)[0]


def collect(
    logits: torch.Tensor, num_episodes: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Play `num_episodes` episodes side by side: cells, actions and rewards, each (NUM_STEPS, num_episodes)."""
    cells = torch.full((NUM_STEPS + 1, num_episodes), START)
    actions = torch.zeros((NUM_STEPS, num_episodes), dtype=torch.long)
    right = logits.softmax(-1)[:, 1]
    for t in range(NUM_STEPS):
        draws = torch.rand((2, num_episodes), generator=generator)
        actions[t] = (draws[0] < right[cells[t]]).long()
        moves = torch.where(draws[1] < SLIP, 1 - actions[t], actions[t]) * 2 - 1
        cells[t + 1] = (cells[t] + moves).clamp(0, CELLS - 1)
    return cells[:-1], actions, cells[1:] / (CELLS - 1)


def advantages_of(rewards: torch.Tensor, values: torch.Tensor, gae_lambda: float) -> torch.Tensor:
    """compute_gae of complete, undiscounted episodes (NUM_STEPS, num_episodes); `values` has one row more."""
    terminations = torch.zeros(rewards.shape, dtype=torch.bool)
    terminations[-1] = True
    no = torch.zeros_like(terminations)
    return compute_gae(rewards, values[:-1], values[1:], terminations, no, gamma=1.0, gae_lambda=gae_lambda)[0]


def weights_of(kind: str, logits: torch.Tensor, cells: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """What each grad log pi(a_t|s_t) is multiplied by, (NUM_STEPS, num_episodes).

    "total return": the sum of all rewards of the episode. "reward-to-go": of those from step t on. "baseline": that
    minus V_t(s_t), here the exact one. "GAE 0.95": generalised advantages with the same V.
    """
    if kind == "total return":
        return rewards.sum(0).expand_as(rewards)
    values = torch.zeros((NUM_STEPS + 1, rewards.shape[1]), dtype=rewards.dtype)
    if kind != "reward-to-go":
        values[:-1] = exact_values(logits)[torch.arange(NUM_STEPS)[:, None], cells]
    return advantages_of(rewards, values, gae_lambda=0.95 if kind == "GAE 0.95" else 1.0)


def episode_gradients(
    logits: torch.Tensor, cells: torch.Tensor, actions: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """sum over t of w_t grad log pi(a_t|s_t), for each episode: (num_episodes, CELLS, 2).

    For a softmax the gradient of log pi(a|s) with respect to the logits of s is onehot(a) - pi(.|s).
    """
    pi = logits.softmax(-1)
    scores = weights[..., None] * (torch.nn.functional.one_hot(actions, 2) - pi[cells])
    visited = torch.nn.functional.one_hot(cells, CELLS).to(scores.dtype)
    return torch.einsum("tns,tna->nsa", visited, scores)


def reinforce(
    kind: str, learning_rate: float, num_updates: int = 100, num_episodes: int = 10, seed: int = 0
) -> torch.Tensor:
    """REINFORCE (Williams 1992): returns the exact expected return before each update, and at the end, (updates + 1,).

    1. Start with some policy. 2. Play a batch of episodes. 3. Estimate the gradient of the return by the mean over
    the episodes. 4. Take a step up. 5. Throw the episodes away and go back to 2.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(CELLS, 2)
    expected_returns = [exact_values(logits)[0, START]]
    for _ in range(num_updates):
        cells, actions, rewards = collect(logits, num_episodes, generator)
        weights = weights_of(kind, logits, cells, rewards)
        logits = logits + learning_rate * episode_gradients(logits, cells, actions, weights).mean(0)
        expected_returns.append(exact_values(logits)[0, START])
    return torch.stack(expected_returns)
