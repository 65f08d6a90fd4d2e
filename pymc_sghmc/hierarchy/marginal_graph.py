"""Graphs of the log-likelihood of clusters whose coefficients are integrated out.

∫ p(rows | u, θ) p(u | θ) du of each group, by adaptive Gauss-Hermite quadrature. Its nodes lie
where a Gaussian is: that of the prior at θ and of one site of the group, found at a reference
point in the unit in which rows see u, so that nodes follow the scale as it moves. The gradient is
Fisher's identity, Σ pₖ ∇ log p(rows, uₖ | θ): nodes aren't differentiated.

Knows graphs of rows and their groups, and no values.
"""

from collections.abc import Callable
from typing import Any

import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.hierarchy.clustered_rows import ClusteredRows, Lower, cholesky, solved, solved_back
from pymc_sghmc.hierarchy.sites import Clusters

__all__ = ["MarginalGraph"]

NO_CLUSTER = 2**62  # beyond the last: its site says nothing


class MarginalGraph:
    """Graphs in the model's parameters, the batches of its rows, and inputs of their own.

    Parameters
    ----------
    rows : ClusteredRows
    d : int
        Length of a position.

    Attributes
    ----------
    clusters : Clusters
        Symbols of its arrays.
    table, slopes, reference : TensorVariable
        Of the sites.
    nodes, log_weights : TensorVariable
        Of the quadrature.
    shift : TensorVariable
        θ − θ̂, to be put in where θ is one vector.
    follows : bool
        Whether sites are in the unit in which rows see coefficients.
    """

    def __init__(self, rows: ClusteredRows, d: int) -> None:
        self.rows = rows
        self.k = rows.size
        self.clusters = Clusters(*[pt.lvector(name) for name in Clusters._fields])
        self.table = pt.dmatrix("sites")
        # lengths that are known need no check, for whose message Numba takes a second
        self.slopes = pt.matrix("slopes", dtype="float64", shape=(None, self.k * d))
        self.reference = pt.vector("reference", dtype="float64", shape=(d,))
        self.nodes = pt.dmatrix("nodes")
        self.log_weights = pt.dvector("log_weights")
        self.shift = pt.vector("shift", dtype="float64", shape=(d,))
        self.follows = rows.n_seen == self.k

    def shift_from(self, position: TensorVariable) -> TensorVariable:
        """Return what takes the place of ``shift`` at a position."""
        return (position - self.reference).astype(self.shift.dtype)

    def row_numbers(self, index: TensorVariable) -> TensorVariable:
        """Numbers of all rows of some clusters, one cluster after the other."""
        return self._layout(index)[1]

    def _layout(self, index: TensorVariable) -> tuple[TensorVariable, TensorVariable]:
        """Of all rows of some clusters: which of these they belong to, and their numbers."""
        counts = self.clusters.count[index]
        local = pt.repeat(pt.arange(index.shape[0]), counts)
        begin = self.clusters.start[index] - (pt.cumsum(counts) - counts)
        return local, self.clusters.order[begin[local] + pt.arange(local.shape[0])]

    def log_likelihood(
        self, index: TensorVariable
    ) -> tuple[TensorVariable, dict[TensorVariable, TensorVariable]]:
        """Log-likelihood of the rows of some clusters, (n,), and what is `RowModel.held` in it."""
        groups = self.clusters.groups[index]
        local, _ = self._layout(index)
        placed = self._placed_nodes(index, groups)
        nodes, log_volume = (graph.type() for graph in placed)
        coefficients = pt.matrix(dtype=nodes.dtype, shape=(None, self.k))
        prior = vectorize_graph(self.rows.prior(coefficients, groups), {coefficients: nodes})
        of_rows = self.rows.rows(coefficients, groups[local])
        # on the first axis rows are taken as those of data are, which compiles in a tenth
        of_nodes = nodes.swapaxes(0, 1)[local].swapaxes(0, 1)
        of_rows = vectorize_graph(of_rows, {coefficients: of_nodes})
        of_clusters = _summed(of_rows.T, local, index.shape[0])
        integral = pt.logsumexp((of_clusters + prior.T) + self.log_weights, axis=1) + log_volume
        return integral, {nodes: placed[0], log_volume: placed[1]}

    def given_coefficients(
        self, index: TensorVariable, coefficients: TensorVariable
    ) -> tuple[TensorVariable, TensorVariable]:
        """Log-likelihood of clusters given their coefficients, and log-prior of these, (n,)."""
        groups = self.clusters.groups[index]
        local, _ = self._layout(index)
        of_rows = self.rows.rows(coefficients[local], groups[local])
        likelihood = _summed(of_rows[:, None], local, index.shape[0])[:, 0]
        return likelihood, self.rows.prior(coefficients, groups)

    def joint(self, index: TensorVariable, coefficients: TensorVariable) -> list[TensorVariable]:
        """Return what drawing needs: a log-density, (n,), and `effect_draws.Gaussians`."""
        likelihood, prior = self.given_coefficients(index, coefficients)
        gaussians = [*self.gaussian(index), *self.gaussian(index, of_prior=True)]
        return [likelihood + prior, *gaussians]

    def gaussian(
        self, index: TensorVariable, of_prior: bool = False
    ) -> tuple[TensorVariable, TensorVariable]:
        """Location, (n, k), and Cholesky factor of the precision, (n, k, k), of coefficients."""
        sites = pt.full_like(index, NO_CLUSTER) if of_prior else index
        mean, factor = self._mean_and_factor(sites, self.clusters.groups[index])
        k = range(self.k)
        zero = pt.zeros_like(mean[0])
        lower = [pt.stack([factor[i][j] if j <= i else zero for j in k], axis=1) for i in k]
        return pt.stack(mean, axis=1), pt.stack(lower, axis=1)

    def _placed_nodes(
        self, index: TensorVariable, groups: TensorVariable
    ) -> tuple[TensorVariable, TensorVariable]:
        """Nodes of quadrature, and log-volume of what they stand for."""
        mean, factor = self._mean_and_factor(index, groups)
        x = [self.nodes[:, i][:, None] for i in range(self.k)]
        shift = solved_back(factor, x)
        nodes = pt.stack([m + s for m, s in zip(mean, shift, strict=True)], axis=-1)
        log_volume = -pt.add(*[pt.log(factor[i][i]) for i in range(self.k)], 0.0)
        return nodes, log_volume

    def _mean_and_factor(
        self, index: TensorVariable, groups: TensorVariable
    ) -> tuple[list[TensorVariable], Lower]:
        """Of the Gaussian of the prior and the sites, in lists of (n,)."""
        k = range(self.k)
        n = index.shape[0]
        precision, linear = self.rows.prior_gaussian(groups, n)
        place = pt.minimum(index, self.table.shape[0] - 1)
        site = self.table[place]
        d = self.shift.type.shape[0]
        moved = (self.slopes[place].reshape((n, self.k, d)) * self.shift).sum(axis=-1)
        b = [site[:, i] + moved[:, i] for i in k]
        columns = iter(range(self.k, self.k + self.k * (self.k + 1) // 2))
        lam: list[list[Any]] = [[None] * self.k for _ in k]
        for i in k:
            for j in range(i + 1):
                lam[i][j] = lam[j][i] = site[:, next(columns)]
        S = self._seen(groups, n)
        A = [
            [precision[i][j] + sum(S[a][i] * lam[a][c] * S[c][j] for a in k for c in k) for j in k]
            for i in k
        ]
        rhs = [linear[i] + sum(S[a][i] * b[a] for a in k) for i in k]
        factor = cholesky(A)
        return solved(factor, rhs), factor

    def _seen(self, groups: TensorVariable, n: TensorVariable) -> list[list[TensorVariable]]:
        """Differentiate what rows see by coefficients, in lists of (n,); else the unit matrix."""
        k = range(self.k)
        if not self.follows:
            return [[pt.full((n,), float(i == j)) for j in k] for i in k]
        coefficients = pt.matrix(shape=(None, self.k))
        seen = self.rows.seen(coefficients, groups)
        rows = [pt.grad(seen[:, i].sum(), coefficients, disconnected_inputs="ignore") for i in k]
        rows = clone_replace(rows, {coefficients: pt.zeros((n, self.k))}, rebuild_strict=False)
        return [[row[:, j] for j in k] for row in rows]

    def of_coefficients(
        self, density: LogDensity, likelihood: int, write: Callable[..., list[TensorVariable]]
    ) -> tuple[list[TensorVariable], list[TensorVariable]]:
        """Return inputs and outputs of a function of clusters' coefficients, to be compiled.

        Parameters
        ----------
        density : LogDensity
            Whose rows, arrays and other inputs the function takes, with a position in the model's
            own coordinates, the shift and the coefficients before them.
        likelihood : int
            Which of its likelihoods has the clusters.
        write : callable
            From the numbers of some clusters and their coefficients to the outputs.
        """
        graph = density.graph
        coefficients = pt.dmatrix("coefficients")
        outputs = write(graph.rows[likelihood], coefficients)
        outputs = graph.at_position(outputs, list(density.unknowns.variables))
        inputs = [graph.position, self.shift, coefficients, *graph.rows, *graph.arrays]
        return [*inputs, *graph.given], outputs

    def derivatives(
        self, index: TensorVariable, coefficients: TensorVariable
    ) -> list[TensorVariable]:
        """Return what the search of modes needs, see `cluster_modes.Derivatives`."""
        k = range(self.k)
        likelihood, prior = self.given_coefficients(index, coefficients)
        outputs = [likelihood, prior]
        for part in (likelihood, prior):
            slope = pt.grad(part.sum(), coefficients, disconnected_inputs="ignore")
            rows = [
                pt.grad(slope[:, i].sum(), coefficients, disconnected_inputs="ignore") for i in k
            ]
            outputs += [slope, pt.stack(rows, axis=1)]
        n = index.shape[0]
        groups = self.clusters.groups[index]
        precision, linear = self.rows.prior_gaussian(groups, n)
        for matrix in (precision, self._seen(groups, n)):
            outputs.append(pt.stack([pt.stack(row, axis=1) for row in matrix], axis=1))
        return [*outputs, pt.stack(linear, axis=1)]


def _summed(by_row: TensorVariable, local: TensorVariable, n: TensorVariable) -> TensorVariable:
    """Sum over the rows of each cluster, (n, ...)."""
    zeros = pt.zeros((n, by_row.shape[1]), dtype=by_row.dtype)
    return pt.inc_subtensor(zeros[local], by_row)
