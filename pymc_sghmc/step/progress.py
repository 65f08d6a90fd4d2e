"""Columns of PyMC's progress bars, in the terminal and in notebooks."""

import math

from collections.abc import Callable, Mapping
from typing import Any

from rich.progress import ProgressColumn, TextColumn
from rich.table import Column

__all__ = ["make_progressbar_update_functions", "progressbar_config"]

SMALL = 1e-3  # learning rates below it are shown with an exponent


def progressbar_config(
    n_chains: int = 1,
) -> tuple[list[ProgressColumn], dict[str, list[Any]]]:
    """Return columns and first values for PyMC's progress bars.

    Headers and numbers are short: in 80 columns PyMC leaves five characters for each.
    """
    columns: list[ProgressColumn] = [
        TextColumn("{task.fields[divergences]}", table_column=Column("Lost", ratio=1)),
        TextColumn("{task.fields[learning_rate]}", table_column=Column("Rate", ratio=1)),
        TextColumn("{task.fields[temperature]:0.2f}", table_column=Column("Temp.", ratio=1)),
    ]
    start = {"divergences": 0, "learning_rate": "", "temperature": 0.0}
    return columns, {name: [value] * n_chains for name, value in start.items()}


def make_progressbar_update_functions() -> tuple[Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """Return a function from the statistics of a draw to what the progress bar shows."""
    shown = {"temperature": 1.0}

    def update_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
        # One draw's temperature is mostly gradient noise, and far off on the way from the start:
        # show a running mean over the last hundred draws, each bounded.
        new = stats["configurational_temperature"]
        if math.isfinite(new):
            shown["temperature"] += (min(max(new, -10.0), 10.0) - shown["temperature"]) / 100
        return {
            "divergences": stats["divergences"],
            "learning_rate": _short(stats["learning_rate"]),
            "temperature": shown["temperature"],
            "failing": stats["divergences"] > 0,
        }

    return (update_stats,)


def _short(learning_rate: float) -> str:
    """Return it in about five characters; as text, since notebooks show three decimals."""
    if learning_rate >= SMALL:
        return f"{learning_rate:.2g}"
    return f"{learning_rate:.0e}".replace("e-0", "e-")
