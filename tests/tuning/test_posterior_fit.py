"""Finding mode and curvature: exact on Gaussians, whatever their scales and where it starts."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from model_collection.small import linear_regression
from modes import FAST
from scipy.optimize import minimize
from scipy.special import expit, log_expit
from targets import gradient_of

from pymc_sghmc import SGHMC
from pymc_sghmc.checks import unconstrained_point
from pymc_sghmc.gradients.metric import Dense, Diagonal
from pymc_sghmc.tuning import posterior_fit
from pymc_sghmc.tuning.curvature import SUBSET_ROWS, CountedPasses, extreme_curvatures
from pymc_sghmc.tuning.gaussian_draws import evidence_bound, scaled_by_draws
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.posterior_fit import NEAR, falls_as_fitted, fit_posterior


def potential(H, mean):
    """Gaussian of precision ``H`` without data."""
    with pm.Model() as model:
        x = pm.Flat("x", shape=len(H))
        pm.Potential("energy", -0.5 * (x - mean) @ H @ (x - mean))
    return model


def passes_of(model, batch_size=None):
    return gradient_of(model, batch_size).passes


def correlated(d=4, condition=100.0, seed=0):
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))
    return rotation * np.geomspace(1, condition, d) @ rotation.T


GAUSSIANS = {
    "standard": np.eye(3),
    "correlated": correlated(),
    "ill-conditioned": correlated(condition=1e4),
    "scales from 1e-3 to 1e3": np.diag(np.geomspace(1e-3, 1e3, 7) ** -2),
    "scaled and correlated": np.diag([1e3, 1.0, 1e-3, 1.0])
    @ correlated()
    @ np.diag([1e3, 1.0, 1e-3, 1.0]),
    "one": np.array([[1e-4]]),
}


def whitened(found, H, mean):
    """Distance from the mode in posterior sds, and LᵀHL, which should be 1."""
    L = found.metric.matrix()
    return np.sqrt((found.mean - mean) @ H @ (found.mean - mean)), L.T @ H @ L


@pytest.mark.parametrize("name", GAUSSIANS)
@pytest.mark.parametrize("distance", [0.0, 3.0, 1e3], ids=["at the mode", "near", "far"])
def test_mode_and_covariance_of_a_gaussian_are_exact(name, distance):
    H = GAUSSIANS[name]
    sd = np.sqrt(np.diag(np.linalg.inv(H)))
    rng = np.random.default_rng(1)
    mean = rng.normal(size=len(H)) * sd
    found = fit_posterior(
        passes_of(potential(H, mean)), mean + distance * sd * rng.normal(size=len(H))
    )
    off, unit = whitened(found, H, mean)
    assert off < NEAR
    np.testing.assert_allclose(unit, np.eye(len(H)), atol=1e-4)
    np.testing.assert_array_equal(
        found.metric.factor, np.tril(found.metric.factor)
    )  # Cholesky's, to solve with
    assert found.passes > len(H)


def test_scales_from_1e_minus_6_to_1e6_are_found():
    H = np.diag(np.geomspace(1e-6, 1e6, 7) ** -2)
    found = fit_posterior(passes_of(potential(H, np.zeros(7))), 3 * np.diag(H) ** -0.5)
    off, unit = whitened(found, H, np.zeros(7))
    assert off < NEAR
    np.testing.assert_allclose(unit, np.eye(7), atol=1e-4)


def test_given_point_is_taken_as_it_is_and_measured():
    H, mean = correlated(), np.ones(4)
    point = mean + np.array([0.1, -0.2, 0.3, 0.0])
    found = fit_posterior(passes_of(potential(H, mean)), point, optimise=False)
    np.testing.assert_array_equal(found.mean, point)
    np.testing.assert_allclose(whitened(found, H, mean)[1], np.eye(4), atol=1e-4)


def test_diagonal_factor_gives_the_posteriors_energy():
    # What many unknowns get: one over the roots of the Hessian's diagonal, so that tr LᵀHL = d.
    rng = np.random.default_rng(3)
    scales = np.geomspace(0.1, 10, 6)
    X = rng.normal(size=(500, 6)) / scales
    y = X @ (scales * rng.normal(size=6)) + rng.normal(size=500)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10 * scales, shape=6)
        pm.Normal("y", pm.Data("X", X) @ beta, 1, observed=y)
    passes = passes_of(model, 50)
    H = X.T @ X + np.diag(0.01 / scales**2)
    mean = np.linalg.solve(H, X.T @ y)
    found = fit_posterior(passes, np.zeros(6), dense=False)
    off, unit = whitened(found, H, mean)
    assert isinstance(found.metric, Diagonal)
    assert off < 1  # the optimiser knows no scales here
    # by the squares of 3,000 rows' gradients: a relative error of √(2/3000) for normal errors
    np.testing.assert_allclose(np.diag(unit), 1, atol=0.25)
    assert abs(np.trace(unit) / 6 - 1) < 0.12
    exact = np.linalg.eigvalsh(np.diag(scales) @ H @ np.diag(scales))[-1]
    assert extreme_curvatures(
        CountedPasses(passes), mean, Diagonal(scales)
    ).largest == pytest.approx(exact, rel=0.1)


def test_where_gradients_overflow_nothing_is_printed(capfd):
    # LAPACK prints lines of its own about numbers that aren't finite
    with pm.Model() as model:
        rate = pm.Normal("rate", 0, 1, shape=30)
        pm.Poisson("y", pm.math.exp(rate), observed=np.ones(30))
    counted = CountedPasses(passes_of(model))
    scales = Diagonal(np.ones(30))
    assert np.isfinite(extreme_curvatures(counted, np.zeros(30), scales).largest)
    assert np.isnan(extreme_curvatures(counted, np.full(30, 800.0), scales).largest)
    assert capfd.readouterr() == ("", "")


MANY_ROWS = 8 * SUBSET_ROWS


@pytest.fixture(scope="module")
def rows():
    """Eight times the rows that the optimiser sees at first."""
    rng = np.random.default_rng(5)
    y = rng.normal([1.0, -2.0], [0.5, 3.0], size=(MANY_ROWS, 2))
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 10, shape=2)
        pm.Normal("y", mu, np.array([0.5, 3.0]), observed=y)
    H = np.diag(MANY_ROWS / np.array([0.5, 3.0]) ** 2 + 0.01)
    return model, H, np.linalg.solve(H, y.sum(axis=0) / np.array([0.5, 3.0]) ** 2)


def test_subset_of_the_rows_leads_to_the_mode_of_all_in_few_passes(rows):
    model, H, mean = rows
    passes = passes_of(model, 100)
    sizes = []
    log_density = passes.log_density

    def spy(position, subset=None):
        sizes.append(None if subset is None else subset[0].size)
        return log_density(position, subset)

    passes.log_density = spy
    found = fit_posterior(passes, np.array([200.0, 300.0]))
    off, unit = whitened(found, H, mean)
    assert off < NEAR
    np.testing.assert_allclose(unit, np.eye(2), atol=0.01)  # of a subset, whose curvature is alike
    some = [size for size in sizes if size]
    full = sizes.count(None)
    assert 1 <= full <= 10
    assert some
    assert max(some) <= SUBSET_ROWS
    assert found.passes == pytest.approx(full + sum(some) / MANY_ROWS)
    assert found.passes < 15


def test_mode_of_the_subset_is_not_that_of_all_rows(rows):
    # Negative control: without the last passes the mode would be that of other data.
    model, H, mean = rows
    counted = CountedPasses(passes_of(model, 100))
    x = posterior_fit._climb(counted, mean, Diagonal(np.ones(2)), counted.subset, maxiter=100).end
    assert np.sqrt((x - mean) @ H @ (x - mean)) > 5 * NEAR


def test_steps_into_the_forbidden_are_taken_back():
    # log(1 + x) and a mean far from the start: the first step of the search leaves the support.
    with pm.Model() as model:
        x = pm.Flat("x", shape=2)
        pm.Potential("energy", pt.log(1 + x).sum() * 10 - 10 * ((x - [1.0, 3.0]) ** 2).sum())
    passes = passes_of(model)
    start = np.array([400.0, -0.999])
    with np.errstate(all="ignore"):
        assert not np.isfinite(passes.log_density(start + passes.log_density(start)[1])[0])
    found = fit_posterior(passes, start)
    m = np.array([1.0, 3.0])
    mode = (m - 1 + np.sqrt((m + 1) ** 2 + 2)) / 2  # 1/(1 + x) = 2 (x − m)
    H = 10 / (1 + mode) ** 2 + 20
    assert np.abs(found.mean - mode).max() * np.sqrt(H.max()) < NEAR
    np.testing.assert_allclose(np.diag(found.metric.factor) ** 2 * H, 1, rtol=0.02)


def test_predictor_in_raw_units_is_climbed():
    # One unit of the slope is exp(40,000): all but a millionth of the first step is infinite.
    rng = np.random.default_rng(6)
    X = np.column_stack([np.ones(500), rng.lognormal(np.log(4e4), 0.5, size=500)])
    y = rng.poisson(np.exp(X @ [0.2, 1.2e-5]))
    with pm.Model() as model:
        b = pm.Normal("b", 0, 1, shape=2)
        pm.Poisson("y", pt.exp(X @ b), observed=y)
    found = fit_posterior(passes_of(model, 100), np.zeros(2))
    mode, scale = np.zeros(2), np.array([1.0, 1e-5])
    for _ in range(20):
        mu = np.exp(X @ mode)
        H = scale[:, None] * (X.T * mu @ X + np.eye(2)) * scale
        mode = mode + scale * np.linalg.solve(H, scale * (X.T @ (y - mu) - mode))
    L = found.metric.factor / scale[:, None]
    assert found.is_mode
    assert np.abs(np.linalg.solve(L, (found.mean - mode) / scale)).max() < NEAR
    np.testing.assert_allclose(L.T @ H @ L, np.eye(2), atol=0.02)


def test_saddle_is_left_or_made_a_scale():
    # Two modes at ±1 and the start between: a mode is found; its curvature is 8.
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("energy", -((x**2 - 1) ** 2))
    passes = passes_of(model)
    found = fit_posterior(passes, np.array([1e-3]))
    assert abs(abs(found.mean[0]) - 1) < NEAR / np.sqrt(8)
    assert (
        0.5 < found.metric.factor[0, 0] ** 2 * 8 < 2
    )  # over one sd on either side it is not constant
    # On top of the hill the gradient vanishes: a factor all the same, about that of curvature 4.
    there = fit_posterior(passes, np.array([0.0]), optimise=False)
    assert 0.5 < there.metric.factor[0, 0] ** 2 * 4 < 2


def test_flat_direction_gets_a_finite_scale():
    with pm.Model() as model:
        x = pm.Flat("x", shape=2)
        pm.Potential("energy", -0.5 * (x[0] - 3) ** 2)
    found = fit_posterior(passes_of(model), np.zeros(2))
    assert abs(found.mean[0] - 3) < NEAR
    assert np.isfinite(found.metric.factor).all()
    assert np.linalg.det(found.metric.factor) > 0
    assert found.metric.factor[0, 0] == pytest.approx(1, rel=1e-3)


def test_float32_model_is_found_to_its_precision():
    with pytensor.config.change_flags(floatX="float32"):
        rng = np.random.default_rng(0)
        y = rng.normal([2.0, -1.0], [1.0, 0.1], size=(1000, 2)).astype("f4")
        with pm.Model() as model:
            mu = pm.Normal("mu", 0, 10, shape=2)
            pm.Normal("y", mu, np.array([1.0, 0.1], dtype="f4"), observed=y)
        passes = passes_of(model, 50)
        assert passes.density.dtype == np.float32
        found = fit_posterior(passes, np.array([5.0, 3.0]))
    H = np.diag(1000 / np.array([1.0, 0.1]) ** 2 + 0.01)
    off, unit = whitened(found, H, np.linalg.solve(H, y.sum(axis=0) / np.array([1.0, 0.1]) ** 2))
    assert off < 2 * NEAR
    np.testing.assert_allclose(unit, np.eye(2), atol=0.1)


# --- Through the step


def step_of(model, **settings):
    settings = {"batch_size": 10, "gradient": "control_variates", **settings}
    return SGHMC(model=model, compile_kwargs=FAST, **settings)


def factor_of(step):
    metric = step.tuner.setup.metric
    return metric.scales if isinstance(metric, Diagonal) else metric.factor


def curvature(model, position):
    """Minus the Hessian of the log-density, by PyMC's gradient."""
    dlogp = model.compile_dlogp()
    beta, sigma = position[:2], position[2]

    def gradient(x):
        return dlogp({"beta": x[:2], "sigma_log__": np.array(x[2])})

    steps = 1e-5 * np.eye(3)
    position = np.array([*beta, sigma])
    return -np.array([(gradient(position + s) - gradient(position - s)) / 2e-5 for s in steps])


