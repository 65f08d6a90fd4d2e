"""What rows say of effects of groups within larger groups, each level given those above it.

Rows that see the sum of an effect and of that of a larger group know the sum, and little of each
alone. With the likelihood as a Gaussian in all effects, the smaller groups' are integrated out with
their prior one level after the other (Gaussian elimination): what is left is what the rows say of
the larger groups. Coefficients of one group, such as an intercept and a slope, go together: the
same rows see both, and what either says of a larger group the other says in part, too. Knows
matrices, no models and no passes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from scipy.sparse import csr_array, diags_array
from scipy.sparse.csgraph import connected_components

from pymc_sghmc.protocols import Array

__all__ = ["Block", "Nested", "conditional_laws"]

NONE = 1e-8  # of the largest number of a block, below which it is none
LEAST_LEFT = 1e-6  # of a curvature, below which smaller groups' rows are all that an effect has
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
    typical: Array,
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
    typical : array of shape (n,)
        The diagonal that the Hessian has at typical points. All of it is taken as it is there.
    """
    with np.errstate(all="ignore"):
        ratio = typical / hessian.diagonal()
    # of rows in a tail, where curvature is negative, nothing is known
    weights = np.sqrt(np.where((ratio > 0) & np.isfinite(ratio), ratio, 0.0))
    between = {pair: _nested(hessian, places, *pair) for pair in pairs}
    here = _Levels(
        own=[_of_groups(hessian[place, place]) for place in places],
        between={pair: matrix for pair, matrix in between.items() if matrix is not None},
        shared=[np.nan_to_num(shared[place], posinf=0.0, neginf=0.0) for place in places],
    )
    levels = _at_typical_points(here, [weights[place] for place in places])
    own, nested, by_shared = levels
    linear = [slope[place] + H @ z[place] for place, H in zip(places, own, strict=True)]
    for (i, j), matrix in nested.items():
        linear[i] = linear[i] + matrix @ z[places[j]]
        linear[j] = linear[j] + matrix.T @ z[places[i]]
    precision = np.zeros_like(z)
    for i, place in enumerate(places):
        precision[place] = np.maximum(own[i].diagonal(), 0.0)
        covariance = _by_groups(own[i], _beside_prior)  # given the larger groups
        larger = {j: matrix for (one, j), matrix in nested.items() if one == i}
        for j, matrix in larger.items():
            through = (matrix.T @ covariance).tocsr()
            linear[j] = linear[j] - through @ linear[i]
            _add(levels, j, larger, -through, by_shared[i])
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


class _Levels(NamedTuple):
    """Second derivatives of −log-likelihood by the effects of each level and by others."""

    own: list[csr_array]  # of the same level
    between: dict[tuple[int, int], csr_array]  # of the larger groups that they are in
    shared: list[Array]  # shared parameters


def _at_typical_points(here: _Levels, weights: Sequence[Array]) -> _Levels:
    """Give each group's rows the weight with which its own second derivatives are typical.

    In all second derivatives that these rows have a part in, those of larger groups included. With
    weights of their own they would not be those of any rows: what they have beside the smaller
    groups' is a small difference of large numbers, and coordinates would change where an intercept
    moves one way and all effects the other, which no row sees.

    Parameters
    ----------
    here : _Levels
        At one point.
    weights : list of array
        By level, the square roots of the factors by which the diagonal is multiplied.
    """
    found = _Levels(
        own=[csr_array(matrix.shape) for matrix in here.own],
        between={pair: csr_array(matrix.shape) for pair, matrix in here.between.items()},
        shared=[np.zeros_like(matrix) for matrix in here.shared],
    )
    # by rows that no smaller group has
    rest = _Levels(list(here.own), dict(here.between), list(here.shared))
    for i, root in enumerate(weights):
        diagonal = np.abs(rest.own[i].diagonal())
        has_rows = 1.0 * (diagonal > LEAST_LEFT * np.abs(here.own[i].diagonal()))
        left = (diags_array(has_rows) @ rest.own[i] @ diags_array(has_rows)).tocsr()
        inverse = _by_groups(left, _pseudo_inverse)
        weighted = diags_array(root) @ left @ diags_array(root)
        # of any derivative by these effects; those of no rows, rounding errors, stay
        change = (weighted @ inverse + diags_array(1.0 - has_rows)).tocsr()
        found.own[i] = (found.own[i] + weighted).tocsr()
        found.shared[i] = found.shared[i] + change @ rest.shared[i]
        larger = {j: matrix for (one, j), matrix in rest.between.items() if one == i}
        for j, matrix in larger.items():
            found.between[i, j] = (found.between[i, j] + change @ matrix).tocsr()
            as_smaller = (matrix.T @ inverse).tocsr()  # what moves rows as the larger group does
            changed = (as_smaller @ change).tocsr()
            _add(found, j, larger, changed, rest.shared[i])
            _add(rest, j, larger, -as_smaller, rest.shared[i])
    return found


def _add(
    levels: _Levels, j: int, larger: dict[int, csr_array], factor: csr_array, shared: Array
) -> None:
    """Add a multiple of second derivatives by smaller groups to those by the larger groups j.

    Parameters
    ----------
    levels : _Levels
        Which are changed.
    j : int
    larger : dict of {int: matrix}
        Second derivatives by the smaller groups and all larger ones.
    factor : matrix
    shared : array
        The same by the smaller groups and shared parameters.
    """
    levels.own[j] = levels.own[j] + factor @ larger[j]
    levels.shared[j] = levels.shared[j] + factor @ shared
    for k, other in larger.items():
        if (j, k) in levels.between:
            levels.between[j, k] = levels.between[j, k] + factor @ other


def _beside_prior(curvatures: Array) -> Array:
    """1/(c + 1). Of a curvature that is negative, away from a mode, nothing is known."""
    return 1 / (np.maximum(curvatures, 0.0) + 1)


def _pseudo_inverse(curvatures: Array) -> Array:
    """1/c of each matrix, without what is none beside its largest."""
    is_some = curvatures > NONE * np.abs(curvatures).max(axis=-1, keepdims=True)
    return np.where(is_some, 1 / np.where(is_some, curvatures, 1.0), 0.0)


def _by_groups(hessian: csr_array, function: Callable[[Array], Array]) -> csr_array:
    """Return a function of H, by its curvatures, where many groups don't depend on each other."""
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
        found = (vectors * function(curvatures)[:, None, :]) @ vectors.swapaxes(1, 2)
        rows.append(row)
        columns.append(column)
        values.append(found.ravel())
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
