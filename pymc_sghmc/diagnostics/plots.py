"""Plots of a finished run: its temperatures, and its traces beside the bias report."""

from typing import Any

import numpy as np

from pymc_sghmc.diagnostics.report import BiasReport
from pymc_sghmc.diagnostics.temperatures import step_statistics

__all__ = ["plot_bias", "plot_temperatures"]


def plot_temperatures(idata: Any, axes: Any = None) -> np.ndarray:
    """Plot the running mean of each temperature, divided by its target, chain by chain.

    The line at 1 is the target, the band around it ±10 %. The configurational temperature (solid
    line) should end there. The kinetic one (dashed; SGLD has none) lies above it by a factor that
    depends on friction and integrator, and should be level.

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
            "plot_temperatures: idata.sample_stats has no temperatures. Pass a run that was "
            "sampled with SGHMC, SGLD or SGNHT."
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


def plot_bias(idata: Any, report: BiasReport, n_worst: int = 3) -> np.ndarray:
    """Plot the temperatures of a run, and the traces of the parameters with the largest bias.

    Traces are on PyMC's unconstrained scale, at the draws that have gradients. The band is the
    posterior mean ± 2 standard deviations, as estimated by the report.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` returned.
    report : BiasReport
        The report of `check_bias` on this run.
    n_worst : int, default 3
        Number of parameters.

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
        trace = report.draws["position"].sel(parameter=name)
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


def _running_mean(measured: np.ndarray, target: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the weighted mean of the draws so far over the target, of those that are finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = measured / target
        used = np.isfinite(ratio)
        weight = np.where(used, weight, 0.0)
        return np.cumsum(weight * np.where(used, ratio, 0.0)) / np.cumsum(weight)


def _pyplot(caller: str) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            f"{caller} needs matplotlib. Install it: pip install matplotlib."
        ) from error
    return plt
