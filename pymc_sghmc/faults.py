"""What ends a chain early. Knows how PyMC treats errors and interruptions."""

from typing import Any

from pymc.exceptions import SamplingError

__all__ = ["Fault", "NonFinite", "SamplingStopped"]


class NonFinite(ArithmeticError):
    """The log-density, its gradient or the position is not finite."""

    def __init__(self, position: Any, gradient: Any, logp: Any, minibatch: Any = None) -> None:
        super().__init__(position, gradient, logp, minibatch)
        self.position = position
        self.gradient = gradient
        self.logp = logp
        self.minibatch = minibatch


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
