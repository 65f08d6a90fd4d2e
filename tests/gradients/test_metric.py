"""The four metrics are linear maps: the same as the product with their matrix, there and back."""

import numpy as np
import pytest

from pymc_sghmc.gradients.metric import (
    Dense,
    Diagonal,
    Identity,
    LowRank,
    Metric,
    preconditioner_metric,
)

D, K = 9, 3
rng = np.random.default_rng(0)
SCALES = rng.uniform(0.5, 2, D)
U = np.linalg.qr(rng.standard_normal((D, K)))[0].T
C = np.array([2.0, -0.4, 0.3])
TRIANGLE = np.tril(rng.standard_normal((D, D))) + 3 * np.eye(D)
MATRICES = {
    Identity: np.eye(D),
    Diagonal: np.diag(SCALES),
    Dense: TRIANGLE,
    LowRank: np.diag(SCALES) @ (np.eye(D) + U.T @ np.diag(C) @ U),
}


def metric_of(cls) -> Metric:
    makers = {
        Identity: lambda: Identity(D),
        Diagonal: lambda: Diagonal(SCALES.copy()),
        Dense: lambda: Dense(TRIANGLE.copy()),
        LowRank: lambda: LowRank.of(SCALES.copy(), U.copy(), C),
    }
    return makers[cls]()


@pytest.mark.parametrize("cls", MATRICES)
def test_a_metric_is_the_product_with_its_matrix(cls):
    metric, L = metric_of(cls), MATRICES[cls]
    x = rng.standard_normal(D)
    np.testing.assert_allclose(metric.matrix(), L, atol=1e-14)
    np.testing.assert_allclose(metric.to_theta(x), L @ x)
    np.testing.assert_allclose(metric.pull_back(x), L.T @ x)
    np.testing.assert_allclose(metric.from_theta(L @ x), x)
    rows = rng.standard_normal((4, D))
    np.testing.assert_allclose(metric.to_thetas(rows), rows @ L.T)
    np.testing.assert_allclose(metric.sds(), np.sqrt(np.square(L).sum(axis=1)))
    assert metric.size == D


@pytest.mark.parametrize("cls", MATRICES)
def test_a_shrunk_metric_is_another_one(cls):
    metric, L = metric_of(cls), MATRICES[cls]
    np.testing.assert_allclose(metric.shrunk(0.5).matrix(), 0.5 * L)
    np.testing.assert_allclose(metric.shrunk(np.full(D, 0.25)).matrix(), 0.25 * L)
    assert metric == metric_of(cls)  # itself it stays as it was


@pytest.mark.parametrize("cls", [Identity, Diagonal, LowRank])
def test_directions_make_up_the_matrix(cls):
    scales, rows, stretches = metric_of(cls).decomposed()
    L = np.diag(scales) @ (np.eye(D) + rows.T @ np.diag(stretches) @ rows)
    np.testing.assert_allclose(L, MATRICES[cls], atol=1e-14)


@pytest.mark.parametrize("cls", MATRICES)
def test_metrics_are_equal_by_value(cls):
    metric = metric_of(cls)
    assert metric == metric_of(cls)
    assert hash(metric) == hash(metric_of(cls))
    assert {metric, metric_of(cls)} == {metric}
    others = [metric_of(other) for other in MATRICES if other is not cls]
    assert all(metric != other for other in [*others, None])
    assert metric.shrunk(0.5) != metric


@pytest.mark.parametrize("cls", MATRICES)
def test_a_metric_in_single_precision_maps_to_single_precision(cls):
    single = metric_of(cls).astype(np.float32)
    assert isinstance(single, cls)
    assert single.to_theta(np.ones(D, np.float32)).dtype == np.float32
    np.testing.assert_allclose(single.matrix(), MATRICES[cls], rtol=1e-5, atol=1e-5)


def test_a_preconditioner_is_the_square_of_its_metric():
    P = TRIANGLE @ TRIANGLE.T
    np.testing.assert_allclose(preconditioner_metric(P, D).matrix(), TRIANGLE)
    assert preconditioner_metric(SCALES**2, D) == Diagonal(np.sqrt(SCALES**2))
