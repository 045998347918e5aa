"""Stable-Baselines3's PPO on a MuJoCo task, with the parameters that its RL Zoo has tuned for that task.

    python -m benchmarks.sb3_zoo --task Hopper-v5 --steps 1000000 --seed 1 --folder runs/learning/sb3-Hopper-v5

`benchmarks.mujoco_learning --peer-seeds 1 2` starts it; it is a program of its own because SB3 is not a dependency of
ours. The evaluations are those of our script: every 100,000 steps, ten deterministic episodes with the same seeds,
statistics of the observations frozen.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ppo_continuous_mujoco import Args, UsageError, crossed, lock_folder

# hyperparams/ppo.yml of rl-baselines3-zoo at 208b6fd. What it does not list is SB3's default, and so it is for Pusher
# and for Ant, whose tuned values the Zoo has switched off. The Zoo tuned for older versions of the tasks.
WIDE = {
    "log_std_init": -2.0,
    "ortho_init": False,
    "activation": "ReLU",
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}
ZOO: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": {
        "batch_size": 64, "n_steps": 512, "gamma": 0.98, "learning_rate": 2.0633e-05, "ent_coef": 0.000401762,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096, **WIDE},
    "Ant-v5": {},
    "Hopper-v5": {
        "batch_size": 32, "n_steps": 512, "gamma": 0.999, "learning_rate": 9.80828e-05, "ent_coef": 0.00229519,
        "clip_range": 0.2, "n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671, **WIDE},
    "Walker2d-v5": {
        "batch_size": 32, "n_steps": 512, "gamma": 0.99, "learning_rate": 5.05041e-05, "ent_coef": 0.000585045,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.95, "max_grad_norm": 1.0, "vf_coef": 0.871923},
    "Humanoid-v5": {
        "batch_size": 256, "n_steps": 512, "gamma": 0.95, "learning_rate": 3.56987e-05, "ent_coef": 0.00238306,
        "clip_range": 0.3, "n_epochs": 5, "gae_lambda": 0.9, "max_grad_norm": 2.0, "vf_coef": 0.431892, **WIDE},
    "HumanoidStandup-v5": {
        "batch_size": 32, "n_steps": 512, "gamma": 0.99, "learning_rate": 2.55673e-05, "ent_coef": 3.62109e-06,
        "clip_range": 0.3, "n_epochs": 20, "gae_lambda": 0.9, "max_grad_norm": 0.7, "vf_coef": 0.430793, **WIDE},
    "Swimmer-v5": {
        "n_envs": 4, "n_steps": 1024, "batch_size": 256, "gamma": 0.9999, "learning_rate": 6e-4, "gae_lambda": 0.98},
    "Reacher-v5": {
        "batch_size": 32, "n_steps": 512, "gamma": 0.9, "learning_rate": 0.000104019, "ent_coef": 7.52585e-08,
        "clip_range": 0.3, "n_epochs": 5, "gae_lambda": 1.0, "max_grad_norm": 0.9, "vf_coef": 0.950368},
    "Pusher-v5": {},
    "InvertedPendulum-v5": {
        "batch_size": 64, "n_steps": 32, "gamma": 0.999, "learning_rate": 0.000222425, "ent_coef": 1.37976e-07,
        "clip_range": 0.4, "n_epochs": 5, "gae_lambda": 0.9, "max_grad_norm": 0.3, "vf_coef": 0.19816},
    "InvertedDoublePendulum-v5": {
        "batch_size": 512, "n_steps": 128, "gamma": 0.98, "learning_rate": 0.000155454, "ent_coef": 1.05057e-06,
        "clip_range": 0.4, "n_epochs": 10, "gae_lambda": 0.8, "max_grad_norm": 0.5, "vf_coef": 0.695929},
}  # fmt: skip
EVAL_SEED = 10_000  # as `evaluate` of ppo_continuous_mujoco.py has it


def train(task: str, steps: int, seed: int, folder: Path) -> None:
    """Train once; writes eval.csv, one row per evaluation, and options.json into `folder`."""
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    options = dict(ZOO[task])
    policy: dict[str, Any] = {name: options.pop(name) for name in WIDE.keys() & options.keys()}
    if "activation" in policy:
        policy["activation_fn"] = getattr(torch.nn, policy.pop("activation"))
    vec_env = VecNormalize(make_vec_env(task, options.pop("n_envs", 1), seed), gamma=options.get("gamma", 0.99))
    model = PPO("MlpPolicy", vec_env, policy_kwargs=policy, seed=seed, device="cpu", **options)
    eval_env = gym.make(task)

    def evaluate(global_step: int) -> None:
        returns = np.zeros(Args.eval_episodes)
        for i in range(Args.eval_episodes):
            obs, ended = eval_env.reset(seed=EVAL_SEED + i)[0], False
            while not ended:
                action, _ = model.predict(vec_env.normalize_obs(obs), deterministic=True)
                obs, reward, terminated, truncated, _ = eval_env.step(action)
                returns[i] += float(reward)
                ended = terminated or truncated
        with open(folder / "eval.csv", "a", newline="") as file:
            csv.writer(file).writerow([global_step, returns.mean(), returns.std()])

    class Evaluation(BaseCallback):
        """Evaluates before the first rollout that begins at or after a multiple of our --eval-every steps."""

        last = 0

        def _on_rollout_start(self) -> None:
            if crossed(self.num_timesteps, self.num_timesteps - self.last, Args.eval_every):
                evaluate(self.num_timesteps)
            self.last = self.num_timesteps

        def _on_step(self) -> bool:
            return True

    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock_folder(folder)  # until this process ends
    except UsageError:  # whose text names a flag of the script's
        sys.exit(f"error: {folder} is in use by another process.")
    (folder / "options.json").write_text(json.dumps(ZOO[task]))
    (folder / "eval.csv").write_text("global_step,eval/mean_return,eval/std_return\n")
    model.learn(steps, callback=Evaluation())
    evaluate(model.num_timesteps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(ZOO), required=True, metavar="ID")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    train(options.task, options.steps, options.seed, options.folder)


if __name__ == "__main__":
    main()
