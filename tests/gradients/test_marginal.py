"""Effects of groups integrated out: likelihoods and gradients beside integrals by brute force, exact means and noise."""

from types import SimpleNamespace

import arviz as az
import numpy as np
import pymc as pm
import pytest
import xarray as xr

from modes import FAST, QUIET, C
from pymc.pytensorf import compile
from scipy.special import expit, logsumexp
from scipy.stats import multivariate_normal
from targets import plain_gradient

from pymc_sghmc import SGHMC, SGLD, recover_effects
from pymc_sghmc.checks import unconstrained_point
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.metric import Dense
from pymc_sghmc.gradients.noise import noise_covariance
from pymc_sghmc.gradients.second_order import second_order
from pymc_sghmc.hierarchy import effect_draws
from pymc_sghmc.hierarchy.cluster_effects import named_effects
from pymc_sghmc.hierarchy.cluster_quadratics import N_FAR
from pymc_sghmc.hierarchy.marginal import marginal_of
from pymc_sghmc.hierarchy.placement import missed, place_nodes, reference_with_nodes
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.rows.data import Minibatch
from pymc_sghmc.step import log
from pymc_sghmc.tuning.far_noise import noise_along_parameters
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

GROUPS, N = 12, 60
rng = np.random.default_rng(0)
GROUP = np.concatenate([np.arange(10), rng.integers(0, 10, N - 10)])  # ragged, and two are empty
X, W = rng.standard_normal(N), rng.standard_normal(GROUPS)
COUNTS, COIN, REAL = rng.poisson(2, N), rng.binomial(1, 0.5, N), 1 + rng.standard_t(4, N)
SHIFTS = 0.0, 0.4, -0.4


def logistic():
    b, tau = pm.Normal("b", 0, 1), pm.HalfNormal("tau", 1)
    u = pm.Normal("u", 0, tau, shape=GROUPS)
    pm.Bernoulli("y", logit_p=b * X + u[GROUP], observed=COIN)


def poisson():
    b, tau = pm.Normal("b", 0, 1), pm.HalfNormal("tau", 1)
    u = pm.Normal("u", 0, 1, shape=GROUPS)
    pm.Poisson("y", pm.math.exp(b + (tau * u)[GROUP]), observed=COUNTS)


def gaussian():
    b, tau, sigma = pm.Normal("b", 0, 1), pm.HalfNormal("tau", 1), pm.HalfNormal("sigma", 1)
    u = pm.Normal("u", b * W, tau, shape=GROUPS)
    pm.Normal("y", u[GROUP], sigma, observed=REAL)


def student():
    tau, sigma = pm.HalfNormal("tau", 1), pm.HalfNormal("sigma", 1)
    u = pm.StudentT("u", nu=5, mu=0, sigma=tau, shape=GROUPS)
    pm.StudentT("y", nu=4, mu=u[GROUP], sigma=sigma, observed=REAL)


def data_with_dims():
    with pm.modelcontext(None) as model:
        model.add_coords({"group": range(GROUPS), "row": range(N)})
    group, w = pm.Data("group_of", GROUP, dims="row"), pm.Data("w", W, dims="group")
    tau = pm.Exponential("tau", 1)
    z = pm.Normal("u", 0, 1, dims="group")
    u = pm.Deterministic("v", 0.3 * w + z * tau, dims="group")
    pm.Binomial("y", n=3, logit_p=u[group], observed=COIN + 1, dims="row")


def frailty():
    tau, a = pm.HalfNormal("tau", 1), pm.Normal("a", 0, 1)
    u = pm.LogNormal("u", 0, tau, shape=GROUPS)
    pm.Exponential("y", u[GROUP] * pm.math.exp(a), observed=np.abs(REAL))


def lkj(centred=True):
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1.0))
    if centred:
        u = pm.MvNormal("u", 0, chol=chol, shape=(GROUPS, 2))
    else:
        u = pm.Normal("u", 0, 1, shape=(GROUPS, 2)) @ chol.T
    pm.StudentT("y", nu=5, mu=u[GROUP, 0] + u[GROUP, 1] * X, sigma=1, observed=REAL)


def lkj_turned():
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1.0))
    u = pm.math.dot(chol, pm.Normal("u", 0, 1, shape=(2, GROUPS)))
    pm.Normal("y", u[0, GROUP] + u[1][GROUP] * X, 1, observed=REAL)


def tables_turned():
    """Groups on the second axis, with what is known of each, scale and mean."""
    with pm.modelcontext(None) as model:
        model.add_coords({"number": range(2), "group": range(GROUPS)})
    tau, b = pm.HalfNormal("tau", 1), pm.Normal("b", 0, 1)
    mean = np.stack([W, W**2])
    dims = "number", "group"
    u = pm.SkewNormal("u", alpha=1, mu=b * mean, sigma=tau, dims=dims)
    pm.Normal("y", u[0, GROUP] + u[1][GROUP] * X, 1, observed=REAL)


def two_outcomes():
    """Intercepts and slopes of two unknowns, in two forms; two outcomes of the same rows."""
    ta, ts = pm.HalfNormal("ta", 1), pm.HalfNormal("ts", 1)
    u, s = pm.Normal("u", 0, 1, shape=GROUPS), pm.Normal("s", 0, ts, shape=GROUPS)
    pm.Normal("y", ta * u[GROUP] + s[GROUP] * X, 1, observed=REAL)
    pm.Poisson("k", pm.math.exp(0.5 * (ta * u)[GROUP]), observed=COUNTS)


def correlated_by_hand():
    """Rows see two unknowns combined, not each by itself."""
    ta, r = pm.HalfNormal("ta", 1), pm.Uniform("r", -1, 1)
    u, s = pm.Normal("u", 0, 1, shape=GROUPS), pm.Normal("s", 0, 1, shape=GROUPS)
    slopes = r * u + pm.math.sqrt(1 - r**2) * s
    pm.Normal("y", ta * u[GROUP] + slopes[GROUP] * X, 1, observed=REAL)


MODELS = {
    build.__name__: build
    for build in (
        logistic,
        poisson,
        gaussian,
        student,
        data_with_dims,
        frailty,
        lkj,
        lkj_turned,
        tables_turned,
    )
} | {
    "lkj_non_centred": lambda: lkj(centred=False),
    two_outcomes.__name__: two_outcomes,
    correlated_by_hand.__name__: correlated_by_hand,
}
TWO = two_outcomes, correlated_by_hand


