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

    A division by zero is infinite or no number, as NumPy's are: by Numba's own rule it would be an
    error, and the end of a chain.

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

    options = {"error_model": "numpy", **options}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder to store machine code in
        return njit(**options)(function)


def version_of(function: Callable[..., Any]) -> str:
    """Tell one version of the module of a function from all others.

    PyTensor stores what Numba compiles of an operation under a key that says nothing of its code:
    by the key alone, a new version of an operation would be the old one.
    """
    files = function.__code__.co_filename, __file__
    return sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
