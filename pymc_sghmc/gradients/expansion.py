"""What second-order control variates know of all rows: passes that find slopes, sums and leverages.

Knows densities and rows, no minibatches of a chain.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numpy.typing import DTypeLike
from scipy.sparse import csr_array, issparse

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.gradients.row_inputs import ChunkInputs, Rows, in_parts, with_inputs
from pymc_sghmc.gradients.second_derivatives import BLOCK_ROWS, SecondDerivatives
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.data import Chunk, InMemory
from pymc_sghmc.rows.orders import ByLeverage
from pymc_sghmc.rows.pool import SCALED_ROWS, FromPool, PoolDraw, least_priority
from pymc_sghmc.threads import in_order

if TYPE_CHECKING:
    from pymc_sghmc.gradients.second_order import SecondOrder

__all__ = ["Expansion", "expand", "fits", "fitted", "is_right", "jacobian_blocks"]

N_PAIRS = 4  # of points at each distance, or half of that above ...
N_FEW_ROWS = 2_000_000
DISTANCES = (1.0, 3.0)  # sds: rare rows that are saturated nearby are met farther out
BLOCK_BYTES = 2**25  # of Jacobians, and of what is known at all points, at a time. With a quarter
#   of it two threads, which wait for each other between short operations, are no faster than one.
ALONE_BYTES = 2**23  # where there is one thread, as on a worker: they stay in the cache
PER_ROW = 200  # numbers of the latter for each in ζ
SEEN = 64  # parameters, at most, that a row sees where it sees few of thousands
CHECKED_ROWS = 100  # at two points
TOLERANCE = 1e-9  # of eigenvalues that count as zero in a regression


class Expansion(NamedTuple):
    """Quadratic functions beside all rows, and their sum."""

    position: Array  # of a chain, to which θ̂ belongs
    centre: Array  # θ̂, (d,), in the coordinates in which rows are linear
    logp: Array  # log-likelihood at θ̂, a number
    gradient: Array  # its gradient there, (d,)
    hessian: tuple[Array, ...]  # Σ JᵀCJ, (d, d); or of compressed sparse rows
    order: ByLeverage  # in which rows are drawn
    tables: list[Array]  # of each group a, b and C of each row

    @property
    def inputs(self) -> tuple[Array, ...]:
        """What compiled functions take, in their order."""
        return self.centre, self.logp, self.gradient, *self.hessian, *self.tables


def expand(gradient: "SecondOrder", centre: Array, metric: Metric) -> tuple[Expansion, float]:
    """Find slopes, sums and leverages around a centre; return the passes that it took, too.

    The slope C of a row is that of least squares of c − ĉ over probes at 1 and at 3 sds. The sum
    over all rows takes the same numbers, so that nothing is biased by it.

    Parameters
    ----------
    gradient : SecondOrder
        Whose functions of rows are called.
    centre : array of shape (d,)
        A position of a chain.
    metric : Metric
        Of about the posterior's width.
    """
    data = gradient.data
    dtype = gradient.density.dtype
    d = centre.size
    position = centre.astype(dtype)
    theta = gradient.seen(position)
    by_position = gradient.derivatives_seen(position)
    n_pairs = N_PAIRS if sum(data.n_rows) <= N_FEW_ROWS else N_PAIRS // 2
    z = np.random.default_rng(0).standard_normal((n_pairs, d))
    shifts = [
        sign * far * shift for far in DISTANCES for shift in metric.to_thetas(z) for sign in (1, -1)
    ]
    probes = [gradient.seen(centre + shift) for shift in shifts]
    around = _Around(gradient.without_anchor(), theta, probes, by_position, metric)
    scale = None if data.pool is None else _mean_leverage(around, data)
    least = 0.0 if data.pool is None else least_priority(data.pool.size, data.n_rows[0])
    sums = data.map_sum(_summed, around, scale, least)
    if isinstance(sums.kept, PoolDraw) and not sums.kept.is_full(data.n_rows[0]):
        sums = data.map_sum(_summed, around, scale, 0.0)
    hessian = _arrays_of(sums.hessian, gradient.has_sparse_hessian, dtype)
    is_finite = np.isfinite(sums.logp) and np.isfinite(sums.slope).all()
    if not (is_finite and np.isfinite(hessian[0]).all()):
        raise NonFinite(position, sums.slope, sums.logp)
    if isinstance(sums.kept, PoolDraw):
        order, tables = _from_pool(around, data, sums.kept)
    else:
        order, tables = ByLeverage(data, sums.kept.leverages), sums.kept.tables
    expansion = Expansion(
        position=position,
        centre=theta,
        logp=np.asarray(sums.logp),
        gradient=sums.slope.astype(dtype),
        hessian=hessian,
        order=order,
        tables=tables,
    )
    return expansion, 2.0 + len(probes) + sums.n_passes


class _Around(NamedTuple):
    """Where a row's functions are evaluated."""

    gradient: "SecondOrder"
    theta: Array  # the centre
    probes: list[Array]
    by_position: Any  # ∂θ/∂φ at the centre
    metric: Metric


