"""Second-order control variates for posteriors that reach up to a limit of a parameter.

There those in a chain's own coordinates are so noisy at the edges that each step would take many
rows, or all of them. Knows set-ups and gradients, no samplers.
"""

import math

from collections.abc import Iterable
from typing import Any

from pymc_sghmc.gradients.limit_coordinates import rows_at_limits
from pymc_sghmc.gradients.second_derivatives import derivatives_in
from pymc_sghmc.gradients.second_order import SecondOrder
from pymc_sghmc.phases import COMPILING, begin_phase
from pymc_sghmc.tuning.gaussianity import EVER_REACHED, Edge
from pymc_sghmc.tuning.setups import Setups

__all__ = ["flat_sides", "see_limits"]

LITTLE_NOISE = 0.1  # far out, with which the fewest of rows serve, ...
NOISE_OF_FEW = 1.0  # ... and with which few do
FLAT = 1.2  # times as far as a Gaussian, that a posterior reaches on a flat side
REACH = math.sqrt(2 * EVER_REACHED)  # sds, as far as a Gaussian is ever reached


def see_limits(setups: Setups, second: Any) -> None:
    """Let control variates see skewed parameters in other coordinates, if there is less noise.

    Or little, where a posterior is flat on one side: there those in a chain's own coordinates may
    be right as far as anybody has looked, and chains come farther.

    Before any chain, so that all of them have the same.

    Parameters
    ----------
    setups : Setups
        With the one that a run begins with.
    second : SecondOrder, another gradient or None
        Any other stays as it is.
    """
    setup = setups.made
    far_noise = setup.noise.second_order_far
    is_flat = any(abs(edge.at) > FLAT * REACH for edge in setup.edges)
    if not is_flat and (not setup.edges or far_noise <= LITTLE_NOISE):
        return
    if not isinstance(second, SecondOrder):
        return
    density = second.density
    own = [edge for edge in setup.edges if edge.place in density.transformed]
    # others may be skewed for no more than that they depend on these
    of_places = flat_sides(own or setup.edges)
    sides = {density.unknowns.unknown_of(place): sign for place, sign in of_places.items()}
    begin_phase(f"{COMPILING} control variates")
    derivatives = derivatives_in(density, rows_at_limits(density, sides))
    if derivatives is None:
        return
    as_before = second.derivatives
    second.see_rows_by(derivatives)
    new = setups.measured_anew()
    if new.noise.second_order_far < max(far_noise, NOISE_OF_FEW if is_flat else 0.0):
        setups.begin_with(new)
    else:
        second.see_rows_by(as_before)
        setups.begin_with(setup)  # which gives them back what they knew


def flat_sides(edges: Iterable[Edge]) -> dict[int, float]:
    """Sign of the side on which the posterior of each parameter is flat, by its place.

    That of an edge which is farther out than a Gaussian's, or opposite to one which is nearer. Of
    two edges that which is less like a Gaussian's tells; of several entries of an unknown, the last
    one here does.
    """
    by_strength = sorted(edges, key=lambda edge: abs(math.log(abs(edge.at) / REACH)))
    sides: dict[int, float] = {}
    for edge in by_strength:
        sides.pop(edge.place, None)  # the last is the strongest
        is_flat = abs(edge.at) > REACH
        sides[edge.place] = math.copysign(1.0, edge.at if is_flat else -edge.at)
    return sides
