"""Real posteriors with a reference: data, PyMC model, and the reference's means and sds.

All vectors are in the unconstrained space, in the order of the raveled value variables: intercept,
coefficients, log sigma. ``LARGE`` names the loaders of all that have 1,000 rows or more.
"""

import gzip
import json
import zipfile

from typing import NamedTuple

import numpy as np
import pymc as pm

from scipy.special import expit

# Effective draws for a standard deviation, per draw, of the references that NUTS has sampled. The
# draws alternate around the mean, which makes their effective number for means up to 2.8 times
# their number, and says nothing on squares: those of mnist79, kept one after the other, have a
# lag-one correlation of .48 and .35 effective draws per draw. That third gives errors of 1.2 % for
# a9a, bike_hour and htru2 and 2.2 % for mnist79; the quotients of sds by Laplace's scatter by 1.2,
# .8, 1.0 and 2.5 %.
NUTS_EFFICIENCY = 1 / 3


class Reference(NamedTuple):
    model: pm.Model
    mean: np.ndarray  # of the posterior, (d,)
    sd: np.ndarray  # (d,)
    error: np.ndarray  # standard error of mean, (d,)
    sd_error: float  # relative standard error of sd, 1/√(2 ESS) of the squares; 0 where exact
    covariance: np.ndarray | None  # (d, d), where the reference has it
    mode: np.ndarray | None = None  # Laplace's approximation from the data: mode, (d,) ...
    laplace: np.ndarray | None = None  # ... and covariance, (d, d); some references do without
    fisher: np.ndarray | None = None  # empirical Fisher information Σ_i g_i g_iᵀ at the mode


def linear_model(X, y, flat=False):
    with pm.Model() as model:
        mu = _predictor(X, None if flat else (np.zeros(X.shape[1] + 1), np.ones(X.shape[1] + 1)))
        sigma = pm.HalfFlat("sigma") if flat else pm.HalfNormal("sigma", 1)
        pm.Normal("y", mu, sigma, observed=y)
    return model


def logistic_model(X, y, prior=None):
    """``prior``: means and sds of intercept and coefficients; None is flat."""
    with pm.Model() as model:
        pm.Bernoulli("y", logit_p=_predictor(X, prior), observed=y)
    return model


def poisson_model(X, y, prior=None):
    with pm.Model() as model:
        pm.Poisson("y", pm.math.exp(_predictor(X, prior)), observed=y)
    return model


def _predictor(X, prior):
    if prior is None:
        intercept, beta = pm.Flat("intercept"), pm.Flat("beta", shape=X.shape[1])
    else:
        mean, sd = prior
        intercept = pm.Normal("intercept", mean[0], sd[0])
        beta = pm.Normal("beta", mean[1:], sd[1:])
    return intercept + pm.math.dot(X, beta)


def wells_data(data):
    table = json_of(data, "posteriordb/data/wells_data")
    X = np.column_stack([np.array(table["dist"]) / 100, table["arsenic"]])
    return X, np.array(table["switched"])


def wells(data):
    """Who changes to a safe well: logistic, flat priors, N = 3,020, d = 3."""
    X, y = wells_data(data)
    assert len(y) == 3020
    own = json_of(data, "posteriordb/own_references")["wells_data-wells_dist100ars_model"]
    assert own["sampler"].startswith("NumPyro NUTS dense mass, 4x5000 ")
    mean, sd, error = (
        np.array([own["params"][name][key] for name in ("alpha", "beta[1]", "beta[2]")])
        for key in ("mean", "sd", "mcse")
    )
    model = logistic_model(X, y)
    sd_error = (2 * NUTS_EFFICIENCY * 20_000) ** -0.5
    return Reference(model, mean, sd, error, sd_error, None, *_logistic_laplace(X, y, np.zeros(3)))


def htru2(data):
    """Pulsars: logistic, intercept ~ N(0, 5), coefficients ~ N(0, 1), N = 14,319, d = 9."""
    X, y, facts = _training_rows(data, "htru2")
    X = _standardised(X, list(range(8)), facts)
    laplace = _logistic_laplace(X, y, np.array([5.0] + 8 * [1.0]) ** -2)
    return _sampled(data, "htru2", logistic_model, X, y, facts, laplace)


def a9a(data):
    """Who earns more than $50,000: logistic, 0/1 predictors, N = 32,561, d = 124."""
    facts = json_of(data, "references/a9a")
    assert facts["prep"] == "0/1 features as they are; official test set"
    table = arrays_of(data, "uci/a9a")
    return _sampled(data, "a9a", logistic_model, table["X"].astype(float), table["y"], facts)


