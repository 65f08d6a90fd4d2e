"""Rows to predict, put into the data containers of a model block by block.

Knows PyMC models and rows; no draws.
"""

import hashlib

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable

from pymc_sghmc.models.graphs import array_of, data_leaves, observed_variables
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.containers import Container, containers_of
from pymc_sghmc.rows.given_data import given_data
from pymc_sghmc.rows.reading import Reader

__all__ = ["RowsToPredict", "old_values"]

FEW_ROWS = 1000  # that tell data from others


class RowsToPredict:
    """The rows to predict, put into the model's containers block by block."""

    def __init__(self, model: Model, data: Any) -> None:
        self._model = model
        self._containers = containers_of(model)
        taken = _without_outcomes(model, self._containers)
        arrays, source = given_data(data, self._containers, taken)
        assert arrays is not None
        self._arrays = arrays
        self._names = list(arrays)
        self._reader: Reader | None = None
        if source is None:
            self.n = len(arrays[self._names[0]])
        else:
            self.n = source.rows_per_pass
            self._reader = Reader(source, self._names, None)
        in_model = {self._containers[name].shape[0] for name in self._names}
        self._left_out = {
            name
            for name in self._containers.keys() - set(self._names)
            if self._containers[name].shape[:1] and self._containers[name].shape[0] in in_model
        }
        self._filled = self._left_out - taken.keys()  # outcomes, whose values don't matter

    def missing_for(self, variables: Iterable[Variable]) -> list[str]:
        """Return containers that variables depend on, and that seem to need rows, too.

        They have as many rows in the model as those whose rows are given. A table of groups may
        have so many by chance.
        """
        leaves = {leaf.name for variable in variables for leaf in data_leaves(variable)}
        return sorted(self._left_out & leaves - self._filled)

    def digest(self) -> str:
        """Return what tells these rows from others: a hash of some of them."""
        n_few = min(self.n, FEW_ROWS)
        if self._reader is None:
            few = np.linspace(0, self.n - 1, n_few).astype(int)
            arrays: Sequence[Array] = [self._arrays[name][few] for name in self._names]
        else:
            arrays = self._reader.read(0, n_few)
        digest = hashlib.sha256()
        for name, array in zip(self._names, arrays, strict=True):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()[:16]

    def put(self, start: int, stop: int) -> None:
        """Put some rows into the model's containers."""
        if self._reader is None:
            arrays: Sequence[Array] = [self._arrays[name][start:stop] for name in self._names]
        else:
            arrays = self._reader.read(start, stop - start)
        for name, array in zip(self._names, arrays, strict=True):
            self._set(name, array, start)
        for name in self._filled:
            shape = (stop - start, *self._containers[name].shape[1:])
            self._set(name, np.zeros(shape), start)

    def _set(self, name: str, array: Array, start: int) -> None:
        container = self._containers[name]
        values = np.asarray(array, dtype=container.dtype)
        _set_rows(self._model, name, values, np.arange(start, start + len(values)))


def _set_rows(model: Model, name: str, values: Array, labels: Any) -> None:
    """Put values into a container, and give its leading dim their number.

    ``pm.set_data`` does that, too, but fails where a dim has no name (PyMC 5.28 and 6.4).
    """
    model[name].set_value(values)
    for dim in model.named_vars_to_dims.get(name, ())[:1]:
        # of others the length is that of the data themselves
        if dim is not None and isinstance(model.dim_lengths[dim], SharedVariable):
            has_labels = model.coords.get(dim) is not None
            model.set_dim(dim, len(values), labels if has_labels else None)


def _without_outcomes(model: Model, containers: Mapping[str, Container]) -> dict[str, Container]:
    """Return the containers that predictions depend on: others hold outcomes alone."""
    observed = {
        leaf.name
        for variable in observed_variables(model)
        for leaf in data_leaves(model.rvs_to_values[variable])
    }
    used = {
        leaf.name
        for variable in model.basic_RVs + model.deterministics
        for leaf in data_leaves(variable)
    }
    return {name: c for name, c in containers.items() if name in used or name not in observed}


@contextmanager
def old_values(model: Model) -> Iterator[None]:
    """Put the values that the model's data containers have now back at the end."""
    values = {variable.name: array_of(variable).copy() for variable in model.data_vars}
    coords = dict(model.coords)
    try:
        yield
    finally:
        for name, array in values.items():
            dims = model.named_vars_to_dims.get(name, ())
            _set_rows(model, name, array, coords.get(dims[0]) if dims else None)
