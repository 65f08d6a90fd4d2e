"""Derivatives ∂ζ/∂θ of the linear predictors ζ of rows, where they are constant: full or sparse.

Knows the functions of rows and their unknowns, no sampler and no way of finding a centre.
"""

import math

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from scipy.sparse import bsr_array, csr_array

from pymc_sghmc.gradients.metric import Dense, Metric
from pymc_sghmc.protocols import Array

__all__ = ["Full", "MakeJacobian", "MakeSparse", "Sparse", "Zetas", "sparse"]

FAR = 2.0**10  # sds: ζ is linear, and a long way has the smaller relative error of rounding
FEW = 64  # entries of an unknown that are moved one by one, or columns of one
ZERO = 1e-9  # of the largest derivative by a column, below which there is none

Zetas = Callable[[Array], Array]  # ζ of some rows at a position, (n, m)
MakeSparse = Callable[[Zetas, Array, Array], "Sparse"]  # of ζ, a centre and sds
MakeJacobian = Callable[[Zetas, Array, Array], "Full | Sparse"]


def sparse(shapes: Sequence[tuple[int, ...]]) -> MakeSparse | None:
    """Return `Sparse` of the columns of which a row depends on one entry each, if there are such.

    Parameters
    ----------
    shapes : list of tuple
        Of the unknowns, in the order of a position.

    Returns
    -------
    callable or None
        None where there would be too many columns.
    """
    found = []
    start = 0
    for shape in shapes:
        size = math.prod(shape)
        places = start + np.arange(size).reshape(shape)
        start += size
        if size <= FEW:
            found += [place[None] for place in places.ravel()]
            continue
        groups = int(np.argmax(shape))  # other axes are several effects of each group
        apart = np.moveaxis(places, groups, -1).reshape(-1, shape[groups])
        if len(apart) > FEW:
            return None
        found += list(apart)
    return partial(Sparse, columns=found)


class Full:
    """Derivatives of some rows by all unknowns, J of shape (n, m, d).

    Parameters
    ----------
    zetas : callable
        ζ of the rows at a position, (n, m).
    centre : array of shape (d,)
    sds : array of shape (d,)
        Of the unknowns.
    """

    def __init__(self, zetas: Zetas, centre: Array, sds: Array) -> None:
        here = zetas(centre)
        self.n_points = 1 + centre.size
        self.J: Array = np.empty((*here.shape, centre.size))
        for i, sd in enumerate(sds):
            point = centre.copy()
            point[i] += FAR * sd
            self.J[:, :, i] = (zetas(point) - here) / (FAR * sd)

    def hessian(self, C: Array) -> Array:
        """Σ JᵀCJ with C of each row, (n, m, m)."""
        d = self.J.shape[-1]
        CJ = np.einsum("nab,nbd->nad", C, self.J)
        return self.J.reshape(-1, d).T @ CJ.reshape(-1, d)

    def total(self, c: Array) -> Array:
        """Σ Jᵀc with c of each row, (n, m)."""
        return np.einsum("nad,na->d", self.J, c)

    def spread(self, coordinates: Metric) -> Array:
        """Covariance of ζ of each row where θ = Lφ and that of φ is 1, (n, m, m)."""
        d = self.J.shape[-1]
        # one product for all rows: NumPy makes one for each where there is a third axis
        JL = (self.J.reshape(-1, d) @ coordinates.matrix()).reshape(self.J.shape)
        return np.einsum("nad,nbd->nab", JL, JL)

    def squares(self, c: Array, coordinates: Metric, weights: Array) -> Array:
        """Σ w (LᵀJᵀc)² with c and a weight w of each row."""
        forces = np.einsum("nad,na->nd", self.J, c)
        return weights @ np.square(forces @ coordinates.matrix())


