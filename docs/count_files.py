"""Count the files of the package whose functions run while a step is built, and in one tuning draw.

    python docs/count_files.py

Whoever follows one construction or one draw with a debugger has to open that many files. Only calls
of functions count: importing a file, or defining a class in it, does not.
"""

import logging
import sys
import threading

from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pymc as pm

import pymc_sghmc

PACKAGE = Path(pymc_sghmc.__file__).parent
N_ROWS, N_COEFFICIENTS = 5_000, 3
SETTLED = 10  # draws after which a tuning draw is an ordinary one


def files_entered(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call ``action``; return its result and the files of the package in which a function ran."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            entered.add(frame.f_code.co_filename)

    threading.setprofile(note)  # for threads that the action starts
    sys.setprofile(note)
    try:
        result = action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = (Path(name) for name in entered)
    return result, sorted(
        path.relative_to(PACKAGE).as_posix() for path in inside if path.is_relative_to(PACKAGE)
    )


def logistic_regression() -> pm.Model:
    """Build a logistic regression with an intercept and two slopes."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N_ROWS, N_COEFFICIENTS))
    y = rng.random(N_ROWS) < 1 / (1 + np.exp(-X @ np.linspace(-1, 1, N_COEFFICIENTS)))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=N_COEFFICIENTS)
        pm.Bernoulli("y", logit_p=pm.math.dot(X, beta), observed=y.astype(int))
    return model


def counts() -> dict[str, list[str]]:
    """Files entered while ``SGHMC(batch_size=500)`` is built, and by one tuning draw."""
    model = logistic_regression()

    def build() -> pymc_sghmc.SGHMC:
        with model:
            return pymc_sghmc.SGHMC(batch_size=500)

    step, construction = files_entered(build)
    step.begin_chain(np.random.default_rng(0))
    point = model.initial_point()
    for _ in range(SETTLED):
        point, _ = step.step(point)
    _, draw = files_entered(lambda: step.step(point))
    return {
        "SGHMC(batch_size=500) is built": construction,
        "a tuning draw is made": draw,
    }


def main() -> None:
    """Print both numbers, each with its files."""
    logging.getLogger("pymc.sghmc").setLevel(logging.ERROR)
    for occasion, files in counts().items():
        print(f"{len(files)} files are entered while {occasion}:")
        print("".join(f"    {file}\n" for file in files))


if __name__ == "__main__":
    main()
