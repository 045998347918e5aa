"""PPO for a network defender: CAGE Challenge 2, a 13-host network against scripted attackers.

    python ppo_cage2_parallel.py                                             # one defender against all attackers
    python ppo_cage2_parallel.py --configs document                          # 25 environments, all 145 actions
    python ppo_cage2_parallel.py --workflow any                              # one that repairs in the order it is told
    python ppo_cage2_parallel.py search --red-agent meander                  # which order is best?
    python ppo_cage2_parallel.py play --logdir runs/... --red-agent meander  # watch the best checkpoint defend

A run writes to runs/{env_id}__{script}__{seed}__{time}/ (or --logdir): config.json, TensorBoard events,
progress.csv and timing.csv (one row per update), eval.csv, best.pt, latest.pt (the one before as *.prev.pt),
curves.png. The best five of all runs with the same settings stand beside it, in best/. Stop it at any time;
`--resume --logdir D` continues it, on a CPU bit for bit. Read the file from top to bottom: arguments, agent,
mathematics, environments, training, searching, playing; behind them what every run needs and few experiments change:
files, signals, ranks, the run folder, checks, the command line.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import difflib
import errno
import fcntl
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import matplotlib.figure
import numpy as np
import PIL.Image
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from torch.distributed.elastic.multiprocessing.errors import record as report_errors
from torch.utils.tensorboard import SummaryWriter

from envs.cage2 import ACTION_NAMES, HOSTS, Cage2Env, Cage2VecEnv
from envs.cage2.memory import REDUCED_HOSTS, VERB_AND_HOST, WORKFLOW_HOSTS, Memory
from envs.cage2.workflow import (
    ORDERS,
    RANKS,
    UNIT_TYPES,
    VERDICTS,
    WorkflowEnv,
    fix_metrics,
    is_compliant,
    parse_workflow,
)
from envs.subproc_vec_env import SubprocVecEnv

SCRIPT = Path(__file__).stem
FORMAT = "ppo_cage2_parallel/2"  # what a checkpoint holds; a copy of the script keeps it


# ==========================================================================================================
# Arguments
# ==========================================================================================================
@dataclass
class Args:
    # --- the run
    env_id: str = "CAGE2-v0"
    """the only game this script knows"""
    seed: int = 1
    """seed of networks, sampling and environments (environment n gets seed + n)"""
    total_timesteps: int = 20_000_000
    """environment steps of the whole run, summed over environments, rounded down to whole batches"""
    logdir: str | None = None
    """run folder; default runs/{env_id}__{script}__{seed}__{time}"""
    resume: bool = False
    """continue the run in --logdir from its latest.pt"""
    device: str = "cpu"
    """torch device: cpu, cuda, cuda:1, ... (networks this small are faster on a CPU)"""
    torch_threads: int = 1
    """CPU threads of torch; more help where that many cores are free and minibatches are large"""
    torch_deterministic: bool = True
    """ask torch for deterministic algorithms, so that equal seeds give equal runs"""
    compile: bool = True
    """torch.compile the gradient: training is 1.1 to 1.3 times as fast, after 10-30 s of compiling"""
    eval_every: int = 1_000_000
    """environment steps between evaluations; 0: only at the end"""
    eval_episodes: int = 200
    """episodes of an evaluation against each red agent, with fixed seeds and deterministic actions"""
    save_every: int = 2_000_000
    """environment steps between writes of latest.pt; 0: only at the end"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb)"""
    capture_video: bool = False
    """write a GIF of an episode at each evaluation to videos/"""
    hints: bool = True
    """say at each evaluation what looks wrong, if anything does"""
    explain: bool = False
    """print the derived sizes and an estimate of the time, and stop"""

    # --- the environments
    num_envs: int = 256
    """parallel environments N"""
    num_workers: int | None = None
    """processes (subproc) that step the environments; default: the CPU cores"""
    vec_env: Literal["batch", "subproc"] = "batch"
    """batch: all games in one compiled loop; subproc: our processes, each with some of the games"""
    red_agent: Literal["mixed", "b_line", "meander", "sleep"] = "mixed"
    """who attacks; mixed: drawn anew for each episode, and Blue is not told"""
    green: bool = False
    """let Green scan ports as users do (the published scores are without)"""
    version: Literal["leaderboard", "head"] = "leaderboard"
    """leaderboard: the rules of the published scores; head: those of CybORG's last commit, where Restore is weaker"""
    wrapper: Literal["challenge", "cardiff"] = "challenge"
    """challenge: the official observation; cardiff: that of the winner's repository"""
    max_steps: int = 100
    """steps of an episode; the time limit is a truncation"""
    finite_horizon: bool = False
    """let the episode terminate at the limit instead, and add the share of it that has passed to the observation"""
    actions: Literal["reduced", "full"] = "reduced"
    """full: all 145; reduced: on 9 hosts (with a workflow 12) Analyse, Remove, Restore and "the next decoy" """
    memory: bool = True
    """give Blue what it has seen and done so far in the episode as further inputs"""

    # --- workflows
    workflow: str | None = None
    """in which order Blue is to repair, told to the policy: an order of the five unit types, such as
    defender,enterprise,op_server,op_host,user, or any: drawn anew for each episode; None: as it likes"""
    alignment: float = 30.0
    """lambda of the alignment reward lambda (c_t - c_{t-1}), c being the episode's compliance with its workflow; an
    episode without a fix to judge ends with -0.2 lambda"""
    compliance_threshold: float | None = None
    """end the run when the mean compliance over environments, each over its last 5 episodes, reaches this, and an
    evaluation with deterministic actions does too; None: never"""
    min_episodes: int = 10
    """episodes of each environment before such an end"""
    init_from: str | None = None
    """checkpoint whose policy and critic the run starts from"""

    # --- PPO
    num_steps: int = 100
    """steps T per environment and rollout; a batch is N*T transitions"""
    learning_rate: float = 3e-3
    """Adam's step size at the start"""
    anneal_lr: bool = True
    """let the learning rate decay linearly to 0 over the run"""
    gamma: float = 0.99
    """discount per step"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation: 0 trusts the critic, 1 the sampled return"""
    reward_scale: float = 0.1
    """rewards are multiplied by this for learning; reports show the game's own"""
    num_minibatches: int = 8
    """minibatches of an epoch; must divide N*T"""
    update_epochs: int = 4
    """passes over each batch"""
    norm_adv: bool = True
    """normalise advantages to mean 0 and standard deviation 1"""
    norm_adv_scope: Literal["minibatch", "batch", "per_env"] = "minibatch"
    """what the mean and standard deviation of the advantages are taken over"""
    clip_coef: float = 0.2
    """epsilon: a probability ratio earns nothing beyond 1 +- epsilon"""
    clip_vloss: bool = False
    """clip the critic's change too (OpenAI Baselines; later studies found no gain)"""
    ent_coef: float = 0.001
    """weight of the entropy bonus at the start"""
    anneal_ent: bool = True
    """let the entropy bonus decay linearly to 0 over the run"""
    vf_coef: float = 0.5
    """weight of the value loss, which is half the mean squared error"""
    max_grad_norm: float | None = 0.5
    """l2 norm that the gradients of actor and critic are clipped to, together; None: no clipping"""
    target_kl: float | None = None
    """end the update when a minibatch's approximate KL (k3) exceeds this; None: never"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """tanh units in the layers of actor and critic"""

    def __post_init__(self) -> None:
        """Paths, lists and NumPy's numbers, from a program, become what the command line would have given."""
        for name, value in vars(self).items():
            if isinstance(value, Path):
                setattr(self, name, str(value))
            elif isinstance(value, list):
                setattr(self, name, tuple(value))
            elif isinstance(value, np.generic):
                setattr(self, name, value.item())

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    @property
    def num_updates(self) -> int:
        return self.total_timesteps // self.batch_size


# `--configs a b` layers presets from left to right; flags win last.
PRESETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "head": {"version": "head"},
    "fast": {"total_timesteps": 2_000_000, "eval_every": 250_000, "save_every": 500_000},
    "debug": {"total_timesteps": 20_000, "num_envs": 20, "num_minibatches": 2, "update_epochs": 2, "max_steps": 30,
              "eval_every": 5_000, "eval_episodes": 10, "save_every": 4_000, "compile": False},
    "document": {"total_timesteps": 125_000, "num_envs": 25, "version": "head", "red_agent": "meander",
                 "actions": "full", "memory": False, "learning_rate": 2e-3, "anneal_lr": False,
                 "num_minibatches": 1, "norm_adv_scope": "batch", "ent_coef": 0.01, "anneal_ent": False,
                 "eval_every": 12_500, "save_every": 25_000},
    "workflow": {"workflow": ",".join(UNIT_TYPES), "compliance_threshold": 0.95},
}  # fmt: skip

# What a resumed run may change; any other difference would make it another run.
RESUMABLE = {"total_timesteps", "logdir", "resume", "device", "torch_threads", "num_workers", "eval_every",
             "save_every", "track", "capture_video", "hints", "explain"}  # fmt: skip


