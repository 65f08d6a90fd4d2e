"""Weights of drawn rows inside compiled steps: the inverse of how often a row is drawn."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pymc_sghmc.gradients.density import Graph
from pymc_sghmc.loops.backends import resident
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import InMemory
from pymc_sghmc.rows.orders import ByLeverage, Order

__all__ = ["RowWeights", "Symbolic", "symbolic_weights"]

# log p̃ or None, ∇ log p̃, rows of minibatches and fixed inputs: see `MinibatchGradient.symbolic`
Symbolic = tuple[
    pt.TensorVariable | None, pt.TensorVariable, list[pt.TensorVariable], list[pt.TensorVariable]
]


def symbolic_weights(
    graph: Graph, data: InMemory, order: Order
) -> tuple[
    dict[pt.TensorVariable, pt.TensorVariable], list[pt.TensorVariable], list[pt.TensorVariable]
]:
    """Return weights of drawn rows as functions of their numbers, and the inputs of these.

    Returns
    -------
    weights : dict
        To put in the place of weights of the graph.
    drawn : list of TensorVariable
        The rows of a minibatch of each group that isn't used whole.
    fixed : list of TensorVariable
        What `RowWeights.fixed` gives.
    """
    weights = {}
    drawn = []
    fixed = []
    for k, (row, weight, noisy) in enumerate(
        zip(graph.rows, graph.row_weights, data.is_noisy, strict=True)
    ):
        if noisy and isinstance(order, ByLeverage):
            counts = pt.vector("counts", dtype=order.counts[k].dtype)
            size = pt.scalar("pool_size", dtype=weight.dtype)
            weights[weight] = (size / row.shape[0] / counts[row]).astype(weight.dtype)
            fixed += [size, counts]
        else:
            fixed += [weight] if noisy else [weight, row]
        drawn += [row] if noisy else []
    return weights, drawn, fixed


class RowWeights:
    """What compiled steps take for the weights of an order's rows, and for tables of all rows.

    Parameters
    ----------
    function : compiled function
        Says where arrays have to lie.
    order : WithReplacement, ByLeverage or Epochs
    tables : list of array
    """

    def __init__(self, function: Callable[..., Any], order: Order, tables: Sequence[Array]) -> None:
        self.order = order
        counts = order.counts if isinstance(order, ByLeverage) else []
        self._counts = [resident(function, c) for c in counts]
        self.tables = [resident(function, table) for table in tables]
        self._fixed: list[Any] = []
        self._weights: tuple[Array, ...] | None = None

    def fixed(self, data: InMemory) -> list[Any]:
        """Return the values, now, of the inputs that `symbolic_weights` names ``fixed``."""
        if self._weights is not data.weights:  # minibatches have another size
            self._fixed = self._of(data)
            self._weights = data.weights
        return self._fixed

    def _of(self, data: InMemory) -> list[Any]:
        fixed = []
        for k, (weight, rows) in enumerate(zip(data.weights, data.whole, strict=True)):
            if rows is not None:
                fixed += [weight, rows]
            elif isinstance(self.order, ByLeverage):
                size = np.asarray(self.order.pools[k].size, dtype=weight.dtype)
                fixed += [size, self._counts[k]]
            else:
                fixed += [weight]
        return fixed
