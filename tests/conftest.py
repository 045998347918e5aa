"""Which scripts the tests run on, and how a test gets an agent, a loss or a short run of any of them.

    pytest                          # on every ppo_*.py of the repository
    pytest --script my_idea.py      # on a copy that you changed; repeat --script for more of them

A test that asks for `script` runs once per script and uses only what all scripts have: `compute_gae`, `ppo_loss`,
`normalize_advantages`, `explained_variance`, `Agent`, `Args`. A test that asks for `continuous` runs on
ppo_continuous_mujoco.py and its copies, which are known by what their checkpoints say (`FORMAT`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import tests.known_values  # noqa: F401  (registers KnownValues-v0, Target-v0 and Poison-v0)

ROOT = Path(__file__).resolve().parent.parent

# Equal runs give equal verdicts.
hypothesis.settings.register_profile("default", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("default")

# (observation space, action space) of one environment, as small as each script's agent allows.
SPACES: dict[str, tuple[Box, Box | Discrete]] = {
    "ppo_continuous_mujoco": (Box(-np.inf, np.inf, (4,), np.float32), Box(-1.0, 1.0, (2,), np.float32)),
    "ppo_cage2_parallel": (Box(0.0, 1.0, (52,), np.float32), Discrete(145)),
    "ppo_atari_mario": (Box(0, 255, (3, 64, 64), np.uint8), Discrete(7)),
}


can_compile = pytest.mark.skipif(" " in torch.__file__, reason="torch cannot compile where its path has a space")


def script_paths(config: pytest.Config) -> list[Path]:
    """The scripts under test. Raises UsageError for one that does not exist."""
    paths = [Path(name).resolve() for name in config.getoption("--script")] or sorted(ROOT.glob("ppo_*.py"))
    for path in paths:
        if not path.is_file():
            raise pytest.UsageError(f"--script {path} does not exist.")
    return paths


def domain(path: Path) -> str:
    """The script that `path` is, or is a copy of: the name before the slash of its FORMAT."""
    found = re.search(r'^FORMAT = "(\w+)/\d+"', path.read_text(), re.MULTILINE)
    if found is None:
        raise pytest.UsageError(f'{path} has no line FORMAT = "name/version", so the tests cannot tell its domain.')
    return found[1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "script_path" in metafunc.fixturenames:
        paths = script_paths(metafunc.config)
        if "continuous" in metafunc.fixturenames:
            paths = [path for path in paths if domain(path) == "ppo_continuous_mujoco"]
        metafunc.parametrize("script_path", paths, ids=lambda path: path.stem, scope="session")
    if "cage2_path" in metafunc.fixturenames:
        paths = [path for path in script_paths(metafunc.config) if domain(path) == "ppo_cage2_parallel"]
        metafunc.parametrize("cage2_path", paths, ids=lambda path: path.stem, scope="session")


_loaded: dict[Path, ModuleType] = {}


def load_script(path: Path) -> ModuleType:
    """The script as a module named after its file, imported once."""
    if path not in _loaded:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickle look their module up by name
        spec.loader.exec_module(module)
        torch.set_num_threads(1)
        _loaded[path] = module
    return _loaded[path]


def pytest_configure(config: pytest.Config) -> None:
    """A copy of Mario's script stands where its tests import the original."""
    for path in script_paths(config) if config.getoption("--script") else []:
        if domain(path) == "ppo_atari_mario":
            sys.modules["ppo_atari_mario"] = load_script(path)


@pytest.fixture(scope="session")
def script(script_path: Path) -> ModuleType:
    """Each script under test."""
    return load_script(script_path)


@pytest.fixture(scope="session")
def continuous(script_path: Path) -> ModuleType:
    """ppo_continuous_mujoco.py, or the copies of it named by --script."""
    return load_script(script_path)


@pytest.fixture(scope="session")
def cage2(cage2_path: Path) -> ModuleType:
    """ppo_cage2_parallel.py, or the copies of it named by --script."""
    return load_script(cage2_path)


def with_args(script: ModuleType, **values: Any) -> Any:
    """The script's Args with those of `values` that it has: scripts differ in a few names."""
    known = {field.name for field in dataclasses.fields(script.Args)}
    return script.Args(**{name: value for name, value in values.items() if name in known})


