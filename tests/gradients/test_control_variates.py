"""Control variates with rows drawn by leverage: exact means by enumerating all minibatches."""

import copy
import itertools
import pickle
import tracemalloc

from functools import cache

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from modes import FAST, PYTHON
from targets import gradient_of, minibatch_of, on_rows

from pymc_sghmc import SGHMC
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.metric import Dense, Diagonal, Identity
from pymc_sghmc.gradients.noise import noise_covariance
from pymc_sghmc.rows.data import CHUNK_BYTES
from pymc_sghmc.rows.orders import ByLeverage

N, D = 9, 2
rng = np.random.default_rng(4)
X = rng.normal(size=(N, D))
X[3] *= 6  # rows of unequal leverage
Y = rng.normal(size=N) + X[:, 0]
COUNTS = rng.poisson(2.0, size=5)
EXPOSURE = np.array([0.5, 1.0, 2.0, -1.0, 0.3])
THETA = np.array([0.3, -0.8, 0.4])  # b, log sigma
CENTRE = np.array([0.8, 0.1, 0.2])
FACTOR = np.array([[0.3, 0.0, 0.0], [0.1, 0.2, 0.0], [-0.1, 0.05, 0.25]])


def regression(x=X, y=Y):
    """Two coefficients and a positive scale, which is transformed."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y_data", y)
        b = pm.Normal("b", 0, 2, shape=D)
        pm.Normal("y", x @ b, pm.HalfNormal("sigma", 1.5), observed=y)
    return model


def two_groups():
    """Nine rows of a regression and five counts, with unknowns in common."""
    with regression() as model:
        pm.Poisson("counts", pt.exp(EXPOSURE * model["b"][0]), observed=COUNTS)
    return model


def multivariate():
    """Rows of two entries with a common scale; robust, so that curvature changes its sign."""
    with pm.Model() as model:
        b = pm.Normal("b", 0, 2, shape=D)
        sigma = pm.HalfNormal("sigma", 1.5)
        pm.MvNormal("y", b, np.array([[1.0, 0.3], [0.3, 0.5]]), observed=X)
        pm.StudentT("z", nu=3, mu=b, sigma=sigma, observed=2 * X)
    return model


def of_minibatches():
    with pm.Model() as model:
        x, y = pm.Minibatch(X, Y, batch_size=4)
        b = pm.Normal("b", 0, 2, shape=D)
        pm.Normal("y", x @ b, pm.HalfNormal("sigma", 1.5), observed=y, total_size=N)
    return model


@cache
def compiled(write, batch_size):
    return ControlVariates(
        gradient_of(write(), dict(batch_size) if isinstance(batch_size, tuple) else batch_size)
    )


def control_variates(model, batch_size=None, variables=None, centre=CENTRE, factor=FACTOR):
    """Control variates of a model, or of what writes one, which is then compiled once for all."""
    if isinstance(model, pm.Model):
        cv = ControlVariates(gradient_of(model, batch_size, variables))
    else:
        sizes = batch_size if not isinstance(batch_size, dict) else tuple(batch_size.items())
        cv = copy.deepcopy(compiled(model, sizes))
    cv.set_centre(centre, Dense(factor))
    return cv


def minibatches_of_one(cv):
    """Every minibatch of one row of each group that isn't whole, and its probability."""
    rows = [
        [(i, count / pool.size) for i, count in enumerate(counts)]
        if whole is None
        else [(whole, 1.0)]
        for pool, counts, whole in zip(cv.order.pools, cv.order.counts, cv.data.whole, strict=True)
    ]
    for drawn in itertools.product(*rows):
        numbers = [np.atleast_1d(np.asarray(i, dtype=np.int64)) for i, _ in drawn]
        yield minibatch_of(cv, *numbers), np.prod([p for _, p in drawn])


def change_pools(cv, pools, counts):
    """Draw the rows as often as the pools say, and weigh them by the counts."""
    order = copy.copy(cv.order)
    order.pools, order.counts = pools, counts
    cv.anchor = cv.anchor._replace(order=order)


def noise_of(cv, rng):
    return noise_covariance(cv, Identity(len(THETA)), THETA, rng, full=True)


def law(cv, position):
    """Mean of logp and gradient, and covariance of the gradient, over minibatches of one row."""
    batches, p = zip(*minibatches_of_one(cv), strict=True)
    np.testing.assert_allclose(sum(p), 1, rtol=1e-12)
    logp, grad = zip(*[cv(position, batch) for batch in batches], strict=True)
    mean = np.average(grad, axis=0, weights=p)
    deviations = np.stack(grad) - mean
    return np.average(logp, weights=p), mean, deviations.T * p @ deviations


