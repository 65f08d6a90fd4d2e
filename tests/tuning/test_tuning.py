"""Settings from a bias budget: the searches, the choice, and what a chain's tuning takes in."""

import itertools
import json
import math

from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import NamedTuple

import closed_forms
import numpy as np
import pytest

from closed_forms import INTEGRATORS, inflation, relaxation
from scipy.stats import t as student
from stationary import baoab_map, sghmc_map, sgld_map, stationary_covariance

from pymc_sghmc.gradients.metric import Identity
from pymc_sghmc.runs.states import decoded, encoded
from pymc_sghmc.samplers import baoab, sghmc, sgld
from pymc_sghmc.tuning import budget as budget_module
from pymc_sghmc.tuning.budget import (
    MIN_FRICTION,
    WIDER,
    choose,
    critical_friction,
    largest_learning_rate,
    lowered_friction,
    score,
    smallest_friction,
)
from pymc_sghmc.tuning.chain_tuning import (
    MAX_LEARNING_RATE,
    ByHand,
    ChainTuning,
    TemperatureSums,
)
from pymc_sghmc.tuning.curvature import Curvature
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.gradient_noise import MOST_FAR_NOISE, Anchors, Noise
from pymc_sghmc.tuning.linear_step import Rule
from pymc_sghmc.tuning.options import options
from pymc_sghmc.tuning.setup import Limits, Setup

RULES = {
    "euler": Rule(sghmc.update, sghmc.SGHMCState),
    "baoab": Rule(baoab.update, sghmc.SGHMCState),
    "sgld": Rule(sgld.update, sgld.SGLDState),
}


def linear_map(integrator, eta, alpha, noise, h):
    H, V = np.array([[h]]), np.array([[noise]])
    if integrator == "sgld":
        return sgld_map(H, V, eta=eta)
    return (sghmc_map if integrator == "euler" else baoab_map)(H, V, eta=eta, alpha=alpha)


GRID = list(
    itertools.product(
        INTEGRATORS,
        [1e-4, 0.03, 0.25, 0.6],
        [0.01, 0.2, 0.7, 1.0],
        [0.0, 0.3, 40.0],
        [0.1, 1.0, 2.5],
    )
)


def test_the_formulas_of_the_oracle_are_those_of_the_stationary_law():
    for integrator, eta, alpha, noise, h in GRID:
        A, Q = linear_map(integrator, eta, alpha, noise, h)
        exact = stationary_covariance(A, Q)[0, 0] * h
        bias = inflation(integrator, eta, alpha, noise, h)
        assert 1 + bias == pytest.approx(exact, rel=1e-10), (integrator, eta, alpha, noise, h)
        radius = np.abs(np.linalg.eigvals(A)).max()
        rate = relaxation(integrator, eta, alpha, h)
        assert rate == pytest.approx(1 - radius, abs=1e-7 if rate > 0.1 else 1e-10)


@pytest.mark.parametrize("integrator", ["euler", "baoab"])
@pytest.mark.parametrize("eta_h", [0.001, 0.01, 0.1, 0.25])
def test_critical_friction_relaxes_fastest(integrator, eta_h):
    # Of all frictions of the SDE; the integrators' own best is that up to terms of order √(ηh).
    h = 2.0
    alpha = critical_friction(eta_h / h, h)
    frictions = np.minimum(alpha * np.geomspace(0.3, 3, 500), 1.0)
    best = max(relaxation(integrator, eta_h / h, a, h) for a in frictions)
    assert relaxation(integrator, eta_h / h, alpha, h) > (1 - eta_h**0.5) * best
    for wrong in (0.5, 2.0):
        if wrong * alpha < 1 and eta_h < 0.05:
            assert relaxation(integrator, eta_h / h, wrong * alpha, h) < 0.8 * best


def test_critical_friction_is_at_least_the_papers_least():
    assert critical_friction(1e-12) == MIN_FRICTION
    assert critical_friction(0.09) == pytest.approx(1 - math.exp(-0.6), rel=1e-14)


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("noise", [3.0, 1e3, 1e6])
@pytest.mark.parametrize("budget", [0.01, 0.05])
def test_largest_learning_rate_spends_the_budget(integrator, noise, budget):
    def bias(eta):
        return inflation(integrator, eta, critical_friction(eta, 0.5), noise, 0.5)

    eta = largest_learning_rate(bias, budget)
    assert 1e-12 < eta < MAX_LEARNING_RATE
    assert bias(eta) == pytest.approx(budget, rel=1e-6)


