"""Skewed posteriors: how far out chains come, what is stable there, and what is chosen by it."""

import tracemalloc

from types import SimpleNamespace

import arviz as az
import numpy as np
import pymc as pm
import pytest

from modes import FAST
from scipy.special import expit, log_expit
from scipy.stats import truncnorm

from pymc_sghmc import SGHMC
from pymc_sghmc.gradients.metric import Diagonal
from pymc_sghmc.tuning import tuner as tuner_module
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.gaussianity import (
    EVER_REACHED,
    FARTHEST,
    STEADY,
    STRIDE,
    far_out,
    stable_along_scales,
    stable_for_effects,
)


class LogOfGamma:
    """The density of the logarithm of a Gamma(k, k) variable beside a Normal one."""

    data = SimpleNamespace(n_at_hand=[1])

    def __init__(self, k):
        self.k = k

    def log_density(self, x, rows):
        a, b = x
        return self.k * (a - np.exp(a)) - b**2 / 2, np.array([self.k * (1 - np.exp(a)), -b])

    def fit(self):
        return GaussianFit(
            mean=np.zeros(2), metric=Diagonal(np.array([self.k**-0.5, 1.0])), is_mode=True, passes=0
        )


@pytest.mark.parametrize("finds_more", [True, False])
@pytest.mark.parametrize("k", [1.0, 2.0, 4.0, 9.0])
def test_steps_are_stable_wherever_a_skewed_posterior_is_reached(k, finds_more):
    """That of k = 9 has at 2 sds no more than 1.42 times the force of a Gaussian, at 4 sds 2.1."""
    posterior = LogOfGamma(k)
    found = far_out(posterior, posterior.fit(), [] if finds_more else [0], finds_more)
    right = max(found.edges, key=lambda edge: edge.at)
    sd = k**-0.5
    x = right.at * sd
    fall = k * (np.exp(x) - 1 - x)
    assert fall < EVER_REACHED
    assert k * (np.exp(x + 0.5 * sd) - 1 - x - 0.5 * sd) >= EVER_REACHED  # one stride farther
    np.testing.assert_allclose(right.force, k * (np.exp(x) - 1) * sd, rtol=1e-10)
    stable = STEADY / np.exp(x)
    if finds_more:
        stable = min(stable, MAX_LEARNING_RATE)
    np.testing.assert_allclose(found.largest_step, stable, rtol=5e-3)


def test_a_posterior_that_is_near_a_gaussian_has_no_edges():
    posterior = LogOfGamma(100.0)
    assert far_out(posterior, posterior.fit(), [0, 1]).edges == []
    assert far_out(posterior, posterior.fit(), []) == (np.inf, [])
    assert far_out(posterior, posterior.fit(), [], finds_more=True) == (np.inf, [])


def test_steps_are_no_longer_than_usual_where_a_posterior_is_skewed_a_little():
    """Long ones are for posteriors that are near a Gaussian as far as chains come."""
    posterior = LogOfGamma(16.0)
    found = far_out(posterior, posterior.fit(), [0], finds_more=True)
    assert found == (MAX_LEARNING_RATE, [])


class Rounded(LogOfGamma):
    """The same, as a sum of numbers that grow without bounds on its flat side."""

    def log_density(self, x, rows):
        logp, gradient = super().log_density(x, rows)
        error = 1e-3 * np.exp(2 * max(0, -x[0] - 6))
        return logp + error * np.sin(1e6 * x[0]), gradient


def test_nothing_is_believed_of_places_where_log_p_is_rounded():
    sd = 0.5**-0.5
    [exact, found] = (
        sd * min(edge.at for edge in far_out(posterior, posterior.fit(), [0], True).edges)
        for posterior in (LogOfGamma(0.5), Rounded(0.5))
    )
    assert exact < -20
    assert -11 < found < -5


