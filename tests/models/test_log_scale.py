"""Logarithms of products are those of their values, and finite where the values come to zero."""

import numpy as np
import pytensor.tensor as pt
import pytest

from pymc_sghmc.hierarchy.log_scale import log_of

Q = np.array([-0.7, 0.3, 2.0])
SCALES = {
    "product": lambda q: pt.exp(q) * pt.square(q) * 3.0,
    "quotient": lambda q: pt.exp(q) / pt.sqrt(1 + q**2),
    "power": lambda q: (1 + q**2) ** -2.5,
    "even power": lambda q: q**4,
    "axes": lambda q: pt.sqrt(pt.exp(q)[:, None] * pt.exp(-q)[None])[0],
    "sum": lambda q: pt.exp(q) + pt.exp(-q),
    "reciprocal": lambda q: pt.reciprocal(pt.abs(pt.exp(q))),
    "joined": lambda q: pt.concatenate([pt.exp(q), pt.square(q)]),
    "columns": lambda q: pt.stack([pt.exp(q), pt.square(q)], axis=1),
    "single numbers": lambda q: pt.stack([pt.exp(q[0]), pt.square(q[1])]),
    "entries": lambda q: pt.exp(q)[1:].reshape((2, 1)),
    "repeated": lambda q: pt.alloc(pt.exp(q[2]), 4),
}


@pytest.mark.parametrize("write", SCALES.values(), ids=SCALES)
def test_logarithm_is_that_of_the_value(write):
    scale = write(pt.constant(Q))
    np.testing.assert_allclose(log_of(scale).eval(), np.log(scale.eval()), rtol=1e-12, atol=1e-14)


def test_logarithm_is_known_where_the_value_comes_to_zero():
    q = pt.constant(1e4 * Q)
    of_process = pt.sqrt(4.0 * pt.exp(-pt.square(q)))
    log_of_process = np.log(2.0) - 5e7 * Q**2
    of_two = pt.stack([of_process, of_process[::-1]], axis=1)
    log_of_two = np.stack([log_of_process, log_of_process[::-1]], axis=1)
    for scale, logarithm in ((of_process, log_of_process), (of_two, log_of_two)):
        assert not scale.eval().any()
        np.testing.assert_allclose(log_of(scale).eval(), logarithm, rtol=1e-12)
