"""Rows and their groups' coefficients: log-densities of some groups in place of all of a model.

Where a parameter stands that has entries for each of G groups, the coefficients of some groups are
put, (n, k). Knows graphs of models; knows no quadrature and no chain.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace

from pymc_sghmc.hierarchy.scaled_effects import LOCATION_AND_SCALE
from pymc_sghmc.models.graphs import slice_rows
from pymc_sghmc.models.row_axes import RowAxis, row_axes

__all__ = [
    "ClusterEffect",
    "ClusteredRows",
    "Lower",
    "axis_of",
    "cholesky",
    "refused",
    "solved",
    "solved_back",
]

Lower = list[list[Any]]  # a small lower triangular matrix of variables


class ClusterEffect(NamedTuple):
    """A parameter with coefficients for each group."""

    rv: Any
    value: Any  # variable of the model
    axis: int  # on which groups lie
    shape: tuple[int, ...]
    prior: Any  # log-density of its entries, in the model's variables
    # of its prior, in the model's variables; none where its values are transformed
    parameters: list[Any]
    tables: dict[Any, int] = {}  # other arrays with an entry for each group, and on which axis

    @property
    def size(self) -> int:
        """Numbers of one group."""
        return int(np.prod(self.shape)) // self.shape[self.axis]

    @property
    def axes(self) -> dict[Any, int]:
        """Of all that has an entry for each group, the axis on which groups lie."""
        return {self.value: self.axis, **self.tables}

    @property
    def axis_from_last(self) -> int:
        """On which groups lie, 0 or counted from the last."""
        return self.axis and self.axis - len(self.shape)

    @property
    def is_normal(self) -> bool:
        """Whether each group has one multivariate normal vector, of the same covariance."""
        known = self.parameters and isinstance(self.rv.owner.op, type(pm.MvNormal.rv_op))
        if not known or (len(self.shape), self.axis) != (2, 0):
            return False
        return all(self.parameters[1].type.broadcastable[:-2])

    def taken_from(self, numbers: pt.TensorVariable) -> pt.TensorVariable:
        """Put a matrix, (n, size), on the axes of the unknown, to take its place."""
        others = [n for i, n in enumerate(self.shape) if i != self.axis]
        if not others:
            return numbers[:, 0]
        by_group = numbers.reshape((numbers.shape[0], *others), ndim=len(self.shape))
        return pt.moveaxis(by_group, 0, self.axis)


class ClusteredRows(NamedTuple):
    """Rows of one likelihood, and the effects of which each sees its own group's coefficients."""

    effects: list[ClusterEffect]
    index: Any  # number of the group of each row, a graph of the batches
    # (variable, axis of groups, entries) wherever a row picks its group's numbers
    picked: list[tuple[Any, int, Any]]
    term: Any  # log-likelihood of rows, a graph of what they pick
    inputs: list[Any]  # variables in ``term`` for what is picked
    n_groups: int
    n_seen: int  # numbers that a row may see of its group

    @property
    def size(self) -> int:
        """Numbers of one group."""
        return sum(effect.size for effect in self.effects)

    def rows(self, numbers: pt.TensorVariable, groups: pt.TensorVariable) -> pt.TensorVariable:
        """Log-likelihood of rows, (r,), given their groups' numbers, (r, size)."""
        values = self._picked(numbers, groups)
        [term] = clone_replace(
            [self.term], dict(zip(self.inputs, values, strict=True)), rebuild_strict=False
        )
        return term

    def seen(self, numbers: pt.TensorVariable, groups: pt.TensorVariable) -> pt.TensorVariable:
        """Return what rows of some groups see of their numbers, side by side: (n, q)."""
        n = numbers.shape[0]
        found = dict.fromkeys((view, axis) for view, axis, _ in self.picked)
        views = self._at(list(found), numbers, groups)
        flat = [
            pt.moveaxis(v, axis, 0).reshape((n, -1))
            for v, (_, axis) in zip(views, found, strict=True)
        ]
        return pt.concatenate(flat, axis=1)

    def prior(self, numbers: pt.TensorVariable, groups: pt.TensorVariable) -> pt.TensorVariable:
        """Log-density of the numbers of some groups, (n,)."""
        found = []
        start = 0
        for effect in self.effects:
            own = numbers[:, start : start + effect.size]
            start += effect.size
            if effect.is_normal:
                found.append(self._normal(effect, own, groups))
                continue
            axis = axis_of(effect.prior, effect)
            [prior] = self._at([(effect.prior, axis)], numbers, groups)
            prior = pt.moveaxis(prior, axis, 0)
            found.append(prior.sum(axis=tuple(range(1, prior.type.ndim))))
        return found[0] if len(found) == 1 else pt.add(*found)

    def _normal(
        self, effect: ClusterEffect, own: pt.TensorVariable, groups: pt.TensorVariable
    ) -> pt.TensorVariable:
        """Log-density of multivariate normal vectors, (n,), written out for their few entries."""
        factor = _factor(effect)
        k = effect.size
        shift = own - self._location(effect, groups, own.shape[0])
        y = _solved_forth(factor, [shift[:, i] for i in range(k)])
        constant = -0.5 * k * np.log(2 * np.pi) - sum(pt.log(factor[i][i]) for i in range(k))
        return -0.5 * sum(pt.square(x) for x in y) + constant

    def _location(
        self, effect: ClusterEffect, groups: pt.TensorVariable, n: pt.TensorVariable
    ) -> pt.TensorVariable:
        zeros = pt.zeros((n, self.size))
        location = effect.parameters[0] + pt.zeros_like(effect.value)
        [location] = self._at([(location, 0)], zeros, groups)
        return location

    def prior_gaussian(
        self, groups: pt.TensorVariable, n: pt.TensorVariable
    ) -> tuple[list[list[pt.TensorVariable]], list[pt.TensorVariable]]:
        """Precision and precision times mean of a Gaussian like the prior, in lists of (n,)."""
        k = range(self.size)
        zero = pt.zeros((n,))
        precision = [[zero for _ in k] for _ in k]
        linear = [zero for _ in k]
        start = 0
        for effect in self.effects:
            P, h = self._gaussian_of(effect, groups, n)
            for i in range(effect.size):
                linear[start + i] = h[i]
                for j in range(effect.size):
                    precision[start + i][start + j] = P[i][j]
            start += effect.size
        return precision, linear

    def _gaussian_of(
        self, effect: ClusterEffect, groups: pt.TensorVariable, n: pt.TensorVariable
    ) -> tuple[list[list[pt.TensorVariable]], list[pt.TensorVariable]]:
        k = range(effect.size)
        op = effect.rv.owner.op
        zeros = pt.zeros((n, self.size))
        if effect.is_normal:
            factor = _factor(effect)
            location = self._location(effect, groups, n)
            unit = [[pt.ones(()) if i == j else pt.zeros(()) for j in k] for i in k]
            columns = [solved(factor, column) for column in unit]
            P = [[columns[j][i] + pt.zeros((n,)) for j in k] for i in k]
            return P, [sum(P[i][j] * location[:, j] for j in k) for i in k]
        if effect.parameters and isinstance(op, LOCATION_AND_SCALE):
            like = pt.zeros_like(effect.value)
            views = [(x + like, effect.axis) for x in effect.parameters[-2:]]
            location, scale = (
                pt.moveaxis(v, effect.axis, 0).reshape((n, effect.size))
                for v in self._at(views, zeros, groups)
            )
            P = [[1 / pt.square(scale[:, i]) if i == j else pt.zeros((n,)) for j in k] for i in k]
            return P, [P[i][i] * location[:, i] for i in k]
        some = pt.matrix(shape=(None, self.size))
        start = sum(e.size for e in self.effects[: self.effects.index(effect)])
        slope = pt.grad(self.prior(some, groups).sum(), some)
        rows = [pt.grad(slope[:, start + i].sum(), some, disconnected_inputs="ignore") for i in k]
        slope, *rows = clone_replace([slope, *rows], {some: zeros}, rebuild_strict=False)
        P = [[-row[:, start + j] for j in k] for row in rows]
        bowl = pt.all([P[i][i] > 0 for i in k], axis=0)  # else it has no Gaussian like it
        P = [[pt.where(bowl, x, 0.0) for x in row] for row in P]
        return P, [slope[:, start + i] for i in k]

    def _picked(
        self, numbers: pt.TensorVariable, groups: pt.TensorVariable
    ) -> list[pt.TensorVariable]:
        views = self._at([(view, axis) for view, axis, _ in self.picked], numbers, groups)
        places = [
            tuple(slice(None) if i == axis else entry for i, entry in enumerate(entries))
            for _, axis, entries in self.picked
        ]
        return [view[place] for view, place in zip(views, places, strict=True)]

    def _at(
        self,
        views: Sequence[tuple[pt.TensorVariable, RowAxis]],
        numbers: pt.TensorVariable,
        groups: pt.TensorVariable,
    ) -> list[pt.TensorVariable]:
        """Variables with an axis of groups, at some groups only."""
        new = {}
        start = 0
        for effect in self.effects:
            part = numbers[:, start : start + effect.size]
            new[effect.value] = effect.taken_from(part).astype(effect.value.dtype)
            start += effect.size
            new |= {v: pt.take(v, groups, axis=axis) for v, axis in effect.tables.items()}
        wanted = [view for view, _ in views]
        axes = {e.axis_from_last for e in self.effects}
        return slice_rows(wanted, new, self.n_groups, numbers.shape[0], axes)


