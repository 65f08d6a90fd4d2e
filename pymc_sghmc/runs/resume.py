"""Go on with a run that was ended, from the folder of its `RunStore`."""

import os

from pathlib import Path
from typing import Any

import pymc as pm

from pymc.model import modelcontext

from pymc_sghmc.runs.run_store import RunStore

__all__ = ["resume"]

OF_ZARR = ".zgroup", "zarr.json"  # files at the root of a group, of zarr's formats 2 and 3


def resume(
    trace: RunStore | str | os.PathLike[str],
    *,
    step: Any,
    model: pm.Model | None = None,
    **kwargs: Any,
) -> Any:
    """Make the draws that an ended run still owes, the same that it would have made.

    For runs of ``pm.sample(trace=RunStore(path), ...)``. Starting the same script again does the
    same. Each chain goes on after its last stored draw; chains that had not begun begin as they
    would have. Errors come before anything is sampled or changed in the folder.

    Parameters
    ----------
    trace : path or RunStore
        Where the run stored its draws.
    step : step method or list of them
        Built anew, with the arguments that it had in that run.
    model : Model, optional
        The model; taken from the ``with`` context by default.
    **kwargs
        Other arguments of ``pm.sample`` as in that run, such as ``random_seed`` and ``initvals``.
        ``cores``, ``mp_ctx``, ``progressbar`` and those of the result may change. ``draws``,
        ``tune`` and ``chains`` are stored and may be left out.

    Returns
    -------
    InferenceData (PyMC 5) or DataTree (PyMC 6)
        What ``pm.sample`` returns; for a finished run, what it has stored.

    Raises
    ------
    TypeError
        If ``trace`` is a ``ZarrTrace`` of PyMC's, a store of zarr's, or anything else.
    ValueError
        If no run is stored there, or one of another model, other data or other settings.

    Examples
    --------
    A run that ends at its 30th draw, as if killed, and the rest of it:

    >>> import tempfile
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGHMC, RunStore, resume
    >>> folder = tempfile.mkdtemp()
    >>> def kill(trace, draw):
    ...     if draw.draw_idx == 30:
    ...         raise MemoryError
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     _ = pm.Normal("y", mu, 1, observed=np.arange(50.0))
    ...     options = {"step": SGHMC(batch_size=10), "cores": 1, "random_seed": 1}
    ...     options |= {"progressbar": False, "compute_convergence_checks": False}
    ...     try:
    ...         pm.sample(
    ...             40, tune=10, chains=2, trace=RunStore(folder), callback=kill, **options
    ...         )
    ...     except MemoryError:
    ...         idata = resume(folder, **options)
    >>> dict(idata.posterior.sizes)
    {'chain': 2, 'draw': 40}
    """
    store = trace if isinstance(trace, RunStore) else RunStore(_checked_path(trace))
    return pm.sample(step=step, model=modelcontext(model), trace=store, **store.numbers() | kwargs)


def _checked_path(trace: Any) -> str | os.PathLike[str]:
    """Refuse what isn't the path of a `RunStore`."""
    what = f"a {type(trace).__name__}"
    if isinstance(trace, str | os.PathLike):
        path: str | os.PathLike[str] = trace
        if not any(Path(path, name).exists() for name in OF_ZARR):
            return path
        what = f"{os.fspath(path)!r}, a zarr store"
    raise TypeError(
        f"resume(trace=...) got {what}, and only runs in a RunStore can be resumed. Start the "
        "run anew with pm.sample(trace=RunStore(folder), ...). To read the draws that a ZarrTrace "
        'has stored, use zarr.open_group(path, mode="r")["posterior"].'
    )
