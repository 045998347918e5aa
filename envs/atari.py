"""Atari games of the Arcade Learning Environment, with the preprocessing that published results share.

    env = AtariGame("ALE/Breakout-v5")
    obs, info = env.reset(seed=0)                           # (4, 84, 84) uint8
    obs, reward, terminated, truncated, info = env.step(1)  # one action for four frames

"detail N" are those of "The 37 Implementation Details of Proximal Policy Optimization" (docs/details.md). What
concerns the learner alone, signs of rewards and lives as episodes, is left to it: an episode is a whole game, and
rewards are points.
"""

import importlib.util
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box
from gymnasium.wrappers import AtariPreprocessing, StickyAction

SIDE = 84
MAX_FRAMES = 108_000  # half an hour of play, after which published results end a game
FIRE = 1


class AtariError(gym.error.Error):
    """A game that cannot be made; the message says, in one sentence, what to change or install."""


class AtariGame(gym.Wrapper):
    """One game.

    Observation: Box(0, 255, (frame_stack, 84, 84), uint8), grey, the oldest frame first.
    Action: an integer; the game's own buttons ("minimal action set").
    Reward: points. Termination: the game is over. Truncation: after half an hour of play, or `max_episode_steps`.
    Info: `life_lost`, True, in a step that cost a life; else empty, which costs nothing on its way between processes.

    Args:
        env_id: "ALE/Breakout-v5" and the like.
        frame_stack: frames in an observation; by default 4.
        skip: frames (1/60 s) for which an action is held.
        noop_max: an episode begins with 1 to this many frames of waiting, drawn at random; 0 for none.
        sticky_action_probability: probability, in each frame, that the console still sees the action of the frame
            before (Machado et al. 2018).
        max_episode_steps: the time limit in steps; 0 for half an hour.
        render_mode: "rgb_array" lets `render()` return the screen, (210, 160, 3) uint8 in most games.

    Raises:
        AtariError: ale-py or OpenCV is missing, or there is no such game.
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        env_id: str,
        *,
        frame_stack: int | None = None,
        skip: int = 4,
        noop_max: int = 30,
        sticky_action_probability: float = 0.25,
        max_episode_steps: int = 0,
        render_mode: str | None = None,
    ) -> None:
        if any(importlib.util.find_spec(package) is None for package in ("ale_py", "cv2")):
            raise AtariError(f"{env_id} needs two more packages: pip install ale-py opencv-python-headless")
        import ale_py

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # else each process prints a banner
        sticky = sticky_action_probability
        frame_stack = 4 if frame_stack is None else frame_stack
        _require(frame_stack >= 1, f"frame_stack={frame_stack}: an observation needs at least 1 frame")
        _require(skip >= 1, f"skip={skip}: a step takes at least 1 frame")
        _require(0 <= sticky < 1, f"sticky_action_probability={sticky}: use a probability, 0 or more and below 1")
        _require(max_episode_steps >= 0, f"max_episode_steps={max_episode_steps}: use a positive number, or 0")
        try:
            game: Any = gym.make(
                env_id,
                frameskip=1,
                obs_type="grayscale",
                repeat_action_probability=0.0,  # the console's own stickiness is not part of the state that it saves
                max_num_frames_per_episode=0,  # none: it would cut within a step, whose picture nobody would see
                render_mode=render_mode,
            ).unwrapped
        except gym.error.Error as error:  # no such game, a version that was withdrawn, not a name at all
            raise AtariError(str(error)) from None
        waits = noop_max == 0 or game.get_action_meanings()[0] == "NOOP"
        _require(waits, f"{env_id} has no action that does nothing: use noop_max=0")
        self._sticky = StickyAction(game, sticky)
        preprocessing = AtariPreprocessing(self._sticky, noop_max, skip, SIDE)  # details 14, 15 and 18
        super().__init__(preprocessing)
        self.metadata = {**game.metadata, "render_fps": 60 / skip}
        self.observation_space = Box(0, 255, (frame_stack, SIDE, SIDE), np.uint8)
        self._game = game
        self._console_state = ale_py.ALEState
        self._last_screens = preprocessing.obs_buffer  # their brightest pixels are the newest frame
        self._begins_with_fire = self._game.get_action_meanings()[FIRE] == "FIRE"
        self._frames = np.zeros((frame_stack, SIDE, SIDE), np.uint8)
        self._max_steps = max_episode_steps or MAX_FRAMES // skip
        self._lives = self._steps = 0
        self._playing = False

    @property
    def spec(self) -> None:  # type: ignore[override]
        """None: that of the game inside would make another environment."""

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a game, with FIRE once where it has that button: some wait for it."""
        frame, info = self.env.reset(**kwargs)
        if self._begins_with_fire:  # detail 17
            frame, _, _, _, info = self._press_fire()
        self._lives, self._steps = info["lives"], 0
        self._frames[:] = frame
        self._playing = True
        return self._frames.copy(), {}

    def _press_fire(self) -> tuple[Any, ...]:
        """A step with FIRE in every frame: one that sticky actions swallow leaves a game that nothing ends."""
        self._sticky.last_action = FIRE
        return self.env.step(FIRE)

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Hold an action for `skip` frames. When that costs a life, the next life begins as a game does.

        Raises:
            ValueError: it is none of the game's actions.
            ResetNeeded: no game is being played.
        """
        if not self._playing:
            raise ResetNeeded("call reset() before step()")
        last = int(self.action_space.n) - 1  # type: ignore[attr-defined]
        _require(self.action_space.contains(action), f"action {action}: this game takes the integers 0 to {last}")
        frame, reward, terminated, _, info = self.env.step(int(action))
        life_lost = info["lives"] < self._lives
        self._lives = info["lives"]
        if life_lost and self._begins_with_fire and not terminated:
            frame, points, terminated, _, _ = self._press_fire()
            reward = float(reward) + float(points)
        self._steps += 1
        truncated = not terminated and self._steps >= self._max_steps
        self._playing = not (terminated or truncated)
        self._frames[:-1] = frame if life_lost else self._frames[1:]  # detail 20
        self._frames[-1] = frame
        return self._frames.copy(), reward, terminated, truncated, {"life_lost": True} if life_lost else {}

    def render(self) -> Any:
        """Return the screen, or None without a render mode (where the emulator would raise)."""
        return None if self._game.render_mode is None else self._game.render()

    def get_state(self) -> dict[str, Any]:
        """Return all that the rest of this environment's life depends on, its random generators included."""
        console = self._game.clone_state(include_rng=True).serialize()
        return {
            "console": np.frombuffer(console, np.uint8).copy(),
            "rng": self._game.np_random.bit_generator.state,
            "last_action": self._sticky.last_action,
            "last_screens": [screen.copy() for screen in self._last_screens],
            "frames": self._frames.copy(),
            "lives": self._lives,
            "steps": self._steps,
            "playing": self._playing,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `get_state()`, here or in another process, bit for bit.

        Raises:
            ValueError: the state has another number of frames.
        """
        if np.shape(state["frames"]) != self._frames.shape:
            raise ValueError(f"this state holds {len(state['frames'])} frames, not {len(self._frames)}")
        self._game.restore_state(self._console_state(np.asarray(state["console"]).tobytes()))
        self._game.np_random.bit_generator.state = state["rng"]
        self._sticky.last_action = state["last_action"]
        for screen, saved in zip(self._last_screens, state["last_screens"], strict=True):
            screen[:] = saved
        self._frames[:] = state["frames"]
        self._lives, self._steps, self._playing = state["lives"], state["steps"], state["playing"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
