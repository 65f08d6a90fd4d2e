"""A loader of Dask's arrays and frames: functions of rows are called where the partitions are.

Dask is imported by those who have its objects, not here. Knows Dask and blocks; no gradients.
"""

import logging
import multiprocessing
import os
import sys

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr

from pymc_sghmc.checks import whole_steps
from pymc_sghmc.pymc_hooks import one_blas_thread
from pymc_sghmc.rows.array_loader import Block
from pymc_sghmc.rows.containers import StreamError, library_of
from pymc_sghmc.rows.partitions import PartitionSum, PartitionTask, Refusal, added

__all__ = ["DaskLoader", "is_of_dask"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

RETRIES = 3  # of a task that fails, as where a file can't be read for a moment
ADDED_AT_ONCE = 8  # results of partitions
HEAD = 10  # rows that tell the types of all
PATIENCE = 30.0  # seconds without a result, after which workers are looked for
OF_CLIENTS = (None, "dask.distributed", "distributed")  # schedulers in Dask's settings


def is_of_dask(value: Any) -> bool:
    """Whether a value is an array, a frame or a column of Dask's, or xarray's view of one."""
    if isinstance(value, xr.Dataset):
        return any(map(is_of_dask, value.data_vars.values()))
    if isinstance(value, xr.DataArray):
        value = value.data
    is_collection = type(value).__module__.startswith(("dask.array", "dask.dataframe"))
    return is_collection and getattr(value, "ndim", 0) > 0


class DaskLoader:
    """Loader of Dask arrays and data frames, whose rows may lie on several machines.

    Passes over all rows run where Dask computes the partitions, by the scheduler that Dask itself
    would choose: the client that is at hand, or threads. Only sums come back, and the rows that
    chains need. Arrays get the chunks of rows of the first one, or the partitions of a frame beside
    them.

    Parameters
    ----------
    data : dict of {str: dask.array.Array, dask.dataframe.Series or DataFrame}, or DataFrame
        By the names of the model's ``pm.Data``, with rows along the first axis; or one frame with
        columns for all of them. In a dict arrays in memory may stand beside Dask's.
    client : distributed.Client, optional
        Default: Dask's default client, where there is one.
    columns : dict of {str: str or list of str}, optional
        Of a frame, by the names of the model's ``pm.Data``: one column for an array of one axis, or
        a list of columns for an array of two. Default: they are matched by name.

    Raises
    ------
    ValueError
        If partitions have different numbers of rows in different arrays, if there are no rows, or
        nothing is of Dask.

    Examples
    --------
    >>> import numpy as np, pytest
    >>> da = pytest.importorskip("dask.array")
    >>> from pymc_sghmc.loaders import DaskLoader
    >>> loader = DaskLoader({"y": da.arange(10, chunks=4)})
    >>> len(loader), loader.lengths, [block["y"].tolist() for block in loader]
    (10, [4, 4, 2], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])
    """

    def __init__(
        self,
        data: Any,
        client: Any = None,
        columns: Mapping[str, str | list[str]] | None = None,
    ) -> None:
        if client is not None and not hasattr(client, "compute"):
            raise ValueError(f"DaskLoader(client={client!r}): pass a distributed.Client.")
        self.client = client
        self._process = os.getpid()
        # Of arrays in a block, or columns of each of them; None: a block is a frame.
        self.names: list[str] | Mapping[str, Any] | None = columns
        values = {"frame": data}
        if isinstance(data, Mapping) and not isinstance(data, xr.Dataset):
            self.names = list(data)
            values = dict(data)
        if not any(map(is_of_dask, values.values())):
            raise ValueError(
                "DaskLoader: pass Dask arrays or data frames. Rows in memory go to data= as they "
                "are."
            )
        values = {name: _with_columns(value) for name, value in values.items()}
        lengths = self._lengths(values)
        by_column = [_parts(name, value, lengths) for name, value in values.items()]
        parts = zip(lengths, *by_column, strict=True)
        self._parts = [of_columns for n, *of_columns in parts if n]
        self.lengths = [n for n in lengths if n]
        if not self.lengths:
            raise ValueError("data=: Dask's partitions have no rows.")

    def _lengths(self, columns: Mapping[str, Any]) -> list[int]:
        """Return the number of rows of each partition, which Dask has to compute for frames."""
        of_dask = {name: value for name, value in columns.items() if is_of_dask(value)}
        unknown = [name for name, value in of_dask.items() if not _has_known_chunks(value)]
        if not unknown:  # arrays, which can be given each other's chunks
            first_array = next(iter(of_dask.values()))
            return [int(n) for n in first_array.chunks[0]]
        delayed = _dask().delayed
        counted = [[delayed(len)(part) for part in _delayed(of_dask[name])] for name in unknown]
        first, *others = self._compute(delayed(counted))
        for name, lengths in zip(unknown[1:], others, strict=True):
            if lengths != first:
                raise ValueError(
                    f"data=: Dask's partitions have other numbers of rows in {name!r} than in "
                    f"{unknown[0]!r}: {_some(lengths)} and {_some(first)}. Give all of them the "
                    "same, such as by one data frame, or by repartition."
                )
        return list(first)

    def __len__(self) -> int:
        return sum(self.lengths)

    def head(self, n_rows: int = HEAD) -> Any:
        """Return the first rows, of which the model can be built: at most one partition's."""
        n_rows = whole_steps("n_rows", n_rows, "rows")
        block = _dask().delayed(_head)(self.names, self._parts[0], n_rows)
        return self._compute(block)

    def __iter__(self) -> Iterator[Block | Any]:
        return self._blocks(range(len(self._parts)))

    def blocks(self, rng: np.random.Generator) -> Iterator[Block | Any]:
        """Begin a pass over the data, with partitions in random order."""
        return self._blocks(rng.permutation(len(self._parts)).tolist())

    def _blocks(self, numbers: Any) -> Iterator[Block | Any]:
        for i in numbers:
            yield self._compute(_dask().delayed(_block)(self.names, self._parts[i]))

    def map_sum(self, task: PartitionTask) -> PartitionSum | Refusal:
        """Call a task for each partition where it is, and return the sum of what it returns."""
        delayed = _dask().delayed
        sent = delayed(task, pure=False)
        call, add = delayed(_called, pure=False), delayed(added, pure=False)
        starts = np.cumsum([0, *self.lengths]).tolist()
        results = [
            call(sent, self.names, part, number, starts[number])
            for number, part in enumerate(self._parts)
        ]
        while len(results) > 1:  # a tree, so that no process gets more than a few results
            groups = range(0, len(results), ADDED_AT_ONCE)
            results = [add(results[start : start + ADDED_AT_ONCE]) for start in groups]
        found: PartitionSum | Refusal = self._compute(results[0])
        return found

    def _compute(self, delayed: Any) -> Any:
        try:
            return self._computed(delayed)
        except Exception as error:
            raise StreamError(
                f"data=: Dask raised {type(error).__name__} when it computed partitions: {error}"
            ) from error

    def _computed(self, delayed: Any) -> Any:
        if self._process != os.getpid() and multiprocessing.parent_process() is not None:
            # that of a chain: neither clients nor threads go on in a forked process
            return _dask().compute(delayed, scheduler="synchronous")[0]
        client = self.client or _default_client()
        if client is None:
            with one_blas_thread()():  # whatever the number of Dask's threads is
                return _dask().compute(delayed)[0]
        future = client.compute(delayed, retries=RETRIES)
        try:
            return _awaited(future, client)
        except KeyboardInterrupt:
            client.cancel(future)
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "client": None}  # another process has its own, or none


