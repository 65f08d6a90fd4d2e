"""Learning-rate schedules: plain functions from the inner step t = 0, 1, 2, … to η_t.

Needs nothing but the standard library. A schedule counts the inner steps of one chain, tuning
included, so that it needs no horizon.
"""

import hashlib
import math

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

__all__ = [
    "Phase",
    "Schedule",
    "constant",
    "cyclical",
    "cyclical_phases",
    "description",
    "polynomial_decay",
]


class Phase(NamedTuple):
    """What holds for an inner step: a schedule may return it in place of a learning rate.

    Parameters
    ----------
    learning_rate : float
        η, above zero.
    temperature : float, default 1.0
        Relative to the step's own ``temperature``; at 0 no noise is added.
    weight : float, optional
        What the inner step adds to the statistic ``draw_weight``; 0: it explores, and isn't of the
        posterior. Default: η, as in section 4.2 of Welling & Teh (2011).
    cycle : int, default 0
        Number of the cycle, for the statistic ``cycle``.

    Examples
    --------
    A chain that is heated for every other thousand inner steps:

    >>> from pymc_sghmc.schedules import Phase
    >>> def heated(t):
    ...     cycle, place = divmod(t, 2000)
    ...     if place < 1000:
    ...         return Phase(1e-4, temperature=30.0, weight=0.0, cycle=cycle)
    ...     return Phase(1e-4, cycle=cycle)
    >>> heated(2500).temperature, heated(3500).temperature
    (30.0, 1.0)
    """

    learning_rate: float
    temperature: float = 1.0
    weight: float | None = None
    cycle: int = 0


Schedule = Callable[[int], float | Phase]


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


def cyclical_phases(learning_rate: float, period: int, exploration: float) -> Schedule:
    """Schedule of cyclical SGMCMC (Zhang et al. 2020, Algorithm 1): explore, then sample, in each cycle.

    The learning rate is that of `cyclical`. In the first part of each cycle the temperature is 0
    and draws have no weight: long steps and the gradient's own noise take the chain elsewhere. In
    the rest it samples, with weights η_t. Which draws are which, and of which cycle, is in the
    statistics ``draw_weight`` and ``cycle``.

    Parameters
    ----------
    learning_rate : float
        η, the rate at the start of each cycle, above zero.
    period : int
        P, the length of a cycle in inner steps, at least 2; best a multiple of ``n_steps``.
    exploration : float
        Share of each cycle that explores, from 0 to below 1. The paper leaves it to the user (β).

    Returns
    -------
    callable
        ``t -> Phase``.

    Examples
    --------
    >>> from pymc_sghmc.schedules import cyclical_phases
    >>> phase = cyclical_phases(0.1, period=1000, exploration=0.5)
    >>> phase(0)
    Phase(learning_rate=0.1, temperature=0.0, weight=0.0, cycle=0)
    >>> phase(1500)
    Phase(learning_rate=0.05, temperature=1.0, weight=None, cycle=1)
    """
    if not 0 <= exploration < 1:
        raise ValueError(
            f"cyclical_phases(exploration={exploration!r}): must be from 0 to below 1, the share "
            "of each cycle that explores; at 1 nothing would be left to sample."
        )
    return partial(_cyclical_phases, cyclical(learning_rate, period), period, exploration)


# Functions of this module rather than closures, so that steps with schedules can be pickled.


def _constant(learning_rate, t):
    return learning_rate


def _polynomial_decay(a, b, gamma, t):
    return a * (b + t) ** -gamma


def _cyclical(learning_rate, period, t):
    return 0.5 * learning_rate * (1.0 + math.cos(math.pi * (t % period) / period))


def _cyclical_phases(rate, period, exploration, t):
    cycle, place = divmod(t, period)
    if place < exploration * period:
        return Phase(rate(t), temperature=0.0, weight=0.0, cycle=cycle)
    return Phase(rate(t), cycle=cycle)


def description(function) -> str:
    """Say what a function is, the same for the same function in another process; it isn't called."""
    if isinstance(function, partial):
        values = [*function.args, *function.keywords.items()]
        known = [description(value) if callable(value) else repr(value) for value in values]
        return f"{description(function.func)}({', '.join(known)})"
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if code is None:
        return name
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    plain = [x for x in (*code.co_consts, *held) if isinstance(x, bool | int | float | str)]
    return f"{name} {hashlib.blake2b(code.co_code, digest_size=4).hexdigest()} {plain}"
