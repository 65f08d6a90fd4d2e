"""The minibatch contract: from a PyMC model to its log-density on any rows of the data.

Whichever way the data come in (`likelihoods`), the model becomes ``rest + Σ_groups N/n Σ_rows
log p(row | θ)``, with batches as inputs of the graph, so that the caller draws the rows. What can't
be cut into independent rows is refused here, with the reason. The model is never touched.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytensor.tensor as pt

from pymc.model import Model
from pytensor.graph.basic import Variable

from pymc_sghmc.checks import is_whole, quoted
from pymc_sghmc.compat import ancestors
from pymc_sghmc.exceptions import NeedsAllRows
from pymc_sghmc.models.bad_data import refuse_empty_data
from pymc_sghmc.models.graphs import (
    density_variables,
    full_data,
    minibatch_outputs,
    slice_rows,
)
from pymc_sghmc.models.independence import (
    check_rows,
    leading_dim,
    lies_on_its_side,
    not_sliceable,
)
from pymc_sghmc.models.likelihoods import (
    Likelihood,
    from_elsewhere,
    from_full_data,
    from_pm_minibatch,
    names_of,
    refuse_imputed,
    rows_left_out,
)

__all__ = ["ALL_ROWS", "BatchSize", "Group", "minibatch_log_density"]

BatchSize = int | str | Mapping[str, int] | None  # as given to a step
ByRows = Mapping[tuple[int, int], list[Variable]]  # observed variables by number of rows and count

ALL_ROWS = 2**63 - 1  # a batch size for where likelihoods are cut only to integrate effects out
FIRST_SIZE = 500  # rows in a minibatch, before it is known how noisy they are
FEW_ROWS = 1000  # fewer are used whole


@dataclass
class Group:
    """Likelihood terms on the same rows.

    ``sources`` are the model's data variables, ``batches`` their placeholders in ``terms``, which
    maps the name of each observed variable to its log-likelihood by row, unscaled. ``as_written``
    has those of the model itself where that picks rows of a longer predictor.
    """

    n_rows: int
    batch_size: int
    sources: list[Variable]
    batches: list[Variable] = field(default_factory=list)
    terms: dict[str, Variable] = field(default_factory=dict)
    as_written: dict[str, Variable] = field(default_factory=dict)

    @property
    def full_data(self) -> list[Variable]:
        """The variables that hold all rows of ``sources``."""
        return [full_data(source) for source in self.sources]

    @property
    def log_likelihood(self) -> Variable:
        """Log-likelihood of each row of the batches, (n,)."""
        by_row = [term.sum(axis=tuple(range(1, term.ndim))) for term in self.terms.values()]
        return by_row[0] if len(by_row) == 1 else pt.add(*by_row)


def minibatch_log_density(
    model: Model,
    batch_size: BatchSize = None,
    initial_point: Mapping[str, Any] | None = None,
    lengths: Mapping[str, int] | None = None,
    without: Sequence[Variable] = (),
) -> tuple[Variable, list[Group]]:
    """Split the model's log-density into what minibatches estimate and the rest.

    Parameters
    ----------
    model : pm.Model
        Never changed.
    batch_size : int, dict of {str: int} or "auto", optional
        Rows in a minibatch; at most all. "auto": so many as a search begins with. A dict names each
        group of rows by an observed variable, a data container or the leading dim. ``None``: the
        batches of ``pm.Minibatch`` where the model has one, else all data.
    initial_point : dict, optional
        Values near which the independence of the rows is checked.
    lengths : dict of {str: int}, optional
        Number of rows of the data that will take the place of these ``pm.Data``.
    without : tuple of TensorVariable
        Parameters whose priors are left out.

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
    if batch_size is not None:
        asked_by = "marginalize" if batch_size == ALL_ROWS else "batch_size"
        refuse_empty_data(model, lengths, asked_by)
    variables = [v for v in density_variables(model) if v not in without]
    factors = dict(zip(variables, model.logp(vars=variables, sum=False), strict=True))
    minibatches = minibatch_outputs(factors.values())
    if lengths:
        candidates = from_elsewhere(model, factors, lengths, minibatches)
    elif minibatches:
        candidates = from_pm_minibatch(model, factors)
    elif batch_size is not None:
        candidates = from_full_data(model, factors)
    else:
        return _total(factors.values()), []

    groups, used = _choose(model, candidates, batch_size, bool(minibatches), lengths)
    sliced = {source for group in groups for source in (*group.sources, *minibatches)}
    rest = []
    for variable, factor in factors.items():
        if variable in used:
            continue
        shared_rows = [leaf for leaf in ancestors([factor]) if leaf in sliced]
        if shared_rows and variable in model.potentials:
            raise NeedsAllRows(
                f"pm.Potential({variable.name!r}) is computed from data that are cut into "
                f"minibatches ({names_of(shared_rows)}), so it can't be evaluated on some of their "
                "rows.",
                "Write it as the likelihood of an observed variable, for example with "
                "pm.CustomDist.",
            )
        if shared_rows and variable not in model.observed_RVs:
            raise NeedsAllRows(
                f"The parameter {variable.name!r} has a prior that depends on data that are cut "
                f"into minibatches ({names_of(shared_rows)}), so it can't be evaluated on some of "
                "their rows.",
                "If the prior uses a summary of the data, compute it before the model. If the "
                "parameter has an entry for each row, give it a prior without these data and "
                f"integrate it out by marginalize=[{variable.name!r}].",
            )
        rest.append(factor)
    start = model.initial_point() if initial_point is None else initial_point
    try:
        check_rows(model, groups, start)
    except NeedsAllRows as error:
        if lengths and (left_out := rows_left_out(candidates)):
            raise ValueError(left_out) from error
        raise
    return _total(rest), groups


