"""A bug in SubprocVecEnv would be noticed: each of these is planted in a copy, and a named test fails on it."""

from __future__ import annotations

import importlib
import inspect
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gymnasium.vector import AutoresetMode

from tests import test_subproc_faults, test_subproc_vec_env

ENVS = Path(__file__).resolve().parent.parent / "envs"

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.filterwarnings("ignore:.*WARN")]


class Bug(NamedTuple):
    file: str
    old: str
    new: str
    caught_by: Any
    arguments: dict[str, Any]  # a `tmp_path` is added where it is asked for


SYNC = {"env": test_subproc_vec_env.NoiseEnv, "mode": AutoresetMode.SAME_STEP}
RESTART = {"kind": "sigkill", "mode": AutoresetMode.SAME_STEP}
BUGS = {
    "an environment gets the action of its neighbour": Bug(
        "_subproc_worker.py",
        "lambda array: array[rows])",
        "lambda array: array[rows][::-1])",
        test_subproc_vec_env.test_equals_sync_vector_env_bit_for_bit,
        SYNC,
    ),
    "the final observation is the first one of the next episode": Bug(
        "_subproc_worker.py",
        "return first_observation, {**final, **reset_info}",
        'return first_observation, {**final, "final_obs": first_observation, **reset_info}',
        test_subproc_vec_env.test_equals_sync_vector_env_bit_for_bit,
        SYNC,
    ),
    "the episode of a lost worker comes back as terminated": Bug(
        "_subproc_worker.py",
        "self.truncations[slot] = 0.0, False, True",
        "self.truncations[slot] = 0.0, True, False",
        test_subproc_faults.test_a_lost_worker_is_replaced_and_only_its_episodes_end,
        RESTART,
    ),
    "a restored environment forgets that its reset is due": Bug(
        "_subproc_worker.py",
        'self.needs_reset[slot] = saved["needs_reset"]',
        "self.needs_reset[slot] = False",
        test_subproc_vec_env.test_a_restored_state_continues_bit_for_bit_with_another_number_of_workers,
        {"mode": AutoresetMode.NEXT_STEP},
    ),
}


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    """A copy of `envs`, importable as `envs_with_bug`."""
    folder = tmp_path / "envs_with_bug"
    shutil.copytree(ENVS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.glob("*.py"):
        path.write_text(path.read_text().replace("from envs", "from envs_with_bug"))
    sys.path.insert(0, str(tmp_path))
    yield folder
    sys.path.remove(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("envs_with_bug")]:
        del sys.modules[name]
    shutil.rmtree(folder)


@pytest.mark.parametrize("planted", [True, False], ids=["with the bug", "without"])
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(
    name: str, planted: bool, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = BUGS[name]
    source = (package / bug.file).read_text()
    assert source.count(bug.old) == 1
    (package / bug.file).write_text(source.replace(bug.old, bug.new) if planted else source)
    mutant = importlib.import_module("envs_with_bug.subproc_vec_env")
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(mutant.SubprocVecEnv(*args, **{"context": "fork", **kwargs}))
        return made[-1]

    for module in (test_subproc_vec_env, test_subproc_faults):
        monkeypatch.setattr(module, "SubprocVecEnv", make)
    wants_folder = "tmp_path" in inspect.signature(bug.caught_by).parameters
    arguments = {**bug.arguments, **({"tmp_path": tmp_path} if wants_folder else {})}
    try:
        if not planted:
            bug.caught_by(**arguments)
            return
        with pytest.raises(AssertionError):
            bug.caught_by(**arguments)
    finally:
        for envs in made:
            envs.close(terminate=True)
