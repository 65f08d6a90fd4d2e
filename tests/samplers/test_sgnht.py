"""SGNHT: the rule against a second transcription, its law with a held thermostat, and simulation."""

import math

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from stationary import H, NoisyLinear, Script, V
from thermostats import EULER_THERMOSTAT

from pymc_sghmc.samplers import baoab, sghmc, sgnht
from pymc_sghmc.tuning.budget import WIDER, choose, critical_friction
from pymc_sghmc.tuning.chain_tuning import ChainTuning
from pymc_sghmc.tuning.curvature import Curvature
from pymc_sghmc.tuning.linear_step import (
    Rule,
    contraction_rate,
    linear_step,
    resting_thermostats,
    variance_bias,
)

RULE = Rule(sgnht.update, sgnht.SGNHTState)


def transcribed(theta, r, zeta, noises, gradient, *, eps, A, T):
    """One step in θ, r, ζ, ε and A, for many chains at once: arrays (chains, d) and ζ (chains, 1).

    Half a drift, the exact Ornstein-Uhlenbeck step at friction ζ with the noise of friction A, half a
    drift, the thermostat, a kick.
    """
    mu = 4 * eps**2 / (1 - math.exp(-eps * A)) ** 2
    injected = T * (1 - math.exp(-2 * eps * A))  # variance that the OU step puts in
    decay = np.exp(-eps * zeta)
    half = theta + eps / 2 * r
    r_new = decay * r + np.sqrt(injected) * noises
    new = half + eps / 2 * r_new
    speed = (new - theta) / eps
    K = np.mean(speed**2, axis=-1, keepdims=True) + injected / (2 * (1 + decay))
    return new, r_new + eps * gradient(new), zeta + eps / mu * (K - T)


class Line:
    """Gradient of Σ U(θᵢ) with independent noise of variance V."""

    def __init__(self, gradient, V):
        self.gradient, self.root = gradient, np.sqrt(V)

    def draw_minibatch(self, rng):
        return rng

    def __call__(self, position, rng):
        return 0.0, self.gradient(position) + self.root * rng.standard_normal(position.shape)


