"""Several seeds of one or more training commands: run what is missing, then report mean, spread and curves.

    python -m benchmarks.seeds --seeds 1 2 3 --parallel 2 -- ppo_continuous_mujoco.py --configs hopper
    python -m benchmarks.seeds --seeds 1 2 3 -- ppo_cage2_parallel.py --gamma 0.99 -- ppo_cage2_parallel.py --gamma 0.9

The first compares seeds, the second also settings: each `--` begins another command. A run's folder is
{folder}/{command}/seed_{n}, with its output in output.txt, so the same command finds its runs again: a finished one is
not repeated, one that was killed goes on with --resume, one that never began begins. Ctrl-C lets the runs save and
waits for them; repeat the command to go on. The report is {folder}/{command}.md, .json and .png.

Scores are the runs' own evaluations: the final one, and the best one (flattered: it is the maximum of noisy numbers).
Intervals are 95 % percentile bootstraps over seeds (scipy.stats.bootstrap); the interquartile mean leaves out the
lowest and the highest quarter of the seeds (scipy.stats.trim_mean), so with fewer than four seeds it is the mean.
"""

import argparse
import csv
import fcntl
import hashlib
import itertools
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, machine_info, machine_line, markdown_table, write_results

FEW_SEEDS = 10  # below this a bootstrap interval is too narrow to be believed
OURS = ("--seed", "--logdir", "--resume")  # flags that this program gives to each run


class UsageError(ValueError):
    """A mistake in what was asked for; the message says, in one sentence, what to change."""


@dataclass
class Run:
    """One seed of one command."""

    command: list[str]
    seed: int
    logdir: Path
    process: Any = None  # subprocess.Popen
    lock: Any = None  # the open file that is locked
    output_start: int = 0  # where in output.txt this process began to write

    def __str__(self) -> str:
        return f"{shlex.join(self.command)} --seed {self.seed}"

    def final_step(self) -> int:
        """The step of the last evaluation: all whole batches that fit into --total-timesteps."""
        args = json.loads((self.logdir / "config.json").read_text())["args"]
        batch_size = args["num_envs"] * args["num_steps"]
        return args["total_timesteps"] // batch_size * batch_size

    def is_finished(self) -> bool:
        """Whether the final evaluation was made, and the checkpoint that follows it was written; or it ended early by
        itself, as CAGE2's --compliance-threshold lets it."""
        marker = self.logdir / "finished"
        if marker.exists() and marker.read_text() == str(self.final_step()):
            return True
        evaluations, latest = self.logdir / "eval.csv", self.logdir / "latest.pt"
        if not evaluations.exists() or not latest.exists() or latest.stat().st_mtime < evaluations.stat().st_mtime:
            return False
        steps = read_csv(evaluations).get("global_step")
        return steps is not None and steps[-1] == self.final_step()

    def start(self) -> str:
        """Start or resume it, in a session of its own: Ctrl-C on the terminal reaches it through us, once.

        It inherits a lock on its folder, so that even a run whose parent was killed is not started twice.
        Raises UsageError if another process holds that lock.
        """
        self.logdir.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.logdir / "lock", "w")  # noqa: SIM115 (held as long as the run goes on)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.logdir} is in use by another process: wait for it, or end it.") from None
        resuming = (self.logdir / "latest.pt").exists()
        flags = [self.command[0], "--resume"] if resuming else [*self.command, "--seed", str(self.seed)]
        with open(self.logdir / "output.txt", "a") as output:
            self.output_start = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, *flags, "--logdir", str(self.logdir)], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[self.lock.fileno()],
            )  # fmt: skip
        return "resumed" if resuming else "started"

    def last_words(self) -> str:
        """The line of its output that says why it failed: the last one, or the first one of tyro's last box."""
        with open(self.logdir / "output.txt") as output:
            output.seek(self.output_start)
            text = output.read().rstrip() or "(no output)"
        if text.endswith("╯"):
            return text.rpartition("╭")[2].splitlines()[1].strip("│ ")
        return text.splitlines()[-1]


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """The columns of a run's log by name; {} if it has no complete row."""
    with open(path) as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return {name: np.array([float(row[name]) for row in rows]) for name in (rows[0] if rows else [])}


