"""Both ways in, arrays as they are and pm.Minibatch: the minibatches of each model are exact."""

from functools import cache

import numpy as np
import pymc as pm
import pytensor
import pytest

from exactness import check_exact, random_point
from model_collection import cuttable, models_of
from model_collection.cuttable import (
    IN_BATCHES,
    D,
    N,
    X,
    Y,
    build,
    centred_by_the_full_data,
    data_containers,
    in_batches,
    random_intercepts_non_centred,
    student_t,
    whole,
)


@cache
def of_all_rows(make):
    """Model of both ways' tests, whose own gradient is compiled once."""
    return build(make, whole, None)


@pytest.mark.parametrize("make", [entry.make for entry in models_of("cuttable").values()])
def test_full_data_model_has_exact_mean(make):
    model = of_all_rows(make)
    check_exact(model, model, batch_size=4)


# Where a model's rows are in it, both ways are one: the default run takes a third of them again.
@pytest.mark.parametrize(
    "make",
    [
        make if i % 3 == 0 else pytest.param(make, marks=pytest.mark.slow)
        for i, make in enumerate(IN_BATCHES)
    ],
)
def test_pm_minibatch_model_has_exact_mean(make):
    gradient = check_exact(build(make, in_batches, N), of_all_rows(make), None)
    assert gradient.data.groups[0].batch_size == 4


@pytest.mark.parametrize("make", [entry.make for entry in models_of("cuttable_whole").values()])
def test_model_as_users_write_it_has_exact_mean(make):
    model = make()
    check_exact(model, model, batch_size=4)


def test_full_data_beside_pm_minibatch_stay_whole():
    with pm.Model() as full_model:
        pm.Normal("y", (X - X.mean(axis=0)) @ pm.Normal("b", shape=D), 1, observed=Y)
    check_exact(centred_by_the_full_data(), full_model, None)


@pytest.mark.parametrize("make", [data_containers, random_intercepts_non_centred, student_t])
@pytest.mark.parametrize("rows", [whole, in_batches])
def test_single_precision_model_has_exact_mean(make, rows):
    with pytensor.config.change_flags(floatX="float32", warn_float64="raise"):
        data = {name: vars(cuttable)[name] for name in ("X", "Y")}
        try:
            for name, array in data.items():
                vars(cuttable)[name] = array.astype("float32")
            model = build(make, rows, None if rows is whole else N)
            full_model = build(make, whole, None)
        finally:
            vars(cuttable).update(data)
        batch_size = 4 if rows is whole else None
        gradient = check_exact(model, full_model, batch_size, rtol=3e-5)
        _, position = random_point(model)
        minibatch = gradient.order.probe(np.random.default_rng(1))
        assert [out.dtype for out in gradient(position, minibatch)] == [np.float32] * 2
