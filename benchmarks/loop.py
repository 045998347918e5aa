"""How fast is the whole training loop? Our scripts beside a loop in CleanRL's style and Stable-Baselines3's PPO.

    python -m benchmarks.loop mujoco_loop        # HalfCheetah, Ant, Humanoid; three settings each: 75 minutes
    python -m benchmarks.loop cage2_loop         # 25 and 256 environments
    python -m benchmarks.loop mario_loop [--pip-nes-py FOLDER]
    python -m benchmarks.loop gpu_loop           # the three scripts on the CPU and on a GPU, where there is one
    python -m benchmarks.loop --quick            # the first setting of each with few candidates, into runs/bench

Every measurement is a process of its own that trains a few updates; the first ones, in which things are compiled and
caches fill, do not count. Candidates have equal networks (64-64 tanh; on Mario the Nature CNN on four grey 64 x 64
pictures), rollouts, minibatches and epochs, and torch has one thread, unless a name says more. CAGE2's have 52
observations and 145 actions, unless a name says "memory": then they are our script's default, 186 and 36. Results are
written after each setting; settings that a run does not measure stay as they were (--only TEXT picks some).

MuJoCo's limit is what is left if nothing but physics, on all cores, and the networks' multiplications, on one, took
time. After `make nes_py` SB3's Mario runs on that faster library, too. With --pip-nes-py it is measured a second time
on the one that its own users have: pip install --no-deps --target FOLDER nes-py==8.2.1
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers, stepping
from benchmarks.common import (
    CORES,
    at_least_one,
    in_fresh_process,
    installed,
    interleave,
    machine_info,
    parser_of,
    publish,
    train,
)
from envs.mario import available_backends
from envs.mujoco_batch import MujocoBatchVecEnv

Candidates = dict[str, Callable[[], float]]
WARM_UP, PEERS_WARM_UP, PEERS_UPDATES = 3, 1, 4


def ours(script: str, flags: str, sizes: dict[str, int], updates: int) -> float:
    """Steps per second of a script of ours."""
    batch = sizes["num_envs"] * sizes["num_steps"]
    words = [
        *flags.split(), "--num-envs", sizes["num_envs"], "--num-steps", sizes["num_steps"],
        "--num-minibatches", batch // sizes["minibatch"], "--total-timesteps", batch * (WARM_UP + updates),
    ]  # fmt: skip
    rates = train(f"{script}.py", list(map(str, words)))["time/sps"]
    return statistics.harmonic_mean(rates[WARM_UP:].tolist())


def peer(function: Callable[..., Any], sizes: dict[str, int], **options: Any) -> float:
    """Steps per second of one of the peers' loops."""
    seconds = in_fresh_process(function, **sizes, updates=PEERS_WARM_UP + PEERS_UPDATES, **options)[PEERS_WARM_UP:]
    return len(seconds) * sizes["num_envs"] * sizes["num_steps"] / sum(seconds)


def best_time(function: Callable[[], Any], seconds: float = 0.3) -> float:
    """The shortest of many calls, in seconds."""
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


