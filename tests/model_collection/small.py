"""Small models: one whose every answer is a formula, and a regression."""

import numpy as np
import pymc as pm

__all__ = ["GaussianMean", "counts_of_groups", "linear_regression"]


class GaussianMean:
    """Rows y_i ~ N(A mu, I) in d dimensions and mu ~ N(0, prior_sd²): everything is exact.

    The minibatch gradient is linear in mu and its noise doesn't depend on it, so that the law of
    every sampler follows from the Lyapunov equation.
    """

    def __init__(self, n_rows=200, d=3, prior_sd=0.5, seed=0):
        rng = np.random.default_rng(seed)
        self.A = np.eye(d) + 0.5 * rng.standard_normal((d, d))
        self.y = self.A @ np.ones(d) + rng.standard_normal((n_rows, d))
        self.n_rows, self.d, self.prior_sd = n_rows, d, prior_sd
        self.fisher = n_rows * self.A.T @ self.A
        self.H = self.fisher + np.eye(d) / prior_sd**2  # of −log posterior
        self.mean = np.linalg.solve(self.H, n_rows * self.A.T @ self.y.mean(axis=0))

    def noise(self, batch_size):
        """V of rows drawn with replacement: N²/n Cov of a row's gradient Aᵀ(y_i − A mu)."""
        S = np.cov(self.y.T, ddof=0)
        return self.n_rows**2 / batch_size * self.A.T @ S @ self.A

    def model(self, **minibatch):
        """Ordinary model; with ``batch_size`` and ``total_size`` that of pm.Minibatch."""
        y = self.y
        if minibatch:
            y = pm.Minibatch(y, batch_size=minibatch["batch_size"])
        with pm.Model() as model:
            mu = pm.Normal("mu", 0, self.prior_sd, shape=self.d)
            pm.Normal("y", self.A @ mu, 1, observed=y, total_size=minibatch.get("total_size"))
        return model


def linear_regression(n_rows=60, seed=0):
    """A small regression with a bounded unknown and a deterministic."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n_rows, 2))
    y = X @ [1.0, -1.0] + 0.7 * rng.standard_normal(n_rows)
    with pm.Model(coords={"obs": range(n_rows), "coef": ["a", "b"]}) as model:
        beta = pm.Normal("beta", 0, 1, dims="coef")
        sigma = pm.HalfNormal("sigma", 1)
        mu = pm.Deterministic("mu", pm.Data("X", X, dims=("obs", "coef")) @ beta, dims="obs")
        pm.Normal("y", mu, sigma, observed=y, dims="obs")
    return model


def counts_of_groups(empty, prior="Normal"):
    """Counts in 60 groups of 20 rows, ``empty`` of them without a single event."""
    group = np.arange(1200) % 60
    rng = np.random.default_rng(1)
    y = rng.poisson(np.exp(rng.normal(1, 0.5, 60)[group]))
    y[np.isin(group, np.arange(empty))] = 0
    with pm.Model() as model:
        tau = pm.HalfNormal("tau", 1)
        if prior == "Normal":
            u = pm.Normal("u", 0, tau, shape=60)
        else:
            u = pm.StudentT("u", nu=4, mu=0, sigma=tau, shape=60)
        pm.Poisson("y", pm.math.exp(pm.Normal("a", 0, 2) + u[group]), observed=y)
    return model
