"""Passes over all rows: log-density and gradient of the whole, and what is known of each row.

Memory is bounded: rows are gathered in chunks, of which several threads compute one each. Knows
densities and rows, no minibatches of a chain.
"""

import warnings

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from scipy.special import fdtri

from pymc_sghmc.gradients.density import Density
from pymc_sghmc.gradients.row_inputs import ChunkInputs, RowFunction, Rows, with_inputs
from pymc_sghmc.gradients.second_derivatives import SecondDerivatives
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import Chunk, InMemory, Minibatch
from pymc_sghmc.rows.orders import ByLeverage
from pymc_sghmc.rows.pool import SCALED_ROWS, FromPool, PoolDraw
from pymc_sghmc.threads import in_order

__all__ = ["OddRow", "Passes"]

PROBES = 100  # sums of rows that tell how much rows differ
PROBE_ROWS = 20
UNEVEN = 3.0  # times as much noise over windows as rows in random order would have


class Passes:
    """Sums over all rows of a model, or over a subset that stands for them.

    Parameters
    ----------
    density : Density
    data : InMemory or Streamed
    """

    def __init__(self, density: Density, data: InMemory) -> None:
        self.density = density
        self.data = data
        self.order_is_checked = False
        self.second_derivatives: SecondDerivatives | None = None  # where Hessians are exact
        self.second_derivatives_are_known = False  # whether there are any
        self.is_sparse: bool | None = None  # whether each of thousands depends on few others

    def prior(self, position: Array) -> tuple[Array, Array]:
        """Log-density and gradient of all but the likelihoods that are cut into minibatches."""
        return _weighted(self.density, position, 1.0, self.data.part(None, None), None)

    def of_rows(self, position: Array, group: int, rows: Array) -> tuple[Array, Array]:
        """Log-likelihood and gradient of some rows at hand of a group."""
        return _weighted(self.density, position, 0.0, self.data.part(group, rows), (group, 1.0))

    def first_row_not_finite(self, position: Array) -> "OddRow | None":
        """Return the first row at hand whose log-likelihood isn't finite, if any."""
        subset = [np.arange(n) for n in self.data.n_at_hand]
        found = _not_finite(self.data, self.density, position, subset)
        return found[0] if found else None

    def row_not_finite(self, position: Array) -> dict[str, Array] | None:
        """Return a row of a source whose log-likelihood isn't finite, if any, by container."""
        found = self.data.map_sum(_not_finite, self.density, position)
        return dict(zip(self.data.names, found[0].values, strict=True)) if found else None

    def likelihood(
        self, position: Array, subset: Sequence[Array] | None = None
    ) -> tuple[float, Array]:
        """Log-likelihood and gradient of all rows, or of a subset scaled by N over its size.

        Parameters
        ----------
        position : array of shape (d,)
        subset : tuple of arrays, optional
            Numbers of rows at hand, for each group.
        """
        sums = (
            self.data.map_sum(_windows, self.density, position)
            if subset is None
            else _windows(self.data, self.density, position, subset)
        )
        if len(sums.sizes) > 1 and not self.order_is_checked and self.data.pool is None:
            self.order_is_checked = True
            gradients = np.array(sums.gradients) / sums.weight
            self._check_order(position, gradients, np.array(sums.sizes))
        return sums.logp, np.sum(sums.gradients, axis=0)

    def weighted_gradient(self, position: Array, group: int, weights: Array) -> Array:
        """Σ wᵢ ∇ℓᵢ over all rows of a group, with a weight for each."""

        def of_chunk(chunk: Chunk) -> Array:
            return _of_chunk(self.data, self.density, position, chunk, weights[chunk.rows])[1]

        total = np.zeros(position.shape)
        chunks = (chunk for chunk in self.data.chunks() if chunk.group == group)
        for gradient in self._in_order(of_chunk, chunks):
            total += gradient
        return total

    def gradients_at(self, positions: Sequence[Array], condition: Callable[[int], None]) -> Array:
        """Gradients of the log-density at several positions, (k, d), from one pass over all rows.

        Parameters
        ----------
        positions : list of arrays of shape (d,)
        condition : callable
            Called with the number of a position before the density is evaluated there.
        """
        others = []
        total = np.zeros((len(positions), self.density.d))
        for i, position in enumerate(positions):
            condition(i)
            others.append(self.density.others)
            total[i] = self.prior(position)[1]
        return total + self.data.map_sum(_gradients, self.density, list(positions), others)

    def _in_order(self, function: Callable[[Any], Any], chunks: Iterable[Any]) -> Iterator[Any]:
        return in_order(function, chunks, self.data.threads)

    def log_density(
        self, position: Array, subset: Sequence[Array] | None = None
    ) -> tuple[float, Array]:
        """Log-density and gradient from all rows, or from a subset of them."""
        at_once = self.data.at_once(subset)
        if at_once is not None:
            minibatch, weights = at_once
            one = np.ones((), dtype=self.density.weights_dtype)
            logp, gradient = self.density(position, one, weights, *minibatch)
            return float(logp), gradient
        prior = self.prior(position)
        likelihood = self.likelihood(position, subset)
        return float(prior[0]) + likelihood[0], prior[1] + likelihood[1]

    def by_leverage(self, row_function: RowFunction, points: Sequence[Array]) -> ByLeverage:
        """Return the order in which rows are drawn by the curvature of their log-likelihood.

        ``points`` are a middle and pairs of ends on either side of it; of each pair the second
        difference of the log-likelihood is taken, and of these the root mean square.
        """
        of_chunk = partial(_curvature, row_function, points)
        if self.data.pool is not None:
            at_hand = [np.arange(min(n, SCALED_ROWS)) for n in self.data.n_at_hand]
            few = map(of_chunk, with_inputs(self.density, self.data, self.data.chunks(at_hand)))
            scale = float(np.concatenate([leverages for _, leverages in few]).mean())
            draw = self.data.map_sum(_drawn, self.density, row_function, points, scale)
            return FromPool(self.data, draw.pool(self.data.row_weight))
        out = [np.zeros(n_rows, dtype=np.float32) for n_rows in self.data.n_rows]
        chunks = with_inputs(self.density, self.data, self.data.chunks())
        for chunk, leverages in self._in_order(of_chunk, chunks):
            out[chunk.group][chunk.rows] = leverages
        return ByLeverage(self.data, out)

    def tables(self, row_function: RowFunction, position: Array, order: ByLeverage) -> list[Array]:
        """Return what ``row_function`` says of each row of an order but its log-likelihood."""

        def of_chunk(part: ChunkInputs) -> tuple[Chunk, Array]:
            chunk, inputs = part
            return chunk, row_function(position, *inputs)[chunk.group][:, 1:]

        out: list[Any] = [None] * len(self.data.n_rows)
        chunks = with_inputs(self.density, self.data, order.chunks())
        for chunk, part in self._in_order(of_chunk, chunks):
            k = chunk.group
            if out[k] is None:
                out[k] = np.empty((order.sizes[k], part.shape[1]), dtype=part.dtype)
            out[k][chunk.rows] = part
        return out

    def _check_order(self, position: Array, sums: Array, sizes: Array) -> None:
        """Warn where windows of a pass differ more than rows in random order would let them."""
        if not np.isfinite(sums).all():
            return
        [at_hand] = self.data.n_at_hand
        n = min(PROBE_ROWS, at_hand)
        rng = np.random.default_rng(0)
        with np.errstate(all="ignore"):
            probes = [
                self.of_rows(position, 0, rng.integers(at_hand, size=n))[1] for _ in range(PROBES)
            ]
            row_variance = np.var(probes, axis=0, ddof=1) / n
            mean = sums.sum(axis=0) / sizes.sum()
            deviations = sums - sizes[:, None] * mean
            between = (np.square(deviations) / sizes[:, None]).sum(axis=0) / (len(sizes) - 1)
            ratio = np.nan_to_num(between / row_variance, posinf=0.0).max()
        limit = fdtri(len(sizes) - 1, PROBES - 1, 1 - 1e-6 / position.size)
        if ratio > max(UNEVEN, limit):
            warnings.warn(
                f"data=: windows of {sizes[0]} successive rows differ as {ratio:.3g} times as many "
                "draws would not: the rows aren't in random order, so that noise lasts over many "
                "steps and variances come out too large. Write the data in random order, or raise "
                "the loader's buffer_rows, best to many times the length of runs of similar rows.",
                UserWarning,
                stacklevel=2,
            )


