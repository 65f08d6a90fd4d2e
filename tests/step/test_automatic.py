"""Settings that nobody gave: right results with untouched defaults, and given ones untouched."""

import copy
import itertools
import pickle

from functools import cache

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytest

from model_collection import real as references
from model_collection.small import GaussianMean, linear_regression
from modes import FAST, PYTHON, QUIET, C
from pymc.exceptions import SamplingError
from scipy.stats import chi2

from pymc_sghmc import SGHMC, SGLD, schedules
from pymc_sghmc.gradients.metric import Identity
from pymc_sghmc.step.chain import FEW_SENT_BACK
from pymc_sghmc.step.draw import largest_energy
from pymc_sghmc.tuning import setups
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE

SETTINGS = ("learning_rate", "friction", "gradient_noise", "control_variates")


def scalar(statistic, x, **kwargs):
    return float(np.squeeze(statistic(x, **kwargs)))


def discrepancies(draws, mean, sd, mean_error=0.0, sd_error=0.0):
    """Checks that fail: means within .1 sd, sds within 5 %, each and four standard errors; R-hat."""
    found = set()
    for i in range(draws.shape[-1]):
        x = draws[..., i]
        error = np.hypot(scalar(az.mcse, x), np.broadcast_to(mean_error, mean.shape)[i])
        if abs(x.mean() - mean[i]) > 0.1 * sd[i] + 4 * error:
            found.add("mean")
        # relative error of an sd: half of that of the mean square
        squares = (x - x.mean()) ** 2
        error = np.hypot(scalar(az.mcse, squares) / squares.mean() / 2, sd_error)
        if abs(x.std() / sd[i] - 1) > 0.05 + 4 * error:
            found.add("sd")
        if not scalar(az.rhat, x) <= 1.01:
            found.add("r_hat")
    return found


def of_wells(idata):
    posterior = idata.posterior
    return np.concatenate([posterior["intercept"].values[..., None], posterior["beta"].values], -1)


def run_chain(step, point, n):
    """Positions, statistics and the last point of ``n`` draws."""
    positions, stats = [], []
    for _ in range(n):
        point, [row] = step.step(point)
        positions.append(np.concatenate([np.ravel(point[name]) for name in step.unknowns.names]))
        stats.append(row)
    return np.array(positions), {key: np.array([s[key] for s in stats]) for key in stats[0]}, point


@cache
def built(batch_size, copy):
    """One of two equal steps of three inner steps."""
    return SGHMC(
        batch_size=batch_size, n_steps=3, model=linear_regression(200), compile_kwargs=FAST
    )


def started(step, seed=0):
    step.begin_chain(np.random.default_rng(seed))
    return step


@pytest.fixture(scope="module")
def model():
    return linear_regression(200)


# --- Untouched defaults on real data


RUNS = {
    "SGHMC": (SGHMC, {"batch_size": 200}, 500),
    "SGLD": (SGLD, {"batch_size": 200}, 1500),
    "SGHMC on all data": (SGHMC, {"batch_size": None}, 400),
}
NAMES = ["SGHMC", *(pytest.param(name, marks=pytest.mark.slow) for name in [*RUNS][1:])]


def sample_wells(model, name, draws=None):
    sampler, batch, enough = RUNS[name]
    with model:
        step = sampler(**batch, compile_kwargs=PYTHON)
        return pm.sample(
            draws or enough, tune=100, chains=4, cores=2, step=step, random_seed=1, **QUIET
        )


