"""Data that take the place of what a model's containers hold: arrays, or a source of blocks.

Knows containers and rows, no gradients and no chains.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.containers import Container, StreamError, container_named
from pymc_sghmc.rows.files import check_file
from pymc_sghmc.rows.forms import known_form
from pymc_sghmc.rows.sources import Source
from pymc_sghmc.rows.values import array_for, refuse_other_lengths

__all__ = ["GivenData", "given_arrays", "given_data"]


class GivenData(NamedTuple):
    """Rows that aren't in the model, by the names of its containers."""

    arrays: dict[str, Array] | None  # all of them, or some that stand for them
    source: Source | None = None  # what yields them, where arrays hold some

    @property
    def n_rows(self) -> int | None:
        """Number of all rows, where arrays hold some."""
        return None if self.source is None else self.source.n_rows


def given_data(
    data: Any, containers: Mapping[str, Container], taken: Mapping[str, Container] | None = None
) -> GivenData:
    """Check what a user passes as ``data``; of a source no more than its first row is at hand.

    Parameters
    ----------
    data : dict, data frame, array, path or loader
        As documented by the samplers.
    containers : dict of {str: Container}
        Those of the model.
    taken : dict of {str: Container}, optional
        Those for which a data frame needs columns. Default: all.
    """
    if not containers:
        raise ValueError(
            "data=: the model has no pm.Data into which the rows could be put. Build it with a few "
            'rows in these, such as pm.Data("x", few_rows). With Bambi give Bambi the whole frame, '
            "and make the step without data=."
        )
    data = known_form(data, containers if taken is None else taken)
    if isinstance(data, Mapping):
        return GivenData(given_arrays(containers, data))
    source = Source(data, containers)
    return GivenData(source.first, source)


def given_arrays(
    containers: Mapping[str, Container], values: Mapping[str, Any]
) -> dict[str, Array]:
    """Return arrays of numbers that take the place of what data containers hold.

    Arrays are taken as they are, without a copy; frames and lists are copied into arrays.

    Parameters
    ----------
    containers : dict of {str: Container}
        Those of the model.
    values : dict
        By their names.
    """
    if not values:
        raise ValueError("data={}: give the rows of at least one container of the model.")
    arrays = {}
    for name, value in values.items():
        container = container_named(containers, name)
        check_file(name, value)
        if isinstance(value, np.memmap) and not _is_native(value.dtype):
            raise StreamError(
                f"data=: {name!r} has dtype {value.dtype.str}, which would have to be converted in "
                "memory. Write the file with a dtype of this machine's, such as float32, or pass "
                "pymc_sghmc.loaders.ArrayLoader({...}), which converts blocks of rows"
            )
        arrays[name] = array_for(container, value)
    refuse_other_lengths(arrays, values, "data=")
    if len(next(iter(arrays.values()))) == 0:
        raise ValueError("data=: the arrays have no rows.")
    return arrays


def _is_native(dtype: np.dtype) -> bool:
    """Whether compiled functions take arrays of this type."""
    return dtype.isnative and (dtype.kind != "f" or dtype.itemsize in (4, 8))
