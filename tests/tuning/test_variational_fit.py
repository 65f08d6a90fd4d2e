"""The centre of mass: exact where that is known, found where no mode is, and refused where there is none."""

import math

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from modes import QUIET, C
from scipy.optimize import minimize
from scipy.special import logsumexp
from targets import gradient_of

from pymc_sghmc import SGHMC
from pymc_sghmc.gradients.metric import Dense
from pymc_sghmc.tuning import posterior_fit
from pymc_sghmc.tuning import variational_fit as module
from pymc_sghmc.tuning.curvature import SUBSET_ROWS, CountedPasses
from pymc_sghmc.tuning.gaussian_draws import ROUGH, is_rough
from pymc_sghmc.tuning.posterior_fit import fit_posterior
from pymc_sghmc.tuning.variational_fit import (
    FLAT,
    NEAR,
    Walled,
    fit_around,
    standard_draws,
    variational_fit,
)

GROUPS, ROWS, SIGMA = 40, 5, 1.0  # of the hierarchical model
rng = np.random.default_rng(4)
MEANS = rng.normal(1.0, 0.8, GROUPS) + rng.normal(0, SIGMA / ROWS**0.5, GROUPS)  # of the rows


def counted_of(model, batch_size=None):
    return CountedPasses(gradient_of(model, batch_size).passes)


def potential(energy, d):
    with pm.Model() as model:
        x = pm.Flat("x", shape=d)
        pm.Potential("energy", -energy(x))
    return model


def hierarchy(form):
    """Rows of 40 groups whose means alone matter: μ + u_g, u ~ N(0, τ)."""
    residuals = rng.standard_normal((ROWS, GROUPS))
    residuals -= residuals.mean(axis=0)
    with pm.Model() as model:
        mu, log_tau = pm.Normal("mu", 0, 2), pm.Normal("log_tau", 0, 1)
        tau = pm.math.exp(log_tau)
        group = np.tile(np.arange(GROUPS), ROWS)
        u = pm.Normal("u", 0, tau, shape=GROUPS) if form == "centred" else None
        u = tau * pm.Normal("z", 0, 1, shape=GROUPS) if u is None else u
        pm.Normal("y", mu + u[group], SIGMA, observed=(MEANS + residuals).ravel())
    return model


def exact_log_tau():
    """Mean and sd of log τ, by quadrature over it: all else is Gaussian."""
    x = np.linspace(-6, 3, 4001)
    variance = np.exp(2 * x) + SIGMA**2 / ROWS
    precision = GROUPS / variance + 1 / 4
    mean = MEANS.sum() / variance / precision
    logp = -0.5 * x**2 - 0.5 * GROUPS * np.log(variance) - 0.5 * np.log(precision)
    logp += -0.5 * np.square(MEANS).sum() / variance + 0.5 * precision * mean**2
    p = np.exp(logp - logsumexp(logp))
    mean = p @ x
    return mean, math.sqrt(p @ (x - mean) ** 2)


def test_gaussian_is_found_exactly():
    A = np.random.default_rng(1).standard_normal((5, 5))
    scales = np.geomspace(1e-2, 1e2, 5)
    H, mean = (A @ A.T + np.eye(5)) / np.outer(scales, scales), 3 * scales
    found = variational_fit(
        counted_of(potential(lambda x: 0.5 * (x - mean) @ H @ (x - mean), 5)), np.zeros(5)
    )
    L = found.metric.factor
    assert found.is_mode
    np.testing.assert_allclose(L, np.tril(L))
    np.testing.assert_allclose(L.T @ H @ L, np.eye(5), atol=1e-5)
    shift = found.mean - mean
    assert math.sqrt(shift @ H @ shift) < 1e-3


def test_ridge_is_found_though_single_unknowns_see_little_of_it():
    # an intercept that a hundred effects make up for: 2.6 times as wide as while they stay
    d, rng = 101, np.random.default_rng(3)
    effects = np.column_stack([np.ones(d - 1), np.eye(d - 1)])
    precision = 4 * effects.T @ effects + np.diag([0.0, *np.full(d - 1, 0.7)])
    covariance, centre = np.linalg.inv(precision), rng.standard_normal(d)
    assert covariance[0, 0] * precision[0, 0] > 1 / FLAT / 3
    counted = counted_of(potential(lambda x: 0.5 * (x - centre) @ precision @ (x - centre), d))
    found = variational_fit(counted, np.zeros(d))
    assert found.is_mode
    np.testing.assert_allclose(
        found.metric.factor @ found.metric.factor.T, covariance, rtol=1e-4, atol=1e-6
    )


