"""Results of Bambi, whose intercept is shifted after sampling: never judged as they are."""

import numpy as np
import pandas as pd
import pytest

from pymc_sghmc.bambi_draws import pymc_model_and_draws
from pymc_sghmc.diagnostics import check_bias

bambi = pytest.importorskip("bambi", reason="Bambi isn't installed")

# Its own, with pandas 3
pytestmark = pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes")

N = 200
rng = np.random.default_rng(0)
DATA = pd.DataFrame({"x": rng.gamma(2, 20, N), "g": np.arange(N) % 4 > 1})
DATA["y"] = 1 + 0.3 * DATA["x"] + rng.standard_normal(N)


@pytest.fixture(scope="module", params=[True, False], ids=["centred", "as given"])
def fitted(request):
    model = bambi.Model("y ~ x", DATA, center_predictors=request.param)
    idata = model.fit(
        draws=250, tune=250, chains=2, cores=1, random_seed=1, progressbar=False,
        compute_convergence_checks=False,
    )  # fmt: skip
    return model, idata


def test_the_shift_of_the_intercept_is_undone_with_bambis_own_model(fitted):
    model, idata = fitted
    shifted = idata.posterior["Intercept"].mean()
    table = check_bias(idata, model, n_draws=100).table
    assert table["mean_shift"].abs().max() < 0.3
    assert idata.posterior["Intercept"].mean() == shifted  # the result itself is left alone


def test_shifted_draws_are_refused_with_the_pymc_model(fitted):
    model, idata = fitted
    if model.center_predictors:
        with pytest.raises(ValueError, match=r"Bambi.*own model.*center_predictors=False"):
            check_bias(idata, model.backend.model)
    else:
        table = check_bias(idata, model.backend.model, n_draws=100).table
        assert table["mean_shift"].abs().max() < 0.3


def test_other_results_and_models_are_left_alone(fitted):
    model, idata = fitted
    unmarked = idata.copy()
    unmarked["posterior"] = idata["posterior"].to_dataset().drop_attrs()
    assert pymc_model_and_draws(unmarked, model.backend.model, "f")[0] is unmarked
    # pm.sample in Bambi's PyMC model marks nothing, and shifts nothing
    assert pymc_model_and_draws(unmarked, model, "f") == (unmarked, model.backend.model)
    with pytest.raises(TypeError, match="must be the PyMC model"):
        check_bias(idata, "model")


def test_older_versions_that_cant_undo_it_are_named(fitted):
    model, idata = fitted

    class Older:
        backend = model.backend
        center_predictors = model.center_predictors

    if model.center_predictors:
        with pytest.raises(ValueError, match="center_predictors=False"):
            check_bias(idata, Older())
    else:
        assert pymc_model_and_draws(idata, Older(), "f") == (idata, model.backend.model)
