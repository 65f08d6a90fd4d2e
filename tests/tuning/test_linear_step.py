"""Laws read off ``update``: against formulas, against matrices, for rules that nobody foresaw."""

import itertools
import math

from typing import NamedTuple

import closed_forms
import numpy as np
import pytest

from stationary import stationary_covariance
from thermostats import EULER_THERMOSTAT

from pymc_sghmc.samplers import baoab, sghmc, sgld
from pymc_sghmc.tuning.budget import choose
from pymc_sghmc.tuning.chain_tuning import ChainTuning
from pymc_sghmc.tuning.curvature import Curvature
from pymc_sghmc.tuning.linear_step import (
    Rule,
    contraction_rate,
    linear_step,
    resting_thermostats,
    variance_bias,
)

RULES = {
    "euler": Rule(sghmc.update, sghmc.SGHMCState),
    "baoab": Rule(baoab.update, sghmc.SGHMCState),
    "sgld": Rule(sgld.update, sgld.SGLDState),
}
GRID = list(
    itertools.product(
        RULES,
        [1e-4, 0.03, 0.25, 0.6],
        [0.01, 0.2, 0.7, 1.0],
        [0.0, 0.3, 40.0],
        [0.1, 1.0, 2.5],
    )
)


def settings_of(name, alpha):
    return {} if name == "sgld" else {"friction": alpha}


def test_variances_and_relaxations_are_those_of_the_formulas():
    for name, eta, alpha, V, h in GRID:
        settings = settings_of(name, alpha)
        exact = closed_forms.inflation(name, eta, alpha, V, h)
        found = variance_bias(RULES[name], eta, h, V, **settings)
        assert 1 + found == pytest.approx(1 + exact, rel=1e-10), (name, eta, alpha, V, h)
        rate = contraction_rate(RULES[name], eta, h, **settings)
        assert rate == pytest.approx(closed_forms.relaxation(name, eta, alpha, h), abs=1e-14)


@pytest.mark.parametrize(
    ("name", "limit"), [("sgld", 2.0), ("euler", 4 - 2 * 0.3), ("baoab", 4.0)], ids=str
)
def test_beyond_the_limit_of_stability_the_bias_is_infinite(name, limit):
    # The formulas turn negative there.
    h, settings = 1.7, settings_of(name, 0.3)
    stable, unstable = (
        variance_bias(RULES[name], f * limit / h, h, 1.0, **settings) for f in (0.999, 1.001)
    )
    assert 0 < stable < math.inf
    assert unstable == math.inf
    assert contraction_rate(RULES[name], 1.001 * limit / h, h, **settings) < 0
    assert linear_step(RULES[name], 1.001 * limit / h, h, 1.0, **settings).covariance is None


def later_kick(state, gradient, learning_rate, rng, *, friction, temperature=1.0):
    """The exact Ornstein-Uhlenbeck step, a kick by the gradient at the old θ, a drift."""
    theta, v = state
    _, grad = gradient(theta, gradient.draw_minibatch(rng))
    noise = rng.standard_normal(v.shape, dtype=v.dtype)
    injected = friction * (2 - friction) * learning_rate * temperature
    v = (1 - friction) * v + injected**0.5 * noise + learning_rate * grad
    return sghmc.SGHMCState(theta + v, v), {}


@pytest.mark.parametrize("eta", [0.01, 0.3, 1.9])
@pytest.mark.parametrize("alpha", [0.05, 0.6, 1.0])
@pytest.mark.parametrize("V", [0.0, 2.0])
def test_an_integrator_that_nobody_foresaw_has_its_own_law(eta, alpha, V):
    h = 0.8
    friction = np.diag([1, 1 - alpha])
    kick, drift = np.array([[1, 0], [-eta * h, 1]]), np.array([[1, 1], [0, 1]])
    A = drift @ kick @ friction
    b = drift @ np.array([0, 1])  # what moves v before the drift
    noise = (alpha * (2 - alpha) * eta + eta**2 * V) * np.outer(b, b)
    exact = stationary_covariance(A, noise)
    found = linear_step(Rule(later_kick, sghmc.SGHMCState), eta, h, V, friction=alpha)
    np.testing.assert_allclose(found.A, A, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.B @ found.B.T, noise, rtol=1e-12)
    np.testing.assert_allclose(found.covariance, exact, rtol=1e-9)
    for other in ("euler", "baoab"):
        assert (
            abs(
                found.covariance[0, 0]
                / linear_step(RULES[other], eta, h, V, friction=alpha).covariance[0, 0]
                - 1
            )
            > 1e-4
        )


def saturated(state, gradient, learning_rate, rng, *, friction):
    """Eq. 15 with a drift of limited speed."""
    theta, v = state
    new, stats = sghmc.update(state, gradient, learning_rate, rng, friction=friction)
    return new._replace(position=theta + np.tanh(v)), stats


def shifted(state, gradient, learning_rate, rng):
    """SGLD with a wind."""
    new, stats = sgld.update(state, gradient, learning_rate, rng)
    return new._replace(position=new.position + 0.01), stats


