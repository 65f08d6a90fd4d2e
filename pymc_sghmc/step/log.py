"""Log lines of a step that was set up: its settings, and how long that took. Changes nothing."""

import logging

from typing import Any

from pymc_sghmc.gradients.density import LogDensity
from pymc_sghmc.hierarchy.centring import centring_of
from pymc_sghmc.hierarchy.marginal import marginal_of
from pymc_sghmc.hierarchy.placement import TOLERANCE
from pymc_sghmc.step.setup_display import SetupDisplay
from pymc_sghmc.tuning.budget import MANY
from pymc_sghmc.tuning.pool_report import PoolReport
from pymc_sghmc.tuning.setup import Setup
from pymc_sghmc.tuning.sizes import RowChoice
from pymc_sghmc.tuning.tuner import Tuner

__all__ = ["WRONG", "log_rows_elsewhere", "log_setup", "log_windows"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

WRONG = 0.1  # posterior standard deviations by which too few nodes may shift the gradient
MANY_VALUES = 100_000  # of effects in a draw, which memory may not hold
GRADIENTS = ("plain minibatches", "first-order control variates", "second-order control variates")


def log_setup(
    sampler: str,
    tuner: Tuner,
    tuning: Any,
    learning_rate: float,
    display: SetupDisplay,
    recovers: bool,
) -> None:
    """Log the size of the problem, the kind of gradient and the predicted bias; details as debug.

    Parameters
    ----------
    sampler : str
    tuner : Tuner
    tuning : Tuning
        That chains begin with.
    learning_rate : float
    display : SetupDisplay
        Which knows how long it took.
    recovers : bool
        Whether each draw has values of the effects that are integrated out.
    """
    setup = tuner.setup
    assert setup is not None  # it is logged after it was made
    d = tuner.gradient.density.d
    _log.info(
        f"{sampler}: {d:,} parameter{'s' * (d > 1)}, "
        f"{_gradient(tuner, tuning)}{_integrated_out(tuner)}, "
        f"{_bias(setup, tuning)}. Setting up took {display.total:.1f} s, "
        f"{display.compiling:.1f} s of them for building and compiling functions, and "
        f"{_passes(display.passes, tuner.gradient.data.n_reads)}."
    )
    _log.debug(f"{sampler}: {_settings(tuner, setup.metric.kind, tuning, learning_rate)}.")
    is_too_noisy = tuner.gradients[2] is not None and setup.noise.second_order is None
    is_too_noisy = is_too_noisy and tuning.order < 2  # else a chain has just given them up
    if is_too_noisy and not tuner.takes_all_rows(tuning):
        _log.info(
            f"{sampler} uses {GRADIENTS[tuning.order]}: second-order ones would be too noisy "
            "two standard deviations or more from the reference point with so few rows."
        )
    density = tuner.gradient.density
    may_choose = tuner.row_choice is not RowChoice.AS_GIVEN
    is_skewed = may_choose and tuner.takes_all_rows(tuning) and bool(setup.skewed)
    if is_skewed and isinstance(density, LogDensity):
        own_names = [density.unknowns.own_name_of(place) for place in setup.skewed]
        names = ", ".join(dict.fromkeys(own_names))
        _log.info(
            f"{sampler}: the posterior of {names} is much steeper on one side. Minibatches are too "
            "noisy there, so that each step uses all data, and NUTS may be as fast."
        )
    if tuning.order == 1 and d > MANY and tuner.gradient.density.group_coefficients:
        _log.info(
            f"{sampler}: standard deviations of single parameters may be off by a tenth, as "
            "the noise of so many isn't known well. Raise batch_size if that matters."
        )
    _log_size_of_effects(sampler, tuner, recovers)


def _bias(setup: Setup, tuning: Any) -> str:
    """Say how much too large variances will be, as far as the posterior is like the fit."""
    if not setup.fit.is_mode:
        return "bias of the variances unknown"
    return f"predicted bias of the variances {round(100 * tuning.bias, 1) + 0.0:.1f} %"


def _passes(passes: float, n_reads: int | None) -> str:
    """Say how often all rows were evaluated, and how often a source was read for that."""
    done = f"{passes:.0f} passes over the data"
    return done if n_reads is None else f"{done}, in {n_reads} reads of the source"


def log_rows_elsewhere(sampler: str, n_rows: int) -> None:
    """Log that functions of other packages don't see the rows of ``data=``, if there are any."""
    if n_rows:
        _log.info(
            f"{sampler}: data= has {n_rows:,} rows. Functions of PyMC and ArviZ that evaluate the "
            "model, such as log-likelihoods, LOO and predictions, see only the few rows that the "
            "model holds. check_bias(idata, step) and loo(idata, step) of pymc_sghmc.diagnostics "
            "see all."
        )


def log_windows(sampler: str, pool: PoolReport) -> None:
    """Log that a loader is read pass after pass, as a pool of its rows doesn't serve."""
    _log.info(
        f"{sampler}: {pool.size:,} of {pool.n_rows:,} rows in memory could move posterior means by "
        f"{pool.error:.2g} standard deviations. So each step reads its rows from the loader."
    )


def _gradient(tuner: Tuner, tuning: Any) -> str:
    if tuner.takes_all_rows(tuning):
        return "all data"
    kind = GRADIENTS[tuning.order]
    if tuning.rows is None:
        return kind
    unit = "rows" if marginal_of(tuner.gradient.density) is None else "groups"
    return f"{kind} of {tuning.rows} {unit}{_pool(tuner, tuning)}"


def _pool(tuner: Tuner, tuning: Any) -> str:
    pool = tuner.pool_report(tuning)
    if pool is None:
        return ""
    return (
        f" from a pool of {pool.size:,} of {pool.n_rows:,} (which moves means by about "
        f"{pool.error:.1g} posterior standard deviations)"
    )


def _integrated_out(tuner: Tuner) -> str:
    marginal = marginal_of(tuner.gradient.density)
    if marginal is None:
        return ""
    return f", {', '.join(marginal.names)} integrated out of {marginal.n_clusters:,} groups"


def _settings(tuner: Tuner, preconditioner: str, tuning: Any, learning_rate: float) -> str:
    parts = [f"{preconditioner} preconditioner"]
    parts.append(f"learning_rate={learning_rate:.3g}")
    if tuning.friction is not None:
        parts.append(f"friction={tuning.friction:.3g}")
    density = tuner.gradient.density
    centring = centring_of(density)
    if centring is not None:
        for name, weight in centring.by_name().items():
            parts.append(f"{name} centred by {weight.mean():.2f}")
    marginal = marginal_of(density)
    if marginal is not None:
        parts.append(f"{marginal.n_nodes} nodes for each integral")
        if WRONG > marginal.error >= TOLERANCE:
            parts.append(
                f"whose gradient changes by {marginal.error:.2g} posterior standard deviations "
                "where an integral has fewer nodes"
            )
    return ", ".join(parts)


def _log_size_of_effects(sampler: str, tuner: Tuner, recovers: bool) -> None:
    marginal = marginal_of(tuner.gradient.density)
    if marginal is None:
        return
    n_values = marginal.n_groups * marginal.k
    if n_values < MANY_VALUES:
        return
    names = ", ".join(marginal.names)
    size = (
        f"a draw takes {8e-6 * n_values:,.1f} MB or more, 1,000 draws of four chains "
        f"{0.032 * n_values / 1e3:,.0f} GB"
    )
    if recovers:
        _log.info(
            f"{sampler}: with {names} {size}. If that is too much, pass recover=False to the step "
            "and var_names without them to pm.sample, and draw them afterwards with "
            "recover_effects."
        )
    else:
        _log.info(
            f"{sampler}: with recover=False {names} is NaN in all draws, and PyMC stores that: "
            f"{size}. Pass var_names without {names} to pm.sample."
        )
