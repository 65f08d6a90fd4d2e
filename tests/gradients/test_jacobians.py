"""Derivatives of what rows depend on: few for each row say the same as all of them."""

import numpy as np
import pytest

from scipy.sparse import csr_array, issparse

from pymc_sghmc.gradients.jacobians import Jacobian, jacobian
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
SDS = np.random.default_rng(5).uniform(0.01, 10, D)


def zetas_of(J, positions):
    return np.einsum("nad,pd->pna", J, positions)


def found(J, shapes=SHAPES):
    return jacobian(lambda positions: zetas_of(J, positions) + 0.7, shapes)


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
@pytest.mark.parametrize("is_sparse", [True, False])
def test_sums_over_rows_are_those_of_the_derivatives(kind, is_sparse):
    rng = np.random.default_rng(7)
    few = found(J)
    assert few.is_sparse
    assert few.n_passes == 3
    of = few if is_sparse else Jacobian(few.J.toarray(), M, few.n_passes)
    c, C = rng.standard_normal((N, M)), rng.standard_normal((N, M, M))
    C, weights = C + C.swapaxes(1, 2), rng.uniform(0, 3, N)
    metric = metrics()[kind]
    L = metric.matrix()
    hessian = np.einsum("nai,nab,nbj->ij", J, C, J)
    exact = {"rtol": 1e-7, "atol": 1e-8}
    np.testing.assert_allclose(few.J.toarray().reshape(J.shape), J, atol=1e-9)
    np.testing.assert_allclose(of.total(c), np.einsum("nai,na->i", J, c), **exact)
    product = of.hessian(C)
    assert issparse(product) == is_sparse
    np.testing.assert_allclose(csr_array(product).toarray(), hessian, **exact)
    np.testing.assert_allclose(of.diagonal(C), np.diag(hessian), **exact)
    JL = J @ L
    np.testing.assert_allclose(of.spread(metric), JL @ JL.swapaxes(1, 2), **exact)
    forces = np.einsum("nai,na->ni", JL, c)
    np.testing.assert_allclose(of.squares(c, metric, weights), weights @ forces**2, **exact)


@pytest.mark.parametrize("entry", [7, 200, 400])
def test_rows_that_see_two_entries_of_an_effect_are_seen_too(entry):
    J_2 = J.copy()
    J_2[5, 0, entry] += 0.3
    np.testing.assert_allclose(found(J_2).J.toarray().reshape(J.shape), J_2, atol=1e-9)


def test_differences_of_two_entries_are_found():
    """Moved together two entries with opposite signs move nothing."""
    J = np.zeros((3, 1, 40))
    J[0, 0, 3], J[0, 0, 7] = 1.0, -1.0
    J[1, 0, 39] = 2.0
    np.testing.assert_allclose(found(J, [(40,)]).J.toarray()[:, None], J, atol=1e-12)


def test_full_derivatives_are_kept_as_a_full_matrix():
    J = np.random.default_rng(8).standard_normal((30, 1, 50))
    of_all = found(J, [(50,)])
    assert not of_all.is_sparse
    np.testing.assert_allclose(of_all.J[:, None], J, atol=1e-9)


def test_too_many_positions_are_none():
    J = np.random.default_rng(8).standard_normal((30, 1, 1200))
    assert found(J, [(1200,)]) is None


def test_what_is_not_linear_has_no_derivatives():
    assert jacobian(lambda positions: zetas_of(J, positions) ** 2, SHAPES) is None

    def bent(positions):
        zetas = zetas_of(J, positions)
        return zetas + 1e-5 * np.abs(zetas)

    assert jacobian(bent, SHAPES) is None
