"""Minibatches without replacement: each row comes up once in every epoch.

The noise of successive minibatches is then negatively correlated: over an epoch it cancels. What a
chain needs to go on is its seed and how many minibatches it has drawn. Knows gradients and rows, no
samplers.
"""

import math

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace

from pymc_sghmc.gradients.control_variates import Anchor, ControlVariates
from pymc_sghmc.gradients.gradients import MinibatchGradient

__all__ = ["EpochGradient", "UniformControlVariates", "epoch_rows"]

ROUNDS, FEW_ROWS, MORE_ROUNDS = 3, 1000, 16  # of the permutation, each over both digits
CHUNK = 2**13  # rows computed at a time, in the processor's cache
GOLDEN = 0x9E3779B97F4A7C15  # odd, so that multiples of it never repeat


class EpochGradient(MinibatchGradient):
    """A `MinibatchGradient` of rows drawn without replacement, in a new order in each epoch.

    Where the batch size doesn't divide the number of rows, a minibatch holds the last rows of one
    epoch and the first of the next.
    """

    replace = False

    def draw_probe(self, rng) -> tuple:
        """Draw a minibatch with replacement, which isn't counted."""
        return super().draw_minibatch(rng)

    def draw_minibatch(self, rng) -> tuple:
        """Draw the next minibatch, an array of row indices for each group of rows."""
        return self.minibatch([rows[0] for rows in self.draw_minibatches(rng, 1)])

    def draw_minibatches(self, rng, k) -> tuple:
        """Draw the next ``k`` minibatches, shape (k, n), for each group that isn't used whole."""
        seed, t = self.place or (int(rng.integers(2**63)), 0)
        self.place = (seed, t + k)
        return tuple(
            [
                epoch_rows(n_rows, t * n, k * n, seed + i).reshape(k, n)
                for i, (n_rows, n, rows) in enumerate(self._draws)
                if rows is None
            ]
        )


def epoch_rows(n_rows, start, count, seed) -> np.ndarray:
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


def _permuted(x, n_rows, keys):
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


def _rotated(digit, random, base):
    """Add a random number to a digit, modulo the base."""
    digit = digit + ((random >> np.uint64(32)) * base >> np.uint64(32))
    return np.where(digit >= base, digit - base, digit)


def _mixed(x):
    """Turn numbers into random bits (the finaliser of SplitMix64, Steele, Lea & Flood 2014)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class UniformControlVariates(ControlVariates):
    """Control variates on the rows that the gradient itself draws, which count alike.

    Parameters
    ----------
    gradient : EpochGradient
    """

    def __init__(self, gradient):
        self.gradient, self.dtype = gradient, gradient.dtype
        self.has_tables = False
        self.anchor, self._known_prior = None, (None, None, None)

    def __getstate__(self):
        return {**self.__dict__, "_known_prior": (None, None, None)}

    def set_centre(self, centre, factor) -> int:
        """Take θ̂; return the passes over all rows."""
        centre = centre.astype(self.dtype)
        self.anchor = Anchor(centre, *self._likelihood(centre), pools=[], tables=[])
        return 1

    def draw_probe(self, rng) -> tuple:
        """Draw a minibatch with replacement, which isn't counted."""
        return self.gradient.draw_probe(rng)

    def draw_minibatch(self, rng) -> tuple:
        """Draw the next minibatch, an array of row indices for each group of rows."""
        return self.gradient.draw_minibatch(rng)

    def draw_minibatches(self, rng, k) -> tuple:
        """Draw the next minibatches, shape (k, n), for each group that isn't used whole."""
        return self.gradient.draw_minibatches(rng, k)

    def __call__(self, position, minibatch):
        """Log-density and gradient at ``position``."""
        centre, anchor_logp, anchor, *_ = self.anchor
        logp, grad = self.gradient(position, minibatch)
        at_centre, prior = self.gradient(centre, minibatch), self._prior()
        # The prior doesn't count at θ̂: it is exact at θ.
        return logp - at_centre[0] + prior[0] + anchor_logp, grad - at_centre[1] + prior[1] + anchor

    def _prior(self):
        """Log-density and gradient of the prior at θ̂, given the other unknowns."""
        centre, given = self.anchor.centre, self.gradient.given
        if self._known_prior[0] is not centre or self._known_prior[1] is not given:
            self._known_prior = centre, given, self.gradient.prior(centre)
        return self._known_prior[2]

    def symbolic(self, position) -> tuple:
        """Return ∇ log p̃ at a symbolic position, and what it takes: see `MinibatchGradient`."""
        centre = position.type("centre_of_control_variates")
        anchor = position.type("anchor")
        here, drawn, fixed = self.gradient.symbolic(position)
        there, _, _ = self.gradient.symbolic(centre)
        prior_weight = fixed[0]
        none = {prior_weight: pt.zeros((), dtype=prior_weight.dtype)}
        [there] = clone_replace([there], none, rebuild_strict=False)
        return here - there + anchor, drawn, [centre, anchor, *fixed]

    def fixed_inputs(self) -> tuple:
        """Return the values, now, of what doesn't change from one minibatch to the next."""
        return (self.anchor.centre, self.anchor.gradient, *self.gradient.fixed_inputs())
