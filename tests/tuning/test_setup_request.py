"""Requests for set-ups are equal by value, and those for other data, starts or orders aren't."""

import copy

from dataclasses import FrozenInstanceError, replace

import cloudpickle
import numpy as np
import pytest

from pymc_sghmc.gradients.metric import Dense, Diagonal
from pymc_sghmc.runs.states import decoded, encoded
from pymc_sghmc.tuning.setup_request import DataId, SetupRequest

DATA = np.arange(6.0)


def request_of(**changes):
    settings = {
        "start": np.ones(2),
        "metric": Diagonal(np.full(2, 0.5)),
        "max_order": 2,
        "conditioned_on": (np.array(1), np.arange(3.0)),
        "data_id": DataId((DATA,)),
    }
    return SetupRequest(**settings | changes)


def test_requests_are_equal_by_value():
    assert request_of() == request_of()
    assert hash(request_of()) == hash(request_of())
    assert len({request_of(), request_of(), request_of(max_order=1)}) == 2
    # zeros of either sign are equal, and so must be their hashes
    zero, negative = (request_of(start=np.array([z, 1.0])) for z in (0.0, -0.0))
    assert zero == negative
    assert hash(zero) == hash(negative)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": np.array([1.0, 2.0])},
        {"metric": None},
        {"metric": Diagonal(np.ones(2))},
        {"metric": Dense(np.diag(np.full(2, 0.5)))},
        {"is_mode": False},
        {"max_order": 1},
        {"conditioned_on": (np.array(2), np.arange(3.0))},
        {"conditioned_on": ()},
        {"data_id": None},
        {"data_id": DataId((DATA.copy(),))},  # equal data elsewhere in memory
        {"data_id": DataId((DATA[:5],))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_requests_that_differ_in_anything_are_not_equal(changes):
    assert request_of(**changes) != request_of()


def test_requests_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        request_of().max_order = 1


def test_data_are_the_same_in_copies_and_as_long_as_they_live():
    data_id = DataId((np.arange(1000.0),))
    assert copy.deepcopy(data_id) == data_id
    others = [DataId((np.arange(1000.0),)) for _ in range(10)]
    assert data_id not in others
    assert len(set(others)) == 10


def test_data_that_travelled_with_their_step_are_the_same_there():
    array, data_id = cloudpickle.loads(cloudpickle.dumps((DATA, DataId((DATA,)))))
    assert data_id == DataId((array,)) != DataId((DATA,))


def test_what_is_saved_of_a_request_is_read_back():
    request = replace(request_of(), data_id=None)
    arrays = {}
    assert decoded(encoded(request, arrays), arrays) == request