def marginal(build, names=None, batch_size=20):
    """Model, and its gradient without effects, nodes placed near the middle; and where that is."""
    with pm.Model() as model:
        build()
    names = names or (["u", "s"] if build in TWO else ["u"])
    point = model.initial_point()
    effects = named_effects(model, names, point)
    gone = {effect.value for effect in effects}
    unknowns = Unknowns([v for v in model.value_vars if v not in gone], point)
    gradient = plain_gradient(
        model,
        unknowns,
        batch_size,
        point,
        FAST,
        rewriting=Rewriting(integrated=tuple(effects)),
    )
    position = unknowns.ravel(point) - 0.3
    marginal_of(gradient.density).place_at(gradient, position)
    return model, unknowns, gradient, position


def by_brute_force(model, unknowns, gradient, position, names):
    """Log of the integral over each group's numbers of the model's own density, less its prior of the rest."""
    density = gradient.density
    k, n = marginal_of(density).k, marginal_of(density).clusters.count.size
    terms = model.logp(vars=[*(model[name] for name in names), *model.observed_RVs], sum=False)
    logp = compile(model.value_vars, terms, mode="FAST_COMPILE", on_unused_input="ignore")
    axis = np.linspace(-30, 30, 3001) if k == 1 else np.linspace(-6, 6, 81)
    grid = np.stack(np.meshgrid(*[axis] * k, indexing="ij"), axis=-1).reshape(-1, k)
    base = unknowns.unravel(position, model.initial_point())
    values = []
    for one in grid:
        point = base | marginal_of(density).by_name(np.tile(one, (n, 1)))
        found, total = logp(*(point[v.name] for v in model.value_vars)), np.zeros(n)
        for term in found[: len(names)]:
            total += np.moveaxis(term, term.shape.index(n), 0).reshape(n, -1).sum(axis=1)
        for term in found[len(names) :]:
            total += np.bincount(GROUP, term, minlength=n)
        values.append(total)
    return logsumexp(values, axis=0) + k * np.log(axis[1] - axis[0])


SLOW = set(MODELS) - {"poisson"}
EACH = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]


@pytest.mark.parametrize("name", EACH)
def test_likelihood_is_the_integral(name):
    model, unknowns, gradient, position = marginal(MODELS[name])
    names = ["u", "s"] if MODELS[name] in TWO else ["u"]
    density, n_clusters = gradient.density, marginal_of(gradient.density).n_clusters
    assert n_clusters == 10
    for shift in SHIFTS:
        expected = by_brute_force(model, unknowns, gradient, position + shift, names)
        marginal_of(density).use(61)
        found = gradient.passes.likelihood(position + shift)[0]
        # empty groups' prior integrates to 1
        in_order = expected[marginal_of(density).clusters.groups]
        assert np.allclose(in_order[n_clusters:], 0, atol=1e-5)
        error = 1e-8 if marginal_of(density).k == 1 else 1e-6  # the coarser grid's
        assert found == pytest.approx(in_order[:n_clusters].sum(), abs=error)


@pytest.mark.parametrize(
    "name", ["poisson", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gaussian", "lkj"))]
)
def test_gradient_is_that_of_the_integral(name):
    """Also three sds from the centre along each unknown, where the nodes must have followed."""
    _, _, gradient, position = marginal(MODELS[name])
    density, passes, d = gradient.density, gradient.passes, position.size
    marginal_of(density).place_at(gradient, position, Dense(0.2 * np.eye(d)))
    marginal_of(density).use(21)
    for point in (position, *(position + sign * 0.6 * e for e in np.eye(d) for sign in (1, -1))):
        h = 1e-4 * np.eye(d)
        expected = [
            (passes.likelihood(point + e)[0] - passes.likelihood(point - e)[0]) / 2e-4 for e in h
        ]
        assert passes.likelihood(point)[1] == pytest.approx(expected, rel=1e-5, abs=1e-4)


@pytest.mark.slow
def test_nodes_are_finite_wherever_they_are_placed():
    """Also where scales under- and overflow: a set-up may pass there."""
    _, _, gradient, position = marginal(lkj)
    density, d = gradient.density, position.size
    for z in np.random.default_rng(0).standard_normal((20, d)):
        marginal_of(density).place_at(gradient, position + 20 * z, Dense(np.eye(d)))
        assert np.isfinite(marginal_of(density).sites.table).all()
        assert np.isfinite(marginal_of(density).sites.slopes).all()


def test_modes_that_nodes_do_not_reach_are_told():
    """By as much as the gradient is off; and nothing is told where each group has one mode."""

    def bent():
        b, tau = pm.Normal("b", 0, 1), pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, 1, shape=GROUPS)
        pm.Normal("y", 0.1 * b * u[GROUP] + tau * u[GROUP] ** 2, 0.3, observed=1 + 0.1 * REAL)

    some = np.arange(10)
    for build in (bent, logistic):
        model, unknowns, gradient, position = marginal(build)
        marginal_of(gradient.density).use(31)
        centre = GaussianFit(position, Dense(0.1 * np.eye(2)), is_mode=True, passes=0.0)
        told = missed(marginal_of(gradient.density), gradient, centre, some)
        if build is logistic:
            assert told == 0
            continue
        sides = [
            by_brute_force(model, unknowns, gradient, position + h, ["u"]).sum()
            for h in 1e-4 * np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])
        ]
        slopes = np.array([sides[0] - sides[1], sides[2] - sides[3]]) / 2e-4
        off = 0.1 * np.abs(slopes - gradient.passes.likelihood(position)[1]).max()
        assert off > 0.05
        assert told == pytest.approx(off, rel=0.1)


def test_modes_are_found_where_newton_steps_overshoot():
    """A product of effects, one of them heavy-tailed: the curvature far out says nothing of the mode's."""

    def product():
        b, tau = pm.Normal("b", 0, 1), pm.HalfNormal("tau", 1)
        lam, z = pm.HalfCauchy("lam", 1, shape=GROUPS), pm.Normal("z", 0, 1, shape=GROUPS)
        pm.Normal("y", b + (z * lam)[GROUP] * tau, 0.5, observed=REAL)

    model, unknowns, gradient, position = marginal(product, ["z", "lam"])
    likelihood, slope = gradient.passes.likelihood(position)
    exact = by_brute_force(model, unknowns, gradient, position, ["z", "lam"]).sum()
    # nodes are no good rule for such a product; around wrong modes the integrals would be far off
    assert likelihood == pytest.approx(exact, abs=0.25 * 10)  # of ten groups
    assert np.isfinite(slope).all()


