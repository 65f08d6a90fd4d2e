"""A Gaussian as prior of models with each kind of transform, against SciPy's density."""

import pickle

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc.distributions.transforms import ordered
from scipy.stats import multivariate_normal

from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.updating.gaussian_prior import GaussianPrior, Parameter
from pymc_sghmc.updating.normal_blocks import Transformed, conditional_blocks


def gaussian_prior(model, seed=0):
    """Return some Gaussian over the parameters of a model."""
    rng = np.random.default_rng(seed)
    unknowns = Unknowns(model.continuous_value_vars, model.initial_point())
    A = rng.standard_normal((unknowns.d, unknowns.d))
    mean = 0.3 * rng.standard_normal(unknowns.d)
    parameters = []
    for value, shape in zip(unknowns.variables, unknowns.shapes, strict=True):
        rv = model.values_to_rvs[value]
        place = unknowns.places[value.name]
        own = Transformed(rv, model.rvs_to_transforms[rv], shape).backward_of(mean[place])
        parameters.append(Parameter(rv.name, shape, place, own))
    covariance = 0.1 * A @ A.T / unknowns.d + 0.01 * np.eye(unknowns.d)
    return GaussianPrior(tuple(parameters), mean, covariance)


def point_of(prior, model, position):
    """Return a position as a point of a model's value variables."""
    return {
        model.rvs_to_values[model[p.name]].name: position[p.place].reshape(p.shape) for p in prior
    }


@pytest.fixture(scope="module")
def model():
    """Of one variable for each transform, some with dims, some with initial values."""
    rng = np.random.default_rng(0)
    with pm.Model(coords={"coef": list("abc"), "group": range(4)}) as model:
        X = pm.Data("X", rng.standard_normal((10, 3)))
        beta = pm.Normal("beta", 0, 1, dims="coef", initval=np.ones(3))
        sigma = pm.HalfNormal("sigma", 1)
        pm.Dirichlet("shares", np.ones(3), dims="coef")
        pm.Uniform("bounded", -1, [2, 3], shape=(2, 2))
        pm.Normal("cuts", 0, 1, shape=3, transform=ordered, initval=[0.0, 1.0, 2.0])
        tau = pm.HalfNormal("tau", 1)
        pm.Normal("u", 0, tau, dims="group")
        pm.ZeroSumNormal("deviations", 1, dims="group")
        pm.LKJCholeskyCov("L", n=2, eta=1, sd_dist=pm.HalfNormal.dist(1))
        pm.LKJCorr("R", n=3, eta=2)
        pm.Deterministic("twice", 2 * beta, dims="coef")
        pm.Normal("likelihood", X @ beta, sigma, observed=pm.Data("y", rng.standard_normal(10)))
    return model


@pytest.fixture(scope="module")
def prior(model):
    return gaussian_prior(model)


def test_each_variable_has_its_density_and_all_together_are_the_gaussian(model, prior):
    new = prior.apply(model)
    logp = new.compile_logp(vars=new.free_RVs)
    rng = np.random.default_rng(1)
    for _ in range(3):
        position = prior.mean + 0.3 * rng.standard_normal(prior.mean.size)
        expected = multivariate_normal(prior.mean, prior.covariance).logpdf(position)
        assert logp(point_of(prior, new, position)) == pytest.approx(expected, abs=1e-8)


def test_the_likelihood_stays(model, prior):
    new = prior.apply(model)
    point = point_of(prior, new, prior.mean)
    old_logp = model.compile_logp(vars=model.observed_RVs)(point)
    assert new.compile_logp(vars=new.observed_RVs)(point) == pytest.approx(old_logp)
    pm.set_data({"y": np.zeros(10)}, model=new)
    assert new.compile_logp(vars=new.observed_RVs)(point) != pytest.approx(old_logp)
    assert model.compile_logp(vars=model.observed_RVs)(point) == pytest.approx(old_logp)


def test_names_dims_and_start_stay_and_the_model_is_left_alone(model, prior):
    new = prior.apply(model)
    assert {rv.name for rv in new.free_RVs} == {rv.name for rv in model.free_RVs}
    for name, dims in model.named_vars_to_dims.items():
        assert tuple(new.named_vars_to_dims[name]) == dims
    assert dict(new.coords) == dict(model.coords)
    assert {v.name for v in new.value_vars} == {v.name for v in model.value_vars}
    for name, value in point_of(prior, new, prior.mean).items():
        np.testing.assert_allclose(new.initial_point()[name], value, atol=1e-10)
    assert model.rvs_to_initial_values[model["beta"]] is not None


