"""Checks of arguments that samplers share."""

import difflib
import inspect
import math

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from pymc.initial_point import make_initial_point_fn
from pymc.model import Model, modelcontext
from pymc.util import get_random_generator, get_value_vars_from_user_vars

from pymc_sghmc.exceptions import ChainError
from pymc_sghmc.schedules import Phase

__all__ = [
    "check_call",
    "check_matrix_size",
    "checked_friction",
    "checked_schedule",
    "continuous_variables",
    "generator_of",
    "is_number",
    "is_start_given",
    "is_whole",
    "names",
    "positive_root",
    "quoted",
    "starting_point",
    "true_or_false",
    "unconstrained_point",
    "whole_steps",
]

MAX_MATRIX = 20_000  # parameters; such a matrix has 3.2 GB
# What other packages and spellings call an argument of ours.
OTHER_NAMES = {
    "batchsize": "batch_size",
    "center": "centre",
    "centering": "centring",
    "epsilon": "learning_rate",
    "eta": "learning_rate",
    "lr": "learning_rate",
    "marginalise": "marginalize",
    "minibatch_size": "batch_size",
    "n_leapfrog": "n_steps",
    "step_size": "learning_rate",
}


def check_call(sampler: Any, vars: object, names: Iterable[str], model: Model | None) -> Model:
    """Check how a step method is called, before anything else looks at its arguments.

    Parameters
    ----------
    sampler : type
        The class of the step method.
    vars : object
        Its first argument, the variables to sample.
    names : iterable of str
        Names of the arguments that are given.
    model : pm.Model or None
        Its argument ``model``.

    Returns
    -------
    pm.Model
        The model that the step is for.

    Raises
    ------
    TypeError
        If an argument doesn't exist, ``vars`` can't be variables, or there is no model.
    """
    name = sampler.__name__
    if isinstance(vars, int | float | np.number) and not isinstance(vars, bool):
        raise TypeError(
            f"{name}({vars!r}): the first argument is vars, the variables to sample. "
            f"For a number of rows write {name}(batch_size={vars!r})."
        )
    arguments = list(inspect.signature(sampler.__init__).parameters)[1:]
    for argument in names:
        # PyMC hands model and blocked to each step that it copies, whatever its arguments are.
        if argument not in (*arguments, "model", "blocked"):
            raise TypeError(_unexpected(name, argument, arguments))
    if not isinstance(model, Model | None):
        raise TypeError(f"{name}(model={model!r}): must be a pm.Model.")
    try:
        return modelcontext(model)
    except TypeError:
        raise TypeError(
            f"{name} was made outside a model. Make the step inside `with model:`, or pass model=. "
            "With Bambi call model.build() first, and make the step inside "
            "`with model.backend.model:`."
        ) from None


def _unexpected(sampler: str, argument: str, arguments: list[str]) -> str:
    """Say that a sampler has no such argument, and which one may be meant."""
    if argument == "batch_size":
        return (
            f"{sampler}(batch_size=...): {sampler} uses all rows for each gradient and has no "
            "batch_size. Leave it out, or use SGHMC, which samples from minibatches."
        )
    if argument == "data":
        return (
            f"{sampler}(data=...): {sampler} uses all rows for each gradient and has no data=. "
            "Build the model with all rows, or use SGHMC, which reads data= in minibatches."
        )
    other = OTHER_NAMES.get(argument.lower())
    near = [other] if other in arguments else difflib.get_close_matches(argument, arguments, 1)
    if near:
        return f"{sampler} has no argument {argument!r}. Did you mean {near[0]!r}?"
    return f"{sampler} has no argument {argument!r}. It has {', '.join(arguments)}."


def continuous_variables(vars: Any, model: Model, sampler: str) -> list[Any]:
    """Value variables to sample, in the model's order, which is that of PyMC's points."""
    if vars is None:
        chosen = model.continuous_value_vars
    else:
        chosen = get_value_vars_from_user_vars(_variables(vars, model, sampler), model)
    discrete = [var.name for var in chosen if not var.dtype.startswith("float")]
    if discrete:
        raise ValueError(
            f"{sampler}(vars=...): {', '.join(discrete)} is discrete and has no gradient. Leave it "
            "out of vars: PyMC gives it another step method."
        )
    if not chosen:
        raise ValueError(f"{sampler}: the model has no continuous parameters to sample.")
    return [var for var in model.value_vars if var in set(chosen)]


