"""The documentation says nothing that the code does not: names, tags, links, flags, commands and figures of README.md
and docs/ are compared with the code, numbers of the figures with docs/figures/numbers.json, and the returns and scores
of trained runs with results/*.json. Other numbers are not compared."""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
import statistics
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import pytest
import torch
import torch.distributed.run

from docs import exercises, figures
from docs import reinforce as corridor
from tests.conftest import ROOT, load_script, make_sample, python
from tests.test_ppo_math import column, gae

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [*sorted(DOCS.glob("*.md")), README]
SCRIPTS = ["ppo_continuous_mujoco.py", "ppo_cage2_parallel.py", "ppo_atari_mario.py"]
TORCHRUN = Path(str(torch.distributed.run.__file__))
NUMBERS: dict[str, dict[str, str]] = json.loads((DOCS / "figures" / "numbers.json").read_text())
BENCHMARKS = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def text_of(page: Path) -> str:
    return page.read_text()


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


@cache
def results(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


# ---- what a page names ----------------------------------------------------------------------------------------------
@cache
def definitions(path: Path) -> set[str]:
    """Names of all functions and classes of a file, and Class.method of its methods."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return names


@cache
def flags_of(path: Path) -> set[str]:
    """The flags of a script: fields of its argument dataclasses, or literal "--flags" of an argparse program."""
    text = path.read_text()
    flags = set(re.findall(r'"(--[a-z][a-z0-9-]*)"', text)) | {"--help"}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    name = field.target.id.replace("_", "-")
                    flags |= {f"--{name}", f"--no-{name}"}
    return flags


PROGRAMS_OF_OURS = [*(ROOT / name for name in SCRIPTS), *DOCS.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
# kind of name: how a page cites it, where it can be defined, and what is defined elsewhere
NAMES: dict[str, tuple[str, Any, list[Path], set[str]]] = {
    "function": (r"`([A-Za-z_][\w.]*)\(\)`", definitions, [*PROGRAMS_OF_OURS, *(ROOT / "envs").rglob("*.py")], set()),
    "test": (r"`(test_\w+)`", definitions, [*(ROOT / "tests").glob("*.py")], set()),
    # defined elsewhere: pytest's and pip's
    "flag": (r"(?<![\w-])(--[a-z][a-z0-9-]+)", flags_of, [*PROGRAMS_OF_OURS, TORCHRUN], {"--script", "--no-deps"}),
}


@pages
@pytest.mark.parametrize("kind", NAMES)
def test_every_function_test_and_flag_that_a_page_names_exists(page: Path, kind: str) -> None:
    pattern, defined_in, files, known = NAMES[kind]
    known = known.union(*map(defined_in, files))
    cited = set(re.findall(pattern, text_of(page)))
    assert cited <= known, cited - known


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


@pages
def test_prose_is_at_most_120_columns_wide(page: Path) -> None:
    """As the code is; commands, tables, formulas and pictures are as long as they must."""
    lines = [line for line in without_code(page).splitlines() if not line.startswith(("|", "$$", "!["))]
    assert [line for line in lines if len(line) > 120] == []


def test_every_metric_of_a_script_is_explained_and_none_that_is_gone() -> None:
    """Names are read off the scripts: "group/name" in the record of an update, and the keys of the loss's metrics."""
    logged: set[str] = set()
    for script in SCRIPTS:
        text = (ROOT / script).read_text()
        logged |= set(re.findall(r'"((?:train|rollout|eval|counters|time)/\w+)"', text))
        (counters,) = re.findall(r"counters/\{x\}.* for x in (\(.*?\))", text)
        logged |= {f"counters/{name}" for name in re.findall(r'"(\w+)"', counters)}
        (losses,) = re.findall(r"    metrics = \{(.*?)\n    \}", text, re.DOTALL)
        logged |= {f"train/{name}" for name in re.findall(r'^\s+"(\w+)":', losses, re.MULTILINE)}
    explained = set(re.findall(r"^\| `([a-z]+/\w+)`", text_of(DOCS / "metrics.md"), re.MULTILINE))
    assert logged <= explained, logged - explained
    others = {"train/grad_norm", "eval/mean_return", "eval/std_return", "eval/mean_length"}  # made in other ways
    assert explained <= logged | others, explained - logged


# ---- the 37 details -------------------------------------------------------------------------------------------------
def tagged_details(path: Path) -> set[tuple[int, str]]:
    """(detail number, innermost function or class) of every "detail N" of a script."""
    lines = path.read_text().splitlines()
    owner = [""] * (len(lines) + 1)
    for node in ast.walk(ast.parse(path.read_text())):  # the outer ones first
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                for number in range(first, (child.end_lineno or first) + 1):
                    owner[number] = f"{node.name}.{child.name}" if isinstance(node, ast.ClassDef) else child.name
    return {(int(detail), owner[number])
            for number, line in enumerate(lines, 1)
            for details in re.findall(r"\bdetails? (\d+(?:(?:, | and )\d+)*)", line)
            for detail in re.findall(r"\d+", details)}  # fmt: skip


def detail_rows() -> dict[int, list[str]]:
    """The rows of docs/details.md by number: the cells of the three scripts, in the order of SCRIPTS."""
    rows = re.findall(r"^\| (\d+) \| [^|]+\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text_of(DOCS / "details.md"), re.M)
    return {int(number): cells for number, *cells in rows}


def test_all_37_details_are_used_or_say_why_not() -> None:
    assert list(detail_rows()) == list(range(1, 38))
    for number, cells in detail_rows().items():
        for cell in cells:
            assert re.search(r"`[\w.-]+(\(\))?`", cell) or re.fullmatch(r"not used: .{5,}", cell), (number, cell)


@pytest.mark.parametrize("column", range(3), ids=SCRIPTS)
def test_tags_in_the_script_and_bold_names_in_the_table_are_the_same(column: int) -> None:
    bold = r"\*\*`([\w.]+)(?:\(\))?`\*\*"
    listed = {(number, name) for number, cells in detail_rows().items() for name in re.findall(bold, cells[column])}
    files = [ROOT / SCRIPTS[column]] + [ROOT / "envs" / "atari.py"] * ("atari" in SCRIPTS[column])
    assert listed == set().union(*map(tagged_details, files))


# ---- commands -------------------------------------------------------------------------------------------------------
PROGRAMS = "python|pytest|make|torchrun|cp|diff|pip|tensorboard"
COPIES = {"my_copy.py", "my_idea.py"}  # of the first script, as the pages call them


def commands(page: Path) -> list[list[str]]:
    """The commands of a page: lines of its bash blocks, what follows a $ in its text blocks, and code in the text that
    begins like one. What stands after a `--` is a command of its own (benchmarks.learning)."""
    text = text_of(page).replace("\\\n", " ")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL):
        lines += re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    lines += re.findall(rf"`((?:\.venv/bin/)?(?:{PROGRAMS}) [^`\n]+)`", text)
    found = []
    for line in lines:
        first, *others = line.partition("# ")[0].removeprefix(".venv/bin/").split(" -- ")
        found += [shlex.split(first), *(["python", *shlex.split(other)] for other in others)]
    return [command for command in found if command]


def flags_in(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pages
def test_every_command_of_a_page_can_be_typed(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(page):
        for word in command:
            if word.startswith(("results/", "tests/", "docs/", "envs/")):
                assert (ROOT / word).exists(), command
        match command:
            case ["make", target, *_]:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), command
            case ["python", "-m", "docs.figures", *names]:
                assert set(names) <= {"all", *(figure.__name__ for figure in figures.FIGURES)}, command
            case ["python", "-m", module, *words]:
                path = ROOT / f"{module.replace('.', '/')}.py"
                assert path.exists(), command
                assert flags_in(words) <= flags_of(path), command
            case ["torchrun", *words]:
                assert "my_copy.py" in words, command
                assert flags_in(words) <= set().union(*map(flags_of, [TORCHRUN, *PROGRAMS_OF_OURS])), command
            case ["python", file, *words] if file in {*SCRIPTS, *COPIES}:
                path = ROOT / (SCRIPTS[0] if file in COPIES else file)
                assert flags_in(words) <= flags_of(path), command
                assert not words or words[0].startswith("--") or f'"{words[0]}"' in path.read_text(), command
                if "--configs" in words:
                    named = " ".join(words[words.index("--configs") + 1 :]).partition(" --")[0].split()
                    assert set(named) <= set(load_script(path).PRESETS), command
            case ["pytest", *words]:
                assert flags_in(words) <= {"--script"}, command
            case ["cp", source, copy]:
                assert source in SCRIPTS, command
                assert copy in COPIES, command
            case ["diff", *files]:
                assert set(files) <= set(SCRIPTS), command
            case ["tensorboard" | "pip" | "git" | "cd" | "source", *_]:
                pass
            case _:
                pytest.fail(f"not a command that this test knows: {' '.join(command)}")


def test_the_program_that_plays_a_checkpoint_scores_as_play_does(tmp_path: Path) -> None:
    continuous = load_script(ROOT / "ppo_continuous_mujoco.py")
    continuous.train(continuous.preset("debug", total_timesteps=512, logdir=str(tmp_path / "run")))
    (program,) = re.findall(r"```python\n(.*?)```", text_of(DOCS / "mujoco.md"), re.DOTALL)
    done = python("-c", program.replace("runs/my_run", str(tmp_path / "run")))
    (played,) = continuous.play(continuous.PlayArgs(logdir=str(tmp_path / "run")))
    assert done.stdout == f"return {played:.1f}\n", done.stderr


def test_every_benchmark_is_listed_and_make_bench_runs_those_with_a_quick_form() -> None:
    programs = {name: text for name, text in BENCHMARKS.items() if '__name__ == "__main__"' in text}
    assert set(re.findall(r"python -m benchmarks\.(\w+)", text_of(DOCS / "benchmarks.md"))) == set(programs)
    (run,) = re.findall(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    quick = {name for name, text in programs.items() if '"--quick"' in text}
    assert set(run.split()) == quick - {"speed"}  # which needs another checkout


# ---- figures and numbers --------------------------------------------------------------------------------------------
FIGURES = [figure.__name__ for figure in figures.FIGURES]


def figures_of(page: Path) -> set[str]:
    """The figures that a page shows."""
    return set(re.findall(r"\((?:docs/)?figures/(\w+)\.(?:png|gif)\)", text_of(page)))


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_is_shown_with_its_command_and_its_numbers(figure: str) -> None:
    (path,) = (DOCS / "figures").glob(f"{figure}.*")
    assert path.stat().st_size < {".png": 120, ".gif": 600}[path.suffix] * 1024
    (text,) = (text_of(page) for page in PAGES if figure in figures_of(page))
    assert f"python -m docs.figures {figure}" in text
    for name, number in NUMBERS[figure].items():
        assert number in text, (name, number)


def test_every_picture_has_a_command() -> None:
    names = set(FIGURES)
    assert {path.stem for path in (DOCS / "figures").iterdir() if path.suffix != ".json"} == names
    for page in PAGES:
        assert figures_of(page) <= names, (page.name, figures_of(page) - names)


def assert_summarised(values: list[float], text: str) -> None:
    """The numbers of "5,825 ± 1,126 (5 seeds)" are mean, standard deviation and number of the values."""
    printed = re.match(r"(\S+) ± (\S+) (?:% )?\((\d+) seeds\)", text)
    assert printed is not None, text
    mean, deviation, seeds = printed.groups()
    for value, number in ((statistics.mean(values), mean), (statistics.stdev(values), deviation)):
        assert f"{value:,.{len(number.partition('.')[2])}f}" == number, text
    assert int(seeds) == len(values), text


def row_with(page: Path, label: str) -> list[str]:
    """The cells of the last row of a page's tables that begins with a label, without it."""
    rows = re.findall(rf"^\| {re.escape(label)}(?=[ ,])[^|]*\| (.*) \|$", text_of(page), re.MULTILINE)
    return [cell.strip() for cell in rows[-1].split("|")]


def test_returns_on_mujoco_are_those_measured() -> None:
    """Mean and deviation, and SB3's mean, in README.md."""
    in_readme = re.findall(r"^\| (\w+-v5)\b", text_of(README), re.MULTILINE)
    assert in_readme
    after_1m, after_3m = ({name: [run["last"]["return"] for run in setting["seeds"].values()]
                           for name, setting in results(f"mujoco_learning_{length}")["settings"].items()}
                          for length in ("1000k", "3000k"))  # fmt: skip
    for task in in_readme:
        ours, longer, others = row_with(README, task)[:3]
        ours, _, wide = ours.partition("; ")
        assert_summarised(after_1m[f"{task}, ours"], ours)
        for text, returns in ((wide, after_1m.get(f"{task}, wide")), (longer, after_3m.get(f"{task}, ours"))):
            assert bool(text) == (returns is not None), task
            if returns is not None:
                assert_summarised(returns, text)
        quoted = re.search(r"(\S+) \(SB3 here\)", others.replace("**", ""))
        assert quoted is None or quoted[1] == f"{statistics.mean(after_1m[f'{task}, SB3']):,.0f}", task


def test_scores_on_cage2_and_flags_on_mario_are_those_measured() -> None:
    seeds = results("cage2_learning")["settings"]["CAGE2, leaderboard"]["seeds"]
    scores = [run["last"]["score"] for run in seeds.values()]
    assert_summarised(scores, row_with(README, "CAGE 2, leaderboard rules")[0])
    flags = {name: {seed: 100 * run["last"]["flag, deterministic"] for seed, run in setting["seeds"].items()}
             for name, setting in results("mario_learning")["settings"].items()}  # fmt: skip
    assert_summarised([*flags["Mario-1-1, fceumm"].values()], row_with(README, "Mario 1-1")[0])
    assert_summarised([*flags["Mario-1-1,1-4,3-2,4-1, fceumm"].values()], row_with(README, "Mario, one network")[0])


def test_speeds_of_whole_loops_are_those_measured() -> None:
    """Each number of the table of README.md is a median of results/*_loop.json."""
    groups = [group for name in ("mujoco", "mario", "cage2") for group in results(f"{name}_loop")["groups"].values()]
    medians = {f"{statistics.median(rounds):,.0f}" for group in groups for rounds in group["rounds"].values()}
    table = text_of(README).partition("| loop |")[2].partition("\n## ")[0]
    printed = set(re.findall(r"\d[\d,]*\d", " ".join(re.findall(r"^\| [^|]*\|(.*)$", table, re.MULTILINE))))
    assert printed
    assert printed <= medians


def test_readme_is_short_and_knows_how_long_the_scripts_are() -> None:
    text = text_of(README)
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 1200
    for script in SCRIPTS:
        (lines,) = re.findall(rf"^\| \[`{script}`\].*\| (\d+) \|$", text, re.MULTILINE)
        assert int(lines) == pytest.approx(len((ROOT / script).read_text().splitlines()), rel=0.05)


def test_gradient_variances_are_those_printed() -> None:
    """Recomputed; and every estimate has the exact gradient for its mean, to within its own noise."""
    statistics = figures.gradient_statistics(torch.zeros(corridor.CELLS, 2))
    for kind, (variance, standard_errors) in statistics.items():
        assert variance == pytest.approx(float(NUMBERS["reinforce"][f"variance {kind}"]), rel=0.02)
        assert standard_errors < 2
    total, to_go, baseline, generalised = (variance for variance, _ in statistics.values())
    assert total > 2 * to_go > 10 * baseline > 14 * generalised


def test_exact_values_of_the_corridor() -> None:
    """Right for ever, from the middle, and what docs/ppo.md says about the uniform policy's gradient."""
    values = corridor.exact_values(torch.tensor([-30.0, 30.0]).expand(corridor.CELLS, 2))
    assert float(values[-2, 3]) == pytest.approx(0.9 * 4 / 6 + 0.1 * 2 / 6)  # one step to go
    assert f"{float(values[0, corridor.START]):.1f}" == NUMBERS["reinforce"]["best return"]
    uniform = torch.zeros(corridor.CELLS, 2)
    assert float(corridor.exact_values(uniform)[0, corridor.START]) == pytest.approx(10)  # by symmetry
    assert float(corridor.exact_gradient(uniform).square().sum()) == pytest.approx(20, abs=0.5)


def test_reinforce_learns_and_a_baseline_survives_a_large_step() -> None:
    returns = corridor.reinforce("baseline", learning_rate=1.0, num_updates=10)
    assert float(returns[0]) == pytest.approx(10)
    assert float(returns[-1]) > 18


def test_learned_values_are_those_printed() -> None:
    rules = [(False, False), (True, False), (False, True)]
    for rule, number in zip(rules, NUMBERS["time_limits"].values(), strict=True):
        assert figures.learned_value(*rule)[-1] == pytest.approx(float(number), abs=0.06)


def test_the_choice_that_a_time_limit_turns_round(script: ModuleType) -> None:
    """docs/time_limits.md: A pays 1 for ever, B nothing for five steps, then 2 for ever; a limit cuts after 8."""
    rewards = torch.tensor([[1.0, 0.0]] * 5 + [[1.0, 2.0]] * 3)
    zeros, cut = torch.zeros(8, 2), torch.zeros(8, 2, dtype=torch.bool)
    cut[-1] = True
    final = {(7, 0): 100.0, (7, 1): 200.0}
    right = gae(script, rewards, zeros, 0.0, 0.99, 1.0, truncations=cut, final_values=final)[1][0]
    wrong = gae(script, rewards, zeros, 0.0, 0.99, 1.0, terminations=cut)[1][0]
    torch.testing.assert_close(right, torch.tensor([100.0, 190.2]), rtol=0, atol=0.05)
    torch.testing.assert_close(wrong, torch.tensor([7.7, 5.6]), rtol=0, atol=0.05)


def test_small_numbers_of_the_pages() -> None:
    continuous, cage2 = (load_script(ROOT / name) for name in SCRIPTS[:2])

    def says(page: str, sentence: str) -> None:
        assert sentence in " ".join(text_of(DOCS / page).split())  # wherever the lines break

    says("ppo.md", "*negative* for $\\sigma$ below 0.242,")
    samples = [make_sample(continuous, log_std_init=math.log(sigma)) for sigma in (0.2415, 0.2425)]
    negative, positive = (float(x.agent.policy(x.obs).entropy().mean().detach()) for x in samples)
    assert negative < 0 < positive

    says("parallel.md", "residual has halved after 12 steps and falls below 1 % after 76.")
    residuals = column(*[0.0] * 99, 1.0)
    weights = gae(continuous, residuals, torch.zeros_like(residuals), 0.0, 0.99, 0.95)[0].flip(0)
    assert [int((weights > bound).sum()) for bound in (0.5, 0.01)] == [12, 76]

    says("metrics.md", "ln 36 = 3.58 for CAGE 2's reduced actions")
    actions = cage2.make_envs(cage2.Args(), 1).single_action_space.n
    assert (actions, round(math.log(actions), 2)) == (36, 3.58)

    says(
        "mujoco.md",
        "Ant has 105 observations and 8 actions, HalfCheetah 17 and 6, Humanoid 348 and 17, the latter bounded by ±0.4",
    )
    robots = [gym.make(f"{name}-v5") for name in ("Ant", "HalfCheetah", "Humanoid")]
    sizes = [(robot.observation_space.shape, robot.action_space.shape) for robot in robots]
    assert sizes == [((105,), (8,)), ((17,), (6,)), ((348,), (17,))]
    assert float(robots[2].action_space.high[0]) == pytest.approx(0.4)  # type: ignore[attr-defined]


# ---- exercises ------------------------------------------------------------------------------------------------------
def test_every_exercise_is_described_and_can_be_planted_and_none_gives_its_bug_away() -> None:
    text, healthy = text_of(DOCS / "exercises.md"), exercises.SCRIPT.read_text()
    described = re.findall(r"^\| (\d+) \| ", text, re.MULTILINE)
    assert [int(number) for number in described] == list(range(1, len(exercises.EXERCISES) + 1))
    assert len(set(exercises.EXERCISES)) == len(exercises.EXERCISES)
    for number, name in enumerate(exercises.EXERCISES, 1):
        planted, bug = exercises.plant(number), exercises.bug_of(number)
        compile(planted, "planted", "exec")
        assert planted != healthy
        assert name not in text
        assert bug.old not in text
        assert bug.new == "pass" or bug.new not in text
