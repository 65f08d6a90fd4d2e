"""Files behind arrays: a memory map must not be read beyond the end of its file.

Systems end a process for such a read (SIGBUS). Lengths of files are therefore compared before and
after whatever reads rows. Knows memory maps and files.
"""

import os

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from pymc_sghmc.exceptions import ChainError
from pymc_sghmc.memory import memory_map_of

__all__ = [
    "DataFileError",
    "MappedFile",
    "check_file",
    "check_files",
    "is_on_disk",
    "mapped_file",
    "whole_files",
]


class DataFileError(ChainError, ValueError):
    """A file of the data has changed."""


class MappedFile(NamedTuple):
    """A file that an array lies in."""

    name: str
    needed: int  # bytes, from the file's beginning to the array's end

    @property
    def is_cut_short(self) -> bool:
        """Whether it has fewer bytes. A file that is gone or replaced still serves its maps."""
        try:
            return os.stat(self.name).st_size < self.needed
        except OSError:
            return False


def mapped_file(array: Any) -> MappedFile | None:
    """Return the file that an array lies in; None of an array in memory, or of no array."""
    memory_map = memory_map_of(array)
    if memory_map is None or memory_map.filename is None:
        return None
    if not os.path.exists(memory_map.filename):
        return None
    needed = memory_map.offset + memory_map.nbytes
    return MappedFile(name=os.fspath(memory_map.filename), needed=needed)


def is_on_disk(arrays: Mapping[str, Any]) -> bool:
    """Whether any of these arrays lies in a file."""
    return any(mapped_file(array) is not None for array in arrays.values())


def check_file(name: str, array: Any) -> None:
    """Refuse an `np.memmap` whose file has become shorter than it."""
    file = mapped_file(array)
    if file is not None and file.is_cut_short:
        raise ValueError(
            f"data=: the file {file.name} of {name!r} has {os.path.getsize(file.name)} bytes, "
            f"fewer than the {file.needed} of its rows: it was cut short."
        )


def check_files(files: Iterable[MappedFile]) -> None:
    """Raise `DataFileError` if one of these files has become shorter than what is read of it."""
    for file in files:
        if file.is_cut_short:
            raise DataFileError(
                f"the file {file.name} has become shorter than the data that are read from it: it "
                "was cut or is being written anew. Write new data to another file, and start anew"
            )


@contextmanager
def whole_files(files: Iterable[MappedFile]) -> Iterator[None]:
    """Check these files before and after what reads them."""
    check_files(files)
    try:
        yield
    finally:
        check_files(files)
