"""A pool: a few of a loader's rows in memory, that stand for all of them in minibatches."""

import gc
import logging
import shutil
import tempfile

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytest

from logistic_rows import D, logistic, logistic_rows
from modes import FAST, QUIET
from targets import gradient_of

from pymc_sghmc import SGHMC
from pymc_sghmc.gradients.metric import Dense
from pymc_sghmc.gradients.second_order import second_order
from pymc_sghmc.loaders import ArrayLoader
from pymc_sghmc.rows.data import PoolPlan
from pymc_sghmc.rows.pool import FromPool, PoolDraw
from pymc_sghmc.tuning.curvature import CountedPasses

N = 20_000
POOL = 2000
ROWS = logistic_rows(N)
X, Y = ROWS["X"], ROWS["y"]
BY_OUTCOME = {name: array[np.argsort(Y, kind="stable")] for name, array in ROWS.items()}


def newton(rows=ROWS):
    """Mode, and covariance there, of `logistic`."""
    x, y = rows["X"].astype(float), rows["y"]
    beta = np.zeros(D)
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ beta))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(D) / 4
        beta = beta + np.linalg.solve(hessian, x.T @ (y - p) - beta / 4)
    return beta, np.linalg.inv(hessian)


def lines(caplog):
    return "\n".join(record.getMessage() for record in caplog.records)


# --- Drawing rows


@pytest.mark.parametrize("skew", [0.0, 2.0])
def test_sums_over_a_pool_are_unbiased(skew):
    """Over 400 pools; the error is known from their spread. Negative control: without weights."""
    rng = np.random.default_rng(1)
    leverages = np.exp(skew * rng.standard_normal(3000))
    values = leverages * (1 + 0.5 * rng.standard_normal(3000))
    sums, bare = [], []
    for seed in range(400):
        draw = PoolDraw(100, leverages.mean())
        draw._rng = np.random.default_rng(seed)
        for start in range(0, 3000, 70):
            rows = np.arange(start, min(start + 70, 3000))
            draw.add([values], rows, leverages[rows])
        pool = draw.pool()
        assert pool.weights.size == 100
        sums.append(pool.weights @ pool.arrays[0])
        bare.append(pool.arrays[0].mean() * 3000)
    error = np.std(sums) / 20
    assert abs(np.mean(sums) - values.sum()) < 4.5 * error
    if skew:
        assert abs(np.mean(bare) - values.sum()) > 20 * error


def test_few_rows_of_large_leverage_leave_the_others_their_share():
    """A quarter of its even share for each, as in memory, but for whole numbers of shares."""
    leverages = np.full(10_000, 1e-3)
    leverages[[3, 4000]] = 1e6
    draw = PoolDraw(1000, 1e-3)
    draw.add([np.arange(10_000.0)], np.arange(10_000), leverages)
    pool = draw.pool()
    assert {3.0, 4000.0} <= set(pool.arrays[0])
    probabilities = pool.shares / pool.shares.sum()
    even = pool.weights / pool.weights.sum()
    assert (probabilities > 0.2 * even).all()
    assert 0.6 < probabilities[np.isin(pool.arrays[0], [3.0, 4000.0])].sum() < 0.8


def test_a_pool_of_all_rows_has_each_once():
    draw = PoolDraw(100, 1.0)
    draw.add([np.arange(60.0)], np.arange(60), np.zeros(60))
    pool = draw.pool()
    np.testing.assert_array_equal(pool.arrays[0], np.arange(60.0))
    np.testing.assert_array_equal(pool.weights, 1.0)


class Weights:
    """All that an order asks of data in this test."""

    dtype = np.float64


def test_minibatches_of_a_pool_have_its_sum_as_their_mean():
    rng = np.random.default_rng(2)
    leverages = np.exp(2 * rng.standard_normal(3000))
    draw = PoolDraw(200, leverages.mean())
    draw.add([leverages], np.arange(3000), leverages)
    pool = draw.pool()
    order = FromPool(Weights(), pool)
    probabilities = np.bincount(order.pools[0]) / order.pools[0].size
    # the weight of a drawn row is `pool.size / n / counts`
    mean = order.pools[0].size / order.counts[0] * probabilities
    np.testing.assert_allclose(mean, pool.weights, rtol=1e-12)


