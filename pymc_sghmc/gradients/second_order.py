"""Second-order control variates: the noise falls with the square of the distance to a point.

Knows gradients and rows, no samplers and no way of finding a centre.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pytensor.sparse import CSR, dot
from scipy.sparse import csr_array

from pymc_sghmc.exceptions import NonFinite, NotApplicable
from pymc_sghmc.gradients.around_centre import AroundExpansion
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.expansion import expand, fits, is_right
from pymc_sghmc.gradients.jacobians import Jacobian
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.second_derivatives import (
    MOST_UNKNOWNS,
    SecondDerivatives,
    second_derivatives,
)
from pymc_sghmc.gradients.second_order_noise import noise_at, rows_for_noise
from pymc_sghmc.loops.backends import is_jax
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import InMemory

__all__ = ["SecondOrder", "second_order"]

MOST_WORK = 3e11  # multiplications for the sum of all rows' slopes
TRIED_ROWS = 1000  # of each group, by which that is told
NO_PREDICTORS = (
    "rows don't depend on the parameters by way of few linear functions of them, or their "
    "log-likelihood has no second derivative"
)
FEW_BYTES = 2**28  # that tables may have however small the data are


class SecondOrder(AroundExpansion):
    """A gradient without the slope of its noise at a reference point θ̂.

    See Dang et al. (2019) and Quiroz et al. (2019).

    The log-likelihood of each row has a quadratic function beside it whose sum over all rows is
    known, and a minibatch has only to tell what is left:
    ∇Ũ(θ) = ∇U₀(θ) + ∇Q(θ) + Σ_batch wᵢ ∇(Uᵢ − qᵢ)(θ), Q = Σ qᵢ, the prior U₀ exact at θ.
    Unbiased for every centre and all slopes; what is left grows with the square of the distance, so
    that rows are drawn by what is left of them at 1 and at 3 sds.

    Parameters
    ----------
    gradient : MinibatchGradient
    derivatives : SecondDerivatives
        Of its density, with their graphs, all of them compiled.
    has_sparse_hessian : bool
        Whether the sum of all rows' slopes is kept as a sparse matrix.
    """

    def __init__(
        self,
        gradient: MinibatchGradient,
        derivatives: SecondDerivatives,
        has_sparse_hessian: bool,
    ) -> None:
        super().__init__(gradient)
        self.has_sparse_hessian = has_sparse_hessian
        self.see_rows_by(derivatives)

    def see_rows_by(self, derivatives: SecondDerivatives) -> None:
        """Compile the gradient with these functions of rows, and forget the centre.

        Parameters
        ----------
        derivatives : SecondDerivatives
            Of its density, with their graphs, all of them compiled; with Hessians that are sparse
            where they were.
        """
        self.forget_centre()
        slopes = derivatives.slopes
        self.quadratics = slopes.quadratics
        self.derivatives = derivatives
        self.coordinates = derivatives.coordinates
        self.first = derivatives.first
        self.second = derivatives.second
        graph = self.density.graph
        tables = [
            pt.matrix(f"quadratics_{k}", dtype=graph.position.dtype)
            for k in range(len(slopes.cuts))
        ]
        known = [table[row] for table, row in zip(tables, graph.rows, strict=True)]
        value, left = slopes.remainder(graph.row_weights, known)
        left = pt.concatenate([gradient.ravel() for gradient in left])
        value, left = graph.at_position([value, left], slopes.variables)
        own = graph.position
        centre = own.type("centre_of_control_variates")
        anchor = own.type("anchor")
        level = pt.dscalar("level")
        shift = own - centre
        if not self.has_sparse_hessian:
            hessian = [pt.matrix("hessian", dtype=own.dtype)]
            slope = hessian[0] @ shift
        else:
            # of compressed sparse rows
            hessian = [pt.vector("hessian", dtype=own.dtype), *pt.ivectors("columns", "ends")]
            matrix = CSR(*hessian, pt.stack([own.shape[0], own.shape[0]]))
            slope = dot(matrix, shift[:, None])[:, 0]
        value = value + (shift * (anchor + 0.5 * slope)).sum() + level
        grad = (left + anchor + slope).astype(own.dtype)
        value, grad, log_prior = self.coordinates.with_prior(
            self.density, graph.prior_weight, [value, grad]
        )
        logp = value + log_prior
        grad = grad.astype(own.dtype)
        self._symbols = logp, grad, [centre, level, anchor, *hessian, *tables]
        inputs = [own, graph.prior_weight, *graph.row_weights, *graph.rows, *self._symbols[2]]
        inputs += [*graph.arrays, *graph.given]
        self._function = self.density.compiled(inputs, [logp, grad])

    def is_right(self, centre: Array, metric: Metric) -> bool:
        """Whether what was cut from the model's graph is the model: if not, it isn't to be used."""
        if self.has_sparse_hessian and not fits(self.derivatives, self.density, self.data):
            return False  # the data may have changed
        return is_right(self, centre, metric)

    def jacobian(self, group: int, inputs: tuple[Any, ...]) -> Jacobian:
        """∂ζ/∂θ of some rows of a group, by what functions of rows take of them.

        Raises
        ------
        NonFinite
            If ζ isn't finite.
        """
        found = self.derivatives.jacobian(self.density, group, inputs)
        if found is None:  # with numbers among the data that are none
            nothing = np.full(self.density.d, np.nan)
            raise NonFinite(nothing, nothing, np.nan)
        return found

    def seen(self, position: Array) -> Array:
        """θ, what rows see, at a position of a chain."""
        return self.coordinates.at(position, self.density, self.data)

    def derivatives_seen(self, position: Array) -> Any:
        """∂θ/∂φ at a position of a chain; None where θ is φ."""
        return self.coordinates.derivatives(position, self.density, self.data)

    @property
    def knows_distance(self) -> bool:
        """Whether rows see other coordinates than a chain's own."""
        return not self.coordinates.are_own

    def distance(self, position: Array) -> float:
        """Return how far rows' predictors are from the centre, in sds by the likelihood."""
        shift = (self.seen(position) - self.anchor.centre).astype(float)
        hessian = self.anchor.hessian
        matrix = csr_array(hessian, shape=2 * shift.shape) if len(hessian) > 1 else hessian[0]
        return float(np.sqrt(max(0.0, -shift @ (matrix @ shift))))

    def set_centre(self, centre: Array, metric: Metric) -> float:
        """Take θ̂, and a metric of the posterior's width; return the passes over all rows.

        Raises
        ------
        NonFinite
            If density or gradient isn't finite at θ̂.
        """
        self.anchor, passes = expand(self, centre, metric)
        return passes

    def noise_at(self, points: Sequence[Array], coordinates: Metric) -> Array:
        """Variance of the gradient in φ from minibatches of one row of each group.

        Exact, or by some rows where they are many: a share of a pass for each point. Of
        minibatches of n rows it is the n-th part of this.

        Returns
        -------
        list of list of arrays of shape (d,)
            For each point and group of rows.
        """
        return noise_at(self, points, coordinates)

    @property
    def noise_share(self) -> float:
        """Share of all rows that `noise_at` evaluates at each point."""
        return sum(rows_for_noise(self)) / sum(self.data.n_rows)


