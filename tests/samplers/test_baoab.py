"""BAOAB on Gaussians: its law is exact, read off the code by unit vectors."""

import itertools

import numpy as np
import pymc as pm
import pytest

from modes import FAST
from stationary import (
    PRECONDITIONERS,
    H,
    NoisyLinear,
    Script,
    V,
    baoab_map,
    draw_map,
    stationary_covariance,
    with_gradient,
)

from pymc_sghmc import SGHMC
from pymc_sghmc.samplers import baoab, sghmc
from pymc_sghmc.tuning.noise_estimates import NoiseOfEachDraw

BETA_HAT = np.array([[0.05, 0.02, 0.0], [0.02, 0.04, -0.01], [0.0, -0.01, 0.06]])


def law(H, V, *, eta, alpha, **settings):
    """Covariance of (θ, v) from ``update`` itself."""
    d = len(H)
    gradient = NoisyLinear(H, V)

    def run(x, values):
        state = sghmc.SGHMCState(x[:d], x[d:])
        script = Script(values)
        state, _ = baoab.update(state, gradient, eta, script, friction=alpha, **settings)
        assert script.used == 2 * d
        return np.concatenate(state)

    A = np.column_stack([run(e, None) for e in np.eye(2 * d)])
    B = np.column_stack([run(np.zeros(2 * d), e) for e in np.eye(2 * d)])
    return stationary_covariance(A, B @ B.T)


@pytest.fixture(scope="module")
def flat():
    with pm.Model() as model:
        pm.Potential("energy", -0.5 * (pm.Flat("x", shape=3) ** 2).sum())
    return model


def step_of(model, **settings):
    settings = {"friction": 0.4, "noise_estimate": None, "gradient": "plain", **settings}
    return SGHMC(integrator="baoab", model=model, compile_kwargs=FAST, **settings)


def probe(step, H, V):
    A, B = draw_map(with_gradient(step, NoisyLinear(H, V)), len(H))
    return stationary_covariance(A, B @ B.T)


def matrix(P):
    return None if P is None else (np.diag(P) if P.ndim == 1 else P)


@pytest.mark.parametrize("h", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("eta_h", [1e-3, 0.1, 1.0, 2.0, 3.5, 3.99])
@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.9, 1.0])
def test_without_noise_position_and_momentum_have_the_exact_variances(h, eta_h, alpha):
    eta, T = eta_h / h, 1.7
    covariance = law(np.array([[h]]), np.zeros((1, 1)), eta=eta, alpha=alpha, temperature=T)
    exact = [[T / h, -eta * T / 2], [-eta * T / 2, eta * T]]
    np.testing.assert_allclose(covariance, exact, rtol=1e-10)


def test_beyond_four_it_is_unstable():
    with pytest.raises(AssertionError):
        law(np.eye(1), np.zeros((1, 1)), eta=4.01, alpha=0.3)


@pytest.mark.parametrize("eta", [0.01, 0.4, 1.5])
def test_without_noise_the_bias_is_zero_in_several_dimensions(eta):
    covariance = law(H, 0 * V, eta=eta, alpha=0.2)
    np.testing.assert_allclose(covariance[:3, :3], np.linalg.inv(H), rtol=1e-10)
    np.testing.assert_allclose(covariance[3:, 3:], eta * np.eye(3), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("eta", "alpha", "h", "v", "T"),
    list(itertools.product([0.01, 0.3, 1.0], [0.05, 0.5, 1.0], [0.5, 2.0], [0.5, 9.0], [1.0, 0.6])),
)
def test_noise_multiplies_the_variance_as_documented(eta, alpha, h, v, T):
    one = np.eye(1)
    settings = {"eta": eta, "alpha": alpha, "temperature": T}
    uncorrected = law(h * one, v * one, **settings)[0, 0] * h / T - 1
    assert uncorrected == pytest.approx(
        eta * v / T * (2 - alpha) / (alpha * (4 - eta * h)), rel=1e-9
    )
    # β̂ takes a share of what is injected, ½(2 − α)²β̂ of α(2 − α).
    beta_hat = min(alpha, 0.5 * eta * v / T)
    corrected = law(h * one, v * one, noise_estimate=beta_hat, **settings)[0, 0] * h / T - 1
    taken = beta_hat * (2 - alpha) / (2 * alpha)
    assert corrected == pytest.approx(uncorrected - taken, rel=1e-8, abs=1e-10)
    if beta_hat == 0.5 * eta * v / T:  # β̂ = ½ηV/T: the noise that is left is of order η
        assert corrected == pytest.approx(uncorrected * eta * h / 4, rel=1e-8)


def test_what_remains_of_corrected_noise_is_of_relative_order_eta():
    shares = []
    for eta in (0.1, 0.05, 0.025):
        excess = [
            law(H, V, eta=eta, alpha=0.5, noise_estimate=estimate)[:3, :3] - np.linalg.inv(H)
            for estimate in (0.5 * eta * V, 0.0)
        ]
        shares.append(np.abs(excess[0]).max() / np.abs(excess[1]).max())
    orders = np.log2([shares[0] / shares[1], shares[1] / shares[2]])
    assert np.abs(orders - 1).max() < 0.05
    assert shares[0] < 0.1 * 0.25 * np.linalg.eigvalsh(H)[-1] * 1.1


