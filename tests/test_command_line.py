"""The command line of each script: help, presets, and whatever is wrong with what was asked for: one sentence on
standard error, exit code 2 (1 for a file), no traceback. Values that are legal stop at Args; no run starts."""

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

from tests.conftest import ROOT, columns, command_line, domain
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


@pytest.mark.parametrize("command", ["train", "play"])
def test_help_lists_every_flag_and_what_it_means(script: ModuleType, main: Main, command: str) -> None:
    code, out, _ = main(command, "--help")
    assert code == 0
    text = re.sub(r"[\s│]+", " ", out)
    source = Path(str(script.__file__)).read_text()
    source = source.partition("class PlayArgs")[2] if command == "play" else source.partition("class PlayArgs")[0]
    for field in dataclasses.fields(script.Args if command == "train" else script.PlayArgs):
        flag = field.name.replace("_", "-")
        assert f"--{flag}" in text, flag
        comment = re.search(rf"(?:^    # (.+)\n(?:    # .+\n)*)?^    {field.name}: [^#\n]*(?:  # (.+))?$", source, re.M)
        assert comment is not None, flag
        assert re.sub(r"\s+", " ", comment[2] or comment[1])[:40] in text, flag
    for group in ["run", "environments", "ppo"] if command == "train" else []:
        assert f"{group} options" in text.lower()


def test_presets_layer_from_left_to_right_and_flags_win(script: ModuleType) -> None:
    for name, values in script.PRESETS.items():
        args = script.parse_args(["--configs", name])
        assert {key: getattr(args, key) for key in values} == values, name
    names = ("ant" if "ant" in script.PRESETS else "fast", "debug")
    first, second = (script.PRESETS[name] for name in names)
    assert any(first[key] != second[key] for key in first.keys() & second.keys())
    for layers in (names, names[::-1]):
        args = script.parse_args(["--configs", *layers, "--num-envs", "2", "--seed", "9"])
        expected = script.PRESETS[layers[0]] | script.PRESETS[layers[1]] | {"num_envs": 2, "seed": 9}
        assert {key: getattr(args, key) for key in expected} == expected
        assert script.preset(*layers, num_envs=2, seed=9) == args
    if "hopper" in script.PRESETS:  # made of others
        assert [script.preset(name).env_id for name in ("hopper", "ant")] == ["Hopper-v5", "Ant-v5"]


# ---- every flag -----------------------------------------------------------------------------------------------------
NUMBERS = (0, -1, 1e30, math.nan, math.inf, 10**21)


def test_every_flag_of_training_refuses_or_takes_every_number(script: ModuleType) -> None:
    """What is taken lies within the table of ranges. (tyro, which is slow, gives ints to ints and floats to floats.)"""
    ranges, refused = {name: bounds for names, bounds in script.RANGES.items() for name in names.split()}, 0
    for field in dataclasses.fields(script.Args):
        kind = str(field.type)
        for number in NUMBERS if re.search(r"\b(int|float)\b", kind) else ():
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


def test_every_range_is_of_a_flag(script: ModuleType) -> None:
    """A typing error in RANGES would switch the check off."""
    classes = (script.Args, script.PlayArgs, getattr(script, "SearchArgs", script.Args))
    flags = {field.name for one in classes for field in dataclasses.fields(one)}
    assert {name for names in script.RANGES for name in names.split()} <= flags


def test_every_type_of_flag_refuses_what_it_cannot_read(script: ModuleType, main: Main) -> None:
    """One flag of each type; a word is read as one by all of a type, or by none."""
    readable = {"a word": "str", "1e30": "str float", "nan": "str float", "0": "str float int tuple[int,...]"}
    for kind, name in {str(field.type): field.name for field in dataclasses.fields(script.Args)}.items():
        plain = re.sub(r"<class '(\w+)'>| \| None| ", r"\1", kind)
        for value, kinds in readable.items():
            if plain not in kinds.split():
                assert_refused(main(f"--{name.replace('_', '-')}", value), "")


