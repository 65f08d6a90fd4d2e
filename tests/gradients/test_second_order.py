"""Second-order control variates: their mean is exact, their noise known, and given up where it is wild."""

import copy
import itertools
import logging

from dataclasses import replace
from functools import cache

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytest

from modes import FAST, QUIET, C
from pymc.pytensorf import compile
from pymc.step_methods.state import equal_dataclass_values
from pytensor import config, scan
from scipy.sparse import csr_array
from targets import gradient_of, minibatch_of, start_of

from pymc_sghmc import SGHMC, SGLD, SGNHT, GammaGibbs
from pymc_sghmc.exceptions import NotApplicable
from pymc_sghmc.gradients import second_order as module
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.expansion import fitted
from pymc_sghmc.gradients.limit_coordinates import rows_at_limits
from pymc_sghmc.gradients.metric import Dense, Identity
from pymc_sghmc.gradients.second_derivatives import derivatives_in
from pymc_sghmc.gradients.second_order import MOST_UNKNOWNS, SecondOrder, second_order
from pymc_sghmc.hierarchy.centring import centring_of
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.loaders import ArrayLoader
from pymc_sghmc.rows.orders import ByLeverage
from pymc_sghmc.tuning.budget import inner_steps
from pymc_sghmc.tuning.chain_tuning import ByHand, ChainTuning
from pymc_sghmc.tuning.gradient_noise import MOST_FAR_NOISE

N = 40
rng = np.random.default_rng(0)
X, GROUP, COUNTS = rng.standard_normal((N, 3)), rng.integers(0, 4, N), rng.poisson(2, N)
MANY = np.random.default_rng(9).integers(0, 70, N)
COIN, REAL = rng.binomial(1, 0.5, N), rng.standard_t(4, N)


def logistic(x=X, y=COIN):
    b = pm.Normal("b", 0, 1, shape=x.shape[1])
    pm.Bernoulli("y", logit_p=pm.math.dot(pm.Data("x", x), b), observed=y)


def negative_binomial():
    b, alpha = pm.Normal("b", 0, 1, shape=3), pm.Exponential("alpha", 1)
    pm.NegativeBinomial("y", mu=pm.math.exp(0.3 * X @ b), alpha=alpha, observed=COUNTS)


def student():
    b, sigma, nu = pm.Normal("b", 0, 1, shape=3), pm.HalfNormal("sigma"), pm.Gamma("nu", 2, 0.1)
    pm.StudentT("y", nu=nu, mu=X @ b, sigma=sigma, observed=REAL)


def non_centred():
    z, tau, m = pm.Normal("z", 0, 1, shape=4), pm.HalfNormal("tau"), pm.Normal("m")
    pm.Poisson("y", pm.math.exp(m + tau * z[GROUP]), observed=COUNTS)


def columns():
    """Intercepts and slopes in the columns of a matrix, which is picked from in both orders."""
    u = pm.Normal("z", 0, 1, shape=(4, 2)) * pm.HalfNormal("tau", shape=2)
    mu = pm.Normal("m") + u[GROUP, 0] + u[:, 1][GROUP] * X[:, 0]
    pm.Normal("y", mu, 1.0, observed=REAL)


def softmax():
    pm.Categorical("y", logit_p=X @ pm.Normal("b", 0, 1, shape=(3, 4)), observed=GROUP)


def ordered():
    """Cutpoints are sums of exponentials of unknowns that all rows share."""
    where = {"transform": pm.distributions.transforms.ordered, "initval": [-1.0, 0.0, 1.0]}
    c = pm.Normal("c", 0, 3, shape=3, **where)
    effects = pm.HalfNormal("tau") * pm.Normal("z", shape=4)
    eta = X @ pm.Normal("b", shape=3) + effects[MANY % 4]
    pm.OrderedLogistic("y", eta=eta, cutpoints=c, observed=GROUP)


def mixture():
    w, sigma = pm.Dirichlet("w", np.ones(2)), pm.HalfNormal("sigma")
    pm.NormalMixture("y", w, pm.Normal("mu", 0, 2, shape=2), sigma, observed=REAL)


def products_that_all_rows_share():
    a, k = pm.Normal("a"), pm.Normal("k", 0, 0.3)
    mu = pm.math.tanh(a * k) + X[:, 0] * a
    pm.ZeroInflatedPoisson("y", pm.math.sigmoid(a + k), pm.math.exp(0.3 * mu), observed=COUNTS)


def what_all_rows_share_alone():
    pm.Gamma("y", pm.HalfNormal("alpha"), pm.HalfNormal("beta"), observed=1.0 + COUNTS)


def two_groups():
    b, sigma = pm.Normal("b", 0, 1, shape=3), pm.HalfNormal("sigma")
    pm.Normal("y", X @ b, sigma, observed=REAL)
    pm.Poisson("k", pm.math.exp(0.2 * X[:15] @ b), observed=COUNTS[:15])


def of_minibatches():
    x, y = pm.Minibatch(X, REAL, batch_size=4)
    pm.StudentT("y", nu=4, mu=x @ pm.Normal("b", 0, 1, shape=3), observed=y, total_size=N)


