"""Groups of rows, their order and sizes, batch_size and total_size: exact, or refused in words."""

import warnings

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from exactness import check_exact, compiled, mean_over_rows, random_point, refusal
from model_collection.cuttable import (
    COUNTS,
    POSITIVE,
    Y_ROWS,
    D,
    N,
    X,
    Y,
    build,
    constants,
    data_containers,
    in_batches,
    several_observed,
    whole,
)
from targets import gradient_of, on_rows

from pymc_sghmc.models.contract import minibatch_log_density

# --- Several groups of rows


def two_tables():
    """Likelihoods of 11 and 7 rows share their unknowns."""
    with pm.Model(coords={"row": range(N), "other": range(7)}) as model:
        b = pm.Normal("b", shape=D)
        x = pm.Data("x", X, dims=("row", "feature"))
        pm.Normal("y", x @ b, 1, observed=Y, dims="row")
        x_other = pm.Data("x_other", X[:7] + 1)
        pm.Poisson("counts", pt.exp(x_other @ b), observed=COUNTS[:7], dims="other")
    return model


@pytest.mark.parametrize(
    ("batch_size", "n_groups"),
    [
        ({"y": 4, "counts": 3}, 2),
        ({"row": 4, "other": 3}, 2),
        ({"x": 4, "x_other": 3}, 2),
        ({"x": 4, "row": 4, "y": 4}, 1),  # other names for the same rows; "counts" is used whole
        ({"counts": 7}, 1),
    ],
)
def test_groups_of_rows_have_exact_mean(batch_size, n_groups):
    model = two_tables()
    gradient = check_exact(model, model, batch_size, n_groups=n_groups)
    assert [g.batch_size for g in gradient.data.groups] == list(batch_size.values())[:n_groups]


def test_groups_of_pm_minibatch_keep_their_sizes():
    def make(first, second):
        with pm.Model() as model:
            mu = pm.Normal("mu")
            y = pm.Minibatch(Y, batch_size=4) if first else Y
            z = pm.Minibatch(POSITIVE[:7], batch_size=3) if second else POSITIVE[:7]
            pm.Normal("y", mu, 1, observed=y, total_size=N if first else None)
            pm.Normal("z", mu, 2, observed=z, total_size=7 if second else None)
        return model

    full_model = make(False, False)
    gradient = check_exact(make(True, True), full_model, None, n_groups=2)
    assert sorted(g.batch_size for g in gradient.data.groups) == [3, 4]
    gradient = check_exact(make(True, True), full_model, {"z": 2}, n_groups=2)
    assert sorted(g.batch_size for g in gradient.data.groups) == [2, 4]
    # A likelihood without pm.Minibatch stays whole.
    check_exact(make(True, False), full_model, None, n_groups=1)


def test_arrays_of_one_minibatch_are_cut_by_the_same_rows():
    # Each row says exp(b x) with its own x: rows of x and y that don't belong together show.
    with pm.Model() as model:
        b = pm.Normal("b")
        x, y = pm.Data("x", np.arange(5.0)), pm.Data("y_data", 10.0 ** np.arange(5))
        pm.Normal("y", b * x, 1, observed=y)
    gradient = gradient_of(model, 2)
    b = np.array([0.3])
    _, grad = on_rows(gradient, b, np.array([3, 1]))
    x, y = np.array([3.0, 1.0]), np.array([1000.0, 10.0])
    np.testing.assert_allclose(grad, -b + 5 / 2 * np.sum(x * (y - b * x)), rtol=1e-12)


def test_int_is_enough_for_equal_row_counts():
    with pm.Model(coords={"row": range(N), "other": range(N)}) as model:
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1, observed=Y, dims="row")
        pm.Normal("z", mu, 1, observed=POSITIVE, dims="other")
    check_exact(model, model, 4)


def test_no_batch_size_uses_all_data():
    model = build(data_containers, whole, None)
    gradient = check_exact(model, model, None, n_groups=0)
    assert gradient.is_exact


@pytest.mark.parametrize("batch_size", [None, 4])
def test_variables_that_are_listed_twice_count_once(batch_size):
    # sample_posterior_predictive of PyMC 5.28 leaves the observed variables twice in its list.
    model, full_model = (build(several_observed, whole, None) for _ in range(2))
    values, position = random_point(model)
    model.observed_RVs.extend(model.observed_RVs[:])
    gradient = gradient_of(model, batch_size)
    logp, grad = mean_over_rows(gradient, position)
    expected = compiled(full_model)(*values)
    np.testing.assert_allclose(logp, expected[0], rtol=1e-10)
    np.testing.assert_allclose(grad, expected[1], rtol=1e-10)


