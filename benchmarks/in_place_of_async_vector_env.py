"""A pytest plugin: run Gymnasium's own vector tests with SubprocVecEnv in AsyncVectorEnv's place.

The tests are not part of Gymnasium's package; take `tests/` from the source of the release that is installed. Then

    PYTHONPATH=/path/to/this/repository python -m pytest -p benchmarks.in_place_of_async_vector_env tests/vector

in that folder. Tests of spaces that are not numeric are skipped (by Gymnasium, at our refusal) or fail with it; those
that render need pygame.
"""

import gymnasium

from envs.subproc_vec_env import SubprocVecEnv

gymnasium.vector.AsyncVectorEnv = SubprocVecEnv  # type: ignore[misc, assignment]
