"""A search for other modes of the posterior than the one that the first set-up found.

Chains that all start from one mode agree with each other whatever lies elsewhere, so that R-hat
can't show that a posterior has several. A few climbs on a subset of the rows, from points that are
spread as the prior is, find them where that is cheap. Two maxima count as two modes if they are far
apart, if the density between them is low on every way, and if neither holds next to nothing of the
posterior. Knows passes over the data and SciPy, no samplers and no settings.
"""

import logging
import math
import time

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from scipy.optimize import minimize

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.metric import Array, Dense, Diagonal, Metric
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.passes import Passes
from pymc_sghmc.phases import begin_phase, count_passes
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.setups import Setups
from pymc_sghmc.tuning.variational_fit import lower

__all__ = [
    "MOST_MODES",
    "Mode",
    "Search",
    "SubsetDensity",
    "are_separate",
    "mode_of",
    "number_of_chain",
    "search",
    "starts_in_modes",
]

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
MOST_EVALUATIONS = 60  # of one climb
MOST_HALVINGS = 8  # of the way to a start where the density is infinite
WIDEST = 5.0  # prior standard deviations are taken for that at most
ARRIVED = 1.0  # posterior sds from a known mode at which a climb has led there
NEAR = 0.1  # posterior sds from a maximum at which it is known
ROUNDS = 3  # of curvature and climb
FLAT = 1e-4  # curvature in the units of the first mode, below which a point is no maximum
FAR = 4.0  # posterior sds of either mode between two
DIP = 3.0  # fall of the log-density on the way from the lower of two modes to the other
COMPARABLE = 10.0  # difference of the logarithms of the probabilities that two modes hold
N_SHARES = 10  # of the subset that show how much rows differ
SIGMAS = 4.0  # of what a subset says of all rows


@dataclass(frozen=True)
class Mode:
    """A maximum of the density, and the Gaussian that fits there."""

    position: Array  # (d,)
    log_density: float
    metric: Dense  # L with LLᵀ the inverse of the curvature

    @property
    def log_mass(self) -> float:
        """Logarithm of the probability around it by Laplace's method, up to a constant."""
        return self.log_density + float(np.linalg.slogdet(self.metric.factor)[1])

    def distance(self, position: Array) -> float:
        """How far a position is from it, in standard deviations of its Gaussian."""
        shift = position - self.position
        return float(np.linalg.norm(self.metric.from_theta(shift)))


@dataclass(frozen=True)
class Search:
    """What a search has found, and what it cost."""

    modes: tuple[Mode, ...]  # on the subset: the first set-up's, and others; or none at all
    n_starts: int
    n_evaluations: int
    passes: float


class Density(Protocol):
    """Log-density and gradient at a position."""

    dtype: Any

    def __call__(self, position: Array) -> tuple[float, Array]:
        """Log-density and gradient."""


