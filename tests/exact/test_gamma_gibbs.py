"""GammaGibbs: shape and rate against closed forms, the law of its draws, what it refuses, in pm.sample."""

import pickle

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from modes import PYTHON, QUIET
from pymc.exceptions import SamplingError
from pymc.step_methods.state import equal_dataclass_values
from scipy import stats

from pymc_sghmc import SGHMC, SGLD, GammaGibbs
from pymc_sghmc.exceptions import SamplingStopped

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 40))
Y = RNG.normal(1.0, 2.0, size=(25, 40))
COUNTS = RNG.poisson(3.0, size=30)
WAITS = RNG.gamma(2.0, 1.5, size=30)


# Rates are powers of two: PyTensor keeps 1 over a constant such as 3.0 in single precision.
# Each makes a model and returns the unknown, a point of the others, and the exact shape and rate.
def prior_precision(**kwargs):
    lam = pm.Gamma("lam", 2.0, 4.0, **kwargs)
    pm.Normal("x", 1.0, tau=lam, shape=X.shape)
    return lam, {"x": X}, 2 + X.size / 2, 4 + ((X - 1) ** 2).sum() / 2


def printed_prior(**kwargs):
    lam = pm.Gamma("lam", 1.0, 1.0, **kwargs)  # of the SGHMC paper: exp(−λ|x|²)
    pm.Normal("x", 0.0, tau=2.0 * lam, shape=X.shape)
    return lam, {"x": X}, 1 + X.size / 2, 1 + (X**2).sum()


def precision_of_each_row(**kwargs):
    lam = pm.Gamma("lam", [2.0, 3.0, 4.0], 2.0, shape=3, **kwargs)
    pm.Normal("x", 0.0, tau=lam[:, None], shape=X.shape)
    return lam, {"x": X}, np.array([2, 3, 4]) + 20.0, 2.0 + (X**2).sum(axis=1) / 2


def precision_of_each_entry(**kwargs):
    lam = pm.Gamma("lam", 0.5, 0.5, shape=X.shape, **kwargs)  # x is Student's
    pm.Normal("x", 0.0, sigma=lam**-0.5, shape=X.shape)
    return lam, {"x": X}, np.full(X.shape, 1.0), 0.5 + X**2 / 2


def precision_of_data(**kwargs):
    mu = pm.Normal("mu", 0.0, 1.0)
    lam = pm.Gamma("lam", 1.0, 1.0, **kwargs)
    pm.Normal("y", mu, tau=lam, observed=pm.Data("Y", Y))
    return lam, {"mu": np.array(0.3)}, 1 + Y.size / 2, 1 + ((Y - 0.3) ** 2).sum() / 2


def rate_of_counts(**kwargs):
    lam = pm.Gamma("lam", 2.0, 0.5, **kwargs)
    pm.Poisson("n", 1.7 * lam, observed=COUNTS)
    return lam, {}, 2 + COUNTS.sum(), 0.5 + 1.7 * len(COUNTS)


def rate_of_waits(**kwargs):
    lam = pm.Gamma("lam", 2.0, 0.5, **kwargs)
    pm.Gamma("t", 2.5, lam, observed=WAITS)
    return lam, {}, 2 + 2.5 * len(WAITS), 0.5 + WAITS.sum()


def exponential_prior(**kwargs):
    lam = pm.Exponential("lam", 0.5, **kwargs)
    pm.Normal("x", 0.0, tau=lam, shape=40)
    return lam, {"x": X[0]}, 1 + 20.0, 0.5 + (X[0] ** 2).sum() / 2


def bound_of_another(**kwargs):
    """A prior alone, with an unknown whose Jacobian depends on λ: (1/λ) × (its derivative, ∝ λ)."""
    lam = pm.Gamma("lam", 2.0, 4.0, **kwargs)
    pm.Uniform("x", 0.0, lam)
    return lam, {"x_interval__": np.array(0.4)}, 2.0, 4.0


CASES = [
    prior_precision,
    printed_prior,
    precision_of_each_row,
    precision_of_each_entry,
    precision_of_data,
    rate_of_counts,
    rate_of_waits,
    exponential_prior,
    bound_of_another,
]


def shape_and_rate(step, point):
    return step.conditionals[0].fit(point)


def built(case, **kwargs):
    """Return a step, a point, shape and rate of a case."""
    with pm.Model() as model:
        lam, others, shape, rate = case(**kwargs)
        step = GammaGibbs([lam], compile_kwargs=PYTHON)
    return step, {**model.initial_point(), **others}, shape, rate


