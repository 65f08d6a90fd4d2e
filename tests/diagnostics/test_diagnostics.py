"""Temperatures from a finished run, the warning at its end, and the bias report."""

import builtins

from functools import cache

import matplotlib.pyplot as plt
import numpy as np
import pymc as pm
import pytest
import xarray as xr

from model_collection.small import GaussianMean
from scipy.special import digamma, expit, polygamma

from pymc_sghmc import SGLD
from pymc_sghmc.diagnostics import (
    check_bias,
    configurational_temperature,
    full_data,
    plot_bias,
    plot_temperatures,
    temperature_warnings,
)


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
    """Reports on the same model share what they compile: it depends on the model alone."""
    functions, compile = {}, full_data.compile

    def once(inputs, outputs, **kwargs):
        key = (*inputs, getattr(outputs, "ndim", "all"), *sorted(kwargs.items()))
        if key not in functions:
            functions[key] = compile(inputs, outputs, **kwargs)
        return functions[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_data, "compile", once)
        yield


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
    assert f"is {measured:.3g} ± {error:.2g} times" in warning.message
    hot = f"about {measured:.3g} times the correct ones"
    assert (hot in warning.message) == (mean > target)
    assert ("Lower learning_rate" in warning.message) == (mean > target)
    assert ("Raise tune" in warning.message) == (mean < target)


@pytest.mark.parametrize("settings", [{"mean": 1.0}, {"mean": 1.08}, {"mean": 1.2, "sd": 5.0}])
def test_temperature_within_ten_percent_or_its_error_is_not(settings):
    assert temperature_warnings(finished_run(**settings)) == []


def test_uncertain_temperature_is_warned_of():
    [warning] = temperature_warnings(finished_run(1.2, sd=30.0))
    assert "too uncertain" in warning.message
    assert "Raise tune" in warning.message


def test_few_draws_get_no_verdict_on_the_temperature():
    # Correlated draws: of forty the error bar is far too small.
    run = finished_run(1.5)
    run["sample_stats"] = run["sample_stats"].to_dataset().isel(draw=slice(10))
    [warning] = temperature_warnings(run)
    assert "can't be judged from 40 draws" in warning.message
    assert "Raise draws" in warning.message


def test_error_isnt_that_of_the_weights_where_chains_found_learning_rates_of_their_own():
    # Weights differ by chain, temperatures don't.
    weight = np.array([1.0, 2.0, 1.3, 0.6])[:, None]
    [mean], [error] = configurational_temperature(finished_run(1.3, weight=weight))
    assert abs(mean - 1.3) < 5 * 0.5 / np.sqrt(2000)
    assert error == pytest.approx(0.5 / np.sqrt(2000), rel=0.2)


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


class Correlated:
    """mu ~ N(m, P) of three unknowns, two of them with a correlation of 0.9."""

    m = np.array([1.0, -2.0, 0.5])
    sd = np.array([1.0, 0.3, 4.0])
    P = np.outer(sd, sd) * np.array([[1, 0.9, 0], [0.9, 1, 0.3], [0, 0.3, 1]])

    @staticmethod
    @cache
    def model():
        with pm.Model(coords={"coef": ["a", "b", "c"]}) as model:
            pm.MvNormal("mu", Correlated.m, Correlated.P, dims="coef")
        return model

    def draws(self, covariance, shift=0.0, seed=0, n=1000):
        """Independent draws of 4 chains from N(m + shift sd, covariance)."""
        normals = np.random.default_rng(seed).standard_normal((4, n, 3))
        return self.m + shift * self.sd + normals @ np.linalg.cholesky(covariance).T


def run_of(dims=None, coords=None, temperature=None, **draws):
    """What pm.sample returns, as far as check_bias looks at it."""
    dims = dims or {}
    posterior = {
        name: (("chain", "draw", *dims.get(name, [f"{name}_{i}" for i in range(values.ndim - 2)])), values)
        for name, values in draws.items()
    }  # fmt: skip
    groups = {"posterior": xr.Dataset(posterior, coords)}
    if temperature is not None:
        shape = next(iter(draws.values())).shape[:2]
        stats = {
            "configurational_temperature": np.ones(shape),
            "kinetic_temperature": np.full(shape, np.nan),
            "target_temperature": np.broadcast_to(temperature, shape),
            "draw_weight": np.ones(shape),
        }
        stats = {name: (("chain", "draw"), values) for name, values in stats.items()}
        groups["sample_stats"] = xr.Dataset(stats)
    return xr.DataTree.from_dict(groups)