def test_dense_and_diagonal_preconditioner_are_the_posteriors():
    model = linear_regression(200)
    dense = step_of(model, preconditioner="dense")
    position = dense.tuner.setup.fit.mean
    H = curvature(model, position)
    grad = model.compile_dlogp()({"beta": position[:2], "sigma_log__": np.array(position[2])})
    assert grad @ np.linalg.solve(H, grad) < NEAR**2
    np.testing.assert_allclose(factor_of(dense).T @ H @ factor_of(dense), np.eye(3), atol=0.02)
    assert dense.tuner.setup.curvature.largest == dense.tuner.setup.curvature.smallest == 1
    auto = step_of(model)  # the same here
    np.testing.assert_array_equal(factor_of(auto), factor_of(dense))

    diag = step_of(model, preconditioner="diag")
    assert factor_of(diag).shape == (3,)
    sd = np.sqrt(np.diag(np.linalg.inv(H)))
    ratios = factor_of(diag) / sd
    np.testing.assert_allclose(ratios, ratios[0], rtol=0.02)
    values = np.linalg.eigvalsh(factor_of(diag)[:, None] * H * factor_of(diag))
    assert values[-1] == pytest.approx(diag.tuner.setup.curvature.largest, rel=0.02)
    assert values[0] == pytest.approx(diag.tuner.setup.curvature.smallest, rel=0.02)


