"""Where the posterior lies and how wide it is: its mode and the curvature there.

The optimiser works on a subset of the rows first and sees all of them in a few passes at the end.
Knows passes over the data and SciPy, no samplers.
"""

import math

from typing import NamedTuple

import numpy as np

from scipy.optimize import minimize

from pymc_sghmc.gradients.metric import Dense, Diagonal, LowRank, Metric
from pymc_sghmc.tuning.curvature import (
    MAX_DENSE,
    CountedPasses,
    curvature,
    fisher_scale,
    positive,
)
from pymc_sghmc.tuning.low_rank import low_rank_mass
from pymc_sghmc.tuning.mass import centre_of_mass, lower

__all__ = ["Centre", "find_centre", "near"]

PATIENCE = 1  # rounds after which the mode is no good centre, and a centre of mass is looked for
ROUNDS = 8  # of curvature and optimiser; two suffice where the posterior is near a Gaussian
WIDEN = 100  # the most by which a new look at the curvature may widen a scale
STEEP = 1.0  # slope of log p over one posterior sd that no mode has
WALL = 5.0  # times the fall that its slope promised: what energy counts for where it is infinite
NEAR = 0.1  # distance of a good centre from the mode, in posterior standard deviations


class Centre(NamedTuple):
    """A point in the bulk of the posterior, and a factor of the covariance there."""

    position: np.ndarray  # θ̂, (d,)
    metric: Metric  # L with LLᵀ near the posterior covariance
    passes: float  # over all data, so far
    is_mode: bool = True  # and the posterior falls off around it as a Gaussian does


def find_centre(
    passes, start, dense: bool | None = None, optimise: bool = True, metric: Metric | None = None
) -> Centre:
    """Climb from ``start`` to the mode and measure the curvature there.

    Parameters
    ----------
    passes : Passes
    start : array of shape (d,)
    dense : bool, optional
        Whether the factor is a matrix; default: up to `MAX_DENSE` unknowns.
    optimise : bool, default True
        ``False`` takes ``start`` itself for the centre.
    metric : Metric, optional
        Of an earlier centre: no scale becomes more than `WIDEN` times theirs. Where
        the curvature isn't positive, away from a mode, it says little of the posterior's width.
    """
    d = start.size
    dense = d <= MAX_DENSE if dense is None else dense
    counted = CountedPasses(passes)
    x = np.array(start, dtype=float)
    widen = np.inf if metric is None else WIDEN
    mass = None
    if optimise and passes.density.centring is not None:  # the mode isn't where effects' mass is
        mass = centre_of_mass(counted, x) if dense else _low_rank_mass(counted, x)
        if mass is not None and (not dense or mass.is_near):
            return Centre(mass.position, mass.metric, counted.passes, mass.is_near)
    if optimise:
        # Where a start is symmetric, as that of a neural network with zero weights, no gradient
        # leads away from it.
        stuck = counted(x, counted.subset)[1] == 0
        x[stuck] += 0.1 * np.random.default_rng(0).standard_normal(stuck.sum())
        scale = Diagonal(np.ones(d)) if metric is None else metric
        x, metric, _ = _climb(counted, x, scale, counted.subset, maxiter=500 if dense else 100)
    if isinstance(metric, LowRank):
        return Centre(x, metric, counted.passes)
    if metric is None or not dense:
        metric = Diagonal(fisher_scale(counted, x))
    if not dense:
        # Draws from this Gaussian have the posterior's energy, d/2 above the mode's, however the
        # unknowns depend on each other.
        if optimise:
            x, _, _ = _climb(counted, x, metric, counted.subset, maxiter=50)
        return Centre(x, metric, counted.passes)
    factor = metric.matrix()
    for i in range(ROUNDS):
        # Curvature at the point itself and, where that doesn't fit, over one sd on either side.
        values, vectors = curvature(counted, x, factor, step=1.0 if i else None)
        above = positive(values, widen)
        factor = factor @ (vectors / np.sqrt(above))
        widen = WIDEN
        moved = 0.0
        if optimise:
            if values[0] < -NEAR:  # a saddle
                x = x + factor @ np.random.default_rng(i).standard_normal(d)
            x, _, moved = _climb(counted, x, Dense(factor), counted.subset, maxiter=100)
        is_mode = values[0] >= above.min() and moved < 1 and _fits(counted, x, factor)
        if is_mode:
            break
        if optimise and i == PATIENCE and mass is None:
            mass = centre_of_mass(counted, np.array(start, dtype=float))
            if mass is not None and mass.is_near:
                return Centre(mass.position, mass.metric, counted.passes)
    if optimise and counted.subset is not None:
        x, _, _ = _climb(counted, x, Dense(factor), None, maxiter=20)
    factor = lower(factor)
    # The gradient is zero at a mode and not on the way down a funnel, where no mode is.
    slope = (
        np.abs(factor.T @ counted(x, counted.subset)[1]).max() if counted.subset is None else 0.0
    )
    is_mode = not optimise or (is_mode and slope < STEEP and _fits(counted, x, factor))
    if mass is not None and not is_mode:  # that is in the bulk, and not on the way to nowhere
        return Centre(mass.position, mass.metric, counted.passes, False)
    return Centre(x, Dense(factor), counted.passes, bool(is_mode))


