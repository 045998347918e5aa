"""Whole-loop training throughput on CAGE2: our script beside Stable-Baselines3's PPO on the same game.

    python -m benchmarks.cage2_loop            # 25 and 256 environments, five rounds
    python -m benchmarks.cage2_loop --quick    # 25 environments, three of the candidates, two rounds

Every measurement is a process of its own that trains a few updates; the first ones are warm-up (compiling, caches) and
do not count. Candidates take turns within a round, so a busy moment of the machine hits all of them, and ratios are
medians over rounds. Where candidates are compared, network (64-64 tanh, actor and critic apart), rollout, minibatch and
epochs are equal, and so are observations (52) and actions (145), unless a name says "memory": then they are 186 and 36,
our script's default. SB3 steps `Cage2Env` in its DummyVecEnv, or in its SubprocVecEnv with a process for each; ratios
are to the fastest of SB3's. Steps per CPU second count the time of all processes, and are what one free core gives.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    QUICK_RESULTS,
    RESULTS,
    ROOT,
    at_least_one,
    in_fresh_process,
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

SETTINGS = {  # name -> (num_envs, minibatch, updates of ours, updates of SB3)
    "25 environments x 100 steps, minibatch 2,500, 4 epochs": (25, 2500, 60, 30),
    "256 environments x 100 steps, minibatch 3,200, 4 epochs": (256, 3200, 10, 5),
}
CANDIDATES = ("ours: batch", "ours: batch, 2 threads", "ours: batch, memory", "ours: batch, memory, 2 threads",
              "ours: batch, no compile", "ours: subproc", "SB3: dummy", "SB3: dummy, 2 threads",
              "SB3: subproc")  # fmt: skip
QUICK_CANDIDATES = ("ours: batch", "SB3: dummy", "SB3: subproc")


def cpu_seconds() -> float:
    """CPU time of this process and of those children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure_ours(variant: str, num_envs: int, minibatch: int, updates: int) -> dict[str, float]:
    """Train `updates` updates after a few that do not count, because in them the gradient is compiled."""
    sys.path.insert(0, str(ROOT))
    import ppo_cage2_parallel as script

    warm_up = 5
    args = script.Args(num_envs=num_envs, num_minibatches=num_envs * 100 // minibatch, eval_episodes=1, eval_every=0,
                       save_every=0, num_workers=2)  # fmt: skip
    args.compile = "no compile" not in variant
    args.torch_threads = 2 if "2 threads" in variant else 1
    args.vec_env = "subproc" if "subproc" in variant else "batch"
    args.memory, args.actions = (True, "reduced") if "memory" in variant else (False, "full")
    marks: list[tuple[float, float]] = []
    write = script.Logger.write

    def noting_write(self: Any, file: str, step: int, metrics: dict[str, float]) -> None:
        if file == "progress.csv":
            marks.append((time.perf_counter(), cpu_seconds()))
        write(self, file, step, metrics)

    script.Logger.write = noting_write  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        args.logdir, args.total_timesteps = f"{scratch}/run", args.batch_size * (warm_up + updates)
        train_to_the_end(script, args)
        timing = script.read_csv(Path(scratch) / "run" / "timing.csv")
    wall, cpu = (end - start for start, end in zip(marks[warm_up - 1], marks[-1], strict=True))
    steps = updates * args.batch_size
    figures = {"sps": steps / wall}
    if args.vec_env == "batch":  # the CPU time of workers that still run is not known
        figures["per_cpu_second"] = steps / cpu
    names = ("env_share", "inference_share", "update_share")
    return figures | {name: float(timing[f"time/{name}"][warm_up:].mean()) for name in names}


