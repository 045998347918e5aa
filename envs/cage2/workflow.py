"""Workflows: in which order Blue repairs the network, and whether it keeps to that order.

A workflow is a priority order over the five unit types. Blue is told it by a 5 x 5 one-hot, and a fix (Remove or
Restore) complies if no unit of a strictly higher type has, in the true state before the action, a red session that
Blue can end. User0 does not count: sessions there cost nothing, and the reduced actions cannot end them.
"""

from __future__ import annotations

import difflib
import itertools
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from .scenario import ACTION_NAMES, HOSTS
from .vec_env import check_same_step

UNIT_TYPES = ("defender", "enterprise", "op_server", "op_host", "user")
ORDERS = tuple(itertools.permutations(UNIT_TYPES))  # 120, the highest priority first
NUM_TYPES = len(UNIT_TYPES)
ONE_HOT_SIZE = NUM_TYPES * NUM_TYPES
NO_FIX_PENALTY = 0.2  # of `alignment`, at the end of an episode without a fix that could be judged

_ORDERS = np.array([[UNIT_TYPES.index(unit) for unit in order] for order in ORDERS])
RANKS = np.argsort(_ORDERS, axis=1)  # (120, 5): the position of each type in each order, 0 the highest
ONE_HOTS = (_ORDERS[:, :, None] == np.arange(NUM_TYPES)).reshape(len(ORDERS), ONE_HOT_SIZE).astype(np.float32)

TYPE_OF_HOST = np.array([UNIT_TYPES.index(host.lower().rstrip("0123456789")) for host in HOSTS])
# UNITS[h, k]: 1 if host h is a unit of type k that can be cleaned.
UNITS = (TYPE_OF_HOST[:, None] == np.arange(NUM_TYPES)).astype(np.float32)
UNITS[HOSTS.index("User0")] = 0
# FIXED_TYPE[a]: the type of the host that action a repairs, -1 for actions that repair nothing.
FIXED_TYPE = np.array([TYPE_OF_HOST[HOSTS.index(name.split()[1])] if name.startswith(("Remove ", "Restore ")) else -1
                       for name in ACTION_NAMES])  # fmt: skip

# What a fix is, and the columns of the counts of an episode. Judged are the fixes that are not needless.
VERDICTS = ("compliant", "strict", "judged", "needless")
COMPLIANT, STRICT, JUDGED, NEEDLESS = range(len(VERDICTS))


def parse_workflow(text: str) -> int:
    """The index in `ORDERS` of an order written as "defender,enterprise,op_server,op_host,user".

    Raises ValueError, in one sentence, for a type that does not exist, is missing or stands there twice.
    """
    units = [unit.strip() for unit in text.split(",")]
    for unit in units:
        if unit not in UNIT_TYPES:
            close = difflib.get_close_matches(unit.lower(), (*UNIT_TYPES, "any"), n=1, cutoff=0.0)[0]
            raise ValueError(f"There is no unit type {unit!r} in a workflow; did you mean {close}?")
    if sorted(units) != sorted(UNIT_TYPES):
        raise ValueError(f"A workflow names each of {', '.join(UNIT_TYPES)} once, but this is {text!r}.")
    return ORDERS.index(tuple(units))