def near(centre, rng, scale):
    """Draw from the Gaussian at the centre, wider by ``scale``."""
    z = scale * rng.standard_normal(centre.position.size)
    return centre.position + centre.metric.to_theta(z)


def _low_rank_mass(counted, start):
    """Fit a Gaussian to thousands of effects, from where the fit of λ ended if there was one."""
    density = counted.over.density
    if (fitted := density.centring.fitted) is not None:
        start = density.from_model(fitted).astype(float)
    return low_rank_mass(counted, start, list(density.centring.places.values()))


def _climb(counted, x, metric, subset, maxiter):
    """L-BFGS in the coordinates of ``metric``: end point, scales it met, how far it went in them."""
    best = np.inf, np.zeros_like(x), np.zeros_like(x)  # least energy, its gradient, and where

    def energy(phi):
        nonlocal best
        logp, grad = counted(x + metric.to_theta(phi), subset)
        if not (math.isfinite(logp) and np.isfinite(grad).all()):
            # Sends the line search back, some thirtyfold. At a wall much higher it gives up.
            rise = WALL * abs(best[1] @ (phi - best[2]))
            return (best[0] + rise if 0 < rise < np.inf else 1e100), np.zeros_like(phi)
        slope = -_pulled_back(metric, grad)
        if -logp < best[0]:
            best = -logp, slope, phi.copy()
        return -logp, slope

    found = minimize(
        energy,
        np.zeros_like(x),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": maxiter,
            "gtol": NEAR / 2 if isinstance(metric, Dense) else 0.0,  # in posterior sds
            "ftol": 1e-4 / max(1.0, abs(energy(np.zeros_like(x))[0])),  # in nats a step
        },
    )
    scale = None
    if isinstance(metric, Diagonal) and x.size <= MAX_DENSE:
        scale = Diagonal(metric.scales * np.sqrt(np.diag(found.hess_inv.todense())))
    return x + metric.to_theta(found.x), scale, np.abs(found.x).max()


def _pulled_back(metric, gradient):
    """Lᵀg. By a view of Lᵀ, whose product is rounded in another order than that by a copy.

    Where a search ends, and with it every draw for a seed, depends on the last bits.
    """
    return metric.factor.T @ gradient if isinstance(metric, Dense) else metric.pull_back(gradient)


def _fits(counted, x, factor) -> bool:
    """Whether log p falls by d/2 from ``x`` to draws from the Gaussian, within a factor of 1.5."""
    z = np.random.default_rng(0).standard_normal((10, x.size))
    here, _ = counted(x, counted.subset)
    # on either side: the mode of all rows isn't quite that of a subset
    falls = [here - counted(x + factor @ step, counted.subset)[0] for step in (*z, *-z)]
    return bool(np.mean(falls) < 1.5 * np.mean(np.square(z)) * x.size / 2)