@pytest.mark.parametrize("P", [np.array([0.01, 0.02, 0.005]), 0.01 * np.eye(3) + 0.002])
def test_given_preconditioner_is_kept_and_its_curvatures_measured(P):
    model = linear_regression(200)
    step = step_of(model, preconditioner=P)
    L = np.diag(np.sqrt(P)) if P.ndim == 1 else np.linalg.cholesky(P)
    np.testing.assert_allclose(factor_of(step), np.sqrt(P) if P.ndim == 1 else L)
    values = np.linalg.eigvalsh(L.T @ curvature(model, step.tuner.setup.fit.mean) @ L)
    assert step.tuner.setup.curvature.largest == pytest.approx(values[-1], rel=0.02)
    assert step.tuner.setup.curvature.smallest == pytest.approx(values[0], rel=0.02)


def test_given_centre_is_taken_on_either_scale():
    model = linear_regression()
    beta, sigma = np.array([0.9, -1.1]), 0.7
    expected = [*beta, np.log(sigma)]
    for point in (
        {"beta": beta, "sigma": sigma},
        {"beta": beta, "sigma_log__": np.log(sigma)},
        {"beta": beta, "sigma": sigma, "sigma_log__": np.log(sigma), "mu": np.zeros(60)},
    ):
        step = step_of(model, centre=point)
        np.testing.assert_allclose(step.tuner.setup.fit.mean, expected, rtol=1e-12)
        np.testing.assert_allclose(step.tuner.gradients[1].anchor.centre, expected, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:`find_MAP` will:FutureWarning")  # PyMC 6: jitter, InferenceData
def test_what_find_map_returns_is_a_centre():
    model = linear_regression()
    with model:
        point = pm.find_MAP(progressbar=False)
        step = step_of(model, centre=point)
    np.testing.assert_allclose(
        step.tuner.setup.fit.mean, [*point["beta"], point["sigma_log__"]], rtol=1e-12
    )


@pytest.mark.parametrize("point", [{"beta": np.zeros(2)}, {"sigma": 1.0}, {}])
def test_centre_with_an_unknown_missing_is_refused_by_name(point):
    missing = " and ".join(name for name in ("beta", "sigma") if name not in point)
    with pytest.raises(
        ValueError, match=f"centre: has no value of {missing.replace(' and ', ', ')}\\."
    ):
        step_of(linear_regression(), centre=point)


def test_centre_doesnt_depend_on_unknowns_that_are_not_sampled_here():
    model = linear_regression()
    point = unconstrained_point(model, {"beta": np.ones(2), "sigma": 2.0})
    np.testing.assert_allclose(point["beta"], 1)
    np.testing.assert_allclose(point["sigma_log__"], np.log(2.0))


class WithWall:
    """N(0, 1) in d directions, and a wall of some slope beyond zero of the last of them."""

    subset = None

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, x, rows):
        gradient = -x
        if x[-1] > 0:
            gradient[-1] -= self.slope
        return -0.5 * np.square(x).sum() - self.slope * max(x[-1], 0.0), gradient


