"""What Blue remembers of an episode, and the reduced actions: wrappers' work between the game and the policy.

The game's 52 bits show one step. What was scanned, cleaned and where decoys stand is gone from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numba import njit

from .scenario import ACTION_NAMES, DECOY_CHECKS, DECOY_FITS, DECOYS, EXPLOITS, HOSTS, LISTENING
from .vec_env import check_same_step, checked_actions

# What each of the 145 actions is: a verb and a host (none for Sleep and Monitor).
VERB_AND_HOST = [(name.split()[0], HOSTS.index(name.split()[1]) if " " in name else -1) for name in ACTION_NAMES]

# The decoys that can run on each host, those against red's favourite exploits first: 41 (host, decoy) slots.
DECOY_SLOTS = [
    (host, d)
    for host in range(len(HOSTS))
    for d in sorted(range(len(DECOYS)), key=lambda d: -EXPLOITS[DECOYS[d].stops].weight)
    if DECOY_FITS[d] >> host & 1 and not LISTENING[host] & DECOY_CHECKS[d]
]
# The action that starts each slot's decoy. Host h has the slots from FIRST_SLOT[h] to before FIRST_SLOT[h + 1].
STARTERS = np.array([VERB_AND_HOST.index((f"Decoy{DECOYS[d].name}", host)) for host, d in DECOY_SLOTS])
FIRST_SLOT = np.searchsorted([host for host, _ in DECOY_SLOTS], range(len(HOSTS) + 1))

# The reduced actions are those of the challenge's winner (CardiffUni): four verbs on the nine hosts of consequence.
# The fourth, "the next decoy", depends on what stands there. With all decoys up it repeats the last one, which changes
# nothing, but for Vsftpd, of which another one starts.
REDUCED_HOSTS = [HOSTS.index(h) for h in ("Defender", "Enterprise0", "Enterprise1", "Enterprise2", "Op_Server0",
                                          "User1", "User2", "User3", "User4")]  # fmt: skip

# A workflow may ask for the repair of any host but User0, where red's sessions cost nothing.
WORKFLOW_HOSTS = [h for h, name in enumerate(HOSTS) if name != "User0"]


# The columns of a memory. Traces are 1 when something happens and fade: one of each kind for each host, then, which do
# not fade, whether a host was ever scanned and exploited, then the decoys ordered since the last Restore; two clocks.
NUM_HOSTS = len(HOSTS)
KINDS = ("Analyse", "Remove", "Restore", "Scan", "Exploit")
TRACES = slice(0, len(KINDS) * NUM_HOSTS)
FIRST_ACTIVITY = 3 * NUM_HOSTS  # traces of Scan and Exploit, then whether a host was ever scanned and exploited
FIRST_DECOY = FIRST_ACTIVITY + 4 * NUM_HOSTS
CLOCKS = slice(FIRST_DECOY + len(DECOY_SLOTS), FIRST_DECOY + len(DECOY_SLOTS) + 2)
MEMORY_SIZE = CLOCKS.stop

# A trace m moves by m <- m FADE[action], then up to SET[action] where that is more: what an action leaves behind is a
# row of a table. START is the memory of an episode that begins.
FADE = np.ones((len(ACTION_NAMES), MEMORY_SIZE), np.float32)
FADE[:, TRACES] = 0.8
FADE[:, CLOCKS] = 0.7, 0.95
SET = np.zeros((len(ACTION_NAMES), MEMORY_SIZE), np.float32)
for action, (verb, host) in enumerate(VERB_AND_HOST):
    if verb in KINDS:
        SET[action, KINDS.index(verb) * NUM_HOSTS + host] = 1
for slot, (host, _) in enumerate(DECOY_SLOTS):
    FADE[VERB_AND_HOST.index(("Restore", host)), FIRST_DECOY + slot] = 0
    SET[STARTERS[slot], FIRST_DECOY + slot] = 1
START = np.zeros(MEMORY_SIZE, np.float32)
START[CLOCKS] = 1


@njit
def expand(actions, now, plain, hosts):
    """The game's actions (num_envs,) for reduced ones: `plain`, then the next decoy of each of `hosts`."""
    expanded = np.empty_like(actions)
    for n, action in enumerate(actions):
        if action < len(plain):
            expanded[n] = plain[action]
        else:
            host = hosts[action - len(plain)]
            first, end = FIRST_SLOT[host], FIRST_SLOT[host + 1]
            num_up = int(now[n, FIRST_DECOY + first : FIRST_DECOY + end].sum())
            expanded[n] = STARTERS[min(first + num_up, end - 1)]  # with all up, the last one again
    return expanded


