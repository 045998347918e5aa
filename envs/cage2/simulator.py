"""Steps many environments in one compiled loop (SPEC 5). The arrays of a batch in, the arrays of a batch out.

Why a compiled scalar step and not masked NumPy: the rules are full of "the first that applies" and "unless", which
read like the specification when written for one environment, and compiled they cost a fraction of a microsecond.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numba import njit

from .outcome import observe, settle_costs
from .red_agents import red_acts
from .rules import blue_acts, green_acts
from .scenario import NUM_HOSTS, RED_AGENTS

from .state import (  # isort: skip
    DRAW_NAMES, EPISODE_START, FREE, FRESH_EPISODE, NONE, NUM_DRAWS, RECORD_SIZE, RED_AGENT, STATE, meet_red_agent,
)  # fmt: skip

VERSIONS = ("head", "leaderboard")  # SPEC 0
WRAPPERS = ("challenge", "cardiff")  # SPEC 10, 10.1


@njit
def step_one(e, action, tape, obs):
    """One step of one environment: Blue, Green, red, reward, observation (SPEC 5)."""
    for slot in range(NUM_DRAWS):
        e.tape[slot] = tape[slot]
        e.draws[slot] = NONE
    e.impossible_draw = False
    for host in range(NUM_HOSTS):
        e.events[host] = 0
        e.event_ports[host] = 0
        e.shell_seen[host] = False
    blue_acts(e, action)
    green_acts(e)
    red_acts(e)
    settle_costs(e)
    observe(e, obs)
    e.steps += 1


def _compile(function: Callable) -> Callable:
    """Compile a loop over environments; keep the machine code on disk if any cache folder is writable."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # Numba found no folder to write to
        return njit(nogil=True)(function)


def _make_kernels(rules_digest: str) -> tuple[Callable, Callable]:
    """Build the loops that step and start a batch.

    Numba's cache notices changes of this file only. But it also keys on the values that a function closes over, so
    mentioning the digest of all rule files makes an edited rule compile anew.
    """

    def step_batch(records, actions, tapes, obs, rewards, truncations):
        rules_digest  # noqa: B018  (part of the cache key)
        states = records.view(STATE)
        for n in range(states.shape[0]):
            e = states[n]
            step_one(e, actions[n], tapes[n], obs[n])
            rewards[n] = e.cost_tenths / -10.0
            truncations[n] = e.steps >= e.max_steps

    def start_batch(records, which, red_agents):
        rules_digest  # noqa: B018
        states = records.view(STATE)
        for n in range(states.shape[0]):
            if which[n]:
                for i in range(EPISODE_START, RECORD_SIZE):
                    records[n * RECORD_SIZE + i] = FRESH_EPISODE[i]
                meet_red_agent(states[n], red_agents[n])

    return _compile(step_batch), _compile(start_batch)


_RULE_FILES = ("scenario.py", "state.py", "rules.py", "red_agents.py", "outcome.py", "simulator.py")
_DIGEST = hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in _RULE_FILES)).hexdigest()
_step_batch, _start_batch = _make_kernels(_DIGEST)


def red_mixture(red_agent: str | Mapping[str, float]) -> list[float]:
    """The probability of each of `RED_AGENTS` at the start of an episode; ValueError if they are none."""
    probabilities = {red_agent: 1.0} if isinstance(red_agent, str) else dict(red_agent)
    unknown = [name for name in probabilities if name not in RED_AGENTS]
    if unknown:
        raise ValueError(f"There is no red agent {unknown[0]!r}; choose from {', '.join(RED_AGENTS)}.")
    mixture = [float(probabilities.get(name, 0.0)) for name in RED_AGENTS]
    if min(mixture) < 0 or not abs(sum(mixture) - 1) < 1e-6:
        raise ValueError(
            f"The probabilities of red agents must be >= 0 and sum to 1, but {probabilities} sum to {sum(mixture):g}."
        )
    return [probability / sum(mixture) for probability in mixture]


