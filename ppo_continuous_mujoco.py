"""PPO for continuous actions: MuJoCo robots, and continuing tasks that never end.

    python ppo_continuous_mujoco.py --configs halfcheetah              # HalfCheetah-v5 learns to run
    python ppo_continuous_mujoco.py --resume --logdir runs/...         # continue a run, on a CPU bit for bit
    python ppo_continuous_mujoco.py play --logdir runs/... --save-gif  # film the best policy of a run

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
from torch.distributions import Independent, Normal
from torch.utils._pytree import tree_map
from torch.utils.tensorboard import SummaryWriter

from envs import ClipAction, NormalizeObservation, NormalizeReward, RecordGif, RunningMeanStd, WorkerError, vectorize

SCRIPT, FORMAT = Path(__file__).stem, "ppo_continuous_mujoco/3"  # what a checkpoint holds; /4 if a copy changes that
HERE: dict[str, Any] = {"device": "cpu"}  # in place of a file's values, to open it anywhere


class UsageError(ValueError):
    """A mistake in what was asked for; the message says, in one sentence, what to change."""


def require(condition: Any, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


# ---- Arguments: --help shows the comments ----------------------------------------------------------------------------
@dataclass
class RunArgs:
    configs: tuple[str, ...] = ()  # presets, layered from left to right; flags win over them
    env_id: str = "HalfCheetah-v5"  # Gymnasium id; observations and actions are real vectors; your own: my_module:Id-v0
    seed: int = 1  # seed of networks, sampling and environments (environment n gets seed + n)
    total_timesteps: int = 1_000_000  # environment steps of the whole run, rounded down to whole batches
    logdir: str | None = None  # run folder; default runs/{env_id}__{script}__{seed}__{time}
    resume: bool = False  # continue the run in --logdir, with its arguments; flags given now win (seed and task stay)
    init_from: str | None = None  # checkpoint whose networks and observation statistics the run starts from
    device: str = "cpu"  # torch device: cpu, cuda, cuda:1 (minibatches this small are faster on a CPU)
    compile: bool = True  # torch.compile the gradient steps: HalfCheetah is 3 times as fast, after 10 to 30 s
    eval_every: int = 100_000  # environment steps between evaluations; 0: only at the end
    eval_episodes: int = 10  # episodes of an evaluation, with fixed seeds and deterministic actions
    save_every: int = 100_000  # environment steps between writes of latest.pt; evaluations and the end write it too
    track: str | None = None  # Weights & Biases project to log to as well (pip install wandb; WANDB_ENTITY works too)


@dataclass
class EnvironmentArgs:
    num_envs: int = 16  # parallel environments N
    num_workers: int | None = None  # threads or processes that step them; default: the CPU cores
    step_timeout: float = 300.0  # seconds after which a worker process that has not finished its step counts as hung
    on_worker_failure: Literal["raise", "restart"] = "raise"  # a lost worker process ends the run, or is replaced
    reset_steps: int | None = None  # time limit of episodes in steps (a truncation); default: the task's own
    norm_obs: bool = True  # normalise observations by running mean and deviation, clip to +-10; off: --init-from's stay
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return, clip to +-10
    time_scaled_reward: bool = False  # divide each reward by its step's number in the episode (growing costs look flat)


@dataclass
class PPOArgs:
    num_steps: int = 128  # steps T per environment and rollout; a batch is N*T transitions
    learning_rate: float = 3e-4  # Adam's step size at the start
    critic_learning_rate: float | None = None  # that of the critic's weights; default: the same
    lr_decay: Literal["linear", "exponential", "none"] = "linear"  # to 0, to a hundredth, or constant
    gamma: float = 0.99  # discount per step, at the start of the run
    horizon_growth: float = 1.0  # factor by which 1 / (1 - gamma), how far the policy looks ahead, grows over the run
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation: 0 trusts the critic, 1 the sampled return
    average_reward_rate: float | None = None  # maximise the mean reward, undiscounted; weight of the newest rollout
    num_minibatches: int = 32  # minibatches of an epoch; must divide N*T
    update_epochs: int = 10  # passes over each batch
    norm_adv: Literal["minibatch", "batch", "per_env", "none"] = "minibatch"  # what advantages are normalised over
    clip_coef: float = 0.2  # epsilon: a probability ratio earns nothing beyond 1 +- epsilon
    clip_vloss: bool = False  # clip the critic's change too (OpenAI Baselines; later studies found no gain)
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss, which is half the mean squared error
    max_grad_norm: float | None = 0.5  # global l2 norm that gradients are clipped to; None: no clipping
    target_kl: float | None = None  # end an update after an epoch whose mean KL (k3) exceeds this; None: never
    hidden_sizes: tuple[int, ...] = (64, 64)  # tanh units in the layers of actor and critic
    log_std_init: float = 0.0  # initial log standard deviation of the actions


RANGES = {  # lowest and highest values; None passes
    "num_envs num_workers reset_steps eval_episodes num_steps num_minibatches update_epochs hidden_sizes": (1, 1e6),
    "seed total_timesteps eval_every save_every ent_coef vf_coef": (0, 2**32 - 1),
    "learning_rate critic_learning_rate clip_coef max_grad_norm target_kl step_timeout": (1e-9, 1e9),
    "gamma gae_lambda average_reward_rate": (0, 1),
    "log_std_init": (-20, 20),
    "episodes gif_frames horizon_growth": (1, 1e6),
    "gif_fps": (1, 50),
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
        require(self.gamma < 1 or self.average_reward_rate, "--gamma 1 needs an --average-reward-rate, such as 0.1.")


PRESETS: dict[str, dict[str, Any]] = {
    "debug": {"total_timesteps": 10_240, "num_envs": 4, "num_steps": 64, "num_minibatches": 4, "update_epochs": 2,
              "eval_every": 5_000, "eval_episodes": 2, "save_every": 2_500, "compile": False},
    "cleanrl": {"num_envs": 1, "num_steps": 2048, "clip_vloss": True},  # as in CleanRL's ppo_continuous_action.py
    "halfcheetah": {"gamma": 0.98, "gae_lambda": 0.92, "vf_coef": 0.25, "log_std_init": -1.0},
    "humanoid": {"env_id": "Humanoid-v5", "gae_lambda": 0.8, "num_envs": 8, "num_minibatches": 8, "update_epochs": 5,
                 "learning_rate": 2e-4, "norm_adv": "none", "vf_coef": 0.25, "log_std_init": -1.0},
    "walker": {"env_id": "Walker2d-v5", "norm_adv": "none", "vf_coef": 0.25, "log_std_init": -0.5},
    "swimmer": {"env_id": "Swimmer-v5", "gamma": 0.9999, "gae_lambda": 0.98, "num_envs": 4, "num_steps": 1024,
                "num_minibatches": 16, "learning_rate": 6e-4, "log_std_init": 0.5},
    "queue": {"env_id": "TwoQueue-v0", "average_reward_rate": 0.1, "norm_reward": False, "reset_steps": 512,
              "num_steps": 32, "num_minibatches": 4, "total_timesteps": 200_000, "eval_every": 50_000},
}  # fmt: skip
PRESETS["hopper"] = PRESETS["walker"] | {"env_id": "Hopper-v5", "update_epochs": 5, "horizon_growth": 2.0}
PRESETS["ant"] = PRESETS["humanoid"] | {"env_id": "Ant-v5", "horizon_growth": 4.0}


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


class Agent(nn.Module):
    """A Gaussian policy whose standard deviation does not depend on the state, and a critic: two networks."""

    def __init__(self, envs: Any, args: Args) -> None:
        super().__init__()
        (obs_dim,), (action_dim,) = envs.single_observation_space.shape, envs.single_action_space.shape
        # details 13, 26: nothing is shared. A policy head of gain 0.01 starts near mean 0 for every observation.
        self.actor_mean = mlp([obs_dim, *args.hidden_sizes, action_dim], output_gain=0.01)
        self.actor_log_std = nn.Parameter(torch.full((action_dim,), args.log_std_init))  # detail 24
        self.critic = mlp([obs_dim, *args.hidden_sizes, 1], output_gain=1.0)  # --critic-learning-rate goes by this name

    def policy(self, obs: Tensor) -> Independent:
        """(batch, obs_dim) -> a distribution of actions (batch, action_dim), asked for sample(), mode, log_prob()
        and entropy(), the last two (batch,): components are independent, so theirs add up (details 23, 25)."""
        mean = self.actor_mean(obs)
        components = Normal(mean, self.actor_log_std.exp().expand_as(mean), validate_args=False)
        return Independent(components, 1, validate_args=False)

    def get_value(self, obs: Tensor) -> Tensor:
        """(batch, obs_dim) -> V(s), (batch,)."""
        return self.critic(obs).squeeze(-1)

    def forward(self, obs: Tensor) -> tuple[Independent, Tensor]:
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
    actions: Tensor  # as they were sampled, before clipping to the action space
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
    """One environment. A wrapper put around it here acts in training, evaluation and play; processes then step it."""
    kwargs: Any = {"render_mode": render_mode} if render_mode else {}  # not every environment takes the argument
    env = gym.make(args.env_id, max_episode_steps=args.reset_steps, **kwargs)
    return env


def make_envs(args: Args, num_envs: int, statistics: Any = None, render_mode: str | None = None) -> Any:
    """`num_envs` environments that begin the next episode in the step that ends one (SAME_STEP). envs/episodes.py says
    what infos hold. Observations and rewards are normalised; with a run's `statistics` by these, and rewards not."""
    settings = args.num_workers, args.step_timeout, args.on_worker_failure
    vec_env: Any = vectorize(lambda: make_env(args, render_mode), num_envs, *settings)
    for name, space in (("observation", vec_env.single_observation_space), ("action", vec_env.single_action_space)):
        is_vector = isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f"
        require(is_vector, f"An {name} of {args.env_id} is {space}, no vector of floats: see docs/copying.md.")
    vec_env = ClipAction(vec_env)  # detail 27: only the environments see the clipped ones
    if statistics is None and args.norm_reward:  # details 30, 31; by the discount at the start
        vec_env = NormalizeReward(vec_env, args.gamma if args.gamma < 1 else 0.99)  # a sum without one grows for ever
    training = args.norm_obs and statistics is None  # else they stay: mean 0, variance 1, or --init-from's
    return NormalizeObservation(vec_env, statistics, training, 10.0 if args.norm_obs else math.inf)  # details 28, 29


