"""What gradients that know all rows at a centre have in common. Knows no formula of theirs."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Self

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace

from pymc_sghmc.gradients.expansion import Expansion
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.row_weights import RowWeights, Symbolic, symbolic_weights
from pymc_sghmc.protocols import Array
from pymc_sghmc.records import copied
from pymc_sghmc.rows.data import Minibatch
from pymc_sghmc.rows.orders import Order

__all__ = ["AroundCentre", "AroundExpansion"]


class AroundCentre:
    """A gradient with an ``anchor``: what it knows of all rows, and in which order it draws them.

    A copy has its own density, data and orders, as chains do; compiled functions stay the same.

    Parameters
    ----------
    gradient : MinibatchGradient
    """

    anchor: Any  # `Anchor` or `Expansion`; None before `set_centre`
    _own: tuple[str, ...] = "density", "data", "passes"  # attributes of which a copy has its own
    _placed: RowWeights | None

    def __init__(self, gradient: MinibatchGradient) -> None:
        self.density = gradient.density
        self.data = gradient.data
        self.passes = gradient.passes
        self._one = np.ones((), dtype=self.density.weights_dtype)
        self.anchor = self._placed = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        own = {name: deepcopy(getattr(self, name), memo) for name in self._own}
        if self.anchor is not None:
            own["anchor"] = self.anchor._replace(order=deepcopy(self.anchor.order, memo))
        return copied(self, **own)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_symbols": None, "_placed": None}

    def forget_centre(self) -> None:
        """Know of no rows, until a centre is set."""
        self.anchor = self._placed = None

    def without_anchor(self) -> Self:
        """Return one that knows of no rows, for passes over them."""
        return copied(self, anchor=None, _function=None, _placed=None)

    @property
    def order(self) -> Order:
        """In which order rows are drawn, by what is known at the centre."""
        return self.anchor.order


class AroundExpansion(AroundCentre):
    """One that knows quadratic functions beside all rows: its ``anchor`` is an `Expansion`.

    It has ``_symbols``, log p̃, its gradient and what `Expansion.inputs` gives them, and the
    ``_function`` that is compiled of them.
    """

    anchor: Expansion
    _function: Callable[..., Any]
    _symbols: tuple[Any, ...]

    def __call__(self, position: Array, minibatch: Minibatch) -> tuple[Array, Array]:
        """Log-density and gradient at ``position``."""
        rows, arrays = minibatch
        others = (*rows, *self.anchor.inputs, *arrays, *self.density.given)
        weights = self.order.weights(rows)
        return self._function(position, self._one, *weights, *others)

    def by_many_rows(self, positions: Sequence[Array]) -> tuple[list[Array], float]:
        """Gradients from rows that are drawn as steps draw them, as many as a pass gathers at once.

        They are the same rows for all positions. The share of all rows that they are is returned,
        too.
        """
        n_gathered = next(self.anchor.order.chunks()).rows.size
        n_minibatches = max(1, n_gathered // max(self.data.noisy_batch_sizes, default=1))
        drawn, _ = self.order.draw(np.random.default_rng(1), None, n_minibatches)
        minibatch = drawn.joined()
        share = sum(rows.size for rows in minibatch.rows) / sum(self.data.n_rows)
        return [self(position, minibatch)[1] for position in positions], share

    @property
    def knows_distance(self) -> bool:
        """Whether `distance` tells better than a chain's own coordinates how far out it is."""
        return False

    def distance(self, position: Array) -> float:
        """Return how far out a position is for this gradient, in sds, where that is known."""
        raise NotImplementedError

    def symbolic(self, position: pt.TensorVariable, reports: bool = False) -> Symbolic:
        """Return log p̃ and ∇ log p̃ at a symbolic position, and their inputs.

        See `MinibatchGradient.symbolic`.
        """
        graph = self.density.graph
        (logp, grad, inputs) = self._symbols
        weights, drawn, fixed = symbolic_weights(graph, self.data, self.order)
        new = {graph.position: position, **weights}
        logp, grad = clone_replace([logp, grad], new, rebuild_strict=False)
        return logp, grad, drawn, [graph.prior_weight, *fixed, *inputs, *graph.arrays, *graph.given]

    def fixed_inputs(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        """Return the inputs that stay the same from one minibatch of ``arrays`` to the next."""
        anchor = self.anchor
        if self._placed is None or self._placed.order is not anchor.order:
            self._placed = RowWeights(self.density.function, anchor.order, anchor.inputs)
        fixed = self._placed.fixed(self.data)
        others = (*arrays, *self.density.given)
        return (self._one, *fixed, *self._placed.tables, *others)
