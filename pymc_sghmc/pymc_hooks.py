"""What PyMC and PyTensor don't offer a step method, on both lines: each with what ends it.

Knows processes, threads and PyMC's own functions; knows no samplers.
"""

import inspect
import logging
import multiprocessing
import os
import threading
import time

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import pymc.sampling.mcmc as _mcmc

from pymc.stats.convergence import SamplerWarning, WarningType
from threadpoolctl import ThreadpoolController, threadpool_limits

__all__ = [
    "add_end_of_run_check",
    "divergences_are_ours",
    "end_with_parent",
    "one_blas_thread",
    "pickles_for_chains",
    "raveled_function",
]

_log = logging.getLogger(__name__)

# Modules that pickle steps for the processes of a run: PyMC's own, and those by which these start.
FOR_CHAINS = {
    "pymc.sampling.parallel",
    "multiprocessing.popen_forkserver",
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.popen_spawn_win32",
}


def one_blas_thread() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that keeps BLAS to one thread, to be called around each draw.

    ``pm.sample(blas_cores="auto")`` means one thread per core, but where processes are forked, PyMC
    5.28 and 6 leave chains as many as the parent has. Sums over several threads round differently,
    so that draws would depend on ``cores``. In a worker the limit is set once, for good.
    """
    if multiprocessing.parent_process() is not None:
        threadpool_limits(limits=1, user_api="blas")
    if not _one_thread_for and all(library.get_num_threads() == 1 for library in _blas()):
        return nullcontext
    return _one_thread


@cache
def _blas() -> list[Any]:
    return ThreadpoolController().select(user_api="blas").lib_controllers


_one_thread_for: list[object] = []  # who needs it now: several threads may at a time
_given_threads: list[int] = []  # before the first of them
_blas_lock = threading.Lock()


@contextmanager
def _one_thread() -> Iterator[None]:
    # threadpoolctl's own context manager lists all libraries anew, at twice the cost
    mark = object()
    with _blas_lock:
        if not _one_thread_for:
            _given_threads[:] = [library.get_num_threads() for library in _blas()]
            for library in _blas():
                library.set_num_threads(1)
        _one_thread_for.append(mark)
    try:
        yield
    finally:
        with _blas_lock:
            _one_thread_for.remove(mark)
            if not _one_thread_for:
                for library, threads in zip(_blas(), _given_threads, strict=True):
                    library.set_num_threads(threads)


def pickles_for_chains() -> bool:
    """Whether a pickle is being made for processes of a run, which end before this one does."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in FOR_CHAINS:
            return True
        frame = frame.f_back
    return False


def end_with_parent() -> None:
    """End a worker whose parent is gone: forked ones (PyMC 5.28 and 6) would wait for ever."""
    parent = multiprocessing.parent_process()
    name = multiprocessing.current_process().name
    is_worker = parent is not None and name.startswith("worker_chain_")
    if is_worker and os.getpid() not in _watched:
        _watched.add(os.getpid())
        threading.Thread(target=_watch, args=(parent, os.getppid()), daemon=True).start()


_watched: set[int] = set()  # processes; a forked one has its parent's set, but not its threads


def _watch(parent: Any, pid: int) -> None:
    while parent.is_alive() and os.getppid() == pid:
        time.sleep(1)
    os._exit(1)


def raveled_function(logp_dlogp: Any) -> Any:
    """Return the compiled ``q -> (logp, gradient)`` of PyMC's ``logp_dlogp_function``.

    Its own call checks that values of other variables were set, which costs more than a small
    model's gradient; PyMC's HMC goes round it in the same way (5.28 and 6). Falls back to the call.
    ``q`` must have the function's dtype, as PyTensor doesn't check it again.
    """
    function = getattr(logp_dlogp, "_pytensor_function", logp_dlogp)
    function.trust_input = True
    return function


def divergences_are_ours(idata: Any) -> bool:
    """Whether all divergences of a run are of stochastic-gradient steps, and none of PyMC's HMC.

    The statistic ``diverging`` is that of all steps together; with ``tree_size``, NUTS's is among
    them, and PyMC counts them.
    """
    stats = getattr(idata, "sample_stats", {})
    return "configurational_temperature" in stats and "tree_size" not in stats


def _without_target_accept(idata: Any, warnings: Iterable[SamplerWarning]) -> list[SamplerWarning]:
    """Leave out PyMC's advice to raise ``target_accept`` where no step has that argument.

    PyMC 5 and 6 give it for each draw with the statistic ``diverging``, whichever step reports it.
    """
    if not divergences_are_ours(idata):
        return list(warnings)
    return [warning for warning in warnings if warning.kind is not WarningType.DIVERGENCES]


def add_end_of_run_check(check: Callable[[Any], list[SamplerWarning]]) -> None:
    """Let ``check(idata) -> list of SamplerWarning`` speak after each ``pm.sample``, once.

    PyMC 5 and 6 run their convergence checks over the finished result, all chains together,
    and log what they return, but offer step methods no place there: a step sees one chain, in
    another process, and doesn't know its last draw. So the function is wrapped, once. It still
    honours ``compute_convergence_checks`` and keeps PyMC's warnings. Delete when PyMC lets a
    step method bring checks of its own.
    """
    original = _mcmc.run_convergence_checks
    if check in getattr(original, "_sghmc_checks", ()):
        return

    def run_convergence_checks(idata: Any, model: Any) -> list[SamplerWarning]:
        warnings = _without_target_accept(idata, original(idata, model))
        try:
            warnings += check(idata)
        except Exception:  # a check must not cost a finished run
            _log.exception("pymc_sghmc: a check of this run failed. Its draws are as they are.")
        return warnings

    checks = (*getattr(original, "_sghmc_checks", ()), check)
    run_convergence_checks._sghmc_checks = checks  # type: ignore[attr-defined]
    _mcmc.run_convergence_checks = run_convergence_checks
