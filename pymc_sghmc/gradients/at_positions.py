"""Functions of a position compiled for many positions at a time, which then read the rows once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.replace import vectorize_graph

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.protocols import Array

__all__ = ["at_positions", "at_positions_one_by_one"]


def at_positions(
    density: LogDensity,
    outputs: Sequence[pt.TensorVariable],
    vectors: Sequence[pt.TensorVariable],
    inputs: Sequence[pt.TensorVariable],
) -> Callable[..., list[Array]]:
    """Compile f(*vectors, *inputs), each of whose outputs has a leading axis of P.

    One call takes all positions, where the graph can be written for them.

    Parameters
    ----------
    density : LogDensity
        With its graph.
    outputs : list of TensorVariable
    vectors : list of TensorVariable
        Of each of which there are P, (P, d).
    inputs : list of TensorVariable
        That are the same for all of them; the data and the density's other inputs come after them.
    """
    graph = density.graph
    others = [*inputs, *graph.arrays, *graph.given]
    of_many = {vector: pt.matrix(vector.name, dtype=vector.dtype) for vector in vectors}
    first, *_ = of_many.values()
    many = []
    try:
        for output in outputs:
            new = vectorize_graph(output, of_many)
            if new.ndim == output.ndim:  # it doesn't depend on the vectors
                new = pt.broadcast_to(new, (first.shape[0], *new.shape))
            many.append(new)
        return density.compiled([*of_many.values(), *others], many)
    except (TypeError, ValueError, NotImplementedError):  # an operation that has no such form
        return at_positions_one_by_one(density, outputs, vectors, inputs)


def at_positions_one_by_one(
    density: LogDensity,
    outputs: Sequence[pt.TensorVariable],
    vectors: Sequence[pt.TensorVariable],
    inputs: Sequence[pt.TensorVariable],
) -> Callable[..., list[Array]]:
    """Compile the same, with a call of the compiled function for each position."""
    graph = density.graph
    others = [*inputs, *graph.arrays, *graph.given]
    return _OneByOne(density.compiled([*vectors, *others], outputs), len(vectors))


class _OneByOne:
    """A function of some vectors and other inputs, for many of these vectors."""

    def __init__(self, function: Callable[..., list[Array]], n_vectors: int) -> None:
        self.function = function
        self.n_vectors = n_vectors

    def __call__(self, *inputs: Any) -> list[Array]:
        vectors = inputs[: self.n_vectors]
        others = inputs[self.n_vectors :]
        values = [self.function(*one, *others) for one in zip(*vectors, strict=True)]
        return [np.array(of_one_output) for of_one_output in zip(*values, strict=True)]
