"""Which derivatives of a graph are constant, and rewrites that make more of them constant.

Knows operations of PyTensor; knows no model, no data and no sampler.
"""

from collections.abc import Iterable
from typing import Any

import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.gradient import DisconnectedType, NullType
from pytensor.graph.basic import Apply, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor
from pytensor.tensor.type import float_dtypes

from pymc_sghmc.compat import index_entries, toposort

__all__ = ["fixed_jacobians", "simplified"]


def fixed_jacobians(graph: Variable, variables: Iterable[Variable]) -> dict[Variable, bool]:
    """Whether ∂v/∂θ is the same at every θ, for each v that has a derivative."""
    fixed = dict.fromkeys(variables, True)
    moving = set(variables)
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


def _is_affine(node: Apply, unknown: Iterable[Variable]) -> bool:
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
    left = list(gradients)
    new = set(inputs.values())
    while left:
        v = left.pop()
        if v in new or isinstance(v.type, NullType | DisconnectedType):
            return False
        if v.owner is not None and not isinstance(v.owner.op, Shape | Shape_i):
            # The first input of ``second`` gives the shape alone.
            left += v.owner.inputs[getattr(v.owner.op, "scalar_op", None) == ps.second :]
    return True


def simplified(graph: Variable, fixed: dict[Variable, bool]) -> Variable:
    """Write the same so that rows depend on the unknowns through fewer functions, and linear ones.

    f(x, σ)[group], where f works entry by entry and isn't linear, becomes f(x[group], σ), the same
    of one column of matrices, and of a sum what is linear becomes one term.
    """
    fixed = dict(fixed)
    new: dict[Variable, Variable] = {}
    for node in toposort([graph], []):
        old = node.outputs[0]
        inputs = [new.get(v, v) for v in node.inputs]
        moves = old in fixed and not fixed[old]
        linear = [v for v in inputs if fixed.get(v)]
        if moves and _picks(node):
            x, rows, *column = inputs
            for k in column:  # one at most
                x = _column(x, k, fixed)
            outputs = [_picked_first(x, rows, fixed)]
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


def _picks(node: Apply) -> bool:
    """Whether an operation picks one entry of the leading axis for each row."""
    entries = index_entries(node) if isinstance(node.op, AdvancedSubtensor) else None
    if entries is None or any(isinstance(entry, slice) for entry in entries):
        return False
    rows, *columns = entries
    ndim = node.inputs[0].type.ndim
    is_column = ndim == 2 and len(columns) == 1 and columns[0].type.ndim == 0
    return rows.type.ndim == 1 and (not columns or is_column)


def _column(x: Variable, k: Any, fixed: dict[Variable, bool]) -> Variable:
    """x[:, k], as far inside of ``x`` as can be; tell ``fixed`` of what is new."""
    node = x.owner
    if fixed.get(x) is False and isinstance(node.op, Elemwise):
        out = node.op(*(_column(v, k, fixed) for v in node.inputs))
    else:
        out = x[:, 0 if x.type.broadcastable[1] else k]
    if x in fixed:
        fixed[out] = fixed[x]
    return out


def _picked_first(x: Variable, rows: Variable, fixed: dict[Variable, bool]) -> Variable:
    """x[rows], as far inside of ``x`` as can be; tell ``fixed`` of what is new."""
    node = x.owner
    if x not in fixed:
        return x[rows]
    if node is not None and isinstance(node.op, Subtensor) and not fixed[x]:
        of = node.inputs[0]
        index = index_entries(node) or []
        if len(index) == of.type.ndim == 2 and index[0] == slice(None):
            x = _column(of, index[1], fixed)
            node = x.owner
    if node is not None and _picks(node) and len(node.inputs) == 2:
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
