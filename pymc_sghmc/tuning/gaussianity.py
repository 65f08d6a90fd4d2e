"""Gaussianity check: how far a posterior of few parameters is from its Gaussian fit, two sds out.

The logarithm of a scale that the data say little about has a long tail on one side, and falls off
steeply on the other. Knows passes over the data, no settings.
"""

from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.gradients.metric import Array
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

__all__ = ["GaussianityCheck", "check_gaussianity"]

FAR = 2.0  # sds
OFF = 0.5  # of the force that a Gaussian would have there, from which on it is none
REACHED = 8.0  # fall of log p within which chains come by
STEADY = 2.0  # over the curvature: the largest stable learning rate
MOST = 12  # parameters that are checked
STEP = 1e-3  # sds, of differences
SOME = 5000  # rows or clusters, of each kind, that are looked at


class GaussianityCheck(NamedTuple):
    """What lies two standard deviations out."""

    largest_step: float  # the largest stable learning rate there, ∞ where it needn't be limited
    is_gaussian: bool  # whether forces there are about those of a Gaussian


class _Surroundings:
    """Log-density and force relative to the mean, where the force of all rows is none."""

    def __init__(self, passes: Any, fit: GaussianFit) -> None:
        self.passes = passes
        self.fit = fit
        at_hand = passes.data.n_at_hand
        self.rows = tuple(np.linspace(0, n - 1, min(n, SOME)).astype(int) for n in at_hand)
        self.top, self.slope = passes.log_density(fit.mean, self.rows)

    def along(self, direction: Array, x: float) -> tuple[float, float]:
        """Return both at x standard deviations along a direction of φ."""
        shift = self.fit.metric.to_theta(x * direction)
        logp, grad = self.passes.log_density(self.fit.mean + shift, self.rows)
        force = direction @ self.fit.metric.pull_back(grad - self.slope)
        return logp - self.top - self.slope @ shift, float(force)

    def largest_step(self, direction: Array, side: float) -> float:
        """Return the largest stable learning rate on the way to ``side``, by the curvature."""
        limit = np.inf
        for x in (0.5 * side, 0.75 * side, side):
            logp, here = self.along(direction, x)
            _, there = self.along(direction, x + STEP)
            curvature = (here - there) / STEP
            if -logp < REACHED and curvature > 0:
                limit = min(limit, STEADY / curvature)
        return limit


def check_gaussianity(passes: Any, fit: GaussianFit) -> GaussianityCheck:
    """Compare forces 2 sds out, along single parameters, with those of the Gaussian fit.

    Parameters
    ----------
    passes : Passes
    fit : GaussianFit
    """
    surroundings = _Surroundings(passes, fit)
    d = fit.mean.size
    largest_step = np.inf
    is_gaussian = True
    for i in np.unique(np.linspace(0, d - 1, MOST).astype(int)):
        direction = fit.metric.pull_back(np.eye(d)[i])
        direction /= max(np.linalg.norm(direction), 1e-300)
        for side in (-FAR, FAR):
            _, force = surroundings.along(direction, side)
            if not abs(force / -side - 1) <= OFF:  # or not a number
                is_gaussian = False
                largest_step = min(largest_step, surroundings.largest_step(direction, side))
    return GaussianityCheck(largest_step=largest_step, is_gaussian=is_gaussian)
