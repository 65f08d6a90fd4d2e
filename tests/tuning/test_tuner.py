"""Settings that a tuner finds, on a made-up model: its density is a formula, nothing is compiled.

Data, orders, passes and gradients are the package's own; only the `Density` is another.
"""

import copy
import itertools

from dataclasses import replace

import numpy as np
import pytest

from closed_forms import inflation, relaxation

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.density import Density
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.models.contract import Group
from pymc_sghmc.rows.data import InMemory
from pymc_sghmc.rows.epochs import Epochs
from pymc_sghmc.rows.orders import WithReplacement
from pymc_sghmc.samplers import baoab, sghmc, sgld
from pymc_sghmc.schedules import Phase
from pymc_sghmc.tuning import setups
from pymc_sghmc.tuning.budget import WIDER, WITHOUT_NOISE, critical_friction, score
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE, ByHand, ChainTuning
from pymc_sghmc.tuning.chooser import MAX_DIVERGENCES, OFTEN, SELDOM
from pymc_sghmc.tuning.linear_step import Rule
from pymc_sghmc.tuning.noise_estimates import GivenNoise, TunedNoise
from pymc_sghmc.tuning.options import options
from pymc_sghmc.tuning.settings import Settings
from pymc_sghmc.tuning.setup import set_up
from pymc_sghmc.tuning.setup_request import SetupRequest
from pymc_sghmc.tuning.sizes import RowChoice
from pymc_sghmc.tuning.tuner import Points, Tuner

N_ROWS, BATCH_SIZE, D = 400, 20, 2
MANY_ROWS = 100_000  # of which all cost more than some
PRIOR = 1.0  # precision of the prior at zero
BAOAB, EULER = Rule(baoab.update, sghmc.SGHMCState), Rule(sghmc.update, sghmc.SGHMCState)
SGLD = Rule(sgld.update, sgld.SGLDState)
NO_ESTIMATE = GivenNoise(0.0, is_known=False)


class Valleys(Density):
    """Rows c, y with log-likelihoods −½ Σ_j c_j (x_j + a − y_j)², where another step may sample a.

    The gradient is linear. Where a isn't finite, the log-density isn't.
    """

    d = D
    dtype = weights_dtype = np.dtype(float)

    def __init__(self, a=None):
        if a is not None:
            self.given_types = [("a", float)]
            self.needed_by_likelihood = ["a"]
            self.condition_on({"a": a})

    def __call__(self, position, prior_weight, row_weights, rows, arrays):
        [weights], [idx], (c, y) = row_weights, rows, arrays
        [a] = self.others or [0.0]
        shift = position + a - y[idx]
        logp = -0.5 * weights @ (c[idx] * shift**2).sum(axis=1)
        grad = -weights @ (c[idx] * shift)
        prior = -0.5 * PRIOR * position @ position
        return logp + prior_weight * prior, grad - prior_weight * PRIOR * position


def rows(scatter=3.0, seed=0, n=N_ROWS):
    """Curvatures and middles of the rows; ``scatter`` is the sd of the middles."""
    rng = np.random.default_rng(seed)
    return rng.gamma(2.0, 1.0, (n, D)), 1.5 + scatter * rng.standard_normal((n, D))


def crossing_rows():
    """Rows whose gradients agree at one point and differ at the mode, and that point."""
    (c, _), there = rows(), np.full(D, 3.0)
    return (c, there - 2.0 / c), there


def mode_of(arrays, a=0.0):
    c, y = arrays
    return (c * (y - a)).sum(axis=0) / curvature_of(arrays)


def curvature_of(arrays):
    return arrays[0].sum(axis=0) + PRIOR


def tuner_of(
    arrays=None,
    *,
    a=None,
    batch_size=BATCH_SIZE,
    kind="auto",
    rule=BAOAB,
    eta=None,
    alpha=None,
    noise=NO_ESTIMATE,
    temperature=1.0,
    preconditioner="auto",
    centre=None,
    row_choice=RowChoice.AS_GIVEN,
):
    arrays = rows() if arrays is None else arrays
    group = Group(len(arrays[0]), batch_size, [], [None, None], {"y": None})
    data = InMemory([group], list(arrays), np.dtype(float), lambda array: array)
    # without replacement: by leverage control variates would compile what they need of each row
    order = Epochs(data) if row_choice is RowChoice.AS_GIVEN else WithReplacement(data)
    gradient = MinibatchGradient(Valleys(a), data, order)
    control_variates = None
    if kind != "plain" and not gradient.is_exact:
        control_variates = ControlVariates(gradient)
    settings = Settings(
        rule,
        schedule=None if eta is None else lambda t: Phase(eta),
        friction=alpha,
        noise=noise,
        target_bias=0.05,
        temperature=temperature,
    )
    return Tuner(
        gradient,
        (control_variates, None),
        settings,
        preconditioner=preconditioner,
        kind=kind,
        points=Points(np.zeros(D), reference=centre),
        row_choice=row_choice,
    )


