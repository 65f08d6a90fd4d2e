"""Coordinates in which a Student t distribution is about N(0, 1).

A chain with one step size for all places comes back slowly from the far tail of a t distribution,
where the force falls with the distance. In x with t = S(x), the inverse of Wallace's (1959) normal
approximation to t, there is no such tail:

    t² = ν (exp(c²x²/ν) − 1),    c = (8ν + 3)/(8ν + 1).

Beside Gaussian rows of r times the prior's precision the tail is cut off, and ν(1 + 10r) in the
place of ν leaves the least force that a Gaussian doesn't have: below 0.1 standard deviations on
average for ν from 3 to 7 and any r. Knows graphs, no effects and no models.
"""

from typing import Any, NamedTuple

import pytensor.tensor as pt

__all__ = ["Stretched", "shrunk", "stretched", "tail"]

CUT = 10.0  # times r: how fast rows cut off the tail of a prior
SMALL = 1e-4  # below which a series is taken for a ratio of two small numbers


class Stretched(NamedTuple):
    """S(x), and the logarithm of its slope."""

    value: Any
    log_slope: Any


def tail(freedom: Any, ratio: Any) -> Any:
    """Return 1/ν of the tail that rows leave of a prior's.

    Parameters
    ----------
    freedom : TensorVariable
        Degrees of freedom of the prior.
    ratio : TensorVariable
        r, precision of the rows in the prior's.
    """
    return 1 / (freedom * (1 + CUT * ratio))


def stretched(x: Any, of_tail: Any) -> Stretched:
    """Return S(x) for 1/ν; x itself where that is 0."""
    c = (8 + 3 * of_tail) / (8 + of_tail)
    q = of_tail * pt.square(c * x)
    some = pt.maximum(q, SMALL)
    log_ratio = pt.log(pt.switch(q < SMALL, 1 + q / 2 + q**2 / 6, pt.expm1(some) / some))
    return Stretched(c * x * pt.exp(0.5 * log_ratio), pt.log(c) + q - 0.5 * log_ratio)


def shrunk(t: Any, of_tail: Any) -> Any:
    """Return x of S(x), the reverse."""
    c = (8 + 3 * of_tail) / (8 + of_tail)
    p = of_tail * pt.square(t)
    some = pt.maximum(p, SMALL)
    ratio = pt.switch(p < SMALL, 1 - p / 2 + p**2 / 3, pt.log1p(some) / some)
    return t / c * pt.sqrt(ratio)
