"""Maps of files that were cut short: zeros and a mark where the system would end the process."""

import gc
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from pymc_sghmc.rows import bus_errors

pytestmark = pytest.mark.skipif(not bus_errors.IS_HERE, reason="64-bit Linux alone has it")

N = 4 * bus_errors.PAGE // 8  # numbers in four pages


def ones(path):
    np.ones(N).tofile(path)
    return np.memmap(path, float, "r")


def test_reads_beyond_the_end_give_zeros_and_are_marked(tmp_path):
    array, other = ones(tmp_path / "x"), ones(tmp_path / "y")
    place, beside = bus_errors.watch(array), bus_errors.watch(other)
    assert bus_errors.watch(array) == place != beside
    assert array.sum() == N and not bus_errors.was_cut(place)
    os.truncate(tmp_path / "x", 8 * N // 4)
    assert array.sum() == N // 4 and other.sum() == N
    assert bus_errors.was_cut(place) and not bus_errors.was_cut(beside)
    os.truncate(tmp_path / "x", 8 * N)
    assert bus_errors.was_cut(place)  # its pages stay those of zeros
    del array
    gc.collect()
    assert not bus_errors.was_cut(place)


DIES = """
import os, sys
import numpy as np
from pymc_sghmc.rows import bus_errors
arrays = [np.memmap(path, float, "r") for path in sys.argv[1:]]
bus_errors.watch(arrays[0])
for path in sys.argv[1:]:
    os.truncate(path, 8)
print(arrays[0].sum(), flush=True)
arrays[1].sum()
"""


def test_maps_that_are_not_watched_are_as_they_were(tmp_path):
    paths = [str(tmp_path / name) for name in "xy"]
    for path in paths:
        ones(path)
    ended = subprocess.run([sys.executable, "-c", DIES, *paths], capture_output=True, text=True)
    assert ended.stdout == "1.0\n" and ended.returncode == -signal.SIGBUS
