"""Derivatives J = ∂ζ/∂θ of the linear predictors ζ of rows, where they are constant.

Found from ζ at a few positions: of a group's effects a row sees one entry, and two positions tell
which it is. Kept as a sparse matrix where most of it is zero. Knows the functions of rows and their
parameters, no sampler and no way of finding a centre.
"""

import math

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from scipy.sparse import bsr_array, coo_array, csr_array, issparse

from pymc_sghmc.gradients.metric import Dense, Metric
from pymc_sghmc.protocols import Array

__all__ = ["Jacobian", "Zetas", "columns_of", "jacobian"]

FAR = 2.0**10  # of a step: ζ is linear, and a long way has the smaller relative error of rounding
MANY = 1000  # parameters, above which ...
MOST_POSITIONS = 300  # ... ζ is taken at so many at most
FEW = 3  # entries, as many as there are positions that would find which of them a row sees
ZERO = 1e-9  # of the largest derivative by an entry, below which there is none
DENSE = 0.1  # share of the numbers in J that aren't zero, above which it is a full matrix
MOVES = 3  # of a column's entries together
AT_ONCE = 64  # parameters, up to which each is moved: rows are read once, whatever they see
NUMBERS = 2**20  # in ζ at all positions of one pass

Zetas = Callable[[Array], Array]  # ζ of some rows at some positions, (P, n, m)


class Jacobian:
    """Derivatives of n rows with m numbers each by all d parameters.

    Parameters
    ----------
    J : array or csr_array of shape (n·m, d)
    m : int
    n_passes : float
        Over the rows that it took.
    at_zero : array of shape (n·m,), optional
        ζ where all parameters are zero, if that is needed.
    """

    def __init__(self, J: Any, m: int, n_passes: float, at_zero: Array | None = None) -> None:
        self.J = J
        self.m = m
        self.n_passes = n_passes
        self.at_zero = at_zero
        self.n, self.d = J.shape[0] // m, J.shape[1]

    @property
    def is_sparse(self) -> bool:
        """Whether J is kept as a sparse matrix."""
        return not isinstance(self.J, np.ndarray)

    @property
    def n_entries(self) -> int:
        """Numbers in J that are kept."""
        return int(self.J.nnz if self.is_sparse else self.J.size)

    @property
    def nbytes(self) -> int:
        """Memory that J takes."""
        return int(self.J.data.nbytes + self.J.indices.nbytes if self.is_sparse else self.J.nbytes)

    def zeta(self, thetas: Array) -> Array:
        """Return ζ of the rows at P positions (P, d), (P, n, m)."""
        assert self.at_zero is not None
        zeta = thetas.astype(float, copy=False) @ self.J.T + self.at_zero
        return zeta.reshape(-1, self.n, self.m)

    def after(self, T: Any) -> "Jacobian":
        """JT, of ζ by other coordinates of which the parameters have derivatives T; None is 1."""
        if T is None:
            return self
        product = self.J @ T
        if self.is_sparse and not issparse(product):
            product = csr_array(product)
        return Jacobian(product, self.m, self.n_passes)

    def hessian(self, C: Array) -> Any:
        """Σ JᵀCJ with C of each row, (n, m, m): an array or csr_array of shape (d, d)."""
        product = self.J.T @ self._times(C)
        return product.tocsr() if self.is_sparse else product

    def diagonal(self, C: Array) -> Array:
        """Diagonal of Σ JᵀCJ with C of each row, (n, m, m)."""
        CJ = self._times(C)
        return np.asarray((self.J.multiply(CJ) if self.is_sparse else self.J * CJ).sum(axis=0))

    def _times(self, C: Array) -> Any:
        """CJ, as J (n·m, d)."""
        if self.is_sparse:
            numbers = np.arange(self.n + 1)
            shape = (self.n * self.m, self.n * self.m)
            return bsr_array((C, numbers[:-1], numbers), shape=shape).tocsr() @ self.J
        if self.m == 1:
            return C.reshape(-1, 1) * self.J
        CJ = C @ self.J.reshape(self.n, self.m, self.d)
        return CJ.reshape(self.J.shape)

    def total(self, c: Array) -> Array:
        """Σ Jᵀc with c of each row, (n, m)."""
        return self.J.T @ c.ravel()

    def spread(self, coordinates: Metric) -> Array:
        """Covariance of ζ of each row where θ = Lφ and that of φ is 1, (n, m, m)."""
        if not self._has_few_directions(coordinates):
            JL = (self.J @ coordinates.matrix()).reshape(self.n, self.m, self.d)
            return JL @ JL.swapaxes(1, 2)
        scales, U, c = coordinates.decomposed()  # type: ignore[attr-defined]
        scaled = csr_array(self.J * scales[None])
        own = np.empty((self.n, self.m, self.m))
        for i in range(self.m):
            for j in range(i, self.m):
                both = scaled[i :: self.m].multiply(scaled[j :: self.m]).sum(axis=1)
                own[:, i, j] = own[:, j, i] = both
        along = (scaled @ U.T).reshape(self.n, self.m, len(U))
        return own + along * (2 * c + np.square(c)) @ along.swapaxes(1, 2)

    def squares(self, c: Array, coordinates: Metric, weights: Array) -> Array:
        """Σ w (LᵀJᵀc)² with c and a weight w of each row."""
        by_row = self._by_row(c)
        if not self._has_few_directions(coordinates):
            return weights @ np.square(by_row @ coordinates.matrix())
        scales, U, size = coordinates.decomposed()  # type: ignore[attr-defined]
        forces = csr_array(by_row * scales[None])
        along = forces @ U.T  # (n, r)
        cU = size[:, None] * U
        both = (forces.T @ (weights[:, None] * along)).T  # (r, d)
        square = forces.power(2).T @ weights + 2 * (both * cU).sum(axis=0)
        return square + ((along.T @ (weights[:, None] * along)) @ cU * cU).sum(axis=0)

    def _by_row(self, c: Array) -> Any:
        """Jᵀc of each row, (n, d)."""
        if not self.is_sparse:
            return np.einsum("nad,na->nd", self.J.reshape(self.n, self.m, self.d), c)
        ends = np.arange(self.n + 1) * self.m
        shape = (self.n, self.n * self.m)
        return csr_array((c.ravel(), np.arange(self.n * self.m), ends), shape=shape) @ self.J

    def _has_few_directions(self, coordinates: Metric) -> bool:
        """Whether the work grows with what J holds, and not with d²."""
        return self.is_sparse and not isinstance(coordinates, Dense)


