"""The compiled log-density of a PyMC model on any of its rows, and its gradient.

The arrays and the numbers of the rows are inputs of the compiled function, which holds no data; the
prior and each row have weights, so that one function serves minibatches, parts and the whole. Knows
graphs and what other steps sample; draws no rows.
"""

from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import compile, join_nonshared_inputs, rewrite_pregrad
from pytensor.gradient import NullTypeGradError
from pytensor.graph.replace import clone_replace

from pymc_sghmc.compat import ancestors
from pymc_sghmc.gradients.centring import Centring
from pymc_sghmc.gradients.group_effects import GroupEffects
from pymc_sghmc.gradients.units import marginal
from pymc_sghmc.loops.backends import shared_values
from pymc_sghmc.models.contract import minibatch_log_density
from pymc_sghmc.models.effects import effects
from pymc_sghmc.models.jumps import conditional_unknowns

__all__ = ["Graph", "LogDensity"]


class Graph(NamedTuple):
    """The variables of a log-density, for those who compile more of it."""

    groups: list  # of rows, with the model's variables
    point: dict  # gives the shapes
    position: pt.TensorVariable
    prior_weight: pt.TensorVariable
    row_weights: list  # a vector for each group of rows
    rows: list  # a vector of row numbers for each
    arrays: list  # whose rows they are
    given: list  # unknowns that other steps sample, and λ where effects are centred
    variables: list  # the model's own that make up the position
    logp: pt.TensorVariable  # scalar, weighted
    gradient: pt.TensorVariable  # of it, (d,)
    by_row: list  # log-likelihood of each row, by group
    prior: pt.TensorVariable  # scalar: all that isn't cut into rows; in the model's own variables
    terms: list  # as ``by_row``, in the model's own variables and batches
    gathered: dict  # of these batches: the rows of the arrays


