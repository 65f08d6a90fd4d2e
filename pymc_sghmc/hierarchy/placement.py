"""Where the nodes of quadrature lie that integrates effects out, and how many there are.

Both from a reference point that is found with them: nodes, reference point and nodes again until it
stays. Knows gradients and Gaussian fits, no settings.
"""

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scipy.special import expit

from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.phases import begin_phase
from pymc_sghmc.protocols import Array
from pymc_sghmc.tuning.curvature import MAX_DENSE
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.posterior_fit import fit_posterior

if TYPE_CHECKING:
    from pymc_sghmc.hierarchy.marginal import Marginal

__all__ = ["TOLERANCE", "missed", "place_nodes", "reference_with_nodes"]

ROUNDS = 6
NEAR = 0.3  # standard deviations that the reference point may move after nodes were placed at it
FAR = 3.0  # standard deviations at which nodes have to serve, too
TOLERANCE = 0.02  # standard deviations by which the gradient may be off
SOME = 2000  # clusters that choose the number of nodes; fewer, ...
MANY_POINTS = 125  # ... where each has more nodes than these
MOST_DIRECTIONS = 12
SIDES = -3.0, -1.5, 1.5, 3.0  # prior standard deviations away, where other modes are looked for
MOST_OTHERS = 50  # groups that tell what is lost with them


class Reference(NamedTuple):
    """A reference point that was found with nodes at it."""

    position: np.ndarray  # at which nodes were placed
    fit: GaussianFit
    stays: bool  # whether it is where they are


class NodesNeeded(NamedTuple):
    """How many nodes it takes, and how far off the gradient is with them."""

    n_nodes: int
    error: float  # posterior standard deviations


def place_nodes(
    marginal: "Marginal", gradient: MinibatchGradient, start: np.ndarray, given: Array | None
) -> np.ndarray:
    """Place nodes at a reference point, given or found, and choose how many there are.

    Parameters
    ----------
    marginal : Marginal
    gradient : MinibatchGradient
    start : array of shape (d,)
        From which the reference point is searched.
    given : array of shape (d,) or None
        A reference point to use instead.

    Returns
    -------
    array of shape (d,)
        Where nodes were placed, from where any chain's reference point is near.
    """
    begin_phase("placing the nodes of quadrature")
    gradient.data.resize(None)
    for n_nodes in marginal.choice:  # whatever chains before have had
        marginal.use(n_nodes)
        reference = reference_with_nodes(marginal, gradient, start, given)
        if reference.stays:
            break
    fit = reference.fit
    marginal.place_at(gradient, fit.mean, fit.metric)
    some = _some_clusters(marginal)
    needed = _nodes_needed(marginal, gradient, fit, some)
    marginal.use(needed.n_nodes)
    of_modes = missed(marginal, gradient, fit, some)
    errors = needed.error, of_modes, 0.0 if reference.stays else np.inf
    marginal.error = max(np.nan_to_num(errors, nan=np.inf, posinf=np.inf))
    return reference.position


def reference_with_nodes(
    marginal: "Marginal", gradient: MinibatchGradient, start: np.ndarray, given: Array | None
) -> Reference:
    """Place nodes at the reference point that is found with them, in turns.

    With few nodes for groups of which little is known but that they are extreme, it may not stay.
    """
    density = gradient.density
    position = start if given is None else given
    is_dense = position.size <= MAX_DENSE
    for _ in range(ROUNDS):
        marginal.place_at(gradient, position)
        fit = fit_posterior(gradient.passes, position, is_dense, given is None, None)
        moved = fit.metric.from_theta(fit.mean - position)
        position = fit.mean.astype(density.dtype)
        if given is not None or np.abs(moved).max() < NEAR:
            return Reference(position, fit, True)
    return Reference(position, fit, False)


def _some_clusters(marginal: "Marginal") -> Array:
    """Clusters that stand for all."""
    n = min(SOME, max(50, SOME * MANY_POINTS // marginal.choice[1] ** marginal.k))
    return np.unique(np.linspace(0, marginal.n_clusters - 1, n).astype(int))


def _nodes_needed(
    marginal: "Marginal", gradient: MinibatchGradient, fit: GaussianFit, some: Array
) -> NodesNeeded:
    """Find the least number of nodes whose gradient is that of more, nearby and far out.

    The error of the largest number is that of the one before.
    """
    density = gradient.density
    passes = gradient.passes
    coordinates = fit.metric
    d = fit.mean.size
    scale = np.sqrt(marginal.n_clusters / some.size)
    points = [fit.mean]
    for i in np.unique(np.linspace(0, d - 1, MOST_DIRECTIONS).astype(int)):
        along = coordinates.pull_back(np.eye(d)[i])
        shift = coordinates.to_theta(along / max(np.linalg.norm(along), 1e-300))
        points += [fit.mean + sign * FAR * shift for sign in (1, -1)]

    def forces(n_nodes: int) -> Array:
        marginal.use(n_nodes)
        slopes = [
            passes.of_rows(x.astype(density.dtype), marginal.likelihood, some)[1] for x in points
        ]
        return np.array([coordinates.pull_back(slope) for slope in slopes])

    with np.errstate(all="ignore"):
        fewer = forces(marginal.choice[0])
        for n_nodes, more in pairwise(marginal.choice):
            better = forces(more)
            error = scale * np.abs(better - fewer).max()
            if error < TOLERANCE:
                return NodesNeeded(n_nodes, error)
            fewer = better
    return NodesNeeded(marginal.choice[-1], error)


def missed(
    marginal: "Marginal", gradient: MinibatchGradient, fit: GaussianFit, some: np.ndarray
) -> float:
    """Return by how many posterior standard deviations modes beyond the nodes move the gradient."""
    worst = 0.0
    coordinates = fit.metric
    position = fit.mean.astype(gradient.density.dtype)
    for side in SIDES:
        others, there = marginal.modes.elsewhere(gradient, position, some, side)
        if not others.size:
            continue
        present = marginal.sites
        table = present.table.copy()
        table[others] = there
        few = others[:: 1 + others.size // MOST_OTHERS]
        sides = []
        for sites in (replace(present, table=table), present):  # those of all last: they stay
            marginal.use(marginal.n_nodes, sites)
            of_clusters = [
                gradient.passes.of_rows(position, marginal.likelihood, few[[i]])
                for i in range(few.size)
            ]
            sides.append([np.array(part) for part in zip(*of_clusters, strict=True)])
        (logp, grad), (own_logp, own) = sides
        lost = expit(logp - own_logp) @ (grad - own) * others.size / few.size
        error = np.abs(coordinates.pull_back(lost)).max() * marginal.n_clusters / some.size
        worst = max(worst, float(error))
    return worst
