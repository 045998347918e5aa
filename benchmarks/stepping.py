"""How fast do environments step? Ours beside their peers, and beside what the cores can do.

    python -m benchmarks.stepping vec_env       # SubprocVecEnv: CartPole, HalfCheetah, images; about two minutes
    python -m benchmarks.stepping mujoco_env    # MujocoBatchVecEnv on five tasks
    python -m benchmarks.stepping mario_env     # MarioEnv on each emulator
    python -m benchmarks.stepping cage2         # Cage2VecEnv
    python -m benchmarks.stepping --quick       # all four, a few short rounds, into runs/bench

Actions are random and used over and over; episodes that end begin anew. The limit is what the cores could do if nobody
waited for anybody: one process a core, each in a bare loop over its share of the environments. For MuJoCo that loop
writes the controls and calls `mj_step`, without observations and rewards, and puts a simulation back to its start as
often as episodes end in the task. A vector environment hands out all results of a step together, so each step lasts
as long as the slowest share: the second limit is that of the same loops, had they met after each step at no cost.

Mario is measured in CPU time of one process. The canonical stack is gym-super-mario-bros 7.4.0 as its users wrap it; it
needs NumPy 1 and gym, so it runs in an interpreter of its own, named by --peer-python:

    python -m venv peer && peer/bin/pip install "numpy<2" gym==0.26.2 gym-super-mario-bros==7.4.0 "opencv-python<4.12"

The real CybORG is not on PyPI: its 560 to 670 steps/s, with resets, are quoted from envs/cage2/SPEC.md, section 14.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from benchmarks.common import (
    CORES,
    at_least_one,
    installed,
    interleave,
    machine_info,
    parser_of,
    positive_seconds,
    publish,
)
from benchmarks.step_subproc import ImageEnv, Step, planned, step_for
from envs.cage2 import Cage2Env, Cage2VecEnv, simulator
from envs.mario import MarioEnv, available_backends
from envs.mujoco_batch import MujocoBatchVecEnv
from envs.nes_core import make_core
from envs.subproc_vec_env import SubprocVecEnv

Candidates = dict[str, Callable[[], float]]  # name -> measures environment steps per second once
SAME_STEP = AutoresetMode.SAME_STEP
NUM_ENVS = 16
LIMIT, TOGETHER = "limit: independent loops", "limit: loops that meet after each step"


# ---- the limit ------------------------------------------------------------------------------------------------------
def loop(pipe: Any, make_step: Callable[[int], Step], actions: list[np.ndarray]) -> None:
    """A process of the limit: steps its share for as many seconds as it is asked to, and sends each step's."""
    step = make_step(len(actions[0]))
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        times = [time.perf_counter()]
        while times[-1] < times[0] + seconds:
            for batch in actions:
                step(batch)
                times.append(time.perf_counter())
        pipe.send(np.diff(times))