def _dask() -> Any:
    import dask

    return dask


def _default_client() -> Any:
    """Return the client that Dask would use here, None where it would use threads or no other."""
    distributed = sys.modules.get("distributed")
    if distributed is None or _dask().config.get("scheduler", None) not in OF_CLIENTS:
        return None
    try:
        return distributed.default_client()
    except ValueError:
        return None


def _awaited(future: Any, client: Any) -> Any:
    """Wait for a result, and say so where no worker is there to compute it."""
    while True:
        try:
            return future.result(timeout=PATIENCE)
        except TimeoutError:
            if future.done():  # the task's own
                raise
        if not client.scheduler_info()["workers"]:
            _log.warning(
                "Dask's cluster has no workers: this waits until there are some. Start workers, or "
                "interrupt the run."
            )


def _with_columns(value: Any) -> Any:
    """Return the frame of a dataset's columns, and any other value as it is."""
    if isinstance(value, xr.Dataset) and is_of_dask(value):
        return value.to_dask_dataframe()[list(value.data_vars)]
    return value


def _has_known_chunks(value: Any) -> bool:
    chunks = getattr(value, "chunks", None)
    return chunks is not None and not np.isnan(chunks[0]).any()


def _parts(name: str, value: Any, lengths: list[int]) -> list[Any]:
    """Return an array or a frame in partitions of so many rows, as Dask's delayed values."""
    if is_of_dask(value) and not _has_known_chunks(value):
        return _delayed(value)
    n_rows = len(value) if not is_of_dask(value) else value.shape[0]
    if n_rows != sum(lengths):
        raise ValueError(
            f"data=: {name!r} has {n_rows} rows, and the arrays or frames of Dask's beside it have "
            f"{sum(lengths)}. Pass arrays of the same rows."
        )
    if is_of_dask(value):
        array = value.data if isinstance(value, xr.DataArray) else value
        others = dict.fromkeys(range(1, array.ndim), -1)
        parts = _delayed(array.rechunk({0: tuple(lengths), **others}))
        if isinstance(value, xr.DataArray) and value.ndim > 1:
            dims, labels = value.dims, _labels(value)
            parts = [_dask().delayed(xr.DataArray)(part, labels, dims) for part in parts]
        return parts
    ends = np.cumsum([0, *lengths]).tolist()
    return [_dask().delayed(_slice(value, start, end)) for start, end in pairwise(ends)]


