"""Clusters of rows that are drawn together. Knows arrays and numbers of rows, no gradients."""

import zlib

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from numpy.typing import DTypeLike

from pymc_sghmc.models.contract import Group
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import InMemory, Minibatch

__all__ = ["ClusteredInMemory", "checksum"]


def checksum(array: Array) -> int:
    """Return a number that changes with an array."""
    return zlib.crc32(np.ascontiguousarray(array))


class ClusteredInMemory(InMemory):
    """Arrays whose rows belong to clusters, of which minibatches draw some, each with all its rows.

    Parameters
    ----------
    groups, sources, dtype, resident
        As of `InMemory`.
    likelihood : int
        Which group of likelihoods has the clusters.
    counts : array of shape (clusters,)
        Of their rows.
    width : int
        Values that are computed of each row at once.
    checksums : dict of {int: int}
        Of arrays that tell the groups of rows, by their place among all.
    """

    def __init__(
        self,
        groups: list[Group],
        sources: Sequence[Any],
        dtype: DTypeLike,
        resident: Callable[[Array], Any],
        *,
        likelihood: int,
        counts: Array,
        width: int,
        checksums: Mapping[int, int],
    ) -> None:
        self._likelihood = likelihood
        self._counts = counts
        self._width = width
        self._checksums = checksums
        self.rows_of_each = float(counts.mean())
        super().__init__(groups, sources, dtype, resident)

    def _count(self, n_rows: list[int]) -> None:
        n = n_rows[self._likelihood]
        n_clusters = self._counts.size
        if n != self._counts.sum():
            raise ValueError(
                f"marginalize: there are {n} rows now, and were {self._counts.sum()} when the "
                "step was made. Make a new step after pm.set_data."
            )
        if any(checksum(self.arrays[i]) != known for i, known in self._checksums.items()):
            raise ValueError(
                "marginalize: rows belong to other groups now than when the step was made. Make "
                "a new step after pm.set_data."
            )
        super()._count(
            [n_clusters if k == self._likelihood else rows for k, rows in enumerate(n_rows)]
        )

    def _rows_per_chunk(self) -> list[int]:
        found = super()._rows_per_chunk()
        rows = max(1.0, self.rows_of_each * self._width)
        found[self._likelihood] = max(10, int(found[self._likelihood] / rows))
        return found

    def odd_values(self, minibatch: Minibatch | None = None) -> str:
        """Say what the data of all rows contain that no gradient comes of, if anything."""
        return super().odd_values()