# --- The gradient


def pooled_second_order(rows, size=POOL):
    """Second-order control variates of a loader's rows at the mode."""
    plan = PoolPlan(size=size, most=size, error=0.005)
    loader = ArrayLoader(rows, block_rows=700)
    second = second_order(gradient_of(logistic(rows), 10, data=loader, pool=plan))
    mode, covariance = newton(rows)
    second.set_centre(mode, Dense(np.linalg.cholesky(covariance)))
    return second, mode, np.linalg.cholesky(covariance)


@pytest.mark.parametrize("rows", [ROWS, BY_OUTCOME], ids=["shuffled", "by outcome"])
def test_a_gradient_from_the_pool_is_that_of_all_rows_within_its_error(rows):
    """All of the pool in one minibatch, at 1 sd: off by √(V₁/M) in each direction of φ."""
    second, mode, L = pooled_second_order(rows)
    assert second.order.sizes == [POOL]
    rng = np.random.default_rng(5)
    points = [mode + L @ rng.standard_normal(D) for _ in range(10)]
    variances = second.noise_at(points, Dense(L))
    for point, [variance] in zip(points, variances, strict=True):
        exact = second.passes.log_density(point)[1]
        # in the mean over minibatches each row of the pool counts with its weight
        everything = second.order.pools[0].astype(np.int64)
        minibatch = second.data.part(0, everything)._replace(arrays=second.order.arrays)
        error = L.T @ (second(point, minibatch)[1] - exact)
        assert (np.abs(error) < 4.5 * np.sqrt(variance / POOL) + 1e-9).all()
        assert np.abs(error).max() < 0.01  # sds


# --- Whole runs


@pytest.mark.parametrize(
    ("rows", "n_chains", "n_draws"),
    [
        pytest.param(BY_OUTCOME, 2, 300, id="by outcome"),
        pytest.param(BY_OUTCOME, 4, 1000, id="by outcome, long", marks=pytest.mark.slow),
        pytest.param(ROWS, 4, 1000, id="shuffled, long", marks=pytest.mark.slow),
    ],
)
def test_posterior_from_a_pool(rows, n_chains, n_draws, caplog):
    caplog.set_level(logging.INFO)
    with logistic(rows):
        step = SGHMC(data=ArrayLoader(rows, block_rows=1000), pool=POOL)
        settings = {"tune": 300 if n_draws == 1000 else 100, "chains": n_chains, "cores": 1}
        idata = pm.sample(n_draws, step=step, random_seed=1, **settings, **QUIET)
    assert "from a pool of 2,000 of 20,000" in lines(caplog)
    assert "random order" not in lines(caplog)
    mode, covariance = newton(rows)
    sds = np.sqrt(np.diag(covariance))
    draws = idata.posterior["beta"]
    ess = az.ess(idata)["beta"].values
    # of a posterior so near to a Gaussian the mean is the mode, but for a hundredth
    error = np.abs(draws.mean(("chain", "draw")).values - mode) / sds
    assert (error < 4.5 / np.sqrt(ess) + 0.05).all()
    ratio = draws.std(("chain", "draw")).values / sds
    assert (np.abs(ratio - 1) < 4.5 / np.sqrt(2 * ess) + 0.05).all()
    assert ess.min() > n_chains * n_draws / 4


