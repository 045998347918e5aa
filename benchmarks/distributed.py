"""What several ranks (torchrun) cost and bring: measured parts, a model of them, its check, and the learning curves.

    python -m benchmarks.distributed            # measure, check on one and two ranks, predict up to 1,024: ten minutes
    python -m benchmarks.distributed --quick    # MuJoCo only, not compiled
    python -m benchmarks.distributed --report   # measure nothing, write page and figure from the JSON of the last run
    python -m benchmarks.distributed --curves   # Hopper-v5, three seeds, one rank beside two: half an hour

The parts are timed inside the real loop: a process trains a few updates with `learn` of the script, one core, and
hooks note the CPU time at which environment steps, `compute_gae`, gradient averages and epochs begin and end. CPU time,
because other programs run here too. What a message costs is measured through `Ranks.average` and `Ranks.gather` between
processes of this machine; networks between machines are assumptions and named so. `predict` puts them together.
Seconds are those that the scripts log as time/sps: without evaluations, checkpoints and log files.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import importlib
import io
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    QUICK_RESULTS,
    RESULTS,
    ROOT,
    at_least_one,
    in_fresh_process,
    interleave,
    machine_info,
    machine_line,
    markdown_table,
    rows_of,
    write_results,
)
from benchmarks.scaling import cpu_seconds
from envs.mario import available_backends


# ---- the model ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    """Seconds for so many items at once."""

    fixed: float
    per_item: float

    def __call__(self, items: float) -> float:
        return self.fixed + self.per_item * items


@dataclass(frozen=True)
class Network:
    """A message of `size` bytes needs hop + size / bandwidth seconds from one rank to the next, and `call` once."""

    hop: float
    bandwidth: float
    tree: bool = False  # small all_reduces along a tree, as nccl does; gloo always uses a ring
    call: float = 0.0  # what the software takes for any operation

    def all_reduce(self, size: float, ranks: int) -> float:
        """Around the ring twice, a part of size / ranks at each of 2 (ranks - 1) hops; or up and down a tree."""
        ring = 2 * (ranks - 1) * (self.hop + size / ranks / self.bandwidth)
        tree = 2 * math.ceil(math.log2(ranks)) * self.hop + 2 * size / self.bandwidth
        return self.call + (min(ring, tree) if self.tree else ring)

    def all_gather(self, size: float, ranks: int) -> float:
        """`size` bytes of each rank, once around the ring: ranks - 1 hops."""
        return self.call + (ranks - 1) * (self.hop + size / self.bandwidth)


@dataclass(frozen=True)
class Workload:
    num_envs: int
    num_steps: int
    num_minibatches: int
    update_epochs: int

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches


@dataclass(frozen=True)
class Costs:
    """What a script needs on one core, in seconds, and what its ranks send, in bytes."""

    environment: Line  # a step of so many environments
    inference: Line  # choosing their actions and storing what came back
    bootstrap: Line  # values and log-probabilities of so many transitions
    gae_step: float  # one step of `compute_gae`
    shuffle: Line  # minibatches of an epoch of so many transitions
    noise: float  # random numbers for a transition's action
    merge: float  # absorbing one rank's moments
    step_alone: Line  # an optimiser step on so many samples: gradient and Adam compiled in one
    step_apart: Line  # the same, compiled apart, as several ranks need it
    transition_bytes: float  # of a transition in the gathered batch
    gradient_bytes: float  # of an averaged gradient with its metrics
    moments_bytes: tuple[int, ...]  # of the statistics that each rank sends at each environment step


MESSAGES = 8  # small ones an update: five of the batch's six tensors, the episodes (two), the signal (counted as one)


def predict(costs: Costs, work: Workload, ranks: int, network: Network) -> dict[str, float] | None:
    """Seconds of an update by part; None where the script refuses to split the work so."""
    if work.num_envs % ranks or work.minibatch_size % ranks:
        return None
    num_envs, steps = work.num_envs // ranks, work.update_epochs * work.num_minibatches
    optimiser_step = costs.step_alone if ranks == 1 else costs.step_apart
    seconds = {
        # split over the ranks
        "environments": work.num_steps * costs.environment(num_envs),
        "inference": work.num_steps * costs.inference(num_envs),
        "advantages": costs.bootstrap(num_envs * work.num_steps) + work.num_steps * costs.gae_step,
        "gradients": steps * optimiser_step(work.minibatch_size / ranks),
        # done by every rank for all
        "shuffling": work.update_epochs * costs.shuffle(work.batch_size) + costs.noise * work.batch_size,
        "statistics": 0.0,
        # sent
        "all_reduce": 0.0,
        "gather": 0.0,
    }
    if ranks > 1:
        for size in costs.moments_bytes:
            seconds["statistics"] += work.num_steps * (network.all_gather(size, ranks) + ranks * costs.merge)
        seconds["all_reduce"] = steps * network.all_reduce(costs.gradient_bytes, ranks)
        share = costs.transition_bytes * work.batch_size / ranks
        seconds["gather"] = network.all_gather(share, ranks) + MESSAGES * network.all_gather(0, ranks)
    return seconds


def steps_per_second(costs: Costs, work: Workload, ranks: int, network: Network) -> float | None:
    seconds = predict(costs, work, ranks, network)
    return None if seconds is None else work.batch_size / sum(seconds.values())


RANKS = tuple(2**i for i in range(11))
ASSUMED = {
    "Ethernet": Network(25e-6, 10e9 / 8),  # gloo, 10 Gbit/s
    "InfiniBand": Network(5e-6, 200e9 / 8, tree=True),  # nccl, 200 Gbit/s
}


def assumed(messages: list[dict[str, Any]]) -> dict[str, Network]:
    """ASSUMED, with the CPU time that a rank spends on the smallest message here: no network takes that away."""
    call = statistics.mean(row["cpu"] for row in smallest_of(messages))
    return {name: replace(network, call=call) for name, network in ASSUMED.items()}


def smallest_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the smallest all_reduce and all_gather between two ranks."""
    least = [row for row in messages if (row["ranks"], row["bytes"]) == (2, SIZES[0])]
    return [row for row in least if row["operation"] != "all_gather_object"]


