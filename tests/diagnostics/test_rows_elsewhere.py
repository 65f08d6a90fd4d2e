"""Runs whose rows came by ``data=``: no check judges them by the few rows that the model holds."""

import copy

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from modes import FAST, QUIET

from pymc_sghmc import SGHMC, SGLD
from pymc_sghmc.diagnostics import check_bias
from pymc_sghmc.loaders import ArrayLoader

N, FEW = 400, 6
SETTINGS = {"batch_size": 50, "compile_kwargs": FAST, "learning_rate": 1e-4, "gradient": "plain"}
rng = np.random.default_rng(0)
X = rng.standard_normal((N, 2))
GROUP = np.arange(N) % 5
ROWS = {"X": X, "y": X @ [1.0, -1.0] + rng.standard_normal(N), "group": GROUP}


def regression(n):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1, shape=2)
        sigma = pm.HalfNormal("sigma")
        mu = pm.Data("X", X[:n]) @ beta
        pm.Normal("likelihood", mu, sigma, observed=pm.Data("y", ROWS["y"][:n]))
    return model


def groups(n):
    with pm.Model() as model:
        tau = pm.HalfNormal("tau")
        u = pm.Normal("u", 0, tau, shape=5)
        mu = u[pm.Data("group", GROUP[:n])]
        pm.Normal("likelihood", mu, 1, observed=pm.Data("y", ROWS["y"][:n]))
    return model


def threshold(n):
    with pm.Model() as model:
        cut = pm.Normal("cut")
        beta = pm.Normal("beta")
        x = pm.Data("X", X[:n])[:, 0]
        mu = pm.math.switch(x > cut, beta, -beta)
        pm.Normal("likelihood", mu, 1, observed=pm.Data("y", ROWS["y"][:n]))
    return model


def with_a_count(n):
    with pm.Model() as model:
        k = pm.Poisson("k", 2.0)
        mu = pm.Normal("mu")
        pm.Normal("likelihood", mu + k, 1, observed=pm.Data("y", ROWS["y"][:n]))
    return model


def data_of(model):
    return {variable.name: ROWS[variable.name] for variable in model.data_vars}


def draws_of(model, n_rows=N):
    """Draws that are none of the posterior, which a check has much to say about."""
    draws = {}
    for rv in model.free_RVs:
        values = rng.standard_normal((2, 40, *rv.shape.eval()))
        if rv.name in ("sigma", "tau"):
            values = np.exp(values)
        if rv.name == "k":
            values = rng.integers(0, 4, values.shape)
        draws[rv.name] = xr.DataArray(values, dims=("chain", "draw", *"abc"[: values.ndim - 2]))
    stats = xr.Dataset({"data_rows": (("chain", "draw"), np.full((2, 40), n_rows))})
    return xr.DataTree.from_dict({"posterior": xr.Dataset(draws), "sample_stats": stats})