def test_steps_are_stable_in_all_directions_where_a_scale_is_far_out():
    """Another direction is e⁻ᵃ times as curved as at the mean, which the way out doesn't show."""
    posterior = LogOfGamma(1.0)
    places = np.arange(STRIDE, FARTHEST, STRIDE)
    lowest = max(x for x in places if np.exp(-x) - 1 + x < EVER_REACHED)

    def limit(largest_curvature):
        return stable_along_scales(posterior, posterior.fit(), [0, 1], largest_curvature)

    np.testing.assert_allclose(limit(lambda x: np.exp(-x[0])), STEADY / np.exp(lowest), rtol=1e-10)
    assert limit(lambda x: np.nan) == np.inf  # nothing is known of such a place
    assert stable_along_scales(posterior, posterior.fit(), [], lambda x: 9.0) == np.inf
    gaussian = LogOfGamma(100.0)
    assert stable_along_scales(gaussian, gaussian.fit(), [0, 1], lambda x: 9.0) == np.inf


class ScaleAndEffects(LogOfGamma):
    """Such a density beside those of many Normal ones."""

    def log_density(self, x, rows):
        logp, slope = super().log_density(x[:2], rows)
        return logp - np.square(x[2:]).sum() / 2, np.r_[slope, -x[2:]]


