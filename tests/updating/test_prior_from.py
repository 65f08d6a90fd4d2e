"""The posterior as a prior: against closed forms, on all rows, and refused where it is none."""

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from scipy.special import digamma, polygamma

from pymc_sghmc import SGHMC, prior_from
from pymc_sghmc.compat import inference_data
from pymc_sghmc.loaders import ArrayLoader

SIGMA = 1.5
B = np.array([1.0, -1.0, 0.5])


def idata_of(stats=None, **draws):
    """Return a result with these draws, (chain, draw, ...)."""
    posterior = {
        name: (("chain", "draw", *(f"{name}_{i}" for i in range(values.ndim - 2))), values)
        for name, values in draws.items()
    }
    groups = {"posterior": xr.Dataset(posterior)}
    if stats:
        groups["sample_stats"] = xr.Dataset({k: (("chain", "draw"), v) for k, v in stats.items()})
    return inference_data(groups)


def normal_draws(mean, covariance, seed=0, shape=(2, 500)):
    rng = np.random.default_rng(seed)
    return rng.multivariate_normal(mean, covariance, size=shape)


@pytest.fixture(scope="module")
def rows():
    """Two months of rows of a regression."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2, 500, 3))
    return X, X @ B + SIGMA * rng.standard_normal((2, 500))


def regression(X, y):
    """A linear regression with known σ, and rows in data containers."""
    with pm.Model(coords={"coef": list("abc")}) as model:
        beta = pm.Normal("beta", 0, 2, dims="coef")
        mu = pm.Data("X", X) @ beta
        pm.Normal("likelihood", mu, SIGMA, observed=pm.Data("y", y))
    return model


def exact(X, y):
    """Mean and covariance of that regression's posterior."""
    X = X.reshape(-1, 3)
    P = X.T @ X / SIGMA**2 + np.eye(3) / 4
    return np.linalg.solve(P, X.T @ y.ravel() / SIGMA**2), np.linalg.inv(P)


