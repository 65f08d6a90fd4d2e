"""What of a PyMC model can be cut into minibatches: its likelihoods with rows, in three ways.

The model is an ordinary one, or of ``pm.Minibatch`` with ``total_size``, or holds a few rows that
stand for data from elsewhere. What would be weighted wrongly is refused here, in words.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pymc.model import Model
from pymc.pytensorf import floatX
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.graph.basic import Constant, Variable

from pymc_sghmc.exceptions import NeedsAllRows
from pymc_sghmc.models.folding import with_rows_computed
from pymc_sghmc.models.graphs import (
    array_of,
    data_leaves,
    full_data,
    minibatch_outputs,
    minibatch_size,
    observed_variables,
)
from pymc_sghmc.models.independence import leading_dim
from pymc_sghmc.models.picked_rows import PickedRows, with_picked_rows

__all__ = [
    "Likelihood",
    "from_elsewhere",
    "from_full_data",
    "from_pm_minibatch",
    "names_of",
    "refuse_imputed",
    "rows_left_out",
]


@dataclass(frozen=True)
class Likelihood:
    """One observed variable: log-likelihood by row, unscaled, of ``count`` rows out of ``n_rows``.

    ``count`` is how many rows the model's own graph holds: all of them, or a ``pm.Minibatch``.
    ``as_written`` is the model's own where ``factor`` computes fewer rows of a predictor than it.
    """

    factor: Variable
    sources: list[Variable]
    n_rows: int
    count: int
    as_written: Variable | None = None


def from_full_data(
    model: Model, factors: Mapping[Variable, Variable]
) -> dict[Variable, Likelihood]:
    """Way 1: {observed variable: Likelihood} of the ordinary model."""
    candidates = {}
    for variable in observed_variables(model):
        value = model.rvs_to_values[variable]
        if value.type.ndim == 0 or factors[variable].type.ndim == 0:
            continue
        n_rows = _length(value)
        own = data_leaves(value)
        names = (variable.name, *(leaf.name for leaf in own))
        named = [leading_dim(model, name) for name in names]
        dims = {None, *named} if any(named) else None
        is_scaled = isinstance(variable.owner.op, MinibatchRandomVariable)
        picked = PickedRows(factors[variable], [])
        if not is_scaled:
            picked = with_picked_rows(factors[variable], n_rows)
        factor = with_rows_computed(picked.graph, n_rows, [*own, *picked.sources])
        leaves = data_leaves(factor, picked.sources)
        # PyTensor merges equal constants: what y1 observes may go by the name of y2
        constants = [leaf for leaf in leaves if isinstance(leaf, Constant)]
        own += [leaf for leaf in constants if any(map(leaf.equals, own))]
        sources = [
            leaf
            for leaf in leaves
            if leaf in picked.sources
            or (
                np.shape(array_of(leaf))[0] == n_rows
                and (dims is None or leaf in own or leading_dim(model, leaf.name) in dims)
            )
        ]
        if is_scaled:
            _check_total_size(variable, n_rows)
            factor = _unscaled(factor, variable, value)
        as_written = factors[variable] if picked.sources else None
        candidates[variable] = Likelihood(factor, sources, n_rows, n_rows, as_written)
    return candidates


def from_elsewhere(
    model: Model,
    factors: Mapping[Variable, Variable],
    lengths: Mapping[str, int],
    minibatches: Sequence[Variable],
) -> dict[Variable, Likelihood]:
    """Way 3: the model holds a few rows; the data of these containers have ``lengths``."""
    if minibatches:
        raise ValueError(
            "data=: the model has a pm.Minibatch. Build it from pm.Data alone: the step draws the "
            "minibatches."
        )
    containers = {model[name]: n_rows for name, n_rows in lengths.items()}
    candidates = {}
    unused = set(containers)
    for variable in observed_variables(model):
        value = model.rvs_to_values[variable]
        sources = [leaf for leaf in data_leaves(factors[variable]) if leaf in containers]
        if not sources:
            continue
        observed = data_leaves(value)
        if containers.keys().isdisjoint(observed):
            own = [leaf for leaf in observed if not isinstance(leaf, Constant)]
            remedy = f"Pass the rows of {names_of(own)}, too."
            if not own:
                remedy = (
                    "Put these into a container of their own, "
                    f'observed=pm.Data("{variable.name}_data", ...), and pass their rows, too.'
                )
            raise ValueError(
                f"data= has the rows of {names_of(sources)} but not those that {variable.name!r} "
                f"observes. {remedy}"
            )
        counts = {source.name: _length(source) for source in sources}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"data=: in the model the containers of {variable.name!r} have different numbers "
                f"of rows, {counts}. Build it with the same few rows of each."
            )
        n_rows = containers[sources[0]]
        count = _length(sources[0])
        factor = factors[variable]
        if isinstance(variable.owner.op, MinibatchRandomVariable):
            _check_total_size(variable, n_rows)
            factor = _unscaled(factor, variable, value)
        candidates[variable] = Likelihood(factor, sources, n_rows, count)
        unused -= set(sources)
    if unused:
        raise ValueError(f"data=: no likelihood depends on {names_of(unused)}. Leave it out.")
    return candidates


def rows_left_out(candidates: Mapping[Variable, Likelihood]) -> str:
    """Say which data of the model seem to be rows that ``data=`` doesn't give; "" if none do."""
    for variable, candidate in candidates.items():
        left_out = [
            leaf
            for leaf in data_leaves(candidate.factor)
            if leaf not in candidate.sources and np.shape(array_of(leaf))[:1] == (candidate.count,)
        ]
        if not left_out:
            continue
        containers = [leaf for leaf in left_out if not isinstance(leaf, Constant)]
        what = names_of(containers) if containers else "an array"
        remedy = "Pass their rows, too."
        if not containers:
            remedy = 'Put it into a container, pm.Data("name", ...), and pass its rows, too.'
        return (
            f"data= has the rows of {names_of(candidate.sources)}, but {variable.name!r} depends "
            f"on {what} with {candidate.count} rows in the model, too. {remedy}"
        )
    return ""


