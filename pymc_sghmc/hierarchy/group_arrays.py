"""The operations on correlated coefficients of groups as JAX has them, without loops.

The symbols are those of `correlated_effects`. This file needs JAX, and is imported only where that
is installed. Knows arrays of numbers alone.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax.scipy.linalg import solve_triangular

__all__ = [
    "coefficients",
    "slopes_of_coefficients",
    "slopes_of_unmixed",
    "standard_coefficients",
    "unmixed",
]


def _root(C: Any, h: Any) -> Any:
    """Return R, upper triangular, with RRᵀ = 1 + Cᵀdiag(h)C."""
    A = jnp.eye(h.size) + (C.T * h) @ C
    return jnp.flip(jnp.linalg.cholesky(jnp.flip(A)))


def _of_group(s: Any, C: Any, h: Any, f: Any) -> tuple[Any, Any, Any]:
    C = jnp.tril(C)
    R = _root(C, h)
    v = solve_triangular(R, s + solve_triangular(R, C.T @ f), trans=1)
    return v, C @ v, -jnp.log(jnp.diag(R)).sum()


def _standard_of_group(v: Any, C: Any, h: Any, f: Any) -> Any:
    R = _root(C, h)
    return R.T @ v - solve_triangular(R, C.T @ f)


coefficients = jax.vmap(_of_group, in_axes=(0, None, 0, 0))
standard_coefficients = jax.vmap(_standard_of_group, in_axes=(0, None, 0, 0))


def unmixed(x: Any, C: Any) -> Any:
    """Return C⁻¹x."""
    return solve_triangular(jnp.tril(C), x.T, lower=True).T


def slopes_of_coefficients(v: Any, C: Any, h: Any, f: Any, *by_outputs: Any) -> Any:
    """Return the gradient by s, C, h and f, given that by the three results."""
    s = standard_coefficients(v, C, h, f)
    return jax.vjp(coefficients, s, C, h, f)[1](by_outputs)


def slopes_of_unmixed(v: Any, C: Any, by_v: Any) -> Any:
    """Return the gradient by x and C, given v = C⁻¹x and that by v."""
    return jax.vjp(unmixed, v @ C.T, C)[1](by_v)
