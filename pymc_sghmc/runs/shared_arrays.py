"""One copy of large arrays for all processes, in whatever way these start.

Forked processes see the arrays of their parent. Spawned ones get pickles, and a pickled array is
one more copy in each process: here the pickle holds a handle, a place in a file from which the
processes map the same memory. Knows arrays, files and pickles; no gradients, no steps, no chains.
"""

import errno
import io
import os
import pickle
import shutil
import tempfile
import weakref

from contextlib import suppress
from copy import deepcopy
from typing import NamedTuple

import cloudpickle
import numpy as np

from pymc_sghmc.memory import memory_owner

__all__ = ["ByHandle", "Handle", "attach", "dumps", "loads", "share"]

MIN_BYTES = 2**20
CHUNK_BYTES = 2**24
MEMORY_FOLDER = "/dev/shm"  # of files that are memory
# On Linux a file has no name: others open it as a descriptor of this process, and it ends with the
# last of them, killed or not. Elsewhere it has a name and is removed with its array.
HAS_DESCRIPTORS = os.path.isdir("/proc/self/fd")

_files = {}  # (process, address, shape, dtype, strides) of arrays that others map: open file


class Handle(NamedTuple):
    """Where an array lies. It holds while the process that made it has the array."""

    filename: str
    identity: tuple  # of the file: names and descriptors can come to mean others
    dtype: np.dtype
    shape: tuple
    order: str
    offset: int
    writeable: bool


def share(array):
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
    order = "F" if array.flags.fnc else "C"
    writeable = array.flags.writeable
    return Handle(filename, identity, array.dtype, array.shape, order, offset, writeable)


def attach(shared) -> np.ndarray:
    """Return the array of a handle, or the array itself.

    What is written to it stays in this process. It can be written to if the original can, because
    Numba compiles a function anew for read-only arrays.
    """
    if not isinstance(shared, Handle):
        return shared
    filename, identity, dtype, shape, order, offset, writeable = shared
    if not os.path.exists(filename) or _identity(filename)[: len(identity)] != identity:
        raise FileNotFoundError(
            f"The shared array in {filename} is gone: the process that made it has ended or has "
            "deleted its data, or the file of an np.memmap was moved or replaced."
        )
    mode = "c" if writeable else "r"  # copy on write
    return np.memmap(filename, dtype, mode, offset, shape, order).view(np.ndarray)


def dumps(value, apart=()) -> bytes:
    """Pickle with cloudpickle, with handles in place of all large arrays, for `loads`.

    For processes that run at the same time: a handle holds while this one has the array. Objects
    ``apart`` aren't in the pickle, wherever ``value`` refers to them.
    """
    file = io.BytesIO()
    _Pickler(file, apart).dump(value)
    return file.getvalue()


def loads(pickled, apart=()):
    """Return the value of a pickle from `dumps`; it refers to these objects in the others' place."""
    return _Unpickler(io.BytesIO(pickled), apart).load()


class ByHandle:
    """A step method whose large arrays go to other processes as handles.

    These are in a pickle within the pickle, as only its own pickler knows of handles. The unknowns,
    which hold no numbers, are outside: in ``cloudpickle.dumps((model, step))`` they are the
    model's.
    """

    def __reduce__(self):
        unknowns = tuple(self.vars)
        return _rebuild, (type(self), dumps(self._attributes(), unknowns), unknowns)

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        copied.__dict__.update(deepcopy(self._attributes(), memo))
        return copied

    def _attributes(self):
        # PyMC keeps a step's arguments and with them the model and a second copy of the data.
        return {k: v for k, v in self.__dict__.items() if k != "_BlockedStep__newargs"}

    def after_unpickling(self):
        """Do what a new process needs."""


def _rebuild(cls, pickled, unknowns):
    step = object.__new__(cls)
    step.__dict__.update(loads(pickled, unknowns))
    step.after_unpickling()
    return step


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file, apart):
        super().__init__(file, protocol=-1)
        self.places = {id(obj): place for place, obj in enumerate(apart)}

    def persistent_id(self, obj):
        return self.places.get(id(obj))

    def reducer_override(self, obj):
        shared = share(obj) if isinstance(obj, np.ndarray) else obj
        return super().reducer_override(obj) if shared is obj else (attach, (shared,))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, apart):
        super().__init__(file)
        self.apart = apart

    def persistent_load(self, place):
        return self.apart[place]


def _is_mapped(array, owner) -> bool:
    """Whether the file of a memory map holds just these numbers."""
    return (
        isinstance(owner, np.memmap)
        and owner.filename is not None
        and owner.mode != "c"  # changes are in memory alone
        and array.flags.forc
        and os.path.exists(owner.filename)
    )


def _identity(filename) -> tuple:
    stat = os.stat(filename)
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def _pieces(array):
    """Yield the bytes of an array in its own order, so many at a time."""
    rows = array.ravel(order="K") if array.flags.forc else array
    step = max(1, CHUNK_BYTES * len(rows) // array.nbytes)
    return (rows[start : start + step].tobytes() for start in range(0, len(rows), step))


def _file_of(array, owner):
    """Return the file of an array: that of an earlier call unless the array has changed since."""
    key = (os.getpid(), array.ctypes.data, array.shape, array.dtype.str, array.strides)
    if key in _files:
        file = _files[key]
        file.seek(0)
        if all(file.read(len(piece)) == piece for piece in _pieces(array)):
            return file
        _forget(key)
    _files[key] = _written(array)
    weakref.finalize(owner, _forget, key)
    return _files[key]


def _written(array):
    folders = list(filter(os.path.isdir, (MEMORY_FOLDER, tempfile.gettempdir())))
    for folder in folders:
        if shutil.disk_usage(folder).free < array.nbytes:
            continue
        with suppress(OSError):  # no permission, or no room after all
            if HAS_DESCRIPTORS:
                file = tempfile.TemporaryFile(dir=folder)
            else:
                file = tempfile.NamedTemporaryFile(dir=folder, prefix="pymc_sghmc-", delete=False)
            try:
                file.writelines(_pieces(array))
                file.flush()
                return file
            except BaseException:
                _remove(file)
                raise
    raise OSError(
        errno.ENOSPC,
        f"Processes that are not forked share the data in a file of {array.nbytes / 1e9:.3g} GB, "
        f"for which there is no room in {' or '.join(folders)}. Make room, set the environment "
        "variable "
        'TMPDIR to another folder, pass mp_ctx="fork" to pm.sample, or use data in an np.memmap.',
    )


def _remove(file):
    with suppress(OSError):
        file.close()
    if isinstance(file.name, str):
        with suppress(OSError):
            os.unlink(file.name)


def _forget(key):
    """Give a file up, in the process that made it; those that have mapped it keep its memory."""
    if key[0] == os.getpid() and key in _files:
        _remove(_files.pop(key))
