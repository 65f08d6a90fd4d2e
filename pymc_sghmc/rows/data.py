"""The arrays behind a model's rows, and minibatches of them.

A minibatch says which arrays its rows are of. Knows arrays and groups of rows; no order in which
they are drawn, no gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np

from numpy.typing import DTypeLike

from pymc_sghmc.models.contract import Group
from pymc_sghmc.models.graphs import array_of, odd_values
from pymc_sghmc.models.outcomes import Outcome
from pymc_sghmc.protocols import Array
from pymc_sghmc.records import copied
from pymc_sghmc.rows.files import MappedFile, mapped_file

__all__ = ["Chunk", "InMemory", "Minibatch", "Minibatches", "PoolPlan", "rows_per_chunk"]

CHUNK_BYTES = 2**22  # of data gathered at a time in a pass over all rows


class Minibatch(NamedTuple):
    """Some rows of each group."""

    rows: tuple[Array, ...]  # numbers of the rows, (n,) for each group
    arrays: tuple[Array, ...]  # whose rows they are


class Minibatches(NamedTuple):
    """Several minibatches of the same arrays."""

    drawn: tuple[Array, ...]  # rows of all minibatches, (k, n) for each group that isn't used whole
    # for each group: all of its rows, (n,), or None where they are drawn
    whole: tuple[Array | None, ...]
    arrays: tuple[Array, ...]

    def one(self, i: int) -> Minibatch:
        """Return the minibatch number ``i``."""
        drawn = iter(self.drawn)
        rows = tuple([next(drawn)[i] if rows is None else rows for rows in self.whole])
        return Minibatch(rows, self.arrays)

    def joined(self) -> Minibatch:
        """Return all of their rows as one minibatch."""
        drawn = iter(self.drawn)
        rows = tuple([next(drawn).ravel() if rows is None else rows for rows in self.whole])
        return Minibatch(rows, self.arrays)


class Chunk(NamedTuple):
    """Rows of one group to be gathered at once, in a pass over all of them."""

    window: int  # of the pass: rows that were in memory at the same time
    group: int
    rows: np.ndarray
    weight: float  # of each
    arrays: tuple[Array, ...]


class PoolPlan(NamedTuple):
    """How many rows a pool has."""

    size: int
    most: int  # that it may have where the error is larger
    error: float  # that it may cause in a posterior mean, in posterior standard deviations


def rows_per_chunk(arrays: Iterable[Array]) -> int:
    """Return how many rows of some arrays are gathered at a time in a pass over all."""
    row_bytes = sum(array.itemsize * array[:1].size for array in arrays)
    return max(1000, CHUNK_BYTES // max(1, row_bytes))


class InMemory:
    """Arrays that are at hand as a whole, those of a `np.memmap` included.

    Parameters
    ----------
    groups : list of Group
        Which arrays have rows in common, and how many of these a minibatch has.
    sources : list
        Arrays, or the model's data containers, asked anew when a chain begins.
    dtype : numpy.dtype
        Of weights.
    resident : callable
        From an array to what compiled functions take for it.

    Attributes
    ----------
    rows : int or None
        Number of rows in a minibatch where it was chosen: see `resize`.
    files : list of (str, int)
        Behind memory maps, and how many bytes of them are read.
    is_noisy : list of bool
        Whether a minibatch of each group is less than all of its rows.
    noisy_batch_sizes : list of int
        Sizes of the minibatches that aren't all of their rows; empty if the gradient is exact.
    """

    files: Sequence[MappedFile] = ()
    names: Sequence[str] = ()  # of the containers that a source fills
    rows_of_each = 1.0  # what is drawn: rows, or units of so many on average
    pool: PoolPlan | None = None  # from which minibatches are drawn, where not all are at hand
    number = 0  # of the part of all rows that these are: see `map_sum`
    start = 0  # number of its first row
    outcomes: Sequence[Outcome] = ()  # what was observed
    _mark: float | None = None  # of the outcomes, once it was asked for

    def __init__(
        self,
        groups: list[Group],
        sources: Sequence[Any],
        dtype: DTypeLike,
        resident: Callable[[Array], Any],
    ) -> None:
        self.groups = groups
        self.sources = sources
        self.dtype = dtype
        self._resident = resident
        self.reload()

    def reload(self) -> None:
        """Take the arrays that the model's data containers hold now; no copy is made."""
        # PyMC masks NaN in its data containers: take the bare array
        self.arrays = tuple(
            np.ma.getdata(source if isinstance(source, np.ndarray) else array_of(source))
            for source in self.sources
        )
        mapped = map(mapped_file, self.arrays)
        self.files = list(dict.fromkeys(file for file in mapped if file is not None))
        lengths = iter(map(len, self.arrays))
        n_rows = []
        for group in self.groups:
            [n, *others] = {next(lengths) for _ in group.batches}
            if others:
                raise ValueError(
                    f"The data of {', '.join(group.terms)} have {sorted([n, *others])} rows: "
                    "after pm.set_data all arrays of a likelihood need the same number."
                )
            if group.batch_size > n:
                raise ValueError(
                    f"batch_size={group.batch_size}: more than the {n} rows that "
                    f"{', '.join(group.terms)} has now."
                )
            n_rows.append(n)
        self.resident = tuple([self._resident(array) for array in self.arrays])
        self._forget_mark()
        self._count(n_rows)

    def _count(self, n_rows: list[int]) -> None:
        self.n_rows = n_rows
        self.n_at_hand = n_rows
        self._chunk_rows = self._rows_per_chunk()
        self.resize(None)

    @property
    def fixed(self) -> tuple[Array, ...]:
        """Arrays that are the same whenever a run goes on."""
        return self.arrays

    @property
    def n_data_rows(self) -> int:
        """Number of rows of the data, the largest where groups differ; 0 if all are used whole."""
        return max(map(len, self.arrays), default=0)

    @property
    def data_mark(self) -> float:
        """A number that changes with what was observed; NaN where it isn't known."""
        if self._mark is None:
            self._mark = self._find_mark() if self.outcomes else np.nan
        return self._mark

    def _find_mark(self) -> float:
        return sum(outcome.mark for outcome in self.outcomes)

    def _forget_mark(self) -> None:
        if self.outcomes:  # a worker has none
            self._mark = None

    @property
    def n_kept(self) -> list[int]:
        """Number of rows of each group of which a gradient may keep numbers."""
        return self.n_rows

    @property
    def row_weight(self) -> float:
        """How often each row of a pass counts."""
        return 1.0

    @property
    def n_reads(self) -> int | None:
        """How often all rows were read so far; None where they are in memory."""
        return None

    @property
    def threads(self) -> int | None:
        """How many work on chunks of a pass; None: as many as there are."""
        return None

    def enlarge_pool(self) -> None:
        """Let pools that are drawn from now on have as many rows as they may."""

    def resize(self, rows: int | None) -> None:
        """Let minibatches have so many rows of each group; None: as given.

        That is half of a group's rows at most, or all of them where there are no more in any.
        """
        self.rows = rows
        given = [group.batch_size for group in self.groups]
        if rows is None:
            self.batch_sizes = given
        elif rows >= max(self.n_rows):
            self.batch_sizes = list(self.n_rows)
        else:
            self.batch_sizes = [
                size if size == n else min(rows, n // 2)
                for n, size in zip(self.n_rows, given, strict=True)
            ]
        self.whole = tuple(
            np.arange(rows) if rows == n else None
            for rows, n in zip(self.n_rows, self.batch_sizes, strict=True)
        )
        self.is_noisy = [rows is None for rows in self.whole]
        self.noisy_batch_sizes = [
            n for n, noisy in zip(self.batch_sizes, self.is_noisy, strict=True) if noisy
        ]
        self.weights = self._uniform_weights(self.batch_sizes)

    def _rows_per_chunk(self) -> list[int]:
        arrays = iter(self.arrays)
        return [rows_per_chunk(islice(arrays, len(group.batches))) for group in self.groups]

    def uniform_weights(self, rows: Sequence[Array]) -> tuple[Array, ...]:
        """Weights N/n of rows drawn evenly, for each group."""
        if all(w.size == idx.size for w, idx in zip(self.weights, rows, strict=True)):
            return self.weights
        return self._uniform_weights([idx.size for idx in rows])

    def _uniform_weights(self, sizes: Sequence[int]) -> tuple[Array, ...]:
        scales = zip(self.n_rows, sizes, strict=True)
        return tuple([np.full(n, n_rows / n, dtype=self.dtype) for n_rows, n in scales])

    def evenly(self, rng: np.random.Generator, k: int) -> Minibatches:
        """Draw ``k`` minibatches of the rows at hand, with replacement."""
        drawn: tuple[Array, ...] = ()
        if self.noisy_batch_sizes:
            sizes = zip(self.n_at_hand, self.batch_sizes, self.whole, strict=True)
            drawn = tuple([rng.integers(N, size=(k, n)) for N, n, rows in sizes if rows is None])
        return Minibatches(drawn, self.whole, self.resident)

    def part(self, group: int | None, rows: Array | None) -> Minibatch:
        """Return rows of one group, and one row, which is not to count, of each other."""
        others = np.zeros(1, dtype=np.int64)
        everything: list[Any] = [rows if i == group else others for i in range(len(self.groups))]
        return Minibatch(tuple(everything), self.resident)

    def chunks(self, subset: Sequence[Array] | None = None) -> Iterator[Chunk]:
        """Yield all rows, or a subset of those at hand that stands for them, in chunks."""
        for k, n_rows in enumerate(self.n_rows):
            rows = None if subset is None else subset[k]
            count = n_rows if rows is None else rows.size
            for start in range(0, count, self._chunk_rows[k]):
                stop = min(start + self._chunk_rows[k], count)
                chunk = np.arange(start, stop) if rows is None else rows[start:stop]
                yield Chunk(0, k, chunk, n_rows / count, self.resident)

    def at_once(
        self, subset: Sequence[Array] | None = None
    ) -> tuple[Minibatch, tuple[Array, ...]] | None:
        """Return all rows or a subset that stands for them, with weights, if one chunk holds each.

        Parameters
        ----------
        subset : tuple of arrays, optional
            Numbers of rows at hand, for each group.

        Returns
        -------
        (Minibatch, tuple of array) or None
            Rows and weights of all groups.
        """
        counts = self.n_rows if subset is None else [rows.size for rows in subset]
        if any(n > most for n, most in zip(counts, self._chunk_rows, strict=True)):
            return None
        rows = tuple([np.arange(n) for n in counts]) if subset is None else tuple(subset)
        return Minibatch(rows, self.resident), self._uniform_weights(counts)

    def map_sum(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function of all rows says; of rows in several places, the sum.

        Parameters
        ----------
        function : callable
            f(data, *arguments). It takes rows from ``data.chunks()``, and is pickled where these
            aren't here: a function of a module, whose results can be added.
        *arguments
            Of the function. Among them ``data`` stands for the same rows.
        """
        return function(self, *arguments)

    def odd_values(self, minibatch: Minibatch | None = None) -> str:
        """Name missing or infinite values in the data of these rows, or of all; else return "".

        ``pm.set_data`` may have put it there.
        """
        arrays = iter(self.arrays)
        everything: Sequence[Any] = [slice(None)] * len(self.groups)
        return odd_values(
            next(arrays)[rows]
            for group, rows in zip(
                self.groups, minibatch.rows if minibatch else everything, strict=True
            )
            for _ in group.batches
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copied(self)

    def __getstate__(self) -> dict[str, Any]:
        # Workers get the data as they are now, not the model's containers.
        self.reload()
        groups = [
            replace(
                group,
                sources=[],
                batches=[None] * len(group.batches),
                terms=dict.fromkeys(group.terms),
            )
            for group in self.groups
        ]
        mark = self.data_mark  # before the outcomes stay behind, too
        as_now = {"sources": self.arrays, "groups": groups, "outcomes": (), "_mark": mark}
        return {**self.__dict__, **as_now, "resident": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reload()
