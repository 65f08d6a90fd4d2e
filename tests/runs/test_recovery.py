"""Effects of some groups, drawn afterwards."""

import modes
import numpy as np
import pymc as pm
import pytest

from pymc_sghmc import SGHMC, recover_effects
from pymc_sghmc.compat import inference_data
from pymc_sghmc.diagnostics import check_bias

GROUPS, ROWS = 30, 4
FAST = {"compile_kwargs": modes.FAST, "random_seed": 1}


@pytest.fixture(scope="module")
def run():
    """Groups whose rows are far apart: u of group k is near k, and some have no rows."""
    group = np.repeat(np.random.default_rng(0).permutation(GROUPS), ROWS)
    group = group[(group != 4) & (group != 11)]
    y = group + np.random.default_rng(1).normal(size=group.size) / 10
    labels = [f"g{k}" for k in range(GROUPS)]
    with pm.Model(coords={"g": labels, "own": range(2)}) as model:
        tau = pm.HalfNormal("tau", 30)
        u = pm.Normal("u", 15, tau, dims="g")
        pm.Deterministic("twice", 2 * u, dims="g")
        pm.Deterministic("two", pm.math.stack([tau, tau]), dims="own")
        pm.Normal("y", u[group], 0.1, observed=y)
        step = SGHMC(
            marginalize="u",
            recover=False,
            learning_rate=1e-3,
            compile_kwargs=FAST["compile_kwargs"],
        )
        idata = pm.sample(
            20, tune=20, chains=2, cores=1, step=step, random_seed=1, progressbar=False,
            compute_convergence_checks=False,
        )  # fmt: skip
    return model, step, idata


def recovered(run, **options):
    model, step, idata = run
    options = {"draws": 8, "random_seed": 2, "progressbar": False, "model": model} | options
    return recover_effects(idata, step, **options)


def test_some_groups_have_their_own_effects(run):
    everything, some = recovered(run), recovered(run, groups=[20, 3, 11])
    assert everything["u"].shape == (2, 8, GROUPS)
    assert some["u"].shape == (2, 8, 3)
    assert list(some.coords["g"].values) == ["g20", "g3", "g11"]
    assert "twice" not in some
    assert set(some.data_vars) == {"tau", "u", "two"}
    # four rows with sd .1 tell each effect to .05
    np.testing.assert_allclose(some["u"].mean(("chain", "draw"))[:2], [20, 3], atol=0.3)
    means = everything["u"].mean(("chain", "draw")).to_numpy()
    told = np.setdiff1d(np.arange(GROUPS), [4, 11])
    np.testing.assert_allclose(means[told], told, atol=0.3)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([0, 30], "from 0 to 30"),
        ([-1], "from -1"),
        ([2, 2], "names one twice"),
        (["g2"], "aren't numbers"),
    ],
)
def test_groups_that_are_not_there_are_refused(run, groups, words):
    with pytest.raises(ValueError, match=words):
        recovered(run, groups=groups)


@pytest.mark.parametrize("seed", ["x", -1, 1.5])
def test_a_seed_that_is_none_is_refused(run, seed):
    with pytest.raises(ValueError, match=r"random_seed=.*whole number"):
        recovered(run, random_seed=seed)


def test_effects_without_draws_are_named(run):
    """Their NaN is no fault of another parameter."""
    model, _, idata = run
    with pytest.raises(ValueError, match=r"draws of 'u' are NaN.*recover_effects"):
        check_bias(idata, model, n_draws=40)


def test_draws_with_recovered_effects_can_be_checked(run):
    model, _, _ = run
    complete = inference_data({"posterior": recovered(run, draws=20)})
    report = check_bias(complete, model, n_draws=40)
    assert {"tau", "u"} <= set(report.variables.index)


@pytest.mark.slow
def test_bounds_that_are_unknown_are_those_of_the_same_draw():
    """And other groups, after ``pm.set_data``, are refused as they are in sampling."""
    rng = np.random.default_rng(0)
    of = np.repeat(np.arange(20), 4)
    y = rng.uniform(0, 3, 20)[of] + 0.5 * rng.standard_normal(of.size)
    with pm.Model() as model:
        w, group = pm.HalfNormal("w", 5), pm.Data("group", of)
        u = pm.Uniform("u", 0, w, shape=20)
        pm.Normal("y", u[group], 0.5, observed=y)
        step = SGHMC(marginalize=["u"], batch_size=20, n_steps=5, compile_kwargs=modes.PYTHON)
        idata = pm.sample(
            30, tune=30, chains=1, cores=1, step=step, random_seed=1, progressbar=False,
            compute_convergence_checks=False,
        )  # fmt: skip
        found = recover_effects(idata, step, random_seed=1, progressbar=False)
        assert found["u"].shape == (1, 30, 20)
        assert ((found["u"] > 0) & (found["u"] < found["w"])).all()
        np.testing.assert_allclose(
            found["u"].mean(("chain", "draw")),
            idata.posterior["u"].mean(("chain", "draw")),
            atol=0.5,
        )
        pm.set_data({"group": (of + 1) % 20})
        with pytest.raises(ValueError, match="other groups"):
            recover_effects(idata, step, progressbar=False)
    assert model["u"] is u


@pytest.mark.parametrize("named", [True, False])
def test_predictions_use_the_recovered_effects(named):
    """PyMC 5 draws effects anew, silently, where the draws lack the model's coordinates."""
    of = np.repeat(np.arange(20), 4)
    y = of + np.random.default_rng(1).normal(size=of.size) / 10
    labels = [f"g{k}" for k in range(20)]
    size = {"dims": "g"} if named else {"shape": 20}
    with pm.Model(coords={"g": labels} if named else None):
        tau, group = pm.HalfNormal("tau", 30), pm.Data("group", of)
        u = pm.Normal("u", 10, tau, **size)
        pm.Normal("y", u[group], 0.1, observed=y, shape=group.shape)
        step = SGHMC(
            marginalize="u",
            recover=False,
            learning_rate=1e-3,
            compile_kwargs=FAST["compile_kwargs"],
        )
        idata = pm.sample(
            20, tune=20, chains=2, cores=1, step=step, random_seed=1, progressbar=False,
            compute_convergence_checks=False, var_names=["tau"],
        )  # fmt: skip
        effects = recover_effects(idata, step, random_seed=2, progressbar=False)
        dim = effects["u"].dims[-1]
        assert list(effects.coords[dim].values) == (labels if named else list(range(20)))
        pm.set_data({"group": [3, 17, 17]})
        predicted = pm.sample_posterior_predictive(
            effects, predictions=True, random_seed=3, progressbar=False
        )
    values = predicted.predictions["y"].stack(sample=("chain", "draw"))
    np.testing.assert_allclose(values.mean("sample"), [3, 17, 17], atol=0.2)
    assert (values.std("sample") < 0.5).all()  # of effects drawn anew it is about 6
