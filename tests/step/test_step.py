"""The step protocol: seeds, chains, states, pickles, mixing, arguments, faults."""

import copy
import itertools
import pickle
import tracemalloc

from functools import cache, lru_cache

import cloudpickle
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from model_collection.small import GaussianMean, linear_regression
from modes import FAST
from pymc.exceptions import SamplingError
from pymc.step_methods.state import equal_dataclass_values
from pytensor.graph.op import Op
from table import SAMPLERS, PaperSGHMC, PaperSGLD
from threadpoolctl import threadpool_info, threadpool_limits

from pymc_sghmc import QNHMC, SGHMC, schedules
from pymc_sghmc.gradients.metric import Identity
from pymc_sghmc.gradients.noise import noise_covariance
from pymc_sghmc.loaders import ArrayLoader
from pymc_sghmc.models.independence import MAX_CHECKED_ROWS
from pymc_sghmc.samplers import sghmc


@pytest.fixture(scope="module")
def model():
    return linear_regression()


def built_anew(sampler, model, **settings):
    settings = {"learning_rate": 1e-4, "batch_size": 10, "n_steps": 3, **settings}
    return sampler.cls(model=model, compile_kwargs=FAST, **{**sampler.settings, **settings})


built = lru_cache(maxsize=None, typed=True)(built_anew)


def build(sampler, model, **settings):
    """A copy of a step that is built once: copies share what is compiled."""
    try:
        hash(tuple(settings.values()))
    except TypeError:  # such as arrays, which can't be looked up
        return built_anew(sampler, model, **settings)
    return copy.deepcopy(built(sampler, model, **settings))


def positions(step, point, n):
    out = []
    for _ in range(n):
        point, _ = step.step(point)
        out.append(np.concatenate([np.ravel(point[name]) for name in step.unknowns.names]))
    return np.array(out), point


@cache
def many_settings(sampler):
    """Settings under which a chain's state holds all that it can hold."""
    settings = {"learning_rate": schedules.polynomial_decay(1e-4, 10.0, 0.6)}
    if sampler.cls is SGHMC:
        settings |= {"noise_estimate": "diag", "resample_momentum_every": 4}
    return settings


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_second_chain_of_a_step_equals_a_fresh_step(model, sampler):
    point = model.initial_point()
    used, fresh = (build(sampler, model, **many_settings(sampler)) for _ in range(2))
    used.begin_chain(np.random.default_rng(1))
    positions(used, point, 4)
    used.stop_tuning()
    positions(used, point, 2)
    for step in (used, fresh):
        step.begin_chain(np.random.default_rng(2))
    np.testing.assert_array_equal(positions(used, point, 6)[0], positions(fresh, point, 6)[0])


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_restored_state_goes_on_exactly(model, sampler):
    step = build(sampler, model, **many_settings(sampler))
    other = built_anew(sampler, model, **many_settings(sampler))
    step.begin_chain(np.random.default_rng(1))
    _, point = positions(step, model.initial_point(), 5)
    state = copy.deepcopy(step.sampling_state)
    expected, _ = positions(step, point, 5)
    assert not equal_dataclass_values(state, step.sampling_state)
    for target in (step, other):
        target.sampling_state = state
        assert equal_dataclass_values(state, target.sampling_state)
        np.testing.assert_array_equal(positions(target, point, 5)[0], expected)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_unpickled_step_goes_on_exactly_and_leaves_the_model_behind(sampler):
    sizes = []
    for n_rows in (50, 5050):
        model = linear_regression(n_rows)
        step = build(sampler, model, **many_settings(sampler))
        step.begin_chain(np.random.default_rng(1))
        _, point = positions(step, model.initial_point(), 2)
        pickled = cloudpickle.dumps(step)
        sizes.append(len(pickled))
    # 5,000 rows of three numbers, once: neither the model nor its graphs of all rows come along
    assert sizes[1] - sizes[0] < 1.1 * 5000 * 3 * 8
    expected, _ = positions(step, point, 3)
    copied = pickle.loads(pickled)
    np.testing.assert_array_equal(positions(copied, point, 3)[0], expected)
    for each in (step, copied):  # and starts the next chain alike
        each.begin_chain(np.random.default_rng(2))
    np.testing.assert_array_equal(positions(copied, point, 3)[0], positions(step, point, 3)[0])


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_order_of_vars_does_not_matter(model, sampler):
    # The point's order and that of the arguments may differ: the raveled vector has the model's.
    point = model.initial_point()
    beta, sigma = model["beta"], model["sigma"]
    results = []
    for variables in ([beta, sigma], [sigma, beta], None):
        step = build(sampler, model, vars=variables)
        step.begin_chain(np.random.default_rng(0))
        results.append(positions(step, dict(reversed(point.items())), 3)[0])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_data_set_after_construction_are_seen_by_the_next_chain(sampler):
    model, point = linear_regression(), None
    step = build(sampler, model, batch_size=60)
    point = model.initial_point()
    gradient = step.tuner.gradient
    before = gradient(np.ones(3), gradient.order.probe(step.rng))[1]
    with model:
        pm.set_data({"X": 2 * model["X"].get_value()})
    step.begin_chain(np.random.default_rng(0))
    after = gradient(np.ones(3), gradient.order.probe(step.rng))[1]
    exact = model.compile_dlogp()({"beta": np.ones(2), "sigma_log__": np.array(1.0)})
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, exact, rtol=1e-10)
    assert set(point) == {"beta", "sigma_log__"}


