"""Through pm.sample: the law of the draws, seeds and cores, results, warnings, interruptions."""

import io
import logging
import os
import signal
import subprocess
import sys
import textwrap
import traceback
import warnings

import arviz as az
import numpy as np
import pymc as pm
import pytest

from conftest import ROOT
from model_collection.small import GaussianMean, linear_regression
from modes import FAST, PYTHON, QUIET
from pymc.exceptions import SamplingError
from pymc.sampling.parallel import ParallelSamplingError
from pytensor.compile import FunctionMaker
from scipy import stats
from stationary import sghmc_map, stationary_covariance
from table import LINEAR, SAMPLERS, PaperSGHMC, PaperSGLD

from pymc_sghmc import SGHMC
from pymc_sghmc.diagnostics import configurational_temperature
from pymc_sghmc.step.chain import FEW_SENT_BACK

HELPERS = str(ROOT / "tests")


def first_alone(samplers):
    """Samplers of which the default run takes the first: what is tested depends on no rule."""
    return [samplers[0], *(pytest.param(one, marks=pytest.mark.slow) for one in samplers[1:])]


def build(sampler, model, **settings):
    settings = {"learning_rate": 1e-4, "batch_size": 10, "n_steps": 3, **settings}
    settings = {"compile_kwargs": FAST, **settings}
    return sampler.cls(model=model, **{**sampler.settings, **settings})


def errors_of_covariance(draws, mean, covariance):
    """(estimate − exact)/(Monte Carlo standard error) of all means and second moments."""
    centred = draws - mean  # (chain, draw, d)
    d = len(mean)
    scores = []
    for i in range(d):
        x = centred[..., i]
        scores.append(x.mean() / float(np.squeeze(az.mcse(x))))
        for j in range(i, d):
            product = x * centred[..., j]
            error = float(np.squeeze(az.mcse(product)))
            scores.append((product.mean() - covariance[i, j]) / error)
    return np.array(scores)


@pytest.fixture(scope="module")
def gaussian_runs():
    """One run per sampler on a posterior whose every law is known; shared by the tests below."""
    target = GaussianMean()
    P = np.linalg.inv(target.H)
    runs = {}
    for sampler in LINEAR:
        settings = {"learning_rate": 0.2, "n_steps": 4, "temperature": 1.3, "preconditioner": P}
        with target.model() as model:
            step = build(sampler, model, batch_size=40, compile_kwargs=PYTHON, **settings)
            idata = pm.sample(600, tune=50, chains=4, cores=2, step=step, random_seed=7, **QUIET)
        A, Q = sampler.linear_map(
            target.H, target.noise(40), eta=0.2, T=1.3, P=P, n_steps=4, **sampler.letters
        )
        runs[repr(sampler)] = target, idata, stationary_covariance(A, Q)
    return runs


@pytest.mark.parametrize("sampler", LINEAR, ids=repr)
def test_draws_have_the_exact_law(gaussian_runs, sampler):
    # 9 first and second moments within 4.5 standard errors: a false alarm in 15,000 seeds.
    target, idata, covariance = gaussian_runs[repr(sampler)]
    draws = idata.posterior["mu"].to_numpy()
    scores = errors_of_covariance(draws, target.mean, covariance[:3, :3])
    assert np.abs(scores).max() < 4.5
    # Negative control: at temperature 1 the law is another.
    wrong = errors_of_covariance(draws, target.mean, covariance[:3, :3] / 1.3)
    assert np.abs(wrong).max() > 5