class _Kept:
    """What is kept of all rows in memory, by group."""

    def __init__(self, gradient: "SecondOrder", n_rows: Sequence[int]) -> None:
        self.tables = _empty_tables(gradient, n_rows)
        self.leverages = [np.zeros(n) for n in n_rows]


class _Sums(NamedTuple):
    """What the rows of a source, or of a part of it, add up to."""

    logp: float
    slope: Array
    hessian: Any  # a matrix, full or sparse
    kept: _Kept | PoolDraw
    n_passes: float  # that Jacobians took

    def __add__(self, other: "_Sums") -> "_Sums":  # type: ignore[override]
        """Return the sums over both parts, of whose rows a pool is drawn."""
        return _Sums(
            self.logp + other.logp,
            self.slope + other.slope,
            self.hessian + other.hessian,
            self.kept + other.kept,  # type: ignore[operator]
            max(self.n_passes, other.n_passes),
        )


def _summed(data: Rows, around: _Around, scale: float | None, least: float) -> _Sums:
    """Find sums over rows, and keep what is known of each, or draw a pool of them.

    Parameters
    ----------
    data : InMemory, Streamed or Partition
    around : _Around
    scale : float or None
        Mean leverage, about, where a pool is drawn.
    least : float
        Priority that rows of a pool have at least.
    """
    gradient = around.gradient
    kept: Any
    if data.pool is None or scale is None:
        kept = _Kept(gradient, data.n_rows)
    else:
        kept = PoolDraw(data.pool.size, scale, data.number, least)
    logp = n_passes = 0.0
    slope = np.zeros(around.theta.size)
    hessian: Any = 0.0
    blocks = jacobian_blocks(gradient, data, data.chunks())
    with np.errstate(all="ignore"):
        for found in in_order(partial(_expanded, around), blocks, data.threads):
            chunk = found.chunk
            logp += chunk.weight * found.logp
            slope += chunk.weight * found.slope
            hessian = hessian + chunk.weight * found.hessian
            n_passes = found.n_passes
            if isinstance(kept, PoolDraw):
                kept.add(chunk.arrays, chunk.rows, found.leverages)
            else:
                kept.leverages[chunk.group][chunk.rows] = found.leverages
                kept.tables[chunk.group][chunk.rows] = found.table
    return _Sums(logp, slope, hessian, kept, n_passes)


def _mean_leverage(around: _Around, data: InMemory) -> float:
    """Mean leverage of some rows at hand."""
    at_hand = [np.arange(min(n, SCALED_ROWS)) for n in data.n_at_hand]
    with np.errstate(all="ignore"):
        blocks = jacobian_blocks(around.gradient, data, data.chunks(at_hand))
        leverages = np.concatenate([_expanded(around, block).leverages for block in blocks])
    return float(np.nan_to_num(leverages, posinf=0.0).mean())