CASES = {
    logistic: 4,
    negative_binomial: 4,
    student: 4,
    non_centred: 4,
    columns: 4,
    softmax: 4,
    ordered: 4,
    mixture: 4,
    products_that_all_rows_share: 4,
    what_all_rows_share_alone: 4,
    two_groups: {"y": 4, "k": 3},
}


def compiled(write, batch_size):
    with pm.Model() as model:
        write()
    found = second_order(gradient_of(model, batch_size))
    assert isinstance(found, SecondOrder), found
    return found


@cache
def compiled_case(write):
    return compiled(write, CASES[write])


def built(write, batch_size=4):
    """A gradient, a position near its centre, and a metric of about the posterior's width."""
    is_case = write in CASES and batch_size == CASES[write]
    found = copy.deepcopy(compiled_case(write)) if is_case else compiled(write, batch_size)
    d, dtype = found.density.d, found.density.dtype
    own = np.random.default_rng(1)
    centre = (0.1 * own.standard_normal(d)).astype(dtype)
    metric = Dense(np.tril(0.1 * own.standard_normal((d, d))) + 0.2 * np.eye(d))
    found.set_centre(centre, metric)
    return found, (centre + 0.5 * own.standard_normal(d)).astype(dtype), metric


def both(gradient, position, numbers):
    rows = [np.atleast_1d(np.asarray(i, dtype=np.int64)) for i in numbers]
    logp, grad = gradient(position, minibatch_of(gradient, *rows))
    return np.array([logp, *grad])


def law(gradient, position):
    """Mean and covariance of log-density and gradient over all minibatches of one row of each group."""
    rows = [
        [(i, count / pool.size) for i, count in enumerate(counts)]
        if whole is None
        else [(whole, 1.0)]
        for pool, counts, whole in zip(
            gradient.order.pools, gradient.order.counts, gradient.data.whole, strict=True
        )
    ]
    values, p = [], []
    for drawn in itertools.product(*rows):
        values.append(both(gradient, position, [i for i, _ in drawn]))
        p.append(np.prod([p for _, p in drawn]))
    values, p = np.array(values), np.array(p)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    mean = p @ values
    return mean, ((values - mean).T * p) @ (values - mean)


def law_that_is_known(gradient, position, metric, mean, noise):
    """Hold mean and noise against all rows, to these tolerances; return the covariance."""
    found, covariance = law(gradient, position)
    logp, grad = gradient.passes.log_density(position)
    np.testing.assert_allclose(found, [logp, *grad], rtol=mean, atol=mean)
    [by_group] = gradient.noise_at([position], metric)
    expected = np.diag(metric.factor.T @ covariance[1:, 1:] @ metric.factor)
    np.testing.assert_allclose(sum(by_group), expected, rtol=noise, atol=1e-12)
    return covariance


# --- The mean and the noise


@pytest.mark.parametrize("write", CASES, ids=lambda write: write.__name__)
def test_mean_over_all_minibatches_is_exact_and_the_noise_is_known(write):
    gradient, position, metric = built(write, CASES[write])
    for there in (position, gradient.anchor.centre):
        covariance = law_that_is_known(gradient, there, metric, mean=1e-10, noise=1e-9)
        if there is not position:
            assert np.abs(covariance).max() < 1e-18  # no noise at the centre
    change = gradient.anchor._replace(hessian=(1.01 * gradient.anchor.hessian[0],))
    gradient.anchor = change  # the test can fail
    assert (
        np.abs(law(gradient, position)[0][1:] - gradient.passes.log_density(position)[1]).max()
        > 1e-4
    )


def centred():
    u = pm.Normal("u", pm.Normal("m"), pm.HalfNormal("tau"), shape=4)
    sigma = pm.HalfNormal("sigma")
    pm.StudentT("y", nu=4, mu=u[GROUP] + X[:, 0], sigma=sigma, observed=REAL)


def in_their_own_coordinates(write):
    """Control variates of a model with effects, in coordinates by what the rows say."""
    with pm.Model() as model:
        write()
    plain = gradient_of(model, 4, rewriting=Rewriting(may_centre=True))
    own = np.random.default_rng(3)
    centring = centring_of(plain.density)
    n = centring.as_written.size
    centring.set_coordinates(np.zeros(n), own.exponential(3, n), own.standard_normal(n))
    return second_order(plain), centring


@pytest.mark.parametrize(
    "write", [non_centred, centred, columns, ordered], ids=lambda w: w.__name__
)
def test_effects_have_an_exact_mean_and_known_noise_in_any_coordinates(write):
    gradient, centring = in_their_own_coordinates(write)
    d = gradient.density.d
    own = np.random.default_rng(1)
    centre = 0.1 * own.standard_normal(d)
    metric = Dense(np.tril(0.1 * own.standard_normal((d, d))) + 0.2 * np.eye(d))
    gradient.set_centre(centre, metric)
    assert gradient.is_right(centre, metric)
    np.testing.assert_allclose(gradient.anchor.centre, centring.effects(centre))
    for there in (centre + 0.5 * own.standard_normal(d), centre):
        covariance = law_that_is_known(gradient, there, metric, mean=1e-9, noise=1e-5)
    assert np.abs(covariance).max() < 1e-18
    assert gradient.distance(centre) == 0.0


