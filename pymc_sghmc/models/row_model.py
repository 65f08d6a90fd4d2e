"""A PyMC model as one value: a prior plus a sum over independent rows.

Rewrites of the value, such as other coordinates or effects that are integrated out, replace its
graphs and add inputs. Whoever compiles a `RowModel` needs to know none of them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pytensor.tensor as pt

from numpy.typing import DTypeLike
from pymc.model import Model
from pymc.pytensorf import rewrite_pregrad
from pytensor.graph.replace import clone_replace
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.models.contract import BatchSize, Group, minibatch_log_density
from pymc_sghmc.models.graphs import substituted
from pymc_sghmc.models.known_checks import without_known_checks
from pymc_sghmc.models.outcomes import Outcome, outcomes_of
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.models.upper_tails import with_upper_tails

__all__ = ["Input", "RowLikelihood", "RowModel", "row_model"]


@dataclass(frozen=True)
class Input:
    """An input of compiled graphs that is no parameter: quadrature sites, centring weights, ..."""

    symbol: TensorVariable
    value: Callable[[], np.ndarray]  # asked for at each call


@dataclass(frozen=True)
class RowLikelihood:
    """Log-likelihood of chosen rows of one group of observations, or of clusters of such rows."""

    group: Group  # names of the observed variables, and the size of a minibatch
    log_likelihood: TensorVariable  # (n,), in `RowModel.variables` and the group's batches
    index: TensorVariable  # (n,), which rows or clusters
    row_numbers: TensorVariable  # numbers of the data rows that these rows or clusters read
    is_clustered: bool = False  # whether these are clusters of rows


@dataclass(frozen=True)
class RowModel:
    """A model's log-density by row, as graphs of its parameters.

    Attributes
    ----------
    parameters : Unknowns
        What a position is made of.
    point : dict of {str: array}
        A point of the model: shapes, and the first values of what other steps sample.
    variables : tuple of TensorVariable
        Of the graphs, one for each parameter: the model's value variables, or coordinates that
        have taken their places.
    log_prior : TensorVariable
        Scalar: all that is not a sum over rows.
    likelihoods : tuple of RowLikelihood
    arrays : tuple of TensorVariable
        Stand for all rows of the data, likelihood by likelihood.
    sources : tuple
        The data: arrays, or the model's data containers.
    conditioned_on : tuple of TensorVariable
        Value variables that other steps sample.
    held : dict of {TensorVariable: TensorVariable}
        Variables that stand for graphs until the gradient is taken, and these graphs: gradients
        don't pass through them. (PyTensor's ``disconnected_grad`` doesn't survive
        PyMC's ``rewrite_pregrad``, in 5.28 and in 6.)
    rewrites : tuple
        What has changed the model's graphs, see `gradients.rewrite.Rewrite`.
    make_data : callable, optional
        Makes what holds the rows in memory, where it has to be something else than usual.
    data_rows : int
        Number of rows of data that aren't the model's own; 0: it holds all rows.
    outcomes : tuple of Outcome
        What was observed.
    """

    parameters: Unknowns
    point: Mapping[str, Any]
    variables: tuple[TensorVariable, ...]
    log_prior: TensorVariable
    likelihoods: tuple[RowLikelihood, ...]
    arrays: tuple[TensorVariable, ...]
    sources: tuple[Any, ...]
    conditioned_on: tuple[TensorVariable, ...]
    held: Mapping[TensorVariable, TensorVariable] = field(default_factory=dict)
    rewrites: tuple[Any, ...] = ()
    make_data: Callable[..., Any] | None = None
    data_rows: int = 0
    outcomes: tuple[Outcome, ...] = ()

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Inputs that rewrites have added."""
        return tuple(entry for rewrite in self.rewrites for entry in rewrite.inputs)

    @property
    def groups(self) -> list[Group]:
        """The groups of observations, in the order of the likelihoods."""
        return [likelihood.group for likelihood in self.likelihoods]

    @property
    def terms(self) -> list[TensorVariable]:
        """Log-likelihoods by row, in the order of the likelihoods."""
        return [likelihood.log_likelihood for likelihood in self.likelihoods]

    @property
    def is_clustered(self) -> bool:
        """Whether some likelihood is one of clusters of rows."""
        return any(likelihood.is_clustered for likelihood in self.likelihoods)

    @cached_property
    def prior_gradients(self) -> list[TensorVariable]:
        """Gradient of the log-prior for each of the variables."""
        log_prior = rewrite_pregrad(clone_replace([self.log_prior])[0])
        gradients: list[TensorVariable] = pt.grad(
            log_prior, list(self.variables), disconnected_inputs="ignore"
        )
        return gradients

    @property
    def gathered(self) -> dict[TensorVariable, TensorVariable]:
        """Of each batch of the groups, the rows of the arrays that take its place."""
        arrays = iter(self.arrays)
        return {
            batch: next(arrays)[likelihood.row_numbers].astype(batch.dtype)
            for likelihood in self.likelihoods
            for batch in likelihood.group.batches
        }

    def completed(
        self,
        graphs: Iterable[TensorVariable],
        replacements: Mapping[TensorVariable, TensorVariable],
    ) -> list[TensorVariable]:
        """Put in what gradients don't pass through, rows of the arrays for batches, and others.

        Parameters
        ----------
        graphs : iterable of TensorVariable
        replacements : dict of {TensorVariable: TensorVariable}
            What else is to be replaced, and by what.
        """
        outputs = list(graphs)
        if self.held:
            outputs = substituted(outputs, self.held)
        return substituted(outputs, {**self.gathered, **replacements})


