"""What rows that see few linear functions of parameters say of second derivatives, compiled.

Where a row's log-likelihood depends on θ by way of linear predictors ζ with fixed derivatives J,
its Hessian is JᵀCJ with C = ∂²ℓ/∂ζ², a few numbers. Rows may be linear in other coordinates θ than
a chain's φ. Knows densities and rows, no samplers and no fit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pytensor.tensor as pt

from pymc_sghmc.compat import ancestors
from pymc_sghmc.gradients.at_positions import at_positions, at_positions_one_by_one
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.jacobians import Jacobian, jacobian
from pymc_sghmc.gradients.row_coordinates import LinearRows, RowCoordinates
from pymc_sghmc.gradients.row_inputs import RowFunction, Rows, by_row
from pymc_sghmc.models.row_slopes import Quadratics, RowSlopes, row_slopes
from pymc_sghmc.protocols import Array

__all__ = [
    "BLOCK_ROWS",
    "MOST_UNKNOWNS",
    "SecondDerivatives",
    "derivatives_in",
    "is_straight",
    "second_derivatives",
]

BLOCK_ROWS = 10_000  # for which J is found at a time
SOME_ROWS = 50  # at which is seen whether log-likelihoods have a curvature
MOST_UNKNOWNS = 1000  # of which a matrix of second derivatives is kept whole
MOST_OPERATIONS = 4000  # of second derivatives: to compile more takes minutes, ...
FEW_UNKNOWNS = 100  # ... and curvatures of so few are told by differences of gradients in seconds


class FirstOrder(NamedTuple):
    """What rows of a group say at P values of their ζ."""

    log_likelihood: Array  # (P, n)
    c: Array  # (P, n, m): ∂ℓ/∂ζ


class SecondDerivatives:
    """Compiled functions of which Hessians are made.

    Parameters
    ----------
    density : LogDensity
        With its graph.
    slopes : RowSlopes
        Of its likelihoods, as graphs of θ.
    coordinates : RowCoordinates
        θ at a position of a chain.

    Attributes
    ----------
    zetas : callable
        ζ of rows at many θ, [(P, n, m)].
    quadratics : list of Quadratics
        Where these numbers lie, for each group of rows.
    without_rows : callable
        f(positions (P, d), g (P, d), ...), gradients of log prior + g·θ there, [(P, d)].
    """

    def __init__(self, density: LogDensity, slopes: RowSlopes, coordinates: RowCoordinates) -> None:
        self.slopes = slopes
        self.coordinates = coordinates
        graph = density.graph
        by_row = graph.at_position(slopes.zetas, slopes.variables)
        self.zetas = at_positions(density, by_row, [graph.position], graph.rows)
        self._second = self._of_numbers(
            density,
            [of_group.of_weighted for of_group in slopes.by_numbers],
            [of_group.weights for of_group in slopes.by_numbers],
        )
        self._first: RowFunction | None = None
        if not coordinates.are_own:
            self.compile_first(density)
        self.quadratics: list[Quadratics] = slopes.quadratics
        self._no_zetas = [
            np.zeros((1, q.m), dtype=zeta.dtype)
            for q, zeta in zip(self.quadratics, slopes.zetas, strict=True)
        ]
        self.shapes = [np.shape(graph.model.point[v.name]) for v in graph.variables]
        self.without_rows = _gradient_without_rows(density, coordinates)

    def first(self, zeta: Array, group: int, inputs: Sequence[Any]) -> FirstOrder:
        """Log-likelihood and c = ∂ℓ/∂ζ of rows of a group at P values of their ζ, (P, n, m).

        Many at a time, as what a row says of its ζ needs no more of the predictors.
        """
        assert self._first is not None
        n_points, n_rows, m = zeta.shape
        found = self._first(*self._inputs(zeta.reshape(-1, m), group, inputs, n_points))
        log_likelihood, c = found[2 * group : 2 * group + 2]
        return FirstOrder(
            log_likelihood=log_likelihood.reshape(n_points, n_rows).astype(float, copy=False),
            c=c.reshape(zeta.shape).astype(float, copy=False),
        )

    def second(self, zeta: Array, group: int, inputs: Sequence[Any]) -> Array:
        """Return C = ∂²ℓ/∂ζ² of rows of a group at their ζ (n, m), (n, m, m)."""
        n, m = zeta.shape
        weights = list(self._no_zetas)
        weights[group] = np.repeat(np.eye(m, dtype=weights[group].dtype), n, axis=0)
        of_groups = self._inputs(np.tile(zeta, (m, 1)), group, inputs, m)
        columns = self._second(*weights, *of_groups)[group].reshape(m, n, m)
        upper = [columns[i, :, j] for i, j in zip(*self.quadratics[group].upper, strict=True)]
        return self.quadratics[group].symmetric(np.stack(upper, axis=1).astype(float, copy=False))

    def _inputs(self, zeta: Array, group: int, inputs: Sequence[Any], n_points: int) -> list[Any]:
        """Return what functions of numbers take for rows of a group, each so often."""
        n_groups = len(self.quadratics)
        rows = list(inputs[:n_groups])
        rows[group] = np.tile(rows[group], n_points)
        of_groups = list(self._no_zetas)
        of_groups[group] = zeta.astype(of_groups[group].dtype, copy=False)
        return [*of_groups, *rows, *inputs[n_groups:]]

    def compile_first(self, density: LogDensity) -> None:
        """Compile `first`, which Hessians need where θ isn't φ, and second-order gradients."""
        if self._first is None:
            by_numbers = self.slopes.by_numbers
            outputs = [
                out for of_group in by_numbers for out in (of_group.log_likelihood, of_group.c)
            ]
            self._first = self._of_numbers(density, outputs)

    def _of_numbers(
        self,
        density: LogDensity,
        outputs: list[pt.TensorVariable],
        weights: Sequence[pt.TensorVariable] = (),
    ) -> RowFunction:
        """Compile functions of the numbers ζ of rows, and maybe of weights of them."""
        graph = density.graph
        zetas = [of_group.zeta for of_group in self.slopes.by_numbers]
        inputs = [*weights, *zetas, *graph.rows, *graph.arrays, *graph.given]
        return density.compiled(inputs, graph.at_position(outputs, self.slopes.variables))

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

    These are looked for in coordinates that a rewrite of the model knows, and then in a chain's.
    None, too, where few parameters have log-likelihoods of so many operations, as of a recursion
    that is written step by step, that to compile their derivatives would take far longer than
    anything else.

    Parameters
    ----------
    density : LogDensity
        With its graph.
    """
    if not density.graph.model.groups:
        return None
    linear = density.linear_rows
    found = None if linear is None else derivatives_in(density, linear)
    return derivatives_in(density, None) if found is None else found


def derivatives_in(density: LogDensity, linear: LinearRows | None) -> SecondDerivatives | None:
    """Compile them in these coordinates of rows, or in a chain's; see `second_derivatives`."""
    model = density.graph.model
    terms = model.terms if linear is None else linear.terms
    variables = list(model.variables if linear is None else linear.variables)
    batches = [group.batches for group in model.groups]
    slopes = row_slopes(terms, variables, batches, model.point)
    if slopes is None or (density.d <= FEW_UNKNOWNS and _takes_minutes(slopes)):
        return None
    return SecondDerivatives(density, slopes, RowCoordinates(density, linear))


