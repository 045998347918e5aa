"""What the scripts learn: several seeds of each setting, judged on episodes that no run has seen.

    python -m benchmarks.learning mujoco                        # eleven tasks, 1 M steps, seeds 11 to 15
    python -m benchmarks.learning mujoco --only Hopper --steps 3000000 --seeds 11 12 13 --parallel 2
    python -m benchmarks.learning mujoco --only HalfCheetah --also wide SB3 cleanrl  # beside the peers, hours
    python -m benchmarks.learning mario                         # World 1-1; --only 4-1 for another stage
    python -m benchmarks.learning cage2                         # leaderboard rules and HEAD
    python -m benchmarks.learning continuing                    # a task without an end, nine objectives
    python -m benchmarks.learning --quick                       # the first setting of each, seconds of training
    python -m benchmarks.learning --name lr -- ppo_x.py --learning-rate 1e-4 -- ppo_x.py --learning-rate 3e-4

Each `--` begins a command of your own; the others are named here. Each seed of each setting is a run with a folder of
its own, runs/learning/{name}_learning/{setting}/seed_{n}. The same command finds its runs again: a finished one is
skipped, one that was cut goes on with --resume (SB3's begins anew), and a folder that holds a run of another command is
refused. Ctrl-C lets the runs save, and waits for them; --report writes the page of what is finished. Where a run has
ended, its last policy and the best one (chosen by the run's own evaluations) play 100 fresh episodes each, with
deterministic actions; Mario also with sampled ones, CAGE2 1,000 against each red agent.

results/{name}_learning.json keeps curves, scores and commit of every run, so run folders may be deleted: a report adds
the finished runs to it, and drops those of a setting whose command is another one today. Intervals are 95 % percentile
bootstraps over seeds. Few seeds are a trap: of two or three the interval is merely the range, and the interquartile
mean of fewer than four leaves nothing out. Presets were chosen on seeds from 101 up; seeds 11 to 15 are for reporting.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    ROOT,
    at_least_one,
    commit_of,
    installed,
    machine_info,
    machine_line,
    markdown_table,
    parser_of,
    processor,
    read_csv,
    stored,
    write_results,
)
from benchmarks.curves import draw, read_curve
from envs.mario import STAGES

FOLDER = ROOT / "runs" / "learning"
FIRST_SEED = 1_000_000  # of the episodes that judge
OURS = ("--seed", "--logdir", "--resume")  # flags that this program gives to each run


# ---- what is run ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Suite:
    """Settings by name, "panel, line" of the figure, and how they are reported."""

    settings: dict[str, str]  # name -> command
    metric: str = "eval/mean_return"  # column of the curves
    scores: tuple[str, ...] = ()  # what the page shows of what `scores_of` returns; (): all of it
    references: dict[str, str] | None = None  # name or "name, score" -> what others reached
    means: tuple[str, ...] = ()  # logged columns, averaged over the last tenth of a run
    smooth: float = 0  # steps that a point of the curves averages
    episodes: int = 100
    also: tuple[str, ...] = ()  # lines that run only if asked for
    default: str = ""  # what --only is if not given; "": all
    note: str = ""


MUJOCO = {  # task: preset, best published return at 1 M steps known to us, SB3's Zoo's own; both of older task versions
    "HalfCheetah-v5": ("halfcheetah", "5,819 (SB3 Zoo)"),
    "Ant-v5": ("ant", "3,258 (Tianshou); SB3 Zoo 1,327"),
    "Hopper-v5": ("hopper", "3,353 (NJUWCY, best five points); SB3 Zoo 2,410"),
    "Walker2d-v5": ("walker", "4,273 (NJUWCY, best five points); SB3 Zoo 3,479"),
    "Humanoid-v5": ("humanoid", "2,130 (NJUWCY, best five points)"),
    "HumanoidStandup-v5": ("humanoid --gae-lambda 0.95 --learning-rate 3e-4", ""),
    "Swimmer-v5": ("swimmer", "282 (SB3 Zoo)"),
    "Reacher-v5": ("walker --gamma 0.9", "-4.1 (Tianshou)"),
    "Pusher-v5": ("walker --norm-adv minibatch", ""),
    "InvertedPendulum-v5": ("walker --norm-adv minibatch", "1,000 (Tianshou)"),
    "InvertedDoublePendulum-v5": ("walker --update-epochs 5 --ent-coef 0.001", "9,231 (Tianshou)"),
}
WIDE = "--hidden-sizes 256 256 --learning-rate 2e-4"
CELLS = tuple(f"{red}_{horizon}" for horizon in (30, 50, 100) for red in ("b_line", "meander", "sleep"))
WINNER = (-3.47, -5.64, 0, -6.41, -8.69, 0, -13.76, -16.6, 0)
SECOND = (-3.48, -6.47, 0, -5.85, -10.33, 0, -11.39, -19.38, 0)
DISCOUNTED = "--average-reward-rate None --gamma"
MARIO = dict.fromkeys(STAGES, "") | {
    "1-1": "--total-timesteps 1000000",
    "1-1,1-4,3-2,4-1": "--total-timesteps 3000000",
    "1-1,1-3,1-4,3-2,4-1": "--total-timesteps 3500000",
}  # stage or stages of one network -> length
QUEUES = "ppo_continuous_mujoco.py --configs queue --env-id ThreeQueue-v0 --total-timesteps 204800"
SUITES: dict[str, Suite] = {
    "mujoco": Suite(
        {name: command for task, (preset, _) in MUJOCO.items() for name, command in {
            f"{task}, ours": f"ppo_continuous_mujoco.py --configs {preset} --env-id {task}",
            f"{task}, wide": f"ppo_continuous_mujoco.py --configs {preset} {WIDE} --env-id {task}",
            f"{task}, SB3": f"benchmarks/sb3_zoo.py --env-id {task}",
            f"{task}, cleanrl": f"ppo_continuous_mujoco.py --configs cleanrl --env-id {task}"}.items()},
        scores=("return",), also=("wide", "SB3", "cleanrl"),
        references={f"{task}, ours": published for task, (_, published) in MUJOCO.items()},
        note="References are of older task versions and other protocols: a guide. SB3 has the parameters that its Zoo "
        "tuned (`benchmarks/sb3_zoo.py`), cleanrl the settings of CleanRL's script in ours; wide has layers of 256."),
    "mario": Suite(
        {f"Mario-{stage}, {line}": f"ppo_atari_mario.py --env-id Mario-{stage} {flags} {length}".rstrip()
         for stage, length in MARIO.items() for line, flags in (
            ("fceumm", "--backend fceumm"), ("landed", "--backend fceumm --reward landed"),
            ("nes_py", "--backend nes_py"))},
        metric="rollout/success_rate", scores=("flag, deterministic", "flag, sampled", "return"), smooth=20_000,
        also=("nes_py", "landed"), default="Mario-1-1",
        note="Share of episodes that reach the flag, with random waiting before the start and sticky actions; the "
        "curve is of the training's episodes."),
    "cage2": Suite(
        {"CAGE2, leaderboard": "ppo_cage2_parallel.py --configs explore",
         "CAGE2, head": "ppo_cage2_parallel.py --configs head"},
        metric="eval/score", scores=("score", *CELLS), episodes=1000,
        references={"CAGE2, leaderboard": "-54.57 (the winner), -56.9 (the second)",
                    "CAGE2, head": "-86.90 (the winner's weights, trained on leaderboard rules)"}
        | {f"CAGE2, leaderboard, {cell}": f"{a}, {b}" for cell, a, b in zip(CELLS, WINNER, SECOND, strict=True)},
        note="Mean return over 1,000 episodes a red agent, no Green; the score is the sum of the cells. Blue is not "
        "told which red agent it faces."),
    "continuing": Suite(
        {"ThreeQueue, average reward": QUEUES,
         "ThreeQueue, average reward, gradients not clipped": f"{QUEUES} --max-grad-norm None",
         "ThreeQueue, average reward, the critic ten times as fast": f"{QUEUES} --critic-learning-rate 0.003",
         "ThreeQueue, average reward, reward / spread of returns": f"{QUEUES} --norm-reward",
         "ThreeQueue, average reward, reward / step in the episode": f"{QUEUES} --time-scaled-reward",
         "ThreeQueue, discount 0.99": f"{QUEUES} {DISCOUNTED} 0.99",
         "ThreeQueue, discount 0.99, reward / spread of returns": f"{QUEUES} {DISCOUNTED} 0.99 --norm-reward",
         "ThreeQueue, discount 0.9": f"{QUEUES} {DISCOUNTED} 0.9",
         "ThreeQueue, discount 0.9, reward / spread of returns": f"{QUEUES} {DISCOUNTED} 0.9 --norm-reward"},
        metric="rollout/LTA_return", scores=("LTA",), smooth=10_000,
        means=("rollout/LTA_return", "train/explained_variance", "train/value_loss"),
        note="LTA: long-term average of the raw reward, minus the mean backlog, in episodes of 512 steps; emptying a "
        "queue before turning to the longest has -3.5, the longest queue first -43 (it is unstable), actions at random "
        "-108. Value losses have the unit of each variant's own reward, squared: do not compare them."),
}  # fmt: skip
QUICK = {  # added to the first setting's command
    "mujoco": "--configs debug",
    "mario": "--configs debug --env-id Mario-1-1",
    "cage2": "--configs debug",
    "continuing": "--no-compile --total-timesteps 4096",
}


# ---- judging --------------------------------------------------------------------------------------------------------
def judge(script: str, logdir: str, episodes: int) -> None:
    """Write final.json: {"last": {score: value}, "best": ...} of the run's two checkpoints on fresh episodes."""
    latest, best = (Path(logdir, f"{name}.pt").read_bytes() for name in ("latest", "best"))
    finals = {"last": scores_of(script, logdir, "latest", episodes)}
    finals["best"] = finals["last"] if best == latest else scores_of(script, logdir, "best", episodes)
    text = json.dumps({"cpu": processor(), "episodes": episodes, **finals})
    (Path(logdir) / "final.tmp").write_text(text)
    os.replace(Path(logdir) / "final.tmp", Path(logdir) / "final.json")