def row_model(
    model: Model,
    parameters: Unknowns,
    batch_size: BatchSize,
    point: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    n_rows: int | None = None,
    integrated: tuple[TensorVariable, ...] = (),
) -> RowModel:
    """Cut a model's log-density into rows.

    Parameters
    ----------
    model : pm.Model
    parameters : Unknowns
        What a position is made of.
    batch_size : int, dict of {str: int}, "auto" or None
        See `minibatch_log_density`.
    point : dict
        A point of the model.
    data : dict of {str: array}, optional
        Arrays that take the place of what the model's ``pm.Data`` of these names hold.
    n_rows : int, optional
        Number of rows of the data, if ``data`` holds only some of them.
    integrated : tuple of TensorVariable
        Random variables that a rewrite will integrate out: their priors are left out.

    Raises
    ------
    ValueError
        If the data can't be cut into independent rows, or ``batch_size`` doesn't fit them.
    """
    data = data or {}
    lengths = {name: n_rows or len(array) for name, array in data.items()}
    log_prior, groups = minibatch_log_density(model, batch_size, point, lengths, integrated)
    containers = [source for group in groups for source in group.full_data]
    sources = [data.get(source.name, source) for source in containers]
    arrays = [
        _array_like(container, source.dtype, f"data_{i}")
        for i, (container, source) in enumerate(zip(containers, sources, strict=True))
    ]
    indices = [pt.lvector(f"rows_{i}") for i in range(len(groups))]
    terms = without_known_checks([group.log_likelihood for group in groups])
    terms = with_upper_tails(terms)
    likelihoods = [
        RowLikelihood(group, term, index, index)
        for group, term, index in zip(groups, terms, indices, strict=True)
    ]
    own = {*parameters.variables, *(model.rvs_to_values[rv] for rv in integrated)}
    return RowModel(
        parameters=parameters,
        point=point,
        variables=tuple(parameters.variables),
        log_prior=log_prior,
        likelihoods=tuple(likelihoods),
        arrays=tuple(arrays),
        sources=tuple(sources),
        conditioned_on=tuple(v for v in model.value_vars if v not in own),
        data_rows=max(lengths.values(), default=0),
        outcomes=outcomes_of(model, data),
    )


def _array_like(container: TensorVariable, dtype: DTypeLike, name: str) -> TensorVariable:
    """Return a variable for all rows of a container, of any number and this type."""
    shape = (None, *container.type.shape[1:])
    return container.type.clone(dtype=str(dtype), shape=shape)(name)
