"""Super Mario Bros stepping alone: MarioEnv against the bare emulator, and against the canonical stack of wrappers.

    python -m benchmarks.mario_env [--rounds 7] [--seconds 2] [--peer-python PATH] [--quick]

One process, one environment unless said otherwise, random actions to the right, episodes begin anew as they end. The
limit is the bare emulator: the same four frames a step, without looking at the picture or at RAM. The canonical stack
is gym-super-mario-bros 7.4.0 as its users wrap it (JoypadSpace, skip 4, grey, resize to 84, stack 4); it needs NumPy 1
and gym, so it runs in an interpreter of its own, named by --peer-python:

    python -m venv peer && peer/bin/pip install "numpy<2" gym==0.26.2 gym-super-mario-bros==7.4.0 "opencv-python<4.12"

The candidates run in turn, round after round; ratios are medians over rounds of two figures of one round. Each runs on
one thread, so seconds are CPU seconds: what others do on the machine meanwhile counts less.
"""

import argparse
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common import (
    QUICK_RESULTS,
    RESULTS,
    at_least_one,
    interleave,
    machine_info,
    machine_line,
    markdown_table,
    median_ratio,
    positive_seconds,
    rows_of,
    write_results,
)
from envs.mario import MarioEnv, available_backends
from envs.nes_core import make_core

ACTIONS = np.random.default_rng(0).integers(1, 5, 4096).tolist()  # right, with and without A and B
CANONICAL = "canonical stack (gray84)"
NUM_TOGETHER = 16  # environments of one process, as a worker of SubprocVecEnv holds them

PEER = """
import sys, time, warnings
warnings.simplefilter("ignore")
import gym, gym_super_mario_bros, numpy as np
from gym.wrappers import FrameStack, GrayScaleObservation, ResizeObservation
from gym_super_mario_bros.actions import SIMPLE_MOVEMENT
from nes_py.wrappers import JoypadSpace

class SkipFrame(gym.Wrapper):
    def step(self, action):
        total = 0.0
        for _ in range(4):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info

JoypadSpace.reset = lambda self, **kwargs: self.env.reset(**kwargs)
env = gym_super_mario_bros.make("SuperMarioBros-1-1-v0", apply_api_compatibility=True)
env = FrameStack(ResizeObservation(GrayScaleObservation(SkipFrame(JoypadSpace(env, SIMPLE_MOVEMENT))), 84), 4)
env.reset()
actions = np.random.default_rng(0).integers(1, 5, 4096).tolist()
print("ready", flush=True)
for line in sys.stdin:
    steps, start = 0, time.process_time()
    while time.process_time() - start < float(line):
        obs, reward, terminated, truncated, info = env.step(actions[steps % 4096])
        np.asarray(obs)
        steps += 1
        if terminated or truncated:
            env.reset()
    print(steps / (time.process_time() - start), flush=True)
"""


def count(step: Callable[[int], None], seconds: float) -> float:
    """Return how often `step(action)` runs in a second of this process's CPU time."""
    steps, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        step(ACTIONS[steps % len(ACTIONS)])
        steps += 1
    return steps / (time.process_time() - start)


def bare_core(backend: str) -> Callable[[int], None]:
    """Return a function that emulates four frames, beginning at the start of 1-1."""
    env = MarioEnv("1-1", backend)
    env.reset()
    state = env.get_state()["game"]["core"]
    core, buttons = make_core(backend), env.buttons
    core.load(state)
    frames = 0

    def step(action: int) -> None:
        nonlocal frames
        for _ in range(4):
            core.step(buttons[action])
        frames += 4
        if frames % 1000 == 0:  # stay in the stage
            core.load(state)

    return step


def environments(backend: str, num_envs: int = 1, **options: Any) -> Callable[[int], None]:
    """Return a function that steps one of the environments, each in turn, and resets it where its episode ends."""
    envs = [MarioEnv("1-1", backend, **options) for _ in range(num_envs)]
    for env in envs:
        env.reset(seed=0)
    turn = 0

    def step(action: int) -> None:
        nonlocal turn
        env = envs[turn % num_envs]
        turn += 1
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()

    return step


