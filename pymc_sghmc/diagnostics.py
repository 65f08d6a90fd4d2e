"""What the statistics of a finished run say about its bias. Knows arrays and ArviZ, no steps."""

import arviz as az
import numpy as np

from pymc.stats.convergence import SamplerWarning, WarningType

__all__ = ["configurational_temperature", "temperature_warnings"]


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
    stats = getattr(idata, "sample_stats", {})
    if "configurational_temperature" not in stats:
        return np.empty(0), np.empty(0)
    means, errors = [], []
    names = ("configurational_temperature", "target_temperature", "draw_weight")
    for measured, target, weight in zip(*(_by_step(stats[name]) for name in names), strict=True):
        used = np.isfinite(measured).all(axis=0) & (target > 0).all(axis=0)
        if used.sum() < 4:
            continue
        ratio = measured[:, used] / target[:, used] * weight[:, used] / weight[:, used].mean()
        means.append(ratio.mean())
        errors.append(float(np.squeeze(az.mcse(ratio))))
    return np.array(means), np.array(errors)


def temperature_warnings(idata) -> list[SamplerWarning]:
    """Warn, once for all steps, where a temperature is off by 10 % and by three standard errors."""
    means, errors = configurational_temperature(idata)
    texts = []
    for i, (mean, error) in enumerate(zip(means, errors, strict=True)):
        if not abs(mean - 1) > max(0.1, 3 * error):
            continue
        which = f" of stochastic-gradient step {i + 1} of {len(means)}" if len(means) > 1 else ""
        text = f"The configurational temperature{which} is {mean:.2f} ± {error:.2f} times what it should be"
        if mean > 1:
            text += (
                f": posterior standard deviations are about {np.sqrt(mean):.2f} times the true ones. "
                "Lower learning_rate, raise batch_size or set noise_estimate."
            )
        else:
            text += (
                ": the chains haven't reached the posterior yet or move too slowly. Raise tune and "
                "draws, or give a preconditioner."
            )
        texts.append(text)
    if not texts:
        return []
    return [SamplerWarning(WarningType.BAD_PARAMS, " ".join(texts), "warn")]


def _by_step(stat) -> list[np.ndarray]:
    """Arrays of shape (chain, draw), one for each step method that reports the statistic."""
    values = np.asarray(stat.transpose("chain", "draw", ...), dtype=float)
    flat = values.reshape(*values.shape[:2], -1)  # (chain, draw, step)
    return [flat[..., i] for i in range(flat.shape[2])]
