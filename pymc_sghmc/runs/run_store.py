"""A run on disk that survives what ends it: `RunStore`, a trace of PyMC's.

Knows PyMC's traces, models as names and shapes, and files; no formula of a sampler.
"""

import logging
import os
import pickle
import sys

from types import SimpleNamespace
from typing import Any

import numpy as np
import pymc as pm

from pymc.backends.arviz import coords_and_dims_for_inferencedata
from pymc.backends.base import BaseTrace
from pymc.model import modelcontext
from pymc.step_methods.arraystep import PopulationArrayStepShared

from pymc_sghmc.compat import StoredTrace, inference_data, sample_stored_chains_without_zarr
from pymc_sghmc.runs.fingerprint import fingerprint
from pymc_sghmc.runs.recorder import ChainRecorder
from pymc_sghmc.runs.run_folder import RunFolder
from pymc_sghmc.runs.states import encoded
from pymc_sghmc.runs.stored_draws import data_of, datasets, layout_of, rectangle

__all__ = ["RunStore"]

_log = logging.getLogger(__name__)

ENDED_WORKER = EOFError, ConnectionError, BrokenPipeError


class RunStore(StoredTrace):
    """A folder that keeps a run as it is made, and from which the same script goes on.

    Pass it to ``pm.sample(trace=...)``. Draws, and the state of the chains' steps, are written
    every second at first, later less often, by the processes that make them. If the run is ended by
    anything, the same script started again goes on from what is there: the same model, data, step,
    ``draws``, ``tune``, ``chains`` and ``random_seed`` give the draws of a run that nothing has
    ended, bit for bit on the same machine with the same versions. A finished run is given back.

    Parameters
    ----------
    path : path
        A folder, made if it isn't there. One run lives in it.

    Raises
    ------
    ValueError
        From ``pm.sample``, before anything is changed: if the run in the folder is of another
        model, other data, other settings or numbers of draws, if the folder is something else's, or
        another process is writing to it.
    DamagedFile
        If a file isn't what was written; a ValueError.
    OSError
        If the folder can't be written to. What is stored stays.

    Notes
    -----
    Files are written under another name, flushed to the disk and renamed, and never written again;
    each name holds the checksum of its file. Nothing in the folder is a pickle. It is read by NumPy
    alone (``.npz``).

    ``callback`` is called for stored draws, too, with their values, so that what it adds up is
    right in the end. With ``var_names`` other variables' values aren't stored: there the callback
    sees NaN.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGHMC, RunStore
    >>> folder = tempfile.mkdtemp()
    >>> def script(draws_until_the_end):
    ...     def kill(trace, draw):
    ...         if draw.draw_idx == draws_until_the_end:
    ...             raise MemoryError
    ...     with pm.Model():
    ...         mu = pm.Normal("mu", 0, 10)
    ...         _ = pm.Normal("y", mu, 1, observed=np.arange(50.0))
    ...         return pm.sample(
    ...             40, tune=10, chains=2, step=SGHMC(batch_size=10), trace=RunStore(folder),
    ...             callback=kill, cores=1, progressbar=False, compute_convergence_checks=False,
    ...         )
    >>> try:
    ...     script(draws_until_the_end=30)
    ... except MemoryError:
    ...     idata = script(draws_until_the_end=None)
    >>> dict(idata.posterior.sizes)
    {'chain': 2, 'draw': 40}
    """

    tuning_steps = sampling_time = posterior = _sampling_state = None  # properties in PyMC 5.28

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = RunFolder(path)
        self.path = self.folder.path
        self.straces: list[ChainRecorder] = []
        self.model: pm.Model | None = None

    def __repr__(self) -> str:
        return str(self.folder)

    @property
    def is_held(self) -> bool:
        """Whether this process writes to the folder."""
        return self.folder.is_held

    def to_inference_data(self, *, save_warmup: bool = True, model: pm.Model | None = None) -> Any:
        """Return what is stored by now, from any process, while the run goes on or after it.

        Draws are read when they are asked for.

        Parameters
        ----------
        save_warmup : bool, default True
            Tuning draws, too, in groups of their own.
        model : Model, optional
            Whose data are to be in the result; default: that of ``pm.sample`` in this process, if
            there was one.

        Returns
        -------
        InferenceData (PyMC 5) or DataTree (PyMC 6)
            Of an interrupted run, the chains and the length that hold the most draws; the others
            stay in the store.

        Raises
        ------
        ValueError
            If there are no draws after tuning, or no run.
        """
        model = self.model if model is None else model
        coords, facts = self.folder.manifest()
        if model is not None:  # its labels are of any type
            coords = coords_and_dims_for_inferencedata(model)[0]
        numbers = facts["fingerprint"]["numbers"]
        tune = numbers["tune"]
        every = [self.folder.chain(k) for k in range(numbers["chains"])]
        chosen, length = rectangle([max(0, one.made - tune) for one in every])
        if not length:
            made = ", ".join(str(one.made) for one in every)
            raise ValueError(
                f"{self!r} has no draws after tuning yet ({made} tuning draws of the chains). "
                "They are kept: start the same script again to go on."
            )
        if len(chosen) < len(every) or any(every[k].made != tune + length for k in chosen):
            _log.log(
                logging.INFO if self.sampling_time is None else logging.WARNING,
                f"{self!r}: the result has {length} draws of {len(chosen)} of {len(every)} "
                "chains; the store has "
                f"{', '.join(str(max(0, one.made - tune)) for one in every)}. Start the same "
                "script again to go on.",
            )
        chains = [every[k] for k in chosen]
        version = facts["fingerprint"]["versions"]["pymc"]
        attrs = {"inference_library": "pymc", "inference_library_version": version}
        attrs |= {} if self.sampling_time is None else {"sampling_time": self.sampling_time}
        attrs["tuning_steps"] = tune
        found = datasets(chains, facts["layout"], coords, range(tune, tune + length), attrs)
        if save_warmup and tune:
            warmup = datasets(chains, facts["layout"], coords, range(tune), attrs)
            found |= {f"warmup_{name}": dataset for name, dataset in warmup.items()}
        found |= {} if model is None else data_of(model)
        return inference_data(found)

    def numbers(self) -> dict[str, int]:
        """Return the ``draws``, ``tune`` and ``chains`` that the run was begun with."""
        numbers: dict[str, int] = self.folder.manifest()[1]["fingerprint"]["numbers"]
        return numbers

    def init_trace(
        self,
        *,
        chains: int,
        draws: int,
        tune: int,
        step: Any,
        model: pm.Model | None = None,
        vars: Any = None,
        test_point: Any = None,
    ) -> None:
        """Begin a run, or check that model and step are those of the one that is stored."""
        model = self.model = modelcontext(model)
        self._check_step(step)
        self._handled = sys.exc_info()[1]  # where all of pm.sample is called while one is
        self.folder.hold()
        try:
            trace = BaseTrace(model=model, vars=vars, test_point=test_point)
            if reserved := {"chain", "draw"}.intersection(trace.varnames):
                raise ValueError(
                    f"trace={self!r}: a variable named {reserved.pop()!r} can't be stored beside "
                    "the dims chain and draw. Rename it."
                )
            layout, labels = layout_of(model, trace, step)
            numbers = {"chains": chains, "draws": draws, "tune": tune}
            own = fingerprint(model, step, layout["variables"], labels, **numbers)
            self.folder.begin(own, layout, labels)
            stored = [self.folder.chain(chain) for chain in range(chains)]
            for chain in stored:
                chain.check()
            if any(made := [chain.made for chain in stored]):
                counts = ", ".join(map(str, made))
                _log.info(
                    f"{self!r}: goes on after {counts} of {tune + draws} draws of its chains."
                )
            self.straces = [
                ChainRecorder(self, chain, trace, step.stats_dtypes, tune + draws)
                for chain in stored
            ]
        except BaseException:
            self._release()
            raise
        sample_stored_chains_without_zarr()
        self.tuning_steps = tune
        self.draws = draws

    def _check_step(self, step: Any) -> None:
        """Refuse steps whose chains or states can't be stored."""
        methods = getattr(step, "methods", [step])
        if any(isinstance(method, PopulationArrayStepShared) for method in methods):
            raise ValueError(
                f"trace={self!r}: chains that depend on each other, as of DEMetropolis, can't be "
                "stored. Sample without trace=, or use another step."
            )
        try:
            encoded(step.sampling_state, {})
        except TypeError as error:
            raise ValueError(
                f"trace={self!r}: the state of {type(step).__name__} can't be stored: {error}. "
                "Sample without trace=, or use another step."
            ) from error

    def chain_ended(self, error: BaseException | None) -> None:
        """Take the end of a chain, and the error on its way to the user, if there is one."""
        if error is None or error is self._handled or _goes_on(error):
            return
        self._release()
        if isinstance(error, ENDED_WORKER):
            raise ConnectionError(
                f"{self!r}: a worker process ended unexpectedly. Start the same script again: it "
                "goes on from the draws that are stored. Likely causes are too little memory "
                "(lower cores), a crash, and a file of data= that was cut short."
            ) from error

    def _release(self) -> None:
        """Let other processes write, and the step be what it was."""
        for chain in self.straces:
            chain.unlink_stepper()
        self.folder.release()

    def split_warmup_groups(self) -> None:
        """End the run: tuning draws stay where they are, the first of each chain."""
        self._release()
        made = np.array([self.folder.chain(chain).made for chain in range(len(self.straces))])
        self._sampling_state = SimpleNamespace(draw_idx=made, global_warnings=[])
        self.posterior = SimpleNamespace(draw=range(self.draws))

    def to_inferencedata(self, save_warmup: bool = False) -> Any:
        """Return the result, as PyMC names it."""
        return self.to_inference_data(save_warmup=save_warmup)


def _goes_on(error: BaseException) -> bool:
    """Whether PyMC goes on after an error: with what there is, or without further processes."""
    unpickled = isinstance(error, AttributeError) and "Can't pickle" in str(error)
    return unpickled or isinstance(error, KeyboardInterrupt | pickle.PickleError)
