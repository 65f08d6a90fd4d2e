"""Exceptions that end a chain or rule out a kind of gradient, and how PyMC treats them."""

from typing import Any, NoReturn

import numpy as np

from pymc.exceptions import SamplingError

__all__ = ["ChainError", "NeedsAllRows", "NonFinite", "NotApplicable", "SamplingStopped"]


class NotApplicable(Exception):
    """A kind of gradient can't be made of this model. The message says why."""


class NeedsAllRows(ValueError):
    """A likelihood can't be evaluated on some of its rows.

    Parameters
    ----------
    cause : str
        Why not.
    remedy : str, optional
        How to write the model so that it can.
    instead : str, optional
        What else to do, said where the step doesn't take all rows by itself.
    """

    def __init__(self, cause: str, remedy: str = "", instead: str = "Or use NUTS.") -> None:
        super().__init__(" ".join(part for part in (cause, remedy, instead) if part))
        self.advice = " ".join(part for part in (cause, remedy) if part)


class NonFinite(ArithmeticError):
    """The log-density, its gradient or the position is not finite.

    Parameters
    ----------
    position : array of shape (d,)
        Where the log-density was asked for.
    gradient : array of shape (d,)
        Gradient of the log-density there.
    logp : float
        The log-density there.
    minibatch : optional
        Rows that it was computed from, as the gradient's ``draw_minibatch`` returned them.
    """

    def __init__(
        self,
        position: np.ndarray,
        gradient: np.ndarray,
        logp: float | np.ndarray,
        minibatch: Any = None,
    ) -> None:
        super().__init__(position, gradient, logp, minibatch)
        self.position = position
        self.gradient = gradient
        self.logp = logp
        self.minibatch = minibatch


class ChainError(ArithmeticError):
    """A chain cannot go on. The message says why."""


class SamplingStopped(SamplingError, KeyboardInterrupt):
    """Ends a chain as an interruption does, so that PyMC returns the draws made so far.

    PyMC drops all draws when a step raises an error, but keeps them when it is interrupted. In one
    process this exception is a KeyboardInterrupt. A worker process sends it to the parent as a
    SamplingError, and unpickling it there raises the interruption. The reason has been logged by
    then.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _interrupt, self.args


def _interrupt(message: str) -> NoReturn:
    raise KeyboardInterrupt(message)
