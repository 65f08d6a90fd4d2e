"""The warning that a posterior may be improper: flat priors in directions that the data leave open.

Separated outcomes and collinear columns leave such directions. The set-up finds no fault there, as
the log-density is smooth and the chain only drifts.
"""

import warnings

from collections.abc import Callable
from typing import Any

import numpy as np

from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.model import Model
from pymc.pytensorf import compile
from pytensor import tensor as pt
from pytensor.gradient import grad

from pymc_sghmc.models.graphs import minibatch_outputs

__all__ = ["warn_of_improper_posterior"]

MANY_ENTRIES = 50  # of flat priors; a gradient of all data is taken for each
FAR = 1e6  # times 1 + |θ|; no proper posterior in sensible units reaches so far
DROP = 1.0  # of the log-density, by which it must be lower there
DIFFERENCE = 1e-3  # times 1 + |θ|, of the Hessian by differences
STACKLEVEL = 6  # two functions here, two of the step's and the sampler's __init__, and who calls it


def warn_of_improper_posterior(
    sampler: str, model: Model, point: dict[str, np.ndarray], has_all_rows: bool
) -> None:
    """Warn if flat priors leave a direction in which the log-density doesn't fall.

    Parameters
    ----------
    sampler : str
    model : pm.Model
    point : dict
        The reference point of the set-up, by the names of value variables.
    has_all_rows : bool
        Whether the model itself holds all data; else nothing is looked for.
    """
    flat = [rv for rv in model.free_RVs if isinstance(rv.owner.op, FlatRV | HalfFlatRV)]
    values = [model.rvs_to_values[rv] for rv in flat]
    start = np.concatenate([np.ravel(point[v.name]) for v in values] or [np.zeros(0)]).astype(float)
    if not 0 < start.size <= MANY_ENTRIES or not has_all_rows or minibatch_outputs([model.logp()]):
        return
    logp, slope = _along(model, values, point)
    if _is_unbounded(logp, slope, start):
        _warn(sampler, [rv.name for rv in flat])


def _is_unbounded(
    logp: Callable[[np.ndarray], float],
    slope: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
) -> bool:
    """Whether the log-density has no bound in some direction from a point that was climbed to."""
    at_start = logp(start)
    if np.linalg.norm(start) > FAR and not at_start > logp(np.zeros_like(start)):
        return True  # a climb without an end overshot, to where rounding errors decide
    scale = 1 + np.abs(start)
    columns = [
        (slope(start + step) - slope(start - step)) / (2 * step.max())
        for step in np.diag(DIFFERENCE * scale)
    ]
    hessian = np.array(columns) * np.outer(scale, scale)
    if not np.isfinite(hessian).all():
        return False
    _, vectors = np.linalg.eigh(-(hessian + hessian.T) / 2)
    directions = [vectors[:, 0] * scale]  # the flattest, and that in which the climb went, if any
    if (distance := np.linalg.norm(start / scale)) > 0:
        directions.append(start / distance)
    ways = [sign * FAR * direction for direction in directions for sign in (1, -1)]
    return any(logp(start + way) > at_start - DROP for way in ways)


def _along(model: Model, values: list[Any], point: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Return the log-density and its gradient as functions of the flat parameters, raveled."""
    logp = model.logp()
    slopes: Any = grad(logp, values)
    slope = pt.concatenate([part.ravel() for part in slopes])
    functions = [
        compile(model.value_vars, output, mode="FAST_COMPILE", on_unused_input="ignore")
        for output in (logp, slope)
    ]

    def at(function: Any, position: np.ndarray) -> Any:
        here = dict(point)
        first = 0
        for value in values:
            shape = np.shape(point[value.name])
            size = int(np.prod(shape, dtype=int))
            here[value.name] = position[first : first + size].reshape(shape).astype(value.dtype)
            first += size
        with np.errstate(all="ignore"):
            return function(*(here[value.name] for value in model.value_vars))

    return (lambda x: float(at(functions[0], x))), (lambda x: at(functions[1], x))


def _warn(sampler: str, names: list[str]) -> None:
    warnings.warn(
        f"{sampler}: the posterior may be improper: the priors of {', '.join(names)} are flat, and "
        "in some direction the data do not bound them. Give them proper priors, such as "
        "pm.Normal(..., 0, 10). Typical causes are outcomes that a predictor separates completely, "
        "and collinear columns.",
        UserWarning,
        stacklevel=STACKLEVEL,
    )