def alpha_of_each_group():
    alpha = pm.HalfCauchy("alpha", 10, shape=4)
    mu = pm.math.exp(X[:, 0] * pm.Normal("m"))
    pm.NegativeBinomial("y", mu=mu, alpha=alpha[GROUP], observed=COUNTS)


def share_of_zeros():
    psi, alpha = pm.Beta("psi", 2, 1), pm.HalfCauchy("alpha", 10)
    mu = pm.math.exp(X @ pm.Normal("b", shape=3))
    pm.ZeroInflatedNegativeBinomial("y", psi=psi, mu=mu, alpha=alpha, observed=COUNTS)


def added_variance():
    tau = pm.HalfNormal("tau")
    pm.Normal("y", X @ pm.Normal("b", shape=3), pm.math.sqrt(1 + tau**2), observed=REAL)


AT_LIMITS = [
    (alpha_of_each_group, {"alpha_log__": 1.0}),
    (share_of_zeros, {"alpha_log__": 1.0, "psi_logodds__": 1.0}),
    (added_variance, {"tau_log__": -1.0}),
]


@pytest.mark.parametrize(
    ("write", "sides"), AT_LIMITS, ids=lambda case: getattr(case, "__name__", "")
)
def test_rows_at_limits_have_an_exact_mean_and_known_noise(write, sides):
    with pm.Model() as model:
        write()
    gradient = second_order(gradient_of(model, 4))
    density = gradient.density
    in_chain = gradient.derivatives
    gradient.see_rows_by(derivatives_in(density, rows_at_limits(density, sides)))
    d = density.d
    own = np.random.default_rng(1)
    centre = 0.1 * own.standard_normal(d)
    for name, sign in sides.items():
        centre[density.unknowns.places[name]] += 2 * sign
    metric = Dense(np.tril(0.1 * own.standard_normal((d, d))) + 0.2 * np.eye(d))
    gradient.set_centre(centre, metric)
    assert gradient.is_right(centre, metric)
    for there in (centre + 0.5 * own.standard_normal(d), centre):
        covariance = law_that_is_known(gradient, there, metric, mean=1e-9, noise=1e-5)
    assert np.abs(covariance).max() < 1e-18
    # the limit is a place like others, where the noise is what it is nearby
    far, farther = centre.copy(), centre.copy()
    for name, sign in sides.items():
        far[density.unknowns.places[name]] += 10 * sign
        farther[density.unknowns.places[name]] += 20 * sign
    noise = [np.trace(law(gradient, there)[1][1:, 1:]) for there in (far, farther)]
    assert noise[1] == pytest.approx(noise[0], rel=1e-2)
    gradient.see_rows_by(in_chain)  # the test can fail
    gradient.set_centre(centre, metric)
    noise = [np.trace(law(gradient, there)[1][1:, 1:]) for there in (far, farther)]
    assert noise[1] > 3 * noise[0]


def counts_in_groups():
    z, tau = pm.Normal("z", shape=4), pm.HalfNormal("tau")
    mu = pm.math.exp(pm.Normal("m") + (tau * z)[GROUP])
    pm.NegativeBinomial("y", mu=mu, alpha=pm.HalfCauchy("alpha", 10), observed=COUNTS)


def test_rows_at_limits_see_effects_as_they_did():
    gradient, centring = in_their_own_coordinates(counts_in_groups)
    density = gradient.density
    names = [density.unknowns.name_of(place) for place in density.transformed_in_rows]
    assert names == ["alpha_log__"]  # rows see effects, and not their scale
    alpha = density.unknowns.places["alpha_log__"]
    gradient.see_rows_by(derivatives_in(density, rows_at_limits(density, {"alpha_log__": 1.0})))
    own = np.random.default_rng(1)
    centre = 0.1 * own.standard_normal(density.d)
    centre[alpha] = 3.0
    metric = Dense(np.tril(0.1 * own.standard_normal(2 * [density.d])) + 0.2 * np.eye(density.d))
    gradient.set_centre(centre, metric)
    assert gradient.is_right(centre, metric)
    seen = centring.effects(centre)
    seen[alpha] = np.exp(-3.0)
    np.testing.assert_allclose(gradient.anchor.centre, seen)
    for there in (centre + 0.5 * own.standard_normal(density.d), centre):
        covariance = law_that_is_known(gradient, there, metric, mean=1e-9, noise=1e-5)
    assert np.abs(covariance).max() < 1e-18


def test_a_scale_alone_makes_no_noise():
    """Where rows see the same effects, it doesn't matter how large their scale is."""
    gradient, centring = in_their_own_coordinates(non_centred)
    centre = 0.1 * np.random.default_rng(1).standard_normal(6)
    gradient.set_centre(centre, Identity(6))
    model = centring.to_model(centre)
    z, tau, _ = (gradient.density.unknowns.places[name] for name in ("z", "tau_log__", "m"))
    for change in (-4.0, 3.0):
        other = model.copy()
        other[tau] += change
        other[z] *= np.exp(-change)
        there = centring.from_model(other)
        _, covariance = law(gradient, there)
        assert np.abs(covariance).max() < 1e-16
        assert gradient.distance(there) < 1e-6
        assert np.abs(there - centre).max() > 1
    # the test can fail: with log τ among what rows see
    in_chain = copy.deepcopy(compiled_case(non_centred))
    in_chain.set_centre(model, Identity(6))
    assert np.abs(law(in_chain, other)[1]).max() > 1e-3


