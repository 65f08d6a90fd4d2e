"""The number of leapfrog steps in a trajectory: given, or a part of the time until it turns."""

import math

from typing import Any, Literal, NamedTuple

import numpy as np

from pymc_sghmc.checks import is_whole
from pymc_sghmc.exact.curvature import Curvature

__all__ = ["Length", "checked_steps", "length"]

MAX_STEPS = 1023  # in a trajectory of learnt length, as in NUTS
MAX_EARLY_STEPS = 50  # the same while C is still far from right
FOLLOWED = 4  # one in this many trajectories is followed until it turns, which costs gradients
JITTER = (0.35, 0.75)  # length of trajectories in turning times: around π/2 on a Gaussian
# If trajectories turn late, C leaves directions in which the posterior is wide, and along these
# they turn even later. Then trajectories are longer, by this factor at most.
LONGER = 2.0


class Length(NamedTuple):
    """Length of the next trajectory."""

    n_steps: int  # leapfrog steps
    n_followed: int  # further steps at most, only to see when the trajectory turns back


def checked_steps(n_steps: Any) -> Literal["auto"] | tuple[int, int]:
    """Check the argument ``n_steps``; return "auto" or (lowest, highest)."""
    if isinstance(n_steps, str) and n_steps == "auto":
        return "auto"
    pair = (n_steps, n_steps) if np.ndim(n_steps) == 0 else tuple(n_steps)
    if len(pair) != 2 or not all(map(is_whole, pair)) or not 1 <= pair[0] <= pair[1]:
        raise ValueError(
            f'n_steps={n_steps!r}: pass "auto", a whole number of leapfrog steps, at least 1, or a '
            "pair (lowest, highest) of them."
        )
    return int(pair[0]), int(pair[1])


def length(
    n_steps: Literal["auto"] | tuple[int, int],
    curvature: Curvature,
    step_size: float,
    rng: np.random.Generator,
    is_tuning: bool,
) -> Length:
    """Choose the length of the next trajectory.

    Parameters
    ----------
    n_steps : "auto" or (int, int)
        From `checked_steps`.
    curvature : Curvature
        What tuning has learnt.
    step_size : float
        ε.
    rng : numpy.random.Generator
        Draws the length.
    is_tuning : bool
        Whether trajectories may be followed until they turn.
    """
    if n_steps != "auto":
        lowest, highest = n_steps
        return Length(int(rng.integers(lowest, highest + 1)), 0)
    # At first C changes with each draw, and turning times with it.
    is_early = is_tuning and not curvature.window
    most = MAX_EARLY_STEPS if is_early else MAX_STEPS
    turning_time = curvature.turning_time
    longer = min(max(turning_time / math.pi, 1.0), LONGER)
    time = rng.uniform(*JITTER) * longer * turning_time
    chosen = max(1, round(min(time / step_size, most)))
    is_followed = is_tuning and not is_early and curvature.n_draws % FOLLOWED == 0
    if not is_followed:
        return Length(chosen, 0)
    until_turn = math.ceil(min(3 * turning_time / step_size, most))
    return Length(chosen, max(0, until_turn - chosen))
