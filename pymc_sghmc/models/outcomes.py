"""What a model's observed variables were observed to be, told by one number.

By it a diagnostic sees whether it has the data of a run. Knows graphs and arrays.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pymc.model import Model

from pymc_sghmc.models.graphs import array_of, data_leaves, observed_variables
from pymc_sghmc.protocols import Array

__all__ = ["Outcome", "from_sums", "mark_of", "mark_of_model", "outcomes_of", "sums_of_values"]


class Outcome(NamedTuple):
    """An array of observed values."""

    name: str | None  # of the model's data container, if it is one
    values: Any  # an array, or a leaf of the model's graphs, asked anew

    @property
    def mark(self) -> float:
        """See `mark_of`."""
        is_array = isinstance(self.values, np.ndarray)
        return mark_of(np.ma.getdata(self.values if is_array else array_of(self.values)))


def outcomes_of(model: Model, data: Mapping[str, Any] | None = None) -> tuple[Outcome, ...]:
    """Return the arrays of which a model's observed values are made.

    Parameters
    ----------
    model : pm.Model
    data : dict of {str: array}, optional
        Arrays that take the place of what the model's ``pm.Data`` of these names hold.
    """
    values = [model.rvs_to_values[variable] for variable in observed_variables(model)]
    leaves = dict.fromkeys(leaf for value in values for leaf in data_leaves(value))
    return tuple(Outcome(leaf.name, (data or {}).get(leaf.name, leaf)) for leaf in leaves)


def mark_of(values: Array) -> float:
    """Return Σ y + 2 Σ |y|: whatever the order of rows is, and if y is centred or scaled.

    NaN where values are missing or aren't numbers.
    """
    if values.dtype.kind not in "bifu":
        return np.nan
    return from_sums(*sums_of_values(values))


def sums_of_values(values: Array) -> tuple[float, float]:
    """Return Σ y and Σ |y|. Not of whole numbers as they are: |−128| is −128 where 8 bits do."""
    sizes = np.abs(values, dtype=float if values.dtype.kind == "i" else None)
    return float(values.sum(dtype=float)), float(sizes.sum(dtype=float))


def from_sums(total: float, sizes: float) -> float:
    """Return the mark of values of which these are the sum, and the sum of their sizes."""
    return total + 2 * sizes


def mark_of_model(model: Model) -> float:
    """Return the mark of all that a model holds as observed now."""
    return sum(outcome.mark for outcome in outcomes_of(model))
