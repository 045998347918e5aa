"""Workflows on CAGE2: what each of the 120 orders is worth, what the search finds, what sharing a policy saves.

    python -m benchmarks.cage2_workflows table --shared runs/b_line/latest.pt runs/b_line_2/latest.pt  # minutes each
    python -m benchmarks.cage2_workflows search --folders runs/search_b_line     # finished searches, with their times
    python -m benchmarks.cage2_workflows sharing --shared runs/b_line/latest.pt   # against policies from nothing
    python -m benchmarks.cage2_workflows claims       # the document's claims about 25 environments
    python -m benchmarks.cage2_workflows page         # replays, pictures and the results page from all of these
    python -m benchmarks.cage2_workflows --quick      # everything in small, into runs/bench

A shared policy comes from `python ppo_cage2_parallel.py --workflow any --red-agent b_line --total-timesteps 5000000
--eval-every 500000`; its run says what is played. `table` fine-tunes and evaluates every order as the search would,
stores each at once and goes on where it was stopped; a second shared policy, of another seed, is only evaluated, to see
whether orders differ or policies. In a search all evaluations have the same seeds, so that looking a return up in the
table is what the search would have seen: `page` replays it, 200 times a rule. Results: cage2_workflows_{red
agent}.json, ..._search_..., ..._sharing_... and ..._claims.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import torch
from scipy import stats

from benchmarks.common import (
    QUICK_RESULTS,
    RESULTS,
    ROOT,
    at_least_one,
    in_fresh_process,
    machine_info,
    machine_line,
    markdown_table,
    train_to_the_end,
    write_results,
)

sys.path.insert(0, str(ROOT))
import ppo_cage2_parallel as script
from envs.cage2.workflow import ORDERS, RANKS, UNIT_TYPES

BASELINES = {"b_line": -20.2, "meander": -18.2}  # the source project's PPO without workflows, 100 steps
RED_AGENTS = tuple(BASELINES)
NUM_REPLAYS = 200
BANDS = {"0-25": (0, 1), "25-50": (1, 2), "50-125": (2, 5), "125-250": (5, 10), "250-1250": (10, 50),
         "after": (50, None)}  # episodes in all, and updates of 25 episodes  # fmt: skip


def evaluate_order(agent: Any, args: Any, order: int, episodes: int) -> dict[str, float]:
    run = replace(args, workflow=",".join(ORDERS[order]), eval_episodes=episodes)
    return script.evaluate(agent, run, seed=1_000_000)


def load_agent(path: Path) -> tuple[Any, Any]:
    """The policy of a checkpoint and its run's arguments."""
    args = replace(script.known_args(script.load_checkpoint(path)["args"]), num_envs=1)
    agent = script.Agent(script.make_envs(args), args)
    script.load_policy(agent, path)
    return agent, args


