r"""Quasi-Newton estimates of the inverse Hessian B of U = −log p, and factors to draw with.

Curvature pairs: s = θ' − θ and y = ∇U(θ') − ∇U(θ), so that B y = s where U is quadratic. Dense BFGS
is eq. 1 of Fu, Luo & Zhang (2016), limited-memory BFGS the compact form of Byrd, Nocedal & Schnabel
(1994). Knows NumPy and SciPy, no PyMC and no samplers.
"""

import math

from typing import NamedTuple

import numpy as np

from scipy.linalg import LinAlgError, cho_solve, cholesky, eigh, qr, solve_triangular
from scipy.sparse.linalg import LinearOperator, eigsh

__all__ = [
    "Dense",
    "LowRank",
    "bfgs",
    "diagonal",
    "guarded",
    "identity",
    "lbfgs",
    "multisecant",
    "stiffest",
]

DAMPING = 0.2  # least sᵀy over its prediction sᵀC⁻¹s: a pair widens C fivefold at most
SMALLEST_COSINE = 0.01  # between s and y, in coordinates in which B is 1
PRIOR_DRAWS = 5  # weight of the present estimate in multisecant


class Dense(NamedTuple):
    """B as a matrix with its Cholesky factor."""

    matrix: np.ndarray  # B, (d, d)
    factor: np.ndarray  # lower triangular F, FFᵀ = B

    @classmethod
    def of(cls, matrix):
        """Raise ``LinAlgError`` where ``matrix`` is not positive definite to working precision."""
        matrix = (matrix + matrix.T) / 2
        if not np.isfinite(matrix).all():
            raise LinAlgError("not finite")
        return cls(matrix, cholesky(matrix, lower=True, check_finite=False))

    def product(self, v):
        """B v."""
        return self.matrix @ v

    def inverse_product(self, v):
        """B⁻¹ v."""
        return cho_solve((self.factor, True), v, check_finite=False)

    def draw(self, z):
        """F z, which is N(0, B) for z ~ N(0, I)."""
        return self.factor @ z

    def draw_inverse(self, z):
        """F⁻ᵀ z, which is N(0, B⁻¹) for z ~ N(0, I)."""
        return solve_triangular(self.factor, z, lower=True, trans=1, check_finite=False)

    def extremes(self):
        """Smallest and largest eigenvalue."""
        if len(self.matrix) > 200:
            return _extremes(self, len(self.matrix))
        values = np.linalg.eigvalsh(self.matrix)
        return max(float(values[0]), 0.0), float(values[-1])


class LowRank(NamedTuple):
    """B = σ(I + Q(Λ − I)Qᵀ)σ: a diagonal and 2m further directions, all products in O(md)."""

    scale: np.ndarray  # σ, (d,)
    vectors: np.ndarray  # Q, orthonormal, (d, r)
    values: np.ndarray  # Λ, (r,), positive

    def _power(self, v, power):
        Q = self.vectors
        Lambda = self.values
        return v + Q @ ((Lambda**power - 1) * (Q.T @ v))

    def product(self, v):
        """B v."""
        return self.scale * self._power(self.scale * v, 1)

    def inverse_product(self, v):
        """B⁻¹ v."""
        return self._power(v / self.scale, -1) / self.scale

    def draw(self, z):
        """F z, which is N(0, B) for z ~ N(0, I)."""
        return self.scale * self._power(z, 0.5)

    def draw_inverse(self, z):
        """F⁻ᵀ z, which is N(0, B⁻¹) for z ~ N(0, I)."""
        return self._power(z, -0.5) / self.scale

    def extremes(self):
        """Smallest and largest eigenvalue."""
        if not self.values.size:
            return float(self.scale.min() ** 2), float(self.scale.max() ** 2)
        return _extremes(self, self.scale.size)


def _extremes(matrix, d):
    """Extreme eigenvalues by Lanczos, within some per cent."""
    if d < 3:
        values = np.linalg.eigvalsh(np.column_stack([matrix.product(e) for e in np.eye(d)]))
        return float(values[0]), float(values[-1])
    start = np.random.default_rng(0).standard_normal(d)
    largest, inverse = (
        eigsh(
            LinearOperator((d, d), matvec=matvec, dtype=float),
            k=1,
            v0=start,
            tol=0.01,
            return_eigenvectors=False,
        )[0]
        for matvec in (matrix.product, matrix.inverse_product)
    )
    return float(1 / inverse), float(largest)


def identity(d, dense):
    """B = I, before the first curvature pair."""
    return Dense(np.eye(d), np.eye(d)) if dense else diagonal(np.ones(d))


def diagonal(scale):
    """B = σ² alone, in the form of low rank."""
    return LowRank(scale, np.empty((scale.size, 0)), np.empty(0))