def _labels(value: xr.DataArray) -> dict[Any, Any]:
    """Return the labels of an array's axes but that of rows."""
    return {dim: value.indexes[dim] for dim in value.dims[1:] if dim in value.indexes}


def _slice(value: Any, start: int, end: int) -> Any:
    """Return some rows of what is in memory, with the names of its columns."""
    if hasattr(value, "iloc"):
        return value.iloc[start:end]
    if library_of(value) in ("pyarrow", "polars"):
        return value.slice(start, end - start)
    return value[start:end] if isinstance(value, xr.DataArray) else np.asarray(value)[start:end]


def _delayed(value: Any) -> list[Any]:
    parts = value.to_delayed()
    if not isinstance(parts, np.ndarray):
        return list(parts)
    if parts.size != parts.shape[0]:
        raise ValueError(
            "data=: a Dask array has several chunks of columns, and chunks of rows whose lengths "
            "aren't known. Call compute_chunk_sizes() on it first."
        )
    return list(parts.ravel())


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (" ..." if len(numbers) > 5 else "")


# In other processes


def _block(names: Any, parts: list[Any]) -> Any:
    """Return the rows of a partition: a frame, or a dict of arrays and columns."""
    if names is None:
        return parts[0]
    if isinstance(names, Mapping):
        [frame] = parts
        return {name: frame[columns] for name, columns in names.items()}
    return dict(zip(names, parts, strict=True))


def _head(names: Any, parts: list[Any], n_rows: int) -> Any:
    return _block(names, [part[:n_rows] for part in parts])


def _called(
    task: PartitionTask, names: Any, parts: list[Any], number: int, start: int
) -> PartitionSum | Refusal:
    return task(_block(names, parts), number, start)
