"""How noisy gradients are around a centre: near it, far from it, over minibatches or over all rows.

Knows gradients and centres, no samplers.
"""

import numpy as np

from pymc_sghmc.gradients.noise import noise_covariance
from pymc_sghmc.tuning.budget import FARTHEST_LEARNING_RATE
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE
from pymc_sghmc.tuning.curvature import MAX_DENSE

__all__ = [
    "N_EXACT",
    "N_SIGNED",
    "is_over_rows",
    "known_of_effects",
    "noise_around",
    "noise_at_edge",
    "noise_over_rows",
    "second_order_noise",
]

N_PROBES = 20  # points near the centre at which the noise is measured, and ...
N_SIGNED = 64  # ... with random signs, over all rows
MOST_ROWS = 300_000  # of which that is done
N_EXACT = 4  # points at each distance at which second-order noise is summed over all rows, and ...
FAR_ENOUGH = 2.0  # times 1 and 2 sds, in any one of thousands of directions
N_GROWTH = 2  # ... at which all rows tell how much the curvature changes
EDGE = 4.0  # sds along each unknown, and variance of second-order noise of groups
MOST_AT_EDGE = 0.5
MOST_GROWTH = 0.5  # of the curvature, relative, at 2 sds, with which steps may be long


def noise_around(gradient, fit, coordinates, temperature):
    """Mean diagonal of V̂ in φ over draws from the Gaussian at the centre, by minibatches."""
    total = np.zeros(fit.mean.size)
    if not any(gradient.data.is_noisy):
        return total
    rng = np.random.default_rng(0)
    for _ in range(N_PROBES):
        position = coordinates.from_theta(fit.draw(rng, (temperature or 1.0) ** 0.5))
        position = position.astype(gradient.density.dtype)
        total += noise_covariance(gradient, coordinates, position, rng)
    return _finite(total / N_PROBES)


def is_over_rows(first) -> bool:
    """Whether noise is summed over all rows: of effects by the thousand, where that doesn't take long.

    Many of them are known to few rows, which minibatches hardly meet.
    """
    density = first.density
    rows = sum(first.data.n_rows)
    by_thousand = bool(density.group_coefficients) and density.d > MAX_DENSE
    return by_thousand and first.order.independent and rows <= MOST_ROWS


def known_of_effects(first, noise):
    """Return what all rows told of effects' noise, NaN for others; None where they weren't asked."""
    if first is None or not is_over_rows(first):
        return None
    of_effects = np.full(len(noise), np.nan)
    for place in first.density.group_coefficients.values():
        of_effects[place] = noise[place]
    return of_effects


def noise_over_rows(first, fit, coordinates, temperature):
    """Mean diagonal of V in φ of first-order control variates over such draws, by all rows."""
    rng = np.random.default_rng(0)
    scale = (temperature or 1.0) ** 0.5
    draws = [fit.draw(rng, scale).astype(first.density.dtype) for _ in range(N_SIGNED)]
    return _finite(first.noise_over_rows(draws, coordinates, rng))


def noise_at_edge(second, fit, coordinates) -> float:
    """Largest variance in φ as far out along any unknown as chains come now and then, over what is safe there.

    Where effects are integrated out, few unknowns are left, a scale with a long tail often among
    them, and noise that grows fast along it sends a chain on.
    """
    around = fit.metric
    [n] = second.data.batch_sizes
    directions = [around.pull_back(one) for one in np.eye(fit.mean.size)]
    directions = [one / max(np.linalg.norm(one), 1e-300) for one in directions for _ in range(2)]
    shifts = [EDGE * around.to_theta(one) for one in directions]
    ends = [fit.mean + shift * (-1) ** i for i, shift in enumerate(shifts)]
    found = second.noise_at(ends, coordinates)
    worst = [_finite(V) @ np.square(one) for [V], one in zip(found, directions, strict=True)]
    return float(np.max(worst)) / n / MOST_AT_EDGE


def _finite(noise):
    return np.nan_to_num(noise, nan=1e100, posinf=1e100)


def second_order_noise(second, fit, coordinates, temperature):
    """Diagonal of V in φ at 1 and at 2 sds from the centre, and how large η may become."""
    rng = np.random.default_rng(0)
    T = (temperature or 1.0) ** 0.5
    z = rng.standard_normal((N_EXACT, fit.mean.size))
    if fit.mean.size > MAX_DENSE:  # of thousands some are farther than a chain ever is
        z = np.clip(z, -FAR_ENOUGH, FAR_ENOUGH)
    around = fit.metric
    points = [fit.mean + far * T * around.to_theta(x) for far in (1.0, 2.0) for x in z]
    sizes = second.data.batch_sizes
    is_noisy = second.data.is_noisy
    found = np.array(
        [
            sum(V / n for V, n, noisy in zip(by_group, sizes, is_noisy, strict=True) if noisy)
            for by_group in second.noise_at(points, coordinates)
        ]
    )
    found = _finite(found)
    # on a Gaussian the force falls off by z sds from the centre to there
    passes = second.passes
    here = around.pull_back(passes.log_density(second.anchor.centre)[1])
    growth = 0.0
    for x in z[:N_GROWTH]:
        far = second.anchor.centre + (2 * T * around.to_theta(x)).astype(second.density.dtype)
        there = around.pull_back(passes.log_density(far)[1])
        growth = max(growth, np.linalg.norm((there - here) / (2 * T) + x) / np.linalg.norm(x))
    limit = FARTHEST_LEARNING_RATE if growth <= MOST_GROWTH else MAX_LEARNING_RATE
    return found[:N_EXACT].mean(axis=0), found[N_EXACT:].mean(axis=0), limit
