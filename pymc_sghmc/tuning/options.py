"""The gradients, and the numbers of rows in a minibatch, among which a chain chooses.

Knows set-ups, no rule and no settings.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE, MAX_MULTIPLIER, ChainTuning
from pymc_sghmc.tuning.gradient_noise import MOST_FAR_NOISE
from pymc_sghmc.tuning.setup import Setup
from pymc_sghmc.tuning.setup_request import SetupRequest
from pymc_sghmc.tuning.sizes import (
    RowChoice,
    RowCounts,
    all_rows_are_in_question,
    all_rows_may_be_used,
    sizes_in_question,
)

__all__ = ["options", "resized"]


def options(
    setup: Setup,
    request: SetupRequest | None,
    may_change: bool,
    data: RowCounts | None = None,
    choice: RowChoice = RowChoice.FREE,
) -> list[ChainTuning]:
    """Return the gradients that may be used after this set-up, without settings.

    Parameters
    ----------
    setup : Setup
    request : SetupRequest
        By which the chain knows the set-up.
    may_change : bool
        Whether the plain gradient is one of them beside control variates.
    data : RowCounts, optional
        Whose minibatches' number of rows is to be chosen, too.
    choice : RowChoice
        Among which numbers.
    """
    # Where no Gaussian is near, chains seldom visit some places, which short draws don't show.
    is_gaussian = setup.fit.is_mode and setup.is_gaussian
    new = partial(
        ChainTuning, request=request, n_steps_multiplier=1.0 if is_gaussian else MAX_MULTIPLIER
    )
    noise = setup.noise
    far_out = setup.limits.far_out
    limit = min(MAX_LEARNING_RATE, far_out)
    tunings = []
    if noise.second_order is not None and (data is not None or noise.second_order_serves):
        limit_of_second = min(setup.limits.second_order, far_out)
        tunings.append(new(order=2, noise=noise.second_order, limit=limit_of_second))
    if noise.first_order is not None:
        tunings.append(new(order=1, noise=noise.first_order, limit=limit))
    if not tunings or may_change:
        tunings.append(new(order=0, noise=noise.plain, limit=limit))
    if data is None:
        return tunings
    # far out on one side minibatches are noisier than the force back can bear
    is_steep = bool(setup.skewed) and noise.second_order is None
    # the noise of second order is known around the fit, and isn't measured where chains are
    if (is_steep or setup.fit.is_astray) and all_rows_may_be_used(data):
        return [_exact(new(order=0, noise=noise.plain), setup, data)]
    return [sized for tuning in tunings for sized in _of_sizes(tuning, setup, data, choice)]


def _of_sizes(
    tuning: ChainTuning, setup: Setup, data: RowCounts, choice: RowChoice
) -> list[ChainTuning]:
    """Return the same with other numbers of rows, as far as they may serve."""
    [n, *_] = data.noisy_batch_sizes
    sizes = sizes_in_question(data, tuning.order, choice)
    if tuning.order == 2:
        far_noise = setup.noise.second_order_far
        sizes = [size for size in sizes if far_noise * n / size <= MOST_FAR_NOISE]
    tuning = replace(tuning, rows=n, rows_of_each=data.rows_of_each)
    return [_of_size(tuning, size, data) for size in sizes]


def _of_size(tuning: ChainTuning, size: int, data: RowCounts) -> ChainTuning:
    """Return the same with another number of rows."""
    assert tuning.rows is not None
    share = tuning.rows / size if size < max(data.n_rows) else 0.0
    return replace(tuning, rows=size, noise=tuning.noise * share)


def resized(tuning: ChainTuning, setup: Setup, data: RowCounts) -> list[ChainTuning]:
    """Return the same with more rows, and the exact gradient from all of them.

    Parameters
    ----------
    tuning : ChainTuning
        With the noise that its chain has measured, and a number of rows.
    setup : Setup
    data : RowCounts
        As the noise of the set-up was measured.
    """
    assert tuning.rows is not None
    sizes = sizes_in_question(data, tuning.order)
    larger = [_of_size(tuning, size, data) for size in sizes if size > tuning.rows]
    if not all_rows_are_in_question(data):
        return larger
    return [*larger, _exact(tuning, setup, data)]


def _exact(tuning: ChainTuning, setup: Setup, data: RowCounts) -> ChainTuning:
    """Return the same with the exact gradient, from all rows."""
    # a limit that came of noise isn't one of it
    limit = min(MAX_LEARNING_RATE, setup.limits.far_out)
    noise = np.zeros_like(tuning.noise)
    return replace(tuning, order=0, rows=max(data.n_rows), noise=noise, limit=limit)
