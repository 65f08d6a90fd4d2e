"""Second-order control variates of groups whose effects are integrated out.

What is left are few unknowns, which each group sees all of: beside its log-likelihood stands a
quadratic function of them, found by least squares at points around the centre, so that no second
derivative of a quadrature is needed. Knows densities and groups, no way of finding a centre.
"""

import math

from collections.abc import Sequence

import numpy as np
import pytensor.tensor as pt

from pymc_sghmc.exceptions import NonFinite, NotApplicable
from pymc_sghmc.gradients.around_centre import AroundExpansion
from pymc_sghmc.gradients.expansion import Expansion
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.row_inputs import ChunkInputs, by_row
from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.orders import ByLeverage
from pymc_sghmc.threads import in_order

__all__ = ["ClusterQuadratics", "cluster_quadratics"]

MOST_UNKNOWNS = 20  # that functions are quadratic in
MOST_BYTES = 2**31  # of their coefficients
WIDE = 1.2  # distance of points that functions are fitted at, over that of a draw as a rule, √d
FAR = 2.5  # the same of more points, that leverages count
N_FAR = 4
STEP = 1e-3  # sds, of differences
SOME = 4000  # units by which noise is measured


class ClusterQuadratics(AroundExpansion):
    """A gradient without the slope of its noise at a centre, see `SecondOrder`, of groups.

    Parameters
    ----------
    gradient : MinibatchGradient
        Of groups, whose effects are integrated out.
    """

    def __init__(self, gradient: MinibatchGradient) -> None:
        super().__init__(gradient)
        graph = self.density.graph
        d = self.density.d
        own = graph.position
        [units] = graph.rows
        [weights] = graph.row_weights
        centre = own.type("centre_of_control_variates")
        anchor = own.type("anchor")
        level = pt.dscalar("level")
        hessian = pt.matrix("hessian", dtype=own.dtype)
        table = pt.matrix("quadratics", dtype=own.dtype)
        known = weights @ table[units]
        slope = anchor - known[1 : 1 + d]
        curvature = hessian - known[1 + d :][_places(d)]
        shift = own - centre
        turned = curvature @ shift
        logp = graph.logp + level - known[0] + (shift * (slope + 0.5 * turned)).sum()
        grad = (graph.gradient + slope + turned).astype(own.dtype)
        self._symbols = logp, grad, [centre, level, anchor, hessian, table]
        others = [*graph.arrays, *graph.given]
        inputs = [own, graph.prior_weight, weights, units, *self._symbols[2], *others]
        self._function = self.density.compiled(inputs, [logp, grad])
        self.by_unit = self.density.by_row

    def is_right(self, centre: Array, metric: Metric) -> bool:
        """Whether it may be used: it is the model's own gradient, with what sums to nothing."""
        return True

    def set_centre(self, centre: Array, metric: Metric) -> float:
        """Take θ̂, and a metric of the posterior's width; return the passes over all rows.

        Raises
        ------
        NonFinite
            If the log-likelihood isn't finite at or around θ̂.
        """
        d = centre.size
        dtype = self.density.dtype
        rng = np.random.default_rng(0)
        half = WIDE * math.sqrt(d) * _directions(d, rng)
        phi = np.concatenate([np.zeros((1, d)), half, -half])
        far = FAR * rng.standard_normal((N_FAR, d))
        everywhere = np.concatenate([phi, far, -far])
        points = [(centre + metric.to_theta(x)).astype(dtype) for x in everywhere]
        fit = np.linalg.pinv(_monomials(phi))
        tables = np.empty((self.data.n_rows[0], len(fit)), dtype=dtype)
        leverages = np.zeros(self.data.n_rows[0])
        back = _to_theta(metric, d)

        def of_chunk(part: ChunkInputs) -> tuple[Array, Array, Array]:
            chunk, inputs = part
            values = np.array([self.by_unit(x, *inputs)[0][:, 0] for x in points], dtype=float)
            base = values[0]
            here = np.nan_to_num(values[: len(phi)] - base, posinf=0.0, neginf=0.0)
            coefficients = fit @ here
            left = values - base - _monomials(everywhere) @ coefficients
            left = np.nan_to_num(left, posinf=0.0, neginf=0.0)
            coefficients[0] += base
            return chunk.rows, np.sqrt(np.mean(np.square(left), axis=0)), (back @ coefficients).T

        for units, of_units, table in in_order(of_chunk, by_row(self.density, self.data)):
            leverages[units] = of_units
            tables[units] = table
        total = tables.sum(axis=0, dtype=float)
        if not np.isfinite(total).all():
            raise NonFinite(centre.astype(dtype), total[1 : 1 + d], total[0])
        hessian = total[1 + d :][_places(d)].astype(dtype)
        self.anchor = Expansion(
            position=centre.astype(dtype),
            centre=centre.astype(dtype),
            logp=np.asarray(total[0]),
            gradient=total[1 : 1 + d].astype(dtype),
            hessian=(hessian,),
            order=ByLeverage(self.data, [leverages]),
            tables=[tables],
        )
        return float(len(points))

    @property
    def noise_share(self) -> float:
        """Share of all groups that `noise_at` evaluates at each point, for each difference."""
        return min(1.0, SOME / self.data.n_rows[0]) * 2 * self.density.d

    def noise_at(self, points: Sequence[Array], coordinates: Metric) -> Array:
        """Variance of the gradient in φ from minibatches of one group, by some of them."""
        d = self.density.d
        anchor = self.anchor
        dtype = self.density.dtype
        pool = anchor.order.pools[0]
        counts = anchor.order.counts[0]
        units = pool[np.random.default_rng(0).integers(pool.size, size=SOME)].astype(np.int64)
        units = np.sort(units) if self.data.n_rows[0] > SOME else np.arange(self.data.n_rows[0])
        every = units.size == self.data.n_rows[0]
        weight = np.ones(units.size) if every else pool.size / counts[units] / units.size
        rarity = pool.size / counts[units]
        squares, sums = np.zeros((2, len(points), 1, d))
        steps = [STEP * coordinates.to_theta(one) for one in np.eye(d)]
        start = 0

        def of_chunk(part: ChunkInputs) -> list[Array]:
            """Return what the table leaves of the slopes of a chunk's units, at each point."""
            chunk, inputs = part
            table = anchor.tables[0][chunk.rows].astype(float)
            C = table[:, 1 + d :][:, _places(d)]
            left = []
            for point in points:
                slopes = np.array(
                    [
                        self.by_unit((point + s).astype(dtype), *inputs)[0][:, 0]
                        - self.by_unit((point - s).astype(dtype), *inputs)[0][:, 0]
                        for s in steps
                    ]
                ).T / (2 * STEP)
                known = table[:, 1 : 1 + d] + C @ (point - anchor.centre)
                known = np.array([coordinates.pull_back(one) for one in known])
                left.append(np.nan_to_num(slopes - known))
            return left

        for of_points in in_order(of_chunk, by_row(self.density, self.data, 0, units)):
            here = slice(start, start + len(of_points[0]))
            start = here.stop
            for p, left in enumerate(of_points):
                sums[p, 0] += weight[here] @ left
                squares[p, 0] += (weight[here] * rarity[here]) @ np.square(left)
        return squares - np.square(sums)