@pytest.fixture(scope="module")
def wells_runs(data):
    """Runs on wells by name, each sampled when a test first asks for it."""
    reference, runs = references.wells(data), {}

    def get(name):
        if name not in runs:
            runs[name] = sample_wells(reference.model, name)
        return reference, runs[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_wells_posterior_is_right_without_any_setting(wells_runs, name):
    reference, idata = wells_runs(name)
    draws = of_wells(idata)
    found = discrepancies(draws, reference.mean, reference.sd, reference.error, reference.sd_error)
    assert not found, found
    assert min(scalar(az.ess, draws[..., i]) for i in range(3)) > 500


def test_check_fails_with_half_of_the_data(data):
    reference = references.wells(data)
    X, y = references.wells_data(data)
    idata = sample_wells(references.logistic_model(X[::2], y[::2]), "SGHMC", 150)
    assert "sd" in discrepancies(of_wells(idata), reference.mean, reference.sd)


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_frozen_in_kept_draws(wells_runs, name):
    _, idata = wells_runs(name)
    stats = idata.sample_stats
    for key in SETTINGS:
        values = stats[key].values.reshape(4, -1)
        np.testing.assert_array_equal(
            values, np.repeat(values[:, :1], values.shape[1], axis=1), key
        )
    assert (stats["learning_rate"].values > 0).all()
    assert (stats["control_variates"].values == (name != "SGHMC on all data")).all()
    assert not stats["diverging"].values.any()


def test_settings_follow_the_measurements_while_tuning_and_freeze_after(model):
    step = started(SGHMC(batch_size=10, gradient="plain", model=model, compile_kwargs=FAST))
    _, tuned, point = run_chain(step, model.initial_point(), 70)
    assert len(np.unique(tuned["learning_rate"])) > 2
    assert len(np.unique(tuned["gradient_noise"])) > 2
    step.stop_tuning()
    before = step.chain.tuning
    _, kept, _ = run_chain(step, point, 40)
    for key in SETTINGS:
        assert len(np.unique(kept[key])) == 1, key
    assert step.chain.tuning is before
    # the choice keeps its promise by its own measurement
    assert step.chain.tuning.bias <= step.tuner.settings.target_bias * (1 + 1e-6)


# --- What is given stays


P_DENSE = np.diag([0.004, 0.004, 0.003]) + 0.0005
GIVEN = {
    "learning_rate": ({"learning_rate": 1e-4}, {"learning_rate": 1e-4}),
    "schedule": ({"learning_rate": schedules.constant(2e-4)}, {"learning_rate": 2e-4}),
    "friction": ({"friction": 0.37}, {"friction": 0.37}),
    "no noise estimate": ({"noise_estimate": None}, {"gradient_noise": np.nan}),
    "plain": ({"gradient": "plain"}, {"control_variates": False}),
    "control variates": ({"gradient": "control_variates"}, {"control_variates": True}),
    "temperature": ({"temperature": 1.7}, {"target_temperature": 1.7}),
    "diagonal": ({"preconditioner": np.array([0.004, 0.005, 0.003])}, {}),
    "dense": ({"preconditioner": P_DENSE}, {}),
    "euler": ({"integrator": "euler"}, {}),
    "centre": ({"centre": {"beta": np.array([0.9, -0.9]), "sigma": 0.75}}, {}),
    "all": (
        {
            "learning_rate": 0.01, "friction": 0.2, "noise_estimate": 0.05, "gradient": "plain",
            "preconditioner": P_DENSE, "integrator": "euler", "temperature": 0.8,
        },
        {
            "learning_rate": 0.01, "friction": 0.2, "gradient_noise": 0.05 / 0.2,
            "control_variates": False, "target_temperature": 0.8,
        },
    ),
}  # fmt: skip


def test_default_reads_as_many_rows_as_pm_minibatch_does():
    """Nobody chooses another number where the model says one: draws are those of that number."""
    y = np.random.default_rng(0).normal(3.0, 1.0, 5000)
    of_model = pm.Minibatch(y, batch_size=200)
    draws = []
    for observed, total_size, arguments in (
        (of_model, y.size, {}), (y, None, {"batch_size": 200}), (y, None, {}),
    ):  # fmt: skip
        with pm.Model():
            mu = pm.Normal("mu", 0, 10)
            pm.Normal("y", mu, 1.0, observed=observed, total_size=total_size)
            step = SGHMC(compile_kwargs=FAST, **arguments)
            idata = pm.sample(20, tune=20, chains=1, step=step, random_seed=1, **QUIET)
        draws.append(idata.posterior["mu"].to_numpy())
    np.testing.assert_array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])  # "auto" reads ten rows of this model


