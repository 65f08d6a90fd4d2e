"""Traits of many persons: the joint mode isn't where their mass is.

With a factor model's residual standard deviation at zero, traits that fit one item exactly have an
unbounded density.
"""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from modes import FAST, QUIET
from scipy.optimize import approx_fprime, minimize
from targets import gradient_of

from pymc_sghmc import SGHMC
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.tuning.curvature import depends_on_few
from pymc_sghmc.tuning.posterior_fit import fit_posterior

PERSONS = 1100
LOADINGS = np.array([0.9, 0.7, 0.5, 0.8])
SD = 0.6
ITEMS = LOADINGS.size


def answers():
    rng = np.random.default_rng(0)
    traits = rng.normal(size=PERSONS)
    return np.outer(traits, LOADINGS) + rng.normal(0, SD, (PERSONS, ITEMS))


def factor_model(form):
    """One factor, with a row for each person or for each answer."""
    y = answers()
    with pm.Model() as model:
        loadings = pm.HalfNormal("loadings", 1, shape=ITEMS)
        sd = pm.HalfNormal("sd", 1, shape=ITEMS)
        traits = pm.Normal("traits", 0, 1, shape=PERSONS)
        if form == "a row for each person":
            pm.Normal("y", traits[:, None] * loadings, sd, observed=y)
        else:
            person = pm.Data("person", np.repeat(np.arange(PERSONS), ITEMS))
            item = pm.Data("item", np.tile(np.arange(ITEMS), PERSONS))
            pm.Normal("y", traits[person] * loadings[item], sd[item], observed=y.ravel())
    return model


