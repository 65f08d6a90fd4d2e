"""Log-densities that jump are warned of, those that have kinks or bounds alone are not."""

import warnings

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
import xarray as xr

from modes import FAST

from pymc_sghmc import SGHMC
from pymc_sghmc.compat import inference_data
from pymc_sghmc.diagnostics import check_bias
from pymc_sghmc.models.jumps import jumping_unknowns

rng = np.random.default_rng(7)
N = 300
X = rng.uniform(size=N)
Y = (X > 0.4) + 0.5 * rng.normal(size=N)
COUNTS = rng.poisson(2, size=N)
YEARS = np.sort(rng.integers(1851, 1962, size=N))


def threshold():
    pm.Normal("y", pm.math.switch(pm.Normal("jumping", 0.5, 0.3) > X, 0, 1), 0.5, observed=Y)


def threshold_of_unknowns():
    # at PyMC's initial point both sides are equal
    level = pm.Normal("level", shape=2)
    mu = pm.math.switch(pm.Normal("jumping", 0.5, 0.3) > X, level[0], level[1])
    pm.Normal("y", mu, pm.HalfNormal("sigma"), observed=Y)


def change_point():
    rate = pm.Exponential("rate", 1, shape=2)
    mu = pm.math.switch(pm.Uniform("jumping", 1851, 1962) > YEARS, rate[0], rate[1])
    pm.Poisson("y", mu, observed=COUNTS)


def change_point_on_its_own_scale():
    rate = pm.Exponential("rate", 1, shape=2)
    mu = pm.math.switch(pm.Normal("jumping", 1900, 30) > YEARS, rate[0], rate[1])
    pm.Poisson("y", mu, observed=COUNTS)


def rounded():
    pm.Normal("y", pt.floor(3 * pm.Normal("jumping") * X), 1, observed=Y)


def index():
    place = pt.cast(9.99 * pm.Beta("jumping", 2, 2), "int64")
    pm.Normal("y", pt.as_tensor(np.arange(10.0))[place] * X, 1, observed=Y)


def mask():
    pm.Normal("y", 1.0 * (pm.Normal("jumping", 0.5, 0.3) < X), 0.5, observed=Y)


def soft_wall():
    a = pm.Normal("jumping")
    pm.Potential("wall", pt.switch(a > 0, 0.0, -1e6))
    pm.Normal("y", a * X, 1, observed=Y)


def prior_by_condition():
    a = pm.Normal("jumping")
    b = pm.Normal("b", pt.switch(a > 0, 1.0, -1.0))
    pm.Normal("y", a * X + b, 1, observed=Y)


def equation_of_a_bounded_number():
    # a − 2 or 0 below 2, of a probability of nearly one
    level = pt.maximum(pm.Normal("jumping", 2.0), 2.0)
    pm.Normal("y", pt.switch(pt.eq(level, 2.0), 0.0, level) * X, 1, observed=Y)


def clipped_probability():
    # as Bambi's links do
    p = 0.5 * pt.erfc(-(pm.Normal("a") * 20 * X + pm.Normal("b")) / np.sqrt(2))
    eps = np.finfo(float).eps
    p = pt.switch(pt.eq(p, 0), eps, p)
    pm.Bernoulli("y", pt.switch(pt.eq(p, 1), 1 - eps, p), observed=COUNTS > 1)


def rectifier():
    hidden = np.stack([X, Y], axis=1) @ pm.Normal("w1", shape=(2, 5))
    mu = pt.switch(hidden > 0, hidden, 0) @ pm.Normal("w2", shape=5)
    pm.Normal("y", mu, 1, observed=Y)


def quantile():
    mu = pm.Normal("a") * X + pm.Normal("b")
    pm.AsymmetricLaplace("y", mu=mu, b=1, q=0.9, observed=Y)


def order():
    a, b = pm.Normal("a"), pm.Normal("b")
    pm.Potential("order", pt.switch(a < b, 0.0, -np.inf))
    pm.Normal("y", a * X + b, 1, observed=Y)


def negative_binomial():
    mu = pm.math.exp(pm.Normal("a") * X)
    pm.NegativeBinomial("y", mu=mu, alpha=pm.HalfNormal("alpha"), observed=COUNTS)


def zero_inflated():
    mu = pm.math.exp(pm.Normal("a") * X)
    pm.ZeroInflatedPoisson("y", psi=pm.Beta("psi", 1, 1), mu=mu, observed=COUNTS)


def censored():
    normal = pm.Normal.dist(pm.Normal("a") * X, pm.HalfNormal("sigma"))
    pm.Censored("y", normal, lower=-1, upper=1, observed=np.clip(Y, -1, 1))


def student():
    nu = pm.Gamma("nu", 2, 0.1)
    pm.StudentT("y", nu=nu, mu=pm.Normal("a") * X, sigma=1, observed=Y)


def steep():
    pm.Normal("y", pm.math.sigmoid((X - pm.Normal("c", 0.5, 0.3)) / 1e-3), 0.5, observed=Y)


