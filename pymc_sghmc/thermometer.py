"""What ends a chain early, and the thermometer that notices it. Knows PyMC's way of interrupting."""

import math

from pymc.exceptions import SamplingError

__all__ = ["Fault", "NonFinite", "SamplingStopped", "Thermometer"]


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
            raise NonFinite(position, grad, logp)
        self.virial += virial
        self.square_norm += float(grad.dot(grad))
        return logp, grad


class NonFinite(ArithmeticError):
    """The log-density, its gradient or the position is not finite."""

    def __init__(self, position, gradient, logp):
        super().__init__(position, gradient, logp)
        self.position, self.gradient, self.logp = position, gradient, logp


class Fault(ArithmeticError):
    """A chain can't go on, for the reason in the message."""


class SamplingStopped(SamplingError, KeyboardInterrupt):
    """Ends a chain as an interruption does, so that PyMC returns the draws made so far.

    PyMC drops all draws when a step raises, but keeps them when it is interrupted. In one process
    this exception is a KeyboardInterrupt. In a worker PyMC sends it to the parent as a
    SamplingError, where unpickling raises the interruption; the reason has been logged by then.
    """

    def __reduce__(self):
        return _interrupt, self.args


def _interrupt(message):
    raise KeyboardInterrupt(message)
