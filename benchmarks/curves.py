"""Draw learning curves of run folders: seeds of one setting as mean and band, several settings with a legend.

    python -m benchmarks.curves runs/a_seed_11 runs/a_seed_12 runs/b_seed_11 runs/b_seed_12 --label a b -o a_and_b.png
    python -m benchmarks.curves runs/mario -y rollout/success_rate --smooth 20000 --x minutes

Runs whose arguments differ only in seed, folder, workers and threads are one setting, of whatever commit. The band is
the mean plus and minus one standard deviation over seeds; a single run is a line. Minutes are those of collecting and
learning.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np

from benchmarks.common import parser_of, read_csv

Curve = dict[str, np.ndarray]  # "steps", "minutes", "y": (points,) each
PER_RUN = {"seed", "logdir", "resume", "num_workers", "torch_threads"}  # arguments that make no other setting
OVER = {"steps": "million environment steps", "minutes": "minutes of training"}


def read_curve(logdir: Path, y: str, smooth: float = 0) -> Curve:
    """A logged column of a run where it is not nan, averaged over `smooth` steps. Raises ValueError, with the columns
    that there are, if there is no such one."""
    path = logdir / "progress.csv"
    columns = read_csv(path) if path.exists() else {}
    if y not in columns:
        raise ValueError(f"{logdir} has no column {y}; it has {', '.join(sorted(columns)) or 'no log'}.")
    steps, values = columns["global_step"], columns[y]
    minutes = np.cumsum(np.diff(steps, prepend=0) / columns["time/sps"]) / 60
    kept = np.isfinite(values)
    steps, minutes, values = steps[kept], minutes[kept], values[kept]
    if smooth and len(steps):
        ends = np.flatnonzero(np.diff(steps // smooth, append=np.inf))
        values = np.array([part.mean() for part in np.split(values, ends[:-1] + 1)])
        steps, minutes = steps[ends], minutes[ends]
    return {"steps": steps, "minutes": minutes, "y": values}


def together(curves: Sequence[Curve], over: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where, mean and standard deviation over seeds, at the steps of the first run that all have reached. Minutes are
    the mean of those that the seeds took until there."""
    end = min(curve["steps"][-1] for curve in curves)
    steps = curves[0]["steps"][curves[0]["steps"] <= end]
    values = np.array([np.interp(steps, curve["steps"], curve["y"]) for curve in curves])
    minutes = np.mean([np.interp(steps, curve["steps"], curve["minutes"]) for curve in curves], axis=0)
    return steps / 1e6 if over == "steps" else minutes, values.mean(0), values.std(0, ddof=len(curves) > 1)


def draw(
    panels: Mapping[str, Mapping[str, Sequence[Curve]]], path: Path, ylabel: str, over: Sequence[str] = tuple(OVER)
) -> None:
    """A picture of {panel: {label: seeds}}, each panel over steps, over minutes or over both."""
    plots = [(title, key) for title in panels for key in over]
    columns = min(4, len(plots))
    rows = -(-len(plots) // columns)
    size = (5.5, 4.0) if len(plots) <= 2 else (4.0, 3.0)
    figure = matplotlib.figure.Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (title, key) in zip(axes, plots, strict=False):
        for i, (label, curves) in enumerate(panels[title].items()):
            curves = [curve for curve in curves if len(curve["steps"])]
            if not curves:
                continue
            where, mean, deviation = together(curves, key)
            label = re.sub("(.{30,48}) ", r"\1\n", label)  # a command is a long label
            axis.plot(where, mean, ".-" if len(where) == 1 else "-", color=f"C{i % 10}", lw=1.6, label=label)
            if len(curves) > 1:
                axis.fill_between(where, mean - deviation, mean + deviation, color=f"C{i % 10}", alpha=0.2, lw=0)
        axis.set_title(title, fontsize=10)
        axis.set(xlabel=OVER[key], ylabel=ylabel)
        axis.grid(alpha=0.3)
        if any(label for label in panels[title]):
            axis.legend(fontsize=7)
    for axis in list(figure.axes)[len(plots) :]:
        axis.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def settings_of(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """The folders by setting, in the order of the command line. A setting's name is what it has other than the rest;
    if that is much, the folder's, without the seed."""
    everything = []
    for folder in folders:
        name = re.sub(r"[-_/]+(seed)?[-_]*\d+$", "", "/".join(folder.parts[-2:])).rpartition("/")[2]
        config = folder / "config.json"
        args: dict[str, Any] = json.loads(config.read_text())["args"] if config.exists() else {"folder": name}
        everything.append((name, {key: value for key, value in args.items() if key not in PER_RUN}))
    keys = {key for _, args in everything for key in args}
    different = {key for key in keys if any(args.get(key) != everything[0][1].get(key) for _, args in everything)}
    settings: dict[str, tuple[str, list[Path]]] = {}
    for folder, (name, args) in zip(folders, everything, strict=True):
        parts = [f"{args[key]}" if key == "env_id" else f"{key} {args[key]}" for key in args if key in different]
        label = name if len(different) > 4 else ", ".join(parts)
        settings.setdefault(json.dumps(args, sort_keys=True), (label, []))[1].append(folder)
    labels = [label for label, _ in settings.values()]
    return {label if labels.count(label) == 1 else f"{label} ({i + 1})": found
            for i, (label, found) in enumerate(settings.values())}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--label", nargs="+", metavar="NAME", help="a name for each setting, in order")
    parser.add_argument("-y", metavar="COLUMN", help="column of progress.csv; default: eval/mean_return, or "
                        "rollout/episodic_return if there are less than three evaluations")  # fmt: skip
    parser.add_argument("--x", choices=list(OVER), nargs="+", default=list(OVER), help="default: a plot over each")
    parser.add_argument("--smooth", type=float, default=0, metavar="STEPS", help="average over so many steps")
    parser.add_argument("-o", type=Path, default=Path("curves.png"), metavar="FILE")
    options = parser.parse_args()
    try:
        settings = settings_of(options.runs)
        if options.label and len(options.label) != len(settings):
            raise ValueError(f"There are {len(settings)} settings, but {len(options.label)} names after --label.")
        labels = options.label or list(settings)
        evaluations = [len(read_curve(folder, "eval/mean_return")["steps"]) for folder in options.runs]
        y = options.y or ("eval/mean_return" if max(evaluations) > 2 else "rollout/episodic_return")
        curves = {label: [read_curve(folder, y, options.smooth) for folder in folders]
                  for label, folders in zip(labels, settings.values(), strict=True)}  # fmt: skip
        if not any(len(curve["steps"]) for seeds in curves.values() for curve in seeds):
            raise ValueError(f"{y} holds no number yet.")
        draw({"": curves}, options.o, y, options.x)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(options.o)


if __name__ == "__main__":
    main()