JUMPS = [
    threshold,
    threshold_of_unknowns,
    change_point,
    change_point_on_its_own_scale,
    rounded,
    index,
    mask,
    soft_wall,
    prior_by_condition,
    equation_of_a_bounded_number,
]
NO_JUMPS = [
    clipped_probability,
    rectifier,
    quantile,
    order,
    negative_binomial,
    zero_inflated,
    censored,
    student,
    steep,
]
BY_HAND = {
    "learning_rate": 1e-4,
    "friction": 0.1,
    "gradient": "plain",
    "noise_estimate": None,
    "compile_kwargs": FAST,
}


@pytest.mark.parametrize("batch_size", [50, None])
@pytest.mark.parametrize("build", JUMPS)
def test_jumps_are_warned_of(build, batch_size):
    with pm.Model():
        build()
        with pytest.warns(UserWarning, match=r"jumps .* with jumping.* pm\.Slice"):
            SGHMC(batch_size=batch_size, **BY_HAND)


def warned_of(*vars):
    """Build a step and return what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SGHMC(*vars, batch_size=50, **BY_HAND)
    return [str(warning.message) for warning in caught if "jumps" in str(warning.message)]


@pytest.mark.parametrize("build", NO_JUMPS)
def test_kinks_bounds_and_steep_slopes_are_no_jumps(build):
    with pm.Model():
        build()
        assert not warned_of()


def test_densities_that_nearly_overflow_are_looked_at_in_silence():
    """As those of counts by the exponential of a year are, which NumPy warned of."""

    def logp(x):
        return -1.5e308 * abs(x[0]) ** 3 if abs(x[0]) < 1 else -np.inf

    reach = np.ones(1)
    assert jumping_unknowns(logp, np.zeros(1), {"year": slice(0, 1)}, reach) == []


@pytest.mark.parametrize(("threshold", "is_reached"), [(2.0, False), (0.55, True)])
def test_jumps_count_where_chains_come(threshold, is_reached):
    """Some densities have another formula far from the data, as that of PyMC's ExGaussian has."""
    rows = np.random.default_rng(2).normal(0.5, 1, 2000)
    with pm.Model(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a = pm.Normal("jumping", 0, 2)
        pm.Normal("y", pm.math.switch(a > threshold, a + 1, a), 1, observed=rows)
        SGHMC(compile_kwargs=FAST)
    assert any("jumps" in str(warning.message) for warning in caught) == is_reached


def test_jumps_are_found_in_single_precision():
    with pytensor.config.change_flags(floatX="float32"):
        x, y = X.astype("float32"), Y.astype("float32")
        with pm.Model():
            mu = pm.math.switch(x < pm.Normal("jumping", 0.5, 0.3), pm.Normal("a"), 1)
            pm.Normal("y", mu, 0.5, observed=y)
            with pytest.warns(UserWarning, match="jumps"):
                SGHMC(batch_size=50, **BY_HAND)
        with pm.Model():
            pm.Normal("y", pm.math.switch(x < 0.4, pm.Normal("a"), 1), 0.5, observed=y)
            assert not warned_of()


def test_unknowns_of_other_steps_may_jump():
    with pm.Model() as model:
        threshold_of_unknowns()
        assert not warned_of([model["level"], model["sigma"]])
        assert warned_of()


@pytest.mark.parametrize("jumps", [True, False])
def test_check_bias_does_not_judge_draws_of_a_density_that_jumps(jumps):
    with pm.Model() as model:
        if jumps:
            threshold()
        else:
            pm.Normal("jumping", 0.5, 0.3)
    # where there is only a threshold draws of the prior pass every check by gradients
    draws = 0.5 + 0.3 * np.random.default_rng(0).standard_normal((4, 1000))
    posterior = xr.Dataset({"jumping": (("chain", "draw"), draws)})
    report = check_bias(inference_data({"posterior": posterior}), model)
    assert not report.biased
    assert str(report).startswith("No verdict on jumping: the log-density" if jumps else "No bias")
    assert report.jumping == (["jumping"] if jumps else [])


def test_a_parameter_that_jumps_gets_no_estimate_and_the_others_are_judged():
    """Beside pm.Slice a correct run passes, and a wrong width of another parameter is found."""
    with pm.Model() as model:
        jumping = pm.Normal("jumping", 0.5, 0.3)
        pm.Normal("level", pm.math.switch(jumping > 0.4, 1.0, -1.0), 0.5)
    normals = np.random.default_rng(0).standard_normal((2, 4, 1000))
    place = 0.5 + 0.3 * normals[0]
    for width, is_right in ((1.0, True), (1.5, False)):
        level = np.where(place > 0.4, 1.0, -1.0) + 0.5 * width * normals[1]
        posterior = {"jumping": (("chain", "draw"), place), "level": (("chain", "draw"), level)}
        report = check_bias(inference_data({"posterior": xr.Dataset(posterior)}), model)
        assert report.jumping == ["jumping"]
        assert report.biased != is_right
        assert report.table.loc["jumping"].isna().all()
        assert report.table.loc["level"].notna().all()
        first, _, third, *_ = str(report).splitlines()
        assert first.startswith("No verdict on jumping")
        assert ("No bias found in the other parameters" in third) == is_right
        assert ("The standard deviation of level" in third) != is_right
