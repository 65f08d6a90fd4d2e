"""Coordinates without the tail of a Student t distribution, against SciPy's quantiles."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from scipy import stats

from pymc_sghmc.hierarchy.heavy_tails import shrunk, stretched, tail

X = np.linspace(-3, 3, 61)


def values(of_tail):
    """S(x), log S'(x) and x again."""
    x = pt.dvector()
    there = stretched(x, pt.constant(of_tail))
    back = shrunk(there.value, pt.constant(of_tail))
    function = pytensor.function([x], [there.value, there.log_slope, back], mode="FAST_COMPILE")
    return function, function(X)


@pytest.mark.parametrize(
    ("freedom", "error"), [(1.0, 0.4), (2.0, 0.13), (4.0, 0.04), (30.0, 0.001)]
)
def test_normal_quantiles_become_those_of_t(freedom, error):
    function, (t, log_slope, back) = values(1 / freedom)
    again = stats.norm.ppf(stats.t.cdf(t, freedom))
    np.testing.assert_allclose(again, X, atol=error)
    np.testing.assert_allclose(back, X, atol=1e-12)
    step = 1e-6
    slope = (function(X + step)[0] - function(X - step)[0]) / (2 * step)
    np.testing.assert_allclose(np.exp(log_slope), slope, rtol=1e-6)


@pytest.mark.parametrize("of_tail", [0.0, 1e-9, 1e-5])
def test_without_a_tail_nothing_changes(of_tail):
    _, (t, log_slope, back) = values(of_tail)
    np.testing.assert_allclose(t, X, rtol=20 * of_tail + 1e-14)
    np.testing.assert_allclose(log_slope, 0, atol=20 * of_tail + 1e-14)
    np.testing.assert_allclose(back, X, rtol=1e-12, atol=1e-14)


def test_rows_cut_a_tail_off():
    assert tail(4.0, 0.0) == 0.25
    assert tail(4.0, 3.0) < 0.01
