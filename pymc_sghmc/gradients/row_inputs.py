"""Rows in chunks, with what compiled functions of rows take of them. Knows densities and rows."""

import math

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.gradients.density import Density
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import Chunk, InMemory
from pymc_sghmc.rows.partitions import Partition

__all__ = ["ChunkInputs", "RowFunction", "Rows", "by_row", "in_parts", "with_inputs"]

Rows = InMemory | Partition
RowFunction = Callable[..., Sequence[Array]]  # compiled: an array for each group of rows


class ChunkInputs(NamedTuple):
    """Rows of one group that are evaluated together."""

    chunk: Chunk
    inputs: tuple[Any, ...]  # what functions of rows take of them besides a position


def by_row(
    density: Density, data: Rows, group: int | None = None, rows: Array | None = None
) -> Iterator[ChunkInputs]:
    """Yield chunks of rows, and what functions of rows take of each besides a position.

    Parameters
    ----------
    density : Density
    data : InMemory or Streamed
    group : int, optional
        Default: all groups of rows.
    rows : array of int, optional
        Some of the group's.
    """
    none = np.zeros(1, dtype=np.int64)
    subset = None
    if rows is not None:
        subset = tuple(rows if k == group else none for k in range(len(data.n_rows)))
    for part in with_inputs(density, data, data.chunks(subset)):
        if group in (None, part.chunk.group):
            yield part


def with_inputs(density: Density, data: Rows, chunks: Iterable[Chunk]) -> Iterator[ChunkInputs]:
    """Yield chunks of rows with what functions of rows take of each besides a position."""
    for chunk in chunks:
        numbers = data.part(chunk.group, chunk.rows).rows
        yield ChunkInputs(chunk, (*numbers, *chunk.arrays, *density.given))


def in_parts(chunks: Iterable[Chunk], most_rows: int) -> Iterator[Chunk]:
    """Cut chunks into parts of about the same number of rows, each small enough."""
    for chunk in chunks:
        for rows in np.array_split(chunk.rows, math.ceil(chunk.rows.size / most_rows)):
            yield chunk._replace(rows=rows)