@pytest.mark.parametrize("name", GIVEN)
def test_given_settings_are_never_changed(model, name):
    given, expected = GIVEN[name]
    step = started(SGHMC(batch_size=20, model=model, compile_kwargs=FAST, **given))
    _, tuned, point = run_chain(step, model.initial_point(), 40)
    step.stop_tuning()
    _, kept, _ = run_chain(step, point, 5)
    for stats, (key, value) in itertools.product((tuned, kept), expected.items()):
        np.testing.assert_array_equal(stats[key], np.full(len(stats[key]), value), key)
    if "learning_rate" in given and "preconditioner" not in given:
        assert step.tuner.setup.metric == Identity(step.unknowns.d)  # a rate has a unit
    if "preconditioner" in given:
        P = given["preconditioner"]
        target = step.tuner.target(step.chain.tuning)
        L = np.diag(np.sqrt(P)) if P.ndim == 1 else np.linalg.cholesky(P)
        np.testing.assert_array_equal(target.coordinates.matrix(), L)
    if name == "all":
        assert not step.tuner.needs_setup
        assert step.tuner.setup is None
    if "centre" in given:
        centre = [0.9, -0.9, np.log(0.75)]
        np.testing.assert_allclose(step.tuner.setup.fit.mean, centre, rtol=1e-14)
    if "integrator" in given:
        assert step.update.__module__ == "pymc_sghmc.samplers.sghmc"
    # Without the rest being given, the rest is found: no setting is NaN.
    assert (kept["learning_rate"] > 0).all()
    assert (kept["friction"] > 0).all()
    if "learning_rate" not in given:
        assert step.chain.tuning.bias <= step.tuner.settings.target_bias * (1 + 1e-6)


@cache
def of_one_inner_step(model):
    return SGHMC(batch_size=20, n_steps=1, model=model, compile_kwargs=FAST)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_number_of_inner_steps_is_kept(model, n_steps):
    step = started(of_one_inner_step(model) if n_steps == 1 else built(20, 0))
    run_chain(step, model.initial_point(), 10)
    assert step.chain.n_updates == 10 * n_steps


# --- Chains


def test_chains_start_where_the_tuner_says(model, monkeypatch):
    step = of_one_inner_step(model)
    starts, init = [], step.draws.init

    def spy(position, *args):
        starts.append(position)
        return init(position, *args)

    monkeypatch.setattr(step.draws, "init", spy)
    for seed in range(3):
        started(step, seed).step(model.initial_point())
        [start] = starts
        expected = step.tuner.setups.start(np.random.default_rng(seed))
        np.testing.assert_array_equal(start, step.tuner.setup.metric.from_theta(expected))
        starts.clear()


def test_given_learning_rate_starts_where_pymc_says(model):
    step = started(
        SGHMC(
            batch_size=20,
            gradient="plain",
            learning_rate=1e-14,
            n_steps=1,
            model=model,
            compile_kwargs=FAST,
        )
    )
    [position], _, _ = run_chain(step, model.initial_point(), 1)
    np.testing.assert_allclose(position, [0, 0, model.initial_point()["sigma_log__"]], atol=1e-5)


def test_without_tuning_it_is_right(model):
    target = GaussianMean(n_rows=500)
    covariance = np.linalg.inv(target.H)
    with target.model():
        step = SGHMC(batch_size=50, compile_kwargs=PYTHON)
        idata = pm.sample(400, tune=0, chains=4, cores=2, step=step, random_seed=3, **QUIET)
    found = discrepancies(
        idata.posterior["mu"].values[:, 50:], target.mean, np.sqrt(np.diag(covariance))
    )
    assert not found, found
    assert len(np.unique(idata.sample_stats["learning_rate"])) == 1


@pytest.mark.parametrize("sampler", [SGHMC, pytest.param(SGLD, marks=pytest.mark.slow)])
def test_same_seed_gives_the_same_draws_whatever_the_cores_and_runs(model, sampler):
    with model:
        step = sampler(batch_size=20, compile_kwargs=FAST)
        runs = [
            pm.sample(5, tune=20, chains=2, cores=cores, step=step, random_seed=3, **QUIET)
            for cores in (1, 1, 2)
        ]
        other = pm.sample(5, tune=20, chains=2, cores=1, step=step, random_seed=4, **QUIET)
    for run in runs[1:]:
        np.testing.assert_array_equal(run.posterior["beta"], runs[0].posterior["beta"])
        for key in SETTINGS:
            np.testing.assert_array_equal(run.sample_stats[key], runs[0].sample_stats[key])
    assert not np.array_equal(other.posterior["beta"], runs[0].posterior["beta"])


