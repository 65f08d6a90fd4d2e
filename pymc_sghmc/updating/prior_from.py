"""The posterior of a run as a Gaussian, by its draws and by gradients of all rows.

Knows what ``pm.sample`` returned, and the model and the rows of a step.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from pymc.model import Model

from pymc_sghmc.bambi_draws import pymc_model_and_draws
from pymc_sghmc.checks import is_whole, quoted
from pymc_sghmc.diagnostics.full_data import (
    given_rows,
    posterior_draws,
    refuse_step_with_other_rows,
    side_by_side,
    unconstrained_draws,
)
from pymc_sghmc.diagnostics.mixing import mixing, not_mixed
from pymc_sghmc.diagnostics.temperatures import step_statistics
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.protocols import Array
from pymc_sghmc.step.all_rows import AllRows, GivenRows
from pymc_sghmc.updating.gaussian_prior import GaussianPrior, Parameter, refuse_imputed_values
from pymc_sghmc.updating.near_gaussian import Fit, refuse_far_from_gaussian, refuse_other_posterior
from pymc_sghmc.updating.normal_blocks import Transformed

__all__ = ["prior_from"]

MAX_PARAMETERS = 1000  # the prior of the next run is a product with a matrix of d² numbers
NEAR = 0.5  # standard deviations between the mean of some draws and where the Hessian is taken
DRAWS_PER_PARAMETER = 5  # for a covariance of draws as the scale of differences


def prior_from(
    idata: Any,
    step: Any,
    *,
    n_draws: int = 100,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> GaussianPrior:
    r"""Return the posterior of a run as the prior of the next one, on new data.

    The posterior is approximated by a Gaussian on PyMC's unconstrained scale, where it is near one
    with many rows. ``prior_from(idata, step).apply(model)`` returns the same model with this
    Gaussian as prior: nothing else in it changes.

    Parameters
    ----------
    idata : InferenceData or DataTree
        What ``pm.sample`` returned, with draws of all parameters.
    step : SGHMC, SGLD, SGNHT, pm.Model or bambi.Model
        The step of the run, whose rows are read again: those of ``data=``, too. For other samplers
        the model, with the data of the run.
    n_draws : int, default 100
        Draws at which the gradient of all rows is taken, evenly spaced over all chains. Each costs
        a pass over the data; a loader is read once for all. More of them make the mean more
        precise where the posterior is skewed.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``mode``. Default: the step's.

    Returns
    -------
    GaussianPrior
        Its ``mean`` and ``covariance``, and ``apply(model)``. It can be pickled.

    Raises
    ------
    ValueError
        If the posterior isn't near a Gaussian, the draws aren't those of this posterior, the chains
        haven't mixed, or the model has discrete parameters or more than 1,000 parameters.

    Notes
    -----
    With H the Hessian of −log p given all rows, at the mean of the draws:

    - The covariance is H⁻¹. It has no Monte Carlo error, as that of the draws has.
    - The mean is that of θ + H⁻¹∇log p(θ) over ``n_draws`` draws. The gradient has expectation
      zero, so this has the expectation of the draws' mean, and none of its Monte Carlo error where
      the posterior is Gaussian. It isn't the mode, from which the mean of a skewed posterior
      differs: errors of the same sign would add up from month to month.

    The Gaussian says nothing of new entries, such as groups that come up in later data.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGHMC, prior_from
    >>> rng = np.random.default_rng(0)
    >>> march, april = rng.normal(1.0, 2.0, 1000), rng.normal(1.0, 2.0, 1000)
    >>> with pm.Model() as model:
    ...     mu = pm.Normal("mu", 0, 10)
    ...     sigma = pm.HalfNormal("sigma", 10)
    ...     likelihood = pm.Normal("likelihood", mu, sigma, observed=pm.Data("y", march))
    ...     step = SGHMC()
    ...     idata = pm.sample(300, step=step, random_seed=1, progressbar=False)
    >>> prior = prior_from(idata, step)
    >>> prior
    <GaussianPrior of 2 parameters: mu, sigma>
    >>> with prior.apply(model):
    ...     pm.set_data({"y": april})
    ...     idata = pm.sample(300, step=SGHMC(), random_seed=1, progressbar=False)
    >>> float(idata.posterior["mu"].std()) < 0.05  # 2/√2000 = 0.045
    True
    """
    given = given_rows(step, "prior_from")
    idata, model = pymc_model_and_draws(idata, step if given is None else given.model, "prior_from")
    _refuse_parameters(model)
    positions, unknowns = _positions(idata, model)
    names = [_name(model, unknowns, i) for i in range(unknowns.d)]
    _refuse_not_mixed(positions, names)

    rows = _all_rows(given, model, compile_kwargs)
    refuse_step_with_other_rows(idata, rows.n_rows, rows.data_mark, "prior_from")
    some = _some(positions, n_draws)
    gradients = _gradients(rows, unknowns, some, model)
    _refuse_not_finite(gradients, names)
    mean = some.mean(axis=0)
    slope = gradients.mean(axis=0)
    spread = np.atleast_2d(np.cov(positions.reshape(-1, unknowns.d), rowvar=False))
    near_mean = mean + _at_most(NEAR, spread @ slope, np.sqrt(np.diag(spread)))
    covariance = _covariance(rows, near_mean, spread, positions, names)
    mean = mean + covariance @ slope

    fit = Fit(names, mean, covariance, positions, some, gradients)
    refuse_other_posterior(fit)
    refuse_far_from_gaussian(fit)
    return GaussianPrior(_parameters(model, unknowns, mean), mean, covariance)


def _refuse_parameters(model: Model) -> None:
    """Refuse parameters for which there is no Gaussian."""
    if model.discrete_value_vars:
        discrete = [model.values_to_rvs[value].name for value in model.discrete_value_vars]
        raise ValueError(
            f"prior_from: {quoted(discrete)} take whole numbers, for which there is no Gaussian. "
            "Sum such parameters out (pymc_extras.marginalize), or run on all data together."
        )
    refuse_imputed_values(model, "prior_from")
    if not model.free_RVs:
        raise ValueError("prior_from: the model has no parameters.")
    point = model.initial_point()
    d = sum(np.size(point[value.name]) for value in model.continuous_value_vars)
    if d > MAX_PARAMETERS:
        raise ValueError(
            f"prior_from: the model has {d:,} parameters. A Gaussian of as many has {d:,}² "
            f"numbers, which are read at every step; up to {MAX_PARAMETERS:,} are possible. Take "
            "fewer groups or effects, or run on all data together."
        )


def _positions(idata: Any, model: Model) -> tuple[Array, Unknowns]:
    """Return unconstrained draws that count, (chain, draw, d), and what lies where in them."""
    draws = posterior_draws(idata, model, "prior_from")
    draws = unconstrained_draws(model, draws, "prior_from")
    unknowns = Unknowns(model.continuous_value_vars, model.initial_point())
    positions = side_by_side([draws[name] for name in unknowns.names])
    counts = np.ones(positions.shape[1], dtype=bool)
    for step in step_statistics(idata):
        counts &= (step.weight > 0).all(axis=0)  # others explore, at another temperature
        weights = step.weight[:, counts]
        targets = step.target[:, counts]
        if not np.allclose(targets, 1.0) or not np.allclose(weights, weights[:, :1]):
            raise ValueError(
                "prior_from: this run has draws of different weights, or at a temperature other "
                "than 1, which are none of the posterior. Sample with temperature=1 and a constant "
                "learning rate."
            )
    positions = positions[:, counts].astype(float)
    finite = np.isfinite(positions).all(axis=(0, 1))
    if not finite.all():
        worst = _name(model, unknowns, int(np.argmin(finite)))
        raise ValueError(
            f"prior_from: draws of {worst} aren't finite on the unconstrained scale: the posterior "
            "reaches the bounds of the parameter, or the run has failed."
        )
    return positions, unknowns


def _refuse_not_mixed(positions: Array, names: list[str]) -> None:
    """Refuse chains that don't agree."""
    table = not_mixed(mixing(positions, np.ones(positions.shape[:2]), names))
    if not table.empty:
        worst = table.iloc[0]
        raise ValueError(
            f"prior_from: the chains haven't mixed: {table.index[0]} has R-hat "
            f"{worst['r_hat']:.2f} and {worst['ess_bulk']:.0f} effective draws, where at most 1.05 "
            "and at least 100 are needed. Raise tune and draws."
        )


