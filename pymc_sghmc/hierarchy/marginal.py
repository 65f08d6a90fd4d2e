"""Group effects integrated out: clusters of rows in place of rows."""

import logging

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pymc.model import Model

from pymc_sghmc.compat import ancestors
from pymc_sghmc.gradients.density import Density, LogDensity
from pymc_sghmc.gradients.metric import Metric
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.rewrite import Rewrite
from pymc_sghmc.hierarchy.cluster_arrays import ClusteredInMemory, checksum
from pymc_sghmc.hierarchy.cluster_check import check_clusters
from pymc_sghmc.hierarchy.cluster_effects import clustered_rows
from pymc_sghmc.hierarchy.cluster_modes import ClusterModes
from pymc_sghmc.hierarchy.cluster_quadratics import ClusterQuadratics, cluster_quadratics
from pymc_sghmc.hierarchy.clustered_rows import ClusteredRows, ClusterEffect
from pymc_sghmc.hierarchy.effect_draws import EffectDraws
from pymc_sghmc.hierarchy.marginal_graph import MarginalGraph
from pymc_sghmc.hierarchy.placement import place_nodes
from pymc_sghmc.hierarchy.sites import Clusters, Quadrature, Sites
from pymc_sghmc.models.contract import Group
from pymc_sghmc.models.graphs import array_of
from pymc_sghmc.models.row_model import Input, RowModel
from pymc_sghmc.protocols import Array