def _variables(vars: Any, model: Model, sampler: str) -> list[Any]:
    """Return variables, of which some may be given by name."""
    chosen = []
    for var in vars if isinstance(vars, list | tuple) else [vars]:
        if isinstance(var, str):
            if var not in model.named_vars:
                raise ValueError(
                    f"{sampler}(vars=...): the model has no variable {var!r}. Its free variables "
                    f"are {quoted(rv.name for rv in model.free_RVs)}."
                )
            var = model[var]
        chosen.append(var)
    return chosen


def starting_point(model: Model, initial_point: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """Return the model's initial point with the values of an ``initial_point`` in it."""
    point = model.initial_point()
    for name, value in (initial_point or {}).items():
        if name not in point:
            raise ValueError(
                f"initial_point: {name!r} is not the name of a value variable (PyMC's "
                f"unconstrained scale). Use {quoted(point)}. To choose where chains begin, pass "
                "initvals to pm.sample."
            )
        value = np.asarray(value)
        if value.dtype.kind not in "fiu" or value.ndim != point[name].ndim:
            raise ValueError(
                f"initial_point: {name!r} must be an array of numbers with "
                f"{point[name].ndim} axes, not {value!r}."
            )
        point[name] = value.astype(point[name].dtype)
    return point


def generator_of(argument: str, seed: Any, copy: bool = True) -> np.random.Generator:
    """Return a generator of a seed as PyMC makes it, of a generator a copy or itself."""
    try:
        return get_random_generator(seed, copy=copy)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{argument}={seed!r}: must be a numpy.random.Generator, a whole number or None."
        ) from error


def is_start_given(
    model: Model, initial_point: dict[str, Any] | None, variables: list[Any]
) -> bool:
    """Whether somebody has chosen where chains begin, by ``initial_point`` or the model's initvals.

    Those of PyMC's own ways to choose, such as ``initval="prior"``, don't count.
    """
    initvals = {model.rvs_to_values[rv]: x for rv, x in model.rvs_to_initial_values.items()}
    values = [initvals.get(variable) for variable in variables]
    return bool(initial_point) or any(x is not None and not isinstance(x, str) for x in values)


def check_matrix_size(argument: str, d: int) -> None:
    """Refuse matrices over all parameters if there are too many."""
    if d > MAX_MATRIX:
        raise ValueError(
            f'{argument}: use "diag" above {MAX_MATRIX} parameters. This is a matrix over the {d} '
            f"parameters of the step, {8e-9 * d * d:.3g} GB, and each inner step multiplies by it."
        )


def quoted(names: Iterable[str]) -> str:
    """List names, each in quotes."""
    return ", ".join(map(repr, names))


def is_number(value: Any) -> bool:
    """Whether ``value`` is one real number, of Python's or NumPy's, and no bool."""
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiu"


def is_whole(value: Any) -> bool:
    """Whether ``value`` is one whole number, of Python's or NumPy's, and no bool."""
    return is_number(value) and np.asarray(value).dtype.kind in "iu"