def begun(tuner, seed=0, position=None):
    """Tuning of a chain at its first draw, and where that begins."""
    tuner.begin_chain()
    rng = np.random.default_rng(seed)
    return tuner.begin_draw(None, np.zeros(D) if position is None else position, rng)


def measure(tuner, tuning, n, *, first=1, mean=None, temperature=1.0, position=None):
    """Learn from the draws ``first`` to ``n``; return tunings and states after each."""
    rng, out = np.random.default_rng(1), []
    mean = tuner.setup.fit.mean if mean is None else mean
    for n_tuned in range(first, n + 1):
        phi = tuner.setup.metric.from_theta(mean if position is None else position)
        tuning, state = tuner.chooser.measured(
            tuning,
            tuner.target(tuning),
            sghmc.SGHMCState(phi, np.zeros(D)),
            temperature=temperature,
            n_tuned=n_tuned,
            mean=mean,
            rng=rng,
        )
        out.append((tuning, state))
    return out


@pytest.fixture
def made(monkeypatch):
    """Starts of the set-ups that are made, not only taken into use."""
    starts, set_up = [], setups.set_up

    def counted(gradient, expansions, start, *args, **kwargs):
        starts.append(start)
        return set_up(gradient, expansions, start, *args, **kwargs)

    monkeypatch.setattr(setups, "set_up", counted)
    return starts


# --- First settings


def test_setup_finds_centre_coordinates_and_the_noise_there():
    arrays = rows()
    tuner = tuner_of(arrays)
    tuner.prepare()
    sd = curvature_of(arrays) ** -0.5
    setup = tuner.setup
    assert np.abs((setup.fit.mean - mode_of(arrays)) / sd).max() < 0.1
    np.testing.assert_allclose(setup.metric.factor, np.diag(sd), atol=1e-6 * sd.max())
    assert setup.fit.is_mode
    assert setup.curvature.largest == setup.curvature.smallest == 1.0
    # N²/n times the variance of a row's gradient, at draws from the Gaussian, in φ: of 20 probes
    # with nine degrees of freedom each four standard errors
    c, y = arrays
    noise = N_ROWS**2 / BATCH_SIZE * sd**2 * np.var(c * (mode_of(arrays) - y), axis=0)
    of_differences = N_ROWS**2 / BATCH_SIZE * sd**4 * np.var(c, axis=0)
    np.testing.assert_allclose(setup.noise.plain, noise + of_differences, rtol=4 * (2 / 180) ** 0.5)
    # those of the differences vary with the draws' squared distances, too
    np.testing.assert_allclose(setup.noise.first_order, of_differences, rtol=1.0)


@pytest.mark.parametrize("rule", [BAOAB, EULER, SGLD], ids=["baoab", "euler", "sgld"])
def test_first_settings_spend_the_budget(rule):
    tuner = tuner_of(kind="plain", rule=rule)
    tuning = tuner.prepare()
    name = {BAOAB: "baoab", EULER: "euler", SGLD: "sgld"}[rule]
    eta, alpha, V = tuning.learning_rate, tuning.friction, tuner.setup.noise.plain.max()
    assert 0 < eta < MAX_LEARNING_RATE
    assert tuning.bias == pytest.approx(0.05, rel=1e-9)
    assert inflation(name, eta, alpha, V) == pytest.approx(0.05, rel=1e-9)
    assert relaxation(name, eta, alpha, 1 / WIDER) == pytest.approx(tuning.rate, rel=1e-6)
    assert alpha == (None if rule is SGLD else critical_friction(eta))


def test_an_exact_gradient_gets_the_largest_rate():
    tuner = tuner_of(batch_size=N_ROWS)
    tuning = tuner.prepare()
    assert tuner.gradient.is_exact
    assert tuning.order == 0
    assert tuning.learning_rate == MAX_LEARNING_RATE
    assert tuning.bias == pytest.approx(0, abs=1e-9)
    assert not tuning.noise.any()