def test_minibatches_are_independent_uniform_rows_not_windows(model):
    # 4,000 minibatches of 10 out of 60 rows: each row is drawn 40,000/60 times, and the next row
    # of the table follows as often as any other. Five standard errors.
    step = build(SAMPLERS[0], model)
    rng = np.random.default_rng(0)
    rows = np.concatenate(
        [step.tuner.gradient.order.draw(rng, None, 1)[0].drawn[0][0] for _ in range(4000)]
    )
    counts = np.bincount(rows, minlength=60)
    assert np.abs(counts - 40000 / 60).max() < 5 * np.sqrt(40000 / 60)
    neighbours = np.mean(np.diff(rows) == 1)
    assert abs(neighbours - 59 / 60**2) < 5 * np.sqrt(59 / 60**2 / 40000)


def test_decaying_rate_gives_draw_weights(model):
    schedule = schedules.polynomial_decay(1e-3, 5.0, 1.0)
    step = build(SAMPLERS[1], model, learning_rate=schedule)
    point = model.initial_point()
    for draw in range(3):
        point, [stats] = step.step(point)
        used = [schedule(t) for t in range(3 * draw, 3 * draw + 3)]
        assert stats["draw_weight"] == pytest.approx(sum(used), rel=1e-12)
        assert stats["learning_rate"] == used[-1]


def test_schedule_is_what_update_gets():
    # A gradient of zero and no noise: the momentum is untouched, so use the injected noise's scale.
    eta = schedules.cyclical(0.1, period=4)
    rates = [eta(t) for t in range(8)]
    assert rates[:4] == rates[4:]
    assert all(a > b > 0 for a, b in itertools.pairwise(rates[:4]))
    with pm.Model() as model:
        pm.Potential("flat", 0.0 * pm.Flat("x") ** 2)
    step = PaperSGLD(learning_rate=eta, n_steps=1, model=model, compile_kwargs=FAST)
    step.begin_chain(np.random.default_rng(5))
    noise, x = np.random.default_rng(5), 0.0
    for t in range(8):
        point, _ = step.step({"x": np.array(x)})
        expected = x + np.sqrt(2 * rates[t]) * noise.standard_normal()
        assert point["x"] == pytest.approx(expected, rel=1e-12)
        x = float(point["x"])


def test_thermometers_centre_forgets_the_start_and_freezes(model):
    step = build(SAMPLERS[0], model)
    point = model.initial_point()
    step.begin_chain(np.random.default_rng(0))
    means = []
    for _ in range(30):
        point, _ = step.step(point)
        means.append(np.concatenate([np.ravel(point[name]) for name in step.unknowns.names]))
    weights = np.arange(1.0, 31.0) * np.arange(2.0, 32.0) * np.arange(3.0, 33.0)
    np.testing.assert_allclose(
        step.chain.mean, np.average(means, axis=0, weights=weights), rtol=1e-10
    )
    step.stop_tuning()
    centre = step.chain.mean.copy()
    step.step(point)
    np.testing.assert_array_equal(step.chain.mean, centre)


