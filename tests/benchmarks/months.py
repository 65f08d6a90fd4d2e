"""How far twelve months of updates drift from one run on all rows, by how the prior is made.

Run ``python tests/benchmarks/months.py``; it prints one line of JSON. Each month a logistic
regression on new rows is sampled by SGHMC with 1,000 draws, and its posterior is the prior of the
next month: a Gaussian by the covariance of the draws, by the exact Hessian at the draws' mean, by
the mode, or by `prior_from`. The drift is the largest difference of a mean after the last month,
in posterior standard deviations, from the posterior of all rows. Both are by importance sampling
around the mode, so that the draws of the last month add no Monte Carlo error.
"""

import argparse
import json
import time

import numpy as np
import pymc as pm

from pymc_sghmc import SGHMC, prior_from
from pymc_sghmc.updating.gaussian_prior import GaussianPrior

PRIOR_SD = 2.0
KINDS = ("covariance of draws", "hessian at the draws' mean", "mode", "prior_from")


def rows(n_months, n_rows, d, intercept, seed):
    """Predictors (months, n, d) and outcomes (months, n)."""
    rng = np.random.default_rng(seed)
    beta = 1.5 * rng.standard_normal(d) / np.sqrt(d)
    beta[0] = intercept
    X = rng.standard_normal((n_months, n_rows, d))
    X[..., 0] = 1.0
    y = rng.random((n_months, n_rows)) < 1 / (1 + np.exp(-X @ beta))
    return X, y.astype(float)


def logistic_regression(X, y):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=X.shape[1])
        logit = pm.Data("X", X) @ beta
        pm.Bernoulli("likelihood", logit_p=logit, observed=pm.Data("y", y))
    return model


def hessian(X, beta, precision):
    p = 1 / (1 + np.exp(-X @ beta))
    return (X.T * (p * (1 - p))) @ X + precision


def mode(X, y, mean, precision):
    beta = np.zeros(mean.size)
    for _ in range(50):
        gradient = X.T @ (y - 1 / (1 + np.exp(-X @ beta))) - precision @ (beta - mean)
        step = np.linalg.solve(hessian(X, beta, precision), gradient)
        beta = beta + step
        if np.abs(step).max() < 1e-10:
            return beta
    raise RuntimeError("Newton's method did not converge")


def moments(X, y, mean, precision, n=4000):
    """Mean and sds of the posterior with a Gaussian prior, by importance sampling."""
    center = mode(X, y, mean, precision)
    covariance = np.linalg.inv(hessian(X, center, precision))
    z = np.random.default_rng(1).standard_normal((n // 2, mean.size))
    z = np.concatenate([z, -z])
    draws = center + z @ np.linalg.cholesky(covariance).T
    log_weights = 0.5 * np.square(z).sum(axis=1)
    for part in np.array_split(np.arange(n), 16):
        logit = draws[part] @ X.T
        log_weights[part] += (y * logit - np.logaddexp(0, logit)).sum(axis=1)
    off = draws - mean
    log_weights -= 0.5 * np.einsum("ij,jk,ik->i", off, precision, off)
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    # differences from the plain Gaussian: without its Monte Carlo error
    shift = (weights - 1 / n) @ (draws - center)
    off = draws - center - shift
    covariance = covariance + (off.T * (weights - 1 / n)) @ off
    return center + shift, np.sqrt(np.diag(covariance))


def drift_of(kind, X, y, n_draws):
    """Mean and sds of the last month's posterior, and seconds that the priors took."""
    n_months, _, d = X.shape
    mean = np.zeros(d)
    precision = np.eye(d) / PRIOR_SD**2
    model = logistic_regression(X[0], y[0])
    seconds = 0.0
    for month in range(n_months - 1):
        if kind == "mode":  # of which SGHMC knows nothing
            mean = mode(X[month], y[month], mean, precision)
            precision = hessian(X[month], mean, precision)
            continue
        with model:
            pm.set_data({"X": X[month], "y": y[month]})
            step = SGHMC()
            idata = pm.sample(
                n_draws // 4, step=step, chains=4, cores=1, random_seed=month, progressbar=False
            )
        start = time.perf_counter()
        prior = prior_from(idata, step)
        seconds += time.perf_counter() - start
        draws = idata.posterior["beta"].values.reshape(-1, d)
        if kind == "covariance of draws":
            prior = GaussianPrior(prior.parameters, draws.mean(0), np.cov(draws.T))
        elif kind == "hessian at the draws' mean":
            of_draws = hessian(X[month], draws.mean(0), precision)
            prior = GaussianPrior(prior.parameters, draws.mean(0), np.linalg.inv(of_draws))
        mean = prior.mean
        precision = np.linalg.inv(prior.covariance)
        [parameter] = prior.parameters
        at_mean = type(parameter)(parameter.name, parameter.shape, parameter.place, mean)
        model = GaussianPrior((at_mean,), mean, prior.covariance).apply(model)
    return *moments(X[-1], y[-1], mean, precision), seconds / (n_months - 1)


def drifts(n_months=12, n_rows=5000, d=20, intercept=0.0, seed=0, n_draws=1000, kinds=KINDS):
    """Return the drift of each kind of prior, in posterior standard deviations."""
    X, y = rows(n_months, n_rows, d, intercept, seed)
    all_X, all_y = X.reshape(-1, d), y.ravel()
    mean, sd = moments(all_X, all_y, np.zeros(d), np.eye(d) / PRIOR_SD**2)
    result = {}
    for kind in kinds:
        last_mean, last_sd, seconds = drift_of(kind, X, y, n_draws)
        result[kind] = round(float(np.abs((last_mean - mean) / sd).max()), 3)
        result[f"{kind}, sds"] = round(float(np.abs(last_sd / sd - 1).max()), 3)
    result["seconds of a prior_from"] = round(seconds, 2)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--months", type=int, default=12)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--intercept", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(
        json.dumps(vars(given) | drifts(given.months, given.rows, 20, given.intercept, given.seed))
    )
