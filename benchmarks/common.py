"""What every benchmark needs: facts of the machine, fair rounds, a way to train and to measure, pages under results/.

There is one way to time: `interleave` measures candidates in turns, one figure a round. There is one way to run a peer:
`in_fresh_process` calls one function of `benchmarks.peers`. There is one way to train with a script of ours: `train`
runs its command line and returns what progress.csv logged. There is one form of page: `write_results`, and for speeds
`publish`, which keeps the groups that a run did not measure.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from envs.nes_core import library_path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
QUICK_RESULTS = ROOT / "runs" / "bench"  # of --quick: too few rounds to be shown, enough to see that all works
CORES = len(os.sched_getaffinity(0))
PACKAGES = ("torch", "gymnasium", "mujoco", "numpy", "numba", "nes-py", "stable-retro", "stable-baselines3", "envpool")


# ---- the machine ----------------------------------------------------------------------------------------------------
def machine_info() -> dict[str, Any]:
    """What a reader needs to judge a measurement: CPU, cores, memory, versions, commit, date and load."""

    def version(name: str) -> str | None:
        try:
            own_build = name == "nes-py" and compiled_by_make_nes_py()
            return metadata.version(name) + (" as `make nes_py` compiles it" if own_build else "")
        except metadata.PackageNotFoundError:
            return None

    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": cpu_model(),
        "cores": CORES,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "commit": commit_of(ROOT),
    }


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, with a + if code or requirements have changes that are not in it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "requirements.txt")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changes)


def compiled_by_make_nes_py() -> bool:
    """Whether the installed nes-py was built by the Makefile: GCC leaves one of its unusual switches in the library."""
    library = library_path("nes_py")
    return library is not None and b"-fno-semantic-interposition" in library.read_bytes()


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def processor() -> str:
    """What this process may use: its cores and their model."""
    return f"{CORES} cores of {cpu_model()}"


def machine_line(info: dict[str, Any]) -> str:
    """`machine_info` as one sentence for the foot of a page; notes the load afterwards in it, once."""
    after = info.setdefault("load_average_after", round(os.getloadavg()[0], 2))
    versions = ", ".join(f"{name} {version}" for name, version in info["packages"].items() if version)
    return (
        f"{info['date']}, commit {info['commit']}, {info['cores']} cores of {info['cpu']}, {info['memory_gib']} GiB, "
        f"Python {info['python']}, {versions}; load average {info['load_average']} before, {after} after.\n"
    )


# ---- the command line -----------------------------------------------------------------------------------------------
def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the module's docstring as help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


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


def installed(package: str) -> bool:
    """Whether a peer can be imported; says so if not."""
    if find_spec(package) is None:
        print(f"{package} is not installed: left out")
        return False
    return True


# ---- measuring ------------------------------------------------------------------------------------------------------
def interleave(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure the candidates in turn, `rounds` times over, so that a busy moment of the machine hits all.

    Each candidate measures once and returns its figure (steps per second, say); it is built and warm already. Every
    round begins with the next candidate, so that none always comes first. Returns name -> the figures of the rounds;
    those of one round belong together (see `median_ratio`).
    """
    figures: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            figures[name].append(candidates[name]())
    return figures


def in_fresh_process(function: Callable[..., Any], **arguments: Any) -> Any:
    """`function(**arguments)` in a new process. What it raises comes back with the traceback of that process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, **arguments).result()


def train(script: str, flags: Sequence[str], checkout: Path = ROOT, anew: bool = False) -> dict[str, np.ndarray]:
    """Train in a folder that goes away afterwards, with nothing compiled before if `anew`; returns the columns of its
    progress.csv. It evaluates one episode, at the end. Raises RuntimeError if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *flags, "--logdir", f"{folder}/run",
                   "--eval-every", "0", "--eval-episodes", "1", "--save-every", "0"]  # fmt: skip
        environment = os.environ | ({"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"} if anew else {})
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        old_form = Path(folder, "run", "timing.csv")  # until 24 November 2026
        return read_csv(old_form if old_form.exists() else Path(folder, "run", "progress.csv"))


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """The columns of a log, (rows,) each; {} if it has no complete row."""
    with open(path) as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return {name: np.array([float(row[name]) for row in rows]) for name in (rows[0] if rows else [])}


def median_ratio(figures: Sequence[float], reference: Sequence[float]) -> float:
    """The median over rounds of figure / reference: pairs of one round saw the same machine."""
    return statistics.median(a / b for a, b in zip(figures, reference, strict=True))


# ---- pages ----------------------------------------------------------------------------------------------------------
def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; cells are shown as `str` shows them."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def write_results(name: str, data: dict[str, Any], markdown: str, quick: bool) -> Path:
    """Write name.json and name.md into results/, or of a quick trial into runs/bench/, print the latter; returns the
    folder."""
    folder = QUICK_RESULTS if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown)
    print(markdown)
    return folder


def stored(name: str, quick: bool) -> dict[str, Any]:
    """What `write_results` wrote under this name before, or {}."""
    path = (QUICK_RESULTS if quick else RESULTS) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def publish(
    name: str, title: str, group: str, figures: dict[str, list[float]], references: Sequence[str],
    info: dict[str, Any], quick: bool, note: str = "",
) -> None:  # fmt: skip
    """Put the speeds of a group, which took turns, into results/name.json, and write the page of all its groups.

    Args:
        title: first line of the page.
        figures: what `interleave` returned, environment steps per second.
        references: candidates of the group that the others are shown in proportion to.
        info: `machine_info` of before the measurement.
        note: a sentence below the group's table.
    """
    groups = stored(name, quick).get("groups", {})
    groups[group] = {"machine": info, "references": list(references), "note": note, "rounds": figures}
    groups[group]["command"] = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    page = f"# {title}\n\nEnvironment steps per second, medians of rounds in which the candidates took turns; ratios "
    page += "are medians of the rounds' ratios.\n"
    for heading, one in groups.items():
        rounds, shown = one["rounds"], [reference for reference in one["references"] if reference in one["rounds"]]
        rows = [
            [candidate, f"{statistics.median(values):,.0f}", f"{min(values):,.0f} - {max(values):,.0f}",
             *(f"{median_ratio(values, rounds[reference]):.2f}" for reference in shown)]
            for candidate, values in rounds.items()
        ]  # fmt: skip
        header = ["", "steps/s", "min - max", *(f"x {reference}" for reference in shown)]
        line = machine_line(one["machine"])
        page += f"\n## {heading}\n\n{markdown_table(header, rows)}\n{one['note']}{' ' * bool(one['note'])}"
        page += f"{len(next(iter(rounds.values())))} rounds, `{one['command']}`. {line}"
    write_results(name, {"groups": groups}, page, quick)
