"""A draw's inner steps in one compiled call: the sampler's own update, to round-off, on each backend."""

import importlib.util
import pickle

from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from modes import FAST
from pymc.exceptions import SamplingError
from pytensor.tensor.shape import SpecifyShape
from scipy import stats
from stationary import PRECONDITIONERS, Script
from table import SAMPLERS, PaperSGHMC, PaperSGLD
from targets import gradient_of, start_of

from pymc_sghmc import SGHMC, SGLD, SGNHT, schedules
from pymc_sghmc.compat import ancestors
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.metric import Diagonal, Identity, LowRank, preconditioner_metric
from pymc_sghmc.gradients.noise import noise_covariance
from pymc_sghmc.gradients.target import Target
from pymc_sghmc.loops import inner_loops
from pymc_sghmc.loops import normals as noise
from pymc_sghmc.loops.inner_loops import InnerLoop, Replay
from pymc_sghmc.loops.tracing import without_shape_checks
from pymc_sghmc.samplers import sghmc
from pymc_sghmc.step.step import StochasticGradientStep

NEEDS_JAX = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
BACKENDS = ["FAST_COMPILE", "NUMBA", pytest.param("JAX", marks=NEEDS_JAX)]
N_ROWS = 200


@pytest.fixture(scope="module")
def model():
    return logistic()


@cache
def logistic(dtype="float64"):
    rng = np.random.default_rng(5)
    X = rng.standard_normal((N_ROWS, 3)).astype(dtype)
    y = rng.binomial(1, 1 / (1 + np.exp(-X @ [1.0, -0.5, 0.2])))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=3)
        pm.Bernoulli("y", logit_p=pm.Data("X", X) @ beta, observed=y)
    return model


@cache
def gradient_by(model, kind, mode):
    """Gradient that the tests share; a model's own does not change."""
    if mode == "NUMBA":  # of the loop's function alone: the gradient itself is called by hand
        mode = "FAST_COMPILE"
    gradient = gradient_of(model, 20, compile_kwargs={"mode": mode})
    if kind == "plain":
        return gradient
    control_variates = ControlVariates(gradient)
    centre = np.array([0.9, -0.4, 0.1], gradient.density.dtype)
    control_variates.set_centre(centre, Diagonal(0.2 * np.ones(3)))
    return control_variates


def target_of(gradient, metric=None, centre=(0.0, 0.0, 0.0)):
    """Target at the beginning of a draw of a new chain."""
    target = Target(gradient, Identity(3) if metric is None else metric)
    target.begin_draw(SimpleNamespace(place=None), np.array(centre))
    return target


def by_hand(update, target, state, settings, seed, k, made=None, n_normals=1):
    """The same steps by ``update``, one after another in Python: state, and the sum of |v|²."""
    rng = np.random.default_rng(seed)
    minibatches = target.draw_minibatches(rng, k)
    size = n_normals * state.position.size
    normals = noise.standard_normals(rng, (k, size), state.position.dtype)
    kinetic = 0.0
    settings = dict(settings)
    eta = settings.pop("learning_rate")
    for t in range(k if made is None else made):
        step = Replay(target, minibatches.one(t), normals[t])
        state, _ = update(state, step, eta, step, **settings)
        if len(state) > 1:
            kinetic += float(state.momentum @ state.momentum)
    return state, kinetic


def settings_of(sampler, noise_estimate=0.02):
    settings = {"learning_rate": 0.004, "temperature": 0.7}
    if sampler.rule.has_friction:
        settings["friction"] = 0.3
    if sampler.rule.has_noise_estimate:
        settings["noise_estimate"] = noise_estimate
    return settings