def slug(command: list[str]) -> str:
    """A folder name for a command; long ones end in a hash."""
    text = shlex.join(command)
    name = re.sub(r"[^\w.,=-]+", "_", text.replace(".py", "", 1))
    exact = len(name) <= 100 and re.fullmatch(r"[\w.,= -]+", text)
    return name if exact else f"{name[:90].strip('_.')}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def run_all(runs: list[Run], parallel: int) -> int:
    """Bring every run to its end, `parallel` at a time; returns the exit code: 128 + n after signal n.

    A signal is passed on to the runs: on the first one they save and stop, on a second one they stop at once. Raises
    UsageError when a run fails; the others save and stop, for the next ones would most likely fail too.
    """
    signals: list[int] = []  # received and not yet passed on
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup means it
            signal.signal(signum, lambda signum, frame: signals.append(signum))
    waiting, running = [run for run in runs if not run.is_finished()], list[Run]()
    stopped_by = 0
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished.", flush=True)
    try:
        while running or (waiting and not stopped_by):
            while waiting and len(running) < parallel and not stopped_by:
                run = waiting.pop(0)
                started = run.start()
                running.append(run)
                print(f"{started}: {run} (output in {run.logdir / 'output.txt'})", flush=True)
            time.sleep(0.1)
            while signals:
                stopped_by = signals.pop(0)
                for run in running:
                    run.process.send_signal(stopped_by)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                run.lock.close()
                code = run.process.returncode
                if code == 0:
                    (run.logdir / "finished").write_text(str(run.final_step()))
                    print(f"finished: {run}", flush=True)
                elif not stopped_by:
                    raise UsageError(f"{run} ended with exit code {code}: {run.last_words()}")
    except BaseException:
        for run in running:
            run.process.terminate()
        for run in running:
            run.process.wait()
        raise
    return 128 + stopped_by if stopped_by else 0