def is_straight(second: SecondDerivatives, density: LogDensity, data: Rows) -> bool:
    """Whether log-likelihoods are straight in some number ζ, wherever they aren't bent in a kink.

    As those of a Laplace distribution and of a quantile regression are. Their second derivatives
    are zero, and that of their sum over many rows isn't: it is in the kinks.

    Parameters
    ----------
    second : SecondDerivatives
    density : LogDensity
    data : InMemory or Partition
    """
    rng = np.random.default_rng(0)
    for k, n_rows in enumerate(data.n_rows):
        some = np.arange(min(SOME_ROWS, n_rows))
        for chunk, inputs in by_row(density, data, k, some):
            zeta = rng.standard_normal((chunk.rows.size, second.quadratics[k].m))
            with np.errstate(all="ignore"):
                of_each = np.diagonal(second.second(zeta, k, inputs), axis1=1, axis2=2)
            if (of_each == 0).all(axis=0).any():
                return True
    return False


def _takes_minutes(slopes: RowSlopes) -> bool:
    """Whether second derivatives have too many operations to be compiled."""
    found = [of_group.of_weighted for of_group in slopes.by_numbers]
    return sum(variable.owner is not None for variable in ancestors(found)) > MOST_OPERATIONS


def _gradient_without_rows(
    density: LogDensity, coordinates: RowCoordinates
) -> Callable[..., list[Array]]:
    """Compile the gradient of log prior + g·θ at many positions, with a g for each.

    With thousands of parameters it is asked for at few positions, as there is no matrix of second
    derivatives: a function of a single one has a third of the operations.
    """
    graph = density.graph
    g = graph.position.type("slopes_of_rows")
    gradient, _ = coordinates.with_prior(density, 1.0, [g])
    compiled = at_positions if density.d <= MOST_UNKNOWNS else at_positions_one_by_one
    return compiled(density, [gradient], [graph.position, g], [])