class SubsetDensity:
    """Log-density and gradient on a fixed subset of the rows, weighted to stand for all.

    One call of the function that minibatches are evaluated by, so that nothing new is compiled. The
    last evaluation is remembered, as climbs begin where one was made.

    Parameters
    ----------
    passes : Passes
    n_rows : int
        Of each group of rows, at most.
    """

    def __init__(self, passes: Passes, n_rows: int):
        data = passes.data
        self.density = passes.density
        self.dtype = passes.density.dtype
        rng = np.random.default_rng(0)
        self.rows = tuple(
            np.arange(n) if n <= n_rows else np.sort(rng.choice(n, size=n_rows, replace=False))
            for n in data.n_at_hand
        )
        self._data = data
        self._one = np.ones((), dtype=self.density.weights_dtype)
        self._zero = np.zeros_like(self._one)
        self.is_whole = all(n == rows.size for n, rows in zip(data.n_rows, self.rows, strict=True))
        n_all = sum(data.n_rows)
        self.share = sum(rows.size for rows in self.rows) / n_all if n_all else 1.0
        self.n_evaluations = 0
        self._last: tuple[Array, tuple[float, Array]] | None = None

    @property
    def passes(self) -> float:
        """Passes over all rows that the evaluations so far amount to."""
        return self.n_evaluations * self.share

    def __call__(self, position: Array) -> tuple[float, Array]:
        """Log-density and gradient."""
        if self._last is None or not np.array_equal(position, self._last[0]):
            self.n_evaluations += 1
            weights = self._data.uniform_weights(self.rows)
            self._last = position.copy(), self._at(position, self._one, weights)
        return self._last[1]

    def prior(self, position: Array) -> Array:
        """Gradient of all but the likelihoods of rows."""
        weights = [np.zeros(rows.size, dtype=self._one.dtype) for rows in self.rows]
        return self._at(position, self._one, weights)[1]

    def error_of_difference(self, position: Array, other: Array) -> float:
        """Return the standard error of a difference of log-densities that a subset gives."""
        if self.is_whole:
            return 0.0
        variance = 0.0
        weights = self._data.uniform_weights(self.rows)
        for k, n_rows in enumerate(self._data.n_rows):
            if self.rows[k].size == n_rows:
                continue
            shares = []
            for part in np.array_split(np.arange(self.rows[k].size), N_SHARES):
                alone = [np.zeros_like(of_group) for of_group in weights]
                alone[k][part] = N_SHARES * weights[k][part]
                there = self._at(position, self._zero, alone)[0]
                shares.append(there - self._at(other, self._zero, alone)[0])
            variance += np.var(shares, ddof=1) / N_SHARES
        self.n_evaluations += 2 * N_SHARES
        return float(np.sqrt(np.nan_to_num(variance, nan=np.inf, posinf=np.inf)))

    def _at(
        self, position: Array, prior_weight: Array, weights: Sequence[Array]
    ) -> tuple[float, Array]:
        minibatch = self._data.part(None, None)._replace(rows=self.rows)
        with np.errstate(all="ignore"):
            logp, grad = self.density(
                position.astype(self.dtype), prior_weight, weights, *minibatch
            )
        return float(logp), np.asarray(grad, dtype=float)


def starts_in_modes(setups: Setups, gradient: MinibatchGradient, start: Array) -> list[Array]:
    """Look for modes beside that of the set-up in use; return a start in each.

    Each has a set-up then, as control variates and coordinates serve around one mode alone. A mode
    that is much less probable than another is left out, also if it is that of the set-up in use.

    Parameters
    ----------
    setups : Setups
        With the set-up from ``start`` in use.
    gradient : MinibatchGradient
    start : array of shape (d,)
        The initial point.
    """
    first = setups.make(start)
    reason = _reason_not_to_search(gradient.passes, first.fit)
    if reason is not None:
        _log.debug(f"Other modes were not searched for: {reason}.")
        return [start]
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
    return _confirmed(setups, gradient.passes, [start, *others]) if others else [start]


def _confirmed(setups: Setups, passes: Passes, starts: list[Array]) -> list[Array]:
    """Return those of the starts whose set-ups lie in modes apart, by many rows or all."""
    density = SubsetDensity(passes, MOST_ROWS)
    modes: list[Mode] = []
    kept: list[tuple[Array, float]] = []
    for start in starts:
        try:
            fit = setups.make_another(start).fit
        except NonFinite:
            continue
        metric = Dense(lower(fit.metric.matrix()))
        mode = Mode(fit.mean, density(fit.mean)[0], metric)
        if fit.is_mode and all(are_separate(density, other, mode) for other in modes):
            modes.append(mode)
            of_all = Mode(fit.mean, passes.log_density(fit.mean)[0], metric)
            kept.append((start, of_all.log_mass))
    best = max(log_mass for _, log_mass in kept)
    return [start for start, log_mass in kept if log_mass > best - COMPARABLE]


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
    home = _climb(density, fit.mean, metric)
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
            begin = _climb(density, begin, coordinates, known)
            if _is_at(begin, known):
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
    step = 1e-3 if density.dtype == np.float64 else 3e-2
    curvature = signs * (density.prior(start) - density.prior(start + step * signs)) / step
    return 1 / np.sqrt(np.maximum(np.abs(np.nan_to_num(curvature)), WIDEST**-2))


