"""What second-order control variates take from the graph of a row, beside `row_terms`.

Where every ζ of a row has the same Jacobian J everywhere, a quadratic function of ζ that is known
of each row, q(ζ) = a + b·ζ + ½ ζ·Cζ, is one of θ, too: its sum over all rows needs no row
afterwards. A minibatch then only has to tell what is left, ℓ − q, whose gradient is Jᵀ(c − b − Cζ).

Knows graphs of row-wise log-likelihoods; knows no model, no data and no sampler.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pytensor.gradient import NullTypeGradError
from pytensor.graph.null_type import NullType
from pytensor.graph.replace import clone_replace
from pytensor.graph.utils import MethodNotDefined
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.compat import ancestors
from pymc_sghmc.models.row_terms import (
    ByZeta,
    Cut,
    by_zeta,
    row_cuts,
    summed_if_shared,
)
from pymc_sghmc.protocols import Array

__all__ = ["ByNumbers", "Quadratics", "RowSlopes", "row_slopes"]

MAX_NUMBERS = 12  # in ζ of a row: 91 in its quadratic function


class Quadratics:
    """Where a, b and C lie in what is remembered of each row of ``m`` numbers ζ.

    Parameters
    ----------
    m : int
    """

    def __init__(self, m: int) -> None:
        self.m = m
        self.upper = np.triu_indices(m)
        self.size = 1 + m + len(self.upper[0])
        self.place = np.zeros((m, m), dtype=int)
        self.place[self.upper] = 1 + m + np.arange(len(self.upper[0]))
        self.place = np.maximum(self.place, self.place.T)

    def symmetric(self, upper: Array) -> Array:
        """Matrices (n, m, m) from their upper triangles, (n, m(m+1)/2)."""
        return upper[:, self.place - 1 - self.m]

    def table(self, a: Array, b: Array, C: Array) -> Array:
        """Return what is remembered, (n, size)."""
        return np.concatenate([a[:, None], b, C[:, *self.upper]], axis=1)

    def linear(self, table: TensorVariable, zeta: Sequence[TensorVariable]) -> list[TensorVariable]:
        """Return b + Cζ of each row, one number at a time: lists of symbolic vectors."""
        return [
            table[:, 1 + i] + sum(table[:, self.place[i, j]] * zeta[j] for j in range(self.m))
            for i in range(self.m)
        ]

    def at_one(
        self, table: TensorVariable, zeta: TensorVariable
    ) -> tuple[TensorVariable, TensorVariable]:
        """q(ζ) and b + Cζ where a, b and C are those of a single row, (size,), and ζ, (m,)."""
        b = table[1 : 1 + self.m]
        linear = b + pt.dot(table[self.place], zeta)
        return table[0] + 0.5 * pt.dot(b + linear, zeta), linear

    def values(
        self,
        table: TensorVariable,
        zeta: Sequence[TensorVariable],
        linear: Sequence[TensorVariable],
    ) -> TensorVariable:
        """q(ζ) = a + ½ζ·(b + (b + Cζ)) of each row."""
        halves = [(table[:, 1 + i] + linear[i]) * zeta[i] for i in range(self.m)]
        return table[:, 0] + 0.5 * sum(halves)


class ByNumbers(NamedTuple):
    """The log-likelihood of rows and its derivatives, by ζ and not by the unknowns."""

    zeta: TensorVariable  # an input, (n, m)
    log_likelihood: TensorVariable  # (n,)
    c: TensorVariable  # (n, m): ∂ℓ/∂ζ
    weights: TensorVariable  # w, an input, (n, m)
    of_weighted: TensorVariable  # (n, m): Cw with C = ∂²ℓ/∂ζ², the derivative of w·c


class RowSlopes(NamedTuple):
    """Graphs of rows, for each group."""

    variables: list[TensorVariable]  # the unknowns
    cuts: list[list[Cut]]  # of each group, a list of `Cut`
    log_likelihoods: list[TensorVariable]  # (n,)
    zetas: list[TensorVariable]  # (n, m)
    by_numbers: list[ByNumbers]

    @property
    def quadratics(self) -> list[Quadratics]:
        """Of each group."""
        return [Quadratics(sum(cut.size for cut in cuts)) for cuts in self.cuts]

    def remainder(
        self, weights: Sequence[TensorVariable], tables: Sequence[TensorVariable]
    ) -> tuple[TensorVariable, list[TensorVariable]]:
        """Return what a minibatch has to tell, Σ w (ℓ − q), and its gradient for each unknown.

        Parameters
        ----------
        weights : list of TensorVariable
            Of each group, (n,).
        tables : list of TensorVariable
            Of each group what is remembered of these rows, (n, size).
        """
        likelihood = known_value = 0.0
        cotangents = {}
        groups = zip(self.cuts, self.quadratics, weights, tables, self.log_likelihoods, strict=True)
        for cuts, quadratic, w, table, log_likelihood in groups:
            likelihood = likelihood + (w * log_likelihood).sum()
            if all(cut.shared for cut in cuts):
                # quadratic functions of one ζ add up to one
                zeta = pt.concatenate([cut.flat_zeta[0] for cut in cuts])
                known, slope = quadratic.at_one(pt.dot(w, table), zeta)
                slopes = [slope[i : i + 1] for i in range(quadratic.m)]
            else:
                zeta = [z[:, j] for cut in cuts for z in [cut.flat_zeta] for j in range(cut.size)]
                linear = quadratic.linear(table, zeta)
                known = (w * quadratic.values(table, zeta, linear)).sum()
                slopes = [w * by_row for by_row in linear]
            known_value = known_value + known
            start = 0
            for cut in cuts:
                numbers = slopes[start : start + cut.size]
                start += cut.size
                own = numbers[0]
                if cut.shape:
                    own = pt.stack(numbers, axis=1).reshape((own.shape[0], *cut.shape))
                # a copy of ζ, so that what one ζ owes to another isn't counted twice
                cotangents[pt.tensor_copy(cut.zeta)] = -summed_if_shared(cut, own)
        gradient = pt.grad(
            likelihood, self.variables, known_grads=cotangents, disconnected_inputs="ignore"
        )
        return likelihood - known_value, gradient


def row_slopes(
    log_likelihoods: Sequence[TensorVariable],
    variables: Sequence[TensorVariable],
    batches: Sequence[Sequence[TensorVariable]],
    point: Mapping[str, Any],
) -> RowSlopes | None:
    """Cut log-likelihoods where a row depends on few numbers by way of fixed derivatives.

    Parameters
    ----------
    log_likelihoods, variables, batches, point
        As of `row_terms`.

    Returns
    -------
    RowSlopes or None
        None where `row_terms` would be, where a derivative ∂ζ/∂θ isn't the same everywhere, where
        a row has more than ``MAX_NUMBERS`` numbers, and where ℓ has no second derivative.
    """
    cut = row_cuts(log_likelihoods, variables, batches, point, linear=True)
    if cut is None:
        return None
    unchecked, groups = cut
    zetas = []
    by_numbers = []
    for graph, cuts in zip(unchecked, groups, strict=True):
        m = sum(cut.size for cut in cuts)
        if not 0 < m <= MAX_NUMBERS or not all(cut.fixed for cut in cuts):
            return None
        n = graph.shape[0]
        zeta = [pt.broadcast_to(cut.flat_zeta, (n, cut.size)) for cut in cuts]
        zetas.append(pt.concatenate(zeta, axis=1))
        by_row = by_zeta(graph, [cut.zeta for cut in cuts], cuts[0].through)
        try:
            by_numbers.append(_by_numbers(by_row, cuts, zetas[-1].dtype))
        except (NotImplementedError, MethodNotDefined, NullTypeGradError):
            return None
        except TypeError as error:
            # PyTensor's gradient of a split joins derivatives of which one isn't defined
            if NullType.__name__ not in str(error):
                raise
            return None
    outputs = [out for found in by_numbers for out in (found.log_likelihood, found.of_weighted)]
    if set(variables) & set(ancestors(outputs)):
        return None  # a condition on an unknown, which has no derivative and is no number in ζ
    return RowSlopes(list(variables), groups, unchecked, zetas, by_numbers)


def _by_numbers(by_row: ByZeta, cuts: Sequence[Cut], dtype: str) -> ByNumbers:
    """ℓ, c and Cw of each row as functions of its numbers ζ and weights w, of this type."""
    zeta = pt.matrix("zeta", dtype=dtype)
    n = zeta.shape[0]
    given = {}
    start = 0
    for cut, own in zip(cuts, by_row.zetas, strict=True):
        numbers = zeta[:, start : start + cut.size].reshape((n, *cut.shape))
        given[own] = numbers.astype(own.dtype)
        start += cut.size

    def joined(gradients: Sequence[TensorVariable]) -> TensorVariable:
        by_cut = zip(gradients, cuts, strict=True)
        flat = [pt.broadcast_to(g.reshape((-1, cut.size)), (n, cut.size)) for g, cut in by_cut]
        return pt.concatenate(flat, axis=1)

    # One graph for all columns of C. That of its entries would be so many times as large, and a
    # graph takes far longer to compile than to be evaluated once for each column.
    weights = pt.matrix("weights", dtype=dtype)
    c = joined(by_row.gradients)
    of_weighted = joined(by_row.gradients_of((weights * c).sum(axis=1)))
    log_likelihood, c, of_weighted = clone_replace(
        [by_row.log_likelihood, c, of_weighted], given, rebuild_strict=False
    )
    return ByNumbers(zeta, log_likelihood, c, weights, of_weighted)
