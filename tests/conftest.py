"""Which scripts the tests run on, and how a test gets an agent, a loss or a short run of any of them.

    pytest                          # on every ppo_*.py of the repository
    pytest --script my_idea.py      # on a copy that you changed; repeat --script for more of them

A test that asks for `script` runs once per script and uses only what all scripts have. A test that asks for
`continuous`, `mario` or `cage2` runs on that script and its copies, which are known by what their checkpoints say
(`FORMAT`); what distribution a policy is, is known by its action space.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import tests.known_values  # noqa: F401  (registers KnownValues-v0, Target-v0 and Poison-v0)
from envs.mario import available_backends

ROOT = Path(__file__).resolve().parent.parent

# Equal runs give equal verdicts.
hypothesis.settings.register_profile("default", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("default")

can_compile = pytest.mark.skipif(" " in torch.__file__, reason="torch cannot compile where its path has a space")

# (observation space, action space) of one environment, as small as each script's agent allows.
SPACES: dict[str, tuple[Box, Box | Discrete]] = {
    "ppo_continuous_mujoco": (Box(-np.inf, np.inf, (4,), np.float32), Box(-1.0, 1.0, (2,), np.float32)),
    "ppo_cage2_parallel": (Box(0.0, 1.0, (52,), np.float32), Discrete(145)),
    "ppo_atari_mario": (Box(0, 255, (3, 64, 64), np.uint8), Discrete(7)),
    "cartpole": (Box(-np.inf, np.inf, (4,), np.float32), Discrete(2)),  # a copy: docs/copies/cartpole.diff
}

FASTEST_EMULATOR = "fceumm" if "fceumm" in available_backends() else "nes_py"

# Arguments of a run that takes a second or less: three updates.
COMMON: dict[str, Any] = {"num_minibatches": 2, "update_epochs": 2, "eval_every": 0, "eval_episodes": 2,
                          "save_every": 0, "compile": False, "num_workers": 1}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "ppo_continuous_mujoco": {"env_id": "TwoQueue-v0", "num_envs": 4, "num_steps": 16, "total_timesteps": 192,
                              "reset_steps": 10, "hidden_sizes": (8, 8)},
    "ppo_cage2_parallel": {"num_envs": 4, "num_steps": 25, "total_timesteps": 300, "max_steps": 20,
                           "hidden_sizes": (8, 8)},
    "ppo_atari_mario": {"num_envs": 2, "num_steps": 8, "total_timesteps": 48, "reset_steps": 10, "noop_max": 3,
                        "minibatch_growth": 2, "feature_dim": 16, "backend": FASTEST_EMULATOR},
}  # fmt: skip

# Arguments of a run that solves Target-v0 in seconds.
TARGET_RUN: dict[str, Any] = {"env_id": "Target-v0", "num_envs": 16, "num_steps": 32, "num_minibatches": 8,
                              "update_epochs": 10, "total_timesteps": 12_288, "learning_rate": 3e-3,
                              "eval_episodes": 100, "reset_steps": None, "hidden_sizes": (16,)}  # fmt: skip


# ---- scripts --------------------------------------------------------------------------------------------------------
def script_paths(config: pytest.Config) -> list[Path]:
    """The scripts under test. Raises UsageError for one that does not exist."""
    paths = [Path(name).resolve() for name in config.getoption("--script")] or sorted(ROOT.glob("ppo_*.py"))
    for path in paths:
        if not path.is_file():
            raise pytest.UsageError(f"--script {path} does not exist.")
    return paths


def domain(script: Path | ModuleType) -> str:
    """The script that this is, or is a copy of: the name before the slash of its FORMAT."""
    path = script if isinstance(script, Path) else Path(str(script.__file__))
    found = re.search(r'^(?:\w+, )?FORMAT = .*"(\w+)/\d+"', path.read_text(), re.MULTILINE)
    if found is None:
        raise pytest.UsageError(f'{path} has no line FORMAT = "name/version", so the tests cannot tell its domain.')
    if found[1] not in SPACES:
        raise pytest.UsageError(f"{path}: the tests know no FORMAT {found[1]}/..., only {', '.join(SPACES)}.")
    return found[1]


# Fixtures that are scripts, and which of them.
SCRIPTS = {"script": "", "continuous": "ppo_continuous_mujoco", "cage2": "ppo_cage2_parallel",
           "mario": "ppo_atari_mario"}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, name in SCRIPTS.items():
        if fixture in metafunc.fixturenames:
            paths = [path for path in script_paths(metafunc.config) if domain(path).startswith(name)]
            metafunc.parametrize(fixture, paths, ids=lambda path: path.stem, indirect=True, scope="session")


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


def script_fixture(name: str) -> Any:
    """A fixture of this name: each of the scripts under test that SCRIPTS means by it."""

    @pytest.fixture(scope="session", name=name)
    def fixture(request: pytest.FixtureRequest) -> ModuleType:
        return load_script(request.param)

    return fixture


script, continuous, cage2, mario = map(script_fixture, SCRIPTS)


def with_args(script: ModuleType, **values: Any) -> Any:
    """The script's Args with those of `values` that it has: scripts differ in a few names."""
    known = {field.name for field in dataclasses.fields(script.Args)}
    return script.Args(**{name: value for name, value in values.items() if name in known})


