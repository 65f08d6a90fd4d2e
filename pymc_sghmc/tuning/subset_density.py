"""A log-density on a fixed subset of the rows, for searches that ask it hundreds of times.

Knows passes over the data, no modes and no samplers.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pymc_sghmc.gradients.metric import Array
from pymc_sghmc.gradients.passes import Passes

__all__ = ["Density", "SubsetDensity"]

N_SHARES = 10  # of the subset that show how much rows differ


class Density(Protocol):
    """Log-density and gradient at a position."""

    dtype: Any

    def __call__(self, position: Array) -> tuple[float, Array]:
        """Log-density and gradient."""


class SubsetDensity:
    """Log-density and gradient on a fixed subset of the rows, weighted to stand for all.

    One call of the function that minibatches are evaluated by, so that nothing new is compiled. The
    last evaluation is remembered, as climbs begin where one was made.

    Parameters
    ----------
    passes : Passes
    n_rows : int
        Of each group of rows, at most.
    """

    def __init__(self, passes: Passes, n_rows: int):
        data = passes.data
        self.density = passes.density
        self.dtype = passes.density.dtype
        rng = np.random.default_rng(0)
        self.rows = tuple(
            np.arange(n) if n <= n_rows else np.sort(rng.choice(n, size=n_rows, replace=False))
            for n in data.n_at_hand
        )
        self._data = data
        self._one = np.ones((), dtype=self.density.weights_dtype)
        self._zero = np.zeros_like(self._one)
        self.is_whole = all(n == rows.size for n, rows in zip(data.n_rows, self.rows, strict=True))
        n_all = sum(data.n_rows)
        self.share = sum(rows.size for rows in self.rows) / n_all if n_all else 1.0
        self.n_evaluations = 0
        self._last: tuple[Array, tuple[float, Array]] | None = None

    @property
    def passes(self) -> float:
        """Passes over all rows that the evaluations so far amount to."""
        return self.n_evaluations * self.share

    def __call__(self, position: Array) -> tuple[float, Array]:
        """Log-density and gradient."""
        if self._last is None or not np.array_equal(position, self._last[0]):
            self.n_evaluations += 1
            weights = self._data.uniform_weights(self.rows)
            self._last = position.copy(), self._at(position, self._one, weights)
        return self._last[1]

    def prior(self, position: Array) -> Array:
        """Gradient of all but the likelihoods of rows."""
        weights = [np.zeros(rows.size, dtype=self._one.dtype) for rows in self.rows]
        return self._at(position, self._one, weights)[1]

    def error_of_difference(self, position: Array, other: Array) -> float:
        """Return the standard error of a difference of log-densities that a subset gives."""
        if self.is_whole:
            return 0.0
        variance = 0.0
        weights = self._data.uniform_weights(self.rows)
        for k, n_rows in enumerate(self._data.n_rows):
            if self.rows[k].size == n_rows:
                continue
            shares = []
            for part in np.array_split(np.arange(self.rows[k].size), N_SHARES):
                alone = [np.zeros_like(of_group) for of_group in weights]
                alone[k][part] = N_SHARES * weights[k][part]
                there = self._at(position, self._zero, alone)[0]
                shares.append(there - self._at(other, self._zero, alone)[0])
            variance += np.var(shares, ddof=1) / N_SHARES
        self.n_evaluations += 2 * N_SHARES
        return float(np.sqrt(np.nan_to_num(variance, nan=np.inf, posinf=np.inf)))

    def _at(
        self, position: Array, prior_weight: Array, weights: Sequence[Array]
    ) -> tuple[float, Array]:
        minibatch = self._data.part(None, None)._replace(rows=self.rows)
        with np.errstate(all="ignore"):
            logp, grad = self.density(
                position.astype(self.dtype), prior_weight, weights, *minibatch
            )
        return float(logp), np.asarray(grad, dtype=float)