def interquartile_mean(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean without the lowest and the highest quarter (rounded down) of the scores along `axis`."""
    from scipy import stats

    return stats.trim_mean(scores, 0.25, axis=axis)


def interval(scores: np.ndarray, statistic: Callable[..., Any]) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of a statistic over seeds; None for a single one."""
    from scipy import stats

    if len(scores) < 2:
        return None
    result = stats.bootstrap((scores,), statistic, method="percentile", rng=np.random.default_rng(0))
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def statistics_of(scores: np.ndarray) -> dict[str, Any]:
    """Mean and interquartile mean of scores (num_seeds,), with intervals, and the scores themselves."""
    return {
        "mean": float(scores.mean()),
        "mean_interval": interval(scores, np.mean),
        "interquartile_mean": float(interquartile_mean(scores)),
        "interquartile_mean_interval": interval(scores, interquartile_mean),
        "scores": scores.tolist(),
    }


def curve_of(run: Run, metric: str) -> dict[str, np.ndarray]:
    """Steps, minutes of training and scores of a run's evaluations. Raises UsageError if it has no such metric."""
    evaluations, timing = read_csv(run.logdir / "eval.csv"), read_csv(run.logdir / "timing.csv")
    if metric not in evaluations:
        known = ", ".join(name for name in evaluations if name != "global_step")
        raise UsageError(f"{run.logdir / 'eval.csv'} has no column {metric}; choose --metric from {known}.")
    steps = evaluations["global_step"]
    minutes = np.interp(steps, timing["global_step"], timing["time/seconds"]) / 60
    return {"steps": steps, "minutes": minutes, "scores": evaluations[metric]}


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def with_interval(statistics: dict[str, Any], name: str) -> str:
    bounds = statistics[f"{name}_interval"]
    return number(statistics[name]) + (f" ({number(bounds[0])} to {number(bounds[1])})" if bounds else "")


def require_equal_settings(runs: list[Run]) -> None:
    """Raise UsageError if seeds of one command were trained with different arguments, as after a change of presets."""
    first: dict[str, tuple[Run, dict[str, Any]]] = {}
    for run in runs:
        args = json.loads((run.logdir / "config.json").read_text())["args"]
        other, expected = first.setdefault(shlex.join(run.command), (run, args))
        for name in args.keys() & expected.keys() - {"seed", "logdir", "resume"}:
            if args[name] != expected[name]:
                raise UsageError(
                    f"{other.logdir} was trained with {name} {expected[name]}, {run.logdir} with {args[name]}: delete "
                    "the one that is no longer wanted."
                )


def report(runs: list[Run], metric: str, folder: Path, name: str) -> None:
    """Write name.json, name.md and name.png on the finished runs. Raises UsageError if there is none, or if seeds of
    one command differ in more than the seed."""
    by_command: dict[str, list[tuple[int, dict[str, np.ndarray]]]] = {}
    finished = [run for run in runs if run.is_finished()]
    require_equal_settings(finished)
    for run in finished:
        by_command.setdefault(shlex.join(run.command), []).append((run.seed, curve_of(run, metric)))
    if not by_command:
        raise UsageError("No run is finished yet, so there is nothing to report.")
    commands, rows = {}, []
    for command, curves in by_command.items():
        final = statistics_of(np.array([curve["scores"][-1] for _, curve in curves]))
        best = statistics_of(np.array([curve["scores"].max() for _, curve in curves]))
        seeds = [seed for seed, _ in curves]
        listed = {key: [curve[key].tolist() for _, curve in curves] for key in ("steps", "minutes", "scores")}
        commands[command] = {"seeds": seeds, "final": final, "best": best, "curves": listed}
        for which, statistics in (("final", final), ("best", best)):
            each = ", ".join(number(score) for score in statistics["scores"])
            cells = [with_interval(statistics, "mean"), with_interval(statistics, "interquartile_mean"), each]
            rows.append([f"`{command}`" if which == "final" else "", which, *cells])
    info = machine_info(["torch", "gymnasium", "numpy", "scipy"])
    page = f"# {metric} over seeds\n\n" + markdown_table(
        ["command", "evaluation", "mean (95 %)", "interquartile mean (95 %)", "each seed"], rows
    )
    page += "\nSeeds: " + "; ".join(f"{', '.join(map(str, entry['seeds']))}" for entry in commands.values()) + ". "
    fewest = min(len(entry["seeds"]) for entry in commands.values())
    if fewest < FEW_SEEDS:
        seeds_are = "1 seed is" if fewest == 1 else f"{fewest} seeds are"
        page += f"**{seeds_are} few: intervals over fewer than {FEW_SEEDS} are too narrow; look at each seed.** "
    page += f"The best evaluation of a run is the maximum of its curve.\n\n![curves]({name}.png)\n\n"
    write_results(
        name,
        {"machine": info, "metric": metric, "commands": commands},
        page + machine_line(info, "Page written"),
        folder,
    )
    draw(by_command, metric, folder / f"{name}.png")
    print(f"{folder / name}.md, .json, .png")


def draw(by_command: dict[str, list[tuple[int, dict[str, np.ndarray]]]], metric: str, path: Path) -> None:
    """Draw every seed's curve thin and, where all were evaluated at the same steps, the interquartile mean thick, over
    steps and over minutes of training."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(12, 4.5), layout="constrained")
    for axis, key in zip(figure.subplots(1, 2, sharey=True), ("steps", "minutes"), strict=True):
        for index, (command, curves) in enumerate(by_command.items()):
            colour = f"C{index % 10}"
            together = all(np.array_equal(curve["steps"], curves[0][1]["steps"]) for _, curve in curves)
            name = f"{command} ({len(curves)} seeds)"
            for i, (_, curve) in enumerate(curves):
                label = None if together or i else name
                axis.plot(curve[key], curve["scores"], color=colour, lw=0.8, alpha=0.5, label=label)
            if together:
                middle = interquartile_mean(np.array([curve["scores"] for _, curve in curves]), axis=0)
                when = np.mean([curve[key] for _, curve in curves], axis=0)
                axis.plot(when, middle, color=colour, lw=2.2, label=name)
        axis.set(xlabel="environment steps" if key == "steps" else "minutes of training", ylabel=metric)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=100)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[list[str]]]:
    """Options before the first `--`, and the commands after each `--`. Raises UsageError for what cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--metric", default="eval/mean_return", help="column of eval.csv to report")
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"), help="where runs and reports go")
    parser.add_argument("--report", action="store_true", help="run nothing, report what is finished")
    parser.add_argument("--quick", action="store_true", help="two seeds of a run of seconds, to see it work")
    stops = [i for i, word in enumerate(argv) if word == "--"] + [len(argv)]
    options = parser.parse_args(argv[: stops[0]])
    commands = [argv[start + 1 : stop] for start, stop in itertools.pairwise(stops)]
    if options.quick:
        options.seeds, options.folder = [1, 2], ROOT / "runs" / "bench" / "seeds"
        commands = [["ppo_continuous_mujoco.py", "--configs", "debug", "--env-id", "InvertedPendulum-v5"]]
        if not options.report:  # else the second time would show nothing
            shutil.rmtree(options.folder, ignore_errors=True)
    if not commands or not all(commands):
        raise UsageError("Name a command after --, as in: --seeds 1 2 3 -- ppo_continuous_mujoco.py --configs hopper.")
    for command in commands:
        if not Path(command[0]).is_file():
            raise UsageError(f"There is no script {command[0]} here.")
        taken = [word for word in command if word.partition("=")[0] in OURS]
        if taken:
            raise UsageError(f"{taken[0]} is given to each run by this program; leave it out of the command.")
    if options.parallel < 1:
        raise UsageError(f"--parallel must be at least 1, not {options.parallel}.")
    if min(options.seeds) < 0 or len(set(options.seeds)) < len(options.seeds):
        raise UsageError(f"--seeds must be different numbers of at least 0, not {options.seeds}.")
    if len({slug(command) for command in commands}) < len(commands):
        raise UsageError("Two of the commands are the same.")
    return options, commands


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code: 0, 2 for a mistake or a run that failed, 128 + n after signal n."""
    try:
        options, commands = parse(argv)
        runs = [
            Run(command, seed, options.folder / slug(command) / f"seed_{seed}")
            for seed in options.seeds
            for command in commands
        ]
        code = 0 if options.report else run_all(runs, options.parallel)
        if code:
            print("stopped; repeat the command to go on", file=sys.stderr)
            return code
        name = slug(commands[0]) + (f"_and_{len(commands) - 1}_more" if len(commands) > 1 else "")
        report(runs, options.metric, options.folder, name)
        return 0
    except (UsageError, OSError) as error:  # a folder that cannot be written
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