def extreme_groups():
    """A logistic model of groups that are nearly all of one outcome."""
    draws = np.random.default_rng(3)
    group = np.repeat(np.arange(100), 5)
    p = expit(6 * draws.standard_normal(100))[group]
    a, tau = pm.Normal("a", 0, 3), pm.HalfNormal("tau", 5)
    u = pm.Normal("u", 0, tau, shape=100)
    pm.Bernoulli("y", logit_p=a + u[group], observed=draws.random(500) < p)


@pytest.mark.slow
def test_nodes_are_placed_where_the_centre_stays():
    """Five nodes for such groups send the centre to and fro; more find that of sixty-one."""
    _, _, gradient, start = marginal(extreme_groups, batch_size=500)
    integrated = marginal_of(gradient.density)
    integrated.use(5)
    assert not reference_with_nodes(integrated, gradient, start, None).stays
    found = place_nodes(integrated, gradient, start, None)
    assert integrated.error < 0.5
    integrated.use(61)
    expected = reference_with_nodes(integrated, gradient, found, None)
    moved = expected.fit.metric.from_theta(found - expected.position)
    assert expected.stays
    assert np.abs(moved).max() < 0.3


def test_a_centre_that_never_stays_is_told(monkeypatch):
    _, _, gradient, start = marginal(gaussian_alone)
    monkeypatch.setattr("pymc_sghmc.hierarchy.placement.NEAR", -1.0)
    integrated = marginal_of(gradient.density)
    place_nodes(integrated, gradient, start, None)
    assert integrated.error == np.inf


def test_nodes_that_follow_need_be_few():
    """Along all unknowns: five nodes that stay are far off where five that follow aren't."""

    def shifted():
        b, tau = pm.Normal("b", 0, 1), pm.HalfNormal("tau", 1)
        pm.Normal("y", b + pm.Normal("u", 0, tau, shape=GROUPS)[GROUP], 0.3, observed=REAL)

    _, unknowns, gradient, position = marginal(shifted)
    density, d = gradient.density, position.size
    far = position + 2.0 * (np.arange(d) == unknowns.places["b"].start)  # it moves all effects
    marginal_of(density).place_at(gradient, far)  # where a normal law needs one node
    expected, errors = gradient.passes.likelihood(far)[0], {}
    for metric in (None, Dense(0.2 * np.eye(d))):
        marginal_of(density).place_at(gradient, position, metric)
        marginal_of(density).use(5)
        errors[metric is None] = abs(gradient.passes.likelihood(far)[0] - expected)
    assert errors[False] < 1e-8 < 1e-6 < errors[True], errors


@pytest.mark.slow
def test_both_forms_have_the_same_nodes():
    tables = []
    for form in (lkj, MODELS["lkj_non_centred"]):
        _, _, gradient, _ = marginal(form)
        tables.append(marginal_of(gradient.density).sites.table)
    assert np.allclose(*tables)