def test_noise_and_forces_of_many_rows_are_told_by_some():
    """Rows drawn as minibatches draw them: both within 4.5 standard errors of the exact ones."""
    n = 120_000
    rows = np.random.default_rng(3)
    x = rows.standard_t(3, (n, 3))
    y = rows.binomial(1, 1 / (1 + np.exp(-x @ [0.5, -1.0, 0.0])))
    gradient, position, _ = built(lambda: logistic(x, y))
    [[found]] = gradient.noise_at([position], Identity(3))
    assert gradient.noise_share < 0.5
    [(_, b, C)] = (table.T for table in gradient.anchor.tables)
    eta = x @ position
    left = (y - 1 / (1 + np.exp(-eta)) - b - C * eta)[:, None] * x
    order = gradient.anchor.order
    p = (order.counts[0] / order.pools[0].size)[:, None]
    exact = (left**2 / p).sum(axis=0) - left.sum(axis=0) ** 2
    of_one = np.sqrt((p * (left / p) ** 4).sum(axis=0) - (left**2 / p).sum(axis=0) ** 2)
    error = of_one / np.sqrt(gradient.noise_share * n)
    assert (error < 0.05 * exact).all()
    assert (np.abs(found - exact) < 4.5 * error).all()
    forces, share = gradient.by_many_rows([gradient.anchor.position, position])
    for force, point, variance in zip(
        forces, [gradient.anchor.position, position], [0, exact], strict=True
    ):
        off = np.abs(force - gradient.passes.log_density(point)[1])
        assert (off < 4.5 * np.sqrt(variance / (share * n)) + 1e-6).all()


def of_one_group_each():
    tau, b = pm.HalfNormal("tau"), pm.Normal("b", shape=3)
    u = pm.Normal("u", 0, tau, shape=70)
    pm.Bernoulli("y", logit_p=(X @ b + u[MANY]), observed=COIN)


def test_few_derivatives_of_each_row_give_the_same_gradient(monkeypatch):
    full, position, metric = built(of_one_group_each)
    monkeypatch.setattr(module, "MOST_UNKNOWNS", 0)
    few, _, _ = built(of_one_group_each)
    assert len(full.anchor.hessian) == 1
    assert len(few.anchor.hessian) == 3
    np.testing.assert_array_equal(few.order.counts[0], full.order.counts[0])
    rows = np.arange(0, N, 3)
    for there in (position, full.anchor.centre):
        np.testing.assert_allclose(both(few, there, [rows]), both(full, there, [rows]), rtol=1e-9)
        [few_noise], [full_noise] = (g.noise_at([there], metric) for g in (few, full))
        np.testing.assert_allclose(few_noise, full_noise, rtol=1e-7, atol=1e-10)
    mean, _ = law(few, position)
    logp, grad = few.passes.log_density(position)
    np.testing.assert_allclose(mean, [logp, *grad], rtol=1e-10, atol=1e-10)


def test_rows_of_two_members_at_the_end_are_seen():
    """Among so many parameters that second derivatives are a sparse matrix."""
    n, few, d = 15_000, 70, 70 + MOST_UNKNOWNS
    draws = np.random.default_rng(2)
    first, other = np.sort(draws.integers(0, few, n)), draws.integers(0, few, n)
    second = np.where(np.arange(n) < n - 5, 0.0, 0.5)
    of_many = draws.integers(0, MOST_UNKNOWNS, n)
    with pm.Model() as model:
        u, v = pm.Normal("u", shape=few), pm.Normal("v", shape=MOST_UNKNOWNS)
        mu = u[first] + second * u[other] + v[of_many]
        pm.Normal("y", mu, 1, observed=np.zeros(n))
    found = second_order(gradient_of(model, 4))
    found.set_centre(np.zeros(d), Identity(d))
    values = np.concatenate([np.ones(n), second, np.ones(n)])
    columns = np.concatenate([first, other, few + of_many])
    X = csr_array((values, (np.tile(np.arange(n), 3), columns)), shape=(n, d))
    hessian = csr_array(found.anchor.hessian, shape=(d, d))
    assert abs(hessian + X.T @ X).max() < 1e-6


def test_many_parameters_that_all_rows_see_are_refused():
    X = np.random.default_rng(2).standard_normal((2000, 1001))
    with pm.Model() as model:
        pm.Normal("y", X @ pm.Normal("b", shape=1001), 1, observed=np.zeros(2000))
    with pytest.raises(NotApplicable, match="depend on few"):
        second_order(gradient_of(model, 4))


def test_mean_is_exact_with_a_group_used_whole_and_for_models_with_minibatches():
    for write, size in ((two_groups, {"y": 4, "k": 15}), (of_minibatches, None)):
        gradient, position, _ = built(write, size)
        mean, _ = law(gradient, position)
        logp, grad = gradient.passes.log_density(position)
        np.testing.assert_allclose(mean, [logp, *grad], rtol=1e-10, atol=1e-10)


def test_mean_in_single_precision():
    with config.change_flags(floatX="float32"):
        gradient, position, _ = built(lambda: logistic(X.astype("float32")))
        mean, _ = law(gradient, position)
        assert gradient.anchor.tables[0].dtype == np.float32
        np.testing.assert_allclose(mean[1:], gradient.passes.log_density(position)[1], rtol=2e-4)


