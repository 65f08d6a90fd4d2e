"""Coefficients of a group whose prior is N(μ, CCᵀ), given rows that say something of each alone.

u = μ + Cv. Given τ, the correlation and a Gaussian likelihood of precision diag(h) and h times its
mean b, v has the precision A = 1 + Cᵀdiag(h)C = RRᵀ, R upper triangular, and v = A⁻¹Cᵀ(b − hμ) +
R⁻ᵀs with s ~ N(0, 1). An array of all groups for each coefficient, as a graph. Knows graphs, no
effects and no models.
"""

from collections.abc import Sequence
from typing import Any

import pytensor.tensor as pt

__all__ = ["CorrelatedEffects"]


class CorrelatedEffects:
    """v of s, and the reverse.

    Parameters
    ----------
    C : TensorVariable, (n, n)
        Lower triangular.
    information, pull, location : sequence of n TensorVariable
        h, b and μ.

    Attributes
    ----------
    ratios : list of TensorVariable
        What the rows add to the diagonal of A.
    log_slopes : list of TensorVariable
        Of v by s, which sum to the logarithm of a determinant.
    log_scales : list of TensorVariable
        log τ, the lengths of C's rows.
    """

    def __init__(
        self,
        C: Any,
        information: Sequence[Any],
        pull: Sequence[Any],
        location: Sequence[Any],
    ) -> None:
        n = len(information)
        self.numbers = range(n)
        self.C = [[C[k, j] for j in range(k + 1)] for k in self.numbers]
        added = [[self._added(j, k, information) for k in range(j, n)] for j in self.numbers]
        self.ratios = [row[0] for row in added]
        self._R: list[list[Any]] = [[None] * n for _ in self.numbers]
        R = self._R
        for k in reversed(self.numbers):
            after = R[k][k + 1 :]
            R[k][k] = pt.sqrt(1 + self.ratios[k] - _inner(after, after))
            for j in range(k):
                R[j][k] = (added[j][k - j] - _inner(R[j][k + 1 :], after)) / R[k][k]
        self.log_slopes = [-pt.log(R[k][k]) for k in self.numbers]
        self.log_scales = [0.5 * pt.log(_inner(row, row)) for row in self.C]
        parts = zip(pull, information, location, strict=True)
        force = [b - h * mu for b, h, mu in parts]
        self._solved: list[Any] = [None] * n  # R⁻¹Cᵀ(b − hμ)
        for k in reversed(self.numbers):
            along = _inner([self.C[m][k] for m in range(k, n)], force[k:])
            known = _inner(R[k][k + 1 :], self._solved[k + 1 :])
            self._solved[k] = (along - known) / R[k][k]

    def _added(self, j: int, k: int, information: Sequence[Any]) -> Any:
        """Return an entry of Cᵀdiag(h)C, j up to k."""
        products = [row[j] * row[k] for row in self.C[k:]]
        return _inner(products, information[k:])

    def v_of(self, standard: Sequence[Any]) -> list[Any]:
        """Return v of s."""
        v: list[Any] = []
        for k in self.numbers:
            known = _inner([row[k] for row in self._R[:k]], v)
            v.append((standard[k] + self._solved[k] - known) / self._R[k][k])
        return v

    def standard_of(self, v: Sequence[Any]) -> list[Any]:
        """Return s of v."""
        return [
            _inner([row[k] for row in self._R[: k + 1]], v[: k + 1]) - self._solved[k]
            for k in self.numbers
        ]

    def mixed(self, v: Sequence[Any]) -> list[Any]:
        """Return Cv."""
        return [_inner(row, v[: len(row)]) for row in self.C]

    def unmixed(self, mixed: Sequence[Any], whole: Any, diagonal: Sequence[Any]) -> list[Any]:
        """Return v of its product with a matrix: C below the diagonal, times ``whole``."""
        v: list[Any] = []
        for k in self.numbers:
            v.append((mixed[k] - whole * _inner(self.C[k][:k], v)) / diagonal[k])
        return v


def _inner(x: Sequence[Any], y: Sequence[Any]) -> Any:
    """Return the sum of products; 0 of none."""
    return sum(one * other for one, other in zip(x, y, strict=True)) if len(x) else 0.0
