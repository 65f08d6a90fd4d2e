"""Functions of many rows in NumPy's loops say what compiled ones say, and compile nothing."""

import pickle
import time

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc.pytensorf import compile as compile_plainly
from pytensor import config
from pytensor.compile.mode import Mode, get_mode
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.link.vm import VMLinker
from targets import gradient_of

from pymc_sghmc.loops.numpy_mode import compile_for_many_rows

X = np.array([-40.0, -3.0, -0.7, -1e-9, 1e-9, 0.4, 2.5, 37.0])
POSITIVE = np.abs(X) + 0.01
IN_PYTHON = Mode(linker="py", optimizer="fast_run")

ELEMENTWISE = {
    "softplus": (pt.softplus, X),
    "log1mexp": (lambda x: pt.log1mexp(x), -POSITIVE),
    "trigamma": (pt.tri_gamma, np.concatenate([POSITIVE, -POSITIVE - 0.3])),
    "clip": (lambda x: pt.clip(x, -1, 2), X),
    "second": (lambda x: pt.second(x, pt.as_tensor(3.0)), X),
    "cast": (lambda x: pt.cast(x, "float32"), X),
    "sum of many": (lambda x: pt.add(x, x**2, pt.exp(-(x**2)), pt.sin(x)), X),
    "product of many": (lambda x: pt.mul(x, pt.cos(x), pt.exp(-(x**2)), x + 1), X),
    "sigmoid": (pt.sigmoid, X),
    "powers": (lambda x: x**3 + x**-4 + x**7, X),
    "log Gamma": (pt.gammaln, POSITIVE),
    "digamma": (pt.digamma, POSITIVE),
}


@pytest.fixture(autouse=True)
def default_mode():
    """PyTensor's own default, and not the one that is quick to compile."""
    with config.change_flags(mode="Mode"):
        yield


def in_numpy(x, y):
    return compile_for_many_rows([x], y, {})


def is_in_numpy(function):
    linker = function.maker.linker
    return isinstance(linker, VMLinker) and linker.c_thunks is False


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operations(name):
    operation, values = ELEMENTWISE[name]
    x = pt.vector("x", dtype="float64")
    y = operation(x)
    found = in_numpy(x, y)
    assert is_in_numpy(found)
    expected = compile_plainly([x], y, mode="FAST_COMPILE")(values)
    tolerance = 1e-6 if y.dtype == "float32" else 1e-11
    np.testing.assert_allclose(found(values), expected, rtol=tolerance, atol=1e-300)
    assert found(values).dtype == y.dtype