@contextmanager
def loops(make_step: Callable[[int], Step], actions: list[np.ndarray], seconds: float) -> Iterator[Candidates]:
    """The two limits. `make_step(n)`, called in the process, builds n environments and returns what steps them."""
    context = multiprocessing.get_context("spawn")
    shares = np.array_split(np.arange(len(actions[0])), min(CORES, len(actions[0])))
    pipes, processes = [], []
    for share in shares:
        ours, theirs = context.Pipe()
        arguments = (theirs, make_step, [batch[share] for batch in actions])
        processes.append(context.Process(target=loop, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()  # so that a process which dies is an EOFError
        pipes.append(ours)
    assert {pipe.recv() for pipe in pipes} == {"ready"}

    def measure(together: bool) -> float:
        for pipe in pipes:
            pipe.send(seconds)
        durations = [pipe.recv() for pipe in pipes]
        if together:
            return len(actions[0]) / float(np.mean([max(step) for step in zip(*durations, strict=False)]))
        return sum(len(share) / times.mean() for share, times in zip(shares, durations, strict=True))

    try:
        yield {LIMIT: partial(measure, False), TOGETHER: partial(measure, True)}
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()


def gymnasium_step(env_fn: Callable[[], gym.Env], num_envs: int) -> Step:
    envs = [env_fn() for _ in range(num_envs)]
    for env in envs:
        env.reset()

    def step(batch: np.ndarray) -> None:
        for env, action in zip(envs, batch, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return step


def mujoco_step(env_id: str, episode: int, num_envs: int) -> Step:
    """Bare physics. Simulations are put back every `episode` steps: a Humanoid that lies on the floor costs twice."""
    env: Any = quiet_make(env_id).unwrapped
    datas, starts, count = [], [], 0
    for n in range(num_envs):
        env.reset(seed=n)
        datas.append(mujoco.MjData(env.model))
        starts.append((env.data.qpos.copy(), env.data.qvel.copy()))

    def step(controls: np.ndarray) -> None:
        nonlocal count
        for data, control, (qpos, qvel) in zip(datas, controls, starts, strict=True):
            if count % episode == 0:
                mujoco.mj_resetData(env.model, data)
                data.qpos[:], data.qvel[:] = qpos, qvel
            data.ctrl[:] = control
            mujoco.mj_step(env.model, data, env.frame_skip)
        count += 1

    return step


def mean_episode_length(envs: MujocoBatchVecEnv, actions: list[np.ndarray], num_steps: int = 1000) -> int:
    """Mean length of the episodes that these actions make, in steps."""
    envs.reset(seed=0)
    ends = sum(int(np.logical_or(*envs.step(actions[t % len(actions)])[2:4]).sum()) for t in range(num_steps))
    return round(num_steps * envs.num_envs / max(ends, 1))


# ---- vector environments --------------------------------------------------------------------------------------------
def quiet_make(env_id: str) -> gym.Env:
    """Gymnasium's environment, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gym.make(env_id)


def peers_of(stack: ExitStack, env_fn: Callable[[], gym.Env], envpool_id: str | None, subproc: bool) -> dict[str, Any]:
    """The vector environments that ours are compared with, reset; closed by `stack`."""
    env_fns = [env_fn] * NUM_ENVS
    peers: dict[str, Any] = {"gymnasium SyncVectorEnv": SyncVectorEnv(env_fns, autoreset_mode=SAME_STEP)}
    if subproc:
        peers["gymnasium AsyncVectorEnv"] = AsyncVectorEnv(env_fns, autoreset_mode=SAME_STEP)
        if installed("stable_baselines3"):
            from stable_baselines3.common.vec_env import SubprocVecEnv as PeerVecEnv

            peers["SB3 SubprocVecEnv"] = PeerVecEnv(env_fns, start_method="fork")
    if envpool_id is not None and installed("envpool"):
        import envpool

        peers["EnvPool (its own C++)"] = envpool.make_gymnasium(envpool_id, num_envs=NUM_ENVS, num_threads=CORES)
    for peer in peers.values():
        peer.reset()
        stack.callback(peer.close)
    return peers


def steps_of(envs: dict[str, Any], actions: list[np.ndarray], seconds: float) -> Candidates:
    def converted(name: str) -> list[np.ndarray]:
        integers = actions[0].dtype.kind == "i" and name.startswith("EnvPool")
        return [batch.astype(np.int32) for batch in actions] if integers else actions

    return {name: partial(step_for, seconds, env.step, converted(name)) for name, env in envs.items()}


def vec_env(stack: ExitStack, task: str, seconds: float) -> Candidates:
    env_fn: Callable[[], gym.Env] = ImageEnv if task == "images 64x64x3" else partial(quiet_make, task)
    ours = SubprocVecEnv([env_fn] * NUM_ENVS, autoreset_mode=SAME_STEP)
    ours.reset(seed=0)
    stack.callback(ours.close)
    actions = planned(ours)
    peers = peers_of(stack, env_fn, None if env_fn is ImageEnv else task, subproc=True)
    limits = stack.enter_context(loops(partial(gymnasium_step, env_fn), actions, seconds))
    return steps_of({"SubprocVecEnv (ours)": ours, **peers}, actions, seconds) | limits


def mujoco_env(stack: ExitStack, task: str, seconds: float) -> Candidates:
    ours = MujocoBatchVecEnv(task, NUM_ENVS)
    stack.callback(ours.close)
    actions = planned(ours)
    limits = stack.enter_context(
        loops(partial(mujoco_step, task, mean_episode_length(ours, actions)), actions, seconds)
    )
    ours.reset(seed=0)
    peers = peers_of(stack, partial(quiet_make, task), task, subproc=False)
    return steps_of({"MujocoBatchVecEnv (ours)": ours, **peers}, actions, seconds) | {LIMIT: limits[LIMIT]}


# ---- CAGE2 ----------------------------------------------------------------------------------------------------------
FIRST_USE = """
import time
start = time.process_time()
import numpy as np
from envs.cage2 import Cage2VecEnv
env = Cage2VecEnv(25, "meander", seed=0)
env.reset()
env.step(np.zeros(25, int))
print(time.process_time() - start)
"""


def cage2(stack: ExitStack, task: str, seconds: float) -> Candidates:
    single = partial(Cage2Env, "meander", state_in_info=False)
    cart_pole = partial(gym.make, "CartPole-v1")
    envs: dict[str, Any] = {
        "Cage2VecEnv, 25 B_line": Cage2VecEnv(25, "b_line"),
        "Cage2VecEnv, 25 Meander": Cage2VecEnv(25, "meander"),
        "Cage2VecEnv, 25 Meander with Green": Cage2VecEnv(25, "meander", green=True),
        "Cage2VecEnv, 1,024 Meander": Cage2VecEnv(1024, "meander"),
        "Cage2VecEnv, 1 Meander": Cage2VecEnv(1, "meander"),
        "25 Cage2Env in SyncVectorEnv": SyncVectorEnv([single] * 25, autoreset_mode=SAME_STEP),
        "25 Cage2Env in SubprocVecEnv": SubprocVecEnv([single] * 25, autoreset_mode=SAME_STEP),
        "25 CartPole in SyncVectorEnv": SyncVectorEnv([cart_pole] * 25, autoreset_mode=SAME_STEP),
    }  # fmt: skip
    candidates: Candidates = {}
    for name, env in envs.items():
        stack.callback(env.close)
        env.reset(seed=0)
        candidates[name] = partial(step_for, seconds, env.step, planned(env, 100))
    return candidates


def first_use() -> str:
    """What the simulator costs before its first step, as a sentence."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        first, later = (
            float(subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=True,
                                 env=environment).stdout) for _ in range(2)
        )  # fmt: skip
    return (f"From import to the first step: {first:.1f} s of CPU time on the first use, which compiles, {later:.1f} s "
            f"on later ones. An environment's state takes {simulator.new_states(1).nbytes} bytes.")  # fmt: skip


# ---- Mario ----------------------------------------------------------------------------------------------------------
PEER = """
import sys, time, warnings
warnings.simplefilter("ignore")
import gym, gym_super_mario_bros, numpy as np
from gym.wrappers import FrameStack, GrayScaleObservation, ResizeObservation
from gym_super_mario_bros.actions import SIMPLE_MOVEMENT
from nes_py.wrappers import JoypadSpace

class SkipFrame(gym.Wrapper):
    def step(self, action):
        total = 0.0
        for _ in range(4):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info

JoypadSpace.reset = lambda self, **kwargs: self.env.reset(**kwargs)
env = gym_super_mario_bros.make("SuperMarioBros-1-1-v0", apply_api_compatibility=True)
env = FrameStack(ResizeObservation(GrayScaleObservation(SkipFrame(JoypadSpace(env, SIMPLE_MOVEMENT))), 84), 4)
env.reset()
actions = np.random.default_rng(0).integers(1, 5, 4096).tolist()
print("ready", flush=True)
for line in sys.stdin:
    steps, start = 0, time.process_time()
    while time.process_time() - start < float(line):
        obs, reward, terminated, truncated, info = env.step(actions[steps % 4096])
        np.asarray(obs)
        steps += 1
        if terminated or truncated:
            env.reset()
    print(steps / (time.process_time() - start), flush=True)
"""
CANONICAL = "canonical stack (gray84)"
BUILT_BY_PIP = (
    "The canonical stack plays on nes-py as pip builds it for the other interpreter, not as `make nes_py` does."
)


def bare_emulator(backend: str) -> Step:
    """Emulates the four frames of a step, from the start of 1-1 and never far from it."""
    env = MarioEnv("1-1", backend)
    env.reset()
    start, core, buttons, frames = env.get_state()["game"]["core"], make_core(backend), env.buttons, 0
    core.load(start)

    def step(action: np.ndarray) -> None:
        nonlocal frames
        for _ in range(4):
            core.step(buttons[int(action[0])])
        frames += 4
        if frames % 1000 == 0:
            core.load(start)

    return step


def mario_step(num_envs: int = 1, **options: Any) -> Step:
    """Steps one of the environments, each in turn, as a worker of SubprocVecEnv holds them."""
    envs, turn = [MarioEnv("1-1", **options) for _ in range(num_envs)], 0
    for env in envs:
        env.reset(seed=0)

    def step(action: np.ndarray) -> None:
        nonlocal turn
        env = envs[turn % num_envs]
        turn += 1
        _, _, terminated, truncated, _ = env.step(int(action[0]))
        if terminated or truncated:
            env.reset()

    return step


def canonical(stack: ExitStack, python: str, seconds: float) -> Callable[[], float]:
    """Starts the canonical stack in its interpreter."""
    command = [python, "-W", "ignore", "-c", PEER]
    peer: Any = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    stack.callback(peer.stdin.close)
    while (line := peer.stdout.readline().strip()) != "ready":
        if not line and peer.poll() is not None:
            sys.exit(f"The canonical stack did not start in {python}; --help says what it needs.")

    def measure() -> float:
        print(seconds, file=peer.stdin, flush=True)
        return float(peer.stdout.readline())

    return measure


def mario_env(stack: ExitStack, task: str, seconds: float, peer_python: str | None = None) -> Candidates:
    actions = np.random.default_rng(0).integers(1, 5, (64, 1))  # right, with and without A and B
    steps = {
        "bare emulator": bare_emulator(task),
        "MarioEnv gray64": mario_step(backend=task),
        "MarioEnv gray84": mario_step(backend=task, obs="gray84"),
        "MarioEnv rgb64, max-pooled": mario_step(backend=task, obs="rgb64", max_pool=True),
        f"{NUM_ENVS} x MarioEnv gray64": mario_step(NUM_ENVS, backend=task),
    }
    candidates = {name: partial(step_for, seconds, step, actions, time.process_time) for name, step in steps.items()}
    return candidates | ({CANONICAL: canonical(stack, peer_python, seconds)} if peer_python else {})


# ---- the command line -----------------------------------------------------------------------------------------------
# name -> (title, candidates of a task, tasks, references of the table)
BENCHMARKS: dict[str, tuple[str, Callable[..., Candidates], list[str], list[str]]] = {
    "vec_env": ("Vector environments: 16 environments", vec_env,
                ["CartPole-v1", "HalfCheetah-v5", "images 64x64x3"], [LIMIT, "gymnasium AsyncVectorEnv"]),
    "mujoco_env": ("MuJoCo stepping alone: 16 environments", mujoco_env,
                   ["HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "Hopper-v5", "Walker2d-v5"],
                   [LIMIT, "gymnasium SyncVectorEnv"]),
    "mario_env": ("Super Mario Bros stepping alone: one process, per second of CPU time", mario_env,
                  list(available_backends()), ["bare emulator", CANONICAL]),
    "cage2": ("CAGE2 stepping alone: one core, except in SubprocVecEnv", cage2, ["random actions"],
              ["25 Cage2Env in SyncVectorEnv"]),
}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a trial of a few short rounds, into runs/bench")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--seconds", type=positive_seconds, default=0.6, help="length of one measurement")
    parser.add_argument("--peer-python", help="an interpreter with Mario's canonical stack")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; choose among {', '.join(BENCHMARKS)}")
    if options.peer_python and shutil.which(options.peer_python) is None:
        parser.error(f"--peer-python {options.peer_python} is no program; --help says how to make one")
    rounds, seconds = (2, 0.1) if options.quick else (options.rounds, options.seconds)
    for name in options.names or BENCHMARKS:
        title, make, tasks, references = BENCHMARKS[name]
        peer = {"peer_python": options.peer_python} if name == "mario_env" else {}
        for task in tasks[:1] if options.quick else tasks:
            info = machine_info()
            with ExitStack() as stack:
                candidates = make(stack, task, seconds, **peer)
                interleave(candidates, 1)  # to warm up
                figures = interleave(candidates, rounds)
            note = first_use() if name == "cage2" else BUILT_BY_PIP if CANONICAL in candidates else ""
            publish(name, title, task, figures, references, info, options.quick, note)


if __name__ == "__main__":
    main()