def from_pm_minibatch(
    model: Model, factors: Mapping[Variable, Variable]
) -> dict[Variable, Likelihood]:
    """Way 2: the outputs of ``pm.Minibatch`` are the sources; its own index draw is dropped."""
    candidates = {}
    for variable in observed_variables(model):
        sources = minibatch_outputs([factors[variable]])
        if not sources:
            continue
        # PyMC clones the node when it derives log-densities; the generator tells the calls apart.
        calls = {source.owner.inputs[-1] for source in sources}
        if len(calls) > 1:
            raise ValueError(
                f"{variable.name!r} is built from {len(calls)} calls of pm.Minibatch, which draw "
                "different rows. Slice all arrays of one likelihood together: "
                "X_batch, y_batch = pm.Minibatch(X, y, batch_size=...)."
            )
        lengths = {_length(full_data(source)) for source in sources}
        if len(lengths) > 1:
            raise ValueError(
                f"The arrays that {variable.name!r} takes from pm.Minibatch have "
                f"{sorted(lengths)} rows. Give pm.Minibatch arrays with the same number of rows."
            )
        [n_rows] = lengths
        if not isinstance(variable.owner.op, MinibatchRandomVariable):
            raise ValueError(
                f"{variable.name!r} observes a pm.Minibatch without total_size, so that the prior "
                f"would outweigh the likelihood. Pass total_size={n_rows}, the number of rows of "
                f"the full data, to {variable.name!r}."
            )
        _check_total_size(variable, n_rows)
        value = model.rvs_to_values[variable]
        factor = _unscaled(factors[variable], variable, value)
        count = minibatch_size(sources[0].owner)
        candidates[variable] = Likelihood(factor, sources, n_rows, count)
    for variable in model.free_RVs:
        if variable in factors and minibatch_outputs([factors[variable]]):
            raise ValueError(
                f"The parameter {variable.name!r} has a prior that depends on pm.Minibatch: a "
                "parameter with an entry per row can't be sampled from minibatches. Integrate it "
                "out of the model, or use NUTS on the full data."
            )
    return candidates


def _unscaled(factor: Variable, variable: Variable, value: Variable) -> Variable:
    """Undo the N/n that PyMC multiplies the log-likelihood by where there is a total_size."""
    total_size = variable.owner.inputs[1]
    return factor / floatX(total_size / value.shape[0])


def _check_total_size(variable: Variable, n_rows: int) -> None:
    leading, *others = variable.owner.inputs[1:]
    given = leading.data if isinstance(leading, Constant) else array_of(leading)
    if any(getattr(other, "data", None) is not None for other in others):
        raise ValueError(
            f"{variable.name!r} has a total_size on an axis other than the first. Rows lie on the "
            f"leading axis: pass total_size={n_rows}."
        )
    if given is None or int(given) != n_rows:
        raise ValueError(
            f"{variable.name!r} has total_size={given} but its data have {n_rows} rows, so that "
            "the likelihood would get the wrong weight against the prior. "
            f"Pass total_size={n_rows}."
        )


def refuse_imputed(model: Model, variable: Variable) -> None:
    """Refuse missing values that PyMC has made unknowns."""
    name = variable.name.removesuffix("_observed")
    if name != variable.name and f"{name}_unobserved" in model.named_vars:
        raise NeedsAllRows(
            f"{name!r} is observed with missing values, and PyMC makes each of them a parameter: "
            "a parameter with an entry per row can't be sampled from minibatches.",
            "Drop the rows with missing values.",
        )


def _length(value: Variable) -> int:
    return np.shape(array_of(value))[0]


def names_of(variables: Iterable[Variable]) -> str:
    """List variables by name."""
    return ", ".join(dict.fromkeys(str(variable.name or "a constant") for variable in variables))
