"""Ready-made loaders of data that do not fit into memory: memory-mapped files, Zarr, HDF5, Parquet.

A loader is passed as ``data`` to a sampler. It is any object with

- ``__len__``, the number of rows (or an attribute ``total_size``, which has precedence),
- ``__iter__``, which begins a new pass over the data and yields blocks: dicts of arrays with the
  same number of rows, by the names of the model's ``pm.Data``, or bare arrays if the model has one
  of these,
- optionally ``blocks(rng)``, the same in an order drawn by a NumPy generator,
- optionally ``buffer_rows``, the number of rows to hold in memory and shuffle at a time.

Blocks may have any number of rows. Rows should be in random order in the source. If they are not,
runs of similar rows must be short compared with ``buffer_rows``. Worker processes that are not
forked get the loader by pickling.
"""

import math
import os

from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob
from typing import Any

import numpy as np

from pymc_sghmc.checks import whole_steps
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.files import MappedFile, mapped_file
from pymc_sghmc.rows.sources import check_file

__all__ = ["ArrayLoader", "ParquetLoader"]

BLOCK_BYTES = 2**20  # read at a time

Block = dict[str, Array]
PathLike = str | os.PathLike[str]


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
        If there are no arrays, if they have different numbers of rows, or if a file is shorter than
        its array.

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
        if not arrays:
            raise ValueError("ArrayLoader: pass at least one array.")
        lengths = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"ArrayLoader: the arrays have different numbers of rows, {lengths}. Pass arrays "
                "of the same rows, and check that no file was cut short."
            )
        for name, array in arrays.items():
            check_file(name, array)
        self.arrays = dict(arrays)
        self.block_rows = _rows("block_rows", block_rows) or self._default_rows()
        self.buffer_rows = _rows("buffer_rows", buffer_rows)

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


class ParquetLoader:
    """Loader of Parquet files: reads their row groups, in random order. It needs pyarrow.

    Parameters
    ----------
    path : str, path, or list of these
        A file, a folder of ``*.parquet`` files, or several files.
    columns : dict of {str: str or list of str}
        Columns by the names of the model's ``pm.Data``: one column for an array of one axis, or a
        list of columns for an array of two.
    block_rows : int, default 65536
        Largest number of rows in a block; larger row groups are cut. The default is 0.5 MB for a
        column of double precision.
    buffer_rows : int, optional
        Number of rows that the step holds in memory and shuffles. Default: 32 MB of rows, or more
        if blocks are large.

    Raises
    ------
    ImportError
        If pyarrow is not installed.
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

    def __init__(
        self,
        path: PathLike | list[PathLike] | tuple[PathLike, ...],
        columns: Mapping[str, str | Sequence[str]],
        block_rows: int = 65_536,
        buffer_rows: int | None = None,
    ) -> None:
        paths = path if isinstance(path, list | tuple) else [path]
        folders = [p for p in paths if os.path.isdir(p)]
        self.files = [os.fspath(p) for p in paths if p not in folders]
        self.files += sorted(f for p in folders for f in glob(os.path.join(p, "*.parquet")))
        if not self.files:
            raise ValueError(
                f"ParquetLoader({path!r}): the folder has no *.parquet files. Pass a folder "
                "that has some, or the files."
            )
        if not columns:
            raise ValueError(
                'ParquetLoader: columns must name at least one pm.Data, as in {"y": "died"}.'
            )
        self.columns = dict(columns)
        self.block_rows = whole_steps("block_rows", block_rows, "rows")
        self.buffer_rows = _rows("buffer_rows", buffer_rows)
        self._groups: list[tuple[str, int]] = []  # file, and number of the row group
        self._n_rows = 0
        for file in self.files:
            metadata, schema = self._opened(file)
            missing = [name for name in self._column_names() if name not in schema.names]
            if missing:
                raise ValueError(
                    f"ParquetLoader: {file} has no column {missing[0]!r}. Choose from "
                    f"{schema.names}."
                )
            self._groups += [(file, i) for i in range(metadata.num_row_groups)]
            self._n_rows += metadata.num_rows

    def _opened(self, file: str) -> tuple[Any, Any]:
        with _parquet().ParquetFile(file) as opened:
            return opened.metadata, opened.schema_arrow

    def _column_names(self) -> list[str]:
        """Return the names of all columns, each once."""
        lists = [[c] if isinstance(c, str) else list(c) for c in self.columns.values()]
        return list(dict.fromkeys(name for names in lists for name in names))

    def __len__(self) -> int:
        return self._n_rows

    def __iter__(self) -> Iterator[Block]:
        return self._blocks(self._groups)

    def blocks(self, rng: np.random.Generator) -> Iterator[Block]:
        """Begin a pass over the data, with row groups in random order."""
        return self._blocks([self._groups[i] for i in rng.permutation(len(self._groups))])

    def _blocks(self, groups: Iterable[tuple[str, int]]) -> Iterator[Block]:
        parquet = _parquet()
        names = self._column_names()
        for file, group in groups:
            with parquet.ParquetFile(file) as opened:
                batches = opened.iter_batches(
                    self.block_rows, row_groups=[group], columns=names, use_threads=False
                )
                for batch in batches:
                    yield self._block(
                        {name: batch.column(name).to_numpy(zero_copy_only=False) for name in names}
                    )

    def _block(self, arrays: Mapping[str, Array]) -> Block:
        """Return the arrays of a block from those of its columns."""
        block = {}
        for container, columns in self.columns.items():
            if isinstance(columns, str):
                block[container] = arrays[columns]
            else:
                block[container] = np.column_stack([arrays[name] for name in columns])
        return block


def _rows(name: str, value: int | None) -> int | None:
    return None if value is None else whole_steps(name, value, "rows")


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "ParquetLoader needs pyarrow. Install it: pip install pyarrow."
        ) from error
    return pyarrow.parquet
