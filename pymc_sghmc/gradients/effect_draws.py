"""Draws of the effects of groups given all other unknowns.

Knows densities and rows, no chain.
"""

import numpy as np

from pymc_sghmc.gradients.passes import by_row
from pymc_sghmc.gradients.proposals import HeavyTailed, OverNodes

__all__ = ["EffectDraws", "where"]

HARD = 2.5  # times as dense as a proposal: four steps more leave an eighth of its error
# Nodes for each number of a group, by how many these are: to look for hard ones, and to draw them.
COARSE = {1: 31, 2: 9, 3: 5}
FINE = {1: 31, 2: 15, 3: 7}


class EffectDraws:
    """Draws by a few Metropolis steps from independent proposals, of each group by itself.

    Parameters
    ----------
    marginal : Marginal
    joint : function
        Log-density of some units' rows and numbers, and location and factor of the Gaussian like
        it, and of that like the prior.
    """

    def __init__(self, marginal, joint):
        self.marginal = marginal
        self._joint = joint
        self._hard = None

    def _proposal(self, position, shift, inputs, n, n_nodes):
        """Return the log-density of n units' numbers, a mean and a proposal: over nodes, if there are any.

        These lie where rows and prior are, and where the prior alone is: groups that rows tell
        little of may be in either.
        """

        def level(u):
            return self._joint(position, shift, u, *inputs)[0]

        nowhere = np.zeros((n, self.marginal.k))
        _, mean, factor, *prior = self._joint(position, shift, nowhere, *inputs)
        around = HeavyTailed(mean, factor)
        if not n_nodes:
            return level, mean, around
        has_one = (np.einsum("naa->na", prior[1]) > 0).all(axis=1)  # a Gaussian like it
        prior = [where(has_one, x, own) for x, own in zip(prior, (mean, factor), strict=True)]
        return level, mean, OverNodes([around, HeavyTailed(*prior)], n_nodes, level)

    @np.errstate(all="ignore")
    def _are_hard(self, density, data):
        """Tell which units' effects aren't like a Gaussian, at the centre: of several heaps, or with a long tail."""
        marginal = self.marginal
        if self._hard is None or self._hard[0] is not marginal.slopes:
            position = density.to_model(marginal.centre.astype(density.dtype))
            shift = np.zeros_like(marginal.centre)
            of_units = marginal.units.groups
            is_hard = np.zeros(of_units.size, dtype=bool)
            is_kept = np.isin(of_units, marginal.kept.groups)
            units = np.flatnonzero(~is_kept & (marginal.k in COARSE))
            for chunk, inputs in by_row(density, data, marginal.place, units):
                given = position, shift, inputs, len(chunk.rows)
                proposal = self._proposal(*given, COARSE[marginal.k])[-1]
                is_hard[chunk.rows] = ~(proposal.excess() < HARD)
            self._hard = marginal.slopes, is_hard
        return self._hard[1]

    @np.errstate(all="ignore")
    def __call__(self, density, data, position, rng, n_steps=4, groups=None):
        """Draw the numbers of all groups given all else: Metropolis steps from independent proposals.

        Returns
        -------
        values : dict
            Of the model's unknowns; NaN of other groups than ``groups``, where they are given.
            Those of kept groups are the position's own.
        accepted : float
            Share of the steps.
        """
        marginal = self.marginal
        k = self.marginal.k
        shift = position - self.marginal.centre
        of_units = marginal.units.groups
        is_wanted = np.full(marginal.n_groups, groups is None)
        if groups is not None:
            is_wanted[groups] = True
        is_wanted[marginal.kept.groups] = False
        position = density.to_model(position.astype(density.dtype))
        numbers = np.full((marginal.n_groups, k), np.nan)
        moved = 0
        tried = 0
        wanted = is_wanted[of_units]
        is_hard = self._are_hard(density, data)
        for own, n_nodes in ((wanted & ~is_hard, 0), (wanted & is_hard, FINE.get(k))):
            for chunk, inputs in by_row(density, data, marginal.place, np.flatnonzero(own)):
                given = position, shift, inputs, len(chunk.rows)
                level, u, proposal = self._proposal(*given, n_nodes)
                last = np.full(len(chunk.rows), -np.inf)
                for i in range(n_steps + 1):
                    new, share = proposal.draw(rng)
                    share += level(new)
                    takes = np.log(rng.random(last.size)) < share - last
                    u = where(takes, new, u)
                    last = np.where(takes, share, last)
                    moved = moved + takes.sum() * (i > 0)
                    tried = tried + last.size * (i > 0)
                numbers[of_units[chunk.rows]] = u
        drawn = density.unknowns.unravel(position, marginal.by_name(numbers))
        return {name: drawn[name] for name in marginal.names}, moved / max(1, tried)


def where(units, then, otherwise):
    """Return ``then`` of these units, and ``otherwise`` of others."""
    return np.where(units.reshape(-1, *[1] * (then.ndim - 1)), then, otherwise)
