"""benchmarks/: fair rounds, pages, curves, seeds and their statistics; numbers by hand. With -m slow every --quick.
Each checkpoint of zoo/ plays as its row says it does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import cage2_workflows, common, curves, learning, loop, scaling, speed, stepping, zoo
from envs.cage2.workflow import parse_workflow
from envs.mario import available_backends
from tests.conftest import ROOT, load_script, python

BENCHMARKS = re.findall(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
LEARNING = ("mujoco_learning_1000k", "mujoco_learning_3000k", "mario_learning", "cage2_learning", "continuing")
CHECKPOINTS = sorted(ROOT.glob("zoo/*.pt"))


# ---- common ---------------------------------------------------------------------------------------------------------
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


def test_a_measurement_comes_back_from_its_process_or_says_why_not() -> None:
    arguments: dict[str, Any] = {"num_envs": 4, "workers": 0, "seconds": 0.05}
    found = common.in_fresh_process(scaling.measure, kind="Cage2VecEnv", **arguments)
    assert found["steps_per_cpu_second"] > 1000
    assert 10 < found["memory_mib"] < found["peak_mib"]
    with pytest.raises(KeyError, match="no such stepper"):
        common.in_fresh_process(scaling.measure, kind="no such stepper", **arguments)


def test_a_page_keeps_the_groups_that_were_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    for group, rounds in (("one", [8.0, 4.0, 30.0]), ("two", [3.0, 3.0, 3.0]), ("one", [4.0, 6.0, 50.0])):
        figures = {"ours": rounds, "peer": [2.0, 2.0, 10.0]}
        common.publish("page", "Title", group, figures, ["peer", "absent"], common.machine_info(), False, "A note.")
    page = (tmp_path / "page.md").read_text()
    assert re.findall("^## (.*)", page, re.MULTILINE) == ["one", "two"]
    assert page.count("| ours | 6 | 4 - 50 | 3.00 |") == 1  # ratios 2, 3 and 5
    assert page.count("| ours | 3 | 3 - 3 | 1.50 |") == 1
    assert page.count("A note. 3 rounds, `python -m benchmarks.") == 2
    assert f"commit {common.commit_of(ROOT)}" in page


def test_a_script_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="--num-envs"):
        common.train("ppo_continuous_mujoco.py", ["--num-envs", "0.5"])


# ---- stepping, scaling ----------------------------------------------------------------------------------------------
def test_steps_are_counted_over_all_environments() -> None:
    now = iter(range(100))
    for batch in (np.zeros(5, int), np.zeros((4, 3)), np.zeros(1, int)):
        steps: list[Any] = []
        rate = stepping.step_for(1.5, steps.append, [batch] * 7, clock=lambda: float(next(now)))
        assert (len(steps), rate) == (7, 7 * len(batch) / 2)  # a pass a second: 1.5 s are over after the second look


@pytest.mark.parametrize(("power", "exponent"), [(0.0, 1.0), (-0.5, 0.5), (1.0, 2.0)])
def test_growth_of_known_laws(power: float, exponent: float) -> None:
    """Cost per environment of N ** power: a step of all costs N ** (1 + power)."""
    counts = [1, 4, 16, 64, 256, 1024, 4096]
    fit = scaling.growth(counts, [1000 / count**power for count in counts])
    assert fit["exponent"] == pytest.approx(exponent)
    assert (fit["rise"] < scaling.TOLERANCE) == (power <= 0)
    if power > 0:
        assert (fit["rise"], fit["at"]) == (pytest.approx(4096), 4096)
    assert scaling.kib_per_environment([1, 4, 16], [50, 100, 101.5]) == pytest.approx(128)


# ---- curves ---------------------------------------------------------------------------------------------------------
def write_run(folder: Path, y: list[float], seed: int = 1, **args: Any) -> Path:
    """A run with a batch of 600 steps at 10 steps/s: a minute an update."""
    folder.mkdir(parents=True)
    rows = "".join(f"{600 * (i + 1)},{value},10\n" for i, value in enumerate(y))
    (folder / "progress.csv").write_text(f"global_step,eval/mean_return,time/sps\n{rows}")
    (folder / "config.json").write_text(json.dumps({"args": {"env_id": "A", "seed": seed, **args}}))
    return folder


def test_curves_by_hand(tmp_path: Path) -> None:
    nan = float("nan")
    one = curves.read_curve(write_run(tmp_path / "1", [nan, 2, nan, 4]), "eval/mean_return")
    assert [one[key].tolist() for key in ("steps", "minutes", "y")] == [[1200, 2400], [2, 4], [2, 4]]
    smooth = curves.read_curve(write_run(tmp_path / "2", [1, 3, 6, 8, 10]), "eval/mean_return", smooth=1200)
    assert smooth["steps"].tolist() == [600, 1800, 3000]  # those below 1200, from there below 2400, the rest
    assert smooth["y"].tolist() == [1, 4.5, 9]
    where, mean, deviation = curves.together([one, one | {"y": one["y"] + 2, "minutes": one["minutes"] * 3}], "minutes")
    assert [x.tolist() for x in (where, mean, deviation)] == [[4, 8], [3, 5], [2**0.5] * 2]


def test_curves_are_drawn_and_mistakes_get_a_sentence(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{name}_{seed}", [1, 2, 3], seed, gamma=gamma)
            for name, gamma in (("a", 0.9), ("b", 0.8)) for seed in (1, 2)]  # fmt: skip
    assert curves.settings_of(runs) == {"gamma 0.9": runs[:2], "gamma 0.8": runs[2:]}
    assert list(curves.settings_of([runs[0], write_run(tmp_path / "sb3_7", [1], env_id="B")])) == ["A, gamma 0.9", "B"]

    def draw(*words: str) -> tuple[int, str]:
        done = python("-m", "benchmarks.curves", *runs, *words, "-o", tmp_path / "x/y.png")
        return done.returncode, done.stderr

    assert draw("--label", "a", "b")[0] == 0
    assert (tmp_path / "x/y.png").stat().st_size > 5_000
    columns = "eval/mean_return, global_step, time/sps"
    assert draw("-y", "eval/x") == (1, f"error: {runs[0]} has no column eval/x; it has {columns}.\n")
    assert draw("--label", "a") == (1, "error: There are 2 settings, but 1 names after --label.\n")


# ---- CAGE2's workflows ----------------------------------------------------------------------------------------------
def replayed(orders: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """The shape of a table of all orders, and each rule's mean regret after 20 look-ups."""
    truth, errors = (np.array([order[name] for order in orders]) for name in ("mean_return", "standard_error"))
    final = {}
    for rule in ("gp", "random"):
        regrets = np.array([cage2_workflows.replay(rule, seed, truth, errors) for seed in range(20)])
        assert regrets.min() >= 0
        assert (np.diff(regrets) <= 0).all()  # what looks best is best
        final[rule] = regrets[:, -1].mean()
    return cage2_workflows.landscape([order["workflow"] for order in orders], truth, errors), final


