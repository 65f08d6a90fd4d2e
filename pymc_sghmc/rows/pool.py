"""A pool: some rows of a source, drawn once by their leverage, that stand for all in minibatches.

Sums over all rows are found by passes over the source. What minibatches tell is what is left of
them, and of that a pool tells as much as its rows are many, whatever the number of all rows is.
Knows rows, no gradients.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import Chunk, InMemory, Minibatches
from pymc_sghmc.rows.orders import ByLeverage, Place, type_of_row_numbers

__all__ = ["SCALED_ROWS", "FromPool", "Pool", "PoolDraw", "least_priority"]

SCALED_ROWS = 10_000  # at hand that tell the mean leverage before a pool is drawn
LARGEST = 1e100  # leverage, of rows whose own isn't finite
CHUNK_ROWS = 10_000  # of a pool, evaluated together
ROOM = 2  # times the size of a pool, of candidates at a time
SHARES = 4  # for each row, on average, of the chances to be drawn from a pool


class Pool(NamedTuple):
    """Rows of one group, and what they stand for."""

    arrays: tuple[Array, ...]  # the rows
    weights: Array  # how many rows of the source each stands for, (M,)
    shares: Array  # how often each is drawn, beside the others, 1 or more, (M,)


def least_priority(size: int, n_rows: int) -> float:
    """Return a priority that more rows than a pool needs have, of so many in all.

    A row of size l has it with the probability l/priority, or surely. As sizes are 1 or more, it is
    twice as many rows as a pool has, or more, on average.
    """
    return n_rows / (2 * size)


class PoolDraw:
    """Draws a pool in one pass over rows whose number and leverages aren't known before.

    Priority sampling (Duffield, Lund & Thorup 2007): a row of size l has the priority l/u with u
    uniform, and the rows of the highest priorities are kept. With τ the highest priority that
    isn't, a row stands for max(l, τ)/l of its kind, which makes sums unbiased. Rows above τ are
    certain to be in the pool, and stand for themselves.

    Parameters
    ----------
    size : int
        Number of rows in the pool.
    scale : float
        Mean leverage, about: a row of no leverage has a third of its chance to be drawn.
    seed : int, default 0
        Of priorities. Draws that are added need different ones.
    least : float, default 0.0
        Priority below which no row is kept, where that is known beforehand: see `least_priority`.
    """

    def __init__(self, size: int, scale: float, seed: int = 0, least: float = 0.0) -> None:
        self.size = size
        self._scale = scale
        self._rng = np.random.default_rng(seed)
        self._least = least
        self._priorities: list[Array] = []
        self._leverages: list[Array] = []
        self._rows: list[tuple[Array, ...]] = []
        self._n_kept = 0

    def add(self, arrays: Sequence[Array], rows: Array, leverages: Array) -> None:
        """Offer some rows of some arrays."""
        known = np.nan_to_num(leverages, posinf=LARGEST)
        priorities = self._sizes(known) / (1.0 - self._rng.random(known.size))
        kept = priorities > self._least
        self._priorities.append(priorities[kept])
        self._leverages.append(known[kept])
        self._rows.append(tuple([array[rows[kept]] for array in arrays]))
        self._n_kept += int(kept.sum())
        if self._n_kept > ROOM * self.size + 1:
            self._drop()

    def __add__(self, other: "PoolDraw") -> "PoolDraw":
        """Return a draw from the rows that were offered to both."""
        total = PoolDraw(self.size, self._scale)
        total._least = max(self._least, other._least)
        total._priorities = self._priorities + other._priorities
        total._leverages = self._leverages + other._leverages
        total._rows = self._rows + other._rows
        total._n_kept = self._n_kept + other._n_kept
        total._drop()
        return total

    def __getstate__(self) -> dict[str, Any]:
        if self._n_kept > self.size + 1:
            self._drop()
        return self.__dict__

    def _sizes(self, leverages: Array) -> Array:
        return 1.0 + 3.0 * leverages / (self._scale or 1.0)

    def _drop(self) -> None:
        """Keep the rows of the highest priorities, and the first of the others for τ."""
        priorities = np.concatenate(self._priorities)
        n_more = priorities.size - self.size - 1
        kept = np.arange(priorities.size)
        if n_more > 0:
            kept = np.sort(np.argpartition(priorities, n_more)[n_more:])
            self._least = float(priorities[kept].min())
        self._priorities = [priorities[kept]]
        self._leverages = [np.concatenate(self._leverages)[kept]]
        columns = zip(*self._rows, strict=True)
        self._rows = [tuple([np.concatenate(parts)[kept] for parts in columns])]
        self._n_kept = kept.size

    def is_full(self, n_offered: int) -> bool:
        """Whether no row was missed by a ``least`` that was too large."""
        return self._n_kept > min(self.size, n_offered - 1)

    def pool(self, weight: float = 1.0) -> Pool:
        """Return the pool of what was offered, each row of which counts so often."""
        self._drop()
        [priorities] = self._priorities
        [leverages] = self._leverages
        [arrays] = self._rows
        if priorities.size > self.size:
            last = int(np.argmin(priorities))
            threshold = priorities[last]
            leverages = np.delete(leverages, last)
            arrays = tuple([np.delete(array, last, axis=0) for array in arrays])
            sizes = self._sizes(leverages)
            weights = np.maximum(sizes, threshold) / sizes
        else:
            weights = np.ones(leverages.size)
        # Now the mean is known. As in `ByLeverage` no row has less than a quarter of its even
        # share, lest a few of large leverage take all.
        mean = float(weights @ leverages / weights.sum())
        drawn = weights * (1.0 + 3.0 * leverages / (mean or 1.0))
        shares = np.maximum(1, SHARES * drawn.size * drawn / drawn.sum()).astype(np.int64)
        return Pool(arrays, weight * weights, shares)


class FromPool(ByLeverage):
    """Rows are drawn from a pool, so that a row of the source comes up by its leverage.

    Parameters
    ----------
    data : InMemory
        Whose minibatches they are.
    pool : Pool
    """

    def __init__(self, data: InMemory, pool: Pool) -> None:
        self.data = data
        self.arrays = pool.arrays
        self.weights_in_pool = pool.weights
        numbers = np.arange(pool.shares.size, dtype=type_of_row_numbers(pool.shares.size))
        self.pools = [np.repeat(numbers, pool.shares)]
        # as `ByLeverage` divides by them: 1/(n q) for each row that it stands for
        self.counts = [(pool.shares / pool.weights).astype(data.dtype)]

    def stands_for(self, group: int, rows: Array) -> Array:
        """Return how many rows of the source each of some rows stands for."""
        return self.weights_in_pool[rows]

    def draw(self, rng: np.random.Generator, place: Place, k: int) -> tuple[Minibatches, Place]:
        """Draw ``k`` minibatches."""
        drawn, place = super().draw(rng, place, k)
        return drawn._replace(arrays=self.arrays), place

    def chunks(self, subset: Sequence[Array] | None = None) -> Iterator[Chunk]:
        """Yield the rows of the pool, or some of them, in chunks."""
        rows = np.arange(self.weights_in_pool.size) if subset is None else subset[0]
        for start in range(0, rows.size, CHUNK_ROWS):
            yield Chunk(0, 0, rows[start : start + CHUNK_ROWS], 1.0, self.arrays)
