"""Functions of one vector compiled for many vectors at a time, which then read the rows once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.replace import vectorize_graph

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.protocols import Array

__all__ = ["at_positions"]


def at_positions(
    density: LogDensity,
    outputs: Sequence[pt.TensorVariable],
    vector: pt.TensorVariable,
    inputs: Sequence[pt.TensorVariable],
) -> Callable[..., list[Array]]:
    """Compile f(vectors (P, d), *inputs), each of whose outputs has a leading axis of P.

    Parameters
    ----------
    density : LogDensity
        With its graph.
    outputs : list of TensorVariable
    vector : TensorVariable
        Of which there are many.
    inputs : list of TensorVariable
        That are the same for all of them; the data and the density's other inputs come after them.
    """
    graph = density.graph
    others = [*inputs, *graph.arrays, *graph.given]
    vectors = pt.matrix("vectors", dtype=vector.dtype)
    many = []
    try:
        for output in outputs:
            new = vectorize_graph(output, {vector: vectors})
            if new.ndim == output.ndim:  # it doesn't depend on the vector
                new = pt.broadcast_to(new, (vectors.shape[0], *new.shape))
            many.append(new)
        return density.compiled([vectors, *others], many)
    except (TypeError, ValueError, NotImplementedError):  # an operation that has no such form
        return _OneByOne(density.compiled([vector, *others], outputs))


class _OneByOne:
    """A function of a vector, for many of them."""

    def __init__(self, function: Callable[..., list[Array]]) -> None:
        self.function = function

    def __call__(self, vectors: Array, *others: Any) -> list[Array]:
        values = [self.function(vector, *others) for vector in vectors]
        return [np.array(of_one_output) for of_one_output in zip(*values, strict=True)]