def scenarios(defaults: Workload, ranks: int) -> dict[str, Workload]:
    """Ways to use so many ranks."""
    n = defaults.num_envs * ranks
    return {
        "strong": defaults,
        "strong, 1,024 environments": replace(defaults, num_envs=1024),
        "weak, more minibatches": replace(defaults, num_envs=n, num_minibatches=defaults.num_minibatches * ranks),
        "weak, larger minibatches": replace(defaults, num_envs=n),
    }


def pays_up_to(speeds: Sequence[float | None], gain: float = 1.25) -> int:
    """The most ranks, of 1, 2, 4, ..., that are faster than any fewer by at least a quarter."""
    best, pays = 0.0, 1
    for i, speed in enumerate(speeds):
        if speed is not None and speed >= gain * best:
            pays = 2**i
        best = max(best, speed or 0.0)
    return pays


# ---- measuring the parts --------------------------------------------------------------------------------------------
def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """The least-squares line through (items, seconds), or the one through 0 if that would begin below."""
    items, seconds = np.array(points, dtype=float).T
    slope, fixed = np.polyfit(items, seconds, 1)
    return Line(float(fixed), float(slope)) if fixed > 0 else Line(0.0, float(seconds @ items / (items @ items)))


Event = tuple[str, float, float]  # name, begin and end


def durations(events: Sequence[Event]) -> dict[str, float]:
    """Median length of the events of each name, and of the gaps "name to next name" between neighbours."""
    lengths: dict[str, list[float]] = {}
    for name, begin, end in events:
        lengths.setdefault(name, []).append(end - begin)
    for (name, _, end), (following, begin, _) in itertools.pairwise(events):
        lengths.setdefault(f"{name} to {following}", []).append(begin - end)
    return {name: statistics.median(values) for name, values in lengths.items()}


