"""PPO from pixels with discrete actions: Super Mario Bros on a real emulator, and Atari games.

    python ppo_atari_mario.py                                    # Mario learns to reach the flag of World 1-1
    python ppo_atari_mario.py --backend fceumm --env-id Mario-4-1  # another stage, on the fast emulator
    python ppo_atari_mario.py --configs atari --env-id ALE/Pong-v5  # an Atari game (make atari)
    python ppo_atari_mario.py play --logdir runs/... --save-gif  # watch the best checkpoint

A run writes to runs/{env_id}__{script}__{seed}__{time}/ (or --logdir): config.json, TensorBoard events,
progress.csv and timing.csv (one row per update), eval.csv, videos/, best.pt, latest.pt (the one before as *.prev.pt),
curves.png. The best five of all runs with the same settings stand beside it, in best/. Stop it at any time;
`--resume --logdir D` continues it, on a CPU bit for bit. Read the file from top to bottom: arguments, agent,
mathematics, environments, training, playing; behind them what every run needs and few experiments change:
files, signals, ranks, the run folder, checks, the command line.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import datetime
import difflib
import errno
import fcntl
import hashlib
import importlib.util
import io
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
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.distributed.elastic.multiprocessing.errors import record as report_errors
from torch.utils.tensorboard import SummaryWriter

from envs.atari import AtariError, AtariGame
from envs.mario import MarioBackendError, MarioEnv, available_backends
from envs.nes_core import INSTALL, resolve_backend
from envs.subproc_vec_env import SubprocVecEnv

SCRIPT = Path(__file__).stem
FORMAT = "ppo_atari_mario/2"  # what a checkpoint holds; a copy of the script keeps it
MAX_VIDEO_FRAMES = 600  # of an episode, 40 seconds of play: an Atari game may last half an hour


# ==========================================================================================================
# Arguments
# ==========================================================================================================
@dataclass
class Args:
    # --- the run
    env_id: str = "Mario-1-1"
    """Mario-1-1 to Mario-8-4; several stages as Mario-1-1,2-1; Mario-random (of all 32); Mario-full (the game);
    or an Atari game, as ALE/Breakout-v5"""
    seed: int = 1
    """seed of networks, sampling and environments (environment n gets seed + n)"""
    total_timesteps: int = 1_500_000
    """environment steps (decisions) of the whole run, summed over environments, rounded down to whole batches"""
    logdir: str | None = None
    """run folder; default runs/{env_id}__{script}__{seed}__{time}"""
    resume: bool = False
    """continue the run in --logdir from its latest.pt"""
    init_from: str | None = None
    """checkpoint whose policy and critic the run starts from"""
    device: str = "cpu"
    """torch device: cpu, cuda, cuda:1, ..."""
    torch_threads: int = 1
    """CPU threads of torch; more help the convolutions where that many cores are free, and slow them down elsewhere"""
    torch_deterministic: bool = True
    """ask torch for deterministic algorithms, so that equal seeds give equal runs"""
    compile: bool = False
    """torch.compile the gradient: no gain for convolutions on a CPU"""
    amp: bool = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    """compute the networks in bfloat16: training is 1.1 to 1.2 times as fast on a CPU that has it (avx512_bf16), the
    default there, and the networks are 2.3 times as slow on one that has not"""
    eval_every: int = 100_000
    """environment steps between evaluations; 0: only at the end"""
    eval_episodes: int = 10
    """episodes of an evaluation with deterministic actions, and as many with sampled ones, with fixed seeds"""
    save_every: int = 100_000
    """environment steps between writes of latest.pt; 0: only at the end"""
    keep_checkpoints: bool = False
    """keep each of them as step_{global_step}.pt too"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb)"""
    capture_video: bool = True
    """put evaluation episodes side by side, as a GIF, into TensorBoard's Images tab and videos/"""
    video_episodes: int = 3
    """how many of them; at least five after the last update"""
    video_fps: float = 16
    """frames per second of these GIFs; the game makes 60 / --skip decisions a second"""
    hints: bool = True
    """say at each evaluation what looks wrong, if anything does"""
    explain: bool = False
    """print the derived sizes and an estimate of the time, and stop"""

    # --- the environments
    num_envs: int = 32
    """parallel environments N"""
    num_workers: int | None = None
    """processes that step the environments; default: the CPU cores"""
    backend: Literal["auto", "nes_py", "fceumm"] = "auto"
    """emulator: nes_py, or fceumm, several times as fast; auto: nes_py. A policy does not transfer between them"""
    obs: Literal["gray64", "rgb64", "gray84"] = "gray64"
    """colour and side of the pictures"""
    frame_stack: int | None = None
    """pictures in an observation; default: 4, and 1 for rgb64"""
    action_set: Literal["right_only", "simple", "complex"] = "simple"
    """5, 7 or 12 combinations of buttons"""
    skip: int = 4
    """frames (1/60 s) for which an action is held"""
    max_pool: bool = False
    """take the brighter of each pixel of the last two frames, against flicker"""
    mask_score: bool = False
    """blank the rows that show score, coins and time"""
    show_buttons: bool = True
    """paint the buttons that are held into the picture: a jump button still held does not jump again"""
    reward: Literal["shaped", "document"] = "shaped"
    """weights of progress, time, flag and death: see envs/mario.py"""
    stuck_steps: int = 150
    """steps without new ground after which the episode ends like a death; 0: never"""
    max_episode_steps: int = 0
    """time limit of an episode in steps (a truncation); 0: the game's own clock alone, half an hour in Atari games"""
    noop_max: int = 30
    """an episode begins with 0 (Atari: 1) to this many frames of waiting, drawn at random, also in evaluation"""
    sticky_action_probability: float = 0.25
    """probability, in each frame, that the console misses a change of the buttons, in training and evaluation"""
    sign_reward: bool = True
    """Atari games: learn from the sign of each reward; what is reported are points"""
    episodic_life: bool = True
    """Atari games: the loss of a life ends the learner's episode, though the game goes on"""

    # --- PPO
    num_steps: int = 256
    """steps T per environment and rollout; a batch is N*T transitions"""
    learning_rate: float = 5e-4
    """Adam's step size at the start"""
    anneal_lr: bool = True
    """let the learning rate decay linearly to 0 over the run"""
    gamma: float = 0.95
    """discount per step"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation: 0 trusts the critic, 1 the sampled return"""
    num_minibatches: int = 32
    """minibatches of an epoch; must divide N*T"""
    minibatch_growth: int = 4
    """after a third of the run minibatches are this many times as large: small ones learn fast, large ones well"""
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
    ent_coef: float = 0.01
    """weight of the entropy bonus at the start"""
    anneal_ent: bool = True
    """let the entropy bonus decay linearly to 0 over the run"""
    vf_coef: float = 0.01
    """weight of the value loss, which is half the mean squared error"""
    max_grad_norm: float | None = 0.5
    """global l2 norm that gradients are clipped to; None: no clipping"""
    target_kl: float | None = None
    """end the update when a minibatch's approximate KL (k3) exceeds this; None: never"""
    feature_dim: int = 512
    """units of the layer behind the convolutions"""
    shared_cnn: bool = True
    """let actor and critic share the convolutions and that layer"""

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
    # the values of ylxfda/learn-RL-with-Mario, PPO/README.md at e143216; it asked for 8-12 hours of a GPU
    "document": {"seed": 0, "total_timesteps": 10_000_000, "obs": "rgb64", "max_pool": True, "show_buttons": False,
                 "reward": "document", "stuck_steps": 0, "num_steps": 128, "num_minibatches": 16,
                 "minibatch_growth": 1, "learning_rate": 2.5e-4, "anneal_lr": False, "gamma": 0.99, "ent_coef": 0.03,
                 "anneal_ent": False, "vf_coef": 0.5},
    # CleanRL's values, close to those of Schulman et al. 2017, table 5; evaluations are of whole games, and so are dear
    "atari": {"env_id": "ALE/Breakout-v5", "total_timesteps": 10_000_000, "num_envs": 8, "num_steps": 128,
              "num_minibatches": 4, "minibatch_growth": 1, "learning_rate": 2.5e-4, "gamma": 0.99, "clip_coef": 0.1,
              "clip_vloss": True, "anneal_ent": False, "vf_coef": 0.5, "eval_every": 1_000_000},
    "explore": {"ent_coef": 0.05, "learning_rate": 1e-4},
    "fast": {"total_timesteps": 2_000_000, "num_envs": 8, "num_minibatches": 8, "update_epochs": 3},
    "debug": {"total_timesteps": 100_000, "num_envs": 4, "num_steps": 64, "num_minibatches": 4, "minibatch_growth": 1,
              "update_epochs": 2, "eval_every": 10_000, "save_every": 10_000},
}  # fmt: skip

