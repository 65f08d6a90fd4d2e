"""A search for other modes of the posterior than the one that the first set-up found.

Chains that all start from one mode agree with each other whatever lies elsewhere, so that R-hat
can't show that a posterior has several. A few climbs on a subset of the rows, from points that are
spread as the prior is, find them where that is cheap. Two that are separate count if neither holds
next to nothing of the posterior, and chains start in those that hold a good part of it. Knows
passes over the data and set-ups, no samplers and no settings.
"""

import logging
import math
import time

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.metric import Array, Dense, Diagonal, Metric
from pymc_sghmc.gradients.passes import Passes
from pymc_sghmc.phases import begin_phase, count_passes
from pymc_sghmc.tuning.curvature import difference_step
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.gradient_noise import TunedGradient
from pymc_sghmc.tuning.separate_modes import FAR, Mode, are_separate, climb, is_at, mode_of
from pymc_sghmc.tuning.setups import Setups
from pymc_sghmc.tuning.subset_density import SubsetDensity
from pymc_sghmc.tuning.variational_fit import lower

__all__ = ["MOST_MODES", "FoundModes", "Search", "number_of_chain", "search", "starts_in_modes"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

MOST_MODES = 4  # each costs a set-up
MOST_PARAMETERS = 200  # the curvature at each candidate costs as many evaluations
N_PAIRS = 4  # of starts, on opposite sides of the initial point
FEWEST_ROWS = 500  # of the subset that is climbed on, or all; ...
SHARE_OF_ROWS = 0.05
ROWS_PER_PARAMETER = 10
MOST_ROWS = 10_000  # on which the outcome is checked
SHARE_OF_SETUP = 0.2  # of its passes, after which no climb begins; ...
FEWEST_STARTS = 4  # ... of a few rows a set-up's passes cost nothing
MOST_HALVINGS = 8  # of the way to a start where the density is infinite
WIDEST = 5.0  # prior standard deviations are taken for that at most
COMPARABLE = 10.0  # difference of the logarithms of the probabilities that two modes hold, ...
NEGLIGIBLE = math.log(1000)  # ... by all rows: it isn't told of then, ...
MINOR = math.log(20)  # ... or no chain starts there, which would be far more than its share
SIGMAS = 4.0  # of what a subset says of all rows


@dataclass(frozen=True)
class Search:
    """What a search has found, and what it cost."""

    modes: tuple[Mode, ...]  # on the subset: the first set-up's, and others; or none at all
    n_starts: int
    n_evaluations: int
    passes: float


@dataclass(frozen=True)
class FoundModes:
    """The modes of a posterior that are worth a word."""

    starts: list[Array]  # a position in each that chains start in
    shares: tuple[float, ...] = (1.0,)  # of the probability, by a Gaussian fit to each
    apart: int = 0  # the parameter in which they are farthest apart, by these Gaussians


def starts_in_modes(setups: Setups, gradient: TunedGradient, start: Array) -> FoundModes:
    """Look for modes beside that of the set-up in use.

    Each has a set-up then, as control variates and coordinates serve around one mode alone. In one
    that holds a small part of the posterior no chain starts, also if it is that of the set-up in
    use.

    Parameters
    ----------
    setups : Setups
        With the set-up from ``start`` in use.
    gradient : TunedGradient
    start : array of shape (d,)
        The initial point.
    """
    first = setups.make(start)
    reason = _reason_not_to_search(gradient.passes, first.fit)
    if reason is not None:
        _log.debug(f"Other modes were not searched for: {reason}.")
        return FoundModes([start])
    begin_phase("searching for other modes")
    began = time.perf_counter()
    found = search(gradient.passes, first.fit, start, first.passes)
    _log.debug(
        f"Searched for other modes from {found.n_starts} points: {found.n_evaluations} "
        f"evaluations on a subset, {found.passes:.1f} passes over the data, "
        f"{time.perf_counter() - began:.2f} s; {max(0, len(found.modes) - 1)} candidates."
    )
    count_passes(found.passes)
    others = [mode.position.astype(gradient.density.dtype) for mode in found.modes[1:]]
    if not others:
        return FoundModes([start])
    return _confirmed(setups, gradient.passes, [start, *others])


def _confirmed(setups: Setups, passes: Passes, starts: list[Array]) -> FoundModes:
    """Return the modes that lie apart by their set-ups, by many rows or all."""
    density = SubsetDensity(passes, MOST_ROWS)
    modes: list[Mode] = []
    found: list[tuple[Array, Mode]] = []  # the mode by all rows
    for start in starts:
        try:
            fit = setups.make_another(start).fit
        except NonFinite:
            continue
        metric = Dense(lower(fit.metric.matrix()))
        mode = Mode(fit.mean, density(fit.mean)[0], metric)
        if fit.is_mode and all(are_separate(density, other, mode) for other in modes):
            modes.append(mode)
            found.append((start, Mode(fit.mean, passes.log_density(fit.mean)[0], metric)))
    best = max((mode for _, mode in found), key=lambda mode: mode.log_mass)
    told = [(start, mode) for start, mode in found if mode.log_mass > best.log_mass - NEGLIGIBLE]
    masses = np.exp([mode.log_mass - best.log_mass for _, mode in told])
    return FoundModes(
        starts=[start for start, mode in told if mode.log_mass > best.log_mass - MINOR],
        shares=tuple(masses / masses.sum()),
        apart=_farthest_apart(best, [mode for _, mode in told]),
    )


def _farthest_apart(mode: Mode, others: list[Mode]) -> int:
    """Return the parameter in which a mode is farthest from any other, in standard deviations."""
    sds = np.linalg.norm(mode.metric.factor, axis=1)
    return int(np.max([abs(m.position - mode.position) / sds for m in others], axis=0).argmax())


def number_of_chain(rng: np.random.Generator) -> int:
    """Return a number that grows by one from each chain of a run to the next.

    PyMC spawns the generators of a run's chains from that of the run, and a generator knows as how
    many-th child of its parent it was spawned, in workers, too. Where steps share a chain, each has
    a child of the chain's: the sum over generations still grows by one. The seed comes on top, so
    that runs of one chain each differ, too.
    """
    seeds = getattr(rng.bit_generator, "seed_seq", None)
    entropy = np.ravel(np.asarray(getattr(seeds, "entropy", None) or 0, dtype=object))
    return sum(map(int, entropy)) + sum(getattr(seeds, "spawn_key", ()))


def _reason_not_to_search(passes: Passes, fit: GaussianFit) -> str | None:
    """Say why other modes aren't looked for, if they aren't."""
    density = passes.density
    if not fit.is_mode:
        return "no mode was found to begin with"
    if density.d > MOST_PARAMETERS:
        return f"there are more than {MOST_PARAMETERS} parameters"
    if density.rewrites:
        return "effects of groups are centred or integrated out"
    if density.given_types:
        return "other steps sample a part of the model"
    return None


def search(passes: Passes, fit: GaussianFit, start: Array, setup_passes: float) -> Search:
    """Look for other modes than that of a fit, on a subset of the rows.

    Parameters
    ----------
    passes : Passes
    fit : GaussianFit
        Of the first set-up.
    start : array of shape (d,)
        The initial point, around which climbs begin.
    setup_passes : float
        What the first set-up took.
    """
    n_rows = max(FEWEST_ROWS, ROWS_PER_PARAMETER * start.size)
    n_rows = max(n_rows, int(SHARE_OF_ROWS * max(min(passes.data.n_rows, default=0), 0)))
    density = SubsetDensity(passes, min(n_rows, MOST_ROWS))
    allowed = SHARE_OF_SETUP * setup_passes
    metric = Dense(lower(fit.metric.matrix()))
    home = climb(density, fit.mean, metric)
    scales = _prior_scales(density, start)
    ends: list[Array] = []
    n_starts = 0
    for point in _starts(scales, start):
        if n_starts >= FEWEST_STARTS and density.passes >= allowed:
            break
        begin = _finite(density, point, start)
        if begin is None:
            continue
        n_starts += 1
        known = [Mode(end, 0.0, metric) for end in (home, *ends)]
        # far out the scales of the posterior say nothing, and near a mode those of the prior
        for coordinates in (Diagonal(scales), metric):
            begin = climb(density, begin, coordinates, known)
            if is_at(begin, known):
                break
        else:
            ends.append(begin)
    modes = _distinct(density, home, ends, metric) if ends else ()
    return Search(modes, n_starts, density.n_evaluations, density.passes)


def _starts(scales: Array, start: Array) -> Iterator[Array]:
    """Yield points around the initial one, in pairs on opposite sides.

    Pairs, since where the density is symmetric about the initial point, as in a sign or in the
    labels of components that begin alike, one of two climbs goes to either mode. Half of them are
    as far out as the prior is wide.
    """
    rng = np.random.default_rng(0)
    for i in range(N_PAIRS):
        width = scales if i % 2 else np.minimum(scales, 1.0)
        shift = width * rng.uniform(-1.0, 1.0, start.size)
        yield start + shift
        yield start - shift


def _finite(density: SubsetDensity, x: Array, start: Array) -> Array | None:
    """Return a point on the way from ``x`` to the initial point where the gradient is finite."""
    for _ in range(MOST_HALVINGS):
        if np.isfinite(density(x)[1]).all():
            return x
        x = start + (x - start) / 2
    return None


def _prior_scales(density: SubsetDensity, start: Array) -> Array:
    """1/√|curvature| of the prior in each parameter at the start, (d,), by random signs."""
    if not density.rows:
        return np.ones(start.size)  # the likelihood is a part of what isn't cut into rows
    signs = np.random.default_rng(1).choice([-1.0, 1.0], size=start.size)
    step = difference_step(density.dtype)
    curvature = signs * (density.prior(start) - density.prior(start + step * signs)) / step
    return 1 / np.sqrt(np.maximum(np.abs(np.nan_to_num(curvature)), WIDEST**-2))


def _distinct(
    density: SubsetDensity, home: Array, ends: list[Array], metric: Metric
) -> tuple[Mode, ...]:
    """Return the modes that climbs have led to, the first of them where the set-up was.

    Empty unless there are several: those that are worth a set-up of their own.
    """
    first = mode_of(density, home, metric)
    if first is None:
        return ()
    modes = [first]
    for end in ends:
        if min(mode.distance(end) for mode in modes) < FAR:
            continue
        candidate = mode_of(density, end, metric)
        if candidate is None or not all(are_separate(density, mode, candidate) for mode in modes):
            continue
        error = density.error_of_difference(candidate.position, first.position)
        if first.log_mass - candidate.log_mass < COMPARABLE + SIGMAS * error:
            modes.append(candidate)
    best = sorted(modes[1:], key=lambda mode: -mode.log_mass)
    return (first, *best[: MOST_MODES - 1]) if best else ()
