"""docs/copying.md: the change that makes a script for CartPole out of the one for robots applies, and learns."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, load_script


def test_the_copy_for_discrete_actions_learns_to_balance(tmp_path: Path) -> None:
    """After a change of the script, make docs/cartpole.diff anew: apply it by hand, then `diff -U1` of the two."""
    copy = tmp_path / "cartpole.py"
    shutil.copyfile(ROOT / "ppo_continuous_mujoco.py", copy)
    subprocess.run(["git", "apply", ROOT / "docs" / "cartpole.diff"], cwd=tmp_path, check=True)
    script = load_script(copy)
    settings = {"total_timesteps": 20_480, "eval_every": 0, "vec_env": "sync", "compile": False}
    with pytest.warns(UserWarning, match="cannot be saved"):
        result = script.train(script.Args(logdir=str(tmp_path / "run"), **settings))
    assert result["mean_return"] > 400
    played = script.play(script.PlayArgs(logdir=result["logdir"], episodes=2))
    assert played["mean_return"] > 400
    assert script.main(["--env-id", "HalfCheetah-v5", "--logdir", str(tmp_path / "other")]) == 2
