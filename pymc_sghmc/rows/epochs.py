"""Minibatches without replacement: each row comes up once in every epoch.

The noise of successive minibatches is then negatively correlated: over an epoch it cancels. Knows
rows, no gradients.
"""

import math

import numpy as np

from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import Minibatches
from pymc_sghmc.rows.orders import Even, Place

__all__ = ["Epochs", "epoch_rows"]

ROUNDS = 3  # of the permutation, each over both digits
FEW_ROWS = 1000
MORE_ROUNDS = 16
CHUNK = 2**13  # rows computed at a time, in the processor's cache
GOLDEN = 0x9E3779B97F4A7C15  # odd, so that multiples of it never repeat


class Epochs(Even):
    """Rows are drawn without replacement, in a new order in each epoch.

    Where the batch size doesn't divide the number of rows, a minibatch holds the last rows of one
    epoch and the first of the next. The place of a chain is its seed and how many minibatches it
    has drawn.

    Parameters
    ----------
    data : InMemory
    """

    def draw(self, rng: np.random.Generator, place: Place, k: int) -> tuple[Minibatches, Place]:
        """Draw the next ``k`` minibatches."""
        seed, t = place or (int(rng.integers(2**63)), 0)
        data = self.data
        drawn = [
            epoch_rows(n_rows, t * n, k * n, seed + i).reshape(k, n)
            for i, (n_rows, n) in enumerate(zip(data.n_rows, data.batch_sizes, strict=True))
            if data.whole[i] is None
        ]
        return Minibatches(tuple(drawn), data.whole, data.resident), (seed, t + k)


def epoch_rows(n_rows: int, start: int, count: int, seed: int) -> Array:
    """Return entries ``start`` to ``start + count`` of the endless sequence of shuffled epochs.

    Each epoch is a permutation of the rows by a Feistel network over pairs of digits in bases a
    and b with a·b just above the number of rows; rows beyond it walk on along their cycle (Black &
    Rogaway 2002, Ciphers with arbitrary finite domains). It takes no memory.
    """
    out = np.empty(count, dtype=np.int64)
    for begin in range(0, count, CHUNK):
        stop = min(begin + CHUNK, count)
        places = np.arange(start + begin, start + stop, dtype=np.uint64)
        keys = _mixed(places // np.uint64(n_rows) * np.uint64(GOLDEN) + np.uint64(seed))
        out[begin:stop] = _permuted(places % np.uint64(n_rows), n_rows, keys)
    return out


def _permuted(x: Array, n_rows: int, keys: Array) -> Array:
    a = np.uint64(math.isqrt(n_rows - 1) + 1)
    b = np.uint64(-(-n_rows // int(a)))
    left, right = np.divmod(x, b)
    for i in range(ROUNDS if n_rows > FEW_ROWS else MORE_ROUNDS):
        round_keys = keys + np.uint64((i + 1) * GOLDEN % 2**64)
        left = _rotated(left, _mixed(right ^ round_keys), a)
        right = _rotated(right, _mixed(left ^ ~round_keys), b)
    x = left * b + right
    beyond = x >= n_rows
    if beyond.any():
        x[beyond] = _permuted(x[beyond], n_rows, keys[beyond])
    return x


def _rotated(digit: Array, random: Array, base: np.uint64) -> Array:
    """Add a random number to a digit, modulo the base."""
    digit = digit + ((random >> np.uint64(32)) * base >> np.uint64(32))
    return np.where(digit >= base, digit - base, digit)


def _mixed(x: Array) -> Array:
    """Turn numbers into random bits (the finaliser of SplitMix64, Steele, Lea & Flood 2014)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