def mnist79(data):
    """Handwritten 7 or 9: logistic, pixels/255, 184 of them always 0, N = 12,214, d = 785."""
    facts = json_of(data, "references/mnist79")
    assert facts["prep"] == (
        "pixels/255, no standardisation; y=1 for digit 9; official MNIST train/test 7s and 9s in "
        "file order"
    )
    images = idx_of(data / "mnist/train-images-idx3-ubyte.gz")
    digits = idx_of(data / "mnist/train-labels-idx1-ubyte.gz")
    ours = (digits == 7) | (digits == 9)
    X, y = images[ours].reshape(-1, 28 * 28) / 255, (digits[ours] == 9).astype("uint8")
    assert y.sum() == 5949
    return _sampled(data, "mnist79", logistic_model, X, y, facts)


def bike_hour(data):
    """Rented bikes in an hour: Poisson, overdispersed, N = 13,904, d = 37."""
    X, y, facts = _training_rows(data, "bike_hour")
    X = _standardised(X, [0, 1, 2, 3], facts)
    return _sampled(data, "bike_hour", poisson_model, X, y, facts)


def power_plant(data):
    """Combined cycle power plant: linear, unknown sigma, N = 7,655, d = 6."""
    return _linear(data, "uci_power-plant", laplace=True)


def flights(data):
    """Delays of flights: linear, unknown sigma, errors of kurtosis 104, N = 160,000, d = 4."""
    return _linear(data, "flights_200k", laplace=True)


def california_housing(data):
    """House values: linear, five dummies that add up to the intercept, N = 16,347, d = 15."""
    return _linear(data, "california_housing")


def logearn_height(data):
    """Log earnings by height in inches, as it is: linear, flat priors, N = 1,192, d = 3."""
    height, _, log_earn = _earnings(data)
    text = "log(earn) ~ Normal(beta1 + beta2*height, sigma)"
    return _posteriordb(data, "earnings-logearn_height", text, [height], log_earn)


def logearn_interaction_z(data):
    """Log earnings by height, sex and their product: linear, flat priors, N = 1,192, d = 5."""
    height, male, log_earn = _earnings(data)
    z = (height - height.mean()) / height.std(ddof=1)
    text = (
        "z=(height-mean)/sd (ddof 1); "
        "log(earn) ~ Normal(beta1 + beta2*z + beta3*male + beta4*z*male, sigma)"
    )
    columns = [z, male, z * male]
    return _posteriordb(data, "earnings-logearn_interaction_z", text, columns, log_earn)


def nes2000(data):
    """Party of voters in 2000: linear, flat priors. Not large: N = 476, d = 10."""
    table = json_of(data, "posteriordb/data/nes2000")
    text = (
        "partyid7 ~ Normal(beta . [1, real_ideo, race_adj, age_discrete==2, age_discrete==3, "
        "age_discrete==4, educ1, gender, income], sigma)"
    )
    age = np.array(table["age_discrete"])
    columns = [table["real_ideo"], table["race_adj"], age == 2, age == 3, age == 4]
    columns += [table["educ1"], table["gender"], table["income"]]
    return _posteriordb(data, "nes2000-nes", text, columns, np.array(table["partyid7"], float))


LARGE = (a9a, htru2, mnist79, bike_hour, power_plant, california_housing, flights)
LARGE += (logearn_height, logearn_interaction_z, wells)


def _sampled(data, name, likelihood, X, y, facts, laplace=()):
    """Reference by NUTS, for one predictor and a likelihood without other unknowns."""
    assert facts["prior"] == "intercept ~ N(0,5.0), every coefficient ~ N(0,1.0) (sd)"
    assert (len(y), X.shape[1] + 1) == (facts["N_train"], facts["d"])
    prior = np.zeros(facts["d"]), np.array([5.0] + [1.0] * X.shape[1])
    moments = arrays_of(data, f"references/{name}")
    mean, sd, error, cov = (moments[key] for key in ("mean", "sd", "mcse", "cov"))
    sd_error = (2 * NUTS_EFFICIENCY * facts["draws_total"]) ** -0.5
    return Reference(likelihood(X, y, prior), mean, sd, error, sd_error, cov, *laplace)


def _linear(data, name, laplace=False):
    X, y, facts = _training_rows(data, name)
    assert facts["prior"] == (
        "X and y standardised by training mean/sd; intercept and coefficients ~ N(0,1), "
        "sigma ~ HalfNormal(1)"
    )
    np.testing.assert_allclose([y.mean(), y.std()], facts["y_scale"], rtol=1e-12)
    X = _standardised(X, "all X columns and y", facts)
    y = (y - y.mean()) / y.std()
    # Exact mean and sd of sigma; those of log sigma by the delta method, whose relative error is
    # of the order of the squared coefficient of variation (under 1e-4 here), where the variance of
    # the 2,000 reference draws of sigma has an error of 3 %.
    moments = arrays_of(data, f"references/{name}")
    mean, sd = moments["mean"], moments["sd"]
    assert mean.size == facts["d"]
    cv = sd[-1] / mean[-1]
    mean[-1], sd[-1] = np.log(mean[-1]) - cv**2 / 2, cv
    covariance = np.diag(sd**2)
    covariance[:-1, :-1] = moments["cov_beta"]  # and no correlation with log sigma
    approximation = _linear_laplace(X, y) if laplace else ()
    error = np.zeros(sd.size)
    return Reference(linear_model(X, y), mean, sd, error, 0.0, covariance, *approximation)