def judge_fixes(actions: np.ndarray, clearable: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """What `VERDICTS` say of actions (N,) in 0..144, as (N, 4) bool.

    `clearable` (N, 13) bool is the true state before the action (see `Cage2VecEnv.true_state`), `ranks` (N, 5) the
    workflow's rows of `RANKS`. A fix is needless if there is nothing to repair anywhere, else it is judged:
    compliant if no strictly higher type needs repair, strict if its own type is the highest that does.
    """
    needs_repair = clearable.astype(np.float32) @ UNITS > 0
    highest = np.where(needs_repair, ranks, NUM_TYPES).min(axis=1)
    fixed = FIXED_TYPE[actions]
    rank = ranks[np.arange(len(ranks)), fixed]  # of no meaning where nothing is fixed
    judged = (fixed >= 0) & (highest < NUM_TYPES)
    needless = (fixed >= 0) & (highest == NUM_TYPES)
    return np.stack([judged & (rank <= highest), judged & (rank == highest), judged, needless], axis=1)


def compliance_of(counts: np.ndarray, verdict: int = COMPLIANT) -> np.ndarray:
    """The share of judged fixes that are compliant (or strict), (...,) for counts (..., 4); nan: none was judged."""
    judged = counts[..., JUDGED]
    return np.where(judged > 0, counts[..., verdict] / np.maximum(judged, 1), np.nan)


def mean_of_defined(values: np.ndarray) -> float:
    """The mean of the numbers among `values`; nan if all are nan."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else float("nan")


def fix_metrics(counts: np.ndarray) -> dict[str, float]:
    """Of the episodes whose counts are (episodes, 4): mean compliance and strict compliance of the episodes with judged
    fixes, compliance of all their fixes together, and needless fixes an episode. nan: nothing to judge."""
    return {
        "compliance": mean_of_defined(compliance_of(counts)),
        "compliance_micro": float(compliance_of(counts.sum(0))) if len(counts) else float("nan"),
        "strict_compliance": mean_of_defined(compliance_of(counts, STRICT)),
        "needless_fixes": float(counts[:, NEEDLESS].mean()) if len(counts) else float("nan"),
    }


def is_compliant(recent: np.ndarray, episodes: np.ndarray, threshold: float, min_episodes: int) -> bool:
    """Whether training may stop: the mean over environments of their mean compliance in their last episodes.

    `recent` (num_envs, k, 4) are the counts of the last k episodes of each environment, `episodes` (num_envs,) how
    many each has ended. All must have ended `min_episodes`, and 10 fixes must have been judged; episodes without
    one are left out.
    """
    if episodes.min() < min_episodes or recent[..., JUDGED].sum() < 10:
        return False
    return mean_of_defined(np.array([mean_of_defined(env) for env in compliance_of(recent)])) >= threshold


class WorkflowEnv(VectorWrapper):
    """CAGE2 games with a workflow each: a one-hot of 25 more inputs, verdicts on fixes, an alignment reward.

    With `workflow` "any", each episode has an order of its own: that of episode k of environment n depends on
    seed + n and k alone. An episode that is reset before its end begins anew, with its order. Rewards stay the
    game's; infos hold, for each environment,

    - `fixes` (N, 4): the counts of `VERDICTS` in the episode so far, also in its last step;
    - `alignment` (N,): alignment * (c_t - c_{t-1}), where c_t is the episode's compliance so far and c_0 = 0, and
      -0.2 alignment at the end of an episode without a judged fix. The sum of any other is alignment * c_T. This is
      not a potential of the state, so it changes which policy is best: it is there to steer.

    The infos of `env` must hold what `EpisodeStatistics` adds and `game_actions` (N,), what was done in terms of the
    game. The true state is that of `true_state`, or in other processes the `clearable` of the infos.

    Raises ValueError for a workflow that does not exist, and for environments that do not restart within the step that
    ends an episode (SAME_STEP).
    """

    RECENT = 5  # episodes of each environment that `is_compliant` looks at

    def __init__(self, env: VectorEnv, workflow: str = "any", alignment: float = 30.0) -> None:
        super().__init__(env)
        check_same_step(env, "WorkflowEnv")
        self.workflow = None if workflow == "any" else parse_workflow(workflow)
        self.alignment = alignment
        self.follow_infos = not hasattr(env.unwrapped, "true_state")
        self.clearable = np.zeros((self.num_envs, len(HOSTS)), bool)  # what the last infos said, if they are followed
        self.seeds = np.random.default_rng().integers(2**31, size=self.num_envs)
        self.episodes = np.zeros(self.num_envs, np.int64)  # ended since the seed was set
        self.orders = np.zeros(self.num_envs, np.int64)
        self.counts = np.zeros((self.num_envs, len(VERDICTS)), np.int64)
        self.compliance = np.zeros(self.num_envs)  # of this episode so far; 0 before its first judged fix
        self.recent = np.zeros((self.num_envs, self.RECENT, len(VERDICTS)), np.int64)
        obs_dim = env.single_observation_space.shape[0] + ONE_HOT_SIZE  # type: ignore[index]
        self.single_observation_space = spaces.Box(0.0, 1.0, (obs_dim,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def _start(self, envs: np.ndarray) -> None:
        """Begin an episode in these environments."""
        self.counts[envs], self.compliance[envs] = 0, 0
        for n in envs:
            if self.workflow is None:
                self.orders[n] = np.random.default_rng([self.seeds[n], self.episodes[n]]).integers(len(ORDERS))
            else:
                self.orders[n] = self.workflow

    def _inputs(self, obs: np.ndarray) -> np.ndarray:
        return np.concatenate([obs, ONE_HOTS[self.orders]], axis=1)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        obs, infos = self.env.reset(seed=seed, options=options)  # refuses options["reset_mask"], which would mix orders
        if seed is not None:
            seeds = seed + np.arange(self.num_envs) if isinstance(seed, int | np.integer) else seed
            self.seeds = np.array([old if new is None else new for new, old in zip(seeds, self.seeds, strict=True)])
            self.episodes[:], self.recent[:] = 0, 0
        self._start(np.arange(self.num_envs))
        if self.follow_infos:
            if "clearable" not in infos:
                raise ValueError("WorkflowEnv needs the true state: make the game with state_in_info=True.")
            self.clearable = infos["clearable"]
        return self._inputs(obs), infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        before = self.clearable
        if not self.follow_infos:
            before = self.env.unwrapped.true_state()["clearable"].copy()  # type: ignore[attr-defined]
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        lost = infos["worker_restarted"]  # with their worker, and their action
        self.counts += judge_fixes(infos["game_actions"], before, RANKS[self.orders]) * ~lost[:, None]
        compliance = self.counts[:, COMPLIANT] / np.maximum(self.counts[:, JUDGED], 1)
        infos["alignment"], infos["fixes"] = self.alignment * (compliance - self.compliance), self.counts.copy()
        self.compliance = compliance
        if self.follow_infos:
            self.clearable = infos["clearable"]
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            whole = infos["ended_envs"]  # without those lost with a worker
            infos["alignment"][whole] -= NO_FIX_PENALTY * self.alignment * (self.counts[whole, JUDGED] == 0)
            final_obs = infos["final_obs"].copy()
            for n in ended:
                final_obs[n] = np.append(final_obs[n], ONE_HOTS[self.orders[n]])
            infos["final_obs"] = final_obs
            self.recent[whole] = np.roll(self.recent[whole], 1, axis=1)
            self.recent[whole, 0] = self.counts[whole]
            self.episodes[ended] += 1
            self._start(ended)
        return self._inputs(obs), rewards, terminated, truncated, infos

    def get_state(self) -> dict[str, Any]:
        """All that a continued run needs; with games in other processes also what their last infos said."""
        names = ["seeds", "episodes", "orders", "counts", "compliance", "recent"] + ["clearable"] * self.follow_infos
        return {name: getattr(self, name).copy() for name in names} | {"env": self.env.get_state()}  # type: ignore[attr-defined]

    def set_state(self, state: dict[str, Any]) -> bool:
        """Go on from `get_state()`. False, and nothing is changed, where the wrapped environments refuse."""
        if self.env.set_state(state["env"]) is False:  # type: ignore[attr-defined]
            return False
        for name, value in state.items():
            if name != "env":
                setattr(self, name, np.array(value))
        return True