def correlated_run(covariance, **settings):
    target = Correlated()
    draws = target.draws(covariance, **settings)
    return run_of(dims={"mu": ["coef"]}, coords={"coef": ["a", "b", "c"]}, mu=draws)


def assert_within_errors(estimate, error, truth, errors=4):
    """Each estimate within so many Monte Carlo standard errors of the truth."""
    z = (np.asarray(estimate) - truth) / np.asarray(error)
    assert np.abs(z).max() < errors, f"{np.asarray(estimate)} is {z} errors from {truth}"


HEATED = Correlated.P * np.outer([1, 1, 1.5], [1, 1, 1.5])  # one unknown hot, correlations kept
DIAGONAL = np.diag(Correlated.sd**2)  # right standard deviations, correlations lost


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("covariance", [Correlated.P, 1.3 * Correlated.P, HEATED, DIAGONAL])
def test_report_recovers_the_law_of_the_draws(covariance, shift):
    # 4,000 independent draws, sds known to 1/√8000 = 1.1 %, means to 0.016 sd.
    report = check_bias(correlated_run(covariance, shift=shift), Correlated().model(), n_draws=100)
    table = report.table
    P = Correlated.P
    assert list(table.index) == ["mu[a]", "mu[b]", "mu[c]"]
    T = covariance @ np.linalg.inv(P)
    assert_within_errors(table["temperature"], table["temperature_error"], np.diag(T))
    sd_ratio = np.sqrt(np.diag(covariance) / np.diag(P))
    assert_within_errors(table["sd_ratio"], table["sd_ratio_error"], sd_ratio)
    assert_within_errors(table["mean_shift"], table["mean_shift_error"], shift)
    everything = report.variables.loc["(all)"]
    assert_within_errors(
        everything["temperature"], everything["temperature_error"], np.trace(T) / 3
    )
    # The gradient is linear, so that 100 of them are as good as 4,000: errors are those of all draws.
    np.testing.assert_allclose(table["sd_ratio_error"], sd_ratio / np.sqrt(8000), rtol=0.2)
    np.testing.assert_allclose(table["mean_shift_error"], sd_ratio / np.sqrt(4000), rtol=0.2)
    assert report.biased == (covariance is not P or shift != 0)


def test_errors_are_those_of_repeated_runs():
    # 40 runs: the spread of z is known to 1/√80 = 11 %, its mean to 0.16.
    model = Correlated().model()
    tables = [
        check_bias(correlated_run(1.2 * Correlated.P, seed=i, n=200), model, n_draws=80).table
        for i in range(40)
    ]
    for name, truth in [("temperature", 1.2), ("sd_ratio", 1.2**0.5), ("mean_shift", 0.0)]:
        z = np.array([(t[name] - truth) / t[f"{name}_error"] for t in tables])
        assert np.abs(z.mean(axis=0)).max() < 4 * 0.16, name
        assert np.abs(z.std(axis=0) - 1).max() < 4 * 0.11, name


@pytest.mark.parametrize(
    ("covariance", "shift", "words"),
    [
        (Correlated.P, 0.0, ["No bias found", "to within", "on average", "at worst (mu["]),
        (
            1.3 * Correlated.P,
            0.0,
            ["affected: 3 of 3 in mu; on average 15 ± 1 % too large", "Lower learning_rate"],
        ),
        (
            0.5 * Correlated.P,
            0.0,
            ["affected: 3 of 3 in mu; on average 29 ± 1 % too small", "Raise tune"],
        ),
        (
            HEATED,
            0.0,
            ["The standard deviation of mu[c] is 5", "affected: 1 of 3 in mu;", "Lower learning"],
        ),
        (DIAGONAL, 0.0, ["The temperature is", "combinations of parameters vary too much"]),
        (Correlated.P, 0.3, ["posterior standard deviations too high; affected: 3 of 3 in mu"]),
        (Correlated.P, -0.3, ["posterior standard deviations too low"]),
    ],
)
def test_report_says_what_is_wrong_and_what_to_do(covariance, shift, words):
    run = correlated_run(covariance, shift=shift)
    text = str(check_bias(run, Correlated().model(), n_draws=100))
    for expected in (*words, "100 gradients of all data, 3 parameters", "mu[b]", "full data"):
        assert expected in text
    assert ("No bias found" in text) == (covariance is Correlated.P and shift == 0)


