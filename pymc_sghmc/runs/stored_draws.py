"""Draws and statistics of a stored run as xarray has them, read when they are asked for.

Knows files, xarray and the data of models; no steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

from pymc.backends.arviz import (
    coords_and_dims_for_inferencedata,
    find_constants,
    find_observations,
)
from pymc.util import is_transformed_name
from xarray.backends import BackendArray
from xarray.core import indexing

from pymc_sghmc.runs import files
from pymc_sghmc.runs.stored_chain import StoredChain

__all__ = ["data_of", "datasets", "layout_of", "rectangle"]

# As pm.to_inference_data names them.
NAMES = {
    "model_logp": "lp",
    "mean_tree_accept": "acceptance_rate",
    "depth": "tree_depth",
    "tree_size": "n_steps",
}
LEFT_OUT = "tune", "in_warmup"


def rectangle(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Choose chains and a length so that they hold the most draws of an interrupted run.

    Returns
    -------
    chains : list of int
    length : int
    """
    by_length = sorted(range(len(lengths)), key=lambda chain: -lengths[chain])
    sizes = [(k + 1) * lengths[chain] for k, chain in enumerate(by_length)]
    k = len(sizes) - 1 - int(np.argmax(sizes[::-1]))  # the most chains among the best
    return sorted(by_length[: k + 1]), lengths[by_length[k]]


