"""Learning results on the MuJoCo v5 tasks: several seeds of `ppo_continuous_mujoco.py`, beside published scores.

    python -m benchmarks.mujoco_learning                                   # all eleven tasks, 1 M steps, three seeds
    python -m benchmarks.mujoco_learning --tasks Hopper-v5 --seeds 1 2 3 4 5
    python -m benchmarks.mujoco_learning --quick                           # HalfCheetah, one seed, 200,000 steps
    python -m benchmarks.mujoco_learning --report                          # tables and curves of what has been run

Every run is a process with its own folder, runs/learning/{task}-{steps}-{seed}. A run that was killed is resumed, one
that is finished is not repeated, so the command can be stopped and started at will. Scores are the evaluations of the
runs themselves: ten deterministic episodes with fixed seeds and frozen normalisation.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, ROOT, machine_info, machine_line, markdown_table, write_results

FOLDER = ROOT / "runs" / "learning"
# task -> (preset, best published PPO return at 1 M steps that we know, its source); older task versions, a guide only
TASKS: dict[str, tuple[str, float, str]] = {
    "HalfCheetah-v5": ("halfcheetah", 5819, "SB3 rl-zoo"),
    "Ant-v5": ("ant", 3258, "Tianshou"),
    "Hopper-v5": ("hopper", 3353, "NJUWCY, best five points"),
    "Walker2d-v5": ("walker", 4273, "NJUWCY, best five points"),
    "Humanoid-v5": ("humanoid", 2130, "NJUWCY, best five points"),
    "HumanoidStandup-v5": ("humanoid", float("nan"), ""),
    "Swimmer-v5": ("swimmer", 282, "SB3 rl-zoo"),
    "Reacher-v5": ("reach", -4.1, "Tianshou"),
    "Pusher-v5": ("reach", float("nan"), ""),
    "InvertedPendulum-v5": ("reach", 1000, "Tianshou"),
    "InvertedDoublePendulum-v5": ("reach", 9231, "Tianshou"),
}


def command(task: str, steps: int, seed: int) -> list[str]:
    """The run's command line, as a reader would type it."""
    preset = TASKS[task][0]
    flags = f"--configs {preset} --env-id {task} --total-timesteps {steps} --seed {seed}"
    return ["ppo_continuous_mujoco.py", *shlex.split(flags)]


def run(task: str, steps: int, seed: int, workers: int) -> None:
    """Start, resume or skip one run."""
    logdir = FOLDER / f"{task}-{steps}-{seed}"
    if (logdir / "curves.png").exists():
        return
    if (logdir / "latest.pt").exists():
        flags = ["ppo_continuous_mujoco.py", "--resume"]
    else:
        flags = command(task, steps, seed)
    logdir.mkdir(parents=True, exist_ok=True)
    with open(logdir / "output.txt", "a") as output:
        line = [sys.executable, *flags, "--logdir", str(logdir), "--num-workers", str(workers)]
        subprocess.run(line, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)


def read_columns(path: Path) -> dict[str, np.ndarray]:
    header, *rows = path.read_text().splitlines()
    table = np.array([[float(x) for x in row.split(",")] for row in rows])
    return dict(zip(header.split(","), table.T, strict=True))


