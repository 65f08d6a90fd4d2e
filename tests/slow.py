"""Which tests are in the slow group, beside those marked by hand: those in slow_tests.txt.

    python -m pytest -n 2 --durations=0 --durations-min=0.3 > times.txt
    python tests/slow.py times.txt

adds to the list, by a measurement of the default run, each test that took `SECONDS` or more. The
quickest case of a test function stays in the default run up to `QUICKEST`. A mark beside each of
some hundred cases would say no more, and nobody would measure them again. Empty the list first to
measure all of them; what starts or kills processes, or takes minutes, is marked where it stands.
"""

import re
import sys

from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parent / "slow_tests.txt"
SECONDS = 1.5  # on two cores, of which other work takes a third
QUICKEST = 2.5
TIME = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(\S.*)")


def listed():
    """Return the tests in the list, by the names that pytest gives them."""
    return LIST.read_text(encoding="utf-8").splitlines()


def function_of(name):
    """Return a test's name without its case."""
    return name.split("[")[0]


def measured(text):
    """Return seconds by test, from what pytest prints with ``--durations``."""
    seconds = defaultdict(float)
    for line in text.splitlines():
        if found := TIME.match(line.strip()):
            seconds[found[2].strip()] += float(found[1])
    return seconds


def too_slow(seconds):
    """Return which tests are too slow for the default run."""
    quickest = {}
    for name in sorted(seconds, key=seconds.get, reverse=True):
        quickest[function_of(name)] = name
    limits = {
        name: QUICKEST if quickest[function_of(name)] == name else SECONDS for name in seconds
    }
    return {name for name, limit in limits.items() if seconds[name] >= limit}


def main(path):
    """Add to the list."""
    seconds = measured(Path(path).read_text(encoding="utf-8"))
    added = too_slow(seconds)
    names = sorted(added.union(listed()))
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"{len(added)} tests more, which took {sum(map(seconds.get, added)):.0f} s")


if __name__ == "__main__":
    main(sys.argv[1])