def guarded(inverse_hessian, s, y, damping=DAMPING):
    r"""Check a curvature pair before it enters an estimate: the pair to use, or None to skip it.

    - sᵀy ≤ 0: the log-density isn't concave between the two points, and no positive definite B has
      B y = s. Skipped.
    - 0 < sᵀy < ``damping`` · sᵀC⁻¹s: the pair says that the present C is far too narrow along s, as
      pairs in heavy tails and near points of inflection do without end. y is mixed with C⁻¹s until
      equality (Powell's damping; Nocedal & Wright 2006, procedure 18.2), so that C widens by
      1/``damping`` at most.
    - s and y at nearly right angles in coordinates in which C is 1: the update would widen B by up
      to one over the squared cosine along s. Skipped, and so is what isn't finite.
    """
    sy = s @ y
    predicted = inverse_hessian.inverse_product(s)
    square = (s @ predicted) * (y @ inverse_hessian.product(y))
    if not (math.isfinite(square) and sy > SMALLEST_COSINE * math.sqrt(max(square, 0.0))):
        return None
    least = damping * (s @ predicted)
    if sy < least:
        share = (s @ predicted - least) / (s @ predicted - sy)
        y = share * y + (1 - share) * predicted
    return s, y


def bfgs(B, s, y):
    """Eq. 1 of Fu et al. (2016), multiplied out, so that it takes O(d²)."""
    rho = 1 / (s @ y)
    By = B @ y
    half = np.outer(s, (rho + rho**2 * (y @ By)) / 2 * s - rho * By)
    return B + (half + half.T)


def lbfgs(variances, S, Y):
    r"""Limited-memory BFGS from a diagonal B₀ and m pairs.

    B₀ has the ``variances``, (d,), on its diagonal; pairs are the columns of S and Y, oldest first.
    The compact form of Byrd, Nocedal & Schnabel (1994, eq. 2.6), brought to orthonormal directions
    by a thin QR as in Pathfinder (Zhang et al. 2022), in O(m²d). With the same pairs and B₀ it
    equals `bfgs` applied m times. Raises ``LinAlgError`` where round-off makes it indefinite.
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


def multisecant(inverse_hessian, positions, gradients):
    r"""Positive definite B that solves all secant equations of many draws at once.

    With deviations from the mean S of positions and Y of gradients, B Y = S has an exact solution
    on a Gaussian only. B Yᵀ Y B = SᵀS has one and only one positive definite solution for any
    draws: the geometric mean of the positions' covariance and of the inverse of the gradients'
    covariance, which minimises the Fisher divergence between the draws and N(μ, B) (Seyboldt,
    Carlson & Carpenter 2026, arXiv:2603.18845). It averages over the draws, where `bfgs` follows
    the last ones.

    Parameters
    ----------
    inverse_hessian : Dense
        Present estimate; counts as `PRIOR_DRAWS` draws.
    positions, gradients : array of shape (n, d)
    """
    F = inverse_hessian.factor
    n, d = positions.shape
    S = solve_triangular(F, (positions - positions.mean(axis=0)).T, lower=True)  # (d, n)
    Y = F.T @ (gradients - gradients.mean(axis=0)).T
    prior = PRIOR_DRAWS * np.eye(d)
    values, vectors = eigh((Y @ Y.T + prior) / (n + PRIOR_DRAWS))
    root, inverse_root = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    values, vectors = eigh(root @ ((S @ S.T + prior) / (n + PRIOR_DRAWS)) @ root)
    half = F @ (inverse_root @ (vectors * np.maximum(values, 0) ** 0.25))
    return Dense.of(half @ half.T)


def stiffest(gradient, centre, variances, memory, step=1e-3):
    r"""Diagonal B₀ and the ``memory`` curvature pairs that matter most, along conjugate directions.

    Pairs of successive draws say little of the stiffest directions, which limit the step size. Here
    Lanczos's method picks them from differences of gradients at ``centre``: s = σv, y = Hs with v
    eigenvectors of σHσ. `lbfgs` of such pairs is B₀ with the eigenvalues along v replaced by the
    inverse curvatures. Takes some 3 · ``memory`` gradients.

    Parameters
    ----------
    gradient : callable
        ∇log p.
    centre, variances : array of shape (d,)
        A point in the bulk, and B₀ = diag(σ²).
    memory : int
        m.
    step : float
        Length of s in units of σ.
    """
    scale = np.sqrt(variances)
    d = centre.size
    if d == 1:
        return diagonal(scale)
    here = gradient(centre)

    def product(v):
        return scale * (here - gradient(centre + step * scale * v)) / step

    operator = LinearOperator((d, d), matvec=product, dtype=float)
    start = np.random.default_rng(0).standard_normal(d)
    values, vectors = eigsh(operator, k=min(memory, d - 1), which="LA", v0=start, tol=0.05)
    positive = values > 1e-8
    return LowRank(scale, vectors[:, positive], 1 / values[positive])