def bootstrap_interval(scores: np.ndarray, samples: int = 10_000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean over seeds."""
    draws = np.random.default_rng(0).choice(scores, (samples, len(scores))).mean(1)
    return float(np.percentile(draws, 2.5)), float(np.percentile(draws, 97.5))


def report(steps: int) -> None:
    """Write results/mujoco_learning_{steps}.json, .md and .png from the finished runs of that length."""
    import matplotlib.figure

    name = f"mujoco_learning_{steps // 1_000}k"
    data: dict[str, Any] = {"machine": machine_info(["torch", "gymnasium", "mujoco", "numpy"]), "runs": {}}
    rows, curves = [], {}
    for task, (preset, published, source) in TASKS.items():
        runs = sorted(FOLDER.glob(f"{task}-{steps}-*/curves.png"))
        if not runs:
            continue
        evaluations = [read_columns(path.parent / "eval.csv") for path in runs]
        seconds = np.array([read_columns(path.parent / "timing.csv")["time/seconds"][-1] for path in runs])
        final = np.array([e["eval/mean_return"][-1] for e in evaluations])
        best = np.array([e["eval/mean_return"].max() for e in evaluations])
        seeds = [int(path.parent.name.rsplit("-", 1)[1]) for path in runs]
        low, high = bootstrap_interval(final)
        curves[task] = (evaluations, published)
        data["runs"][task] = {
            "command": "python " + " ".join(command(task, steps, seeds[0])),
            "seeds": seeds,
            "final": final.tolist(),
            "best": best.tolist(),
            "seconds": seconds.tolist(),
            "curves": [{key: column.tolist() for key, column in e.items()} for e in evaluations],
        }
        rows.append([
            task, preset, len(seeds), f"{final.mean():,.0f}" if abs(final.mean()) > 100 else f"{final.mean():.1f}",
            "" if len(seeds) < 3 else f"{low:,.0f} to {high:,.0f}" if abs(low) > 100 else f"{low:.1f} to {high:.1f}",
            ", ".join(f"{x:,.0f}" if abs(x) > 100 else f"{x:.1f}" for x in final),
            f"{best.mean():,.0f}" if abs(best.mean()) > 100 else f"{best.mean():.1f}",
            "" if np.isnan(published) else f"{published:,g} ({source})", f"{np.median(seconds):.0f}",
        ])  # fmt: skip
    header = ["task", "preset", "seeds", "final, mean", "95 % interval", "final, each seed", "best in training, mean",
              "published", "seconds"]  # fmt: skip
    page = f"# MuJoCo v5 at {steps:,} steps\n\n`python -m benchmarks.mujoco_learning`. Return of ten deterministic "
    page += "episodes at the end of training, mean over seeds with a bootstrap interval; published scores are of older "
    page += "task versions and other protocols, a guide only. Seconds are wall-clock, mostly of a busy machine.\n\n"
    page += markdown_table(header, rows)
    page += f"\n![curves]({name}.png)\n\n" + machine_line(data["machine"])
    write_results(name, data, page)
    if curves:
        columns = min(4, len(curves))
        lines = -(-len(curves) // columns)
        figure = matplotlib.figure.Figure(figsize=(3.6 * columns, 2.7 * lines), layout="constrained")
        axes = list(np.atleast_1d(figure.subplots(lines, columns)).flat)
        for axis, (task, (evaluations, published)) in zip(axes, curves.items(), strict=False):
            for e in evaluations:
                axis.plot(e["global_step"] / 1e6, e["eval/mean_return"], lw=1.2)
            if not np.isnan(published):
                axis.axhline(published, color="0.4", ls="--", lw=1)
            axis.set_title(task, fontsize=9)
            axis.grid(alpha=0.3)
        for axis in axes[len(curves) :]:
            axis.set_visible(False)
        figure.supxlabel("million environment steps", fontsize=9)
        figure.savefig(RESULTS / f"{name}.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="ID")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with one environment thread")
    parser.add_argument("--quick", action="store_true", help="HalfCheetah, one seed, 200,000 steps")
    parser.add_argument("--report", action="store_true", help="only write the tables and curves of finished runs")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.seeds, options.steps = ["HalfCheetah-v5"], [1], 200_000
    if not options.report:
        with ThreadPoolExecutor(options.jobs) as pool:
            for seed in options.seeds:
                for task in options.tasks:
                    pool.submit(run, task, options.steps, seed, 2 if options.jobs == 1 else 1)
    report(options.steps)
    print(json.dumps({"results": str(RESULTS / f"mujoco_learning_{options.steps // 1_000}k.md")}))


if __name__ == "__main__":
    main()