@pytest.mark.parametrize(
    ("batch_size", "n_tuned", "tuned_only"),
    [(20, 3, True), (20, 40, True), (20, 40, False), (None, 3, True), (None, 40, False)],
)
def test_restored_state_goes_on_exactly(model, n_tuned, tuned_only, batch_size):
    step, other = started(built(batch_size, 0)), built(batch_size, 1)
    _, _, point = run_chain(step, model.initial_point(), n_tuned)
    if not tuned_only:
        step.stop_tuning()
        _, _, point = run_chain(step, point, 3)
    state = copy.deepcopy(step.sampling_state)
    saved = pickle.loads(cloudpickle.dumps(step.sampling_state))
    n = 30 if tuned_only else 10  # new settings come after 8, 16, 32 and 64 tuning draws
    expected, stats, _ = run_chain(step, point, n)
    for target, memory in ((step, state), (other, saved)):
        target.sampling_state = memory
        positions, again, _ = run_chain(target, point, n)
        np.testing.assert_array_equal(positions, expected)
        for key in SETTINGS:
            np.testing.assert_array_equal(again[key], stats[key])


def test_restored_state_of_a_chain_whose_centre_has_moved():
    # Steep on one side, a long tail on the other: the mean of 32 draws becomes the centre.
    with pm.Model() as model:
        x = pm.Flat("x", shape=2)
        pm.Potential("energy", 0.47 * (x - pm.math.exp(x)).sum())
    point = model.initial_point()
    step = started(SGHMC(model=model, compile_kwargs=FAST))
    _, _, there = run_chain(step, point, 130)
    assert step.chain.tuning.request.metric is not None  # the setup is not that of the optimiser
    state = copy.deepcopy(step.sampling_state)
    expected, _, _ = run_chain(step, there, 10)
    fresh = SGHMC(model=model, compile_kwargs=FAST)
    fresh.sampling_state = state
    np.testing.assert_array_equal(run_chain(fresh, there, 10)[0], expected)


def test_unpickled_step_goes_on_exactly_and_needs_no_new_setup(model, monkeypatch):
    step = started(SGHMC(batch_size=20, model=model, compile_kwargs=FAST))
    pristine = cloudpickle.dumps(step)
    _, _, point = run_chain(step, model.initial_point(), 20)
    pickled = cloudpickle.dumps(step)
    expected, _, _ = run_chain(step, point, 20)

    def refuse(*args, **kwargs):
        raise AssertionError("a worker repeats the passes over all data")

    monkeypatch.setattr(setups, "set_up", refuse)
    np.testing.assert_array_equal(run_chain(pickle.loads(pickled), point, 20)[0], expected)
    worker = started(pickle.loads(pristine))
    positions, _, _ = run_chain(worker, model.initial_point(), 20)
    again, _, _ = run_chain(started(step), model.initial_point(), 20)
    np.testing.assert_array_equal(positions, again)


# --- Beside other steps


def conditional_model():
    """y_i ~ N(a + k x_i + b u_i, 1) with k discrete: exact by enumeration of k."""
    rng = np.random.default_rng(0)
    n_rows = 60
    x, u = 0.25 * rng.normal(size=n_rows), rng.normal(size=n_rows)
    y = 1.0 + 2 * x - 0.5 * u + rng.normal(size=n_rows)
    A, weights, means, covariances = np.column_stack([np.ones(n_rows), u]), [], [], []
    H = A.T @ A + np.eye(2)
    for k in range(5):
        r = y - k * x
        mean = np.linalg.solve(H, A.T @ r)
        weights.append(np.exp(0.5 * mean @ H @ mean - 0.5 * r @ r + 0.5 * y @ y - 60))
        means.append([*mean, k])
        covariances.append(np.linalg.inv(H))
    weights, means = np.array(weights) / np.sum(weights), np.array(means)
    mean = weights @ means
    variance = weights @ (means - mean) ** 2
    variance[:2] += np.diag(np.linalg.inv(H))
    with pm.Model() as model:
        a, b, k = pm.Normal("a"), pm.Normal("b"), pm.DiscreteUniform("k", 0, 4)
        pm.Normal("y", a + k * x + b * u, 1, observed=y)
    return model, mean, np.sqrt(variance)


