"""How far posterior means may be off because minibatches are drawn from a pool of rows.

What a minibatch of n rows tells of all rows has the variance V₁/n, V₁ that of one row. What all of
a pool's M rows tell is off by V₁/M, in each step alike. Where the gradient is off by an error, the
posterior mean is off by the error times the posterior variance. Knows gradients and fits.
"""

from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.gradients.metric import Array, Metric
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

__all__ = ["PoolReport", "pool_report"]


class PoolReport(NamedTuple):
    """A pool, and what it costs."""

    size: int  # its rows
    n_rows: int  # of which it was drawn
    error: float  # standard error of the worst posterior mean, in posterior standard deviations
    serves: bool  # whether that is small enough


def pool_report(
    gradient: Any, noise: Array, rows: int | None, fit: GaussianFit, metric: Metric
) -> PoolReport | None:
    """Return what drawing rows from a pool costs; None where they aren't.

    Parameters
    ----------
    gradient : MinibatchGradient, ControlVariates or SecondOrder
    noise : array of shape (d,)
        Diagonal of V in φ of minibatches.
    rows : int, optional
        In these; default: as many as were given.
    fit : GaussianFit
    metric : Metric
        φ.
    """
    data = gradient.data
    if data.pool is None:
        return None
    [size] = gradient.order.sizes
    n = data.batch_sizes[0] if rows is None else rows
    ones = np.ones(noise.size)
    sds = metric.diagonal().from_theta(fit.metric.diagonal().to_theta(ones))  # of the fit, in φ
    error = float(np.sqrt(np.max(noise * np.square(sds)) * n / size))
    serves = error <= data.pool.error
    return PoolReport(size=size, n_rows=data.n_data_rows, error=error, serves=serves)
