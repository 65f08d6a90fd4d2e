"""A Zarr store that is written without zarr: one file for each variable and block of rows.

The format is Zarr's version 2, which zarr 2 and 3 read: zarr's own interfaces for writing differ,
and recent versions of xarray write with zarr 3 only. Knows no models.
"""

import json
import os
import zlib

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pymc_sghmc.protocols import Array

__all__ = ["PredictionStore", "StoredVariable"]

ATTRIBUTES = ".zattrs"
ROW = 2  # axis of rows, after those of chains and draws
OF_WHOLE_NUMBERS = {"id": "zlib", "level": 1}  # compressor; numbers with a fraction hardly shrink


@dataclass(frozen=True)
class StoredVariable:
    """A variable with an entry for each chain, draw and row."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype


class PredictionStore:
    """Predictions of rows on disk, block by block.

    Parameters
    ----------
    path : str or path
        Folder of the store.
    caller : str
        Name of the function, for messages.
    made_of : dict
        What tells these predictions from others, with ``block_rows`` and ``n_rows`` in it.
    random_seed : int, optional
        Default: that of the store if there is one, else a new one.

    Attributes
    ----------
    path : pathlib.Path
    random_seed : int

    Raises
    ------
    ValueError
        If the folder holds something else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        caller: str,
        made_of: Mapping[str, Any],
        random_seed: int | None,
    ) -> None:
        self.path = Path(path)
        self._block_rows = int(made_of["block_rows"])
        self._variables: Sequence[StoredVariable] = ()
        held = self._held()
        if held is not None:
            same = all(held.get(name) == value for name, value in made_of.items())
            if not same or random_seed not in (None, held.get("random_seed")):
                raise ValueError(
                    f"{caller}: {os.fspath(path)!r} holds something else than these predictions. "
                    "Delete it, or pass another path."
                )
            random_seed = held["random_seed"]
        if random_seed is None:
            random_seed = int(np.random.default_rng().integers(2**31))
        self.random_seed = int(random_seed)
        self._attributes = {**made_of, "random_seed": self.random_seed}

    def _held(self) -> dict[str, Any] | None:
        """Return the attributes of the store; {} of what is none, None where there is nothing."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return None
        try:
            return dict(json.loads((self.path / ATTRIBUTES).read_text()))
        except (OSError, ValueError):
            return {}

    def begin(self, variables: Sequence[StoredVariable], labels: Mapping[str, Array]) -> None:
        """Write what describes the variables, and the labels of their dims."""
        self._variables = variables
        metadata: dict[str, Any] = {".zgroup": {"zarr_format": 2}, ATTRIBUTES: self._attributes}
        for variable in variables:
            shape = list(variable.shape)
            shape[ROW] = self._block_rows
            metadata |= _described(variable.name, variable.dims, variable.shape, shape, variable)
        for dim, values in labels.items():
            plain = values.astype(str) if values.dtype.kind == "O" else values
            metadata |= _described(dim, (dim,), plain.shape, list(plain.shape), plain)
            self._put(f"{dim}/0", _encoded(plain))
        for name, content in metadata.items():
            self._put(name, json.dumps(content, indent=1).encode())
        whole = {"zarr_consolidated_format": 1, "metadata": metadata}
        self._put(".zmetadata", json.dumps(whole, indent=1).encode())

    def has(self, number: int) -> bool:
        """Whether a block was written."""
        return all((self.path / _file(v, number)).exists() for v in self._variables)

    def write(self, number: int, values: Sequence[Array]) -> None:
        """Write the values of a block of rows; a file is there as a whole or not at all."""
        for variable, array in zip(self._variables, values, strict=True):
            missing = self._block_rows - array.shape[ROW]
            if missing:  # in the last one: chunks of a store have one size
                widths = [(0, missing * (axis == ROW)) for axis in range(array.ndim)]
                array = np.pad(array, widths)
            self._put(_file(variable, number), _encoded(array))

    def _put(self, name: str, content: bytes) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"{file.name}.partial")
        unfinished.write_bytes(content)
        os.replace(unfinished, file)


def _file(variable: StoredVariable, number: int) -> str:
    """Return the name of a block's file, which is by the numbers of chunks along each axis."""
    places = [0] * len(variable.shape)
    places[ROW] = number
    return f"{variable.name}/{'.'.join(map(str, places))}"


def _described(
    name: str, dims: Sequence[str], shape: Sequence[int], chunks: Sequence[int], array: Any
) -> dict[str, Any]:
    """Return what Zarr keeps of an array with this dtype, by the names of the files."""
    dtype = np.dtype(array.dtype)
    description = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": [max(1, n) for n in chunks],
        "dtype": dtype.str,
        "compressor": OF_WHOLE_NUMBERS if dtype.kind in "iub" else None,
        "fill_value": "NaN" if dtype.kind == "f" else None,  # blocks that aren't there yet
        "order": "C",
        "filters": None,
    }
    return {f"{name}/.zarray": description, f"{name}/.zattrs": {"_ARRAY_DIMENSIONS": list(dims)}}


def _encoded(array: Array) -> bytes:
    content = np.ascontiguousarray(array).tobytes()
    if array.dtype.kind in "iub":
        return zlib.compress(content, level=1)
    return content