def noted(function: Any, name: str, events: list[Event]) -> Any:
    """`function`, noting the CPU time at which it begins and ends."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        result = function(*args, **kwargs)
        events.append((name, begin, time.process_time()))
        return result

    return wrapper


def measure_loop(script_name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Train in this process, with hooks; the first update does not count (compiling, caches).

    Returns the medians of `durations`, the wall and CPU seconds of each update, CPU seconds of worker processes a step,
    of random numbers a transition, and the bytes that are sent, or would be.
    """
    script: Any = importlib.import_module(script_name)
    ranks, one_program = int(os.environ.get("WORLD_SIZE", 1)), values.get("target_kl") is None
    events: list[Event] = []
    of_workers: list[float] = []  # their CPU seconds so far, at each compute_gae
    sent: dict[str, list[int]] = {"batch": [], "moments": [], "gradients": []}
    training_envs: list[Any] = []
    make_envs, gather, average, compute_gae = (
        script.make_envs, script.Ranks.gather, script.Ranks.average, script.compute_gae,
    )  # fmt: skip

    def noted_envs(*args: Any, **kwargs: Any) -> Any:
        envs = make_envs(*args, **kwargs)
        if not training_envs:  # those of evaluations do not count
            training_envs.append(envs)
            envs.step = noted(envs.step, "step", events)
        return envs

    def noted_gather(self: Any, x: Any, dim: int = 1) -> Any:
        sent["batch" if dim == 1 else "moments"].append(x.nbytes)
        return gather(self, x, dim)

    def noted_average(self: Any, tensors: Any) -> None:
        sent["gradients"].append(sum(x.nbytes for x in tensors))
        noted(average, "average", events)(self, tensors)

    def noted_gae(*args: Any) -> Any:
        of_workers.append(cpu_seconds() - time.process_time())
        sent["batch"].clear()
        return noted(compute_gae, "gae", events)(*args)

    script.make_envs, script.Ranks.gather, script.compute_gae = noted_envs, noted_gather, noted_gae
    script.check_gradients = noted(script.check_gradients, "epoch", events)  # the last call of an epoch
    compiled = values.get("compile", script.Args().compile)
    if ranks > 1 or not (compiled and one_program):  # else it is part of what is compiled
        script.Ranks.average = noted_average
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = script.Args(**QUIET, **values, logdir=f"{folder}/run")
        logdir = Path(script.train(args)["logdir"])  # of rank 0, in all ranks
        wall = script.read_csv(logdir / "timing.csv")["time/sps"] if os.environ.get("RANK", "0") == "0" else np.ones(2)

    space = training_envs[0].single_action_space
    numbers = (args.batch_size, int(getattr(space, "n", np.prod(space.shape))))
    begin = time.process_time()
    for _ in range(10):
        script.gumbel_noise(numbers, "cpu") if hasattr(space, "n") else script.torch.randn(numbers)
    noise = (time.process_time() - begin) / 10 / args.batch_size

    new_update = [i for i in range(1, len(events)) if (events[i - 1][0], events[i][0]) == ("epoch", "step")]
    begins = [events[i][1] for i in new_update]
    ends = [events[i - 1][2] for i in [*new_update[1:], len(events)]]
    workers = np.diff(of_workers)
    return {
        "median": durations(events[new_update[0] :]),
        "wall": (args.batch_size / wall[1:]).tolist(),
        "cpu": (np.subtract(ends, begins) + workers).tolist(),
        "workers_per_step": float(np.median(workers)) / args.num_steps,
        "noise": noise,
        "transition_bytes": sum(sent["batch"][:6]) * ranks / args.batch_size,
        "moments_bytes": sent["moments"][-(len(sent["moments"]) // (args.num_updates * args.num_steps)) :],
        "gradient_bytes": sent["gradients"][0] if sent["gradients"] else 0,
    }


BACKEND = available_backends()[0]  # the fastest that is installed
QUIET = {"eval_every": 0, "eval_episodes": 1, "save_every": 0, "hints": False, "num_workers": 1, "capture_video": False}
# Two sizes of each script, as different as can be waited for, with the same num_steps: a line goes through them.
SCRIPTS: dict[str, list[dict[str, Any]]] = {
    "ppo_continuous_mujoco": [
        {"num_envs": 8, "num_steps": 32, "num_minibatches": 4, "update_epochs": 4, "total_timesteps": 8 * 256},
        {"num_envs": 128, "num_steps": 32, "num_minibatches": 4, "update_epochs": 4, "total_timesteps": 6 * 4096},
    ],
    "ppo_cage2_parallel": [
        {"num_envs": 16, "num_steps": 50, "num_minibatches": 4, "update_epochs": 4, "total_timesteps": 8 * 800},
        {"num_envs": 256, "num_steps": 50, "num_minibatches": 4, "update_epochs": 4, "total_timesteps": 6 * 12_800},
    ],
    "ppo_atari_mario": [
        {"num_envs": 4, "num_steps": 32, "num_minibatches": 4, "update_epochs": 3, "total_timesteps": 6 * 128,
         "minibatch_growth": 1, "backend": BACKEND},
        {"num_envs": 32, "num_steps": 32, "num_minibatches": 4, "update_epochs": 3, "total_timesteps": 4 * 1024,
         "minibatch_growth": 1, "backend": BACKEND},
    ],
}  # fmt: skip
APART = {"target_kl": 1e9}  # never reached, and the script then compiles gradients and Adam apart, as for several ranks
CHECKS: dict[str, dict[str, Any]] = {  # trained by one and by two ranks, to be compared with the prediction
    "MuJoCo, minibatches of 64 (the default)": {
        "script": "ppo_continuous_mujoco", "num_envs": 16, "num_steps": 128, "num_minibatches": 32,
        "update_epochs": 10, "total_timesteps": 7 * 2048},
    "MuJoCo, minibatches of 512": {
        "script": "ppo_continuous_mujoco", "num_envs": 16, "num_steps": 128, "num_minibatches": 4,
        "update_epochs": 10, "total_timesteps": 7 * 2048},
    "CAGE2, the default": {
        "script": "ppo_cage2_parallel", "num_envs": 256, "num_steps": 100, "num_minibatches": 8,
        "update_epochs": 4, "total_timesteps": 6 * 25_600},
    "Mario, minibatches of 256 (the default's first), 16 environments x 64": {
        "script": "ppo_atari_mario", "backend": BACKEND, "num_envs": 16, "num_steps": 64, "num_minibatches": 4,
        "minibatch_growth": 1, "update_epochs": 4, "total_timesteps": 3 * 1024},
}  # fmt: skip


def work_of(values: dict[str, Any]) -> Workload:
    return Workload(**{name: values[name] for name in Workload.__dataclass_fields__})


def default_work(script_name: str) -> Workload:
    args = importlib.import_module(script_name).Args()
    return Workload(args.num_envs, args.num_steps, args.num_minibatches, args.update_epochs)


def measure_costs(script_name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Measure a script at its two sizes, each compiled in one and apart (if it is compiled), and draw the lines.

    Returns what `Costs` takes, and all that was measured under "loops".
    """
    loops, points = [], []
    compiled = options.get("compile", importlib.import_module(script_name).Args().compile)

    def loop(values: dict[str, Any]) -> dict[str, Any]:
        sys.modules.pop(script_name)  # a fresh copy, without hooks
        loops.append({"values": values, **measure_loop(script_name, values)})
        return loops[-1]["median"]

    for size in SCRIPTS[script_name]:
        values, work = size | options, work_of(size)
        apart = loop(values | APART)
        step = apart["average"] + apart["average to average"]
        # Between two epochs lie the shuffle and the first gradient, behind the last average a last Adam.
        shuffle = apart["epoch to average"] + apart["average to epoch"] - apart["average to average"]
        found = loops[-1]
        alone = (loop(values)["epoch to epoch"] - shuffle) / work.num_minibatches if compiled else step
        points.append({
            "environment": (work.num_envs, apart["step"] + found["workers_per_step"]),
            "inference": (work.num_envs, apart["step to step"]),
            "bootstrap": (work.batch_size, apart["step to gae"]),
            "shuffle": (work.batch_size, shuffle),
            "step_alone": (work.minibatch_size, alone),
            "step_apart": (work.minibatch_size, step),
        })  # fmt: skip
    lines: dict[str, Any] = {name: line_through([point[name] for point in points]) for name in points[0]}
    sent = {name: found[name] for name in ("noise", "transition_bytes", "moments_bytes", "gradient_bytes")}
    return {"costs": asdict(Costs(**lines, **sent, gae_step=apart["gae"] / work.num_steps, merge=merge_seconds())),
            "loops": loops}  # fmt: skip


def merge_seconds(ranks: int = 64) -> float:
    """CPU seconds for absorbing the moments of one more rank."""
    from envs.normalize import RunningMeanStd

    seconds = []
    for count in (1, ranks):

        def gather(moments: np.ndarray, count: int = count) -> list[np.ndarray]:
            return [moments] * count

        running = RunningMeanStd((17,), gather=gather)
        begin = time.process_time()
        for _ in range(100):
            running.update(np.ones((16, 17)))
        seconds.append((time.process_time() - begin) / 100)
    return (seconds[1] - seconds[0]) / (ranks - 1)


# ---- measuring messages ---------------------------------------------------------------------------------------------
SIZES = (8, 1024, 32 * 1024, 256 * 1024, 2**20, 8 * 2**20, 64 * 2**20)


def measure_messages(seconds: float) -> list[dict[str, Any]]:
    """In each of several ranks: seconds of a message of so many bytes, median and fastest, and its CPU seconds."""
    import ppo_continuous_mujoco as script

    torch = script.torch
    torch.set_num_threads(1)
    ranks = script.Ranks(script.Args())
    x = torch.ones(SIZES[-1] // 4)
    calls: dict[str, Any] = {
        "all_reduce": lambda size: ranks.average([x[: size // 4]]),
        "all_gather": lambda size: ranks.gather(x[: size // 4], 0),
        "all_gather_object": lambda size: ranks.gather_objects([(1.0, 2)] * 10),
    }
    rows = []
    for name, call in calls.items():
        for size in SIZES if name != "all_gather_object" else SIZES[:1]:
            call(size)
            begin = time.perf_counter()
            call(size)
            once = torch.tensor(time.perf_counter() - begin)
            ranks.average([once])  # all ranks must repeat equally often
            taken, cpu = [], time.process_time()
            for _ in range(min(1000, max(10, int(seconds / once)))):
                begin = time.perf_counter()
                call(size)
                taken.append(time.perf_counter() - begin)
            cpu = (time.process_time() - cpu) / len(taken)
            row = {"median": statistics.median(taken), "fastest": min(taken), "cpu": cpu}
            rows.append({"ranks": ranks.size, "operation": name, "bytes": size, **row})
    ranks.close()
    return rows


def network_of(rows: list[dict[str, Any]]) -> Network:
    """hop and bandwidth of two processes of this machine: from the fastest of the smallest messages, when both had a
    core, and from the CPU time of those of 1 MiB and more, because copying is all that they need here."""
    smallest = {row["operation"]: row["fastest"] for row in smallest_of(rows)}
    hop = statistics.mean([smallest["all_reduce"] / 2, smallest["all_gather"]])
    # Between two ranks either operation sends `bytes` once in each direction.
    rates = [row["bytes"] / row["cpu"] for row in rows if row["ranks"] == 2 and row["bytes"] >= 2**20]
    return Network(hop, statistics.median(rates))


def with_ranks(ranks: int, *arguments: str) -> Any:
    """What `--one ...arguments` prints on rank 0 of so many ranks under torchrun, as JSON."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--module",
               "benchmarks.distributed", "--one", *arguments]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- one rank beside two --------------------------------------------------------------------------------------------
def check(name: str, rounds: int, found: dict[int, list[Any]], **options: Any) -> dict[str, list[float]]:
    """steps/s of one and of two ranks in turn; `found` gets all that `measure_loop` returned."""
    values = {key: value for key, value in CHECKS[name].items() if key != "script"} | options
    batch_size = work_of(values).batch_size

    def speed(ranks: int) -> float:
        measured = with_ranks(ranks, "loop", CHECKS[name]["script"], json.dumps(values))
        found.setdefault(ranks, []).append(measured)
        return batch_size / statistics.median(measured["wall"])

    return interleave({"1 rank": lambda: speed(1), "2 ranks": lambda: speed(2)}, rounds)


IDLE = Network(0.0, math.inf)  # costs no time: what is left is arithmetic


def compared(data: dict[str, Any]) -> list[dict[str, Any]]:
    """For each setting and number of ranks: seconds of an update as predicted for idle cores, and as measured."""
    local, rows = Network(**data["network"]), []
    for name, one in data["checks"].items():
        work, costs = work_of(CHECKS[name]), costs_from(data["costs"][CHECKS[name]["script"]])
        for ranks in (1, 2):
            found = one[str(ranks)]
            rows.append({
                "setting": name, "ranks": ranks,
                "arithmetic": seconds_of(costs, work, ranks, IDLE),
                "cpu": statistics.median(statistics.median(run["cpu"]) for run in found),
                "predicted": seconds_of(costs, work, ranks, local),
                "wall": statistics.median(statistics.median(run["wall"]) for run in found),
            })  # fmt: skip
    return rows


def seconds_of(costs: Costs, work: Workload, ranks: int, network: Network) -> float:
    seconds = predict(costs, work, ranks, network)
    assert seconds is not None, f"{work} cannot be split over {ranks} ranks"
    return sum(seconds.values())


def costs_from(saved: dict[str, Any]) -> Costs:
    """The inverse of `asdict`."""
    values: dict[str, Any] = {name: Line(**x) if isinstance(x, dict) else x for name, x in saved.items()}
    return Costs(**values)


# ---- the page -------------------------------------------------------------------------------------------------------
NAMES = {"ppo_continuous_mujoco": "MuJoCo", "ppo_cage2_parallel": "CAGE2", "ppo_atari_mario": "Mario"}


def us(seconds: float) -> str:
    """Microseconds, to three digits or whole."""
    return f"{1e6 * seconds:,.0f}" if seconds > 1e-4 else f"{1e6 * seconds:.3g}"


def page_of(data: dict[str, Any]) -> str:
    """All tables, from what was measured; the predictions are made here."""
    networks = {"this machine": Network(**data["network"]), **assumed(data["messages"])}
    local = networks["this machine"]
    page = "# Several ranks: what they cost, and what they would bring\n\n`python -m benchmarks.distributed`; "
    page += "the formulas and what follows from them are in [docs/distributed.md](../docs/distributed.md). "
    page += "Pays up to: the most ranks that are faster than any fewer by at least a quarter.\n"

    page += "\n## Costs on one core, microseconds of CPU time\n\n"
    parts = {"environment": "environment step", "inference": "inference, a step", "bootstrap": "bootstrap",
             "shuffle": "shuffle, an epoch", "step_alone": "optimiser step, one program",
             "step_apart": "optimiser step, compiled apart"}  # fmt: skip
    items = ["environment", "environment", "transition", "transition", "sample", "sample"]
    costs = {script: costs_from(saved) for script, saved in data["costs"].items()}
    rows: list[list[object]] = []
    for (part, title), item in zip(parts.items(), items, strict=True):
        lines = [getattr(cost, part) for cost in costs.values()]
        rows.append([title, *(f"{us(x.fixed)} + {us(x.per_item)} per {item}" for x in lines)])
    rows.append(["GAE, a step", *(us(cost.gae_step) for cost in costs.values())])
    rows.append(["random numbers per transition", *(us(cost.noise) for cost in costs.values())])
    rows.append(["absorbing one rank's moments", *(us(c.merge) if c.moments_bytes else "-" for c in costs.values())])
    rows.append(["bytes of a gathered transition", *(f"{cost.transition_bytes:,.0f}" for cost in costs.values())])
    rows.append(["bytes of a gradient", *(f"{cost.gradient_bytes:,.0f}" for cost in costs.values())])
    moments = (" + ".join(map(str, cost.moments_bytes)) or "-" for cost in costs.values())
    rows.append(["bytes of moments, a step", *moments])
    page += markdown_table(["", *(NAMES[script] for script in costs)], rows)

    page += "\n## Messages between processes of this machine (gloo), microseconds\n\n"
    rows = []
    for row in data["messages"]:
        known: Any = {"all_reduce": local.all_reduce, "all_gather": local.all_gather}.get(row["operation"])
        modelled = us(known(row["bytes"], row["ranks"])) if known else ""
        size = f"{row['bytes']:,}" if known else "10 episodes"
        times = [us(row[key]) for key in ("median", "fastest", "cpu")]
        rows.append([row["operation"], row["ranks"], size, *times, modelled])
    page += markdown_table(
        ["operation", "ranks", "bytes of a rank", "median", "fastest", "CPU time of a rank", "model"], rows
    )
    page += f"\nThe model: {us(local.hop)} us a hop and {local.bandwidth / 1e9:.2f} GB/s, from two processes.\n"

    page += "\n## Check: seconds of an update\n\n"
    header = ["setting", "ranks", "arithmetic of a rank, predicted", "its CPU time, measured", "measured / predicted",
              "wall, predicted for idle cores", "wall, measured"]  # fmt: skip
    rows = []
    for one in compared(data):
        figures = [f"{one[key]:.3f}" for key in ("arithmetic", "cpu", "predicted", "wall")]
        ratio = f"{one['cpu'] / one['arithmetic']:.2f}"
        rows.append([one["setting"], one["ranks"], *figures[:2], ratio, *figures[2:]])
    page += markdown_table(header, rows)

    for network in networks:
        given = "" if network == "this machine" else " (assumed, not measured)"
        page += f"\n## steps/s on {network}{given}\n\n"
        if given:
            x = networks[network]
            page += (
                f"{us(x.hop)} us a hop and {x.bandwidth / 1e9:.3g} GB/s (assumed), {us(x.call)} us of CPU an operation "
            )
            page += "(measured here, with gloo)" + ("; all_reduce along a tree.\n\n" if x.tree else ".\n\n")
        header = ["script", "use", "pays up to", *(f"{ranks:,}" for ranks in RANKS)]
        rows = []
        for script, cost in costs.items():
            for use in scenarios(default_work(script), 1):
                speeds = speeds_of(cost, script, use, networks[network])
                shown = ["refused" if speed is None else f"{speed:,.0f}" for speed in speeds]
                rows.append([NAMES[script], use, f"{pays_up_to(speeds):,}", *shown])
        page += markdown_table(header, rows)

    page += "\n## Where an update's time goes, weak scaling with larger minibatches, Ethernet (assumed)\n\n"
    rows = []
    for script, cost in costs.items():
        for ranks in (1, 2, 16, 128, 1024):
            work = scenarios(default_work(script), ranks)["weak, larger minibatches"]
            seconds = predict(cost, work, ranks, networks["Ethernet"]) or {}
            total = sum(seconds.values())
            gib = cost.transition_bytes * work.batch_size / 2**30
            rows.append([NAMES[script], f"{ranks:,}", f"{total:.2f}", *(f"{x / total:.0%}" for x in seconds.values()),
                         f"{gib:.2f}"])  # fmt: skip
    page += markdown_table(["script", "ranks", "seconds", *seconds, "batch in every rank, GiB"], rows)
    return page


def speeds_of(costs: Costs, script: str, use: str, network: Network) -> list[float | None]:
    work = default_work(script)
    return [steps_per_second(costs, scenarios(work, ranks)[use], ranks, network) for ranks in RANKS]


def draw(data: dict[str, Any], path: Path) -> None:
    """Predicted steps/s over the number of ranks."""
    import matplotlib.figure

    networks = assumed(data["messages"])
    figure = matplotlib.figure.Figure(figsize=(14, 4.8), layout="constrained")
    axes = figure.subplots(1, len(data["costs"]), squeeze=False)[0]
    for axis, (script, saved) in zip(axes, data["costs"].items(), strict=True):
        for i, use in enumerate(scenarios(default_work(script), 1)):
            for network, style in (("Ethernet", "-"), ("InfiniBand", "--")):
                speeds = [speed or math.nan for speed in speeds_of(costs_from(saved), script, use, networks[network])]
                axis.loglog(RANKS, speeds, style, color=f"C{i}", marker="o", ms=3, lw=1.2,
                            label=use if style == "-" else None)  # fmt: skip
        axis.set(title=f"{NAMES[script]}: predicted", xlabel="ranks, one core each", ylabel="environment steps/s")
        axis.grid(alpha=0.3)
    assumptions = "solid: 10 Gbit/s Ethernet, gloo\ndashed: 200 Gbit/s InfiniBand, nccl"
    axes[-1].legend(fontsize=8, loc="lower right", title=assumptions, title_fontsize=8)
    figure.savefig(path, dpi=100)


# ---- learning curves ------------------------------------------------------------------------------------------------
CURVES = ROOT / "runs" / "distributed_curves"
TOTAL_TIMESTEPS = 100_000
CURVE_FLAGS = ["--env-id", "Hopper-v5", "--total-timesteps", str(TOTAL_TIMESTEPS), "--num-workers", "1",
               "--eval-every", "20000", "--save-every", "0", "--no-hints"]  # fmt: skip


def columns(path: Path) -> dict[str, list[float]]:
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def first_apart(one: Sequence[float], other: Sequence[float], tolerance: float) -> int | None:
    """The number, from 1, of the first update whose figures differ by more than this share of the larger one."""
    differ = [abs(a - b) > tolerance * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True)]
    return differ.index(True) + 1 if any(differ) else None


# name -> (ranks, flags); the third is a control: another order of rounding, but one process
CURVE_RUNS = {"1 rank": (1, []), "2 ranks": (2, []), "1 rank, not compiled": (1, ["--no-compile"])}


def train_curve(name: str, seed: int) -> dict[str, list[float]]:
    """Train, go on with what was stopped, or find what is finished; returns the logged columns."""
    ranks, flags = CURVE_RUNS[name]
    logdir = CURVES / f"seed_{seed}_{name.replace(', ', '_').replace(' ', '_')}"
    begun, progress_csv = (logdir / "latest.pt").exists(), logdir / "progress.csv"
    logged = progress_csv.exists() and progress_csv.stat().st_size > 0  # a run may be stopped before its first row
    steps = columns(progress_csv)["global_step"] if logged else [0]
    if steps[-1] + steps[0] <= TOTAL_TIMESTEPS:  # another batch fits in
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   "ppo_continuous_mujoco.py", *CURVE_FLAGS, *flags, "--seed", str(seed), "--logdir", str(logdir),
                   *["--resume"] * begun]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
    progress, evaluation = columns(logdir / "progress.csv"), columns(logdir / "eval.csv")
    return evaluation | progress  # global_step is that of progress.csv