def jacobian(
    zetas: Zetas, shapes: Sequence[tuple[int, ...]], error: float | None = None
) -> Jacobian | None:
    """Find J of some rows from ζ at a few positions.

    Moved together, the entries of which a row sees one move its ζ by J, and moved by j each by jJ,
    which tells the entry.

    Parameters
    ----------
    zetas : callable
        ζ of the rows at P positions (P, d), (P, n, m).
    shapes : list of tuple
        Of the parameters, in the order of a position.
    error : float, optional
        Relative one that a ζ which is linear may have. Default: that of rounding.

    Returns
    -------
    Jacobian or None
        None if ζ isn't linear, or if it would take too many positions.
    """
    probe = _Probe(zetas, sum(map(math.prod, shapes)), error)
    found = _Found((probe.here.size, probe.d))
    columns = []
    if len(probe.by_each):
        found.add(np.arange(probe.d), probe.by_each)
    else:
        columns = list(columns_of(shapes))
    one_by_one = [column for column in columns if column.size <= FEW]
    for column, changes in probe.of_large([c for c in columns if c.size > FEW]):
        entries = _one_entry(column, changes, probe.exact)
        if entries is None:
            one_by_one.append(column)
        else:
            found.entries.append(entries)
    if one_by_one:
        places = np.concatenate(one_by_one)
        if probe.d > MANY and probe.n_positions + places.size > MOST_POSITIONS:
            return None
        for some, change in probe.of_places(places):
            found.add(some, change / FAR)
    J = found.matrix()
    if not probe.agrees_with(J):
        return None
    return Jacobian(J, probe.m, probe.n_passes, probe.here.astype(float, copy=False))


class _Found:
    """What is known of a matrix, none of whose entries is found twice.

    Attributes
    ----------
    entries : list of (rows, columns, values)
    full : list of (columns, values)
        Whole columns, of which much isn't zero; values as (columns, rows).
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.entries: list[tuple[Array, Array, Array]] = []
        self.full: list[tuple[Array, Array]] = []

    def add(self, columns: Array, values: Array) -> None:
        """Add whole columns, with values (columns, rows)."""
        if np.count_nonzero(values) > DENSE * values.size:
            self.full.append((columns, values))
            return
        self.entries.append(_not_zero(columns, values))

    def matrix(self) -> Any:
        """Return the matrix: a full one, or sparse where few entries aren't zero."""
        n_entries = sum(values.size for _, _, values in self.entries)
        n_entries += sum(int(np.count_nonzero(values)) for _, values in self.full)
        if n_entries <= DENSE * math.prod(self.shape):
            parts = [*self.entries, *[_not_zero(*columns) for columns in self.full]]
            rows, columns, values = map(np.concatenate, zip(*parts, strict=True))
            return coo_array((values, (rows, columns)), shape=self.shape).tocsr()
        if len(self.full) == 1 and np.array_equal(self.full[0][0], np.arange(self.shape[1])):
            return self.full[0][1].T
        by_column = np.zeros(self.shape[::-1])
        for rows, columns, values in self.entries:
            by_column[columns, rows] = values
        for columns, values in self.full:
            by_column[columns] = values
        return by_column.T


