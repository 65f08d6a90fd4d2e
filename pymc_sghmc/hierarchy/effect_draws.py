"""Draws of the effects of groups given all other parameters.

Knows densities and rows, no chain.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.row_inputs import by_row
from pymc_sghmc.hierarchy.cluster_modes import where
from pymc_sghmc.hierarchy.proposals import HeavyTailed, OverNodes
from pymc_sghmc.models.staged_function import StagedFunction
from pymc_sghmc.protocols import Array

if TYPE_CHECKING:
    from pymc_sghmc.hierarchy.marginal import Marginal

__all__ = ["DrawnEffects", "EffectDraws"]

HARD = 2.5  # times as dense as a proposal: four steps more leave an eighth of its error
# Nodes for each coefficient, by how many these are: to look for hard clusters, and to draw them.
COARSE = {1: 31, 2: 9, 3: 5}
FINE = {1: 31, 2: 15, 3: 7}


class DrawnEffects(NamedTuple):
    """Values of the model's variables, and the share of Metropolis steps that were accepted."""

    values: dict[str, np.ndarray]
    accepted: float


class Gaussians(NamedTuple):
    """Gaussians like the log-density of clusters' rows and coefficients, and like the prior."""

    location: np.ndarray  # (n, k)
    factor: np.ndarray  # Cholesky factor of the precision, (n, k, k)
    prior_location: np.ndarray
    prior_factor: np.ndarray


class EffectDraws:
    """Draws by a few Metropolis steps from independent proposals, of each group by itself.

    Parameters
    ----------
    marginal : Marginal
    density : LogDensity
        That it is compiled with.
    """

    def __init__(self, marginal: "Marginal", density: LogDensity) -> None:
        self._marginal = marginal
        self._hard: tuple[np.ndarray, np.ndarray] | None = None  # slopes of sites it is for
        inputs, outputs = marginal.graph.of_coefficients(
            density, marginal.likelihood, marginal.graph.joint
        )
        position, shift, coefficients, *others = inputs
        log_density, *gaussians = outputs
        fixed = [position, shift, *others]
        self._gaussians = density.compiled(fixed, gaussians)
        self._log_density = StagedFunction(coefficients, fixed, [log_density], density.compiled)

    def _proposal(
        self, position: Array, shift: Array, inputs: tuple[Any, ...], n_nodes: int | None
    ) -> tuple[Callable[[Array], Array], Array, HeavyTailed | OverNodes]:
        """Return the log-density of clusters' coefficients, a mean, and a proposal.

        With ``n_nodes`` the proposal is a mixture over nodes that lie where rows and prior are, and
        where the prior alone is: groups of which rows tell little may be in either.
        """
        log_density = self._log_density.at(position, shift, *inputs)

        def level(u: Array) -> Array:
            return log_density(u)[0]

        gaussians = Gaussians(*self._gaussians(position, shift, *inputs))
        around = HeavyTailed(gaussians.location, gaussians.factor)
        if not n_nodes:
            return level, gaussians.location, around
        # where the prior has a Gaussian like it
        has_one = (np.einsum("naa->na", gaussians.prior_factor) > 0).all(axis=1)
        location = where(has_one, gaussians.prior_location, gaussians.location)
        factor = where(has_one, gaussians.prior_factor, gaussians.factor)
        mixture = OverNodes([around, HeavyTailed(location, factor)], n_nodes, level)
        return level, gaussians.location, mixture

    @np.errstate(all="ignore")
    def _are_hard(self, gradient: MinibatchGradient) -> Array:
        """Tell which clusters' coefficients have several modes or long tails, at the reference."""
        marginal = self._marginal
        sites = marginal.sites
        if self._hard is None or self._hard[0] is not sites.slopes:
            density = gradient.density
            position = density.to_model(sites.reference.astype(density.dtype))
            shift = np.zeros_like(sites.reference)
            is_hard = np.zeros(marginal.n_groups, dtype=bool)
            clusters = np.arange(marginal.n_groups if marginal.k in COARSE else 0)
            chunks = by_row(density, gradient.data, marginal.likelihood, clusters)
            for chunk, inputs in chunks:
                n_nodes = COARSE[marginal.k]
                proposal = self._proposal(position, shift, inputs, n_nodes)[-1]
                is_hard[chunk.rows] = ~(proposal.excess() < HARD)  # type: ignore[union-attr]
            self._hard = sites.slopes, is_hard
        return self._hard[1]

    @np.errstate(all="ignore")
    def __call__(
        self,
        gradient: MinibatchGradient,
        position: Array,
        rng: np.random.Generator,
        n_steps: int = 4,
        groups: Array | None = None,
    ) -> DrawnEffects:
        """Draw the coefficients of groups given all else, by Metropolis steps.

        Parameters
        ----------
        gradient : MinibatchGradient
        position : array of shape (d,)
        rng : numpy.random.Generator
        n_steps : int, default 4
            After a first one that every cluster takes.
        groups : array of int, optional
            Which are wanted, others are NaN; default: all.
        """
        marginal = self._marginal
        density = gradient.density
        k = marginal.k
        shift = position - marginal.sites.reference
        groups_of_clusters = marginal.clusters.groups
        is_wanted = np.full(marginal.n_groups, groups is None)
        if groups is not None:
            is_wanted[groups] = True
        position = density.to_model(position.astype(density.dtype))
        coefficients = np.full((marginal.n_groups, k), np.nan)
        moved = 0
        tried = 0
        wanted = is_wanted[groups_of_clusters]
        is_hard = self._are_hard(gradient)
        for chosen, n_nodes in ((wanted & ~is_hard, 0), (wanted & is_hard, FINE.get(k))):
            clusters = np.flatnonzero(chosen)
            for chunk, inputs in by_row(density, gradient.data, marginal.likelihood, clusters):
                n = len(chunk.rows)
                level, u, proposal = self._proposal(position, shift, inputs, n_nodes)
                last = np.full(n, -np.inf)
                for i in range(n_steps + 1):
                    new, share = proposal.draw(rng)
                    share += level(new)
                    takes = np.log(rng.random(last.size)) < share - last
                    u = where(takes, new, u)
                    last = np.where(takes, share, last)
                    moved = moved + takes.sum() * (i > 0)
                    tried = tried + last.size * (i > 0)
                coefficients[groups_of_clusters[chunk.rows]] = u
        return DrawnEffects(marginal.by_name(coefficients), moved / max(1, tried))