@dataclasses.dataclass
class Sample:
    """An agent of a script with random input for it."""

    agent: Any
    obs: torch.Tensor
    actions: torch.Tensor
    args: Any


def make_sample(script: ModuleType, batch_size: int = 16, seed: int = 0, **values: Any) -> Sample:
    """A fresh agent of `script`, `batch_size` observations, and actions that the agent sampled for them."""
    observation_space, action_space = SPACES[domain(Path(str(script.__file__)))]
    args = with_args(script, **{"amp": False} | values)  # bfloat16 would blur the equalities
    torch.manual_seed(seed)
    vec_env = SimpleNamespace(single_observation_space=observation_space, single_action_space=action_space)
    agent = script.Agent(vec_env, args)
    rng = np.random.default_rng(seed)
    if observation_space.dtype == np.uint8:
        obs = torch.from_numpy(rng.integers(0, 256, (batch_size, *observation_space.shape), dtype=np.uint8))
    else:
        obs = torch.from_numpy(rng.normal(size=(batch_size, *observation_space.shape)).astype(np.float32))
    with torch.no_grad():
        actions = agent.get_action_and_value(obs)[0]
    return Sample(agent, obs, actions, args)


def tiny_args(script: ModuleType, logdir: Path, **values: Any) -> Any:
    """Arguments of a run of the continuous script that takes about a second: three updates of 4 x 16 steps."""
    tiny: dict[str, Any] = {
        "env_id": "TwoQueue-v0", "logdir": str(logdir), "total_timesteps": 192, "num_envs": 4, "num_steps": 16,
        "num_minibatches": 2, "update_epochs": 2, "reset_steps": 10, "eval_every": 0, "eval_episodes": 2,
        "save_every": 0, "compile": False, "hidden_sizes": (8, 8), "num_workers": 1,
    }  # fmt: skip
    return script.Args(**(tiny | values))


@pytest.fixture
def run_tiny(continuous: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Train with `tiny_args`, each time in a new folder (or `logdir`); curves.png, nine tenths of the time of so
    short a run, is not drawn (test_a_run_leaves_the_files_it_promises draws it)."""
    monkeypatch.setattr(continuous, "plot_curves", lambda logdir: None)
    number = itertools.count()

    def run(**values: Any) -> dict[str, Any]:
        logdir = Path(values.pop("logdir", tmp_path / f"run{next(number)}"))
        return continuous.train(tiny_args(continuous, logdir, **values))

    return run


def weights(logdir: Path | str, checkpoint: str = "latest.pt") -> dict[str, torch.Tensor]:
    """The agent's parameters in a checkpoint."""
    return torch.load(Path(logdir) / checkpoint, weights_only=True)["agent"]


def spy(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[tuple[tuple[Any, ...], Any]]:
    """(arguments, result) of every call of a function of the script, which goes on to work as before."""
    calls: list[tuple[tuple[Any, ...], Any]] = []
    original = getattr(module, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        # The loop reuses its rollout tensors and clips gradients in place, so what passes by is copied.
        copies = copied(args)
        result = original(*args, **kwargs)
        calls.append((copies, copied(result)))
        return result

    def copied(x: Any) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(copied(y) for y in x)
        return x.detach().clone() if isinstance(x, torch.Tensor) else x

    monkeypatch.setattr(module, name, recorded)
    return calls


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """The same nested structure, to the last bit (nan equals nan)."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, where
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=where)
    else:
        np.testing.assert_equal(actual, expected, err_msg=where)


def command_line(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A function that runs the script's command line in this process: (exit code, standard output, standard error)."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = script.main(list(argv))
        except SystemExit as stop:  # tyro's own refusals, and --help
            code = stop.code if isinstance(stop.code, int) else 1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def run_main(continuous: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    return command_line(continuous, capsys)


def run_program(script: ModuleType, folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script as its users start it, from a folder that is not the repository's."""
    command, variables = [sys.executable, str(script.__file__), *argv], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=variables | environment, capture_output=True, text=True, check=False)
