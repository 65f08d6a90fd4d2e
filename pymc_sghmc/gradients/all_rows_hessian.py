"""The Hessian of a log-density given all rows, as exact as can be, from one read of them.

Where rows see linear predictors of the parameters, J and C of a block of rows give its share JᵀCJ,
and neither is kept. Elsewhere gradients at pairs of positions are differenced. Knows densities and
passes over rows; no fit and no sampler.
"""

import numpy as np

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.passes import Passes
from pymc_sghmc.gradients.row_inputs import ChunkInputs, Rows, in_parts, with_inputs
from pymc_sghmc.gradients.second_derivatives import (
    BLOCK_ROWS,
    SecondDerivatives,
    second_derivatives,
)
from pymc_sghmc.protocols import Array
from pymc_sghmc.threads import in_order

__all__ = ["hessian_of_all_rows", "hessian_times"]

STEP = 1e-3  # of differences of gradients on either side, in standard deviations
SINGLE_STEP = 3e-2  # of gradients in single precision


def hessian_of_all_rows(passes: Passes, position: Array, factor: Array) -> Array:
    """Return the Hessian of −log p given all rows, (d, d).

    Parameters
    ----------
    passes : Passes
        Over a `LogDensity` with its graph, or one whose gradients are differenced.
    position : array of shape (d,)
    factor : array of shape (d, d)
        Its columns are about as long as the posterior is wide: along them differences are taken.
    """
    density = passes.density
    if isinstance(density, LogDensity) and density.dtype == np.float64:
        second = second_derivatives(density)
        of_likelihood = (
            None if second is None else _of_likelihood(passes, density, second, position)
        )
        if of_likelihood is not None:
            return of_likelihood + _by_differences(passes, position, factor, of_prior=True)
    return _by_differences(passes, position, factor, of_prior=False)


def _of_likelihood(
    passes: Passes, density: LogDensity, second: SecondDerivatives, position: Array
) -> Array | None:
    """Return the Hessian of −log-likelihood; None where J can't be found for some rows."""
    theta = second.coordinates.at(position, density, passes.data)
    total: Array = passes.data.map_sum(_summed, density, second, theta)
    return total if np.isfinite(total).all() else None


def _summed(data: Rows, density: LogDensity, second: SecondDerivatives, theta: Array) -> Array:
    """Return the Hessian of −log-likelihood of some rows; NaN where J can't be found."""

    def of_block(block: ChunkInputs) -> Array:
        chunk, inputs = block
        k = chunk.group
        J = second.jacobian(density, k, inputs)
        if J is None:
            return np.full((density.d, density.d), np.nan)
        [zeta] = J.zeta(theta[None])
        hessian = J.hessian(-chunk.weight * second.second(zeta, k, inputs))
        return np.asarray(hessian.todense() if J.is_sparse else hessian)

    total = np.zeros((density.d, density.d))
    blocks = with_inputs(density, data, in_parts(data.chunks(), BLOCK_ROWS))
    for hessian in in_order(of_block, blocks, data.threads):
        total += hessian
        if not np.isfinite(total).all():
            break
    return total


def _by_differences(passes: Passes, position: Array, factor: Array, of_prior: bool) -> Array:
    """Return the Hessian of −log p, or of −log prior, by differences of gradients."""
    along = hessian_times(passes, position, factor, of_prior)
    hessian = np.linalg.solve(factor.T, along.T)
    return (hessian + hessian.T) / 2


def hessian_times(passes: Passes, position: Array, factor: Array, of_prior: bool) -> Array:
    """Return HL, (d, d), H the Hessian of −log p or of −log prior, by differences of gradients.

    Parameters
    ----------
    passes : Passes
    position : array of shape (d,)
    factor : array of shape (d, d)
        L, whose columns are about as long as the posterior is wide.
    of_prior : bool
        Whether rows are left out.
    """
    density = passes.density
    step = STEP if density.dtype == np.float64 else SINGLE_STEP
    pairs = [position + side * step * column for column in factor.T for side in (-1, 1)]
    positions = [pair.astype(density.dtype) for pair in pairs]
    if of_prior:
        gradients = np.array([passes.prior(there)[1] for there in positions], dtype=float)
    else:
        gradients = passes.gradients_at(positions, lambda i: None)
    return (gradients[::2] - gradients[1::2]).T / (2 * step)