@njit
def remember(now, actions, seen):
    """Move the memories `now` (num_envs, MEMORY_SIZE) by a step: `actions` (num_envs,), then `seen` (num_envs, at least
    52). Returns whether what it read in `seen` were bits."""
    bits = True
    for n, action in enumerate(actions):
        for i in range(now.shape[1]):
            now[n, i] = max(now[n, i] * FADE[action, i], SET[action, i])
        for host in range(NUM_HOSTS):
            exploited = seen[n, 4 * host + 1]
            scanned = seen[n, 4 * host] - exploited  # bits 10, 11
            bits = bits and (scanned == 0.0 or scanned == 1.0) and (exploited == 0.0 or exploited == 1.0)
            for k, activity in enumerate((scanned, exploited, scanned, exploited)):
                i = FIRST_ACTIVITY + k * NUM_HOSTS + host
                now[n, i] = max(now[n, i], activity)
    return bits


class Memory(VectorWrapper):
    """What Blue has seen and done in this episode, as further inputs; and its reduced actions as the game's own.

    Everything is computed from Blue's own observations and actions, which a real defender would have too. For each
    host: how long ago it was last seen scanned, seen exploited, analysed, cleaned and restored (a trace that is 1 then
    and fades), whether it was ever scanned and exploited, which decoys were ordered since its last Restore; and how
    long the episode has lasted (two fading traces). `FADE` and `SET` say how each action moves them.

    With `memory` False observations stay as they are; without `reduced_to`, the hosts of the reduced actions, so do
    actions. With `horizon`, which must be the games' `max_steps`, their limit is a termination, and the share of it
    that has passed is an input too; which episodes a lost worker ended, `EpisodeStatistics` below must say.

    Raises ValueError for environments that do not restart within the step that ends an episode (SAME_STEP), and where
    the first 52 numbers of a wrapper's observation cannot be the game's bits.
    """

    def __init__(
        self, env: VectorEnv, memory: bool, reduced_to: Sequence[int] = (), horizon: int | None = None
    ) -> None:
        super().__init__(env)
        check_same_step(env, "Memory")
        self.memory, self.reduced_to, self.horizon = memory, np.array(reduced_to, int), horizon
        self.plain = np.array([VERB_AND_HOST.index((verb, h)) for verb in KINDS[:3] for h in reduced_to], int)
        self.now = np.tile(START, (self.num_envs, 1))  # (num_envs, MEMORY_SIZE)
        self.steps = np.zeros(self.num_envs, np.float32)
        extra = MEMORY_SIZE * memory + (horizon is not None)
        obs_dim = env.single_observation_space.shape[0] + extra  # type: ignore[index]
        self.single_observation_space = gym.spaces.Box(0.0, 1.0, (obs_dim,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        if reduced_to:
            self.single_action_space = gym.spaces.Discrete(len(self.plain) + len(reduced_to))
            self.action_space = batch_space(self.single_action_space, self.num_envs)

    def game_actions(self, actions: np.ndarray) -> np.ndarray:
        """The game's actions (num_envs,) in 0..144 for the policy's."""
        if not self.reduced_to.size:
            return actions
        actions = checked_actions(actions, self.num_envs, len(self.plain) + len(self.reduced_to))
        return expand(actions, self.now, self.plain, self.reduced_to)

    def inputs(self, obs: np.ndarray) -> np.ndarray:
        """(num_envs, 52) -> (num_envs, obs_dim)."""
        parts = [obs, self.now] if self.memory else [obs]
        parts += [self.steps[:, None] / self.horizon] if self.horizon else []
        return np.concatenate(parts, axis=1, dtype=np.float32)  # a wrapper may have made them float64

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        if "reset_mask" in (options or {}):
            raise ValueError("Memory restarts each episode in its last step: leave options['reset_mask'] out.")
        obs, infos = self.env.reset(seed=seed, options=options)
        self.now[:], self.steps[:] = START, 0
        return self.inputs(obs), infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        actions = self.game_actions(actions)
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        infos["game_actions"] = actions
        ended = np.flatnonzero(terminated | truncated)
        seen = obs
        if ended.size:
            seen = obs.copy()
            seen[ended] = np.stack(infos["final_obs"][ended])
        if not remember(self.now, actions, seen) and self.memory:
            raise ValueError("Memory reads the game's 52 bits: a wrapper appends to them, or do without (--no-memory).")
        self.steps += 1
        if ended.size:
            final = self.inputs(seen)
            infos["final_obs"] = infos["final_obs"].copy()
            for n in ended:
                infos["final_obs"][n] = final[n]
            self.now[ended], self.steps[ended] = START, 0
        if self.horizon:  # the limit is then the end of the game, and no cut; what is lost with its worker remains one
            lost = infos["worker_restarted"]
            terminated, truncated = terminated | truncated & ~lost, truncated & lost
        return self.inputs(obs), rewards, terminated, truncated, infos

    def get_state(self) -> dict[str, Any]:
        return {"now": self.now.copy(), "steps": self.steps.copy(), "env": self.env.get_state()}  # type: ignore[attr-defined]

    def set_state(self, state: dict[str, Any]) -> bool:
        """Go on from `get_state()`. False, and nothing is changed, where the wrapped environments refuse."""
        if self.env.set_state(state["env"]) is False:  # type: ignore[attr-defined]
            return False
        self.now, self.steps = np.array(state["now"]), np.array(state["steps"])
        return True
