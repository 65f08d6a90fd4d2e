"""Closing lines of a benchmark: the machine, the versions, one line of JSON, a table.

machine = report.machine()
rows = ...
report.print_json({"benchmark": "name", "rows": rows, **report.closing(machine, "numpy")})
print(report.markdown_table(["", "seconds"], [["name", 1.5]]))
"""

import importlib.metadata
import json
import math
import os
import platform
import sys

__all__ = [
    "closing",
    "figure",
    "machine",
    "markdown_table",
    "note",
    "print_json",
    "progress",
    "versions",
]


def machine():
    """Processors that this process may use, and the machine's load before the benchmark."""
    return {"processors": len(os.sched_getaffinity(0)), "load": [_load()]}


def versions(*packages):
    """Python's version and those of ``packages`` that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def closing(machine, *packages):
    """``machine`` with the load after the benchmark, and the versions."""
    return machine | {"load": [*machine["load"], _load()], "versions": versions(*packages)}


def progress(name, row):
    """Print a row to standard error as soon as it is there."""
    print(json.dumps(_plain({name: row})), file=sys.stderr, flush=True)


def print_json(result):
    """Print one line; what is not finite is null."""
    print(json.dumps(_plain(result)), flush=True)


def markdown_table(titles, rows):
    """Lines of a table, the first column to the left; numbers to three digits, None a dash."""
    lines = [_line(titles), "|---" + "|---:" * (len(titles) - 1) + "|"]
    return "\n".join(lines + [_line(_cell(cell) for cell in row) for row in rows])


def note(result):
    """Text below a table: versions, processors and load."""
    listed = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    before, after = result["load"]
    return f"{listed}; {result['processors']} processors, load {before} before and {after} after."


def figure(x, digits=4):
    """To so many digits; None for what JSON has no word for."""
    return float(f"{x:.{digits}g}") if math.isfinite(x) else None


def _load():
    return round(os.getloadavg()[0], 1)


def _plain(value):
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bool | str | int | None):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return figure(value, 6)


def _cell(value):
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(cells):
    return "| " + " | ".join(cells) + " |"
