"""Loops over groups of correlated coefficients, compiled by Numba once per machine.

The symbols are those of `correlated_effects`. This file needs Numba, and is imported only where a
model has such effects. A scale of zero leaves what is infinite or no number, and is no error. Knows
arrays of numbers alone.
"""

import numpy as np

from pymc_sghmc.loops.machine_code import compiled_once
from pymc_sghmc.protocols import Array

__all__ = [
    "coefficients",
    "slopes_of_coefficients",
    "slopes_of_unmixed",
    "standard_coefficients",
    "unmixed",
]


@compiled_once
def _root(C: Array, h: Array, R: Array) -> None:
    """Fill R, upper triangular, with RRᵀ = 1 + Cᵀdiag(h)C, of one group."""
    n = h.size
    for k in range(n - 1, -1, -1):
        for j in range(k, -1, -1):
            total = 1.0 if j == k else 0.0
            for m in range(k, n):
                total += C[m, j] * C[m, k] * h[m]
            for m in range(k + 1, n):
                total -= R[j, m] * R[k, m]
            R[j, k] = np.sqrt(total) if j == k else total / R[k, k]


@compiled_once
def _pulled(C: Array, f: Array, R: Array, p: Array) -> None:
    """Fill p with R⁻¹Cᵀf."""
    n = f.size
    for k in range(n - 1, -1, -1):
        total = 0.0
        for m in range(k, n):
            total += C[m, k] * f[m]
        for m in range(k + 1, n):
            total -= R[k, m] * p[m]
        p[k] = total / R[k, k]


@compiled_once
def _coefficients(s: Array, C: Array, h: Array, f: Array) -> tuple[Array, Array, Array]:
    """Return v, Cv and the log-determinant of v by s."""
    n_groups, n = s.shape
    v = np.empty_like(s)
    mixed = np.empty_like(s)
    log_slopes = np.empty(n_groups, s.dtype)
    R = np.empty((n, n))
    p = np.empty(n)
    for g in range(n_groups):
        _root(C, h[g], R)
        _pulled(C, f[g], R, p)
        log_slope = 0.0
        for k in range(n):
            total = s[g, k] + p[k]
            for m in range(k):
                total -= R[m, k] * v[g, m]
            v[g, k] = total / R[k, k]
            log_slope -= np.log(R[k, k])
            along = 0.0
            for m in range(k + 1):
                along += C[k, m] * v[g, m]
            mixed[g, k] = along
        log_slopes[g] = log_slope
    return v, mixed, log_slopes


@compiled_once
def _standard_coefficients(v: Array, C: Array, h: Array, f: Array) -> Array:
    """Return s = Rᵀv − R⁻¹Cᵀf."""
    n_groups, n = v.shape
    s = np.empty_like(v)
    R = np.empty((n, n))
    p = np.empty(n)
    for g in range(n_groups):
        _root(C, h[g], R)
        _pulled(C, f[g], R, p)
        for k in range(n):
            total = -p[k]
            for m in range(k + 1):
                total += R[m, k] * v[g, m]
            s[g, k] = total
    return s


@compiled_once
def _slopes_of_coefficients(
    v: Array, C: Array, h: Array, f: Array, by_v: Array, by_mixed: Array, by_log_slope: Array
) -> tuple[Array, Array, Array, Array]:
    """Return the gradient by s, C, h and f, given that by the three results.

    In the reverse order of `_coefficients`.
    """
    n_groups, n = v.shape
    by_s = np.empty_like(v)
    by_C = np.zeros((n, n))
    by_h = np.empty_like(v)
    by_f = np.empty_like(v)
    R = np.empty((n, n))
    p = np.empty(n)
    q = np.empty(n)  # the gradient by Cᵀf
    by_A = np.empty((n, n))
    for g in range(n_groups):
        _root(C, h[g], R)
        _pulled(C, f[g], R, p)
        for k in range(n - 1, -1, -1):  # v = R⁻ᵀ(s + p), and Cv
            total = by_v[g, k]
            for m in range(k, n):
                total += C[m, k] * by_mixed[g, m]
            for m in range(k + 1, n):
                total -= R[k, m] * by_s[g, m]
            by_s[g, k] = total / R[k, k]
        for k in range(n):  # p = R⁻¹Cᵀf
            total = by_s[g, k]
            for m in range(k):
                total -= R[m, k] * q[m]
            q[k] = total / R[k, k]
        for k in range(n):
            for j in range(k + 1):
                by_A[j, k] = -v[g, j] * by_s[g, k] - q[j] * p[k]  # by R, so far
                by_C[k, j] += by_mixed[g, k] * v[g, j] + f[g, k] * q[j]
            by_A[k, k] -= by_log_slope[g] / R[k, k]
        _through_root(R, by_A)
        _through_precision(by_A, C, h[g], by_C, by_h[g])
        for m in range(n):
            by_f[g, m] = 0.0
            for k in range(m + 1):
                by_f[g, m] += C[m, k] * q[k]
    return by_s, by_C.astype(v.dtype), by_h, by_f


