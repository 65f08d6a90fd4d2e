"""The orders in which rows come up in minibatches: independently, evenly or by leverage.

An order is asked for minibatches with the place of a chain in it, which it returns moved on and
does not keep: ``draw(rng, place, k) -> (Minibatches, place)``. `Epochs` and `Windows` are orders,
too. Knows rows, no gradients.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Protocol, Self

import numpy as np

from pymc_sghmc.protocols import Array
from pymc_sghmc.records import copied
from pymc_sghmc.rows.data import Chunk, InMemory, Minibatch, Minibatches

__all__ = ["ByLeverage", "Even", "Order", "Place", "WithReplacement", "type_of_row_numbers"]

Place = tuple[int, int] | None  # of a chain: its seed and how many minibatches it has drawn


class Order(Protocol):
    """What gradients ask of an order of rows."""

    independent: bool  # whether a row may come up again before all others have

    @property
    def sizes(self) -> list[int]:
        """Number of rows that minibatches are drawn from, of each group."""

    def draw(self, rng: np.random.Generator, place: Place, k: int) -> tuple[Minibatches, Place]:
        """Draw a chain's next ``k`` minibatches, or fewer; return its new place, too."""

    def probe(self, rng: np.random.Generator) -> Minibatch:
        """Draw a minibatch that no step of a chain is made of."""

    def weights(self, rows: Sequence[Array]) -> tuple[Array, ...]:
        """Weights of the rows of a minibatch, by group."""


class Even:
    """An order in which each row comes up as often as any other.

    Parameters
    ----------
    data : InMemory
    """

    independent = False

    def __init__(self, data: InMemory) -> None:
        self.data = data

    @property
    def sizes(self) -> list[int]:
        """Number of rows that minibatches are drawn from, of each group."""
        return self.data.n_rows

    def probe(self, rng: np.random.Generator) -> Minibatch:
        """Draw rows at hand with replacement, which aren't counted."""
        return self.data.evenly(rng, 1).one(0)

    def weights(self, rows: Sequence[Array]) -> tuple[Array, ...]:
        """Weights of the rows of a minibatch, by group."""
        return self.data.uniform_weights(rows)


class WithReplacement(Even):
    """Each row is drawn evenly and independently of all others.

    Parameters
    ----------
    data : InMemory
    """

    independent = True

    @property
    def sizes(self) -> list[int]:
        """Number of rows that minibatches are drawn from, of each group."""
        return self.data.n_at_hand

    def draw(self, rng: np.random.Generator, place: Place, k: int) -> tuple[Minibatches, Place]:
        """Draw ``k`` minibatches."""
        return self.data.evenly(rng, k), place


class ByLeverage:
    """Rows are drawn with a probability that grows with their leverage, and count for as much less.

    An outlier that even minibatches would miss for a thousand steps, and that would then throw the
    chain off, comes up often and gently.

    Parameters
    ----------
    data : InMemory
    leverages : list of arrays of shape (number of rows,)
        One for each group of rows.
    """

    independent = True

    def __init__(self, data: InMemory, leverages: Sequence[Array]) -> None:
        self.data = data
        self.pools = []
        self.counts = []
        for leverage in leverages:
            # Row i is in the pool 1 + ⌊3 leverage / mean⌋ times; rows are drawn evenly from it.
            share = np.nan_to_num(leverage, posinf=np.finfo(leverage.dtype).max).astype(float)
            share = share / (share.max(initial=0.0) or 1.0)
            counts = (1 + 3 * share / (share.mean() or 1.0)).astype(np.int32)
            numbers = np.arange(counts.size, dtype=type_of_row_numbers(counts.size))
            self.pools.append(np.repeat(numbers, counts))
            self.counts.append(counts)

    @property
    def sizes(self) -> list[int]:
        """Number of rows that minibatches are drawn from, of each group."""
        return [counts.size for counts in self.counts]

    def stands_for(self, group: int, rows: Array) -> Array:
        """Return how many rows of the data each of some rows stands for."""
        return np.ones(rows.size)

    def chunks(self, subset: Sequence[Array] | None = None) -> Iterator[Chunk]:
        """Yield these rows, or some of them, in chunks."""
        return self.data.chunks(subset)

    def draw(self, rng: np.random.Generator, place: Place, k: int) -> tuple[Minibatches, Place]:
        """Draw ``k`` minibatches."""
        data = self.data
        # uniforms of double precision: even to 1e-16, and four times as fast as integers of few
        drawn = [
            pool[(rng.random((k, n)) * pool.size).astype(np.int64)].astype(np.int64)
            for pool, n, rows in zip(self.pools, data.batch_sizes, data.whole, strict=True)
            if rows is None
        ]
        return Minibatches(tuple(drawn), data.whole, data.resident), place

    def probe(self, rng: np.random.Generator) -> Minibatch:
        """Draw a minibatch that no step of a chain is made of."""
        return self.draw(rng, None, 1)[0].one(0)

    def weights(self, rows: Sequence[Array]) -> tuple[Array, ...]:
        """Weights of the rows of a minibatch, by group."""
        uniform = self.data.uniform_weights(rows)
        return tuple(
            [
                weight
                if whole is not None
                else (pool.size / idx.size / counts[idx]).astype(weight.dtype, copy=False)
                for whole, weight, idx, pool, counts in zip(
                    self.data.whole, uniform, rows, self.pools, self.counts, strict=True
                )
            ]
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copied(self, data=deepcopy(self.data, memo))


def type_of_row_numbers(n_rows: int) -> type[np.signedinteger[Any]]:
    """Return the type that holds the numbers of so many rows: half the memory where it can be."""
    return np.int32 if n_rows <= 2**31 else np.int64
