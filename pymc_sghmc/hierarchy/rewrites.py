"""Which group effects a step rewrites: integrated out as asked, others partially centred.

Knows arguments and models, no chain.
"""

import logging

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc.model import Model

from pymc_sghmc.checks import quoted
from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.hierarchy.centring import centring_of, partially_centre
from pymc_sghmc.hierarchy.cluster_effects import clustered_rows, named_effects
from pymc_sghmc.hierarchy.clustered_rows import ClusterEffect
from pymc_sghmc.hierarchy.marginal import integrate_out
from pymc_sghmc.loops.backends import is_jax
from pymc_sghmc.models.contract import minibatch_log_density
from pymc_sghmc.models.row_model import RowModel
from pymc_sghmc.models.unknowns import Unknowns

__all__ = [
    "Rewriting",
    "advise_to_integrate_out",
    "integrated_effects",
    "rewritten",
]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

MANY_GROUPS = 100  # of which groups integrating out was measured to pay
FEW_ROWS = 30
MOST_NUMBERS = 2  # of a group, and unknowns that are left
MOST_LEFT = 50


def integrated_effects(
    model: Model,
    given: Mapping[str, Any],
    point: Mapping[str, Any],
    variables: list[pt.TensorVariable],
) -> tuple[list[ClusterEffect], list[pt.TensorVariable]]:
    """Return the effects that ``marginalize`` names, and the variables that are left to sample.

    Parameters
    ----------
    model : pm.Model
    given : dict
        Values of all shared arguments.
    point : dict
        A point of the model.
    variables : list of TensorVariable
        Of the step.

    Raises
    ------
    ValueError
        If one isn't an effect, or other arguments leave no way to integrate it out.
    """
    names = given["marginalize"]
    if not names:
        return [], variables
    for name, obstacle in _obstacles(given).items():
        raise ValueError(f"marginalize={list(names)!r} with {name}: {obstacle}.")
    effects = named_effects(model, names, point)
    gone = {effect.value: effect.rv.name for effect in effects}
    left = [v for v in variables if v not in gone]
    if missing := [name for value, name in gone.items() if value not in variables]:
        raise ValueError(
            f"marginalize={list(names)!r} with vars: vars lacks {quoted(missing)}. Add it."
        )
    if not left:
        raise ValueError(
            f"marginalize={list(names)!r}: no parameter is left to sample. Name fewer."
        )
    return effects, left


def _obstacles(given: Mapping[str, Any]) -> dict[str, str]:
    """Arguments, by name, with which effects can't be integrated out, and why."""
    problems = {
        "compile_kwargs": is_jax((given["compile_kwargs"] or {}).get("mode"))
        and "JAX compiles for a fixed number of rows, and groups differ. Use Numba or C",
        "blocked": not given["blocked"]
        and "one step has to know all of the model. Leave it at True",
        "temperature": given["temperature"] != 1.0
        and "integrated out, effects have the temperature 1. Leave it at 1",
    }
    return {name: problem for name, problem in problems.items() if problem}


class Rewriting(NamedTuple):
    """Which group effects of a model are rewritten."""

    integrated: tuple[ClusterEffect, ...] = ()  # integrated out, group by group
    recover: bool = True  # whether values of these are drawn for each draw
    may_centre: bool = False  # whether others may be centred partially


def rewritten(rows: RowModel, model: Model, rewriting: Rewriting) -> RowModel:
    """Rewrite group effects of a model that was cut without the priors of those integrated."""
    rows = integrate_out(rows, model, list(rewriting.integrated), rewriting.recover)
    return partially_centre(rows, model) if rewriting.may_centre else rows


def advise_to_integrate_out(
    model: Model,
    given: Mapping[str, Any],
    point: Mapping[str, Any],
    unknowns: Unknowns,
    gradient: MinibatchGradient,
) -> None:
    """Log which effects could be integrated out, where there are many groups of few rows."""
    centring = centring_of(gradient.density)
    data = gradient.data
    if centring is None or _obstacles(given) or data.n_at_hand != data.n_rows:
        return
    by_groups: dict[int, list[str]] = {}
    for name in centring.by_name():
        by_groups.setdefault(max(np.shape(point[name]), default=1), []).append(name)
    n_groups, names = max(by_groups.items())
    n_rows = max(gradient.data.n_rows, default=0)
    if n_groups < MANY_GROUPS or n_rows > FEW_ROWS * n_groups or n_rows <= n_groups:
        return
    without_draws = ""
    if given["recover"]:
        without_draws = " With recover=False, without their draws, it is much faster, too."
    for some in [names, *([name] for name in names)]:
        d = unknowns.d - sum(np.size(point[name]) for name in some)
        if d <= MOST_LEFT and _can_be(model, some, point):
            _log.info(
                f"{quoted(some)}: {n_groups:,} groups of {n_rows / n_groups:.1f} rows on average. "
                f"marginalize={some!r} integrates them out and leaves {d} of {unknowns.d:,} "
                f"parameters, which is safer with so few rows each.{without_draws}"
            )
            return


def _can_be(model: Model, names: Sequence[str], point: Mapping[str, Any]) -> bool:
    """Whether the graph lets these effects be integrated out, and rows be cut from it then."""
    shapes = {name: np.shape(value) for name, value in point.items()}
    try:
        effects = named_effects(model, names, point)
        without = tuple(effect.rv for effect in effects)
        rest, groups = minibatch_log_density(model, 1, point, None, without)
        terms = [group.log_likelihood for group in groups]
        clustering = clustered_rows(model, effects, terms, [rest], shapes)
        return clustering.rows.size <= MOST_NUMBERS
    except (ValueError, NotImplementedError):
        return False
