"""Several modes: found where they are, not where there is one, and chains start in each of them."""

import copy

import arviz as az
import numpy as np
import pymc as pm
import pytest

from logs import logged_warnings
from modes import FAST, QUIET

from pymc_sghmc import SGHMC
from pymc_sghmc.gradients.metric import Dense, Diagonal
from pymc_sghmc.tuning import tuner as tuners
from pymc_sghmc.tuning.modes import FoundModes, number_of_chain
from pymc_sghmc.tuning.separate_modes import Mode, are_separate, mode_of

SEED = 3
UNIT = Diagonal(np.ones(2))
RUN = {"draws": 20, "tune": 20, "random_seed": SEED} | QUIET
CHECKED = {"draws": 100, "tune": 50, "compute_convergence_checks": True}  # PyMC's takes 100 draws


def squares(prior=(0.0, 2.0), **kwargs):
    """A coefficient near 1 or near −1: exact copies of each other with a prior about zero."""
    y = np.random.default_rng(0).normal(1.0, 0.3, size=1000)
    with pm.Model() as model:
        a = pm.Normal("a", *prior, **kwargs)
        pm.Normal("y", a**2, 0.3, observed=y)
    return model


def lines():
    """A linear regression."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((400, 3))
    with pm.Model() as model:
        b = pm.Normal("b", 0, 5, shape=3)
        sigma = pm.HalfNormal("sigma", 2)
        y = x @ [1.0, -1.0, 0.5] + rng.standard_normal(400)
        pm.Normal("y", pm.math.dot(x, b), sigma, observed=y)
    return model


def step_of(model, **kwargs):
    with model:
        return SGHMC(batch_size=100, compile_kwargs=FAST, **kwargs)


@pytest.fixture(scope="module")
def two_modes():
    """A model of two modes, a step for it, and what was logged when it was built."""
    model = squares()
    with logged_warnings() as log:
        step = step_of(model)
    return model, step, log


# ------------------------------------------------------------------ whole runs


@pytest.mark.parametrize("chains", [2, 4])
def test_chains_occupy_both_modes_and_r_hat_tells(two_modes, chains):
    model, step, _ = two_modes
    with model, logged_warnings() as log:
        idata = pm.sample(step=step, chains=chains, cores=1, **RUN | CHECKED)
    a = idata.posterior["a"].values
    means = a.mean(axis=1)
    assert np.abs(np.abs(means) - 1).max() < 0.02
    assert (means > 0).sum() == chains // 2
    assert np.all(np.sign(a) == np.sign(means)[:, None])  # each chain stays in its mode
    assert float(az.rhat(a)) > 1.5
    assert any("rhat" in text for text in log)


def test_modes_are_logged_with_what_to_do(two_modes):
    _, _, log = two_modes
    [text] = [text for text in log if "2 modes" in text]
    assert "symmetry" in text
    assert "in a, with probabilities of about 0.5, 0.5" in text
    assert "constrain" in text


def test_chains_in_workers_start_in_the_same_modes(two_modes):
    model, step, _ = two_modes
    with model:
        here, there = (
            pm.sample(step=step, chains=2, cores=cores, **RUN).posterior["a"].values
            for cores in (1, 2)
        )
    np.testing.assert_array_equal(here, there)


def test_control_variates_are_those_of_the_chains_own_mode(two_modes):
    _, step, _ = two_modes
    point = {"a": np.array(0.0)}
    signs = []
    for rng in np.random.default_rng(SEED).spawn(2):
        step.begin_chain(rng)
        new, [stats] = step.step(point)
        assert stats["control_variates"]
        anchor = step.tuner.gradients[stats["gradient_order"]].anchor.centre
        assert np.sign(anchor) == np.sign(new["a"]) == np.sign(step.tuner.setup.fit.mean)
        signs.append(float(np.sign(anchor[0])))
    assert sorted(signs) == [-1.0, 1.0]


def positions(step, point, n):
    out = []
    for _ in range(n):
        point, _ = step.step(point)
        out.append(float(point["a"]))
    return out, point


def test_a_saved_chain_goes_on_in_its_mode(two_modes):
    """In another step, which a chain in the other mode has used."""
    model, step, _ = two_modes
    other = step_of(model)
    start = {"a": np.array(0.0)}
    first, second = np.random.default_rng(SEED).spawn(2)
    step.begin_chain(second)
    _, point = positions(step, start, 3)
    state = copy.deepcopy(step.sampling_state)
    expected, _ = positions(step, point, 3)
    other.begin_chain(first)
    [elsewhere], _ = positions(other, start, 1)
    assert elsewhere * expected[0] < 0
    other.sampling_state = state
    assert positions(other, point, 3)[0] == expected


def test_draws_are_the_same_where_there_is_one_mode(monkeypatch):
    model = lines()

    def draws():
        with logged_warnings() as log:
            step = step_of(model)
        with model:
            values = pm.sample(step=step, chains=2, cores=1, **RUN).posterior["b"].values
        return values, step.tuner.modes.starts, [text for text in log if "modes" in text]

    searched, modes, log = draws()
    assert len(modes) == 1
    assert not log
    monkeypatch.setattr(
        tuners, "starts_in_modes", lambda setups, gradient, start: FoundModes([start])
    )
    np.testing.assert_array_equal(searched, draws()[0])


# ------------------------------------------------------------------ which chain begins where


def test_numbers_of_a_runs_chains_follow_each_other():
    """With the generators that PyMC gives chains: of a seed, of a generator, of a compound step."""
    used = np.random.default_rng(11)
    used.spawn(3)
    of_seeds = [number_of_chain(rng) for rng in np.random.default_rng(5).spawn(4)]
    of_generator = [number_of_chain(rng) for rng in used.spawn(4)]
    of_compound = [number_of_chain(rng.spawn(2)[1]) for rng in np.random.default_rng(5).spawn(4)]
    of_many = [number_of_chain(rng) for rng in np.random.default_rng([7, 8]).spawn(4)]
    for numbers in (of_seeds, of_generator, of_compound, of_many):
        assert np.diff(numbers).tolist() == [1, 1, 1]


def test_runs_of_one_chain_with_seeds_in_a_row_begin_in_turn():
    numbers = [number_of_chain(np.random.default_rng(seed).spawn(1)[0]) for seed in range(4)]
    assert sorted(number % 2 for number in numbers) == [0, 0, 1, 1]


def test_starts_that_are_given_are_kept():
    """The other mode is logged all the same: R-hat can't show it then."""
    for given in ({"initval": 0.5}, {}):
        model = squares(**given)
        with logged_warnings() as log:
            step = step_of(model, **({} if given else {"initial_point": {"a": 0.5}}))
        for rng in np.random.default_rng(SEED).spawn(2):
            step.begin_chain(rng)
            [position], _ = positions(step, model.initial_point() | {"a": np.array(0.5)}, 1)
            assert position > 0
        assert any("2 modes" in text and "initial values" in text for text in log)


