"""Metrics: linear coordinates φ with θ = Lφ, in which the posterior has about unit scale.

A preconditioner M⁻¹ = LLᵀ is a change of coordinates. The update rules keep a scalar learning rate
η; in φ it acts as ηM⁻¹ in θ, and so do noise and friction. Knows no samplers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from numpy.typing import DTypeLike, NDArray
from scipy.linalg import solve_triangular

from pymc_sghmc.checks import check_matrix_size
from pymc_sghmc.records import ByValue

__all__ = [
    "Dense",
    "Diagonal",
    "Identity",
    "LowRank",
    "Metric",
    "checked_preconditioner",
    "preconditioner_metric",
]

Array = NDArray[Any]  # or a variable of a graph, in metrics that `Metric.on_graph` returns


class Metric(ByValue, ABC):
    """The linear map L of θ = Lφ; LLᵀ = M⁻¹ is the preconditioner.

    Attributes
    ----------
    kind : str
        How it is called in the log.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of parameters, d."""

    @property
    def arrays(self) -> dict[str, Array]:
        """What compiled functions take for it, by name."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    def on_graph(self, variables: Mapping[str, Any]) -> Self:
        """Return the same map with variables of a graph in place of its `arrays`."""
        return replace(self, **variables)  # type: ignore[type-var]

    def astype(self, dtype: DTypeLike) -> Self:
        """Return it in another precision."""
        return self.on_graph({name: array.astype(dtype) for name, array in self.arrays.items()})

    @abstractmethod
    def to_theta(self, phi: Array) -> Array:
        """θ = Lφ."""

    def to_thetas(self, phis: Array) -> Array:
        """θ = Lφ for each row φ of a matrix."""
        return np.array([self.to_theta(phi) for phi in phis])

    @abstractmethod
    def from_theta(self, theta: Array) -> Array:
        """φ = L⁻¹θ."""

    @abstractmethod
    def pull_back(self, gradient: Array) -> Array:
        """Lᵀg, the gradient with respect to φ."""

    @abstractmethod
    def shrunk(self, by: Any) -> "Metric":
        """Return a metric with smaller scales: by one number, or by one number for each of φ."""

    @abstractmethod
    def sds(self) -> Array:
        """Return standard deviations of θ where those of φ are 1, (d,)."""

    @abstractmethod
    def matrix(self) -> Array:
        """L as a matrix, (d, d)."""

    @abstractmethod
    def diagonal(self) -> "Diagonal":
        """Return a metric of scales alone, without dependence between parameters."""


@dataclass(frozen=True, eq=False)
class Identity(Metric):
    """θ = φ of d parameters."""

    d: int
    kind = "no"

    @property
    def size(self) -> int:
        """Number of parameters, d."""
        return self.d

    @property
    def arrays(self) -> dict[str, Array]:
        """None: compiled functions take nothing for it."""
        return {}

    def to_theta(self, phi: Array) -> Array:
        """θ = Lφ."""
        return phi

    def from_theta(self, theta: Array) -> Array:
        """φ = L⁻¹θ."""
        return theta

    def pull_back(self, gradient: Array) -> Array:
        """Lᵀg."""
        return gradient

    def shrunk(self, by: Any) -> "Diagonal":
        """Return a metric with smaller scales."""
        return Diagonal(np.ones(self.d)).shrunk(by)

    def sds(self) -> Array:
        """Return standard deviations of θ where those of φ are 1, (d,)."""
        return np.ones(self.d)

    def matrix(self) -> Array:
        """L as a matrix, (d, d)."""
        return np.eye(self.d)

    def diagonal(self) -> "Diagonal":
        """Return a metric of scales alone."""
        return Diagonal(np.ones(self.d))

    def decomposed(self) -> tuple[Array, Array, Array]:
        """Scales s, orthonormal rows U and stretches c of L = diag(s)(I + UᵀcU)."""
        return np.ones(self.d), np.zeros((0, self.d)), np.zeros(0)


@dataclass(frozen=True, eq=False)
class Diagonal(Metric):
    """A scale for each parameter."""

    scales: Array  # (d,)
    kind = "diagonal"

    @property
    def size(self) -> int:
        """Number of parameters, d."""
        return int(self.scales.size)

    def to_theta(self, phi: Array) -> Array:
        """θ = Lφ."""
        return self.scales * phi

    def from_theta(self, theta: Array) -> Array:
        """φ = L⁻¹θ."""
        return theta / self.scales

    def pull_back(self, gradient: Array) -> Array:
        """Lᵀg."""
        return self.scales * gradient

    def shrunk(self, by: Any) -> "Diagonal":
        """Return a metric with smaller scales."""
        return Diagonal(self.scales * np.asarray(by, dtype=self.scales.dtype))

    def sds(self) -> Array:
        """Return standard deviations of θ where those of φ are 1, (d,), in double precision."""
        return self.scales * np.ones(self.size)

    def matrix(self) -> Array:
        """L as a matrix, (d, d)."""
        return np.diag(self.sds())

    def diagonal(self) -> "Diagonal":
        """Return a metric of scales alone."""
        return self

    def decomposed(self) -> tuple[Array, Array, Array]:
        """Scales s, orthonormal rows U and stretches c of L = diag(s)(I + UᵀcU)."""
        return self.sds(), np.zeros((0, self.size)), np.zeros(0)


