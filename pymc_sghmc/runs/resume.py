"""Go on with a run that was killed, from what `RunStore` or PyMC's ``ZarrTrace`` has stored of it.

``pm.sample`` samples as in the first run. Each chain's stored draws are passed over, its steps take
up the state stored with them, and what follows is what an uninterrupted run would have drawn.
Contains no formula of a sampler.
"""

import pymc as pm

from pymc.model import modelcontext

from pymc_sghmc.runs.killed_run import KilledRun
from pymc_sghmc.runs.run_folder import is_run
from pymc_sghmc.runs.run_store import RunStore
from pymc_sghmc.runs.store import opened

__all__ = ["resume"]


def resume(trace, *, step, model=None, **kwargs):
    """Make the draws that a killed run still owes, the same that it would have made.

    For runs of ``pm.sample(trace=RunStore(path), ...)``, where starting the same script again does
    the same, and of ``pm.sample(trace=ZarrTrace(store, include_transformed=True), ...)`` with a
    step method of this package. Each chain goes on after its last stored draw, and chains that
    hadn't begun begin as they would have. All draws are in the same store in the end. Errors come
    before anything is sampled or changed in the store.

    Parameters
    ----------
    trace : path, RunStore, zarr store or ZarrTrace
        Where the killed run stored its draws. Don't make a new ``ZarrTrace`` of the path: that
        deletes all that is there.
    step : step method or list of them
        Built anew, with the arguments that it had in the killed run.
    model : Model, optional
        The model; taken from the ``with`` context by default.
    **kwargs
        Other arguments of ``pm.sample`` as in the killed run, such as ``initvals``. ``cores``,
        ``mp_ctx``, ``progressbar`` and those of the result may change. ``draws``, ``tune``,
        ``chains`` and, of a ``ZarrTrace``, ``random_seed`` are known from the store and may be left
        out.

    Returns
    -------
    InferenceData (PyMC 5), DataTree (PyMC 6) or ZarrTrace
        What ``pm.sample`` returns; for a finished run, what it has stored.

    Examples
    --------
    A run that ends at its 30th draw, as if killed, and the rest of it:

    >>> import tempfile
    >>> import numcodecs, numpy as np, pymc as pm, zarr
    >>> numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE = True
    >>> from pymc.backends.zarr import ZarrTrace
    >>> from pymc_sghmc import SGHMC, resume
    >>> path = tempfile.mkdtemp()
    >>> def kill(trace, draw):
    ...     if draw.draw_idx == 30:
    ...         raise MemoryError
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     _ = pm.Normal("y", mu, 1, observed=np.arange(50.0))
    ...     options = {"step": SGHMC(batch_size=10), "cores": 1, "progressbar": False}
    ...     trace = ZarrTrace(zarr.DirectoryStore(path), include_transformed=True)
    ...     try:
    ...         pm.sample(40, tune=10, chains=2, trace=trace, callback=kill, **options)
    ...     except MemoryError:
    ...         idata = resume(path, compute_convergence_checks=False, **options)
    >>> dict(idata.posterior.sizes)
    {'chain': 2, 'draw': 40}
    """
    model = modelcontext(model)
    if isinstance(trace, RunStore) or is_run(trace):
        store = trace if isinstance(trace, RunStore) else RunStore(trace)
        return pm.sample(step=step, model=model, trace=store, **store.numbers() | kwargs)
    killed = KilledRun(opened(trace))
    kwargs = killed.arguments(**kwargs)
    if killed.is_finished:
        return killed.result(**kwargs)
    return pm.sample(step=step, model=model, trace=killed, **kwargs)
