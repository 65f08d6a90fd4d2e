"""The rows of a loader's passes as one endless sequence, read ahead in a thread of its own.

Knows loaders, no minibatches.
"""

import threading

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from pymc_sghmc.rows.files import check_files

__all__ = ["ReadAhead", "Reader"]


class Reader:
    """The endless sequence of rows of a loader's passes, read from the front.

    Parameters
    ----------
    source : Source
    names : list of str
        Of containers, whose arrays are read.
    seed : int or None
        Of the order of each pass, where the loader has one for it; None: the loader's own order.
    """

    def __init__(self, source: Any, names: Sequence[str], seed: int | None) -> None:
        self.source = source
        self.names = names
        self.seed = seed
        self._at: int | None = None
        self._blocks: Generator[dict[str, np.ndarray]] | None = None
        self._rest: list[np.ndarray] | None = None
        self._pass = 0

    def read(self, start: int, count: int) -> list[np.ndarray]:
        """Return copies of so many rows from ``start`` on, an array for each name."""
        if start != self._at:
            self._go_to(start)
        out = [
            np.empty((count, *row.shape[1:]), dtype=row.dtype)
            for row in map(self.source.first.get, self.names)
        ]
        filled = 0
        while filled < count:
            arrays = self._next(count - filled)
            n = len(arrays[0])
            for whole, part in zip(out, arrays, strict=True):
                whole[filled : filled + n] = part
            filled += n
        check_files(getattr(self.source.loader, "mapped_files", ()))
        self._at = start + count
        return out

    def finish(self) -> None:
        """Read on to the end of the pass, where its length shows."""
        for _ in self._blocks or ():
            pass

    def close(self) -> None:
        """End the pass."""
        if self._blocks is not None:
            self._blocks.close()
        self._at = self._blocks = self._rest = None

    def _go_to(self, start: int) -> None:
        self.close()
        number, skipped = divmod(start, self.source.rows_per_pass)
        self._begin(number)
        while skipped > 0:
            skipped -= len(self._next(skipped)[0])

    def _begin(self, number: int) -> None:
        self._pass = number
        rng = None if self.seed is None else np.random.default_rng([self.seed, number, 1])
        self._blocks = self.source.blocks(rng)

    def _next(self, most: int) -> list[np.ndarray]:
        """Return the next rows, from one block."""
        while self._rest is None:
            block = next(self._blocks or iter(()), None)
            if block is None:
                self._begin(self._pass + 1)
            elif len(block[self.names[0]]) > 0:
                self._rest = [block[name] for name in self.names]
        arrays = [array[:most] for array in self._rest]
        self._rest = [array[most:] for array in self._rest]
        if len(self._rest[0]) == 0:
            self._rest = None
        return arrays


class ReadAhead:
    """Rows that a thread of their own is reading. The thread ends with them."""

    def __init__(self, what: Any, reader: Reader, start: int, count: int) -> None:
        self.what = what
        self.reader = reader
        self._arrays: list[np.ndarray] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(start, count), daemon=True)
        self._thread.start()

    def _read(self, start: int, count: int) -> None:
        try:
            self._arrays = self.reader.read(start, count)
        except BaseException as error:  # it belongs to the chain
            self._error = error

    def result(self) -> list[np.ndarray]:
        """Wait for the rows."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._arrays

    def close(self) -> None:
        """Wait for the end of the thread and end the pass."""
        self._thread.join()
        self.reader.close()
