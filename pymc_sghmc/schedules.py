"""Learning-rate schedules: functions from an inner step t = 0, 1, 2, … to its learning rate η_t.

A schedule is passed as ``learning_rate``, in place of a number. It counts the inner steps of one
chain, including those of tuning draws: draw number i, from 0, begins at t = i · ``n_steps``. Any
function of t serves as a schedule; those here are ready-made.
"""

import hashlib
import math

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

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
    """Settings of one inner step, which a schedule may return in place of a learning rate.

    Parameters
    ----------
    learning_rate : float
        η, above zero.
    temperature : float, default 1.0
        Factor of the step's own ``temperature``. At 0 no noise is added, and the chain moves
        towards a mode.
    weight : float, optional
        What the inner step adds to the statistic ``draw_weight``, the weight of a draw in averages.
        Zero marks steps that explore and must not count. Default: η, as in section 4.2 of Welling &
        Teh (2011), because a longer step moves the chain further.
    cycle : int, default 0
        Number of the cycle, for the statistic ``cycle``.

    Examples
    --------
    A chain that is heated for every other thousand inner steps:

    >>> from pymc_sghmc.schedules import Phase
    >>> def heated(t):
    ...     cycle, t_in_cycle = divmod(t, 2000)
    ...     if t_in_cycle < 1000:
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
    """Schedule η_t = η, the same at every inner step.

    Parameters
    ----------
    learning_rate : float
        η, above zero, in units of squared parameters on PyMC's unconstrained scale.

    Returns
    -------
    callable
        ``t -> η``.

    Raises
    ------
    ValueError
        If the argument is out of range.

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

    The steps of a chain become shorter, so that its bias vanishes in the limit. For that, the rates
    must have an infinite sum and their squares a finite one, which is the case for γ in (1/2, 1].
    Since later draws move less, averages over draws need weights proportional to η_t (section 4.2
    of the paper). These are in the statistic ``draw_weight``.

    Parameters
    ----------
    a : float
        Scale, above zero. The first rate is η_0 = a b^(−γ).
    b : float, default 1.0
        Offset in inner steps, above zero. The rate stays near η_0 for about b steps. With the
        default it begins to fall at once.
    gamma : float, default 0.55
        Exponent γ in (1/2, 1]. The default is the one that Welling & Teh use.

    Returns
    -------
    callable
        ``t -> η_t``.

    Raises
    ------
    ValueError
        If an argument is out of range.

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
            f"polynomial_decay(gamma={gamma!r}): must lie in (1/2, 1]. Above 1, the chain stops "
            "before it has seen the whole posterior; at 1/2 or below, its bias may not vanish "
            "(Welling & Teh 2011)."
        )
    return partial(_polynomial_decay, a, b, gamma)


def cyclical(learning_rate: float, period: int) -> Schedule:
    """Schedule η_t = ½ η (1 + cos(π (t mod P) / P)) of Zhang et al. (2020), equation 1.

    It is for posteriors with several modes. Each cycle of P inner steps begins with long steps,
    which can leave the present mode, and ends with short ones, which sample the mode that the chain
    is in.

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

    Raises
    ------
    ValueError
        If an argument is out of range.

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
    """Schedule of cyclical SGMCMC (Zhang et al. 2020, Algorithm 1): explore, sample, repeat.

    The learning rate is that of `cyclical`. In the first part of each cycle the chain explores: the
    temperature is 0 and draws have weight 0, while long steps and the gradient's own noise move the
    chain elsewhere. In the rest of the cycle it samples, with weights η_t. The statistics
    ``draw_weight`` and ``cycle`` say which draws are which.

    Parameters
    ----------
    learning_rate : float
        η, the rate at the start of each cycle, above zero.
    period : int
        P, the length of a cycle in inner steps, at least 2. Take a multiple of ``n_steps``, so that
        a draw belongs to one cycle.
    exploration : float
        Share of each cycle that explores, from 0 to below 1. It is the paper's β, for which the
        paper gives no default.

    Returns
    -------
    callable
        ``t -> Phase``.

    Raises
    ------
    ValueError
        If an argument is out of range.

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
            f"cyclical_phases(exploration={exploration!r}): must be from 0 to below 1. It is the "
            "share of each cycle that explores; at 1 no draw would be left that samples."
        )
    rate = cast(Callable[[int], float], cyclical(learning_rate, period))
    return partial(_cyclical_phases, rate, period, exploration)


# Functions of this module rather than closures, so that steps with schedules can be pickled.


def _constant(learning_rate: float, t: int) -> float:
    return learning_rate


def _polynomial_decay(a: float, b: float, gamma: float, t: int) -> float:
    return a * (b + t) ** -gamma


def _cyclical(learning_rate: float, period: int, t: int) -> float:
    return 0.5 * learning_rate * (1.0 + math.cos(math.pi * (t % period) / period))


def _cyclical_phases(
    rate: Callable[[int], float], period: int, exploration: float, t: int
) -> Phase:
    cycle, t_in_cycle = divmod(t, period)
    if t_in_cycle < exploration * period:
        return Phase(rate(t), temperature=0.0, weight=0.0, cycle=cycle)
    return Phase(rate(t), cycle=cycle)


def description(function: Callable[..., Any]) -> str:
    """Describe a function by its code, without calling it.

    The description is the same for the same function in another process.
    """
    if isinstance(function, partial):
        values = [*function.args, *function.keywords.items()]
        arguments = [description(value) if callable(value) else repr(value) for value in values]
        return f"{description(function.func)}({', '.join(arguments)})"
    code = getattr(function, "__code__", None)
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    if code is None:
        return name
    closure = [cell.cell_contents for cell in function.__closure__ or ()]
    plain = [x for x in (*code.co_consts, *closure) if isinstance(x, bool | int | float | str)]
    return f"{name} {hashlib.blake2b(code.co_code, digest_size=4).hexdigest()} {plain}"
