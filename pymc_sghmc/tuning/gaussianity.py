"""Gaussianity check: how far a posterior of few parameters is from its Gaussian fit, far out.

The logarithm of a scale that the data say little about has a long tail on one side, and falls off
steeply on the other. Knows passes over the data, no settings.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.gradients.metric import Array
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

__all__ = ["Edge", "FarOut", "GaussianityCheck", "check_gaussianity", "far_out"]

FAR = 2.0  # sds
OFF = 0.5  # of the force that a Gaussian would have there, from which on it is none
REACHED = 8.0  # fall of log p within which chains come by
EVER_REACHED = 16.0  # ..., and within which some chain comes by once in a run
FARTHEST = 8.0  # sds
STRIDE = 0.5  # sds
STEADY = 2.0  # over the curvature: the largest stable learning rate
MOST = 12  # parameters that are checked
STEP = 1e-3  # sds, of differences
SOME = 5000  # rows or clusters, of each kind, that are looked at


class GaussianityCheck(NamedTuple):
    """What lies two standard deviations out."""

    largest_step: float  # the largest stable learning rate there, ∞ where it needn't be limited
    is_gaussian: bool  # whether forces there are about those of a Gaussian


class Edge(NamedTuple):
    """As far out along a direction of φ as chains come now and then."""

    place: int  # of the parameter
    direction: Array  # (d,), of length one
    at: float  # sds from the mean
    force: float  # towards the mean


class FarOut(NamedTuple):
    """What lies far out along skewed parameters."""

    largest_step: float  # the largest stable learning rate, ∞ where it needn't be limited
    edges: list[Edge]


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

    def curvature(self, direction: Array, x: float) -> tuple[float, float]:
        """Return the fall of log p at x standard deviations, and the curvature there."""
        logp, here = self.along(direction, x)
        _, there = self.along(direction, x + STEP)
        return -logp, (here - there) / STEP

    def largest_step(self, direction: Array, side: float) -> float:
        """Return the largest stable learning rate on the way to ``side``, by the curvature."""
        limit = np.inf
        for x in (0.5 * side, 0.75 * side, side):
            fall, curvature = self.curvature(direction, x)
            if fall < REACHED and curvature > 0:
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
        direction = _direction(fit, i)
        for side in (-FAR, FAR):
            _, force = surroundings.along(direction, side)
            if not abs(force / -side - 1) <= OFF:  # or not a number
                is_gaussian = False
                largest_step = min(largest_step, surroundings.largest_step(direction, side))
    return GaussianityCheck(largest_step=largest_step, is_gaussian=is_gaussian)


def far_out(passes: Any, fit: GaussianFit, places: Sequence[int]) -> FarOut:
    """Look at how far out along some parameters chains may come, and at what is stable there.

    In a run of some 10⁵ inner steps a chain comes now and then to where log p has fallen by
    `EVER_REACHED`. On the steep side of a skewed posterior the curvature is many times that at the
    mean, and one step that isn't stable there may send the chain to where nothing is a number.

    Parameters
    ----------
    passes : Passes
    fit : GaussianFit
    places : list of int
        Parameters whose posteriors may be skewed.
    """
    largest_step = np.inf
    edges: list[Edge] = []
    if not places:
        return FarOut(largest_step, edges)
    surroundings = _Surroundings(passes, fit)
    numbers = np.unique(np.linspace(0, len(places) - 1, MOST).astype(int))
    for place in [places[number] for number in numbers]:
        direction = _direction(fit, place)
        for side in (-1.0, 1.0):
            _, force = surroundings.along(direction, side * FAR)
            if abs(force * -side / FAR - 1) <= OFF:
                continue
            edge = None
            for x in np.arange(STRIDE, FARTHEST, STRIDE):
                fall, curvature = surroundings.curvature(direction, side * x)
                if not fall < EVER_REACHED:
                    break
                if curvature > 0:
                    largest_step = min(largest_step, STEADY / curvature)
                _, force = surroundings.along(direction, side * x)
                edge = Edge(int(place), direction, float(side * x), -side * force)
            if edge is not None:
                edges.append(edge)
    return FarOut(largest_step, edges)


def _direction(fit: GaussianFit, place: int) -> Array:
    """Direction of φ in which a parameter moves, and others as the fit expects them to."""
    direction = fit.metric.pull_back(np.eye(fit.mean.size)[place])
    return direction / max(float(np.linalg.norm(direction)), 1e-300)
