"""Control variates: a minibatch gradient whose noise vanishes at a centre.

Knows gradients and rows, no samplers and no way of finding a centre.
"""

from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import join_nonshared_inputs, rewrite_pregrad
from pytensor.graph.replace import clone_replace

from pymc_sghmc.faults import NonFinite
from pymc_sghmc.gradients.gradients import NoisyGradient
from pymc_sghmc.loops.backends import resident
from pymc_sghmc.models.row_terms import difference, row_terms

__all__ = ["Anchor", "ControlVariates"]

N_LEVERAGE_PROBES = 16  # pairs of points, or fewer above ...
N_FEW_ROWS = 2_000_000
FEW_BYTES = 2**26  # that tables may have however small the data are


class Anchor(NamedTuple):
    """What control variates know of all rows."""

    centre: np.ndarray  # θ̂, (d,)
    logp: float  # log-likelihood at θ̂
    gradient: np.ndarray  # ∇ log-likelihood at θ̂, (d,)
    pools: list  # of each group: rows, each as often as it counts, and these counts
    tables: list  # of each group: what `row_terms` remembers of each row; empty without them


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
        self._symbols, terms = _with_row_terms(gradient) or (None, None)
        self.row_function = gradient.row_function(terms)
        self.has_tables = self._symbols is not None
        self.anchor = self._placed = None

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.gradient = deepcopy(self.gradient, memo)
        return copied

    def __getstate__(self):
        return {**self.__dict__, "_symbols": None, "_placed": None}

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
        tables = []
        if self.has_tables:
            tables = self.gradient.tables(self.row_function, points[0])
        self.anchor = Anchor(points[0], *self._likelihood(points[0]), pools, tables)
        return 1 + len(points) + bool(tables)

    def move_anchor(self):
        """Compute the log-likelihood and its gradient at θ̂ anew: one pass over all rows."""
        logp, grad = self._likelihood(self.anchor.centre)
        self.anchor = self.anchor._replace(logp=logp, gradient=grad)

    def _likelihood(self, centre):
        logp, grad = self.gradient.likelihood(centre)
        if not (np.isfinite(logp) and np.isfinite(grad).all()):
            raise NonFinite(centre, grad, float(logp))
        return float(logp), grad.astype(self.dtype)

    @property
    def noisy_batch_sizes(self) -> list[int]:
        """Sizes of the minibatches that aren't all of their rows."""
        return self.gradient.noisy_batch_sizes

    def draw_minibatch(self, rng) -> tuple:
        """Draw the rows of one minibatch, an array of row indices for each group of rows."""
        return self.minibatch(
            [pool[rng.integers(pool.size, size=n)].astype(np.int64) for pool, n in self._drawn()]
        )

    def draw_minibatches(self, rng, k) -> tuple:
        """Draw the rows of ``k`` minibatches, shape (k, n), for each group that isn't used whole."""
        return tuple(
            [
                pool[rng.integers(pool.size, size=(k, n))].astype(np.int64)
                for pool, n in self._drawn()
            ]
        )

    def minibatch(self, drawn) -> tuple:
        """Return the minibatch with these rows of the groups that aren't used whole."""
        return self.gradient.minibatch(drawn)

    def __call__(self, position, minibatch):
        """Log-density and gradient at ``position``."""
        uniform, inputs = self.gradient._weights, self.gradient._inputs
        centre, anchor_logp, anchor, pools, _ = self.anchor
        weights = [
            (pool.size / rows.size / counts[rows]).astype(weight.dtype, copy=False)
            if noisy
            else weight
            for noisy, weight, rows, (pool, counts) in zip(
                self.is_noisy, uniform[1:], minibatch, pools, strict=True
            )
        ]
        others = (*weights, *minibatch, *inputs)
        logp, grad = self.gradient.function(position, uniform[0], *others)
        # The prior doesn't count at θ̂: it is exact at θ.
        at_centre = self.gradient.function(centre, np.zeros_like(uniform[0]), *others)
        return logp - at_centre[0] + anchor_logp, grad - at_centre[1] + anchor

    def symbolic(self, position) -> tuple:
        """Return ∇ log p̃ at a symbolic position, and what it takes: see `MinibatchGradient`."""
        own, prior_weight, row_weights, others, _, grad, _ = self.gradient._graph
        n_groups = len(self.gradient.groups)
        rows, rest = others[:n_groups], others[n_groups:]
        weights, drawn, fixed = {}, [], [prior_weight]
        for row, weight, noisy in zip(rows, row_weights, self.is_noisy, strict=True):
            if not noisy:
                fixed += [weight, row]
                continue
            counts, size = pt.ivector("counts"), pt.scalar("pool_size", dtype=weight.dtype)
            weights[weight] = (size / row.shape[0] / counts[row]).astype(weight.dtype)
            drawn.append(row)
            fixed += [size, counts]
        if self._symbols is None:
            centre, anchor, tables = own.type("centre_of_control_variates"), own.type("anchor"), []
            none = {own: centre, prior_weight: pt.zeros((), dtype=prior_weight.dtype)}
            [there] = clone_replace([grad], none, rebuild_strict=False)
            grad = grad - there + anchor
        else:
            grad, centre, anchor, tables = self._symbols
        [grad] = clone_replace([grad], {own: position, **weights}, rebuild_strict=False)
        return grad, drawn, [*fixed, centre, anchor, *tables, *rest]

    def fixed_inputs(self) -> tuple:
        """Return the values, now, of what doesn't change from one minibatch to the next."""
        uniform = self.gradient._weights
        if self._placed is None or self._placed[0] is not self.anchor:
            arrays = [counts for _, counts in self.anchor.pools], self.anchor.tables
            function = self.gradient.function
            self._placed = self.anchor, *([resident(function, x) for x in xs] for xs in arrays)
        _, all_counts, tables = self._placed
        fixed = [uniform[0]]
        for weight, counts, ((pool, _), (_, _, rows)) in zip(
            uniform[1:], all_counts, self._groups(), strict=True
        ):
            size = np.asarray(pool.size, dtype=weight.dtype)
            fixed += [size, counts] if rows is None else [weight, rows]
        return (*fixed, self.anchor.centre, self.anchor.gradient, *tables, *self.gradient._inputs)

    def _groups(self):
        return zip(self.anchor.pools, self.gradient._draws, strict=True)

    def _drawn(self):
        return [(pool, n) for (pool, _), (_, n, rows) in self._groups() if rows is None]