def test_skewed_density_has_the_mean_curvature_and_no_mean_gradient():
    # Of exp(ax − eˣ) the best Gaussian has E eˣ = a as its precision and for its mean, here with the
    # mean over draws ±z for E; as their number grows, log a − 1/(2a).
    a = np.array([1.0, 40.0])
    model = potential(lambda x: pm.math.exp(x).sum() - (a * x).sum(), 2)
    found = variational_fit(counted_of(model), np.zeros(2))
    sd, z = a**-0.5, np.random.default_rng(0).standard_normal((module.N_PAIRS, 2))
    mean = np.log(a) - np.log(np.cosh(sd * z).mean(axis=0))
    assert found.is_mode
    assert (np.abs(found.mean - mean) < NEAR * sd).all()
    np.testing.assert_allclose(np.diag(found.metric.factor), sd, rtol=0.1)
    assert np.abs(mean - np.log(a))[0] > 2 * NEAR * sd[0]  # the mode is elsewhere


@pytest.mark.parametrize(
    "energy",
    [
        lambda x: 0.5 * (x[0] - 3) ** 2,  # flat in one direction
        lambda x: -0.5 * x[0] ** 2 + x[1] ** 2,  # without an end
        lambda x: x[0] ** 2 / 18 + 4.5 * x[0] + 0.5 * pt.exp(-x[0]) * (x[1:] ** 2).sum(),
    ],
    ids=["flat", "improper", "funnel"],
)
def test_what_is_no_gaussian_is_not_taken_for_one(energy):
    found = variational_fit(counted_of(potential(energy, 10)), np.full(10, 0.1))
    assert found is None or not found.is_mode


@pytest.mark.parametrize(
    ("of_the_rest", "is_none"),
    [(lambda x, others: 0.0 * x, True), (lambda x, others: 0.5 * x**2 + 0.3 * x * others, False)],
    ids=["flat", "pushed by others"],
)
def test_a_direction_in_which_no_draw_goes_far_is_walked_along(of_the_rest, is_none):
    """Whether a small force there is none, or a large one comes from what others do."""
    d = 60
    z = standard_draws(counted_of(potential(lambda x: 0.5 * (x**2).sum(), d)), d).z
    spread = np.sqrt(np.square(z).mean(axis=0))
    i = int(spread.argmin())
    assert spread[i] < ROUGH / 2  # a force that isn't there passes for little roughness
    j, k = np.argsort(np.abs(spread - 1))[:2]

    def energy(x):
        return 0.5 * (x**2).sum() - 0.5 * x[i] ** 2 + of_the_rest(x[i], x[j] * x[k])

    counted = counted_of(potential(energy, d))
    unit = Dense(np.eye(d))
    assert is_rough(counted, np.zeros(d), unit, z) == is_none


def test_nothing_finite_is_nothing_to_go_by():
    model = potential(lambda x: pt.log(x - 100).sum() + x.sum(), 2)
    assert variational_fit(counted_of(model), np.zeros(2)) is None


@pytest.mark.parametrize("form", ["centred", "non-centred"])
def test_groups_have_their_centre_in_the_bulk(form):
    counted = counted_of(hierarchy(form))
    start = np.zeros(GROUPS + 2)
    found = variational_fit(counted, start)
    mean, sd = exact_log_tau()
    assert found.is_mode
    assert abs(found.mean[1] - mean) < 0.5 * sd  # the nearest Gaussian's mean isn't quite it
    assert 0.6 < np.linalg.norm(found.metric.factor[1]) / sd < 1.3


