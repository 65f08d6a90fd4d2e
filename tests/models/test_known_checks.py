"""Conditions that hold whatever the parameters are, and those that don't, as PyMC writes them."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc.logprob.utils import CheckParameterValue, ParameterValueError

from pymc_sghmc.compat import toposort
from pymc_sghmc.models.known_checks import without_known_checks

N = 5
OF_THREE = np.arange(N) % 3
OF_TWO = np.arange(N) % 2

HOLD = {
    "sigmoid": lambda x: pm.Bernoulli("y", logit_p=x[:, 0], observed=OF_TWO),
    "complement": lambda x: pm.Bernoulli("y", p=1 - pt.sigmoid(x[:, 0]), observed=OF_TWO),
    "probit": lambda x: pm.Bernoulli("y", p=pm.math.invprobit(x[:, 0]), observed=OF_TWO),
    "product": lambda x: pm.Bernoulli("y", p=0.9 * pt.sigmoid(x[:, 0]), observed=OF_TWO),
    "column": lambda x: pm.Bernoulli("y", p=pt.sigmoid(x)[:, 1], observed=OF_TWO),
    "binomial": lambda x: pm.Binomial("y", n=4, logit_p=x[:, 0], observed=OF_TWO),
    "exponential": lambda x: pm.Poisson("y", pm.math.exp(x[:, 0]), observed=OF_TWO),
    "square": lambda x: pm.Poisson("y", pt.sqr(x[:, 0]), observed=OF_TWO),
    "softmax": lambda x: pm.Categorical("y", logit_p=x, observed=OF_THREE),
    "softmax of a reference": lambda x: pm.Categorical(
        "y",
        p=pm.math.softmax(pt.concatenate([pt.zeros((N, 1)), x], axis=1), axis=-1),
        observed=OF_THREE,
    ),
}
MAY_FAIL = {
    "any p": lambda x: pm.Bernoulli("y", p=x[:, 0], observed=OF_TWO),
    "too large a product": lambda x: pm.Bernoulli(
        "y", p=1.1 * pt.sigmoid(x[:, 0]), observed=OF_TWO
    ),
    "difference": lambda x: pm.Bernoulli("y", p=pt.sigmoid(x[:, 0]) - 0.1, observed=OF_TWO),
    "more than 0, where exp may underflow": lambda x: pm.Exponential(
        "y", pm.math.exp(x[:, 0]), observed=OF_TWO
    ),
    "any rate": lambda x: pm.Poisson("y", x[:, 0], observed=OF_TWO),
    "softmax over rows": lambda x: pm.Categorical(
        "y", p=pm.math.softmax(x, axis=0), observed=OF_THREE
    ),
}


def log_likelihood(observe):
    with pm.Model() as model:
        x = pm.Normal("x", shape=(N, 3))
        observe(x)
    graph = model.logp(vars=[model["y"]], sum=False, jacobian=False)
    return model, graph


def checks(graph):
    return [node for node in toposort(graph, []) if isinstance(node.op, CheckParameterValue)]


@pytest.mark.parametrize("name", HOLD)
def test_what_holds_is_not_checked(name):
    model, graph = log_likelihood(HOLD[name])
    new = without_known_checks(graph)
    assert checks(graph)
    assert not checks(new)
    point = {"x": np.random.default_rng(0).standard_normal((N, 3))}
    [x] = model.value_vars
    values = [g[0].eval({x: point["x"]}, mode="FAST_COMPILE") for g in (graph, new)]
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("name", MAY_FAIL)
def test_what_may_fail_is_checked(name):
    _, graph = log_likelihood(MAY_FAIL[name])
    new = without_known_checks(graph)
    assert checks(new)


def test_of_several_conditions_those_that_may_fail_stay():
    with pm.Model() as model:
        x = pm.Normal("x", shape=N)
        n = pm.Data("n", np.array([3, 3, 3, 3, -3]))
        pm.Binomial("y", n=n, logit_p=x, observed=np.zeros(N, dtype=int))
    graph = model.logp(vars=[model["y"]], sum=False, jacobian=False)
    [new] = without_known_checks(graph)
    [check] = checks([new])
    [x] = model.value_vars
    with pytest.raises(ParameterValueError):
        new.eval({x: np.zeros(N)}, mode="FAST_COMPILE")
    model.set_data("n", np.full(N, 3))
    assert np.isfinite(new.eval({x: np.zeros(N)}, mode="FAST_COMPILE")).all()
    below = toposort(check.inputs[1:], [])
    assert not any("igmoid" in str(node.op) for node in below)
