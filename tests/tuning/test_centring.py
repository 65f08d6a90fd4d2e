"""How far effects are centred, and coordinates for thousands of them: against closed forms."""

import functools

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from benchmarks import random_groups
from modes import FAST, QUIET, C
from targets import plain_gradient

from pymc_sghmc import SGHMC
from pymc_sghmc.gradients.metric import Dense, Diagonal
from pymc_sghmc.gradients.second_derivatives import second_derivatives
from pymc_sghmc.hierarchy import centring_choice
from pymc_sghmc.hierarchy.centring import centring_of
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.tuning import posterior_fit, setup
from pymc_sghmc.tuning import variational_fit as variational
from pymc_sghmc.tuning.curvature import CountedPasses, extreme_curvatures
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.low_rank_fit import low_rank_fit
from pymc_sghmc.tuning.posterior_fit import fit_posterior
from pymc_sghmc.tuning.variational_fit import mean_field

SIGMA = 1.0
SIZES = np.repeat([2, 10, 50], 20)  # rows of each group
GROUP = np.repeat(np.arange(SIZES.size), SIZES)


def groups(form, tau=0.7, fixed=False, seed=0, sizes=SIZES):
    """Rows of groups of three sizes, with τ known or not."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(sizes.size), sizes)
    y = rng.normal(0, tau, sizes.size)[group] + rng.normal(0, SIGMA, group.size)
    with pm.Model() as model:
        # a scale that may hardly move is as good as known, and still an unknown of the model
        scale = pm.LogNormal("tau", np.log(tau), 0.01 if fixed else 1.0)
        u = pm.Normal("u", 0, scale, shape=sizes.size) if form == "centred" else None
        u = scale * pm.Normal("z", 0, 1, shape=sizes.size) if u is None else u
        pm.Normal("y", pm.Normal("mu", 0, 2) + u[group], SIGMA, observed=y)
    return model


def gradient_with_effects(model, batch_size=100):
    point = model.initial_point()
    unknowns = Unknowns(model.value_vars, point)
    gradient = plain_gradient(
        model, unknowns, batch_size, point, FAST, rewriting=Rewriting(may_centre=True)
    )
    gradient.passes.second_derivatives = second_derivatives(gradient.density)
    return gradient, unknowns.ravel(point)


def place_of(gradient, name):
    """Where the logarithm of a scale lies in a position."""
    return gradient.density.graph.model.parameters.places[f"{name}_log__"]


@pytest.mark.parametrize("form", ["centred", "non-centred"])
def test_effects_are_centred_by_what_their_rows_say(form):
    # r = nτ²/σ² of n Gaussian rows, and the share r/(1 + r), whatever form the model has
    gradient, start = gradient_with_effects(groups(form, fixed=True))
    own = gradient.density.to_model(start)
    [position] = centring_of(gradient.density).choose(gradient, start)
    ratio = SIZES * 0.7**2 / SIGMA**2
    np.testing.assert_allclose(centring_of(gradient.density).shares, ratio / (1 + ratio), rtol=0.02)
    np.testing.assert_allclose(gradient.density.to_model(position), own, rtol=1e-12, atol=1e-15)
    [again] = centring_of(gradient.density).choose(gradient, position)  # it is chosen once
    assert again is position


@pytest.mark.parametrize("form", ["centred", "non-centred"])
def test_effects_are_standard_normal_whatever_their_scale_is(form):
    """With Gaussian rows and all else known the effects' conditional law is exact."""
    gradient, start = gradient_with_effects(groups(form), batch_size=GROUP.size)
    density = gradient.density
    [position] = centring_of(density).choose(gradient, start)
    [effects] = density.group_coefficients.values()
    others = np.setdiff1d(np.arange(density.d), np.r_[effects])
    names = density.graph.model.parameters.places
    assert others.tolist() == [names["tau_log__"].start, names["mu"].start]
    position = position.copy()
    position[effects] = np.random.default_rng(1).normal(0, 2, SIZES.size)
    # b falls with the mean of all groups, as rows see it and an effect together
    for log_scale, mu in ((-6.0, 0.0), (0.0, 3.0), (5.0, -2.0)):
        position[others] = log_scale, mu
        slope = gradient.passes.log_density(position)[1]
        np.testing.assert_allclose(slope[effects], -position[effects], atol=1e-6)