def test_pm_minibatch_in_a_deterministic_alone_is_no_minibatch():
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Deterministic("some", mu * pm.Minibatch(Y, batch_size=2))
        pm.Normal("y", mu, 1, observed=Y)
    check_exact(model, model, None, n_groups=0)


# --- Refusals: each names what is wrong and the way out.


def rows_on_second_axis():
    pm.Normal("y", pm.Data("x", X.T).T @ pm.Normal("b", shape=D), 1, observed=Y)


def flattened_rows():
    x = pm.Data("x", X.ravel()).reshape((N, D))
    pm.Normal("y", x @ pm.Normal("b", shape=D), 1, observed=Y)


def halves_joined():
    x = pt.concatenate([pm.Data("x1", X[:5]), pm.Data("x2", X[5:])])
    pm.Normal("y", x @ pm.Normal("b", shape=D), 1, observed=Y)


def repeated_groups():
    a = pm.Normal("a", shape=2)
    pm.Normal("y", pt.repeat(a, pm.Data("times", [5, 6])), 1, observed=Y)


def column_against_row():
    # PyMC broadcasts (N,) against (N, 1) to N × N log-densities.
    y = pm.Data("y_data", Y[:, None])
    pm.Normal("y", pm.Normal("b") * pm.Data("x", X[:, 0]), 1, observed=y)


@pytest.mark.parametrize(
    "make",
    [
        rows_on_second_axis,
        flattened_rows,
        halves_joined,
        repeated_groups,
        column_against_row,
    ],
)
def test_data_in_another_order_are_refused(make):
    refusal(build(make), 4, "'y'", "can't be evaluated on some of its", "leading axis")


def test_transposed_outcome_is_refused():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu", shape=N), 1, observed=Y_ROWS.T)
    refusal(model, 4, "batch_size=4", "only 2 rows")


def test_rows_along_the_second_axis_are_to_be_turned():
    with pm.Model() as model:
        month = pm.Normal("month", shape=2)
        pm.Normal("y", month[:, None] + X[:, 0] * pm.Normal("b"), 1, observed=Y_ROWS.T)
    with pytest.raises(ValueError, match=r"longer along another.*turn the data") as error:
        minibatch_log_density(model, 1)
    assert "marginalize" not in str(error.value)


def test_array_with_another_dim_is_named_in_the_refusal():
    with pm.Model(coords={"row": range(N), "line": range(N)}) as model:
        x = pm.Data("x", X[:, 0], dims="line")
        pm.Normal("y", pm.Normal("b") * x, 1, observed=Y, dims="row")
    refusal(model, 4, "'x'", "another leading dim", "'row'")


def test_equal_observations_on_other_rows_are_told_apart():
    # PyTensor merges the two constants into one, which has the name of one of them.
    with pm.Model(coords={"row": range(N), "line": range(N)}) as model:
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1, observed=Y, dims="row")
        pm.Normal("z", mu * pm.Data("x", X[:, 0], dims="line"), 1, observed=Y.copy(), dims="line")
    check_exact(model, model, 4)


def test_imputed_rows_are_refused():
    with pm.Model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyMC announces the imputation
        pm.Normal("y", pm.Normal("mu"), 1, observed=np.ma.masked_greater(Y, 0.5))
    refusal(model, 2, "'y'", "missing values", "Drop the rows")


def test_imputed_rows_may_be_kept_whole():
    with pm.Model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1, observed=np.ma.masked_greater(Y, 0.5))
        pm.Normal("z", mu, 1, observed=POSITIVE)
    check_exact(model, model, {"z": 4})


@pytest.mark.parametrize(("value", "words"), [(np.nan, "missing"), (np.inf, "infinite")])
@pytest.mark.parametrize("rows", [whole, in_batches])
def test_data_that_are_no_numbers_are_named(rows, value, words):
    x = X[:, 0].copy()
    x[3] = value
    with pm.Model() as model:
        x, y = rows(x, Y)
        pm.Normal("y", pm.Normal("b") * x, 1, observed=y, total_size=None if rows is whole else N)
    refusal(model, 4, "'y' is not finite", f"has {words} values in row 3. Drop these rows")


def minibatch_model(total_size):
    with pm.Model() as model:
        x, y = pm.Minibatch(X, Y, batch_size=4)
        b = pm.Normal("b", shape=D)
        pm.Normal("y", x @ b, 1, observed=y, total_size=total_size)
    return model