@pytest.mark.parametrize(
    ("kind", "make", "settings"),
    [
        ("arrays", regression, {}),
        ("loader", regression, {}),
        ("arrays", groups, {}),
        ("loader", groups, {}),
        ("arrays", groups, {"marginalize": "u"}),
        ("arrays", threshold, {}),
        ("loader", threshold, {}),
        ("arrays", with_a_count, {}),
        ("loader", with_a_count, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(the log-density jumps|leaves k to other steps)")
def test_a_report_over_the_steps_rows_equals_that_of_the_whole_model(kind, make, settings):
    few = make(FEW)
    data = data_of(few)
    if kind == "loader":
        data = ArrayLoader(data, block_rows=30)
    step = SGHMC(model=few, data=data, **SETTINGS, **settings)
    idata = draws_of(few)
    ours = check_bias(idata, step, n_draws=20, compile_kwargs=FAST)
    expected = check_bias(idata, make(N), n_draws=20, compile_kwargs=FAST)
    np.testing.assert_allclose(ours.draws["gradient"], expected.draws["gradient"], rtol=1e-9)
    np.testing.assert_allclose(ours.table, expected.table, rtol=1e-6)
    assert ours.jumping == expected.jumping == (["cut"] if make is threshold else [])


def test_stand_in_rows_are_not_judged():
    model = regression(FEW)
    idata = draws_of(model)
    with pytest.raises(ValueError, match=r"made with 400 rows, and the model holds 6\. After"):
        check_bias(idata, model)
    with model:
        pm.set_data(data_of(model))
    check_bias(idata, model, n_draws=20, compile_kwargs=FAST)
    check_bias(
        draws_of(model, 0), regression(FEW), n_draws=20, compile_kwargs=FAST
    )  # exact gradients
    with model:
        pm.set_data({"X": X[:9], "y": ROWS["y"][:9]})  # as for predictions
    with pytest.raises(ValueError, match=r"the model holds 9.*pm\.set_data"):
        check_bias(idata, model)


def test_a_step_with_other_rows_does_not_judge():
    model = regression(FEW)
    step = SGHMC(model=model, data=data_of(model), **SETTINGS)
    with pytest.raises(ValueError, match=r"check_bias: this run was made with 300 .* are 400 now"):
        check_bias(draws_of(model, 300), step)


def test_a_run_says_how_many_rows_it_read():
    data = data_of(regression(FEW))
    cases = [
        (FEW, {"data": data}, N),
        (FEW, {"data": ArrayLoader(data, block_rows=30)}, N),
        (N, {}, N),
        (N, {"batch_size": None}, 0),
    ]
    for n, settings, expected in cases:
        with regression(n):
            step = SGLD(**{**SETTINGS, **settings})
            idata = pm.sample(3, tune=2, chains=2, cores=1, step=step, random_seed=1, **QUIET)
        assert (idata.sample_stats["data_rows"] == expected).all()
        assert idata.sample_stats["data_rows"].dtype == int


def short_run(model, cores, **settings):
    with model:
        step = SGLD(**{**SETTINGS, **settings})
        draws = pm.sample(12, tune=2, chains=2, cores=cores, step=step, random_seed=1, **QUIET)
    return step, draws


POOLED = {"pool": 200, "gradient": "auto"}
SOURCES = {
    "model": (N, {}),
    "arrays": (FEW, {"data": {"X": X, "y": ROWS["y"]}}),
    "pool": (FEW, {"data": ArrayLoader({"X": X, "y": ROWS["y"]}, block_rows=30), **POOLED}),
    "backwards": (FEW, {"data": {"X": X[::-1], "y": ROWS["y"][::-1]}}),
}


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("kind", ["model", "arrays", "pool", "backwards"])
def test_runs_on_the_same_data_are_told_from_those_on_other_data_of_as_many_rows(kind, cores):
    n, settings = SOURCES[kind]
    _, idata = short_run(regression(n), cores=cores, **settings)
    assert np.ptp(idata.sample_stats["data_mark"].values) == 0
    others = {"X": X, "y": ROWS["y"] + 0.1}
    for n_held, given in SOURCES.values():
        step = SGLD(model=regression(n_held), **{**SETTINGS, **given})
        check_bias(idata, step, n_draws=20, compile_kwargs=FAST)
    with pytest.raises(ValueError, match="made with other data, which have as many rows"):
        check_bias(idata, SGLD(model=regression(FEW), data=others, **SETTINGS))
    loader = ArrayLoader(others, block_rows=30)
    pooled = SGLD(model=regression(FEW), data=loader, **{**SETTINGS, **POOLED})
    with pytest.raises(ValueError, match="made with other data, which have as many rows"):
        check_bias(idata, pooled)
    model = regression(N)
    check_bias(idata, model, n_draws=20, compile_kwargs=FAST)
    with model:
        pm.set_data(others)
    with pytest.raises(
        ValueError, match=r"made with other data than the model holds now.*set_data"
    ):
        check_bias(idata, model)


def test_a_run_after_set_data_has_the_mark_of_the_new_data():
    model = regression(N)
    step, before = short_run(model, cores=1)
    with model:
        pm.set_data({"y": ROWS["y"] + 0.1})
        after = pm.sample(12, tune=2, chains=2, cores=1, step=step, random_seed=1, **QUIET)
    check_bias(after, step, n_draws=20, compile_kwargs=FAST)
    with pytest.raises(ValueError, match="other data than the model holds now"):
        check_bias(before, step)


def test_a_loader_is_read_once_for_all_draws():
    class Counted(ArrayLoader):
        n_passes = 0

        def __iter__(self):
            return self.blocks(np.random.default_rng(0))

        def blocks(self, rng):
            Counted.n_passes += 1
            return super().blocks(rng)

    model = regression(FEW)
    step = SGHMC(model=model, data=Counted({"X": X, "y": ROWS["y"]}, block_rows=30), **SETTINGS)
    Counted.n_passes = 0
    check_bias(draws_of(model), step, n_draws=40, compile_kwargs=FAST)
    # the first block, the pilot, and the pass
    assert Counted.n_passes == 3


def test_a_step_without_data_stands_for_its_model_and_several_steps_for_one():
    model = regression(N)
    idata = draws_of(model, 0)
    steps = SGHMC(model=model, **SETTINGS), SGHMC(model=model, blocked=False, **SETTINGS)
    reports = [check_bias(idata, x, n_draws=20, compile_kwargs=FAST).table for x in (model, *steps)]
    for report in reports[1:]:
        np.testing.assert_array_equal(report, reports[0])


def test_a_step_whose_model_was_given_other_rows_judges_no_run():
    """As for predictions: its model's rows aren't those of the run any more."""
    with pm.Model():
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("y", mu + pm.Data("x", np.zeros(50)), 1.0, observed=pm.Data("data", np.ones(50)))
        step = SGHMC(batch_size=10, compile_kwargs=FAST)
        idata = pm.sample(20, tune=20, chains=1, step=step, random_seed=1, **QUIET)
        check_bias(idata, step)
        pm.set_data({"x": np.zeros(7), "data": np.zeros(7)})
    with pytest.raises(ValueError, match="made with 50 rows, and the model holds 7"):
        check_bias(idata, step)


def test_a_copy_of_a_step_has_no_model():
    model = regression(FEW)
    step = copy.deepcopy(SGHMC(model=model, data=data_of(model), **SETTINGS))
    with pytest.raises(ValueError, match="this step is a copy, without its model"):
        check_bias(draws_of(model), step)


def test_the_log_names_what_sees_the_models_rows_only(caplog):
    model = regression(FEW)
    with caplog.at_level("INFO", "pymc.sghmc"):
        SGHMC(data=data_of(model), model=model, **SETTINGS)
        SGHMC(model=regression(N), **SETTINGS)
    [text] = [record.message for record in caplog.records if "data= has" in record.message]
    assert "400 rows" in text
    assert "check_bias(idata, step)" in text
