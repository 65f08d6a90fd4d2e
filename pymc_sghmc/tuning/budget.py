"""The choice of settings from a bias budget: formulas on a Gaussian, and what a chain measures.

In coordinates in which the posterior has unit scale a gradient with noise of covariance V heats the
chain by an amount that is known exactly on a Gaussian. So V is measured, and the learning rate is
the largest whose predicted bias stays within the budget. Knows no PyMC and no models.
"""

import math

from typing import NamedTuple

import numpy as np

from scipy.optimize import brentq

__all__ = [
    "ChainTuning",
    "critical_friction",
    "inflation",
    "largest_learning_rate",
    "relaxation",
    "score",
    "smallest_friction",
]

MAX_LEARNING_RATE = 0.25  # ε = ½ posterior sd: the curvature may grow 16-fold before BAOAB diverges
UNKNOWN_NOISE = 0.25  # share of the noise that a noise estimate may miss
MIN_FRICTION = 0.01  # the least that Chen et al. use


def inflation(integrator, eta, alpha, noise, curvature=1.0) -> float:
    """Relative bias of the variance of θ on a Gaussian, exact: (variance × curvature) − 1.

    Parameters
    ----------
    integrator : {"euler", "baoab", "sgld"}
        Eq. 15 and eq. 12 of Chen et al. (2014), or BAOAB.
    eta, alpha : float
        Learning rate and friction.
    noise : float
        V, variance of the gradient.
    curvature : float
        h, of −log p.
    """
    eta, h = float(eta), curvature
    if integrator == "sgld":
        return (1 + eta * noise / 2) / (1 - eta * h / 2) - 1
    if integrator == "euler":
        return (1 + eta * noise / (2 * alpha)) / (1 - eta * h / (4 - 2 * alpha)) - 1
    return eta * noise * (2 - alpha) / (alpha * (4 - eta * h))


def critical_friction(eta, curvature=1.0) -> float:
    """α = 1 − exp(−2√(ηh)): the friction at which curvature h relaxes fastest."""
    return max(-math.expm1(-2 * math.sqrt(eta * curvature)), MIN_FRICTION)


def largest_learning_rate(bias, budget, upper=MAX_LEARNING_RATE) -> float:
    """Largest η up to ``upper`` at which the increasing function ``bias(η)`` is within the budget."""
    if bias(upper) <= budget:
        return upper
    lower = upper
    while not bias(lower) <= budget:  # or not a number
        lower /= 16
        if lower < 1e-12:
            return lower

    def excess(log_eta):
        return min(bias(math.exp(log_eta)), 1e9) - budget

    return math.exp(brentq(excess, math.log(lower), math.log(min(16 * lower, upper))))


def smallest_friction(bias, budget, lower) -> float:
    """Smallest α from ``lower`` to 1 at which the decreasing ``bias(α)`` is within the budget, or 1."""
    if bias(lower) <= budget:
        return lower
    if bias(1.0) >= budget:
        return 1.0
    return brentq(lambda alpha: bias(alpha) - budget, lower, 1.0)


def relaxation(integrator, eta, alpha, curvature=1.0) -> float:
    """Relaxation per inner step of the mean at curvature h: 1 − the spectral radius."""
    h = curvature
    if integrator == "sgld":
        return 1 - abs(1 - eta * h)
    if integrator == "euler":
        step = np.array([[1, 1], [-eta * h, 1 - alpha - eta * h]])
    else:
        drift = np.array([[1, 0.5], [0, 1]])
        step = np.array([[1, 0], [-eta * h, 1]]) @ drift @ np.diag([1, 1 - alpha]) @ drift
    return 1 - float(np.abs(np.linalg.eigvals(step)).max())


class ChainTuning(NamedTuple):
    """What a chain has measured of its gradient, and the settings that follow from it.

    The noise is that of the gradient in use, in the coordinates of the preconditioner: an average
    with weights growing as t³ over the tuning draws, after what was measured around the centre.
    """

    control_variates: bool  # which gradient is in use
    noise: np.ndarray  # diagonal of V̂, (d,)
    temperatures: list  # of the tuning draws so far
    learning_rate: float | None = None
    friction: float | None = None
    bias: float = math.nan  # predicted, of the variances
    rate: float = math.nan  # predicted relaxation of the slowest mean per inner step
    limit: float = MAX_LEARNING_RATE  # of the learning rate times the stiffness
    n_measured: int = 10  # so many draws is the first measurement worth
    n_divergences: int = 0

    def with_noise(self, noise):
        """Take in V̂ of one more draw, unless it overflows on the way from the start."""
        if not np.isfinite(noise).all():
            return self
        n = self.n_measured + 1
        return self._replace(n_measured=n, noise=self.noise + (noise - self.noise) * 4 / (n + 3))

    def with_temperature(self, temperature, tolerance):
        """Take in one draw's; halve the limit of the learning rate where their mean is too hot.

        Judged after 32, 64, 128, … draws by the later half and its error from eight batches, so
        that the way from the start and chance don't count.
        """
        self.temperatures.append(temperature)
        n, limit = len(self.temperatures), self.limit
        if n >= 32 and n & (n - 1) == 0:
            batches = np.mean(np.reshape(self.temperatures[n // 2 :], (8, -1)), axis=1)
            error = batches.std(ddof=1) / math.sqrt(8)
            if batches.mean() - 1 > 2 * tolerance + 4 * error:
                limit /= 2
        return self._replace(limit=limit)


def score(tuning) -> float:
    """Relaxation per evaluated row: control variates evaluate each minibatch at two points."""
    return tuning.rate / (1 + tuning.control_variates)
