"""The CAGE2 results page from finished runs: nine cells over 1,000 fresh episodes each, and the learning curves.

    python -m benchmarks.cage2_learning runs/seed_1 runs/seed_2 ... [--episodes 1000]
    python -m benchmarks.cage2_learning --quick    # trains for 100,000 steps first, then 20 episodes

Each run's best.pt (chosen on 200 episodes a cell with seeds from 10,000) plays episodes with seeds from 1,000,000,
which no run has seen, with deterministic actions, under the rules it was trained on. Published rows are quoted.
"""

import argparse
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.figure

import ppo_cage2_parallel as script
from benchmarks.common import (
    QUICK_RESULTS,
    RESULTS,
    ROOT,
    at_least_one,
    machine_info,
    machine_line,
    markdown_table,
    write_results,
)

CELLS = [f"{red}_{horizon}" for horizon in (30, 50, 100) for red in ("b_line", "meander", "sleep")]
PUBLISHED = {  # rules, the cells in the order of CELLS, score
    "CardiffUni, winner (published)": ("leaderboard", [-3.47, -5.64, 0, -6.41, -8.69, 0, -13.76, -16.6, 0], -54.57),
    "Keeping it RL, second (published)": ("leaderboard", [-3.48, -6.47, 0, -5.85, -10.33, 0, -11.39, -19.38, 0], -56.9),
    "CardiffUni's weights on HEAD (200 episodes, Sleep assumed 0)": (
        "head", [-5.47, -5.54, 0, -13.10, -8.69, 0, -37.87, -16.23, 0], -86.90),
}  # fmt: skip


def measure(logdir: Path, episodes: int) -> dict[str, Any]:
    """A run's arguments, its curve and time, and its best checkpoint's score over fresh episodes."""
    checkpoint = script.load_checkpoint(logdir / "best.pt")
    args = replace(script.known_args(checkpoint["args"]), eval_episodes=episodes)
    if args.red_agent != "mixed" or args.max_steps != 100 or args.finite_horizon:
        raise script.UsageError(f"{logdir} has not all nine cells: --red-agent, --max-steps, --finite-horizon differ.")
    for name in ("green", "wrapper", "memory", "actions", "workflow"):  # what the page says of all
        if getattr(args, name) != getattr(script.Args, name):
            raise script.UsageError(f"{logdir} has {script.flag(name)} {getattr(args, name)}, unlike the others.")
    agent = script.Agent(script.make_envs(replace(args, num_envs=1)), args)
    agent.load_state_dict(checkpoint["agent"])
    curve, timing = script.read_csv(logdir / "eval.csv"), script.read_csv(logdir / "timing.csv")
    seconds = dict(zip(timing["global_step"].tolist(), timing["time/seconds"].tolist(), strict=True))
    return {
        "args": checkpoint["args"], "best_step": checkpoint["counters"]["global_step"],
        "evaluation": script.evaluate(agent, args, seed=1_000_000),
        "steps": curve["global_step"].tolist(), "scores": curve["eval/score"].tolist(),
        "seconds": [seconds[step] for step in curve["global_step"].tolist()],
    }  # fmt: skip


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Score against steps and against wall-clock, with the winner's as a line."""
    figure = matplotlib.figure.Figure(figsize=(12, 4.5), layout="constrained")
    by_steps, by_time = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        by_steps.plot([step / 1e6 for step in run["steps"]], run["scores"], label=name)
        by_time.plot([seconds / 60 for seconds in run["seconds"]], run["scores"], label=name)
    for axis, label in ((by_steps, "million environment steps"), (by_time, "minutes of training, machine shared")):
        axis.axhline(-54.57, color="0.5", ls="--", lw=1, label="the winner, leaderboard rules")
        axis.set(xlabel=label, ylabel="score (sum of nine mean returns)")
        axis.grid(alpha=0.3)
    by_steps.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logdirs", nargs="*", type=Path, help="run folders of ppo_cage2_parallel.py")
    parser.add_argument("--episodes", type=at_least_one, default=1000, help="episodes against each red agent")
    parser.add_argument("--quick", action="store_true", help="train a run of 100,000 steps, evaluate 20 episodes")
    options = parser.parse_args()
    folder = QUICK_RESULTS if options.quick else RESULTS
    if options.quick:
        options.logdirs, options.episodes = [QUICK_RESULTS / "cage2_run"], 20
        shutil.rmtree(options.logdirs[0], ignore_errors=True)
        flags = ["--total-timesteps", "100000", "--eval-every", "50000", "--eval-episodes", "20", "--no-compile"]
        command = [sys.executable, "ppo_cage2_parallel.py", *flags, "--logdir", str(options.logdirs[0])]
        subprocess.run(command, cwd=ROOT, check=True)
    if not options.logdirs:
        parser.error("name the run folders of ppo_cage2_parallel.py, or --quick")
    info = machine_info(["torch", "gymnasium", "numpy", "numba"])
    runs = {}
    for logdir in options.logdirs:
        try:
            run = measure(logdir, options.episodes)
        except (script.UsageError, OSError) as error:  # no such checkpoint
            parser.error(str(error))
        name = f"{run['args']['version']}, seed {run['args']['seed']}"
        if name in runs:
            parser.error(f"{logdir} is the second run of {name}: a page has one of each.")
        runs[name] = run
    rows = []
    for name, run in runs.items():
        cells = run["evaluation"]["cells"]
        texts = [f"{cells[cell][0]:.2f} ± {cells[cell][1]:.2f}" for cell in CELLS]
        minutes = f"{run['seconds'][-1] / 60:.1f}"
        rows.append([name, f"**{run['evaluation']['score']:.2f}**", *texts,
                     f"{run['best_step'] / 1e6:.1f} M of {run['steps'][-1] / 1e6:.0f} M", minutes])  # fmt: skip
    for name, (rules, values, score) in PUBLISHED.items():
        rows.append([f"{name}: {rules}", f"{score:.2f}", *(f"{value:.2f}" for value in values), "", ""])
    header = ["rules, seed", "score", *(cell.replace("_", " ") for cell in CELLS), "steps", "minutes"]
    page = (
        f"# CAGE2: one policy against three red agents\n\nMean return ± standard error over {options.episodes:,} fresh "
        "episodes a red agent, deterministic actions, no Green; the score is the sum of the cells. Ours is each run's "
        "best checkpoint by its evaluations on other episodes, with the official wrapper, our memory and reduced "
        "actions. Blue is not told which red agent it faces.\n\n" + markdown_table(header, rows) + "\n"
        "![learning curves](cage2_learning.png)\n\n" + machine_line(info)
    )
    write_results("cage2_learning", {"machine": info, "runs": runs}, page, folder)
    draw(runs, folder / "cage2_learning.png")


if __name__ == "__main__":
    main()
