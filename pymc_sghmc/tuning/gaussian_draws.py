"""What draws from a Gaussian say of it: how far it is from a posterior, and how wide it should be.

Knows passes over the data, and no way of finding a Gaussian.
"""

import math

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pymc_sghmc.gradients.metric import Array, Metric
from pymc_sghmc.tuning.curvature import CountedPasses, Rows
from pymc_sghmc.tuning.gaussian_fit import GaussianFit

__all__ = ["evidence_bound", "excess_forces", "is_rough", "scaled_by_draws"]

ROUNDS_BY_DRAWS = 12
FLATTEST = 0.1  # mean curvature by which a column is made longer in one of them, at most, ...
STEEPEST = 256.0  # ... and shorter, ...
PART = 0.25  # ... by this power; one half would be all of the way
N_COMPARED = 10  # pairs of draws by which Gaussians are compared, ...
NUMBERS_COMPARED = 100  # ... and more where they have fewer numbers than these in all
ROUGH = 0.8  # r.m.s. of the force that a Gaussian doesn't have, in sds, above which it is none


def evidence_bound(counted: CountedPasses, fit: GaussianFit, by_all: bool = False) -> float:
    """Return the lower bound of the evidence, up to a constant, that the best Gaussian has most of.

    By other draws than those that Gaussians are fitted with; −∞ where one isn't finite.

    Parameters
    ----------
    counted : CountedPasses
    fit : GaussianFit
    by_all : bool, default False
        Whether by all rows instead of the subset, whose mode is many of its standard deviations
        from that of all rows.
    """
    rows = None if by_all else counted.subset
    return _around(counted, fit.mean, fit.metric.matrix(), rows).bound


class _Around(NamedTuple):
    """What draws from a Gaussian say of it."""

    bound: float  # of the evidence
    curvatures: Array  # mean ones along its columns, by the forces at the draws, (d,)


def _around(counted: CountedPasses, mean: Array, factor: Array, rows: Rows) -> _Around:
    n_pairs = max(N_COMPARED, NUMBERS_COMPARED // mean.size)
    half = np.random.default_rng(1).standard_normal((n_pairs, mean.size))
    z = np.concatenate([half, -half])
    there = [counted(mean + factor @ x, rows) for x in z]
    entropy = np.log(np.abs(np.diag(factor))).sum()
    bound = float(np.mean([level for level, _ in there]) + entropy)
    forces = np.array([factor.T @ gradient for _, gradient in there])
    curvatures = -(z * forces).mean(axis=0) / np.square(z).mean(axis=0)
    return _Around(bound if math.isfinite(bound) else -math.inf, curvatures)


def scaled_by_draws(counted: CountedPasses, mean: Array, factor: Array) -> Array:
    """Scale the columns of a factor until forces at draws are those of the Gaussian, on average.

    By a part of the way in each round: beyond a wall they are too large, and before it too small.
    The best of all by the bound of the evidence.

    Parameters
    ----------
    counted : CountedPasses
    mean : array of shape (d,)
    factor : array of shape (d, d)
        Lower triangular.
    """
    best = factor
    best_bound = -math.inf
    for _ in range(ROUNDS_BY_DRAWS):
        around = _around(counted, mean, factor, counted.subset)
        if around.bound > best_bound:
            best = factor
            best_bound = around.bound
        curvatures = np.nan_to_num(around.curvatures, nan=STEEPEST, posinf=STEEPEST)
        # a negative one says nothing of the width
        curvatures = np.where(curvatures > 0, np.clip(curvatures, FLATTEST, STEEPEST), 1.0)
        factor = factor * curvatures**-PART
    return best


def excess_forces(metric: Metric, gradients: Sequence[Array], z: Array) -> Array:
    """Return forces at standard draws z, in sds, beside those of a Gaussian, −z; (k, d)."""
    return np.add([metric.pull_back(gradient) for gradient in gradients], z)


def is_rough(
    counted: CountedPasses, m: Array, metric: Metric, z: Array, of_mean: bool = True
) -> bool:
    """Whether forces at the draws z are far from a Gaussian's, −z, in some direction.

    With the force that all of them have in common, or without.

    Few draws may all be near zero along some direction, where a force that is missing is small.
    What is large beside how far they spread is looked at again, one sd away along that direction
    alone: it may as well come from what the draws are in others.
    """
    rest = _rest_at(counted, m, metric, z)
    common = 0.0 if of_mean else rest.mean(axis=0)
    rough = np.sqrt(np.square(rest - common).mean(axis=0))
    if not (np.isfinite(rough).all() and rough.max() < ROUGH):
        return True
    spread = np.sqrt(np.square(z).mean(axis=0))
    for i in np.flatnonzero(rough >= ROUGH * spread):
        one_sd = np.zeros((2, m.size))
        one_sd[:, i] = [1.0, -1.0]
        rest = _rest_at(counted, m, metric, one_sd) - common
        if not np.sqrt(np.square(rest[:, i]).mean()) < ROUGH:
            return True
    return False


def _rest_at(counted: CountedPasses, m: Array, metric: Metric, z: Array) -> Array:
    gradients = [counted(m + metric.to_theta(x), counted.subset)[1] for x in z]
    return excess_forces(metric, gradients, z)