@pytest.mark.parametrize(
    "estimate", [0.04, np.array([0.01, 0.05, 0.03]), BETA_HAT], ids=["number", "array", "matrix"]
)
@pytest.mark.parametrize("T", [0.4, 1.0, 2.5])
def test_law_is_exact_for_every_noise_estimate_and_temperature(estimate, T):
    settings = {"eta": 0.2, "alpha": 0.3}
    A, Q = baoab_map(H, V, beta_hat=estimate, T=T, **settings)
    expected = stationary_covariance(A, Q)
    covariance = law(H, V, noise_estimate=estimate, temperature=T, **settings)
    np.testing.assert_allclose(covariance, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("redraw", [None, 2, 3])
@pytest.mark.parametrize("estimate", [0.0, np.array([0.01, 0.05, 0.03])], ids=str)
@pytest.mark.parametrize("preconditioner", ["none", "diag"])
def test_law_through_the_step_with_redrawn_momentum(flat, redraw, estimate, preconditioner):
    P = PRECONDITIONERS[preconditioner]
    step = step_of(
        flat, learning_rate=0.1, friction=0.25, temperature=0.7, n_steps=6, noise_estimate=estimate,
        resample_momentum_every=redraw, preconditioner=P,
    )  # fmt: skip
    A, Q = baoab_map(
        H, V, eta=0.1, alpha=0.25, beta_hat=estimate, T=0.7, P=matrix(P), n_steps=6, redraw=redraw
    )
    np.testing.assert_allclose(
        probe(step, H, V), stationary_covariance(A, Q), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("full", [False, True])
def test_measured_noise_estimate_through_the_step(flat, preconditioner, full):
    # β̂ = ½ηV̂ in the coordinates of the preconditioner, V̂ = V there, or its diagonal.
    P, eta = PRECONDITIONERS[preconditioner], 0.1
    step = step_of(flat, learning_rate=eta, preconditioner=P)
    step.tuner.settings.noise = NoiseOfEachDraw(full)
    L = np.eye(3) if P is None else np.linalg.cholesky(matrix(P))
    pulled = L.T @ V @ L
    beta_hat = 0.5 * eta * (pulled if full else np.diag(np.diag(pulled)))
    A, Q = baoab_map(L.T @ H @ L, pulled, eta=eta, alpha=0.4, beta_hat=beta_hat)
    LL = np.kron(np.eye(2), L)
    expected = LL @ stationary_covariance(A, Q) @ LL.T
    np.testing.assert_allclose(probe(step, H, V), expected, rtol=1e-9, atol=1e-12)


def test_with_friction_one_it_is_the_method_of_leimkuhler_and_matthews():
    # θ' = θ − δ∇Ũ(θ) + √(δ/2) (ξ + ξ'), δ = η/2: no bias on Gaussians at one gradient per step.
    rng = np.random.default_rng(1)
    gradient, eta, T = NoisyLinear(H, V), 0.3, 0.6
    state = sghmc.SGHMCState(rng.standard_normal(3), rng.standard_normal(3))
    theta = xi = force = None
    for values in rng.standard_normal((20, 6)):
        state, _ = baoab.update(state, gradient, eta, Script(values), friction=1.0, temperature=T)
        if theta is not None:
            theta = theta + eta / 2 * force + np.sqrt(eta * T / 4) * (xi + values[:3])
            np.testing.assert_allclose(state.position, theta, rtol=1e-12)
        theta, xi = state.position, values[:3]
        force = -H @ theta - gradient.order.root @ values[3:]


def test_temperature_zero_and_no_friction_conserves_the_energy_of_verlet():
    # T = 0 and α → 0: a leapfrog, whose energy oscillates without drift.
    gradient, eta = NoisyLinear(H, 0 * V), 0.2
    state = sghmc.SGHMCState(np.array([1.0, 0.5, -0.5]), np.zeros(3))
    energies = []
    for _ in range(2000):
        theta, v = state
        half = v + 0.5 * eta * (H @ theta)  # between the two half kicks
        energies.append(0.5 * theta @ H @ theta + 0.5 * half @ half / eta)
        state, _ = baoab.update(state, gradient, eta, Script(), friction=1e-12, temperature=0.0)
    early, late = np.mean(energies[1:501]), np.mean(energies[-500:])
    assert abs(late / early - 1) < 0.02
    assert np.ptp(energies[1:]) > 1e-3  # the oscillation


def test_law_is_not_that_of_another_target():
    wrong = H.copy()
    wrong[0, 0] *= 1.01
    A, Q = baoab_map(wrong, V, eta=0.2, alpha=0.3)
    assert not np.allclose(law(H, V, eta=0.2, alpha=0.3), stationary_covariance(A, Q), rtol=1e-4)
