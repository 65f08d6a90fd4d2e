"""Effects of groups integrated out: the log-likelihood of a group's rows by quadrature.

∫ p(rows | u, θ) p(u | θ) du of each group, by adaptive Gauss-Hermite quadrature. Its nodes lie
where a Gaussian is: that of the prior at θ and of one pseudo-observation of the group, remembered
from a centre in the unit in which rows see u, so that nodes follow the scale as it moves. The
gradient is Fisher's identity, Σ pₖ ∇ log p(rows, uₖ | θ): nodes aren't differentiated.

Knows graphs of rows and their groups, no minibatches of a chain.
"""

from functools import cached_property
from itertools import product

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace, vectorize_graph

from pymc_sghmc.models.grouped_rows import cholesky, solved, solved_back

__all__ = ["Marginal"]

N_NODES = (5, 7, 11, 15, 21, 31)  # for each number of a group, of up to three
FEW_NODES = (3, 5)  # of more


class Marginal:
    """The log-likelihood of groups without their effects.

    Parameters
    ----------
    rows : GroupedRows
    place : int
        Of the model's groups of likelihoods, which one has these rows.
    units : Units
    kept : KeptGroups
        Whose rows are units of their own, given numbers that are unknowns.
    d : int
        Unknowns that are left, those of kept groups not counted.
    checksums : dict of {int: int}
        Of arrays that tell the groups, by their place among all.

    Attributes
    ----------
    k : int
        Numbers of a group.
    inputs : list of TensorVariable
        What graphs take; `values` are what they are now.
    n_units, n_integrated : int
        Units that have rows, of which those that are groups come first.
    table : array of shape (n_integrated + 1, k + k(k + 1)/2)
        Pseudo-observation of each group: precision times value, and the precision's lower triangle;
        last that of a group without rows.
    slopes : array of shape (n_integrated + 1, kd)
        How fast the former changes with θ: nodes follow all unknowns.
    centre : array of shape (d,)
        θ̂, where both were found.
    modes : array of shape (n_integrated + 1, k)
        Of groups' numbers, from where they are looked for again; all four are ``placed`` together.
    choice : tuple of int
        How many nodes of quadrature there may be for each number of a group; ``n_nodes`` there are.
    error : float
        How far the gradient is from that with more or fewer, in posterior sds.
    """

    def __init__(self, rows, place, units, kept, d, checksums):
        self.checksums = checksums
        self.kept = kept
        d = d + kept.groups.size * rows.size
        self.rows = rows
        self.place = place
        self.units = units
        self.k = rows.size
        self.n_groups = rows.n_groups
        self.n_units = int(np.count_nonzero(units.count))
        self.n_integrated = self.n_units - np.count_nonzero(units.kept >= 0)
        n_columns = self.k + self.k * (self.k + 1) // 2, self.k * d, self.k
        table, slopes, modes = (np.zeros((self.n_integrated + 1, n)) for n in n_columns)
        self._effects = [(e.value.name, e.value.dtype, e.shape, e.axis) for e in rows.effects]
        self._symbols = [pt.lvector(name) for name in units._fields]
        self._table = pt.dmatrix("pseudo_observations")
        self._nodes = pt.dmatrix("nodes")
        self._log_weights = pt.dvector("log_weights")
        self._slopes = pt.dmatrix("slopes")
        self._centre = pt.dvector("centre")
        tables = self._table, self._slopes, self._centre
        self.inputs = [*self._symbols, *tables, self._nodes, self._log_weights]
        self.shift = pt.dvector("shift")  # θ − θ̂, to be put in where θ is one vector
        self.error = 0.0
        self.follows = rows.n_seen == self.k
        self.choice = N_NODES if self.k <= 3 else FEW_NODES
        self.use(self.choice[0], (table, slopes, np.zeros(d), modes))

    def use(self, n_nodes, placed=None):
        """Take so many nodes for each number of a group, and where they are ``placed``."""
        self.placed = self.placed if placed is None else placed
        self.table, self.slopes, self.centre, self.modes = self.placed
        x, w = np.polynomial.hermite_e.hermegauss(n_nodes)
        self.n_nodes = n_nodes
        self._x = np.array(list(product(x, repeat=self.k)))
        logs = np.log(w) + 0.5 * np.square(x)
        self._w = np.array([sum(one) for one in product(logs, repeat=self.k)])

    @property
    def values(self) -> tuple:
        """What graphs take, now."""
        return (*self.units, self.table, self.slopes, self.centre, self._x, self._w)

    def shift_from(self, position):
        """Return what takes the place of ``shift`` at a symbolic position."""
        return (position - self._centre).astype(self.shift.dtype)

    @property
    def names(self) -> list:
        """Of the effects, as variables of the model."""
        return [name for name, *_ in self._effects]

    @property
    def axes(self) -> dict:
        """Of the effects, by name: the axis on which groups lie."""
        return {name: axis for name, *_, axis in self._effects}

    @property
    def counts(self):
        """Rows of the units that have any."""
        return self.units.count[: self.n_units]

    @cached_property
    def nothing(self) -> dict:
        """NaN for each of the effects: the same arrays each time, as there may be millions."""
        return self.by_name(np.full((self.n_groups, self.k), np.nan))

    def by_name(self, by_group) -> dict:
        """Return values of the model's unknowns from numbers of all groups, (groups, k)."""
        found = {}
        start = 0
        for name, dtype, shape, axis in self._effects:
            others = [n for i, n in enumerate(shape) if i != axis]
            stop = start + int(np.prod(others, dtype=int))
            value = by_group[:, start:stop].reshape(-1, *others)
            found[name] = np.moveaxis(value, 0, axis).astype(dtype)
            start = stop
        return found

    def row_numbers(self, units):
        """Numbers of all rows of some units, one unit after the other."""
        return self._layout(units)[1]

    def _layout(self, units):
        """Of all rows of some units: which of these they belong to, and their numbers."""
        _, start, order, count, _ = self._symbols
        counts = count[units]
        local = pt.repeat(pt.arange(units.shape[0]), counts)
        begin = start[units] - (pt.cumsum(counts) - counts)
        return local, order[begin[local] + pt.arange(local.shape[0])]

    def term(self, units):
        """Log-likelihood of the rows of some units, (n,), in the model's unknowns and batches.

        Where nodes lie is ``held``, to be put in after the gradient is taken. All nodes of a row of
        a kept group are the group's numbers, of which the gradient is taken.
        """
        groups = self._symbols[0][units]
        local, _ = self._layout(units)
        own = self._gaussian(units, groups)
        nodes, log_volume = (x.type() for x in own)
        self.held = dict(zip((nodes, log_volume), own, strict=True))
        if self.kept.groups.size:
            kept = self._symbols[-1][units]
            own = self.kept.numbers[pt.maximum(kept, 0)].astype(nodes.dtype)
            alone = kept >= 0
            nodes = pt.where(alone[:, None], own, nodes)
        some = pt.matrix(dtype=nodes.dtype, shape=(None, self.k))
        prior = vectorize_graph(self.rows.prior(some, groups), {some: nodes})
        rows = vectorize_graph(self.rows.rows(some, groups[local]), {some: nodes[:, local]})
        rows = _summed(rows.T, local, units.shape[0])
        integral = pt.logsumexp((rows + prior.T) + self._log_weights, axis=1) + log_volume
        return pt.where(alone, rows[:, 0], integral) if self.kept.groups.size else integral

    def given(self, units, numbers):
        """Log-likelihood of rows given numbers of their groups, by unit, and log-prior of these, (n,)."""
        groups = self._symbols[0][units]
        local, _ = self._layout(units)
        rows = self.rows.rows(numbers[local], groups[local])
        return _summed(rows[:, None], local, units.shape[0])[:, 0], self.rows.prior(numbers, groups)

    def gaussian(self, units, of_prior=False):
        """Location, (n, k), and Cholesky factor of the precision, (n, k, k), of units' numbers."""
        known = pt.full_like(units, 2**62) if of_prior else units  # beyond the last: nothing
        mean, factor = self._mean_and_factor(known, self._symbols[0][units])
        k = range(self.k)
        zero = pt.zeros_like(mean[0])
        lower = [pt.stack([factor[i][j] if j <= i else zero for j in k], axis=1) for i in k]
        return pt.stack(mean, axis=1), pt.stack(lower, axis=1)

    def _gaussian(self, units, groups):
        mean, factor = self._mean_and_factor(units, groups)
        x = [self._nodes[:, i][:, None] for i in range(self.k)]
        shift = solved_back(factor, x)
        nodes = pt.stack([m + s for m, s in zip(mean, shift, strict=True)], axis=-1)
        log_volume = -pt.add(*[pt.log(factor[i][i]) for i in range(self.k)], 0.0)
        return nodes, log_volume

    def _mean_and_factor(self, units, groups):
        """Of the Gaussian of the prior and the pseudo-observations, in lists of (n,)."""
        k = range(self.k)
        n = units.shape[0]
        precision, linear = self.rows.prior_gaussian(groups, n)
        place = pt.minimum(units, self._table.shape[0] - 1)
        known = self._table[place]
        d = self.shift.shape[0]
        moved = (self._slopes[place].reshape((n, self.k, d)) * self.shift).sum(axis=-1)
        b = [known[:, i] + moved[:, i] for i in k]
        columns = iter(range(self.k, self.table.shape[1]))
        lam = [[None] * self.k for _ in k]
        for i in k:
            for j in range(i + 1):
                lam[i][j] = lam[j][i] = known[:, next(columns)]
        S = self._seen(groups, n)
        A = [
            [precision[i][j] + sum(S[a][i] * lam[a][c] * S[c][j] for a in k for c in k) for j in k]
            for i in k
        ]
        rhs = [linear[i] + sum(S[a][i] * b[a] for a in k) for i in k]
        factor = cholesky(A)
        return solved(factor, rhs), factor

    def _seen(self, groups, n):
        """Differentiate what rows see by a group's numbers, in lists of (n,); else the unit matrix."""
        k = range(self.k)
        if not self.follows:
            return [[pt.full((n,), float(i == j)) for j in k] for i in k]
        some = pt.matrix(shape=(None, self.k))
        seen = self.rows.seen(some, groups)
        rows = [pt.grad(seen[:, i].sum(), some, disconnected_inputs="ignore") for i in k]
        rows = clone_replace(rows, {some: pt.zeros((n, self.k))}, rebuild_strict=False)
        return [[row[:, j] for j in k] for row in rows]

    def derivatives(self, units, numbers):
        """Return what placing needs: ∂, ∂² of the rows' log-likelihood and of the prior by numbers, and S."""
        k = range(self.k)
        n = units.shape[0]
        groups = self._symbols[0][units]
        likelihood, prior = self.given(units, numbers)
        out = [likelihood, prior]
        for part in (likelihood, prior):
            slope = pt.grad(part.sum(), numbers, disconnected_inputs="ignore")
            rows = [pt.grad(slope[:, i].sum(), numbers, disconnected_inputs="ignore") for i in k]
            out += [slope, pt.stack(rows, axis=1)]
        precision, linear = self.rows.prior_gaussian(groups, n)
        S = self._seen(groups, n)
        for matrix in (precision, S):
            out.append(pt.stack([pt.stack(row, axis=1) for row in matrix], axis=1))
        return [*out, pt.stack(linear, axis=1)]

    def __getstate__(self):
        symbols = "rows", "_symbols", "_table", "_nodes", "_log_weights", "inputs"
        return self.__dict__ | dict.fromkeys(symbols)


def _summed(by_row, local, n):
    """Sum over the rows of each unit, (n, ...)."""
    zeros = pt.zeros((n, by_row.shape[1]), dtype=by_row.dtype)
    return pt.inc_subtensor(zeros[local], by_row)