def canonical(python: str, seconds: float) -> Callable[[], float]:
    """Start the canonical stack in its interpreter; return a function that has it measured."""
    peer = subprocess.Popen(
        [python, "-W", "ignore", "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    requests, replies = peer.stdin, peer.stdout
    while (line := replies.readline().strip()) != "ready":
        if not line and peer.poll() is not None:
            raise SystemExit(
                f"the canonical stack did not start in {python}; the module's docstring says what it needs"
            )

    def measure() -> float:
        print(seconds, file=requests, flush=True)
        return float(replies.readline())

    return measure


def state_costs(backend: str) -> dict[str, float]:
    """Return microseconds for `get_state`, `set_state` and `reset`, 100 decisions into an episode (medians)."""
    env = MarioEnv("1-1", backend, stuck_steps=0)
    times: dict[str, list[float]] = {"get_state": [], "set_state": [], "reset": []}
    for _ in range(5):
        env.reset()
        for action in [3] * 13 + [4] * 13 + [6, 1] * 37:
            env.step(action)
        state = env.get_state()
        for name, call in (
            ("get_state", env.get_state),
            ("set_state", partial(env.set_state, state)),
            ("reset", env.reset),
        ):
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: float(np.median(values)) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=7, help="how often each candidate is measured")
    parser.add_argument("--seconds", type=positive_seconds, default=2.0, help="length of one measurement")
    parser.add_argument("--peer-python", help="an interpreter with the canonical stack; left out if not given")
    parser.add_argument("--quick", action="store_true", help="two rounds of half a second")
    args = parser.parse_args()
    if args.peer_python and shutil.which(args.peer_python) is None:
        parser.error(f"--peer-python {args.peer_python} is no program; --help says how to make one")
    if args.quick:
        args.rounds, args.seconds = 2, 0.5

    info = machine_info(["nes-py", "stable-retro", "gym-super-mario-bros", "numpy", "pillow", "gymnasium"])
    candidates: dict[str, Callable[[], float]] = {}
    for backend in available_backends():
        steppers = {
            "bare emulator": bare_core(backend),
            "MarioEnv gray64": environments(backend),
            "MarioEnv gray84": environments(backend, obs="gray84"),
            "MarioEnv rgb64, max-pooled": environments(backend, obs="rgb64", max_pool=True),
            f"{NUM_TOGETHER} x MarioEnv gray64": environments(backend, NUM_TOGETHER),
        }
        for name, step in steppers.items():
            count(step, 0.2)
            candidates[f"{backend}: {name}"] = partial(count, step, args.seconds)
    if args.peer_python:
        candidates[CANONICAL] = canonical(args.peer_python, args.seconds)
    figures = interleave(candidates, args.rounds)

    rows = []
    for name, values in figures.items():
        backend = name.split(":")[0]
        limit = figures.get(f"{backend}: bare emulator")
        peer = figures.get(CANONICAL)
        rows.append([
            name,
            f"{np.median(values):,.0f}",
            f"{4 * np.median(values):,.0f}",
            f"{max(values):,.0f}",
            f"{median_ratio(values, limit):.2f}" if limit else "",
            f"{median_ratio(values, peer):.2f}" if peer else "",
        ])  # fmt: skip
    costs = {backend: state_costs(backend) for backend in available_backends()}
    cost_rows = [[backend, *(f"{cost:,.0f}" for cost in values.values())] for backend, values in costs.items()]
    markdown = (
        "# Super Mario Bros stepping alone, one process, per CPU second\n\n"
        + markdown_table(
            ["stepper", "steps/s", "frames/s", "best round", "of the bare emulator", "times canonical"], rows
        )
        + "\n"
        + markdown_table(["backend", "get_state, us", "set_state, us", "reset, us"], cost_rows)
        + "\n"
        + machine_line(info)
    )
    peers = [name for name in figures if name.endswith("bare emulator") or name == CANONICAL]
    rows_by_backend = [
        row
        for backend in available_backends()
        for row in rows_of(backend, {k: v for k, v in figures.items() if k.startswith((backend, CANONICAL))}, peers)
    ]
    data = {"machine": info, "rows": rows_by_backend, "state_us": costs}
    write_results("mario_env", data, markdown, QUICK_RESULTS if args.quick else RESULTS)


if __name__ == "__main__":
    main()