@pytest.mark.parametrize("sampler", LINEAR, ids=repr)
def test_thermometers_show_the_exact_temperatures(gaussian_runs, sampler):
    target, idata, covariance = gaussian_runs[repr(sampler)]
    stats = idata.sample_stats
    measured = stats["configurational_temperature"].to_numpy()
    exact = np.trace(target.H @ covariance[:3, :3]) / 3
    assert abs(measured.mean() - exact) < 4.5 * float(np.squeeze(az.mcse(measured)))
    [ratio], [error] = configurational_temperature(idata)
    assert abs(ratio * 1.3 - exact) < 4.5 * error * 1.3
    kinetic = stats["kinetic_temperature"].to_numpy()
    if not sampler.has_momentum:
        assert np.isnan(kinetic).all()
    else:
        exact = np.trace(target.H @ covariance[3:, 3:]) / (3 * 0.2)
        assert abs(kinetic.mean() - exact) < 4.5 * float(np.squeeze(az.mcse(kinetic)))


@pytest.mark.parametrize("sampler", first_alone(LINEAR), ids=repr)
def test_wrong_total_size_is_refused_and_the_right_one_gives_the_law(sampler):
    target = GaussianMean()
    P = np.linalg.inv(target.H)

    settings = {"learning_rate": 0.2, "preconditioner": P, "batch_size": None, "n_steps": 4}
    settings["compile_kwargs"] = PYTHON
    with pytest.raises(ValueError, match="total_size=400 but its data have 200 rows"):
        build(sampler, target.model(batch_size=40, total_size=400), **settings)
    with target.model(batch_size=40, total_size=200) as model:
        step = build(sampler, model, **settings)
        idata = pm.sample(600, tune=50, chains=2, cores=2, step=step, random_seed=3, **QUIET)
    A, Q = sampler.linear_map(
        target.H, target.noise(40), eta=0.2, P=P, n_steps=4, **sampler.letters
    )
    covariance = stationary_covariance(A, Q)[:3, :3]
    draws = idata.posterior["mu"].to_numpy()
    assert np.abs(errors_of_covariance(draws, target.mean, covariance)).max() < 4.5
    # Negative control: the posterior under a total_size twice too large.
    H = target.H + target.fisher
    mean = np.linalg.solve(H, 400 * target.A.T @ target.y.mean(axis=0))
    assert np.abs(errors_of_covariance(draws, mean, np.linalg.inv(H))).max() > 10


def test_noise_estimate_measured_from_minibatches_mends_the_variance():
    # "full" on real minibatches: the law of the exact gradient within 4.5 standard errors and 2 %,
    # which V̂'s own error may add; without it the variance is far off.
    target = GaussianMean()
    P = np.linalg.inv(target.H)
    with target.model() as model:
        step = PaperSGHMC(
            batch_size=40, learning_rate=0.05, friction=0.4, preconditioner=P, n_steps=4,
            noise_estimate="full", model=model, compile_kwargs=PYTHON,
        )  # fmt: skip
        idata = pm.sample(400, tune=20, chains=2, cores=2, step=step, random_seed=2, **QUIET)
    A, Q = sghmc_map(target.H, 0 * target.H, eta=0.05, alpha=0.4, P=P, n_steps=4)
    exact = np.trace(target.H @ stationary_covariance(A, Q)[:3, :3]) / 3
    [mean], [error] = configurational_temperature(idata)
    assert abs(mean - exact) < 4.5 * error + 0.02
    A, Q = sghmc_map(target.H, target.noise(40), eta=0.05, alpha=0.4, P=P, n_steps=4)
    uncorrected = np.trace(target.H @ stationary_covariance(A, Q)[:3, :3]) / 3
    assert uncorrected > exact + 0.2
    assert uncorrected > mean + 4.5 * error
    # β̂/α = ½ηV/α in the coordinates of the preconditioner
    L = np.linalg.cholesky(P)
    largest = np.linalg.eigvalsh(L.T @ target.noise(40) @ L)[-1]
    reported = float(idata.sample_stats["gradient_noise"].mean())
    assert abs(reported / (0.5 * 0.05 * largest / 0.4) - 1) < 0.1