def assert_is_update(sampler, model, kind, preconditioner, mode, k, tolerance, **settings):
    gradient = gradient_by(model, kind, mode)
    dtype, metric = gradient.density.dtype, Identity(3)
    P = PRECONDITIONERS[preconditioner]
    if P is not None:
        metric = preconditioner_metric(0.05 * P, 3).astype(dtype)
    start = np.array([0.5, 0.0, -0.3], dtype)
    state = sampler.cls.init(start, 0.004, np.random.default_rng(1))
    settings = settings_of(sampler, **settings)
    if P is not None:
        settings["learning_rate"] = 0.04
    target, again = (target_of(gradient, metric, [0.8, -0.4, 0.1]) for _ in range(2))
    loop = InnerLoop(sampler.update, state, target, settings, {"mode": mode})
    found = loop(state, k, np.random.default_rng(2), target, settings)
    expected, kinetic = by_hand(sampler.update, again, state, settings, 2, k)
    assert found.n_steps == k
    assert found.failed is None
    for a, b in zip(found.state, expected, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    sums = target.virial, target.square_norm, found.kinetic
    np.testing.assert_allclose(
        sums, (again.virial, again.square_norm, kinetic), rtol=10 * tolerance
    )
    other, _ = by_hand(sampler.update, again, state, settings, 3, k)
    assert np.abs(other.position - expected.position).max() > 1e3 * tolerance  # other noise shows


KINDS = ("plain", "control_variates")


# All pairs of a rule, a kind of gradient and a preconditioner, not all three by three.
@pytest.mark.parametrize(
    ("sampler", "kind", "preconditioner"),
    [
        pytest.param(sampler, KINDS[(i + j // 2) % 2], name, id=f"{sampler}-{name}")
        for i, sampler in enumerate(SAMPLERS)
        for j, name in enumerate(PRECONDITIONERS)
    ],
)
def test_compiled_steps_are_the_update_itself(model, sampler, kind, preconditioner):
    assert_is_update(sampler, model, kind, preconditioner, "FAST_COMPILE", 200, 1e-12)


# Quickly: in Python 200 steps of each rule in test_compiled_steps_are_the_update_itself. Numba takes
# long to compile each rule; test_seed_gives_the_same_draws_on_each_backend compiles one.
LONG = {"NUMBA": pytest.mark.slow, "JAX": NEEDS_JAX, "FAST_COMPILE": pytest.mark.slow}


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=marks) for mode, marks in LONG.items()])
def test_backends_agree_with_the_update_over_thousands_of_steps(model, sampler, mode):
    kind = "control_variates" if sampler is SAMPLERS[2] else "plain"
    assert_is_update(sampler, model, kind, "dense", mode, 2000, 1e-11)


def test_noise_estimate_by_unknown_is_passed_on(model):
    beta_hat = np.array([0.0, 0.1, 0.25])
    assert_is_update(
        SAMPLERS[0], model, "plain", "diag", "FAST_COMPILE", 50, 1e-12, noise_estimate=beta_hat
    )


def test_single_precision_stays_single(monkeypatch):
    with pytensor.config.change_flags(floatX="float32"):
        assert_is_update(
            SAMPLERS[0], logistic("float32"), "plain", "diag", "FAST_COMPILE", 100, 2e-4
        )


@pytest.mark.parametrize("mode", BACKENDS)
def test_steps_end_before_the_first_that_is_not_finite(model, mode):
    gradient = gradient_by(model, "plain", mode)
    sampler = SAMPLERS[1]  # SGLD: the normals of a step show in the gradient of the next
    state = sampler.cls.init(np.zeros(3), 0.004, None)
    settings = settings_of(sampler)
    target = target_of(gradient)
    loop = InnerLoop(sampler.update, state, target, settings, {"mode": mode}, with_logp=True)

    def run(rng):
        with np.errstate(invalid="ignore"):
            return loop(state, 8, rng, target_of(gradient), settings)

    class Broken:  # the normals of the sixth step are not finite, so that the seventh isn't
        def __init__(self, t):
            self.rng, self.t = np.random.default_rng(4), t

        def integers(self, *args, **kwargs):
            return self.rng.integers(*args, **kwargs)

        def standard_normal(self, shape, dtype):
            normals = self.rng.standard_normal(shape, dtype=dtype)
            normals[self.t :] = np.inf
            normals[self.t + 1 :] = 7.0
            return normals

    def expected(made):
        found, _ = by_hand(sampler.update, target_of(gradient), state, settings, 4, 8, made)
        return found.position

    found = run(Broken(5))
    assert found.n_steps == 6
    assert np.isinf(found.state.position).all()  # after the sixth, not the seventh: no NaN
    minibatch, normals = found.failed
    drawn, _ = gradient.order.draw(np.random.default_rng(4), None, 8)
    np.testing.assert_array_equal(minibatch.rows, drawn.one(6).rows)
    np.testing.assert_array_equal(normals, 7.0)
    assert run(Broken(8)).n_steps == 8
    np.testing.assert_allclose(run(Broken(8)).state.position, expected(8), rtol=1e-12)
    logp, _ = gradient(expected(7), drawn.one(7))  # SGLD's gradient is that before it moves
    np.testing.assert_allclose(run(Broken(8)).logp, logp, rtol=1e-12)


@pytest.mark.parametrize("mode", BACKENDS)
def test_steps_end_where_the_density_does_although_its_gradient_is_finite(mode):
    with pm.Model():
        x = pm.Flat("x", shape=1)
        pm.Potential("energy", pm.math.switch(x > 1.0, -np.inf, 3.0 * x).sum())
        step = SGLD(learning_rate=0.1, n_steps=1, temperature=0.0, compile_kwargs={"mode": mode})
    step.begin_chain(np.random.default_rng(0))
    point = {"x": np.zeros(1)}
    [loop] = step.draws.loops._loops.values()
    assert loop.has_logp
    for k in range(4):  # each step goes up by 0.3
        point, [stats] = step.step(point)
        np.testing.assert_allclose(stats["minibatch_logp"], 3 * 0.3 * k)
        np.testing.assert_allclose(point["x"], 0.3 * (k + 1))
    step.stop_tuning()
    with pytest.raises(SamplingError, match="log-density of x is -inf at inner step 4"):
        step.step(point)


@pytest.mark.parametrize("mode", BACKENDS)
def test_steps_end_where_numba_divides_by_zero_as_where_others_are_infinite(mode):
    """As the derivative of alpha**lag for the lag of zero days does, once alpha is zero."""
    with pm.Model():
        x = pm.Flat("x", shape=1, initval=np.ones(1))
        pm.Potential("energy", -(x[:, None] ** np.arange(2)).sum())
        step = SGLD(learning_rate=0.25, n_steps=6, temperature=0.0, compile_kwargs={"mode": mode})
    step.begin_chain(np.random.default_rng(0))
    point, _ = step.step({"x": np.full(1, 2.5)})  # each step goes down by a quarter
    np.testing.assert_allclose(point["x"], 1.0)
    with pytest.raises(SamplingError, match=r"gradient of x\[0\] is not finite at inner step 10"):
        step.step(point)


def test_a_parameter_behind_a_hundred_others_is_compiled_without_a_traceback(caplog):
    """PyTensor logs one where it fails to simplify the first entry of such a parameter."""
    with pm.Model() as model:
        pm.Normal("others", 0, 1, shape=140)
        start = pm.Normal.dist(0, 1)
        walk = pm.GaussianRandomWalk("walk", sigma=1.0, init_dist=start, shape=4)
        pm.Normal("y", walk[np.arange(40) % 4], 1, observed=np.zeros(40))
    target = Target(gradient_of(model, None, compile_kwargs=FAST), Identity(144))
    target.begin_draw(SimpleNamespace(place=None), np.zeros(144))
    sampler = SAMPLERS[0]
    state = sampler.cls.init(np.zeros(144), 0.004, np.random.default_rng(1))
    settings = settings_of(sampler)
    loop = InnerLoop(sampler.update, state, target, settings, {"mode": "NUMBA"})
    assert loop(state, 2, np.random.default_rng(2), target, settings).n_steps == 2
    assert "failure" not in caplog.text


def test_blocks_of_random_numbers_join():
    """As many steps in blocks of three as in one, each with rows and normals of its own."""
    n_rows = 300_000
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1, shape=3)
        pm.Normal("y", pt.sum(b), 1, observed=np.random.default_rng(1).normal(size=n_rows))
    n = inner_loops.BLOCK_BYTES // (3 * 8) - 3  # rows of a minibatch: three steps fill a block
    gradient = gradient_of(model, n)
    sampler, target, again = SAMPLERS[1], target_of(gradient), target_of(gradient)
    settings = settings_of(sampler) | {"learning_rate": 1e-6}
    state = sampler.cls.init(np.zeros(3), 1e-6, None)
    loop = InnerLoop(sampler.update, state, target, settings, FAST)
    rng = np.random.default_rng(2)
    found = loop(state, 7, rng, target, settings)
    expected, rng = state, np.random.default_rng(2)
    for k in (3, 3, 1):
        before = deepcopy(rng.bit_generator.state)
        expected, _ = by_hand(sampler.update, again, expected, settings, rng, k)
        assert rng.bit_generator.state != before
    assert found.n_steps == 7
    np.testing.assert_allclose(found.state.position, expected.position, rtol=1e-12)
    np.testing.assert_allclose(target.virial, again.virial, rtol=1e-12)
    np.testing.assert_allclose(target.square_norm, again.square_norm, rtol=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        "control_variates",
        # quickly: of one group in test_steps_end_before_the_first_that_is_not_finite
        pytest.param("plain", marks=pytest.mark.slow),
    ],
)
def test_groups_of_rows_and_further_axes_are_fetched_by_numba(kind):
    rng = np.random.default_rng(0)
    A, z = rng.normal(size=(120, 2, 3)), rng.normal(size=70)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=3)
        pm.Normal("y", (pm.Data("A", A) * beta).sum((1, 2)), 1, observed=A.sum((1, 2)))
        pm.Normal("z", beta[0], 1, observed=pm.Data("zd", z))
    mode = {"mode": "NUMBA"}
    gradient = gradient_of(model, {"y": 30, "z": 20})  # called by hand
    sampler, settings = SAMPLERS[1], settings_of(SAMPLERS[1])
    settings["learning_rate"] = 1e-4
    state = sampler.cls.init(np.zeros(3), 1e-4, None)
    if kind == "control_variates":
        gradient = ControlVariates(gradient)
        gradient.set_centre(np.full(3, 0.9), Diagonal(0.1 * np.ones(3)))
    loop = InnerLoop(sampler.update, state, target_of(gradient), settings, mode)
    found = loop(state, 50, np.random.default_rng(2), target_of(gradient), settings)
    expected, _ = by_hand(sampler.update, target_of(gradient), state, settings, 2, 50)
    np.testing.assert_allclose(found.state.position, expected.position, rtol=1e-10)


