"""The arguments that all stochastic-gradient samplers share: type, default, check and text, once.

A sampler's ``__init__`` ends in ``**shared: Unpack[SharedArguments]``. Knows arguments; no model,
no gradient, no chain.
"""

import math

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import numpy as np

from pymc.model import Model

from pymc_sghmc.checks import checked_schedule, is_number, names, true_or_false, whole_steps
from pymc_sghmc.schedules import Schedule, description

__all__ = [
    "ARGUMENTS",
    "TYPES",
    "Argument",
    "SharedArguments",
    "checked",
    "compared",
    "schedule_of",
]


def _as_it_is(name, value):
    return value


class Argument(NamedTuple):
    """A shared argument, but for its type and its text."""

    default: Any
    check: Callable[[str, Any], Any] = _as_it_is  # of name and value: the value to work with
    is_compared: bool = True  # with that of a saved state, which holds for the same value only


def schedule_of(learning_rate):
    """Return the schedule of a learning rate, None of "auto"."""
    is_auto = isinstance(learning_rate, str) and learning_rate == "auto"
    return None if is_auto else checked_schedule(learning_rate)


def _learning_rate(name, value):
    schedule_of(value)
    return value


def _steps(name, value):
    return value if isinstance(value, str) and value == "auto" else whole_steps(name, value)


def _gradient(name, value):
    if value not in ("auto", "plain", "control_variates", "second_order"):
        raise ValueError(
            f'{name}={value!r}: must be "auto", "plain", "control_variates" or "second_order".'
        )
    return value


def _batch_size(name, value):
    if isinstance(value, str) and value != "auto":
        raise ValueError(f'{name}={value!r}: must be a whole number of rows, a dict or "auto".')
    return value


def _centring(name, value):
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f'{name}={value!r}: must be "auto", None or a dict such as {{"z": 0.5}}.')
    for key, weight in value.items():
        if not (is_number(weight) and 0 <= weight <= 1):
            raise ValueError(f"{name}={value!r}: {key!r} must be a number from 0 to 1.")
    return dict(value)


def _target_bias(name, value):
    if not (is_number(value) and 0 < value < 1):
        raise ValueError(
            f"{name}={value!r}: must be a number between 0 and 1, the relative bias "
            "of the variances that automatic settings may cost."
        )
    return value


def _temperature(name, value):
    if not (is_number(value) and math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{name}={value!r}: must be a finite number, 1 for the posterior, 0 for optimisation."
        )
    return float(value)


def _compile_kwargs(name, value):
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r}: must be a dict, such as {{'mode': 'NUMBA'}}.")
    return value


