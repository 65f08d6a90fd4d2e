"""One chain of a run on disk: segments of draws without a gap, and a state after some of them.

Knows files and their names; no steps.
"""

import errno
import os

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.runs import files

__all__ = ["ChainState", "Segment", "StoredChain"]


class Segment(NamedTuple):
    """A file of successive draws."""

    start: int
    stop: int
    path: Path


@dataclass(frozen=True)
class ChainState:
    """Where a chain goes on: a point and the state of its step, as they are stored."""

    made: int  # draws before it
    point: dict[str, np.ndarray]
    step: Any  # what JSON holds of the step's state
    arrays: dict[str, np.ndarray]  # of the step's state


class StoredChain:
    """The files of one chain.

    Parameters
    ----------
    folder : Path
        Of the run.
    chain, run : int
        Numbers that are in all of their names: files of another run or chain are noticed.

    Attributes
    ----------
    segments : list of Segment
        Without gaps.

    Raises
    ------
    DamagedFile
        If files are missing, or are of another run or chain.
    """

    def __init__(self, folder: Path, chain: int, run: int) -> None:
        self.folder = folder / f"chain{chain}"
        self.chain = chain
        self.run = run
        # states first: a chain that is being written has draws before it has the state after them
        states = self._files("state")
        self.segments: list[Segment] = []
        for (start, stop), path in self._files("draws"):
            if start > self.made:
                raise files.DamagedFile(
                    self.folder,
                    f"draws {self.made} to {start - 1} of chain {chain} are missing",
                )
            if stop > self.made:
                self.segments.append(Segment(start, stop, path))
        if not states and (self.made or self._is_begun()) and not self._files("state"):
            what = "has draws" if self.made else "has begun"
            raise files.DamagedFile(self.folder, f"chain {chain} {what}, and its state is missing")
        self._state: tuple[int, Path] | None = None
        if states:
            [after], path = states[-1]
            self._state = after, path
            if after > self.made:
                raise files.DamagedFile(
                    self.folder,
                    f"chain {chain} has {self.made} draws, and its state is that after {after}",
                )

    @property
    def made(self) -> int:
        """Number of stored draws."""
        return self.segments[-1].stop if self.segments else 0

    def state(self) -> ChainState | None:
        """Return the last state; None of a chain that has not begun."""
        if self._state is None:
            return None
        made, path = self._state
        arrays, facts = files.read(path)
        point = {name: arrays.pop(f"point {name}") for name in facts["point"]}
        return ChainState(made=made, point=point, step=facts["state"], arrays=arrays)

    def check(self) -> None:
        """Read all files that a chain goes on from; raises `DamagedFile`."""
        self.state()
        for segment in self.segments:
            files.read(segment.path)

    def draws(self, stop: int) -> Iterator[dict[str, Any]]:
        """Yield the arrays of each of the first draws, one segment in memory at a time."""
        at = 0
        for segment in self.segments:
            if at >= stop:
                return
            arrays, _ = files.read(segment.path)
            for i in range(at - segment.start, min(segment.stop, stop) - segment.start):
                yield {name: array[i] for name, array in arrays.items()}
            at = segment.stop

    def append(self, arrays: dict[str, np.ndarray], count: int) -> None:
        """Write so many draws after those that are stored."""
        start = self.made
        path = self._write("draws", [start, start + count], arrays)
        self.segments.append(Segment(start, start + count, path))

    def write_state(self, state: ChainState) -> None:
        """Write a state; the one before stays, in case this folder is being copied."""
        earlier = [path for _, path in self._files("state")]
        arrays = {f"point {name}": np.asarray(value) for name, value in state.point.items()}
        facts = {"point": list(state.point), "state": state.step}
        path = self._write("state", [state.made], arrays | state.arrays, facts)
        self._state = state.made, path
        if not self._is_begun():
            files.write(self.folder.parent, self._mark(), {})
        for old in [old for old in earlier if old != path][:-1]:
            with suppress(PermissionError):  # systems may keep a file that somebody reads
                old.unlink(missing_ok=True)

    def _write(
        self, kind: str, numbers: list[int], arrays: dict[str, np.ndarray], facts: Any = None
    ) -> Path:
        """Write a file of a kind, with these numbers in its name."""
        if not files.found(self.folder.parent, f"run-{self.run}"):
            raise FileNotFoundError(
                errno.ENOENT,
                "the run isn't there any more, and can't be written to. What was stored before is "
                "kept where it is now",
                os.fspath(self.folder.parent),
            )
        padded = (f"{number:09}" for number in numbers)
        stem = "-".join([kind, str(self.run), str(self.chain), *padded])
        return files.write(self.folder, stem, arrays, facts)

    def _mark(self) -> str:
        """Return the name of the file in the run's folder that says that the chain has begun."""
        return f"begun-{self.run}-{self.chain}"

    def _is_begun(self) -> bool:
        return bool(files.found(self.folder.parent, self._mark()))

    def _files(self, kind: str) -> list[tuple[list[int], Path]]:
        """Return numbers in the names of files of a kind, and their paths, in their order."""
        numbered = []
        for (run, chain, *numbers), path in files.found(self.folder, kind):
            if (run, chain) != (self.run, self.chain):
                raise files.DamagedFile(path, "it is of another run, or of another chain")
            numbered.append((numbers, path))
        return numbered
