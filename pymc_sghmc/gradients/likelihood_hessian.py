"""The Hessian of a log-density by one pass over rows that see few linear functions of parameters.

The derivatives J of `second_derivatives` are found once. Each Hessian then costs one evaluation of
C for each row, where differences of gradients cost a pass for each parameter. Where rows are linear
in other coordinates θ than a chain's φ, the chain rule carries it there: TᵀHT with T = ∂θ/∂φ, and
the second derivatives of g·θ(φ) with g = ∂ℓ/∂θ. These and the prior's have no rows: they are taken
by differences of a gradient, at many positions in one call. Knows densities and rows, no samplers
and no fit.
"""

import operator

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from scipy.sparse import csr_array, vstack

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.jacobians import Jacobian
from pymc_sghmc.gradients.passes import Passes
from pymc_sghmc.gradients.row_inputs import ChunkInputs, in_parts, with_inputs
from pymc_sghmc.gradients.second_derivatives import BLOCK_ROWS, SecondDerivatives
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import Chunk, InMemory
from pymc_sghmc.threads import in_order

__all__ = ["LikelihoodHessian"]

MOST_BYTES = 2**28  # of J, kept while a fit is made
STEP = 1e-3  # of differences of gradients without rows, in posterior standard deviations
BLOCK_POSITIONS = 2**21  # numbers in the positions at which these are taken at a time


class _RowDerivatives(NamedTuple):
    """What rows say at a point, in θ."""

    curvatures: list[Array]  # −C of the rows of each group, (n, m, m), weighted
    slope: Array  # of their log-likelihood, (d,)


class _MeanLikelihood(NamedTuple):
    """What rows say at some points."""

    hessian: Any  # TᵀHT of −log-likelihood as a mean over points, an array or csr_array (d, d)
    slopes: Array  # of the log-likelihood in θ at each, (P, d); zeros where θ is φ


