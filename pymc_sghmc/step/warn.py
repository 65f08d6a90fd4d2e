"""Warnings of a step when it is built and after its draws, and refusals of its set-up.

Knows gradients, models and settings; changes nothing.
"""

import logging
import warnings

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pymc.model import Model
from pymc.stats.convergence import SamplerWarning, WarningType

from pymc_sghmc.hierarchy.marginal import Marginal, marginal_of
from pymc_sghmc.models.graphs import minibatch_outputs
from pymc_sghmc.models.jumps import jumping_unknowns
from pymc_sghmc.step.explain import likely_causes, shown_row
from pymc_sghmc.step.log import WRONG
from pymc_sghmc.tuning.chain_tuning import ByHand
from pymc_sghmc.tuning.modes import MOST_MODES
from pymc_sghmc.tuning.sizes import RowChoice

__all__ = [
    "draw_warning",
    "jumps_around",
    "more_rows_warning",
    "refuse_odd_values",
    "refuse_single_rows",
    "slower_gradient_warning",
    "warn_of_jumps",
    "warn_of_other_steps",
    "warn_of_setup",
]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

MANY_ROWS = 1000  # more aren't needed to see a jump
REACH = 8.0  # sds from the mean of a fit, that chains may come
FEW_DRAWS = 50  # of tuning, too few to measure by
STACKLEVEL = 5  # a function here, two of the step's and the sampler's __init__, and who calls it


def warn_of_other_steps(sampler: str, model: Model, density: Any, data: Any) -> None:
    """Warn of other steps beside this one that see other data."""
    others = ", ".join(name for name, _ in density.given_types)
    if others and minibatch_outputs([model.logp()]):
        warnings.warn(
            f"{sampler} leaves {others} to other steps, and the model has a pm.Minibatch. Write "
            "the model with all data and use batch_size. Unless the other steps are "
            "stochastic-gradient steps, too, they sample a density that changes at every call, and "
            "the posterior is wrong.",
            UserWarning,
            stacklevel=STACKLEVEL,
        )
    if data is not None and density.likelihood_needs_others:
        needed = ", ".join(density.needed_by_likelihood)
        warnings.warn(
            f"{sampler}(data=...) leaves {needed} to other steps. Let this step sample them, too: "
            "other steps see only the rows that the model itself holds, and make the posterior "
            "wrong, unless they are stochastic-gradient steps with the same data.",
            UserWarning,
            stacklevel=STACKLEVEL,
        )


