"""Operations of PyTensor graphs that are NumPy's own functions, without PyTensor's checks of calls.

Knows arrays, no rewrites and no mode.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytensor.scalar as ps

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.scalar.math import Log1mexp, Softplus, TriGamma
from scipy.sparse import csc_array
from scipy.special import zeta

__all__ = ["ELEMENTWISE", "OfArrays", "RowsOfArray", "ViewOfArray", "taken", "with_rows_added"]


class OfArrays(Op):
    """An operation by a function of arrays that changes none of them.

    Parameters
    ----------
    function : callable
        Of a module, so that compiled functions can be pickled.
    output_type : TensorType
    """

    __props__ = ("function", "output_type")

    def __init__(self, function: Callable[..., Any], output_type: Any) -> None:
        self.function = function
        self.output_type = output_type

    def make_node(self, *inputs: Variable) -> Apply:
        """Return a node with these inputs."""
        return Apply(self, list(inputs), [self.output_type()])

    def perform(self, node: Apply, inputs: list[Any], outputs: list[list[Any]]) -> None:
        """Evaluate it."""
        result = np.asarray(self.function(*inputs), dtype=self.output_type.dtype)
        if any(np.may_share_memory(result, given) for given in inputs):
            result = result.copy()
        outputs[0][0] = result

    def make_thunk(
        self, node: Apply, storage_map: Any, compute_map: Any, no_recycling: Any, impl: Any = None
    ) -> Any:
        """Return a function without arguments that evaluates it: of a ufunc, as quick as can be."""
        is_new = len(node.inputs) > 1 or self.function not in (_sum, _product)
        is_known = isinstance(self.function, np.ufunc) or self.function in WITH_NEW_ARRAYS
        if not (is_known and is_new):
            return super().make_thunk(node, storage_map, compute_map, no_recycling, impl)
        function = self.function
        inputs = [storage_map[variable] for variable in node.inputs]
        [output] = [storage_map[variable] for variable in node.outputs]
        dtype = np.dtype(self.output_type.dtype)

        def thunk() -> None:
            result = function(*[cell[0] for cell in inputs])
            if type(result) is not np.ndarray or result.dtype != dtype:
                result = np.asarray(result, dtype=dtype)
            output[0] = result

        return _as_thunk(thunk, inputs, output, node, compute_map)


class ViewOfArray(Op):
    """An array with new axes of length one, and without some such.

    Parameters
    ----------
    order : tuple of int or "x"
        Axes that stay, and new ones.
    output_type : TensorType
    """

    __props__ = ("order", "output_type")
    view_map = {0: [0]}

    def __init__(self, order: tuple[Any, ...], output_type: Any) -> None:
        self.order = order
        self.output_type = output_type

    def make_node(self, array: Variable) -> Apply:
        """Return a node with this input."""
        return Apply(self, [array], [self.output_type()])

    def perform(self, node: Apply, inputs: list[Any], outputs: list[list[Any]]) -> None:
        """Evaluate it."""
        [array] = inputs
        outputs[0][0] = array[self._index(array.ndim)]

    def make_thunk(
        self, node: Apply, storage_map: Any, compute_map: Any, no_recycling: Any, impl: Any = None
    ) -> Any:
        """Return a function without arguments that evaluates it."""
        inputs = [storage_map[variable] for variable in node.inputs]
        [output] = [storage_map[variable] for variable in node.outputs]
        [array] = inputs
        index = self._index(node.inputs[0].type.ndim)

        def thunk() -> None:
            output[0] = array[0][index]

        return _as_thunk(thunk, inputs, output, node, compute_map)

    def _index(self, ndim: int) -> tuple[Any, ...]:
        """Return the index that does it: new axes stand before the next one that stays."""
        index: list[Any] = []
        for axis in self.order:
            if axis == "x":
                index.append(None)
                continue
            dropped = axis - sum(entry is not None for entry in index)
            index += [0] * dropped + [slice(None)]
        dropped = ndim - sum(entry is not None for entry in index)
        return (*index, *[0] * dropped, ...)


class RowsOfArray(Op):
    """Rows of an array by their numbers: a view where they follow one another.

    As they do in passes over all rows, where copies would take longer than what is made of them.

    Parameters
    ----------
    output_type : TensorType
    """

    __props__ = ("output_type",)
    view_map = {0: [0]}

    def __init__(self, output_type: Any) -> None:
        self.output_type = output_type

    def make_node(self, array: Variable, rows: Variable) -> Apply:
        """Return a node with these inputs."""
        return Apply(self, [array, rows], [self.output_type()])

    def perform(self, node: Apply, inputs: list[Any], outputs: list[list[Any]]) -> None:
        """Evaluate it."""
        array, rows = inputs
        outputs[0][0] = array[_slice_of(rows, len(array))]


def _slice_of(rows: np.ndarray, length: int) -> Any:
    """Return the slice that these rows are, or them."""
    if rows.size == 0 or not 0 <= rows[0] <= rows[-1] < length:
        return rows
    if rows[-1] - rows[0] != rows.size - 1 or (np.diff(rows) != 1).any():
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def _as_thunk(
    thunk: Any, inputs: list[list[Any]], output: list[Any], node: Apply, compute_map: Any
) -> Any:
    """Give a function what PyTensor asks of one that evaluates a node."""
    evaluate = thunk
    if compute_map is not None:
        [is_computed] = [compute_map[variable] for variable in node.outputs]

        def evaluate() -> None:
            thunk()
            is_computed[0] = True

    evaluate.inputs = inputs
    evaluate.outputs = [output]
    evaluate.lazy = False
    return evaluate


def _sum(*terms: np.ndarray) -> np.ndarray:
    return reduce(np.add, terms)


def _product(*factors: np.ndarray) -> np.ndarray:
    return reduce(np.multiply, factors)


def _same(x: np.ndarray) -> np.ndarray:
    """x, which `OfArrays` gives the type of the output."""
    return x


def _second(shape: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.broadcast_to(value, np.broadcast_shapes(np.shape(shape), np.shape(value)))


def _softplus(x: np.ndarray) -> np.ndarray:
    # half of the time of logaddexp, which has no loop of vector instructions
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _log1mexp(x: np.ndarray) -> np.ndarray:
    """log(1 − exp(x)) for negative x, precise near 0 and far from it."""
    return np.where(x > -np.log(2.0), np.log(-np.expm1(x)), np.log1p(-np.exp(x)))


def _trigamma(x: np.ndarray) -> np.ndarray:
    """Second derivative of log Γ, by reflection where x isn't positive."""
    positive = zeta(2, np.where(x > 0, x, 1 - x))
    return np.where(x > 0, positive, (np.pi / np.sin(np.pi * x)) ** 2 - positive)