def test_a_scale_of_many_effects_takes_no_matrix():
    n_effects = 10_000
    posterior = ScaleAndEffects(1.0)
    mean = np.zeros(2 + n_effects)
    fit = GaussianFit(mean=mean, metric=Diagonal(np.ones(mean.size)), is_mode=True, passes=0)
    tracemalloc.start()
    found = far_out(posterior, fit, [0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.edges
    assert peak < 100 * mean.nbytes


class FlatBetweenWalls:
    """N(0, 1) in all directions but the first, which is flat up to rows of one outcome on a side.

    As the coefficient of a rare class without exceptions, under a wide prior.
    """

    data = SimpleNamespace(n_at_hand=[1])
    n_rows, slope = 6, 40.0

    def __init__(self, *walls):
        self.walls = walls

    def log_density(self, x, rows):
        logp, grad = -np.square(x[1:]).sum() / 2, -x
        grad[0] = 0.0
        for wall in self.walls:
            beyond = np.sign(wall) * self.slope * (x[0] - wall)
            logp -= self.n_rows * np.logaddexp(0, beyond)
            grad[0] -= np.sign(wall) * self.n_rows * self.slope * expit(beyond)
        return logp, grad

    def far_out(self):
        mean = np.zeros(5)
        fit = GaussianFit(mean, metric=Diagonal(np.ones(5)), is_mode=True, passes=0)
        return far_out(self, fit, [], finds_more=True)


@pytest.mark.parametrize("walls", [[-0.7], [0.7], [-0.7, 4.8], [-5.3, 6.1]])
def test_walls_between_two_looks_are_seen(walls):
    """From no force to 240 within a tenth of a standard deviation: half of one lies between looks."""
    found = FlatBetweenWalls(*walls).far_out()
    assert found.largest_step < STEADY / (6 * 40 / STRIDE)
    for wall in walls:
        [at] = [edge.at for edge in found.edges if edge.at * wall > 0]
        reached = wall + np.sign(wall) * EVER_REACHED / (6 * 40)
        assert abs(at - reached) < STRIDE / 16


def test_what_is_flat_without_walls_needs_no_shorter_steps():
    assert FlatBetweenWalls().far_out().largest_step == np.inf


def effects_limit(k):
    """Limit for effects with such densities of the logarithms of Gamma(k, k) variables."""
    mean = np.zeros(k.size)
    fit = GaussianFit(mean=mean, metric=Diagonal(k**-0.5), is_mode=True, passes=0)
    columns = [np.arange(k.size)]
    return stable_for_effects(lambda x: k * (1 - np.exp(x)), fit, fit.metric, columns)


@pytest.mark.parametrize("k", [1.0, 2.0, 4.0])
def test_steps_are_stable_wherever_a_single_effect_is_skewed(k):
    """Of hundreds that are moved together, as far as the one that is skewed comes."""
    sd = k**-0.5
    places = np.arange(0.0, 8.0, STRIDE) * sd
    reached = places[k * (np.exp(places) - 1 - places) < EVER_REACHED]
    found = effects_limit(np.r_[k, np.full(300, 100.0)])
    assert STEADY / np.exp(reached[-1]) <= found <= STEADY / np.exp(reached[-2])
    assert effects_limit(np.full(300, 100.0)) == np.inf


def poisson_counts_as_negative_binomial():
    """A dispersion that only the prior keeps from infinity."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20_000, 2))
    y = rng.poisson(np.exp(0.5 + X @ [0.3, -0.2]))
    a = pm.Normal("a", 0, 2)
    b = pm.Normal("b", 0, 1, shape=2)
    alpha = pm.Exponential("alpha", 0.01)
    pm.NegativeBinomial("y", mu=pm.math.exp(a + X @ b), alpha=alpha, observed=y)


def test_minibatches_have_rows_enough_for_the_tails_of_a_skewed_parameter(monkeypatch):
    """With 50 rows, which noise near the mode allows, chains are lost after some 1,500 draws.

    In a chain's own coordinates, which are all that models with other graphs have.
    """
    monkeypatch.setattr(tuner_module, "see_limits", lambda setups, second: None)
    with pm.Model():
        poisson_counts_as_negative_binomial()
        step = SGHMC(compile_kwargs=FAST)
    tuner = step.tuner
    assert tuner.setup.skewed == (3,)
    noise = tuner.setup.noise
    tuning = tuner.chooser.first()
    tuner.gradient.data.resize(None)
    [n] = tuner.gradient.data.noisy_batch_sizes
    assert noise.second_order_far * n / tuning.rows <= 5.0
    assert noise.second_order_far * n / 50 > 5.0


@pytest.mark.slow
def test_a_dispersion_without_an_upper_end_is_sampled_to_the_end():
    with pm.Model():
        poisson_counts_as_negative_binomial()
        idata = pm.sample(step=SGHMC(), random_seed=12, progressbar=False, chains=4, cores=2)
    assert idata.posterior.sizes["draw"] == 1000
    assert np.isfinite(idata.posterior["alpha"].values).all()
    assert float(az.rhat(idata)["alpha"]) < 1.01


@pytest.mark.parametrize("shift", [-2.0, pytest.param(-0.5, marks=pytest.mark.slow)])
def test_a_parameter_at_its_bound_has_the_truncated_normal(shift):
    """Its estimate is ``shift`` standard errors below the bound."""
    n = 4000
    sd = n**-0.5
    rng = np.random.default_rng(4)
    y = rng.normal(0, 1, n)
    y += shift * sd - y.mean()
    with pm.Model():
        a = pm.Uniform("a", 0, 1)
        pm.Normal("y", a, 1, observed=y)
        step = SGHMC()
        idata = pm.sample(500, tune=500, step=step, random_seed=1, progressbar=False, chains=2,
                          cores=1, compute_convergence_checks=False)  # fmt: skip
    draws = idata.posterior["a"].values / sd
    exact = truncnorm(-shift, np.inf, loc=shift)
    ess = float(az.ess(idata)["a"])
    error = draws.std() / np.sqrt(ess)
    assert abs(draws.mean() - exact.mean()) < 5 * error
    [_, _, _, kurtosis] = exact.stats("mvsk")
    sd_error = exact.std() * np.sqrt((kurtosis + 2) / (4 * ess))
    assert abs(draws.std() - exact.std()) < 5 * sd_error + 0.05 * exact.std()


@pytest.mark.slow
def test_a_mode_is_found_where_few_rows_have_an_event():
    """Of 19 events in 100,000 rows the rows that the fit looks at first have 7."""
    rng = np.random.default_rng(7)
    n = 100_000
    X = np.column_stack([np.ones(n), rng.normal(size=(n, 3))])
    y = rng.binomial(1, 1 / (1 + np.exp(-X @ [-8.8, 0.8, -0.5, 0.3])))
    with pm.Model():
        beta = pm.Normal("beta", 0, [10, 1, 1, 1], shape=4)
        pm.Bernoulli("y", logit_p=pm.math.dot(X, beta), observed=y)
        step = SGHMC()
    fit = step.tuner.setup.fit
    assert fit.is_mode
    p = 1 / (1 + np.exp(-X @ fit.mean))
    of_prior = np.diag([0.01, 1, 1, 1])
    covariance = np.linalg.inv((X * (p * (1 - p))[:, None]).T @ X + of_prior)
    slope = X.T @ (y - p) - of_prior @ fit.mean
    assert np.abs(covariance @ slope / np.sqrt(np.diag(covariance))).max() < 0.1
    ratio = np.sqrt(np.diag(fit.metric.matrix() @ fit.metric.matrix().T) / np.diag(covariance))
    assert ratio.max() < 2**0.5
    assert ratio.min() > 2**-0.5


N_ROWS = 4000
IS_RARE = np.arange(N_ROWS) < 40  # a class of few rows
PRIOR = 8.0  # sd of its coefficient


def rare_class(n_events):
    """Logistic regression with a class of 40 rows, of which some have an event."""
    y = (np.arange(N_ROWS) % 5 == 0).astype(int)
    y[IS_RARE] = np.arange(40) < n_events
    with pm.Model() as model:
        a = pm.Normal("a", 0, 2)
        c = pm.Normal("c", 0, PRIOR)
        pm.Bernoulli("y", logit_p=a + c * IS_RARE, observed=y)
    return model


@pytest.mark.parametrize(("n_events", "skewed"), [(0, ["c"]), (10, [])])
def test_a_class_without_an_event_has_a_skewed_coefficient(n_events, skewed):
    """Only the prior ends its tail, where minibatches' noise was larger than the force back."""
    with rare_class(n_events):
        step = SGHMC(compile_kwargs=FAST)
    setup = step.tuner.setup
    unknowns = step.tuner.gradient.density.unknowns
    assert [unknowns.name_of(place) for place in setup.skewed] == skewed
    assert (setup.limits.far_out < MAX_LEARNING_RATE) == bool(skewed)


@pytest.mark.slow
def test_the_coefficient_of_a_class_without_an_event_is_right_by_quadrature():
    """Its sd was a fifth too large, with divergences and a temperature of 1.17."""
    a = np.linspace(-2, -0.8, 401)[:, None]
    c = np.linspace(-60, 10, 4001)
    n_others = N_ROWS - 40
    logp = n_others / 5 * a - n_others * np.logaddexp(0, a) - a**2 / 8
    logp = logp - 40 * np.logaddexp(0, a + c) - c**2 / (2 * PRIOR**2)
    p = np.exp(logp - logp.max()).sum(axis=0)
    p /= p.sum()
    mean = p @ c
    sd = np.sqrt(p @ np.square(c - mean))
    with rare_class(0):
        step = SGHMC(compile_kwargs={"mode": "NUMBA"})
        idata = pm.sample(2000, step=step, chains=4, cores=2, random_seed=1, progressbar=False)
    draws = idata.posterior["c"]
    error, error_of_sd = (
        float(np.squeeze(az.mcse(draws.to_numpy(), method=m))) for m in ("mean", "sd")
    )
    assert abs(float(draws.mean()) - mean) < 4.5 * error
    assert abs(float(draws.std()) - sd) < 4.5 * error_of_sd
    assert error_of_sd < 0.05 * sd


@pytest.mark.slow
@pytest.mark.parametrize("n_rare", [2, 6])
def test_a_rare_class_without_exceptions_has_the_posterior_that_the_prior_leaves(n_rare):
    """Of 10,000 rows; its coefficient is anything from some 3 to 100 (by quadrature)."""
    n, prior_sd = 10_000, 40.0
    rare = np.arange(n) < n_rare
    y = np.where(rare, 1, np.arange(n) % 4 == 0)
    with pm.Model():
        a, c = pm.Normal("a", 0, 2), pm.Normal("c", 0, prior_sd)
        pm.Bernoulli("y", logit_p=a + c * rare, observed=y)
        step = SGHMC(compile_kwargs={"mode": "NUMBA"})
        idata = pm.sample(step=step, random_seed=1, chains=4, cores=2, progressbar=False,
                          compute_convergence_checks=False)  # fmt: skip
    n_ones = y[~rare].sum()
    u, v = np.meshgrid(np.linspace(-1.3, -0.9, 81), np.linspace(-10, 250, 26001), indexing="ij")
    logp = n_ones * log_expit(u) + (n - n_rare - n_ones) * log_expit(-u) - u**2 / 8
    logp += n_rare * log_expit(u + v) - (v / prior_sd) ** 2 / 2
    p = np.exp(logp - logp.max())
    p /= p.sum()
    mean = (p * v).sum()
    draws = idata.posterior["c"].values
    assert draws.shape == (4, 1000)
    squares = np.square(draws - mean)
    for values, expected in ((draws, mean), (squares, (p * np.square(v - mean)).sum())):
        assert float(az.ess(values)) > 400
        assert abs(values.mean() - expected) < 4.5 * values.std() / np.sqrt(float(az.ess(values)))
