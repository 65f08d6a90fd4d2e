"""Independent proposals for coefficients of groups: heavy-tailed, or a mixture over nodes.

Knows arrays alone.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from scipy.special import gammaln, logsumexp

from pymc_sghmc.protocols import Array

__all__ = ["HeavyTailed", "OverNodes"]

FREEDOM = 5.0  # degrees of the t distribution
WIDTH = 0.7  # sd of a mixture's parts, in distances between nodes


class HeavyTailed:
    """A t distribution.

    Parameters
    ----------
    mean : array of shape (n, k)
    factor : array of shape (n, k, k)
        Cholesky factor of the precision of a Gaussian, in whose unit it is drawn: z = Lᵀ(u − mean).
    """

    def __init__(self, mean: Array, factor: Array) -> None:
        self.mean = mean
        self._factor = factor
        self._inverse = np.linalg.inv(factor).swapaxes(1, 2)
        self.log_det = np.log(np.einsum("naa->na", factor)).sum(axis=1)

    def at(self, z: Array) -> Array:
        """Return the numbers of groups at z."""
        return self.mean + np.einsum(
            "nab,nb->na", self._inverse, np.broadcast_to(z, self.mean.shape)
        )

    def z_of(self, u: Array) -> Array:
        """Return z at numbers of groups."""
        return np.einsum("nba,nb->na", self._factor, u - self.mean)

    def draw(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return numbers, and minus the log-density of each but for a constant."""
        n, k = self.mean.shape
        z = rng.standard_normal((n, k))
        z /= np.sqrt(rng.chisquare(FREEDOM, n) / FREEDOM)[:, None]
        return self.at(z), (FREEDOM + k) / 2 * np.log1p(np.square(z).sum(axis=1) / FREEDOM)


class OverNodes:
    """A mixture of Gaussians around nodes of quadrature, weighted by a density at the nodes.

    Parameters
    ----------
    around : list of HeavyTailed
        In whose units nodes lie; those of each count as much as those of another.
    n_nodes : int
        For each of the k numbers.
    level : function
        Log-density of all groups' numbers, (n, k).
    """

    def __init__(
        self, around: Sequence[HeavyTailed], n_nodes: int, level: Callable[[Array], Array]
    ) -> None:
        self.around = around
        k = around[0].mean.shape[1]
        x, w = np.polynomial.hermite_e.hermegauss(n_nodes)
        self._z = np.array(list(product(x, repeat=k)))
        self._sd = WIDTH * np.array(list(product(np.gradient(x), repeat=k)))
        logs = np.log(w) + np.square(x) / 2
        volume = [sum(one) for one in product(logs, repeat=k)]
        self._levels = [np.stack([level(one.at(z)) for z in self._z], axis=1) for one in around]
        log_p = [np.where(np.isnan(levels), -np.inf, levels) + volume for levels in self._levels]
        totals = [logsumexp(one, axis=1, keepdims=True) for one in log_p]
        self._total = totals[0][:, 0]
        self._log_p = [
            np.where(np.isfinite(total), one - total, -np.inf)
            for one, total in zip(log_p, totals, strict=True)
        ]

    def excess(self) -> Array:
        """Return the largest ratio of the density to the t distribution's at the nodes, (n,)."""
        first = self.around[0]
        k = self._z.shape[1]
        constant = (
            gammaln((FREEDOM + k) / 2) - gammaln(FREEDOM / 2) - k / 2 * np.log(FREEDOM * np.pi)
        )
        found = []
        for one, levels in zip(self.around, self._levels, strict=True):
            for z, level in zip(self._z, levels.T, strict=True):
                squared = np.square(first.z_of(one.at(z))).sum(axis=1)
                t = constant - (FREEDOM + k) / 2 * np.log1p(squared / FREEDOM)
                found.append(level - self._total - t)
        return np.exp(np.nanmax(found, axis=0))

    def draw(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return numbers, and minus the log-density of each but for a constant."""
        n, k = self.around[0].mean.shape
        parts = np.cumsum(np.exp(np.concatenate(self._log_p, axis=1)), axis=1)
        part = (parts < rng.random((n, 1)) * parts[:, -1:]).sum(axis=1)
        which, node = np.divmod(part, len(self._z))
        z = self._z[node] + self._sd[node] * rng.standard_normal((n, k))
        u = np.choose(which[:, None], [one.at(z) for one in self.around])
        log_q = []
        for one, log_p in zip(self.around, self._log_p, strict=True):
            away = np.square((one.z_of(u)[:, None] - self._z) / self._sd).sum(axis=2) / 2
            log_q.append(one.log_det[:, None] + log_p - away - np.log(self._sd).sum(axis=1))
        return u, -logsumexp(np.concatenate(log_q, axis=1), axis=1)