@pytest.mark.parametrize(("slope", "is_alike"), [(0.0, True), (1.0, True), (20.0, False)])
def test_a_wall_along_one_of_many_directions_is_seen(slope, is_alike):
    """It is a tenth of the fall on average, and all of it for some draws."""
    density = WithWall(slope)
    falls = [-density(z, None)[0] for z in np.random.default_rng(0).standard_normal((200, 60))]
    assert np.mean(falls) < 1.4 * 60 / 2
    assert falls_as_fitted(density, np.zeros(60), np.eye(60)) == is_alike


class HalfWithWall(WithWall):
    """N(0, 1) in d directions, and a wall of some slope below zero of the last of them."""

    def __call__(self, x, rows):
        gradient = -x
        if x[-1] < 0:
            gradient[-1] += self.slope
        return -0.5 * np.square(x).sum() + self.slope * min(x[-1], 0.0), gradient


@pytest.mark.parametrize(("slope", "is_alike"), [(0.0, True), (1.0, True), (50.0, False)])
@pytest.mark.parametrize("width", [0.1, 0.03])
def test_a_gaussian_too_narrow_to_reach_past_a_wall_is_no_fit(slope, is_alike, width):
    """Near the wall its draws fall off as promised, and most of the mass is elsewhere."""
    density = HalfWithWall(slope)
    scales = np.ones(10)
    x = np.zeros(10)
    if slope > 1:
        scales[-1] = width
        x[-1] = 1.5 * width
        draws = np.random.default_rng(0).standard_normal((200, 10))
        falls = [-density(x + scales * z, None)[0] for z in [*draws, *-draws]]
        assert np.mean(falls) + density(x, None)[0] < 1.5 * 10 / 2
    assert falls_as_fitted(density, x, np.diag(scales)) == is_alike


