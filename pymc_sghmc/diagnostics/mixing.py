"""Whether the chains of a run agree. Knows draws and ArviZ; no models, no steps."""

from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import xarray as xr

from pymc.stats.convergence import SamplerWarning, WarningType

from pymc_sghmc.diagnostics.temperatures import MIN_DRAWS, draw_weights, step_statistics

__all__ = ["by_variable", "mixing", "not_mixed", "report_not_mixed", "single_chain_warnings"]

MAX_R_HAT = 1.05  # rank-normalised, of chains that agree
HUGE = 1e6  # an R-hat above it means that a parameter doesn't move
MIN_EFFECTIVE_DRAWS = 100  # of the bulk, over all chains
MOST_ENTRIES = 300  # of a variable, whose R-hat is looked at where there is one chain


def mixing(positions: np.ndarray, weights: np.ndarray, names: list[str]) -> pd.DataFrame:
    """Return ``r_hat`` (rank-normalised) and ``ess_bulk`` of each parameter.

    Parameters
    ----------
    positions : array of shape (chain, draw, d)
    weights : array of shape (chain, draw)
        Draws whose weight is zero in some chain are left out. A single chain is split in halves,
        which are compared with each other.
    names : list of str
        Names of the parameters.
    """
    draws = positions[:, (weights > 0).all(axis=0)]
    if len(draws) == 1:
        half = draws.shape[1] // 2
        draws = np.stack([draws[0, :half], draws[0, half : 2 * half]])
    data = xr.Dataset({"x": (("chain", "draw", "parameter"), draws)})
    with np.errstate(all="ignore"):
        r_hat, ess = (np.asarray(of(data)["x"], dtype=float) for of in (az.rhat, az.ess))
    r_hat[~(r_hat < HUGE)] = np.inf  # not a number where nothing has moved
    ess = np.nan_to_num(ess)
    return pd.DataFrame({"r_hat": r_hat, "ess_bulk": ess}, index=names)


def not_mixed(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of those parameters that haven't mixed, the worst first."""
    has_mixed = (table["r_hat"] <= MAX_R_HAT) & (table["ess_bulk"] >= MIN_EFFECTIVE_DRAWS)
    return table[~has_mixed].sort_values(["r_hat", "ess_bulk"], ascending=[False, True])


def report_not_mixed(table: pd.DataFrame) -> list[str]:
    """Return lines on the parameters that haven't mixed, the worst in the first, [] if all have."""
    rows = not_mixed(table)
    if rows.empty:
        return []
    return [
        f"The chains haven't mixed: {_reasons(rows, table)}.",
        "Raise tune and draws. If R-hat stays high, chains sit in several modes, whose "
        "probabilities the draws can't tell, or the posterior is a funnel, which no single step "
        "size suits: rewrite the model, or use NUTS.",
        f"There is no verdict on bias: it needs R-hat of at most {MAX_R_HAT} and "
        f"{MIN_EFFECTIVE_DRAWS} effective draws over all chains, for each parameter.",
    ]


def single_chain_warnings(idata: Any) -> list[SamplerWarning]:
    """Warn where the halves of a run's only chain differ: PyMC compares chains where it has more.

    Of a variable with more than 300 entries some are looked at, evenly spaced.
    """
    steps = step_statistics(idata)
    if not steps or idata.posterior.sizes["chain"] > 1:
        return []
    weights = draw_weights(steps, 1, idata.posterior.sizes["draw"])
    if np.count_nonzero(weights) < MIN_DRAWS or not any((step.target > 0).any() for step in steps):
        return []
    entries = {}
    for name, variable in idata.posterior.data_vars.items():
        entries.update(_entries(str(name), np.asarray(variable)[0]))
    if not entries:
        return []
    table = mixing(np.stack(list(entries.values()), axis=-1)[None], weights, list(entries))
    rows = not_mixed(table)
    if rows.empty:
        return []
    text = (
        f"The only chain hasn't mixed, by its two halves: {_reasons(rows, table)}. Raise tune and "
        "draws, and sample four chains, which show more of what is wrong."
    )
    return [SamplerWarning(WarningType.CONVERGENCE, text, "warn")]


def _entries(name: str, draws: np.ndarray) -> dict[str, np.ndarray]:
    """Draws of some entries of a variable by name, of those that move and are finite."""
    shape = draws.shape[1:]
    flat = draws.reshape(len(draws), -1).astype(float)
    some = np.arange(0, flat.shape[1], 1 + flat.shape[1] // (MOST_ENTRIES + 1))
    found = {}
    for i in some:
        values = flat[:, i]
        if np.isfinite(values).all() and values.min() < values.max():
            index = ", ".join(str(k) for k in np.unravel_index(i, shape)) if shape else ""
            found[f"{name}[{index}]" if shape else name] = values
    return found


def _reasons(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    """Say which parameters haven't mixed, ``rows``, of all in ``table``."""
    r_hat = rows["r_hat"]
    ess = rows["ess_bulk"]
    reasons = []
    if np.isinf(r_hat.max()):
        reasons.append(f"R-hat of {r_hat.idxmax()} is infinite, as it did not move")
    elif r_hat.max() > MAX_R_HAT:
        reasons.append(f"R-hat of {r_hat.idxmax()} is {r_hat.max():.2f}")
    if ess.min() < MIN_EFFECTIVE_DRAWS:
        reasons.append(f"{ess.idxmin()} has {ess.min():.0f} effective draws")
    which = f"; not mixed: {by_variable(rows.index, table.index)}" if len(table) > 1 else ""
    return ", ".join(reasons) + which


def by_variable(names: pd.Index, all_names: pd.Index) -> str:
    """List how many of all entries of each variable are among ``names``, the most first."""
    counts = pd.Series([_variable(name) for name in names]).value_counts()
    sizes = pd.Series([_variable(name) for name in all_names]).value_counts()
    listed = [
        f"{n} of {sizes[name]} in {name}" if sizes[name] > 1 else name for name, n in counts.items()
    ]
    more = [f"{len(listed) - 5} more variables"] if len(listed) > 6 else []
    return ", ".join(listed[:5] + more if more else listed)


def _variable(name: str) -> str:
    return name.partition("[")[0]
