"""Every figure and every measured number of docs/, each made by one command: symptoms and exercises train for some
minutes, all others are done in less than half a minute.

    python -m docs.figures clip          # draws docs/figures/clip.png and prints its numbers
    python -m docs.figures all

The numbers go to docs/figures/numbers.json as they are printed in the pages; tests/test_docs.py compares the two. All
mathematics is imported from ppo_continuous_mujoco.py: what is drawn is what trains.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import matplotlib.figure
import matplotlib.patches
import numpy as np
import PIL.Image
import PIL.ImageSequence
import torch
from gymnasium.spaces import Box

import ppo_continuous_mujoco as ppo
from docs import reinforce as corridor
from docs.exercises import EXERCISES, SCRIPT, plant
from envs.normalize import RunningMeanStd

FOLDER = Path(__file__).parent / "figures"
Numbers = dict[str, str]
BLUE, ORANGE, GREEN, RED = "#1f5fa8", "#e07b00", "#2a8c4a", "#c23b3b"


def canvas(
    columns: int, width: float = 4.6, height: float = 3.4, rows: int = 1
) -> tuple[matplotlib.figure.Figure, list[Any]]:
    figure = matplotlib.figure.Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: matplotlib.figure.Figure, name: str) -> None:
    """Write the PNG with 64 colours: a third of the size, and no eye sees the difference."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    PIL.Image.open(buffer).convert("RGB").quantize(64).save(FOLDER / f"{name}.png", optimize=True)


def small_agent(obs_dim: int, action_dim: int, seed: int = 0, **args: Any) -> tuple[ppo.Agent, ppo.Args]:
    """A fresh agent of the script, and its arguments; by default the loss is the policy's alone."""
    values: dict[str, Any] = {"norm_adv": "none", "vf_coef": 0.0, "ent_coef": 0.0} | args
    settings = ppo.Args(**values)
    torch.manual_seed(seed)
    spaces: Any = SimpleNamespace(
        single_observation_space=Box(-np.inf, np.inf, (obs_dim,)), single_action_space=Box(-1, 1, (action_dim,))
    )
    return ppo.Agent(spaces, settings), settings


def short_run(folder: str, *presets: str, bug: int = 0, **args: Any) -> tuple[ppo.Args, dict[str, Any]]:
    """Train briefly without evaluations on the way, with the bug of an exercise if there is one; returns the arguments
    and the last checkpoint."""
    values: dict[str, Any] = {
        "logdir": f"{folder}/run", "eval_every": 0, "eval_episodes": 1, "save_every": 0, "compile": False,
        "num_minibatches": 8,
    }  # fmt: skip
    script: Any = ppo
    if bug:
        script = ModuleType("planted")
        script.__file__ = str(SCRIPT)
        exec(compile(plant(bug), "planted", "exec", dont_inherit=True), vars(script))
    settings = script.preset(*presets, **values | args)
    with contextlib.redirect_stdout(io.StringIO()):
        script.train(settings)
    return settings, ppo.load(Path(folder) / "run" / "latest.pt")