def scores_of(script: str, logdir: str, checkpoint: str, episodes: int) -> dict[str, float]:
    """What a policy gets: "return" and "LTA" (return / length), of Mario also "flag, deterministic" and "flag, sampled"
    with those of each stage if there are several; of CAGE2 "score" and cells."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    saved = module.load(Path(logdir) / f"{checkpoint}.pt")
    if hasattr(module, "score"):
        args = replace(module.Args(**{**saved["args"], "resume": False}), device="cpu")
        result = module.score(module.load_agent(saved, args), args, episodes, seed=FIRST_SEED)
        return {key: value for key, value in result.items() if key in ("score", *CELLS)}
    scores: dict[str, float] = {}
    env_id = saved["args"]["env_id"]
    stages = [f"Mario-{stage}" for stage in env_id.removeprefix("Mario-").split(",")] if "Mario" in env_id else [None]
    for mode in ("deterministic", "sampled") if stages[0] else ("deterministic",):
        text = ""
        for stage in stages:
            options = module.PlayArgs(logdir=logdir, checkpoint=checkpoint, episodes=episodes, seed=FIRST_SEED,
                                      stochastic=mode == "sampled", **({"env_id": stage} if stage else {}))  # fmt: skip
            with contextlib.redirect_stdout(io.StringIO()) as output:
                module.play(options)
            text += output.getvalue()
            if stage and len(stages) > 1:
                scores[f"flag, {mode}, {stage}"] = output.getvalue().count("flag reached") / episodes
        played = np.array(re.findall(r"return (\S+), (\d+) steps", text), dtype=float)
        if stages[0]:
            scores[f"flag, {mode}"] = text.count("flag reached") / len(played)
        if mode == "deterministic":
            scores |= {"return": played[:, 0].mean(), "LTA": played[:, 0].sum() / played[:, 1].sum()}
    return scores


# ---- running --------------------------------------------------------------------------------------------------------
@dataclass
class Run:
    """One seed of one setting."""

    setting: str
    command: str
    seed: int
    logdir: Path
    episodes: int = 100
    process: Any = None  # subprocess.Popen

    def launches(self) -> dict[str, Any]:
        """The command of the run in this folder, and the commits at which it was started. Raises RunFailed if it is
        another command than ours."""
        path = self.logdir / "launches.json"
        launches = json.loads(path.read_text()) if path.exists() else {"command": self.command, "commits": []}
        if launches["command"] != self.command:
            raise RunFailed(f"{self.logdir} holds a run of another command, {launches['command']}: delete it.")
        return launches

    def is_finished(self) -> bool:
        self.launches()
        return (self.logdir / "final.json").exists()

    def is_trained(self) -> bool:
        return (self.logdir / "trained").exists()

    def words(self) -> list[str]:
        """What is to be done next: train, go on training, or judge."""
        words = shlex.split(self.command)
        if self.is_trained():
            call = f"judge({words[0]!r}, {str(self.logdir)!r}, {self.episodes})"
            return ["-c", f"from benchmarks.learning import judge; {call}", *words[1:]]  # trusted: --env-id
        if (self.logdir / "latest.pt").exists():
            return [*words, "--resume", "--logdir", str(self.logdir)]
        return [*words, "--seed", str(self.seed), "--logdir", str(self.logdir)]

    def start(self) -> None:
        """In a session of its own: Ctrl-C on the terminal reaches it through us, once."""
        self.logdir.mkdir(parents=True, exist_ok=True)
        launches = self.launches()
        if not self.is_trained():  # what judges is no part of the run
            launches["commits"] = list(dict.fromkeys([*launches["commits"], commit_of(ROOT)]))
        (self.logdir / "launches.json").write_text(json.dumps(launches))
        words = self.words()
        print(f"{time.strftime('%H:%M:%S')} {self.setting}, seed {self.seed}: {shlex.join(words)[:150]}", flush=True)
        with open(self.logdir / "output.txt", "a") as output:
            self.process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output,
                                            stderr=subprocess.STDOUT, start_new_session=True,
                                            env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip


class RunFailed(Exception):
    """A run that ended by itself with an error, or is not ours; the message says which and why."""


def run_all(runs: list[Run], parallel: int) -> int:
    """Bring every run to its end, `parallel` at a time; returns 0, or 128 + n after signal n, which is passed on to
    the runs: they save and stop. Raises RunFailed when one fails; the others are stopped too."""
    signals: list[int] = []
    handlers = {number: signal.signal(number, lambda number, frame: signals.append(number))
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}  # fmt: skip
    waiting, running = [run for run in runs if not run.is_finished()], list[Run]()
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished.", flush=True)
    passed_on = 0
    try:
        while running or (waiting and not signals):
            while waiting and len(running) < parallel and not signals:
                run = waiting.pop(0)
                run.start()
                running.append(run)
            time.sleep(0.05)
            for number in signals[passed_on:]:
                passed_on += 1
                for run in running:
                    run.process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                if run.process.returncode == 0:
                    (run.logdir / "trained").touch()
                    if not run.is_finished():
                        waiting.insert(0, run)
                elif not signals:
                    last_line = (run.logdir / "output.txt").read_text().rstrip().rpartition("\n")[2]
                    raise RunFailed(f"{run.setting}, seed {run.seed}, ended with exit code {run.process.returncode}: "
                                    f"{last_line}")  # fmt: skip
    finally:
        for run in running:
            run.process.terminate()
        for run in running:
            run.process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 128 + signals[0] if signals else 0


# ---- statistics -----------------------------------------------------------------------------------------------------
def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis without the lowest and the highest quarter (rounded down) of it."""
    values = np.sort(values, axis=-1)
    cut = values.shape[-1] // 4
    return values[..., cut : values.shape[-1] - cut].mean(-1)


