"""The Hessian of a log-density by one pass over rows that see few linear functions of parameters.

Where a row's log-likelihood depends on the parameters by way of linear predictors ζ with fixed
derivatives J, its Hessian is JᵀCJ with C = ∂²ℓ/∂ζ², a few numbers. J is found once. Each Hessian
then costs one evaluation of C for each row, where differences of gradients cost a pass for each
parameter. The prior has no rows: its Hessian is taken by differences of its gradient, at many
positions in one call. Knows densities and rows, no samplers and no fit.
"""

import math
import operator

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple, Self

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import rewrite_pregrad
from pytensor.graph.replace import clone_replace
from scipy.sparse import csr_array, vstack

from pymc_sghmc.gradients.at_positions import at_positions
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.jacobians import Jacobian, jacobian
from pymc_sghmc.models.row_slopes import Quadratics, RowSlopes, row_slopes
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import InMemory

__all__ = [
    "LikelihoodHessian",
    "SecondDerivatives",
    "derivatives_of_rows",
    "second_derivatives",
]

MOST_BYTES = 2**28  # of J, kept while a fit is made
BLOCK_ROWS = 10_000  # for which J is found at a time
STEP = 1e-3  # of differences of the prior's gradient, in posterior standard deviations
BLOCK_POSITIONS = 2**21  # numbers in the positions at which the prior's gradient is taken at a time


class SecondDerivatives:
    """Compiled functions of which Hessians of likelihoods are made: ζ and C of rows.

    Parameters
    ----------
    density : LogDensity
        With its graph.
    slopes : RowSlopes
        Of its likelihoods.
    """

    def __init__(self, density: LogDensity, slopes: RowSlopes) -> None:
        self.slopes = slopes
        graph = density.graph
        n = len(slopes.zetas)
        by_row = graph.at_position([*slopes.zetas, *slopes.second], slopes.variables)
        zetas = by_row[:n]
        self.zetas = at_positions(density, zetas, graph.position, graph.rows)  # (P, n, m)
        self.second = density.row_function(by_row[n:])
        self.quadratics: list[Quadratics] = slopes.quadratics
        self.shapes = [np.shape(graph.model.point[v.name]) for v in graph.variables]
        # f(positions (P, d), *others) is [(P, d)]; None where no whole Hessians are asked for
        self.prior_gradients: Callable[..., list[Array]] | None = None

    def jacobian(self, density: LogDensity, group: int, inputs: tuple[Any, ...]) -> Jacobian | None:
        """∂ζ/∂θ of some rows of a group; None where it can't be found.

        Parameters
        ----------
        density : LogDensity
            Maybe without its graph.
        group : int
        inputs : tuple
            What functions of rows take of these rows besides a position.
        """

        def zetas(positions: Array) -> Array:
            values: Array = self.zetas(positions.astype(density.dtype), *inputs)[group]
            return values

        return jacobian(zetas, self.shapes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # functions without a state

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "slopes": None}  # workers need no graph


def second_derivatives(density: LogDensity) -> SecondDerivatives | None:
    """Compile what Hessians are made of; None where rows see no few linear predictors.

    Parameters
    ----------
    density : LogDensity
        With its graph.
    """
    graph = density.graph
    if not graph.model.groups:
        return None
    found = derivatives_of_rows(density, graph.model.terms, graph.variables)
    if found is not None:
        found.prior_gradients = _prior_gradients(density, found.slopes)
    return found


def derivatives_of_rows(
    density: LogDensity, terms: Sequence[pt.TensorVariable], variables: Sequence[pt.TensorVariable]
) -> SecondDerivatives | None:
    """Compile derivatives of rows alone; None where they see no few linear predictors.

    Parameters
    ----------
    density : LogDensity
        With its graph.
    terms : list of TensorVariable
        Log-likelihoods of rows, as graphs of ...
    variables : list of TensorVariable
        ... what rows see, one for each parameter.
    """
    model = density.graph.model
    batches = [group.batches for group in model.groups]
    slopes = row_slopes(terms, variables, batches, model.point)
    return None if slopes is None else SecondDerivatives(density, slopes)


def _prior_gradients(density: LogDensity, slopes: RowSlopes) -> Callable[..., list[Array]]:
    """Compile the prior's gradient at many positions: f(positions (P, d), *given) is [(P, d)]."""
    graph = density.graph
    prior = clone_replace([graph.model.log_prior])[0]
    gradients = pt.grad(rewrite_pregrad(prior), slopes.variables, disconnected_inputs="ignore")
    joined = pt.concatenate([g.ravel() for g in gradients])
    outputs = graph.at_position([joined], slopes.variables)
    return at_positions(density, outputs, graph.position, [])


