"""The laws of the package's integrators on a Gaussian as formulas, and the choice of settings by them.

An oracle for what `tuning.linear_step` computes from the rules; `docs/check_formulas.py` and
``tests/test_tuning.py`` hold the formulas to the discrete Lyapunov equation.
"""

import numpy as np

from pymc_sghmc.tuning.budget import (
    LITTLE,
    WIDER,
    critical_friction,
    largest_learning_rate,
    lowered_friction,
    smallest_friction,
)
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE

INTEGRATORS = ("euler", "baoab", "sgld")


def inflation(integrator, eta, alpha, noise, curvature=1.0):
    """Variance of θ times curvature − 1, where a step is stable, for gradient noise of variance V."""
    eta, h = float(eta), curvature
    if integrator == "sgld":
        return (1 + eta * noise / 2) / (1 - eta * h / 2) - 1
    if integrator == "euler":
        return (1 + eta * noise / (2 * alpha)) / (1 - eta * h / (4 - 2 * alpha)) - 1
    return eta * noise * (2 - alpha) / (alpha * (4 - eta * h))


def relaxation(integrator, eta, alpha, curvature=1.0):
    """One minus the spectral radius of a step."""
    h = curvature
    if integrator == "sgld":
        return 1 - abs(1 - eta * h)
    if integrator == "euler":
        step = np.array([[1, 1], [-eta * h, 1 - alpha - eta * h]])
    else:
        drift = np.array([[1, 0.5], [0, 1]])
        step = np.array([[1, 0], [-eta * h, 1]]) @ drift @ np.diag([1, 1 - alpha]) @ drift
    return 1 - float(np.abs(np.linalg.eigvals(step)).max())


def choose(
    integrator,
    limit,
    *,
    noise,
    stiffness,
    slowness,
    budget,
    learning_rate,
    friction,
    least_friction,
):
    """η, α, bias and relaxation that the budget leads to."""
    eta, alpha = learning_rate, friction

    def bias(eta, alpha):
        return inflation(integrator, eta, alpha, noise, stiffness)

    def least(eta):
        return friction or max(critical_friction(eta, slowness), least_friction)

    if eta is None:
        eta = largest_learning_rate(lambda eta: bias(eta, least(eta)), budget, limit / stiffness)
    wide = stiffness / WIDER if limit <= MAX_LEARNING_RATE else stiffness
    slowest = min(slowness, wide)
    if integrator != "sgld" and friction is None:
        usual = smallest_friction(lambda alpha: bias(eta, alpha), budget, least(eta))
        lower = max(critical_friction(eta, slowest), least_friction)
        alpha = lowered_friction(lambda alpha: bias(eta, alpha), LITTLE * budget, lower, usual)
    return eta, alpha, bias(eta, alpha), relaxation(integrator, eta, alpha, slowest)
