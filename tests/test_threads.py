"""Blocks of rows in threads: results in order, equal to those of one thread, errors and all."""

import os
import threading
import time
import warnings

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc.pytensorf import compile
from pytensor.compile.builders import OpFromGraph
from threadpoolctl import ThreadpoolController, threadpool_limits

from pymc_sghmc import SGHMC
from pymc_sghmc.loops.numpy_mode import ThreadSafe, compile_for_many_rows
from pymc_sghmc.pymc_hooks import one_blas_thread
from pymc_sghmc.threads import in_order, n_threads

several = pytest.mark.skipif(n_threads() == 1, reason="this process may use one core only")


@contextmanager
def on_one_core():
    """Let this process use one of its cores for a while."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("cores can't be taken from a process here")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def test_results_come_in_the_order_of_the_items():
    def slow_at_first(i):
        time.sleep(0.02 * (i < 2))
        return i

    assert list(in_order(slow_at_first, range(20))) == list(range(20))
    assert list(in_order(slow_at_first, [])) == []


@several
def test_threads_work_at_a_time():
    both = threading.Barrier(2, timeout=30)  # breaks where the second never comes

    def meet(i):
        both.wait()
        return i

    assert list(in_order(meet, range(2))) == [0, 1]


@several
def test_items_are_taken_as_they_are_needed():
    taken = []

    def items():
        for i in range(1000):
            taken.append(i)
            yield i

    results = in_order(lambda i: i, items())
    assert next(results) == 0
    assert len(taken) < 30  # and not the thousand, of which each may hold a part of the data
    results.close()


def test_an_error_comes_through():
    def divide(i):
        return 1 // (3 - i)

    with pytest.raises(ZeroDivisionError):
        list(in_order(divide, range(10)))


def test_numpy_is_told_which_errors_count():
    def overflow(x):
        return np.exp(x)

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        assert list(in_order(overflow, np.full(4, 1e4))) == [np.inf] * 4
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        list(in_order(overflow, np.full(4, 1e4)))


def test_blas_has_one_thread_until_the_last_that_needs_it_is_done():
    def numbers():
        return [library.get_num_threads() for library in controller.lib_controllers]

    controller = ThreadpoolController().select(user_api="blas")
    with threadpool_limits(limits=2, user_api="blas"):
        if 2 not in (before := numbers()):
            pytest.skip("BLAS can't have two threads here")
        first, second = one_blas_thread()(), one_blas_thread()
        with first:
            other = one_blas_thread()()
            other.__enter__()
        assert set(numbers()) == {1}  # the other goes on
        other.__exit__(None, None, None)
        assert numbers() == before
        with second():
            assert set(numbers()) == {1}
        assert numbers() == before


def test_a_compiled_function_serves_threads_at_a_time():
    x = pt.matrix("x", dtype="float64")
    function = compile_for_many_rows([x], [pt.exp(x).sum(axis=1), (x**2).sum()], {})
    inputs = [np.full((500, 200), 0.01 * i) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(function, inputs))
    for array, (rows, square) in zip(inputs, found, strict=True):
        np.testing.assert_allclose(rows, np.exp(array).sum(axis=1), rtol=1e-12)
        np.testing.assert_allclose(square, (array**2).sum(), rtol=1e-12)


def test_an_inner_function_is_not_entered_by_two_threads():
    """PyTensor's operation holds one compiled function for all copies of what it is a part of."""
    x = pt.matrix("x", dtype="float64")
    inner = OpFromGraph([x], [pt.exp(pt.cos(x)).sum(axis=1)])
    function = ThreadSafe(compile([x], inner(x), mode="FAST_COMPILE"))
    inputs = [np.full((500, 200), 0.01 * i) for i in range(100)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(function, inputs))
    for array, rows in zip(inputs, found, strict=True):
        np.testing.assert_allclose(rows, np.exp(np.cos(array)).sum(axis=1), rtol=1e-12)


@pytest.mark.slow
@several
@pytest.mark.parametrize("marginalize", [None, ["u"]], ids=["sampled", "integrated out"])
def test_set_up_is_the_same_on_one_core(marginalize):
    """Bit for bit: sums over chunks are added in their order, and BLAS has one thread."""
    rng = np.random.default_rng(1)
    n = 60_000
    groups = 30 if marginalize is None else 3000
    g = rng.integers(groups, size=n)
    X = rng.normal(size=(n, 20))  # 4 MB are a chunk
    y = rng.normal(rng.normal(size=groups)[g] + X @ np.full(20, 0.1), 1.0)
    with pm.Model():
        tau = pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, shape=groups)
        beta = pm.Normal("beta", 0, 1, shape=20 if marginalize is None else 2)
        eta = pt.dot(pm.Data("X", X[:, : beta.type.shape[0]]), beta) + u[pm.Data("g", g)]
        pm.Normal("y", eta, 1.0, observed=pm.Data("obs", y))
        of_all = SGHMC(batch_size=100, marginalize=marginalize).tuner.setups.current
        with on_one_core():
            of_one = SGHMC(batch_size=100, marginalize=marginalize).tuner.setups.current
    np.testing.assert_array_equal(of_all.fit.mean, of_one.fit.mean)
    np.testing.assert_array_equal(of_all.fit.metric.matrix(), of_one.fit.metric.matrix())
    np.testing.assert_array_equal(of_all.noise.plain, of_one.noise.plain)
    for ours, theirs in zip(of_all.anchors.second_order.inputs, of_one.anchors.second_order.inputs,
                            strict=True):  # fmt: skip
        np.testing.assert_array_equal(ours, theirs)
