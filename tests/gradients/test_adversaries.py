"""Models that are to break second-order control variates: no chain is lost without a word."""

import pytest

from hard_models import MODELS, posterior
from lost_chains import lost, run_chain, worst

from pymc_sghmc import SGHMC

pytestmark = pytest.mark.slow

SEEDS, INNER = 4, 20_000


def chains(name, n=SEEDS, **settings):
    hard = MODELS[name]()
    step = SGHMC(
        **{"batch_size": "auto", "gradient": "second_order", "model": hard.model, **settings}
    )
    start = hard.model.initial_point()
    ended = [run_chain(step, start, seed, INNER) for seed in range(n)]
    return ended, [worst(chain, posterior(hard)) for chain in ended]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "cauchy"])
def test_no_chain_is_lost_silently(name):
    ended, errors = chains(name)
    silent = [
        chain.seed
        for chain, its in zip(ended, errors, strict=True)
        if lost(its) and not (chain.told or chain.told_while_tuning)
    ]
    assert not silent


def test_rows_as_long_as_cauchy_numbers_are_refused_in_words():
    with pytest.raises(ValueError, match="near the starting point"):
        chains("cauchy", 1)
