"""How noisy a gradient from minibatches is. Knows gradients, no samplers."""

from typing import Protocol

import numpy as np

from pymc_sghmc.gradients.density import Density
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import InMemory, Minibatch
from pymc_sghmc.rows.orders import Order

__all__ = ["RowGradient", "noise_covariance"]

N_MICROBATCHES = 10


class RowGradient(Protocol):
    """A gradient from minibatches, of whichever kind."""

    @property
    def density(self) -> Density:
        """What it is the gradient of."""

    @property
    def data(self) -> InMemory:
        """Its rows."""

    @property
    def order(self) -> Order:
        """In which order rows are drawn."""

    def __call__(self, position: Array, minibatch: Minibatch) -> tuple[Array, Array]:
        """Log-density and gradient at ``position``, both estimated from ``minibatch``."""


def noise_covariance(
    gradient: RowGradient,
    coordinates: Metric,
    position: Array,
    rng: np.random.Generator,
    full: bool = False,
) -> Array:
    """Estimate V = Cov[∇Ũ] in φ from one fresh minibatch cut into micro-batches.

    The covariance of the gradients of micro-batches of b rows, times b/n: unbiased, with the
    factor N²/n of rows drawn with replacement; the prior adds nothing to it. This is the
    empirical Fisher information of Ahn et al. (2012) with micro-batches for rows.

    Parameters
    ----------
    gradient : RowGradient
    coordinates : Metric
        φ, in which the noise is measured and ``position`` is given.
    position : array of shape (d,)
    rng : numpy.random.Generator
    full : bool, default False
        All of the matrix, not its diagonal alone.

    Returns
    -------
    array of shape (d,) or (d, d)
    """
    theta = coordinates.to_theta(position)
    rows, arrays = gradient.order.probe(rng)
    d = position.size
    total = np.zeros((d, d) if full else d)
    for k, (idx, is_noisy) in enumerate(zip(rows, gradient.data.is_noisy, strict=True)):
        if not is_noisy:
            continue
        n = idx.size
        b = max(1, n // N_MICROBATCHES)
        micro = [
            Minibatch((*rows[:k], idx[i : i + b], *rows[k + 1 :]), arrays)
            for i in range(0, n - b + 1, b)
        ]
        gradients = [coordinates.pull_back(gradient(theta, part)[1]) for part in micro]
        deviations = np.stack(gradients) - np.mean(gradients, axis=0)  # (micro-batches, d)
        scale = b / n / (len(micro) - 1)
        total += scale * (deviations.T @ deviations if full else np.square(deviations).sum(axis=0))
    return total