def compare_curves(seeds: Sequence[int]) -> None:
    """Train what is missing and set the runs of each seed beside each other."""
    info = machine_info(["torch", "numpy", "gymnasium", "mujoco"])
    data: dict[str, Any] = {"machine": info, "flags": CURVE_FLAGS, "seeds": {}}
    rows = []
    for seed in seeds:
        runs = {name: train_curve(name, seed) for name in CURVE_RUNS}
        data["seeds"][seed] = runs
        for name, run in runs.items():
            pair = runs["1 rank"]["rollout/mean_reward"], run["rollout/mean_reward"]
            apart = [first_apart(*pair, tolerance) or "-" for tolerance in (1e-6, 1e-2)]
            rows.append([seed, name, f"{run['eval/mean_return'][-1]:.0f} +- {run['eval/std_return'][-1]:.0f}",
                         f"{np.nanmean(run['rollout/episodic_return'][-10:]):.0f}", *apart])  # fmt: skip
    page = "# Learning curves: one rank beside two\n\n`python -m benchmarks.distributed --curves`: "
    page += f"`ppo_continuous_mujoco.py {' '.join(CURVE_FLAGS)}`, the same seeds. Update: a rollout and what is learnt "
    page += "from it; rewards: the mean of a rollout's, beside those of 1 rank.\n\n"
    header = ["seed", "run", "last evaluation", "return of the last ten rollouts", "first update with rewards apart by "
              "1e-6", "by 1 %"]  # fmt: skip
    page += markdown_table(header, rows) + "\n![episodic returns](distributed_curves.png)\n"
    write_results("distributed_curves", data, page + "\n" + machine_line(info, "Page written"))
    draw_curves(data, RESULTS / "distributed_curves.png")


