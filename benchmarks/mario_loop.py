"""Whole-loop throughput on Super Mario Bros: our script on each emulator beside SB3's PPO on the usual wrappers.

    python -m benchmarks.mario_loop [--num-envs 16] [--num-steps 64] [--rounds 5] [--pip-nes-py FOLDER]
    python -m benchmarks.mario_loop --quick    # 8 environments x 32 steps, two rounds, without float32

Emulating, inferring and learning are timed together, in environment steps (of four frames) per second. All loops have
the same network (Nature CNN on four grey 64 x 64 pictures, 607 thousand weights), 7 actions, minibatches of 256 and
4 epochs, and start from scratch, so that episodes are alike. SB3 plays gym-super-mario-bros through JoypadSpace, a
frame skip of 4, grey, resize and VecFrameStack, one process per environment (SubprocVecEnv, forked). Version 7.4.0 of
that package fails on NumPy 2, so two of its properties are replaced below; where another one is installed, as on
Python 3.13, SB3 is left out. Each measurement is the second of two updates of a fresh run; the candidates take turns,
round after round, and a ratio is the median over rounds of two figures of one round. torch uses one thread.

After `make nes_py` SB3's environments run on that faster library, too. With --pip-nes-py SB3 is measured a second time,
on the library as its own users have it, built by pip:

    pip install --no-deps --target FOLDER nes-py==8.2.1
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from PIL import Image

import ppo_atari_mario as mario
from benchmarks.common import (
    QUICK_RESULTS,
    RESULTS,
    at_least_one,
    interleave,
    machine_info,
    machine_line,
    markdown_table,
    median_ratio,
    rows_of,
    summary,
    train_to_the_end,
    write_results,
)
from envs.mario import available_backends

REFERENCE = "SB3, usual wrappers (nes_py, float32)"
SB3_WITH_PIPS = "SB3, usual wrappers (nes_py built by pip, float32)"
MINIBATCH_SIZE, EPOCHS = 256, 4
SHARES = ("env_share", "update_share")


def ours(num_envs: int, num_steps: int, **options: Any) -> tuple[float, dict[str, float]]:
    """Steps per second of the second update of a fresh run, and the shares of its time."""
    batch_size = num_envs * num_steps
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        args = mario.Args(
            logdir=f"{scratch}/run", num_envs=num_envs, num_steps=num_steps, total_timesteps=2 * batch_size,
            num_minibatches=batch_size // MINIBATCH_SIZE, minibatch_growth=1, update_epochs=EPOCHS, noop_max=0,
            sticky_action_probability=0.0, stuck_steps=0, max_episode_steps=400, eval_every=0, eval_episodes=1,
            save_every=0, capture_video=False, **options,
        )  # fmt: skip
        train_to_the_end(mario, args)
        timing = mario.read_csv(Path(args.logdir or "") / "timing.csv")
    return timing["time/sps"][-1], {name: float(timing[f"time/{name}"][-1]) for name in SHARES}


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


def sb3(num_envs: int, num_steps: int, nes_py_folder: str | None = None) -> tuple[float, dict[str, float]]:
    """Steps per second of the second update of a fresh run of SB3's PPO with our defaults."""
    with contextlib.redirect_stderr(io.StringIO()):  # SB3 imports the old gym, which prints that it is not maintained
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

    defaults = mario.Args()
    vec_env = VecFrameStack(SubprocVecEnv([partial(UsualMario, nes_py_folder)] * num_envs, start_method="fork"), 4)
    model = PPO(
        "CnnPolicy", vec_env, n_steps=num_steps, batch_size=MINIBATCH_SIZE, n_epochs=EPOCHS, gamma=defaults.gamma,
        learning_rate=defaults.learning_rate, gae_lambda=defaults.gae_lambda, ent_coef=defaults.ent_coef,
        clip_range=defaults.clip_coef, vf_coef=defaults.vf_coef, seed=1, device="cpu",
    )  # fmt: skip
    weights = sum(p.numel() for p in model.policy.parameters())
    assert weights == 606_888, f"the networks differ: SB3's has {weights:,} weights"
    model.learn(num_envs * num_steps)
    start = time.perf_counter()
    model.learn(num_envs * num_steps, reset_num_timesteps=False)
    seconds = time.perf_counter() - start
    vec_env.close()
    return num_envs * num_steps / seconds, {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=at_least_one, default=16)
    parser.add_argument("--num-steps", type=at_least_one, default=64)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--quick", action="store_true", help="8 x 32, two rounds, without float32")
    parser.add_argument("--pip-nes-py", metavar="FOLDER", help="a folder with nes-py as pip builds it, for SB3")
    options = parser.parse_args()
    if options.pip_nes_py and not list(Path(options.pip_nes_py).glob("nes_py/lib_nes_env*")):
        parser.error(f"--pip-nes-py {options.pip_nes_py} holds no nes_py; --help says how to put one there")
    if options.quick:
        options.num_envs, options.num_steps, options.rounds = 8, 32, 2
    if options.num_envs * options.num_steps % MINIBATCH_SIZE:
        parser.error(f"--num-envs x --num-steps must be a multiple of {MINIBATCH_SIZE}, the size of all minibatches")
    torch.set_num_threads(1)

    sizes = (options.num_envs, options.num_steps)
    loops: dict[str, Callable[[], tuple[float, dict[str, float]]]] = {}
    for backend in available_backends():
        loops[f"ours, {backend}"] = partial(ours, *sizes, backend=backend)
        if not options.quick:
            loops[f"ours, {backend}, float32"] = partial(ours, *sizes, backend=backend, amp=False)
    installed = metadata.version("gym-super-mario-bros")
    if installed.startswith("7."):
        loops[REFERENCE] = partial(sb3, *sizes)
        if options.pip_nes_py:
            loops[SB3_WITH_PIPS] = partial(sb3, *sizes, nes_py_folder=options.pip_nes_py)
    else:
        print(f"SB3 is left out: the usual wrappers are those of gym-super-mario-bros 7.4.0, but here is {installed}")
    shares: dict[str, dict[str, float]] = {}

    def measure(name: str) -> float:
        figure, shares[name] = loops[name]()
        return figure

    info = machine_info(["torch", "numpy", "nes-py", "stable-retro", "stable-baselines3"])
    figures = interleave({name: partial(measure, name) for name in loops}, options.rounds)
    peers = [name for name in figures if name.startswith("SB3")]
    rows = []
    for name, values in figures.items():
        ratios = [f"{median_ratio(values, figures[peer]):.2f}" for peer in peers]
        middle = summary(values)
        rows.append([name, f"{middle['median']:,.0f}", f"{middle['min']:,.0f} - {middle['max']:,.0f}", *ratios,
                     *(f"{shares[name][key]:.0%}" if shares[name] else "" for key in SHARES)])  # fmt: skip
    header = ["loop", "steps/s", "range", *(f"x {peer}" for peer in peers), "emulation", "update"]
    markdown = "# Super Mario Bros: the whole loop\n\n" + markdown_table(header, rows)
    markdown += f"\n{options.num_envs} environments x {options.num_steps} steps, {options.rounds} rounds.\n\n"
    group = f"{options.num_envs} environments x {options.num_steps} steps"
    data = {"machine": info, "rows": rows_of(group, figures, peers), "shares_of_last": shares}
    write_results("mario_loop", data, markdown + machine_line(info), QUICK_RESULTS if options.quick else RESULTS)


if __name__ == "__main__":
    main()