def test_mean_of_a_subset_is_brought_to_that_of_all_rows():
    n_rows = 8 * SUBSET_ROWS
    y = np.random.default_rng(5).normal([1.0, -2.0], [0.5, 3.0], size=(n_rows, 2))
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 10, shape=2)
        pm.Normal("y", mu, np.array([0.5, 3.0]), observed=y)
    counted = counted_of(model, 100)
    found = variational_fit(counted, np.zeros(2))
    sd = np.array([0.5, 3.0]) / math.sqrt(n_rows)
    assert (np.abs(found.mean - y.mean(axis=0)) < NEAR * sd).all()
    parts = module._shares(counted, 8, 2, fewest=8)
    rows = np.concatenate([share[0] for share in parts])
    assert len({len(share[0]) for share in parts}) <= 2
    np.testing.assert_array_equal(np.sort(rows), counted.subset[0])
    parts = module._shares(counted, 8, SUBSET_ROWS // 25, fewest=4)  # in pairs ±z
    assert len({share[0].tobytes() for share in parts}) == 4
    assert [share[0].tobytes() for share in parts[:4]] == [s[0].tobytes() for s in parts[4:]]
    assert module._shares(counted, 8, SUBSET_ROWS // 25, fewest=8) == [counted.subset] * 8
    assert (
        module._shares(counted, 8, 10_000, fewest=4) == [counted.subset] * 8
    )  # too few for each unknown


def test_a_search_without_a_mode_ends_at_the_centre_of_mass(monkeypatch):
    passes = gradient_of(hierarchy("centred"), None).passes
    found = fit_posterior(passes, np.zeros(GROUPS + 2))
    mean, sd = exact_log_tau()
    assert found.is_mode
    assert abs(found.mean[1] - mean) < 0.5 * sd
    # without it there is none
    monkeypatch.setattr(posterior_fit, "variational_fit", lambda counted, start: None)
    assert not fit_posterior(passes, np.zeros(GROUPS + 2)).is_mode


@pytest.mark.slow  # in other coordinates it is held to the same in test_centring
def test_untouched_sampler_is_right_on_centred_groups():
    with hierarchy("centred"):
        step = SGHMC(batch_size=50, centring=None, compile_kwargs=C)
        idata = pm.sample(1000, tune=500, chains=4, cores=2, step=step, random_seed=3, **QUIET)
    mean, sd = exact_log_tau()
    z = (idata.posterior["log_tau"].to_numpy() - mean) / sd
    excess = step.tuner.settings.target_bias  # at most
    assert error(z) < 0.05
    assert abs(z.mean()) < 4.5 * error(z)
    assert -4.5 * error(z**2) < np.mean(z**2) - 1 < excess + 4.5 * error(z**2)


def error(x):
    return float(np.squeeze(az.mcse(x)))


@pytest.mark.parametrize("at", [-10.7, -6.0, -4.0])
@pytest.mark.parametrize("sd", [0.5, 1.0, 2.0])
def test_a_fit_where_log_p_hardly_bends_keeps_its_width(at, sd):
    """At the mean of draws that went far into the tail of the logarithm of a scale, say.

    Wider and wider Gaussians reach the steep side at last. One as wide as that is curved was up to
    two million times too narrow, and the chain that took its steps by it didn't move any more.
    """
    with pm.Model() as model:
        a = pm.Flat("a", shape=2)
        pm.Potential("half_normal", (a - pm.math.exp(2 * a) / 2).sum())
    counted = CountedPasses(gradient_of(model, None).passes)
    fit = fit_around(counted, np.full(2, at), Dense(sd * np.eye(2)))
    assert not fit.is_mode
    assert np.diag(fit.metric.factor).min() >= sd / 2
    at_mean = fit_around(counted, np.zeros(2), Dense(sd * np.eye(2)))
    assert at_mean.is_mode
    # by eight draws; log p is curved by 2 there, and by 2e^(2a) around it
    np.testing.assert_allclose(np.diag(at_mean.metric.factor), 0.6, atol=0.1)


def test_a_search_goes_on_beside_a_wall():
    """L-BFGS ends at a wall as high as numbers go, as its line search then hardly moves."""

    def energy(x):
        with np.errstate(invalid="ignore"):
            return float(x[0] - 3 * np.log(x[0])), 1 - 3 / x  # least at 3, and no number below 0

    def high(x):
        value, slope = energy(x)
        return (value, slope) if math.isfinite(value) else (1e100, 0 * slope)

    def found(function):
        return minimize(function, [10.0], jac=True, method="L-BFGS-B").x

    np.testing.assert_allclose(found(Walled(energy)), 3.0, rtol=1e-3)
    assert found(high) > 4  # the test can fail


def test_a_fit_goes_on_beside_a_wall():
    """It ended after one step, 0.7 from where it began."""
    counted = counted_of(potential(lambda x: (x - 3 * pm.math.log(x)).sum(), 3))
    start = np.full(3, 30.0)
    fit = module.mean_field(counted, start)
    z = module.standard_draws(counted, 3).z
    slope = np.mean(1 - 3 / (fit.mean + fit.sds * z), axis=0)  # 0.9 at the start
    np.testing.assert_allclose(slope, 0.0, atol=0.02)