@cache
def exact(model):
    """Log-density and gradient of a model, or of what writes one."""
    model = model if isinstance(model, pm.Model) else model()
    f = model.compile_fn(
        [model.logp(), model.dlogp()], inputs=model.value_vars, point_fn=False, **FAST
    )
    return lambda theta: f(theta[:D], theta[D])


# --- The mean


CASES = {
    "one group": (regression, regression, 4),
    "two groups": (two_groups, two_groups, {"y": 4, "counts": 2}),
    "one of two groups whole": (two_groups, two_groups, {"y": N, "counts": 2}),
    "pm.Minibatch": (of_minibatches, regression, None),
    "multivariate rows": (multivariate, multivariate, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_mean_over_all_minibatches_is_exact_at_every_position_and_centre(case):
    build, full, batch_size = CASES[case]
    target = exact(full)
    cv = control_variates(build, batch_size)
    for centre, metric in [
        (CENTRE, Dense(FACTOR)),
        (THETA, Diagonal(np.array([0.1, 2.0, 0.5]))),
        (np.array([5.0, -5.0, 2.0]), Dense(0 * FACTOR)),  # far away, and without a scale
    ]:
        cv.set_centre(centre, metric)
        for theta in (THETA, -2 * THETA, centre):
            logp, grad, _ = law(cv, theta)
            expected = target(theta)
            scale = 1 + np.abs(target(centre)[0])  # round-off is that of the larger of the two
            np.testing.assert_allclose(logp, expected[0], rtol=1e-10, atol=1e-12 * scale)
            np.testing.assert_allclose(grad, expected[1], rtol=1e-10, atol=1e-12 * scale)


def test_enumeration_sees_a_wrong_weight():
    # Negative control: rows drawn by leverage and weighted as if evenly are biased.
    cv = control_variates(regression, 4)
    [pool], [counts] = cv.order.pools, cv.order.counts
    assert counts.max() > 2 * counts.min()
    minibatches = list(minibatches_of_one(cv))
    change_pools(cv, [pool], [np.full(N, pool.size / N)])
    mean = np.sum([p * cv(THETA, minibatch)[1] for minibatch, p in minibatches], axis=0)
    assert np.abs(mean - exact(regression)(THETA)[1]).max() > 1


def test_mean_over_all_pairs_is_exact():
    model = regression(X[:3], Y[:3])
    cv = control_variates(model, 2)
    [pool] = cv.order.pools
    assert 3 < pool.size < 16
    pairs = [
        on_rows(cv, THETA, np.array(ij, dtype=int)) for ij in itertools.product(pool, repeat=2)
    ]
    logp, grad = exact(model)(THETA)
    np.testing.assert_allclose(np.mean([pair[0] for pair in pairs]), logp, rtol=1e-10)
    np.testing.assert_allclose(np.mean([pair[1] for pair in pairs], axis=0), grad, rtol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_noise_vanishes_at_the_centre_and_there_alone(case):
    build, _, batch_size = CASES[case]
    cv = control_variates(build, batch_size)
    assert np.abs(law(cv, CENTRE)[2]).max() < 1e-20
    assert np.trace(law(cv, THETA)[2]) > 1e-2


def test_prior_has_no_noise():
    # An unknown that no row informs gets its prior's gradient from every minibatch.
    with regression() as model:
        pm.StudentT("alone", nu=4, mu=1.0, sigma=2.0)
    cv = control_variates(model, 2, None, np.append(CENTRE, 0.3), np.full(4, 0.1))
    z = (-0.7 - 1.0) / 2
    for minibatch, _ in minibatches_of_one(cv):
        grad = cv(np.append(THETA, -0.7), minibatch)[1]
        assert grad[-1] == pytest.approx(-5 / 4 * z / 2 / (1 + z**2 / 4), rel=1e-12)


# --- The minibatch


def test_rows_are_drawn_as_often_as_the_pool_says():
    cv = control_variates(two_groups, {"y": 4, "counts": 2})
    generator = np.random.default_rng(11)
    draws, place = cv.order.draw(generator, None, 4000)
    assert place is None  # each minibatch is drawn anew
    for k, (n_rows, n) in enumerate([(N, 4), (5, 2)]):
        rows, pool, counts = draws.drawn[k], cv.order.pools[k], cv.order.counts[k]
        assert rows.shape == (4000, n)
        p = counts / pool.size
        np.testing.assert_allclose(p, np.bincount(pool, minlength=n_rows) / pool.size)
        expected = rows.size * p
        drawn = np.bincount(rows.ravel(), minlength=n_rows)
        assert (np.abs(drawn - expected) < 4.5 * np.sqrt(expected * (1 - p))).all()
        # Two rows of a minibatch are independent.
        same, chance = np.mean(rows[:, 0] == rows[:, 1]), np.sum(p**2)
        assert abs(same - chance) < 4.5 * np.sqrt(chance * (1 - chance) / 4000)


def test_pools_follow_the_curvature_that_each_row_brings():
    # One unknown with unit noise: the curvature of row i is x_i², whatever the probes.
    x = np.random.default_rng(0).standard_t(3, size=50)
    with pm.Model() as model:
        b = pm.Normal("b")
        pm.Normal("y", pm.Data("x", x) * b, 1, observed=np.ones(50))
    cv = control_variates(model, 5, None, np.array([0.2]), np.array([[0.1]]))
    [pool], [counts] = cv.order.pools, cv.order.counts
    np.testing.assert_array_equal(counts, 1 + np.floor(3 * x**2 / np.mean(x**2)))
    assert 3 * 50 < pool.size <= 4 * 50


def test_an_outlier_of_leverage_makes_far_less_noise_than_with_uniform_rows():
    # Exact noise of minibatches of one row, by enumeration, at draws from the posterior.
    n_rows = 400
    generator = np.random.default_rng(1)
    x = generator.normal(size=(n_rows, D))
    x[17] *= 200
    y = x @ [1.0, -1.0] + generator.normal(size=n_rows)
    hat = x @ np.linalg.solve(x.T @ x, x.T)
    assert hat[17, 17] > 0.98
    factor = np.zeros((3, 3))
    factor[:2, :2] = np.linalg.cholesky(np.linalg.inv(x.T @ x))
    factor[2, 2] = (2 * n_rows) ** -0.5
    centre = np.array([1.0, -1.0, 0.0])
    cv = control_variates(regression(x, y), 10, None, centre, factor)
    uniform = [np.arange(n_rows)], [np.ones(n_rows, dtype=int)]
    top = []
    for pools, counts in ((cv.order.pools, cv.order.counts), uniform):
        change_pools(cv, pools, counts)
        z = np.sqrt(3) * np.vstack([np.eye(3), -np.eye(3)])  # has the posterior's covariance
        V = np.mean([law(cv, centre + factor @ row)[2] for row in z], axis=0)
        top.append(np.linalg.eigvalsh(factor.T @ V @ factor)[-1])
    assert top[1] > 0.5 * n_rows, top
    assert top[0] < 0.03 * top[1], top


def test_minibatch_is_a_token_and_follows_the_generator_alone():
    cv = control_variates(regression, 4)
    first, again, other = (cv.order.probe(np.random.default_rng(s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.rows, again.rows)
    assert (first.rows[0] != other.rows[0]).any()
    one = cv(THETA, first)
    cv(THETA + 1, other)
    two = cv(THETA, first)
    assert one[0] == two[0]
    np.testing.assert_array_equal(one[1], two[1])


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda cv: pickle.loads(cloudpickle.dumps(cv))]
)
def test_copies_are_the_same(duplicate):
    cv = control_variates(two_groups, {"y": 4, "counts": 2})
    other = duplicate(cv)
    one, two = (each.order.probe(np.random.default_rng(1)) for each in (cv, other))
    for mine, theirs in zip(one.rows, two.rows, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(cv(THETA, one)[1], other(THETA, two)[1])


def test_float32_stays_float32():
    with pytensor.config.change_flags(floatX="float32"):
        cv = control_variates(regression(X.astype("f4"), Y.astype("f4")), 4)
        theta = THETA.astype("f4")
        logp, grad = cv(theta, cv.order.probe(np.random.default_rng(0)))
        assert logp.dtype == grad.dtype == np.float32
        mean = law(cv, theta)[1]
    np.testing.assert_allclose(mean, exact(regression)(THETA)[1], rtol=1e-4)


# --- The noise


def test_noise_covariance_has_the_exact_mean():
    # Over all minibatches of two rows of the pool; one row makes a micro-batch.
    cv = control_variates(regression(X[:3], Y[:3]), 2)
    [pool] = cv.order.pools
    estimates = [
        noise_of(cv, Scripted(cv, pair)) for pair in itertools.product(range(pool.size), repeat=2)
    ]
    np.testing.assert_allclose(np.mean(estimates, axis=0), law(cv, THETA)[2] / 2, rtol=1e-9)


def test_noise_covariance_of_two_groups_has_the_exact_mean():
    cv = control_variates(two_groups, {"y": 2, "counts": 2})
    expected = law(cv, THETA)[2] / 2
    total = 0.0
    for k, (pool, counts) in enumerate(zip(cv.order.pools, cv.order.counts, strict=True)):
        first = np.searchsorted(pool, np.arange(counts.size))  # a place of each row in the pool
        p = counts / pool.size
        for i, j in itertools.product(range(counts.size), repeat=2):
            pair = (first[i], first[j])
            draws = (pair, (0, 0)) if k == 0 else ((0, 0), pair)  # one row twice shows no noise
            total += p[i] * p[j] * noise_of(cv, Scripted(cv, *draws))
    np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", ["one group", "one of two groups whole"])
def test_noise_over_rows_has_the_exact_mean(case):
    # over all signs of the rows; coordinates that aren't those of the model
    write, _, batch_size = CASES[case]
    cv = control_variates(write, batch_size)
    [n_rows] = [n for n, noisy in zip(cv.data.n_rows, cv.data.is_noisy, strict=True) if noisy]
    [n] = [n for n, noisy in zip(cv.data.batch_sizes, cv.data.is_noisy, strict=True) if noisy]
    L = np.diag([0.5, 2.0, 1.0])

    def mean_over_signs(position):
        signs = itertools.product([-1.0, 1.0], repeat=n_rows)
        found = [cv.noise_over_rows([position], Dense(L), Signs(s)) for s in signs]
        return np.mean(found, axis=0)

    exact = np.diag(L @ law(cv, THETA)[2] @ L) / n
    np.testing.assert_allclose(mean_over_signs(THETA), exact, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(mean_over_signs(CENTRE), 0, atol=1e-12)


class Signs:
    """A generator whose signs are written down."""

    def __init__(self, signs):
        self.signs = np.array(signs)

    def choice(self, signs, size):
        assert size == self.signs.size
        return self.signs


class Scripted:
    """A generator whose places in the pools are written down."""

    def __init__(self, cv, *draws):
        self.draws = zip(draws, cv.order.pools, strict=True)

    def random(self, size):
        draw, pool = next(self.draws)
        assert size == (1, len(draw))
        assert max(draw) < pool.size
        return (np.array([draw]) + 0.5) / pool.size


# --- The pass over all rows


WIDTH = CHUNK_BYTES // (8 * 1000) + 1  # of rows of which 1,000, the least number, are in a chunk


@pytest.fixture(scope="module")
def large():
    """A model whose 2,500 and 1,200 rows are wide: they make several chunks."""
    generator = np.random.default_rng(2)
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1, shape=D)
        x = pm.Data("x", generator.normal(size=(2500, WIDTH)))
        pm.Normal(
            "y", x[:, :D] @ b, pm.HalfNormal("sigma", 1), observed=generator.normal(size=2500)
        )
        offsets = pm.Data("offsets", generator.normal(size=(1200, WIDTH)))
        mu = pt.exp(b[0] + offsets[:, 0])
        pm.Poisson("counts", mu, observed=generator.poisson(2.0, size=1200))
    return model


def test_pass_in_chunks_equals_one_pass(large, monkeypatch):
    cv = control_variates(large, {"y": 100, "counts": 50})
    passes, sizes = cv.passes, []
    subset = (np.arange(0, 2500, 2), np.arange(1100))
    every = tuple(map(np.arange, (2500, 1200)))

    def at_once(rows):
        weights = [np.full(r.size, n / r.size) for n, r in zip((2500, 1200), rows, strict=True)]
        return cv.density(THETA, np.zeros(()), weights, *minibatch_of(cv, *rows))

    whole, part = at_once(every), at_once(subset)
    function = cv.density.function

    def spy(*inputs):
        sizes.extend(rows.size for rows in inputs[4:6])  # position, 3 weights, rows of 2 groups
        return function(*inputs)

    monkeypatch.setattr(cv.density, "function", spy)
    for expected, rows, lengths in (
        (whole, None, [1000, 1000, 500, 1000, 200]),
        (part, subset, [1000, 250, 1000, 100]),
    ):
        sizes.clear()
        logp, grad = passes.likelihood(THETA, rows)
        np.testing.assert_allclose(logp, expected[0], rtol=1e-12)
        np.testing.assert_allclose(grad, expected[1], rtol=1e-10)
        assert sorted(size for size in sizes if size > 1) == sorted(lengths)
    ends = [CENTRE, CENTRE + 0.1, CENTRE - 0.1]
    inputs = (*every, *cv.data.resident, *cv.density.given)
    middle, *others = [cv.row_function(x, *inputs) for x in ends]
    leverages = [
        abs(a[:, 0] + b[:, 0] - 2 * m[:, 0]).astype(np.float32)
        for m, a, b in zip(middle, *others, strict=True)
    ]
    expected = ByLeverage(cv.data, leverages)
    found = passes.by_leverage(cv.row_function, ends)
    for one, two in zip(expected.counts, found.counts, strict=True):
        assert np.abs(one.astype(int) - two).max() <= 1  # rounded
        assert (one == two).mean() > 0.99


def test_pass_over_all_rows_equals_the_model(large):
    passes = gradient_of(large, {"y": 100, "counts": 50}).passes
    logp, grad = passes.log_density(THETA)
    expected = exact(large)(THETA)
    np.testing.assert_allclose(logp, expected[0], rtol=1e-12)
    np.testing.assert_allclose(grad, expected[1], rtol=1e-10)


def test_subset_is_scaled_to_all_rows(large):
    passes = gradient_of(large, {"y": 100, "counts": 50}).passes
    halves = [(np.arange(k, 2500, 2), np.arange(k, 1200, 2)) for k in (0, 1)]
    mean = np.mean([passes.likelihood(THETA, half)[1] for half in halves], axis=0)
    np.testing.assert_allclose(mean, passes.likelihood(THETA)[1], rtol=1e-10)


def test_passes_use_bounded_memory():
    x = np.random.default_rng(0).normal(size=(120_000, 100))
    assert x.nbytes > 20 * CHUNK_BYTES  # four threads have two each
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1, shape=100)
        pm.Normal("y", pm.Data("x", x) @ b, 1, observed=x[:, 0])
    cv = ControlVariates(gradient_of(model, 10, compile_kwargs=PYTHON))

    def peak(function, *args):
        tracemalloc.start()
        function(*args)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    # The pool and leverages of all rows take 4 bytes each; gathered data are a chunk at a time.
    assert peak(cv.set_centre, np.zeros(100), Diagonal(np.full(100, 0.1))) < x.nbytes / 2
    # negative control: all rows at once
    assert peak(on_rows, cv, np.zeros(100), np.arange(len(x))) > x.nbytes


# --- Unknowns of other steps, and new data


def test_mean_stays_exact_when_unknowns_of_other_steps_change():
    model = regression()
    b, sigma = model.value_vars
    cv = control_variates(model, 4, [b], CENTRE[:D], FACTOR[:D, :D])
    for value in (1.2, -0.9):
        cv.density.condition_on({"b": THETA[:D], sigma.name: value})
        logp, expected = exact(model)(np.append(THETA[:D], value))
        assert np.abs(law(cv, THETA[:D])[1] - expected[:D]).max() > 0.1  # of the old unknowns
        cv.move_anchor()
        mean = law(cv, THETA[:D])
        np.testing.assert_allclose(mean[0], logp, rtol=1e-10)
        np.testing.assert_allclose(mean[1], expected[:D], rtol=1e-10)


def step_of(model, variables=None, **settings):
    settings = {"batch_size": 4, "learning_rate": 1e-4, "n_steps": 2, **settings}
    step = SGHMC(
        variables, gradient="control_variates", model=model, compile_kwargs=FAST, **settings
    )
    step.begin_chain(np.random.default_rng(0))
    return step


def test_step_moves_the_anchor_with_the_unknowns_of_other_steps():
    model = regression()
    step = step_of(model, [model["b"]])
    point = model.initial_point()
    for value in (0.0, 0.4, -0.9):
        point, [stats] = step.step(point | {"sigma_log__": np.array(value)})
        assert stats["control_variates"]
        expected = exact(model)(np.append(THETA[:D], value))[1][:D]
        np.testing.assert_allclose(law(step.tuner.gradients[1], THETA[:D])[1], expected, rtol=1e-10)


@pytest.mark.parametrize("n_rows", [N, 14])
def test_set_data_is_seen_by_the_next_chain(n_rows):
    model = regression()
    step = step_of(model)
    step.step(model.initial_point())
    generator = np.random.default_rng(8)
    x, y = generator.normal(size=(n_rows, D)), generator.normal(size=n_rows)
    pm.set_data({"x": x, "y_data": y}, model=model)
    step.begin_chain(np.random.default_rng(0))
    step.step(model.initial_point())
    assert step.tuner.gradients[1].order.counts[0].size == n_rows
    logp, grad, _ = law(step.tuner.gradients[1], THETA)
    expected = exact(model)(THETA)
    np.testing.assert_allclose(logp, expected[0], rtol=1e-10)
    np.testing.assert_allclose(grad, expected[1], rtol=1e-10)
