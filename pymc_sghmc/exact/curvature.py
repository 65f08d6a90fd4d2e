"""What tuning learns for QNHMC: the inverse Hessian C, and when trajectories turn back.

At first C follows each trajectory by BFGS. Then it is estimated anew at the end of each window of
draws, and windows become longer.
"""

import math

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scipy.linalg import LinAlgError
from scipy.sparse.linalg import ArpackError

from pymc_sghmc.exact.quasi_newton import (
    CurvaturePair,
    Dense,
    Matrix,
    bfgs,
    guarded,
    identity,
    lbfgs,
    multisecant,
    of_largest_curvatures,
)
from pymc_sghmc.protocols import Array

__all__ = ["Curvature", "Moments", "begin", "follow", "gather"]

# Draws in the first window; each window is twice as long as the one before. A diagonal needs few
# draws. A matrix needs more, and BFGS follows them meanwhile.
FIRST_WINDOW = {"dense": 100, "limited": 25}
LONGEST_WINDOW = 1600  # more draws would cost memory and add little
# Draws that dense BFGS follows before the windows begin. While it follows, acceptance is lower than
# with the same C at rest, so it must end some time before tuning does, for the step size to grow.
DRAWS_PER_PARAMETER = 3
MOST_FOLLOWED = 600
LEAST_TIME = 1.0  # an earlier turn means that C is wrong, not that trajectories are short

Path = Sequence[tuple[Array, Array]]  # (position, gradient of log p) along a trajectory


class Moments(NamedTuple):
    """Welford's number, mean and sum of squared deviations, in O(d) memory."""

    n: int
    mean: Array  # of positions and gradients, (2, d)
    squares: Array  # (2, d)

    @classmethod
    def none(cls, d: int) -> "Moments":
        """Return the moments of no draws."""
        return cls(0, np.zeros((2, d)), np.zeros((2, d)))

    def with_draw(self, draw: Array) -> "Moments":
        """Return the moments with one more draw."""
        change = draw - self.mean
        mean = self.mean + change / (self.n + 1)
        return Moments(self.n + 1, mean, self.squares + change * (draw - mean))


class Curvature(NamedTuple):
    """C, and what the next estimate will be made of. Its functions return a new one."""

    inverse_hessian: Matrix  # C
    memory: int | None  # m of limited memory; None is dense BFGS
    for_ever: bool  # whether C follows the trajectories without an end, as in the paper
    pairs: tuple[CurvaturePair, ...] = ()  # the last m, for limited memory
    kept: int = 0  # pairs so far
    skipped: int = 0
    n_draws: int = 0
    window: int = 0  # draws in the present window; 0 while C follows each trajectory
    draws: tuple[Array, ...] = ()  # (position, gradient), (2, d), of the window, for a dense C
    moments: Moments | None = None  # of these, for limited memory
    turns: tuple[float, ...] = ()  # times at which trajectories of the window turned back
    turning_time: float = math.pi  # their mean; π if C is right, on a Gaussian of many parameters


def begin(d: int, memory: int | None, for_ever: bool) -> Curvature:
    """Start from C = I (Algorithm 2, input)."""
    return Curvature(identity(d, dense=memory is None), memory, for_ever)


def follow(curvature: Curvature, path: Path, accepted: bool) -> Curvature:
    """Update C from the pairs of an accepted trajectory (Algorithm 2, lines 7, 12, 16, 22).

    ``path`` has (position, gradient of log p) from start to end.
    """
    c = curvature._replace(n_draws=curvature.n_draws + 1)
    if accepted:
        c = _with_pairs(c, path)
    if c.for_ever:
        return c
    if c.memory is None:
        window = FIRST_WINDOW["dense"]
        d = path[0][0].size
        n_followed = max(window, min(DRAWS_PER_PARAMETER * d, MOST_FOLLOWED))
    else:
        window = n_followed = FIRST_WINDOW["limited"]
    return c._replace(window=window) if c.n_draws >= n_followed else c


