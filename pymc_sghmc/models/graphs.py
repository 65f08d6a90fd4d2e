"""From a graph over all rows of the data to the same graph over some of them.

Only graphs are cloned: no data array is copied, and the model keeps its own graph.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pymc.data import MinibatchOp
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.tensor.basic import Alloc, MakeVector
from pytensor.tensor.einsum import Einsum
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.type import TensorType

from pymc_sghmc.compat import BroadcastTo, SymbolicOp, ancestors, toposort
from pymc_sghmc.protocols import Array

__all__ = [
    "array_of",
    "data_leaves",
    "density_variables",
    "full_data",
    "is_fixed",
    "minibatch_outputs",
    "minibatch_size",
    "observed_variables",
    "odd_values",
    "parts_of_vector",
    "slice_rows",
    "substituted",
]


def observed_variables(model: Model) -> list[Variable]:
    """Observed variables, once each: PyMC 5.28's sample_posterior_predictive lists them twice."""
    return list(dict.fromkeys(model.observed_RVs))


def density_variables(model: Model) -> list[Variable]:
    """Variables and potentials of which the model's log-density is made."""
    return [*model.free_RVs, *observed_variables(model), *model.potentials]


def array_of(variable: Variable) -> Array:
    """Return the value of a data variable; the array itself, not a copy, where it is a leaf."""
    if isinstance(variable, SharedVariable):
        return variable.get_value(borrow=True)
    if isinstance(variable, Constant):
        return variable.data
    return variable.eval(mode="FAST_COMPILE")


def odd_values(arrays: Iterable[Array]) -> str:
    """Name what is in data and is no number."""
    found = [array[~np.isfinite(array)] for array in arrays]
    if any(np.isnan(values).any() for values in found):
        return "missing values"
    return "infinite values" if any(map(len, found)) else ""


def data_leaves(graph: Variable, computed: Collection[Variable] = ()) -> list[Variable]:
    """Shared variables and constants with at least one axis from which ``graph`` is computed.

    Variables that are ``computed`` from such ones stand for them.
    """
    return [
        variable
        for variable in dict.fromkeys(ancestors([graph], computed))
        if variable in computed
        or (
            isinstance(variable, SharedVariable | Constant)
            and isinstance(variable.type, TensorType)
            and variable.type.ndim > 0
        )
    ]


def full_data(source: Variable) -> Variable:
    """Return what holds all rows: the input of ``pm.Minibatch``, or the data themselves."""
    if source.owner is not None and isinstance(source.owner.op, MinibatchOp):
        return source.owner.inputs[source.owner.outputs.index(source)]
    return source


def minibatch_outputs(graphs: Iterable[Variable]) -> list[Variable]:
    """Find the outputs of ``pm.Minibatch`` from which the graphs are computed."""
    return [
        variable
        for variable in dict.fromkeys(ancestors(list(graphs)))
        if variable.owner is not None and isinstance(variable.owner.op, MinibatchOp)
    ]


def minibatch_size(node: Apply) -> int:
    """Return the number of rows that a ``pm.Minibatch`` node draws: the size of its index draw."""
    *_, index = node.op.inner_outputs[0].owner.inputs
    [size] = index.owner.inputs[1].data
    return int(size)


def is_fixed(variable: Variable) -> bool:
    """Whether it is computed from shared and constant values alone."""
    roots = (found for found in ancestors([variable]) if found.owner is None)
    return all(isinstance(root, SharedVariable | Constant) for root in roots)


def substituted(
    outputs: Sequence[Variable], replacements: Mapping[Variable, Variable]
) -> list[Variable]:
    """Write graphs with other variables in the places of some, all of them at once.

    Like PyTensor's ``clone_replace``, but what depends on none of these variables is shared with
    the old graphs, not copied: copies take as long as the rewriting that merges them again.
    """
    copies = dict(replacements)
    for node in toposort(outputs, replacements):
        inputs = [copies.get(variable, variable) for variable in node.inputs]
        if any(new is not old for new, old in zip(inputs, node.inputs, strict=True)):
            copy = node.clone_with_new_inputs(inputs, strict=False)
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                copies.setdefault(old, new)
    return [copies.get(output, output) for output in outputs]


