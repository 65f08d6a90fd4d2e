"""What a mode is, and when two of them are apart.

A maximum counts as a mode with the Gaussian that fits there. Two are separate if they are far apart
and the density between them is low on every way. Knows densities and SciPy, no rows and no set-ups.
"""

import math

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scipy.optimize import minimize

from pymc_sghmc.gradients.metric import Array, Dense, Metric
from pymc_sghmc.tuning.curvature import difference_step, hessian_by_differences
from pymc_sghmc.tuning.subset_density import Density
from pymc_sghmc.tuning.variational_fit import lower

__all__ = ["FAR", "Mode", "are_separate", "climb", "is_at", "mode_of"]

MOST_EVALUATIONS = 60  # of one climb
ARRIVED = 1.0  # posterior sds from a known mode at which a climb has led there
NEAR = 0.1  # posterior sds from a maximum at which it is known
ROUNDS = 3  # of curvature and climb
FLAT = 1e-4  # curvature in the units of the first mode, below which a point is no maximum
FAR = 4.0  # posterior sds of either mode between two
DIP = 3.0  # fall of the log-density on the way from the lower of two modes to the other


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


def climb(density: Density, x: Array, metric: Metric, known: Sequence[Mode] = ()) -> Array:
    """Climb by L-BFGS in the coordinates of a metric, as far as to a mode that is known."""

    def energy(phi: Array) -> tuple[float, Array]:
        logp, grad = density(x + metric.to_theta(phi))
        if not (math.isfinite(logp) and np.isfinite(grad).all()):
            return 1e100, np.zeros_like(phi)  # sends the line search back
        return -logp, -metric.pull_back(grad)

    def look_around(phi: Array) -> None:
        if is_at(x + metric.to_theta(phi), known):
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


def is_at(position: Array, known: Sequence[Mode]) -> bool:
    """Whether a position is next to a mode that is known."""
    return any(mode.distance(position) < ARRIVED for mode in known)


def _precision(log_density: float) -> dict[str, float]:
    """Return when L-BFGS is to stop, by nats that a step gains and by the slope per sd."""
    size = abs(log_density) if math.isfinite(log_density) else 1.0
    return {"gtol": NEAR / 2, "ftol": 1e-4 / max(1.0, size)}


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
        curvature = _curvature(density, position, metric)
        if not np.isfinite(curvature).all():
            return None
        values, vectors = np.linalg.eigh(curvature)
        if values.min() < FLAT:
            return None
        fitted = Dense(lower(metric.matrix() @ (vectors / np.sqrt(values))))
        if np.linalg.norm(fitted.pull_back(grad)) < NEAR:
            return Mode(position, logp, fitted)
        metric = fitted
        position = climb(density, position, metric)
    return None


def _curvature(density: Density, position: Array, metric: Metric) -> Array:
    """LᵀHL by differences of gradients, H the Hessian of −log p."""
    step = difference_step(density.dtype)
    with np.errstate(all="ignore"):
        hessian = hessian_by_differences(lambda x: density(x)[1], position, metric.matrix(), step)
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