@pytest.mark.parametrize(
    "pool",
    [pytest.param(None, marks=pytest.mark.slow, id="in memory"), pytest.param(2000, id="pool")],
)
def test_rows_that_tell_more_than_all_others_are_in_the_fit(pool):
    """Three of 200,000 rows have predictors 1000 times as large.

    The subset of 50,000 has none of them, or one that then stands for four.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((200_000, 3))
    x[[11, 100_003, 199_000]] *= 1000
    y = x @ [1.0, -0.5, 0.2] + 1.5 * rng.standard_normal(200_000)
    rows = {"x": x, "y": y}
    with pm.Model():
        beta = pm.Normal("beta", 0, 1, shape=3)
        sigma = pm.HalfNormal("sigma", 2)
        predictors = pm.Data("x", x[:10])
        pm.Normal("likelihood", predictors @ beta, sigma, observed=pm.Data("y", y[:10]))
        step = SGHMC(data=rows if pool is None else ArrayLoader(rows), pool=pool)
    residuals = y - x @ np.linalg.lstsq(x, y)[0]
    sds = residuals.std() * np.sqrt(np.diag(np.linalg.inv(x.T @ x)))
    np.testing.assert_allclose(
        step.tuner.setup.fit.metric.sds()[:3], sds, rtol=0.42
    )  # variances by 2
    assert step.tuner.setup.noise.second_order is not None


@pytest.mark.slow
def test_few_rows_of_a_loader_are_like_arrays():
    positions = []
    for data in (ROWS, ArrayLoader(ROWS, block_rows=700)):
        with logistic(ROWS):
            step = SGHMC(data=data)
            idata = pm.sample(5, tune=5, chains=1, step=step, random_seed=1, **QUIET)
        positions.append(idata.posterior["beta"].values)
    np.testing.assert_array_equal(*positions)


def of_groups():
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(50), 20)
    return {"group": group, "y": rng.standard_normal(50)[group] + rng.standard_normal(1000)}


def in_partitions(rows):
    da = pytest.importorskip("dask.array")
    return {name: da.from_array(array, chunks=170) for name, array in rows.items()}


def integrated(rows, data, **settings):
    """Draws of a model of groups, whose effects are integrated out."""
    with pm.Model():
        u = pm.Normal("u", 0, 1, shape=50)
        groups = pm.Data("group", rows["group"][:10])
        pm.Normal("likelihood", u[groups], 1, observed=pm.Data("y", rows["y"][:10]))
        mu = pm.Normal("mu")
        pm.Potential("prior", -(mu**2) / 2)
        step = SGHMC(data=data, marginalize="u", compile_kwargs=FAST, **settings)
        return pm.sample(10, tune=10, chains=1, step=step, random_seed=1, **QUIET).posterior


@pytest.mark.parametrize("pool", ["auto", 100, None])
@pytest.mark.parametrize("form", [ArrayLoader, in_partitions])
def test_effects_are_integrated_out_of_all_rows_of_a_loader(form, pool, tmp_path, monkeypatch):
    """Where not all are kept in memory, by a copy in a folder that is gone afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = of_groups()
    expected = integrated(rows, rows)
    found = integrated(rows, form(rows), pool=pool)
    np.testing.assert_array_equal(found["u"].values, expected["u"].values)
    gc.collect()
    assert list(tmp_path.glob("pymc_sghmc-*")) == []


def test_a_copy_that_the_disk_has_no_room_for_is_refused(monkeypatch):
    full = shutil.disk_usage(tempfile.gettempdir())._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    rows = of_groups()
    with pytest.raises(ValueError, match=r"marginalize=\['u'\].*1\.6e-05 GB.*TMPDIR"):
        integrated(rows, ArrayLoader(rows), pool=100)