def test_minibatch_without_total_size_is_refused():
    with pytest.warns(UserWarning, match="total_size not provided"):  # PyMC's
        model = minibatch_model(None)
    refusal(model, None, "'y'", "without total_size", f"Pass total_size={N}")


@pytest.mark.parametrize("total_size", [N - 1, 4, 10 * N, [None]])
def test_minibatch_with_wrong_total_size_is_refused(total_size):
    refusal(minibatch_model(total_size), None, "'y'", "total_size", f"total_size={N}")


def test_total_size_on_another_axis_is_refused():
    with pm.Model() as model:
        y = pm.Minibatch(Y_ROWS, batch_size=4)
        pm.Normal("y", pm.Normal("mu"), 1, observed=y, total_size=(N, 2))
    refusal(model, None, "'y'", "axis other than the first", f"total_size={N}")


@pytest.mark.parametrize("total_size", [[N, ...], (N, None)])
def test_total_size_may_be_a_sequence(total_size):
    with pm.Model() as model:
        y = pm.Minibatch(Y_ROWS, batch_size=4)
        pm.Normal("y", pm.Normal("mu"), 1, observed=y, total_size=total_size)
    with pm.Model() as full_model:
        pm.Normal("y", pm.Normal("mu"), 1, observed=Y_ROWS)
    check_exact(model, full_model, None)


def test_wrong_total_size_on_full_data_is_refused():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu"), 1, observed=Y, total_size=5 * N)
    refusal(model, 4, "'y'", f"total_size={5 * N}", f"Pass total_size={N}")


def test_separate_minibatches_are_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X, batch_size=4), pm.Minibatch(Y, batch_size=4)
        pm.Normal("y", x @ pm.Normal("b", shape=D), 1, observed=y, total_size=N)
    refusal(model, None, "'y'", "2 calls of pm.Minibatch", "pm.Minibatch(X, y")


def test_minibatch_of_arrays_of_different_length_is_refused():
    with pm.Model() as model:
        x, y = pm.Minibatch(X[:-1], Y, batch_size=4)
        pm.Normal("y", x @ pm.Normal("b", shape=D), 1, observed=y, total_size=N)
    refusal(model, None, "'y'", f"[{N - 1}, {N}] rows", "same number of rows")


def test_full_array_beside_pm_minibatch_is_refused():
    with pm.Model() as model:
        y = pm.Minibatch(Y, batch_size=N)
        pm.Normal("y", X @ pm.Normal("b", shape=D), 1, observed=y, total_size=N)
    refusal(model, None, "'y'", "can't be evaluated on some of its", "on the leading axis")


@pytest.mark.parametrize("batch_size", [N, N + 1, 500, {"y": 500}])
def test_batch_size_that_no_data_fill_is_all_rows(batch_size):
    _, [group] = minibatch_log_density(build(constants, whole, None), batch_size)
    assert group.batch_size == N


@pytest.mark.parametrize("batch_size", [0, -3])
def test_batch_size_below_one_is_refused(batch_size):
    refusal(build(constants, whole, None), batch_size, f"batch_size={batch_size}", "1 row or more")


@pytest.mark.parametrize("batch_size", [2.5, 4.0, "10", True, np.True_, [4], {"y": None}])
def test_batch_size_that_is_no_count_is_refused(batch_size):
    refusal(build(constants, whole, None), batch_size, f"batch_size={batch_size!r}", "whole number")


@pytest.mark.parametrize("batch_size", [np.int32(4), {"y": np.int64(4)}])
def test_batch_size_may_be_any_integer(batch_size):
    model = build(constants, whole, None)
    gradient = gradient_of(model, batch_size)
    assert gradient.data.groups[0].batch_size == 4


@pytest.mark.parametrize(
    ("batch_size", "parts"),
    [
        (4, ("batch_size=4", "different numbers of rows", "Name the groups")),
        ({"nobody": 4}, ("'nobody' is not the name", "'y'", "'row'", "'x_other'", "7 rows")),
        ({"y": 4, "row": 5}, ("[4, 5] to the same rows", "Name them once")),
        ({"counts": -8}, ("batch_size={'counts': -8}", "1 row or more")),
        ({"counts": True}, ("batch_size={'counts': True}", "whole number")),
        ({"y": "4", "row": 4}, ("batch_size={'y': '4', 'row': 4}", "whole number")),
    ],
)
def test_batch_size_that_fits_no_group_is_refused(batch_size, parts):
    refusal(two_tables(), batch_size, *parts)
