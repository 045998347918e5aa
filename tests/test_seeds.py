"""benchmarks/seeds.py: what was killed goes on, what is finished is not repeated, and the numbers are the right ones.

Most tests run a stand-in for a script, of the same files and flags, whose updates, but for the first, take the seconds
in the environment variable DELAY.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import seeds
from tests.conftest import ROOT
from tests.test_subproc_faults import is_alive

STAND_IN = """
import json, os, signal, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2])) if "--resume" not in sys.argv else {"--logdir": sys.argv[3]}
if "--wrong" in flags:
    print("warming up\\nerror: --wrong is wrong.", flush=True)
    sys.exit(2)
logdir, step, stop = flags["--logdir"], 0, []
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda signum, frame: stop.append(signum))
config = f"{logdir}/config.json"
if "--resume" in sys.argv:
    args, step = json.load(open(config))["args"], int(open(f"{logdir}/latest.pt").read())
else:
    args = {"total_timesteps": 85, "num_envs": 2, "num_steps": 5, "seed": int(flags["--seed"])}
    json.dump({"args": args}, open(config, "w"))
    open(f"{logdir}/eval.csv", "w").write("global_step,eval/mean_return\\n")
    open(f"{logdir}/timing.csv", "w").write("global_step,time/seconds\\n")
print(f"begins at {step} in {os.getpid()}", flush=True)
while step < int(flags.get("--end", 80)) and not stop:
    until = time.monotonic() + float(os.environ.get("DELAY", 0)) * (step > 0)
    while time.monotonic() < until and not stop:
        time.sleep(0.01)
    step += 10
    open(f"{logdir}/timing.csv", "a").write(f"{step},{step * 6}\\n")
    if step % 20 == 0:
        score = step * args["seed"] if step < 80 else 100 * args["seed"]
        open(f"{logdir}/eval.csv", "a").write(f"{step},{score}\\n")
    open(f"{logdir}/latest.pt", "w").write(str(step))
if stop:
    time.sleep(0.2 * args["seed"])  # so that runs do not end together
