"""What a step says of groups that could be integrated out."""

import logging

import numpy as np
import pymc as pm
import pytest

from modes import FAST

from pymc_sghmc import SGHMC
from pymc_sghmc.hierarchy import rewrites
from pymc_sghmc.step import gradients


class Told(Exception):
    """Comes before anything is set up."""


@pytest.fixture
def said(monkeypatch, caplog):
    """What is said of a model."""

    def tell(*args):
        rewrites.advise_to_integrate_out(*args)
        raise Told

    def say(model, **options):
        caplog.clear()
        with model, caplog.at_level(logging.INFO, "pymc.sghmc"), pytest.raises(Told):
            SGHMC(**{"batch_size": 50, "compile_kwargs": FAST} | options)
        return caplog.text

    monkeypatch.setattr(gradients, "advise_to_integrate_out", tell)
    return say


def model(groups=200, rows=5, centred=True, extra=0, coupled=False):
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(groups), rows)
    x = rng.normal(size=(group.size, 2 + extra))
    with pm.Model() as made:
        b, tau = pm.Normal("b", 0, 1, shape=2 + extra), pm.HalfNormal("tau", 1)
        if centred:
            u = pm.Normal("u", 0, tau, shape=groups)
        else:
            u = tau * pm.Normal("u", 0, 1, shape=groups)
        if coupled:
            pm.Potential("p", -((u[0] - u[1]) ** 2))
        pm.Bernoulli("y", logit_p=x @ b + u[group], observed=rng.integers(2, size=group.size))
    return made


@pytest.mark.parametrize("centred", [True, False])
def test_many_groups_of_few_rows_are_named(said, centred):
    text = said(model(centred=centred))
    assert "'u': 200 groups of 5.0 rows on average. marginalize=['u']" in text
    assert "leaves 3 of 203 parameters" in text
    assert "With recover=False" in text


@pytest.mark.parametrize(
    "options",
    [{"groups": 20}, {"rows": 60}, {"extra": 60}, {"coupled": True}],
    ids=str,
)
def test_nothing_is_said_where_it_does_not_pay_or_cannot_be(said, options):
    assert "marginalize" not in said(model(**options))


def test_what_is_given_is_not_advised(said):
    text = said(model(), recover=False)
    assert "marginalize=['u']" in text
    assert "recover" not in text


def test_nothing_is_said_where_they_are_integrated_out_already(said):
    assert "groups of 5.0 rows" not in said(model(), marginalize=["u"])
