"""The compiled log-density of a `RowModel` on any of its rows, and its gradient.

The arrays and the numbers of the rows are inputs of the compiled function, which holds no data; the
prior and each row have weights, so that one function serves minibatches, parts and the whole. Knows
graphs and what other steps sample; draws no rows.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import rewrite_pregrad
from pytensor.gradient import NullTypeGradError

from pymc_sghmc.compat import ancestors
from pymc_sghmc.loops.backends import shared_values
from pymc_sghmc.loops.numpy_mode import ThreadSafe, compile_for_many_rows
from pymc_sghmc.models.graphs import parts_of_vector
from pymc_sghmc.models.jumps import conditional_unknowns
from pymc_sghmc.models.row_model import RowModel
from pymc_sghmc.protocols import Array
from pymc_sghmc.records import copied

__all__ = ["Density", "Graph", "LogDensity"]


class Graph(NamedTuple):
    """The variables of a log-density, for those who compile more of it."""

    model: RowModel
    position: pt.TensorVariable
    prior_weight: pt.TensorVariable
    row_weights: list[pt.TensorVariable]  # a vector for each group of rows
    rows: list[pt.TensorVariable]  # a vector of row numbers, or numbers of clusters, for each
    arrays: list[pt.TensorVariable]  # whose rows they are
    given: list[pt.TensorVariable]  # parameters that other steps sample, and inputs of rewrites
    logp: pt.TensorVariable  # scalar, weighted
    gradient: pt.TensorVariable  # of it, (d,)
    by_row: list[pt.TensorVariable]  # log-likelihood of each row, by group

    @property
    def variables(self) -> list[pt.TensorVariable]:
        """The variables of the model's graphs that make up the position, rewritten ones if any."""
        return list(self.model.variables)

    def at_position(
        self, graphs: list[pt.TensorVariable], variables: list[pt.TensorVariable] | None = None
    ) -> list[pt.TensorVariable]:
        """Write graphs of variables and batches as graphs of the position and of rows.

        Parameters
        ----------
        graphs : list of TensorVariable
        variables : list of TensorVariable, optional
            In the order in which they make up the position. Default: those of the log-density. The
            model's value variables make one in the model's own coordinates of it.
        """
        variables = self.variables if variables is None else variables
        parts = parts_of_vector(self.position, variables, self.model.point)
        return self.model.completed(graphs, parts)


class Density(Protocol):
    """A weighted log-density of rows: what passes over the data and the tuner ask for.

    A density says what its four members are: ``d``, ``dtype``, ``weights_dtype``, and what it is at
    a position. The rest follows for one that depends on nothing but the position and rows, without
    rewrites; a class that inherits from this one changes what is different. `LogDensity` is that of
    a model.

    Attributes
    ----------
    d : int
        Number of parameters.
    dtype, weights_dtype : numpy.dtype
        Of positions, and of the weights of the prior and of rows.
    rewrites : tuple of Rewrite
        What has changed the model's graphs.
    given_types : list of (str, numpy.dtype)
        The parameters that other steps sample.
    others : tuple of array
        Their values: set-ups depend on these beside data.
    needed_by_likelihood : list of str
        Those of them on which the likelihood depends.
    """

    d: int
    dtype: np.dtype[Any]
    weights_dtype: np.dtype[Any]
    rewrites: tuple[Any, ...] = ()
    given_types: Sequence[tuple[str, Any]] = ()
    others: tuple[Array, ...] = ()
    needed_by_likelihood: Sequence[str] = ()

    @abstractmethod
    def __call__(
        self,
        position: Array,
        prior_weight: Array,
        row_weights: Sequence[Array],
        rows: Sequence[Array],
        arrays: Sequence[Array],
    ) -> tuple[Array, Array]:
        """Weighted log-density and gradient."""

    @property
    def given(self) -> tuple[Array, ...]:
        """Values, now, of all that the log-density depends on beside position and rows."""
        return self.others

    @property
    def held(self) -> tuple[Any, ...]:
        """Values, now, of the model's data containers that aren't cut into minibatches."""
        return ()

    @property
    def likelihood_needs_others(self) -> bool:
        """Whether what rows say depends on parameters of other steps."""
        return bool(self.needed_by_likelihood)

    @property
    def placement_needs_others(self) -> bool:
        """Whether rewrites must be placed anew where other steps have moved."""
        return self.likelihood_needs_others and any(r.is_placed for r in self.rewrites)

    @property
    def changes_coordinates(self) -> bool:
        """Whether positions aren't in the model's own coordinates."""
        return any(rewrite.changes_coordinates for rewrite in self.rewrites)

    @property
    def has_long_tails(self) -> bool:
        """Whether few parameters are left to sample, scales with long tails among them."""
        return any(rewrite.has_long_tails for rewrite in self.rewrites)

    @property
    def transformed(self) -> list[int]:
        """Places of parameters that PyMC has transformed: posteriors may be steep on one side."""
        return []

    @property
    def transformed_in_rows(self) -> list[int]:
        """Those of them that rows see beside effects of groups, where that is known."""
        return []

    @property
    def vectors(self) -> list[slice]:
        """Places of parameters with several entries."""
        return []

    @property
    def group_coefficients(self) -> dict[str, slice]:
        """Parameters of which a row sees its own group's entries alone, and where they lie."""
        found: dict[str, slice] = {}
        for rewrite in self.rewrites:
            found |= rewrite.group_coefficients
        return found

    @property
    def group_columns(self) -> list[Array]:
        """Return the same places, in parts of which a row sees a single entry each."""
        return [column for rewrite in self.rewrites for column in rewrite.group_columns]

    def condition_on(self, point: Mapping[str, Any]) -> None:
        """Hold the parameters that other steps sample at their values in ``point``."""
        # copies: in workers PyMC changes the arrays of a point in place
        self.others = tuple(np.array(point[name], dtype=dtype) for name, dtype in self.given_types)

    def to_model(self, position: Array) -> Array:
        """Return what a position is in the model's own coordinates."""
        for rewrite in reversed(self.rewrites):
            position = rewrite.to_model(position)
        return position

    def from_model(self, position: Array) -> Array:
        """Return the position of parameters in the model's own coordinates."""
        for rewrite in self.rewrites:
            position = rewrite.from_model(position)
        return position

    @contextmanager
    def at(self, others: tuple[Array, ...]) -> Iterator[None]:
        """Hold the parameters that other steps sample at these values for a while."""
        now = self.others
        self.others = others
        try:
            yield
        finally:
            self.others = now


