"""Super Mario Bros as a Gymnasium environment: the real cartridge, on whichever NES emulator is installed.

    env = MarioEnv("1-1")                                   # four grey 64 x 64 frames, shaped reward
    obs, info = env.reset(seed=0)                           # (4, 64, 64) uint8
    obs, reward, terminated, truncated, info = env.step(3)  # run right for four frames

Every random choice comes from `reset(seed=...)`: the emulators have no randomness of their own. Reward and
end follow from the console's RAM (`envs/mario_game.py`), and so mean the same on every emulator
(`envs/nes_core.py`).
"""

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Discrete
from PIL import Image, ImageChops

from envs.mario_game import STAGES, MarioGame
from envs.nes_common import DOWN, LEFT, RIGHT, SCREEN_HEIGHT, SCREEN_WIDTH, UP, A, B, MarioBackendError
from envs.nes_core import available_backends, make_core, resolve_backend

__all__ = [
    "ACTION_SETS",
    "REWARDS",
    "STAGES",
    "MarioBackendError",
    "MarioEnv",
    "RewardTerms",
    "available_backends",
]

# Buttons of each action, in gym-super-mario-bros's order, so that a number means the same there and here.
_RIGHT_ONLY = (0, RIGHT, RIGHT | A, RIGHT | B, RIGHT | A | B)
_SIMPLE = (*_RIGHT_ONLY, A, LEFT)
_COMPLEX = (*_SIMPLE, LEFT | A, LEFT | B, LEFT | A | B, DOWN, UP)
ACTION_SETS = {"right_only": _RIGHT_ONLY, "simple": _SIMPLE, "complex": _COMPLEX}
# channels, side, and the default frame stack
OBSERVATIONS = {"gray64": (1, 64, 4), "rgb64": (3, 64, 1), "gray84": (1, 84, 4)}
SCORE_ROWS = 32  # of the screen's 240
BUTTON_ROWS = 15  # of these 240, where there is never anything but sky
SHOWN_BUTTONS = (A, B, LEFT, RIGHT)


class RewardTerms(NamedTuple):
    """Weights: reward = scale * (progress * pixels + clock * ticks + flag * [flag] + death * [death]).

    A stuck episode counts as a death. `pixels` counts only ground not reached before in this episode, so that
    neither walking to and fro nor running a maze's loop again earns anything. `ticks` are those of the game's
    clock: one in 24 frames, up to 400 a stage.
    """

    progress: float
    clock: float
    flag: float
    death: float
    scale: float
    landed: bool = False  # count only ground that Mario stands on (or climbs, or swims over): a fall earns nothing


REWARDS = {
    # a finished 1-1 is worth about 310, a decision about 1: a network fits such values as they are
    "shaped": RewardTerms(progress=1.0, clock=-1.0, flag=50.0, death=-50.0, scale=0.1),
    # in flight nothing counts: else flying over a platform's edge earns new ground all the way down into the pit
    "landed": RewardTerms(progress=1.0, clock=-1.0, flag=50.0, death=-50.0, scale=0.1, landed=True),
    # those of ylxfda/learn-RL-with-Mario: a finished 1-1 is worth about 4,110
    "flag1000": RewardTerms(progress=1.0, clock=-0.1, flag=1000.0, death=-15.0, scale=1.0),
}


