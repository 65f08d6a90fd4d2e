"""Gaussian variational fit: the Gaussian nearest to a posterior whose mode isn't in its bulk.

The joint mode of a hierarchical model sits in the neck of a funnel, or at a scale of zero. The mean
of the Gaussian that variational inference fits lies in the bulk. Knows passes over the data and
SciPy, no samplers.
"""

import math

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from scipy.optimize import minimize

from pymc_sghmc.gradients.metric import Array, Dense, Metric
from pymc_sghmc.gradients.rewrite import MeanField
from pymc_sghmc.tuning.curvature import (
    CountedPasses,
    Rows,
    diagonal_by_signs,
    hutchinson_diagonal,
)
from pymc_sghmc.tuning.gaussian_draws import evidence_bound, is_rough
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

__all__ = [
    "FLAT",
    "NEAR",
    "StandardDraws",
    "Walled",
    "first_scales",
    "fit_around",
    "lower",
    "mean_field",
    "nearer",
    "standard_draws",
    "variational_fit",
]

N_PAIRS = 4  # of draws ±z; pairs make the mean exact where the posterior is symmetric
ROWS_PER_PARAMETER = 4  # in a share of the rows; where there aren't as many, all draws see all
NATS = 1e-2  # that the last iteration of a first fit gains, ...
NATS_PER_PARAMETER = 2e-5  # ... or this for each, where that is more
ROUNDS = 8  # of Newton's
FEW_ROUNDS = 3  # of the curvature alone, where the mean is given
NEAR = 0.1  # sds in every direction by which the last of them may move
FAR = 2.0  # sds by which one may
ROUNDS_OF_SCALES = 2
LEAST = 1e-100  # curvature: that of no width
SHORT = 0.1  # length of directions along which curvatures at a start are found: no width is known
FLAT = 0.05  # least curvature, of that of the coordinates so far, that is believed
LESS_FLAT = 0.5  # the same, where scales went from one extreme to the other
COLLAPSED = 0.03  # of a standard deviation before, below which it did
WIDEST = 12.0  # logarithm of a scale over its first guess: nothing is known of it there
NARROWER = np.array([0.3, 0.03, 0.003, 3e-4])  # first scales, of what curvature promises
NO_NUMBER = 1e100  # for it, where nothing is known yet
WALL = 5.0  # times the fall that its slope promised: what energy counts for where it is infinite


class StandardDraws(NamedTuple):
    """Draws from a standard normal, the same ones throughout a fit."""

    z: Array  # (k, d), in pairs ±z
    rows: list[Rows]  # of each, which the density there is of


class Walled:
    """A function for L-BFGS to minimise, with a moderate wall where it isn't finite.

    That sends the line search back, some thirtyfold. At a wall much higher it hardly moves any
    more, and the search takes that for its end.

    Parameters
    ----------
    function : callable
        From an array to a value and its gradient.
    """

    def __init__(self, function: Callable[[Array], tuple[float, Array]]) -> None:
        self.function = function
        self.least = np.inf
        self.slope: Array | None = None  # there, ...
        self.there: Array | None = None  # ... and where

    def __call__(self, x: Array) -> tuple[float, Array]:
        """Return the value and the gradient, or those of the wall."""
        value, slope = self.function(x)
        if not (math.isfinite(value) and np.isfinite(slope).all()):
            return self._wall(x), np.zeros_like(x)
        if value < self.least:
            self.least = value
            self.slope = slope
            self.there = x.copy()
        return value, slope

    def _wall(self, x: Array) -> float:
        if self.slope is None or self.there is None:
            return NO_NUMBER
        rise = WALL * abs(float(self.slope @ (x - self.there)))
        return self.least + rise if 0 < rise < np.inf else NO_NUMBER


