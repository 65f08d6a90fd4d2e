"""What PyMC calls while it samples one chain of a stored run.

Draws that are stored are passed over; the others are recorded where they are made, in this process
or in a worker. Knows PyMC's hooks and the files of a chain; no models and no formula of a sampler.
"""

import multiprocessing
import os
import sys
import time

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pymc.backends.base import BaseTrace

from pymc_sghmc.compat import StoredChainTrace
from pymc_sghmc.interrupts import DelayedInterrupt
from pymc_sghmc.pymc_hooks import end_with_parent
from pymc_sghmc.runs.states import decoded, encoded
from pymc_sghmc.runs.stored_chain import ChainState, StoredChain

__all__ = ["ChainRecorder", "Run"]

SECONDS = 1.0  # at least, between two segments
SHARE = 0.01  # of a chain's time between two segments, and of its time for writing, at most
LONGEST = 60.0  # seconds between two segments, at most
BYTES = 2**25  # of draws that wait to be written
STATISTIC = 100  # bytes of one that waits with them, about

Point = dict[str, np.ndarray]
Statistics = Sequence[Mapping[str, Any]]  # of each sampler


class Run(Protocol):
    """What a recorder needs of the run that its chain is one of."""

    path: Path
    is_held: bool

    def chain_ended(self, error: BaseException | None) -> None:
        """Take the end of a chain, and the error on its way to the user, if there is one."""