def curved(n_rows):
    """Rows that no quadratic function of few predictors is near, and a model of them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(n_rows).astype("f4")
    y = (np.tanh(2 * x) + rng.standard_normal(n_rows)).astype("f4")
    with pm.Model() as model:
        w = pm.HalfNormal("w", 3)
        v = pm.HalfNormal("v", 3)
        pm.Normal(
            "likelihood",
            v * pm.math.tanh(w * pm.Data("x", x[:10])),
            1,
            observed=pm.Data("y", y[:10]),
        )
    return model, {"x": x, "y": y}


@pytest.mark.slow
def test_a_pool_that_is_too_small_is_warned_of(caplog):
    caplog.set_level(logging.INFO)
    model, rows = curved(60_000)
    step = SGHMC(data=ArrayLoader(rows), pool=20, model=model, gradient="control_variates")
    assert "a pool of 20 of 60,000 rows may move posterior means" in lines(caplog)
    assert "pool=None" in lines(caplog)
    assert step.tuner.gradient.data.pool.size == 20


@pytest.mark.slow
def test_a_pool_that_does_not_serve_gives_way_to_windows(caplog):
    caplog.set_level(logging.INFO)
    model, rows = curved(1_200_000)
    step = SGHMC(data=ArrayLoader(rows), model=model, target_bias=1e-4)
    assert "So each step reads its rows from the loader" in lines(caplog)
    assert step.tuner.gradient.data.pool is None


def test_a_step_with_a_pool_samples_the_same_in_workers_and_after_a_copy():
    model = logistic(ROWS)
    step = SGHMC(data=ArrayLoader(ROWS, block_rows=1000), pool=POOL, model=model)
    copied = cloudpickle.loads(cloudpickle.dumps((model, step)))
    runs = []
    for cores, (its_model, its_step) in ((1, (model, step)), (2, (model, step)), (1, copied)):
        with its_model:
            run = pm.sample(5, tune=5, chains=2, cores=cores, step=its_step, random_seed=1, **QUIET)
        runs.append(run)
    first = runs[0].posterior["beta"].values
    for run in runs[1:]:
        np.testing.assert_array_equal(run.posterior["beta"].values, first)


def test_the_smallest_whole_numbers_are_no_change_from_pass_to_pass():
    z = np.where(np.arange(4000) % 3 == 0, 1, -128).astype(np.int8)  # |−128| has 8 bits, and a sign
    y = z / 64 + np.random.default_rng(0).standard_normal(z.size)
    with pm.Model():
        slope = pm.Normal("slope")
        pm.Normal("likelihood", slope * pm.Data("z", z[:6]) / 64, 1.0, observed=pm.Data("y", y[:6]))
        step = SGHMC(data=ArrayLoader({"z": z, "y": y}, block_rows=500), pool=500)
    assert step.tuner.gradient.data.pool.size == 500


def test_gradients_at_several_points_take_one_read():
    plan = PoolPlan(size=POOL, most=POOL, error=0.005)
    data = ArrayLoader(ROWS, block_rows=1000)
    gradient = gradient_of(logistic(ROWS), 10, data=data, pool=plan)
    counted = CountedPasses(gradient.passes)
    points = list(np.random.default_rng(0).standard_normal((5, D)))
    before = gradient.data.n_reads
    mean = counted.mean_gradient(points, None)
    assert gradient.data.n_reads == before + 1
    assert counted.passes == 5
    one_by_one = [counted(point, None)[1] for point in points]
    assert gradient.data.n_reads == before + 6
    np.testing.assert_allclose(mean, np.mean(one_by_one, axis=0), rtol=1e-9)


@pytest.mark.parametrize("name", ["X", "y"])
def test_rows_that_change_from_pass_to_pass_are_refused(name):
    class Changing(ArrayLoader):
        n_passes = 0

        def blocks(self, rng):
            self.n_passes += 1
            noise = np.random.default_rng(self.n_passes)
            for block in super().blocks(rng):
                values = block[name]
                changed = noise.permutation(values) if name == "X" else values[::-1] ^ 1
                yield {**block, name: changed if name == "y" else changed + 1e-6}

    # the same rows in another order are fine
    with logistic(ROWS):
        SGHMC(data=ArrayLoader(ROWS, block_rows=1000), pool=POOL)
        with pytest.raises(ValueError, match=f"the values of '{name}' have the sum"):
            SGHMC(data=Changing(ROWS, block_rows=1000), pool=POOL)


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ("all", '"auto", a whole number'),
        (0, "pool=0"),
        (1.5, "pool=1.5"),
        (39, "pool=39: a pool needs 10 rows for each of the 4 parameters"),
    ],
)
def test_arguments_that_are_none(pool, words):
    with logistic(ROWS), pytest.raises(ValueError, match=words):
        SGHMC(data=ArrayLoader(ROWS), pool=pool)
