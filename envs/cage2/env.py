"""Cage2Env: one CAGE Challenge 2 game as a `gymnasium.Env`, registered as CAGE2-v0."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from . import simulator
from .render import describe, render_ansi, render_rgb
from .scenario import NUM_ACTIONS, OBS_SIZE
from .vec_env import RENDER_MODES, Cage2VecEnv, check_render_mode, load_states, red_agent_indices, save_states


class Cage2Env(gym.Env):
    """One game with the rules, arguments and numbers of `Cage2VecEnv`; equal seeds give equal episodes.

    Every info holds the true state in words and arrays (what `render.describe` says of one environment), unless
    `state_in_info` is False. There is no autoreset.
    """

    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": 4}

    def __init__(
        self,
        red_agent: str | Mapping[str, float] = "b_line",
        green: bool = False,
        version: str = "head",
        wrapper: str = "challenge",
        max_steps: int = 100,
        state_in_info: bool = True,
        render_mode: str | None = None,
    ) -> None:
        check_render_mode(render_mode)
        self._settings: dict[str, Any] = {
            "red_agent": red_agent, "green": green, "version": version, "wrapper": wrapper, "max_steps": max_steps,
        }  # fmt: skip
        self._states = simulator.new_states(1, **self._settings)
        self.observation_space = spaces.Box(0.0, 1.0, (OBS_SIZE,), np.float32)
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self.render_mode = render_mode
        self._state_in_info = state_in_info
        self._free_tape = simulator.free_tape(1)
        self._needs_reset = True
        self._seeded = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; `options={"red_agent": name}` sets its red agent."""
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            simulator.seed_states(self._states, [simulator.system_seed() if seed is None else seed])
            self._seeded = True
        chosen = (options or {}).get("red_agent")
        simulator.start(self._states, None, None if chosen is None else red_agent_indices(chosen, 1))
        self._needs_reset = False
        return np.zeros(OBS_SIZE, np.float32), self._info()

    def step(self, action: Any, draws: Any = None) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take an action in 0..144; `draws` (6,) injects random outcomes (see `Cage2VecEnv.draws`)."""
        if self._needs_reset:
            raise ResetNeeded("Call reset() or set_state() before step(), and reset() again when an episode has ended.")
        if not self.action_space.contains(action):
            raise ValueError(f"The action must be a whole number in 0..{NUM_ACTIONS - 1}, but it is {action!r}.")
        if self.render_mode == "human":
            print(self.render(), flush=True)
        obs = np.empty((1, OBS_SIZE), np.float32)
        actions = np.array([action], np.int64)
        if draws is None:
            rewards, truncations = simulator.step(self._states, actions, self._free_tape, obs)
        else:
            rewards, truncations = simulator.step_with_tape(self._states, actions, np.atleast_2d(draws), obs)
        self._needs_reset = bool(truncations[0])
        return obs[0], float(rewards[0]), False, bool(truncations[0]), self._info()

    def vectorized(self, num_envs: int) -> Cage2VecEnv:
        """`num_envs` games with the settings of this one, in one compiled loop; infos are empty, see `true_state`."""
        return Cage2VecEnv(num_envs, **self._settings, render_mode=self.render_mode)

    @property
    def draws(self) -> np.ndarray:
        """(6,) int8: outcomes of the last step's random draws by `DRAW_NAMES`; -1 where none was made."""
        return self._states["draws"][0].copy()

    def _info(self) -> dict[str, Any]:
        return {name: x[0] for name, x in describe(self._states).items()} if self._state_in_info else {}

    def get_state(self) -> dict[str, Any]:
        """Everything that a continued run needs, as in `Cage2VecEnv.get_state`."""
        return save_states(self._states) | {"needs_reset": self._needs_reset}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state saved by an environment with the same settings."""
        state = dict(state)
        needs_reset = bool(state.pop("needs_reset", False))
        load_states(self._states, state)
        begun = self._states["sessions"].any()  # Red has a foothold in every game that has begun
        self._needs_reset, self._seeded = needs_reset or not begun, True

    def render(self) -> Any:
        """The game as text or as a picture (height, width, 3) uint8, in the constructor's `render_mode`."""
        if self.render_mode is None:
            raise ValueError('Construct the environment with render_mode="ansi" or "rgb_array" to render it.')
        return render_rgb(self._states[0]) if self.render_mode == "rgb_array" else render_ansi(self._states[0])
