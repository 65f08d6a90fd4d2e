"""Coordinates in which the posterior has unit scale.

A preconditioner M⁻¹ = LLᵀ is a change of coordinates θ = Lφ: the update rules keep a scalar η, and
η of theirs in φ is ηM⁻¹ in θ, for noise and friction too. Knows no samplers.
"""

import numpy as np

from scipy.linalg import solve_triangular

from pymc_sghmc.checks import check_matrix_size
from pymc_sghmc.gradients.gradients import NoisyGradient

__all__ = ["PreconditionedGradient", "checked_preconditioner", "preconditioner_factor"]


class PreconditionedGradient(NoisyGradient):
    """A gradient in the coordinates φ with θ = Lφ, in which the preconditioner LLᵀ = M⁻¹ is 1.

    The update rules keep a scalar η: η of theirs in φ is ηM⁻¹ in θ, for noise and friction too.

    Parameters
    ----------
    gradient : callable
        In θ.
    factor : array of shape (d,) or (d, d)
        L, see `preconditioner_factor`.
    """

    def __init__(self, gradient, factor):
        self.gradient = gradient
        self.draw_minibatch = gradient.draw_minibatch
        self.factor = factor
        if factor.ndim == 1:
            self.to_theta, self._pull_back = factor.__mul__, factor.__mul__
        else:
            self.to_theta, self._pull_back = factor.dot, np.ascontiguousarray(factor.T).dot

    @property
    def is_noisy(self) -> list[bool]:
        """Whether a minibatch of each group is less than all of its rows."""
        return self.gradient.is_noisy

    def draw_probe(self, rng) -> tuple:
        """Draw a minibatch that no step of a chain is made of."""
        return self.gradient.draw_probe(rng)

    def from_theta(self, theta):
        """φ = L⁻¹θ."""
        if self.factor.ndim == 1:
            return theta / self.factor
        return solve_triangular(self.factor, theta, lower=True)

    def __call__(self, position, minibatch):
        """Log-density and its gradient with respect to φ."""
        logp, grad = self.gradient(self.to_theta(position), minibatch)
        return logp, self._pull_back(grad)


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
                f'preconditioner={preconditioner!r}: pass "auto", None, "diag", "dense" or an array '
                f"of shape ({d},) or ({d}, {d})."
            )
        if preconditioner == "dense":
            check_matrix_size('preconditioner="dense"', d)
        return None if preconditioner == "auto" and schedule is not None else preconditioner
    if preconditioner is not None:
        preconditioner_factor(preconditioner, d)
        preconditioner = np.asarray(preconditioner, dtype=float)
    return preconditioner
