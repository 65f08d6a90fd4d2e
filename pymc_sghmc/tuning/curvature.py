"""Curvature of a log-density: exact where rows see linear predictors, by differences elsewhere.

Passes over the data are counted, over a subset of the rows where they are many. Knows passes over
the data and SciPy, no samplers and no fit.
"""

import math

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from scipy.sparse import csr_array
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

from pymc_sghmc.gradients.likelihood_hessian import LikelihoodHessian
from pymc_sghmc.gradients.metric import Array, LowRank, Metric
from pymc_sghmc.phases import count_passes

__all__ = [
    "MAX_DENSE",
    "SUBSET_ROWS",
    "CountedPasses",
    "Curvature",
    "Rows",
    "curvature",
    "depends_on_few",
    "diagonal_by_signs",
    "difference_step",
    "extreme_curvatures",
    "first_vector",
    "fisher_scale",
    "hessian_by_differences",
    "hutchinson_diagonal",
    "operator_of",
    "positive",
]

LEAST = 0.05  # of the largest curvature, for the smallest: below it is rounding, or no posterior
SLOW = 0.01  # of the largest curvature, for the smallest where nobody has measured it
MAX_DENSE = 1000  # above, d² numbers cost more than the gradient of a usual minibatch
SUBSET_ROWS = 50_000  # that the optimiser works on first, and that curvatures are taken from
ROWS_PER_EFFECT = 50  # of these, on average, as well
FEWEST_CLUSTERS = 2000  # of rows whose effects are integrated out, if there are as many
FISHER_ROWS = 30_000  # at most, for the Fisher information: groups with few rows must come up
PRODUCT_STEP = 1e-3  # of differences of gradients along one direction, in standard deviations
N_SIGNS = 10  # random signs for the diagonal of a Hessian
PROBED_ROWS = 1000  # that tell which parameters depend on each other
N_MOVED = 20  # parameters that are moved one by one, ...
SHIFT = 0.1  # ... so far, ...
AROUND = 0.3  # ... from a place that is so far from the start, where nothing is symmetric
MOST_CHANGED = 0.05  # of all parameters, whose slopes that changes, in the median
CHANGED = 1e-6  # of the largest change of a slope

Rows = tuple[Array, ...] | None  # numbers of some rows of each likelihood; None: all


class Curvature(NamedTuple):
    """Extreme eigenvalues of LᵀHL, H the Hessian of −log p."""

    largest: float
    smallest: float


