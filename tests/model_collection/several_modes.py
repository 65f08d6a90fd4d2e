"""Posteriors with a known number of modes, by construction; data of any seed.

Of more than four modes any four count: so many are looked for.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pymc as pm

from scipy.special import expit

__all__ = ["CASES", "Case"]


class Case(NamedTuple):
    """A model of data that can be made anew."""

    n_modes: int
    data: Callable  # from a generator to arrays by name
    likelihood: Callable  # from the containers of these names; in the context of a model
    arguments: dict = {}  # of a step

    def model(self, seed=0):
        """Return the model, with its data in containers."""
        with pm.Model() as model:
            arrays = self.data(np.random.default_rng(seed))
            self.likelihood(**{name: pm.Data(name, array) for name, array in arrays.items()})
        return model


def _normal(rng, n, k):
    return rng.standard_normal((n, k))


# ------------------------------------------------------------------ several modes


def square(n):
    def data(rng):
        return {"y": rng.normal(1.0, 0.3, n)}

    def likelihood(y):
        a = pm.Normal("a", 0, 2)
        pm.Normal("obs", a**2, 0.3, observed=y)

    return Case(2, data, likelihood)


def mixture(k, distance, n=2000, ordered=False):
    """Of k normals with unit variance and unknown weights and means."""

    def data(rng):
        component = rng.integers(k, size=n)
        return {"y": distance * (component - (k - 1) / 2) + rng.standard_normal(n)}

    def likelihood(y):
        order = pm.distributions.transforms.ordered
        extra = {"transform": order, "initval": np.linspace(-1, 1, k)} if ordered else {}
        mu = pm.Normal("mu", 0, 5, shape=k, **extra)
        w = pm.Dirichlet("w", np.full(k, 2.0))
        pm.NormalMixture("obs", w=w, mu=mu, sigma=1.0, observed=y)

    return Case(1 if ordered else {2: 2, 3: 6}[k], data, likelihood)


def scale_mixture():
    """Of two normals about one mean."""

    def data(rng):
        return {"y": rng.standard_normal(3000) * rng.choice([0.5, 4.0], size=3000)}

    def likelihood(y):
        sigma = pm.HalfNormal("sigma", 5, shape=2)
        w = pm.Dirichlet("w", np.full(2, 2.0))
        pm.NormalMixture("obs", w=w, mu=np.zeros(2), sigma=sigma, observed=y)

    return Case(2, data, likelihood)


def two_regressions():
    """A mixture of two lines."""

    def data(rng):
        x = rng.standard_normal(3000)
        return {"x": x, "y": x * rng.choice([-1.0, 2.0], size=3000) + rng.standard_normal(3000)}

    def likelihood(x, y):
        b = pm.Normal("b", 0, 3, shape=2)
        w = pm.Dirichlet("w", np.full(2, 2.0))
        pm.NormalMixture("obs", w=w, mu=x[:, None] * b[None, :], sigma=1.0, observed=y)

    return Case(2, data, likelihood)


def bilinear():
    """Two factors, of which either may have both signs."""

    def data(rng):
        X, Z = _normal(rng, 2000, 3), _normal(rng, 2000, 4)
        u, v = rng.standard_normal(3), rng.standard_normal(4)
        return {"X": X, "Z": Z, "y": (X @ u) * (Z @ v) + rng.standard_normal(2000)}

    def likelihood(X, Z, y):
        u = pm.Normal("u", 0, 1, shape=3)
        v = pm.Normal("v", 0, 1, shape=4)
        pm.Normal("obs", pm.math.dot(X, u) * pm.math.dot(Z, v), 1.0, observed=y)

    return Case(2, data, likelihood)


def product(strength):
    """A logistic regression with a product of two coefficients."""

    def data(rng):
        X = _normal(rng, 3000, 3)
        return {"X": X, "y": rng.binomial(1, expit(X @ [strength, 0.5, -0.5]))}

    def likelihood(X, y):
        a, b = pm.Normal("a", 0, 1), pm.Normal("b", 0, 1)
        c = pm.Normal("c", 0, 1, shape=2)
        eta = a * b * X[:, 0] + X[:, 1] * c[0] + X[:, 2] * c[1]
        pm.Bernoulli("obs", logit_p=eta, observed=y)

    return Case(2 if strength else 1, data, likelihood)


def network(hidden):
    """A network with so many hidden units: 2^k k! copies of each mode."""

    def data(rng):
        x = rng.uniform(-2, 2, (2000, 1))
        return {"x": x, "y": np.sin(2 * x[:, 0]) + 0.2 * rng.standard_normal(2000)}

    def likelihood(x, y):
        w = pm.Normal("w", 0, 2, shape=(1, hidden))
        b = pm.Normal("b", 0, 2, shape=hidden)
        v = pm.Normal("v", 0, 2, shape=hidden)
        pm.Normal("obs", pm.math.dot(pm.math.tanh(pm.math.dot(x, w) + b), v), 0.5, observed=y)

    return Case({1: 2, 2: 8}[hidden], data, likelihood)


# ------------------------------------------------------------------ one mode


def linear():
    def data(rng):
        X = _normal(rng, 2000, 10)
        return {"X": X, "y": X @ rng.standard_normal(10) + rng.standard_normal(2000)}

    def likelihood(X, y):
        b, sigma = pm.Normal("b", 0, 1, shape=10), pm.HalfNormal("sigma", 1)
        pm.Normal("obs", pm.math.dot(X, b), sigma, observed=y)

    return Case(1, data, likelihood)


def logistic(n, d, scale=1.0, correlation=0.0):
    def data(rng):
        X = _normal(rng, n, d)
        X[:, -1] = correlation * X[:, 0] + (1 - correlation**2) ** 0.5 * X[:, -1]
        return {"X": X, "y": rng.binomial(1, expit(scale * X @ rng.standard_normal(d)))}

    def likelihood(X, y):
        b = pm.Normal("b", 0, 5, shape=d)
        pm.Bernoulli("obs", logit_p=pm.math.dot(X, b), observed=y)

    return Case(1, data, likelihood)


def poisson():
    def data(rng):
        X = _normal(rng, 2000, 4)
        return {"X": X, "y": rng.poisson(np.exp(X @ [0.5, -0.5, 0.2, 0.0] + 1))}

    def likelihood(X, y):
        a, b = pm.Normal("a", 0, 10), pm.Normal("b", 0, 10, shape=4)
        pm.Poisson("obs", pm.math.exp(a + pm.math.dot(X, b)), observed=y)

    return Case(1, data, likelihood)


def student():
    """Heavy tails, few rows."""

    def data(rng):
        return {"y": rng.standard_t(2, 120)}

    def likelihood(y):
        mu, sigma = pm.Normal("mu", 0, 10), pm.HalfNormal("sigma", 5)
        pm.StudentT("obs", nu=pm.Gamma("nu", 2, 0.1), mu=mu, sigma=sigma, observed=y)

    return Case(1, data, likelihood)


def groups(centred, weak=False, **arguments):
    """Group effects and their scale."""

    def data(rng):
        g = rng.integers(20, size=1000)
        effects = rng.normal(0, 0.05 if weak else 1.0, 20)
        return {"g": g, "y": effects[g] + rng.standard_normal(1000)}

    def likelihood(g, y):
        mu, tau = pm.Normal("mu", 0, 5), pm.HalfNormal("tau", 1)
        if centred:
            u = pm.Normal("u", mu, tau, shape=20)
        else:
            u = mu + tau * pm.Normal("z", 0, 1, shape=20)
        pm.Normal("obs", u[g], 1.0, observed=y)

    return Case(1, data, likelihood, arguments)


def banana():
    """A curved ridge, with a prior that makes it one mode."""

    def data(rng):
        return {"y": rng.normal(0.0, 1.0, 200)}

    def likelihood(y):
        a, b = pm.Normal("a", 0, 1), pm.Normal("b", 0, 2)
        pm.Normal("obs", a + 0.5 * b**2, 1.0, observed=y)

    return Case(1, data, likelihood)


def zero_inflated():
    def data(rng):
        return {"y": rng.poisson(2.0, 1500) * rng.binomial(1, 0.6, 1500)}

    def likelihood(y):
        psi, mu = pm.Beta("psi", 1, 1), pm.Exponential("mu", 0.5)
        pm.ZeroInflatedPoisson("obs", psi=psi, mu=mu, observed=y)

    return Case(1, data, likelihood)


def regularised():
    """Local scales of many coefficients, few of which aren't zero."""

    def data(rng):
        X = _normal(rng, 500, 20)
        return {"X": X, "y": X[:, 0] * 2 + rng.standard_normal(500)}

    def likelihood(X, y):
        tau, lam = pm.HalfCauchy("tau", 0.1), pm.HalfCauchy("lam", 1, shape=20)
        b = pm.Normal("z", 0, 1, shape=20) * tau * lam
        pm.Normal("obs", pm.math.dot(X, b), pm.HalfNormal("sigma", 1), observed=y)

    return Case(1, data, likelihood)


