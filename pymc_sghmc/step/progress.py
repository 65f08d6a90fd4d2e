"""Columns of PyMC's progress bars, in the terminal and in notebooks."""

import math

from rich.progress import TextColumn
from rich.table import Column

__all__ = ["make_progressbar_update_functions", "progressbar_config"]


def progressbar_config(n_chains=1):
    """Columns and first values for PyMC's progress bars."""
    columns = [
        TextColumn("{task.fields[divergences]}", table_column=Column("Divergences", ratio=1)),
        TextColumn("{task.fields[learning_rate]}", table_column=Column("Learning rate", ratio=1)),
        TextColumn("{task.fields[temperature]:0.2f}", table_column=Column("Temperature", ratio=1)),
    ]
    start = {"divergences": 0, "learning_rate": "", "temperature": 0.0}
    return columns, {name: [value] * n_chains for name, value in start.items()}


def make_progressbar_update_functions():
    """From the statistics of a draw to what the progress bar shows."""
    shown = {"temperature": 1.0}

    def update_stats(stats):
        # One draw's temperature is mostly gradient noise, and far off on the way from the start:
        # show a running mean over the last hundred draws, each bounded.
        new = stats["configurational_temperature"]
        if math.isfinite(new):
            shown["temperature"] += (min(max(new, -10.0), 10.0) - shown["temperature"]) / 100
        return {
            "divergences": stats["divergences"],
            # as text: notebooks show numbers with three decimals
            "learning_rate": f"{stats['learning_rate']:.2e}",
            "temperature": shown["temperature"],
            "failing": stats["divergences"] > 0,
        }

    return (update_stats,)
