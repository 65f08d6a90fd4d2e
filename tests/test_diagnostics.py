"""Temperatures from a finished run, and the warning at its end."""

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sghmc.diagnostics import configurational_temperature, temperature_warnings


def finished_run(mean, sd=0.5, target=1.0, n_steps=None, weight=1.0, seed=0):
    """Statistics of 4 chains of 500 independent draws with this temperature."""
    shape = (4, 500) if n_steps is None else (4, 500, n_steps)
    dims = ("chain", "draw", "sampler")[: len(shape)]
    rng = np.random.default_rng(seed)
    stats = {
        "configurational_temperature": (dims, mean + sd * rng.standard_normal(shape)),
        "target_temperature": (dims, np.full(shape, target)),
        "draw_weight": (dims, np.broadcast_to(weight, shape)),
    }
    return xr.DataTree.from_dict({"sample_stats": xr.Dataset(stats)})


def test_error_is_that_of_independent_draws():
    _, [error] = configurational_temperature(finished_run(1.0))
    assert error == pytest.approx(0.5 / np.sqrt(2000), rel=0.15)


@pytest.mark.parametrize(("mean", "target"), [(1.5, 1.0), (0.7, 1.0), (2.4, 2.0), (1.0, 1.3)])
def test_wrong_temperature_is_warned_of_with_number_and_remedy(mean, target):
    run = finished_run(mean, target=target)
    [measured], [error] = configurational_temperature(run)
    assert abs(measured - mean / target) < 5 * error
    [warning] = temperature_warnings(run)
    assert f"is {measured:.2f} ± {error:.2f} times" in warning.message
    hot = f"about {measured**0.5:.2f} times the true ones"
    assert (hot in warning.message) == (mean > target)
    assert ("Lower learning_rate" in warning.message) == (mean > target)
    assert ("Raise tune" in warning.message) == (mean < target)


@pytest.mark.parametrize("settings", [{"mean": 1.0}, {"mean": 1.08}, {"mean": 1.2, "sd": 30.0}])
def test_temperature_within_ten_percent_or_its_error_is_not(settings):
    assert temperature_warnings(finished_run(**settings)) == []


def test_each_step_of_a_compound_is_judged_apart():
    run = finished_run(np.array([1.0, 1.6]), n_steps=2)
    means, errors = configurational_temperature(run)
    np.testing.assert_allclose(means, [1.0, 1.6], atol=5 * errors.max())
    [warning] = temperature_warnings(run)
    assert "1.6" in warning.message


def test_draws_count_by_their_weight():
    # Hot draws of long steps at first, cold ones of short steps afterwards.
    mean, weight = np.repeat([2.0, 1.0], 250), np.repeat([3.0, 1.0], 250)
    [measured], [error] = configurational_temperature(finished_run(mean, weight=weight))
    assert abs(measured - 1.75) < 5 * 0.5 * np.sqrt(10) / 4 / np.sqrt(1000)
    assert error > 0


def test_other_runs_are_left_alone():
    empty = xr.DataTree.from_dict({"posterior": xr.Dataset({"x": (("chain", "draw"), [[1.0]])})})
    assert temperature_warnings(empty) == []
    with pm.Model():
        pm.Normal("x")
        idata = pm.sample(
            20, tune=20, chains=1, nuts_sampler="pymc", progressbar=False, random_seed=1,
            compute_convergence_checks=False,
        )  # fmt: skip
    assert temperature_warnings(idata) == []


def test_temperature_zero_has_nothing_to_compare_with():
    assert temperature_warnings(finished_run(0.2, target=0.0)) == []
