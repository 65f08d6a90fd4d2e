"""What is shown while a step is set up: nothing is silent, and nothing is shown to nobody."""

import logging
import time

import numpy as np
import pymc as pm
import pytest

from modes import FAST

from pymc_sghmc import SGHMC
from pymc_sghmc.phases import begin_phase, count_passes
from pymc_sghmc.step import setup_display
from pymc_sghmc.step.setup_display import SetupDisplay, shown


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(setup_display, "time", clock)
    return clock


def test_lines_are_logged_after_two_seconds_and_then_ever_less_often(clock, caplog):
    with caplog.at_level(logging.INFO, logger="pymc.sghmc"), shown("SGHMC"):
        begin_phase("compiling gradients")
        for _ in range(60):
            clock.now += 1.0
            count_passes(0.5)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Setting up SGHMC..."
    assert lines[1] == "Setting up SGHMC: compiling gradients, 1 passes over the data, 2 s"
    assert [line.rsplit(", ", 1)[1] for line in lines[1:]] == [f"{s} s" for s in (2, 6, 14, 30, 46)]


def test_a_phase_that_tells_of_nothing_is_not_silent(monkeypatch, caplog):
    """As the compilation of one large function."""
    monkeypatch.setattr(setup_display, "QUIET", 0.1)
    monkeypatch.setattr(setup_display, "LOOK", 0.01)
    with caplog.at_level(logging.INFO, logger="pymc.sghmc"), shown("SGHMC"):
        begin_phase("compiling the draw")
        until = time.monotonic() + 30
        while len(caplog.records) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    lines = caplog.messages[1:]
    assert len(lines) >= 2
    assert all(line.startswith("Setting up SGHMC: compiling the draw, ") for line in lines)
    told = len(caplog.records)
    time.sleep(0.5)  # longer than the next line would take
    assert len(caplog.records) == told


def test_seconds_are_counted_by_phase_and_compilation_apart(clock):
    with shown("SGHMC") as display:
        for phase, seconds in [
            ("reading", 1),
            ("compiling a", 2),
            ("fitting", 4),
            ("compiling b", 8),
        ]:
            begin_phase(phase)
            clock.now += seconds
        count_passes(2.5)
    assert display.seconds == {"reading": 1, "compiling a": 2, "fitting": 4, "compiling b": 8}
    assert display.compiling == 10
    assert display.total == 15
    assert display.passes == 2.5


def test_outside_of_a_set_up_nothing_is_told():
    with shown("SGHMC") as display:
        pass
    begin_phase("fitting")
    count_passes(1.0)
    assert display.passes == 0
    assert not display.seconds


def test_a_bar_is_shown_in_terminals_and_gone_afterwards(monkeypatch, capsys, caplog):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    display = SetupDisplay("SGHMC")
    with caplog.at_level(logging.INFO, logger="pymc.sghmc"), display.shown():
        begin_phase("choosing how far effects are centred")
        count_passes(1234.0)
        display._bar.refresh()
    out = capsys.readouterr().out
    assert "Setting up SGHMC: choosing how far effects are centred" in out
    assert "1,234 passes" in out
    assert "0:00:0" in out  # nothing is cut in 80 columns
    assert display._bar is None


def test_nothing_is_shown_where_such_messages_are_not_wanted(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    logger = logging.getLogger("pymc.sghmc")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    logger.manager._clear_cache()
    with shown("SGHMC"):
        begin_phase("fitting")
    assert capsys.readouterr().out == ""
    monkeypatch.undo()
    logger.manager._clear_cache()


def test_a_step_says_how_long_it_took_and_for_what(caplog):
    y = np.random.default_rng(1).normal(size=2000)
    with pm.Model(), caplog.at_level(logging.INFO, logger="pymc.sghmc"):
        pm.Normal("y", pm.Normal("mu", 0, 1), 1, observed=y)
        SGHMC(compile_kwargs=FAST)
    [line] = [text for text in caplog.messages if "Setting up took" in text]
    assert "s of them for building and compiling functions" in line
    assert "passes over the data" in line


def test_without_a_number_all_rows_are_used_where_rows_depend_on_each_other(caplog):
    y = np.random.default_rng(1).normal(size=1500)
    with pm.Model(), caplog.at_level(logging.WARNING, logger="pymc.sghmc"):
        rho = pm.Uniform("rho", -1, 1)
        pm.AR("y", rho, sigma=1.0, init_dist=pm.Normal.dist(0, 1), observed=y)
        step = SGHMC(compile_kwargs=FAST)
        assert step.tuner.gradient.is_exact
        with pytest.raises(ValueError, match="independent rows"):
            SGHMC(batch_size=100, compile_kwargs=FAST)
    assert "All data are used at every step" in caplog.text


def test_without_data_the_prior_is_sampled():
    with pm.Model():
        pm.Normal("mu", 0, 1)
        assert SGHMC(compile_kwargs=FAST).tuner.gradient.is_exact
