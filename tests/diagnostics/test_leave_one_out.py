"""loo: the estimate from a sample of the rows, against closed forms and ArviZ's own of all rows."""

import copy

import arviz as az
import numpy as np
import pymc as pm
import pytest
import xarray as xr

from counted_partitions import CountedPartitions
from modes import FAST, QUIET
from scipy.stats import chi2

from pymc_sghmc import SGHMC
from pymc_sghmc.compat import inference_data
from pymc_sghmc.diagnostics import loo
from pymc_sghmc.loaders import ArrayLoader

N, D, FEW = 20_000, 3, 6
SETTINGS = {"batch_size": 50, "compile_kwargs": FAST, "learning_rate": 1e-4, "gradient": "plain"}
rng = np.random.default_rng(0)
X = rng.standard_normal((N, D))
Y = X @ [1.0, -1.0, 0.5] + rng.standard_normal(N)


def regression(x, y):
    """A regression with known noise, whose posterior and leave-one-out density are closed forms."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=D)
        pm.Normal("likelihood", pm.Data("X", x) @ beta, 1.0, observed=pm.Data("y", y))
    return model


def idata_of(stats=None, **draws):
    """Draws of shape (chain, draw, ...) as pm.sample returns them."""
    posterior = {
        name: (("chain", "draw", *[f"{name}_{i}" for i in range(values.ndim - 2)]), values)
        for name, values in draws.items()
    }
    groups = {"posterior": xr.Dataset(posterior)}
    if stats is not None:
        shape = next(iter(draws.values())).shape[:2]
        groups["sample_stats"] = xr.Dataset(
            {name: (("chain", "draw"), np.broadcast_to(v, shape)) for name, v in stats.items()}
        )
    return inference_data(groups)


def regression_draws(n_draws=250, stats=None):
    P = np.eye(D) + X.T @ X
    L = np.linalg.cholesky(np.linalg.inv(P))
    mean = np.linalg.solve(P, X.T @ Y)
    draws = np.random.default_rng(1).standard_normal((4, n_draws, D)) @ L.T
    return idata_of(stats, beta=mean + draws)


def exact_elpd():
    S = np.linalg.inv(np.eye(D) + X.T @ X)
    h = np.einsum("ij,jk,ik->i", X, S, X)
    z = (Y - X @ (S @ (X.T @ Y))) / np.sqrt(1 - h)
    return np.sum(-0.5 * np.log(2 * np.pi) + 0.5 * np.log(1 - h) - 0.5 * z**2)


def elpd_of(result):
    return result["elpd" if hasattr(result, "elpd") else "elpd_loo"]


def p_of(result):
    return result["p" if hasattr(result, "elpd") else "p_loo"]


def pointwise_of(result):
    return result["elpd_i" if hasattr(result, "elpd") else "loo_i"]


def with_log_likelihood(idata, model):
    with model:
        return pm.compute_log_likelihood(idata, progressbar=False)


def test_the_estimate_is_the_closed_form_within_its_errors():
    # of 1,000 independent draws: tr(ŜP)/2 and the mean, each with an error of about √(D/2S)
    of_draws = np.sqrt(D / 1000)
    result = loo(regression_draws(), regression(X, Y), n_rows=2000, compile_kwargs=FAST)
    error = np.hypot(result["subsampling_se"], of_draws)
    assert error < 0.5
    assert abs(elpd_of(result) - exact_elpd()) < 4 * error
    # p_loo is a plain mean over the sample, of values that are half a chi-square of one degree
    assert abs(p_of(result) - D) < 4 * (2 * D / np.sqrt(2000) + np.sqrt(2 * D / 1000))
    assert result["subsample_size"] == 2000
    assert result["n_data_points"] == N
    expected_se = np.sqrt(N) * np.std(pointwise_of(result).values)
    assert result["se"] == pytest.approx(expected_se, rel=0.05)


@pytest.mark.parametrize("kind", ["arrays", "memmap", "loader", "pm.Minibatch"])
def test_rows_from_anywhere_give_what_the_whole_model_gives(kind, tmp_path):
    idata = regression_draws(stats={"data_rows": N})
    expected = loo(idata, regression(X, Y), n_rows=500, compile_kwargs=FAST)
    data = {"X": X, "y": Y}
    if kind == "memmap":
        for name, array in data.items():
            np.save(tmp_path / f"{name}.npy", array)
            data[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    if kind == "pm.Minibatch":
        with pm.Model() as few:
            beta = pm.Normal("beta", 0, 1, shape=D)
            x, y = pm.Minibatch(X, Y, batch_size=50)
            pm.Normal("likelihood", x @ beta, 1.0, observed=y, total_size=N)
        result = loo(idata, few, n_rows=500, compile_kwargs=FAST)
    else:
        if kind == "loader":
            data = ArrayLoader(data, block_rows=777)
        few = regression(X[:FEW], Y[:FEW])
        step = SGHMC(model=few, data=data, **SETTINGS)
        result = loo(idata, step, n_rows=500, compile_kwargs=FAST)
    if kind != "loader":  # which has an order of its own, and so another sample
        assert elpd_of(result) == pytest.approx(elpd_of(expected), rel=1e-9)
        np.testing.assert_allclose(pointwise_of(result), pointwise_of(expected), rtol=1e-6)
        return
    errors = np.hypot(result["subsampling_se"], expected["subsampling_se"])
    assert abs(elpd_of(result) - elpd_of(expected)) < 4 * errors
    np.testing.assert_allclose(
        np.sort(result["elpd_loo_approx"]).mean(), np.mean(expected["elpd_loo_approx"]), rtol=1e-3
    )


def test_rows_on_other_machines_stay_there():
    da = pytest.importorskip("dask.array")

    class Elsewhere(CountedPartitions):
        def _blocks(self, numbers):
            raise AssertionError("rows are read here")

    data = {"X": da.from_array(X, chunks=(3000, D)), "y": da.from_array(Y, chunks=3000)}
    loader = Elsewhere(data)
    step = SGHMC(model=regression(X[:FEW], Y[:FEW]), data=loader, pool=300, compile_kwargs=FAST)
    loader.sizes.clear()
    idata = regression_draws(stats={"data_rows": N})
    settings = {"n_rows": 500, "max_rows": 500, "pointwise": False, "compile_kwargs": FAST}
    result = loo(idata, step, **settings)
    expected = loo(idata, regression(X, Y), **settings)
    assert elpd_of(result) == pytest.approx(elpd_of(expected), rel=1e-9)
    assert result["se"] == pytest.approx(expected["se"], rel=1e-6)
    [size] = loader.sizes
    assert size < 500 * 8 * (D + 2) + 5000  # the sample's rows


def test_a_row_without_a_likelihood_is_named_wherever_it_is():
    da = pytest.importorskip("dask.array")
    counts = np.ones(N)
    counts[[17_000, 19_000]] = -1.0
    with pm.Model() as model:
        rate = pm.HalfNormal("rate", 1.0)
        pm.Poisson("likelihood", rate, observed=pm.Data("y", counts[:FEW]))
    idata = idata_of(rate=np.random.default_rng(0).uniform(0.9, 1.1, (2, 100)))
    data = {"y": da.from_array(counts, chunks=3000)}
    step = SGHMC(model=model, data=data, **SETTINGS)
    for judged in (step, SGHMC(model=model, data={"y": counts}, **SETTINGS)):
        with pytest.raises(ValueError, match=r"loo: the log-likelihood of row 17,000 is -inf"):
            loo(idata, judged)


def test_a_sample_of_all_rows_is_what_arviz_computes():
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 5, shape=40)
        sigma = pm.HalfNormal("sigma")
        k = np.arange(200) % 40
        pm.StudentT("y", nu=4, mu=mu[k], sigma=sigma, observed=Y[:200])
    draws = np.random.default_rng(2)
    idata = idata_of(
        mu=Y[:200].reshape(5, 40).mean(0) + 0.8 * draws.standard_normal((2, 300, 40)),
        sigma=np.exp(0.1 * draws.standard_normal((2, 300))),
    )
    with pytest.warns(UserWarning, match="shape parameter of Pareto.*of 200 sampled rows of y"):
        result = loo(idata, model, reff=0.7, compile_kwargs=FAST)
    with pytest.warns(UserWarning, match="shape parameter of Pareto"):
        expected = az.loo(with_log_likelihood(idata, model), reff=0.7, pointwise=True)
    assert result["se"] == pytest.approx(expected["se"], rel=3e-3)  # ArviZ 1 divides by N − 1
    for name in ("n_samples", "n_data_points", "good_k", "warning"):
        assert result[name] == pytest.approx(expected[name], rel=1e-6)
    assert elpd_of(result) == pytest.approx(elpd_of(expected), rel=1e-9)
    assert p_of(result) == pytest.approx(p_of(expected), rel=1e-9)
    np.testing.assert_allclose(pointwise_of(result), pointwise_of(expected), rtol=1e-9)
    np.testing.assert_allclose(result["pareto_k"], expected["pareto_k"], rtol=1e-7)
    assert result["subsampling_se"] == 0
    assert result["subsample_size"] == 200
    assert str(result).split("SE")[0] == str(expected).split("SE")[0]


GROUP = np.random.default_rng(6).integers(0, 300, 3000)


def groups(y, g=GROUP):
    with pm.Model() as model:
        u = pm.Normal("u", 0, 1, shape=300)
        pm.Normal("y", u[pm.Data("g", g)], 1, observed=pm.Data("y_data", y))
    return model


def group_draws(y):
    n = np.bincount(GROUP, minlength=300)
    mean = np.bincount(GROUP, weights=y, minlength=300) / (n + 1)
    draws = np.random.default_rng(3).standard_normal((4, 100, 300)) / np.sqrt(n + 1)
    return idata_of(u=mean + draws)


@pytest.fixture(scope="module")
def group_outcomes():
    draws = np.random.default_rng(4)
    return draws.normal(size=300)[GROUP] + draws.standard_normal(3000)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_errors_of_the_subsampling_are_those_that_are_stated(group_outcomes):
    idata, model = group_draws(group_outcomes), groups(group_outcomes)
    settings = {"compile_kwargs": FAST, "reff": 1.0, "target_error": 1e6}
    whole = elpd_of(loo(idata, model, n_rows=3000, **settings))
    z = []
    for seed in range(30):
        result = loo(idata, model, n_rows=300, max_rows=300, random_seed=seed, **settings)
        z.append((elpd_of(result) - whole) / result["subsampling_se"])
    assert result["subsampling_se"] > 1
    # the sum of 30 squares of about standard normal numbers: one run in 50,000 lies outside, and a
    # factor of 1.3 is for the differences' tails
    low, high = chi2.ppf([1e-5, 1 - 1e-5], 30)
    assert low / 1.3 < np.sum(np.square(z)) < 1.3 * high
    assert abs(np.mean(z)) < 4 / np.sqrt(30)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_the_sample_grows_until_its_error_is_small_enough(group_outcomes):
    idata, model = group_draws(group_outcomes), groups(group_outcomes)
    settings = {"compile_kwargs": FAST, "n_rows": 100}
    small = loo(idata, model, target_error=1e6, **settings)
    assert small["subsample_size"] == 100
    goal = small["subsampling_se"] / 2
    grown = loo(idata, model, target_error=goal, **settings)
    assert 100 < grown["subsample_size"] < 3000
    assert grown["subsampling_se"] <= goal
    with pytest.warns(UserWarning, match="with 20 sampled rows.*Raise max_rows"):
        loo(idata, model, target_error=0.01, n_rows=20, max_rows=20, compile_kwargs=FAST)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # ArviZ 0.23 beside pandas 3
def test_arviz_compares_two_estimates():
    better = loo(regression_draws(), regression(X, Y), n_rows=300, compile_kwargs=FAST)
    off = regression_draws()
    off.posterior["beta"] = off.posterior["beta"] + 0.1
    worse = loo(off, regression(X, Y), n_rows=300, compile_kwargs=FAST)
    table = az.compare({"worse": worse, "better": better})
    assert list(table.index) == ["better", "worse"]
    assert table["weight"]["better"] > 0.9
    # each row of D predictors loses 0.1² D / 2 on average
    assert abs(table["elpd_diff"]["worse"]) == pytest.approx(0.005 * D * N, rel=0.2)
    assert 0 < table["dse"]["worse"] < 60


def test_without_pointwise_nothing_is_stored_of_each_row():
    result = loo(
        regression_draws(), regression(X, Y), n_rows=300, pointwise=False, compile_kwargs=FAST
    )
    stored = [getattr(result, name, None) for name in ("elpd_i", "loo_i", "pareto_k")]
    assert stored == [None] * 3
    assert str(result).startswith("Computed from 1000")


@pytest.mark.parametrize(("n_rows", "stores"), [(1_000_000, True), (1_000_001, False)])
def test_of_more_than_a_million_rows_nothing_is_stored_of_each_by_default(n_rows, stores):
    y = np.random.default_rng(0).standard_normal(n_rows)
    with pm.Model() as model:
        mu = pm.Flat("mu")
        pm.Normal("likelihood", mu, 1.0, observed=y)
    draws = np.random.default_rng(1).normal(y.mean(), n_rows**-0.5, (2, 100))
    result = loo(idata_of(mu=draws), model, n_rows=300, reff=1.0, compile_kwargs=FAST)
    stored = [getattr(result, name, None) for name in ("elpd_i", "loo_i", "pareto_k")]
    assert any(values is not None for values in stored) == stores


def test_a_loader_is_read_once():
    class Counted(ArrayLoader):
        n_rows_read = 0

        def _blocks(self, numbers):
            for block in super()._blocks(numbers):
                Counted.n_rows_read += len(block["y"])
                yield block

    few = regression(X[:FEW], Y[:FEW])
    loader = Counted({"X": X, "y": Y}, block_rows=1000)
    step = SGHMC(model=few, data=loader, **SETTINGS)
    Counted.n_rows_read = 0
    loo(regression_draws(), step, n_rows=300, compile_kwargs=FAST)
    assert Counted.n_rows_read == 1000 + N  # a block that tells types, and the pass


def test_draws_count_by_their_weight():
    good = regression_draws()
    values = good.posterior["beta"].values
    bad = np.concatenate([values + 1, values], axis=1)  # as of chains that explore
    weight = np.repeat([0.0, 2.0], 250)
    stats = {
        "configurational_temperature": 1.0,
        "target_temperature": np.repeat([np.nan, 1.0], 250),
        "draw_weight": weight,
    }
    settings = {"n_rows": 300, "compile_kwargs": FAST, "reff": 1.0}
    ours = loo(idata_of(stats, beta=bad), regression(X, Y), **settings)
    expected = loo(good, regression(X, Y), **settings)
    assert elpd_of(ours) == pytest.approx(elpd_of(expected), rel=1e-9)


@pytest.mark.filterwarnings("ignore:.*leaves k to other steps")
def test_one_of_several_likelihoods_is_chosen_by_its_name():
    """Its rows may come by data=, or be the model's own."""
    with pm.Model() as few:
        mu = pm.Normal("mu")
        k = pm.Poisson("k", 2.0)
        pm.Normal("a", mu + k, 1, observed=pm.Data("a_data", Y[:FEW]))
        pm.Normal("b", mu, 2, observed=Y[:50])
    draws = np.random.default_rng(5)
    idata = idata_of(
        mu=0.1 * draws.standard_normal((4, 100)), k=draws.integers(0, 2, size=(4, 100))
    )
    with pytest.raises(TypeError, match=r"observes 'a', 'b'\. Name one by var_name"):
        loo(idata, few)
    with pytest.raises(TypeError, match=r"var_name='c'\): the model has no such"):
        loo(idata, few, var_name="c")
    step = SGHMC([few["mu"]], model=few, data={"a_data": Y}, **SETTINGS)
    a = loo(idata, step, var_name="a", n_rows=200, target_error=1e6, compile_kwargs=FAST)
    b = loo(idata, step, var_name="b", compile_kwargs=FAST)
    assert (a["n_data_points"], b["n_data_points"]) == (N, 50)


