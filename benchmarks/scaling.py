"""How throughput and memory grow with the number of environments and of workers.

    python -m benchmarks.scaling            # 1 to 4,096 environments, three rounds: about ten minutes
    python -m benchmarks.scaling --quick    # a few counts, two short rounds

Each measurement is a process of its own, which builds the environments, steps them with random actions (episodes end
and begin anew), and then adds up the memory of itself and its workers. All take turns, round after round. "Memory" is
what they wrote (anonymous and shared memory, each page counted once however many of them share it), without the code of
programs and libraries. "Peak" is the sum of each process's largest resident set (VmHWM), code included, in which pages
that processes share count for each of them. Linux only, for it reads /proc.

The cost of a step is the CPU time that the process and its workers spend on it, which a busy machine changes least. It
grows no faster than linearly in N if one environment's share of it does not grow: the table names the N at which that
share is largest, compared to the smallest at fewer environments. A cost that is quadratic in N doubles there with every
doubling of N.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import matplotlib.figure
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from benchmarks.common import (
    CORES,
    at_least_one,
    in_fresh_process,
    interleave,
    machine_info,
    machine_line,
    markdown_table,
    parser_of,
    positive_seconds,
    write_results,
)
from envs.cage2 import Cage2VecEnv
from envs.mario import MarioEnv, available_backends
from envs.mujoco_batch import MujocoBatchVecEnv
from envs.subproc_vec_env import SubprocVecEnv

COUNTS = (1, 4, 16, 64, 256, 1024, 4096)
WORKERS = (1, 2, 4, 8)  # tried with NUM_ENVS_OF_WORKERS environments, where there are workers
NUM_ENVS_OF_WORKERS = 64
TOLERANCE = 1.25  # a cost per environment that grows by less is noise, or a cache that is full


def subproc(env_fn: Callable[[], gym.Env], num_envs: int, workers: int) -> VectorEnv:
    """As `vectorize()` makes it: by fork, which is not the default of the spawned process that measures."""
    return SubprocVecEnv([env_fn] * num_envs, workers, context="fork", autoreset_mode=AutoresetMode.SAME_STEP)


CARTPOLE = partial(gym.make, "CartPole-v1")


def sync(num_envs: int, workers: int) -> VectorEnv:
    return SyncVectorEnv([CARTPOLE] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


MARIO_COUNTS = {"fceumm": (1, 4, 16, 64, 256), "nes_py": (1, 4, 16)}
# name -> (how to build num_envs of it with so many workers, the counts, whether to try several numbers of workers)
KINDS: dict[str, tuple[Callable[[int, int], VectorEnv], tuple[int, ...], bool]] = {
    "Cage2VecEnv": (lambda num_envs, _: Cage2VecEnv(num_envs, "meander"), COUNTS, False),
    "Cage2VecEnv, state in infos": (
        lambda num_envs, _: Cage2VecEnv(num_envs, "meander", state_in_info=True), COUNTS, False),
    "MujocoBatchVecEnv, HalfCheetah-v5": (
        lambda num_envs, workers: MujocoBatchVecEnv("HalfCheetah-v5", num_envs, workers), COUNTS, True),
    "SubprocVecEnv, CartPole-v1": (partial(subproc, CARTPOLE), COUNTS, True),
    "SyncVectorEnv, CartPole-v1": (sync, COUNTS, False),
    **{f"SubprocVecEnv, Mario on {backend}": (partial(subproc, partial(MarioEnv, "1-1", backend)), counts, False)
       for backend, counts in MARIO_COUNTS.items() if backend in available_backends()},
}  # fmt: skip


def process_tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(child) for child in (task / "children").read_text().split()]
    return [pid, *(descendant for child in children for descendant in process_tree(child))]


def memory() -> dict[str, float]:
    """MiB of this process and its descendants: what they wrote, the shared memory in it, and the sum of peaks."""

    def kib(file: str, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    tree = process_tree(os.getpid())
    private, shared = (
        sum(kib(f"/proc/{pid}/smaps_rollup", name) for pid in tree) / 1024 for name in ("Pss_Anon", "Pss_Shmem")
    )
    return {
        "memory_mib": private + shared,
        "shared_mib": shared,
        "peak_mib": sum(kib(f"/proc/{pid}/status", "VmHWM") for pid in tree) / 1024,
    }


def cpu_seconds() -> float:
    """CPU time of this process and its descendants so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in process_tree(os.getpid())]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def measure(kind: str, num_envs: int, workers: int, seconds: float) -> dict[str, float]:
    """Build, step for so many seconds (at least three steps) and weigh, in this process."""
    envs = KINDS[kind][0](num_envs, workers)
    try:
        envs.action_space.seed(0)
        actions = [envs.action_space.sample() for _ in range(16)]
        envs.reset(seed=0)
        envs.step(actions[0])
        steps, start, cpu_start = 0, time.perf_counter(), cpu_seconds()
        while time.perf_counter() - start < seconds or steps < 3:
            envs.step(actions[steps % len(actions)])
            steps += 1
        cpu = max(cpu_seconds() - cpu_start, 0.01)  # its clock ticks in hundredths
        return {"steps_per_cpu_second": steps * num_envs / cpu, **memory()}
    finally:
        envs.close()