def true_or_false(name: str, value: Any) -> bool:
    """Check an argument that is one of the two."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r}: must be True or False.")
    return bool(value)


def names(name: str, value: Any) -> tuple[str, ...]:
    """Check names of parameters, or variables that have them: one, several or None."""
    if value is None:
        return ()
    variables = [value]
    if np.iterable(value) and not isinstance(value, str) and not hasattr(value, "owner"):
        variables = list(value)
    unique = tuple(dict.fromkeys(getattr(variable, "name", variable) for variable in variables))
    if not all(isinstance(entry, str) for entry in unique):
        raise ValueError(f'{name}={value!r}: must be names of parameters, such as ["u"].')
    return unique


def whole_steps(name: str, value: Any, unit: str = "inner steps") -> int:
    """Check a number of steps, or of another ``unit``."""
    if not (is_whole(value) and value >= 1):
        raise ValueError(f"{name}={value!r}: must be a whole number of {unit}, at least 1.")
    return int(value)


def positive_root(matrix: np.ndarray) -> np.ndarray | None:
    """L with LLᵀ = ``matrix``, or None where this isn't finite, symmetric and positive definite.

    Square roots of a diagonal, (d,), or Cholesky's factor of a matrix, (d, d).
    """
    if not np.isfinite(matrix).all():
        return None
    if matrix.ndim == 1:
        return np.sqrt(matrix) if (matrix > 0).all() else None
    if not np.allclose(matrix, matrix.T):
        return None
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return None


def checked_schedule(learning_rate: Any) -> Callable[[int], Phase]:
    """Check a learning rate, and return it as a schedule of phases."""
    if callable(learning_rate):
        return partial(_phase, learning_rate)
    if not is_number(learning_rate):
        raise ValueError(
            f'learning_rate={learning_rate!r}: pass "auto", a number above zero or a schedule t -> '
            "rate from pymc_sghmc.schedules. About 0.01 times the smallest posterior variance "
            "is a cautious start."
        )
    eta = float(learning_rate)
    if not (eta > 0 and math.isfinite(eta)):
        raise ValueError(f"learning_rate={learning_rate!r}: must be finite and above zero.")
    return partial(_always, Phase(eta))


def _always(phase: Phase, t: int) -> Phase:
    return phase


def _phase(schedule: Callable[[int], Any], t: int) -> Phase:
    """Call a schedule, and return Python's numbers: NumPy's would turn float32 into float64."""
    value_at_t = schedule(t)
    phase = value_at_t if isinstance(value_at_t, Phase) else Phase(value_at_t)
    eta, temperature, weight, cycle = phase
    if not (is_number(eta) and eta > 0 and math.isfinite(eta)):
        raise ChainError(
            f"learning_rate: the schedule returns {eta} at inner step {t}, but rates must be "
            "finite numbers above zero"
        )
    for name, value in {"temperature": temperature, "weight": weight}.items():
        if value is None and name == "weight":
            continue
        if value is None or not (is_number(value) and value >= 0 and math.isfinite(value)):
            raise ChainError(
                f"learning_rate: the schedule returns the {name} {value} at inner step {t}, but it "
                "must be a finite number, not below zero"
            )
    return Phase(
        float(eta), float(temperature), None if weight is None else float(weight), int(cycle)
    )


def checked_friction(friction: Any) -> Literal["auto"] | float:
    """Check the argument ``friction``: "auto" or α in (0, 1]."""
    if isinstance(friction, str) and friction == "auto":
        return "auto"
    if not (is_number(friction) and 0 < friction <= 1):
        raise ValueError(
            f'friction={friction!r}: must be "auto" or a number in (0, 1]; 1 − friction is the '
            "momentum term. Without friction, gradient noise heats the chain without limit."
        )
    return float(friction)


def unconstrained_point(
    model: Model, point: Mapping[str, Any], effects: Sequence[Any] = ()
) -> dict[str, np.ndarray]:
    """Return a point of PyMC, by names of value variables, from values of all parameters.

    Parameters
    ----------
    model : pm.Model
    point : dict
        Values of the parameters, such as ``pm.find_MAP()`` returns.
    effects : sequence
        Effects that are integrated out, which need no value.
    """
    names = [value.name for value in model.value_vars]
    out = [effect.rv for effect in effects]
    if all(name in point for name in names):
        return {name: np.asarray(point[name]) for name in names}
    value_names = {rv: model.rvs_to_values[rv].name for rv in model.free_RVs}
    unknown = [name for name in point if name not in model.named_vars and name not in names]
    if unknown:
        raise ValueError(
            f"centre: the model has no parameter {quoted(unknown)}. Its parameters are "
            f"{quoted(rv.name for rv in value_names if rv not in out)}."
        )
    missing = [rv for rv, name in value_names.items() if rv.name not in point and name not in point]
    missing = [rv.name for rv in missing if rv not in out]
    if missing:
        raise ValueError(
            f"centre: has no value of {', '.join(missing)}. Pass a value of each parameter, such "
            "as pm.find_MAP() returns."
        )
    overrides = {rv: np.asarray(point[rv.name]) for rv in value_names if rv.name in point}
    filled = make_initial_point_fn(model=model, overrides=overrides)(0)
    unconstrained = {
        name: np.asarray(point[name])
        for rv, name in value_names.items()
        if rv not in overrides and name in point
    }
    return filled | unconstrained
