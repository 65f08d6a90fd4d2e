"""Why a chain can't go on: which parameter, which rows, and what to do. Changes nothing."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pymc_sghmc.models.unknowns import Unknowns

__all__ = ["explanation", "likely_causes", "shown_row", "stop_message"]


def explanation(
    error: Any,
    unknowns: Unknowns,
    tuner: Any,
    chain: Any,
    start: np.ndarray | None,
    draw: Any,
) -> str:
    """Explain what isn't finite, where, and what may help.

    Parameters
    ----------
    error : NonFinite
    unknowns : Unknowns
    tuner : Tuner
    chain : Chain
    start : array of shape (d,)
        Where the draw began.
    draw : Draw
        As far as it was made.
    """
    where = _where(error, unknowns)
    given = ", ".join(name for name, _ in tuner.gradient.density.given_types)
    others = f", or look at the steps that sample {given}" if given else ""
    odd = ""
    is_set_up = np.isfinite(draw.learning_rate)
    if np.isfinite(error.position).all() or not is_set_up:  # else it ran away, whatever the data
        odd = tuner.gradient.data.odd_values(error.minibatch)
    rows = "the data" if error.minibatch is None else "these rows of the data"
    if odd == "missing values":
        return f"{where}: {rows} have {odd}. Drop such rows"
    starts_well = chain.state is not None or tuner.setups.is_finite_at(start)
    if odd and (starts_well or not is_set_up):  # they may be bounds
        return f"{where}: {rows} have {odd}. Drop such rows, unless they are bounds"
    if not starts_well:
        return (
            f"{where} at the starting point. Check the model with model.debug(), or let chains "
            f"start elsewhere, by pm.sample(initvals={{name: value}}){others}"
        )
    if not is_set_up:
        return f"{where} while the step is set up{_of_row(error, tuner, start)}{others}"
    eta = draw.learning_rate
    return (
        f"{where} at inner step {chain.n_updates} (draw {chain.n_tuned + chain.n_kept} of this "
        f"chain) with learning_rate={eta:.3g}. {_advice(tuner, eta)}{others}"
    )


def _of_row(error: Any, tuner: Any, start: np.ndarray | None) -> str:
    """Name a row whose log-likelihood isn't finite, unless it is at the start."""
    data = tuner.gradient.data
    if not np.isfinite(error.position).all() or data.rows_of_each > 1:
        return ". Check the data for values that the likelihood doesn't allow"
    if data.n_reads is not None:
        return _of_row_elsewhere(tuner.gradient.passes.row_not_finite(error.position))
    row = tuner.gradient.passes.first_row_not_finite(error.position)
    if row is None:
        return ". Check the model with model.debug()"
    if start is not None and tuner.gradient.passes.first_row_not_finite(start) is None:
        return (
            f": the log-likelihood of row {row.number} is not finite there, and that of all rows "
            "is at the starting point. If what the likelihood allows depends on a parameter, such "
            "as a bound, use NUTS, or a likelihood that allows all values. If not, give the "
            "parameters narrower priors"
        )
    return (
        f": the log-likelihood of row {row.number} is not finite there. Does the likelihood allow "
        "the values of this row? Correct or drop such rows"
    )


def _of_row_elsewhere(row: Mapping[str, np.ndarray] | None) -> str:
    """Show a row of a source, whose order may be another in each pass."""
    if row is None:
        return ". Check the model with model.debug(), which sees the rows that it holds"
    return (
        f": the log-likelihood of this row of the data is not finite there: {shown_row(row)}. Does "
        "the likelihood allow these values? Correct or drop such rows"
    )


def shown_row(row: Mapping[str, np.ndarray]) -> str:
    """Return the values of a row, by container, as text."""
    return "; ".join(f"{name}={_shown(values)}" for name, values in row.items())


def _shown(values: np.ndarray) -> str:
    return np.array2string(np.asarray(values), precision=6, threshold=6, edgeitems=2)


def _where(error: Any, unknowns: Unknowns) -> str:
    """Name the quantity, and the parameter, that isn't finite."""
    for kind, values in (("position", error.position), ("gradient", error.gradient)):
        if np.isfinite(values).all():
            continue
        entries = np.diag(values) if np.ndim(values) == 2 else values
        bad = np.flatnonzero(~np.isfinite(entries))
        return f"the {kind} of {unknowns.name_of(bad[0] if len(bad) else 0)} is not finite"
    names = ", ".join(unknowns.names)
    if np.isfinite(error.logp):
        return f"the chain ran far away, to a log-density of {names} of {error.logp:.3g},"
    return f"the log-density of {names} is {error.logp:.3g}"


def _advice(tuner: Any, learning_rate: float) -> str:
    if not tuner.settings.choose_learning_rate:
        return f"Try learning_rate={learning_rate / 10:.2g}"
    advice = "Use NUTS for this model"
    if not tuner.gradient.is_exact:
        advice = "Raise batch_size. If that does not help, use NUTS for this model"
    setup = tuner.setup  # None if it failed
    if setup and not setup.fit.is_mode:
        advice = (
            f"{advice}, or priors that keep scales away from zero and from very large values. "
            f"{likely_causes(tuner.gradient.density)[:-1]}"
        )
    return advice


def likely_causes(density: Any) -> str:
    """Name what may keep a posterior from being near a Gaussian, as a sentence."""
    if not density.group_coefficients:
        return (
            "Likely causes: a scale parameter that may be close to zero (a funnel), parameters of "
            "which only a sum or a product is known (a ridge), or one of which the data say "
            "nothing."
        )
    names = ", ".join(density.group_coefficients)
    return f"The scales of {names} may be close to zero, or hardly determined by the data."


def stop_message(sampler: str, message: str, n_kept: int) -> str:
    """Return the reason for which a chain ended early, and what becomes of its draws."""
    return (
        f"{sampler} stopped: {message}. The {n_kept} draws of this chain before it are kept, as "
        "after an interruption: of several chains some may be cut short or left out. A draw marked "
        "in sample_stats.diverging repeats the one before it."
    )
