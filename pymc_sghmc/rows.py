"""From a graph over all rows of the data to the same graph over some of them.

Only graphs are cloned: no data array is copied, and the model keeps its own graph.
"""

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import compile
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.tensor.basic import Alloc, MakeVector
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.type import TensorType

from pymc_sghmc.compat import BroadcastTo, ancestors, toposort

__all__ = ["array_of", "check_rows", "data_leaves", "not_sliceable", "slice_rows"]


def array_of(variable) -> np.ndarray:
    """Return the value of a data variable; the array itself, not a copy, where it is a leaf."""
    if isinstance(variable, SharedVariable):
        return variable.get_value(borrow=True)
    if isinstance(variable, Constant):
        return variable.data
    return variable.eval(mode="FAST_COMPILE")


def data_leaves(graph) -> list:
    """Shared variables and constants with at least one axis from which ``graph`` is computed."""
    return [
        variable
        for variable in dict.fromkeys(ancestors([graph]))
        if isinstance(variable, SharedVariable | Constant)
        and isinstance(variable.type, TensorType)
        and variable.type.ndim > 0
    ]


def _fixed_value(entry):
    """Value of a shape entry that no unknown and no minibatch enters, or None."""
    if isinstance(entry, Constant):
        return entry.data
    roots = [variable for variable in ancestors([entry]) if variable.owner is None]
    if all(isinstance(root, SharedVariable | Constant) for root in roots):
        return entry.eval(mode="FAST_COMPILE")
    return None


def _is_count(entry, count) -> bool:
    value = _fixed_value(entry)
    return value is not None and np.ndim(value) == 0 and int(value) == count


def slice_rows(outputs: list, replacements: dict, count: int, length) -> list:
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

    Returns
    -------
    list of Variable
        The clones.
    """
    new = dict(replacements)
    for node in toposort(outputs, replacements):
        inputs = [new.get(variable, variable) for variable in node.inputs]
        # inputs[1] is the leading entry of the shape for the first group, all of it for Reshape
        if isinstance(node.op, Alloc | SpecifyShape | BroadcastTo) and len(inputs) > 1:
            if inputs[1] is node.inputs[1] and _is_count(inputs[1], count):
                inputs[1] = length
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
            new.update(zip(node.outputs, node.op.make_node(*inputs).outputs, strict=True))
    return [new.get(output, output) for output in outputs]


def check_rows(model, groups, point) -> None:
    """Refuse terms whose rows change with the company they keep in a minibatch."""
    values = list(model.value_vars)
    for group in groups:
        arrays = [array_of(source) for source in group.full_data]
        rng = np.random.default_rng(0)
        common = rng.integers(group.n_rows, size=4)
        batches = [np.append(common, rng.integers(group.n_rows, size=k)) for k in (3, 5)]
        try:
            rows = compile(
                [*values, *group.batches],
                list(group.terms.values()),
                mode="FAST_COMPILE",
                on_unused_input="ignore",
            )
        except Exception as error:
            raise not_sliceable(model, next(iter(group.terms)), group.n_rows, error) from error
        for scale in (0.3, 0.03, 0.0):  # away from the start, where coefficients are often zero
            theta = [_jittered(point[value.name], value, scale, rng) for value in values]
            try:
                results = [rows(*theta, *(array[idx] for array in arrays)) for idx in batches]
            except Exception as error:
                raise not_sliceable(model, next(iter(group.terms)), group.n_rows, error) from error
            if all(np.isfinite(result).all() for batch in results for result in batch):
                break
        for name, *parts in zip(group.terms, *results, strict=True):
            for part, idx in zip(parts, batches, strict=True):
                if np.shape(part)[:1] != idx.shape:
                    raise not_sliceable(
                        model,
                        name,
                        group.n_rows,
                        f"{len(idx)} rows of data give a log-likelihood of shape {np.shape(part)}",
                    )
            first, second = (part[: len(common)] for part in parts)
            tolerance = 1e-4 if first.dtype == np.float32 else 1e-8
            if not np.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True):
                raise ValueError(
                    f"The rows of {name!r} are not independent given the unknowns: the "
                    "log-likelihood of the same rows changes with which other rows are in the "
                    "minibatch. Look for a mean, a sum, a sort, a difference or a recursion over "
                    "rows in the model (such as X.mean(axis=0)) and compute it from the full data "
                    "beforehand; for time series and Gaussian processes use NUTS."
                )


def not_sliceable(model, name, n_rows, reason) -> ValueError:
    by_row = [
        repr(value.name)
        for value in model.value_vars
        if value.type.ndim > 0 and model.initial_point()[value.name].shape[0] == n_rows
    ]
    hint = (
        f" The unknowns {', '.join(by_row)} have one entry per row: an unknown indexed by row "
        "can't be sampled from minibatches."
        if by_row
        else ""
    )
    first_line = str(reason).strip().splitlines()[0] if str(reason).strip() else repr(reason)
    return ValueError(
        f"The likelihood of {name!r} can't be evaluated on some of its {n_rows} rows.{hint} "
        "Data of the likelihood need their rows on the leading axis, in the same order. Marginalise "
        f"such unknowns out, rearrange the data, or use NUTS. (PyTensor says: {first_line})"
    )


def _jittered(start, value, scale, rng):
    if value.dtype.startswith("float"):
        start = start + scale * rng.standard_normal(np.shape(start))
    return np.asarray(start, dtype=value.dtype)
