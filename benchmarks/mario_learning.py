"""Learning results on Super Mario Bros: several seeds of `ppo_atari_mario.py`, and what single choices of it are worth.

    python -m benchmarks.mario_learning                                          # World 1-1, FCEUmm, seeds 1 2 3
    python -m benchmarks.mario_learning --env-id Mario-1-2 --seeds 1             # another stage
    python -m benchmarks.mario_learning --backend nes_py --seeds 1
    python -m benchmarks.mario_learning --variant large_vf_coef --seeds 1        # with other choices
    python -m benchmarks.mario_learning --quick                                  # two updates, to see that all works
    python -m benchmarks.mario_learning --report                                 # the page of what has been run

Runs follow one another, each on all cores; with `--jobs 2` two run at a time, each on one core. A run's folder is
runs/mario/{env_id}-{backend}-{variant}-{seed}. One that was killed is resumed, one that is finished is not repeated.
Then its last policy plays 100 episodes of each of its stages with the most probable actions and 100 with sampled ones,
all with random waiting before the start and sticky actions, on seeds that no run uses.

results/mario_learning.json keeps curves and evaluations of every run, so run folders may be deleted. The last
evaluation of the first seed on FCEUmm, some episodes side by side, becomes results/mario_{stages}.gif.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ppo_atari_mario as mario
from benchmarks.arguments import args_of_command, is_current, set_aside_if_changed
from benchmarks.common import (
    CORES,
    QUICK_RESULTS,
    RESULTS,
    ROOT,
    at_least_one,
    cpu_model,
    machine_info,
    machine_line,
    markdown_table,
    write_results,
)
from benchmarks.seeds import Run, UsageError, draw, run_all
from envs.nes_core import GRAY
from ppo_atari_mario import read_csv

FOLDER = ROOT / "runs" / "mario"
EPISODES, EVALUATION_SEED = 100, 1000
WINDOW = 20_000  # steps averaged in a point of the training curve
LUMA = (0.299, 0.587, 0.114)  # the usual grey; what a run had, `GRAY` of that day, its evaluation.json says
# What a run has other than the script's defaults. The last four are how this project's own runs began, from below.
NO_GROWTH = ["--minibatch-growth", "1"]
SHORT_ROLLOUTS = ["--num-steps", "64", "--num-minibatches", "8", *NO_GROWTH]
VARIANTS: dict[str, list[str]] = {
    "default": [],
    "million": ["--total-timesteps", "1000000"],
    "long": ["--total-timesteps", "2500000"],
    "longer": ["--total-timesteps", "3000000"],
    "no_growth": NO_GROWTH,
    "short_rollouts": [*SHORT_ROLLOUTS, "--total-timesteps", "1000000"],
    "constant_entropy": [*SHORT_ROLLOUTS, "--no-anneal-ent", "--total-timesteps", "1200000"],
    "large_vf_coef": ["--num-steps", "128", "--num-minibatches", "16", *NO_GROWTH, "--no-anneal-ent",
                      "--vf-coef", "0.5"],
    "quick": ["--num-envs", "8", "--num-steps", "64", "--num-minibatches", "4", "--total-timesteps", "1024",
              "--max-episode-steps", "20"],
}  # fmt: skip


def command(env_id: str, backend: str, variant: str) -> list[str]:
    """The command line of a group of runs, but for the seed."""
    return ["ppo_atari_mario.py", "--env-id", env_id, "--backend", backend, *VARIANTS[variant]]


def stages_of(env_id: str) -> list[str]:
    """The single stages of Mario-1-1,2-1; Mario-random and Mario-full are one."""
    return [f"Mario-{stage}" for stage in env_id.removeprefix("Mario-").split(",")]


def evaluate(logdir: Path) -> None:
    """Write evaluation.json of the run's last policy, with the weights of red, green and blue in its grey pictures."""
    checkpoint = mario.load_checkpoint(logdir / "latest.pt")
    args = replace(mario.known_args(checkpoint["args"]), device="cpu", eval_episodes=EPISODES)
    torch.set_num_threads(1)
    vec_env = mario.make_envs(replace(args, num_envs=1))
    agent = mario.Agent(vec_env, args)
    vec_env.close()
    agent.load_state_dict(checkpoint["agent"])
    scores: dict[str, Any] = {"cpu": cpu_model(), "grey": GRAY[:3]}
    for mode, deterministic in (("deterministic", True), ("sampled", False)):
        stages = {stage: mario.evaluate(agent, replace(args, env_id=stage), deterministic, EVALUATION_SEED)
                  for stage in stages_of(args.env_id)}  # fmt: skip
        successes, returns, lengths = (
            np.concatenate([result[name] for result in stages.values()]) for name in ("successes", "returns", "lengths")
        )
        scores[mode] = {"success_rate": float(successes.mean()), "mean_return": float(returns.mean()),
                        "std_return": float(returns.std()), "mean_length": float(lengths.mean()),
                        "stages": {stage: result["success_rate"] for stage, result in stages.items()}}  # fmt: skip
    (logdir / "evaluation.json").write_text(json.dumps(scores))