def measure_table(shared: Path, second: Path | None, folder: Path, quick: bool) -> None:
    """Every order once, with the defaults of the search; in the quick form without fine-tuning."""
    agent, base = load_agent(shared)
    args = script.SearchArgs(shared=str(shared))
    path = folder / f"cage2_workflows_{base.red_agent}.json"
    table: dict[str, Any] = {"machine": machine_info(["torch", "numpy", "numba"]), "version": base.version,
                             "shared_timesteps": base.total_timesteps, "orders": [],
                             "shared": hashlib.sha256(shared.read_bytes()).hexdigest()[:12]}  # fmt: skip
    if path.exists() and not quick:
        stored = json.loads(path.read_text())
        if any(stored.get(name, table[name]) != table[name] for name in ("version", "shared_timesteps", "shared")):
            sys.exit(f"error: {path} is of another shared policy than {shared}; delete it to begin anew.")
        table = stored
    interrupt = script.Interrupt()
    for order in range(len(table["orders"]), len(ORDERS)):
        if interrupt.signum:
            sys.exit(128 + interrupt.signum)
        started, cpu = time.perf_counter(), time.process_time()
        if quick:
            record: dict[str, Any] = evaluate_order(agent, base, order, 10)
            record["workflow"], record["steps"] = ",".join(ORDERS[order]), 0
            record["compliant"] = record["compliance"] >= args.compliance_threshold
        else:
            with tempfile.TemporaryDirectory() as scratch:
                tried = script.try_order(args, base, order, shared, Path(scratch) / "run", interrupt)
            if tried is None:
                sys.exit(128 + (interrupt.signum or 0))
            record = tried
        record = {key: value for key, value in record.items() if key not in ("checkpoint", "cells")}
        times = {"wall_seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
        table["orders"].append(record | times)
        path.write_text(json.dumps(table, indent=1))
    interrupt.restore()
    if second is not None:
        agent, base = load_agent(second)
        table["second_seed"] = [evaluate_order(agent, base, order, 10 if quick else 1000)["mean_return"]
                                for order in range(len(ORDERS))]  # fmt: skip
    path.write_text(json.dumps(table, indent=1) + "\n")


# ---- replays --------------------------------------------------------------------------------------------------------


def document_rule(rng: np.random.Generator, tried: list[int], values: list[float], num_candidates: int) -> int:
    """The order that the document's code tries next: two at random, then, of some random candidates, the best by
    sum(w y) / sum(w) + 2 / (1 + visits / 2) std, where w = exp(-2 d), d is Kendall's distance over 10, and std is 1 +
    10 d to the nearest order tried, or 1 / (1 + visits) for an order tried before."""
    if len(tried) < 2:
        return int(rng.integers(len(ORDERS)))
    candidates = rng.choice(len(ORDERS), num_candidates, replace=False)
    distances = script.DISCORDANT[candidates][:, tried] / 10
    weights = np.exp(-2 * distances)
    visits = (distances == 0).sum(1)
    std = np.where(visits > 0, 1 / (1 + visits), 10 * distances.min(1) + 1)
    bound = weights @ np.array(values) / weights.sum(1) + 2 / (1 + visits / 2) * std
    return int(candidates[bound.argmax()])


def replay(rule: str, seed: int, table: list[dict[str, Any]], evaluations: int, noise: bool = False) -> np.ndarray:
    """The regret (evaluations,) after each look-up in the table: the best order's return minus that of the order which
    looks best so far. With `noise`, each look-up has the error of its evaluation."""
    rng = np.random.default_rng(seed)
    truth = np.array([record["mean_return"] for record in table])
    errors = np.array([record["standard_error"] for record in table]) * noise
    args = script.SearchArgs(seed=seed, gp_beta="srinivas" if rule == "gp_srinivas" else 4.0)
    shuffled = rng.permutation(len(ORDERS))
    history: list[dict[str, Any]] = []
    tried: list[int] = []
    for t in range(evaluations):
        if rule == "random":
            order = int(shuffled[t])
        elif rule.startswith("document"):
            candidates = len(ORDERS) if rule == "document_all" else 10
            order = document_rule(rng, tried, [record["mean_return"] for record in history], candidates)
        else:
            order = script.next_order(args, history)
        seen = truth[order] + errors[order] * rng.normal()
        history.append({**table[order], "mean_return": seen})
        tried.append(order)
    seen = np.array([record["mean_return"] for record in history])
    looks_best = [tried[int(seen[: t + 1].argmax())] for t in range(evaluations)]
    return truth.max() - truth[looks_best]


RULES = {
    "gp": "GP-UCB, beta 4",
    "gp_srinivas": "GP-UCB, schedule / 5",
    "document": "the document's rule, 10 candidates",
    "document_all": "the document's rule, all 120",
    "random": "random",
}


def replay_all(table: list[dict[str, Any]], replays: int, noise: bool) -> dict[str, np.ndarray]:
    """(replays, 20) regrets by rule."""
    return {rule: np.array([replay(rule, seed, table, 20, noise) for seed in range(replays)]) for rule in RULES}


def classes_of(table: list[dict[str, Any]], units: tuple[str, ...]) -> np.ndarray:
    """(120,) the class of each order if only the order of these types matters."""
    orders = [tuple(unit for unit in record["workflow"].split(",") if unit in units) for record in table]
    names = sorted(set(orders))
    return np.array([names.index(order) for order in orders])


def landscape(table: list[dict[str, Any]]) -> dict[str, float]:
    """How much orders differ: spread, noise, how many can be picked so that neighbours differ by more than two standard
    errors of a difference, and the share of variance between the six orders of user, enterprise and op_server."""
    returns = np.array([record["mean_return"] for record in table])
    errors = np.array([record["standard_error"] for record in table])
    classes = classes_of(table, ("user", "enterprise", "op_server"))
    between = np.array([returns[classes == c].mean() for c in classes])
    levels, top = 1, np.sort(returns)[::-1][0]
    for value in np.sort(returns)[::-1]:
        if top - value > 2 * math.sqrt(2) * errors.mean():
            levels, top = levels + 1, value
    return {"mean": returns.mean(), "best": returns.max(), "worst": returns.min(), "sd": returns.std(),
            "error": errors.mean(), "levels": levels, "explained_by_six": between.var() / returns.var()}  # fmt: skip


# ---- searches -------------------------------------------------------------------------------------------------------


def store_searches(folders: list[Path], results: Path) -> None:
    """Keep the history of finished searches, with their time from the start of the shared policy's training."""
    for logdir in folders:
        saved = json.loads((logdir / "history.json").read_text())
        args = script.known_args(script.load_checkpoint(logdir / "shared" / "latest.pt")["args"])
        # TensorBoard puts the time at which it began into its files' names, and the last checkpoint is the last
        # order's: --resume with nothing left to do writes none.
        began = min(int(path.name.split(".")[3]) for path in (logdir / "shared").glob("events.out.tfevents.*"))
        seconds = max(path.stat().st_mtime for path in logdir.glob("*/latest.pt")) - began
        shared = script.read_csv(logdir / "shared" / "timing.csv")["time/seconds"][-1]
        data = {"machine": machine_info(["torch", "numpy", "numba"]), "red_agent": args.red_agent,
                "version": args.version, "wall_seconds": seconds, "shared_seconds": shared, **saved}  # fmt: skip
        name = f"cage2_workflows_search_{args.red_agent}"
        (results / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
        shutil.copyfile(logdir / "search.png", results / f"{name}.png")


def measured_on(data: dict[str, Any]) -> str:
    """When, where and beside how much else a part was measured; the foot of the page is about its writing."""
    machine = data["machine"]
    return f"{machine['date'][:10]}, {machine['cores']} x {machine['cpu']}, load {machine['load_average'][0]:.0f}"


def search_section(folder: Path) -> list[str]:
    rows = []
    for red in RED_AGENTS:
        path = folder / f"cage2_workflows_search_{red}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        history = data["history"]
        returns = sorted(record["mean_return"] for record in history)
        good = [record for record in history if record["compliant"] and record["mean_return"] >= BASELINES[red]]
        best = max(history, key=lambda record: record["mean_return"])
        rows.append([red, data["version"], f"{sum(record['compliant'] for record in history)} of {len(history)}",
                     f"{len(good)} of {len(history)}", f"{min(record['compliance'] for record in history):.3f}",
                     f"{np.nanmean([record['strict_compliance'] for record in history]):.3f}",
                     f"{returns[0]:.2f} to {returns[-1]:.2f}", f"{BASELINES[red]}", best["workflow"].replace(",", ", "),
                     f"{data['wall_seconds'] / 60:.1f}",
                     f"{data['shared_seconds'] / 60:.1f}", measured_on(data)])  # fmt: skip
    if not rows:
        return []
    header = ["red agent", "rules", "compliance 0.95 confirmed", "and the baseline's return", "least compliance",
              "mean strict compliance", "returns", "baseline", "best order", "minutes", "shared policy's part",
              "measured"]  # fmt: skip
    return [
        "## Whole searches\n",
        "20 orders with the defaults of `search`, shared policy included. Baseline: the source project's PPO without "
        "workflows, 100 steps, on the code of HEAD.\n",
        markdown_table(header, rows),
    ]


# ---- sharing --------------------------------------------------------------------------------------------------------


def first_step(curve: dict[str, np.ndarray], threshold: float, least_return: float = -math.inf) -> float | None:
    """The first evaluated step at which compliance and return are reached."""
    reached = (curve["eval/compliance"] >= threshold) & (curve["eval/mean_return"] >= least_return)
    return float(curve["global_step"][reached][0]) if reached.any() else None


def measure_sharing(shared: Path, num_orders: int, folder: Path, quick: bool) -> None:
    """Steps to a compliance of 0.95 in a deterministic evaluation, for policies trained from nothing on one order each
    (25 environments), and for the shared policy itself; also with the baseline's return."""
    base = script.search_base(script.SearchArgs(shared=str(shared)))
    steps = 5_000 if quick else 500_000
    runs = []
    for order in np.random.default_rng(0).permutation(len(ORDERS))[:num_orders].tolist():
        with tempfile.TemporaryDirectory() as scratch:
            logdir = Path(scratch) / "run"
            run = replace(
                base, workflow=",".join(ORDERS[order]), logdir=str(logdir), num_envs=25, num_steps=100,
                num_minibatches=5, learning_rate=2e-3, total_timesteps=steps, eval_every=steps // 40, save_every=0,
                compliance_threshold=None, min_episodes=script.Args.min_episodes, resume=False,
            )  # fmt: skip
            with contextlib.redirect_stdout(io.StringIO()):
                train_to_the_end(script, run)
            curve = script.read_csv(logdir / "eval.csv")
            progress = script.read_csv(logdir / "progress.csv")["rollout/compliance"]
        runs.append({"workflow": run.workflow, "to_compliance": first_step(curve, 0.95),
                     "to_both": first_step(curve, 0.95, BASELINES[base.red_agent]),
                     "last_return": curve["eval/mean_return"][-1], "last_compliance": curve["eval/compliance"][-1],
                     "bands": {name: float(np.nanmean(progress[slice(*band)])) for name, band in BANDS.items()
                               if len(progress[slice(*band)])}})  # fmt: skip
        print(runs[-1], flush=True)
    curve = script.read_csv(shared.parent / "eval.csv")
    both = first_step(curve, 0.95, BASELINES[base.red_agent])
    data = {"machine": machine_info(["torch", "numpy", "numba"]), "red_agent": base.red_agent, "version": base.version,
            "budget": steps, "fresh": runs,
            "shared": {"to_compliance": first_step(curve, 0.95), "to_both": both}}  # fmt: skip
    (folder / f"cage2_workflows_sharing_{base.red_agent}.json").write_text(json.dumps(data, indent=1) + "\n")


# ---- claims ---------------------------------------------------------------------------------------------------------


def document_args(num_envs: int, **values: Any) -> Any:
    """The document's training, of one order, from nothing."""
    preset = script.PRESETS["document"] | script.PRESETS["workflow"] | {"compliance_threshold": None}
    return script.Args(**(preset | {"num_envs": num_envs, "eval_every": 0, "eval_episodes": 1} | values))


def memory_and_speed(num_envs: int, vec_env: str, workflow: str | None, updates: int) -> dict[str, float]:
    """Steps per second and memory of a run in this (fresh) process. MiB: this process's peak, and what its workers had
    at their end, each page that several share counted once in all."""
    steps = updates * num_envs * 100
    workers: list[float] = []
    close = script.SubprocVecEnv.close

    def close_and_measure(self: Any, **kwargs: Any) -> None:
        for pid in children():
            pages = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            workers.append(next(int(line.split()[1]) for line in pages if line.startswith("Pss:")) / 1024)
        close(self, **kwargs)

    setattr(script.SubprocVecEnv, "close", close_and_measure)  # noqa: B010
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        run = document_args(num_envs, logdir=f"{scratch}/run", total_timesteps=steps, vec_env=vec_env,
                            num_workers=num_envs, workflow=workflow)  # fmt: skip
        train_to_the_end(script, run)
        sps = script.read_csv(Path(scratch) / "run" / "timing.csv")["time/sps"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"sps": float(np.median(sps[1:])), "peak_mib": peak, "workers_mib": sum(workers), "workers": len(workers)}


def children() -> list[int]:
    """Processes that this one started."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def rollout_gradients(episodes: int, per_gradient: int) -> tuple[list[np.ndarray], list[int]]:
    """The first PPO gradient of an untrained policy from batches of whole episodes, and the distinct observations of
    each batch (the game's 52 bits)."""
    args = document_args(per_gradient)
    torch.manual_seed(0)
    vec_env = script.make_envs(args)
    agent = script.Agent(vec_env, args)
    gradients, distinct = [], []
    for batch in range(episodes // per_gradient):
        obs, actions, rewards = [], [], []
        now, _ = vec_env.reset(seed=1 + batch * per_gradient)
        for _ in range(args.max_steps):
            with torch.no_grad():
                action = agent.get_action_and_value(torch.as_tensor(now))[0]
            obs.append(torch.as_tensor(now))
            actions.append(action)
            now, reward, _, _, infos = vec_env.step(action.numpy())
            rewards.append(torch.as_tensor(args.reward_scale * (reward + infos["alignment"]), dtype=torch.float32))
        final = torch.as_tensor(np.stack(infos["final_obs"]))
        everything = torch.stack(obs)
        with torch.no_grad():
            _, log_probs, _, values = agent.get_action_and_value(everything.flatten(0, 1), torch.cat(actions))
            values = values.view(len(obs), -1)
            next_values = torch.cat([values[1:], agent.get_value(final)[None]])
        ends = torch.zeros_like(values, dtype=torch.bool)
        ends[-1] = True
        advantages, returns = script.compute_gae(
            torch.stack(rewards), values, next_values, ends & False, ends, args.gamma, args.gae_lambda
        )
        advantages = script.normalize_advantages(advantages)
        minibatch = [x.flatten(0, 1) for x in (everything, torch.stack(actions), log_probs.view_as(values), values,
                                               advantages, returns)]  # fmt: skip
        gradients.append(script.ppo_gradients(agent, minibatch, args)[0][0].numpy())
        distinct.append(len(np.unique(everything.flatten(0, 1)[:, :52].numpy().astype(bool), axis=0)))
    return gradients, distinct


def train_briefly(num_envs: int, seed: int, steps: int) -> float:
    """The mean return of a sampled evaluation after so many environment steps of the document's training."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        run = document_args(num_envs, logdir=f"{scratch}/run", total_timesteps=steps, seed=seed, compile=False)
        train_to_the_end(script, run)
        agent, args = load_agent(Path(scratch) / "run" / "latest.pt")
    return script.evaluate(agent, replace(args, eval_episodes=200), deterministic=False, seed=1_000_000)["mean_return"]


def measure_claims(folder: Path, quick: bool) -> None:
    order = ",".join(UNIT_TYPES)
    variants = {"1 environment": (1, "batch", order), "25 environments": (25, "batch", order),
                "25 environments, no workflow": (25, "batch", "none"),
                "25 environments, a process each": (25, "subproc", order)}  # fmt: skip
    info = machine_info(["torch", "numpy", "numba"])
    updates = 3 if quick else 40
    speed: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(1 if quick else 3):
        for name, variant in variants.items():
            speed[name].append(in_fresh_process("cage2_workflows", *variant, updates))
    episodes = 50 if quick else 1000
    measured: dict[str, Any] = {"machine": info, "speed": speed}
    for per_gradient in (1, 25):
        gradients, distinct = rollout_gradients(episodes, per_gradient)
        measured[f"gradient_variance_{per_gradient}"] = float(np.var(gradients, axis=0, ddof=1).sum())
        measured[f"distinct_{per_gradient}"] = float(np.mean(distinct))
    for num_envs in (1, 25):
        results = [train_briefly(num_envs, seed, 5_000 if quick else 50_000) for seed in range(1, 2 if quick else 6)]
        measured[f"returns_{num_envs}"] = results
    (folder / "cage2_workflows_claims.json").write_text(json.dumps(measured, indent=1) + "\n")


# ---- the page -------------------------------------------------------------------------------------------------------


def draw(tables: dict[str, dict[str, Any]], regrets: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """For each red agent: all returns, the regret of the rules, and which place suits which type."""
    figure = matplotlib.figure.Figure(figsize=(15, 4.5 * len(tables)), layout="constrained")
    rows = figure.subplots(len(tables), 3, squeeze=False)
    for (red, table), (returns_axis, regret_axis, places_axis) in zip(tables.items(), rows, strict=True):
        returns = np.array([record["mean_return"] for record in table["orders"]])
        errors = np.array([record["standard_error"] for record in table["orders"]])
        order = np.argsort(-returns)
        returns_axis.errorbar(range(len(order)), returns[order], errors[order], fmt=".", lw=0.7)
        returns_axis.axhline(BASELINES[red], color="0.5", ls="--", lw=1, label="plain PPO of the source project, HEAD")
        returns_axis.set(title=f"{red}: all orders", xlabel="order, best first", ylabel="mean return, 100 steps")
        returns_axis.legend()
        for rule, curves in regrets[red].items():
            regret_axis.plot(range(1, 21), curves.mean(0), label=RULES[rule])
        regret_axis.set(title="simple regret, 200 replays", xlabel="orders tried", ylabel="return", ylim=(0, None))
        regret_axis.legend()
        places = range(len(UNIT_TYPES))
        image = [[returns[RANKS[:, unit] == rank].mean() for rank in places] for unit in places]
        shown = places_axis.imshow(image)
        places_axis.set(title="mean return by place of a type", xticks=places, xlabel="place", yticks=places)
        places_axis.set_yticklabels(UNIT_TYPES)
        places_axis.set_xticklabels([rank + 1 for rank in places])
        figure.colorbar(shown, ax=places_axis)
    figure.savefig(path, dpi=80)


def number(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,.0f}"


def write_page(folder: Path, replays: int) -> None:
    """Replays and Markdown from what the other commands stored."""
    tables: dict[str, dict[str, Any]] = {}
    regrets: dict[str, dict[str, np.ndarray]] = {}
    noisy: dict[str, dict[str, np.ndarray]] = {}
    rows: list[list[str]] = []
    for red in RED_AGENTS:
        path = folder / f"cage2_workflows_{red}.json"
        if not path.exists():
            continue
        tables[red] = json.loads(path.read_text())
        if len(tables[red]["orders"]) < len(ORDERS):
            raise script.UsageError(
                f"{path} has {len(tables[red]['orders'])} of {len(ORDERS)} orders: finish it first."
            )
        regrets[red] = replay_all(tables[red]["orders"], replays, noise=False)
        noisy[red] = replay_all(tables[red]["orders"], replays, noise=True)
    if not tables:
        raise script.UsageError(f"{folder} has no table of all orders: measure one first.")
    lines = ["# CAGE2: workflows\n", "From `python -m benchmarks.cage2_workflows`; what the words mean is in "
             "[docs/cage2.md](../docs/cage2.md#workflows).\n", "## All 120 orders\n"]  # fmt: skip
    for red, table in tables.items():
        orders, shape = table["orders"], landscape(table["orders"])
        returns = np.array([record["mean_return"] for record in orders])
        good = [record for record in orders if record["compliant"] and record["mean_return"] >= BASELINES[red]]
        best = max(orders, key=lambda record: record["mean_return"])
        agreement = stats.spearmanr(returns, table["second_seed"]).statistic if "second_seed" in table else math.nan
        rows.append([
            red, table["version"], f"{sum(record['compliant'] for record in orders)} of 120", f"{len(good)} of 120",
            f"{min(record['compliance'] for record in orders):.3f}",
            f"{np.nanmean([record['strict_compliance'] for record in orders]):.3f}",
            f"{np.mean([record['needless_fixes'] for record in orders]):.1f}",
            f"{shape['worst']:.2f} / {shape['mean']:.2f} / {shape['best']:.2f}", f"{shape['sd']:.2f}",
            f"{shape['error']:.2f}", f"{shape['levels']}", f"{shape['explained_by_six']:.2f}", f"{agreement:.2f}",
            best["workflow"].replace(",", ", "),
            f"{sum(record['cpu_seconds'] for record in orders) / 60:.1f}", measured_on(table),
        ])  # fmt: skip
    header = ["red agent", "rules", "compliance 0.95 confirmed", "and return at least HEAD's baseline",
              "least compliance", "mean strict compliance", "needless fixes an episode", "return: worst / mean / best",
              "sd over orders", "standard error of one", "levels",
              "variance between the six orders of user, enterprise, op_server",
              "rank correlation with a second seed, not fine-tuned", "best order", "CPU minutes",
              "measured"]  # fmt: skip
    lines += [markdown_table(["", *[row[0] for row in rows]], [[name, *[row[i] for row in rows]] for i, name in
                                                               enumerate(header) if i]),
              "Baselines: -20.2 against B_line, -18.2 against Meander (the source project's PPO without workflows, "
              "100 steps, on code like that of HEAD, whose rules are harder for Blue). "
              "Levels: the most orders whose neighbours differ by more than two standard errors of a difference.\n",
              "![returns, regrets and places](cage2_workflows.png)\n",
              "## Simple regret after 20 of 120 orders\n"]  # fmt: skip
    rows = []
    for red in tables:
        for rule, name in RULES.items():
            final, with_noise = regrets[red][rule][:, -1], noisy[red][rule][:, -1]
            error = final.std() / math.sqrt(len(final))
            ratio = final.mean() / regrets[red]["random"][:, -1].mean()
            found = (final == 0).mean()
            rows.append([red, name, f"{final.mean():.3f} ± {error:.3f}", f"{ratio:.2f}", f"{100 * found:.0f} %",
                         f"{with_noise.mean():.3f}"])  # fmt: skip
    lines += [markdown_table(["red agent", "rule", "regret ± standard error", "of random's", "best order found",
                              "regret, look-ups with noise"], rows)]  # fmt: skip
    lines += search_section(folder) + sharing_section(folder) + claims_section(folder)
    info = machine_info(["torch", "numpy", "numba"])
    data = {"machine": info, "landscape": {red: landscape(table["orders"]) for red, table in tables.items()},
            "regret": {red: {rule: curves.mean(0).tolist() for rule, curves in by_rule.items()}
                       for red, by_rule in regrets.items()}}  # fmt: skip
    draw(tables, regrets, folder / "cage2_workflows.png")
    write_results("cage2_workflows", data, "\n".join(lines) + "\n" + machine_line(info, "Page written"), folder)


def sharing_section(folder: Path) -> list[str]:
    rows, bands = [], []
    for red in RED_AGENTS:
        path = folder / f"cage2_workflows_sharing_{red}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        fresh = data["fresh"]
        for name, key in (("compliance 0.95", "to_compliance"), ("and the baseline's return", "to_both")):
            reached = sorted(run[key] for run in fresh if run[key] is not None)
            half = float(np.median([math.inf if run[key] is None else run[key] for run in fresh]))
            median = number(half if half < math.inf else None)
            span = f"{number(reached[0])} to {number(reached[-1])}" if reached else ""
            total = data["shared"][key]
            per_order = "" if total is None else f"{total / len(ORDERS):,.0f}"
            rows.append([red, data["version"], name, f"{len(reached)} of {len(fresh)}", median, span, number(total),
                         per_order])  # fmt: skip
        bands.append(
            [red, *[f"{np.nanmean([run['bands'].get(band, math.nan) for run in fresh]):.2f}" for band in BANDS]]
        )
    if not rows:
        return []
    header = ["red agent", "rules", "until", "fresh: reached", "fresh: median", "fresh: range",
              "shared, mean of all orders", "shared, an order's part"]  # fmt: skip
    return [
        "## What sharing saves\n",
        "Environment steps until a deterministic evaluation reaches it. Fresh: a policy an order, 25 environments, "
        "from nothing, 500,000 steps at most, evaluated every 12,500. Shared: one policy for all 120 orders, 256 "
        "environments, evaluated every 500,000 on orders drawn at random; the search adds 25,000 steps an order, the "
        "least that its early stop allows.\n",
        markdown_table(header, rows),
        "Compliance of the fresh policies while they learn, by episodes in all (the document expects: low, significant "
        "improvement, rising, approaching 95 %, done):\n",
        markdown_table(["red agent", *BANDS], bands),
    ]


def claims_section(folder: Path) -> list[str]:
    path = folder / "cage2_workflows_claims.json"
    if not path.exists():
        return []
    claims = json.loads(path.read_text())
    rows = []
    for name, runs in claims["speed"].items():
        sps, peak, workers = (np.median([run[key] for run in runs]) for key in ("sps", "peak_mib", "workers_mib"))
        rows.append([name, f"{sps:,.0f}", f"{sps / 100:.0f}", f"{peak:.0f}", f"{workers:.0f}"])
    variance = claims["gradient_variance_1"] / claims["gradient_variance_25"]
    one, many = claims["distinct_1"], claims["distinct_25"]
    stability = " against ".join(
        f"{np.mean(claims[key]):.0f} ± {np.std(claims[key], ddof=1):.0f}" for key in ("returns_1", "returns_25")
    )
    return [
        "## The document's claims about 25 environments\n",
        "Its preset, one order: whole training loop, fresh processes in turn, medians of three "
        f"({measured_on(claims)}).\n",
        markdown_table(["", "steps/s", "episodes/s", "peak memory, MiB", "workers' memory, MiB"], rows),
        f"Variance of the first gradient, one episode over 25: {variance:.1f} (25 if episodes are independent). "
        f"Distinct observations in a batch: {one:.1f} of 100 against {many:.0f} of 2,500, {many / one:.1f} times.\n",
        f"Return after 50,000 steps, mean and standard deviation over five seeds, one environment against 25: "
        f"{stability}.\n",
    ]


def quick() -> None:
    """Every part in small: barely trained policies, 10 episodes an order, no fine-tuning."""
    folder = QUICK_RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    for red in RED_AGENTS:
        logdir = folder / f"cage2_workflows_{red}"
        shutil.rmtree(logdir, ignore_errors=True)
        small: dict[str, Any] = {"red_agent": red, "total_timesteps": 25_600, "eval_every": 25_600, "eval_episodes": 10}
        train_to_the_end(script, script.Args(workflow="any", logdir=str(logdir), compile=False, **small))
        measure_table(logdir / "latest.pt", logdir / "latest.pt", folder, True)
        measure_sharing(logdir / "latest.pt", 1, folder, True)
    measure_claims(folder, True)
    write_page(folder, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("table", "search", "sharing", "claims", "page"))
    parser.add_argument(
        "--shared", nargs="+", type=Path, help="latest.pt of a run with --workflow any, and of another seed"
    )
    parser.add_argument("--folders", nargs="+", default=[], type=Path, help="of finished searches")
    parser.add_argument("--orders", type=at_least_one, default=10, help="orders of `sharing`")
    parser.add_argument("--quick", action="store_true", help="everything in small, into runs/bench")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # environments, kind, workflow, updates
    options = parser.parse_args()
    if options.one:
        num_envs, kind, workflow, updates = options.one
        print(json.dumps(memory_and_speed(int(num_envs), kind, None if workflow == "none" else workflow, int(updates))))
        return
    commands: dict[str, Callable[[], None]] = {
        "table": lambda: measure_table(options.shared[0], ([*options.shared, None])[1], RESULTS, False),
        "search": lambda: store_searches(options.folders, RESULTS),
        "sharing": lambda: measure_sharing(options.shared[0], options.orders, RESULTS, False),
        "claims": lambda: measure_claims(RESULTS, False),
        "page": lambda: write_page(RESULTS, NUM_REPLAYS),
    }
    if options.quick:
        quick()
    elif options.command is None or (options.command in ("table", "sharing") and not options.shared):
        parser.error("name a command, and for table and sharing --shared; or --quick")
    elif options.command == "search" and not options.folders:
        parser.error("search needs --folders")
    else:
        try:
            commands[options.command]()
        except (script.UsageError, OSError) as error:  # no such policy, or no search in the folder
            parser.error(str(error))


if __name__ == "__main__":
    main()
