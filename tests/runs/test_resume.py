"""Killed runs, gone on with: exactly the draws of a run that nobody killed."""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import types
import warnings

from functools import cache
from pathlib import Path

import numpy as np
import pymc as pm
import pytest

from conftest import ROOT
from pymc.backends.zarr import ZarrTrace
from pymc.step_methods.state import equal_dataclass_values
from targets import linear_regression

from pymc_sghmc import QNHMC, SGHMC, SGLD
from pymc_sghmc.runs.resume import resume

zarr = pytest.importorskip("zarr")

OPTIONS = {
    "draws": 8,
    "tune": 36,
    "chains": 3,
    "random_seed": 5,
    "progressbar": False,
    "compute_convergence_checks": False,
    "discard_tuned_samples": False,
}
TIMES = ("process_time_diff", "perf_counter_diff", "perf_counter_start")


@cache
def model(name="sghmc"):
    with linear_regression() as model:
        if name == "mixed":
            pm.Poisson("count", 3)
    return model


def steps(name):
    """Steps of one run, built anew, as a script that is run again builds them.

    In the mixed run PyMC gives ``count`` to Metropolis itself.
    """
    with model(name) as here:
        if name == "sghmc":
            return SGHMC(batch_size=10)
        if name == "qnhmc":
            return QNHMC()
        return [SGHMC([here["beta"]], batch_size=10), pm.NUTS([here["sigma"]])]


@cache
def shared_steps(name):
    """Steps of the runs that the tests share: what they last drew belongs to other chains."""
    return steps(name)


def sample(name, **options):
    with model(name), warnings.catch_warnings():
        # PyMC 6 warns of return_inferencedata=False; its conversion needs an older xarray.
        warnings.simplefilter("ignore", FutureWarning)
        return pm.sample(
            step=shared_steps(name), **OPTIONS | {"return_inferencedata": False} | options
        )


@cache
def uninterrupted(name):
    """What a run stores that nobody kills."""
    return sample(name, cores=1, trace=new_trace(tempfile.mkdtemp(), 7)).root


def new_trace(path, draws_per_chunk=4, store=zarr.DirectoryStore, **options):
    options = {"include_transformed": True, **options}
    return ZarrTrace(store(str(path)), draws_per_chunk=draws_per_chunk, **options)


def run_and_kill(path, name, cores, draws_per_chunk, chain, draw_idx):
    """Run in this process, which SIGKILL ends at this draw of this chain."""

    def kill(trace, draw):
        if (draw.chain, draw.draw_idx) == (chain, draw_idx):
            os.kill(os.getpid(), signal.SIGKILL)

    trace = new_trace(path, draws_per_chunk)
    sample(name, cores=cores, trace=trace, callback=kill)


def run_and_kill_each(folder):
    """Make all killed runs side by side, each in a process of its own."""
    for name in {name for name, *_ in KILLS}:
        shared_steps(name)
    pids = []
    for i, kill in enumerate(KILLS):
        pids.append(os.fork())
        if not pids[-1]:
            try:
                run_and_kill(f"{folder}/{i}", *kill)
            finally:
                os._exit(1)  # nothing has killed it
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [
        -signal.SIGKILL
    ] * len(KILLS)


def stop_at(path, chain, draw_idx, error=MemoryError, name="sghmc", cores=1, **options):
    """Run in this process until this error at this draw of this chain."""

    def stop(trace, draw):
        if (draw.chain, draw.draw_idx) == (chain, draw_idx):
            raise error

    with contextlib.suppress(error):
        sample(name, cores=cores, callback=stop, trace=new_trace(path, **options))


