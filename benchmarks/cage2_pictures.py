"""CAGE2 in pictures: what a policy does where and when, and what a search for a workflow has found.

python -m benchmarks.cage2_pictures actions zoo/CAGE2-v0.pt --red-agent b_line -o actions.png
python -m benchmarks.cage2_pictures search runs/search__meander__1 -o search.png
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np

from benchmarks.common import parser_of
from envs.cage2.memory import VERB_AND_HOST
from envs.cage2.scenario import HOSTS
from envs.cage2.search import posterior_returns
from envs.cage2.workflow import ORDERS, RANKS, UNIT_TYPES, parse_workflow


def actions_of(checkpoint: Path, red_agent: str, episodes: int) -> np.ndarray:
    """The mean number, (num_steps, 145), of each action at each step of a policy's episodes."""
    script: Any = importlib.import_module("ppo_cage2_parallel")
    saved = script.load(checkpoint)
    args = replace(script.Args(**{**saved["args"], "resume": False}), red_agent=red_agent, device="cpu")
    vec_env = script.make_envs(args, episodes)
    game: Any = vec_env.unwrapped
    step, taken = game.step, []

    def noting_step(actions: np.ndarray) -> Any:
        taken.append(np.bincount(actions, minlength=len(VERB_AND_HOST)))
        return step(actions)

    game.step = noting_step
    script.evaluate(script.load_agent(saved, args), vec_env, seed=1_000_000)
    vec_env.close()
    return np.array(taken) / episodes


def draw_actions(frequencies: np.ndarray, path: Path) -> None:
    """Draw the mean number of actions (num_steps, 145) on each host at each step, for each kind of action."""
    kinds = {"Analyse": "Analyse", "Remove": "Remove", "Decoy": "any decoy", "Restore": "Restore"}
    figure = matplotlib.figure.Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axis, (kind, title) in zip(axes, kinds.items(), strict=True):
        image = np.zeros((len(HOSTS), len(frequencies)))
        for action, (verb, host) in enumerate(VERB_AND_HOST):
            if verb.startswith(kind):
                image[host] += frequencies[:, action]
        shown = axis.imshow(image, aspect="auto", vmin=0, vmax=1, cmap="magma_r", interpolation="nearest")
        axis.set(title=title, xlabel="step", yticks=range(len(HOSTS)), yticklabels=HOSTS)
    figure.colorbar(shown, ax=list(figure.axes), label="share of episodes")
    figure.savefig(path, dpi=100)


def draw_places(axis: Any, returns: np.ndarray) -> None:
    """Which place suits which type: mean of the returns (120,) of the orders that have it there."""
    places = range(len(UNIT_TYPES))
    shown = axis.imshow([[returns[RANKS[:, unit] == rank].mean() for rank in places] for unit in places])
    axis.set(title="mean return by place of a type", xlabel="place", xticks=places, yticks=places)
    axis.set(xticklabels=[rank + 1 for rank in places], yticklabels=UNIT_TYPES)
    axis.figure.colorbar(shown, ax=axis)


def draw_search(history: list[dict[str, Any]], settings: dict[str, Any], path: Path) -> None:
    """Draw what a search believes of all orders, how it advanced, what was complied with, and which place suits which
    type."""
    tried = [parse_workflow(record["workflow"]) for record in history]
    returns = [record["mean_return"] for record in history]
    errors = [record["standard_error"] for record in history]
    mean, std = posterior_returns(tried, returns, errors, settings.get("gp_scale", 0.2))
    figure = matplotlib.figure.Figure(figsize=(13, 8), layout="constrained")
    belief, progress, compliance, places = figure.subplots(2, 2).flat
    by_mean = np.argsort(-mean)
    belief.errorbar(range(len(ORDERS)), mean[by_mean], std[by_mean], fmt=".", lw=0.7, label="posterior mean and std")
    belief.plot(np.argsort(by_mean)[tried], returns, "rx", label="evaluated")
    belief.set(title="what is believed of all orders", xlabel="order, by posterior mean", ylabel="return")
    belief.legend()
    number = np.arange(1, len(history) + 1)
    progress.step(number, np.maximum.accumulate(returns), where="post", label="best so far")
    progress.plot(number, returns, "rx", label="evaluated")
    progress.set(title="progress", xlabel="orders tried", ylabel="return")
    progress.legend()
    compliance.barh(number, [record["compliance"] for record in history], label="compliance")
    compliance.plot([record["strict_compliance"] for record in history], number, "k|", label="strict")
    compliance.axvline(settings.get("compliance_threshold") or 0.95, color="r", lw=1)
    compliance.set(title="compliance by order", yticks=number, xlim=(0, 1))
    compliance.set_yticklabels(["\u2009>\u2009".join(ORDERS[order]) for order in tried], fontsize=6)
    compliance.invert_yaxis()
    compliance.legend(loc="lower left")
    draw_places(places, mean)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["actions", "search"])
    parser.add_argument("source", type=Path, help="checkpoint, or folder of a search")
    parser.add_argument("--red-agent", choices=["b_line", "meander", "sleep"], default="b_line")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("-o", type=Path, metavar="FILE", help="default: WHAT.png")
    options = parser.parse_args()
    path = options.o or Path(f"{options.what}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if options.what == "actions":
            draw_actions(actions_of(options.source, options.red_agent, options.episodes), path)
        else:
            saved = json.loads((options.source / "history.json").read_text())
            draw_search(saved["history"], saved["settings"], path)
    except (OSError, ValueError, KeyError) as error:  # no such file, or none of these
        sys.exit(f"error: {options.source}: {error}")
    print(path)


if __name__ == "__main__":
    main()
