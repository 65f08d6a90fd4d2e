"""Coordinates θ in which the linear predictors of rows are linear, beside a chain's φ.

Where effects are partially centred, a row's linear predictor is in the chain's coordinates a
product of an effect and a power of its scale. In the effects themselves it is linear, and doesn't
depend on the scale. Quadratic functions beside rows are written in those, and the chain rule
carries their gradient to the chain's. Knows graphs and densities, no rewrite of a model and no
sampler.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import rewrite_pregrad
from pytensor.graph.replace import clone_replace
from scipy.sparse import diags_array

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.at_positions import at_positions
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.jacobians import jacobian
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import InMemory

__all__ = ["LinearRows", "RowCoordinates"]


class LinearRows(NamedTuple):
    """Rows as graphs of θ, which they see of the parameters."""

    terms: Sequence[pt.TensorVariable]  # log-likelihoods, as graphs of ...
    variables: Sequence[pt.TensorVariable]  # ... θ, one for each parameter
    seen: pt.TensorVariable  # θ, raveled and joined, as a graph of the chain's variables


class RowCoordinates:
    """θ, and its derivatives, at a position φ of a chain. Without ``rows`` θ is φ.

    Parameters
    ----------
    density : LogDensity
        With its graph.
    rows : LinearRows, optional
    """

    def __init__(self, density: LogDensity, rows: LinearRows | None = None) -> None:
        self._seen: pt.TensorVariable | None = None
        self._function: Callable[..., list[Array]] | None = None
        if rows is None:
            return
        graph = density.graph
        own = graph.position
        self._shapes = [np.shape(graph.model.point[v.name]) for v in graph.variables]
        self._seen = rows.seen
        self._function = at_positions(density, graph.at_position([rows.seen]), [own], [])

    @property
    def are_own(self) -> bool:
        """Whether θ is φ."""
        return self._function is None

    def at(self, position: Array, density: LogDensity, data: InMemory) -> Array:
        """θ at a position."""
        if self._function is None:
            return position.astype(density.dtype, copy=False)
        [theta] = self._of(position[None], density, data)
        return theta

    def derivatives(self, position: Array, density: LogDensity, data: InMemory) -> Any:
        """∂θ/∂φ at a position, an array or csr_array (d, d); None where θ is φ.

        By central differences: the noise that is found with it needs no more digits.

        Raises
        ------
        NonFinite
            If it can't be found, for lack of finite numbers.
        """
        if self._function is None:
            return None
        step = np.finfo(density.dtype).eps ** (1 / 3)
        # a number far from zero is rounded more coarsely, so that it takes a longer step
        scales = np.maximum(np.abs(position), 1.0)

        def moved(directions: Array) -> Array:
            lengths = np.abs(directions).max(axis=1, initial=0.0, keepdims=True)
            lengths = np.where(lengths > 0, lengths, 1.0) / step
            shifts = scales * directions / lengths
            ends = np.concatenate([position + shifts, position - shifts])
            there, back = np.split(self._of(ends, density, data).astype(float), 2)
            return ((there - back) * (lengths / 2))[:, :, None]

        found = jacobian(moved, self._shapes, step)
        if found is None:
            raise NonFinite(position, np.full(position.size, np.nan), np.nan)
        return found.J @ diags_array(1 / scales)

    def _of(self, positions: Array, density: LogDensity, data: InMemory) -> Array:
        assert self._function is not None
        others = (*data.part(None, None).arrays, *density.given)
        [thetas] = self._function(positions.astype(density.dtype, copy=False), *others)
        return thetas

    def with_prior(
        self,
        density: LogDensity,
        prior_weight: pt.TensorVariable | float,
        outputs: Sequence[pt.TensorVariable],
    ) -> list[pt.TensorVariable]:
        """Return graphs of θ as such of φ, the gradient among them, and the log-density of priors.

        Prior and rows depend on φ by way of the same change of coordinates: their gradients go back
        through it together, once.

        Parameters
        ----------
        density : LogDensity
            With its graph, whose position stands for θ before and for φ afterwards.
        prior_weight : TensorVariable or float
        outputs : list of TensorVariable
            The last is a gradient by θ, without the prior.

        Returns
        -------
        list of TensorVariable
            The outputs, the last of them the gradient by φ and with the prior's, and the weighted
            log-density of the prior.
        """
        graph = density.graph
        own = graph.position
        model = graph.model
        if self._seen is None:
            *others, gradient = outputs
            prior = pt.concatenate([(prior_weight * g).ravel() for g in model.prior_gradients])
            log_prior, prior = graph.at_position([prior_weight * model.log_prior, prior])
            return [*others, gradient + prior, log_prior]
        # in one call, so that both stay graphs of the same operations
        written = rewrite_pregrad(clone_replace([model.log_prior, self._seen]))
        log_prior, theta = graph.at_position(written)
        log_prior = prior_weight * log_prior
        *others, gradient = clone_replace(list(outputs), {own: theta}, rebuild_strict=False)
        gradient = pt.grad(log_prior, own, known_grads={theta: gradient})
        return [*others, gradient, log_prior]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # functions without a state

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}
