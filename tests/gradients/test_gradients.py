"""The compiled minibatch gradient: its mean, its noise, its data, and what it holds fixed."""

import itertools
import pickle

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from modes import FAST
from targets import gradient_of, minibatch_of, on_rows

from pymc_sghmc.gradients.metric import Identity, preconditioner_metric
from pymc_sghmc.gradients.noise import noise_covariance
from pymc_sghmc.gradients.target import Target

N, D = 9, 2
rng = np.random.default_rng(4)
X = rng.normal(size=(N, D))
Y = rng.normal(size=N) + X[:, 0]
COUNTS = rng.poisson(2.0, size=5)
THETA = np.array([0.3, -0.8, 0.4])  # b, log sigma


def regression(x=X, y=Y):
    """Normal regression with two coefficients and the scale as unknowns."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y_data", y)
        b = pm.Normal("b", 0, 2, shape=D)
        sigma = pm.HalfNormal("sigma", 1.5)
        pm.Normal("y", x @ b, sigma, observed=y)
    return model


def two_groups():
    """Nine rows of a regression and five counts, with unknowns in common."""
    with regression() as model:
        pm.Poisson("counts", pt.exp(model["b"][0]), observed=COUNTS)
    return model


def noise_of(gradient, rng, full=False):
    return noise_covariance(gradient, Identity(len(THETA)), THETA, rng, full)


def exact(model):
    """(logp, dlogp) of the model at a raveled position, by PyMC."""
    f = model.compile_fn(
        [model.logp(), model.dlogp()], inputs=model.value_vars, point_fn=False, **FAST
    )
    return lambda theta: f(theta[:D], theta[D])


def rows_of_regression(theta, x=X, y=Y):
    """Gradient of the log-likelihood of each row, by hand: (N, 3)."""
    b, sigma = theta[:D], np.exp(theta[D])
    z = (y - x @ b) / sigma
    return np.column_stack([x * (z / sigma)[:, None], z**2 - 1])


def prior_of_regression(theta):
    b, sigma = theta[:D], np.exp(theta[D])
    return np.array([*(-b / 4), 1 - sigma**2 / 1.5**2])  # with the Jacobian of log sigma


def rows_of_two_groups(theta):
    counts = np.zeros((5, 3))
    counts[:, 0] = COUNTS - np.exp(theta[0])
    return rows_of_regression(theta), counts


def exact_noise(rows, n):
    """N²/n Cov of rows drawn with replacement."""
    return len(rows) ** 2 / n * np.cov(rows.T, bias=True)


# --- The mean


def test_gradient_scales_the_likelihood_and_leaves_the_prior():
    gradient = gradient_of(regression(), 4)
    idx = np.array([7, 2, 2, 5])
    _, grad = on_rows(gradient, THETA, idx)
    likelihood = rows_of_regression(THETA)[idx].sum(axis=0)
    np.testing.assert_allclose(grad, prior_of_regression(THETA) + N / 4 * likelihood, rtol=1e-12)


def test_prior_has_no_noise():
    # An unknown that no row informs gets its prior's gradient from every minibatch.
    with regression() as model:
        pm.StudentT("alone", nu=4, mu=1.0, sigma=2.0)
    gradient = gradient_of(model, 2)
    position = np.append(THETA, -0.7)
    grads = [on_rows(gradient, position, rng.integers(N, size=2))[1][-1] for _ in range(5)]
    z = (-0.7 - 1.0) / 2
    np.testing.assert_allclose(grads, -5 / 4 * z / 2 / (1 + z**2 / 4), rtol=1e-12)


def test_mean_over_all_minibatches_is_exact():
    model = regression(X[:3], Y[:3])
    gradient = gradient_of(model, 2)
    minibatches = [
        minibatch_of(gradient, np.array(idx)) for idx in itertools.product(range(3), repeat=2)
    ]
    results = [gradient(THETA, minibatch) for minibatch in minibatches]
    logp, grad = exact(model)(THETA)
    np.testing.assert_allclose(np.mean([r[0] for r in results]), logp, rtol=1e-12)
    np.testing.assert_allclose(np.mean([r[1] for r in results], axis=0), grad, rtol=1e-12)


def test_mean_over_all_minibatches_of_two_groups_is_exact():
    # Groups of different size, one wholly in the batch: no factor of one may enter the other.
    model = two_groups()
    gradient = gradient_of(model, {"y": 1, "counts": 2})
    minibatches = [
        minibatch_of(gradient, np.array([i]), np.array(jk))
        for i in range(N)
        for jk in itertools.product(range(5), repeat=2)
    ]
    results = [gradient(THETA, minibatch) for minibatch in minibatches]
    logp, grad = exact(model)(THETA)
    np.testing.assert_allclose(np.mean([r[0] for r in results]), logp, rtol=1e-12)
    np.testing.assert_allclose(np.mean([r[1] for r in results], axis=0), grad, rtol=1e-12)


@pytest.mark.parametrize("batch_size", [None, 4])
def test_gradient_is_that_of_its_own_logp(batch_size):
    gradient = gradient_of(regression(), batch_size)
    minibatch = gradient.order.probe(np.random.default_rng(0))
    _, grad = gradient(THETA, minibatch)
    h = 1e-5
    differences = [
        (gradient(THETA + step, minibatch)[0] - gradient(THETA - step, minibatch)[0]) / (2 * h)
        for step in h * np.eye(3)
    ]
    np.testing.assert_allclose(grad, differences, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("batch_size", [None, N, {"y": N}])
def test_full_batch_is_exact(batch_size):
    model = regression()
    gradient = gradient_of(model, batch_size)
    assert gradient.is_exact
    logp, grad = exact(model)(THETA)
    minibatch = gradient.order.probe(np.random.default_rng(0))
    np.testing.assert_allclose(gradient(THETA, minibatch)[0], logp, rtol=1e-12)
    np.testing.assert_allclose(gradient(THETA, minibatch)[1], grad, rtol=1e-12)


# --- The minibatch


def test_minibatches_are_drawn_uniformly_with_replacement():
    gradient = gradient_of(two_groups(), {"y": 4, "counts": 2})
    generator = np.random.default_rng(11)
    draws, place = gradient.order.draw(generator, None, 4000)
    assert place is None  # each minibatch is drawn anew
    for k, (n_rows, n) in enumerate([(N, 4), (5, 2)]):
        idx = draws.drawn[k]
        assert idx.shape == (4000, n)
        counts = np.bincount(idx.ravel(), minlength=n_rows)
        expected = idx.size / n_rows
        assert len(counts) == n_rows
        assert abs(counts - expected).max() < 4.5 * np.sqrt(expected)
        # Two rows of a minibatch are the same once in N draws.
        same = np.mean(idx[:, 0] == idx[:, 1])
        assert abs(same - 1 / n_rows) < 4.5 * np.sqrt(1 / n_rows / 4000)


def test_minibatches_follow_the_generator_alone():
    gradient = gradient_of(regression(), 4)
    first, again, other = (
        gradient.order.probe(np.random.default_rng(seed)).rows[0] for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).any()


def test_minibatch_is_the_same_at_two_positions():
    # On one minibatch, differences are exact: the token fixes the rows.
    gradient = gradient_of(regression(), 4)
    minibatch = gradient.order.probe(np.random.default_rng(1))
    gradient(THETA + 1, minibatch)
    first, second = (gradient(THETA, minibatch)[1] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_pm_minibatch_draws_from_our_generator():
    with pm.Model() as model:
        y = pm.Minibatch(Y, batch_size=4)
        pm.Normal("y", pm.Normal("mu"), 1, observed=y, total_size=N)
    gradient = gradient_of(model)
    mu = np.array([0.2])
    for idx in (np.array([0, 1, 2, 3]), np.array([8, 8, 8, 8])):
        _, grad = on_rows(gradient, mu, idx)
        np.testing.assert_allclose(grad, -mu + N / 4 * (Y[idx] - mu).sum(), rtol=1e-12)


# --- The data


@pytest.mark.parametrize("n_rows", [N, 14])
def test_set_data_is_seen_after_reload(n_rows):
    model = regression()
    gradient = gradient_of(model, 4)
    generator = np.random.default_rng(8)
    x, y = generator.normal(size=(n_rows, D)), generator.normal(size=n_rows)
    pm.set_data({"x": x, "y_data": y}, model=model)
    gradient.data.reload()
    assert gradient.data.n_rows == [n_rows]
    logp, grad = exact(model)(THETA)
    results = [on_rows(gradient, THETA, np.array([i])) for i in range(n_rows)]
    np.testing.assert_allclose(np.mean([r[0] for r in results]), logp, rtol=1e-12)
    np.testing.assert_allclose(np.mean([r[1] for r in results], axis=0), grad, rtol=1e-12)
    draws = [gradient.order.probe(generator).rows[0].max() for _ in range(200)]
    assert max(draws) == n_rows - 1


def test_set_data_of_pm_minibatch_is_seen_after_reload():
    with pm.Model() as model:
        y = pm.Minibatch(pm.Data("y_data", Y), batch_size=4)
        pm.Normal("y", pm.Normal("mu"), 1, observed=y, total_size=N)
    gradient = gradient_of(model)
    pm.set_data({"y_data": Y[::-1] * 2}, model=model)
    gradient.data.reload()
    _, grad = on_rows(gradient, np.zeros(1), np.array([0]))
    np.testing.assert_allclose(grad, N * 2 * Y[-1], rtol=1e-12)


def test_full_batch_becomes_a_minibatch_of_more_data():
    model = regression()
    gradient = gradient_of(model, N)
    pm.set_data({"x": np.r_[X, X], "y_data": np.r_[Y, Y]}, model=model)
    gradient.data.reload()
    assert not gradient.is_exact


def test_fewer_rows_than_the_batch_are_refused():
    model = regression()
    gradient = gradient_of(model, 4)
    pm.set_data({"x": X[:3], "y_data": Y[:3]}, model=model)
    with pytest.raises(ValueError, match=r"batch_size=4: more than the 3 rows that y has now"):
        gradient.data.reload()


def test_arrays_of_different_length_after_set_data_are_refused():
    model = regression()
    gradient = gradient_of(model, 4)
    pm.set_data({"x": X[:6]}, model=model)
    with pytest.raises(ValueError, match=r"\[6, 9\] rows.*pm.set_data.*the same number"):
        gradient.data.reload()


def test_data_are_not_copied():
    model = regression()
    gradient = gradient_of(model, 4)
    x = model["x"].get_value(borrow=True)
    assert any(array is x for array in gradient.data.arrays)


def test_pickled_gradient_is_the_same_and_holds_the_data_of_now():
    model = regression()
    gradient = gradient_of(model, 4)
    pm.set_data({"x": 2 * X, "y_data": Y}, model=model)
    copy = pickle.loads(pickle.dumps(gradient))
    minibatch = copy.order.probe(np.random.default_rng(3))
    _, grad = copy(THETA, minibatch)
    likelihood = rows_of_regression(THETA, 2 * X)[minibatch.rows[0]].sum(axis=0)
    np.testing.assert_allclose(grad, prior_of_regression(THETA) + N / 4 * likelihood, rtol=1e-12)


# --- Some of the unknowns


def test_gradients_of_some_unknowns_condition_on_the_rest():
    model = regression()
    values = dict(zip(["b", "sigma_log__"], [THETA[:D], THETA[D]], strict=True))
    b, sigma = model.value_vars
    of_b, of_sigma = gradient_of(model, 4, [b]), gradient_of(model, 4, [sigma])
    whole = gradient_of(model, 4)
    idx = np.array([0, 3, 3, 8])
    # Before: the rest lies at the initial point.
    start = model.initial_point()
    _, grad = on_rows(of_b, THETA[:D], idx)
    expected = on_rows(whole, np.append(THETA[:D], start["sigma_log__"]), idx)[1]
    np.testing.assert_allclose(grad, expected[:D], rtol=1e-12)

    of_b.density.condition_on(values)
    of_sigma.density.condition_on(values)
    logp, grad = on_rows(whole, THETA, idx)
    np.testing.assert_allclose(on_rows(of_b, THETA[:D], idx)[1], grad[:D], rtol=1e-12)
    np.testing.assert_allclose(on_rows(of_sigma, THETA[D:], idx)[1], grad[D:], rtol=1e-12)
    np.testing.assert_allclose(on_rows(of_b, THETA[:D], idx)[0], logp, rtol=1e-12)
    # Data that come later leave the condition.
    of_b.data.reload()
    np.testing.assert_allclose(on_rows(of_b, THETA[:D], idx)[1], grad[:D], rtol=1e-12)


def test_discrete_unknown_is_conditioned_on():
    with pm.Model() as model:
        k = pm.Poisson("k", 2.0)
        pm.Normal("y", pm.Normal("mu") + k, 1, observed=Y)
    gradient = gradient_of(model, 4)
    gradient.density.condition_on({"k": 5, "mu": 0.0})
    _, grad = on_rows(gradient, np.array([0.5]), np.array([1, 2]))
    np.testing.assert_allclose(grad, -0.5 + N / 2 * (Y[[1, 2]] - 5.5).sum(), rtol=1e-12)


def test_variables_may_come_in_another_order():
    model = regression()
    gradient = gradient_of(model, 4, model.value_vars[::-1])
    idx = np.array([0, 3, 3, 8])
    _, grad = on_rows(gradient, np.roll(THETA, 1), idx)
    expected = prior_of_regression(THETA) + N / 4 * rows_of_regression(THETA)[idx].sum(axis=0)
    np.testing.assert_allclose(np.roll(grad, -1), expected, rtol=1e-12)


# --- The noise


def test_noise_of_the_gradient_is_that_of_its_rows():
    # All N^n minibatches: the covariance that the estimate below must have for its mean.
    model = regression(X[:3], Y[:3])
    gradient = gradient_of(model, 2)
    pairs = map(np.array, itertools.product(range(3), repeat=2))
    grads = [on_rows(gradient, THETA, pair)[1] for pair in pairs]
    rows = rows_of_regression(THETA, X[:3], Y[:3])
    np.testing.assert_allclose(np.cov(np.transpose(grads), bias=True), exact_noise(rows, 2))


class Scripted:
    """A generator whose minibatches are written down."""

    def __init__(self, *draws):
        self.draws = iter(draws)

    def integers(self, n_rows, size):
        draw = np.array(next(self.draws))
        assert size == (1, len(draw))
        return draw[None]


def test_noise_covariance_has_the_exact_mean():
    # Over all minibatches of 2 out of 3 rows; one row makes a micro-batch.
    gradient = gradient_of(regression(X[:3], Y[:3]), 2)
    estimates = [
        noise_of(gradient, Scripted(idx), full=True)
        for idx in itertools.product(range(3), repeat=2)
    ]
    rows = rows_of_regression(THETA, X[:3], Y[:3])
    np.testing.assert_allclose(np.mean(estimates, axis=0), exact_noise(rows, 2), atol=1e-12)


def test_noise_covariance_of_two_groups_has_the_exact_mean():
    gradient = gradient_of(two_groups(), {"y": 2, "counts": 2})
    # One row twice shows no noise: each group's part comes alone.
    first = [([0, 0], pair) for pair in itertools.product(range(5), repeat=2)]
    second = [(pair, [0, 0]) for pair in itertools.product(range(N), repeat=2)]
    estimates = [
        np.mean([noise_of(gradient, Scripted(*draw), full=True) for draw in draws], 0)
        for draws in (first, second)
    ]
    expected = sum(exact_noise(rows, 2) for rows in rows_of_two_groups(THETA))
    np.testing.assert_allclose(sum(estimates), expected, atol=1e-11)


def test_noise_covariance_of_larger_microbatches_is_unbiased():
    # 60 rows drawn make ten micro-batches of six: within 4.5 standard errors.
    generator = np.random.default_rng(5)
    x, y = generator.normal(size=(70, D)), generator.normal(size=70)
    gradient = gradient_of(regression(x, y), 60)
    estimates = np.array([noise_of(gradient, generator) for _ in range(700)])
    expected = np.diag(exact_noise(rows_of_regression(THETA, x, y), 60))
    error = estimates.std(axis=0) / np.sqrt(len(estimates))
    assert (abs(estimates.mean(axis=0) - expected) < 4.5 * error).all()
    assert (error < 0.025 * expected).all()  # sharp enough to see a factor of 1 − n/N or b/n


def test_noise_covariance_diagonal_agrees_with_full():
    gradient = gradient_of(two_groups(), {"y": 6, "counts": 4})
    diagonal = noise_of(gradient, np.random.default_rng(2))
    full = noise_of(gradient, np.random.default_rng(2), full=True)
    assert diagonal.shape == (3,)
    assert full.shape == (3, 3)
    np.testing.assert_allclose(diagonal, np.diag(full), rtol=1e-12)
    np.testing.assert_allclose(full, full.T, rtol=1e-12)


def test_noise_covariance_is_zero_at_full_batch():
    gradient = gradient_of(regression(), N)
    assert (noise_of(gradient, np.random.default_rng(0)) == 0).all()


def test_noise_covariance_leaves_out_a_group_at_full_batch():
    gradient = gradient_of(two_groups(), {"y": N, "counts": 2})
    different = [COUNTS.argmin(), COUNTS.argmax()]
    full = noise_of(gradient, Scripted(different), full=True)
    assert (full[1:] == 0).all()
    assert full[0, 0] > 0


# --- Preconditioned coordinates


@pytest.mark.parametrize("dense", [False, True])
def test_preconditioned_gradient_is_the_chain_rule(dense):
    gradient = gradient_of(regression(), 4)
    A = np.random.default_rng(6).normal(size=(3, 3))
    M_inverse = A @ A.T + np.eye(3) if dense else np.array([0.5, 2.0, 3.0])
    metric = preconditioner_metric(M_inverse, 3)
    matrix = metric.matrix()
    np.testing.assert_allclose(matrix @ matrix.T, M_inverse if dense else np.diag(M_inverse))
    scaled = Target(gradient, metric)
    minibatch = gradient.order.probe(np.random.default_rng(1))
    logp, grad = scaled(np.linalg.solve(matrix, THETA), minibatch)
    np.testing.assert_allclose(logp, gradient(THETA, minibatch)[0], rtol=1e-12)
    np.testing.assert_allclose(grad, matrix.T @ gradient(THETA, minibatch)[1], rtol=1e-10)


@pytest.mark.parametrize(
    ("preconditioner", "message"),
    [
        (np.ones(2), r"shape \(2,\).*3 unconstrained.*\(3,\) or \(3, 3\)"),
        (np.array([1.0, 0.0, 1.0]), "finite and above zero"),
        (np.array([1.0, np.nan, 1.0]), "finite and above zero"),
        (np.diag([1.0, -1.0, 1.0]), "symmetric positive definite"),
        (np.triu(np.ones((3, 3))), "symmetric positive definite"),
    ],
)
def test_preconditioner_that_is_no_covariance_is_refused(preconditioner, message):
    with pytest.raises(ValueError, match=message):
        preconditioner_metric(preconditioner, 3)


def test_other_unknowns_are_copied_from_the_point():
    """In workers PyMC changes the arrays of a point in place."""
    with pm.Model() as model:
        mu, nu = pm.Normal("mu"), pm.Normal("nu", shape=2)
        pm.Normal("y", mu + nu.sum(), 1, observed=np.arange(5.0))
    gradient = gradient_of(model, 2, [model.rvs_to_values[mu]])
    point = {"mu": np.zeros(()), "nu": np.zeros(2)}
    gradient.density.condition_on(point)
    point["nu"][...] = 1.0
    assert not gradient.density.given[0].any()
