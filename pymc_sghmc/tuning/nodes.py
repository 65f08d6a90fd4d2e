"""Where the nodes of quadrature lie that integrates effects out, and how many there are.

Both from a centre that is found with them: nodes, centre and nodes again until it stays. Knows
gradients and centres, no settings.
"""

from itertools import pairwise

import numpy as np

from scipy.special import expit

from pymc_sghmc.tuning.centre import find_centre
from pymc_sghmc.tuning.curvature import MAX_DENSE

__all__ = ["missed", "place_nodes"]

ROUNDS = 6
NEAR = 0.3  # sds that the centre may move after nodes were placed at it
FAR = 3.0  # sds at which nodes have to serve, too
TOLERANCE = 0.02  # sds by which the gradient may be off
SOME = 2000  # units that choose the number of nodes; fewer, ...
MANY_POINTS = 125  # ... where each has more nodes than these
MOST_DIRECTIONS = 12
SIDES = -3.0, -1.5, 1.5, 3.0  # prior sds away, where other modes of groups are looked for
MOST_OTHERS = 50  # groups that tell what is lost with them


def place_nodes(gradient, start, given):
    """Place nodes at the centre, or at a given one, and choose how many.

    Parameters
    ----------
    gradient : MinibatchGradient
    start : array of shape (d,)
    given : array of shape (d,) or None

    Returns
    -------
    array of shape (d,) or None
        Where nodes were placed, from where any chain's centre is near; None where there are none.
    """
    density = gradient.density
    data = gradient.data
    if density.marginal is None:
        return None
    gradient.data.resize(None)
    for n_nodes in density.marginal.choice:  # whatever chains before have had
        density.set_nodes(n_nodes)
        position, centre, stays = _centre_of_nodes(gradient, start, given)
        if stays:
            break
    density.place_nodes(data, centre.mean, centre.metric)
    some = _some_units(density.marginal)
    n_nodes, error = _enough(gradient, centre, some)
    density.set_nodes(n_nodes)
    errors = error, missed(gradient, centre, some), 0.0 if stays else np.inf
    density.marginal.error = max(np.nan_to_num(errors, nan=np.inf, posinf=np.inf))
    return position


def _centre_of_nodes(gradient, start, given) -> tuple:
    """Place nodes at the centre that is found with them, in turns; tell whether it stays there.

    With few nodes for groups of which little is known but that they are extreme, it may not.
    """
    density = gradient.density
    position = start if given is None else given
    for _ in range(ROUNDS):
        density.place_nodes(gradient.data, position)
        centre = find_centre(
            gradient.passes, position, position.size <= MAX_DENSE, given is None, None
        )
        moved = centre.metric.from_theta(centre.mean - position)
        position = centre.mean.astype(density.dtype)
        if given is not None or np.abs(moved).max() < NEAR:
            return position, centre, True
    return position, centre, False


def _some_units(marginal):
    """Units that stand for all that are integrated out."""
    n = min(SOME, max(50, SOME * MANY_POINTS // marginal.choice[1] ** marginal.k))
    return np.unique(np.linspace(0, marginal.n_integrated - 1, n).astype(int))


def _enough(gradient, centre, some) -> tuple:
    """Return the least number of nodes whose gradient is that of more, at the centre and far out.

    And how far off it is, in sds; of the largest number that of the one before.
    """
    density = gradient.density
    passes = gradient.passes
    marginal = density.marginal
    coordinates = centre.metric
    d = centre.mean.size
    scale = np.sqrt(marginal.n_integrated / some.size)
    points = [centre.mean]
    for i in np.unique(np.linspace(0, d - 1, MOST_DIRECTIONS).astype(int)):
        along = coordinates.pull_back(np.eye(d)[i])
        shift = coordinates.to_theta(along / max(np.linalg.norm(along), 1e-300))
        points += [centre.mean + sign * FAR * shift for sign in (1, -1)]

    def forces(n_nodes):
        density.set_nodes(n_nodes)
        found = [passes.of_rows(x.astype(density.dtype), marginal.place, some)[1] for x in points]
        return np.array([coordinates.pull_back(grad) for grad in found])

    with np.errstate(all="ignore"):
        fewer = forces(marginal.choice[0])
        for n_nodes, more in pairwise(marginal.choice):
            better = forces(more)
            error = scale * np.abs(better - fewer).max()
            if error < TOLERANCE:
                return n_nodes, error
            fewer = better
    return marginal.choice[-1], error


def missed(gradient, centre, some) -> float:
    """Return by how many sds the gradient at the centre is off as groups have modes that nodes don't reach."""
    density = gradient.density
    marginal = gradient.density.marginal
    worst = 0.0
    coordinates = centre.metric
    position = centre.mean.astype(density.dtype)
    for side in SIDES:
        others, there = density.group_effects.elsewhere(
            density, gradient.data, position, some, side
        )
        if not others.size:
            continue
        present = marginal.placed
        tables = present[0].copy(), *present[1:]
        tables[0][others] = there
        few = others[:: 1 + others.size // MOST_OTHERS]
        sides = []
        for placed in (tables, present):  # those of all last: they stay
            density.set_nodes(marginal.n_nodes, placed)
            of_units = [
                gradient.passes.of_rows(position, marginal.place, few[[i]]) for i in range(few.size)
            ]
            sides.append([np.array(part) for part in zip(*of_units, strict=True)])
        (logp, grad), (own_logp, own) = sides
        lost = expit(logp - own_logp) @ (grad - own) * others.size / few.size
        error = np.abs(coordinates.pull_back(lost)).max() * marginal.n_integrated / some.size
        worst = max(worst, float(error))
    return worst
