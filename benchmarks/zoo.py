"""Put the best checkpoints of runs into zoo/, with a table of what they score in 100 episodes.

python -m benchmarks.zoo RUN ...              # zoo/{task}.pt for each, and zoo/README.md anew
python -m benchmarks.zoo --suffix head RUN    # zoo/{task}_head.pt: another one of a task
python -m benchmarks.zoo --stages             # every checkpoint of Mario on all 32 stages: results/mario_stages.md
python -m benchmarks.zoo --stages Mario-1-3   # only this one; what the others did stays
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT, machine_info, markdown_table, parser_of, stored, write_results
from benchmarks.learning import FIRST_SEED
from envs.mario import STAGES

ZOO = ROOT / "zoo"
NEEDED = ("format", "args", "agent", "statistics")  # by play


def add(run: Path, suffix: str) -> None:
    """Copy what `play` needs of a run's best.pt, and what is known of the run, to zoo/."""
    checkpoint = torch.load(run / "best.pt", weights_only=True)
    config = json.loads((run / "config.json").read_text())
    small = {name: checkpoint[name] for name in NEEDED if name in checkpoint}
    copies: dict[int, torch.Tensor] = {}  # not the vector they are views of; what actor and critic share, once
    for key, x in small["agent"].items():
        # Layers that compute in bfloat16 round their weights to it: stored so, they do the same in half the space.
        dtype = torch.bfloat16 if checkpoint["args"].get("amp") and "_cnn." in key else x.dtype
        small["agent"][key] = copies.setdefault(x.data_ptr(), x.to(dtype, copy=True))
    small["args"] |= {"logdir": None}
    ZOO.mkdir(exist_ok=True)
    name = checkpoint["args"]["env_id"].replace("/", "_").replace(",", "_") + f"_{suffix}" * bool(suffix)
    torch.save(small, ZOO / f"{name}.pt")
    script, steps = checkpoint["format"].partition("/")[0], checkpoint["run"]["global_step"]
    row = {"script": script, "seed": config["args"]["seed"], "step": steps, "commit": config["commit"][:7]}
    (ZOO / f"{name}.json").write_text(json.dumps(row | score(ZOO / f"{name}.pt", script, 100), indent=1) + "\n")


def score(path: Path, script: str, episodes: int) -> dict[str, Any]:
    """Mean and standard deviation of the returns of `episodes` deterministic episodes of a checkpoint, from seed 0 on,
    and of Mario how many reach the flag; on CAGE2 of the sum of those against its three red agents."""
    module = importlib.import_module(script)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        returns = module.play(module.PlayArgs(checkpoint=str(path), episodes=episodes))
    totals = np.sum(list(returns.values()), axis=0) if isinstance(returns, dict) else np.array(returns)
    row = {"episodes": episodes, "mean_return": float(totals.mean()), "std_return": float(totals.std())}
    return row | ({"flags": output.getvalue().count("flag reached")} if "mario" in script else {})


def make_page() -> str:
    """zoo/README.md, of the rows that lie there."""
    lines = [
        "# Trained checkpoints", "",
        "Each plays at once: `python SCRIPT play --checkpoint zoo/NAME.pt --save-gif`. The score: mean return,",
        "and standard deviation, of 100 deterministic episodes (`--episodes 100`); CAGE 2's is the sum of those of 100",
        "steps against its three red agents. Mario's play on the emulator that `make fceumm` installs.", "",
        "`python -m benchmarks.zoo RUN ...` adds the best checkpoints of runs and makes this page.", "",
        "| checkpoint | script | score | trained: steps, seed, commit |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for path in sorted(ZOO.glob("*.json")):
        row = json.loads(path.read_text())
        score = f"{row['mean_return']:,.1f} ± {row['std_return']:,.1f}"
        score += f", {row['flags']} reach the flag" if "flags" in row else ""
        trained = f"{row['step']:,}, {row['seed']}, {row['commit']}"
        lines.append(f"| `{path.stem}.pt` | `{row['script']}.py` | {score} | {trained} |")
    return "\n".join(lines) + "\n"


def flags_of(path: Path, stage: str, episodes: int) -> int:
    """How many of `episodes` fresh deterministic episodes of a stage a checkpoint of Mario ends at the flag."""
    mario = importlib.import_module("ppo_atari_mario")
    checkpoint = mario.load(path)
    args = mario.Args(**checkpoint["args"] | mario.HERE | {"env_id": f"Mario-{stage}"})
    with contextlib.closing(mario.make_envs(args, episodes)) as vec_env:
        agent = mario.Agent(vec_env, args)
        mario.load_policy(checkpoint, agent)
        _, _, infos = mario.evaluate(agent, vec_env, seed=FIRST_SEED)
    flags = sum(info["flag_get"] for info in infos)
    print(f"{path.stem} on {stage}: {flags} of {episodes}", flush=True)
    return flags


def write_stages(paths: list[Path], stages: tuple[str, ...], episodes: int) -> None:
    """Write results/mario_stages: every stage with every network, a fifth of the episodes where it was not trained."""
    few, quick = episodes // 5, stages != STAGES
    flags = stored("mario_stages", quick).get("flags", {})
    flags = {name: of_stage for name, of_stage in flags.items() if (ZOO / f"{name}.pt").exists()}
    trained = {name: name.removeprefix("Mario-").split("_") for name in [*flags, *(path.stem for path in paths)]}
    for path in paths:
        of_stage = {stage: episodes if stage in trained[path.stem] else few for stage in stages}
        flags[path.stem] = {stage: flags_of(path, stage, number) for stage, number in of_stage.items()}
    flags = dict(sorted(flags.items()))
    rows, reached = [], []
    for stage in stages:
        own = {name: x[stage] for name, x in flags.items() if stage in trained[name]}
        others = {name: x[stage] for name, x in flags.items() if name not in own and x[stage] > 0}
        if max(own.values(), default=0) >= 0.9 * episodes:
            reached.append(stage)
        cells = [", ".join(f"{name} **{x}**" for name, x in cell.items()) or "none" for cell in (own, others)]
        rows.append([stage, *cells])
    page = f"""# mario_stages: what each network of zoo/ does on every stage

`python -m benchmarks.zoo --stages`. Flags reached in deterministic episodes, with random waiting and sticky actions.
The {episodes} decided when training was enough, so they flatter; those of zoo/README.md have decided nothing.

At 90 % or more: {len(reached)} of {len(stages)} ({", ".join(reached) or "none"}).

{markdown_table(["stage", f"of {episodes}, networks trained on it", f"of {few}, others that reach it"], rows)}"""
    write_results("mario_stages", {"machine": machine_info(), "flags": flags}, page, quick)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--suffix", default="", help="of the name")
    parser.add_argument("--stages", nargs="*", metavar="NAME", help="Mario's checkpoints on all stages; none: all")
    options = parser.parse_args()
    for run in options.runs:
        add(run, options.suffix)
    (ZOO / "README.md").write_text(make_page())
    if options.stages is not None:
        paths = [ZOO / f"{name}.pt" for name in options.stages] or sorted(ZOO.glob("Mario-*.pt"))
        for path in paths:
            if not path.exists():
                parser.error(f"there is no {path}")
        write_stages(paths, STAGES, episodes=100)


if __name__ == "__main__":
    main()