class ChainRecorder(StoredChainTrace):
    """One chain of a stored run.

    PyMC links it to the step in the process that samples. The step's method ``step`` is then
    covered by `_step` until the chain is where its stored state is; from there on, PyMC calls the
    step itself, and `record` after each draw.

    Parameters
    ----------
    run : Run
    chain : StoredChain
    trace : BaseTrace
        Of the model: knows which values of a point are stored.
    stats : list of dict
        Name and type of each statistic of each sampler.
    total : int
        Draws that the chain is to have, those of tuning among them.
    """

    def __init__(
        self,
        run: Run,
        chain: StoredChain,
        trace: BaseTrace,
        stats: Sequence[Mapping[str, Any]],
        total: int,
    ) -> None:
        super().__init__(
            trace.model,
            trace.vars,
            fn=trace.fn,
            var_shapes=trace.var_shapes,
            var_dtypes=trace.var_dtypes,
        )
        self.setup(total, chain.chain, stats)
        self.chain = chain.chain
        self.stored = chain
        self.total = total
        self.n_recorded = 0
        self._run: Run | None = run
        self._process = os.getpid()
        self._stats = [
            {name: dtype for name, dtype in sampler.items() if np.dtype(dtype) != object}
            for sampler in stats
        ]
        self._step_method: Any = None
        self._state: ChainState | None = None
        self._passing: Iterator[dict[str, Any]] = iter(())
        self._waiting: list[tuple[list[np.ndarray], Statistics]] = []
        self._waiting_bytes = 0
        self._cost = 0.0  # seconds that the last segment took
        self._began = self._written = time.perf_counter()

    def setup(self, draws: int, chain: int, sampler_vars: Any = None) -> None:
        """Take the number of the chain: PyMC 5.28's own chain makes buffers here."""
        BaseTrace.setup(self, draws, chain, sampler_vars)

    def __len__(self) -> int:
        return self.n_recorded

    def __getstate__(self) -> dict[str, Any]:
        """Return what a process that isn't forked needs: neither the model nor the run's lock."""
        return {**self.__dict__, "model": None, "vars": None, "_run": None}

    def link_stepper(self, step: Any) -> None:
        """Meet the step of this chain, in the process that samples."""
        self._step_method = step
        self._began = self._written = time.perf_counter()
        if os.getpid() != self._process:
            end_with_parent()  # PyMC's own steps, too
            Finalize(self, self._write_at_exit, exitpriority=100)
        # PyMC calls `step.step`: an attribute of this name covers the method until it is deleted
        step.step = self._step

    def unlink_stepper(self) -> None:
        """Let the step be what it was, if it has not been asked for a draw."""
        if self._step_method is not None:
            vars(self._step_method).pop("step", None)

    def _step(self, point: Point) -> tuple[Point, Statistics]:
        """Pass over a stored draw, or let the step make the first one that is not stored."""
        step = self._step_method
        if self._run is not None and not self._run.is_held:  # an earlier pm.sample was ended
            self.unlink_stepper()
            return self._draw(point)
        if self.n_recorded == 0:
            self._state = self.stored.state()
            if self._state is None:
                self._write_state(point)
            else:
                self._passing = self.stored.draws(self._state.made)
        left = (self._state.made if self._state else 0) - self.n_recorded
        if left:
            point, stats = self._stored_draw(point)
        if left <= 1:
            del step.step
            point = self._resume(point)
        return (point, stats) if left else self._draw(point)

    def _draw(self, point: Point) -> tuple[Point, Statistics]:
        """Let the step make a draw."""
        draw: tuple[Point, Statistics] = self._step_method.step(point)
        return draw

    def _stored_draw(self, point: Point) -> tuple[Point, Statistics]:
        stored = next(self._passing)
        point = {
            name: stored.get(f"variable {name}", _placeholder(value))
            for name, value in point.items()
        }
        stats = [
            {name: stored[f"stat {i} {name}"][()] for name in sampler}
            for i, sampler in enumerate(self._stats)
        ]
        return point, stats

    def _resume(self, point: Point) -> Point:
        """Put the step into the stored state; return the stored point."""
        state = self._state
        if state is None:
            return point
        step = self._step_method
        step.sampling_state = decoded(state.step, state.arrays, step.sampling_state)
        return {**point, **state.point}

    def record(self, draw: Point, stats: Statistics, *, in_warmup: bool = False) -> None:
        """Keep a draw that is not stored, and write when it is time to."""
        if _is_stopped(self._step_method):
            return  # no draw: from the last one the chain may go on, once it can
        with DelayedInterrupt():
            self.n_recorded += 1
            if self.n_recorded <= self.stored.made:
                return
            values = [np.array(value) for value in self.fn(*draw.values())]
            self._waiting.append((values, stats))
            n_stats = sum(map(len, self._stats))
            self._waiting_bytes += sum(value.nbytes for value in values) + STATISTIC * n_stats
            if self._is_due():
                self._write(draw)

    def record_sampling_state(self, step: Any = None) -> None:
        """Do nothing: PyMC calls it in the middle of a draw, too. States follow whole draws."""

    def close(self) -> None:
        """End the chain in the main process: write what waits, and say what an error means."""
        error = sys.exc_info()[1]
        if self._run is None:
            return
        try:
            self._write_draws()
        except OSError as failure:
            self._run.chain_ended(failure)
            raise
        self._run.chain_ended(error)

    def _write_at_exit(self) -> None:
        with suppress(OSError):  # it was reported, or the draws are made again
            self._write_draws()

    def _is_due(self) -> bool:
        now = time.perf_counter()
        least = max(SECONDS, SHARE * (now - self._began), self._cost / SHARE)
        return (
            self.n_recorded == self.total
            or self._waiting_bytes > BYTES
            or now - self._written > min(LONGEST, least)
        )

    def _write(self, point: Point) -> None:
        """Write the draws that wait, and then the state in which the step is after them."""
        began = time.perf_counter()
        self._write_draws()
        self._write_state(point)
        self._written = time.perf_counter()
        self._cost = self._written - began

    def _write_state(self, point: Point) -> None:
        arrays: dict[str, np.ndarray] = {}
        state = encoded(self._step_method.sampling_state, arrays)
        _end_without_parent()
        self.stored.write_state(
            ChainState(made=self.n_recorded, point=point, step=state, arrays=arrays)
        )

    def _write_draws(self) -> None:
        """Write the draws that wait; without a state, as the step may be amid the next one."""
        waiting = list(self._waiting)
        if not waiting:
            return
        arrays = {
            f"variable {name}": np.stack([values[k] for values, _ in waiting])
            for k, name in enumerate(self.varnames)
        }
        for i, sampler in enumerate(self._stats):
            for name, dtype in sampler.items():
                nothing = np.zeros((), dtype)
                column = [stats[i].get(name, nothing) for _, stats in waiting]
                arrays[f"stat {i} {name}"] = np.asarray(column, dtype)
        _end_without_parent()
        self.stored.append(arrays, len(waiting))
        del self._waiting[: len(waiting)]
        self._waiting_bytes = 0


def _is_stopped(step: Any) -> bool:
    """Whether a step has handed over its last draw again, as it can't go on."""
    return any(getattr(method, "is_stopped", False) for method in getattr(step, "methods", [step]))


def _end_without_parent() -> None:
    """End a worker whose parent is gone: another process may be writing to the run by now."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def _placeholder(value: Any) -> Any:
    """Return what stands for a value that isn't stored."""
    return np.full_like(value, np.nan) if np.asarray(value).dtype.kind == "f" else value