def test_likelihood_of_effects_is_that_of_their_rows_where_they_have_means_of_their_own():
    """Of n Gaussian rows with σ = 1: precision n and mean ȳ, whatever effects lie above them."""
    rng = np.random.default_rng(2)
    region = np.arange(SIZES.size) % 6
    y = (rng.normal(5, 2, 6)[region] + rng.normal(0, 0.5, SIZES.size))[GROUP]
    y = y + rng.normal(0, SIGMA, GROUP.size)
    with pm.Model() as model:
        regions = pm.Normal("regions", pm.Normal("mu", 0, 10), pm.HalfNormal("s", 3), shape=6)
        sites = pm.Normal("sites", regions[region], pm.HalfNormal("tau", 1), shape=SIZES.size)
        pm.Normal("y", sites[GROUP], SIGMA, observed=y)
    gradient, start = gradient_with_effects(model)
    centring = centring_of(gradient.density)
    centring.choose(gradient, start)
    information = centring.named(centring.information)
    pull = centring.named(centring.pull)
    np.testing.assert_allclose(information["sites"], SIZES, rtol=1e-6)
    # of regions by what their sites say, whose own scale counts: n/(1 + nτ²) of each
    tau = np.exp(centring.independent.mean[place_of(gradient, "tau")])
    by_site = np.bincount(region, SIZES / (1 + SIZES * tau**2))
    np.testing.assert_allclose(information["regions"], by_site, rtol=1e-6)
    means = np.bincount(GROUP, weights=y) / SIZES
    np.testing.assert_allclose(pull["sites"] / information["sites"], means, rtol=1e-6)


@pytest.mark.parametrize("form", ["centred", "non-centred"])
def test_effects_of_groups_in_groups_are_standard_normal_together(form):
    """Rows see the sum of a site's and a region's effect, whatever the scale of regions is."""
    rng = np.random.default_rng(2)
    region = np.arange(SIZES.size) % 6
    y = rng.normal(0, 0.5, 6)[region[GROUP]] + rng.normal(0, 0.7, SIZES.size)[GROUP]
    y = y + rng.normal(0, SIGMA, GROUP.size)

    def effects(name, scale, n):
        if form == "centred":
            return pm.Normal(name, 0, scale, shape=n)
        return scale * pm.Normal(name, 0, 1, shape=n)

    with pm.Model() as model:
        upper = effects("regions", pm.HalfNormal("s", 1), 6)
        lower = effects("sites", pm.HalfNormal("tau", 1), SIZES.size)
        mean = pm.Normal("mean", 0, 5) + upper[region][GROUP] + lower[GROUP]
        pm.Normal("y", mean, SIGMA, observed=y)
    gradient, start = gradient_with_effects(model, batch_size=GROUP.size)
    density = gradient.density
    [position] = centring_of(density).choose(gradient, start)
    position = position.copy()
    position[place_of(gradient, "tau")] = centring_of(density).independent.mean[
        place_of(gradient, "tau")
    ]
    places = np.concatenate([np.r_[p] for p in density.group_coefficients.values()])
    position[places] = np.random.default_rng(1).normal(0, 2, places.size)
    for log_scale, mean in ((-6.0, 0.0), (-1.0, 4.0), (2.0, -2.0)):
        position[place_of(gradient, "s")] = log_scale
        position[density.graph.model.parameters.places["mean"]] = mean
        slope = gradient.passes.log_density(position)[1]
        np.testing.assert_allclose(slope[places], -position[places], atol=1e-6)


