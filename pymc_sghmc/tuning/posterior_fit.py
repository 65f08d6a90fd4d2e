"""A Gaussian fit to the posterior: its mode and the curvature there, or a variational fit.

The optimiser works on a subset of the rows first and sees all of them in a few passes at the end.
Knows passes over the data and SciPy, no samplers.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from scipy.optimize import minimize

from pymc_sghmc.gradients.metric import Array, Dense, Diagonal, LowRank, Metric
from pymc_sghmc.tuning.curvature import (
    MAX_DENSE,
    CountedPasses,
    curvature,
    depends_on_few,
    fisher_scale,
    positive,
)
from pymc_sghmc.tuning.gaussian_draws import evidence_bound, excess_forces, scaled_by_draws
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.low_rank_fit import FEW, low_rank_fit
from pymc_sghmc.tuning.variational_fit import (
    Walled,
    fit_around,
    lower,
    variational_fit,
)

__all__ = ["STEEP", "falls_as_fitted", "fit_posterior"]

PATIENCE = 1  # rounds after which the mode is no good mean, and a variational fit is made
ROUNDS = 8  # of curvature and optimiser; two suffice where the posterior is near a Gaussian
FEW_ROUNDS = 3  # where a variational fit with effects failed: the mode seldom serves there
WIDEN = 100  # the most by which a new look at the curvature may widen a scale
STEEP = 1.0  # slope of log p over one posterior sd that no mode has
MOST_STEPS = 4  # of Newton's method on all rows
MOST_SHRUNK = 0.2  # of the step before, with which steps are known to lead to the mode
NEAR = 0.1  # distance of a good mean from the mode, in posterior standard deviations
FAR_FROM_SEARCH = 2.0  # r.m.s. sds from where it was seen how log p falls; farther it is seen anew
MOST_EXCESS = 0.5  # of the fall that a Gaussian promises
MOST_ALONE = 5.0  # nats beyond what it promises to a single draw, of few parameters
DRIFT = 1.5  # sds by which a Gaussian's draws would go, on average, to where there is no force
ROUGH = 0.5  # r.m.s. of the force that a Gaussian doesn't have, in sds, that asks for a look
FAR = 3.0  # sds, where that look is
MOST_ELSEWHERE = 10.0  # nats of evidence by which another Gaussian may be better than a mode
LEAST_FALL = 0.2  # of the fall that a Gaussian promises there


def fit_posterior(
    passes: Any,
    start: Array,
    dense: bool | None = None,
    optimise: bool = True,
    metric: Metric | None = None,
    is_mode: bool = True,
) -> GaussianFit:
    """Climb from ``start`` to the mode and measure the curvature there.

    Parameters
    ----------
    passes : Passes
    start : array of shape (d,)
    dense : bool, optional
        Whether the metric is a matrix; default: up to `MAX_DENSE` parameters.
    optimise : bool, default True
        ``False`` takes ``start`` itself for the mean.
    metric : Metric, optional
        Of an earlier fit: no scale becomes more than `WIDEN` times its own. Where the curvature
        isn't positive, away from a mode, it says little of the posterior's width.
    is_mode : bool, default True
        Whether that fit was one. Scales of thousands of parameters are kept, and with them this.
    """
    dense = start.size <= MAX_DENSE if dense is None else dense
    has_effects = bool(passes.density.group_coefficients)
    if passes.is_sparse is None and not (dense or has_effects):
        passes.is_sparse = depends_on_few(passes, start)
    counted = CountedPasses(passes)
    x = np.array(start, dtype=float)
    widen = np.inf if metric is None else WIDEN
    variational = None
    if optimise and (has_effects or passes.is_sparse):  # the mode isn't where effects' mass is
        variational = _variational(counted, x, dense)
        if variational is not None and (not dense or variational.is_mode):
            return variational
    if has_effects and not optimise and isinstance(metric, Dense) and counted.has_exact_hessian:
        return fit_around(counted, x, metric)
    if optimise:
        x, metric = _climb_from_start(counted, x, metric, maxiter=500 if dense else 100)
    if isinstance(metric, LowRank):
        return GaussianFit(mean=x, metric=metric, is_mode=is_mode, passes=counted.passes)
    if metric is None or not dense:
        metric = Diagonal(fisher_scale(counted, x))
    if dense:
        search = _DenseSearch(counted, start, optimise, variational)
        return search(x, metric.matrix(), widen)
    # Draws from this Gaussian have the posterior's energy, d/2 above the mode's, however the
    # parameters depend on each other.
    if optimise:
        x = _climb(counted, x, metric, counted.subset, maxiter=50).end
    return GaussianFit(mean=x, metric=metric, is_mode=True, passes=counted.passes)


class _DenseSearch:
    """Rounds of curvature and optimiser, until the posterior is like the Gaussian at the mode."""

    def __init__(
        self,
        counted: CountedPasses,
        start: Array,
        optimise: bool,
        variational: GaussianFit | None,
    ) -> None:
        self.counted = counted
        self.start = start
        self.optimise = optimise
        self.variational = variational
        self.rounds = ROUNDS if variational is None else FEW_ROUNDS

    def __call__(self, x: Array, factor: Array, widen: float) -> GaussianFit:
        counted = self.counted
        for i in range(self.rounds):
            x, factor, is_mode = self._round(i, x, factor, widen)
            widen = WIDEN
            if is_mode:
                break
            if self.optimise and i == PATIENCE and self.variational is None:
                self.variational = variational_fit(counted, np.array(self.start, dtype=float))
                if self.variational is not None and self.variational.is_mode:
                    return self.variational
        if not is_mode:
            factor = self._by_draws(x, factor)
        searched = x
        if self.optimise and counted.subset is not None:
            x = _at_mode_of_all(counted, x, Dense(factor))
        factor = lower(factor)
        # The gradient is zero at a mode and not on the way down a funnel, where no mode is.
        slope = 0.0
        if counted.subset is None:
            slope = np.abs(factor.T @ counted(x, counted.subset)[1]).max()
        moved = np.sqrt(np.square(Dense(factor).from_theta(x - searched)).mean())
        if is_mode and not moved < FAR_FROM_SEARCH:  # elsewhere than where the search ended
            is_mode = falls_as_fitted(counted, x, factor)
        is_mode = not self.optimise or (is_mode and slope < STEEP)
        fit = GaussianFit(mean=x, metric=Dense(factor), is_mode=bool(is_mode), passes=0.0)
        if self.variational is not None:
            fit = self._better_of_both(self.variational, fit)
        return replace(fit, passes=counted.passes)

    def _better_of_both(self, variational: GaussianFit, fit: GaussianFit) -> GaussianFit:
        """Return the variational fit, which is none as a mode is, where it holds far more.

        Where no mode was found its mean is in the bulk, as a rule, and not on the way to nowhere.
        And a joint mode may hold next to nothing of the posterior, such as one where effects of
        small groups say what those of the large ones should.
        """
        bound, of_fit = (
            evidence_bound(self.counted, each, by_all=fit.is_mode) for each in (variational, fit)
        )
        gain = bound - of_fit
        is_better = gain > MOST_ELSEWHERE if fit.is_mode else not gain < 0
        return replace(variational, is_mode=False) if is_better else fit

    def _by_draws(self, x: Array, factor: Array) -> Array:
        """Find a factor at a point where rounds found none: curvatures lead from one to another.

        That of a wall leads to one so narrow that no draw reaches the wall, and what is flat there
        to one that is wide. The directions are those of the curvature at the point alone.
        """
        values, vectors = curvature(self.counted, x, factor, step=None)
        at_point = factor @ (vectors / np.sqrt(positive(values, WIDEN)))
        return scaled_by_draws(self.counted, x, lower(at_point))

    def _round(self, i: int, x: Array, factor: Array, widen: float) -> tuple[Array, Array, bool]:
        """Position, factor of the covariance, and whether the search may end there."""
        counted = self.counted
        # Curvature at the point itself and, where that doesn't fit, over one sd on either side. An
        # exact one is so cheap that a point nearer to the mode has its own.
        is_at_point = i < (2 if counted.has_exact_hessian else 1)
        values, vectors = curvature(counted, x, factor, step=None if is_at_point else 1.0)
        above = positive(values, widen)
        factor = factor @ (vectors / np.sqrt(above))
        moved = 0.0
        if self.optimise:
            if values[0] < -NEAR:  # a saddle
                x = x + factor @ np.random.default_rng(i).standard_normal(x.size)
            climb = _climb(counted, x, Dense(factor), counted.subset, maxiter=100)
            x = climb.end
            moved = climb.moved
        is_mode = values[0] >= above.min() and moved < 1 and falls_as_fitted(counted, x, factor)
        return x, factor, is_mode


def _climb_from_start(
    counted: CountedPasses, x: Array, metric: Metric | None, maxiter: int
) -> tuple[Array, Metric | None]:
    """Climb on the subset; return the end point and the scales that the optimiser met."""
    # Where a start is symmetric, as that of a neural network with zero weights, no gradient leads
    # away from it.
    stuck = counted(x, counted.subset)[1] == 0
    x[stuck] += 0.1 * np.random.default_rng(0).standard_normal(stuck.sum())
    scales = Diagonal(np.ones(x.size)) if metric is None else metric
    climb = _climb(counted, x, scales, counted.subset, maxiter=maxiter)
    return climb.end, climb.scales


def _variational(counted: CountedPasses, start: Array, dense: bool) -> GaussianFit | None:
    """Fit a Gaussian to effects of groups, from where the fit of λ ended if there was one.

    Or to other unknowns that depend on few others each, such as traits of persons.
    """
    density = counted.over.density
    near = None
    for rewrite in density.rewrites:
        if (known := rewrite.taken_fit(start)) is not None:
            return known
        near = rewrite.independent or near
    if dense:
        return variational_fit(counted, start, near)
    blocks = list(density.group_coefficients.values())
    if not blocks:
        blocks = [place for place in density.vectors if place.stop - place.start > FEW]
    return low_rank_fit(counted, start, blocks, near)


def _at_mode_of_all(counted: CountedPasses, x: Array, metric: Metric) -> Array:
    """Go from the mode of a subset to that of all rows.

    Newton's steps with the subset's curvature, each of which leaves a share of the way that is as
    small as the two curvatures differ. Two steps tell that share, and with it whether a third would
    be worth reading all rows. Where they don't lead there, L-BFGS does.
    """
    level, grad = counted(x, None)
    there = x
    length = np.inf
    for _ in range(MOST_STEPS):
        step = metric.pull_back(grad)
        last, length = length, float(np.abs(step).max())
        if not length >= NEAR / 2:
            return there
        there = there + metric.to_theta(step)
        if length < MOST_SHRUNK * last < np.inf and length**2 / last < NEAR / 4:
            return there
        before, (level, grad) = level, counted(there, None)
        if not (level >= before and np.isfinite(grad).all()):
            break
    return _climb(counted, x, metric, None, maxiter=20).end


class _Climb(NamedTuple):
    """What a search for the mode came to."""

    end: Array
    scales: Diagonal | None  # that the optimiser met, where it looked for them
    moved: float  # in the coordinates of the search, at most


def _climb(counted: CountedPasses, x: Array, metric: Metric, subset: Any, maxiter: int) -> _Climb:
    """Climb by L-BFGS in the coordinates of ``metric``."""

    def energy(phi: Array) -> tuple[float, Array]:
        logp, grad = counted(x + metric.to_theta(phi), subset)
        return -logp, -_pulled_back(metric, grad)

    walled = Walled(energy)
    start = np.zeros_like(x)
    optimum = minimize(
        walled,
        start,
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": maxiter,
            "gtol": NEAR / 2 if isinstance(metric, Dense) else 0.0,  # in posterior sds
            "ftol": 1e-4 / max(1.0, abs(walled(start)[0])),  # in nats a step
        },
    )
    scales = None
    if isinstance(metric, Diagonal) and x.size <= MAX_DENSE:
        scales = Diagonal(metric.scales * np.sqrt(np.diag(optimum.hess_inv.todense())))
    end = x + metric.to_theta(optimum.x)
    return _Climb(end=end, scales=scales, moved=np.abs(optimum.x).max())


def _pulled_back(metric: Metric, gradient: Array) -> Array:
    """Lᵀg. By a view of Lᵀ, whose product is rounded in another order than that by a copy.

    Where a search ends, and with it every draw for a seed, depends on the last bits.
    """
    return metric.factor.T @ gradient if isinstance(metric, Dense) else metric.pull_back(gradient)


def falls_as_fitted(counted: CountedPasses, x: Array, factor: Array) -> bool:
    """Whether log p falls from ``x`` to draws from the Gaussian by as much as the Gaussian's does.

    By d/2 on average, within a factor of 1.5. And by about as much to each: a wall along a single
    one of many directions is a small part of the average. A Gaussian that was narrowed until few
    draws reach the wall has the right fall; but away from the wall log p hardly falls at all.

    Nor may draws be driven off all together, as those around a joint mode are by a scale of
    hundreds of parameters: the fall of so many hides it.
    """
    z = np.random.default_rng(0).standard_normal((10, x.size))
    draws = np.concatenate([z, -z])
    here, slope = counted(x, counted.subset)
    there = [counted(x + factor @ step, counted.subset) for step in draws]
    falls = [here - level for level, _ in there]
    # on either side, and the slope left out: the mode of all rows isn't quite that of a subset
    of_pairs = np.reshape(falls, (2, -1)).mean(axis=0)
    promised = np.square(z).sum(axis=1) / 2
    is_alike = of_pairs - promised < np.maximum(MOST_ALONE, MOST_EXCESS * promised)
    if not (of_pairs.mean() < (1 + MOST_EXCESS) * promised.mean() and is_alike.all()):
        return False
    forces = excess_forces(Dense(factor), [gradient - slope for _, gradient in there], draws)
    if np.abs(forces.mean(axis=0)).max() > DRIFT:
        return False
    rough = np.sqrt(np.square(forces).mean(axis=0))
    ways = [sign * FAR * factor[:, i] for i in np.flatnonzero(rough >= ROUGH) for sign in (1, -1)]
    far_falls = (here + slope @ way - counted(x + way, counted.subset)[0] for way in ways)
    return all(fall > LEAST_FALL * FAR**2 / 2 for fall in far_falls)