@pytest.mark.slow
def test_two_months_one_after_the_other_are_both_at_once(rows):
    X, y = rows
    quick = {"chains": 2, "tune": 300, "random_seed": 1, "progressbar": False, "cores": 1}
    with regression(X[0], y[0]) as model:
        step = SGHMC()
        idata = pm.sample(300, step=step, **quick)
    first = prior_from(idata, step)
    mean, covariance = exact(X[:1], y[:1])
    np.testing.assert_allclose(first.mean, mean, atol=1e-8)
    np.testing.assert_allclose(first.covariance, covariance, rtol=1e-6, atol=1e-10)
    with first.apply(model) as april:
        pm.set_data({"X": X[1], "y": y[1]})
        step = SGHMC(batch_size=10, gradient="second_order")
        assert step.tuner.gradient.data.n_rows == [500]
        idata = pm.sample(300, step=step, **quick)
    assert idata.sample_stats["gradient_order"].values.min() == 2
    mean, covariance = exact(X, y)
    z = (idata.posterior["beta"].values - mean) / np.sqrt(np.diag(covariance))
    assert idata.posterior["beta"].dims == ("chain", "draw", "coef")
    # 600 draws of SGHMC count as at least 300: 5 errors
    assert np.abs(z.mean(axis=(0, 1))).max() < 5 / np.sqrt(300)
    assert np.abs(z.std(axis=(0, 1)) - 1).max() < 5 / np.sqrt(600)
    second = prior_from(idata, step)
    assert april is not model
    np.testing.assert_allclose(second.mean, mean, atol=1e-8)
    np.testing.assert_allclose(second.covariance, covariance, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("kind", ["arrays", "loader", "stream"])
def test_rows_elsewhere_are_read(rows, kind):
    X, y = (array[0] for array in rows)
    data = {"X": X, "y": y}
    with regression(X[:10], y[:10]):
        step = SGHMC(
            batch_size=100,
            data=data if kind == "arrays" else ArrayLoader(data),
            pool=None if kind == "stream" else "auto",
            learning_rate=1e-3,  # no set-up: the step isn't sampled with
        )
    mean, covariance = exact(X, y)
    idata = idata_of({"data_rows": np.full((2, 500), 500)}, beta=normal_draws(mean, covariance))
    prior = prior_from(idata, step)
    np.testing.assert_allclose(prior.mean, mean, atol=1e-8)
    np.testing.assert_allclose(prior.covariance, covariance, rtol=1e-6, atol=1e-10)
    wrong = idata_of({"data_rows": np.full((2, 500), 400)}, beta=normal_draws(mean, covariance))
    with pytest.raises(
        ValueError, match="prior_from: this run was made with 400 rows, and there are 500 now"
    ):
        prior_from(wrong, step)


def test_a_model_that_has_no_rows(rows):
    X, y = (array[0] for array in rows)
    with pm.Model() as model:  # a likelihood of all rows at once can't be cut
        beta = pm.Normal("beta", 0, 2, shape=3)
        pm.MvNormal("likelihood", X[:50] @ beta, SIGMA**2 * np.eye(50), observed=y[:50])
    mean, covariance = exact(X[:50], y[:50])
    prior = prior_from(idata_of(beta=normal_draws(mean, covariance)), model)
    np.testing.assert_allclose(prior.mean, mean, atol=1e-8)
    np.testing.assert_allclose(prior.covariance, covariance, rtol=1e-6, atol=1e-10)


def counts(n, total):
    """n counts of this total, whose log rate has a Gamma posterior, of shape k and rate n."""
    y = np.zeros(n)
    y[: total % n] = 1
    y += total // n
    with pm.Model() as model:
        rate = pm.Gamma("rate", 1, 1e-6)
        pm.Poisson("likelihood", rate, observed=pm.Data("y", y))
    return model


def gamma_draws(k, n, seed=0, shape=(4, 1000)):
    return np.random.default_rng(seed).gamma(k, 1 / n, size=shape)


def test_the_mean_is_that_of_a_skewed_posterior_and_not_its_mode():
    n, total = 50, 24
    k = total + 1  # of the Gamma posterior
    prior = prior_from(idata_of(rate=gamma_draws(k, n)), counts(n, total), n_draws=400)
    mean = digamma(k) - np.log(n)
    mode = np.log(k / n)
    sd = np.sqrt(polygamma(1, k))
    # a draw is off by δ²/2, whose sd is sd²/√2; 5 errors are 0.035 sds
    error = sd**2 / np.sqrt(2) / np.sqrt(400)
    assert abs(prior.mean[0] - mean) < 5 * error + 0.01 * sd
    assert abs(mode - mean) > 0.09 * sd
    assert prior.covariance[0, 0] == pytest.approx(sd**2, rel=0.05)
    assert prior.parameters[0].value == pytest.approx(np.exp(prior.mean[0]))


def test_a_skewed_posterior_is_refused():
    with pytest.raises(ValueError, match="posterior of rate is far from a Gaussian"):
        prior_from(idata_of(rate=gamma_draws(2, 20)), counts(20, 1))


def test_a_posterior_of_two_modes_is_refused():
    with pm.Model() as model:
        a = pm.Normal("a", 0, 2)
        pm.Normal("likelihood", a**2, 1, observed=pm.Data("y", np.full(20, 1.0)))
    rng = np.random.default_rng(0)
    draws = rng.choice([-1.0, 1.0], size=(2, 1000)) + 0.1 * rng.standard_normal((2, 1000))
    with pytest.raises(ValueError, match="no maximum along a"):
        prior_from(idata_of(a=draws), model)


def test_heavy_tails_are_refused():
    with pm.Model() as model:
        pm.StudentT("a", nu=2.5)
    draws = np.random.default_rng(0).standard_t(2.5, size=(2, 2000))
    with pytest.raises(ValueError, match="far from a Gaussian"):
        prior_from(idata_of(a=draws), model)


def test_draws_that_are_too_hot_are_refused(rows):
    X, y = (array[0] for array in rows)
    mean, covariance = exact(X, y)
    model = regression(X, y)
    draws = normal_draws(mean, 1.3**2 * covariance, shape=(4, 1000))
    with pytest.raises(ValueError, match=r"have 1\.[23]. ± .* times the standard deviation"):
        prior_from(idata_of(beta=draws), model)
    prior_from(idata_of(beta=normal_draws(mean, 1.05**2 * covariance)), model)


def test_draws_of_other_data_are_refused(rows):
    X, y = rows
    mean, covariance = exact(X[:1], y[:1])
    idata = idata_of(beta=normal_draws(mean, covariance))
    with pytest.raises(ValueError, match="Pass the step or the model that made this run"):
        prior_from(idata, regression(X[1], y[1] + 1))


def test_what_is_no_posterior_of_continuous_parameters_is_refused(rows):
    X, y = (array[0] for array in rows)
    mean, covariance = exact(X, y)
    model = regression(X, y)
    draws = normal_draws(mean, covariance)
    with pytest.raises(ValueError, match=r"prior_from: idata.posterior has no draws of 'beta'"):
        prior_from(idata_of(gamma=draws), model)
    with pytest.raises(ValueError, match="prior_from: the draws of 'beta' have shape"):
        prior_from(idata_of(beta=draws[..., :2]), model)
    with pytest.raises(ValueError, match="prior_from: all draws of 'beta' are NaN"):
        prior_from(idata_of(beta=np.full_like(draws, np.nan)), model)
    with pytest.raises(ValueError, match="haven't mixed: beta"):
        prior_from(idata_of(beta=draws + np.arange(2)[:, None, None]), model)
    with pytest.raises(ValueError, match="n_draws=3: must be"):
        prior_from(idata_of(beta=draws), model, n_draws=3)
    hot = dict.fromkeys(("configurational_temperature", "target_temperature"), np.full((2, 500), 2))
    with pytest.raises(ValueError, match="temperature other than 1"):
        prior_from(idata_of({**hot, "draw_weight": np.ones((2, 500))}, beta=draws), model)
    with model:
        pm.Poisson("k", 3)
    with pytest.raises(ValueError, match="'k' take whole numbers"):
        prior_from(idata_of(beta=draws), model)


def test_too_many_parameters_are_refused():
    with pm.Model() as model:
        pm.Normal("a", shape=1001)
    with pytest.raises(ValueError, match="1,001 parameters"):
        prior_from(idata_of(a=np.zeros((1, 10, 1001))), model)


def effects_model(single):
    """Effects of groups with a scale, and a residual scale."""
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(5), 40)
    X = rng.standard_normal((200, 2))
    y = 1.0 + X @ [1.0, -1.0] + 0.5 * rng.standard_normal(5)[group] + rng.standard_normal(200)
    if single:
        X, y = X.astype("float32"), y.astype("float32")
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=2)
        tau = pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 1, tau, shape=5)
        sigma = pm.HalfNormal("sigma", 1)
        pm.Normal("likelihood", pm.Data("X", X) @ beta + u[group], sigma, observed=y)
    return model


