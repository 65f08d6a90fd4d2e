"""Ready-made loaders of data that don't fit into memory: memory-mapped files, Zarr, HDF5, Parquet.

A loader is any object with

- ``__len__``, the number of rows (or an attribute ``total_size``, which has precedence),
- ``__iter__``, which begins a new pass and yields blocks: dicts of arrays with the same number of
  rows, by the names of the model's ``pm.Data``, or bare arrays where the model has one of these,
- optionally ``blocks(rng)``, the same in an order drawn by a NumPy generator,
- optionally ``buffer_rows``, how many rows to hold in memory and shuffle at a time.

Blocks may have any numbers of rows. Rows should be in random order in the source, or runs of
similar rows short against ``buffer_rows``. Workers that aren't forked get the loader pickled.
"""

import os

from glob import glob

import numpy as np

from pymc_sghmc.checks import whole_steps
from pymc_sghmc.rows.files import mapped_file
from pymc_sghmc.rows.sources import check_file

__all__ = ["ArrayLoader", "ParquetLoader"]

BLOCK_BYTES = 2**20  # read at a time


class ArrayLoader:
    """Blocks of successive rows of arrays on disk, in random order.

    Parameters
    ----------
    arrays : dict of {str: array}
        By the names of the model's ``pm.Data``: `np.memmap`, Zarr or HDF5 arrays, or whatever has a
        ``shape`` and gives a NumPy array for a slice of rows.
    block_rows : int, optional
        Rows in a block. Default: the rows of a chunk, if the arrays have chunks, or 1 MB.
    buffer_rows : int, optional
        Rows that the step holds in memory and shuffles. Default: 32 MB, or more if blocks are
        large.

    Raises
    ------
    ValueError
        If the arrays have different numbers of rows.

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

    def __init__(self, arrays, block_rows=None, buffer_rows=None):
        if not arrays:
            raise ValueError("ArrayLoader: pass at least one array.")
        lengths = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"ArrayLoader: the arrays have different numbers of rows, {lengths}. Is one of "
                "their files cut short?"
            )
        for name, array in arrays.items():
            check_file(name, array)
        self.arrays = dict(arrays)
        self.block_rows = _rows("block_rows", block_rows) or self._default_rows()
        self.buffer_rows = _rows("buffer_rows", buffer_rows)

    @property
    def mapped_files(self) -> list:
        """Files behind those arrays that are memory maps."""
        return [file for file in map(mapped_file, self.arrays.values()) if file is not None]

    def _default_rows(self):
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

    def __iter__(self):
        return self._blocks(range(-(-len(self) // self.block_rows)))

    def blocks(self, rng):
        """Begin a pass over the blocks in random order."""
        return self._blocks(rng.permutation(-(-len(self) // self.block_rows)).tolist())

    def _blocks(self, numbers):
        for i in numbers:
            rows = slice(i * self.block_rows, min((i + 1) * self.block_rows, len(self)))
            yield {name: np.asarray(array[rows]) for name, array in self.arrays.items()}


class ParquetLoader:
    """Row groups of Parquet files, in random order. Needs pyarrow.

    Parameters
    ----------
    path : str, path, or list of these
        A file, a folder of ``*.parquet`` files, or several files.
    columns : dict of {str: str or list of str}
        By the names of the model's ``pm.Data``: a column, for an array of one axis, or a list of
        columns, for an array of two.
    block_rows : int, default 65536
        Rows in a block, at most; row groups with more are cut.
    buffer_rows : int, optional
        Rows that the step holds in memory and shuffles. Default: 32 MB, or more if blocks are
        large.

    Raises
    ------
    ImportError
        Without pyarrow.
    ValueError
        If there are no such files or columns.

    Examples
    --------
    >>> import tempfile, numpy as np, pyarrow as pa, pyarrow.parquet as pq
    >>> from pymc_sghmc.loaders import ParquetLoader
    >>> table = pa.table({"age": np.arange(10.0), "dose": np.ones(10), "died": np.zeros(10)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(table, f"{folder}/part.parquet", row_group_size=4)
    ...     loader = ParquetLoader(folder, {"X": ["age", "dose"], "y": "died"})
    ...     len(loader), [block["X"].shape for block in loader]
    (10, [(4, 2), (4, 2), (2, 2)])
    """

    def __init__(self, path, columns, block_rows=65_536, buffer_rows=None):
        paths = path if isinstance(path, list | tuple) else [path]
        folders = [p for p in paths if os.path.isdir(p)]
        self.files = [os.fspath(p) for p in paths if p not in folders]
        self.files += sorted(f for p in folders for f in glob(os.path.join(p, "*.parquet")))
        if not self.files:
            raise ValueError(f"ParquetLoader({path!r}): the folder has no *.parquet files.")
        if not columns:
            raise ValueError("ParquetLoader: columns must name at least one container.")
        self.columns = dict(columns)
        self.block_rows = _rows("block_rows", block_rows)
        self.buffer_rows = _rows("buffer_rows", buffer_rows)
        self._groups = []
        self._n_rows = 0
        for file in self.files:
            metadata, schema = self._opened(file)
            missing = [name for name in self._flat() if name not in schema.names]
            if missing:
                raise ValueError(
                    f"ParquetLoader: {file} has no column {missing[0]!r}. It has {schema.names}."
                )
            self._groups += [(file, i) for i in range(metadata.num_row_groups)]
            self._n_rows += metadata.num_rows

    def _opened(self, file):
        with _parquet().ParquetFile(file) as opened:
            return opened.metadata, opened.schema_arrow

    def _flat(self) -> list[str]:
        names = [[c] if isinstance(c, str) else list(c) for c in self.columns.values()]
        return list(dict.fromkeys(name for several in names for name in several))

    def __len__(self) -> int:
        return self._n_rows

    def __iter__(self):
        return self._blocks(self._groups)

    def blocks(self, rng):
        """Begin a pass over the row groups in random order."""
        return self._blocks([self._groups[i] for i in rng.permutation(len(self._groups))])

    def _blocks(self, groups):
        parquet = _parquet()
        flat = self._flat()
        for file, group in groups:
            with parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(
                    self.block_rows, row_groups=[group], columns=flat, use_threads=False
                ):
                    arrays = {c: batch.column(c).to_numpy(zero_copy_only=False) for c in flat}
                    yield {
                        name: arrays[c]
                        if isinstance(c, str)
                        else np.column_stack([arrays[one] for one in c])
                        for name, c in self.columns.items()
                    }


def _rows(name, value):
    return None if value is None else whole_steps(name, value, "rows")


def _parquet():
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "ParquetLoader needs pyarrow. Install it: pip install pyarrow."
        ) from error
    return pyarrow.parquet