def same_draws(first, second):
    for name in first.posterior:
        np.testing.assert_array_equal(first.posterior[name], second.posterior[name])
    for name in first.sample_stats:
        np.testing.assert_array_equal(first.sample_stats[name], second.sample_stats[name])


@pytest.mark.parametrize("sampler", first_alone(SAMPLERS), ids=repr)
def test_same_seed_gives_the_same_draws_whatever_the_cores_and_runs(sampler):
    with linear_regression() as model:
        step = build(sampler, model)
        runs = [
            pm.sample(6, tune=4, chains=4, cores=cores, step=step, random_seed=3, **QUIET)
            for cores in (1, 2, 4)
        ]
        other = pm.sample(6, tune=4, chains=4, cores=1, step=step, random_seed=4, **QUIET)
    for run in runs[1:]:
        same_draws(runs[0], run)
    assert not np.array_equal(runs[0].posterior["beta"], other.posterior["beta"])
    # chains start at the same point and differ by their minibatches from the first draw on
    logp = runs[0].sample_stats["minibatch_logp"].to_numpy()
    assert len(np.unique(logp[:, 0])) == 4


@pytest.mark.process
@pytest.mark.parametrize("mp_ctx", ["spawn", "forkserver"])
def test_same_draws_in_spawned_workers(mp_ctx, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {HELPERS!r})
        import numpy as np, pymc as pm
        from table import PaperSGHMC
        from model_collection.small import linear_regression
        if __name__ == "__main__":
            with linear_regression() as model:
                step = PaperSGHMC(learning_rate=1e-4, batch_size=10)
                runs = [
                    pm.sample(5, tune=5, chains=2, step=step, random_seed=1, progressbar=False,
                              compute_convergence_checks=False, **settings)
                    for settings in ({{"cores": 1}}, {{"cores": 2, "mp_ctx": {mp_ctx!r}}})
                ]
            assert np.array_equal(*[run.posterior["beta"] for run in runs])
            print("same")
        """)
    )
    output = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False
    )
    assert output.stdout.endswith("same\n"), output.stderr


# Quickly: loops/test_inner_loop.py, test_seed_gives_the_same_draws_on_each_backend, and in C
# rows/test_streams.py, test_posterior_with_automatic_settings.
@pytest.mark.parametrize(
    "mode", [*(pytest.param(m, marks=pytest.mark.slow) for m in ("CVM", "NUMBA")), "JAX"]
)
def test_backends_agree(mode):
    if mode == "JAX":
        pytest.importorskip("jax")
    model = linear_regression()
    draws = []
    for m in ("FAST_COMPILE", mode):
        step = PaperSGHMC(
            learning_rate=1e-4, batch_size=10, model=model, compile_kwargs={"mode": m}, n_steps=5
        )
        step.begin_chain(np.random.default_rng(1))
        point = model.initial_point()
        for _ in range(5):
            point, _ = step.step(point)
        draws.append(np.append(point["beta"], point["sigma_log__"]))
    np.testing.assert_allclose(draws[1], draws[0], rtol=1e-5 if mode == "JAX" else 1e-9)


def test_group_effects_are_sampled_by_jax():
    """In the form in which the model has them: JAX takes no number of rows for an input."""
    pytest.importorskip("jax")
    group = np.repeat(np.arange(20), 10)
    y = np.random.default_rng(5).normal(group / 10, 1.0)
    with pm.Model() as model:
        u = pm.Normal("u", 0, pm.HalfNormal("tau", 1), shape=20)
        pm.Normal("y", u[group], 1.0, observed=y)
    step = SGHMC(batch_size=None, model=model, compile_kwargs={"mode": "JAX"})
    step.begin_chain(np.random.default_rng(1))
    point, _ = step.step(model.initial_point())
    assert np.isfinite(point["u"]).all()


def test_mixes_with_nuts_slice_metropolis_and_itself():
    # Each unknown has its own step; the discrete one must be Metropolis's. Exact answers of the
    # conjugate parts within 5 standard errors.
    rng = np.random.default_rng(0)
    y = rng.normal(1.0, 1.0, size=50)
    with pm.Model():
        a = pm.Normal("a", 0, 1)
        b = pm.Normal("b", 0, 1)
        c = pm.Normal("c", 0, 1)
        s = pm.HalfNormal("s", 1)
        k = pm.Binomial("k", 3, 0.5)
        pm.Normal("y", a, 1, observed=y)
        pm.Normal("z", b + c, 0.5, observed=np.array([2.0]))
        steps = [
            PaperSGHMC([a], learning_rate=2e-3, batch_size={"y": 25}, compile_kwargs=FAST),
            PaperSGLD([b], learning_rate=5e-2, compile_kwargs=FAST, n_steps=5),
            pm.NUTS([c], compile_kwargs=FAST),
            pm.Slice([s]),
            pm.Metropolis([k]),
        ]
        idata = pm.sample(150, tune=100, chains=2, cores=2, step=steps, random_seed=5, **QUIET)
    posterior = idata.posterior
    expected = {"a": y.sum() / 51, "b": 8 / 9, "c": 8 / 9, "s": np.sqrt(2 / np.pi), "k": 1.5}
    for name, mean in expected.items():
        x = posterior[name].to_numpy().astype(float)
        assert abs(x.mean() - mean) < 5 * float(np.squeeze(az.mcse(x))), name
    means, errors = configurational_temperature(idata)
    assert means.shape == errors.shape == (2,)
    made = idata.sample_stats["inner_steps"].to_numpy()
    assert made.shape == (2, 150, 2)
    assert (made[..., 1] == 5).all()
    # PyMC's name for the tree sizes of NUTS, which nothing of ours may hide
    leapfrogs = idata.sample_stats["n_steps"].to_numpy()
    assert leapfrogs.shape == (2, 150)
    assert len(np.unique(leapfrogs)) > 1


def test_blocked_false_makes_one_step_per_unknown():
    with linear_regression():
        step = PaperSGHMC(learning_rate=1e-4, batch_size=10, blocked=False, compile_kwargs=FAST)
        assert [method.unknowns.names for method in step.methods] == [("beta",), ("sigma_log__",)]
        idata = pm.sample(10, tune=5, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    assert idata.sample_stats["learning_rate"].shape == (2, 10, 2)


def test_other_steps_on_a_minibatch_model_are_warned_of():
    with GaussianMean().model(batch_size=40, total_size=200) as model:
        pm.Normal("b", model["mu"].sum(), 1)
        with pytest.warns(UserWarning, match="leaves b to other steps.*pm.Minibatch.*batch_size"):
            PaperSGHMC([model["mu"]], learning_rate=1e-4, compile_kwargs=FAST)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            PaperSGHMC(learning_rate=1e-4, compile_kwargs=FAST)


def test_initvals_are_where_chains_start():
    with linear_regression():
        step = PaperSGHMC(learning_rate=1e-12, batch_size=10, compile_kwargs=FAST)
        initvals = [{"beta": [3.0, 4.0]}, {"beta": [-3.0, -4.0]}]
        idata = pm.sample(
            2, tune=0, chains=2, cores=1, step=step, initvals=initvals, random_seed=1, **QUIET
        )
    np.testing.assert_allclose(idata.posterior["beta"][:, 0], [[3.0, 4.0], [-3.0, -4.0]], atol=1e-3)


@pytest.mark.parametrize("sampler", first_alone(SAMPLERS), ids=repr)
def test_result_works_with_arviz_and_pymc_and_the_model_is_untouched(sampler):
    model = linear_regression()
    names = sorted(model.named_vars)
    logp = model.compile_logp()(model.initial_point())
    calls = []
    with model:
        step = build(sampler, model)
        idata = pm.sample(
            60, tune=20, chains=2, cores=1, step=step, random_seed=1, progressbar=False,
            var_names=["beta", "sigma"], callback=lambda trace, draw: calls.append(draw.chain),
        )  # fmt: skip
        assert len(calls) == 2 * 80
        assert set(idata.posterior.data_vars) == {"beta", "sigma"}
        assert list(az.summary(idata).index) == ["beta[a]", "beta[b]", "sigma"]
        plot_trace(idata)
        pm.compute_log_likelihood(idata, progressbar=False)
        assert np.isfinite(elpd(idata))
        predictive = pm.sample_posterior_predictive(
            idata, var_names=["y"], progressbar=False, random_seed=1
        )
        assert predictive.posterior_predictive["y"].shape == (2, 60, 60)
    assert sorted(model.named_vars) == names
    assert model.compile_logp()(model.initial_point()) == logp


def plot_trace(idata):
    with warnings.catch_warnings():  # ArviZ 0.23 calls Matplotlib in ways that 3.11 deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        az.plot_trace(idata)


def elpd(idata):
    with warnings.catch_warnings():  # 120 draws are few for PSIS, and it says so
        warnings.simplefilter("ignore", UserWarning)
        loo = az.loo(idata)
    return float(loo.elpd_loo if hasattr(loo, "elpd_loo") else loo.elpd)


@pytest.fixture(scope="module")
def quick_step():
    with linear_regression() as model:
        return model, PaperSGHMC(learning_rate=1e-4, batch_size=10, compile_kwargs=FAST)


@pytest.mark.parametrize("style", [True, "combined", "split", "combined+stats", "split+stats"])
def test_progress_bar_has_its_columns_in_every_style(quick_step, style, monkeypatch):
    import rich.console

    out = io.StringIO()
    real = rich.console.Console.__init__

    def console(self, *args, **kwargs):
        real(self, *args, **{**kwargs, "file": out, "width": 200, "force_terminal": True})

    monkeypatch.setattr(rich.console.Console, "__init__", console)
    model, step = quick_step
    with model:
        pm.sample(
            5, tune=5, chains=2, cores=1, step=step, random_seed=1, progressbar=style,
            compute_convergence_checks=False,
        )  # fmt: skip
    shown = out.getvalue()
    assert "Draw" in shown
    full = style is True or style.endswith("stats")
    for column in ("Rate", "Temp.", "Lost", "1e-4"):
        assert (column in shown) == full, column


@pytest.mark.parametrize("rate", [0.25, 1.0, 0.0025, 2.7e-4, 3.2e-12])
def test_progress_bar_fits_into_80_columns(rate):
    [update] = SGHMC._make_progressbar_update_functions()
    stats = update({"configurational_temperature": 1.0, "learning_rate": rate, "divergences": 0})
    assert float(stats["learning_rate"]) == pytest.approx(rate, rel=0.2)
    columns, _ = SGHMC._progressbar_config(1)
    assert all(len(column.get_table_column().header) <= 5 for column in columns)
    assert len(stats["learning_rate"]) <= 6


def test_progress_bar_of_marimo_has_its_columns(monkeypatch):
    from pymc.progress_bar.marimo_progress import MarimoProgressBackend

    monkeypatch.setattr(MarimoProgressBackend, "_render", lambda self: None)  # needs a notebook
    backend = MarimoProgressBackend("Draw", 1, 10, combined=False, full_stats=True)
    backend._initialize_tasks()
    [update] = SGHMC._make_progressbar_update_functions()
    stats = update({"configurational_temperature": 1.0, "learning_rate": 3.2e-7, "divergences": 0})
    failing = stats.pop("failing")
    assert failing is False
    assert set(stats) == set(SGHMC._progressbar_config(1)[1])
    backend.update(0, advance=1, failing=failing, stats=stats, is_last=False)
    shown = backend._render_html()
    for expected in ("Learning rate", "3e-7", "Temperature", "1.000", "Divergences"):
        assert expected in shown


def test_hot_chain_is_warned_of_once_with_number_and_remedy(caplog):
    target = GaussianMean()
    with target.model():
        step = PaperSGHMC(
            batch_size=10, learning_rate=0.1, preconditioner=np.linalg.inv(target.H), friction=0.3,
            compile_kwargs=FAST,
        )  # fmt: skip
        with caplog.at_level(logging.WARNING):
            idata = pm.sample(
                150, tune=50, chains=4, cores=2, step=step, random_seed=1, progressbar=False
            )
    [mean], _ = configurational_temperature(idata)
    messages = [m for m in caplog.messages if "configurational temperature" in m]
    assert len(messages) == 1
    assert f"is {mean:.3g} ±" in messages[0]
    assert "Lower learning_rate" in messages[0]


def test_right_chain_is_not_warned_of(caplog):
    target = GaussianMean()
    with target.model():
        step = PaperSGHMC(
            learning_rate=0.02, preconditioner=np.linalg.inv(target.H), compile_kwargs=FAST
        )
        with caplog.at_level(logging.WARNING):
            pm.sample(200, tune=50, chains=4, cores=2, step=step, random_seed=1, progressbar=False)
    assert not [m for m in caplog.messages if "configurational temperature" in m]


def mean_error(x):
    """Monte Carlo standard error of the mean of a variable's draws."""
    return float(np.squeeze(az.mcse(x.to_numpy())))


