"""Sums over the inner steps of a draw that tell its temperature. Knows gradients, no samplers."""

import math

import numpy as np

from pymc_sghmc.faults import NonFinite

__all__ = ["Thermometer", "inner"]


def inner(a, b) -> float:
    """Inner product without BLAS, whose threads get in the way of other chains."""
    return float(np.einsum("i,i->", a, b))


class Thermometer:
    """Passes a gradient through and sums what the statistics of a draw need.

    The configurational temperature is E[(θ−c)·∇Ũ(θ)]/d with the gradient of each step; by the
    virial theorem it is 1 under the posterior for any fixed c.
    """

    def __init__(self, gradient):
        self.gradient = gradient
        self.draw_minibatch = gradient.draw_minibatch
        self.begin_draw(0.0)

    def begin_draw(self, centre):
        """Start the sums anew, about ``centre``."""
        self.centre = centre
        self.virial = self.square_norm = 0.0

    def add(self, virial, square_norm):
        """Take in the sums over inner steps that were made elsewhere."""
        self.virial += virial
        self.square_norm += square_norm

    def __call__(self, position, minibatch):
        """Log-density and gradient; raises `NonFinite`."""
        logp, grad = self.gradient(position, minibatch)
        virial = -inner(position - self.centre, grad)
        if not math.isfinite(virial + float(logp)):
            raise NonFinite(position, grad, logp, minibatch)
        self.virial += virial
        self.square_norm += inner(grad, grad)
        return logp, grad