def test_steps_with_many_inputs_are_compiled_by_numba():
    """Numba can't inline a call with more than thirty, nor one with a tuple of as many."""
    n_columns = 16  # each of which is an array, and its rows
    columns = np.random.default_rng(0).standard_normal((n_columns, 50))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=3)
        mu = beta.sum() * sum(pm.Data(f"x{i}", column) for i, column in enumerate(columns))
        pm.Normal("y", mu, 1, observed=columns.sum(axis=0))
    gradient = gradient_of(model, 10)
    sampler, settings = SAMPLERS[1], settings_of(SAMPLERS[1])
    settings["learning_rate"] = 1e-4
    state = sampler.cls.init(np.zeros(3), 1e-4, None)
    loop = InnerLoop(sampler.update, state, target_of(gradient), settings, {"mode": "NUMBA"})
    found = loop(state, 5, np.random.default_rng(2), target_of(gradient), settings)
    expected, _ = by_hand(sampler.update, target_of(gradient), state, settings, 2, 5)
    np.testing.assert_allclose(found.state.position, expected.position, rtol=1e-10)


def test_control_variates_without_remembered_terms_are_compiled_alike(monkeypatch):
    monkeypatch.setattr(
        "pymc_sghmc.gradients.control_variates._with_row_terms", lambda density, data: None
    )
    own = logistic.__wrapped__()  # its gradient is not that of the other tests
    assert_is_update(SAMPLERS[0], own, "control_variates", "none", "FAST_COMPILE", 50, 1e-10)