def test_noise_estimate_in_diag_needs_no_matrix(model):
    step = build(SAMPLERS[0], model, noise_estimate="diag")
    step.step(model.initial_point())
    assert step.chain.noise.covariance.shape == (3,)
    full = build(SAMPLERS[0], model, noise_estimate="full")
    full.step(model.initial_point())
    assert full.chain.noise.covariance.shape == (3, 3)

    d = 2000
    with pm.Model():
        pm.Normal("y", pm.Normal("b", shape=d)[np.arange(50) % 7], 1, observed=np.zeros(50))
        step = PaperSGHMC(learning_rate=1e-4, batch_size=20, compile_kwargs=FAST)
    tracemalloc.start()
    noise_covariance(step.tuner.gradient, Identity(d), np.zeros(d), np.random.default_rng(0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < d * d  # bytes: an eighth of a matrix


def test_noise_estimate_above_friction_is_cut_while_tuning_and_an_error_after(model):
    step = PaperSGHMC(
        learning_rate=1e-3, batch_size=5, noise_estimate="diag", friction=0.01, n_steps=2,
        model=model, compile_kwargs=FAST,
    )  # fmt: skip
    given = []

    def update(*args, noise_estimate, **settings):
        given.append(noise_estimate)
        return sghmc.update(*args, noise_estimate=noise_estimate, **settings)

    step.draws.loops.update = update  # which makes the last step of the two
    point, [stats] = step.step(model.initial_point())
    assert stats["gradient_noise"] > 1
    assert len(given) == 1
    assert np.all(given[0] <= 0.01)
    step.stop_tuning()
    with pytest.raises(SamplingError, match=r"exceeds friction = 0.01.*Try .*learning_rate="):
        step.step(point)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, r"learning_rate=0\.0: must be finite and above zero"),
        ({"learning_rate": -1}, "learning_rate=-1: must be finite and above zero"),
        ({"learning_rate": np.nan}, "learning_rate=nan: must be finite"),
        ({"learning_rate": "fast"}, "learning_rate='fast': pass \"auto\", a number"),
        ({"learning_rate": [1e-3]}, 'learning_rate=.*pass "auto", a number'),
        ({"n_steps": 0}, "n_steps=0: must be a whole number"),
        ({"n_steps": 2.5}, "n_steps=2.5: must be a whole number"),
        ({"temperature": -1.0}, "temperature=-1.0: must be a finite number"),
        ({"temperature": None}, "temperature=None: must be"),
        ({"preconditioner": "full"}, r"preconditioner='full': pass \"auto\".* of shape \(3,\)"),
        ({"gradient": "full"}, 'gradient=\'full\': must be "auto", "plain", "control_variates" or'),
        ({"target_bias": 0}, "target_bias=0: must be a number between 0 and 1"),
        ({"gradient": "control_variates", "batch_size": 60}, "uses all data and has no noise"),
        ({"learning_rate": "auto", "batch_size": 1}, "batch_size=1: raise it"),
        ({"learning_rate": "auto", "batch_size": {"y": 1}}, "batch_size=1: raise it"),
        ({"preconditioner": np.ones(2)}, r"preconditioner has shape \(2,\).*shape \(3,\)"),
        ({"preconditioner": [1.0, -1.0, 1.0]}, "preconditioner: all entries must be finite"),
        ({"preconditioner": np.full((3, 3), 1.0)}, "preconditioner: the matrix must be symmetric"),
        ({"preconditioner": np.triu(np.ones((3, 3)))}, "preconditioner: the matrix must be"),
        ({"batch_size": -1}, "batch_size=-1: must be 1 row or more"),
        ({"rng": "a"}, "rng='a': must be a numpy.random.Generator"),
        ({"rng": -1}, "rng=-1: must be a numpy.random.Generator"),
        ({"centre": {"bta": 1.0}}, "centre: the model has no parameter 'bta'. Its .* 'beta'"),
    ],
)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_bad_argument_is_refused_by_name(model, sampler, settings, message):
    with pytest.raises(ValueError, match=message):
        build(sampler, model, **settings)


def test_what_is_no_model_is_refused_by_name():
    with pytest.raises(TypeError, match=r"SGHMC\(model='y'\): must be a pm.Model"):
        SGHMC(model="y")