def assert_same(idata, path, name="sghmc"):
    """All draws, statistics but times, and last states are those of the run that nobody killed."""
    found, expected = zarr.open_group(str(path), mode="r"), uninterrupted(name)
    for group in ("posterior", "unconstrained_posterior", "sample_stats"):
        for group in (group, f"warmup_{group}"):
            assert set(found[group]) == set(expected[group])
            for key, values in expected[group].arrays():
                if key.endswith("warning"):
                    texts = [
                        [getattr(w, "message", w) for w in np.ravel(a[...])]
                        for a in (values, found[group][key])
                    ]
                    assert texts[0] == texts[1]
                elif not key.endswith(TIMES):
                    np.testing.assert_array_equal(found[group][key], values, err_msg=key)
                    if key in idata[group].data_vars:
                        np.testing.assert_array_equal(idata[group][key], values, err_msg=key)
    states = (root["_sampling_state"]["sampling_state"][...] for root in (found, expected))
    assert all(equal_dataclass_values(a, b) for a, b in zip(*states, strict=True))
    assert idata["posterior"]["beta"].dims == ("chain", "draw", "coef")


def rest(path, name="sghmc", **options):
    with model(name):
        step = options.pop("step", None) or shared_steps(name)
        return resume(path, step=step, **OPTIONS | {"cores": 1, **options})


# name, cores, draws_per_chunk, and where SIGKILL comes: while tuning, at its end, after it
KILLS = [
    ("sghmc", 1, 1, 1, 11),
    ("sghmc", 2, 3, 1, 39),
    ("mixed", 2, 1, 0, 35),
    ("mixed", 1, 4, 1, 40),
    ("qnhmc", 2, 4, 1, 39),
]


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory):
    """All killed runs, of steps that another Python built."""
    folder = tmp_path_factory.mktemp("runs")
    code = f"import conftest, test_resume; test_resume.run_and_kill_each({str(folder)!r})"
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            stderr=errors,
            start_new_session=True,
        )
    try:
        returned = process.wait(timeout=240)
    finally:  # workers of the killed wait for ever
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert returned == 0, (folder / "errors").read_text()
    return {kill: folder / str(i) for i, kill in enumerate(KILLS)}


@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_killed_run_goes_on_with_the_same_draws(killed_runs, kill):
    name, cores, *_ = kill
    stored = zarr.open_group(str(killed_runs[kill]), mode="r")["_sampling_state"]["draw_idx"][:]
    assert 0 < stored.max() and stored.min() < 44
    idata = rest(killed_runs[kill], name, cores=3 - cores, step=steps(name))
    assert_same(idata, killed_runs[kill], name)
    assert_same(rest(killed_runs[kill], name), killed_runs[kill], name)  # finished by now


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    path = tmp_path_factory.mktemp("killed")
    stop_at(path, 1, 39)
    return path


@pytest.fixture
def killed(killed_once, tmp_path):
    """A run of three chains that ended in chain 1, at its 40th draw."""
    return shutil.copytree(killed_once, tmp_path / "store")


@pytest.fixture(scope="module")
def interrupted_once(tmp_path_factory):
    path = tmp_path_factory.mktemp("interrupted")
    stop_at(path, 1, 39, KeyboardInterrupt)
    return path


@pytest.fixture
def interrupted(interrupted_once, tmp_path):
    """The same run, interrupted there: PyMC has moved its tuning draws to groups of their own."""
    return shutil.copytree(interrupted_once, tmp_path / "store")


def opened(path):
    return zarr.open_group(str(path), mode="r+")