def test_wrong_step_is_found_on_the_users_own_model(model, monkeypatch, caplog):
    """Terms that were remembered wrongly, say: chains go on in Python, with a word."""
    with model:
        given = {"batch_size": 20, "gradient": "control_variates", "compile_kwargs": FAST}
        right = SGHMC(**given)
        true = ControlVariates.symbolic

        def wrong(self, position, reports=False):
            none, gradient, *others = true(self, position)
            return none, 1.1 * gradient, *others

        monkeypatch.setattr(ControlVariates, "symbolic", wrong)
        step = SGHMC(**given)
    assert "doesn't agree with the gradient" in caplog.text
    loops = step.draws.loops._loops
    assert list(loops.values()) == [None]
    # Another order of random numbers than the compiled steps', and that of `update` in Python
    right.draws.loops._loops = dict.fromkeys(loops)
    np.testing.assert_array_equal(draws(step, 5), draws(right, 5))


def test_a_low_rank_metric_may_have_another_rank_in_the_same_loop(model):
    rng = np.random.default_rng(3)
    directions = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    wide, narrow = (
        LowRank.of(np.full(3, 0.2), directions[:rank], np.full(rank, 2.0)) for rank in (2, 1)
    )
    gradient = gradient_by(model, "plain", "NUMBA")
    sampler, settings = SAMPLERS[1], settings_of(SAMPLERS[1])
    state = sampler.cls.init(np.zeros(3), 0.004, None)
    mode = {"mode": "NUMBA"}
    loop = InnerLoop(sampler.update, state, target_of(gradient, wide), settings, mode)
    for metric in (wide, narrow):
        target, again = (target_of(gradient, metric) for _ in range(2))
        found = loop(state, 50, np.random.default_rng(2), target, settings)
        expected, _ = by_hand(sampler.update, again, state, settings, 2, 50)
        np.testing.assert_allclose(found.state.position, expected.position, rtol=1e-10)


