r"""Quasi-Newton estimates of the inverse Hessian B of U = −log p, and factors to draw with.

Curvature pairs are s = θ' − θ and y = ∇U(θ') − ∇U(θ), so that B y = s if U is quadratic. Dense BFGS
is eq. 1 of Fu, Luo & Zhang (2016). Limited-memory BFGS is the compact form of Byrd, Nocedal &
Schnabel (1994). This file needs NumPy and SciPy only.
"""

import math

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from scipy.linalg import LinAlgError, cho_solve, cholesky, eigh, qr, solve_triangular
from scipy.sparse.linalg import LinearOperator, eigsh

from pymc_sghmc.protocols import Array

__all__ = [
    "CurvaturePair",
    "Dense",
    "LowRank",
    "Matrix",
    "bfgs",
    "diagonal",
    "guarded",
    "identity",
    "lbfgs",
    "multisecant",
    "of_largest_curvatures",
]

DAMPING = 0.2  # least sᵀy over its prediction sᵀC⁻¹s: a pair widens C fivefold at most
SMALLEST_COSINE = 0.01  # between s and y, in coordinates in which B is 1
# of gradients that are differenced, in units of σ: so short that the curvature hardly changes along
# it, and long enough for round-off not to matter
STEP = 1e-3
PRIOR_DRAWS = 5  # weight of the present estimate in multisecant
MAX_EXACT = 200  # size of a matrix up to which all eigenvalues are computed


class CurvaturePair(NamedTuple):
    """Difference of two positions, and of the gradients of U there."""

    s: Array  # (d,)
    y: Array  # (d,)


class Dense(NamedTuple):
    """B as a matrix with its Cholesky factor."""

    matrix: Array  # B, (d, d)
    factor: Array  # lower triangular F, FFᵀ = B

    @classmethod
    def of(cls, matrix: Array) -> "Dense":
        """Factorise a matrix; raise ``LinAlgError`` if round-off makes it indefinite."""
        matrix = (matrix + matrix.T) / 2
        if not np.isfinite(matrix).all():
            raise LinAlgError("not finite")
        return cls(matrix, cholesky(matrix, lower=True, check_finite=False))

    def product(self, v: Array) -> Array:
        """B v."""
        return self.matrix @ v

    def inverse_product(self, v: Array) -> Array:
        """B⁻¹ v."""
        return cho_solve((self.factor, True), v, check_finite=False)

    def draw(self, z: Array) -> Array:
        """F z, which is N(0, B) for z ~ N(0, I)."""
        return self.factor @ z

    def extremes(self) -> tuple[float, float]:
        """Smallest and largest eigenvalue."""
        if len(self.matrix) > MAX_EXACT:
            return _extremes(self, len(self.matrix))
        values = np.linalg.eigvalsh(self.matrix)
        return max(float(values[0]), 0.0), float(values[-1])


class LowRank(NamedTuple):
    """B = σ(I + Q(Λ − I)Qᵀ)σ: a diagonal and r further directions, with all products in O(rd)."""

    scale: Array  # σ, (d,)
    vectors: Array  # Q, orthonormal, (d, r)
    values: Array  # Λ, (r,), positive

    def _power(self, v: Array, power: float) -> Array:
        Q = self.vectors
        Lambda = self.values
        return v + Q @ ((Lambda**power - 1) * (Q.T @ v))

    def product(self, v: Array) -> Array:
        """B v."""
        return self.scale * self._power(self.scale * v, 1)

    def inverse_product(self, v: Array) -> Array:
        """B⁻¹ v."""
        return self._power(v / self.scale, -1) / self.scale

    def draw(self, z: Array) -> Array:
        """F z, which is N(0, B) for z ~ N(0, I)."""
        return self.scale * self._power(z, 0.5)

    def extremes(self) -> tuple[float, float]:
        """Smallest and largest eigenvalue."""
        if not self.values.size:
            return float(self.scale.min() ** 2), float(self.scale.max() ** 2)
        return _extremes(self, self.scale.size)