CASES = {
    "square": square(1000),
    "square_20": square(20),
    "mixture_1": mixture(2, 1.0),
    "mixture_2": mixture(2, 2.0),
    "mixture_3": mixture(2, 3.0),
    "mixture_6": mixture(2, 6.0),
    "mixture_6_large": mixture(2, 6.0, n=100_000),
    "three_3": mixture(3, 3.0),
    "three_6": mixture(3, 6.0),
    "scale_mixture": scale_mixture(),
    "two_regressions": two_regressions(),
    "bilinear": bilinear(),
    "product": product(1.0),
    "network_1": network(1),
    "network_2": network(2),
    "linear": linear(),
    "logistic": logistic(2000, 10),
    "logistic_large": logistic(100_000, 20),
    "logistic_separation": logistic(100, 5, scale=20.0),
    "logistic_collinear": logistic(1000, 5, correlation=0.999),
    "logistic_wide": logistic(300, 60),
    "poisson": poisson(),
    "student": student(),
    "groups_centred": groups(True),
    "groups_non_centred": groups(False),
    "groups_as_written": groups(True, centring=None),
    "groups_as_written_weak": groups(True, weak=True, centring=None),
    "groups_non_centred_as_written": groups(False, weak=True, centring=None),
    "product_of_zero": product(0.0),
    "banana": banana(),
    "zero_inflated": zero_inflated(),
    "ordered_mixture": mixture(3, 3.0, ordered=True),
    "horseshoe": regularised(),
}
