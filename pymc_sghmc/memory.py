"""Whose memory an array shows. Knows arrays alone."""

from typing import Any

import numpy as np

__all__ = ["memory_map_of", "memory_owner"]


def memory_owner(array: Any) -> Any:
    """Return the array that owns the memory which an array, or a view of a view of it, shows."""
    owner = array
    while isinstance(base := getattr(owner, "base", None), np.ndarray):
        owner = base
    return owner


def memory_map_of(array: Any) -> np.memmap | None:
    """Return the memory map that an array lies in, if that has a file; None in memory."""
    owner = memory_owner(array)
    is_mapped = isinstance(owner, np.memmap) and owner.filename is not None
    return owner if is_mapped else None
