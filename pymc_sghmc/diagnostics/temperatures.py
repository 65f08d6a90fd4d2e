"""The temperatures of a run, and the warning if they are wrong. Knows no steps, no models."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import arviz as az
import numpy as np

from pymc.stats.convergence import SamplerWarning, WarningType

__all__ = [
    "StepStatistics",
    "by_step",
    "configurational_temperature",
    "draw_weights",
    "mean_and_error",
    "some_draws",
    "step_statistics",
    "target_temperature",
    "temperature_warnings",
]

MIN_DRAWS = 100  # over all chains; the error of a mean over fewer correlated draws is too small


class StepStatistics(NamedTuple):
    """Statistics of one stochastic-gradient step; arrays of shape (chain, draw)."""

    configurational: np.ndarray
    kinetic: np.ndarray
    target: np.ndarray
    weight: np.ndarray


def step_statistics(idata: Any) -> list[StepStatistics]:
    """Return the statistics of each stochastic-gradient step of the run, [] if it has none."""
    stats = getattr(idata, "sample_stats", {})
    if "configurational_temperature" not in stats:
        return []
    configurational = by_step(stats["configurational_temperature"])
    kinetic = [np.full_like(values, np.nan) for values in configurational]
    if "kinetic_temperature" in stats:
        kinetic = by_step(stats["kinetic_temperature"])
    targets = by_step(stats["target_temperature"])
    weights = by_step(stats["draw_weight"])
    return [
        StepStatistics(configurational=c, kinetic=k, target=t, weight=w)
        for c, k, t, w in zip(configurational, kinetic, targets, weights, strict=True)
    ]


def target_temperature(steps: list[StepStatistics], caller: str = "check_bias") -> float:
    """Return the one temperature of all steps, above zero; 1 where no step has any."""
    counted = [step.target[step.weight > 0] for step in steps]  # draws that explore have no target
    targets = {float(t) for target in counted for t in np.unique(target) if np.isfinite(t)}
    if len(targets) > 1 or targets == {0.0}:
        raise ValueError(
            f"{caller}: this run has the temperatures {sorted(targets)}. Draws can be compared "
            "with a posterior only if all steps have the same temperature, above zero. Sample "
            "with temperature=1."
        )
    return targets.pop() if targets else 1.0


def draw_weights(steps: list[StepStatistics], n_chains: int, n_all: int) -> np.ndarray:
    """Weights of the draws, where all stochastic-gradient steps agree on them."""
    with np.errstate(invalid="ignore"):  # of chains that have diverged in each draw all are zero
        weights = [
            np.nan_to_num(step.weight / np.nanmean(step.weight, axis=1, keepdims=True))
            for step in steps
        ]
    if weights and all(np.allclose(weight, weights[0]) for weight in weights):
        return weights[0]
    return np.ones((n_chains, n_all))


def some_draws(idata: Any, draws: Mapping[str, np.ndarray], n_draws: int) -> dict[str, np.ndarray]:
    """Return so many draws of all chains, evenly spaced by their weights.

    Parameters
    ----------
    idata : InferenceData or DataTree
    draws : dict of {str: array}
        All draws of each parameter, (chain, draw, ...).
    n_draws : int
    """
    n_chains, n_all = next(iter(draws.values())).shape[:2]
    weights = draw_weights(step_statistics(idata), n_chains, n_all)
    n = min(max(1, n_draws // n_chains), int((weights > 0).sum(axis=1).min()))
    places = (np.arange(n) + 0.5) / n
    sums = np.cumsum(weights, axis=1)
    chosen = np.array([np.searchsorted(total, places * total[-1]) for total in sums])
    chains = np.arange(n_chains)[:, None]
    return {name: values[chains, chosen] for name, values in draws.items()}


def mean_and_error(
    measured: np.ndarray, target: np.ndarray, weight: np.ndarray
) -> tuple[float, float]:
    """Return the weighted mean over the target and its Monte Carlo error, NaN of too few draws."""
    used = np.isfinite(measured).all(axis=0) & (target > 0).all(axis=0)
    if used.sum() < 4:
        return np.nan, np.nan
    # within a chain: chains count alike, even where each has found its own learning rate
    weight = weight[:, used] / weight[:, used].mean(axis=1, keepdims=True)
    ratio = measured[:, used] / target[:, used]
    mean = np.mean(ratio * weight)
    return mean, float(np.squeeze(az.mcse((ratio - mean) * weight)))


def configurational_temperature(idata: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the configurational temperature over the target's, and its standard error.

    By the virial theorem E[(θ−c)·∇U(θ)]/d is the temperature of the distribution that the chain
    samples, for any integrator and with gradient noise. For a Gaussian posterior of covariance P it
    equals tr(P⁻¹Σ)/d, Σ being the draws' covariance: the mean ratio of variances along axes that
    whiten the posterior. So 1.2 means standard deviations about 10 % too large. Draws count by
    their ``draw_weight``.

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
    finite = [pair for pair in measured if np.isfinite(pair[0])]
    means, errors = np.array(finite).reshape(-1, 2).T
    return means, errors


def temperature_warnings(idata: Any) -> list[SamplerWarning]:
    """Warn, once for all steps, of temperatures off by 10 % and by three standard errors."""
    steps = [step for step in step_statistics(idata) if _used_draws(step).any()]
    found = (_temperature_warning(step, i + 1, len(steps)) for i, step in enumerate(steps))
    texts = [text for text in found if text is not None]
    if not texts:
        return []
    return [SamplerWarning(WarningType.BAD_PARAMS, " ".join(texts), "warn")]


def _temperature_warning(step: StepStatistics, number: int, n_steps: int) -> str | None:
    which = f" of stochastic-gradient step {number} of {n_steps}" if n_steps > 1 else ""
    n_draws = int(_used_draws(step).sum()) * len(step.target)
    if n_draws < MIN_DRAWS:
        return (
            f"The configurational temperature{which} can't be judged from {n_draws} draws. Raise "
            f"draws: at least {MIN_DRAWS} over all chains are needed."
        )
    mean, error = mean_and_error(step.configurational, step.target, step.weight)
    measured = (
        f"The configurational temperature{which} is {mean:.3g} ± {error:.2g} times its target"
    )
    if mean - 1 > max(0.1, 3 * error):
        return (
            f"{measured}: posterior variances are about {mean:.3g} times the correct ones, on "
            "average over all directions. Lower learning_rate or target_bias, raise batch_size, or "
            "leave more settings to the step. check_bias shows each parameter. If the posterior is "
            "far from a Gaussian, use NUTS."
        )
    if 1 - mean > max(0.1, 3 * error):
        return (
            f"{measured}. Raise tune and draws, or leave more settings to the step: the chains "
            "haven't reached the posterior yet, or move too slowly."
        )
    if error > 0.2:
        return (
            f"{measured}, too uncertain to show whether the posterior is correct. Raise tune and "
            "draws: the chains differ, or are too short."
        )
    return None


def _used_draws(step: StepStatistics) -> np.ndarray:
    """Whether each draw has a temperature in all chains, and a target above zero."""
    return np.isfinite(step.configurational).all(axis=0) & (step.target > 0).all(axis=0)


def by_step(stat: Any) -> list[np.ndarray]:
    """Return arrays of shape (chain, draw), one for each step method that reports the statistic."""
    values = np.asarray(stat.transpose("chain", "draw", ...), dtype=float)
    flat = values.reshape(*values.shape[:2], -1)  # (chain, draw, step)
    return [flat[..., i] for i in range(flat.shape[2])]
