"""The logarithm of a scale that comes to nothing in floating-point numbers, such as exp(−800).

Knows graphs; no effects and no model.
"""

from collections.abc import Callable

import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from pytensor.tensor.basic import Alloc, Join, MakeVector
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Reshape
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.variable import TensorVariable

__all__ = ["log_of"]


def log_of(x: TensorVariable) -> TensorVariable:
    """Write log |x| of a product as a sum of its factors' logarithms, and that of exp(q) as q.

    The spectral density of a smooth Gaussian process, η² c exp(−½ω²ℓ²), is below the least number
    above zero at high frequencies ω; its logarithm is −½ω²ℓ² + 2 log η + log c.
    """
    node = x.owner
    if node is None:
        return _log(x)
    first, *others = node.inputs
    if isinstance(node.op, MOVES):
        found = node.op(log_of(first), *others)
    elif isinstance(node.op, Join):  # whose first input is the axis before PyTensor 3
        found = node.op(*(log_of(v) if v.type.ndim else v for v in node.inputs))
    elif isinstance(node.op, MakeVector):
        found = pt.stack([log_of(v) for v in node.inputs])
    elif node.op in LOGARITHMS:
        found = LOGARITHMS[node.op](first)
    elif node.op == pt.mul:
        found = pt.add(*map(log_of, node.inputs))
    elif node.op == pt.true_div:
        found = log_of(first) - log_of(others[0])
    elif node.op == pt.pow:
        found = others[0] * log_of(first)
    else:
        found = _log(x)
    return found


def _log(x: TensorVariable) -> TensorVariable:
    # PyTensor keeps a number such as 3.0 in single precision, its logarithm would be, too
    return pt.log(pt.abs(x.astype("float64")))


MOVES = (Alloc, DimShuffle, Reshape, Subtensor)  # entries of their first input
LOGARITHMS: dict[object, Callable[[Variable], TensorVariable]] = {
    pt.exp: lambda q: q,
    pt.sqrt: lambda x: 0.5 * log_of(x),
    pt.square: lambda x: 2.0 * log_of(x),
    pt.reciprocal: lambda x: -log_of(x),
    pt.abs: log_of,
}