@compiled_once
def _through_root(R: Array, slopes: Array) -> None:
    """Turn the gradient by R into that by A, both in the upper triangle."""
    n = R.shape[0]
    for k in range(n):
        for j in range(k):
            slopes[j, k] /= R[k, k]
            slopes[k, k] -= slopes[j, k] * R[j, k]
            for m in range(k + 1, n):
                slopes[j, m] -= slopes[j, k] * R[k, m]
                slopes[k, m] -= slopes[j, k] * R[j, m]
        slopes[k, k] /= 2 * R[k, k]
        for m in range(k + 1, n):
            slopes[k, m] -= 2 * slopes[k, k] * R[k, m]


@compiled_once
def _through_precision(slopes: Array, C: Array, h: Array, by_C: Array, by_h: Array) -> None:
    """Turn the gradient by A's upper triangle into that by C, which is added, and by h."""
    for m in range(h.size):
        by_h[m] = 0.0
        for k in range(m + 1):
            for j in range(k + 1):
                slope = slopes[j, k]
                by_h[m] += slope * C[m, j] * C[m, k]
                by_C[m, j] += slope * C[m, k] * h[m]
                by_C[m, k] += slope * C[m, j] * h[m]


# Arrays may be of any layout. The loops above are compiled for one, and these are short.


@compiled_once
def coefficients(s: Array, C: Array, h: Array, f: Array) -> tuple[Array, Array, Array]:
    """Return v, Cv and the log-determinant of v by s."""
    ordered = np.ascontiguousarray
    return _coefficients(ordered(s), ordered(C), ordered(h), ordered(f))


@compiled_once
def standard_coefficients(v: Array, C: Array, h: Array, f: Array) -> Array:
    """Return s of v."""
    ordered = np.ascontiguousarray
    return _standard_coefficients(ordered(v), ordered(C), ordered(h), ordered(f))


@compiled_once
def slopes_of_coefficients(
    v: Array, C: Array, h: Array, f: Array, by_v: Array, by_mixed: Array, by_log_slope: Array
) -> tuple[Array, Array, Array, Array]:
    """Return the gradient by s, C, h and f."""
    ordered = np.ascontiguousarray
    by_outputs = ordered(by_v), ordered(by_mixed), ordered(by_log_slope)
    return _slopes_of_coefficients(ordered(v), ordered(C), ordered(h), ordered(f), *by_outputs)


@compiled_once
def unmixed(x: Array, C: Array) -> Array:
    """Return C⁻¹x."""
    v = np.empty(x.shape, x.dtype)
    for g in range(x.shape[0]):
        for k in range(x.shape[1]):
            total = x[g, k]
            for m in range(k):
                total -= C[k, m] * v[g, m]
            v[g, k] = total / C[k, k]
    return v


@compiled_once
def slopes_of_unmixed(v: Array, C: Array, by_v: Array) -> tuple[Array, Array]:
    """Return the gradient by x and C, given v = C⁻¹x and that by v."""
    n_groups, n = v.shape
    by_x = np.empty((n_groups, n), v.dtype)
    by_C = np.zeros((n, n))
    for g in range(n_groups):
        for k in range(n - 1, -1, -1):
            total = by_v[g, k]
            for m in range(k + 1, n):
                total -= C[m, k] * by_x[g, m]
            by_x[g, k] = total / C[k, k]
            for m in range(k + 1):
                by_C[k, m] -= by_x[g, k] * v[g, m]
    return by_x, by_C.astype(v.dtype)
