"""Loaders of rows, whose blocks are checked against the containers of a model.

Knows containers and rows, no gradients and no chains.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NoReturn

import numpy as np

from pymc_sghmc.models.outcomes import from_sums
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.containers import (
    Container,
    StreamError,
    column_names,
    columns_of_frame,
    container_named,
)
from pymc_sghmc.rows.files import check_files
from pymc_sghmc.rows.partitions import PartitionTask, Refusal
from pymc_sghmc.rows.pass_sums import Sums, chosen_rows
from pymc_sghmc.rows.values import array_for, first_changed, refuse_other_lengths

__all__ = ["Source"]

PILOT_ROWS = 50_000  # at hand for what needs some rows only, at most
PILOT_BYTES = 2**27
MOST_ROWS = 1_000_000  # kept in memory: all, where there are no more, or a pool of them
MOST_BYTES = 2**27
FEWEST_ROWS = 1000  # kept, however large they are
SAME_SUM = 1e-10  # of the sum of sizes, by which rounding changes with the order of rows


class Source:
    """A loader whose blocks are checked: names, shapes, kinds of numbers, and rows in a pass.

    Parameters
    ----------
    loader : iterable
        See `pymc_sghmc.loaders`.
    containers : dict of {str: Container}
        Those of the model.
    """

    def __init__(self, loader: Any, containers: Mapping[str, Container]) -> None:
        self.loader = loader
        if isinstance(loader, Iterator):
            raise ValueError(
                f"data={loader!r}: one pass over the data isn't enough, and an iterator or a "
                "generator gives no second one. Pass an object whose __iter__ begins a new pass "
                "and whose len is the number of rows; ready-made ones are in pymc_sghmc.loaders."
            )
        if not (hasattr(loader, "__iter__") or hasattr(loader, "blocks")):
            raise ValueError(
                f"data= is of type {type(loader).__name__}, which has no rows to read. Pass arrays "
                "or columns in a dict, a data frame, the path of Parquet files, or a loader. "
                "Collect a lazy frame by collect(), and read a torch Dataset by a DataLoader."
            )
        self.n_rows = _n_rows(loader)
        # Loaders of batches leave an incomplete last one out, unless they say that they don't.
        size = getattr(loader, "batch_size", None) if getattr(loader, "drop_last", True) else None
        self.dropped = self.n_rows % size if isinstance(size, int) and size > 0 else 0
        self.containers = containers
        self.has_pool = False  # so that minibatches need no more rows
        self.n_passes = 0  # over all rows, so far
        self.is_checked = False  # whether all values were looked at, in one pass
        self.must_repeat = False  # whether all passes need the same rows, in whatever order
        self._sums: dict[str, tuple[float, float]] | None = None  # of values, and of their sizes
        self.first: dict[str, Array] = None  # type: ignore[assignment]
        self.has_partitions = hasattr(loader, "map_sum")
        block = self._first_rows()
        lengths = getattr(loader, "lengths", None)
        self.block_rows = max(lengths) if lengths else len(next(iter(block.values())))
        self.first = {name: array[:1].copy() for name, array in block.items()}
        self.names = list(self.first)

    def for_another_host(self) -> "Source":
        """Return a source without rows, for pickles that are opened where these may not be.

        Loaders stay that hold no rows themselves, as of files, or from which minibatches come.
        """
        bare = copy(self)
        if self.has_pool and not getattr(self.loader, "is_only_a_place", False):
            bare.loader = _LeftBehind(type(self.loader).__name__)
            bare.has_partitions = False
        return bare

    @property
    def rows_per_pass(self) -> int:
        """Number of rows in one pass."""
        return self.n_rows - self.dropped

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return sum(row.nbytes for row in self.first.values())

    @property
    def most_rows(self) -> int:
        """Number of rows that memory is to hold at most, unless the user gives another."""
        return min(MOST_ROWS, max(FEWEST_ROWS, MOST_BYTES // max(1, self.row_bytes)))

    def pilot(self) -> dict[str, Array]:
        """Return copies of some rows, drawn evenly from one pass, for what needs some rows only."""
        n_rows = min(PILOT_ROWS, max(FEWEST_ROWS, PILOT_BYTES // max(1, self.row_bytes)))
        if n_rows >= self.rows_per_pass:
            return self.everything()
        rng = np.random.default_rng(0)
        return self._rows(np.sort(rng.choice(self.rows_per_pass, size=n_rows, replace=False)))

    def everything(self) -> dict[str, Array]:
        """Return copies of all rows, in the order of the loader."""
        if self.has_partitions:
            return self._from_partitions(None)
        out = self._room_for(self.rows_per_pass)
        self.copy_to(out)
        return out

    def copy_to(self, arrays: Mapping[str, Array]) -> None:
        """Copy all rows to arrays that have room for them, in the order of the loader."""
        start = 0
        for block in self.blocks(None):
            n = len(block[self.names[0]])
            for name, array in block.items():
                arrays[name][start : start + n] = array
            start += n
        check_files(getattr(self.loader, "mapped_files", ()))

    def _room_for(self, n_rows: int) -> dict[str, Array]:
        """Return arrays for so many rows."""
        return {
            name: np.empty((n_rows, *row.shape[1:]), dtype=row.dtype)
            for name, row in self.first.items()
        }

    def _first_rows(self) -> dict[str, Array]:
        """Return some rows, checked."""
        if self.has_partitions:
            return self.checked(self.loader.head())
        blocks = self.blocks(np.random.default_rng(0))
        block = next(blocks)
        blocks.close()
        return block

    def _rows(self, numbers: Array) -> dict[str, Array]:
        """Return copies of the rows of these numbers, ascending, from one pass over the loader."""
        if self.has_partitions:
            return self._from_partitions(numbers)
        out = self._room_for(numbers.size)
        start = 0
        for block in self.blocks(None):
            n = len(block[self.names[0]])
            first, last = np.searchsorted(numbers, (start, start + n))
            for name, array in block.items():
                out[name][first:last] = array[numbers[first:last] - start]
            start += n
        check_files(getattr(self.loader, "mapped_files", ()))
        return out

    def _from_partitions(self, numbers: Array | None) -> dict[str, Array]:
        """Return the rows of these numbers, ascending, or all of them, from where they are."""
        chosen = self.map_sum(self.names, None, chosen_rows, numbers)
        return dict(zip(self.names, chosen.arrays(), strict=True))

    def blocks(self, rng: np.random.Generator | None) -> Generator[dict[str, Array], None, None]:
        """Yield the blocks of one pass, in the loader's order or in one for ``rng`` if it has any.

        Parameters
        ----------
        rng : numpy.random.Generator or None
            None: the loader's own order.
        """
        seen = 0
        sums = Sums(with_sizes=self._sums is None)
        try:
            for block in self._unchecked(rng):
                arrays = self.checked(block)
                n = len(next(iter(arrays.values())))
                seen += n
                if seen > self.n_rows:
                    raise StreamError(
                        f"data=: a pass over the loader yields {seen} rows and more, but its "
                        f"length is {self.n_rows}, by which the likelihood is weighted. Give it a "
                        "len (or total_size) that is the number of rows"
                    )
                kept = n - max(0, seen - self.rows_per_pass)
                if kept > 0:
                    kept_rows = {name: array[:kept] for name, array in arrays.items()}
                    if self.must_repeat:
                        sums.add(kept_rows)
                    yield kept_rows
        except StreamError:
            raise
        except Exception as error:
            raise StreamError(f"the loader raised {type(error).__name__}: {error}") from error
        if seen == 0:
            raise StreamError(
                "data=: a pass over the loader yields no rows. Each call of iter(loader) must "
                "begin a new pass; one that goes through a generator is at its end after the "
                "first"
            )
        if seen >= self.rows_per_pass:
            self.is_checked = True
            self.n_passes += 1
            if self.must_repeat and not self.dropped:
                self._compare(sums)
        else:
            raise StreamError(
                f"data=: a pass over the loader yields {seen} rows, but its length is "
                f"{self.n_rows}, by which the likelihood is weighted. Is a file cut short? Or "
                "does len count blocks? It (or total_size) must be the number of rows. Or does "
                "__iter__ return an iterator that was begun before? Each call must begin a new pass"
            )

    def map_sum(
        self, names: Sequence[str], pool: Any, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Return the sum over partitions of what a function says of their rows.

        Parameters
        ----------
        names : list of str
            Of containers, in the order of a partition's arrays.
        pool : PoolPlan or None
        function : callable
            f(partition, *arguments).
        *arguments
        """
        check = copy(self)
        check.loader = None
        task = PartitionTask(check, names, pool, function, arguments)
        found = self.loader.map_sum(task)
        if isinstance(found, Refusal):
            raise found.error
        if found.n_rows != self.n_rows:
            raise StreamError(
                f"data=: a pass over the partitions yields {found.n_rows} rows, and {self.n_rows} "
                "before. Let them have the same rows in each pass, such as by persist()"
            )
        self.is_checked = True
        self.n_passes += 1
        if self.must_repeat:
            self._compare(found.sums)
        return found.value

    def sums_of(self, rows: Mapping[str, Array]) -> Sums | None:
        """Return sums by which passes are compared, if they are."""
        if not self.must_repeat:
            return None
        sums = Sums(with_sizes=self._sums is None)
        sums.add(rows)
        return sums

    def _compare(self, sums: Sums) -> None:
        """Refuse a pass whose values have another sum than those of the first one."""
        if self._sums is None:
            self._sums = {name: (sums.of[name], sums.sizes[name]) for name in sums.of}
            return
        for name, (expected, size) in self._sums.items():
            if abs(sums.of[name] - expected) > SAME_SUM * size:
                raise StreamError(
                    f"data=: the values of {name!r} have the sum {sums.of[name]:.10g} in one pass "
                    f"over the loader and {expected:.10g} in another. A pool needs the same rows "
                    "in each pass. Let the loader give these, or pass pool=None"
                )

    def mark(self, name: str) -> float:
        """Return the mark of a container's values, see `mark_of`; NaN where it isn't known."""
        return from_sums(*self._sums[name]) if self._sums else np.nan

    def _unchecked(self, rng: np.random.Generator | None) -> Iterable[Any]:
        shuffled = getattr(self.loader, "blocks", None)
        if shuffled is None or (rng is None and hasattr(self.loader, "__iter__")):
            return iter(self.loader)
        return shuffled(np.random.default_rng(0) if rng is None else rng)

    def checked(self, block: Any) -> dict[str, Array]:
        """Return a block's arrays by the names of containers."""
        values = self._by_name(block)
        if self.first is not None and values.keys() != self.first.keys():
            raise StreamError(
                f"data=: a block holds {_listing(values)}, the first one held "
                f"{_listing(self.first)}. All need the same names"
            )
        arrays = {name: self._array(name, values[name]) for name in self.first or values}
        refuse_other_lengths(arrays, {}, "data=: in a block")
        return arrays

    def _by_name(self, block: Any) -> Mapping[str, Any]:
        """Return the values of a block by the names of containers."""
        rows = [name for name, container in self.containers.items() if container.shape]
        if column_names(block) is not None:
            return columns_of_frame(block, self.containers)
        if isinstance(block, Mapping):
            return block
        if isinstance(block, list | tuple) and len(block) == len(rows):
            return dict(zip(rows, block, strict=True))
        if hasattr(block, "__array__") and len(rows) == 1:
            return {rows[0]: block}
        raise StreamError(
            f"data=: the loader yields {_kind(block)}. Blocks must be dicts by the names of the "
            f"model's containers, {_listing(rows)}, or lists or tuples of arrays in this order. A "
            "bare array will do where there is one container"
        )

    def _array(self, name: str, value: Any) -> Array:
        """Return the numbers of a block for one container, in a type that the first block has."""
        container = container_named(self.containers, name)
        array = array_for(container, value, "data=: in a block", not self.is_checked)
        if self.first is None or array.dtype == self.first[name].dtype:
            return array
        dtype = self.first[name].dtype
        changed = first_changed(array, dtype)
        if changed is not None:
            raise StreamError(
                f"data=: in a block {name!r} has the value {changed}, and the first block has "
                f"dtype {dtype}, which can't hold it. Let all blocks have the same dtype"
            )
        return array.astype(dtype)