# --- Chains that haven't mixed get no verdict


def group_model():
    with pm.Model() as model:
        pm.Normal("tau", 0, 1)
        pm.Normal("z", 0, 1, shape=30)
    return model


def group_draws(n=500):
    rng = np.random.default_rng(0)
    return {"tau": rng.standard_normal((4, n)), "z": rng.standard_normal((4, n, 30))}


def test_chains_that_disagree_get_no_verdict():
    # Every z lies near zero and is far too narrow, as in the neck of a funnel, but what counts is tau.
    draws = group_draws()
    draws["tau"] = 0.1 * draws["tau"] + 3.0 * np.arange(4)[:, None]
    draws["z"] *= 0.01
    report = check_bias(run_of(**draws), group_model())
    assert not report.mixed
    assert report.biased
    assert report.mixing["r_hat"].idxmax() == "tau"
    assert report.mixing["r_hat"]["tau"] > 2
    assert report.mixing["ess_bulk"].drop("tau").min() > 1000
    first, second, third, *_ = lines = str(report).splitlines()
    r_hat, ess = report.mixing.loc["tau"]
    assert f"haven't mixed: R-hat of tau is {r_hat:.2f}, tau has {ess:.0f} effective" in first
    assert first.endswith("; not mixed: tau.")
    assert "no verdict on bias" in third
    assert second.startswith("Raise tune")
    for word in ("No bias found", "Inconclusive", "standard deviation of", "sd_ratio"):
        assert not any(word in line for line in lines)
    assert "By variable" not in str(report)


def test_few_effective_draws_get_no_verdict():
    draws = group_draws()
    slow = np.random.default_rng(1).standard_normal((4, 500))
    for i in range(1, 500):
        slow[:, i] = 0.98 * slow[:, i - 1] + 0.2 * slow[:, i]
    draws["z"][..., 7] = slow
    report = check_bias(run_of(**draws), group_model())
    assert not report.mixed
    first = str(report).splitlines()[0]
    assert f"z[7] has {report.mixing['ess_bulk']['z[7]']:.0f} effective draws" in first
    assert "1 of 30 in z" in first


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_an_unknown_that_never_moved_gets_no_verdict(apart):
    draws = group_draws(100)
    draws["tau"][:] = apart * np.arange(4)[:, None]
    report = check_bias(run_of(**draws), group_model())
    assert "R-hat of tau is infinite, as it did not move" in str(report).splitlines()[0]


def test_chains_that_agree_are_judged():
    # The negative control of the tests above; one chain is held against itself.
    for draws in (group_draws(), {name: x[:1] for name, x in group_draws().items()}):
        report = check_bias(run_of(**draws), group_model())
        assert report.mixed
        assert not report.biased
        assert "No bias found" in str(report).splitlines()[0]
    drifting = {name: x[:1].copy() for name, x in group_draws().items()}
    drifting["tau"] += np.linspace(0, 5, 500)
    assert "R-hat of tau" in str(check_bias(run_of(**drifting), group_model())).splitlines()[0]


def test_the_headline_is_the_worst_unknown_and_counts_by_variable():
    draws = group_draws()
    draws["z"] *= np.where(np.arange(30) < 3, 1.5, 1.0)
    draws["tau"] *= 2
    report = check_bias(run_of(**draws), group_model(), n_draws=800)
    first = str(report).splitlines()[0]
    assert first.startswith("The standard deviation of tau is ")
    assert "affected: 3 of 30 in z, tau" in first
    draws["tau"] = draws["tau"] / 2 + 3.0  # now a mean is the worst
    first = str(check_bias(run_of(**draws), group_model(), n_draws=800)).splitlines()[0]
    assert first.startswith("The mean of tau is ")
    assert first.endswith("too high; affected: tau.")


def test_what_cant_be_told_is_said_with_its_reason():
    # Heavy tails: forty gradients say little of them.
    with pm.Model() as model:
        pm.StudentT("x", nu=1.2, shape=2)
    draws = np.random.default_rng(3).standard_t(1.2, size=(4, 250, 2))
    first, second, *_ = str(check_bias(run_of(x=draws), model, n_draws=40)).splitlines()
    assert first.startswith("Inconclusive")
    assert second.startswith("Raise n_draws")
    assert "Gradients at 40 draws" in second
    assert "x[" in second