def layout_of(
    model: pm.Model, trace: Any, step: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what is stored, for `datasets`, and the coordinates that a file can hold."""
    stats = [
        {k: np.dtype(d).str for k, d in one.items() if np.dtype(d) != object}
        for one in step.stats_dtypes
    ]
    coords, dims = coords_and_dims_for_inferencedata(model)
    variables = {
        name: (list(shape), np.dtype(trace.var_dtypes[name]).str, dims.get(name))
        for name, shape in trace.var_shapes.items()
        if not is_transformed_name(name)
    }
    labels = {name: _plain(values) for name, values in coords.items()}
    return {"variables": variables, "stats": stats}, labels


class _Draws(BackendArray):
    """Draws of one variable of some chains, or statistics of several samplers, side by side."""

    def __init__(
        self,
        members: list[str],
        chains: Sequence[StoredChain],
        draws: range,
        shape: Sequence[int],
        dtype: str,
    ) -> None:
        self.members = members
        self.chains = chains
        self.draws = draws
        last = (len(members),) if len(members) > 1 else ()
        self.shape = (len(chains), len(draws), *shape, *last)
        self.dtype = np.dtype(dtype)

    def __getitem__(self, key: Any) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read
        )

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        chain, draw, *rest = key
        chains = np.asarray(np.arange(len(self.chains))[chain])
        draws = np.asarray(np.asarray(self.draws)[draw])
        shape = np.broadcast_to(0, self.shape[2:])[tuple(rest)].shape
        values = np.empty((chains.size, draws.size, *shape), self.dtype)
        for i, of_chain in zip(np.atleast_1d(chains), values, strict=True):
            self._read_chain(of_chain, self.chains[i], np.atleast_1d(draws), tuple(rest))
        return values.reshape(chains.shape + draws.shape + shape)

    def _read_chain(
        self, values: np.ndarray, chain: StoredChain, draws: np.ndarray, rest: tuple[Any, ...]
    ) -> None:
        """Put entries of a chain's draws into an array, with one segment in memory at a time."""
        for start, stop, path in chain.segments:
            at = (draws >= start) & (draws < stop)
            if at.any():
                read = [files.array(path, member) for member in self.members]
                whole = np.stack(read, axis=-1) if len(read) > 1 else read[0]
                values[at] = whole[(slice(None), *rest)][draws[at] - start]


def _variable(draws: _Draws, dims: Sequence[str]) -> xr.Variable:
    """Return a variable that is read when it is asked for, and then kept."""
    lazy: Any = indexing.LazilyIndexedArray(draws)
    copied: Any = indexing.CopyOnWriteArray(lazy)
    kept: Any = indexing.MemoryCachedArray(copied)  # type: ignore[no-untyped-call]
    return xr.Variable(("chain", "draw", *dims), kept)


def datasets(
    chains: Sequence[StoredChain],
    layout: Mapping[str, Any],
    coords: Mapping[str, Any],
    draws: range,
    attrs: Mapping[str, Any],
) -> dict[str, xr.Dataset]:
    """Return posterior and statistics of some draws.

    Parameters
    ----------
    chains : list of StoredChain
    layout : dict
        Of the run: ``variables``, by name shape, dtype and dims, and ``stats``, for each sampler
        names and dtypes.
    coords : dict
    draws : range
    attrs : dict
    """
    at = {"chain": [chain.chain for chain in chains], "draw": np.arange(len(draws))}
    variables = {}
    for name, (shape, dtype, dims) in layout["variables"].items():
        dims = dims or [f"{name}_dim_{i}" for i in range(len(shape))]
        variables[name] = _variable(_Draws([f"variable {name}"], chains, draws, shape, dtype), dims)
    statistics = _statistics(chains, layout["stats"], draws)
    return {
        "posterior": _dataset(variables, coords, at, attrs),
        "sample_stats": _dataset(statistics, {}, at, attrs),
    }


def _statistics(
    chains: Sequence[StoredChain], stats: Sequence[Mapping[str, str]], draws: range
) -> dict[str, xr.Variable]:
    """Return statistics; those of several samplers have one more dim."""
    dtypes: dict[str, str] = {}
    for sampler in stats:
        for name, dtype in sampler.items():
            dtypes.setdefault(name, dtype)
    variables = {}
    for stored_name, dtype in dtypes.items():
        if stored_name in LEFT_OUT:
            continue
        members = [f"stat {i} {stored_name}" for i, own in enumerate(stats) if stored_name in own]
        name = NAMES.get(stored_name, stored_name)
        dims = [f"{name}_dim_0"] if len(members) > 1 else []
        variables[name] = _variable(_Draws(members, chains, draws, (), dtype), dims)
    return variables


def _labels_of(values: Any) -> np.ndarray:
    """Return the coordinates of a dim as an array; dates are dates, tuples are single labels."""
    single = [tuple(x) if isinstance(x, np.ndarray | list) else x for x in values]
    return np.asarray(pd.Index(single, tupleize_cols=False).to_numpy())


def _plain(values: Any) -> np.ndarray:
    """Return coordinates as an array that a file can hold without pickles."""
    array = _labels_of(values)
    return np.array([str(x) for x in array], dtype=str) if array.dtype.hasobject else array


def data_of(model: pm.Model) -> dict[str, xr.Dataset]:
    """Return what a model observes, and its constant data."""
    coords, dims = coords_and_dims_for_inferencedata(model)
    groups = {}
    for group, arrays in (
        ("observed_data", find_observations(model)),
        ("constant_data", find_constants(model)),
    ):
        variables = {}
        for name, values in arrays.items():
            values = np.asarray(values)
            names = dims.get(name) or [f"{name}_dim_{i}" for i in range(values.ndim)]
            variables[name] = xr.Variable(names, values)
        if variables:
            groups[group] = _dataset(variables, coords)
    return groups


def _dataset(
    variables: Mapping[str, xr.Variable],
    coords: Mapping[str, Any],
    at: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Return variables with the coordinates of their dims: the model's where it has as many."""
    labels: dict[Any, Any] = dict(at or {})
    for variable in variables.values():
        for dim, n in variable.sizes.items():
            is_labelled = dim in coords and len(coords[str(dim)]) == n
            labels.setdefault(dim, _labels_of(coords[str(dim)]) if is_labelled else np.arange(n))
    return xr.Dataset(variables, coords=labels, attrs=attrs)