Matrix = Dense | LowRank


def _extremes(matrix: Matrix, d: int) -> tuple[float, float]:
    """Smallest and largest eigenvalue by Lanczos's method, within a few per cent."""
    if d < 3:
        values = np.linalg.eigvalsh(np.column_stack([matrix.product(e) for e in np.eye(d)]))
        return float(values[0]), float(values[-1])
    largest = _largest_eigenvalue(matrix.product, d)
    largest_of_inverse = _largest_eigenvalue(matrix.inverse_product, d)
    return 1 / largest_of_inverse, largest


def _largest_eigenvalue(product: Callable[[Array], Array], d: int) -> float:
    start = np.random.default_rng(0).standard_normal(d)
    operator = LinearOperator((d, d), matvec=product, dtype=float)
    [value] = eigsh(operator, k=1, v0=start, tol=0.01, return_eigenvectors=False)
    return float(value)


def identity(d: int, dense: bool) -> Matrix:
    """B = I, before the first curvature pair."""
    return Dense(np.eye(d), np.eye(d)) if dense else diagonal(np.ones(d))


def diagonal(scale: Array) -> LowRank:
    """B = σ² with no further directions."""
    return LowRank(scale, np.empty((scale.size, 0)), np.empty(0))


def guarded(inverse_hessian: Matrix, s: Array, y: Array) -> CurvaturePair | None:
    r"""Check a curvature pair before it enters an estimate: return the pair to use, or None.

    - sᵀy ≤ 0: the log-density is not concave between the two points, and no positive definite B has
      B y = s. The pair is skipped.
    - 0 < sᵀy < ``DAMPING`` · sᵀC⁻¹s: by this pair the present C is far too narrow along s. In heavy
      tails and near points of inflection such pairs keep coming. y is mixed with C⁻¹s until
      equality (Powell's damping; Nocedal & Wright 2006, procedure 18.2), so that C widens by
      1/``DAMPING`` at most.
    - s and y are nearly orthogonal in coordinates in which C is 1: the update would widen B by up
      to one over the squared cosine along s. The pair is skipped, as is one that is not finite.
    """
    sy = s @ y
    predicted = inverse_hessian.inverse_product(s)
    square = (s @ predicted) * (y @ inverse_hessian.product(y))
    if not (math.isfinite(square) and sy > SMALLEST_COSINE * math.sqrt(max(square, 0.0))):
        return None
    least = DAMPING * (s @ predicted)
    if sy < least:
        share = (s @ predicted - least) / (s @ predicted - sy)
        y = share * y + (1 - share) * predicted
    return CurvaturePair(s, y)


def bfgs(B: Array, s: Array, y: Array) -> Array:
    """Eq. 1 of Fu et al. (2016), multiplied out so that it takes O(d²)."""
    rho = 1 / (s @ y)
    By = B @ y
    half = np.outer(s, (rho + rho**2 * (y @ By)) / 2 * s - rho * By)
    return B + (half + half.T)


def lbfgs(variances: Array, S: Array, Y: Array) -> LowRank:
    r"""Limited-memory BFGS from a diagonal B₀ and m pairs.

    B₀ has the ``variances``, (d,), on its diagonal. Pairs are the columns of S and Y, oldest first.
    The result is the compact form of Byrd, Nocedal & Schnabel (1994, eq. 2.6), brought to
    orthonormal directions by a thin QR as in Pathfinder (Zhang et al. 2022), in O(m²d). With the
    same pairs and B₀ it equals `bfgs` applied m times. Raises ``LinAlgError`` if round-off makes it
    indefinite.
    """
    scale = np.sqrt(variances)
    m = S.shape[1]
    if not m:
        return diagonal(scale)
    S = S / scale[:, None]  # in coordinates in which B₀ = I
    Y = Y * scale[:, None]
    norms = np.linalg.norm(S, axis=0)  # a pair may be scaled without changing B
    S = S / norms
    Y = Y / norms
    R = np.triu(S.T @ Y)
    inverse = solve_triangular(R, np.eye(m))
    corner = inverse.T @ (np.diag(np.diag(R)) + Y.T @ Y) @ inverse
    middle = np.block([[corner, -inverse.T], [-inverse, np.zeros((m, m))]])
    basis, triangle = qr(np.hstack([S, Y]), mode="economic")  # (d, 2m)
    core = triangle @ middle @ triangle.T
    values, vectors = eigh((core + core.T) / 2)  # B − I in the span of the pairs
    if not values[0] > -1:
        raise LinAlgError("not positive definite")
    return LowRank(scale, basis @ vectors, 1 + values)


