"""Files behind arrays: a memory map whose file is cut short ends a process without a word.

Knows memory maps and files.
"""

import os

import numpy as np

from pymc_sghmc.faults import Fault

__all__ = ["FileFault", "check_files", "is_cut_short", "mapped_file"]


class FileFault(Fault, ValueError):
    """A file of the data isn't what it was."""


def mapped_file(array):
    """Return the file that an array lies in and how many bytes of it are needed; None in memory."""
    owner = array
    while isinstance(getattr(owner, "base", None), np.ndarray):
        owner = owner.base
    filename = getattr(owner, "filename", None)
    if not isinstance(owner, np.memmap) or filename is None or not os.path.exists(filename):
        return None
    return os.fspath(filename), owner.offset + owner.nbytes


def is_cut_short(filename, needed) -> bool:
    """Whether a file has fewer bytes; one that is gone, or replaced, is still there for its maps."""
    try:
        return os.stat(filename).st_size < needed
    except OSError:
        return False


def check_files(files) -> None:
    """Raise `FileFault` if one of these files has become shorter than what is read of it."""
    for filename, needed in files:
        if is_cut_short(filename, needed):
            raise FileFault(
                f"the file {filename} has become shorter than the data that are read from it: it was "
                "cut or is being written anew. Write new data to another file"
            )
