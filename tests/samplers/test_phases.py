"""Schedules of phases: a chain that explores and samples in turn, on a mixture with known weights."""

import numpy as np
import pymc as pm
import pytest

from modes import FAST, QUIET
from pymc.exceptions import SamplingError

from pymc_sghmc import SGHMC, SGLD
from pymc_sghmc.diagnostics import check_bias, configurational_temperature
from pymc_sghmc.schedules import Phase, cyclical_phases

MODE, N_STEPS = 6.0, 20  # modes at ±6 sds: at temperature 1 nobody crosses from one to the other
HOT, COOL, SAMPLE = 60, 40, 60  # inner steps of a cycle
CYCLE = HOT + COOL + SAMPLE
ETA = 0.3
SETTINGS = {"SGHMC": {"friction": 0.5}, "SGLD": {}}


def mixture():
    """N(−6, 1) and N(6, 1), with weights ½ by symmetry."""
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential(
            "log_density", pm.math.logaddexp(-((x - MODE) ** 2) / 2, -((x + MODE) ** 2) / 2)
        )
    return model


def heated(t):
    """Hot, then cooling down, both without weight; then a sampler of the posterior."""
    cycle, place = divmod(t, CYCLE)
    if place < HOT + COOL:
        return Phase(ETA, temperature=30.0 if place < HOT else 1.0, weight=0.0, cycle=cycle)
    return Phase(ETA, cycle=cycle)


def sample(sampler, schedule, n_cycles, model, **settings):
    with model:
        step = sampler(
            learning_rate=schedule,
            preconditioner=None,
            n_steps=N_STEPS,
            compile_kwargs=FAST,
            **SETTINGS[sampler.__name__],
            **settings,
        )
        draws = n_cycles * CYCLE // N_STEPS
        return pm.sample(
            draws, tune=0, chains=2, cores=1, step=step, random_seed=5, initvals={"x": 6.0}, **QUIET
        )


@pytest.mark.parametrize("sampler", [SGHMC, pytest.param(SGLD, marks=pytest.mark.slow)])
def test_heated_phases_give_a_mixture_its_weights(sampler):
    n_cycles, model = 50, mixture()
    idata = sample(sampler, heated, n_cycles, model)
    x, weight, cycle = (
        np.asarray(values)
        for values in (
            idata.posterior["x"],
            idata.sample_stats["draw_weight"],
            idata.sample_stats["cycle"],
        )
    )
    np.testing.assert_array_equal(cycle[0], np.repeat(np.arange(n_cycles), CYCLE // N_STEPS))
    kept = weight > 0
    assert kept.mean() == SAMPLE / CYCLE
    last = x.reshape(2, n_cycles, -1)[:, :, -1]  # of each cycle
    # Cycles are independent: the hot phase forgets the mode (correlations of both signs cancel).
    share, n = np.mean(last > 0), last.size
    assert abs(share - 0.5) < 4.5 * 0.5 / n**0.5
    hops = np.mean(np.sign(last[:, 1:]) != np.sign(last[:, :-1]))
    assert abs(hops - 0.5) < 4.5 * 0.5 / n**0.5
    # Within a mode the law is that at temperature 1. A cycle's draws count as one, at most.
    squares = np.square(np.abs(x) - MODE).reshape(2, n_cycles, -1)[:, :, -SAMPLE // N_STEPS :]
    squares = squares.mean(axis=-1)
    bias = 0.0 if sampler is SGHMC else 1 / (1 - ETA / 2) - 1  # exact on a Gaussian
    error = squares.std() / squares.size**0.5
    assert abs(squares.mean() - 1 - bias) < 4.5 * error < 0.5
    # Diagnostics leave the draws that explore out.
    [temperature], [error] = configurational_temperature(idata)
    assert abs(temperature - 1) < 4.5 * error + bias
    report = check_bias(idata, model, compile_kwargs=FAST)
    [row] = report.table.itertuples()  # with the hot draws the temperature would be ten or more
    assert abs(row.temperature - 1) < 4.5 * row.temperature_error + bias
    assert row.temperature_error < 1


@pytest.mark.parametrize("sampler", [SGHMC, pytest.param(SGLD, marks=pytest.mark.slow)])
def test_without_heat_a_chain_stays_in_its_mode(sampler):
    idata = sample(sampler, lambda t: Phase(ETA, cycle=t // CYCLE), 10, mixture())
    assert (idata.posterior["x"] > 0).all()
    assert (idata.sample_stats["draw_weight"] > 0).all()


@pytest.mark.parametrize("sampler", [SGHMC, SGLD])
def test_cyclical_phases_explore_without_noise_and_without_weight(sampler):
    period, n_cycles = 4 * N_STEPS, 3
    schedule = cyclical_phases(0.1, period=period, exploration=0.5)
    with mixture():
        step = sampler(
            learning_rate=schedule,
            preconditioner=None,
            n_steps=N_STEPS,
            compile_kwargs=FAST,
            **SETTINGS[sampler.__name__],
        )
        idata = pm.sample(
            4 * n_cycles, tune=0, chains=2, cores=1, step=step, initvals={"x": 6.0}, **QUIET
        )
    stats = idata.sample_stats
    explores = np.tile([True, True, False, False], n_cycles)
    for chain in (0, 1):
        at = stats.isel(chain=chain)
        np.testing.assert_array_equal(at["target_temperature"], np.where(explores, 0.0, 1.0))
        np.testing.assert_array_equal(at["draw_weight"] == 0, explores)
        np.testing.assert_array_equal(at["cycle"], np.repeat(np.arange(n_cycles), 4))
    # The first phase is gradient descent from the mode, where all chains begin and stay.
    first = np.asarray(idata.posterior["x"])[:, :2]
    if sampler is SGLD:
        np.testing.assert_allclose(first, MODE, atol=1e-6)
    weights = [sum(schedule(t).learning_rate for t in range(k, k + N_STEPS)) for k in (40, 60)]
    np.testing.assert_allclose(stats["draw_weight"][0, 2:4], weights, rtol=1e-12)


@pytest.mark.parametrize("phase", [Phase(0.1, temperature=-1.0), Phase(0.1, weight=np.nan)])
def test_phases_out_of_range_are_refused_by_name(phase):
    name = "temperature" if phase.temperature < 0 else "weight"
    with mixture() as model:
        step = SGLD(learning_rate=lambda t: phase, compile_kwargs=FAST)
    with pytest.raises(SamplingError, match=f"the schedule returns the {name}"):
        step.step(model.initial_point())


@pytest.mark.parametrize("exploration", [-0.1, 1.0, np.nan])
def test_a_cycle_that_never_samples_is_refused(exploration):
    with pytest.raises(ValueError, match="exploration"):
        cyclical_phases(0.1, 100, exploration)
