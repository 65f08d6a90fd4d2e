"""One copy of large arrays for all processes of a run, in whatever way these start.

Forked processes see the arrays of their parent. Spawned ones get pickles, and a pickled array is
one more copy in each process: here the pickle holds a handle, a place in a file from which the
processes map the same memory. All other pickles hold the arrays themselves, so that they can be
opened later, and on another machine. Knows arrays, files and pickles; no gradients, no steps, no
chains.
"""

import errno
import io
import multiprocessing
import os
import pickle
import shutil
import tempfile
import weakref

from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import IO, Any, Literal, NamedTuple

import cloudpickle
import numpy as np

from pymc_sghmc.memory import memory_owner
from pymc_sghmc.pymc_hooks import pickles_for_chains

__all__ = ["ByHandle", "Handle", "attach", "dumps", "loads", "share"]

MIN_BYTES = 2**20
CHUNK_BYTES = 2**24
MEMORY_FOLDER = "/dev/shm"  # of files that are memory
# Where processes can open each other's descriptors (Linux), a file has no name, and it ends with
# the last of them, killed or not. Elsewhere it has a name and is removed with its array.
HAS_DESCRIPTORS = os.path.isdir("/proc/self/fd")

Key = tuple[int, int, tuple[int, ...], str, tuple[int, ...]]

# process, address, shape, dtype and strides of arrays that others map: open file
_files: dict[Key, IO[bytes]] = {}


class Handle(NamedTuple):
    """Where an array lies. It holds while the process that made it has the array."""

    filename: str
    identity: tuple[int, ...]  # of the file: names and descriptors can come to mean others
    dtype: np.dtype
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    offset: int
    writeable: bool


def share(array: np.ndarray) -> np.ndarray | Handle:
    """Return a handle by which other processes map a large array; a small one itself.

    The place of a contiguous part of an `np.memmap` is known. Other arrays are written to a file,
    once while they don't change.

    Parameters
    ----------
    array : array

    Returns
    -------
    Handle or array
        The array itself if it has less than 1 MB, is masked or holds objects.

    Raises
    ------
    OSError
        If there is no room for the file.
    """
    plain = type(array) in (np.ndarray, np.memmap) and not array.dtype.hasobject
    if not plain or array.nbytes < MIN_BYTES:
        return array
    owner = memory_owner(array)
    if _is_mapped(array, owner):
        filename = os.fspath(owner.filename)
        offset = owner.offset + array.ctypes.data - owner.ctypes.data
        identity = _identity(filename)[:2]  # the user may go on writing to it
    else:
        file = _file_of(array, owner)
        offset = 0
        filename = f"/proc/{os.getpid()}/fd/{file.fileno()}" if HAS_DESCRIPTORS else file.name
        identity = _identity(filename)
    return Handle(
        filename=filename,
        identity=identity,
        dtype=array.dtype,
        shape=array.shape,
        order="F" if array.flags.fnc else "C",
        offset=offset,
        writeable=array.flags.writeable,
    )


def attach(shared: np.ndarray | Handle) -> np.ndarray:
    """Return the array of a handle, or the array itself.

    What is written to it stays in this process. It can be written to if the original can, because
    Numba compiles a function anew for read-only arrays.
    """
    if not isinstance(shared, Handle):
        return shared
    filename = shared.filename
    n_marks = len(shared.identity)
    if not os.path.exists(filename) or _identity(filename)[:n_marks] != shared.identity:
        raise FileNotFoundError(
            f"The shared array in {filename} is gone: the process that made it has ended or has "
            "deleted its data, or the file of an np.memmap was moved or replaced. Keep both while "
            "processes sample."
        )
    mapped = np.memmap(
        filename,
        shared.dtype,
        "c" if shared.writeable else "r",  # copy on write
        shared.offset,
        shared.shape,
        shared.order,
    )
    return mapped.view(np.ndarray)


def dumps(value: Any, apart: Sequence[Any] = (), by_handle: bool = True) -> bytes:
    """Pickle with cloudpickle, for `loads`.

    Parameters
    ----------
    value : object
    apart : sequence of object
        Aren't in the pickle, wherever ``value`` refers to them.
    by_handle : bool, default True
        Whether handles take the place of all large arrays. They hold while this process has the
        arrays. Without them an object that has ``for_another_host`` gives what is pickled for it.
    """
    file = io.BytesIO()
    pickler = _ByHandlePickler if by_handle else _ByValuePickler
    pickler(file, apart).dump(value)
    return file.getvalue()


def loads(pickled: bytes, apart: Sequence[Any] = ()) -> Any:
    """Return the value of a pickle from `dumps`, with these objects in place of the others."""
    return _Unpickler(io.BytesIO(pickled), apart).load()