def parts_of_vector(
    vector: Variable, variables: Iterable[Variable], point: Mapping[str, Any]
) -> dict[Variable, Variable]:
    """Of variables, the parts of a vector of all of them, with their shapes in ``point``."""
    parts = {}
    end = 0
    for variable in variables:
        begin = end
        shape = point[variable.name].shape
        end += int(np.prod(shape, dtype=int))
        part = vector[begin:end].reshape(shape).astype(variable.dtype)
        parts[variable] = variable.type.filter_variable(part)
    return parts


def _fixed_value(entry: Variable) -> Any:
    """Value of a shape entry that is fixed, or None."""
    if isinstance(entry, Constant):
        return entry.data
    return entry.eval(mode="FAST_COMPILE") if is_fixed(entry) else None


def _is_count(entry: Variable, count: int | None) -> bool:
    value = _fixed_value(entry)
    return value is not None and np.ndim(value) == 0 and int(value) == count


def _lost_length(old: Variable, new: Variable, axis: int) -> bool:
    """Whether the static length of an axis, counted from the last, has become free."""
    if -axis > old.type.ndim:
        return False
    return old.type.shape[axis] is not None and new.type.shape[axis] is None


def slice_rows(
    outputs: Sequence[Variable],
    replacements: Mapping[Variable, Variable],
    count: int | None,
    length: Variable | None,
    axes: Collection[int] = (0,),
) -> list[Variable]:
    """Clone ``outputs`` with data replaced and hard-coded row counts made symbolic.

    Parameters
    ----------
    outputs : list of Variable
        Graphs whose leading axis has ``count`` rows.
    replacements : dict
        Data variable to placeholder of the same dtype with a free leading length.
    count : int
        Number of rows that the graphs were built with.
    length : Variable
        Number of rows of the placeholders. It takes the place of each ``count`` that the model
        wrote into its graph: ``shape=N``, ``pt.zeros(N)``, lengths of dims, static shapes.
    axes : set of int
        On which they may lie: 0, or others, counted from the last.

    Returns
    -------
    list of Variable
        The clones.
    """
    new = dict(replacements)
    for node in toposort(outputs, replacements):
        inputs = [new.get(variable, variable) for variable in node.inputs]
        if isinstance(node.op, Alloc | SpecifyShape | BroadcastTo):
            # inputs[0] is the array, the others are the entries of the shape.
            for i in range(1, len(inputs)):
                last = i - len(inputs)
                if (
                    inputs[i] is node.inputs[i]
                    and (
                        i - 1 in axes
                        or last in axes
                        or _lost_length(node.inputs[0], inputs[0], last)
                    )
                    and _is_count(inputs[i], count)
                ):
                    inputs[i] = length
        elif isinstance(node.op, Reshape):
            shape = inputs[1]
            if shape.owner is not None and isinstance(shape.owner.op, MakeVector):
                first, *rest = shape.owner.inputs
                if _is_count(first, count):
                    inputs[1] = pt.stack([length, *rest])
            elif shape is node.inputs[1]:
                value = _fixed_value(shape)
                if value is not None and len(value) > 0 and value[0] == count:
                    inputs[1] = pt.stack([length, *(int(entry) for entry in value[1:])])
        if any(a is not b for a, b in zip(inputs, node.inputs, strict=True)):
            new.update(
                zip(node.outputs, _applied(node.op, inputs, count, length, axes), strict=True)
            )
    return [new.get(output, output) for output in outputs]


def _applied(
    op: Op,
    inputs: Sequence[Variable],
    count: int | None,
    length: Variable | None,
    axes: Collection[int],
) -> list[Variable]:
    # Two kinds of operation hold a graph for the static shapes that they were built with.
    if isinstance(op, SymbolicOp):
        return op(*inputs, return_list=True)  # builds that graph anew
    if isinstance(op, Einsum):
        inner = dict(zip(op.inner_inputs, inputs, strict=True))
        return slice_rows(op.inner_outputs, inner, count, length, axes)
    return op.make_node(*inputs).outputs
