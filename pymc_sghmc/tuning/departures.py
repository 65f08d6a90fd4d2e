"""Whether a chain has left the surroundings of its Gaussian fit, and what may be done then.

Knows the settings that are given and the set-up in use, and chooses nothing.
"""

import math

from typing import Any

import numpy as np

from pymc_sghmc.gradients.metric import Array
from pymc_sghmc.tuning.chain_tuning import ByHand, ChainTuning, Tuning
from pymc_sghmc.tuning.settings import Settings
from pymc_sghmc.tuning.setups import Setups

__all__ = ["Departures"]

FAR = 1.5  # sds in some direction by which the mean of the draws may leave the fit's mean, ...
# ... and chance beside that: n draws' mean with weights growing as t³ has the variance 16/(7n), as
# many times as draws an independent one takes
SLOW = 6.0  # draws that an independent one may take, before draws are made longer
CHANCE = 16 / 7 * SLOW
LOST = 1000.0  # sds in some direction at which a chain can't be meant to be


class Departures:
    """Tells chains that ran away, are far out, or have moved on from the fit they began with.

    Parameters
    ----------
    settings : Settings
    setups : Setups
    second_order : control variates of second order, or None
    """

    def __init__(self, settings: Settings, setups: Setups, second_order: Any) -> None:
        self._settings = settings
        self._setups = setups
        self._second_order = second_order

    def is_lost(self, tuning: Tuning, state: Any, theta: Array) -> bool:
        """Whether a chain that is free to slow down has run away, long before it overflows."""
        if not self._settings.choose_learning_rate:
            return False
        return self.is_far(tuning, state, theta) or not self._setups.distance(theta) < LOST

    def is_far(self, tuning: Tuning, state: Any, theta: Array) -> bool:
        """Whether a chain is so far out that second-order control variates may send it off."""
        if tuning.order < 2:
            return False
        setup = self._setups.made
        T = self._settings.temperature
        limit = (4 * math.sqrt(theta.size) + 10) * math.sqrt(T)
        if setup.mean_phi is None:
            radius = self._setups.radius(theta)
        else:
            radius = np.linalg.norm(state.position - setup.mean_phi)
        if radius < limit:
            return False
        # scales may be far out where what rows see of the effects isn't
        second = self._second_order
        return not (second.knows_distance and second.distance(theta) < limit)

    def has_moved(self, tuning: ChainTuning, mean: Array, n_tuned: int) -> bool:
        """Whether the mean of the draws has left that of the fit, or other steps their values.

        By more than chance: among hundreds of directions few draws leave it in some.
        """
        if self._setups.reference_point is not None or not self._settings.choose_learning_rate:
            return False  # the scale of a given learning rate must stay
        if not self._setups.holds(tuning.made_for):
            return True
        by_chance = math.sqrt(2 * math.log(2 * mean.size) * CHANCE / n_tuned)
        return self._setups.distance(mean) > math.hypot(FAR, by_chance)

    def may_send_back(self, tuning: Tuning) -> bool:
        """Whether a chain that diverges after tuning may go on with its settings, elsewhere.

        As a divergence of NUTS it is counted, and the run warns. Not where the user gave the
        learning rate.
        """
        return not isinstance(tuning, ByHand) and self._settings.choose_learning_rate