def test_what_can_not_be_left_out_row_by_row_is_refused():
    draws = idata_of(s=np.exp(0.1 * rng.standard_normal((2, 100))))
    with pm.Model() as walk:
        s = pm.HalfNormal("s")
        pm.GaussianRandomWalk("y", sigma=s, init_dist=pm.Normal.dist(), observed=Y[:30])
    with pm.Model() as joint:
        s = pm.HalfNormal("s")
        pm.MvNormal("y", s * np.ones(30), np.eye(30), observed=Y[:30])
    for model in (walk, joint):
        with pytest.raises(ValueError, match="'y' isn't a sum of log-likelihoods of independent"):
            loo(draws, model)
    with pm.Model() as potential:
        s = pm.HalfNormal("s")
        pm.Potential("p", -s)
    with pytest.raises(ValueError, match="no observed variable"):
        loo(draws, potential)
    with pm.Model() as support:
        s = pm.HalfNormal("s")
        pm.Uniform("y", 0, s, observed=np.linspace(0.1, 0.9, 30))
    with pytest.raises(ValueError, match=r"of 30 sampled rows.*isn't finite at some draw"):
        loo(draws, support)


def test_runs_that_are_not_of_these_rows_are_refused():
    few = regression(X[:FEW], Y[:FEW])
    step = SGHMC(model=few, data={"X": X, "y": Y}, **SETTINGS)
    idata = regression_draws(stats={"data_rows": N})
    with pytest.raises(ValueError, match=r"20,000 rows, and the model holds 6.*loo\(idata, step\)"):
        loo(idata, few)
    with pytest.raises(
        ValueError, match="loo: this run was made with 7 rows, and there are 20,000 now"
    ):
        loo(regression_draws(stats={"data_rows": 7}), step)
    other = regression_draws(stats={"data_rows": N, "data_mark": Y.sum() + 2 * np.abs(Y).sum() + 1})
    with pytest.raises(ValueError, match=r"loo: this run was made with other data.*as many rows"):
        loo(other, step)
    with pytest.raises(ValueError, match="loo: this step is a copy"):
        loo(idata, copy.deepcopy(step))
    with pytest.raises(ValueError, match=r"loo: idata\.posterior has no draws of 'beta'"):
        loo(idata_of(other=np.zeros((2, 100))), step)
    with pytest.raises(ValueError, match=r"loo: all draws of 'beta' are NaN.*recover_effects"):
        loo(idata_of(beta=np.full((2, 100, D), np.nan)), step)
    stats = {"configurational_temperature": 1, "target_temperature": 0.5, "draw_weight": 1}
    with pytest.raises(ValueError, match=r"temperature 0\.5"):
        loo(regression_draws(stats=stats), step)
    with pytest.raises(ValueError, match="target_error=0"):
        loo(idata, step, target_error=0)
    with pytest.raises(ValueError, match=r"40 of 40 draws that were chosen are finite.*100"):
        loo(regression_draws(10), step)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")  # noisy from so few draws
