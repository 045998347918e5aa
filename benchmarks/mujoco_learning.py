"""Learning results on the MuJoCo v5 tasks: several seeds of `ppo_continuous_mujoco.py`, beside published scores.

    python -m benchmarks.mujoco_learning                                   # all eleven tasks, 1 M steps, three seeds
    python -m benchmarks.mujoco_learning --tasks Hopper-v5 --seeds 1 2 3 4 5
    python -m benchmarks.mujoco_learning --peer-seeds 1 2                  # and SB3's PPO as its RL Zoo tuned it, hours
    python -m benchmarks.mujoco_learning --quick                           # HalfCheetah, one seed, 200,000 steps
    python -m benchmarks.mujoco_learning --report                          # tables and curves of what has been run

Every run is a process with its own folder, runs/learning/{task}-{steps}-{seed}. A run that was killed is resumed, one
that is finished is not repeated, so the command can be stopped and started at will. Scores are the evaluations of the
runs themselves: ten deterministic episodes with fixed seeds and frozen normalisation.

results/mujoco_learning_{steps}.json keeps every seed's curve. A report adds the finished runs to it and drops those
with other arguments than the task has today, ours or SB3's, so run folders may be deleted. Presets were chosen on seeds
from 101 up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np

import ppo_continuous_mujoco as script
from benchmarks.arguments import args_of_command, args_of_run, set_aside_if_changed
from benchmarks.common import (
    QUICK_RESULTS,
    RESULTS,
    ROOT,
    at_least_one,
    cpu_model,
    machine_info,
    machine_line,
    markdown_table,
    write_results,
)
from benchmarks.sb3_zoo import ZOO
from benchmarks.seeds import Run, number, statistics_of, with_interval

FOLDER = ROOT / "runs" / "learning"
# task -> (preset, best published PPO return at 1 M steps that we know, its source); older task versions, a guide only
TASKS: dict[str, tuple[str, float, str]] = {
    "HalfCheetah-v5": ("halfcheetah", 5819, "SB3 rl-zoo"),
    "Ant-v5": ("ant", 3258, "Tianshou"),
    "Hopper-v5": ("hopper", 3353, "NJUWCY, best five points"),
    "Walker2d-v5": ("walker", 4273, "NJUWCY, best five points"),
    "Humanoid-v5": ("humanoid", 2130, "NJUWCY, best five points"),
    "HumanoidStandup-v5": ("standup", float("nan"), ""),
    "Swimmer-v5": ("swimmer", 282, "SB3 rl-zoo"),
    "Reacher-v5": ("reacher", -4.1, "Tianshou"),
    "Pusher-v5": ("pusher", float("nan"), ""),
    "InvertedPendulum-v5": ("pusher", 1000, "Tianshou"),
    "InvertedDoublePendulum-v5": ("hopper", 9231, "Tianshou"),
}


def command(task: str, steps: int, seed: int) -> list[str]:
    """The run's command line, as a reader would type it."""
    flags = ["--configs", TASKS[task][0], "--env-id", task, "--total-timesteps", str(steps), "--seed", str(seed)]
    return ["ppo_continuous_mujoco.py", *flags]


def is_finished(logdir: Path) -> bool:
    return (logdir / "config.json").exists() and Run([], 0, logdir).is_finished()


def run(task: str, steps: int, seed: int, workers: int) -> None:
    """Start, resume or skip one run of ours; a run with other arguments than the task has today is moved aside."""
    logdir = FOLDER / f"{task}-{steps}-{seed}"
    set_aside_if_changed(script, command(task, steps, 1), logdir)
    if is_finished(logdir):
        return
    if (logdir / "latest.pt").exists():
        words = ["ppo_continuous_mujoco.py", "--resume"]
    else:
        words = command(task, steps, seed)
    run_process([*words, "--logdir", str(logdir), "--num-workers", str(workers)], logdir)


def run_peer(task: str, steps: int, seed: int) -> None:
    """Run or skip SB3 on one task; what was killed, or had other parameters, begins anew."""
    folder = FOLDER / f"sb3-{task}-{steps}-{seed}"
    if not ((folder / "seconds.txt").exists() and has_todays_options(read_run(folder), task)):
        (folder / "seconds.txt").unlink(missing_ok=True)
        options = ["--task", task, "--steps", str(steps), "--seed", str(seed), "--folder", str(folder)]
        started = time.perf_counter()
        run_process(["-m", "benchmarks.sb3_zoo", *options], folder)
        (folder / "seconds.txt").write_text(str(time.perf_counter() - started))


def has_todays_options(peer: dict[str, Any], task: str) -> bool:
    """Whether SB3's run had the parameters that it would have today; its first runs did not write them."""
    return peer.get("options", ZOO[task]) == ZOO[task]


