"""A function that is called with many values of one input and the same values of all others.

What doesn't depend on that input is computed once. Knows graphs; no model, no steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.type import TensorType

from pymc_sghmc.compat import toposort
from pymc_sghmc.models.graphs import substituted
from pymc_sghmc.protocols import Array

__all__ = ["StagedFunction"]

Compile = Callable[[Sequence[Variable], Sequence[Variable]], Callable[..., list[Array]]]


class StagedFunction:
    """f(x; others), in two stages.

    Parameters
    ----------
    varying : TensorVariable
        x, which has many values.
    others : sequence of TensorVariable
        Inputs that stay the same.
    outputs : sequence of TensorVariable
    compile : callable
        From inputs and outputs to a function.
    """

    def __init__(
        self,
        varying: Variable,
        others: Sequence[Variable],
        outputs: Sequence[Variable],
        compile: Compile,
    ) -> None:
        fixed = _fixed_parts(varying, outputs)
        self._others = [i for i, other in enumerate(others) if other in fixed]
        computed = [part for part in fixed if part not in others]
        given = [others[i] for i in self._others]
        symbols = [part.type() for part in (*given, *computed)]
        replacements = dict(zip((*given, *computed), symbols, strict=True))
        self._first = compile(others, computed)
        self._second = compile([varying, *symbols], substituted(outputs, replacements))

    def at(self, *others: Any) -> Callable[[Array], list[Array]]:
        """Return f at these values of the other inputs."""
        fixed = [*(others[i] for i in self._others), *self._first(*others)]
        return lambda x: self._second(x, *fixed)


def _fixed_parts(varying: Variable, outputs: Sequence[Variable]) -> list[Variable]:
    """Return what doesn't depend on x and is an output, or an input of operations that do.

    Arrays alone: what else there is, such as a slice, is computed from them again.
    """
    nodes = toposort(outputs, [])
    depends = {varying}
    for node in nodes:
        if not depends.isdisjoint(node.inputs):
            depends.update(node.outputs)
    fixed: dict[Variable, None] = {}
    left = list(outputs)
    left += [v for node in nodes if not depends.isdisjoint(node.outputs) for v in node.inputs]
    while left:
        v = left.pop()
        if v in depends or isinstance(v, Constant):
            continue
        if isinstance(v.type, TensorType) or v.owner is None:
            fixed[v] = None
        else:
            left += v.owner.inputs
    return list(fixed)
