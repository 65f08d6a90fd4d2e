"""The forms that the argument ``data`` may have: each becomes a dict of values, or a loader.

Knows containers of a model and forms of data; draws no rows.
"""

import os

from collections.abc import Mapping
from typing import Any

import xarray as xr

from pymc_sghmc.checks import quoted
from pymc_sghmc.rows.array_loader import ArrayLoader
from pymc_sghmc.rows.containers import (
    Container,
    column_names,
    columns_of_containers,
    columns_of_frame,
    each_once,
    library_of,
)
from pymc_sghmc.rows.dask_loader import DaskLoader, is_of_dask
from pymc_sghmc.rows.parquet_files import ParquetFiles
from pymc_sghmc.rows.parquet_loader import ParquetLoader
from pymc_sghmc.rows.values import rows_first

__all__ = ["known_form"]

READ_IN_BLOCKS = ("zarr", "h5py")  # libraries of arrays that lie in files


def known_form(data: Any, containers: Mapping[str, Container]) -> Any:
    """Return data as a dict of values by the names of containers, or as a loader.

    Parameters
    ----------
    data : dict, data frame, array, path or loader
        As documented by the samplers.
    containers : dict of {str: Container}
    """
    if _is_path(data) or (isinstance(data, list | tuple) and data and all(map(_is_path, data))):
        files = ParquetFiles.at(data)
        found = columns_of_containers(containers, files.names, f"the data at {data}")
        return ParquetLoader(data, found)
    if isinstance(data, list | tuple):
        raise ValueError(
            f"data= is of type {type(data).__name__}. Pass a dict of arrays by the names of the "
            f"model's containers, {quoted(containers)}."
        )
    _refuse_other_collections(data)
    if column_names(data) is not None:
        if is_of_dask(data) and not isinstance(data, xr.Dataset):
            found = columns_of_containers(containers, column_names(data) or [])
            return DaskLoader(data[each_once(found)], columns=found)
        data = columns_of_frame(data, containers)
    elif is_of_dask(data) or hasattr(data, "tocsr") or _is_array(data):
        if len(containers) != 1:
            raise ValueError(
                f"data= is of type {type(data).__name__}, without a name. Pass a dict of arrays by "
                f"the names of the model's containers, {quoted(containers)}."
            )
        data = {next(iter(containers)): data}
    for value in data.values() if isinstance(data, Mapping) else ():
        _refuse_other_collections(value)
    if isinstance(data, Mapping) and any(map(is_of_dask, data.values())):
        return DaskLoader(
            {name: rows_first(containers.get(name), value) for name, value in data.items()}
        )
    if isinstance(data, Mapping) and any(map(_lies_in_a_file, data.values())):
        return ArrayLoader(data)
    return data


def _is_path(data: Any) -> bool:
    return isinstance(data, str | os.PathLike)


def _refuse_other_collections(value: Any) -> None:
    """Refuse what Dask computes that has no rows in partitions."""
    if library_of(value) == "dask" and not is_of_dask(value):
        raise ValueError(
            f"data= has a Dask object without rows, of type {type(value).__name__}. Pass Dask "
            "arrays, data frames or their columns, with an entry for each row."
        )


def _is_array(data: Any) -> bool:
    protocols = ("__array__", "__array_interface__", "__dlpack__")
    return any(hasattr(data, name) for name in protocols) or _lies_in_a_file(data)


def _lies_in_a_file(value: Any) -> bool:
    """Whether a value is an array of Zarr or HDF5."""
    return library_of(value) in READ_IN_BLOCKS and hasattr(value, "shape")