def variational_fit(
    counted: CountedPasses, start: Array, independent: MeanField | None = None
) -> GaussianFit | None:
    """Fit a Gaussian to the posterior, from ``start``; None where there is nothing to go by.

    First its mean and the scale of each parameter, with the same few draws throughout so that
    L-BFGS has a function to minimise (Giordano, Ingram & Broderick 2024), each draw on a share of
    the rows of its own. Then Newton's method for the mean gradient over the Gaussian to be zero,
    with the mean curvature over it, which are what the best Gaussian has.

    Parameters
    ----------
    counted : CountedPasses
    start : array of shape (d,)
    independent : MeanField, optional
        A fit with independent parameters that is known: Newton's method begins with it at once.
    """
    draws = standard_draws(counted, start.size)
    if independent is not None:
        fit = _by_newton(counted, draws, independent)
        if fit.is_mode:
            return fit
    independent = _mean_field(counted, draws, start)
    return None if independent is None else _by_newton(counted, draws, independent)


def fit_around(counted: CountedPasses, mean: Array, metric: Dense) -> GaussianFit:
    """Fit a Gaussian whose mean is given, such as that of a chain's draws.

    Parameters
    ----------
    counted : CountedPasses
        With exact Hessians: each round takes one at each draw.
    mean : array of shape (d,)
    metric : Dense
        Of an earlier fit.
    """
    draws = standard_draws(counted, mean.size)
    factor = metric.factor
    for _ in range(FEW_ROUNDS):
        factor, _ = _rescaled(counted, draws, mean, factor)
    is_near = not is_rough(counted, mean, Dense(factor), draws.z, of_mean=False)
    fit = GaussianFit(mean=mean, metric=Dense(factor), is_mode=is_near, passes=counted.passes)
    if is_near:
        return fit
    # what is flat at the mean is made wider until draws reach a wall, and then narrow
    found = max(replace(fit, metric=metric), fit, key=partial(evidence_bound, counted))
    return replace(found, passes=counted.passes)


def _by_newton(counted: CountedPasses, draws: StandardDraws, independent: MeanField) -> GaussianFit:
    """Fit a Gaussian from one with independent parameters."""
    for flattest in (FLAT, LESS_FLAT):
        m, factor, moved, has_collapsed = _newton_rounds(counted, draws, independent, flattest)
        if not has_collapsed:
            break
    for _ in range(ROUNDS if counted.subset is not None else 0):  # the mean of all rows is another
        m, moved = nearer(counted, None, m, Dense(factor), draws.z)
        if not NEAR <= moved < math.inf:
            break
    is_near = bool(moved < NEAR) and not is_rough(counted, m, Dense(factor), draws.z)
    fit = GaussianFit(mean=m, metric=Dense(factor), is_mode=is_near, passes=counted.passes)
    if is_near or counted.subset is not None:  # by a subset its own mean would seem better
        return fit
    # curvatures that differ from draw to draw may have led away from what was there before
    before = replace(fit, mean=independent.mean, metric=Dense(np.diag(independent.sds)))
    return max(before, fit, key=partial(evidence_bound, counted))


class _Rounds(NamedTuple):
    """What rounds of Newton's method came to."""

    mean: Array
    factor: Array
    moved: float  # by the last one, in sds
    has_collapsed: bool  # a parameter's sd became far smaller in one of them


def _newton_rounds(
    counted: CountedPasses, draws: StandardDraws, independent: MeanField, flattest: float
) -> _Rounds:
    """Take rounds of Newton's method, from a Gaussian with independent parameters.

    The logarithm of a scale has a long straight tail on one side, in which no curvature tells a
    width. What is made wider there in each round ends at draws beyond the wall on the other side:
    these drive the mean out along the tail, round by round, and then make it narrow, so far out
    that nothing tells it from a mode.
    """
    m = independent.mean
    factor = np.diag(independent.sds)
    moved = np.inf
    has_collapsed = False
    for i in range(ROUNDS):
        sds = np.linalg.norm(factor, axis=1)
        factor, is_wide = _rescaled(counted, draws, m, factor, flattest)
        # the sds that the first round begins with may be anything
        if i and (np.linalg.norm(factor, axis=1) < COLLAPSED * sds).any():
            has_collapsed = True
        m, moved = nearer(counted, counted.subset, m, Dense(factor), draws.z)
        if moved == math.inf or (moved < NEAR and is_wide):
            break
    return _Rounds(m, factor, moved, has_collapsed)