@pytest.mark.parametrize("transform", [{}, {"default_transform": None}], ids=["log", "none"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_shape_and_rate_are_those_of_the_closed_form(case, transform):
    step, point, shape, rate = built(case, **transform)
    found_shape, found_rate = shape_and_rate(step, point)
    np.testing.assert_allclose(found_shape, shape, rtol=1e-9)
    np.testing.assert_allclose(found_rate, rate, rtol=1e-9)


@pytest.mark.parametrize("start", [1e-12, 1e12])
def test_a_start_far_away_costs_no_digits(start):
    step, point, shape, rate = built(prior_precision)
    point["lam_log__"] = np.array(np.log(start))
    found_shape, found_rate = shape_and_rate(step, point)
    np.testing.assert_allclose([found_shape, found_rate], [shape, rate], rtol=1e-9)


def test_single_precision_models_are_right_to_single_precision():
    with pytensor.config.change_flags(floatX="float32"):
        step, point, shape, rate = built(precision_of_each_row)
    point = {name: np.asarray(value, dtype="float32") for name, value in point.items()}
    found_shape, found_rate = shape_and_rate(step, point)
    np.testing.assert_allclose(found_shape, shape, rtol=1e-5)
    np.testing.assert_allclose(found_rate, rate, rtol=1e-5)
    [drawn] = [step.step(point)[0]["lam_log__"]]
    assert drawn.dtype == "float32"
    assert drawn.shape == (3,)


def draws(step, point, n):
    step.begin_chain(np.random.default_rng(1))
    return np.array([step.step(point)[0][step.names[0]] for _ in range(n)])


@pytest.mark.parametrize("alpha", [0.03, 0.7, 12.0])
def test_draws_have_the_gamma_law_and_no_other(alpha):
    with pm.Model() as model:
        lam = pm.Gamma("lam", alpha, 2.0, shape=500)
        step = GammaGibbs([lam], compile_kwargs=PYTHON)
    logs = draws(step, model.initial_point(), 40).ravel()  # independent
    exact = stats.loggamma(alpha, -np.log(2.0))
    # The Kolmogorov distance of 20,000 draws is above 2.5/√n with probability 7e-6.
    assert stats.kstest(logs, exact.cdf).statistic < 2.5 / np.sqrt(logs.size)
    wrong = stats.loggamma(alpha * 1.1, -np.log(2.0))
    assert stats.kstest(logs, wrong.cdf).statistic > 2.5 / np.sqrt(logs.size)


def test_untransformed_draws_stay_above_zero():
    with pm.Model() as model:
        lam = pm.Gamma("lam", 0.001, 1.0, shape=300, default_transform=None)
        step = GammaGibbs([lam], compile_kwargs=PYTHON)
    assert (draws(step, model.initial_point(), 5) > 0).all()


def test_unknowns_are_drawn_one_after_another_given_the_new_ones():
    """λ₂ is the rate of λ₁: drawn together from old values they would have another law."""
    with pm.Model() as model:
        rate = pm.Gamma("rate", 3.0, 1.0)
        lam = pm.Gamma("lam", 2.0, rate)
        step = GammaGibbs([rate, lam], compile_kwargs=PYTHON)

    class OnlyMeans:
        """With W = 1, each draw is exp of the log that ``gamma`` gives."""

        def random(self, shape):
            return np.zeros(shape)

        def gamma(self, shape):
            return np.asarray(shape)

    step.begin_chain(OnlyMeans())
    new, _ = step.step({"rate_log__": np.array(0.7), "lam_log__": np.array(0.1)})
    assert isinstance(new["rate_log__"], np.ndarray)  # Numba takes no scalars of NumPy
    rate = (3 + 2 + 1) / (1 + np.exp(0.1))
    np.testing.assert_allclose(np.exp(new["rate_log__"]), rate, rtol=1e-9)
    np.testing.assert_allclose(np.exp(new["lam_log__"]), (2 + 1) / rate, rtol=1e-9)
    assert [var.name for var in model.value_vars] == step.names


def test_arguments_reach_their_places():
    with pm.Model() as model:
        lam = pm.Gamma("lam", 1.0, 1.0)
        pm.Normal("x", 0.0, tau=pt.switch(lam > 100, lam**2, lam), observed=X)
    step = GammaGibbs([lam], model=model, compile_kwargs={**PYTHON, "name": "mine"})
    assert step.conditionals[0].function.name == "mine"
    with pytest.raises(ValueError, match="isn't a Gamma distribution"):
        GammaGibbs([lam], model=model, compile_kwargs=PYTHON, initial_point={"lam_log__": 6.0})


def test_data_set_later_are_seen():
    with pm.Model() as model:
        lam = pm.Gamma("lam", 1.0, 1.0)
        data = pm.Data("Y", Y)
        pm.Normal("y", 0.0, tau=lam, observed=data)
        step = GammaGibbs([lam], compile_kwargs=PYTHON)
        pm.set_data({"Y": 2 * Y[:5]})
    shape, rate = shape_and_rate(step, model.initial_point())
    np.testing.assert_allclose(
        [shape, rate], [1 + Y[:5].size / 2, 1 + (2 * Y[:5] ** 2).sum()], rtol=1e-9
    )


def gamma_prior(name="lam", **kwargs):
    return pm.Gamma(name, 1.0, 1.0, **kwargs)


REFUSED = {
    "sigma": (
        lambda: pm.Normal("x", 0, sigma=gamma_prior(), shape=5),
        "full conditional of lam isn't",
    ),
    "half_normal": (
        lambda: pm.Normal("x", 0, tau=pm.HalfNormal("lam", 1), shape=5),
        "lam isn't a Gamma distribution",
    ),
    "half_normal_and_much_data": (
        lambda: pm.Normal("x", 0, tau=pm.HalfNormal("lam", 1), observed=np.ones(10_000)),
        "lam isn't a Gamma distribution",
    ),
    "entries_depend": (
        lambda: pm.Normal("x", 0, tau=gamma_prior(shape=3).sum(), shape=5),
        "entries depend on each other",
    ),
    "improper": (
        lambda: pm.Potential("p", -3 * pt.log(gamma_prior())),
        "shape -2 and rate 1",
    ),
    "interval": (
        lambda: pm.Normal("x", 0, tau=pm.Uniform("lam", 0, 9), shape=5),
        "lam has the transform Interval",
    ),
    "discrete": (lambda: pm.Poisson("lam", 3), "lam is discrete"),
    "probability": (
        lambda: pm.Bernoulli("y", p=gamma_prior(initval=0.5), observed=[1, 1, 1]),
        "has other bounds",
    ),
    "cut": (
        lambda: pm.Potential("p", pt.switch(gamma_prior(initval=0.5) < 1, 0.0, -np.inf)),
        "has other bounds",
    ),
    "jump": (
        lambda: pm.Potential("p", pt.switch(gamma_prior() < 1, 0.0, -5.0)),
        "has other bounds",
    ),
    "bound_of_another": (
        lambda: pm.Uniform("x", 0, gamma_prior(), default_transform=None),
        "has other bounds",
    ),
    "normal": (lambda: pm.Normal("lam", shape=3), "lam isn't above zero"),
    "minibatch": (
        lambda: pm.Normal(
            "y",
            0,
            tau=gamma_prior(),
            observed=pm.Minibatch(Y, batch_size=5),
            total_size=len(Y),
        ),
        "a Gibbs step needs all rows",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_conditionals_are_refused_in_words(what):
    make, words = REFUSED[what]
    with pm.Model() as model:
        make()
        with pytest.raises(ValueError, match=words) as error:
            GammaGibbs([model["lam"]], compile_kwargs=PYTHON)
    assert str(error.value).startswith("GammaGibbs")


def test_every_case_that_is_taken_is_close_to_one_that_is_refused():
    """A negative control: with another power of λ each conditional stops being Gamma."""
    for power, refused in ((1.0, False), (1.05, True)):
        with pm.Model():
            lam = pm.Gamma("lam", 2.0, 3.0)
            pm.Normal("x", 0.0, tau=lam**power, observed=X)
            if refused:
                with pytest.raises(ValueError, match="isn't a Gamma distribution"):
                    GammaGibbs([lam], compile_kwargs=PYTHON)
            else:
                GammaGibbs([lam], compile_kwargs=PYTHON)


def test_bounds_far_away_are_seen_where_a_draw_crosses_them():
    with pm.Model() as model:
        z = pm.Normal("z", initval=-1.0)
        lam = pm.Gamma("lam", 0.2, 1.0)
        pm.Potential("far", pt.switch((z > 0) & (lam > 0.5), -np.inf, 0.0))
        step = GammaGibbs([lam], compile_kwargs=PYTHON)
    point = model.initial_point() | {"lam_log__": np.array(np.log(0.05))}

    def draw_often(z):
        at_z = point | {"z": np.array(z)}
        assert shape_and_rate(step, at_z) == (pytest.approx(0.2), pytest.approx(1.0))
        step.begin_chain(np.random.default_rng(0))
        for _ in range(200):  # 12 % of the draws are above
            step.step(at_z)

    draw_often(-1.0)
    with pytest.raises(SamplingError, match="has other bounds"):
        draw_often(1.0)


def test_a_chain_goes_on_from_draws_of_any_size():
    """Vague priors of groups without data: most draws are smaller than any number."""
    with pm.Model() as model:
        lam = pm.Gamma("lam", 2.0**-10, 2.0**-10, shape=50)
        step = GammaGibbs([lam], compile_kwargs=PYTHON)
    point = model.initial_point()
    step.begin_chain(np.random.default_rng(0))
    for _ in range(20):
        point, _ = step.step(point)
    np.testing.assert_allclose(shape_and_rate(step, point), np.full((2, 50), 2.0**-10), rtol=1e-6)
    logs = point["lam_log__"]
    exact = stats.loggamma(2.0**-10, np.log(2.0**10))
    low = np.log(1e4 * np.finfo(float).tiny)  # what is smaller is drawn as the smallest number
    assert abs((logs < low).mean() - exact.cdf(low)) < 5 * np.sqrt(0.25 / 50)


@pytest.mark.parametrize("floatX", ["float64", "float32"])
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_scale_of_the_unknowns_does_not_matter(scale, floatX):
    x = scale * RNG.normal(size=1000)
    with pytensor.config.change_flags(floatX=floatX), pm.Model() as model:
        lam = pm.Gamma("lam", 1.0, 2.0**-20)
        pm.Normal("x", 0.0, tau=lam, observed=x)
        step = GammaGibbs([lam], compile_kwargs=PYTHON)
    point = {name: np.asarray(value, dtype=floatX) for name, value in model.initial_point().items()}
    exact = 501, 2.0**-20 + (x**2).sum() / 2
    np.testing.assert_allclose(shape_and_rate(step, point), exact, rtol=1e-4)


def conditional_that_changes():
    """Gamma while z ≤ 2."""
    with pm.Model() as model:
        z = pm.Normal("z", 0.0, 1.0)
        lam = pm.Gamma("lam", 1.0, 1.0)
        pm.Normal("x", 0.0, tau=pt.switch(z > 2, lam**2, lam), observed=X)
        step = GammaGibbs([lam], compile_kwargs=PYTHON)
    return step, model.initial_point()


def test_a_conditional_that_stops_being_gamma_stops_the_chain(caplog):
    step, point = conditional_that_changes()
    bad = point | {"z": np.array(2.5)}
    with pytest.raises(SamplingError, match="isn't a Gamma distribution"):
        step.step(bad)
    step.begin_chain(np.random.default_rng(0))
    step.step(point)
    with pytest.raises(SamplingError) as error:  # while tuning
        step.step(bad)
    assert not isinstance(error.value, SamplingStopped)
    step.begin_chain(np.random.default_rng(0))
    step.step(point)
    step.stop_tuning()
    with pytest.raises(SamplingStopped), caplog.at_level("ERROR"):  # draws are kept
        step.step(bad)
    assert "GammaGibbs stopped at draw 1 of the chain" in caplog.text


def test_a_gradient_that_is_not_finite_is_named():
    step, point, *_ = built(prior_precision)
    with pytest.raises(SamplingError, match="its gradient in lam, isn't finite"):
        step.step(point | {"x": np.full(X.shape, np.nan)})


def normal_gamma(n=200, seed=3):
    """Rows N(mu, 1/tau) with a flat prior for mu and tau ~ Gamma(1, 1), and the law of tau given y."""
    y = np.random.default_rng(seed).normal(1.0, 0.5, n)
    with pm.Model() as model:
        mu = pm.Flat("mu")
        tau = pm.Gamma("tau", 1.0, 1.0)
        pm.Normal("y", mu, tau=tau, observed=y)
    return model, mu, tau, stats.gamma(1 + (n - 1) / 2, scale=1 / (1 + y.var() * n / 2))


# Quickly: the conditional is exact in test_shape_and_rate_are_those_of_the_closed_form.
@pytest.mark.slow
@pytest.mark.parametrize("sampler", [SGHMC, pm.NUTS], ids=["SGHMC", "NUTS"])
def test_the_joint_posterior_is_right(sampler):
    """The marginal law of tau is Gamma, too, with half a degree less; draws are nearly independent."""
    model, mu, tau, exact = normal_gamma()
    settings = {"compile_kwargs": PYTHON}
    if (
        sampler is SGHMC
    ):  # all rows: BAOAB has no bias then, and ten such steps forget the last draw
        settings |= {"learning_rate": 3e-4, "friction": 0.6, "preconditioner": None, "n_steps": 10}
    with model:
        steps = [sampler([mu], **settings), GammaGibbs([tau], compile_kwargs=PYTHON)]
        idata = pm.sample(1000, tune=200, chains=2, cores=1, step=steps, random_seed=1, **QUIET)
    tau = idata.posterior["tau"].values
    # tau depends on mu only through mu's own variance; 2,000 draws, nearly independent
    error = exact.std() / np.sqrt(tau.size)
    assert abs(tau.mean() - exact.mean()) < 5 * error
    kurtosis = float(exact.stats("k"))
    assert abs(tau.var() / exact.var() - 1) < 5 * np.sqrt((kurtosis + 2) / tau.size)
    wrong = stats.gamma(*exact.args, scale=exact.kwds["scale"] * 1.02)
    assert abs(tau.mean() - wrong.mean()) > 5 * error


@pytest.fixture(scope="module")
def mixed():
    """SGLD and NUTS beside GammaGibbs in one model, from one and from two processes."""
    with pm.Model():
        lam = pm.Gamma("lam", 1.0, 1.0, shape=2)
        x = pm.Normal("x", 0.0, tau=lam, shape=2)
        sigma = pm.HalfNormal("sigma", 1.0)
        pm.Normal("y", x.sum(), sigma, observed=Y[:, :2])
        settings = {"batch_size": 5, "learning_rate": 1e-4, "compile_kwargs": PYTHON}
        steps = [
            SGLD([x], gradient="plain", **settings),
            GammaGibbs([lam], compile_kwargs=PYTHON),
            pm.NUTS([sigma], compile_kwargs=PYTHON),
        ]
        settings = {"tune": 10, "chains": 2, "step": steps, "random_seed": 4, **QUIET}
        return {cores: pm.sample(20, cores=cores, **settings) for cores in (2, 1)}


def test_same_seed_same_draws_on_one_core_or_two(mixed):
    one, two = (mixed[cores].posterior["lam"].values for cores in (1, 2))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one[0], one[1])
    assert len(np.unique(one)) == one.size


def test_progress_bars_show_it_alone_and_beside_others():
    model, mu, tau, _ = normal_gamma()
    with model:
        settings = {"batch_size": 20, "learning_rate": 1e-5, "compile_kwargs": PYTHON}
        gibbs = GammaGibbs([tau], compile_kwargs=PYTHON)
        steps = [
            SGHMC([mu], friction=0.1, noise_estimate=None, gradient="plain", **settings),
            gibbs,
        ]
        for cores in (1, 2):
            idata = pm.sample(
                5, tune=5, chains=2, cores=cores, step=steps, compute_convergence_checks=False
            )
    assert idata.posterior["tau"].shape == (2, 5)
    with pm.Model():
        lam = gamma_prior()
        idata = pm.sample(
            5, tune=5, chains=1, step=GammaGibbs([lam]), compute_convergence_checks=False
        )
    assert idata.posterior["lam"].shape == (1, 5)


def test_blocked_false_makes_a_step_for_each():
    with pm.Model() as model:
        lams = [gamma_prior(name) for name in ("a", "b")]
        compound = GammaGibbs(lams, blocked=False, compile_kwargs=PYTHON)
    assert [step.names for step in compound.methods] == [["a_log__"], ["b_log__"]]
    new, _ = compound.step(model.initial_point())
    assert new["a_log__"] != 0
    assert new["b_log__"] != 0


def test_a_state_taken_up_gives_the_same_draws():
    step, point, *_ = built(prior_precision)
    step.begin_chain(np.random.default_rng(2))
    point, _ = step.step(point)
    state = step.sampling_state
    assert state.n_draws == 1
    next_draw, _ = step.step(point)
    other = built(prior_precision)[0]
    other.sampling_state = state
    assert equal_dataclass_values(other.sampling_state, state)
    assert other.step(point)[0]["lam_log__"] == next_draw["lam_log__"]


@pytest.mark.parametrize("copier", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_pickled_steps_draw_the_same_and_hold_no_model(copier):
    step, point, *_ = built(precision_of_data)
    copy = pickle.loads(copier.dumps(step))
    assert not any("newargs" in name for name in vars(copy))
    for one in (step, copy):
        one.begin_chain(np.random.default_rng(5))
    assert copy.step(point)[0]["lam_log__"] == step.step(point)[0]["lam_log__"]


def test_pymc_never_assigns_it():
    assert GammaGibbs.competence(None, True) == SGHMC.competence(None, True)


def test_what_seeds_no_generator_is_refused_by_name():
    with pm.Model():
        tau = pm.Gamma("tau", 1.0, 1.0)
        pm.Normal("y", 0.0, tau=tau, observed=[0.5, -1.0])
        with pytest.raises(ValueError, match="rng='a'"):
            GammaGibbs([tau], rng="a")
