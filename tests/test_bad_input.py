"""Whatever is wrong with what was asked for: one sentence on standard error, exit code 2 (1 for a file), no traceback,
and nothing of an existing run is lost. Values that are legal stop at Args; no run starts."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from tests.conftest import ROOT, command_line, domain, tiny_args, tiny_runner
from tests.known_values import PlainEnv

Main = Callable[..., tuple[int, str, str]]


class Matrix(PlainEnv):
    observation_space: Any = gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)  # a picture


gym.register("Picture-v0", entry_point=Matrix)


@pytest.fixture
def main(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Main:
    """The command line of each script, in an empty folder, without any training."""

    def too_late(*args: Any) -> None:
        raise AssertionError("training has begun")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "compute_gae", too_late)
    return command_line(script, capsys)


def assert_refused(result: tuple[int, str, str], expected: str, code: int = 2) -> None:
    """In one sentence: ours, or tyro's in a box."""
    actual, out, err = result
    message = re.sub(r"[\s│╭╮╰╯─]+", " ", err)
    assert actual == code, (actual, message)
    assert expected in message
    assert "Traceback" not in out + err
    assert "training has begun" not in err
    if err.startswith("error:"):
        assert (err.count("\n"), len(err) < 500) == (1, True), err


# ---- every flag -----------------------------------------------------------------------------------------------------

NUMBERS = (0, -1, 1e30, math.nan, math.inf, 10**21)


def test_every_flag_of_training_refuses_or_takes_every_number(script: ModuleType) -> None:
    """What is taken lies within the table of ranges. (tyro, which is slow, gives ints to ints and floats to floats.)"""
    ranges, refused = {name: bounds for names, bounds in script.RANGES.items() for name in names.split()}, 0
    for field in dataclasses.fields(script.Args):
        kind = str(field.type)
        if not re.search(r"\b(int|float)\b", kind):
            continue
        for number in NUMBERS:
            if "int" in kind and not isinstance(number, int):
                continue
            try:
                args = script.Args(**{field.name: (number,) if "tuple" in kind else number})
            except script.UsageError:
                refused += 1
                continue
            value = getattr(args, field.name)
            if "tuple" in kind:
                assert all(0 < x <= 1e6 for x in value), (field.name, number)
            else:
                assert field.name in ranges, field.name
                assert ranges[field.name][0] <= value <= ranges[field.name][1], (field.name, number)
    assert refused > 60


def test_every_type_of_flag_refuses_what_it_cannot_read(script: ModuleType, main: Main) -> None:
    """One flag of each type; a word is read as one by all of a type, or by none."""
    fields = {str(field.type): field.name for field in dataclasses.fields(script.Args)}
    for kind, name in fields.items():
        for value in ("a word", "1e30", "nan", "0"):
            if (
                kind in ("str", "str | None")
                or ("float" in kind and value != "a word")
                or ("int" in kind and value == "0")
            ):
                continue
            assert_refused(main(f"--{name.replace('_', '-')}", value), "")


def test_every_flag_of_play_refuses_or_takes_every_number(script: ModuleType) -> None:
    """There is no run to play, so that even good values end in a sentence, but another one."""
    for field in dataclasses.fields(script.PlayArgs):
        for number in NUMBERS if re.search(r"\b(int|float)\b", str(field.type)) else ():
            options = script.PlayArgs(**{"logdir": "/nowhere"} | {field.name: number})
            with pytest.raises((script.UsageError, OSError)):
                script.play(options)


# ---- what each command says -----------------------------------------------------------------------------------------

