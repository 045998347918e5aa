"""Stable-Baselines3's PPO on a MuJoCo task, with the parameters that its RL Zoo has tuned for that task.

    python -m benchmarks.sb3_zoo --env-id Hopper-v5 --total-timesteps 1000000 --seed 11 --logdir runs/sb3

`benchmarks.learning mujoco --also SB3` runs it beside ours. Its folder has the logs that a run of ours has, as far as
they are needed: config.json, progress.csv (an evaluation a row: every 100,000 steps ten deterministic episodes with our
seeds, statistics of the observations frozen) and final.json, 100 fresh episodes of the last policy and of the best.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, commit_of, parser_of, processor

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
EVAL_EVERY, EVAL_SEED, FINAL_SEED = 100_000, 10_000, 1_000_000  # as our script and `benchmarks.learning` have them


def train(env_id: str, steps: int, seed: int, folder: Path, episodes: int = 100) -> None:
    """Train once and judge."""
    import gymnasium as gym
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    options = dict(ZOO[env_id])
    policy: dict[str, Any] = {name: options.pop(name) for name in WIDE.keys() & options.keys()}
    if "activation" in policy:
        policy["activation_fn"] = getattr(torch.nn, policy.pop("activation"))
    vec_env = VecNormalize(make_vec_env(env_id, options.pop("n_envs", 1), seed), gamma=options.get("gamma", 0.99))
    model = stable_baselines3.PPO("MlpPolicy", vec_env, policy_kwargs=policy, seed=seed, device="cpu", **options)
    eval_env = gym.make(env_id)

    def play(num: int, first_seed: int) -> np.ndarray:
        returns = np.zeros(num)
        for i in range(num):
            obs, ended = eval_env.reset(seed=first_seed + i)[0], False
            while not ended:
                action, _ = model.predict(vec_env.normalize_obs(obs), deterministic=True)
                obs, reward, terminated, truncated, _ = eval_env.step(action)
                returns[i] += float(reward)
                ended = terminated or truncated
        return returns

    best: dict[str, Any] = {"mean": -np.inf}

    class Evaluation(BaseCallback):
        """Evaluates before the first rollout that begins at or after a multiple of EVAL_EVERY steps, and at the end;
        time/sps leaves the evaluations out."""

        last, started = 0, time.perf_counter()

        def evaluate(self) -> None:
            rate = (self.num_timesteps - self.last) / (time.perf_counter() - self.started)
            returns = play(10, EVAL_SEED)
            with open(folder / "progress.csv", "a") as file:
                file.write(f"{self.num_timesteps},{returns.mean()},{returns.std()},{rate}\n")
            if returns.mean() > best["mean"]:
                weights = {name: x.clone() for name, x in model.policy.state_dict().items()}
                rms = vec_env.obs_rms.copy()  # type: ignore[union-attr]
                best.update(mean=returns.mean(), weights=weights, rms=rms)
            self.last, self.started = self.num_timesteps, time.perf_counter()

        def _on_rollout_start(self) -> None:
            if self.num_timesteps // EVAL_EVERY > self.last // EVAL_EVERY:
                self.evaluate()

        def _on_step(self) -> bool:
            return True

    folder.mkdir(parents=True, exist_ok=True)
    config = {"args": {"env_id": env_id, "seed": seed, "total_timesteps": steps, "sb3": ZOO[env_id]},
              "commit": commit_of(ROOT), "versions": {"stable_baselines3": stable_baselines3.__version__}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "progress.csv").write_text("global_step,eval/mean_return,eval/std_return,time/sps\n")
    evaluation = Evaluation()
    model.learn(steps, callback=evaluation)
    evaluation.num_timesteps = model.num_timesteps
    evaluation.evaluate()
    final: dict[str, Any] = {"cpu": processor(), "episodes": episodes}
    for which in ("last", "best"):
        if which == "best":
            model.policy.load_state_dict(best["weights"])
            vec_env.obs_rms = best["rms"]
        returns = play(episodes, FINAL_SEED)
        final[which] = {"return": returns.mean(), "std": returns.std()}
    (folder / "final.json").write_text(json.dumps(final))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--env-id", choices=list(ZOO), required=True, metavar="ID")
    parser.add_argument("--total-timesteps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--logdir", type=Path, required=True)
    options = parser.parse_args()
    train(options.env_id, options.total_timesteps, options.seed, options.logdir)


if __name__ == "__main__":
    main()
