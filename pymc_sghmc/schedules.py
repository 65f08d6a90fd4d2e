"""Learning-rate schedules: plain functions from the inner step t = 0, 1, 2, … to η_t.

Needs nothing but the standard library. A schedule counts the inner steps of one chain, tuning
included, so that it needs no horizon.
"""

import math

from collections.abc import Callable
from functools import partial

__all__ = ["Schedule", "constant", "cyclical", "polynomial_decay"]

Schedule = Callable[[int], float]


def _positive(name: str, **values: float) -> None:
    for argument, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}({argument}={value!r}): must be a finite number above zero.")


def constant(learning_rate: float) -> Schedule:
    """Schedule η_t = η.

    Parameters
    ----------
    learning_rate : float
        η, above zero.

    Returns
    -------
    callable
        ``t -> η``.

    Examples
    --------
    >>> from pymc_sghmc.schedules import constant
    >>> constant(1e-4)(1000)
    0.0001
    """
    _positive("constant", learning_rate=learning_rate)
    return partial(_constant, learning_rate)


def polynomial_decay(a: float, b: float = 1.0, gamma: float = 0.55) -> Schedule:
    """Schedule η_t = a (b + t)^(−γ) of Welling & Teh (2011), section 2.

    For γ in (½, 1] the rates sum to infinity and their squares don't, so that the bias of the
    step vanishes in the limit. Draws then carry weights proportional to η_t (their section 4.2):
    the statistic ``draw_weight``.

    Parameters
    ----------
    a : float
        Scale, above zero: η_0 = a b^(−γ).
    b : float, default 1.0
        Offset in inner steps, above zero: the rate stays near η_0 for about b steps.
    gamma : float, default 0.55
        Exponent γ in (½, 1]. The default is the one that Welling & Teh use.

    Returns
    -------
    callable
        ``t -> η_t``.

    Examples
    --------
    >>> from pymc_sghmc.schedules import polynomial_decay
    >>> eta = polynomial_decay(a=0.01, b=100.0, gamma=1.0)
    >>> round(eta(0), 12), round(eta(100), 12)
    (0.0001, 5e-05)
    """
    _positive("polynomial_decay", a=a, b=b)
    if not 0.5 < gamma <= 1:
        raise ValueError(
            f"polynomial_decay(gamma={gamma!r}): must lie in (1/2, 1]. Outside, the rates either "
            "don't reach the whole posterior or don't lose their bias (Welling & Teh 2011)."
        )
    return partial(_polynomial_decay, a, b, gamma)


def cyclical(learning_rate: float, period: int) -> Schedule:
    """Schedule η_t = ½ η (1 + cos(π (t mod P) / P)) of Zhang et al. (2020), equation 1.

    Each cycle of P steps starts with a long step that leaves the present mode and ends with
    short ones that sample the next.

    Parameters
    ----------
    learning_rate : float
        η, the rate at the start of each cycle, above zero.
    period : int
        P, the length of a cycle in inner steps, at least 2.

    Returns
    -------
    callable
        ``t -> η_t``, always above zero.

    Examples
    --------
    >>> from pymc_sghmc.schedules import cyclical
    >>> eta = cyclical(0.1, period=1000)
    >>> eta(0), round(eta(500), 12), eta(1000)
    (0.1, 0.05, 0.1)
    """
    _positive("cyclical", learning_rate=learning_rate)
    if period < 2:
        raise ValueError(f"cyclical(period={period!r}): a cycle needs at least 2 inner steps.")
    return partial(_cyclical, learning_rate, period)


# Functions of this module rather than closures, so that steps with schedules can be pickled.


def _constant(learning_rate, t):
    return learning_rate


def _polynomial_decay(a, b, gamma, t):
    return a * (b + t) ** -gamma


def _cyclical(learning_rate, period, t):
    return 0.5 * learning_rate * (1.0 + math.cos(math.pi * (t % period) / period))
