"""benchmarks/compare.py: a planted loss is found, noise and a busy machine are not taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import compare
from benchmarks.common import machine_info, rows_of

PEERS = {"theirs": 1_000.0, "theirs, other": 250.0}
OURS = {"ours": 4_000.0, "ours, variant": 2_500.0}


def results(rng: np.random.Generator, noise: float, rounds: int = 5, load: bool = True, **factors: float) -> dict:
    """Made-up results in two groups: lognormal noise on each figure, a load that slows all candidates of a round, and
    `factors` on candidates of the first group."""
    rows = []
    for group in ("HalfCheetah", "Ant"):
        busy = rng.uniform(0.2, 1.0, rounds) if load else np.ones(rounds)
        figures = {}
        for name, speed in (PEERS | OURS).items():
            speed *= factors.get(name, 1.0) if group == "HalfCheetah" else 1.0
            figures[name] = (speed * busy * np.exp(noise * rng.normal(size=rounds))).tolist()
        rows += rows_of(group, figures, PEERS)
    return {"machine": machine_info(["numpy"]), "rows": rows}


def regressed(old: dict, new: dict, threshold: float = 0.9) -> list[tuple[str, str]]:
    return [(row["group"], row["name"]) for row in compare.compare(old, new, threshold) if row["regressed"]]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_and_load_raise_no_alarm(noise: float) -> None:
    """The same code twice, 60 times over: at most 5 % of the comparisons may speak of a regression."""
    rng = np.random.default_rng(1)
    alarms = sum(bool(regressed(results(rng, noise), results(rng, noise))) for _ in range(60))
    assert alarms <= 3


def test_a_loss_is_found_and_no_other_candidate_is_blamed() -> None:
    rng = np.random.default_rng(2)
    for _ in range(15):
        old, new = results(rng, 0.02), results(rng, 0.02, ours=0.8)
        assert regressed(old, new) == [("HalfCheetah", "ours")]


def test_a_group_that_was_not_measured_again_is_left_out() -> None:
    """Its ratios would be 1.000 without having been looked at, and would widen the others' intervals."""
    rng = np.random.default_rng(2)
    old, new = results(rng, 0.02), results(rng, 0.02, ours=0.8)
    machines = {"HalfCheetah": machine_info() | {"date": "monday"}, "Ant": machine_info() | {"date": "sunday"}}
    old["machines"] = machines
    new["machines"] = machines | {"HalfCheetah": machine_info() | {"date": "tuesday", "commit": "abc"}}
    new["rows"] = [row for row in new["rows"] if row["group"] == "HalfCheetah"] + [
        row for row in old["rows"] if row["group"] == "Ant"
    ]
    compared = compare.compare(old, new, 0.9)
    assert {row["group"] for row in compared} == {"HalfCheetah"}
    page = compare.report(old, new, compared, 0.9)
    assert "Left out, since New holds Old's measurement of them: Ant." in page
    assert "New: commit abc" in page
    assert "sunday" not in page
    with pytest.raises(compare.UsageError, match="measured twice"):
        compare.compare(old, old, 0.9)


def test_a_loss_within_the_threshold_is_none() -> None:
    rng = np.random.default_rng(3)
    old, new = results(rng, 0.005, rounds=9), results(rng, 0.005, rounds=9, ours=0.95)
    assert regressed(old, new) == []
    assert regressed(old, new, threshold=0.97) == [("HalfCheetah", "ours")]


def test_a_loss_that_noise_would_hide_is_said_to_be_hidden() -> None:
    rng = np.random.default_rng(6)
    for noise, rounds, hidden in ((0.3, 3, 4), (0.005, 9, 0)):
        old, new = (results(rng, noise, rounds=rounds) for _ in range(2))
        compared = compare.compare(old, new, 0.9)
        assert sum(row["too_noisy"] for row in compared) == hidden
        last_line = compare.report(old, new, compared, 0.9).splitlines()[-1]
        assert last_line == "0 of 4 are slower than 0.9 of what they were" + (
            "; 4 are too noisy to tell." if hidden else "."
        )


