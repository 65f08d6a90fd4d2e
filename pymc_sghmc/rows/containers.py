"""What a model's data containers ask of the rows that take their place, and from which columns.

Knows models, and that data frames have columns; no values, no rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from pymc.model import Model

from pymc_sghmc.checks import quoted
from pymc_sghmc.exceptions import ChainError
from pymc_sghmc.models.graphs import array_of

__all__ = [
    "Container",
    "StreamError",
    "column_names",
    "columns_of_containers",
    "columns_of_frame",
    "container_named",
    "containers_of",
    "each_once",
    "library_of",
]


class StreamError(ChainError, ValueError):
    """Data that can't be what the model takes."""


@dataclass(frozen=True)
class Container:
    """What a ``pm.Data`` of the model asks of the rows that take its place.

    Attributes
    ----------
    name : str
    dtype : numpy.dtype
    shape : tuple of int
        With the few rows that the model holds.
    dims : tuple of str or None
    columns : tuple
        Labels of its second dim; () where the model has no coords for it.
    labels : dict of {str: pandas.Index}
        All coords of the model: text becomes its place among these.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    dims: tuple[str | None, ...] = ()
    columns: tuple[Any, ...] = ()
    labels: Mapping[str, pd.Index] = field(default_factory=dict)


def containers_of(model: Model) -> dict[str, Container]:
    """Return what each data container of a model asks for, by name."""
    coords = {dim: list(values) for dim, values in model.coords.items() if values is not None}
    labels = {dim: pd.Index(values) for dim, values in coords.items()}
    labels = {dim: index for dim, index in labels.items() if index.is_unique}
    containers = {}
    for variable in model.data_vars:
        dims = tuple(model.named_vars_to_dims.get(variable.name, ()))
        columns = coords.get(dims[1], ()) if len(dims) == 2 else ()
        containers[variable.name] = Container(
            name=variable.name,
            dtype=np.dtype(variable.dtype),
            shape=array_of(variable).shape,
            dims=dims,
            columns=tuple(columns),
            labels=labels,
        )
    return containers


def container_named(containers: Mapping[str, Container], name: str) -> Container:
    """Return the container of a name, or refuse the name."""
    if name not in containers:
        listed = ", ".join(map(repr, containers)) or "none"
        raise StreamError(
            f"data=: the model has no container {name!r}, only {listed}. Build it with a few of "
            "the rows in pm.Data of that name"
        )
    return containers[name]


def library_of(value: Any) -> str:
    """Return the name of the library that an object comes from."""
    return type(value).__module__.split(".")[0]


def column_names(frame: Any) -> list[Any] | None:
    """Return the names of a data frame's columns; None of what is none.

    pandas' and Polars' frames and Arrow's tables have protocols in common. Of xarray's datasets
    the data variables are columns.
    """
    if isinstance(frame, xr.Dataset):
        return list(frame.data_vars)
    if not (hasattr(frame, "__dataframe__") or hasattr(frame, "__arrow_c_stream__")):
        is_batch = library_of(frame) == "pyarrow" and hasattr(frame, "schema")
        return list(frame.schema.names) if is_batch and hasattr(frame, "column_names") else None
    names = getattr(frame, "column_names", None)  # Arrow's; its tables' ``columns`` are arrays
    if names is None:
        names = getattr(frame, "columns", None)
    return None if names is None else list(names)


def columns_of_frame(frame: Any, containers: Mapping[str, Container]) -> dict[str, Any]:
    """Return what a data frame has for each container: a column, or a frame of several."""
    found = columns_of_containers(containers, column_names(frame) or [])
    return {
        name: frame[columns] if isinstance(columns, str) else _selected(frame, list(columns))
        for name, columns in found.items()
    }


def columns_of_containers(
    containers: Mapping[str, Container], names: Sequence[Any], frame: str = "the frame"
) -> dict[str, str | list[str]]:
    """Find which columns each container takes: those of its labels, or the one of its name.

    Parameters
    ----------
    containers : dict of {str: Container}
    names : list
        Of the columns.
    frame : str, default "the frame"
        What a message calls that which has them.
    """
    found: dict[str, str | list[str]] = {}
    for name, container in containers.items():
        if container.columns and set(container.columns) <= set(names):
            found[name] = list(container.columns)
        elif name in names:
            found[name] = name
    n_rows = {containers[name].shape[:1] for name in found}
    for name, container in containers.items():
        # a container with another number of rows isn't of these rows
        if name not in found and (not found or container.shape[:1] in n_rows):
            missing = [label for label in container.columns if label not in names]
            if container.columns and len(missing) < len(container.columns):
                raise StreamError(
                    f"data=: {name!r} takes the columns that its coords name, of which "
                    f"{frame} has no {quoted(map(str, missing))}, only {quoted(map(str, names))}"
                )
            raise StreamError(
                f"data=: {frame} has no column {name!r}, only {quoted(names) or 'none'}. Name "
                "the container as a column is named. For several columns give its second dim these "
                'names as coords, or pass data={"X": frame[["a", "b"]], "y": frame["y"]}'
            )
    return found


def each_once(columns: Mapping[str, str | Sequence[str]]) -> list[str]:
    """Return the names of the columns that containers take, each once."""
    lists = [[names] if isinstance(names, str) else names for names in columns.values()]
    return list(dict.fromkeys(name for names in lists for name in names))


def _selected(frame: Any, columns: list[str]) -> Any:
    """Return a frame of some columns only."""
    return frame.select(columns) if library_of(frame) == "pyarrow" else frame[columns]