class _Block(NamedTuple):
    """Some rows of a group, and what their functions take."""

    group: int
    rows: Array
    weight: float  # N over the number of rows that stand for them
    inputs: tuple[Any, ...]


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
        assert second.prior_gradients is not None
        self._second = second
        self._prior_gradients = second.prior_gradients
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

    def mean(self, points: Sequence[Array], shares: Sequence[Sequence[Array]]) -> Any:
        """Return the mean over points of the Hessian of −log-likelihood, each on rows of its own.

        Parameters
        ----------
        points : list of array of shape (d,)
        shares : list of tuple of arrays
            For each point, numbers of rows of each group, all among the subset's.

        Returns
        -------
        array or csr_array of shape (d, d)
        """
        assert self._J is not None
        curvatures = zip(self._J, self._mean_curvatures(points, shares), strict=True)
        return reduce(operator.add, [J.hessian(C) for J, C in curvatures])

    def diagonal(self, point: Array) -> Array:
        """Diagonal of the Hessian of −log-likelihood at a point, (d,)."""
        assert self._J is not None
        curvatures = zip(self._J, self._mean_curvatures([point], [self._subset]), strict=True)
        return np.sum([J.diagonal(C) for J, C in curvatures], axis=0)

    def _mean_curvatures(
        self, points: Sequence[Array], shares: Sequence[Sequence[Array]]
    ) -> list[Array]:
        """Return −C of the subset's rows of each group, (n, m, m), weighted, as a mean over points.

        For `mean`'s arguments.
        """
        curvatures = [
            np.zeros((rows.size, q.m, q.m))
            for rows, q in zip(self._subset, self._second.quadratics, strict=True)
        ]
        for point, share in zip(points, shares, strict=True):
            position = point.astype(self._density.dtype)
            for block in self._blocks(share):
                k = block.group
                with np.errstate(all="ignore"):
                    upper = self._second.second(position, *block.inputs)[k].astype(float)
                C = self._second.quadratics[k].symmetric(upper)
                places = np.searchsorted(self._subset[k], block.rows)
                curvatures[k][places] -= (block.weight / len(points)) * C
            self.evaluations += sum(map(len, share)) / self._n_rows
        return curvatures

    def prior(self, points: Sequence[Array], factor: Array) -> Array:
        """Return the mean over points of LᵀHL, H the Hessian of −log p of the prior.

        Parameters
        ----------
        points : list of array of shape (d,)
        factor : array of shape (d, n)
            L, whose columns are as long as the posterior is wide there.
        """
        directions = factor.T
        per_block = max(1, BLOCK_POSITIONS // directions.shape[1])
        total = np.zeros_like(factor)
        others = (*self._data.part(None, None).arrays, *self._density.given)
        for point in points:
            [here] = self._prior_gradients(point[None], *others)
            for start in range(0, len(directions), per_block):
                part = directions[start : start + per_block]
                [there] = self._prior_gradients(point + STEP * part, *others)
                total[:, start : start + per_block] += (here - there).T
        return factor.T @ total / (STEP * len(points))

    def prior_product(self, points: Sequence[Array]) -> Callable[[Array], Array]:
        """Return the mean over points of Hv, H the Hessian of −log p of the prior, for any v.

        v is as long as the posterior is wide in its direction.
        """
        at = np.array(points)
        others = (*self._data.part(None, None).arrays, *self._density.given)
        [here] = self._prior_gradients(at, *others)

        def product(v: Array) -> Array:
            [there] = self._prior_gradients(at + STEP * v, *others)
            return np.mean(here - there, axis=0) / STEP

        return product

    def _prior_is_right(self) -> bool:
        """Whether the prior's gradient at many positions is that at each of them."""
        d = self._density.d
        positions = 0.1 * np.random.default_rng(2).standard_normal((2, d))
        weights_type = self._density.weights_dtype
        one = np.ones((), dtype=weights_type)
        minibatch = self._data.part(None, None)
        none = [np.zeros(rows.size, dtype=weights_type) for rows in minibatch.rows]
        others = (*minibatch.arrays, *self._density.given)
        with np.errstate(all="ignore"):
            of_each = [self._density(x, one, none, *minibatch)[1] for x in positions]
            [of_all] = self._prior_gradients(positions, *others)
        return bool(np.allclose(of_all, of_each, rtol=1e-6, atol=1e-6, equal_nan=True))

    def _blocks(self, rows_of_groups: Sequence[Array]) -> Iterator[_Block]:
        """Yield the rows in blocks, with the inputs of functions of them."""
        for chunk in self._data.chunks(tuple(rows_of_groups)):
            if chunk.rows.size == 0:
                continue
            numbers = self._data.part(chunk.group, chunk.rows).rows
            inputs = (*numbers, *chunk.arrays, *self._density.given)
            yield _Block(chunk.group, chunk.rows, chunk.weight, inputs)

    def _jacobians(self) -> list[Jacobian] | None:
        """Return J of each group's rows; None where there can't be any."""
        parts: list[list[Jacobian]] = [[] for _ in self._subset]
        for block in self._blocks(self._subset):
            for rows in np.array_split(block.rows, math.ceil(block.rows.size / BLOCK_ROWS)):
                numbers = self._data.part(block.group, rows).rows
                inputs = (*numbers, *block.inputs[len(numbers) :])
                found = self._second.jacobian(self._density, block.group, inputs)
                if found is None:
                    return None
                self.evaluations += found.n_passes * rows.size / self._n_rows
                parts[block.group].append(found)
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
