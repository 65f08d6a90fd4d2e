"""What a step method does in a run that is stored: passes over what is there, and records the rest.

The class of a step is exchanged for one that asks a `Recorder` at each draw, in the process that
samples. Knows PyMC's steps and the files of a chain; no models and no formula of a sampler.
"""

import multiprocessing
import os
import re
import sys
import time

from contextlib import suppress
from multiprocessing.util import Finalize

import numpy as np

from pymc_sghmc.compat import end_with_parent
from pymc_sghmc.runs.chain_files import ChainFiles
from pymc_sghmc.runs.states import decoded, encoded

__all__ = ["Recorder", "recorded", "unrecorded"]

SECONDS = 1.0  # at least, between two segments
SHARE = 0.01  # of a chain's time between two segments, and of its time for writing, at most
LONGEST = 60.0  # seconds between two segments, at most
BYTES = 2**25  # of draws that wait to be written
STATISTIC = 100  # bytes of one that waits with them, about
WORKER = re.compile(r"worker_chain_(\d+)")  # PyMC's names of processes


class Recorder:
    """Of a run: given to its step, and with it to each process.

    Parameters
    ----------
    folder : Path
    run : int
        Its number.
    trace : BaseTrace
        Knows which values of a point are stored.
    stats : list of dict
        Name and type of each statistic of each sampler.
    tune, draws : int
    traces : list
        Of the chains, the very list that ``pm.sample`` holds while it goes on.
    """

    def __init__(self, folder, run, trace, stats, tune, draws, traces):
        self.folder = folder
        self.run = run
        self.fn = trace.fn
        self.names = trace.varnames
        self.stats = [{k: d for k, d in own.items() if np.dtype(d) != object} for own in stats]
        self.tune = tune
        self.total = tune + draws
        self.begun = 0
        self.files = None
        self._traces = traces
        self._process = os.getpid()

    def is_over(self) -> bool:
        """Whether what calls is another ``pm.sample``, as that of the run was ended before it sampled."""
        if os.getpid() != self._process:  # in a worker, which got it from the run's
            return False
        frame = sys._getframe(1)
        while frame is not None:
            if any(value is self._traces for value in frame.f_locals.values()):
                return False
            frame = frame.f_back
        return True

    def begin(self, step):
        """Meet the step at the start of a chain."""
        name = multiprocessing.current_process().name
        is_home = os.getpid() == self._process
        named = None if is_home else WORKER.fullmatch(name)  # workers may run a script themselves
        chain = int(named[1]) if named else self.begun
        self.begun = self.begun + 1
        self.files = ChainFiles(self.folder, chain, self.run)
        self.stored = self.files.made
        self.passed, self.point, arrays, state = self.files.state()
        self.state = None if state is None else decoded(state, arrays, step.sampling_state)
        self.passing = self.files.draws(self.passed)
        self.made = 0
        self.buffer = []
        self.waiting = 0
        self.cost = 0.0
        self.began = self.written = time.perf_counter()
        if named:
            end_with_parent()  # PyMC's own steps, too
            Finalize(self, self._close_at_exit, exitpriority=100)

    def __getstate__(self):
        return {**self.__dict__, "files": None, "passing": None, "buffer": [], "_traces": None}

    def step(self, step, draw, point):
        """Make a draw with ``draw``, or pass over one that is stored."""
        if self.made < self.passed:
            return self._pass_over(step, point)
        if self.made == 0:
            point = self._start(step, point)
        try:
            point, stats = draw(point)
        except BaseException:
            self.close()
            raise
        if any(getattr(one, "is_stopped", False) for one in getattr(step, "methods", [step])):
            return point, stats  # no draw: from the last one the chain may go on, once it can
        self.made += 1
        if self.made > self.stored:
            self._record(point, stats)
            if self._is_due():
                self._write(step, point)
        return point, stats

    def _start(self, step, point):
        """Remember where a chain begins, and with which seed; or begin there again."""
        if self.state is None:
            self._write_state(step, point)
            return point
        return self._take_up(step, point)

    def _take_up(self, step, point):
        """Put the step into the stored state, at the stored point."""
        step.sampling_state = self.state
        self.state = None
        return {**point, **self.point}

    def _pass_over(self, step, point):
        stored = next(self.passing)
        self.made += 1
        point = {
            name: stored.get(f"variable {name}", _unknown(value)) for name, value in point.items()
        }
        if self.made == self.passed:
            point = self._take_up(step, point)
        stats = [
            {name: stored[f"stat {i} {name}"][()] for name in own}
            for i, own in enumerate(self.stats)
        ]
        return point, stats

    def _record(self, point, stats):
        values = [np.array(value) for value in self.fn(*point.values())]
        self.buffer.append((values, stats))
        n_stats = sum(map(len, self.stats))
        self.waiting += sum(value.nbytes for value in values) + STATISTIC * n_stats

    def _is_due(self) -> bool:
        now = time.perf_counter()
        least = max(SECONDS, SHARE * (now - self.began), self.cost / SHARE)
        return (
            self.made == self.total
            or self.waiting > BYTES
            or now - self.written > min(LONGEST, least)
        )

    def _write(self, step, point):
        """Write the draws that wait, and then the state in which the step is after them."""
        began = time.perf_counter()
        self._write_draws()
        self._write_state(step, point)
        self.written = time.perf_counter()
        self.cost = self.written - began

    def _write_state(self, step, point):
        arrays = {f"point {name}": np.asarray(value) for name, value in point.items()}
        facts = {"point": list(point)}
        facts["state"] = encoded(step.sampling_state, arrays)
        _end_without_parent()
        self.files.write_state(self.made, arrays, facts)

    def _write_draws(self):
        if not self.buffer:
            return
        buffer = list(self.buffer)
        arrays = {
            f"variable {name}": np.stack([values[k] for values, _ in buffer])
            for k, name in enumerate(self.names)
        }
        for i, own in enumerate(self.stats):
            for name, dtype in own.items():
                nothing = np.zeros((), dtype)
                stats = [stats[i].get(name, nothing) for _, stats in buffer]
                arrays[f"stat {i} {name}"] = np.asarray(stats, dtype)
        stop = self.stored + len(buffer)
        _end_without_parent()
        path = self.files.write("draws", [self.stored, stop], arrays)
        self.files.segments.append((self.stored, stop, path))
        self.stored = stop
        self.waiting = 0
        del self.buffer[: len(buffer)]

    def close(self):
        """Write what waits: the draws alone, as the step may be in the middle of the next one."""
        if self.files is not None:
            self._write_draws()

    def _close_at_exit(self):
        with suppress(OSError):  # which has been told, or loses draws that are made again
            self.close()