def limit(env_id: str, num_envs: int, minibatch: int, epochs: int = 10) -> float:
    """Steps per second if there were only physics, on all cores, and the networks' arithmetic, on one."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        envs = MujocoBatchVecEnv(env_id, num_envs)
        stack.callback(envs.close)
        actions = stepping.planned(envs)
        episode = stepping.mean_episode_length(envs, actions)
        bare = stack.enter_context(stepping.loops(partial(stepping.mujoco_step, env_id, episode), actions, 0.5))
        bare[stepping.LIMIT]()
        physics = 1 / bare[stepping.LIMIT]()
        inputs, outputs = (math.prod(x.shape) for x in (envs.single_observation_space, envs.single_action_space))  # type: ignore[misc,arg-type]
    first_layers = 2 * inputs * 64  # of actor and critic
    weights = first_layers + 2 * 64 * 64 + 64 * (outputs + 1)
    a, b = torch.rand(minibatch, 64), torch.rand(64, 64)
    per_product = best_time(lambda: torch.mm(a, b)) / (minibatch * 64 * 64)
    # An input's product with each weight: once in the rollout, and in each epoch forwards and, for the gradients of
    # the layers' inputs and of the weights, twice backwards; but nobody needs the gradient of an observation.
    products = (1 + 3 * epochs) * weights - epochs * first_layers
    return 1 / (physics + products * per_product)


# ---- the benchmarks: setting -> candidates --------------------------------------------------------------------------
def mujoco(env_id: str, updates: int, **sizes: int) -> Candidates:
    flags = f"--env-id {env_id} --update-epochs 10"
    mine = partial(ours, "ppo_continuous_mujoco", sizes=sizes, updates=updates)
    candidates: Candidates = {
        "ours": partial(mine, flags),
        "ours, not compiled": partial(mine, f"{flags} --no-compile"),
        "limit": lambda: in_fresh_process(
            limit, env_id=env_id, num_envs=sizes["num_envs"], minibatch=sizes["minibatch"]
        ),
    }
    for kind in ("sync", "async", "envpool") if installed("envpool") else ("sync", "async"):
        candidates[f"CleanRL-style: {kind}"] = partial(
            peer, peers.cleanrl_style, sizes, env_id=env_id, vectorization=kind
        )
    sb3 = partial(peer, peers.sb3_mujoco, sizes, env_id=env_id)
    return candidates | {
        "SB3: dummy": sb3,
        f"SB3: dummy, {CORES} threads": partial(sb3, threads=CORES),
        "SB3: subproc": partial(sb3, kind="subproc"),
    }


def cage2(updates: int, **sizes: int) -> Candidates:
    flags = "--update-epochs 4 --torch-threads"
    mine = partial(ours, "ppo_cage2_parallel", sizes=sizes, updates=updates)
    plain, sb3 = "--no-memory --actions full", partial(peer, peers.sb3_cage2, sizes)
    candidates: Candidates = {
        "ours": partial(mine, f"{plain} {flags} 1"),
        "ours, 2 threads": partial(mine, f"{plain} {flags} 2"),
        "ours, memory": partial(mine, f"{flags} 1"),
        "ours, memory, 2 threads": partial(mine, f"{flags} 2"),
        "ours, not compiled": partial(mine, f"{plain} {flags} 1 --no-compile"),
        "SB3: dummy": sb3,
        "SB3: dummy, 2 threads": partial(sb3, threads=2),
    }
    if sizes["num_envs"] <= 25:  # hundreds of processes on a few cores say nothing
        candidates["SB3: subproc"] = partial(sb3, kind="subproc")
    return candidates


MARIO_FLAGS = ("--minibatch-growth 1 --update-epochs 4 --noop-max 0 --sticky-action-probability 0 --stuck-steps 0 "
               "--reset-steps 400 --torch-threads 1")  # fmt: skip


def mario(updates: int, pip_nes_py: str | None = None, **sizes: int) -> Candidates:
    mine, candidates = partial(ours, "ppo_atari_mario", sizes=sizes, updates=updates), Candidates()
    for backend in available_backends():
        candidates[f"ours, {backend}"] = partial(mine, f"{MARIO_FLAGS} --backend {backend}")
        candidates[f"ours, {backend}, float32"] = partial(mine, f"{MARIO_FLAGS} --backend {backend} --no-amp")
    version = metadata.version("gym-super-mario-bros")
    if version.startswith("7."):
        candidates["SB3: nes_py, float32"] = partial(peer, peers.sb3_mario, sizes)
        if pip_nes_py:
            candidates["SB3: nes_py built by pip"] = partial(peer, peers.sb3_mario, sizes, nes_py_folder=pip_nes_py)
    else:
        print(f"SB3 is left out: the usual wrappers are those of gym-super-mario-bros 7.4.0, but here is {version}")
    return candidates


DEVICES = {
    "CPU": "",
    "CPU, threads": f"--torch-threads {CORES}",
    "GPU": "--device cuda",
    "GPU, compiled": "--device cuda --compile",
}


def gpu(updates: int, script: str, flags: str, devices: tuple[str, ...], **sizes: int) -> Candidates:
    mine = partial(ours, script, sizes=sizes, updates=updates)
    return {name: partial(mine, f"{flags} {DEVICES[name]}") for name in devices}


MUJOCO_SIZES = {  # num_envs, num_steps, minibatch
    "16 x 128, minibatch 64": (16, 128, 64),
    "16 x 128, minibatch 256": (16, 128, 256),
    "1 x 2048, minibatch 64": (1, 2048, 64),
}


def sized(make: Callable[..., Candidates], num_envs: int, num_steps: int, minibatch: int, **options: Any) -> Any:
    return partial(make, num_envs=num_envs, num_steps=num_steps, minibatch=minibatch, **options)


# name -> (title, references of its tables, updates that count, setting -> candidates)
BENCHMARKS: dict[str, tuple[str, list[str], int, dict[str, Callable[..., Candidates]]]] = {
    "mujoco_loop": ("Whole training loop on MuJoCo", ["limit", "CleanRL-style: sync", "SB3: dummy"], 10, {
        f"{env_id}, {name}": sized(mujoco, *sizes, env_id=env_id)
        for env_id in ("HalfCheetah-v5", "Ant-v5", "Humanoid-v5") for name, sizes in MUJOCO_SIZES.items()}),
    "cage2_loop": ("Whole training loop on CAGE2", ["SB3: dummy", "SB3: subproc"], 30, {
        "25 environments x 100 steps, minibatch 2,500": sized(cage2, 25, 100, 2500),
        "256 environments x 100 steps, minibatch 3,200": sized(cage2, 256, 100, 3200)}),
    "mario_loop": ("Whole training loop on Super Mario Bros", ["SB3: nes_py, float32", "SB3: nes_py built by pip"], 2, {
        "16 environments x 64 steps, minibatch 256": sized(mario, 16, 64, 256)}),
    "gpu_loop": ("Whole training loop on a GPU", ["CPU"], 5, {
        "Super Mario Bros, 32 environments x 64 steps, minibatch 256": sized(
            gpu, 32, 64, 256, script="ppo_atari_mario", flags=f"{MARIO_FLAGS} --backend fceumm",
            devices=("CPU", "CPU, threads", "GPU", "GPU, compiled")),
        "CAGE2, 256 environments x 100 steps, minibatch 3,200": sized(
            gpu, 256, 100, 3200, script="ppo_cage2_parallel", flags="", devices=("CPU", "CPU, threads", "GPU")),
        "HalfCheetah-v5, 16 environments x 128 steps, minibatch 64": sized(
            gpu, 16, 128, 64, script="ppo_continuous_mujoco", flags="--update-epochs 10", devices=("CPU", "GPU")),
        "Super Mario Bros, 128 environments x 64 steps, minibatch 256": sized(
            gpu, 128, 64, 256, script="ppo_atari_mario", flags=f"{MARIO_FLAGS} --backend fceumm",
            devices=("GPU, compiled",))}),
}  # fmt: skip
QUICK = {"ours", "CPU", "GPU", "CleanRL-style: sync", "SB3: dummy", "SB3: nes_py, float32"}
QUICK |= {f"ours, {backend}" for backend in available_backends()[:1]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of the first setting, into runs/bench")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--pip-nes-py", metavar="FOLDER", help="a folder with nes-py as pip builds it, for SB3's Mario")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; choose among {', '.join(BENCHMARKS)}")
    if not any(options.only in setting for name in options.names or BENCHMARKS for setting in BENCHMARKS[name][3]):
        parser.error(f"no setting's name contains {options.only}")
    if options.pip_nes_py and not list(Path(options.pip_nes_py).glob("nes_py/lib_nes_env*")):
        parser.error(f"--pip-nes-py {options.pip_nes_py} holds no nes_py; --help says how to put one there")
    has_gpu = torch.cuda.is_available()
    if "gpu_loop" in options.names and not has_gpu:
        parser.error("gpu_loop needs a GPU, and PyTorch sees none here")
    with_sb3 = installed("stable_baselines3")
    for name in options.names or [name for name in BENCHMARKS if has_gpu or name != "gpu_loop"]:
        title, references, updates, settings = BENCHMARKS[name]
        special = {"pip_nes_py": options.pip_nes_py} if name == "mario_loop" else {}
        chosen = [setting for setting in settings if options.only in setting]
        for setting in chosen[:1] if options.quick else chosen:
            candidates = settings[setting](updates=2 if options.quick else updates, **special)
            for key in list(candidates):
                if (key.startswith("SB3") and not with_sb3) or (options.quick and key not in QUICK):
                    del candidates[key]
            info = machine_info()
            figures = interleave(candidates, 1 if options.quick else options.rounds)
            note = f"Timed over {2 if options.quick else updates} updates"
            on_gpu = name == "gpu_loop"
            note += f"; {torch.cuda.get_device_name()}." if on_gpu else f" of ours and {PEERS_UPDATES} of a peer's."
            publish(name, title, setting, figures, references, info, options.quick, note)


if __name__ == "__main__":
    main()
