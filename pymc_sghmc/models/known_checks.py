"""PyMC's checks of a density's parameters, without those that hold whatever the parameters are.

A Bernoulli distribution checks for each row that 0 ≤ p ≤ 1, also where p is a sigmoid. In a pass
over rows this takes as long as the density itself. Knows graphs alone.
"""

import math

from collections.abc import Iterator, Sequence

import numpy as np
import pytensor.tensor as pt

from pymc.logprob.utils import CheckParameterValue
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.scalar.basic import GE, GT, LE, LT, Abs, Cast, Exp, Mul, Sqr, Sub
from pytensor.scalar.math import Erfc, Sigmoid
from pytensor.tensor.basic import MakeVector, ScalarFromTensor
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import All, Sum
from pytensor.tensor.shape import Reshape
from pytensor.tensor.special import Softmax
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.compat import ancestors, toposort
from pymc_sghmc.models.graphs import array_of, is_fixed, substituted

__all__ = ["without_known_checks"]

Range = tuple[float, float]
EVERYTHING = (-math.inf, math.inf)
OF_FUNCTIONS: dict[type, Range] = {
    Abs: (0.0, math.inf),
    Erfc: (0.0, 2.0),
    Exp: (0.0, math.inf),
    Sigmoid: (0.0, 1.0),
    Sqr: (0.0, math.inf),
}


def without_known_checks(terms: Sequence[TensorVariable]) -> list[TensorVariable]:
    """Write graphs without conditions that hold for all values of the parameters.

    Where a parameter is NaN, the graph is NaN then, and no longer −∞.
    """
    simpler = {}
    for node in toposort(terms, []):
        if not isinstance(node.op, CheckParameterValue):
            continue
        value, *checked = node.inputs
        conditions = [leaf for condition in checked for leaf in _leaves(condition)]
        unknown = [condition for condition in conditions if not _holds(condition)]
        if not unknown:
            simpler[node.outputs[0]] = value
        elif len(unknown) < len(conditions):
            simpler[node.outputs[0]] = node.op(value, pt.all([pt.all(one) for one in unknown]))
    return substituted(terms, simpler) if simpler else list(terms)


def _leaves(condition: Variable) -> Iterator[Variable]:
    """Conditions of which one is made, all of which have to hold."""
    node = condition.owner
    if node is not None and isinstance(node.op, All | MakeVector | ScalarFromTensor):
        for one in node.inputs:
            yield from _leaves(one)
    else:
        yield condition


def _holds(condition: Variable) -> bool:
    """Whether a condition is known to hold."""
    if isinstance(condition, Constant):
        return bool(np.all(condition.data))
    compared = getattr(condition.owner.op, "scalar_op", None) if condition.owner else None
    if isinstance(compared, GE | GT | LE | LT):
        left, right = map(_range, condition.owner.inputs)
        if isinstance(compared, LE | LT):
            left, right = right, left
        is_strict = isinstance(compared, GT | LT)
        return left[0] > right[1] if is_strict else left[0] >= right[1]
    return _holds_of_sums(condition)


def _holds_of_sums(condition: Variable) -> bool:
    """Whether a condition holds as probabilities of a softmax sum to one."""
    ones = {
        variable: pt.ones((1,) * variable.type.ndim, dtype=variable.dtype)
        for variable in ancestors([condition])
        if variable.owner is not None and _is_sum_of_softmax(variable.owner)
    }
    if not ones:
        return False
    [of_ones] = substituted([condition], ones)
    return is_fixed(of_ones) and bool(np.all(array_of(of_ones)))


def _is_sum_of_softmax(node: Apply) -> bool:
    summed = node.inputs[0].owner
    if not isinstance(node.op, Sum) or summed is None or not isinstance(summed.op, Softmax):
        return False
    ndim = node.inputs[0].type.ndim
    return _axes(node.op.axis, ndim) == _axes(summed.op.axis, ndim)


def _axes(axis: int | Sequence[int] | None, ndim: int) -> set[int]:
    if axis is None:
        return set(range(ndim))
    axes = [axis] if isinstance(axis, int) else axis
    return {one % ndim for one in axes}


def _range(variable: Variable) -> Range:
    """Between which numbers all entries lie."""
    if isinstance(variable, Constant):
        array = np.asarray(variable.data)
        is_known = array.size and not np.isnan(array).any()
        return (float(array.min()), float(array.max())) if is_known else EVERYTHING
    node = variable.owner
    if node is None:
        return EVERYTHING
    if isinstance(node.op, Softmax):
        return (0.0, 1.0)
    if isinstance(node.op, DimShuffle | Reshape | Subtensor):
        return _range(node.inputs[0])
    return _range_of_function(node) if isinstance(node.op, Elemwise) else EVERYTHING


def _range_of_function(node: Apply) -> Range:
    function = node.op.scalar_op
    if type(function) in OF_FUNCTIONS:
        return OF_FUNCTIONS[type(function)]
    ranges = [_range(variable) for variable in node.inputs]
    if isinstance(function, Sub):
        (low, high), (least, most) = ranges
        return low - most, high - least
    if isinstance(function, Mul) and all(low >= 0 for low, _ in ranges):
        if all(math.isfinite(high) for _, high in ranges):
            return math.prod(low for low, _ in ranges), math.prod(high for _, high in ranges)
        return (0.0, math.inf)
    if isinstance(function, Cast) and node.outputs[0].type.dtype.startswith("float"):
        return ranges[0]
    return EVERYTHING