def draw_curves(data: dict[str, Any], path: Path) -> None:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for i, (seed, runs) in enumerate(data["seeds"].items()):
        for style, (name, run) in zip(("-", "--", ":"), runs.items(), strict=True):
            axis.plot(run["global_step"], run["rollout/episodic_return"], style,
                      color=f"C{i}", lw=1.2, label=f"seed {seed}, {name}")  # fmt: skip
    axis.set(xlabel="environment steps", ylabel="episodic return", title="Hopper-v5, the same seed")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="MuJoCo only, not compiled")
    parser.add_argument("--report", action="store_true", help="only write page and figure anew")
    parser.add_argument("--curves", action="store_true", help="learning curves of one rank beside two")
    parser.add_argument("--rounds", type=at_least_one, default=2, help="rounds of the check")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task, *arguments = options.one
        if task == "messages":
            result: Any = measure_messages(float(arguments[0]))
        else:
            measure_it = {"loop": measure_loop, "costs": measure_costs}[task]
            result = measure_it(arguments[0], json.loads(arguments[1]))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(result))
        return
    if options.curves:
        compare_curves([1, 2, 3])
        return
    folder = QUICK_RESULTS if options.quick else RESULTS
    if options.report:
        data = json.loads((folder / "distributed.json").read_text())
    else:
        data = measure(options.quick, options.rounds)
    page = page_of(data) + f"\n![predicted steps per second](distributed.png)\n\n{data['measured']}"
    write_results("distributed", data, page, folder)
    draw(data, folder / "distributed.png")


