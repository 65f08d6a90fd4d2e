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

__all__ = ["Block", "Nested", "conditional_laws"]

NONE = 1e-8  # of the largest number of a block, below which it is none


class Block(NamedTuple):
    """Second derivatives of −log-likelihood by two effects, the first of groups in the second's."""

    above: Array  # the entry of the second that each of the first is in
    size: Array  # and the derivative by both

    def summed(self, values: Array, n: int) -> Array:
        """Sum values of entries of the first, times the derivative, over each of the second's n."""
        return np.bincount(self.above, self.size * values, minlength=n)


class Nested(NamedTuple):
    """Likelihood of each entry given the effects of larger groups, those of smaller ones out."""

    precision: Array  # of z, (n,)
    linear: Array  # coefficient of z, at zero of all effects of larger groups, (n,)
    # of pairs that are nested: by how much ``linear`` of the first falls with z of the second
    blocks: dict[tuple[int, int], Block]
    shared: Array  # by how much ``linear`` falls with shared parameters, (n, m)


def conditional_laws(
    hessian: csr_array,
    slope: Array,
    z: Array,
    places: Sequence[slice],
    pairs: Sequence[tuple[int, int]],
    shared: Array,
) -> Nested:
    """Take the likelihood of standardised effects z, beside which they are N(0, 1), level by level.

    Pairs of effects that aren't nested, such as users and films, count as unrelated.

    Parameters
    ----------
    hessian : csr_array of shape (n, n)
        Of −log-likelihood.
    slope : array of shape (n,)
        Gradient of the log-likelihood at ...
    z : array of shape (n,)
        ... a typical point.
    places : list of slice
        Of the effects, those of larger groups last.
    pairs : list of (int, int)
        Of these that may be nested.
    shared : array of shape (n, m)
        Second derivatives of −log-likelihood by z and by parameters that all groups share.
    """
    blocks = {pair: _block(hessian, places, *pair) for pair in pairs}
    nested = {pair: block for pair, block in blocks.items() if block is not None}
    sizes = [place.stop - place.start for place in places]
    precision = hessian.diagonal().copy()
    linear = slope + precision * z
    shared = shared.copy()
    for (i, j), block in nested.items():
        linear[places[i]] += block.size * z[places[j]][block.above]
        linear[places[j]] += block.summed(z[places[i]], sizes[j])
    for i, own in enumerate(places):
        variance = 1 / (precision[own] + 1)  # given the larger groups
        larger = {j: block for (one, j), block in nested.items() if one == i}
        for j, block in larger.items():
            precision[places[j]] -= block.summed(variance * block.size, sizes[j])
            linear[places[j]] -= block.summed(variance * linear[own], sizes[j])
            for column, own_column in zip(shared[places[j]].T, shared[own].T, strict=True):
                column -= block.summed(variance * own_column, sizes[j])
            for k, other in larger.items():
                if (j, k) in nested:
                    between = nested[j, k]
                    lost = block.summed(variance * other.size, sizes[j])
                    nested[j, k] = between._replace(size=between.size - lost)
    return Nested(
        precision=np.maximum(precision, 0.0),
        linear=linear,
        blocks=nested,
        shared=shared,
    )


def _block(hessian: csr_array, places: Sequence[slice], i: int, j: int) -> Block | None:
    """Return the block of two effects; None where an entry's rows see several of the second."""
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
    return Block(above, size)
