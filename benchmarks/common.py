"""What every benchmark needs: machine facts, fair interleaved rounds, results as JSON and Markdown.

A benchmark's JSON holds "machine" (see `machine_info`) and, where it compares speeds, "rows" (see `rows_of`), which
`benchmarks.compare` reads; what else it holds is its own affair.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from envs.nes_core import library_path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
CORES = len(os.sched_getaffinity(0))
QUICK_RESULTS = ROOT / "runs" / "bench"  # of --quick: too few rounds to be shown, enough to see that all works


def machine_info(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a reader needs to judge a measurement: CPU, cores, memory, versions, commit, date and load.

    Args:
        packages: distribution names whose versions matter here; one that is not installed is listed as None.
    """

    def version(name: str) -> str | None:
        try:
            own_build = name == "nes-py" and compiled_by_make_nes_py()
            return metadata.version(name) + (" as `make nes_py` compiles it" if own_build else "")
        except metadata.PackageNotFoundError:
            return None

    def git(*arguments: str) -> str:
        if shutil.which("git") is None:
            return ""
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": cpu_model(),
        "cores": CORES,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "commit": git("rev-parse", "--short", "HEAD") or None,
        # of what was measured: results are written as they come
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no", "--", ":(exclude)results")),
    }


def compiled_by_make_nes_py() -> bool:
    """Whether the installed nes-py was built by the Makefile: GCC leaves one of its unusual switches in the library."""
    library = library_path("nes_py")
    return library is not None and b"-fno-semantic-interposition" in library.read_bytes()


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def at_least_one(text: str) -> int:
    """A whole number of at least 1, as argparse's `type`."""
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")


def positive_seconds(text: str) -> float:
    """A length of time, as argparse's `type`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 < seconds < math.inf:
        return seconds
    raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text}")


def interleave(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure the candidates in turn, `rounds` times over, so that a busy moment of the machine hits all.

    Args:
        candidates: name -> function that measures once and returns the figure (steps per second, say). Build
            and warm up what is measured before, not inside.
        rounds: how often. Each round begins with the next candidate, so that none always comes first.

    Returns:
        name -> the `rounds` figures, in order; figures of one round belong together (see `median_ratio`).
    """
    figures: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for round_index in range(rounds):
        shift = round_index % len(names)
        for name in names[shift:] + names[:shift]:
            figures[name].append(candidates[name]())
    return figures


def in_fresh_process(benchmark: str, *arguments: object) -> dict[str, Any]:
    """Run `python -m benchmarks.{benchmark} --one ...arguments` and return what its last line says, as JSON.

    Raises RuntimeError with the end of its standard error if it fails.
    """
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--one", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def train_to_the_end(script: Any, args: Any) -> dict[str, Any]:
    """`script.train(args)`. It ends cleanly at a signal, which was meant for all of this program: so does that."""
    result: dict[str, Any] = script.train(args)
    if result["signal"]:
        sys.exit(128 + result["signal"])
    return result


def rows_of(group: str, figures: dict[str, list[float]], peers: Collection[str]) -> list[dict[str, Any]]:
    """Return the rows that `benchmarks.compare` reads: one for each candidate, with the figures of all rounds.

    Args:
        group: what was measured; only candidates of one group, which took turns, are set in proportion.
        figures: what `interleave` returned; more must be better.
        peers: those of the candidates that are not ours: the measure that ours are held against.
    """
    return [{"group": group, "name": name, "peer": name in peers, "rounds": rounds} for name, rounds in figures.items()]


def summary(figures: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of one candidate's figures, and how many there are."""
    return {
        "median": statistics.median(figures),
        "min": min(figures),
        "max": max(figures),
        "rounds": len(figures),
    }


def median_ratio(figures: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median over rounds of figure / reference: pairs of one round saw the same machine."""
    return statistics.median(a / b for a, b in zip(figures, reference, strict=True))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; cells are shown as `str` shows them."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def machine_line(info: dict[str, Any], verb: str = "Measured") -> str:
    """Return `machine_info` as one sentence for the foot of a Markdown page, and note the load afterwards in it, once.

    Args:
        verb: "Page written" for a page of what was measured earlier, about whose load this one says nothing.
    """
    info.setdefault("load_average_after", [round(load, 2) for load in os.getloadavg()])
    versions = ", ".join(f"{name} {version}" for name, version in info["packages"].items() if version)
    changes = " with uncommitted changes" if info["uncommitted_changes"] else ""
    load = f"; load average {info['load_average'][0]} before, {info['load_average_after'][0]} after"
    return (
        f"{verb} {info['date']} at commit {info['commit']}{changes} on {info['cores']} cores of {info['cpu']}, "
        f"{info['memory_gib']} GiB, Python {info['python']}, {versions}{load if verb == 'Measured' else ''}.\n"
    )


def write_results(name: str, data: dict[str, Any], markdown: str, folder: Path = RESULTS) -> None:
    """Write `data` to `folder/name.json` and `markdown` to `folder/name.md`, and print the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown)
    print(markdown)
