"""Ctrl-C at a moment when nothing is lost by it. Knows signals; no steps and no draws.

A function compiled by Numba runs Python code while it makes arrays of its results (it unpickles
their dtype). An interrupt that lands there is noticed only after the function has returned, as
``SystemError: CPUDispatcher(...) returned a result with an exception set``. PyMC takes that for a
failure of the step and drops all draws, while it keeps them after a ``KeyboardInterrupt``.
"""

import signal
import threading

from types import FrameType, TracebackType

__all__ = ["DelayedInterrupt", "is_interrupt"]


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is a ``KeyboardInterrupt``, or a `SystemError` that was caused by one."""
    seen: set[int] = set()
    while isinstance(error, SystemError) and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error.__cause__, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
        if not isinstance(error, SystemError):
            return False  # a context that is an interrupt may be one that was handled before
    return isinstance(error, KeyboardInterrupt)


class DelayedInterrupt:
    """A context manager around compiled calls: Ctrl-C takes effect at its end.

    A second Ctrl-C takes effect at once. If it lands in a compiled function, the `SystemError` that
    follows becomes the ``KeyboardInterrupt`` that it stands for.

    In threads other than the main one, and where SIGINT has no handler of Python's, nothing is
    delayed: there no interrupt can land.
    """

    def __enter__(self) -> None:
        """Take SIGINT."""
        self._received: list[tuple[int, FrameType | None]] = []
        self._handler = None
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first = not self._received
        self._received.append((number, frame))
        if not is_first and self._handler is not None:
            self._handler(number, frame)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give SIGINT back, and let its handler have what came meanwhile."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if isinstance(error, SystemError) and is_interrupt(error):
            raise KeyboardInterrupt from error
        if self._received and self._handler is not None and not is_interrupt(error):
            self._handler(*self._received[0])
