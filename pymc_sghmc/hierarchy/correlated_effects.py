"""Coefficients of a group whose prior is N(μ, CCᵀ), given rows that say something of each alone.

u = μ + Cv. Given C and a Gaussian likelihood of precision diag(h) and h times its mean b, v has the
precision A = 1 + Cᵀdiag(h)C = RRᵀ, R upper triangular, and v = A⁻¹Cᵀf + R⁻ᵀs with f = b − hμ and s
~ N(0, 1). Of PyTensor's own operations the graph of that has hundreds, which take a minute to
compile. Here are operations that are loops over groups, whose machine code is stored. Knows graphs
and Numba, no effects and no models.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Self

import numpy as np
import pytensor.tensor as pt

from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Variable

from pymc_sghmc.compat import ArrayOperation
from pymc_sghmc.loops.machine_code import version_of

__all__ = ["Coefficients", "StandardCoefficients", "Unmixed"]

LOOPS = "pymc_sghmc.hierarchy.group_loops"


class _LoopOverGroups(ArrayOperation):
    """An operation on arrays of floating-point numbers of one dtype."""

    __props__ = ()
    gufunc_signature: str  # by which PyTensor writes it for many positions
    loop: str  # of the module of loops
    like: Sequence[int]  # for each output the input whose shape it has, ...
    vectors: Sequence[int] = ()  # ... or, for these, whose first axis

    def __new__(cls) -> Self:
        """Let Numba know it before there is any, also in another process."""
        _add_to_numba()
        return super().__new__(cls)

    def make_node(self, *inputs: Any) -> Apply:
        """Return a node with these inputs."""
        first, *others = map(pt.as_tensor_variable, inputs)
        variables = [first, *[other.astype(first.dtype) for other in others]]
        shapes = self.shapes_of_outputs([variable.type.shape for variable in variables])
        return Apply(self, variables, [pt.TensorType(first.dtype, shape)() for shape in shapes])

    def perform(self, node: Apply, inputs: list[Any], outputs: list[list[Any]]) -> None:
        """Evaluate it."""
        values = self.compiled(*map(np.ascontiguousarray, inputs))
        for output, value in zip(outputs, values if len(outputs) > 1 else [values], strict=True):
            output[0] = value

    def shapes_of_outputs(self, shapes: Sequence[Any]) -> list[Any]:
        """Return the shapes of the outputs, given those of the inputs."""
        found = [shapes[place] for place in self.like]
        return [s[:1] if number in self.vectors else s for number, s in enumerate(found)]

    @property
    def compiled(self) -> Any:
        """Machine code of the loop."""
        return getattr(import_module(LOOPS), self.loop)


class Coefficients(_LoopOverGroups):
    """v, Cv and the log-determinant of v by s, of s (G, n), C (n, n), h and f (G, n)."""

    gufunc_signature = "(g,n),(n,n),(g,n),(g,n)->(g,n),(g,n),(g)"
    loop = "coefficients"
    like = (0, 0, 0)
    vectors = (2,)

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], slopes: Sequence[Variable]
    ) -> list[Variable]:
        """Return the gradient by the inputs."""
        known = [
            pt.zeros_like(output) if isinstance(slope.type, DisconnectedType) else slope
            for output, slope in zip(outputs, slopes, strict=True)
        ]
        found: list[Variable] = _SlopesOfCoefficients()(outputs[0], *inputs[1:], *known)
        return found


class _SlopesOfCoefficients(_LoopOverGroups):
    """The gradient by inputs of `Coefficients`, of v, C, h, f and the gradient by its outputs."""

    gufunc_signature = "(g,n),(n,n),(g,n),(g,n),(g,n),(g,n),(g)->(g,n),(n,n),(g,n),(g,n)"
    loop = "slopes_of_coefficients"
    like = (0, 1, 0, 0)


class StandardCoefficients(_LoopOverGroups):
    """s of v (G, n), C (n, n), h and f (G, n): the reverse. Has no gradient."""

    gufunc_signature = "(g,n),(n,n),(g,n),(g,n)->(g,n)"
    loop = "standard_coefficients"
    like = (0,)


class Unmixed(_LoopOverGroups):
    """C⁻¹x of x (G, n) and C (n, n)."""

    gufunc_signature = "(g,n),(n,n)->(g,n)"
    loop = "unmixed"
    like = (0,)

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], slopes: Sequence[Variable]
    ) -> list[Variable]:
        """Return the gradient by the inputs."""
        found: list[Variable] = _SlopesOfUnmixed()(outputs[0], inputs[1], slopes[0])
        return found


class _SlopesOfUnmixed(_LoopOverGroups):
    """The gradient by inputs of `Unmixed`, of v = C⁻¹x, C and the gradient by v."""

    gufunc_signature = "(g,n),(n,n),(g,n)->(g,n),(n,n)"
    loop = "slopes_of_unmixed"
    like = (0, 1)


@cache
def _add_to_numba() -> None:
    """Tell PyTensor how Numba compiles them."""
    from pytensor.link.numba.dispatch import basic

    @basic.register_funcify_and_cache_key(_LoopOverGroups)  # type: ignore[untyped-decorator]
    def with_stored_loop(op: Any, node: Apply, **kwargs: Any) -> tuple[Any, str]:
        return op.compiled, f"{op.loop} {version_of(op.compiled.py_func)}"