def recorded(step, recorder):
    """Let a step record its draws: its class is exchanged for one below it."""
    cls = type(unrecorded(step))
    try:
        encoded(step.sampling_state, {})
    except TypeError as error:
        raise ValueError(f"trace: the state of {cls.__name__} can't be stored: {error}.") from error

    class Recorded(cls):
        is_recorded = True

        def setup_chain(self, *args):
            super().setup_chain(*args)
            _begin(self)

        def set_rng(self, *args):
            super().set_rng(*args)
            _begin(self)

        def step(self, point):
            return self._recorder.step(self, super().step, point)

        def __reduce__(self):
            if self._recorder.is_over():
                return unrecorded(self).__reduce_ex__(2)
            plain = object.__new__(cls)
            plain.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_recorder"})
            return recorded, (plain, self._recorder)

    Recorded.__name__ = cls.__name__
    Recorded.__qualname__ = cls.__qualname__
    step.__class__ = Recorded
    step._recorder = recorder
    return step


def _begin(step):
    """Meet a chain's step, or leave it alone."""
    if step._recorder.is_over():
        unrecorded(step)
    else:
        step._recorder.begin(step)


def unrecorded(step):
    """Let it be what it was."""
    if getattr(step, "is_recorded", False):
        step.__class__ = type(step).__mro__[1]
        del step._recorder
    return step


def _end_without_parent():
    """End a worker whose parent is gone: another process may be writing to the run by now."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def _unknown(value):
    """Return what stands for a value that isn't stored."""
    return np.full_like(value, np.nan) if np.asarray(value).dtype.kind == "f" else value