def taken(arrays: np.ndarray, *indices: np.ndarray) -> np.ndarray:
    """Return entries of the last axes of ``arrays``, by equal indices for all of them."""
    places: Any = (..., *[index.ravel() for index in indices])
    return arrays[places]


def with_rows_added(array: np.ndarray, addends: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return ``array`` with ``addends`` added to its rows, of which some may be the same."""
    is_wide = addends.ndim > 1 and addends.shape == (len(rows), *array.shape[1:]) and addends.size
    if is_wide and rows.min() >= 0 and rows.max() < len(array):
        # a sparse product adds in the same order, in a tenth of the time
        ones = np.ones(len(rows), dtype=addends.dtype)
        starts = np.arange(len(rows) + 1)
        chosen = csc_array((ones, rows, starts), shape=(len(array), len(rows)))
        return array + (chosen @ addends.reshape(len(rows), -1)).reshape(array.shape)
    new = array.copy()
    np.add.at(new, rows, addends)
    return new


WITH_NEW_ARRAYS = (
    _sum,
    _product,
    _softplus,
    _log1mexp,
    _trigamma,
    np.where,
    taken,
    with_rows_added,
)
ELEMENTWISE: dict[type, Callable[..., Any]] = {
    ps.Add: _sum,
    ps.Mul: _product,
    ps.Cast: _same,
    ps.Identity: _same,
    ps.Second: _second,
    ps.Clip: np.clip,
    ps.Switch: np.where,
    Softplus: _softplus,
    Log1mexp: _log1mexp,
    TriGamma: _trigamma,
}
