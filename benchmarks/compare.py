"""Compare two results of one benchmark: have our candidates become slower, next to the same peers?

    python -m benchmarks.compare OLD.json NEW.json [--threshold 0.9]

Absolute times say more about the machine and its load than about a change, so only ratios count: in each round of a
run, our candidate's figure over the geometric mean of the peers' figures of that round. The change is that ratio in
NEW over that in OLD, as a geometric mean over rounds, with Welch's t interval for the logarithms (scipy). All
intervals together hold with 95 % (each is widened for their number), so two runs of the same code seldom raise an
alarm. A candidate has regressed if its change is below the threshold and its interval below 1. Where the interval is
so wide that a loss down to the threshold would not have been found, that is said: it takes more rounds. No interval
shows what is the same in all rounds of a run and differs between runs (where memory and processes came to lie): confirm
an alarm by a second run. Exit code: 0, 1 for a regression, 2 for files that cannot be compared.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.common import markdown_table

CONFIDENCE = 0.95  # of all intervals together


class UsageError(ValueError):
    """Files that cannot be compared; the message says why in one sentence."""


def load(path: Path) -> dict[str, Any]:
    """A benchmark's JSON. Raises UsageError if there is none, or it has no rows to compare."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise UsageError(f"{path} is not JSON.") from None
    if not isinstance(data, dict) or not any(row["peer"] for row in data.get("rows", [])):
        raise UsageError(f"{path} has no speeds of ours beside a peer's, so there is nothing to compare.")
    return data


def figures_of(data: dict[str, Any], peer: bool) -> dict[str, dict[str, np.ndarray]]:
    """The rounds' figures by group and name, of the peers or of our candidates."""
    figures: dict[str, dict[str, np.ndarray]] = {}
    for row in data["rows"]:
        if row["peer"] == peer:
            figures.setdefault(row["group"], {})[row["name"]] = np.array(row["rounds"])
    return figures


def machine_of(data: dict[str, Any], group: str) -> dict[str, Any]:
    """Where and when a group was measured: a file whose groups may be of several runs has "machines" by group."""
    info: dict[str, Any] = data.get("machines", {}).get(group) or data.get("machine", {})
    return info


def carried_over(old: dict[str, Any], new: dict[str, Any], group: str) -> bool:
    """Whether NEW holds OLD's own measurement of a group, which its run did not repeat."""
    dates = [data.get("machines", {}).get(group, {}).get("date") for data in (old, new)]
    return dates[0] is not None and dates[0] == dates[1]


def log_ratios(ours: np.ndarray, peers: list[np.ndarray]) -> np.ndarray:
    """Logarithm of ours over the geometric mean of the peers, round by round."""
    return np.log(ours) - np.mean([np.log(peer) for peer in peers], axis=0)


def change(old: np.ndarray, new: np.ndarray, confidence: float) -> tuple[float, float, float]:
    """exp(mean(new) - mean(old)) of two samples of logarithms, and its Welch interval."""
    difference = float(new.mean() - old.mean())
    low = high = difference
    if max(old.std(), new.std()) > 1e-9:  # counts that never vary have no interval
        low, high = stats.ttest_ind(new, old, equal_var=False).confidence_interval(confidence)
    return float(np.exp(difference)), float(np.exp(low)), float(np.exp(high))


