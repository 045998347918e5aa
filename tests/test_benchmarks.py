"""benchmarks/common.py, and (slow) the quick form of every benchmark: what `make bench` runs, checked."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ppo_atari_mario
from benchmarks import arguments, common, compare, mario_learning, mujoco_learning
from tests.conftest import ROOT

BENCHMARKS = re.findall(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()


def test_candidates_take_turns_and_each_comes_first() -> None:
    order: list[str] = []

    def candidate(name: str) -> float:
        order.append(name)
        return float(len(order))

    figures = common.interleave({name: lambda name=name: candidate(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert figures == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_busy_round_does_not_move_the_ratio() -> None:
    assert common.median_ratio([100, 10, 102], [50, 5, 51]) == 2
    assert common.median_ratio([100, 10, 90], [50, 5, 10]) == 2  # the ratio of the medians is 9, of the sums 3.1


def test_a_measurement_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'no such stepper'"):
        common.in_fresh_process("scaling", "no such stepper", 1, 0, 0.1)


def test_a_measurement_comes_back_from_its_process() -> None:
    assert common.in_fresh_process("scaling", "Cage2VecEnv", 4, 0, 0.05)["steps_per_cpu_second"] > 1000


def test_the_foot_of_a_page_names_commit_versions_and_load() -> None:
    info = common.machine_info(["numpy", "no-such-package"])
    line = common.machine_line(info)
    assert f"numpy {info['packages']['numpy']};" in line
    assert "no-such-package" not in line
    assert f"commit {info['commit']}" in line
    assert f"load average {info['load_average'][0]} before, {info['load_average_after'][0]} after" in line


def test_a_page_of_what_was_measured_earlier_says_nothing_about_the_load() -> None:
    line = common.machine_line(common.machine_info(["numpy"]), "Page written")
    assert line.startswith("Page written 2")
    assert "load" not in line


def test_a_run_of_other_arguments_than_todays_is_set_aside(tmp_path: Path) -> None:
    words = ["ppo_atari_mario.py", "--ent-coef", "0.02"]
    args = ppo_atari_mario.parse_args(words[1:])
    # what a resumed run may change, the seed and the CPU make no other run
    of_another_machine = {"seed": 7, "num_workers": 5, "amp": not args.amp, "logdir": "elsewhere"}

    def store(name: str, **values: Any) -> Path:
        logdir = tmp_path / name
        logdir.mkdir()
        (logdir / "config.json").write_text(json.dumps({"args": dataclasses.asdict(args) | values}))
        arguments.set_aside_if_changed(ppo_atari_mario, words, logdir)
        return logdir

    assert arguments.is_current(ppo_atari_mario, words, store("same", **of_another_machine))
    for name, value in {"gamma": 0.9, "total_timesteps": 20_000, "ent_coef": 0.01}.items():
        assert not store(name, **{name: value}).exists()
        assert len(list(tmp_path.glob(f"{name}.old-*/config.json"))) == 1
    arguments.set_aside_if_changed(ppo_atari_mario, words, tmp_path / "nowhere")
    assert not arguments.is_current(ppo_atari_mario, words, tmp_path / "nowhere")


def test_a_run_that_was_set_aside_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mario_learning, "FOLDER", tmp_path)
    logdir = tmp_path / "Mario-1-1-fceumm-default-1"
    logdir.mkdir()
    values = dataclasses.asdict(ppo_atari_mario.Args(backend="fceumm", gamma=0.9))
    (logdir / "config.json").write_text(json.dumps({"args": values}))
    (logdir / "evaluation.json").touch()
    words = mario_learning.command("Mario-1-1", "fceumm", "default")
    arguments.set_aside_if_changed(ppo_atari_mario, words, logdir)
    assert not logdir.exists()
    mario_learning.report(tmp_path)
    assert json.loads((tmp_path / "mario_learning.json").read_text())["groups"] == {}


def test_stored_seeds_of_other_defaults_than_todays_are_dropped() -> None:
    command = "python " + " ".join(mario_learning.command("Mario-1-1", "fceumm", "default"))
    args = arguments.args_of_command(ppo_atari_mario, command.split()[1:])
    assert {"ent_coef", "gamma"} <= args.keys()
    groups = {
        "not noted": {"command": command},
        "the same": {"command": command, "args": args},
        "one more": {"command": command, "args": args | {"since_removed": 1}},
        "another": {"command": command, "args": args | {"gamma": 0.5}},
    }
    kept = mario_learning.todays(groups)
    assert [*kept] == ["not noted", "the same", "one more"]
    assert kept["not noted"]["args"] == args


def test_a_length_of_time_is_positive() -> None:
    assert common.positive_seconds("0.5") == 0.5
    for text in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"not {text}"):
            common.positive_seconds(text)


def test_evaluations_are_spread_over_the_minutes_of_a_run() -> None:
    run = {"seconds": 240.0, "evaluations": {"global_step": [500.0, 1000.0, 2000.0]}}
    assert mujoco_learning.minutes_of(run).tolist() == [1.0, 2.0, 4.0]


def test_sb3s_runs_outlive_a_change_of_our_presets_but_none_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mujoco_learning, "FOLDER", tmp_path)
    curve = {"global_step": [1000.0], "mean_return": [5.0], "std_return": [0.0]}
    run = {"seconds": 1.0, "cpu_seconds": 1.0, "cpu": "a CPU", "evaluations": curve}
    peers = {"1": run, "2": run | {"options": {"gamma": 0.5}}}
    stored = {"Hopper-v5": {"args": {"ent_coef": -1}, "seeds": {"1": run}, "sb3_seeds": peers}}
    path = tmp_path / "mujoco_learning_1k.json"
    path.write_text(json.dumps({"tasks": stored}))
    mujoco_learning.report(1000, tmp_path)
    kept = json.loads(path.read_text())["tasks"]["Hopper-v5"]
    assert (kept["seeds"], list(kept["sb3_seeds"])) == ({}, ["1"])


def assert_can_be_compared(rows: list[dict[str, Any]]) -> None:
    """`compare` finds no loss between rows (their medians, without the noise of few rounds) and themselves, and finds
    one in each of ours that is halved."""
    steady = {"rows": [row | {"rounds": [statistics.median(row["rounds"])] * 2} for row in rows]}
    halved = {"rows": [row if row["peer"] else row | {"rounds": [x / 2 for x in row["rounds"]]}
                       for row in steady["rows"]]}  # fmt: skip
    assert not any(row["regressed"] for row in compare.compare(steady, steady, 0.9))
    assert all(row["regressed"] for row in compare.compare(steady, halved, 0.9))


@pytest.mark.parametrize("name", ["cage2", "cage2_loop", "distributed", "mario_loop", "mujoco_loop",
                                  "scaling", "vec_env"])  # fmt: skip
def test_stored_results_can_be_compared(name: str) -> None:
    assert_can_be_compared(compare.load(common.RESULTS / f"{name}.json")["rows"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_quick_form_of_every_benchmark(name: str) -> None:
    """It ends, prints a table, and writes results, which can be compared where there are peers."""
    pytest.importorskip("stable_baselines3", reason="the peers are the extra `bench`: make bench installs them")
    started = time.time()
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| --- |" in done.stdout
    written = [page for page in common.QUICK_RESULTS.rglob("*.md") if page.stat().st_mtime >= started]
    assert written
    for page in written:
        data = json.loads(page.with_suffix(".json").read_text())
        assert data["machine"]["load_average_after"]
        if any(row["peer"] for row in data.get("rows", [])):
            assert_can_be_compared(data["rows"])
