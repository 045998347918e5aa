"""PPO from pixels with discrete actions: Super Mario Bros on a real emulator, and Atari games.

    python ppo_atari_mario.py --backend fceumm                       # Mario learns to reach the flag of World 1-1
    python ppo_atari_mario.py --env-id Mario-1-3 --reward landed     # another stage, one that needs another reward
    python ppo_atari_mario.py --configs atari --env-id ALE/Pong-v5   # an Atari game (make atari)
    python ppo_atari_mario.py --resume --logdir runs/...             # continue a run, on a CPU bit for bit
    python ppo_atari_mario.py play --logdir runs/... --save-gif      # film the best policy of a run

A run writes to runs/{env_id}__{script}__{seed}__{time}/ (or --logdir): config.json, TensorBoard events, progress.csv,
best.pt, best.json and, for --resume, latest.pt. New to PPO? Begin with docs/ppo.md; "detail n" is in docs/details.md.
"""

import contextlib
import ctypes
import fcntl
import json
import math
import os
import signal
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils._pytree import tree_map
from torch.utils.tensorboard import SummaryWriter

from envs import RecordGif, WorkerError, vectorize
from envs.atari import AtariGame
from envs.mario import MarioEnv
from envs.nes_core import resolve_backend

SCRIPT, FORMAT = Path(__file__).stem, "ppo_atari_mario/3"  # what a checkpoint holds; /4 if a copy changes that
HERE: dict[str, Any] = {"device": "cpu", "torch_threads": 1}  # in place of a file's values, to open it anywhere


class UsageError(ValueError):
    """A mistake in what was asked for; the message says, in one sentence, what to change."""


