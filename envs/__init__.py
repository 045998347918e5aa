"""Environments shared by the scripts, none of which imports torch or a script. This registers those with queues."""

import gymnasium

from envs.normalize import ClipAction, NormalizeObservation, NormalizeReward, RunningMeanStd
from envs.record_gif import RecordGif
from envs.subproc_vec_env import SubprocVecEnv, WorkerError
from envs.vectorize import vectorize

__all__ = [
    "ClipAction",
    "NormalizeObservation",
    "NormalizeReward",
    "RecordGif",
    "RunningMeanStd",
    "SubprocVecEnv",
    "WorkerError",
    "vectorize",
]

gymnasium.register("TwoQueue-v0", entry_point="envs.queueing:QueueEnv")
three_queues = {"arrival_probs": (0.3, 0.3, 0.1), "service_probs": (0.95, 0.95, 0.95), "setup": True}
gymnasium.register("ThreeQueue-v0", entry_point="envs.queueing:QueueEnv", kwargs=three_queues)