# ==========================================================================================================
# Agent
# ==========================================================================================================
class Tanh(nn.Module):
    """tanh(x) = 2 sigmoid(2x) - 1: torch's vectorised sigmoid takes a fifth of the time of its tanh on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.sigmoid(2 * x) - 1


def layer_init(layer: Any, std: float = math.sqrt(2)) -> Any:
    """Orthogonal weights of gain `std`, zero biases (detail 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(sizes: list[int], output_std: float) -> nn.Sequential:
    """Tanh layers of these widths; the last one is linear, with gain `output_std`."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes[:-1]):
        layers += [layer_init(nn.Linear(n_in, n_out)), Tanh()]
    return nn.Sequential(*layers, layer_init(nn.Linear(sizes[-2], sizes[-1]), output_std))


class Agent(nn.Module):
    """A categorical policy and a critic: two networks."""

    def __init__(self, envs: VectorEnv, args: Args) -> None:
        super().__init__()
        obs_dim = math.prod(envs.single_observation_space.shape)  # type: ignore[arg-type]
        num_actions = int(envs.single_action_space.n)  # type: ignore[attr-defined]
        # details 13, 26: nothing is shared. A policy head of gain 0.01 starts nearly uniform everywhere.
        self.actor = mlp([obs_dim, *args.hidden_sizes, num_actions], output_std=0.01)
        self.critic = mlp([obs_dim, *args.hidden_sizes, 1], output_std=1.0)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """(batch, obs_dim) -> V(s), (batch,)."""
        return self.critic(obs).squeeze(-1)

    def get_action(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """argmax(logits(s) + noise), (batch,): a sample for noise (batch, num_actions) of the standard Gumbel
        distribution (Gumbel 1954; Maddison et al. 2014), the mode for zeros."""
        return (self.actor(obs) + noise).argmax(-1)

    def get_action_and_value(
        self, obs: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(batch, obs_dim) -> action int64, log pi(a|s), entropy, V(s), each (batch,)."""
        log_probs = torch.log_softmax(self.actor(obs), -1)
        if action is None:
            action = (log_probs + gumbel_noise(log_probs.shape, log_probs.device)).argmax(-1)
        log_prob = log_probs.gather(-1, action[:, None]).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return action, log_prob, entropy, self.get_value(obs)

    def parameter_groups(self, args: Args) -> list[list[nn.Parameter]]:
        """The parameters that share a gradient norm and a learning rate: here actor and critic together."""
        return [[*self.actor.parameters(), *self.critic.parameters()]]


def gumbel_noise(shape: tuple[int, ...], device: Any, generator: torch.Generator | None = None) -> torch.Tensor:
    """Samples of the standard Gumbel distribution, -log(E) for E exponential."""
    return torch.empty(shape, device=device).exponential_(generator=generator).log_().neg_()


# ==========================================================================================================
# The mathematics
# ==========================================================================================================
def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminations: torch.Tensor,
    truncations: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), for each environment on its own.

    All tensors are (num_steps, num_envs). Step t of environment n led, with reward `rewards[t, n]`, from a state of
    value `values[t, n]` to a state of value `next_values[t, n]`: the state it really led to, the final one where
    the episode ended, never the reset one. Returns (advantages, returns); the returns are the critic's targets.

        delta_t = r_t + gamma V(s_{t+1}) (1 - terminated_t) - V(s_t)
        A_t     = delta_t + gamma lambda (1 - ended_t) A_{t+1},     R_t = A_t + V(s_t)

    A terminated episode has no future, so V(s') is dropped. An episode cut by a time limit, or by the end of the
    rollout, has a future, and V(s') stands for it (Pardo et al. 2018). Where an episode ended (terminated or cut), the
    recursion stops too, because the next row belongs to another one.
    """
    terminated, truncated = terminations.to(values.dtype), truncations.to(values.dtype)
    ended = torch.maximum(terminated, truncated)
    deltas = rewards + gamma * next_values * (1 - terminated) - values
    decay = gamma * gae_lambda * (1 - ended)
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(deltas[0])
    for t in reversed(range(len(rewards))):  # detail 5
        advantage = deltas[t] + decay[t] * advantage
        advantages[t] = advantage
    return advantages, advantages + values


def normalize_advantages(advantages: torch.Tensor, per_env: bool = False) -> torch.Tensor:
    """(A - mean) / (std + 1e-8), over all entries, or over the steps of each environment (num_steps, num_envs)."""
    dims = (0,) if per_env else tuple(range(advantages.ndim))
    mean, std = advantages.mean(dims, keepdim=True), advantages.std(dims, keepdim=True)
    return (advantages - mean) / (std + 1e-8)


def ppo_loss(
    agent: Agent,
    obs: torch.Tensor,
    actions: torch.Tensor,
    old_log_probs: torch.Tensor,
    old_values: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's loss on a minibatch (Schulman et al. 2017, eq. 9 with the sign turned) and its metrics, all scalars.

    obs and actions (batch, ...), actions as they were sampled, the rest (batch,). With the probability ratio
    rho = pi(a|s) / pi_old(a|s),

        loss = -mean(min(rho A, clip(rho, 1 - eps, 1 + eps) A)) + vf_coef 0.5 mean((V - R)^2) - ent_coef mean(H)

    The minimum takes away the incentive to move rho above 1 + eps where A > 0 and below 1 - eps where A < 0; it
    does not hold rho there, and it keeps the way back open.
    """
    _, log_probs, entropy, values = agent.get_action_and_value(obs, actions)
    if args.norm_adv and args.norm_adv_scope == "minibatch":
        advantages = normalize_advantages(advantages)  # detail 7
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()  # detail 8
    squared_error = (values - returns) ** 2
    if args.clip_vloss:  # detail 9
        clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        squared_error = torch.max(squared_error, (clipped_values - returns) ** 2)
    value_loss = 0.5 * squared_error.mean()
    entropy = entropy.mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # detail 10
    ratio, log_ratio = ratio.detach(), log_ratio.detach()
    return loss, {  # detail 12; the KL estimators are k1 and k3 of Schulman's note "Approximating KL divergence"
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "entropy": entropy.detach(),
        "old_approx_kl": -log_ratio.mean(),
        "approx_kl": (ratio - 1 - log_ratio).mean(),
        "clip_fraction": ((ratio - 1).abs() > args.clip_coef).to(ratio.dtype).mean(),
    }


LOSS_METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clip_fraction")
APPROX_KL = LOSS_METRICS.index("approx_kl")
EPISODE_METRICS = ("episodic_return", "episodic_length")


def ppo_gradients(agent: Agent, minibatch: Any, args: Args) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The gradient of `ppo_loss`, one flat vector for each of `agent.parameter_groups(args)`, and LOSS_METRICS as a
    vector. `minibatch` holds the tensors of `ppo_loss` in its order, obs to returns."""
    loss, metrics = ppo_loss(agent, *minibatch, args=args)  # type: ignore[misc]
    groups = agent.parameter_groups(args)
    gradients = iter(torch.autograd.grad(loss, [p for group in groups for p in group]))
    flat = [torch.cat([next(gradients).reshape(-1) for _ in group]) for group in groups]
    return flat, torch.stack([metrics[name] for name in LOSS_METRICS])


def flatten_parameters(group: list[nn.Parameter]) -> torch.Tensor:
    """Move parameters into one vector, which is returned, and make them views of it.

    Clipping and Adam then handle one long tensor instead of a dozen short ones, which halves the cost of a small
    network's step.
    """
    flat = torch.cat([p.detach().reshape(-1) for p in group])
    for p, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
        p.data = part.view_as(p)
    return flat


def adam_step(
    parameters: list[torch.Tensor], gradients: list[torch.Tensor], moments: Any, learning_rates: Any, args: Args
) -> torch.Tensor:
    """Clip the gradient of each of `agent.parameter_groups(args)`, one vector, to `args.max_grad_norm` and take a step
    of Adam (Kingma and Ba 2015), in place.

    `moments` holds, for each of them, the running means of gradient and squared gradient, and the number of steps. A
    gradient that is not finite changes no weight. Returns the norm of all gradients before clipping, (1,). It is
    written out because torch's classes cost Python time in each step and its functions do not compile for a GPU.
    """
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    for vector, gradient, norm, (mean, square, step), rate in zip(
        parameters, gradients, norms, moments, learning_rates, strict=True
    ):
        finite = torch.isfinite(norm)
        if args.max_grad_norm is not None:  # detail 11
            gradient = gradient * (args.max_grad_norm / norm).clamp(max=1.0)
        gradient, rate = torch.where(finite, gradient, 0.0), torch.where(finite, rate, 0.0)
        step += 1
        mean += (1 - 0.9) * (gradient - mean)
        square += (1 - 0.999) * (gradient**2 - square)
        # Both means began at 0; their corrections are single numbers (end of the paper's section 2). beta**step is
        # written as exp(step log beta): once 0.9**step is too small for a float, C's pow costs an eighth of a step.
        correction = (1 - torch.exp(step * math.log(0.999))).sqrt()
        rate = rate * correction / (1 - torch.exp(step * math.log(0.9)))
        vector -= rate * mean / (square.sqrt() + 1e-5 * correction)  # detail 3
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1)


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one no better than a constant, nan if R is constant.

    It does not see a constant error of V, which is why the mean absolute error is logged beside it.
    """
    variance = returns.var(correction=0)
    rounding = 1e-12 * returns.square().mean()  # what float32 makes of the variance of equal returns
    return math.nan if variance <= rounding else float(1 - (returns - values).var(correction=0) / variance)


# ==========================================================================================================
# Environments and evaluation
# ==========================================================================================================
RED_MIXTURE = {"b_line": 0.5, "meander": 0.45, "sleep": 0.05}  # of --red-agent mixed, for each episode
HORIZONS = (30, 50, 100)  # the episode lengths of the published scores


def make_envs(args: Args, backend: str = "batch", **settings: Any) -> VectorEnv:
    """`args.num_envs` games that reset within the step that ends an episode (SAME_STEP), behind Blue's memory and, if
    there is one, its workflow.

    `backend` is batch, subproc or cyborg, the real simulator (UsageError, with what to install, where it is missing);
    `settings` are passed on to the games.
    """
    red_agent = RED_MIXTURE if args.red_agent == "mixed" else args.red_agent
    settings = {"red_agent": red_agent, "green": args.green, "version": args.version, "wrapper": args.wrapper,
                "max_steps": args.max_steps, "state_in_info": False, **settings}  # fmt: skip
    if args.workflow and backend != "batch":
        settings["state_in_info"] = True  # compliance is judged on the true state
    vec_env: VectorEnv
    if backend == "batch":
        vec_env = Cage2VecEnv(args.num_envs, **settings)
    elif backend == "subproc":
        env_fns = [partial(Cage2Env, **settings)] * args.num_envs
        vec_env = SubprocVecEnv(env_fns, num_workers=args.num_workers, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        from envs.cage2.cyborg import INSTALL_HINT, CybORGEnv, make_cyborg_vec_env

        if importlib.util.find_spec("CybORG") is None:
            raise UsageError(INSTALL_HINT)
        try:
            CybORGEnv(**settings).reset()  # what it complains of would be a traceback from a worker
        except (ValueError, gym.error.DependencyNotInstalled) as error:
            raise UsageError(f"--backend cyborg: {error} (--version chooses the rules.)") from None
        vec_env = make_cyborg_vec_env(args.num_envs, args.num_workers, **settings)
    horizon = args.max_steps if args.finite_horizon else None
    hosts = [] if args.actions == "full" else WORKFLOW_HOSTS if args.workflow else REDUCED_HOSTS
    vec_env = Memory(vec_env, args.memory, hosts, horizon)
    return WorkflowEnv(vec_env, args.workflow, args.alignment) if args.workflow else vec_env


@torch.no_grad()
def play_episodes(
    agent: Agent, vec_env: VectorEnv, deterministic: bool = True, seed: int = 10_000, options: Any = None
) -> dict[str, np.ndarray]:
    """Play one episode in each environment, environment n from seed + n, to the time limit of all.

    Returns rewards and actions (the game's), each (num_steps, num_envs); where infos tell, what Red did in words;
    with a workflow, fixes (num_envs, 4) by verdict; frames (num_steps, ...) of environment 0 if it renders.
    """
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    shape = (vec_env.num_envs, int(vec_env.single_action_space.n))  # type: ignore[attr-defined]
    record: dict[str, list[Any]] = {"rewards": [], "actions": [], "red_action": [], "frames": []}
    obs, _ = vec_env.reset(seed=seed, options=options)
    ended = np.zeros(vec_env.num_envs, bool)
    noise = torch.zeros(shape, device=device)
    while not ended.any():
        if vec_env.render_mode is not None:
            record["frames"].append(vec_env.render()[0])  # type: ignore[index]
        if not deterministic:
            noise = gumbel_noise(shape, device, generator)
        action = agent.get_action(torch.as_tensor(obs, device=device), noise).cpu().numpy()
        obs, rewards, terminated, truncated, infos = vec_env.step(action)
        record["actions"].append(infos["game_actions"])
        ended = terminated | truncated
        record["rewards"].append(rewards)
        record["fixes"] = infos.get("fixes", [])
        described = infos["final_info"] if ended.any() else infos
        if "red_action" in described:
            record["red_action"].append(described["red_action"])
    return {name: np.array(values) for name, values in record.items()}


def stratified_error(returns: np.ndarray) -> float:
    """The standard error of the mean of returns (num_red_agents, num_episodes). Red agents are strata of fixed size:
    that they differ is no noise. nan for one episode each."""
    if returns.shape[1] < 2:
        return math.nan
    return float(np.sqrt((returns.var(axis=1, ddof=1) / returns.shape[1]).sum()) / len(returns))


def prefix_returns(rewards: dict[str, np.ndarray], finite_horizon: bool = False) -> dict[str, list[float]]:
    """For rewards (num_steps, num_episodes) against each red agent, the mean return and its standard error over the
    first 30, 50 and 100 steps, and all: {"b_line_30": [mean, error], ...}.

    Nothing in the game or in Blue's inputs tells how long an episode will be, so the first 30 steps of a longer
    episode are an episode of 30 steps, and one set of episodes fills every row. With --finite-horizon Blue does see
    how long, and only the whole episode counts.
    """
    cells = {}
    for red, part in rewards.items():
        shorter = [] if finite_horizon else [horizon for horizon in HORIZONS if horizon < len(part)]
        for horizon in [*shorter, len(part)]:
            sums = part[:horizon].sum(0)
            cells[f"{red}_{horizon}"] = [float(sums.mean()), stratified_error(sums[None])]
    return cells


def evaluate(agent: Agent, args: Args, deterministic: bool = True, seed: int = 10_000) -> dict[str, Any]:
    """Play `args.eval_episodes` episodes against each red agent that --red-agent may choose.

    Episode i of every red agent starts from its own fixed seed, so that two evaluations differ by their policies
    alone. Returns cells (see `prefix_returns`); score, the sum of their means, which for the default arguments is the
    challenge's; mean_return, std_return and standard_error over all episodes, mean_length; with a workflow, what
    `fix_metrics` says.
    """
    reds = [red for red in RED_MIXTURE if args.red_agent in (red, "mixed")]
    vec_env = make_envs(replace(args, num_envs=args.eval_episodes * len(reds)))
    options = {"red_agent": list(np.repeat(reds, args.eval_episodes))}
    record = play_episodes(agent, vec_env, deterministic, seed, options)
    vec_env.close()
    rewards = record["rewards"]
    by_red = dict(zip(reds, np.split(rewards, len(reds), axis=1), strict=True))
    cells = prefix_returns(by_red, args.finite_horizon)
    returns = rewards.sum(0).reshape(len(reds), -1)
    return {"score": sum(mean for mean, _ in cells.values()), "cells": cells, "mean_return": float(returns.mean()),
            "std_return": float(returns.std()), "standard_error": stratified_error(returns),
            "mean_length": float(len(rewards)),
            **(fix_metrics(record["fixes"]) if args.workflow else {})}  # fmt: skip


# ==========================================================================================================
# Training
# ==========================================================================================================
@dataclass
class Counters:
    """Where a run stands."""

    update: int = 0  # rollouts collected and learnt from
    global_step: int = 0  # environment steps, summed over environments
    episodes: int = 0  # ended episodes; each is followed by a reset
    epochs: float = 0.0  # passes over a batch
    minibatch_updates: int = 0  # optimiser steps
    best_return: float = -math.inf  # best evaluation so far: its score
    best_step: int = 0  # and when it was
    compliant: bool = False  # whether an evaluation has confirmed --compliance-threshold
    seconds: float = 0.0  # time spent collecting and learning


BEST = ("best_return", "best_step")  # what Counters know of best.pt


def crossed(step: int, advance: int, every: int) -> bool:
    """Whether the last `advance` steps, which led to `step`, reached or passed a multiple of `every` (0: never).

    `step % every == 0` would be wrong: steps come in whole batches and may jump over every multiple.
    """
    return every > 0 and step // every > (step - advance) // every


def compiler(args: Args, device: torch.device) -> Callable[[Any], Any]:
    """What turns a function into its compiled form, or changes nothing without --compile.

    Compiling needs more than torch: a C++ compiler or triton, Python's headers, a path of torch without spaces. It
    happens in the first call; where it fails there, the call warns, and it and all later ones run uncompiled.
    """
    if not args.compile:
        return lambda function: function
    torch._dynamo.config.trace_autograd_ops = True  # the compiler then sees through torch.autograd.grad
    torch._dynamo.config.recompile_limit = 256  # a sweep in one process compiles for each of its constants
    options: dict[str, Any] = {"cpp_wrapper": device.type == "cpu"}

    def compiled(function: Any) -> Any:
        fastest: Any = torch.compile(function, fullgraph=True, dynamic=False, options=options)

        def call(*inputs: Any) -> Any:
            nonlocal fastest
            try:
                return fastest(*inputs)
            except torch._dynamo.exc.ShortenTraceback as error:  # of the compilers behind torch, not of our code
                lines = str(error).splitlines()
                reasons = [line for line in lines if "error: " in line or "No such file" in line] or [
                    " ".join(lines[:2])
                ]
                announce(f"warning: torch.compile failed ({reasons[0].strip()}), so --compile is off.")
                fastest = function
            return fastest(*inputs)

        return call

    return compiled


def make_take_steps(
    agent: Agent, parameters: list[torch.Tensor], moments: Any, rates: list[torch.Tensor], ranks: Ranks, args: Args
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """A function that takes a gradient step on each of several minibatches, compiled as far as possible.

    --target-kl looks at a number between gradient and step, and ranks exchange messages there; a compiled program can
    do neither. Gradient and step are then compiled by themselves, otherwise the function as a whole is.
    """
    compiled = compiler(args, ranks.device)
    in_parts = args.target_kl is not None or ranks.size > 1
    gradients_of: Any = compiled(ppo_gradients) if in_parts else ppo_gradients
    optimizer_step: Any = compiled(adam_step) if in_parts else adam_step

    def take_steps(minibatches: list[torch.Tensor]) -> list[torch.Tensor]:
        """A step on each minibatch of tensors (n, minibatch size, ...) in turn, until one exceeds --target-kl; returns
        the metrics of each step."""
        steps = []
        for minibatch in zip(*minibatches, strict=True):
            gradients, metrics = gradients_of(agent, minibatch, args)
            ranks.average([*gradients, metrics])
            if args.target_kl is not None and float(metrics[APPROX_KL]) > args.target_kl:
                break
            grad_norm = optimizer_step(parameters, gradients, moments, rates, args)
            steps.append(torch.cat([metrics, grad_norm]))
        return steps

    return take_steps if in_parts else compiled(take_steps)


def train(args: Args, interrupt: Interrupt | None = None) -> dict[str, Any]:
    """Train, evaluate and save as `args` say; returns the run folder and the last and best evaluation.

    Raises UsageError for arguments that cannot work, and FloatingPointError before numbers that are not finite
    reach the weights. A signal ends the run early and cleanly; the result then holds its number as "signal". Its
    "saved" is whether latest.pt holds the end of the run. Not for several threads: random generators are global. A
    caller that trains several policies, and waits for signals between them too, passes its own `interrupt`.
    """
    validate(args)
    ranks = Ranks(args)
    logdir, checkpoint, lock = ranks.run_once(open_run, args)
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            stack.callback(os.close, lock)
        stack.push(ranks.close)
        vec_env: Any = stack.enter_context(contextlib.closing(make_envs(ranks.share(args), args.vec_env)))
        if interrupt is None:
            interrupt = Interrupt()
            stack.callback(interrupt.restore)
        # rank 0 speaks for all
        stack.enter_context(contextlib.redirect_stdout(sys.stdout if ranks.rank == 0 else None))
        return learn(args, ranks, logdir, checkpoint, vec_env, interrupt)


def learn(
    args: Args, ranks: Ranks, logdir: Path, checkpoint: dict[str, Any] | None, vec_env: Any, interrupt: Interrupt
) -> dict[str, Any]:
    """The loop of `train`: collect, bootstrap, advantages, update, log, evaluate, save."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    torch.use_deterministic_algorithms(args.torch_deterministic)
    device, num_steps, num_envs = ranks.device, args.num_steps, vec_env.num_envs
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or each rank would take memory of the first GPU, too
    first_env = ranks.rank * num_envs  # this rank steps environments first_env to first_env + num_envs - 1
    postmortem = logdir / (f"postmortem_{ranks.rank}.npz" if ranks.rank else "postmortem.npz")

    assert vec_env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP  # so that final_obs below exists
    num_actions = int(vec_env.single_action_space.n)
    agent = Agent(vec_env, args).to(device)
    parameters = [flatten_parameters(group) for group in agent.parameter_groups(args)]
    moments = [(torch.zeros_like(x), torch.zeros_like(x), torch.zeros((), device=device)) for x in parameters]
    # Tensors, since they are annealed: torch.compile would compile anew for each new float.
    rates = [torch.tensor(args.learning_rate, device=device)]
    ent_coef: Any = torch.tensor(args.ent_coef, device=device)
    # With several ranks, a minibatch's advantages are normalised before each rank takes its part of it.
    normalize_here = ranks.size > 1 and args.norm_adv and args.norm_adv_scope == "minibatch"
    loss_args = replace(args, ent_coef=ent_coef, norm_adv=args.norm_adv and not normalize_here)

    per_call = math.gcd(4, args.num_minibatches)  # a compiled call for every four steps saves a third of their time

    # The rollout, time-major: row t holds what happened at step t in each environment. It is collected in NumPy, which
    # stores a row in a fifth of torch's time, and moves to the device as a whole (a CPU's tensors share its memory).
    obs_rows = np.zeros((num_steps, num_envs, *vec_env.single_observation_space.shape), np.float32)
    action_rows = np.zeros((num_steps, num_envs), np.int64)
    reward_rows = np.zeros((num_steps, num_envs), np.float32)
    terminated_rows, truncated_rows = np.zeros((2, num_steps, num_envs), np.bool_)
    rows = [obs_rows, action_rows, reward_rows, terminated_rows, truncated_rows]
    announce(describe(args, logdir, agent, rows))

    counters = Counters()
    episode_returns, episode_lengths = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)  # under way
    env_obs, _ = vec_env.reset(seed=args.seed + first_env)
    if checkpoint is not None:
        counters = Counters(**checkpoint["counters"])
        load_weights(agent, checkpoint, logdir / "latest.pt")
        moments = [tuple(x.to(device) for x in group) for group in checkpoint["optimizer"]]
        own = checkpoint["ranks"][ranks.rank]
        vec_env.set_state(to_arrays(own["envs"]))
        env_obs, episode_returns, episode_lengths = to_arrays(own["episodes"])
        set_random_states(own["random"], device)
        announce(f"continuing after step {counters.global_step:,}")
    elif args.init_from is not None:
        load_policy(agent, Path(args.init_from))
    take_steps = make_take_steps(agent, parameters, moments, rates, ranks, loss_args)

    def save(name: str) -> bool:
        """Write everything that the rest of the run depends on; False if the disk refused."""
        own = {"random": random_states(device), "envs": vec_env.get_state(),
               "episodes": [env_obs, episode_returns, episode_lengths]}  # fmt: skip
        state = {"format": FORMAT, "args": asdict(args), "counters": asdict(counters), "agent": agent.state_dict(),
                 "optimizer": moments, "ranks": ranks.gather_objects(own)}  # fmt: skip
        return ranks.run_once(save_checkpoint, logdir / name, state)

    if args.track and ranks.rank == 0:
        import wandb

        run_id = logdir / "wandb_id"  # by which a resumed run finds its curves
        if not run_id.exists():
            run_id.write_text(uuid.uuid4().hex)
        wandb.init(project=SCRIPT, name=logdir.name, id=run_id.read_text(), resume="allow", config=asdict(args),
                   allow_val_change=True, sync_tensorboard=True)  # fmt: skip
    logger = Logger(logdir, counters.global_step, silent=ranks.rank > 0)
    saved = checkpoint is not None or save("latest.pt")  # from here on a killed run can be resumed

    def received_signal() -> int | None:
        """A signal that any of the ranks has received: all must leave the loop together."""
        return next((number for number in ranks.gather_objects(interrupt.signum) if number), None)

    evaluation: dict[str, Any] = {}
    latest_return = "?"  # of the last rollout in which an episode ended
    signum = received_signal()
    while counters.update < args.num_updates and not counters.compliant and signum is None:
        started = time.perf_counter()
        counters.update += 1
        progress = (counters.update - 1) / args.num_updates
        annealing = 1 - progress if args.anneal_lr else 1.0  # detail 4
        rates[0].fill_(args.learning_rate * annealing)
        if args.anneal_ent:
            ent_coef.fill_(args.ent_coef * (1 - progress))

        # --- collect ----------------------------------------------------------------------------------
        # Each rank draws the numbers of all environments and uses its own, so that the ranks' generators stay alike.
        noise = gumbel_noise((num_steps, args.num_envs, num_actions), device)
        noise = noise[:, first_env : first_env + num_envs]
        cuts: list[tuple[int, int, np.ndarray]] = []  # (t, n, final observation) where a time limit cut an episode
        ended: list[tuple[float, int]] = []  # (return, length) of the episodes that ended
        fixes: list[np.ndarray] = []  # their fixes by verdict
        env_time = 0.0
        for t in range(num_steps):
            obs_rows[t] = env_obs
            with torch.no_grad():
                action = agent.get_action(torch.as_tensor(obs_rows[t], device=device), noise[t])
            action_rows[t] = action.cpu().numpy()
            before_step = time.perf_counter()
            env_obs, reward, terminated, truncated, infos = vec_env.step(action_rows[t])
            env_time += time.perf_counter() - before_step
            episode_returns += reward
            episode_lengths += 1
            reward_rows[t] = args.reward_scale * (reward + infos.get("alignment", 0))
            terminated_rows[t], truncated_rows[t] = terminated, truncated
            for n in np.flatnonzero(terminated | truncated):
                ended.append((float(episode_returns[n]), int(episode_lengths[n])))
                episode_returns[n] = episode_lengths[n] = 0
                if args.workflow:
                    fixes.append(infos["fixes"][n])
                if not terminated[n]:
                    cuts.append((t, int(n), infos["final_obs"][n]))
        collected = time.perf_counter()

        # --- bootstrap --------------------------------------------------------------------------------
        obs, actions, rewards, terminations, truncations = [torch.as_tensor(x, device=device) for x in rows]
        next_obs = torch.as_tensor(env_obs, dtype=torch.float32, device=device)
        # One pass over the whole rollout gives what num_steps small ones would have given.
        with torch.no_grad():
            _, log_probs, _, values = agent.get_action_and_value(obs.flatten(0, 1), actions.flatten(0, 1))
            log_probs, values = log_probs.view(num_steps, num_envs), values.view(num_steps, num_envs)
            next_values = torch.cat([values[1:], agent.get_value(next_obs)[None]])
            if cuts:
                times, indices, final_obs = zip(*cuts, strict=True)
                final_values = agent.get_value(torch.as_tensor(np.stack(final_obs), dtype=torch.float32, device=device))
                next_values[list(times), list(indices)] = final_values
        check_finite(postmortem, first_env, actions, obs=obs, rewards=rewards, next_values=next_values)

        # --- advantages -------------------------------------------------------------------------------
        advantages, returns = compute_gae(
            rewards, values, next_values, terminations, truncations, args.gamma, args.gae_lambda
        )
        b_obs, b_actions, b_log_probs, b_values, b_advantages, b_returns = map(
            ranks.gather, (obs, actions, log_probs, values, advantages, returns)
        )
        advantage_std = float(b_advantages.std())
        if args.norm_adv and args.norm_adv_scope != "minibatch":
            b_advantages = normalize_advantages(b_advantages, per_env=args.norm_adv_scope == "per_env")

        # --- update -----------------------------------------------------------------------------------
        batch = [x.flatten(0, 1) for x in (b_obs, b_actions, b_log_probs, b_values, b_advantages, b_returns)]
        step_metrics: list[torch.Tensor] = []  # of each step: LOSS_METRICS and the gradient's norm
        for _ in range(args.update_epochs):
            order = torch.randperm(args.batch_size, device=device)  # detail 6: each transition once an epoch
            minibatches = [x[order].unflatten(0, (args.num_minibatches, -1)) for x in batch]
            if normalize_here:
                *others, mb_advantages, mb_returns = minibatches
                mb_advantages = normalize_advantages(mb_advantages.T, per_env=True).T  # one column per minibatch
                minibatches = [*others, mb_advantages, mb_returns]
            minibatches = [x[:, ranks.rank :: ranks.size] for x in minibatches]  # this rank's rows
            epoch: list[torch.Tensor] = []
            for i in range(0, args.num_minibatches, per_call):
                steps = take_steps([x[i : i + per_call] for x in minibatches])
                epoch += steps
                if len(steps) < per_call:  # --target-kl was exceeded
                    break
            check_gradients(postmortem, epoch, minibatches)
            step_metrics += epoch
            del minibatches  # frees the memory before the next epoch's are made
            if len(epoch) < args.num_minibatches:
                break
        counters.epochs += len(step_metrics) / args.num_minibatches
        counters.minibatch_updates += len(step_metrics)
        counters.global_step += args.batch_size
        shares = ranks.gather_objects((ended, fixes))
        ended = [episode for episodes, _ in shares for episode in episodes]
        fixes = [fixes_of_one for _, fixes_of_rank in shares for fixes_of_one in fixes_of_rank]
        counters.episodes += len(ended)
        seconds = time.perf_counter() - started
        counters.seconds += seconds

        # --- log --------------------------------------------------------------------------------------
        step_names = [*LOSS_METRICS, "grad_norm"]
        means = torch.stack(step_metrics).mean(0).tolist() if step_metrics else [math.nan] * len(step_names)
        means_of_ended = np.mean(ended, axis=0).tolist() if ended else [math.nan] * len(EPISODE_METRICS)
        episodic = dict(zip(EPISODE_METRICS, means_of_ended, strict=True))
        record = {
            **{f"train/{name}": value for name, value in zip(step_names, means, strict=True)},
            "train/explained_variance": explained_variance(b_values, b_returns),
            "train/value_abs_error": float((b_values - b_returns).abs().mean()),
            "train/value_mean": float(b_values.mean()),
            "train/return_mean": float(b_returns.mean()),
            "train/return_variance": float(b_returns.var(correction=0)),
            "train/advantage_std": advantage_std,
            "train/learning_rate": args.learning_rate * annealing,
            "train/ent_coef": float(ent_coef),
            "train/update_epochs_done": len(step_metrics) / args.num_minibatches,
            **{f"rollout/{name}": value for name, value in episodic.items()},
            # With a workflow, this includes the alignment reward.
            "rollout/mean_reward": float(ranks.gather(rewards).mean()) / args.reward_scale,
            "rollout/resets": counters.episodes,
            "counters/train_steps": counters.update * num_steps,
            "counters/rollouts": counters.update,
            "counters/epochs": counters.epochs,
            "counters/minibatch_updates": counters.minibatch_updates,
        }
        if args.workflow:
            metrics_of_fixes = fix_metrics(np.array(fixes).reshape(-1, len(VERDICTS)))
            record |= {f"rollout/{name}": value for name, value in metrics_of_fixes.items()}
        logger.write("progress.csv", counters.global_step, record)
        env_share, update_share = env_time / seconds, 1 - (collected - started) / seconds
        timing = {"sps": args.batch_size / seconds, "seconds": counters.seconds, "env_share": env_share,
                  "inference_share": 1 - env_share - update_share, "update_share": update_share}  # fmt: skip
        logger.write("timing.csv", counters.global_step, {f"time/{name}": value for name, value in timing.items()})
        eta = (args.num_updates - counters.update) * seconds
        best = f"{counters.best_return:.2f}" if counters.best_return > -math.inf else "?"  # before an evaluation
        latest_return = f"{episodic['episodic_return']:.2f}" if ended else latest_return
        logger.line(f"step {counters.global_step:>10,} | {timing['sps']:>7,.0f} steps/s | return "
                    f"{latest_return:>9} | best evaluation {best:>9} | KL "
                    f"{record['train/approx_kl']:.4f} | {eta / 60:.1f} min left")  # fmt: skip

        # --- evaluate ---------------------------------------------------------------------------------
        threshold, evaluated = args.compliance_threshold, None
        if threshold is not None:
            recent, episodes = zip(*ranks.gather_objects((vec_env.recent, vec_env.episodes)), strict=True)
            if is_compliant(np.concatenate(recent), np.concatenate(episodes), threshold, args.min_episodes):
                evaluated = ranks.run_once(evaluate, agent, args)
                counters.compliant = evaluated["compliance"] >= threshold
        last = counters.update == args.num_updates or counters.compliant
        if last or evaluated or crossed(counters.global_step, args.batch_size, args.eval_every):
            evaluation = evaluated or ranks.run_once(evaluate, agent, args)
            names = ["score", "mean_return", "std_return", "mean_length"]
            names += ["compliance", "strict_compliance"] if args.workflow else []
            scores = {f"eval/{name}": evaluation[name] for name in names}
            cells = {f"eval/{name}": cell[0] for name, cell in evaluation["cells"].items()}
            logger.write("eval.csv", counters.global_step, scores | cells)
            if counters.compliant or evaluation["score"] > counters.best_return:  # confirmed counts more than a return
                previous = replace(counters, compliant=False)  # a policy that is nowhere confirms nothing
                counters.best_return, counters.best_step = evaluation["score"], counters.global_step
                if not save("best.pt"):  # the next good evaluation tries again
                    counters = previous
            if args.capture_video and ranks.rank == 0:
                one = make_envs(replace(args, num_envs=1), render_mode="rgb_array")
                frames = list(play_episodes(agent, one)["frames"])
                gif = logdir / "videos" / f"step_{counters.global_step}.gif"
                with outlive_disk_errors(gif):
                    save_gif(frames, gif, fps=4)
            advice = hint(record, progress, 0.05 * math.log(num_actions)) if args.hints else None
            if advice:
                logger.line(f"hint: {advice}", final=True)

        # --- save -------------------------------------------------------------------------------------
        signum = received_signal()
        if last or signum or crossed(counters.global_step, args.batch_size, args.save_every):
            saved = save("latest.pt")

    return finish(args, logger, counters, evaluation, signum, saved)


def finish(
    args: Args, logger: Logger, counters: Counters, evaluation: dict[str, Any], signum: int | None, saved: bool
) -> dict[str, Any]:
    """Draw curves.png, enter the run in the leaderboard, print its last line; returns what `train` does."""
    logdir = logger.logdir
    result = {"logdir": str(logdir), "signal": signum, "saved": saved, **asdict(counters)}
    logger.close()
    if logger.silent:  # rank 0 speaks for all
        return result
    if args.track:
        import wandb

        wandb.finish()  # else the next run of this process would be logged into this one
    with outlive_disk_errors(logdir / "curves.png"):
        plot_curves(logdir)
    if signum and counters.update < args.num_updates and not counters.compliant:
        outcome = "stopped; continue with --resume --logdir"
    else:
        with outlive_disk_errors(logdir.parent / "best"):
            score: float | list[float] = counters.best_return
            if args.compliance_threshold is not None:  # in the order that best.pt is chosen by
                score = [float(counters.compliant), counters.best_return]
            update_leaderboard(logdir, args, score, counters.best_step)
        logged = read_csv(logdir / "eval.csv")  # for a run that was resumed when it had finished
        evaluation = evaluation or {name.removeprefix("eval/"): column[-1] for name, column in logged.items()}
        confirmed = ", compliance confirmed" if counters.compliant else ""
        outcome = (
            f"score {evaluation.get('score', math.nan):.2f}, best {counters.best_return:.2f}{confirmed}; run folder"
        )
    logger.line(f"{counters.global_step:,} steps in {counters.seconds:.0f} s, {outcome} {logdir}", final=True)
    if not saved:
        complain(f"error: latest.pt was not written: {logdir} has lost what came after the last checkpoint.")
    return result | {"score": evaluation.get("score", math.nan)}


# ==========================================================================================================
# Searching for a good workflow
# ==========================================================================================================
@dataclass
class SearchArgs:
    logdir: str | None = None
    """folder of the search; default runs/search__{red agent}__{seed}__{time}"""
    resume: bool = False
    """continue the search in --logdir as it began; --n-workflows, --baseline and the path of --shared may change"""
    seed: int = 1
    """seed of the first orders and of all training"""
    red_agent: Literal["mixed", "b_line", "meander", "sleep"] | None = None
    """who attacks; default: as in the training of --shared, or meander"""
    version: Literal["leaderboard", "head"] | None = None
    """rules; default: as in the training of --shared, or leaderboard"""

    # --- the policies
    shared: str | None = None
    """checkpoint of a run with --workflow any: its environment is that of the search, and its policy is what each
    order's starts from (with --warm-start shared). Default: train one first"""
    shared_timesteps: int = 5_000_000
    """environment steps of that training"""
    fresh_policy_per_order: bool = False
    """start each order's policy from random weights instead, as the document does"""
    warm_start: Literal["shared", "nearest", "last"] = "shared"
    """shared; or the policy of the nearest order so far, or of the last one (the first order starts afresh)"""
    n_envs: int = 25
    """parallel environments of an order's training"""
    update_every_steps: int = 100
    """steps of each environment between updates"""
    train_episodes_per_env: int = 50
    """episodes of each environment that an order is trained for, at most"""
    learning_rate: float = 2e-4
    """Adam's step size in them, which decays linearly; a fresh policy learns better with 0.002"""
    compliance_threshold: float = 0.95
    """an order's training ends once its policy complies to this share; see --compliance-threshold of training"""
    min_episodes: int = 10
    """episodes of each environment before such an end"""
    eval_episodes: int = 1000
    """episodes against each red agent that an order is judged by, with the same seeds for all orders"""

    baseline: str | None = None
    """checkpoint of a run without --workflow, judged on the same episodes: what keeping to an order costs"""

    # --- the choice of orders
    n_workflows: int = 20
    """orders to try"""
    n_start: int = 3
    """orders drawn at random before the Gaussian process chooses"""
    gp_beta: float | Literal["srinivas"] = 4.0
    """the next order has the largest mean + sqrt(beta) standard deviations; srinivas: a schedule that grows"""
    gp_scale: float = 0.2
    """lambda of the Mallows kernel exp(-lambda d): at 0.2 two orders that differ in d = 3 pairs correlate by 0.55"""
    gp_gate: bool = False
    """let the process neither learn from nor recommend orders whose compliance was not reached"""

    def __post_init__(self) -> None:
        """As in `Args`."""
        Args.__post_init__(self)  # type: ignore[arg-type]


PAIRS = np.array(list(itertools.combinations(range(len(UNIT_TYPES)), 2)))

# DISCORDANT[a, b]: how many of the 10 pairs of types orders a and b rank differently (Kendall's tau distance).
PAIR_SIGNS = np.sign(RANKS[:, PAIRS[:, 0]] - RANKS[:, PAIRS[:, 1]])  # (120, 10)
DISCORDANT = (len(PAIRS) - PAIR_SIGNS @ PAIR_SIGNS.T) // 2


def mallows_kernel(scale: float) -> np.ndarray:
    """exp(-scale * DISCORDANT), (120, 120) (Jiao & Vert 2015). Positive definite: it is a Gaussian kernel on
    PAIR_SIGNS, whose squared distances are 4 times the number of discordant pairs."""
    return np.exp(-scale * DISCORDANT)


def gp_posterior(
    kernel: np.ndarray, tried: list[int], values: np.ndarray, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation, (120,) each, of a Gaussian process of prior mean 0 and covariance `kernel` at all
    orders, after `values` were seen at the orders `tried` with noise of these variances (Rasmussen & Williams 2006,
    algorithm 2.1)."""
    factor = np.linalg.cholesky(kernel[np.ix_(tried, tried)] + np.diag(noise))  # K + noise = L L'
    half = np.linalg.solve(factor, kernel[tried])  # L^-1 k(tried, all)
    mean = half.T @ np.linalg.solve(factor, values)
    return mean, np.sqrt(np.maximum(kernel.diagonal() - (half**2).sum(0), 0))


def posterior_returns(args: SearchArgs, history: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean return and its standard deviation, (120,) each, as `gp_posterior` sees them after a search's history.

    The process works with standardised returns; each has the standard error of its evaluation as noise. With
    --gp-gate, orders that were not complied with are left out.
    """
    kept = accepted(args, history)
    if not kept:
        return np.full(len(ORDERS), np.nan), np.ones(len(ORDERS))
    returns, errors = (np.array([record[key] for record in kept]) for key in ("mean_return", "standard_error"))
    mean, std = returns.mean(), returns.std() or 1.0
    tried = [parse_workflow(record["workflow"]) for record in kept]
    scaled = gp_posterior(mallows_kernel(args.gp_scale), tried, (returns - mean) / std, (errors / std) ** 2 + 1e-6)
    return mean + std * scaled[0], std * scaled[1]


def srinivas_beta(t: int, delta: float = 0.1) -> float:
    """The beta of the t-th choice with which the regret's bound holds with probability 1 - delta (Srinivas et al. 2010,
    theorem 1)."""
    return 2 * math.log(len(ORDERS) * t**2 * math.pi**2 / (6 * delta))


def next_order(args: SearchArgs, history: list[dict[str, Any]]) -> int:
    """The order to try next, an index into ORDERS: at first by chance, then the one not yet tried of the largest upper
    confidence bound (GP-UCB, Srinivas et al. 2010)."""
    tried = [parse_workflow(record["workflow"]) for record in history]
    mean, std = posterior_returns(args, history)
    if len(history) < args.n_start or np.isnan(mean).any():
        drawn = np.random.default_rng(args.seed).permutation(len(ORDERS))
        return next(int(order) for order in drawn if order not in tried)
    beta = srinivas_beta(len(history) + 1) / 5 if args.gp_beta == "srinivas" else args.gp_beta  # a fifth, as they did
    bound = mean + math.sqrt(beta) * std
    bound[tried] = -np.inf
    return int(bound.argmax())


def trains_shared_policy(args: SearchArgs) -> bool:
    """Whether a search begins with the training of a policy from which those of all orders start."""
    return args.shared is None and args.warm_start == "shared" and not args.fresh_policy_per_order


def shared_args(args: SearchArgs, base: Args) -> Args:
    """The arguments of the training that a search begins with."""
    return replace(base, seed=args.seed, total_timesteps=args.shared_timesteps)


def order_args(args: SearchArgs, base: Args, order: int) -> Args:
    """The arguments of an order's training."""
    steps = args.n_envs * args.train_episodes_per_env * base.max_steps
    return replace(
        base, workflow=",".join(ORDERS[order]), seed=args.seed, total_timesteps=steps, num_envs=args.n_envs,
        num_steps=args.update_every_steps, num_minibatches=1, learning_rate=args.learning_rate, anneal_lr=True,
        eval_every=0, eval_episodes=Args.eval_episodes, capture_video=False, save_every=steps // 4,
        compliance_threshold=args.compliance_threshold, min_episodes=args.min_episodes,
    )  # fmt: skip


def judge(run: Args, path: Path) -> dict[str, Any]:
    """`evaluate` of a checkpoint's policy, on episodes that are the same for all and that no training has seen."""
    agent = Agent(make_envs(run), run)
    load_policy(agent, path)
    return evaluate(agent, run, seed=1_000_000)


def train_and_keep(run: Args, interrupt: Interrupt) -> dict[str, Any]:
    """`train`; raises OSError if its last checkpoint, which a search judges and goes on from, was not written."""
    result = train(run, interrupt)
    if not result["saved"]:
        path = Path(result["logdir"], "latest.pt")
        raise OSError(errno.ENOSPC, "the last checkpoint was not written; make room, then search --resume", str(path))
    return result


def try_order(
    args: SearchArgs, base: Args, order: int, start: Path | None, logdir: Path, interrupt: Interrupt
) -> dict[str, Any] | None:
    """Train a policy for an order, from the weights at `start`, and judge it on episodes that its training has not
    seen; returns its record for the history, or None if a signal came before the training's end."""
    resume, init_from = (logdir / "latest.pt").exists(), None if start is None else str(start)
    if resume:  # it has its weights; what they began from may have been moved with the search
        init_from = load_latest(logdir)["args"]["init_from"]
    run = replace(order_args(args, base, order), logdir=str(logdir), resume=resume, init_from=init_from)
    with open(logdir.parent / "training.log", "a") as log, contextlib.redirect_stdout(log):
        result = train_and_keep(run, interrupt)
    if result["signal"]:
        return None
    evaluation = judge(replace(run, num_envs=1, eval_episodes=args.eval_episodes), logdir / "latest.pt")
    names = ("mean_return", "standard_error", "compliance", "compliance_micro", "strict_compliance", "needless_fixes")
    return {"workflow": run.workflow, **{name: evaluation[name] for name in names}, "compliant": result["compliant"],
            "steps": result["global_step"], "seconds": result["seconds"],
            "checkpoint": str(logdir / "latest.pt")}  # fmt: skip


def judge_baseline(args: SearchArgs, base: Args) -> dict[str, Any]:
    """mean_return and standard_error of --baseline's policy, which knows no workflow, on the episodes by which orders
    are judged, and "trained_with", what was different in its training. Raises UsageError if it knows a workflow."""
    path = Path(args.baseline or "")
    trained = known_args(load_checkpoint(path)["args"])
    if trained.workflow is not None:
        raise UsageError(f"--baseline {path} was trained with --workflow {trained.workflow}; name a run without one.")
    played = {name: getattr(base, name) for name in ("red_agent", "green", "version", "max_steps")}
    evaluation = judge(replace(trained, **played, num_envs=1, eval_episodes=args.eval_episodes, device="cpu"), path)
    different = {name: getattr(trained, name) for name in played if getattr(trained, name) != played[name]}
    return {name: evaluation[name] for name in ("mean_return", "standard_error")} | {"trained_with": different}


def search(args: SearchArgs) -> int | None:
    """Search for the workflow of the largest return: GP-UCB over all 120 orders, a policy trained for each order tried.

    Writes history.json, search.csv, search.png, training.log, and a run folder for each order and the shared policy. A
    search that was killed, be it in the middle of an order's training, goes on with --resume. Returns the signal that
    ended it early, if one did.
    """
    validate_search(args)
    base = search_base(args)
    validate_trainings(args, base)
    default = f"runs/search__{base.red_agent}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    logdir = Path(args.logdir or default)
    if args.resume:
        saved_search(logdir)  # before a folder is made for a search that does not exist
    try:
        logdir.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(logdir)
    except OSError as error:
        raise UsageError(f"The folder {logdir} cannot be written: {error.strerror}.") from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        known = known_so_far(args, logdir)
        if args.baseline is not None and known["baseline"] is None:
            known["baseline"] = judge_baseline(args, base)
        interrupt = Interrupt()
        stack.callback(interrupt.restore)
        return explore(args, base, logdir, known, interrupt)


def search_base(args: SearchArgs) -> Args:
    """What all trainings of a search have in common: the defaults, or the arguments of --shared's run."""
    if args.shared is None:
        return Args(red_agent=args.red_agent or "meander", version=args.version or "leaderboard", workflow="any")
    base = known_args(load_checkpoint(Path(args.shared))["args"])
    if base.workflow != "any":
        raise UsageError(f"--shared {args.shared} was not trained with --workflow any, but {base.workflow}.")
    return replace(base, device="cpu", track=False, init_from=None)


def known_so_far(args: SearchArgs, logdir: Path) -> dict[str, Any]:
    """What history.json is to hold: arguments, the hash of --shared, the baseline's evaluation if it has been made, and
    the history, empty for a new search. Raises UsageError if the folder holds another search, or none to --resume."""
    shared_hash = "" if args.shared is None else hashlib.sha256(Path(args.shared).read_bytes()).hexdigest()[:12]
    known: dict[str, Any] = {"args": asdict(args), "shared_hash": shared_hash, "baseline": None, "history": []}
    if not args.resume:
        if (logdir / "history.json").exists():
            raise UsageError(f"{logdir} already holds a search: continue it with --resume, or choose another --logdir.")
        return known
    saved = saved_search(logdir)
    for name in {*saved["args"]} - {"n_workflows", "logdir", "resume", "baseline", "shared"}:
        if getattr(args, name) != saved["args"][name]:
            values = f"from {saved['args'][name]} to {getattr(args, name)}"
            raise UsageError(f"search --resume cannot change {flag(name)} {values}.")
    if saved["shared_hash"] != shared_hash:
        raise UsageError(f"{args.shared} is no longer the policy that the search in {logdir} began with.")
    if args.baseline == saved["args"]["baseline"]:
        known["baseline"] = saved["baseline"]
    return known | {"history": saved["history"]}


def saved_search(logdir: Path) -> dict[str, Any]:
    """The arguments and the history of the search in a folder. Raises UsageError if there is none."""
    file = logdir / "history.json"
    if not file.is_file():
        raise UsageError(f"--resume needs --logdir, the folder of a search to continue; {file} does not exist.")
    try:
        saved = json.loads(file.read_text())
        known = {name: value for name, value in saved["args"].items() if name in SearchArgs.__dataclass_fields__}
        return {"args": known, "shared_hash": saved["shared_hash"], "baseline": saved["baseline"],
                "history": [*saved["history"]]}  # fmt: skip
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:  # no JSON, or not of this form
        raise UsageError(f"{file} is damaged ({error!r:.99}).") from None


def parse_search_args(argv: list[str]) -> SearchArgs:
    """Defaults, or the arguments of the search to --resume, then flags."""
    args = tyro.cli(SearchArgs, prog=f"{SCRIPT}.py search", args=argv, description=search.__doc__)
    if args.resume and args.logdir is not None:
        args = tyro.cli(SearchArgs, args=argv, default=SearchArgs(**saved_search(Path(args.logdir))["args"]))
    return args


def explore(args: SearchArgs, base: Args, logdir: Path, known: dict[str, Any], interrupt: Interrupt) -> int | None:
    """The loop of `search`: choose an order, train its policy, judge it, note it. What is `known` (see `known_so_far`)
    goes to history.json."""
    history, baseline = known["history"], known["baseline"]

    def save() -> None:
        temporary = logdir / "history.tmp"
        with open(temporary, "w") as file:
            file.write(json.dumps(known, indent=1))
            file.flush()
            os.fsync(file.fileno())  # after a power cut, the new name must not stand for an empty file
        os.replace(temporary, logdir / "history.json")

    save()
    shared = None if args.shared is None else Path(args.shared)
    if trains_shared_policy(args):
        shared = logdir / "shared" / "latest.pt"
        run = replace(shared_args(args, base), logdir=str(shared.parent), resume=shared.exists())
        train_and_keep(run, interrupt)
    while len(history) < args.n_workflows and interrupt.signum is None:
        order, start = next_order(args, history), shared
        if args.fresh_policy_per_order or (args.warm_start != "shared" and not history):
            start = None
        elif args.warm_start != "shared":
            distances = [DISCORDANT[order, parse_workflow(record["workflow"])] for record in history]
            record = history[int(np.argmin(distances)) if args.warm_start == "nearest" else -1]
            start = checkpoint_of(record, logdir)
        folder = logdir / f"{len(history) + 1:03d}_{'-'.join(ORDERS[order])}"
        tried = try_order(args, base, order, start, folder, interrupt)
        if tried is not None:
            history.append(tried)
            save()
            announce(f"{len(history):>3} {summary_of(tried)} after {tried['steps']:,} steps")
    if interrupt.signum:
        announce(f"The search has stopped; continue it with search --resume --logdir {logdir}")
        return interrupt.signum
    with outlive_disk_errors(logdir / "search.csv"), open(logdir / "search.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, history[-1], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(record | {"checkpoint": str(checkpoint_of(record, logdir))} for record in history)
    with outlive_disk_errors(logdir / "search.png"):
        plot_search(args, history, baseline, logdir / "search.png")
    if baseline is not None:
        different = ", ".join(f"{flag(name)} {value}" for name, value in baseline["trained_with"].items())
        announce(f"\nWithout a workflow: return {baseline['mean_return']:.2f} +- {baseline['standard_error']:.2f}"
              f"{f' (trained with {different})' if different else ''}")  # fmt: skip
    best = sorted(accepted(args, history), key=lambda record: -record["mean_return"])[:5]
    announce("\nThe five best" if best else "\nNo order tried was complied with: see --compliance-threshold")
    for record in best:
        announce(f"{summary_of(record)}, {checkpoint_of(record, logdir)}")
    return None


def accepted(args: SearchArgs, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The orders tried; with --gp-gate only those whose compliance was confirmed."""
    return [record for record in history if record["compliant"] or not args.gp_gate]


def checkpoint_of(record: dict[str, Any], logdir: Path) -> Path:
    """Where an order's policy is, in the folder of its search, which may have been moved since."""
    return logdir / Path(record["checkpoint"]).parent.name / "latest.pt"


def summary_of(record: dict[str, Any]) -> str:
    return (f"{record['workflow']}: return {record['mean_return']:.2f} +- {record['standard_error']:.2f}, compliance "
            f"{record['compliance']:.3f} ({'' if record['compliant'] else 'not '}confirmed), strict "
            f"{record['strict_compliance']:.3f}")  # fmt: skip


def plot_search(args: SearchArgs, history: list[dict[str, Any]], baseline: Any, path: Path) -> None:
    """Draw what the search believes of all orders, how it advanced, what was complied with, and which place suits
    which type."""
    mean, std = posterior_returns(args, history)
    tried = [parse_workflow(record["workflow"]) for record in history]
    returns = np.array([record["mean_return"] for record in history])
    kept = accepted(args, history)
    counted = [record["mean_return"] if record in kept else -np.inf for record in history]
    figure = matplotlib.figure.Figure(figsize=(13, 8), layout="constrained")
    belief, progress, compliance, places = figure.subplots(2, 2).flat

    by_mean = np.argsort(-mean)
    belief.errorbar(range(len(ORDERS)), mean[by_mean], std[by_mean], fmt=".", lw=0.7, label="posterior mean and std")
    belief.plot(np.argsort(by_mean)[tried], returns, "rx", label="evaluated")
    belief.set(title="what is believed of all orders", xlabel="order, by posterior mean", ylabel="return")
    belief.legend()

    number = np.arange(1, len(history) + 1)
    progress.step(number, np.maximum.accumulate(counted), where="post", label="best so far")
    progress.plot(number, returns, "rx", label="evaluated")
    if baseline is not None:
        progress.axhline(baseline["mean_return"], color="C2", label="a policy without a workflow")
    progress.set(title="progress", xlabel="orders tried", ylabel="return")
    progress.legend()

    labels = ["\u2009>\u2009".join(ORDERS[order]) for order in tried]
    compliance.barh(range(len(history)), [record["compliance"] for record in history], label="compliance")
    compliance.plot([record["strict_compliance"] for record in history], range(len(history)), "k|", label="strict")
    compliance.axvline(args.compliance_threshold, color="r", lw=1)
    compliance.set(title="compliance by order", yticks=range(len(history)), xlim=(0, 1))
    compliance.set_yticklabels(labels, fontsize=6)
    compliance.invert_yaxis()
    compliance.legend(loc="lower left")

    ranks = range(len(UNIT_TYPES))
    shown = places.imshow([[mean[RANKS[:, unit] == rank].mean() for rank in ranks] for unit in ranks])
    places.set(title="posterior mean return by place of a type", xlabel="place", xticks=ranks, yticks=ranks)
    places.set(xticklabels=[rank + 1 for rank in ranks], yticklabels=UNIT_TYPES)
    figure.colorbar(shown, ax=places)
    figure.savefig(path, dpi=100)


def validate_search(args: SearchArgs) -> None:
    """Raise UsageError for a search that cannot work."""
    require_one_process("search")
    if args.resume and args.logdir is None:
        raise UsageError("--resume needs --logdir, the folder of the search to continue.")
    if args.shared is not None and (args.red_agent or args.version):
        raise UsageError("--shared says who attacks and by which rules: leave --red-agent and --version out.")
    if args.fresh_policy_per_order and args.warm_start != "shared":
        raise UsageError(f"--fresh-policy-per-order and --warm-start {args.warm_start} exclude each other.")
    require(args, "at least 1", lambda x: x >= 1, "n_envs", "update_every_steps", "train_episodes_per_env", "n_start",
            "shared_timesteps")  # fmt: skip
    require(args, "at least 2, for a standard error", lambda x: x >= 2, "eval_episodes")
    require(args, f"in 1..{len(ORDERS)}", lambda x: 1 <= x <= len(ORDERS), "n_workflows")
    require(args, "positive and below 1e38", lambda x: 0 < x < 1e38, "learning_rate", "gp_scale")
    require(args, "at least 0 and below 1e38", lambda x: x == "srinivas" or 0 <= x < 1e38, "gp_beta", "min_episodes",
            "seed")  # fmt: skip
    require(args, "in [0, 1]", lambda x: 0 <= x <= 1, "compliance_threshold")
    if not trains_shared_policy(args) and args.shared_timesteps != SearchArgs.shared_timesteps:
        raise UsageError("--shared-timesteps is for the shared policy that this search would not train.")


def validate_trainings(args: SearchArgs, base: Args) -> None:
    """Raise UsageError for a search whose trainings could not work."""
    steps = args.train_episodes_per_env * base.max_steps
    if args.n_envs * args.update_every_steps < 2:
        raise UsageError(
            "--n-envs 1 and --update-every-steps 1 make batches of a single step, whose advantage has no std."
        )
    if args.update_every_steps > steps:
        raise UsageError(
            f"--update-every-steps {args.update_every_steps} is more than the steps of --train-episodes-per-env "
            f"{args.train_episodes_per_env}, {steps}."
        )
    if args.shared is None and args.shared_timesteps < base.batch_size:
        raise UsageError(f"--shared-timesteps {args.shared_timesteps} is less than one batch, {base.batch_size}.")
    validate(order_args(args, base, 0))


# ==========================================================================================================
# Playing
# ==========================================================================================================
@dataclass
class PlayArgs:
    logdir: str | None = None
    """run folder; may be left out if --checkpoint is a path"""
    checkpoint: str = "best"
    """best, latest, another file of the run folder, or a path"""
    episodes: int = 5
    """episodes to play against each red agent"""
    stochastic: bool = False
    """sample the actions instead of taking the policy's mode"""
    seed: int = 0
    """seed of the first episode; the next ones get seed + 1, seed + 2, ..."""
    red_agent: Literal["mixed", "b_line", "meander", "sleep"] | None = None
    """who attacks; mixed: all three in turn; default: as in training"""
    version: Literal["leaderboard", "head"] | None = None
    """rules; default: as in training"""
    workflow: str | None = None
    """the order to tell a policy that was trained with workflows, or any; default: as in training"""
    max_steps: int | None = None
    """steps of an episode; default: as in training"""
    backend: Literal["batch", "subproc", "cyborg"] = "batch"
    """batch, subproc: our simulator; cyborg: the real CybORG, if it is installed"""
    render: bool = False
    """print the game before each step as text"""
    save_gif: bool = False
    """write a GIF of each episode"""
    gif_fps: float = 4
    """frames per second of the GIFs, at most 50"""
    gif_dir: str | None = None
    """folder of the GIFs; default {logdir}/gifs"""
    save_heatmap: bool = False
    """draw which hosts Blue acted on when, {logdir}/actions.png"""


def find_checkpoint(logdir: str | None, name: str) -> Path:
    """The checkpoint that --checkpoint names: best, latest, another file of the run folder, or a path. Raises
    UsageError for best or latest without a run folder, and for best before the first evaluation."""
    if logdir is None and name in ("best", "latest"):
        raise UsageError("play needs --logdir, a run folder, or --checkpoint with the path of a file.")
    path = Path(logdir or "", f"{name}.pt" if name in ("best", "latest") else name)
    if not path.is_file() and name not in ("best", "latest"):
        path = Path(name)
    if not path.exists() and name == "best" and path.with_name("latest.pt").exists():
        raise UsageError(f"There is no {path} before the first evaluation; use --checkpoint latest.")
    return path


def play(play_args: PlayArgs) -> dict[str, Any]:
    """Play a checkpoint. Prints the returns (of the first 20 episodes against each red agent), what Blue and Red did
    and, as the last line, the summary as JSON that it returns."""
    require_one_process("play")
    require(play_args, "in [0, 2**32)", lambda x: 0 <= x < 2**32, "seed")
    require_flag(play_args, "save_gif", "gif_dir", "gif_fps")
    require(play_args, "at least 1", lambda x: x >= 1, "episodes")
    require(play_args, "in [1, 50]", lambda x: 1 <= x <= 50, "gif_fps")
    if play_args.render and play_args.save_gif:
        raise UsageError("--render prints the episodes and --save-gif draws them: choose one.")
    path = find_checkpoint(play_args.logdir, play_args.checkpoint)
    checkpoint, logdir = load_checkpoint(path), Path(play_args.logdir or path.parent)
    args = known_args(checkpoint["args"])
    if play_args.workflow is not None and args.workflow is None:
        raise UsageError(f"--workflow {play_args.workflow} means nothing to a policy trained without workflows.")
    torch.set_num_threads(args.torch_threads)
    chosen = {key: getattr(play_args, key) for key in ("red_agent", "version", "workflow", "max_steps")}
    args = replace(args, device="cpu", **{key: value for key, value in chosen.items() if value is not None})
    check_environment(args)
    reds = [red for red in RED_MIXTURE if args.red_agent in (red, "mixed")]
    at_once = play_args.episodes
    if play_args.render or play_args.save_gif:
        at_once = 1  # pictures show one game
    elif play_args.backend != "batch":
        at_once = min(os.cpu_count() or 1, at_once)  # a process for each: CybORG draws from the process's `random`
    render_mode = "ansi" if play_args.render else "rgb_array" if play_args.save_gif else None
    folder = Path(play_args.gif_dir or logdir / "gifs") / time.strftime("run_%Y%m%d-%H%M%S")
    if play_args.save_gif:
        folder.mkdir(parents=True, exist_ok=True)  # before a game is played for nothing
    agent: Agent | None = None
    rewards: dict[str, Any] = {}  # (num_steps, episodes) by red agent
    blue_actions = np.zeros((args.max_steps, len(ACTION_NAMES)))
    red_actions: Counter[str] = Counter()
    fixes: list[np.ndarray] = []
    for red in reds:
        settings = {"state_in_info": True, "render_mode": render_mode, "red_agent": red}
        vec_env = make_envs(replace(args, num_envs=at_once, num_workers=at_once), play_args.backend, **settings)
        if agent is None:
            agent = Agent(vec_env, args)
            load_weights(agent, checkpoint, path)
        rewards[red] = np.zeros((args.max_steps, 0))
        while (done := rewards[red].shape[1]) < play_args.episodes:
            record = play_episodes(agent, vec_env, not play_args.stochastic, play_args.seed + done)
            wanted = slice(0, play_args.episodes - done)
            rewards[red] = np.append(rewards[red], record["rewards"][:, wanted], axis=1)
            fixes += list(record["fixes"][wanted])
            for t, actions in enumerate(record["actions"][:, wanted]):
                np.add.at(blue_actions[t], actions, 1)
            if len(record["red_action"]):
                red_actions.update(f"{red}: {action}" for action in record["red_action"][:, wanted].flat)
            if play_args.render:
                announce("\n\n".join(record["frames"]))
            if play_args.save_gif:
                gif = folder / f"{red}_{done + 1:03d}_return_{record['rewards'].sum():.1f}.gif"
                save_gif(list(record["frames"]), gif, play_args.gif_fps)
                announce(gif)
        vec_env.close()
    summary = report(rewards, blue_actions, red_actions, fixes, prefix_returns(rewards, args.finite_horizon))
    if play_args.save_heatmap:
        plot_actions(blue_actions / len(summary["returns"]), logdir / "actions.png")
        announce(logdir / "actions.png")
    announce(json.dumps(summary))
    return summary


def report(
    rewards: dict[str, np.ndarray],
    blue_actions: np.ndarray,
    red_actions: Counter[str],
    fixes: list[np.ndarray],
    cells: dict[str, list[float]],
) -> dict[str, Any]:
    """Print what was played: returns, from the rewards (num_steps, episodes) by red agent, what Blue did (num_steps,
    145) and Red, and the cells. Returns the summary, with None for nan, which JSON does not have."""
    returns = {red: part.sum(0).round(1).tolist() for red, part in rewards.items()}
    everything = [value for values in returns.values() for value in values]
    for red, values in returns.items():
        for i, value in enumerate(values[:20]):
            announce(f"{red} episode {i + 1}: return {value:.1f}, {len(blue_actions)} steps")
    announce(f"\nBlue, actions per episode\n{action_table(blue_actions.sum(0) / len(everything))}")
    if red_actions:
        announce("\nRed, actions in all episodes (the 20 most frequent)")
        announce("\n".join(f"{count:>8} {action}" for action, count in red_actions.most_common(20)))
    announce("\n" + "\n".join(f"{name:<12} {mean:>8.2f} +- {error:.2f}" for name, (mean, error) in cells.items()))
    error = stratified_error(np.stack([part.sum(0) for part in rewards.values()]))
    verdicts = fix_metrics(np.array(fixes)) if fixes else {}
    return {"mean_return": float(np.mean(everything)), "standard_error": None if math.isnan(error) else error,
            "returns": everything, "score": sum(mean for mean, _ in cells.values()),
            "cells": {name: [None if math.isnan(x) else x for x in cell] for name, cell in cells.items()},
            **{name: None if math.isnan(x) else x for name, x in verdicts.items()}}  # fmt: skip


def action_table(counts: np.ndarray) -> str:
    """One line per host: how often, (145,), Blue took which action there."""
    lines = []
    for host, name in [*enumerate(HOSTS), (-1, "(none)")]:
        mine = [(counts[a], verb) for a, (verb, h) in enumerate(VERB_AND_HOST) if h == host]
        shown = [f"{verb} {count:.2f}" for count, verb in sorted(mine, reverse=True) if count > 0]
        if shown:
            lines.append(f"{name:<12} {', '.join(shown)}")
    return "\n".join(lines)


def plot_actions(frequencies: np.ndarray, path: Path) -> None:
    """Draw the mean number of actions (num_steps, 145) on each host at each step, for each kind of action."""
    kinds = {"Analyse": "Analyse", "Remove": "Remove", "Decoy": "any decoy", "Restore": "Restore"}
    figure = matplotlib.figure.Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axis, (kind, title) in zip(axes, kinds.items(), strict=True):
        image = np.zeros((len(HOSTS), len(frequencies)))
        for action, (verb, host) in enumerate(VERB_AND_HOST):
            if verb.startswith(kind):
                image[host] += frequencies[:, action]
        shown = axis.imshow(image, aspect="auto", vmin=0, vmax=1, cmap="magma_r", interpolation="nearest")
        axis.set(title=title, xlabel="step", yticks=range(len(HOSTS)), yticklabels=HOSTS)
    figure.colorbar(shown, ax=list(figure.axes), label="share of episodes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


@dataclass
class CurvesArgs:
    logdir: str
    """run folder"""


def curves(curves_args: CurvesArgs) -> None:
    """Draw curves.png of a run, finished or under way."""
    logdir = Path(curves_args.logdir)
    if not (logdir / "progress.csv").is_file() or not read_csv(logdir / "progress.csv"):
        raise UsageError(f"{logdir} has no progress.csv with an update in it.")
    plot_curves(logdir)
    announce(logdir / "curves.png")


# ==========================================================================================================
# Files
# ==========================================================================================================
def to_tensors(state: Any) -> Any:
    """Arrays in nested dicts and lists become tensors, which `torch.load` reads without running any code."""
    if isinstance(state, dict):
        return {key: to_tensors(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(to_tensors(value) for value in state)
    if isinstance(state, np.generic):
        return state.item()
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def to_arrays(state: Any) -> Any:
    """The inverse of `to_tensors`."""
    if isinstance(state, dict):
        return {key: to_arrays(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(to_arrays(value) for value in state)
    return state.cpu().numpy() if isinstance(state, torch.Tensor) else state


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all global random generators; of GPUs, only that of the run's own `device`."""
    cuda: Any = torch.cuda.get_rng_state(device) if device.type == "cuda" else []
    numpy_state = np.random.get_state(legacy=False)
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(to_arrays(states["numpy"]))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and len(states["cuda"]):  # a run that began on a CPU has none
        torch.cuda.set_rng_state(states["cuda"], device)


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> bool:
    """Write `state` so that `path` is a complete file at every moment; the previous one is kept as *.prev.pt.

    If the disk refuses, warn, leave the old file alone and return False: a run outlives a full disk.
    """
    path = Path(path)
    temporary, previous = path.with_suffix(".tmp"), path.with_suffix(".prev.pt")
    try:
        with open(temporary, "wb") as file:
            torch.save(to_tensors(state), file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            with contextlib.suppress(OSError):  # a file system without links: then there is no *.prev.pt
                previous.unlink(missing_ok=True)
                os.link(path, previous)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
        complain(f"warning: {path} was not written ({first_line(error)}); the run goes on.")
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    with contextlib.suppress(OSError):  # a file system that cannot: then a power cut may undo the new name
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # until the folder is on the disk, the new name is not
        finally:
            os.close(folder)
    return True


def announce(message: object, end: str = "\n") -> None:
    """Print to standard output at once, if anybody still listens there: a run outlives the terminal it began in."""
    try:
        print(message, end=end, flush=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # a closed pipe or terminal; what is still buffered must not fail at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: str) -> None:
    """Print to standard error; on a terminal, over the live line, which no newline has ended."""
    with contextlib.suppress(OSError):
        print(f"\r\033[K{message}" if sys.stderr.isatty() else message, file=sys.stderr)


@contextlib.contextmanager
def outlive_disk_errors(path: Path) -> Iterator[None]:
    """Turn the failure to write `path` into a warning: a picture is not worth a run."""
    try:
        yield
    except (OSError, json.JSONDecodeError) as error:  # the latter from a damaged index.json
        reason = getattr(error, "strerror", None) or error
        complain(f"warning: {path} was not written ({reason}); the run goes on.")


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint, its tensors to the CPU; nothing in the file is executed. Raises UsageError if it is missing,
    damaged, not a checkpoint, or of another script or format."""
    path = Path(path)
    if not path.is_file():
        raise DamagedError(f"There is no checkpoint {path}.")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged_part = archive.testzip()  # torch writes checksums but does not look at them
        if damaged_part is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged_part}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise UsageError(f"The checkpoint {path} may not be read by this user.") from None
    except Exception as error:  # a damaged file can fail in any layer of zip, pickle and torch
        raise DamagedError(f"{path} is damaged or not a checkpoint ({first_line(error)}).") from None
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise UsageError(f"{path} holds {found or 'something else'}; this script reads checkpoints of {FORMAT}.")
    return state


def load_weights(agent: Agent, checkpoint: dict[str, Any], path: Path) -> None:
    """Put the weights of the checkpoint at `path` into `agent`. Raises UsageError if they do not fit."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise UsageError(f"{path} holds a policy of other inputs, actions or layers ({reason}).") from None


def load_policy(agent: Agent, path: Path) -> None:
    """Put the weights of a checkpoint into `agent`. Raises UsageError if they do not fit."""
    load_weights(agent, load_checkpoint(path), path)


def load_latest(logdir: Path, repair: bool = False) -> dict[str, Any]:
    """The checkpoint to resume from: latest.pt or, if that is damaged, latest.prev.pt.

    With `repair`, for which one must hold the folder's lock, the good file is copied over the damaged one: the next
    save would otherwise keep the damaged one as latest.prev.pt and lose the good one.
    """
    try:
        return load_checkpoint(logdir / "latest.pt")
    except DamagedError as error:
        if not (logdir / "latest.prev.pt").is_file():
            raise
        checkpoint = load_checkpoint(logdir / "latest.prev.pt")
        if repair:
            complain(f"warning: {error} Falling back to latest.prev.pt.")
            shutil.copyfile(logdir / "latest.prev.pt", logdir / "latest.tmp")
            os.replace(logdir / "latest.tmp", logdir / "latest.pt")
        return checkpoint


def update_leaderboard(logdir: Path, args: Args, score: float | list[float], step: int, keep: int = 5) -> None:
    """Enter a run's best.pt among the `keep` best of all runs of the same problem and settings.

    They stand beside the run folder in best/{env_id}__{hash of the settings}/ with index.json: score at full
    precision, run, the step of best.pt, hash and file. A lock makes concurrent runs take turns; the index is replaced,
    never edited.
    """
    logdir = logdir.resolve()  # "." has no name
    # Longer runs compete with their like, and the best of many evaluations is not that of few.
    of_one_run = (RESUMABLE - {"total_timesteps", "eval_every"}) | {"seed"}
    settings = {name: value for name, value in asdict(args).items() if name not in of_one_run}
    config_hash = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    folder = logdir.parent / "best" / f"{args.env_id.replace('/', '_')}__{config_hash}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        index = folder / "index.json"
        entries = json.loads(index.read_text()) if index.exists() else []
        entry: dict[str, Any] = {"score": score, "run": logdir.name, "step": step, "config": config_hash,
                                 "file": f"{logdir.name}.pt"}  # fmt: skip
        others = [other for other in entries if other["run"] != entry["run"]]
        entries = sorted([*others, entry], key=lambda item: item["score"], reverse=True)
        if entry in entries[:keep]:
            shutil.copyfile(logdir / "best.pt", folder / "new.tmp")
            os.replace(folder / "new.tmp", folder / entry["file"])
        for dropped in entries[keep:]:
            (folder / dropped["file"]).unlink(missing_ok=True)
        (folder / "index.tmp").write_text(json.dumps(entries[:keep], indent=1))
        os.replace(folder / "index.tmp", index)


class Logger:
    """Scalars of a run to CSV files and TensorBoard, and a live line to the terminal.

    Resumed at `step`, it drops what was logged after the checkpoint: the files look as if nothing had happened. If the
    disk refuses a write, a few rows or TensorBoard's log are lost, with a warning; the run goes on. A silent logger
    writes nothing.
    """

    def __init__(self, logdir: Path, step: int = 0, silent: bool = False) -> None:
        self.logdir, self.silent = logdir, silent
        self.writer: SummaryWriter | None = None
        if silent:
            return
        for path in filter(Path.exists, (logdir / name for name in ("progress.csv", "timing.csv", "eval.csv"))):
            header, *rows = path.read_text().splitlines(keepends=True) or [""]
            steps = [row.partition(",")[0] if row.endswith("\n") else "" for row in rows]  # "": cut off by a kill
            kept = [row for row, at in zip(rows, steps, strict=True) if at.isdecimal() and int(at) <= step]
            path.with_suffix(".tmp").write_text("".join([header, *kept]) if kept else "")
            os.replace(path.with_suffix(".tmp"), path)  # a kill in between must not lose the rows
        self.writer = SummaryWriter(str(logdir), purge_step=step + 1)
        self.last_line = -math.inf

    def write(self, file: str, step: int, metrics: dict[str, float]) -> None:
        """Add a row to `file` and a TensorBoard point for each metric (not for nan: nothing was measured)."""
        if self.silent:
            return
        path = self.logdir / file
        size = path.stat().st_size if path.exists() else 0
        try:
            with open(path, "a+", newline="") as stream:
                stream.seek(0)  # a run begun by an older version of the script keeps its columns
                names = stream.readline().rstrip("\n").split(",")[1:]
                writer = csv.writer(stream, lineterminator="\n")
                if not names:
                    names = [*metrics]
                    writer.writerow(["global_step", *names])
                writer.writerow([step, *(metrics.get(name, math.nan) for name in names)])
        except OSError as error:
            complain(f"warning: {path} lacks step {step} ({error.strerror}); the run goes on.")
            with contextlib.suppress(OSError):
                os.truncate(path, size)  # half a row would spoil the next one
        try:
            for name, value in metrics.items():
                if self.writer is not None and not math.isnan(value):
                    self.writer.add_scalar(name, value, step)
        except OSError as error:
            complain(f"warning: TensorBoard is off from step {step} on ({error.strerror}).")
            self.writer = None  # its thread died of the error, and the next one would

    def close(self) -> None:
        if self.writer is not None:
            with outlive_disk_errors(self.logdir):  # of TensorBoard's thread, which writes late
                self.writer.close()

    def line(self, text: str, final: bool = False) -> None:
        """Redraw the live line on a terminal; elsewhere print one every ten seconds."""
        if self.silent:
            return
        if sys.stdout.isatty():
            shown = text if final else text[: shutil.get_terminal_size().columns - 1]  # one row can be redrawn
            announce(f"\r\033[K{shown}", end="\n" if final else "")
        elif final or time.monotonic() > self.last_line + 10:
            announce(text)
            self.last_line = time.monotonic()


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """The columns of a log by name; none if nothing has been logged yet."""
    if not path.exists():
        return {}
    with open(path) as file:
        rows = list(csv.DictReader(line for line in file if line.endswith("\n")))  # a power cut may leave half a row
    return {name: np.array([float(row[name]) for row in rows]) for name in (rows[0] if rows else [])}


def plot_curves(logdir: Path) -> None:
    """Draw curves.png: the returns, and what to look at when they do not rise."""
    panels = ["rollout/episodic_return", "train/explained_variance", "train/entropy",
              "train/approx_kl", "train/clip_fraction", "train/value_loss"]  # fmt: skip
    progress, evaluation = read_csv(logdir / "progress.csv"), read_csv(logdir / "eval.csv")
    if not progress:
        return
    figure = matplotlib.figure.Figure(figsize=(13, 6), layout="constrained")
    for axis, name in zip(figure.subplots(2, 3).flat, panels, strict=True):
        measured = ~np.isnan(progress[name])  # in many a rollout no episode ends
        axis.plot(progress["global_step"][measured], progress[name][measured], lw=1, label="training")
        if name == "rollout/episodic_return" and evaluation:
            mean, std = evaluation["eval/mean_return"], evaluation["eval/std_return"]
            axis.errorbar(evaluation["global_step"], mean, std, fmt="o-", ms=3, capsize=2, label="evaluation")
            axis.legend()
        axis.set(title=name, xlabel="environment steps")
        axis.grid(alpha=0.3)
    figure.savefig(logdir / "curves.png", dpi=100)


def save_gif(frames: list[np.ndarray], path: Path, fps: float) -> None:
    """Write rgb frames as an endless GIF. It counts time in 1/100 s, of which a frame takes at least two: 30 frames per
    second become 33, and more than 50 become 50."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *rest = [PIL.Image.fromarray(frame).quantize(128) for frame in frames]
    first.save(path, save_all=True, append_images=rest, duration=10 * max(2, round(100 / fps)), loop=0)


# ==========================================================================================================
# Behind the loop: signals, ranks, the run folder
# ==========================================================================================================
class Interrupt:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to stop after the update; Ctrl-C after it stops at once.

    A second SIGTERM or SIGHUP changes nothing: a closed terminal sends SIGHUP twice, and torchrun passes on the
    SIGTERM that a cluster sends to all.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            signals.append(signal.SIGHUP)
        self.previous = {}
        if threading.current_thread() is threading.main_thread():  # Python sets handlers nowhere else
            self.previous = {s: signal.signal(s, self) for s in signals}

    def __call__(self, signum: int, frame: Any) -> None:
        if self.signum is None:
            self.signum = signum
            if own_rank() == 0:  # not print: the signal may have come in the middle of one
                with contextlib.suppress(OSError):  # nobody may be listening any more
                    os.write(2, b"\nstopping after this update; Ctrl-C to stop at once\n")
        elif signum == signal.SIGINT:
            self.restore()
            raise KeyboardInterrupt

    def restore(self) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)


class Ranks:
    """The processes that torchrun started, each with its share of the environments; without it, this one alone.

    Environments, values, advantages and gradients are split over the ranks. The whole rollout is then gathered, and all
    shuffle it alike, with equal random numbers: n ranks learn what one with all environments would. Rank 0 alone
    evaluates, logs and saves. All must make the same calls.
    """

    def __init__(self, args: Args) -> None:
        self.rank, self.size = own_rank(), world_size()
        self.device = torch.device(args.device)
        if self.size > 1:
            # Others wait while rank 0 evaluates, and that may take longer than the 30 minutes of the default.
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=datetime.timedelta(days=1))
            if args.device == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))

    def share(self, args: Args) -> Args:
        """`args` with the number of environments and workers of this rank."""
        if self.size == 1:
            return args
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = args.num_workers or max(1, len(os.sched_getaffinity(0)) // local_ranks)
        return replace(args, num_envs=args.num_envs // self.size, num_workers=workers)

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The ranks' tensors, equal in shape, joined along `dim`, which counts environments."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    def gather_arrays(self, x: np.ndarray) -> list[np.ndarray]:
        """The array of each rank."""
        return list(self.gather(torch.from_numpy(x)[None], 0).numpy())

    def gather_objects(self, x: Any) -> list[Any]:
        """The object of each rank; from several ranks, tensors come as arrays."""
        if self.size == 1:
            return [x]
        objects = [None] * self.size
        dist.all_gather_object(objects, to_arrays(x))
        return objects

    def run_once(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` on rank 0 and return its result on every rank; its UsageError is raised on every rank. With
        several ranks, arrays arrive as tensors."""
        if self.size == 1:
            return function(*args)
        results = [None]
        if self.rank == 0:
            try:
                results = [to_arrays(function(*args))]
            except UsageError as error:
                results = [error]  # type: ignore[list-item]
        dist.broadcast_object_list(results, device=torch.device("cpu"))
        if isinstance(results[0], UsageError):
            raise results[0]
        return to_tensors(results[0])

    def average(self, tensors: list[torch.Tensor]) -> None:
        """Replace tensors by their means over the ranks, in one message."""
        if self.size > 1:
            flat = torch.cat([x.reshape(-1) for x in tensors])
            dist.all_reduce(flat)
            for x, mean in zip(tensors, (flat / self.size).split([x.numel() for x in tensors]), strict=True):
                x.copy_(mean.view_as(x))

    def close(self, error: type[BaseException] | None = None, *_: Any) -> None:
        """Leave the group; after an error simply end, since nccl would wait for the others, and they for this rank."""
        if self.size > 1 and error is None:
            dist.destroy_process_group()


def check_finite(postmortem: Path, first_env: int, actions: torch.Tensor, **rollout: torch.Tensor) -> None:
    """Raise FloatingPointError, naming environment, step and last action, if a number of the rollout's tensors,
    each (num_steps, num_envs, ...) from environment `first_env` on, is not finite; it goes to `postmortem`."""
    for name, tensor in rollout.items():
        bad = (~torch.isfinite(tensor)).flatten(2).any(-1) if tensor.ndim > 2 else ~torch.isfinite(tensor)
        if bad.any():
            t, n = bad.nonzero()[0].tolist()
            arrays: dict[str, Any] = {key: value.cpu() for key, value in rollout.items()}
            with outlive_disk_errors(postmortem):
                np.savez(postmortem, actions=actions.cpu(), **arrays)
            # The step whose action led to it; -1: it was in the last rollout.
            cause = t - 1 if name in ("obs", "values") else t
            after = f", after action {actions[cause, n].tolist()}" if cause >= 0 else ""
            raise FloatingPointError(
                f"{name} of environment {first_env + n}: a number is not finite at step {t} of the rollout{after}; the "
                f"weights were not touched, the rollout is in {postmortem}."
            )


def check_gradients(postmortem: Path, steps: list[torch.Tensor], minibatches: list[torch.Tensor]) -> None:
    """Raise FloatingPointError if the gradient's norm, the last of a step's metrics, is not finite; the step's
    minibatch, of those in tensors (n, ...), goes to `postmortem`."""
    bad = [i for i, norm in enumerate(torch.stack(steps)[:, -1].tolist() if steps else []) if not math.isfinite(norm)]
    if bad:
        names = ("obs", "actions", "old_log_probs", "old_values", "advantages", "returns")
        arrays: dict[str, Any] = {name: x[bad[0]].cpu() for name, x in zip(names, minibatches, strict=True)}
        with outlive_disk_errors(postmortem):
            np.savez(postmortem, **arrays)
        raise FloatingPointError(
            f"A gradient is not finite; it changed no weight, and its minibatch is in {postmortem}. Resumed, the run "
            "would fail again; a new one with a smaller --learning-rate may not."
        )


def hint(record: dict[str, float], progress: float, lowest_entropy: float) -> str | None:
    """What looks wrong in an update's metrics, in one sentence, or None; docs/metrics.md explains the bounds."""
    kl, clip_fraction = record["train/approx_kl"], record["train/clip_fraction"]
    entropy, explained = record["train/entropy"], record["train/explained_variance"]
    if record["rollout/resets"] == 0:
        return "no episode has ended yet: judge by the evaluations and rollout/mean_reward, or shorten the episodes."
    if record["train/advantage_std"] < 1e-4:
        return f"advantages differ by {record['train/advantage_std']:.0e} only: rewards are too rare or too small."
    if kl > 0.1 or clip_fraction > 0.5:
        return (
            f"the policy moves too far in an update (KL {kl:.2f}, {clip_fraction:.0%} clipped): lower --learning-rate "
            "or --update-epochs, or set --target-kl 0.03."
        )
    if entropy < lowest_entropy and progress < 0.5:
        return f"the entropy has fallen to {entropy:.2f} early in the run, so little is explored: raise --ent-coef."
    if explained < 0.05 and progress > 0.1:
        return f"the critic explains {max(explained, 0):.0%} of the returns: see docs/metrics.md, 'Symptoms'."
    return None


def describe(args: Args, logdir: Path, agent: nn.Module, rollout: list[Any]) -> str:
    """The sizes that follow from the arguments, to be read before the run."""
    return (
        f"{args.env_id}: {args.num_updates} updates of {args.batch_size} transitions ({args.num_envs} environments x "
        f"{args.num_steps} steps), {args.update_epochs} epochs x {args.num_minibatches} minibatches of "
        f"{args.minibatch_size}\n{sum(p.numel() for p in agent.parameters()):,} weights, rollout of "
        f"{sum(x.nbytes for x in rollout) / 2**20:.1f} MiB, device {args.device}, seed {args.seed}, folder {logdir}"
    )


def lock_folder(logdir: Path) -> int:
    """Keep other runs out of a folder until the descriptor that is returned is closed. Raises UsageError if another run
    is using it. The lock belongs to the process (lockf): kill -9 releases it, even if forked workers live on a while.
    """
    descriptor = os.open(logdir / "run.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise UsageError(f"{logdir} is in use by another process: wait for it, or choose another --logdir.") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def run_folder(args: Args) -> Path:
    """--logdir, or a new folder with the time in its name."""
    if args.logdir:
        Path(args.logdir).mkdir(parents=True, exist_ok=True)
        return Path(args.logdir)
    Path("runs").mkdir(exist_ok=True)  # not in the loop, where FileExistsError means that the name is taken
    while True:
        now = time.strftime("%Y%m%d-%H%M%S")
        logdir = Path(f"runs/{args.env_id.replace('/', '_')}__{SCRIPT}__{args.seed}__{now}")
        with contextlib.suppress(FileExistsError):  # another run has begun this second
            logdir.mkdir()
            return logdir
        time.sleep(0.1)


def open_run(args: Args) -> tuple[Path, dict[str, Any] | None, int]:
    """The run folder, with config.json written, the checkpoint to continue from, if --resume, and the folder's lock.
    Raises UsageError if the folder holds another run, or the arguments would make the resumed run another one."""
    if args.resume and not Path(args.logdir or "").is_dir():
        raise UsageError(f"There is no run folder {args.logdir} to continue.")
    with contextlib.ExitStack() as undo:
        try:
            logdir = run_folder(args)
            lock = lock_folder(logdir)
            undo.callback(os.close, lock)
            # Read only now: whoever else was in the folder may have written a newer one.
            checkpoint = load_latest(logdir, repair=True) if args.resume else None
            if checkpoint is not None:
                keep_best(logdir, checkpoint)
            check_continuation(args, logdir, checkpoint)
            write_config(args, logdir)
        except OSError as error:
            raise UsageError(f"The run folder {args.logdir or 'runs/'} cannot be written: {error.strerror}.") from None
        undo.pop_all()  # all went well: the lock stays
    return logdir, checkpoint, lock


def keep_best(logdir: Path, checkpoint: dict[str, Any]) -> None:
    """If best.pt is newer than the checkpoint to resume from, take over its score: a crash has lost the updates that
    led to it, but not its policy."""
    with contextlib.suppress(UsageError):  # there may be no best.pt yet
        counters = load_checkpoint(logdir / "best.pt")["counters"]
        if counters["best_step"] > checkpoint["counters"]["global_step"]:
            checkpoint["counters"] |= {name: counters[name] for name in BEST}


def check_continuation(args: Args, logdir: Path, checkpoint: dict[str, Any] | None) -> None:
    """Raise UsageError if the folder holds another run, or the arguments would make the resumed run another one."""
    if checkpoint is None and (logdir / "latest.pt").exists():
        raise UsageError(f"{logdir} already holds a run: continue it with --resume, or choose another --logdir.")
    for name, saved in (checkpoint or {"args": {}})["args"].items():
        if name in RESUMABLE:
            continue
        if name not in Args.__dataclass_fields__:
            raise UsageError(f"{logdir} has {flag(name)} {saved}, which this script lacks: resume it with its own.")
        if getattr(args, name) != saved:
            raise UsageError(f"--resume cannot change {flag(name)} from {saved} to {getattr(args, name)}.")
    if checkpoint is not None:
        done, ranks = checkpoint["counters"]["update"], len(checkpoint["ranks"])
        if ranks != world_size():
            raise UsageError(f"{logdir} is a run of {ranks} processes and cannot go on with {world_size()}.")
        if args.num_updates <= done and args.total_timesteps < checkpoint["args"]["total_timesteps"]:
            raise UsageError(
                f"--total-timesteps {args.total_timesteps}: {logdir} has done {done * args.batch_size} already; ask "
                "for more."
            )


def write_config(args: Args, logdir: Path) -> None:
    """Write config.json: arguments, versions, commit, command line. Each resume appends its own last three to
    "resumed"."""
    commit = ""
    if shutil.which("git"):
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {module.__name__: module.__version__ for module in (torch, np, gym)}
    now, file = {"versions": versions, "commit": commit, "command": sys.argv}, logdir / "config.json"
    config: dict[str, Any] = {"args": asdict(args), **now}
    if args.resume and file.exists():
        with contextlib.suppress(json.JSONDecodeError):  # cut off by a full disk
            first = json.loads(file.read_text())
            config = {**first, "args": asdict(args), "resumed": [*first.get("resumed", []), now]}
    file.write_text(json.dumps(config, indent=1))


# ==========================================================================================================
# Checks of the arguments
# ==========================================================================================================
class UsageError(ValueError):
    """A mistake in what was asked for; the message says, in one sentence, what to change."""


class DamagedError(UsageError):
    """A checkpoint that is missing or damaged, so that the one before it may serve."""


def known_args(values: dict[str, Any]) -> Args:
    """Args from saved values; those that this copy of the script no longer has are left out. A warning names those that
    it has gained since, and which have their defaults."""
    gained = [flag(name) for name in Args.__dataclass_fields__ if name not in values]
    if gained and own_rank() == 0:
        complain(f"warning: saved before {', '.join(gained)} existed: at the default, unless given now.")
    return Args(**{name: value for name, value in values.items() if name in Args.__dataclass_fields__})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def require(values: Any, condition: str, holds: Callable[[Any], bool], *names: str) -> None:
    """Raise UsageError for the first of the named values, None aside, for which `holds` is false."""
    for name in names:
        value = getattr(values, name)
        if value is not None and not holds(value):
            raise UsageError(f"{flag(name)} must be {condition}, not {value}.")


def require_flag(values: Any, needed: str, *names: str) -> None:
    """Raise UsageError if one of the named flags was set although `needed`, without which it does nothing, is off."""
    for name in names:
        if getattr(values, name) != getattr(type(values), name) and not getattr(values, needed):
            raise UsageError(f"{flag(name)} needs {flag(needed)}.")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened: that of some packages fills pages."""
    return str(error).partition("\n")[0][:150]


def world_size() -> int:
    """The number of processes of this run: torchrun sets the variable (docs/distributed.md)."""
    return int(os.environ.get("WORLD_SIZE", 1))


def own_rank() -> int:
    """The number of this process among those of the run, from 0 on."""
    return int(os.environ.get("RANK", 0)) if world_size() > 1 else 0


def require_one_process(what: str) -> None:
    """Raise UsageError if torchrun has started several processes, each of which would do the same."""
    if world_size() > 1:
        raise UsageError(f"{what} is for one process: leave torchrun out.")


def check_ranges(args: Args) -> None:
    """Raise UsageError for a value outside its range: what holds for every PPO script."""
    require(args, "at least 1", lambda x: x >= 1, "total_timesteps", "num_envs", "num_steps", "num_minibatches",
            "update_epochs", "eval_episodes", "torch_threads", "num_workers")  # fmt: skip
    require(args, "positive and below 1e38", lambda x: 0 < x < 1e38, "learning_rate", "clip_coef", "max_grad_norm",
            "target_kl")  # fmt: skip
    require(args, "at least 0 and below 1e38", lambda x: 0 <= x < 1e38, "eval_every", "save_every", "ent_coef",
            "vf_coef")  # fmt: skip
    require(args, "in [0, 2**32)", lambda x: 0 <= x < 2**32, "seed")
    require(args, "in [0, 1]", lambda x: 0 <= x <= 1, "gamma", "gae_lambda")
    batch = f"{args.batch_size} (num_envs {args.num_envs} x num_steps {args.num_steps})"
    if args.total_timesteps < args.batch_size:
        raise UsageError(f"--total-timesteps {args.total_timesteps} is less than one batch of {batch}.")
    if args.batch_size % args.num_minibatches:
        raise UsageError(f"--num-minibatches {args.num_minibatches} does not divide the batch of {batch}.")
    if args.norm_adv_scope != "minibatch" and not args.norm_adv:
        raise UsageError(f"--norm-adv-scope {args.norm_adv_scope} needs --norm-adv.")
    values = {"minibatch": args.minibatch_size, "batch": args.batch_size, "per_env": args.num_steps}
    if args.norm_adv and values[args.norm_adv_scope] < 2:
        raise UsageError(
            f"--norm-adv-scope {args.norm_adv_scope} would normalise single advantages: --num-steps {args.num_steps},"
            f" --num-minibatches {args.num_minibatches}. Add --no-norm-adv."
        )
    if args.track and importlib.util.find_spec("wandb") is None:
        raise UsageError("--track needs Weights & Biases: pip install wandb.")
    if args.resume and args.logdir is None:
        raise UsageError("--resume needs --logdir, the folder of the run to continue.")
    ranks = world_size()
    if args.num_envs % ranks or args.minibatch_size % ranks:
        raise UsageError(
            f"--num-envs {args.num_envs} and minibatches of {args.minibatch_size} cannot be split evenly over {ranks} "
            "processes."
        )
    if args.device != "cpu":
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        devices = ["cpu", *["cuda"] * bool(gpus), *gpus]
        if args.device not in devices:
            raise UsageError(f"--device {args.device} is not available here; use {' or '.join(devices)}.")
        own, local_ranks = len(gpus) if args.device == "cuda" else 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if local_ranks > own:
            raise UsageError(f"--device {args.device} has {own} GPU for {local_ranks} processes; each needs its own.")


def validate(args: Args) -> None:
    """Raise UsageError, one sentence with the numbers in it, for arguments that cannot work."""
    check_ranges(args)
    check_environment(args)
    if args.gamma == 1 and not args.finite_horizon:
        raise UsageError(
            "--gamma 1 makes the value of a game without an end infinite; add --finite-horizon, or lower it."
        )
    require(args, "positive and below 1e38", lambda x: 0 < x < 1e38, "reward_scale")
    require(
        args, "positive widths, one or more", lambda sizes: sizes and all(size > 0 for size in sizes), "hidden_sizes"
    )
    require(args, "at least 0 and below 1e38", lambda x: 0 <= x < 1e38, "alignment", "min_episodes")
    require(args, "in [0, 1]", lambda x: 0 <= x <= 1, "compliance_threshold")
    require_flag(args, "workflow", "compliance_threshold", "alignment", "min_episodes")
    if args.compliance_threshold is None:
        if args.min_episodes != Args.min_episodes:
            raise UsageError("--min-episodes needs --compliance-threshold.")
    elif (episodes := args.num_updates * args.num_steps // args.max_steps) < args.min_episodes:
        raise UsageError(
            f"--min-episodes {args.min_episodes} is more than the {episodes} episodes of each environment in "
            f"{args.num_updates} updates: no compliance would ever be confirmed."
        )
    if args.init_from is not None and not args.resume:
        vec_env = make_envs(replace(args, num_envs=1))
        load_policy(Agent(vec_env, args), Path(args.init_from))
        vec_env.close()


def check_environment(args: Args) -> None:
    """Raise UsageError if the environment cannot be made here, or is none for this script."""
    if args.env_id != "CAGE2-v0":
        raise UsageError(f"This script plays CAGE2-v0 alone, not {args.env_id!r}; leave --env-id out.")
    require(args, "in 1..100000", lambda x: 1 <= x <= 100_000, "max_steps")
    if args.workflow not in (None, "any"):
        try:
            parse_workflow(args.workflow)
        except ValueError as error:
            raise UsageError(f"--workflow: {error}") from None


# ==========================================================================================================
# The command line
# ==========================================================================================================
def explain(args: Args) -> dict[str, Any]:
    """Print the derived sizes, and the run's time as three updates in a scratch folder predict it; returns what `train`
    returned for these."""
    require_one_process("--explain")
    validate(args)
    with tempfile.TemporaryDirectory() as scratch:
        steps = 3 * args.batch_size
        probe = replace(args, total_timesteps=steps, logdir=f"{scratch}/run", resume=False, save_every=0,
                        eval_every=0, eval_episodes=1, track=False, capture_video=False,
                        compliance_threshold=None, min_episodes=Args.min_episodes)  # fmt: skip
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            result = train(probe)
        if result["signal"]:
            return result
        sps = read_csv(Path(scratch) / "run" / "timing.csv")["time/sps"][-1]
    announce(output.getvalue().partition(", folder")[0].replace(": 3 updates", f": {args.num_updates} updates"))
    for line in output.getvalue().splitlines():
        if line.startswith("warning: "):
            announce(line)
    minutes = args.num_updates * args.batch_size / sps / 60
    announce(f"{sps:,.0f} steps/s in a probe: about {minutes:.1f} minutes without the evaluations")
    return result


def parse_args(argv: list[str]) -> Args:
    """Defaults, then the presets named after --configs (or the arguments of the run to --resume), then flags."""
    values: dict[str, Any] = {}
    if "--config" in argv:  # as tyro, which knows nothing of --configs, would not say
        raise UsageError("There is no --config; did you mean --configs?")
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--configs=") else [word])]
    while "--configs" in argv:
        start = argv.index("--configs")
        stop = next((i for i in range(start + 1, len(argv)) if argv[i].startswith("-")), len(argv))
        if stop == start + 1:
            raise UsageError(f"--configs needs the name of a preset: {', '.join(PRESETS)}.")
        for name in argv[start + 1 : stop]:
            if name not in PRESETS:
                close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
                raise UsageError(f"There is no preset {name!r}; did you mean {close}? Presets: {', '.join(PRESETS)}.")
            values |= PRESETS[name]
        argv = argv[:start] + argv[stop:]
    description = f"{__doc__}\n--configs NAME ... takes presets, in layers: {', '.join(PRESETS)}. Flags win over them."
    args = tyro.cli(Args, args=argv, default=Args(**values), description=description)
    if args.resume and args.logdir is not None:
        saved = load_latest(Path(args.logdir))["args"]
        # Presets named once more must agree with the run. What a resumed run may change is set by flags alone.
        values = {name: value for name, value in values.items() if name not in RESUMABLE}
        args = tyro.cli(Args, args=argv, default=known_args(saved | values))
    return args


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code: 0, 1 after numbers that are not finite or a file that cannot be
    read or written, 2 for a wrong argument, 128 + n after signal n (130 after Ctrl-C at once)."""
    try:
        if argv[:1] == ["play"]:
            play(tyro.cli(PlayArgs, prog=f"{SCRIPT}.py play", args=argv[1:], description=play.__doc__))
            return 0
        if argv[:1] == ["curves"]:
            curves(tyro.cli(CurvesArgs, prog=f"{SCRIPT}.py curves", args=argv[1:], description=curves.__doc__))
            return 0
        if argv[:1] == ["search"]:
            signum = search(parse_search_args(argv[1:]))
            return 128 + signum if signum else 0
        args = parse_args(argv)
        result = explain(args) if args.explain else train(args)
        if not result["saved"]:
            return 1
        return 128 + result["signal"] if result["signal"] else 0
    except KeyboardInterrupt:
        return 130
    except (UsageError, FloatingPointError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno != errno.ENOSPC:
            raise  # not about a file
        if not isinstance(error, UsageError) or own_rank() == 0:
            complain(f"error: {error}")
        return 2 if isinstance(error, UsageError) else 1


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `--help | head` ends without a traceback
    sys.exit(report_errors(main)(sys.argv[1:]))