def test_checks_of_shapes_are_left_to_set_up(model):
    """Numba takes a second and more for the message of one."""
    gradient = gradient_by(model, "plain", "FAST_COMPILE")
    sampler, settings = SAMPLERS[1], settings_of(SAMPLERS[1])
    state = sampler.cls.init(np.zeros(3), 0.004, None)
    mode = {"mode": "FAST_COMPILE"}
    loop = InnerLoop(sampler.update, state, target_of(gradient), settings, mode)
    nodes = loop.step.function.maker.fgraph.apply_nodes
    assert not [node for node in nodes if isinstance(node.op, SpecifyShape)]


def test_a_length_of_one_stays_known_where_a_check_is_left_out():
    """A column that the graph knows to be one broadcasts, and must go on doing so."""
    x, y = pt.matrix("x"), pt.matrix("y")
    rows, column = pt.specify_shape(x, (4, None)), pt.specify_shape(y, (None, 1))
    [out] = without_shape_checks([rows * column])
    function = pytensor.function([x, y], out, mode="FAST_COMPILE")
    np.testing.assert_allclose(function(np.ones((4, 3)), np.full((4, 1), 2.0)), 2.0)
    kept = [v.owner.op for v in ancestors([out]) if v.owner is not None]
    assert [isinstance(op, SpecifyShape) for op in kept].count(True) == 1


# --- In a step


def test_containers_that_are_not_cut_are_seen_by_the_compiled_loop():
    rng = np.random.default_rng(1)
    Y, Z = rng.normal(3.0, 1.0, size=400), rng.normal(3.0, 1.0, size=50)
    with pm.Model() as model:
        off = pm.Data("off", 0.0)
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("y", mu + off, 1, observed=Y)
        pm.Normal("z", mu, 1, observed=pm.Data("zd", Z))  # used whole
    for mode, with_replacement in (("NUMBA", True), ("FAST_COMPILE", False)):
        kwargs = {"model": model, "batch_size": {"y": 50}, "replace": with_replacement}
        with (
            model,
            pytensor.config.change_flags(mode=mode),
        ):  # of the loop; its gradients are NumPy's
            pm.set_data({"off": 0.0, "zd": Z})
            step = SGHMC(**kwargs)
            first = draws(step, 30)
            pm.set_data({"off": 2.0, "zd": Z - 2})
            again = draws(step, 30)
            fresh = draws(SGHMC(**kwargs, compile_kwargs=FAST), 30)
            np.testing.assert_allclose(again, fresh, rtol=1e-12 if mode != "NUMBA" else 1e-9)
        assert abs(first.mean() - again.mean() - 2) < 0.1


def test_copied_step_compiles_what_it_needs(model):
    with model:
        step = SGHMC(batch_size=20, compile_kwargs=FAST)
    copied = deepcopy(step)
    copied.draws.loops._loops.clear()
    np.testing.assert_allclose(draws(copied, 4), draws(step, 4), rtol=1e-12)


def test_momentum_is_redrawn_within_a_draw(model):
    with model:
        step = PaperSGHMC(
            batch_size=20,
            learning_rate=1e-3,
            n_steps=10,
            resample_momentum_every=3,
            compile_kwargs=FAST,
        )
    init, calls = step.draws.init, []
    step.draws.init = lambda *args: calls.append(1) or init(*args)
    draws(step, 3)
    assert len(calls) == 1 + 10  # at the start, and at inner steps 0, 3, ..., 27


def draws(step, n, seed=0):
    step.begin_chain(np.random.default_rng(seed))
    step.stop_tuning()
    point, out = start_of(step), []
    for _ in range(n):
        point, _ = step.step(point)
        out.append(step.unknowns.ravel(point))
    return np.array(out)


