"""Where the posterior lies and how wide it is: its mode and the curvature there.

The optimiser works on a subset of the rows first and sees all of them in a few passes at the end.
Curvature comes from differences of gradients, so that any model has it. Knows passes over the data and
SciPy, no samplers.
"""

import math

from typing import NamedTuple

import numpy as np

from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, eigsh

from pymc_sghmc.tuning.mass import centre_of_mass, lower

__all__ = ["MAX_DENSE", "Centre", "find_centre", "largest_curvature"]

MAX_DENSE = 1000  # above, d² numbers cost more than the gradient of a usual minibatch
SUBSET_ROWS = 50_000  # that the optimiser works on first, and that tell the curvature
FISHER_ROWS = 30_000  # at most, for the Fisher information: groups with few rows must come up
PATIENCE = 1  # rounds after which the mode is no good centre, and a centre of mass is looked for
ROUNDS = 8  # of curvature and optimiser; two suffice where the posterior is near a Gaussian
WIDEN = 100  # the most by which a new look at the curvature may widen a scale
STEEP = 1.0  # slope of log p over one posterior sd that no mode has
WALL = 5.0  # times the fall that its slope promised: what energy counts for where it is infinite
NEAR = 0.1  # distance of a good centre from the mode, in posterior standard deviations


class Centre(NamedTuple):
    """A point in the bulk of the posterior, and a factor of the covariance there."""

    position: np.ndarray  # θ̂, (d,)
    factor: np.ndarray  # L with LLᵀ near the posterior covariance, (d, d) or (d,)
    passes: float  # over all data, so far
    is_mode: bool = True  # and the posterior falls off around it as a Gaussian does


def find_centre(
    passes, start, dense: bool | None = None, optimise: bool = True, factor=None
) -> Centre:
    """Climb from ``start`` to the mode and measure the curvature there.

    Parameters
    ----------
    passes : Passes
    start : array of shape (d,)
    dense : bool, optional
        Whether the factor is a matrix; default: up to `MAX_DENSE` unknowns.
    optimise : bool, default True
        ``False`` takes ``start`` itself for the centre.
    factor : array, optional
        Coordinates of an earlier centre: no scale becomes more than `WIDEN` times theirs. Where
        the curvature isn't positive, away from a mode, it says little of the posterior's width.
    """
    d = start.size
    dense = d <= MAX_DENSE if dense is None else dense
    counted = _Counted(passes)
    x, widen = np.array(start, dtype=float), np.inf if factor is None else WIDEN
    if optimise:
        # Where a start is symmetric, as that of a neural network with zero weights, no gradient
        # leads away from it.
        stuck = counted(x, counted.subset)[1] == 0
        x[stuck] += 0.1 * np.random.default_rng(0).standard_normal(stuck.sum())
        scale = np.ones(d) if factor is None else factor
        x, factor, _ = _climb(counted, x, scale, counted.subset, maxiter=500 if dense else 100)
    if factor is None or not dense:
        factor = _fisher_scale(counted, x)
    if not dense:
        # Draws from this Gaussian have the posterior's energy, d/2 above the mode's, however the
        # unknowns depend on each other.
        if optimise:
            x, _, _ = _climb(counted, x, factor, counted.subset, maxiter=50)
        return Centre(x, factor, counted.passes)
    mass = None
    for i in range(ROUNDS):
        # Curvature at the point itself and, where that doesn't fit, over one sd on either side.
        values, vectors = _curvature(counted, x, factor, step=1.0 if i else None)
        positive = _positive(values, widen)
        factor = _as_matrix(factor) @ (vectors / np.sqrt(positive))
        widen, moved = WIDEN, 0.0
        if optimise:
            if values[0] < -NEAR:  # a saddle
                x = x + factor @ np.random.default_rng(i).standard_normal(d)
            x, _, moved = _climb(counted, x, factor, counted.subset, maxiter=100)
        is_mode = values[0] >= positive.min() and moved < 1 and _fits(counted, x, factor)
        if is_mode:
            break
        if optimise and i == PATIENCE:
            mass = centre_of_mass(counted, np.array(start, dtype=float))
            if mass is not None and mass.is_near:
                return Centre(mass.position, mass.factor, counted.passes)
    if optimise and counted.subset is not None:
        x, _, _ = _climb(counted, x, factor, None, maxiter=20)
    factor = lower(factor)
    # The gradient is zero at a mode and not on the way down a funnel, where no mode is.
    slope = (
        np.abs(factor.T @ counted(x, counted.subset)[1]).max() if counted.subset is None else 0.0
    )
    is_mode = not optimise or (is_mode and slope < STEEP and _fits(counted, x, factor))
    if mass is not None and not is_mode:  # that is in the bulk, and not on the way to nowhere
        return Centre(mass.position, mass.factor, counted.passes, False)
    return Centre(x, factor, counted.passes, bool(is_mode))