@torch.no_grad()
def evaluate(agent: Agent, vec_env: Any, seed: int = 10_000, deterministic: bool = True) -> tuple[np.ndarray, ...]:
    """Play an episode in each of `vec_env`, the i-th from seed + i. Returns their returns and lengths, (num_envs,)."""
    returns, lengths = np.zeros(vec_env.num_envs), np.zeros(vec_env.num_envs, dtype=int)
    running = np.ones(vec_env.num_envs, dtype=bool)  # only the first episode of each environment counts
    obs, _ = vec_env.reset(seed=seed)
    limit = getattr(vec_env.unwrapped.spec, "max_episode_steps", None) or 1000  # none in its spec: 1,000 steps
    while running.any():
        policy = agent.policy(torch.as_tensor(obs, device=next(agent.parameters()).device))
        actions = policy.mode if deterministic else policy.sample()
        obs, _, terminated, truncated, infos = vec_env.step(actions.cpu().numpy())
        returns[running], lengths[running] = infos["episode_return"][running], infos["episode_length"][running]
        running &= (~(terminated | truncated) | infos["worker_restarted"]) & (lengths < limit)  # lost: anew
    return returns, lengths


# ---- Training --------------------------------------------------------------------------------------------------------
def train(args: Args, signals: list[int] | None = None) -> dict[str, Any]:
    """Train, evaluate and save as `args` say; a signal in `signals`, which `main` fills, ends the run after its update.
    Returns the run folder and the state of `run` below. Raises what `main` catches."""
    args = replace(args, **tree_map(lambda x: x.item() if isinstance(x, np.generic) else x, asdict(args)))  # no NumPy
    torch.set_num_threads(1)  # minibatches this small gain nothing from more
    torch.manual_seed(args.seed)
    vec_env = make_envs(args, args.num_envs)
    agent = Agent(vec_env, args).to(args.device)
    checkpoint = load(Path(args.init_from)) if args.init_from and not args.resume else {}
    # --- run folder: locked before it is read; weights, optimiser, and where a resumed run stood ----------------------
    task, problem = args.env_id.replace("/", "_").replace(":", "_"), f"{args.env_id} {args.reset_steps}"
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
            require(name not in ("seed", "env_id", "reset_steps", "norm_reward"), f"A resumed run keeps its {name}.")
            print(f"--{name.replace('_', '-')} is {getattr(args, name)} from now on; it was {value}.")
    if checkpoint:
        load_policy(checkpoint, agent, vec_env.statistics)
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()  # one vector: Adam then takes few operations
    nn.utils.vector_to_parameters(weights, agent.parameters())  # views of it: what changes `weights` changes the agent
    actor_rate, critic_rate = args.learning_rate, args.critic_learning_rate or args.learning_rate
    rates = ((p, critic_rate if name.startswith("critic") else actor_rate) for name, p in agent.named_parameters())
    learning_rates = nn.utils.parameters_to_vector(torch.full_like(p, rate) for p, rate in rates)
    adam = {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights), "step": weights.new_zeros(())}
    torch._dynamo.config.trace_autograd_ops = True  # the compiler then sees through torch.autograd.grad
    torch._dynamo.config.recompile_limit = 1000  # of one process, which may be a sweep over many runs
    options: Any = {"cpp_wrapper": args.device == "cpu", "cpp.use_decompose_tanh": True}  # the latter vectorises tanh
    optimize: Any = torch.compile(take_steps, dynamic=False, options=options) if args.compile else take_steps
    steps_per_call = math.gcd(4, args.num_minibatches)  # gradient steps; compiled, 1 a call is 50 % slower than 4
    run = SimpleNamespace(global_step=0, rollouts=0, resets=0, epochs=0, minibatch_updates=0, seconds=0.0, csv_size=0,
                          average_reward=0.0, best_LTA=-math.inf, training_return=math.nan, mean_return=math.nan,
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
          f"epochs x {args.num_minibatches} minibatches, {type(vec_env.unwrapped).__name__}: {logdir}")  # fmt: skip
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
        annealing = {"linear": 1 - progress, "exponential": 0.01**progress, "none": 1.0}[args.lr_decay]  # detail 4
        adam["learning_rate"] = learning_rates * annealing  # a tensor: each new number would be compiled in
        # --- collect --------------------------------------------------------------------------------------------------
        rows: list[tuple[Tensor, ...]] = []  # of each step: obs, actions, rewards, terminated, truncated, raw rewards
        cuts: list[tuple[int, int, np.ndarray]] = []  # (t, n, final observation) where a time limit cut an episode
        ended: list[tuple[float, int, float]] = []  # (return, length, return / length) of each episode that ended
        for t in range(args.num_steps):
            obs = torch.as_tensor(next_obs, device=args.device)
            with torch.no_grad():
                actions = agent.policy(obs).sample()
            next_obs, rewards, terminated, truncated, infos = vec_env.step(actions.cpu().numpy())
            rewards = rewards / infos["episode_length"] if args.time_scaled_reward else rewards
            rows.append((obs, actions, *map(torch.as_tensor, (rewards, terminated, truncated, infos["raw_reward"]))))
            ended += infos["ended"]
            cuts += [(t, n, infos["final_obs"][n]) for n in np.flatnonzero(truncated & ~terminated).tolist()]
        # --- log-probabilities, values, bootstrap ---------------------------------------------------------------------
        obs, actions, *others = (torch.stack(x) for x in zip(*rows, strict=True))  # now (num_steps, num_envs, ...)
        rewards, terminated, truncated, raw_rewards = (x.to(args.device, torch.float32) for x in others)
        with torch.no_grad():  # the policy is still the one that acted, and one pass over the batch is fast
            policy, values = agent(obs.flatten(0, 1))
            log_probs, values = policy.log_prob(actions.flatten(0, 1)).view_as(rewards), values.view_as(rewards)
            next_values = torch.cat([values[1:], agent.get_value(torch.as_tensor(next_obs, device=args.device))[None]])
            if cuts:  # there, values[t + 1] is of the reset state: V of the final observation replaces it
                times, envs, final_obs = zip(*cuts, strict=True)
                next_values[times, envs] = agent.get_value(torch.as_tensor(np.stack(final_obs), device=args.device))
        # --- advantages -----------------------------------------------------------------------------------------------
        gamma = 1 - (1 - args.gamma) / args.horizon_growth**progress
        if args.average_reward_rate:  # differential values: r - average + V(s') - V(s), without gamma
            share = args.average_reward_rate if run.average_reward else 1.0  # of none yet: the mean itself
            run.average_reward += share * (rewards.mean().item() - run.average_reward)
            rewards, gamma = rewards - run.average_reward, 1.0
            # A fall is no end here: V(s') after it is the reset state's, which is the next row's, and it counts.
            terminated, truncated = torch.zeros_like(terminated), truncated * (1 - terminated)
        advantages, returns = compute_gae(rewards, values, next_values, terminated, truncated, gamma, args.gae_lambda)
        if args.norm_adv not in ("minibatch", "none"):
            advantages = normalize_advantages(advantages, dim={"batch": None, "per_env": 0}[args.norm_adv])
        # --- update ---------------------------------------------------------------------------------------------------
        batch = Batch(*(x.flatten(0, 1) for x in (obs, actions, log_probs, values, advantages, returns)))
        results: list[dict[str, Tensor]] = []  # of each call: the metrics of its steps_per_call gradient steps
        for _ in range(args.update_epochs):
            order = torch.randperm(len(batch.obs), device=args.device)  # detail 6: each transition once an epoch
            for indices in order.view(-1, steps_per_call, args.batch_size // args.num_minibatches):
                results.append(optimize(agent, args, weights, adam, Batch(*(x[indices] for x in batch))))
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
        eval_returns = eval_lengths = np.array([math.nan])
        if evaluating:
            with contextlib.closing(make_envs(args, args.eval_episodes, vec_env.statistics)) as eval_envs:
                eval_returns, eval_lengths = evaluate(agent, eval_envs)
            run.mean_return = float(eval_returns.mean())
        # --- log ------------------------------------------------------------------------------------------------------
        episodic_return, episodic_length, LTA = np.mean(ended, axis=0).tolist() if ended else [math.nan] * 3
        if ended:
            run.best_LTA, run.training_return = max(run.best_LTA, LTA), episodic_return
        run.resets += len(ended)
        record = {f"train/{name}": value for name, value in metrics.items()} | {
            "train/explained_variance": explained_variance(batch.values, batch.returns),
            "train/value_abs_error": float((batch.values - batch.returns).abs().mean()),
            "train/learning_rate": args.learning_rate * annealing,
            "train/average_reward": run.average_reward,
            "train/best_LTA": run.best_LTA,
            "rollout/episodic_return": episodic_return,
            "rollout/episodic_length": episodic_length,
            "rollout/LTA_return": LTA,  # long-term average: return / length
            "rollout/mean_reward": raw_rewards.mean().item(),
            "eval/mean_return": eval_returns.mean(),
            "eval/std_return": eval_returns.std(),
            "eval/mean_length": eval_lengths.mean(),
            "time/sps": args.batch_size / seconds,
            "counters/train_steps": run.global_step // args.num_envs,
        }
        record |= {f"counters/{x}": vars(run)[x] for x in ("rollouts", "resets", "epochs", "minibatch_updates")}
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
        line += f"evaluation {run.mean_return:.2f}, KL {metrics['approx_kl']:.4f}{left}"
        # --- save -----------------------------------------------------------------------------------------------------
        stopping = bool(signals)
        saving = run.rollouts == 1 or run.global_step % (args.save_every or math.inf) < args.batch_size
        if saving or evaluating or stopping:
            state = {"format": FORMAT, "args": asdict(args) | {"resume": False, "logdir": str(logdir)}, "adam": adam,
                     "run": vars(run), "agent": agent.state_dict(), "statistics": vec_env.statistics.get_state(),
                     "envs": vec_env.get_state(), "obs": next_obs, "generator": torch.get_rng_state()}  # fmt: skip
            if run.mean_return > run.best_return:
                run.best_return = run.mean_return  # in `state` too
                save(logdir / "best.pt", state)
                (logdir / "best.json").write_text(json.dumps({"problem": problem, "score": run.best_return}))
            save(logdir / "latest.pt", state)
            vec_env.unwrapped.advice = f"Go on: python {sys.argv[0]} --env-id {args.env_id} --resume --logdir {logdir}"
        is_terminal = sys.stdout is not None and sys.stdout.isatty()  # after saving: a pipe may be closed
        print(f"\r\033[K\033[?7l{line}\033[?7h" if is_terminal else line, end="" if is_terminal else "\n", flush=True)
    for resource in (vec_env, writer, log):
        resource.close()
    print(f"\n{run.global_step:,} steps in {run.seconds:.0f} s of training, evaluation {run.mean_return:.2f}: {logdir}")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a bad best.json costs only this line
        runs = [(json.loads(path.read_text()), str(path.parent)) for path in logdir.parent.glob("*/best.json")]
        score, best_run = max((best["score"], folder) for best, folder in runs if best["problem"] == problem)
        print(f"best of all runs of {args.env_id}: {score:.2f}, {best_run}")
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


def load_policy(checkpoint: dict[str, Any], agent: Agent, statistics: RunningMeanStd) -> None:
    """Put the weights of a checkpoint into `agent`, and its statistics of observations into `statistics`."""
    here, saved = ({(name, *x.shape) for name, x in y.items()} for y in (agent.state_dict(), checkpoint["agent"]))
    require(here == saved, f"The file has another network: {sorted(saved - here)[:3]}, here {sorted(here - saved)[:3]}")
    agent.load_state_dict(checkpoint["agent"])
    statistics.set_state(tree_map(np.asarray, checkpoint["statistics"]))


# ---- Playing and the command line ------------------------------------------------------------------------------------
@dataclass
class PlayArgs:
    logdir: str | None = None  # run folder; not needed if --checkpoint is the path of a file
    checkpoint: str = "best"  # best, latest, or the path of a .pt file: a name in --logdir, if that is given
    env_id: str | None = None  # task to play; default: the checkpoint's, which you must name if it is module:Id
    episodes: int = 1  # episodes to play
    seed: int = 0  # seed of the first episode; each further one gets the next number
    stochastic: bool = False  # sample the actions instead of taking the policy's mode
    render: bool = False  # show the episodes in a window
    save_gif: bool = False  # write a GIF of each episode
    gif_fps: int = 20  # most pictures per second of a GIF, up to 50; it plays in real time
    gif_frames: int = 300  # most pictures of a GIF
    gif_dir: str | None = None  # folder of the GIFs; default: gifs, beside the checkpoint


def play(options: PlayArgs) -> list[float]:
    """Play the policy of a checkpoint and print each episode's return; returns these. With --save-gif, film it."""
    check_ranges(options)
    path = Path(options.logdir or "", str(options.checkpoint).removesuffix(".pt") + ".pt")
    checkpoint = load(path)
    args = Args(**checkpoint["args"] | HERE | {"env_id": options.env_id or checkpoint["args"]["env_id"]})
    render_mode = "human" if options.render else "rgb_array" if options.save_gif else None
    vec_env = make_envs(args, 1, RunningMeanStd(), render_mode)
    agent = Agent(vec_env, args)
    load_policy(checkpoint, agent, vec_env.statistics)
    if options.save_gif:
        vec_env = RecordGif(vec_env, options.gif_dir or path.parent / "gifs", options.gif_fps, options.gif_frames)
    returns = []
    for i in range(options.episodes):
        torch.manual_seed(options.seed + i)  # of sampled actions
        (total,), (length,) = evaluate(agent, vec_env, options.seed + i, not options.stochastic)
        returns.append(float(total))
        print(f"episode {i + 1}: return {total:.2f}, {length} steps", flush=True)
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
