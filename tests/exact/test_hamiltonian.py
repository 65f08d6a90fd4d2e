"""QNHMC as a step of PyMC: seeds, states, mixing, transforms, statistics, errors, arguments."""

import copy
import logging
import math
import pickle
import warnings

from functools import cache

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from hamiltonian import begin, run, same, sample
from model_collection.small import linear_regression
from modes import PYTHON
from pymc.exceptions import SamplingError
from pymc.step_methods.state import equal_dataclass_values
from scipy.linalg import LinAlgError

from pymc_sghmc import QNHMC

LIMIT = 5  # standard errors: of ten scores one in 170,000 seeds passes it


@pytest.fixture(scope="module")
def model():
    return linear_regression()


@pytest.fixture(scope="module")
def normal():
    with pm.Model() as model:
        pm.Normal("x", shape=3)
    return model


def build(model, **settings):
    return QNHMC(model=model, **{"compile_kwargs": PYTHON, **settings})


def error(x, exact):
    """Mean of draws (chain, draw) less the exact one, in standard errors."""
    x = np.asarray(x, dtype=float)
    return abs(x.mean() - exact) / float(np.squeeze(az.mcse(x)))


def errors(x, mean, second):
    """The same of first and second moments, for each unknown."""
    x = np.asarray(x, dtype=float).reshape(*x.shape[:2], -1)
    mean, second = (np.broadcast_to(m, x.shape[2]) for m in (mean, second))
    return max(
        max(error(x[..., i], mean[i]), error(x[..., i] ** 2, second[i])) for i in range(x.shape[2])
    )


def test_same_seed_gives_the_same_draws_whatever_the_cores(model):
    with model:
        step = build(model)
        runs = [sample(20, tune=120, step=step, cores=cores) for cores in (1, 2, 1)]
        other = sample(20, tune=120, step=step, random_seed=9)
    same(runs[0], runs[1])
    same(runs[0], runs[2])
    beta = runs[0].posterior["beta"].to_numpy()
    assert not np.isin(beta[0], beta[1]).any()
    assert not np.isin(beta, other.posterior["beta"]).any()


