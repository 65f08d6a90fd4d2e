"""Clusters of rows, Gaussian sites and quadrature: what the integral over coefficients needs."""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

__all__ = ["Clusters", "Quadrature", "Sites"]


class Clusters(NamedTuple):
    """The rows of each group: first groups that have rows, then those without."""

    groups: np.ndarray  # number of each cluster's group
    start: np.ndarray  # of its rows in ...
    order: np.ndarray  # ... all rows, by group
    count: np.ndarray  # type: ignore[assignment]  # of its rows; a tuple's method is hidden

    @classmethod
    def of(cls, index: np.ndarray, n_groups: int) -> "Clusters":
        """Return the clusters of rows whose groups have these numbers."""
        count = np.bincount(index, minlength=n_groups)
        start = np.cumsum(count) - count
        groups = np.concatenate([np.flatnonzero(count > 0), np.flatnonzero(count == 0)])
        return cls(
            groups=groups,
            start=start[groups],
            order=np.argsort(index, kind="stable"),
            count=count[groups],
        )

    @property
    def n_with_rows(self) -> int:
        """How many clusters have rows."""
        return int(np.count_nonzero(self.count))


@dataclass(frozen=True)
class Sites:
    """A Gaussian site for each cluster, and one for those without rows.

    A site stands for what the rows say of their group's k coefficients, in the unit in which rows
    see them. With the prior it places the nodes of quadrature.

    Attributes
    ----------
    table : array of shape (clusters + 1, k + k(k + 1)/2)
        Precision times location, and the precision's lower triangle.
    slopes : array of shape (clusters + 1, kd)
        How fast the former changes with θ.
    reference : array of shape (d,)
        θ̂, where both were found.
    modes : array of shape (clusters + 1, k)
        Of the coefficients, from where they are searched again.
    """

    table: np.ndarray
    slopes: np.ndarray
    reference: np.ndarray
    modes: np.ndarray

    @classmethod
    def none(cls, n_clusters: int, k: int, d: int) -> "Sites":
        """Return sites that say nothing."""
        return cls(
            table=np.zeros((n_clusters + 1, k + k * (k + 1) // 2)),
            slopes=np.zeros((n_clusters + 1, k * d)),
            reference=np.zeros(d),
            modes=np.zeros((n_clusters + 1, k)),
        )


@dataclass(frozen=True)
class Quadrature:
    """Gauss-Hermite quadrature over k coefficients, ``n_nodes`` for each."""

    n_nodes: int
    k: int

    @cached_property
    def nodes(self) -> np.ndarray:
        """Nodes of the tensor product, (n_nodes^k, k)."""
        x, _ = np.polynomial.hermite_e.hermegauss(self.n_nodes)
        return np.array(list(product(x, repeat=self.k)))

    @cached_property
    def log_weights(self) -> np.ndarray:
        """Logarithm of their weights over the standard normal density, but for a constant."""
        x, w = np.polynomial.hermite_e.hermegauss(self.n_nodes)
        logs = np.log(w) + 0.5 * np.square(x)
        return np.array([sum(combined) for combined in product(logs, repeat=self.k)])