def test_rules_replayed_in_a_table_with_structure_have_its_regrets() -> None:
    shape, final = replayed(json.loads((ROOT / "tests/data/workflow_returns.json").read_text()))
    assert (round(shape["explained by six"], 2), round(shape["sd"], 2)) == (0.32, 0.30)
    assert final["gp"] < 0.6 * final["random"]


def test_the_stored_tables_have_the_shapes_of_their_page() -> None:
    searches = json.loads((ROOT / "results/cage2_workflows.json").read_text())["searches"]
    for search in searches[:2]:  # of all orders
        shape, _ = replayed(sorted(search["history"], key=lambda order: parse_workflow(order["workflow"])))
        row = " | ".join(f"{value:.2f}" for value in shape.values())
        assert row in (ROOT / "results/cage2_workflows.md").read_text()


# ---- learning: statistics -------------------------------------------------------------------------------------------
def test_statistics_against_known_values() -> None:
    for values, expected in (([0, 1, 2, 3, 4, 5, 6, 100], 3.5), ([1, 2, 6], 3), ([1, 2, 6, 100, -5], 3)):
        assert learning.interquartile_mean(np.array(values, dtype=float)) == expected
    # resamples of (0, 1) have means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4: the 2.5 % points are 0 and 1
    assert learning.interval(np.array([0.0, 1.0])) == (0, 1)
    assert learning.interval(np.array([3.0])) is None
    assert learning.cells_of(np.array([1.0, 3.0])) == ["1, 3", "2 ± 1.41", "2 (1 to 3)"]
    assert learning.cells_of(np.array([1.0, 2, 6, 100, -5])) == ["1, 2, 6, 100.0, -5", "20.8 ± 44.4", "3 (-3 to 68.7)"]


