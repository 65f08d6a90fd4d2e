"""A loader of Parquet files. Knows such files, pyarrow's batches of their rows, and blocks."""

import logging

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pymc_sghmc.checks import quoted, true_or_false, whole_steps
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.array_loader import number_of_rows
from pymc_sghmc.rows.containers import StreamError, each_once
from pymc_sghmc.rows.parquet_files import ParquetFile, ParquetFiles, PathLike, opened

__all__ = ["ParquetLoader"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it


class ParquetLoader:
    """Loader of Parquet files: reads their row groups, in random order. It needs pyarrow.

    Parameters
    ----------
    path : str, path, or list of these
        A file, a folder of ``*.parquet`` files, or several files. Folders in it that are named
        ``key=value``, as Hive and Spark write them, are read, too, and ``key`` is a column. Object
        stores have addresses such as ``s3://bucket/folder``: PyArrow opens them itself, or by
        fsspec where that is installed.
    columns : dict of {str: str or list of str}
        Columns by the names of the model's ``pm.Data``: one column for an array of one axis, or a
        list of columns for an array of two.
    block_rows : int, default 65536
        Largest number of rows in a block; larger row groups are cut. The default is 0.5 MB for a
        column of double precision.
    buffer_rows : int, optional
        Number of rows that the step holds in memory and shuffles. Default: 32 MB of rows, or more
        if blocks are large.
    drop_missing : bool, default False
        Whether rows with a missing value, null or NaN, in one of the columns are left out. They are
        counted when the loader is made, which reads these columns once. Default: a step refuses
        such data, as leaving rows out may change what is estimated.

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
    ...     len(loader), [block["X"].shape for block in loader], loader.head(2)["X"].tolist()
    (10, [(4, 2), (4, 2), (2, 2)], [[0.0, 1.0], [1.0, 1.0]])

    Rows with a missing value are left out if you ask for it:

    >>> table = pa.table({"dose": [1.0, None, 2.0], "died": [0, 1, 1]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(table, f"{folder}/part.parquet")
    ...     loader = ParquetLoader(folder, {"x": "dose", "y": "died"}, drop_missing=True)
    ...     len(loader), [block["y"].tolist() for block in loader]
    (2, [[0, 1]])
    """

    is_only_a_place = True  # holds no rows: see `Source.for_another_host`

    def __init__(
        self,
        path: PathLike | list[PathLike] | tuple[PathLike, ...],
        columns: Mapping[str, str | Sequence[str]],
        block_rows: int = 65_536,
        buffer_rows: int | None = None,
        drop_missing: bool = False,
    ) -> None:
        if not columns:
            raise ValueError(
                'ParquetLoader: columns must name at least one pm.Data, as in {"y": "died"}.'
            )
        self._path = path
        self.columns = dict(columns)
        self.block_rows = whole_steps("block_rows", block_rows, "rows")
        self.buffer_rows = number_of_rows("buffer_rows", buffer_rows)
        self.files = ParquetFiles.at(path)
        self._check_columns()
        self._groups = [
            (file, group) for file in self.files.files for group in range(file.n_groups)
        ]
        self.drop_missing = true_or_false("drop_missing", drop_missing)
        n_rows = sum(file.n_rows for file in self.files.files)
        self._n_rows = self._count_complete(n_rows) if drop_missing else n_rows

    def _count_complete(self, n_rows: int) -> int:
        """Return the number of rows without missing values, and log how many have some."""
        _log.info(f"ParquetLoader: counts missing values in {n_rows:,} rows...")
        n_complete = 0
        counts: Counter[str] = Counter()
        for _, batch in self._batches(self._groups):
            missing = _missing(batch)
            counts.update({name: int(rows.sum()) for name, rows in missing.items()})
            n_complete += batch.num_rows - int(np.any(list(missing.values()), axis=0).sum())
        by_column = ", ".join(f"{n:,} in column {name!r}" for name, n in counts.items() if n)
        if by_column:
            _log.info(
                f"ParquetLoader leaves out {n_rows - n_complete:,} of {n_rows:,} rows, which have "
                f"missing values ({by_column})."
            )
        return n_complete

    def _check_columns(self) -> None:
        """Refuse columns that a file hasn't got."""
        for file in self.files.files:
            for name in each_once(self.columns):
                if name in file.names:
                    continue
                if name in self.files.names:
                    raise ValueError(
                        f"data=: the file {file.path} has no column {name!r}, which other files "
                        f"have, only {quoted(file.names)}. Write it anew with this column, or pass "
                        "a list of the files that have it."
                    )
                raise ValueError(
                    f"ParquetLoader: {file.path} has no column {name!r}. Choose from "
                    f"{self.files.names}."
                )

    def __len__(self) -> int:
        return self._n_rows

    def head(self, n_rows: int = 10) -> Mapping[str, Any]:
        """Return the first rows, of which the model can be built.

        Fewer where the first row group, or its first ``block_rows`` rows, have fewer.
        """
        n_rows = whole_steps("n_rows", n_rows, "rows")
        first = next(iter(self))
        return {name: values[:n_rows] for name, values in first.items()}

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self._blocks(self._groups)

    def blocks(self, rng: np.random.Generator) -> Iterator[Mapping[str, Any]]:
        """Begin a pass over the data, with row groups in random order."""
        return self._blocks([self._groups[i] for i in rng.permutation(len(self._groups))])

    def _blocks(self, groups: Iterable[tuple[ParquetFile, int]]) -> Iterator[Mapping[str, Any]]:
        for file, batch in self._batches(groups):
            if self.drop_missing:
                rows = _complete(batch)
            else:
                _refuse_nulls(file.path, batch)
                rows = batch
            names = rows.schema.names
            arrays = {name: rows.column(name).to_numpy(zero_copy_only=False) for name in names}
            for name, value in file.keys.items():
                arrays[name] = np.full(rows.num_rows, value)
            if rows.num_rows:
                yield self._block(arrays)

    def _batches(
        self, groups: Iterable[tuple[ParquetFile, int]]
    ) -> Iterator[tuple[ParquetFile, Any]]:
        """Yield rows of the columns from some row groups, as PyArrow's, with the files."""
        for file, group in groups:
            names = [name for name in each_once(self.columns) if name not in file.keys]
            with opened(file.path, file.filesystem) as reader:
                batches = reader.iter_batches(
                    self.block_rows, row_groups=[group], columns=names, use_threads=False
                )
                for batch in _undamaged(batches, file.path):
                    yield file, batch

    def _block(self, arrays: Mapping[str, Array]) -> Mapping[str, Any]:
        """Return the arrays of a block from those of its columns."""
        block = {}
        for container, columns in self.columns.items():
            if isinstance(columns, str):
                block[container] = arrays[columns]
            else:
                block[container] = _matrix({name: arrays[name] for name in columns})
        return block

    def __repr__(self) -> str:
        return f"ParquetLoader({self._path!r}, {self.columns!r})"


def _undamaged(batches: Iterable[Any], path: str) -> Iterator[Any]:
    """Yield the batches of a file, or say which file can't be read."""
    try:
        yield from batches
    except (OSError, ValueError) as error:  # pyarrow.ArrowInvalid is a ValueError
        [reason, *_] = str(error).splitlines() or [type(error).__name__]
        raise StreamError(
            f"data=: the file {path} can't be read. Is it damaged, or cut short? Write it anew. "
            f"({reason})"
        ) from error


def _matrix(columns: Mapping[str, Array]) -> Any:
    """Return columns side by side: a frame where some aren't numbers, whose columns have names."""
    if any(array.dtype.kind not in "biuf" for array in columns.values()):
        return pd.DataFrame(columns)
    # with columns one after the other: whoever reads copies rows, and does it faster
    return np.stack(list(columns.values())).T


def _refuse_nulls(path: str, batch: Any) -> None:
    """Refuse rows with missing values, while it is known which file they are of."""
    counts = {name: batch.column(name).null_count for name in batch.schema.names}
    missing = [f"{n} in column {name!r}" for name, n in counts.items() if n]
    if missing:
        raise StreamError(
            f"data=: the file {path} has missing values ({', '.join(missing)}, and perhaps more in "
            "rows that weren't read yet). Leave these rows out by ParquetLoader(path, columns, "
            "drop_missing=True), or write it without them"
        )


def _missing(batch: Any) -> dict[str, Array]:
    """Return where the columns of a batch have no value, null or NaN."""
    import pyarrow.compute as pc

    return {
        name: pc.is_null(batch.column(name), nan_is_null=True).to_numpy(zero_copy_only=False)
        for name in batch.schema.names
    }


def _complete(batch: Any) -> Any:
    """Return the rows of a batch that have all values."""
    import pyarrow as pa

    is_incomplete = np.any(list(_missing(batch).values()), axis=0)
    return batch.filter(pa.array(~is_incomplete)) if is_incomplete.any() else batch