def mean_field(
    counted: CountedPasses, start: Array, near: MeanField | None = None
) -> MeanField | None:
    """Fit the best Gaussian with independent parameters, if there is one.

    Parameters
    ----------
    counted : CountedPasses
    start : array of shape (d,)
        Where the search for it begins, ...
    near : MeanField, optional
        ... unless one is known that is near.
    """
    draws = standard_draws(counted, start.size)
    if near is None:
        return _mean_field(counted, draws, start)
    found = _minimised(counted, draws, near, np.zeros(1))
    return found or _mean_field(counted, draws, start)


def lower(factor: Array) -> Array:
    """Lower triangular L with LLᵀ the same, by QR, which bears any condition number."""
    upper = np.linalg.qr(factor.T, mode="r")
    return upper.T * np.where(np.diag(upper) < 0, -1.0, 1.0)


def standard_draws(counted: CountedPasses, d: int) -> StandardDraws:
    """Return the draws that fits of d parameters take."""
    half = np.random.default_rng(0).standard_normal((N_PAIRS, d))
    n_draws = 2 * N_PAIRS
    return StandardDraws(np.concatenate([half, -half]), _shares(counted, n_draws, d, n_draws))


def _shares(counted: CountedPasses, n_draws: int, d: int, fewest: int) -> list[Rows]:
    """Rows for each draw: a part of them where there are many for each parameter.

    Each has a part of its own, or those of a pair ±z have one in common. With less than ``fewest``
    parts all draws see all rows.
    """
    subset = counted.rows
    n_parts = n_draws
    while n_parts >= fewest and min(map(len, subset), default=0) < n_parts * ROWS_PER_PARAMETER * d:
        n_parts //= 2
    if n_parts < fewest:
        return [counted.subset] * n_draws
    rng = np.random.default_rng(1)
    parts = [np.array_split(rng.permutation(rows), n_parts) for rows in subset]
    shares = [tuple(map(np.sort, share)) for share in zip(*parts, strict=True)]
    return [shares[i % n_parts] for i in range(n_draws)]


def _mean_field(counted: CountedPasses, draws: StandardDraws, start: Array) -> MeanField | None:
    first = MeanField(mean=start, sds=first_scales(counted, start))
    return _minimised(counted, draws, first, np.log(NARROWER))


def _minimised(
    counted: CountedPasses, draws: StandardDraws, first: MeanField, narrower: Array
) -> MeanField | None:
    """Search by L-BFGS, from scales that are narrower by the first of some logarithms that serves.

    Far out a density may not be finite.
    """
    start, scale = first
    d = start.size
    # this search ends where a fit begins, and may see less of the rows than the fit itself
    shares = _shares(counted, len(draws.z), d, fewest=N_PAIRS)

    def energy(p: Array) -> tuple[float, Array]:
        mu = p[:d]
        rho = p[d:]
        s = np.exp(rho)
        value = 0.0
        slopes = np.zeros(2 * d)
        for draw, rows in zip(draws.z, shares, strict=True):
            logp, grad = counted(start + scale * (mu + s * draw), rows)
            if not (math.isfinite(logp) and np.isfinite(grad).all()):
                return np.inf, slopes
            grad = scale * grad
            value -= logp / len(draws.z)
            slopes -= np.concatenate([grad, grad * s * draw]) / len(draws.z)
        slopes[d:] -= 1.0
        return value - rho.sum(), slopes

    walled = Walled(energy)
    for log_scale in narrower:
        p = np.concatenate([np.zeros(d), np.full(d, log_scale)])
        there = walled(p)[0]
        if there < NO_NUMBER:
            break
    else:
        return None
    optimum = minimize(
        walled,
        p,
        jac=True,
        method="L-BFGS-B",
        bounds=[(None, None)] * d + [(-WIDEST, WIDEST)] * d,
        options={
            "maxiter": 400,
            "maxcor": 20,
            "gtol": 0.0,
            "ftol": max(NATS, NATS_PER_PARAMETER * d) / max(1.0, abs(there)),
        },
    )
    # a flat direction, or one in which it shrinks to a point
    if np.abs(optimum.x[d:]).max() == WIDEST:
        return None
    return MeanField(mean=start + scale * optimum.x[:d], sds=scale * np.exp(optimum.x[d:]))