SETTINGS = {
    "dense": {},
    "limited": {"memory": 2},
    "paper": {"mass": "identity", "step_size": 0.05, "n_steps": (2, 5)},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_second_chain_of_a_step_equals_a_fresh_step(model, settings):
    point = model.initial_point()
    used, fresh = (build(model, **settings) for _ in range(2))
    _, _, last = run(begin(used, 1), point, 250)
    used.stop_tuning()
    run(used, last, 3)
    expected, stats, _ = run(begin(fresh, 2), point, 110)
    positions, again, _ = run(begin(used, 2), point, 110)
    np.testing.assert_array_equal(positions, expected)
    assert [s["step_size_bar"] for s in stats] == [s["step_size_bar"] for s in again]
    assert stats[-1]["curvature_pairs_kept"] == again[-1]["curvature_pairs_kept"]


@cache
def pair(model, *settings):
    """Two equal steps that the tests share: a chain begins anew in each."""
    return [build(model, **dict(settings)) for _ in range(2)]


@pytest.mark.parametrize(("n", "tune"), [(0, True), (30, True), (150, True), (210, False)])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_restored_and_unpickled_steps_go_on_exactly(model, settings, n, tune):
    step, other = pair(model, *settings.items())
    begin(other, 2)
    _, _, point = run(begin(step), model.initial_point(), n)
    if not tune:
        step.stop_tuning()
    state = copy.deepcopy(step.sampling_state)
    unpickled = pickle.loads(cloudpickle.dumps(step))
    expected, _, _ = run(step, point, 60)
    assert not equal_dataclass_values(state, step.sampling_state)
    other.sampling_state = state
    assert equal_dataclass_values(state, other.sampling_state)
    for each in (other, unpickled):
        assert each.tune == tune
        np.testing.assert_array_equal(run(each, point, 60)[0], expected)


def test_zarr_trace_holds_the_same_draws_and_the_states(model, tmp_path):
    zarr = pytest.importorskip("zarr")
    from pymc.backends.zarr import ZarrTrace

    with model:
        step = build(model)
        expected = sample(6, tune=110, step=step)
        trace = ZarrTrace(store=zarr.DirectoryStore(str(tmp_path)), draws_per_chunk=5)
        with warnings.catch_warnings():  # as in test_sampling
            warnings.simplefilter("ignore", FutureWarning)
            sample(6, tune=110, step=step, trace=trace, return_inferencedata=False)
    np.testing.assert_array_equal(trace.posterior["beta"][:], expected.posterior["beta"])
    step.sampling_state = trace._sampling_state.sampling_state[0]
    assert step.iter_count == 116
    assert not step.tune
    np.testing.assert_array_equal(step.state.position[:2], expected.posterior["beta"][0, -1])


@pytest.mark.parametrize("settings", [{}, {"memory": 2}, {"n_steps": 4}], ids=str)
def test_all_is_constant_after_tuning_and_changes_during_it(model, settings):
    step = begin(build(model, **settings))
    matrices = []
    _, stats, point = run(step, model.initial_point(), 150)
    for _ in range(150):
        matrices.append(step.curvature.inverse_hessian)
        _, more, point = run(step, point, 1)
        stats += more
    assert len({id(C) for C in matrices}) > 1  # at the end of a window
    tuning = {name: {s[name] for s in stats} for name in ("condition", "step_size", "n_steps")}
    assert len(tuning["condition"]) > 10
    assert len(tuning["step_size"]) > 100
    step.stop_tuning()
    curvature = step.curvature
    _, stats, _ = run(step, point, 100)
    assert step.curvature is curvature
    assert {s["step_size"] for s in stats} == {s["step_size_bar"] for s in stats}
    for name in ("condition", "step_size", "largest_eigval", "curvature_pairs_kept"):
        assert len({s[name] for s in stats}) == 1
    smallest, largest = curvature.inverse_hessian.extremes()
    assert stats[0]["condition"] == largest / smallest == stats[0]["largest_eigval"] / smallest


def test_a_given_step_size_is_kept_while_tuning_too(normal):
    step = begin(build(normal, step_size=0.3))
    _, stats, _ = run(step, normal.initial_point(), 30)
    assert {s["step_size"] for s in stats} == {s["step_size_bar"] for s in stats} == {0.3}


def test_blocked_false_makes_one_step_per_unknown(model):
    with model:
        step = build(None, blocked=False)
        assert [method.var_names for method in step.methods] == [("beta",), ("sigma_log__",)]
        idata = sample(20, tune=20, step=step)
    assert idata.sample_stats["step_size"].shape == (2, 20, 2)


def test_mixes_with_metropolis_and_nuts():
    # k of 0 … 3, a ~ N(k, 1), b ~ N(a, 1), y ~ N(b, 1/4): exact by enumeration of k.
    y = 2.5
    with pm.Model() as model:
        k = pm.Binomial("k", 3, 0.5)
        a = pm.Normal("a", k, 1)
        b = pm.Normal("b", a, 1)
        pm.Normal("y", b, 0.5, observed=y)
        steps = [pm.Metropolis([k]), build(model, vars=[a]), pm.NUTS([b], compile_kwargs=PYTHON)]
        idata = sample(1000, tune=300, step=steps)
    values = np.arange(4)
    weights = np.array([1, 3, 3, 1]) * np.exp(-((y - values) ** 2) / 2 / 2.25)
    weights /= weights.sum()
    exact = {
        "k": (values, 0),
        "a": ((values + y / 1.25) / 1.8, 1 / 1.8),
        "b": ((values / 2 + y * 4) / 4.5, 1 / 4.5),
    }
    for name, (means, variance) in exact.items():
        moments = weights @ means, weights @ (means**2 + variance)
        assert errors(idata.posterior[name], *moments) < LIMIT, name


def test_gradient_is_taken_anew_where_another_step_has_moved():
    with pm.Model() as model:
        a, b = pm.Normal("a", 0, 1), pm.Normal("b", 0, 1)
        pm.Potential("coupling", -5 * (a - b) ** 2)
    settings = {"vars": [a], "step_size": 0.4, "n_steps": 2}
    step, seen = begin(build(model, **settings)), []
    step.stop_tuning()
    logp, rng = model.compile_logp(), np.random.default_rng(0)
    point = model.initial_point()
    for _ in range(40):
        point = point | {"b": np.array(rng.normal())}
        fresh = build_again(step, model, settings)
        [x], _, _ = run(fresh, point, 1)
        [new], [stats], point = run(step, point, 1)
        np.testing.assert_array_equal(new, x)
        assert stats["model_logp"] == pytest.approx(float(logp(point)), rel=1e-12)
        seen.append(stats["accepted"])
    assert {True, False} == set(seen)


def build_again(step, model, settings):
    """A step that knows nothing but the generator, and doesn't tune."""
    fresh = copy.copy(step)
    fresh.begin_chain(copy.deepcopy(step.rng))
    fresh.stop_tuning()
    return fresh


def test_gradient_is_taken_anew_where_the_position_was_changed(normal):
    step = begin(build(normal, step_size=0.1, n_steps=1))
    _, _, point = run(step, normal.initial_point(), 3)
    _, [stats], _ = run(step, {"x": point["x"] + 10}, 1)
    assert abs(stats["energy_error"]) < 1  # and not of the energy at the old place
    assert stats["model_logp"] < -50


def test_order_of_the_points_unknowns_does_not_matter(model):
    step, point = begin(build(model)), model.initial_point()
    expected, _, _ = run(step, point, 20)
    scrambled, _, last = run(begin(step), dict(reversed(point.items())), 20)
    np.testing.assert_array_equal(scrambled, expected)
    logp = model.compile_logp(mode="FAST_COMPILE")(last)
    assert step.state.logp == pytest.approx(float(logp))


def test_order_of_vars_does_not_matter(model):
    point, results = model.initial_point(), []
    beta, sigma = model["beta"], model["sigma"]
    logp = model.compile_logp()
    for variables in ([beta, sigma], [sigma, beta], None):
        step = begin(build(model, vars=variables), 0)
        positions, stats, last = run(step, point, 30)
        assert stats[-1]["model_logp"] == pytest.approx(float(logp(last)), rel=1e-12)
        results.append(positions)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_rng_of_the_step_counts_outside_of_sample(model):
    runs = [run(build(model, rng=rng), model.initial_point(), 5)[0] for rng in (3, 3, 4)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_initvals_are_where_chains_start(model):
    with model:
        step = build(model, step_size=1e-9, n_steps=1)
        initvals = [{"beta": [3.0, 4.0]}, {"beta": [-3.0, -4.0]}]
        idata = sample(2, tune=0, step=step, initvals=initvals)
    np.testing.assert_allclose(idata.posterior["beta"][:, 0], [[3, 4], [-3, -4]], atol=1e-5)


def test_compile_kwargs_and_initial_point_arrive(model):
    mode = pytensor.compile.mode.Mode(linker="py", optimizer=None)
    point = model.initial_point() | {"beta": np.array([1.0, 2.0])}
    steps = [build(model), build(model, compile_kwargs={"mode": mode}, initial_point=point)]
    nodes = [len(step.function.maker.fgraph.apply_nodes) for step in steps]
    assert nodes[0] < nodes[1]
    draws = [run(begin(step), model.initial_point(), 5)[0] for step in steps]
    np.testing.assert_allclose(*draws, rtol=1e-9)


def test_partial_initial_point_is_taken(model):
    assert build(model, initial_point={"beta": [1.0, 2.0]}).d == 3


def test_float32_model_stays_in_float32_and_is_right():
    with pytensor.config.change_flags(floatX="float32"), pm.Model() as model:
        pm.Normal("x", np.float32(1), np.array([0.1, 2.0], dtype="float32"), shape=2)
        idata = sample(step=build(model))
        step = begin(build(model))
        _, _, point = run(step, model.initial_point(), 2)
    assert point["x"].dtype == np.float32
    assert errors(idata.posterior["x"], 1, [1.01, 5]) < LIMIT


def test_data_set_between_runs_are_seen():
    with pm.Model() as model:
        data = pm.Data("data", np.zeros(4))
        pm.Normal("y", pm.Normal("x", 0, 1), 1, observed=data)
        step = build(model)
        for mean in (0.0, 5.0):
            pm.set_data({"data": np.full(4, mean)})
            idata = sample(step=step)
            assert errors(idata.posterior["x"], 0.8 * mean, 0.2 + (0.8 * mean) ** 2) < LIMIT


def test_transformed_unknowns_have_their_moments():
    with pm.Model() as model:
        pm.HalfNormal("s", 1)
        pm.Beta("p", 2, 3)
        pm.Dirichlet("w", [1.0, 2.0, 3.0])
        posterior = sample(500, tune=300, step=build(model)).posterior
    assert errors(posterior["s"], (2 / math.pi) ** 0.5, 1) < LIMIT
    assert errors(posterior["p"], 0.4, 0.2) < LIMIT
    assert errors(posterior["w"], np.array([1, 2, 3]) / 6, np.array([2, 6, 12]) / 42) < LIMIT


@pytest.mark.parametrize(("memory", "d"), [(3, 30), (3, 1), (None, 30)])
def test_moments_are_right_with_any_memory(memory, d):
    scales = np.geomspace(0.1, 10, d)
    with pm.Model() as model:
        pm.Normal("x", 1, scales, shape=d)
        idata = sample(1000, tune=400, step=build(model, memory=memory))
    assert errors(idata.posterior["x"], 1, 1 + scales**2) < LIMIT


@pytest.mark.parametrize("tune", [200, 400, 815])
def test_no_divergences_wherever_tuning_ends(normal, tune):
    with normal:
        stats = sample(300, tune=tune, step=build(normal)).sample_stats
    assert int(stats["diverging"].sum()) == 0
    assert 0.5 < float(stats["accept"].mean()) < 0.98


def test_statistics_are_those_declared(model, caplog):
    step = begin(build(model))
    declared = QNHMC.stats_dtypes_shapes
    _, stats, _ = run(step, model.initial_point(), 3)
    for stat in stats:
        assert set(stat) == set(declared)
        for name in set(declared) - {"warning"}:
            assert np.can_cast(np.asarray(stat[name]).dtype, declared[name][0]), name
    with model:
        idata = sample(7, tune=3, step=step)
    for name in set(declared) - {"warning", "model_logp"}:
        values = idata.sample_stats[name]
        assert values.shape == (2, 7), name
        assert values.dtype == declared[name][0], name
    lp = idata.sample_stats["lp" if "lp" in idata.sample_stats else "model_logp"]
    assert lp.shape == (2, 7)


@pytest.mark.parametrize("n_steps", ["auto", 3])
def test_statistics_agree_with_what_was_done(model, n_steps):
    step, calls = begin(build(model, n_steps=n_steps)), []
    function = step.function
    _, _, point = run(step, model.initial_point(), 250)
    step.stop_tuning()
    step.function = lambda q: calls.append(q.copy()) or function(q)
    start = np.concatenate([np.ravel(point[name]) for name in step.var_names])
    n, before = 800, step.state.logp
    positions, stats, _ = run(step, point, n)
    stats = {name: np.array([s[name] for s in stats]) for name in stats[0]}
    assert stats["n_steps"].sum() == len(calls)
    moved = (np.diff(np.vstack([start, positions]), axis=0) != 0).all(axis=1)
    np.testing.assert_array_equal(moved, stats["accepted"])
    assert 0 < moved.mean() < 1
    np.testing.assert_allclose(stats["path_length"], stats["n_steps"] * stats["step_size"])
    exact = [float(function(q)[0]) for q in positions]
    np.testing.assert_array_equal(stats["model_logp"], exact)
    np.testing.assert_allclose(stats["accept"], np.exp(-np.maximum(stats["energy_error"], 0)))
    assert abs((stats["accepted"] - stats["accept"]).mean()) < LIMIT * 0.5 / n**0.5
    # twice the kinetic energy at the start is χ² of three degrees of freedom
    E0 = stats["energy"] - np.where(stats["accepted"], stats["energy_error"], 0)
    kinetic = 2 * (E0 + np.r_[before, exact[:-1]])
    assert (kinetic > 0).all()
    assert abs(kinetic.mean() - 3) < LIMIT * (6 / n) ** 0.5
    assert (stats["energy"] + exact > -1e-9).all()
    assert not stats["diverging"].any()
    assert not stats["divergences"].any()


def test_divergences_are_counted_after_tuning_and_pymc_warns_of_them(normal, caplog):
    with normal, caplog.at_level(logging.WARNING):
        step = build(normal, step_size=1e3)
        idata = sample(60, tune=20, step=step, compute_convergence_checks=True)
    stats = idata.sample_stats
    assert stats["diverging"].all()
    assert not stats["accepted"].any()
    np.testing.assert_array_equal(stats["divergences"], np.tile(np.arange(1, 61), (2, 1)))
    assert (idata.posterior["x"] == idata.posterior["x"][:, :1]).all()
    assert any("There were 120 divergences after tuning" in m for m in caplog.messages)


def test_too_short_a_tuning_is_said_once(caplog):
    with pm.Model() as model:
        pm.Normal("x", shape=30)
    step = begin(build(model, n_steps=2))
    _, stats, point = run(step, model.initial_point(), 4)
    assert all(s["warning"] is None for s in stats)
    step.stop_tuning()
    _, stats, _ = run(step, point, 5)
    assert stats[0]["warning"].level == "warn"
    assert "30 parameters" in stats[0]["warning"].message
    assert "raise tune" in stats[0]["warning"].message
    assert all(s["warning"] is None for s in stats[1:])
    with model, caplog.at_level(logging.WARNING):
        sample(150, tune=4, step=step, compute_convergence_checks=True)
    assert any("raise tune" in m for m in caplog.messages)


@pytest.mark.parametrize("memory", [None, 3])
def test_nothing_is_said_of_tuning_at_defaults(normal, memory, caplog):
    with normal, caplog.at_level(logging.INFO):
        step = build(normal, memory=memory)
        sample(300, tune=1000, chains=4, step=step, compute_convergence_checks=True)
    assert not [m for m in caplog.messages if "raise tune" in m or "diverg" in m]


def test_start_of_zero_probability_names_the_unknowns():
    with pm.Model() as model:
        x, _ = pm.Normal("x"), pm.HalfNormal("scale")
        pm.Potential("wall", pt.switch(x > 10, 0.0, -np.inf))
    step = begin(build(model))
    with pytest.raises(SamplingError, match=r"QNHMC: .*x, scale_log__ is -inf.*initvals"):
        step.step(model.initial_point())


def test_a_matrix_that_is_not_positive_definite_far_out_is_a_divergence():
    # |x| < 1 has a Cholesky factor: the normal distribution cut off there
    def normal_inside(q):
        np.linalg.cholesky([[1, q[0]], [q[0], 1]])
        return -q @ q / 2, -q

    with pm.Model() as model:
        pm.Normal("x")
        step = build(model, step_size=0.3, n_steps=(2, 5))
        step.function = normal_inside
        idata = sample(4000, tune=300, step=step)
    assert int(idata.sample_stats["diverging"].sum()) > 10
    x = idata.posterior["x"]
    assert 0.9 < float(abs(x).max()) < 1
    assert errors(x, 0, 0.291125) < LIMIT


@pytest.mark.parametrize("fault", [LinAlgError, ZeroDivisionError, FloatingPointError])
@pytest.mark.parametrize("tune", [True, False])
def test_arithmetic_that_fails_along_a_trajectory_is_a_divergence(normal, fault, tune):
    step = begin(build(normal, step_size=0.7, n_steps=5))
    function = step.function

    def fails(q):
        if q[0] > 1:
            raise fault
        return function(q)

    step.function = fails
    if not tune:
        step.stop_tuning()
    positions, stats, _ = run(step, normal.initial_point(), 300)
    diverging = np.array([s["diverging"] for s in stats])
    assert 10 < diverging.sum() < 290
    assert positions[:, 0].max() <= 1
    assert all(not s["accepted"] and s["accept"] == 0 for s in stats if s["diverging"])
    kinds = {s["warning"].kind.name for s in stats if s["diverging"]}
    assert kinds == {"TUNING_DIVERGENCE" if tune else "DIVERGENCE"}
    assert stats[-1]["divergences"] == (0 if tune else diverging.sum())


def test_other_faults_of_a_model_are_not_hidden(normal):
    step = begin(build(normal))

    def fails(q):
        raise TypeError("a mistake")

    step.function = fails
    with pytest.raises(TypeError, match="a mistake"):
        step.step(normal.initial_point())


@pytest.mark.parametrize(("n_steps", "expected"), [(7, {7}), ((3, 5), {3, 4, 5}), ((4, 4), {4})])
def test_n_steps_given_are_those_made(normal, n_steps, expected):
    step = begin(build(normal, n_steps=n_steps, step_size=0.05))
    _, tuning, point = run(step, normal.initial_point(), 150)
    step.stop_tuning()
    _, stats, _ = run(step, point, 100)
    assert {s["n_steps"] for s in tuning} == {s["n_steps"] for s in stats} == expected


INDEFINITE = [[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
BAD = [
    {"rng": "a"},
    *({"step_size": value} for value in (0, -1, np.nan, np.inf, "x", True, [0.1])),
    *({"n_steps": value} for value in (0, -1, 1.5, (3, 1), (1, 2, 3), (1, 2.5), "x", True, None)),
    *({"mass": value} for value in ("x", np.ones(2), np.ones((2, 2)), 1.0, INDEFINITE)),
    *({"mass": value} for value in (np.triu(np.ones((3, 3))), [1.0, -1.0, 1.0], [1, 0, 1])),
    *({"mass": value} for value in (np.full((3, 3), np.nan), [1, np.inf, 1])),
    *({"memory": value} for value in (0, -1, 1.5, "x", True)),
    *({"adapt": value} for value in ("x", None, True)),
    *({"target_accept": value} for value in (0, 1, np.nan, "x", -0.1)),
]


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_bad_argument_is_refused_by_name(normal, settings):
    [name] = settings
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        build(normal, **settings)


GOOD = [
    ({"step_size": np.float32(0.125)}, {"step_size": 0.125}),
    ({"n_steps": np.array([1, 3])}, {"n_steps": (1, 3)}),
    ({"n_steps": np.int64(3)}, {"n_steps": 3}),
    ({"mass": [1, 2, 3]}, {"mass": np.array([1.0, 2.0, 3.0])}),
    ({"mass": (np.eye(3) + 1).tolist()}, {"mass": np.eye(3) + 1}),
    ({"memory": np.int64(50)}, {"memory": 50}),
    ({"target_accept": np.float32(0.875)}, {"target_accept": 0.875}),
]


@pytest.mark.parametrize(("settings", "plain"), GOOD, ids=str)
def test_numbers_of_numpy_and_lists_are_taken(normal, settings, plain):
    """For what they are: draws are those of plain numbers and arrays."""
    positions, _, _ = run(begin(build(normal, **settings)), normal.initial_point(), 60)
    expected, _, _ = run(begin(build(normal, **plain)), normal.initial_point(), 60)
    np.testing.assert_array_equal(positions, expected)
    assert len(np.unique(positions)) > 30


def test_discrete_unknowns_are_refused_and_left_to_others_by_default():
    with pm.Model() as model:
        k, x = pm.Bernoulli("k", 0.5), pm.Normal("x")
    with pytest.raises(ValueError, match=r"QNHMC.*k is discrete"):
        build(model, vars=[x, k])
    assert build(model).var_names == ("x",)
    with pm.Model() as model:
        pm.Bernoulli("k", 0.5)
    with pytest.raises(ValueError, match=r"QNHMC.*no continuous parameters"):
        build(model)


def test_adapting_for_ever_goes_on_after_tuning_and_warns(model):
    with pytest.warns(UserWarning, match="biased"):
        step = begin(build(model, adapt="always"))
    _, _, point = run(step, model.initial_point(), 150)
    step.stop_tuning()
    _, stats, _ = run(step, point, 50)
    assert len({s["condition"] for s in stats}) > 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(model)
    assert QNHMC.competence(model["beta"], True) == 0
