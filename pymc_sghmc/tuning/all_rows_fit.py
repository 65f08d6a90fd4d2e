"""A Gaussian fit with the curvature of all rows, where that of a subset is far from it.

The fit's covariance comes from some of the rows. A few rows that tell more of a parameter than all
others may not be among them. Second-order control variates know the curvature of all rows. Knows
gradients and fits, no samplers.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from pymc_sghmc.gradients.all_rows_hessian import hessian_times
from pymc_sghmc.gradients.metric import Dense
from pymc_sghmc.gradients.second_order import SecondOrder
from pymc_sghmc.tuning.curvature import CountedPasses
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.posterior_fit import STEEP, falls_as_fitted
from pymc_sghmc.tuning.variational_fit import lower

__all__ = ["fit_of_all_rows"]

OFF = 2.0  # times or more, in some direction, that a variance of the fit is wrong


def fit_of_all_rows(second: Any, fit: GaussianFit) -> GaussianFit | None:
    """Return a fit with another covariance; None where that of the fit is about right.

    Parameters
    ----------
    second : SecondOrder
        With its centre at the fit's mean. Of other gradients nothing is known.
    fit : GaussianFit
    """
    if not isinstance(second, SecondOrder) or second.has_sparse_hessian:
        return None
    if not (isinstance(fit.metric, Dense) and second.coordinates.are_own):
        return None
    factor = fit.metric.factor
    [hessian] = second.anchor.hessian
    with np.errstate(all="ignore"):
        of_prior = hessian_times(second.passes, fit.mean, factor, of_prior=True)
    curvature = factor.T @ (of_prior - hessian @ factor)
    if not np.isfinite(curvature).all():
        return None
    values, vectors = np.linalg.eigh((curvature + curvature.T) / 2)
    if values[0] <= 0 or (values[0] >= 1 / OFF and values[-1] <= OFF):
        return None
    better = lower(factor @ (vectors / np.sqrt(values)))
    is_mode = fit.is_mode
    if not is_mode:  # as far as the subset's curvature tells, which is far from that of all rows
        passes = second.passes
        slope = second.anchor.gradient + passes.prior(fit.mean.astype(second.density.dtype))[1]
        if not np.abs(better.T @ slope).max() < STEEP:
            return None
        is_mode = falls_as_fitted(CountedPasses(passes), fit.mean, better)
    return replace(fit, metric=Dense(better), is_mode=is_mode)