@pytest.mark.parametrize(
    "name", ["poisson", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lkj", "two_outcomes"))]
)
def test_minibatches_of_groups_have_the_exact_mean(name):
    """Plain, first and second order; and the noise of the latter is known."""
    _, _, gradient, position = marginal(MODELS[name])
    density, data, d = gradient.density, gradient.data, position.size
    metric = Dense(0.1 * np.eye(d))
    marginal_of(density).place_at(gradient, position, metric)
    marginal_of(density).use(15)
    point = position + 0.1 * np.arange(d) / d
    expected = gradient.passes.log_density(point)
    first, second = ControlVariates(gradient), second_order(gradient)
    first.set_centre(position, metric)
    second.set_centre(position, metric)
    for one in (gradient, first, second):
        minibatches = [Minibatch((np.array([i]),), data.resident) for i in range(10)]
        found = [one(point, minibatch) for minibatch in minibatches]
        p = 1 / np.concatenate([one.order.weights(m.rows)[0] for m in minibatches])
        assert p.sum() == pytest.approx(1)
        assert p @ [logp for logp, _ in found] == pytest.approx(expected[0])
        forces = np.array([grad for _, grad in found])
        assert p @ forces == pytest.approx(expected[1], abs=1e-7)
    ends = [second(point + e, minibatches[0])[0] for e in (1e-4 * np.eye(d)).repeat(2, axis=0)
            * np.tile([1, -1], d)[:, None]]  # fmt: skip
    slopes = np.subtract(ends[::2], ends[1::2]) / 2e-4
    assert slopes == pytest.approx(second(point, minibatches[0])[1], rel=1e-3, abs=1e-3)
    deviations = (forces - expected[1]) * 0.1
    [[V]] = second.noise_at([point], metric)
    assert pytest.approx(p @ np.square(deviations), rel=0.02) == V


@pytest.mark.parametrize("d", [1, 4])
def test_groups_that_are_quadratic_have_no_noise_of_second_order(d):
    """Normal rows and effects of known scales: points as many as the unknowns tell all of them."""

    def normal():
        b = pm.Normal("b", 0, 1, shape=d)
        u = pm.Normal("u", 0, 0.7, shape=GROUPS)
        x = np.random.default_rng(3).standard_normal((N, d))
        pm.Normal("y", x @ b + u[GROUP], 0.9, observed=REAL)

    _, _, gradient, position = marginal(normal)
    metric = Dense(0.3 * np.eye(d))
    marginal_of(gradient.density).place_at(gradient, position, metric)
    second = second_order(gradient)
    passes = second.set_centre(position, metric)
    assert passes == 1 + d * (d + 1) + 2 * N_FAR
    point = position + 0.5
    plain = noise_covariance(gradient, metric, point, np.random.default_rng(0))
    [[V]] = second.noise_at([point], metric)
    assert (V / plain < 1e-6).all()


def test_noise_far_out_is_that_of_the_worst_unknown():
    """Four sds along each unknown, in its direction, by the forces of all groups one by one."""
    _, _, gradient, position = marginal(MODELS["poisson"])
    density, data, d = gradient.density, gradient.data, position.size
    factor = np.array([[0.1, 0.0], [0.06, 0.08]])
    metric = Dense(factor)
    marginal_of(density).place_at(gradient, position, metric)
    second, found = second_order(gradient), []
    second.set_centre(position, metric)
    minibatches = [Minibatch((np.array([i]),), data.resident) for i in range(10)]
    p = 1 / np.concatenate([second.order.weights(m.rows)[0] for m in minibatches])
    for one in np.eye(d):
        along = factor.T @ one / np.linalg.norm(factor.T @ one)
        for x in (-4.0, 4.0):
            point = position + x * factor @ along
            forces = [factor.T @ second(point, m)[1] for m in minibatches]
            V = p @ np.square(forces) - np.square(p @ forces)
            found.append(V @ np.square(along))
    centre = GaussianFit(position, metric, is_mode=True, passes=0.0)
    [n] = data.batch_sizes
    expected = pytest.approx(max(found) / n / 0.5, rel=0.02)
    assert noise_along_parameters(second, centre, metric) == expected


@pytest.mark.parametrize("k", [4, 5])
@pytest.mark.slow
def test_normal_effects_of_many_numbers_have_the_closed_form(k):
    """Intercepts and slopes by LKJ: three nodes for each number are exact, and so is their gradient."""
    X = np.random.default_rng(2).standard_normal((N, k))

    def slopes():
        chol, _, _ = pm.LKJCholeskyCov("chol", n=k, eta=2, sd_dist=pm.HalfNormal.dist(1.0))
        u = pm.MvNormal("u", 0, chol=chol, shape=(GROUPS, k))
        pm.Normal("y", (u[GROUP] * X).sum(axis=1), 1, observed=REAL)

    model, _, gradient, position = marginal(slopes)
    density, passes = gradient.density, gradient.passes
    assert marginal_of(density).n_nodes == 3
    marginal_of(density).place_at(gradient, position, Dense(0.2 * np.eye(position.size)))
    [chol] = model.replace_rvs_by_values([model["chol"]])
    factor = compile([model.value_vars[0]], chol, mode="FAST_COMPILE")
    for point in (position, position + 0.4):
        L, expected = np.zeros((k, k)), 0.0
        L[np.tril_indices(k)] = factor(point)
        for j in range(10):
            Z = X[j == GROUP] @ L
            cov = Z @ Z.T + np.eye(len(Z))
            expected += multivariate_normal.logpdf(REAL[j == GROUP], np.zeros(len(Z)), cov)
        assert passes.likelihood(point)[0] == pytest.approx(expected, abs=1e-8)
    steps = 1e-5 * np.eye(position.size)
    slopes = [
        (passes.likelihood(position + e)[0] - passes.likelihood(position - e)[0]) / 2e-5
        for e in steps
    ]
    assert passes.likelihood(position)[1] == pytest.approx(slopes, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_order_of_rows_does_not_count():
    found = []
    for order in (np.arange(N), np.random.default_rng(1).permutation(N)):
        with pm.Model() as model:
            tau = pm.HalfNormal("tau", 1)
            u = pm.Normal("u", 0, tau, shape=GROUPS)
            pm.Normal("y", u[GROUP[order]] + X[order], 1, observed=REAL[order])
        effects = named_effects(model, ["u"], model.initial_point())
        unknowns = Unknowns(
            [model["tau"]] and [model.rvs_to_values[model["tau"]]], model.initial_point()
        )
        gradient = plain_gradient(
            model,
            unknowns,
            10,
            None,
            FAST,
            rewriting=Rewriting(integrated=tuple(effects)),
        )
        marginal_of(gradient.density).place_at(gradient, np.zeros(1))
        found.append(gradient.passes.likelihood(np.array([0.3])))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] == pytest.approx(found[1][1])


def test_normal_effects_have_the_conditional_law():
    """Draws of all groups given all else, the empty ones included, beside the normal law."""
    with pm.Model() as model:
        tau = pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0.5, tau, shape=GROUPS)
        pm.Normal("y", u[GROUP], 1, observed=REAL)
    effects = named_effects(model, ["u"], model.initial_point())
    unknowns = Unknowns([model.rvs_to_values[tau]], model.initial_point())
    gradient = plain_gradient(
        model,
        unknowns,
        10,
        None,
        FAST,
        rewriting=Rewriting(integrated=tuple(effects)),
    )
    density, position = gradient.density, np.log([0.8])
    marginal_of(density).place_at(gradient, position - 1)  # somewhere else
    assert (
        not marginal_of(density).sites.table[marginal_of(density).n_clusters :].any()
    )  # nobody has seen these
    rng, n = np.random.default_rng(0), 500
    drawn = [marginal_of(density).draw(gradient, position, rng) for _ in range(n)]
    draws = np.array([values["u"] for values, _ in drawn])
    counts, sums = np.bincount(GROUP, minlength=GROUPS), np.bincount(GROUP, REAL, GROUPS)
    precision = counts + 0.8**-2
    mean, sd = (sums + 0.5 * 0.8**-2) / precision, precision**-0.5
    assert min(rate for _, rate in drawn) > 0.3
    # 24 numbers within 4.5 standard errors
    assert np.abs(draws.mean(axis=0) - mean).max() < 4.5 * (sd / n**0.5).max()
    assert np.abs(draws.std(axis=0) / sd - 1).max() < 4.5 / (2 * n) ** 0.5


def test_effects_unlike_a_gaussian_have_the_conditional_law(monkeypatch):
    """Midpoints of growth curves, some with two heaps or a long tail, beside a grid; and not without a look at them."""
    rng, x = np.random.default_rng(21), np.linspace(-6, 6, 1201)
    group, time = np.repeat(np.arange(60), 10), rng.uniform(-3, 3, 600)
    u0 = rng.normal(0, 1, 60)
    y = 2 * expit(4 * (time - u0[group])) + 0.6 * rng.normal(size=600)
    with pm.Model() as model:
        b, u = pm.Normal("b", 2, 1), pm.Normal("u", 0, 1, shape=60)
        pm.Normal("y", b * pm.math.sigmoid(4 * (time - u[group])), 0.6, observed=y)
    effects = named_effects(model, ["u"], model.initial_point())
    unknowns = Unknowns([model.rvs_to_values[b]], model.initial_point())
    gradient = plain_gradient(
        model,
        unknowns,
        100,
        None,
        FAST,
        rewriting=Rewriting(integrated=tuple(effects)),
    )
    density, position, n = gradient.density, np.array([2.0]), 100
    marginal_of(density).place_at(gradient, position)
    by_row = -0.5 * ((y[:, None] - 2 * expit(4 * (time[:, None] - x))) / 0.6) ** 2
    p = np.exp(np.add.reduceat(by_row, np.arange(0, 600, 10)) - 0.5 * x**2)
    p /= p.sum(axis=1, keepdims=True)
    mean = p @ x
    sd = (p @ x**2 - mean**2) ** 0.5

    def farthest():
        draw = marginal_of(density).draw
        draws = [draw(gradient, position, rng)[0]["u"] for _ in range(n)]
        return np.abs((np.mean(draws, axis=0) - mean) / sd).max() * n**0.5

    assert farthest() < 4.5  # standard errors
    monkeypatch.setattr(effect_draws, "HARD", np.inf)
    marginal_of(density).draw._hard = None
    assert farthest() > 5


