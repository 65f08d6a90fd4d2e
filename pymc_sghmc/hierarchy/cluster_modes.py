"""Where the coefficients of groups lie given all other parameters: Newton's method, group by group.

Knows densities and rows, no chain.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.row_inputs import ChunkInputs, by_row
from pymc_sghmc.hierarchy.clustered_rows import refused
from pymc_sghmc.hierarchy.sites import Sites
from pymc_sghmc.loops.numpy_mode import compile_for_many_rows
from pymc_sghmc.models.independence import STABLE
from pymc_sghmc.protocols import Array
from pymc_sghmc.threads import in_order

if TYPE_CHECKING:
    from pymc_sghmc.hierarchy.marginal import Marginal

__all__ = ["ClusterModes", "Derivatives", "Modes", "where"]

MOST_ROUNDS = 50  # of Newton's method
NEAR = 1e-3  # of a posterior standard deviation, that the last of its steps moves
SHORT = 0.5  # of one, a step whose end isn't looked at where differences are what counts
FARTHEST = 2.0  # prior standard deviations that one step moves, at most
ROUNDING = 1e-10  # of a log-density, relative
# what stands for derivatives where they overflow
OVERFLOW: dict[str, Any] = {"posinf": 1e80, "neginf": -1e80}
BENT = 1e-4  # of a log-likelihood, relative: more than rounding
KINKS = (
    "its rows have kinks or jumps, as those of a Laplace distribution or a quantile regression, "
    "which no number of nodes suits"
)


class Derivatives(NamedTuple):
    """Log-densities of n clusters at given coefficients, and their derivatives by these."""

    log_likelihood: np.ndarray  # (n,)
    log_prior: np.ndarray  # (n,)
    likelihood_slope: np.ndarray  # (n, k)
    likelihood_hessian: np.ndarray  # (n, k, k)
    prior_slope: np.ndarray
    prior_hessian: np.ndarray
    prior_precision: np.ndarray  # of a Gaussian like the prior, (n, k, k)
    seen: np.ndarray  # S, derivatives of what rows see by the coefficients, (n, k, k)
    prior_linear: np.ndarray  # the prior's precision times its mean, (n, k)

    def slopes(self) -> "Derivatives":
        """Return these with finite numbers in the place of those that overflowed."""
        finite = [
            x if np.isfinite(x).all() else np.nan_to_num(x, **OVERFLOW)
            for x in (np.asarray(part) for part in self[2:])
        ]
        return Derivatives(self.log_likelihood, self.log_prior, *finite)


class Modes(NamedTuple):
    """Modes of n clusters' coefficients, and what is known there."""

    mode: np.ndarray  # (n, k)
    likelihood_precision: np.ndarray  # λ, (n, k, k)
    seen: np.ndarray  # S
    precision: np.ndarray  # A = P + λ
    prior_linear: np.ndarray
    prior_precision: np.ndarray  # P

    def linear_site(self, follows: bool) -> np.ndarray:
        """Precision times location of the sites, (n, k), in the unit in which rows see them."""
        linear = np.einsum("nab,nb->na", self.precision, self.mode) - self.prior_linear
        return np.einsum("nba,nb->na", _inverse(self.seen), linear) if follows else linear

    def site_precision(self, follows: bool) -> np.ndarray:
        """Precision of the sites in the unit in which rows see coefficients."""
        if not follows:
            return self.likelihood_precision
        inverse = _inverse(self.seen)
        return inverse.swapaxes(1, 2) @ self.likelihood_precision @ inverse

    def table(self, follows: bool) -> np.ndarray:
        """Rows of the table of `Sites`."""
        i, j = np.tril_indices(self.mode.shape[1])
        precision = self.site_precision(follows)
        return np.concatenate([self.linear_site(follows), precision[:, i, j]], axis=1)


