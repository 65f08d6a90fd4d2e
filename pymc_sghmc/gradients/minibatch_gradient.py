"""Unbiased gradients from minibatches, and the two rules that all gradients of chains keep.

A gradient is called with a position and a minibatch, an explicit token: the same one can be
evaluated at two positions. It has ``density``, ``data`` and ``order``, which draws minibatches, and
its graph for compiled inner steps: ``symbolic`` and ``fixed_inputs``. Positions are raveled
unconstrained vectors of shape (d,). Knows no momentum and no iteration.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.passes import Passes
from pymc_sghmc.gradients.row_weights import Symbolic
from pymc_sghmc.loops.backends import resident
from pymc_sghmc.models.row_model import RowModel
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import InMemory, Minibatch, PoolPlan
from pymc_sghmc.rows.epochs import Epochs
from pymc_sghmc.rows.orders import Order, WithReplacement
from pymc_sghmc.rows.sources import Source
from pymc_sghmc.rows.windows import Streamed, Windows

__all__ = ["MinibatchGradient", "minibatch_gradient"]

FEW_ROWS = 3000  # which take less time than the operations with the numbers of effects


class MinibatchGradient:
    """Unbiased log-density and gradient from a minibatch (eq. 5 of Chen et al.).

    −∇Ũ(θ) = N/n Σ_batch ∇log p(x_i|θ) + ∇log p(θ); without minibatches, the exact gradient.
    With ``batch_size`` = N every row is used once and the gradient is exact, too.

    Parameters
    ----------
    density : LogDensity
    data : InMemory or Streamed
    order : WithReplacement, Epochs or Windows
    """

    def __init__(self, density: LogDensity, data: InMemory, order: Order) -> None:
        self.density = density
        self.data = data
        self.order = order
        self.passes = Passes(density, data)
        self._one = np.ones((), dtype=density.weights_dtype)

    def __call__(self, position: Array, minibatch: Minibatch) -> tuple[Array, Array]:
        """Log-density and gradient at ``position``, both estimated from ``minibatch``."""
        weights = self.order.weights(minibatch.rows)
        return self.density(position, self._one, weights, *minibatch)

    @property
    def is_exact(self) -> bool:
        """Whether every minibatch is all of the data."""
        return not self.data.noisy_batch_sizes

    def symbolic(self, position: pt.TensorVariable, reports: bool = False) -> Symbolic:
        """Return ∇ log p̃ at a symbolic position, and what it takes.

        Parameters
        ----------
        position : TensorVariable
        reports : bool, default False
            Whether log p̃ is asked for, although it costs.

        Returns
        -------
        logp : TensorVariable or None
            log p̃, where it is asked for or costs next to nothing beside the gradient: then steps
            of a draw need no further one that reports it.
        gradient : TensorVariable
        rows : list of TensorVariable
            The rows of a minibatch of each group that isn't used whole.
        fixed : list of TensorVariable
            What `fixed_inputs` gives.
        """
        graph = self.density.graph
        is_noisy = self.data.is_noisy
        here = {graph.position: position}
        logp, grad = clone_replace([graph.logp, graph.gradient], here, rebuild_strict=False)
        whole = [row for row, noisy in zip(graph.rows, is_noisy, strict=True) if not noisy]
        drawn = [row for row, noisy in zip(graph.rows, is_noisy, strict=True) if noisy]
        others = [*whole, *graph.arrays, *graph.given]
        fixed = [graph.prior_weight, *graph.row_weights, *others]
        return logp if reports or self._reports_quickly else None, grad, drawn, fixed

    @property
    def _reports_quickly(self) -> bool:
        """Whether log p̃ costs less in each step of a draw than in a further one in Python.

        In coordinates of effects a density has hundreds of operations, each of which takes longer
        there than few rows do.
        """
        has_few_rows = sum(self.data.n_rows) <= FEW_ROWS
        return self.is_exact and has_few_rows and self.density.changes_coordinates

    def fixed_inputs(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        """Return the inputs that stay the same from one minibatch of ``arrays`` to the next."""
        whole = [rows for rows in self.data.whole if rows is not None]
        return (self._one, *self.data.weights, *whole, *arrays, *self.density.given)


def minibatch_gradient(
    rows: RowModel,
    density: LogDensity,
    source: Source | None = None,
    replace: bool = True,
    pool: PoolPlan | None = None,
) -> MinibatchGradient:
    """Make the gradient of a density from its rows in memory, or in windows of a source.

    Parameters
    ----------
    rows : RowModel
    density : LogDensity
        Compiled of these rows.
    source : Source, optional
        Yields the rows; default: they are in memory.
    replace : bool, default True
        Whether rows in memory are drawn with replacement.
    pool : PoolPlan, optional
        Of rows of a source, to draw from; default: its windows.
    """
    if source is not None:
        dtype = density.weights_dtype
        streamed = Streamed(source, rows.groups, density.sources, dtype, pool)
        streamed.outcomes = rows.outcomes
        order = Windows(streamed) if pool is None else WithReplacement(streamed)
        return MinibatchGradient(density, streamed, order)
    make_data = rows.make_data or InMemory
    place = partial(resident, density.function)
    data = make_data(rows.groups, density.sources, density.weights_dtype, place)
    data.outcomes = rows.outcomes
    return MinibatchGradient(density, data, (WithReplacement if replace else Epochs)(data))
