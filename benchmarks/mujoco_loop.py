"""Whole-loop training throughput on MuJoCo: our script beside a CleanRL-style loop and SB3, at equal sizes.

    python -m benchmarks.mujoco_loop            # HalfCheetah, Ant, Humanoid; three settings; five rounds
    python -m benchmarks.mujoco_loop --quick    # HalfCheetah, one setting, three of the candidates, two rounds

Every measurement is a process of its own that trains a few updates; the first three are warm-up (compiling, caches)
and do not count. Candidates take turns within a round, so a busy moment of the machine hits all of them, and ratios
are medians over rounds. All use torch with one thread, 64-64 tanh networks, 10 epochs, the same minibatches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common import (
    QUICK_RESULTS,
    RESULTS,
    in_fresh_process,
    interleave,
    machine_info,
    machine_line,
    markdown_table,
    median_ratio,
    rows_of,
    summary,
    write_results,
)

WARM_UP = 3
CANDIDATES = ["ours: batch", "ours: batch, no compile", "ours: subproc", "CleanRL-style: sync", "CleanRL-style: async",
              "SB3: dummy", "SB3: subproc"]  # fmt: skip
PEERS = [name for name in CANDIDATES if not name.startswith("ours")]
REFERENCES = ("CleanRL-style: sync", "SB3: dummy")
SETTINGS = {  # name -> (num_envs, num_steps, minibatch)
    "16 x 128, minibatch 64": (16, 128, 64),
    "16 x 128, minibatch 256": (16, 128, 256),
    "1 x 2048, minibatch 64": (1, 2048, 64),
}


def measure(candidate: str, env_id: str, num_envs: int, num_steps: int, minibatch: int, updates: int) -> dict:
    """Train in this process; returns steps per second over the counted updates and, for ours, the shares of time."""
    loop, _, variant = candidate.partition(": ")
    if loop == "ours":
        import ppo_continuous_mujoco as script

        batch_size = num_envs * num_steps
        args = script.Args(
            env_id=env_id, num_envs=num_envs, num_steps=num_steps, total_timesteps=batch_size * (updates + WARM_UP)
        )
        args.num_minibatches, args.compile = batch_size // minibatch, "no compile" not in variant
        args.vec_env = "subproc" if variant == "subproc" else "batch"
        args.eval_every, args.eval_episodes, args.save_every = 0, 1, 0
        with tempfile.TemporaryDirectory() as scratch:
            script.train(replace(args, logdir=f"{scratch}/run"))
            timing = script.read_csv(Path(scratch) / "run" / "timing.csv")
        counted = {name: timing[f"time/{name}"][WARM_UP:] for name in ("sps", "env_share", "update_share")}
        shares = {name: float(counted[name].mean()) for name in ("env_share", "update_share")}
        return {"sps": statistics.harmonic_mean(counted["sps"].tolist()), **shares}
    from benchmarks import reference_loops

    train = reference_loops.sb3 if loop == "SB3" else reference_loops.cleanrl_style
    seconds = train(env_id, num_envs, num_steps, minibatch, 10, updates + WARM_UP, vectorization=variant)[WARM_UP:]
    return {"sps": len(seconds) * num_envs * num_steps / sum(seconds)}


def in_process(shares: dict, candidate: str, env_id: str, sizes: tuple[int, int, int], updates: int) -> float:
    """Run `measure` in a fresh process and return its steps per second."""
    shares[candidate] = in_fresh_process("mujoco_loop", candidate, env_id, *sizes, updates)
    return shares[candidate]["sps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="HalfCheetah, one setting, three candidates, two rounds")
    parser.add_argument("--rounds", type=int, default=None, help="rounds (default 5, quick 2)")
    parser.add_argument("--envs", nargs="+", default=None, help="environment ids")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        candidate, env_id, *sizes = options.one
        print(json.dumps(measure(candidate, env_id, *map(int, sizes))))
        return
    env_ids = options.envs or (["HalfCheetah-v5"] if options.quick else ["HalfCheetah-v5", "Ant-v5", "Humanoid-v5"])
    settings = dict(list(SETTINGS.items())[: 1 if options.quick else 3])
    names = ["ours: batch", *REFERENCES] if options.quick else CANDIDATES
    rounds = options.rounds or (2 if options.quick else 5)
    updates = 3 if options.quick else 10
    info = machine_info(["torch", "gymnasium", "mujoco", "numpy", "stable-baselines3"])
    data: dict = {"machine": info, "rows": [], "last_shares": {}}
    page = "# Whole-loop training throughput on MuJoCo\n\n`python -m benchmarks.mujoco_loop`: " + (
        f"environment steps per second, median of {rounds} interleaved rounds of {updates} updates; ratios are medians "
        "of the ratios within rounds.\n"
    )
    for env_id in env_ids:
        for setting, sizes in settings.items():
            shares: dict = {}
            candidates = {name: partial(in_process, shares, name, env_id, sizes, updates) for name in names}
            figures = interleave(candidates, rounds)
            data["rows"] += rows_of(f"{env_id}, {setting}", figures, PEERS)
            data["last_shares"][f"{env_id}, {setting}"] = shares
            rows = []
            for name in names:
                ratios = [f"{median_ratio(figures[name], figures[reference]):.2f}" for reference in REFERENCES]
                share = shares[name].get("env_share")
                split = "" if share is None else f"{share:.0%} / {shares[name]['update_share']:.0%}"
                rows.append([name, f"{summary(figures[name])['median']:,.0f}", *ratios, split])
            header = ["loop", "steps/s", *(f"x {reference}" for reference in REFERENCES), "environment / update share"]
            page += f"\n## {env_id}, {setting}\n\n" + markdown_table(header, rows)
            folder = QUICK_RESULTS if options.quick else RESULTS
            write_results("mujoco_loop", data, page + "\n" + machine_line(info), folder)


if __name__ == "__main__":
    main()