@pytest.mark.parametrize("name", [*LEARNING, "mario_stages", "speed"])
def test_a_stored_page_is_what_its_figures_give(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{name}.json").write_bytes((ROOT / f"results/{name}.json").read_bytes())
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    if name in LEARNING:
        learning.report(name, learning.SUITES[name.partition("_")[0]], [], False)
    elif name == "mario_stages":
        zoo.write_stages([], learning.STAGES, episodes=100)
    else:
        speed.write_page(common.stored(name, False)["results"], False)
    pages = ((folder / f"{name}.md").read_text() for folder in (tmp_path, ROOT / "results"))
    made, stored = (re.findall(r"^(?:\||At 90).*", page, re.MULTILINE) for page in pages)
    assert made == stored


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered = [low < 0 < high for low, high in (learning.interval(rng.normal(size=20), 500) for _ in range(200))]  # type: ignore[misc]
    assert 0.86 < np.mean(covered) < 0.99


def test_every_command_of_the_suites_and_settings_of_the_loops_can_be_typed() -> None:
    commands = [command.split() for suite in learning.SUITES.values() for command in suite.settings.values()]
    commands += [["ppo_atari_mario.py", *loop.MARIO_FLAGS.split()]]
    commands += [[script, *flags.split()] for script, flags, _, _ in speed.SETTINGS.values()]
    scripts: dict[str, Any] = {name: load_script(ROOT / name) for name, *_ in commands if name.startswith("ppo_")}
    for name, *words in commands:
        if name in scripts and "fceumm" not in words:
            scripts[name].parse_args(words)


# ---- learning: running ----------------------------------------------------------------------------------------------
STAND_IN = """
import json, os, signal, sys, time
from types import SimpleNamespace as PlayArgs
def load(path): return {"args": {"env_id": "A"}}
def play(options):
    reached = float(open(f"{options.logdir}/latest.pt").read()) - (options.checkpoint == "best")
    for i in range(options.episodes):
        print(f"episode {i + 1}: return {reached + i}, 10 steps")
if __name__ == "__main__":
    flags = dict(zip(sys.argv, sys.argv[1:]))
    logdir, seed = flags["--logdir"], flags.get("--seed")
    if "--wrong" in sys.argv:
        sys.exit("error: --wrong is wrong.")
    stop = []
    signal.signal(signal.SIGINT, lambda number, frame: stop.append(number))
    step = int(float(open(f"{logdir}/latest.pt").read())) if "--resume" in sys.argv else 0
    if not step:
        json.dump({"args": {}, "commit": "0123456789"}, open(f"{logdir}/config.json", "w"))
        open(f"{logdir}/progress.csv", "w").write("global_step,eval/mean_return,time/sps\\n")
    while step < 80 and not stop:
        step += 20
        open(f"{logdir}/progress.csv", "a").write(f"{step},{step},1\\n")
        for name, n in (("latest", step), ("best", step - 1)): open(f"{logdir}/{name}.pt", "w").write(str(n))
        until = time.monotonic() + float(os.environ.get("DELAY", 0))
        while time.monotonic() < until and not stop:
            time.sleep(0.01)
    sys.exit(128 + stop[0] if stop else 0)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs benchmarks.learning in this process, with runs and results below tmp_path; returns exit code and page."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(learning, "FOLDER", tmp_path / "runs")
    monkeypatch.setattr(common, "RESULTS", tmp_path)

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code = learning.main(["--name", "x", *words])
        path = tmp_path / "x_learning.json"
        return code, json.loads(path.read_text())["settings"] if path.exists() else {}

    return run


def test_runs_are_cut_resumed_judged_and_not_repeated(tmp_path: Path, program: Any) -> None:
    command = f"{tmp_path / 'stand_in.py'} --flag x"
    code = f"""if True:
        from pathlib import Path
        from benchmarks import learning
        learning.FOLDER = Path({str(tmp_path / "runs")!r})
        raise SystemExit(learning.main("--name x --seeds 1 2 --parallel 2 -- {command}".split()))
    """
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"DELAY": "30"})
    deadline = time.monotonic() + 60
    while len(cut := list((tmp_path / "runs").rglob("latest.pt"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # the handlers of the runs stand
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert [path.read_text() for path in cut] == ["20", "20"]
    code, settings = program("--seeds", "1", "2", "--", *command.split())
    assert code == 0
    seeds = settings[f"x, {command}"]["seeds"]
    assert list(seeds) == ["1", "2"]
    assert seeds["1"]["curve"] == {"steps": [20, 40, 60, 80], "minutes": [0.333333, 0.666667, 1, 1.33333],
                                   "y": [20, 40, 60, 80]}  # fmt: skip
    assert seeds["2"]["last"] == {"return": 80 + 49.5, "LTA": 12.95}
    assert seeds["2"]["best"]["return"] == 79 + 49.5
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("output.txt")}
    code, settings = program("--seeds", "2", "3", "--", *command.split())
    assert (code, list(settings[f"x, {command}"]["seeds"])) == (0, ["1", "2", "3"])
    assert all(path.stat().st_mtime_ns == modified for path, modified in times.items())
    page = (tmp_path / "x_learning.md").read_text()
    assert "| return | last | 129.5, 129.5, 129.5 | 129.5 ± 0 | 129.5 (129.5 to 129.5) |" in page
    assert re.search(r"\| 1, 2, 3 \| [0-9a-f]{7}\+? \| 1\.3 \(1\.3 to 1\.3\) \|", page)  # the commit, + if changed


def test_failed_runs_are_named_others_dropped(tmp_path: Path, program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(tmp_path / "stand_in.py")
    assert program("--seeds", "1", "2", "--", script, "--wrong")[0] == 1
    error = f"error: x, {script} --wrong, seed 1, ended with exit code 1: error: --wrong is wrong.\n"
    assert capsys.readouterr().err == error
    run = learning.Run("a", f"{script} --x 1", 5, tmp_path / "runs" / "5")
    assert learning.run_all([run], 1) == 0
    suite = learning.Suite({"a": ""})
    learning.report("page", suite, [run], False)
    other = learning.Run("a", f"{script} --x 2", 6, run.logdir)
    with pytest.raises(learning.RunFailed, match=f"5 holds a run of another command, {script} --x 1: delete it"):
        learning.run_all([other], 1)
    (run.logdir / "launches.json").unlink()
    learning.report("page", suite, [other], False)
    assert list(json.loads((tmp_path / "page.json").read_text())["settings"]["a"]["seeds"]) == ["6"]


def test_settings_are_named_by_their_task_or_their_line_and_have_folders_of_their_own() -> None:
    names = [name for suite in learning.SUITES.values() for name in suite.settings]
    for only, expected in {
        "Humanoid": ["Humanoid-v5, ours", "Humanoid-v5, wide", "Humanoid-v5, SB3", "Humanoid-v5, cleanrl"],
        "4-1": ["Mario-4-1, fceumm", "Mario-4-1, landed", "Mario-4-1, nes_py"],
        "head": ["CAGE2, head"],
        "4": [],
    }.items():
        assert [name for name in names if learning.is_meant(name, only)] == expected
    assert len({learning.slug(name) for name in names}) == len(names)
    long = "python " + "--flag " * 30
    assert learning.slug(f"{long} 1") != learning.slug(f"{long} 2")
    assert len(learning.slug(f"{long} 1")) <= 120


SLOW = (pytest.mark.slow, pytest.mark.timeout(1800))


@pytest.mark.parametrize("words", ["stepping cage2", *(pytest.param(name, marks=SLOW) for name in BENCHMARKS)])
def test_the_quick_form_of_every_benchmark(words: str) -> None:
    """It ends, prints a table, and writes pages and their JSON."""
    if words in BENCHMARKS:
        pytest.importorskip("stable_baselines3", reason="the peers are the extra `bench`: make bench installs them")
    started = time.time()
    command = [sys.executable, "-m", *f"benchmarks.{words} --quick".split()]  # longer than two minutes
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| --- |" in done.stdout
    written = [page for page in common.QUICK_RESULTS.rglob("*.md") if page.stat().st_mtime >= started]
    assert written
    assert all(json.loads(page.with_suffix(".json").read_text()) for page in written)


# ---- zoo ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_a_checkpoint_plays_as_its_row_says(path: Path) -> None:
    """And it holds only what `play` needs."""
    row = json.loads(path.with_suffix(".json").read_text())
    assert load_script(ROOT / f"{row['script']}.py").load(path).keys() <= {"format", "args", "agent", "statistics"}
    if row["script"] == "ppo_atari_mario" and "fceumm" not in available_backends():
        pytest.skip("it has learnt on FCEUmm: make fceumm")
    ten = zoo.score(path, row["script"], 10)["mean_return"]  # of the 100 in the row: no others, so the bound is narrow
    assert abs(ten - row["mean_return"]) < 1.5 * row["std_return"] + 1


def test_the_table_has_a_row_for_each_and_all_are_small() -> None:
    page = (ROOT / "zoo/README.md").read_text()
    assert page == zoo.make_page()
    assert re.findall(r"^\| `(.*)\.pt` \|", page, re.MULTILINE) == [path.stem for path in CHECKPOINTS]
    assert sum(path.stat().st_size for path in CHECKPOINTS) < 40e6


@pytest.mark.skipif("fceumm" not in available_backends(), reason="they have learnt on FCEUmm: make fceumm")
def test_the_table_of_stages_marks_what_a_net_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "QUICK_RESULTS", tmp_path)
    zoo.write_stages([ROOT / "zoo" / "Mario-1-1.pt"], ("1-1", "8-1"), episodes=5)
    page = (tmp_path / "mario_stages.md").read_text()
    flags = json.loads((tmp_path / "mario_stages.json").read_text())["flags"]["Mario-1-1"]
    assert flags["1-1"] >= 2  # it has learnt this stage, and of the other one nothing
    assert flags["8-1"] == 0
    assert f"| 1-1 | Mario-1-1 **{flags['1-1']}** | none |" in page
    assert "| 8-1 | none | none |" in page
