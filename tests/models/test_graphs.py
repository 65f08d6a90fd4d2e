"""Other variables in the places of some, and the parts of a vector."""

import numpy as np
import pytensor.tensor as pt

from modes import FAST
from pymc.pytensorf import compile

from pymc_sghmc.models.graphs import parts_of_vector, substituted


def test_variables_change_places_at_once():
    x, y = pt.vectors("x", "y")
    outputs = substituted([x - 2 * y, x, pt.exp(y)], {x: y, y: x})
    found = compile([x, y], outputs, **FAST)(np.ones(2), np.full(2, 3.0))
    for value, expected in zip(found, (1.0, 3.0, np.e), strict=True):
        np.testing.assert_allclose(value, np.full(2, expected))


def test_what_stays_is_shared_and_the_old_graph_kept():
    x, y = pt.vectors("x", "y")
    both = pt.exp(x) + pt.sqrt(y)
    [new] = substituted([both], {x: 2 * y})
    assert new.owner.inputs[1] is both.owner.inputs[1]
    assert both.owner.inputs[0].owner.inputs[0] is x


def test_what_is_inside_a_replaced_graph_stays_out():
    x, y = pt.vectors("x", "y")
    inner = pt.exp(x)
    [new] = substituted([inner + y], {inner: y, x: 3 * y})
    assert set(new.owner.inputs) == {y}


def test_lengths_are_known_where_the_new_variable_has_them():
    n, z = pt.lscalar("n"), pt.vector("z")
    [new] = substituted([pt.zeros(n) + z], {n: pt.constant(3), z: pt.vector("w", shape=(3,))})
    assert new.type.shape == (3,)


def test_parts_of_a_vector_have_shapes_and_types():
    a, b = pt.matrix("a"), pt.fscalar("b")
    vector = pt.vector("vector")
    parts = parts_of_vector(vector, [a, b], {"a": np.zeros((2, 2)), "b": np.zeros(())})
    found = compile([vector], list(parts.values()), **FAST)(np.arange(5.0))
    np.testing.assert_array_equal(found[0], [[0, 1], [2, 3]])
    assert found[1] == 4
    assert found[1].dtype == "float32"