def _from_pool(around: _Around, data: InMemory, draw: PoolDraw) -> tuple[ByLeverage, list[Array]]:
    """Return the order in which rows of a pool are drawn, and their tables."""
    gradient = around.gradient
    order = FromPool(data, draw.pool(data.row_weight))
    [table] = _empty_tables(gradient, order.sizes)
    with np.errstate(all="ignore"):
        blocks = jacobian_blocks(gradient, data, order.chunks())
        for found in in_order(partial(_expanded, around), blocks):
            table[found.chunk.rows] = found.table
    return order, [table]


def _empty_tables(gradient: "SecondOrder", n_rows: Sequence[int]) -> list[Array]:
    dtype = gradient.density.dtype
    return [
        np.empty((n, q.size), dtype=dtype) for n, q in zip(n_rows, gradient.quadratics, strict=True)
    ]


class _Expanded(NamedTuple):
    """What a block of rows adds to an expansion."""

    chunk: Chunk
    logp: float
    slope: Array
    hessian: Any
    leverages: Array
    table: Array
    n_passes: float  # that their Jacobian took


def _expanded(around: _Around, block: ChunkInputs) -> _Expanded:
    """See `expand`."""
    gradient, theta, probes, by_position, metric = around
    chunk, inputs = block
    k = chunk.group
    q = gradient.quadratics[k]
    J = gradient.jacobian(k, inputs)
    zetas = J.zeta(np.stack([theta, *probes]))
    first = gradient.first(zetas, k, inputs)
    zeta = zetas[0]
    c = first.c[0]
    log_likelihood = first.log_likelihood[0]
    C = gradient.second(zeta, k, inputs)
    dc, dzeta = _changes(first.c), _changes(zetas)
    C = C + fitted(dc - _by_row(dzeta, C), dzeta)
    left = _finite(dc - _by_row(dzeta, C))
    spread = J.after(by_position).spread(metric)
    b = c - np.einsum("nab,nb->na", C, zeta)
    a = log_likelihood - 0.5 * ((b + c) * zeta).sum(axis=1)
    return _Expanded(
        chunk=chunk,
        logp=float(log_likelihood.sum()),
        slope=J.total(c),
        hessian=J.hessian(C),
        leverages=np.sqrt(np.einsum("npa,nab,npb->n", left, spread, left)),
        table=q.table(a, b, C),
        n_passes=J.n_passes,
    )


def _arrays_of(hessian: Any, is_sparse: bool, dtype: DTypeLike) -> tuple[Array, ...]:
    """Return the arrays of a matrix: one, or three of compressed sparse rows."""
    if is_sparse:
        hessian = csr_array(hessian)
        return hessian.data.astype(dtype), *map(np.int32, (hessian.indices, hessian.indptr))
    full = hessian.toarray() if issparse(hessian) else hessian
    return (full.astype(dtype),)


def fits(derivatives: SecondDerivatives, density: LogDensity, data: InMemory) -> bool:
    """Whether derivatives of all rows can be found, and are few for each.

    Parameters
    ----------
    derivatives : SecondDerivatives
    density : LogDensity
    data : InMemory
    """
    return bool(data.map_sum(_first_misfit, derivatives, density) == 0)


def _first_misfit(data: Rows, derivatives: SecondDerivatives, density: LogDensity) -> int:
    """Return 1 where derivatives of some rows can't be found or aren't few, else 0."""
    for chunk, inputs in with_inputs(density, data, in_parts(data.chunks(), BLOCK_ROWS)):
        found = derivatives.jacobian(density, chunk.group, inputs)
        if found is None or not found.is_sparse:
            return 1
    return 0