@cache
def skewed_model():
    """Skewed, bounded by constants and by another unknown, a simplex, and a discrete unknown."""
    with pm.Model() as model:
        sigma = pm.HalfNormal("sigma", 2.0)
        pm.Uniform("below_sigma", 0, sigma, shape=2)
        pm.Dirichlet("share", [2.0, 3.0, 4.0])
        kind = pm.Bernoulli("kind", 0.3)
        pm.Normal("x", 3 * kind, 1 + kind)
    return model


def skewed_draws(seed=0, shape=(4, 2000)):
    """Exact draws of it, by NumPy."""
    rng = np.random.default_rng(seed)
    sigma = 2 * np.abs(rng.standard_normal(shape))
    kind = rng.binomial(1, 0.3, shape)
    return {
        "sigma": sigma,
        "below_sigma": sigma[..., None] * rng.uniform(size=(*shape, 2)),
        "share": rng.dirichlet([2.0, 3.0, 4.0], shape),
        "kind": kind,
        "x": 3 * kind + (1 + kind) * rng.standard_normal(shape),
    }


def test_right_draws_pass_whatever_the_posterior_and_the_transforms():
    report = check_bias(run_of(**skewed_draws()), skewed_model(), n_draws=2000)
    table = report.table
    assert list(table.index) == [
        "sigma", "below_sigma[0]", "below_sigma[1]", "share[0]", "share[1]", "x",
    ]  # fmt: skip
    assert_within_errors(table["mean_shift"], table["mean_shift_error"], 0)
    assert_within_errors(table["temperature"], table["temperature_error"], 1)
    assert_within_errors(table["sd_ratio"], table["sd_ratio_error"], 1)
    assert (table["sd_ratio_error"] < 0.06).all()
    assert not report.biased
    position = report.draws["position"].sel(chain=0, parameter=["sigma", "below_sigma[1]"])
    draws = skewed_draws()
    sigma, below = draws["sigma"][0, 0], draws["below_sigma"][0, 0, 1]
    np.testing.assert_allclose(
        position[0], [np.log(sigma), np.log(below) - np.log(sigma - below)], rtol=1e-10
    )


@pytest.mark.parametrize("name", ["sigma", "below_sigma", "share", "x"])
def test_wrong_draws_of_one_unknown_are_found(name):
    # The negative control: each unknown in turn is heated twofold on its unconstrained scale.
    draws = skewed_draws(shape=(4, 800))
    values = draws[name]
    if name == "sigma":
        draws["below_sigma"] *= np.exp(0.41 * np.log(values))[..., None]
        draws[name] = np.exp(1.41 * np.log(values))
    elif name == "below_sigma":
        u = values / draws["sigma"][..., None]
        draws[name] = draws["sigma"][..., None] * expit(1.41 * np.log(u / (1 - u)))
    elif name == "share":
        draws[name] = values**1.41 / (values**1.41).sum(axis=-1, keepdims=True)
    else:
        centre = 3 * draws["kind"]
        draws[name] = centre + 1.41 * (values - centre)
    report = check_bias(run_of(**draws), skewed_model(), n_draws=800)
    assert report.biased
    assert "too large" in str(report)
    assert report.worst(1).index[0].startswith(name)


@pytest.mark.parametrize("heat", [1.0, 1.2, 1.5])
def test_a_mean_moved_by_heat_alone_is_found(heat):
    # θ = log λ, p(θ) ∝ exp(kθ − e^θ), is skewed. Draws of p^(1/T) have E[∇log p] = 0 as every
    # stationary run has, but another mean: θ = log(T Gamma(k/T)) and E θ = ψ(k/T) + log T.
    k = 5.0
    with pm.Model() as model:
        pm.Gamma("lam", k, 1.0)
    lam = heat * np.random.default_rng(0).gamma(k / heat, size=(4, 5000))
    report = check_bias(run_of(lam=lam), model, n_draws=4000)
    [row] = report.table.itertuples()
    sd = np.sqrt(polygamma(1, k))
    shift = (digamma(k / heat) + np.log(heat) - digamma(k)) / sd
    assert shift == pytest.approx({1.0: 0, 1.2: -0.05, 1.5: -0.12}[heat], abs=0.01)
    # Means are known to 0.01 sd; the shift by heat to a fifth, by its derivation.
    assert abs(row.mean_shift - shift) < 4 * row.mean_shift_error + 0.2 * abs(shift)
    assert 0.005 < row.mean_shift_error < 0.015
    gradient = report.draws["gradient"]
    assert abs(gradient.mean()) < 4 * gradient.std() / np.sqrt(4000)
    assert abs(row.sd_ratio - np.sqrt(polygamma(1, k / heat)) / sd) < 4 * row.sd_ratio_error + 0.02
    assert report.biased == (heat > 1)


