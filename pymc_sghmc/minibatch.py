"""The minibatch contract: from a PyMC model to its log-density on any rows of the data.

Three ways in, one meaning: an ordinary model with ``batch_size``, a model of ``pm.Minibatch`` with
``total_size``, or a model of a few rows that stand for data from elsewhere. Each becomes ``rest + Σ_groups N/n Σ_rows log p(row | θ)``, with batches as
inputs of the graph, so that the caller draws the rows. What can't be cut into independent rows is
refused here, in words. The model is never touched.
"""

import operator

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import floatX
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.graph.basic import Constant

from pymc_sghmc.compat import ancestors
from pymc_sghmc.independence import check_rows, leading_dim, not_sliceable
from pymc_sghmc.rows import (
    array_of,
    data_leaves,
    full_data,
    minibatch_outputs,
    minibatch_size,
    slice_rows,
)

__all__ = ["Group", "minibatch_log_density"]


@dataclass(frozen=True)
class Likelihood:
    """One observed variable: log-likelihood by row, unscaled, of ``count`` rows out of ``n_rows``.

    ``count`` is how many rows the model's own graph holds: all of them, or a ``pm.Minibatch``.
    """

    factor: object
    sources: list
    n_rows: int
    count: int


@dataclass
class Group:
    """Likelihood terms on the same rows.

    ``sources`` are the model's data variables, ``batches`` their placeholders in ``terms``, which
    maps the name of each observed variable to its log-likelihood by row, unscaled.
    """

    n_rows: int
    batch_size: int
    sources: list
    batches: list = field(default_factory=list)
    terms: dict = field(default_factory=dict)

    @property
    def full_data(self) -> list:
        """The variables that hold all rows of ``sources``."""
        return [full_data(source) for source in self.sources]

    @property
    def log_likelihood(self):
        """Log-likelihood of each row of the batches, (n,)."""
        by_row = [term.sum(axis=tuple(range(1, term.ndim))) for term in self.terms.values()]
        return by_row[0] if len(by_row) == 1 else pt.add(*by_row)


def minibatch_log_density(model, batch_size=None, initial_point=None, lengths=None) -> tuple:
    """Split the model's log-density into what minibatches estimate and the rest.

    Parameters
    ----------
    model : pm.Model
        Never changed.
    batch_size : int or dict of {str: int}, optional
        Rows in a minibatch. A dict names each group of rows by an observed variable, a data
        container or the leading dim. ``None``: the batches of ``pm.Minibatch`` where the model
        has one, else all data at every step.
    initial_point : dict, optional
        Values near which the independence of the rows is checked.
    lengths : dict of {str: int}, optional
        Number of rows of the data that will take the place of what these ``pm.Data`` hold.

    Returns
    -------
    rest : TensorVariable
        Scalar: priors with their Jacobians, potentials, likelihoods that are used whole.
    groups : list of Group
        What is cut into minibatches.

    Raises
    ------
    ValueError
        If the data can't be cut into independent rows, or ``batch_size`` doesn't fit them.
    """
    # Once each: PyMC 5.28's sample_posterior_predictive leaves observed_RVs twice in its list.
    variables = list(dict.fromkeys([*model.free_RVs, *model.observed_RVs, *model.potentials]))
    factors = dict(zip(variables, model.logp(vars=variables, sum=False), strict=True))
    minibatches = minibatch_outputs(factors.values())
    if lengths:
        candidates = _from_elsewhere(model, factors, lengths, minibatches)
    elif minibatches:
        candidates = _from_pm_minibatch(model, factors)
    elif batch_size is not None:
        candidates = _from_full_data(model, factors)
    else:
        return _total(factors.values()), []

    groups, used = _choose(model, candidates, batch_size, bool(minibatches))
    sliced = {source for group in groups for source in (*group.sources, *minibatches)}
    rest = []
    for variable, factor in factors.items():
        if variable in used:
            continue
        shared_rows = [leaf for leaf in ancestors([factor]) if leaf in sliced]
        if shared_rows and variable in model.potentials:
            raise ValueError(
                f"pm.Potential({variable.name!r}) is computed from data that are cut into "
                f"minibatches ({_names(shared_rows)}), so it can't be evaluated on some of their "
                "rows. Write it as the likelihood of an observed variable, for example with "
                "pm.CustomDist, or sample the model with NUTS."
            )
        if shared_rows and variable not in model.observed_RVs:
            raise ValueError(
                f"The unknown {variable.name!r} has a prior that depends on data that are cut into "
                f"minibatches ({_names(shared_rows)}): an unknown indexed by row can't be sampled "
                "from minibatches. Marginalise it out of the model, or use NUTS; what a prior "
                "takes from the data as a whole, compute beforehand."
            )
        rest.append(factor)
    check_rows(model, groups, model.initial_point() if initial_point is None else initial_point)
    return _total(rest), groups