def measure_sb3(variant: str, num_envs: int, minibatch: int, updates: int) -> dict[str, float]:
    """SB3's PPO on `Cage2Env`, in this process or one process per environment; the first updates do not count."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from benchmarks.reference_loops import sb3_seconds
    from envs.cage2 import Cage2Env

    torch.set_num_threads(2 if "2 threads" in variant else 1)
    in_processes = "subproc" in variant
    kwargs = {"red_agent": {"b_line": 0.5, "meander": 0.45, "sleep": 0.05}, "version": "leaderboard",
              "state_in_info": False}  # fmt: skip
    Cage2Env().reset(seed=0)  # compiled once, before the processes fork
    vec_env = make_vec_env(
        "envs.cage2:CAGE2-v0",
        num_envs,
        seed=1,
        env_kwargs=kwargs,
        vec_env_cls=SubprocVecEnv if in_processes else DummyVecEnv,
        vec_env_kwargs={"start_method": "fork"} if in_processes else {},  # fresh interpreters would take minutes
    )
    model = PPO(
        "MlpPolicy", vec_env, n_steps=100, batch_size=minibatch, n_epochs=4, ent_coef=0.01, device="cpu", seed=1
    )
    sb3_seconds(model, 3)
    cpu, seconds = cpu_seconds(), sum(sb3_seconds(model, updates))
    cpu, steps = cpu_seconds() - cpu, updates * num_envs * 100
    vec_env.close()
    return {"sps": steps / seconds} | ({} if in_processes else {"per_cpu_second": steps / cpu})


def in_process(last: dict[str, Any], candidate: str, setting: str) -> float:
    """Measure `candidate` in a fresh process; its figures go to `last`, its steps per second are returned."""
    last.setdefault(candidate, []).append(in_fresh_process("cage2_loop", candidate, setting))
    return last[candidate][-1]["sps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="25 environments, three candidates, two rounds")
    parser.add_argument("--rounds", type=at_least_one, default=None, help="rounds (default 5, quick 2)")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        candidate, setting = options.one
        num_envs, minibatch, updates, sb3_updates = SETTINGS[setting]
        loop, _, variant = candidate.partition(": ")
        measure, updates = (measure_sb3, sb3_updates) if loop == "SB3" else (measure_ours, updates)
        print(json.dumps(measure(variant, num_envs, minibatch, updates)))
        return
    rounds = options.rounds or (2 if options.quick else 5)
    info = machine_info(["torch", "gymnasium", "numpy", "numba", "stable-baselines3"])
    data: dict[str, Any] = {"machine": info, "rows": [], "results": {}}
    page = "# Whole-loop training throughput on CAGE2\n\n`python -m benchmarks.cage2_loop`: environment steps per " + (
        f"second, median of {rounds} interleaved rounds; ratios are medians of the ratios within rounds, shares of "
        "time are of the last round.\n"
    )
    for setting in list(SETTINGS)[: 1 if options.quick else 2]:
        last: dict[str, Any] = {}
        names = list(QUICK_CANDIDATES if options.quick else CANDIDATES)
        if SETTINGS[setting][0] > 25:
            names.remove("SB3: subproc")  # hundreds of processes on a few cores say nothing
        speeds = interleave({name: partial(in_process, last, name, setting) for name in names}, rounds)
        peers = [name for name in names if name.startswith("SB3")]
        reference = max(peers, key=lambda name: summary(speeds[name])["median"])
        data["rows"] += rows_of(setting, speeds, peers)
        data["results"][setting] = last
        rows = []
        info.pop("load_average_after", None)  # of the setting before
        for name in names:
            one = last[name]
            shares = [
                f"{one[-1][key]:.0%}" for key in ("env_share", "inference_share", "update_share") if key in one[-1]
            ]
            cpu = [measurement["per_cpu_second"] for measurement in one if "per_cpu_second" in measurement]
            wall = summary(speeds[name])
            rows.append([name, f"{wall['median']:,.0f}", f"{wall['min']:,.0f} - {wall['max']:,.0f}",
                         f"{summary(cpu)['median']:,.0f}" if cpu else "",
                         f"{median_ratio(speeds[name], speeds[reference]):.1f}", " / ".join(shares)])  # fmt: skip
        header = ["loop", "steps/s", "min - max", "per CPU second", f"x {reference}",
                  "environment / inference / update"]  # fmt: skip
        page += f"\n## {setting}\n\n" + markdown_table(header, rows)
        page += f"\nTimed over {SETTINGS[setting][2]} updates of ours and {SETTINGS[setting][3]} of SB3's.\n"
        folder = QUICK_RESULTS if options.quick else RESULTS
        write_results("cage2_loop", data, page + "\n" + machine_line(info), folder)


if __name__ == "__main__":
    main()