def contents(path):
    return {file: file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


def test_interrupted_run_goes_on_with_the_same_draws(interrupted):
    assert "warmup_posterior" in opened(interrupted)
    assert_same(rest(interrupted), interrupted)


@pytest.mark.parametrize(("cores", "draw_idx"), [(2, 39), (1, 37)])
def test_interrupted_run_with_a_chunk_that_is_not_full_goes_on_too(tmp_path, cores, draw_idx):
    """Its draws are lost, while PyMC stores the state after them."""
    stop_at(tmp_path, 1, draw_idx, KeyboardInterrupt, cores=cores)
    assert "warmup_posterior" in opened(tmp_path)
    assert_same(rest(tmp_path), tmp_path)


def test_resumed_run_can_be_killed_and_resumed_again(killed):
    def stop(trace, draw):
        if draw.chain == 2 and draw.draw_idx == 8:
            raise MemoryError

    with pytest.raises(MemoryError):
        rest(killed, callback=stop)
    assert_same(rest(killed), killed)


def test_callback_sees_new_draws_only(killed):
    seen = []
    rest(killed, callback=lambda trace, draw: seen.append((draw.chain, draw.draw_idx)))
    assert seen == [(1, i) for i in range(40, 44)] + [(2, i) for i in range(44)]


def test_state_is_the_truth_where_the_run_was_killed_before_its_draw_was_counted(killed):
    opened(killed)["_sampling_state"]["draw_idx"][1] = 36
    assert_same(rest(killed), killed)


def test_changed_state_gives_other_draws(killed):
    states = opened(killed)["_sampling_state"]["sampling_state"]
    state = states[1]
    state.chain.state.momentum[0] *= 1.01
    states.set_coordinate_selection(1, np.array([state], dtype=object))
    idata = rest(killed)
    draws = uninterrupted("sghmc")["posterior"]["beta"]
    assert not np.array_equal(idata.posterior["beta"][1, 5:], draws[1, 5:])
    np.testing.assert_array_equal(idata.posterior["beta"][[0, 2]], draws.oindex[[0, 2]])


@pytest.mark.parametrize(
    ("damaged", "is_lost"),
    [
        ("posterior/beta/1.3.0", True),
        ("sample_stats/in_warmup/1.0", False),
        ("_sampling_state/sampling_state/1", False),
    ],
)
def test_chain_with_damaged_files_begins_anew(killed, damaged, is_lost, caplog):
    (killed / damaged).unlink()
    if not is_lost:
        (killed / damaged).write_bytes(b"")  # as a machine without power may leave it
    idata = rest(killed)
    assert "of chain 1 the state or some draws are damaged" in caplog.text
    assert_same(idata, killed)


def test_chain_with_damaged_tuning_draws_of_an_interrupted_run_begins_anew(interrupted, caplog):
    (interrupted / "warmup_posterior/beta/1.3.0").write_bytes(b"")
    idata = rest(interrupted)
    assert "of chain 1 the state or some draws are damaged" in caplog.text
    assert_same(idata, interrupted)


class FullDisk(zarr.DirectoryStore):
    """A disk that is full as soon as a file of this name is there."""

    def __setitem__(self, key, value):
        if os.path.exists(self.path + "_full"):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().__setitem__(key, value)


@pytest.mark.parametrize("cores", [1, 2])
def test_full_disk_is_an_error_and_the_run_goes_on_once_there_is_space(tmp_path, cores):
    path, full = tmp_path / "store", tmp_path / "store_full"

    def fill(trace, draw):
        if (draw.chain, draw.draw_idx) == (0, 39):
            full.touch()

    trace = new_trace(path, store=FullDisk)
    with pytest.raises(Exception, match="No space left on device"):
        sample("sghmc", cores=cores, trace=trace, callback=fill)
    full.unlink()
    assert opened(path)["_sampling_state"]["draw_idx"][0] in (40, 44)
    assert_same(rest(path), path)


def test_killed_worker_is_an_error_and_the_run_goes_on(tmp_path):
    def kill_worker(trace, draw):
        if (draw.chain, draw.draw_idx) == (0, 39):
            [worker] = [p for p in multiprocessing.active_children() if p.name == "worker_chain_0"]
            worker.kill()

    trace = new_trace(tmp_path)
    with pytest.raises((EOFError, ConnectionError)):
        sample("sghmc", cores=2, trace=trace, callback=kill_worker)
    assert_same(rest(trace), tmp_path)


@cache
def another_step(model, sampler=SGHMC, **changes):
    batch = {} if sampler is QNHMC else {"batch_size": 10}
    return sampler(model=model, **batch | changes)


REFUSED = [
    ({"draws": 9}, "draws=9: the killed run had draws=8"),
    ({"tune": 21}, "tune=21"),
    ({"chains": 4}, "chains=4"),
    ({"random_seed": 6}, "random_seed=6: the killed run had another seed"),
    ({"step": {"n_steps": 3}}, "n_steps"),
    ({"step": {"batch_size": 11}}, "batch_size"),
    ({"step": {"sampler": SGLD}}, "friction"),
    ({"step": {"sampler": QNHMC}}, "sample_stats/sampler_0__"),
    ({"model": linear_regression(seed=1)}, "constant_data/X of the killed run is another"),
    ({"model": linear_regression(n_rows=61)}, "constant_data/X of the killed run is another"),
    ({"var_names": ["beta"]}, "posterior/mu of the killed run"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_another_run_is_refused_before_anything_is_changed(killed, options, message):
    before = contents(killed)
    other = options.get("model", model())
    step = another_step(other, **options.get("step", {}))
    with other, pytest.raises(ValueError, match=message):
        resume(killed, **OPTIONS | {"cores": 1} | options | {"step": step})
    assert contents(killed) == before


@pytest.mark.parametrize(("options", "message"), [REFUSED[3], REFUSED[5], REFUSED[8]])
def test_a_refusal_leaves_an_interrupted_run_as_it_was(interrupted, options, message):
    assert "warmup_posterior" in opened(interrupted)
    test_another_run_is_refused_before_anything_is_changed(interrupted, options, message)


def test_an_interrupted_run_without_a_chain_to_go_on_with_is_left_as_it_was(interrupted):
    for chain in range(3):
        (interrupted / f"_sampling_state/sampling_state/{chain}").write_bytes(b"")
    before = contents(interrupted)
    with pytest.raises(ValueError, match="there is no chain to go on with"):
        rest(interrupted)
    assert contents(interrupted) == before


def states_of_another_version(path, monkeypatch, change):
    """Store the states of a run anew, as a version with other modules, classes or fields has them."""
    states = opened(path)["_sampling_state/sampling_state"]
    stored = states[...]
    begun = [state for state in stored if state is not None]
    cls = type(begun[0])
    with monkeypatch.context() as then:
        if change == "field":
            for state in begun:
                del vars(state)["tune"]
        else:
            name = {"module": "pymc_sghmc.elsewhere", "class": cls.__module__}[change]
            earlier = type("Earlier", (cls,), {"__module__": name})
            then.setitem(sys.modules, name, sys.modules.get(name, types.ModuleType(name)))
            then.setattr(sys.modules[name], "Earlier", earlier, raising=False)
            for state in begun:
                state.__class__ = earlier
        for chain, state in enumerate(stored):
            states.set_coordinate_selection(chain, np.array([state], dtype=object))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("module", "No module named 'pymc_sghmc.elsewhere'"),
        ("class", "Can't get attribute 'Earlier'"),
        ("field", "no attribute 'tune'"),
    ],
)
def test_a_run_of_another_version_is_named_and_left_as_it_was(killed, monkeypatch, change, reason):
    states_of_another_version(killed, monkeypatch, change)
    before = contents(killed)
    message = rf"made by another version of pymc_sghmc.*{reason}.*versions that made it, or call"
    with pytest.raises(ValueError, match=message):
        rest(killed)
    assert contents(killed) == before


def test_one_state_without_its_class_is_damage(killed, monkeypatch, caplog):
    own = contents(killed / "_sampling_state/sampling_state")
    states_of_another_version(killed, monkeypatch, "class")
    for file, content in own.items():
        if file.name == "0":
            file.write_bytes(content)
    idata = rest(killed)
    assert "of chain 1 the state or some draws are damaged" in caplog.text
    assert_same(idata, killed)


def test_what_cannot_be_resumed_is_said(tmp_path):
    step = shared_steps("sghmc")
    with pytest.raises(ValueError, match=r"there is nothing at this path"):
        rest(tmp_path / "absent", step=step)
    with pytest.raises(ValueError, match=r"no run of pm.sample is stored there"):
        rest(tmp_path, step=step)
    new_trace(tmp_path)
    with pytest.raises(ValueError, match=r"no run of pm.sample is stored there"):
        rest(tmp_path, step=step)
    stop_at(tmp_path, 0, 5, draws_per_chunk=10)
    with pytest.raises(ValueError, match=r"before any draws were stored"):
        rest(tmp_path, step=step)
    stop_at(tmp_path, 0, 5, include_transformed=False, draws_per_chunk=1)
    with pytest.raises(ValueError, match=r"sigma_log__ isn't stored.*include_transformed=True"):
        rest(tmp_path, step=step)
    with pytest.raises(ValueError, match="in memory"):
        rest(ZarrTrace(), step=step)
