"""Data and models that no step can sample from: the message names what, how many rows and which."""

import warnings

import numpy as np
import pymc as pm
import pytest

from modes import FAST, PYTHON
from pymc.exceptions import SamplingError

from pymc_sghmc import SGHMC

rng = np.random.default_rng(0)
ONES = np.ones(60)
BY_HAND = {
    "batch_size": 20,
    "learning_rate": 1e-4,
    "friction": 0.1,
    "gradient": "plain",
    "compile_kwargs": FAST,
}


def empty():
    pm.Normal("y", pm.Normal("a"), 1, observed=np.zeros(0))


def empty_container():
    x = pm.Data("x", np.zeros((0, 2)))
    pm.Normal("y", x @ pm.Normal("b", shape=2), 1, observed=pm.Data("outcome", np.zeros(0)))


def unobserved():
    pm.Normal("a")


def rows_in_a_potential():
    pm.Potential("loss", -(pm.Normal("a") ** 2) * ONES)


def negative_of_gamma():
    pm.Gamma("y", 2, pm.HalfNormal("b"), observed=np.r_[1, -2, 3, -4, ONES])


def negative_counts():
    pm.Poisson("y", pm.math.exp(pm.Normal("b")), observed=np.r_[1, -2, 3, ONES.astype(int)])


def above_one():
    y = pm.Data("outcome", np.r_[0.2, 1.5, ONES / 2])
    pm.Beta("y", mu=pm.math.sigmoid(pm.Normal("b")), sigma=0.1, observed=y)


def two_outcomes():
    a = pm.Normal("a")
    pm.Normal("fine", a, 1, observed=ONES)
    pm.Exponential("y", pm.math.exp(a), observed=np.r_[ONES[1:], -3.0])


def missing():
    pm.Normal("y", pm.Normal("a") * np.r_[1, np.nan, ONES], 1, observed=np.zeros(62))


def infinite():
    pm.Normal("y", pm.Normal("a") * np.r_[ONES, 1, np.inf], 1, observed=np.zeros(62))


def random_walk():
    w = pm.GaussianRandomWalk("w", sigma=1, init_dist=pm.Normal.dist(), shape=80)
    pm.Normal("y", w, 1, observed=rng.normal(size=80))


def improbable_at_the_start():
    """Times in hundreds, some of them censored: infinite bounds of the others do no harm."""
    times = np.r_[np.full(30, 300.0), np.full(30, 500.0)]
    bounds = np.where(times > 400, times, np.inf)
    scale = pm.math.exp(pm.Normal("a", 0, 5))
    pm.Censored("y", pm.Weibull.dist(alpha=5, beta=scale), lower=None, upper=bounds, observed=times)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (empty, r"'y' has no rows.*\(0,\)"),
        (empty_container, r"'outcome' has no rows.*\(0,\)"),
        (unobserved, "no observed variable.*observed="),
        (rows_in_a_potential, "batch_size: .*pm.Potential, as in 'loss'.*CustomDist"),
        (negative_of_gamma, r"'y'.*2 rows \(numbers 1, 3\).*Gamma.*-2.0, -4.0"),
        (negative_counts, "'y'.*row 1,.*Poisson.*-2"),
        (above_one, "'y'.*row 1,.*Beta.*1.5"),
        (two_outcomes, "'y'.*row 59,.*-3.0"),
        (missing, "missing values in row 1. Drop"),
        (infinite, "infinite values in row 61. Drop"),
        (improbable_at_the_start, "'y' is not finite for 30 rows.*initval near the data"),
    ],
)
def test_bad_data_are_named_with_their_rows(build, words):
    with pm.Model():
        build()
        with pytest.raises(ValueError, match=words):
            SGHMC(**BY_HAND)


def test_a_start_that_is_bad_for_all_rows_is_no_fault_of_the_data():
    with pm.Model():
        sd = pm.Normal("sd", 0, 1, initval=-50.0)
        pm.Normal("y", 0, sd, observed=ONES)
        with pytest.raises(ValueError, match="Give the parameters an initval"):
            SGHMC(**BY_HAND)


def test_a_joint_prior_by_row_is_not_advised_to_be_integrated_out():
    with pm.Model():
        random_walk()
        with pytest.raises(ValueError, match=r"'w' has an entry for each row.*joint") as refusal:
            SGHMC(**BY_HAND)
    assert "marginalize" not in str(refusal.value)


X = rng.normal(size=300)
NOISE = rng.normal(size=300)


def separated():
    pm.Bernoulli("y", logit_p=pm.Flat("a") + pm.Flat("b") * X, observed=X > 0.1)


def collinear():
    b = pm.Flat("b", shape=2)
    pm.Normal("y", np.stack([X, 2 * X], axis=1) @ b, 1, observed=X + NOISE)


def flat_and_proper():
    b = pm.Flat("b", shape=2)
    pm.Normal("y", np.stack([X, X**2], axis=1) @ b, 1, observed=X + NOISE)


def flat_in_large_units():
    pm.Bernoulli("y", logit_p=pm.Flat("a") + pm.Flat("b") * X / 100, observed=X + NOISE > 0)


def flat_with_a_mode_next_to_zero():
    pm.Normal("y", pm.Flat("a"), 1, observed=NOISE - NOISE.mean())


def scale_without_prior():
    pm.Normal("y", pm.Flat("a"), pm.HalfFlat("sd"), observed=NOISE)


@pytest.mark.parametrize(
    ("build", "is_improper"),
    [
        (separated, True),
        (collinear, True),
        (flat_and_proper, False),
        (flat_in_large_units, False),
        (flat_with_a_mode_next_to_zero, False),
        (scale_without_prior, False),
    ],
)
def test_improper_posteriors_are_warned_of(build, is_improper):
    with pm.Model(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
        SGHMC(batch_size=50, gradient="control_variates", compile_kwargs=PYTHON)
    texts = [str(w.message) for w in caught if "improper" in str(w.message)]
    assert len(texts) == is_improper
    assert all("proper priors" in text for text in texts)


def test_a_support_that_depends_on_a_parameter_is_no_fault_of_a_row():
    with pm.Model():
        top = pm.Gamma("top", 2, 0.1)
        pm.Uniform("y", 0, top, observed=rng.uniform(0, 5, 3000))
        step = SGHMC(centre={"top": 3.0})
        with pytest.raises(SamplingError, match=r"all rows is at the starting point.*use NUTS"):
            pm.sample(10, tune=10, step=step, chains=1, cores=1, progressbar=False)
