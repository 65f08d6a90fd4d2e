"""A run of a single chain: its halves are compared, as there is nothing else to compare it with."""

import logging

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from pymc_sghmc import SGHMC
from pymc_sghmc.diagnostics.mixing import single_chain_warnings

N = 1000


def run_of(chains=1, target=1.0, **draws):
    """A result with these draws, (draw, ...), in each of its chains."""
    by_chain = {
        name: (
            ("chain", "draw", *[f"{name}_{i}" for i in range(values.ndim - 1)]),
            [values] * chains,
        )
        for name, values in draws.items()
    }
    statistics = {
        "configurational_temperature": (("chain", "draw"), np.ones((chains, N))),
        "target_temperature": (("chain", "draw"), np.full((chains, N), target)),
        "draw_weight": (("chain", "draw"), np.ones((chains, N))),
    }
    return xr.DataTree.from_dict(
        {"posterior": xr.Dataset(by_chain), "sample_stats": xr.Dataset(statistics)}
    )


def autoregression(rho, shape=(), seed=0):
    """Draws of a chain with this autocorrelation, of variance 1."""
    noise = np.random.default_rng(seed).standard_normal((N, *shape))
    draws = [noise[0]]
    for step in noise[1:]:
        draws.append(rho * draws[-1] + np.sqrt(1 - rho**2) * step)
    return np.array(draws)


def test_a_chain_that_drifts_is_told_by_name():
    run = run_of(good=autoregression(0.5), drifts=autoregression(0.999, (2, 2)))
    [warning] = single_chain_warnings(run)
    assert "R-hat of drifts[" in warning.message
    assert "4 of 4 in drifts" in warning.message
    assert "good" not in warning.message


def test_chains_that_mix_are_not():
    # 200 effective draws of each of 20 parameters: over halves, R-hat of 1.05 is 4.5 standard errors
    warned = [
        bool(single_chain_warnings(run_of(x=autoregression(0.6, (20,), seed)))) for seed in range(5)
    ]
    assert not any(warned)


def test_constants_and_missing_values_are_passed_over():
    x = np.ones((N, 2))
    x[:, 1] = np.nan  # effects that were integrated out and not drawn
    assert single_chain_warnings(run_of(x=x)) == []
    assert single_chain_warnings(run_of(x=x, y=autoregression(0.5))) == []


def test_only_a_single_chain_of_ours_is_looked_at():
    drifts = autoregression(0.999)
    assert single_chain_warnings(run_of(chains=2, x=drifts)) == []
    assert single_chain_warnings(run_of(target=0.0, x=drifts)) == []  # it descends to the mode
    of_nuts = xr.DataTree.from_dict({"posterior": run_of(x=drifts).posterior.to_dataset()})
    assert single_chain_warnings(of_nuts) == []


@pytest.mark.parametrize("learning_rate", [1e-10, "auto"])
def test_a_chain_that_hardly_moves_is_told_after_sampling(learning_rate, caplog):
    with pm.Model():
        mu = pm.Normal("mu")
        pm.Normal("y", mu, 1, observed=np.random.default_rng(1).normal(size=5000))
        step = SGHMC(batch_size=100, learning_rate=learning_rate)
        with caplog.at_level(logging.WARNING):
            pm.sample(draws=500, tune=200, chains=1, step=step, random_seed=2, progressbar=False)
    assert ("The only chain hasn't mixed" in caplog.text) == (learning_rate != "auto")