@pytest.mark.parametrize(
    ("n", "scatter", "takes_all"), [(1200, 0.07, True), (MANY_ROWS, 0.05, False)]
)
def test_all_rows_are_taken_where_minibatches_save_little(n, scatter, takes_all):
    tuner = tuner_of(rows(scatter, n=n), batch_size=500, kind="plain", row_choice=RowChoice.FREE)
    tuning = tuner.prepare()
    assert tuner.takes_all_rows(tuning) == takes_all
    assert (tuning.order == 0 and not tuning.noise.any()) == takes_all
    others = options(tuner.setup, tuner.setups.request, True, tuner.gradient.data)
    scores = [score(tuner.settings.chosen(other, tuner.setup)) for other in others]
    # of the smaller data, too, there is a choice that takes less work for the same draws
    assert 1.0 < max(scores) / score(tuning) < WITHOUT_NOISE or not takes_all


@pytest.mark.parametrize("n_tuned", [100, 1000])
def test_noise_is_measured_more_rarely_after_many_draws(n_tuned):
    """Each measurement takes as long as many steps, and the last of hundreds says little."""
    tuner = tuner_of(kind="plain")
    first = begun(tuner).tuning
    *_, (learnt, _) = measure(tuner, first, n_tuned)
    n = learnt.n_measured - first.n_measured
    often = OFTEN - first.n_measured
    assert n == min(n_tuned, often) + sum(t % SELDOM == 0 for t in range(often + 1, n_tuned + 1))
    # the mean of squares with nine degrees of freedom, with weights growing as t³
    V = tuner.setup.noise.plain
    error = (2 / 9 * 16 / 7 / n) ** 0.5
    assert np.abs(learnt.noise / V - 1).max() < 4 * np.hypot(error, (2 / 180) ** 0.5)


def test_a_chain_with_more_noise_than_at_its_fit_takes_more_rows():
    """Rows have curvatures of their own, so that their gradients differ more farther out."""
    tuner = tuner_of(rows(0.05, n=MANY_ROWS), kind="plain", row_choice=RowChoice.FREE)
    first = begun(tuner).tuning
    fit = tuner.setup.fit
    [*_, (near, _)] = measure(tuner, first, 8)
    assert near.rows == first.rows < MANY_ROWS
    far = fit.mean + 1000 * fit.metric.matrix().sum(axis=1)
    [*_, (learnt, _)] = measure(tuner, first, 8, position=far)
    assert learnt.rows > first.rows


def test_a_chain_keeps_a_given_number_of_rows_as_long_as_it_does_not_diverge():
    """However noisy they are: a shorter step makes up for that."""
    tuner = tuner_of(rows(0.05, n=MANY_ROWS), kind="plain", row_choice=RowChoice.AT_LEAST)
    first = begun(tuner).tuning
    fit = tuner.setup.fit
    far = fit.mean + 1000 * fit.metric.matrix().sum(axis=1)
    [*_, (learnt, _)] = measure(tuner, first, 8, position=far)
    assert first.rows is learnt.rows is None
    assert learnt.learning_rate < first.learning_rate
    diverged = tuner.chooser.slower(learnt, tuner.initial)
    assert diverged.rows > tuner.given_rows == BATCH_SIZE


@pytest.mark.parametrize("row_choice", [RowChoice.FREE, RowChoice.AT_LEAST])
def test_a_chain_that_diverges_on_minibatches_goes_on_with_all_rows(row_choice):
    tuner = tuner_of(rows(0.05, n=MANY_ROWS), kind="plain", row_choice=row_choice)
    tuning = begun(tuner).tuning
    assert (tuning.rows or tuner.given_rows) < MANY_ROWS
    while (tuning.rows or tuner.given_rows) < MANY_ROWS:
        slower = tuner.chooser.slower(tuning, tuner.initial)
        assert slower.n_divergences == tuning.n_divergences + 1
        tuning = slower
    assert tuning.n_divergences < MAX_DIVERGENCES
    assert tuning.limit == MAX_LEARNING_RATE
    assert not tuning.noise.any()
    tuner.target(tuning)
    assert tuner.gradient.is_exact
    slowed = tuner.chooser.slower(tuning, tuner.initial)
    assert slowed.limit == MAX_LEARNING_RATE / 4  # which no noise explains


