"""Functions that Numba compiles once per machine: their machine code is stored beside them.

Knows Numba, no graphs and no steps.
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

__all__ = ["compiled_once", "version_of"]


def compiled_once(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function of numbers and arrays by Numba when it is first called.

    Parameters
    ----------
    function : callable
        At the top of a module.
    **options
        Keyword arguments of ``numba.njit``.

    Raises
    ------
    ImportError
        If there is no Numba.
    """
    from numba import njit

    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder to store machine code in
        return njit(**options)(function)


def version_of(function: Callable[..., Any]) -> str:
    """Tell one version of the module of a function from all others.

    PyTensor stores what Numba compiles of an operation under a key that says nothing of its code:
    by the key alone, a new version of an operation would be the old one.
    """
    return sha256(Path(function.__code__.co_filename).read_bytes()).hexdigest()