class ClusterModes:
    """Searches modes of coefficients, and places sites there.

    Parameters
    ----------
    marginal : Marginal
    density : LogDensity
        That it is compiled with.
    """

    def __init__(self, marginal: "Marginal", density: LogDensity) -> None:
        self._marginal = marginal
        graph = marginal.graph
        inputs, outputs = graph.of_coefficients(density, marginal.likelihood, graph.derivatives)
        # of many nodes and for few calls, all rewrites would take longer than they save
        self._derivatives = compile_for_many_rows(
            inputs, outputs, {"on_unused_input": "ignore"}, rewrites=STABLE
        )

    @np.errstate(all="ignore")
    def sites(
        self, gradient: MinibatchGradient, position: np.ndarray, metric: Metric | None = None
    ) -> Sites:
        """Return sites at a position.

        Their slopes are those between half a posterior standard deviation to either side, of which
        ``metric`` tells; without it there are none. Where nothing can be told, sites say nothing,
        and nodes are those of the prior.

        Raises
        ------
        ValueError
            If log-likelihoods have kinks or jumps, which quadrature doesn't suit.
        """
        marginal = self._marginal
        follows = marginal.follows
        density = gradient.density
        position = position.astype(float)
        k = marginal.k
        d = position.size
        n_sites = marginal.n_clusters + 1
        table = np.zeros_like(marginal.sites.table)
        slopes = np.zeros((n_sites, k, d))
        modes = np.zeros((n_sites, k))
        is_smooth = False
        is_straight = True
        everything = np.arange(marginal.n_clusters)

        @np.errstate(all="ignore")
        def of_chunk(part: ChunkInputs) -> tuple[Array, Modes, Array | None, tuple[bool, bool]]:
            chunk, inputs = part
            found = self.search(density, position, np.zeros((chunk.rows.size, k)), inputs)
            shape = (
                (True, False)
                if is_smooth
                else self._curvature_near(density, position, found, inputs)
            )
            moves = None
            if metric is not None:
                moves = self._slopes(density, position, metric, found, inputs)
            return chunk.rows, found, moves, shape

        chunks = by_row(density, gradient.data, marginal.likelihood, everything)
        for rows, found, moves, (has_curvature, bends) in in_order(of_chunk, chunks):
            modes[rows] = found.mode
            table[rows] = found.table(follows)
            is_smooth = is_smooth or has_curvature
            is_straight = is_straight and not bends
            if moves is not None:
                slopes[rows] = moves
        if not is_smooth and not is_straight:
            raise refused(marginal.first_effect, KINKS)
        return Sites(
            table=_finite(table),
            slopes=_finite(slopes.reshape(n_sites, k * d)),
            reference=position,
            modes=_finite(modes),
        )

    @np.errstate(all="ignore")
    def followed(self, gradient: MinibatchGradient, position: np.ndarray) -> Sites:
        """Return sites that lie where coefficients are at a position, with the slopes of before."""
        marginal = self._marginal
        sites = marginal.sites
        position = position.astype(float)
        table = np.zeros_like(sites.table)
        everything = np.arange(marginal.n_clusters)
        shift = (position - sites.reference).astype(float)

        @np.errstate(all="ignore")
        def of_chunk(part: ChunkInputs) -> tuple[Array, Array]:
            chunk, inputs = part
            found = self.search(gradient.density, position, sites.modes[chunk.rows], inputs)
            return chunk.rows, found.table(marginal.follows)

        chunks = by_row(gradient.density, gradient.data, marginal.likelihood, everything)
        for rows, of_rows in in_order(of_chunk, chunks):
            table[rows] = of_rows
        slopes = sites.slopes.reshape(len(table), marginal.k, position.size)
        table[:, : marginal.k] -= slopes @ shift  # which is added where nodes are placed
        return Sites(_finite(table), sites.slopes, sites.reference, sites.modes)

    @np.errstate(all="ignore")
    def elsewhere(
        self, gradient: MinibatchGradient, position: np.ndarray, clusters: np.ndarray, side: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Look for other modes of some clusters, ``side`` prior standard deviations from the sites.

        Returns
        -------
        found : array of int
            Clusters that have one.
        table : array
            Rows of the table of sites there.
        """
        marginal = self._marginal
        density = gradient.density
        numbers = [np.empty(0, int)]
        tables = [marginal.sites.table[:0]]
        for chunk, inputs in by_row(density, gradient.data, marginal.likelihood, clusters):
            zeros = np.zeros((chunk.rows.size, marginal.k))
            first = self.search(density, position, zeros, inputs)
            precision = np.einsum("naa->na", first.prior_precision)
            start = first.mode + side / np.sqrt(np.where(precision > 0, precision, 1.0))
            second = self.search(density, position, start, inputs)
            again = self.search(density, position, second.mode, inputs).mode
            is_mode = _distance(first.precision, again - second.mode) < NEAR
            is_other = is_mode & (_distance(first.precision, second.mode - first.mode) > 1.0)
            numbers.append(chunk.rows[is_other])
            tables.append(second.table(marginal.follows)[is_other])
        return np.concatenate(numbers), _finite(np.concatenate(tables))

    def _slopes(
        self,
        density: LogDensity,
        position: Array,
        metric: Metric,
        found: Modes,
        inputs: tuple[Any, ...],
    ) -> Array:
        """How fast the location of sites moves times their precision, (n, k, d)."""
        follows = self._marginal.follows
        site_precision = found.site_precision(follows)
        slopes = []
        for direction in np.eye(position.size):
            sides = []
            for sign in (0.5, -0.5):
                there = position + sign * metric.to_theta(direction)
                moved = self._near(density, there, found.mode, inputs)
                seen = moved.seen
                of_site = seen.swapaxes(1, 2) @ site_precision @ seen if follows else site_precision
                moved = moved._replace(precision=moved.prior_precision + of_site)
                sides.append(moved.linear_site(follows))
            slopes.append(sides[0] - sides[1])
        back = np.array([metric.from_theta(one) for one in np.eye(position.size)]).T
        return np.stack(slopes, axis=-1) @ back

    def _curvature_near(
        self, density: LogDensity, position: Array, found: Modes, inputs: tuple[Any, ...]
    ) -> tuple[bool, bool]:
        """Whether log-likelihoods have second derivatives near the modes, and whether they bend."""
        own, shift = self._in_model(density, position)
        precision = np.einsum("naa->na", found.prior_precision)
        sd = 1 / np.sqrt(np.where(precision > 0, precision, 1.0))
        sides = [self._at(own, shift, found.mode + side * sd, inputs) for side in (-1, 0, 1)]
        below, there, above = (side.log_likelihood for side in sides)
        bends = np.abs(below - 2 * there + above) > BENT * (1 + np.abs(there))
        return any(side.likelihood_hessian.any() for side in sides), bool(bends.any())

    def _in_model(self, density: LogDensity, position: Array) -> tuple[Array, Array]:
        """Return a position in the model's own coordinates, and its shift from the reference."""
        own = density.to_model(position.astype(density.dtype))
        return own, position - self._marginal.sites.reference

    def _near(
        self, density: LogDensity, position: np.ndarray, start: np.ndarray, inputs: tuple[Any, ...]
    ) -> Modes:
        """Return modes near a start by one step, or by a search where steps aren't short.

        What a step misses is of second order, which the difference between both sides of a
        position doesn't contain.
        """
        own, shift = self._in_model(density, position)
        found, step = _newton_step(start, self._at(own, shift, start, inputs).slopes())
        if _distance(found.precision, step).max(initial=0.0) < SHORT**2:
            return found._replace(mode=start + step)
        return self.search(density, position, start, inputs)

    def _at(
        self, own: Array, shift: Array, coefficients: Array, inputs: tuple[Any, ...]
    ) -> Derivatives:
        return Derivatives(*self._derivatives(own, shift, coefficients, *inputs))

    def search(
        self, density: LogDensity, position: np.ndarray, start: np.ndarray, inputs: tuple[Any, ...]
    ) -> Modes:
        """Search modes from a start by Newton's method.

        A step after which the density is lower is halved until it isn't.
        """
        own, shift = self._in_model(density, position)
        u = start
        step = np.zeros_like(u)
        level: Array | float = -np.inf
        latest = None
        for _ in range(MOST_ROUNDS):
            new = self._at(own, shift, u + step, inputs)
            density_there = new.log_likelihood + new.log_prior
            is_lower = np.isfinite(level) & ~(density_there >= level - ROUNDING * np.abs(level))
            if latest is not None:
                new = Derivatives(
                    *[where(is_lower, a, b) for a, b in zip(latest, new, strict=True)]
                )
            latest = new
            level = np.where(is_lower, level, density_there)
            u = where(is_lower, u, u + step)
            found, newton = _newton_step(u, new.slopes())
            step = where(is_lower, step / 2, newton)
            if _distance(found.precision, step).max(initial=0.0) < NEAR**2:
                break
        return found


def _newton_step(u: np.ndarray, at: Derivatives) -> tuple[Modes, np.ndarray]:
    """Return what is known at coefficients, and the step to the mode of a Gaussian like it."""
    no_gaussian = ~at.prior_precision.any(axis=(1, 2), keepdims=True)  # like the prior
    bowl = no_gaussian * positive(-at.prior_hessian)
    hill = no_gaussian * positive(at.prior_hessian)
    likelihood_precision = positive(-at.likelihood_hessian) + bowl
    prior_precision = positive(at.prior_precision)
    precision = likelihood_precision + prior_precision
    slope = at.likelihood_slope + at.prior_slope
    newton = _solved(_regular(precision), slope)
    length = np.sqrt(np.maximum(_distance(prior_precision + bowl + hill, newton), 1e-300))
    newton *= np.minimum(1.0, FARTHEST / length)[:, None]
    modes = Modes(
        mode=u,
        likelihood_precision=likelihood_precision,
        seen=at.seen,
        precision=precision,
        prior_linear=at.prior_linear,
        prior_precision=prior_precision,
    )
    return modes, newton


def _distance(precision: Array, shift: Array) -> Array:
    """Squared length of shifts, (n,), in the unit of a precision."""
    return np.einsum("nab,na,nb->n", precision, shift, shift)


def where(units: Array, then: Array, otherwise: Array) -> Array:
    """Return ``then`` of these clusters, and ``otherwise`` of others."""
    return np.where(units.reshape(-1, *[1] * (then.ndim - 1)), then, otherwise)


def positive(matrices: Array) -> Array:
    """Return the nearest positive matrices to symmetric ones, (n, k, k)."""
    if matrices.shape[-1] == 1:
        return np.maximum(matrices, 0.0)
    values, vectors = np.linalg.eigh(matrices)
    return (vectors * np.maximum(values, 0.0)[:, None]) @ vectors.swapaxes(1, 2)


def _regular(matrices: Array) -> Array:
    """Return matrices that have an inverse where rounding or underflow left none."""
    ones = np.eye(matrices.shape[-1])
    return matrices * (1 + 1e-14 * ones) + 1e-80 * ones


def _inverse(matrices: Array) -> Array:
    regular = _regular(matrices)
    return 1 / regular if regular.shape[-1] == 1 else np.linalg.inv(regular)


def _solved(matrices: Array, vectors: Array) -> Array:
    """Solve each of n linear systems: without LAPACK, which takes a call for each, where k = 1."""
    if matrices.shape[-1] == 1:
        return vectors / matrices[..., 0]
    return np.linalg.solve(matrices, vectors[..., None])[..., 0]


def _finite(table: Array) -> Array:
    return np.where(np.isfinite(table).all(axis=1, keepdims=True), table, 0.0)
