"""Shows what a step does while it is set up: a progress bar, or now and then a line in the log.

Knows no set-up. A bar is shown in terminals and notebooks, as PyMC's is, and lines everywhere else;
neither if messages of level INFO aren't shown.
"""

import logging
import threading
import time

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pymc_sghmc.phases import COMPILING, told_to

__all__ = ["SetupDisplay", "shown"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

QUIET = 2.0  # seconds without a line in the log, at first; they double ...
MOST_QUIET = 16.0  # ... up to these
LOOK = 0.5  # seconds between two looks whether a line is due


class SetupDisplay:
    """What has been done, and how long it took.

    Parameters
    ----------
    sampler : str

    Attributes
    ----------
    seconds : Counter
        By phase.
    passes : float
        Over all data, so far.
    """

    def __init__(self, sampler: str) -> None:
        self.sampler = sampler
        self.seconds: Counter[str] = Counter()
        self.passes = 0.0
        self._began = self._phase_began = self._last_line = time.perf_counter()
        self._quiet = QUIET
        self._phase = ""
        self._bar: Progress | None = None
        self._lock = threading.Lock()

    @property
    def total(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    @property
    def compiling(self) -> float:
        """Seconds spent in building and compiling functions."""
        return sum(s for phase, s in self.seconds.items() if phase.startswith(COMPILING))

    def begin(self, phase: str) -> None:
        """Show that a phase begins."""
        self._end_phase()
        self._phase = phase
        self._show()

    def count(self, passes: float) -> None:
        """Show that the data were passed over so many times more."""
        self.passes += passes
        self._show()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show what is told, for a while."""
        console = Console()
        may_show = _log.isEnabledFor(logging.INFO)
        is_over = threading.Event()
        if may_show and (console.is_terminal or console.is_jupyter):
            self._bar = _bar(console)
            self._task = self._bar.add_task("", sampler=self.sampler, passes="")
            self._bar.start()
        elif may_show:
            threading.Thread(target=self._show_until, args=(is_over,), daemon=True).start()
        try:
            with told_to(self):
                yield
        finally:
            is_over.set()
            self._end_phase()
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _show_until(self, is_over: threading.Event) -> None:
        """Show what is done now and again, as compilation tells of nothing for a long time."""
        while not is_over.wait(LOOK):
            self._show()

    def _end_phase(self) -> None:
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] += now - self._phase_began
        self._phase_began = now

    def _show(self) -> None:
        done = f"{self.passes:,.0f} passes" if self.passes >= 1 else ""
        if self._bar is not None:
            self._bar.update(self._task, description=self._phase, passes=done)
            return
        with self._lock:
            now = time.perf_counter()
            if now - self._last_line < self._quiet:
                return
            self._last_line = now
            self._quiet = min(2 * self._quiet, MOST_QUIET)
        over = f"{done} over the data" if done else ""
        parts = [f"Setting up {self.sampler}: {self._phase}", over, f"{self.total:.0f} s"]
        _log.info(", ".join(part for part in parts if part))


def _bar(console: Console) -> Progress:
    """Return a progress bar that is gone when its work is done; the log says how long it took."""
    return Progress(
        SpinnerColumn(),
        TextColumn("Setting up {task.fields[sampler]}: {task.description}"),
        TextColumn("{task.fields[passes]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def shown(sampler: str) -> Iterator[SetupDisplay]:
    """Show the phases of a sampler's set-up, for a while."""
    _log.info(f"Setting up {sampler}...")
    display = SetupDisplay(sampler)
    with display.shown():
        yield display
