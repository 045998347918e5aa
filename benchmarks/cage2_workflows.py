"""Workflows on CAGE2: what each of the 120 orders is worth, what the search finds, what sharing a policy saves.

    python -m benchmarks.cage2_workflows table --shared runs/.../latest.pt   # every order once, as the search would
    python -m benchmarks.cage2_workflows sharing --shared runs/.../latest.pt --orders 10   # against fresh policies
    python -m benchmarks.cage2_workflows claims                              # the document's claims, measured
    python -m benchmarks.cage2_workflows page                                # replays, pictures and results page

`table` takes the environment from the shared policy's run (--workflow any), stores results/cage2_workflows_{red
agent}.json and can be interrupted and repeated. `page` replays the tables: in the real search an evaluation has fixed
seeds, so that looking a return up is what the search would have seen.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, machine_info

sys.path.insert(0, str(ROOT))
import ppo_cage2_parallel as script
from envs.cage2.workflow import ORDERS

BASELINES = {"b_line": -20.2, "meander": -18.2}  # the source project's PPO without workflows, 100 steps (S004-50)


def measure_table(shared: Path, scratch: Path) -> None:
    """Fine-tune and evaluate every order with the defaults of the search."""
    base = script.known_args(script.load_checkpoint(shared)["args"])
    args = script.SearchArgs(shared=str(shared))
    path = RESULTS / f"cage2_workflows_{base.red_agent}.json"
    table = json.loads(path.read_text()) if path.exists() else {"machine": machine_info(), "orders": []}
    table["version"], table["shared_timesteps"] = base.version, base.total_timesteps
    for order in range(len(table["orders"]), len(ORDERS)):
        logdir = scratch / f"order_{order}"
        shutil.rmtree(logdir, ignore_errors=True)
        logdir.mkdir(parents=True)
        started, cpu = time.perf_counter(), time.process_time()
        record = script.try_order(args, base, order, shared, logdir / "run")
        del record["signal"], record["checkpoint"]
        times = {"wall_seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
        table["orders"].append(record | times)
        path.write_text(json.dumps(table, indent=1))
        print(f"{order:>3} {record['workflow']}: {record['mean_return']:.2f}, {record['compliance']:.3f}", flush=True)
        shutil.rmtree(logdir)
