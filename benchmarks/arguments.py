"""Whether a run folder holds what its command would train today: a script's defaults and presets change."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

OF_THE_MACHINE = {"amp"}  # their defaults depend on the CPU


def learning_args(script: ModuleType, args: Any) -> dict[str, Any]:
    """Those that decide what is learnt, as JSON keeps them: not the seed, nor what a resumed run may change, steps
    aside."""
    free = script.RESUMABLE - {"total_timesteps"} | {"seed"} | OF_THE_MACHINE
    return {name: value for name, value in json.loads(json.dumps(asdict(args))).items() if name not in free}


def args_of_command(script: ModuleType, words: list[str]) -> dict[str, Any]:
    """The arguments that decide what a command line, the script's name first, learns today."""
    return learning_args(script, script.parse_args(words[1:]))


def args_of_run(script: ModuleType, logdir: Path) -> dict[str, Any]:
    """Those of a run. Arguments that the script has gained since get their defaults, which change nothing."""
    saved = json.loads((logdir / "config.json").read_text())["args"]
    return learning_args(script, script.known_args(asdict(script.Args()) | saved))


def is_current(script: ModuleType, words: list[str], logdir: Path) -> bool:
    """Whether a folder holds a run of what the command learns today."""
    return (logdir / "config.json").exists() and args_of_run(script, logdir) == args_of_command(script, words)


def set_aside_if_changed(script: ModuleType, words: list[str], logdir: Path) -> None:
    """Rename the folder of a run of anything else than what the command learns today."""
    if (logdir / "config.json").exists() and not is_current(script, words, logdir):
        logdir.rename(f"{logdir}.old-{time.strftime('%Y%m%d-%H%M%S')}")