def second_order(gradient: MinibatchGradient) -> AroundExpansion:
    """Make second-order control variates of a gradient, those of a rewrite of its model first.

    Raises
    ------
    NotApplicable
        If there can't be any.
    """
    density = gradient.density
    if not gradient.order.independent:
        raise NotApplicable("rows are drawn without replacement")
    if density.likelihood_needs_others:
        raise NotApplicable("the likelihood depends on parameters of other steps")
    for rewrite in density.rewrites:
        if (own := rewrite.second_order(gradient)) is not None:
            return own
    derivatives = gradient.passes.second_derivatives
    if derivatives is None and not gradient.passes.second_derivatives_are_known:
        derivatives = second_derivatives(density)
    if derivatives is None:
        raise NotApplicable(NO_PREDICTORS)
    data = gradient.data
    sizes = [quadratic.size for quadratic in derivatives.quadratics]
    memory = 8 * sum(n * size for n, size in zip(data.n_kept, sizes, strict=True))
    if memory > max(FEW_BYTES, sum(array.nbytes for array in data.arrays)):
        raise NotApplicable(f"it would take {memory / 1e9:.1f} GB beside the data")
    has_sparse_hessian = density.d > MOST_UNKNOWNS
    if has_sparse_hessian:
        _check_that_rows_see_few(density, data, derivatives)
    elif _work(density, data, derivatives) > MOST_WORK:
        raise NotApplicable("there are too many parameters to sum up the slopes of all rows")
    derivatives.compile_first(density)
    return SecondOrder(gradient, derivatives, has_sparse_hessian)


def _work(density: LogDensity, data: InMemory, derivatives: SecondDerivatives) -> float:
    """Multiplications for the spread of all rows' ζ in a dense metric, by some of the rows."""
    work = 0.0
    for k, n_rows in enumerate(data.n_rows):
        n_at_hand = data.n_at_hand[k]
        n_tried = min(n_at_hand, TRIED_ROWS)
        rows = np.linspace(0, n_at_hand - 1, n_tried).astype(int)
        inputs = (*data.part(k, rows).rows, *data.resident, *density.given)
        found = derivatives.jacobian(density, k, inputs)
        if found is None:
            raise NotApplicable(NO_PREDICTORS)
        work += density.d * found.n_entries * n_rows / max(n_tried, 1)
    return work


def _check_that_rows_see_few(
    density: LogDensity, data: InMemory, derivatives: SecondDerivatives
) -> None:
    """Refuse thousands of parameters of which each row doesn't see few alone."""
    if is_jax(density.compile_kwargs.get("mode")):
        raise NotApplicable(
            f"with more than {MOST_UNKNOWNS:,} parameters it needs products of sparse matrices, "
            "which JAX does not have"
        )
    if not fits(derivatives, density, data):
        raise NotApplicable(
            f"with more than {MOST_UNKNOWNS:,} parameters a row must depend on few of them"
        )