def test_one_minibatch_is_the_formula_by_hand():
    gradient, theta, _ = built(logistic)
    a, b, c = gradient.anchor.tables[0].T
    np.testing.assert_allclose(gradient.anchor.hessian[0], X.T * c @ X, rtol=1e-12)
    eta, rows = X @ theta, np.array([3, 7, 7, 30])
    p = 1 / (1 + np.exp(-eta))
    pool, counts = gradient.order.pools[0].size, gradient.order.counts[0]
    w = pool / rows.size / counts[rows]
    grad = X.T @ (b + c * eta) - theta + X[rows].T @ (w * (COIN - p - b - c * eta)[rows])
    log_likelihood = COIN * eta - np.log1p(np.exp(eta))
    q = a + b * eta + 0.5 * c * eta**2
    logp = q.sum() - 0.5 * theta @ theta - 1.5 * np.log(2 * np.pi)
    logp += w @ (log_likelihood - q)[rows]
    np.testing.assert_allclose(both(gradient, theta, [rows]), [logp, *grad], rtol=1e-10)


def test_compiled_graph_equals_the_call():
    for write, size in CASES.items():
        gradient, position, _ = built(write, size)
        x = gradient.density.graph.position.type("x")
        logp, grad, drawn, fixed = gradient.symbolic(x)
        function = compile([x, *drawn, *fixed], [logp, grad], on_unused_input="ignore", **FAST)
        minibatch = gradient.order.probe(np.random.default_rng(3))
        found = function(position, *minibatch.rows, *gradient.fixed_inputs(minibatch.arrays))
        for a, b in zip(found, gradient(position, minibatch), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10)


def test_far_less_noise_than_of_first_order():
    own = np.random.default_rng(4)
    x = own.standard_normal((4000, 5))
    y = own.binomial(1, 1 / (1 + np.exp(-x @ np.ones(5) / 2)))
    with pm.Model() as model:
        logistic(x, y)
    plain = gradient_of(model, 100)
    centre, factor = np.full(5, 0.5), 0.035 * np.eye(5)  # about where and how wide it is
    position = centre + factor @ own.standard_normal(5)
    second, first = second_order(plain), ControlVariates(plain)
    noise = []
    for gradient in (first, second):
        gradient.set_centre(centre, Dense(factor))
        _, grads = zip(
            *[gradient(position, gradient.order.probe(own)) for _ in range(400)], strict=True
        )
        noise.append(np.var(grads, axis=0).sum())
    # each sum of five variances of 400 draws is known within some 10 %
    assert noise[1] < noise[0] / 100
    exact = sum(second.noise_at([position], Identity(5))[0][0]) / 100
    assert abs(noise[1] / exact - 1) < 0.4


def test_slopes_are_symmetric_least_squares():
    own = np.random.default_rng(5)
    left, dzeta = own.standard_normal((2, 3, 30, 2))
    dzeta[2] = 0.0
    found = fitted(left, dzeta)
    for i in range(2):
        basis = [np.array(m, float) for m in ([[1, 0], [0, 0]], [[0, 1], [1, 0]], [[0, 0], [0, 1]])]
        design = np.stack([(dzeta[i] @ m).ravel() for m in basis], axis=1)
        x = np.linalg.lstsq(design, left[i].ravel(), rcond=None)[0]
        np.testing.assert_allclose(found[i], sum(a * m for a, m in zip(x, basis, strict=True)))
    assert (found[2] == 0).all()  # rows that nothing is known of


def test_a_cut_that_is_not_the_model_is_seen_and_not_used(caplog, monkeypatch):
    for write, size in CASES.items():
        gradient, _, metric = built(write, size)
        centre = gradient.anchor.centre.astype(float)
        assert gradient.is_right(centre, metric)
        first = gradient.first
        gradient.first = lambda *args, f=first: f(*args)._replace(c=1.01 * f(*args).c)
        assert not gradient.is_right(centre, metric)
    monkeypatch.setattr(SecondOrder, "is_right", lambda self, centre, metric: False)
    with pm.Model(), caplog.at_level(logging.WARNING, logger="pymc.sghmc"):
        logistic()
        step = SGHMC(batch_size=4, gradient="second_order", compile_kwargs=FAST)
    assert "Please report the model" in caplog.text
    assert step.step(start_of(step))[1][0]["gradient_order"] == 1


# --- Where it can't be


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replace": False}, "without replacement"),
        ({"data": ArrayLoader({"x": X, "y": COIN}), "pool": None}, "without replacement"),
    ],
    ids=["replace", "loader"],
)
def test_streams_and_epochs_are_refused(settings, words):
    with pm.Model():
        b = pm.Normal("b", 0, 1, shape=3)
        x, y = pm.Data("x", X), pm.Data("y", COIN)
        pm.Bernoulli("obs", logit_p=pm.math.dot(x, b), observed=y)
        with pytest.raises(ValueError, match=words):
            SGHMC(batch_size=4, gradient="second_order", compile_kwargs=FAST, **settings)


