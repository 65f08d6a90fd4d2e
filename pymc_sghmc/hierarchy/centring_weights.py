"""How far each effect is centred: by what its rows say of it, beside what its prior says.

Knows passes over the data and a fit of a Gaussian, no models and no samplers.
"""

import math

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.rewrite import MeanField
from pymc_sghmc.phases import begin_phase
from pymc_sghmc.protocols import Array
from pymc_sghmc.tuning.curvature import MAX_DENSE, CountedPasses
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.variational_fit import mean_field, variational_fit

if TYPE_CHECKING:
    from pymc_sghmc.hierarchy.centring import PartialCentring

__all__ = ["chosen_weights"]

STEP = 1e-3  # prior standard deviations, of differences of gradients
N_PAIRS = 8  # of draws ±z from the fit
TINY = 1e-12


class ChosenWeights(NamedTuple):
    """λ of all entries of all effects, and the fits that they were chosen by."""

    weights: Array
    independent: MeanField | None = None  # with λ = 0
    start: Array | None = None  # where a fit with these weights began, in their coordinates, ...
    fit: GaussianFit | None = None  # ... that converged


def chosen_weights(
    gradient: MinibatchGradient, centring: "PartialCentring", start: Array
) -> ChosenWeights:
    """Choose λ of all entries of all effects.

    r is the curvature of an effect's likelihood over that of its prior, and λ = r/(1 + r). Both are
    taken at draws from a Gaussian that is fitted with λ = 0: with λ = 1 such fits end at scales of
    zero where r is small, and would read r = 0 there.

    Parameters
    ----------
    gradient : MinibatchGradient
    centring : PartialCentring
        Whose ``weights`` are changed on the way.
    start : array of shape (d,)
        Where the fit begins, in the model's own coordinates.
    """
    begin_phase("choosing how far effects are centred")
    density = gradient.density
    counted = CountedPasses(gradient.passes)
    none = np.zeros_like(centring.as_written)
    centring.weights = none
    independent = mean_field(counted, density.from_model(start).astype(float))
    if independent is None:
        return ChosenWeights(centring.as_written)
    ratios, below = _ratios(counted, *independent, centring.group_coefficients.values())
    by_ratios = ratios / (1 + ratios)
    if start.size > MAX_DENSE:
        return ChosenWeights(by_ratios, independent)
    for weights in (by_ratios, below * ratios / (1 + below * ratios), none):
        centring.weights = weights
        own_start = density.from_model(start).astype(float)
        fit = variational_fit(counted, own_start, centring.carried(independent))
        if fit is not None and fit.is_mode:
            return ChosenWeights(weights, independent, own_start, fit)
    return ChosenWeights(by_ratios, independent)


def _ratios(
    counted: CountedPasses, mean: Array, sds: Array, places: Iterable[slice]
) -> tuple[Array, Array]:
    """Curvature of the likelihood in each effect's prior standard deviations, and its least factor.

    It goes with the square of the scale τ. The latter is a factor for τ one standard deviation
    below its mean: where τ is hardly known, a form may have to serve small ones rather than the
    usual.
    """
    rng = np.random.default_rng(0)
    half = rng.standard_normal((N_PAIRS, mean.size))
    half /= np.sqrt(np.square(half).mean(axis=0))  # their mean square is 1
    found: dict[tuple[int, int], list[Array]] = {(place.start, place.stop): [] for place in places}
    for z in (*half, *-half):
        point = mean + sds * z
        exact = counted.likelihood_curvatures(point)
        if exact is not None:
            for start, stop in found:
                found[start, stop].append(exact[start:stop])
            continue
        here = counted.likelihood(point)
        for start, stop in found:
            # the diagonal; signs let what entries mean to each other cancel, if they do
            # (Hutchinson)
            moved = point.copy()
            signs = rng.choice([-1.0, 1.0], size=stop - start)
            moved[start:stop] += STEP * signs
            there = counted.likelihood(moved)
            found[start, stop].append(signs * (here - there)[start:stop] / STEP)
    ratios = []
    factors = []
    for by_draw in map(np.array, found.values()):
        over_draws = np.log(np.maximum(np.nan_to_num(by_draw).mean(axis=1), TINY))
        ratios.append(np.maximum(np.nan_to_num(by_draw.mean(axis=0)), 0.0))
        factors.append(np.full(by_draw.shape[1], math.exp(-over_draws.std())))
    return np.concatenate(ratios), np.concatenate(factors)
