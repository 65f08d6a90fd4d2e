"""Operations on the correlated coefficients of groups, held to dense linear algebra."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from modes import FAST
from targets import plain_gradient, solves

from pymc_sghmc.hierarchy.correlated_effects import Coefficients, StandardCoefficients, Unmixed
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.models.unknowns import Unknowns

SHAPES = [(1, 1), (3, 2), (5, 3), (2, 7)]  # groups, coefficients


def numbers(n_groups, n):
    """Return s, C, h and f."""
    rng = np.random.default_rng([n_groups, n])
    C = np.tril(rng.standard_normal((n, n)))
    C[np.diag_indices(n)] = np.exp(C[np.diag_indices(n)])
    h = rng.exponential(3.0, (n_groups, n))
    return rng.standard_normal((n_groups, n)), C, h, rng.standard_normal((n_groups, n))


def evaluated(outputs, mode="FAST_COMPILE"):
    return pytensor.function([], outputs, mode=mode)()


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "NUMBA"])
@pytest.mark.parametrize("shape", SHAPES)
def test_coefficients_have_the_law_that_rows_leave(shape, mode):
    s, C, h, f = numbers(*shape)
    # as transposes, whose entries lie in another order
    inputs = [pt.constant(x.T.copy()).T for x in (s, C, h, f)]
    v, mixed, log_slopes = evaluated(Coefficients()(*inputs), mode)
    back = evaluated(StandardCoefficients()(v, *inputs[1:]), mode)
    np.testing.assert_allclose(back, s, atol=1e-12)
    np.testing.assert_allclose(mixed, v @ C.T)
    np.testing.assert_allclose(evaluated(Unmixed()(mixed, inputs[1]), mode), v)
    for g in range(shape[0]):
        A = np.eye(shape[1]) + C.T @ np.diag(h[g]) @ C
        assert log_slopes[g] == pytest.approx(-0.5 * np.linalg.slogdet(A)[1])
        center = np.linalg.solve(A, C.T @ f[g])
        assert (v[g] - center) @ A @ (v[g] - center) == pytest.approx(s[g] @ s[g])


@pytest.mark.parametrize("shape", SHAPES)
def test_numba_has_the_same_gradients(shape):
    s, C, h, f = map(pt.constant, numbers(*shape))
    v, mixed, log_slopes = Coefficients()(s, C, h, f)
    cost = (pt.sin(v) * mixed).sum() + pt.exp(log_slopes).sum() + pt.cos(Unmixed()(s, C)).sum()
    wanted = evaluated(pt.grad(cost, [s, C, h, f]))
    for found, one in zip(evaluated(pt.grad(cost, [s, C, h, f]), "NUMBA"), wanted, strict=True):
        np.testing.assert_allclose(found, one, atol=1e-12)


def slopes_and_differences(operation, values):
    """Return the gradient of a weighted sum of an operation's entries, and by differences."""
    symbols = [pt.matrix() for _ in values]
    output = operation(*symbols)
    size = output.eval(dict(zip(symbols, values, strict=True)), mode="FAST_COMPILE").shape
    cost = (np.random.default_rng(1).uniform(0.5, 1.5, size) * output).sum()
    options = {"mode": "FAST_COMPILE", "on_unused_input": "ignore"}
    slopes = pytensor.function(
        symbols, pt.grad(cost, symbols, disconnected_inputs="ignore"), **options
    )
    function = pytensor.function(symbols, cost, **options)
    return slopes(*values), pytensor.gradient.numeric_grad(function, values).gf


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("output", range(3))
def test_coefficients_have_their_gradient(shape, output):
    found, wanted = slopes_and_differences(
        lambda s, C, h, f: Coefficients()(s, pt.tril(C), h, f)[output], list(numbers(*shape))
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_inverse_has_its_gradient(shape):
    s, C, _, _ = numbers(*shape)
    found, wanted = slopes_and_differences(lambda x, C: Unmixed()(x, pt.tril(C)), [s, C])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_many_positions_are_as_each_of_them():
    parts = [numbers(3, 2) for _ in range(2)]
    parts[1] = tuple(2 * x for x in parts[1])
    symbols = [pt.matrix() for _ in range(4)]
    outputs = Coefficients()(*symbols)
    several = [pt.tensor3() for _ in range(4)]
    replaced = pytensor.graph.replace.vectorize_graph(
        outputs, dict(zip(symbols, several, strict=True))
    )
    together = pytensor.function(several, replaced, mode="FAST_COMPILE")
    alone = pytensor.function(symbols, outputs, mode="FAST_COMPILE")
    found = together(*map(np.stack, zip(*parts, strict=True)))
    for k, part in enumerate(parts):
        for of_all, of_one in zip(found, alone(*part), strict=True):
            np.testing.assert_allclose(of_all[k], of_one)


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "NUMBA"])
def test_a_scale_that_is_zero_is_no_error(mode):
    """Far out a chain's scale may be too small for a number: a divergence, and no more."""
    s, C, h, f = numbers(3, 2)
    C[1, 1] = 0.0
    found = evaluated([Unmixed()(s, C), *Coefficients()(s, C, h, f)], mode)
    assert not np.isfinite(found[0][:, 1]).any()
    assert all(np.isfinite(values).all() for values in found[1:])
    C, x = pt.constant(C), pt.constant(s)
    slopes = evaluated(pt.grad(Unmixed()(x, C).sum(), [x, C]), mode)
    assert not any(np.isfinite(values).all() for values in slopes)