COMMON = {
    "--total-timesteps 100 --num-envs 16 --num-steps 128": "--total-timesteps 100 is less than the batch of 2048",
    "--num-envs 16 --num-steps 128 --num-minibatches 7 ": "--num-minibatches 7 does not divide the batch of 2048",
    "--num-envs 0": "--num-envs must be from 1 to",
    "--learning-rate nan": "--learning-rate must be from",
    "--gamma 1.5": "--gamma must be from 0 to 1, not 1.5",
    "--device cuda:99": "--device cuda:99 is not available here",
    "--device nonsense": "--device nonsense is not available here",
    "--resume": "--resume needs --logdir",
    "--resume --init-from gone.pt": "--init-from begins a new run: leave out --resume",
    "--configs debgu": "There is no preset debgu; there are ",
    "--num-envs many": "num-envs",
    "--no-such-flag 3": "no-such-flag",
    "--num-step 3": "num-step",
    "--lr-decay cubic": "--lr-decay",
    "nonsense": "nonsense",
    "play --episodes 0": "--episodes",
    "play --gif-fps 51": "--gif-fps",
}
FILES = {  # that are missing
    "--resume --logdir nowhere": "nowhere",
    "play --logdir nowhere": "nowhere",
    "play --checkpoint gone.pt": "gone.pt",
    "--init-from gone.pt": "gone.pt",
    "play": "--logdir",
}
OWN = {
    "ppo_continuous_mujoco": {
        "--gamma 1": "--average-reward-rate",
        "--hidden-sizes 0": "--hidden-sizes",
        "--hidden-sizes -3 64": "--hidden-sizes",
        "--log-std-init nan": "--log-std-init",
        "--num-envs 1 --num-steps 64 --num-minibatches 64": "one transition in each",
        "--env-id HalfCheeta-v5": "HalfCheetah",
        "--env-id Ant-v3": "gymnasium-robotics",
        "--env-id xyz": "`xyz` doesn't exist",
        "--env-id nowhere:Env-v0": "nowhere",
        "--env-id CartPole-v1": "docs/copying.md",
        "--env-id WholeNumbers-v0": "WholeNumbers-v0 is",
        "--env-id Dict-v0": "An observation of Dict-v0 is Dict",
        "--env-id Picture-v0": "Picture-v0 is",
    },
    "ppo_cage2_parallel": {
        "--workflow user": "--workflow",
        "--workflow user,user,defender,op_host,op_server": "--workflow",
        "--compliance-threshold 0.9": "--workflow",
        "--red-agent blue": "--red-agent",
        "--hidden-sizes 0": "--hidden-sizes",
        "--env-id CAGE3-v0": "--env-id",
        "search --n-workflows 121": "--n-workflows must be from 1 to 120",
        "search --judge-episodes 1": "--judge-episodes must be from 2",
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
}


def test_what_is_wrong_is_said_in_one_sentence(script: ModuleType, main: Main, tmp_path: Path) -> None:
    for flags, expected in (COMMON | FILES | OWN[domain(script)]).items():
        try:
            assert_refused(main(*flags.split()), expected)
        except Exception as error:
            raise AssertionError(f"{flags}: {error!r}") from error
        assert not list(tmp_path.iterdir()), flags  # no folder for a run that cannot start


@pytest.mark.parametrize(
    ("flags", "redirection", "code"), [("xyz", ">&-", 2), ("xyz", "| head -1", 2), ("InvertedPendulum-v5", ">&-", 0)]
)
def test_outputs_may_be_closed(continuous: ModuleType, tmp_path: Path, flags: str, redirection: str, code: int) -> None:
    command = f"{sys.executable} {continuous.__file__} --configs debug --num-envs 2 --total-timesteps 256 --logdir run"
    command = f"{command} --env-id {flags} {redirection}"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, text=True, capture_output=True,
                            env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)  # fmt: skip
    assert result.returncode == code
    assert "Traceback" not in result.stderr
    assert code > 0 or len(columns(tmp_path / "run")["global_step"]) == 2
