"""What the three scripts share they say in the same words; what differs is the domain, and is listed here.

So `diff ppo_continuous_mujoco.py ppo_cage2_parallel.py` shows what the domain changes. These tests read the scripts
of the repository; a copy given by --script may change what it likes.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPTS = sorted(ROOT.glob("ppo_*.py"))

# Functions and classes of the same name that differ, and why they must.
DIFFERENT = {
    "RunArgs": "each domain has tasks and defaults of its own",
    "EnvironmentArgs": "each domain has environments of its own",
    "PPOArgs": "each domain has defaults, and a schedule or two, of its own",
    "Args": "each domain has limits of its own",
    "Agent": "pixels, robots and hosts; Gaussian and categorical policies",
    "Batch": "actions are clipped where they are real numbers",
    "make_env": "each domain has its own environments",
    "make_envs": "each domain has its own wrappers of vectors",
    "evaluate": "success, and games of several lengths, are measured differently",
    "train": "what is stored, logged and annealed",
    "load_policy": "robots' observations are normalised",
    "PlayArgs": "each domain shows something else",
    "play": "each domain shows something else",
    "main": "one script can search too",
}


@cache
def definitions() -> dict[str, dict[str, str]]:
    """name -> script -> source text, decorators included, of top-level functions and classes."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in SCRIPTS:
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[node.name][path.stem] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def shared_names() -> list[str]:
    return sorted(name for name, texts in definitions().items() if len(texts) > 1)


def test_there_are_three_scripts_and_much_that_they_share() -> None:
    assert [path.stem for path in SCRIPTS] == ["ppo_atari_mario", "ppo_cage2_parallel", "ppo_continuous_mujoco"]
    assert len([name for name in shared_names() if name not in DIFFERENT]) >= 13


@pytest.mark.parametrize("name", shared_names())
def test_the_same_name_is_the_same_text_unless_listed(name: str) -> None:
    texts = definitions()[name]
    if name in DIFFERENT:
        assert len(set(texts.values())) > 1, f"{name} is the same in {', '.join(texts)}: take it off DIFFERENT"
        return
    first, *others = texts
    for other in others:
        ours, theirs = texts[first].splitlines(), texts[other].splitlines()
        changed = [f"{a!r} / {b!r}" for a, b in zip(ours, theirs, strict=False) if a != b]
        assert texts[first] == texts[other], f"{name} of {first} and {other} differ, first in {changed[:1]}"


def test_the_updates_of_the_loops_are_one_text() -> None:
    """From the batch to its metrics, but for what a domain adds: so what tests see of one loop holds for all."""
    own = {"loss_args": "args", "args.num_minibatches": "num_minibatches"}
    sections = []
    for text in definitions()["train"].values():
        section = text[text.index("# --- update") : text.index("# --- evaluate")]
        for ours, common in own.items():
            section = section.replace(ours, common)
        lines = [line for line in section.splitlines() if not re.search("set_num_threads|minibatch_updates", line)]
        sections.append(lines)
    assert sections[0] == sections[1] == sections[2]


def test_the_list_of_differences_names_only_what_is_shared() -> None:
    assert set(DIFFERENT) <= set(shared_names())


def imports_of(path: Path) -> set[str]:
    """All modules that a file imports, wherever the import stands; relative ones from their package."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(path.relative_to(ROOT).parts[: -node.level]) if node.level else ""
            modules.add(".".join(part for part in (base, node.module) if part))
    return modules


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_environments_and_packages_but_no_other_script(path: Path) -> None:
    tops = {module.partition(".")[0] for module in imports_of(path)}
    assert not tops & ({script.stem for script in SCRIPTS} | {"tests", "benchmarks", "docs"})
    assert "envs" in tops
    assert "torch" in tops


@pytest.mark.parametrize("path", sorted(ROOT.glob("envs/**/*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_environments_import_neither_torch_nor_scripts(path: Path) -> None:
    tops = {module.partition(".")[0] for module in imports_of(path)}
    assert not tops & {"torch", "tests", "benchmarks", "docs", *(script.stem for script in SCRIPTS)}
