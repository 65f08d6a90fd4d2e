"""A change of a model's graphs, and what sampling has to do for it.

A step compiles a `RowModel` and doesn't know how it was rewritten. What a rewrite needs while a
chain is set up, runs or is stored, it does in these methods; the default of each is to do nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.gradients.around_centre import AroundExpansion
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.row_coordinates import LinearRows
from pymc_sghmc.models.row_model import Input

__all__ = ["MeanField", "Rewrite"]


class MeanField(NamedTuple):
    """A Gaussian with independent parameters."""

    mean: np.ndarray  # (d,)
    sds: np.ndarray


class Rewrite:
    """What stays of a rewrite of a `RowModel` once it has been compiled.

    Attributes
    ----------
    inputs : tuple of Input
        What it adds to the inputs of compiled functions.
    is_placed : bool
        Whether it must be placed for each set-up, see `place`.
    changes_coordinates : bool
        Whether positions aren't in the model's own coordinates.
    has_long_tails : bool
        Whether what is left to sample are few parameters, scales with long tails among them: set-up
        then looks far out, too.
    group_coefficients : dict of {str: slice}
        Parameters of which a row sees the entries of its own group alone, and where they lie in a
        position.
    group_columns : list of array
        The same places, in parts of which a row sees a single entry each.
    linear_rows : LinearRows or None
        Rows in coordinates in which they may be linear, where the chain's are others; while there
        are graphs.
    """

    linear_rows: LinearRows | None = None
    inputs: tuple[Input, ...] = ()
    is_placed = False
    changes_coordinates = False
    has_long_tails = False
    group_coefficients: dict[str, slice] = {}
    group_columns: Sequence[np.ndarray] = ()

    def substitutions(self, position: TensorVariable) -> dict[TensorVariable, TensorVariable]:
        """Return what takes the place of variables that stand for functions of a position."""
        return {}

    def compile(self, density: LogDensity) -> None:
        """Compile functions of its own, once the log-density is compiled."""

    def to_model(self, position: np.ndarray) -> np.ndarray:
        """Return a position in the model's own coordinates."""
        return position

    def from_model(self, position: np.ndarray) -> np.ndarray:
        """Return a position of the model's own coordinates in those of this rewrite."""
        return position

    @property
    def independent(self) -> MeanField | None:
        """A Gaussian near the posterior, if one was fitted, from which further fits begin."""
        return None

    def taken_fit(self, start: np.ndarray) -> Any:
        """Return a fit to the posterior that was made from this start, once; or None."""
        return None

    def choose(
        self, gradient: MinibatchGradient, *points: np.ndarray | None
    ) -> tuple[np.ndarray | None, ...]:
        """Choose coordinates before the first set-up; return ``points`` in them."""
        return points

    def place(
        self, gradient: MinibatchGradient, start: np.ndarray, reference: np.ndarray | None
    ) -> np.ndarray | None:
        """Adapt to the data, around a given reference point or one that is found from ``start``.

        Returns
        -------
        array of shape (d,) or None
            Where that was, if it is a good start for any set-up.
        """
        return None

    def follow(self, gradient: MinibatchGradient, position: np.ndarray) -> None:
        """Adapt to what other steps have sampled, before a draw from this position."""

    @property
    def state(self) -> Any:
        """What `place` has found, for `restore`."""
        return None

    def restore(self, state: Any) -> None:
        """Take an earlier `state` into use again."""

    def recorded(
        self,
        gradient: MinibatchGradient,
        position: np.ndarray,
        rng: np.random.Generator,
        is_tuning: bool,
    ) -> dict[str, np.ndarray]:
        """Return values of further variables of the model for a draw that is recorded."""
        return {}

    def second_order(self, gradient: MinibatchGradient) -> AroundExpansion | None:
        """Return second-order control variates of its own, or None; raises `NotApplicable`."""
        return None
