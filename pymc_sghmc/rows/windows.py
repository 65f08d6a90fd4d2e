"""Rows of data that never are in memory as a whole: a loader's blocks, read ahead.

The rows of a loader, pass after pass, are one endless sequence. Windows of it, each of a whole
number of minibatches, are held in memory and shuffled with the seed of the chain; while one is in
use the next is read in the background. So every row comes up once in each pass, and the place of a
chain is its seed and how many minibatches it has drawn. Knows loaders and rows, no gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from numpy.typing import DTypeLike

from pymc_sghmc.models.contract import Group
from pymc_sghmc.models.graphs import odd_values
from pymc_sghmc.protocols import Array
from pymc_sghmc.records import copied
from pymc_sghmc.rows.data import Chunk, InMemory, Minibatch, Minibatches, PoolPlan
from pymc_sghmc.rows.orders import Even, Place
from pymc_sghmc.rows.reading import ReadAhead, Reader
from pymc_sghmc.rows.sources import Source

__all__ = ["Streamed", "Windows"]

WINDOW_BYTES = 2**25  # of a window, about; two are in memory
WINDOW_BLOCKS = 4  # in a window, at least
WINDOW_MINIBATCHES = 10


class Streamed(InMemory):
    """Rows that come in blocks from a loader, of which the first, a pilot, are at hand.

    What needs some rows only gets them from the pilot: probes of the noise, curvature, the first
    climb to the mode. Full passes read all blocks.

    Parameters
    ----------
    source : Source
    groups : list of Group
        One.
    pilot : list of arrays
    dtype : numpy.dtype
        Of weights.
    pool : PoolPlan, optional
        From which minibatches are drawn; default: they are of windows.
    """

    _window: tuple[tuple[int, int], tuple[Array, ...], Array] | None
    _ahead: ReadAhead | None
    fixed = ()  # a loader's order may be another each time

    def __init__(
        self,
        source: Source,
        groups: list[Group],
        pilot: Sequence[Array],
        dtype: DTypeLike,
        pool: PoolPlan | None = None,
    ) -> None:
        self.source = source
        self.source.has_pool = pool is not None
        self.pool = pool
        [group, *others] = groups
        if others:
            raise ValueError(
                "data=: the model has several groups of rows with different numbers of them. A "
                "loader gives the rows of one; the others must be used whole: name the one in "
                "batch_size={name: n}."
            )
        n = group.batch_size
        if n > source.rows_per_pass // 2:
            raise ValueError(
                f"batch_size={n}: a loader of {source.n_rows} rows needs minibatches of at most "
                "half of them. Lower batch_size, or leave it out and put the data into the model."
            )
        self.names = [variable.name for variable in group.sources]
        wanted = getattr(source.loader, "buffer_rows", None) or max(
            WINDOW_BYTES // source.row_bytes,
            WINDOW_BLOCKS * source.block_rows,
            WINDOW_MINIBATCHES * n,
        )
        self.minibatches_per_window = max(1, min(wanted, source.rows_per_pass) // n)
        self._window = self._ahead = None
        super().__init__(groups, pilot, dtype, resident=None)  # type: ignore[arg-type]

    @property
    def n_data_rows(self) -> int:
        """Number of rows of the data, most of which aren't at hand."""
        return self.source.n_rows

    def _find_mark(self) -> float:
        found = [
            self.source.mark(outcome.name)
            if outcome.name is not None and outcome.name in self.names
            else outcome.mark
            for outcome in self.outcomes
        ]
        return sum(found)

    @property
    def n_reads(self) -> int:
        """How often all rows were read so far."""
        return self.source.n_passes

    @property
    def threads(self) -> int | None:
        """How many work on a pass: with more than one it may hold three windows instead of two."""
        return 1 if self.pool is None else None

    def enlarge_pool(self) -> None:
        """Let pools that are drawn from now on have as many rows as they may."""
        if self.pool is not None:
            self.pool = self.pool._replace(size=self.pool.most)

    @property
    def n_kept(self) -> list[int]:
        """Number of rows of which a gradient may keep numbers."""
        n_rows = self.source.rows_per_pass
        return [n_rows if self.pool is None else min(n_rows, self.pool.size)]

    @property
    def row_weight(self) -> float:
        """How often each row of a pass counts: once, but for those that the loader leaves out."""
        return self.source.n_rows / self.source.rows_per_pass

    @property
    def rows_per_window(self) -> int:
        """Number of rows in memory at a time."""
        return self.minibatches_per_window * self.batch_sizes[0]

    def reload(self) -> None:
        """Take the pilot's arrays, and let go of the window; wait for the thread to end."""
        if self._ahead is not None:
            self._ahead.close()
        self._window = self._ahead = None
        self.arrays = self.resident = tuple(self.sources)
        self._forget_mark()
        self._count([self.source.n_rows])
        self.n_at_hand = [len(self.arrays[0])]

    def window(self, seed: int, number: int) -> tuple[tuple[Array, ...], Array]:
        """Return the arrays of a window, and the rows of its minibatches; have the next one read.

        What was read is a cache: a window is a function of its number and a chain's seed.
        """
        if self._window is None or self._window[0] != (seed, number):
            count = self.rows_per_window
            if self._ahead is None or self._ahead.what != (seed, number):
                self.reload()
                reader = Reader(self.source, self.names, seed)
                self._ahead = ReadAhead((seed, number), reader, number * count, count)
            arrays = tuple(self._ahead.result())
            reader = self._ahead.reader
            order = np.random.default_rng([seed, number]).permutation(count)
            rows = order.reshape(self.minibatches_per_window, -1)
            self._window = (seed, number), arrays, rows
            self._ahead = ReadAhead((seed, number + 1), reader, (number + 1) * count, count)
        return self._window[1:]

    def chunks(self, subset: Sequence[Array] | None = None) -> Iterator[Chunk]:
        """Yield all rows, window by window, each read while the one before is in use."""
        if subset is not None:
            yield from super().chunks(subset)
            return
        weight = self.row_weight
        step = self._chunk_rows[0]
        for window, arrays in enumerate(self._pass()):
            n = len(arrays[0])
            for start in range(0, n, step):
                yield Chunk(window, 0, np.arange(start, min(start + step, n)), weight, arrays)

    def map_sum(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function of all rows says, as a sum over partitions if there are any."""
        if self.source.has_partitions:
            return self.source.map_sum(self.names, self.pool, function, *arguments)
        return super().map_sum(function, *arguments)

    def at_once(
        self, subset: Sequence[Array] | None = None
    ) -> tuple[Minibatch, tuple[Array, ...]] | None:
        """Return some rows at hand, see `InMemory.at_once`; all rows never are."""
        return None if subset is None else super().at_once(subset)

    def _pass(self) -> Iterator[tuple[Array, ...]]:
        reader = Reader(self.source, self.names, 0)
        total = self.source.rows_per_pass
        size = self.rows_per_window
        ahead = ReadAhead(0, reader, 0, min(size, total))
        try:
            for start in range(size, total + size, size):
                arrays = ahead.result()
                if start < total:
                    ahead = ReadAhead(start, reader, start, min(size, total - start))
                yield tuple(arrays)
            reader.finish()
        finally:
            ahead.close()

    def odd_values(self, minibatch: Minibatch | None = None) -> str:
        """Say what these rows, or the pilot, contain that no gradient comes of, if anything."""
        if minibatch is None:
            return super().odd_values()
        [rows] = minibatch.rows
        return odd_values(array[rows] for array in minibatch.arrays)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copied(self, _window=None, _ahead=None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_window": None, "_ahead": None}


class Windows(Even):
    """Minibatches of a stream: of one window after another, each in an order of its own.

    The place of a chain is its seed and how many minibatches it has drawn.

    Parameters
    ----------
    data : Streamed
    """

    data: Streamed

    def draw(self, rng: np.random.Generator, place: Place, k: int) -> tuple[Minibatches, Place]:
        """Draw the next ``k`` minibatches, or fewer: those that are left in the window."""
        seed, t = place or (int(rng.integers(2**63)), 0)
        number, i = divmod(t, self.data.minibatches_per_window)
        arrays, order = self.data.window(seed, number)
        rows = order[i : i + k]
        return Minibatches((rows,), (None,), arrays), (seed, t + len(rows))