def test_what_rows_share_by_way_of_a_loop_is_refused():
    """Each row would have a scan of its own, which takes minutes to compile."""
    with pm.Model() as model:
        k, c = pm.HalfNormal("k"), pm.Normal("c")
        decayed = scan(
            lambda x, k: x * pm.math.exp(-0.1 * k),
            outputs_info=[c + 1.0],
            non_sequences=[k],
            n_steps=5,
            return_updates=False,
        )
        pm.Normal("y", decayed[-1] + c * X[:, 0], 1, observed=REAL)
    with pytest.raises(NotApplicable, match="few linear functions"):
        second_order(gradient_of(model, 4))


def test_other_refusals():
    with pm.Model() as model:
        logistic()
        pm.Normal("other", model["b"][0] * X[:, 0], pm.HalfNormal("s"), observed=REAL)
        with pytest.raises(ValueError, match="parameters of other steps"):
            SGHMC([model["b"]], batch_size=4, gradient="second_order", compile_kwargs=FAST)
    with pm.Model():
        w = pm.Normal("w", 0, 1, shape=(3, 5))
        hidden = pm.math.tanh(pm.math.dot(X, w))
        pm.Normal("y", pm.math.dot(hidden, pm.Normal("v", 0, 1, shape=5)), 1, observed=REAL)
        with pytest.raises(ValueError, match="few linear functions"):
            SGHMC(batch_size=4, gradient="second_order", compile_kwargs=FAST)
    with pm.Model():
        logistic()
        with pytest.raises(ValueError, match="uses all data"):
            SGHMC(batch_size=None, gradient="second_order", compile_kwargs=FAST)


def negative_binomial_of_poisson_counts():
    # hardly known dispersion: log α has a tail that no quadratic function follows
    alpha = pm.Exponential("alpha", 0.1)
    m = pm.Normal("m", 0, 5)
    counts = np.random.default_rng(1).poisson(1.5, 3000)
    pm.NegativeBinomial("y", mu=pm.math.exp(m), alpha=alpha, observed=counts)


def test_noise_that_is_large_far_out_gets_first_order_in_words(caplog):
    rng = np.random.default_rng(1)
    x = rng.normal(size=2000)
    counts = np.zeros(2000)
    counts[:2] = 1  # so few events that the rate may be many times what it seems
    with pm.Model(), caplog.at_level(logging.INFO, logger="pymc.sghmc"):
        rate = pm.math.exp(pm.Normal("a", 0, 3) + pm.Normal("b", 0, 3) * x)
        pm.Poisson("y", rate, observed=counts)
        step = SGHMC(batch_size=2, gradient="second_order", compile_kwargs=FAST)
    assert step.tuner.setup.noise.second_order_far > 2 * MOST_FAR_NOISE
    assert "uses first-order control variates" in caplog.text
    _, [statistics] = step.step(start_of(step))
    assert statistics["gradient_order"] == 1


@pytest.mark.slow  # C takes a minute for the second derivatives
def test_chains_that_a_tail_could_send_off_are_not_lost_or_say_so():
    with pm.Model():
        negative_binomial_of_poisson_counts()
        step = SGHMC(batch_size=10, gradient="second_order", compile_kwargs=C)
    for seed in range(3):
        step.begin_chain(np.random.default_rng(seed))
        point, texts = start_of(step), []
        for _ in range(500):
            point, [statistics] = step.step(point)
            texts.append(getattr(statistics["warning"], "message", ""))
        told = sum("lost with second-order" in text for text in texts)
        assert (statistics["gradient_order"], told) in {(2, 0), (1, 1)}
        position = step.tuner.gradient.density.from_model(step.unknowns.ravel(point))
        assert step.tuner.setups.distance(position) < 10


def test_chain_that_is_lost_while_tuning_goes_on_with_first_order_and_says_so():
    with pm.Model():
        logistic()
        step = SGHMC(batch_size=10, gradient="second_order", compile_kwargs=FAST)
    point, [statistics] = step.step(start_of(step))
    assert statistics["gradient_order"] == 2
    assert step.chain.tuning.order == 2
    step.chain.state = step.chain.state._replace(position=np.full(3, 1e3))
    point = step.unknowns.unravel(step.tuner.setup.metric.to_theta(np.full(3, 1e3)), point)
    point, [statistics] = step.step(point)
    assert statistics["diverging"]
    assert "another gradient" in statistics["warning"].message
    point, [statistics] = step.step(point)
    assert statistics["gradient_order"] == 1
    assert not statistics["diverging"]
    # a chain that is restored gets first order, too
    with pm.Model():
        logistic()
        other = SGHMC(batch_size=10, gradient="second_order", compile_kwargs=FAST)
    other.sampling_state = copy.deepcopy(step.sampling_state)
    for a, b in zip(other.step(point), step.step(point), strict=True):
        for key in b[0] if isinstance(b, list) else b:
            x, y = (v[0][key] if isinstance(v, list) else v[key] for v in (a, b))
            np.testing.assert_array_equal(x, y)


