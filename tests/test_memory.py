"""Whose memory an array shows."""

import numpy as np

from pymc_sghmc.memory import memory_map_of, memory_owner


def test_views_of_views_have_one_owner():
    array = np.zeros((4, 6))
    assert memory_owner(array) is array
    assert memory_owner(array[1:].T[::2]) is array
    assert memory_map_of(array[1:]) is None
    assert memory_map_of([1.0, 2.0]) is None


def test_views_of_a_file_lead_to_its_map(tmp_path):
    np.arange(24.0).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", float, "r", shape=(4, 6))
    assert memory_map_of(mapped) is mapped
    assert memory_map_of(np.asarray(mapped)[1:].T) is mapped
    assert memory_map_of(mapped + 1) is None  # in memory
