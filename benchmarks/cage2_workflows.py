"""Workflows on CAGE2: what each of the 120 orders is worth, and how fast the search finds a good one.

    python ppo_cage2_parallel.py search --red-agent b_line --logdir runs/search_b_line
    python ppo_cage2_parallel.py search --red-agent b_line --n-workflows 120 --logdir runs/all_b_line \
        --init-from runs/search_b_line/shared/latest.pt
    python -m benchmarks.cage2_workflows runs/all_b_line runs/search_b_line      # page and pictures of searches
    python -m benchmarks.cage2_workflows                                         # of those that are stored in results/

A search of all 120 orders is the table in which the rules that choose an order are replayed, 200 times each: all
evaluations of a search have the same seeds, so that looking a return up is what the search would have seen, and a
difference between two orders is known better than by the standard errors of both: their episodes are the same. The page
shows simple regrets: the best order's return minus that of the order that looks best after 20 look-ups. Baselines are
the source project's PPO without workflows: 100 steps, on code like that of HEAD, whose rules are harder for Blue.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np

from benchmarks.cage2_pictures import draw_places, draw_search
from benchmarks.common import (
    QUICK_RESULTS,
    ROOT,
    at_least_one,
    machine_info,
    machine_line,
    markdown_table,
    parser_of,
    stored,
    write_results,
)
from envs.cage2.search import DISCORDANT, next_order
from envs.cage2.workflow import ORDERS, parse_workflow

BASELINES = {"b_line": -20.2, "meander": -18.2}
RULES = {
    "gp": "GP-UCB, beta 4",
    "gp_srinivas": "GP-UCB, schedule / 5",
    "document": "the document's rule, 10 candidates",
    "document_all": "the document's rule, all 120",
    "random": "random",
}


def document_rule(rng: np.random.Generator, tried: list[int], values: list[float], num_candidates: int) -> int:
    """The order that the document's code tries next: two at random, then, of some random candidates, the best by
    sum(w y) / sum(w) + 2 / (1 + visits / 2) std, where w = exp(-2 d), d is Kendall's distance over 10, and std is 1 +
    10 d to the nearest order tried, or 1 / (1 + visits) for an order tried before."""
    if len(tried) < 2:
        return int(rng.integers(len(ORDERS)))
    candidates = rng.choice(len(ORDERS), num_candidates, replace=False)
    distances = DISCORDANT[candidates][:, tried] / 10
    weights = np.exp(-2 * distances)
    visits = (distances == 0).sum(1)
    std = np.where(visits > 0, 1 / (1 + visits), 10 * distances.min(1) + 1)
    bound = weights @ np.array(values) / weights.sum(1) + 2 / (1 + visits / 2) * std
    return int(candidates[bound.argmax()])


def replay(rule: str, seed: int, truth: np.ndarray, errors: np.ndarray, evaluations: int = 20) -> np.ndarray:
    """The regret (evaluations,) after each look-up in the table `truth` (120,) of returns with standard `errors`."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(ORDERS))
    tried: list[int] = []
    for t in range(evaluations):
        seen = truth[tried].tolist()
        if rule == "random":
            order = int(shuffled[t])
        elif rule.startswith("document"):
            order = document_rule(rng, tried, seen, len(ORDERS) if rule == "document_all" else 10)
        else:
            beta = None if rule == "gp_srinivas" else 4.0
            order = next_order(tried, seen, errors[tried].tolist(), beta=beta, seed=seed)
        tried.append(order)
    return truth.max() - np.maximum.accumulate(truth[tried])


def landscape(workflows: list[str], returns: np.ndarray, errors: np.ndarray) -> dict[str, float]:
    """How much orders differ: spread, mean standard error, and the share of variance between the six orders of user,
    enterprise and op_server."""
    kept = [tuple(unit for unit in x.split(",") if unit in ("user", "enterprise", "op_server")) for x in workflows]
    between = np.array([returns[[other == mine for other in kept]].mean() for mine in kept])
    return {"worst": returns.min(), "mean": returns.mean(), "best": returns.max(), "sd": returns.std(),
            "error": errors.mean(), "explained by six": between.var() / returns.var()}  # fmt: skip


def read_search(saved: dict[str, Any]) -> dict[str, Any]:
    """A search by orders: what is saved of it, the workflows, and arrays (n,) of what was measured of each."""
    history = sorted(saved["history"], key=lambda record: parse_workflow(record["workflow"]))
    names = ("mean_return", "standard_error", "compliance", "strict_compliance", "needless_fixes", "confirmed")
    columns = {name: np.array([record[name] for record in history], dtype=float) for name in names}
    return saved | columns | {"workflows": [record["workflow"] for record in history]}


def row_of(search: dict[str, Any]) -> list[str]:
    """What the page says of a search."""
    red, returns = search["settings"]["red_agent"], search["mean_return"]
    good = search["confirmed"] * (returns >= BASELINES.get(red, -math.inf))
    return [red, search["settings"]["version"], f"{search['confirmed'].sum():.0f} of {len(returns)}",
            f"{good.sum():.0f} of {len(returns)}", f"{search['compliance'].min():.3f}",
            f"{np.nanmean(search['strict_compliance']):.3f}", f"{search['needless_fixes'].mean():.1f}",
            f"{returns.min():.2f} / {returns.mean():.2f} / {returns.max():.2f}", f"{BASELINES.get(red, '')}",
            search["workflows"][int(returns.argmax())].replace(",", ", ")]  # fmt: skip


