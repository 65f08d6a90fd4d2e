"""Gaussian variational fit of thousands of parameters: a scale for each, and a few directions.

The posterior of many effects, each informed by its own rows, and few parameters that all rows share
differs from independent parameters in about two directions for each of the shared ones. Knows
passes over the data and SciPy, no samplers.
"""

from collections.abc import Callable

import numpy as np

from scipy.sparse.linalg import ArpackError, eigsh

from pymc_sghmc.gradients.metric import Array, Diagonal, LowRank, Metric
from pymc_sghmc.gradients.rewrite import MeanField
from pymc_sghmc.tuning.curvature import CountedPasses, first_vector, operator_of
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.variational_fit import (
    FLAT,
    NEAR,
    StandardDraws,
    mean_field,
    nearer,
    standard_draws,
)

__all__ = ["FEW", "low_rank_fit"]

N_DIRECTIONS = 12  # of the least and of the largest curvature
ROUNDS = 3
ASTRAY = 1.0  # sds that the last step may be long where the search has ended
FEW = 64  # entries of a parameter whose curvatures are taken one by one


def low_rank_fit(
    counted: CountedPasses, start: Array, blocks: list[slice], near: MeanField | None = None
) -> GaussianFit | None:
    """Fit a Gaussian to the posterior, from ``start``; None where there is none.

    Parameters
    ----------
    counted : CountedPasses
    start : array of shape (d,)
    blocks : list of slice
        Of parameters whose entries hardly depend on each other, such as a group's effects.
    near : MeanField, optional
        A Gaussian near the posterior.
    """
    independent = mean_field(counted, start, near)
    if independent is None:
        return None
    m = independent.mean
    metric: Metric = Diagonal(independent.sds)
    draws = standard_draws(counted, start.size)
    for _ in range(ROUNDS):
        rescaled = _rescaled(counted, draws, m, metric, blocks)
        if rescaled is None:
            return GaussianFit(
                mean=independent.mean,
                metric=Diagonal(independent.sds),
                is_mode=False,
                passes=counted.passes,
            )
        metric = rescaled
        m, moved = nearer(counted, counted.subset, m, metric, draws.z)
        if not NEAR <= moved < np.inf:
            break
    if counted.subset is not None:
        m, moved = nearer(counted, None, m, metric, draws.z)
    return GaussianFit(mean=m, metric=metric, is_mode=bool(moved < ASTRAY), passes=counted.passes)


def _rescaled(
    counted: CountedPasses,
    draws: StandardDraws,
    m: Array,
    metric: Metric,
    blocks: list[slice],
) -> LowRank | None:
    """L with LᵀH̄L near 1, H̄ the mean of the Hessian of −log p over the draws."""
    d = m.size
    points = [m + metric.to_theta(draw) for draw in draws.z]
    product = counted.hessian_product(points, draws.rows)
    old = metric.diagonal().scales
    scales = old / np.sqrt(_diagonal(product, old, blocks))
    inside = operator_of(lambda x: scales * product(scales * x), d)
    k = min(2 * N_DIRECTIONS, d // 4)
    try:
        values, vectors = eigsh(inside, k=k, which="BE", tol=0.05, ncv=4 * k, **first_vector(d))
    except (ArpackError, FloatingPointError):
        return None
    if not np.isfinite(values).all():
        return None
    return LowRank.of(scales, vectors.T, np.maximum(np.abs(values), FLAT**2) ** -0.5 - 1)


def _diagonal(product: Callable[[Array], Array], scales: Array, blocks: list[slice]) -> Array:
    """Diagonal of the Hessian in units of ``scales``, near 1 as a rule."""
    diagonal = np.ones_like(scales)
    rng = np.random.default_rng(0)
    is_single = np.ones(scales.size, dtype=bool)
    for block in blocks:
        is_single[block] = False
        shift = np.zeros_like(scales)
        # with random signs the dependence between entries cancels, if there is any (Hutchinson)
        signs = rng.choice([-1.0, 1.0], size=block.stop - block.start)
        shift[block] = scales[block] * signs
        diagonal[block] = signs * (scales * product(shift))[block]
    few = np.flatnonzero(is_single)
    if few.size <= FEW:
        for i in few:
            shift = np.zeros_like(scales)
            shift[i] = scales[i]
            diagonal[i] = scales[i] * product(shift)[i]
    return np.maximum(np.nan_to_num(np.where(diagonal > 0, diagonal, 1.0), nan=1.0), FLAT)
