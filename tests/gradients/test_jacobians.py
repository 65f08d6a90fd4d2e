"""Derivatives of what rows depend on: few for each row say the same as all of them."""

import numpy as np
import pytest

from scipy.sparse import issparse

from pymc_sghmc.gradients.jacobians import Full, sparse
from pymc_sghmc.gradients.metric import Dense, Diagonal, Identity, LowRank

SHAPES = [(), (3,), (70, 2), (2, 90), (100,)]
D = 1 + 3 + 140 + 180 + 100
N, M = 40, 2


def zetas_of_groups():
    """Rows whose two numbers depend on one group's effects each, and on all few unknowns."""
    rng = np.random.default_rng(3)
    J = np.zeros((N, M, D))
    J[:, 0, :4], J[:, 1, 2] = rng.standard_normal((N, 4)), 1.0
    for n, (i, j, k) in enumerate(rng.integers((70, 90, 100), size=(N, 3))):
        J[n, 0, 4 + 2 * i : 6 + 2 * i] = 1.0, rng.standard_normal()
        J[n, 0, [144 + j, 234 + j]] = rng.standard_normal(2)
        J[n, 1, 324 + k] = 1.0 if n else 0.0  # the first row has none
        J[n, 0, 324 + (k + 1) % 100] = 0.5  # and another entry in the other number
    return J


J = zetas_of_groups()
CENTRE = np.random.default_rng(4).standard_normal(D)
SDS = np.random.default_rng(5).uniform(0.01, 10, D)


def both(J):
    def zetas(point):
        return J @ point

    return Full(zetas, CENTRE, SDS), sparse(SHAPES)(zetas, CENTRE, SDS)


def metrics():
    rng = np.random.default_rng(6)
    U = np.linalg.qr(rng.standard_normal((D, 3)))[0].T
    matrix = np.tril(rng.standard_normal((D, D)))
    return {
        "none": Identity(D),
        "scales": Diagonal(SDS),
        "low rank": LowRank.of(SDS, U, np.array([3, -0.5, 1])),
        "L": Dense(matrix),
    }


@pytest.mark.parametrize("kind", ["none", "scales", "low rank", "L"])
def test_few_derivatives_of_each_row_say_what_all_say(kind):
    rng = np.random.default_rng(7)
    full, few = both(J)
    c, C = rng.standard_normal((N, M)), rng.standard_normal((N, M, M))
    C, weights = C + C.swapaxes(1, 2), rng.uniform(0, 3, N)
    metric = metrics()[kind]
    np.testing.assert_allclose(full.J, J, atol=1e-9)
    np.testing.assert_allclose(few.total(c), full.total(c), atol=1e-9)
    hessian = few.hessian(C)
    assert issparse(hessian) and hessian.nnz < D**2 / 10
    np.testing.assert_allclose(hessian.toarray(), full.hessian(C), atol=1e-8)
    for of in (
        lambda one: one.spread(metric),
        lambda one: one.squares(c, metric, weights),
    ):
        np.testing.assert_allclose(of(few), of(full), rtol=1e-7, atol=1e-8)
    assert few.is_right() and few.n_points < 30 < D < full.n_points


@pytest.mark.parametrize("entry", [7, 200, 400])
def test_rows_that_depend_on_two_of_a_column_are_seen(entry):
    J_2 = J.copy()
    J_2[5, 0, entry] += 0.3
    assert not both(J_2)[1].is_right()


def test_too_many_columns_are_none():
    assert sparse([(100, 65)]) is None
    assert sparse([(100, 64)]) is not None