def require(condition: Any, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


# ---- Arguments: --help shows the comments ----------------------------------------------------------------------------
@dataclass
class RunArgs:
    configs: tuple[str, ...] = ()  # presets, layered from left to right; flags win over them
    env_id: str = "Mario-1-1"  # Mario-1-1 to 8-4, several: Mario-1-1,2-1, Mario-random, Mario-full, ALE/Breakout-v5
    seed: int = 1  # seed of networks, sampling and environments (environment n gets seed + n)
    total_timesteps: int = 1_000_000  # environment steps of the whole run, rounded down to whole batches
    logdir: str | None = None  # run folder; default runs/{env_id}__{script}__{seed}__{time}
    resume: bool = False  # continue the run in --logdir, with its arguments; flags given now win (seed and task stay)
    init_from: str | None = None  # checkpoint whose networks the run starts from
    device: str = "cpu"  # torch device: cpu, cuda, cuda:1 (with --compile an H100 is 2.8 times one CPU thread)
    torch_threads: int = 1  # CPU threads of torch in the update: 2 help on an idle machine and hurt on a busy one
    compile: bool = False  # torch.compile the gradient steps: for a GPU; no gain for convolutions on a CPU
    amp: bool = bool(torch.cpu.get_capabilities().get("avx512_bf16"))  # bfloat16 convolutions; default: if the CPU can
    eval_every: int = 100_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: int = 10  # episodes of an evaluation with deterministic actions, and as many with sampled ones
    save_every: int = 100_000  # environment steps between writes of latest.pt; evaluations and the end write it too
    track: str | None = None  # Weights & Biases project to log to as well (pip install wandb; WANDB_ENTITY works too)


@dataclass
class EnvironmentArgs:
    num_envs: int = 32  # parallel environments N
    num_workers: int | None = None  # processes that step them; default: the CPU cores
    step_timeout: float = 300.0  # seconds after which a worker process that has not finished its step counts as hung
    on_worker_failure: Literal["raise", "restart"] = "raise"  # a lost worker process ends the run, or is replaced
    reset_steps: int | None = None  # time limit in steps (a truncation); default: none on Mario, half an hour on Atari
    backend: Literal["auto", "nes_py", "fceumm"] = "auto"  # auto: nes_py if installed; fceumm is 3 to 6 times as fast
    obs: Literal["gray64", "rgb64", "gray84"] = "gray64"  # Mario's pictures: colour and side
    frame_stack: int | None = None  # pictures in an observation; default: 4, and 1 for rgb64
    action_set: Literal["right_only", "simple", "complex"] = "simple"  # Mario's 5, 7 or 12 combinations of buttons
    skip: int = 4  # frames (1/60 s) for which an action is held
    max_pool: bool = False  # Mario: take the brighter of each pixel of the last two frames, against flicker
    mask_score: bool = False  # Mario: blank the rows that show score, coins and time
    show_buttons: bool = True  # Mario: paint the held buttons into the picture, since a held jump does not jump again
    reward: Literal["shaped", "landed", "flag1000"] = "shaped"  # Mario's: ground, less time and death (envs/mario.py)
    stuck_steps: int = 150  # Mario: steps without new ground after which the episode ends like a death; 0: never
    noop_max: int = 30  # a random number of no-op frames after a reset, up to this (Mnih et al. 2015)
    sticky_action_probability: float = 0.25  # that a frame keeps the last one's buttons (Machado et al. 2018)
    sign_reward: bool = False  # reward clipping: learn from the sign of each reward; what is reported are points
    episodic_life: bool = False  # Atari: the loss of a life ends the learner's episode, though the game goes on


@dataclass
class PPOArgs:
    num_steps: int = 256  # steps T per environment and rollout; a batch is N*T transitions
    learning_rate: float = 5e-4  # Adam's step size at the start
    lr_decay: Literal["linear", "exponential", "none"] = "linear"  # to 0, to a hundredth, or constant
    gamma: float = 0.95  # discount per step: looks 20 steps ahead, 1.3 s, about what a jump takes
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation: 0 trusts the critic, 1 the sampled return
    num_minibatches: int = 32  # minibatches of an epoch; must divide N*T and be a multiple of --minibatch-growth
    minibatch_growth: int = 4  # factor on the size of minibatches while over 80 % of training episodes reach the flag
    update_epochs: int = 4  # passes over each batch
    norm_adv: Literal["minibatch", "batch", "per_env", "none"] = "minibatch"  # what advantages are normalised over
    clip_coef: float = 0.2  # epsilon: a probability ratio earns nothing beyond 1 +- epsilon
    clip_vloss: bool = False  # clip the critic's change too (OpenAI Baselines; later studies found no gain)
    ent_coef: float = 0.01  # weight of the entropy bonus at the start
    ent_decay: Literal["linear", "exponential", "none"] = "linear"  # of that weight: to 0, to a hundredth, or constant
    vf_coef: float = 0.01  # weight of half the mean squared error; at 0.5 it outweighs the actor in shared layers
    max_grad_norm: float | None = 0.5  # global l2 norm that gradients are clipped to; None: no clipping
    target_kl: float | None = None  # end an update after an epoch whose mean KL (k3) exceeds this; None: never
    feature_dim: int = 512  # units of the layer behind the convolutions
    shared_cnn: bool = True  # actor and critic share the convolutions and that layer


# What decides what a score means: only runs that have all of these in common can be compared.
GAME = ("env_id", "reward", "reset_steps", "skip", "stuck_steps", "noop_max", "sticky_action_probability")
EVALUATION = ("mean_return", "std_return", "mean_length", "success_rate")  # what is logged of one
RANGES = {  # lowest and highest values; None passes
    "num_envs num_workers reset_steps eval_episodes num_steps num_minibatches update_epochs feature_dim": (1, 1e6),
    "seed total_timesteps eval_every save_every ent_coef vf_coef stuck_steps": (0, 2**32 - 1),
    "learning_rate clip_coef max_grad_norm target_kl step_timeout": (1e-9, 1e9),
    "gamma gae_lambda": (0, 1),
    "torch_threads": (1, os.cpu_count()),
    "frame_stack skip minibatch_growth gif_fps": (1, 50),
    "noop_max": (0, 300),
    "sticky_action_probability": (0, 0.99),
    "episodes gif_frames": (1, 1e6),
}


def check_ranges(args: Any) -> None:
    for names, (low, high) in RANGES.items():
        for name in names.split():
            values: Any = getattr(args, name, None)
            within = all(x is None or low <= x <= high for x in (values if np.iterable(values) else [values]))
            require(within, f"--{name.replace('_', '-')} must be from {low:.10g} to {high:.10g}, not {values}.")


@dataclass
class Args(PPOArgs, EnvironmentArgs, RunArgs):
    def __post_init__(self) -> None:
        check_ranges(self)
        self.init_from = None if self.init_from is None else str(self.init_from)  # a Path cannot be loaded
        self.batch_size, minibatches = self.num_envs * self.num_steps, self.num_minibatches
        self.num_updates = int(self.total_timesteps // self.batch_size)
        batch = f"the batch of {self.batch_size} (--num-envs {self.num_envs} x --num-steps {self.num_steps})"
        require(self.num_updates > 0, f"--total-timesteps {self.total_timesteps} is less than {batch}.")
        require(self.batch_size % minibatches == 0, f"--num-minibatches {minibatches} does not divide {batch}.")
        require(self.batch_size > minibatches, f"--num-minibatches {minibatches} leaves one transition in each.")
        require(self.logdir or not self.resume, "--resume needs --logdir, the folder of the run to continue.")
        devices = ["cpu", *(name for n in range(torch.cuda.device_count()) for name in ("cuda", f"cuda:{n}"))]
        require(self.device in devices, f"--device {self.device} is not available here, only {', '.join(devices)}.")
        growth = f"--minibatch-growth {self.minibatch_growth}"
        require(minibatches % self.minibatch_growth == 0, f"{growth} does not divide --num-minibatches {minibatches}.")
        is_game = self.env_id.startswith(("Mario-", "ALE/")) and ":" not in self.env_id
        require(is_game, f"There is no {self.env_id}: try Mario-1-1, Mario-1-1,2-1, Mario-random or ALE/Breakout-v5.")
        self.game = " ".join(str(getattr(self, name)) for name in GAME)


PRESETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "explore": {"ent_coef": 0.05, "learning_rate": 1e-4},
    "fast": {"total_timesteps": 2_000_000, "num_envs": 8, "num_minibatches": 8, "update_epochs": 3},  # for rgb64
    "debug": {"total_timesteps": 2_048, "num_envs": 4, "num_steps": 64, "num_minibatches": 4, "minibatch_growth": 1,
              "update_epochs": 2, "reset_steps": 200, "eval_every": 1_024, "eval_episodes": 2, "save_every": 512},
    # rgb64, explore, fast: ylxfda/learn-RL-with-Mario, PPO/README.md at e143216; rgb64 takes it 8 to 12 GPU hours
    "rgb64": {"seed": 0, "total_timesteps": 10_000_000, "obs": "rgb64", "max_pool": True, "show_buttons": False,
              "reward": "flag1000", "stuck_steps": 0, "num_steps": 128, "num_minibatches": 16, "minibatch_growth": 1,
              "learning_rate": 2.5e-4, "lr_decay": "none", "gamma": 0.99, "ent_coef": 0.03, "ent_decay": "none",
              "vf_coef": 0.5},
    # CleanRL's values, close to those of Schulman et al. 2017, table 5; evaluations are of whole games, and so are dear
    "atari": {"env_id": "ALE/Breakout-v5", "total_timesteps": 10_000_000, "num_envs": 8, "num_steps": 128,
              "num_minibatches": 4, "minibatch_growth": 1, "learning_rate": 2.5e-4, "gamma": 0.99, "clip_coef": 0.1,
              "clip_vloss": True, "ent_decay": "none", "vf_coef": 0.5, "sign_reward": True, "episodic_life": True,
              "eval_every": 1_000_000},
}  # fmt: skip


# ---- Agent -----------------------------------------------------------------------------------------------------------
def init(layer: Any, gain: float = math.sqrt(2)) -> Any:
    """Orthogonal weights, biases 0 (detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def cnn(channels: int, side: int, feature_dim: int) -> nn.Sequential:
    """The network of Mnih et al. (2015): (batch, channels, side, side) -> (batch, feature_dim)."""
    convolutions = nn.Sequential(
        init(nn.Conv2d(channels, 32, kernel_size=8, stride=4)), nn.ReLU(),
        init(nn.Conv2d(32, 64, kernel_size=4, stride=2)), nn.ReLU(),
        init(nn.Conv2d(64, 64, kernel_size=3, stride=1)), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    flat_size = convolutions(torch.zeros(1, channels, side, side)).shape[1]  # 1024 for 64 x 64 pixels
    return convolutions.extend([init(nn.Linear(flat_size, feature_dim)), nn.ReLU()])


class Agent(nn.Module):
    """A categorical policy and a critic, two linear heads on one convolutional network (detail 21), or on one each."""

    def __init__(self, envs: Any, args: Args) -> None:
        super().__init__()
        channels, side, _ = envs.single_observation_space.shape  # channels: frames x colours
        self.actor_cnn = cnn(channels, side, args.feature_dim)
        self.critic_cnn = self.actor_cnn if args.shared_cnn else cnn(channels, side, args.feature_dim)
        # A policy head of gain 0.01 starts with nearly equal probabilities for every observation.
        self.actor_logits = init(nn.Linear(args.feature_dim, envs.single_action_space.n), 0.01)
        self.critic_value = init(nn.Linear(args.feature_dim, 1), 1.0)
        self.amp = args.amp

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """(batch, channels, side, side) uint8 -> a distribution of actions (batch,), and V(s), (batch,)."""
        # In bfloat16 the 256 shades stay distinct, even divided; channels last in memory make convolutions fast.
        x = obs.to(torch.bfloat16 if self.amp else torch.float32, memory_format=torch.channels_last) / 255  # detail 22
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.amp):
            features = self.actor_cnn(x)
            critic_features = features if self.critic_cnn is self.actor_cnn else self.critic_cnn(x)
        policy = Categorical(logits=self.actor_logits(features.float()), validate_args=False)  # heads in float32
        return policy, self.critic_value(critic_features.float()).squeeze(-1)

    def policy(self, obs: Tensor) -> Categorical:
        return self(obs)[0]

    def get_value(self, obs: Tensor) -> Tensor:
        return self(obs)[1]


# ---- The mathematics -------------------------------------------------------------------------------------------------
def compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), for each environment on its own.

    All tensors are (num_steps, num_envs). Step t of environment n led, with reward `rewards[t, n]`, from a state of
    value `values[t, n]` to one of value `next_values[t, n]`: at a time limit that of the final observation, not of the
    one after the reset; where it terminated, any number will do. Returns (advantages, returns: the critic's targets).

        delta_t = r_t + gamma V(s_{t+1}) (1 - terminated_t) - V(s_t)
        A_t     = delta_t + gamma lambda (1 - ended_t) A_{t+1},     R_t = A_t + V(s_t)

    A terminated episode has no future: V(s_{t+1}) is dropped. A time limit or the rollout's end only interrupts one:
    V(s_{t+1}) counts (Pardo et al. 2018). Termination and time limit stop the recursion: the next row is a new episode.
    """
    deltas = rewards + gamma * next_values * terminations.logical_not() - values
    decay = gamma * gae_lambda * terminations.logical_or(truncations).logical_not().to(deltas.dtype)
    advantages = deltas.clone()  # the last row's are complete: no row follows
    for t in reversed(range(len(rewards) - 1)):  # detail 5
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages, advantages + values


def normalize_advantages(advantages: Tensor, dim: int | None = None) -> Tensor:
    """(A - mean) / (std + 1e-8), over all entries or along `dim`."""
    return (advantages - advantages.mean(dim, keepdim=True)) / (advantages.std(dim, keepdim=True) + 1e-8)


class Batch(NamedTuple):  # transitions to learn from; the first dimension of each tensor counts them
    obs: Tensor
    actions: Tensor
    log_probs: Tensor  # log pi_old(a|s)
    values: Tensor  # V_old(s)
    advantages: Tensor
    returns: Tensor


def ppo_loss(agent: Agent, args: Args, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss on a minibatch (Schulman et al. 2017, eq. 9 with the sign turned) and its metrics, all scalars.

    With the probability ratio rho = pi(a|s) / pi_old(a|s),

        loss = -mean(min(rho A, clip(rho, 1 - eps, 1 + eps) A)) + vf_coef mean((V - R)^2) / 2 - ent_coef mean(H)

    The minimum takes away the incentive to move rho above 1 + eps where A > 0 and below 1 - eps where A < 0. It does
    not hold rho there; and where rho has gone the wrong way (below 1 - eps though A > 0), the gradient leads it back.
    """
    policy, values = agent(batch.obs)
    normalizing = args.norm_adv == "minibatch"  # detail 7
    advantages = normalize_advantages(batch.advantages) if normalizing else batch.advantages
    log_ratio = policy.log_prob(batch.actions) - batch.log_probs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()  # detail 8
    squared_error = (values - batch.returns) ** 2
    if args.clip_vloss:  # detail 9
        clipped_values = batch.values + (values - batch.values).clamp(-args.clip_coef, args.clip_coef)
        squared_error = torch.max(squared_error, (clipped_values - batch.returns) ** 2)
    value_loss = 0.5 * squared_error.mean()
    entropy = policy.entropy().mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # detail 10
    metrics = {  # detail 12; k1 and k3: Schulman's note "Approximating KL divergence"
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "old_approx_kl": -log_ratio.mean(),  # k1
        "approx_kl": (ratio - 1 - log_ratio).mean(),  # k3: never negative, and what --target-kl goes by
        "clip_fraction": ((ratio - 1).abs() > args.clip_coef).to(ratio.dtype).mean(),
    }
    return loss, {name: value.detach() for name, value in metrics.items()}


def take_steps(agent: Agent, args: Args, weights: Tensor, adam: Any, minibatches: Batch) -> Any:
    """A step of Adam (Kingma and Ba 2015; torch's, written out to be compiled) per minibatch, that is per row of the
    tensors in `minibatches`, (n, minibatch size, ...). In place: the agent's parameters are views of the vector
    `weights`; `adam` holds running means of gradient and its square, learning rate and step. Returns metrics, (n,)."""
    all_metrics = []
    for minibatch in zip(*minibatches, strict=True):
        loss, metrics = ppo_loss(agent, args, Batch(*minibatch))
        gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(agent.parameters()))])
        metrics["grad_norm"] = torch.linalg.vector_norm(gradient)
        if args.max_grad_norm is not None:  # detail 11
            gradient = gradient * (args.max_grad_norm / metrics["grad_norm"]).clamp(max=1.0)
        adam["step"] += 1
        adam["mean"] += (1 - 0.9) * (gradient - adam["mean"])
        adam["square"] += (1 - 0.999) * (gradient**2 - adam["square"])
        m_hat = adam["mean"] / (1 - torch.exp(adam["step"] * math.log(0.9)))  # 1 - 0.9^step; pow is slow on underflow
        v_hat = adam["square"] / (1 - torch.exp(adam["step"] * math.log(0.999)))
        weights -= adam["learning_rate"] * m_hat / (v_hat.sqrt() + 1e-5)  # detail 3
        all_metrics.append(metrics)
    return {name: torch.stack([x[name] for x in all_metrics]) for name in metrics}


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one no better than a constant, nan if R is constant."""
    is_constant = returns.var() <= 1e-12 * returns.square().mean()  # up to float32's rounding
    return math.nan if is_constant else float(1 - (returns - values).var() / returns.var())


# ---- Environments and evaluation -------------------------------------------------------------------------------------
def make_env(args: Args, render_mode: str | None = None) -> gym.Env:
    """One game. A wrapper that is put around it here acts in training, evaluation and play."""
    names = ["frame_stack", "skip", "noop_max", "sticky_action_probability"]
    game: Any = AtariGame
    if args.env_id.startswith("Mario-"):
        names += ["backend", "obs", "action_set", "max_pool", "mask_score", "show_buttons", "reward", "stuck_steps"]
        game = MarioEnv
    kwargs = {name: getattr(args, name) for name in names} | {"max_episode_steps": args.reset_steps or 0}
    env = game(args.env_id.removeprefix("Mario-"), render_mode="rgb_array" if render_mode else None, **kwargs)
    return gym.wrappers.HumanRendering(env) if render_mode == "human" else env


def make_envs(args: Args, num_envs: int, render_mode: str | None = None) -> Any:
    """`num_envs` environments that begin the next episode in the step that ends one (SAME_STEP): the infos of that step
    hold the old one's `final_obs` and `final_info`. What else they hold: envs/episodes.py."""
    settings = args.num_workers, args.step_timeout, args.on_worker_failure
    try:
        return vectorize(lambda: make_env(args, render_mode), num_envs, *settings)
    except (gym.error.Error, ImportError, ValueError) as error:
        raise UsageError(f"{args.env_id} cannot be made here: {error}") from None


@torch.no_grad()
@torch.random.fork_rng()  # training's random numbers do not depend on evaluations
def evaluate(agent: Agent, vec_env: Any, seed: int = 10_000, deterministic: bool = True) -> tuple[Any, ...]:
    """Play an episode in each of `vec_env`. Seed + i decides the i-th one's stage, waiting and sticky actions (the
    emulator itself knows no chance); if not `deterministic`, `seed` decides the samples of all of them together.
    Returns the episodes' returns and lengths, (num_envs,), and their last infos, dicts."""
    torch.manual_seed(seed)
    returns, lengths = np.zeros(vec_env.num_envs), np.zeros(vec_env.num_envs, dtype=int)
    running = np.ones(vec_env.num_envs, dtype=bool)  # only the first episode of each environment counts
    last_infos: list[dict[str, Any]] = [{} for _ in running]
    obs, _ = vec_env.reset(seed=seed)
    while running.any():
        policy = agent.policy(torch.as_tensor(obs, device=next(agent.parameters()).device))
        actions = policy.mode if deterministic else policy.sample()
        obs, _, terminated, truncated, infos = vec_env.step(actions.cpu().numpy())
        returns[running], lengths[running] = infos["episode_return"][running], infos["episode_length"][running]
        for n in np.flatnonzero(running & (terminated | truncated)):
            final_info = infos.get("final_info", {})
            last_infos[n] = {name: x[n] for name, x in final_info.items() if isinstance(x, np.ndarray)}
            last_infos[n]["flag_get"] = bool(terminated[n] and last_infos[n].get("flag_get"))  # a flag need not end it
        running &= ~(terminated | truncated) | infos["worker_restarted"]  # a lost episode is played anew
    return returns, lengths, last_infos


# ---- Training --------------------------------------------------------------------------------------------------------
def train(args: Args, signals: list[int] | None = None) -> dict[str, Any]:
    """Train, evaluate and save as `args` say; a signal in `signals`, which `main` fills, ends the run after its update.
    Returns the run folder and the state of `run` below. Raises what `main` catches."""
    args = replace(args, **tree_map(lambda x: x.item() if isinstance(x, np.generic) else x, asdict(args)))  # no NumPy
    backend: Any = resolve_backend(args.backend) if args.env_id.startswith("Mario-") else args.backend
    args = replace(args, backend=backend)  # a policy belongs to the emulator that it has learnt on
    with contextlib.suppress(AttributeError):  # glibc is to keep freed memory: new memory costs a fifth of an update
        ctypes.CDLL(None).mallopt(-4, 0), ctypes.CDLL(None).mallopt(-1, 2**30)  # M_MMAP_MAX, M_TRIM_THRESHOLD
    torch.set_num_threads(1)  # while it collects: --torch-threads is for updates
    torch.manual_seed(args.seed)
    vec_env = make_envs(args, args.num_envs)
    agent = Agent(vec_env, args).to(args.device)
    checkpoint = load(Path(args.init_from)) if args.init_from and not args.resume else {}
    # --- run folder: locked before it is read; weights, optimiser, and where a resumed run stood ----------------------
    task = args.env_id.replace("/", "_")
    logdir = Path(args.logdir or f"runs/{task}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
    logdir.mkdir(parents=True, exist_ok=True)
    log = open(logdir / "progress.csv", "a")  # noqa: SIM115  (until the run ends)
    try:
        fcntl.lockf(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{logdir} is in use by another run: wait for it, or choose another --logdir.") from None
    require(args.resume or not any(logdir.glob("*.pt")), f"{logdir} holds a run: --resume it or choose another.")
    checkpoint = load(logdir / "latest.pt") if args.resume else checkpoint
    for name, value in (checkpoint["args"] if args.resume else {}).items():
        if name not in ("resume", "logdir") and getattr(args, name) != value:
            require(name not in ("seed", "backend", *GAME), f"A resumed run keeps its {name}.")
            print(f"--{name.replace('_', '-')} is {getattr(args, name)} from now on; it was {value}.")
    if checkpoint:
        load_policy(checkpoint, agent)
        own = {x: y for x, y in checkpoint["args"].items() if x in ("backend", "shared_cnn") and getattr(args, x) != y}
        require(not own, f"The checkpoint needs its own flags: {own}.")  # the shapes of its weights do not show these
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()  # one vector: Adam then takes few operations
    nn.utils.vector_to_parameters(weights, agent.parameters())  # views of it: what changes `weights` changes the agent
    adam = {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights), "step": weights.new_zeros(())}
    torch._dynamo.config.trace_autograd_ops = True  # the compiler then sees through torch.autograd.grad
    torch._dynamo.config.recompile_limit = 1000  # of one process, which may be a sweep over many runs
    options: Any = {"cpp_wrapper": args.device == "cpu"}
    optimize: Any = torch.compile(take_steps, dynamic=False, options=options) if args.compile else take_steps
    num_large_minibatches = args.num_minibatches // args.minibatch_growth
    steps_per_call = math.gcd(4, num_large_minibatches)  # compiled, 1 is 50 % slower than 4; must divide both numbers
    run = SimpleNamespace(global_step=0, rollouts=0, resets=0, epochs=0, minibatch_updates=0, seconds=0.0, csv_size=0,
                          training_return=math.nan, training_success=math.nan, mean_return=math.nan,
                          best_return=-math.inf)  # fmt: skip
    torch.manual_seed(args.seed)  # so that actions do not depend on how many weights were drawn
    next_obs, _ = vec_env.reset(seed=args.seed)
    if args.resume:
        vars(run).update(checkpoint["run"])
        adam = {name: x.to(args.device) for name, x in checkpoint["adam"].items()}
        torch.set_rng_state(checkpoint["generator"])
        if vec_env.set_state(tree_map(lambda x: x.numpy() if isinstance(x, Tensor) else x, checkpoint["envs"])):
            next_obs = checkpoint["obs"]  # else (unsaved, or another --num-envs) all episodes begin anew
    run.csv_size = log.truncate(min(run.csv_size, log.tell()))  # drops the rows of updates after the checkpoint
    commit = os.popen(f"git -C {str(Path(__file__).parent)!r} rev-parse HEAD 2>/dev/null").read().strip()
    versions = {module.__name__: module.__version__ for module in (torch, np, gym)}
    config = {"args": asdict(args), "versions": versions, "commit": commit, "command": sys.argv}
    (logdir / "config.json").write_text(json.dumps(config, indent=1, default=str))
    print(f"{args.num_updates} updates of {args.num_envs} environments x {args.num_steps} steps, {args.update_epochs} "
          f"epochs x {args.num_minibatches} minibatches ({num_large_minibatches} at over 80 % flags), "
          f"{type(vec_env.unwrapped).__name__}: {logdir}")  # fmt: skip
    if args.compile:
        print("The first update compiles the gradient steps, which takes 10 to 30 s (--no-compile: none).", flush=True)
    if args.track is not None:
        import wandb

        wandb.init(project=args.track, id=logdir.name, resume="allow", config=asdict(args), sync_tensorboard=True,
                   reinit="finish_previous")  # fmt: skip
    writer = SummaryWriter(str(logdir), purge_step=run.global_step + 1)
    all_steps, first_end, stopping = args.num_updates * args.batch_size, run.global_step + args.batch_size, False
    while run.global_step < all_steps and not stopping:
        started = time.perf_counter()
        progress = run.global_step / all_steps
        annealing = {"linear": 1 - progress, "exponential": 0.01**progress, "none": 1.0}  # detail 4
        adam["learning_rate"] = torch.tensor(args.learning_rate * annealing[args.lr_decay], device=args.device)
        ent_coef: Any = torch.tensor(args.ent_coef * annealing[args.ent_decay], device=args.device)
        loss_args = replace(args, ent_coef=ent_coef)  # a tensor: each new number would be compiled into new code
        num_minibatches = num_large_minibatches if run.training_success > 0.8 else args.num_minibatches
        # --- collect --------------------------------------------------------------------------------------------------
        rows: list[tuple[Tensor, ...]] = []  # of each step: obs, actions, ..., as they are unpacked below
        cuts: list[tuple[int, int, np.ndarray]] = []  # (t, n, final observation) where a time limit cut an episode
        ended: list[tuple[float, int, float]] = []  # (return, length, flag reached) of each episode that ended
        for t in range(args.num_steps):
            # channels last, as convolutions want them: turned around once, not in each epoch
            obs = torch.as_tensor(next_obs, device=args.device).contiguous(memory_format=torch.channels_last)
            with torch.no_grad():
                policy, values = agent(obs)
                actions = policy.sample()
                log_probs = policy.log_prob(actions)
            next_obs, rewards, terminated, truncated, infos = vec_env.step(actions.cpu().numpy())
            rewards = np.sign(rewards) if args.sign_reward else rewards  # detail 19
            final_info = infos.get("final_info", {})  # of episodes that ended now; infos has the others'
            life_lost = infos.get("life_lost", False) | final_info.get("life_lost", False)
            ends = terminated | life_lost if args.episodic_life else terminated  # detail 16
            outcome = map(torch.as_tensor, (rewards, ends, truncated, infos["raw_reward"]))
            rows.append((obs, actions, log_probs, values, *outcome))
            flags = final_info.get("flag_get", np.zeros(args.num_envs))  # Atari has none
            for n in infos["ended_envs"]:
                ended.append((infos["episode_return"][n], infos["episode_length"][n], terminated[n] and flags[n]))
            cuts += [(t, n, infos["final_obs"][n]) for n in np.flatnonzero(truncated & ~terminated).tolist()]
        # --- bootstrap ------------------------------------------------------------------------------------------------
        obs, actions, log_probs, values, *others = (torch.stack(x) for x in zip(*rows, strict=True))  # (num_steps, ...)
        rewards, ends, truncated, raw_rewards = (x.to(args.device, torch.float32) for x in others)
        with torch.no_grad():
            next_values = torch.cat([values[1:], agent.get_value(torch.as_tensor(next_obs, device=args.device))[None]])
            if cuts:  # there, values[t + 1] is of the reset state: V of the final observation replaces it
                times, envs, final_obs = zip(*cuts, strict=True)
                next_values[times, envs] = agent.get_value(torch.as_tensor(np.stack(final_obs), device=args.device))
        # --- advantages -----------------------------------------------------------------------------------------------
        advantages, returns = compute_gae(rewards, values, next_values, ends, truncated, args.gamma, args.gae_lambda)
        if args.norm_adv not in ("minibatch", "none"):
            advantages = normalize_advantages(advantages, dim={"batch": None, "per_env": 0}[args.norm_adv])
        # --- update ---------------------------------------------------------------------------------------------------
        batch = Batch(*(x.flatten(0, 1) for x in (obs, actions, log_probs, values, advantages, returns)))
        torch.set_num_threads(args.torch_threads)
        results: list[dict[str, Tensor]] = []  # of each call: the metrics of its steps_per_call gradient steps
        for _ in range(args.update_epochs):
            order = torch.randperm(len(batch.obs), device=args.device)  # detail 6: each transition once an epoch
            for indices in order.view(-1, steps_per_call, args.batch_size // num_minibatches):
                results.append(optimize(agent, loss_args, weights, adam, Batch(*(x[indices] for x in batch))))
            run.epochs += 1
            run.minibatch_updates += num_minibatches
            epoch_kl = torch.cat([x["approx_kl"] for x in results]).view(-1, num_minibatches)[-1].mean()
            if args.target_kl is not None and epoch_kl > args.target_kl:
                break
        torch.set_num_threads(1)
        metrics = {name: float(torch.cat([x[name] for x in results]).mean()) for name in results[0]}
        if not math.isfinite(metrics["grad_norm"]):
            raise FloatingPointError(f"A gradient is not finite after step {run.global_step:,}: lower --learning-rate.")
        run.rollouts += 1
        run.global_step += args.batch_size
        seconds = time.perf_counter() - started
        run.seconds += seconds
        # --- evaluate -------------------------------------------------------------------------------------------------
        # After a batch that reached a multiple of --eval-every the remainder is below batch_size (0: only at the end).
        evaluating = run.global_step >= all_steps or run.global_step % (args.eval_every or math.inf) < args.batch_size
        scores = {f"{kind}/{name}": math.nan for kind in ("eval", "eval_sampled") for name in EVALUATION}
        if evaluating:
            with contextlib.closing(make_envs(args, args.eval_episodes)) as eval_envs:
                for kind in ("eval", "eval_sampled"):
                    totals, lengths, infos = evaluate(agent, eval_envs, deterministic=kind == "eval")
                    reached = np.array([info.get("flag_get", False) for info in infos])
                    numbers = totals.mean(), totals.std(), lengths.mean(), reached.mean()
                    scores |= {f"{kind}/{name}": float(x) for name, x in zip(EVALUATION, numbers, strict=True)}
            run.mean_return = scores["eval/mean_return"]
        # --- log ------------------------------------------------------------------------------------------------------
        episodic_return, episodic_length, success_rate = np.mean(ended, axis=0).tolist() if ended else [math.nan] * 3
        if ended:
            run.training_return, run.training_success = episodic_return, success_rate
        run.resets += len(ended)
        record = {f"train/{name}": value for name, value in metrics.items()} | {
            "train/explained_variance": explained_variance(batch.values, batch.returns),
            "train/value_abs_error": float((batch.values - batch.returns).abs().mean()),
            "train/learning_rate": float(adam["learning_rate"]),
            "train/ent_coef": float(ent_coef),
            "rollout/episodic_return": episodic_return,
            "rollout/episodic_length": episodic_length,
            "rollout/success_rate": success_rate,  # of Mario's episodes, those that reached the flag
            "rollout/mean_reward": raw_rewards.mean().item(),
            "time/sps": args.batch_size / seconds,
            "counters/train_steps": run.global_step // args.num_envs,
        }
        record |= {f"counters/{x}": vars(run)[x] for x in ("rollouts", "resets", "epochs", "minibatch_updates")}
        record |= scores
        for name, value in record.items():
            if math.isfinite(value):
                writer.add_scalar(name, value, run.global_step)
        if run.csv_size == 0:
            print("global_step", *record, sep=",", file=log)
        print(run.global_step, *record.values(), sep=",", file=log, flush=True)
        run.csv_size = log.tell()
        minutes = (all_steps - run.global_step) / args.batch_size * seconds / 60
        left = f", {minutes:.1f} min left" if run.global_step > first_end else ""  # the first update also warms up
        line = f"{run.global_step:,} steps, {args.batch_size / seconds:,.0f}/s, return {run.training_return:.2f}, "
        flag = f"flag {run.training_success:.0%}, " if args.env_id.startswith("Mario-") else ""
        line += f"{flag}evaluation {run.mean_return:.2f}{left}"
        # --- save -----------------------------------------------------------------------------------------------------
        stopping = bool(signals)
        saving = run.rollouts == 1 or run.global_step % (args.save_every or math.inf) < args.batch_size
        if saving or evaluating or stopping:
            state = {"format": FORMAT, "args": asdict(args) | {"resume": False, "logdir": str(logdir)}, "adam": adam,
                     "run": vars(run), "agent": agent.state_dict(), "envs": vec_env.get_state(), "obs": next_obs,
                     "generator": torch.get_rng_state()}  # fmt: skip
            if run.mean_return > run.best_return:
                run.best_return = run.mean_return  # in `state` too
                save(logdir / "best.pt", state)
                (logdir / "best.json").write_text(json.dumps({"problem": args.game, "score": run.best_return}))
            save(logdir / "latest.pt", state)
            vec_env.unwrapped.advice = f"Go on: python {sys.argv[0]} --resume --logdir {logdir}"
        is_terminal = sys.stdout is not None and sys.stdout.isatty()  # after saving: a pipe may be closed
        print(f"\r\033[K\033[?7l{line}\033[?7h" if is_terminal else line, end="" if is_terminal else "\n", flush=True)
    for resource in (vec_env, writer, log):
        resource.close()
    print(f"\n{run.global_step:,} steps in {run.seconds:.0f} s of training, evaluation {run.mean_return:.2f}: {logdir}")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a bad best.json costs only this line
        runs = [(json.loads(path.read_text()), str(path.parent)) for path in logdir.parent.glob("*/best.json")]
        score, best_run = max((best["score"], folder) for best, folder in runs if best["problem"] == args.game)
        print(f"best of all runs of this game: {score:.2f}, {best_run}")
    if signals and run.global_step < all_steps:
        print(vec_env.unwrapped.advice)
    return {"logdir": str(logdir), **vars(run)}


# ---- Checkpoints -----------------------------------------------------------------------------------------------------
def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that `path` is a complete file at every moment. Arrays become tensors: data, not code."""
    torch.save(tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, state), f"{path}.tmp")
    with open(f"{path}.tmp", "rb") as file:
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint: nothing in it is executed, and no module imported that it alone names."""
    require(path.is_file(), f"{path} is no file; a run's --logdir has latest.pt and, once it was evaluated, best.pt.")
    try:
        require(zipfile.ZipFile(path).testzip() is None, "wrong checksum")  # torch does not look at them
        state = torch.load(path, map_location="cpu", weights_only=True)
        require(state["format"] == FORMAT, f"it is {state['format']}")
        state["args"] = {name: x for name, x in state["args"].items() if name in Args.__dataclass_fields__}
        env_id = Args(**state["args"] | HERE).env_id
    except Exception as error:  # a damaged file can fail in any layer of zip, pickle and torch
        raise OSError(f"{path} is damaged or no {FORMAT}: {error!r:.99}") from None
    trusted = ":" not in env_id or any(x.endswith(env_id) for x in sys.argv) or env_id.split(":")[0] in sys.modules
    require(trusted, f"{path} imports the module of {env_id}: if you trust it, add --env-id {env_id} or import it.")
    return state


def load_policy(checkpoint: dict[str, Any], agent: Agent) -> None:
    """Put the weights of a checkpoint into `agent`."""
    here, saved = ({(name, *x.shape) for name, x in y.items()} for y in (agent.state_dict(), checkpoint["agent"]))
    require(here == saved, f"The file has another network: {sorted(saved - here)[:3]}, here {sorted(here - saved)[:3]}")
    agent.load_state_dict(checkpoint["agent"])


# ---- Playing and the command line ------------------------------------------------------------------------------------
@dataclass
class PlayArgs:
    logdir: str | None = None  # run folder; not needed if --checkpoint is the path of a file
    checkpoint: str = "best"  # best, latest, or the path of a .pt file: a name in --logdir, if that is given
    env_id: str | None = None  # stage to play, as Mario-1-2; default: that of the checkpoint
    episodes: int = 1  # episodes to play
    seed: int = 0  # seed of the first episode; each further one gets the next number
    stochastic: bool = False  # sample the actions instead of taking the policy's mode
    render: bool = False  # show the episodes in a window
    save_gif: bool = False  # write a GIF of each episode
    gif_fps: int = 20  # most pictures per second of a GIF, up to 50; it plays in real time: games have 60 / --skip
    gif_frames: int = 300  # most pictures of a GIF
    gif_dir: str | None = None  # folder of the GIFs; default: gifs, beside the checkpoint


def play(options: PlayArgs) -> list[float]:
    """Play the policy of a checkpoint and print each episode's return; returns these. With --save-gif, film it."""
    check_ranges(options)
    path = Path(options.logdir or "", str(options.checkpoint).removesuffix(".pt") + ".pt")
    checkpoint = load(path)
    torch.set_num_threads(1)  # over a single picture, more threads only wait for each other
    args = Args(**checkpoint["args"] | HERE | {"env_id": options.env_id or checkpoint["args"]["env_id"]})
    render_mode = "human" if options.render else "rgb_array" if options.save_gif else None
    vec_env = make_envs(args, 1, render_mode)
    agent = Agent(vec_env, args)
    load_policy(checkpoint, agent)
    if options.save_gif:
        vec_env = RecordGif(vec_env, options.gif_dir or path.parent / "gifs", options.gif_fps, options.gif_frames)
    returns = []
    for i in range(options.episodes):
        (total,), (length,), (info,) = evaluate(agent, vec_env, options.seed + i, not options.stochastic)
        returns.append(float(total))
        place = "x {max_x} in {world}-{stage}".format(**info) if "max_x" in info else ""
        end = ", flag reached" if info.get("flag_get") else f", no flag: as far as {place}" if place else ""
        print(f"episode {i + 1}: return {total:.2f}, {length} steps{end}", flush=True)
    vec_env.close()
    print(f"mean return {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}")
    return returns


def preset(*names: str, **flags: Any) -> Args:
    """`--configs names` and flags, which win, for programs: `train(preset("debug", seed=2))`."""
    return replace(parse_args(["--configs", *names]), **flags)


def parse_args(argv: list[str]) -> Args:
    """Arguments from the run to --resume, the presets of --configs from left to right, and flags: the last one wins."""
    first, _ = tyro.cli(RunArgs, args=argv, add_help=False, return_unknown_args=True)
    values = load(Path(first.logdir, "latest.pt"))["args"] if first.resume and first.logdir else {}
    require(not (first.resume and first.init_from), "--init-from begins a new run: leave out --resume.")
    for name in first.configs:
        require(name in PRESETS, f"There is no preset {name}; there are {', '.join(PRESETS)}.")
        values = values | PRESETS[name]
    groups: Any = {"run": RunArgs(), "environments": EnvironmentArgs(), "ppo": PPOArgs()}  # as --help shows them
    for group in groups.values():
        vars(group).update({name: values[name] for name in vars(group) & values.keys()})
    description = f"{__doc__}\nPresets of --configs: {', '.join(PRESETS)}."
    groups = tyro.cli(dict, default=groups, args=argv, description=description, config=(tyro.conf.OmitArgPrefixes,))
    return Args(**vars(groups["run"]), **vars(groups["environments"]), **vars(groups["ppo"]))


def main(argv: list[str]) -> int:
    """The command line. Returns the exit code: 2 for wrong arguments, 1 for a failure, 128 + n after signal n."""
    signals: list[int] = []

    def receive(number: int, frame: Any) -> None:
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader of a pipe too
            print("\nStopping after this update; the same signal again stops at once, without saving.", file=sys.stderr)

    try:
        if argv[:1] == ["play"]:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
            play(tyro.cli(PlayArgs, prog=f"{SCRIPT}.py play", args=argv[1:], description=play.__doc__))
            return 0
        signal.signal(signal.SIGINT, receive)
        signal.signal(signal.SIGTERM, receive)
        train(parse_args(argv[1:] if argv[:1] == ["train"] else argv), signals)
    except (UsageError, gym.error.Error, ImportError, OSError, FloatingPointError, WorkerError) as error:
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 2 if isinstance(error, UsageError | gym.error.Error | ImportError) else 1
    return 128 + signals[0] if signals else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
