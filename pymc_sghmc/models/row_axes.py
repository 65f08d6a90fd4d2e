"""Two walks through a graph: on which axis its rows lie, and which derivatives are the same everywhere.

Knows operations of PyTensor; knows no model, no data and no sampler. Of what isn't known to keep rows
apart it says `MIXED`.
"""

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.gradient import DisconnectedType, NullType
from pytensor.graph.basic import Constant
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, ARange, Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    AdvancedSubtensor,
    Subtensor,
    get_idx_list,
)
from pytensor.tensor.type import TensorType, discrete_dtypes, float_dtypes, integer_dtypes

from pymc_sghmc.compat import (
    BroadcastTo,
    SymbolicOp,
    indexes_leading_axes,
    joined_along,
    toposort,
)

__all__ = ["MIXED", "fixed_jacobians", "row_axes", "simplified"]

# What the leading axis of a variable's rows is called where it is none: the number of rows, the
# row indices 0, 1, ..., and what mixes rows or may do so.
LENGTH, POSITIONS, MIXED = "length", "positions", "mixed"


def row_axes(graphs, axes) -> dict:
    """Find on which axis the rows lie, for all variables that depend on some that have rows."""
    axes = dict(axes)
    for node in toposort(graphs, list(axes)):
        found = [axes.get(v) for v in node.inputs]
        if any(axis is not None for axis in found):
            axis = MIXED if len(node.outputs) > 1 else _row_axis(node, found, axes)
            axes.update((out, axis) for out in node.outputs if axis is not None)
    return axes


def _row_axis(node, found, axes):
    """Where an operation puts the rows that it gets on the axes ``found``."""
    op, inputs, out = node.op, node.inputs, node.outputs[0]
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
        index = get_idx_list(inputs, op.idx_list)
        if index[axis : axis + 1] in ((), (slice(None),)):
            return axis - sum(not isinstance(entry, slice) for entry in index[:axis])
    if isinstance(op, AdvancedSubtensor) and found[0] is None:
        return _picked(node, found, axis)
    return MIXED


def _aligned(inputs, found, axis) -> bool:
    """Whether what has no rows is broadcast along them."""
    pairs = zip(inputs, found, strict=True)
    return all(f is not None or v.type.broadcastable[axis] for v, f in pairs)


def _picked(node, found, axis):
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


def _without_rows(node, found, axes):
    """Follow the number of rows and the row indices, which only some operations may use."""
    op, inputs, out = node.op, node.inputs, node.outputs[0]
    shape = inputs[0].owner
    if isinstance(op, Subtensor) and shape is not None and isinstance(shape.op, Shape):
        [index] = get_idx_list(inputs, op.idx_list)
        if isinstance(index, Constant) and index.data >= 0:
            return LENGTH if axes.get(shape.inputs[0]) in (index.data, LENGTH, MIXED) else None
    if isinstance(op, ARange):
        start, _, step = (getattr(v, "data", None) for v in inputs)
        return POSITIONS if found == [None, LENGTH, None] and (start, step) == (0, 1) else MIXED
    if isinstance(op, Alloc | BroadcastTo):
        return 0 if found[:2] == [None, LENGTH] and not any(found[2:]) else MIXED
    if POSITIONS in found:
        return POSITIONS if isinstance(op, DimShuffle) else MIXED
    return LENGTH if getattr(out.type, "dtype", None) in discrete_dtypes else MIXED


def fixed_jacobians(graph, variables) -> dict:
    """Whether ∂v/∂θ is the same at every θ, for each v that has a derivative."""
    fixed, moving = dict.fromkeys(variables, True), set(variables)
    for node in toposort([graph], []):
        inputs = node.inputs[:1] if isinstance(node.op, CheckAndRaise) else node.inputs
        if isinstance(node.op, Shape | Shape_i) or moving.isdisjoint(inputs):
            continue
        moving.update(node.outputs)
        unknown = list(dict.fromkeys(v for v in inputs if v in fixed))
        continuous = [v for v in node.outputs if getattr(v.type, "dtype", None) in float_dtypes]
        if unknown and continuous:
            # conditions and indices move without a derivative, and with them that of the output
            steered = any(v in moving and v not in fixed for v in inputs)
            same = not steered and all(fixed[v] for v in unknown) and _is_affine(node, unknown)
            fixed.update(dict.fromkeys(continuous, same))
    return fixed


def _is_affine(node, unknown) -> bool:
    """Whether the derivative of one operation is the same whatever the ``unknown`` inputs."""
    if len(node.outputs) > 1:
        return False
    inputs = {v: v.type() for v in unknown}
    copy = node.clone_with_new_inputs([inputs.get(v, v) for v in node.inputs])
    out = copy.outputs[0]
    gradients = pt.grad(
        None,
        list(inputs.values()),
        known_grads={out: out.type()},
        disconnected_inputs="ignore",
        null_gradients="return",
    )
    left, new = list(gradients), set(inputs.values())
    while left:
        v = left.pop()
        if v in new or isinstance(v.type, NullType | DisconnectedType):
            return False
        if v.owner is not None and not isinstance(v.owner.op, Shape | Shape_i):
            # The first input of ``second`` gives the shape alone.
            left += v.owner.inputs[getattr(v.owner.op, "scalar_op", None) == ps.second :]
    return True


def simplified(graph, fixed):
    """Write the same so that rows depend on the unknowns through fewer functions, and linear ones.

    f(x, σ)[group], where f works entry by entry and isn't linear, becomes f(x[group], σ), and of a sum
    what is linear becomes one term.
    """
    fixed, new = dict(fixed), {}
    for node in toposort([graph], []):
        old, inputs = node.outputs[0], [new.get(v, v) for v in node.inputs]
        moves = old in fixed and not fixed[old]
        linear = [v for v in inputs if fixed.get(v)]
        if moves and _picks(node):
            outputs = [_picked_first(*inputs, fixed)]
        elif moves and node.op == pt.add and len(linear) > 1:
            outputs = [pt.add(pt.add(*linear), *(v for v in inputs if v not in linear))]
        elif any(a is not b for a, b in zip(inputs, node.inputs, strict=True)):
            outputs = node.clone_with_new_inputs(inputs).outputs
        else:
            continue
        pairs = list(zip(node.outputs, outputs, strict=True))
        new.update(pairs)
        fixed.update((out, fixed[v]) for v, out in pairs if v in fixed)
    return new.get(graph, graph)


def _picks(node) -> bool:
    """Whether an operation picks one entry of the leading axis for each row."""
    is_indexed = isinstance(node.op, AdvancedSubtensor) and len(node.inputs) == 2
    return is_indexed and indexes_leading_axes(node) and node.inputs[1].type.ndim == 1


def _picked_first(x, rows, fixed):
    """x[rows], as far inside of ``x`` as can be; tell ``fixed`` of what is new."""
    node = x.owner
    if x not in fixed:
        return x[rows]
    if node is not None and _picks(node):
        return _picked_first(node.inputs[0], node.inputs[1][rows], fixed)
    by_entry = list(node.inputs) if node is not None and isinstance(node.op, Elemwise) else []
    same = [v.type.broadcastable[0] for v in by_entry]  # for all entries, and so for all rows
    if fixed[x] and not any(one and v in fixed for v, one in zip(by_entry, same, strict=True)):
        by_entry = []
    picked = [
        v if one else _picked_first(v, rows, fixed) for v, one in zip(by_entry, same, strict=False)
    ]
    out = node.op(*picked) if picked else x[rows]
    fixed[out] = fixed[x]
    return out
