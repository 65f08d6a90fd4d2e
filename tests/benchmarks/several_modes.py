"""How often are the modes of a posterior found, and how often are several reported where one is?

    python tests/benchmarks/several_modes.py [--name square mixture_3 ...] [--seeds 5] [--markdown]

A step, ``SGHMC(batch_size=100)``, is built once for each model, and set up anew for data of the
seeds 0, 1, 2, …; models of tests/model_collection/hard.py have one data set. Prints a line for each model:
how many modes there are by construction (of more than four, any four count), how many the step found
for each data set, and what the search cost at most: evaluations of the density, passes over the data,
their share of the first set-up's passes, and seconds. The compiled functions run in the mode that
tests use, so that seconds are a few times those of the default.
"""

import argparse
import json
import logging
import re
import sys
import warnings

from pathlib import Path

import numpy as np
import pymc as pm

sys.path.insert(0, str(Path(__file__).parents[1]))

from model_collection import models_of
from modes import FAST

from pymc_sghmc import SGHMC

MOST = 4  # modes that the step makes set-ups for
CASES = {name: entry.make for name, entry in models_of("several_modes").items()}
HARD = {name: entry.make for name, entry in models_of("hard").items()}


class Costs(logging.Handler):
    """Reads what searches cost off the log."""

    pattern = re.compile(r"from (\d+) points: (\d+) evaluations.*?, ([\d.]+) passes.*?, ([\d.]+) s")

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.found = []

    def emit(self, record):
        """Take in a record."""
        if match := self.pattern.search(record.getMessage()):
            self.found.append([float(number) for number in match.groups()])


def of_case(case, n_seeds):
    """Build a step, and set it up for each data set."""
    with case.model() as model:
        n_rows = len(model["y"].get_value())
        step = SGHMC(batch_size=min(100, n_rows // 2), compile_kwargs=FAST, **case.arguments)
    counts, setups = [len(step.tuner.modes.shares)], [step.tuner.setup.passes]
    for seed in range(1, n_seeds):
        with model:
            pm.set_data(case.data(np.random.default_rng(seed)))
        step.begin_chain(np.random.default_rng(0))
        step.tuner.prepare()
        counts.append(len(step.tuner.modes.shares))
        setups.append(step.tuner.setup.passes)
    return counts, setups


def of_hard(hard):
    """Build a step for a model with given data."""
    with hard.model:
        step = SGHMC(batch_size=min(100, hard.n_rows // 2), compile_kwargs=FAST)
    return [len(step.tuner.modes.shares)], [step.tuner.setup.passes]


def row_of(name, n_seeds):
    """What is found in one model, and what it cost."""
    log = logging.getLogger("pymc.sghmc")
    costs = Costs()
    log.addHandler(costs)
    log.setLevel(logging.DEBUG)
    try:
        if name in CASES:
            true = CASES[name].n_modes
            counts, setups = of_case(CASES[name], n_seeds)
        else:
            true = 1
            counts, setups = of_hard(HARD[name]())
    except ValueError as error:
        return {"name": name, "refused": str(error).split(". ")[0][:80]}
    finally:
        log.removeHandler(costs)
    row = {
        "name": name,
        "true": true,
        "found": counts,
        "right": sum(n == min(true, MOST) for n in counts),
    }
    if costs.found:
        starts, evaluations, passes, seconds = np.max(costs.found, axis=0)
        share = max(c[2] / s for c, s in zip(costs.found, setups, strict=False))
        row |= {"starts": starts, "evaluations": evaluations, "passes": passes}
        row |= {"share": round(share, 2), "seconds": seconds}
    return row


def main():
    """Run what the command asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", nargs="*", default=[*CASES, *HARD])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    for name in given.name:
        row = row_of(name, given.seeds)
        if given.markdown:
            print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
        else:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
