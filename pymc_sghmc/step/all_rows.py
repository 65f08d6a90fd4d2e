"""Gradients and log-likelihoods of all rows that a step reads, those of ``data=`` too.

What a diagnostic needs of a step's data. Knows gradients and rows, no chain.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pymc.model import Model

from pymc_sghmc.checks import starting_point
from pymc_sghmc.exceptions import NeedsAllRows
from pymc_sghmc.gradients.all_rows_hessian import hessian_of_all_rows
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.minibatch_gradient import minibatch_gradient
from pymc_sghmc.gradients.row_log_likelihood import RowLogLikelihood
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.models.graphs import minibatch_outputs
from pymc_sghmc.models.jumps import jumping_unknowns
from pymc_sghmc.models.outcomes import mark_of_model
from pymc_sghmc.models.row_model import row_model
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.containers import containers_of
from pymc_sghmc.rows.data import InMemory
from pymc_sghmc.rows.given_data import given_data
from pymc_sghmc.step.gradients import model_by_row, pool_of

__all__ = ["AllRows", "GivenRows"]


class GivenRows:
    """The model and the arguments of a step, of which its rows can be found again.

    Parameters
    ----------
    model : pm.Model
    arguments : dict
        Values of all shared arguments.
    data : InMemory, optional
        That the step's minibatches are of.
    """

    def __init__(
        self, model: Model, arguments: Mapping[str, Any], data: InMemory | None = None
    ) -> None:
        self.model = model
        self._arguments = arguments
        self._data = data

    @property
    def data_mark(self) -> float:
        """A number that changes with what was observed; NaN where it isn't known."""
        if self._arguments["data"] is None or self._data is None:
            return mark_of_model(self.model)  # pm.set_data may have changed it
        return self._data.data_mark

    def full_data(self, compile_kwargs: Mapping[str, Any] | None = None) -> "AllRows | None":
        """Compile the gradient of all rows; None where the model itself holds them."""
        if self._arguments["data"] is None:
            return None
        return self.all_rows(compile_kwargs)

    def all_rows(self, compile_kwargs: Mapping[str, Any] | None = None) -> "AllRows":
        """Compile the gradient of all rows, wherever they are."""
        return AllRows(self.model, self._arguments, self.data_mark, compile_kwargs)

    def log_likelihood(
        self, name: str, compile_kwargs: Mapping[str, Any] | None = None
    ) -> RowLogLikelihood | None:
        """Return the log-likelihood of each row of ``data=`` of an observed variable, by its name.

        None where the model itself holds its rows.
        """
        arguments = self._arguments
        if arguments["data"] is None:
            return None
        point, unknowns, _ = _without_rewrites(self.model, arguments)
        data = given_data(arguments["data"], containers_of(self.model))
        batch_size = arguments["batch_size"]
        rows = row_model(self.model, unknowns, batch_size, point, data.arrays, data.n_rows)
        if all(name not in group.terms for group in rows.groups):
            return None
        options = compile_kwargs or arguments["compile_kwargs"]
        return RowLogLikelihood(rows, self.model, name, data.source, options)


def _without_rewrites(
    model: Model, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], Unknowns, Rewriting]:
    """Return a point, all unknowns, and a rewriting that leaves the model's coordinates alone."""
    point = starting_point(model, arguments["initial_point"])
    unknowns = Unknowns(model.continuous_value_vars, point)
    return point, unknowns, Rewriting(integrated=(), recover=True, may_centre=False)


class AllRows:
    """Full-data gradients in the model's own coordinates, with all unknowns and no rewrites.

    Parameters
    ----------
    model : pm.Model
    arguments : dict
        Values of all shared arguments of a step.
    data_mark : float
        See `GivenRows.data_mark`.
    compile_kwargs : dict, optional
        Default: the step's.
    """

    def __init__(
        self,
        model: Model,
        arguments: Mapping[str, Any],
        data_mark: float,
        compile_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.data_mark = data_mark
        point, unknowns, rewriting = _without_rewrites(model, arguments)
        data = arguments["data"]
        pool = None if data is None else pool_of(arguments)
        try:
            rows, source = model_by_row(
                model, unknowns, arguments["batch_size"], point, data, rewriting, pool
            )
        except NeedsAllRows:
            if data is not None or minibatch_outputs([model.logp()]):
                raise
            rows, source = model_by_row(model, unknowns, None, point, None, rewriting)
        self._density = LogDensity(rows, compile_kwargs or arguments["compile_kwargs"])
        gradient = minibatch_gradient(rows, self._density, source)
        self._passes = gradient.passes
        self._data = gradient.data
        self._is_streamed = source is not None

    def gradients(self, draws: Mapping[str, Array]) -> Array:
        """Return ∇log p of all rows, (chain, draw, d), from one pass over them.

        Parameters
        ----------
        draws : dict of {str: array}
            Of each value variable, on the unconstrained scale, (chain, draw, ...).
        """
        n_chains, n_draws = next(iter(draws.values())).shape[:2]
        points = [
            {name: values[at] for name, values in draws.items()}
            for at in np.ndindex(n_chains, n_draws)
        ]
        unknowns = self._density.unknowns
        positions = [unknowns.ravel(point) for point in points]
        with np.errstate(all="ignore"):
            gradients = self._passes.gradients_at(
                positions, lambda i: self._density.condition_on(points[i])
            )
        return gradients.reshape(n_chains, n_draws, -1)

    @property
    def n_rows(self) -> list[int]:
        """Number of rows of each group of observations."""
        return self._data.n_rows

    def hessian(self, position: Array, factor: Array) -> Array:
        """Return the Hessian of −log p given all rows, (d, d). See `hessian_of_all_rows`."""
        with np.errstate(all="ignore"):
            return hessian_of_all_rows(self._passes, position, factor)

    def jumping_variables(self, draws: Mapping[str, Array]) -> list[str]:
        """Return the names of the variables at which the log-density jumps, near a draw.

        Of a stream only the rows at hand are looked at.
        """
        if not self._density.conditional:
            return []
        point = {name: values[-1, -1] for name, values in draws.items()}
        self._density.condition_on(point)
        subset = None
        if self._is_streamed:
            subset = [np.arange(n) for n in self._data.n_at_hand]
        unknowns = self._density.unknowns
        names = {value.name: self.model.values_to_rvs[value].name for value in unknowns.variables}
        places = {names[name]: unknowns.places[name] for name in self._density.conditional}
        return jumping_unknowns(
            lambda position: self._passes.log_density(position, subset)[0],
            unknowns.ravel(point),
            places,
        )