def test_seed_gives_the_same_draws_on_each_backend(model):
    found = []
    for mode in ["FAST_COMPILE", "NUMBA"] + ["JAX"] * (importlib.util.find_spec("jax") is not None):
        # as by default: with Numba the loop is compiled, and gradients of many rows are NumPy's
        options = {} if mode == "NUMBA" else {"compile_kwargs": {"mode": mode}}
        with (
            model,
            pytensor.config.change_flags(mode="NUMBA" if mode == "NUMBA" else "FAST_COMPILE"),
        ):
            found.append(draws(SGHMC(batch_size=20, **options), 30))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-9)


@pytest.mark.parametrize("settings", [{}, {"learning_rate": 0.01, "gradient": "plain"}])
def test_nothing_is_compiled_once_the_step_is_there(model, monkeypatch, settings):
    with model:
        step = SGHMC(batch_size=20, compile_kwargs=FAST, **settings)
        lazy = SGLD(batch_size=20, compile_kwargs=FAST)
    monkeypatch.setattr(inner_loops, "compile", None)
    assert draws(step, 3).shape == (3, 3)
    lazy.draws.loops._loops.clear()
    with pytest.raises(TypeError, match="NoneType"):  # it would have shown
        draws(lazy, 1)


def test_pickled_loop_makes_the_same_draws(model):
    with model:
        step = PaperSGHMC(batch_size=20, learning_rate=0.004, compile_kwargs=FAST)
    again = pickle.loads(pickle.dumps(step))
    np.testing.assert_array_equal(draws(again, 4), draws(step, 4))


def test_decaying_rate_changes_at_every_inner_step(model):
    schedule = schedules.polynomial_decay(0.01, 1.0, 0.6)
    with model:
        step = PaperSGLD(batch_size=20, learning_rate=schedule, n_steps=6, compile_kwargs=FAST)
    found = draws(step, 1, seed=3)[0]
    rng, target, sampler = np.random.default_rng(3), target_of(step.tuner.gradient), SAMPLERS[1]
    state = sampler.cls.init(np.zeros(3), 0.01, None)
    for t in range(6):
        state, _ = sampler.update(state, target, schedule(t), rng)
    np.testing.assert_allclose(found, state.position, rtol=1e-12)


def test_statistics_hold_all_inner_steps(model):
    """The sums of the compiled steps and those of the last one, which reports, are put together."""
    with model:
        many = PaperSGHMC(batch_size=20, learning_rate=1e-6, n_steps=50, compile_kwargs=FAST)
    many.begin_chain(np.random.default_rng(0))
    many.stop_tuning()
    _, [found] = many.step(start_of(many))
    assert many.chain.n_updates == 50
    np.testing.assert_allclose(found["draw_weight"], 50e-6)
    gradient = many.tuner.gradient
    full = gradient.passes.log_density(np.zeros(3))[1]
    # At such a rate the position stays: mean squared norm |g|² + tr V over 50 minibatches
    V = noise_covariance(gradient, Identity(3), np.zeros(3), np.random.default_rng(1))
    expected = full @ full + V.sum()
    assert abs(found["gradient_norm"] ** 2 / expected - 1) < 0.5


def test_kinetic_temperature_is_in_units_of_the_learning_rate(model):
    """1 on average, at a rate far from 1 and with nearly all steps in the compiled loop."""
    with model:
        step = PaperSGHMC(
            batch_size=N_ROWS, learning_rate=2e-3, n_steps=100, compile_kwargs=FAST
        )  # fmt: skip
    step.begin_chain(np.random.default_rng(0))
    step.stop_tuning()
    point, found = start_of(step), []
    for _ in range(60):
        point, [statistics] = step.step(point)
        found.append(statistics["kinetic_temperature"])
    assert abs(np.mean(found[10:]) - 1.03) < 4.5 * np.std(found[10:]) / 50**0.5 + 0.03


def test_each_kind_of_gradient_and_setting_has_its_own_loop(model):
    with model:
        step = SGHMC(batch_size=20, gradient="control_variates", compile_kwargs=FAST)
    step.begin_chain(np.random.default_rng(0))
    step.step(start_of(step))
    chain, loops = step.chain, set()
    for order in (0, 1):
        target = step.tuner.target(replace(chain.tuning, order=order))
        target.begin_draw(chain, chain.mean)
        for beta_hat in (0.0, np.zeros(3)):
            settings = {"learning_rate": 0.01, "friction": 0.1, "noise_estimate": beta_hat}
            loops.add(step.draws.loops.find(chain.state, target, settings | {"temperature": 1.0}))
    assert len(loops) == 4
    assert None not in loops


