"""Whether the chains of a run agree, in numbers and in words. Knows draws and ArviZ; no models, no steps."""

import arviz as az
import numpy as np
import pandas as pd
import xarray as xr

__all__ = ["by_variable", "mixing", "say_unmixed", "unmixed"]

MOST_R_HAT = 1.05  # rank-normalised, of chains that agree
HUGE = 1e6  # and beyond it, of chains that don't move
FEWEST_DRAWS = 100  # effective draws of the bulk, over all chains


def mixing(positions, weights, names) -> pd.DataFrame:
    """Return ``r_hat`` (rank-normalised) and ``ess_bulk`` of each unknown.

    Parameters
    ----------
    positions : array of shape (chain, draw, d)
    weights : array of shape (chain, draw)
        Draws that have none in some chain are left out. One chain is compared with itself, in
        halves.
    names : list of str
        Of the unknowns.
    """
    draws = positions[:, (weights > 0).all(axis=0)]
    if len(draws) == 1:
        half = draws.shape[1] // 2
        draws = np.stack([draws[0, :half], draws[0, half : 2 * half]])
    data = xr.Dataset({"x": (("chain", "draw", "unknown"), draws)})
    with np.errstate(all="ignore"):
        r_hat, ess = (np.asarray(of(data)["x"], dtype=float) for of in (az.rhat, az.ess))
    r_hat[~(r_hat < HUGE)] = np.inf  # not a number where nothing has moved
    ess = np.nan_to_num(ess)
    return pd.DataFrame({"r_hat": r_hat, "ess_bulk": ess}, index=names)


def unmixed(table) -> pd.DataFrame:
    """Return the rows of those unknowns on which chains disagree or say little, the worst first."""
    found = table[~((table["r_hat"] <= MOST_R_HAT) & (table["ess_bulk"] >= FEWEST_DRAWS))]
    return found.sort_values(["r_hat", "ess_bulk"], ascending=[False, True])


def say_unmixed(table) -> list[str]:
    """Say which unknowns haven't mixed, the worst in the first line, and what to do; [] if all have."""
    found = unmixed(table)
    if found.empty:
        return []
    r_hat = found["r_hat"]
    ess = found["ess_bulk"]
    words = []
    if np.isinf(r_hat.max()):
        words.append(f"R-hat of {r_hat.idxmax()} is infinite, as of one that hasn't moved")
    elif r_hat.max() > MOST_R_HAT:
        words.append(f"R-hat of {r_hat.idxmax()} is {r_hat.max():.2f}")
    if ess.min() < FEWEST_DRAWS:
        words.append(f"{ess.idxmin()} has {ess.min():.0f} effective draws")
    which = f"; unmixed are {by_variable(found.index, table.index)}" if len(table) > 1 else ""
    return [
        f"The chains haven't mixed: {', '.join(words)}{which}.",
        f"So there is no verdict on bias, which takes R-hat below {MOST_R_HAT} and {FEWEST_DRAWS} "
        "effective draws over all chains, of each unknown.",
        "Raise tune and draws. If R-hat stays, chains sit in several modes, or steps that suit one "
        "part of the posterior don't suit another, as in a funnel: write the model otherwise, or "
        "take NUTS.",
    ]


def by_variable(found, names) -> str:
    """Say how many entries of each variable are among those ``found``, the most first."""
    counts = pd.Series([_variable(name) for name in found]).value_counts()
    sizes = pd.Series([_variable(name) for name in names]).value_counts()
    listed = [
        f"{n} of {sizes[name]} in {name}" if sizes[name] > 1 else name for name, n in counts.items()
    ]
    more = [f"{len(listed) - 5} more variables"] if len(listed) > 6 else []
    return ", ".join(listed[:5] + more if more else listed)


def _variable(name) -> str:
    return name.partition("[")[0]