def test_an_estimate_leaves_less_noise_to_choose_by():
    with_one, without = (tuner_of(kind="plain", noise=n) for n in (TunedNoise(), NO_ESTIMATE))
    assert with_one.prepare().learning_rate > 1.5 * without.prepare().learning_rate


def test_a_start_that_differs_by_rounding_has_the_set_up_that_is_kept(made):
    """The way into other coordinates and back doesn't end at the very same numbers."""
    tuner = tuner_of()
    tuner.prepare()
    known = len(made)
    begun(tuner, position=np.full(D, 1e-13))
    assert len(made) == known
    begun(tuner, position=np.full(D, 1e-3))
    assert len(made) == known + 1


def test_nothing_is_set_up_where_all_is_given(made):
    P = np.array([0.002, 0.001])
    tuner = tuner_of(kind="plain", eta=0.01, alpha=0.2, preconditioner=P)
    position = np.array([5.0, 6.0])
    tuning, start = begun(tuner, position=position)
    assert not tuner.needs_setup
    assert not tuner.is_tuned
    assert not made
    assert tuning == ByHand()
    assert start is position
    assert tuner.setup is None
    np.testing.assert_array_equal(tuner.target(tuning).coordinates.scales, np.sqrt(P))


GIVEN = [{"eta": 0.003}, {"alpha": 0.37}, {"eta": 0.003, "alpha": 0.37}]


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("preconditioner", ["auto", "diag"])
def test_given_settings_stay_and_the_others_are_found(given, preconditioner):
    tuner = tuner_of(preconditioner=preconditioner, **given)
    first, _ = begun(tuner)
    for tuning in [first, *(tuning for tuning, _ in measure(tuner, first, 40))]:
        assert tuning.learning_rate == given.get("eta", tuning.learning_rate)
        assert tuning.friction == given.get("alpha", tuning.friction)
        assert 0 < tuning.learning_rate <= MAX_LEARNING_RATE
        assert 0 < tuning.friction <= 1
        if "eta" not in given:
            assert tuning.bias <= 0.05 * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["plain", "control_variates"])
def test_a_given_kind_of_gradient_stays(kind):
    arrays, there = crossing_rows()  # where plain minibatches are better
    tuner = tuner_of(arrays, kind=kind)
    tuning, _ = begun(tuner)
    for position in (None, there):
        kinds = {t.order for t, _ in measure(tuner, tuning, 16, position=position)}
        assert kinds == {tuning.order} == {kind == "control_variates"}


@pytest.mark.parametrize("rule", [BAOAB, EULER], ids=["baoab", "euler"])
@pytest.mark.parametrize(
    ("beta_hat", "eta"),
    [(0.05, None), (0.3, 1e-5), (0.9, 1e-5), (0.9, None), (np.array([0.4, 0.2]), 1e-5)],
    ids=str,
)
def test_friction_stays_above_a_given_noise_estimate(rule, beta_hat, eta):
    noise = GivenNoise(beta_hat)
    tuner = tuner_of(kind="plain", rule=rule, noise=noise, eta=eta, preconditioner="diag")
    first, _ = begun(tuner)
    for tuning in (first, measure(tuner, first, 16)[-1][0]):
        phase = Phase(tuning.learning_rate)
        arguments = tuner.settings.arguments(tuning, None, phase, np.dtype(float), True)
        np.testing.assert_array_equal(arguments["noise_estimate"], beta_hat)
        assert np.max(beta_hat) <= arguments["friction"] <= 1


# --- The choice between gradients


def test_the_gradient_that_mixes_faster_is_chosen():
    for scatter, expected in ((3.0, True), (0.0, False)):
        tuner = tuner_of(rows(scatter))
        options = [
            tuner.settings.chosen(ChainTuning(order=order, noise=noise), tuner.setup)
            for order, noise in enumerate(tuner_setup_noise(tuner)[:2])
        ]
        chosen = tuner.prepare()
        assert chosen.order == expected
        assert score(chosen) == max(map(score, options)) > min(map(score, options))
        target = tuner.target(chosen)
        assert target.gradient is (tuner.gradients[1] if expected else tuner.gradient)


def tuner_setup_noise(tuner):
    tuner.prepare()
    return tuner.setup.noise