COMMON = {
    "--total-timesteps 100 --num-envs 16 --num-steps 128": "--total-timesteps 100 is less than the batch of 2048",
    "--num-envs 16 --num-steps 128 --num-minibatches 7 ": "--num-minibatches 7 does not divide the batch of 2048",
    "--num-envs 0": "--num-envs must be from 1 to",
    "--learning-rate nan": "--learning-rate must be from",
    "--gamma 1.5": "--gamma must be from 0 to 1, not 1.5",
    "--device cuda:99": "--device cuda:99 is not available here",
    "--device nonsense": "nonsense",
    "--resume": "--resume needs --logdir",
    "--configs debgu": "There is no preset debgu; there are ",
    "--num-envs many": "num-envs",
    "--no-such-flag 3": "no-such-flag",
    "--num-step 3": "num-step",
    "--lr-decay cubic": "--lr-decay",
    "nonsense": "nonsense",
    "play --episodes 0": "--episodes",
    "play --gif-fps 51": "--gif-fps",
}
OWN = {
    "ppo_continuous_mujoco": {
        "--gamma 1": "--average-reward-rate",
        "--average-reward-rate 0.1": "--no-norm-reward",
        "--time-scaled-reward": "--no-norm-reward",
        "--hidden-sizes 0": "--hidden-sizes",
        "--hidden-sizes -3 64": "--hidden-sizes",
        "--log-std-init nan": "--log-std-init",
        "--num-envs 1 --num-steps 64 --num-minibatches 64": "--norm-adv none",
        "--env-id HalfCheeta-v5": "HalfCheetah",
        "--env-id Ant-v3": "Ant-v3 cannot be made here",
        "--env-id xyz": "xyz cannot be made here",
        "--env-id nowhere:Env-v0": "nowhere",
        "--env-id CartPole-v1": "docs/copying.md",
        "--env-id WholeNumbers-v0": "WholeNumbers-v0 has",
        "--env-id Dict-v0": "FlattenObservation",
        "--env-id Picture-v0": "Picture-v0 has",
    },
    "ppo_cage2_parallel": {
        "--workflow user": "--workflow",
        "--workflow user,user,defender,op_host,op_server": "--workflow",
        "--compliance-threshold 0.9": "--workflow",
        "--red-agent blue": "--red-agent",
        "--hidden-sizes 0": "--hidden-sizes",
        "--env-id CAGE3-v0": "--env-id",
    },
    "ppo_atari_mario": {
        f"--torch-threads {2 * (os.cpu_count() or 1)}": "--torch-threads must be from 1 to",
        "--torch-threads 1000000": "--torch-threads must be from 1 to",
        "--env-id Mario-9-1": "Mario-9-1",
        "--env-id Luigi-1-1": "Luigi-1-1",
        "--env-id Mario": "Mario",
        "--env-id ALE/Nonsense-v5": "ALE/Nonsense-v5",
        "--minibatch-growth 7": "--minibatch-growth 7 does not divide",
        "--backend mame": "--backend",
    },
}  # fmt: skip


def test_what_is_wrong_is_said_in_one_sentence(script: ModuleType, main: Main, tmp_path: Path) -> None:
    for flags, expected in (COMMON | OWN[domain(script)]).items():
        try:
            assert_refused(main(*flags.split()), expected)
        except Exception as error:
            raise AssertionError(f"{flags}: {error!r}") from error
        assert not list(tmp_path.iterdir()), flags  # no folder for a run that cannot start


@pytest.mark.parametrize(
    "flags", ["--resume --logdir nowhere", "play --logdir nowhere", "play --checkpoint gone.pt", "--init-from gone.pt"]
)
def test_a_file_that_is_missing_is_named(main: Main, flags: str) -> None:
    assert_refused(main(*flags.split()), "nowhere" if "nowhere" in flags else "gone.pt", code=1)


def test_a_taken_folder_is_refused_and_stays_as_it_is(script: ModuleType, main: Main, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    script.save(tmp_path / "run" / "latest.pt", {"format": script.FORMAT})
    (tmp_path / "run" / "progress.csv").write_text("global_step\n1\n")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert_refused(main("--configs", "debug", "--logdir", "run"), "already holds a run")
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before


# ---- files of a run that are no text --------------------------------------------------------------------------------


def test_files_that_are_no_text_cost_no_run(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the folder of a run that goes on, and in its neighbours."""
    logdir = Path(tiny_runner(script, tmp_path)()["logdir"])
    for name in ("progress.csv", "config.json", "best.json"):
        (logdir / name).write_bytes(b"\xff\xfe\x00 rubbish \x80")
    for i, rubbish in enumerate((b"", b"[1]", b"{}", b'{"problem": 3}', b"\xff")):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "best.json").write_bytes(rubbish)
    capsys.readouterr()
    more = str(4 * tiny_args(script, tmp_path).batch_size)
    code, out, err = command_line(script, capsys)("--resume", "--logdir", str(logdir), "--total-timesteps", more)
    assert (code, err) == (0, ""), out + err
    assert script.load(logdir / "latest.pt")["run"]["rollouts"] == 4


@pytest.mark.parametrize("redirection", [">&-", "| head -1"])
def test_closed_outputs_leave_the_exit_code(continuous: ModuleType, tmp_path: Path, redirection: str) -> None:
    command = f"{sys.executable} {continuous.__file__} --env-id xyz {redirection}"
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, env=variables, text=True,
                            capture_output=True, check=False)  # fmt: skip
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
