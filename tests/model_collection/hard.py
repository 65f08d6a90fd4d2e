"""Models that are to break second-order control variates, and their posteriors by importance sampling.

Densities are written down here a second time, in NumPy and for many points at once: an answer that
owes nothing to the model's graph, nor to the samplers. Data have seeds of their own.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pymc as pm

from scipy.optimize import minimize
from scipy.special import expit, gammaln

__all__ = ["MODELS", "Hard", "Posterior", "posterior"]

NUMBERS = 2**21  # rows × points at a time
DEGREES, ROUNDS = 10, 5  # of the t that points are drawn from; each round learns from the last
MOST_POINTS, MOST_WORK = 200_000, 3e8  # of the last round; rows × points


class Hard(NamedTuple):
    """A model, and the log-density of (n, d) unconstrained points, up to a constant."""

    model: pm.Model
    log_density: Callable
    n_rows: int
    d: int


class Posterior(NamedTuple):
    """Moments on the unconstrained scale, with standard errors of means and relative ones of sds."""

    mean: np.ndarray
    sd: np.ndarray
    covariance: np.ndarray
    error: np.ndarray
    sd_error: np.ndarray
    effective: float  # number of draws


def _logistic(X, y, prior):
    with pm.Model() as model:
        b = pm.Normal("b", 0, prior, shape=X.shape[1])
        pm.Bernoulli("y", logit_p=pm.math.dot(pm.Data("X", X), b), observed=y)
    slopes = X.T @ y

    def log_density(theta):
        eta = theta @ X.T
        # log(1 + exp(η)), without overflow
        softplus = np.maximum(eta, 0) + np.log1p(np.exp(-np.abs(eta)))
        return theta @ slopes - softplus.sum(axis=1) - 0.5 * np.square(theta / prior).sum(axis=1)

    return Hard(model, log_density, *X.shape)


def _coins(X, w, rng):
    return rng.binomial(1, expit(X @ w))


def _rows_of_length(length, n=20_000, d=20):
    def make():
        rng = np.random.default_rng(1)
        X = rng.standard_normal((n, d)) * length(rng, (n, 1))
        return _logistic(X, _coins(X, rng.standard_normal(d) / np.sqrt(d), rng), 1.0)

    return make


def _near_separation():
    rng = np.random.default_rng(2)
    X = rng.standard_normal((2000, 5))
    return _logistic(X, _coins(X, 8 * rng.standard_normal(5), rng), 5.0)


def _few(n):
    def make():
        rng = np.random.default_rng(3)
        X = rng.standard_normal((n, 20))
        return _logistic(X, _coins(X, rng.standard_normal(20) / np.sqrt(20), rng), 1.0)

    return make


def _lone_row(length):
    """One row alone tells of the last unknown: its posterior is half of the prior, or nearly."""

    def make():
        rng = np.random.default_rng(4)
        X = rng.standard_normal((5000, 10))
        X[:, -1] = 0.0
        X[7] = 0.0
        X[7, -1] = length
        y = _coins(X, rng.standard_normal(10) / 3, rng)
        y[7] = 1
        return _logistic(X, y, 1.0)

    return make


def _counts():
    """Poisson counts from 0 to a million or so in one regression."""
    rng = np.random.default_rng(5)
    n, d = 5000, 5
    X = np.column_stack([np.ones(n), rng.uniform(0, 1, n), rng.standard_normal((n, d - 2))])
    y = rng.poisson(np.exp(X @ [0.0, 12.5, 0.3, -0.2, 0.1]))
    with pm.Model() as model:
        b = pm.Normal("b", 0, 10, shape=d)
        pm.Poisson("y", pm.math.exp(pm.math.dot(pm.Data("X", X), b)), observed=y)
    slopes = X.T @ y

    def log_density(theta):
        rates = np.exp(theta @ X.T).sum(axis=1)
        return theta @ slopes - rates - 0.5 * np.square(theta / 10).sum(axis=1)

    return Hard(model, log_density, n, d)


def _student(tails):
    """Student t with unknown ν; ``tails`` of the data, so that ν is known or hardly known."""

    def make():
        rng = np.random.default_rng(6)
        n = 3000
        X = rng.standard_normal((n, 3))
        y = X @ [0.5, -0.3, 0.2] + tails(rng, n)
        with pm.Model() as model:
            b = pm.Normal("b", 0, 1, shape=3)
            sigma, nu = pm.HalfNormal("sigma", 1), pm.Gamma("nu", 2, 0.1)
            pm.StudentT("y", nu=nu, mu=pm.math.dot(pm.Data("X", X), b), sigma=sigma, observed=y)

        def log_density(theta):
            b, log_sigma, log_nu = theta[:, :3], theta[:, 3], theta[:, 4]
            nu = np.exp(log_nu)
            z = (y - b @ X.T) / np.exp(log_sigma)[:, None]
            rows = np.log1p(np.square(z) / nu[:, None]).sum(axis=1)
            const = gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * log_nu - log_sigma
            prior = -0.5 * np.square(b).sum(axis=1) - 0.5 * np.exp(2 * log_sigma) + log_sigma
            return n * const - 0.5 * (nu + 1) * rows + prior + 2 * log_nu - 0.1 * nu

        return Hard(model, log_density, n, 5)

    return make


def _negative_binomial(heavy):
    """A dispersion that is hardly known: log α has a tail that no quadratic function follows."""

    def make():
        n, rng = 3000, np.random.default_rng(1)
        y = rng.poisson(1.5, n)
        with pm.Model() as model:
            m = pm.Normal("m", 0, 5)
            alpha = pm.HalfCauchy("alpha", 10) if heavy else pm.Exponential("alpha", 0.1)
            pm.NegativeBinomial("y", mu=pm.math.exp(m), alpha=alpha, observed=y)
        values, times = np.unique(y, return_counts=True)

        def log_density(theta):
            m, log_alpha = theta.T
            alpha, mu = np.exp(log_alpha), np.exp(m)
            # log of α(α + 1)…(α + k − 1): a difference of two log Γ loses all digits at large α
            rising = np.log1p(np.arange(values.max()) / alpha[:, None]).cumsum(axis=1)
            rising = np.column_stack([np.zeros(len(alpha)), rising])[:, values] @ times
            rows = rising - n * alpha * np.log1p(mu / alpha)
            rows = rows + times @ values * (m - np.log1p(mu / alpha))
            prior = -np.log1p(np.square(alpha / 10)) if heavy else -0.1 * alpha
            return rows + prior - 0.5 * np.square(m / 5) + log_alpha

        return Hard(model, log_density, n, 2)

    return make


MODELS = {
    "lognormal_0.8": _rows_of_length(lambda rng, size: rng.lognormal(0, 0.8, size)),
    "lognormal_1.5": _rows_of_length(lambda rng, size: rng.lognormal(0, 1.5, size)),
    "cauchy": _rows_of_length(lambda rng, size: np.abs(rng.standard_cauchy(size)), d=10),
    "cauchy_0.01": _rows_of_length(
        lambda rng, size: 0.01 * np.abs(rng.standard_cauchy(size)), d=10
    ),
    "separation": _near_separation,
    "few_100": _few(100),
    "few_500": _few(500),
    "lone_row_3": _lone_row(3.0),
    "lone_row_50": _lone_row(50.0),
    "counts": _counts,
    "student_t3": _student(lambda rng, n: rng.standard_t(3, n)),
    "student_normal": _student(lambda rng, n: rng.standard_normal(n)),
    "negative_binomial": _negative_binomial(heavy=False),
    "negative_binomial_heavy": _negative_binomial(heavy=True),
}


def posterior(hard, seed=0) -> Posterior:
    """Moments by importance sampling from a t that learns its place and width, round by round."""
    rng, d = np.random.default_rng(seed), hard.d
    mean, covariance = _laplace(lambda x: _at(hard, x), d)
    last = int(min(MOST_POINTS, MOST_WORK / hard.n_rows))
    for n in [last // 8] * (ROUNDS - 1) + [last]:
        L = np.linalg.cholesky(covariance)
        z = rng.standard_normal((n, d)) / np.sqrt(rng.chisquare(DEGREES, (n, 1)) / DEGREES)
        x = mean + z @ L.T
        log_t = -0.5 * (DEGREES + d) * np.log1p(np.square(z).sum(axis=1) / DEGREES)
        log_w = _at(hard, x) - log_t
        w = np.exp(log_w - np.nanmax(log_w))
        w = np.where(np.isfinite(w), w, 0.0)
        w /= w.sum()
        effective = 1 / np.square(w).sum()
        if n < last and effective < 20 * d:  # too few to learn from: with flatter weights
            w = np.sqrt(w) / np.sqrt(w).sum()
        mean = w @ x
        covariance = (x - mean).T * w @ (x - mean)
    z = (x - mean) / (sd := np.sqrt(np.diag(covariance)))
    error = sd * np.sqrt(np.square(w) @ np.square(z))
    sd_error = np.sqrt(np.square(w) @ np.square(np.square(z) - 1)) / 2
    return Posterior(mean, sd, covariance, error, sd_error, effective)


def _at(hard, x):
    """Log-density, few points at a time."""
    n = max(1, NUMBERS // hard.n_rows)
    with np.errstate(all="ignore"):
        return np.concatenate([hard.log_density(x[i : i + n]) for i in range(0, len(x), n)])


def _laplace(log_density, d):
    """Mode and inverse of the curvature there, by differences."""
    h, eye = 1e-4, np.eye(d)

    def energy(x):
        there = log_density(np.vstack([x, x + h * eye, x - h * eye]))
        return -there[0], (there[1 + d :] - there[1 : 1 + d]) / (2 * h)

    x, scale = np.zeros(d), np.ones(d)
    for _ in range(3):  # in units of what was found
        found = minimize(
            lambda z, x=x, scale=scale: _scaled(energy, x, scale, z), np.zeros(d), jac=True
        )
        x = x + scale * found.x
        hessian = np.column_stack(
            [energy(x + 10 * h * e)[1] - energy(x - 10 * h * e)[1] for e in eye]
        ) / (20 * h)
        covariance = np.linalg.pinv((hessian + hessian.T) / 2, hermitian=True)
        scale = np.sqrt(np.abs(np.diag(covariance)))
    values, vectors = np.linalg.eigh(covariance)
    return x, (vectors * np.abs(values)) @ vectors.T


def _scaled(energy, x, scale, z):
    value, slope = energy(x + scale * z)
    return (value, scale * slope) if np.isfinite(slope).all() else (1e100, np.zeros_like(z))
