"""Likelihoods of some rows of a predictor: these rows of the data are cut, and no others."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from exactness import check_exact, refusal
from model_collection.cuttable import BINARY, GROUP, POSITIVE, D, G, N, X, Y
from targets import gradient_of

from pymc_sghmc.models.picked_rows import with_picked_rows

PICKED = np.flatnonzero(BINARY)
assert 2 < PICKED.size < N - 2


def arrays():
    return X, GROUP


def containers():
    return pm.Data("x", X), pm.Data("group", GROUP)


def containers_with_dims():
    return pm.Data("x", X, dims=("row", "feature")), pm.Data("group", GROUP, dims="row")


WAYS_OF_DATA = [arrays, containers, containers_with_dims]
INDICES = {
    "mask": BINARY.astype(bool),
    "numbers": PICKED,
    "backwards": PICKED[::-1],
    "slice": slice(2, 9, 2),
    "from the end": slice(-3, None),
}


def hurdle(data, index):
    """Whether there is anything, by all rows, and how much, by those that have something."""
    with pm.Model(coords={"row": range(N), "feature": range(D), "cell": range(G)}) as model:
        x, group = data()
        b = pm.Normal("b", 0, 2, shape=D)
        u = pm.Normal("u", 0, 1, dims="cell")
        eta = x @ b + u[group]
        pm.Bernoulli("any", logit_p=eta, observed=BINARY)
        mu = pt.exp(0.5 * eta)
        pm.Gamma("much", mu=mu[index], sigma=1, observed=POSITIVE[index])
    return model


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("data", WAYS_OF_DATA)
def test_picked_rows_have_exact_mean(data, index):
    model = hurdle(data, index)
    sizes = {"any": 4, "much": 2}
    gradient = check_exact(model, model, sizes, n_groups=2)
    n_picked = len(POSITIVE[index])
    assert list(gradient.data.n_rows) == [N, n_picked]
    # Of what is drawn nothing is as long as the predictor that is picked from.
    lengths = [len(array) for array in gradient.data.arrays]
    assert sorted(set(lengths)) == sorted({N, n_picked})


def test_rows_of_several_columns_are_picked():
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1, shape=(D, 2))
        mu = pt.dot(X, b)
        y = np.stack([Y, POSITIVE], axis=1)
        pm.Normal("y", mu[BINARY.astype(bool), :], 1, observed=y[PICKED])
    check_exact(model, model, 2)


def lagged():
    """An autoregression: each value beside the one before it."""
    with pm.Model() as model:
        y = pm.Data("y_data", Y)
        pm.Normal("y", pm.Normal("rho") * y[:-1], 1, observed=y[1:])
    return model


def test_outcome_may_be_picked_too():
    check_exact(lagged(), lagged(), 4)


def test_new_data_are_picked_by_the_same_mask():
    model = hurdle(containers, BINARY.astype(bool))
    gradient = gradient_of(model, {"any": 4, "much": 2})
    with model:
        pm.set_data({"x": X + 1})
    gradient.data.reload()
    assert any(np.array_equal(array, (X + 1)[PICKED]) for array in gradient.data.arrays)
    with model:  # more rows than the mask has
        pm.set_data({"x": np.ones((N + 1, D)), "group": np.zeros(N + 1, dtype=int)})
    with pytest.raises(IndexError):
        gradient.data.reload()


def test_new_data_of_another_length_are_picked_by_the_same_slice():
    model = lagged()
    gradient = gradient_of(model, 4)
    with model:
        pm.set_data({"y_data": np.arange(20.0)})
    gradient.data.reload()
    assert list(gradient.data.n_rows) == [19]
    before, after = sorted(gradient.data.arrays, key=lambda array: array[0])
    np.testing.assert_array_equal(before, np.arange(19.0))
    np.testing.assert_array_equal(after, np.arange(1.0, 20.0))


def mean_over_all_rows():
    x, b = pm.Data("x", X), pm.Normal("b", shape=D)
    mu = (x - x.mean(axis=0)) @ b
    pm.Normal("y", mu[PICKED], 1, observed=Y[PICKED])


def recursion_over_rows():
    b = pm.Normal("b", shape=D)
    pm.Normal("y", pt.cumsum(pt.dot(X, b))[PICKED], 1, observed=Y[PICKED])


def any_of_rows_that_are_not_picked():
    # In the picked rows none is, and nothing in these tells that there are others.
    is_left_out = np.arange(N) == np.flatnonzero(BINARY == 0)[0]
    k = pm.Data("k", is_left_out[:, None] & np.ones(D, dtype=bool))
    mu = (pt.cast(k, "float64") + pt.any(k)) @ pm.Normal("b", shape=D)
    pm.Normal("y", mu[PICKED], 1, observed=Y[PICKED])


NOT_BY_ROW = [mean_over_all_rows, recursion_over_rows, any_of_rows_that_are_not_picked]


@pytest.mark.parametrize("add", NOT_BY_ROW)
def test_rows_that_need_others_are_refused(add):
    with pm.Model() as model:
        add()
    refusal(model, 2, "The ", "'y'")


def test_parameters_for_each_row_are_looked_up_by_number():
    with pm.Model() as model:
        z, b = pm.Normal("z", shape=N), pm.Normal("b", shape=D)
        pm.Normal("y", (pt.dot(X, b) + z)[PICKED], 1, observed=Y[PICKED])
    check_exact(model, model, 2)


def test_entries_that_rows_look_up_are_parameters():
    # A table as long as nothing else, some of whose entries are picked, each once.
    table = np.arange(2.0 * N)
    with pm.Model() as model:
        b = pm.Normal("b")
        tables = b * pt.as_tensor(table)
        pm.Normal("y", tables[np.arange(N) * 2], 1, observed=Y)
    check_exact(model, model, 3)


@pytest.mark.parametrize("index", [np.arange(N) * 4 - 1, np.arange(4 * N) % 4 == 0])
def test_places_may_be_more_than_rows_of_any_data(index):
    # Their number isn't known beforehand: the data that they are computed from may be replaced.
    table = pytensor.shared(np.arange(2.0 * N))
    graph = pt.exp(pt.concatenate([table, table]) * pt.scalar("b"))[index]
    picked = with_picked_rows(graph, N)
    assert picked.graph is graph
    assert picked.sources == []
