"""Which rows each group has, and the log-likelihood of groups that follows.

Knows models and their data, no minibatches of a chain.
"""

from typing import NamedTuple

import numpy as np

from pymc_sghmc.compat import ancestors
from pymc_sghmc.gradients.kept_groups import KeptGroups
from pymc_sghmc.gradients.marginal import Marginal
from pymc_sghmc.models.graphs import array_of
from pymc_sghmc.models.group_check import check_groups
from pymc_sghmc.models.units import grouped_rows
from pymc_sghmc.rows.units import checksum

__all__ = ["Units", "marginal"]

MOST_NUMBERS = 5  # of a group, over which integrals are taken
LARGE = 10  # times the mean number of rows, from which on a group of more than a batch is large
MOST_KEPT = 10  # numbers of large groups that stay unknowns, ...
# ... beside so many other groups: fewer hardly tell their scale, and it makes a funnel
FEWEST_OTHERS = 50


class Units(NamedTuple):
    """Groups and which rows they have: first those that have any; each row of a kept group is one."""

    groups: np.ndarray  # number of each unit's group
    start: np.ndarray  # of its rows in ...
    order: np.ndarray  # ... all rows, by group
    count: np.ndarray  # of its rows
    kept: np.ndarray  # which kept group has it; −1: it is integrated out; empty without any

    @classmethod
    def of(cls, index, n_groups, kept):
        """Return the units of rows whose groups have these numbers, and of ``kept`` groups all rows."""
        count = np.bincount(index, minlength=n_groups)
        order = np.argsort(index, kind="stable")
        start = np.cumsum(count) - count
        sizes = count[kept]
        own = np.delete(np.arange(n_groups), kept)
        full = own[count[own] > 0]
        empty = own[count[own] == 0]
        which = np.repeat(np.arange(kept.size), sizes)
        of_rows = start[kept][which] + np.arange(which.size) - (np.cumsum(sizes) - sizes)[which]
        parts = [np.full(full.size, -1), which, np.full(empty.size, -1)]
        return cls(
            np.concatenate([full, kept[which], empty]),
            np.concatenate([start[full], of_rows, start[empty]]),
            order,
            np.concatenate([count[full], np.ones_like(of_rows), count[empty]]),
            np.concatenate(parts) if kept.size else which,
        )


def marginal(model, effects, groups, rest, sources, point, d) -> Marginal:
    """Find how rows depend on the effects, and which rows each group has.

    Parameters
    ----------
    model : pm.Model
    effects : list of Effect
    groups : list of Group
        Of likelihoods; the batch size of that one is turned from rows into units.
    rest : TensorVariable
        What isn't cut into rows.
    sources : list
        Arrays of all groups, or the model's data containers.
    point : dict
    d : int
        Unknowns that are left, without those of groups that are too large.
    """
    terms = [group.log_likelihood for group in groups]
    shapes = {name: np.shape(value) for name, value in point.items()}
    k, indices, rows = grouped_rows(model, effects, terms, [rest], shapes)
    if rows.size > MOST_NUMBERS:
        raise ValueError(
            f"marginalize: each group has {rows.size} numbers, and integrals are taken over "
            f"{MOST_NUMBERS} at most. Name fewer unknowns; the others are sampled as ever."
        )
    before = sum(len(group.batches) for group in groups[:k])
    own = sources[before : before + len(groups[k].batches)]
    arrays = [source if isinstance(source, np.ndarray) else array_of(source) for source in own]
    held = dict(zip(groups[k].batches, arrays, strict=True))
    index, *others = (_evaluated(graph, held, rows.n_groups) for graph in indices)
    if any(not np.array_equal(index, other) for other in others):
        raise ValueError(
            f"marginalize: rows see the numbers of more than one group of {effects[0].rv.name!r}, "
            "which can't be integrated out group by group then. Leave it out of marginalize."
        )
    check_groups(model, effects, rows, terms[k], groups[k].batches, arrays, index, point)
    n_rows = index.size
    batch_size = groups[k].batch_size
    kept = KeptGroups(rows, _large(np.bincount(index), batch_size, n_rows, rows.size))
    units = Units.of(index, rows.n_groups, kept.groups)
    needed = set(ancestors(indices))
    places = [before + i for i, batch in enumerate(held) if batch in needed]
    checksums = {i: checksum(arrays[i - before]) for i in places}
    found = Marginal(rows, k, units, kept, d, checksums)
    if batch_size < n_rows:
        n = round(batch_size * found.n_units / n_rows)
        groups[k].batch_size = min(max(2, n), found.n_units)
    else:
        groups[k].batch_size = found.n_units
    return found


def _large(count, batch_size, n_rows, size):
    """Find groups that are to be read row by row: much larger than others, and than a minibatch."""
    n_groups = np.count_nonzero(count)
    few = max(batch_size, LARGE * n_rows / n_groups)
    largest = np.argsort(-count, kind="stable")[: MOST_KEPT // size]
    found = np.sort(largest[count[largest] > few])
    is_worth = batch_size < n_rows and n_groups - found.size >= FEWEST_OTHERS
    return found if is_worth else np.arange(0)


def _evaluated(index, held, n_groups):
    needed = set(ancestors([index]))
    given = {b: np.asarray(x, dtype=b.dtype) for b, x in held.items() if b in needed}
    found = index.eval(given, mode="FAST_COMPILE") if given or index.owner else array_of(index)
    found = np.where(found < 0, found + n_groups, found).astype(np.int64)
    if found.min() < 0 or found.max() >= n_groups:
        raise ValueError(
            f"marginalize: rows have groups from {found.min()} to {found.max()}, but the effects "
            f"have {n_groups} entries. Give them one for each group."
        )
    return found