# ---- agents and batches ---------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Sample:
    """An agent of a script with random input for it."""

    agent: Any
    obs: torch.Tensor
    actions: torch.Tensor
    args: Any


def make_sample(script: ModuleType, batch_size: int = 16, seed: int = 0, **values: Any) -> Sample:
    """A fresh agent of `script`, `batch_size` observations, and actions that the agent sampled for them."""
    observation_space, action_space = SPACES[domain(script)]
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
        actions = agent.policy(obs).sample()
    return Sample(agent, obs, actions, args)


def make_batch(script: ModuleType, **tensors: torch.Tensor) -> Any:
    """The script's Batch of these tensors; those that it has besides, of a copy's own, are zeros."""
    zeros = torch.zeros(len(tensors["obs"]))
    return script.Batch(**{name: tensors.get(name, zeros) for name in script.Batch._fields})


def column(*numbers: float) -> torch.Tensor:
    """One environment's numbers over time, (num_steps, 1)."""
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def gae(
    script: ModuleType, rewards: torch.Tensor, values: torch.Tensor, last_values: Any, gamma: float, gae_lambda: float,
    terminations: torch.Tensor | None = None, truncations: torch.Tensor | None = None,
    final_values: dict[tuple[int, int], float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """compute_gae where V(s') is the next row's V, `last_values` after the last row, and `final_values[t, n]` after
    the steps named there (episodes cut by a time limit)."""
    no = torch.zeros_like(rewards, dtype=torch.bool)
    next_values = torch.cat([values[1:], torch.as_tensor(last_values, dtype=values.dtype).expand(1, values.shape[1])])
    for (t, n), value in (final_values or {}).items():
        next_values[t, n] = value
    terminations = no if terminations is None else terminations
    truncations = no if truncations is None else truncations
    return script.compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda)


def flat(agent: Any, learning_rate: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All weights of the agent in one vector, of which its parameters are views from now on, and Adam's state."""
    weights = parameters_to_vector(agent.parameters()).detach()
    vector_to_parameters(weights, agent.parameters())
    adam = {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights), "step": torch.zeros(())}
    return weights, adam | {"learning_rate": torch.full_like(weights, learning_rate)}


# ---- runs -----------------------------------------------------------------------------------------------------------
def tiny_args(script: ModuleType, logdir: Path, **values: Any) -> Any:
    """Arguments of a run that takes about a second: three updates."""
    return script.Args(**COMMON | TINY[domain(script)] | {"logdir": str(logdir)} | values)


def tiny_flags(script: ModuleType, logdir: Path | str, **values: Any) -> list[str]:
    """`tiny_args` as flags of the command line."""
    flags: list[str] = []
    for name, value in (COMMON | TINY[domain(script)] | {"logdir": logdir} | values).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]
    return flags


