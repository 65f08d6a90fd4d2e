"""On which axis of each variable of a graph its rows lie.

Knows operations of PyTensor; knows no model, no data and no sampler. Of what isn't known to keep
rows apart it says `MIXED`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, ARange, Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor
from pytensor.tensor.type import TensorType, discrete_dtypes, integer_dtypes

from pymc_sghmc.compat import (
    BroadcastTo,
    SymbolicOp,
    index_entries,
    indexes_leading_axes,
    joined_along,
    toposort,
)

__all__ = ["MIXED", "RowAxis", "row_axes"]

# What the leading axis of a variable's rows is called where it is none: the number of rows, the
# row indices 0, 1, ..., and what mixes rows or may do so.
LENGTH = "length"
POSITIONS = "positions"
MIXED = "mixed"

RowAxis = int | str | None  # where rows lie: an axis, one of these words, or nowhere


def row_axes(
    graphs: Sequence[Variable], axes: Mapping[Variable, RowAxis]
) -> dict[Variable, RowAxis]:
    """Find on which axis the rows lie, for all variables that depend on some that have rows."""
    axes = dict(axes)
    for node in toposort(graphs, list(axes)):
        found = [axes.get(v) for v in node.inputs]
        if any(axis is not None for axis in found):
            axis = MIXED if len(node.outputs) > 1 else _row_axis(node, found, axes)
            axes.update((out, axis) for out in node.outputs if axis is not None)
    return axes


def _row_axis(node: Apply, found: Sequence[RowAxis], axes: Mapping[Variable, RowAxis]) -> RowAxis:
    """Where an operation puts the rows that it gets on the axes ``found``."""
    op = node.op
    inputs = node.inputs
    out = node.outputs[0]
    if isinstance(op, CheckAndRaise):
        return found[0]
    if MIXED in found:
        return MIXED
    if isinstance(op, Shape_i):
        return LENGTH if found[0] in (op.i, LENGTH) else None
    if isinstance(op, Shape):
        return LENGTH
    rows = {axis for axis in found if isinstance(axis, int)}
    if not rows:
        return _without_rows(node, found, axes)
    [axis, *others] = rows
    if others:
        return MIXED
    if isinstance(op, Alloc | BroadcastTo):
        place = axis + out.type.ndim - inputs[0].type.ndim
        lengths = [i for i, f in enumerate(found[1:]) if f is not None]
        return place if found[0] == axis and lengths == [place] else MIXED
    if POSITIONS in found:
        return _picked(node, found, axis)
    if isinstance(op, SpecifyShape):
        return axis if found[0] == axis else MIXED
    if LENGTH in found:
        return MIXED
    if isinstance(op, Elemwise) or (isinstance(op, Blockwise) and axis < op.batch_ndim(node)):
        return axis if _aligned(inputs, found, axis) else MIXED
    if isinstance(op, DimShuffle):
        return op.new_order.index(axis) if axis in op.new_order else MIXED
    if isinstance(op, SymbolicOp):
        inner = {v: f for v, f in zip(op.inner_inputs, found, strict=True) if f is not None}
        return row_axes(op.inner_outputs, inner).get(op.inner_outputs[0], MIXED)
    if isinstance(op, CAReduce | Softmax | LogSoftmax) and op.axis is not None:
        over = {int(i) % inputs[0].type.ndim for i in np.atleast_1d(op.axis)}
        lost = sum(i < axis for i in over) if isinstance(op, CAReduce) else 0
        return MIXED if axis in over else axis - lost
    if isinstance(op, Blockwise) and isinstance(op.core_op, Dot):
        ndim = out.type.ndim
        places: dict[Any, int] = {(ndim - 2, None): ndim - 2, (None, ndim - 1): ndim - 1}
        return places.get(tuple(found), MIXED)
    if isinstance(op, Dot):
        ndim = inputs[0].type.ndim
        if found == [0, None] and ndim == 2:
            return 0
        return ndim - 1 if found == [None, 1] else MIXED
    if isinstance(op, Join):
        along, n = joined_along(node)
        apart = along is not None and along % out.type.ndim != axis
        return axis if apart and None not in found[-n:] else MIXED
    if isinstance(op, Subtensor) and found[0] == axis:
        index = index_entries(node) or []
        if index[axis : axis + 1] in ([], [slice(None)]):
            return axis - sum(not isinstance(entry, slice) for entry in index[:axis])
    if isinstance(op, AdvancedSubtensor) and found[0] is None:
        return _picked(node, found, axis)
    return MIXED


def _aligned(inputs: Sequence[Variable], found: Sequence[RowAxis], axis: int) -> bool:
    """Whether what has no rows is broadcast along them."""
    pairs = zip(inputs, found, strict=True)
    return all(f is not None or v.type.broadcastable[axis] for v, f in pairs)


def _picked(node: Apply, found: Sequence[RowAxis], axis: int) -> RowAxis:
    """``x[i, j]`` with indices by row: of what all rows share, or of each row with i = 0, 1, ..."""
    op, (_, *indices), (of, *by) = node.op, node.inputs, found
    integers = (isinstance(i.type, TensorType) and i.dtype in integer_dtypes for i in indices)
    if (
        not isinstance(op, AdvancedSubtensor)
        or not indexes_leading_axes(node)
        or not all(integers)
        or (of, by[0] == POSITIONS) not in ((None, False), (0, True))
        or POSITIONS in by[1:]
    ):
        return MIXED
    ndim = max(i.type.ndim for i in indices)
    if by[0] == POSITIONS:
        [by[0]] = (k for k, one in enumerate(indices[0].type.broadcastable) if not one)
    offsets = [ndim - i.type.ndim for i in indices]
    places = {f + k for f, k in zip(by, offsets, strict=True) if f is not None}
    [place, *others] = places
    alone = (
        f is not None or place < k or i.type.broadcastable[place - k]
        for i, f, k in zip(indices, by, offsets, strict=True)
    )
    return place if not others and all(alone) else MIXED


def _without_rows(
    node: Apply, found: Sequence[RowAxis], axes: Mapping[Variable, RowAxis]
) -> RowAxis:
    """Follow the number of rows and the row indices, which only some operations may use."""
    op = node.op
    inputs = node.inputs
    out = node.outputs[0]
    shape = inputs[0].owner
    if isinstance(op, Subtensor) and shape is not None and isinstance(shape.op, Shape):
        [index] = index_entries(node) or []
        if isinstance(index, Constant) and index.data >= 0:
            return LENGTH if axes.get(shape.inputs[0]) in (index.data, LENGTH, MIXED) else None
    if isinstance(op, ARange):
        start, _, step = (getattr(v, "data", None) for v in inputs)
        return POSITIONS if found == [None, LENGTH, None] and (start, step) == (0, 1) else MIXED
    if isinstance(op, Alloc | BroadcastTo):
        lengths = [i for i, f in enumerate(found[1:]) if f is not None]
        alone = found[0] is None and [found[i + 1] for i in lengths] == [LENGTH]
        return lengths[0] if alone else MIXED
    if POSITIONS in found:
        return POSITIONS if isinstance(op, DimShuffle) else MIXED
    return LENGTH if getattr(out.type, "dtype", None) in discrete_dtypes else MIXED
