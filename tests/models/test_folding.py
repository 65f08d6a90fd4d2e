"""What constants alone determine is computed once, within bounds, and its rows are cut."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from exactness import refusal
from model_collection.cuttable import (
    COUNTS,
    GROUP,
    WAY_ONE,
    G,
    N,
    X,
    Y,
    basis_of_constants,
    hsgp_linearized,
    hsgp_periodic,
    hsgp_prior,
)
from targets import gradient_of

from pymc_sghmc.models.folding import LARGEST, SMALL, may_be_added, with_rows_computed

HELD = [hsgp_linearized, hsgp_prior, hsgp_periodic, basis_of_constants]


def operations(gradient):
    """Names of all operations of the compiled gradient."""
    nodes = gradient.density.function.maker.fgraph.toposort()
    return {type(getattr(node.op, "scalar_op", node.op)).__name__ for node in nodes}


@pytest.mark.parametrize("make", HELD)
def test_basis_is_not_computed_at_each_step(make):
    assert make in WAY_ONE  # where its minibatches are held to the full gradient
    assert operations(gradient_of(make(), 4)).isdisjoint({"Sin", "Cos", "Maximum"})


def test_basis_of_data_containers_is_computed_at_each_step():
    # Negative control of the test above.
    with pm.Model() as model:
        gp = pm.gp.HSGP(m=[4], c=2.0, cov_func=pm.gp.cov.ExpQuad(1, ls=pm.Gamma("ls", 2, 1)))
        pm.Normal("y", gp.prior("f", X=pm.Data("x", X[:, :1])), 1, observed=Y)
    assert "Sin" in operations(gradient_of(model, 4))


@pytest.mark.parametrize(
    ("added", "held", "expected"),
    [
        (SMALL, 0, True),
        (SMALL + 1, 0, False),
        (4 * SMALL, SMALL, True),
        (4 * SMALL + 1, SMALL, False),
        (LARGEST, LARGEST, True),
        (LARGEST + 1, LARGEST, False),
        (np.inf, LARGEST, False),
    ],
)
def test_arrays_are_computed_within_memory(added, held, expected):
    assert may_be_added(added, held) is expected


def test_a_basis_that_is_large_beside_its_data_is_not_computed():
    """A quarter of a gigabyte and more of 88 bytes: nothing makes the array."""
    x = pt.constant(X[:, 0])
    for n_columns, is_computed in ((3, True), (SMALL // (8 * N) + 1, False)):
        graph = pt.broadcast_to(x, (n_columns, N)).T @ pt.vector("b")
        assert (with_rows_computed(graph, N) is not graph) == is_computed


def test_a_basis_that_may_not_be_computed_is_refused(tmp_path):
    """Of an array on disk; the same in memory can be cut."""
    on_disk = np.memmap(tmp_path / "x", "f8", "w+", shape=(N, 1))
    on_disk[:] = X[:, :1]

    def model_of(x):
        with pm.Model() as model:
            basis = pt.sin(pt.tile(pt.constant(x)[:, None], (1, 3, 1)) * np.arange(1, 4)[:, None])
            pm.Normal("y", basis[:, :, 0] @ pm.Normal("b", shape=3), 1, observed=Y)
        return model

    gradient_of(model_of(X[:, :1]), 4)
    refusal(model_of(on_disk), 4, "can't be evaluated on some of its", "pm.Data")


def test_arrays_on_disk_are_left_there(tmp_path):
    x = np.memmap(tmp_path / "x", "f8", "w+", shape=(N, 1))
    x[:] = X[:, :1]
    with pm.Model() as model:
        mu = pt.broadcast_to(pt.constant(x), (N, 3)) ** 3 @ pm.Normal("b", shape=3)
        pm.Normal("y", mu, 1, observed=Y)
    sources = gradient_of(model, 4).data.groups[0].sources
    assert any(isinstance(source.data, np.memmap) for source in sources)
    assert all(source.data.size == N for source in sources)


def test_outcome_is_left_as_it_is():
    with pm.Model() as model:
        pm.Poisson("y", pm.Gamma("rate", 2, 1), observed=COUNTS)
    [source] = gradient_of(model, 4).data.groups[0].sources
    np.testing.assert_array_equal(source.data, COUNTS)


def test_what_has_no_rows_in_front_is_left_as_it_is():
    table = pt.broadcast_to(pt.as_tensor(X[:, 0]), (G, N))  # as many columns as there are rows
    with pm.Model() as model:
        mu = table[GROUP] @ pm.Normal("b", shape=N)
        pm.Normal("y", mu, 1, observed=Y)
    assert with_rows_computed(table, N) is table
    gradient_of(model, 4)


def test_small_numbers_stay_small():
    # They are made wide as rows are fetched; computed before, they'd take eight times the memory.
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=X.shape[1])
        pm.Normal("y", pm.math.dot(pt.as_tensor((3 * X).astype("int8")), beta), 1, observed=Y)
    assert "int8" in [str(array.dtype) for array in gradient_of(model, 4).data.arrays]
