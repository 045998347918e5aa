"""MuJoCo environments, stepping alone: MujocoBatchVecEnv against the limit, SyncVectorEnv and EnvPool.

    python -m benchmarks.mujoco_env [--env-ids HalfCheetah-v5 Ant-v5] [--num-envs 16] [--rounds 9] [--quick]

The limit is what the cores give to physics alone: one process per core, each with its share of the
simulations, in a bare loop that writes the controls and calls `mj_step`, without observations or rewards;
each simulation starts afresh as often as episodes end in the task. Actions are random float32 in the action
space. The candidates run in turn, round after round; ratios are medians over rounds of two figures of one
round. On a busy machine the figures of several threads say little: threads that wait for each other wait for
the slowest.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from benchmarks.common import (
    CORES,
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
    summary,
    write_results,
)
from envs.mujoco_batch import TASKS, MujocoBatchVecEnv, without_deprecation_note

ENV_IDS = ("HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "Hopper-v5", "Walker2d-v5")
NUM_PLANNED = 64  # different random actions, used over and over


def measure(step: Callable[[np.ndarray], Any], actions: np.ndarray, num_envs: int, seconds: float) -> float:
    """Steps per second, counted over all environments."""
    num_calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        step(actions[num_calls % len(actions)])
        num_calls += 1
    return num_calls * num_envs / elapsed


def quiet_make(env_id: str) -> gym.Env:
    """Make Gymnasium's environment without MuJoCo's note on HalfCheetah's model."""
    with without_deprecation_note():
        return gym.make(env_id)


def bare_loop(env_id: str, actions: np.ndarray, episode: int, seconds: float, pipe: Connection) -> None:
    """A process of the limit: step actions.shape[1] simulations, as often as it is asked to.

    A simulation is put back to its start every `episode` steps, so that the bodies meet the floor as often as they
    do in the task: a Humanoid that lies on it costs twice as much.
    """
    env: Any = quiet_make(env_id).unwrapped
    datas, starts, num_steps = [], [], 0
    for n in range(actions.shape[1]):
        env.reset(seed=n)
        datas.append(mujoco.MjData(env.model))
        starts.append((env.data.qpos.copy(), env.data.qvel.copy()))

    def step(controls: np.ndarray) -> None:
        nonlocal num_steps
        for data, control, (qpos, qvel) in zip(datas, controls, starts, strict=True):
            if num_steps % episode == 0:
                mujoco.mj_resetData(env.model, data)
                data.qpos[:], data.qvel[:] = qpos, qvel
            data.ctrl[:] = control
            mujoco.mj_step(env.model, data, env.frame_skip)
        num_steps += 1

    pipe.send("ready")
    while pipe.recv():
        pipe.send(measure(step, actions, len(datas), seconds))


def mean_episode_length(envs: MujocoBatchVecEnv, actions: np.ndarray, num_calls: int = 1000) -> int:
    """Mean length of the episodes that random actions make, in steps."""
    envs.reset(seed=0)
    num_ends = 0
    for call in range(num_calls):
        terminations, truncations = envs.step(actions[call % len(actions)])[2:4]
        num_ends += int((terminations | truncations).sum())
    return round(num_calls * envs.num_envs / max(num_ends, 1))


def planned_actions(envs: MujocoBatchVecEnv) -> np.ndarray:
    """Random actions to use over and over, (NUM_PLANNED, num_envs, action size)."""
    envs.action_space.seed(0)
    return np.stack([envs.action_space.sample() for _ in range(NUM_PLANNED)])


