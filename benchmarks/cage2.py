"""CAGE2 stepping alone: our simulator in batches, in a Python loop and in processes, and what starting it costs.

    python -m benchmarks.cage2 [--quick]

Uniformly random actions, episodes of 100 steps, resets included, steps counted in single environments. The
candidates run in turn, round after round; ratios are medians over rounds of two figures of one round. The batches use
one core; steps per CPU second are what that core gives when nobody else wants it. The real CybORG is not on PyPI: its
speed (560-670 steps/s with resets) and MiniCAGE's (20,000 at 25 environments, 110,000 at 1,024) are quoted from the
project's own measurements of them (envs/cage2/SPEC.md, section 14), not taken here.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from benchmarks.common import (
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
from envs.cage2 import Cage2Env, Cage2VecEnv, simulator
from envs.subproc_vec_env import SubprocVecEnv

CYBORG_STEPS_PER_SECOND = 670  # with resets: 560 to 670
TARGETS = {25: 600_000, 1024: 1_500_000}
NUM_PROCESSES = 2
SYNC = "25 Cage2Env in SyncVectorEnv"
PEER = "25 CartPole in SyncVectorEnv"  # no line of ours: what `benchmarks.compare` holds ours against
IN_PROCESSES = f"25 Cage2Env in SubprocVecEnv, {NUM_PROCESSES} processes"

FIRST_USE = """
import sys, time
start = time.perf_counter()
import numpy as np
from envs.cage2 import Cage2VecEnv
imported = time.perf_counter()
env = Cage2VecEnv(25, "meander", seed=0)
env.reset()
env.step(np.zeros(25, int))
print(imported - start, time.perf_counter() - imported, time.process_time())
"""


def steps_per_second(env: VectorEnv, actions: np.ndarray, seconds: float, per_cpu: list[float]) -> float:
    """Step for about this long, in whole passes over `actions` (T, N); append steps per CPU second to `per_cpu`."""
    steps, start, cpu_start = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - start) < seconds:
        for action in actions:
            env.step(action)
        steps += actions.size
    per_cpu.append(steps / (time.process_time() - cpu_start))
    return steps / elapsed


def candidate(env: VectorEnv, seconds: float, num_steps: int, per_cpu: list[float]) -> Callable[[], float]:
    """Warm the environment up and return the function that measures it."""
    count = int(env.single_action_space.n)  # type: ignore[attr-defined]
    actions = np.random.default_rng(0).integers(count, size=(num_steps, env.num_envs))
    env.reset(seed=0)
    for action in actions[:20]:
        env.step(action)
    return partial(steps_per_second, env, actions, seconds, per_cpu)


def first_use(cache_dir: str) -> dict[str, float]:
    """Seconds to import the package and from there to the first step, and CPU seconds of both, in a new process."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache_dir}
    command = [sys.executable, "-c", FIRST_USE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return dict(zip(("import", "first_step", "cpu"), map(float, done.stdout.split()), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.3 s instead of 9 of 1 s")
    quick = parser.parse_args().quick
    rounds, seconds = (3, 0.3) if quick else (9, 1.0)
    info = machine_info(("numpy", "numba", "gymnasium"))

    single = partial(Cage2Env, "meander", state_in_info=False)
    processes = SubprocVecEnv([single] * 25, num_workers=NUM_PROCESSES, autoreset_mode=AutoresetMode.SAME_STEP)
    envs: dict[str, tuple[VectorEnv, int]] = {
        "Cage2VecEnv, 25 B_line": (Cage2VecEnv(25, "b_line"), 2000),
        "Cage2VecEnv, 25 Meander": (Cage2VecEnv(25, "meander"), 2000),
        "Cage2VecEnv, 25 Meander with Green": (Cage2VecEnv(25, "meander", green=True), 2000),
        "Cage2VecEnv, 1,024 B_line": (Cage2VecEnv(1024, "b_line"), 200),
        "Cage2VecEnv, 1,024 Meander": (Cage2VecEnv(1024, "meander"), 200),
        "Cage2VecEnv, 1 Meander": (Cage2VecEnv(1, "meander"), 2000),
        SYNC: (SyncVectorEnv([single] * 25, autoreset_mode="SameStep"), 100),
        IN_PROCESSES: (processes, 100),
        PEER: (SyncVectorEnv([partial(gym.make, "CartPole-v1")] * 25, autoreset_mode="SameStep"), 100),
    }
    try:
        per_cpu: dict[str, list[float]] = {name: [] for name in envs}
        candidates = {name: candidate(env, seconds, steps, per_cpu[name]) for name, (env, steps) in envs.items()}
        figures = interleave(candidates, rounds)
    finally:
        for env, _ in envs.values():
            env.close()

    with tempfile.TemporaryDirectory() as cache_dir:
        compiling = first_use(cache_dir)
        cached = first_use(cache_dir)

    rows = []
    for name, measured in figures.items():
        statistics = summary(measured)
        ratio = median_ratio(measured, figures[SYNC])
        cpu = f"{summary(per_cpu[name])['median']:,.0f}" if name != IN_PROCESSES else ""
        cyborg = "" if name == PEER else f"{statistics['median'] / CYBORG_STEPS_PER_SECOND:,.0f}"
        median, low, high = (f"{statistics[key]:,.0f}" for key in ("median", "min", "max"))
        rows.append([name, median, f"{low} - {high}", cpu, f"{ratio:.1f}", cyborg])

    state_bytes = simulator.new_states(1).nbytes
    data: dict[str, Any] = {
        "machine": info,
        "rows": rows_of("random actions", figures, [PEER]),
        "steps_per_cpu_second": per_cpu,
        "targets": TARGETS,
        "state_bytes_per_environment": state_bytes,
        "first_use_seconds": compiling,
        "later_use_seconds": cached,
    }
    columns = [
        "environments", "steps/s (median)", "min - max", "steps per CPU second", "times SyncVectorEnv",
        f"times CybORG ({CYBORG_STEPS_PER_SECOND}/s, quoted)",
    ]  # fmt: skip
    markdown = (
        f"# CAGE2 stepping alone, random actions, resets included ({rounds} rounds of {seconds} s)\n\n"
        + markdown_table(columns, rows)
        + f"\nOne core, except for the processes. One environment's whole state takes {state_bytes} bytes. From "
        f"import to the first step, the first use takes {compiling['import'] + compiling['first_step']:.1f} s "
        f"({compiling['cpu']:.1f} s of CPU; it compiles), every later one "
        f"{cached['import'] + cached['first_step']:.1f} s ({cached['cpu']:.1f} s). Asked for: {TARGETS[25]:,} steps/s "
        f"at 25 environments, {TARGETS[1024]:,} at 1,024, first use within 15 s, below 4 KiB.\n\n" + machine_line(info)
    )
    write_results("cage2", data, markdown, QUICK_RESULTS if quick else RESULTS)


if __name__ == "__main__":
    main()
