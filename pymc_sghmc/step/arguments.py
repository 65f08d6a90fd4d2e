"""The arguments that all stochastic-gradient samplers share: type, default, check and text, once.

A sampler's ``__init__`` ends in ``**shared: Unpack[SharedArguments]``. Knows arguments; no model,
no gradient, no chain.
"""

import math

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import numpy as np

from pymc.model import Model

from pymc_sghmc.checks import (
    checked_schedule,
    generator_of,
    is_number,
    names,
    true_or_false,
    whole_steps,
)
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


def _rng(name, value):
    generator_of(name, value, copy=False)
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


def _pool(name, value):
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if isinstance(value, str):
        raise ValueError(f'{name}={value!r}: must be "auto", a whole number of rows or None.')
    return whole_steps(name, value, "rows")


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
    batch_size : "auto", int, dict of {str: int} or None, default "auto"
        Rows in a minibatch, drawn anew at every inner step; a number above that of the rows means
        all rows. "auto" chooses the number that gives the most effective draws per second, by the
        measured noise: 10 to 5,000, or all. It takes the batches of ``pm.Minibatch`` where the
        model has one, and all data where they have fewer than 1,000 rows or no rows that are
        independent. A number that is given is raised, with a warning, where a chain would be lost
        with so few rows, unless ``gradient`` or ``learning_rate`` is given, too.
        A dict is for likelihoods with different numbers of rows: its keys are observed variables,
        data containers or dims. ``None`` uses all data at every step.
    data : dict, data frame, path or loader, optional
        Rows that are not in the model. Build the model with about ten of them in ``pm.Data``. A
        dict has arrays or columns by the names of these containers. NumPy arrays, such as
        ``np.memmap``, are read in place; all else is copied into arrays, once. Of a data frame
        (pandas, Polars, Arrow or xarray) and of Parquet files at a path, or at a list of paths,
        each container takes the column of its name, or those that the coords of its second dim
        name. Rows are matched by position: as in PyMC, an index is ignored. A loader is an iterable
        of blocks of rows, see `pymc_sghmc.loaders`; it is read in passes, without replacement, as
        Parquet, Zarr and HDF5 are. Default: the model's own data.
    pool : "auto", int or None, default "auto"
        How many rows of ``data`` are kept in memory, if they come from a loader or an
        ``np.memmap``. All are, where there are no more than the step may keep (1,000,000 rows or
        128 MB): then a loader is like arrays. Of more rows some are drawn once, by how much they
        tell, and minibatches come from this pool; what is known of all rows is found by a few
        passes over them while the step is made. "auto" draws 100,000 rows, or as many as the step
        may keep if posterior means could move by more than a tenth of ``target_bias`` standard
        deviations. If that doesn't do, the log says so, and each step reads its rows from all of
        them, as with ``None``, ``gradient="plain"`` or ``replace=False``.
    replace : bool, default True
        Whether rows are drawn with replacement. If ``False``, and with a loader, the noise of the
        gradient depends on that of the step before, so no noise estimate can compensate it.
    learning_rate : "auto", float or callable, default "auto"
        The learning rate η: a number, or a schedule ``t -> η_t`` from `pymc_sghmc.schedules`. Its
        unit is a squared parameter on the unconstrained scale; with a ``preconditioner`` it has
        none. "auto" takes the largest rate whose predicted bias is within ``target_bias``, at most
        0.25 (second order: 1) in units of the posterior variances.
    gradient : {"auto", "plain", "control_variates", "second_order"}, default "auto"
        How minibatches estimate the gradient. "plain" scales the sum over the minibatch.
        "control_variates" adds only the difference to a reference point, at which the gradient of
        all rows is known (Baker et al. 2019): near that point there is little noise, whatever the
        number of rows. "second_order" removes the slope of that difference, too (Dang et al. 2019),
        so that about ten rows a step are enough; where it is too noisy far from the reference
        point, the step logs it and uses "control_variates". "auto" takes the gradient that mixes
        faster at the same bias, for each chain, by the measured noise.
    preconditioner : "auto", None, "diag", "dense" or array of shape (d,) or (d, d), default "auto"
        M⁻¹, best near the posterior variances, (d,), or covariance, (d, d), of all parameters on
        the unconstrained scale, raveled in the order of ``model.value_vars``. "diag" and "dense"
        take it from the curvature at the reference point; ``None`` is 1. "auto" is dense up to
        1,000 parameters, above that diagonal, with a few directions if there are group effects.
        With a given learning rate "auto" is 1, because another value would change its unit.
    centring : "auto", None or dict of {str: float}, default "auto"
        How far group effects of unknown scale are centred while sampling. The model may have either
        form, centred or non-centred, and the trace does not change. "auto" samples each effect as a
        standard normal variable: its distance from the mean that it has given its scale and what
        its rows say, in standard deviations. ``None`` keeps the model's own form, as "auto" does
        with a given learning rate and no ``preconditioner``. A dict gives numbers by the names of
        parameters: 1 is fully centred, 0 fully non-centred (Papaspiliopoulos et al. 2007;
        Gorinova et al. 2020).
    marginalize : str, variable or list of them, default ()
        Group effects to integrate out: parameters with an entry for each group, of which a row sees
        only that of its own group, such as ``u[group]``. Few parameters are left, and minibatches
        draw groups with all of their rows: a step costs the same for ten groups and for a million.
        ``batch_size`` stays a number of rows, on average.
    recover : bool, default True
        Whether each recorded draw has values of the effects that were integrated out, drawn given
        all other parameters. This costs a few evaluations of all rows for each draw. With ``False``
        they are NaN, and `recover_effects` draws them afterwards for some draws.
    target_bias : float, default 0.05
        Relative bias of the posterior variances that automatic settings may cause, as predicted
        from the noise of the gradient. 0.05 makes standard deviations about 2.5 % too large.
    centre : dict, optional
        Reference point for control variates and curvature, such as ``pm.find_MAP()`` returns.
        Default: the mode that the step finds, or the mean of the tuning draws if they leave it.
    n_steps : int or "auto", default "auto"
        Inner steps per draw; a draw is the position after the last one. "auto" is 10. With
        second-order control variates it is the fewest, from 3 to 10, that make draws nearly
        independent, and up to five times as many if tuning draws are too correlated. With a
        given ``learning_rate`` it is 10.
    temperature : float, default 1.0
        T of the sampled distribution exp(−U/T), where U is minus the log posterior density. 1 is
        the posterior. At 0 no noise is added, and the sampler is an optimiser.
    model : pm.Model, optional
        Default: the model of the context.
    rng : numpy.random.Generator or int, optional
        ``pm.sample(random_seed=...)`` replaces it.
    initial_point : dict, optional
        A point of the model that gives the shapes of the parameters. Default: the model's initial
        point.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``{"mode": "NUMBA"}``.
    blocked : bool, default True
        Whether one step samples all parameters; ``False`` makes one step for each.
    """

    batch_size: Annotated[
        int | Mapping[str, int] | Literal["auto"] | None, Argument("auto", _batch_size)
    ]
    data: Annotated[
        Mapping[str, Any] | PathLike[str] | str | Iterable[Any] | None,
        Argument(None, is_compared=False),
    ]
    pool: Annotated[int | Literal["auto"] | None, Argument("auto", _pool)]
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
    rng: Annotated[np.random.Generator | int | None, Argument(None, _rng, is_compared=False)]
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
