"""How noisy second-order control variates are where chains come now and then.

Along any parameter, at the edges of skewed ones, and along the effects of groups. Each answer is
over the noise that is safe there. Knows gradients and fits, no samplers.
"""

import math

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.jacobians import columns_of
from pymc_sghmc.gradients.metric import Array, Metric
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.gaussianity import Edge
from pymc_sghmc.tuning.noise_around import finite_noise, second_order_variances

__all__ = [
    "HEAT",
    "HEAT_OF_LESS",
    "FarNoise",
    "bearable_noise",
    "noise_along_parameters",
    "noise_at_edges",
    "noise_of_far_effects",
]

ALONG = 4.0  # sds along each parameter, and variance of second-order noise of clusters
MOST_ALONG = 0.5
FAR_EFFECTS = 2.0, 4.0, 6.0, 8.0, 16.0, 32.0  # sds along the effects of a level
HEAT = 0.6  # of ηV, by which a chain is hotter at critical friction, ...
HEAT_OF_LESS = 1.0  # ... and with the lower one that is chosen where the curvature may change
MOST_EXCESS = 0.02  # of the variance of an effect, by its tail on one side
MOST_ENTRIES = 100  # of effects whose tails are summed up
POINTS_A_SD = 10
LARGEST_MULTIPLE = 20.0  # logarithm of the largest that is told, and of the smallest
ROUNDS = 40
STEEPEST = 1e6
LEAST_DENSITY = 12.0  # nats below that at the mean, where a chain comes now and then
HARMLESS = 0.1  # variance of noise that heats a chain by a hundredth, wherever it is


class FarNoise(NamedTuple):
    """Noise of second-order control variates where chains come now and then."""

    largest: float  # over what is safe there
    passes: float  # over all rows that it took


def noise_along_parameters(second: Any, fit: GaussianFit, metric: Metric) -> float:
    """Largest variance in φ far out along any parameter, over the variance that is safe there.

    Chains come as far out now and then. Where effects are integrated out, few parameters remain,
    often with a scale that has a long tail. Noise that grows fast along it drives a chain away.
    """
    around = fit.metric
    [n] = second.data.batch_sizes
    gradients = [around.pull_back(unit) for unit in np.eye(fit.mean.size)]
    directions = [g / max(np.linalg.norm(g), 1e-300) for g in gradients for _ in range(2)]
    shifts = [ALONG * around.to_theta(direction) for direction in directions]
    ends = [fit.mean + shift * (-1) ** i for i, shift in enumerate(shifts)]
    variances = second.noise_at(ends, metric)
    worst = [
        finite_noise(V) @ np.square(direction)
        for [V], direction in zip(variances, directions, strict=True)
    ]
    return float(np.max(worst)) / n / MOST_ALONG


def noise_at_edges(second: Any, fit: GaussianFit, metric: Metric, edges: Sequence[Edge]) -> float:
    """Largest noise at the edges of skewed parameters, over what is safe there.

    A chain x sds out comes back if ηV/α < 2xF, F the force. As a rule η/α is 0.6; beyond the edge
    V grows faster than F. So V < xF is safe, and so is a V that heats next to nothing.

    Parameters
    ----------
    second : SecondOrder
    fit : GaussianFit
    metric : Metric
    edges : list of Edge
        In coordinates of the fit.
    """
    if not edges:
        return 0.0
    around = fit.metric
    ends = [fit.mean + edge.at * around.to_theta(edge.direction) for edge in edges]
    ends = [end.astype(second.density.dtype) for end in ends]
    variances = second_order_variances(second, ends, metric)
    along = [V @ np.square(edge.direction) for V, edge in zip(variances, edges, strict=True)]
    back = [max(abs(edge.at) * edge.force, HARMLESS) for edge in edges]
    return float(np.max(np.divide(along, back)))


def noise_of_far_effects(second: Any, fit: GaussianFit, heat: float = HEAT) -> FarNoise:
    """Noise of effects far out, over that with which their tails are still right.

    Quadratic functions beside rows are noisier the farther an effect is out: with a variance V of
    the force a chain has the temperature 1 + heat·ηV there, and comes the farther out. One that few
    rows know of, or a group without a single event, has a force that doesn't grow as fast. Only
    places that a chain may reach count, by how far log p has fallen on the way.
    """
    is_effect = np.zeros(fit.mean.size, dtype=bool)
    for place in second.density.group_coefficients.values():
        is_effect[place] = True
    columns = [c for c in columns_of(second.derivatives.shapes) if is_effect[c].all()]
    ways = [_way_out(second, fit, column, sign) for column in columns for sign in (1.0, -1.0)]
    ends = [end for way in ways for end in way.ends]
    variances = iter(_finite_variances(second, ends, fit.metric.diagonal()))
    found = [_noise_along(way, [next(variances) for _ in way.ends], heat) for way in ways]
    return FarNoise(largest=max(found, default=0.0), passes=len(ends) * (1 + second.noise_share))


class _WayOut(NamedTuple):
    """Places along the entries of one column, all moved to the same side, as far as chains come."""

    column: Array
    ends: list[Array]
    forces: list[Array]  # back to the mean, of each entry