sys.exit(128 + stop[0] if stop else 0)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: (exit code, standard output, standard error)."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = seeds.main(list(argv))
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def start(cwd: Path, *argv: str) -> subprocess.Popen[str]:
    """The command line as a process of its own, whose runs of the stand-in take half a minute."""
    line = [sys.executable, "-m", "benchmarks.seeds", *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DELAY": "5"}
    return subprocess.Popen(line, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def beginnings(logdir: Path) -> list[int]:
    """The steps at which a run of the stand-in began."""
    return [int(line.split()[2]) for line in (logdir / "output.txt").read_text().splitlines()]


def pid_of(logdir: Path) -> int:
    return int((logdir / "output.txt").read_text().split()[-1])


# ---- running --------------------------------------------------------------------------------------------------------


def test_a_run_that_ends_early_by_itself_is_finished_and_counts(
    stand_in: Path, tmp_path: Path, run_main: Callable[..., tuple[int, str, str]]
) -> None:
    """As with CAGE2's --compliance-threshold: else only the seeds that do not comply would be reported."""
    command = ["--seeds", "1", "2", "--folder", str(tmp_path / "runs"), "--", str(stand_in), "--end", "40"]
    assert run_main(*command)[0] == 0
    code, output, _ = run_main(*command)
    assert (code, "2 of 2 runs are finished." in output) == (0, True)
    assert "60" in output  # the mean of 40 and 80


def test_finished_runs_are_not_repeated_and_new_seeds_are_added(stand_in: Path, run_main: Callable) -> None:
    code, out, _ = run_main("--seeds", "1", "2", "--parallel", "2", "--folder", "runs", "--", "stand_in.py")
    assert code == 0
    assert "0 of 2 runs are finished" in out
    code, out, _ = run_main("--seeds", "1", "2", "4", "--folder", "runs", "--", "stand_in.py")
    assert code == 0
    assert "2 of 3 runs are finished" in out
    for seed in (1, 2, 4):
        assert beginnings(Path(f"runs/stand_in/seed_{seed}")) == [0]
    data = json.loads(Path("runs/stand_in.json").read_text())["commands"]["stand_in.py"]
    assert data["seeds"] == [1, 2, 4]
    assert data["final"]["scores"] == [100, 200, 400]
    assert data["final"]["mean"] == pytest.approx(700 / 3)
    assert data["curves"]["steps"][0] == [20, 40, 60, 80]
    assert data["curves"]["minutes"][0] == [2, 4, 6, 8]
    assert "3 seeds are few" in Path("runs/stand_in.md").read_text()
    assert Path("runs/stand_in.png").stat().st_size > 5_000


def test_seeds_of_different_settings_are_not_averaged(stand_in: Path, run_main: Callable) -> None:
    command = ["--folder", "runs", "--", "stand_in.py"]
    assert run_main("--seeds", "1", *command)[0] == 0
    config = Path("runs/stand_in/seed_1/config.json")
    config.write_text(config.read_text().replace('"num_steps": 5', '"num_steps": 10'))  # as before a change of presets
    code, _, err = run_main("--seeds", "1", "2", *command)
    assert code == 2
    assert "runs/stand_in/seed_1 was trained with num_steps 10, runs/stand_in/seed_2 with 5" in err


def test_two_commands_are_two_rows(stand_in: Path, run_main: Callable) -> None:
    commands = ["--", "stand_in.py", "--rate", "0.001", "--", "stand_in.py", "--rate", "-0"]
    assert run_main("--seeds", "3", "--folder", "runs", *commands)[0] == 0
    data = json.loads(Path("runs/stand_in_--rate_0.001_and_1_more.json").read_text())["commands"]
    assert list(data) == ["stand_in.py --rate 0.001", "stand_in.py --rate -0"]
    assert all(entry["final"]["scores"] == [300] for entry in data.values())
    assert all(entry["final"]["mean_interval"] is None for entry in data.values())
    assert "1 seed is few" in Path("runs/stand_in_--rate_0.001_and_1_more.md").read_text()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_and_the_same_command_goes_on(
    signum: int, stand_in: Path, tmp_path: Path, run_main: Callable
) -> None:
    arguments = ["--seeds", "1", "2", "3", "--parallel", "2", "--folder", "runs", "--", "stand_in.py"]
    folder = tmp_path / "runs" / "stand_in"
    process = start(tmp_path, *arguments)
    wait_for(lambda: all((folder / f"seed_{seed}" / "latest.pt").exists() for seed in (1, 2)))
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "repeat the command" in out
    assert not (folder / "seed_3").exists()
    for seed in (1, 2):
        assert not is_alive(pid_of(folder / f"seed_{seed}"))
    assert run_main(*arguments)[0] == 0
    for seed in (1, 2):
        first, second = beginnings(folder / f"seed_{seed}")
        assert (first, second % 10) == (0, 0)
        assert 10 <= second < 80
    data = json.loads((tmp_path / "runs" / "stand_in.json").read_text())["commands"]
    assert data["stand_in.py"]["final"]["scores"] == [100, 200, 300]


def test_a_run_whose_parent_was_killed_is_not_started_twice(stand_in: Path, tmp_path: Path, run_main: Callable) -> None:
    arguments = ["--seeds", "1", "--folder", "runs", "--", "stand_in.py"]
    folder = tmp_path / "runs" / "stand_in" / "seed_1"
    process = start(tmp_path, *arguments)
    wait_for(lambda: (folder / "latest.pt").exists())
    process.kill()
    process.communicate()
    code, _, err = run_main(*arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert "in use by another process" in err
    os.kill(pid_of(folder), signal.SIGKILL)
    wait_for(lambda: not is_alive(pid_of(folder)))
    assert run_main(*arguments)[0] == 0
    assert len(beginnings(folder)) == 2


def test_a_run_that_fails_is_named_and_stops_the_others(
    stand_in: Path, run_main: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAY", "5")
    commands = ["--", "stand_in.py", "--", "stand_in.py", "--wrong", "1"]
    began = time.monotonic()
    code, _, err = run_main("--seeds", "1", "2", "--parallel", "2", "--folder", "runs", *commands)
    assert code == 2
    assert err == "error: stand_in.py --wrong 1 --seed 1 ended with exit code 2: error: --wrong is wrong.\n"
    assert not is_alive(pid_of(Path("runs/stand_in/seed_1")))
    assert not Path("runs/stand_in/seed_2").exists()
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seeds", "1"], "Name a command after --, as in: "),
        (["--", "no_such.py"], "There is no script no_such.py here."),
        (["--", "stand_in.py", "--seed", "3"], "--seed is given to each run by this program; "),
        (["--", "stand_in.py", "--logdir=x"], "--logdir=x is given to each run by this program; "),
        (["--seeds", "1", "1", "--", "stand_in.py"], "--seeds must be different numbers of at least 0, not [1, 1]."),
        (["--parallel", "0", "--", "stand_in.py"], "--parallel must be at least 1, not 0."),
        (["--", "stand_in.py", "--", "stand_in.py"], "Two of the commands are the same."),
        (["--report", "--", "stand_in.py"], "No run is finished yet, so there is nothing to report."),
    ],
)
def test_a_mistake_gets_one_sentence(stand_in: Path, run_main: Callable, arguments: list[str], sentence: str) -> None:
    code, out, err = run_main(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1


def test_a_metric_that_does_not_exist_gets_the_list_of_those_that_do(stand_in: Path, run_main: Callable) -> None:
    code, _, err = run_main("--seeds", "1", "--folder", "runs", "--metric", "eval/x", "--", "stand_in.py")
    assert code == 2
    assert err.endswith("has no column eval/x; choose --metric from eval/mean_return.\n")


def test_different_commands_have_different_folders() -> None:
    commands = [["a.py", "--x", "1"], ["a.py", "--x", "-1"], ["a.py", "--x=1"], ["b/a.py", "--x", "1"],
                ["b_a.py", "--x", "1"], ["a.py", "--x", "1 2"], ["a.py", "--x", "1", "2"],
                ["a.py", "--x", "1" * 200], ["a.py", "--x", "1" * 201]]  # fmt: skip
    names = [seeds.slug(command) for command in commands]
    assert len(set(names)) == len(commands)
    assert all(len(name) <= 100 and "/" not in name for name in names)


# ---- a real script --------------------------------------------------------------------------------------------------


def test_a_killed_run_of_a_script_goes_on(tmp_path: Path, run_main: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = ["ppo_continuous_mujoco.py", "--configs", "debug", "--env-id", "TwoQueue-v0", "--num-workers", "1",
               "--total-timesteps", "20480", "--eval-every", "0"]  # fmt: skip
    logdir = tmp_path / seeds.slug(command) / "seed_1"
    process = start(ROOT, "--seeds", "1", "--folder", str(tmp_path), "--", *command)
    progress = logdir / "progress.csv"
    wait_for(lambda: progress.exists() and progress.read_text().count("\n") > 3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    reached = int(progress.read_text().splitlines()[-1].split(",")[0])
    assert reached < 20480, "the run was over before it could be stopped"
    assert run_main("--seeds", "1", "--folder", str(tmp_path), "--", *command)[0] == 0
    assert f"continuing after step {reached:,}" in (logdir / "output.txt").read_text()
    steps = [int(row.split(",")[0]) for row in progress.read_text().splitlines()[1:]]
    assert steps == list(range(256, 20481, 256))


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_statistics_against_known_values() -> None:
    scores = np.array([0.0, 1, 2, 3, 4, 5, 6, 100])
    found = seeds.statistics_of(scores)
    assert found["mean"] == 121 / 8
    assert found["interquartile_mean"] == 3.5  # of 2, 3, 4, 5: the outlier is gone
    assert seeds.statistics_of(np.array([1.0, 2, 6]))["interquartile_mean"] == 3  # fewer than four: the mean
    assert seeds.statistics_of(np.array([100.0, 0, 9, 2, 3, 5, 1, 10]))["interquartile_mean"] == (2 + 3 + 5 + 9) / 4
    assert seeds.statistics_of(np.array([1.0, 2, 6, 100, -5]))["interquartile_mean"] == 3  # one less on each side


def test_the_interval_of_two_seeds_is_known_exactly() -> None:
    """Resamples of (0, 1) have means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4: the 2.5 % points are 0 and 1."""
    assert seeds.interval(np.array([0.0, 1.0]), np.mean) == (0.0, 1.0)
    assert seeds.interval(np.array([3.0]), np.mean) is None


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Means of 20 normal draws: a percentile bootstrap covers about 93 % (it is known to be a little narrow)."""
    rng = np.random.default_rng(0)
    covered = [low < 0 < high for low, high in (seeds.interval(rng.normal(size=20), np.mean) for _ in range(200))]
    assert 0.86 < np.mean(covered) < 0.98
