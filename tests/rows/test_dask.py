"""Dask's arrays and frames: sums where the partitions are, and the same draws wherever that is."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading

import cloudpickle
import numpy as np
import pandas as pd
import pymc as pm
import pytest

from counted_partitions import CountedPartitions
from logistic_rows import BETA, D, logistic, logistic_rows
from modes import FAST, QUIET
from targets import gradient_of

from pymc_sghmc import SGHMC
from pymc_sghmc.diagnostics import check_bias
from pymc_sghmc.gradients.metric import Dense
from pymc_sghmc.gradients.second_order import second_order
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.loaders import ArrayLoader, DaskLoader
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.rows.containers import StreamError, containers_of
from pymc_sghmc.rows.data import PoolPlan
from pymc_sghmc.rows.forms import known_form
from pymc_sghmc.rows.pool import PoolDraw, least_priority
from pymc_sghmc.rows.sources import Source
from pymc_sghmc.step.gradients import model_by_row

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
dd = pytest.importorskip("dask.dataframe")

N = 60_000
POOL = 2000
ROWS = logistic_rows(N)
X, Y = ROWS["X"], ROWS["y"]
COLUMNS = [f"x{j}" for j in range(D)]
DRAWS = {"draws": 50, "tune": 50, "chains": 2, "cores": 1, "random_seed": 1, **QUIET}


MODEL = logistic(ROWS)


def arrays(rows=9000):
    return {"X": da.from_array(X, chunks=(rows, 3)), "y": da.from_array(Y, chunks=rows)}


def frame(n_partitions=7):
    table = pd.DataFrame(X, columns=COLUMNS).assign(y=Y)
    return dd.from_pandas(table, npartitions=n_partitions)


def columns():
    whole = frame()
    return {"X": whole[COLUMNS], "y": whole["y"]}


FORMS = {
    "arrays": arrays,
    "columns of a frame": columns,
    "an array in memory beside columns": lambda: {**columns(), "y": Y},
}


def sample(step, **changes):
    with MODEL:
        return pm.sample(step=step, **{**DRAWS, **changes}).posterior["beta"].values


# --- Sums


@pytest.fixture(scope="module")
def in_memory():
    return gradient_of(MODEL, 10, data=ROWS)


def pooled(data, size=POOL):
    """Gradient of a source of which a pool is drawn."""
    plan = PoolPlan(size=size, most=size, error=0.005)
    return gradient_of(MODEL, 10, data=data, pool=plan)


@pytest.mark.parametrize("form", FORMS)
def test_sums_over_partitions_are_those_in_memory(form, in_memory):
    gradient = pooled(FORMS[form]())
    assert gradient.data.source.has_partitions
    position = np.array([-0.9, 0.4, -0.6, 1.1])
    ours, expected = (g.passes.likelihood(position) for g in (gradient, in_memory))
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-10, atol=1e-9)
    points = [position, position + 0.1]
    found = [g.passes.gradients_at(points, lambda i: None) for g in (gradient, in_memory)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_an_expansion_over_partitions_is_that_in_memory(form, in_memory):
    """Sums to round-off; the pool's gradient at 1 sd within its own error, √(V₁/M)."""
    p = 1 / (1 + np.exp(-X @ BETA))
    hessian = (X * (p * (1 - p))[:, None]).T @ X + np.eye(D) / 4
    L = np.linalg.cholesky(np.linalg.inv(hessian))
    found = []
    for gradient in (pooled(FORMS[form]()), in_memory):
        second = second_order(gradient)
        second.set_centre(BETA, Dense(L))
        found.append(second)
    ours, expected = (second.anchor for second in found)
    np.testing.assert_allclose(ours.logp, expected.logp, rtol=1e-12)
    np.testing.assert_allclose(ours.gradient, expected.gradient, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(ours.hessian[0], expected.hessian[0], rtol=1e-9)
    pool = found[0]
    assert pool.order.sizes == [POOL]
    # the weights of the pool's rows stand for all rows: their sum has the error of priority sampling
    assert abs(pool.order.weights_in_pool.sum() / N - 1) < 4.5 / np.sqrt(POOL)
    there = BETA + L @ np.array([1.0, -1.0, 1.0, 0.0])
    left = pool.noise_at([there], Dense(L))[0][0]
    rows = np.arange(POOL)
    weights = pool.order.weights_in_pool
    theirs = pool._function(
        there, np.ones(()), weights, rows, *pool.anchor.inputs, *pool.order.arrays
    )[1]
    exact = in_memory.passes.log_density(there)[1]
    error = np.abs(L.T @ (theirs - exact))
    assert (error < 5 * np.sqrt(left / POOL)).all()


def test_pools_of_partitions_add_up_to_an_unbiased_one():
    """Over 400 pools; the error is known from their spread. Negative control: equal seeds."""
    rng = np.random.default_rng(1)
    leverages = np.exp(rng.standard_normal(3000))
    values = leverages * (1 + 0.5 * rng.standard_normal(3000))

    def total(seeds):
        draws = []
        for part, seed in zip(np.split(np.arange(3000), 10), seeds, strict=True):
            draw = PoolDraw(100, leverages.mean(), seed)
            draw.add([values], part, leverages[part])
            draws.append(pickle.loads(pickle.dumps(draw)))
        whole = draws[0]
        for draw in draws[1:]:
            whole = whole + draw
        pool = whole.pool()
        assert pool.weights.size == 100
        return pool.weights @ pool.arrays[0]

    sums = [total(range(10 * i, 10 * i + 10)) for i in range(400)]
    assert abs(np.mean(sums) - values.sum()) < 4.5 * np.std(sums) / 20
    alike = [total([i] * 10) for i in range(400)]
    assert np.std(alike) > 1.5 * np.std(sums)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_priority_known_beforehand_leaves_the_pool_as_it_is(scale):
    """However wrong the mean leverage was guessed. One that is too large is noticed."""
    rng = np.random.default_rng(2)
    leverages = np.exp(rng.standard_normal(30_000))

    def drawn(least):
        draw = PoolDraw(500, scale * leverages.mean(), least=least)
        draw.add([leverages], np.arange(30_000), leverages)
        return draw

    draw = drawn(least_priority(500, 30_000))
    assert draw._n_kept < 10_000
    assert draw.is_full(30_000)
    ours, expected = draw.pool(), drawn(0.0).pool()
    np.testing.assert_array_equal(ours.arrays[0], expected.arrays[0])
    np.testing.assert_array_equal(ours.weights, expected.weights)
    assert not drawn(1e9).is_full(30_000)


# --- Runs


def test_few_rows_are_read_into_memory_and_are_like_arrays():
    point = MODEL.initial_point()
    unknowns = Unknowns(MODEL.continuous_value_vars, point)
    cut, source = model_by_row(MODEL, unknowns, 10, point, arrays(), Rewriting(), "auto")
    assert source is None
    by_axes = {np.ndim(array): array for array in cut.sources}  # in the order of the graph
    np.testing.assert_array_equal(by_axes[2], X)
    np.testing.assert_array_equal(by_axes[1], Y)


def test_a_run_reads_the_partitions_four_times_and_only_sums_and_the_pool_come_home():
    loader = CountedPartitions(arrays())
    step = SGHMC(data=loader, pool=POOL, model=MODEL, compile_kwargs=FAST)
    _pilot, *sums = sorted(loader.sizes, reverse=True)
    assert len(sums) == 3
    row_bytes = 8 * D + 1
    kept = POOL + 1
    # with the pool come priorities and leverages
    assert sums[0] < kept * (row_bytes + 16) + 8 * D * D + 5000
    assert max(sums[1:]) < 8 * D * 7 + 3000
    assert step.tuner.gradient.data.pool.size == POOL


@pytest.mark.parametrize("form", FORMS)
def test_the_first_rows_are_at_hand_for_the_model(form):
    first = DaskLoader(FORMS[form]()).head(4)
    np.testing.assert_array_equal(first["X"], X[:4])
    np.testing.assert_array_equal(first["y"], Y[:4])


@pytest.mark.slow
def test_check_bias_sees_all_rows_of_a_source():
    found = []
    for data in (arrays(), ROWS):
        pool = POOL if data is not ROWS else None
        step = SGHMC(data=data, pool=pool, model=MODEL, compile_kwargs=FAST)
        if not found:
            with MODEL:
                idata = pm.sample(step=step, **DRAWS)
        found.append(check_bias(idata, step))
    gradients = [report.draws["gradient"].values for report in found]
    np.testing.assert_allclose(*gradients, rtol=1e-9, atol=1e-7)


def test_a_missing_value_in_one_partition_is_refused():
    rows = X.copy()
    rows[45_000, 2] = np.nan
    data = {"X": da.from_array(rows, chunks=(9000, D)), "y": da.from_array(Y, chunks=9000)}
    with pytest.raises(StreamError, match="'X' has missing values"):
        SGHMC(data=data, pool=POOL, model=MODEL, compile_kwargs=FAST)


@pytest.mark.parametrize("form", [DaskLoader, ArrayLoader])
def test_a_row_that_the_likelihood_does_not_allow_is_shown(form):
    values = Y.astype(float)
    values[45_000] = -3.0
    with pm.Model():
        rate = pm.HalfNormal("rate", 1)
        pm.Poisson("likelihood", rate, observed=pm.Data("y", values[:10]))
        data = form({"y": da.from_array(values, chunks=9000) if form is DaskLoader else values})
        step = SGHMC(data=data, pool=POOL, compile_kwargs=FAST)
        with pytest.raises(pm.exceptions.SamplingError, match=r"not finite there: y=-3"):
            pm.sample(step=step, **DRAWS)


def test_rows_that_change_from_pass_to_pass_are_refused():
    passes = iter(range(100))
    noisy = arrays()["X"].map_blocks(lambda block: block + 1e-3 * next(passes), dtype=float)
    with pytest.raises(StreamError, match="A pool needs the same rows"):
        SGHMC(data={**arrays(), "X": noisy}, pool=POOL, model=MODEL, compile_kwargs=FAST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": lambda: da.from_array(Y[:-1], chunks=9000)}, "'y' has 59999 rows"),
        (
            {"y": lambda: frame()["y"][frame()["y"] > 0]},
            "other numbers of rows in 'y'|'X' has 60000",
        ),
        ({"y": lambda: da.from_array(Y, chunks=9000).sum()}, "without rows, of type Array"),
        ({"y": lambda: dask.delayed(Y)}, "with an entry for each row"),
        (
            {
                "X": lambda: arrays()["X"].map_blocks(
                    lambda block: block / np.array(None), dtype=float
                )
            },
            "Dask raised TypeError",
        ),
    ],
)
def test_wrong_data_are_refused(change, message):
    data = arrays() | {name: make() for name, make in change.items()}
    with pytest.raises(ValueError, match=message):
        Source(known_form(data, containers_of(MODEL)), containers_of(MODEL))


