"""CAGE Challenge 2: a network defence game (Blue) against scripted attackers (red), exact and fast.

`Cage2VecEnv` plays many games in one compiled loop, `Cage2Env` plays one (`gymnasium.make("CAGE2-v0")`), and
`envs.cage2.cyborg` puts the real CybORG behind the same interface. The rules stand in `rules.py` and
`red_agents.py`, the tables in `scenario.py`.
"""

import gymnasium as gym

from .env import Cage2Env
from .scenario import ACTION_NAMES, DECOYS, HOSTS, NUM_ACTIONS, RED_AGENTS
from .state import DRAW_NAMES
from .vec_env import Cage2VecEnv

__all__ = [
    "ACTION_NAMES",
    "DECOYS",
    "DRAW_NAMES",
    "HOSTS",
    "NUM_ACTIONS",
    "RED_AGENTS",
    "Cage2Env",
    "Cage2VecEnv",
]

gym.register("CAGE2-v0", entry_point="envs.cage2:Cage2Env", vector_entry_point="envs.cage2:Cage2VecEnv")
