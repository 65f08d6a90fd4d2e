"""The folder of a stored run: who may write to it, and what run it is.

Knows files and locks; no draws, no traces of PyMC's.
"""

import logging
import os
import re
import secrets
import threading

from pathlib import Path
from typing import Any

import numpy as np

from filelock import BaseFileLock, FileLock, Timeout

from pymc_sghmc.runs import files
from pymc_sghmc.runs.fingerprint import different
from pymc_sghmc.runs.stored_chain import StoredChain

__all__ = ["RunFolder"]

_log = logging.getLogger(__name__)

WAIT = 10.0  # seconds for the workers of a killed run to end, who hold its lock
LOCK = "run.lock"
OWN = re.compile(
    rf"{re.escape(LOCK)}$|(run|begun)-\d|chain\d+$|\."
)  # names that a run gives; hidden ones

_holders: dict[tuple[str, int], "RunFolder"] = {}  # that are held, by path and thread


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder in which a run lives."""
    return bool(files.found(path, "run"))


class RunFolder:
    """A folder in which one run lives.

    Parameters
    ----------
    path : path
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self._lock: BaseFileLock | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process may write."""
        return self._lock is not None

    def __str__(self) -> str:
        return f"RunStore({os.fspath(self.path)!r})"

    def hold(self) -> None:
        """Be the one process that writes, until `release` or the end of it and its workers."""
        if self._lock is not None:
            return
        if (earlier := _holders.get(self._key())) is not None:
            earlier.release()  # pm.sample of this thread was ended before it could do so
        names = sorted(os.listdir(self.path)) if self.path.is_dir() else []
        others = [name for name in names if not OWN.match(name)]
        if others and not is_run(self.path):
            raise ValueError(
                f"trace={self}: the folder has other things in it, such as {others[0]}. Give the "
                "run a folder of its own."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(
                f"trace={self}: there is a file in its place. Give a folder."
            ) from None
        lock = FileLock(self.path / LOCK, timeout=WAIT)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"trace={self}: another process is writing to this run. Wait for it, or end it "
                "and its workers. Nothing was changed."
            ) from None
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: {self.path} can't be written to. {self}.to_inference_data() "
                "reads what is there",
            ) from error
        self._lock = lock
        _holders[self._key()] = self
        files.remove_unfinished(self.path)

    def release(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
            _holders.pop(self._key(), None)

    def _key(self) -> tuple[str, int]:
        return os.path.realpath(self.path), threading.get_ident()

    def begin(
        self, fingerprint: dict[str, Any], layout: dict[str, Any], coords: dict[str, np.ndarray]
    ) -> None:
        """Write what run this is, or compare it with the one that is there."""
        if not is_run(self.path):
            if any(self.path.glob("chain*/*.npz")):
                reason = "it has draws, and the file that says what run they are of is missing"
                raise files.DamagedFile(self.path, reason)
            facts = {"fingerprint": fingerprint, "layout": layout}
            files.write(self.path, f"run-{secrets.randbits(40)}", coords, facts)
            return
        stored = self.manifest()[1]["fingerprint"]
        if what := different(stored, fingerprint):
            raise ValueError(
                f"trace={self}: {what}. A run goes on with the model, data, settings and numbers "
                "that it was begun with; begin another one in another folder. Nothing was changed."
            )
        for name, version in stored["versions"].items():
            if fingerprint["versions"][name] != version:
                _log.warning(
                    f"{self}: begun with {name} {version}, goes on with "
                    f"{fingerprint['versions'][name]}. The draws may differ from those of a run "
                    "that nothing has ended."
                )

    def manifest(self) -> tuple[dict[str, np.ndarray], Any]:
        """Return the coordinates of the run, and what it is."""
        return files.read(self._of_run()[1])

    @property
    def run(self) -> int:
        """Number of the run, which the names of all of its files have."""
        return self._of_run()[0]

    def chain(self, number: int) -> StoredChain:
        """Return a chain of the run."""
        return StoredChain(self.path, number, self.run)

    def _of_run(self) -> tuple[int, Path]:
        """Return the number of the run, and the file that says what it is.

        Raises
        ------
        ValueError
            If there is no run.
        DamagedFile
            If there are several.
        """
        stored = files.found(self.path, "run")
        if not stored:
            raise ValueError(f"{self}: no run is stored there.")
        if len(stored) > 1:
            raise files.DamagedFile(self.path, "it has files of several runs")
        [((number,), path)] = stored
        return number, path
