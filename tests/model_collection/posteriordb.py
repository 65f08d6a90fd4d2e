"""Twelve small posteriors of posteriordb: PyMC model of all rows, the reference's means and sds.

Parameters are on the scale of the model's text (sigma, not log sigma) and have posteriordb's names
and order: ``beta[1]`` is the first. In regressions with an intercept that is the model's variable
``intercept``, as in real.py, where four of the models come from; all other variables bear
posteriordb's names, but ``theta`` of eight_schools is a Deterministic of ``theta_trans``.

    posterior = load("sblrc", data)
    with posterior.model:
        idata = pm.sample()
    off = draws_of(idata, posterior).mean(axis=(0, 1)) - posterior.mean
"""

import json
import zipfile

from typing import NamedTuple

import numpy as np
import pymc as pm

from model_collection import real
from model_collection.real import json_of, linear_model


class Posterior(NamedTuple):
    name: str  # of NAMES
    model: pm.Model
    variables: tuple[str, ...]  # of the model; raveled and joined they are the parameters
    names: tuple[str, ...]  # of the parameters, (k,); there are as many unknowns
    mean: np.ndarray  # (k,)
    sd: np.ndarray  # (k,)
    error: np.ndarray  # Monte Carlo standard error of mean, (k,)
    condition: float  # number of the covariance of the unconstrained unknowns


def load(name, data):
    """Posterior ``name`` of `NAMES`; ``data`` is the folder that the fixture of that name gives."""
    full_name, build, variables = POSTERIORS[name]
    if name in CONDITION:
        params = json_of(data, "posteriordb/own_references")[full_name]["params"]
        error = np.array([param["mcse"] for param in params.values()])
        condition = CONDITION[name]
    else:
        facts = json_of(data, "posteriordb/reference_table")[full_name]
        assert facts["checks_all_true"]
        assert facts["model_text_checked"]
        params, condition = facts["params"], facts["unconstrained"]["cond_cov"]
        # The smallest of the parameters' effective sizes stands for all: 9,240 to 10,132 of 10,000.
        error = _column(params, "sd") / np.sqrt(facts["ess_bulk_min"])
    mean, sd = _column(params, "mean"), _column(params, "sd")
    variables = tuple(variables.split())
    return Posterior(name, build(data), variables, tuple(params), mean, sd, error, condition)


def draws_of(idata, posterior):
    """Draws of the reference's parameters in its order, (chain, draw, k)."""
    draws = [idata.posterior[variable].values for variable in posterior.variables]
    return np.concatenate([values.reshape(*values.shape[:2], -1) for values in draws], axis=-1)


def reference_draws(name, data):
    """The 10,000 draws of the reference, (10000, k), chain after chain; not of `CONDITION`'s."""
    full_name = POSTERIORS[name][0]
    params = json_of(data, "posteriordb/reference_table")[full_name]["params"]
    with zipfile.ZipFile(data / f"posteriordb/draws/{full_name}.json.zip") as archive:
        chains = json.loads(archive.read(f"{full_name}.json"))
    draws = np.concatenate([np.column_stack([chain[key] for key in params]) for chain in chains])
    np.testing.assert_allclose(draws.mean(axis=0), _column(params, "mean"), rtol=1e-5)
    return draws


def _column(params, key):
    return np.array([param[key] for param in params.values()])


def _table(data, name):
    """Data ``name`` with its lists as arrays."""
    table = json_of(data, f"posteriordb/data/{name}")
    return {key: np.array(value) for key, value in table.items()}


def ark(data):
    """Autoregression of order five, given the first five values: N = 195, d = 7."""
    y, order = _table(data, "arK")["y"], 5
    lags = np.column_stack([y[order - k : len(y) - k] for k in range(1, order + 1)])
    with pm.Model() as model:
        alpha, beta = pm.Normal("alpha", 0, 10), pm.Normal("beta", 0, 10, shape=order)
        sigma = pm.HalfCauchy("sigma", 2.5)
        pm.Normal("y", alpha + pm.math.dot(lags, beta), sigma, observed=y[order:])
    return model


def sblrc(data):
    """Linear, correlated columns of scale 100 or more, no intercept: N = 100, d = 6."""
    table = _table(data, "sblrc")
    with pm.Model() as model:
        beta, sigma = pm.Normal("beta", 0, 10, shape=5), pm.HalfNormal("sigma", 10)
        pm.Normal("y", pm.math.dot(table["X"], beta), sigma, observed=table["y"])
    return model