def draw(tables: list[dict[str, Any]], regrets: list[dict[str, np.ndarray]], path: Path) -> None:
    """For each table of all orders: the returns, the regret of the rules, and which place suits which type."""
    figure = matplotlib.figure.Figure(figsize=(15, 4.5 * len(tables)), layout="constrained")
    axes = figure.subplots(len(tables), 3, squeeze=False)
    for table, regret, (by_return, by_rule, places) in zip(tables, regrets, axes, strict=True):
        red, order = table["settings"]["red_agent"], np.argsort(-table["mean_return"])
        by_return.errorbar(range(len(order)), table["mean_return"][order], table["standard_error"][order], fmt=".",
                           lw=0.7)  # fmt: skip
        by_return.axhline(BASELINES.get(red, math.nan), color="0.5", ls="--", lw=1, label="no workflow, HEAD")
        by_return.set(title=f"{red}: all orders", xlabel="order, best first", ylabel="mean return, 100 steps")
        by_return.legend()
        for rule, curves in regret.items():
            by_rule.plot(range(1, curves.shape[1] + 1), curves.mean(0), label=RULES[rule])
        by_rule.set(title="simple regret", xlabel="orders tried", ylabel="return", ylim=(0, None))
        by_rule.legend()
        draw_places(places, table["mean_return"])
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a trial of a search of two orders, into runs/bench")
    parser.add_argument("folders", nargs="*", type=Path, help="of searches")
    parser.add_argument("--replays", type=at_least_one, default=200, help="of each rule")
    options = parser.parse_args()
    if options.quick and not options.folders:
        options.folders = [QUICK_RESULTS / "cage2_search"]
        shutil.rmtree(options.folders[0], ignore_errors=True)
        flags = "--n-workflows 2 --judge-episodes 10 --shared-timesteps 25600 --configs search --total-timesteps 2500"
        command = [sys.executable, "ppo_cage2_parallel.py", "search", *flags.split(), "--no-compile"]
        subprocess.run([*command, "--eval-episodes", "5", "--logdir", str(options.folders[0])], cwd=ROOT, check=True)
    try:
        saved = [{"folder": x.name} | json.loads((x / "history.json").read_text()) for x in options.folders]
        saved = saved or stored("cage2_workflows", options.quick)["searches"]
        searches = [read_search(search) for search in saved]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: no history of a search: {error}")
    tables = [search for search in searches if len(search["workflows"]) == len(ORDERS)]
    replays = 2 if options.quick else options.replays
    page = "# CAGE2: workflows\n\nFrom `python -m benchmarks.cage2_workflows`; what the words mean is in "
    page += "[docs/cage2.md](../docs/cage2.md#workflows).\n\n## Searches\n\n"
    header = ["red agent", "rules", "compliance confirmed", "and the baseline's return", "least compliance",
              "mean strict compliance", "needless fixes an episode", "return: worst / mean / best", "baseline",
              "best order"]  # fmt: skip
    page += markdown_table(header, [row_of(search) for search in searches])
    data: dict[str, Any] = {"machine": machine_info(), "searches": saved}
    rows, regrets, shapes = [], [], []
    for table in tables:
        truth, errors, red = table["mean_return"], table["standard_error"], table["settings"]["red_agent"]
        shape = landscape(table["workflows"], truth, errors)
        shapes.append([red, *(f"{value:.2f}" for value in shape.values())])
        regret = {rule: np.array([replay(rule, seed, truth, errors) for seed in range(replays)]) for rule in RULES}
        regrets.append(regret)
        for rule, name in RULES.items():
            final = regret[rule][:, -1]
            rows.append([red, name, f"{final.mean():.3f} ± {final.std() / math.sqrt(replays):.3f}",
                         f"{final.mean() / regret['random'][:, -1].mean():.2f}",
                         f"{(final == 0).mean():.0%}"])  # fmt: skip
    if tables:
        page += "\n## All 120 orders\n\n" + markdown_table(["red agent", *shape], shapes)
        page += f"\n## Simple regret after 20 of 120 orders, {replays} replays\n\n"
        page += markdown_table(
            ["red agent", "rule", "regret ± standard error", "of random's", "best order found"], rows
        )
        page += "\n![returns, regrets and places](cage2_workflows.png)\n"
    pictures = {f"cage2_workflows_{search['folder']}.png": search
                for search in searches if len(search["workflows"]) < len(ORDERS)}  # fmt: skip
    page += "".join(f"\n![a search of {len(x['workflows'])} orders]({name})\n" for name, x in pictures.items())
    folder = write_results("cage2_workflows", data, page + "\n" + machine_line(data["machine"]), options.quick)
    if tables:
        draw(tables, regrets, folder / "cage2_workflows.png")
    for name, search in pictures.items():
        draw_search(search["history"], search["settings"], folder / name)


if __name__ == "__main__":
    main()