def compare(old: dict[str, Any], new: dict[str, Any], threshold: float) -> list[dict[str, Any]]:
    """A dict for each of our candidates that stands beside a shared peer in both results: group, name, peers, old and
    new ratio, change, its interval, whether it regressed, and whether it is too noisy to tell. Raises UsageError if
    there is none. Groups that NEW's run did not measure are left out."""
    ours, peers = [figures_of(data, False) for data in (old, new)], [figures_of(data, True) for data in (old, new)]
    pairs: list[tuple[str, str, list[str], np.ndarray, np.ndarray]] = []
    for group in [group for group in ours[1] if group in ours[0] and not carried_over(old, new, group)]:
        shared = [name for name in peers[1].get(group, {}) if name in peers[0].get(group, {})]
        for name in [name for name in ours[1][group] if name in ours[0][group] and shared]:
            before, after = (
                log_ratios(ours[k][group][name], [peers[k][group][peer] for peer in shared]) for k in (0, 1)
            )
            if min(len(before), len(after)) < 2:
                raise UsageError(f"{name} ({group}) was measured in one round only; an interval takes two or more.")
            pairs.append((group, name, shared, before, after))
    if not pairs:
        raise UsageError("The two results share no candidate of ours, measured twice, beside a shared peer.")
    compared = []
    for group, name, shared, before, after in pairs:
        ratio, low, high = change(before, after, 1 - (1 - CONFIDENCE) / len(pairs))
        regressed = ratio < threshold and high < 1
        compared.append({
            "group": group, "name": name, "peers": shared, "old": float(np.exp(before.mean())),
            "new": float(np.exp(after.mean())), "change": ratio, "interval": (low, high),
            "regressed": regressed, "too_noisy": not regressed and threshold * high / ratio >= 1,
        })  # fmt: skip
    return compared


def report(old: dict[str, Any], new: dict[str, Any], compared: list[dict[str, Any]], threshold: float) -> str:
    """The comparison as Markdown, with what differs between the two machines."""
    rows = [
        [
            row["group"], row["name"], f"{row['old']:.2f}", f"{row['new']:.2f}", f"{row['change']:.3f}",
            f"{row['interval'][0]:.3f} to {row['interval'][1]:.3f}",
            "**slower**" if row["regressed"] else "too noisy" if row["too_noisy"] else "",
        ]
        for row in compared
    ]  # fmt: skip
    page = markdown_table(["group", "ours", "old ours / peers", "new", "new / old", "interval", ""], rows)
    names = {tuple(row["peers"]) for row in compared}
    page += f"\nPeers: {'; '.join(', '.join(peers) for peers in sorted(names))}.\n"
    notes: list[str] = []
    for group in {row["group"]: None for row in compared}:
        machines = [machine_of(data, group) for data in (old, new)]
        for label, info in zip(("Old", "New"), machines, strict=True):
            load = info["load_average"][0]
            notes.append(f"{label}: commit {info['commit']}, {info['cpu']}, load {load}, {info['date']}.\n")
        versions = [info["packages"] for info in machines]
        for name in sorted(versions[0].keys() | versions[1].keys()):
            before, after = (packages.get(name) for packages in versions)
            if before != after:
                notes.append(f"Note: {name} was {before or 'not installed'} and is {after or 'not installed'}.\n")
        for fact in ("cpu", "cores"):
            if machines[0][fact] != machines[1][fact]:
                notes.append(f"Note: the {fact} differ, and ratios of different machines may without any change.\n")
    page += "".join(dict.fromkeys(notes))  # what is true of several groups, once
    left_out = [group for group in new.get("machines", {}) if carried_over(old, new, group)]
    if left_out:
        page += f"Left out, since New holds Old's measurement of them: {'; '.join(left_out)}.\n"
    slower, noisy = (sum(row[name] for row in compared) for name in ("regressed", "too_noisy"))
    page += f"{slower} of {len(compared)} are slower than {threshold:g} of what they were"
    return page + (f"; {noisy} are too noisy to tell.\n" if noisy else ".\n")


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code: 0, 1 for a regression, 2 for files that cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.9, help="the change below which it is a regression")
    options = parser.parse_args(argv)
    try:
        if not 0 < options.threshold <= 1:
            raise UsageError(f"--threshold must be above 0 and at most 1, not {options.threshold}.")
        old, new = load(options.old), load(options.new)
        compared = compare(old, new, options.threshold)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(old, new, compared, options.threshold), end="")
    return int(any(row["regressed"] for row in compared))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