def test_partitions_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="other numbers of rows in 'y' than in 'X'"):
        DaskLoader({"X": frame()[COLUMNS], "y": frame(3)["y"]})
    with pytest.raises(ValueError, match="partitions have no rows"):
        DaskLoader(frame()[frame()["y"] > 5])


# --- Pickles


def sampled_elsewhere(path):
    """Sample with a pickled pair in a process that knows nothing but this file."""
    script = (
        "import sys, cloudpickle, numpy as np, pymc as pm\n"
        "model, step = cloudpickle.load(open(sys.argv[1], 'rb'))\n"
        "with model:\n"
        f"    idata = pm.sample(step=step, **{DRAWS!r})\n"
        "np.save(sys.argv[1] + '.npy', idata.posterior['beta'].values)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, capture_output=True)
    return np.load(f"{path}.npy")


def on_disk(path):
    mapped = {}
    for name, rows in ROWS.items():
        rows.tofile(path / name)
        mapped[name] = np.memmap(path / name, rows.dtype, "r", shape=rows.shape)
    return mapped


@pytest.mark.process
@pytest.mark.parametrize(
    "make",
    [lambda path: arrays(), on_disk, lambda path: ArrayLoader(ROWS, block_rows=1000)],
    ids=["Dask", "memory maps", "a loader"],
)
def test_a_pickled_pair_samples_the_same_where_its_rows_are_not(make, tmp_path):
    step = SGHMC(data=make(tmp_path), pool=POOL, model=MODEL, compile_kwargs=FAST)
    pickled = cloudpickle.dumps((MODEL, step))
    # of the rows, 50,000 at hand are in it, evenly drawn: so many in a row aren't among them
    assert X[1000:1200].tobytes() not in pickled
    (tmp_path / "pair").write_bytes(pickled)
    expected = sample(step)
    for name in ROWS:
        if (tmp_path / name).exists():
            (tmp_path / name).rename(tmp_path / f"{name}.moved")
    np.testing.assert_array_equal(sampled_elsewhere(tmp_path / "pair"), expected)


# --- A cluster


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as here, distributed.Client(here) as client:
        yield client


class Killing(DaskLoader):
    """Kills a worker soon after a certain pass has begun."""

    at = None
    passes = 0

    def map_sum(self, task):
        type(self).passes += 1
        if self.passes == self.at:
            [victim, *_] = self.client.run(os.getpid).values()
            threading.Timer(0.05, os.kill, (victim, signal.SIGKILL)).start()
        return super().map_sum(task)


@pytest.mark.process
def test_a_frame_on_a_cluster_has_the_draws_that_it_has_at_home(cluster):
    with dask.config.set(scheduler="threads"):
        at_home = SGHMC(data=columns(), pool=POOL, model=MODEL, compile_kwargs=FAST)
    there = SGHMC(data=columns(), pool=POOL, model=MODEL, compile_kwargs=FAST)
    np.testing.assert_array_equal(sample(there), sample(at_home))


@pytest.mark.process
@pytest.mark.parametrize("killed", [None, 2, 4, 5])
def test_draws_are_the_same_on_a_cluster_and_after_a_worker_was_killed(cluster, killed):
    with dask.config.set(scheduler="threads"):
        at_home = SGHMC(data=arrays(3000), pool=POOL, model=MODEL, compile_kwargs=FAST)
    Killing.at, Killing.passes = killed, 0
    there = SGHMC(data=Killing(arrays(3000), cluster), pool=POOL, model=MODEL, compile_kwargs=FAST)
    assert Killing.passes == 5
    np.testing.assert_array_equal(sample(there), sample(at_home))


@pytest.mark.process
@pytest.mark.parametrize(
    "start", [m for m in ("fork", "spawn") if m in multiprocessing.get_all_start_methods()]
)
def test_chains_in_processes_need_no_cluster(cluster, start):
    data = {name: value.persist() for name, value in arrays().items()}
    step = SGHMC(data=data, pool=POOL, model=MODEL, compile_kwargs=FAST)
    runs = [sample(step, cores=cores, mp_ctx=start) for cores in (1, 2)]
    np.testing.assert_array_equal(*runs)
