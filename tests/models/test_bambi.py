"""Models as Bambi writes them: their groups are known as effects, in both of its forms."""

import warnings

import numpy as np
import pandas as pd
import pytest

from modes import FAST
from targets import by_way_of_the_model, log_density, plain_gradient

from pymc_sghmc import SGHMC
from pymc_sghmc.hierarchy.centring import centring_of
from pymc_sghmc.hierarchy.rewrites import Rewriting
from pymc_sghmc.models.unknowns import Unknowns

bambi = pytest.importorskip("bambi", reason="Bambi isn't installed")

# Its own, with pandas 3
pytestmark = pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes")

N = 60
rng = np.random.default_rng(5)
DATA = pd.DataFrame(
    {
        "x": rng.standard_normal(N),
        "g": np.char.add("g", rng.integers(0, 6, N).astype(str)),
        "h": np.char.add("h", rng.integers(0, 4, N).astype(str)),
        "coin": rng.integers(0, 2, N),
        "real": rng.standard_normal(N),
        "count": rng.poisson(2, N),
    }
)
FORMULAS = {
    "coin ~ x + (1|g)": ("bernoulli", {"1|g"}),
    "real ~ x + (x|g)": ("gaussian", {"1|g", "x|g"}),
    "real ~ x + (0 + x|g)": ("t", {"x|g"}),
    "count ~ x + (1|h/g)": ("negativebinomial", {"1|h", "1|h:g"}),
    "coin ~ x + (1|g) + (x|h)": ("bernoulli", {"1|g", "1|h", "x|h"}),
    "count ~ (1|g) + offset(x)": ("poisson", {"1|g"}),
}


@pytest.mark.parametrize("noncentered", [True, False])
@pytest.mark.parametrize("formula", FORMULAS)
def test_groups_are_effects_and_the_density_is_the_models(formula, noncentered):
    family, names = FORMULAS[formula]
    made = bambi.Model(formula, DATA, family=family, noncentered=noncentered)
    made.build()
    model = made.backend.model
    point = model.initial_point()
    unknowns = Unknowns(model.value_vars, point)
    density = plain_gradient(
        model, unknowns, 10, point, FAST, rewriting=Rewriting(may_centre=True)
    ).density
    assert set(density.group_coefficients) == {
        name + "_offset" if noncentered else name for name in names
    }
    rng = np.random.default_rng(0)
    centring_of(density).weights = rng.random(centring_of(density).as_written.size)
    x = density.from_model(unknowns.ravel(point)) + 0.3 * rng.standard_normal(unknowns.d)
    expected, *_ = by_way_of_the_model(density, model.compile_logp(**FAST), unknowns, point, x)
    assert log_density(density, x, N) == pytest.approx(expected, abs=1e-5)


def test_a_likelihood_without_second_derivatives_gets_control_variates_of_first_order():
    """Its thresholds are split from one vector, and PyTensor's gradient of that raises TypeError."""
    grade = pd.Categorical(DATA["count"].clip(0, 3), ordered=True)
    made = bambi.Model("grade ~ 0 + x", DATA.assign(grade=grade), family="sratio")
    made.build()
    with made.backend.model:
        step = SGHMC(batch_size=10, compile_kwargs=FAST)
    _, first, second = step.tuner.gradients
    assert first is not None
    assert second is None


@pytest.mark.parametrize("link", ["logit", "probit", "cloglog"])
def test_the_rounding_of_probabilities_is_no_jump(link):
    """Bambi replaces probabilities of exactly 0 and 1, which no draw reaches."""
    made = bambi.Model("coin ~ x + (1|g)", DATA, family="bernoulli", link=link)
    made.build()
    with warnings.catch_warnings(record=True) as caught, made.backend.model:
        warnings.simplefilter("always")
        SGHMC(
            batch_size=20, learning_rate=1e-4, friction=0.1, gradient="plain", compile_kwargs=FAST
        )
    assert not [w for w in caught if "jumps" in str(w.message)]