def read_run(logdir: Path) -> dict[str, Any]:
    """What the results keep of a finished run: its evaluations, and curves averaged over `WINDOW` steps."""
    progress, timing, evaluations = (read_csv(logdir / f"{name}.csv") for name in ("progress", "timing", "eval"))
    config = json.loads((logdir / "config.json").read_text())
    args = config["args"]
    points = progress["global_step"] // WINDOW
    ends = np.flatnonzero(np.diff(points, append=points[-1] + 1))
    rates = [np.nanmean(x) if not np.isnan(x).all() else 0.0
             for x in np.split(progress["rollout/success_rate"], ends[:-1] + 1)]  # fmt: skip
    return {
        "steps": progress["global_step"][ends].tolist(),
        "minutes": (timing["time/seconds"][ends] / 60).round(2).tolist(),
        "success_rate": np.round(rates, 4).tolist(),
        "evaluations": {name: column.tolist() for name, column in evaluations.items()},
        "num_workers": args["num_workers"],
        "torch_threads": args["torch_threads"],
        "commit": config["commit"],
        "final": json.loads((logdir / "evaluation.json").read_text()),
    }


def todays(groups: dict[str, Any]) -> dict[str, Any]:
    """Of the stored groups those whose command would still learn with the arguments that it had, their "args"; one that
    was added or removed since then changes nothing. The first groups did not note theirs."""
    kept = {}
    for name, group in groups.items():
        today = args_of_command(mario, group["command"].split()[1:])
        group = {"args": today} | group
        if all(today[key] == group["args"][key] for key in today.keys() & group["args"].keys()):
            kept[name] = group
    return kept


def words_of(grey: Sequence[float]) -> str:
    """The weights of a grey, and whether they are the usual ones."""
    weights = f"({', '.join(f'{weight:g}' for weight in grey)})"
    return f"luma {weights}" if tuple(grey) == LUMA else weights


def success_rates(scores: dict[str, Any]) -> str:
    """The share of successful episodes, and of several stages that of each."""
    stages = scores.get("stages", {})
    parts = ", ".join(f"{stage.removeprefix('Mario-')} {rate:.0%}" for stage, rate in stages.items())
    return f"{scores['success_rate']:.0%}" + (f": {parts}" if len(stages) > 1 else "")


