"""Effects of groups given all other unknowns: where they lie.

Knows densities and rows, no chain.
"""

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import compile, join_nonshared_inputs
from pytensor.graph.replace import clone_replace

from pymc_sghmc.gradients.effect_draws import EffectDraws, where
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.gradients.passes import by_row
from pymc_sghmc.models.grouped_rows import refused
from pymc_sghmc.models.independence import STABLE

__all__ = ["GroupEffects"]

MOST_ROUNDS = 50  # of Newton's method
NEAR = 1e-3  # of a posterior sd, that the last of its steps moves
FARTHEST = 2.0  # prior sds that one moves, at most
ROUNDING = 1e-10  # of a log-density, relative
OVERFLOW = {"posinf": 1e80, "neginf": -1e80}  # what stands for derivatives where they overflow
BENT = 1e-4  # of a log-likelihood, relative: more than rounding
KINKS = (
    "its rows have kinks or jumps, as those of a Laplace distribution or a quantile regression, "
    "which no number of nodes suits"
)


class GroupEffects:
    """Functions of some units' numbers, compiled.

    Parameters
    ----------
    density : LogDensity
        With a `Marginal`.
    variables : list of TensorVariable
        The model's, of which positions in its own coordinates are made.
    """

    def __init__(self, density, variables):
        graph = density.graph
        marginal = density.marginal
        self.marginal = marginal
        numbers = pt.dmatrix("numbers")
        units = graph.rows[marginal.place]
        parts = marginal.derivatives(units, numbers)
        n = len(parts)
        outputs = [*parts, *marginal.gaussian(units), *marginal.gaussian(units, of_prior=True)]
        outputs = clone_replace(outputs, graph.gathered, rebuild_strict=False)
        outputs, position = join_nonshared_inputs(graph.point, outputs, variables)
        outputs = clone_replace(outputs, {position: graph.position}, rebuild_strict=False)
        inputs = [graph.position, marginal.shift, numbers, *graph.rows, *graph.arrays, *graph.given]
        # of many nodes and for few calls, it takes longer to compile than to run
        self._derivatives = compile(inputs, outputs[:n], mode=STABLE, on_unused_input="ignore")
        joint = density.compiled(inputs, [outputs[0] + outputs[1], *outputs[n:]])
        self.draw = EffectDraws(marginal, joint)

    @np.errstate(all="ignore")
    def place(self, density, data, position, metric: Metric | None = None) -> tuple:
        """Return pseudo-observations, their slopes, the position and modes, as `Marginal.use` takes them.

        Slopes are those between half a posterior sd to either side, of which ``metric`` tells;
        without it there are none.
        """
        marginal = self.marginal
        position = position.astype(float)
        k = marginal.k
        d = position.size
        table = np.zeros_like(marginal.table)
        slopes = np.zeros((len(table), k, d))
        is_smooth = False
        is_straight = True
        modes = np.zeros((len(table), k))
        all_of_them = np.arange(marginal.n_integrated)
        for chunk, inputs in by_row(density, data, marginal.place, all_of_them):
            units = chunk.rows
            start = np.zeros((chunk.rows.size, k))
            u, *parts, P = self._found(density, position, start, inputs)
            modes[units] = u
            table[units], lam = self._pseudo_observations(u, *parts)
            if not is_smooth:
                is_smooth, bends = self._looked_at(density, position, u, P, inputs)
                is_straight = is_straight and not bends
            if metric is not None:
                slopes[units] = self._slopes(density, position, metric, u, lam, inputs)
        if not is_smooth and not is_straight:
            raise refused(marginal.rows.effects[0], KINKS)
        slopes = slopes.reshape(len(table), k * d)
        # where nothing can be told, nodes are those of the prior, and don't move
        return _finite(table), _finite(slopes), position, _finite(modes)

    @np.errstate(all="ignore")
    def follow(self, density, data, position):
        """Let nodes lie where effects are now, given a position and what other steps have sampled."""
        marginal = self.marginal
        position = position.astype(float)
        table = np.zeros_like(marginal.table)
        units = np.arange(marginal.n_integrated)
        shift = (position - marginal.centre).astype(float)
        for chunk, inputs in by_row(density, data, marginal.place, units):
            u, *parts, _ = self._found(density, position, marginal.modes[chunk.rows], inputs)
            table[chunk.rows] = self._pseudo_observations(u, *parts)[0]
        by_unknown = marginal.slopes.reshape(len(table), marginal.k, position.size)
        table[:, : marginal.k] -= by_unknown @ shift  # which is added where nodes are placed
        density.set_nodes(marginal.n_nodes, (_finite(table), *marginal.placed[1:]))

    @np.errstate(all="ignore")
    def elsewhere(self, density, data, position, units, side) -> tuple:
        """Look for other modes of some units, ``side`` prior sds from those where nodes are placed.

        Returns
        -------
        found : array of int
            Units that have one.
        table : array
            Their pseudo-observations there.
        """
        found = [np.empty(0, int)]
        table = [self.marginal.table[:0]]
        for chunk, inputs in by_row(density, data, self.marginal.place, units):
            zeros = np.zeros((chunk.rows.size, self.marginal.k))
            u, _, _, A, _, P = self._found(density, position, zeros, inputs)
            precision = np.einsum("naa->na", P)
            start = u + side / np.sqrt(np.where(precision > 0, precision, 1.0))
            v, *parts, _ = self._found(density, position, start, inputs)
            again = self._found(density, position, v, inputs)[0]
            is_mode = np.einsum("nab,na,nb->n", A, again - v, again - v) < NEAR
            other = is_mode & (np.einsum("nab,na,nb->n", A, v - u, v - u) > 1.0)
            found.append(chunk.rows[other])
            table.append(self._pseudo_observations(v, *parts)[0][other])
        return np.concatenate(found), _finite(np.concatenate(table))

    def _pseudo_observations(self, u, lam, S, A, h):
        """Rows of a `Marginal`'s table, and λ in the unit in which rows see numbers."""
        i, j = np.tril_indices(self.marginal.k)
        if self.marginal.follows:
            inverse = _inverse(S)
            lam = inverse.swapaxes(1, 2) @ lam @ inverse
        return np.concatenate([self._value(u, S, A, h), lam[:, i, j]], axis=1), lam

    def _slopes(self, density, position, metric, u, lam, inputs):
        """How fast the value of pseudo-observations moves, (n, k, d), with precision ``lam``."""
        found = []
        for one in np.eye(position.size):
            sides = []
            for sign in (0.5, -0.5):
                there = position + sign * metric.to_theta(one)
                v, _, S, _, h, P = self._found(density, there, u, inputs)
                own = S.swapaxes(1, 2) @ lam @ S if self.marginal.follows else lam
                sides.append(self._value(v, S, P + own, h))
            found.append(sides[0] - sides[1])
        back = np.array([metric.from_theta(one) for one in np.eye(position.size)]).T
        return np.stack(found, axis=-1) @ back

    def _value(self, u, S, A, h):
        """Precision times value of pseudo-observations, (n, k), in the unit in which rows see numbers."""
        value = np.einsum("nab,nb->na", A, u) - h
        if self.marginal.follows:
            value = np.einsum("nba,nb->na", _inverse(S), value)
        return value

    def _looked_at(self, density, position, u, P, inputs):
        """Whether log-likelihoods have second derivatives within a prior sd of u, and whether they bend."""
        own = density.to_model(position.astype(density.dtype))
        shift = position - self.marginal.centre
        precision = np.einsum("naa->na", P)
        sd = 1 / np.sqrt(np.where(precision > 0, precision, 1.0))
        sides = [self._derivatives(own, shift, u + side * sd, *inputs) for side in (-1, 0, 1)]
        below, there, above = (side[0] for side in sides)
        bends = np.abs(below - 2 * there + above) > BENT * (1 + np.abs(there))
        return any(side[3].any() for side in sides), bends.any()

    def _found(self, density, position, u, inputs):
        """Modes by Newton's method, and there λ of the rows, S, A = P + λ, P times the prior's mean, P.

        A step after which the density is lower is halved until it isn't.
        """
        own = density.to_model(position.astype(density.dtype))
        shift = position - self.marginal.centre
        step = np.zeros_like(u)
        level = -np.inf
        kept = None
        for _ in range(MOST_ROUNDS):
            likelihood, prior, *new = self._derivatives(own, shift, u + step, *inputs)
            found = likelihood + prior
            is_lower = np.isfinite(level) & ~(found >= level - ROUNDING * np.abs(level))
            if kept is not None:
                new = [where(is_lower, old, x) for old, x in zip(kept, new, strict=True)]
            kept = new
            level = np.where(is_lower, level, found)
            u = where(is_lower, u, u + step)
            g, H, g0, H0, P, S, h = (np.nan_to_num(x, **OVERFLOW) for x in new)
            has_none = ~P.any(axis=(1, 2), keepdims=True)  # a prior without a Gaussian like it
            bowl = has_none * positive(-H0)
            hill = has_none * positive(H0)
            lam = positive(-H) + bowl
            P = positive(P)
            A = lam + P
            newton = np.linalg.solve(_regular(A), (g + g0)[..., None])[..., 0]
            scale = np.einsum("nab,na,nb->n", P + bowl + hill, newton, newton)
            scale = np.sqrt(np.maximum(scale, 1e-300))
            newton *= np.minimum(1.0, FARTHEST / scale)[:, None]
            step = where(is_lower, step / 2, newton)
            if np.einsum("nab,na,nb->n", A, step, step).max(initial=0.0) < NEAR**2:
                break
        return u, lam, S, A, h, P


def positive(matrices):
    """Return the nearest positive matrices to symmetric ones, (n, k, k)."""
    if matrices.shape[-1] == 1:
        return np.maximum(matrices, 0.0)
    values, vectors = np.linalg.eigh(matrices)
    return (vectors * np.maximum(values, 0.0)[:, None]) @ vectors.swapaxes(1, 2)


def _regular(matrices):
    """Return matrices that have an inverse where rounding or underflow left none."""
    ones = np.eye(matrices.shape[-1])
    return matrices * (1 + 1e-14 * ones) + 1e-80 * ones


def _inverse(matrices):
    return np.linalg.inv(_regular(matrices))


def _finite(table):
    return np.where(np.isfinite(table).all(axis=1, keepdims=True), table, 0.0)
