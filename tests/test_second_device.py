"""On a GPU: training and going on there gives what the CPU gives. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.conftest import columns, tiny_args

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_first_update_has_the_losses_of_the_cpu_and_the_run_goes_on(script: ModuleType, tmp_path: Path) -> None:
    """Actions are drawn by another generator, so only what does not depend on them much is equal, and roughly."""
    for device in ("cpu", "cuda"):
        script.train(tiny_args(script, tmp_path / device, device=device))
    cpu, gpu = (columns(tmp_path / device) for device in ("cpu", "cuda"))
    assert gpu["train/entropy"][0] == pytest.approx(cpu["train/entropy"][0], rel=0.01)
    assert all(np.isfinite(gpu["train/grad_norm"]))
    args = tiny_args(script, tmp_path / "cuda", device="cuda")
    more = tiny_args(script, tmp_path / "cuda", total_timesteps=4 * args.batch_size, resume=True, device="cuda")
    assert script.train(more)["rollouts"] == 4
    # a checkpoint of a GPU goes on and plays on a CPU
    more = tiny_args(script, tmp_path / "cuda", total_timesteps=5 * args.batch_size, resume=True)
    assert script.train(more)["rollouts"] == 5
    script.play(script.PlayArgs(logdir=str(tmp_path / "cuda")))