def test_a_single_row_that_is_all_of_the_data_is_no_minibatch():
    with pm.Model():
        pm.Normal("y", pm.Normal("mu"), 1, observed=[0.3])
        step = SGHMC(batch_size=1, compile_kwargs=FAST)
    assert step.tuner.gradient.is_exact


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"friction": 0.0}, r"friction=0\.0: must be \"auto\" or a number in \(0, 1\]"),
        ({"friction": True}, 'friction=True: must be "auto" or a number'),
        ({"friction": 1.5}, 'friction=1.5: must be "auto" or a number'),
        ({"friction": "high"}, "friction='high': must be \"auto\" or a number"),
        ({"integrator": "leapfrog"}, "integrator='leapfrog': must be"),
        (
            {"noise_estimate": 0.2, "friction": 0.1},
            "β̂ = 0.2 exceeds friction = 0.1.*Raise friction",
        ),
        ({"noise_estimate": -0.1}, "noise_estimate: β̂ must be finite and not below zero"),
        ({"noise_estimate": "fisher"}, "noise_estimate='fisher': pass None.*\"full\""),
        ({"noise_estimate": np.full(2, 0.01)}, r"noise_estimate has shape \(2,\)"),
        (
            {"noise_estimate": np.full(3, 0.01), "preconditioner": np.eye(3)},
            "no meaning with a dense preconditioner",
        ),
        ({"noise_estimate": "diag", "batch_size": 60}, "uses all data and has no noise"),
        ({"noise_estimate": "diag", "batch_size": 1}, "at least 2 rows"),
        ({"resample_momentum_every": 1}, "resample_momentum_every=1.*random walk"),
        ({"resample_momentum_every": 0}, "resample_momentum_every=0: must be a whole number"),
    ],
)
def test_bad_argument_of_sghmc_is_refused_by_name(model, settings, message):
    settings = {"learning_rate": 1e-4, "batch_size": 10, **settings}
    with pytest.raises(ValueError, match=message):
        PaperSGHMC(model=model, compile_kwargs=FAST, **settings)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_discrete_unknown_is_refused_and_left_to_others_by_default(sampler):
    with pm.Model() as model:
        mu = pm.Normal("mu", [0, 2], 1)
        k = pm.Bernoulli("k", 0.5)
        pm.Normal("y", mu[k], 1, observed=np.arange(20.0))
    with pytest.raises(ValueError, match="k is discrete and has no gradient"):
        build(sampler, model, vars=[mu, k], batch_size=5)
    assert build(sampler, model, batch_size=5).unknowns.names == ("mu",)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_chain_that_leaves_the_finite_names_variable_iteration_and_rate(sampler):
    with pm.Model() as model:
        x = pm.Flat("x", shape=2)
        pm.Potential("energy", -(x[1] ** 4) - x[0] ** 2)
    step = sampler.cls(
        learning_rate=10.0, n_steps=5, model=model, compile_kwargs=FAST, **sampler.settings
    )
    step.begin_chain(np.random.default_rng(0))
    with pytest.raises(
        SamplingError,
        match=r"of x\[1\] is not finite at inner step \d+ \(draw \d+ of this chain\) with "
        r"learning_rate=10\. Try learning_rate=1",
    ):
        positions(step, {"x": np.ones(2)}, 50)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_bad_start_is_not_blamed_on_the_learning_rate(sampler):
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("energy", pm.math.log(x))
    step = sampler.cls(
        learning_rate=0.1, n_steps=5, model=model, compile_kwargs=FAST, **sampler.settings
    )
    step.begin_chain(np.random.default_rng(0))
    with pytest.raises(SamplingError, match=r"at the starting point.*model\.debug.*initvals"):
        step.step({"x": np.array(-100.0)})


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_float32_model_stays_in_float32(sampler):
    import pytensor

    with pytensor.config.change_flags(floatX="float32"):
        target = GaussianMean(n_rows=50)
        with pm.Model() as model:
            mu = pm.Normal("mu", 0, 1, shape=3)
            pm.Normal("y", mu, 1, observed=target.y.astype("float32"))
        for preconditioner in (None, np.ones(3), np.eye(3)):
            settings = {"preconditioner": preconditioner}
            if sampler.cls is SGHMC:
                settings["noise_estimate"] = "full"
            step = build(sampler, model, **settings)
            point, [stats] = step.step(model.initial_point())
            assert point["mu"].dtype == np.float32
            assert all(part.dtype == np.float32 for part in step.chain.state)
            assert np.isfinite(stats["configurational_temperature"])


def test_step_is_never_assigned_by_pymc(model):
    for sampler in SAMPLERS:
        assert sampler.cls.competence(model["beta"], True) == 0


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_too_large_a_rate_at_the_first_step_is_not_blamed_on_the_start(sampler):
    # SGHMC takes its first gradient where the momentum has led it, not at the start.
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1, shape=2)
        pm.Potential("energy", -(pm.math.exp(1000 * b) + pm.math.exp(-1000 * b)).sum())
    step = sampler.cls(
        learning_rate=1.0, n_steps=5, model=model, compile_kwargs=FAST, **sampler.settings
    )
    step.begin_chain(np.random.default_rng(0))
    with pytest.raises(SamplingError, match=r"with learning_rate=1\. Try learning_rate=0\.1"):
        positions(step, {"b": np.zeros(2)}, 20)