def explosive_model(edge=3):
    """Standard normal below the edge, not a number to the samplers above it."""
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("energy", pm.math.switch(x < edge, -0.5 * x**2, x * np.nan))
    return model


@pytest.mark.parametrize(("chains", "cores"), [(1, 1), (2, 1), (2, 2)])
def test_fault_keeps_the_draws_made_so_far(chains, cores, caplog):
    # x leaves the region where its density exists sooner or later; the draws before that stay.
    with explosive_model():
        step = PaperSGHMC(learning_rate=0.01, n_steps=2, compile_kwargs=PYTHON)
        idata = pm.sample(
            100_000,
            tune=5,
            chains=chains,
            cores=cores,
            step=step,
            random_seed=1,
            progressbar=False,
        )
    n_draws = idata.posterior.sizes["draw"]
    assert 1 < n_draws < 100_000
    assert np.isfinite(idata.posterior["x"]).all()
    diverging = idata.sample_stats["diverging"].to_numpy()
    assert not diverging[:, :-1].any()
    if chains == 1:  # of several chains PyMC cuts the longer ones off
        assert diverging[0, -1]
        x = idata.posterior["x"][0]
        assert x[-1] == x[-2]
    messages = [m for m in caplog.messages if m.startswith("SGHMC stopped")]
    assert 1 <= len(messages) <= 2  # one for each chain that met the edge
    for message in messages:
        assert "the gradient of x is not finite at inner step" in message
        assert "Try learning_rate=0.001" in message
    assert not any("target_accept" in m for m in caplog.messages)  # no argument of this step


