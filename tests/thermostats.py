"""The thermostat of Ding et al. (2014) in the order of their paper, to compare with."""

from typing import NamedTuple

import numpy as np

from pymc_sghmc.tuning.linear_step import Rule


class ThermostatState(NamedTuple):
    position: np.ndarray
    momentum: np.ndarray
    thermostat: np.ndarray


def thermostat_in_eq_15s_order(state, gradient, learning_rate, rng, *, friction, temperature=1.0):
    """Ding et al. (2014), Algorithm 2, with the drift first, as in eq. 15 of Chen et al."""
    theta, v, xi = state
    theta = theta + v
    _, grad = gradient(theta, gradient.draw_minibatch(rng))
    noise = rng.standard_normal(v.shape, dtype=v.dtype)
    v = (
        v
        + learning_rate * grad
        - xi * v
        + (2 * friction * learning_rate * temperature) ** 0.5 * noise
    )
    xi = xi + (v @ v / v.size - learning_rate * temperature)
    return ThermostatState(theta, v, xi), {}


EULER_THERMOSTAT = Rule(thermostat_in_eq_15s_order, ThermostatState)
