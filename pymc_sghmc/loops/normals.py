"""Standard normals: NumPy's own if few are needed, a faster generator if many are.

With hundreds of thousands of parameters the noise costs more than the gradient: NumPy's normals
take about 9 ns each. SplitMix64 and the transform of Box and Muller take 1 to 2 ns, because they
are written so that the compiler finds vector instructions.
"""

import math

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pymc_sghmc.loops.machine_code import compiled_once
from pymc_sghmc.protocols import Array

__all__ = ["box_muller", "fill_uniforms", "standard_normals"]

MANY = 2**14  # number of normals from which the transform is faster
HALF = 512  # numbers in half a block, which fits into the processor's first cache
GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's step of the counter
ONE = 0x3FF0000000000000  # bits
SQRT_HALF = 0x3FE6A09E667F3BCD
MANTISSA = 0xFFFFFFFFFFFFF
# Coefficients of power series, the highest first
ARTANH = tuple(1 / (2 * k + 1) for k in range(9, -1, -1))  # artanh(f)/f by f²; f² < 0.03
SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1))  # sin(a)/a by a²
COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(7, -1, -1))  # cos(a) by a²; |a| < π/4


def standard_normals(rng: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Draw standard normals; many at a time by `box_muller` if Numba is installed."""
    size = math.prod(shape)
    compiled = _compiled() if size >= MANY else None
    if compiled is None:
        return rng.standard_normal(shape, dtype=dtype)
    normals = np.empty(-(-size // (2 * HALF)) * 2 * HALF)
    fill, transform = compiled
    seed = rng.integers(2**64, dtype=np.uint64)
    fill(normals, seed)
    transform(normals)
    return normals[:size].reshape(shape).astype(dtype, copy=False)


def fill_uniforms(out: npt.NDArray[np.float64], seed: np.uint64) -> None:
    """Fill an array with uniforms on [0, 1): SplitMix64 of a counter (Steele, Lea & Flood 2014)."""
    bits = out.view(np.uint64)
    counter = np.uint64(seed)
    for i in range(out.size):
        word = (counter ^ (counter >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
        bits[i] = (word >> np.uint64(12)) | np.uint64(ONE)  # a number in [1, 2)
        counter += np.uint64(GAMMA)
    for i in range(out.size):
        out[i] -= 1.0


def box_muller(uniforms: npt.NDArray[np.float64]) -> None:
    """Turn uniforms on [0, 1) into independent standard normals, in place.

    Of each block of 2 × `HALF` numbers the first half gives the radii √(−2 log(1 − u)), the second
    half the angles, in quarters of a turn: a whole number of them and a rest within half a quarter.
    """
    x = np.empty(HALF)
    exponent = np.empty(HALF)
    bits = x.view(np.int64)
    for start in range(0, uniforms.size, 2 * HALF):
        first = uniforms[start : start + HALF]
        second = uniforms[start + HALF : start + 2 * HALF]
        for i in range(HALF):
            x[i] = 1.0 - first[i]
        for i in range(HALF):  # 1 − u = x 2^exponent with x in [√½, √2)
            above = bits[i] - SQRT_HALF
            exponent[i] = float(above >> 52)
            bits[i] = (above & MANTISSA) + SQRT_HALF
        for i in range(HALF):
            f = (x[i] - 1.0) / (x[i] + 1.0)
            log = 0.0
            sin = 0.0
            cos = 0.0
            for c in ARTANH:
                log = log * f * f + c
            log = exponent[i] * math.log(2) + 2.0 * f * log
            radius = math.sqrt(-2.0 * log)
            quarters = 4.0 * second[i]
            quarter = math.floor(quarters)
            angle = (quarters - quarter - 0.5) * (math.pi / 2)
            for c in SIN:
                sin = sin * angle * angle + c
            for c in COS:
                cos = cos * angle * angle + c
            sin = sin * angle
            is_odd = (quarter == 1.0) | (quarter == 3.0)
            x_part = sin if is_odd else cos
            y_part = cos if is_odd else sin
            first[i] = -radius * x_part if (quarter == 1.0) | (quarter == 2.0) else radius * x_part
            second[i] = -radius * y_part if quarter >= 2.0 else radius * y_part


@cache
def _compiled() -> tuple[Callable[..., None], Callable[..., None]] | None:
    """Return both functions compiled by Numba, or None without Numba."""
    options: dict[str, Any] = {"fastmath": {"contract"}}
    try:
        return compiled_once(fill_uniforms, **options), compiled_once(box_muller, **options)
    except ImportError:
        return None