def test_chain_that_goes_far_after_tuning_is_told_once():
    with pm.Model():
        logistic()
        # with steps so short that a chain which falls back isn't as fast as one that has diverged
        settings = {"gradient": "second_order", "target_bias": 1e-5, "n_steps": 1}
        step = SGHMC(batch_size=10, **settings, compile_kwargs=FAST)
    point, _ = step.step(start_of(step))
    step.stop_tuning()
    assert step.chain.tuning.learning_rate < 0.1
    texts = []
    far = 1.3 * (4 + 10 / np.sqrt(step.tuner.setup.mean_phi.size))
    for shift in (0.0, far, far):
        phi = step.tuner.setup.mean_phi + shift
        rest = np.zeros_like(phi)
        step.chain.state = step.chain.state._replace(position=phi, momentum=rest)
        point = step.unknowns.unravel(step.tuner.setup.metric.to_theta(phi), point)
        point, [statistics] = step.step(point)
        texts.append(getattr(statistics["warning"], "message", ""))
    assert ["went so far" in text for text in texts] == [False, True, False]


def test_an_operation_without_a_second_derivative_is_no_crash():
    # PyTensor 2 has that of a Bessel function, PyTensor 3 hasn't
    with pm.Model() as model:
        mu, kappa = pm.Normal("mu"), pm.HalfNormal("kappa", 5)
        pm.VonMises("y", mu, kappa, observed=REAL / 10)
    gradient = gradient_of(model, 4)
    if pytensor.__version__.startswith("2."):
        assert isinstance(second_order(gradient), SecondOrder)
    else:
        with pytest.raises(NotApplicable, match="few linear functions"):
            second_order(gradient)


def test_entries_of_a_vector_make_one_linear_predictor():
    def write():
        b = pm.Normal("b", 0, 1, shape=2)
        pm.Normal("y", b[0] + b[1] * X[:, 0], 1.0, observed=REAL)

    assert [q.m for q in built(write)[0].quadratics] == [1]
    # an intercept, a slope, the logarithms of their scales and what all rows share
    assert [q.m for q in compiled_case(columns).quadratics] == [5]


def test_a_chain_in_units_of_a_given_preconditioner_is_not_taken_for_lost():
    with pm.Model():
        logistic()
        step = SGHMC(
            batch_size=8,
            gradient="second_order",
            preconditioner=1e-6 * np.eye(3),
            compile_kwargs=FAST,
        )
    point = start_of(step)
    for _ in range(5):
        point, [statistics] = step.step(point)
        assert statistics["gradient_order"] == 2
        assert not statistics["diverging"]


# --- Sampling

SAMPLERS = [SGHMC, *(pytest.param(one, marks=pytest.mark.slow) for one in (SGLD, SGNHT))]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_gaussian_rows_have_no_noise_and_the_draws_their_exact_law(sampler):
    # y ~ N(Xb, 1): what is left of each row is 0, so that BAOAB has the posterior's variance at η = 1.
    precision = X.T @ X + np.eye(3)
    mean = np.linalg.solve(precision, X.T @ REAL)
    with pm.Model():
        b = pm.Normal("b", 0, 1, shape=3)
        pm.Normal("y", pm.math.dot(X, b), 1, observed=REAL)
        step = sampler(batch_size=4, gradient="second_order", compile_kwargs=FAST)
        idata = pm.sample(600, tune=50, chains=2, step=step, random_seed=1, **QUIET)
    assert step.tuner.setup.noise.second_order.max() < 1e-18
    # SGLD's own discretisation is predicted, the others have none
    excess = 0.0 if sampler is not SGLD else step.chain.tuning.bias
    draws = (idata.posterior["b"].values - mean) @ np.linalg.cholesky(precision)
    for z in np.moveaxis(draws, -1, 0):
        assert abs(z.mean()) < 4.5 * error(z)
        assert abs(np.mean(z**2) - 1 - excess) < 4.5 * error(z**2)


COPIES = 30  # of 40 rows: as many as are not used whole


def poisson():
    t = pm.Normal("t")
    x, counts = np.tile(X[:, 0], COPIES), np.tile(COUNTS, COPIES)
    pm.Poisson("y", pm.math.exp(t * x + 0.5), observed=counts)


@pytest.mark.parametrize("batch_size", [pytest.param(5, marks=pytest.mark.slow), "auto"])
def test_poisson_posterior_is_that_of_quadrature(batch_size):
    grid = np.linspace(-2, 3, 20001)
    sums = COUNTS @ X[:, 0] * grid - np.exp(np.outer(grid, X[:, 0]) + 0.5).sum(axis=1)
    logp = COPIES * sums - grid**2 / 2
    p = np.exp(logp - logp.max())
    p /= p.sum()
    mean = p @ grid
    sd = np.sqrt(p @ (grid - mean) ** 2)
    with pm.Model():
        poisson()
        step = SGHMC(batch_size=batch_size, gradient="second_order", compile_kwargs=FAST)
        idata = pm.sample(600, tune=100, chains=2, step=step, random_seed=1, **QUIET)
    assert (idata.sample_stats["gradient_order"].values == 2).all()
    z = (idata.posterior["t"].values - mean) / sd
    excess = step.tuner.settings.target_bias  # at most
    assert abs(z.mean()) < 4.5 * error(z)
    assert -4.5 * error(z**2) < np.mean(z**2) - 1 < excess + 4.5 * error(z**2)


def error(x):
    return float(np.squeeze(az.mcse(x)))


