"""The gradients, and the numbers of rows in a minibatch, among which a chain chooses.

Knows set-ups, no rule and no settings.
"""

from functools import partial

from pymc_sghmc.tuning.budget import MAX_LEARNING_RATE, MOST_STRETCH, ChainTuning
from pymc_sghmc.tuning.setup import MOST_FAR_NOISE

__all__ = ["options"]

FEW = (10, 20, 50, 100, 200)  # rows, beside those of the search
MANY = (100, 200, 1000, 2000)
SIZES = MANY, MANY, FEW  # by the order of the gradient
# groups with all of their rows; where there aren't MANY_GROUPS each weighs much, far out most of
# all
FEWEST = 2
FEWEST_OF_FEW = 10
MANY_GROUPS = 1000


def options(setup, request, may_change, data=None) -> list[ChainTuning]:
    """Return the gradients that may be used after this set-up, without settings.

    Parameters
    ----------
    setup : Setup
    request : SetupRequest
        Which a chain keeps of it.
    may_change : bool
        Whether the plain gradient is one of them beside control variates.
    data : InMemory, optional
        Whose minibatches' number of rows is to be chosen, too.
    """
    noise = setup.noise
    far_out = setup.limits.far_out
    # where no Gaussian is near, chains go where they seldom were, which short draws don't show
    stretch = 1.0 if setup.fit.is_mode and setup.is_gaussian else MOST_STRETCH
    new = partial(ChainTuning, temperatures=[], request=request, stretch=stretch)
    found = []
    if noise.second_order is not None:
        found.append(new(2, noise.second_order, limit=min(setup.limits.second_order, far_out)))
    if noise.first_order is not None:
        found.append(new(1, noise.first_order, limit=min(MAX_LEARNING_RATE, far_out)))
    if not found or may_change:
        found.append(new(0, noise.plain, limit=min(MAX_LEARNING_RATE, far_out)))
    if data is None:
        return found
    return [sized for option in found for sized in _of_sizes(option, setup, data)]


def _of_sizes(option, setup, data) -> list[ChainTuning]:
    """Return the same with other numbers of rows, as far as they may serve."""
    [n, *_] = data.noisy_batch_sizes
    noisy = [rows for rows, is_noisy in zip(data.n_rows, data.is_noisy, strict=True) if is_noisy]
    each = data.rows_of_each
    fewest = FEWEST if max(noisy) >= MANY_GROUPS else FEWEST_OF_FEW
    sizes = dict.fromkeys(max(fewest, round(rows / each)) for rows in SIZES[option.order])
    sizes = [n, *(size for size in sizes if size <= max(noisy) // 2)]
    if option.order == 2:
        sizes = [
            size for size in sizes if setup.noise.second_order_far * n / size <= MOST_FAR_NOISE
        ]
    option = option._replace(rows_of_each=each)
    return [option._replace(rows=size, noise=option.noise * n / size) for size in sizes]
