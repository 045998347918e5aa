"""Draw how often a Mario run reached the flag, over environment steps and over time, and keep its logs.

    python -m benchmarks.mario_curve --logdir runs/... --name mario_1-1

Writes results/{name}_curve.png, and copies of the run's config.json, progress.csv, timing.csv and eval.csv beside it.
The time is that of collecting and learning, on the machine as it was then; evaluations are not in it.
"""

import argparse
import shutil
from pathlib import Path

import matplotlib.figure
import numpy as np

from benchmarks.common import RESULTS
from ppo_atari_mario import read_csv

WINDOW = 10  # updates averaged in the training curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logdir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    options = parser.parse_args()
    for file in ("config.json", "progress.csv", "timing.csv", "eval.csv"):
        shutil.copyfile(options.logdir / file, RESULTS / f"{options.name}_{file}")
    progress, timing, evaluation = (read_csv(options.logdir / f"{name}.csv") for name in ("progress", "timing", "eval"))
    minutes = timing["time/seconds"] / 60
    rates = np.nan_to_num(progress["rollout/success_rate"])
    smooth = np.array([rates[max(0, i - WINDOW + 1) : i + 1].mean() for i in range(len(rates))])
    figure = matplotlib.figure.Figure(figsize=(11, 4), layout="constrained")
    for axis, x, label in zip(
        figure.subplots(1, 2, sharey=True),
        (progress["global_step"] / 1e6, minutes),
        ("environment steps, millions", "minutes of collecting and learning"),
        strict=True,
    ):
        at_evaluations = np.interp(evaluation["global_step"], progress["global_step"], x)
        axis.plot(x, smooth, lw=1.5, label=f"training episodes (sampled), {WINDOW} updates")
        axis.plot(at_evaluations, evaluation["eval_sampled/success_rate"], "o", ms=4, label="evaluation, sampled")
        axis.plot(at_evaluations, evaluation["eval/success_rate"], "s", ms=4, label="evaluation, deterministic")
        axis.set(xlabel=label, ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
    figure.axes[0].set(ylabel="episodes that reach the flag", title=options.name)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(RESULTS / f"{options.name}_curve.png", dpi=110)


if __name__ == "__main__":
    main()
