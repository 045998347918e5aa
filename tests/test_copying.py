"""docs/copying.md: each of its changes applies to a copy of the MuJoCo script, is as short as the page says, and works.

After a change of the script that moves a place: apply the old diff by hand to a copy, then `diff -U1` of the two.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.conftest import COMMON, ROOT, assert_same, columns, fork, load_script, rows, tiny_flags, wait, wait_until
from tests.test_subproc_faults import is_alive

PAGE = ROOT / "docs" / "copying.md"
DIFFS = sorted((ROOT / "docs" / "copies").glob("*.diff"))
TINY: dict[str, Any] = COMMON | {"env_id": "Reacher-v5", "num_envs": 4, "num_steps": 32, "num_minibatches": 4,
                                "total_timesteps": 512, "reset_steps": 10, "hidden_sizes": (8, 8)}  # fmt: skip


def copy_with(recipe: str, folder: Path, original: str = "ppo_continuous_mujoco.py") -> ModuleType:
    """A copy of the script in `folder`, changed by docs/copies/{recipe}.diff, as a module."""
    shutil.copyfile(ROOT / original, folder / "my_copy.py")
    subprocess.run(["git", "apply", ROOT / "docs" / "copies" / f"{recipe}.diff"], cwd=folder, check=True)
    return load_script((folder / "my_copy.py").rename(folder / f"copy_{recipe}.py"))


def train(script: ModuleType, logdir: Path, **values: Any) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """A tiny run: what it returns, and its progress.csv."""
    return script.train(script.Args(**TINY | {"logdir": str(logdir)} | values)), columns(logdir)


def assert_resumes(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """A run that ends right after its second checkpoint, and is resumed, is the unbroken one to the last bit."""
    values = {"save_every": 128} | values
    train(script, folder / "unbroken", **values)
    original, saved = script.save, []

    def save_and_die(path: Path, state: dict[str, Any]) -> None:
        original(path, state)
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "save", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            train(script, folder / "broken", **values)
    train(script, folder / "broken", resume=True, **values)
    one, other = (torch.load(folder / name / "latest.pt", weights_only=True) for name in ("unbroken", "broken"))
    assert one["run"]["global_step"] == other["run"]["global_step"] == 512
    for name, tensor in one["agent"].items():
        assert torch.equal(tensor, other["agent"][name]), name
    assert str(one["adam"]) == str(other["adam"])


def test_every_diff_is_on_the_page_and_short() -> None:
    page = PAGE.read_text()
    for path in DIFFS:
        lines = path.read_text().splitlines()
        changed = [line for line in lines if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))]
        assert sum(line.startswith("+") for line in changed) <= (35 if path.stem == "cartpole" else 15), path
        assert f"(copies/{path.name})" in page, path
        assert "\n".join(changed) in page or path.stem == "observation_wrapper", f"{path} is not shown as it is"


@pytest.mark.parametrize("recipe", ["network", "kl_penalty", "adamw", "muon", "auxiliary_loss", "cuda_graph"])
def test_a_changed_copy_trains_plays_and_resumes(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = copy_with(recipe, tmp_path)
    assert_resumes(script, tmp_path, monkeypatch)
    assert len(script.play(script.PlayArgs(logdir=str(tmp_path / "broken")))) == 1
    assert script.FORMAT == load_script(ROOT / "ppo_continuous_mujoco.py").FORMAT


def test_the_standard_deviation_depends_on_the_state(tmp_path: Path) -> None:
    script = copy_with("network", tmp_path)
    space = gym.spaces.Box(-1, 1, (3,), np.float32)
    envs = gym.vector.VectorEnv()
    envs.single_observation_space = envs.single_action_space = space  # type: ignore[assignment]
    policy = script.Agent(envs, script.Args()).policy(torch.randn(5, 3))
    assert policy.stddev[:, 0].unique().numel() == 5
    assert policy.log_prob(policy.sample()).shape == policy.entropy().shape == (5,)


def test_the_kl_penalty_is_logged_and_holds_the_policy_back(tmp_path: Path) -> None:
    script = copy_with("kl_penalty", tmp_path)
    plain = load_script(ROOT / "ppo_continuous_mujoco.py")
    strong = {"learning_rate": 1e-2, "update_epochs": 8, "clip_coef": 10.0}
    held, free = (train(x, tmp_path / x.__name__, **strong)[1] for x in (script, plain))
    assert min(held["train/exact_kl"]) >= 0
    assert sum(held["train/approx_kl"]) < 0.7 * sum(free["train/approx_kl"])


def test_what_the_environment_tells_is_logged_also_where_episodes_end(tmp_path: Path) -> None:
    _, progress = train(copy_with("info_metric", tmp_path), tmp_path / "run", log_std_init=9.0)  # all are clipped to 1
    assert progress["rollout/reward_ctrl"] == pytest.approx([-2.0] * 4, rel=0.01)


def test_an_optimiser_of_torch_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_resumes(copy_with("torch_optim", tmp_path), tmp_path, monkeypatch)
    saved = torch.load(tmp_path / "broken" / "latest.pt", weights_only=True)["adam"]
    assert float(saved["state"][0]["step"]) == 4 * 2 * 4  # updates, epochs, minibatches


def test_a_reward_wrapper_acts_in_training_and_in_evaluation(tmp_path: Path) -> None:
    """In KnownValues-v0 each step earns 1, and a tenth of it with the wrapper; or half of it in training alone."""
    plain, wrapped = load_script(ROOT / "ppo_continuous_mujoco.py"), copy_with("reward_wrapper", tmp_path)
    costly = copy_with("training_wrapper", tmp_path)
    cases: list[Any] = [(plain, {}, 1.0, 1.0), (wrapped, {}, 0.1, 0.1), (costly, {"step_cost": 0.5}, 0.5, 1.0)]
    for script, flags, worth, evaluated in cases:
        result, progress = train(script, tmp_path / script.__name__, env_id="KnownValues-v0", reset_steps=5, **flags)
        lengths = np.array(progress["rollout/episodic_length"])
        np.testing.assert_allclose(progress["rollout/episodic_return"], worth * lengths)
        assert result["mean_return"] == pytest.approx(evaluated * progress["eval/mean_length"][-1])
        played = script.play(script.PlayArgs(logdir=result["logdir"], episodes=2, seed=10_000))
        assert np.mean(played) == pytest.approx(result["mean_return"])


@pytest.mark.parametrize(
    ("recipe", "env_id", "inputs"), [("observation_wrapper", "Reacher-v5", 11), ("dict_observation", "Dict-v0", 3)]
)
def test_an_observation_wrapper_acts_also_in_evaluation(recipe: str, env_id: str, inputs: int, tmp_path: Path) -> None:
    script = copy_with(recipe, tmp_path)
    result, _ = train(script, tmp_path / "run", env_id=env_id)
    checkpoint = torch.load(tmp_path / "run" / "latest.pt", weights_only=True)
    assert checkpoint["agent"]["actor_mean.0.weight"].shape[1] == inputs
    assert len(checkpoint["statistics"]["mean"]) == inputs
    assert np.isfinite(result["mean_return"])
    script.play(script.PlayArgs(logdir=result["logdir"]))


def test_a_sweep_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The page's program, shortened, with NumPy's numbers, twice: its runs are as if alone, and then found finished."""
    tiny = TINY | {"gae_lambda": np.float32(0.9), "hidden_sizes": tuple(np.array([8, 8])), "total_timesteps": 5e2}
    (program,) = re.findall(r"```python\n(from pathlib.*?)```", PAGE.read_text(), re.DOTALL)
    program = program.replace('"ant", ', '"ant", **tiny, ')
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(compile(program, "sweep", "exec"), {"tiny": tiny})
    printed = [float(x) for x in re.findall(r"^0\.\d+ (-?[\d.]+)$", capsys.readouterr().out, re.MULTILINE)]
    script = load_script(ROOT / "ppo_continuous_mujoco.py")
    alone = script.train(script.preset("ant", **tiny | {"learning_rate": 3e-4, "logdir": tmp_path / "alone"}))
    script.play(script.PlayArgs(checkpoint=tmp_path / "alone" / "best.pt"))
    assert printed == pytest.approx([printed[0], alone["mean_return"]] * 2, abs=0.01)