def _total(terms: Iterable[Variable]) -> Variable:
    return pt.add(*[term.sum() for term in terms], pt.zeros(()))


def _choose(
    model: Model,
    candidates: Mapping[Variable, Likelihood],
    batch_size: BatchSize,
    from_minibatch: bool,
    lengths: Mapping[str, int] | None,
) -> tuple[list[Group], list[Variable]]:
    """Group the candidates by their rows, give each group its batch size and cut its terms."""
    by_rows: dict[tuple[int, int], list[Variable]] = {}
    groups = []
    used = []
    for variable, candidate in candidates.items():
        by_rows.setdefault((candidate.n_rows, candidate.count), []).append(variable)
    sizes = _batch_sizes(model, candidates, by_rows, batch_size, from_minibatch, lengths)
    for (n_rows, count), size in sizes.items():
        members = by_rows[n_rows, count]
        sources = [source for variable in members for source in candidates[variable].sources]
        group = Group(n_rows, size, list(dict.fromkeys(sources)))
        group.batches = [_placeholder(source, i) for i, source in enumerate(group.sources)]
        replacements = dict(zip(group.sources, group.batches, strict=True))
        for variable in members:
            refuse_imputed(model, variable)
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
            as_written = candidates[variable].as_written
            if as_written is not None:
                group.as_written[variable.name] = as_written
        groups.append(group)
        used += members
    return groups, used


def _batch_sizes(
    model: Model,
    candidates: Mapping[Variable, Likelihood],
    by_rows: ByRows,
    batch_size: BatchSize,
    from_minibatch: bool,
    lengths: Mapping[str, int] | None,
) -> dict[tuple[int, int], int]:
    """{(n_rows, count): batch size} of the groups of rows that are cut into minibatches."""

    def checked_size(size: Any, key: tuple[int, int]) -> int:
        if not is_whole(size):
            raise ValueError(f"batch_size={batch_size!r}: must be a whole number of rows.")
        if size < 1:
            raise ValueError(
                f"batch_size={batch_size!r}: must be 1 row or more, or None for all data."
            )
        if (
            size > key[0]
            and not lengths
            and not any(lies_on_its_side(model, rv) for rv in by_rows[key])
        ):
            return key[0]
        if size > key[0]:
            raise ValueError(f"batch_size={batch_size!r}: there are only {key[0]} rows of data.")
        return int(size)

    labels = {
        key: [label for variable in members for label in _labels(model, variable, candidates)]
        for key, members in by_rows.items()
    }
    listing = "; ".join(
        f"{quoted(dict.fromkeys(labels[key]))} with {key[0]} rows" for key in by_rows
    )
    if not by_rows:
        instead = "Leave marginalize out" if batch_size == ALL_ROWS else "Pass batch_size=None"
        raise NeedsAllRows(
            "No likelihood of this model is a sum over independent rows. Rows lie on the leading "
            "axis of an observed variable and have one log-likelihood each; a time series, a "
            "Gaussian process, a pm.Potential or a single number has none.",
            instead=f"{instead} to use all data at every step, or use NUTS.",
        )
    if batch_size == "auto":
        if from_minibatch:
            return {key: key[1] for key in by_rows}
        return {key: _first_size(key[0]) for key in by_rows}
    if not isinstance(batch_size, Mapping):
        if len(by_rows) > 1 and batch_size not in (None, ALL_ROWS):
            raise ValueError(
                f"batch_size={batch_size!r}: the likelihoods have different numbers of rows: "
                f"{listing}. Name the groups: batch_size={{name: n, ...}}; a group that isn't "
                "named is used whole."
            )
        return {
            key: key[1] if batch_size is None else checked_size(batch_size, key) for key in by_rows
        }

    return _named_sizes(batch_size, by_rows, labels, listing, checked_size, from_minibatch)


def _named_sizes(
    batch_size: Mapping[str, int],
    by_rows: ByRows,
    labels: Mapping[tuple[int, int], Sequence[str]],
    listing: str,
    checked_size: Callable[[Any, tuple[int, int]], int],
    from_minibatch: bool,
) -> dict[tuple[int, int], int]:
    """Batch sizes by the names of groups of rows."""
    if unknown := [x for x in batch_size if not any(x in ls for ls in labels.values())]:
        raise ValueError(
            f"batch_size={dict(batch_size)!r}: {unknown[0]!r} is not the name of a group of rows. "
            f"This model has: {listing}."
        )
    sizes = {}
    for key in by_rows:
        named = [name for name in batch_size if name in labels[key]]
        given = {checked_size(batch_size[name], key) for name in named}
        if len(given) > 1:
            raise ValueError(
                f"batch_size={dict(batch_size)!r} gives {sorted(given)} to the same rows. Name "
                f"them once. This model has: {listing}."
            )
        if given or from_minibatch:
            sizes[key] = given.pop() if given else key[1]
    return sizes


def _first_size(n_rows: int) -> int:
    """Rows with which the search for a batch size begins: all of few, at most half of others."""
    return n_rows if n_rows < FEW_ROWS else min(FIRST_SIZE, n_rows // 2)


def _placeholder(source: Variable, i: int) -> Variable:
    kind = source.type
    return pt.tensor(f"batch_{i}", dtype=kind.dtype, shape=(None, *kind.shape[1:]))


def _labels(
    model: Model, variable: Variable, candidates: Mapping[Variable, Likelihood]
) -> list[str]:
    """Names by which ``batch_size={name: n}`` can call the rows of an observed variable."""
    sources = candidates[variable].sources
    names = [variable.name, leading_dim(model, variable.name)]
    names += [source.name for source in sources if source in model.data_vars]
    return [name for name in names if name is not None]
