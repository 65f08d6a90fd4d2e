"""Groups of very many rows among small ones: their effects stay unknowns, beside integrals of all others."""

import arviz as az
import numpy as np
import pymc as pm
import pytest

from modes import QUIET
from scipy.integrate import trapezoid

from pymc_sghmc import SGHMC, recover_effects
from pymc_sghmc.gradients import units
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.minibatch_gradient import minibatch_gradient
from pymc_sghmc.gradients.second_order import second_order
from pymc_sghmc.models.units import named_effects
from pymc_sghmc.models.unknowns import Part, Unknowns
from pymc_sghmc.rows.data import Minibatch

GROUPS, LARGE = 14, 4  # the last is empty
rng = np.random.default_rng(0)
GROUP = np.concatenate([np.repeat(np.delete(np.arange(13), LARGE), 3), np.full(150, LARGE)])
rng.shuffle(GROUP)
N = GROUP.size
X, W, COIN, REAL = (
    rng.standard_normal(N),
    rng.standard_normal(GROUPS),
    rng.binomial(1, 0.5, N),
    rng.standard_normal(N),
)


def logistic():
    b, tau = pm.Normal("b", 0, 1), pm.HalfNormal("tau", 1)
    u = pm.Normal("u", 0, 1, shape=GROUPS)
    pm.Bernoulli("y", logit_p=b * X + (tau * u)[GROUP], observed=COIN)


def levels_above():
    c, tau = pm.Normal("c", 0, 1), pm.HalfNormal("tau", 1)
    u = pm.StudentT("u", nu=5, mu=c * pm.Data("w", W), sigma=tau, shape=GROUPS)
    pm.Normal("y", u[GROUP], 1, observed=REAL)


def slopes():
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1.0))
    u = pm.MvNormal("u", 0, chol=chol, shape=(GROUPS, 2))
    pm.Normal("y", u[GROUP, 0] + u[GROUP, 1] * X, 1, observed=REAL)


def turned():
    tau = pm.HalfNormal("tau", 1, shape=2)
    u = pm.Normal("u", 0, tau[:, None], shape=(2, GROUPS))
    pm.Normal("y", u[0, GROUP] + u[1, GROUP] * X, 1, observed=REAL)


def two_unknowns():
    tau = pm.HalfNormal("tau", 1)
    u, s = pm.Gumbel("u", 0, tau, shape=GROUPS), pm.Normal("s", 0, 0.5, shape=GROUPS)
    pm.Normal("y", u[GROUP] + s[GROUP] * X, 1, observed=REAL)


@pytest.fixture(autouse=True)
def beside_few(monkeypatch):
    """Let groups be kept beside a dozen others: densities don't depend on how well their scale is known."""
    monkeypatch.setattr(units, "FEWEST_OTHERS", 12)


def marginal(build, batch_size=10):
    """Model, and its gradient without effects; nodes are placed."""
    with pm.Model() as model:
        build()
    names, point = ["u", "s"] if build is two_unknowns else ["u"], model.initial_point()
    unknowns = Unknowns([v for v in model.value_vars if v.name not in names], point)
    effects, mode = named_effects(model, names, point), {"mode": "FAST_COMPILE"}
    gradient = minibatch_gradient(
        model, unknowns, batch_size, point, mode, effects_of_groups=effects
    )
    density = gradient.density
    density.place_nodes(gradient.data, density.unknowns.ravel(point) + 0.1)
    density.set_nodes(31 if density.marginal.k == 1 else 11)
    return model, gradient