def _climb(density: Density, x: Array, metric: Metric, known: Sequence[Mode] = ()) -> Array:
    """Climb by L-BFGS in the coordinates of a metric, as far as to a mode that is known."""

    def energy(phi: Array) -> tuple[float, Array]:
        logp, grad = density(x + metric.to_theta(phi))
        if not (math.isfinite(logp) and np.isfinite(grad).all()):
            return 1e100, np.zeros_like(phi)  # sends the line search back
        return -logp, -metric.pull_back(grad)

    def look_around(phi: Array) -> None:
        if _is_at(x + metric.to_theta(phi), known):
            raise StopIteration

    found = minimize(
        energy,
        np.zeros_like(x),
        jac=True,
        method="L-BFGS-B",
        callback=look_around,
        options=_precision(density(x)[0]) | {"maxfun": MOST_EVALUATIONS},
    )
    return x + metric.to_theta(found.x)


def _is_at(position: Array, known: Sequence[Mode]) -> bool:
    """Whether a position is next to a mode that is known."""
    return any(mode.distance(position) < ARRIVED for mode in known)


def _precision(log_density: float) -> dict[str, float]:
    """Return when L-BFGS is to stop, by nats that a step gains and by the slope per sd."""
    size = abs(log_density) if math.isfinite(log_density) else 1.0
    return {"gtol": NEAR / 2, "ftol": 1e-4 / max(1.0, size)}


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


def mode_of(density: Density, position: Array, metric: Metric) -> Mode | None:
    """Return the maximum next to a point; None where there is none.

    The slope is zero there, and the curvature positive in all directions, which isn't so on a ridge
    or on the way into a funnel.

    Parameters
    ----------
    density : Density
    position : array of shape (d,)
    metric : Metric
        In whose coordinates differences are taken; as wide as the posterior, about.
    """
    for _ in range(ROUNDS):
        logp, grad = density(position)
        curvature = _curvature(density, position, metric, grad)
        if not np.isfinite(curvature).all():
            return None
        values, vectors = np.linalg.eigh(curvature)
        if values.min() < FLAT:
            return None
        fitted = Dense(lower(metric.matrix() @ (vectors / np.sqrt(values))))
        if np.linalg.norm(fitted.pull_back(grad)) < NEAR:
            return Mode(position, logp, fitted)
        metric = fitted
        position = _climb(density, position, metric)
    return None


def _curvature(density: Density, position: Array, metric: Metric, grad: Array) -> Array:
    """LᵀHL by differences of gradients, H the Hessian of −log p."""
    step = 1e-3 if density.dtype == np.float64 else 3e-2
    factor = metric.matrix()
    columns = [grad - density(position + step * u)[1] for u in factor.T]
    with np.errstate(all="ignore"):
        hessian = factor.T @ np.column_stack(columns) / step
    return (hessian + hessian.T) / 2


def are_separate(density: Density, mode: Mode, other: Mode) -> bool:
    """Whether two maxima are far apart, with low density on every way from one to the other.

    Every way crosses the plane that halves what lies between, so that the largest density on it is
    as much as any of them can have. On a curved ridge the straight line between two points has low
    density in its middle, and the plane has not.
    """
    if min(mode.distance(other.position), other.distance(mode.position)) < FAR:
        return False
    lower_end = min(mode.log_density, other.log_density)
    between = other.position - mode.position
    profile = [(density(mode.position + t * between)[0], t) for t in np.linspace(0.1, 0.9, 9)]
    lowest, t = min((value if math.isfinite(value) else -math.inf, t) for value, t in profile)
    if lower_end - lowest < DIP:
        return False
    return lower_end - _largest_on_plane(density, mode, between, t) >= DIP


def _largest_on_plane(density: Density, mode: Mode, between: Array, t: float) -> float:
    """Largest log-density on the plane across the line at one of its points."""
    metric = mode.metric
    normal = metric.from_theta(between)
    normal = normal / np.linalg.norm(normal)
    middle = mode.position + t * between

    def energy(phi: Array) -> tuple[float, Array]:
        across = phi - normal * (normal @ phi)
        logp, grad = density(middle + metric.to_theta(across))
        if not (math.isfinite(logp) and np.isfinite(grad).all()):
            return 1e100, np.zeros_like(phi)
        slope = -metric.pull_back(grad)
        return -logp, slope - normal * (normal @ slope)

    options = _precision(mode.log_density) | {"maxfun": MOST_EVALUATIONS}
    start = np.zeros_like(mode.position)
    return -minimize(energy, start, jac=True, method="L-BFGS-B", options=options).fun