@pytest.mark.parametrize("form", ["centred", pytest.param("non-centred", marks=pytest.mark.slow)])
def test_correlated_effects_are_standard_normal_together(form):
    """Whatever their scales and their correlation: none of them makes a funnel."""
    rng = np.random.default_rng(3)
    x = np.where(np.arange(GROUP.size) % 2, 1.0, -1.0)  # of mean zero in each group
    own = rng.multivariate_normal([0, 0], [[0.5, 0.3], [0.3, 0.4]], SIZES.size)
    y = own[GROUP, 0] + own[GROUP, 1] * x + rng.normal(0, SIGMA, GROUP.size)
    with pm.Model() as model:
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.Exponential.dist(1))
        if form == "centred":
            u = pm.MvNormal("u", 0, chol=chol, shape=(SIZES.size, 2))
        else:
            u = pm.Normal("u", 0, 1, shape=(SIZES.size, 2)) @ chol.T
        pm.Normal("y", u[GROUP, 0] + u[GROUP, 1] * x, SIGMA, observed=y)
    gradient, start = gradient_with_effects(model, batch_size=GROUP.size)
    density = gradient.density
    [position] = centring_of(density).choose(gradient, start)
    places = density.graph.model.parameters.places
    position = position.copy()
    position[places["u"]] = np.random.default_rng(1).normal(0, 2, 2 * SIZES.size)
    for factor in ([0.0, 0.0, 0.0], [-2.0, 0.3, -5.0], [1.0, 2.0, -3.0]):  # logs of its diagonal
        position[places["chol_cholesky-cov-packed__"]] = factor
        slope = gradient.passes.log_density(position)[1]
        np.testing.assert_allclose(slope[places["u"]], -position[places["u"]], atol=1e-6)


def slopes_in_regions():
    """Correlated intercepts and slopes of sites with six rows each, in regions."""
    rng = np.random.default_rng(5)
    site = np.repeat(np.arange(120), 6)
    region = (np.arange(120) % 12)[site]
    x = rng.standard_normal(site.size)
    own = rng.multivariate_normal([0, 0], [[2.0, 0.3], [0.3, 0.2]], 120)
    eta = rng.normal(0, 1.0, 12)[region] + own[site, 0] + own[site, 1] * x
    with pm.Model() as model:
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.Exponential.dist(1))
        u = pm.Normal("u", 0, 1, shape=(120, 2)) @ chol.T
        v = pm.HalfNormal("tau", 1) * pm.Normal("v", 0, 1, shape=12)
        mu = pm.Normal("mu", 0, 2) + v[region] + u[site, 0] + u[site, 1] * x
        pm.Normal("y", mu, pm.HalfNormal("sigma", 1), observed=rng.normal(eta, 0.8))
    return model


def test_correlated_effects_in_larger_groups_are_fitted():
    """Rows of a site that knew its region from intercept and slope, twice, left none to know."""
    gradient, start = gradient_with_effects(slopes_in_regions(), batch_size=720)
    centring = centring_of(gradient.density)
    [position] = centring.choose(gradient, start)
    assert centring.named(centring.information)["v"].min() > 1
    fit = fit_posterior(gradient.passes, position)
    assert fit.is_mode
    log_tau = place_of(gradient, "tau").start
    sd = np.linalg.norm(fit.metric.factor[log_tau])
    assert 0.15 < sd < 0.5  # 0.24 from twelve regions that are known well
    assert abs(fit.mean[log_tau]) < 3 * sd


def test_groups_whose_rows_are_in_a_tail_have_coordinates_too():
    """The curvature of a Student t is negative there, of which a root was taken."""
    group = np.repeat(np.arange(40), 2)
    rng = np.random.default_rng(6)
    y = rng.normal(0, 0.5, 40)[group] + rng.normal(0, 0.3, 80)
    y[:8] = [0.7, -0.7, 0.75, -0.75, 0.8, -0.8, 0.9, -0.9]  # in tails where u is in the middle
    with pm.Model() as model:
        u = pm.Normal("u", 0, pm.HalfNormal("tau", 1), shape=40)
        pm.StudentT("y", nu=4, mu=pm.Normal("mu", 0, 2) + u[group], sigma=0.3, observed=y)
    gradient, start = gradient_with_effects(model, batch_size=80)
    centring = centring_of(gradient.density)
    [position] = centring.choose(gradient, start)
    assert np.isfinite(centring.information).all()
    assert fit_posterior(gradient.passes, position).is_mode


