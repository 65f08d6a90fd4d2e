"""The files of one chain of a stored run: segments of draws without a gap, and a state.

Knows files and their names; no steps.
"""

import errno
import os

from pymc_sghmc.runs import files

__all__ = ["ChainFiles"]


class ChainFiles:
    """The files of one chain.

    Parameters
    ----------
    folder : Path
        Of the run.
    chain, run : int
        Numbers that are in all of their names: files of another are noticed.

    Attributes
    ----------
    folder : Path
    segments : list of (int, int, Path)
        First draw, draw after the last one, and file, without gaps.

    Raises
    ------
    DamagedFile
        If some of them are missing, or are of another run or chain.
    """

    def __init__(self, folder, chain, run):
        self.folder = folder / f"chain{chain}"
        self.chain = chain
        self.run = run
        self._state = self._found("state")[-1:]  # before draws, which are written first
        self.segments = []
        made = 0
        for (start, stop), path in self._found("draws"):
            if start > made:
                raise files.DamagedFile(
                    self.folder, f"draws {made} to {start - 1} of chain {chain} are missing"
                )
            if stop > made:
                self.segments.append((start, stop, path))
                made = stop
        if not self._state and (made or self._is_begun()) and not self._found("state"):
            words = "has draws" if made else "has begun"
            raise files.DamagedFile(self.folder, f"chain {chain} {words}, and its state is missing")
        if self._state and self._state[0][0] > [made]:
            [after], _ = self._state[0]
            raise files.DamagedFile(
                self.folder, f"chain {chain} has {made} draws, and its state is that after {after}"
            )

    def _is_begun(self):
        """Whether a mark in the run's folder says that there are states of this chain."""
        return bool(files.found(self.folder.parent, f"begun-{self.run}-{self.chain}"))

    def _found(self, kind):
        """Numbers in the names of files of a kind, and their paths."""
        found = []
        for (run, chain, *numbers), path in files.found(self.folder, kind):
            if (run, chain) != (self.run, self.chain):
                raise files.DamagedFile(path, "it is of another run, or of another chain")
            found.append((numbers, path))
        return found

    def write(self, kind, numbers, arrays, facts=None):
        """Write a file of a kind, with these numbers in its name; return its path.

        Raises
        ------
        OSError
            If it can't be written, as where the run's folder has been moved.
        """
        if not files.found(self.folder.parent, f"run-{self.run}"):
            words = "the run isn't there any more, and can't be written to. What was stored before is kept where it is now"
            raise FileNotFoundError(errno.ENOENT, words, os.fspath(self.folder.parent))
        stem = "-".join([kind, str(self.run), str(self.chain), *(f"{n:09}" for n in numbers)])
        return files.write(self.folder, stem, arrays, facts)

    def write_state(self, made, arrays, facts):
        """Write the state after so many draws; the one before stays, in case this folder is being copied."""
        old = [path for _, path in self._found("state")]
        new = self.write("state", [made], arrays, facts)
        if not self._is_begun():
            files.write(self.folder.parent, f"begun-{self.run}-{self.chain}", {})
        for path in [path for path in old if path != new][:-1]:
            path.unlink(missing_ok=True)

    @property
    def made(self) -> int:
        """Number of stored draws."""
        return self.segments[-1][1] if self.segments else 0

    def state(self):
        """Return the number of draws after which the last state was stored, its point and itself."""
        if not self._state:
            return 0, {}, {}, None
        [([made], path)] = self._state
        arrays, facts = files.read(path)
        point = {name: arrays.pop(f"point {name}") for name in facts["point"]}
        return made, point, arrays, facts["state"]

    def check(self) -> None:
        """Read all files that a chain goes on from; raises `DamagedFile`."""
        self.state()
        for _, _, path in self.segments:
            files.read(path)

    def draws(self, stop):
        """Yield the arrays of each of the first draws, one segment in memory at a time."""
        at = 0
        for start, end, path in self.segments:
            if at >= stop:
                return
            arrays, _ = files.read(path)
            for i in range(at - start, min(end, stop) - start):
                yield {name: array[i] for name, array in arrays.items()}
            at = end
