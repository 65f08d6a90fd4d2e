"""Data that aren't in the model: arrays, loaders, and rows drawn without replacement."""

import copy
import logging
import pickle
import re
import sys
import threading
import tracemalloc

from dataclasses import dataclass
from functools import partial

import arviz as az
import cloudpickle
import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest

from model_collection.small import GaussianMean
from modes import FAST, QUIET, C
from pymc.exceptions import SamplingError
from pymc.pytensorf import compile
from pymc.step_methods.state import equal_dataclass_values
from targets import gradient_of, start_of

import pymc_sghmc

from pymc_sghmc import loaders
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.metric import Dense
from pymc_sghmc.loaders import ArrayLoader, ParquetLoader
from pymc_sghmc.rows import sources
from pymc_sghmc.rows.epochs import epoch_rows

# a few rows would be read into memory
SGHMC, SGLD = (partial(sampler, pool=None) for sampler in (pymc_sghmc.SGHMC, pymc_sghmc.SGLD))
HAND = {"learning_rate": 1e-4, "gradient": "plain", "friction": 0.3, "noise_estimate": None}
N, D = 1200, 3


@pytest.fixture(autouse=True, scope="module")
def small_pilot():
    """Small data are more than the pilot; their loaders make many windows of them by buffer_rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PILOT_ROWS", 500)
        yield


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N, D))
    return {"X": X, "y": X @ [1.0, -1.0, 0.5] + rng.standard_normal(N)}


@pytest.fixture(scope="module")
def whole(rows):
    """The gradient of all rows in memory."""
    return gradient_over(rows, rows)


@pytest.fixture(scope="module")
def by_hand(rows):
    """A step over a loader, with settings by hand."""
    return SGHMC(
        model=regression(rows), batch_size=100, data=Blocks(rows), compile_kwargs=FAST, **HAND
    )


def regression(rows, few=6, total_size=None):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=rows["X"].shape[1])
        X, y = pm.Data("X", rows["X"][:few]), pm.Data("y", rows["y"][:few])
        pm.Normal("likelihood", X @ beta, 1, observed=y, total_size=total_size)
    return model


def posterior(rows):
    H = rows["X"].T @ rows["X"] + np.eye(rows["X"].shape[1])
    covariance = np.linalg.inv(H)
    return covariance @ rows["X"].T @ rows["y"], covariance


def errors(draws, mean, covariance):
    """(estimate − exact)/(Monte Carlo standard error) of means and variances."""
    centred = draws - mean  # (chain, draw, d)
    return np.array(
        [
            ((x.mean() - exact) / float(np.squeeze(az.mcse(x))))
            for i in range(len(mean))
            for x, exact in ((centred[..., i], 0.0), (centred[..., i] ** 2, covariance[i, i]))
        ]
    )


@dataclass
class Blocks:
    """A loader that always gives the same blocks in the same order."""

    arrays: dict
    sizes: tuple = (70, 1, 130, 0, 99)
    total_size: int | None = None
    buffer_rows: int = 400

    def __len__(self):
        return len(self.arrays["X"])

    def __iter__(self):
        start, i = 0, 0
        while start < len(self):
            stop = start + self.sizes[i % len(self.sizes)]
            yield {name: array[start:stop] for name, array in self.arrays.items()}
            start, i = stop, i + 1


def gradient_over(rows, data, batch_size=100, few=6, **options):
    return gradient_of(regression(rows, few), batch_size, data=data, **options)


def minibatches(order, rng, n):
    """Return the first ``n`` minibatches of a chain, drawn one by one."""
    out, place = [], None
    for _ in range(n):
        drawn, place = order.draw(rng, place, 1)
        out.append(drawn.one(0))
    return out


def positions(step, point, n):
    out = []
    for _ in range(n):
        point, _ = step.step(point)
        out.append(point["beta"])
    return np.array(out), point


# --- Epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 10, 97, 1000, 65_537])
def test_an_epoch_holds_each_row_once(n_rows):
    for epoch in range(3):
        got = epoch_rows(n_rows, epoch * n_rows, n_rows, seed=5)
        np.testing.assert_array_equal(np.sort(got), np.arange(n_rows))
    parts = [epoch_rows(n_rows, start, 7, seed=5) for start in range(0, 70, 7)]
    np.testing.assert_array_equal(np.concatenate(parts), epoch_rows(n_rows, 0, 70, seed=5))


def test_epochs_are_random_permutations():
    n, n_epochs = 5, 6000
    orders = epoch_rows(n, 0, n * n_epochs, seed=1).reshape(n_epochs, n)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 120
    assert ((counts - 50) ** 2 / 50).sum() < 119 + 4 * np.sqrt(2 * 119)
    large = epoch_rows(10_000, 0, 20_000, seed=1).reshape(2, -1)
    assert (large[0] == large[1]).sum() < 8
    assert abs(np.corrcoef(large[0], np.arange(10_000))[0, 1]) < 0.04
    assert not np.array_equal(large[0], epoch_rows(10_000, 0, 10_000, seed=2))


def test_a_gaussian_model_sees_each_row_once_in_an_epoch(rows):
    gradient = gradient_over(rows, rows, batch_size=50, replace=False)
    rng, place = np.random.default_rng(1), None
    for _ in range(3):
        seen = []
        for k in (1, 1, 1, 1, N // 50 - 4):
            drawn, place = gradient.order.draw(rng, place, k)
            seen.append(drawn.drawn[0].ravel())
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(N))


@pytest.mark.parametrize("kind", ["memory", "stream"])
def test_minibatches_of_an_epoch_add_up_to_the_full_gradient(rows, whole, kind):
    gradient = (
        gradient_over(rows, rows, replace=False)
        if kind == "memory"
        else gradient_over(rows, Blocks(rows))
    )
    x, rng = np.array([0.3, -0.2, 1.0]), np.random.default_rng(1)
    exact = whole.passes.log_density(x)
    variates = ControlVariates(gradient)
    variates.set_centre(np.array([0.9, -1.0, 0.4]), Dense(np.eye(D)))
    for kind in (gradient, variates):
        parts = [kind(x, minibatch) for minibatch in minibatches(kind.order, rng, N // 100)]
        for exactly, part in zip(exact, zip(*parts, strict=True), strict=True):
            np.testing.assert_allclose(np.mean(part, axis=0), exactly, rtol=1e-10)


@pytest.mark.parametrize("kind", ["memory", "stream"])
def test_compiled_control_variates_equal_those_called(rows, kind):
    data = rows if kind == "memory" else Blocks(rows)
    gradient = gradient_over(rows, data, replace=False)
    variates = ControlVariates(gradient)
    variates.set_centre(np.array([9.0, -10.0, 4.0]), Dense(np.eye(D)))  # far off: the prior counts
    position = pt.vector("position")
    _, grad, drawn, fixed = variates.symbolic(position)
    function = compile([position, *drawn, *fixed], grad, on_unused_input="ignore", **FAST)
    x, rng = np.array([0.3, -0.2, 1.0]), np.random.default_rng(1)
    place = None
    for _ in range(2):
        block, place = variates.order.draw(rng, place, 3)
        fixed = variates.fixed_inputs(block.arrays)
        for i in range(len(block.drawn[0])):  # a window of the stream may end before
            drawn = [rows[i] for rows in block.drawn]
            np.testing.assert_allclose(function(x, *drawn, *fixed), variates(x, block.one(i))[1])


def test_variance_without_replacement_follows_the_exact_law():
    # SGLD in one dimension: x' = a x − η g + √(2η) w over the M minibatches of an epoch, with
    # Cov[gᵢ, gⱼ] = −V/(M−1) in an epoch and independent epochs.
    target = GaussianMean(n_rows=60, d=1)
    n, eta, M = 5, 0.1 / target.H[0, 0], 12
    S = np.var(target.A * target.y, ddof=1)
    V = target.n_rows**2 / n * S * (1 - n / target.n_rows)
    a = 1 - eta * target.H[0, 0]
    powers = a ** np.arange(M)
    noise = V * (powers @ powers) - V / (M - 1) * (powers.sum() ** 2 - powers @ powers)
    variance = (eta**2 * noise + 2 * eta * powers @ powers) / (1 - a ** (2 * M))
    white = (eta**2 * V + 2 * eta) / (1 - a**2)
    assert white > 1.3 * variance
    draws = {}
    for replace in (True, False):
        with target.model():
            step = SGLD(
                batch_size=n,
                replace=replace,
                learning_rate=eta,
                gradient="plain",
                n_steps=M,
                compile_kwargs=C,
            )
            draws[replace] = (
                pm.sample(1500, tune=20, chains=1, step=step, random_seed=1, **QUIET)
                .posterior["mu"]
                .values
            )
    z = errors(draws[False], target.mean, np.array([[variance]]))
    assert np.abs(z).max() < 4
    assert errors(draws[True], target.mean, np.array([[variance]]))[1] > 4


def test_noise_is_not_compensated_without_replacement(rows):
    for data in (rows, Blocks(rows)):
        step = SGHMC(
            model=regression(rows), batch_size=100, data=data, replace=False, compile_kwargs=FAST
        )
        _, [statistics] = step.step(start_of(step))
        assert step.chain.tuning.noise.min() > 0
        assert statistics["gradient_noise"] == 0.0  # β̂/α
        for kind in ("diag", "full"):
            with pytest.raises(ValueError, match=r"noise_estimate='\w+'.*replace=True"):
                SGHMC(
                    model=regression(rows),
                    batch_size=100,
                    data=data,
                    replace=False,
                    noise_estimate=kind,
                )


# --- Equality with the model that holds its data --------------------------------------------------


def test_given_arrays_are_the_models_own_and_not_copied(rows, tmp_path):
    single = {name: array.astype("f4") for name, array in rows.items()}
    for name, array in single.items():
        array.tofile(tmp_path / name)
    mapped = {
        name: np.memmap(tmp_path / name, "f4", "r", shape=array.shape)
        for name, array in single.items()
    }
    gradient = gradient_over(single, mapped)
    own = gradient_of(regression(single, few=None), 100)
    assert all(any(np.shares_memory(a, m) for m in mapped.values()) for a in gradient.data.arrays)
    x = np.array([0.3, -0.2, 1.0])
    for ours, exactly in zip(
        gradient.passes.log_density(x), own.passes.log_density(x), strict=True
    ):
        np.testing.assert_allclose(ours, exactly, rtol=1e-12)
    draws = [minibatches(g.order, np.random.default_rng(2), 1)[0] for g in (gradient, own)]
    np.testing.assert_array_equal(*(minibatch.rows for minibatch in draws))
    for ours, exactly in zip(gradient(x, draws[0]), own(x, draws[1]), strict=True):
        np.testing.assert_allclose(ours, exactly, rtol=1e-12)


@pytest.mark.parametrize(
    "make", [Blocks, lambda rows: ArrayLoader(rows, block_rows=77, buffer_rows=400)]
)
def test_full_passes_equal_those_in_memory(rows, whole, make):
    streamed, x = gradient_over(rows, make(rows)), np.array([0.3, -0.2, 1.0])
    assert streamed.data.n_at_hand == [500]
    for ours, exactly in zip(
        streamed.passes.log_density(x), whole.passes.log_density(x), strict=True
    ):
        np.testing.assert_allclose(ours, exactly, rtol=1e-12)
    subset = (np.arange(500),)
    pilot = dict(zip(streamed.data.names, streamed.data.arrays, strict=True))
    expected = gradient_over(rows, pilot).passes.likelihood(x)[1] * N / 500
    np.testing.assert_allclose(streamed.passes.likelihood(x, subset)[1], expected, rtol=1e-12)


def test_the_pilot_is_drawn_from_all_rows(rows):
    # 500 of 1,200 evenly: 42 ± 5 of the last hundred
    streamed = gradient_over(rows, ArrayLoader(rows, block_rows=77))
    pilot = dict(zip(streamed.data.names, streamed.data.arrays, strict=True))["y"]
    numbers = np.flatnonzero(np.isin(rows["y"], pilot))
    np.testing.assert_array_equal(rows["y"][numbers], pilot)
    assert 20 < (numbers >= N - 100).sum() < 64


def test_a_container_for_all_columns_and_bare_arrays_do(rows):
    # as pymc-extras' DataLoader yields them, without an incomplete last batch
    class Batches:
        batch_size, total_size, buffer_rows = 70, N, 140

        def __iter__(self):
            everything = np.column_stack([rows["X"], rows["y"]])
            return (everything[i : i + 70] for i in range(0, N - 69, 70))

    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=D)
        both = pm.Data("both", np.zeros((70, D + 1)))
        pm.Normal("likelihood", both[:, :D] @ beta, 1, observed=both[:, D], total_size=N)
    gradient = gradient_of(model, 35, data=Batches())
    x, n = np.array([0.3, -0.2, 1.0]), N - N % 70
    some = gradient_over(rows, {name: array[:n] for name, array in rows.items()})
    np.testing.assert_allclose(
        gradient.passes.likelihood(x)[1], some.passes.likelihood(x)[1] * N / n, rtol=1e-12
    )
    # two passes have all of these rows twice, in whole windows: their minibatches' mean is exact
    drawn = minibatches(gradient.order, np.random.default_rng(0), 2 * n // 35)
    mean = np.mean([gradient(x, minibatch)[1] for minibatch in drawn], axis=0)
    np.testing.assert_allclose(mean, gradient.passes.log_density(x)[1], rtol=1e-10)


# --- Through pm.sample ----------------------------------------------------------------------------


def sampled(rows, data, draws=300, tune=100, cores=1, settings=None, **options):
    settings = {"batch_size": 100, "compile_kwargs": C, **(settings or {})}
    with regression(rows):
        step = SGHMC(data=data, **settings)
        idata = pm.sample(
            draws,
            tune=tune,
            chains=2,
            cores=cores,
            step=step,
            random_seed=1,
            **QUIET,
            **options,
        )
    return idata.posterior["beta"].values


@pytest.mark.parametrize("kind", ["arrays", "epochs", "loader", "plain loader"])
def test_posterior_with_automatic_settings(rows, kind):
    data = (
        rows if kind in ("arrays", "epochs") else ArrayLoader(rows, block_rows=50, buffer_rows=400)
    )
    settings = {"replace": kind != "epochs"}
    n_draws = 300
    if kind == "plain loader":
        settings |= {"gradient": "plain", "n_steps": 20}
        n_draws = 200
    draws = sampled(rows, data, n_draws, settings=settings)
    mean, covariance = posterior(rows)
    inflated = covariance * (1.05 if kind == "plain loader" else 1.0)  # no more than target_bias
    z = errors(draws, mean, covariance)
    assert np.abs(z[::2]).max() < 4
    assert z[1::2].min() > -4
    assert errors(draws, mean, inflated)[1::2].max() < 4


def test_posterior_is_wrong_where_the_length_is(rows):
    @dataclass
    class TooLong(Blocks):
        # only a batch of the loader may be missing from a pass
        batch_size: int = N

    loader = TooLong(rows, total_size=2 * N - 1)
    z = errors(sampled(rows, loader), *posterior(rows))
    assert z[1::2].min() < -6
    with pytest.raises(ValueError, match=rf"yields {N} rows, but its length is {2 * N}"):
        sampled(rows, Blocks(rows, total_size=2 * N))


@pytest.mark.parametrize("gradient", ["plain", "control_variates"])
@pytest.mark.parametrize("kind", ["loader", "epochs", "arrays"])
def test_inner_steps_are_compiled_and_found_right(rows, kind, gradient):
    data = {"data": Blocks(rows) if kind == "loader" else rows, "replace": kind != "epochs"}
    settings = {**HAND, "gradient": gradient, **data}
    step = SGHMC(model=regression(rows), batch_size=100, compile_kwargs=FAST, **settings)
    [loop] = step.draws.loops._loops.values()
    assert loop is not None


@pytest.mark.parametrize(
    "context",
    [
        pytest.param("fork", marks=pytest.mark.skipif(sys.platform != "linux", reason="forks")),
        pytest.param("spawn", marks=pytest.mark.process),
    ],
)
def test_chains_differ_and_seeds_reproduce_on_one_core_and_two(rows, context):
    loader, quick = ArrayLoader(rows, block_rows=50, buffer_rows=400), {"compile_kwargs": FAST}
    one = sampled(rows, loader, draws=10, tune=20, settings=quick)
    assert not np.array_equal(one[0], one[1])
    two = sampled(rows, loader, 10, 20, cores=2, settings=quick, mp_ctx=context)
    np.testing.assert_array_equal(one, two)


def test_chains_see_different_minibatches_of_the_same_blocks(by_hand):
    seen = []
    for seed in (1, 2):
        by_hand.begin_chain(np.random.default_rng(seed))
        [minibatch] = minibatches(by_hand.tuner.gradient.order, by_hand.rng, 1)
        [y] = [array for array in minibatch.arrays if array.ndim == 1]
        seen.append(set(y[minibatch.rows[0]]))
    assert len(seen[0] & seen[1]) < 70


# --- States, copies, threads, memory --------------------------------------------------------------


# A loader's plain gradient is held by a shuffled loader's and by its control variates.
@pytest.mark.parametrize(
    "kind",
    [
        "epochs",
        pytest.param("loader", marks=pytest.mark.slow),
        "shuffled loader",
        "control variates",
    ],
)
def test_restored_chain_goes_on_exactly(rows, kind):
    settings = {"batch_size": 70, "n_steps": 7, "compile_kwargs": FAST, **HAND}
    settings |= {"data": Blocks(rows)}
    if kind == "epochs":
        settings |= {"data": rows, "replace": False}
    if kind == "shuffled loader":
        settings |= {"data": ArrayLoader(rows, block_rows=50, buffer_rows=400)}
    if kind == "control variates":
        settings |= {"gradient": "control_variates"}
    step, other = (SGHMC(model=regression(rows), **settings) for _ in range(2))
    step.begin_chain(np.random.default_rng(1))
    _, point = positions(step, start_of(step), 13)  # within a window of the second pass
    state = copy.deepcopy(step.sampling_state)
    pickled, copied = cloudpickle.dumps(step), copy.deepcopy(step)
    expected, _ = positions(step, point, 9)
    assert not equal_dataclass_values(state, step.sampling_state)
    for target in (step, other):
        target.sampling_state = state
        np.testing.assert_array_equal(positions(target, point, 9)[0], expected)
    for target in (pickle.loads(pickled), copied):
        np.testing.assert_array_equal(positions(target, point, 9)[0], expected)


def test_a_second_chain_of_a_step_begins_anew(by_hand):
    runs = []
    for _ in range(2):
        by_hand.begin_chain(np.random.default_rng(1))
        runs.append(positions(by_hand, start_of(by_hand), 5)[0])
    by_hand.begin_chain(np.random.default_rng(1))
    np.testing.assert_array_equal(*runs)


def test_no_thread_is_running_before_the_first_draw(rows):
    before = threading.active_count()
    step = SGHMC(model=regression(rows), batch_size=100, data=Blocks(rows), compile_kwargs=FAST)
    assert step.tuner.gradient.data._ahead is None
    assert threading.active_count() == before
    positions(step, start_of(step), 2)
    step.begin_chain(np.random.default_rng(0))
    assert threading.active_count() == before


def test_memory_is_bounded_by_windows():
    rng = np.random.default_rng(0)
    block = {"X": rng.standard_normal((5000, 10)), "y": rng.standard_normal(5000)}
    n_blocks = 400

    class Endless:
        total_size, buffer_rows = 5000 * n_blocks, 10_000

        def __iter__(self):
            return ({k: v + 0.0 for k, v in block.items()} for _ in range(n_blocks))

    megabyte = sum(array.nbytes for array in block.values()) / 1e6
    by_hand = {**HAND, "learning_rate": 1e-8}
    step = SGHMC(
        model=regression(block), batch_size=500, data=Endless(), compile_kwargs=FAST, **by_hand
    )
    tracemalloc.start()
    try:
        step.tuner.gradient.passes.likelihood(np.zeros(10))
        positions(step, start_of(step), 30)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        step.begin_chain(np.random.default_rng(0))
    # two windows of two blocks, a block, the pilot, a chunk gathered and what is computed from it
    assert peak / 1e6 < 12 * megabyte < n_blocks * megabyte / 30


# --- Order of the rows ----------------------------------------------------------------------------


def test_rows_in_order_are_warned_of(rows):
    x, order = np.zeros(D), np.argsort(rows["y"])
    in_order = {name: array[order] for name, array in rows.items()}
    gradient_over(rows, Blocks(rows)).passes.likelihood(x)  # warnings are errors
    with pytest.warns(UserWarning, match="aren't in random order.*buffer_rows"):
        gradient_over(rows, Blocks(in_order)).passes.likelihood(x)
    # what a loader may do about it: many short blocks in random order
    gradient_over(rows, ArrayLoader(in_order, block_rows=2, buffer_rows=400)).passes.likelihood(x)
    loader = Blocks(in_order)
    loader.buffer_rows = N
    gradient_over(rows, loader).passes.likelihood(x)


# --- Ready-made loaders ---------------------------------------------------------------------------


def test_array_loader_reads_zarr(rows, whole, tmp_path):
    zarr = pytest.importorskip("zarr")
    arrays = {}
    for name, array in rows.items():
        arrays[name] = zarr.open_array(
            str(tmp_path / name),
            mode="w",
            shape=array.shape,
            chunks=(130, *array.shape[1:]),
            dtype=float,
        )
        arrays[name][:] = array
    loader = ArrayLoader(arrays, buffer_rows=400)
    assert (len(loader), loader.block_rows) == (N, 130)
    for blocks in (loader, loader.blocks(np.random.default_rng(0))):
        y = np.concatenate([block["y"] for block in blocks])
        np.testing.assert_array_equal(np.sort(y), np.sort(rows["y"]))
    x = np.array([0.3, -0.2, 1.0])
    np.testing.assert_allclose(
        gradient_over(rows, loader).passes.likelihood(x)[1],
        whole.passes.likelihood(x)[1],
        rtol=1e-12,
    )


def test_parquet_loader(rows, whole, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {f"x{i}": rows["X"][:, i] for i in range(D)} | {"label": rows["y"]}
    for part in range(2):
        half = {name: column[part * 600 : (part + 1) * 600] for name, column in columns.items()}
        pq.write_table(pa.table(half), tmp_path / f"{part}.parquet", row_group_size=160)
    loader = ParquetLoader(
        tmp_path, {"X": ["x0", "x1", "x2"], "y": "label"}, block_rows=100, buffer_rows=400
    )
    assert len(loader) == N
    for n in (10, 5):
        first = loader.head(n) if n != 10 else loader.head()
        for name in rows:
            np.testing.assert_array_equal(first[name], rows[name][:n])
            np.testing.assert_array_equal(ArrayLoader(rows).head(n)[name], rows[name][:n])
    blocks = list(loader)
    assert {len(block["y"]) for block in blocks} == {100, 60, 20}
    for name in rows:
        np.testing.assert_array_equal(np.concatenate([b[name] for b in blocks]), rows[name])
    loader = pickle.loads(pickle.dumps(loader))
    x = np.array([0.3, -0.2, 1.0])
    np.testing.assert_allclose(
        gradient_over(rows, loader).passes.likelihood(x)[1],
        whole.passes.likelihood(x)[1],
        rtol=1e-12,
    )
    with pytest.raises(ValueError, match=r"no column 'age'"):
        ParquetLoader(tmp_path, {"y": "age"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \*\.parquet files"):
        ParquetLoader(tmp_path / "empty", {"y": "age"})


def test_rows_with_missing_values_are_left_out_if_asked_for(rows, tmp_path, caplog):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    numbers = np.arange(N)
    is_missing = {"x1": numbers % 7 == 3, "label": (numbers >= 200) & (numbers < 360)}
    columns = {f"x{i}": rows["X"][:, i] for i in range(D)} | {"label": rows["y"]}
    columns["x1"] = np.where(is_missing["x1"], np.nan, columns["x1"])
    columns["label"] = pa.array(columns["label"], mask=is_missing["label"])  # a block without rows
    pq.write_table(pa.table(columns), tmp_path / "all.parquet", row_group_size=40)
    names = {"X": ["x0", "x1", "x2"], "y": "label"}
    with caplog.at_level("INFO", logger="pymc.sghmc"):
        loader = ParquetLoader(tmp_path, names, drop_missing=True)
    kept = ~(is_missing["x1"] | is_missing["label"])
    assert len(loader) == kept.sum()
    assert f"leaves out {N - kept.sum()} of {N:,} rows" in caplog.text
    assert f"({is_missing['x1'].sum()} in column 'x1', 160 in column 'label')" in caplog.text
    blocks = list(loader)
    for name in rows:
        np.testing.assert_array_equal(np.concatenate([b[name] for b in blocks]), rows[name][kept])
    fitted = {name: values[kept] for name, values in rows.items()}
    x = np.array([0.3, -0.2, 1.0])
    np.testing.assert_allclose(
        gradient_over(fitted, loader).passes.likelihood(x)[1],
        gradient_over(fitted, fitted).passes.likelihood(x)[1],
        rtol=1e-12,
    )
    with pytest.raises(ValueError, match=r"has missing values.*drop_missing=True"):
        list(ParquetLoader(tmp_path, names))


def test_parquet_loader_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        ParquetLoader(tmp_path / "x.parquet", {"y": "y"})


# --- Faults ---------------------------------------------------------------------------------------


def refused(rows, data, match, batch_size=100, error=ValueError, **settings):
    with pytest.raises(error, match=match):
        SGHMC(
            model=regression(rows), batch_size=batch_size, data=data, compile_kwargs=FAST,
            **{**HAND, **settings},
        )  # fmt: skip


def with_(rows, **changes):
    return {name: array for name, array in {**rows, **changes}.items() if array is not None}


def test_arrays_that_do_not_fit_are_refused(rows, tmp_path):
    refused(rows, {}, "at least one container")
    refused(rows, with_(rows, z=rows["y"]), "no container 'z', only 'X', 'y'")
    refused(rows, with_(rows, X=rows["X"][:, :2]), r"'X' has shape \(1200, 2\)")
    refused(rows, with_(rows, y=None), "not those that 'likelihood' observes")
    refused(rows, with_(rows, X=None), "depends on X with 6 rows")
    refused(rows, rows, "only 1200 rows", batch_size=1201)
    refused(rows, rows, "pass a batch_size", batch_size=None)
    refused(rows, rows, "replace='no'", replace="no")


def test_files_that_are_cut_short_are_named(rows, tmp_path):
    file = tmp_path / "y.f8"
    rows["y"].tofile(file)
    whole = np.memmap(file, float, "r", shape=N)
    with open(file, "r+b") as opened:
        opened.truncate(8000)
    match = re.escape(str(file)) + ".*has 8000 bytes, fewer than the 9600"
    refused(rows, with_(rows, y=whole), match)
    with pytest.raises(ValueError, match=match):
        ArrayLoader(with_(rows, y=whole))
    short = np.memmap(file, float, "r")
    refused(rows, with_(rows, y=short), r"'X' has 1200, 'y' has 1000 \(file .*y\.f8\)")
    with pytest.raises(ValueError, match="'X': 1200, 'y': 1000"):
        ArrayLoader(with_(rows, y=short))


class Scripted:
    """Blocks as they are listed; later passes may differ."""

    def __init__(self, *passes, total_size=N):
        self.passes, self.total_size, self.buffer_rows, self.n = passes, total_size, 400, 0

    def __iter__(self):
        blocks = self.passes[min(self.n, len(self.passes) - 1)]
        self.n += 1
        for block in blocks:
            if isinstance(block, Exception):
                raise block
            yield block


def test_loaders_that_are_none_are_refused(rows):
    refused(rows, ({} for _ in range(2)), "a generator gives no second one")
    refused(rows, 3, "is of type int, which has no rows")
    refused(rows, Scripted([rows], total_size=0), "has a length of 0")
    refused(rows, Scripted([rows], total_size=1.5), "has a length of 1.5. .* a whole number")
    refused(rows, Scripted([rows], total_size="1200"), "has a length of '1200'. .* a whole number")
    refused(rows, Scripted([rows], total_size=None), "__len__ or a total_size")
    refused(rows, Scripted([]), "yields no rows")
    refused(rows, Scripted([rows["X"]]), "yields ndarray. Blocks must be dicts")
    refused(rows, Scripted([with_(rows, z=rows["y"])]), "no container 'z'")
    refused(rows, Scripted([with_(rows, y=rows["X"])]), "in a block 'y' has shape")
    refused(rows, Scripted([with_(rows, y=rows["y"][:9])]), "'X' has 1200, 'y' has 9")
    refused(rows, Scripted([OSError("disk on fire")]), "loader raised OSError: disk on fire")
    refused(rows, Blocks(rows), "only 1200 rows", batch_size=1201)
    refused(rows, Blocks(rows), "at most half", batch_size=1200)


@dataclass
class OnePass(Blocks):
    """Goes on where it was, whenever a pass begins."""

    def __post_init__(self):
        self.iterator = super().__iter__()

    def __iter__(self):
        return self.iterator


def test_a_loader_that_begins_no_new_pass_is_told_so(rows):
    refused(rows, OnePass(rows), "yields 1130 rows.* is 1200.*Each call must begin a new pass")


SECOND = {
    "fewer rows": (lambda rows: [{k: v[:900] for k, v in rows.items()}], "yields 900 rows.*is 1200"),
    "more rows": (lambda rows: [rows, rows], "yields 2400 rows and more.*is 1200"),
    "no rows": (lambda rows: [], "yields no rows"),
    "a name missing": (lambda rows: [{"X": rows["X"]}], "a block holds 'X', the first one"),
    "a wrong shape": (lambda rows: [{**rows, "X": rows["X"][:, :2]}], r"'X' has shape \(1200, 2\)"),
    "a wrong kind": (lambda rows: [{**rows, "y": rows["y"] + 1j}], "'y' has dtype complex128"),
    "an error": (lambda rows: [OSError("disk on fire")], "loader raised OSError: disk on fire"),
    "a missing value": (
        lambda rows: [{**rows, "y": np.where(rows["y"] > 0, np.nan, rows["y"])}],
        "missing values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SECOND)
def test_faults_of_later_passes_end_the_chain_in_words(rows, fault):
    blocks, words = SECOND[fault]
    # passes: the first block, the pilot, compilation, and then the chain's
    loader = Scripted([rows], [rows], [rows], [rows], blocks(rows))
    step = SGHMC(model=regression(rows), batch_size=100, data=loader, compile_kwargs=FAST, **HAND)
    step.begin_chain(np.random.default_rng(1))
    with pytest.raises(SamplingError, match=words):
        positions(step, start_of(step), 50)
    step.begin_chain(np.random.default_rng(1))


def test_faults_of_a_full_pass_are_errors_at_construction(rows, caplog):
    caplog.set_level(logging.ERROR)
    loader = Scripted([rows], [rows], SECOND["fewer rows"][0](rows))
    refused(rows, loader, "yields 900 rows", gradient="control_variates")


def test_models_that_do_not_fit_are_refused(rows):
    y = rows["y"]
    with pm.Model() as minibatch:
        mu = pm.Normal("mu")
        batch = pm.Minibatch(pm.Data("y", y[:20]), batch_size=10)
        pm.Normal("likelihood", mu, 1, observed=batch, total_size=20)
    with pytest.raises(ValueError, match=r"pm\.Minibatch"):
        SGHMC(model=minibatch, batch_size=10, data={"y": y})
    with pytest.raises(ValueError, match="total_size=7 but its data have 1200 rows"):
        SGHMC(model=regression(rows, total_size=7), batch_size=10, data=rows)
    with pm.Model() as unused:
        mu = pm.Normal("mu")
        pm.Data("X", rows["X"][:5])
        pm.Normal("likelihood", mu, 1, observed=pm.Data("y", y[:5]))
    with pytest.raises(ValueError, match="no likelihood depends on X"):
        SGHMC(model=unused, batch_size=10, data=rows)
    with pm.Model() as dependent:
        mu = pm.Normal("mu")
        held = pm.Data("y", y[:5])
        pm.Normal("likelihood", mu, 1, observed=held - held.mean())
    with pytest.raises(ValueError, match="not independent"):
        SGHMC(model=dependent, batch_size=10, data={"y": y})


@pytest.mark.parametrize("batch_size", ["auto", 10, None])
def test_data_for_a_potential_say_how_to_write_the_likelihood(rows, batch_size):
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Potential("loss", -((pm.Data("y", rows["y"][:5]) - mu) ** 2))
    with pytest.raises(ValueError, match=r"data=: .* pm\.Potential, as in 'loss'.*CustomDist"):
        SGHMC(model=model, batch_size=batch_size, data={"y": rows["y"]})


@pytest.mark.parametrize("make", [dict, ArrayLoader])
def test_a_model_without_a_row_is_to_be_built_with_some(rows, make):
    with pytest.raises(ValueError, match=r"no row of 'likelihood': .*'y' has the shape \(0,\)"):
        SGHMC(model=regression(rows, few=0), batch_size=10, data=make(rows))


def test_a_model_without_containers_says_where_rows_would_go(rows):
    with pm.Model() as model:
        pm.Normal("likelihood", pm.Normal("mu"), 1, observed=rows["y"][:5])
    for data in (rows, pd.DataFrame({"y": rows["y"]}), Blocks(rows)):
        with pytest.raises(ValueError, match=r"no pm\.Data into which .*With Bambi give"):
            SGHMC(model=model, batch_size=10, data=data)


def test_a_likelihood_without_rows_from_elsewhere_is_used_whole(rows):
    extra = np.array([0.4, 0.6])
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Normal("few", mu, 1, observed=extra)
        pm.Normal("likelihood", mu, 1, observed=pm.Data("y", rows["y"][:2]))
    y, x = rows["y"], np.array([0.3])
    for data in ({"y": y}, ArrayLoader({"y": y}, block_rows=100, buffer_rows=400)):
        step = SGHMC(model=model, batch_size=100, data=data, compile_kwargs=FAST, **HAND)
        grad = step.tuner.gradient.passes.log_density(x)[1]
        np.testing.assert_allclose(grad, (y - x).sum() + (extra - x).sum() - x, rtol=1e-10)


def test_check_of_sizes_in_loaders():
    for loader in (ArrayLoader, lambda a, **kw: ParquetLoader("x", a, **kw)):
        for name in ("block_rows", "buffer_rows"):
            with pytest.raises(ValueError, match=f"{name}=0"):
                loader({"y": np.zeros(3)}, **{name: 0})
    assert loaders.__doc__.count("``blocks(rng)``") == 1
    assert issubclass(sources.StreamError, ValueError)


def test_other_steps_that_would_see_placeholders_only_are_warned_of(rows, recwarn):
    with pm.Model() as model:
        lam = pm.Gamma("lam", 1, 1)
        beta = pm.Normal("beta", 0, tau=lam, shape=D)
        tau = pm.Gamma("tau", 1, 1)
        mean = pm.Data("X", rows["X"][:6]) @ beta
        pm.Normal("likelihood", mean, tau=tau, observed=pm.Data("y", rows["y"][:6]))
    settings = {"batch_size": 10, "data": rows, "learning_rate": 1e-4, "model": model}
    settings |= {"gradient": "plain", "compile_kwargs": FAST}
    with pytest.warns(UserWarning, match=r"leaves tau_log__ to other steps\. .* see only"):
        SGLD([beta], **settings)
    recwarn.clear()
    SGLD([beta, tau], **settings)  # lam is left, but no row depends on it
    SGLD([beta, tau, lam], **settings, blocked=False)
    assert not recwarn.list
