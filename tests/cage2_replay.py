"""Replay recordings of the real CybORG 2.1 on our simulator and count every difference.

    python -m tests.cage2_replay ../shared/cage2/traces

Each recorded step's random outcomes (Green's target, red's choice of target and exploit, detection, escalated
session) are injected with Blue's action; everything else must follow. One line per file: values compared and
mismatches for each array. "red_choice" counts whether the recorded red action is one that our red agent could
have chosen, and "red_stage" B_line's stage counter. Exit code 1 on any mismatch, 2 when there is nothing to
replay.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from envs.cage2 import scenario

ARRAYS = (
    "obs", "obs_cardiff", "reward", "red_success", "blue_success", "red_access", "red_sessions", "decoys",
    "n_vsftpd", "malware", "red_options", "red_known_ip", "ot_known", "ot_up", "red_choice", "red_stage",
)  # fmt: skip
RED_AGENT_OF_FILE = {"bline": "b_line", "meander": "meander", "sleep": "sleep"}


def parse_name(path: Path) -> tuple[str, bool, bool]:
    """Red agent, whether Green acts, whether leaderboard rules: from `[lb_]{red}_{green}_{blue}.npz`."""
    parts = path.stem.split("_")
    leaderboard = parts[0] == "lb"
    red, green = parts[leaderboard : leaderboard + 2]
    if red not in RED_AGENT_OF_FILE or green not in ("green", "nogreen"):
        raise ValueError(
            f"{path.name} is not named [lb_]bline|meander|sleep_green|nogreen_<blue policy>.npz."
        )
    return RED_AGENT_OF_FILE[red], green == "green", leaderboard


def recorded_tape(trace: dict[str, np.ndarray], step: int, state: ModuleType) -> np.ndarray:
    """The recorded outcomes of one step as a tape (N, 6)."""
    tape = np.full((len(trace["blue_action"]), state.NUM_DRAWS), state.FREE, np.int8)
    for slot, name in enumerate(state.DRAW_NAMES[:-1]):  # the red agent is drawn between episodes
        tape[:, slot] = trace[name][:, step]
    return tape


def unpack(bit_sets: np.ndarray) -> np.ndarray:
    """(N,) sets of hosts -> (N, 13) zeros and ones."""
    return (bit_sets[:, None] >> np.arange(scenario.NUM_HOSTS)) & 1


def red_options(states: np.ndarray, exploit_options: Any) -> np.ndarray:
    """(N, 13) sets of exploits that red considers on each host, from its port lists."""
    return np.array([[int(exploit_options(int(ports))) for ports in row] for row in states["ports"]])


def red_choice(states: np.ndarray, trace: dict[str, np.ndarray], t: int) -> np.ndarray:
    """(N,) whether red did what was recorded and every recorded outcome was possible."""
    same = states["impossible_draw"] == 0
    for name in ("red_action", "red_target", "red_subnet", "red_exploit"):
        same &= states[name] == trace[name][:, t]
    return same


def replay(
    path: Path, modules: Any = None, episodes: int | None = None, stop_at_first: bool = False
) -> dict[str, tuple[int, int]]:
    """Replay one file, through both wrappers.

    Args: path of the recording; `modules` is the simulator to test, an object with modules `simulator`,
    `state`, `rules` (default: `envs.cage2`); only the first `episodes`; `stop_at_first` returns after the
    first step with a mismatch. Returns, for each array, how many values were compared and how many differed.
    """
    if modules is None:
        from envs import cage2 as modules
    sim, state = modules.simulator, modules.state
    with np.load(path) as file:
        trace = {name: file[name][:episodes] for name in file.files}
    num_envs, num_steps = trace["blue_action"].shape
    red_agent, green, leaderboard = parse_name(path)
    compared: Counter[str] = Counter()
    wrong: Counter[str] = Counter()

    def compare(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        compared[name] += theirs.size
        wrong[name] += int(np.count_nonzero(ours != theirs))

    exploit_options = modules.rules.exploit_options
    for cardiff, obs_name in ((False, "obs"), (True, "obs_cardiff")):
        states = sim.new_states(
            num_envs,
            red_agent,
            green,
            version="leaderboard" if leaderboard else "head",
            wrapper="cardiff" if cardiff else "challenge",
            max_steps=num_steps,
        )
        sim.seed_states(states, range(num_envs))
        sim.start(states)
        obs = np.zeros((num_envs, scenario.OBS_SIZE), np.float32)
        compare(obs_name, obs, trace[obs_name][:, 0])
        for t in range(num_steps):
            actions = trace["blue_action"][:, t].astype(np.int64)
            rewards, _ = sim.step(states, actions, recorded_tape(trace, t, state), obs)
            compare(obs_name, obs, trace[obs_name][:, t + 1])
            if not cardiff:
                compare("reward", rewards.astype(np.float32), trace["reward"][:, t])
                for name in (
                    "red_success",
                    "blue_success",
                    "red_access",
                    "decoys",
                    "malware",
                    "ot_known",
                    "ot_up",
                ):
                    compare(name, states[name], trace[name][:, t])
                compare("red_sessions", states["sessions"], trace["red_sessions"][:, t])
                compare("n_vsftpd", states["num_vsftpd"], trace["n_vsftpd"][:, t])
                compare("red_options", red_options(states, exploit_options), trace["red_options"][:, t])
                compare("red_known_ip", unpack(states["known_ips"]), trace["red_known_ip"][:, t])
                compare("red_choice", red_choice(states, trace, t), np.ones(num_envs, bool))
                stage = states["stage"] if red_agent == "b_line" else np.full(num_envs, -1)
                compare("red_stage", stage, trace["red_state"][:, t])
            if stop_at_first and any(wrong.values()):
                return {name: (compared[name], wrong[name]) for name in ARRAYS}
    return {name: (compared[name], wrong[name]) for name in ARRAYS}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Replay recordings of the real CybORG on our simulator.")
    parser.add_argument("directory", type=Path, help="folder of .npz recordings")
    directory = parser.parse_args(argv).directory
    paths = sorted(directory.glob("*.npz"))
    if not paths:
        print(
            f"There is no .npz recording in {directory}; name a folder like ../shared/cage2/traces.",
            file=sys.stderr,
        )
        return 2
    total = Counter()
    for path in paths:
        counts = replay(path)
        total["compared"] += sum(compared for compared, _ in counts.values())
        total["wrong"] += sum(wrong for _, wrong in counts.values())
        columns = "  ".join(f"{name} {compared}/{wrong}" for name, (compared, wrong) in counts.items())
        print(f"{path.stem}: {columns}", flush=True)
    print(
        f"{len(paths)} files (compared/mismatches): {total['compared']} compared, {total['wrong']} mismatches"
    )
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