def run_process(words: list[str], folder: Path) -> None:
    """Run `python words...` and add its CPU seconds to cpu_seconds.txt. Raises RuntimeError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.txt").write_text(cpu_model())
    with open(folder / "output.txt", "a") as output, open(folder / "cpu_seconds.txt", "a") as cpu_seconds:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        print(usage.ru_utime + usage.ru_stime, file=cpu_seconds)
    if process.returncode:
        raise RuntimeError(f"A run failed with exit code {process.returncode}: see {folder / 'output.txt'}.")


def read_run(logdir: Path) -> dict[str, Any]:
    """What the results keep of a finished run, ours or SB3's."""
    evaluations = {key.removeprefix("eval/"): x.tolist() for key, x in script.read_csv(logdir / "eval.csv").items()}
    cpu, cpu_seconds, seconds = (logdir / f"{name}.txt" for name in ("cpu", "cpu_seconds", "seconds"))
    config, options = logdir / "config.json", logdir / "options.json"  # of ours, of SB3's
    return {
        "seconds": float(
            seconds.read_text() if seconds.exists() else script.read_csv(logdir / "timing.csv")["time/seconds"][-1]
        ),
        "cpu_seconds": sum(map(float, cpu_seconds.read_text().split())) if cpu_seconds.exists() else None,
        "cpu": cpu.read_text() if cpu.exists() else cpu_model(),
        "evaluations": evaluations,
        **({"commit": json.loads(config.read_text())["commit"]} if config.exists() else {}),
        **({"options": json.loads(options.read_text())} if options.exists() else {}),
    }


def minutes_of(run: dict[str, Any]) -> np.ndarray:
    """When each evaluation took place, in minutes of the run; its time was spent evenly over its steps."""
    steps = np.array(run["evaluations"]["global_step"])
    return run["seconds"] / 60 * steps / steps[-1]


def merge(stored: dict[str, Any], task: str, steps: int) -> dict[str, Any]:
    """{"command", "args", "seeds": {seed: run}, "sb3_seeds": {seed: run}} of a task: the stored runs and the finished
    ones, of ours those that had `args`."""
    args, before = args_of_command(script, command(task, steps, 1)), stored.get("args", {})
    # An argument that was added or removed since then changes nothing.
    same = stored and all(args[name] == before[name] for name in args.keys() & before.keys())
    seeds = stored["seeds"] if same else {}
    for config in FOLDER.glob(f"{task}-{steps}-*/config.json"):
        logdir = config.parent
        if is_finished(logdir) and args_of_run(script, logdir) == args:
            seeds[str(json.loads(config.read_text())["args"]["seed"])] = read_run(logdir)
    finished = {file.parent.name.split("-")[-1]: read_run(file.parent)
                for file in FOLDER.glob(f"sb3-{task}-{steps}-*/seconds.txt")}  # fmt: skip
    peers = {seed: run for runs in (stored.get("sb3_seeds", {}), finished) for seed, run in runs.items()
             if has_todays_options(run, task)}  # fmt: skip
    seeds, peers = ({seed: runs[seed] for seed in sorted(runs, key=int)} for runs in (seeds, peers))
    return {"command": "python " + " ".join(command(task, steps, 1)), "args": args, "seeds": seeds, "sb3_seeds": peers}