def covariance(way):
    """Return keyword arguments of a prior N(μ, CCᵀ) of two coefficients."""
    if way == "cov":
        sds = pm.HalfNormal("sds", 1, shape=2)
        correlation = pm.Uniform("correlation", -1, 1)
        off = correlation * sds[0] * sds[1]
        return {"mu": 0, "cov": pt.stacklists([[sds[0] ** 2, off], [off, sds[1] ** 2]])}
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.Exponential.dist(1))
    return {"mu": pm.Normal("mu", 0, 1, shape=2) if way == "mu" else 0, "chol": chol}


@pytest.mark.parametrize("way", ["cov", "mu", "chol"])
def test_the_prior_of_coefficients_is_known_without_solving(way):
    """Of N(μ, CCᵀ) the log-density takes C⁻¹(u − μ), which is a coordinate of the effects."""
    group = np.repeat(np.arange(20), 10)
    x = np.random.default_rng(4).standard_normal(200)
    with pm.Model() as model:
        u = pm.MvNormal("u", **covariance(way), shape=(20, 2))
        pm.Normal("y", u[group, 0] + u[group, 1] * x, 1, observed=x)
    density = centred(model)
    assert set(density.group_coefficients) == {"u"}
    assert solves([model.logp()])
    assert not solves([density.graph.model.log_prior])


def test_effects_of_several_sizes_have_their_own():
    group, other = np.repeat(np.arange(20), 10), np.tile(np.arange(8), 25)
    x = np.random.default_rng(4).standard_normal(200)
    with pm.Model() as model:
        chol = covariance("chol")["chol"]
        u = pm.MvNormal("u", 0, chol=chol, shape=(20, 2))
        v = pm.MvNormal("v", u.mean(axis=0), chol=chol, shape=(8, 2))
        pm.Normal("y", u[group, 0] + v[other, 1] * x, 1, observed=x)
    density = centred(model)
    assert set(density.group_coefficients) == {"u", "v"}
    assert not solves([density.graph.model.log_prior])


def centred(model):
    """Return a density in the coordinates of effects."""
    point = model.initial_point()
    unknowns = Unknowns(model.value_vars, point)
    gradient = plain_gradient(
        model, unknowns, 50, point, FAST, rewriting=Rewriting(may_centre=True)
    )
    return gradient.density