@dataclass(frozen=True, eq=False)
class Dense(Metric):
    """A lower triangular matrix."""

    factor: Array  # (d, d)
    kind = "dense"

    @property
    def size(self) -> int:
        """Number of parameters, d."""
        return len(self.factor)

    @cached_property
    def _transposed(self) -> Array:
        """Lᵀ; a copy where that is an array, as products by rows are faster."""
        is_array = isinstance(self.factor, np.ndarray)
        return np.ascontiguousarray(self.factor.T) if is_array else self.factor.T

    def to_theta(self, phi: Array) -> Array:
        """θ = Lφ."""
        return self.factor @ phi

    def to_thetas(self, phis: Array) -> Array:
        """θ = Lφ for each row φ, by one product."""
        return phis @ self.factor.T

    def from_theta(self, theta: Array) -> Array:
        """φ = L⁻¹θ."""
        # a chain that has run away may ask for it, too: without a check of what is finite
        return solve_triangular(self.factor, theta, lower=True, check_finite=False)

    def pull_back(self, gradient: Array) -> Array:
        """Lᵀg."""
        return self._transposed @ gradient

    def shrunk(self, by: Any) -> "Dense":
        """Return it with smaller columns."""
        factor = self.factor.copy()
        factor *= np.asarray(by, dtype=factor.dtype)
        return Dense(factor)

    def sds(self) -> Array:
        """Return standard deviations of θ where those of φ are 1, (d,)."""
        return np.sqrt(np.square(self.factor).sum(axis=1))

    def matrix(self) -> Array:
        """L as a matrix, (d, d)."""
        return self.factor

    def diagonal(self) -> "Diagonal":
        """Return a metric of scales alone."""
        return Diagonal(self.sds())


@dataclass(frozen=True, eq=False)
class LowRank(Metric):
    """A scale for each parameter, and k directions that are stretched: L = diag(s)(I + UᵀcU).

    Few directions in which parameters depend on each other cost 4kd multiplications a step, where a
    matrix costs 2d².
    """

    scales: Array  # s, (d,)
    directions: Array  # U, orthonormal rows, (k, d)
    stretched: Array  # cU, (k, d)
    kind = "low-rank"

    @classmethod
    def of(cls, scales: Array, directions: Array, stretches: Array) -> "LowRank":
        """Make it of s, U and c."""
        # Views of one array: its layout decides in which order products are summed and rounded.
        stacked = np.concatenate([scales[None], directions, stretches[:, None] * directions])
        k = len(directions)
        return cls(stacked[0], stacked[1 : k + 1], stacked[k + 1 :])

    @property
    def size(self) -> int:
        """Number of parameters, d."""
        return int(self.scales.size)

    def to_theta(self, phi: Array) -> Array:
        """θ = Lφ."""
        return self.scales * (phi + (self.directions @ phi) @ self.stretched)

    def from_theta(self, theta: Array) -> Array:
        """φ = L⁻¹θ."""
        scales, U, c = self.decomposed()
        return theta / scales - ((U @ (theta / scales)) * c / (1 + c)) @ U

    def pull_back(self, gradient: Array) -> Array:
        """Lᵀg."""
        scaled = self.scales * gradient
        return scaled + (self.directions @ scaled) @ self.stretched

    def shrunk(self, by: Any) -> "LowRank":
        """Return it with smaller scales of θ, and rows contiguous as steps need them."""
        return LowRank(
            self.scales * np.asarray(by, dtype=self.scales.dtype),
            np.ascontiguousarray(self.directions),
            np.ascontiguousarray(self.stretched),
        )

    def sds(self) -> Array:
        """Return standard deviations of θ where those of φ are 1, (d,)."""
        scales, U, c = self.decomposed()
        return scales * np.sqrt(1 + (2 * c + np.square(c)) @ np.square(U))

    def matrix(self) -> Array:
        """L as a matrix, (d, d)."""
        return np.column_stack([self.to_theta(phi) for phi in np.eye(self.size)])

    def diagonal(self) -> "Diagonal":
        """Return a metric of scales alone."""
        return Diagonal(self.scales)

    def decomposed(self) -> tuple[Array, Array, Array]:
        """Scales s, orthonormal rows U and stretches c of L = diag(s)(I + UᵀcU)."""
        return self.scales, self.directions, (self.directions * self.stretched).sum(axis=1)


def preconditioner_metric(preconditioner: Any, d: int) -> Diagonal | Dense:
    """Check M⁻¹ and return the metric with LLᵀ = M⁻¹, by square roots or Cholesky's factor.

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
            f"parameters: pass an array of shape ({d},) or ({d}, {d})."
        )
    if matrix.ndim == 1:
        if not (np.isfinite(matrix).all() and (matrix > 0).all()):
            raise ValueError("preconditioner: all entries must be finite and above zero.")
        return Diagonal(np.sqrt(matrix))
    try:
        if not np.allclose(matrix, matrix.T):
            raise np.linalg.LinAlgError
        return Dense(np.linalg.cholesky(matrix))
    except np.linalg.LinAlgError:
        raise ValueError(
            "preconditioner: the matrix must be symmetric positive definite."
        ) from None


def checked_preconditioner(preconditioner: Any, d: int, schedule: Any) -> Any:
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
        preconditioner_metric(preconditioner, d)
        preconditioner = np.asarray(preconditioner, dtype=float)
    return preconditioner