def cluster_quadratics(gradient: MinibatchGradient) -> ClusterQuadratics:
    """Make second-order control variates of clusters; raises `NotApplicable`."""
    data = gradient.data
    d = gradient.density.d
    if len(data.n_rows) > 1:
        raise NotApplicable("there are likelihoods with other rows")
    if d > MOST_UNKNOWNS:
        raise NotApplicable(f"there are more than {MOST_UNKNOWNS} parameters beside the effects")
    if 4 * d * d * data.n_rows[0] > MOST_BYTES:
        raise NotApplicable("it would take too much memory")
    return ClusterQuadratics(gradient)


def _directions(d: int, rng: np.random.Generator) -> Array:
    """Return directions by whose values a quadratic function is known, (d(d+1)/2, d).

    Along axes that are turned at random, and between each two. Points as many as the unknowns, all
    at one distance, leave less of what isn't quadratic in the fit than a third more draws from a
    Gaussian do. Along a parameter itself, with a skewed posterior, they would leave more.
    """
    axes = np.linalg.qr(rng.standard_normal((d, d)))[0]
    i, j = np.tril_indices(d, -1)
    signs = rng.choice([-1.0, 1.0], size=(i.size, 1))
    return np.concatenate([axes, (axes[i] + signs * axes[j]) / math.sqrt(2)])


def _places(d: int) -> Array:
    """Where the entries of a symmetric matrix lie among those of its lower triangle, (d, d)."""
    places = np.zeros((d, d), dtype=int)
    lower = np.tril_indices(d)
    places[lower] = np.arange(lower[0].size)
    return np.maximum(places, places.T)


def _monomials(phi: Array) -> Array:
    """1, φ and the quadratic terms of which the entries of C are the coefficients, (n, ...)."""
    i, j = np.tril_indices(phi.shape[1])
    products = np.where(i == j, 0.5, 1.0) * phi[:, i] * phi[:, j]
    return np.concatenate([np.ones((len(phi), 1)), phi, products], axis=1)


def _to_theta(metric: Metric, d: int) -> Array:
    """Matrix from coefficients in φ to those in θ − θ̂."""
    inverse = np.array([metric.from_theta(one) for one in np.eye(d)]).T  # φ = inverse @ δ
    i, j = np.tril_indices(d)
    C = np.zeros((i.size, d, d))
    C[np.arange(i.size), i, j] = C[np.arange(i.size), j, i] = 1.0
    C = (inverse.T @ C @ inverse)[:, i, j].T
    matrix = np.zeros((1 + d + i.size, 1 + d + i.size))
    matrix[0, 0] = 1.0
    matrix[1 : 1 + d, 1 : 1 + d] = inverse.T
    matrix[1 + d :, 1 + d :] = C
    return matrix