def mixture_model(single):
    """Rows that see a mixture, by which no linear predictor is found."""
    rng = np.random.default_rng(3)
    y = np.r_[rng.standard_normal(60) - 2, rng.standard_normal(40) + 2]
    with pm.Model() as model:
        w = pm.Dirichlet("w", np.ones(2))
        mu = pm.Normal("mu", [-2, 2], 1, shape=2)
        pm.NormalMixture("likelihood", w, mu, 1, observed=y)
    return model


@pytest.mark.parametrize("make", [effects_model, mixture_model])
def test_the_hessian_is_that_of_pymc(make):
    from pymc_sghmc.models.unknowns import Unknowns
    from pymc_sghmc.step.all_rows import GivenRows

    model = make(False)
    point = model.initial_point()
    unknowns = Unknowns(model.continuous_value_vars, point)
    position = unknowns.ravel(point) + 0.1 * np.random.default_rng(0).standard_normal(unknowns.d)
    arguments = {"initial_point": None, "batch_size": "auto", "data": None, "compile_kwargs": None}
    rows = GivenRows(model, arguments).all_rows()
    hessian = rows.hessian(position, 0.1 * np.eye(unknowns.d))
    gradient = model.compile_dlogp()
    expected = np.empty_like(hessian)
    for i, direction in enumerate(1e-5 * np.eye(unknowns.d)):
        ends = [gradient(unknowns.unravel(position + s * direction, point)) for s in (-1, 1)]
        expected[:, i] = (ends[0] - ends[1]) / 2e-5
    np.testing.assert_allclose(hessian, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_twelve_months_of_a_logistic_regression_drift_little():
    """Against one run's posterior on all rows, by Newton's method."""
    from benchmarks import months

    drifts = months.drifts(n_months=12, n_rows=5000, d=20, seed=0)
    # draws' mean and prior mean by the mode of all rows: skewness is 0.03 sds here
    assert drifts["prior_from"] < 0.1
    assert drifts["prior_from"] < drifts["covariance of draws"] / 3
