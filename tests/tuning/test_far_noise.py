"""Noise of second-order control variates where chains come now and then."""

import arviz as az
import numpy as np
import pymc as pm
import pytest

from model_collection.small import counts_of_groups
from modes import FAST, QUIET
from scipy.integrate import quad

from pymc_sghmc import SGHMC
from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.row_coordinates import RowCoordinates
from pymc_sghmc.tuning import far_noise
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE
from pymc_sghmc.tuning.far_noise import (
    HEAT,
    MOST_EXCESS,
    bearable_noise,
    noise_of_far_effects,
)


@pytest.mark.parametrize(
    ("prior", "empty"),
    [
        ("Normal", 4),
        *(
            pytest.param(prior, empty, marks=pytest.mark.slow)
            for prior, empty in [("Student t", 4), ("Student t", 0), ("Normal", 0)]
        ),
    ],
)
def test_groups_without_an_event_let_effects_go_where_noise_grows(prior, empty):
    """Farther with a long tail; and not where each group has events."""
    with counts_of_groups(empty, prior):
        step = SGHMC(batch_size=100 if empty else 600, compile_kwargs=FAST)
    setup = step.tuner.setup
    second = step.tuner.gradients[2]
    second.set_centre(setup.fit.mean, setup.fit.metric)
    noise = noise_of_far_effects(second, setup.fit).largest
    if empty:
        assert noise > (100 if prior == "Student t" else 5)
        assert setup.noise.second_order is None
    else:
        assert noise < 1
        assert setup.noise.second_order is not None


@pytest.mark.parametrize("n_finite", [0, 2])
def test_far_places_where_nothing_is_finite_end_the_search(n_finite, monkeypatch):
    """A set-up failed there, and chains had no settings."""
    with counts_of_groups(empty=0):
        step = SGHMC(batch_size=600, compile_kwargs=FAST)
    second = step.tuner.gradients[2]
    fit = step.tuner.setup.fit
    second.set_centre(fit.mean, fit.metric)
    variances = far_noise.second_order_variances
    column = max(far_noise.columns_of(second.derivatives.shapes), key=len)
    scales = fit.metric.diagonal()

    def overflowing(second, points, coordinates):
        """Variances within some distances of the mean."""
        far = [np.abs((point - fit.mean) / scales.scales).max() for point in points]
        if max(far) > n_finite * 1.01 * far_noise.FAR_EFFECTS[0]:
            raise NonFinite(fit.mean, fit.mean, np.nan)
        return variances(second, points, coordinates)

    monkeypatch.setattr(far_noise, "second_order_variances", overflowing)
    largest = noise_of_far_effects(second, fit).largest
    assert len(far_noise._way_out(second, fit, column, 1.0).ends) > n_finite
    assert (largest == np.inf) == (n_finite == 0)


def test_where_derivatives_cannot_be_found_first_order_serves(monkeypatch):
    """Those of the coordinates in which rows are linear; the run ended with an error."""

    def nowhere(self, position, density, data):
        raise NonFinite(position, position, np.nan)

    monkeypatch.setattr(RowCoordinates, "derivatives", nowhere)
    with counts_of_groups(empty=0):
        step = SGHMC(batch_size=600, compile_kwargs=FAST)
    noise = step.tuner.setup.noise
    assert noise.second_order is None
    assert np.isfinite(noise.first_order).all()


@pytest.mark.slow
def test_effects_of_groups_without_an_event_are_as_wide_as_by_all_rows():
    """By second-order control variates of 100 rows they went to −73, their sds were up to 1.5."""
    sds = {}
    errors = {}
    for batch_size in (100, None):
        with counts_of_groups(empty=4):
            step = SGHMC(batch_size=batch_size)
            posterior = pm.sample(
                2000, step=step, chains=4, cores=1, random_seed=1, **QUIET
            ).posterior
        draws = [posterior["tau"], *(posterior["u"][..., k] for k in range(4))]
        sds[batch_size] = np.array([float(x.std()) for x in draws])
        errors[batch_size] = np.array(
            [float(np.squeeze(az.mcse(x.to_numpy(), method="sd"))) for x in draws]
        )
    off = np.abs(sds[100] - sds[None])
    error = np.hypot(errors[100], errors[None])
    assert (off < 0.05 * sds[None] + 4 * error).all()
    assert (error < 0.05 * sds[None]).all()  # an excursion makes it large, too


@pytest.mark.parametrize("strength", [0.1, 1.0, 40.0])
@pytest.mark.parametrize("tail", ["Gaussian", "flat"])
def test_noise_is_bearable_as_long_as_tails_are_right(tail, strength):
    """By integrals of the density exp(−∫ F/T), with the excess of a variance that is allowed."""
    distances = np.array([2.0, 4.0, 6.0, 8.0])
    force = distances if tail == "Gaussian" else np.array([2.0, 3.0, 3.0, 3.0])
    roots = strength * distances  # of the noise's variance
    [multiple] = bearable_noise(distances, force[:, None], np.square(roots)[:, None])

    def fall(x, heat):
        def slope(y):
            F = np.interp(y, np.r_[0.0, distances], np.r_[0.0, force])
            F += max(y - 8.0, 0.0) * (tail == "Gaussian")
            return F / (1 + heat * MAX_LEARNING_RATE * (strength * y) ** 2)

        return quad(slope, 0.0, x, limit=200)[0]

    def square(heat):
        return quad(lambda x: x**2 * np.exp(-fall(x, heat)), 0.0, 40.0, limit=200)[0]

    excess = (square(HEAT * multiple) - square(0.0)) / np.sqrt(2 * np.pi)
    assert excess == pytest.approx(MOST_EXCESS, rel=0.1)


def test_effects_of_few_events_get_more_rows_than_the_noise_nearby_asks_for():
    """With ten rows a chain left for a few draws, unseen by R-hat: variances were 50 % too large."""
    rng = np.random.default_rng(112)
    group = np.r_[np.zeros(500, dtype=int), 1 + np.arange(520) % 13]
    u = rng.normal(0, 0.25, 14)
    u[1:3] = -0.7, -0.5
    y = rng.poisson(np.exp(-0.2 + u[group]))
    with pm.Model():
        tau = pm.HalfNormal("tau", 1)
        effects = pm.Normal("u", 0, tau, shape=14)
        pm.Poisson("y", pm.math.exp(pm.Normal("a", 0, 2) + effects[group]), observed=y)
        step = SGHMC(compile_kwargs=FAST)
    tuner = step.tuner
    tuning = tuner.prepare()
    n = tuner.gradient.data.batch_sizes[0] if tuning.rows is None else tuning.rows
    assert n >= 50
    # nearby ten rows would do
    assert tuner.setup.noise.second_order is None or tuner.setup.noise.second_order.max() < 0.1
