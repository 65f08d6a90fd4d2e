"""How many draws of a chain one independent draw takes, while it runs.

Knows numbers, no chains and no settings.
"""

from typing import NamedTuple, Self

import numpy as np

from pymc_sghmc.gradients.metric import Array

__all__ = ["BatchMeans"]

N_BATCHES = 16


class BatchMeans(NamedTuple):
    """Sums of draws and of their means over batches, of which no draw needs to be kept.

    Means of batches vary more than those of independent draws would, by as much as draws resemble
    their neighbours: the ratio is the integrated autocorrelation time, as long as a batch is
    longer.
    """

    length: int  # draws in a batch
    n: int  # draws so far
    first: Array  # the first of them, from which all are counted, (d,)
    batch: Array  # sum over the present batch
    total: Array  # over all draws
    squares: Array
    squared_means: Array  # sum over the batches that are complete

    @classmethod
    def of(cls, n_draws: int, first: Array) -> Self:
        """Begin with batches for so many draws."""
        zeros = np.zeros(len(first))
        return cls(max(n_draws // N_BATCHES, 1), 0, first, zeros, zeros, zeros, zeros)

    def with_draw(self, x: Array) -> Self:
        """Take in one more."""
        x = x - self.first
        batch = self.batch + x
        squared_means = self.squared_means
        n = self.n + 1
        if n % self.length == 0:
            squared_means = squared_means + np.square(batch / self.length)
            batch = np.zeros_like(batch)
        squares = self.squares + np.square(x)
        return self._replace(
            n=n, batch=batch, total=self.total + x, squares=squares, squared_means=squared_means
        )

    def autocorrelation_time(self) -> float:
        """Return that of the slowest parameter, in draws; 1 before half of the batches are there.

        At most the length of a batch, which is what a chain that only drifts shows.
        """
        n_batches = self.n // self.length
        if n_batches < N_BATCHES // 2:
            return 1.0
        variance = self.squares / self.n - np.square(self.total / self.n)
        mean = (self.total - self.batch) / (n_batches * self.length)
        between = self.squared_means / n_batches - np.square(mean)
        between *= n_batches / (n_batches - 1)
        moving = variance > 0
        ratio = self.length * between[moving] / variance[moving]
        return float(ratio.max(initial=1.0))
