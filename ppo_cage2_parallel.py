"""PPO for a network defender, Blue: CAGE Challenge 2, a 13-host network against scripted attackers, Red.

    python ppo_cage2_parallel.py --configs explore                           # one defender against all attackers
    python ppo_cage2_parallel.py --workflow any                              # one that repairs in the order it is told
    python ppo_cage2_parallel.py search --red-agent meander                  # which order is best?
    python ppo_cage2_parallel.py --resume --logdir runs/...                  # continue a run, on a CPU bit for bit
    python ppo_cage2_parallel.py play --logdir runs/... --red-agent meander  # watch the best policy of a run defend

A run writes to runs/{env_id}__{script}__{seed}__{time}/ (or --logdir): config.json, TensorBoard events, progress.csv,
best.pt, best.json and, for --resume, latest.pt. New to PPO? Begin with docs/ppo.md; "detail n" is in docs/details.md.
"""

import contextlib
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
from torch.utils._pytree import tree_map
from torch.utils.tensorboard import SummaryWriter

from envs import RecordGif, WorkerError, vectorize
from envs.cage2 import Cage2Env
from envs.cage2.memory import REDUCED_HOSTS, WORKFLOW_HOSTS, Memory
from envs.cage2.scores import summarize
from envs.cage2.search import next_order
from envs.cage2.workflow import ORDERS, UNIT_TYPES, VERDICTS, WorkflowEnv, fix_metrics, is_compliant, parse_workflow

SCRIPT, FORMAT = Path(__file__).stem, "ppo_cage2_parallel/3"  # what a checkpoint holds; /4 if a copy changes that
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
    env_id: Literal["CAGE2-v0"] = "CAGE2-v0"  # the only game this script knows
    seed: int = 1  # seed of networks, sampling and environments (environment n gets seed + n)
    total_timesteps: int = 20_000_000  # environment steps of the whole run, rounded down to whole batches
    logdir: str | None = None  # run folder; default runs/{env_id}__{script}__{seed}__{time}
    resume: bool = False  # continue the run in --logdir with its arguments; flags win, but seed, game and network stay
    init_from: str | None = None  # checkpoint whose networks the run starts from
    device: str = "cpu"  # torch device: cpu, cuda, cuda:1 (an H100 trains 3.8 times as fast as one CPU thread)
    torch_threads: int = 1  # CPU threads of torch: on two idle cores, 2 train 1.5 times as fast as 1
    compile: bool = True  # torch.compile the gradient steps: training is 1.5 times as fast, after 10 to 30 s
    eval_every: int = 1_000_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: int = 200  # episodes of an evaluation against each red agent, fixed seeds, deterministic actions
    save_every: int = 2_000_000  # environment steps between writes of latest.pt; evaluations and the end write it too
    track: str | None = None  # Weights & Biases project to log to as well (pip install wandb; WANDB_ENTITY works too)


@dataclass
class EnvironmentArgs:
    num_envs: int = 256  # parallel environments N
    num_workers: int | None = None  # processes that step them, where make_env wraps the game; default: the CPU cores
    step_timeout: float = 300.0  # seconds after which a worker process that has not finished its step counts as hung
    on_worker_failure: Literal["raise", "restart"] = "raise"  # a lost worker process ends the run, or is replaced
    red_agent: Literal["mixed", "b_line", "meander", "sleep"] = "mixed"  # who attacks; mixed: drawn for each episode
    green: bool = False  # let Green scan ports as users do (the published scores are without)
    version: Literal["leaderboard", "head"] = "leaderboard"  # rules of the published scores, or of CybORG's last commit
    wrapper: Literal["challenge", "cardiff"] = "challenge"  # the official observation, or the winner's
    max_steps: int = 100  # time limit of episodes in steps (a truncation)
    finite_horizon: bool = False  # terminate at the limit instead; the share of it that has passed is observed
    actions: Literal["reduced", "full"] = "reduced"  # full: all 145; reduced: four verbs on the hosts that matter
    memory: bool = True  # give Blue what it has seen and done in the episode as further inputs
    reward_scale: float = 0.1  # rewards are multiplied by this for learning; reports show the game's own
    workflow: str | None = None  # order of repairs told to Blue: defender,enterprise,op_server,op_host,user, or any
    alignment: float = 30.0  # w in the reward w (c_t - c_{t-1}); c_t: share of judged fixes so far that kept the order
    # End the run when training's compliance (mean over environments, of each its last 5 episodes) reaches this and then
    # an evaluation, not the run's first, does too, its return at most a standard error below the first's; None: never.
    compliance_threshold: float | None = None
    min_episodes: int = 10  # episodes of each environment before such an end


