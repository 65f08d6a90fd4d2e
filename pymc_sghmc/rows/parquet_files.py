"""Parquet files: where they are, and what their metadata say.

Knows pyarrow, which it imports where it is used, and file systems; no blocks of rows.
"""

import os

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

__all__ = ["ParquetFile", "ParquetFiles", "PathLike", "opened"]

PathLike = str | os.PathLike[str]


class ParquetFile(NamedTuple):
    """One file of Parquet data."""

    path: str
    filesystem: Any  # of PyArrow, in which the path leads to it
    n_groups: int  # of rows
    n_rows: int
    names: list[str]  # of its columns, with the keys
    keys: dict[str, Any]  # columns that its folders name, as in year=2024/month=1


class ParquetFiles(NamedTuple):
    """Files of the same columns."""

    files: list[ParquetFile]
    names: list[str]  # of the columns that any of them has

    @classmethod
    def at(cls, path: PathLike | Sequence[PathLike]) -> "ParquetFiles":
        """Find the files of a folder, or take those that are given."""
        _parquet()
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        keys: dict[str, dict[str, str]] = {}
        filesystems: dict[str, Any] = {}
        for top in [os.fspath(entry) for entry in paths]:
            filesystem, place = _filesystem(top)
            found = _found(filesystem, place)
            if found is None:
                raise ValueError(f"data=: there is no file or folder {top!r}. Correct the path.")
            keys |= found
            filesystems |= dict.fromkeys(found, filesystem)
        if not keys:
            raise ValueError(
                f"ParquetLoader({path!r}): the folder has no *.parquet files. Pass a folder "
                "that has some, or the files."
            )
        values = _typed(keys.values())
        files = []
        names: dict[str, None] = {}
        for file, texts in keys.items():
            with opened(file, filesystems[file]) as reader:
                metadata, columns = reader.metadata, reader.schema_arrow.names
            own = {name: values[name][text] for name, text in texts.items()}
            files.append(
                ParquetFile(
                    path=file,
                    filesystem=filesystems[file],
                    n_groups=metadata.num_row_groups,
                    n_rows=metadata.num_rows,
                    names=[*columns, *own],
                    keys=own,
                )
            )
            names |= dict.fromkeys(files[-1].names)
        return cls(files, list(names))


def _filesystem(path: str) -> tuple[Any, str]:
    """Return PyArrow's filesystem of a path or an address, and where the path leads in it."""
    import pyarrow as pa

    from pyarrow import fs

    if "://" not in path:
        return fs.LocalFileSystem(), path
    try:
        filesystem, place = fs.FileSystem.from_uri(path)
    except pa.ArrowInvalid as error:  # of a kind that PyArrow doesn't know
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ValueError(
                f"data=: PyArrow can't open {path!r} by itself. Install fsspec and its filesystem "
                f"for this kind of address. ({error})"
            ) from None
        try:
            of_fsspec, place = url_to_fs(path)
        except (ValueError, ImportError) as reason:
            raise ValueError(
                f"data=: the address {path!r} can't be opened ({reason}). Correct it, install what "
                "it needs, or copy the files to this machine and pass their path."
            ) from reason
        filesystem = fs.PyFileSystem(fs.FSSpecHandler(of_fsspec))
    return filesystem, place


def _found(filesystem: Any, top: str) -> dict[str, dict[str, str]] | None:
    """Find the files at a place, and the keys of folders that are named key=value; None: nothing.

    Folders with other names in a folder aren't looked into.
    """
    from pyarrow import fs

    info = filesystem.get_file_info(top)
    if info.type == fs.FileType.NotFound:
        return None
    if info.type == fs.FileType.File:
        return {top: {}}
    found = {}
    for entry in filesystem.get_file_info(fs.FileSelector(top, recursive=True)):
        *folders, name = entry.path[len(info.path) :].strip("/").split("/")
        pairs = [folder.partition("=") for folder in folders]
        if (
            entry.type == fs.FileType.File
            and name.endswith(".parquet")
            and all(p[1] for p in pairs)
        ):
            found[entry.path] = {key: unquote(value) for key, _, value in pairs}
    return dict(sorted(found.items()))


def _typed(keys: Iterable[dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Return the values of each key by their texts: numbers where all of them are."""
    texts: dict[str, set[str]] = {}
    for pairs in keys:
        for name, text in pairs.items():
            texts.setdefault(name, set()).add(text)
    return {name: _numbers(values) for name, values in texts.items()}


def _numbers(texts: set[str]) -> dict[str, Any]:
    for kind in (int, float):
        try:
            return {text: kind(text) for text in texts}
        except ValueError:
            continue
    return {text: text for text in texts}


@contextmanager
def opened(path: str, filesystem: Any) -> Iterator[Any]:
    """Open a Parquet file, or say what is wrong with it."""
    parquet = _parquet()
    try:
        file = parquet.ParquetFile(path, filesystem=filesystem)
    except ValueError as error:  # pyarrow.ArrowInvalid
        raise ValueError(
            f"data=: {path} isn't a file of Parquet data. Read it into a data frame and pass that, "
            f"or write it by frame.to_parquet(...). ({error})"
        ) from None
    with file:
        yield file


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "ParquetLoader needs pyarrow. Install it: pip install pyarrow."
        ) from error
    return pyarrow.parquet