def test_a_rule_that_is_not_linear_is_refused():
    with pytest.raises(ValueError, match=r"test_linear_step\.saturated isn't linear .* by hand"):
        variance_bias(Rule(saturated, sghmc.SGHMCState), 0.1, 1.0, 0.0, friction=0.3)
    with pytest.raises(ValueError, match=r"shifted isn't linear"):
        variance_bias(Rule(shifted, sgld.SGLDState), 0.1, 1.0, 0.0)


@pytest.mark.parametrize("name", ["sgnht", "euler", "baoab"])
def test_no_law_has_a_name(name):
    with pytest.raises(AttributeError):
        variance_bias(name, 0.1, 1.0, 0.3, friction=0.3)


@pytest.mark.parametrize("V", [0.0, 2.0, 5.0])
@pytest.mark.parametrize("h", [0.3, 1.0])
def test_a_thermostat_rests_where_the_kinetic_temperature_is_one(V, h):
    # Eq. 15 at friction ξ with noise of α: Var v = 2ηh/(2 − ξ) Var θ, and that is η at rest, so that
    # Var θ h = 1 − ξ/2; ξ from the formula for Var θ.
    eta, alpha = 0.05, 0.3
    (xi,) = resting_thermostats(EULER_THERMOSTAT, eta, h, V, friction=alpha)
    variance = (alpha + eta * V / 2) / xi / (1 - eta * h / (4 - 2 * xi))
    assert variance == pytest.approx(1 - xi / 2, rel=1e-9)
    bias = variance_bias(EULER_THERMOSTAT, eta, h, V, friction=alpha)
    assert 1 + bias == pytest.approx(1 - xi / 2, rel=1e-9)
    found = linear_step(EULER_THERMOSTAT, eta, h, V, (xi,), friction=alpha)
    assert abs(found.drift) < 1e-12
    rate = contraction_rate(EULER_THERMOSTAT, eta, h, V, friction=alpha)
    assert rate == pytest.approx(closed_forms.relaxation("euler", eta, float(xi), h), abs=1e-14)


def test_drift_of_a_held_thermostat_is_that_of_its_mean_square():
    found = linear_step(EULER_THERMOSTAT, 0.05, 1.0, 2.0, (np.array(0.4),), friction=0.3)
    assert found.drift == pytest.approx(found.covariance[1, 1] - 0.05, rel=1e-9)


def test_a_direction_noisier_than_most_is_left_with_their_thermostat():
    (xi,) = resting_thermostats(EULER_THERMOSTAT, 0.05, 1.0, 0.5, friction=0.3)
    expected = (
        linear_step(EULER_THERMOSTAT, 0.05, 1.0, 3.0, (xi,), friction=0.3).covariance[0, 0] - 1
    )
    bias = variance_bias(EULER_THERMOSTAT, 0.05, 1.0, 3.0, mean_noise=0.5, friction=0.3)
    assert bias == pytest.approx(expected, rel=1e-12)
    assert bias > variance_bias(EULER_THERMOSTAT, 0.05, 1.0, 3.0, friction=0.3)


@pytest.mark.parametrize(
    ("noise", "mean"),
    [([3.0, 0.5, 0.1], 1.2), ([3.0, 3.0, 3.0], 0.75 * 3), ([3.0, 2.5, 3.0], 2.25)],
)
def test_a_choice_holds_the_thermostat_at_the_mean_noise(noise, mean):
    # ... or where a quarter of the noise is missed, which no thermostat can be trusted with.
    noise = np.array(noise)
    share = 0.1
    settings = {"curvature": Curvature(largest=1.0, smallest=0.2), "budget": 0.05}
    chosen = choose(
        EULER_THERMOSTAT,
        ChainTuning(order=0, noise=noise),
        noise=3 * share,
        friction=0.3,
        **settings,
    )
    (xi,) = resting_thermostats(
        EULER_THERMOSTAT, chosen.learning_rate, 1.0, mean * share, friction=0.3
    )
    found = linear_step(EULER_THERMOSTAT, chosen.learning_rate, 1.0, 3 * share, (xi,), friction=0.3)
    assert chosen.bias == pytest.approx(found.covariance[0, 0] - 1, rel=1e-9)
    (xi,) = resting_thermostats(
        EULER_THERMOSTAT, chosen.learning_rate, 0.2, mean * share, friction=0.3
    )
    slow = closed_forms.relaxation("euler", chosen.learning_rate, float(xi), 0.2)
    assert chosen.rate == pytest.approx(slow, rel=1e-9)


def test_a_thermostat_without_rest_is_unstable():
    # Unstable at every friction: ηh > 4. And no noise at all: the chain cools for ever.
    for eta, V, alpha in ((4.1, 0.0, 0.3), (0.05, 0.0, 1e-300)):
        assert variance_bias(EULER_THERMOSTAT, eta, 1.0, V, friction=alpha) == math.inf
    assert contraction_rate(EULER_THERMOSTAT, 4.1, 1.0, friction=0.3) == -math.inf


def test_two_fields_after_the_momentum_are_refused():
    class Two(NamedTuple):
        position: np.ndarray
        momentum: np.ndarray
        thermostat: np.ndarray
        barostat: np.ndarray

    with pytest.raises(ValueError, match=r"Two has the fields thermostat, barostat .* by hand"):
        variance_bias(Rule(sghmc.update, Two), 0.1, 1.0, 0.0, friction=0.3)