# --- Rules of other kinds


def oabao(state, gradient, learning_rate, rng, *, friction, temperature=1.0):
    """Half an Ornstein-Uhlenbeck step on either side of drift, kick and drift: two noises a step."""
    theta, v = state
    kept = (1 - friction) ** 0.5
    sd = (friction * learning_rate * temperature) ** 0.5
    v = kept * v + sd * rng.standard_normal(v.shape, dtype=v.dtype)
    theta = theta + 0.5 * v
    logp, grad = gradient(theta, gradient.draw_minibatch(rng))
    v = v + learning_rate * grad
    theta = theta + 0.5 * v
    v = kept * v + sd * rng.standard_normal(v.shape, dtype=v.dtype)
    return sghmc.SGHMCState(theta, v), {"minibatch_logp": logp}


def two_kicks(state, gradient, learning_rate, rng, *, friction, temperature=1.0):
    """A half kick at either end of a step, each by a minibatch of its own."""
    theta, v = state
    _, grad = gradient(theta, gradient.draw_minibatch(rng))
    v = v + 0.5 * learning_rate * grad
    noise = rng.standard_normal(v.shape, dtype=v.dtype)
    v = (1 - friction) * v + (
        friction * (2 - friction) * learning_rate * temperature
    ) ** 0.5 * noise
    theta = theta + v
    logp, grad = gradient(theta, gradient.draw_minibatch(rng))
    return sghmc.SGHMCState(theta, v + 0.5 * learning_rate * grad), {"minibatch_logp": logp}


class Other(StochasticGradientStep):
    """Step methods of the rules above."""

    name, state_type, init = "other", sghmc.SGHMCState, staticmethod(sghmc.init)

    def __init__(self, vars=None, *, friction, **shared):
        super().__init__(vars, {"friction": friction}, friction, **shared)


class OABAO(Other):
    """Takes two vectors of normals in a step."""

    update = staticmethod(oabao)


class TwoKicks(Other):
    """Takes two gradients in a step."""

    update = staticmethod(two_kicks)


BY_HAND = {"batch_size": 20, "learning_rate": 0.004, "gradient": "plain"}


# In C: SGNHT below, both by command.
@pytest.mark.parametrize("mode", [*BACKENDS, pytest.param("CVM", marks=pytest.mark.slow)])
def test_two_vectors_of_normals_in_a_step_are_two(model, mode):
    gradient, settings = gradient_by(model, "plain", mode), settings_of(SAMPLERS[1])
    settings["friction"] = 0.3
    state = sghmc.init(np.zeros(3), 0.004, np.random.default_rng(1))
    target, again = target_of(gradient), target_of(gradient)
    loop = InnerLoop(oabao, state, target, settings, {"mode": mode})
    found = loop(state, 200, np.random.default_rng(2), target, settings)
    expected, kinetic = by_hand(oabao, again, state, settings, 2, 200, n_normals=2)
    for a, b in zip(found.state, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11)
    np.testing.assert_allclose(
        (target.virial, target.square_norm, found.kinetic),
        (again.virial, again.square_norm, kinetic),
        rtol=1e-10,
    )
    # One step from rest, without the gradient's part: v = √(1 − α) s z + s z' for two different z.
    settings |= {"learning_rate": 1e-9}
    rest = sghmc.SGHMCState(np.zeros(3), np.zeros(3))
    moved = [
        loop.one_step(rest, np.random.default_rng(seed), target, settings).state.momentum
        for seed in range(2000 if mode != "JAX" else 500)
    ]
    variance = np.mean(np.square(moved)) / (0.3 * 1e-9 * 0.7)
    error = variance * (2 / np.size(moved)) ** 0.5
    assert abs(variance - (1 + 0.7)) < 4.5 * error  # not (1 + √0.7)² as with the same one twice


