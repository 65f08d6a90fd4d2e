"""Types of what update rules, gradients and loops ask of each other."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Generator", "Gradient", "Minibatches", "Target", "Update"]

Array = npt.NDArray[Any]

# `update(state, gradient, learning_rate, rng, *, temperature, ...)` of a sampler returns the new
# state and statistics. States are NamedTuples of arrays: the position first, then the momentum, if
# any.
Update = Callable[..., tuple[Any, dict[str, Any]]]


class Generator(Protocol):
    """The part of `numpy.random.Generator` that an update rule uses."""

    def standard_normal(self, shape: Any, dtype: Any) -> Any:
        """Draw independent standard normals."""


class Gradient(Protocol):
    """What an update rule is given to ask for the gradient of the log-density."""

    def draw_minibatch(self, rng: Any) -> Any:
        """Draw a minibatch: a token that can be used at several positions."""

    def __call__(self, position: Any, minibatch: Any) -> tuple[Any, Any]:
        """Log-density and its gradient, both estimated from the minibatch."""


class Minibatches(Protocol):
    """Rows of several minibatches."""

    @property
    def drawn(self) -> tuple[Array, ...]:
        """Row numbers of shape (k, n), for each group of observations that is not used whole."""

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays whose rows they are."""

    def one(self, i: int) -> Any:
        """Return the minibatch number ``i``."""


class Target(Gradient, Protocol):
    """A chain's gradient in the coordinates in which it moves, with the sums of a draw."""

    gradient: Any
    coordinates: Any
    chain: Any  # its `place` is the cursor of the row sampler
    centre: Array  # reference point of the virial, (d,)
    virial: float
    square_norm: float

    def draw_minibatches(self, rng: np.random.Generator, k: int) -> Minibatches:
        """Draw the chain's next ``k`` minibatches, or as many as a stream has in memory."""

    def add(self, virial: float, square_norm: float) -> None:
        """Add sums over inner steps that were made elsewhere."""