def gather(
    curvature: Curvature,
    position: Array,
    gradient_at_it: Array,
    gradient: Callable[[Array], Array],
    turn: float | None = None,
) -> Curvature:
    """Add a draw to the window. At its end, estimate C anew from all draws and begin a new window.

    Parameters
    ----------
    curvature : Curvature
        C, and the present window.
    position, gradient_at_it : array of shape (d,)
        The draw, and ∇log p there.
    gradient : callable
        ∇log p, for the curvature pairs of limited memory.
    turn : float, optional
        Time at which the draw's trajectory turned back.
    """
    c = curvature._replace(n_draws=curvature.n_draws + 1)
    if turn is not None:
        c = c._replace(turns=(*c.turns, turn))
    draw = np.stack([position, gradient_at_it])
    if c.memory is None:
        c = c._replace(draws=(*c.draws, draw))
        n = len(c.draws)
    else:
        moments = (c.moments or Moments.none(position.size)).with_draw(draw)
        c = c._replace(moments=moments)
        n = moments.n
    if n < c.window:
        return c
    try:
        C, kept = _estimate_of_window(c, gradient)
    except (LinAlgError, ArithmeticError, ArpackError):  # a gradient that is zero or not finite
        C = c.inverse_hessian
        kept = 0
    time = max(LEAST_TIME, float(np.mean(c.turns))) if c.turns else c.turning_time
    return c._replace(
        inverse_hessian=C,
        kept=c.kept + kept,
        window=min(2 * c.window, LONGEST_WINDOW),
        draws=(),
        moments=None,
        turns=(),
        turning_time=time,
    )


def _estimate_of_window(c: Curvature, gradient: Callable[[Array], Array]) -> tuple[Matrix, int]:
    """Return C from the draws of a window, and the number of its curvature pairs."""
    if c.memory is None:
        assert isinstance(c.inverse_hessian, Dense)
        positions, gradients = np.moveaxis(np.array(c.draws), 1, 0)
        return multisecant(c.inverse_hessian, positions, gradients), len(c.draws)
    assert c.moments is not None
    of_positions, of_gradients = np.maximum(c.moments.squares, 1e-300)
    variances = np.sqrt(of_positions / of_gradients)
    C = of_largest_curvatures(gradient, c.moments.mean[0], variances, c.memory)
    return C, C.values.size


def _with_pairs(c: Curvature, path: Path) -> Curvature:
    """Update C by the pairs of one trajectory, unless round-off makes it indefinite."""
    pairs = []
    for (theta, grad), (new_theta, new_grad) in pairwise(path):
        pair = guarded(c.inverse_hessian, s=new_theta - theta, y=grad - new_grad)  # of U = −log p
        if pair is not None:
            pairs.append(pair)
    n_pairs = len(path) - 1
    try:
        if c.memory is None:
            assert isinstance(c.inverse_hessian, Dense)
            B = c.inverse_hessian.matrix
            for pair in pairs:
                B = bfgs(B, pair.s, pair.y)
            c = c._replace(inverse_hessian=Dense.of(B))
        else:
            remembered = (*c.pairs, *pairs)[-c.memory :]
            if remembered:
                c = c._replace(inverse_hessian=_of_pairs(remembered), pairs=remembered)
    except LinAlgError:
        return c._replace(skipped=c.skipped + n_pairs)
    return c._replace(kept=c.kept + len(pairs), skipped=c.skipped + n_pairs - len(pairs))


def _of_pairs(pairs: tuple[CurvaturePair, ...]) -> Matrix:
    """Return limited-memory BFGS of some pairs.

    B₀ lies between the inverse curvatures along s and along y. Nocedal & Wright (2006, eq. 7.20)
    take the latter, but scales become right sooner from above than from below.
    """
    S, Y = np.stack(pairs, axis=-1)
    s, y = pairs[-1]
    return lbfgs(np.full(s.size, np.linalg.norm(s) / np.linalg.norm(y)), S, Y)