def test_draws_from_the_new_prior_are_the_gaussians(model, prior):
    n = 4000
    with prior.apply(model):
        draws = pm.sample_prior_predictive(
            n, var_names=["beta", "sigma", "twice"], random_seed=1
        ).prior
    assert draws["beta"].dims == ("chain", "draw", "coef")
    values = np.concatenate([draws["beta"][0], np.log(draws["sigma"].values[0])[:, None]], axis=1)
    sd = np.sqrt(np.diag(prior.covariance)[:4])
    z = (values - prior.mean[:4]) / sd
    assert np.abs(z.mean(axis=0)).max() < 5 / np.sqrt(n)
    assert np.abs(z.std(axis=0) - 1).max() < 5 / np.sqrt(2 * n)
    correlation = prior.covariance[:4, :4] / np.outer(sd, sd)
    assert np.abs(np.corrcoef(z.T) - correlation).max() < 5 / np.sqrt(n)


def test_it_is_pickled_and_applied_to_its_own_model(model, prior):
    again = pickle.loads(pickle.dumps(prior)).apply(prior.apply(model))
    position = prior.mean + 0.1
    expected = multivariate_normal(prior.mean, prior.covariance).logpdf(position)
    logp = again.compile_logp(vars=again.free_RVs)(point_of(prior, again, position))
    assert logp == pytest.approx(expected, abs=1e-8)
    assert repr(prior).startswith("<GaussianPrior of 27 parameters: beta[3], sigma, shares[3]")


def test_blocks_are_the_conditional_laws():
    rng = np.random.default_rng(0)
    A = rng.standard_normal((4, 4))
    S = A @ A.T
    first, second = conditional_blocks(np.arange(4.0), S, [slice(0, 2), slice(2, 4)])
    np.testing.assert_allclose(first.factor @ first.factor.T, S[:2, :2])
    slopes = S[2:, :2] @ np.linalg.inv(S[:2, :2])
    np.testing.assert_allclose(second.slopes, slopes)
    conditional = S[2:, 2:] - slopes @ S[:2, 2:]
    np.testing.assert_allclose(second.factor @ second.factor.T, conditional, atol=1e-10)


def small(**changes):
    """Return a small model, with another distribution for some of its variables."""
    distributions = {
        "a": lambda: pm.Normal("a", 0, 1, shape=2),
        "b": lambda: pm.HalfNormal("b", 1),
        **changes,
    }
    with pm.Model() as model:
        for make in distributions.values():
            make()
        pm.Normal("y", model["a"].sum(), 1, observed=[0.0, 1.0])
    return model


OTHERS = {
    "a variable is new": ({"c": lambda: pm.Normal("c")}, "The run has no 'c'"),
    "a variable is gone": ({"b": lambda: None}, "The model has no 'b'"),
    "a group is new": ({"a": lambda: pm.Normal("a", 0, 1, shape=3)}, "such as new groups"),
    "a transform differs": ({"b": lambda: pm.Normal("b")}, "'b' has another transform"),
    "bounds differ": ({"b": lambda: pm.Uniform("b", 0, 9)}, "'b' has another transform"),
    "a potential": ({"p": lambda: pm.Potential("p", pt.zeros(()))}, "part of the old prior"),
}


@pytest.mark.parametrize(("changes", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_another_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        gaussian_prior(small()).apply(small(**changes))


def test_bounds_by_other_parameters_are_refused():
    def uniform():
        return pm.Uniform("b", 0, pm.math.exp(pm.modelcontext(None)["a"][0]))

    with pytest.raises(ValueError, match="bounds of 'b' depend on other parameters"):
        gaussian_prior(small()).apply(small(b=uniform))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="must be a PyMC model"):
        gaussian_prior(small()).apply("model")


@pytest.mark.filterwarnings("ignore:Data in .* contains missing values")
def test_missing_values_are_refused():
    with pm.Model() as model:
        a = pm.Normal("a")
        pm.Normal("y", a, 1, observed=np.array([0.0, np.nan]))
    with pytest.raises(ValueError, match="'y_unobserved' are missing values"):
        gaussian_prior(small()).apply(model)
