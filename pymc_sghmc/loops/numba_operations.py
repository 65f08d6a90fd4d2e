"""Operations that Numba compiles in a fraction of the time that PyTensor's take.

PyTensor's products are of two matrices, and a vector is a matrix of one column to them; the maximum
over an axis sorts strides first, whatever they are; an array is taken apart with messages for
lengths that don't fit. Knows graphs and Numba, no steps.
"""

from functools import cache
from typing import Any, Self

import numpy as np
import pytensor.tensor as pt

from pytensor.compile.mode import Mode, get_mode
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.math import Dot, Max

from pymc_sghmc.compat import FAILING, LAST, lengths_of_parts
from pymc_sghmc.loops.machine_code import version_of

__all__ = ["with_quick_operations"]


def with_quick_operations(mode: Any) -> Mode:
    """Return one of Numba's modes, with these operations in the places of PyTensor's."""
    return get_mode(mode).excluding(*FAILING).register((_WithQuickOperations(), LAST))


class _NumbaOperation(Op):
    """An operation that Numba knows before there is any, also in another process."""

    __props__ = ()

    def __new__(cls) -> Self:
        """Let Numba know it first."""
        _add_to_numba()
        return super().__new__(cls)


class MatrixVector(_NumbaOperation):
    """A matrix times a vector of the same dtype."""

    def make_node(self, matrix: Variable, vector: Variable) -> Apply:
        """Return a node with these inputs."""
        length = matrix.type.shape[0]
        return Apply(self, [matrix, vector], [pt.TensorType(matrix.type.dtype, (length,))()])

    def perform(self, node: Apply, inputs: list[Any], outputs: list[list[Any]]) -> None:
        """Evaluate it."""
        matrix, vector = inputs
        outputs[0][0] = np.dot(matrix, vector)


class LargestOfRows(_NumbaOperation):
    """The largest number of each row of a matrix; NaN where one is NaN."""

    def make_node(self, matrix: Variable) -> Apply:
        """Return a node with this input."""
        length = matrix.type.shape[0]
        return Apply(self, [matrix], [pt.TensorType(matrix.type.dtype, (length,))()])

    def perform(self, node: Apply, inputs: list[Any], outputs: list[list[Any]]) -> None:
        """Evaluate it."""
        [matrix] = inputs
        outputs[0][0] = matrix.max(axis=1)


class _WithQuickOperations(GraphRewriter):
    """Replaces operations by those of this file."""

    def apply(self, fgraph: FunctionGraph) -> None:
        """Replace them all."""
        for node in fgraph.toposort():
            if type(node.op) is Dot and _has_one_column(node):
                _replace_product(fgraph, node)
            elif type(node.op) is Max and _is_over_columns(node):
                largest = LargestOfRows()(node.inputs[0])
                fgraph.replace(node.outputs[0], largest, reason="largest of rows")
            elif (parts := lengths_of_parts(node)) is not None:
                _replace_parts(fgraph, node, *parts)


def _has_one_column(node: Apply) -> bool:
    """Whether a product of matrices is one of a matrix and a column, of the same dtype."""
    matrix, column = node.inputs
    is_plain = matrix.type.ndim == column.type.ndim == 2 and column.type.shape[1] == 1
    return is_plain and _is_float(matrix) and matrix.type.dtype == column.type.dtype


def _is_over_columns(node: Apply) -> bool:
    """Whether a maximum is that of each row of a matrix."""
    [matrix] = node.inputs
    return matrix.type.ndim == 2 and _is_float(matrix) and tuple(node.op.axis or ()) == (1,)


def _is_float(variable: Variable) -> bool:
    return variable.type.dtype in ("float32", "float64")


def _replace_product(fgraph: FunctionGraph, node: Apply) -> None:
    matrix, column = node.inputs
    [product] = node.outputs
    is_vector = column.owner is not None and _order(column.owner) == (0, "x")
    vector = column.owner.inputs[0] if is_vector else column.dimshuffle(0)
    new = MatrixVector()(matrix, vector)
    reason = "matrix times vector"
    for client, _ in list(fgraph.clients[product]):
        if _order(client) == (0,):
            fgraph.replace(client.outputs[0], new, reason=reason)
    if fgraph.clients.get(product):
        fgraph.replace(product, new.dimshuffle(0, "x"), reason=reason)


def _replace_parts(fgraph: FunctionGraph, node: Apply, axis: int, lengths: list[int]) -> None:
    """Take each part of an array by itself; set-up has evaluated the graph with its checks."""
    array = node.inputs[0]
    start = 0
    for part, length in zip(node.outputs, lengths, strict=True):
        index = (slice(None),) * axis + (slice(start, start + length),)
        fgraph.replace(part, array[index], reason="parts of an array")
        start += length


def _order(node: Apply) -> tuple[Any, ...] | None:
    """Return the axes that a `DimShuffle` leaves; None of other nodes."""
    return tuple(node.op.new_order) if isinstance(node.op, DimShuffle) else None


def _as_blas_takes_it(array: Any) -> Any:
    """Return an array in C's or Fortran's order: others are copied. Numba alone calls it."""


def _largest_of_rows(matrix: Any) -> Any:
    largest = np.empty(matrix.shape[0], matrix.dtype)
    for i in range(matrix.shape[0]):
        highest = matrix.dtype.type(-np.inf)
        for j in range(matrix.shape[1]):
            value = matrix[i, j]
            if value > highest or value != value:  # which NaN alone isn't
                highest = value
        largest[i] = highest
    return largest


@cache
def _add_to_numba() -> None:
    """Tell PyTensor how Numba compiles them."""
    from numba.extending import overload
    from pytensor.link.numba.dispatch import basic

    @overload(_as_blas_takes_it)
    def of_layout(array: Any) -> Any:
        def as_it_is(array: Any) -> Any:
            return array

        def copied(array: Any) -> Any:
            return np.ascontiguousarray(array)

        return as_it_is if array.layout in "CF" else copied

    def matrix_vector(matrix: Any, vector: Any) -> Any:
        return np.dot(_as_blas_takes_it(matrix), _as_blas_takes_it(vector))

    compiled = {
        MatrixVector: basic.numba_njit(matrix_vector),
        LargestOfRows: basic.numba_njit(_largest_of_rows),
    }

    @basic.register_funcify_and_cache_key(_NumbaOperation)  # type: ignore[untyped-decorator]
    def with_version(op: Any, node: Apply, **kwargs: Any) -> tuple[Any, str]:
        return compiled[type(op)], f"{type(op).__name__} {version_of(_largest_of_rows)}"
