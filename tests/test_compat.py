"""What the package adds to PyMC and PyTensor."""

import warnings

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from scipy.special import polygamma

from pymc_sghmc.compat import add_trigamma_to_numba


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_trigamma_is_compiled_by_numba(dtype):
    """PyTensor's own falls back to Python, with a warning of "object mode"."""
    pytest.importorskip("numba")
    add_trigamma_to_numba()
    x = pt.vector("x", dtype=dtype)
    at = np.r_[np.geomspace(1e-6, 1e6, 200), -0.5, -7.3, 0.0, -2.0].astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = pytensor.function([x], pt.tri_gamma(x), mode="NUMBA")(at)
    assert values.dtype == dtype
    tolerance = 1e-13 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(values[:-2], polygamma(1, at[:-2]), rtol=tolerance)
    assert np.isinf(values[-2:]).all()
