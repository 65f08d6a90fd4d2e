"""Control variates: a minibatch gradient whose noise vanishes at a centre.

Knows gradients and rows, no samplers and no way of finding a centre.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.around_centre import AroundCentre
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.row_weights import RowWeights, Symbolic, symbolic_weights
from pymc_sghmc.models.graphs import parts_of_vector
from pymc_sghmc.models.row_terms import difference, row_terms
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import InMemory, Minibatch
from pymc_sghmc.rows.orders import Order

__all__ = ["Anchor", "ControlVariates"]

N_LEVERAGE_PROBES = 16  # pairs of points, or fewer above ...
N_FEW_ROWS = 2_000_000
FEW_BYTES = 2**26  # that tables may have however small the data are


class Anchor(NamedTuple):
    """What control variates know of all rows."""

    centre: Array  # θ̂, (d,)
    logp: float  # log-likelihood at θ̂
    gradient: Array  # ∇ log-likelihood at θ̂, (d,)
    order: Order  # in which rows are drawn: by their leverage, or that of the plain gradient
    tables: list[Array]  # of each group: what `row_terms` remembers of each row; empty without them


class ControlVariates(AroundCentre):
    """A gradient whose noise vanishes at a centre θ̂ (Baker, Fearnhead, Fox & Nemeth 2019).

    ∇Ũ(θ) = ∇U(θ̂) + [minibatch gradient at θ − the same minibatch's gradient at θ̂], the prior
    exact at θ. Unbiased for every centre; near it the noise is that of the difference alone.

    Where rows are drawn independently, it is with a probability that grows with their leverage, how
    much of the posterior's curvature they bring: see `ByLeverage`.

    Parameters
    ----------
    gradient : MinibatchGradient
    """

    anchor: Anchor
    row_function: Any  # compiled; None where rows are not drawn independently
    _symbols: tuple[Any, ...] | None
    _own = (*AroundCentre._own, "_plain_order")

    def __init__(self, gradient: MinibatchGradient) -> None:
        super().__init__(gradient)
        self._plain_order = gradient.order
        self._symbols = self.row_function = None
        if gradient.order.independent:
            self._symbols, terms = _with_row_terms(self.density, self.data) or (None, None)
            density = self.density
            self.row_function = density.by_row if terms is None else density.row_function(terms)
        self.has_tables = self._symbols is not None
        self._zero = np.zeros_like(self._one)

    def set_centre(self, centre: Array, metric: Metric) -> int:
        """Take θ̂, and a metric of the posterior's width; return the passes over all rows."""
        dtype = self.density.dtype
        position = centre.astype(dtype)
        order = self._plain_order
        tables = []
        passes = 1
        if order.independent:
            few = sum(self.data.n_rows) <= N_FEW_ROWS
            shape = (N_LEVERAGE_PROBES if few else N_LEVERAGE_PROBES // 4, centre.size)
            # wider than the posterior, whose tails count, too
            z = 1.5 * np.random.default_rng(0).standard_normal(shape)
            ends = [centre + sign * shift for shift in metric.to_thetas(z) for sign in (1, -1)]
            points = [position, *(point.astype(dtype) for point in ends)]
            with np.errstate(all="ignore"):
                order = by_leverage = self.passes.by_leverage(self.row_function, points)
            passes += len(points)
            if self.has_tables:
                tables = self.passes.tables(self.row_function, position, by_leverage)
                passes += 1
        self.anchor = Anchor(position, *self._likelihood(position), order, tables)
        return passes

    def move_anchor(self) -> None:
        """Compute the log-likelihood and its gradient at θ̂ anew: one pass over all rows."""
        logp, grad = self._likelihood(self.anchor.centre)
        self.anchor = self.anchor._replace(logp=logp, gradient=grad)

    def _likelihood(self, centre: Array) -> tuple[float, Array]:
        logp, grad = self.passes.likelihood(centre)
        if not (np.isfinite(logp) and np.isfinite(grad).all()):
            raise NonFinite(centre, grad, float(logp))
        return float(logp), grad.astype(self.density.dtype)

    def __call__(self, position: Array, minibatch: Minibatch) -> tuple[Array, Array]:
        """Log-density and gradient at ``position``."""
        centre, anchor_logp, anchor, order, _ = self.anchor
        weights = order.weights(minibatch.rows)
        logp, grad = self.density(position, self._one, weights, *minibatch)
        # The prior doesn't count at θ̂: it is exact at θ.
        at_centre = self.density(centre, self._zero, weights, *minibatch)
        return logp - at_centre[0] + anchor_logp, grad - at_centre[1] + anchor

    def noise_over_rows(
        self, positions: Sequence[Array], coordinates: Metric, rng: np.random.Generator
    ) -> Array:
        """Diagonal of V in φ, its mean over ``positions``, from all rows with random signs.

        Unbiased, and best where minibatches tell least: of an effect that few rows know of. Three
        passes for each position.
        """
        passes = self.passes
        centre = self.anchor.centre
        total = np.zeros(self.density.d)
        everything = tuple(np.arange(n) for n in self.data.n_rows)
        weights = self.anchor.order.weights(everything)
        for k, n in enumerate(self.data.batch_sizes):
            if not self.data.is_noisy[k]:
                continue
            ones = np.ones(self.data.n_rows[k])
            n_rows = self.data.n_rows[k]
            roots = np.sqrt(weights[k].astype(float) * n_rows)  # 1/√q, q a row's probability
            resting = passes.weighted_gradient(centre, k, ones)
            for position in positions:
                signs = rng.choice([-1.0, 1.0], size=n_rows)
                signed = [passes.weighted_gradient(x, k, signs * roots) for x in (position, centre)]
                mean = passes.weighted_gradient(position, k, ones) - resting
                # Σ g²/q − (Σ g)² in the mean over signs
                root = signed[0] - signed[1] - (signs / roots).sum() * mean
                total += np.square(coordinates.pull_back(root)) / n / len(positions)
        return total

    def symbolic(self, position: pt.TensorVariable, reports: bool = False) -> Symbolic:
        """Return None, ∇ log p̃ at a symbolic position, and its inputs.

        See `MinibatchGradient.symbolic`.
        """
        graph = self.density.graph
        weights, drawn, fixed = symbolic_weights(graph, self.data, self.order)
        if self._symbols is None:
            own = graph.position
            prior_weight = graph.prior_weight
            grad = graph.gradient
            centre = own.type("centre_of_control_variates")
            anchor = own.type("anchor")
            tables = []
            none = {own: centre, prior_weight: pt.zeros((), dtype=prior_weight.dtype)}
            [there] = clone_replace([grad], none, rebuild_strict=False)
            grad = grad - there + anchor
        else:
            grad, centre, anchor, tables = self._symbols
        [grad] = clone_replace([grad], {graph.position: position, **weights}, rebuild_strict=False)
        others = [centre, anchor, *tables, *graph.arrays, *graph.given]
        return None, grad, drawn, [graph.prior_weight, *fixed, *others]

    def fixed_inputs(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        """Return the inputs that stay the same from one minibatch of ``arrays`` to the next."""
        centre, _, anchor, order, tables = self.anchor
        if self._placed is None or self._placed.order is not order:
            self._placed = RowWeights(self.density.function, order, tables)
        fixed = self._placed.fixed(self.data)
        others = (*arrays, *self.density.given)
        return (self._one, *fixed, centre, anchor, *self._placed.tables, *others)


def _with_row_terms(
    density: LogDensity, data: InMemory
) -> tuple[tuple[Any, ...], list[pt.TensorVariable]] | None:
    """Return ∇ log p̃ with what is remembered of each row in place of its gradient at θ̂, or None.

    None where the likelihood can't be cut that way, where it would take up much more memory, or
    where other steps move it at each draw.
    """
    if density.likelihood_needs_others or density.graph.model.is_clustered:
        return None
    graph = density.graph
    variables = density.graph.variables
    batches = [group.batches for group in graph.model.groups]
    cut = row_terms(graph.model.terms, variables, batches, graph.model.point)
    if cut is None:
        return None
    numbers = [sum(c.size for c in cuts) for cuts in cut.cuts]
    size = 8 * sum(n * n_rows for n, n_rows in zip(numbers, data.n_kept, strict=True))
    if size > max(FEW_BYTES, sum(array.nbytes for array in data.arrays) // 4):
        return None
    own = graph.position
    tables = [pt.matrix(f"row_terms_{k}", dtype=term.dtype) for k, term in enumerate(cut.terms)]
    cached = [table[row] for table, row in zip(tables, graph.rows, strict=True)]
    centre = [variable.type(variable.name) for variable in variables]
    there = difference(cut, graph.row_weights, cached, centre)
    weighted = [graph.prior_weight * g for g in graph.model.prior_gradients]
    grad = pt.concatenate([(p + g).ravel() for p, g in zip(weighted, there, strict=True)])
    joined_centre = own.type("centre")
    parts = parts_of_vector(own, variables, graph.model.point)
    parts |= parts_of_vector(joined_centre, centre, graph.model.point)
    grad, *terms = graph.model.completed([grad, *cut.terms], parts)
    anchor = own.type("anchor")
    return (grad.astype(own.dtype) + anchor, joined_centre, anchor, tables), terms