@dataclass
class PPOArgs:
    num_steps: int = 100  # steps T per environment and rollout; a batch is N*T transitions
    learning_rate: float = 3e-3  # Adam's step size at the start
    lr_decay: Literal["linear", "exponential", "none"] = "linear"  # to 0, to a hundredth, or constant
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation: 0 trusts the critic, 1 the sampled return
    num_minibatches: int = 8  # minibatches of an epoch; must divide N*T
    update_epochs: int = 4  # passes over each batch
    norm_adv: Literal["minibatch", "batch", "per_env", "none"] = "minibatch"  # what advantages are normalised over
    clip_coef: float = 0.2  # epsilon: a probability ratio earns nothing beyond 1 +- epsilon
    clip_vloss: bool = False  # clip the critic's change too (OpenAI Baselines; later studies found no gain)
    ent_coef: float = 0.001  # weight of the entropy bonus at the start
    ent_decay: Literal["linear", "exponential", "none"] = "linear"  # of that weight: to 0, to a hundredth, or constant
    vf_coef: float = 0.5  # weight of the value loss, which is half the mean squared error
    max_grad_norm: float | None = 0.5  # global l2 norm that gradients are clipped to; None: no clipping
    target_kl: float | None = None  # end an update after an epoch whose mean KL (k3) exceeds this; None: never
    hidden_sizes: tuple[int, ...] = (64, 64)  # tanh units in the layers of actor and critic


