"""On a GPU: training and going on there gives what the CPU gives. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, assert_same, columns, load_script, tiny_args
from tests.test_copying import copy_with, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_first_update_has_the_losses_of_the_cpu_and_the_run_goes_on(script: ModuleType, tmp_path: Path) -> None:
    """Actions are drawn by another generator, so only what does not depend on them much is equal, and roughly."""
    for device in ("cpu", "cuda"):
        script.train(tiny_args(script, tmp_path / device, device=device))
    cpu, gpu = (columns(tmp_path / device) for device in ("cpu", "cuda"))
    assert gpu["train/entropy"][0] == pytest.approx(cpu["train/entropy"][0], rel=0.01)
    assert all(np.isfinite(gpu["train/grad_norm"]))
    for device, rollouts in (("cuda", 4), ("cpu", 5)):  # a checkpoint of a GPU goes on and plays on a CPU
        steps = rollouts * tiny_args(script, tmp_path).batch_size
        more = tiny_args(script, tmp_path / "cuda", total_timesteps=steps, resume=True, device=device)
        assert script.train(more)["rollouts"] == rollouts
    script.play(script.PlayArgs(logdir=str(tmp_path / "cuda")))


def test_a_cuda_graph_changes_no_bit(tmp_path: Path) -> None:
    scripts = load_script(ROOT / "ppo_continuous_mujoco.py"), copy_with("cuda_graph", tmp_path)
    one, other = (train(x, tmp_path / x.__name__, device="cuda", update_epochs=8)[1] for x in scripts)
    assert_same(one | {"time/sps": 0}, other | {"time/sps": 0})
