"""Rows of a logistic regression, and a model of a few of them, for tests of data elsewhere."""

import numpy as np
import pymc as pm

D = 4
BETA = np.array([-1.0, 0.5, -0.5, 1.0])


def logistic_rows(n):
    """Predictors, the first of which is 1, and outcomes."""
    rng = np.random.default_rng(3)
    X = rng.standard_normal((n, D))
    X[:, 0] = 1.0
    return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-X @ BETA))).astype("i1")}


def logistic(rows):
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2, shape=D)
        x, y = pm.Data("X", rows["X"][:10]), pm.Data("y", rows["y"][:10])
        pm.Bernoulli("likelihood", logit_p=x @ beta, observed=y)
    return model