@pytest.mark.parametrize(
    "build",
    [logistic, levels_above, slopes]
    + [pytest.param(build, marks=pytest.mark.slow) for build in (turned, two_unknowns)],
)
def test_its_rows_and_its_prior_count_as_in_the_model(build):
    """The density changes with its effect as the model's own does, and the gradient is the density's."""
    model, gradient = marginal(build)
    density, passes, logp = gradient.density, gradient.passes, model.compile_logp()
    assert (density.marginal.kept.groups == [LARGE]).all()
    assert density.marginal.n_units == 12 + 150 and gradient.data.n_rows == [162]
    rng, point = np.random.default_rng(1), model.initial_point()
    start, found = density.unknowns.ravel(point) + 0.1, []
    for k in range(3):
        position = start.copy()
        for name in density.unknowns.parts:
            place = density.unknowns.places[name]
            position[place] += k * rng.standard_normal(position[place].size)
        own = logp(density.unknowns.unravel(position, point))
        found.append(passes.log_density(position)[0] - own)
        steps = 1e-5 * np.eye(density.d)
        expected = [
            (passes.log_density(position + e)[0] - passes.log_density(position - e)[0]) / 2e-5
            for e in steps
        ]
        assert passes.log_density(position)[1] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert found[1:] == pytest.approx(found[:1] * 2, abs=1e-8)


def test_integrated_out_it_is_the_density_of_all_groups():
    _, gradient = marginal(logistic)
    _, whole = marginal(logistic, N)  # all rows in one minibatch: nothing is kept
    assert whole.density.d == 2 and gradient.density.d == 3
    position = np.array([0.2, -0.3])
    for one in (gradient, whole):
        one.density.set_nodes(61)
    grid = np.linspace(-4, 4, 101)
    expected = whole.passes.log_density(position)[0]
    values = [gradient.passes.log_density(np.append(position, z))[0] - expected for z in grid]
    assert trapezoid(np.exp(values), grid) == pytest.approx(1)


def test_minibatches_of_rows_and_groups_have_the_exact_mean():
    """Plain, first and second order."""
    _, gradient = marginal(slopes)
    density, data, d = gradient.density, gradient.data, gradient.density.d
    centre, factor = np.full(d, 0.1), 0.1 * np.eye(d)
    density.place_nodes(data, centre, factor)
    first, second = ControlVariates(gradient), second_order(gradient)
    first.set_centre(centre, factor)
    second.set_centre(centre, factor)
    point = centre + 0.1 * np.arange(d) / d
    logp, expected = gradient.passes.log_density(point)
    for one in (gradient, first, second):
        minibatches = [Minibatch((np.array([i]),), data.resident) for i in range(162)]
        p = 1 / np.concatenate([one.order.weights(m.rows)[0] for m in minibatches])
        assert p.sum() == pytest.approx(1)
        found = [one(point, minibatch) for minibatch in minibatches]
        assert p @ [level for level, _ in found] == pytest.approx(logp)
        assert p @ [grad for _, grad in found] == pytest.approx(expected, abs=1e-7)


def normal_groups():
    """Sixty groups of two rows and one of 400, whose posterior is known by a grid."""
    rng = np.random.default_rng(3)
    group = np.append(np.repeat(np.arange(60), 2), np.full(400, 60))
    y = 0.5 + 0.8 * rng.standard_normal(61)[group] + rng.standard_normal(group.size)
    with pm.Model(coords={"group": range(61)}) as model:
        a, tau = pm.Normal("a", 0, 2), pm.HalfNormal("tau", 1)
        pm.Normal("y", (a + tau * pm.Normal("z", 0, 1, dims="group"))[group], 1, observed=y)
    counts = np.bincount(group)
    means = np.bincount(group, y) / counts
    A, T = np.meshgrid(np.linspace(-1.5, 2.5, 301), np.linspace(0.005, 3, 400), indexing="ij")
    logp = -(A**2) / 8 - T**2 / 2
    for m, n in zip(means, counts, strict=True):
        v = T**2 + 1 / n
        logp -= 0.5 * np.log(v) + 0.5 * np.square(m - A) / v
    w = np.exp(logp - logp.max())
    w /= w.sum()
    shrunk = 400 * T**2 / (1 + 400 * T**2)
    given, spread = shrunk * (means[-1] - A) / T, 1 / (1 + 400 * T**2)
    exact = {name: moments(w, x) for name, x in {"a": A, "tau": T}.items()}
    mean, sd = moments(w, given)
    return model, exact | {"z": (mean, np.sqrt(sd**2 + (w * spread).sum()))}


