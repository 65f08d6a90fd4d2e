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

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["DamagedFile", "array", "found", "read", "remove_unfinished", "write"]

FACTS = "facts.json"
END = "~"  # of an array's name: NumPy has an argument "file", and takes ".npy" off
UNFINISHED = ".unfinished"
NAME = re.compile(r"(?P<stem>[a-z]+(?:-\d+)*)-(?P<checksum>[0-9a-f]{16})\.npz")

AnyPath = str | os.PathLike[str]


class DamagedFile(ValueError):
    """A file isn't what was written."""

    def __init__(self, path: AnyPath, reason: object) -> None:
        super().__init__(os.fspath(path), str(reason))  # workers send it to their parent

    def __str__(self) -> str:
        path, reason = self.args
        return (
            f"{path} is damaged: {reason}. Restore the file from a copy, or begin the run anew in "
            "another folder. Nothing was changed."
        )


def write(folder: AnyPath, stem: str, arrays: Mapping[str, np.ndarray], facts: Any = None) -> Path:
    """Write arrays, and facts that JSON can hold, to a new file in a folder; return its path.

    Raises
    ------
    OSError
        With the folder and what can be done, if it can't be written.
    """
    file = io.BytesIO()
    text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    members: dict[str, Any] = {FACTS: text, **arrays}
    np.savez(file, **{name + END: array for name, array in members.items()})
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


def found(folder: AnyPath, stem: str) -> list[tuple[tuple[int, ...], Path]]:
    """Return numbers in the names of the whole files of a kind, and their paths, in their order."""
    paths = []
    for path in Path(folder).glob(f"{stem}-*.npz"):
        match = NAME.fullmatch(path.name)
        if match and re.fullmatch(rf"{stem}(-\d+)*", match["stem"]):
            numbers = match["stem"].split("-")[1:]
            paths.append((tuple(map(int, numbers)), path))
    return sorted(paths)


def read(path: AnyPath) -> tuple[dict[str, np.ndarray], Any]:
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


def array(path: AnyPath, name: str) -> np.ndarray:
    """Return one array of a file, whose checksum is checked when it is first read."""
    try:
        stat = os.stat(path)
        mark = os.fspath(path), stat.st_ino, stat.st_size, stat.st_mtime_ns
        if mark not in _checked:
            _check(path, Path(path).read_bytes())
            _checked.add(mark)
        with np.load(path, allow_pickle=False) as opened:
            stored: np.ndarray = opened[name + END]
            return stored
    except DamagedFile:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno,
            f"{error.strerror}: draws are read from the folder of the run when they are asked for. "
            "Has it been moved or removed?",
            os.fspath(path),
        ) from error
    except Exception as error:  # whatever zipfile makes of it
        raise DamagedFile(path, error) from error


def remove_unfinished(folder: AnyPath) -> None:
    """Remove what a killed process was writing: to a folder, or to one in it."""
    for path in [*Path(folder).glob(f"*{UNFINISHED}"), *Path(folder).glob(f"*/*{UNFINISHED}")]:
        if NAME.fullmatch(path.name.removesuffix(UNFINISHED)):
            path.unlink(missing_ok=True)


_checked: set[tuple[str, int, int, int]] = set()  # files that were whole, as they were then


def _check(path: AnyPath, contents: bytes) -> None:
    named = NAME.fullmatch(Path(path).name)
    if named is None or _checksum(named["stem"], contents) != named["checksum"]:
        raise DamagedFile(path, "its checksum is another")


def _checksum(stem: str, contents: bytes | memoryview) -> str:
    """Return that of a file: of its name, too, which says what it holds."""
    checksum = hashlib.blake2b(stem.encode(), digest_size=8)
    checksum.update(contents)
    return checksum.hexdigest()


def _flush_folder(folder: Path) -> None:
    """Flush the names in a folder, where systems let it be opened."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