@pytest.mark.parametrize("shift", [0.5, 30.0])
def test_a_mean_far_off_may_be_that_of_other_data(shift):
    with pm.Model() as model:
        pm.Normal("x", 0, 1)
    draws = shift + np.random.default_rng(0).standard_normal((4, 1000))
    report = check_bias(run_of(x=draws), model, n_draws=400)
    assert report.table["mean_shift"]["x"] == pytest.approx(shift, abs=0.2)
    assert ("the data of this run" in str(report)) == (shift > 10)


def test_draws_of_a_heated_posterior_are_right_at_its_temperature():
    run = run_of(temperature=2.0, mu=Correlated().draws(2 * Correlated.P))
    assert not check_bias(run, Correlated().model()).biased
    assert check_bias(run_of(mu=Correlated().draws(2 * Correlated.P)), Correlated().model()).biased


@pytest.mark.parametrize("temperature", [0.0, np.repeat([1.0, 2.0], 500)])
def test_no_posterior_belongs_to_temperature_zero_or_to_several(temperature):
    run = run_of(temperature=temperature, mu=Correlated().draws(Correlated.P))
    with pytest.raises(ValueError, match="same temperature, above zero"):
        check_bias(run, Correlated().model())


def test_draws_count_by_their_weight_in_the_report():
    # Every second draw is twice as wide and has no weight.
    draws = Correlated().draws(Correlated.P)
    draws[:, ::2] = Correlated.m + 2 * (draws[:, ::2] - Correlated.m)
    run = run_of(temperature=1.0, mu=draws)
    assert check_bias(run, Correlated().model()).biased
    run["sample_stats"]["draw_weight"][:, ::2] = 0.0
    report = check_bias(run, Correlated().model())
    assert not report.biased
    assert_within_errors(report.table["sd_ratio"], report.table["sd_ratio_error"], 1)


def test_many_unknowns_are_judged_without_their_correlations():
    # 60 unknowns and 100 gradients: sd_ratio is √temperature, as where they are uncorrelated.
    with pm.Model() as model:
        pm.Normal("x", 0, 1, shape=60)
    draws = np.random.default_rng(0).standard_normal((4, 500, 60))
    draws[..., 7] *= 1.5
    report = check_bias(run_of(x=draws), model, n_draws=100)
    assert not report.uses_correlations
    assert report.biased
    truth = np.where(np.arange(60) == 7, 1.5, 1.0)
    assert_within_errors(report.table["sd_ratio"], report.table["sd_ratio_error"], truth)
    text = str(report)
    assert "n_draws=300 or more" in text
    assert "The standard deviation of x[7] is" in text
    assert "The 10 parameters with the largest deviations" in text
    assert text.count("x[") == 1 + 10


def test_a_model_of_pm_minibatch_is_judged_on_all_its_data():
    target = GaussianMean()
    rng = np.random.default_rng(1)
    factor = np.linalg.cholesky(np.linalg.inv(target.H)).T
    run = run_of(mu=target.mean + rng.standard_normal((4, 500, 3)) @ factor)
    model = target.model(batch_size=10, total_size=target.n_rows)
    table = check_bias(run, model, n_draws=100).table
    np.testing.assert_allclose(table, check_bias(run, target.model(), n_draws=100).table, rtol=1e-6)
    assert_within_errors(table["sd_ratio"], table["sd_ratio_error"], 1)
    # The negative control: draws of the posterior given the first rows alone.
    few = GaussianMean()
    few.y = few.y[:150]
    assert check_bias(run, few.model(), n_draws=100).biased


