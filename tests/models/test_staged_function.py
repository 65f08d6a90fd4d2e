"""Functions in two stages say what they say in one, and compute once what stays the same."""

import numpy as np
import pytensor.tensor as pt
import pytest

from pymc.pytensorf import compile
from pytensor.graph.op import Op

from pymc_sghmc.models.staged_function import StagedFunction

RNG = np.random.default_rng(0)
VALUES = {
    "x": RNG.normal(size=(3, 2)),
    "b": RNG.normal(size=4),
    "table": RNG.normal(size=(6, 4)),
    "rows": np.array([5, 0, 2]),
    "n": np.array(2),
}
SYMBOLS = {
    name: pt.as_tensor(value).type(name) if name != "x" else pt.matrix("x", shape=(None, 2))
    for name, value in VALUES.items()
}


def predictor(x, b, table, rows, n):
    return [pt.exp(x[:, 0]) * (table[rows] @ b) + x.sum(axis=1)]


def also_what_does_not_vary(x, b, table, rows, n):
    return [x * b[:2], table @ b, b, pt.constant([1.0, 2.0])]


def slices_and_shapes(x, b, table, rows, n):
    return [x[:n] * b[n], pt.zeros(table.shape[0] - n) + x[0, 0], x.shape[0] * table[:n]]


def nothing_that_stays(x, b, table, rows, n):
    return [pt.square(x)]


GRAPHS = [predictor, also_what_does_not_vary, slices_and_shapes, nothing_that_stays]


def compiled(inputs, outputs):
    return compile(inputs, outputs, mode="FAST_COMPILE", on_unused_input="ignore")


@pytest.mark.parametrize("write", GRAPHS)
def test_stages_say_what_the_whole_says(write):
    outputs = write(**SYMBOLS)
    whole = compiled(list(SYMBOLS.values()), outputs)
    x, *others = SYMBOLS.values()
    first, *fixed = VALUES.values()
    at = StagedFunction(x, others, outputs, compiled).at(*fixed)
    for value in (first, -3 * first):
        for found, expected in zip(at(value), whole(value, *fixed), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-14)


class Counted(Op):
    """2 b, which counts how often it is computed."""

    itypes = (pt.dvector,)
    otypes = (pt.dvector,)
    n_calls = 0

    def perform(self, node, inputs, outputs):
        self.n_calls += 1
        outputs[0][0] = 2 * inputs[0]


def test_what_stays_the_same_is_computed_once():
    counted = Counted()
    x, b = SYMBOLS["x"], SYMBOLS["b"]
    at = StagedFunction(x, [b], [x.sum() * counted(b)], compiled).at(VALUES["b"])
    found = [at(VALUES["x"] + i)[0] for i in range(5)]
    assert counted.n_calls == 1
    expected = [(VALUES["x"] + i).sum() * 2 * VALUES["b"] for i in range(5)]
    np.testing.assert_allclose(found, expected, rtol=1e-14)
