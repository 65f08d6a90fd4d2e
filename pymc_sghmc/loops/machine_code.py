"""Functions that Numba compiles once per machine: their machine code is stored beside them.

Knows Numba, no graphs and no steps.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["compiled_once"]


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