def is_right(gradient: "SecondOrder", centre: Array, metric: Metric) -> bool:
    """Whether derivatives by way of ζ are those of the model, on some rows at two points.

    A check on the user's own model, before its chains depend on graphs that were cut.
    """
    dtype = gradient.density.dtype
    shift = metric.to_theta(np.random.default_rng(1).standard_normal(centre.size))
    tolerance = np.finfo(dtype).eps ** 0.25
    points = [(centre + far * shift).astype(dtype) for far in (-1.0, 0.7)]
    thetas = np.stack([gradient.seen(point) for point in points])
    by_position = [gradient.derivatives_seen(point) for point in points]
    at_hand = gradient.data.n_at_hand
    few = [np.linspace(0, n - 1, min(CHECKED_ROWS, n)).astype(int) for n in at_hand]
    for chunk, inputs in jacobian_blocks(gradient, gradient.data, gradient.data.chunks(few)):
        k = chunk.group
        by_theta = gradient.jacobian(k, inputs)
        first = gradient.first(by_theta.zeta(thetas), k, inputs)
        for point, c, T in zip(points, first.c, by_position, strict=True):
            J = by_theta.after(T)
            spread = J.spread(metric)
            found = metric.pull_back(J.total(c))
            expected = metric.pull_back(gradient.passes.of_rows(point, k, chunk.rows)[1])
            scale = np.sqrt(np.einsum("naa,na->", spread, np.square(c)))
            if not np.linalg.norm(found - expected) <= tolerance * scale:
                return not np.isfinite(expected).all()  # then there is nothing to compare
    return True


def jacobian_blocks(
    gradient: "SecondOrder", data: Rows, chunks: Iterable[Chunk]
) -> Iterator[ChunkInputs]:
    """Cut chunks of rows into blocks, each small enough for its Jacobians."""
    d = SEEN if gradient.has_sparse_hessian else gradient.density.d
    block_bytes = ALONE_BYTES if data.threads == 1 else BLOCK_BYTES
    most_rows = [max(16, block_bytes // (8 * q.m * (d + PER_ROW))) for q in gradient.quadratics]
    blocks = (
        chunk._replace(rows=chunk.rows[start : start + most_rows[chunk.group]])
        for chunk in chunks
        for start in range(0, chunk.rows.size, most_rows[chunk.group])
    )
    return with_inputs(gradient.density, data, blocks)


def _changes(values: Array) -> Array:
    """Of rows' numbers (P + 1, n, m) the differences from the first place, (n, P, m).

    They are zero where there is no number.
    """
    return np.ascontiguousarray(_finite(values[1:] - values[0]).swapaxes(0, 1))


def _by_row(dzeta: Array, C: Array) -> Array:
    """Cζ of each row, (n, P, m): by its number where there is one, which is three times as fast."""
    return dzeta * C if C.shape[-1] == 1 else dzeta @ C


def _finite(values: Array) -> Array:
    """Return values with zeros in the place of what is no number, or infinite."""
    if np.isfinite(values.sum()):  # much quicker, and as a rule enough
        return values
    return np.nan_to_num(values, posinf=0.0, neginf=0.0)


def fitted(left: Array, dzeta: Array) -> Array:
    """Symmetric X of least squares of ``left`` on ``dzeta``, (n, m, m); 0 where undetermined."""
    if left.shape[-1] == 1:
        square = np.einsum("npa,npb->nab", dzeta, dzeta)
        return np.einsum("npa,npb->nab", dzeta, left) / np.where(square > 0, square, 1.0)
    S = dzeta.swapaxes(1, 2) @ dzeta
    R = left.swapaxes(1, 2) @ dzeta
    values, vectors = np.linalg.eigh(S)
    R = vectors.swapaxes(1, 2) @ (R + R.swapaxes(1, 2)) @ vectors
    sums = values[:, :, None] + values[:, None, :]
    known = sums > TOLERANCE * values[:, -1:, None]
    X = np.where(known, R, 0.0) / np.where(known, sums, 1.0)
    return vectors @ X @ vectors.swapaxes(1, 2)
