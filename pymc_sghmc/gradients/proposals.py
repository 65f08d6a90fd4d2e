"""Independent proposals for the numbers of groups: heavy-tailed around a Gaussian, or a mixture over nodes.

Knows arrays alone.
"""

from itertools import product

import numpy as np

from scipy.special import gammaln, logsumexp

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

    def __init__(self, mean, factor):
        self.mean, self._inverse = mean, np.linalg.inv(factor).swapaxes(1, 2)

    def at(self, z):
        """Return the numbers of groups at z."""
        return self.mean + np.einsum(
            "nab,nb->na", self._inverse, np.broadcast_to(z, self.mean.shape)
        )

    def draw(self, rng):
        """Return numbers, and minus the log-density of each but for a constant."""
        n, k = self.mean.shape
        z = rng.standard_normal((n, k))
        z /= np.sqrt(rng.chisquare(FREEDOM, n) / FREEDOM)[:, None]
        return self.at(z), np.log1p(np.square(z).sum(axis=1) / FREEDOM) * (FREEDOM + k) / 2


class OverNodes:
    """A mixture of Gaussians around nodes of quadrature, of which each counts as a density has it there.

    Parameters
    ----------
    around : HeavyTailed
        Whose unit it is in.
    n_nodes : int
        For each of the k numbers.
    level : function
        Log-density of all groups' numbers, (n, k).
    """

    def __init__(self, around, n_nodes, level):
        self.around, k = around, around.mean.shape[1]
        x, w = np.polynomial.hermite_e.hermegauss(n_nodes)
        self._z = np.array(list(product(x, repeat=k)))
        self._sd = WIDTH * np.array(list(product(np.gradient(x), repeat=k)))
        logs = np.log(w) + np.square(x) / 2
        levels = np.stack([level(around.at(z)) for z in self._z], axis=1)
        self._levels = np.where(np.isnan(levels), -np.inf, levels)
        log_p = self._levels + [sum(one) for one in product(logs, repeat=k)]
        self._total = logsumexp(log_p, axis=1, keepdims=True)
        self._log_p = log_p - self._total

    def excess(self):
        """Return how many times as dense as the t distribution the density is, at most: at the nodes, (n,)."""
        k = self._z.shape[1]
        constant = (
            gammaln((FREEDOM + k) / 2) - gammaln(FREEDOM / 2) - k / 2 * np.log(FREEDOM * np.pi)
        )
        squared = np.square(self._z).sum(axis=1)
        t = constant - (FREEDOM + k) / 2 * np.log1p(squared / FREEDOM)
        return np.exp((self._levels - self._total - t).max(axis=1))

    def draw(self, rng):
        """Return numbers, and minus the log-density of each but for a constant."""
        n, k = self.around.mean.shape
        parts = np.cumsum(np.exp(self._log_p), axis=1)
        part = (parts < rng.random((n, 1)) * parts[:, -1:]).sum(axis=1)
        z = self._z[part] + self._sd[part] * rng.standard_normal((n, k))
        away = np.square((z[:, None] - self._z) / self._sd).sum(axis=2) / 2
        log_q = logsumexp(self._log_p - away - np.log(self._sd).sum(axis=1), axis=1)
        return self.around.at(z), -log_q