def test_steps_beside_that_change_the_prior_alone():
    with pm.Model():
        lam = pm.Gamma("lam", 2, 2)
        b = pm.Normal("b", 0, tau=lam, shape=3)
        pm.Bernoulli("y", logit_p=pm.math.dot(X, b), observed=COIN)
        steps = [
            SGHMC([b], batch_size=8, gradient="second_order", compile_kwargs=FAST),
            GammaGibbs([lam], compile_kwargs=FAST),
        ]
        idata = pm.sample(20, tune=20, chains=1, step=steps, random_seed=1, **QUIET)
    assert (idata.sample_stats["gradient_order"].values == 2).any()
    assert len(np.unique(idata.posterior["lam"])) == 20


# --- States and copies, and the number of rows


def step_of(batch_size="auto", **settings):
    with pm.Model():
        poisson()
        return SGHMC(
            batch_size=batch_size, gradient="second_order", compile_kwargs=FAST, **settings
        )


def going_on(step, point, n=3):
    return [step.step(point)[0] for _ in range(n)]


@pytest.mark.parametrize("batch_size", [7, "auto"])
def test_restored_copied_and_pickled_chains_go_on_exactly(batch_size):
    step = step_of(batch_size)
    step.begin_chain(np.random.default_rng(2))
    point = start_of(step)
    for _ in range(5):
        point, _ = step.step(point)
    other = step_of(batch_size)
    other.sampling_state = copy.deepcopy(step.sampling_state)
    others = [other, copy.deepcopy(step), cloudpickle.loads(cloudpickle.dumps(step))]
    expected = going_on(step, point)
    for one in others:
        for a, b in zip(going_on(one, point), expected, strict=True):
            assert equal_dataclass_values(a, b)


def test_rows_are_chosen_and_said(caplog):
    with caplog.at_level(logging.INFO, logger="pymc.sghmc"):
        step = step_of()
    assert "second-order control variates of 10 rows" in caplog.text
    step.step(start_of(step))
    assert step.tuner.gradient.data.batch_sizes == [10]
    assert step_of(batch_size=33).tuner.gradient.data.batch_sizes == [33]


def test_auto_takes_second_order_where_rows_are_chosen_and_all_of_few_rows():
    with pm.Model():
        poisson()
        step = SGHMC(batch_size="auto", compile_kwargs=FAST)
        _, [statistics] = step.step(start_of(step))
    assert statistics["gradient_order"] == 2
    with pm.Model():
        logistic()
        step = SGHMC(batch_size="auto", compile_kwargs=FAST)
    assert step.tuner.gradient.is_exact
    with pm.Model():
        logistic(np.tile(X, (COPIES, 1)), np.tile(COIN, COPIES))
        step = SGHMC(batch_size="auto", replace=False, compile_kwargs=FAST)
        _, [statistics] = step.step(start_of(step))
    assert step.tuner.gradient.data.batch_sizes == [500]
    assert statistics["gradient_order"] < 2


def test_words_for_other_batch_sizes():
    with pm.Model():
        of_minibatches()
        step = SGHMC(batch_size="auto", compile_kwargs=FAST)
    assert step.tuner.gradient.data.batch_sizes == [4]
    with pm.Model():
        logistic()
        with pytest.raises(ValueError, match=r"batch_size='all': must be a whole number"):
            SGHMC(batch_size="all", compile_kwargs=FAST)


# --- Inner steps in a draw


def test_a_draw_has_as_many_steps_as_make_it_independent():
    def drawn(**settings):
        step = step_of(**settings)
        [statistics] = step.step(start_of(step))[1]
        made = step.chain.n_updates
        assert statistics["draw_weight"] == pytest.approx(made * statistics["learning_rate"])
        return step, made

    step, made = drawn()
    tuning = step.chain.tuning
    assert made == inner_steps(tuning) < 10
    # the mean has forgotten all but a fiftieth of where it was
    assert (1 - tuning.rate) ** made < 0.02 < (1 - tuning.rate) ** (made - 2)
    assert drawn(n_steps=7)[1] == 7
    assert drawn(learning_rate=1e-5)[1] == 10  # a schedule may count steps


@pytest.mark.parametrize(
    ("rate", "n"), [(0.999, 3), (1.0, 10), (0.64, 4), (0.39, 9), (0.01, 10), (-np.inf, 10)]
)
def test_number_of_steps_is_within_its_limits(rate, n):
    tuning = ChainTuning(order=2, noise=np.zeros(1), rate=rate)
    assert inner_steps(tuning) == n
    assert inner_steps(replace(tuning, order=1)) == inner_steps(ByHand()) == 10


def test_rows_come_up_as_often_as_their_leverage_says():
    data = built(logistic)[0].data
    n, k = data.n_rows[0], 40_000
    found = ByLeverage(data, [np.arange(n, dtype=float) ** 2])
    [drawn] = found.draw(np.random.default_rng(5), None, k)[0].drawn
    expected = k * data.batch_sizes[0] * found.counts[0] / found.pools[0].size
    counts = np.bincount(drawn.ravel(), minlength=n)
    assert drawn.shape == (k, data.batch_sizes[0])
    assert drawn.dtype == np.int64
    # five standard errors of a binomial for each row
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    weights = found.weights((np.arange(n),))[0] * n  # of one row, of n
    np.testing.assert_allclose(weights * found.counts[0], found.pools[0].size)
