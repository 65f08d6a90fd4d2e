"""How noisy gradients with second-order control variates are. Knows gradients and rows, no fit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pymc_sghmc.gradients.expansion import jacobian_blocks
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.gradients.row_inputs import ChunkInputs
from pymc_sghmc.protocols import Array
from pymc_sghmc.threads import in_order

if TYPE_CHECKING:
    from pymc_sghmc.gradients.second_order import SecondOrder

__all__ = ["noise_at", "rows_for_noise"]

NOISE_ROWS = 50_000  # that tell the noise of minibatches of more


def rows_for_noise(gradient: "SecondOrder") -> list[int]:
    """How many rows of each group tell the noise of minibatches: all of them, or some."""
    if gradient.density.group_coefficients:
        return list(gradient.data.n_kept)
    return [min(n, NOISE_ROWS) for n in gradient.data.n_kept]


def noise_at(gradient: "SecondOrder", points: Sequence[Array], coordinates: Metric) -> Array:
    """See `SecondOrder.noise_at`.

    Of many rows some stand for all, drawn as minibatches draw them: what a row leaves is about in
    proportion to its leverage, so that few tell the variance. Effects of groups have few rows each,
    and are given all.
    """
    anchor = gradient.anchor
    rng = np.random.default_rng(0)
    some = [
        np.sort(pool[rng.integers(pool.size, size=size)]).astype(np.int64) if size < n else None
        for n, size, pool in zip(
            anchor.order.sizes, rows_for_noise(gradient), anchor.order.pools, strict=True
        )
    ]
    d = gradient.density.d
    n_groups = len(gradient.quadratics)
    squares, sums = np.zeros((2, len(points), n_groups, d))
    thetas = np.stack([gradient.seen(point) for point in points])
    by_position = [gradient.derivatives_seen(point) for point in points]

    subset = None
    if any(rows is not None for rows in some):
        subset = [
            np.arange(n) if rows is None else rows
            for n, rows in zip(anchor.order.sizes, some, strict=True)
        ]

    def of_block(block: ChunkInputs) -> tuple[int, list[Array], list[Array]]:
        chunk, inputs = block
        k = chunk.group
        rows = chunk.rows
        q = gradient.quadratics[k]
        table = anchor.tables[k][rows].astype(float)
        C = q.symmetric(table[:, 1 + q.m :])
        by_theta = gradient.jacobian(k, inputs)
        rarity = anchor.order.pools[k].size / anchor.order.counts[k][rows]
        stands_for = rarity / NOISE_ROWS
        if some[k] is None:
            stands_for = anchor.order.stands_for(k, rows)
        of_sums = []
        of_squares = []
        zetas = by_theta.zeta(thetas)
        first = gradient.first(zetas, k, inputs)
        for c, zeta, T in zip(first.c, zetas, by_position, strict=True):
            J = by_theta.after(T)
            left = c - table[:, 1 : 1 + q.m] - np.einsum("nab,nb->na", C, zeta)
            of_sums.append(coordinates.pull_back(J.total(left * stands_for[:, None])))
            of_squares.append(J.squares(left, coordinates, rarity * stands_for))
        return k, of_sums, of_squares

    with np.errstate(all="ignore"):
        blocks = jacobian_blocks(gradient, gradient.data, anchor.order.chunks(subset))
        for k, of_sums, of_squares in in_order(of_block, blocks):
            sums[:, k] += of_sums
            squares[:, k] += of_squares
    return squares - np.square(sums)