RED_MIXTURE = {"b_line": 0.5, "meander": 0.45, "sleep": 0.05}  # of --red-agent mixed, for each episode
# What decides what a score means: only runs that have all of these in common can be compared.
GAME = ("env_id", "version", "wrapper", "red_agent", "green", "max_steps", "finite_horizon", "workflow")
RANGES = {  # lowest and highest values; None passes
    "num_envs num_workers max_steps eval_episodes num_steps num_minibatches update_epochs hidden_sizes": (1, 1e6),
    "seed total_timesteps shared_timesteps eval_every save_every min_episodes": (0, 2**32 - 1),
    "ent_coef vf_coef alignment gp_beta": (0, 1e9),
    "learning_rate reward_scale clip_coef max_grad_norm target_kl step_timeout gp_scale": (1e-9, 1e9),
    "gamma gae_lambda compliance_threshold": (0, 1),
    "torch_threads": (1, os.cpu_count()),
    "episodes gif_frames n_start": (1, 1e6),
    "gif_fps": (1, 50),
    "n_workflows": (1, len(ORDERS)),
    "judge_episodes": (2, 1e6),
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
        self.red_agents: list[Any] = [name for name in RED_MIXTURE if self.red_agent in (name, "mixed")]
        has_order = self.workflow is not None or self.compliance_threshold is None
        require(has_order, "--compliance-threshold needs --workflow, the order to comply with, or any.")
        if self.workflow not in (None, "any"):
            try:
                self.workflow = ",".join(ORDERS[parse_workflow(self.workflow)])  # without spaces
            except ValueError as error:
                raise UsageError(f"--workflow: {error}") from None
        self.game = " ".join(str(getattr(self, name)) for name in GAME)


PRESETS: dict[str, dict[str, Any]] = {
    "explore": {"ent_coef": 0.2, "ent_decay": "exponential"},
    "head": {"version": "head", "ent_coef": 0.1, "ent_decay": "exponential"},
    "fast": {"total_timesteps": 2_000_000, "eval_every": 250_000, "save_every": 500_000},
    "debug": {"total_timesteps": 20_000, "num_envs": 20, "num_minibatches": 2, "update_epochs": 2, "max_steps": 30,
              "eval_every": 5_000, "eval_episodes": 10, "save_every": 4_000, "compile": False},
    "workflow": {"workflow": ",".join(UNIT_TYPES), "compliance_threshold": 0.95, "eval_every": 250_000},
    # a workflow learnt in 50 episodes of each of 25 environments, with all actions and without memory
    "workflow25": {"workflow": ",".join(UNIT_TYPES), "compliance_threshold": 0.95, "total_timesteps": 125_000,
                   "num_envs": 25, "version": "head", "red_agent": "meander", "actions": "full", "memory": False,
                   "learning_rate": 2e-3, "lr_decay": "none", "num_minibatches": 1, "norm_adv": "batch",
                   "ent_coef": 0.01, "ent_decay": "none", "eval_every": 12_500, "save_every": 25_000},
    # the training of each order in `search`; presets that are named there are layered over it
    "search": {"workflow": "any", "compliance_threshold": 0.95, "total_timesteps": 125_000, "num_envs": 25,
               "red_agent": "meander", "learning_rate": 2e-4, "num_minibatches": 1, "eval_every": 12_500,
               "save_every": 25_000},
}  # fmt: skip


# ---- Agent -----------------------------------------------------------------------------------------------------------
def mlp(sizes: list[int], output_gain: float) -> nn.Sequential:
    """Tanh layers of these widths, orthogonal weights, biases 0 (detail 2); the last is linear, with another gain."""
    layers: list[nn.Module] = []
    for n_in, n_out in zip(sizes[:-1], sizes[1:], strict=True):
        linear = nn.Linear(n_in, n_out)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    nn.init.orthogonal_(linear.weight, output_gain)
    return nn.Sequential(*layers[:-1])


class Categorical:
    """A distribution over actions from logits (batch, num_actions), as torch's of this name, but several times as fast:
    it samples by the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014), and normalises only where asked to."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @property
    def mode(self) -> Tensor:
        return self.logits.argmax(-1)

    def sample(self) -> Tensor:
        gumbel_noise = -(-torch.rand_like(self.logits).log()).log()
        return (self.logits + gumbel_noise).argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.logits.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)

    def entropy(self) -> Tensor:
        log_probs = self.logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)


class Agent(nn.Module):
    """A categorical policy and a critic: two networks."""

    def __init__(self, envs: Any, args: Args) -> None:
        super().__init__()
        (obs_dim,), num_actions = envs.single_observation_space.shape, envs.single_action_space.n
        # details 13, 26: nothing is shared. A policy head of gain 0.01 starts nearly uniform for every observation.
        self.actor = mlp([obs_dim, *args.hidden_sizes, num_actions], output_gain=0.01)
        self.critic = mlp([obs_dim, *args.hidden_sizes, 1], output_gain=1.0)

    def policy(self, obs: Tensor) -> Categorical:
        """(batch, obs_dim) -> a distribution of actions (batch,), with log-probabilities and entropies (batch,)."""
        return Categorical(self.actor(obs))

    def get_value(self, obs: Tensor) -> Tensor:
        """(batch, obs_dim) -> V(s), (batch,)."""
        return self.critic(obs).squeeze(-1)

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        return self.policy(obs), self.get_value(obs)


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


def log_probs_and_values(agent: Agent, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """log pi(a|s) and V(s), (num_steps, num_envs) each, in one pass; obs are (num_steps, num_envs, obs_dim)."""
    policy, values = agent(obs.flatten(0, 1))
    return policy.log_prob(actions.flatten(0, 1)).view_as(actions), values.view_as(actions)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one no better than a constant, nan if R is constant."""
    is_constant = returns.var() <= 1e-12 * returns.square().mean()  # up to float32's rounding
    return math.nan if is_constant else float(1 - (returns - values).var() / returns.var())


# ---- Environments and evaluation -------------------------------------------------------------------------------------
def make_env(args: Args, render_mode: str | None = None) -> gym.Env:
    """One game. A wrapper that is put around it here acts in training, evaluation and play."""
    red_agent = RED_MIXTURE if args.red_agent == "mixed" else args.red_agent
    settings = {name: getattr(args, name) for name in ("green", "version", "wrapper", "max_steps")}
    env = Cage2Env(red_agent, **settings, state_in_info=args.workflow is not None, render_mode=render_mode)
    return env


def make_envs(args: Args, num_envs: int, render_mode: str | None = None) -> Any:
    """`num_envs` environments that begin the next episode in the step that ends one (SAME_STEP). envs/episodes.py says
    what infos hold. One compiled loop steps them, or processes where make_env wraps the game; Blue's memory follows."""
    settings = args.num_workers, args.step_timeout, args.on_worker_failure
    vec_env: Any = vectorize(lambda: make_env(args, render_mode), num_envs, *settings)
    hosts = [] if args.actions == "full" else WORKFLOW_HOSTS if args.workflow else REDUCED_HOSTS  # of reduced actions
    vec_env = Memory(vec_env, args.memory, hosts, args.max_steps if args.finite_horizon else None)
    return vec_env if args.workflow is None else WorkflowEnv(vec_env, args.workflow, args.alignment)


@torch.no_grad()
def evaluate(agent: Agent, vec_env: Any, seed: int = 10_000, deterministic: bool = True) -> tuple[np.ndarray, ...]:
    """Play an episode in each of `vec_env`, the i-th from seed + i. Returns rewards (num_steps, num_envs), 0 after an
    episode's end, lengths (num_envs,) and fixes by verdict (num_envs, 4), 0 without a workflow."""
    table, lengths = np.zeros((0, vec_env.num_envs)), np.zeros(vec_env.num_envs, dtype=int)
    fixes = np.zeros((vec_env.num_envs, len(VERDICTS)), dtype=int)
    running = np.ones(vec_env.num_envs, dtype=bool)  # only the first episode of each environment counts
    obs, _ = vec_env.reset(seed=seed)
    while running.any():
        policy = agent.policy(torch.as_tensor(obs, device=next(agent.parameters()).device))
        actions = policy.mode if deterministic else policy.sample()
        obs, rewards, terminated, truncated, infos = vec_env.step(actions.cpu().numpy())
        table = np.vstack([table, np.zeros(vec_env.num_envs)])
        lengths[running] = infos["episode_length"][running]
        table[lengths[running] - 1, running] = rewards[running]  # a row for each step of the episode itself
        fixes[running] = infos.get("fixes", fixes)[running]
        running &= ~(terminated | truncated) | infos["worker_restarted"]  # a lost episode is played anew
    return table * (np.arange(len(table))[:, None] < lengths), lengths, fixes  # without what lost ones had earned


def score(agent: Agent, args: Args, num_episodes: int, seed: int = 10_000) -> dict[str, float]:
    """Mean returns of the first 30, 50 and 100 steps (and of all) against each red agent; "score", their sum (-54.57
    won the challenge); more: see envs/cage2/scores.py. Actions are deterministic, seeds differ by red agent."""
    episodes = {}
    for i, red_agent in enumerate(args.red_agents):
        with contextlib.closing(make_envs(replace(args, red_agent=red_agent), num_episodes)) as vec_env:
            episodes[red_agent] = evaluate(agent, vec_env, seed + i * num_episodes)
    return summarize(episodes, args.max_steps, args.finite_horizon, args.workflow is not None)


# ---- Training --------------------------------------------------------------------------------------------------------
def train(args: Args, signals: list[int] | None = None) -> dict[str, Any]:
    """Train, evaluate and save as `args` say; a signal in `signals`, which `main` fills, ends the run after its update.
    Returns the run folder and the state of `run` below. Raises what `main` catches."""
    args = replace(args, **tree_map(lambda x: x.item() if isinstance(x, np.generic) else x, asdict(args)))  # no NumPy
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    vec_env = make_envs(args, args.num_envs)
    agent = Agent(vec_env, args).to(args.device)
    checkpoint = load(Path(args.init_from)) if args.init_from and not args.resume else {}
    # --- run folder: locked before it is read; weights, optimiser, and where a resumed run stood ----------------------
    logdir = Path(args.logdir or f"runs/{args.env_id}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}")
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
            require(name not in ("seed", "actions", "memory", *GAME), f"A resumed run keeps its {name}.")
            print(f"--{name.replace('_', '-')} is {getattr(args, name)} from now on; it was {value}.")
    if checkpoint:
        load_policy(checkpoint, agent)
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()  # one vector: Adam then takes few operations
    nn.utils.vector_to_parameters(weights, agent.parameters())  # views of it: what changes `weights` changes the agent
    adam = {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights), "step": weights.new_zeros(())}
    torch._dynamo.config.trace_autograd_ops = True  # the compiler then sees through torch.autograd.grad
    torch._dynamo.config.recompile_limit = 1000  # of one process, which may be a sweep over many runs
    options: Any = {"cpp_wrapper": args.device == "cpu", "cpp.use_decompose_tanh": True}  # the latter vectorises tanh
    compiled: Any = (lambda f: torch.compile(f, dynamic=False, options=options)) if args.compile else (lambda f: f)
    optimize, evaluate_actions = compiled(take_steps), compiled(log_probs_and_values)
    steps_per_call = math.gcd(4, args.num_minibatches)  # gradient steps; compiled, 1 a call is 50 % slower than 4
    run = SimpleNamespace(global_step=0, rollouts=0, resets=0, epochs=0, minibatch_updates=0, seconds=0.0, csv_size=0,
                          training_return=math.nan, first_return=math.nan, score=math.nan, best_score=-math.inf,
                          compliant=False)  # fmt: skip
    torch.manual_seed(args.seed)  # so that actions do not depend on how many weights were drawn
    next_obs, _ = vec_env.reset(seed=args.seed)
    if args.resume:
        vars(run).update(checkpoint["run"])
        if any(getattr(args, x) != checkpoint["args"][x] for x in ("compliance_threshold", "min_episodes")):
            run.compliant = False  # the new ones have not been met yet
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
          f"epochs x {args.num_minibatches} minibatches, {type(vec_env.unwrapped).__name__}: {logdir}")  # fmt: skip
    if args.compile:
        print("The first update compiles the gradient steps, which takes 10 to 30 s (--no-compile: none).", flush=True)
    if args.track is not None:
        import wandb

        wandb.init(project=args.track, id=logdir.name, resume="allow", config=asdict(args), sync_tensorboard=True,
                   reinit="finish_previous")  # fmt: skip
    writer = SummaryWriter(str(logdir), purge_step=run.global_step + 1)
    # Each number of an evaluation is nan where there is none, so that the columns of progress.csv are always the same.
    no_episodes = dict.fromkeys(args.red_agents, (np.full((1, 1), math.nan), math.nan, np.zeros((0, len(VERDICTS)))))
    no_evaluation = summarize(no_episodes, args.max_steps, args.finite_horizon, args.workflow is not None)
    all_steps, first_end, stopping = args.num_updates * args.batch_size, run.global_step + args.batch_size, False
    while run.global_step < all_steps and not stopping and not run.compliant:
        started = time.perf_counter()
        progress = run.global_step / all_steps
        annealing = {"linear": 1 - progress, "exponential": 0.01**progress, "none": 1.0}  # detail 4
        adam["learning_rate"] = torch.tensor(args.learning_rate * annealing[args.lr_decay], device=args.device)
        ent_coef: Any = torch.tensor(args.ent_coef * annealing[args.ent_decay], device=args.device)
        loss_args = replace(args, ent_coef=ent_coef)  # a tensor: each new number would be compiled into new code
        # --- collect --------------------------------------------------------------------------------------------------
        rows: list[tuple[Tensor, ...]] = []  # of each step: obs, actions, rewards, terminated, truncated, raw rewards
        cuts: list[tuple[int, int, np.ndarray]] = []  # (t, n, final observation) where a time limit cut an episode
        ended: list[tuple[float, int, float]] = []  # (return, length, return / length) of each episode that ended
        fixes: list[np.ndarray] = []  # by verdict, of the episodes that ended in each step, (num_ended, 4)
        for t in range(args.num_steps):
            obs = torch.as_tensor(next_obs, device=args.device)
            with torch.no_grad():
                actions = agent.policy(obs).sample()
            next_obs, rewards, terminated, truncated, infos = vec_env.step(actions.cpu().numpy())
            rewards = args.reward_scale * (rewards + infos.get("alignment", 0.0))
            rows.append((obs, actions, *map(torch.as_tensor, (rewards, terminated, truncated, infos["raw_reward"]))))
            ended += infos["ended"]
            if args.workflow is not None:
                fixes.append(infos["fixes"][infos["ended_envs"]])
            cuts += [(t, n, infos["final_obs"][n]) for n in np.flatnonzero(truncated & ~terminated).tolist()]
        # --- log-probabilities, values, bootstrap ---------------------------------------------------------------------
        obs, actions, *others = (torch.stack(x) for x in zip(*rows, strict=True))  # now (num_steps, num_envs, ...)
        rewards, terminated, truncated, raw_rewards = (x.to(args.device, torch.float32) for x in others)
        with torch.no_grad():  # the policy is still the one that acted, and one pass over the batch is fast
            log_probs, values = evaluate_actions(agent, obs, actions)
            next_values = torch.cat([values[1:], agent.get_value(torch.as_tensor(next_obs, device=args.device))[None]])
            if cuts:  # there, values[t + 1] is of the reset state: V of the final observation replaces it
                times, envs, final_obs = zip(*cuts, strict=True)
                next_values[times, envs] = agent.get_value(torch.as_tensor(np.stack(final_obs), device=args.device))
        # --- advantages -----------------------------------------------------------------------------------------------
        gamma = args.gamma
        advantages, returns = compute_gae(rewards, values, next_values, terminated, truncated, gamma, args.gae_lambda)
        if args.norm_adv not in ("minibatch", "none"):
            advantages = normalize_advantages(advantages, dim={"batch": None, "per_env": 0}[args.norm_adv])
        # --- update ---------------------------------------------------------------------------------------------------
        batch = Batch(*(x.flatten(0, 1) for x in (obs, actions, log_probs, values, advantages, returns)))
        results: list[dict[str, Tensor]] = []  # of each call: the metrics of its steps_per_call gradient steps
        for _ in range(args.update_epochs):
            order = torch.randperm(len(batch.obs), device=args.device)  # detail 6: each transition once an epoch
            for indices in order.view(-1, steps_per_call, args.batch_size // args.num_minibatches):
                results.append(optimize(agent, loss_args, weights, adam, Batch(*(x[indices] for x in batch))))
            run.epochs += 1
            run.minibatch_updates += args.num_minibatches
            epoch_kl = torch.cat([x["approx_kl"] for x in results]).view(-1, args.num_minibatches)[-1].mean()
            if args.target_kl is not None and epoch_kl > args.target_kl:
                break
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
        threshold: Any = args.compliance_threshold
        evaluation, training_complies = no_evaluation, False
        if threshold is not None:  # once the sampled actions of training comply, deterministic ones are judged
            training_complies = is_compliant(vec_env.recent, vec_env.episodes, threshold, args.min_episodes)
            evaluating |= training_complies
        if evaluating:
            evaluation = score(agent, args, args.eval_episodes)
            run.score = evaluation["score"]
            upper = evaluation["mean_return"] + float(np.nan_to_num(evaluation["standard_error"]))  # nan: 1 episode
            run.compliant = training_complies and evaluation["compliance"] >= threshold and upper >= run.first_return
            if math.isnan(run.first_return):  # so the first evaluation confirms nothing
                run.first_return = evaluation["mean_return"]
        # --- log ------------------------------------------------------------------------------------------------------
        episodic_return, episodic_length, _ = np.mean(ended, axis=0).tolist() if ended else [math.nan] * 3
        if ended:
            run.training_return = episodic_return
        run.resets += len(ended)
        record = {f"train/{name}": value for name, value in metrics.items()} | {
            "train/explained_variance": explained_variance(batch.values, batch.returns),
            "train/value_abs_error": float((batch.values - batch.returns).abs().mean()),
            "train/learning_rate": float(adam["learning_rate"]),
            "train/ent_coef": float(ent_coef),
            "rollout/episodic_return": episodic_return,
            "rollout/episodic_length": episodic_length,
            "rollout/mean_reward": raw_rewards.mean().item(),
            "time/sps": args.batch_size / seconds,
            "counters/train_steps": run.global_step // args.num_envs,
        }
        record |= {f"counters/{x}": vars(run)[x] for x in ("rollouts", "resets", "epochs", "minibatch_updates")}
        if args.workflow is not None:
            record |= {f"rollout/{name}": value for name, value in fix_metrics(np.concatenate(fixes)).items()}
        record |= {f"eval/{name}": value for name, value in evaluation.items()}
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
        line += f"score {run.score:.2f}, KL {metrics['approx_kl']:.4f}{left}"
        # --- save -----------------------------------------------------------------------------------------------------
        stopping = bool(signals)
        saving = run.rollouts == 1 or run.global_step % (args.save_every or math.inf) < args.batch_size
        if saving or evaluating or stopping:
            state = {"format": FORMAT, "args": asdict(args) | {"resume": False, "logdir": str(logdir)}, "adam": adam,
                     "run": vars(run), "agent": agent.state_dict(), "envs": vec_env.get_state(), "obs": next_obs,
                     "generator": torch.get_rng_state()}  # fmt: skip
            if run.compliant or run.score > run.best_score:  # a confirmed policy is the best, whatever its score
                run.best_score = run.score  # in `state` too
                save(logdir / "best.pt", state)
                (logdir / "best.json").write_text(json.dumps({"problem": args.game, "score": run.best_score}))
            save(logdir / "latest.pt", state)
            vec_env.unwrapped.advice = f"Go on: python {sys.argv[0]} --resume --logdir {logdir}"
        is_terminal = sys.stdout is not None and sys.stdout.isatty()  # after saving: a pipe may be closed
        print(f"\r\033[K\033[?7l{line}\033[?7h" if is_terminal else line, end="" if is_terminal else "\n", flush=True)
        if run.compliant:
            judged = ROW.format(**evaluation, workflow=args.workflow, confirmed=True)
            print(f"\n{judged} (the first evaluation's return was {run.first_return:.2f})")
    for resource in (vec_env, writer, log):
        resource.close()
    end = ", ended by --compliance-threshold" if run.compliant else ""
    print(f"\n{run.global_step:,} steps in {run.seconds:.0f} s of training, score {run.score:.2f}{end}: {logdir}")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a bad best.json costs only this line
        runs = [(json.loads(path.read_text()), str(path.parent)) for path in logdir.parent.glob("*/best.json")]
        best_score, best_run = max((best["score"], folder) for best, folder in runs if best["problem"] == args.game)
        print(f"best of all runs of this game: {best_score:.2f}, {best_run}")
    if signals and run.global_step < all_steps and not run.compliant:
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


def load_agent(checkpoint: dict[str, Any], args: Args) -> Agent:
    """The agent of a checkpoint, for the environments of `args`."""
    with contextlib.closing(make_envs(args, 1)) as vec_env:
        agent = Agent(vec_env, args)
    load_policy(checkpoint, agent)
    return agent


# ---- Searching for a good workflow -----------------------------------------------------------------------------------
@dataclass
class SearchArgs:
    n_workflows: int = 20  # orders to try
    n_start: int = 3  # of them, drawn at random before the Gaussian process chooses
    gp_beta: float | None = 4.0  # next: the order of largest mean + sqrt(beta) std; None: a fifth of Srinivas' schedule
    gp_scale: float = 0.2  # lambda of the Mallows kernel: at 0.2, orders that differ in 3 pairs correlate by 0.55
    judge_episodes: int = 1000  # episodes against each red agent that an order is judged by, the same for all orders
    shared_timesteps: int = 5_000_000  # total timesteps, 256 x --num-steps or more, of the policy that all start from
    fresh_policy_per_order: bool = False  # begin each order with random weights instead; add --learning-rate 0.002


ROW = "{workflow}: return {mean_return:.2f} +- {standard_error:.2f}, compliance {compliance:.3f}, strict "
ROW += "{strict_compliance:.3f}, confirmed: {confirmed}"  # of the table of orders, and of a run that compliance stops


def search(options: SearchArgs, args: Args, signals: list[int] | None = None) -> list[dict[str, Any]]:
    """Search for the workflow of the largest return: GP-UCB over all 120 orders, a policy trained for each order tried.

    Flags of training (see --help without search) change the preset search, by which each order is trained. --red-agent
    and flags that the preset does not set also change the shared policy, trained first if --init-from names none. The
    folder (--logdir, default runs/search__{red agent}__{seed}) gets history.json and a run folder for each order. A
    search that was stopped or killed, even within a training, goes on by the same command, also with more orders.
    """
    check_ranges(options)
    has_one_start = not (args.init_from and options.fresh_policy_per_order)
    require(has_one_start, "--init-from and --fresh-policy-per-order are two ways to start: choose one.")
    folder = Path(args.logdir or f"runs/search__{args.red_agent}__{args.seed}")
    path = folder / "history.json"
    settings = json.loads(json.dumps(asdict(args) | asdict(options) | HERE | {"logdir": None, "n_workflows": None}))
    try:
        saved = json.loads(path.read_text()) if path.exists() else {"settings": settings, "history": []}
        history, tried = saved["history"], [parse_workflow(x["workflow"]) for x in saved["history"]]
        changed = [f"{x} = {saved['settings'].get(x)}" for x in settings if settings[x] != saved["settings"].get(x)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OSError(f"{path} is damaged: choose another --logdir.") from None
    require(not changed, f"{folder} holds a search of {', '.join(changed)}: go on with it, or name another --logdir.")

    def run_args(name: str, **changes: Any) -> Args:
        return replace(args, logdir=str(folder / name), resume=(folder / name / "latest.pt").exists(), **changes)

    # The shared policy has the script's defaults for what the preset search sets, whatever flags say instead.
    defaults = {name: getattr(Args, name) for name in PRESETS["search"]}
    defaults |= {"workflow": "any", "red_agent": args.red_agent, "total_timesteps": options.shared_timesteps}
    needs_shared = not (args.init_from or options.fresh_policy_per_order)
    shared = run_args("shared", **defaults) if needs_shared else None  # may refuse, like load(): before a file is made
    if args.init_from and not path.exists():  # a search that goes on has passed this
        load_agent(load(Path(args.init_from)), args)
    folder.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(saved, indent=1))  # before training: it fixes the settings
    os.replace(path.with_suffix(".tmp"), path)
    start = train(shared, signals)["logdir"] + "/latest.pt" if shared else args.init_from
    while len(history) < options.n_workflows and not signals:
        returns, errors = [x["mean_return"] for x in history], [x["standard_error"] for x in history]
        order = next_order(tried, returns, errors, options.gp_scale, options.gp_beta, options.n_start, args.seed)
        name = f"{len(history) + 1:03d}_{'-'.join(ORDERS[order])}"
        order_args = run_args(name, workflow=",".join(ORDERS[order]), init_from=start)
        result = train(order_args, signals)
        if signals:
            break
        agent = load_agent(load(folder / name / "latest.pt"), order_args)
        judged = score(agent, order_args, options.judge_episodes, seed=1_000_000)
        record = {"workflow": order_args.workflow, "confirmed": result["compliant"], "steps": result["global_step"]}
        history.append(record | {"run": name} | judged)
        tried.append(order)
        path.with_suffix(".tmp").write_text(json.dumps(saved, indent=1))  # `history` is in it
        os.replace(path.with_suffix(".tmp"), path)
        print(ROW.format(**history[-1]))
    if signals:
        print("The same search command goes on with all of it; a line with --resume, if any, with that training alone.")
        return history
    print("\nOrders by return", *(ROW.format(**x) for x in sorted(history, key=lambda x: -x["mean_return"])), sep="\n")
    return history


# ---- Playing and the command line ------------------------------------------------------------------------------------
@dataclass
class PlayArgs:
    logdir: str | None = None  # run folder; not needed if --checkpoint is the path of a file
    checkpoint: str = "best"  # best, latest, or the path of a .pt file: a name in --logdir, if that is given
    red_agent: Literal["mixed", "b_line", "meander", "sleep"] | None = None  # mixed: all; default: as in training
    workflow: str | None = None  # the order to tell a policy that was trained with workflows; default: as in training
    episodes: int = 1  # episodes to play against each red agent
    seed: int = 0  # seed of the first episode; each further one gets the next number
    stochastic: bool = False  # sample the actions instead of taking the policy's mode
    render: bool = False  # print the game before each step
    save_gif: bool = False  # write a GIF of each episode
    gif_fps: int = 4  # pictures per second of a GIF, up to 50
    gif_frames: int = 300  # most pictures of a GIF
    gif_dir: str | None = None  # folder of the GIFs; default: gifs, beside the checkpoint


def compliance_text(args: Args, fixes: list[np.ndarray]) -> str:
    """Compliance of episodes, from the fixes by verdict of each, (4,); nothing without a workflow."""
    metrics = fix_metrics(np.stack(fixes)) if args.workflow is not None else {}
    return "".join(f", {name} {value:.3f}" for name, value in metrics.items())


def play(options: PlayArgs) -> dict[str, list[float]]:
    """Play a checkpoint's policy against each red agent and print each episode; returns the returns by red agent."""
    check_ranges(options)
    path = Path(options.logdir or "", str(options.checkpoint).removesuffix(".pt") + ".pt")
    checkpoint = load(path)
    args = Args(**checkpoint["args"] | HERE)
    require(args.workflow or not options.workflow, "This policy was trained without a workflow: leave --workflow out.")
    args = replace(args, workflow=options.workflow or args.workflow, red_agent=options.red_agent or args.red_agent)
    agent = load_agent(checkpoint, args)
    render_mode = "human" if options.render else "rgb_array" if options.save_gif else None
    folder = options.gif_dir or path.parent / "gifs"
    returns: dict[str, list[float]] = {red_agent: [] for red_agent in args.red_agents}
    all_fixes: dict[str, list[np.ndarray]] = {red_agent: [] for red_agent in args.red_agents}
    for red_agent in args.red_agents:
        vec_env = make_envs(replace(args, red_agent=red_agent), 1, render_mode)
        if options.save_gif:
            vec_env = RecordGif(vec_env, folder, options.gif_fps, options.gif_frames, f"{red_agent}_", size=760)
        for i in range(options.episodes):
            torch.manual_seed(options.seed + i)  # of sampled actions
            rewards, (length,), fixes = evaluate(agent, vec_env, options.seed + i, not options.stochastic)
            returns[red_agent].append(float(rewards.sum()))
            all_fixes[red_agent] += [*fixes]
            end = compliance_text(args, [*fixes])
            print(f"{red_agent}, episode {i + 1}: return {rewards.sum():.2f}, {length} steps{end}", flush=True)
        vec_env.close()
    for red_agent, totals in returns.items():
        end = compliance_text(args, all_fixes[red_agent])
        print(f"{red_agent}: mean return {np.mean(totals):.2f}, standard deviation {np.std(totals):.2f}{end}")
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
        if argv[:1] == ["search"]:
            command: Any = {"prog": f"{SCRIPT}.py search", "description": search.__doc__, "return_unknown_args": True}
            options, flags = tyro.cli(SearchArgs, args=argv[1:], **command)
            refused = {"--resume", "--workflow"} & {flag.split("=")[0] for flag in flags}
            require(not refused, "A search tries all orders; its command continues it: leave out --resume, --workflow.")
            named, _ = tyro.cli(RunArgs, args=flags, add_help=False, return_unknown_args=True)
            search(options, parse_args([*flags, "--configs", "search", *named.configs]), signals)
        else:
            train(parse_args(argv[1:] if argv[:1] == ["train"] else argv), signals)
    except (UsageError, gym.error.Error, ImportError, OSError, FloatingPointError, WorkerError) as error:
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 2 if isinstance(error, UsageError | gym.error.Error | ImportError) else 1
    return 128 + signals[0] if signals else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
