"""Predictions in blocks: the same as PyMC's own of all rows, in a store that xarray opens."""

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from modes import FAST, QUIET

from pymc_sghmc import SGHMC, predict_in_blocks
from pymc_sghmc.compat import inference_data
from pymc_sghmc.loaders import ArrayLoader
from pymc_sghmc.predictions.store import PredictionStore

zarr = pytest.importorskip("zarr")
rng = np.random.default_rng(0)
X = rng.standard_normal((103, 2))
SHOP = rng.integers(0, 3, 103)
NEW = {"X": X, "shop": SHOP}
OPTIONS = {"progressbar": False, "compile_kwargs": FAST, "block_rows": 25, "n_draws": 12}


def predicted(*args, **kwargs):
    """Predict, and open the store: xarray 2025 and later need zarr 3 for that, tests have zarr 2."""
    path = predict_in_blocks(*args, **kwargs)
    if not zarr.__version__.startswith("2."):
        return xr.open_zarr(path).load()
    group = zarr.open_group(str(path), mode="r")
    variables = {
        name: (array.attrs["_ARRAY_DIMENSIONS"], array[...]) for name, array in group.arrays()
    }
    return xr.Dataset(variables, attrs=dict(group.attrs))


def sales(n=5, shops=3):
    with pm.Model(coords={"of_x": ["a", "b"], "shop_name": range(shops)}) as model:
        x = pm.Data("X", X[:n], dims=(None, "of_x"))
        shop = pm.Data("shop", np.zeros(n, int))
        tau = pm.HalfNormal("tau")
        u = pm.Normal("u", 0, tau, dims="shop_name")
        beta = pm.Normal("beta", dims="of_x")
        mu = pm.Deterministic("mu", x @ beta + u[shop])
        pm.Deterministic("both", pm.math.stack([mu, -mu], axis=1), dims=(None, "of_x"))
        outcome = pm.Data("y_data", np.zeros(n))
        pm.Normal("y", mu, 0.1, observed=outcome, shape=x.shape[0])
    return model


def draws(names=("tau", "u", "beta")):
    shapes = {"tau": (), "u": (3,), "beta": (2,)}
    dims = {"tau": (), "u": ("shop_name",), "beta": ("of_x",)}
    values = np.random.default_rng(1)
    posterior = {
        name: (("chain", "draw", *dims[name]), np.exp(values.standard_normal((2, 30, *shape))))
        for name, shape in shapes.items()
    }
    return inference_data({"posterior": xr.Dataset({name: posterior[name] for name in names})})


def expected_mu(idata):
    at = [2, 7, 12, 17, 22, 27]  # six of thirty, evenly
    posterior = idata.posterior.isel(draw=at)
    beta, u = posterior["beta"].values, posterior["u"].values
    return beta @ X.T + u[..., SHOP]


@pytest.mark.parametrize("kind", ["arrays", "loader", "step"])
def test_predictions_are_those_of_the_draws_at_the_rows(kind, tmp_path):
    idata, model, data = draws(), sales(), dict(NEW)
    if kind == "loader":
        data = ArrayLoader(data, block_rows=9)
    of = model
    if kind == "step":
        settings = {"learning_rate": 1e-4, "gradient": "plain", "compile_kwargs": FAST}
        of = SGHMC(model=model, batch_size=5, **settings)
    path = tmp_path / "store.zarr"
    names = ["mu", "both", "y"]
    result = predicted(idata, of, data, path, var_names=names, random_seed=1, **OPTIONS)
    mu = expected_mu(idata)
    assert result["mu"].dims == ("chain", "draw", "row")
    assert dict(result.sizes) == {"chain": 2, "draw": 6, "row": 103, "of_x": 2}
    np.testing.assert_allclose(result["mu"], mu, rtol=1e-6)
    np.testing.assert_allclose(result["both"].sel(of_x="b"), -mu, rtol=1e-6)
    z = (result["y"].values - mu) / 0.1  # 1,236 standard normal numbers
    assert abs(z.mean()) < 4 / np.sqrt(z.size)
    assert abs(z.std() - 1) < 4 / np.sqrt(2 * z.size)
    assert len(np.unique(z)) == z.size  # no block repeats the numbers of another
    assert sorted(file.name for file in (path / "y").iterdir() if file.name[0] != ".") == [
        "0.0.0", "0.0.1", "0.0.2", "0.0.3", "0.0.4",
    ]  # fmt: skip
    assert model["X"].get_value().shape == (5, 2)  # as it was