@pytest.mark.parametrize("seed", [30, 430])
def test_effects_in_larger_groups_are_as_wide_as_their_coordinates(seed):
    """Twelve groups in five, and fourteen in five, with scales that a first fit hardly finds.

    The small groups of 30 took over what the large ones say, and coordinates were chosen by that.
    Those of 430 knew of the large groups and not of the intercept, by standard deviations of a fit
    to eight draws; so a joint mode was believed that holds e⁻¹⁷ of what is around a variational fit.
    """
    model = random_groups.model_of(random_groups.plan(seed, most=5000))
    gradient, start = gradient_with_effects(model)
    [position] = centring_of(gradient.density).choose(gradient, start)
    fit = fit_posterior(gradient.passes, position)
    for place in gradient.density.group_coefficients.values():
        sds = fit.metric.sds()[place]
        assert sds.min() > 0.5
        assert sds.max() < 1.5


@pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes")
def test_rounds_that_go_from_one_extreme_to_the_other_are_taken_again(monkeypatch):
    """Eleven groups in five whose own scale may be zero: Newton's rounds drove it to e⁻⁴⁹.

    With a standard deviation of 10⁻¹⁸, so that no force there was worth a word; whether that passed
    for a mode was a matter of rounding.
    """
    pytest.importorskip("bambi", reason="Bambi isn't installed")
    rounds = []
    newton_rounds = variational._newton_rounds

    def recorded(*args):
        rounds.append(newton_rounds(*args))
        return rounds[-1]

    monkeypatch.setattr(variational, "_newton_rounds", recorded)
    model = random_groups.model_of(random_groups.plan(86, most=5000))
    gradient, start = gradient_with_effects(model)
    [position] = centring_of(gradient.density).choose(gradient, start)
    fit = centring_of(gradient.density).taken_fit(position)
    first, again = rounds
    place = place_of(gradient, "1|g1_sigma")
    assert first.has_collapsed
    assert first.mean[place] < -10
    assert fit.is_mode
    assert fit.mean[place] == again.mean[place]
    assert -2.5 < fit.mean[place] < 0


def regions_in_units(unit, flat):
    """Forty regions whose rows are in a unit of 10⁻⁵, 1 or 10⁹, and the priors with them."""
    rng = np.random.default_rng(12)
    region = rng.integers(40, size=2000)
    x = rng.uniform(500, 4000, 2000)
    y = unit * (1.5 + rng.normal(0, 0.3, 40)[region] + 1.2e-3 * x + rng.normal(0, 0.6, 2000))
    with pm.Model() as model:
        a = pm.Flat("a") if flat else pm.Normal("a", 0, 10 * unit)
        b = pm.Flat("b") if flat else pm.Normal("b", 0, 0.01 * unit)
        u = pm.Normal("u", 0, pm.HalfNormal("tau", unit), shape=40)
        pm.Normal("y", a + b * x + u[region], pm.HalfNormal("sigma", unit), observed=y)
    return model


@functools.cache
def fit_in_units(unit, flat):
    """Mean and sds of what isn't an effect, by a fit to `regions_in_units`."""
    gradient, start = gradient_with_effects(regions_in_units(unit, flat), batch_size=2000)
    [position] = centring_of(gradient.density).choose(gradient, start)
    fit = fit_posterior(gradient.passes, position)
    assert fit.is_mode
    places = gradient.density.graph.model.parameters.places
    scales = np.linalg.norm(fit.metric.factor, axis=1)
    means = [fit.mean[places[name]].item() for name in ("a", "b", "tau_log__", "sigma_log__")]
    sds = [scales[places[name]].item() for name in ("a", "b", "tau_log__", "sigma_log__")]
    units = np.array([unit, unit, 1, 1])
    return np.array(means) / units - np.log([1, 1, unit, unit]), np.array(sds) / units


@pytest.mark.parametrize(("unit", "flat"), [(1e9, False), (1e5, True), (1e-5, False)])
def test_fit_of_effects_is_the_same_in_other_units(unit, flat):
    """Such as yen: scales that were sought within some e¹² of 1, and a step of 6e-6 for each."""
    expected, sds = fit_in_units(1.0, False)
    mean, other_sds = fit_in_units(unit, flat)
    np.testing.assert_array_less(np.abs(mean - expected), 0.2 * sds)
    np.testing.assert_allclose(other_sds, sds, rtol=0.1)


