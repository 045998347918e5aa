"""Is this checkout as fast as another one? Both train the same settings in turn, on the same machine.

git worktree add ../old a203162
python -m benchmarks.speed --other ../old              # results/speed.json and .md
python -m benchmarks.speed --other ../old --quick --only halfcheetah
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# name: script, its flags (the same words in both checkouts), updates of a run
SETTINGS = {
    "halfcheetah": ("ppo_continuous_mujoco.py", "--configs halfcheetah", 60),
    "halfcheetah, minibatches of 256": ("ppo_continuous_mujoco.py", "--configs halfcheetah --num-minibatches 8", 80),
    "ant": ("ppo_continuous_mujoco.py", "--configs ant", 40),
    "humanoid": ("ppo_continuous_mujoco.py", "--configs humanoid", 30),
    "mario": ("ppo_atari_mario.py", "--backend fceumm", 3),
    "cage2, 25 environments": ("ppo_cage2_parallel.py", "--num-envs 25 --num-minibatches 4", 100),
    "cage2, 256 environments": ("ppo_cage2_parallel.py", "", 25),
}
BATCHES = {"mario": 8_192, "ant": 1_024, "humanoid": 1_024, "cage2, 25 environments": 2_500,
           "cage2, 256 environments": 25_600}  # fmt: skip


def measure(checkout: Path, script: str, flags: str, steps: int) -> tuple[float, float]:
    """Train in a checkout; returns the median steps/s of its updates but the first, and the seconds by which the first
    took longer than the others (compiling)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *flags.split(), "--total-timesteps", str(steps), "--logdir", f"{folder}/run",
                   "--eval-every", "0", "--eval-episodes", "1", "--save-every", "0"]  # fmt: skip
        environment = {**__import__("os").environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
        subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
        files = [path for name in ("timing.csv", "progress.csv") if (path := Path(folder, "run", name)).exists()]
        with open(files[0]) as file:
            rows = list(csv.DictReader(file))
    rates = [float(row["time/sps"]) for row in rows]
    batch = int(rows[0]["global_step"])
    median = statistics.median(rates[1:])
    return median, batch / rates[0] - batch / median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--quick", action="store_true", help="one round, nothing is written")
    args = parser.parse_args()
    results = {}
    for name in args.only:
        script, flags, updates = SETTINGS[name]
        steps = updates * BATCHES.get(name, 2_048)
        rounds = []
        for _ in range(1 if args.quick else args.rounds):
            (new, new_compile), (old, old_compile) = (
                measure(checkout, script, flags, steps) for checkout in (ROOT, args.other)
            )
            rounds.append(
                {"new": new, "old": old, "ratio": new / old, "new_compile": new_compile, "old_compile": old_compile}
            )
        median = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
        results[name] = {"median": median, "rounds": rounds}
        print(f"{name:34} {median['new']:>8,.0f} {median['old']:>8,.0f} steps/s  ratio {median['ratio']:.2f}  "
              f"compiling {median['new_compile']:.0f} s, {median['old_compile']:.0f} s", flush=True)  # fmt: skip
    if args.quick:
        return
    commits = {
        key: subprocess.getoutput(f"git -C '{folder}' rev-parse --short HEAD")
        for key, folder in (("new", ROOT), ("old", args.other))
    }
    path = ROOT / "results" / "speed.json"
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    results = {name: (before | results)[name] for name in SETTINGS if name in before | results}
    path.write_text(json.dumps({"commits": commits, "machine": platform.processor(), "results": results}, indent=1))
    lines = [
        f"# Speed of this checkout ({commits['new']}) against {commits['old']}", "",
        "Whole training loop, steps/s: medians over the updates of a run but the first, then over the rounds, in which",
        "the two checkouts take turns. `python -m benchmarks.speed --other ../old` makes this page.", "",
        "| setting | now | before | ratio, round by round | compiling, s | before |", "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, result in results.items():
        median, ratios = result["median"], [f"{row['ratio']:.2f}" for row in result["rounds"]]
        lines.append(f"| {name} | {median['new']:,.0f} | {median['old']:,.0f} | **{median['ratio']:.2f}** ({', '.join(ratios)}) "
                     f"| {median['new_compile']:.0f} | {median['old_compile']:.0f} |")  # fmt: skip
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
