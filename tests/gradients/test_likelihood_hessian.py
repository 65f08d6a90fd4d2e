"""Hessians in one pass are those of the model, for any likelihood, link and grouping."""

import numpy as np
import pymc as pm
import pytest

from modes import PYTHON
from targets import gradient_of

from pymc_sghmc.compat import ancestors
from pymc_sghmc.gradients.second_derivatives import second_derivatives
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.step.gradients import compile_second_derivatives
from pymc_sghmc.tuning.curvature import CountedPasses, hessian_by_differences
from pymc_sghmc.tuning.variational_fit import first_scales

N = 300
G = 70


def data():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((N, 3))
    group = rng.integers(G, size=N)
    return rng, x, group


def logistic():
    rng, x, _ = data()
    b = pm.Normal("b", 0, 2, shape=3)
    pm.Bernoulli("y", logit_p=pm.math.dot(x, b), observed=rng.integers(2, size=N))


def negative_binomial_with_groups():
    rng, x, group = data()
    b = pm.Normal("b", 0, 1, shape=3)
    tau = pm.HalfNormal("tau", 1)
    alpha = pm.Exponential("alpha", 1)
    u = pm.Normal("u", 0, 1, shape=G)
    mu = pm.math.exp(pm.math.dot(x, b) + tau * u[group])
    pm.NegativeBinomial("y", mu=mu, alpha=alpha, observed=rng.poisson(2, size=N))


def student_t_with_slopes():
    rng, x, group = data()
    a = pm.StudentT("a", nu=4, mu=0, sigma=1, shape=(G, 2))
    nu = pm.Gamma("nu", 2, 0.5)
    sigma = pm.HalfNormal("sigma", 1)
    mu = a[group, 0] + a[group, 1] * x[:, 0]
    pm.StudentT("y", nu=nu, mu=mu, sigma=sigma, observed=rng.standard_normal(N))


def categories():
    rng, x, _ = data()
    b = pm.Normal("b", 0, 1, shape=(3, 2))
    eta = pm.math.concatenate([np.zeros((N, 1)), pm.math.dot(x, b)], axis=1)
    pm.Categorical("y", logit_p=eta, observed=rng.integers(3, size=N))


def two_likelihoods_and_correlated_priors():
    rng, x, group = data()
    b = pm.MvNormal("b", np.zeros(3), np.eye(3) + 0.5)
    u = pm.ZeroSumNormal("u", 1, shape=G)
    sigma = pm.HalfNormal("sigma", 1)
    eta = pm.math.dot(x, b) + u[group]
    pm.Normal("y", eta, sigma, observed=rng.standard_normal(N))
    pm.Poisson("k", pm.math.exp(pm.math.dot(x[:200], b)), observed=rng.poisson(1, size=200))


def centred_effects():
    rng, x, group = data()
    mu = pm.Normal("mu", 0, 1)
    tau = pm.HalfNormal("tau", 1)
    u = pm.Normal("u", mu, tau, shape=G)
    b = pm.Normal("b", 0, 1, shape=3)
    eta = pm.math.dot(x, b) + u[group]
    pm.Bernoulli("y", logit_p=eta, observed=rng.integers(2, size=N))


MODELS = [
    logistic,
    negative_binomial_with_groups,
    student_t_with_slopes,
    categories,
    two_likelihoods_and_correlated_priors,
    centred_effects,
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda f: f.__name__)
def counted(request):
    with pm.Model() as model:
        request.param()
    gradient = gradient_of(
        model, dict.fromkeys([v.name for v in model.observed_RVs], 20), compile_kwargs=PYTHON
    )
    gradient.passes.second_derivatives = second_derivatives(gradient.density)
    assert gradient.passes.second_derivatives is not None
    return CountedPasses(gradient.passes)


def points(counted, n):
    d = counted.over.density.d
    return list(0.3 * np.random.default_rng(2).standard_normal((n, d)))


