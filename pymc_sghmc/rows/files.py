"""Files behind arrays: a memory map whose file is cut short ends a process without a word.

Knows memory maps and files.
"""

import os

from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from pymc_sghmc.exceptions import ChainError

__all__ = ["DataFileError", "MappedFile", "check_files", "mapped_file", "whole_files"]


class DataFileError(ChainError, ValueError):
    """A file of the data isn't what it was."""


class MappedFile(NamedTuple):
    """A file that an array lies in."""

    name: str
    needed: int  # bytes of it
    place: int  # among the maps that are watched: see `bus_errors`

    @property
    def is_cut_short(self) -> bool:
        """Whether it has fewer bytes; one that is gone, or replaced, is still there for its maps."""
        try:
            return os.stat(self.name).st_size < self.needed
        except OSError:
            return False


def mapped_file(array):
    """Return the `MappedFile` that an array lies in, which is watched from then on; None in memory."""
    owner = array
    while isinstance(getattr(owner, "base", None), np.ndarray):
        owner = owner.base
    filename = getattr(owner, "filename", None)
    if not isinstance(owner, np.memmap) or filename is None or not os.path.exists(filename):
        return None
    from pymc_sghmc.rows import bus_errors  # compiles

    return MappedFile(os.fspath(filename), owner.offset + owner.nbytes, bus_errors.watch(owner))


def check_files(files) -> None:
    """Raise `DataFileError` if one of these files has become shorter than what is read of it."""
    for file in files:
        if file.is_cut_short or _was_cut(file.place):
            raise DataFileError(
                f"the file {file.name} has become shorter than the data that are read from it: it "
                "was cut or is being written anew. Write new data to another file, and start anew"
            )


def _was_cut(place) -> bool:
    from pymc_sghmc.rows import bus_errors

    return bus_errors.was_cut(place)


@contextmanager
def whole_files(files):
    """Raise `DataFileError` before or after what reads files, if it may have read what isn't there."""
    check_files(files)
    try:
        yield
    finally:
        check_files(files)
