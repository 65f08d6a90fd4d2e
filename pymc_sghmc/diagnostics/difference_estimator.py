"""PSIS-LOO of all rows from some of them: the difference estimator of Magnusson et al. (2020).

All rows are evaluated at one point, a sample of them at many draws. Knows log-likelihoods by row;
no models, and nothing of what ``pm.sample`` returned.
"""

import math

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scipy.special import logsumexp

from pymc_sghmc.compat import smoothed_log_weights
from pymc_sghmc.gradients.row_inputs import Rows
from pymc_sghmc.gradients.row_log_likelihood import RowLogLikelihood
from pymc_sghmc.protocols import Array
from pymc_sghmc.threads import in_order

__all__ = ["Estimate", "Passed", "PsisSample", "read"]

BLOCK_BYTES = 2**24  # of log-likelihoods (rows, draws) at a time
DRAWS_AT_ONCE = 50  # that a thread evaluates before another one may go on


@dataclass(frozen=True)
class Passed:
    """What a pass over all rows has found.

    Attributes
    ----------
    n : int
        Number of rows.
    total, squares : float
        Sum over all rows of the log-likelihood at the mean, and of its square.
    kept : list of array
        Data of the candidates for the sample, in their order.
    at_mean : array
        Log-likelihood of these.
    of_all : array or None
        That of all rows.
    """

    n: int
    total: float
    squares: float
    kept: Sequence[Array]
    at_mean: Array
    of_all: Array | None


@dataclass(frozen=True)
class Line:
    """PSIS-LOO of a row by its log-likelihood at the mean."""

    constant: float
    slope: float

    @classmethod
    def through(cls, at_mean: Array, elpd: Array) -> "Line":
        """Return the line of least squares through a sample of rows."""
        deviations = at_mean - at_mean.mean()
        spread = float(np.square(deviations).sum())
        slope = float(deviations @ elpd) / spread if spread > 0 else 1.0
        return cls(float(elpd.mean() - slope * at_mean.mean()), slope)

    def __call__(self, at_mean: Array) -> Array:
        """Return what the line says of rows."""
        return self.constant + self.slope * at_mean


@dataclass(frozen=True)
class Estimate:
    """The regression estimator from a sample of so many rows."""

    size: int
    elpd: float
    se: float
    subsampling_se: float
    p: float
    line: Line  # by which rows outside the sample are approximated


def read(
    rows: RowLogLikelihood, mean: Sequence[Array], candidates: Array, keeps_all: bool
) -> Passed:
    """Evaluate all rows at one point, and keep the data of the candidates, in one pass.

    Rows of several machines are evaluated where they are.
    """
    order = np.argsort(candidates)
    found = rows.map_sum(_evaluated, mean, candidates[order], keeps_all)
    if found.odd is not None:
        raise ValueError(
            f"loo: the log-likelihood of row {found.odd.number:,} is {found.odd.value} at the mean "
            "of the draws. Look for missing or impossible values in this row. If the support of "
            "the likelihood depends on parameters, rows can't be left out by weights."
        )
    as_asked = np.argsort(order)
    return Passed(
        n=found.n,
        total=found.total,
        squares=found.squares,
        kept=[np.concatenate(parts)[as_asked] for parts in zip(*found.kept, strict=True)],
        at_mean=np.concatenate(found.at_mean)[as_asked],
        of_all=np.concatenate(found.of_all) if keeps_all else None,
    )


class _OddRow(NamedTuple):
    """A row whose log-likelihood isn't finite."""

    number: int
    value: float


@dataclass
class _Evaluated:
    """What rows of a source, or of a part of it, have at one point."""

    n: int
    total: float
    squares: float
    kept: list[tuple[Array, ...]]  # data of candidates, ascending, block by block
    at_mean: list[Array]  # of these
    of_all: list[Array]
    odd: _OddRow | None = None  # the first, at which the pass ends

    def __add__(self, other: "_Evaluated") -> "_Evaluated":
        """Return what the rows of both have; ``other`` has those that come later."""
        return _Evaluated(
            n=self.n + other.n,
            total=self.total + other.total,
            squares=self.squares + other.squares,
            kept=self.kept + other.kept,
            at_mean=self.at_mean + other.at_mean,
            of_all=self.of_all + other.of_all,
            odd=self.odd or other.odd,
        )


