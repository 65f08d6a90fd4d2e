"""Control variates: a minibatch gradient whose noise vanishes at a centre.

Knows gradients and rows, no samplers and no way of finding a centre.
"""

from typing import NamedTuple

import numpy as np

from pymc_sghmc.gradients import NoisyGradient

__all__ = ["Anchor", "ControlVariates"]

N_LEVERAGE_PROBES = 16  # pairs of points, or fewer above ...
N_FEW_ROWS = 2_000_000


class Anchor(NamedTuple):
    """What control variates know of all rows."""

    centre: np.ndarray  # θ̂, (d,)
    logp: np.ndarray  # log-likelihood at θ̂, scalar
    gradient: np.ndarray  # ∇ log-likelihood at θ̂, (d,)
    pools: list  # of each group: rows, each as often as it counts, and these counts


class ControlVariates(NoisyGradient):
    """A gradient whose noise vanishes at a centre θ̂ (Baker, Fearnhead, Fox & Nemeth 2019).

    ∇Ũ(θ) = ∇U(θ̂) + [minibatch gradient at θ − the same minibatch's gradient at θ̂], the prior
    exact at θ. Unbiased for every centre; near it the noise is that of the difference alone.

    Rows are drawn with a probability that grows with their leverage, how much of the posterior's
    curvature they bring, and count for as much less: an outlier that uniform minibatches would
    miss for a thousand steps, and that would then throw the chain off, comes up often and gently.

    Parameters
    ----------
    gradient : MinibatchGradient
    """

    def __init__(self, gradient):
        self.gradient = gradient
        self.dtype = gradient.dtype
        self.function = gradient.difference_function()
        self.row_function = gradient.row_function()
        self.anchor = None

    @property
    def is_noisy(self) -> list[bool]:
        """Whether a minibatch of each group is less than all of its rows."""
        return self.gradient.is_noisy

    def set_centre(self, centre, factor) -> int:
        """Take θ̂, and L with LLᵀ near the posterior covariance; return the passes over all rows."""
        few = sum(self.gradient.n_rows) <= N_FEW_ROWS
        shape = (N_LEVERAGE_PROBES if few else N_LEVERAGE_PROBES // 4, centre.size)
        # wider than the posterior, whose tails count, too
        z = 1.5 * np.random.default_rng(0).standard_normal(shape)
        shifts = z @ factor.T if factor.ndim == 2 else z * factor
        points = [centre, *(centre + sign * shift for shift in shifts for sign in (1, -1))]
        points = [point.astype(self.dtype) for point in points]
        pools = []
        with np.errstate(all="ignore"):
            leverages = self.gradient.leverages(self.row_function, points)
        for leverage in leverages:
            # Row i is in the pool 1 + ⌊3 leverage / mean⌋ times; rows are drawn evenly from it.
            mean = float(leverage.mean(dtype=float))
            counts = (1 + (3 * leverage / mean if mean > 0 else leverage)).astype(np.int32)
            pools.append((np.repeat(np.arange(counts.size, dtype=np.int32), counts), counts))
        self.anchor = Anchor(points[0], *self._likelihood(points[0]), pools)
        return 1 + len(points)

    def move_anchor(self):
        """Compute the log-likelihood and its gradient at θ̂ anew: one pass over all rows."""
        logp, grad = self._likelihood(self.anchor.centre)
        self.anchor = self.anchor._replace(logp=logp, gradient=grad)

    def _likelihood(self, centre):
        logp, grad = self.gradient.likelihood(centre)
        logp_dtype = self.function.maker.fgraph.inputs[2].type.dtype
        return np.asarray(logp, dtype=logp_dtype), grad.astype(self.dtype)

    def draw_minibatch(self, rng) -> tuple:
        """Draw the rows of one minibatch, an array of row indices for each group of rows."""
        return tuple(
            [
                pool[rng.integers(pool.size, size=n)].astype(np.int64) if rows is None else rows
                for (pool, _), (_, n, rows) in zip(
                    self.anchor.pools, self.gradient._draws, strict=True
                )
            ]
        )

    def __call__(self, position, minibatch):
        """Log-density and gradient at ``position``."""
        uniform, inputs = self.gradient._weights, self.gradient._inputs
        centre, logp, grad, pools = self.anchor
        weights = [
            (pool.size / rows.size / counts[rows]).astype(weight.dtype, copy=False)
            if noisy
            else weight
            for noisy, weight, rows, (pool, counts) in zip(
                self.is_noisy, uniform[1:], minibatch, pools, strict=True
            )
        ]
        return self.function(
            position, centre, logp, grad, uniform[0], *weights, *minibatch, *inputs
        )
