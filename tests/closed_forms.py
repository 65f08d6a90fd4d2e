"""The laws of the package's integrators on a Gaussian as formulas.

An oracle for what `tuning.linear_step` computes from the rules; `docs/check_formulas.py` and
``tests/tuning/test_tuning.py`` hold the formulas to the discrete Lyapunov equation.
"""

import numpy as np

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


def critical_friction(eta, curvature):
    """The least friction at which no step leads to and fro, as by Chen et al. not below 0.01."""
    return max(1 - np.exp(-2 * np.sqrt(eta * curvature)), 0.01)
