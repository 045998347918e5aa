"""Cage2VecEnv: many CAGE Challenge 2 games as one `gymnasium.vector.VectorEnv`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from . import simulator
from .render import describe, render_ansi, render_rgb
from .scenario import NUM_ACTIONS, OBS_SIZE, RED_AGENTS
from .state import CHANGING, FREE

RENDER_MODES = ("ansi", "rgb_array", "human")
TRUE_STATE = (
    "red_access", "red_sessions", "clearable", "decoys", "malware", "red_agent", "ot_up", "ot_known", "steps",
)  # fmt: skip


def check_render_mode(render_mode: str | None) -> None:
    """Raise ValueError unless `render()` can draw in this mode."""
    if render_mode is not None and render_mode not in RENDER_MODES:
        raise ValueError(f"There is no render mode {render_mode!r}; choose from {', '.join(RENDER_MODES)}, or None.")


def check_same_step(env: VectorEnv, wrapper: str) -> None:
    """Raise ValueError, naming the wrapper that asks, unless `env` restarts within the step that ends an episode."""
    if env.metadata.get("autoreset_mode") is not AutoresetMode.SAME_STEP:
        raise ValueError(f"{wrapper} needs environments that restart in the last step of an episode (SAME_STEP).")


def checked_actions(actions: Any, num_envs: int, num_actions: int) -> np.ndarray:
    """`actions` as an array (num_envs,); ValueError unless they are whole numbers in 0..num_actions - 1."""
    actions = np.asarray(actions)
    if actions.shape != (num_envs,) or actions.dtype.kind not in "iu":
        raise ValueError(
            f"actions must be whole numbers of shape ({num_envs},), but they are {actions.dtype} of shape "
            f"{actions.shape}."
        )
    if actions.min() < 0 or actions.max() >= num_actions:
        n = int(np.flatnonzero((actions < 0) | (actions >= num_actions))[0])
        raise ValueError(f"The action of environment {n} is {actions[n]}, but must be in 0..{num_actions - 1}.")
    return actions


def red_agent_indices(red_agents: str | Sequence[str], num_envs: int) -> np.ndarray:
    """(num_envs,) int8 indices into `RED_AGENTS` of one name for all, or one name for each environment."""
    names = [red_agents] * num_envs if isinstance(red_agents, str) else list(red_agents)
    unknown = [name for name in names if name not in RED_AGENTS]
    if unknown or len(names) != num_envs:
        raise ValueError(
            f"options['red_agent'] must be one of {', '.join(RED_AGENTS)}, or a list of {num_envs} of them, "
            f"but it is {red_agents!r}."
        )
    return np.array([RED_AGENTS.index(name) for name in names], np.int8)


def save_states(states: np.ndarray) -> dict[str, np.ndarray]:
    """Everything that changes in an array of records, as plain arrays by field name."""
    return {name: states[name].copy() for name in CHANGING}


def load_states(states: np.ndarray, saved: Mapping[str, np.ndarray]) -> None:
    """Put back what `save_states` took; ValueError if it was taken from something else."""
    expected = {name: states[name].shape for name in CHANGING}
    found = {name: np.shape(value) for name, value in saved.items()}
    if found != expected:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(
            f"This state does not fit {len(states)} CAGE2 environments: field {wrong[0]!r} should have shape "
            f"{expected.get(wrong[0])}, but has {found.get(wrong[0])}; was it saved with another num_envs?"
        )
    for name in expected:
        states[name] = saved[name]


class Cage2VecEnv(VectorEnv):
    """The CAGE Challenge 2 game, `num_envs` times, stepped by one compiled loop.

    Observations (num_envs, 52) float32 zeros and ones: for each of `HOSTS`, two bits of activity in this step
    (None 00, Scan 10, Exploit 11) and two of remembered compromise (No 00, Unknown 10, User 01, Privileged 11).
    Actions are indices into `ACTION_NAMES` (145). Rewards are <= 0, on a grid of 0.1. An episode never
    terminates; it is truncated after `max_steps` and restarted in the same step (`infos["final_obs"]`).

    Args:
        num_envs: number of games.
        red_agent: "b_line", "meander", "sleep", or a dict from name to probability, drawn for each episode.
        green: whether Green scans ports (the official evaluation has it asleep).
        version: "head", the code one clones today, or "leaderboard", the code behind the published scores.
        wrapper: "challenge", the official observation, or "cardiff", that of the winner's repository.
        max_steps: episode length.
        seed: environment n starts on the random stream of seed + n; None seeds from the operating system.
        state_in_info: put `describe`'s account of the true state in every info (for people; it takes time).
        render_mode: what `render` returns for each environment: "ansi" text or "rgb_array" picture; "human" prints
            the text before each step.

    Raises ValueError, in one sentence, on a setting, action, seed or state out of its range.
    """

    metadata: dict[str, Any] = {
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "render_modes": list(RENDER_MODES),
    }

    def __init__(
        self,
        num_envs: int = 1,
        red_agent: str | Mapping[str, float] = "b_line",
        green: bool = False,
        version: str = "head",
        wrapper: str = "challenge",
        max_steps: int = 100,
        seed: int | None = None,
        state_in_info: bool = False,
        render_mode: str | None = None,
    ) -> None:
        check_render_mode(render_mode)
        self._states = simulator.new_states(num_envs, red_agent, green, version, wrapper, max_steps)
        self.num_envs = int(num_envs)
        self.single_observation_space = spaces.Box(0.0, 1.0, (OBS_SIZE,), np.float32)
        self.single_action_space = spaces.Discrete(NUM_ACTIONS)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.render_mode = render_mode
        self._state_in_info = state_in_info
        self._free_tape = simulator.free_tape(self.num_envs)
        self._needs_reset = True
        self._seeds = [-1] * self.num_envs
        self._seed(simulator.system_seed() if seed is None else seed)

    def _read_only(self, name: str) -> np.ndarray:
        field = self._states["sessions" if name == "red_sessions" else name]
        view = field.view(np.bool_) if name in ("clearable", "malware", "ot_up", "ot_known") else field.view()
        view.flags.writeable = False
        return view

    def _seed(self, seed: int | Sequence[int | None]) -> None:
        seeds: list[int | None] = list(seed) if isinstance(seed, Iterable) else []
        if isinstance(seed, int | np.integer):
            seeds = [int(seed) + n for n in range(self.num_envs)]
        valid = all(s is None or (isinstance(s, int | np.integer) and s >= 0) for s in seeds)
        if len(seeds) != self.num_envs or not valid:
            raise ValueError(f"seed must be a whole number >= 0 or {self.num_envs} of them, but it is {seed!r}.")
        for n, s in enumerate(seeds):
            if s is not None:
                simulator.seed_states(self._states[n : n + 1], [s])
                self._seeds[n] = int(s)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment's random numbers; -1 where `set_state` has replaced them."""
        return tuple(self._seeds)

    def true_state(self) -> dict[str, np.ndarray]:
        """What really holds in every environment, as read-only views of the running game (nothing is copied).

        Keys: `red_access` (N, 13) uint8, 0 none, 1 user, 2 privileged; `red_sessions` (N, 13, 3) int32, red's
        removable user, other user and privileged sessions; `clearable` (N, 13) bool, whether Blue can end a
        red session on the host (by Restore if not by Remove; red's permanent foothold on User0 does not
        count); `decoys` (N, 13) uint8, bit k for decoy k of `DECOYS`; `malware` (N, 13) bool; `red_agent`
        (N,) int64, index into `RED_AGENTS`; `ot_up`, `ot_known` (N,) bool; `steps` (N,) int32 since the
        episode began. The arrays change with the next step or reset: read them before `step` for the state
        before the action, after it for the state that it led to (a new episode's, where one has ended).
        """
        return {name: self._read_only(name) for name in TRUE_STATE}

    @property
    def draws(self) -> np.ndarray:
        """(N, 6) int8 view: outcomes of the last step's random draws by `DRAW_NAMES`; -1 where none was made.

        Passed to `step(actions, draws=...)` of this or another environment in the same state, they repeat the
        step.
        """
        return self._read_only("draws")

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode everywhere; `options={"red_agent": name or names}` sets their red agents.

        Raises ValueError for options["reset_mask"]: each episode is restarted in its last step.
        """
        if "reset_mask" in (options or {}):
            raise ValueError("Cage2VecEnv restarts each episode in its last step: leave options['reset_mask'] out.")
        if seed is not None:
            self._seed(seed)
        chosen = (options or {}).get("red_agent")
        simulator.start(self._states, None, None if chosen is None else red_agent_indices(chosen, self.num_envs))
        self._needs_reset = False
        return np.zeros((self.num_envs, OBS_SIZE), np.float32), self._infos()

    def step(
        self, actions: Any, draws: Any = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take `actions` (N,) in 0..144; `draws` (N, 6) injects random outcomes (-2: draw freely).

        Returns observations (N, 52), rewards (N,), terminations (N,), which are all False, truncations (N,),
        infos.
        """
        if self._needs_reset:
            raise ResetNeeded("Call reset() or set_state() before step().")
        actions = checked_actions(actions, self.num_envs, NUM_ACTIONS)
        if self.render_mode == "human":
            print(*self.render(), sep="\n", flush=True)
        obs = np.empty((self.num_envs, OBS_SIZE), np.float32)
        actions = np.ascontiguousarray(actions, np.int64)
        red_agents = None
        if draws is None:
            rewards, truncations = simulator.step(self._states, actions, self._free_tape, obs)
        else:
            draws = np.asarray(draws)
            rewards, truncations = simulator.step_with_tape(self._states, actions, draws, obs)
            red_agents = np.where(draws[:, -1] < 0, FREE, draws[:, -1]).astype(np.int8)
        infos: dict[str, Any] = {}
        if truncations.any():
            infos = self._final_infos(obs, truncations)
            simulator.start(self._states, truncations, red_agents)
            obs[truncations] = 0.0
        return obs, rewards, np.zeros(self.num_envs, np.bool_), truncations, infos | self._infos()

    def _infos(self) -> dict[str, Any]:
        """What `describe` says of every environment, unless that was not asked for."""
        return self._described(np.ones(self.num_envs, np.bool_))

    def _described(self, which: np.ndarray) -> dict[str, Any]:
        """`describe` of the environments in the mask `which` (N,), in Gymnasium's batched form, if asked for.

        Gymnasium's `_add_info`, one environment after the other, would take nearly 40 times as long for 1,024 of them.
        """
        infos: dict[str, Any] = {}
        if self._state_in_info:
            for name, values in describe(self._states[which]).items():
                shape, nothing = (self.num_envs, *values.shape[1:]), None if values.dtype == object else 0
                infos[name], infos[f"_{name}"] = np.full(shape, nothing, values.dtype), which.copy()
                infos[name][which] = values
        return infos

    def _final_infos(self, obs: np.ndarray, ended: np.ndarray) -> dict[str, Any]:
        final_obs = np.full(self.num_envs, None, object)
        for n in np.flatnonzero(ended).tolist():
            final_obs[n] = obs[n].copy()
        return {
            "final_obs": final_obs,
            "_final_obs": ended.copy(),
            "final_info": self._described(ended),
            "_final_info": ended.copy(),
        }

    def get_state(self) -> dict[str, Any]:
        """All that a continued run needs, random streams included, as a dict of arrays; not the settings."""
        return save_states(self._states)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state saved by an environment with the same settings."""
        load_states(self._states, state)
        self._seeds = [-1] * self.num_envs
        self._needs_reset = not self._states["sessions"].any()  # in every game that has begun, Red has a foothold

    def render(self) -> tuple[Any, ...]:
        """A text or picture of every environment, in the constructor's `render_mode`."""
        if self.render_mode is None:
            raise ValueError('Construct the environment with render_mode="ansi" or "rgb_array" to render it.')
        draw = render_rgb if self.render_mode == "rgb_array" else render_ansi
        return tuple(draw(state) for state in self._states)
