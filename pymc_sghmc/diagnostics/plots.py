"""What the statistics of a finished run say about its bias. Knows arrays and models, no steps."""

import numpy as np

from pymc.stats.convergence import SamplerWarning, WarningType

from pymc_sghmc.diagnostics.temperatures import mean_and_error, step_statistics

__all__ = [
    "configurational_temperature",
    "plot_bias",
    "plot_temperatures",
    "temperature_warnings",
]


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
                    f": posterior variances are about {mean:.3g} times the true ones, as a mean over "
                    "all directions; check_bias tells of each unknown. Lower learning_rate or "
                    "target_bias, raise batch_size, or leave more settings to the step; where the "
                    "posterior is far from a Gaussian, use NUTS."
                )
            else:
                text += (
                    ": the chains haven't reached the posterior yet or move too slowly. Raise tune "
                    "and draws, or leave more settings to the step."
                )
            texts.append(text)
        elif error > 0.2:
            texts.append(
                f"{text}, too uncertain to tell whether the posterior is right: the chains differ or "
                "are too short. Raise tune and draws."
            )
    if not texts:
        return []
    return [SamplerWarning(WarningType.BAD_PARAMS, " ".join(texts), "warn")]


def plot_temperatures(idata, axes=None):
    """Draw the running mean of each temperature over the target's, chain by chain.

    The line at 1 is the target, the band about it ±10 %. The configurational temperature
    (continuous) should end there; the kinetic one (dashed; SGLD has none) lies above it by a factor
    that friction and integrator set, and should be level.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` returned.
    axes : sequence of matplotlib Axes, optional
        One for each stochastic-gradient step of the run; default: a new figure.

    Returns
    -------
    array of matplotlib Axes
    """
    steps = step_statistics(idata)
    if not steps:
        raise ValueError(
            "plot_temperatures: idata.sample_stats has no temperatures. They come from runs with a "
            "step of pymc_sghmc."
        )
    if axes is None:
        _, axes = _pyplot("plot_temperatures").subplots(
            len(steps), squeeze=False, figsize=(8, 3 * len(steps)), layout="constrained"
        )
    axes = np.ravel(axes)
    for i, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        axis.axhspan(0.9, 1.1, color="0.9", zorder=0)
        axis.axhline(1, color="0.4", linewidth=1)
        for chain in range(len(step.target)):
            for name, style in (("configurational", "-"), ("kinetic", "--")):
                if np.isnan(getattr(step, name)).all():
                    continue
                axis.plot(
                    _running_mean(
                        getattr(step, name)[chain], step.target[chain], step.weight[chain]
                    ),
                    style,
                    color=f"C{chain % 10}",
                    linewidth=1.2,
                    label=name if chain == 0 else None,
                )
        which = f" of step {i + 1}" if len(steps) > 1 else ""
        axis.set(
            xlabel="draw", ylabel="running mean / target", title=f"temperature{which}, by chain"
        )
        axis.legend(loc="upper right")
    return axes


def plot_bias(idata, report, n_worst=3):
    """Draw the temperatures of a run, and the traces of the unknowns that are furthest off.

    Traces are on PyMC's unconstrained scale, at the draws that have gradients. The band is the
    posterior mean ± 2 standard deviations as the report estimates them.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` returned.
    report : BiasReport
        What `check_bias` made of it.
    n_worst : int, default 3
        Number of unknowns.

    Returns
    -------
    array of matplotlib Axes
    """
    worst = report.worst(n_worst)
    n_steps = len(step_statistics(idata))
    n_rows = n_steps + len(worst)
    _, axes = _pyplot("plot_bias").subplots(
        n_rows, squeeze=False, figsize=(8, 2.5 * n_rows), layout="constrained"
    )
    axes = np.ravel(axes)
    if n_steps:
        plot_temperatures(idata, axes[:n_steps])
    for axis, (name, row) in zip(axes[n_steps:], worst.iterrows(), strict=True):
        trace = report.draws["position"].sel(unknown=name)
        sd = float(trace.std()) / row["sd_ratio"]
        mean = float(trace.mean()) - sd * row["mean_shift"]
        if np.isfinite(sd):
            axis.axhspan(mean - 2 * sd, mean + 2 * sd, color="0.9", zorder=0)
        for chain in range(trace.sizes["chain"]):
            axis.plot(trace["draw"], trace[chain], color=f"C{chain % 10}", linewidth=0.8)
        axis.set(
            xlabel="draw",
            title=f"{name}: sd × {row['sd_ratio']:.2f} ± {row['sd_ratio_error']:.2f}, "
            f"mean {row['mean_shift']:+.2f} ± {row['mean_shift_error']:.2f} sd",
        )
    return axes


def _running_mean(measured, target, weight):
    """Weighted mean of the draws so far, over the target; what isn't finite is passed over."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = measured / target
        used = np.isfinite(ratio)
        weight = np.where(used, weight, 0.0)
        return np.cumsum(weight * np.where(used, ratio, 0.0)) / np.cumsum(weight)


def _pyplot(caller):
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            f"{caller} needs matplotlib: pip install matplotlib, or pymc-sghmc[examples]."
        ) from error
    return plt