# Quickly: test_mixes_with_nuts_slice_metropolis_and_itself in test_sampling.py.
@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["auto", "control_variates"])
def test_mixes_with_nuts_and_metropolis(gradient):
    model, mean, sd = conditional_model()
    with model:
        steps = [
            SGHMC([model["a"]], batch_size=20, gradient=gradient, compile_kwargs=FAST),
            pm.NUTS([model["b"]], compile_kwargs=FAST),
            pm.Metropolis([model["k"]]),
        ]
        idata = pm.sample(500, tune=150, chains=4, cores=2, step=steps, random_seed=2, **QUIET)
    draws = np.stack([idata.posterior[name].values.astype(float) for name in "abk"], axis=-1)
    found = discrepancies(draws, mean, sd)
    assert not found, found
    # A likelihood that needs others' unknowns has no centre to keep, unless it is asked for.
    uses = idata.sample_stats["control_variates"].values
    assert (uses == (gradient == "control_variates")).all()


# Quickly: test_blocked_false_makes_one_step_per_unknown and the mixing above.
@pytest.mark.slow
@pytest.mark.parametrize("blocked", [True, False])
def test_two_steps_of_its_own_kind(blocked):
    # blocked=False makes one step for each unknown; else two are passed.
    rng = np.random.default_rng(1)
    u = rng.normal(size=100)
    y = 1.0 + 0.5 * u + rng.normal(size=100)
    A = np.column_stack([np.ones(100), u])
    H = A.T @ A + np.eye(2)
    with pm.Model():
        a, b = pm.Normal("a"), pm.Normal("b")
        pm.Normal("y", a + b * u, 1, observed=y)
        settings = {"batch_size": 30, "compile_kwargs": FAST}
        if blocked:
            step = [SGHMC([a], **settings), SGLD([b], n_steps=50, **settings)]
        else:
            step = SGHMC(blocked=False, **settings)
        idata = pm.sample(400, tune=150, chains=4, cores=2, step=step, random_seed=2, **QUIET)
    draws = np.stack([idata.posterior[name].values for name in "ab"], axis=-1)
    found = discrepancies(draws, np.linalg.solve(H, A.T @ y), np.sqrt(np.diag(np.linalg.inv(H))))
    assert not found, found
    assert idata.sample_stats["learning_rate"].shape == (4, 400, 2)


# --- Where the centre doesn't serve, and where the curvature grows


def test_all_rows_are_taken_and_told_where_minibatches_are_too_noisy(caplog):
    """Products of parameters for each person and each item, with twenty rows a person."""
    rng = np.random.default_rng(3)
    theta, beta, disc = rng.normal(size=400), rng.normal(size=20), np.exp(rng.normal(0, 0.3, 20))
    person, item = np.repeat(np.arange(400), 20), np.tile(np.arange(20), 400)
    p = 1 / (1 + np.exp(-disc[item] * (theta[person] - beta[item])))
    with pm.Model():
        theta = pm.Normal("theta", 0, 1, shape=400)
        beta = pm.Normal("beta", 0, 1.5, shape=20)
        disc = pm.LogNormal("disc", 0, 0.5, shape=20)
        eta = disc[item] * (theta[person] - beta[item])
        pm.Bernoulli("y", logit_p=eta, observed=rng.binomial(1, p))
        with caplog.at_level("INFO", logger="pymc.sghmc"):
            step = SGHMC()
    tuner = step.tuner
    assert tuner.takes_all_rows(tuner.prepare())
    assert "all data" in caplog.text
    assert "first-order control variates" not in caplog.text


@pytest.mark.parametrize("likelihood", [True, False])
def test_potentials_over_rows_are_named(caplog, likelihood):
    rng = np.random.default_rng(5)
    with pm.Model():
        mu = pm.Normal("mu")
        if likelihood:
            pm.Normal("y", mu, 1, observed=rng.standard_normal(3000))
        pm.Potential("weighted", pm.logp(pm.Normal.dist(mu, 2), rng.standard_normal(2000)).sum())
        pm.Potential("small", -(mu**4) * np.ones(3).sum())
        with caplog.at_level("INFO", logger="pymc"):
            SGHMC()
    said = [r.getMessage() for r in caplog.records if "at every step" in r.getMessage()]
    assert ["'weighted'" in line and "2,000" in line for line in said] == [True]


