"""A copy of all rows of a source in files of this machine. Knows sources."""

import os
import shutil
import tempfile
import weakref

from pathlib import Path

import numpy as np

from pymc_sghmc.protocols import Array
from pymc_sghmc.rows.sources import Source

__all__ = ["local_copy"]

SPARE = 1.05  # times the size of the copy, which has to be free


def local_copy(source: Source, asked_by: str) -> dict[str, Array]:
    """Copy all rows to memory-mapped files in a temporary folder, in the order of the loader.

    The folder is removed with the last of the arrays, or at the end of the process.

    Parameters
    ----------
    source : Source
    asked_by : str
        The argument that needs all rows, for messages.

    Raises
    ------
    ValueError
        If the disk hasn't room for them.
    """
    n_rows = source.rows_per_pass
    needed = n_rows * source.row_bytes
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < SPARE * needed:
        raise ValueError(
            f"{asked_by} with data=: all rows are needed on this machine, and a copy of "
            f"{n_rows:,} takes {needed / 1e9:.3g} GB, where {tempfile.gettempdir()} has "
            f"{free / 1e9:.3g} GB free. Make room, or set the environment variable TMPDIR to a "
            "folder on another disk."
        )
    folder = Path(tempfile.mkdtemp(prefix="pymc_sghmc-"))
    try:
        arrays = _copied(source, folder, n_rows)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    in_use = set(arrays)
    process = os.getpid()

    def forget(name: str) -> None:
        in_use.discard(name)
        if not in_use and os.getpid() == process:  # a forked process has no say in it
            shutil.rmtree(folder, ignore_errors=True)

    for name, array in arrays.items():
        weakref.finalize(array, forget, name)
    return arrays


def _copied(source: Source, folder: Path, n_rows: int) -> dict[str, Array]:
    """Write all rows to files of a folder, an array in each, and return these to be read."""
    files = {name: folder / f"{number}" for number, name in enumerate(source.names)}
    shapes = {name: (n_rows, *source.first[name].shape[1:]) for name in source.names}
    types = {name: source.first[name].dtype for name in source.names}
    new = {name: np.memmap(files[name], types[name], "w+", shape=shapes[name]) for name in files}
    source.copy_to(new)
    for array in new.values():
        array.flush()
    return {name: np.memmap(files[name], types[name], "r", shape=shapes[name]) for name in files}