# OABAO's loop on the other backends: test_two_vectors_of_normals_in_a_step_are_two
@pytest.mark.parametrize(
    ("cls", "n_normals", "mode"),
    [
        (OABAO, 2, "FAST_COMPILE"),
        (SGNHT, 1, "FAST_COMPILE"),
        # C is held to the posterior in rows/test_streams.py: test_posterior_with_automatic_settings
        pytest.param(SGNHT, 1, "CVM", marks=pytest.mark.slow),
        (SGNHT, 1, "NUMBA"),
    ],
)
def test_draws_of_other_rules_are_those_by_hand(model, cls, n_normals, mode, caplog):
    """The last step of a draw, in Python, leaves a number where SGNHT's state had an array."""
    with model:
        step = cls(**BY_HAND, friction=0.3, n_steps=5, compile_kwargs={"mode": mode})
    [loop] = step.draws.loops._loops.values()
    assert isinstance(loop, InnerLoop)
    assert not caplog.text
    found, rng = draws(step, 4, seed=3), np.random.default_rng(3)
    target = target_of(step.tuner.gradient)
    state = step.init(np.zeros(3), 0.004, rng)
    settings = {"learning_rate": 0.004, "friction": 0.3, "temperature": 1.0}
    for expected in found:
        state, _ = by_hand(step.update, target, state, settings, rng, 4, n_normals=n_normals)
        state, _ = step.update(state, target, 0.004, rng, friction=0.3)
        np.testing.assert_allclose(state.position, expected, rtol=1e-10)


def test_a_rule_of_two_gradients_a_step_is_run_in_python_without_a_word(model, caplog, recwarn):
    with model:
        step = TwoKicks(**BY_HAND, friction=0.3, n_steps=4, compile_kwargs=FAST)
    found = draws(step, 5, seed=3)
    assert list(step.draws.loops._loops.values()) == [None]
    assert not caplog.text
    assert not recwarn.list
    rng, target = np.random.default_rng(3), target_of(step.tuner.gradient)
    state = sghmc.init(np.zeros(3), 0.004, rng)
    for expected in found:
        for _ in range(4):
            state, _ = two_kicks(state, target, 0.004, rng, friction=0.3)
        np.testing.assert_allclose(state.position, expected, rtol=1e-12)


# --- Normals


def test_box_muller_is_the_transform_to_round_off():
    uniforms = np.random.default_rng(0).random(64 * noise.HALF)
    uniforms[:4] = 0.0, 1 - 2.0**-53, 0.5, 0.25
    found = uniforms.copy()
    noise._compiled()[1](found)
    radius, angle = (uniforms.reshape(-1, 2, noise.HALF)[:, k] for k in (0, 1))
    radius, angle = np.sqrt(-2 * np.log1p(-radius)), (angle * 4 - 0.5) * np.pi / 2
    expected = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_many_normals_differ_from_call_to_call():
    rng = np.random.default_rng(0)
    a, b = (noise.standard_normals(rng, (2**15,), np.float64) for _ in range(2))
    assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / 2**7.5


def test_many_normals_are_standard_normal():
    n = 2_000_000
    z = noise.standard_normals(np.random.default_rng(0), (n // 100, 100), np.float64).ravel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(z**power) - moment) < 4.5 * np.sqrt(variance / n)
    assert stats.kstest(z, "norm").pvalue > 1e-5
    assert stats.kstest(1.001 * z + 0.004, "norm").pvalue < 1e-5  # the check can fail
    for lag in (1, noise.HALF, 2 * noise.HALF):
        assert abs(np.mean(z[lag:] * z[:-lag])) < 4.5 / np.sqrt(n)
        assert abs(np.mean(z[lag:] ** 2 * z[:-lag] ** 2) - 1) < 4.5 * np.sqrt(8 / n)
    assert abs(np.mean(np.abs(z) > 3) - 0.0026998) < 4.5 * np.sqrt(0.0027 / n)


def test_few_normals_are_numpys_own_and_many_repeat():
    few = noise.standard_normals(np.random.default_rng(1), (10, 5), np.float32)
    np.testing.assert_array_equal(
        few, np.random.default_rng(1).standard_normal((10, 5), dtype=np.float32)
    )
    shape = (3, noise.MANY)
    many = noise.standard_normals(np.random.default_rng(1), shape, np.float32)
    again = noise.standard_normals(np.random.default_rng(1), shape, np.float32)
    assert many.dtype == np.float32
    assert many.shape == shape
    np.testing.assert_array_equal(many, again)
    assert len(np.unique(many[0])) > 0.99 * noise.MANY


def test_script_stands_for_a_generator():
    """The laws' generator gives its normals to the compiled steps, too."""
    script = Script(np.arange(6.0))
    np.testing.assert_array_equal(
        noise.standard_normals(script, (2, 3), float), np.arange(6.0).reshape(2, 3)
    )
