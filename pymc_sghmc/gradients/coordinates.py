"""Coordinates in which the posterior has unit scale.

A preconditioner M⁻¹ = LLᵀ is a change of coordinates θ = Lφ: the update rules keep a scalar η, and
η of theirs in φ is ηM⁻¹ in θ, for noise and friction too. Knows no samplers.
"""

import numpy as np

from scipy.linalg import solve_triangular

from pymc_sghmc.checks import check_matrix_size

__all__ = ["Coordinates", "checked_preconditioner", "low_rank", "preconditioner_factor"]


class Coordinates:
    """The coordinates φ with θ = Lφ, in which the preconditioner LLᵀ = M⁻¹ is 1.

    Parameters
    ----------
    factor : array of shape (d,), (d, d) or (1 + 2k, 1, d), optional
        L, a number for each unknown, a lower triangular matrix, or `low_rank`; a variable of a
        graph serves, too. Default: 1, φ is θ.
    """

    def __init__(self, factor=None):
        self.factor = factor
        self.ndim = 0 if factor is None else factor.ndim
        if self.ndim == 2:
            is_array = isinstance(factor, np.ndarray)
            self._transposed = np.ascontiguousarray(factor.T) if is_array else factor.T

    @property
    def _pairs(self):
        """Scales s, U and cU of L = diag(s)(I + UᵀcU)."""
        rows = self.factor[:, 0]
        k = (rows.shape[0] - 1) // 2
        return rows[0], rows[1 : k + 1], rows[k + 1 :]

    def scales_and_directions(self, d):
        """Scales s, U and c of L = diag(s)(I + UᵀcU), without directions where L isn't `low_rank`."""
        if self.ndim < 3:
            return self.to_theta(np.ones(d)), np.zeros((0, d)), np.zeros(0)
        scales, U, cU = self._pairs
        return scales, U, (U * cU).sum(axis=1)

    def sds(self, d):
        """Return standard deviations of θ where those of φ are 1, (d,)."""
        if self.ndim == 2:
            return np.sqrt(np.square(self.factor).sum(axis=1))
        scales, U, c = self.scales_and_directions(d)
        return scales * np.sqrt(1 + (2 * c + np.square(c)) @ np.square(U))

    def on_graph(self, factor):
        """Return the same coordinates with a variable of a graph for L."""
        return Coordinates(factor)

    def to_theta(self, phi):
        """θ = Lφ; φ itself where L is 1."""
        if self.ndim == 0:
            return phi
        if self.ndim == 3:
            scales, U, cU = self._pairs
            return scales * (phi + (U @ phi) @ cU)
        return self.factor * phi if self.ndim == 1 else self.factor @ phi

    def from_theta(self, theta):
        """φ = L⁻¹θ."""
        if self.ndim == 0:
            return theta
        if self.ndim == 1:
            return theta / self.factor
        if self.ndim == 3:
            scales, U, c = self.scales_and_directions(theta.size)
            return theta / scales - ((U @ (theta / scales)) * c / (1 + c)) @ U
        return solve_triangular(self.factor, theta, lower=True)

    def pull_back(self, gradient):
        """Lᵀg, the gradient with respect to φ."""
        if self.ndim == 0:
            return gradient
        if self.ndim == 3:
            scales, U, cU = self._pairs
            scaled = scales * gradient
            return scaled + (U @ scaled) @ cU
        return self.factor * gradient if self.ndim == 1 else self._transposed @ gradient

    def shrunk(self, by):
        """Return them with scales of θ that are smaller, by a number or by one for each."""
        factor = self.factor.copy()
        factor[(0, 0) if self.ndim == 3 else ()] *= np.asarray(by, dtype=factor.dtype)
        return Coordinates(factor)


def low_rank(scales, U, c) -> np.ndarray:
    """Return L = diag(s)(I + UᵀcU) as one array, U with orthonormal rows.

    Few directions in which unknowns depend on each other cost 4kd multiplications a step, where a
    matrix costs 2d².
    """
    return np.concatenate([scales[None], U, c[:, None] * U])[:, None]


def preconditioner_factor(preconditioner, d: int) -> np.ndarray:
    """Check M⁻¹ and return L with LLᵀ = M⁻¹: square roots of d entries, or Cholesky's factor.

    Raises
    ------
    ValueError
        If M⁻¹ has another shape than (d,) or (d, d) or isn't positive definite.
    """
    if np.asarray(preconditioner).dtype.kind not in "fiu":
        raise ValueError(
            f"preconditioner={preconditioner!r}: pass an array of shape ({d},) or ({d}, {d})."
        )
    matrix = np.asarray(preconditioner, dtype=float)
    if matrix.shape not in ((d,), (d, d)):
        raise ValueError(
            f"preconditioner has shape {matrix.shape}, but the step samples {d} unconstrained "
            f"unknowns: pass an array of shape ({d},) or ({d}, {d})."
        )
    if matrix.ndim == 1:
        if not (np.isfinite(matrix).all() and (matrix > 0).all()):
            raise ValueError("preconditioner: all entries must be finite and above zero.")
        return np.sqrt(matrix)
    try:
        if not np.allclose(matrix, matrix.T):
            raise np.linalg.LinAlgError
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        raise ValueError(
            "preconditioner: the matrix must be symmetric positive definite."
        ) from None


def checked_preconditioner(preconditioner, d, schedule):
    """Check the argument: "auto" is 1 with a given learning rate, whose unit it would change."""
    if isinstance(preconditioner, str):
        if preconditioner not in ("auto", "diag", "dense"):
            raise ValueError(
                f'preconditioner={preconditioner!r}: pass "auto", None, "diag", "dense" or an '
                f"array of shape ({d},) or ({d}, {d})."
            )
        if preconditioner == "dense":
            check_matrix_size('preconditioner="dense"', d)
        return None if preconditioner == "auto" and schedule is not None else preconditioner
    if preconditioner is not None:
        preconditioner_factor(preconditioner, d)
        preconditioner = np.asarray(preconditioner, dtype=float)
    return preconditioner