@pytest.mark.parametrize("cores", [1, 2])
def test_chains_that_seldom_diverge_go_on_and_the_run_warns(cores, caplog):
    edge = 2.8
    with explosive_model(edge), caplog.at_level(logging.WARNING):
        step = SGHMC(compile_kwargs=PYTHON)
        idata = pm.sample(
            1000, tune=100, chains=4, cores=cores, step=step, random_seed=1, progressbar=False
        )
    diverging = idata.sample_stats["diverging"].to_numpy()
    assert diverging.shape == (4, 1000)
    assert 0 < diverging.sum() < 4 * (FEW_SENT_BACK + 10)
    [message] = [m for m in caplog.messages if "after tuning" in m]
    assert f"There were {diverging[:, :-1].sum()} divergences" in message
    # the law is that of a normal distribution that is cut off at the edge
    law = stats.truncnorm(-np.inf, edge)
    x = idata.posterior["x"]
    assert (x < edge).all()
    squares = (x - law.mean()) ** 2
    assert abs(float(x.mean()) - law.mean()) < 0.1 * law.std() + 4.5 * mean_error(x)
    assert abs(float(squares.mean()) / law.var() - 1) < 0.1 + 4.5 * mean_error(squares) / law.var()


def test_divergences_beside_nuts_are_told(caplog):
    with explosive_model(2.8) as model, caplog.at_level(logging.WARNING):
        y = pm.Normal("y")
        step = [SGHMC([model["x"]], compile_kwargs=PYTHON), pm.NUTS([y])]
        idata = pm.sample(
            1000, tune=100, chains=2, cores=1, step=step, random_seed=1, progressbar=False
        )
    n = int(idata.sample_stats["diverging"].sum())
    assert n > 0
    assert any(f"{n} divergences" in m for m in caplog.messages)


