"""The arguments of ``pm.sample`` mean what they mean beside PyMC's own steps."""

import numpy as np
import pymc as pm
import pytest

from model_collection.small import linear_regression
from modes import FAST, QUIET
from table import PaperSGHMC

from pymc_sghmc import SGLD

BY_HAND = {"learning_rate": 1e-4, "batch_size": 10, "n_steps": 3, "compile_kwargs": FAST}
RUN = {"draws": 20, "tune": 5, "chains": 2, "cores": 1, "random_seed": 1, **QUIET}


@pytest.fixture(scope="module")
def model():
    return linear_regression()


@pytest.fixture(scope="module")
def step(model):
    return PaperSGHMC(model=model, **BY_HAND)


@pytest.fixture(scope="module")
def plain(model, step):
    return sample(model, step)


def sample(model, step, **arguments):
    return pm.sample(model=model, step=step, **{**RUN, **arguments})


def beta(idata):
    return idata.posterior["beta"].values


def test_model_may_be_given_outside_its_context(model, step, plain):
    with model:
        within = pm.sample(step=step, **RUN)
    np.testing.assert_array_equal(beta(within), beta(plain))


def test_blocked_false_takes_a_model_outside_its_context(model):
    steps = SGLD(model=model, gradient="plain", blocked=False, **BY_HAND)
    assert beta(sample(model, steps)).std(axis=1).all()


@pytest.mark.filterwarnings("ignore:A list or tuple of random_seed:UserWarning")
@pytest.mark.parametrize("seed", [[3, 4], lambda: np.random.default_rng(3)], ids=["list", "rng"])
def test_seeds_come_in_all_of_pymcs_forms(model, step, plain, seed):
    make = seed if callable(seed) else lambda: seed
    one, two = (beta(sample(model, step, random_seed=make(), cores=cores)) for cores in (1, 2))
    np.testing.assert_array_equal(one, two)
    assert not np.isclose(one[0], one[1]).any()
    assert not np.isclose(one, beta(plain)).any()


def test_tuning_draws_are_kept_on_request(model, step, plain):
    idata = sample(model, step, discard_tuned_samples=False)
    np.testing.assert_array_equal(beta(idata), beta(plain))
    assert idata.warmup_posterior["beta"].shape == (2, 5, 2)
    assert idata.warmup_sample_stats["learning_rate"].shape == (2, 5)


@pytest.mark.filterwarnings("ignore:.*return_inferencedata:FutureWarning")
def test_multitrace_holds_the_same_draws(model, step, plain):
    trace = sample(
        model, step, return_inferencedata=False, compute_convergence_checks=True, draws=20
    )
    draws = np.stack(trace.get_values("beta", combine=False))
    np.testing.assert_array_equal(draws[:, -20:], beta(plain))


def test_one_draw_of_one_chain_without_tuning(model, step):
    idata = sample(model, step, draws=1, tune=0, chains=1)
    assert beta(idata).shape == (1, 1, 2)
    assert np.isfinite(beta(idata)).all()
    assert np.isfinite(idata.sample_stats["configurational_temperature"].values).all()


@pytest.mark.filterwarnings("ignore:Passing `log_likelihood`:FutureWarning")
def test_log_likelihood_is_that_of_all_rows(model, step, plain):
    idata = sample(model, step, idata_kwargs={"log_likelihood": True})
    np.testing.assert_array_equal(beta(idata), beta(plain))
    [y] = idata.log_likelihood.data_vars.values()
    assert y.shape == (2, 20, 60)
    mu = plain.posterior["mu"].values
    sigma = plain.posterior["sigma"].values[..., None]
    observed = plain.observed_data["y"].values
    exact = -0.5 * ((observed - mu) / sigma) ** 2 - np.log(sigma) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(y.values, exact, rtol=1e-10)


def test_data_set_between_two_runs_are_seen():
    model = linear_regression()
    step = PaperSGHMC(model=model, **BY_HAND)
    before = beta(sample(model, step))
    with model:
        pm.set_data({"X": -model["X"].get_value()})
    # the posterior of β is now that of −β, and sigma's is the same
    mean = beta(sample(model, step, draws=200, tune=200)).mean(axis=(0, 1))
    assert before.shape == (2, 20, 2)
    assert (np.sign(mean) == [-1, 1]).all()


@pytest.mark.parametrize("cores", [1, 2])
def test_progress_bar_beside_other_steps(model, cores):
    with model:
        steps = [
            PaperSGHMC([model["beta"]], **BY_HAND),
            pm.NUTS([model["sigma"]], step_scale=1.0, compile_kwargs=FAST),
        ]
        idata = pm.sample(step=steps, **{**RUN, "cores": cores, "progressbar": True})
    assert beta(idata).shape == (2, 20, 2)


@pytest.mark.parametrize("other", [pm.Metropolis, pm.Slice, pm.NUTS])
def test_draws_beside_other_steps_are_those_of_the_seed_on_any_cores(model, other):
    runs = []
    for cores in (1, 2):
        with model:  # new steps for each run: PyMC's own keep what they have learnt
            own = [PaperSGHMC([model["beta"]], **BY_HAND), other([model["sigma"]])]
            runs.append(pm.sample(step=own, **{**RUN, "cores": cores}))
    one, two = runs
    for name in ("beta", "sigma"):
        np.testing.assert_array_equal(one.posterior[name].values, two.posterior[name].values)
