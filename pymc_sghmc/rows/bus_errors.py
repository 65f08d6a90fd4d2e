"""Reads of a memory map beyond the end of a file that was cut short.

Systems end the process for them, by SIGBUS and without a word. Here such a read of a map that is
watched gives zeros, and is remembered, so that whoever reads can say what happened. All other
reads, and systems other than 64-bit Linux, are as they were. Knows addresses; no arrays' meaning.
Imported where there is such a map.
"""

import ctypes
import mmap
import platform
import signal
import sys
import weakref

import numpy as np

from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

__all__ = ["was_cut", "watch"]

MOST = 64  # maps that are watched
PAGE = mmap.PAGESIZE  # bytes; and where siginfo_t has the address on 64-bit Linux
ADDRESS = 16
READ = 1  # for mmap
PRIVATE_FIXED_ANONYMOUS = 0x32
IS_HERE = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
WITH_ADDRESS = 4  # SA_SIGINFO

_maps = np.zeros((3, MOST), np.int64)  # first address, that after the last, reads beyond the end
_starts, _stops, _reads = (int(row.ctypes.data) for row in _maps)


class _SigAction(ctypes.Structure):
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_handlers = []  # the compiled one, which has to live as long as the process
_before = _SigAction()
_before_at = ctypes.addressof(_before)


@intrinsic
def _at(typing, address):
    def generate(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), generate


@intrinsic
def _put(typing, address, value):
    def generate(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


_int = types.int32
_long = types.intp
_mmap = types.ExternalFunction("mmap", _long(_long, _long, _int, _int, _int, _long))
_sigaction = types.ExternalFunction("sigaction", _int(_int, _long, _long))


def _give_zeros(number, info, context):
    """Put a page of zeros where a watched map has none; else let the read fail as before."""
    address = _at(info + ADDRESS)
    for i in range(0, 8 * MOST, 8):
        if _at(_starts + i) <= address < _at(_stops + i):
            _put(_reads + i, _at(_reads + i) + 1)
            page = address // PAGE * PAGE
            _mmap(page, PAGE, _int(READ), _int(PRIVATE_FIXED_ANONYMOUS), _int(-1), 0)
            return
    _sigaction(number, _before_at, 0)


def watch(array) -> int:
    """Watch the memory of an `np.memmap` for as long as it lives; return its place, −1 where that can't be."""
    first = array.ctypes.data
    size = array.nbytes
    start = first // PAGE * PAGE
    stop = -(-(first + size) // PAGE) * PAGE
    known = np.flatnonzero((_maps[0] == start) & (_maps[1] == stop))
    if known.size:
        return int(known[0])
    free = np.flatnonzero(_maps[1] == 0)
    if not IS_HERE or not free.size or not size:
        return -1
    if not _handlers:
        _handlers.append(cfunc(types.void(_int, _long, _long))(_give_zeros))
        new = _SigAction(_handlers[0].address, (ctypes.c_byte * 128)(), WITH_ADDRESS, None)
        ctypes.CDLL(None).sigaction(signal.SIGBUS, ctypes.byref(new), ctypes.byref(_before))
    place = int(free[0])
    _maps[:, place] = start, stop, 0
    weakref.finalize(array, _forget, place)
    return place


def was_cut(place) -> bool:
    """Whether it was read where its file has no bytes, in this process."""
    return place >= 0 and bool(_maps[2, place])


def _forget(place):
    _maps[:, place] = 0