@pytest.mark.slow  # 100 s with PyMC 5
def test_effects_where_the_prior_alone_is_another_heap_have_the_conditional_law(monkeypatch):
    """Those of a horseshoe, of groups that are either nothing or something, beside a grid of λ."""
    values, copies, rows, tau = np.array([1.4, 1.6, 1.8]), 400, 4, 0.16
    n_groups = values.size * copies
    group, y = np.repeat(np.arange(n_groups), rows), np.repeat(values, copies * rows)
    with pm.Model() as model:
        t, lam = pm.HalfNormal("tau", 1), pm.HalfCauchy("lam", 1, shape=n_groups)
        u = pm.Normal("z", 0, 1, shape=n_groups) * lam * t
        pm.Normal("y", u[group], 1, observed=y)
    effects = named_effects(model, ["lam", "z"], model.initial_point())
    unknowns = Unknowns([model.rvs_to_values[t]], model.initial_point())
    gradient = plain_gradient(
        model,
        unknowns,
        100,
        None,
        FAST,
        rewriting=Rewriting(integrated=tuple(effects)),
    )
    density, position, n = gradient.density, np.log([tau]), 3
    marginal_of(density).place_at(gradient, position)

    log_lam = np.linspace(-12, 12, 2401)
    v = np.square(tau * np.exp(log_lam))
    away = np.square(values[:, None]) / (v + 1 / rows) / 2
    p = np.exp(log_lam - np.log1p(np.exp(2 * log_lam)) - np.log(v + 1 / rows) / 2 - away)
    p /= p.sum(axis=1, keepdims=True)
    shrunk = rows / (rows + 1 / v)
    means = shrunk * values[:, None]
    mean = (p * means).sum(axis=1)
    sd = ((p * (shrunk / rows + means**2)).sum(axis=1) - mean**2) ** 0.5

    def farthest():
        rng = np.random.default_rng(0)
        draws = [marginal_of(density).draw(gradient, position, rng)[0] for _ in range(n)]
        found = tau * np.array([draw["z"] * np.exp(draw["lam_log__"]) for draw in draws])
        found = found.reshape(n, values.size, copies).mean(axis=(0, 2))
        return np.abs((found - mean) / sd).max() * (n * copies) ** 0.5

    assert farthest() < 4.5  # standard errors
    over_nodes = effect_draws.OverNodes
    monkeypatch.setattr(
        effect_draws, "OverNodes", lambda around, *args: over_nodes(around[:1], *args)
    )
    assert farthest() > 4.5


def sampled(model, draws=150, tune=60, chains=2, compile_kwargs=FAST, **options):
    with model:
        step = SGHMC(compile_kwargs=compile_kwargs, **options)
        settings = {"chains": chains, "cores": min(chains, 2), "random_seed": 1, **QUIET}
        return step, pm.sample(draws, tune=tune, step=step, **settings)


MANY = {"draws": 500, "tune": 500, "chains": 4, "compile_kwargs": C}


def normal_groups(n_groups=40, rows=6):
    """Random intercepts whose posterior is known by a grid: model, moments, means of z, draws."""
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(n_groups), rows)
    y = 0.5 + 0.8 * rng.standard_normal(n_groups)[group] + rng.standard_normal(group.size)
    with pm.Model(coords={"group": range(n_groups)}) as model:
        a, tau = pm.Normal("a", 0, 2), pm.HalfNormal("tau", 1)
        pm.Normal("y", (a + tau * pm.Normal("z", 0, 1, dims="group"))[group], 1, observed=y)
    means = y.reshape(n_groups, rows).mean(axis=1)
    A, T = np.meshgrid(np.linspace(-1.5, 2.5, 401), np.linspace(0.005, 3, 600), indexing="ij")
    v = T**2 + 1 / rows
    logp = -(A**2) / 8 - T**2 / 2 - 0.5 * n_groups * np.log(v)
    logp -= 0.5 * np.square(means[:, None, None] - A).sum(axis=0) / v
    w = np.exp(logp - logp.max())
    w /= w.sum()
    exact = {}
    for name, x in {"a": A, "tau": T}.items():
        mean = (w * x).sum()
        exact[name] = mean, np.sqrt((w * np.square(x - mean)).sum())
    shrunk = rows * T**2 / (1 + rows * T**2)
    z = [(w * shrunk * (m - A) / T).sum() for m in means]

    def draws(n):
        cells = np.random.default_rng(4).choice(w.size, n, p=w.ravel())
        return A.ravel()[cells], T.ravel()[cells]

    return model, exact, np.array(z), draws