def test_far_from_the_centre_the_other_gradient_is_taken_and_near_it_again():
    arrays, there = crossing_rows()
    tuner = tuner_of(arrays)
    tuning, _ = begun(tuner)
    assert tuning.order == 1
    [*_, (far, _)] = measure(tuner, tuning, 8, position=there)
    assert far.order == 0
    assert far.n_measured == 4
    # plain minibatches have no noise there, but they do where the posterior is
    np.testing.assert_array_equal(far.noise, tuner.setup.noise.plain)
    # at the centre differences have no noise: what counts is what they have around it
    [*_, (back, _)] = measure(tuner, far, 8)
    assert back.order == 1
    np.testing.assert_array_equal(back.noise, tuner.setup.noise.first_order)


# --- While tuning


def test_settings_are_chosen_anew_after_8_16_32_draws():
    tuner = tuner_of(kind="plain")
    first, _ = begun(tuner)
    tunings = [first, *(tuning for tuning, _ in measure(tuner, first, 40))]
    noises, rates = ([getattr(t, name) for t in tunings] for name in ("noise", "learning_rate"))
    assert not any(map(np.array_equal, noises, noises[1:]))  # measured at each draw
    assert [n for n in range(1, 41) if rates[n] != rates[n - 1]] == [8, 16, 32]
    for n in (8, 16, 32):
        expected = tuner.settings.chosen(tunings[n], tuner.setup)
        assert (rates[n], tunings[n].friction) == (expected.learning_rate, expected.friction)
    assert tunings[40].n_measured == first.n_measured + 40


def test_end_of_tuning_is_a_choice_by_all_measurements():
    tuner = tuner_of(kind="plain")
    tuning, position = begun(tuner)
    tuning = measure(tuner, tuning, 13)[-1][0]
    revised = tuner.chooser.revised(tuning, position, np.random.default_rng(0))
    assert revised.learning_rate != tuning.learning_rate
    assert inflation("baoab", revised.learning_rate, revised.friction, tuning.noise.max()) == (
        pytest.approx(0.05, rel=1e-9)
    )
    np.testing.assert_array_equal(revised.noise, tuning.noise)


def test_control_variates_are_trusted_no_further_than_around_the_centre():
    # At the centre itself they have no noise at all.
    tuner = tuner_of(kind="control_variates")
    first, _ = begun(tuner)
    tuning = measure(tuner, first, 64)[-1][0]
    assert tuning.noise.max() < 1e-2 * first.noise.max()
    assert tuning.learning_rate == first.learning_rate


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_chain_is_hot_by_its_own_temperature(temperature):
    for measured, halvings in ((temperature, 0), (1.2 * temperature, 2)):
        tuner = tuner_of(temperature=temperature)
        tuning, _ = begun(tuner)
        tuning = measure(tuner, tuning, 64, temperature=measured)[-1][0]
        assert tuning.limit == MAX_LEARNING_RATE / 2**halvings
        assert tuning.learning_rate <= tuning.limit


def moved_by(sds, n=32, **settings):
    """Tuner and last tuning and state, where the mean of the draws is some sds from the centre."""
    tuner = tuner_of(**settings)
    tuning, _ = begun(tuner)
    centre = tuner.setup.fit
    mean = centre.mean + sds * centre.metric.factor @ np.array([0.8, -0.6])
    before = tuner.setup
    tuning, state = measure(tuner, tuning, n, mean=mean)[-1]
    return tuner, before, mean, tuning, state


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_mean_that_left_the_centre_becomes_the_centre_after_32_draws(temperature):
    tuner, before, mean, tuning, state = moved_by(5.0, temperature=temperature)
    setup = tuner.setup
    np.testing.assert_array_equal(setup.fit.mean, mean)
    assert setup is not before
    assert state is None
    expected = SetupRequest(start=mean, metric=before.fit.metric, max_order=2, conditioned_on=())
    assert tuning.request == expected
    np.testing.assert_array_equal(tuner.gradients[1].anchor.centre, mean)
    assert tuning.temperatures.n == 0
    assert tuning.limit == MAX_LEARNING_RATE


@pytest.mark.parametrize(("n", "moves"), [(32, False), (64, True)])
def test_a_mean_of_few_draws_may_be_farther_by_chance(n, moves):
    tuner, before, _, _, state = moved_by(2.2, n)  # 1.76 in the direction that goes furthest
    assert (tuner.setup is not before) == (state is None) == moves


