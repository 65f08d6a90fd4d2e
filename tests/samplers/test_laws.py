"""Exact laws on Gaussians, by probing the code with unit vectors: no seed, no tolerance to choose."""

import itertools

import numpy as np
import pymc as pm
import pytest

from modes import FAST
from pairs import pairs_of
from stationary import (
    PRECONDITIONERS,
    H,
    NoisyLinear,
    Script,
    V,
    draw_map,
    sghmc_map,
    stationary_covariance,
    with_gradient,
)
from table import LINEAR, PaperSGHMC, PaperSGLD

from pymc_sghmc.samplers import sghmc, sgld
from pymc_sghmc.tuning.noise_estimates import NoiseOfEachDraw


@pytest.fixture(scope="module")
def flat():
    with pm.Model() as model:
        pm.Potential("energy", -0.5 * (pm.Flat("x", shape=3) ** 2).sum())
    return model


def probe(step, H, V):
    A, B = draw_map(with_gradient(step, NoisyLinear(H, V)), len(H))
    return stationary_covariance(A, B @ B.T)


def matrix(P):
    return None if P is None else (np.diag(P) if P.ndim == 1 else P)


@pytest.mark.parametrize(
    ("sampler", "preconditioner", "noise", "settings"),
    pairs_of(LINEAR, PRECONDITIONERS, [0.0, 1.0], [(0.02, 1.0, 1), (0.1, 0.4, 1), (0.05, 2.5, 4)]),
    ids=str,
)
def test_law_of_position_and_momentum_is_exact(flat, sampler, preconditioner, noise, settings):
    eta, T, n_steps = settings
    P = PRECONDITIONERS[preconditioner]
    step = sampler.cls(
        learning_rate=eta,
        temperature=T,
        n_steps=n_steps,
        preconditioner=P,
        model=flat,
        compile_kwargs=FAST,
        **sampler.settings,
    )
    A, Q = sampler.linear_map(
        H, noise * V, eta=eta, T=T, n_steps=n_steps, P=matrix(P), **sampler.letters
    )
    np.testing.assert_allclose(
        probe(step, H, noise * V), stationary_covariance(A, Q), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(
    ("alpha", "beta_hat", "redraw", "preconditioner"),
    pairs_of(
        [0.05, 0.5, 1.0], [0.0, 0.04, np.array([0.01, 0.05, 0.03])], [None, 2, 3], ["none", "diag"]
    ),
    ids=str,
)
def test_sghmc_law_is_exact_for_every_friction_noise_estimate_and_redraw(
    flat, alpha, beta_hat, redraw, preconditioner
):
    P = PRECONDITIONERS[preconditioner]
    settings = {"eta": 0.03, "T": 0.7, "n_steps": 6}
    step = PaperSGHMC(
        learning_rate=0.03,
        temperature=0.7,
        n_steps=6,
        friction=alpha,
        noise_estimate=beta_hat,
        resample_momentum_every=redraw,
        preconditioner=P,
        model=flat,
        compile_kwargs=FAST,
    )
    A, Q = sghmc_map(H, V, alpha=alpha, beta_hat=beta_hat, redraw=redraw, P=matrix(P), **settings)
    np.testing.assert_allclose(
        probe(step, H, V), stationary_covariance(A, Q), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_full_noise_estimate_takes_the_gradient_noise_out(flat, preconditioner):
    # β̂ = ½ηV in full: the law is that of the exact gradient, whatever the coordinates.
    P = PRECONDITIONERS[preconditioner]
    step = PaperSGHMC(
        learning_rate=0.05, friction=0.4, preconditioner=P, model=flat, compile_kwargs=FAST
    )
    step.tuner.settings.noise = NoiseOfEachDraw(full=True)  # V̂ = V from NoisyLinear, no draw
    A, Q = sghmc_map(H, 0 * V, eta=0.05, alpha=0.4, P=matrix(P))
    np.testing.assert_allclose(
        probe(step, H, V), stationary_covariance(A, Q), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("preconditioner", ["none", "diag"])
def test_diagonal_noise_estimate_takes_uncorrelated_noise_out(flat, preconditioner):
    P = PRECONDITIONERS[preconditioner]
    step = PaperSGHMC(
        learning_rate=0.05, friction=0.4, preconditioner=P, model=flat, compile_kwargs=FAST
    )
    step.tuner.settings.noise = NoiseOfEachDraw(full=False)
    A, Q = sghmc_map(H, 0 * V, eta=0.05, alpha=0.4, P=matrix(P))
    np.testing.assert_allclose(
        probe(step, H, np.diag(np.diag(V))), stationary_covariance(A, Q), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    ("eta", "alpha", "v", "beta_hat", "variance", "kinetic"),
    [
        (0.01, 0.1, 0, 0.0, 1.0026, 1.0554),
        (0.01, 0.1, 4, 0.0, 1.2032, 1.2665),
        (0.01, 0.1, 4, 0.02, 1.0026, 1.0554),
        (0.1, 0.1, 1, 0.0, 1.5405, 1.6216),
    ],
)
def test_sghmc_on_the_standard_normal_has_the_known_variance(
    eta, alpha, v, beta_hat, variance, kinetic
):
    # Figures worked out beforehand, apart from this code.
    gradient = NoisyLinear(np.eye(1), v * np.eye(1))

    def update(x, values):
        state = sghmc.SGHMCState(x[:1], x[1:])
        state, _ = sghmc.update(
            state, gradient, eta, Script(values), friction=alpha, noise_estimate=beta_hat
        )
        return np.concatenate(state)

    A = np.column_stack([update(e, np.zeros(2)) for e in np.eye(2)])
    B = np.column_stack([update(np.zeros(2), e) for e in np.eye(2)])
    covariance = stationary_covariance(A, B @ B.T)
    A, Q = sghmc_map(np.eye(1), v * np.eye(1), eta=eta, alpha=alpha, beta_hat=beta_hat)
    np.testing.assert_allclose(covariance, stationary_covariance(A, Q), rtol=1e-10)
    assert round(covariance[0, 0], 4) == variance
    assert round(covariance[1, 1] / eta, 4) == kinetic


def test_bias_of_sghmc_is_of_order_two_in_epsilon(flat):
    # η = ε², α = εC at fixed C: the error of the variance falls as ε², the explicit Euler scheme's
    # (gradient at the old θ) only as ε.
    biases = [
        probe(
            PaperSGHMC(
                learning_rate=e**2, friction=1.2 * e, n_steps=1, model=flat, compile_kwargs=FAST
            ),
            H,
            0 * V,
        )[:3, :3]
        - np.linalg.inv(H)
        for e in (0.1, 0.05, 0.025)
    ]
    sizes = [np.abs(np.diag(bias)).max() for bias in biases]
    orders = np.log2([sizes[0] / sizes[1], sizes[1] / sizes[2]])
    assert np.abs(orders - 2).max() < 0.1


def test_bias_of_sgld_is_of_order_one_in_the_learning_rate(flat):
    sizes = [
        np.abs(
            probe(
                PaperSGLD(learning_rate=eta, n_steps=1, model=flat, compile_kwargs=FAST), H, 0 * V
            )
            - np.linalg.inv(H)
        ).max()
        for eta in (0.02, 0.01, 0.005)
    ]
    orders = np.log2([sizes[0] / sizes[1], sizes[1] / sizes[2]])
    assert np.abs(orders - 1).max() < 0.05


def test_algorithm_2_in_its_own_letters_is_the_same_chain():
    # θ_i = θ + εM⁻¹r;  r_i = r − ε∇Ũ(θ_i) − εCM⁻¹r + N(0, 2(C − B̂)ε), literally.
    rng = np.random.default_rng(3)
    eps, M, C, B_hat = 0.1, np.array([2.0, 0.5, 1.0]), 1.5, 0.4
    gradient = NoisyLinear(H, V)
    theta, r = rng.standard_normal((2, 3))
    # one M for all unknowns: α = εM⁻¹C is a number
    for m in M:
        state = sghmc.SGHMCState(theta, eps * r / m)
        theta_i, r_i = theta, r
        for i in range(50):
            values = np.random.default_rng(i).standard_normal(6)
            minibatch = gradient.order.root @ values[:3]
            theta_i = theta_i + eps * r_i / m
            grad_u = H @ theta_i + minibatch
            r_i = (
                r_i - eps * grad_u - eps * C / m * r_i + np.sqrt(2 * (C - B_hat) * eps) * values[3:]
            )
            state, _ = sghmc.update(
                state,
                gradient,
                eps**2 / m,
                Script(values),
                friction=eps * C / m,
                noise_estimate=eps * B_hat / m,
            )
        np.testing.assert_allclose(state.position, theta_i, rtol=1e-10)
        np.testing.assert_allclose(state.momentum, eps * r_i / m, rtol=1e-10)


def test_sgld_equals_a_literal_transcription_and_its_convention():
    # Welling & Teh (2011), eq. 4: Δθ = ε/2 (∇log p + N/n Σ ∇log p) + N(0, ε), with ε = 2η.
    values = np.random.default_rng(0).standard_normal(6)
    gradient = NoisyLinear(H, V)
    theta, eps = np.array([1.0, -2.0, 0.5]), 0.04
    state, _ = sgld.update(sgld.SGLDState(theta), gradient, eps / 2, Script(values))
    log_density_gradient = -H @ theta - gradient.order.root @ values[:3]
    expected = theta + eps / 2 * log_density_gradient + np.sqrt(eps) * values[3:]
    np.testing.assert_allclose(state.position, expected, rtol=1e-14)


def test_sghmc_with_friction_one_is_sgld_one_step_later():
    # α = 1: v_t = −η∇Ũ(θ_t) + N(0, 2ηT) forgets v_{t−1}, so that θ_{t+1} = θ_t + v_t is SGLD's.
    rng = np.random.default_rng(1)
    gradient = NoisyLinear(H, V)
    scripts = rng.standard_normal((20, 6))
    theta = rng.standard_normal(3)
    slow = sghmc.SGHMCState(theta, np.zeros(3))
    fast = sgld.SGLDState(theta)
    for values in scripts:
        slow, _ = sghmc.update(slow, gradient, 0.05, Script(values), friction=1.0, temperature=0.6)
        np.testing.assert_allclose(slow.position, fast.position, rtol=1e-12)
        fast, _ = sgld.update(fast, gradient, 0.05, Script(values), temperature=0.6)


def test_temperature_zero_is_gradient_descent_with_momentum():
    gradient = NoisyLinear(H, 0 * V)
    theta, v = np.array([1.0, 2.0, -1.0]), np.array([0.1, 0.0, -0.2])
    state = sghmc.SGHMCState(theta, v)
    position = sgld.SGLDState(theta)
    rng = np.random.default_rng(0)
    for _ in range(30):
        theta = theta + v
        v = 0.9 * v - 0.05 * H @ theta
        state, _ = sghmc.update(state, gradient, 0.05, rng, friction=0.1, temperature=0.0)
        np.testing.assert_allclose(state.position, theta, rtol=1e-12)
        expected = position.position - 0.05 * H @ position.position
        position, _ = sgld.update(position, gradient, 0.05, rng, temperature=0.0)
        np.testing.assert_allclose(position.position, expected, rtol=1e-12)


def test_without_a_gradient_the_momentum_is_an_autoregression():
    # v' = (1 − α) v + N(0, 2αηT): variance 2αηT / (1 − (1 − α)²) = ηT / (1 − α/2).
    A, B = [], []
    gradient = NoisyLinear(np.zeros((1, 1)), np.zeros((1, 1)))
    for x, z in itertools.product((0.0, 1.0), (0.0, 1.0)):
        state, _ = sghmc.update(
            sghmc.SGHMCState(np.zeros(1), np.array([x])),
            gradient,
            0.2,
            Script(np.array([0.0, z])),
            friction=0.3,
            temperature=1.7,
        )
        (A if z == 0 else B).append(state.momentum[0] - (0.7 * x if z else 0.0))
    np.testing.assert_allclose(A, [0.0, 0.7])
    np.testing.assert_allclose(B, np.sqrt(2 * 0.3 * 0.2 * 1.7), rtol=1e-12)


def test_fresh_momentum_has_variance_eta_times_temperature():
    values = np.array([1.0, -2.0, 3.0])
    state = sghmc.init(np.zeros(3), 0.09, Script(values), temperature=4.0)
    np.testing.assert_allclose(state.momentum, np.sqrt(0.09 * 4.0) * values)


@pytest.mark.parametrize("sampler", LINEAR, ids=repr)
def test_every_inner_step_draws_its_own_minibatch(flat, sampler):
    step = sampler.cls(
        learning_rate=0.01, n_steps=7, model=flat, compile_kwargs=FAST, **sampler.settings
    )
    gradient = NoisyLinear(H, V)
    with_gradient(step, gradient)
    step.begin_chain(np.random.default_rng(0))
    point, _ = step.step({"x": np.zeros(3)})  # compiles the inner steps and checks them
    gradient.order.drawn.clear()
    for _ in range(3):
        step.step(point)
    assert len({tuple(token) for token in gradient.order.drawn}) == 21


@pytest.mark.parametrize("sampler", LINEAR, ids=repr)
def test_law_is_not_that_of_another_target(flat, sampler):
    # Negative control: the same comparison with one entry of H off by 1 % fails.
    step = sampler.cls(
        learning_rate=0.05, n_steps=2, model=flat, compile_kwargs=FAST, **sampler.settings
    )
    wrong = H.copy()
    wrong[0, 0] *= 1.01
    A, Q = sampler.linear_map(wrong, V, eta=0.05, n_steps=2, **sampler.letters)
    assert not np.allclose(probe(step, H, V), stationary_covariance(A, Q), rtol=1e-4)