def _all_rows(given: Any, model: Model, compile_kwargs: Mapping[str, Any] | None) -> AllRows:
    """Compile the gradient of the rows of a step, or of those in a model."""
    if given is None:
        batch_size = "auto" if model.observed_RVs else None
        arguments = {"initial_point": None, "batch_size": batch_size, "data": None}
        given = GivenRows(model, {**arguments, "compile_kwargs": None})
    rows: AllRows = given.all_rows(compile_kwargs)
    return rows


def _some(positions: Array, n_draws: int) -> Array:
    """Return evenly spaced draws of all chains, (k, d)."""
    if not is_whole(n_draws) or n_draws < 10:
        raise ValueError(f"n_draws={n_draws!r}: must be a whole number of draws, at least 10.")
    n_chains, n, d = positions.shape
    per_chain = max(2, int(n_draws) // n_chains)
    places = np.unique(np.linspace(0, n - 1, per_chain).round().astype(int))
    return positions[:, places].reshape(-1, d)


def _gradients(rows: AllRows, unknowns: Unknowns, some: Array, model: Model) -> Array:
    """Return ∇log p given all rows at some positions, (k, d)."""
    point = model.initial_point()
    points = [unknowns.unravel(position, point) for position in some]
    draws = {name: np.array([[point[name] for point in points]]) for name in unknowns.names}
    return rows.gradients(draws)[0].astype(float)


def _refuse_not_finite(gradients: Array, names: list[str]) -> None:
    finite = np.isfinite(gradients).all(axis=0)
    if not finite.all():
        raise ValueError(
            f"prior_from: the gradient of log p by {names[int(np.argmin(finite))]} isn't finite at "
            "some draws. Pass the step or the model that made this run, with the same data."
        )


def _at_most(limit: float, shift: Array, sd: Array) -> Array:
    """Return a shift that is no longer than some standard deviations in any entry."""
    return shift / max(1.0, np.abs(shift / sd).max() / limit)


def _covariance(
    rows: AllRows, mean: Array, spread: Array, positions: Array, names: list[str]
) -> Array:
    """Return the inverse of the Hessian at the mean, (d, d)."""
    d = mean.size
    factor = np.diag(np.sqrt(np.diag(spread)))
    if positions.shape[0] * positions.shape[1] >= DRAWS_PER_PARAMETER * d:
        with suppress(np.linalg.LinAlgError):  # parameters may depend on each other to round-off
            factor = np.linalg.cholesky(spread)
    # LᵀHL is near 1, so that its inverse has small errors of rounding
    scaled = factor.T @ rows.hessian(mean, factor) @ factor
    if not np.isfinite(scaled).all():
        worst = names[int(np.argmin(np.isfinite(scaled).all(axis=0)))]
        raise ValueError(
            f"prior_from: the second derivatives of log p by {worst} aren't finite at the mean of "
            "the draws, so that there is no Gaussian."
        )
    values, vectors = np.linalg.eigh((scaled + scaled.T) / 2)
    if values[0] <= 0:
        direction = factor @ vectors[:, 0] / np.sqrt(np.diag(spread))
        worst = names[int(np.argmax(np.abs(direction)))]
        raise ValueError(
            f"prior_from: at the mean of the draws the log-density has no maximum along {worst}: "
            "its Hessian isn't negative definite. The posterior has several modes, or is flat "
            "there, and no Gaussian stands for it. Run on all data together."
        )
    half = factor @ vectors / np.sqrt(values)
    return half @ half.T


def _parameters(model: Model, unknowns: Unknowns, mean: Array) -> tuple[Parameter, ...]:
    """Return the names, shapes and places of the parameters, and their values at the mean."""
    parameters = []
    for value, shape in zip(unknowns.variables, unknowns.shapes, strict=True):
        rv = model.values_to_rvs[value]
        place = unknowns.places[value.name]
        transformed = Transformed(rv, model.rvs_to_transforms[rv], shape)
        own_value = transformed.backward_of(mean[place])
        parameters.append(Parameter(rv.name, shape, place, own_value))
    return tuple(parameters)


def _name(model: Model, unknowns: Unknowns, index: int) -> str:
    """Name of an entry of a position, such as ``beta[3]``, by its random variable."""
    value_name, bracket, entry = unknowns.name_of(index).partition("[")
    names = {value.name: model.values_to_rvs[value].name for value in unknowns.variables}
    return names[value_name] + bracket + entry