def multisecant(inverse_hessian: Dense, positions: Array, gradients: Array) -> Dense:
    r"""Positive definite B that solves all secant equations of many draws at once.

    Let S be the deviations of positions from their mean, and Y those of gradients. Only on a
    Gaussian has B Y = S an exact solution. But B Yᵀ Y B = SᵀS has one and only one positive
    definite solution for any draws: the geometric mean of the positions' covariance and of the
    inverse of the gradients' covariance. It minimises the Fisher divergence between the draws and
    N(μ, B) (Seyboldt, Carlson & Carpenter 2026, arXiv:2603.18845). It averages over all draws,
    while `bfgs` follows the last ones.

    Parameters
    ----------
    inverse_hessian : Dense
        Present estimate, which has the weight of `PRIOR_DRAWS` draws.
    positions, gradients : array of shape (n, d)
        Draws, and ∇log p there.
    """
    F = inverse_hessian.factor
    n, d = positions.shape
    S = solve_triangular(F, (positions - positions.mean(axis=0)).T, lower=True)  # (d, n)
    Y = F.T @ (gradients - gradients.mean(axis=0)).T
    prior = PRIOR_DRAWS * np.eye(d)
    values, vectors = eigh((Y @ Y.T + prior) / (n + PRIOR_DRAWS))
    root = (vectors * values**0.5) @ vectors.T
    inverse_root = (vectors * values**-0.5) @ vectors.T
    values, vectors = eigh(root @ ((S @ S.T + prior) / (n + PRIOR_DRAWS)) @ root)
    half = F @ (inverse_root @ (vectors * np.maximum(values, 0) ** 0.25))
    return Dense.of(half @ half.T)


def of_largest_curvatures(
    gradient: Callable[[Array], Array], centre: Array, variances: Array, memory: int
) -> LowRank:
    r"""Diagonal B₀ and the ``memory`` directions of largest curvature relative to it.

    These directions limit the step size, but pairs of successive draws say little about them. Here
    Lanczos's method finds them from differences of gradients at ``centre``: they are the
    eigenvectors v of σHσ with the largest eigenvalues. The result is B₀ with the eigenvalues along
    v replaced by the inverse curvatures, which is `lbfgs` of the pairs s = σv and y = Hs. It takes
    about 3 · ``memory`` gradients.

    Parameters
    ----------
    gradient : callable
        ∇log p.
    centre, variances : array of shape (d,)
        A typical point of the posterior, and B₀ = diag(σ²).
    memory : int
        Number of directions m.
    """
    scale = np.sqrt(variances)
    d = centre.size
    if d == 1:
        return diagonal(scale)
    here = gradient(centre)

    def product(v: Array) -> Array:
        return scale * (here - gradient(centre + STEP * scale * v)) / STEP

    operator = LinearOperator((d, d), matvec=product, dtype=float)
    start = np.random.default_rng(0).standard_normal(d)
    values, vectors = eigsh(operator, k=min(memory, d - 1), which="LA", v0=start, tol=0.05)
    positive = values > 1e-8
    return LowRank(scale, vectors[:, positive], 1 / values[positive])