def _way_out(second: Any, fit: GaussianFit, column: Array, sign: float) -> _WayOut:
    """Go out until log p has fallen too far for a chain to come there, by any entry."""
    scales = fit.metric.diagonal()
    shift = np.zeros(fit.mean.size)
    shift[column] = sign
    way = _WayOut(column, [], [])
    reached = 0.0
    force = fall = np.zeros(column.size)
    for far in FAR_EFFECTS:
        end = (fit.mean + far * scales.to_theta(shift)).astype(second.density.dtype)
        with np.errstate(all="ignore"):
            slope = scales.pull_back(second.passes.log_density(end)[1])
        before, force = force, -sign * slope[column]
        fall = fall + (far - reached) * (before + force) / 2
        reached = far
        way.ends.append(end)
        way.forces.append(np.nan_to_num(force, nan=0.0, posinf=STEEPEST))
        if not (fall < LEAST_DENSITY).any():  # nor where it is no number
            break
    return way


def _noise_along(way: _WayOut, variances: Sequence[Array | None], heat: float) -> float:
    """See `noise_of_far_effects`.

    Parameters
    ----------
    way : _WayOut
    variances : list of array of shape (d,)
        At each of its ends; the first None is farther than chains come.
    heat : float
        Of ηV.
    """
    known: list[Array] = []
    for variance in variances:
        if variance is None:
            break
        known.append(variance[way.column])
    if not known:
        return math.inf
    noise = np.array(known)
    forces = np.array(way.forces[: len(known)])
    distances = np.array(FAR_EFFECTS[: len(known)])
    # of thousands of entries, those that are the noisiest anywhere
    back = np.fmax(distances[:, None] * forces, np.finfo(float).tiny)
    worst = np.argsort(-(noise / back).max(axis=0), kind="stable")[:MOST_ENTRIES]
    bearable = bearable_noise(distances, forces[:, worst], noise[:, worst], heat)
    return float((1 / bearable).max())


def _finite_variances(
    second: Any, points: Sequence[Array], coordinates: Metric
) -> list[Array | None]:
    """Diagonal of V at each point, (d,); None where it isn't finite."""
    try:
        return list(second_order_variances(second, points, coordinates))
    except NonFinite:
        return [_finite_variance(second, point, coordinates) for point in points]


def _finite_variance(second: Any, point: Array, coordinates: Metric) -> Array | None:
    try:
        [variance] = second_order_variances(second, [point], coordinates)
    except NonFinite:
        return None
    return variance


def bearable_noise(distances: Array, forces: Array, variances: Array, heat: float = HEAT) -> Array:
    """How many times as large noise may be until a tail makes an effect's variance too large.

    A chain in a force F with the temperature T has a density whose logarithm falls by ∫ F/T.

    Parameters
    ----------
    distances : array of shape (k,)
        From the mean, in standard deviations.
    forces : array of shape (k, n)
        Back to the mean there, of each effect.
    variances : array of shape (k, n)
        Of the noise of the force.
    heat : float
        Of ηV, by which the chain is hotter.

    Returns
    -------
    array of shape (n,)
    """
    x = np.linspace(0.0, distances[-1], 1 + round(POINTS_A_SD * distances[-1]))
    known = np.r_[0.0, distances]
    columns = zip(forces.T, variances.T, strict=True)
    # between these a force is about linear, and its noise about a power of the distance
    along = [
        (np.interp(x, known, np.r_[0.0, F]), np.interp(x, known, np.r_[0.0, np.sqrt(V)]) ** 2)
        for F, V in columns
    ]
    F = np.maximum([force for force, _ in along], 0.0)  # (n, points)
    excess_heat = heat * MAX_LEARNING_RATE * np.array([V for _, V in along])
    right = _square(x, F, np.ones_like(F))
    lower = np.full(len(F), -LARGEST_MULTIPLE)
    upper = np.full(len(F), LARGEST_MULTIPLE)
    for _ in range(ROUNDS):
        middle = (lower + upper) / 2
        excess = _square(x, F, 1 + np.exp(middle)[:, None] * excess_heat) - right
        is_bearable = excess <= MOST_EXCESS * math.sqrt(2 * math.pi)
        lower = np.where(is_bearable, middle, lower)
        upper = np.where(is_bearable, upper, middle)
    return np.exp(lower)


def _square(x: Array, forces: Array, temperatures: Array) -> Array:
    """∫ x² p from 0, for densities p that are 1 there, (n,); exponential beyond the last x."""
    slopes = forces / temperatures
    width = x[1] - x[0]
    fall = np.concatenate(
        [
            np.zeros((len(slopes), 1)),
            np.cumsum((slopes[:, 1:] + slopes[:, :-1]) / 2 * width, axis=1),
        ],
        axis=1,
    )
    p = np.exp(-fall)
    end = x[-1]
    rate = np.maximum(slopes[:, -1], 1e-6)
    beyond = p[:, -1] * (end**2 / rate + 2 * end / rate**2 + 2 / rate**3)
    return (x**2 * p).sum(axis=1) * width + beyond
