"""Noise of second-order control variates where chains come now and then."""

import numpy as np
import pymc as pm
import pytest

from modes import FAST

from pymc_sghmc import SGHMC
from pymc_sghmc.tuning.noise_around import noise_of_far_effects

GROUPS = 60
GROUP = np.arange(1200) % GROUPS


@pytest.mark.parametrize(
    ("prior", "empty"),
    [
        ("Student t", 4),
        ("Normal", 4),
        pytest.param("Student t", 0, marks=pytest.mark.slow),
        pytest.param("Normal", 0, marks=pytest.mark.slow),
    ],
)
def test_groups_without_an_event_let_effects_with_long_tails_go_where_noise_grows(prior, empty):
    """Not so with a prior that brings them back, and not where each group has events."""
    rng = np.random.default_rng(1)
    y = rng.poisson(np.exp(rng.normal(1, 0.5, GROUPS)[GROUP]))
    y[np.isin(GROUP, np.arange(empty))] = 0
    with pm.Model():
        tau = pm.HalfNormal("tau", 1)
        if prior == "Normal":
            u = pm.Normal("u", 0, tau, shape=GROUPS)
        else:
            u = pm.StudentT("u", nu=4, mu=0, sigma=tau, shape=GROUPS)
        pm.Poisson("y", pm.math.exp(pm.Normal("a", 0, 2) + u[GROUP]), observed=y)
        step = SGHMC(batch_size=100, compile_kwargs=FAST)
    setup = step.tuner.setup
    second = step.tuner.gradients[2]
    second.set_centre(setup.fit.mean, setup.fit.metric)
    noise = noise_of_far_effects(second, setup.fit).largest
    if prior == "Student t" and empty:
        assert noise > 100
        assert setup.noise.second_order is None
    else:
        assert noise < 1
        assert setup.noise.second_order is not None
