"""Operations that Numba compiles quickly say what PyTensor's say."""

import importlib
import pickle

import numpy as np
import pytensor.tensor as pt
import pytest

from pymc.pytensorf import compile
from pytensor.tensor.basic import Split

from pymc_sghmc.loops import numba_operations
from pymc_sghmc.loops.machine_code import version_of
from pymc_sghmc.loops.numba_operations import LargestOfRows, MatrixVector, with_quick_operations

pytest.importorskip("numba")
RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((6, 4))


def quick(inputs, outputs):
    return compile(inputs, outputs, mode=with_quick_operations("NUMBA"))


def operations(function):
    return [type(node.op) for node in function.maker.fgraph.apply_nodes]


LAYOUTS = {
    "rows": MATRIX,
    "columns": np.asfortranarray(MATRIX),
    "every other column": RNG.standard_normal((6, 8))[:, ::2],
    "no rows": MATRIX[:0],
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_matrix_times_a_vector(name, dtype):
    A, v = pt.matrix("A", dtype=dtype), pt.vector("v", dtype=dtype)
    w = pt.vector("w", dtype=dtype)
    function = quick([A, v, w], [A @ v, A.T @ w, A[:, ::2] @ v[::2]])
    assert MatrixVector in operations(function)
    matrix = LAYOUTS[name].astype(dtype, order="K")
    vector, other = (
        RNG.standard_normal(4).astype(dtype),
        RNG.standard_normal(len(matrix)).astype(dtype),
    )
    found = function(matrix, vector, other)
    expected = matrix @ vector, matrix.T @ other, matrix[:, ::2] @ vector[::2]
    for one, other_one in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(
            one, other_one, rtol=1e-5 if dtype == "float32" else 1e-13, atol=1e-6
        )


def test_products_of_columns_that_stay_matrices():
    A, b = pt.dmatrix("A"), pt.matrix("b", dtype="float64", shape=(None, 1))
    function = quick([A, b], [A @ b, (A @ b)[:, 0] + 1])
    assert MatrixVector in operations(function)
    column = RNG.standard_normal((4, 1))
    product, more = function(MATRIX, column)
    np.testing.assert_allclose(product, MATRIX @ column, rtol=1e-13)
    np.testing.assert_allclose(more, (MATRIX @ column)[:, 0] + 1, rtol=1e-13)


def test_products_of_matrices_are_left_alone():
    A, B = pt.dmatrix("A"), pt.dmatrix("B")
    function = quick([A, B], A @ B)
    assert MatrixVector not in operations(function)
    np.testing.assert_allclose(function(MATRIX, MATRIX.T), MATRIX @ MATRIX.T, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("fill", [None, np.nan, -np.inf, np.inf])
def test_largest_of_rows(fill, dtype):
    A = pt.matrix("A", dtype=dtype)
    function = quick([A], A.max(axis=1))
    assert LargestOfRows in operations(function)
    matrix = MATRIX.astype(dtype)
    if fill is not None:
        matrix[1, 2] = matrix[3, 0] = matrix[4, 3] = fill
        matrix[5] = fill
    np.testing.assert_array_equal(function(matrix), matrix.max(axis=1))


def test_another_process_can_unpickle_them():
    A, v = pt.dmatrix("A"), pt.dvector("v")
    function = pickle.loads(pickle.dumps(quick([A, v], [A @ v, A.max(axis=1)])))
    vector = RNG.standard_normal(4)
    product, largest = function(MATRIX, vector)
    np.testing.assert_allclose(product, MATRIX @ vector, rtol=1e-13)
    np.testing.assert_array_equal(largest, MATRIX.max(axis=1))


@pytest.mark.parametrize("operation", [MatrixVector, LargestOfRows])
def test_stored_code_is_that_of_this_version(operation):
    from pytensor.link.numba.dispatch.basic import numba_funcify_and_cache_key

    key = numba_funcify_and_cache_key(operation(), None)[1]
    assert operation.__name__ in key
    assert version_of(numba_operations.with_quick_operations) in key


def test_another_version_of_a_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    versions = set()
    for name, code in {"first": "return 1", "second": "return 2", "third": "return 1"}.items():
        (tmp_path / f"{name}.py").write_text(f"def function():\n    {code}\n")
        versions.add(version_of(importlib.import_module(name).function))
    assert len(versions) == 2


@pytest.mark.parametrize("axis", [0, 1])
def test_an_array_is_taken_apart_and_stays_what_it_was(axis):
    """Operations on parts may write into them, as PyTensor's parts are no views of the array."""
    A = pt.dmatrix("A")
    lengths = [1, 0, 3] if axis else [4, 2]
    parts = pt.split(A, lengths, n_splits=len(lengths), axis=axis)
    function = quick([A], [*(pt.exp(part) for part in parts), A.sum()])
    assert Split not in operations(function)
    matrix = MATRIX.copy()
    *found, total = function(matrix)
    for one, part in zip(found, np.split(MATRIX, np.cumsum(lengths)[:-1], axis), strict=True):
        np.testing.assert_allclose(one, np.exp(part), rtol=1e-14)
    np.testing.assert_array_equal(matrix, MATRIX)
    np.testing.assert_allclose(total, MATRIX.sum(), rtol=1e-13)


def test_parts_whose_lengths_are_not_known_are_left_alone():
    x = pt.dvector("x")
    lengths = pt.lvector("lengths")
    function = quick([x, lengths], pt.split(x, lengths, n_splits=2))
    assert Split in operations(function)
    first, second = function(np.arange(5.0), np.array([2, 3]))
    np.testing.assert_array_equal(first, [0.0, 1.0])
    np.testing.assert_array_equal(second, [2.0, 3.0, 4.0])