__all__ = ["Marginal", "integrate_out", "marginal_of"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

N_NODES = (5, 7, 11, 15, 21, 31)  # for each coefficient of a group, of up to three
FEW_NODES = (3, 5)  # of more
LARGE = 10  # times the mean number of rows, from which on a group of more than a minibatch is large
MOST_COEFFICIENTS = 5  # of a group, over which integrals are taken


def integrate_out(
    rows: RowModel, model: Model, effects: list[ClusterEffect], recover: bool = True
) -> RowModel:
    """Integrate effects of groups out of a model, whose priors it was cut without.

    Parameters
    ----------
    rows : RowModel
    model : pm.Model
    effects : list of ClusterEffect
        Those of one grouping; with none the model stays as it is.
    recover : bool, default True
        Whether values of the effects are drawn for each draw that is recorded.

    Raises
    ------
    ValueError
        If they can't be integrated out group by group.
    """
    if not effects:
        return rows
    shapes = {name: np.shape(value) for name, value in rows.point.items()}
    clustered = clustered_rows(model, effects, rows.terms, [rows.log_prior], shapes)
    k = clustered.likelihood
    if clustered.rows.size > MOST_COEFFICIENTS:
        raise ValueError(
            f"marginalize: each group has {clustered.rows.size} coefficients, and integrals are "
            f"taken over {MOST_COEFFICIENTS} at most. Name fewer parameters; the others are "
            "sampled as ever."
        )
    likelihood = rows.likelihoods[k]
    group = likelihood.group
    before = sum(len(part.group.batches) for part in rows.likelihoods[:k])
    sources = rows.sources[before : before + len(group.batches)]
    arrays = [source if isinstance(source, np.ndarray) else array_of(source) for source in sources]
    by_batch = dict(zip(group.batches, arrays, strict=True))
    groups_of_rows = _groups_of_rows(clustered.indices, by_batch)
    index = _one_grouping(groups_of_rows, clustered.rows.n_groups, effects[0])
    check_clusters(
        model, effects, clustered.rows, likelihood.log_likelihood, group.batches, arrays, index,
        rows.point,
    )  # fmt: skip
    clusters = Clusters.of(index, clustered.rows.n_groups)
    needed = set(ancestors(clustered.indices))
    places = [before + i for i, batch in enumerate(group.batches) if batch in needed]
    marginal = Marginal(clustered.rows, k, clusters, rows.parameters.d, recover)
    cluster_index = likelihood.index
    batch_size = _clusters_in_minibatch(group, index.size, clusters)
    _warn_of_a_large_group(marginal, group.batch_size)
    log_likelihood, held = marginal.graph.log_likelihood(cluster_index)
    likelihoods = list(rows.likelihoods)
    likelihoods[k] = replace(
        likelihood,
        group=replace(group, batch_size=batch_size),
        log_likelihood=log_likelihood,
        row_numbers=marginal.graph.row_numbers(cluster_index),
        is_clustered=True,
    )
    return replace(
        rows,
        likelihoods=tuple(likelihoods),
        held={**rows.held, **held},
        rewrites=(*rows.rewrites, marginal),
        make_data=partial(
            ClusteredInMemory,
            likelihood=k,
            counts=marginal.counts,
            width=marginal.quadrature.log_weights.size,
            checksums={i: checksum(arrays[i - before]) for i in places},
        ),
    )


def _clusters_in_minibatch(group: Group, n_rows: int, clusters: Clusters) -> int:
    """Return how many clusters have about as many rows as a minibatch, at least 2."""
    n_clusters = clusters.n_with_rows
    if group.batch_size >= n_rows:
        return n_clusters
    return min(max(2, round(group.batch_size * n_clusters / n_rows)), n_clusters)


def _warn_of_a_large_group(marginal: "Marginal", rows_in_minibatch: int) -> None:
    """Warn of a group with far more rows than a minibatch, before set-up has to read them."""
    counts = marginal.counts
    is_noisy = rows_in_minibatch < counts.sum()
    if is_noisy and counts.max() > max(rows_in_minibatch, LARGE * counts.mean()):
        group = marginal.clusters.groups[counts.argmax()]
        _log.warning(
            f"marginalize: group {group} of {', '.join(marginal.names)} has {counts.max():,} of "
            f"{counts.sum():,} rows. Give its rows a likelihood of their own, with an effect of "
            "their own. A minibatch that draws this group reads all of its rows, which is right "
            "but slow, set-up included."
        )


def _groups_of_rows(
    indices: Sequence[pt.TensorVariable], arrays: Mapping[Any, np.ndarray]
) -> list[np.ndarray]:
    """Return the numbers of the groups of all rows, once for each place where rows pick them."""
    found = []
    for index in indices:
        needed = set(ancestors([index]))
        values = {b: np.asarray(x, dtype=b.dtype) for b, x in arrays.items() if b in needed}
        is_graph = values or index.owner
        found.append(index.eval(values, mode="FAST_COMPILE") if is_graph else array_of(index))
    return found


def _one_grouping(indices: list[np.ndarray], n_groups: int, effect: ClusterEffect) -> np.ndarray:
    """Return the numbers of the groups, from 0, which all places must have in common."""
    counted = []
    for index in indices:
        numbers = np.where(index < 0, index + n_groups, index).astype(np.int64)
        if numbers.min() < 0 or numbers.max() >= n_groups:
            raise ValueError(
                f"marginalize: rows have groups from {numbers.min()} to {numbers.max()}, but the "
                f"effects have {n_groups} entries. Give them one for each group."
            )
        counted.append(numbers)
    first, *others = counted
    if any(not np.array_equal(first, other) for other in others):
        raise ValueError(
            f"marginalize: rows see the numbers of more than one group of {effect.rv.name!r}, "
            "which can't be integrated out group by group then. Leave it out of marginalize."
        )
    return first


class Marginal(Rewrite):
    """What stays of effects that were integrated out: where nodes lie, and draws of the effects.

    Parameters
    ----------
    rows : ClusteredRows
    likelihood : int
        Which of the model's likelihoods has these rows.
    clusters : Clusters
    d : int
        Length of a position.
    recover : bool
        Whether values of the effects are drawn for each draw that is recorded.

    Attributes
    ----------
    graph : MarginalGraph
    k : int
        Coefficients of a group.
    n_clusters : int
        That have rows.
    sites : Sites
    quadrature : Quadrature
    choice : tuple of int
        How many nodes there may be for each coefficient.
    error : float
        How far the gradient is off in posterior standard deviations: against more nodes, by modes
        that nodes miss, and infinity if the reference point moves with the nodes.
    modes : ClusterModes
        Searches where coefficients lie.
    draw : EffectDraws
        Draws them.
    """

    is_placed = True
    has_long_tails = True

    def __init__(
        self, rows: ClusteredRows, likelihood: int, clusters: Clusters, d: int, recover: bool
    ) -> None:
        self.graph = MarginalGraph(rows, d)
        self.follows = self.graph.follows
        self.likelihood = likelihood
        self.clusters = clusters
        self.recover = recover
        self.k = rows.size
        self.n_groups = rows.n_groups
        self.n_clusters = clusters.n_with_rows
        self.first_effect = rows.effects[0].rv.name
        self._effects = [(e.value.name, e.value.dtype, e.shape, e.axis) for e in rows.effects]
        self.choice = N_NODES if self.k <= 3 else FEW_NODES
        self.quadrature = Quadrature(self.choice[0], self.k)
        self.sites = Sites.none(self.n_clusters, self.k, d)
        self.error = 0.0
        self.inputs = self._inputs()

    def _inputs(self) -> tuple[Input, ...]:
        graph = self.graph
        clusters = [
            Input(symbol, partial(getattr, self.clusters, name))
            for name, symbol in graph.clusters._asdict().items()
        ]
        return (
            *clusters,
            Input(graph.table, partial(self._now, "sites", "table")),
            Input(graph.slopes, partial(self._now, "sites", "slopes")),
            Input(graph.reference, partial(self._now, "sites", "reference")),
            Input(graph.nodes, partial(self._now, "quadrature", "nodes")),
            Input(graph.log_weights, partial(self._now, "quadrature", "log_weights")),
        )

    def _now(self, record: str, field: str) -> np.ndarray:
        """Return a field of the sites or the quadrature that are in use."""
        return getattr(getattr(self, record), field)

    def substitutions(
        self, position: pt.TensorVariable
    ) -> dict[pt.TensorVariable, pt.TensorVariable]:
        """Return the shift from the reference point as a graph of the position."""
        return {self.graph.shift: self.graph.shift_from(position)}

    def compile(self, density: LogDensity) -> None:
        """Compile functions of some clusters' coefficients."""
        self.modes = ClusterModes(self, density)
        self.draw = EffectDraws(self, density)

    @property
    def n_nodes(self) -> int:
        """Nodes of quadrature for each coefficient."""
        return self.quadrature.n_nodes

    def use(self, n_nodes: int, sites: Sites | None = None) -> None:
        """Take so many nodes for each coefficient, and these sites, into use."""
        self.quadrature = Quadrature(n_nodes, self.k)
        if sites is not None:
            self.sites = sites

    def place_at(
        self, gradient: MinibatchGradient, position: np.ndarray, metric: Metric | None = None
    ) -> None:
        """Let nodes lie where coefficients are given a position.

        With a ``metric`` of the posterior's width they follow what moves from there.
        """
        self.sites = self.modes.sites(gradient, position, metric)

    def place(
        self, gradient: MinibatchGradient, start: np.ndarray, reference: np.ndarray | None
    ) -> np.ndarray:
        """Place nodes at a reference point, and choose how many there are: see `place_nodes`."""
        return place_nodes(self, gradient, start, reference)

    def follow(self, gradient: MinibatchGradient, position: np.ndarray) -> None:
        """Let nodes lie where coefficients are given what other steps have sampled."""
        if gradient.density.placement_needs_others:
            self.sites = self.modes.followed(gradient, position)

    @property
    def state(self) -> tuple[Quadrature, Sites, float]:
        """Nodes and sites in use, and how far off the gradient is with them."""
        return self.quadrature, self.sites, self.error

    def restore(self, state: tuple[Quadrature, Sites, float]) -> None:
        """Take nodes and sites of an earlier set-up into use."""
        self.quadrature, self.sites, self.error = state

    def second_order(self, gradient: MinibatchGradient) -> ClusterQuadratics:
        """Return second-order control variates of clusters; raises `NotApplicable`."""
        return cluster_quadratics(gradient)

    def recorded(
        self,
        gradient: MinibatchGradient,
        position: Array,
        rng: np.random.Generator,
        is_tuning: bool,
    ) -> dict[str, np.ndarray]:
        """Return draws of the effects given all else; NaN where they aren't wanted.

        While tuning there are none, unless other steps sample parameters given them.
        """
        if is_tuning and not gradient.density.given_types:
            return {}
        return self.draw(gradient, position, rng).values if self.recover else self.nothing

    @property
    def names(self) -> list[str]:
        """Of the effects, as variables of the model."""
        return [name for name, *_ in self._effects]

    @property
    def axes(self) -> dict[str, int]:
        """Of the effects, by name: the axis on which groups lie."""
        return {name: axis for name, *_, axis in self._effects}

    @property
    def counts(self) -> np.ndarray:
        """Rows of the clusters that have any."""
        return self.clusters.count[: self.n_clusters]

    @cached_property
    def nothing(self) -> dict[str, np.ndarray]:
        """NaN for each of the effects: the same arrays each time, as there may be millions."""
        return self.by_name(np.full((self.n_groups, self.k), np.nan))

    def by_name(self, by_group: np.ndarray) -> dict[str, np.ndarray]:
        """Return values of the model's variables from coefficients of all groups, (groups, k)."""
        values = {}
        start = 0
        for name, dtype, shape, axis in self._effects:
            others = [n for i, n in enumerate(shape) if i != axis]
            stop = start + int(np.prod(others, dtype=int))
            value = by_group[:, start:stop].reshape(-1, *others)
            values[name] = np.moveaxis(value, 0, axis).astype(dtype)
            start = stop
        return values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "graph": None, "inputs": ()}


def marginal_of(density: Density) -> Marginal | None:
    """Return what was integrated out of a density, if anything was."""
    return next((r for r in density.rewrites if isinstance(r, Marginal)), None)
