"""How noisy gradients are around a Gaussian fit, by minibatches or by all rows.

Knows gradients and fits, no samplers. What is farther out than 2 sds is in `far_noise`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.gradients.metric import Array, Metric
from pymc_sghmc.gradients.noise import noise_covariance
from pymc_sghmc.tuning.budget import FARTHEST_LEARNING_RATE
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE
from pymc_sghmc.tuning.curvature import MAX_DENSE
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

__all__ = [
    "N_SIGNED",
    "SecondOrderNoise",
    "effect_noise_from_all_rows",
    "finite_noise",
    "is_over_rows",
    "noise_around",
    "noise_over_rows",
    "second_order_noise",
    "second_order_variances",
]

N_PROBES = 20  # points near the mean at which the noise is measured, and ...
N_SIGNED = 64  # ... with random signs, over all rows
MOST_ROWS = 300_000  # of which that is done
N_EXACT = 4  # points at each distance at which second-order noise is found, and ...
FAR_ENOUGH = 2.0  # times 1 and 2 sds, in any one of thousands of directions
N_GROWTH = 2  # ... that tell how much the curvature changes
MOST_GROWTH = 0.5  # of the curvature, relative, at 2 sds, with which steps may be long


class SecondOrderNoise(NamedTuple):
    """Noise of second-order control variates by all rows."""

    near: Array  # diagonal of V in φ at 1 sd from the mean, (d,)
    far: Array  # at 2 sds, over how much more than a Gaussian's the force back is there
    limit: float  # of the learning rate, by how much the curvature changes
    passes: float  # over all rows that it took


def noise_around(gradient: Any, fit: GaussianFit, metric: Metric, temperature: float) -> Array:
    """Mean diagonal of V̂ in φ over draws from the fit, by minibatches."""
    total = np.zeros(fit.mean.size)
    if not any(gradient.data.is_noisy):
        return total
    rng = np.random.default_rng(0)
    for _ in range(N_PROBES):
        position = metric.from_theta(fit.draw(rng, (temperature or 1.0) ** 0.5))
        position = position.astype(gradient.density.dtype)
        total += noise_covariance(gradient, metric, position, rng)
    return finite_noise(total / N_PROBES)


def is_over_rows(first: Any) -> bool:
    """Whether noise is summed over all rows: for thousands of effects, where that is quick.

    Many of them are informed by few rows, which are hardly ever in a minibatch.
    """
    density = first.density
    rows = sum(first.data.n_rows)
    by_thousand = bool(density.group_coefficients) and density.d > MAX_DENSE
    is_at_hand = first.data.n_at_hand == first.data.n_rows
    return by_thousand and first.order.independent and is_at_hand and rows <= MOST_ROWS


def effect_noise_from_all_rows(first: Any, noise: Array | None) -> Array | None:
    """Return the noise of effects, NaN for other parameters; None where it isn't from all rows."""
    if first is None or noise is None or not is_over_rows(first):
        return None
    of_effects = np.full(len(noise), np.nan)
    for place in first.density.group_coefficients.values():
        of_effects[place] = noise[place]
    return of_effects


def noise_over_rows(first: Any, fit: GaussianFit, metric: Metric, temperature: float) -> Array:
    """Mean diagonal of V in φ of first-order control variates over such draws, by all rows."""
    rng = np.random.default_rng(0)
    scale = (temperature or 1.0) ** 0.5
    draws = [fit.draw(rng, scale).astype(first.density.dtype) for _ in range(N_SIGNED)]
    return finite_noise(first.noise_over_rows(draws, metric, rng))


def second_order_noise(
    second: Any, fit: GaussianFit, metric: Metric, temperature: float, is_skewed: bool = False
) -> SecondOrderNoise:
    """Measure the noise at 1 and at 2 sds from the mean, and how large η may become.

    Parameters
    ----------
    second : SecondOrder
    fit : GaussianFit
    metric : Metric
    temperature : float
    is_skewed : bool, default False
        Whether the posterior is much steeper on one side than the fit. A chain seldom comes to 2
        sds there, and bears as many times the noise as the force back is larger than a Gaussian's.
    """
    rng = np.random.default_rng(0)
    T = (temperature or 1.0) ** 0.5
    z = rng.standard_normal((N_EXACT, fit.mean.size))
    if fit.mean.size > MAX_DENSE:  # of thousands some are farther than a chain ever is
        z = np.clip(z, -FAR_ENOUGH, FAR_ENOUGH)
    around = fit.metric
    points = [fit.mean + far * T * around.to_theta(x) for far in (1.0, 2.0) for x in z]
    variances = second_order_variances(second, points, metric)
    # on a Gaussian the force falls off by z sds from the mean to there
    centre = second.anchor.position
    ends = [
        centre + (2 * T * around.to_theta(x)).astype(second.density.dtype)
        for x in (z if is_skewed else z[:N_GROWTH])
    ]
    gradients, share = second.by_many_rows([centre, *ends])
    here, *there = [around.pull_back(gradient) for gradient in gradients]
    changes = [(force - here) / (2 * T) for force in there]
    growth = max(
        float(np.linalg.norm(change + x) / np.linalg.norm(x))
        for change, x in zip(changes[:N_GROWTH], z, strict=False)
    )
    far = variances[N_EXACT:]
    if is_skewed:
        steepness = [
            max(1.0, -float(change @ x) / (x @ x)) for change, x in zip(changes, z, strict=True)
        ]
        far = far / np.array(steepness)[:, None]
    limit = FARTHEST_LEARNING_RATE if growth <= MOST_GROWTH else MAX_LEARNING_RATE
    return SecondOrderNoise(
        near=variances[:N_EXACT].mean(axis=0),
        far=far.mean(axis=0),
        limit=limit,
        passes=len(points) * second.noise_share + len(gradients) * share,
    )


def second_order_variances(second: Any, points: Sequence[Array], coordinates: Metric) -> Array:
    """Diagonal of V of minibatches at each point by all rows, (P, d)."""
    sizes = second.data.batch_sizes
    is_noisy = second.data.is_noisy
    variances = np.array(
        [
            sum(V / n for V, n, noisy in zip(by_group, sizes, is_noisy, strict=True) if noisy)
            for by_group in second.noise_at(points, coordinates)
        ]
    )
    return finite_noise(variances)


def finite_noise(noise: Array) -> Array:
    """Return the noise with a huge number where it has none."""
    return np.nan_to_num(noise, nan=1e100, posinf=1e100)