class SharedArguments(TypedDict, total=False):
    """Arguments of every stochastic-gradient sampler.

    Parameters
    ----------
    batch_size : int, dict of {str: int} or "auto", optional
        Rows in a minibatch, drawn anew at every inner step; as many as there are, or more, are all
        of them. Likelihoods with different numbers of
        rows take a dict that names observed variables, data containers or dims. "auto": as many as
        give the most effective draws per row, by the noise measured; 10 to 500 with second-order
        control variates. Default: the batches of ``pm.Minibatch``, or all data.
    data : dict of {str: array} or loader, optional
        Data too large for the model, which is built with a few of their rows in ``pm.Data``: arrays
        such as ``np.memmap`` by the names of these containers, of which no copy is made, or an
        iterable of blocks of rows, see `pymc_sghmc.loaders`. Blocks are gone through in passes,
        without replacement.
    replace : bool, default True
        Whether a row may come up again before all others have. With ``False``, and with a loader,
        noise of the gradient isn't independent from step to step and is never compensated.
    learning_rate : "auto", float or callable, default "auto"
        η, in units of squared unconstrained unknowns (with a ``preconditioner``, η multiplies it
        and has no unit), or a schedule ``t -> η_t`` from `pymc_sghmc.schedules`. "auto": the
        largest up to 0.25 (second order: 1) in units of the posterior's variances whose predicted
        bias is within ``target_bias``.
    gradient : {"auto", "plain", "control_variates", "second_order"}, default "auto"
        How minibatches estimate the gradient. "control_variates" adds the difference of the
        minibatch's gradients here and at a centre to the gradient of all rows at the centre (Baker
        et al. 2019), with rows drawn by their leverage: near the centre the noise is that of the
        difference alone, whatever the number of rows. "second_order" takes out the slope of the
        rows' gradients as well (Dang et al. 2019), so that some ten rows a step are enough, and
        gives way to "control_variates", in words, where that is too noisy far from the centre.
        "auto" takes what mixes faster at the same bias, chain by chain, by the noise measured;
        second order with ``batch_size="auto"``, and in models with effects of groups.
    preconditioner : "auto", None, "diag", "dense" or array of shape (d,) or (d, d), default "auto"
        M⁻¹, best near the posterior (co)variance of the raveled unconstrained unknowns, in the
        order of ``model.value_vars``; ``None`` is 1. "dense" and "diag" take it from the curvature
        at the centre. "auto": dense up to 1,000 unknowns, above that diagonal, or with effects
        diagonal and a few directions; and 1 with a given learning rate, which then has the
        unknowns' unit.
    centring : "auto", None or dict of {str: float}, default "auto"
        How far effects u of an unknown scale τ, in either form, ``Normal("u", mu, tau)`` and ``tau
        * z``, are centred while sampling: the chain runs in uτ^(λ−1), which traces don't show. λ =
          1 is u,
        0 is u/τ. "auto": λ = r/(1 + r) for each entry, r the curvature of its likelihood over that
        of its prior (Papaspiliopoulos et al. 2007; Gorinova et al. 2020); with a given learning
        rate and no ``preconditioner``, as ``None``: the model's own form. A dict names λ of
        unknowns.
    marginalize : str, variable or list of them, default ()
        Effects of groups to integrate out: unknowns with an entry for each group, of which a row
        sees those of its own group alone, such as ``u[group]``. What is left is small and nearly
        Gaussian, and minibatches draw groups with all of their rows, so that steps cost the same
        with ten groups or a million. ``batch_size`` stays a number of rows, on average. Groups of
        very many rows stay.
    recover : bool, default True
        Whether each recorded draw has the effects that were integrated out, drawn given all else:
        a few evaluations of all rows for each draw. ``False``: NaN, and `recover_effects` draws
        them for some draws afterwards.
    target_bias : float, default 0.05
        Relative bias of the variances that automatic settings may cost, by what is measured of the
        gradient's noise: 0.05 is 2.5 % of a standard deviation.
    centre : dict, optional
        Point for control variates and curvature, such as ``pm.find_MAP()`` returns. Default: the
        mode that the step finds, or the mean of the tuning draws where they leave the mode.
    n_steps : int or "auto", default "auto"
        Inner steps per draw, which holds the last position. "auto": 10; with second-order control
        variates as few as make draws nearly independent, 3 to 10; and up to five times as many
        where tuning draws are too much alike. With a ``learning_rate`` of your own 10.
    temperature : float, default 1.0
        T: the chain samples exp(−U/T). 1 is the posterior; at 0 no noise is added, and the sampler
        is an optimiser.
    model : pm.Model, optional
        Default: the model of the context.
    rng : numpy.random.Generator or int, optional
        ``pm.sample(random_seed=...)`` replaces it.
    initial_point : dict, optional
        Gives the shapes of the unknowns; default: the model's initial point.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``{"mode": "NUMBA"}``.
    blocked : bool, default True
        One step for all unknowns. ``False`` makes one step for each.
    """

    batch_size: Annotated[
        int | Mapping[str, int] | Literal["auto"] | None, Argument(None, _batch_size)
    ]
    data: Annotated[
        Mapping[str, Any] | Iterable[Mapping[str, Any]] | None, Argument(None, is_compared=False)
    ]
    replace: Annotated[bool, Argument(True, true_or_false)]
    learning_rate: Annotated[Literal["auto"] | float | Schedule, Argument("auto", _learning_rate)]
    gradient: Annotated[
        Literal["auto", "plain", "control_variates", "second_order"], Argument("auto", _gradient)
    ]
    preconditioner: Annotated[
        Literal["auto", "diag", "dense"] | np.ndarray | None, Argument("auto")
    ]
    centring: Annotated[Literal["auto"] | Mapping[str, float] | None, Argument("auto", _centring)]
    marginalize: Annotated[str | Iterable[str] | None, Argument((), names)]
    recover: Annotated[bool, Argument(True, true_or_false)]
    target_bias: Annotated[float, Argument(0.05, _target_bias)]
    centre: Annotated[Mapping[str, Any] | None, Argument(None)]
    n_steps: Annotated[int | Literal["auto"], Argument("auto", _steps)]
    temperature: Annotated[float, Argument(1.0, _temperature)]
    model: Annotated[Model | None, Argument(None, is_compared=False)]
    rng: Annotated[np.random.Generator | int | None, Argument(None, is_compared=False)]
    initial_point: Annotated[Mapping[str, Any] | None, Argument(None, is_compared=False)]
    compile_kwargs: Annotated[
        Mapping[str, Any] | None, Argument(None, _compile_kwargs, is_compared=False)
    ]
    blocked: Annotated[bool, Argument(True, is_compared=False)]


TYPES = {
    name: get_args(hint)
    for name, hint in get_type_hints(SharedArguments, include_extras=True).items()
}
ARGUMENTS = {name: argument for name, (_, argument) in TYPES.items()}


def checked(given) -> dict:
    """Return the values of all shared arguments, of which some are given.

    Parameters
    ----------
    given : dict
        By name, as ``**shared`` holds them.

    Raises
    ------
    ValueError
        If a value can't be.
    """
    return {
        name: argument.check(name, given.get(name, argument.default))
        for name, argument in ARGUMENTS.items()
    }


def compared(values) -> dict:
    """Return the arguments in which a saved state must agree for a chain to go on from it."""
    given = {name: values[name] for name, argument in ARGUMENTS.items() if argument.is_compared}
    return {name: description(x) if callable(x) else x for name, x in given.items()}