def measure(quick: bool, rounds: int) -> dict[str, Any]:
    """Costs, messages and the check, as the JSON file keeps them."""
    info = machine_info(["torch", "numpy", "gymnasium", "mujoco", "numba", "stable-retro"])
    data: dict[str, Any] = {"machine": info, "rows": [], "costs": {}, "loops": [], "messages": [], "checks": {}}
    compiling: dict[str, Any] = {"compile": False} if quick else {}
    for script in list(SCRIPTS)[: 1 if quick else None]:
        measured = in_fresh_process("distributed", "costs", script, json.dumps(compiling))
        data["costs"][script] = measured["costs"]
        data["loops"] += [{"script": script, **loop} for loop in measured["loops"]]
    for ranks in (2,) if quick else (2, 4):
        data["messages"] += with_ranks(ranks, "messages", "0.02" if quick else "0.5")
    data["network"] = asdict(network_of(data["messages"]))
    for name in list(CHECKS)[: 1 if quick else None]:
        found: dict[int, list[Any]] = {}
        speeds = check(name, 2 if quick else rounds, found, **compiling)
        data["rows"] += rows_of(name, speeds, ["1 rank"])
        data["checks"][name] = {str(ranks): runs for ranks, runs in found.items()}
    data["measured"] = machine_line(info)
    return data


if __name__ == "__main__":
    main()