def tiny_runner(script: ModuleType, folder: Path) -> Callable[..., dict[str, Any]]:
    """A function that trains with `tiny_args`, each time in a new folder, or in `logdir`."""
    number = itertools.count()

    def run(**values: Any) -> dict[str, Any]:
        return script.train(tiny_args(script, Path(values.pop("logdir", folder / f"run{next(number)}")), **values))

    return run


@pytest.fixture
def run_tiny(continuous: ModuleType, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    return tiny_runner(continuous, tmp_path)


def weights(logdir: Path | str, checkpoint: str = "latest.pt") -> dict[str, torch.Tensor]:
    """The agent's parameters in a checkpoint."""
    return torch.load(Path(logdir) / checkpoint, weights_only=True)["agent"]


def columns(logdir: Path | str) -> dict[str, list[float]]:
    """progress.csv."""
    with open(Path(logdir) / "progress.csv") as stream:
        rows = list(csv.DictReader(stream))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def rows(logdir: Path) -> int:
    """Updates logged so far."""
    path = logdir / "progress.csv"
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


def spy(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[tuple[Any, ...], Any]]:
    """(arguments, result) of every call of a function of the script, which goes on to work as before. Keyword arguments
    come last, by value alone. Tensors are copied, for the script goes on to change its weights in place."""
    calls: list[tuple[tuple[Any, ...], Any]] = []
    original = getattr(module, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        copies = copied((*args, *kwargs.values()))
        result = original(*args, **kwargs)
        calls.append((copies, copied(result)))
        return result

    def copied(x: Any) -> Any:
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*map(copied, x))
        if isinstance(x, tuple | list):
            return type(x)(copied(y) for y in x)
        if isinstance(x, dict):
            return {key: copied(y) for key, y in x.items()}
        return x.detach().clone() if isinstance(x, torch.Tensor) else x

    monkeypatch.setattr(module, name, recorded)
    return calls


def minibatches_of(calls: list[tuple[tuple[Any, ...], Any]]) -> list[Any]:
    """The minibatches, each a Batch, that calls of `take_steps` were given."""
    return [type(some)(*(x[i] for x in some)) for (_, _, _, _, some), _ in calls for i in range(len(some.obs))]


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """The same nested structure, types and shapes included, to the last bit (but any nan equals any)."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple) or (isinstance(expected, np.ndarray) and expected.dtype == object):
        assert len(actual) == len(expected), where
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, where
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=where)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(actual, expected, where, strict=True)
        assert expected.dtype.kind != "f" or (np.signbit(actual) == np.signbit(expected))[expected == 0].all(), where
    else:
        np.testing.assert_equal(actual, expected, err_msg=where)


def assert_plain(state: Any) -> None:
    """Nothing but numbers, texts and arrays of numbers, in dicts and lists: what a checkpoint can hold."""
    if isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            assert_plain(value)
    elif isinstance(state, np.ndarray):
        assert state.dtype.kind in "biuf", state.dtype
    else:
        assert state is None or type(state) in (bool, int, float, str), type(state)


def python(*argv: object, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own, with the repository on its path; it ends within two minutes."""
    command, variables = [sys.executable, *map(str, argv)], os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=120)


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
    return python(str(script.__file__), *argv, folder=folder, **environment)


# ---- processes ------------------------------------------------------------------------------------------------------
def fork(work: Callable[[], int | None], output: Path) -> int:
    """Run `work` in a child process, its output in a file; returns the child's id. Exit code: what it returns, or 1.
    The child has everything imported; it is a real process and dies a real death."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # os._exit flushes not
        code = work() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int, seconds: float = 100) -> int:
    """The exit code of a child, minus the signal if one ended it; it is killed after `seconds`, and that fails."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {seconds} s")


def wait_until(pid: int, condition: Callable[[], bool], output: Path) -> None:
    """Wait for `condition`; a child that ends before is a failure, and one that takes 300 s is killed."""
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, os.WNOHANG)
        assert not done, (status, output.read_text()[-2000:])
        time.sleep(0.001)