OPTIONS = [
    {"batch_size": "auto"},
    *(
        pytest.param(options | MANY, marks=pytest.mark.slow)
        for options in (
            {"batch_size": "auto"},
            {},
            {"batch_size": 60},
            {"batch_size": 60, "gradient": "control_variates"},
            {"batch_size": 120, "gradient": "plain"},
        )
    ),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_chain_has_the_exact_posterior(options):
    model, exact, z, _ = normal_groups()
    step, idata = sampled(model, marginalize="z", **options)
    assert step.tuner.gradient.density.d == 2
    posterior = idata.posterior
    for name, (mean, sd) in exact.items():
        x = posterior[name].to_numpy()
        ess = min(float(az.ess(x)), x.size)
        assert ess > 200
        assert abs(x.mean() - mean) < 4.5 * sd / ess**0.5
        # 2.5 % of bias are what plain minibatches may cost
        assert abs(x.std() / sd - 1) < 4.5 * (1 / (2 * ess) + 0.05**2) ** 0.5
    found = posterior["z"].to_numpy()
    assert posterior["z"].dims == ("chain", "draw", "group")
    assert np.abs(found.mean(axis=(0, 1)) - z).max() < 4.5 / (0.75 * x.size) ** 0.5 + 0.02


def with_group(build):
    """Model of ``build(u, tau)``, whose effects may not be integrated out."""
    with pm.Model() as model:
        tau = pm.HalfNormal("tau", 1)
        build(pm.Normal("u", 0, tau, shape=GROUPS), tau)
    return model


def mean_taken_out(u, tau):
    pm.Normal("y", (u - u.mean())[GROUP], 1, observed=REAL)


def two_groups_a_row(u, tau):
    pm.Normal("y", u[GROUP] + u[GROUP[::-1].copy()], 1, observed=REAL)


def told_by_another(u, tau):
    pm.Normal("v", u.sum(), 1)
    pm.Normal("y", u[GROUP], 1, observed=REAL)


def in_a_potential(u, tau):
    pm.Potential("p", -u.sum())
    pm.Normal("y", u[GROUP], 1, observed=REAL)


def indicators(u, tau):
    pm.Normal("y", np.eye(GROUPS)[GROUP] @ u, 1, observed=REAL)


def not_by_row(u, tau):
    pm.Normal("y", tau, 1, observed=REAL)


def by_another_of_the_groups(u, tau):
    w = pm.Normal("w", 0, 1, shape=GROUPS)
    pm.Normal("y", (u * w)[GROUP], 1, observed=REAL)


def six_numbers(u, tau):
    v = pm.Normal("v", 0, 1, shape=(GROUPS, 5))
    pm.Normal("y", u[GROUP] + (v[GROUP] * X[:, None]).sum(axis=1), 1, observed=REAL)


def kinks(u, tau):
    v = pm.Normal("v", 0, 1, shape=GROUPS)
    pm.AsymmetricLaplace("y", kappa=0.5, mu=u[GROUP] + v[GROUP] * X, b=1, observed=REAL)


REFUSED = {
    mean_taken_out: "rows don't",
    two_groups_a_row: "more than one group",
    told_by_another: "depends on it, too",
    in_a_potential: "depends on it, too",
    indicators: "as u\\[group\\]",
    six_numbers: "5 at most",
    not_by_row: "no rows depend on it",
    by_another_of_the_groups: "can.t be integrated out",
    kinks: "kinks or jumps",
}


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_what_is_no_effect_of_groups_is_refused(build):
    with with_group(build), pytest.raises(ValueError, match=f"marginalize.*{REFUSED[build]}"):
        SGHMC(marginalize=["u", "v"] if build in (six_numbers, kinks) else "u", batch_size=20)


def beyond(u, tau):
    pm.Normal("y", u[GROUP + 8], 1, observed=REAL)


def by_potential(u, tau):
    pm.Potential("y", pm.logp(pm.Normal.dist(u[GROUP], 1), REAL).sum())


def by_offset(u, tau):
    v = pm.Deterministic("v", u * tau)
    pm.Normal("y", v[GROUP], 1, observed=REAL)


TOLD = {
    beyond: "'y' picks entries by number.*out of bounds",
    by_potential: "No likelihood.*Leave marginalize out",
    by_offset: "'v' is no parameter of the model, but computed from 'u'. Name",
}


@pytest.mark.parametrize("build", TOLD, ids=lambda build: build.__name__)
def test_what_is_amiss_is_told_without_a_batch_size(build):
    with with_group(build), pytest.raises(ValueError, match=TOLD[build]):
        SGHMC(marginalize="v" if build is by_offset else "u")


def test_other_likelihoods_may_have_other_rows():
    with with_group(gaussian_of_the_scale):
        step = SGHMC(marginalize="u", compile_kwargs=FAST)
    assert step.tuner.gradient.data.n_rows == [np.unique(GROUP).size, 17]


def gaussian_of_the_scale(u, tau):
    pm.Normal("y", u[GROUP], 1, observed=REAL)
    pm.Normal("w", tau, 1, observed=np.zeros(17))


@pytest.mark.parametrize("prior", [
    lambda: pm.ZeroSumNormal("u", shape=GROUPS),
    lambda: pm.GaussianRandomWalk("u", sigma=1, init_dist=pm.Normal.dist(0, 1), shape=GROUPS),
])  # fmt: skip
def test_priors_that_mix_groups_are_refused(prior):
    with pm.Model():
        tau = pm.HalfNormal("tau", 1)
        pm.Normal("y", prior()[GROUP], tau, observed=REAL)
        with pytest.raises(ValueError, match="marginalize: 'u' can't be integrated out"):
            SGHMC(marginalize=["u"], batch_size=20)


@pytest.mark.parametrize(("options", "words"), [
    ({"marginalize": ["v"]}, "'v' is no parameter"),
    ({"marginalize": ["tau"]}, "'tau' is one number"),
    ({"marginalize": [3]}, "must be names"),
    ({"marginalize": True}, "must be names"),
    ({"marginalize": ["u", "tau"]}, "'tau' is one number"),
    ({"marginalize": ["u"], "temperature": 0}, "with temperature"),
    ({"marginalize": ["u"], "blocked": False}, "with blocked"),
    ({"marginalize": ["u"], "vars": ["tau"]}, "vars lacks 'u'"),
    ({"marginalize": ["u"], "recover": "no"}, "recover='no': must be True or False"),
    ({"marginalize": ["u"], "compile_kwargs": {"mode": "JAX"}}, "with compile_kwargs"),
])  # fmt: skip
def test_bad_arguments_are_refused_in_words(options, words):
    with with_group(lambda u, tau: pm.Normal("y", u[GROUP], tau, observed=REAL)) as model:
        if "vars" in options:
            options = options | {"vars": [model["tau"]]}
        with pytest.raises(ValueError, match=words):
            SGHMC(batch_size=20, **options)


def test_other_groups_after_set_data_are_refused():
    with pm.Model() as model:
        group, tau = pm.Data("group", GROUP), pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, shape=GROUPS)
        pm.Normal("y", u[group], 1, observed=pm.Data("y_data", REAL))
        step = SGHMC(marginalize=["u"], batch_size=20, compile_kwargs=FAST)
        pm.set_data({"y_data": REAL + 1})
        step.begin_chain(np.random.default_rng(0))
        pm.set_data({"group": GROUP[::-1].copy()})
        with pytest.raises(ValueError, match="other groups"):
            step.begin_chain(np.random.default_rng(0))
    assert model["u"] is u


def test_new_data_have_nodes_of_their_own():
    """Of normal rows a pseudo-observation is their sum, wherever nodes are placed."""
    with pm.Model() as model:
        u = pm.Normal("u", 0, pm.HalfNormal("tau", 1), shape=GROUPS)
        pm.Normal("y", u[GROUP], 1, observed=pm.Data("y_data", REAL))
        step = SGHMC(marginalize=["u"], batch_size=20, compile_kwargs=FAST)
        begins_there = step.tuner.setup
        known, groups = marginal_of(step.tuner.gradient.density), np.unique(GROUP)

        def sums(data):
            return np.bincount(GROUP, data)[groups]

        np.testing.assert_allclose(known.sites.table[:-1, 0], sums(REAL))
        known.error, error = np.inf, known.error  # as of another set-up
        step.begin_chain(np.random.default_rng(0))
        step.step(model.initial_point() | {"tau_log__": np.array(1.5)})
        assert step.tuner.setup is begins_there  # wherever a chain of the same data begins
        assert known.error == error
        pm.set_data({"y_data": 3 * REAL + 1})
        step.begin_chain(np.random.default_rng(0))
        step.step(model.initial_point())
        np.testing.assert_allclose(known.sites.table[:-1, 0], sums(3 * REAL + 1))
        pm.set_data({"y_data": 1 - REAL})  # as where workers sampled, and have nodes of their own
        draws = xr.Dataset({"tau": (("chain", "draw"), np.ones((1, 2)))})
        recover_effects(SimpleNamespace(posterior=draws), step, progressbar=False)
        np.testing.assert_allclose(known.sites.table[:-1, 0], sums(1 - REAL))
    # a state holds nothing of a million groups
    assert step.chain.tuning.request.conditioned_on == ()