AXES = {
    "new in front": ((4, 3), ("x", 0, 1)),
    "new between and last": ((4, 3), (0, "x", 1, "x")),
    "dropped": ((1, 4, 1, 3, 1), (1, 3)),
    "dropped and new": ((4, 1, 3), (0, "x", 2)),
    "of a number": ((), ("x", "x")),
    "transposed": ((4, 3), (1, "x", 0)),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_of_length_one_come_and_go(name):
    shape, order = AXES[name]
    x = pt.tensor("x", dtype="float64", shape=tuple(1 if n == 1 else None for n in shape))
    function = compile_for_many_rows([x], [x.dimshuffle(*order), pt.exp(x).dimshuffle(*order)], {})
    assert is_in_numpy(function)
    values = np.random.default_rng(1).standard_normal(shape)
    expected = values.reshape([n for n in shape if n > 1])
    if name == "transposed":
        expected = expected.T
    sizes = iter(expected.shape)
    expected = expected.reshape([1 if axis == "x" else next(sizes) for axis in order])
    result, of_exp = function(values)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_allclose(of_exp, np.exp(expected), rtol=1e-15)
    before = values.copy()
    result += 1.0
    np.testing.assert_array_equal(values, before)


def test_small_functions_take_little_more_than_numpy_does():
    """Of a few numbers PyTensor's own checks of each call take most of the time."""
    x = pt.vector("x", dtype="float64")
    y = x
    for _ in range(100):
        y = pt.sin(pt.cos(y))
    function = in_numpy(x, y)
    assert is_in_numpy(function)
    in_python = compile_plainly([x], y, mode=IN_PYTHON.excluding("fusion", "inplace"))
    np.testing.assert_array_equal(function(X), in_python(X))
    assert 2 * seconds(function) < seconds(in_python)


def seconds(function):
    """The least of several times, which other processes disturb least."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        function(X)
        times.append(time.perf_counter() - began)
    return min(times)


@pytest.mark.parametrize("rows", [[0], [2, 2, 5], []])
def test_adding_to_chosen_rows(rows):
    """The gradient of a group's effects; a single row, too, which PyTensor 2 refuses."""
    effects = pt.vector("effects", dtype="float64")
    numbers = pt.lvector("numbers")
    total = pt.grad((effects[numbers] ** 2).sum(), effects)
    function = compile_for_many_rows([effects, numbers], total, {})
    assert is_in_numpy(function)
    values = np.arange(1.0, 8.0)
    expected = 2 * values * np.bincount(rows, minlength=7)
    np.testing.assert_allclose(function(values, np.array(rows, dtype=np.int64)), expected)


def test_taking_the_same_entries_of_each_array():
    """As each row's own copy of a Cholesky factor; PyTensor would take them row by row."""
    x = pt.tensor3("x", dtype="float64")
    i = np.array([0, 1, 1])
    j = np.array([0, 0, 1])
    matrix = pt.matrix("matrix", dtype="float64")
    y = vectorize_graph(matrix[i, j], {matrix: x})
    function = in_numpy(x, y)
    kinds = {type(node.op).__name__ for node in function.maker.fgraph.apply_nodes}
    assert "Blockwise" not in kinds
    values = np.random.default_rng(1).standard_normal((50, 2, 3))
    np.testing.assert_array_equal(function(values), values[:, i, j])


def test_graphs_of_operations_are_taken_apart():
    """Copies of a function for several threads would share what these are compiled to."""
    x = pt.matrix("x", dtype="float64")
    total = pt.logsumexp(x, axis=1).sum() + pt.special.log_softmax(x, axis=1)[:, 0].sum()
    function = compile_for_many_rows([x], [total, pt.grad(total, x)], {})
    assert is_in_numpy(function)
    nodes = function.maker.fgraph.apply_nodes
    assert not any(isinstance(node.op, HasInnerGraph) for node in nodes)
    values = np.random.default_rng(1).standard_normal((6, 3))
    level = np.log(np.exp(values).sum(axis=1))
    share = np.exp(values - level[:, None])
    found, slope = function(values)
    np.testing.assert_allclose(found, (level + values[:, 0] - level).sum(), rtol=1e-12)
    np.testing.assert_allclose(slope, share + np.eye(3)[0] - share, atol=1e-12)


def test_a_mode_that_somebody_chose_is_kept():
    x = pt.vector("x")
    function = compile_for_many_rows([x], pt.exp(x), {"mode": IN_PYTHON})
    assert not is_in_numpy(function)
    with config.change_flags(mode="NUMBA"):
        function = compile_for_many_rows([x], pt.exp(x), {"mode": "FAST_COMPILE"})
    assert get_mode("FAST_COMPILE").linker is function.maker.mode.linker


def test_what_numpy_would_do_number_by_number_is_compiled():
    x = pt.vector("x", dtype="float64")
    y = pt.gammaincc(pt.as_tensor(2.0), x)
    slope = pt.grad(pt.gammainc(x, pt.as_tensor(1.5)).sum(), x)
    function = compile_for_many_rows([x], [y, slope], {})
    assert not is_in_numpy(function)
    assert np.isfinite(function(POSITIVE)).all()


def test_functions_can_be_pickled():
    x = pt.vector("x", dtype="float64")
    function = in_numpy(x, pt.softplus(x) + pt.clip(x, 0, 1))
    again = pickle.loads(pickle.dumps(function))
    np.testing.assert_array_equal(again(X), function(X))


def test_inputs_stay_as_they_are():
    x = pt.vector("x", dtype="float64")
    function = in_numpy(x, [pt.second(x, x), pt.cast(x, "float64"), pt.inc_subtensor(x[:2], 1.0)])
    given = X.copy()
    for result in function(given):
        result += 7.0
    np.testing.assert_array_equal(given, X)


def test_log_densities_say_what_compiled_ones_say():
    rng = np.random.default_rng(1)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 1, shape=3)
        alpha = pm.Exponential("alpha", 1)
        tau = pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, shape=5)
        x = rng.standard_normal((60, 3))
        eta = pm.math.dot(x, mu) + u[rng.integers(5, size=60)]
        pm.NegativeBinomial("y", mu=pm.math.exp(eta), alpha=alpha, observed=rng.poisson(2, 60))
    loops = gradient_of(model, 20, compile_kwargs=None)
    plain = gradient_of(model, 20, compile_kwargs={"mode": IN_PYTHON})
    assert is_in_numpy(loops.density.function)
    assert not is_in_numpy(plain.density.function)
    position = 0.3 * rng.standard_normal(10)
    logp, gradient = loops.passes.log_density(position)
    expected, slopes = plain.passes.log_density(position)
    assert logp == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-9, atol=1e-9)


ROWS_TAKEN = {
    "in order": np.arange(2, 7),
    "all": np.arange(9),
    "from the end": np.arange(-3, 0),
    "twice": np.array([3, 3, 4]),
    "not in order": np.array([4, 3, 5]),
    "with a gap": np.array([2, 4, 5]),
    "to and fro": np.array([2, 4, 3, 5]),
    "none": np.arange(0),
}


