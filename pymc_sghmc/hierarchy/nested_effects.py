"""What rows say of effects of groups within larger groups, each level given those above it.

Rows that see the sum of an effect and of that of a larger group know the sum, and little of each
alone. With the likelihood as a Gaussian in all effects, the smaller groups' are integrated out with
their prior one level after the other (Gaussian elimination): what is left is what the rows say of
the larger groups. Coefficients of one group, such as an intercept and a slope, go together: the
same rows see both, and what either says of a larger group the other says in part, too. Knows
matrices, no models and no passes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scipy.sparse import csr_array, diags_array
from scipy.sparse.csgraph import connected_components

from pymc_sghmc.protocols import Array

__all__ = ["Block", "Nested", "conditional_laws"]

NONE = 1e-8  # of the largest number of a block, below which it is none
MOST_COEFFICIENTS = 16  # coefficients of a group whose dependence is looked at


class Block(NamedTuple):
    """Second derivatives of −log-likelihood by two effects, the first of groups in the second's."""

    above: Array  # the entry of the second that each of the first is in
    size: Array  # and the derivative by both


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

    Pairs of effects that aren't nested, such as users and films, count as unrelated. The law that
    is returned is one of each entry alone, without the others of its group. With the prior it has
    the mean of the law of all of them together.

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
    own = [_of_groups(hessian[place, place]) for place in places]
    between = {pair: _nested(hessian, places, *pair) for pair in pairs}
    nested = {pair: matrix for pair, matrix in between.items() if matrix is not None}
    linear = [slope[place] + H @ z[place] for place, H in zip(places, own, strict=True)]
    by_shared = [shared[place] for place in places]
    for (i, j), matrix in nested.items():
        linear[i] = linear[i] + matrix @ z[places[j]]
        linear[j] = linear[j] + matrix.T @ z[places[i]]
    precision = np.zeros_like(z)
    for i, place in enumerate(places):
        precision[place] = np.maximum(own[i].diagonal(), 0.0)
        covariance = _posterior_covariance(own[i])  # given the larger groups
        larger = {j: matrix for (one, j), matrix in nested.items() if one == i}
        for j, matrix in larger.items():
            through = (matrix.T @ covariance).tocsr()
            own[j] = own[j] - through @ matrix
            linear[j] = linear[j] - through @ linear[i]
            by_shared[j] = by_shared[j] - through @ by_shared[i]
            for k, other in larger.items():
                if (j, k) in nested:
                    nested[j, k] = nested[j, k] - through @ other
        alone = (diags_array(precision[place] + 1) @ covariance).tocsr()
        linear[i] = alone @ linear[i]
        by_shared[i] = alone @ by_shared[i]
        nested |= {(i, j): (alone @ matrix).tocsr() for j, matrix in larger.items()}
    return Nested(
        precision=precision,
        linear=np.concatenate(linear),
        blocks={pair: _block(matrix) for pair, matrix in nested.items()},
        shared=np.concatenate(by_shared),
    )


def _posterior_covariance(hessian: csr_array) -> csr_array:
    """Return (H + 1)⁻¹, for H of many groups that don't depend on each other.

    Of a curvature that is negative, away from a mode, nothing is known: it counts as zero.
    """
    n = hessian.shape[0]
    n_groups, group = connected_components(hessian, directed=False)
    sizes = np.bincount(group, minlength=n_groups)
    order = np.argsort(group, kind="stable")
    starts = np.cumsum(sizes) - sizes
    rows, columns, values = [], [], []
    for size in np.unique(sizes):
        entries = order[starts[sizes == size][:, None] + np.arange(size)]
        row = np.repeat(entries, size, axis=1).ravel()
        column = np.tile(entries, size).ravel()
        matrices = hessian[row, column].reshape(-1, size, size)
        curvatures, vectors = np.linalg.eigh((matrices + matrices.swapaxes(1, 2)) / 2)
        weights = 1 / (np.maximum(curvatures, 0.0) + 1)
        inverse = (vectors * weights[:, None, :]) @ vectors.swapaxes(1, 2)
        rows.append(row)
        columns.append(column)
        values.append(inverse.ravel())
    places = (np.concatenate(rows), np.concatenate(columns))
    return csr_array((np.concatenate(values), places), shape=(n, n))


def _of_groups(hessian: csr_array) -> csr_array:
    """Return the Hessian of an effect; its diagonal where groups depend on each other.

    What is rounding is told by both entries' own curvatures: those of some groups may be many
    orders of magnitude larger than those of others.
    """
    matrix = _finite(hessian).tocoo()
    sizes = np.sqrt(np.abs(matrix.diagonal()))
    is_rounding = np.abs(matrix.data) <= NONE * sizes[matrix.row] * sizes[matrix.col]
    matrix.data[is_rounding] = 0.0
    matrix.eliminate_zeros()
    _, group = connected_components(matrix, directed=False)
    if np.bincount(group).max(initial=0) <= MOST_COEFFICIENTS:
        return matrix.tocsr()
    return diags_array(matrix.diagonal()).tocsr()


def _nested(hessian: csr_array, places: Sequence[slice], i: int, j: int) -> csr_array | None:
    """Return the block of two effects; None where an entry's rows see several of the second."""
    matrix = _finite(hessian[places[i], places[j]])
    matrix.data[np.abs(matrix.data) <= NONE * np.abs(matrix.data).max(initial=0.0)] = 0.0
    matrix.eliminate_zeros()
    numbers = np.diff(matrix.indptr)
    if matrix.nnz == 0 or numbers.max() > 1:
        return None
    return matrix


def _finite(matrix: csr_array) -> csr_array:
    """Return a matrix whose entries that are no numbers say nothing."""
    matrix = csr_array(matrix)
    matrix.data = np.nan_to_num(matrix.data, nan=0.0, posinf=0.0, neginf=0.0)
    return matrix


def _block(matrix: csr_array) -> Block:
    """Return the one entry in each row of the matrix that there is at most."""
    above = np.zeros(matrix.shape[0], dtype=np.int64)
    size = np.zeros(matrix.shape[0])
    places = matrix.tocoo()
    above[places.row] = places.col
    size[places.row] = places.data
    return Block(above, size)
