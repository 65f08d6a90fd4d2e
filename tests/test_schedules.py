"""Learning-rate schedules: values, limits, refusals. The formulas' examples are doctests."""

import numpy as np
import pytest

from pymc_sghmc.schedules import constant, cyclical, polynomial_decay


def test_polynomial_decay_is_welling_and_tehs():
    eta = polynomial_decay(a=0.3, b=20.0, gamma=0.7)
    t = np.arange(0, 5000, 7)
    np.testing.assert_allclose([eta(k) for k in t], 0.3 * (20.0 + t) ** -0.7, rtol=1e-12)


def test_cyclical_starts_each_cycle_high_and_never_reaches_zero():
    eta = cyclical(0.2, period=50)
    rates = np.array([eta(t) for t in range(150)]).reshape(3, 50)
    np.testing.assert_allclose(rates[0], rates[2])
    np.testing.assert_allclose(rates[0], 0.1 * (1 + np.cos(np.pi * np.arange(50) / 50)))
    assert (np.diff(rates[0]) < 0).all()
    assert (rates > 0).all()


def test_constant_is_constant():
    assert {constant(0.5)(t) for t in (0, 10, 10**9)} == {0.5}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: constant(0.0), r"constant\(learning_rate=0\.0\): must be a finite number above"),
        (lambda: polynomial_decay(-1.0), r"polynomial_decay\(a=-1\.0\)"),
        (lambda: polynomial_decay(1.0, b=0.0), r"polynomial_decay\(b=0\.0\)"),
        (lambda: polynomial_decay(1.0, gamma=0.5), r"gamma=0\.5\): must lie in \(1/2, 1\]"),
        (lambda: polynomial_decay(1.0, gamma=1.1), r"gamma=1\.1\)"),
        (lambda: cyclical(np.nan, 10), r"cyclical\(learning_rate=nan\)"),
        (lambda: cyclical(0.1, 1), r"cyclical\(period=1\): a cycle needs at least 2"),
    ],
)
def test_bad_schedule_is_refused_by_name(build, message):
    with pytest.raises(ValueError, match=message):
        build()
