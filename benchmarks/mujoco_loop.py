"""Whole-loop training throughput on MuJoCo: our script beside a CleanRL-style loop and SB3, at equal sizes.

    python -m benchmarks.mujoco_loop            # HalfCheetah, Ant, Humanoid; three settings; five rounds
    python -m benchmarks.mujoco_loop --quick    # HalfCheetah, one setting, three of the candidates, two rounds

Two hours, on a machine that does nothing else: results are written after each setting, and tables that a run does not
measure, since it was stopped or was given other `--envs`, stay as they were, each with its commit and rounds.

Every measurement is a process of its own that trains a few updates; the first are warm-up (ours three, in which it
compiles and warms its caches, peers one) and do not count. Ours is timed over ten updates, the peers over four, since
theirs take longer. Candidates take turns within a round, so a busy moment of the machine hits all of them, and ratios
are medians over rounds. All use 64-64 tanh networks, 10 epochs, the same minibatches, and torch with one thread, or
with as many as their name says.

The limit is what is left if nothing but physics and arithmetic took time: bare `mj_step` on all cores
(`benchmarks.mujoco_env`), then the networks' multiplications, at the speed at which one thread multiplies matrices of
a minibatch's size. An optimised loop can pass it by learning on one core while the other one steps; ours does not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    CORES,
    QUICK_RESULTS,
    RESULTS,
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
from envs.mujoco_batch import TASKS

WARM_UP, UPDATES = 3, 10
PEERS_WARM_UP, PEERS_UPDATES = 1, 4
EPOCHS = 10
CANDIDATES = ["limit", "ours: batch", "ours: batch, no compile", "ours: subproc", "CleanRL-style: sync",
              "CleanRL-style: async", "CleanRL-style: envpool", "SB3: dummy", f"SB3: dummy, {CORES} threads",
              "SB3: subproc", f"SB3: subproc, {CORES} threads"]  # fmt: skip
NOT_OURS = [name for name in CANDIDATES if not name.startswith("ours")]
SETTINGS = {  # name -> (num_envs, num_steps, minibatch)
    "16 x 128, minibatch 64": (16, 128, 64),
    "16 x 128, minibatch 256": (16, 128, 256),
    "1 x 2048, minibatch 64": (1, 2048, 64),
}


def measure(candidate: str, env_id: str, num_envs: int, num_steps: int, minibatch: int, updates: int) -> dict:
    """Train in this process; returns steps per second over the counted updates and, for ours, the shares of time."""
    if candidate == "limit":
        return {"sps": limit(env_id, num_envs, minibatch)}
    loop, _, variant = candidate.partition(": ")
    variant, _, threads = variant.partition(", ")
    if loop == "ours":
        import ppo_continuous_mujoco as script

        batch_size = num_envs * num_steps
        args = script.Args(
            env_id=env_id, num_envs=num_envs, num_steps=num_steps, total_timesteps=batch_size * (updates + WARM_UP)
        )
        args.num_minibatches, args.compile = batch_size // minibatch, threads != "no compile"
        args.vec_env = "subproc" if variant == "subproc" else "batch"
        args.eval_every, args.eval_episodes, args.save_every = 0, 1, 0
        with tempfile.TemporaryDirectory() as scratch:
            train_to_the_end(script, replace(args, logdir=f"{scratch}/run"))
            timing = script.read_csv(Path(scratch) / "run" / "timing.csv")
        counted = {name: timing[f"time/{name}"][WARM_UP:] for name in ("sps", "env_share", "update_share")}
        shares = {name: float(counted[name].mean()) for name in ("env_share", "update_share")}
        sps = statistics.harmonic_mean(counted["sps"].tolist())
        return {"sps": sps, **shares, "gae_share": gae_seconds(num_envs, num_steps) * sps / batch_size}
    from benchmarks import reference_loops

    train = reference_loops.sb3 if loop == "SB3" else reference_loops.cleanrl_style
    updates = min(updates, PEERS_UPDATES) + PEERS_WARM_UP
    seconds = train(
        env_id, num_envs, num_steps, minibatch, EPOCHS, updates, variant, int(threads.partition(" ")[0] or 1)
    )[PEERS_WARM_UP:]
    return {"sps": len(seconds) * num_envs * num_steps / sum(seconds)}


def best_time(function: Callable[[], Any], seconds: float = 0.3) -> float:
    """The shortest of many calls, in seconds."""
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


def gae_seconds(num_envs: int, num_steps: int) -> float:
    """What our advantages of one rollout take."""
    import ppo_continuous_mujoco as script

    rewards, values, next_values = torch.zeros(3, num_steps, num_envs)
    no = torch.zeros(num_steps, num_envs, dtype=torch.bool)
    return best_time(lambda: script.compute_gae(rewards, values, next_values, no, no, 0.99, 0.95))


def limit(env_id: str, num_envs: int, minibatch: int) -> float:
    """Steps per second if there were only physics, on all cores, and the networks' arithmetic, on one."""
    from benchmarks.mujoco_env import bare_loops
    from envs.mujoco_batch import MujocoBatchVecEnv

    torch.set_num_threads(1)
    envs = MujocoBatchVecEnv(env_id, num_envs)
    with bare_loops(envs, env_id, min(CORES, num_envs), 0.5) as bare:
        bare()
        physics = 1 / bare()
    inputs = math.prod(envs.single_observation_space.shape or ())
    outputs = math.prod(envs.single_action_space.shape or ()) + 1
    envs.close()
    first_layers = 2 * inputs * 64  # of actor and critic
    weights = first_layers + 2 * 64 * 64 + 64 * outputs
    a, b = torch.rand(minibatch, 64), torch.rand(64, 64)
    per_product = best_time(lambda: torch.mm(a, b)) / (minibatch * 64 * 64)
    # An input's product with each weight: once in the rollout, and in each epoch forwards and, for the gradients of
    # the layers' inputs and of the weights, twice backwards; but nobody needs the gradient of an observation.
    products = (1 + 3 * EPOCHS) * weights - EPOCHS * first_layers
    return 1 / (physics + products * per_product)