def first_scales(counted: CountedPasses, start: Array) -> Array:
    """1/√|curvature| of each parameter at the start, (d,).

    At most the prior's own there, or as large as the number itself, or 1: where rows say nothing,
    or the curvature isn't that of a width, it would have no bound.
    """
    rng = np.random.default_rng(2)
    widest = np.maximum(np.maximum(np.abs(start), _prior_sds(counted, start)), 1.0)
    scales = np.ones_like(start)
    product = None
    if counted.has_exact_hessian:  # one pass for all directions
        product = counted.hessian_product([start], [counted.subset])
    # The larger a number's unit, the smaller is its curvature beside those that others have, which
    # leave noise in estimates of it: the second round is in the units that the first has found.
    for _ in range(ROUNDS_OF_SCALES):
        curvatures = _curvatures(counted, start, scales, product, rng)
        found = scales / np.sqrt(np.maximum(np.abs(np.nan_to_num(curvatures)), LEAST))
        scales = np.minimum(found, widest)
    return scales


def _curvatures(
    counted: CountedPasses,
    start: Array,
    scales: Array,
    product: Callable[[Array], Array] | None,
    rng: np.random.Generator,
) -> Array:
    """Diagonal of the Hessian of −log p in units of ``scales``, by products if there are any."""
    if product is None:
        gradient = counted.gradient(counted.subset)
        return hutchinson_diagonal(
            lambda x: scales * gradient(start + scales * x), np.zeros_like(start), rng, step=1e-4
        )
    short = SHORT * scales
    return diagonal_by_signs(lambda v: scales * product(short * v) / SHORT, start.size, rng)


def _prior_sds(counted: CountedPasses, start: Array) -> Array:
    """1/√curvature of the prior of each parameter; 0 where it isn't curved as a peak is."""
    rng = np.random.default_rng(2)
    curvatures = hutchinson_diagonal(counted.prior_gradient, start, rng, step=1e-4)
    is_peak = np.isfinite(curvatures) & (curvatures > 0)
    return np.where(is_peak, 1 / np.sqrt(np.where(is_peak, curvatures, 1.0)), 0.0)


def _rescaled(
    counted: CountedPasses,
    draws: StandardDraws,
    m: Array,
    factor: Array,
    flattest: float = FLAT,
) -> tuple[Array, bool]:
    """Return L with LᵀH̄L = 1, H̄ the mean of the Hessian of −log p over the draws.

    And whether no direction may be wider still.
    """
    hessian = counted.mean_hessian([m + factor @ draw for draw in draws.z], draws.rows, factor)
    if not np.isfinite(hessian).all():
        return factor, True
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    is_wide = not ((values >= 0) & (values < flattest)).any()
    # a negative one says nothing of the width: there the scale stays what it was
    values = np.where(values > flattest, values, np.where(values < 0, 1.0, flattest))
    return lower(factor @ (vectors / np.sqrt(values))), is_wide  # the same root in each round


def nearer(
    counted: CountedPasses, rows: Rows, m: Array, metric: Metric, z: Array
) -> tuple[Array, float]:
    """Newton's step to a mean gradient of zero, and how long it would have been, in sds."""
    gradient = counted.mean_gradient([m + metric.to_theta(draw) for draw in z], rows)
    step = metric.pull_back(gradient)
    moved = np.abs(step).max()
    if not math.isfinite(moved):
        return m, math.inf
    return m + metric.to_theta(step * min(1.0, FAR / max(moved, FAR))), moved