class WallBesideAPlain:
    """N(0, 1) in four directions; in a fifth N(0, 40²) where it is above 0, and next to nothing below."""

    subset = None
    wide = 40.0

    def __call__(self, x, rows):
        gradient = -x
        logp = -0.5 * np.square(x[:4]).sum() - 0.5 * (x[4] / self.wide) ** 2
        logp += 6 * log_expit(x[4])
        gradient[4] = 6 * expit(-x[4]) - x[4] / self.wide**2
        return logp, gradient


@pytest.mark.parametrize(("at", "width"), [(7.0, 3.0), (30.0, 7.0), (30.0, 3.0)])
def test_a_gaussian_in_a_part_of_a_plain_is_no_fit(at, width):
    """Near the wall it is flat on one side, farther off on both."""
    x, scales = np.r_[np.zeros(4), at], np.r_[np.ones(4), width]
    assert not falls_as_fitted(WallBesideAPlain(), x, np.diag(scales))
    # far from the wall, a Gaussian as wide as the prior
    far = np.r_[np.zeros(4), 200.0]
    assert falls_as_fitted(WallBesideAPlain(), far, np.diag([1, 1, 1, 1, 40.0]))


@pytest.mark.parametrize("factor", [1.0, 30.0, 1 / 30])
def test_scales_by_draws_are_those_of_a_gaussian(factor):
    H = np.diag([4.0, 1.0, 0.01])

    class Passes:
        subset = None

        def __call__(self, x, rows):
            return -0.5 * x @ H @ x, -H @ x

    wrong = np.diag(np.diag(H) ** -0.5 * [factor, 1.0, 1 / factor])
    found = scaled_by_draws(Passes(), np.zeros(3), wrong)
    np.testing.assert_allclose(np.diag(found), np.diag(H) ** -0.5, rtol=0.25)  # of 20 draws