def jumps_around(
    gradient: Any, places: Mapping[str, slice], position: np.ndarray, reach: Any = None
) -> dict[str, slice]:
    """Return those of some parameters with which the log-density of a few rows jumps.

    Parameters
    ----------
    gradient : MinibatchGradient
    places : dict of {str: slice}
        Of the parameters in question.
    position : array of shape (d,)
        Around which is looked.
    reach : array of shape (d,), optional
        See `jumping_unknowns`.
    """
    if not places:
        return {}
    minibatch = gradient.order.probe(np.random.default_rng(0))
    some = tuple(idx[:: 1 + len(idx) // MANY_ROWS] for idx in minibatch.rows)
    minibatch = minibatch._replace(rows=some)
    names = jumping_unknowns(lambda theta: gradient(theta, minibatch)[0], position, places, reach)
    return {name: places[name] for name in names}


def warn_of_jumps(sampler: str, tuner: Any, jumping: Mapping[str, slice]) -> None:
    """Warn if the log-density jumps with a parameter, which no gradient sees.

    Around where chains come, if there is a fit that says so: some densities are those of another
    formula beyond some value of a parameter, as PyMC's exponentially modified Gaussian is, and jump
    there by a little.

    Parameters
    ----------
    sampler : str
    tuner : Tuner
    jumping : dict of {str: slice}
        Parameters with which it jumps around the point where chains begin.
    """
    fit = None if tuner.setup is None else tuner.setup.fit
    if fit is not None and fit.is_mode:
        mean = fit.mean.astype(tuner.initial.dtype)
        reach = REACH * fit.metric.diagonal().scales
        jumping = jumps_around(tuner.gradient, jumping, mean, reach)
    if jumping:
        warnings.warn(
            f"{sampler}: the log-density jumps where a condition, an index or a rounded "
            f"number changes with {', '.join(jumping)}. Make the condition smooth, such as "
            "pm.math.sigmoid((x - c) / width) for x > c, or leave these parameters out of vars and "
            "give them to pm.Slice or pm.Metropolis. Gradients don't see the jump: the posterior "
            "is wrong, and the temperature does not show it.",
            UserWarning,
            stacklevel=STACKLEVEL + 1,  # a third function of the step's
        )


def refuse_single_rows(batch_sizes: Sequence[Any]) -> None:
    """Refuse minibatches of one row, from which noise can't be measured."""
    if 1 in batch_sizes:
        raise ValueError(
            "batch_size=1: raise it. Automatic settings need at least 2 rows in a minibatch to "
            "measure how rows differ."
        )


def refuse_odd_values(passes: Any, position: np.ndarray) -> None:
    """Refuse data with missing or infinite values, by which the density isn't finite.

    Infinite ones may be bounds, and do no harm: then the row's log-likelihood is finite.
    """
    if passes.data.odd_values() == "missing values":
        raise ValueError(
            "The data of the likelihood have missing values. Drop these rows, or impute them "
            "beforehand."
        ) from None
    row = _infinite_row(passes, position) if np.isfinite(position).all() else None
    if row is not None:
        raise ValueError(
            f"The data have infinite values, by which the log-likelihood of {row} is not finite. "
            "Drop such rows. If these are bounds, pass an initial_point= at which it is finite."
        ) from None


def _infinite_row(passes: Any, position: np.ndarray) -> str | None:
    """Name a row with infinite values whose log-likelihood isn't finite, if there is one."""
    data = passes.data
    if data.n_reads is not None:
        values = passes.row_not_finite(position)
        if values is None or not any(np.isinf(value).any() for value in values.values()):
            return None
        return f"the row {shown_row(values)}"
    # what is drawn may be a group of rows, in which none is told apart
    row = passes.first_row_not_finite(position) if data.rows_of_each == 1 else None
    if row is None or data.odd_values(data.part(row.group, np.array([row.number]))) == "":
        return None
    return f"row {row.number}"


def warn_of_setup(sampler: str, tuner: Any, tuning: Any) -> None:
    """Log warnings after a set-up: of integrals over effects, and of no mode or several."""
    marginal = marginal_of(tuner.gradient.density)
    if marginal is not None:
        _warn_of_groups(sampler, marginal, tuner, tuning)
    if not tuner.setup.fit.is_mode:
        _log.warning(
            f"{sampler} found no mode around which the posterior is roughly Gaussian. Read R-hat "
            "before anything else: settings may be far off, and temperatures don't show what "
            f"chains don't reach. {likely_causes(tuner.gradient.density)} Pass centre=, or use "
            "NUTS."
        )
    _warn_of_modes(sampler, tuner)
    if tuner.row_choice is RowChoice.AT_LEAST and tuning.rows is not None:
        _log.warning(_too_few_rows(sampler, tuner, tuning))
    pool = tuner.pool_report(tuning)
    if pool is not None and not pool.serves:
        _log.warning(_small_pool(sampler, pool))


def _small_pool(sampler: str, pool: Any) -> str:
    return (
        f"{sampler}: a pool of {pool.size:,} of {pool.n_rows:,} rows may move posterior means by "
        f"{pool.error:.2g} standard deviations. Pass pool=None, which reads rows pass after pass, "
        "or a larger number."
    )


def _warn_of_modes(sampler: str, tuner: Any) -> None:
    """Warn of several modes: each chain stays in one, whatever part of the posterior it holds."""
    modes = tuner.modes
    n = len(modes.shares)
    if n == 1:
        return
    shares = ", ".join(f"{share:.2g}" for share in sorted(modes.shares, reverse=True))
    name = tuner.gradient.density.unknowns.own_name_of(modes.apart)
    _log.warning(
        f"{sampler} found {n} modes of the posterior{' or more' * (n == MOST_MODES)}, farthest "
        f"apart in {name}, with probabilities of about {shares} by a Gaussian fit to each. A chain "
        f"stays in the mode in which it starts. {_where_chains_start(tuner)} If the modes are "
        "copies of each other by symmetry, constrain the model, such as by ordered means of "
        "components or a positive coefficient."
    )


def _where_chains_start(tuner: Any) -> str:
    """Say in which modes chains start, and what R-hat can show then."""
    if tuner.start_is_given:
        return "All chains start near the given initial values: R-hat can't show the others."
    n_started = len(tuner.modes.starts)
    if n_started == len(tuner.modes.shares):
        return (
            "Chains start in each of them in turn, so that R-hat can show it. To look at one "
            "alone pass its values as initvals to pm.sample."
        )
    modes = "mode" if n_started == 1 else f"{n_started} modes in turn"
    return f"Chains start in the most probable {modes}: the draws have nothing of the rest."


def _warn_of_groups(sampler: str, marginal: Marginal, tuner: Any, tuning: Any) -> None:
    """Warn of integrals of effects that are wrong, or that leave a funnel."""
    if marginal.error >= WRONG:
        _log.warning(_inaccurate_integrals(sampler, marginal))
    if tuner.setup.is_gaussian:
        return
    if tuning.order < 2 and not tuner.takes_all_rows(tuning):
        _log.warning(
            f"{sampler}: the posterior isn't near a Gaussian, perhaps because the data hardly "
            f"determine the scale of effects. Pass batch_size=None: each step then takes all "
            f"{marginal.counts.sum():,} rows. With minibatches standard deviations may be off by a "
            "tenth or more, as these are much noisier in some places than in others."
        )


def _inaccurate_integrals(sampler: str, marginal: Any) -> str:
    by = "by an unknown amount"
    if np.isfinite(marginal.error):
        by = f"by {marginal.error:.2g} posterior standard deviations or more"
    return (
        f"{sampler}: {', '.join(marginal.names)} can't be integrated out accurately. Compare with "
        f"a run without marginalize, or with NUTS, before you use the results: the gradient is off "
        f"{by}, and means may be, too. Typical causes are rows of a group that fit several values "
        "of its effects, and effects with a long tail, such as the log of a number near 0."
    )


def slower_gradient_warning(old: Any, new: Any, n_updates: int) -> SamplerWarning | None:
    """Report that a chain lost while tuning gives up second-order gradients, if it does."""
    if old.order < 2 or new.order == 2:
        return None
    return _warning(
        "While tuning, the chain was lost with second-order control variates. It goes on with "
        "another gradient, which needs more rows for the same effective draws.",
        n_updates,
    )


def more_rows_warning(tuner: Any, old: Any, new: Any, n_updates: int) -> SamplerWarning | None:
    """Report that a chain takes more rows than were given, from a tuning draw on."""
    if tuner.row_choice is not RowChoice.AT_LEAST or (new.rows or 0) <= (old.rows or 0):
        return None
    return _warning(
        f"While tuning, the chain took batch_size={tuner.given_rows} for too few rows. It goes on "
        f"with {_rows_of(tuner, new)}.",
        n_updates,
    )


def _too_few_rows(sampler: str, tuner: Any, tuning: Any) -> str:
    return (
        f"{sampler}: batch_size={tuner.given_rows} is too few rows for this model, as control "
        f"variates would be too noisy far out. Each step takes {_rows_of(tuner, tuning)}. Leave "
        "batch_size out to have the number chosen."
    )


def _rows_of(tuner: Any, tuning: Any) -> str:
    """Say how many rows there are in a minibatch whose number was chosen."""
    unit = "rows" if marginal_of(tuner.gradient.density) is None else "groups"
    all_of_them = "all " if tuner.takes_all_rows(tuning) else ""
    return f"{all_of_them}{tuning.rows:,} {unit}"


def draw_warning(
    sampler: str, tuner: Any, chain: Any, position: np.ndarray
) -> SamplerWarning | None:
    """Return a warning after a draw that isn't for tuning, each once a chain."""
    may_warn = chain.n_kept and not chain.is_far
    if may_warn and tuner.departures.is_far(chain.tuning, chain.state, position):
        chain.is_far = True
        return _warning(
            f"{sampler}: the chain went so far from the reference point that second-order "
            'control variates are noisy there. Compare with a run with gradient="control_variates" '
            "or a larger batch_size before you use its draws from here on.",
            chain.n_updates,
        )
    marginal = marginal_of(tuner.gradient.density)
    if chain.n_kept == 1 and marginal is not None and marginal.error >= WRONG:
        # data may have changed since the step was made
        return _warning(_inaccurate_integrals(sampler, marginal), chain.n_updates)
    if chain.n_kept != 1 or isinstance(chain.tuning, ByHand) or not tuner.is_tuned:
        return None
    text = _after_tuning(sampler, tuner, chain)
    return None if text is None else _warning(text, chain.n_updates)


def _after_tuning(sampler: str, tuner: Any, chain: Any) -> str | None:
    """Say what is wrong with the settings that a chain has found, if anything is."""
    pool = tuner.pool_report(chain.tuning)
    if pool is not None and not pool.serves:  # a chain may have changed its gradient
        return _small_pool(sampler, pool)
    if 0 < chain.n_tuned < FEW_DRAWS:
        return (
            f"{sampler}: tune={chain.n_tuned} is too few to measure the noise of the gradient. Use "
            f"at least tune={FEW_DRAWS}, better 500: settings may be wrong."
        )
    if chain.tuning.bias > 2 * tuner.settings.target_bias:
        remedy = "Lower learning_rate, or leave it to the step."
        if tuner.settings.choose_learning_rate:
            remedy = (
                "Raise batch_size. If that does not help, the posterior may be improper or far "
                "from a Gaussian: give all parameters proper priors, or use NUTS."
            )
        return (
            f"{sampler}: variances are predicted to be {100 * chain.tuning.bias:.0f} % too large. "
            f"{remedy}"
        )
    return None


def _warning(text: str, n_updates: int) -> SamplerWarning:
    return SamplerWarning(WarningType.BAD_PARAMS, text, "warn", n_updates)
