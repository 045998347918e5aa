"""The loops our script is timed against: a CleanRL-style one, written here from its public description, and SB3's.

Each function trains PPO on a MuJoCo task with the given sizes and returns the seconds of each update (collection and
learning together). They are measures, not examples: for the loop to copy, see ppo_continuous_mujoco.py.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Normal

from benchmarks.common import CORES
from benchmarks.mujoco_env import make_envpool


def cleanrl_env(env_id: str, gamma: float) -> gym.Env:
    """One environment under the per-environment wrappers of CleanRL's continuous-action script."""
    env: gym.Env = gym.make(env_id)
    env = gym.wrappers.RecordEpisodeStatistics(env)
    env = gym.wrappers.ClipAction(env)
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
    env = gym.wrappers.NormalizeReward(env, gamma=gamma)
    return gym.wrappers.TransformReward(env, lambda reward: float(np.clip(float(reward), -10, 10)))


class EnvPool:
    """EnvPool's C++ environments on all cores, as the loop below wants them.

    It clips actions, and does without normalising observations and rewards, which EnvPool does not offer: a little less
    work than the other candidates have. A pool's seed is fixed when it is made, so `reset` makes a new one.
    """

    def __init__(self, env_id: str, num_envs: int) -> None:
        self.make = partial(make_envpool, env_id, num_envs, CORES)
        self.pool = self.make(seed=0)
        self.single_observation_space, self.single_action_space = self.pool.observation_space, self.pool.action_space

    def reset(self, seed: int) -> Any:
        self.pool.close()
        self.pool = self.make(seed=seed)
        return self.pool.reset()

    def step(self, actions: np.ndarray) -> Any:
        space = self.single_action_space
        return self.pool.step(np.clip(actions, space.low, space.high).astype(space.dtype))

    def close(self) -> None:
        self.pool.close()


class ReferenceAgent(nn.Module):
    """Two tanh networks of 64-64 units, torch.distributions for the Gaussian."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()

        def layer(n_in: int, n_out: int, gain: float = 2**0.5) -> nn.Linear:
            linear = nn.Linear(n_in, n_out)
            nn.init.orthogonal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)
            return linear

        self.critic = nn.Sequential(layer(obs_dim, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.mean = nn.Sequential(layer(obs_dim, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, action_dim, 0.01))
        self.log_std = nn.Parameter(torch.zeros(1, action_dim))

    def forward(self, obs: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        mean = self.mean(obs)
        policy = Normal(mean, self.log_std.expand_as(mean).exp())
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action).sum(1), policy.entropy().sum(1), self.critic(obs).flatten()


def cleanrl_style(env_id: str, num_envs: int, num_steps: int, minibatch: int, epochs: int, updates: int,
                  vectorization: str = "sync", threads: int = 1) -> list[float]:  # fmt: skip
    """The loop of CleanRL's continuous-action PPO on Gymnasium's SyncVectorEnv or AsyncVectorEnv, or on EnvPool."""
    torch.set_num_threads(threads)
    gamma, gae_lambda, clip = 0.99, 0.95, 0.2
    vec_env: Any
    if vectorization == "envpool":
        vec_env = EnvPool(env_id, num_envs)
    else:
        env_fns = [partial(cleanrl_env, env_id, gamma)] * num_envs
        vec_env = {"sync": gym.vector.SyncVectorEnv, "async": gym.vector.AsyncVectorEnv}[vectorization](env_fns)
    obs_shape, action_shape = vec_env.single_observation_space.shape, vec_env.single_action_space.shape
    agent = ReferenceAgent(obs_shape[0], action_shape[0])
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    obs = torch.zeros((num_steps, num_envs, *obs_shape))
    actions = torch.zeros((num_steps, num_envs, *action_shape))
    log_probs, rewards, dones, values = (torch.zeros((num_steps, num_envs)) for _ in range(4))
    next_obs = torch.Tensor(vec_env.reset(seed=1)[0])
    next_done = torch.zeros(num_envs)
    seconds = []
    for _ in range(updates):
        started = time.perf_counter()
        for step in range(num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, log_prob, _, value = agent(next_obs)
            values[step], actions[step], log_probs[step] = value, action, log_prob
            new_obs, reward, terminated, truncated, _ = vec_env.step(action.numpy())
            next_done = torch.Tensor(np.logical_or(terminated, truncated))
            rewards[step] = torch.tensor(reward).view(-1)
            next_obs = torch.Tensor(new_obs)
        with torch.no_grad():
            next_value = agent.critic(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            last = torch.zeros(num_envs)
            for t in reversed(range(num_steps)):
                alive = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
                following = next_value if t == num_steps - 1 else values[t + 1]
                delta = rewards[t] + gamma * following * alive - values[t]
                advantages[t] = last = delta + gamma * gae_lambda * alive * last
            returns = advantages + values
        b_obs, b_actions = obs.reshape((-1, *obs_shape)), actions.reshape((-1, *action_shape))
        b_log_probs, b_advantages = log_probs.reshape(-1), advantages.reshape(-1)
        b_returns, b_values = returns.reshape(-1), values.reshape(-1)
        indices = np.arange(num_envs * num_steps)
        clip_fractions = []
        for _ in range(epochs):
            np.random.shuffle(indices)
            for start in range(0, len(indices), minibatch):
                mb = indices[start : start + minibatch]
                _, new_log_prob, entropy, new_value = agent(b_obs[mb], b_actions[mb])
                log_ratio = new_log_prob - b_log_probs[mb]
                ratio = log_ratio.exp()
                with torch.no_grad():
                    ((ratio - 1) - log_ratio).mean()
                    clip_fractions.append(((ratio - 1.0).abs() > clip).float().mean().item())
                mb_adv = b_advantages[mb]
                mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
                pg_loss = torch.max(-mb_adv * ratio, -mb_adv * torch.clamp(ratio, 1 - clip, 1 + clip)).mean()
                clipped = b_values[mb] + torch.clamp(new_value - b_values[mb], -clip, clip)
                v_loss = 0.5 * torch.max((new_value - b_returns[mb]) ** 2, (clipped - b_returns[mb]) ** 2).mean()
                loss = pg_loss - 0.0 * entropy.mean() + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        seconds.append(time.perf_counter() - started)
    vec_env.close()
    return seconds


def sb3_seconds(model: Any, updates: int) -> list[float]:
    """Train a Stable-Baselines3 PPO for so many updates; returns the seconds of each, collection included."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        """Notes the time at the start of each rollout, which is the end of the update before it."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def _on_rollout_start(self) -> None:
            self.times.append(time.perf_counter())

        def _on_step(self) -> bool:
            return True

    clock = Clock()
    model.learn(total_timesteps=updates * model.n_envs * model.n_steps, callback=clock)
    return np.diff([*clock.times, time.perf_counter()]).tolist()


def sb3(env_id: str, num_envs: int, num_steps: int, minibatch: int, epochs: int, updates: int,
        vectorization: str = "dummy", threads: int = 1) -> list[float]:  # fmt: skip
    """Stable-Baselines3's PPO under its own VecNormalize, on its DummyVecEnv or SubprocVecEnv."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    torch.set_num_threads(threads)
    kind: Any = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[vectorization]
    vec_env = VecNormalize(make_vec_env(env_id, num_envs, seed=1, vec_env_cls=kind))
    model = PPO("MlpPolicy", vec_env, n_steps=num_steps, batch_size=minibatch, n_epochs=epochs, device="cpu", seed=1)
    seconds = sb3_seconds(model, updates)
    vec_env.close()
    return seconds