def _not_zero(columns: Array, values: Array) -> tuple[Array, Array, Array]:
    """Return rows, columns and values of what isn't zero in whole columns, (columns, rows)."""
    places, rows = np.nonzero(values)
    return rows, columns[places], values[places, rows]


def columns_of(shapes: Sequence[tuple[int, ...]]) -> Iterator[Array]:
    """Yield places in a position of entries of which a row may see a single one."""
    start = 0
    for shape in shapes:
        size = math.prod(shape)
        places = start + np.arange(size).reshape(shape)
        start += size
        if not shape:
            yield places.reshape(1)
        elif size:
            groups = int(np.argmax(shape))  # other axes are several effects of each group
            yield from np.moveaxis(places, groups, -1).reshape(-1, shape[groups])


class _Probe:
    """Takes ζ at positions, beside that at zero, and counts them.

    Attributes
    ----------
    by_each : array of shape (d, n·m)
        Derivatives of ζ by each parameter; by none where there are many.
    """

    def __init__(self, zetas: Zetas, d: int, error: float | None) -> None:
        self._elsewhere = np.random.default_rng(1).standard_normal(d)  # J isn't found from it
        moved = FAR * np.eye(d if d <= AT_ONCE else 0, d)
        values = zetas(np.vstack([np.zeros(d), self._elsewhere, moved]))
        self._zetas = zetas
        self.d = d
        self.m = values.shape[2]
        by_position = values.reshape(len(values), -1)
        self.here: Array = by_position[0]
        self._change_elsewhere = by_position[1] - self.here
        by_each = by_position[2:] - self.here
        self.by_each = by_each.astype(float, copy=False)
        self.by_each /= FAR
        self.exact = error or np.finfo(values.dtype).eps ** 0.5
        self.n_positions = 2 + len(moved)
        self.n_passes = 1  # over the rows: each takes many positions

    def of_large(self, columns: Sequence[Array]) -> Iterator[tuple[Array, list[Array]]]:
        """Yield each column with the changes of ζ, (n·m,) each, by its three moves."""
        moves = ((column, move) for column in columns for move in _moves(column.size))
        changes = self._changes(moves, MOVES * len(columns))
        for column in columns:
            yield column, [next(changes) for _ in range(MOVES)]

    def of_places(self, places: Array) -> Iterator[tuple[Array, Array]]:
        """Yield some of the places in a position, and the change of ζ by each, (places, n·m)."""
        at_a_time = self._positions_at_a_time
        for start in range(0, places.size, at_a_time):
            some = places[start : start + at_a_time]
            positions = np.zeros((some.size, self.d))
            positions[np.arange(some.size), some] = FAR
            yield some, self._at(positions).astype(float, copy=False)

    def agrees_with(self, J: Any) -> bool:
        """Whether J tells ζ in a direction that it wasn't found from."""
        off = np.abs(self._change_elsewhere - J @ self._elsewhere)
        size = np.abs(J) @ np.abs(self._elsewhere) + np.abs(self.here)
        return bool((off <= self.exact * size + 1e-300).all())

    @property
    def _positions_at_a_time(self) -> int:
        return max(1, NUMBERS // max(1, self.here.size))

    def _changes(self, moves: Iterator[tuple[Any, Any]], n_moves: int) -> Iterator[Array]:
        """Yield the change of ζ by each of some moves, many in one pass."""
        at_a_time = self._positions_at_a_time
        for start in range(0, n_moves, at_a_time):
            positions = np.zeros((min(at_a_time, n_moves - start), self.d))
            for position in positions:
                places, by = next(moves)
                position[places] = FAR * by
            yield from self._at(positions).astype(float)

    def _at(self, positions: Array) -> Array:
        """ζ beside that at zero, (P, n·m)."""
        self.n_positions += len(positions)
        self.n_passes += 1
        return self._zetas(positions).reshape(len(positions), -1) - self.here


def _moves(size: int) -> tuple[Array, Array, Array]:
    """By how much the entries of a column are moved: alike, by their number, and at random."""
    numbers = np.arange(1.0, size + 1) / size
    return np.ones(size), numbers, np.random.default_rng(0).uniform(-1, 1, size)


def _one_entry(
    column: Array, changes: Sequence[Array], exact: float
) -> tuple[Array, Array, Array] | None:
    """Rows, columns and values of J if each row sees one of the entries at most."""
    one, numbered, random = changes
    _, _, by = _moves(column.size)
    size = np.abs(one).max(initial=0.0)
    rows = np.flatnonzero(np.abs(one) > ZERO * size)
    share = numbered[rows] / one[rows]
    place = np.nan_to_num(np.clip(np.rint(share * column.size) - 1, 0, column.size - 1))
    place = place.astype(int)
    expected = np.zeros(one.size)
    expected[rows] = one[rows] * by[place]
    off = np.abs(random - expected).max(initial=0.0)
    if not off <= exact * size:
        return None
    return rows, column[place], one[rows] / FAR
