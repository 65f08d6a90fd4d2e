"""Probabilities 1 − Φ(x) of probit models, which rounding takes to zero.

With `pm.math.invprobit` PyMC computes 1 − Φ(x) for all rows, also for those that only need Φ(x).
From x = 8.3 on it is 0, and the gradient of its logarithm NaN. As Φ(−x) it is right up to x = 38.
Knows graphs alone.
"""

from collections.abc import Sequence

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Constant
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.compat import toposort
from pymc_sghmc.models.graphs import substituted

__all__ = ["with_upper_tails"]


def with_upper_tails(terms: Sequence[TensorVariable]) -> list[TensorVariable]:
    """Write graphs with Φ(−x) in the place of 1 − Φ(x)."""
    tails = {}
    for node in toposort(terms, []):
        tail = _upper_tail(node)
        if tail is not None:
            tails[node.outputs[0]] = tail
    return substituted(terms, tails) if tails else list(terms)


def _upper_tail(node: Apply) -> TensorVariable | None:
    """Return what a node computes if that is 1 − erfc(z)/2, or log1p of −erfc(z)/2."""
    if node.op == pt.sub and _number(node.inputs[0]) == 1.0:
        return _other_half(node.inputs[1])
    if node.op == pt.log1p and node.inputs[0].owner is not None:
        negative = node.inputs[0].owner
        if negative.op == pt.neg:
            half = _other_half(negative.inputs[0])
            return None if half is None else pt.log(half)
    return None


def _other_half(variable: TensorVariable) -> TensorVariable | None:
    """Return erfc(−z)/2 for erfc(z)/2; None for anything else."""
    node = variable.owner
    if node is None or node.op != pt.mul or len(node.inputs) != 2:
        return None
    for half, erfc in (node.inputs, node.inputs[::-1]):
        if _number(half) == 0.5 and erfc.owner is not None and erfc.owner.op == pt.erfc:
            return half * pt.erfc(-erfc.owner.inputs[0])
    return None


def _number(variable: TensorVariable) -> float | None:
    """Return the only number of a constant, or None."""
    while variable.owner is not None and isinstance(variable.owner.op, DimShuffle):
        variable = variable.owner.inputs[0]
    is_number = isinstance(variable, Constant) and np.size(variable.data) == 1
    return float(np.squeeze(variable.data)) if is_number else None