class Sparse:
    """Derivatives of rows that depend on at most one parameter of each of some ``columns``.

    With one number j of each of d unknowns ζ tells which it is that it depends on: moved together
    they move it by J, and moved by j each by jJ.

    Parameters
    ----------
    zetas, centre, sds
        As of `Full`.
    columns : list of array
        Places of unknowns in a position.
    """

    def __init__(self, zetas: Zetas, centre: Array, sds: Array, columns: Sequence[Array]) -> None:
        here = zetas(centre)
        self._zetas = zetas
        self._centre = centre
        self._here = here
        self._sds = FAR * sds
        self.n_points = 1
        self._columns = columns
        self.places: Array = np.zeros((*here.shape, len(columns)), dtype=np.int64)
        self.J: Array = np.zeros(self.places.shape)
        for k, column in enumerate(columns):
            one = self._moved(column, 1.0)
            depends = np.abs(one) > ZERO * np.abs(one).max(initial=0.0)
            place = np.zeros(one.shape, dtype=np.int64)
            if column.size > 1:
                numbers = np.arange(1.0, column.size + 1) / column.size
                share = self._moved(column, numbers) / np.where(depends, one, 1.0)
                place = np.clip(np.rint(share * column.size) - 1, 0, column.size - 1).astype(int)
            self.places[..., k] = column[place]
            self.J[..., k] = np.where(depends, one, 0.0) / self._sds[self.places[..., k]]

    def _moved(self, column: Array, by: Array | float) -> Array:
        point = self._centre.copy()
        point[column] += by * self._sds[column]
        self.n_points += 1
        return self._zetas(point) - self._here

    def is_right(self) -> bool:
        """Whether rows depend on one unknown of each column at most, by a third number of each."""
        rng = np.random.default_rng(0)
        tolerance = np.finfo(self._here.dtype).eps ** 0.25
        for k, column in enumerate(self._columns):
            by = np.zeros(self._centre.size)
            by[column] = rng.uniform(-1, 1, column.size)
            moved = self._moved(column, by[column])
            expected = (self.J[..., k] * self._sds[self.places[..., k]]) * by[self.places[..., k]]
            if not np.abs(moved - expected).max(initial=0.0) <= tolerance * max(
                np.abs(moved).max(initial=0.0), 1e-300
            ):
                return False
        return True

    def _by_row(self, c: Array) -> csr_array:
        """Jᵀc of each row, (n, d)."""
        n = len(self.J)
        d = self._centre.size
        ends = np.arange(n + 1) * self.places[0].size
        entries = (self.J * c[..., None]).ravel(), self.places.ravel(), ends
        return csr_array(entries, shape=(n, d))

    def hessian(self, C: Array) -> csr_array:
        """Σ JᵀCJ with C of each row, (n, m, m)."""
        n, m, k = self.J.shape
        ends = np.arange(n * m + 1) * k
        shape = (n * m, self._centre.size)
        J = csr_array((self.J.ravel(), self.places.ravel(), ends), shape=shape, copy=True)
        J.eliminate_zeros()
        blocks = bsr_array((C, np.arange(n), np.arange(n + 1)), shape=(n * m, n * m))
        return (J.T @ (blocks.tocsr() @ J)).tocsr()

    def total(self, c: Array) -> Array:
        """Σ Jᵀc with c of each row, (n, m)."""
        entries = (self.J * c[..., None]).ravel()
        return np.bincount(self.places.ravel(), entries, minlength=self._centre.size)

    def spread(self, coordinates: Metric) -> Array:
        """Covariance of ζ of each row where θ = Lφ and that of φ is 1, (n, m, m)."""
        if isinstance(coordinates, Dense):
            JL = self.J[..., None, :] @ coordinates.factor[self.places]
            JL = JL[..., 0, :]
            return JL @ JL.swapaxes(1, 2)
        scales, U, c = coordinates.decomposed()  # type: ignore[attr-defined]
        scaled = self.J * scales[self.places]
        same = self.places[:, :, None] == self.places[:, None]
        own = (same * scaled[:, :, None] * scaled[:, None]).sum(axis=-1)
        along = np.einsum("nmk,rnmk->nmr", scaled, U[:, self.places])
        return own + along * (2 * c + np.square(c)) @ along.swapaxes(1, 2)

    def squares(self, c: Array, coordinates: Metric, weights: Array) -> Array:
        """Σ w (LᵀJᵀc)² with c and a weight w of each row."""
        forces = self._by_row(c)
        if isinstance(coordinates, Dense):
            return weights @ np.square(forces @ coordinates.factor)
        scales, U, size = coordinates.decomposed()  # type: ignore[attr-defined]
        forces = forces * scales[None]
        forces = csr_array(forces)
        forces.sum_duplicates()
        along = forces @ U.T  # (n, r)
        cU = size[:, None] * U
        both = (forces.T @ (weights[:, None] * along)).T  # (r, d)
        square = forces.power(2).T @ weights + 2 * (both * cU).sum(axis=0)
        return square + ((along.T @ (weights[:, None] * along)) @ cU * cU).sum(axis=0)
