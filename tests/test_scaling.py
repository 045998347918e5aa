"""benchmarks/scaling.py: growth is told from its shape, and memory counts workers and shared memory once."""

from __future__ import annotations

import json
import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

from benchmarks import scaling
from benchmarks.common import RESULTS

COUNTS = [1, 4, 16, 64, 256, 1024, 4096]


@pytest.mark.parametrize(("power", "exponent"), [(0.0, 1.0), (-0.5, 0.5), (1.0, 2.0)])
def test_growth_of_known_laws(power: float, exponent: float) -> None:
    """Cost per environment of N ** power: a step of all costs N ** (1 + power)."""
    fit = scaling.growth(COUNTS, [1000 / count**power for count in COUNTS])
    assert fit["exponent"] == pytest.approx(exponent)
    assert (fit["rise"] < scaling.TOLERANCE) == (power <= 0)
    if power > 0:
        assert (fit["rise"], fit["at"]) == (pytest.approx(4096), 4096)


def test_a_bend_at_many_environments_is_found_behind_a_start_that_pays_off() -> None:
    """A fixed cost that many share, and from 1,024 on a quadratic part: the exponent alone would not show it."""
    seconds = [100 + count + (count / 600) ** 2 * 100 for count in COUNTS]
    fit = scaling.growth(COUNTS, [count / second for count, second in zip(COUNTS, seconds, strict=True)])
    assert fit["at"] == 4096
    assert fit["rise"] > 1.4


def test_memory_per_environment_is_a_slope() -> None:
    assert scaling.kib_per_environment([1, 4, 16], [50, 100, 101.5]) == pytest.approx(128)


def test_the_page_says_what_is_stored() -> None:
    data = json.loads((RESULTS / "scaling.json").read_text())
    assert scaling.page_of(data) == (RESULTS / "scaling.md").read_text()


def hold(name: str, pipe: Connection) -> None:
    """Touch 64 MiB of shared memory and 32 MiB of its own."""
    shared = SharedMemory(name)
    np.frombuffer(shared.buf, np.uint8).sum()
    own = np.ones(32 * 2**20, np.uint8)
    pipe.send("ready")
    pipe.recv()
    del own
    os._exit(0)


def test_memory_counts_children_and_shared_memory_once() -> None:
    before = scaling.memory()
    shared = SharedMemory(create=True, size=64 * 2**20)
    try:
        np.frombuffer(shared.buf, np.uint8)[:] = 1
        context = multiprocessing.get_context("fork")
        pipe, theirs = context.Pipe()
        children = [context.Process(target=hold, args=(shared.name, theirs)) for _ in range(2)]
        for child in children:
            child.start()
        for _ in children:
            pipe.recv()
        assert {child.pid for child in children} < set(scaling.process_tree(os.getpid()))
        after = scaling.memory()
        for _ in children:  # they read from one pipe, so either may take the first of the messages
            pipe.send("end")
        for child in children:
            child.join()
    finally:
        shared.unlink()
    assert after["shared_mib"] - before["shared_mib"] == pytest.approx(64, abs=2)
    assert after["memory_mib"] - before["memory_mib"] == pytest.approx(128, abs=24)
    assert after["peak_mib"] - before["peak_mib"] > 3 * 64


def test_a_measurement_of_a_few_environments() -> None:
    found = scaling.measure("Cage2VecEnv", 8, 0, 0.05)
    assert found["steps_per_cpu_second"] > 1000
    assert 10 < found["memory_mib"] < found["peak_mib"]