@pytest.mark.parametrize("width", [0.5, 40.0, 400.0])
def test_scales_by_draws_reach_the_wall_of_a_plain(width):
    """No curvature at a point tells that: it is the wide prior's, or that of the wall."""
    density = WallBesideAPlain()
    x = np.r_[np.zeros(4), 30.0]
    found = scaled_by_draws(density, x, np.diag([1, 1, 1, 1, width]))
    np.testing.assert_allclose(np.diag(found)[:4], 1, atol=0.3)

    def bound(width):
        metric = Dense(np.diag([1, 1, 1, 1, width]))
        return evidence_bound(density, GaussianFit(x, metric, is_mode=False, passes=0))

    best = max(bound(width) for width in np.geomspace(1, 100, 50))
    assert bound(found[4, 4]) > best - 0.5
    assert bound(40.0) < best - 10


class OffMode:
    """A Gaussian whose mode is elsewhere, as that of a subset is beside the mode of all rows."""

    subset = None

    def __call__(self, x, rows):
        return -0.5 * np.square(x - 2.0).sum(), 2.0 - x


def test_a_slope_at_the_mean_is_no_reason_to_refuse_a_fit():
    """Two posterior standard deviations off: that much a mode of half of the rows may be."""
    assert falls_as_fitted(OffMode(), np.zeros(10), np.eye(10))


class JointMode:
    """Effects N(0, exp(s)²) of four rows each, as they are without centring, and a scale held by its prior."""

    subset = None
    n_effects = 400
    n_rows = 4

    def __init__(self, prior_sd):
        self.prior_sd = prior_sd
        self.y = np.random.default_rng(0).normal(
            0, (1 / 4 + 1 / self.n_rows) ** 0.5, self.n_effects
        )

    def __call__(self, x, rows):
        s, z = x[0], x[1:]
        left = self.y - np.exp(s) * z
        value = -0.5 * ((s / self.prior_sd) ** 2 + z @ z + self.n_rows * left @ left)
        pull = self.n_rows * np.exp(s) * left
        return value, np.r_[pull @ z - s / self.prior_sd**2, pull - z]


@pytest.mark.parametrize(("prior_sd", "is_alike"), [(0.1, False), (0.001, True)])
def test_a_joint_mode_from_which_a_scale_is_driven_off_is_no_fit(prior_sd, is_alike):
    """Each effect drives it by little, and all of them by twenty standard deviations."""
    density = JointMode(prior_sd)

    def energy(x):
        value, gradient = density(x, None)
        return -value, -gradient

    mode = minimize(energy, np.zeros(401), jac=True, method="BFGS", options={"gtol": 1e-6}).x
    steps = 1e-5 * np.eye(401)
    hessian = [(density(mode - e, None)[1] - density(mode + e, None)[1]) / 2e-5 for e in steps]
    factor = np.linalg.cholesky(np.linalg.inv(np.array(hessian)))
    z = np.random.default_rng(0).standard_normal((100, 401))
    falls = [density(mode, None)[0] - density(mode + factor @ x, None)[0] for x in [*z, *-z]]
    assert 0.8 < np.mean(falls) / (401 / 2) < 1.4  # the fall alone doesn't tell
    assert falls_as_fitted(density, mode, factor) == is_alike
