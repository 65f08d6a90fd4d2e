"""What a pass over rows adds up to: sums by which passes are compared, and chosen rows.

Both can be made of partitions and added. Knows arrays and partitions, no loaders.
"""

from collections.abc import Mapping

import numpy as np

from pymc_sghmc.models.outcomes import sums_of_values
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.partitions import Partition

__all__ = ["Chosen", "Sums", "chosen_rows"]


class Sums:
    """Sums of the values in one pass, and of their sizes, by the names of containers."""

    def __init__(self, with_sizes: bool) -> None:
        self.of: dict[str, float] = {}
        self.sizes: dict[str, float] = {}
        self._with_sizes = with_sizes

    def add(self, block: Mapping[str, Array]) -> None:
        """Take in a block."""
        for name, array in block.items():
            if not self._with_sizes:
                self.of[name] = self.of.get(name, 0.0) + float(array.sum(dtype=float))
                continue
            total, size = sums_of_values(array)
            self.of[name] = self.of.get(name, 0.0) + total
            self.sizes[name] = self.sizes.get(name, 0.0) + size

    def __add__(self, other: "Sums") -> "Sums":
        total = Sums(self._with_sizes)
        total.of = {name: value + other.of[name] for name, value in self.of.items()}
        total.sizes = {name: value + other.sizes[name] for name, value in self.sizes.items()}
        return total


class Chosen:
    """Some rows of a source, in their order.

    Parameters
    ----------
    parts : list of list of array
        For each array, rows of successive partitions.
    """

    def __init__(self, parts: list[list[Array]]) -> None:
        self._parts = parts

    def __add__(self, other: "Chosen") -> "Chosen":
        pairs = zip(self._parts, other._parts, strict=True)
        return Chosen([mine + others for mine, others in pairs])

    def arrays(self) -> list[Array]:
        """Return the rows of each array."""
        return [np.concatenate(parts) for parts in self._parts]


def chosen_rows(partition: Partition, numbers: Array | None) -> Chosen:
    """Return those rows of a partition whose numbers, ascending, are asked for; None: all."""
    if numbers is None:
        return Chosen([[array] for array in partition.arrays])
    ends = partition.start, partition.start + partition.n_rows[0]
    first, last = np.searchsorted(numbers, ends)
    rows = numbers[first:last] - partition.start
    return Chosen([[array[rows]] for array in partition.arrays])