@functools.cache
def progress(*presets: str, **args: Any) -> np.ndarray:
    """The columns of progress.csv of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        short_run(folder, *presets, **args)
        return np.genfromtxt(f"{folder}/run/progress.csv", delimiter=",", names=True, deletechars="")


def draw(axis: Any, rows: np.ndarray, metric: str, color: str, label: str | None = None) -> None:
    measured = np.isfinite(rows[metric])
    axis.plot(rows["global_step"][measured] / 1000, rows[metric][measured], color=color, lw=1.5, label=label)
    axis.tick_params(labelsize=8)


# ---- ppo.md ---------------------------------------------------------------------------------------------------------


def clip() -> Numbers:
    """The clipped objective and its slope against the ratio, read off ppo_loss and its gradient."""
    agent, args = small_agent(1, 1)
    obs = torch.zeros(1, 1)
    with torch.no_grad():
        action = agent.policy(obs).sample()
        log_prob = agent.policy(obs).log_prob(action)
    ratios = np.linspace(0, 2, 401)[1:]
    figure, axes = canvas(2)
    for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
        objective, slope = [], []
        for ratio in ratios:
            # The policy stands still and pi_old moves: only their ratio matters to the loss.
            old = (log_prob - np.log(ratio)).requires_grad_()
            zero = torch.zeros(1)
            loss, _ = ppo.ppo_loss(agent, args, ppo.Batch(obs, action, old, zero, torch.tensor([advantage]), zero))
            objective.append(-loss.item())
            slope.append(torch.autograd.grad(loss, old)[0].item() / ratio)  # d objective / d ratio
        flat = np.abs(slope) < 1e-6
        axis.plot(ratios, advantage * ratios, color="0.6", ls=":", label="unclipped  ρA")
        axis.plot(ratios, np.where(flat, np.nan, objective), color=BLUE, lw=2.5, label="objective, slope A")
        axis.plot(ratios, np.where(flat, objective, np.nan), color=RED, lw=2.5, label="objective, slope 0")
        axis.axvline(1, color="0.3", lw=0.8)
        for edge in (0.8, 1.2):
            axis.axvline(edge, color="0.7", lw=0.8, ls="--")
        axis.set(title=f"A = {advantage:+.0f}", xlabel="ρ = π / π_old", xticks=[0, 0.8, 1, 1.2, 2])
        axis.legend(fontsize=8)
    save(figure, "clip")
    return {}


KINDS = ("total return", "reward-to-go", "baseline", "GAE 0.95")


def gradient_statistics(logits: torch.Tensor, num_episodes: int = 20_000) -> dict[str, tuple[float, float]]:
    """For each of KINDS: the total variance of the gradient of one episode, and the distance of the mean of
    `num_episodes` gradients from the exact gradient, in standard errors of that mean."""
    cells, actions, rewards = corridor.collect(logits, num_episodes, torch.Generator().manual_seed(0))
    truth, result = corridor.exact_gradient(logits), {}
    for kind in KINDS:
        weights = corridor.weights_of(kind, logits, cells, rewards)
        gradients = corridor.episode_gradients(logits, cells, actions, weights)
        variance = float(gradients.var(0).sum())
        error = float((gradients.mean(0) - truth).norm())
        result[kind] = (variance, error / (variance / num_episodes) ** 0.5)
    return result


def reinforce() -> Numbers:
    """Variance of four estimates of the same gradient, and what REINFORCE makes of three of them."""
    statistics = gradient_statistics(torch.zeros(corridor.CELLS, 2))
    figure, axes = canvas(3)
    colors = dict(zip(KINDS, (RED, ORANGE, BLUE, GREEN), strict=True))
    variances = [statistics[kind][0] for kind in KINDS]
    bars = axes[0].bar(KINDS, variances, color=list(colors.values()))
    axes[0].bar_label(bars, fmt="%.0f")
    axes[0].set(yscale="log", ylim=(10, 3000), title="variance of one episode's gradient")
    axes[0].tick_params(axis="x", labelsize=8)
    numbers = {f"variance {kind}": f"{statistics[kind][0]:.0f}" for kind in KINDS}
    best = corridor.exact_values(torch.tensor([-30.0, 30.0]).expand(corridor.CELLS, 2))[0, corridor.START]
    numbers["best return"] = f"{best:.1f}"
    for axis, learning_rate in zip(axes[1:], (0.03, 1.0), strict=True):
        for kind in KINDS[:3]:
            runs = [corridor.reinforce(kind, learning_rate, num_updates=40, seed=seed) for seed in range(10)]
            curves = torch.stack(runs)
            axis.plot(curves.T, color=colors[kind], lw=0.5, alpha=0.35)
            axis.plot(curves.mean(0), color=colors[kind], lw=2.2, label=kind)
            last = curves[:, -1]
            numbers[f"return {kind} at {learning_rate}"] = f"{last.mean():.1f} ± {last.std():.1f}"
        axis.axhline(float(best), color="0.4", lw=0.8, ls="--")
        axis.set(title=f"learning rate {learning_rate}", xlabel="update of 10 episodes", ylabel="expected return")
        axis.legend(fontsize=8, loc="lower right")
    save(figure, "reinforce")
    return numbers


# environment, first step, last step of each episode of the drawing, and how it ends there
EPISODES = (
    (0, 0, 11, "rollout full"),
    (1, 0, 4, "terminated"),
    (1, 5, 11, "rollout full"),
    (2, 0, 5, "time limit"),
    (2, 6, 8, "terminated"),
    (2, 9, 11, "rollout full"),
    (3, 0, 3, "time limit"),
    (3, 4, 11, "terminated"),
)
ENDS = {
    "terminated": (RED, "terminated: V(s') = 0"),
    "time limit": (ORANGE, "time limit: V(final observation)"),
    "rollout full": (BLUE, "rollout full: V(next_obs)"),
}


def rollout() -> Numbers:
    """A rollout of 12 steps of 4 environments: whose value stands for the future, and where GAE's recursion runs."""
    figure, (axis,) = canvas(1, width=9, height=3.7)
    shades = ["#cfdff0", "#e4e4e4", "#d3ead9"]
    for i, (env, first, last, end) in enumerate(EPISODES):
        color, label = ENDS[end]
        for t in range(first, last + 1):
            axis.add_patch(matplotlib.patches.Rectangle((t, env), 1, 0.55, fc=shades[i % 3], ec="white", lw=2))
        axis.annotate("", (first + 0.1, env + 0.27), (last + 0.9, env + 0.27), arrowprops={"arrowstyle": "->"})
        axis.plot([last + 1] * 2, [env - 0.05, env + 0.6], color=color, lw=4, solid_capstyle="butt")
        axis.text(last + 1.05, env - 0.1, label, color=color, fontsize=9, ha="right", weight="bold")
    axis.text(0.1, -0.1, "GAE adds up from right to left, and begins anew at each bar", fontsize=9, color="0.3")
    axis.set(xlim=(0, 12.1), ylim=(3.7, -0.4), xlabel="step t", ylabel="environment n")
    axis.set_xticks(np.arange(12) + 0.5, range(12))
    axis.set_yticks(np.arange(4) + 0.27, range(4))
    axis.tick_params(length=0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    save(figure, "rollout")
    return {}


def gae_lambda() -> Numbers:
    """Bias and noise of the gradient against lambda, with a critic that is wrong by about 1 (true values: 0 to 20)."""
    logits = torch.zeros(corridor.CELLS, 2)
    generator = torch.Generator().manual_seed(0)
    cells, actions, rewards = corridor.collect(logits, 20_000, generator)
    values = torch.zeros((corridor.NUM_STEPS + 1, cells.shape[1]))
    steps = torch.arange(corridor.NUM_STEPS)[:, None]
    values[:-1] = (corridor.exact_values(logits) + torch.randn(corridor.CELLS, generator=generator))[steps, cells]
    truth = corridor.exact_gradient(logits)
    lambdas, biases, noises, spreads = np.linspace(0, 1, 21), [], [], []
    for gae_lambda in lambdas:
        advantages = corridor.advantages_of(rewards, values, float(gae_lambda))
        gradients = corridor.episode_gradients(logits, cells, actions, advantages)
        biases.append(float((gradients.mean(0) - truth).norm()))
        noises.append(float((gradients.var(0).sum() / 10).sqrt()))
        spreads.append(float((advantages + values[:-1]).var(1).mean()))
    total = np.hypot(biases, noises)
    best = lambdas[total.argmin()]
    figure, (left,) = canvas(1, width=5.5)
    left.plot(lambdas, biases, color=RED, label="bias")
    left.plot(lambdas, noises, color=BLUE, label="noise of a batch of 10 episodes (one standard deviation)")
    left.plot(lambdas, total, color="0.2", lw=2.2, label="both (root of the sum of squares)")
    left.axvline(best, color="0.6", ls="--", lw=0.8)
    left.set(xlabel="λ", ylabel="error of the gradient", ylim=(0, None))
    left.legend(fontsize=8)
    save(figure, "gae_lambda")
    numbers = {"best lambda": f"{best:.2f}"}
    for i in (0, int(total.argmin()), 19, 20):
        numbers[f"at {lambdas[i]:.2f}"] = f"{lambdas[i]:.2f} | {biases[i]:.2f} | {noises[i]:.2f} | {total[i]:.2f}"
        numbers[f"target variance at {lambdas[i]:.2f}"] = f"{spreads[i]:.1f}"
    return numbers


def epochs() -> Numbers:
    """Policy change over 60 epochs on one batch: clipping slows it, and does not stop it."""
    figure, axes = canvas(2)
    numbers = {}
    for learning_rate, color in ((3e-4, BLUE), (3e-3, RED)):
        agent, args = small_agent(4, 2, norm_adv="minibatch")
        obs = torch.randn(2048, 4)
        with torch.no_grad():
            actions = agent.policy(obs).sample()
            old_log_probs = agent.policy(obs).log_prob(actions)
            old = torch.distributions.Normal(agent.actor_mean(obs), agent.actor_log_std.exp())
        # The best action is a function of the observation; the further from it, the worse.
        advantages = -(actions - torch.sin(obs[:, :2])).square().sum(-1)
        zeros = torch.zeros(2048)
        batch = ppo.Batch(obs, actions, old_log_probs, zeros, advantages, zeros)
        optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=1e-5)
        exact, fractions, largest = [], [], []
        for _ in range(60):
            for part in torch.randperm(2048).split(256):
                loss, _ = ppo.ppo_loss(agent, args, ppo.Batch(*(x[part] for x in batch)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                new = torch.distributions.Normal(agent.actor_mean(obs), agent.actor_log_std.exp())
                exact.append(float(torch.distributions.kl_divergence(old, new).sum(-1).mean()))
                log_probs = agent.policy(obs).log_prob(actions)
                _, metrics = ppo.ppo_loss(agent, args, batch)
                fractions.append(float(metrics["clip_fraction"]))
                largest.append(float((log_probs - old_log_probs).exp().max()))
        axes[0].plot(range(1, 61), exact, color=color, label=f"learning rate {learning_rate:g}")
        axes[1].plot(range(1, 61), fractions, color=color)
        for epoch in (1, 10, 60):
            i = epoch - 1
            numbers[f"{learning_rate:g} after {epoch}"] = f"{exact[i]:.3f} | {fractions[i]:.2f} | {largest[i]:.1f}"
    axes[0].axhline(0.02, color="0.4", ls="--", lw=0.8)
    axes[0].text(60, 0.022, "a usual --target-kl: 0.02", fontsize=8, ha="right", va="bottom")
    axes[0].set(title="exact KL(π_old ‖ π)", xlabel="epochs on one batch", yscale="log")
    axes[1].set(title="clip_fraction", xlabel="epochs on one batch", ylim=(0, 1))
    axes[0].legend(fontsize=8)
    save(figure, "epochs")
    return numbers


def kl() -> Numbers:
    """The two estimators of the KL divergence in 2000 batches of 256 actions of N(0, 1) against N(0.2, 1)."""
    agent, args = small_agent(1, 1)
    with torch.no_grad():
        for parameter in agent.actor_mean.parameters():
            parameter.zero_()
        obs, zeros = torch.zeros(256, 1), torch.zeros(256)
        estimates: dict[str, list[float]] = {"old_approx_kl": [], "approx_kl": []}
        last_layer: Any = agent.actor_mean[-1]
        for _ in range(2000):
            last_layer.bias.zero_()
            old = agent.policy(obs)
            actions = old.sample()
            last_layer.bias.fill_(0.2)
            batch = ppo.Batch(obs, actions, old.log_prob(actions), zeros, zeros, zeros)
            _, metrics = ppo.ppo_loss(agent, args, batch)
            for name, values in estimates.items():
                values.append(float(metrics[name]))
    k1, k3 = (np.array(values) for values in estimates.values())
    figure, (axis,) = canvas(1, width=5.5)
    bins = np.linspace(-0.03, 0.07, 81)
    axis.hist(k1, bins, color=ORANGE, alpha=0.7, label="k1, logged as old_approx_kl")
    axis.hist(k3, bins, color=BLUE, alpha=0.8, label="k3, logged as approx_kl")
    axis.axvline(0.02, color="k", ls="--", lw=0.8, label="exact")
    axis.set(xlabel="estimate of KL = 0.02 from 256 samples", ylabel="batches")
    axis.legend(fontsize=8)
    save(figure, "kl")
    numbers = {"k1": f"{k1.mean():.4f} ± {k1.std():.4f}", "k3": f"{k3.mean():.4f} ± {k3.std():.4f}"}
    return numbers | {"k1 below 0": f"{100 * (k1 < 0).mean():.1f} %", "k3 least": f"{k3.min():.3f}"}


# ---- parallel.md ----------------------------------------------------------------------------------------------------


def long_rollout(num_envs: int, num_steps: int) -> tuple[ppo.Agent, ppo.Args, dict[str, torch.Tensor]]:
    """What a HalfCheetah agent of 20 updates does in `num_steps` steps of `num_envs` environments, all frozen."""
    with tempfile.TemporaryDirectory() as folder:
        args, checkpoint = short_run(folder, norm_reward=False, total_timesteps=20 * 2048)
    vec_env: Any = ppo.make_envs(args, num_envs, RunningMeanStd())  # statistics stand still
    agent = ppo.Agent(vec_env, args)
    ppo.load_policy(checkpoint, agent, vec_env.statistics)
    torch.manual_seed(0)
    rows: dict[str, list[Any]] = {name: [] for name in ("obs", "actions", "log_probs", "values", "rewards")}
    obs, _ = vec_env.reset(seed=0)
    with torch.no_grad():
        for _ in range(num_steps):
            obs = torch.as_tensor(obs)
            policy, values = agent(obs)
            actions = policy.sample()
            next_obs, rewards, _, _, _ = vec_env.step(actions.clamp(-1, 1).numpy())
            row = (obs, actions, policy.log_prob(actions), values, torch.as_tensor(rewards, dtype=torch.float32))
            for column, x in zip(rows.values(), row, strict=True):
                column.append(x)
            obs = next_obs
        rows["values"].append(agent.get_value(torch.as_tensor(obs)))
    vec_env.close()
    return agent, args, {name: torch.stack(row) for name, row in rows.items()}


def variance_of_groups(
    agent: ppo.Agent, args: ppo.Args, rollout: dict[str, torch.Tensor], num_envs: int, num_steps: int
) -> tuple[float, float]:
    """Total variance of the policy's gradient over batches of `num_envs` random stretches of `num_steps` steps each,
    and the squared norm of the mean gradient."""
    total_steps, total_envs = rollout["rewards"].shape
    stretches = [
        (n, t) for n in range(total_envs) for t in range(0, total_steps - num_steps + 1, num_steps)
    ]  # each a rollout of one environment
    order = np.random.default_rng(0).permutation(len(stretches))
    no = torch.zeros((num_steps, num_envs), dtype=torch.bool)
    actor = [weight for name, weight in agent.named_parameters() if not name.startswith("critic")]
    gradients = []
    for group in order[: len(order) // num_envs * num_envs].reshape(-1, num_envs):
        chosen = [stretches[i] for i in group]

        def rows(name: str, extra: int = 0, chosen: Any = chosen) -> torch.Tensor:
            return torch.stack([rollout[name][t + extra : t + extra + num_steps, n] for n, t in chosen], dim=1)

        values, rewards = rows("values"), rows("rewards")
        advantages, returns = ppo.compute_gae(
            rewards, values, rows("values", extra=1), no, no, args.gamma, args.gae_lambda
        )
        columns = (rows("obs"), rows("actions"), rows("log_probs"), values, advantages, returns)
        loss, _ = ppo.ppo_loss(agent, args, ppo.Batch(*(x.flatten(0, 1) for x in columns)))
        gradients.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, actor)]))
    stacked = torch.stack(gradients)
    return float(stacked.var(0).sum()), float(stacked.mean(0).square().sum())