@pytest.mark.parametrize("is_mode", [True, False])
def test_chains_that_are_thrown_far_out_diverge_though_all_is_finite(is_mode, caplog):
    # Steps are some hundred times too long for the wall: it throws a chain out to x = -50 and more.
    # It stands across all axes, so that no walk along one of them sees it at set-up.
    with pm.Model(), caplog.at_level(logging.WARNING):
        x = pm.Flat("x", shape=3)
        across = pm.Deterministic("across", x.sum() / 3**0.5)
        wall = pm.math.maximum(across - 2.8, 0)
        pm.Potential("energy", -0.5 * (x**2).sum() - 5000 * wall**2)
        if not is_mode:  # flat at the top and steep beside it, as no Gaussian is
            z = pm.Flat("z")
            pm.Potential("rough", -0.5 * z**2 - 10 * z**6)
        step = SGHMC(compile_kwargs=PYTHON)
        idata = pm.sample(
            1000, tune=100, chains=4, cores=1, step=step, random_seed=1, progressbar=False
        )
    assert step.tuner.setups.fit.is_mode == is_mode
    across = idata.posterior["across"]
    assert across.min() > -20  # Normal but for the wall
    diverging = idata.sample_stats["diverging"].to_numpy()
    assert 0 < diverging.sum() < 4 * (FEW_SENT_BACK + 10)
    assert any("after tuning" in m for m in caplog.messages)
    law = stats.truncnorm(-np.inf, 2.8)
    squares = (across - law.mean()) ** 2
    assert abs(float(squares.mean()) / law.var() - 1) < 0.1 + 4.5 * mean_error(squares) / law.var()


