"""benchmarks/distributed.py: its model against sums done by hand, and its measurements against made-up events."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import distributed
from benchmarks.distributed import Costs, Line, Network, Workload

NETWORK = Network(hop=1.0, bandwidth=10.0)
COSTS = Costs(
    environment=Line(1, 2),
    inference=Line(3, 1),
    bootstrap=Line(5, 0.5),
    gae_step=0.25,
    shuffle=Line(7, 0.125),
    noise=0.0625,
    merge=0.5,
    step_alone=Line(2, 1),
    step_apart=Line(4, 1),
    transition_bytes=10,
    gradient_bytes=40,
    moments_bytes=(10, 20),
)
WORK = Workload(num_envs=4, num_steps=8, num_minibatches=2, update_epochs=3)  # 32 transitions, minibatches of 16


def test_messages_by_hand() -> None:
    assert NETWORK.all_reduce(20, 2) == 2 * (1 + 10 / 10)
    assert NETWORK.all_reduce(40, 4) == 6 * (1 + 10 / 10)
    assert NETWORK.all_gather(20, 4) == 3 * (1 + 20 / 10)
    slow_software = replace(NETWORK, call=5)
    assert slow_software.all_gather(20, 4) == 5 + 9  # once, not at each hop
    assert slow_software.all_reduce(20, 2) == 5 + 4
    tree = replace(NETWORK, tree=True)
    assert tree.all_reduce(4, 8) == pytest.approx(2 * 3 * 1 + 2 * 4 / 10)  # 14.7 around the ring
    assert tree.all_reduce(4000, 8) == NETWORK.all_reduce(4000, 8)  # long messages go around the ring


def test_one_rank_by_hand() -> None:
    """No message is sent, so the slowest network changes nothing, and all is compiled in one."""
    expected = {
        "environments": 8 * (1 + 2 * 4),
        "inference": 8 * (3 + 4),
        "advantages": 5 + 0.5 * 32 + 8 * 0.25,
        "gradients": 6 * (2 + 16),
        "shuffling": 3 * (7 + 0.125 * 32) + 0.0625 * 32,
        "statistics": 0,
        "all_reduce": 0,
        "gather": 0,
    }
    assert distributed.predict(COSTS, WORK, 1, Network(1e9, 1e-9)) == expected
    assert distributed.steps_per_second(COSTS, WORK, 1, NETWORK) == pytest.approx(32 / sum(expected.values()))


def test_two_ranks_by_hand() -> None:
    """Environments, inference and gradients are halved; shuffling is not; messages are added."""
    assert distributed.predict(COSTS, WORK, 2, NETWORK) == {
        "environments": 8 * (1 + 2 * 2),
        "inference": 8 * (3 + 2),
        "advantages": 5 + 0.5 * 16 + 8 * 0.25,
        "gradients": 6 * (4 + 8),
        "shuffling": 3 * (7 + 0.125 * 32) + 0.0625 * 32,
        "statistics": 8 * ((1 + 10 / 10 + 2 * 0.5) + (1 + 20 / 10 + 2 * 0.5)),
        "all_reduce": 6 * 2 * (1 + 20 / 10),
        "gather": (1 + 160 / 10) + distributed.MESSAGES * 1,
    }


def test_what_the_scripts_refuse_has_no_speed() -> None:
    assert distributed.steps_per_second(COSTS, WORK, 8, NETWORK) is None  # 4 environments
    assert distributed.steps_per_second(COSTS, replace(WORK, num_envs=32, num_minibatches=64), 8, NETWORK) is None


def test_what_every_rank_does_for_all_limits_weak_scaling() -> None:
    """On a network that costs nothing: the shuffle of the whole batch, three times, and its random numbers."""
    limit = 1 / (3 * 0.125 + 0.0625)
    speeds = []
    for ranks in distributed.RANKS:
        work = replace(WORK, num_envs=4 * ranks)
        speeds.append(distributed.steps_per_second(replace(COSTS, merge=0), work, ranks, distributed.IDLE) or math.nan)
    assert speeds == sorted(speeds)
    assert 0.95 * limit < speeds[-1] < limit


@pytest.mark.parametrize(
    ("speeds", "ranks"),
    [([100, 200, 300, 320], 4), ([100, 90], 1), ([100, 130, None, None], 2), ([100, 90, 124], 1), ([100, 90, 125], 4)],
)
def test_ranks_pay_where_they_are_a_quarter_faster_than_any_fewer(speeds: list[float | None], ranks: int) -> None:
    assert distributed.pays_up_to(speeds) == ranks


def test_scenarios_grow_with_the_ranks_as_they_say() -> None:
    uses = distributed.scenarios(WORK, 4)
    assert uses["strong"] == WORK
    assert uses["weak, larger minibatches"] == replace(WORK, num_envs=16)
    more = uses["weak, more minibatches"]
    assert (more.num_envs, more.minibatch_size) == (16, WORK.minibatch_size)


def test_a_line_goes_through_its_points_or_through_zero() -> None:
    line = distributed.line_through([(1, 5), (3, 9)])
    assert (line.fixed, line.per_item) == (pytest.approx(3), pytest.approx(2))
    assert distributed.line_through([(1, 1), (2, 4)]) == Line(0.0, 9 / 5)


def test_events_and_the_gaps_between_them() -> None:
    events = [("step", 0, 2), ("step", 3, 6), ("gae", 10, 11), ("step", 13, 17), ("step", 22, 26)]
    assert distributed.durations(events) == {
        "step": 3.5, "gae": 1, "step to step": 3, "step to gae": 4, "gae to step": 2,
    }  # fmt: skip


def test_hop_and_bandwidth_of_made_up_messages() -> None:
    """Times made with the model give its network back."""
    made = Network(1e-4, 1e9)
    rows = [
        {"ranks": ranks, "operation": name, "bytes": size, "fastest": time(size, ranks), "cpu": time(size, ranks)}
        for ranks in (2, 4)
        for name, time in (("all_reduce", made.all_reduce), ("all_gather", made.all_gather))
        for size in distributed.SIZES
    ]
    found = distributed.network_of(rows)
    assert found.hop == pytest.approx(made.hop, rel=0.01)
    assert found.bandwidth == pytest.approx(made.bandwidth, rel=0.1)


def test_the_update_from_which_two_runs_differ() -> None:
    assert distributed.first_apart([1, 2, 3], [1, 2, 3], 1e-6) is None
    assert distributed.first_apart([1, 2, 3], [1, 2.0001, 4], 1e-6) == 2
    assert distributed.first_apart([1, 2, 3], [1, 2.0001, 4], 0.01) == 3