class CountedPasses:
    """Log-densities over a fixed subset of the rows or all of them, counting passes."""

    def __init__(self, passes: Any) -> None:
        self.over = passes
        self.passes = 0.0
        self.dtype = passes.density.dtype
        data = passes.data
        d = passes.density.d
        if passes.density.group_coefficients or passes.is_sparse:  # each effect has its own rows
            n_rows = max(SUBSET_ROWS, ROWS_PER_EFFECT * d)
        else:  # of the many parameters of a neural network a mode is no great help: be brief
            n_rows = SUBSET_ROWS if d <= MAX_DENSE else SUBSET_ROWS // 5
        if data.rows_of_each > 1:  # clusters, which cost as much as all of their rows
            n_rows = max(FEWEST_CLUSTERS, round(n_rows / data.rows_of_each))
        rng = np.random.default_rng(0)
        self.subset: Rows = None
        at_hand = data.n_at_hand
        if any(rows > min(n, n_rows) for rows, n in zip(data.n_rows, at_hand, strict=True)):
            self.subset = tuple(
                np.arange(n) if n <= n_rows else np.unique(rng.integers(n, size=n_rows))
                for n in at_hand
            )
        self.n_rows = sum(data.n_rows)
        self._exact: LikelihoodHessian | None = None

    @property
    def rows(self) -> tuple[Array, ...]:
        """Numbers of the subset's rows, or of all rows, of each group."""
        return self.subset or tuple(np.arange(n) for n in self.over.data.n_at_hand)

    def __call__(self, x: Array, rows: Rows) -> tuple[float, Array]:
        """Log-density and gradient at a point."""
        self._count(1.0 if rows is None else sum(map(len, rows)) / self.n_rows)
        position = x.astype(self.dtype)
        with np.errstate(all="ignore"):
            logp, grad = self.over.log_density(position, rows)
        return float(logp), np.asarray(grad, dtype=float)

    def gradient(self, rows: Rows) -> Callable[[Array], Array]:
        """Return the gradient as a function of the point."""
        return lambda x: self(x, rows)[1]

    def mean_gradient(self, points: Sequence[Array], rows: Rows) -> Array:
        """Mean of the gradient over some points: all from one read, where a source is read."""
        if rows is not None or self.over.data.pool is None:
            return np.mean([self(x, rows)[1] for x in points], axis=0)
        self._count(float(len(points)))
        positions = [x.astype(self.dtype) for x in points]
        with np.errstate(all="ignore"):
            gradients = self.over.gradients_at(positions, lambda _: None)
        return np.mean(gradients, axis=0)

    def mean_hessian(self, points: Sequence[Array], shares: Sequence[Rows], factor: Array) -> Array:
        """LᵀH̄L, H̄ the mean over some points of the Hessian of −log p, each on rows of its own.

        Parameters
        ----------
        points : list of array of shape (d,)
        shares : list of tuple of arrays or None
            Rows that each point sees, among the subset's; None: all of these.
        factor : array of shape (d, n)
            L, whose columns are as long as the posterior is wide there.
        """
        with self._exact_hessian() as exact:
            if exact is not None:
                return exact.mean(points, self._rows_of(shares), factor)
        step = difference_step(self.dtype)
        hessian = np.zeros((factor.shape[1], factor.shape[1]))
        for point, share in zip(points, shares, strict=True):
            hessian += hessian_by_differences(self.gradient(share), point, factor, step)
        return hessian / len(points)

    def hessian_product(
        self, points: Sequence[Array], shares: Sequence[Rows]
    ) -> Callable[[Array], Array]:
        """Return H̄v for any v that is as long as the posterior is wide there.

        See `mean_hessian`.
        """
        with self._exact_hessian() as exact:
            if exact is not None:
                return exact.product(points, self._rows_of(shares))

        def slopes(shift: Array | float) -> list[Array]:
            pairs = zip(points, shares, strict=True)
            return [self(point + shift, share)[1] for point, share in pairs]

        here = slopes(0.0)

        def product(v: Array) -> Array:
            there = slopes(PRODUCT_STEP * v)
            with np.errstate(all="ignore"):  # of gradients that overflow
                return np.mean(np.subtract(here, there), axis=0) / PRODUCT_STEP

        return product

    def likelihood_curvatures(self, x: Array) -> Array | None:
        """Diagonal of the Hessian of −log-likelihood at a point; None where it isn't exact.

        Of parameters of which what rows see is a linear function.
        """
        with self._exact_hessian() as exact:
            return None if exact is None else exact.diagonal(x)

    def likelihood_hessian(self, x: Array) -> csr_array | None:
        """Hessian of −log-likelihood; see `likelihood_curvatures`."""
        with self._exact_hessian() as exact:
            return None if exact is None else exact.of_likelihood(x)

    @property
    def has_exact_hessian(self) -> bool:
        """Whether a Hessian takes one pass, and not one for each parameter."""
        with self._exact_hessian() as exact:
            return exact is not None

    def _rows_of(self, shares: Sequence[Rows]) -> list[tuple[Array, ...]]:
        return [self.rows if share is None else share for share in shares]

    @contextmanager
    def _exact_hessian(self) -> Iterator[LikelihoodHessian | None]:
        """Give what makes exact Hessians with the inputs of now, if anything; count its passes."""
        second = self.over.second_derivatives
        if second is None or self.dtype != np.float64:
            yield None
            return
        before = 0.0
        if self._exact is not None and self._exact.is_current():
            before = self._exact.evaluations
        else:
            self._exact = LikelihoodHessian(second, self.over.density, self.over.data, self.rows)
        try:
            yield self._exact if self._exact.is_known else None
        finally:
            share = 1.0 if self.subset is None else sum(map(len, self.subset)) / self.n_rows
            self._count((self._exact.evaluations - before) * share)

    def _count(self, passes: float) -> None:
        self.passes += passes
        count_passes(passes)

    def likelihood(self, x: Array) -> Array:
        """Gradient of the log-likelihood alone, over the subset."""
        with np.errstate(all="ignore"):
            grad = self.over.likelihood(x.astype(self.dtype), self.subset)[1]
        return np.asarray(grad, dtype=float)

    def prior_gradient(self, x: Array) -> Array:
        """Gradient of the log-density of the prior alone, which no rows are read for."""
        with np.errstate(all="ignore"):
            grad = self.over.prior(x.astype(self.dtype))[1]
        return np.asarray(grad, dtype=float)


def depends_on_few(passes: Any, start: Array) -> bool:
    """Whether each of thousands of parameters depends on few of the others, given all else.

    As what is unknown of each person, and not as the weights of a neural network: a slope changes
    with few parameters.
    """
    rng = np.random.default_rng(0)
    d = start.size
    place = start + AROUND * rng.standard_normal(d)
    some = tuple(
        np.sort(rng.choice(n, size=min(n, PROBED_ROWS), replace=False))
        for n in passes.data.n_at_hand
    )

    def slope(x: Array) -> Array:
        return passes.log_density(x.astype(passes.density.dtype), some)[1].astype(float)

    changed = []
    with np.errstate(all="ignore"):
        here = slope(place)
        for i in rng.choice(d, size=min(N_MOVED, d), replace=False):
            moved = place.copy()
            moved[i] += SHIFT
            change = slope(moved) - here
            change = np.abs(change - np.median(change))  # of a sum that is held near zero
            if not np.isfinite(change).all():
                return False
            changed.append(np.mean(change > CHANGED * change.max()))
    return bool(np.median(changed) < MOST_CHANGED)


def difference_step(dtype: Any) -> float:
    """Step of differences of gradients, in posterior standard deviations."""
    return 1e-3 if dtype == np.float64 else 3e-2


