"""How many leapfrog steps a trajectory of QNHMC takes: so many, or a part of the time until it turns.

Knows what tuning has learnt (`curvature`); knows no density and no positions.
"""

import math

import numpy as np

from pymc_sghmc.checks import is_whole

__all__ = ["checked_steps", "length"]

MAX_STEPS = 1023  # of a trajectory of learnt length, as many as NUTS takes at most
MAX_EARLY_STEPS = 50  # the same while C is far from right
# One in so many trajectories is followed until it turns, at the price of as many gradients.
FOLLOWED = 4
JITTER = (0.35, 0.75)  # length of trajectories in turning times: around π/2 on a Gaussian
# Times that at most, where late turns say that C leaves slow directions, which turn later yet.
LONGER = 2.0


def checked_steps(n_steps):
    """Return "auto" or (lowest, highest)."""
    if isinstance(n_steps, str) and n_steps == "auto":
        return n_steps
    pair = (n_steps, n_steps) if np.ndim(n_steps) == 0 else tuple(n_steps)
    if len(pair) != 2 or not all(map(is_whole, pair)) or not 1 <= pair[0] <= pair[1]:
        raise ValueError(
            f'n_steps={n_steps!r}: pass "auto", a whole number of leapfrog steps, at least 1, or a '
            "pair (lowest, highest) of them."
        )
    return int(pair[0]), int(pair[1])


def length(n_steps, curvature, step_size, rng, tuning) -> tuple[int, int]:
    """Leapfrog steps of the next trajectory, and how many more to follow it.

    Parameters
    ----------
    n_steps : "auto" or (int, int)
        From `checked_steps`.
    curvature : Curvature
    step_size : float
    rng : numpy.random.Generator
    tuning : bool
    """
    if n_steps != "auto":
        low, high = n_steps
        return int(rng.integers(low, high + 1)), 0
    c = curvature
    early = tuning and not c.window  # C changes with each draw, and turning times with it
    most = MAX_EARLY_STEPS if early else MAX_STEPS
    longer = min(max(c.turning_time / math.pi, 1.0), LONGER)
    time = rng.uniform(*JITTER) * longer * c.turning_time
    steps = max(1, round(min(time / step_size, most)))
    follow = max(0, math.ceil(min(3 * c.turning_time / step_size, most)) - steps)
    return steps, follow if tuning and not early and c.n_draws % FOLLOWED == 0 else 0
