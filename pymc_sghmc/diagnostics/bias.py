"""The bias report of a finished run, from full-data gradients at some of its draws.

Knows PyMC models and what ``pm.sample`` returned, no step methods.
"""

import numpy as np
import pandas as pd
import xarray as xr

from pymc_sghmc.bambi_draws import pymc_model_and_draws
from pymc_sghmc.checks import is_whole
from pymc_sghmc.diagnostics.full_data import (
    full_data_gradients,
    jumping_variables,
    posterior_draws,
    unconstrained_draws,
)
from pymc_sghmc.diagnostics.mixing import mixing
from pymc_sghmc.diagnostics.report import BiasReport
from pymc_sghmc.diagnostics.stein import stein_estimates
from pymc_sghmc.diagnostics.temperatures import mean_and_error, step_statistics

__all__ = ["check_bias"]

ALL_DRAWS_LIMIT = 2 * 10**7  # numbers; beyond it only draws with gradients are used


def check_bias(idata, model, *, n_draws=400, compile_kwargs=None) -> BiasReport:
    r"""Say how far the draws are from the posterior, from full-data gradients at some of them.

    Under the posterior Stein's identities hold for every unknown, on PyMC's unconstrained scale:
    E[∂log p/∂θ_i] = 0, and −E[(θ_i − c_i) ∂log p/∂θ_i] = 1 for any fixed c. They are evaluated
    with the model's exact gradient, whichever sampler made the draws.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` returned, with draws of all unknowns. Draws count by their
        ``draw_weight`` where one stochastic-gradient step made them, and are held to its
        ``temperature``.
    model : pm.Model or bambi.Model
        The model that was sampled. ``pm.Minibatch`` is replaced by all of its data. Given Bambi's
        own model, what Bambi changed in the draws after sampling is undone first.
    n_draws : int, default 400
        Draws to take gradients at, evenly spaced over all chains: **each costs a pass over all
        data**. With more than ``n_draws``/5 unknowns correlations are left out of ``sd_ratio``.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile`` for the gradient, such as ``mode``.

    Returns
    -------
    BiasReport
        ``print`` it; see there for its tables.

    Notes
    -----
    For a posterior N(m, P) the gradient is −P⁻¹(θ − m). Draws of mean c and covariance S then give
    F = −E[(θ − c) ∇log pᵀ] = S P⁻¹ and E[∇log p] = −P⁻¹(c − m), so that

    - ``temperature`` of unknown i is (S P⁻¹)_ii. It is the inflation of its variance only where all
      directions are equally hot, or the posterior uncorrelated: beside a strongly correlated
      unknown it can be far from 1, even below it, while the standard deviation is right. Its mean
      over the unknowns, tr(S P⁻¹)/d, is the configurational temperature of the run;
    - ``sd_ratio`` is √(S_ii/P_ii) with P = F⁻¹S, which has no such trouble. It takes five effective
      draws per unknown; else it is √temperature;
    - ``mean_shift`` is −(P E[∇log p])_i/√P_ii, plus what the heat of the draws does to the mean of
      a skewed posterior, to first order in its third derivatives: E[∇log p] can't tell, because it
      is 0 in every stationary run, whatever the gradient noise. Where P isn't known it is
      −√S_ii E[∂log p/∂θ_i] alone. It includes the Monte Carlo error of the draws' own mean, as its
      standard error does.

    On other posteriors right draws give 0, 1 and 1, too, and the sizes of what is found are a
    guide. Whatever the gradients leave unexplained is averaged over ``n_draws``, the rest over all
    draws (double sampling): near-Gaussian posteriors need few gradients.

    Where the chains haven't mixed (R-hat above 1.05, or fewer than 100 effective draws, of some
    unknown) the report says so and nothing else: ``report.mixing`` has the numbers.
    ``report.biased`` tells whether anything exceeds 5 % of a standard deviation or 0.1 of one in a
    mean, and beyond chance for that many unknowns. Chains that all miss the same mode pass: no
    check of draws against gradients sees what the chains don't visit. Nor does it see jumps of the
    log-density, where a condition changes with an unknown: the report names these unknowns instead
    of a verdict. Discrete unknowns are conditioned on.

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
    idata, model = pymc_model_and_draws(idata, model, "check_bias")
    unknowns = [model.values_to_rvs[value] for value in model.continuous_value_vars]
    if not unknowns:
        raise ValueError("check_bias: the model has no continuous unknowns, so no gradient.")
    steps = step_statistics(idata)
    target = _target_temperature(steps)
    draws = posterior_draws(idata, model)
    n_chains, n_all = draws[unknowns[0].name].shape[:2]
    thinned = kept = _thinned(n_draws, n_chains, n_all)
    if sum(values.size for values in draws.values()) <= ALL_DRAWS_LIMIT:
        kept = np.arange(n_all)
    at = np.searchsorted(kept, thinned)  # where the draws with gradients are

    draws = unconstrained_draws(model, {name: values[:, kept] for name, values in draws.items()})
    gradients = full_data_gradients(
        model, {name: values[:, at] for name, values in draws.items()}, compile_kwargs
    )
    values = [draws[value.name] for value in model.continuous_value_vars]
    positions = np.concatenate([v.reshape(n_chains, len(kept), -1) for v in values], axis=-1)
    positions = positions.astype(float)  # (chain, draw, d)
    names, groups = _names(idata.posterior, unknowns, [v.shape[2:] for v in values])

    finite = np.isfinite(positions).all(axis=-1)  # (chain, draw)
    finite[:, at] &= np.isfinite(gradients).all(axis=-1)
    _check_finite(positions[:, at], gradients, names)
    weights = _weights(steps, n_chains, n_all)[:, kept] * finite
    positions[~finite] = 0.0
    gradients[~finite[:, at]] = 0.0
    estimates = stein_estimates(positions, weights, at, gradients / target, groups.values())
    dims = ("chain", "draw", "unknown")
    chains = idata.posterior[unknowns[0].name]["chain"].values
    coords = {"chain": chains, "draw": thinned, "unknown": names}
    kept_draws = xr.Dataset(
        {"position": (dims, positions[:, at]), "gradient": (dims, gradients)}, coords
    )
    left_out = int((~finite[:, at]).sum())
    jumping = jumping_variables(model, draws, compile_kwargs)
    mixed = mixing(positions, weights, names)
    return _report(estimates, mixed, groups, steps, left_out, jumping, kept_draws)


def _report(estimates, mixed, groups, steps, left_out, jumping, draws) -> BiasReport:
    names = mixed.index
    d = len(mixed)
    shift = estimates.mean_shift
    heat = estimates.temperature
    log_sd = estimates.log_sd_ratio
    ratio = np.exp(log_sd.mean)
    columns = {
        "temperature": heat.mean,
        "temperature_error": heat.error,
        "sd_ratio": ratio,
        "sd_ratio_error": ratio * log_sd.error,
    }
    shifts = {"mean_shift": shift.mean, "mean_shift_error": shift.error}
    table = pd.DataFrame({**shifts, **{k: v[:d] for k, v in columns.items()}}, index=names)
    variables = pd.DataFrame({k: v[d:] for k, v in columns.items()}, index=[*groups, "(all)"])
    temperatures = {"full data": (heat.mean[-1], heat.error[-1])}
    for i, step in enumerate(steps):
        which = f", step {i + 1}" if len(steps) > 1 else ""
        for kind in ("configurational", "kinetic"):
            measured = getattr(step, kind)
            temperatures[kind + which] = mean_and_error(measured, step.target, step.weight)
    return BiasReport(
        table=table,
        variables=variables,
        mixing=mixed,
        temperatures=pd.DataFrame.from_dict(
            temperatures, orient="index", columns=["temperature", "error"]
        ),
        draws=draws,
        left_out=left_out,
        jumping=jumping,
        uses_correlations=estimates.uses_correlations,
    )


def _thinned(n_draws, n_chains, n_all) -> np.ndarray:
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


def _target_temperature(steps) -> float:
    counted = [step.target[step.weight > 0] for step in steps]  # draws that explore have no target
    targets = {float(t) for target in counted for t in np.unique(target) if np.isfinite(t)}
    if len(targets) > 1 or targets == {0.0}:
        raise ValueError(
            f"check_bias: this run has the temperatures {sorted(targets)}; draws can be held to "
            "a posterior only where all steps have one and the same, above zero."
        )
    return targets.pop() if targets else 1.0


def _weights(steps, n_chains, n_all) -> np.ndarray:
    """Weights of the draws, where all stochastic-gradient steps agree on them."""
    weights = [
        np.nan_to_num(step.weight / np.nanmean(step.weight, axis=1, keepdims=True))
        for step in steps
    ]
    if weights and all(np.allclose(weight, weights[0]) for weight in weights):
        return weights[0]
    return np.ones((n_chains, n_all))


def _names(posterior, unknowns, shapes) -> tuple[list[str], dict[str, slice]]:
    """Name of each entry of the unknowns, as ArviZ names it, and the entries of each variable."""
    names = []
    groups = {}
    for rv, shape in zip(unknowns, shapes, strict=True):
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


def _check_finite(positions, gradients, names) -> None:
    """Refuse a run of which more than a tenth can't be used."""
    finite = np.isfinite(positions) & np.isfinite(gradients)
    bad = int((~finite.all(axis=-1)).sum())
    if bad > 0.1 * finite[..., 0].size:
        raise ValueError(
            f"check_bias: {bad} of {finite[..., 0].size} draws, or the gradients there, are not "
            f"finite: {names[int(np.argmin(finite.mean(axis=(0, 1))))]} most often. Check that "
            "this is the model of the run, and look at its draws."
        )