class LogDensity(Density):
    """Weighted log-density of some rows, and its gradient with respect to a step's parameters.

    Parameters
    ----------
    rows : RowModel
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``mode``.

    Attributes
    ----------
    unknowns : Unknowns
        What a position is made of.
    conditional : list of str
        Parameters on which conditions in the graph depend, at which the log-density may jump.
    data_rows : int
        Number of rows of data that aren't the model's own; 0: it holds all rows.
    """

    def __init__(self, rows: RowModel, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        self.compile_kwargs = {"on_unused_input": "ignore", **(compile_kwargs or {})}
        self.unknowns = rows.parameters
        self.rewrites = rows.rewrites
        self.sources = list(rows.sources)
        self.data_rows = rows.data_rows
        self.d = self.unknowns.d
        self.dtype = self.unknowns.dtype
        self.given_types = [(v.name, v.dtype) for v in rows.conditioned_on]
        self._input_values = [entry.value for entry in rows.inputs]
        self.graph = self._written(rows)
        graph = self.graph
        self.weights_dtype = np.dtype(graph.prior_weight.dtype)
        inputs = [graph.position, graph.prior_weight, *graph.row_weights, *graph.rows]
        inputs += [*graph.arrays, *graph.given]
        self.function = self.compiled(inputs, [graph.logp, graph.gradient])
        self._n_inputs = len(inputs)
        self._in_rows = self._names_in_rows()
        self.condition_on(rows.point)
        for rewrite in self.rewrites:
            rewrite.compile(self)

    @property
    def transformed(self) -> list[int]:
        """Places of parameters that PyMC has transformed: posteriors may be steep on one side."""
        return self.unknowns.transformed

    @property
    def linear_rows(self) -> Any:
        """Rows in coordinates of a rewrite, see `Rewrite.linear_rows`, while there are graphs."""
        known = (rewrite.linear_rows for rewrite in self.rewrites)
        return next((rows for rows in known if rows is not None), None)

    @property
    def vectors(self) -> list[slice]:
        """Places of parameters with several entries."""
        return [place for place in self.unknowns.places.values() if place.stop - place.start > 1]

    @property
    def transformed_in_rows(self) -> list[int]:
        """Those of them that rows see beside effects of groups, where that is known."""
        return [i for i in self.transformed if self.unknowns.unknown_of(i) in self._in_rows]

    def _names_in_rows(self) -> list[str]:
        rows = self.linear_rows
        if rows is None:
            return []
        needed = set(ancestors(rows.terms))
        return [variable.name for variable in rows.variables if variable in needed]

    def _written(self, rows: RowModel) -> Graph:
        """Write the weighted log-density and its gradient as graphs of one vector."""
        # The prior and each row have weights: 1 and N/n, or others for parts of the whole.
        prior_weight = pt.scalar("prior_weight")
        row_weights = [pt.vector(f"row_weights_{i}") for i in range(len(rows.likelihoods))]
        weighted = [(w * term).sum() for w, term in zip(row_weights, rows.terms, strict=True)]
        logp = pt.add(prior_weight * rows.log_prior, *weighted)
        variables = list(rows.variables)
        self.conditional = [v.name for v in conditional_unknowns(logp, variables)]
        needed = set(ancestors(rows.terms))
        self.needed_by_likelihood = [v.name for v in rows.conditioned_on if v in needed]
        gradient = _gradient(logp, variables).astype(self.dtype)
        position = pt.concatenate([v.ravel() for v in variables]).type("position")
        replacements = parts_of_vector(position, variables, rows.point)
        for rewrite in self.rewrites:
            replacements |= rewrite.substitutions(position)
        outputs = rows.completed([logp, gradient, *rows.terms], replacements)
        logp, gradient, *by_row = outputs
        return Graph(
            model=rows,
            position=position,
            prior_weight=prior_weight,
            row_weights=row_weights,
            rows=[likelihood.index for likelihood in rows.likelihoods],
            arrays=list(rows.arrays),
            given=[*rows.conditioned_on, *(entry.symbol for entry in rows.inputs)],
            logp=logp,
            gradient=gradient,
            by_row=by_row,
        )

    def compiled(
        self, inputs: Sequence[pt.TensorVariable], outputs: Sequence[pt.TensorVariable]
    ) -> ThreadSafe:
        """Compile more of the graph in the same way; inputs are trusted to have their types."""
        return compile_for_many_rows(inputs, outputs, self.compile_kwargs)

    def row_function(self, terms: Sequence[pt.TensorVariable]) -> ThreadSafe:
        """Compile ``terms``, a matrix for each group of rows: f(position, rows, arrays, given)."""
        graph = self.graph
        inputs = [graph.position, *graph.rows, *graph.arrays, *graph.given]
        return self.compiled(inputs, terms)

    @cached_property
    def by_row(self) -> ThreadSafe:
        """Log-likelihoods of rows, a column for each group: f(position, rows, arrays, given)."""
        return self.row_function([rows[:, None] for rows in self.graph.by_row])

    @property
    def has_graph(self) -> bool:
        """Whether more can be compiled: a pickled density comes without its graph."""
        return self.graph is not None

    @property
    def held(self) -> tuple[Any, ...]:
        """Values, now, of the model's data containers that aren't cut into minibatches."""
        return shared_values(self.function.function, self._n_inputs)

    @property
    def given(self) -> tuple[Array, ...]:
        """Values, now, of the graph's ``given`` inputs."""
        return (*self.others, *[value() for value in self._input_values])

    def __call__(
        self,
        position: Array,
        prior_weight: Array,
        row_weights: Sequence[Array],
        rows: Sequence[Array],
        arrays: Sequence[Array],
    ) -> tuple[Array, Array]:
        """Weighted log-density and gradient."""
        own = position.astype(self.dtype, copy=False)  # C takes no other
        try:
            return self.function(own, prior_weight, *row_weights, *rows, *arrays, *self.given)
        except ZeroDivisionError:  # by Numba, where other functions are infinite
            return np.asarray(np.nan, dtype=self.dtype), np.full(self.d, np.nan, dtype=self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Copies of a step share the data, the model's containers and the compiled function.
        return copied(self)

    def __getstate__(self) -> dict[str, Any]:
        # Workers get no graph, which holds the model's containers; of data they get those of
        # `rows`.
        return {**self.__dict__, "graph": None, "sources": None}


def _gradient(logp: pt.TensorVariable, variables: Sequence[pt.TensorVariable]) -> pt.TensorVariable:
    try:
        grads = pt.grad(rewrite_pregrad(logp), variables, disconnected_inputs="ignore")
    except (NotImplementedError, NullTypeGradError) as error:
        raise ValueError(
            "The log-density has no gradient that PyTensor could take. Give the operation one, "
            "write it with PyTensor's own, or leave the parameters to a step that needs none, such "
            f"as pm.Slice. (PyTensor says: {str(error).strip().splitlines()[0]})"
        ) from error
    return pt.concatenate([g.ravel() for g in grads])
