"""Coordinates of effects: the same density for every λ, there and back, and only where there are effects."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from modes import FAST
from targets import by_way_of_the_model, log_density, plain_gradient, solves

from pymc_sghmc.compat import ancestors
from pymc_sghmc.hierarchy.centring import centring_of
from pymc_sghmc.hierarchy.correlated_effects import Unmixed
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.models.unknowns import Unknowns

G, N = 5, 30
rng = np.random.default_rng(8)
GROUP, X, Y = rng.integers(G, size=N), rng.standard_normal(N), rng.standard_normal(N)


def observed(mu):
    pm.Normal("y", mu, 1.5, observed=Y)


def centred():
    tau = pm.HalfNormal("tau")
    observed(pm.Normal("u", pm.Normal("mu"), tau, shape=G)[GROUP])


def non_centred():
    observed((pm.HalfNormal("tau") * pm.Normal("z", shape=G))[GROUP] + pm.Normal("mu"))


def picked_before_it_is_scaled():
    observed(pm.Normal("z", shape=G)[GROUP] * pm.Uniform("tau", 0, 5) + pm.Normal("mu"))


def named():
    z = pm.Normal("z", shape=G)
    u = pm.Deterministic("u", z * pm.math.exp(pm.Normal("log_tau")))
    observed(pm.Normal("b") * X + u[GROUP])


def student():
    tau = pm.HalfCauchy("tau", 1)
    observed(pm.StudentT("u", nu=pm.Gamma("nu", 5, 1), mu=0, sigma=tau, shape=G)[GROUP])


def slopes():
    tau = pm.HalfNormal("tau", shape=2)
    u = pm.Normal("u", 0, tau, shape=(G, 2))
    observed(u[GROUP, 0] + u[GROUP, 1] * X)


def scales_along_the_first_axis():
    z, tau = pm.Normal("z", shape=(2, G)), pm.HalfNormal("tau", shape=2)
    u = tau[:, None] * z
    observed(u[0][GROUP] + u[1][GROUP] * X)


def correlated():
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0))
    u = pm.MvNormal("u", pm.Normal("mu", shape=2), chol=chol, shape=(G, 2))
    observed(u[GROUP, 0] + u[GROUP, 1] * X)


def nested():
    outer, inner = pm.HalfNormal("outer"), pm.HalfNormal("inner")
    r = pm.Normal("r", 0, outer, shape=2)
    observed(pm.Normal("u", r[np.arange(G) % 2], inner, shape=G)[GROUP])


def nested_and_non_centred():
    r = pm.HalfNormal("outer") * pm.Normal("zr", shape=2)
    u = r[np.arange(G) % 2] + pm.HalfNormal("inner") * pm.Normal("zu", shape=G)
    observed(u[GROUP])


def a_scale_for_each():
    local = pm.HalfCauchy("local", 1, shape=G)
    observed(pm.Normal("u", 0, local * pm.HalfCauchy("tau", 1))[GROUP])


def a_scale_with_a_centred_location():
    log_tau = pm.Normal("log_tau", pm.Normal("m"), pm.HalfNormal("s"), shape=G)
    observed(pm.Normal("u", 0, pm.math.exp(log_tau))[GROUP])


def factor():
    return pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0))[0]


def times_a_factor():
    u = pm.Normal("z", shape=(G, 2)) @ factor().T
    observed(u[GROUP, 0] + u[GROUP, 1] * X)


def a_factor_times_columns():
    u = pm.Deterministic("u", pt.dot(factor(), pm.Normal("z", shape=(2, G))).T)
    observed(u[GROUP, 0] + u[GROUP, 1] * X)


def picked_before_it_is_mixed():
    u = pm.math.dot(pm.Normal("z", shape=(G, 2))[GROUP], factor().T)
    observed(u[:, 0] + u[:, 1] * X)


def weighed_across_before_it_is_mixed():
    u = (pm.Normal("z", shape=(G, 2))[GROUP] * X[:, None]) @ factor().T
    observed(u[:, 0] - u[:, 1])


def several_scales():
    local, tau = pm.HalfCauchy("local", 1, shape=G), pm.HalfCauchy("tau", 1)
    z = pm.Normal("z", shape=G)
    observed(pm.math.dot(rng.standard_normal((N, G)), z * local * tau))


SPLINES = rng.standard_normal((N, G + 1))


def random_walk():
    steps = pm.Normal("z", shape=G)
    walk = pt.cumsum(steps) * pm.HalfNormal("tau")
    start = pm.Normal("start")
    observed(SPLINES @ pt.concatenate([start[None], start + walk]))


def walk_from_zero():
    walk = pt.concatenate([pt.zeros(1), pt.cumsum(pm.Normal("z", shape=G))])
    observed(SPLINES @ (walk * pm.HalfNormal("tau")))


def splines():
    observed((SPLINES[:, 1:] @ pm.Normal("z", shape=G)) * pm.HalfNormal("tau"))


def sum_to_zero():
    z = pm.Normal("z", shape=G)
    observed(((z - z.mean()) * pm.HalfNormal("tau"))[GROUP])


def differences_of_pairs():
    u = pm.Normal("z", shape=G) * pm.HalfNormal("tau")
    observed(u[GROUP] - u[(GROUP + 1) % G])


def smooth_process():
    """Its scales come to zero at high frequencies, in floating-point numbers."""
    covariance = pm.HalfNormal("eta") ** 2 * pm.gp.cov.ExpQuad(1, ls=pm.HalfNormal("tau"))
    process = pm.gp.HSGP(m=[2 * G], L=[5.0], cov_func=covariance)
    observed(process.prior("f", X=np.linspace(-1, 1, N)[:, None]))


EFFECTS = {
    smooth_process: {"f_hsgp_coeffs"},
    random_walk: {"z"},
    walk_from_zero: {"z"},
    splines: {"z"},
    sum_to_zero: {"z"},
    differences_of_pairs: {"z"},
    times_a_factor: {"z"},
    a_factor_times_columns: {"z"},
    picked_before_it_is_mixed: {"z"},
    weighed_across_before_it_is_mixed: {"z"},
    several_scales: {"z"},
    centred: {"u"},
    non_centred: {"z"},
    picked_before_it_is_scaled: {"z"},
    named: {"z"},
    student: {"u"},
    slopes: {"u"},
    scales_along_the_first_axis: {"z"},
    correlated: {"u"},
    nested: {"r", "u"},
    nested_and_non_centred: {"zr", "zu"},
    a_scale_for_each: {"u"},
    a_scale_with_a_centred_location: {"u", "log_tau"},
}


MIXED = (
    times_a_factor,
    a_factor_times_columns,
    picked_before_it_is_mixed,
    weighed_across_before_it_is_mixed,
)


def built(build, names=None):
    with pm.Model() as model:
        build()
    point = model.initial_point()
    values = [v for v in model.value_vars if names is None or v.name in names]
    unknowns = Unknowns(values, point)
    density = plain_gradient(
        model, unknowns, 10, point, FAST, rewriting=Rewriting(may_centre=True)
    ).density
    return model, point, unknowns, density


def random_coordinates(centring, rng):
    """What rows may say of effects, whatever groups lie in which."""
    n = centring.as_written.size
    sizes = [place.stop - place.start for place in centring.group_coefficients.values()]
    above = [rng.integers(sizes[j], size=sizes[i]) for i, j in centring.pairs]
    columns = np.arange(centring.shared.size)[:2]
    return {
        "columns": columns,
        "by_shared": rng.standard_normal((n, columns.size)),
        "information": rng.exponential(3, n),
        "pull": rng.standard_normal(n),
        "above": np.concatenate([np.zeros(0, dtype=int), *above]),
        "coupling": rng.standard_normal(centring.coupling.size),
        "whole": 1.0,
    }


@pytest.mark.parametrize("build", EFFECTS, ids=lambda build: build.__name__)
def test_density_is_the_models_with_the_jacobian_of_the_change(build):
    model, point, unknowns, density = built(build)
    centring = centring_of(density)
    assert set(density.group_coefficients) == EFFECTS[build]
    logp, rng = model.compile_logp(**FAST), np.random.default_rng(0)
    for i in range(5):
        # the model's own first; without the Jacobian the others are red
        n = centring.as_written.size
        weights = centring.as_written if i == 0 else rng.random(n)
        by_rows = random_coordinates(centring, rng) if i > 1 else {}
        centring.set_coordinates(weights, **by_rows | ({"whole": 0.0} if i == 2 else {}))
        x = density.from_model(unknowns.ravel(point)) + 0.4 * rng.standard_normal(unknowns.d)
        expected, sign, log_jacobian = by_way_of_the_model(density, logp, unknowns, point, x)
        own = i == 0 and build not in MIXED
        assert sign == 1
        assert own == (abs(log_jacobian) < 1e-8)
        assert log_density(density, x, N) == pytest.approx(expected, abs=1e-6)
        np.testing.assert_allclose(density.from_model(density.to_model(x)), x, rtol=1e-9)


@pytest.mark.parametrize("build", MIXED, ids=lambda build: build.__name__)
def test_rows_see_correlated_effects_without_the_factor(build):
    density = built(build)[-1]
    assert not solves(density.graph.model.terms)
    prior = ancestors([density.graph.model.log_prior])
    assert any(v.owner is not None and isinstance(v.owner.op, Unmixed) for v in prior)


def test_a_factor_of_two_likelihoods_is_one():
    def both():
        times_a_factor()
        model = pm.modelcontext(None)
        mu = (model["z"] @ pm.math.expand_packed_triangular(2, model["chol"]).T)[GROUP, 0]
        pm.Poisson("k", pm.math.exp(mu), observed=np.arange(N) % 4)

    density = built(both)[-1]
    assert set(density.group_coefficients) == {"z"}
    assert not solves(density.graph.model.terms)


def test_unit_of_effects_is_their_scale_to_the_power_of_lambda():
    _, _, unknowns, density = built(non_centred)
    own = {"tau_log__": np.log(3.0), "z": np.full(G, 2.0), "mu": 0.0}
    position = unknowns.ravel(own)
    for weight in (0.0, 0.25, 1.0):
        centring_of(density).weights = np.full(G, weight)
        a = density.from_model(position)[unknowns.places["z"]]
        np.testing.assert_allclose(a, 2 * 3.0**weight)
    _, _, unknowns, density = built(centred)
    position = unknowns.ravel({"tau_log__": np.log(3.0), "u": np.full(G, 7.0), "mu": 1.0})
    for weight in (0.0, 0.25, 1.0):
        centring_of(density).weights = np.full(G, weight)
        a = density.from_model(position)[unknowns.places["u"]]
        np.testing.assert_allclose(a, weight + 6 * 3.0 ** (weight - 1))


def test_gradient_is_finite_where_scales_come_to_zero():
    _, point, unknowns, density = built(smooth_process)
    centring = centring_of(density)
    coordinates = random_coordinates(centring, np.random.default_rng(0))
    centring.set_coordinates(np.zeros(centring.as_written.size), **coordinates)
    x = density.from_model(unknowns.ravel(point | {"tau_log__": np.log(80.0)}))
    arrays = [getattr(source, "data", source) for source in density.sources]
    logp, gradient = density(x, np.ones(()), [np.ones(N)], [np.arange(N)], arrays)
    assert np.isfinite(logp)
    assert np.isfinite(gradient).all()
    effects = centring.effects(x)[density.group_coefficients["f_hsgp_coeffs"]]
    assert (effects[2:] == 0.0).all()


def nothing_is_unknown():
    observed((2.0 * pm.Normal("z", shape=G))[GROUP])


def scale_may_be_negative():
    observed((pm.Normal("slope") * pm.Normal("z", shape=G))[GROUP])


def used_twice():
    z = pm.Normal("z", shape=G)
    observed((pm.HalfNormal("tau") * z + z**2)[GROUP])


def two_scales():
    z = pm.Normal("z", shape=G)
    observed((pm.HalfNormal("a") * z)[GROUP] + (pm.HalfNormal("b") * z)[GROUP] * X)


def bounded():
    observed(pm.HalfNormal("u", pm.HalfNormal("tau"), shape=G)[GROUP])


def one_number():
    observed(pm.Normal("u", 0, pm.HalfNormal("tau")))


def scale_is_far_above_zero_as_a_rule():
    observed(((2 + pm.Normal("b")) * pm.Normal("z", shape=G))[GROUP])


def scale_is_below_zero_far_out():
    observed(((30 + pm.Normal("b")) * pm.Normal("z", shape=G))[GROUP])


def one_entry_with_many_scales():
    observed((pm.Normal("z", shape=1) * pm.HalfNormal("tau", shape=G))[GROUP])


def one_column_with_two_scales():
    u = pm.Normal("z", shape=(G, 1)) * np.ones((1, 2)) * pm.HalfNormal("tau", shape=2)
    observed(u[GROUP, 0] + u[GROUP, 1] * X)


def weighed_before_it_is_mixed():
    u = (pm.Normal("z", shape=(G, 2)) * np.array([1.0, 3.0])) @ factor().T
    observed(u[GROUP, 0] + u[GROUP, 1] * X)


def weighed_by_row_before_it_is_mixed():
    X2 = np.column_stack([X, X**2])
    observed(((pm.Normal("z", shape=(G, 2))[GROUP] * X2) @ factor().T).sum(axis=1))


def a_vector_is_mixed():
    L = pt.linalg.cholesky(pm.HalfNormal("eta") * pt.as_tensor(np.eye(G) + 0.5))
    observed((L @ pm.Normal("z", shape=G))[GROUP])


def mixed_without_its_third_axis():
    u = pm.Normal("z", shape=(1, G, 2)).squeeze(0) @ factor().T
    observed(u[GROUP, 0] + u[GROUP, 1] * X)


def mixed_by_an_upper_triangle():
    u = pm.Normal("z", shape=(G, 2)) @ factor()
    observed(u[GROUP, 0] + u[GROUP, 1] * X)


def sums_with_two_scales():
    walk = pt.cumsum(pm.Normal("z", shape=G))
    observed(walk[GROUP] * pm.HalfNormal("a") + (walk * pm.HalfNormal("b"))[GROUP] * X)


def walk_from_one():
    walk = pt.concatenate([pt.ones(1), pt.cumsum(pm.Normal("z", shape=G - 1))])
    observed((walk * pm.HalfNormal("tau"))[GROUP])


def walk_with_a_scale_for_each_place():
    observed((pt.cumsum(pm.Normal("z", shape=G)) * pm.HalfNormal("tau", shape=G))[GROUP])


def products_of_steps():
    observed((pt.cumprod(pm.Normal("z", shape=G)) * pm.HalfNormal("tau"))[GROUP])


@pytest.mark.parametrize(
    "build",
    [
        sums_with_two_scales,
        walk_from_one,
        walk_with_a_scale_for_each_place,
        products_of_steps,
        scale_is_far_above_zero_as_a_rule,
        scale_is_below_zero_far_out,
        one_entry_with_many_scales,
        one_column_with_two_scales,
        weighed_before_it_is_mixed,
        weighed_by_row_before_it_is_mixed,
        a_vector_is_mixed,
        mixed_without_its_third_axis,
        mixed_by_an_upper_triangle,
        nothing_is_unknown,
        scale_may_be_negative,
        used_twice,
        two_scales,
        bounded,
        one_number,
    ],
    ids=lambda build: build.__name__,
)
def test_what_is_no_effect_is_left_alone(build):
    _, _, unknowns, density = built(build)
    assert centring_of(density) is None
    x = np.ones(unknowns.d)
    assert density.to_model(x) is x
    assert density.from_model(x) is x


def test_effects_whose_scale_another_step_samples_are_left_alone():
    assert built(centred, names={"u", "mu"})[-1].rewrites == ()
    assert built(centred, names={"u", "mu", "tau_log__"})[-1].rewrites


def test_scales_are_looked_for_in_the_likelihood_alone():
    def with_a_potential():
        z = pm.Normal("z", shape=G)
        pm.Potential("other", -pt.sum(z**4))
        observed((pm.HalfNormal("tau") * z)[GROUP])

    assert set(built(with_a_potential)[-1].group_coefficients) == {"z"}


def test_without_rows_nothing_tells_how_far_effects_are_to_be_centred():
    model, point, unknowns, _ = built(centred)
    assert not plain_gradient(
        model, unknowns, None, point, FAST, rewriting=Rewriting(may_centre=True)
    ).density.rewrites


@pytest.mark.parametrize("build", EFFECTS, ids=lambda build: build.__name__)
def test_rows_in_linear_coordinates_are_the_rows_of_the_model(build):
    _, point, unknowns, density = built(build)
    centring = centring_of(density)
    rows = centring.linear_rows
    graph = density.graph
    terms = density.row_function(graph.at_position(list(rows.terms), list(rows.variables)))
    own_terms = density.row_function(graph.at_position(graph.model.terms))
    rng = np.random.default_rng(2)
    n = centring.as_written.size
    centring.set_coordinates(rng.random(n), **random_coordinates(centring, rng))
    x = density.from_model(unknowns.ravel(point)) + 0.4 * rng.standard_normal(unknowns.d)
    arrays = [getattr(source, "data", source) for source in density.sources]
    here = [np.arange(N), *arrays, *density.given]
    np.testing.assert_allclose(terms(centring.effects(x), *here), own_terms(x, *here), rtol=1e-9)