class ByHandle:
    """A step method whose large arrays go to the processes of its run as handles.

    All else is in a pickle within the pickle, as only its own pickler knows of handles. The
    variables, which hold no numbers, are outside: in ``cloudpickle.dumps((model, step))`` they are
    the model's.
    """

    vars: Sequence[Any]
    # PyMC keeps a step's arguments and with them the model and a second copy of the data
    left_behind: tuple[str, ...] = ("_BlockedStep__newargs",)

    def __reduce__(self) -> tuple[Any, ...]:
        variables = tuple(self.vars)
        pickled = dumps(self._attributes(), variables, by_handle=pickles_for_chains())
        return _rebuild, (type(self), pickled, variables)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ByHandle":
        copied = object.__new__(type(self))
        copied.__dict__.update(deepcopy(self._attributes(), memo))
        return copied

    def _attributes(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in self.left_behind}

    def after_unpickling(self) -> None:
        """Do what a new process needs."""


def _rebuild(cls: type[ByHandle], pickled: bytes, variables: Sequence[Any]) -> ByHandle:
    step = object.__new__(cls)
    step.__dict__.update(loads(pickled, variables))
    step.after_unpickling()
    return step


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: IO[bytes], apart: Sequence[Any]) -> None:
        super().__init__(file, protocol=-1)
        self.places = {id(obj): place for place, obj in enumerate(apart)}

    def persistent_id(self, obj: Any) -> int | None:
        return self.places.get(id(obj))


class _ByHandlePickler(_Pickler):
    def reducer_override(self, obj: Any) -> Any:
        shared = share(obj) if isinstance(obj, np.ndarray) else obj
        return super().reducer_override(obj) if shared is obj else (attach, (shared,))


class _ByValuePickler(_Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type) and hasattr(obj, "for_another_host"):
            return obj.for_another_host().__reduce_ex__(4)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], apart: Sequence[Any]) -> None:
        super().__init__(file)
        self.apart = apart

    def persistent_load(self, place: int) -> Any:
        return self.apart[place]


def _is_mapped(array: np.ndarray, owner: Any) -> bool:
    """Whether the file of a memory map holds just these numbers."""
    if not isinstance(owner, np.memmap) or owner.filename is None:
        return False
    in_memory = owner.mode == "c"  # its changes
    return not in_memory and array.flags.forc and os.path.exists(owner.filename)


def _identity(filename: str) -> tuple[int, ...]:
    stat = os.stat(filename)
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def _pieces(array: np.ndarray) -> Iterator[bytes]:
    """Yield the bytes of an array in its own order, so many at a time."""
    rows = array.ravel(order="K") if array.flags.forc else array
    step = max(1, CHUNK_BYTES * len(rows) // array.nbytes)
    return (rows[start : start + step].tobytes() for start in range(0, len(rows), step))


def _file_of(array: np.ndarray, owner: np.ndarray) -> IO[bytes]:
    """Return the file of an array: that of an earlier call unless the array has changed since."""
    key: Key = (os.getpid(), array.ctypes.data, array.shape, array.dtype.str, array.strides)
    if key in _files:
        file = _files[key]
        file.seek(0)
        if all(file.read(len(piece)) == piece for piece in _pieces(array)):
            return file
        _forget(key)
    _files[key] = _written(array)
    weakref.finalize(owner, _forget, key)
    return _files[key]


def _written(array: np.ndarray) -> IO[bytes]:
    folders = list(filter(os.path.isdir, (MEMORY_FOLDER, tempfile.gettempdir())))
    for folder in folders:
        if shutil.disk_usage(folder).free < array.nbytes:
            continue
        with suppress(OSError):  # no permission, or no room after all
            file = _new_file(folder)
            try:
                file.writelines(_pieces(array))
                file.flush()
                return file if HAS_DESCRIPTORS else _closed_once(file)
            except BaseException:
                _remove(file)
                raise
    has_fork = "fork" in multiprocessing.get_all_start_methods()
    by_fork = 'pass mp_ctx="fork" to pm.sample, ' if has_fork else ""
    raise OSError(
        errno.ENOSPC,
        f"Processes that are not forked share the data in a file of {array.nbytes / 1e9:.3g} GB, "
        f"for which there is no room in {' or '.join(folders)}. Make room, set the environment "
        f"variable TMPDIR to another folder, {by_fork}or use data in an np.memmap.",
    )


def _new_file(folder: str) -> IO[bytes]:
    if HAS_DESCRIPTORS:
        return tempfile.TemporaryFile(dir=folder)
    descriptor, filename = tempfile.mkstemp(dir=folder, prefix="pymc_sghmc-")
    os.close(descriptor)
    return open(filename, "w+b")


def _closed_once(file: IO[bytes]) -> IO[bytes]:
    """Close a file and open it to be read: systems may set its time only then."""
    file.close()
    return open(file.name, "rb")


def _remove(file: IO[bytes]) -> None:
    with suppress(OSError):
        file.close()
    if isinstance(file.name, str):
        with suppress(OSError):
            os.unlink(file.name)


def _forget(key: Key) -> None:
    """Give a file up, in the process that made it; those that have mapped it keep its memory."""
    if key[0] == os.getpid() and key in _files:
        _remove(_files.pop(key))
