"""Files that are written once: arrays and facts, under a name that holds their checksum.

A file is NumPy's ``.npz`` with a JSON text among its arrays. It is written under another name,
flushed to the disk and renamed, and never written again: it is whole, or it isn't there. Knows
arrays, JSON and folders; no runs and no pickles.
"""

import hashlib
import io
import json
import os
import re

from contextlib import suppress
from pathlib import Path

import numpy as np

__all__ = ["DamagedFile", "array", "found", "read", "remove_unfinished", "write"]

FACTS = "facts.json"
END = "~"  # of an array's name: NumPy has an argument "file", and takes ".npy" off
UNFINISHED = ".unfinished"
NAME = re.compile(r"(?P<stem>[a-z]+(?:-\d+)*)-(?P<checksum>[0-9a-f]{16})\.npz")


class DamagedFile(ValueError):
    """A file isn't what was written."""

    def __init__(self, path, reason):
        super().__init__(os.fspath(path), str(reason))  # workers send it to their parent

    def __str__(self):
        path, reason = self.args
        return (
            f"{path} is damaged: {reason}. Nothing was changed. Bring the file back from a copy, "
            "or begin the run anew in another folder."
        )


def write(folder, stem, arrays, facts=None) -> Path:
    """Write arrays, and facts that JSON can hold, to a new file in a folder.

    Returns
    -------
    Path

    Raises
    ------
    OSError
        With the folder and what can be done, if it can't be written.
    """
    file = io.BytesIO()
    text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    np.savez(file, **{name + END: array for name, array in {FACTS: text, **arrays}.items()})
    contents = file.getbuffer()
    path = Path(folder) / f"{stem}-{_checksum(stem, contents)}.npz"
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        path.parent.mkdir(exist_ok=True)  # alone: a run's folder that is gone isn't made again
        with open(unfinished, "wb") as new:
            new.write(contents)
            new.flush()
            os.fsync(new.fileno())
        os.replace(unfinished, path)
        _flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(
            error.errno,
            f"{error.strerror}: {path.parent} can't be written to. What was stored before is "
            "kept; when this is mended, start the same script again",
        ) from error
    return path


def found(folder, stem) -> list:
    """Return the paths of the whole files of a kind, with the numbers in their names, in their order."""
    paths = []
    for path in Path(folder).glob(f"{stem}-*.npz"):
        match = NAME.fullmatch(path.name)
        if match and re.fullmatch(rf"{stem}(-\d+)*", match["stem"]):
            numbers = match["stem"].split("-")[1:]
            paths.append((tuple(map(int, numbers)), path))
    return sorted(paths)


def read(path):
    """Return the arrays of a file, by their names, and its facts.

    Raises
    ------
    DamagedFile
        If it isn't what was written, by its checksum.
    """
    contents = Path(path).read_bytes()
    _check(path, contents)
    try:
        with np.load(io.BytesIO(contents), allow_pickle=False) as opened:
            arrays = {name.removesuffix(END): array for name, array in opened.items()}
        return arrays, json.loads(arrays.pop(FACTS).tobytes())
    except Exception as error:  # not written by this package: its checksum is right
        raise DamagedFile(path, error) from error


def array(path, name) -> np.ndarray:
    """Return one array of a file, whose checksum is looked at when it is first read."""
    try:
        stat = os.stat(path)
        mark = os.fspath(path), stat.st_ino, stat.st_size, stat.st_mtime_ns
        if mark not in _checked:
            _check(path, Path(path).read_bytes())
            _checked.add(mark)
        with np.load(path, allow_pickle=False) as opened:
            return opened[name + END]
    except DamagedFile:
        raise
    except FileNotFoundError as error:
        words = "draws are read from the folder of the run when they are asked for. Has it been moved or removed?"
        raise FileNotFoundError(
            error.errno, f"{error.strerror}: {words}", os.fspath(path)
        ) from error
    except Exception as error:  # whatever zipfile makes of it
        raise DamagedFile(path, error) from error


def remove_unfinished(folder) -> None:
    """Remove what a killed process was writing: to a folder, or to one in it."""
    for path in [*Path(folder).glob(f"*{UNFINISHED}"), *Path(folder).glob(f"*/*{UNFINISHED}")]:
        if NAME.fullmatch(path.name.removesuffix(UNFINISHED)):
            path.unlink(missing_ok=True)


_checked = set()  # files whose checksums were looked at, as they were then


def _check(path, contents):
    named = NAME.fullmatch(Path(path).name)
    if _checksum(named["stem"], contents) != named["checksum"]:
        raise DamagedFile(path, "its checksum is another")


def _checksum(stem, contents) -> str:
    """Return that of a file: of its name, too, which says what it holds."""
    found = hashlib.blake2b(stem.encode(), digest_size=8)
    found.update(contents)
    return found.hexdigest()


def _flush_folder(folder):
    """Flush the names in a folder, where systems let it be opened."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
