"""Gaussianity check: how far a posterior of few parameters is from its Gaussian fit, far out.

The logarithm of a scale that the data say little about has a long tail on one side, and falls off
steeply on the other. Knows passes over the data, no settings.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.gradients.metric import Array, Metric
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

__all__ = [
    "Edge",
    "FarOut",
    "GaussianityCheck",
    "check_gaussianity",
    "far_out",
    "stable_along_scales",
    "stable_for_effects",
]

FAR = 2.0  # sds
OFF = 0.5  # of the force that a Gaussian would have there, from which on it is none
FARTHER = 2.0  # times as far, and as much off
REACHED = 8.0  # fall of log p within which chains come by
EVER_REACHED = 16.0  # ..., and within which some chain comes by once in a run
FARTHEST = 8.0  # sds, by strides of ...
STRIDE = 0.5  # ... so many, and ...
FARTHEST_OF_FLAT = 40.0  # ... where log p hardly falls, by strides that grow
GROWTH = 1.25
CLOSE = 1 / 32  # the least stride towards a wall, of that
STEADY = 2.0  # over the curvature: the largest stable learning rate
MOST = 12  # parameters that are checked
N_SIGNED = 4  # pairs of places ±, in all parameters at once, at which some are suspected
WITHIN = 2.0  # times as far as a single one, from the mean to there
STEP = 1e-3  # sds, of differences
ROUNDED = 0.5  # of log p, by which rounding errors change it where it means nothing any more
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
    is_smooth: bool = True  # whether log p changes there as the force says, and not by rounding


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
        # whether a side that isn't skewed is so much as steeper than the fit, or flatter
        self.is_uneven = False
        self.top, self.slope = passes.log_density(fit.mean, self.rows)

    def skewed_sides(self, places: Sequence[int], looks_farther: bool) -> Iterator[_Side]:
        """Yield the sides of some parameters where the force far out isn't that of a Gaussian.

        At `FAR`, or there and `FARTHER`.
        """
        for place in places:
            unit = np.zeros(self.fit.mean.size)
            unit[place] = 1.0
            direction = self.fit.metric.pull_back(unit)
            direction /= max(np.linalg.norm(direction), 1e-300)
            for sign in (-1.0, 1.0):
                side = _Side(place, direction, sign)
                is_off = not abs(self._excess(side, FAR)) <= OFF
                if looks_farther and not is_off:
                    excess = abs(self._excess(side, FARTHER * FAR))
                    is_off = not excess <= FARTHER * OFF
                    self.is_uneven |= not excess <= OFF
                if is_off:
                    yield side

    def _excess(self, side: _Side, distance: float) -> float:
        """How much stronger the force is there than a Gaussian's, as a share; maybe NaN."""
        force = self._force(side, distance).along
        return force / (-side.sign * distance) - 1

    def suspects(self) -> list[int]:
        """Return places of parameters that seem skewed, the most skewed first, then of flat ones.

        By the force on both sides of the mean, with random signs for all of them: of a posterior
        that is alike on both sides its mean is none. One that is flat on both may end in a wall.
        """
        d = self.fit.mean.size
        share = FARTHER * min(1.0, WITHIN / np.sqrt(d))
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(N_SIGNED, d))
        scales = self.fit.metric.diagonal()
        shifts = [scales.to_theta(FAR * share * z) for z in np.concatenate([signs, -signs])]
        gradients = np.array(
            [self.passes.log_density(self.fit.mean + shift, self.rows)[1] for shift in shifts]
        )
        # it grows as the square of the distance
        even = scales.pull_back(gradients.mean(axis=0) - self.slope) / share**2
        skewed = [int(i) for i in np.argsort(-np.abs(even)) if not abs(even[i]) < OFF]
        # the mean force back, where a Gaussian's is the distance or, given all others, more
        pairs = gradients[:N_SIGNED] - gradients[N_SIGNED:]
        back = -signs * scales.pull_back(pairs) / 2
        share_of_gaussian = np.mean(back, axis=0) / (FAR * share)
        order = np.argsort(share_of_gaussian)
        flat = [int(i) for i in order if not share_of_gaussian[i] > OFF]
        return list(dict.fromkeys([*skewed, *flat]))

    def at(self, side: _Side, distance: float) -> _Place:
        """Look at a place so many standard deviations out on a side."""
        here = self._force(side, distance)
        there = self._force(side, distance + side.sign * STEP)
        # the step is along the direction on both sides
        expected = STEP * (here.along + there.along) / 2
        return _Place(
            at=side.sign * distance,
            fall=-here.logp,
            force=here.along,
            curvature=(here.along - there.along) / STEP,
            is_smooth=abs(there.logp - here.logp - expected) < ROUNDED,
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
    sides = list(surroundings.skewed_sides(_some(range(fit.mean.size)), looks_farther=False))
    on_the_way = [
        surroundings.at(side, share * FAR) for side in sides for share in (0.5, 0.75, 1.0)
    ]
    return GaussianityCheck(
        largest_step=_largest_step(place.curvature for place in on_the_way if place.fall < REACHED),
        is_gaussian=not sides,
    )


def _some(places: Sequence[int]) -> list[int]:
    """Return `MOST` of them at most, evenly."""
    if not places:
        return []
    numbers = np.unique(np.linspace(0, len(places) - 1, MOST).astype(int))
    return [int(places[number]) for number in numbers]


def far_out(
    passes: Any, fit: GaussianFit, places: Sequence[int], finds_more: bool = False
) -> FarOut:
    """Look at how far out along some parameters chains may come, and at what is stable there.

    In a run of some 10⁵ inner steps a chain comes now and then to where log p has fallen by
    `EVER_REACHED`. On the steep side of a skewed posterior the curvature is many times that at the
    mean, and one step that isn't stable there may send the chain to where nothing is a number.
    Where it is less skewed than that, steps aren't longer than usual.

    Parameters
    ----------
    passes : Passes
    fit : GaussianFit
    places : list of int
        Parameters whose posteriors may be skewed.
    finds_more : bool, default False
        Whether others are looked for, such as the coefficient of a class without a single event,
        and all of them farther out than `FARTHEST`. Not where a scale and its effects make a
        funnel: far enough in its neck no step is stable.
    """
    if not places and not finds_more:
        return FarOut(np.inf, [])
    surroundings = _Surroundings(passes, fit)
    places = _some(places)
    if finds_more:
        others = [place for place in surroundings.suspects() if place not in places]
        places = [*places, *others[:MOST]]
    farthest = FARTHEST_OF_FLAT if finds_more else FARTHEST
    reached: list[_Place] = []
    edges = []
    for side in surroundings.skewed_sides(places, looks_farther=True):
        on_the_way = list(_within_reach(surroundings, side, farthest, finds_more))
        reached += on_the_way
        if on_the_way:
            last = on_the_way[-1]
            force = -side.sign * last.force
            edges.append(Edge(side.place, side.direction, last.at, force))
    largest_step = _largest_step(place.curvature for place in reached)
    if finds_more and surroundings.is_uneven:
        largest_step = min(largest_step, MAX_LEARNING_RATE)
    return FarOut(largest_step, edges)


def _within_reach(
    surroundings: _Surroundings, side: _Side, farthest: float, looks_closely: bool
) -> Iterator[_Place]:
    """Yield places farther and farther out, as far as a chain comes once in a run.

    Not beyond one where log p is little more than rounding errors.

    The curvature of each is at least the mean one on the way from the place before: that of a wall
    may be in a small part of it, such as where a class of outcomes without exceptions ends.
    """
    stride = STRIDE
    before = _Place(at=0.0, fall=0.0, force=0.0, curvature=1.0)
    while abs(before.at) + stride < farthest:
        place = surroundings.at(side, abs(before.at) + stride)
        on_the_way = (before.force - place.force) / (place.at - before.at)
        place = place._replace(curvature=max(place.curvature, on_the_way))
        if place.fall < EVER_REACHED:
            if not place.is_smooth:
                return
            yield place
            before = place
            if abs(place.at) >= FARTHEST:
                stride = (GROWTH - 1) * abs(place.at)
        elif looks_closely and stride > CLOSE * STRIDE:  # a wall, somewhere on the way
            stride /= 2
        else:
            return


def stable_along_scales(
    passes: Any,
    fit: GaussianFit,
    places: Sequence[int],
    largest_curvature: Callable[[Array], float],
) -> float:
    """Return the largest learning rate that is stable, in all directions, where scales are far out.

    `far_out` asks for the curvature along the way alone. But where the scale of some effects is
    near zero, what they could explain is left to others: these directions may be many times as
    curved there as at the mean.

    Parameters
    ----------
    passes : Passes
    fit : GaussianFit
    places : list of int
        Parameters whose posteriors may be skewed.
    largest_curvature : callable
        At a position, in the coordinates in which chains move.
    """
    edges = far_out(passes, fit, places).edges
    shifts = [fit.metric.to_theta(edge.at * edge.direction) for edge in edges]
    curvatures = [largest_curvature(fit.mean + shift) for shift in shifts]
    return _largest_step([curvature for curvature in curvatures if np.isfinite(curvature)])


def stable_for_effects(
    gradient: Callable[[Array], Array], fit: GaussianFit, metric: Metric, columns: Sequence[Array]
) -> float:
    """Return the largest learning rate that is stable wherever chains come along single effects.

    The effect of a group with a single row of a gamma distribution, as an example, has a posterior
    that is steep on one side, where the force back grows like an exponential. See `far_out`, which
    goes along one parameter after the other; here all entries of a column move at once, each until
    log p has fallen as far by what its own force does.

    Parameters
    ----------
    gradient : callable
        Of log p, at a position.
    fit : GaussianFit
    metric : Metric
        In which chains move.
    columns : list of array
        Places of effects, no two of which the same row sees.
    """
    scales = fit.metric.diagonal().scales
    relative = np.square(metric.diagonal().scales / scales)
    slope = gradient(fit.mean)
    steepest = 0.0
    for column in columns:
        walk = _EffectWalk(gradient, fit.mean, scales, slope, column)
        for sign in (-1.0, 1.0):
            if walk.is_skewed(sign):
                beyond = walk.largest_beyond(sign)  # the curvature at the mean
                steepest = max(steepest, float((1 + relative[column] * beyond).max()))
    return STEADY / steepest if steepest else np.inf


class _EffectWalk:
    """Forces along the entries of one column, all moved to the same side, in their own scales."""

    def __init__(
        self,
        gradient: Callable[[Array], Array],
        mean: Array,
        scales: Array,
        slope: Array,
        column: Array,
    ) -> None:
        self.gradient = gradient
        self.mean = mean
        self.column = column
        self.scales = scales[column]
        self.shift = np.zeros_like(mean)
        self.shift[column] = self.scales
        self.slope = slope[column]
        self.curvature = self._force(1.0, STEP) / STEP

    def _force(self, sign: float, distance: float) -> Array:
        """Back to the mean, where it is none."""
        slope = self.gradient(self.mean + sign * distance * self.shift)[self.column]
        return sign * self.scales * (self.slope - slope)

    def is_skewed(self, sign: float) -> bool:
        """Whether some force far out isn't what the curvature at the mean promises."""
        as_gaussian = FAR * np.maximum(self.curvature, np.finfo(float).tiny)
        return not bool((np.abs(self._force(sign, FAR) / as_gaussian - 1) <= OFF).all())

    def largest_beyond(self, sign: float) -> Array:
        """Return the largest curvature where chains come once in a run, beyond that at the mean."""
        before = fall = largest = np.zeros(self.column.size)
        for distance in np.arange(STRIDE, FARTHEST, STRIDE):
            force = self._force(sign, float(distance))
            fall = fall + STRIDE * (before + force) / 2
            curvature = np.where(fall < EVER_REACHED, (force - before) / STRIDE, 0.0)
            largest = np.fmax(largest, curvature - self.curvature)
            if not (fall < EVER_REACHED).any():
                break
            before = force
        return largest


def _largest_step(curvatures: Iterable[float]) -> float:
    """Return the largest learning rate that is stable with all of these curvatures."""
    steepest = max((curvature for curvature in curvatures if curvature > 0), default=0.0)
    return STEADY / steepest if steepest else np.inf
