"""The training loops that our scripts are timed against: one in CleanRL's style, written here from its public
description, and Stable-Baselines3's PPO on MuJoCo, CAGE2 and Super Mario Bros.

Each function trains PPO in the given sizes and returns the seconds of each update, collection included; it is called in
a process of its own (`common.in_fresh_process`). They are measures, not examples: for the loop to copy, see our
scripts. SB3 plays gym-super-mario-bros through JoypadSpace, a frame skip of 4, grey, resize and VecFrameStack, a
process for each environment. Version 7.4.0 of that package fails on NumPy 2, so two of its properties are replaced.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from PIL import Image
from torch.distributions import Normal

from benchmarks.common import CORES


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
    work than the other candidates have.
    """

    def __init__(self, env_id: str, num_envs: int) -> None:
        import envpool

        self.pool = envpool.make_gymnasium(env_id, num_envs=num_envs, num_threads=CORES, seed=1)
        self.single_observation_space, self.single_action_space = self.pool.observation_space, self.pool.action_space
        self.close = self.pool.close

    def reset(self, seed: int) -> Any:
        return self.pool.reset()

    def step(self, actions: np.ndarray) -> Any:
        space = self.single_action_space
        return self.pool.step(np.clip(actions, space.low, space.high).astype(space.dtype))


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


def cleanrl_style(env_id: str, num_envs: int, num_steps: int, minibatch: int, updates: int,
                  vectorization: str = "sync", epochs: int = 10) -> list[float]:  # fmt: skip
    """The loop of CleanRL's continuous-action PPO on Gymnasium's SyncVectorEnv or AsyncVectorEnv, or on EnvPool."""
    torch.set_num_threads(1)
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


def sb3_seconds(vec_env: Any, policy: str, updates: int, threads: int, **options: Any) -> list[float]:
    """Train SB3's PPO for so many updates; returns the seconds of each, collection included."""
    from stable_baselines3 import PPO
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

    torch.set_num_threads(threads)
    clock, model = Clock(), PPO(policy, vec_env, device="cpu", seed=1, **options)
    model.learn(total_timesteps=updates * model.n_envs * model.n_steps, callback=clock)
    seconds = np.diff([*clock.times, time.perf_counter()]).tolist()
    vec_env.close()
    return seconds


def sb3_vec_env(kind: str, env: Any, num_envs: int, **kwargs: Any) -> Any:
    """SB3's DummyVecEnv, or its SubprocVecEnv, forked: fresh interpreters would take minutes."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    cls: Any = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[kind]
    options = {"start_method": "fork"} if kind == "subproc" else {}
    return make_vec_env(env, num_envs, seed=1, vec_env_cls=cls, vec_env_kwargs=options, env_kwargs=kwargs)


def sb3_mujoco(env_id: str, num_envs: int, num_steps: int, minibatch: int, updates: int,
               kind: str = "dummy", threads: int = 1) -> list[float]:  # fmt: skip
    """Under SB3's own VecNormalize."""
    from stable_baselines3.common.vec_env import VecNormalize

    vec_env = VecNormalize(sb3_vec_env(kind, env_id, num_envs))
    return sb3_seconds(vec_env, "MlpPolicy", updates, threads, n_steps=num_steps, batch_size=minibatch, n_epochs=10)


def sb3_cage2(num_envs: int, num_steps: int, minibatch: int, updates: int,
              kind: str = "dummy", threads: int = 1) -> list[float]:  # fmt: skip
    """On `Cage2Env`: 52 observations, 145 actions."""
    from envs.cage2 import Cage2Env

    Cage2Env().reset(seed=0)  # compiled once, before the processes fork
    red = {"b_line": 0.5, "meander": 0.45, "sleep": 0.05}
    vec_env = sb3_vec_env(kind, Cage2Env, num_envs, red_agent=red, version="leaderboard", state_in_info=False)
    return sb3_seconds(vec_env, "MlpPolicy", updates, threads, n_steps=num_steps, batch_size=minibatch, n_epochs=4,
                       ent_coef=0.01)  # fmt: skip


class UsualMario(gym.Env):
    """World 1-1 through gym-super-mario-bros 7.4.0, as most Mario projects stack it: (64, 64, 1) uint8."""

    observation_space = gym.spaces.Box(0, 255, (64, 64, 1), np.uint8)
    action_space = gym.spaces.Discrete(7)

    def __init__(self, nes_py_folder: str | None = None) -> None:
        if nes_py_folder:
            sys.path.insert(0, nes_py_folder)  # of this worker process alone; it has not imported nes_py yet
        from gym_super_mario_bros.actions import SIMPLE_MOVEMENT
        from gym_super_mario_bros.smb_env import SuperMarioBrosEnv
        from nes_py._rom import ROM
        from nes_py.wrappers import JoypadSpace

        # uint8 arithmetic that NumPy 2 refuses
        ROM.header = property(lambda rom: rom.raw_data[:16].astype(int))
        SuperMarioBrosEnv._x_position = property(lambda game: int(game.ram[0x6D]) * 256 + int(game.ram[0x86]))
        self.game = JoypadSpace(SuperMarioBrosEnv(target=(1, 1)), SIMPLE_MOVEMENT)

    def observe(self, screen: np.ndarray) -> np.ndarray:
        grey = Image.fromarray(np.ascontiguousarray(screen)).convert("L")
        return np.asarray(grey.resize((64, 64), Image.Resampling.BOX))[:, :, None]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.observe(self.game.reset()), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        total = 0.0
        for _ in range(4):
            screen, reward, done, info = self.game.step(int(action))
            total += reward
            if done:
                break
        return self.observe(screen), total / 10, done, False, {"flag_get": info["flag_get"]}


def sb3_mario(num_envs: int, num_steps: int, minibatch: int, updates: int,
              nes_py_folder: str | None = None) -> list[float]:  # fmt: skip
    """On the usual wrappers, with the network and the settings of our script."""
    from stable_baselines3.common.vec_env import VecFrameStack

    vec_env = VecFrameStack(sb3_vec_env("subproc", UsualMario, num_envs, nes_py_folder=nes_py_folder), 4)
    return sb3_seconds(vec_env, "CnnPolicy", updates, 1, n_steps=num_steps, batch_size=minibatch, n_epochs=4,
                       gamma=0.95, gae_lambda=0.95, learning_rate=5e-4, ent_coef=0.01, vf_coef=0.01)  # fmt: skip
