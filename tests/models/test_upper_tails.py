"""Probit models far out, where 1 − Φ(x) is less than rounding leaves of it: against SciPy."""

import numpy as np
import pymc as pm
import pytest

from modes import FAST
from scipy import stats
from targets import plain_gradient

from pymc_sghmc.models.unknowns import Unknowns

Y = np.tile([0, 1], 5)


def density_of(model):
    point = model.initial_point()
    unknowns = Unknowns(model.value_vars, point)
    return plain_gradient(model, unknowns, Y.size, point, FAST)


@pytest.mark.parametrize("eta", [-30.0, -9.0, -1.0, 0.5, 8.2, 9.0, 30.0])
def test_probit_models_are_finite_far_out(eta):
    with pm.Model() as model:
        a = pm.Flat("a")
        pm.Bernoulli("y", p=pm.math.invprobit(a * (2.0 * pm.Data("y_", Y) - 1)), observed=Y)
    gradient = density_of(model)
    position = np.array([eta])
    logp, [slope] = gradient.passes.log_density(position)
    expected = stats.norm.logcdf(eta)
    # PyMC's √2 has single precision
    assert float(logp) == pytest.approx(Y.size * expected, rel=1e-4)
    hazard = np.exp(stats.norm.logpdf(eta) - expected)
    assert slope == pytest.approx(Y.size * hazard, rel=1e-4, abs=1e-300)
    if eta < -8.3:  # the test can fail: PyMC's own gradient isn't finite there
        assert not np.isfinite(model.compile_dlogp()({"a": np.array(eta)})).all()
