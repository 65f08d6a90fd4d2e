"""The number that tells whether two sets of data are the same."""

import numpy as np
import pytest

from pymc_sghmc.models.outcomes import mark_of

VALUES = np.array([-128, -3, 0, 5, 127])


@pytest.mark.parametrize("dtype", ["i1", "i2", "i8", "f4", "f8"])
def test_a_mark_is_the_same_in_all_types(dtype):
    values = VALUES.astype(dtype)
    assert mark_of(values) == mark_of(values[::-1]) == 1 + 2 * 263


@pytest.mark.parametrize("dtype", ["u1", "bool"])
def test_a_mark_of_numbers_without_a_sign_is_three_times_their_sum(dtype):
    assert mark_of(np.array([0, 1, 1], dtype)) == 6


def test_centred_data_and_signs_have_marks_of_their_own():
    rng = np.random.default_rng(0)
    centred = [y - y.mean() for y in rng.standard_normal((2, 50))]
    scaled = [y / y.std() for y in centred]
    assert abs(mark_of(scaled[0]) - mark_of(scaled[1])) > 0.1
    signs = np.where(rng.random(50) < 0.5, -1, 1)
    assert mark_of(signs) != mark_of(-signs)
    assert np.isnan(mark_of(np.array([1.0, np.nan])))
    assert np.isnan(mark_of(np.array(["a"])))