@contextmanager
def bare_loops(envs: MujocoBatchVecEnv, env_id: str, num_threads: int, seconds: float) -> Iterator[Callable[[], float]]:
    """The limit: processes that step simulations as `envs` does; gives a function for their steps per second."""
    actions = planned_actions(envs)
    episode = mean_episode_length(envs, actions)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for share in np.array_split(actions, num_threads, axis=1):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=bare_loop, args=(env_id, share, episode, seconds, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()

    def limit() -> float:
        for pipe in pipes:
            pipe.send(True)
        return sum(pipe.recv() for pipe in pipes)

    try:
        yield limit
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(False)
            process.join()


def make_envpool(env_id: str, num_envs: int, num_threads: int, seed: int) -> Any:
    """EnvPool's own C++ form of the task. Raises ImportError where EnvPool is not installed."""
    import envpool

    return envpool.make_gymnasium(env_id, num_envs=num_envs, num_threads=num_threads, seed=seed)


def envpool_step(env_id: str, num_envs: int, num_threads: int) -> Callable[[np.ndarray], Any] | None:
    """EnvPool's synchronous step, or None where EnvPool is not installed."""
    try:
        pool = make_envpool(env_id, num_envs, num_threads, seed=0)
    except ImportError:
        print("envpool is not installed: left out")
        return None
    pool.reset()
    return lambda actions: pool.step(actions)


def compare(env_id: str, num_envs: int, num_threads: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Steps per second of every candidate, one figure per round."""
    batch = MujocoBatchVecEnv(env_id, num_envs, num_threads)
    sync = SyncVectorEnv([partial(quiet_make, env_id)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    pool = envpool_step(env_id, num_envs, num_threads)
    actions = planned_actions(batch)
    try:
        with bare_loops(batch, env_id, num_threads, seconds) as limit:
            batch.reset(seed=0)
            sync.reset(seed=0)
            candidates = {
                "limit": limit,
                "MujocoBatchVecEnv": lambda: measure(batch.step, actions, num_envs, seconds),
                "SyncVectorEnv": lambda: measure(sync.step, actions, num_envs, seconds),
            }
            if pool is not None:
                candidates["EnvPool (sync)"] = lambda: measure(pool, actions, num_envs, seconds)
            for warm_up in candidates.values():
                warm_up()
            return interleave(candidates, rounds)
    finally:
        batch.close()
        sync.close()


def main() -> None:
    """Measure, print, and write results/mujoco_env.{json,md}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-ids", nargs="+", choices=list(TASKS), default=ENV_IDS, metavar="ID")
    parser.add_argument("--num-envs", type=at_least_one, default=16)
    parser.add_argument("--num-threads", type=at_least_one, default=CORES)
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--seconds", type=positive_seconds, default=0.5, help="length of one measurement")
    parser.add_argument("--quick", action="store_true", help="HalfCheetah, three rounds of 0.2 s")
    args = parser.parse_args()
    if args.quick:
        args.env_ids, args.rounds, args.seconds = ENV_IDS[:1], 3, 0.2
    info = machine_info(["mujoco", "gymnasium", "numpy", "envpool"])
    data: dict[str, Any] = {"machine": info, "arguments": vars(args), "rows": []}
    rows = []
    for env_id in args.env_ids:
        figures = compare(env_id, args.num_envs, args.num_threads, args.rounds, args.seconds)
        ours = figures["MujocoBatchVecEnv"]
        ratios = {name: median_ratio(ours, other) for name, other in figures.items()}
        data["rows"] += rows_of(env_id, figures, figures.keys() - {"MujocoBatchVecEnv"})
        for name, values in figures.items():
            best = summary(ours)["max"] / summary(values)["max"]
            figure = summary(values)
            rows.append(
                [
                    env_id,
                    name,
                    f"{figure['median']:,.0f}",
                    f"{ratios[name]:.2f}",
                    f"{figure['max']:,.0f}",
                    f"{best:.2f}",
                ]
            )
    header = ["task", "stepper", "steps/s (median)", "ours / this", "steps/s (best round)", "ours / this"]
    title = f"# MuJoCo stepping alone, {args.num_envs} environments, {args.num_threads} threads\n\n"
    page = title + markdown_table(header, rows) + "\n" + machine_line(info)
    write_results("mujoco_env", data, page, QUICK_RESULTS if args.quick else RESULTS)


if __name__ == "__main__":
    main()