def eight_schools(data):
    """Effects of coaching in eight schools, non-centred: d = 10."""
    table = _table(data, "eight_schools")
    with pm.Model() as model:
        theta_trans = pm.Normal("theta_trans", 0, 1, shape=8)
        mu, tau = pm.Normal("mu", 0, 5), pm.HalfCauchy("tau", 5)
        theta = pm.Deterministic("theta", mu + tau * theta_trans)
        pm.Normal("y", theta, table["sigma"], observed=table["y"])
    return model


def gp_regr(data):
    """Gaussian process with squared exponential kernel; sigma is the noise's variance. d = 3."""
    table = _table(data, "gp_pois_regr")
    squares = (table["x"][:, None] - table["x"]) ** 2.0
    with pm.Model() as model:
        rho = pm.Gamma("rho", alpha=25, beta=4)
        alpha, sigma = pm.HalfNormal("alpha", 2), pm.HalfNormal("sigma", 1)
        kernel = alpha**2 * pm.math.exp(-squares / (2 * rho**2))
        noise = sigma * np.eye(len(squares))
        pm.MvNormal("y", np.zeros(len(squares)), kernel + noise, observed=table["y"])
    return model


def kidscore_momiq(data):
    """Children's scores by their mothers' IQ, as it is: N = 434, d = 3."""
    table = _table(data, "kidiq")
    with pm.Model() as model:
        intercept, beta = pm.Flat("intercept"), pm.Flat("beta", shape=1)
        sigma = pm.HalfCauchy("sigma", 2.5)
        mu = intercept + beta * table["mom_iq"]
        pm.Normal("kid_score", mu, sigma, observed=table["kid_score"].astype(float))
    return model


def kidscore_interaction_z(data):
    """Children's scores by mothers' school, IQ and their product: flat, N = 434, d = 5."""
    table = _table(data, "kidiq_with_mom_work")
    h, q = (
        (table[key] - table[key].mean()) / (2 * table[key].std(ddof=1))
        for key in ("mom_hs", "mom_iq")
    )
    X = np.column_stack([h, q, h * q])
    return linear_model(X, table["kid_score"].astype(float), flat=True)


def logmesquite_logvolume(data):
    """Log weight of bushes by the log of their canopy's volume: flat, N = 46, d = 3."""
    table = _table(data, "mesquite")
    volume = table["diam1"] * table["diam2"] * table["canopy_height"]
    return linear_model(np.log(volume)[:, None], np.log(table["weight"]), flat=True)


def glm_poisson(data):
    """Counts of peregrines, a cubic in the year: N = 40, d = 4."""
    table = _table(data, "GLM_Poisson_Data")
    with pm.Model() as model:
        log_rate = pm.Uniform("alpha", -20, 20)
        for power in (1, 2, 3):
            log_rate += pm.Uniform(f"beta{power}", -10, 10) * table["year"] ** power
        pm.Poisson("C", pm.math.exp(log_rate), observed=table["C"])
    return model


def _of_real(name):
    return lambda data: getattr(real, name)(data).model


# Our name: posteriordb's, the model's builder, its variables in the order of the parameters.
POSTERIORS = {
    "arK": ("arK-arK", ark, "alpha beta sigma"),
    "sblrc": ("sblrc-blr", sblrc, "beta sigma"),
    "logearn_height": (
        "earnings-logearn_height",
        _of_real("logearn_height"),
        "intercept beta sigma",
    ),
    "logearn_interaction_z": (
        "earnings-logearn_interaction_z",
        _of_real("logearn_interaction_z"),
        "intercept beta sigma",
    ),
    "eight_schools": ("eight_schools-eight_schools_noncentered", eight_schools, "theta mu tau"),
    "gp_regr": ("gp_pois_regr-gp_regr", gp_regr, "rho alpha sigma"),
    "kidscore_momiq": ("kidiq-kidscore_momiq", kidscore_momiq, "intercept beta sigma"),
    "kidscore_interaction_z": (
        "kidiq_with_mom_work-kidscore_interaction_z",
        kidscore_interaction_z,
        "intercept beta sigma",
    ),
    "logmesquite_logvolume": (
        "mesquite-logmesquite_logvolume",
        logmesquite_logvolume,
        "intercept beta sigma",
    ),
    "nes2000": ("nes2000-nes", _of_real("nes2000"), "intercept beta sigma"),
    "wells": ("wells_data-wells_dist100ars_model", _of_real("wells"), "intercept beta"),
    "glm_poisson": (
        "GLM_Poisson_Data-GLM_Poisson_model",
        glm_poisson,
        "alpha beta1 beta2 beta3",
    ),
}
NAMES = tuple(POSTERIORS)
# The two whose reference is ours, without draws: condition numbers of 40,000 draws of NUTS, good to
# 2 % (wells by Laplace's approximation: 37.9; glm_poisson: on the logit scale of its uniform priors).
CONDITION = {"wells": 38.1, "glm_poisson": 104.5}
