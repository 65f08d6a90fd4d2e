"""Real posteriors with a reference: data, PyMC model, and the reference's means and sds.

All vectors are in the unconstrained space, in the order of the raveled value variables: intercept,
coefficients, log sigma.
"""

import json

from typing import NamedTuple

import numpy as np
import pymc as pm

from scipy.special import expit


class Reference(NamedTuple):
    model: pm.Model
    mean: np.ndarray  # of the posterior, (d,)
    sd: np.ndarray  # (d,)
    error: np.ndarray  # standard error of mean, (d,)
    covariance: np.ndarray | None  # (d, d), where the reference has it
    mode: np.ndarray  # Laplace's approximation from the data: mode, (d,) ...
    laplace: np.ndarray  # ... and covariance, (d, d)
    fisher: np.ndarray  # empirical Fisher information Σ_i g_i g_iᵀ at the mode, (d, d)


def linear_model(X, y):
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0, 1)
        beta = pm.Normal("beta", 0, 1, shape=X.shape[1])
        sigma = pm.HalfNormal("sigma", 1)
        pm.Normal("y", intercept + pm.math.dot(X, beta), sigma, observed=y)
    return model


def logistic_model(X, y, prior=None):
    """``prior``: means and sds of intercept and coefficients; None is flat."""
    with pm.Model() as model:
        if prior is None:
            intercept, beta = pm.Flat("intercept"), pm.Flat("beta", shape=X.shape[1])
        else:
            mean, sd = prior
            intercept = pm.Normal("intercept", mean[0], sd[0])
            beta = pm.Normal("beta", mean[1:], sd[1:])
        pm.Bernoulli("y", logit_p=intercept + pm.math.dot(X, beta), observed=y)
    return model


def wells_data(data):
    table = json.loads((data / "posteriordb/data/wells_data.json").read_text())
    X = np.column_stack([np.array(table["dist"]) / 100, table["arsenic"]])
    return X, np.array(table["switched"])


def wells(data):
    """Who changes to a safe well: logistic, flat priors, N = 3,020, d = 3."""
    X, y = wells_data(data)
    assert len(y) == 3020
    own = json.loads((data / "posteriordb/own_references.json").read_text())
    rows = own["wells_data-wells_dist100ars_model"]["params"]
    mean, sd, error = (
        np.array([rows[name][key] for name in ("alpha", "beta[1]", "beta[2]")])
        for key in ("mean", "sd", "mcse")
    )
    return Reference(
        logistic_model(X, y), mean, sd, error, None, *_logistic_laplace(X, y, np.zeros(3))
    )


def htru2(data):
    """Pulsars: logistic, intercept ~ N(0, 5), coefficients ~ N(0, 1), N = 14,319, d = 9."""
    X, y, facts, reference = _training_rows(data, "htru2")
    assert facts["prior"] == "intercept ~ N(0,5.0), every coefficient ~ N(0,1.0) (sd)"
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    sd = np.array([5.0] + [1.0] * X.shape[1])
    return Reference(
        logistic_model(X, y, prior=(np.zeros(sd.size), sd)),
        reference["mean"],
        reference["sd"],
        reference["mcse"],
        reference["cov"],
        *_logistic_laplace(X, y, sd**-2),
    )


def power_plant(data):
    """Combined cycle power plant: linear, unknown sigma, N = 7,655, d = 6."""
    return _linear(data, "uci_power-plant")


def flights(data):
    """Delays of flights: linear, unknown sigma, errors of kurtosis 104, N = 160,000, d = 4."""
    return _linear(data, "flights_200k")


def _linear(data, name):
    X, y, facts, reference = _training_rows(data, name)
    assert facts["prior"] == (
        "X and y standardised by training mean/sd; intercept and coefficients ~ N(0,1), "
        "sigma ~ HalfNormal(1)"
    )
    np.testing.assert_allclose([y.mean(), y.std()], facts["y_scale"], rtol=1e-12)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    y = (y - y.mean()) / y.std()
    # Exact mean and sd of sigma; those of log sigma by the delta method, whose relative error is
    # of the order of the squared coefficient of variation (under 1e-4 here), where the variance of
    # the 2,000 reference draws of sigma has an error of 3 %.
    mean, sd = reference["mean"].copy(), reference["sd"].copy()
    cv = sd[-1] / mean[-1]
    mean[-1], sd[-1] = np.log(mean[-1]) - cv**2 / 2, cv
    covariance = np.diag(sd**2)
    covariance[:-1, :-1] = reference["cov_beta"]  # and no correlation with log sigma
    return Reference(
        linear_model(X, y), mean, sd, np.zeros(sd.size), covariance, *_linear_laplace(X, y)
    )


def _training_rows(data, name):
    """All but the first fifth of a random permutation, in file order; checked with N_train."""
    facts = json.loads((data / f"references/{name}.json").read_text())
    assert "test = first N//5 of np.random.default_rng(0).permutation(N)" in facts["prep"]
    with np.load(data / f"uci/{name}.npz", allow_pickle=False) as file:
        X, y = file["X"].astype(float), file["y"]
    train = np.ones(len(y), dtype=bool)
    train[np.random.default_rng(0).permutation(len(y))[: len(y) // 5]] = False
    assert train.sum() == facts["N_train"]
    with np.load(data / f"references/{name}.npz", allow_pickle=False) as file:
        reference = dict(file)
    return X[train], y[train], facts, reference


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
