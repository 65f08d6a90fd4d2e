"""Shared by all tests: PyTensor compiles fast, and the data's place is known."""

# ruff: noqa: E402  (the environment must be set before PyTensor and NumPy are imported)
import os

# Before PyTensor is imported: PyMC's own helper functions (initial points, deterministics, priors)
# compile in Python, and Numba keeps what it compiled between runs. C and Numba optimise little, as
# compiling takes longer than what is compiled runs. PyTensor records where each variable was made,
# a tenth of the time of small models: set traceback__limit=8 to see it in its messages.
FLAGS = "mode=FAST_COMPILE,gcc__cxxflags=-O0,traceback__limit=0,"
os.environ["PYTENSOR_FLAGS"] = FLAGS + os.environ.get("PYTENSOR_FLAGS", "")
os.environ.setdefault("NUMBA_OPT", "1")
os.environ.setdefault("MPLBACKEND", "agg")
# PyMC's ZarrTrace pickles states and warnings, which newer versions of numcodecs read on request.
os.environ.setdefault("NUMCODECS_ALLOW_UNSAFE_PICKLE_DECODE", "1")
# Chains run in processes of their own: threads of BLAS beside them only get in their way.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import gc

from pathlib import Path

import pytest

from data_folder import data_folder
from slow import listed

ROOT = Path(__file__).parents[1]
# Graphs are many small objects, of which few are garbage. By Python's own thresholds the search for
# it takes a fifth of the time of a test, as it goes through all modules and models again and again.
GARBAGE_THRESHOLDS = 100_000, 20, 50
pytest.register_assert_rewrite("exactness")  # its asserts tell what they compared, as in tests


@pytest.fixture(scope="session")
def data():
    """Folder of real data with reference posteriors; skips where it is absent."""
    try:
        return data_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """Mark the tests that were measured as slow."""
    slow = set(listed())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Take all that is imported and collected out of Python's searches for garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
