"""Films of an agent at play."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import PIL.Image
from gymnasium.vector import VectorEnv, VectorWrapper

from envs.episodes import begun_by


class RecordGif(VectorWrapper):
    """Writes a GIF of each episode of the first environment, whose `render_mode` must be "rgb_array".

    The films lie in `folder` and carry the episode's number, return and length in their names; `prefix` goes before.
    They have at most `max_frames` pictures, at most `size` pixels wide and high, and `fps` pictures per second, which
    must be 50 or less. They play in real time where the metadata have a `render_fps`, for which pictures are left out,
    else at `fps`.
    """

    def __init__(
        self,
        env: VectorEnv,
        folder: Path | str,
        fps: int = 20,
        max_frames: int = 300,
        prefix: str = "",
        size: int = 320,
    ) -> None:
        super().__init__(env)
        if env.render_mode != "rgb_array":
            mode = f"render_mode rgb_array, not {env.render_mode} (--save-gif without --render)"
            raise gym.error.Error(f"A film needs environments that draw: {mode}.")
        self.folder, self.max_frames, self.prefix, self.size = Path(folder), max_frames, prefix, size
        render_fps = env.metadata.get("render_fps") or fps
        self.every = max(1, math.ceil(render_fps / fps))
        self.hundredths = 100 * self.every / render_fps  # of a second, for a picture
        self.pictures: list[PIL.Image.Image] = []
        self.episodes, self.episode_return, self.length = 0, 0.0, 0

    def reset(self, *, seed=None, options=None):
        begun = np.arange(self.num_envs)[begun_by(options)]
        if self.pictures and 0 in begun:  # of an episode that was left before its end
            self.save()
        return self.env.reset(seed=seed, options=options)

    def step(self, actions):
        if self.length % self.every == 0 and len(self.pictures) < self.max_frames:
            frames: Any = self.env.render()
            self.pictures.append(PIL.Image.fromarray(frames[0]))
            self.pictures[-1].thumbnail((self.size, self.size))
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        self.episode_return, self.length = self.episode_return + float(rewards[0]), self.length + 1
        if terminations[0] or truncations[0]:
            self.save()
        return obs, rewards, terminations, truncations, infos

    def save(self) -> None:
        """Write the film of the episode so far, print its path, and begin the next one."""
        self.episodes += 1
        name = f"{self.prefix}episode_{self.episodes:03d}_return_{self.episode_return:.0f}_steps_{self.length}.gif"
        self.folder.mkdir(parents=True, exist_ok=True)
        first, *others = self.pictures
        times = [round(i * self.hundredths) for i in range(len(self.pictures) + 1)]  # GIF counts whole ones
        durations = [10 * (end - start) for start, end in pairwise(times)]
        first.save(self.folder / name, save_all=True, append_images=others, duration=durations, loop=0)
        print(self.folder / name, flush=True)
        self.pictures, self.episode_return, self.length = [], 0.0, 0

    def close(self, **kwargs) -> None:
        try:
            if self.pictures:  # of an episode that was left before its end
                self.save()
        finally:
            super().close(**kwargs)