def num_envs() -> Numbers:
    """Gradient noise against the number of environments; and the same number of transitions, from many or from few."""
    agent, args, rollout = long_rollout(num_envs=96, num_steps=960)
    args = replace(args, vf_coef=0.0, norm_adv="none")
    figure, axes = canvas(2)
    counts = [1, 2, 4, 8, 16, 32]
    numbers = {}
    variances = np.array([variance_of_groups(agent, args, rollout, n, 32)[0] for n in counts])
    axes[0].loglog(counts, variances / variances[0], "o-", color=BLUE, label="measured")
    axes[0].loglog(counts, 1 / np.array(counts), color="0.5", ls="--", label="1/N")
    axes[0].set(title="rollouts of 32 steps", xlabel="environments N", ylabel="gradient variance, relative to N = 1")
    axes[0].legend(fontsize=8)
    for n, variance in zip(counts, variances, strict=True):
        numbers[f"N {n}"] = f"{variance / variances[0]:.3f}"
    slope = np.polyfit(np.log(counts), np.log(variances), 1)[0]
    numbers["slope"] = f"{-slope:.2f}"
    shapes = [(n, 960 // n) for n in (1, 2, 4, 8, 16, 32)]
    spread = np.array([variance_of_groups(agent, args, rollout, n, t)[0] for n, t in shapes])
    axes[1].plot(range(len(shapes)), spread / spread[0], "o-", color=BLUE)
    axes[1].set_xticks(range(len(shapes)), [f"{n}×{t}" for n, t in shapes])
    axes[1].set(title="960 transitions each", xlabel="environments × steps", ylim=(0, None))
    axes[1].set_ylabel("gradient variance, relative to 1×960")
    for (n, t), variance in zip(shapes, spread, strict=True):
        numbers[f"{n} x {t}"] = f"{variance / spread[0]:.2f}"
    save(figure, "num_envs")
    return numbers


# ---- time_limits.md -------------------------------------------------------------------------------------------------


def learned_value(time_limit_ends: bool, rollout_ends: bool, updates: int = 300) -> list[float]:
    """The value that a critic learns for "reward 1 for ever" (true value 100 at gamma 0.99) from rollouts of 10 steps
    of 50 environments with a time limit of 50 steps, at every phase of it, if a time limit counts as a termination,
    or the end of a rollout does. The observation shows no clock, so the critic is one number."""
    steps = torch.arange(10)[:, None]
    age = torch.arange(50)[None]
    value, history = 0.0, []
    for update in range(updates):
        cut = (age + update * 10 + steps) % 50 == 49
        last = torch.zeros_like(cut)
        last[-1] = True
        terminations = (cut & time_limit_ends) | (last & rollout_ends)
        values = torch.full(cut.shape, value)
        returns = ppo.compute_gae(torch.ones(cut.shape), values, values, terminations, cut, 0.99, 0.95)[1]
        value = float(returns.mean())  # the least-squares fit
        history.append(value)
    return history


def time_limits() -> Numbers:
    """What the critic believes under the right rule and under two wrong ones."""
    rules = {
        "bootstrap both": (False, False, BLUE),
        "time limit = termination": (True, False, ORANGE),
        "end of rollout = termination": (False, True, RED),
    }
    figure, (axis,) = canvas(1, width=6)
    numbers = {}
    for name, (time_limit_ends, rollout_ends, color) in rules.items():
        history = learned_value(time_limit_ends, rollout_ends)
        axis.plot(history, color=color, lw=2, label=name)
        numbers[name] = f"{history[-1]:.1f}"
    axis.axhline(100, color="0.4", ls="--", lw=0.8, label="true value 100")
    axis.set(xlabel="updates", ylabel="learned value")
    axis.legend(fontsize=8)
    save(figure, "time_limits")
    return numbers


# ---- metrics.md -----------------------------------------------------------------------------------------------------

# What is changed, the metric that shows it, the arguments of the sick runs and those of the healthy ones.
SYMPTOMS: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("A: learning rate / 100", "train/approx_kl", {"learning_rate": 1e-5}, {}),
    ("B: learning rate × 30", "train/clip_fraction", {"learning_rate": 3e-2}, {}),
    ("C: the critic learns nothing", "train/explained_variance", {"vf_coef": 0.0}, {}),
    ("D: actions hardly vary", "train/entropy", {"log_std_init": -4.0}, {}),
    ("E: entropy bonus 0.1", "train/entropy", {"ent_coef": 0.1}, {}),
    ("F: time limit taken for an end", "train/value_abs_error", {"reset_steps": 50, "bug": 4}, {"reset_steps": 50}),
)


def symptoms() -> Numbers:
    """Six faults on HalfCheetah, two seeds each: the metric that shows it, and the reward below. 80,000 steps."""
    figure, axes = canvas(3, width=3, height=1.75, rows=4)
    numbers = {}
    for i, (title, metric, sick, healthy) in enumerate(SYMPTOMS):
        panels = {metric: axes[i // 3 * 6 + i % 3], "rollout/mean_reward": axes[i // 3 * 6 + 3 + i % 3]}
        means: dict[str, list[float]] = {name: [] for name in panels}
        for args, color, label in ((healthy, BLUE, "healthy"), (sick, RED, "sick")):
            settings = {"learning_rate": 1e-3, "total_timesteps": 80_000} | args
            runs = [progress("halfcheetah", seed=seed, **settings) for seed in (1, 2)]
            for name, axis in panels.items():
                for seed, rows in enumerate(runs):
                    draw(axis, rows, name, color, None if seed else label)
                means[name].append(np.mean([rows[name][-20:] for rows in runs]))
        for name, axis in panels.items():
            axis.set_title(f"{title}\n{name}" if name == metric else name, fontsize=9)
        if metric == "train/approx_kl":
            panels[metric].set_yscale("log")
        numbers[title[0]] = " | ".join(f"{x:.2g}" for x in (*means[metric], *means["rollout/mean_reward"]))
    axes[0].legend(fontsize=8)
    axes[10].set_xlabel("thousand environment steps", fontsize=9)
    save(figure, "symptoms")
    return numbers


# ---- exercises.md ---------------------------------------------------------------------------------------------------

SHOWN = {
    1: "rollout/episodic_return", 3: "rollout/episodic_return", 6: "rollout/episodic_return", 7: "train/policy_loss",
    9: "rollout/episodic_return", 10: "train/approx_kl", 12: "rollout/episodic_return", 14: "train/entropy",
    15: "train/value_loss", 16: "train/old_approx_kl", 17: "train/clip_fraction", 23: "rollout/episodic_return",
}  # fmt: skip
NEEDED: dict[int, dict[str, Any]] = {8: {"norm_adv": "per_env"}, 14: {"ent_coef": 0.1}}  # without them no bug is seen


def exercises() -> Numbers:
    """Each exercise's script on InvertedPendulum, 40,960 steps, seed 1, beside the correct one: what shows it best."""
    figure, axes = canvas(4, width=2.3, height=1.75, rows=3)
    panels, learnt = dict(zip(SHOWN, axes, strict=True)), []
    for number in range(1, len(EXERCISES) + 1):
        settings = {"env_id": "InvertedPendulum-v5", "total_timesteps": 40_960} | NEEDED.get(number, {})
        if number == 13:  # it ends with an error
            continue
        rows = progress(bug=number, **settings)
        returns = rows["rollout/episodic_return"]
        if returns[np.isfinite(returns)][-3:].mean() > 900:
            learnt.append(str(number))
        if number in SHOWN:
            axis, metric = panels[number], SHOWN[number]
            draw(axis, progress(**settings), metric, BLUE, "correct")
            draw(axis, rows, metric, RED, "with the bug")
            axis.set_title(f"{number}: {metric}", fontsize=8)
            if metric in ("rollout/episodic_return", "train/value_loss", "train/approx_kl"):
                axis.set_yscale("log")
    axes[3].legend(fontsize=8, loc="lower right")
    axes[9].set_xlabel("thousand environment steps", fontsize=9)
    save(figure, "exercises")
    return {"reach 1,000": ", ".join(learnt)}


# ---- mujoco.md ------------------------------------------------------------------------------------------------------


def halfcheetah() -> Numbers:
    """Three seconds of the HalfCheetah of zoo/, as a GIF."""
    checkpoint = str(FOLDER.parents[1] / "zoo" / "HalfCheetah-v5.pt")
    with tempfile.TemporaryDirectory() as folder:
        ppo.play(ppo.PlayArgs(checkpoint=checkpoint, save_gif=True, gif_frames=100, gif_dir=folder))
        film = PIL.Image.open(next(Path(folder).iterdir()))
        pictures = [x.convert("RGB").crop((0, 120, 320, 320)) for x in PIL.ImageSequence.Iterator(film)][40:]
    palette = pictures[0].quantize(32)
    first, *others = (x.quantize(palette=palette, dither=PIL.Image.Dither.NONE) for x in pictures)
    first.save(FOLDER / "halfcheetah.gif", save_all=True, append_images=others, duration=50, loop=0)
    return {}


# ---- README.md ------------------------------------------------------------------------------------------------------


def learning() -> Numbers:
    """Evaluation return on two robots over steps and over minutes: ours, with wider layers, our preset `cleanrl`, SB3,
    and what CleanRL publishes for HalfCheetah-v4 (1,443, of training episodes): mean and one deviation over seeds.
    Minutes: a run's steps at the speed of the median run, on two shared cores."""
    file = FOLDER.parents[1] / "results" / "mujoco_learning_1000k.json"
    settings = json.loads(file.read_text())["settings"]
    figure, axes = canvas(2, width=3.6, height=2.5, rows=2)
    for column, task in enumerate(("HalfCheetah-v5", "Walker2d-v5")):
        runs = {  # of each line: (steps, returns, minutes of the run) of each seed
            "ours with CleanRL's settings": curves_of(settings, f"{task}, cleanrl"),
            "ours": curves_of(settings, f"{task}, ours"),
            "ours, layers of 256": curves_of(settings, f"{task}, wide"),
            "SB3, its Zoo's settings": curves_of(settings, f"{task}, SB3"),
        }
        for (name, seeds), color in zip(runs.items(), ("gray", BLUE, GREEN, RED), strict=True):
            if not seeds:
                continue
            steps, returns = (np.array([seed[k] for seed in seeds]) for k in (0, 1))
            mean, spread = returns.mean(axis=0), returns.std(axis=0, ddof=1)
            million = steps.mean(axis=0) / 1e6
            minutes = million / million[-1] * np.median([seed[2] for seed in seeds])
            for axis, x in ((axes[column], million), (axes[2 + column], minutes)):
                axis.plot(x, mean, color=color, lw=2, label=f"{name}, {len(seeds)} seeds")
                axis.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.2, lw=0)
        axes[column].set(title=task, xlabel="million environment steps", ylim=(0, None))
        axes[2 + column].set(xlabel="minutes (logarithmic)", xscale="log", ylim=(0, None))
        axes[2 + column].xaxis.set_major_formatter("{x:g}")
    for axis in axes[::2]:
        axis.set_ylabel("evaluation return")
        axis.axhline(1443, color="gray", ls="--", lw=1, label="CleanRL, published (v4)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    save(figure, "learning")
    return {}


def curves_of(settings: dict[str, Any], name: str) -> list[tuple[list[float], list[float], float]]:
    """(steps, returns, minutes of the whole run) of each seed of a setting of results/; [] where it was not run."""
    seeds = settings.get(name, {"seeds": {}})["seeds"].values()
    return [(run["curve"]["steps"], run["curve"]["y"], run["curve"]["minutes"][-1]) for run in seeds]


FIGURES = (
    clip,
    reinforce,
    rollout,
    gae_lambda,
    epochs,
    kl,
    num_envs,
    time_limits,
    symptoms,
    exercises,
    halfcheetah,
    learning,
)


def main() -> None:
    names = [figure.__name__ for figure in FIGURES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", nargs="+", choices=[*names, "all"])
    chosen = parser.parse_args().figure
    torch.set_num_threads(1)
    path = FOLDER / "numbers.json"
    for figure in FIGURES:
        if figure.__name__ in chosen or "all" in chosen:
            numbers = figure()
            print(f"{figure.__name__}: {json.dumps(numbers, indent=1, ensure_ascii=False)}")
            stored = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(stored | {figure.__name__: numbers}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