def _posteriordb(data, name, text, columns, y):
    """Linear with flat priors: moments of 10,000 draws, thinned by their makers to independence."""
    described = json_of(data, "posteriordb/models")["reference"][name]
    assert described["lik"] == text
    assert described["prior"].startswith("flat (improper) on every coefficient and on sigma>0")
    facts = json_of(data, "posteriordb/reference_table")[name]
    assert len(y) == facts["N"]
    assert facts["ess_bulk_min"] > 9000
    with zipfile.ZipFile(data / f"posteriordb/draws/{name}.json.zip") as archive:
        chains = json.loads(archive.read(f"{name}.json"))
    names = [f"beta[{i + 1}]" for i in range(len(columns) + 1)] + ["sigma"]
    draws = np.array([np.concatenate([chain[key] for chain in chains]) for key in names])
    means = [facts["params"][key]["mean"] for key in names]
    np.testing.assert_allclose(draws.mean(axis=1), means, rtol=1e-5)
    draws[-1] = np.log(draws[-1])
    mean, sd, n = draws.mean(axis=1), draws.std(axis=1), draws.shape[1]
    model = linear_model(np.column_stack(columns).astype(float), y, flat=True)
    return Reference(model, mean, sd, sd / np.sqrt(n), (2 * n) ** -0.5, np.cov(draws))


def _earnings(data):
    table = json_of(data, "posteriordb/data/earnings")
    return np.array(table["height"]), np.array(table["male"]), np.log(table["earn"])


def json_of(data, name):
    return json.loads((data / f"{name}.json").read_text())


def arrays_of(data, name):
    with np.load(data / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def idx_of(path):
    """Array of bytes in the format of MNIST: its number of axes, their lengths, the values."""
    content = gzip.decompress(path.read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, ">i4", count=axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _training_rows(data, name):
    """All but the first fifth of a random permutation, in file order; checked with N_train."""
    facts = json_of(data, f"references/{name}")
    assert "test = first N//5 of np.random.default_rng(0).permutation(N)" in facts["prep"]
    table = arrays_of(data, f"uci/{name}")
    X, y = table["X"].astype(float), table["y"]
    train = np.ones(len(y), dtype=bool)
    train[np.random.default_rng(0).permutation(len(y))[: len(y) // 5]] = False
    assert train.sum() == facts["N_train"]
    return X[train], y[train], facts


def _standardised(X, columns, facts):
    """``X`` with these columns, a list or "all", at mean 0 and sd 1, as ``facts`` say."""
    assert f"{columns} standardised by the training mean and sd (ddof 0)" in facts["prep"]
    columns = slice(None) if isinstance(columns, str) else columns
    X[:, columns] = (X[:, columns] - X[:, columns].mean(axis=0)) / X[:, columns].std(axis=0)
    return X


def _logistic_laplace(X, y, precision):
    """Newton's iteration to the mode, inverse Hessian there, Σ_i g_i g_iᵀ of the rows' scores."""
    A = np.column_stack([np.ones(len(X)), X])
    mode = np.zeros(A.shape[1])
    for _ in range(30):
        p = expit(A @ mode)
        hessian = (A.T * (p * (1 - p))) @ A + np.diag(precision)
        mode = mode + np.linalg.solve(hessian, A.T @ (y - p) - precision * mode)
    scores = A * (y - expit(A @ mode))[:, None]
    return mode, np.linalg.inv(hessian), scores.T @ scores


def _linear_laplace(X, y):
    """Least squares: (XᵀX)⁻¹σ² and 1/(2N) for log σ; the N(0, 1) priors of β are in, σ's not."""
    A = np.column_stack([np.ones(len(X)), X])
    beta = np.linalg.solve(A.T @ A, A.T @ y)
    residuals = y - A @ beta
    variance = np.mean(residuals**2)
    laplace = np.zeros((beta.size + 1, beta.size + 1))
    laplace[:-1, :-1] = np.linalg.inv(A.T @ A / variance + np.eye(beta.size))
    laplace[-1, -1] = 1 / (2 * len(y))
    scores = np.column_stack([A * residuals[:, None], residuals**2 - variance]) / variance
    return np.append(beta, 0.5 * np.log(variance)), laplace, scores.T @ scores