class _Counted:
    """Log-densities over a fixed subset of the rows or all of them, counting passes."""

    def __init__(self, passes):
        self.over, self.passes = passes, 0.0
        self.dtype, data = passes.density.dtype, passes.data
        # Of the many unknowns of a neural network a mode is no great help: be brief.
        n_rows = SUBSET_ROWS if passes.density.d <= MAX_DENSE else SUBSET_ROWS // 5
        rng = np.random.default_rng(0)
        self.subset, at_hand = None, data.n_at_hand
        if any(rows > min(n, n_rows) for rows, n in zip(data.n_rows, at_hand, strict=True)):
            self.subset = tuple(
                np.arange(n) if n <= n_rows else np.unique(rng.integers(n, size=n_rows))
                for n in at_hand
            )
        self.n_rows = sum(data.n_rows)

    def __call__(self, x, subset):
        self.passes += 1.0 if subset is None else sum(map(len, subset)) / self.n_rows
        position = x.astype(self.dtype)
        with np.errstate(all="ignore"):
            logp, grad = self.over.log_density(position, subset)
        return float(logp), np.asarray(grad, dtype=float)


def _climb(counted, x, factor, subset, maxiter):
    """L-BFGS in the coordinates of ``factor``: end point, scales it met, how far it went in them."""
    matrix = factor.ndim == 2
    best = np.inf, np.zeros_like(x), np.zeros_like(x)  # least energy, its gradient, and where

    def energy(phi):
        nonlocal best
        logp, grad = counted(x + (factor @ phi if matrix else factor * phi), subset)
        if not (math.isfinite(logp) and np.isfinite(grad).all()):
            # Sends the line search back, some thirtyfold. At a wall much higher it gives up.
            rise = WALL * abs(best[1] @ (phi - best[2]))
            return (best[0] + rise if 0 < rise < np.inf else 1e100), np.zeros_like(phi)
        slope = -(factor.T @ grad if matrix else factor * grad)
        if -logp < best[0]:
            best = -logp, slope, phi.copy()
        return -logp, slope

    found = minimize(
        energy,
        np.zeros_like(x),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": maxiter,
            "gtol": NEAR / 2 if matrix else 0.0,  # in posterior sds
            "ftol": 1e-4 / max(1.0, abs(energy(np.zeros_like(x))[0])),  # in nats a step
        },
    )
    scale = None
    if not matrix and x.size <= MAX_DENSE:
        scale = factor * np.sqrt(np.diag(found.hess_inv.todense()))
    x = x + (factor @ found.x if matrix else factor * found.x)
    return x, scale, np.abs(found.x).max()


def _curvature(counted, x, factor, step):
    """Eigenvalues and vectors of LᵀHL, H the Hessian of −log p, by differences of gradients."""
    factor = _as_matrix(factor)
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


def _fits(counted, x, factor) -> bool:
    """Whether log p falls by d/2 from ``x`` to draws from the Gaussian, within a factor of 1.5."""
    z = np.random.default_rng(0).standard_normal((10, x.size))
    here, _ = counted(x, counted.subset)
    # on either side: the mode of all rows isn't quite that of a subset
    falls = [here - counted(x + factor @ step, counted.subset)[0] for step in (*z, *-z)]
    return bool(np.mean(falls) < 1.5 * np.mean(np.square(z)) * x.size / 2)


def _positive(values, widen):
    """Curvatures for a factor: those of a saddle or a plain are made positive, within reason."""
    return np.maximum(np.abs(values), max(1e-8 * values.max(), widen**-2, 1e-300))


def _as_matrix(factor):
    return np.diag(factor) if factor.ndim == 1 else factor


def _fisher_scale(counted, x):
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
    step, prior = 1e-3, np.zeros(x.size)
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


def largest_curvature(passes, x, factor) -> float:
    """Largest eigenvalue of LᵀHL for a diagonal L, by Lanczos on differences of gradients."""
    counted = _Counted(passes)
    step = 1e-3
    _, here = counted(x, counted.subset)

    def product(z):
        _, there = counted(x + step * factor * z, counted.subset)
        return factor * (here - there) / step

    operator = LinearOperator((x.size, x.size), matvec=product, dtype=float)
    start = np.random.default_rng(0).standard_normal(x.size)
    values = eigsh(operator, k=1, which="LA", v0=start, tol=0.1, return_eigenvectors=False)
    return float(max(values[0], 1e-8))
