"""Data that no step can sample from: without rows, missing, or outside the support. Raises only."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pymc.logprob.utils import ParameterValueError
from pymc.model import Model

from pymc_sghmc.checks import quoted
from pymc_sghmc.models.graphs import array_of, data_leaves, full_data, observed_variables

__all__ = ["not_finite", "refuse_empty_data", "refuse_unobserved"]

MOST_LISTED = 5  # rows that a message names


def refuse_unobserved(model: Model, asked_by: str) -> None:
    """Refuse a model without an observed variable, where an argument needs rows of data."""
    if observed_variables(model):
        return
    if model.potentials:
        names = quoted(potential.name for potential in model.potentials)
        raise ValueError(
            f"{asked_by}: the model has no observed variable, and rows inside a pm.Potential, as "
            f"in {names}, can't be told apart. Make the likelihood an observed variable: "
            "pm.CustomDist(..., observed=y) where PyMC has no such distribution. Or build the "
            "model with all rows, and leave data= and batch_size= out: each step then uses all."
        )
    raise ValueError(
        f"{asked_by}: the model has no observed variable, so it has no rows of data. Pass "
        "observed= to its likelihood, or leave data= and batch_size= out."
    )


def refuse_empty_data(
    model: Model, elsewhere: Mapping[str, int] | None = None, asked_by: str = "batch_size"
) -> None:
    """Refuse a model whose rows are needed and that has none.

    Parameters
    ----------
    model : pm.Model
    elsewhere : dict of {str: int}, optional
        Names of containers whose rows come from elsewhere.
    asked_by : str, default "batch_size"
        The argument that needs rows.
    """
    if asked_by == "batch_size":
        refuse_unobserved(model, asked_by)
    for variable in observed_variables(model):
        for leaf in [*data_leaves(model.rvs_to_values[variable]), *data_leaves(variable)]:
            if np.shape(array_of(leaf))[0]:
                continue
            if leaf.name in (elsewhere or {}):
                raise ValueError(
                    f"data=: the model has no row of {variable.name!r}: its container "
                    f"{leaf.name!r} has the shape {np.shape(array_of(leaf))}. Build the model with "
                    f"a few of the real rows, such as pm.Data({leaf.name!r}, rows[:10])."
                )
            if leaf in model.data_vars or leaf is full_data(model.rvs_to_values[variable]):
                name = leaf.name or variable.name
                raise ValueError(
                    f"{asked_by}: {name!r} has no rows: its data have the shape "
                    f"{np.shape(array_of(leaf))}. Pass data with rows, and look for a filter "
                    "that leaves none."
                )


def not_finite(
    model: Model,
    terms: Mapping[str, object],
    function: Callable[..., Sequence[np.ndarray]],
    points: Sequence[Sequence[np.ndarray]],
    arrays: Sequence[tuple[str | None, np.ndarray]],
    step: int,
) -> ValueError:
    """Say for which rows the log-likelihood isn't finite at any of some points, and why.

    Parameters
    ----------
    model : pm.Model
    terms : dict
        By names of the observed variables.
    function : callable
        Of a point and arrays: log-likelihoods by row of all terms.
    points : sequence
        Values of the model's value variables.
    arrays : sequence of (str or None, array)
        Every ``step``-th row of the data, with the names of the variables that hold them.
    step : int
    """
    n_rows = len(arrays[0][1])
    values = [array for _, array in arrays]
    impossible = [_never_finite(function, points, values, i) for i in range(len(terms))]
    allowed = set(range(n_rows)).difference(*impossible) if any(map(len, impossible)) else set()
    for source, array in arrays:
        for kind, is_odd in (("missing", np.isnan), ("infinite", np.isinf)):
            odd = _rows_where(is_odd(array)) if array.dtype.kind == "f" else np.array([], int)
            # where some have a likelihood, such values are allowed: they may be bounds
            if odd.size and allowed.isdisjoint(odd.tolist()):
                return ValueError(
                    f"The log-likelihood of {quoted(terms)} is not finite: "
                    f"{source or 'an array'} has {kind} values in {_listed(odd, step)}. Drop "
                    "these rows, or impute them beforehand."
                )
    for name, rows in zip(terms, impossible, strict=True):
        if 0 < rows.size < n_rows:
            distribution = model[name].owner.op
            label = getattr(distribution, "_print_name", (type(distribution).__name__,))[0]
            outcome = np.asarray(array_of(full_data(model.rvs_to_values[model[name]])))
            shown = ", ".join(str(outcome[row * step]) for row in rows[:MOST_LISTED])
            return ValueError(
                f"The log-likelihood of {name!r} is not finite for {_listed(rows, step)}, wherever "
                f"it is evaluated. Correct or drop such rows: does {label} allow the values "
                f"{shown}? If it does, they are too improbable at the starting point: give the "
                "parameters an initval near the data."
            )
    return ValueError(
        f"The log-likelihood of {quoted(terms)} is infinite or not a number at and near the "
        "starting point. Give the parameters an initval at which it is finite; model.debug() "
        "shows where it isn't."
    )


def _rows_where(is_odd: np.ndarray) -> np.ndarray:
    return np.flatnonzero(is_odd.reshape(len(is_odd), -1).any(axis=1))


def _never_finite(
    function: Callable[..., Sequence[np.ndarray]],
    points: Sequence[Sequence[np.ndarray]],
    arrays: Sequence[np.ndarray],
    number: int,
) -> np.ndarray:
    """Return the rows whose log-likelihood is finite at none of the points; [] if none is valid."""
    ever_finite = None
    for point in points:
        try:
            with np.errstate(all="ignore"):
                values = np.asarray(function(*point, *arrays)[number])
        except ParameterValueError:
            continue
        finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        ever_finite = finite if ever_finite is None else ever_finite | finite
    return np.array([], int) if ever_finite is None else np.flatnonzero(~ever_finite)


def _listed(rows: np.ndarray, step: int) -> str:
    """Name how many rows and the first few, by their numbers in all data."""
    numbers = ", ".join(str(row * step) for row in rows[:MOST_LISTED])
    more = ", ..." if rows.size > MOST_LISTED else ""
    if rows.size == 1:
        return f"row {numbers}"
    at_least = "at least " if step > 1 else ""
    return f"{at_least}{rows.size} rows (numbers {numbers}{more})"
