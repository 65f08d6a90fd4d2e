"""Curvature of a log-density, by differences of gradients, so that any model has it.

Passes are counted, over a subset of the rows where they are many. Knows passes over the data and
SciPy, no samplers and no centre.
"""

import math

import numpy as np

from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

from pymc_sghmc.gradients.metric import LowRank, Metric

__all__ = [
    "MAX_DENSE",
    "CountedPasses",
    "curvature",
    "extreme_curvatures",
    "first_vector",
    "fisher_scale",
    "operator_of",
    "positive",
]

LEAST = 0.05  # of the largest curvature, for the smallest: below it is rounding, or no posterior
MAX_DENSE = 1000  # above, d² numbers cost more than the gradient of a usual minibatch
SUBSET_ROWS = 50_000  # that the optimiser works on first, and that tell the curvature
ROWS_PER_EFFECT = 50  # of these, on average, as well
FISHER_ROWS = 30_000  # at most, for the Fisher information: groups with few rows must come up


class CountedPasses:
    """Log-densities over a fixed subset of the rows or all of them, counting passes."""

    def __init__(self, passes):
        self.over = passes
        self.passes = 0.0
        self.dtype = passes.density.dtype
        data = passes.data
        d = passes.density.d
        if passes.density.group_coefficients:  # each effect has its own rows
            n_rows = max(SUBSET_ROWS, ROWS_PER_EFFECT * d)
        else:  # of the many unknowns of a neural network a mode is no great help: be brief
            n_rows = SUBSET_ROWS if d <= MAX_DENSE else SUBSET_ROWS // 5
        rng = np.random.default_rng(0)
        self.subset = None
        at_hand = data.n_at_hand
        if any(rows > min(n, n_rows) for rows, n in zip(data.n_rows, at_hand, strict=True)):
            self.subset = tuple(
                np.arange(n) if n <= n_rows else np.unique(rng.integers(n, size=n_rows))
                for n in at_hand
            )
        self.n_rows = sum(data.n_rows)

    def __call__(self, x, subset):
        """Log-density and gradient at a point."""
        self.passes += 1.0 if subset is None else sum(map(len, subset)) / self.n_rows
        position = x.astype(self.dtype)
        with np.errstate(all="ignore"):
            logp, grad = self.over.log_density(position, subset)
        return float(logp), np.asarray(grad, dtype=float)

    def likelihood(self, x):
        """Gradient of the log-likelihood alone, over the subset."""
        with np.errstate(all="ignore"):
            grad = self.over.likelihood(x.astype(self.dtype), self.subset)[1]
        return np.asarray(grad, dtype=float)


def curvature(counted, x, factor, step):
    """Eigenvalues and vectors of LᵀHL, L a matrix, H the Hessian of −log p, by differences."""
    if step is None:
        step = 1e-3 if counted.dtype == np.float64 else 3e-2
        _, here = counted(x, counted.subset)
        columns = [here - counted(x + step * u, counted.subset)[1] for u in factor.T]
    else:
        columns = [
            (counted(x - step * u, counted.subset)[1] - counted(x + step * u, counted.subset)[1])
            / 2
            for u in factor.T
        ]
    hessian = factor.T @ np.column_stack(columns) / step
    if not np.isfinite(hessian).all():
        return np.full(x.size, 16.0), np.eye(x.size)  # too wide: a quarter of it
    return np.linalg.eigh((hessian + hessian.T) / 2)


def positive(values, widen):
    """Curvatures for a factor: those of a saddle or a plain are made positive, within reason."""
    return np.maximum(np.abs(values), max(1e-8 * values.max(), widen**-2, 1e-300))


def fisher_scale(counted, x):
    """1/√(diagonal of the Fisher information + curvature of the prior), (d,)."""
    passes = counted.over
    rng = np.random.default_rng(0)
    position = x.astype(counted.dtype)
    rounds = math.ceil(min(max(passes.data.n_rows, default=1), FISHER_ROWS) / 100)
    information = np.mean(
        [_information(passes, position, rng) for _ in range(rounds)], axis=0, dtype=float
    )
    # Hutchinson's estimate of the diagonal of the prior's Hessian
    _, here = passes.prior(position)
    step = 1e-3
    prior = np.zeros(x.size)
    for _ in range(10):
        z = rng.choice([-1.0, 1.0], size=x.size)
        _, there = passes.prior((x + step * z).astype(counted.dtype))
        prior += z * (here - there) / step / 10
    total = np.nan_to_num(information) + np.abs(np.nan_to_num(prior))
    return 1 / np.sqrt(np.maximum(total, 1e-8 * total.max() or 1.0))


def _information(passes, position, rng):
    """Diagonal of the empirical Fisher information: n/N of the covariance of minibatch gradients."""
    total = np.zeros(position.size)
    for k, (n_rows, n) in enumerate(zip(passes.data.n_rows, passes.data.n_at_hand, strict=True)):
        rows = rng.integers(n, size=min(n, 100))
        parts = [passes.of_rows(position, k, row[None])[1] for row in rows]
        total += n_rows * np.mean(np.square(parts), axis=0)
    return total


def extreme_curvatures(passes, x, metric: Metric, only_largest=False) -> tuple:
    """Smallest and largest eigenvalue of LᵀHL, by Lanczos on differences of gradients.

    The smallest is looked for, and not None, where L knows how unknowns depend on each other. NaN
    where the gradient isn't finite around ``x``, or doesn't change at all.
    """
    counted = CountedPasses(passes)
    step = 1e-3
    _, here = counted(x, counted.subset)

    def product(z):
        _, there = counted(x + step * metric.to_theta(z), counted.subset)
        return metric.pull_back(here - there) / step

    given = {"tol": 0.1, "return_eigenvectors": False, **first_vector(x.size)}
    operator = operator_of(product, x.size)
    alone = only_largest or not isinstance(metric, LowRank)
    try:
        found = eigsh(operator, k=1 if alone else 2, which="LA" if alone else "BE", **given)
    except ArpackError:
        found = np.full(2, np.nan)
    smallest = found[0]
    largest = found[-1]
    if alone:
        return None, float(np.maximum(largest, 1e-8))
    return float(np.clip(smallest, LEAST * largest, largest)), float(largest)


def operator_of(product, d):
    """Return a linear operator for SciPy, of a function of a vector."""
    return LinearOperator((d, d), matvec=lambda z: product(np.ravel(z)), dtype=float)


def first_vector(d) -> dict:
    """Return what makes Lanczos' method deterministic."""
    return {"v0": np.random.default_rng(0).standard_normal(d)}
