"""What a stored run gives back: draws and statistics as xarray has them, read when they are asked for.

Knows files, xarray and the data of models; no steps.
"""

import numpy as np
import pandas as pd
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

__all__ = ["data_of", "datasets", "layout_of", "rectangle"]

# As pm.to_inference_data names them.
NAMES = {
    "model_logp": "lp",
    "mean_tree_accept": "acceptance_rate",
    "depth": "tree_depth",
    "tree_size": "n_steps",
}
LEFT_OUT = "tune", "in_warmup"


def rectangle(lengths):
    """Choose chains and a length so that they hold the most draws: those of a run that was interrupted.

    Returns
    -------
    chains : list of int
    length : int
    """
    by_length = sorted(range(len(lengths)), key=lambda chain: -lengths[chain])
    sizes = [(k + 1) * lengths[chain] for k, chain in enumerate(by_length)]
    k = len(sizes) - 1 - int(np.argmax(sizes[::-1]))  # the most chains among the best
    return sorted(by_length[: k + 1]), lengths[by_length[k]]


def layout_of(model, trace, step) -> tuple:
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

    def __init__(self, members, chains, start, stop, shape, dtype):
        self.members = members
        self.chains = chains
        self.start = start
        last = (len(members),) if len(members) > 1 else ()
        self.shape = (len(chains), stop - start, *shape, *last)
        self.dtype = np.dtype(dtype)

    def __getitem__(self, key):
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read
        )

    def _read(self, key):
        chain, draw, *rest = key
        chains = np.arange(len(self.chains))[chain]
        draws = np.arange(self.start, self.start + self.shape[1])[draw]
        shape = np.broadcast_to(0, self.shape[2:])[tuple(rest)].shape
        found = np.empty((chains.size, draws.size, *shape), self.dtype)
        for i, values in zip(np.atleast_1d(chains), found, strict=True):
            self._put(values, self.chains[i], np.atleast_1d(draws), tuple(rest))
        return found.reshape(chains.shape + draws.shape + shape)

    def _put(self, values, files_of_chain, draws, rest):
        """Put entries of a chain's draws into an array, with one segment in memory at a time."""
        for start, stop, path in files_of_chain.segments:
            at = (draws >= start) & (draws < stop)
            if at.any():
                read = [files.array(path, member) for member in self.members]
                whole = np.stack(read, axis=-1) if len(read) > 1 else read[0]
                values[at] = whole[(slice(None), *rest)][draws[at] - start]


def _variable(members, chains, start, stop, shape, dtype, dims):
    draws = _Draws(members, chains, start, stop, shape, dtype)
    lazily = indexing.MemoryCachedArray(
        indexing.CopyOnWriteArray(indexing.LazilyIndexedArray(draws))
    )
    return xr.Variable(("chain", "draw", *dims), lazily)


def datasets(chains, layout, coords, start, stop, attrs) -> dict:
    """Return posterior and statistics of the draws from ``start`` to ``stop``.

    Parameters
    ----------
    chains : list of StoredChain
    layout : dict
        Of the run: ``variables``, by name shape, dtype and dims, and ``stats``, for each sampler
        names and dtypes.
    coords : dict
    start, stop : int
    attrs : dict

    Returns
    -------
    dict of {str: xarray.Dataset}
    """
    at = {"chain": [one.chain for one in chains], "draw": np.arange(stop - start)}
    variables = {}
    used = {}
    for name, (shape, dtype, dims) in layout["variables"].items():
        dims = dims or [f"{name}_dim_{i}" for i in range(len(shape))]
        variables[name] = _variable([f"variable {name}"], chains, start, stop, shape, dtype, dims)
        used |= dict(zip(dims, shape, strict=True))
    posterior = xr.Dataset(variables, coords=at | _labels(used, coords), attrs=attrs)
    stats = {}
    found = {}
    counts = {}
    for i, own in enumerate(layout["stats"]):
        for name, dtype in own.items():
            found.setdefault(name, (dtype, []))[1].append(f"stat {i} {name}")
    for name, (dtype, members) in found.items():
        if name in LEFT_OUT:
            continue
        name = NAMES.get(name, name)
        dims = [f"{name}_dim_0"] if len(members) > 1 else []
        counts |= {dim: np.arange(len(members)) for dim in dims}
        stats[name] = _variable(members, chains, start, stop, (), dtype, dims)
    statistics = xr.Dataset(stats, coords=at | counts, attrs=attrs)
    return {"posterior": posterior, "sample_stats": statistics}


def _labels_of(values):
    """Return the coordinates of a dim as an array; dates are dates, tuples are single labels."""
    single = [tuple(x) if isinstance(x, np.ndarray | list) else x for x in values]
    return pd.Index(single, tupleize_cols=False).to_numpy()


def _plain(values):
    """Return coordinates as an array that a file can hold without pickles."""
    array = _labels_of(values)
    return np.array([str(x) for x in array], dtype=str) if array.dtype.hasobject else array


def data_of(model) -> dict:
    """Return what a model observes, and its constant data."""
    coords, dims = coords_and_dims_for_inferencedata(model)
    found = {}
    for group, arrays in (
        ("observed_data", find_observations(model)),
        ("constant_data", find_constants(model)),
    ):
        variables = {}
        used = {}
        for name, values in arrays.items():
            values = np.asarray(values)
            own = dims.get(name) or [f"{name}_dim_{i}" for i in range(values.ndim)]
            variables[name] = own, values
            used |= dict(zip(own, values.shape, strict=True))
        if variables:
            found[group] = xr.Dataset(variables, coords=_labels(used, coords))
    return found


def _labels(sizes, coords) -> dict:
    """Return the coordinates of dims: the model's where it has as many."""
    return {
        dim: _labels_of(coords[dim]) if dim in coords and len(coords[dim]) == n else np.arange(n)
        for dim, n in sizes.items()
    }
