"""The temperatures that a run reported, draw by draw. Knows arrays and ArviZ, no steps."""

from typing import NamedTuple

import arviz as az
import numpy as np

__all__ = ["StepStatistics", "mean_and_error", "step_statistics"]


class StepStatistics(NamedTuple):
    """What one stochastic-gradient step reported; arrays of shape (chain, draw)."""

    configurational: np.ndarray
    kinetic: np.ndarray
    target: np.ndarray
    weight: np.ndarray


def step_statistics(idata) -> list[StepStatistics]:
    """Return the statistics of each stochastic-gradient step of the run, none where it has none."""
    stats = getattr(idata, "sample_stats", {})
    if "configurational_temperature" not in stats:
        return []
    configurational = _by_step(stats["configurational_temperature"])
    kinetic = [np.full_like(values, np.nan) for values in configurational]
    if "kinetic_temperature" in stats:
        kinetic = _by_step(stats["kinetic_temperature"])
    others = (_by_step(stats[name]) for name in ("target_temperature", "draw_weight"))
    return [
        StepStatistics(*arrays) for arrays in zip(configurational, kinetic, *others, strict=True)
    ]


def mean_and_error(measured, target, weight) -> tuple[float, float]:
    """Mean over the target, draws counted by weight, and its Monte Carlo error; NaN where none."""
    used = np.isfinite(measured).all(axis=0) & (target > 0).all(axis=0)
    if used.sum() < 4:
        return np.nan, np.nan
    # within a chain: chains count alike, even where each has found its own learning rate
    weight = weight[:, used] / weight[:, used].mean(axis=1, keepdims=True)
    ratio = measured[:, used] / target[:, used]
    mean = np.mean(ratio * weight)
    return mean, float(np.squeeze(az.mcse((ratio - mean) * weight)))


def _by_step(stat) -> list[np.ndarray]:
    """Arrays of shape (chain, draw), one for each step method that reports the statistic."""
    values = np.asarray(stat.transpose("chain", "draw", ...), dtype=float)
    flat = values.reshape(*values.shape[:2], -1)  # (chain, draw, step)
    return [flat[..., i] for i in range(flat.shape[2])]
