"""What rows say of effects of groups within larger groups, each level given those above it.

Rows that see the sum of an effect and of that of a larger group know the sum, and little of each
alone. With the likelihood as a Gaussian in all effects, the smaller groups' are integrated out with
their prior one level after the other (Gaussian elimination): what is left is what the rows say of
the larger groups. Knows matrices, no models and no passes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scipy.sparse import csr_array

from pymc_sghmc.protocols import Array

__all__ = ["Nested", "conditional_laws"]

NONE = 1e-8  # of the largest number of a block, below which it is none


class Nested(NamedTuple):
    """Likelihood of each entry given the effects of larger groups, those of smaller ones out."""

    precision: Array  # of z, (n,)
    linear: Array  # coefficient of z, at zero of all effects of larger groups, (n,)
    above: Array  # for each pair and entry of its first the entry of the second, ...
    share: Array  # ... and how much ``linear`` falls with its z


def conditional_laws(
    hessian: csr_array,
    slope: Array,
    z: Array,
    places: Sequence[slice],
    pairs: Sequence[tuple[int, int]],
) -> Nested:
    """Take the likelihood of standardised effects z, beside which they are N(0, 1), level by level.

    Pairs of effects that aren't nested, such as users and films, count as unrelated.

    Parameters
    ----------
    hessian : csr_array of shape (n, n)
        Of −log-likelihood, A.
    slope : array of shape (n,)
        Gradient of the log-likelihood at ...
    z : array of shape (n,)
        ... a typical point.
    places : list of slice
        Of the effects, those of larger groups last.
    pairs : list of (int, int)
        Of these that may be nested.
    """
    precision = hessian.diagonal().copy()
    blocks = {pair: _nested(hessian, places, *pair) for pair in pairs}
    linear = slope + precision * z  # at zero of all effects
    for (i, j), block in blocks.items():
        if block is not None:
            above, size = block
            linear[places[i]] += size * z[places[j]][above]
            n = places[j].stop - places[j].start
            linear[places[j]] += np.bincount(above, size * z[places[i]], minlength=n)
    for i, own in enumerate(places):
        widened = 1 / (precision[own] + 1)
        later = [j for j in range(len(places)) if blocks.get((i, j)) is not None]
        for j in later:
            above, size = blocks[i, j]  # type: ignore[misc]
            n = places[j].stop - places[j].start
            precision[places[j]] -= np.bincount(above, size**2 * widened, minlength=n)
            linear[places[j]] -= np.bincount(above, size * widened * linear[own], minlength=n)
            for k in later:
                if k > j and blocks.get((j, k)) is not None:
                    upper, between = blocks[j, k]  # type: ignore[misc]
                    lost = np.bincount(above, size * widened * blocks[i, k][1], minlength=n)  # type: ignore[index]
                    blocks[j, k] = upper, between - lost
    found = [
        (np.zeros(places[i].stop - places[i].start, dtype=np.int64),) * 2
        if block is None
        else block
        for (i, _), block in blocks.items()
    ]
    none = [np.zeros(0, dtype=np.int64)]
    return Nested(
        precision=np.maximum(precision, 0.0),
        linear=linear,
        above=np.concatenate([above for above, _ in found] or none),
        share=np.concatenate([size for _, size in found] or none).astype(float),
    )


def _nested(
    hessian: csr_array, places: Sequence[slice], i: int, j: int
) -> tuple[Array, Array] | None:
    """Return for each entry of one effect the entry of another that it is in, and their A.

    None where an entry's rows see several of these.
    """
    block = csr_array(hessian[places[i], places[j]])
    block.data[np.abs(block.data) <= NONE * np.abs(block.data).max(initial=0.0)] = 0.0
    block.eliminate_zeros()
    numbers = np.diff(block.indptr)
    if block.nnz == 0 or numbers.max() > 1:
        return None
    above = np.zeros(numbers.size, dtype=np.int64)
    size = np.zeros(numbers.size)
    above[numbers > 0] = block.indices
    size[numbers > 0] = block.data
    return above, size
