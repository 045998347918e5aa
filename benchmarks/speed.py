"""Is this checkout as fast as another one? Both train the same settings in turn, on the same machine.

git worktree add ../old a203162
python -m benchmarks.speed --other ../old              # results/speed.json and .md
python -m benchmarks.speed --other ../old --quick --only halfcheetah
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import (
    ROOT,
    at_least_one,
    commit_of,
    machine_info,
    machine_line,
    markdown_table,
    parser_of,
    stored,
    train,
    write_results,
)

# name: script, its flags (the same words in both checkouts), steps of an update, updates of a run
SETTINGS = {
    "halfcheetah": ("ppo_continuous_mujoco.py", "--configs halfcheetah", 2_048, 60),
    "halfcheetah, minibatches of 256": (
        "ppo_continuous_mujoco.py", "--configs halfcheetah --num-minibatches 8", 2_048, 80),
    "ant": ("ppo_continuous_mujoco.py", "--configs ant", 1_024, 40),
    "humanoid": ("ppo_continuous_mujoco.py", "--configs humanoid", 1_024, 30),
    "mario": ("ppo_atari_mario.py", "--backend fceumm", 8_192, 3),
    "cage2, 25 environments": ("ppo_cage2_parallel.py", "--num-envs 25 --num-minibatches 4", 2_500, 100),
    "cage2, 256 environments": ("ppo_cage2_parallel.py", "", 25_600, 25),
    "SubprocVecEnv, 16 x CartPole": ("step_subproc.py", "CartPole-v1", 0, 0),
    "SubprocVecEnv, 16 x HalfCheetah": ("step_subproc.py", "HalfCheetah-v5", 0, 0),
    "SubprocVecEnv, 16 x images": ("step_subproc.py", "images 64x64x3", 0, 0),
}  # fmt: skip


def measure(checkout: Path, name: str) -> tuple[float, float]:
    """Train, or only step, in a checkout; returns the median steps/s of its updates but the first, and the seconds by
    which the first took longer than the others (compiling)."""
    script, flags, batch, updates = SETTINGS[name]
    if script == "step_subproc.py":
        command, variables = [sys.executable, str(ROOT / "benchmarks" / script), flags], {"PYTHONPATH": str(checkout)}
        done = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
        return float(done.stdout), 0.0
    columns = train(script, [*flags.split(), "--total-timesteps", str(batch * updates)], checkout, anew=True)
    rates = columns["time/sps"].tolist()
    median = statistics.median(rates[1:])
    return median, batch / rates[0] - batch / median


def write_page(results: dict[str, Any], quick: bool) -> None:
    """Write results/speed.json and .md of {setting: {"median", "rounds", "commits", "machine"}}."""
    rows = []
    for name, result in results.items():
        median, ratios = result["median"], ", ".join(f"{row['ratio']:.2f}" for row in result["rounds"])
        rows.append([name, f"{median['new']:,.0f}", f"{median['old']:,.0f}", f"**{median['ratio']:.2f}** ({ratios})",
                     f"{median['new_compile']:.0f}", f"{median['old_compile']:.0f}", result["commits"]])  # fmt: skip
    page = (
        "# Speed of this checkout, A, against another one, B\n\nWhole training loop, steps/s: medians over the updates "
        "of a run but the first, then over the rounds, in which the two checkouts take turns. `python -m "
        "benchmarks.speed --other ../old` makes this page; what it does not measure anew stays as it was.\n\n"
    )
    page += markdown_table(["setting", "A", "B", "A / B (each round)", "compiling, s: A", "B", "commits A / B"], rows)
    lines = dict.fromkeys(machine_line(result["machine"]) for result in results.values())
    write_results("speed", {"results": results}, page + "\n" + "\n".join(lines), quick)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of the first setting, into runs/bench")
    parser.add_argument("--other", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, metavar="SETTING", help=", ".join(SETTINGS))
    options = parser.parse_args()
    if not (options.other / "envs").is_dir():
        parser.error(f"--other {options.other} is no checkout of this repository")
    results = {} if options.quick else stored("speed", options.quick).get("results", {})
    for name in options.only or list(SETTINGS)[: 1 if options.quick else None]:
        info, rounds = machine_info(), []
        for i in range(1 if options.quick else options.rounds):
            figures = {}
            for which in ("new", "old") if i % 2 == 0 else ("old", "new"):
                checkout = ROOT if which == "new" else options.other
                figures[which], figures[f"{which}_compile"] = measure(checkout, name)
            rounds.append(figures | {"ratio": figures["new"] / figures["old"]})
        median = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
        commits = f"{info['commit']} / {commit_of(options.other)}"
        results[name] = {"median": median, "rounds": rounds, "commits": commits, "machine": info}
        print(f"{name:34} {median['new']:>8,.0f} {median['old']:>8,.0f} steps/s  ratio {median['ratio']:.2f}  "
              f"compiling {median['new_compile']:.0f} s, {median['old_compile']:.0f} s", flush=True)  # fmt: skip
    write_page({name: results[name] for name in SETTINGS if name in results}, options.quick)


if __name__ == "__main__":
    main()
