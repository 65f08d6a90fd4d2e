"""Coordinates of the Cholesky factor of a covariance, packed as `LKJCholeskyCov` has it.

PyMC samples c_kj and log c_kk of each row k. Where c_kk is small, so is c_kj: a funnel. In log τ_k,
τ_k the length of the row, and x_kj with c_kj = c_kk sinh x_kj there is none. Of two coefficients,
tanh x is the correlation. Knows graphs, no effects and no data.
"""

import math

from collections.abc import Sequence
from typing import Any, NamedTuple

import pymc as pm
import pytensor.tensor as pt

from pymc.model import Model

from pymc_sghmc.models.unknowns import Unknowns

__all__ = ["PackedFactor", "packed_factors"]

MOST_ROWS = 4  # each entry has a graph of its own


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
        entries = []
        back = []
        log_jacobian: Any = 0.0
        for k in range(self.n):
            first = k * (k + 1) // 2
            diagonal = first + k
            own = [coordinates[first + j] for j in range(k)]
            ratios = [pt.sinh(whole * x) for x in own]
            log_c = coordinates[diagonal] - whole * _log_length(ratios)
            for x, ratio in zip(own, ratios, strict=True):
                entries.append(whole * pt.exp(log_c) * ratio + (1 - whole) * x)
                slope = whole * pt.exp(log_c) * pt.cosh(whole * x) + (1 - whole)
                log_jacobian = log_jacobian + pt.log(slope)
            entries.append(log_c)
            c = pt.exp(self.value[diagonal])
            own = [self.value[first + j] for j in range(k)]
            back += [whole * pt.arcsinh(x / c) + (1 - whole) * x for x in own]
            back.append(self.value[diagonal] + whole * _log_length([x / c for x in own]))
        return Unpacked(pt.stack(entries), log_jacobian, pt.stack(back))


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
            found += [PackedFactor(value, n)] if n <= MOST_ROWS else []
    return found


def _log_length(ratios: Sequence[Any]) -> Any:
    """Return log(τ/c) of a row, by its entries in units of the last, c."""
    if not ratios:
        return 0.0
    return 0.5 * pt.log1p(sum(pt.square(ratio) for ratio in ratios))