def network():
    """Weights that are all zero where a search starts, where no slope leads away."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 30))
    with pm.Model() as model:
        first = pm.Normal("first", 0, 1, shape=(30, 40))
        second = pm.Normal("second", 0, 1, shape=40)
        pm.Normal("y", pt.tanh(pt.dot(X, first)) @ second, 1, observed=rng.normal(size=500))
    return model


def many_predictors():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, PERSONS))
    with pm.Model() as model:
        slopes = pm.Normal("slopes", 0, 0.1, shape=PERSONS)
        pm.Bernoulli("y", logit_p=pt.dot(X, slopes), observed=rng.integers(2, size=500))
    return model


def random_walk():
    with pm.Model() as model:
        steps = pm.GaussianRandomWalk("w", 0, 0.1, init_dist=pm.Normal.dist(), steps=PERSONS)
        pm.Normal("y", steps, 1, observed=np.zeros(PERSONS + 1))
    return model


def areas():
    """Of a line of areas, whose sum is held near zero: each depends on all others by it."""
    neighbours = np.diag(np.ones(PERSONS - 1), 1)
    with pm.Model() as model:
        phi = pm.ICAR("phi", W=neighbours + neighbours.T)
        pm.Normal("y", phi, 1, observed=np.zeros(PERSONS))
    return model


def position_of(model):
    point = model.initial_point()
    return Unknowns(model.continuous_value_vars, point).ravel(point)


FORMS = ["a row for each person", "a row for each answer"]


@pytest.mark.parametrize(
    ("make", "few"),
    [
        (lambda: factor_model(FORMS[0]), True),
        (lambda: factor_model(FORMS[1]), True),
        (random_walk, True),
        (areas, True),
        (network, False),
        (many_predictors, False),
    ],
    ids=[*FORMS, "random walk", "areas", "network", "many predictors"],
)
def test_which_parameters_depend_on_few_others(make, few):
    model = make()
    assert depends_on_few(gradient_of(model).passes, position_of(model)) == few


@pytest.mark.parametrize("form", FORMS)
def test_a_fit_has_the_law_that_answers_leave_to_traits(form):
    """Normal, of known mean and variance given loadings and residual standard deviations."""
    model = factor_model(form)
    passes = gradient_of(model, 100 if "answer" in form else None).passes
    fit = fit_posterior(passes, position_of(model))
    assert fit.is_mode
    places = passes.density.unknowns.places
    loadings = np.exp(fit.mean[places["loadings_log__"]])
    sd = np.exp(fit.mean[places["sd_log__"]])
    precision = 1 + np.square(loadings / sd).sum()
    means = answers() @ (loadings / np.square(sd)) / precision
    np.testing.assert_allclose(
        fit.mean[places["traits"]] * precision**0.5, means * precision**0.5, atol=0.1
    )
    scales = fit.metric.diagonal().scales[places["traits"]]
    np.testing.assert_allclose(scales * precision**0.5, 1, atol=0.05)
    np.testing.assert_allclose(sd, SD, rtol=4.5 * (2 * PERSONS) ** -0.5 * 2)


@pytest.mark.slow
def test_where_no_fit_converges_chains_take_all_rows_and_stay_with_it():
    """By the noise around such a fit, two standard deviations were 60 % too wide."""
    side = 40
    line = np.diag(np.ones(side - 1), 1)
    line += line.T
    neighbours = np.kron(line, np.eye(side)) + np.kron(np.eye(side), line)
    along = np.linspace(0, 3, side)
    field = np.outer(np.sin(along), np.cos(along)).ravel()
    y = np.random.default_rng(0).poisson(np.exp(1 + np.tile(field, 5)))
    with pm.Model():
        area = pm.Data("area", np.tile(np.arange(side**2), 5))
        scale = pm.HalfNormal("scale", 1)
        phi = pm.ICAR("phi", W=neighbours)
        pm.Poisson("y", pt.exp(pm.Normal("a", 0, 2) + scale * phi[area]), observed=y)
        tuner = SGHMC(compile_kwargs=FAST).tuner
    setups = tuner.setups
    assert not setups.fit.is_mode
    assert tuner.takes_all_rows(tuner.prepare())
    mean = setups.fit.mean + 0.01
    assert not setups.move(mean, 2, is_exact=True)
    assert setups.move(mean, 2)  # of a chain whose steps take minibatches
    assert not setups.fit.is_mode


def log_posterior(position, covariance):
    """Of the logarithms of loadings and of residual sds, (..., 2J), without traits."""
    numbers = np.exp(position)
    loadings, sd = np.split(numbers, 2, axis=-1)
    implied = loadings[..., :, None] * loadings[..., None, :]
    implied = implied + np.square(sd)[..., None] * np.eye(ITEMS)
    fitted = np.linalg.solve(implied, np.broadcast_to(covariance, implied.shape))
    deviance = np.linalg.slogdet(implied)[1] + np.trace(fitted, axis1=-2, axis2=-1)
    return -0.5 * PERSONS * deviance - 0.5 * np.square(numbers).sum(-1) + position.sum(-1)


def exact_moments(n_draws=40_000):
    """Mean and sd of loadings and residual sds, by importance sampling without traits.

    From a t with 5 degrees of freedom around the mode.
    """
    y = answers()
    covariance = y.T @ y / PERSONS

    def energy(x):
        return -log_posterior(x, covariance)

    mode = minimize(energy, np.log(np.r_[LOADINGS, np.full(ITEMS, SD)]), method="BFGS").x
    slopes = [
        (approx_fprime(mode + step, energy, 1e-6) - approx_fprime(mode - step, energy, 1e-6)) / 2e-3
        for step in 1e-3 * np.eye(mode.size)
    ]
    factor = np.linalg.cholesky(np.linalg.inv((np.array(slopes) + np.array(slopes).T) / 2))
    rng = np.random.default_rng(1)
    degrees = 5
    z = rng.standard_normal((n_draws, mode.size))
    z /= np.sqrt(rng.chisquare(degrees, (n_draws, 1)) / degrees)
    draws = mode + z @ factor.T
    proposed = -0.5 * (degrees + mode.size) * np.log1p(np.square(z).sum(1) / degrees)
    log_weights = log_posterior(draws, covariance) - proposed
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    effective = 1 / np.square(weights).sum()
    mean = weights @ np.exp(draws)
    sd = np.sqrt(weights @ np.square(np.exp(draws) - mean))
    return mean, sd, effective


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_loadings_are_right_beside_a_posterior_without_traits(form):
    mean, sd, effective = exact_moments()
    assert effective > 10_000
    with factor_model(form):
        step = SGHMC(compile_kwargs=FAST)
        idata = pm.sample(1000, tune=1000, chains=4, cores=2, step=step, random_seed=1, **QUIET)
    draws = np.concatenate(
        [idata.posterior[name].to_numpy().reshape(4000, ITEMS) for name in ("loadings", "sd")],
        axis=1,
    )
    z = (draws - mean) / sd
    n_batches = 40  # of 100 successive draws
    means = z.reshape(n_batches, -1, z.shape[1]).mean(axis=1)
    error = means.std(axis=0, ddof=1) / n_batches**0.5
    assert error.max() < 0.06
    assert (np.abs(z.mean(axis=0)) < 4.5 * np.hypot(error, effective**-0.5)).all()
    assert (np.abs(z.std(axis=0) - 1) < 0.05 + 4.5 * error).all()
