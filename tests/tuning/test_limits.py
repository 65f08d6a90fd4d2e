"""Posteriors that reach up to a limit of a parameter, where a likelihood becomes a simpler one."""

import arviz as az
import numpy as np
import pymc as pm
import pytest

from scipy.special import betaln, expit, gammaln, logit, logsumexp

from pymc_sghmc import SGHMC
from pymc_sghmc.tuning.gaussianity import Edge
from pymc_sghmc.tuning.limits import REACH, flat_sides

N = 10_000
IS_SECOND = np.arange(N) % 2 == 1  # of two groups of rows
TRIALS = 10


def edge(place, at):
    return Edge(place=place, direction=np.eye(3)[place], at=at, force=1.0)


@pytest.mark.parametrize(
    ("edges", "sides"),
    [
        ([edge(0, -3.0), edge(0, 38.0)], {0: 1.0}),
        ([edge(0, -30.0), edge(0, 2.0)], {0: -1.0}),
        ([edge(1, -3.0)], {1: 1.0}),
        ([edge(1, -12.0), edge(2, 3.0)], {1: -1.0, 2: -1.0}),
    ],
)
def test_posteriors_are_flat_where_an_edge_is_far_out_or_opposite_to_a_near_one(edges, sides):
    assert flat_sides(edges) == sides
    assert flat_sides(edges[::-1]) == sides


def test_the_last_entry_is_that_which_is_the_least_like_a_gaussian():
    edges = [edge(0, 40.0), edge(1, 1.1 * REACH), edge(2, -0.5 * REACH)]
    assert list(flat_sides(edges)) == [1, 2, 0]


def poisson_counts():
    return np.random.default_rng(3).poisson(np.where(IS_SECOND, 3.0, 1.5))


def negative_binomial():
    """Counts that are Poisson: α is anything from some 30 to infinity."""
    a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2)
    alpha = pm.HalfCauchy("alpha", 10)
    mu = pm.math.exp(a + b * IS_SECOND)
    pm.NegativeBinomial("y", mu=mu, alpha=alpha, observed=poisson_counts())


def of_negative_binomial(eta, phi, y):
    alpha = np.exp(phi)
    mu = np.exp(eta)
    shape = gammaln(y + alpha) - gammaln(alpha) - y * np.log(alpha + mu)
    return shape + y * eta - alpha * np.log1p(mu / alpha)


def zero_inflated():
    """Counts without an excess of zeros: the share ψ of the others is 1, or nearly so."""
    a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2)
    psi = pm.Beta("psi", 2, 2)
    mu = pm.math.exp(a + b * IS_SECOND)
    pm.ZeroInflatedPoisson("y", psi=psi, mu=mu, observed=poisson_counts())


def of_zero_inflated(eta, phi, y):
    mu = np.exp(eta)
    psi = expit(phi)
    if y == 0:
        return np.log1p(-psi + psi * np.exp(-mu))
    return np.log(psi) - mu + y * eta


def beta_binomial():
    """Numbers of events that are binomial: κ is anything up to infinity."""
    a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2)
    kappa = pm.HalfCauchy("kappa", 10)
    p = pm.math.sigmoid(a + b * IS_SECOND)
    y = np.random.default_rng(4).binomial(TRIALS, np.where(IS_SECOND, 0.4, 0.3))
    pm.BetaBinomial("y", n=TRIALS, alpha=p * kappa, beta=(1 - p) * kappa, observed=y)


def of_beta_binomial(eta, phi, y):
    kappa = np.exp(phi)
    p = expit(eta)
    alpha, beta = p * kappa, (1 - p) * kappa
    return betaln(y + alpha, TRIALS - y + beta) - betaln(alpha, beta)


def log_half_cauchy(phi):
    return phi - np.log1p((np.exp(phi) / 10) ** 2)


def log_beta_of_2_and_2(phi):
    return 2 * np.log(expit(phi)) + 2 * np.log(expit(-phi))


def by_quadrature(y, link, log_likelihood, log_prior, phi):
    """Means and variances of a, b and φ on a grid, by the counts of equal rows."""
    first, second = (link(y[is_second == IS_SECOND].mean()) for is_second in (False, True))
    grid = np.linspace(-0.09, 0.09, 61)
    a, b = first + grid, second - first + grid
    total = -(a[:, None, None] ** 2) / 8 - b[None, :, None] ** 2 / 8 + log_prior(phi)
    for is_second in (False, True):
        eta = (a[:, None] + b * is_second)[:, :, None]
        values, counts = np.unique(y[is_second == IS_SECOND], return_counts=True)
        for value, count in zip(values, counts, strict=True):
            total = total + count * log_likelihood(eta, phi, value)
    p = np.exp(total - logsumexp(total))
    moments = {}
    for axis, (name, x) in enumerate({"a": a, "b": b, "phi": phi}.items()):
        marginal = p.sum(axis=tuple({0, 1, 2} - {axis}))
        assert max(marginal[0], marginal[-1]) < 1e-4 * marginal.max()  # wide enough
        mean = marginal @ x
        moments[name] = mean, marginal @ np.square(x - mean)
    return moments


CASES = {
    negative_binomial: (of_negative_binomial, log_half_cauchy, np.log, "alpha", np.log),
    zero_inflated: (of_zero_inflated, log_beta_of_2_and_2, np.log, "psi", logit),
    beta_binomial: (
        of_beta_binomial, log_half_cauchy, lambda mean: logit(mean / TRIALS), "kappa", np.log,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("write", CASES, ids=lambda write: write.__name__)
def test_a_posterior_at_a_limit_is_that_of_quadrature(write):
    log_likelihood, log_prior, link, name, transform = CASES[write]
    with pm.Model() as model:
        write()
        step = SGHMC(compile_kwargs={"mode": "NUMBA"})
        idata = pm.sample(step=step, chains=4, cores=2, random_seed=1, progressbar=False)
    statistics = idata.sample_stats
    assert float(statistics["gradient_order"].min()) == 2
    phi = np.linspace(0.5, 25, 1200)
    y = model.rvs_to_values[model["y"]].data
    exact = by_quadrature(y, link, log_likelihood, log_prior, phi)
    draws = {"a": idata.posterior["a"].values, "b": idata.posterior["b"].values,
             "phi": transform(idata.posterior[name].values)}  # fmt: skip
    for unknown, (mean, variance) in exact.items():
        squares = np.square(draws[unknown] - mean)
        for values, expected in ((draws[unknown], mean), (squares, variance)):
            ess = float(az.ess(values))
            assert ess > 400
            assert abs(values.mean() - expected) < 4.5 * values.std() / np.sqrt(ess)
