"""The bias report of a finished run, from full-data gradients at some of its draws.

Knows PyMC models and what ``pm.sample`` returned, no step methods.
"""

import logging

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from pymc_sghmc.bambi_draws import pymc_model_and_draws
from pymc_sghmc.checks import is_whole
from pymc_sghmc.diagnostics.full_data import (
    ModelRows,
    posterior_draws,
    refuse_other_rows,
    refuse_step_with_other_rows,
    rows_of_step,
    side_by_side,
    unconstrained_draws,
)
from pymc_sghmc.diagnostics.mixing import mixing
from pymc_sghmc.diagnostics.report import BiasReport
from pymc_sghmc.diagnostics.stein import stein_estimates
from pymc_sghmc.diagnostics.temperatures import (
    StepStatistics,
    draw_weights,
    mean_and_error,
    step_statistics,
    target_temperature,
)

__all__ = ["check_bias"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

ALL_DRAWS_LIMIT = 2 * 10**7  # entries; above it only draws with gradients are used


def check_bias(
    idata: Any,
    model: Any,
    *,
    n_draws: int = 400,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> BiasReport:
    r"""Estimate how far the draws are from the posterior, from full-data gradients at some of them.

    Under the posterior Stein's identities hold for every parameter, on PyMC's unconstrained scale:
    E[∂log p/∂θ_i] = 0, and −E[(θ_i − c_i) ∂log p/∂θ_i] = 1 for any fixed c. They are evaluated
    with the model's exact gradient, whichever sampler made the draws.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` returned, with draws of all parameters. Draws that one
        stochastic-gradient step made count by their ``draw_weight``, and are compared with the
        posterior at its ``temperature``.
    model : pm.Model, bambi.Model, SGHMC, SGLD or SGNHT
        The model that was sampled. ``pm.Minibatch`` is replaced by all of its data. Given Bambi's
        own model, what Bambi changed in the draws after sampling is undone first. After a run with
        ``data=`` pass the step: the model holds only a few of the rows. A loader is read once.
    n_draws : int, default 400
        Draws to take gradients at, evenly spaced over all chains: **each costs a pass over all
        data**. With more than ``n_draws``/5 parameters ``sd_ratio`` ignores correlations.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile`` for the gradient, such as ``mode``.

    Returns
    -------
    BiasReport
        ``print`` it for a verdict in words; its attributes are tables.

    Notes
    -----
    For a posterior N(m, P) the gradient is −P⁻¹(θ − m). Draws of mean c and covariance S then give
    F = −E[(θ − c) ∇log pᵀ] = S P⁻¹ and E[∇log p] = −P⁻¹(c − m), so that

    - ``temperature`` of parameter i is (S P⁻¹)_ii. It is the factor on its variance only if all
      directions are equally hot, or the posterior is uncorrelated. Beside a strongly correlated
      parameter it can be far from 1 while the standard deviation is right. Its mean over the
      parameters, tr(S P⁻¹)/d, is the configurational temperature of the run;
    - ``sd_ratio`` is √(S_ii/P_ii) with P = F⁻¹S, which has no such trouble. It needs five effective
      draws per parameter; with fewer it is √temperature;
    - ``mean_shift`` is −(P E[∇log p])_i/√P_ii, plus what the heat of the draws does to the mean of
      a skewed posterior, to first order in its third derivatives. E[∇log p] does not show the
      latter: it is 0 in every stationary run, whatever the gradient noise. Where P isn't known,
      ``mean_shift`` is −√S_ii E[∂log p/∂θ_i] alone. It and its standard error include the Monte
      Carlo error of the draws' own mean.

    On other posteriors, correct draws give 0, 1 and 1, too, and the sizes of deviations are a
    guide. What the gradients leave unexplained is averaged over ``n_draws``, the rest over all
    draws (double sampling), so near-Gaussian posteriors need few gradients.

    If the chains haven't mixed (some R-hat above 1.05, or fewer than 100 effective draws of some
    parameter), the report says only that: ``report.mixing`` has the numbers. ``report.biased`` is
    True if some standard deviation is off by more than 5 % or some mean by more than 0.1 standard
    deviations, and by more than chance allows for that many parameters.

    Two things are not seen. Chains that all miss the same mode pass, as no check of draws against
    gradients sees what the chains don't visit. And gradients don't see jumps of the log-density,
    where a condition changes with a parameter: such parameters get no verdict and NaN in the
    tables, and the report names them; all others are judged without them. Discrete parameters are
    conditioned on.

    Examples
    --------
    >>> import numpy as np, pymc as pm, xarray as xr
    >>> from pymc_sghmc.diagnostics import check_bias
    >>> with pm.Model() as model:
    ...     x = pm.Normal("x", 0, 1)
    >>> draws = 1.2 * np.random.default_rng(0).standard_normal((4, 1000))
    >>> posterior = xr.Dataset({"x": (("chain", "draw"), draws)})
    >>> report = check_bias(xr.DataTree.from_dict({"posterior": posterior}), model, n_draws=40)
    >>> report.biased
    True
    >>> print(report)
    The standard deviation of x is 20 ± 1 % too large.
    Lower learning_rate or target_bias, or raise batch_size.
    ...
    """
    rows = rows_of_step(model, compile_kwargs)
    idata, model = pymc_model_and_draws(idata, model if rows is None else rows.model, "check_bias")
    rows = rows or ModelRows(model, compile_kwargs)
    if isinstance(rows, ModelRows):
        refuse_other_rows(idata, model)
    else:
        refuse_step_with_other_rows(idata, rows.n_rows, rows.data_mark, "check_bias")
    parameters = [model.values_to_rvs[value] for value in model.continuous_value_vars]
    if not parameters:
        raise ValueError("check_bias: the model has no continuous parameters, so no gradient.")
    steps = step_statistics(idata)
    target = target_temperature(steps)
    draws = posterior_draws(idata, model)
    n_chains, n_all = draws[parameters[0].name].shape[:2]
    thinned = kept = _thinned(n_draws, n_chains, n_all)
    if sum(values.size for values in draws.values()) <= ALL_DRAWS_LIMIT:
        kept = np.arange(n_all)
    at = np.searchsorted(kept, thinned)  # where the draws with gradients are

    draws = unconstrained_draws(model, {name: values[:, kept] for name, values in draws.items()})
    if not isinstance(rows, ModelRows):
        _log.info(
            f"check_bias: reads {max(rows.n_rows):,} rows once, and evaluates their gradient at "
            f"{n_chains * at.size:,} draws."
        )
    gradients = rows.gradients({name: values[:, at] for name, values in draws.items()})
    values = [draws[value.name] for value in model.continuous_value_vars]
    positions = side_by_side(values).astype(float)
    names, groups = _names(idata.posterior, parameters, [v.shape[2:] for v in values])

    finite = np.isfinite(positions).all(axis=-1)  # (chain, draw)
    finite[:, at] &= np.isfinite(gradients).all(axis=-1)
    _check_finite(positions[:, at], gradients, names)
    weights = draw_weights(steps, n_chains, n_all)[:, kept] * finite
    positions[~finite] = 0.0
    gradients[~finite[:, at]] = 0.0
    jumping = rows.jumping_variables(draws)
    table, variables, uses_correlations = _tables(
        positions, weights, at, gradients / target, names, groups, jumping
    )
    dims = ("chain", "draw", "parameter")
    chains = idata.posterior[parameters[0].name]["chain"].values
    coords = {"chain": chains, "draw": thinned, "parameter": names}
    return BiasReport(
        table=table,
        variables=variables,
        mixing=mixing(positions, weights, names),
        temperatures=_temperatures(steps, variables),
        draws=xr.Dataset(
            {"position": (dims, positions[:, at]), "gradient": (dims, gradients)}, coords
        ),
        left_out=int((~finite[:, at]).sum()),
        jumping=jumping,
        uses_correlations=uses_correlations,
    )


def _tables(
    positions: np.ndarray,
    weights: np.ndarray,
    at: np.ndarray,
    gradients: np.ndarray,
    names: list[str],
    groups: dict[str, slice],
    jumping: list[str],
) -> tuple[pd.DataFrame, pd.DataFrame, bool]:
    """Return the estimates by parameter and by variable, and whether they use correlations.

    Stein's identities hold for no parameter at which the log-density jumps. Such parameters are
    left out, so that they don't distort the estimates of the others, and have NaN in the tables.
    """
    judged = np.ones(len(names), bool)
    for name in jumping:
        judged[groups[name]] = False
    judged_groups = {}
    for name, where in groups.items():
        if name not in jumping:
            first = int(judged[: where.start].sum())
            judged_groups[name] = slice(first, first + where.stop - where.start)
    columns = ["temperature", "temperature_error", "sd_ratio", "sd_ratio_error"]
    shifts = ["mean_shift", "mean_shift_error"]
    table = pd.DataFrame(np.nan, index=names, columns=[*shifts, *columns])
    variables = pd.DataFrame(np.nan, index=[*groups, "(all)"], columns=columns)
    if not judged.any():
        return table, variables, False
    estimates = stein_estimates(
        positions[..., judged], weights, at, gradients[..., judged], judged_groups.values()
    )
    d = int(judged.sum())
    ratio = np.exp(estimates.log_sd_ratio.mean)
    heat = estimates.temperature
    values = np.stack(
        [heat.mean, heat.error, ratio, ratio * estimates.log_sd_ratio.error], axis=1
    )  # of parameters, of variables, of all
    table.loc[judged, columns] = values[:d]
    table.loc[judged, shifts] = np.stack(estimates.mean_shift, axis=1)
    variables.loc[[*judged_groups, "(all)"]] = values[d:]
    return table, variables, estimates.uses_correlations


def _temperatures(steps: list[StepStatistics], variables: pd.DataFrame) -> pd.DataFrame:
    """Return the temperatures of the run over their target, and that of the full-data gradients."""
    temperatures = {
        "full data": variables.loc["(all)", ["temperature", "temperature_error"]].to_list()
    }
    for i, step in enumerate(steps):
        which = f", step {i + 1}" if len(steps) > 1 else ""
        for kind in ("configurational", "kinetic"):
            measured = getattr(step, kind)
            temperatures[kind + which] = mean_and_error(measured, step.target, step.weight)
    return pd.DataFrame.from_dict(temperatures, orient="index", columns=["temperature", "error"])


def _thinned(n_draws: int, n_chains: int, n_all: int) -> np.ndarray:
    """Draws of each chain at which to take gradients, evenly spaced."""
    if not is_whole(n_draws):
        raise ValueError(f"n_draws={n_draws!r}: must be a whole number of draws.")
    per_chain = min(n_all, int(n_draws) // n_chains)
    if per_chain < 10:
        raise ValueError(
            f"n_draws={n_draws}: check_bias needs ten draws from each chain, and the run has "
            f"{n_chains} chains of {n_all}. Pass n_draws={10 * n_chains} or more"
            + (", and sample longer." if n_all < 10 else ".")
        )
    return np.unique(np.linspace(0, n_all - 1, per_chain).round().astype(int))


def _names(
    posterior: Any, parameters: list[Any], shapes: list[tuple[int, ...]]
) -> tuple[list[str], dict[str, slice]]:
    """Return the name of each entry, as ArviZ names it, and the entries of each variable."""
    names: list[str] = []
    groups: dict[str, slice] = {}
    for rv, shape in zip(parameters, shapes, strict=True):
        start = len(names)
        draws = posterior[rv.name].isel(chain=0, draw=0)
        labels = [range(n) for n in shape]
        if draws.shape == shape:  # else the transform has changed it, as that of a Dirichlet does
            labels = [draws[dim].values for dim in draws.dims]
        for index in np.ndindex(*shape):
            entry = ", ".join(str(axis[i]) for axis, i in zip(labels, index, strict=True))
            names.append(f"{rv.name}[{entry}]" if shape else rv.name)
        groups[rv.name] = slice(start, len(names))
    return names, groups


def _check_finite(positions: np.ndarray, gradients: np.ndarray, names: list[str]) -> None:
    """Refuse a run of which more than a tenth of the draws can't be used."""
    finite = np.isfinite(positions) & np.isfinite(gradients)
    bad = int((~finite.all(axis=-1)).sum())
    if bad > 0.1 * finite[..., 0].size:
        raise ValueError(
            f"check_bias: {bad} of {finite[..., 0].size} draws, or the gradients there, are not "
            f"finite: {names[int(np.argmin(finite.mean(axis=(0, 1))))]} most often. Pass the model "
            "that made this run, with the same data, and look at the draws of this parameter."
        )
