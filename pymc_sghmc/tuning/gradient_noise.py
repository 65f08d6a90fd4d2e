"""Noise of all gradients around a fit, and what control variates know at its mean.

Knows gradients and fits, no settings.
"""

import logging

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pymc_sghmc.exceptions import NonFinite
from pymc_sghmc.gradients.metric import Array, Dense, Metric
from pymc_sghmc.gradients.noise import RowGradient
from pymc_sghmc.gradients.passes import Passes
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE
from pymc_sghmc.tuning.far_noise import (
    HEAT,
    HEAT_OF_LESS,
    noise_along_parameters,
    noise_at_edges,
    noise_of_far_effects,
)
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.gaussianity import FarOut, far_out
from pymc_sghmc.tuning.noise_around import (
    N_SIGNED,
    SecondOrderNoise,
    is_over_rows,
    noise_around,
    noise_over_rows,
    second_order_noise,
)
from pymc_sghmc.tuning.pool_report import pool_report

__all__ = ["MOST_FAR_NOISE", "Anchors", "Measured", "Noise", "TunedGradient", "measure_noise"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

MOST_FAR_NOISE = (
    5.0  # variance in φ at 2 sds above which second-order control variates are given up
)


class TunedGradient(RowGradient, Protocol):
    """A gradient that set-ups and the tuner can work with: see `MinibatchGradient`."""

    @property
    def passes(self) -> Passes:
        """Sums over all rows."""

    @property
    def is_exact(self) -> bool:
        """Whether every minibatch is all of the data."""


class Noise(NamedTuple):
    """Diagonal of V̂ in φ, (d,), of each gradient; None where it isn't used."""

    plain: Array
    first_order: Array | None
    second_order: Array | None
    second_order_far: float = np.inf  # the largest variance at 2 sds, or what is as unsafe

    @property
    def second_order_serves(self) -> bool:
        """Whether these control variates are safe with the rows that they were measured with."""
        return self.second_order is not None and self.second_order_far <= MOST_FAR_NOISE


class Anchors(NamedTuple):
    """What control variates know of all rows at the reference point; None if not used."""

    first_order: Any
    second_order: Any


class Measured(NamedTuple):
    """Noise around a fit, and what control variates know there."""

    noise: Noise
    anchors: Anchors
    limit: float  # of the learning rate with second order
    passes: float
    far_out: FarOut  # along skewed parameters


def measure_noise(
    gradient: TunedGradient,
    expansions: Sequence[Any],
    fit: GaussianFit,
    metric: Metric,
    temperature: float,
    most_far_noise: float,
) -> Measured:
    """Give control variates their reference points, and measure the noise of all gradients.

    Those of second order are given up with more noise than ``most_far_noise`` at 2 sds.
    """
    first, second = expansions
    density = gradient.density
    skewed = FarOut(np.inf, [])
    if isinstance(fit.metric, Dense):
        has_groups = bool(density.group_coefficients)  # whose scales are looked at elsewhere
        places = density.transformed_in_rows if has_groups else density.transformed
        finds_more = not (density.has_long_tails or has_groups)
        skewed = far_out(gradient.passes, fit, places, finds_more)
    passes = 0.0
    near_by = None
    far = np.inf
    limit = MAX_LEARNING_RATE
    noise = None
    if second is not None:
        noise = _noise_of_second(second, fit, metric, temperature, skewed)
    if noise is not None:
        passes += noise.passes
        limit = noise.limit
        far = noise.far
        near_by = noise.near if far <= most_far_noise else None
    if near_by is None:
        second = None
    of_first = None
    if first is not None and second is None:
        gradient.data.enlarge_pool()
        passes += first.set_centre(fit.mean, fit.metric)
        if is_over_rows(first):
            of_first = noise_over_rows(first, fit, metric, temperature)
            passes += 3 * N_SIGNED
        else:
            of_first = noise_around(first, fit, metric, temperature)
    plain = noise_around(gradient, fit, metric, temperature)
    return Measured(
        noise=Noise(plain=plain, first_order=of_first, second_order=near_by, second_order_far=far),
        anchors=Anchors(
            first_order=None if of_first is None else first.anchor,
            second_order=None if near_by is None else second.anchor,
        ),
        limit=limit,
        passes=passes,
        far_out=skewed,
    )


class _NoiseOfSecond(NamedTuple):
    """Noise of second-order control variates around a fit."""

    near: Array
    far: float  # the largest at 2 sds, or what is as unsafe
    limit: float  # of the learning rate
    passes: float


def _noise_of_second(
    second: Any, fit: GaussianFit, metric: Metric, temperature: float, skewed: FarOut
) -> _NoiseOfSecond | None:
    """Give them their reference point and measure their noise.

    None where they are wrong, or derivatives can't be found: they are of no use then.
    """
    try:
        if not second.is_right(fit.mean, fit.metric):
            _log.warning(
                "Second-order control variates don't agree with the gradient of this model, so "
                "that those of first order take their place. Please report the model."
            )
            return None
        noise = _around_centre(second, fit, metric, temperature, bool(skewed.edges))
        at_edges = noise_at_edges(second, fit, metric, skewed.edges)
    except NonFinite:
        return None
    passes = noise.passes + len(skewed.edges) * second.noise_share
    far = max(float(noise.far.max()), MOST_FAR_NOISE * at_edges)
    if second.density.has_long_tails:
        far = max(far, MOST_FAR_NOISE * noise_along_parameters(second, fit, metric))
    elif second.density.group_coefficients:
        heat = HEAT if noise.limit > MAX_LEARNING_RATE else HEAT_OF_LESS
        of_effects = noise_of_far_effects(second, fit, heat)
        far = max(far, MOST_FAR_NOISE * of_effects.largest)
        passes += of_effects.passes
    return _NoiseOfSecond(near=noise.near, far=far, limit=noise.limit, passes=passes)


def _around_centre(
    second: Any, fit: GaussianFit, metric: Metric, temperature: float, is_skewed: bool
) -> SecondOrderNoise:
    """Give second-order control variates their centre, and a pool that serves if there is one."""
    passes = second.set_centre(fit.mean, fit.metric)
    noise = second_order_noise(second, fit, metric, temperature, is_skewed)
    pool = pool_report(second, noise.near, None, fit, metric)
    if pool is not None and not pool.serves:
        passes += noise.passes
        second.data.enlarge_pool()
        passes += second.set_centre(fit.mean, fit.metric)
        noise = second_order_noise(second, fit, metric, temperature, is_skewed)
    return noise._replace(passes=passes + noise.passes)
