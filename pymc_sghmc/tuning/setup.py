"""What a chain knows before its first draw: centre, coordinates, and the gradient's noise there.

Deterministic, so that all chains from one starting point share it. Knows gradients and centres,
no samplers.
"""

import logging
import math

from typing import NamedTuple

import numpy as np

from scipy.linalg import solve_triangular

from pymc_sghmc.gradients.metric import Dense, Identity, LowRank, Metric, preconditioner_metric
from pymc_sghmc.tuning.budget import MAX_LEARNING_RATE
from pymc_sghmc.tuning.centre import Centre, find_centre, near
from pymc_sghmc.tuning.curvature import MAX_DENSE, extreme_curvatures
from pymc_sghmc.tuning.noise_around import (
    N_EXACT,
    N_SIGNED,
    is_over_rows,
    noise_around,
    noise_at_edge,
    noise_over_rows,
    second_order_noise,
)
from pymc_sghmc.tuning.walls import walls

__all__ = ["MOST_FAR_NOISE", "Setup", "same_inputs", "set_up"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

FAR_OUT = 1.5  # sds; points there; and a share of them
N_FAR_OUT = 16
MOST_POINTS = 0.75
NOISY = 4  # times the median noise, above which a direction gets a scale of its own
MOST_FAR_NOISE = (
    5.0  # variance in φ at 2 sds above which second-order control variates are given up
)
SLOW = 0.01  # curvature of the slowest direction over the stiffest where nobody has measured it


class Noise(NamedTuple):
    """Diagonal of V̂ in φ, (d,), of each gradient; None where there is none."""

    plain: np.ndarray
    first_order: np.ndarray | None
    second_order: np.ndarray | None


class Setup(NamedTuple):
    """Centre, coordinates φ with θ = Lφ, extreme curvatures in them, and noise in them."""

    key: tuple  # of the start, the other unknowns and the data that it holds for
    centre: Centre
    metric: Metric
    phi: np.ndarray | None  # the centre in them, where they are of unit scale in all directions
    stiffness: float  # largest and ...
    slowness: float  # ... smallest curvature of −log p in φ
    anchors: tuple  # of control variates of first and of second order, or None
    limit: float  # of the learning rate of second-order ones
    far_noise: float  # largest variance of theirs at 2 sds, or what is as unsafe farther out
    passes: float  # over all data, with and without gradients
    noise: Noise
    far_limit: float = np.inf  # of the learning rate, by the curvature far out
    is_near: bool = True  # whether far out it is like a Gaussian, where that was asked
    nodes: tuple | None = None  # how many for each number of a group, and where: see `Marginal.use`


def set_up(
    gradient, expansions, start, key, *, preconditioner, optimise, temperature, earlier=None
) -> Setup:
    """Find the centre from ``start`` and measure the noise of all gradients around it.

    Parameters
    ----------
    gradient : MinibatchGradient
    expansions : tuple
        Control variates of first and of second order, or None: they get their centres here, those
        of first order only where the others don't serve.
    start : array of shape (d,)
    preconditioner : {"auto", "diag", "dense"}, array or None
        An array is M⁻¹.
    optimise : bool
        ``False``: ``start`` is the centre.
    temperature : float
        The noise is measured at draws from the Gaussian at the centre with this temperature.
    earlier : Metric, optional
        Of an earlier centre.
    """
    gradient.data.resize(None)
    d = start.size
    kind = preconditioner if isinstance(preconditioner, str) else None
    dense = kind == "dense" or d <= MAX_DENSE
    centre = find_centre(gradient.passes, start, dense, optimise, earlier)
    spread = centre.metric
    if kind == "dense" or (kind == "auto" and dense):
        metric = spread
        stiffness = 1.0
        slowness = 1.0
    else:
        if kind is None:
            is_none = preconditioner is None
            metric = Identity(d) if is_none else preconditioner_metric(preconditioner, d)
        elif isinstance(spread, Dense) or kind == "diag":
            metric = spread.diagonal()
        else:
            metric = spread
        stiffness, slowness = _extreme_curvatures(gradient.passes, centre, metric)
        if kind is not None:
            metric = metric.shrunk(stiffness**-0.5)
            slowness = slowness / stiffness
            stiffness = 1.0
    metric = metric.astype(gradient.density.dtype)
    passes = centre.passes
    first, second = expansions
    near_by = None
    far = np.inf
    limit = MAX_LEARNING_RATE
    if second is not None and not second.is_right(centre.position, centre.metric):
        _log.warning(
            "Second-order control variates don't agree with the gradient of this model, so that "
            "those of first order take their place. Please report the model."
        )
        second = None
    if second is not None:
        passes += second.set_centre(centre.position, centre.metric)
        near_by, far, limit = second_order_noise(second, centre, metric, temperature)
        passes += 2 * N_EXACT
        far = float(far.max())
        if gradient.density.marginal is not None:
            far = max(far, MOST_FAR_NOISE * noise_at_edge(second, centre, metric))
        if not far <= MOST_FAR_NOISE:
            second = None
    of_first = None
    if first is not None and second is None:
        passes += first.set_centre(centre.position, centre.metric)
        over_rows = is_over_rows(first)
        measure = noise_over_rows if over_rows else noise_around
        of_first = measure(first, centre, metric, temperature)
        passes += 3 * N_SIGNED * over_rows
    noise = Noise(
        noise_around(gradient, centre, metric, temperature),
        of_first,
        near_by if second is not None else None,
    )
    anchors = tuple(
        e.anchor if V is not None else None for e, V in zip(expansions, noise[1:], strict=True)
    )
    if kind is not None:
        # Directions in which the gradient is much noisier than in most would slow down all of them.
        known = [V for V in noise if V is not None]
        least = min(known, key=np.sum)
        # of thousands, each measured roughly, the mean is known better than any
        bearable = 2 * least.mean() if isinstance(metric, LowRank) else NOISY * np.median(least)
        shrink = np.minimum(1.0, max(bearable, 1.0) / np.maximum(least, 1e-300))
        metric = metric.shrunk(np.sqrt(shrink))
        noise = Noise(*(None if V is None else V * shrink for V in noise))
        if not isinstance(metric, LowRank):  # few of thousands don't set the friction of all
            slowness = slowness * float(shrink.min())
    is_own = kind is not None and isinstance(metric, Dense)
    phi = metric.from_theta(centre.position) if is_own else None
    slopes = stiffness, slowness, anchors, limit, far
    far_limit = np.inf
    if kind is not None and gradient.density.centring is not None:
        far_limit = _far_limit(gradient.passes, centre, metric)
    is_near = True
    marginal = gradient.density.marginal
    if kind is not None and marginal is not None and dense:
        wall, is_near = walls(gradient.passes, centre)
        far_limit = min(far_limit, wall)
    nodes = None if marginal is None else (marginal.n_nodes, marginal.placed, marginal.error)
    return Setup(key, centre, metric, phi, *slopes, passes, noise, far_limit, is_near, nodes)


def _extreme_curvatures(passes, centre, metric):
    """Largest and smallest eigenvalue of LᵀHL, with H⁻¹ = SSᵀ from the centre where that is known."""
    spread = centre.metric
    if isinstance(spread, Dense):
        ratio = solve_triangular(spread.factor, metric.matrix(), lower=True)
        scales = np.linalg.svd(ratio, compute_uv=False) ** 2
        return float(scales[0]), float(scales[-1])
    slowest, stiffest = extreme_curvatures(passes, centre.position, metric)
    return stiffest, SLOW * stiffest if slowest is None else slowest


def _far_limit(passes, centre, metric):
    """One over the largest curvature at most points as far out as chains often are.

    A scale and its effects make a funnel, in the neck of which the curvature is many times that of
    the centre.
    """
    rng = np.random.default_rng(0)
    points = [near(centre, rng, FAR_OUT) for _ in range(N_FAR_OUT)]
    found = [extreme_curvatures(passes, point, metric, only_largest=True)[1] for point in points]
    known = [one for one in found if math.isfinite(one)]
    return 1 / np.quantile(known, MOST_POINTS) if known else np.inf


def same_inputs(key, other) -> bool:
    """Whether two keys have equal starts and other unknowns, and the very same data."""
    (start, optimise, given, arrays), (start_2, optimise_2, given_2, arrays_2) = key, other
    return (
        np.array_equal(start, start_2)
        and optimise == optimise_2
        and all(map(np.array_equal, given, given_2))
        and same_arrays(arrays, arrays_2)
    )


def same_arrays(arrays, others) -> bool:
    """Whether arrays lie at the very same places in memory."""
    return len(arrays) == len(others) and all(
        a.shape == b.shape and a.__array_interface__["data"] == b.__array_interface__["data"]
        for a, b in zip(arrays, others, strict=True)
    )
