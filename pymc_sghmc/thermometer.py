"""Sums over the inner steps of a draw that tell its temperature. Knows gradients, no samplers."""

import math

from pymc_sghmc.faults import NonFinite

__all__ = ["Thermometer"]


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

    def __call__(self, position, minibatch):
        """Log-density and gradient; raises `NonFinite`."""
        logp, grad = self.gradient(position, minibatch)
        virial = -float((position - self.centre).dot(grad))
        if not math.isfinite(virial + float(logp)):
            raise NonFinite(position, grad, logp, minibatch)
        self.virial += virial
        self.square_norm += float(grad.dot(grad))
        return logp, grad
