"""The files of one chain of a stored run: segments of draws without a gap, and a state.

Knows files and their names; no steps.
"""

from pymc_sghmc.runs import files

__all__ = ["ChainFiles"]


class ChainFiles:
    """The files of one chain.

    Attributes
    ----------
    folder : Path
    segments : list of (int, int, Path)
        First draw, draw after the last one, and file, without gaps.
    """

    def __init__(self, folder, chain):
        self.folder, self.chain = folder / f"chain{chain}", chain
        self.segments, made = [], 0
        for (start, stop), path in files.found(self.folder, "draws"):
            if start > made:
                raise files.DamagedFile(
                    self.folder, f"draws {made} to {start - 1} of chain {chain} are missing"
                )
            if stop > made:
                self.segments.append((start, stop, path))
                made = stop

    @property
    def made(self) -> int:
        """Number of stored draws."""
        return self.segments[-1][1] if self.segments else 0

    def state(self):
        """Return the number of draws after which the last state was stored, its point and itself."""
        stored = files.found(self.folder, "state")
        if not stored:
            return 0, {}, {}, None
        [made], path = stored[-1]
        if made > self.made:
            raise files.DamagedFile(
                self.folder,
                f"chain {self.chain} has {self.made} draws, and its state is that after {made}",
            )
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
