"""Likelihoods whose rows depend on each other, or on nothing, are refused in words."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from exactness import refusal
from model_collection.cuttable import POSITIVE, D, N, X, Y, build, rng, scan_output
from targets import gradient_of

from pymc_sghmc.models.independence import MAX_CHECKED_ROWS


def mean_over_rows_in_model():
    x, b = pm.Data("x", X), pm.Normal("b", shape=D)
    pm.Normal("y", (x - x.mean(axis=0)) @ b, 1, observed=Y)


def standardised_outcome():
    y = pm.Data("y_data", Y)
    pm.Normal("y", pm.Normal("b"), pt.std(y), observed=y)


def cumulative_sum():
    x, b = pm.Data("x", X), pm.Normal("b", shape=D)
    pm.Normal("y", pt.cumsum(x @ b), 1, observed=Y)


def shifted_series():
    y = pm.Data("y_data", Y)
    before = pt.concatenate([[0.0], y[:-1]])
    pm.Normal("y", pm.Normal("rho") * before, 1, observed=y)


def rolled_series():
    y = pm.Data("y_data", Y)
    pm.Normal("y", pm.Normal("rho") * pt.roll(y, 1), 1, observed=y)


def trend_by_position():
    y = pm.Data("y_data", Y)
    pm.Normal("y", pm.Normal("slope") * pt.arange(y.shape[0]), 1, observed=y)


def weight_by_row_count():
    x = pm.Data("x", X)
    pm.Normal("y", x @ pm.Normal("b", shape=D), pt.sqrt(x.shape[0]), observed=Y)


def maximum_of_binary():
    k = pm.Data("k", np.where(np.arange(N) == 4, 1.0, 0.0))
    pm.Normal("y", pm.Normal("b") * (1 - k.max()) + k, 1, observed=Y)


def recursion_by_scan():
    x, b = pm.Data("x", Y), pm.Normal("b")

    def step(value, previous, b):
        return value + b * previous

    mu = scan_output(pytensor.scan, step, [x], [b], outputs_info=pt.zeros(()))
    pm.Normal("y", mu, 1, observed=Y)


def row_data_on_two_axes():
    x, b = pm.Data("x", X), pm.Normal("b", shape=D)
    pm.Normal("y", x @ x.T @ x @ b, 1, observed=Y)


def table_as_long_as_the_data():
    # With an index that exists in every batch, the first row passes for the first group.
    table = pm.Data("table", rng.normal(size=N))
    pm.Normal("y", pm.Normal("b") * table[np.zeros(N, dtype=int)], 1, observed=Y)


def zeros_as_placeholders():
    # The mean of zeros depends on no row, that of the data to come does.
    x, b = pm.Data("x", np.zeros((N, D))), pm.Normal("b", shape=D)
    pm.Normal("y", (x - x.mean(axis=0)) @ b, 1, observed=pm.Data("y_data", np.zeros(N)))


def identical_rows():
    x, b = pm.Data("x", np.ones(N)), pm.Normal("b")
    pm.Normal("y", b * pt.cumsum(x) / pt.cumsum(pt.ones_like(x)), 1, observed=Y)


def all_zero_at_the_start():
    # b = 0 where the sampler starts, and everything it multiplies is invisible there.
    x, b = pm.Data("x", X), pm.Normal("b", initval=0.0)
    pm.Normal("y", b * x.sum(), 1, observed=Y)


def one_row_in_many():
    # Only the whole data show it: a few rows don't contain the one that matters.
    k = pm.Data("k", np.arange(3000) == 1234)
    pm.Normal("y", pm.Normal("b") * pt.any(k), 1, observed=np.zeros(3000))


def all_rows_but_a_few():
    # Only a minibatch of very few rows shows it.
    k = pm.Data("k", np.arange(N) % 5 > 0)
    pm.Normal("y", pm.Normal("b") * pt.any(k), 1, observed=Y)


NOT_INDEPENDENT = [
    one_row_in_many,
    all_rows_but_a_few,
    mean_over_rows_in_model,
    standardised_outcome,
    cumulative_sum,
    shifted_series,
    rolled_series,
    trend_by_position,
    weight_by_row_count,
    maximum_of_binary,
    recursion_by_scan,
    row_data_on_two_axes,
    table_as_long_as_the_data,
    zeros_as_placeholders,
    identical_rows,
    all_zero_at_the_start,
]


@pytest.mark.parametrize("make", NOT_INDEPENDENT)
def test_rows_in_company_are_refused(make):
    parts = "rows of 'y' are not independent", "from the full data"
    refusal(build(make), 4, *parts)


def mean_over_many_rows(x, y):
    b = pm.Normal("b", shape=D)
    pm.Normal("y", (x - x.mean(axis=0)) @ b, 1, observed=y)


def sum_over_many_rows(x, y):
    pm.Normal("y", pt.cumsum(x @ pm.Normal("b", shape=D)), 1, observed=y)


def long_series(x, y):
    before = pt.concatenate([[0.0], y[:-1]])
    pm.Normal("y", pm.Normal("rho") * before, 1, observed=y)


@pytest.mark.parametrize("make", [mean_over_many_rows, sum_over_many_rows, long_series])
def test_rows_in_company_are_refused_in_large_data(make):
    # Where all rows are too many for the check, it takes some: here every other one.
    n_rows = MAX_CHECKED_ROWS + 1
    draws = np.random.default_rng(1)
    with pm.Model() as model:
        x = pm.Data("x", draws.normal(size=(n_rows, D)))
        make(x, pm.Data("y_data", draws.normal(size=n_rows)))
    refusal(model, 4, "rows of 'y' are not independent")


def test_mean_over_pm_minibatch_is_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X, Y, batch_size=4)
        b = pm.Normal("b", shape=D)
        pm.Normal("y", (x - x.mean(axis=0)) @ b, 1, observed=y, total_size=N)
    refusal(model, None, "rows of 'y' are not independent", "pm.Data")


def autoregression():
    rho = pm.Normal("rho")
    pm.AR("y", [rho], observed=Y, init_dist=pm.Normal.dist())


def random_walk():
    pm.GaussianRandomWalk("y", sigma=pm.HalfNormal("s"), init_dist=pm.Normal.dist(), observed=Y)


def gaussian_process():
    gp = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(1, pm.HalfNormal("ls")))
    gp.marginal_likelihood("y", X[:, :1], Y, sigma=0.5)


def mvnormal_over_rows():
    pm.MvNormal("y", pt.zeros(N), pt.eye(N) * pm.HalfNormal("s"), observed=Y)


def scalars():
    pm.Normal("y", pm.Normal("mu"), 1, observed=0.7)


def no_data():
    pm.Normal("mu")


@pytest.mark.parametrize(
    "make", [autoregression, random_walk, gaussian_process, mvnormal_over_rows, scalars]
)
def test_likelihood_without_rows_is_refused(make):
    refusal(build(make), 4, "batch_size", "batch_size=None")


def test_a_model_without_a_likelihood_is_refused():
    refusal(build(no_data), 4, "batch_size", "leave data= and batch_size= out")


def unknown_by_row():
    pm.Normal("y", pm.Normal("z", shape=N), 1, observed=Y)


def unknown_by_row_with_index():
    # PyMC 6 drops an index that is the identity; a Data index would be exact.
    pm.Normal("y", pm.Normal("z", shape=N)[np.arange(N)], 1, observed=Y)


def unknown_by_row_with_prior_from_data():
    z = pm.Normal("z", pt.dot(pm.Data("x", X), pm.Normal("b", shape=D)), 1, shape=N)
    pm.Normal("y", z, 1, observed=Y)


@pytest.mark.parametrize("make", [unknown_by_row, unknown_by_row_with_prior_from_data])
def test_unknown_by_row_is_refused(make):
    refusal(build(make), 4, "'z'", "one entry per row", "marginalize=['z']")


def discrete_unknown_by_row():
    z = pm.Bernoulli("z", 0.5, shape=N)
    pm.Normal("y", pm.Normal("mu", shape=2)[z], 1, observed=Y)


def test_what_cannot_be_integrated_out_is_not_advised_to_be():
    message = refusal(build(discrete_unknown_by_row), 4, "discrete parameter", "'z'", "pm.Mixture")
    assert "marginalize" not in message


def test_rows_that_look_up_other_rows_are_told_from_groups_without_an_entry():
    x = np.random.default_rng(0).normal(size=200)
    previous = np.maximum(np.arange(200) - 1, 0)
    with pm.Model() as model:
        X = pm.Data("x", x)
        pm.Normal("y", pm.Normal("b") * X[previous], 1, observed=x)
    refusal(model, 10, "look up other rows by number")
    with pm.Model() as model:
        u = pm.Normal("u", shape=3)
        pm.Normal("y", u[np.arange(200) % 4], 1, observed=x)
    refusal(model, 10, "for which there is no entry")


def test_unknown_by_row_of_pm_minibatch_is_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X[:, 0], Y, batch_size=4)
        z = pm.Normal("z", pm.Normal("b") * x, 1, shape=4)
        pm.Normal("y", z, 1, observed=y, total_size=N)
    refusal(model, None, "'z'", "pm.Minibatch", "Integrate it out")


def test_prior_from_row_data_is_refused():
    with pm.Model() as model:
        y = pm.Data("y_data", Y)
        mu = pm.Normal("mu", y.mean(), 1)
        pm.Normal("y", mu, 1, observed=y)
    refusal(model, 4, "'mu'", "prior", "y_data", "marginalize=['mu']")


def test_potential_over_rows_is_refused():
    with pm.Model() as model:
        x, b = pm.Data("x", X), pm.Normal("b", shape=D)
        pm.Potential("weights", pt.sum(x @ b))
        pm.Normal("y", x @ b, 1, observed=Y)
    refusal(model, 4, "pm.Potential('weights')", "(x)", "pm.CustomDist")


def test_potential_over_pm_minibatch_is_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X, Y, batch_size=4)
        b = pm.Normal("b", shape=D)
        pm.Potential("weights", pt.sum(x @ b))
        pm.Normal("y", x @ b, 1, observed=y, total_size=N)
    refusal(model, None, "pm.Potential('weights')", "pm.CustomDist")


def test_infinite_likelihood_is_refused():
    # Nothing can be seen in rows that are infinite or not numbers wherever one looks.
    with pm.Model() as model:
        x = pm.Data("x", X)
        pm.Exponential("y", pt.exp(pm.Normal("b") * x.mean()), observed=-POSITIVE)
    refusal(model, 4, "'y'", "infinite or not a number", "initval", "model.debug()")


INCOME = np.random.default_rng(1).lognormal(np.log(4e6), 0.5, size=2000)  # in cents


def logistic(income, b):
    outcome = np.random.default_rng(2).integers(2, size=2000)
    pm.Bernoulli("y", logit_p=pm.Normal("a") + b * income, observed=outcome)


def poisson(income, b):
    counts = np.random.default_rng(2).poisson(2.0, size=2000)
    pm.Poisson("y", pt.exp(pm.Normal("a") + b * income), observed=counts)


def gamma(income, b):
    """Overflows for a row alone, and not for many at once, where b is far from zero."""
    mu = pt.exp(pm.Normal("a") + b * income)
    pm.Gamma("y", 2.0, 2.0 / mu, observed=np.random.default_rng(2).gamma(2.0, size=2000))


@pytest.mark.parametrize("make", [logistic, poisson, gamma])
def test_predictor_in_raw_units_is_checked(make):
    def built(centred):
        with pm.Model() as model:
            income = pm.Data("income", INCOME)
            make(income - income.mean() if centred else income, pm.Normal("b"))
        return model

    gradient_of(built(False), 4)
    refusal(built(True), 4, "rows of 'y' are not independent")


def test_start_alone_is_enough_where_no_other_point_is_finite():
    with pm.Model() as model:
        b = pm.Normal("b")
        pm.Normal("y", pt.switch(pt.eq(b, 0), 0.0, -np.inf), 1, observed=Y)
    assert gradient_of(model, 4).data.batch_sizes == [4]


def test_likelihood_finite_only_near_the_start_is_checked_there():
    def make(scale):
        with pm.Model() as model:
            x, width = pm.Data("x", POSITIVE), pm.LogNormal("width", 0, 10, initval=1.0)
            # finite while width > 0.99
            width = width * (x.mean() if scale else 1.0)
            pm.Uniform("y", -width, width, observed=0.98 * np.cos(np.arange(N)))
        return model

    gradient_of(make(False), 4)
    with pytest.raises(ValueError, match=r"independent|infinite"):
        gradient_of(make(True), 4)
