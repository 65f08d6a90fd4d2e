"""Values that constants alone determine, such as a basis of functions, are computed once.

PyMC computes most of it itself, up to an operation that repeats an array: there the rows of
constants may lie on any axis, and nothing could be cut. Knows graphs; knows no model, no steps.
"""

import math

from collections.abc import Collection

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Cast
from pytensor.tensor.type import TensorType

from pymc_sghmc.compat import toposort
from pymc_sghmc.memory import memory_map_of
from pymc_sghmc.protocols import Array

__all__ = ["is_on_disk", "may_be_added", "with_rows_computed"]

SMALL = 2**28  # bytes that may be added to any data; ...
LARGEST = 2**31  # ... beyond it, at most so many, and so many times those of the data
TIMES = 4


def with_rows_computed(
    graph: Variable, n_rows: int, observed: Collection[Variable] = ()
) -> Variable:
    """Return ``graph`` with constants in the place of what constants alone determine, row by row.

    Parameters
    ----------
    graph : TensorVariable
        Log-likelihood of each row.
    n_rows : int
        Arrays of so many rows are computed, from constants with an axis of that length.
    observed : sequence of Variable
        Constants that are left alone, with what is computed from them: the outcome has its rows in
        front, and what a density makes of it is cheap.

    Returns
    -------
    TensorVariable
        ``graph`` itself where there is nothing to compute, where that would take too much memory,
        or where an array is an `np.memmap`, which is to stay on disk.
    """
    # of what constants determine: the large ones among them
    leaves: dict[Variable, set[Variable]] = {}
    found = {}  # the same, where it has rows in front
    nodes = toposort([graph], [])
    for node in nodes:
        if isinstance(node.op, CheckAndRaise) or not all(
            v in leaves or (isinstance(v, Constant) and v not in observed) for v in node.inputs
        ):
            continue
        large = {v for v in node.inputs if isinstance(v, Constant) and _has_rows(v, n_rows)}
        is_cast = isinstance(getattr(node.op, "scalar_op", None), Cast)
        for out in node.outputs:
            leaves[out] = large.union(*(leaves.get(v, ()) for v in node.inputs))
            has_rows = isinstance(out.type, TensorType) and out.type.shape[:1] == (n_rows,)
            # small numbers are made wide as rows are fetched: computed, they'd take eight times the
            # memory
            if leaves[out] and has_rows and not (is_cast and node.inputs[0] not in leaves):
                found[out] = leaves[out]
    # The last of them in each chain of operations: what it was computed from isn't needed then.
    wanted = [v for node in nodes if found.keys().isdisjoint(node.outputs) for v in node.inputs]
    wanted = [v for v in dict.fromkeys([*wanted, graph]) if v in found]
    data = set().union(*(found[v] for v in wanted))
    added = sum(_bytes(v) for v in wanted)
    held = sum(v.data.nbytes for v in data)
    if not may_be_added(added, held) or any(is_on_disk(v.data) for v in data):
        return graph
    return clone_replace(graph, {v: _computed(v) for v in wanted}) if wanted else graph


def may_be_added(added: float, held: int) -> bool:
    """Whether memory may take ``added`` bytes for values that come of ``held`` bytes of data."""
    return added <= max(SMALL, min(LARGEST, TIMES * held))


def is_on_disk(array: Array) -> bool:
    """Whether an array is an `np.memmap` or part of one, which is to stay on disk."""
    return memory_map_of(array) is not None


def _computed(variable: Variable) -> Variable:
    value = variable.eval(mode="FAST_COMPILE")
    return pt.constant(np.asarray(value, dtype=variable.dtype), name=variable.name)


def _has_rows(constant: Constant, n_rows: int) -> bool:
    return isinstance(constant.type, TensorType) and n_rows in np.shape(constant.data)


def _bytes(variable: Variable) -> float:
    shape = variable.type.shape
    return np.inf if None in shape else math.prod(shape) * np.dtype(variable.dtype).itemsize
