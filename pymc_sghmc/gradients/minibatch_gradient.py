"""Unbiased gradients from minibatches, and the two rules that all gradients of chains keep.

A gradient is called with a position and a minibatch, an explicit token: the same one can be
evaluated at two positions. It has ``density``, ``data`` and ``order``, which draws minibatches, and
its graph for compiled inner steps: ``symbolic`` and ``fixed_inputs``. Positions are raveled
unconstrained vectors of shape (d,). Knows no momentum and no iteration.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from pytensor.graph.replace import clone_replace

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.passes import Passes
from pymc_sghmc.loops.backends import resident
from pymc_sghmc.rows.data import InMemory
from pymc_sghmc.rows.epochs import Epochs
from pymc_sghmc.rows.orders import WithReplacement
from pymc_sghmc.rows.sources import Source, given_arrays
from pymc_sghmc.rows.units import GroupsInMemory
from pymc_sghmc.rows.windows import Streamed, Windows

__all__ = ["MinibatchGradient", "minibatch_gradient"]


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

    def __init__(self, density, data, order):
        self.density = density
        self.data = data
        self.order = order
        self.passes = Passes(density, data)
        self._one = np.ones((), dtype=density.weights_dtype)

    def __call__(self, position, minibatch):
        """Log-density and gradient at ``position``, both estimated from ``minibatch``."""
        weights = self.order.weights(minibatch.rows)
        return self.density(position, self._one, weights, *minibatch)

    @property
    def is_exact(self) -> bool:
        """Whether every minibatch is all of the data."""
        return not self.data.noisy_batch_sizes

    def symbolic(self, position, reports=False) -> tuple:
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
        return logp if reports else None, grad, drawn, fixed

    def fixed_inputs(self, arrays) -> tuple:
        """Return the values, now, of what doesn't change from one minibatch of ``arrays`` to the next."""
        whole = [rows for rows in self.data.whole if rows is not None]
        return (self._one, *self.data.weights, *whole, *arrays, *self.density.given)


def minibatch_gradient(
    model,
    unknowns,
    batch_size=None,
    initial_point=None,
    compile_kwargs=None,
    data=None,
    replace=True,
    may_centre=False,
    effects_of_groups=(),
) -> MinibatchGradient:
    """Make the gradient from the model's own rows, or from arrays or a loader given as ``data``.

    Parameters
    ----------
    model : pm.Model
    unknowns : Unknowns
        What a position is made of.
    batch_size, data, replace, compile_kwargs
        As documented by the samplers.
    initial_point : dict, optional
        A point of the model; default: its own.
    may_centre, effects_of_groups
        As of `LogDensity`.
    """
    if data is not None and batch_size is None:
        raise ValueError("data= holds rows for minibatches: pass a batch_size, too.")
    point = model.initial_point() if initial_point is None else initial_point
    make = partial(
        LogDensity,
        model,
        unknowns,
        batch_size,
        point,
        compile_kwargs,
        may_centre=may_centre,
        effects_of_groups=effects_of_groups,
    )
    if data is not None and not isinstance(data, Mapping):
        source = Source(data, model)
        pilot = source.pilot()
        density = make(pilot, source.n_rows)
        streamed = Streamed(source, density.graph.groups, density.sources, density.weights_dtype)
        return MinibatchGradient(density, streamed, Windows(streamed))
    density = make(None if data is None else given_arrays(model, data))
    place = partial(resident, density.function)
    of_rows = density.graph.groups, density.sources, density.weights_dtype, place
    if (marginal := density.marginal) is not None:
        width = len(marginal.values[-1])
        rows = GroupsInMemory(*of_rows, marginal.place, marginal.counts, width, marginal.checksums)
    else:
        rows = InMemory(*of_rows)
    return MinibatchGradient(density, rows, (WithReplacement if replace else Epochs)(rows))