def _total(terms):
    return pt.add(*[term.sum() for term in terms], pt.zeros(()))


def _from_full_data(model, factors) -> dict:
    """Way 1: {observed variable: Likelihood} of the ordinary model."""
    candidates = {}
    for variable in dict.fromkeys(model.observed_RVs):
        value = model.rvs_to_values[variable]
        if value.type.ndim == 0 or factors[variable].type.ndim == 0:
            continue
        n_rows = _length(value)
        own = data_leaves(value)
        dims = [leading_dim(model, name) for name in (variable.name, *(leaf.name for leaf in own))]
        dims = {None, *dims} if any(dims) else None
        leaves = data_leaves(factors[variable])
        # PyTensor merges equal constants: what y1 observes may go by the name of y2
        constants = [leaf for leaf in leaves if isinstance(leaf, Constant)]
        own += [leaf for leaf in constants if any(map(leaf.equals, own))]
        sources = [
            leaf
            for leaf in leaves
            if np.shape(array_of(leaf))[0] == n_rows
            and (dims is None or leaf in own or leading_dim(model, leaf.name) in dims)
        ]
        if isinstance(variable.owner.op, MinibatchRandomVariable):
            _check_total_size(variable, n_rows)
            factor = _unscaled(factors[variable], variable, value)
        else:
            factor = factors[variable]
        candidates[variable] = Likelihood(factor, sources, n_rows, n_rows)
    return candidates


def _from_elsewhere(model, factors, lengths, minibatches) -> dict:
    """Way 3: the model holds a few rows; the data of these containers have ``lengths``."""
    if minibatches:
        raise ValueError(
            "data=: the model has a pm.Minibatch. Build it from pm.Data alone: the step draws the "
            "minibatches."
        )
    containers = {model[name]: n_rows for name, n_rows in lengths.items()}
    candidates, unused = {}, set(containers)
    for variable in dict.fromkeys(model.observed_RVs):
        value = model.rvs_to_values[variable]
        sources = [leaf for leaf in data_leaves(factors[variable]) if leaf in containers]
        if not sources:
            continue
        if containers.keys().isdisjoint(data_leaves(value)):
            raise ValueError(
                f"data= has the rows of {_names(sources)} but not those that {variable.name!r} "
                "observes. Put these into a container of their own, "
                f'observed=pm.Data("{variable.name}_data", ...), and pass their rows, too.'
            )
        counts = {source.name: _length(source) for source in sources}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"data=: in the model the containers of {variable.name!r} have different numbers of "
                f"rows, {counts}. Build it with the same few rows of each."
            )
        n_rows, count = containers[sources[0]], _length(sources[0])
        factor = factors[variable]
        if isinstance(variable.owner.op, MinibatchRandomVariable):
            _check_total_size(variable, n_rows)
            factor = _unscaled(factor, variable, value)
        candidates[variable] = Likelihood(factor, sources, n_rows, count)
        unused -= set(sources)
    if unused:
        raise ValueError(f"data=: no likelihood depends on {_names(unused)}. Leave it out.")
    return candidates


def _from_pm_minibatch(model, factors) -> dict:
    """Way 2: the outputs of ``pm.Minibatch`` are the sources; its own index draw is dropped."""
    candidates = {}
    for variable in dict.fromkeys(model.observed_RVs):
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
        if minibatch_outputs([factors[variable]]):
            raise ValueError(
                f"The unknown {variable.name!r} has a prior that depends on pm.Minibatch: an "
                "unknown indexed by row can't be sampled from minibatches. Marginalise it out of "
                "the model, or use NUTS on the full data."
            )
    return candidates