def test_mean_hessians_are_those_by_differences(counted):
    d = counted.over.density.d
    rng = np.random.default_rng(3)
    factor = np.tril(0.1 * rng.standard_normal((d, d))) + np.eye(d)
    some = points(counted, 3)
    shares = [tuple(np.sort(rng.choice(n, n // 2, replace=False)) for n in map(len, counted.rows))]
    shares += [None, shares[0]]
    exact = counted.mean_hessian(some, shares, factor)
    of_each = [
        hessian_by_differences(counted.gradient(share), x, factor, 1e-5)
        for x, share in zip(some, shares, strict=True)
    ]
    expected = np.mean(of_each, axis=0)
    scale = np.sqrt(np.outer(np.abs(np.diag(expected)), np.abs(np.diag(expected))))
    np.testing.assert_array_less(np.abs(exact - expected), 2e-3 * scale + 1e-3)


def test_products_and_diagonals_are_those_of_the_hessian(counted):
    d = counted.over.density.d
    some = points(counted, 2)
    hessian = counted.mean_hessian(some, [None, None], np.eye(d))
    product = counted.hessian_product(some, [None, None])
    v = np.random.default_rng(4).standard_normal(d)
    np.testing.assert_allclose(
        product(v), hessian @ v, rtol=0.01, atol=0.02 * np.abs(hessian).max()
    )
    x = some[0]

    def gradient(point):
        return counted.likelihood(point)

    expected = np.diag(hessian_by_differences(gradient, x, np.eye(d), 1e-5))
    np.testing.assert_allclose(counted.likelihood_curvatures(x), expected, rtol=1e-3, atol=1e-2)


def test_a_hessian_takes_as_many_passes_for_any_number_of_parameters(counted):
    d = counted.over.density.d
    [x] = points(counted, 1)
    counted.mean_hessian([x], [None], np.eye(d))
    before = counted.passes
    counted.mean_hessian([x], [None], np.eye(d))
    assert counted.passes - before == pytest.approx(1)


def correlated_slopes():
    rng, x, group = data()
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.Exponential.dist(1))
    mu = pm.Normal("mu", 0, 1, shape=2)
    u = mu + pm.Normal("z", 0, 1, shape=(G, 2)) @ chol.T
    sigma = pm.HalfNormal("sigma", 1)
    mu = u[group, 0] + u[group, 1] * x[:, 0]
    pm.StudentT("y", nu=4, mu=mu, sigma=sigma, observed=rng.standard_normal(N))


def sites_in_regions():
    rng, x, group = data()
    region = pm.Normal("region", pm.Normal("mu", 0, 1), pm.HalfNormal("s", 1), shape=7)
    site = pm.Normal("site", region[np.arange(G) % 7], pm.HalfNormal("tau", 1), shape=G)
    eta = site[group] + x[:, 0] * pm.Normal("b", 0, 1)
    pm.Poisson("y", pm.math.exp(eta), observed=rng.poisson(1, size=N))


EFFECTS = [
    centred_effects,
    sites_in_regions,
    pytest.param(negative_binomial_with_groups, marks=pytest.mark.slow),
    pytest.param(correlated_slopes, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("write", EFFECTS, ids=lambda f: f.__name__)
def test_hessians_are_exact_in_all_coordinates_of_effects(write):
    """Rows are linear in effects, and a chain's coordinates of these change while it is set up."""
    with pm.Model() as model:
        write()
    gradient = gradient_of(model, 20, rewriting=Rewriting(may_centre=True), compile_kwargs=PYTHON)
    second = gradient.passes.second_derivatives = second_derivatives(gradient.density)
    assert not second.coordinates.are_own
    counted = CountedPasses(gradient.passes)
    [centring] = gradient.density.rewrites
    some = points(counted, 2)
    d = some[0].size
    n = centring.as_written.size
    rng = np.random.default_rng(5)
    known = 3 * rng.random(n), rng.standard_normal(n)
    for coordinates in [(np.zeros(n),), (np.full(n, 0.6),), (np.zeros(n), *known)]:
        centring.set_coordinates(*coordinates)
        exact = counted.mean_hessian(some, [None, None], np.eye(d))
        of_each = [hessian_by_differences(counted.gradient(None), x, np.eye(d), 1e-5) for x in some]
        expected = np.mean(of_each, axis=0)
        np.testing.assert_allclose(exact, expected, atol=2e-3 * np.abs(expected).max())
        v = rng.standard_normal(d)
        product = counted.hessian_product(some, [None, None])(v)
        np.testing.assert_allclose(product, expected @ v, atol=0.01 * np.abs(expected @ v).max())
        before = counted.passes
        counted.hessian_product(some, [None, None])
        assert counted.passes - before == len(some)  # curvatures and slopes of rows in one each


def test_first_scales_are_those_by_differences_in_one_pass():
    with pm.Model() as model:
        centred_effects()
    gradient = gradient_of(model, 20, rewriting=Rewriting(may_centre=True), compile_kwargs=PYTHON)
    start = points(CountedPasses(gradient.passes), 1)[0]
    by_differences = CountedPasses(gradient.passes)
    expected = first_scales(by_differences, start)
    gradient.passes.second_derivatives = second_derivatives(gradient.density)
    counted = CountedPasses(gradient.passes)
    assert counted.has_exact_hessian  # which derivatives of rows take passes for, once
    before = counted.passes
    np.testing.assert_allclose(first_scales(counted, start), expected, rtol=1e-3)
    assert counted.passes - before == 1
    assert by_differences.passes > 10


def laplace(mu, sigma, y):
    pm.Laplace("y", mu, sigma, observed=y)


def quantile(mu, sigma, y):
    pm.AsymmetricLaplace("y", mu=mu, b=1 / sigma, q=0.9, observed=y)


def student(mu, sigma, y):
    pm.StudentT("y", nu=4, mu=mu, sigma=sigma, observed=y)


def laplace_mixture(mu, sigma, y):
    parts = [pm.Normal.dist(mu, sigma), pm.Laplace.dist(mu, 3)]
    pm.Mixture("y", w=[0.9, 0.1], comp_dists=parts, observed=y)


@pytest.mark.parametrize(
    ("likelihood", "expected"),
    [(laplace, True), (quantile, True), (student, False), (laplace_mixture, False)],
)
def test_log_likelihoods_that_are_bent_in_kinks_alone_have_no_exact_hessian(likelihood, expected):
    rng, x, _ = data()
    with pm.Model() as model:
        mu = pm.math.dot(x, pm.Normal("b", 0, 1, shape=3))
        likelihood(mu, pm.HalfNormal("sigma", 1), rng.standard_normal(N))
    gradient = gradient_of(model, 20, compile_kwargs=PYTHON)
    compile_second_derivatives(gradient)
    assert CountedPasses(gradient.passes).has_exact_hessian == (not expected)


@pytest.mark.parametrize(("n_times", "is_compiled"), [(2, True), (30, False)])
def test_second_derivatives_that_would_take_minutes_to_compile_are_left_out(n_times, is_compiled):
    """Of a recursion written step by step, such as the forward algorithm of a Markov chain."""
    _, x, _ = data()
    with pm.Model() as model:
        a, b, c = (pm.HalfNormal(name, 1) for name in "abc")
        level = x[:, 0]
        for _ in range(n_times):
            level = pm.math.tanh(a * level + b * pm.math.sin(c * level + x[:, 1]))
        pm.Normal("y", level, 1, observed=x[:, 2])
    gradient = gradient_of(model, 20, compile_kwargs=PYTHON)
    assert (second_derivatives(gradient.density) is not None) == is_compiled


def test_second_derivatives_of_many_numbers_are_a_graph_of_as_many_operations():
    """Which takes PyTensor a minute where each of them has its own."""

    def n_operations(n_classes):
        rng, x, _ = data()
        with pm.Model() as model:
            b = pm.Normal("b", 0, 1, shape=(3, n_classes))
            outcome = rng.integers(n_classes, size=N)
            pm.Categorical("y", logit_p=pm.math.dot(x, b), observed=outcome)
        [found] = second_derivatives(gradient_of(model, N).density).slopes.by_numbers
        return sum(variable.owner is not None for variable in ancestors([found.of_weighted]))

    assert n_operations(10) == n_operations(3)


def test_rows_that_see_no_linear_predictor_have_differences():
    _, x, _ = data()
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1, shape=(3, 16))
        pm.Normal("y", pm.math.tanh(pm.math.dot(x, b)).sum(axis=1), 1, observed=x[:, 0])
    gradient = gradient_of(model, 20, compile_kwargs=PYTHON)
    assert second_derivatives(gradient.density) is None
    counted = CountedPasses(gradient.passes)
    point = np.linspace(-0.3, 0.4, 48)
    hessian = counted.mean_hessian([point], [None], np.eye(48))
    expected = hessian_by_differences(counted.gradient(None), point, np.eye(48), 1e-5)
    np.testing.assert_allclose(hessian, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())