# What a resumed run may change; any other difference would make it another run.
RESUMABLE = {"total_timesteps", "logdir", "resume", "device", "torch_threads", "num_workers", "eval_every",
             "save_every", "keep_checkpoints", "track", "capture_video", "video_episodes", "video_fps", "hints",
             "explain"}  # fmt: skip

# What one kind of game alone knows: to set it for the other is a mistake.
MARIO_ONLY = ("backend", "obs", "action_set", "max_pool", "mask_score", "show_buttons", "reward", "stuck_steps")
ATARI_ONLY = ("sign_reward", "episodic_life")


# ==========================================================================================================
# Agent
# ==========================================================================================================
def layer_init(layer: Any, std: float = math.sqrt(2)) -> Any:
    """Orthogonal weights of gain `std`, zero biases (detail 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def cnn(input_shape: tuple[int, ...], feature_dim: int) -> nn.Sequential:
    """Mnih et al.'s network (2015) for pictures (channels, height, width); returns (batch, feature_dim)."""
    convolutions = nn.Sequential(
        layer_init(nn.Conv2d(input_shape[0], 32, kernel_size=8, stride=4)), nn.ReLU(),
        layer_init(nn.Conv2d(32, 64, kernel_size=4, stride=2)), nn.ReLU(),
        layer_init(nn.Conv2d(64, 64, kernel_size=3, stride=1)), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    with torch.no_grad():
        flat_size = convolutions(torch.zeros(1, *input_shape)).shape[1]  # 1024 for 64 x 64 pixels
    return convolutions.extend([layer_init(nn.Linear(flat_size, feature_dim)), nn.ReLU()])


class Agent(nn.Module):
    """A categorical policy and a critic, two linear heads on one convolutional network (detail 21)."""

    def __init__(self, envs: VectorEnv, args: Args) -> None:
        super().__init__()
        input_shape: Any = envs.single_observation_space.shape
        self.actor_cnn = cnn(input_shape, args.feature_dim)
        self.critic_cnn = self.actor_cnn if args.shared_cnn else cnn(input_shape, args.feature_dim)
        # A policy head of gain 0.01 starts with nearly equal probabilities for every observation.
        self.actor_logits = layer_init(nn.Linear(args.feature_dim, envs.single_action_space.n), 0.01)  # type: ignore
        self.critic_value = layer_init(nn.Linear(args.feature_dim, 1), 1.0)
        self.amp = args.amp

    def features(self, network: nn.Module, obs: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) uint8 -> (batch, feature_dim) float32.

        bfloat16 represents 0 to 255 exactly; the layout with the channels last is the one convolutions are fast in.
        """
        dtype = torch.bfloat16 if self.amp else torch.float32
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.amp):
            x = obs.to(dtype, memory_format=torch.channels_last) / 255  # detail 22
            return network(x).float()

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) -> V(s), (batch,)."""
        return self.critic_value(self.features(self.critic_cnn, obs)).squeeze(-1)

    def get_action(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """argmax(logits + noise), (batch,): a sample for standard Gumbel noise (batch, actions), the mode for zeros."""
        return (self.actor_logits(self.features(self.actor_cnn, obs)) + noise).argmax(-1)

    def get_action_and_value(
        self, obs: torch.Tensor, action: torch.Tensor | None = None, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(batch, channels, height, width) -> action, log pi(a|s), entropy, V(s), each (batch,). Without an action, one
        is sampled, from Gumbel `noise` (batch, actions) if given."""
        features = self.features(self.actor_cnn, obs)
        critic_features = features if self.critic_cnn is self.actor_cnn else self.features(self.critic_cnn, obs)
        log_probs = self.actor_logits(features).log_softmax(-1)
        if action is None:
            noise = gumbel_noise(log_probs.shape, log_probs.device) if noise is None else noise
            action = (log_probs + noise).argmax(-1)
        log_prob = log_probs.gather(-1, action[:, None]).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return action, log_prob, entropy, self.critic_value(critic_features).squeeze(-1)

    def parameter_groups(self, args: Args) -> list[list[nn.Parameter]]:
        """The parameters that share a gradient norm and a learning rate: all of them."""
        return [[*self.parameters()]]


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
EPISODE_METRICS = ("episodic_return", "episodic_length", "success_rate")


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
def is_atari(args: Args) -> bool:
    return args.env_id.startswith("ALE/")


def make_env(args: Args, render_mode: str | None = None) -> gym.Env:
    """One game; called in the worker process that plays it."""
    env = (make_atari if is_atari(args) else make_mario)(args, None if render_mode is None else "rgb_array")
    return gym.wrappers.HumanRendering(env) if render_mode == "human" else env


def make_atari(args: Args, render_mode: str | None) -> gym.Env:
    return AtariGame(
        args.env_id,
        frame_stack=4 if args.frame_stack is None else args.frame_stack,
        skip=args.skip,
        noop_max=args.noop_max,
        sticky_action_probability=args.sticky_action_probability,
        max_episode_steps=args.max_episode_steps,
        render_mode=render_mode,
    )


def make_mario(args: Args, render_mode: str | None) -> gym.Env:
    return MarioEnv(
        args.env_id.removeprefix("Mario-"),
        args.backend,
        action_set=args.action_set,
        obs=args.obs,
        frame_stack=args.frame_stack,
        skip=args.skip,
        max_pool=args.max_pool,
        mask_score=args.mask_score,
        show_buttons=args.show_buttons,
        reward=args.reward,
        stuck_steps=args.stuck_steps,
        max_episode_steps=args.max_episode_steps,
        noop_max=args.noop_max,
        sticky_action_probability=args.sticky_action_probability,
        render_mode=render_mode,
    )


def make_envs(args: Args, render_mode: str | None = None, num_rendered: int = 1) -> VectorEnv:
    """`args.num_envs` games that reset within the step that ends an episode (SAME_STEP); the first `num_rendered`
    have the render mode. Observations are uint8. Workers are forked, and so need not import torch again."""
    env_fns = [partial(make_env, args, render_mode if n < num_rendered else None) for n in range(args.num_envs)]
    return SubprocVecEnv(env_fns, num_workers=args.num_workers, context="fork", autoreset_mode=AutoresetMode.SAME_STEP)


@torch.no_grad()
def evaluate(
    agent: Agent,
    args: Args,
    deterministic: bool = True,
    seed: int = 10_000,
    render_mode: str | None = None,
    shrink: int = 1,
) -> dict[str, Any]:
    """Run `args.eval_episodes` episodes on separate environments.

    The emulator has no randomness of its own: what tells episodes apart is the waiting before their start and the
    sticky actions. Episode i draws both from seed + i, so that two evaluations differ by their policies alone.
    Returns success_rate (flag or axe reached; nan for Atari games, which have neither), mean_return, std_return,
    mean_length, the lists successes, returns and lengths, and, with render_mode "rgb_array", frames: the first
    `args.video_episodes` episodes side by side, every `shrink`-th pixel, (height, width, 3) uint8, at most
    MAX_VIDEO_FRAMES of them. An episode that has ended goes on showing what its last action was chosen by.
    """
    num_envs = args.eval_episodes
    num_rendered = min(num_envs, args.video_episodes)
    vec_env: Any = make_envs(replace(args, num_envs=num_envs), render_mode, num_rendered)
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    returns, lengths = np.zeros(num_envs), np.zeros(num_envs, dtype=int)
    successes = np.zeros(num_envs, dtype=bool)
    running = np.ones(num_envs, dtype=bool)  # only the first episode of each environment counts
    pictures: list[Any] = [None] * num_rendered
    frames: list[np.ndarray] = []
    obs, _ = vec_env.reset(seed=seed)
    while running.any():
        if render_mode == "rgb_array" and running[:num_rendered].any() and len(frames) < MAX_VIDEO_FRAMES:
            now = vec_env.render()
            pictures = [now[n][::shrink, ::shrink] if running[n] else pictures[n] for n in range(num_rendered)]
            frames.append(np.concatenate(pictures, axis=1))
        noise = torch.zeros((num_envs, int(vec_env.single_action_space.n)), device=device)
        if not deterministic:
            noise = gumbel_noise(noise.shape, device, generator)
        action = agent.get_action(torch.as_tensor(obs, device=device), noise)
        obs, rewards, terminated, truncated, infos = vec_env.step(action.cpu().numpy())
        returns += rewards * running
        lengths += running
        ended = (terminated | truncated) & running
        if ended.any() and not is_atari(args):
            successes |= terminated & ended & infos["final_info"]["flag_get"].astype(bool)
        running &= ~ended
    vec_env.close()
    success_rate = math.nan if is_atari(args) else float(successes.mean())
    return {"success_rate": success_rate, "mean_return": float(returns.mean()),
            "std_return": float(returns.std()), "mean_length": float(lengths.mean()), "frames": frames,
            "successes": successes.tolist(), "returns": returns.tolist(), "lengths": lengths.tolist()}  # fmt: skip


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
    best_success_rate: float = -math.inf  # of the best evaluation so far: that with the highest success rate
    best_return: float = -math.inf  # and, among those, with the highest mean return
    best_step: int = 0  # and when it was
    seconds: float = 0.0  # time spent collecting and learning


BEST = ("best_success_rate", "best_return", "best_step")  # what Counters know of best.pt


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


def train(args: Args) -> dict[str, Any]:
    """Train, evaluate and save as `args` say; returns the run folder and the last and best evaluation.

    Raises UsageError for arguments that cannot work, and FloatingPointError before numbers that are not finite
    reach the weights. A signal ends the run early and cleanly; the result then holds its number as "signal". Its
    "saved" is whether latest.pt holds the end of the run. Not for several threads: random generators are global.
    """
    validate(args)
    if not is_atari(args):
        backend: Any = resolve_backend(args.backend)
        args = replace(args, backend=backend)  # a policy belongs to the emulator that it was trained on
    ranks = Ranks(args)
    if ranks.rank == 0 and not (args.resume or is_atari(args)) and "fceumm" not in available_backends():
        announce(f"FCEUmm would emulate several times as fast: {INSTALL['fceumm']}; then add --backend fceumm.")
    logdir, checkpoint, lock = ranks.run_once(open_run, args)
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            stack.callback(os.close, lock)
        stack.push(ranks.close)
        vec_env: Any = stack.enter_context(contextlib.closing(make_envs(ranks.share(args))))
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
    keep_freed_memory()
    torch.use_deterministic_algorithms(args.torch_deterministic)
    device, num_steps, num_envs = ranks.device, args.num_steps, vec_env.num_envs
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or each rank would take memory of the first GPU, too
    first_env = ranks.rank * num_envs  # this rank steps environments first_env to first_env + num_envs - 1
    postmortem = logdir / (f"postmortem_{ranks.rank}.npz" if ranks.rank else "postmortem.npz")

    assert vec_env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP  # so that final_obs below exists
    num_actions = int(vec_env.single_action_space.n)
    sign_reward = is_atari(args) and args.sign_reward
    agent = Agent(vec_env, args).to(device)
    parameters = [flatten_parameters(group) for group in agent.parameter_groups(args)]
    moments = [(torch.zeros_like(x), torch.zeros_like(x), torch.zeros((), device=device)) for x in parameters]
    # Tensors, since they are annealed: torch.compile would compile anew for each new float.
    rates = [torch.tensor(args.learning_rate, device=device)]
    ent_coef: Any = torch.tensor(args.ent_coef, device=device)
    # With several ranks, a minibatch's advantages are normalised before each rank takes its part of it.
    normalize_here = ranks.size > 1 and args.norm_adv and args.norm_adv_scope == "minibatch"
    loss_args = replace(args, ent_coef=ent_coef, norm_adv=args.norm_adv and not normalize_here)

    late_num_minibatches = args.num_minibatches // args.minibatch_growth
    per_call = math.gcd(4, late_num_minibatches)  # a compiled call for every four steps saves a third of their time

    # The rollout, time-major: row t holds what happened at step t in each environment. Pictures stay bytes, with the
    # channels last in memory: convolutions want them so, and each epoch would have to turn them around.
    channels, height, width = vec_env.single_observation_space.shape
    obs = torch.zeros((num_steps, num_envs, height, width, channels), dtype=torch.uint8, device=device).movedim(-1, 2)
    actions = torch.zeros((num_steps, num_envs), dtype=torch.int64, device=device)
    log_probs = torch.zeros((num_steps, num_envs), device=device)
    values, rewards = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    terminations = torch.zeros((num_steps, num_envs), dtype=torch.bool, device=device)
    truncations = torch.zeros_like(terminations)
    rollout = [obs, actions, log_probs, values, rewards, terminations, truncations]
    announce(describe(args, logdir, agent, rollout))

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
    next_obs = torch.as_tensor(env_obs, device=device)
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

    frames: list[np.ndarray] = []  # of the last evaluation, on rank 0

    def evaluate_and_film(num_filmed: int) -> dict[str, Any]:
        """An evaluation without its frames, which are too much to send to every rank."""
        render_mode = "rgb_array" if args.capture_video else None
        # At half the size: at the full one, five long episodes would take four times the memory of the rollout.
        result = evaluate(agent, replace(args, video_episodes=num_filmed), render_mode=render_mode, shrink=2)
        frames[:] = result.pop("frames")
        return result

    evaluation: dict[str, Any] = {}
    latest_return, latest_rate = "?", "?"  # of the last rollout in which an episode ended
    signum = received_signal()
    while counters.update < args.num_updates and signum is None:
        started = time.perf_counter()
        counters.update += 1
        progress = (counters.update - 1) / args.num_updates
        num_minibatches = args.num_minibatches if progress < 1 / 3 else late_num_minibatches
        annealing = 1 - progress if args.anneal_lr else 1.0  # detail 4
        rates[0].fill_(args.learning_rate * annealing)
        if args.anneal_ent:
            ent_coef.fill_(args.ent_coef * (1 - progress))

        # --- collect ----------------------------------------------------------------------------------
        cuts: list[tuple[int, int, np.ndarray]] = []  # (t, n, final observation) where a time limit cut an episode
        ended: list[tuple[float, int, float]] = []  # (return, length, flag reached) of the episodes that ended
        env_time = raw_reward_sum = 0.0
        for t in range(num_steps):
            obs[t] = next_obs
            with torch.no_grad():
                noise = gumbel_noise((args.num_envs, num_actions), device)[first_env : first_env + num_envs]
                actions[t], log_probs[t], _, values[t] = agent.get_action_and_value(next_obs, noise=noise)
            env_actions = actions[t].cpu().numpy()
            before_step = time.perf_counter()
            env_obs, reward, terminated, truncated, infos = vec_env.step(env_actions)
            env_time += time.perf_counter() - before_step
            raw_reward_sum += float(reward.sum())
            episode_returns += reward
            episode_lengths += 1
            rewards[t] = torch.as_tensor(np.sign(reward) if sign_reward else reward)  # detail 19
            # In the step that ends an episode the info belongs to the next one, but for the final one in it.
            life_lost = infos.get("life_lost", False) | infos.get("final_info", {}).get("life_lost", False)
            terminations[t] = torch.as_tensor(terminated | (life_lost & args.episodic_life))  # detail 16
            truncations[t] = torch.as_tensor(truncated)
            next_obs = torch.as_tensor(env_obs, device=device)
            for n in np.flatnonzero(terminated | truncated):
                success = math.nan if is_atari(args) else float(terminated[n] and infos["final_info"]["flag_get"][n])
                ended.append((float(episode_returns[n]), int(episode_lengths[n]), success))
                episode_returns[n] = episode_lengths[n] = 0
                if not terminated[n]:
                    cuts.append((t, int(n), infos["final_obs"][n]))
        collected = time.perf_counter()

        # --- bootstrap --------------------------------------------------------------------------------
        with torch.no_grad():
            next_values = torch.cat([values[1:], agent.get_value(next_obs)[None]])
            if cuts:
                times, indices, final_obs = zip(*cuts, strict=True)
                final_values = agent.get_value(torch.as_tensor(np.stack(final_obs), device=device))
                next_values[list(times), list(indices)] = final_values
        check_finite(postmortem, first_env, actions, rewards=rewards, values=values, next_values=next_values)

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
            minibatches = [x[order].unflatten(0, (num_minibatches, -1)) for x in batch]
            if normalize_here:
                *others, mb_advantages, mb_returns = minibatches
                mb_advantages = normalize_advantages(mb_advantages.T, per_env=True).T  # one column per minibatch
                minibatches = [*others, mb_advantages, mb_returns]
            minibatches = [x[:, ranks.rank :: ranks.size] for x in minibatches]  # this rank's rows
            epoch: list[torch.Tensor] = []
            for i in range(0, num_minibatches, per_call):
                steps = take_steps([x[i : i + per_call] for x in minibatches])
                epoch += steps
                if len(steps) < per_call:  # --target-kl was exceeded
                    break
            check_gradients(postmortem, epoch, minibatches)
            step_metrics += epoch
            del minibatches  # frees the memory before the next epoch's are made
            if len(epoch) < num_minibatches:
                break
        counters.epochs += len(step_metrics) / num_minibatches
        counters.minibatch_updates += len(step_metrics)
        counters.global_step += args.batch_size
        shares = ranks.gather_objects((ended, raw_reward_sum))
        ended = [episode for episodes, _ in shares for episode in episodes]
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
            "train/update_epochs_done": len(step_metrics) / num_minibatches,
            **{f"rollout/{name}": value for name, value in episodic.items()},
            "rollout/mean_reward": sum(total for _, total in shares) / args.batch_size,
            "rollout/resets": counters.episodes,
            "counters/train_steps": counters.update * num_steps,
            "counters/rollouts": counters.update,
            "counters/epochs": counters.epochs,
            "counters/minibatch_updates": counters.minibatch_updates,
        }
        logger.write("progress.csv", counters.global_step, record)
        env_share, update_share = env_time / seconds, 1 - (collected - started) / seconds
        timing = {"sps": args.batch_size / seconds, "seconds": counters.seconds, "env_share": env_share,
                  "inference_share": 1 - env_share - update_share, "update_share": update_share}  # fmt: skip
        logger.write("timing.csv", counters.global_step, {f"time/{name}": value for name, value in timing.items()})
        eta = (args.num_updates - counters.update) * seconds
        best = f"{counters.best_success_rate:.0%}" if counters.best_success_rate >= 0 else "?"  # before an evaluation
        if ended:
            latest_return, latest_rate = f"{episodic['episodic_return']:.2f}", f"{episodic['success_rate']:.0%}"
        flags = "" if is_atari(args) else f"| flags {latest_rate:>4}, at best {best} "
        logger.line(f"step {counters.global_step:>10,} | {timing['sps']:>7,.0f} steps/s | return "
                    f"{latest_return:>8} {flags}| KL {record['train/approx_kl']:.4f} | "
                    f"{eta / 60:.1f} min left")  # fmt: skip

        # --- evaluate ---------------------------------------------------------------------------------
        last = counters.update == args.num_updates
        if last or crossed(counters.global_step, args.batch_size, args.eval_every):
            num_filmed = max(5, args.video_episodes) if last else args.video_episodes
            evaluation = ranks.run_once(evaluate_and_film, num_filmed)
            sampled = ranks.run_once(partial(evaluate, deterministic=False), agent, args)
            names = ("success_rate", "mean_return", "std_return", "mean_length")
            scores = {f"eval/{name}": evaluation[name] for name in names}
            scores |= {f"eval_sampled/{name}": sampled[name] for name in names}
            logger.write("eval.csv", counters.global_step, scores)
            if args.capture_video and ranks.rank == 0:
                log_video(logger, frames, args.video_fps, counters.global_step)
                frames.clear()  # they may be more than the rollout
            ranking = [np.nan_to_num(evaluation["success_rate"]).item(), evaluation["mean_return"]]
            if ranking > [counters.best_success_rate, counters.best_return]:
                previous = replace(counters)
                counters.best_success_rate, counters.best_return = ranking
                counters.best_step = counters.global_step
                if not save("best.pt"):  # the next good evaluation tries again
                    counters = previous
            advice = hint(record, progress, 0.05 * math.log(num_actions)) if args.hints else None
            if advice:
                logger.line(f"hint: {advice}", final=True)

        # --- save -------------------------------------------------------------------------------------
        signum = received_signal()
        if last or signum or crossed(counters.global_step, args.batch_size, args.save_every):
            saved = save("latest.pt")
            if saved and args.keep_checkpoints and ranks.rank == 0:
                kept = logdir / f"step_{counters.global_step}.pt"
                copy = kept.with_suffix(".tmp")
                with outlive_disk_errors(kept):
                    try:
                        shutil.copyfile(logdir / "latest.pt", copy)
                        os.replace(copy, kept)
                    finally:
                        copy.unlink(missing_ok=True)  # of a full disk, a piece of it

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
    if signum and counters.update < args.num_updates:
        outcome = "stopped; continue with --resume --logdir"
    else:
        with outlive_disk_errors(logdir.parent / "best"):
            ranking = [counters.best_success_rate, counters.best_return]  # in the order that best.pt is chosen by
            update_leaderboard(logdir, args, ranking, counters.best_step)
        logged = read_csv(logdir / "eval.csv")  # for a run that was resumed when it had finished
        evaluation = evaluation or {name.removeprefix("eval/"): column[-1] for name, column in logged.items()}
        score = f"mean return {evaluation.get('mean_return', math.nan):.1f}"
        if not is_atari(args):
            rate = evaluation.get("success_rate", math.nan)
            score = f"flag in {rate:.0%} (at best {counters.best_success_rate:.0%})"
        outcome = f"{score} of {args.eval_episodes} evaluation episodes; run folder"
    logger.line(f"{counters.global_step:,} steps in {counters.seconds:.0f} s, {outcome} {logdir}", final=True)
    if not saved:
        complain(f"error: latest.pt was not written: {logdir} has lost what came after the last checkpoint.")
    return result | {name: evaluation.get(name, math.nan) for name in ("success_rate", "mean_return")}


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
    """episodes to play"""
    stochastic: bool = False
    """sample the actions instead of taking the policy's mode"""
    seed: int = 0
    """seed of the first episode; the next ones get seed + 1, seed + 2, ..."""
    env_id: str | None = None
    """stage to play, as Mario-2-1; default: the run's own"""
    max_episode_steps: int | None = None
    """time limit of an episode in steps; default: the run's own"""
    quiet: bool = False
    """print nothing but the summary"""
    render: bool = False
    """show the episodes in a window, at the game's pace (pip install pygame)"""
    save_gif: bool = False
    """write a GIF of each episode, of its first 600 frames"""
    gif_fps: float = 15
    """frames per second of the GIFs, at most 50; 15 decisions a second are real time"""
    gif_dir: str | None = None
    """folder of the GIFs; default {logdir}/gifs"""


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
    """Play a checkpoint. Prints one line per episode and, as the last line, the summary as JSON that it returns."""
    require_one_process("play")
    require(play_args, "in [0, 2**32)", lambda x: 0 <= x < 2**32, "seed")
    require_flag(play_args, "save_gif", "gif_dir", "gif_fps")
    require(play_args, "at least 1", lambda x: x >= 1, "episodes")
    require(play_args, "in [1, 50]", lambda x: 1 <= x <= 50, "gif_fps")
    if play_args.render and play_args.save_gif:
        raise UsageError("--render shows the episodes and --save-gif writes them: choose one.")
    if play_args.render and not {"DISPLAY", "WAYLAND_DISPLAY"} & {*os.environ}:
        raise UsageError("--render needs a display, and there is none here; use --save-gif.")
    if play_args.render and importlib.util.find_spec("pygame") is None:
        raise UsageError("--render needs a window from pygame: pip install pygame, or use --save-gif.")
    path = find_checkpoint(play_args.logdir, play_args.checkpoint)
    checkpoint, logdir = load_checkpoint(path), Path(play_args.logdir or path.parent)
    args = replace(known_args(checkpoint["args"]), eval_episodes=1, num_envs=1, device="cpu")
    torch.set_num_threads(args.torch_threads)
    trained = args
    for name in ("env_id", "max_episode_steps"):
        if getattr(play_args, name) is not None:
            args = replace(args, **{name: getattr(play_args, name)})
    if is_atari(args) != is_atari(trained):
        raise UsageError(f"{path} has learnt {trained.env_id}; it cannot play {args.env_id}.")
    check_environment(args)
    vec_env = make_envs(args)
    agent = Agent(vec_env, args)
    vec_env.close()
    load_weights(agent, checkpoint, path)
    render_mode = "human" if play_args.render else "rgb_array" if play_args.save_gif else None
    say: Callable[[str], None] = announce if not play_args.quiet else lambda text: None
    folder = Path(play_args.gif_dir or logdir / "gifs") / time.strftime("run_%Y%m%d-%H%M%S")
    if play_args.save_gif:
        folder.mkdir(parents=True, exist_ok=True)  # before a game is played for nothing
    returns, successes = [], []
    for i in range(play_args.episodes):
        seed = play_args.seed + i
        episode = evaluate(agent, args, not play_args.stochastic, seed, render_mode)
        returns.append(episode["mean_return"])
        successes.append(episode["success_rate"])
        outcome = "" if is_atari(args) else ", flag" if successes[-1] else ", no flag"
        say(f"episode {i + 1}: return {returns[-1]:.2f}, {episode['lengths'][0]} steps{outcome}")
        if play_args.save_gif:
            gif = folder / f"episode_{i + 1:03d}_return_{returns[-1]:.0f}_steps_{episode['lengths'][0]}.gif"
            save_gif(episode["frames"], gif, play_args.gif_fps)
            say(f"  {gif}")
    error = float(np.std(returns, ddof=1) / math.sqrt(len(returns))) if len(returns) > 1 else None
    success_rate = None if is_atari(args) else float(np.mean(successes))
    summary = {"success_rate": success_rate, "mean_return": float(np.mean(returns)),
               "standard_error": error, "returns": returns}  # fmt: skip
    announce(json.dumps(summary))
    return summary


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
    """Draw curves.png: how often Mario reaches the flag, or how long an Atari game lasts, the return, and what to look
    at when these do not rise."""
    panels = ["rollout/success_rate", "rollout/episodic_return", "train/explained_variance",
              "train/entropy", "train/approx_kl", "train/clip_fraction"]  # fmt: skip
    progress, evaluation = read_csv(logdir / "progress.csv"), read_csv(logdir / "eval.csv")
    if not progress:
        return
    if np.isnan(progress["rollout/success_rate"]).all():
        panels[0] = "rollout/episodic_length"
    quantities = {"success_rate": "success_rate", "episodic_return": "mean_return", "episodic_length": "mean_length"}
    figure = matplotlib.figure.Figure(figsize=(13, 6), layout="constrained")
    for axis, name in zip(figure.subplots(2, 3).flat, panels, strict=True):
        measured = ~np.isnan(progress[name])  # in many a rollout no episode ends
        axis.plot(progress["global_step"][measured], progress[name][measured], lw=1, label="training")
        quantity = quantities.get(name.removeprefix("rollout/"))
        for mode in ("eval", "eval_sampled") if quantity and evaluation else ():
            label = "evaluation, " + ("deterministic" if mode == "eval" else "sampled")
            axis.plot(evaluation["global_step"], evaluation[f"{mode}/{quantity}"], "o-", ms=3, lw=1, label=label)
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


def log_video(logger: Logger, frames: list[np.ndarray], fps: float, step: int) -> None:
    """Write rgb frames as a GIF to videos/ and to TensorBoard's Images tab, which plays it."""
    path = logger.logdir / "videos" / f"step_{step}.gif"
    height, width, channels = frames[0].shape
    with outlive_disk_errors(path):
        save_gif(frames, path, fps)
        image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=path.read_bytes())
        summary = Summary(value=[Summary.Value(tag="eval/episodes", image=image)])
        if logger.writer is not None:
            logger.writer._get_file_writer().add_summary(summary, step)


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
    growth, late = args.minibatch_growth, ""
    if growth > 1:
        late = f", after a third of the run {args.num_minibatches // growth} of {args.minibatch_size * growth}"
    return (
        f"{args.env_id}: {args.num_updates} updates of {args.batch_size} transitions ({args.num_envs} environments x "
        f"{args.num_steps} steps), {args.update_epochs} epochs x {args.num_minibatches} minibatches of "
        f"{args.minibatch_size}{late}\n{sum(p.numel() for p in agent.parameters()):,} weights, rollout of "
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


def keep_freed_memory() -> None:
    """Ask the C library (glibc) to keep what is freed. By default it hands large blocks back to the kernel, which
    then clears every activation's memory anew: a fifth of the time of an update of this network."""
    m_trim_threshold, m_mmap_max = -1, -4
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(m_mmap_max, 0)
        ctypes.CDLL(None).mallopt(m_trim_threshold, 2**30)


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
    if args.gamma == 1 and (is_atari(args) or args.stuck_steps == 0):
        remedy = "--gamma below 1" if is_atari(args) else "--stuck-steps above 0 or --gamma below 1"
        raise UsageError(f"--gamma 1 needs episodes that end soon: set {remedy}.")
    require(args, "at least 1", lambda x: x >= 1, "feature_dim", "video_episodes", "video_fps", "minibatch_growth")
    if args.num_minibatches % args.minibatch_growth:
        raise UsageError(
            f"--minibatch-growth {args.minibatch_growth} must divide --num-minibatches {args.num_minibatches}; 1 does."
        )
    if args.init_from is not None and not args.resume:
        vec_env = make_envs(replace(args, num_envs=1))
        load_policy(Agent(vec_env, args), Path(args.init_from))
        vec_env.close()


def check_environment(args: Args) -> None:
    """Raise UsageError if the environment cannot be made here, or is none for this script."""
    if not args.env_id.startswith(("Mario-", "ALE/")):
        raise UsageError(f"There is no environment {args.env_id!r}; try Mario-1-1, Mario-random, ALE/Breakout-v5.")
    for name in MARIO_ONLY if is_atari(args) else ATARI_ONLY:
        if getattr(args, name) != getattr(Args, name):
            raise UsageError(f"{flag(name)} means nothing to {args.env_id}: leave it out.")
    try:
        make_env(args).close()
    except (ValueError, MarioBackendError, AtariError) as error:  # an option out of its range, or no emulator
        raise UsageError(str(error)) from None


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
        limit = min(args.max_episode_steps or steps, steps)  # of the final evaluation's episode
        probe = replace(args, total_timesteps=steps, max_episode_steps=limit, logdir=f"{scratch}/run", resume=False,
                        save_every=0, eval_every=0, eval_episodes=1, track=False, capture_video=False)  # fmt: skip
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