def test_width_around_a_given_mean_is_found_without_differences(monkeypatch):
    """As where a chain's mean has left that of the fit; they take a pass for each parameter."""
    gradient, start = gradient_with_effects(groups("centred", fixed=True), GROUP.size)
    [position] = centring_of(gradient.density).choose(gradient, start)
    fit = fit_posterior(gradient.passes, position)
    mean = fit.mean + 2 * fit.metric.factor[:, -1]
    monkeypatch.setattr(posterior_fit, "curvature", None)
    again = fit_posterior(
        gradient.passes, mean, optimise=False, metric=Dense(2 * fit.metric.factor)
    )
    np.testing.assert_array_equal(again.mean, mean)
    expected = np.linalg.norm(fit.metric.factor, axis=1)
    # all but the scale's logarithm is Gaussian
    np.testing.assert_allclose(np.linalg.norm(again.metric.factor, axis=1), expected, rtol=0.01)
    assert again.is_mode


@pytest.mark.parametrize("form", ["centred", pytest.param("non-centred", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "rows", [0.1, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (0.001, 3.0))]
)
def test_effects_with_a_long_tail_have_coordinates_without_it(rows, form):
    """The force is about a Gaussian's, where that of a t distribution would fall to nothing."""
    n_groups = 200
    group = np.repeat(np.arange(n_groups), 2)
    with pm.Model() as model:
        tau = pm.LogNormal("tau", 0, 0.01)
        if form == "centred":
            u = pm.StudentT("u", nu=4, mu=0, sigma=tau, shape=n_groups)
        else:
            u = tau * pm.StudentT("u", nu=4, mu=0, sigma=1, shape=n_groups)
        pm.Normal("y", u[group], np.sqrt(2 / rows), observed=np.zeros(group.size))
    gradient, start = gradient_with_effects(model, batch_size=group.size)
    density = gradient.density
    [position] = centring_of(density).choose(gradient, start)
    place = density.graph.model.parameters.places["u"]
    position = position.copy()
    position[place] = np.linspace(-3, 3, n_groups)
    beyond = gradient.passes.log_density(position)[1][place] + position[place]
    assert np.sqrt(np.mean(np.square(beyond))) < 0.25
    # the test can fail: with the tail, where the rows say little
    centring = centring_of(density)
    centring.set_coordinates(centring.weights, centring.information, centring.pull)
    beyond = gradient.passes.log_density(position)[1][place] + position[place]
    assert (np.sqrt(np.mean(np.square(beyond))) > 0.5) == (rows < 1)


def test_groups_that_say_nothing_of_their_scale_are_hardly_centred():
    gradient, start = gradient_with_effects(groups("centred", tau=1e-3))
    centring_of(gradient.density).choose(gradient, start)
    assert centring_of(gradient.density).shares.max() < 0.5


def counts_of_groups(intercept):
    """Counts of six groups, five of them alone in larger ones, so that rows hardly tell them."""
    group = np.repeat(np.arange(6), 200)
    above = np.array([0, 1, 1, 2, 3, 4])[group]
    rng = np.random.default_rng(0)
    y = rng.poisson(np.exp(intercept + rng.normal(0, 0.1, 6)[group]))
    with pm.Model() as model:
        eta = pm.Normal("a", 0, 2)
        for name, index in {"small": group, "large": above}.items():
            tau = pm.HalfNormal(f"tau_{name}", 1)
            z = pm.Normal(name, 0, 1, shape=int(index.max()) + 1)
            eta = eta + (tau * z)[index]
        pm.Poisson("y", pm.math.exp(eta), observed=y)
    return model


@pytest.mark.parametrize("intercept", [0.0, 5.0])
def test_effects_are_found_as_soon_wherever_the_intercept_is(intercept):
    """It isn't first taken for the mean of effects, some 400 passes from where the fit begins."""
    model = counts_of_groups(intercept)
    gradient, start = gradient_with_effects(model)
    centring = centring_of(gradient.density)
    centring.set_coordinates(np.zeros_like(centring.as_written))
    counted = CountedPasses(gradient.passes)
    begin = gradient.density.from_model(start).astype(float)
    places = list(centring.group_coefficients.values())
    begin = centring_choice._without_effects(counted, begin, places)
    fit = mean_field(counted, begin)
    assert counted.passes < 200
    names = gradient.density.graph.model.parameters.places
    rate = np.exp(fit.mean[names["a"]])
    np.testing.assert_allclose(rate, model.rvs_to_values[model["y"]].data.mean(), rtol=0.1)
    # a start with effects was chosen by somebody
    begin[places[0].start] = 0.5
    assert centring_choice._without_effects(counted, begin, places) is begin


def test_coefficients_that_rows_know_together_are_centred_by_each_ones_own_curvature():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((500, 1)) * [1.0, -1.0, 1.0] + 0.3 * rng.standard_normal((500, 3))
    y = x @ [0.5, -0.5, 1.0] + rng.standard_normal(500)
    with pm.Model() as model:
        b = pm.Normal("b", 0, pm.HalfNormal("tau", 1), shape=3)
        pm.Normal("y", x @ b, 1, observed=y)
    gradient, start = gradient_with_effects(model)
    centring_of(gradient.density).choose(gradient, start)
    # sums over rows of the curvature's matrix are below zero
    assert centring_of(gradient.density).shares.min() > 0.9


def test_learning_rate_is_limited_by_the_curvature_far_out():
    with pm.Model() as model:  # curvature 1 + 12x² of each unknown
        x = pm.Flat("x", shape=3)
        pm.Potential("energy", -(0.5 * x**2 + x**4).sum())
    gradient, _ = gradient_with_effects(model, None)
    metric = Diagonal(np.ones(3))
    fit = GaussianFit(mean=np.zeros(3), metric=metric, is_mode=True, passes=0.0)
    found = setup._far_limit(gradient.passes, fit, metric)
    points = np.random.default_rng(0).standard_normal((8, 3))
    points *= 1.5 / np.sqrt((points**2).mean(axis=0))
    largest = (1 + 12 * points**2).max(axis=1)
    assert found == pytest.approx(1 / np.quantile(largest, 0.75), rel=0.01)


def test_hundreds_of_effects_are_not_far_out_all_at_once():
    """Where they would be, the curvature by their scale is more than twice as large as it gets."""
    n = 400
    fit = GaussianFit(np.zeros(n + 1), Diagonal(np.ones(n + 1)), is_mode=True, passes=0.0)
    far = setup._points_far_out(fit, [slice(1, n + 1)])
    radii = np.linalg.norm([x[1:] for x in far], axis=1)
    # a chain's are √n with a standard deviation of 1/√2
    assert 0.5 < (radii.mean() - n**0.5) / 0.5**0.5 < 3.5
    assert np.sqrt(np.mean([x[0] ** 2 for x in far])) == pytest.approx(1.5)  # a shared parameter


def test_both_forms_are_sampled_alike():
    found = []
    for form, name in (("centred", "u"), ("non-centred", "z")):
        with groups(form):
            step = SGHMC(batch_size=200, compile_kwargs=FAST, n_steps=3)
        found.append((step.tuner.setup, centring_of(step.tuner.gradient.density).by_name()[name]))
    (a, weights), (b, others) = found
    np.testing.assert_allclose(weights, others, rtol=1e-3)
    np.testing.assert_allclose(a.noise.plain, b.noise.plain, rtol=0.05)


@pytest.mark.parametrize("batch_size", [100, GROUP.size])
def test_exact_steps_in_coordinates_of_effects_report_log_densities_themselves(batch_size):
    """A further step in Python, for its log-density alone, takes as long as ten compiled ones."""
    gradient, _ = gradient_with_effects(groups("centred"), batch_size)
    logp, *_ = gradient.symbolic(gradient.density.graph.position)
    assert (logp is not None) == gradient.is_exact == (batch_size == GROUP.size)


def error(x):
    return float(np.squeeze(az.mcse(x)))


def check_log_tau(idata, x, logp):
    """Hold log τ to its law, whose log-density is known on a grid."""
    p = np.exp(logp - logp.max())
    p /= p.sum()
    exact = p @ x
    sd = np.sqrt(p @ (x - exact) ** 2)
    z = (np.log(idata.posterior["tau"].to_numpy()) - exact) / sd
    assert error(z) < 2 / z.size**0.5  # an effective draw of four, or more
    assert abs(z.mean()) < 4.5 * error(z)
    assert -4.5 * error(z**2) < np.mean(z**2) - 1 < 0.05 + 4.5 * error(z**2)


QUICK = {"draws": 200, "tune": 100, "chains": 2}
LONG = {"draws": 1000, "tune": 500, "chains": 4}
FEW, MANY = SIZES, np.repeat([2, 10, 50], 340)  # groups: for a matrix, and for thousands
CASES = {
    "matrix": pytest.param(FEW, "auto", QUICK, FAST),
    "matrix, long": pytest.param(FEW, "auto", LONG, C, marks=pytest.mark.slow),
    # quickly: test_few_directions_tell_how_shared_unknowns_and_effects_depend_on_each_other
    "low rank": pytest.param(MANY, "auto", LONG, C, marks=pytest.mark.slow),
    "first order": pytest.param(MANY, "control_variates", LONG, C, marks=pytest.mark.slow),
}


@pytest.mark.parametrize(("sizes", "kind", "run", "mode"), CASES.values(), ids=list(CASES))
def test_untouched_sampler_is_right_on_groups_whose_form_is_wrong_for_them(sizes, kind, run, mode):
    with groups("non-centred", sizes=sizes) as model:
        step = SGHMC(batch_size=200, gradient=kind, compile_kwargs=mode)
        idata = pm.sample(cores=2, random_seed=3, step=step, **run, **QUIET)
    assert step.tuner.setup.metric.kind == ("dense" if sizes is FEW else "low-rank")
    order = idata.sample_stats["gradient_order"].to_numpy()
    assert (order == (2 if kind == "auto" else 1)).all()
    check_groups(idata, model, sizes)


def test_effects_are_centred_where_all_data_are_used_as_well():
    with groups("non-centred") as model:
        step = SGHMC(batch_size=None, compile_kwargs=FAST)
        idata = pm.sample(cores=2, random_seed=3, step=step, **QUICK, **QUIET)
    gradient = step.tuner.gradient
    assert gradient.is_exact
    shares = centring_of(gradient.density).by_name()["z"]
    assert shares[-1] > 0.9 > 0.6 > shares[0]  # of groups of 50 rows, and of two
    check_groups(idata, model, SIZES)


def check_groups(idata, model, sizes):
    """Hold log τ to its law by quadrature over it: all else is Gaussian."""
    y = model.rvs_to_values[model["y"]].data
    means = np.bincount(np.repeat(np.arange(sizes.size), sizes), y) / sizes
    x = np.linspace(-3, 2, 4001)
    variance = np.exp(2 * x)[:, None] + SIGMA**2 / sizes
    precision = (1 / variance).sum(axis=1) + 1 / 4
    mean = (means / variance).sum(axis=1) / precision
    logp = -0.5 * (x - np.log(0.7)) ** 2 - 0.5 * np.log(variance).sum(axis=1)
    logp += -0.5 * np.log(precision) - 0.5 * (means**2 / variance).sum(axis=1)
    logp += 0.5 * precision * mean**2
    check_log_tau(idata, x, logp)


def arrow(d=300):
    """Precision of d unknowns that depend on two that they share, and its mean."""
    rng = np.random.default_rng(3)
    H = np.diag(rng.uniform(0.5, 2.0, d))
    H[:2, 2:] = rng.normal(0, 0.5, (2, d - 2))
    H[2:, :2] = H[:2, 2:].T
    H[[0, 1], [0, 1]] = np.square(H[:2, 2:]).sum(axis=1) * 3
    return H, rng.standard_normal(d)


def test_few_directions_tell_how_shared_unknowns_and_effects_depend_on_each_other():
    H, mean = arrow()
    with pm.Model() as model:
        x = pm.Flat("x", shape=len(H))
        pm.Potential("energy", -0.5 * (x - mean) @ H @ (x - mean))
    gradient, start = gradient_with_effects(model, None)
    passes = CountedPasses(gradient.passes)
    fit = low_rank_fit(passes, start, [slice(2, len(H))])
    assert fit.is_mode
    L = fit.metric.matrix()
    values = np.linalg.eigvalsh(L.T @ H @ L)
    assert values.min() > 0.9
    assert values.max() < 1.1
    # a diagonal alone leaves what the shared two mean to all
    alone = np.sqrt(np.diag(H))
    assert np.linalg.eigvalsh(H / np.outer(alone, alone)).min() < 0.5
    assert np.linalg.norm(np.linalg.solve(L, fit.mean - mean), np.inf) < 0.1
    found = extreme_curvatures(CountedPasses(gradient.passes), fit.mean, fit.metric)
    assert found.smallest == pytest.approx(values.min(), rel=0.1)
    assert found.largest == pytest.approx(values.max(), rel=0.1)


@pytest.mark.slow
def test_random_walks_are_right_where_rows_know_them_well():
    """A thousand rows a place: as written, scale and steps are on a narrow ridge."""
    rng = np.random.default_rng(12)
    n_places, n_rows = 20, 1000
    place = np.repeat(np.arange(n_places), n_rows)
    y = 0.5 * np.cumsum(rng.standard_normal(n_places))[place] + rng.standard_normal(place.size)
    with pm.Model():
        tau = pm.LogNormal("tau", 0, 1)
        walk = pt.cumsum(pm.Normal("z", shape=n_places)) * tau
        pm.Normal("y", walk[place], 1, observed=y)
        step = SGHMC(compile_kwargs=FAST)
        idata = pm.sample(cores=2, random_seed=3, step=step, **QUICK, **QUIET)
    # by quadrature over log τ: given τ, means of places are Gaussian
    means = y.reshape(n_places, n_rows).mean(axis=1)
    values, vectors = np.linalg.eigh(np.minimum.outer(*[np.arange(1.0, n_places + 1)] * 2))
    x = np.linspace(-4, 2, 4001)
    variance = np.exp(2 * x)[:, None] * values + 1 / n_rows
    logp = -0.5 * x**2 - 0.5 * (np.log(variance) + (vectors.T @ means) ** 2 / variance).sum(axis=1)
    check_log_tau(idata, x, logp)


@pytest.mark.slow
def test_a_smooth_process_is_right_whose_scales_come_to_zero():
    """Coefficients of a basis with the spectrum of a Gaussian process, as ``pm.gp.HSGP`` has it."""
    rng = np.random.default_rng(14)
    n_rows, sigma, end = 2000, 0.5, 1.5
    x = rng.uniform(-1, 1, n_rows)
    y = np.sin(5 * x) + sigma * rng.standard_normal(n_rows)
    omega = np.arange(1, 21) * np.pi / (2 * end)
    basis = np.sin(omega * (x[:, None] + end)) / np.sqrt(end)
    with pm.Model():
        length, eta = pm.LogNormal("length", -0.5, 0.7), pm.LogNormal("eta", 0, 0.7)
        spectrum = eta**2 * np.sqrt(2 * np.pi) * length * pt.exp(-0.5 * (omega * length) ** 2)
        mu = basis @ (pm.Normal("z", shape=omega.size) * pt.sqrt(spectrum))
        pm.Normal("y", mu, sigma, observed=y)
        step = SGHMC(compile_kwargs=FAST)
        idata = pm.sample(cores=2, random_seed=3, step=step, **QUICK, **QUIET)
    # by quadrature over both logarithms: given these, coefficients are Gaussian
    u, v = np.meshgrid(np.linspace(-2, 0.5, 101), np.linspace(-2, 3, 101), indexing="ij")
    inner, outer = basis.T @ basis, basis.T @ y
    logp = -0.5 * ((u + 0.5) / 0.7) ** 2 - 0.5 * (v / 0.7) ** 2
    for at in np.ndindex(logp.shape):
        scale = np.exp(v[at] - 0.25 * (omega * np.exp(u[at])) ** 2 + 0.5 * u[at])
        scale *= (2 * np.pi) ** 0.25
        precision = np.eye(omega.size) + scale[:, None] * inner * scale / sigma**2
        solved = np.linalg.solve(precision, scale * outer)
        logp[at] += 0.5 * solved @ (scale * outer) / sigma**4
        logp[at] -= 0.5 * np.linalg.slogdet(precision)[1]
    p = np.exp(logp - logp.max())
    p /= p.sum()
    for name, values in (("length", u), ("eta", v)):
        mean = (p * values).sum()
        draws = np.log(idata.posterior[name].values)
        assert abs(draws.mean() - mean) < 4.5 * error(draws)
        squares = np.square(draws - mean)
        assert abs(squares.mean() - (p * np.square(values - mean)).sum()) < 4.5 * error(squares)
