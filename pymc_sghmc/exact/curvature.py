"""What tuning learns for Hamiltonian samplers: the inverse Hessian C, and when trajectories turn.

Knows quasi-Newton estimates; knows no PyMC and no step sizes.
"""

import math

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from scipy.linalg import LinAlgError
from scipy.sparse.linalg import ArpackError

from pymc_sghmc.exact.quasi_newton import (
    Dense,
    bfgs,
    guarded,
    identity,
    lbfgs,
    multisecant,
    stiffest,
)

__all__ = ["Curvature", "begin", "follow", "gather"]

# Draws in the first window; each window is twice as long as the one before. A diagonal takes few
# draws, a matrix more, which BFGS follows meanwhile.
FIRST_WINDOW = {"dense": 100, "limited": 25}
LONGEST_WINDOW = 1600  # more draws would cost memory and tell little
# Draws that dense BFGS follows before the windows begin. While it follows, acceptance is lower than
# with the same C at rest, so that it must end some time before tuning for the step size to grow.
DRAWS_PER_UNKNOWN = 3
MOST_FOLLOWED = 600
LEAST_TIME = 1.0  # a turn sooner than this says that C is wrong, not that trajectories are short


class Curvature(NamedTuple):
    """C, and what the next estimate will be made of."""

    inverse_hessian: Any  # C, Dense or LowRank
    memory: int | None  # m of limited memory; None is dense BFGS
    for_ever: bool  # whether C follows the trajectories without an end, as in the paper
    pairs: tuple = ()  # the last m pairs (s, y), for limited memory
    kept: int = 0  # pairs so far
    skipped: int = 0
    n_draws: int = 0
    window: int = 0  # draws in the present window; 0 while C follows each trajectory
    draws: Any = ()  # (position, gradient) of the window, or for limited memory their moments
    turns: tuple = ()  # times at which trajectories turned back
    turning_time: float = math.pi  # their mean; π if C is right, on a Gaussian of many unknowns


def begin(d, memory, for_ever) -> Curvature:
    """Start from C = I (Algorithm 2, input)."""
    return Curvature(identity(d, dense=memory is None), memory, for_ever)


def follow(curvature, path, accepted) -> Curvature:
    """Refresh C from the pairs of an accepted trajectory (Algorithm 2, lines 7, 12, 16, 22).

    ``path`` holds (position, gradient of log p) from start to end.
    """
    c = curvature._replace(n_draws=curvature.n_draws + 1)
    if accepted:
        c = _with_pairs(c, path)
    if c.memory is None:
        window = FIRST_WINDOW["dense"]
        needed = min(DRAWS_PER_UNKNOWN * path[0][0].size, MOST_FOLLOWED)
        enough = c.n_draws >= max(window, needed)
    else:
        window = FIRST_WINDOW["limited"]
        enough = c.n_draws >= window
    return c._replace(window=window) if enough and not c.for_ever else c


def gather(curvature, position, gradient_at_it, gradient, turn=None) -> Curvature:
    """Take a draw into the window; at its end, C anew from all of them, and a new window.

    ``gradient`` is ∇log p, for the curvature pairs of limited memory.
    """
    c = curvature._replace(n_draws=curvature.n_draws + 1)
    draw = np.stack([position, gradient_at_it])
    draws = (*c.draws, draw) if c.memory is None else _with_moments(c.draws, draw)
    c = c._replace(draws=draws, turns=c.turns if turn is None else (*c.turns, turn))
    n = len(draws) if c.memory is None else draws[0]
    if n < c.window:
        return c
    try:
        if c.memory is None:
            positions, gradients = np.moveaxis(np.array(draws), 1, 0)
            C = multisecant(c.inverse_hessian, positions, gradients)
            kept = len(draws)
        else:
            _, (centre, _), squares = draws
            variances = np.sqrt(np.maximum(squares[0], 1e-300) / np.maximum(squares[1], 1e-300))
            C = stiffest(gradient, centre, variances, c.memory)
            kept = C.values.size
    except (LinAlgError, ArithmeticError, ArpackError):  # a gradient that is zero or not finite
        C = c.inverse_hessian
        kept = 0
    time = max(LEAST_TIME, float(np.mean(c.turns))) if c.turns else c.turning_time
    return c._replace(
        inverse_hessian=C,
        kept=c.kept + kept,
        window=min(2 * c.window, LONGEST_WINDOW),
        draws=(),
        turns=(),
        turning_time=time,
    )


def _with_pairs(c, path):
    """C with the pairs of one trajectory; C as it was where round-off makes it indefinite."""
    d = path[0][0].size
    C = c.inverse_hessian
    B = c.inverse_hessian.matrix if c.memory is None else None
    pairs = list(c.pairs)
    kept = 0
    skipped = 0
    for (theta, grad), (new_theta, new_grad) in pairwise(path):
        s = new_theta - theta  # y of U = −log p
        y = grad - new_grad
        pair = guarded(C, s, y)
        if pair is None:
            skipped += 1
            continue
        s, y = pair
        if c.memory is None:
            B = bfgs(B, s, y)
        else:
            pairs = [*pairs, (s, y)][-c.memory :]
        kept += 1
    try:
        if c.memory is None:
            C = Dense.of(B)
        elif pairs:
            S, Y = np.stack(pairs, axis=-1)
            s, y = pairs[-1]
            # B₀ between the inverse curvatures along s and along y, where Nocedal & Wright (2006,
            # eq. 7.20) take the latter: scales come up sooner from above than from below.
            C = lbfgs(np.full(d, np.linalg.norm(s) / np.linalg.norm(y)), S, Y)
    except LinAlgError:
        return c._replace(skipped=c.skipped + kept + skipped)
    return c._replace(
        inverse_hessian=C,
        pairs=tuple(pairs),
        kept=c.kept + kept,
        skipped=c.skipped + skipped,
    )


def _with_moments(moments, draw):
    """Welford's number, means and sums of squares, of position and gradient, in O(d)."""
    n, mean, squares = moments or (0, np.zeros_like(draw), np.zeros_like(draw))
    change = draw - mean
    mean = mean + change / (n + 1)
    return n + 1, mean, squares + change * (draw - mean)