def new_states(
    num_envs: int,
    red_agent: str | Mapping[str, float] = "b_line",
    green: bool = False,
    version: str = "head",
    wrapper: str = "challenge",
    max_steps: int = 100,
) -> np.ndarray:
    """An array (num_envs,) of `STATE` records with these settings, for `seed_states` and `start`.

    Raises ValueError, in one sentence, for a setting that does not exist.
    """
    for name, value, choices in (("version", version, VERSIONS), ("wrapper", wrapper, WRAPPERS)):
        if value not in choices:
            raise ValueError(f"There is no {name} {value!r}; choose from {', '.join(choices)}.")
    for name, number in (("num_envs", num_envs), ("max_steps", max_steps)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, but it is {number!r}.")
    states = np.zeros(num_envs, STATE)
    states["red_mixture"] = red_mixture(red_agent)
    states["green"] = bool(green)
    states["leaderboard"] = version == "leaderboard"
    states["cardiff"] = wrapper == "cardiff"
    states["max_steps"] = max_steps
    return states


def system_seed() -> int:
    """A seed from the operating system's randomness."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def seed_states(states: np.ndarray, seeds: Iterable[int]) -> None:
    """Give environment n the random stream of the n-th seed; neighbouring seeds give unrelated streams."""
    for state, seed in zip(states, seeds, strict=True):
        state.rng = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]


def start(states: np.ndarray, which: np.ndarray | None = None, red_agents: np.ndarray | None = None) -> None:
    """Start an episode in the environments of the mask `which` (N,) bool (default: all).

    `red_agents` (N,) int8 names their opponents; FREE, the default, draws one from the environment's mixture.
    """
    if which is None:
        which = np.ones(len(states), np.bool_)
    if red_agents is None:
        red_agents = np.full(len(states), FREE, np.int8)
    _start_batch(states.view(np.uint8), which, red_agents)


def free_tape(num_envs: int) -> np.ndarray:
    """A tape (num_envs, 6) int8 that injects nothing."""
    return np.full((num_envs, NUM_DRAWS), FREE, np.int8)


def step(states: np.ndarray, actions: np.ndarray, tapes: np.ndarray, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step every environment, in place; none is reset.

    Args:
        states: (N,) records.
        actions: (N,) int64 in 0..144; not checked.
        tapes: (N, 6) int8, for each of `DRAW_NAMES` the outcome to use, or FREE.
        obs: (N, 52) float32, which is written.

    Returns rewards (N,) float64 and truncations (N,) bool. An outcome that is impossible in its place is replaced by a
    possible one and noted in `states["impossible_draw"]`.
    """
    rewards, truncations = np.empty(len(states)), np.empty(len(states), np.bool_)
    _step_batch(states.view(np.uint8), actions, tapes, obs, rewards, truncations)  # bytes are cheap to pass to Numba
    return rewards, truncations


def step_with_tape(
    states: np.ndarray, actions: np.ndarray, tapes: np.ndarray, obs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As `step`, but an impossible outcome raises ValueError and leaves every environment as it was."""
    if tapes.shape != (len(states), NUM_DRAWS) or tapes.dtype.kind not in "iu":
        raise ValueError(
            f"draws must be whole numbers of shape ({len(states)}, {NUM_DRAWS}), one column for each of "
            f"{', '.join(DRAW_NAMES)}, but they are {tapes.dtype} of shape {tapes.shape}."
        )
    red_agents = tapes[:, RED_AGENT]  # of the next episode; every other outcome is checked where it is used
    if tapes.min() < FREE or tapes.max() >= NUM_HOSTS or red_agents.max() >= len(RED_AGENTS):
        raise ValueError(
            f"draws must lie in {FREE}..{NUM_HOSTS - 1}, red agents below {len(RED_AGENTS)}, but they lie in "
            f"{tapes.min()}..{tapes.max()} and red agents go up to {red_agents.max()}."
        )
    before = states.copy()
    results = step(states, actions, tapes.astype(np.int8), obs)
    refused = np.flatnonzero(states["impossible_draw"])
    if refused.size:
        n = int(refused[0])
        wanted = dict(zip(DRAW_NAMES, tapes[n].tolist(), strict=True))
        states[:] = before
        raise ValueError(f"In environment {n}, these injected outcomes cannot happen in this step: {wanted}.")
    return results
