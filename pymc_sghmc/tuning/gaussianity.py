"""Gaussianity check: how far a posterior of few parameters is from its Gaussian fit, far out.

The logarithm of a scale that the data say little about has a long tail on one side, and falls off
steeply on the other. Knows passes over the data, no settings.
"""

from collections.abc import Iterator, Sequence
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


class _Force(NamedTuple):
    """Relative to the mean, where the force of all rows is none."""

    logp: float
    along: float  # a direction


class _Place(NamedTuple):
    """What lies some way out along a direction."""

    at: float  # sds from the mean
    fall: float  # of log p
    force: float  # along the direction
    curvature: float


class _Side(NamedTuple):
    """One side of a parameter's posterior."""

    place: int  # of the parameter
    direction: Array  # of φ, (d,), in which it moves, and others as the fit expects them to
    sign: float


class _Surroundings:
    """Log-density and force around a fit, on some rows."""

    def __init__(self, passes: Any, fit: GaussianFit) -> None:
        self.passes = passes
        self.fit = fit
        at_hand = passes.data.n_at_hand
        self.rows = tuple(np.linspace(0, n - 1, min(n, SOME)).astype(int) for n in at_hand)
        self.top, self.slope = passes.log_density(fit.mean, self.rows)

    def skewed_sides(self, places: Sequence[int]) -> Iterator[_Side]:
        """Yield the sides of some parameters where the force far out isn't that of a Gaussian."""
        numbers = np.unique(np.linspace(0, len(places) - 1, MOST).astype(int))
        for place in [int(places[number]) for number in numbers]:
            direction = self.fit.metric.pull_back(np.eye(self.fit.mean.size)[place])
            direction /= max(np.linalg.norm(direction), 1e-300)
            for sign in (-1.0, 1.0):
                side = _Side(place, direction, sign)
                force = self._force(side, FAR).along
                if not abs(force / (-sign * FAR) - 1) <= OFF:  # or not a number
                    yield side

    def at(self, side: _Side, distance: float) -> _Place:
        """Look at a place so many standard deviations out on a side."""
        here = self._force(side, distance)
        there = self._force(side, distance + side.sign * STEP)
        return _Place(
            at=side.sign * distance,
            fall=-here.logp,
            force=here.along,
            curvature=(here.along - there.along) / STEP,
        )

    def _force(self, side: _Side, distance: float) -> _Force:
        shift = self.fit.metric.to_theta(side.sign * distance * side.direction)
        logp, grad = self.passes.log_density(self.fit.mean + shift, self.rows)
        force = side.direction @ self.fit.metric.pull_back(grad - self.slope)
        return _Force(logp - self.top - self.slope @ shift, float(force))


def check_gaussianity(passes: Any, fit: GaussianFit) -> GaussianityCheck:
    """Compare forces 2 sds out, along single parameters, with those of the Gaussian fit.

    Parameters
    ----------
    passes : Passes
    fit : GaussianFit
    """
    surroundings = _Surroundings(passes, fit)
    sides = list(surroundings.skewed_sides(range(fit.mean.size)))
    on_the_way = [
        surroundings.at(side, share * FAR) for side in sides for share in (0.5, 0.75, 1.0)
    ]
    return GaussianityCheck(
        largest_step=_largest_step([place for place in on_the_way if place.fall < REACHED]),
        is_gaussian=not sides,
    )


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
    reached: list[_Place] = []
    edges = []
    if places:
        surroundings = _Surroundings(passes, fit)
        for side in surroundings.skewed_sides(places):
            on_the_way = list(_within_reach(surroundings, side))
            reached += on_the_way
            if on_the_way:
                last = on_the_way[-1]
                force = -side.sign * last.force
                edges.append(Edge(side.place, side.direction, last.at, force))
    return FarOut(_largest_step(reached), edges)


def _within_reach(surroundings: _Surroundings, side: _Side) -> Iterator[_Place]:
    """Yield places farther and farther out, as far as a chain comes once in a run."""
    for distance in np.arange(STRIDE, FARTHEST, STRIDE):
        place = surroundings.at(side, float(distance))
        if not place.fall < EVER_REACHED:
            return
        yield place


def _largest_step(places: Sequence[_Place]) -> float:
    """Return the largest learning rate that is stable in all of these places."""
    curvatures = [place.curvature for place in places if place.curvature > 0]
    return STEADY / max(curvatures) if curvatures else np.inf