@pytest.mark.parametrize("noise_estimate", [None, "diag", "full"])
def test_missing_values_set_later_are_named(noise_estimate):
    model = linear_regression()
    step = build(SAMPLERS[0], model, noise_estimate=noise_estimate)
    with model:
        pm.set_data({"X": np.full((60, 2), np.nan)})
    step.begin_chain(np.random.default_rng(0))
    with pytest.raises(SamplingError, match=r"is not finite(?!.*nan)"):
        step.step(model.initial_point())
    gradient = step.tuner.gradient
    assert gradient.data.odd_values(gradient.order.probe(step.rng)) == "missing values"
    with model:
        pm.set_data({"X": np.where(np.arange(60)[:, None] == 7, np.nan, np.ones((60, 2)))})
    step.begin_chain(np.random.default_rng(0))
    with pytest.raises(SamplingError, match="the data have missing values"):
        positions(step, model.initial_point(), 50)


@pytest.mark.parametrize(
    ("schedule", "samplers"),
    [
        (lambda t: np.float64(1e-4), SAMPLERS),
        (schedules.polynomial_decay(np.float64(1e-4)), SAMPLERS[:1]),
    ],
)
def test_numpy_numbers_from_a_schedule_leave_the_precision_alone(schedule, samplers):
    import pytensor

    with pytensor.config.change_flags(floatX="float32"):
        with pm.Model() as model:
            pm.Normal("y", pm.Normal("mu"), 1, observed=np.zeros(20, dtype="float32"))
        for sampler in samplers:
            step = build(sampler, model, learning_rate=schedule)
            step.step(model.initial_point())
            assert {part.dtype for part in step.chain.state} == {np.dtype("float32")}


def test_bad_values_of_a_schedule_are_refused_in_words(model):
    now = {"schedule": lambda t: 1e-5}
    step = build(SAMPLERS[0], model, learning_rate=lambda t: now["schedule"](t))
    for value in (None, "a", np.array([1e-5]), -1e-5, np.nan):
        for at in (0, 5):
            now["schedule"] = lambda t, value=value, at=at: value if t >= at else 1e-5
            step.begin_chain(np.random.default_rng(0))
            with pytest.raises(
                SamplingError, match=f"the schedule returns .* at inner step {at}, but rates must"
            ):
                positions(step, model.initial_point(), 3)


def test_numbers_of_numpy_and_partial_points_are_taken(model):
    for friction in (np.float32(0.1), np.array(0.1), 1):
        assert build(SAMPLERS[1], model).unknowns.d == 3
        step = PaperSGHMC(
            learning_rate=np.float32(1e-4), batch_size=np.int64(10), n_steps=np.int64(2),
            friction=friction, initial_point={"beta": [1.0, 2.0]}, model=model,
            compile_kwargs={"mode": "FAST_COMPILE", "on_unused_input": "ignore"},
        )  # fmt: skip
        positions(step, model.initial_point(), 2)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"sigma": 1.0},
            "'sigma' is not the name of a value variable.*'beta', 'sigma_log__'",
        ),
        ({"beta": 1.0}, "'beta' must be an array of numbers with 1 axes"),
        ({"beta": ["a", "b"]}, "'beta' must be an array of numbers"),
    ],
)
def test_bad_initial_point_is_refused(model, value, words):
    with pytest.raises(ValueError, match=f"initial_point: {words}"):
        build(SAMPLERS[0], model, initial_point=value)


def test_compile_kwargs_that_are_no_dict_are_refused(model):
    with pytest.raises(ValueError, match="compile_kwargs='FAST_COMPILE': must"):
        SGHMC(batch_size=10, model=model, compile_kwargs="FAST_COMPILE")


@pytest.mark.parametrize(
    "settings",
    [
        {"preconditioner": "dense", "gradient": "plain"},
        {"noise_estimate": "full", "gradient": "plain", "learning_rate": 1e-4},
    ],
)
def test_matrices_over_many_unknowns_are_refused_before_they_are_made(settings):
    d = 30_000
    with pm.Model():
        b = pm.Normal("b", shape=d)
        pm.Normal("y", b[np.arange(20) % 7], 1, observed=np.zeros(20))
        with pytest.raises(ValueError, match=r'"(dense|full)": use "diag" .* 7\.2 GB'):
            SGHMC(batch_size=10, compile_kwargs=FAST, **settings)


