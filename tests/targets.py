"""Models with their exact answers beside them, and their gradients from minibatches."""

import numpy as np
import pymc as pm

from modes import FAST

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.minibatch_gradient import minibatch_gradient
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.rows.data import Minibatch
from pymc_sghmc.step.gradients import model_by_row


def plain_gradient(
    model,
    unknowns,
    batch_size=None,
    initial_point=None,
    compile_kwargs=None,
    *,
    data=None,
    replace=True,
    rewriting=None,
):
    """Make the gradient from minibatches that steps make of a model, without a step."""
    point = model.initial_point() if initial_point is None else initial_point
    rewriting = Rewriting() if rewriting is None else rewriting
    rows, source = model_by_row(model, unknowns, batch_size, point, data, rewriting)
    return minibatch_gradient(rows, LogDensity(rows, compile_kwargs), source, replace)


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


def gradient_of(model, batch_size=None, variables=None, **options):
    """Gradient with respect to some unknowns, by default all continuous ones, quick to compile."""
    variables = model.continuous_value_vars if variables is None else variables
    unknowns = Unknowns(variables, model.initial_point())
    return plain_gradient(model, unknowns, batch_size, **{"compile_kwargs": FAST, **options})


def minibatch_of(gradient, *rows):
    """Minibatch of these rows at hand, an array of their numbers for each group."""
    return Minibatch(rows, gradient.data.resident)


def on_rows(gradient, position, *rows):
    """Log-density and gradient at ``position`` on a minibatch of these rows at hand."""
    return gradient(position, minibatch_of(gradient, *rows))


def start_of(step):
    """Point at which chains of a step begin as a rule."""
    return step.unknowns.unravel(step.tuner.initial, {})


def log_density(density, position, n_rows):
    """Log-density from all rows of a density with one group of them."""
    arrays = [getattr(source, "data", source) for source in density.sources]
    one = np.ones(())
    return float(density(position, one, [np.ones(n_rows)], [np.arange(n_rows)], arrays)[0])


def by_way_of_the_model(density, logp, unknowns, point, position):
    """The same by PyMC's log-density and the numerical Jacobian of a change of coordinates.

    Returns it, and sign and logarithm of the Jacobian.
    """
    steps = 1e-6 * np.eye(unknowns.d)
    ends = [(density.to_model(position + u), density.to_model(position - u)) for u in steps]
    jacobian = np.array([(there - back) / 2e-6 for there, back in ends])
    sign, log_jacobian = np.linalg.slogdet(jacobian)
    own = unknowns.unravel(density.to_model(position), point)
    return float(logp(own)) + log_jacobian, sign, log_jacobian