def test_the_copy_for_discrete_actions_learns_to_balance(tmp_path: Path) -> None:
    script = copy_with("cartpole", tmp_path)
    run = str(tmp_path / "run")
    result = script.train(script.Args(logdir=run, total_timesteps=20_480, eval_every=0, compile=False))
    assert result["mean_return"] > 400
    assert min(script.play(script.PlayArgs(logdir=run, episodes=2, stochastic=True))) > 100
    assert script.main(["--env-id", "HalfCheetah-v5", "--logdir", str(tmp_path / "other")]) == 2


def test_two_processes_learn_as_one_end_together_and_go_on_exactly(tmp_path: Path) -> None:
    """Under torchrun. What a power cut leaves after the first update is resumed and becomes the unbroken run."""
    script, output = copy_with("two_processes", tmp_path), tmp_path / "output.txt"
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def start(logdir: Path, *more: str) -> int:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script.__file__]
        argv += tiny_flags(script, logdir, env_id="Reacher-v5", update_epochs=1, total_timesteps=10**7)
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return fork(lambda: os.execve(sys.executable, [*argv, *more], variables), output)

    def wait_for(pid: int, logdir: Path, updates: int) -> list[int]:
        """Wait until both processes have logged so many; returns their ids."""
        wait_until(pid, lambda: min(rows(logdir), rows(logdir / "rank_1")) >= updates, output)
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    pid = start(whole)
    wait_for(pid, whole, 2)
    shutil.copytree(whole, cut)
    processes = wait_for(pid, whole, 10)
    os.kill(pid, signal.SIGTERM)
    wait(pid, 60)
    pid = start(cut, "--resume")
    processes += wait_for(pid, cut, 10)
    os.kill(processes[-1], signal.SIGKILL)
    assert wait(pid, 60) != 0
    assert len(processes) == 4
    assert not any(map(is_alive, processes))

    one, other = (script.load(whole / folder / "latest.pt") for folder in (".", "rank_1"))
    assert one["run"]["rollouts"] == other["run"]["rollouts"] == rows(whole)
    assert_same([one["agent"], one["adam"]], [other["agent"], other["adam"]])
    assert not torch.equal(torch.as_tensor(one["obs"]), torch.as_tensor(other["obs"]))
    assert script.load(cut / "latest.pt")["run"]["rollouts"] == 1
    for folder in (".", "rank_1"):
        for name, values in columns(whole / folder).items():
            if name != "time/sps":
                assert_same(columns(cut / folder)[name][:10], values[:10], name)
    with pytest.raises(SystemExit, match="0"):  # the change is for copies of the Mario script, too
        copy_with("two_processes", tmp_path, "ppo_atari_mario.py").main(["--help"])


def test_an_environment_with_its_own_state_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r'```python\n("""my_point.py.*?)```', PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_point.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_point", raising=False)
    script = load_script(ROOT / "ppo_continuous_mujoco.py")
    assert_resumes(script, tmp_path, monkeypatch, env_id="my_point:Point-v0", reset_steps=None)
