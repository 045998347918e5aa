"""A task without an end, TwoQueue-v0, learnt under several objectives and reward scalings: which reach the optimum?

    python -m benchmarks.continuing [--seeds 1 2 3] [--jobs 2]
    python -m benchmarks.continuing --quick    # one seed of 4,096 steps each, to see that all works
    python -m benchmarks.continuing --report   # the page of what has been run

Each variant is the preset `queue` of ppo_continuous_mujoco.py with one thing changed, 51,200 steps. Scores are of its
last ten evaluation episodes of 512 steps, in the task's own units: the long-term average (LTA) of the raw reward, which
is minus the mean backlog, and whether the backlog had stopped growing (`is_stable`). Value losses stand beside them to
show what they are worth: they are in the squared units of whatever reward the agent was given.

The best policy serves a queue whenever one waits. Its mean backlog is measured in the same episodes, as that of serving
the longer queue; beside it stands the one of actions drawn at random.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any

import numpy as np

import ppo_continuous_mujoco as script
from benchmarks.arguments import is_current, set_aside_if_changed
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
from benchmarks.seeds import Run, UsageError, run_all
from envs.queueing import TwoQueueEnv

PRESET = ["ppo_continuous_mujoco.py", "--configs", "queue", "--num-workers", "1", "--total-timesteps", "51200"]
DISCOUNTED = ["--no-average-reward", "--gamma"]
VARIANTS: dict[str, list[str]] = {
    "average reward": [],
    "average reward, advantages as they are": ["--no-norm-adv"],
    "average reward, reward / step in the episode": ["--time-scaled-reward"],
    "discount 0.99": [*DISCOUNTED, "0.99"],
    "discount 0.99, reward / spread of returns": [*DISCOUNTED, "0.99", "--norm-reward"],
    "discount 0.99, reward / step in the episode": [*DISCOUNTED, "0.99", "--time-scaled-reward"],
    "discount 0.9": [*DISCOUNTED, "0.9"],
    "discount 0.9, reward / spread of returns": [*DISCOUNTED, "0.9", "--norm-reward"],
}
EPISODES, STEPS, FIRST_SEED = 10, 512, 10_000  # those of an evaluation


def backlog_of(rule: str) -> float:
    """The mean backlog over the evaluation's episodes if the longer queue is served, or one drawn at random."""
    total, rng = 0.0, np.random.default_rng(0)
    for episode in range(EPISODES):
        env = TwoQueueEnv()
        backlog, _ = env.reset(seed=FIRST_SEED + episode)
        for _ in range(STEPS):
            action = backlog[1] - backlog[0] if rule == "longer" else rng.normal()
            backlog, reward, *_ = env.step(np.array([action]))
            total -= reward
    return total / (EPISODES * STEPS)


def read_run(run: Run) -> dict[str, Any]:
    """What the results keep of a finished run; means over the last tenth of the updates where they are of training."""
    progress, evaluations = script.read_csv(run.logdir / "progress.csv"), script.read_csv(run.logdir / "eval.csv")
    tenth = max(1, len(progress["global_step"]) // 10)
    last = {name.partition("/")[2]: float(progress[name][-tenth:].mean())
            for name in ("rollout/mean_reward", "train/explained_variance", "train/value_loss")}  # fmt: skip
    return {
        "seed": run.seed,
        "steps": int(evaluations["global_step"][-1]),
        "LTA": float(evaluations["eval/mean_return"][-1] / evaluations["eval/mean_length"][-1]),
        "stable": float(evaluations["eval/stable"][-1]),
        **last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=at_least_one, default=1, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="one seed of 4,096 steps each, not compiled")
    parser.add_argument("--report", action="store_true", help="only write the page of finished runs")
    options = parser.parse_args()
    short = ["--no-compile", "--total-timesteps", "4096"] if options.quick else []
    folder = ROOT / "runs" / "continuing" / ("quick" if options.quick else "full")
    runs = {
        name: [Run([*PRESET, *words, *short], seed, folder / f"{name.replace(' / ', ' by ').replace(' ', '_')}_{seed}")
               for seed in ([1] if options.quick else options.seeds)]
        for name, words in VARIANTS.items()
    }  # fmt: skip
    if not options.report:
        if options.quick:  # else the second time would show nothing
            shutil.rmtree(folder, ignore_errors=True)
        every_run = [run for group in runs.values() for run in group]
        for run in every_run:
            set_aside_if_changed(script, run.command, run.logdir)
        try:
            code = run_all(every_run, options.jobs)
        except UsageError as error:
            sys.exit(f"error: {error}")
        if code:
            sys.exit(code)
    finished = {
        name: [read_run(run) for run in group if is_current(script, run.command, run.logdir) and run.is_finished()]
        for name, group in runs.items()
    }
    finished = {name: group for name, group in finished.items() if group}
    if not finished:
        sys.exit("error: no run is finished yet, so there is nothing to report.")

    def each(group: list[dict[str, Any]], name: str, form: str) -> str:
        return ", ".join(f"{run[name]:{form}}" for run in group)

    rows = [[name, f"`{' '.join(VARIANTS[name])}`" if VARIANTS[name] else "(the preset)", each(group, "LTA", ".2f"),
             each(group, "mean_reward", ".2f"), each(group, "stable", ".0f"),
             each(group, "explained_variance", ".2f"), each(group, "value_loss", ".2g")]
            for name, group in finished.items()]  # fmt: skip
    bounds = {rule: backlog_of(rule) for rule in ("longer", "random")}
    page = (
        "# TwoQueue-v0: a task without an end\n\n`python -m benchmarks.continuing`: the preset `queue`, "
        f"{next(iter(finished.values()))[0]['steps']:,} steps, one thing changed at a time; one number per seed. LTA: "
        "long-term average of the raw reward, minus the mean backlog, of the last evaluation (the policy's mode) and "
        "of the last tenth of the training (sampled actions, soon after a reset). Whoever serves the longer queue has "
        f"{-bounds['longer']:.2f} in the episodes of the evaluation, actions at random {-bounds['random']:.2f}. Value "
        "losses, of the last tenth too, have the unit of each variant's own reward, squared: they do not compare.\n\n"
    )
    header = ["objective and reward", "flags", "LTA, evaluation", "LTA, training", "stable",
              "explained variance", "value loss"]  # fmt: skip
    info = machine_info(["torch", "gymnasium", "numpy"])
    page += markdown_table(header, rows) + "\n"
    data = {"machine": info, "backlog": bounds, "variants": finished}
    results = QUICK_RESULTS if options.quick else RESULTS
    write_results("continuing", data, page + machine_line(info, "Page written"), results)
    print(json.dumps({"results": str(results / "continuing.md")}))


if __name__ == "__main__":
    main()
