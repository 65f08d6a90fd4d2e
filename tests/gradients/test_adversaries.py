"""Models that are to break second-order control variates: no chain is lost without a word."""

import pytest

from lost_chains import logged, lost, run_chain, worst
from model_collection import models_of
from model_collection.hard import posterior

from pymc_sghmc import SGHMC

pytestmark = pytest.mark.slow

HARD = models_of("hard")

SEEDS, INNER = 4, 20_000
NUMBA = {"mode": "NUMBA"}  # steps by the hundred thousand


def fates(name, **settings):
    """Of each chain whether it is lost, and whether anything was told of it."""
    hard = HARD[name].make()
    settings = {
        "batch_size": "auto",
        "gradient": "second_order",
        "compile_kwargs": NUMBA,
    } | settings
    with logged() as log:
        step = SGHMC(model=hard.model, **settings)
    right, start = posterior(hard), hard.model.initial_point()
    ended = [run_chain(step, start, seed, INNER) for seed in range(SEEDS)]
    return [
        (lost(worst(chain, right)), bool(log or chain.told or chain.told_while_tuning))
        for chain in ended
    ]


@pytest.mark.parametrize("name", HARD)
def test_no_chain_is_lost_silently(name):
    assert (True, False) not in fates(name)


def test_few_rows_lose_no_chain_and_need_no_word():
    assert fates("few_100") == [(False, False)] * SEEDS


def test_chains_that_are_too_hot_without_a_word_are_found():
    # with all settings by hand and a budget that allows for it: η N/(2αn) is about 1.7
    hot = {"gradient": "plain", "batch_size": 60, "learning_rate": 0.25, "friction": 0.6}
    silent = {"noise_estimate": None, "preconditioner": "dense", "target_bias": 0.99}
    assert fates("few_500", **hot, **silent) == [(True, False)] * SEEDS
