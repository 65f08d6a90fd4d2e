"""Ctrl-C at any moment: whole draws, and a KeyboardInterrupt that PyMC understands."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

from contextlib import nullcontext

import numba
import numpy as np
import pytest

from pymc_sghmc.interrupts import DelayedInterrupt, is_interrupt


def interrupt():
    """As Ctrl-C does; Python calls the handler before the next line."""
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def python_handler():
    """Of Python's own: SIGINT is ignored in jobs that a shell runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_takes_effect_at_the_end():
    done = []

    def interrupted():
        with DelayedInterrupt():
            interrupt()
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["all"]


def test_a_second_interrupt_takes_effect_at_once():
    done = []

    def interrupted_twice():
        with DelayedInterrupt():
            interrupt()
            done.append("first")
            interrupt()
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert done == ["first"]


def test_the_users_own_handler_is_called_and_comes_back():
    calls = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    own = signal.getsignal(signal.SIGINT)
    with DelayedInterrupt():
        interrupt()
        assert calls == []
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_not_pythons_is_left_alone(handler):
    signal.signal(signal.SIGINT, handler)
    with DelayedInterrupt():
        assert signal.getsignal(signal.SIGINT) == handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_have_no_signals_and_run():
    done = []

    def run():
        with DelayedInterrupt():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


def failed_by(cause):
    error = SystemError("CPUDispatcher(f) returned a result with an exception set")
    error.__cause__ = cause
    return error


def test_a_system_error_by_an_interrupt_is_an_interrupt():
    with pytest.raises(KeyboardInterrupt) as raised, DelayedInterrupt():
        raise failed_by(KeyboardInterrupt())
    assert isinstance(raised.value.__cause__, SystemError)
    with pytest.raises(SystemError), DelayedInterrupt():
        raise failed_by(ValueError("another"))
    with pytest.raises(ValueError, match="another"), DelayedInterrupt():
        raise ValueError("another")


def test_a_chain_of_errors_that_bites_its_tail_ends():
    error = failed_by(None)
    error.__cause__ = failed_by(error)
    assert not is_interrupt(error)
    assert not is_interrupt(None)
    assert is_interrupt(failed_by(failed_by(KeyboardInterrupt())))
    error = failed_by(None)
    error.__context__ = KeyboardInterrupt()  # which the user's own code has caught
    assert not is_interrupt(error)


def interrupt_as_results_are_made(frame, event, arg):
    """For `sys.setprofile`: Numba calls this function of its own for each array of a result."""
    if event == "call" and frame.f_code.co_name == "_numba_unpickle":
        interrupt()


def interrupt_once(frame, event, arg):
    """The same, for the first array alone."""
    if event == "call" and frame.f_code.co_name == "_numba_unpickle":
        sys.setprofile(None)
        interrupt()


@pytest.mark.parametrize(
    ("profile", "manager", "expected", "is_whole"),
    [
        (interrupt_once, nullcontext(), SystemError, False),
        (interrupt_once, DelayedInterrupt(), KeyboardInterrupt, True),
        (interrupt_as_results_are_made, DelayedInterrupt(), KeyboardInterrupt, False),
    ],
)
def test_an_interrupt_within_a_compiled_function(profile, manager, expected, is_whole):
    double = numba.njit(lambda x: (2 * x, x + x))
    double(np.ones(3))  # compiles
    results = []

    def profiled():
        with manager:
            sys.setprofile(profile)
            try:
                results.append(double(np.ones(3)))
            finally:
                sys.setprofile(None)

    with pytest.raises(expected):
        profiled()
    assert len(results) == is_whole


SCRIPT = """
    import os, random, signal, sys, threading, time, warnings
    import numpy as np, pymc as pm
    from pymc_sghmc import SGHMC
    from test_interrupts import interrupt_as_results_are_made

    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=2)
        pm.Normal("y", x @ beta, 1, observed=x @ [1, 2] + rng.normal(size=400))
        step = SGHMC(batch_size=20, n_steps=2, compile_kwargs={"mode": "NUMBA"})
    point = model.initial_point()
    step.begin_chain(np.random.default_rng(1))
    for _ in range(100):
        point, _ = step.step(point)
    step.stop_tuning()

    def sample_until_an_error():
        global point
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            ready.set()
            while True:
                point, _ = step.step(point)
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return type(error).__name__

    def interrupt_at_random():
        wait = random.Random(3)
        while True:
            ready.wait()
            ready.clear()
            time.sleep(wait.uniform(0.001, 0.003))
            os.kill(os.getpid(), signal.SIGINT)

    ready = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=interrupt_at_random, daemon=True).start()
    errors = {sample_until_an_error() for _ in range(200)}
    sys.setprofile(interrupt_as_results_are_made)
    errors |= {sample_until_an_error() for _ in range(20)}
    sys.setprofile(None)
    print(errors)
"""


@pytest.mark.process
def test_many_interrupts_of_a_chain_are_interrupts(tmp_path):
    """At random moments, and where Numba makes arrays of its results."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1] == "{'KeyboardInterrupt'}"