class LogDensity:
    """Weighted log-density of some rows, and its gradient with respect to a step's unknowns.

    Parameters
    ----------
    model : pm.Model
    unknowns : Unknowns
        What a position is made of.
    batch_size : int or dict of {str: int}, optional
        See `minibatch_log_density`.
    point : dict
        A point of the model.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``mode``.
    data : dict of {str: array}, optional
        Arrays that take the place of what the model's ``pm.Data`` of these names hold.
    n_rows : int, optional
        Number of rows of the data if ``data`` holds some of them only.
    may_centre : bool, default False
        Whether positions may be in other coordinates than the model's, see `Centring`: where
        there are rows to tell which.
    effects_of_groups : list of Effect
        Unknowns that are integrated out, group by group, see `Marginal`.
    """

    # whether what rows say, and what they say of integrated effects, depends on other steps'
    # unknowns
    likelihood_needs_others = property(lambda self: bool(self.needed_by_likelihood))
    nodes_need_others = property(lambda self: bool(self.marginal and self.needed_by_likelihood))

    def __init__(
        self,
        model,
        unknowns,
        batch_size,
        point,
        compile_kwargs=None,
        data=None,
        n_rows=None,
        may_centre=False,
        effects_of_groups=(),
    ):
        data = data or {}
        without = tuple(effect.rv for effect in effects_of_groups)
        lengths = {name: n_rows or len(array) for name, array in data.items()}
        rest, groups = minibatch_log_density(model, batch_size, point, lengths, without)
        sources = [source for group in groups for source in group.full_data]
        self.sources = [data.get(source.name, source) for source in sources]
        held = enumerate(zip(sources, self.sources, strict=True))
        arrays = [_input_like(source, array.dtype, f"data_{i}") for i, (source, array) in held]
        rows = [pt.lvector(f"rows_{i}") for i in range(len(groups))]
        # The prior and each row have weights: 1 and N/n, or others for parts of the whole.
        terms = [group.log_likelihood for group in groups]
        numbers = list(rows)
        self.marginal = None
        if effects_of_groups:
            of_model = model, effects_of_groups, groups, rest, self.sources, point, unknowns.d
            self.marginal = marginal(*of_model)
            k = self.marginal.place
            kept = self.marginal.kept
            terms[k] = self.marginal.term(rows[k])
            numbers[k] = self.marginal.row_numbers(rows[k])
            if kept.groups.size:
                unknowns = unknowns.with_parts(kept.parts, point)
                rest = rest + kept.prior
                point = unknowns.of(point)
        self.unknowns = unknowns
        variables = list(unknowns.variables)
        batches = [(batch, i) for g, i in zip(groups, numbers, strict=True) for batch in g.batches]
        taken = zip(batches, arrays, strict=True)
        gathered = {batch: array[idx].astype(batch.dtype) for (batch, idx), array in taken}
        self.compile_kwargs = {"on_unused_input": "ignore", **(compile_kwargs or {})}
        found = effects(model, terms, unknowns) if may_centre and groups else []
        self.centring = Centring(found, unknowns, point) if found else None
        weights = []
        held = self.marginal.held if self.marginal else {}
        if found:
            graphs = [rest, *terms, *held.values()]
            (rest, *graphs), variables, *weights = self.centring.write(graphs, self.compiled)
            terms = graphs[: len(terms)]
            held = dict(zip(held, graphs[len(terms) :], strict=True))
        prior_weight = pt.scalar("prior_weight")
        row_weights = [pt.vector(f"row_weights_{i}") for i in range(len(groups))]
        weighted = [(w * rows).sum() for w, rows in zip(row_weights, terms, strict=True)]
        logp = pt.add(prior_weight * rest, *weighted)
        own = {*unknowns.variables, *(effect.value for effect in effects_of_groups)}
        given = [v for v in model.value_vars if v not in own]
        self.given_types = [(v.name, v.dtype) for v in given]
        needed = set(ancestors(terms))
        self.needed_by_likelihood = [v.name for v in given if v in needed]
        self.conditional = [v.name for v in conditional_unknowns(logp, variables)]

        outputs = [logp, _gradient(logp, variables).astype(unknowns.dtype), *terms]
        for new in (held, gathered):
            outputs = clone_replace(outputs, new, rebuild_strict=False) if new else outputs
        outputs, position = join_nonshared_inputs(point, outputs, variables)
        if self.marginal:
            shift = {self.marginal.shift: self.marginal.shift_from(position)}
            outputs = clone_replace(outputs, shift, rebuild_strict=False)
        logp, gradient, *by_row = outputs
        self.d = unknowns.d
        self.dtype = unknowns.dtype
        self.weights_dtype = np.dtype(prior_weight.dtype)
        given += [*weights, *(self.marginal.inputs if self.marginal else ())]
        weighing = position, prior_weight, row_weights
        inputs = rows, arrays, given, variables
        outputs = logp, gradient, by_row, rest, terms
        self.graph = Graph(groups, point, *weighing, *inputs, *outputs, gathered)
        inputs = [position, prior_weight, *row_weights, *rows, *arrays, *given]
        self.function = self.compiled(inputs, [logp, gradient])
        self._n_inputs = len(inputs)
        self.condition_on(point)
        self.group_effects = GroupEffects(self, unknowns.variables) if self.marginal else None

    def compiled(self, inputs, outputs):
        """Compile more of the graph in the same way; inputs are trusted to have their types."""
        function = compile(inputs, outputs, **self.compile_kwargs)
        function.trust_input = True
        return function

    def row_function(self, terms):
        """Compile ``terms``, a matrix for each group of rows: f(position, rows, arrays, given)."""
        graph = self.graph
        inputs = [graph.position, *graph.rows, *graph.arrays, *graph.given]
        return self.compiled(inputs, terms)

    @property
    def has_graph(self) -> bool:
        """Whether more can be compiled: a pickled density comes without its graph."""
        return self.graph is not None

    @property
    def held(self) -> tuple:
        """Values, now, of the model's data containers that aren't cut into minibatches."""
        return shared_values(self.function, self._n_inputs)

    def condition_on(self, point) -> None:
        """Hold the unknowns that other steps sample at their values in ``point``."""
        # copies: in workers PyMC changes the arrays of a point in place
        given = [np.array(point[name], dtype=dtype) for name, dtype in self.given_types]
        self._give((*given, *(() if self.centring is None else (self.centring.weights,))))

    def _give(self, others):
        self.others = others  # set-ups depend on these beside data
        self.given = others + (() if self.marginal is None else self.marginal.values)

    def set_centring(self, weights) -> None:
        """Let positions be in the coordinates with these λ, see `Centring`."""
        self.centring.weights = weights
        self._give((*self.others[: len(self.given_types)], weights))

    def place_nodes(self, data, position, metric=None) -> None:
        """Let nodes of quadrature lie where effects of groups are given a position.

        With a ``metric`` of the posterior's width they follow what moves from
        there.
        """
        self.set_nodes(
            self.marginal.n_nodes, self.group_effects.place(self, data, position, metric)
        )

    def set_nodes(self, n_nodes, placed=None) -> None:
        """Let quadrature have so many nodes, around these pseudo-observations: see `Marginal`."""
        self.marginal.use(n_nodes, placed)
        self._give(self.others)

    def to_model(self, position):
        """Return what a position is in the model's own coordinates."""
        return position if self.centring is None else self.centring.to_model(position)

    def from_model(self, position):
        """Return the position of unknowns in the model's own coordinates."""
        return position if self.centring is None else self.centring.from_model(position)

    @contextmanager
    def at(self, others):
        """Hold the unknowns that other steps sample at these values for a while."""
        now = self.others
        self._give(others)
        try:
            yield
        finally:
            self._give(now)

    def __call__(self, position, prior_weight, row_weights, rows, arrays):
        """Weighted log-density and gradient."""
        own = position.astype(self.dtype, copy=False)  # C takes no other
        return self.function(own, prior_weight, *row_weights, *rows, *arrays, *self.given)

    def __deepcopy__(self, memo):
        # Copies of a step share the data, the model's containers and the compiled function.
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self):
        # Workers get no graph, which holds the model's containers; of data they get those of
        # `rows`.
        return {**self.__dict__, "graph": None, "sources": None}


def _gradient(logp, variables):
    try:
        grads = pt.grad(rewrite_pregrad(logp), variables, disconnected_inputs="ignore")
    except (NotImplementedError, NullTypeGradError) as error:
        raise ValueError(
            "The log-density has no gradient that PyTensor could take. Give the operation one, "
            "write it with PyTensor's own, or leave the unknowns to a step that needs none, such "
            f"as pm.Slice. (PyTensor says: {str(error).strip().splitlines()[0]})"
        ) from error
    return pt.concatenate([g.ravel() for g in grads])


def _input_like(source, dtype, name):
    return source.type.clone(dtype=str(dtype), shape=(None, *source.type.shape[1:]))(name)
