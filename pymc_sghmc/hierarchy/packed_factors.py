"""Coordinates of the Cholesky factor of a covariance, packed as `LKJCholeskyCov` has it.

PyMC samples c_kj and log c_kk of each row k. Where c_kk is small, so is c_kj: a funnel. In log τ_k,
τ_k the length of the row, and x_kj with c_kj = c_kk sinh x_kj there is none. Of two coefficients,
tanh x is the correlation. Knows graphs, no effects and no data.
"""

import math

from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc.model import Model

from pymc_sghmc.models.unknowns import Unknowns

__all__ = ["PackedFactor", "packed_factors"]


class Unpacked(NamedTuple):
    """A packed factor in its coordinates."""

    value: Any  # the model's variable
    log_jacobian: Any
    back: Any  # coordinates as a graph of the model's variable


class PackedFactor(NamedTuple):
    """A packed factor among the model's variables."""

    value: pt.TensorVariable
    n: int  # rows

    def written(self, coordinates: pt.TensorVariable, whole: Any) -> Unpacked:
        """Write it in its coordinates, which are its own entries where ``whole`` is 0, not 1."""
        row, column = np.tril_indices(self.n)
        below = np.flatnonzero(row != column)
        diagonal = np.flatnonzero(row == column)
        row_of_below = row[below]
        in_row = (np.arange(self.n)[:, None] == row_of_below).astype(coordinates.dtype)

        def log_lengths(ratios: Any) -> Any:
            """Return log(τ/c) of each row, by its entries in units of the last, c."""
            return 0.5 * pt.log1p((in_row * pt.square(ratios)).sum(axis=1))

        def joined(of_below: Any, of_diagonal: Any) -> Any:
            places = np.argsort(np.concatenate([below, diagonal]))
            return pt.concatenate([of_below, of_diagonal])[places]

        x = coordinates[below]
        ratios = pt.sinh(whole * x)
        log_c = coordinates[diagonal] - whole * log_lengths(ratios)
        c = pt.exp(log_c)[row_of_below]
        slopes = whole * c * pt.cosh(whole * x) + (1 - whole)
        own = self.value[below]
        own_ratios = own / pt.exp(self.value[diagonal])[row_of_below]
        return Unpacked(
            value=joined(whole * c * ratios + (1 - whole) * x, log_c),
            log_jacobian=pt.log(slopes).sum(),
            back=joined(
                whole * pt.arcsinh(own_ratios) + (1 - whole) * own,
                self.value[diagonal] + whole * log_lengths(own_ratios),
            ),
        )


def packed_factors(model: Model, unknowns: Unknowns) -> list[PackedFactor]:
    """Find the packed factors among the unknowns of a step."""
    found = []
    packed = pm.distributions.transforms.CholeskyCovPacked
    for rv in model.free_RVs:
        value = model.rvs_to_values[rv]
        if value not in unknowns.variables or value.type.ndim != 1:
            continue
        if isinstance(model.rvs_to_transforms[rv], packed):
            [size] = unknowns.shapes[unknowns.variables.index(value)]
            n = (math.isqrt(8 * size + 1) - 1) // 2
            found += [PackedFactor(value, n)] if n > 1 else []
    return found
