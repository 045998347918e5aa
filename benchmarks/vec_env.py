"""How fast are vector environments? SubprocVecEnv next to its peers and next to what the cores can do.

    python -m benchmarks.vec_env            # about three minutes; writes results/vec_env.{json,md,png}
    python -m benchmarks.vec_env --quick    # about half a minute, into runs/bench

All candidates step the same 16 environments with the same random actions, in turns (see `common.interleave`). The
limit is what the cores can do without any vector environment: one process per core, each in a loop over its share of
the environments (wrapped and reset in the same way), which never waits for anybody. A vector environment hands out all
results of a step together, so each step lasts as long as the slowest share: the second limit is that of the same
loops, had they met after each step at no cost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from benchmarks.common import (
    CORES,
    QUICK_RESULTS,
    RESULTS,
    interleave,
    machine_info,
    machine_line,
    markdown_table,
    median_ratio,
    rows_of,
    summary,
    write_results,
)
from envs.subproc_vec_env import SubprocVecEnv

NUM_ENVS = 16
LIMIT, TOGETHER, OURS, SYNC, ASYNC, SB3, ENVPOOL = (
    "limit: independent loops",
    "limit: loops that meet after each step",
    "SubprocVecEnv (ours)",
    "gymnasium SyncVectorEnv",
    "gymnasium AsyncVectorEnv",
    "SB3 SubprocVecEnv",
    "EnvPool (its own C++ environments)",
)
Step = Callable[[Any], Any]
Measurement = Callable[[], float]  # steps of environments per second


class ImageEnv(gym.Env):
    """64 x 64 RGB images at next to no cost, so that what is measured is their way to the learner."""

    observation_space = Box(0, 255, (64, 64, 3), np.uint8)
    action_space = Discrete(12)

    def __init__(self) -> None:
        self.images = np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), dtype=np.uint8)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.count = 0
        return self.images[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        return self.images[self.count % 8], 0.0, False, self.count == 500, {}


TASKS: dict[str, tuple[Callable[[], gym.Env], str | None]] = {
    "CartPole-v1": (partial(gym.make, "CartPole-v1"), "CartPole-v1"),
    "HalfCheetah-v5": (partial(gym.make, "HalfCheetah-v5"), "HalfCheetah-v5"),
    "images 64x64x3": (ImageEnv, None),
}


def step_for(seconds: float, step: Step, actions: list[np.ndarray]) -> float:
    """Step for so many seconds; return environment steps per second."""
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for batch in actions:
            step(batch)
        count += len(actions)
    return count * len(actions[0]) / elapsed


class IndependentLoops:
    """One process per core, each stepping its share of the environments in a loop: what the cores can do."""

    def __init__(self, env_fn: Callable[[], gym.Env], actions: list[np.ndarray]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        self.shares = np.array_split(np.arange(NUM_ENVS), CORES)
        for share in self.shares:
            pipe, child_pipe = context.Pipe()
            arguments = (child_pipe, env_fn, [batch[share] for batch in actions])
            self.processes.append(context.Process(target=self.loop, args=arguments, daemon=True))
            self.processes[-1].start()
            self.pipes.append(pipe)

    @staticmethod
    def loop(pipe: Any, env_fn: Callable[[], gym.Env], actions: list[np.ndarray]) -> None:
        envs = [env_fn() for _ in actions[0]]
        for env in envs:
            env.reset()

        def step(batch: np.ndarray) -> None:
            for env, action in zip(envs, batch, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

        while (seconds := pipe.recv()) is not None:
            times = [time.perf_counter()]
            while times[-1] < times[0] + seconds:
                for batch in actions:
                    step(batch)
                    times.append(time.perf_counter())
            pipe.send(np.diff(times))

    def measure(self, seconds: float, together: bool) -> float:
        for pipe in self.pipes:
            pipe.send(seconds)
        durations = [pipe.recv() for pipe in self.pipes]
        if together:
            slowest = [max(of_one_step) for of_one_step in zip(*durations, strict=False)]
            return NUM_ENVS / float(np.mean(slowest))
        return sum(len(share) / times.mean() for share, times in zip(self.shares, durations, strict=True))

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


def candidates_for(task: str, seconds: float) -> tuple[dict[str, Measurement], list[Callable[[], None]]]:
    """Return a measurement per candidate, and what closes them."""
    env_fn, envpool_id = TASKS[task]
    env_fns = [env_fn] * NUM_ENVS
    measurements: dict[str, Measurement] = {}
    closers: list[Callable[[], None]] = []

    def add(name: str, envs: Any, step: Step | None = None) -> None:
        measurements[name] = partial(step_for, seconds, step or envs.step, actions)
        closers.append(envs.close)

    ours = SubprocVecEnv(env_fns, autoreset_mode="SameStep", episode_statistics=True)
    ours.reset(seed=0)
    ours.action_space.seed(0)
    actions = [ours.action_space.sample() for _ in range(64)]
    add(OURS, ours)
    for name, kind in ((SYNC, SyncVectorEnv), (ASYNC, AsyncVectorEnv)):
        envs = kind(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
        envs.reset(seed=0)
        add(name, envs)
    try:
        from stable_baselines3.common.vec_env import SubprocVecEnv as PeerVecEnv

        peer = PeerVecEnv(env_fns, start_method="fork")
        peer.reset()
        add(SB3, peer)
    except ImportError:
        print("stable-baselines3 is not installed: left out")
    if envpool_id is not None:
        try:
            import envpool

            pool = envpool.make_gymnasium(envpool_id, num_envs=NUM_ENVS, num_threads=CORES)
            pool.reset()
            as_expected = np.int32 if actions[0].dtype == np.int64 else np.float64
            add(ENVPOOL, pool, lambda batch: pool.step(batch.astype(as_expected)))
        except ImportError:
            print("envpool is not installed: left out")
    loops = IndependentLoops(env_fn, actions)
    measurements[LIMIT] = partial(loops.measure, seconds, together=False)
    measurements[TOGETHER] = partial(loops.measure, seconds, together=True)
    closers.append(loops.close)
    return measurements, closers


def overlap_candidates(seconds: float, hidden: int) -> tuple[dict[str, Measurement], list[Callable[[], None]]]:
    """HalfCheetah with a policy in between: all environments, then the policy; or each half while the other one steps.

    Args:
        hidden: width of the policy's two hidden layers; decides how long it takes next to a step.
    """
    env_fn = TASKS["HalfCheetah-v5"][0]
    generator = np.random.default_rng(0)
    layers = [generator.normal(size=size).astype(np.float32) for size in ((17, hidden), (hidden, hidden), (hidden, 6))]

    def policy(observations: np.ndarray) -> np.ndarray:
        hidden_values = observations.astype(np.float32)
        for layer in layers:
            hidden_values = np.tanh(hidden_values @ layer)
        return hidden_values

    envs = SubprocVecEnv([env_fn] * NUM_ENVS, max(2, CORES), autoreset_mode="SameStep")
    rows = [envs.half_rows(0), envs.half_rows(1)]
    latest = envs.reset(seed=0)[0]

    def in_turn() -> float:
        nonlocal latest
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            latest = envs.step(policy(latest))[0]
            count += NUM_ENVS
        return count / elapsed

    def overlapped() -> float:
        count, start = 0, time.perf_counter()
        for half in (0, 1):
            envs.send(policy(latest[rows[half]]), half)
        while (elapsed := time.perf_counter() - start) < seconds:
            for half in (0, 1):
                envs.send(policy(envs.recv(half)[0]), half)
            count += NUM_ENVS
        for half in (0, 1):
            latest[rows[half]] = envs.recv(half)[0]
        return count / elapsed

    return {"in turn": in_turn, "overlapped halves": overlapped}, [envs.close]


def measure(candidates: tuple[dict[str, Measurement], list[Callable[[], None]]], rounds: int) -> dict[str, list[float]]:
    """Warm up, measure, close."""
    measurements, closers = candidates
    try:
        interleave(measurements, 1)
        return interleave(measurements, rounds)
    finally:
        for close in closers:
            close()


def plot(figures: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw each candidate's fraction of the limit, task by task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in (OURS, ENVPOOL, SYNC, ASYNC, SB3) if any(name in by_task for by_task in figures.values())]
    fig, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        fractions = [
            median_ratio(by_task.get(name, [0.0] * len(by_task[LIMIT])), by_task[LIMIT]) for by_task in figures.values()
        ]
        bars = axes.bar(np.arange(len(figures)) + place * width, fractions, width, label=name)
        axes.bar_label(bars, [f"{fraction:.2f}" if fraction else "" for fraction in fractions], fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(np.arange(len(figures)) + 0.4 - width / 2, list(figures))
    axes.set_ylabel("fraction of independent loops")
    axes.set_title(f"{NUM_ENVS} environments on {CORES} cores")
    axes.legend(fontsize=8)
    fig.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    quick = parser.parse_args().quick
    rounds, seconds = (3, 0.3) if quick else (9, 0.6)
    warnings.filterwarnings("ignore")
    info = machine_info(["gymnasium", "mujoco", "numpy", "stable-baselines3", "envpool"])

    figures = {task: measure(candidates_for(task, seconds), rounds) for task in TASKS}
    overlap = {hidden: measure(overlap_candidates(seconds, hidden), rounds) for hidden in (64, 512)}

    rows = [
        [
            task,
            name,
            f"{summary(by_name[name])['median']:,.0f}",
            f"{median_ratio(by_name[name], by_name[LIMIT]):.2f}",
            f"{median_ratio(by_name[OURS], by_name[name]):.2f}x",
        ]
        for task, by_name in figures.items()
        for name in sorted(by_name, key=lambda name: -summary(by_name[name])["median"])
    ]
    overlap_rows = [
        [
            f"17-{hidden}-{hidden}-6",
            *(f"{summary(by_name[name])['median']:,.0f}" for name in by_name),
            f"{median_ratio(by_name['overlapped halves'], by_name['in turn']):.2f}x",
        ]
        for hidden, by_name in overlap.items()
    ]
    text = (
        f"# Vector environments: {NUM_ENVS} environments on {CORES} cores\n\n"
        + markdown_table(["task", "candidate", "steps/s", "of the limit", "ours is"], rows)
        + "\nMedians of rounds in which the candidates took turns; ratios are medians of the rounds' ratios.\n"
        + "\n## HalfCheetah with a policy: all in turn, or each half while the other one steps\n\n"
        + markdown_table(
            ["policy (NumPy, float32)", "in turn, steps/s", "overlapped halves", "overlap is"], overlap_rows
        )
        + "\n"
        + machine_line(info)
    )
    compared = [row for task in figures for row in rows_of(task, figures[task], figures[task].keys() - {OURS})]
    data = {"machine": info, "seconds": seconds, "rows": compared, "overlap": overlap}
    folder = QUICK_RESULTS if quick else RESULTS
    write_results("vec_env", data, text + "\n![fractions of the limit](vec_env.png)\n", folder)
    plot(figures, folder / "vec_env.png")


if __name__ == "__main__":
    main()