# What is called with all rows, or with those of a partition where it is


def _weighted(
    density: Density,
    position: Array,
    prior_weight: float,
    minibatch: Minibatch,
    counted: tuple[int, float | Array] | None,
) -> tuple[Array, Array]:
    """Weigh the prior, and the rows of one group, (group, weight); others count nothing."""
    dtype = density.weights_dtype
    weights = [np.zeros(rows.size, dtype=dtype) for rows in minibatch.rows]
    if counted is not None:
        group, weight = counted
        weights[group][:] = weight
    return density(position, np.asarray(prior_weight, dtype=dtype), weights, *minibatch)


def _of_chunk(
    data: Rows, density: Density, position: Array, chunk: Chunk, weight: float | Array
) -> tuple[Array, Array]:
    """Log-likelihood and gradient of a chunk's rows, each with a weight."""
    minibatch = data.part(chunk.group, chunk.rows)._replace(arrays=chunk.arrays)
    return _weighted(density, position, 0.0, minibatch, (chunk.group, weight))


class OddRow(NamedTuple):
    """A row whose log-likelihood isn't finite."""

    group: int
    number: int
    values: list[Array]  # of each array


def _not_finite(
    data: Rows, density: Density, position: Array, subset: Sequence[Array] | None = None
) -> list[OddRow]:
    """Return the first row whose log-likelihood isn't finite; nothing where there is none."""

    def is_finite(chunk: Chunk, rows: Array) -> bool:
        part = chunk._replace(rows=rows)
        return bool(np.isfinite(_of_chunk(data, density, position, part, 1.0)[0]))

    with np.errstate(all="ignore"):
        for chunk in data.chunks(subset):
            rows = chunk.rows
            if is_finite(chunk, rows):
                continue
            while rows.size > 1:
                half = rows[: rows.size // 2]
                rows = rows[half.size :] if is_finite(chunk, half) else half
            values = [array[rows[0]] for array in chunk.arrays]
            return [OddRow(chunk.group, int(rows[0]), values)]
    return []


class _Windows:
    """Log-likelihood and gradients of successive windows of rows.

    Attributes
    ----------
    logp : float
    gradients : list of array of shape (d,)
        Of each window.
    sizes : list of int
        Number of rows of each window.
    weight : float
        Of each row.
    """

    def __init__(self) -> None:
        self.logp = 0.0
        self.gradients: list[Array] = []
        self.sizes: list[int] = []
        self.weight = 1.0

    def __add__(self, other: "_Windows") -> "_Windows":
        total = _Windows()
        total.logp = self.logp + other.logp
        total.gradients = self.gradients + other.gradients
        total.sizes = self.sizes + other.sizes
        return total


def _windows(
    data: Rows, density: Density, position: Array, subset: Sequence[Array] | None = None
) -> _Windows:
    """See `Passes.likelihood`."""

    def of_chunk(chunk: Chunk) -> tuple[Chunk, float, Array]:
        logp, gradient = _of_chunk(data, density, position, chunk, chunk.weight)
        return chunk, float(logp), gradient

    found = _Windows()
    window = None
    for chunk, logp, gradient in in_order(of_chunk, data.chunks(subset), data.threads):
        if chunk.window != window:
            window = chunk.window
            found.gradients.append(np.zeros(position.shape))
            found.sizes.append(0)
        found.logp += logp
        found.gradients[-1] = found.gradients[-1] + gradient
        found.sizes[-1] += chunk.rows.size
        found.weight = chunk.weight
    return found


def _gradients(
    data: Rows, density: Density, positions: Sequence[Array], others: Sequence[tuple[Array, ...]]
) -> Array:
    """Gradients of the log-likelihood, (k, d), with values of what other steps sample for each."""

    def of_chunk(chunk: Chunk) -> Array:
        gradients = []
        for position, values in zip(positions, others, strict=True):
            with density.at(values):
                found = _of_chunk(data, density, position, chunk, chunk.weight)
            gradients.append(found[1])
        return np.array(gradients, dtype=float)

    total = np.zeros((len(positions), density.d))
    # what other steps sample is held by the density, for one thread at a time
    threads = 1 if density.given_types else data.threads
    for gradients in in_order(of_chunk, data.chunks(), threads):
        total += gradients
    return total


def _curvature(
    row_function: RowFunction, points: Sequence[Array], part: ChunkInputs
) -> tuple[Chunk, Array]:
    """Root mean square of second differences of each row of a chunk: see `by_leverage`."""
    chunk, inputs = part
    middle, *ends = [row_function(x, *inputs)[chunk.group][:, 0] for x in points]
    differences = [a + b - 2 * middle for a, b in zip(ends[::2], ends[1::2], strict=True)]
    squares = np.mean(np.square(differences), axis=0)
    return chunk, np.nan_to_num(np.sqrt(squares), posinf=0.0)


def _drawn(
    data: Rows, density: Density, row_function: RowFunction, points: Sequence[Array], scale: float
) -> PoolDraw:
    """Draw rows for a pool."""
    assert data.pool is not None
    draw = PoolDraw(data.pool.size, scale, data.number)
    of_chunk = partial(_curvature, row_function, points)
    with np.errstate(all="ignore"):
        chunks = with_inputs(density, data, data.chunks())
        for chunk, leverages in in_order(of_chunk, chunks, data.threads):
            draw.add(chunk.arrays, chunk.rows, leverages)
    return draw
