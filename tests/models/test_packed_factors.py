"""Coordinates of the Cholesky factor of a covariance: correlations and scales, and no funnel."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_sghmc.hierarchy.packed_factors import packed_factors
from pymc_sghmc.models.unknowns import Unknowns


def written(n):
    """Functions of coordinates and of whether they are used: the model's variable, and more."""
    with pm.Model() as model:
        pm.LKJCholeskyCov("chol", n=n, eta=2, sd_dist=pm.Exponential.dist(1))
    [factor] = packed_factors(model, Unknowns(model.value_vars, model.initial_point()))
    x = pt.dvector()
    whole = pt.dscalar()
    there = factor.written(x, whole)
    own = pt.dvector()
    back = pytensor.graph.replace.clone_replace(there.back, {factor.value: own})
    options = {"mode": "FAST_COMPILE", "on_unused_input": "ignore"}
    forward = pytensor.function(
        [x, whole], [there.value, there.log_jacobian + 0 * x.sum()], **options
    )
    return model, forward, pytensor.function([own, whole], back, **options)


def by_differences(function, x):
    step = 1e-6
    return np.array(
        [(function(x + e) - function(x - e)) / (2 * step) for e in step * np.eye(x.size)]
    )


def test_two_coefficients_have_their_correlation_and_scales():
    _, forward, _ = written(2)
    value, _ = forward(np.array([0.3, 0.7, -1.2]), 1.0)
    C = np.array([[np.exp(value[0]), 0], [value[1], np.exp(value[2])]])
    covariance = C @ C.T
    sds = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(np.log(sds), [0.3, -1.2])
    assert covariance[0, 1] / sds.prod() == pytest.approx(np.tanh(0.7))


@pytest.mark.parametrize("n", [2, 3, 4, 9])
@pytest.mark.parametrize("whole", [0.0, 1.0])
def test_the_change_is_undone_and_has_its_jacobian(n, whole):
    _, forward, back = written(n)
    x = np.random.default_rng(n).standard_normal(n * (n + 1) // 2)
    value, log_jacobian = forward(x, whole)
    assert (whole == 0) == np.array_equal(value, x)
    np.testing.assert_allclose(back(value, whole), x, rtol=1e-12)
    J = by_differences(lambda x: forward(x, whole)[0], x)
    assert log_jacobian == pytest.approx(np.linalg.slogdet(J)[1], abs=1e-6)


def test_a_small_scale_makes_no_funnel():
    model, forward, _ = written(2)
    logp = model.compile_logp(jacobian=True)
    [name] = [v.name for v in model.value_vars]

    def slope(log_scale, x, whole):
        """By the entry below the diagonal."""
        ends = [np.array([0.0, x + side * 1e-6, log_scale]) for side in (-1, 1)]
        values = [forward(end, whole) for end in ends]
        before, after = (logp({name: value}) + jacobian for value, jacobian in values)
        return (after - before) / 2e-6

    near, far = (slope(log_scale, 1.0, 1.0) for log_scale in (-3.0, -8.0))
    assert far == pytest.approx(near, rel=0.1)
    # of c and log c in the place of x it is as steep as the scale is small
    assert abs(slope(-8.0, np.exp(-8.0), 0.0)) > 100 * abs(slope(-3.0, np.exp(-3.0), 0.0))