def in_process(shares: dict, candidate: str, env_id: str, sizes: tuple[int, int, int], updates: int) -> float:
    """Run `measure` in a fresh process and return its steps per second."""
    shares[candidate] = in_fresh_process("mujoco_loop", candidate, env_id, *sizes, updates)
    return shares[candidate]["sps"]


def split_of(shares: dict) -> str:
    """Where our time goes; the update's share in timing.csv holds the advantages."""
    if "env_share" not in shares:
        return ""
    env, gae, update = (shares[name] for name in ("env_share", "gae_share", "update_share"))
    return f"{env:.0%} / {1 - env - update:.0%} / {gae:.0%} / {update - gae:.0%}"


def page_of(data: dict[str, Any]) -> str:
    """Markdown of what was measured: a table for each task and setting, beside SB3 in its fastest form there."""
    groups: dict[str, dict[str, list[float]]] = {}
    for row in data["rows"]:
        groups.setdefault(row["group"], {})[row["name"]] = row["rounds"]
    updates = data["updates"]
    page = "# Whole-loop training throughput on MuJoCo\n\n`python -m benchmarks.mujoco_loop`: " + (
        f"environment steps per second, median of interleaved rounds of {updates} updates "
        f"(peers {min(updates, PEERS_UPDATES)}); ratios are medians of the ratios within rounds, which are not the "
        "ratios of the medians; shares of time are of the last round.\n"
    )
    for group, figures in sorted(groups.items()):
        speeds = {name: summary(rounds) for name, rounds in figures.items()}
        fastest_sb3 = max((name for name in speeds if name.startswith("SB3")), key=lambda name: speeds[name]["median"])
        references = ("limit", "CleanRL-style: sync", fastest_sb3)
        rows = []
        for name, measured in figures.items():
            ratios = [f"{median_ratio(measured, figures[reference]):.2f}" for reference in references]
            speed = speeds[name]
            rows.append([name, f"{speed['median']:,.0f}", f"{speed['min']:,.0f} - {speed['max']:,.0f}", *ratios,
                         split_of(data["last_shares"][group][name])])  # fmt: skip
        header = ["loop", "steps/s", "min - max", *(f"x {reference}" for reference in references),
                  "environment / inference / advantages / update"]  # fmt: skip
        page += f"\n## {group}\n\n{markdown_table(header, rows)}\n"
        page += f"{len(figures['limit'])} rounds. {machine_line(data['machines'][group])}"
    return page


def stored_results(folder: Path, updates: int) -> dict[str, Any]:
    """What earlier runs of as many updates left in the folder: "rows", and "machines" and "last_shares" by group."""
    path = folder / "mujoco_loop.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if stored.get("updates") != updates:
        return {"updates": updates, "rows": [], "last_shares": {}, "machines": {}}
    return stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="HalfCheetah, one setting, three candidates, two rounds")
    parser.add_argument("--rounds", type=at_least_one, default=None, help="rounds (default 5, quick 2)")
    parser.add_argument("--envs", nargs="+", default=None, help="environment ids")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        candidate, env_id, *sizes = options.one
        print(json.dumps(measure(candidate, env_id, *map(int, sizes))))
        return
    env_ids = options.envs or (["HalfCheetah-v5"] if options.quick else ["HalfCheetah-v5", "Ant-v5", "Humanoid-v5"])
    unknown = [env_id for env_id in env_ids if env_id not in TASKS]
    if unknown:
        parser.error(f"--envs {unknown[0]}: choose among {', '.join(TASKS)}")
    settings = dict(list(SETTINGS.items())[: 1 if options.quick else 3])
    names = ["ours: batch", "limit", "CleanRL-style: sync", "SB3: dummy"] if options.quick else list(CANDIDATES)
    if "CleanRL-style: envpool" in names and find_spec("envpool") is None:
        print("envpool is not installed: left out")
        names.remove("CleanRL-style: envpool")
    rounds = options.rounds or (2 if options.quick else 5)
    updates = 3 if options.quick else UPDATES
    folder = QUICK_RESULTS if options.quick else RESULTS
    data = stored_results(folder, updates)
    for env_id in env_ids:
        for setting, sizes in settings.items():
            shares: dict = {}
            candidates = {name: partial(in_process, shares, name, env_id, sizes, updates) for name in names}
            info = machine_info(["torch", "gymnasium", "mujoco", "numpy", "stable-baselines3", "envpool"])
            group = f"{env_id}, {setting}"
            rows = rows_of(group, interleave(candidates, rounds), NOT_OURS)
            data["rows"] = [row for row in data["rows"] if row["group"] != group] + rows
            data["last_shares"][group], data["machines"][group], data["machine"] = shares, info, info
            write_results("mujoco_loop", data, page_of(data), folder)


if __name__ == "__main__":
    main()
