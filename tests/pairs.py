"""All combinations of some choices, of which the default run takes few: every pair of two is in them."""

import itertools

import pytest

__all__ = ["pairs_of"]


def pairs_of(*choices):
    """Return all combinations; those that bring no new pair of two choices are marked slow."""
    choices = [list(values) for values in choices]
    numbers = [range(len(values)) for values in choices]
    missing = {pair for chosen in itertools.product(*numbers) for pair in _pairs(chosen)}
    quick = set()
    while missing:
        best = max(itertools.product(*numbers), key=lambda chosen: len(missing & _pairs(chosen)))
        quick.add(best)
        missing -= _pairs(best)
    return [
        pytest.param(
            *(values[i] for values, i in zip(choices, chosen, strict=True)),
            marks=() if chosen in quick else pytest.mark.slow,
        )
        for chosen in itertools.product(*numbers)
    ]


def _pairs(chosen):
    return set(itertools.combinations(enumerate(chosen), 2))