def _choose(model, candidates, batch_size, from_minibatch) -> tuple[list[Group], list]:
    """Group the candidates by their rows, give each group its batch size and cut its terms."""
    by_rows = {}
    for variable, candidate in candidates.items():
        by_rows.setdefault((candidate.n_rows, candidate.count), []).append(variable)
    groups, used = [], []
    sizes = _batch_sizes(model, candidates, by_rows, batch_size, from_minibatch)
    for (n_rows, count), size in sizes.items():
        members = by_rows[n_rows, count]
        sources = [source for variable in members for source in candidates[variable].sources]
        group = Group(n_rows, size, list(dict.fromkeys(sources)))
        group.batches = [_placeholder(source, i) for i, source in enumerate(group.sources)]
        replacements = dict(zip(group.sources, group.batches, strict=True))
        for variable in members:
            _refuse_imputed(model, variable)
            own = {source: replacements[source] for source in candidates[variable].sources}
            if not own:
                reason = "the observed values are computed from data with another number of rows"
                raise not_sliceable(model, variable.name, n_rows, reason)
            length = group.batches[0].shape[0]
            try:
                [term] = slice_rows([candidates[variable].factor], own, count, length)
            except Exception as error:
                raise not_sliceable(model, variable.name, n_rows, error) from error
            group.terms[variable.name] = term
        groups.append(group)
        used += members
    return groups, used


def _batch_sizes(model, candidates, by_rows, batch_size, from_minibatch) -> dict:
    """{(n_rows, count): batch size} of the groups of rows that are cut into minibatches."""
    labels = {
        key: [label for variable in members for label in _labels(model, variable, candidates)]
        for key, members in by_rows.items()
    }
    listing = "; ".join(
        f"{', '.join(map(repr, dict.fromkeys(labels[key])))} with {key[0]} rows" for key in by_rows
    )
    if not by_rows:
        raise ValueError(
            f"batch_size={batch_size!r}: no likelihood of this model has rows to cut into "
            "minibatches. Rows lie on the leading axis of an observed variable with one "
            "log-likelihood each; a time series, a Gaussian process or a scalar has none. "
            "Leave batch_size out to use all data at every step, or use NUTS."
        )
    if not isinstance(batch_size, Mapping):
        if len(by_rows) > 1 and batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size!r}: the likelihoods have different numbers of rows: "
                f"{listing}. Name the groups: batch_size={{name: n, ...}}; a group that isn't "
                "named is used whole."
            )
        return {
            key: key[1] if batch_size is None else _checked_size(batch_size, key[0], batch_size)
            for key in by_rows
        }

    unknown = [name for name in batch_size if not any(name in ls for ls in labels.values())]
    if unknown:
        raise ValueError(
            f"batch_size={dict(batch_size)!r}: {unknown[0]!r} names no group of rows. "
            f"This model has: {listing}."
        )
    sizes = {}
    for key in by_rows:
        named = [name for name in batch_size if name in labels[key]]
        given = {_checked_size(batch_size[name], key[0], batch_size) for name in named}
        if len(given) > 1:
            raise ValueError(
                f"batch_size={dict(batch_size)!r}: gives {sorted(given)} to the same rows. Name "
                f"them once. This model has: {listing}."
            )
        if given or from_minibatch:
            sizes[key] = given.pop() if given else key[1]
    return sizes


def _unscaled(factor, variable, value):
    """Undo the N/n that PyMC multiplies the log-likelihood by where there is a total_size."""
    total_size = variable.owner.inputs[1]
    return factor / floatX(total_size / value.shape[0])


def _check_total_size(variable, n_rows) -> None:
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


def _refuse_imputed(model, variable) -> None:
    name = variable.name.removesuffix("_observed")
    if name != variable.name and f"{name}_unobserved" in model.named_vars:
        raise ValueError(
            f"{name!r} is observed with missing values, and PyMC makes each of them an unknown: "
            "an unknown indexed by row can't be sampled from minibatches. Drop the rows with "
            "missing values, or use NUTS."
        )


def _checked_size(size, n_rows, given) -> int:
    try:
        size = operator.index(None if isinstance(size, bool | np.bool_) else size)
    except TypeError:
        raise ValueError(f"batch_size={given!r}: must be a whole number of rows.") from None
    if not 1 <= size <= n_rows:
        raise ValueError(f"batch_size={given!r}: must lie between 1 and the {n_rows} rows of data.")
    return size


def _length(value) -> int:
    return np.shape(array_of(value))[0]


def _placeholder(source, i):
    kind = source.type
    return pt.tensor(f"batch_{i}", dtype=kind.dtype, shape=(None, *kind.shape[1:]))


def _labels(model, variable, candidates) -> list[str]:
    """Names by which ``batch_size={name: n}`` can call the rows of an observed variable."""
    sources = candidates[variable].sources
    names = [variable.name, leading_dim(model, variable.name)]
    names += [source.name for source in sources if source in model.data_vars]
    return [name for name in names if name is not None]


def _names(variables) -> str:
    return ", ".join(dict.fromkeys(str(variable.name or "a constant") for variable in variables))
