"""Where to cut the graph of a row: the linear predictors through which it sees parameters.

Knows operations of PyTensor, no model and no data.
"""

from collections.abc import Iterator, Mapping, Sequence

import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.tensor.basic import Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.subtensor import AdvancedSubtensor

from pymc_sghmc.compat import ancestors
from pymc_sghmc.models.row_axes import RowAxis

__all__ = ["frontier", "is_multiple", "shared_zetas"]


def frontier(
    graph: Variable, axes: Mapping[Variable, RowAxis], fixed: Mapping[Variable, bool]
) -> tuple[list[Variable], list[Variable]] | None:
    """Go from ℓ towards the unknowns as far as need be: ζ by row, and ζ that all rows share."""
    by_row = []
    shared = []
    seen = set()
    left = [graph]
    if axes.get(graph) != 0:
        return None
    while left:
        v = left.pop()
        if v in seen or v not in fixed:
            continue
        seen.add(v)
        if v not in axes:
            shared.append(v)
            continue
        unknown = [u for u in v.owner.inputs if u in fixed]
        with_rows = [u for u in unknown if u in axes]
        broadcasts = isinstance(v.owner.op, Elemwise)
        if axes[v] != 0:
            return None
        alike = broadcasts or isinstance(v.owner.op, Join)
        if fixed[v] and alike and len(unknown) == 1 and with_rows:
            left += unknown  # not −ζ where there is ζ, and not with constants beside it
        elif fixed[v] or (not with_rows and isinstance(v.owner.op, AdvancedSubtensor)):
            by_row.append(v)
        elif broadcasts or len(with_rows) == len(unknown):
            left += unknown
        else:  # such as X(zτ), which takes as long from θ̂, or a layer of a neural network
            return None
    return by_row, shared


def shared_zetas(
    shared: list[Variable], fixed: Mapping[Variable, bool], variables: Sequence[Variable]
) -> Iterator[tuple[list[Variable], Sequence[Variable]]]:
    """Yield what all rows share: linear predictors, and functions of them, such as cutpoints."""
    # Functions of one shared unknown, such as σ and log σ, are one ζ.
    roots = list(dict.fromkeys(root for v in shared for root in _elementwise_roots(v, fixed)))
    yield from ((roots, ()), (shared, ()))
    if variables and shared and (unknowns := _behind(roots, variables)):
        yield [v.dimshuffle("x", *range(v.ndim)) for v in unknowns], roots


def _elementwise_roots(v: Variable, fixed: Mapping[Variable, bool]) -> list[Variable]:
    """Find what a shared ``v`` is a function of, entry by entry."""
    roots = []
    left = [v]
    while left:
        v = left.pop()
        unknown = [u for u in v.owner.inputs if u in fixed] if v.owner else []
        same = all(u.type.broadcastable == v.type.broadcastable for u in unknown)
        if unknown and same and isinstance(v.owner.op, Elemwise):
            left += unknown
        else:
            roots.append(v)
    return roots


def _behind(roots: Sequence[Variable], variables: Sequence[Variable]) -> list[Variable] | None:
    """Return the unknowns that ``roots`` are functions of, or None where rows can't have their own.

    Each operation on the way has to take one more axis as it is: a loop around it for each row,
    such as a scan, would take too long, to compile above all.
    """
    seen = set(ancestors(roots))
    found = [v for v in variables if v in seen]
    by_row = [pt.tensor(dtype=v.dtype, shape=(None, *v.type.shape)) for v in found]
    graphs = vectorize_graph(roots, dict(zip(found, by_row, strict=True)))
    graphs = rewrite_graph(graphs, include=("canonicalize", "specialize"), clone=True)
    owners = [v.owner for v in ancestors(graphs) if v.owner]
    return None if any(isinstance(owner.op, Blockwise) for owner in owners) else found


def is_multiple(v: Variable, shared: Sequence[Variable], fixed: Mapping[Variable, bool]) -> bool:
    """Whether ``v`` is one of ``shared``, entry by entry times constants."""
    unknown = [u for u in v.owner.inputs if u in fixed]
    return isinstance(v.owner.op, Elemwise) and len(unknown) == 1 and unknown[0] in shared
