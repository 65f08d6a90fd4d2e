"""A loader of arrays on disk: memory-mapped files, Zarr, HDF5. Knows arrays and blocks."""

import math

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_sghmc.checks import whole_steps
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.containers import library_of
from pymc_sghmc.rows.files import MappedFile, check_file, mapped_file

__all__ = ["ArrayLoader", "Block", "number_of_rows"]

BLOCK_BYTES = 2**20  # read at a time

Block = dict[str, Array]


class ArrayLoader:
    """Loader of arrays on disk: reads blocks of successive rows, in random order.

    Parameters
    ----------
    arrays : dict of {str: array}
        Arrays by the names of the model's ``pm.Data``, with rows along the first axis. They may be
        `np.memmap`, Zarr or HDF5 arrays, or any object that has a ``shape`` and a ``dtype`` and
        gives a NumPy array for a slice of rows.
    block_rows : int, optional
        Number of rows in a block, which are read together. Default: the rows of a chunk if the
        arrays have chunks, because these are read whole, and otherwise 1 MB of rows.
    buffer_rows : int, optional
        Number of rows that the step holds in memory and shuffles. Default: 32 MB of rows, or more
        if blocks are large.

    Raises
    ------
    ValueError
        If there is no dict of arrays, if they have different numbers of rows, or if a file is
        shorter than its array.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGHMC
    >>> from pymc_sghmc.loaders import ArrayLoader
    >>> y = np.random.default_rng(0).normal(3.0, 1.0, size=10_000)  # or np.memmap("y.f8")
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     _ = pm.Normal("likelihood", mu, 1, observed=pm.Data("y", y[:10]))
    ...     step = SGHMC(batch_size=100, data=ArrayLoader({"y": y}))
    ...     idata = pm.sample(100, tune=50, chains=2, step=step, random_seed=1, progressbar=False)
    >>> mu = idata.posterior["mu"]
    >>> bool(abs(mu.mean() - y.mean()) < 0.005), round(float(mu.std()), 2)
    (True, 0.01)
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        block_rows: int | None = None,
        buffer_rows: int | None = None,
    ) -> None:
        if not isinstance(arrays, Mapping):
            raise ValueError(
                f"ArrayLoader: arrays is of type {type(arrays).__name__}. Pass a dict of arrays by "
                'the names of the model\'s pm.Data, such as {"x": x, "y": y}. A data frame goes to '
                "data= as it is."
            )
        if not arrays:
            raise ValueError("ArrayLoader: pass at least one array.")
        for name, array in arrays.items():
            if not getattr(array, "shape", ()):
                raise ValueError(
                    f"ArrayLoader: {name!r} is of type {type(array).__name__}, which has no shape. "
                    "Pass an array with rows along its first axis, such as np.asarray(...)."
                )
        lengths = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"ArrayLoader: the arrays have different numbers of rows, {lengths}. Pass arrays "
                "of the same rows, and check that no file was cut short."
            )
        for name, array in arrays.items():
            check_file(name, array)
        self.arrays = dict(arrays)
        self.block_rows = number_of_rows("block_rows", block_rows) or self._default_rows()
        self.buffer_rows = number_of_rows("buffer_rows", buffer_rows)

    def __getstate__(self) -> dict[str, Any]:
        arrays = {name: _to_be_opened(array) for name, array in self.arrays.items()}
        return {**self.__dict__, "arrays": arrays}

    @property
    def mapped_files(self) -> list[MappedFile]:
        """Files of those arrays that are memory maps."""
        return [file for file in map(mapped_file, self.arrays.values()) if file is not None]

    def _default_rows(self) -> int:
        chunks = [getattr(array, "chunks", None) for array in self.arrays.values()]
        rows = [chunk[0] for chunk in chunks if chunk]
        if rows:
            return max(rows)
        row_bytes = sum(
            np.dtype(array.dtype).itemsize * int(np.prod(array.shape[1:]))
            for array in self.arrays.values()
        )
        return max(1, BLOCK_BYTES // max(1, row_bytes))

    def __len__(self) -> int:
        return next(iter(self.arrays.values())).shape[0]

    def head(self, n_rows: int = 10) -> Block:
        """Return copies of the first rows, of which the model can be built."""
        n_rows = whole_steps("n_rows", n_rows, "rows")
        return {name: np.array(array[:n_rows]) for name, array in self.arrays.items()}

    @property
    def _n_blocks(self) -> int:
        return math.ceil(len(self) / self.block_rows)

    def __iter__(self) -> Iterator[Block]:
        return self._blocks(range(self._n_blocks))

    def blocks(self, rng: np.random.Generator) -> Iterator[Block]:
        """Begin a pass over the data, with blocks in random order."""
        return self._blocks(rng.permutation(self._n_blocks).tolist())

    def _blocks(self, numbers: Iterable[int]) -> Iterator[Block]:
        for i in numbers:
            rows = slice(i * self.block_rows, min((i + 1) * self.block_rows, len(self)))
            yield {name: np.asarray(array[rows]) for name, array in self.arrays.items()}


@dataclass(frozen=True)
class _HDF5Array:
    """An HDF5 array that is opened for each block: an open one can't be pickled."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def __getitem__(self, rows: slice) -> Array:
        import h5py

        with h5py.File(self.file, "r") as file:
            values: Array = file[self.name][rows]
        return values


def _to_be_opened(array: Any) -> Any:
    """Return what stands for an array in a pickle: an HDF5 array's place, else the array."""
    if library_of(array) != "h5py":
        return array
    return _HDF5Array(array.file.filename, array.name, array.shape, array.dtype)


def number_of_rows(name: str, value: int | None) -> int | None:
    """Check an argument that is a number of rows, or None."""
    return None if value is None else whole_steps(name, value, "rows")