def hessian_by_differences(
    gradient: Callable[[Array], Array], x: Array, factor: Array, step: float
) -> Array:
    """LᵀHL of −log p at ``x``, by forward differences along the columns of the matrix L."""
    here = gradient(x)
    columns = [here - gradient(x + step * column) for column in factor.T]
    return factor.T @ np.column_stack(columns) / step


def hutchinson_diagonal(
    gradient: Callable[[Array], Array], x: Array, rng: np.random.Generator, step: float
) -> Array:
    """Diagonal of the Hessian of −log p, by differences of its gradient along random signs."""
    here = gradient(x)
    return diagonal_by_signs(lambda v: (here - gradient(x + step * v)) / step, x.size, rng)


def diagonal_by_signs(product: Callable[[Array], Array], d: int, rng: np.random.Generator) -> Array:
    """Diagonal of a matrix, (d,), by its products with vectors of random signs (Hutchinson)."""
    diagonal = np.zeros(d)
    for _ in range(N_SIGNS):
        signs = rng.choice([-1.0, 1.0], size=d)
        diagonal += signs * product(signs) / N_SIGNS
    return diagonal


def curvature(
    counted: CountedPasses, x: Array, factor: Array, step: float | None
) -> tuple[Array, Array]:
    """Eigenvalues and vectors of LᵀHL: at the point, or between ``step`` on both sides."""
    if step is None:
        hessian = counted.mean_hessian([x], [counted.subset], factor)
    else:
        gradient = counted.gradient(counted.subset)
        columns = [(gradient(x - step * u) - gradient(x + step * u)) / 2 for u in factor.T]
        hessian = factor.T @ np.column_stack(columns) / step
    if not np.isfinite(hessian).all():
        return np.full(x.size, 16.0), np.eye(x.size)  # too wide: a quarter of it
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    return values, vectors


def positive(values: Array, widen: float) -> Array:
    """Curvatures for a factor: those of a saddle or a plain are made positive, within reason."""
    return np.maximum(np.abs(values), max(1e-8 * values.max(), widen**-2, 1e-300))


def fisher_scale(counted: CountedPasses, x: Array) -> Array:
    """1/√(diagonal of the Fisher information + curvature of the prior), (d,)."""
    passes = counted.over
    rng = np.random.default_rng(0)
    position = x.astype(counted.dtype)
    rounds = math.ceil(min(max(passes.data.n_rows, default=1), FISHER_ROWS) / 100)
    information = np.mean(
        [_information(passes, position, rng) for _ in range(rounds)], axis=0, dtype=float
    )
    prior = hutchinson_diagonal(counted.prior_gradient, x, rng, step=1e-3)
    total = np.nan_to_num(information) + np.abs(np.nan_to_num(prior))
    return 1 / np.sqrt(np.maximum(total, 1e-8 * total.max() or 1.0))


def _information(passes: Any, position: Array, rng: np.random.Generator) -> Array:
    """Diagonal of the empirical Fisher information, n/N of the covariance of gradients."""
    total = np.zeros(position.size)
    for k, (n_rows, n) in enumerate(zip(passes.data.n_rows, passes.data.n_at_hand, strict=True)):
        rows = rng.integers(n, size=min(n, 100))
        parts = [passes.of_rows(position, k, row[None])[1] for row in rows]
        total += n_rows * np.mean(np.square(parts), axis=0)
    return total


def extreme_curvatures(
    counted: CountedPasses, x: Array, metric: Metric, only_largest: bool = False
) -> Curvature:
    """Extreme eigenvalues of LᵀHL, by Lanczos' method.

    The smallest is looked for where L has directions in which parameters depend on each other; else
    it is a guess. NaN where the gradient isn't finite around ``x``, or doesn't change at all.
    """
    of_theta = counted.hessian_product([x], [counted.subset])

    def product(z: Array) -> Array:
        return metric.pull_back(of_theta(metric.to_theta(z)))

    is_alone = only_largest or not isinstance(metric, LowRank)
    try:
        values = eigsh(
            operator_of(product, x.size),
            k=1 if is_alone else 2,
            which="LA" if is_alone else "BE",
            tol=0.1,
            return_eigenvectors=False,
            **first_vector(x.size),
        )
    except (ArpackError, FloatingPointError):
        values = np.full(2, np.nan)
    largest = values[-1]
    if is_alone:
        largest = np.maximum(largest, 1e-8)
        return Curvature(largest=float(largest), smallest=float(SLOW * largest))
    smallest = np.clip(values[0], LEAST * largest, largest)
    return Curvature(largest=float(largest), smallest=float(smallest))


def operator_of(product: Callable[[Array], Array], d: int) -> Any:
    """Return a linear operator for SciPy, of a function of a vector.

    It raises FloatingPointError where a product isn't finite: LAPACK would print lines about it.
    """

    def finite_product(z: Array) -> Array:
        found = product(np.ravel(z))
        if not np.isfinite(found).all():
            raise FloatingPointError("not finite")
        return found

    return LinearOperator((d, d), matvec=finite_product, dtype=float)


def first_vector(d: int) -> dict[str, Array]:
    """Return what makes Lanczos' method deterministic."""
    return {"v0": np.random.default_rng(0).standard_normal(d)}
