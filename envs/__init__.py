"""Environments shared by the scripts. Nothing in here imports torch or a script. Importing it registers TwoQueue-v0."""

import gymnasium

from envs.normalize import NormalizeObservation, NormalizeReward, RunningMeanStd
from envs.record_gif import RecordGif
from envs.subproc_vec_env import SubprocVecEnv, WorkerError
from envs.vectorize import vectorize

__all__ = [
    "NormalizeObservation",
    "NormalizeReward",
    "RecordGif",
    "RunningMeanStd",
    "SubprocVecEnv",
    "WorkerError",
    "vectorize",
]

gymnasium.register("TwoQueue-v0", entry_point="envs.queueing:TwoQueueEnv")