def test_both_of_two_modes_are_sampled_by_minibatches():
    # ½N(θ, 1) + ½N(−θ, 1): two modes, a start between them, and draws that cross over.
    rng = np.random.default_rng(3)
    y = rng.normal(size=40) + 0.5 * rng.choice([-1, 1], size=40)
    grid = np.linspace(-3, 3, 6001)
    logp = np.logaddexp(-0.5 * (y[:, None] - grid) ** 2, -0.5 * (y[:, None] + grid) ** 2).sum(
        axis=0
    )
    weights = np.exp(logp - logp.max() - grid**2 / 8)
    square, fourth = (np.average(grid**k, weights=weights) for k in (2, 4))
    assert 0.01 < weights[np.abs(grid) < 0.05].sum() / weights.sum() < 0.1
    with pm.Model():
        theta = pm.Normal("theta", 0, 2)
        pm.Mixture(
            "y", [0.5, 0.5], [pm.Normal.dist(theta, 1), pm.Normal.dist(-theta, 1)], observed=y
        )
        step = SGHMC(batch_size=20, compile_kwargs=FAST)
        idata = pm.sample(250, tune=100, chains=2, cores=2, step=step, random_seed=1, **QUIET)
    x = idata.posterior["theta"].values
    squares = x**2
    assert abs(squares.mean() / square - 1) < 0.1 + 4 * scalar(az.mcse, squares) / square
    assert abs(np.mean(squares**2) / fourth - 1) < 0.2 + 4 * scalar(az.mcse, squares**2) / fourth
    assert (np.abs(np.diff(np.sign(x), axis=1)).sum(axis=1) > 0).all()


def growing_curvature(power):
    with pm.Model() as model:
        x = pm.Flat("x", shape=2)
        pm.Potential("energy", -(0.5 * x**2 + 10 * x**power).sum())
    grid = np.linspace(-3, 3, 60_001)
    weights = np.exp(-0.5 * grid**2 - 10 * grid**power)
    return model, np.sqrt(np.average(grid**2, weights=weights))


@pytest.mark.parametrize(
    ("power", "sampler"),
    [
        (4, SGHMC),
        pytest.param(6, SGLD, marks=pytest.mark.slow),
        pytest.param(4, SGLD, marks=pytest.mark.slow),
        pytest.param(6, SGHMC, marks=pytest.mark.slow),
    ],
)
def test_curvature_that_grows_away_from_the_mode(sampler, power):
    model, sd = growing_curvature(power)
    with model:
        step = sampler(compile_kwargs=C)
        idata = pm.sample(1500, tune=300, chains=4, cores=2, step=step, random_seed=1, **QUIET)
    assert not idata.sample_stats["diverging"].values.any()
    found = discrepancies(idata.posterior["x"].values, np.zeros(2), np.full(2, sd))
    assert not found, found


def test_divergence_while_tuning_lowers_the_rate_and_goes_on():
    # NaN beyond |x| = 2.5 sd, where a chain comes every hundred draws or so.
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("energy", pm.math.switch(pm.math.abs(x) < 2.5, -0.5 * x**2, x * np.nan))
    step = started(SGHMC(model=model, compile_kwargs=PYTHON), 1)
    positions, stats, point = run_chain(step, model.initial_point(), 60)
    assert np.isfinite(positions).all()
    [at, *_] = np.flatnonzero(stats["diverging"])
    assert at > 0
    assert positions[at] != positions[at - 1]
    rates = stats["learning_rate"]
    assert rates[at + 1] == pytest.approx(rates[at] / 4)
    assert step.chain.tuning.n_divergences == stats["diverging"].sum()
    # and no divergence is passed over in kept draws: settings stay, and often it ends the chain
    step.stop_tuning()
    _, stats, point = run_chain(step, point, 1)
    step.draws.loops.update = explode
    _, stats, point = run_chain(step, point, FEW_SENT_BACK + 1)  # and a hundredth of one kept draw
    assert stats["diverging"].all()
    assert len(set(stats["learning_rate"])) == 1
    _, [stats] = step.step(point)
    assert stats["diverging"]
    assert stats["warning"] is not None
    with pytest.raises(SamplingError, match="SGHMC stopped"):
        step.step(point)