def test_an_interrupted_store_is_completed_and_the_seed_decides(tmp_path, monkeypatch):
    idata = draws()
    names = {"var_names": ["mu", "y"], "random_seed": 3}
    whole = predicted(idata, sales(), NEW, tmp_path / "a", **names, **OPTIONS)
    written = []
    write = PredictionStore.write

    def stops(self, number, values):
        written.append(number)
        if number == 2:
            raise KeyboardInterrupt
        write(self, number, values)

    model = sales()
    with monkeypatch.context() as patch:
        patch.setattr(PredictionStore, "write", stops)
        with pytest.raises(KeyboardInterrupt):
            predict_in_blocks(idata, model, NEW, tmp_path / "b", **names, **OPTIONS)
    assert model["X"].get_value().shape == (5, 2)
    for _ in range(2):
        rest = predicted(idata, sales(), NEW, tmp_path / "b", **names, **OPTIONS)
        xr.testing.assert_identical(rest, whole)
    for other_rows in ({**NEW, "X": X + 1.0}, ArrayLoader({**NEW, "shop": SHOP[::-1].copy()})):
        with pytest.raises(ValueError, match="holds something else than these predictions"):
            predict_in_blocks(idata, sales(), other_rows, tmp_path / "b", **names, **OPTIONS)
    names["random_seed"] = 4
    with pytest.raises(ValueError, match="holds something else than these predictions"):
        predict_in_blocks(idata, sales(), NEW, tmp_path / "b", **names, **OPTIONS)
    other = predicted(idata, sales(), NEW, tmp_path / "c", **names, **OPTIONS)
    assert not np.isclose(other["y"], whole["y"]).any()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        predict_in_blocks(idata, sales(), NEW, tmp_path / "d", **names, **OPTIONS)


def test_effects_without_draws_come_from_their_prior(tmp_path):
    idata = draws(names=("tau", "beta"))
    options = {**OPTIONS, "n_draws": 60}
    new = {"X": np.zeros((400, 2)), "shop": np.arange(400) % 200}
    result = predicted(
        idata, sales(shops=200), new, tmp_path / "new", var_names="mu", random_seed=1, **options
    )
    tau = idata.posterior["tau"].values
    u = result["mu"].values[..., :200] / tau[..., None]  # row i is of group i
    np.testing.assert_array_equal(result["mu"][..., :200], result["mu"][..., 200:])
    assert len(np.unique(u)) == u.size
    assert abs(u.std() - 1) < 4 / np.sqrt(2 * u.size)
    with pytest.raises(ValueError, match=r"'u' have shape \(3,\).*leave its draws out"):
        predict_in_blocks(draws(), sales(shops=200), new, tmp_path / "not", **options)


def test_what_has_no_rows_is_refused(tmp_path):
    path = tmp_path / "none"
    with pytest.raises(ValueError, match=r"'beta' has no entry for each row"):
        predict_in_blocks(draws(), sales(), NEW, path, var_names=["mu", "beta"], **OPTIONS)
    with pytest.raises(ValueError, match=r"var_names=\['nothing'\]"):
        predict_in_blocks(draws(), sales(), NEW, path, var_names=["nothing"], **OPTIONS)
    empty = inference_data({"posterior": xr.Dataset({"z": (("chain", "draw"), [[0.0]])})})
    with pytest.raises(ValueError, match="has no draws"):
        predict_in_blocks(empty, sales(), NEW, path, **OPTIONS)
    assert not path.exists()


@pytest.mark.parametrize("n", [5, 103])  # as many rows as the model holds, or more
def test_containers_without_rows_are_named(n, tmp_path):
    path = tmp_path / "none"
    for given, missing in (("X", "shop"), ("shop", "X")):
        with pytest.raises(ValueError, match=f"no rows of '{missing}', on which .* 'y' depend"):
            predict_in_blocks(draws(), sales(), {given: NEW[given][:n]}, path, **OPTIONS)
    with sales() as model:
        pm.Deterministic("double", 2 * model["X"])
    with pytest.raises(ValueError, match=r"no rows of 'X', on which .* 'double' depend"):
        predict_in_blocks(draws(), model, {"shop": SHOP}, path, var_names="double", **OPTIONS)
    assert not path.exists()


def test_a_table_of_groups_needs_no_rows(tmp_path):
    with sales(n=3) as model:  # as many rows as groups
        sizes = pm.Data("sizes", np.arange(3.0))
        pm.Deterministic("size", sizes[model["shop"]])
    result = predicted(draws(), model, NEW, tmp_path / "size", var_names="size", **OPTIONS)
    np.testing.assert_array_equal(result["size"][0, 0], SHOP)


def test_draws_of_a_run_predict(tmp_path):
    with sales(100) as model:
        pm.set_data({"shop": SHOP[:100], "y_data": X[:100].sum(1)})
        step = SGHMC(batch_size=50, compile_kwargs=FAST)
        idata = pm.sample(
            30, tune=60, chains=2, cores=1, step=step, random_seed=1,
            var_names=["tau", "u", "beta"], **QUIET,
        )  # fmt: skip
    result = predicted(idata, model, NEW, tmp_path / "run", random_seed=2, **OPTIONS)
    error = result["y"].mean(("chain", "draw")).values - X.sum(1)
    # 12 draws: noise of 0.1/√12, and of the parameters less than that
    assert np.sqrt(np.mean(error**2)) < 4 * 0.1 / np.sqrt(12)