def _with_row_terms(gradient):
    """Return ∇ log p̃ with what is remembered of each row in place of its gradient at θ̂, or None.

    None where the likelihood can't be cut that way, where it would take up much more memory, or
    where other steps move it at each draw.
    """
    if gradient.likelihood_needs_others:
        return None
    point, variables, rest, likelihoods, gathered = gradient._parts
    batches = [group.batches for group in gradient.groups]
    cut = row_terms(likelihoods, variables, batches, point)
    if cut is None:
        return None
    numbers = [sum(c.size for c in cuts) for cuts in cut.cuts]
    size = 8 * sum(n * n_rows for n, n_rows in zip(numbers, gradient.n_rows, strict=True))
    if size > max(FEW_BYTES, sum(array.nbytes for array in gradient.arrays) // 4):
        return None
    own, prior_weight, row_weights, others, *_ = gradient._graph
    tables = [pt.matrix(f"row_terms_{k}", dtype=term.dtype) for k, term in enumerate(cut.terms)]
    cached = [table[row] for table, row in zip(tables, others, strict=False)]
    centre = [variable.type(variable.name) for variable in variables]
    there = difference(cut, row_weights, cached, centre)
    prior = pt.grad(
        rewrite_pregrad(clone_replace([rest])[0]), variables, disconnected_inputs="ignore"
    )
    grad = pt.concatenate(
        [(prior_weight * p + g).ravel() for p, g in zip(prior, there, strict=True)]
    )
    grad, *terms = clone_replace([grad, *cut.terms], gathered, rebuild_strict=False)
    [grad], joined_centre = join_nonshared_inputs(point, [grad], centre)
    [grad, *terms], position = join_nonshared_inputs(point, [grad, *terms], variables)
    grad, *terms = clone_replace([grad, *terms], {position: own}, rebuild_strict=False)
    anchor = own.type("anchor")
    return (grad.astype(own.dtype) + anchor, joined_centre, anchor, tables), terms