def simulate(gradient, V, d, eta, alpha, n, statistic, temperature=1.0, seed=0):
    """Means of ``statistic(state)`` over a chain of n steps after settling, and their errors."""
    rng, line = np.random.default_rng(seed), Line(gradient, V)
    state = sgnht.init(rng.standard_normal(d), eta, rng, temperature)
    values = []
    for t in range(n + n // 5):
        state, _ = sgnht.update(state, line, eta, rng, friction=alpha, temperature=temperature)
        if t >= n // 5:
            values.append(statistic(state))
    batches = np.reshape(values, (20, n // 20, -1)).mean(axis=1)
    return batches.mean(axis=0), batches.std(axis=0, ddof=1) / np.sqrt(len(batches))


def rest(eta, alpha, V, h=1.0, T=1.0):
    """ξ at rest on a Gaussian: the root in c = (1 − α)e^(−ξ) of (1 + q)c² + 2qc + q = (1 − α)²."""
    q = eta * V / T / (4 - eta * h)
    c = (math.sqrt((1 + q) * (1 - alpha) ** 2 - q) - q) / (1 + q)
    return math.log((1 - alpha) / c)


def test_update_equals_a_literal_transcription():
    rng = np.random.default_rng(0)
    eps, A, T = 0.4, 1.3, 0.7
    alpha = 1 - math.exp(-eps * A)
    gradient = NoisyLinear(H, V)
    theta, r, zeta = rng.standard_normal(3), rng.standard_normal(3), np.array([A + 0.2])
    state = sgnht.SGNHTState(theta, eps * r, np.array(0.2 * eps))
    for values in rng.standard_normal((50, 6)):
        minibatch = gradient.order.root @ values[3:]
        theta, r, zeta = transcribed(
            theta,
            r,
            zeta,
            values[:3],
            lambda x, minibatch=minibatch: -H @ x - minibatch,
            eps=eps,
            A=A,
            T=T,
        )
        script = Script(values)
        state, stats = sgnht.update(state, gradient, eps**2, script, friction=alpha, temperature=T)
        assert script.used == 6
        assert set(stats) == {"minibatch_logp"}
        np.testing.assert_allclose(state.position, theta, rtol=1e-9)
        np.testing.assert_allclose(state.momentum, eps * r, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(state.thermostat, eps * (zeta[0] - A), rtol=1e-9, atol=1e-12)


def test_at_thermostat_zero_a_step_is_one_of_baoab():
    values = np.random.default_rng(1).standard_normal(6)
    theta, v = np.array([1.0, -0.5, 2.0]), np.array([0.3, 0.1, -0.2])
    settings = {"friction": 0.3, "temperature": 1.4}
    state, _ = sgnht.update(
        sgnht.SGNHTState(theta, v, np.zeros(())), NoisyLinear(H, V), 0.2, Script(values), **settings
    )
    expected, _ = baoab.update(
        sghmc.SGHMCState(theta, v), NoisyLinear(H, V), 0.2, Script(values), **settings
    )
    np.testing.assert_allclose(state.position, expected.position, rtol=1e-14)
    np.testing.assert_allclose(state.momentum, expected.momentum, rtol=1e-14)


def test_first_state_has_momentum_of_the_temperature_and_no_thermostat():
    values = np.array([1.0, -2.0, 3.0])
    state = sgnht.init(np.zeros(3), 0.09, Script(values), temperature=4.0)
    np.testing.assert_allclose(state.momentum, 0.6 * values)
    assert state.thermostat == 0
    assert np.ndim(state.thermostat) == 0


@pytest.mark.parametrize("eta", [1e-3, 0.05, 0.25, 1.0])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("h", [0.2, 1.0, 2.5])
@pytest.mark.parametrize("noise", [0.0, 0.3, 0.9])
def test_with_the_thermostat_at_rest_the_variance_is_exact(eta, alpha, h, noise):
    V = noise * (1 - alpha) ** 2 * (4 - eta * h) / eta  # a share of what can be compensated
    [xi] = resting_thermostats(RULE, eta, h, V, friction=alpha)
    assert xi == pytest.approx(rest(eta, alpha, V, h), rel=1e-8, abs=1e-12)
    assert variance_bias(RULE, eta, h, V, friction=alpha) == pytest.approx(0, abs=1e-9)
    found = linear_step(RULE, eta, h, V, (xi,), friction=alpha)
    # BAOAB's relation between kinetic and configurational temperature, at friction 1 − c
    a, injected = 1 - (1 - alpha) * math.exp(-xi), alpha * (2 - alpha)
    kinetic = found.covariance[1, 1] / eta
    assert (1 - a / 2) ** 2 * kinetic + (1 - a / 4) * injected / (2 - a) == pytest.approx(
        1, rel=1e-8
    )


def test_what_little_noise_asks_of_the_thermostat_is_half_eta_v():
    for eta in (1e-3, 1e-4):
        [xi] = resting_thermostats(RULE, eta, 1.0, 2.0, friction=10 * eta)
        assert xi / (0.5 * eta * 2.0) == pytest.approx(1, abs=20 * eta)


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_more_noise_than_friction_can_take_up_is_infinite_bias(alpha):
    eta, h = 0.2, 1.5
    most = (1 - alpha) ** 2 * (4 - eta * h) / eta
    assert variance_bias(RULE, eta, h, 0.98 * most, friction=alpha) == pytest.approx(0, abs=1e-8)
    assert variance_bias(RULE, eta, h, 1.01 * most, friction=alpha) == math.inf


def test_one_thermostat_leaves_the_bias_of_directions_unlike_the_mean():
    # Two kinds of directions: the held law of each, and a chain of 400 unknowns of both kinds.
    eta, alpha = 0.25, 0.4
    noise = np.repeat([0.0, 2.0], 200)
    [xi] = resting_thermostats(RULE, eta, 1.0, 1.0, friction=alpha)
    exact = [
        linear_step(RULE, eta, 1.0, V, (xi,), friction=alpha).covariance[0, 0] for V in (0.0, 2.0)
    ]
    assert np.mean(exact) == pytest.approx(1, abs=1e-9)
    assert exact[1] - 1 == variance_bias(RULE, eta, 1.0, 2.0, mean_noise=1.0, friction=alpha)
    found, error = simulate(
        lambda theta: -theta, noise, 400, eta, alpha, 12_000,
        lambda s: [np.mean(s.position[:200] ** 2), np.mean(s.position[200:] ** 2), s.thermostat],
    )  # fmt: skip
    assert (error < 0.005).all()
    expected = np.array([*exact, xi])
    assert (np.abs(found - expected) < 4 * error + [0, 0, 0.001]).all()  # ξ moves: 1/d
    assert np.abs(expected[:2] - 1).min() > 10 * error.max()


@pytest.mark.parametrize(
    ("eta", "alpha", "V", "T"),
    [(0.25, 0.4, 1.0, 1.0), (0.05, 0.3, 2.0, 1.0), (0.25, 0.4, 1.0, 0.5)],
)
def test_a_chain_of_400_unknowns_has_the_held_law(eta, alpha, V, T):
    found, error = simulate(
        lambda theta: -theta, V, 400, eta, alpha, 12_000,
        lambda s: [np.mean(s.position**2) / T, np.mean(s.momentum**2) / T, s.thermostat],
        temperature=T,
    )  # fmt: skip
    [xi] = resting_thermostats(RULE, eta, 1.0, V / T, friction=alpha)
    exact = linear_step(RULE, eta, 1.0, V / T, (xi,), friction=alpha).covariance
    expected = [exact[0, 0], exact[1, 1], xi]
    assert (error < [0.004, 0.004 * eta, 0.004]).all()
    assert (np.abs(found - expected) < 4 * error + [0, 0, 0.001]).all()
    plain = variance_bias(Rule(baoab.update, sghmc.SGHMCState), eta, 1.0, V / T, friction=alpha)
    assert plain > 20 * error[0]  # what the thermostat has taken out


def test_on_any_target_the_virial_is_the_temperature():
    # U = 2 log cosh θ, with noise, and ε near the smallest scale 1/√2: the thermostat's own balance.
    found, error = simulate(
        lambda theta: -2 * np.tanh(theta), 0.2, 400, 0.7, 0.5, 12_000,
        lambda s: [np.mean(2 * s.position * np.tanh(s.position)), np.mean(s.position**2)],
    )  # fmt: skip
    assert error[0] < 0.002
    assert abs(found[0] - 1) < 4 * error[0]
    assert abs(found[1] / (math.pi**2 / 12) - 1) < 0.02  # Var θ, of order 2 in ε


def test_without_a_gradient_the_thermostat_moves_by_the_excess_of_speed():
    # Constant speed: θ moves by v̄ = ½(v + v'), and ξ by ¼α²(K/η − T).
    eta, alpha, T, xi = 0.2, 0.3, 1.7, 0.1
    v, z = np.array([0.5, -1.0]), np.array([0.3, 0.9])
    flat = NoisyLinear(np.zeros((2, 2)), np.zeros((2, 2)))
    state, _ = sgnht.update(
        sgnht.SGNHTState(np.zeros(2), v, np.array(xi)),
        flat,
        eta,
        Script(np.r_[z, 0, 0]),
        friction=alpha,
        temperature=T,
    )
    c, injected = 0.7 * math.exp(-0.1), 0.3 * 1.7 * eta * T
    v_new = c * v + math.sqrt(injected) * z
    np.testing.assert_allclose(state.momentum, v_new, rtol=1e-14)
    np.testing.assert_allclose(state.position, (v + v_new) / 2, rtol=1e-14)
    K = np.mean(state.position**2) + injected / 2 / (1 + c)
    assert state.thermostat == pytest.approx(xi + alpha**2 / 4 * (K / eta - T), rel=1e-14)


def test_friction_that_leaves_a_thermostat_nothing_is_refused():
    with pm.Model() as model:
        pm.Normal("x")
    for friction in (1, 1.0, np.float32(1)):
        with pytest.raises(ValueError, match=r"friction=1: take less than 1"):
            sgnht.SGNHT(friction=friction, model=model)


def test_temperature_zero_draws_no_noise_and_slows_down():
    gradient = NoisyLinear(H, 0 * V)
    start = sgnht.SGNHTState(np.ones(3), np.zeros(3), np.zeros(()))
    ends = []
    for seed in (0, 1):
        state, rng = start, np.random.default_rng(seed)
        for _ in range(400):
            old = state
            state, _ = sgnht.update(state, gradient, 0.05, rng, friction=0.1, temperature=0.0)
            assert state.thermostat >= old.thermostat
        ends.append(np.concatenate([*state[:2], [state.thermostat]]))
    np.testing.assert_array_equal(*ends)
    assert np.abs(ends[0][:3]).max() < 1e-3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_update_on_symbols_is_update_on_arrays(dtype):
    class Symbolic:
        def draw_minibatch(self, rng):
            return None

        def __call__(self, position, minibatch):
            return None, -pt.constant(H.astype(dtype)) @ position

    class Normals:
        def standard_normal(self, shape, dtype):
            return normals

    symbols = [pt.tensor(name, dtype=dtype, shape=(None,) * n) for name, n in FIELDS]
    normals = pt.vector("normals", dtype=dtype)
    eta, alpha, T = (pt.scalar(name, dtype=dtype) for name in ("eta", "alpha", "T"))
    new, _ = sgnht.update(
        sgnht.SGNHTState(*symbols), Symbolic(), eta, Normals(), friction=alpha, temperature=T
    )
    assert [part.type.ndim for part in new] == [1, 1, 0]
    compiled = pytensor.function(
        [*symbols, normals, eta, alpha, T],
        [part.astype(dtype) for part in new],
        mode="FAST_COMPILE",
        allow_input_downcast=True,
    )
    rng = np.random.default_rng(3)
    theta, v, z = rng.standard_normal((3, 3)).astype(dtype)
    xi = np.array(0.2, dtype=dtype)
    found = compiled(theta, v, xi, z, 0.2, 0.3, 0.8)

    class Plain(NoisyLinear):
        def __call__(self, position, minibatch):
            return 0.0, (-self.H.astype(dtype)) @ position

    expected, _ = sgnht.update(
        sgnht.SGNHTState(theta, v, xi),
        Plain(H, 0 * V),
        0.2,
        Script(np.r_[z, 0, 0, 0]),
        friction=0.3,
        temperature=0.8,
    )
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(a, b, rtol=1e-12 if dtype == "float64" else 2e-6)


FIELDS = [("position", 1), ("momentum", 1), ("thermostat", 0)]


def test_settings_are_found_for_it():
    quiet = choose(RULE, tuning(0.0), noise=0.0, curvature=Curvature(1.0, 1.0), budget=0.05)
    assert quiet.learning_rate == 0.25
    assert quiet.friction == critical_friction(0.25, 1 / WIDER)
    assert abs(quiet.bias) < 1e-12
    loud = choose(RULE, tuning(10.0), noise=10.0, curvature=Curvature(1.0, 1.0), budget=0.05)
    assert loud.bias == pytest.approx(0.05, rel=1e-6)
    assert loud.friction == pytest.approx(critical_friction(loud.learning_rate), rel=1e-6)
    # ... because a quarter of the noise is taken to be missed; BAOAB misses all of it
    plain = Rule(baoab.update, sghmc.SGHMCState)
    other = choose(plain, tuning(10.0), noise=10.0, curvature=Curvature(1.0, 1.0), budget=0.05)
    assert loud.learning_rate > 10 * other.learning_rate
    assert loud.rate == pytest.approx(
        contraction_rate(RULE, loud.learning_rate, 1 / WIDER, 7.5, friction=loud.friction),
        rel=1e-9,
    )


def tuning(noise):
    return ChainTuning(order=0, noise=np.array([noise]))


def leimkuhler_and_shangs(state, gradient, learning_rate, rng, *, friction, temperature=1.0):
    """BADODAB's thermostat: the mean of |v|² before and after the Ornstein-Uhlenbeck step."""
    theta, v, xi = state
    eta, T = learning_rate, temperature
    before = v
    noise = rng.standard_normal(v.shape, dtype=v.dtype)
    theta = theta + 0.5 * v
    v = (1 - friction) * np.exp(-xi) * v + (friction * (2 - friction) * eta * T) ** 0.5 * noise
    theta = theta + 0.5 * v
    xi = xi + 0.5 * (before**2 + v**2).mean() - eta * T
    _, grad = gradient(theta, gradient.draw_minibatch(rng))
    return sgnht.SGNHTState(theta, v + eta * grad, xi), {}


# η, α, V -> bias of the variance in percent: none, Ding et al., BADODAB, here
FIGURES = [
    ((0.01, 0.1, 4.0), 19.0, -6.4, -0.1, 0.0),
    ((0.05, 0.3, 2.0), 14.3, -23.1, -0.5, 0.0),
    ((0.25, 0.632, 1.0), 14.4, math.inf, -6.1, 0.0),
]


@pytest.mark.parametrize(("setting", "none", "ding", "badodab", "here"), FIGURES)
def test_figures_of_the_page(setting, none, ding, badodab, here):
    eta, alpha, V = setting
    rules = [
        (Rule(baoab.update, sghmc.SGHMCState), none),
        (EULER_THERMOSTAT, ding),
        (Rule(leimkuhler_and_shangs, sgnht.SGNHTState), badodab),
        (RULE, here),
    ]
    found = [100 * variance_bias(rule, eta, 1.0, V, friction=alpha) for rule, _ in rules]
    print(setting, np.round(found, 1))
    for bias, (_, expected) in zip(found, rules, strict=True):
        assert bias == pytest.approx(expected, abs=0.05)


def many_chains(d, eps, V, chains, n, gradient=np.negative):
    """Mean variance of θ, and its error, over many short chains at the critical friction."""
    rng = np.random.default_rng(d)
    A = 2.0  # 1 − exp(−2ε) is critical
    theta, r = rng.standard_normal((2, chains, d))
    zeta, sums = np.full((chains, 1), A + eps * V / 2), np.zeros(chains)
    for t in range(n + n // 4):
        theta, r, zeta = transcribed(
            theta,
            r,
            zeta,
            rng.standard_normal((chains, d)),
            lambda x: gradient(x) + math.sqrt(V) * rng.standard_normal((chains, d)),
            eps=eps,
            A=A,
            T=1.0,
        )
        if t >= n // 4:
            sums += np.mean(theta**2, axis=1)
    sums /= n
    return sums.mean(), sums.std() / math.sqrt(chains)


def test_with_ten_unknowns_the_moving_thermostat_costs_a_thousandth():
    variance, error = many_chains(10, 0.5, 0.5, 1500, 800)
    assert error < 0.001
    assert abs(variance - 1) < 0.001 + 4 * error


# What the page says of few unknowns: ε, d -> bias of the variance in percent, at most.
FEW = {(0.5, 1): 1.2, (0.5, 2): 0.6, (0.5, 10): 0.12, (0.125, 1): 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("V", [0.0, 0.5])
def test_bias_of_few_unknowns_is_of_order_one_over_d_and_one_in_eps(V):
    bias = {}
    for eps, d in [*FEW, (0.25, 1), (0.5, 400)]:
        variance, error = many_chains(d, eps, V, max(100, 40_000 // d), 2500)
        bias[eps, d] = 100 * (variance - 1), 100 * error
        print(V, eps, d, "{:.2f} ± {:.2f} %".format(*bias[eps, d]))
    for place, most in FEW.items():
        value, error = bias[place]
        assert abs(value) < most + 4 * error
    assert bias[0.5, 1][0] > 10 * bias[0.5, 1][1]
    assert abs(bias[0.5, 2][0] / bias[0.5, 1][0] - 0.5) < 0.15
    assert abs(bias[0.5, 400][0]) < 4 * bias[0.5, 400][1]
    assert abs(math.log2(bias[0.25, 1][0] / bias[0.125, 1][0]) - 1) < 0.6


@pytest.mark.slow
def test_bias_on_another_target_is_of_order_two_in_eps_or_better():
    found = []
    for eps in (1.0, 0.5**0.5, 0.5):
        variance, error = many_chains(400, eps, 0.0, 400, 1500, lambda x: -2 * np.tanh(x))
        found.append(100 * (variance / (math.pi**2 / 12) - 1))
        print(eps, f"{found[-1]:.2f} ± {100 * error / (math.pi**2 / 12):.2f} %")
    assert found == pytest.approx([-1.34, -0.46, -0.13], abs=0.12)  # as the page has it
    assert (2 * np.log2([found[0] / found[1], found[1] / found[2]]) > 2).all()