def test_a_hot_run_is_found_and_its_temperatures_agree():
    # A step this long is hot without gradient noise, too: the variance is 1/(1 − ηH/2).
    target = GaussianMean()
    rate = 0.8 / np.linalg.eigvalsh(target.H).max()
    with target.model() as model:
        step = SGLD(batch_size=100, learning_rate=rate, preconditioner=None)
        idata = pm.sample(
            1000, tune=100, chains=2, cores=1, step=step, random_seed=1, progressbar=False,
            compute_convergence_checks=False,
        )  # fmt: skip
    report = check_bias(idata, model)
    assert report.biased
    assert "too large" in str(report)
    temperatures = report.temperatures
    assert list(temperatures.index) == ["full data", "configurational", "kinetic"]
    [measured], [error] = configurational_temperature(idata)
    assert temperatures.loc["configurational"].to_list() == [measured, error]
    full, full_error = temperatures.loc["full data"]
    assert abs(full - measured) < 4 * np.hypot(error, full_error)
    true_sd = np.sqrt(np.diag(np.linalg.inv(target.H)))
    ratio = idata.posterior["mu"].std(("chain", "draw")) / true_sd
    np.testing.assert_allclose(report.table["sd_ratio"], ratio, rtol=0.01)


def test_draws_of_nuts_pass():
    target = GaussianMean()
    with target.model() as model:
        idata = pm.sample(
            500, tune=300, chains=2, cores=1, nuts_sampler="pymc", random_seed=1,
            progressbar=False, compute_convergence_checks=False,
        )  # fmt: skip
    report = check_bias(idata, model)
    assert not report.biased
    assert list(report.temperatures.index) == ["full data"]


def test_missing_unknowns_and_other_models_are_refused():
    draws = skewed_draws(shape=(4, 20))
    del draws["x"]
    with pytest.raises(ValueError, match=r"no draws of 'x'.*without var_names"):
        check_bias(run_of(**draws), skewed_model())
    draws = skewed_draws(shape=(4, 20))
    draws["below_sigma"] = draws["below_sigma"][..., :1]
    with pytest.raises(
        ValueError, match=r"'below_sigma' have shape \(1,\), which isn't the model's"
    ):
        check_bias(run_of(**draws), skewed_model())
    with pm.Model() as discrete:
        pm.Poisson("n", 3)
    with pytest.raises(ValueError, match="no continuous parameters"):
        check_bias(run_of(n=np.ones((4, 20), int)), discrete)


@pytest.mark.parametrize(("n_draws", "match"), [(39, "n_draws=40 or more"), (0.5, "whole number")])
def test_too_few_draws_are_refused(n_draws, match):
    with pytest.raises(ValueError, match=match):
        check_bias(correlated_run(Correlated.P), Correlated().model(), n_draws=n_draws)


def test_draws_on_a_bound_are_left_out_and_many_refused():
    with pm.Model() as model:
        pm.HalfNormal("sigma", 1)
    sigma = np.abs(np.random.default_rng(0).standard_normal((4, 100)))
    sigma[1, :3] = 0.0
    report = check_bias(run_of(sigma=sigma), model)
    assert report.left_out == 3
    assert "3 draws left out" in str(report)
    assert np.isfinite(report.table).all(axis=None)
    sigma[:2] = 0.0
    with pytest.raises(ValueError, match=r"200 of 400 draws.*not finite: sigma"):
        check_bias(run_of(sigma=sigma), model)


def test_pictures_show_temperatures_and_traces_by_chain():
    run = run_of(temperature=1.0, mu=Correlated().draws(HEATED))
    report = check_bias(run, Correlated().model(), n_draws=100)
    axes = plot_bias(run, report, n_worst=2)
    assert len(axes) == 3
    assert [len(axis.lines) for axis in axes] == [1 + 4, 4, 4]  # the target's line; no kinetic
    assert axes[1].get_title().startswith("mu[2]: sd × 1.5")
    np.testing.assert_allclose(axes[0].lines[1].get_ydata(), 1.0)
    [axis] = plot_temperatures(
        finished_run(np.repeat([2.0, 1.0], 250), sd=0.0, weight=np.repeat([3.0, 1.0], 250))
    )
    assert axis.lines[1].get_ydata()[[0, -1]] == pytest.approx([2.0, 1.75])
    with pytest.raises(ValueError, match="no temperatures"):
        plot_temperatures(run_of(mu=np.ones((2, 20))))
    plt.close("all")


def test_pictures_without_matplotlib_name_the_remedy(monkeypatch):
    original = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_temperatures(finished_run(1.0))