def test_largest_learning_rate_at_its_limits():
    assert largest_learning_rate(lambda eta: 0.0, 0.05) == MAX_LEARNING_RATE
    assert largest_learning_rate(lambda eta: eta, 0.05, upper=0.03) == 0.03
    assert 0 < largest_learning_rate(lambda eta: 1.0, 0.05) <= 1e-12  # no rate is small enough


@pytest.mark.parametrize("integrator", ["euler", "baoab"])
def test_lowered_friction_spends_what_is_left_of_the_budget(integrator):
    def bias(alpha):
        return inflation(integrator, 0.01, alpha, 2.0)

    lower, upper = critical_friction(0.01, 1 / WIDER), critical_friction(0.01)
    budgets = np.array([bias(upper), bias((lower + upper) / 2), bias(lower)])
    found = [lowered_friction(bias, budget, lower, upper) for budget in budgets]
    assert found == pytest.approx([upper, (lower + upper) / 2, lower], rel=1e-9)
    assert lowered_friction(bias, 0.5 * budgets[0], lower, upper) == upper  # less isn't there
    assert lowered_friction(bias, 1.0, upper, lower) == lower


@pytest.mark.parametrize("integrator", ["baoab", "euler"])
def test_smallest_friction_keeps_the_budget(integrator):
    def bias(alpha):
        return inflation(integrator, 0.01, alpha, noise, 1.0)

    noise, lower = 2.0, critical_friction(0.01)
    assert bias(lower) > 0.04 > bias(1.0)
    alpha = smallest_friction(bias, 0.04, lower)
    assert lower < alpha < 1
    assert bias(alpha) == pytest.approx(0.04, rel=1e-6)
    assert smallest_friction(bias, 0.9, lower) == lower
    noise = 100.0
    assert smallest_friction(bias, 0.04, lower) == 1.0


def test_friction_is_not_raised_where_it_makes_a_step_unstable():
    def bias(alpha):  # eq. 15 at ηh = 2.5 is unstable from α = 0.75
        return math.inf if alpha > 0.75 else 1 / alpha

    assert smallest_friction(bias, 0.05, 0.6) == 0.6
    assert smallest_friction(lambda alpha: math.inf, 0.05, 0.6) == 0.6


def test_round_off_of_the_search_does_not_raise_the_friction():
    # η was found so that its bias is the budget: in the last bit it may be more.
    def bias(alpha):
        return 0.05 * (1 + 1e-14) if alpha < 1 else 0.06

    assert smallest_friction(bias, 0.05, 0.3) == 0.3


def tuning_of(**settings):
    return ChainTuning(**{"order": 1, "noise": np.zeros(2)} | settings)


def test_noise_is_averaged_with_weights_growing_as_the_cube():
    rng = np.random.default_rng(0)
    first, later = rng.random(2), rng.random((30, 2))
    tuning = tuning_of(noise=first)
    for noise in later:
        tuning = tuning.with_noise(noise)
    n = np.arange(1, 41.0)
    weights = n * (n + 1) * (n + 2)
    # what was measured around the centre counts as ten draws
    all_noise = np.vstack([np.tile(first, (10, 1)), later])
    np.testing.assert_allclose(
        tuning.noise, np.average(all_noise, axis=0, weights=weights), rtol=1e-12
    )
    assert tuning.n_measured == 40


def test_of_thousands_of_directions_only_the_mean_is_learnt():
    rng = np.random.default_rng(1)
    known, tuning, free = rng.random(5), tuning_of(noise=np.ones(5)), tuning_of(noise=np.ones(5))
    known[3] = np.nan  # one that all rows know of
    for noise in 10 * rng.random((30, 5)):
        tuning, free = tuning.with_noise(noise, known), free.with_noise(noise)
    few = [0, 1, 2, 4]
    expected = known[few] * free.noise[few].mean() / known[few].mean()
    np.testing.assert_allclose(tuning.noise[few], expected, rtol=1e-12)
    assert tuning.noise[3] == pytest.approx(free.noise[3])


def limit_after(temperatures, tolerance=0.05, learning_rate=None):
    tuning = tuning_of(learning_rate=learning_rate)
    limits = []
    for temperature in temperatures:
        tuning = tuning.with_temperature(temperature, tolerance, largest_curvature=2.0)
        limits.append(tuning.limit / MAX_LEARNING_RATE)
    return limits