def report(folder: Path = RESULTS) -> None:
    """Write mario_learning.json, .md and .png from what is stored in `folder` and the finished runs."""
    path = folder / "mario_learning.json"
    groups = todays(json.loads(path.read_text())["groups"]) if path.exists() else {}
    for evaluation in sorted(FOLDER.glob("*/evaluation.json")):
        logdir = evaluation.parent
        args = json.loads((logdir / "config.json").read_text())["args"]
        variant = logdir.name.split("-")[-2]
        if variant not in VARIANTS or (variant == "quick") is not (folder == QUICK_RESULTS):
            continue  # not in VARIANTS: a run that was set aside
        words = command(args["env_id"], args["backend"], variant)
        if not is_current(mario, words, logdir):
            continue  # its variant means something else today
        group = groups.setdefault(f"{args['env_id']} {args['backend']} {variant}", {"seeds": {}})
        group["command"], group["args"] = "python " + " ".join(words), args_of_command(mario, words)
        group["seeds"][str(args["seed"])] = read_run(logdir)
        videos = sorted((logdir / "videos").glob("*.gif"), key=lambda gif: int(gif.stem.rpartition("_")[2]))
        shown = variant == "default" and args["backend"] == "fceumm"
        if shown and videos and str(args["seed"]) == min(group["seeds"], key=int):
            shutil.copyfile(videos[-1], folder / f"{args['env_id'].lower().replace('-', '_', 1)}.gif")
    groups = {name: groups[name] | {"seeds": dict(sorted(groups[name]["seeds"].items(), key=lambda item: int(item[0])))}
              for name in sorted(groups)}  # fmt: skip
    rows = []
    for name, group in groups.items():
        for seed, result in group["seeds"].items():
            training, final = np.array(result["success_rate"]), result["final"]
            halfway = np.flatnonzero(training >= 0.5)
            rows.append([
                *name.split(), words_of(final["grey"]), seed, f"{result['steps'][-1] / 1e6:.2f} M",
                f"{result['minutes'][-1]:.0f} ({result['num_workers']} workers, {result['torch_threads']} threads)",
                f"{result['steps'][halfway[0]] / 1e6:.2f} M" if len(halfway) else "never",
                f"{training[-5:].mean():.0%}",
                *(f"{success_rates(final[mode])} ({final[mode]['mean_return']:.0f} +- "
                  f"{final[mode]['std_return']:.0f})" for mode in ("deterministic", "sampled")),
                f"{final['deterministic']['mean_length']:.0f}, {final['sampled']['mean_length']:.0f}",
            ])  # fmt: skip
    header = ["stage", "emulator", "variant", "grey", "seed", "steps", "minutes", "half of training episodes at",
              "training, last 100,000 steps", f"{EPISODES} episodes a stage, deterministic (return)",
              f"{EPISODES} episodes a stage, sampled (return)", "decisions an episode"]  # fmt: skip
    page = (
        "# Super Mario Bros\n\n`python -m benchmarks.mario_learning`. Share of episodes that reach the flag, with "
        "random waiting before the start and sticky actions, in training and evaluation. Minutes are those of "
        "collecting and learning, mostly beside another run on the other core; returns are in the shaped reward. "
        f"Grey: the weights of red, green and blue in the pictures; today's are {words_of(GRAY[:3])}.\n\n"
    )
    page += markdown_table(header, rows)
    page += "\n" + "\n".join(f"- {name}: `{' '.join(words)}`" for name, words in VARIANTS.items()
                             if words and name != "quick")  # fmt: skip
    info = machine_info(["torch", "numpy", "gym-super-mario-bros", "nes-py", "stable-retro"])
    cpus = sorted({result["final"]["cpu"] for group in groups.values() for result in group["seeds"].values()})
    page += f"\n\n![curves](mario_learning.png)\n\nRuns on {' and '.join(cpus)}. {machine_line(info, 'Page written')}"
    write_results("mario_learning", {"machine": info, "groups": groups}, page, folder)
    if groups:
        curves = {
            name: [(int(seed), {"steps": np.array(run["steps"]), "minutes": np.array(run["minutes"]),
                                "scores": np.array(run["success_rate"])}) for seed, run in group["seeds"].items()]
            for name, group in groups.items()
        }  # fmt: skip
        draw(curves, "training episodes that reach the flag", folder / "mario_learning.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="Mario-1-1")
    parser.add_argument("--backend", choices=["fceumm", "nes_py"], default="fceumm")
    parser.add_argument("--variant", choices=list(VARIANTS), default="default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=at_least_one, default=1, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="two updates of eight environments")
    parser.add_argument("--report", action="store_true", help="only write the page of finished runs")
    options = parser.parse_args()
    if options.quick:
        options.variant, options.seeds = "quick", [1]
    if not options.report:
        name, cores = f"{options.env_id}-{options.backend}-{options.variant}", str(max(1, CORES // options.jobs))
        words = command(options.env_id, options.backend, options.variant)
        words += ["--num-workers", cores, "--torch-threads", cores]
        runs = [Run(words, seed, FOLDER / f"{name}-{seed}") for seed in options.seeds]
        for run in runs:
            if options.quick:  # else the second time would show nothing
                shutil.rmtree(run.logdir, ignore_errors=True)
            set_aside_if_changed(mario, words, run.logdir)
        try:
            code = run_all(runs, options.jobs)
        except UsageError as error:
            sys.exit(f"error: {error}")
        if code:
            sys.exit(code)
        for run in runs:
            if not (run.logdir / "evaluation.json").exists():
                evaluate(run.logdir)
    folder = QUICK_RESULTS if options.quick else RESULTS
    report(folder)
    print(json.dumps({"results": str(folder / "mario_learning.md")}))


if __name__ == "__main__":
    main()