@pytest.mark.parametrize("rows", ROWS_TAKEN.values(), ids=list(ROWS_TAKEN))
def test_rows_are_those_of_their_numbers(rows):
    array, numbers = pt.matrix("array", dtype="float64"), pt.lvector("numbers")
    function = compile_for_many_rows([array, numbers], [array[numbers], array[numbers] + 1], {})
    assert is_in_numpy(function)
    given = np.arange(18.0).reshape(9, 2)
    kept = given.copy()
    taken, more = function(given, rows)
    np.testing.assert_array_equal(taken, kept[rows])
    np.testing.assert_array_equal(more, kept[rows] + 1)
    taken += 7.0
    np.testing.assert_array_equal(given, kept)


def test_rows_that_are_not_there_are_an_error():
    array, numbers = pt.vector("array", dtype="float64"), pt.lvector("numbers")
    function = compile_for_many_rows([array, numbers], array[numbers] + 1, {})
    with pytest.raises(IndexError):
        function(np.arange(3.0), np.arange(1, 5))


ROWS_ADDED_TO = {
    "in order": np.repeat(np.arange(4), 2),
    "to and fro": np.array([3, 0, 3, 1, 1, 0, 3, 2]),
    "from the end": np.array([-1, 0, -1, 1, 1, 0, -4, 2]),
    "one row": np.full(8, 2),
}


@pytest.mark.parametrize("columns", [(), (1,), (3,), (3, 2)])
@pytest.mark.parametrize("rows", ROWS_ADDED_TO.values(), ids=list(ROWS_ADDED_TO))
def test_rows_are_added_in_their_order(rows, columns):
    rng = np.random.default_rng(0)
    array = pt.tensor("array", dtype="float64", shape=(None, *[None] * len(columns)))
    addends = pt.tensor("addends", dtype="float64", shape=(None, *[None] * len(columns)))
    numbers = pt.lvector("numbers")
    function = compile_for_many_rows(
        [array, addends, numbers], pt.inc_subtensor(array[numbers], addends), {}
    )
    assert is_in_numpy(function)
    start = rng.standard_normal((4, *columns))
    given = start.copy(), rng.standard_normal((8, *columns)), rows
    expected = start.copy()
    np.add.at(expected, rows, given[1])
    np.testing.assert_allclose(function(*given), expected, rtol=1e-14)
    np.testing.assert_array_equal(given[0], start)
    zeros = np.zeros_like(start)
    sums = zeros.copy()
    np.add.at(sums, rows, given[1])
    # to the last bit, as where a search ends depends on it
    np.testing.assert_array_equal(function(zeros, *given[1:]), sums)


@pytest.mark.parametrize("rows", [np.array([0, 4]), np.array([-5, 0])])
def test_adding_to_rows_that_are_not_there_is_an_error(rows):
    array, addends = pt.matrix("array", dtype="float64"), pt.matrix("addends", dtype="float64")
    numbers = pt.lvector("numbers")
    function = compile_for_many_rows(
        [array, addends, numbers], pt.inc_subtensor(array[numbers], addends), {}
    )
    with pytest.raises(IndexError):
        function(np.zeros((4, 2)), np.ones((2, 2)), rows)


def n_softplus(function):
    return sum("softplus" in str(node.op).lower() for node in function.maker.fgraph.apply_nodes)


def test_a_choice_between_two_values_of_a_function_computes_one():
    x, is_one = pt.vector("x", dtype="float64"), pt.vector("is_one", dtype="bool")
    log_p, log_q = -pt.softplus(-x), -pt.softplus(x)
    chosen = compile_for_many_rows([x, is_one], pt.switch(is_one, log_p, log_q), {})
    assert n_softplus(chosen) == 1
    outcome = np.arange(X.size) % 2 == 0
    expected = np.where(outcome, -np.logaddexp(0, -X), -np.logaddexp(0, X))
    np.testing.assert_allclose(chosen(X, outcome), expected, rtol=1e-14)
    # where both are needed besides, there is nothing to save
    both = compile_for_many_rows([x, is_one], [pt.switch(is_one, log_p, log_q), log_p, log_q], {})
    assert n_softplus(both) == 2
    for found, wanted in zip(
        both(X, outcome), (expected, -np.logaddexp(0, -X), -np.logaddexp(0, X)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-14)


def test_a_choice_between_values_of_other_shapes():
    x, y = pt.vector("x", dtype="float64"), pt.matrix("y", dtype="float64", shape=(1, None))
    condition = pt.matrix("condition", dtype="bool")
    chosen = compile_for_many_rows(
        [x, y, condition], pt.switch(condition, pt.exp(x)[None, :], pt.exp(y)), {}
    )
    which = np.array([[True, False, True], [False, False, True]])
    given = np.array([0.1, 0.2, 0.3]), np.array([[1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(
        chosen(*given, which), np.where(which, np.exp(given[0]), np.exp(given[1]))
    )
