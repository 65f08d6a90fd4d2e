"""Coordinates in which rows are smooth up to a limit that a parameter may go to.

A negative binomial becomes a Poisson as its α goes to infinity, and a zero-inflated distribution
loses its excess of zeros as their share goes to zero. Where the data say no more than that a
parameter is on the way to such a limit, the log-likelihood of a row is flat in the chain's own
coordinate, log α, on one side and steep on the other, and no quadratic function lies beside it on
both. In 1/α the limit is a place like others, at which it is smooth. Knows graphs and names of
parameters, no samplers and no fit.
"""

from collections.abc import Mapping

import pytensor.tensor as pt

from pytensor.graph.replace import clone_replace
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.gradients.row_coordinates import LinearRows

__all__ = ["rows_at_limits"]

BETWEEN_BOUNDS = "_logodds__", "_interval__"  # ends of the names of what PyMC has transformed


def rows_at_limits(density: LogDensity, flat_sides: Mapping[str, float]) -> LinearRows:
    """Write rows as graphs of other coordinates of some parameters.

    θ = exp(∓φ), which is zero at the limit: 1/α where φ is log α and α goes to infinity. Where a
    parameter has two bounds, the distance to that one, θ = 1/(1 + exp(±φ)). All others stay as rows
    see them, such as effects where a rewrite knows coordinates in which rows are linear.

    Parameters
    ----------
    density : LogDensity
        With its graph.
    flat_sides : dict of {str: float}
        Names of value variables, and the sign of the side on which each goes to its limit.
    """
    rows = density.linear_rows
    if rows is None:
        model = density.graph.model
        own = pt.concatenate([variable.ravel() for variable in model.variables])
        rows = LinearRows(terms=model.terms, variables=model.variables, seen=own)
    coordinates: list[TensorVariable] = []
    in_coordinates = {}
    seen = rows.seen
    for variable in rows.variables:
        name = variable.name
        if name not in flat_sides:
            coordinates.append(variable)
            continue
        theta = variable.type(name)
        coordinates.append(theta)
        away = -1.0 if flat_sides[name] > 0 else 1.0  # from the limit
        place = density.unknowns.places[name]
        phi = away * rows.seen[place]
        if name.endswith(BETWEEN_BOUNDS):
            seen = pt.set_subtensor(seen[place], pt.sigmoid(phi))
            in_coordinates[variable] = away * (pt.log(theta) - pt.log1p(-theta))
        else:
            seen = pt.set_subtensor(seen[place], pt.exp(phi))
            in_coordinates[variable] = away * pt.log(theta)
    terms = clone_replace(list(rows.terms), in_coordinates, rebuild_strict=False)
    return LinearRows(terms=terms, variables=coordinates, seen=seen)
