"""How much draws resemble their neighbours, beside autoregressions of which it is known exactly."""

import numpy as np
import pytest

from pymc_sghmc.tuning.batch_means import N_BATCHES, BatchMeans
from pymc_sghmc.tuning.budget import inner_steps
from pymc_sghmc.tuning.chain_tuning import (
    MAX_AUTOCORRELATION_TIME,
    MAX_MULTIPLIER,
    WANTED_AUTOCORRELATION_TIME,
    ChainTuning,
)


def autoregression(rho, n, d, rng):
    """Draws of d independent chains x' = ρx + √(1 − ρ²) z, from their own law: (n, d)."""
    x = np.empty((n, d))
    x[0] = rng.normal(size=d)
    for t in range(1, n):
        x[t] = rho * x[t - 1] + np.sqrt(1 - rho**2) * rng.normal(size=d)
    return x


def of(x, length=None):
    means = BatchMeans.of(N_BATCHES * (length or len(x) // N_BATCHES), x[0])
    for row in x:
        means = means.with_draw(row)
    return means


def expected(rho, length, n):
    """b E[s²(means)] / E[s²], both exact: what the batches of one chain come to in the mean."""

    def variance_of_mean(m):
        k = np.arange(1, m)
        return (1 + 2 * np.sum((1 - k / m) * rho**k)) / m

    between = variance_of_mean(length) - variance_of_mean(n)
    return length * between * (n // length) / (n // length - 1) / (1 - variance_of_mean(n))


@pytest.mark.parametrize("rho", [0.5, 0.9])
def test_the_mean_is_that_of_an_autoregression(rho):
    """Four standard errors over 400 independent chains, taken one by one."""
    x = autoregression(rho, 512, 400, np.random.default_rng(1)) + 1e3
    found = np.array([of(x[:, [i]]).autocorrelation_time() for i in range(400)])
    # a ratio's mean isn't the ratio of means, by a few per cent
    exact, error = expected(rho, 32, 512), found.std() / 20
    assert abs(found.mean() - exact) < 0.05 * exact + 4 * error


def test_they_are_the_formula():
    """Batches that are complete, and all draws, beside NumPy's means of them."""
    x = autoregression(0.7, 150, 3, np.random.default_rng(2)) * [1.0, 10.0, 1e-3] + [0.0, 1e4, 5.0]
    batches = x[:144].reshape(16, 9, 3).mean(axis=1)
    exact = 9 * batches.var(axis=0, ddof=1) / x.var(axis=0)
    np.testing.assert_allclose(of(x, 9).autocorrelation_time(), exact.max(), rtol=1e-6)


def test_what_stands_still_or_is_short_tells_nothing():
    still = np.ones((64, 2))
    assert of(still).autocorrelation_time() == 1.0
    moving = autoregression(0.99, 31, 2, np.random.default_rng(3))
    assert of(moving, 4).autocorrelation_time() == 1.0


def test_a_chain_that_drifts_shows_the_length_of_a_batch():
    drift = np.linspace(0, 1, 512)[:, None]
    np.testing.assert_allclose(of(drift).autocorrelation_time(), 32, rtol=0.1)


def tuned(x, **kwargs):
    """Settings of a chain after these tuning draws."""
    tuning = ChainTuning(order=1, noise=np.ones(x.shape[1]), learning_rate=0.1, **kwargs)
    for n, row in enumerate(x, 1):
        tuning = tuning.with_position(row, n)
    return tuning.with_longer_draws()


def test_slow_chains_get_longer_draws_and_others_do_not():
    rng = np.random.default_rng(4)
    fast = tuned(autoregression(0.1, 1000, 200, rng))
    assert fast.n_steps_multiplier == 1.0
    assert inner_steps(fast) == 10
    x = autoregression(0.1, 1000, 200, rng)
    x[:, 7] = autoregression(0.98, 1000, 1, rng)[:, 0]
    slow = tuned(x)
    least = MAX_AUTOCORRELATION_TIME / WANTED_AUTOCORRELATION_TIME
    assert least < slow.n_steps_multiplier <= MAX_MULTIPLIER
    assert inner_steps(slow) == np.ceil(10 * slow.n_steps_multiplier) > 15
    assert tuned(x, n_steps_multiplier=MAX_MULTIPLIER).n_steps_multiplier == MAX_MULTIPLIER
    assert tuned(x[:100]).n_steps_multiplier == 1.0  # of few draws nothing is believed
