"""Rows that a likelihood picks from a longer predictor, as in ``mu[is_observed]``.

Cut as it stands, such a likelihood would compute all rows of the predictor for each minibatch. The
same numbers come of a predictor that is computed from the picked rows of its data alone, and these
can be cut like all others. Knows graphs; knows no model, no steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Constant, Variable

from pymc_sghmc.compat import index_entries, toposort
from pymc_sghmc.models.folding import is_on_disk, may_be_added, with_rows_computed
from pymc_sghmc.models.graphs import array_of, data_leaves, slice_rows, substituted
from pymc_sghmc.protocols import Array

__all__ = ["PickedRows", "with_picked_rows"]


class PickedRows(NamedTuple):
    """A log-likelihood by row, and what it is computed from."""

    graph: Variable
    sources: list[Variable]  # picked rows of data, in the graph


def with_picked_rows(graph: Variable, n_rows: int) -> PickedRows:
    """Let a graph compute only those rows of a predictor that it picks by a mask or by number.

    Parameters
    ----------
    graph : TensorVariable
        Log-likelihood of each row.
    n_rows : int
        Rows of the outcome, and of what is picked.

    Returns
    -------
    PickedRows
        With ``graph`` itself and no sources where no rows are picked. Whether rows of the predictor
        depend on those of its data one by one isn't looked at: that is to be checked.
    """
    replacements = {}
    sources: list[Variable] = []
    for node in toposort([graph], []):
        picked = _predictor_of(node, n_rows)
        if picked is not None:
            replacements[node.outputs[0]] = picked.graph
            sources += picked.sources
    [graph] = substituted([graph], replacements)
    return PickedRows(graph, sources)


def _predictor_of(node: Apply, n_rows: int) -> PickedRows | None:
    """Return what a node picks, computed from the picked rows of data; None where that can't be."""
    index = _leading_index(node)
    n_all = None if index is None else _number_of_rows(node.inputs[0], n_rows)
    if index is None or n_all is None or not _picks_each_once(index, n_all, n_rows):
        return None
    predictor = with_rows_computed(node.inputs[0], n_all)
    leaves = [leaf for leaf in data_leaves(predictor) if array_of(leaf).shape[0] == n_all]
    if not _may_be_copied([array_of(leaf) for leaf in leaves], n_rows / n_all):
        return None
    sources = [_rows_of(leaf, index) for leaf in leaves]
    replacements = dict(zip(leaves, sources, strict=True))
    try:
        [graph] = slice_rows([predictor], replacements, n_all, pt.constant(n_rows))
    except Exception:  # an operation whose rows can't be told apart
        return None
    return PickedRows(graph, sources) if graph.type.ndim == node.outputs[0].type.ndim else None


def _picks_each_once(index: Array | slice, n_all: int, n_rows: int) -> bool:
    """Whether an index picks ``n_rows`` rows of ``n_all``, none of them twice.

    Entries of a parameter that are looked up by group are picked several times.
    """
    try:
        rows = np.arange(n_all)[index]
    except IndexError:  # the axis is another than that of the data
        return False
    return rows.size == n_rows and np.unique(rows).size == n_rows


def _may_be_copied(arrays: Sequence[Array], share: float) -> bool:
    """Whether a share of the rows of arrays may be copied into memory; there has to be one."""
    held = sum(array.nbytes for array in arrays)
    on_disk = any(map(is_on_disk, arrays))
    return bool(arrays) and not on_disk and may_be_added(held * share, held)


def _leading_index(node: Apply) -> Array | slice | None:
    """Return a constant index on the leading axis of x, alone, as in x[i] or x[i, :], else None."""
    first, *others = index_entries(node) or [None]
    if any(not isinstance(other, slice) or other != slice(None) for other in others):
        return None
    if isinstance(first, slice):
        ends = (first.start, first.stop, first.step)
        if not all(end is None or isinstance(end, Constant) for end in ends):
            return None
        return slice(*(None if end is None else int(end.data) for end in ends))
    is_vector = isinstance(first, Constant) and first.type.ndim == 1
    return np.asarray(first.data) if is_vector else None


def _number_of_rows(predictor: Variable, n_rows: int) -> int | None:
    """Return the rows of a predictor that has more than ``n_rows``, by its type or its data."""
    length = predictor.type.shape[0]
    lengths = {array_of(leaf).shape[0] for leaf in data_leaves(predictor)}
    candidates = lengths if length is None else {length}
    return max((n for n in candidates if n > n_rows), default=None)


def _rows_of(leaf: Variable, index: Array | slice) -> Variable:
    """Rows of data: as an array where they are constant, else as an expression.

    By the same index as in the model, which of new data picks what it says, or is an error.
    """
    if isinstance(leaf, Constant):
        return pt.constant(leaf.data[index], name=leaf.name)
    picked = leaf[index]
    picked.name = leaf.name
    return picked
