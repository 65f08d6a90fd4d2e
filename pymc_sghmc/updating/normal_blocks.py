"""A joint Gaussian as distributions of PyMC, one for each variable given those before it.

v_k | v_1, ..., v_{k-1} ~ N(m_k + B_k (v_{<k} − m_{<k}), L_k L_kᵀ) on the unconstrained scale. Knows
Gaussians and PyMC's variables and transforms; no models, no runs.
"""

import math

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc.logprob.transforms import ChainedTransform, IntervalTransform
from pymc.pytensorf import rvs_in_graph
from scipy.linalg import solve_triangular

from pymc_sghmc.protocols import Array

__all__ = ["ConditionalBlock", "Transformed", "conditional_blocks"]


@dataclass(frozen=True)
class ConditionalBlock:
    """The law of one variable given those before it.

    Attributes
    ----------
    mean : array of shape (n,)
        Where those before it are at their means.
    before : array of shape (k,)
        Means of those before it.
    slopes : array of shape (n, k)
        B, of its mean by those before it.
    factor : array of shape (n, n)
        L, lower triangular, whose square LLᵀ is the covariance.
    """

    mean: Array
    before: Array
    slopes: Array
    factor: Array


def conditional_blocks(
    mean: Array, covariance: Array, places: Sequence[slice]
) -> list[ConditionalBlock]:
    """Cut a Gaussian into the laws of its variables, each given those before it.

    Parameters
    ----------
    mean : array of shape (d,)
    covariance : array of shape (d, d)
    places : list of slice
        Of the variables, one after another.
    """
    L = np.linalg.cholesky(covariance)
    blocks = []
    for place in places:
        n_before = place.start
        # v_k = m_k + L_k< z_< + L_kk z_k, and z_< = L_<⁻¹ (v_< − m_<)
        across = L[place, :n_before]
        slopes = across
        if n_before:
            slopes = solve_triangular(L[:n_before, :n_before], across.T, lower=True, trans="T").T
        blocks.append(
            ConditionalBlock(
                mean=mean[place], before=mean[:n_before], slopes=slopes, factor=L[place, place]
            )
        )
    return blocks


class Transformed:
    """A free variable of a model and its transform.

    Parameters
    ----------
    rv : TensorVariable
    transform : Transform or None
    shape : tuple of int
        Of the variable on the unconstrained scale.

    Attributes
    ----------
    transform : Transform or None
        One that doesn't depend on the distribution of the variable: bounds are numbers.
    """

    def __init__(self, rv: Any, transform: Any, shape: tuple[int, ...]) -> None:
        self._rv = rv
        self._shape = shape
        self.transform = _of_its_own(rv, transform)

    def forward(self, value: Any) -> Any:
        """From the variable's own scale to the unconstrained one."""
        return value if self.transform is None else self.transform.forward(value)

    def backward(self, value: Any) -> Any:
        """From the unconstrained scale to the variable's own."""
        return value if self.transform is None else self.transform.backward(value)

    def unconstrained(self, value: Any) -> Any:
        """Return the unconstrained entries as a vector, (n,)."""
        return self.forward(value).ravel()

    def forward_of(self, value: Array) -> Array:
        """Return unconstrained values of numbers."""
        symbol = self._rv.type("value")
        [there] = pm.compile([symbol], [self.forward(symbol)], mode="FAST_COMPILE")(
            np.asarray(value, dtype=self._rv.dtype)
        )
        return np.asarray(there, dtype=float)

    def backward_of(self, value: Array) -> Array:
        """Return values on the variable's own scale of unconstrained numbers."""
        symbol = pt.tensor("value", dtype=self._rv.dtype, shape=self._shape)
        [there] = pm.compile([symbol], [self.backward(symbol)], mode="FAST_COMPILE")(
            value.reshape(self._shape).astype(self._rv.dtype)
        )
        return np.asarray(there, dtype=float)

    def distribution(self, block: ConditionalBlock, before: Sequence[Any]) -> Any:
        """Return a random variable of the type of the old one, given those before it.

        Parameters
        ----------
        block : ConditionalBlock
        before : list of TensorVariable
            Unconstrained vectors.
        """
        dtype = self._rv.dtype
        mean = pt.as_tensor(block.mean.astype(dtype))
        if before:
            off = pt.concatenate(before) - block.before.astype(dtype)
            mean = mean + pt.as_tensor(block.slopes.astype(dtype)) @ off
        factor = block.factor.astype(dtype)
        inverse = np.linalg.inv(block.factor).astype(dtype)
        log_scale = float(np.log(np.diag(block.factor)).sum())
        log_constant = -log_scale - 0.5 * block.mean.size * math.log(2 * math.pi)

        def on_own_scale(vector: Any) -> Any:
            value = self.backward(vector.reshape(self._shape))
            return pt.specify_shape(value, self._rv.type.shape).astype(dtype)

        def dist(mean: Any, size: Any) -> Any:
            return on_own_scale(pm.MvNormal.dist(mean, chol=factor))

        def logp(value: Any, mean: Any) -> Any:
            vector = self.unconstrained(value)
            z = pt.as_tensor(inverse) @ (vector - mean)
            density = -0.5 * pt.square(z).sum() + np.asarray(log_constant, dtype=dtype)
            if self.transform is None:
                return density
            # PyMC asks for as many densities as the transform has Jacobians: equal shares of one
            jacobian = self.transform.log_jac_det(vector.reshape(self._shape))
            return density / jacobian.size - jacobian

        def support_point(rv: Any, size: Any, mean: Any) -> Any:
            return on_own_scale(mean)

        axes = ",".join(f"a{i}" for i in range(self._rv.ndim))
        return pm.CustomDist.dist(
            mean,
            dist=dist,
            logp=logp,
            support_point=support_point,
            signature=f"(n)->({axes})",
            class_name="GaussianPosterior",
        )


def _of_its_own(rv: Any, transform: Any) -> Any:
    """Return a transform that needs no parameters of the variable's distribution."""
    if transform is None:
        return None
    if isinstance(transform, IntervalTransform):
        return _interval(rv, transform)
    parts = transform.transform_list if isinstance(transform, ChainedTransform) else [transform]
    if all(type(part).__module__.startswith("pymc.") for part in parts) and not any(
        isinstance(part, IntervalTransform) for part in parts
    ):
        return transform
    raise ValueError(
        f"apply: the transform of {rv.name!r} may depend on the distribution of the variable. Use "
        "one of PyMC's own transforms, not chained with an interval."
    )


def _interval(rv: Any, transform: Any) -> IntervalTransform:
    """Return an interval with bounds that are numbers."""
    bounds: list[Any] = []
    for bound in transform.args_fn(*rv.owner.inputs):
        if bound is None:
            bounds.append(None)
            continue
        bound = pt.as_tensor(bound)
        if rvs_in_graph([bound]):
            raise ValueError(
                f"prior_from: the bounds of {rv.name!r} depend on other parameters. Give it fixed "
                "bounds, or sample a parameter without bounds of which it is a function."
            )
        [number] = pm.compile([], [bound], mode="FAST_COMPILE")()
        bounds.append(np.asarray(number))
    return IntervalTransform(_Bounds(*bounds))


@dataclass(frozen=True)
class _Bounds:
    """Bounds of an interval, whatever the parameters of a distribution are."""

    lower: Array | None
    upper: Array | None

    def __call__(self, *inputs: Any) -> tuple[Array | None, Array | None]:
        return self.lower, self.upper