class LikelihoodHessian:
    """Hessians of −log p on a subset of the rows, from derivatives J that are found once.

    Parameters
    ----------
    second : SecondDerivatives
    density : LogDensity
    data : InMemory or Streamed
    subset : tuple of arrays
        Numbers of rows at hand, of each group.
    """

    def __init__(
        self,
        second: SecondDerivatives,
        density: LogDensity,
        data: InMemory,
        subset: Sequence[Array],
    ) -> None:
        self._second = second
        self._density = density
        self._data = data
        self._subset = subset
        self._given = density.given
        self.evaluations = 0.0  # of rows' functions, in passes over the subset
        self._n_rows = sum(rows.size for rows in subset)
        self._J = self._jacobians() if self._prior_is_right() else None

    @property
    def is_known(self) -> bool:
        """Whether J was found, and is small enough to keep."""
        return self._J is not None

    def is_current(self) -> bool:
        """Whether the inputs that J was found with are those of the density now."""
        pairs = zip(self._given, self._density.given, strict=True)
        return all(a is b or np.array_equal(a, b) for a, b in pairs)

    def mean(
        self, points: Sequence[Array], shares: Sequence[Sequence[Array]], factor: Array
    ) -> Array:
        """Return LᵀH̄L, H̄ the mean over points of the Hessian of −log p, each on rows of its own.

        Parameters
        ----------
        points : list of array of shape (d,)
        shares : list of tuple of arrays
            For each point, numbers of rows of each group, all among the subset's.
        factor : array of shape (d, n)
            L, whose columns are as long as the posterior is wide there.
        """
        found = self._likelihood(points, shares)
        directions = factor.T
        per_block = max(1, BLOCK_POSITIONS // directions.shape[1])
        total = np.zeros_like(factor)
        for point, slope in zip(points, found.slopes, strict=True):
            [here] = self._gradients_without_rows(point[None], slope[None])
            for start in range(0, len(directions), per_block):
                part = point + STEP * directions[start : start + per_block]
                [there] = self._gradients_without_rows(part, np.tile(slope, (len(part), 1)))
                total[:, start : start + per_block] += (here - there).T
        return factor.T @ (found.hessian @ factor + total / (STEP * len(points)))

    def product(
        self, points: Sequence[Array], shares: Sequence[Sequence[Array]]
    ) -> Callable[[Array], Array]:
        """Return H̄v for any v that is as long as the posterior is wide there. See `mean`."""
        found = self._likelihood(points, shares)
        at = np.array(points)
        [here] = self._gradients_without_rows(at, found.slopes)

        def product(v: Array) -> Array:
            [there] = self._gradients_without_rows(at + STEP * v, found.slopes)
            return found.hessian @ v + np.mean(here - there, axis=0) / STEP

        return product

    def diagonal(self, point: Array) -> Array:
        """Diagonal of the Hessian of −log-likelihood at a point where θ is linear in φ, (d,)."""
        T = self._derivatives(point)
        by_group = zip(self._known(), self._of_rows(point, self._subset).curvatures, strict=True)
        return np.sum([J.after(T).diagonal(C) for J, C in by_group], axis=0)

    def of_likelihood(self, point: Array) -> csr_array:
        """Return the Hessian of −log-likelihood at a point where θ is linear in φ."""
        return csr_array(self._hessian_at(point, self._of_rows(point, self._subset)))

    def _likelihood(
        self, points: Sequence[Array], shares: Sequence[Sequence[Array]]
    ) -> _MeanLikelihood:
        """See `_MeanLikelihood`; of `mean`'s arguments."""
        if self._second.coordinates.are_own:
            n = len(points)
            means = self._no_curvatures()
            for point, share in zip(points, shares, strict=True):
                of_point = self._of_rows(point, share).curvatures
                for mean, curvatures in zip(means, of_point, strict=True):
                    mean += curvatures / n
            no_slopes = np.zeros((n, points[0].size))
            return _MeanLikelihood(self._from_curvatures(means), no_slopes)
        hessians = []
        slopes = []
        for point, share in zip(points, shares, strict=True):
            rows = self._of_rows(point, share, has_slope=True)
            hessians.append(self._hessian_at(point, rows))
            slopes.append(rows.slope)
        return _MeanLikelihood(reduce(operator.add, hessians) / len(points), np.array(slopes))

    def _no_curvatures(self) -> list[Array]:
        """Return zeros for the subset's rows of each group, (n, m, m)."""
        groups = zip(self._subset, self._second.quadratics, strict=True)
        return [np.zeros((rows.size, q.m, q.m)) for rows, q in groups]

    def _hessian_at(self, point: Array, rows: _RowDerivatives) -> Any:
        """Hessian of −log-likelihood in φ, without the curvature of θ."""
        hessian = self._from_curvatures(rows.curvatures)
        T = self._derivatives(point)
        return hessian if T is None else T.T @ hessian @ T

    def _from_curvatures(self, curvatures: Sequence[Array]) -> Any:
        """Hessian of −log-likelihood in θ."""
        by_group = zip(self._known(), curvatures, strict=True)
        return reduce(operator.add, [J.hessian(C) for J, C in by_group])

    def _derivatives(self, point: Array) -> Any:
        """Return ∂θ/∂φ at a point; None where θ is φ, NaN where it isn't finite."""
        try:
            return self._second.coordinates.derivatives(point, self._density, self._data)
        except NonFinite:
            return np.full((point.size, point.size), np.nan)

    def _known(self) -> list[Jacobian]:
        """Return J of the subset's rows of each group."""
        assert self._J is not None
        return self._J

    def _of_rows(
        self, point: Array, share: Sequence[Array], has_slope: bool = False
    ) -> _RowDerivatives:
        """Return what some of the subset's rows say at a point, in one pass over them.

        The slope is asked for where θ isn't φ. Else it has no part in second derivatives, and is 0.
        """
        second = self._second
        position = point.astype(self._density.dtype)
        theta = second.coordinates.at(position, self._density, self._data)

        def of_chunk(part: ChunkInputs) -> tuple[Chunk, Array, Array | None]:
            k = part.chunk.group
            with np.errstate(all="ignore"):
                zeta = second.zetas(theta[None], *part.inputs)[k]
                C = second.second(zeta[0], k, part.inputs)
                c = second.first(zeta, k, part.inputs).c[0] if has_slope else None
            return part.chunk, C, c

        curvatures = self._no_curvatures()
        slope = np.zeros(self._density.d)
        chunks = with_inputs(self._density, self._data, self._data.chunks(share))
        for chunk, C, c in in_order(of_chunk, chunks):
            k = chunk.group
            places = np.searchsorted(self._subset[k], chunk.rows)
            curvatures[k][places] = -chunk.weight * C
            if c is not None:
                by_row = np.zeros((self._subset[k].size, c.shape[1]))
                by_row[places] = c
                slope += chunk.weight * self._known()[k].total(by_row)
        self.evaluations += sum(map(len, share)) / self._n_rows
        return _RowDerivatives(curvatures, slope)

    def _gradients_without_rows(self, positions: Array, slopes: Array) -> list[Array]:
        """Return gradients of log prior + g·θ at positions (P, d), with a slope g for each."""
        others = (*self._data.part(None, None).arrays, *self._density.given)
        return self._second.without_rows(positions, slopes, *others)

    def _prior_is_right(self) -> bool:
        """Whether the prior's gradient at many positions is that at each of them."""
        positions = 0.1 * np.random.default_rng(2).standard_normal((2, self._density.d))
        passes = Passes(self._density, self._data)
        with np.errstate(all="ignore"):
            of_each = [passes.prior(x)[1] for x in positions]
            [of_all] = self._gradients_without_rows(positions, np.zeros_like(positions))
        return bool(np.allclose(of_all, of_each, rtol=1e-6, atol=1e-6, equal_nan=True))

    def _jacobians(self) -> list[Jacobian] | None:
        """Return J of each group's rows; None where there can't be any."""
        parts: list[list[Jacobian]] = [[] for _ in self._subset]
        chunks = in_parts(self._data.chunks(self._subset), BLOCK_ROWS)
        for chunk, inputs in with_inputs(self._density, self._data, chunks):
            found = self._second.jacobian(self._density, chunk.group, inputs)
            if found is None:
                return None
            self.evaluations += found.n_passes * chunk.rows.size / self._n_rows
            parts[chunk.group].append(found)
            if sum(J.nbytes for of_group in parts for J in of_group) > MOST_BYTES:
                return None
        return [_stacked(of_group) for of_group in parts if of_group]


def _stacked(parts: Sequence[Jacobian]) -> Jacobian:
    """Return the Jacobian of all rows of some parts."""
    if all(not part.is_sparse for part in parts):
        J = np.concatenate([part.J for part in parts])
    else:
        J = vstack([csr_array(part.J) for part in parts], format="csr")
    return Jacobian(J, parts[0].m, parts[0].n_passes)