def interval(values: np.ndarray, num: int = 10_000) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of the interquartile mean over seeds; None for a single one."""
    if len(values) < 2:
        return None
    resampled = values[np.random.default_rng(0).integers(len(values), size=(num, len(values)))]
    low, high = np.percentile(interquartile_mean(resampled), [2.5, 97.5])
    return float(low), float(high)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def cells_of(values: np.ndarray) -> list[str]:
    """A row's cells: each seed, mean and standard deviation, interquartile mean and interval."""
    deviation = f" ± {number(values.std(ddof=1))}" if len(values) > 1 else ""
    bounds = interval(values)
    middle = number(float(interquartile_mean(values))) + (
        f" ({number(bounds[0])} to {number(bounds[1])})" if bounds else ""
    )
    return [", ".join(map(number, values)), number(values.mean()) + deviation, middle]


# ---- reporting ------------------------------------------------------------------------------------------------------
def read_run(run: Run, suite: Suite) -> dict[str, Any]:
    """What the results keep of a finished run."""
    curve = read_curve(run.logdir, suite.metric, suite.smooth)
    progress = read_csv(run.logdir / "progress.csv")
    tenth = -max(1, len(progress["global_step"]) // 10)
    config = json.loads((run.logdir / "config.json").read_text())
    return {
        **json.loads((run.logdir / "final.json").read_text()),
        "commit": ", ".join(run.launches()["commits"]) or config["commit"][:7],
        "versions": config.get("versions", {}),
        "minutes": float(curve["minutes"][-1]) if len(curve["minutes"]) else 0.0,
        "means": {name: float(np.nanmean(progress[name][tenth:])) for name in suite.means},
        "curve": {key: [float(f"{value:.6g}") for value in column] for key, column in curve.items()},
    }


def report(name: str, suite: Suite, runs: list[Run], quick: bool, by_hand: str = "") -> None:
    """Write the page, the JSON and the figures of all stored runs, the finished ones of `runs` among them."""
    before = stored(name, quick)
    groups: dict[str, Any] = before.get("settings", {})
    if groups and before["metric"] != suite.metric:
        sys.exit(f"error: results/{name}.json holds curves of {before['metric']}: give another --name.")
    for run in runs:
        if run.is_finished():
            group = groups.setdefault(run.setting, {"command": run.command, "seeds": {}})
            if group["command"] != run.command:
                print(f"{run.setting}: dropped seeds {', '.join(group['seeds'])} of {group['command']}")
                group.update(command=run.command, seeds={})
            group["seeds"][str(run.seed)] = read_run(run, suite)
    groups = {setting: groups[setting] for setting in [*suite.settings, *groups] if setting in groups}
    if not groups:
        sys.exit("error: No run is finished yet, so there is nothing to report.")
    rows, settings = [], []
    for setting, group in groups.items():
        group["seeds"] = {seed: group["seeds"][seed] for seed in sorted(group["seeds"], key=int)}
        finals = list(group["seeds"].values())
        scores = suite.scores or tuple(finals[0]["last"])
        for score, which in itertools.product(scores, ("last", "best")):
            if all(score in final[which] for final in finals):
                values = np.array([final[which][score] for final in finals])
                key = setting if score == scores[0] else f"{setting}, {score}"
                reference = (suite.references or {}).get(key, "")
                rows.append([setting, score, which, *cells_of(values), reference if which == "last" else ""])
        means = [", ".join(number(final["means"][column]) for final in finals) for column in suite.means]
        commits = {re.sub(r"([0-9a-f]{7})[0-9a-f]*", r"\1", x) for final in finals for x in final["commit"].split(", ")}
        minutes = [final["minutes"] for final in finals]
        settings.append([setting, f"`{group['command']}`", ", ".join(group["seeds"]), ", ".join(sorted(commits)),
                         f"{np.median(minutes):.1f} ({min(minutes):.1f} to {max(minutes):.1f})", *means])  # fmt: skip
    episodes = sorted({final["episodes"] for group in groups.values() for final in group["seeds"].values()})
    page = f"# {name}: what is learnt\n\n`python -m benchmarks.learning {by_hand}`. Mean over {episodes[0]:,} fresh "
    page += "episodes with deterministic actions (if nothing else is said) of a run's last policy and of its best one, "
    page += f"by its own evaluations. {suite.note}\n\n"
    page += markdown_table(["setting", "score", "policy", "each seed", "mean ± standard deviation",
                            "interquartile mean (95 %)", "others"], rows)  # fmt: skip
    fewest = min(len(group["seeds"]) for group in groups.values())
    if fewest < 10:
        page += f"\nFew seeds ({fewest}): the intervals are too narrow; look at each seed.\n"
    page += "\n" + markdown_table(
        ["setting", "command", "seeds", "commit", "minutes: median (range)", *suite.means], settings
    )
    page += f"\n![curves]({name}.png)\n"
    info = machine_info()
    cpus = sorted({final["cpu"] for group in groups.values() for final in group["seeds"].values()})
    page += f"\nRuns on {' and '.join(cpus)}; their versions are in the JSON. Page written {machine_line(info)}"
    folder = write_results(name, {"machine": info, "metric": suite.metric, "settings": groups}, page, quick)
    panels: dict[str, dict[str, Any]] = {}
    for setting, group in groups.items():
        panel, _, line = setting.partition(", ")
        curves = [{key: np.array(column) for key, column in one["curve"].items()} for one in group["seeds"].values()]
        panels.setdefault(panel, {})[line] = curves
    draw(panels, folder / f"{name}.png", suite.metric, ["steps", "minutes"] if len(panels) == 1 else ["steps"])


def slug(text: str) -> str:
    """A setting's folder; that of a long command ends in a checksum of what is cut off."""
    name = re.sub(r"[^\w.=-]+", "_", text).strip("_")
    return name if len(name) <= 120 else f"{name[:110]}_{zlib.crc32(name.encode()):08x}"


def is_meant(setting: str, only: str) -> bool:
    """Whether `only` is a setting's name, its task (without "Mario-" and "-v5", too) or what follows the task."""
    task, _, line = setting.partition(", ")
    return only in (setting, task, line, task.removeprefix("Mario-").removesuffix("-v5"))


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code: 0, 1 for a run that failed, 128 + n after signal n."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a trial of seconds of training, into runs/bench")
    parser.add_argument("names", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--name", default="runs", help="name of folder and page, for commands after --")
    parser.add_argument("--seeds", nargs="+", type=int, default=[11, 12, 13, 14, 15])
    parser.add_argument("--parallel", type=at_least_one, default=1, help="runs at a time")
    parser.add_argument("--only", metavar="TEXT", help="a task (Hopper, 4-1) or a setting (head)")
    lines = {line: name for name, suite in SUITES.items() for line in suite.also}
    listed = ", ".join(f"{line} ({name})" for line, name in lines.items())
    parser.add_argument("--also", nargs="+", default=[], choices=lines, help=f"what runs only if asked for: {listed}")
    parser.add_argument(
        "--steps", type=at_least_one, help="of each run; default: 1 M for mujoco, the script's for others"
    )
    parser.add_argument("--report", action="store_true", help="run nothing, report what is finished")
    stops = [i for i, word in enumerate(argv) if word == "--"] + [len(argv)]
    options = parser.parse_args(argv[: stops[0]])
    commands = [shlex.join(argv[start + 1 : stop]) for start, stop in itertools.pairwise(stops)]
    taken = [word for command in commands for word in command.split() if word.partition("=")[0] in OURS]
    unknown = set(options.names) - set(SUITES)
    unknown |= {command for command in commands if not command.partition(" ")[0].endswith(".py")}
    if taken or unknown or bool(commands) == bool(options.names or options.quick):
        parser.error(f"{taken[0]} is given to each run by this program: leave it out" if taken else
                     f"name suites, of {', '.join(SUITES)}, or commands of your own after --, x.py first")  # fmt: skip
    suites = {name: SUITES[name] for name in options.names or (SUITES if options.quick and not commands else ())}
    if commands:
        metric = "eval/score" if "cage2" in commands[0] else "eval/mean_return"
        suites = {"": Suite({f"{options.name}, {command}": command for command in commands}, metric)}
    if options.only and len(suites) > 1:
        parser.error("--only goes with one suite at a time")
    code = 0
    for name, suite in suites.items():
        steps = options.steps or (1_000_000 if name == "mujoco" else 0)
        hidden = {*suite.also} - {*options.also, (options.only or "").rpartition(", ")[2]}
        settings = {
            setting: command + f" --total-timesteps {steps}" * bool(steps and not options.quick)
            for setting, command in suite.settings.items()
            if is_meant(setting, options.only or suite.default or setting) and setting.rpartition(", ")[2] not in hidden
            and (options.report or "sb3_zoo" not in command or installed("stable_baselines3"))
        }  # fmt: skip
        if not settings:
            parser.error(f"there is no setting {options.only}; there are {'; '.join(suite.settings)}")
        page = name if name == "continuing" else f"{name or options.name}_learning"
        page += f"_{steps // 1000}k" if name and steps and not options.quick else ""
        folder, seeds = FOLDER / page, options.seeds
        if options.quick:
            setting, command = next(iter(settings.items()))
            settings, seeds, folder = {setting: f"{command} {QUICK[name]}"}, [1, 2], FOLDER / "quick" / page
            suite = replace(suite, episodes=2)
            if not options.report:
                shutil.rmtree(folder, ignore_errors=True)
        runs = [Run(setting, command, seed, folder / slug(setting) / f"seed_{seed}", suite.episodes)
                for seed in seeds for setting, command in settings.items()]  # fmt: skip
        try:
            code = 0 if options.report else run_all(runs, options.parallel)
            if code:
                print("stopped; repeat the command to go on", file=sys.stderr)
                return code
            by_hand = f"{name} [--only ...] [--also ...]" if name else f"--name {options.name} -- ..."
            by_hand += f" --steps {options.steps}" * bool(options.steps)
            report(page, suite, runs, options.quick, by_hand)
        except (RunFailed, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