def test_nothing_is_left_of_the_data_before():
    """Nodes of new data are those of a new step, however many there were."""
    options = {"batch_size": 20, "compile_kwargs": FAST}
    with pm.Model() as model:
        u = pm.Normal("u", 0, pm.HalfNormal("tau", 1), shape=GROUPS)
        pm.Bernoulli("y", logit_p=u[GROUP], observed=pm.Data("y_data", COIN))
        step = SGHMC(marginalize=["u"], **options)
        marginal_of(step.tuner.gradient.density).use(31)
        pm.set_data({"y_data": 1 - COIN})
        step.begin_chain(np.random.default_rng(0))
        step.step(model.initial_point())
        again = SGHMC(marginalize=["u"], **options)
    (quadrature, sites, error), (quadrature_again, sites_again, error_again) = (
        one.tuner.setup.rewrite_states[0] for one in (step, again)
    )
    assert (quadrature, error) == (quadrature_again, error_again)
    for name, array in vars(sites).items():
        np.testing.assert_array_equal(array, getattr(sites_again, name))


@pytest.mark.parametrize("name", ["1|g", "int8"])
def test_effects_of_any_name(name):
    """As Bambi has them, and such as NumPy takes for a type."""

    def build():
        u = pm.Normal(name, 0, pm.HalfNormal("tau", 1), shape=GROUPS)
        pm.Normal("y", u[GROUP], 1, observed=REAL)

    _, _, gradient, position = marginal(build, [name])
    expected = marginal(gaussian_alone)[2].passes.likelihood(position)[0]
    assert gradient.passes.likelihood(position)[0] == pytest.approx(expected)


def gaussian_alone():
    u = pm.Normal("u", 0, pm.HalfNormal("tau", 1), shape=GROUPS)
    pm.Normal("y", u[GROUP], 1, observed=REAL)


def test_effects_by_row_need_no_value_in_a_centre_and_memory_is_told(caplog, monkeypatch):
    """One row a group, as for overdispersion; a draw of many effects is large."""
    monkeypatch.setattr(log, "MANY_VALUES", N)
    options = {"marginalize": ["u"], "batch_size": 20, "compile_kwargs": FAST}
    with pm.Model() as model, caplog.at_level("INFO", logger="pymc.sghmc"):
        b, tau = pm.Normal("b", 0, 1), pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, shape=N)
        pm.Poisson("y", pm.math.exp(b + u[pm.Data("i", np.arange(N))]), observed=COUNTS)
        step = SGHMC(centre={"tau_log__": 0.0, "b": 0.5}, **options)
        assert step.tuner.setup.fit.mean == pytest.approx([0.5, 0.0])
        effects = named_effects(model, ["u"], model.initial_point())
        point = unconstrained_point(model, {"tau": 1.0, "b": 0.5}, effects)
        assert (point["b"], point["tau_log__"]) == (0.5, 0.0)
        with pytest.raises(ValueError, match=r"centre: has no value of tau\."):
            SGHMC(centre={"b": 0.5}, **options)
        assert "recover=False" in caplog.text
        assert "var_names" in caplog.text
        caplog.clear()
        SGHMC(centre={"tau_log__": 0.0, "b": 0.5}, recover=False, **options)
    assert "u is NaN in all draws" in caplog.text
    assert "var_names without u" in caplog.text


def test_minibatches_where_no_gaussian_is_near_are_warned_of(caplog):
    """With a row each the scale of effects is hardly known; all rows at each step tell it as it is."""
    for batch_size in 20, None:
        with pm.Model(), caplog.at_level("WARNING", logger="pymc.sghmc"):
            b, tau = pm.Normal("b", 0, 1), pm.HalfNormal("tau", 1)
            u = pm.Normal("u", 0, tau, shape=N)
            pm.Bernoulli("y", logit_p=b + u[pm.Data("i", np.arange(N))], observed=COIN)
            options = {"batch_size": batch_size, "gradient": "plain", "compile_kwargs": FAST}
            step = SGHMC(marginalize=["u"], **options)
            assert not step.tuner.setup.is_gaussian
        assert (batch_size is None) is (
            f"Pass batch_size=None: each step then takes all {N} rows" not in caplog.text
        )
        caplog.clear()


def test_an_index_of_an_index_is_refused_in_words():
    with pm.Model():
        u = pm.Normal("u", 0, pm.HalfNormal("tau", 1), shape=4)
        pm.Normal("y", u[np.arange(GROUPS) % 4][GROUP], 1, observed=REAL)
        with pytest.raises(ValueError, match=r"u\[a\]\[b\] is u\[a\[b\]\]"):
            SGHMC(marginalize=["u"], batch_size=20)


def test_other_steps_see_effects_while_tuning_too():
    """Else the scale that one samples is that of zeros."""
    seen = []
    with pm.Model():
        a, tau = pm.Normal("a", 0, 1), pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, shape=GROUPS)
        pm.Normal("y", a + u[GROUP], 1, observed=REAL)
        options = {
            "marginalize": ["u"],
            "batch_size": 20,
            "compile_kwargs": FAST,
        }
        with pytest.raises(
            ValueError, match=r"recover=False with .* other steps sample 'tau_log__'"
        ):
            SGHMC([a, u], recover=False, **options)
        step = [SGHMC([a, u], **options), pm.Metropolis([tau])]
        pm.sample(
            5, tune=20, chains=1, step=step, random_seed=1, **QUIET,
            callback=lambda trace, draw: seen.append(draw.point["u"]),
        )  # fmt: skip
    seen = np.array(seen[1:])
    assert (np.std(seen, axis=0) > 0).all()
    assert (np.std(seen[:15], axis=0) > 0).all()