def test_chains_that_often_diverge_are_stopped(caplog):
    with explosive_model(1.5), caplog.at_level(logging.WARNING):
        idata = pm.sample(
            1500,
            tune=1,  # too few to find a shorter step
            chains=1,
            step=SGHMC(compile_kwargs=PYTHON),
            random_seed=1,
            **QUIET,
        )
    assert idata.posterior.sizes["draw"] < 1500
    assert FEW_SENT_BACK < idata.sample_stats["diverging"].sum() < FEW_SENT_BACK + 15
    assert any(m.startswith("SGHMC stopped") for m in caplog.messages)


@pytest.mark.parametrize("cores", [1, 2])
def test_fault_before_any_draw_is_an_error(cores):
    with explosive_model():
        step = PaperSGHMC(learning_rate=1.0, n_steps=50, compile_kwargs=PYTHON)
        with pytest.raises(
            (SamplingError, ParallelSamplingError),
            match=r"SGHMC stopped: .*of x is not finite at inner",
        ):
            pm.sample(100, tune=500, chains=2, cores=cores, step=step, random_seed=1, **QUIET)


@pytest.mark.process
@pytest.mark.parametrize("cores", [1, 2])
def test_interruption_returns_what_was_sampled(cores, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
        sys.path.insert(0, {HELPERS!r})
        import numpy as np, pymc as pm
        from table import PaperSGHMC
        from model_collection.small import linear_regression
        with linear_regression() as model:
            step = PaperSGHMC(learning_rate=1e-4, batch_size=10, compile_kwargs={PYTHON!r})
            def tell(trace, draw):
                if draw.draw_idx == 200:
                    print("running", flush=True)
            idata = pm.sample(10**6, tune=50, chains=2, cores={cores}, step=step, random_seed=1,
                              progressbar=False, compute_convergence_checks=False, callback=tell)
        print("draws", idata.posterior.sizes["draw"], flush=True)
        """)
    )
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "running\n"
    if cores == 1:
        os.killpg(process.pid, signal.SIGINT)  # ends the first chain, PyMC goes on to the second
    assert process.stdout.readline() == "running\n"  # parallel chains are cut to the shorter one
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    [_, count] = output.splitlines()[-1].split() if output else ["", errors]
    assert 100 < int(count) < 10**6


def test_zarr_trace_holds_the_same_draws_and_the_states(tmp_path):
    zarr = pytest.importorskip("zarr")
    from pymc.backends.zarr import ZarrTrace

    if not hasattr(zarr, "DirectoryStore"):
        pytest.skip("PyMC's ZarrTrace needs zarr 2")
    with linear_regression() as model:
        step = build(SAMPLERS[0], model, noise_estimate="diag")
        settings = {"draws": 6, "tune": 4, "chains": 2, "step": step, "random_seed": 3, **QUIET}
        expected = pm.sample(cores=1, **settings)
        for cores in (1, 2):
            store = zarr.DirectoryStore(str(tmp_path / f"cores_{cores}"))
            trace = ZarrTrace(store=store, draws_per_chunk=5)
            with warnings.catch_warnings():
                # PyMC 6 warns of return_inferencedata=False; the conversion of a ZarrTrace needs
                # zarr < 3 in PyMC and zarr 3 in newer versions of xarray.
                warnings.simplefilter("ignore", FutureWarning)
                pm.sample(cores=cores, trace=trace, return_inferencedata=False, **settings)
            np.testing.assert_array_equal(trace.posterior["beta"][:], expected.posterior["beta"])
            # the state of each chain, taken up by the step, goes on from its last draw
            step.sampling_state = trace._sampling_state.sampling_state[0]
            assert step.chain.n_kept == 6
            assert step.chain.state.momentum.shape == (3,)


def test_new_data_in_the_same_step_compile_nothing(monkeypatch):
    """Next month's rows, more of them: the step fits anew, with the functions that it has."""
    compiled = []
    made = FunctionMaker.create

    def create(self, *args, **kwargs):
        callers = traceback.extract_stack()
        is_copy = any(caller.name == "_copied" for caller in callers)  # for another thread
        if not is_copy and any("pymc_sghmc" in caller.filename for caller in callers):
            compiled.append(self)
        return made(self, *args, **kwargs)

    monkeypatch.setattr(FunctionMaker, "create", create)

    def rows(n, mean):
        return np.random.default_rng(n).normal(mean, 1.0, n)

    with pm.Model():
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("y", mu, 1.0, observed=pm.Data("data", rows(5_000, 1.0)))
        step = SGHMC(batch_size=50)
        assert compiled  # which this counts
        pm.sample(100, tune=100, chains=1, step=step, random_seed=1, **QUIET)
        compiled.clear()
        later = rows(8_000, 3.0)
        pm.set_data({"data": later})
        idata = pm.sample(1000, tune=100, chains=1, step=step, random_seed=2, **QUIET)
    assert not compiled
    draws = idata.posterior["mu"].to_numpy().ravel()
    sd = 1 / np.sqrt(later.size)
    # 1,000 draws, of which fewer than 250 are never worth as many: four errors of the mean
    assert abs(draws.mean() - later.mean()) < 4 * sd / np.sqrt(250)
