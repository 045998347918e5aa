"""Whether the scripts would run on a GPU: training on a second device gives the numbers that the CPU gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import domain, with_args
from tests.second_device import META, SecondDevice

SMALL: dict[str, Any] = {
    "num_steps": 32, "num_minibatches": 4, "update_epochs": 2, "eval_every": 0, "eval_episodes": 1, "save_every": 0,
    "compile": False, "num_workers": 1, "amp": False, "minibatch_growth": 1,
}  # fmt: skip
OF_DOMAIN: dict[str, dict[str, Any]] = {
    # an episode ends within the rollout, of either kind, so that final observations are looked at
    "ppo_continuous_mujoco": {"env_id": "Hopper-v5", "num_envs": 4, "reset_steps": 20, "total_timesteps": 3 * 128},
    "ppo_cage2_parallel": {"num_envs": 6, "total_timesteps": 3 * 192},
    "ppo_atari_mario": {"num_envs": 2, "total_timesteps": 2 * 64, "video_episodes": 1, "max_episode_steps": 20},
}

# what the defaults leave out; each script has some of it
ALTERNATIVES: dict[str, Any] = {
    "target_kl": 0.01, "optimizer": "separate", "norm_adv_scope": "per_env", "clip_vloss": True, "norm_reward": False,
    "average_reward": True, "max_grad_norm": None, "workflow": "any", "minibatch_growth": 4, "shared_cnn": False,
}  # fmt: skip


def test_a_second_device_computes_like_the_first() -> None:
    with SecondDevice() as device:
        x = torch.arange(6.0, device=META).view(2, 3)
        x[0] = torch.tensor([7.0, 8.0, 9.0], device=META)
        weights = torch.ones(3, device=META, requires_grad=True)
        (x @ weights).square().sum().backward()
        assert weights.grad is not None
        found = weights.grad.cpu()
        assert (x.device, float(x[0, 2]), x.sum().item()) == (META, 9.0, 36.0)
    y = torch.tensor([[7.0, 8.0, 9.0], [3.0, 4.0, 5.0]])
    assert torch.equal(found, 2 * (y.T @ y.sum(1)))
    assert device.operations > 10


@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: here + there,
        lambda here, there: there.add_(here),
        lambda here, there: torch.cat([there, here]),
        lambda here, there: there.where(here > 0, there),
        lambda here, there: here[there.long()],
    ],
)
def test_a_second_device_refuses_tensors_of_the_first(mixed: Callable[..., Any]) -> None:
    with SecondDevice(), pytest.raises(RuntimeError, match="mixes tensors"):
        mixed(torch.ones(3), torch.ones(3, device=META))


@pytest.fixture
def second_device(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SecondDevice:
    """A second device that the script takes for one; what torch has no form of for meta tensors goes over the CPU."""
    validate, plain_generator, autocast = script.validate, torch.Generator, torch.autocast

    def generator(device: Any = "cpu") -> torch.Generator:
        return plain_generator("cpu" if torch.device(device) == META else device)

    monkeypatch.setattr(script, "validate", lambda args: validate(replace(args, device="cpu")))
    monkeypatch.setattr(script, "plot_curves", lambda logdir: None)
    monkeypatch.setattr(torch, "Generator", generator)
    monkeypatch.setattr(torch, "autocast", lambda kind, *rest, **options: autocast("cpu", *rest, **options))
    return SecondDevice()


def small_args(script: ModuleType, **values: Any) -> Any:
    return with_args(script, **SMALL | OF_DOMAIN[domain(Path(str(script.__file__)))] | values)


def assert_same_logs(folder: Path, other: Path) -> None:
    for name in ("progress.csv", "eval.csv"):
        assert (folder / name).read_text() == (other / name).read_text()


@pytest.mark.parametrize("values", [{}, ALTERNATIVES], ids=["defaults", "alternatives"])
def test_training_on_a_second_device_gives_the_numbers_of_the_cpu(
    script: ModuleType, second_device: SecondDevice, tmp_path: Path, values: dict[str, Any]
) -> None:
    args = small_args(script, **values)
    script.train(replace(args, logdir=str(tmp_path / "cpu")))
    with second_device:
        script.train(replace(args, logdir=str(tmp_path / "other"), device="meta"))
    assert second_device.operations > 1000
    assert_same_logs(tmp_path / "cpu", tmp_path / "other")


@pytest.mark.filterwarnings("ignore:.*which is a no-op")  # torch says so of meta tensors, which have numbers here
def test_a_run_can_go_on_on_a_second_device(script: ModuleType, second_device: SecondDevice, tmp_path: Path) -> None:
    args = small_args(script)
    begun = replace(args, total_timesteps=args.batch_size, logdir=str(tmp_path / "cpu"))
    script.train(begun)
    shutil.copytree(tmp_path / "cpu", tmp_path / "other")
    longer = replace(begun, total_timesteps=2 * args.batch_size, resume=True)
    script.train(longer)
    with second_device:
        script.train(replace(longer, logdir=str(tmp_path / "other"), device="meta"))
    assert second_device.operations > 1000
    assert_same_logs(tmp_path / "cpu", tmp_path / "other")


@pytest.mark.parametrize("max_grad_norm", [0.5, None])
def test_the_compiler_takes_a_step_of_adam_on_a_gpu(script: ModuleType, max_grad_norm: float | None) -> None:
    """torch's own functional Adam is not compiled for CUDA (its decorator refuses); tensors without memory show it."""

    class Traced(Exception):
        pass

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        assert {x.device.type for x in inputs} == {"cuda"}
        raise Traced

    step = torch.compile(script.adam_step, fullgraph=True, dynamic=False, backend=backend)
    args = with_args(script, max_grad_norm=max_grad_norm)
    with FakeTensorMode(), torch.device("cuda"):
        weights, gradient, mean, square = (torch.empty(10) for _ in range(4))
        count, rate = torch.empty(()), torch.empty(())
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Traced"):
            step([weights], [gradient], [(mean, square, count)], [rate], args)