def test_a_machine_half_as_fast_is_no_loss_and_a_peer_that_is_slower_hides_none() -> None:
    rng = np.random.default_rng(4)
    slow = dict.fromkeys(PEERS | OURS, 0.5)
    assert regressed(results(rng, 0.02), results(rng, 0.02, **slow)) == []
    assert regressed(results(rng, 0.02), results(rng, 0.02, **slow | {"ours": 0.35})) == [("HalfCheetah", "ours")]


def test_the_change_and_its_interval_are_welchs() -> None:
    """Logarithms (0, 2) and (1, 3): difference 1, standard error sqrt(2), 2 degrees of freedom, t(0.975) = 4.3027."""
    ratio, low, high = compare.change(np.array([0.0, 2.0]), np.array([1.0, 3.0]), 0.95)
    assert np.log([ratio, low, high]) == pytest.approx([1, 1 - 4.3027 * 2**0.5, 1 + 4.3027 * 2**0.5], abs=1e-3)


def test_counts_that_never_vary() -> None:
    """Instruction counts, say, turned into speeds: equal ones are equal, and the least loss is certain."""
    rng = np.random.default_rng(5)
    old, same, less = (results(rng, 0.0, load=False, ours=factor) for factor in (1.0, 1.0, 0.85))
    assert regressed(old, same) == []
    assert regressed(old, less) == [("HalfCheetah", "ours")]


def test_only_what_both_have_is_compared() -> None:
    """A peer that is not installed any more, a new candidate, a group that --quick leaves out."""
    rng = np.random.default_rng(6)
    old, new = results(rng, 0.02), results(rng, 0.02)
    new["rows"] = [row for row in new["rows"] if row["name"] != "theirs, other" and row["group"] != "Ant"]
    new["rows"].append({"group": "HalfCheetah", "name": "new", "peer": False, "rounds": [1.0] * 5})
    compared = compare.compare(old, new, 0.9)
    assert [(row["group"], row["name"], row["peers"]) for row in compared] == [
        ("HalfCheetah", "ours", ["theirs"]),
        ("HalfCheetah", "ours, variant", ["theirs"]),
    ]
    assert compared[0]["old"] == pytest.approx(4, rel=0.1)


@pytest.fixture
def run_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Compare two results by the command line: (exit code, standard output, standard error)."""

    def run(old: Any, new: Any, *flags: str) -> tuple[int, str, str]:
        for name, data in (("old", old), ("new", new)):
            (tmp_path / f"{name}.json").write_text(data if isinstance(data, str) else json.dumps(data))
        code = compare.main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_exit_codes_and_report(run_main: Callable) -> None:
    rng = np.random.default_rng(7)
    old, same, slower = results(rng, 0.02), results(rng, 0.02), results(rng, 0.02, ours=0.5)
    assert run_main(old, same)[0] == 0
    slower["machine"]["packages"] = {"numpy": "1.0"}
    code, out, _ = run_main(old, slower)
    assert code == 1
    assert out.count("**slower**") == 1
    assert "1 of 4 are slower than 0.9 of what they were." in out
    assert f"numpy was {np.__version__} and is 1.0" in out


@pytest.mark.parametrize(
    ("old", "new", "flags", "sentence"),
    [
        ("{", None, [], "old.json is not JSON."),
        (None, {"machine": {}}, [], "new.json has no speeds of ours beside a peer's, so there is nothing to compare."),
        (None, [1, 2], [], "new.json has no speeds of ours beside a peer's, so there is nothing to compare."),
        (None, "one round", [], "ours (HalfCheetah) was measured in one round only; an interval takes two or more."),
        (None, "other", [], "The two results share no candidate of ours, measured twice, beside a shared peer."),
        (None, None, ["--threshold", "1.5"], "--threshold must be above 0 and at most 1, not 1.5."),
    ],
)
def test_what_cannot_be_compared_gets_one_sentence(
    run_main: Callable, old: Any, new: Any, flags: list[str], sentence: str
) -> None:
    rng = np.random.default_rng(8)
    made = {"one round": results(rng, 0.1, rounds=1), "other": results(rng, 0.1)}
    for row in made["other"]["rows"]:
        row["group"] = "another"
    code, out, err = run_main(old or results(rng, 0.1), made.get(str(new), new) or results(rng, 0.1), *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.endswith(f"{sentence}\n")
    assert err.count("\n") == 1


def test_a_missing_file_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'a.json'} cannot be read: No such file or directory.\n"