@pytest.mark.parametrize("n", [128, 384, 768])
def test_a_late_mean_becomes_the_centre_before_twice_as_many_draws(n):
    """A chain that needs long to come to the posterior has settings of that place in the end."""
    tuner = tuner_of()
    tuning, _ = begun(tuner)
    before = tuner.setup
    mean = before.fit.mean + 5 * before.fit.metric.factor @ np.array([0.8, -0.6])
    tuning, _ = measure(tuner, tuning, 2 * n // 3)[-1]
    tuning, _ = measure(tuner, tuning, n - 1, first=2 * n // 3 + 1, mean=mean)[-1]
    assert tuner.setup is before
    measure(tuner, tuning, n, first=n, mean=mean)
    np.testing.assert_array_equal(tuner.setup.fit.mean, mean)


@pytest.mark.parametrize(
    ("sds", "n", "settings"),
    [
        (5.0, 31, {}),
        (1.6, 32, {}),  # 1.28 in the direction that goes furthest
        (5.0, 32, {"eta": 0.001}),  # whose unit is that of the coordinates
        (5.0, 32, {"centre": np.array([1.5, 1.5])}),
    ],
    ids=str,
)
def test_the_centre_stays(sds, n, settings):
    tuner, before, _, _, state = moved_by(sds, n, **settings)
    assert tuner.setup is before
    assert state is not None


def test_a_centre_where_nothing_is_finite_is_not_taken():
    tuner = tuner_of()
    tuning, _ = begun(tuner)
    before = tuner.setup
    *_, (tuning, state) = measure(
        tuner, tuning, 32, mean=np.full(D, 1e200), position=tuner.setup.fit.mean
    )
    assert tuner.setup is before
    assert state is not None
    assert tuning.request.metric is None
    np.testing.assert_array_equal(tuner.gradients[1].anchor.centre, before.fit.mean)


def limited(setup, far_out):
    return replace(setup, limits=setup.limits._replace(far_out=far_out))


@pytest.mark.parametrize(("far_limit", "is_taken"), [(0.03, True), (0.02, False)])
def test_a_centre_around_which_steps_would_be_far_shorter_is_not_taken(
    far_limit, is_taken, monkeypatch
):
    tuner = tuner_of()
    tuning, _ = begun(tuner)
    before = tuner.setups.current = limited(tuner.setup, 0.1)
    anchor = tuner.gradients[1].anchor

    def stiff(*args, **kwargs):
        return limited(set_up(*args, **kwargs), far_limit)

    monkeypatch.setattr(setups, "set_up", stiff)
    mean = before.fit.mean + 5 * before.fit.metric.factor @ np.array([0.8, -0.6])
    tuning, state = measure(tuner, tuning, 32, mean=mean)[-1]
    assert (tuner.setup is not before) == (state is None) == is_taken
    assert (tuning.request.metric is None) == (not is_taken)
    assert tuning.request is tuner.setups.request
    assert (tuner.gradients[1].anchor is anchor) == (not is_taken)


@pytest.mark.parametrize(("batch_size", "is_taken"), [(N_ROWS, False), (100, True)])
def test_scales_that_serve_are_not_exchanged_for_some_that_do_not(
    batch_size, is_taken, monkeypatch
):
    """With minibatches they may be: control variates have less noise around the draws' mean."""
    tuner = tuner_of(batch_size=batch_size)
    tuning, _ = begun(tuner)
    before = tuner.setup
    assert before.fit.is_mode

    def doubtful(*args, **kwargs):
        made = set_up(*args, **kwargs)
        return replace(made, fit=replace(made.fit, is_mode=False))

    monkeypatch.setattr(setups, "set_up", doubtful)
    mean = before.fit.mean + 5 * before.fit.metric.factor @ np.array([0.8, -0.6])
    _, state = measure(tuner, tuning, 32, mean=mean)[-1]
    assert (tuner.setup is not before) == (state is None) == is_taken


def test_number_of_divergences_outlives_a_moved_centre():
    tuner = tuner_of()
    tuning, _ = begun(tuner)
    tuning = tuner.chooser.slower(tuning, tuner.initial)
    mean = tuner.setup.fit.mean + 1.0
    assert measure(tuner, tuning, 32, mean=mean)[-1][0].n_divergences == 1


# --- Chains that diverge


def test_each_divergence_costs_a_quarter_of_the_rate_and_the_last_one_the_chain():
    tuner = tuner_of(batch_size=N_ROWS)
    tuning, _ = begun(tuner)
    for n in range(1, MAX_DIVERGENCES + 1):
        tuning = tuner.chooser.slower(tuning, tuner.initial)
        assert tuning.learning_rate == tuning.limit == MAX_LEARNING_RATE / 4**n
        assert tuning.n_divergences == n
    assert tuner.chooser.slower(tuning, tuner.initial) is None


def test_a_given_rate_is_not_slowed_down_and_no_chain_before_its_settings():
    tuner = tuner_of(eta=0.003)
    tuning, _ = begun(tuner)
    assert tuner.chooser.slower(tuning, tuner.initial) is None
    assert tuner_of().chooser.slower(ByHand(), np.zeros(D)) is None
    assert not tuner.departures.is_lost(ByHand(), None, np.full(D, 1e9))


def test_lost_is_a_thousand_standard_deviations_off():
    tuner = tuner_of()
    begun(tuner)
    centre = tuner.setup.fit
    for sds, lost in ((-999.0, False), (-1001.0, True), (999.0, False), (1001.0, True)):
        position = centre.mean + centre.metric.factor @ np.array([0.0, sds])
        assert bool(tuner.departures.is_lost(ByHand(), None, position)) is lost, sds


def test_where_others_have_moved_the_mode_a_slower_chain_is_set_up_there(made):
    arrays = rows()
    tuner = tuner_of(arrays, a=0.0)
    tuning, _ = begun(tuner)
    tuner.gradient.density.condition_on({"a": 4.0})
    slower = tuner.chooser.slower(tuning, tuner.initial)
    assert len(made) == 2
    assert slower.request.conditioned_on == (4.0,)
    sd = curvature_of(arrays) ** -0.5
    assert np.abs((tuner.setup.fit.mean - mode_of(arrays, 4.0)) / sd).max() < 0.1
    assert (slower.limit, slower.n_divergences) == (MAX_LEARNING_RATE / 4, 1)
    tuner.gradient.density.condition_on({"a": np.nan})
    assert tuner.chooser.slower(slower, tuner.initial) is None  # nothing is finite at its start


# --- Chains that begin, and go on


def test_chains_from_the_initial_point_share_its_setup(made):
    tuner = tuner_of()
    tuner.prepare()
    first = tuner.setup
    for seed in (1, 2):
        tuning, _ = begun(tuner, seed)
        assert tuner.setup is first
    far, _ = begun(tuner, 3, np.full(D, 50.0))
    assert tuner.setup is not first
    assert len(made) == 2
    assert not np.array_equal(far.request.start, tuning.request.start)
    begun(tuner, 4)
    assert tuner.setup is first
    assert tuner.gradients[1].anchor is first.anchors[0]
    assert len(made) == 2


def test_new_data_need_a_new_setup(made):
    tuner = tuner_of()
    tuner.prepare()
    new = rows(seed=1)
    tuner.gradient.data.sources = list(new)
    begun(tuner)
    assert len(made) == 2
    sd = curvature_of(new) ** -0.5
    assert np.abs((tuner.setup.fit.mean - mode_of(new)) / sd).max() < 0.1


@pytest.mark.parametrize("temperature", [1.0, 2.25])
def test_chains_start_at_points_of_their_own_twice_as_wide_as_the_posterior(temperature):
    tuner = tuner_of(temperature=temperature)
    begins = [begun(tuner, seed)[1] for seed in range(3)]
    starts = np.array([tuner.setups.start(np.random.default_rng(seed)) for seed in range(1000)])
    np.testing.assert_array_equal(begins, starts[:3])
    centre = tuner.setup.fit
    z = (starts - centre.mean) / np.diag(centre.metric.factor)
    assert len(np.unique(starts)) == starts.size
    # 2000 squares of mean 4T, within 4.5 standard errors; and their mean
    assert abs(np.mean(z**2) - 4 * temperature) < 4.5 * 4 * temperature * np.sqrt(2 / z.size)
    assert abs(z.mean()) < 4.5 * np.sqrt(4 * temperature / z.size)


@pytest.mark.parametrize("kind", ["plain", "control_variates"])
def test_a_chain_with_a_given_rate_starts_where_it_is_told_unless_its_gradient_would_be_noisy(kind):
    tuner = tuner_of(kind=kind, eta=0.003)
    position = np.array([5.0, 6.0])
    _, start = begun(tuner, position=position)
    assert np.array_equal(start, position) == (kind == "plain")
    assert tuner.setups.distance(start) < 20 or kind == "plain"


def test_a_bad_start_is_an_error():
    tuner = tuner_of(a=np.nan)
    with pytest.raises(NonFinite):
        begun(tuner)
    tuner.gradient.density.condition_on({"a": 0.0})
    assert begun(tuner)[0].learning_rate > 0


@pytest.fixture
def restored(made):
    """A tuner on its own chain, and the tuning of another's, with a set-up of its own."""
    arrays = rows()
    there = tuner_of(arrays, a=1.0)
    tuning, position = begun(there, position=np.full(D, 9.0))
    here = tuner_of(arrays, a=0.0)
    here.prepare()
    made.clear()
    return here, there, copy.deepcopy(tuning), position


def test_a_restored_chain_gets_the_setup_it_was_saved_with_at_its_next_draw(restored, made):
    here, there, tuning, position = restored
    first, rng = here.setup, np.random.default_rng(0)
    here.begin_chain()
    here.target(tuning)
    assert here.setup is first
    assert not made
    for _ in range(3):
        assert here.begin_draw(tuning, position, rng) == (tuning, position)
    np.testing.assert_array_equal(made, [np.full(D, 9.0)])  # once
    np.testing.assert_array_equal(here.setup.fit.mean, there.setup.fit.mean)
    assert here.setup.fit.metric == there.setup.fit.metric
    for name in ("plain", "first_order"):
        a, b = (getattr(tuner.setup.noise, name) for tuner in (here, there))
        np.testing.assert_array_equal(a, b)
    assert here.gradient.density.given == (0.0,)  # what other steps sample is theirs


def test_a_restored_chain_measures_on_as_the_saved_one(restored):
    here, there, tuning, position = restored
    for tuner in (here, there):
        tuner.gradient.density.condition_on({"a": 2.0})
        tuner.begin_draw(tuning, position, np.random.default_rng(0))
    mean = there.setup.fit.mean
    runs = [measure(t, copy.deepcopy(tuning), 31, mean=mean) for t in restored[:2]]
    for (a, _), (b, _) in zip(*runs, strict=True):
        np.testing.assert_array_equal(a.noise, b.noise)
        assert a.learning_rate == b.learning_rate
        assert a.friction == b.friction


def test_a_restored_chain_whose_centre_had_moved(made):
    there, _, mean, tuning, _ = moved_by(5.0)
    here = tuner_of()
    begun(here)
    made.clear()
    here.begin_draw(copy.deepcopy(tuning), mean, np.random.default_rng(0))
    assert len(made) == 1
    np.testing.assert_array_equal(here.setup.fit.mean, mean)
    assert here.setup.fit.metric == there.setup.fit.metric


def test_chains_taken_up_by_turns_share_a_tuner(restored):
    here, _, tuning, position = restored
    own, rng = here.prepare(), np.random.default_rng(0)
    third = copy.deepcopy(tuner_of(a=2.0).prepare())  # begins where the tuner's own does
    states = [(own, 0.0), (tuning, 1.0), (third, 2.0)]
    sd = curvature_of(rows()) ** -0.5
    for state, a in itertools.islice(itertools.cycle(states), 6):
        here.begin_draw(state, position, rng)
        assert np.abs((here.setup.fit.mean - mode_of(rows(), a)) / sd).max() < 0.1
    assert here.gradient.density.given == (0.0,)


def test_other_unknowns_are_put_back_where_a_restored_chain_has_no_setup(restored):
    here, _, tuning, position = restored
    request = replace(tuning.request, conditioned_on=(np.array(np.nan),))
    lost = replace(tuning, request=request)
    before = here.setup
    with pytest.raises(NonFinite):
        here.begin_draw(lost, position, np.random.default_rng(0))
    assert here.gradient.density.given == (0.0,)
    assert here.setup is before


def test_the_anchor_follows_other_unknowns_at_each_draw():
    tuner = tuner_of(a=0.0, kind="control_variates")
    tuning, position = begun(tuner)
    centre = tuner.gradients[1].anchor.centre
    for a in (0.5, -2.0):
        tuner.gradient.density.condition_on({"a": a})
        tuner.begin_draw(tuning, position, np.random.default_rng(0))
        exact = tuner.gradient.passes.likelihood(centre)[1]
        np.testing.assert_array_equal(tuner.gradients[1].anchor.gradient, exact)
        np.testing.assert_array_equal(tuner.gradients[1].anchor.centre, centre)