def test_a_start_of_pymcs_decides_the_mode(two_modes):
    """As with initvals of pm.sample, which the step doesn't see before."""
    _, step, _ = two_modes
    for start in (-0.5, 0.5):
        for rng in np.random.default_rng(SEED).spawn(2):
            step.begin_chain(rng)
            [position], _ = positions(step, {"a": np.array(start)}, 1)
            assert position * start > 0


@pytest.mark.parametrize(
    ("sd", "n_started", "n_told"), [(1.0, 2, 2), (0.7, 1, 2), (0.5, 1, 1), (0.25, 1, 1)]
)
def test_chains_start_in_modes_that_hold_a_good_part(sd, n_started, n_told):
    """A prior about 1 makes the mode at −1 less probable by exp(2/sd²): e², e^4.1, e^8 or e^32."""
    with logged_warnings() as log:
        step = step_of(squares(prior=(1.0, sd)), initial_point={"a": 0.0})
    modes = step.tuner.modes
    assert len(modes.starts) == n_started
    share = 1 / (1 + np.exp(2 / sd**2))
    expected = [1 - share, share] if n_told == 2 else [1.0]
    # the likelihood alone is about as steep on either side: e^0.2 is a part of its own
    np.testing.assert_allclose(sorted(modes.shares, reverse=True), expected, atol=0.3 * share)
    assert len([text for text in log if "2 modes" in text]) == n_told - 1


