"""What an update rule is given for a gradient. Knows gradients and coordinates, no rule."""

import math

from typing import Any

import numpy as np

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.gradients.noise import RowGradient, noise_covariance
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import Minibatch, Minibatches

__all__ = ["Target"]


class Target:
    """A gradient in a chain's coordinates, with the sums that the statistics of a draw need.

    The configurational temperature is E[(θ−c)·∇Ũ(θ)]/d with the gradient of each step; by the
    virial theorem it is 1 under the posterior for any fixed c.

    Parameters
    ----------
    gradient : RowGradient
    coordinates : Metric
    """

    def __init__(self, gradient: RowGradient, coordinates: Metric) -> None:
        self.gradient = gradient
        self.coordinates = coordinates
        self.begin_draw(None, 0.0)  # type: ignore[arg-type]

    def begin_draw(self, chain: Any, centre: Array) -> None:
        """Start the sums anew, about ``centre``, for draws from the chain's cursor on."""
        self.chain = chain
        self.centre = centre
        self.virial = self.square_norm = 0.0

    def add(self, virial: float, square_norm: float) -> None:
        """Take in the sums over inner steps that were made elsewhere."""
        self.virial += virial
        self.square_norm += square_norm

    def draw_minibatches(self, rng: np.random.Generator, k: int) -> Minibatches:
        """Draw the chain's next ``k`` minibatches."""
        minibatches, self.chain.place = self.gradient.order.draw(rng, self.chain.place, k)
        return minibatches

    def draw_minibatch(self, rng: np.random.Generator) -> Minibatch:
        """Draw the chain's next minibatch."""
        return self.draw_minibatches(rng, 1).one(0)

    def __call__(self, position: Array, minibatch: Minibatch) -> tuple[Array, Array]:
        """Log-density and its gradient with respect to φ; raises `NonFinite`."""
        theta = self.coordinates.to_theta(position)
        logp, grad = self.gradient(theta, minibatch)
        virial = -float((theta - self.centre).dot(grad))
        if not math.isfinite(virial + float(logp)):
            raise NonFinite(theta, grad, logp, minibatch)
        self.virial += virial
        self.square_norm += float(grad.dot(grad))
        return logp, self.coordinates.pull_back(grad)

    def noise_covariance(
        self, position: Array, rng: np.random.Generator, full: bool = False
    ) -> Array:
        """V̂ in φ, by a minibatch that no step is made of: see `noise_covariance`."""
        return noise_covariance(self.gradient, self.coordinates, position, rng, full)