def moments(w, x):
    mean = (w * x).sum()
    return mean, np.sqrt((w * np.square(x - mean)).sum())


@pytest.mark.slow  # the density and its gradient are held to the model above
def test_chain_has_the_exact_posterior():
    """Of the kept group, too; and of others effects can be drawn afterwards."""
    model, exact = normal_groups()
    with model:
        step = SGHMC(marginalize="z", batch_size=60, recover=False, compile_kwargs={"mode": "CVM"})
        idata = pm.sample(500, tune=250, chains=2, cores=2, step=step, random_seed=1, **QUIET)
        found = recover_effects(idata, step, draws=20, random_seed=1, progressbar=False)
    assert step.tuner.gradient.density.d == 3 and step.unknowns.name_of(2) == "z[60]"
    z = idata.posterior["z"]
    assert np.isnan(z[..., :60]).all() and np.isfinite(z[..., 60]).all()
    draws = {name: idata.posterior[name].to_numpy() for name in ("a", "tau")}
    draws["z"] = z[..., 60].to_numpy()
    for name, (mean, sd) in exact.items():
        x = draws[name]
        ess = min(float(az.ess(x)), 1000.0)
        assert ess > 200
        assert abs(x.mean() - mean) < 4.5 * sd / ess**0.5
        assert abs(x.std() / sd - 1) < 4.5 * (1 / (2 * ess) + 0.05**2) ** 0.5
    assert np.isfinite(found["z"]).all()
    of_kept = z.isel(draw=found["draw"].to_numpy())[..., 60]
    assert np.allclose(found["z"][..., 60], of_kept)  # they had been sampled


def test_only_much_larger_groups_are_kept():
    """Where all are as large, or all rows are a minibatch, or others are few, they stay groups; ten at most."""

    def kept(counts, batch_size):
        group = np.repeat(np.arange(len(counts)), counts)
        with pm.Model() as model:
            u = pm.Normal("u", 0, pm.HalfNormal("tau", 1), shape=len(counts))
            pm.Normal("y", u[group], 1, observed=np.zeros(group.size))
        point = model.initial_point()
        unknowns = Unknowns([v for v in model.value_vars if v.name != "u"], point)
        effects, mode = named_effects(model, ["u"], point), {"mode": "FAST_COMPILE"}
        found = minibatch_gradient(
            model, unknowns, batch_size, point, mode, effects_of_groups=effects
        )
        return found.density.marginal.kept.groups.tolist()

    assert kept([300] * 12, 100) == []
    assert kept([2] * 50 + [300], 400) == []
    assert kept([2] * 50 + [300], 200) == [50]
    assert kept([2] * 11 + [300], 20) == []
    assert kept([2] * 500 + [300 + i for i in range(12)], 200) == list(range(502, 512))


def test_an_array_as_preconditioner_is_refused():
    model, _ = normal_groups()
    with model, pytest.raises(ValueError, match="its effect stays an unknown"):
        SGHMC(marginalize="z", batch_size=60, preconditioner=np.ones(2), learning_rate=1e-3)


def test_parts_of_an_unknown():
    whole, values = np.arange(12.0).reshape(2, 6), np.array([[20.0, 21.0], [22.0, 23.0]])
    part = Part(None, 1, np.array([1, 4]))
    assert (part.of(whole) == whole[:, [1, 4]]).all()
    new = part.put_into(whole, values)
    assert (new[:, [1, 4]] == values).all() and whole[0, 1] == 1.0
    assert (np.delete(new, [1, 4], axis=1) == np.delete(whole, [1, 4], axis=1)).all()