def test_sums_of_temperatures_are_the_batches_of_the_later_half():
    x = np.random.default_rng(4).random(300)
    sums = TemperatureSums()
    for n, temperature in enumerate(x, 1):
        sums = sums.with_draw(temperature)
        assert sums.is_complete == (n in (32, 64, 128, 256))
        if sums.is_complete:
            means = x[n // 2 : n].reshape(8, -1).mean(axis=1)
            expected = means.mean() - 1, means.std(ddof=1) / 8**0.5
            assert sums.excess() == pytest.approx(expected, rel=1e-12)


def test_what_a_chain_has_learnt_stays_as_it_was():
    first = tuning_of(noise=np.ones(2))
    tunings = [first]
    for i in range(1, 71):
        tuning = tunings[-1].with_noise(np.full(2, 2.0)).with_temperature(1.0 + i, 0.05, 1.0)
        tunings.append(tuning.with_position(np.full(2, float(i)), i))
    with pytest.raises(FrozenInstanceError):
        first.limit = 1.0
    again = first
    for i, tuning in enumerate(tunings[1:], 1):
        again = again.with_noise(np.full(2, 2.0)).with_temperature(1.0 + i, 0.05, 1.0)
        again = again.with_position(np.full(2, float(i)), i)
        assert again == tuning != tunings[i - 1]
    assert first == tuning_of(noise=np.ones(2))
    assert first.temperatures.n == 0


def test_limit_halves_on_a_hot_sequence_after_32_64_128_draws():
    hot = 1.5 + 0.2 * np.random.default_rng(1).standard_normal(300)
    limits = limit_after(hot)
    assert [i + 1 for i in range(1, 300) if limits[i] != limits[i - 1]] == [32, 64, 128, 256]
    assert limits[-1] == 1 / 16


def test_limit_halves_what_is_in_use():
    # noise may keep the learning rate far below the limit, which would have to be halved many times
    limits = limit_after([1.5] * 40, learning_rate=0.01)
    assert limits[-1] == 0.01 * 2 / 2 / MAX_LEARNING_RATE


@pytest.mark.parametrize("tolerance", [0.01, 0.05])
def test_limit_stays_where_the_excess_is_within_the_tolerance(tolerance):
    excess = 1 + 1.8 * tolerance  # two budgets are allowed
    rng = np.random.default_rng(2)
    assert limit_after(excess + 0.001 * rng.standard_normal(300), tolerance)[-1] == 1
    hotter = 1 + 2.5 * tolerance
    assert limit_after(hotter + 0.001 * rng.standard_normal(300), tolerance)[-1] == 1 / 16


@pytest.mark.parametrize("sd", [0.1, 0.5, 5.0])
def test_limit_stays_on_right_temperatures_but_for_chance(sd):
    # Six judgements of 150 chains. Without the tolerance each fails by chance with the probability
    # that Student's t with 7 degrees of freedom exceeds 4.
    rng = np.random.default_rng(3)
    halvings = [-math.log2(limit_after(1 + sd * rng.standard_normal(1024))[-1]) for _ in range(150)]
    expected = 6 * 150 * student.sf(4, 7)
    assert sum(halvings) <= expected + 4.5 * expected**0.5
    if sd <= 0.1:
        assert sum(halvings) == 0


def test_a_hot_start_is_forgotten():
    temperatures = np.r_[np.full(16, 50.0), 1 + 0.1 * np.random.default_rng(0).standard_normal(240)]
    assert limit_after(temperatures)[-1] == 1


def test_score_counts_the_two_points_of_control_variates():
    assert score(tuning_of(rate=0.4)) == pytest.approx(0.2)
    assert score(tuning_of(rate=0.4, order=0)) == pytest.approx(0.4)
    # a group has all of its rows
    of_groups = tuning_of(rate=0.4, rows=2, rows_of_each=10.0)
    assert score(of_groups) == score(tuning_of(rate=0.4, rows=20))


def test_score_of_sizes_is_contraction_of_a_draw_for_its_time():
    few, many = tuning_of(rate=0.4, rows=20), tuning_of(rate=0.4, rows=2000)
    assert score(few) > 2 * score(many)
    # short steps cost draws, which cost more than rows do
    assert score(tuning_of(rate=0.01, rows=20)) < score(tuning_of(rate=0.4, rows=500))
    # beside a matrix of d² numbers few rows cost nothing
    wide = {"noise": np.ones(900)}
    ratio = score(tuning_of(rate=0.4, rows=20, **wide)) / score(
        tuning_of(rate=0.4, rows=500, **wide)
    )
    assert 1 < ratio < 1.1
    # longer draws make up for a rate that isn't as promised: short steps don't gain by them
    longer = {"rows": 20, "order": 0, "n_steps_multiplier": 5.0}
    ratio = score(tuning_of(rate=0.05, **longer)) / score(tuning_of(rate=0.1, **longer))
    assert ratio == pytest.approx(math.log1p(-0.05) / math.log1p(-0.1))
    # and beyond what makes draws independent nothing is gained
    assert score(tuning_of(rate=1.0, rows=20)) == score(tuning_of(rate=0.99, rows=20))


class Counts(NamedTuple):
    """Data, as far as sizes of minibatches depend on them: the members of `RowCounts`."""

    n_rows: list
    n_at_hand: list
    is_noisy: list
    noisy_batch_sizes: list
    rows_of_each: float


@pytest.mark.parametrize(("n_rows", "each", "far_noise", "expected"), [
    (20_000, 1.0, 0.0, {500, 10, 20, 50, 100, 200, 1000, 2000, 5000}),
    (20_000, 10.0, 0.0, {50, 2, 5, 10, 20, 100, 200, 500}),
    (20_000, 10.0, MOST_FAR_NOISE / 6, {50, 10, 20, 100, 200, 500}),  # five would have more noise than is safe
    (20_000, 300.0, 0.0, {2, 3, 7, 17}),
    (1000, 10.0, 0.0, {50, 2, 5, 10, 20, 100, 200, 500}),
    (999, 10.0, 0.0, {50, 10, 20, 100, 200}),  # where groups are few, each weighs much far out
    (15, 300.0, 0.0, {2}),
])  # fmt: skip
def test_sizes_of_minibatches_are_in_rows_and_never_too_noisy(n_rows, each, far_noise, expected):
    n = max(2, round(500 / each))
    data = Counts(
        n_rows=[n_rows],
        n_at_hand=[n_rows],
        is_noisy=[True],
        noisy_batch_sizes=[n],
        rows_of_each=each,
    )
    setup = Setup(
        request=None,
        fit=GaussianFit(np.zeros(3), Identity(3), is_mode=True, passes=0.0),
        metric=Identity(3),
        curvature=Curvature(1.0, 1.0),
        noise=Noise(np.ones(3), None, np.full(3, 0.01), far_noise),
        limits=Limits(second_order=1.0),
        anchors=Anchors(None, None),
        passes=0.0,
        mean_phi=None,
        is_gaussian=True,
        edges=(),
        rewrite_states=(),
    )
    found = options(setup, None, False, data)
    assert {one.rows for one in found} == expected
    assert all(one.noise[0] == pytest.approx(0.01 * n / one.rows) for one in found)
    assert all(one.rows_of_each == each for one in found)


GIVEN = list(
    itertools.product(
        INTEGRATORS,
        [0.0, 0.08, 2.0, 3e4],  # noise
        [(1.0, 1.0), (1.0, 0.01), (2e4, 30.0)],  # stiffness and slowness
        [None, 0.03, 0.4],  # η
        [None, 0.2],  # α
        [0.0, 0.1],  # the least α
    )
)


BUDGET = 0.05
ROUNDING = 1e-6


def check_learning_rate(eta, limit, bias):
    """It is within the budget at critical friction, and the largest that is."""
    assert bias(eta) <= BUDGET * (1 + ROUNDING)
    assert eta == limit or (eta < limit and bias(1.001 * eta) > BUDGET)


def check_friction(alpha, critical, wider, bias):
    """It is critical, or as high as the budget asks for; lower where that costs a fifth at most.

    Lower by no more than what is ``wider`` needs, four times the variance.
    """
    if bias(critical) > BUDGET * (1 + ROUNDING):  # only where η is given
        assert alpha > critical
        assert alpha == 1 or bias(alpha) == pytest.approx(BUDGET, rel=ROUNDING)
    elif bias(critical) >= BUDGET / 5:
        assert alpha == pytest.approx(critical)
    else:
        assert wider * (1 - ROUNDING) <= alpha <= critical * (1 + ROUNDING)
        is_least = alpha == pytest.approx(wider)
        assert is_least or bias(alpha) == pytest.approx(BUDGET / 5, rel=ROUNDING)


def check_choice(name, limit, noise, curvature, given_rate, given_friction, least):
    """Hold a choice to the formulas of its integrator."""
    tuning = tuning_of(noise=np.array([noise, noise / 3]), limit=limit)
    chosen = choose(
        RULES[name],
        tuning,
        noise=noise,
        curvature=curvature,
        budget=BUDGET,
        learning_rate=given_rate,
        friction=given_friction,
        least_friction=least,
    )
    rate = chosen.learning_rate
    friction = chosen.friction

    def bias(rate, friction):
        return inflation(name, rate, friction, noise, curvature.largest)

    def critical(rate, curvature):
        return given_friction or max(closed_forms.critical_friction(rate, curvature), least)

    if given_rate is None:
        at_critical = lambda rate: bias(rate, critical(rate, curvature.smallest))  # noqa: E731
        check_learning_rate(rate, limit / curvature.largest, at_critical)
    # where the curvature is known to be alike wherever chains come, nothing is wider than it says
    wider = curvature.smallest
    if limit <= MAX_LEARNING_RATE:
        wider = min(wider, curvature.largest / 4)
    if name != "sgld" and given_friction is None:
        usual = critical(rate, curvature.smallest)
        check_friction(friction, usual, critical(rate, wider), partial(bias, rate))
    assert chosen.bias == pytest.approx(bias(rate, friction), rel=1e-9, abs=1e-13)
    contraction = relaxation(name, rate, friction, wider)
    assert chosen.rate == pytest.approx(contraction, rel=1e-9, abs=1e-13)
    assert rate == (given_rate or rate)
    assert friction == (given_friction or friction)
    assert replace(chosen, learning_rate=None, friction=None, bias=0, rate=0) == (
        replace(tuning, bias=0, rate=0)
    )


@pytest.mark.parametrize("limit", [MAX_LEARNING_RATE / 2, 2 * MAX_LEARNING_RATE])
@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_the_choice_is_the_fastest_within_the_budget(integrator, limit):
    given = [one for one in GIVEN if one[0] == integrator]
    assert len(given) == 144
    for name, noise, (largest, smallest), eta, alpha, least in given:
        check_choice(
            name,
            limit,
            noise,
            Curvature(largest=largest, smallest=smallest),
            None if eta is None else eta / largest,
            alpha if name != "sgld" else None,
            least,
        )


def test_a_choice_asks_for_each_law_once(monkeypatch):
    asked = []

    def counted(rule, eta, *args, **settings):
        asked.append((eta, settings["friction"]))
        return variance_bias(rule, eta, *args, **settings)

    variance_bias = budget_module.linear_step.variance_bias
    monkeypatch.setattr(budget_module.linear_step, "variance_bias", counted)
    settings = {"curvature": Curvature(largest=1.0, smallest=0.1), "budget": 0.05}
    choose(RULES["baoab"], tuning_of(noise=np.array([0.01])), noise=0.01, **settings)
    assert len(asked) == len(set(asked)) <= 2  # of η, and of the friction for it
    asked.clear()
    choose(RULES["baoab"], tuning_of(noise=np.array([9.0])), noise=9.0, **settings)
    assert len(asked) == len(set(asked)) < 25


@pytest.mark.parametrize("name", RULES)
def test_noise_that_overflowed_leaves_finite_settings(name):
    noise = 1e100  # what a set-up takes for infinite
    chosen = choose(
        RULES[name],
        tuning_of(noise=np.array([noise])),
        noise=noise,
        curvature=Curvature(largest=1.0, smallest=1.0),
        budget=0.05,
    )
    assert 0 < chosen.learning_rate < 1e-12
    assert 1e60 < chosen.bias < math.inf
    assert chosen.friction == (None if name == "sgld" else 1.0)


def test_a_rule_without_friction_gets_none():
    chosen = choose(
        RULES["sgld"], tuning_of(), noise=0.0, curvature=Curvature(1.0, 1.0), budget=0.05
    )
    assert chosen.friction is None
    assert chosen.learning_rate == pytest.approx(0.1 / 1.05, rel=1e-9)  # 2b/(1 + b)


def test_what_is_saved_of_a_chain_is_read_back_and_of_another_version_refused():
    rng = np.random.default_rng(5)
    tuning = tuning_of(noise=rng.random(2))
    for n in range(1, 41):
        tuning = tuning.with_temperature(rng.random(), 0.05, 1.0).with_position(rng.random(2), n)
    arrays = {}
    stored = json.loads(json.dumps(encoded(tuning, arrays)))
    assert decoded(stored, arrays) == tuning
    assert decoded(encoded(ByHand(), {}), {}) == ByHand()
    del stored["fields"]["temperatures"]
    with pytest.raises(ValueError, match="another version"):
        decoded(stored, arrays)
