"""What a step is doing while it is set up, told to whoever shows it. Knows no step and no display.

Set-up runs through files that know nothing of each other; so they tell a variable of the context.
Where nobody looks, as in workers and in tests, telling does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

__all__ = ["COMPILING", "Display", "begin_phase", "count_passes", "told_to"]

COMPILING = "compiling"  # with this phases begin in which functions are built and compiled


class Display(Protocol):
    """Shows phases of a set-up."""

    def begin(self, phase: str) -> None:
        """Show that a phase begins."""

    def count(self, passes: float) -> None:
        """Show that the data were passed over so many times more."""


_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def told_to(display: Display) -> Iterator[None]:
    """Tell this display of phases, for a while."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


def begin_phase(name: str) -> None:
    """Tell that a phase begins, such as "fitting a Gaussian"."""
    if (display := _display.get()) is not None:
        display.begin(name)


def count_passes(passes: float) -> None:
    """Tell that the data were passed over so many times more, or a part of them."""
    if (display := _display.get()) is not None:
        display.count(passes)