def test_a_run_from_start_to_end():
    with regression(X[:FEW], Y[:FEW]):
        step = SGHMC(data={"X": X, "y": Y}, compile_kwargs=FAST)
        idata = pm.sample(100, tune=100, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    result = loo(idata, step, n_rows=1000, compile_kwargs=FAST)
    # 200 draws that aren't independent: a mean that is off by one standard deviation costs D/2
    assert abs(elpd_of(result) - exact_elpd()) < 4 * result["subsampling_se"] + D


@pytest.mark.filterwarnings("ignore:.*via `idata_kwargs` is deprecated:FutureWarning")
def test_log_likelihoods_of_stand_in_rows_are_named_at_the_end_of_a_run(caplog):
    settings = {"draws": 100, "tune": 20, "chains": 1, "cores": 1, "progressbar": False}
    settings |= {"random_seed": 1, "idata_kwargs": {"log_likelihood": True}}
    texts = []
    for few, given in ((FEW, {"X": X, "y": Y}), (N, None)):
        caplog.clear()
        with regression(X[:few], Y[:few]):
            step = SGHMC(data=given, **SETTINGS)
            idata = pm.sample(step=step, **settings)
        assert idata.log_likelihood["likelihood"].shape[2] == few
        messages = [record.message for record in caplog.records]
        texts.append([text for text in messages if "in the result are those of" in text])
    [[text], none] = texts
    assert not none
    assert "log-likelihoods of likelihood in the result are those of the 6 rows" in text
    assert "made with 20,000" in text
    assert "loo(idata, step)" in text
    assert "check_bias(idata, step)" in text