def _evaluated(
    data: Rows,
    rows: RowLogLikelihood,
    mean: Sequence[Array],
    candidates: Array,
    keeps_all: bool,
) -> _Evaluated:
    """Evaluate rows where they are: see `read`. Numbers of candidates are ascending."""
    found = _Evaluated(n=0, total=0.0, squares=0.0, kept=[], at_mean=[], of_all=[])
    for block, values in rows.evaluated(data, mean):
        is_finite = np.isfinite(values)
        if not is_finite.all():
            first = int(np.argmin(is_finite))
            found.odd = _OddRow(block.start + first, float(values[first]))
            return found
        found.n += values.size
        found.total += float(values.sum())
        found.squares += float(np.square(values).sum())
        if keeps_all:
            found.of_all.append(values)
        first, last = np.searchsorted(candidates, [block.start, block.start + values.size])
        own = candidates[first:last] - block.start
        found.kept.append(tuple(array[own] for array in block.arrays))
        found.at_mean.append(values[own])
    return found


class PsisSample:
    """PSIS-LOO of the first of the candidates, as many as are asked for.

    Parameters
    ----------
    rows : RowLogLikelihood
    draws : list of lists of array
        Values of the value variables, draw by draw.
    passed : Passed
    reff : float

    Attributes
    ----------
    elpd : array
        PSIS-LOO of each row so far.
    pareto_k : array
    p : array
        What a row's own data add to its log predictive density.
    """

    def __init__(
        self,
        rows: RowLogLikelihood,
        draws: Sequence[Sequence[Array]],
        passed: Passed,
        reff: float,
    ) -> None:
        self._rows = rows
        self._draws = draws
        self._passed = passed
        self._reff = reff
        self.elpd = np.empty(0)
        self.pareto_k = np.empty(0)
        self.p = np.empty(0)

    def estimate(self, size: int) -> Estimate:
        """Evaluate rows up to a sample of this size, and return the estimate from them."""
        step = max(1, BLOCK_BYTES // (8 * len(self._draws)))
        for start in range(self.elpd.size, size, step):
            self._add(start, min(start + step, size))
        passed = self._passed
        n = passed.n
        at_mean = passed.at_mean[:size]
        line = Line.through(at_mean, self.elpd)
        approximate = line(at_mean)
        residuals = self.elpd - approximate  # of mean zero
        elpd = n * line.constant + line.slope * passed.total
        of_subsampling = 0.0
        if size < n:
            of_subsampling = n * (n / size - 1) * float(np.square(residuals).sum()) / (size - 2)
        # N times the variance over all rows: that of the lines' values, corrected by the sample
        squares = (
            n * line.constant**2
            + 2 * line.constant * line.slope * passed.total
            + line.slope**2 * passed.squares
            + n * float(np.mean(self.elpd**2 - approximate**2))
        )
        variance = squares - (elpd**2 - of_subsampling) / n
        return Estimate(
            size=size,
            elpd=elpd,
            se=math.sqrt(max(0.0, variance)),
            subsampling_se=math.sqrt(of_subsampling),
            p=n * float(self.p.mean()),
            line=line,
        )

    def _add(self, start: int, stop: int) -> None:
        """Evaluate some candidates at all draws."""
        arrays = [array[start:stop] for array in self._passed.kept]
        by_draw = self._at_draws(arrays)
        if not np.isfinite(by_draw).all():
            bad = int((~np.isfinite(by_draw)).any(axis=1).sum())
            raise ValueError(
                f"loo: {bad:,} of {stop - start:,} sampled rows have a log-likelihood that isn't "
                "finite at some draw, by which no row can be left out. The support of the "
                "likelihood may depend on parameters, or the draws be none of this posterior."
            )
        weights, pareto_k = smoothed_log_weights(by_draw, self._reff)
        elpd = logsumexp(weights + by_draw, axis=1)
        lpd = logsumexp(by_draw, axis=1) - math.log(by_draw.shape[1])
        self.elpd = np.append(self.elpd, elpd)
        self.pareto_k = np.append(self.pareto_k, pareto_k)
        self.p = np.append(self.p, lpd - elpd)

    def _at_draws(self, arrays: Sequence[Array]) -> Array:
        """Return the log-likelihood of rows at each draw, (rows, draws)."""

        def of_draws(some: Sequence[Sequence[Array]]) -> Array:
            with np.errstate(all="ignore"):
                return np.stack([self._rows(values, arrays) for values in some], axis=1)

        parts = [
            self._draws[i : i + DRAWS_AT_ONCE] for i in range(0, len(self._draws), DRAWS_AT_ONCE)
        ]
        return np.concatenate(list(in_order(of_draws, parts)), axis=1).astype(float, copy=False)
