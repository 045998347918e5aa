"""Plant a bug in a copy of ppo_continuous_mujoco.py, for you to find. The list is in docs/exercises.md.

python -m docs.exercises 7 my_copy.py     # write the copy, with bug 7 in it
python -m docs.exercises 7 --solution     # what was changed, and which test sees it
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.test_planted_bugs import BUGS, Bug

SCRIPT = Path(__file__).parent.parent / "ppo_continuous_mujoco.py"

# In the order of the page: what is wrong is named in tests/test_planted_bugs.py, which proves that a test sees it.
EXERCISES = (
    "the recursion runs forwards",
    "lambda is forgotten",
    "a termination is bootstrapped",
    "a time limit is not bootstrapped",
    "the recursion runs across time limits",
    "advantages are the critic's targets",
    "advantages keep their mean",
    "per-environment normalisation takes the wrong axis",
    "the policy loss has the wrong sign",
    "nothing is clipped",
    "only the clipped ratio counts",
    "the ratio is upside down",
    "the ratio is of stale log-probabilities",
    "the entropy bonus is a penalty",
    "the value loss is maximised",
    "k1 has the wrong sign",
    "the clip fraction sees one side",
    "each action dimension has a log-probability of its own",
    "a batch of one loses its dimension",
    "the policy starts with large means",
    "the reset observation is bootstrapped",
    "the action is clipped before its log-probability",
    "rows of a minibatch are of different transitions",
    "transitions are drawn with replacement",
    "thresholds must be hit exactly",
    "evaluation samples its actions",
)


def bug_of(number: int) -> Bug:
    """The bug of an exercise; exercises count from 1."""
    return BUGS[EXERCISES[number - 1]]


def plant(number: int) -> str:
    """The text of the script with the bug of an exercise in it. Raises ValueError if the script has changed so that
    the place of the bug is not found exactly once."""
    source, bug = SCRIPT.read_text(), bug_of(number)
    if source.count(bug.old) != 1:
        raise ValueError(f"Exercise {number} wants to change {bug.old!r}, found {source.count(bug.old)} times.")
    return source.replace(bug.old, bug.new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, choices=range(1, len(EXERCISES) + 1), metavar="NUMBER")
    parser.add_argument("copy", nargs="?", default="my_copy.py", help="file to write (default my_copy.py)")
    parser.add_argument("--solution", action="store_true", help="print what was changed instead")
    args = parser.parse_args()
    if args.solution:
        bug = bug_of(args.number)
        print(f"{EXERCISES[args.number - 1]}\n- {bug.old}\n+ {bug.new}\nseen by {bug.caught_by}")
    elif Path(args.copy).exists():
        parser.error(f"{args.copy} exists: delete it, or name another file.")
    else:
        try:
            Path(args.copy).write_text(plant(args.number))
        except OSError as error:
            parser.error(f"{args.copy} cannot be written: {error.strerror}.")
        print(f"{args.copy} has bug {args.number} in it. Find it; then: pytest --script {args.copy}")


if __name__ == "__main__":
    main()