def test_operation_without_a_gradient_is_refused_in_words():
    class BlackBox(Op):
        itypes = otypes = [pt.dscalar]

        def perform(self, node, inputs, outputs):
            outputs[0][0] = np.square(inputs[0])

    with pm.Model():
        pm.Normal("y", BlackBox()(pm.Normal("b")), 1, observed=np.zeros(20))
        with pytest.raises(ValueError, match=r"no gradient that PyTensor could take.*pm\.Slice"):
            SGHMC(batch_size=10, compile_kwargs=FAST)


def test_missing_value_that_the_check_of_rows_has_not_seen_is_refused():
    n_rows = MAX_CHECKED_ROWS + 1  # every other one is checked
    x = np.linspace(-1.0, 1.0, n_rows)
    x[1] = np.nan
    with pm.Model():
        pm.Normal("y", pm.Normal("b") * x, 1, observed=np.zeros(n_rows))
        with pytest.raises(ValueError, match=r"data of the likelihood have missing values\. Drop"):
            SGHMC(batch_size=10, compile_kwargs=FAST)


@pytest.mark.parametrize(("pool", "row"), [("auto", "row 2345"), (500, r"the row .*x=inf")])
def test_infinite_values_elsewhere_are_refused_before_a_chain_starts(pool, row):
    x = np.linspace(-1.0, 1.0, 3000)
    x[2345] = np.inf
    data = {"x": x, "z": np.zeros(3000)}
    with pm.Model():
        mu = pm.Normal("b") * pm.Data("x", x[:10])
        pm.Normal("y", mu, 1, observed=pm.Data("z", np.zeros(10)))
        with pytest.raises(ValueError, match=rf"infinite values.* {row}.* is not finite. Drop"):
            SGHMC(data=ArrayLoader(data), pool=pool, compile_kwargs=FAST)


def test_infinite_bounds_are_no_reason_to_refuse_a_row():
    lower = np.where(np.arange(3000) % 2, -np.inf, -1.0)
    with pm.Model():
        latent = pm.Normal.dist(pm.Normal("b"), 1)
        observed = pm.Data("z", np.zeros(10))
        pm.Censored("y", latent, pm.Data("lower", lower[:10]), np.inf, observed=observed)
        step = SGHMC(data={"lower": lower, "z": np.zeros(3000)}, compile_kwargs=FAST)
    assert step.tuner.setup.fit.is_mode


@pytest.mark.parametrize("sampler", ["SGHMC", "QNHMC"])
def test_seed_gives_the_same_draws_whatever_the_cores_and_the_threads_of_blas(sampler):
    X = np.random.default_rng(0).normal(size=(5000, 300))
    with pm.Model(), threadpool_limits(4, user_api="blas"):
        pm.Normal("y", pm.math.dot(X, pm.Normal("b", shape=300)), 100, observed=np.zeros(5000))
        if sampler == "SGHMC":
            step = PaperSGHMC(learning_rate=1e-4, batch_size=2000, compile_kwargs=FAST)
        else:
            step = QNHMC(step_size=1e-3, n_steps=3, compile_kwargs=FAST)
        one, two = (
            pm.sample(
                3, tune=2, chains=2, cores=cores, step=step, random_seed=1, progressbar=False,
                compute_convergence_checks=False,
            )
            for cores in (1, 2)
        )  # fmt: skip
        assert {library["num_threads"] for library in threadpool_info()} == {4}
    np.testing.assert_array_equal(one.posterior["b"].values, two.posterior["b"].values)


def test_copied_step_sees_the_models_data_and_does_not_copy_them():
    model = linear_regression()
    step = copy.deepcopy(build(SAMPLERS[0], model, batch_size=60))
    assert step.tuner.gradient.data.arrays[0] is model["X"].get_value(borrow=True)
    with model:
        pm.set_data({"X": np.zeros((60, 2))})
    step.begin_chain(np.random.default_rng(0))
    assert not step.tuner.gradient.data.arrays[0].any()
    point, _ = step.step(model.initial_point())
    assert np.isfinite(point["beta"]).all()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_step_can_be_pickled_plainly(model, sampler):
    step = build(sampler, model, **many_settings(sampler))
    step.begin_chain(np.random.default_rng(1))
    copied = pickle.loads(pickle.dumps(step))
    point = model.initial_point()
    np.testing.assert_array_equal(positions(copied, point, 2)[0], positions(step, point, 2)[0])