class _LeftBehind:
    """Stands for a loader in a process that hasn't got its rows."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> NoReturn:
        raise StreamError(
            f"the rows of the {self._name} aren't here: a pickled step carries no more than its "
            "pool. This chain had to read all of them, since it didn't begin near the mode. Sample "
            "it where the data are, or start it where others end, by initvals"
        )


def _n_rows(loader: Any) -> int:
    """Return the number of rows: of torch's loaders len is that of batches."""
    n_rows = getattr(loader, "total_size", None)
    if n_rows is None:
        n_rows = getattr(loader, "n_rows", None)
    if n_rows is None:
        n_rows = _length(getattr(loader, "dataset", None))
    if n_rows is None:
        n_rows = _length(loader)
    if n_rows is None:
        raise ValueError(
            f"data={loader!r}: doesn't tell the number of rows, by which the likelihood is "
            "weighted. Give the loader a __len__ or a total_size that is the number of rows."
        )
    if isinstance(n_rows, bool) or not hasattr(n_rows, "__index__") or n_rows < 1:
        raise ValueError(
            f"data={loader!r}: has a length of {n_rows!r}. It must be a whole number, that of the "
            "rows, at least 1."
        )
    return int(n_rows)


def _length(rows: Any) -> int | None:
    try:
        return len(rows)
    except TypeError:
        return None


def _kind(block: Any) -> str:
    """Name what a loader yields."""
    if isinstance(block, list | tuple):
        return f"{type(block).__name__}s of {len(block)}"
    return type(block).__name__


def _listing(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