class MarioEnv(gym.Env[np.ndarray, Any]):
    """Super Mario Bros.

    Observation: Box(0, 255, (frame_stack * channels, side, side), uint8), channels first as torch's
    convolutions take them, the oldest frame first: (4, 64, 64) by default, (3, 64, 64) for "rgb64". Frames
    are the whole screen, averaged.
    Action: an integer below 5, 7 or 12 (`ACTION_SETS`), or the same one-hot.
    Reward: see `RewardTerms`. Termination: death, the flag (or axe), a warp out of the stage, or being stuck;
    with "full" the last life, the last axe, or being stuck. Truncation: `max_episode_steps`.
    Info: empty, which costs nothing on its way between processes, except that in the step that ends an
    episode, and with `full_info` always, it holds x_pos, max_x (pixels), time (ticks left), world, stage,
    coins, score, life, status (0 small, 1 tall, 2 fiery), flag_get, death and stuck.

    Args:
        stage: "1-1" to "8-4"; several, as in "1-1,2-1", of which each reset draws one; "random", of all 32;
            or "full", the whole game from 1-1, which ends when its three lives are lost or the last axe is
            taken.
        backend: "nes_py", "fceumm", or "auto": nes_py where installed. A policy does not transfer between
            them.
        action_set: "right_only", "simple" or "complex".
        obs: "gray64", "rgb64" or "gray84".
        frame_stack: frames in an observation; by default 4, and 1 for "rgb64".
        skip: frames for which an action is held.
        max_pool: take the brighter of each pixel of the last two frames, against flicker (Mnih et al. 2015).
        mask_score: blank the screen's top rows, which show score, coins and time.
        show_buttons: paint the topmost rows of each frame: from left to right a quarter white if A, B, left and
            right were held in it. The game jumps only when A is newly pressed, so that an action with A does
            nothing while Mario stands with A held, and a picture alone does not show that.
        reward: "shaped", "landed", "flag1000", or your own `RewardTerms`.
        stuck_steps: decisions without new ground after which the episode ends like a death; 0 for never.
        max_episode_steps: decisions after which the episode is truncated; 0 for never (the game's clock ends
            it).
        noop_max: each reset first waits 0 to noop_max frames, drawn at random (Mnih et al. 2015); at most 300.
        sticky_action_probability: probability, in each frame, that the console still sees the buttons of the
            frame before (Machado et al. 2018, where it is 0.25).
        full_info: fill `info` in every step.
        render_mode: "rgb_array" lets `render()` return the screen, (240, 256, 3) uint8.

    Raises:
        ValueError: an option is out of range; the message says what is allowed.
        MarioBackendError: the emulator or the cartridge is missing; the message says what to install.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self,
        stage: str = "1-1",
        backend: str = "auto",
        *,
        action_set: str = "simple",
        obs: str = "gray64",
        frame_stack: int | None = None,
        skip: int = 4,
        max_pool: bool = False,
        mask_score: bool = False,
        show_buttons: bool = False,
        reward: str | RewardTerms = "shaped",
        stuck_steps: int = 150,
        max_episode_steps: int = 0,
        noop_max: int = 0,
        sticky_action_probability: float = 0.0,
        full_info: bool = False,
        render_mode: str | None = None,
    ) -> None:
        _require(action_set in ACTION_SETS, f"action_set={action_set!r}: choose one of {', '.join(ACTION_SETS)}")
        _require(obs in OBSERVATIONS, f"obs={obs!r}: choose one of {', '.join(OBSERVATIONS)}")
        channels, side, default_stack = OBSERVATIONS[obs]
        stack = default_stack if frame_stack is None else frame_stack
        _require(stack >= 1, f"frame_stack={stack}: an observation needs at least 1 frame")
        _require(1 <= skip <= 25, f"skip={skip}: hold an action for 1 to 25 frames (a longer run looks like a warp)")
        _require(not max_pool or skip > 1, "max_pool=True: skip=1 has no frame before the last; use 2 or more")
        limits = {"stuck_steps": stuck_steps, "max_episode_steps": max_episode_steps, "noop_max": noop_max}
        for name, value in limits.items():
            _require(value >= 0, f"{name}={value}: use a positive number, or 0 to switch it off")
        _require(noop_max <= 300, f"noop_max={noop_max}: wait at most 300 frames; in 1-2 Mario is dead after 316")
        sticky = sticky_action_probability
        _require(0 <= sticky < 1, f"sticky_action_probability={sticky}: use a probability, 0 or more and below 1")
        if isinstance(reward, str):
            _require(
                reward in REWARDS,
                f"reward={reward!r}: choose one of {', '.join(REWARDS)}, or give RewardTerms",
            )
            reward = REWARDS[reward]
        _require(render_mode in (None, "rgb_array"), f"render_mode={render_mode!r}: choose None or 'rgb_array'")

        self.stages = _parse_stages(stage)
        self.backend = resolve_backend(backend)
        self.buttons = ACTION_SETS[action_set]
        self.reward_terms = reward
        self.skip, self.max_pool = skip, max_pool
        self.mask_score, self.show_buttons = mask_score, show_buttons
        self.stuck_steps, self.max_episode_steps, self.noop_max = stuck_steps, max_episode_steps, noop_max
        self.sticky_action_probability, self.full_info, self.render_mode = sticky, full_info, render_mode
        self.metadata = {**self.metadata, "render_fps": 60 / skip}
        self.observation_space = Box(0, 255, (stack * channels, side, side), np.uint8)
        self.action_space = Discrete(len(self.buttons))

        self._channels, self._side = channels, side
        self._game = MarioGame(make_core(self.backend), self.backend, reward.landed)
        self._frames = np.zeros((stack * channels, side, side), np.uint8)
        self._picture: np.ndarray | None = None
        self._playing = False
        self._held_buttons = 0
        self._steps = self._steps_without_progress = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        # draw only what is random, so that switching one option on leaves the other's random numbers alone
        choice = int(self.np_random.integers(len(self.stages))) if len(self.stages) > 1 else 0
        self._game.start(self.stages[choice])
        for _ in range(int(self.np_random.integers(self.noop_max + 1)) if self.noop_max else 0):
            self._game.frame(0)
        self._game.measure()  # the clock that ran meanwhile is not the policy's to pay for
        self._playing = True
        self._held_buttons = 0
        self._steps = self._steps_without_progress = 0
        self._frames[:] = np.tile(self._look(), (len(self._frames) // self._channels, 1, 1))
        info = self._info(goal=False, death=False, stuck=False) if self.full_info else {}
        return self._frames.copy(), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Hold an action's buttons for `skip` frames, fewer if the episode ends meanwhile.

        Raises:
            ValueError: the action is not one of this environment's.
            ResetNeeded: the episode is over or never began.
        """
        if not self._playing:
            raise ResetNeeded("the episode is over or never began: call reset() before step()")
        game, buttons = self._game, self.buttons[self._action_number(action)]
        death = goal = False
        last_but_one: Image.Image | None = None
        for frame in range(self.skip):
            if self.sticky_action_probability == 0 or self.np_random.random() >= self.sticky_action_probability:
                self._held_buttons = buttons
            death, goal, waited = game.frame(self._held_buttons)
            if waited:  # in frames without buttons, so that what was held has been let go; the scene may be another
                self._held_buttons, last_but_one = 0, None
            if death or goal:
                break
            if self.max_pool and frame == self.skip - 2:
                last_but_one = self._grab()

        self._steps += 1
        pixels, ticks = game.measure()
        # a death, after which the whole game goes on, begins a new life
        self._steps_without_progress = 0 if game.advancing or death or goal else self._steps_without_progress + 1
        over = game.is_over(death, goal)
        stuck = not over and 0 < self.stuck_steps <= self._steps_without_progress
        reward = _weigh(self.reward_terms, pixels, ticks, goal, death or stuck)

        self._frames[: -self._channels] = self._frames[self._channels :]
        self._frames[-self._channels :] = self._look(last_but_one)
        terminated = over or stuck
        truncated = not terminated and 0 < self.max_episode_steps <= self._steps
        self._playing = not (terminated or truncated)
        info = {} if self._playing and not self.full_info else self._info(goal, death, stuck)
        return self._frames.copy(), reward, terminated, truncated, info

    def render(self) -> np.ndarray | None:
        """Return the screen after the last step, (240, 256, 3) uint8; None without a render mode."""
        return None if self._picture is None or self.render_mode is None else self._picture.copy()

    def close(self) -> None:
        """Give the emulator's memory back."""
        self._playing = False
        self._game.core.close()

    def get_state(self) -> dict[str, Any]:
        """Return all that the rest of this environment's life depends on, its random generator included.

        The constructor's options are not part of it: `set_state` wants an environment made with the same
        ones.
        """
        return {
            "game": self._game.get_state(),
            "rng": self.np_random.bit_generator.state,
            "frames": self._frames.copy(),
            "picture": self.render(),
            "playing": self._playing,
            "held_buttons": self._held_buttons,
            "steps": self._steps,
            "steps_without_progress": self._steps_without_progress,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `get_state()`, here or in another process, bit for bit.

        On fceumm this takes microseconds; nes_py plays the episode again, a millisecond a frame.

        Raises:
            ValueError: the state comes from another backend or from other observation options.
        """
        theirs, ours = np.shape(state["frames"]), self._frames.shape
        _require(theirs == ours, f"this state holds observations of shape {theirs}, this environment makes {ours}")
        self._game.set_state(state["game"])
        self.np_random.bit_generator.state = state["rng"]
        self._frames[:] = state["frames"]
        self._picture = None if state["picture"] is None else np.array(state["picture"])
        self._playing, self._held_buttons = state["playing"], state["held_buttons"]
        self._steps, self._steps_without_progress = state["steps"], state["steps_without_progress"]

    def _action_number(self, action: Any) -> int:
        count = len(self.buttons)
        number = np.argmax(action) if np.shape(action) == (count,) else action
        is_action = self.action_space.contains(number)
        _require(is_action, f"action {action}: this environment takes the integers 0 to {count - 1}")
        return int(number)

    def _grab(self) -> Image.Image:
        return self._game.core.gray() if self._channels == 1 else self._game.core.rgb()

    def _look(self, last_but_one: Image.Image | None = None) -> np.ndarray:
        """Return the screen as the newest part of the observation, (channels, side, side) uint8."""
        if self.render_mode is not None:
            self._picture = np.asarray(self._game.core.rgb())
        image = self._grab()
        if last_but_one is not None:
            image = ImageChops.lighter(image, last_but_one)
        if SCREEN_WIDTH % self._side == 0:  # averaging whole pixels across first halves the time
            image = image.reduce((SCREEN_WIDTH // self._side, 1))
        pixels = np.array(image.resize((self._side, self._side), Image.Resampling.BOX))
        if self.mask_score:
            pixels[: -(-SCORE_ROWS * self._side // SCREEN_HEIGHT)] = 0
        if self.show_buttons:
            rows, quarter = BUTTON_ROWS * self._side // SCREEN_HEIGHT, self._side // len(SHOWN_BUTTONS)
            for i, button in enumerate(SHOWN_BUTTONS):
                pixels[:rows, i * quarter : (i + 1) * quarter] = 255 if self._held_buttons & button else 0
        return pixels.transpose(2, 0, 1) if self._channels == 3 else pixels[None]

    def _info(self, goal: bool, death: bool, stuck: bool) -> dict[str, Any]:
        return {**self._game.facts(), "flag_get": goal, "death": death, "stuck": stuck}


def _weigh(terms: RewardTerms, pixels: int, ticks: int, goal: bool, death: bool) -> float:
    return terms.scale * (terms.progress * pixels + terms.clock * ticks + terms.flag * goal + terms.death * death)


def _parse_stages(stage: str) -> tuple[str, ...]:
    """Return the stages an option names, for example ("1-1", "2-1") for "1-1,2-1"."""
    allowed = "choose among 1-1 to 8-4 (several as '1-1,2-1'), 'random' or 'full'"
    _require(isinstance(stage, str), f"stage={stage!r}: {allowed}")
    stages = STAGES if stage == "random" else tuple(stage.replace(" ", "").split(","))
    for name in stages:
        _require(name in STAGES or name == "full", f"stage={stage!r}: {allowed}")
    return stages


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