def test_nodes_follow_what_other_steps_sample():
    """Of normal rows the pseudo-observation is known, and with a small σ the effects are, too."""
    groups = np.unique(GROUP)
    with pm.Model() as model:
        b, tau, sigma = pm.Normal("b", 0, 9), pm.HalfNormal("tau", 1), pm.HalfNormal("sigma", 9)
        u = pm.Normal("u", 0, tau, shape=GROUPS)
        pm.Normal("y", b * X + u[GROUP], sigma, observed=REAL)
        options = {"batch_size": 20, "compile_kwargs": FAST}
        step = SGHMC([tau, sigma, u], marginalize="u", **options)
        point, known = model.initial_point(), marginal_of(step.tuner.gradient.density)
        for value in 5.0, -2.0, 30.0:
            point |= {"b": np.array(value)}
            start = step.tuner.gradient.density.from_model(step.unknowns.ravel(point))
            point, _ = step.step(point)
            place = step.unknowns.names.index("sigma_log__")
            now = known.sites.table[:-1, 0] + known.sites.slopes[:-1] @ (
                start - known.sites.reference
            )
            expected = np.bincount(GROUP, REAL - value * X)[groups] / np.exp(2 * start[place])
            if value != 5.0:  # where a chain begins it goes elsewhere first
                np.testing.assert_allclose(now, expected, rtol=1e-6, atol=1e-8)
        values = {"b": [5.0, -2.0], "tau": [1.0, 1.0], "sigma": [1e-3, 1e-3]}
        draws = xr.Dataset({k: (("chain", "draw"), [x]) for k, x in values.items()})
        found = recover_effects(SimpleNamespace(posterior=draws), step, progressbar=False)["u"]
    for i, value in enumerate(values["b"]):
        expected = np.bincount(GROUP, REAL - value * X)[groups] / np.bincount(GROUP)[groups]
        np.testing.assert_allclose(found[0, i, groups], expected, atol=0.01)  # ten sds


def test_effects_are_left_out_and_recovered():
    model, _, z, exact_draws = normal_groups()
    step, idata = sampled(model, 6, 10, chains=1, marginalize="z", recover=False)
    assert np.isnan(idata.posterior["z"]).all()
    # of the posterior's own draws of all else, so that those of the effects are independent
    a, tau = exact_draws(400)
    drawn = {"a": a.reshape(2, 200), "tau": tau.reshape(2, 200)}
    idata = SimpleNamespace(
        posterior=xr.Dataset(
            {name: (("chain", "draw"), x) for name, x in drawn.items()}, {"draw": range(200)}
        )
    )
    with model:
        found = recover_effects(idata, step, draws=100, random_seed=1, progressbar=False)
    assert found["z"].shape == (2, 100, 40)
    assert found["z"].dims[-1] == "group"
    kept = found["draw"].to_numpy()
    assert (found["tau"].to_numpy() == drawn["tau"][:, kept]).all()
    assert np.abs(found["z"].mean(("chain", "draw")) - z).max() < 4.5 / 200**0.5
    with model, pytest.raises(ValueError, match="integrates nothing out"):
        recover_effects(idata, SGLD(learning_rate=1e-4, batch_size=20, preconditioner=None))
    with model, pytest.raises(TypeError, match=r"the first must be what pm\.sample gave"):
        recover_effects(step, idata)


@pytest.mark.slow
def test_posterior_predictive_has_the_effects():
    """Outcomes of each group about its own mean, a + τz."""
    model, *_ = normal_groups(10, 3)
    _, idata = sampled(model, marginalize="z", **MANY)
    with model:
        drawn = pm.sample_posterior_predictive(idata, random_seed=1, progressbar=False)
    a, tau, z = (idata.posterior[name].to_numpy() for name in ("a", "tau", "z"))
    means = a[..., None] + tau[..., None] * z
    residuals = drawn.posterior_predictive["y"].to_numpy() - np.repeat(means, 3, axis=-1)
    n = residuals[..., 0].size  # of N(0, 1), independent
    assert np.abs(residuals.mean(axis=(0, 1))).max() < 4.5 / n**0.5
    assert np.abs(residuals.var(axis=(0, 1)) - 1).max() < 4.5 * (2 / n) ** 0.5


def test_all_ways_in_give_the_same_likelihood():
    """The ordinary model, pm.Minibatch, and arrays in the place of a few rows, of another dtype."""

    def build(group, y, **total):
        with pm.Model() as model:
            a, tau = pm.Normal("a", 0, 2), pm.HalfNormal("tau", 1)
            z = pm.Normal("z", 0, 1, shape=GROUPS)
            pm.Normal("y", a + (tau * z)[group()], 1, observed=y(), **total)
        return model

    def gradient(model, batch_size=20, data=None):
        point = model.initial_point()
        effects = named_effects(model, ["z"], point)
        unknowns = Unknowns([v for v in model.value_vars if v.name != "z"], point)
        return plain_gradient(
            model,
            unknowns,
            batch_size,
            point,
            FAST,
            data=data,
            rewriting=Rewriting(integrated=tuple(effects)),
        )

    few = build(
        lambda: pm.Data("group", GROUP[:10].astype(np.int32)), lambda: pm.Data("y_data", REAL[:10])
    )
    group, y = pm.Minibatch(GROUP, REAL, batch_size=20)
    found = [
        gradient(build(lambda: GROUP, lambda: REAL)),
        gradient(build(lambda: group, lambda: y, total_size=N), None),
        gradient(few, data={"group": GROUP.astype(np.int64), "y_data": REAL}),
    ]
    results = []
    for one in found:
        marginal_of(one.density).place_at(one, np.zeros(2))
        results.append(one.passes.likelihood(np.array([0.3, -0.2])))
    for logp, grad in results[1:]:
        assert logp == pytest.approx(results[0][0])
        assert grad == pytest.approx(results[0][1])


def test_a_group_with_most_of_the_rows_is_named_before_set_up(caplog):
    """And none is named where all have alike."""

    def build(group):
        tau = pm.HalfNormal("tau", 1)
        u = pm.Normal("u", 0, tau, shape=30)
        pm.Normal("y", u[group], 1, observed=np.zeros(group.size))

    even = np.repeat(np.arange(30), 3)
    with caplog.at_level("WARNING", "pymc.sghmc"):
        marginal(lambda: build(even), batch_size=6)
        assert not caplog.records
        marginal(lambda: build(np.append(even, np.full(5000, 7))), batch_size=6)
    [record] = caplog.records
    assert "group 7 of u" in record.getMessage()
    assert "a likelihood of their own" in record.getMessage()


def test_groups_without_any_row_are_refused_in_words():
    with pm.Model():
        u = pm.Normal("u", 0, pm.HalfNormal("tau", 1), shape=5)
        pm.Normal("y", u[np.empty(0, int)], 1, observed=np.empty(0))
        with pytest.raises(ValueError, match="'y' has no rows"):
            SGHMC(marginalize=["u"])
