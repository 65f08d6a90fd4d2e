"""Leave-one-out cross-validation of a run with many rows: all by one point, some by all draws.

Knows PyMC models, what ``pm.sample`` returned, and log-likelihoods by row; no step methods.
"""

import logging
import math
import warnings

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import arviz as az
import numpy as np
import xarray as xr

from pymc.model import Model

from pymc_sghmc.bambi_draws import pymc_model_and_draws
from pymc_sghmc.checks import is_number, quoted, whole_steps
from pymc_sghmc.compat import elpd_data
from pymc_sghmc.diagnostics.difference_estimator import Estimate, Passed, PsisSample, read
from pymc_sghmc.diagnostics.full_data import (
    given_rows,
    posterior_draws,
    refuse_other_rows,
    refuse_step_with_other_rows,
    side_by_side,
    unconstrained_draws,
)
from pymc_sghmc.diagnostics.temperatures import (
    some_draws,
    step_statistics,
    target_temperature,
)
from pymc_sghmc.exceptions import NeedsAllRows
from pymc_sghmc.gradients.row_log_likelihood import RowLogLikelihood, row_log_likelihood_of_model
from pymc_sghmc.models.graphs import observed_variables
from pymc_sghmc.protocols import Array

__all__ = ["loo"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

MOST_BYTES = 2**28  # of sampled rows, kept while they are evaluated
SHARE_OF_SE = 0.1  # of the standard error; what the subsampling adds then is half a percent of it
MARGIN = 1.2  # times as many rows as the error seems to ask for, as it is itself estimated
MOST_PARAMETERS = 500  # of which the effective number of draws is estimated
MOST_POINTWISE = 1_000_000  # rows, each of which gets values of its own by default
FEWEST_DRAWS = 100  # from which ratios have a tail that a Pareto distribution can be fitted to


def loo(
    idata: Any,
    model: Any,
    *,
    var_name: str | None = None,
    pointwise: bool | None = None,
    reff: float | None = None,
    n_rows: int = 5_000,
    max_rows: int = 50_000,
    target_error: float = 4.0,
    n_draws: int = 1_000,
    random_seed: int = 0,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""Estimate the leave-one-out predictive density of a run with many rows, by PSIS of a sample.

    All rows are read once, and their log-likelihood is evaluated at one point, the posterior mean.
    A random sample of the rows is evaluated at ``n_draws`` draws, as `az.loo` evaluates all rows.
    The difference estimator of Magnusson et al. (2020) joins the two: an estimate of what PSIS of
    all rows would give, with a standard error.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` returned, with draws of all parameters. Draws of a stochastic-gradient
        step count by their ``draw_weight``. No group ``log_likelihood`` is needed.
    model : pm.Model, bambi.Model, SGHMC, SGLD or SGNHT
        The model that was sampled; after a run with ``data=`` the step, as the model holds only a
        few of the rows. Arrays, files and loaders are read as for sampling.
    var_name : str, optional
        Observed variable, where the model has several: one row of it is left out at a time, and all
        of the other variables' rows stay.
    pointwise : bool, optional
        Whether the result has values for each row, as `az.compare` needs them: 16 bytes a row.
        Default: ArviZ's ``rcParams["stats.ic_pointwise"]``, which is True, up to 1,000,000 rows,
        and False for more, so that memory doesn't grow with them.
    reff : float, optional
        Effective draws per draw. Default: estimated, as in `az.loo`.
    n_rows : int, default 5,000
        Rows that are sampled at first. Models of which no more are needed take seconds.
    max_rows : int, default 50,000
        Rows that may be sampled at most, while ``target_error`` is not reached.
    target_error : float, default 4
        Standard error of the subsampling that is good enough, in units of elpd. ArviZ calls two
        models similar if they differ by less than 4, so a larger error could change a conclusion.
        There is a warning if the error exceeds this and a tenth of the standard error
        of the elpd itself.
    n_draws : int, default 1,000
        Draws at which the sample is evaluated, evenly spaced over all chains.
    random_seed : int, default 0
        Which rows are sampled. With the same seed two models of the same rows have the same
        sample, so that their difference is known better than either of them.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``mode``.

    Returns
    -------
    ELPDData
        ArviZ's own, to be printed or handed to `az.compare`. It has ``subsample_size`` and
        ``subsampling_se`` besides, and ``pareto_k`` of the sampled rows. With ``pointwise``, values
        of rows outside the sample are approximated, as the notes say. If the sample is all rows,
        the result is that of ordinary PSIS-LOO.

    Raises
    ------
    TypeError
        If the model has several observed variables and ``var_name`` is not given.
    ValueError
        If rows have no log-likelihood of their own (time series, multivariate outcomes over all
        rows), if draws are missing, if the run had other rows than the model, or a temperature
        other than 1.

    Warns
    -----
    UserWarning
        If the Pareto k of some sampled row is too large, as in `az.loo`, or if the error of the
        subsampling is too large.

    Notes
    -----
    Let ℓᵢ = log p(yᵢ | θ̂) at the mean θ̂ of the draws on PyMC's unconstrained scale,
    πᵢ the PSIS-LOO value of row i, and π̃ᵢ = a + b ℓᵢ the line of least squares through the sampled
    rows. The estimate from a sample S of m of the N rows is

    .. math:: \sum_{i=1}^N \tilde\pi_i + \frac{N}{m} \sum_{j \in S} (\pi_j - \tilde\pi_j),

    with the subsampling variance N²(1 − m/N) s²/m, where s² is the variance of the differences.
    Magnusson et al. take b = 1. The line costs nothing, and with effects of groups it halves the
    error. Differences are small where each row says little of the parameters: a hundredth of a
    unit or less. They are large where parameters belong to few rows, as effects of small groups do.

    Effects of groups that are parameters of the model are conditioned on: a row is predicted for a
    group that is known by its other rows. To predict new groups, leave out whole groups instead.

    A row that has several entries is left out as a whole. The positions in
    ``loo_subsample_observations`` are those in a pass over the data.

    References
    ----------
    Magnusson, Riis Andersen, Jonasson & Vehtari (2020). Leave-one-out cross-validation for Bayesian
    model comparison in large data. AISTATS.

    Vehtari, Gelman & Gabry (2017). Practical Bayesian model evaluation using leave-one-out
    cross-validation and WAIC. Statistics and Computing 27(5).

    Examples
    --------
    >>> import numpy as np, pymc as pm, xarray as xr
    >>> from pymc_sghmc.diagnostics import loo
    >>> rng = np.random.default_rng(0)
    >>> y = rng.normal(1.0, 1.0, 100_000)
    >>> with pm.Model() as model:
    ...     mu = pm.Flat("mu")
    ...     outcome = pm.Normal("y", mu, 1.0, observed=y)
    >>> draws = y.mean() + rng.standard_normal((4, 1000)) / np.sqrt(y.size)
    >>> posterior = xr.Dataset({"mu": (("chain", "draw"), draws)})
    >>> result = loo(xr.DataTree.from_dict({"posterior": posterior}), model)
    >>> result["subsample_size"], bool(result["subsampling_se"] < 0.1)
    (5000, True)
    """
    sample_size = whole_steps("n_rows", n_rows, "rows")
    most_rows = max(sample_size, whole_steps("max_rows", max_rows, "rows"))
    if not (is_number(target_error) and target_error > 0):
        raise ValueError(f"target_error={target_error!r}: must be a number above zero.")
    given = given_rows(model, "loo")
    idata, model = pymc_model_and_draws(idata, model if given is None else given.model, "loo")
    name = _observed_name(model, var_name)
    draws = _draws(idata, model, whole_steps("n_draws", n_draws, "draws"))
    point = dict(zip([variable.name for variable in model.value_vars], draws.mean, strict=True))
    rows = _rows(idata, given, model, name, point, compile_kwargs)
    reff = _relative_efficiency(draws, model) if reff is None else float(reff)
    if pointwise is None:
        pointwise = rows.n_rows <= MOST_POINTWISE and bool(az.rcParams["stats.ic_pointwise"])

    sample_size = min(sample_size, rows.n_rows)
    fitting = max(sample_size, MOST_BYTES // max(1, rows.row_bytes))
    most_rows = min(most_rows, rows.n_rows, fitting)
    _log.info(
        f"loo: reads {rows.n_rows:,} rows once, and evaluates {sample_size:,} to {most_rows:,} of "
        f"them at {draws.n:,} draws. The log-likelihoods of all rows, which aren't stored, would "
        f"have {8e-9 * rows.n_rows * draws.n:,.3g} GB."
    )
    rng = np.random.default_rng(random_seed)
    candidates = rng.choice(rows.n_rows, size=most_rows, replace=False)  # the first m are a sample
    passed = read(rows, draws.mean, candidates, keeps_all=pointwise)
    sample = PsisSample(rows, draws.values, passed, reff)
    estimate = sample.estimate(sample_size)
    while estimate.subsampling_se > target_error and estimate.size < most_rows:
        wanted = estimate.size * (estimate.subsampling_se / target_error) ** 2
        size = min(most_rows, math.ceil(MARGIN * wanted))
        estimate = sample.estimate(size)
    _warn_of_error(estimate, target_error)
    return _result(estimate, sample, passed, candidates, draws.n, name)


@dataclass(frozen=True)
class _Draws:
    """Some draws on the unconstrained scale, all of the same weight."""

    by_name: Mapping[str, Array]  # of value variables, (chain, draw, ...)
    values: Sequence[Sequence[Array]]  # draw by draw, in the order of the value variables
    mean: Sequence[Array]

    @property
    def n(self) -> int:
        """Number of draws over all chains."""
        return len(self.values)


def _observed_name(model: Model, var_name: str | None) -> str:
    """Return the name of the observed variable whose rows are left out."""
    found = [variable.name for variable in observed_variables(model)]
    if not found:
        raise ValueError(
            "loo: the model has no observed variable. What a pm.Potential adds has no rows: write "
            "it as the likelihood of an observed variable, for example with pm.CustomDist."
        )
    if var_name is None:
        if len(found) > 1:
            raise TypeError(f"loo: the model observes {quoted(found)}. Name one by var_name.")
        return found[0]
    if var_name not in found:
        raise TypeError(
            f"loo(var_name={var_name!r}): the model has no such observed variable. It has "
            f"{quoted(found)}."
        )
    return var_name


def _rows(
    idata: Any,
    given: Any,
    model: Model,
    name: str,
    point: Mapping[str, Array],
    compile_kwargs: Mapping[str, Any] | None,
) -> RowLogLikelihood:
    """Return the log-likelihood by row on the rows of the run, or refuse."""
    try:
        rows = None
        if given is not None:
            rows = given.log_likelihood(name, compile_kwargs)
        if rows is None:
            refuse_other_rows(idata, model, "loo")
            return row_log_likelihood_of_model(model, name, point, compile_kwargs)
    except NeedsAllRows as error:
        raise ValueError(
            f"loo: {name!r} isn't a sum of log-likelihoods of independent rows. A time series, a "
            "Gaussian process, a multivariate outcome over all rows, a single number or data with "
            "missing values have none to leave out one by one. If the rows fit in memory, use "
            "pm.compute_log_likelihood and az.loo where these apply."
        ) from error
    refuse_step_with_other_rows(idata, [rows.n_data_rows], given.data_mark, "loo")
    return rows


def _draws(idata: Any, model: Model, n_draws: int) -> _Draws:
    """Choose draws, evenly by their weight, and map them to the space of the value variables."""
    temperature = target_temperature(step_statistics(idata), "loo")
    if temperature != 1.0:
        raise ValueError(
            f"loo: this run has the temperature {temperature:g}, so that its draws aren't those of "
            "the posterior. Sample with temperature=1."
        )
    draws = posterior_draws(idata, model, "loo")
    if not draws:
        raise ValueError("loo: the model has no parameters.")
    by_name = unconstrained_draws(model, some_draws(idata, draws, n_draws), "loo")
    values = [by_name[variable.name] for variable in model.value_vars]
    axes = [tuple(range(2, array.ndim)) for array in values]
    finite = np.all(
        [np.isfinite(array).all(axis=axis) for array, axis in zip(values, axes, strict=True)],
        axis=0,
    )
    if finite.sum() < max(FEWEST_DRAWS, 0.9 * finite.size):
        raise ValueError(
            f"loo: {finite.sum():,} of {finite.size:,} draws that were chosen are finite. Nine in "
            f"ten are needed, and {FEWEST_DRAWS} at least: sample longer, or raise n_draws."
        )
    all_finite = finite.all()  # then no copy is made
    flat = [v.reshape(-1, *v.shape[2:]) if all_finite else v[finite] for v in values]
    return _Draws(
        by_name=by_name,
        values=[[array[i] for array in flat] for i in range(len(flat[0]))],
        mean=[_middle(array) for array in flat],
    )


def _middle(values: Array) -> Array:
    """Return the mean of draws, of discrete ones a median that is a value of theirs."""
    if values.dtype.kind == "f":
        return np.asarray(values.mean(axis=0, dtype=float), dtype=values.dtype)
    return np.asarray(np.quantile(values, 0.5, axis=0, method="lower"), dtype=values.dtype)


def _relative_efficiency(draws: _Draws, model: Model) -> float:
    """Return effective draws per draw, a mean over parameters, 1 of a single chain: as ArviZ."""
    values = [draws.by_name[variable.name] for variable in model.continuous_value_vars]
    if not values or len(values[0]) == 1:
        return 1.0
    positions = side_by_side(values)
    n_chains, n_draws = positions.shape[:2]
    every = max(1, positions.shape[-1] // MOST_PARAMETERS)
    data = xr.Dataset({"x": (("chain", "draw", "parameter"), positions[..., ::every])})
    with np.errstate(all="ignore"):
        ess = np.asarray(az.ess(data, method="mean")["x"], dtype=float)
    ess = ess[np.isfinite(ess)]
    return float(ess.mean() / (n_chains * n_draws)) if ess.size else 1.0


def _warn_of_error(estimate: Estimate, target_error: float) -> None:
    """Warn if the subsampling adds an error that matters."""
    error = estimate.subsampling_se
    if error <= max(target_error, SHARE_OF_SE * estimate.se):
        return
    warnings.warn(
        f"loo: the standard error of the subsampling is {error:.3g} with {estimate.size:,} sampled "
        f"rows, more than target_error={target_error:g} and a tenth of the standard error, "
        f"{estimate.se:.3g}. Raise max_rows. Rows differ much in what they say of parameters, as "
        "they do where effects of small groups are among these.",
        UserWarning,
        stacklevel=3,
    )


def _result(
    estimate: Estimate,
    sample: PsisSample,
    passed: Passed,
    candidates: Array,
    n_draws: int,
    name: str,
) -> Any:
    """Return the estimate as ArviZ's object, and warn of large Pareto k as ArviZ does."""
    good_k = min(1 - 1 / math.log10(n_draws), 0.7)
    too_large = int((sample.pareto_k > good_k).sum())
    if too_large:
        warnings.warn(
            f"Estimated shape parameter of Pareto distribution is greater than {good_k:.2f} for "
            f"{too_large:,} of {estimate.size:,} sampled rows of {name}. Importance sampling is "
            "less likely to work well there: these rows change the posterior much. Use a more "
            "robust model, or look at these rows.",
            UserWarning,
            stacklevel=3,
        )
    positions = candidates[: estimate.size]
    dim = f"{name}_row"
    elpd_i = approximate = pareto_k = None
    if passed.of_all is not None:
        values = estimate.line(passed.of_all)
        approximate = xr.DataArray(values.copy(), dims=dim, name="elpd_loo_approx")
        values[positions] = sample.elpd
        elpd_i = xr.DataArray(values, dims=dim, name="elpd_i")
        pareto_k = xr.DataArray(
            sample.pareto_k, dims=dim, coords={dim: positions}, name="pareto_k"
        ).sortby(dim)
    return elpd_data(
        elpd=estimate.elpd,
        se=estimate.se,
        p=estimate.p,
        n_samples=n_draws,
        n_data_points=passed.n,
        warning=too_large > 0,
        good_k=good_k,
        elpd_i=elpd_i,
        pareto_k=pareto_k,
        subsample_size=estimate.size,
        subsampling_se=estimate.subsampling_se,
        loo_subsample_observations=positions,
        elpd_loo_approx=approximate,
    )
