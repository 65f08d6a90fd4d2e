"""More rows than given, where control variates of so few would lose a chain."""

from dataclasses import replace

import pytest

from logs import logged_warnings
from model_collection.small import counts_of_groups
from modes import FAST

from pymc_sghmc import SGHMC
from pymc_sghmc.step.warn import more_rows_warning
from pymc_sghmc.tuning.gradient_noise import MOST_FAR_NOISE

FEW = 100
N_ROWS = 1200


@pytest.fixture(scope="module")
def with_empty_groups():
    return counts_of_groups(empty=4)


def chosen(model, **settings):
    """Return a step's tuner and the settings that chains begin with."""
    step = SGHMC(compile_kwargs=FAST, model=model, **settings)
    return step.tuner, step.tuner.chooser.first()


@pytest.fixture(scope="module")
def raised(with_empty_groups):
    """A tuner, the settings that chains begin with, and warnings, of too small a number."""
    with logged_warnings() as texts:
        tuner, tuning = chosen(with_empty_groups, batch_size=FEW)
    return tuner, tuning, texts


def test_more_rows_than_given_are_taken_where_these_are_not_safe(raised):
    tuner, tuning, texts = raised
    assert tuning.rows is not None
    assert tuning.rows > FEW
    far_noise = tuner.setup.noise.second_order_far * FEW / tuning.rows
    assert tuner.takes_all_rows(tuning) or (tuning.order == 2 and far_noise <= MOST_FAR_NOISE)
    [warning] = [text for text in texts if "too few rows" in text]
    assert f"batch_size={FEW}" in warning
    assert f"{tuning.rows:,} rows" in warning


@pytest.mark.parametrize("settings", [{"gradient": "control_variates"}, {"learning_rate": 1e-3}])
def test_rows_are_as_given_beside_other_settings_by_hand(settings, with_empty_groups):
    _, tuning = chosen(with_empty_groups, batch_size=FEW, **settings)
    assert tuning.rows is None


def test_rows_are_as_given_where_they_serve():
    tuner, tuning = chosen(counts_of_groups(empty=0), batch_size=N_ROWS // 2)
    assert tuning.rows is None
    assert tuning.order == 2
    assert tuner.setup.noise.second_order_far <= MOST_FAR_NOISE
    assert tuner.setup.noise.second_order_serves


def test_more_rows_are_told_once_they_are_taken(raised):
    """And not when a chain goes back to the number that was given."""
    tuner, more, _ = raised
    given = replace(more, rows=None)
    warning = more_rows_warning(tuner, given, more, n_updates=10)
    assert f"batch_size={FEW}" in warning.message
    assert f"{more.rows:,} rows" in warning.message
    assert more_rows_warning(tuner, more, more, n_updates=10) is None
    assert more_rows_warning(tuner, more, given, n_updates=10) is None