def test_no_chain_starts_in_a_mode_that_holds_little():
    """Four chains would give it a quarter of the draws or none, where it holds an e^-4.1th part."""
    model = squares(prior=(0.1, 0.22))
    with logged_warnings() as log:
        step = step_of(model)
    [text] = [text for text in log if "2 modes" in text]
    assert "start in the most probable mode:" in text
    with model:
        idata = pm.sample(step=step, chains=4, cores=1, **RUN)
    assert (idata.posterior["a"].values > 0).all()


def test_chains_start_in_the_probable_mode_where_the_first_is_not():
    """The set-up climbs from −0.3 to the mode that holds e^-32 of the posterior."""
    model = squares(prior=(1.0, 0.25))
    step = step_of(model, initial_point={"a": -0.05})
    assert [mode > 0 for mode in step.tuner.modes.starts] == [True]


# ------------------------------------------------------------------ on densities by formula


class Density:
    """A log-density of two parameters, its gradient by central differences."""

    dtype = np.dtype(float)

    def __init__(self, log_density):
        self.log_density = log_density

    def __call__(self, x):
        h = 1e-5
        gradient = [
            (self.log_density(x + h * e) - self.log_density(x - h * e)) / (2 * h) for e in np.eye(2)
        ]
        return float(self.log_density(x)), np.array(gradient)


def two_normals(distance):
    def log_density(x):
        ends = [-0.5 * np.sum(np.square(x - [s * distance / 2, 0.0])) for s in (-1, 1)]
        return np.logaddexp(*ends)

    return Density(log_density)


def valley(x):
    """One mode on a ridge that is bent into a half-circle of radius 1, 0.05 wide."""
    radius = np.hypot(*x)
    angle = np.arctan2(x[1], x[0])
    return -0.5 * ((radius - 1) / 0.05) ** 2 - 0.1 * angle**2


def funnel(x):
    """The scale of an effect: no mode, and higher and higher into the neck."""
    return -0.5 * (x[0] / 3) ** 2 - 3 * x[0] - 0.5 * x[1] ** 2 * np.exp(-2 * x[0])


@pytest.mark.parametrize(("distance", "expected"), [(3.0, False), (4.0, False), (8.0, True)])
def test_two_normals_are_separate_if_they_are_far_apart(distance, expected):
    """The mixture of two unit normals has two maxima from 2 sds on; chains cross until about 5."""
    density = two_normals(distance)
    modes = [mode_of(density, np.array([s * distance / 2, 0.1]), UNIT) for s in (-1, 1)]
    assert np.allclose([mode.position[1] for mode in modes], 0.0, atol=0.05)
    assert are_separate(density, *modes) is expected
    assert modes[0].log_mass == pytest.approx(modes[1].log_mass, abs=1e-3)


def test_ends_of_a_bent_ridge_are_one_mode():
    """The density is low on the straight line between them, and high on the way along the ridge."""
    density = Density(valley)
    metric = Dense(0.05 * np.eye(2))
    ends = [np.array([np.cos(t), np.sin(t)]) for t in (-1.2, 1.2)]
    ends = [Mode(end, valley(end), metric) for end in ends]
    middle = (ends[0].position + ends[1].position) / 2
    assert valley(middle) < ends[0].log_density - 50
    assert not are_separate(density, *ends)


def test_a_funnel_and_a_plain_have_no_mode():
    assert mode_of(Density(funnel), np.array([-2.0, 0.0]), UNIT) is None
    assert mode_of(Density(lambda x: -0.5 * x[0] ** 2), np.zeros(2), UNIT) is None