def growth(counts: list[int], steps_per_cpu_second: list[float]) -> dict[str, Any]:
    """How the cost of a step grows: the exponent of a power law fitted from 16 environments on, and the largest rise
    of the cost per environment over the lowest at fewer environments, with the count where it is."""
    costs = 1 / np.array(steps_per_cpu_second)  # seconds for one environment's step
    rises = costs[1:] / np.minimum.accumulate(costs)[:-1]
    worst = int(np.argmax(rises))
    many = np.array(counts) >= 16
    exponent = None
    if many.sum() > 1:
        seconds = np.array(counts)[many] * costs[many]  # for a step of all
        exponent = float(np.polyfit(np.log(np.array(counts)[many]), np.log(seconds), 1)[0])
    return {"exponent": exponent, "rise": float(rises[worst]), "at": counts[worst + 1]}


def kib_per_environment(counts: list[int], memory_mib: list[float]) -> float:
    """Slope between the fewest from 4 on (there all workers are at work) and the most environments."""
    first = next(i for i, count in enumerate(counts) if count >= 4)
    return 1024 * (memory_mib[-1] - memory_mib[first]) / (counts[-1] - counts[first])


def lines_of(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The points of each stepper by number of environments, with as many workers as there are cores."""
    points = [point for point in data["points"] if point["workers"] in (0, data["machine"]["cores"])]
    return {kind: [p for p in points if p["kind"] == kind] for kind in dict.fromkeys(p["kind"] for p in points)}


def draw(data: dict[str, Any], path: Path) -> None:
    """Steps per CPU second and memory over the number of environments."""
    figure = matplotlib.figure.Figure(figsize=(12, 5.2), layout="constrained")
    labels = {"steps_per_cpu_second": "environment steps per CPU second", "memory_mib": "memory, MiB"}
    for axis, (key, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        for kind, line in lines_of(data).items():
            axis.loglog([p["num_envs"] for p in line], [p[key] for p in line], "o-", ms=3, lw=1.2, label=kind)
        axis.set(xlabel="environments", ylabel=label)
        axis.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=100)


def page_of(data: dict[str, Any]) -> str:
    """The page of what `run_all` returned."""
    page = "# Throughput and memory against the number of environments\n\n`python -m benchmarks.scaling`: steps of "
    page += "single environments per second of CPU time, their workers' included, with random actions; medians of "
    page += f"{data['rounds']} interleaved rounds.\n\n![steps per CPU second and memory](scaling.png)\n\n"
    rows = []
    for kind, line in lines_of(data).items():
        fit, numbers = data["fits"][kind], [p["num_envs"] for p in line]
        verdict = "yes" if fit["rise"] < TOLERANCE else f"no: {fit['rise']:.2f} times the cost at {fit['at']:,}"
        exponent = "" if fit["exponent"] is None else f"{fit['exponent']:.2f}"
        rows.append(
            [kind, f"{numbers[0]:,} to {numbers[-1]:,}", exponent, verdict, f"{fit['kib_per_environment']:,.1f}"]
        )
    header = ["stepper", "environments", "exponent from 16 on", "no faster than linear", "memory per environment, KiB"]
    page += "## How the cost of a step grows\n\n" + markdown_table(header, rows) + "\n## All measurements\n\n"
    header = ["stepper", "environments", "workers", "steps per CPU second", "memory, MiB", "of it shared", "peak, MiB"]
    rows = [[p["kind"], f"{p['num_envs']:,}", p["workers"] or "", f"{p['steps_per_cpu_second']:,.0f}",
             f"{p['memory_mib']:,.0f}", f"{p['shared_mib']:,.1f}", f"{p['peak_mib']:,.0f}"]
            for p in data["points"]]  # fmt: skip
    return page + markdown_table(header, rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few counts, two rounds of 0.2 s, into runs/bench")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--seconds", type=positive_seconds, default=1.0, help="length of one measurement")
    options = parser.parse_args()
    rounds, seconds = (2, 0.2) if options.quick else (options.rounds, options.seconds)
    info = machine_info()
    wanted: list[tuple[str, int, int]] = []  # kind, environments, workers (0: it has none to choose)
    for kind, (_, counts, sweeps_workers) in KINDS.items():
        counts = tuple(count for count in counts if count in (4, 16, 1024)) if options.quick else counts
        wanted += [(kind, count, CORES if sweeps_workers or "Mario" in kind else 0) for count in counts]
        if sweeps_workers and not options.quick:
            wanted += [(kind, NUM_ENVS_OF_WORKERS, workers) for workers in WORKERS if workers != CORES]
    measured: dict[tuple[str, int, int], list[dict[str, float]]] = {key: [] for key in wanted}

    def speed(key: tuple[str, int, int]) -> float:
        kind, num_envs, workers = key
        measured[key].append(in_fresh_process(measure, kind=kind, num_envs=num_envs, workers=workers, seconds=seconds))
        return measured[key][-1]["steps_per_cpu_second"]

    interleave({str(key): partial(speed, key) for key in wanted}, rounds)
    data: dict[str, Any] = {"machine": info, "rounds": rounds, "points": [], "fits": {}}
    for kind, num_envs, workers in wanted:
        found = measured[kind, num_envs, workers]
        medians = {name: float(np.median([one[name] for one in found])) for name in found[0]}
        data["points"].append({"kind": kind, "num_envs": num_envs, "workers": workers, **medians,
                               "rounds": found})  # fmt: skip
    for kind, line in lines_of(data).items():
        numbers = [p["num_envs"] for p in line]
        data["fits"][kind] = growth(numbers, [p["steps_per_cpu_second"] for p in line]) | {
            "kib_per_environment": kib_per_environment(numbers, [p["memory_mib"] for p in line])
        }
    page = page_of(data) + "\n" + machine_line(info)
    draw(data, write_results("scaling", data, page, options.quick) / "scaling.png")


if __name__ == "__main__":
    main()