def report(steps: int, folder: Path = RESULTS) -> None:
    """Write mujoco_learning_{steps}.json, .md and .png from what is stored in `folder` and the finished runs."""
    name = f"mujoco_learning_{steps // 1_000}k"
    path = folder / f"{name}.json"
    stored = json.loads(path.read_text())["tasks"] if path.exists() else {}
    everything = {task: merge(stored.get(task, {}), task, steps) for task in TASKS}
    everything = {task: result for task, result in everything.items() if result["seeds"] or result["sb3_seeds"]}
    tasks = {task: result for task, result in everything.items() if result["seeds"]}
    with_sb3 = any(result["sb3_seeds"] for result in tasks.values())
    rows, ends = [], (itemgetter(-1), max)
    for task, result in tasks.items():
        preset, published, source = TASKS[task]
        runs = list(result["seeds"].values())
        final = np.array([run["evaluations"]["mean_return"][-1] for run in runs])
        best = np.array([max(run["evaluations"]["mean_return"]) for run in runs])
        interval = with_interval(statistics_of(final), "interquartile_mean") if len(runs) >= 3 else ""
        cpu = [run["cpu_seconds"] for run in runs if run["cpu_seconds"]]
        peers = [run["evaluations"]["mean_return"] for run in result["sb3_seeds"].values()]
        rows.append([
            task, preset, ", ".join(result["seeds"]), number(final.mean()), interval, ", ".join(map(number, final)),
            number(best.mean()), f"{number(published)} ({source})" if source else "",
            f"{np.median([run['seconds'] for run in runs]):.0f}", f"{np.median(cpu):.0f}" if cpu else "",
            *([", ".join(number(end(curve)) for curve in peers) for end in ends] if with_sb3 else []),
        ])  # fmt: skip
    header = ["task", "preset", "seeds", "final, mean", "interquartile mean (95 %)", "final, each seed",
              "best in training, mean", "published at 1 M", "seconds", "CPU seconds",
              *(["SB3 here, final, each seed", "best in its training, each seed"] if with_sb3 else [])]  # fmt: skip
    sb3 = (
        "SB3 has the parameters that its Zoo tuned (`benchmarks/sb3_zoo.py`; Humanoid's and HumanoidStandup's were "
        "tuned for ten times the steps, Ant's and Pusher's are SB3's defaults), the same steps and the same ten "
        "evaluation episodes."
    )
    page = (
        f"# MuJoCo v5 at {steps:,} steps\n\n`python -m benchmarks.mujoco_learning --steps {steps}`. Return of ten "
        "deterministic episodes of the last policy, and statistics over seeds (of three seeds the interquartile mean "
        "is the mean, and the interval their range; of five it is still too narrow). The presets were chosen on other "
        "seeds, 101 "
        "and up. Published scores are of older task versions and other protocols, a guide only. Seconds are medians of "
        "the time spent on collecting and learning, mostly on a busy machine, CPU seconds of whole processes, where "
        f"taken. {sb3 if with_sb3 else 'SB3 has not been run here (`--peer-seeds`).'}\n\n"
    )
    page += markdown_table(header, rows)
    info = machine_info(["torch", "gymnasium", "mujoco", "numpy"])
    cpus = sorted({run["cpu"] for result in tasks.values() for run in result["seeds"].values()})
    commits = {task: {run["commit"][:7] for run in result["seeds"].values() if run.get("commit")}
               for task, result in tasks.items()}  # fmt: skip
    noted = "; ".join(f"{task} {', '.join(sorted(found))}" for task, found in commits.items() if found)
    page += f"\n![curves over steps]({name}.png)\n"
    page += f"\n![curves over minutes]({name}_minutes.png)\n\nMinutes of ours are those of collecting and learning, "
    page += f"SB3's also hold its start and its evaluations.\n\nRuns on {' and '.join(cpus)}"
    page += f", of the commits (noted since November 2026) {noted}. " if noted else ". "
    page += machine_line(info, "Page written")
    write_results(name, {"machine": info, "tasks": everything}, page, folder)
    if tasks:
        draw(tasks, folder / f"{name}.png", "million environment steps")
        draw(tasks, folder / f"{name}_minutes.png", "minutes")


def draw(tasks: dict[str, Any], path: Path, over: str) -> None:
    """A panel a task: every seed's evaluations over steps or (logarithmic) minutes, SB3's dotted, and the published
    score as a line."""
    columns = min(4, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = matplotlib.figure.Figure(figsize=(3.6 * columns, 2.7 * lines), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(lines, columns)).flat)
    for axis, (task, result) in zip(axes, tasks.items(), strict=False):
        for runs, style in (
            (result["seeds"], {"lw": 1.2}),
            (result["sb3_seeds"], {"color": "0.3", "ls": ":", "lw": 1.2}),
        ):
            for run in runs.values():
                steps = np.array(run["evaluations"]["global_step"])
                when = minutes_of(run) if over == "minutes" else steps / 1e6
                axis.plot(when, run["evaluations"]["mean_return"], **style)
        published = TASKS[task][1]
        if not np.isnan(published):
            axis.axhline(published, color="0.4", ls="--", lw=1)
        if over == "minutes":
            axis.set_xscale("log")
        axis.set_title(task, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[len(tasks) :]:
        axis.set_visible(False)
    figure.supxlabel(over, fontsize=9)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="ID")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="of our runs; without numbers: none")
    parser.add_argument("--peer-seeds", nargs="+", type=int, default=[], help="seeds of SB3's runs")
    parser.add_argument("--steps", type=at_least_one, default=1_000_000)
    parser.add_argument("--jobs", type=at_least_one, default=2, help="runs at a time, each with one environment thread")
    parser.add_argument("--quick", action="store_true", help="HalfCheetah, one seed, 200,000 steps")
    parser.add_argument("--report", action="store_true", help="only write the tables and curves of finished runs")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.seeds, options.steps = ["HalfCheetah-v5"], [1], 200_000
        if not options.report:  # else the second time would show nothing
            shutil.rmtree(FOLDER / f"HalfCheetah-v5-{options.steps}-1", ignore_errors=True)
    if not options.report:
        threads = 2 if options.jobs == 1 else 1
        jobs = [partial(run, task, options.steps, seed, threads) for seed in options.seeds for task in options.tasks]
        jobs += [partial(run_peer, task, options.steps, seed) for seed in options.peer_seeds for task in options.tasks]
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                for future in as_completed([pool.submit(job) for job in jobs]):
                    future.result()
            except BaseException:  # Ctrl-C, or a run that failed: the next ones are not begun
                pool.shutdown(cancel_futures=True)
                raise
    folder = QUICK_RESULTS if options.quick else RESULTS
    report(options.steps, folder)
    print(json.dumps({"results": str(folder / f"mujoco_learning_{options.steps // 1_000}k.md")}))


if __name__ == "__main__":
    main()