@pytest.mark.parametrize("d", [1, 3, 28, 500, 10_000])
def test_energies_that_no_chain_has_are_divergences(d):
    """Of momenta that are Gaussian; and a few times what is expected is one for few parameters."""
    assert chi2.logsf(2 * largest_energy(d), d) < -20
    assert largest_energy(28) < 2.5 * 28 < 1000 / 2 < largest_energy(1000)


def test_position_that_overflows_is_a_divergence():
    with pm.Model() as model:
        pm.Normal("x")
    step = started(SGHMC(model=model, n_steps=2, compile_kwargs=FAST))
    point, _ = step.step(model.initial_point())
    step.draws.loops.update = overflow
    point, [stats] = step.step(point)
    assert stats["diverging"]
    assert np.isfinite(point["x"])
    assert step.chain.tuning.limit == MAX_LEARNING_RATE / 4


def overflow(state, gradient, *args, **kwargs):
    return state._replace(position=np.array([np.inf])), {"minibatch_logp": 0.0}


def explode(state, gradient, *args, **kwargs):
    gradient(np.full(1, 1e9), gradient.draw_minibatch(None))


@pytest.mark.parametrize("batch_size", [None, 20])
def test_temperature_zero_ends_at_the_mode(model, batch_size):
    step = started(SGHMC(batch_size=batch_size, temperature=0, model=model, compile_kwargs=FAST))
    _, _, point = run_chain(step, model.initial_point(), 150)
    dlogp = model.compile_dlogp()
    L = step.tuner.setup.fit.metric.factor
    assert np.linalg.norm(L.T @ dlogp(point)) < 0.05


def test_climb_into_the_neck_of_a_funnel_is_warned_of(caplog):
    """And no bias is predicted there, which would read as a certificate."""
    # Centred groups that differ by little: the density grows without bound as tau goes to zero.
    rng = np.random.default_rng(0)
    groups = rng.integers(30, size=1000)
    z = rng.normal(0, 0.05, size=30)[groups] + rng.standard_normal(1000)

    def lines_of(group_of, **settings):
        caplog.clear()
        with pm.Model() as model:
            tau = pm.HalfNormal("tau", 1)
            pm.Normal("z", group_of(tau)[groups], 1, observed=z)
        with caplog.at_level("INFO", logger="pymc.sghmc"):
            SGHMC(batch_size=100, gradient="plain", model=model, compile_kwargs=FAST, **settings)
        return caplog.text

    def centred(tau):
        return pm.Normal("group", 0, tau, shape=30)

    def non_centred(tau):
        return tau * pm.Normal("raw", 0, 1, shape=30)

    climbing = lines_of(centred, centring=None)
    assert "found no mode" in climbing
    assert "predicted bias" not in climbing
    for serving in lines_of(centred), lines_of(non_centred):
        assert "WARNING" not in serving
        assert "predicted bias" in serving


@pytest.mark.slow  # a minute of compiling
@pytest.mark.parametrize("options", [{"marginalize": ["u"]}, {"batch_size": 80}])
def test_single_precision_in_c_which_takes_no_other(options):
    """The set-up's own positions are of double precision: those of effects integrated out, or centred in part."""
    group = np.repeat(np.arange(8), 10)
    y = np.random.default_rng(0).standard_normal(80).astype("f4") + group.astype("f4") / 4
    with pytensor.config.change_flags(floatX="float32"), pm.Model():
        u = pm.Normal("u", 0, pm.HalfNormal("tau", 1), shape=8)
        pm.Normal("y", u[group], 1, observed=y)
        step = SGHMC(compile_kwargs=C, **options)
        idata = pm.sample(step=step, draws=50, tune=50, chains=1, random_seed=1, **QUIET)
    of_group = y.reshape(8, 10).mean(axis=1)
    # posterior sds are 0.3, of 50 draws' mean a fifth of it; the prior draws by 0.1 or so
    assert np.abs(idata.posterior["u"].mean(("chain", "draw")) - of_group).max() < 0.45