def _factor(effect: ClusterEffect) -> Lower:
    """Cholesky factor of a covariance, in lists of numbers."""
    covariance = effect.parameters[1]
    k = range(effect.size)
    covariance = covariance.reshape((effect.size, effect.size))
    return cholesky([[covariance[i, j] for j in k] for i in k])


def cholesky(A: Sequence[Sequence[pt.TensorVariable]]) -> Lower:
    """Lower factor of a small matrix in lists of variables."""
    k = len(A)
    L: Lower = [[None] * k for _ in range(k)]
    for i in range(k):
        for j in range(i + 1):
            rest = A[i][j] - sum((L[i][m] * L[j][m] for m in range(j)), 0.0)
            L[i][j] = pt.sqrt(rest) if i == j else rest / L[j][j]
    return L


def solved(L: Lower, rhs: Sequence[pt.TensorVariable]) -> list[pt.TensorVariable]:
    """(LLᵀ)⁻¹ times a vector, in lists of variables."""
    return solved_back(L, _solved_forth(L, rhs))


def _solved_forth(L: Lower, rhs: Sequence[pt.TensorVariable]) -> list[pt.TensorVariable]:
    """L⁻¹ times a vector."""
    y: list[Any] = []
    for i in range(len(L)):
        y.append((rhs[i] - sum((L[i][m] * y[m] for m in range(i)), 0.0)) / L[i][i])
    return y


def solved_back(L: Lower, rhs: Sequence[pt.TensorVariable]) -> list[pt.TensorVariable]:
    """L⁻ᵀ times a vector, in lists of variables."""
    k = len(L)
    x: list[Any] = [None] * len(L)
    for i in reversed(range(k)):
        rest = sum((L[m][i] * x[m] for m in range(i + 1, k)), 0.0)
        x[i] = (rhs[i] - rest) / L[i][i]
    return x


def axis_of(view: pt.TensorVariable, effect: ClusterEffect) -> RowAxis:
    """Axis of a variable on which groups lie, or what `row_axes` says instead."""
    return row_axes([view], effect.axes).get(view)


def refused(effect: str, reason: str) -> ValueError:
    """Return the error for a parameter that can't be integrated out group by group."""
    return ValueError(
        f"marginalize: {effect!r} can't be integrated out group by group: {reason}. Leave "
        "it out of marginalize; it is then sampled like any other parameter."
    )
