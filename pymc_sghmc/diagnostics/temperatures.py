"""The temperatures that a run reported, and what they say of its bias. Knows no steps, no models."""

from typing import NamedTuple

import arviz as az
import numpy as np

from pymc.stats.convergence import SamplerWarning, WarningType

__all__ = [
    "StepStatistics",
    "configurational_temperature",
    "mean_and_error",
    "step_statistics",
    "temperature_warnings",
]


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


def configurational_temperature(idata) -> tuple[np.ndarray, np.ndarray]:
    """Return the configurational temperature over the target's, with its Monte Carlo standard error.

    By the virial theorem E[(θ−c)·∇U(θ)]/d is the temperature of the law that the chain samples,
    for any integrator and with gradient noise. For a Gaussian posterior of covariance P it equals
    tr(P⁻¹Σ)/d, Σ being the draws' covariance: the mean ratio of variances along axes that whiten
    the posterior. So 1.2 means standard deviations about 10 % too large. Draws count by their
    ``draw_weight``.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` returned.

    Returns
    -------
    mean, error : array of shape (number of stochastic-gradient steps,)
        One entry for each stochastic-gradient step method of the run; empty where there is none.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> from pymc_sghmc.diagnostics import configurational_temperature
    >>> rng = np.random.default_rng(0)
    >>> draws = (("chain", "draw"), 1.2 + 0.1 * rng.standard_normal((4, 1000)))
    >>> ones = (("chain", "draw"), np.ones((4, 1000)))
    >>> stats = xr.Dataset(
    ...     {"configurational_temperature": draws, "target_temperature": ones, "draw_weight": ones}
    ... )
    >>> mean, error = configurational_temperature(xr.DataTree.from_dict({"sample_stats": stats}))
    >>> mean.round(2), error.round(3)
    (array([1.2]), array([0.002]))
    """
    measured = [
        mean_and_error(step.configurational, step.target, step.weight)
        for step in step_statistics(idata)
    ]
    known = [pair for pair in measured if np.isfinite(pair[0])]
    means, errors = np.array(known).reshape(-1, 2).T
    return means, errors


def temperature_warnings(idata) -> list[SamplerWarning]:
    """Warn, once for all steps, where a temperature is off by 10 % and by three standard errors."""
    means, errors = configurational_temperature(idata)
    texts = []
    for i, (mean, error) in enumerate(zip(means, errors, strict=True)):
        which = f" of stochastic-gradient step {i + 1} of {len(means)}" if len(means) > 1 else ""
        text = f"The configurational temperature{which} is {mean:.3g} ± {error:.2g} times what it should be"
        if abs(mean - 1) > max(0.1, 3 * error):
            if mean > 1:
                text += (
                    f": posterior variances are about {mean:.3g} times the true ones, as a mean "
                    "over all directions; check_bias tells of each unknown. Lower learning_rate "
                    "or target_bias, raise batch_size, or leave more settings to the step; where "
                    "the posterior is far from a Gaussian, use NUTS."
                )
            else:
                text += (
                    ": the chains haven't reached the posterior yet or move too slowly. Raise tune "
                    "and draws, or leave more settings to the step."
                )
            texts.append(text)
        elif error > 0.2:
            texts.append(
                f"{text}, too uncertain to tell whether the posterior is right: the chains differ "
                "or are too short. Raise tune and draws."
            )
    if not texts:
        return []
    return [SamplerWarning(WarningType.BAD_PARAMS, " ".join(texts), "warn")]


def _by_step(stat) -> list[np.ndarray]:
    """Arrays of shape (chain, draw), one for each step method that reports the statistic."""
    values = np.asarray(stat.transpose("chain", "draw", ...), dtype=float)
    flat = values.reshape(*values.shape[:2], -1)  # (chain, draw, step)
    return [flat[..., i] for i in range(flat.shape[2])]
