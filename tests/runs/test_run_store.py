"""Runs that nothing loses: started again, they give the draws of a run that nothing has ended."""

import json
import logging
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import tracemalloc

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import faults
import modes
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from conftest import ROOT
from filelock import FileLock, Timeout
from scipy.sparse import csr_matrix

from pymc_sghmc import QNHMC, SGHMC, SGLD, RunStore, resume, schedules
from pymc_sghmc.runs import files, recorder, run_folder
from pymc_sghmc.runs.states import decoded, encoded
from pymc_sghmc.runs.stored_draws import datasets, rectangle


@pytest.fixture(autouse=True, scope="module")
def often():
    """Let segments be written every few draws, here and in the processes that are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "LONGEST", 0.02)
        yield


@pytest.mark.process
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_is_lost(fault):
    assert faults.losses(fault, 1, 3)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.__name__)
def test_nothing_is_lost_in_many_tries(fault):
    assert faults.losses(fault, 20, 4)[1] == []


def stop_at(draw_idx, chain=0):
    def stop(trace, draw):
        if (draw.chain, draw.draw_idx) == (chain, draw_idx):
            raise MemoryError

    return stop


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    """A run that ended with an error in its first chain, after tuning."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(MemoryError):
        faults.sample(folder, callback=stop_at(faults.TUNE + 20))
    return folder


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A copy of it."""
    return shutil.copytree(stopped_once, tmp_path / "run")


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_result_is_made_like_that_of_pymc(tmp_path):
    idata, plain = faults.sample(tmp_path / "run"), faults.undisturbed()
    groups = [name for name in ("posterior", "sample_stats", "observed_data", "warmup_posterior")]
    for group in groups:
        found, expected = idata[group], plain[group]
        assert set(found.data_vars) == set(expected.data_vars)
        for name in expected.data_vars:
            assert found[name].dims == expected[name].dims
            assert found[name].dtype == expected[name].dtype
        assert set(found.coords) == set(expected.coords)
        for name in expected.coords:
            np.testing.assert_array_equal(found.coords[name], expected.coords[name])
    assert idata.posterior.attrs.keys() >= {"sampling_time", "tuning_steps"}
    picked = RunStore(tmp_path / "run").to_inference_data().posterior
    one = picked["beta"].isel(chain=1, draw=slice(3, 20, 4), k=0)
    np.testing.assert_array_equal(
        one, plain.posterior["beta"].isel(chain=1, draw=slice(3, 20, 4), k=0)
    )
    last = picked["sigma"].isel(chain=[1, 0], draw=-1)
    np.testing.assert_array_equal(last, plain.posterior["sigma"].isel(chain=[1, 0], draw=-1))


@cache
def mixed():
    """A model with an integer unknown, and steps for it: PyMC adds Metropolis."""
    with pm.Model() as model:
        mu, sigma = pm.Normal("mu", 0, 10), pm.HalfNormal("sigma", 1)
        pm.Poisson("count", 3)
        pm.Normal("y", mu, sigma, observed=np.random.default_rng(1).normal(size=300))
        fast = {"compile_kwargs": modes.FAST}
        steps = [SGHMC([mu], batch_size=20, blocked=True, **fast), pm.NUTS([sigma])]
    return model, steps


def sample_mixed(**options):
    model, steps = mixed()
    given = {
        "draws": 30,
        "tune": 20,
        "chains": 2,
        "cores": 1,
        "random_seed": 2,
        "progressbar": False,
    }
    with model:
        return pm.sample(step=steps, compute_convergence_checks=False, **given | options)


def test_steps_of_several_kinds_go_on_together(tmp_path):
    store = RunStore(tmp_path / "run")
    with pytest.raises(MemoryError):
        sample_mixed(trace=store, callback=stop_at(30))
    seen = []
    idata = sample_mixed(
        trace=store, callback=lambda trace, draw: seen.append(draw.point["mu"].copy())
    )
    plain = sample_mixed()
    for group in "posterior", "sample_stats":
        assert set(idata[group].data_vars) == set(plain[group].data_vars) - {"warning"}
        for name in plain[group].data_vars:
            if "perf_counter" not in name and "process_time" not in name and name != "warning":
                np.testing.assert_array_equal(idata[group][name], plain[group][name])
    kept = np.reshape(seen, (2, 50))[:, 20:]  # the callback is called for stored draws, too
    np.testing.assert_array_equal(kept, plain.posterior["mu"])


@pytest.mark.process
def test_spawned_workers_record_too(tmp_path):
    with pytest.raises(MemoryError):
        faults.sample(tmp_path / "run", 2, mp_ctx="spawn", callback=stop_at(faults.TUNE + 5))
    assert any((tmp_path / "run").rglob("draws-*"))
    assert faults.rest(tmp_path / "run", 2) == ""


def test_what_is_stored_can_be_read_at_any_time(stopped):
    idata = RunStore(stopped).to_inference_data()
    found = idata.posterior["beta"]
    assert found.sizes["chain"] == 1
    assert found.sizes["draw"] > 0
    expected = faults.undisturbed().posterior["beta"][:1, : found.sizes["draw"]]
    np.testing.assert_array_equal(found, expected)
    assert idata.warmup_posterior.sizes["draw"] == faults.TUNE
    assert "beta" not in idata.posterior.coords
    assert list(found.coords["k"].values) == ["a", "b"]


def test_exchanged_contents_are_noticed_as_they_are_read(tmp_path):
    faults.sample(tmp_path)
    stored = RunStore(tmp_path).folder.chain(0)
    (*_, first), (*_, second) = stored.segments[:2]
    contents = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(contents)
    idata = RunStore(tmp_path).to_inference_data()
    with pytest.raises(files.DamagedFile, match="checksum is another") as raised:
        idata.warmup_posterior["beta"].load()
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # from a worker


def test_finished_run_is_given_back_and_nothing_is_written(tmp_path):
    faults.sample(tmp_path / "run")
    before = contents(tmp_path / "run")
    assert faults.rest(tmp_path / "run") == ""
    with faults.model():
        again = resume(
            tmp_path / "run", step=faults.step(), cores=1, random_seed=5, progressbar=False,
            compute_convergence_checks=False, discard_tuned_samples=False,
        )  # fmt: skip
    assert faults.difference(again) == ""
    assert contents(tmp_path / "run") == before


def other_model(prior=1, shift=0):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 2))
    with pm.Model(coords={"k": ["a", "b"]}) as model:
        beta = pm.Normal("beta", 0, prior, dims="k")
        sigma = pm.HalfNormal("sigma", 1)
        pm.Normal("y", x @ beta, sigma, observed=x @ [1, 2] + rng.normal(size=400) + shift)
    return model


@pytest.mark.parametrize(
    ("change", "settings", "options", "words"),
    [
        ({"prior": 1.5}, {}, {}, "another prior, likelihood, Deterministic or constant"),
        ({"shift": 1}, {}, {}, "data in .* other bytes"),
        ({}, {"batch_size": 21}, {}, "the step's batch_size is 21, but 20 in the stored run"),
        ({}, {"n_steps": 3}, {}, "n_steps is 3, but 2 in the stored run"),
        ({}, {}, {"draws": 100}, "draws=100, but the stored run has draws=260"),
        ({}, {}, {"chains": 3}, "chains=3, but the stored run has chains=2"),
    ],
)
def test_another_run_is_refused_before_anything_is_changed(
    stopped, change, settings, options, words
):
    before = contents(stopped)
    given = {"batch_size": 20, "n_steps": 2, "compile_kwargs": modes.FAST}
    with other_model(**change):
        step = SGHMC(**given | settings)
        store = {"trace": RunStore(stopped), "cores": 1}
        with pytest.raises(ValueError, match=words):
            pm.sample(step=step, **faults.OPTIONS | store | options)
    assert contents(stopped) == before


def variant(
    power=1, label="a", scale=1.0, names=None, rate=1e-3, inner=0.5, held=1.0, entry=1.0, first=1.0,
    called=("odd", "even"),
):  # fmt: skip
    """A script in which one thing is another."""
    with pm.Model(coords={"k": [label, "b"]}) as model:
        mu = pm.Normal("mu", 0, 1, dims="k")
        pm.Deterministic(called[0], scale * mu[0] ** power)
        pm.Deterministic(called[1], mu[1])
        steps = pytensor.scan(
            lambda before, rate: before * rate * inner, outputs_info=mu[1], non_sequences=[mu[0]],
            n_steps=3, return_updates=False,
        )  # fmt: skip
        pm.Potential("p", -(steps[-1] ** 2))
        pm.Potential("q", Told(np.arange(2.0) * held)(mu[0]))
        many = csr_matrix(np.eye(3000)[:, :2] + np.eye(3000)[:, 1:3] + np.ones((3000, 2)))
        many.data[3000] *= entry  # where its printed form has dots
        pm.Potential("r", -1e-6 * pytensor.sparse.dot(many, mu[:, None]).sum())
        alike = [pt.constant(np.arange(2.0) * c, name="alike") for c in (first, 3.0)]
        pm.Potential("s", -sum((mu * one).sum() ** 2 for one in alike))
        pm.Normal("y", mu[0], 1, observed=np.arange(40.0) / 40)
        step = [
            SGHMC([mu], batch_size=20, learning_rate=schedules.polynomial_decay(rate, 10), **FAST)
        ]
    return model, step, {"var_names": names}


FAST = {
    "compile_kwargs": modes.FAST,
    "gradient": "plain",
    "preconditioner": None,
    "friction": 1.0,
}


class Told(pytensor.graph.Op):
    """An operation that holds data."""

    def __init__(self, data):
        self.data = data

    def make_node(self, x):
        return pytensor.graph.Apply(self, [x], [pt.dscalar()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.asarray(self.data.sum() * 0.0)

    def pullback(self, inputs, outputs, gradients):
        return [pt.zeros_like(inputs[0])]

    grad = pullback

    L_op = grad


BRIEF = {
    "cores": 1, "draws": 8, "tune": 0, "chains": 1, "progressbar": False,
    "compute_convergence_checks": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of the script without a change, which was ended."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    model, step, options = variant()
    with model, pytest.raises(MemoryError):
        pm.sample(step=step, trace=RunStore(folder), callback=stop_at(5), **BRIEF | options)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"power": 2}, "another prior, likelihood, Deterministic or constant"),
        pytest.param(
            {"inner": 0.25},
            "another prior, likelihood, Deterministic or constant",
            marks=pytest.mark.slow,
        ),
        ({"label": "c"}, "the coordinates 'k' aren't those of the stored run"),
        ({"names": ["mu"]}, "even is not stored, but"),
        pytest.param(
            {"called": ("even", "odd")},
            "another prior, likelihood, Deterministic or constant",
            marks=pytest.mark.slow,
        ),
        ({"rate": 1e-4}, "learning_rate is _polynomial_decay"),
        ({"held": 2.0}, "Told.data have other bytes"),
        ({"entry": 2.0}, "data of a sparse one have other bytes"),
        ({"first": 2.0}, "the data in alike have other bytes"),
        pytest.param(
            {"scale": 2.0},
            "another prior, likelihood, Deterministic or constant",
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_small_changes_are_noticed(begun, tmp_path, change, words):
    folder = shutil.copytree(begun, tmp_path / "run")
    model, step, options = variant(**change)
    with model, pytest.raises(ValueError, match=words):
        pm.sample(step=step, trace=RunStore(folder), **BRIEF | options)


def one_unknown(kind):
    """A model and its step, anew: PyMC's own steps remember the run before."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 1)
        pm.Normal("y", mu, 1, observed=np.arange(40.0) / 40)
        fast = {"compile_kwargs": modes.FAST} if kind is not pm.Slice else {}
        return model, kind([mu], **fast)


@pytest.mark.parametrize(
    "ways",
    [
        [{"cores": 1}, {"cores": 2}],
        pytest.param([{"cores": 2, "mp_ctx": "spawn"}], marks=pytest.mark.process),
    ],
    ids=str,
)
def test_a_run_that_never_began_is_not_recorded_later(tmp_path, ways):
    """A typo in an argument, or Ctrl-C, after the store was made ready: the step is as it was."""
    model, step = one_unknown(SGHMC)
    options = {"draws": 30, "tune": 20, "chains": 2, "progressbar": False}
    options |= {"compute_convergence_checks": False, "step": step}
    with model:
        plain = {seed: pm.sample(**options, cores=1, random_seed=seed) for seed in (1, 2)}
        with pytest.raises(ValueError, match="progressbar"):
            pm.sample(**options | {"progressbar": "no"}, random_seed=1, trace=RunStore(tmp_path))
        before = contents(tmp_path)
        for way in ways:
            again = pm.sample(**options, **way, random_seed=2)
            np.testing.assert_array_equal(again.posterior["mu"], plain[2].posterior["mu"])
        assert contents(tmp_path) == before
        stored = pm.sample(**options, cores=1, random_seed=1, trace=RunStore(tmp_path))
    np.testing.assert_array_equal(stored.posterior["mu"], plain[1].posterior["mu"])
    assert type(step) is SGHMC
    assert "step" not in vars(step)


@pytest.mark.parametrize("kind", [pm.NUTS, pm.Metropolis, pm.Slice, QNHMC])
def test_other_steps_alone(tmp_path, kind):
    def sample(**changes):
        model, step = one_unknown(kind)
        options = {"draws": 30, "tune": 20, "chains": 2, "cores": 1, "random_seed": 4}
        options |= {"progressbar": False, "compute_convergence_checks": False}
        with model:
            idata = pm.sample(step=step, **options | changes)
        assert type(step) is kind
        assert "step" not in vars(step)
        return idata

    with pytest.raises(MemoryError):
        sample(trace=RunStore(tmp_path), callback=stop_at(30))
    idata = sample(trace=RunStore(tmp_path), cores=2)
    np.testing.assert_array_equal(idata.posterior["mu"], sample().posterior["mu"])


def test_odd_names_shapes_and_coordinates(tmp_path, monkeypatch):
    dates = np.array(["2020-01-01", "2021-01-01"], "datetime64[ns]")
    coords = {"file": dates, "pair": [("a", 1), ("b", 2)], "mmap_mode": ["x", "y"]}
    with pm.Model(coords=coords):
        at = pm.Normal("s.npy", 0, 1, dims="file")
        pm.Deterministic("s", at + 100, dims="file")
        pm.Normal("v", 0, 1, dims="mmap_mode")
        pm.Normal("0 learning_rate", 0, 1, dims="pair")
        pm.Normal("allow_pickle", 0, 1, shape=(0, 2))
        pm.Normal("y", at[0], 1, observed=np.arange(40.0) / 40)
        monkeypatch.chdir(tmp_path)
        idata = pm.sample(
            5, tune=5, chains=2, cores=1, step=pm.NUTS(), trace=RunStore("run"), progressbar=False,
            compute_convergence_checks=False,
        )  # fmt: skip
    monkeypatch.chdir("/")
    assert idata.posterior["allow_pickle"].shape == (2, 5, 0, 2)
    assert idata.posterior["s.npy"].notnull().all()
    assert "file" in idata.posterior.coords
    np.testing.assert_array_equal(idata.posterior["s.npy"] + 100, idata.posterior["s"])
    assert idata.posterior.coords["file"].dtype.kind == "M"
    pairs = [tuple(map(str, pair)) for pair in idata.posterior.coords["pair"].values]
    assert pairs == [("a", "1"), ("b", "2")]
    read = RunStore(tmp_path / "run").to_inference_data().posterior
    np.testing.assert_array_equal(read["0 learning_rate"], idata.posterior["0 learning_rate"])
    assert read["v"].isel(chain=[]).shape == (0, 5, 2)
    assert read["v"].isel(chain=[]).to_numpy().shape == (0, 5, 2)


def test_what_cannot_be_stored_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    with pm.Model():
        pm.Normal("draw", 0, 1)
        options = {"step": pm.NUTS(), "cores": 1, "progressbar": False}
        with pytest.raises(ValueError, match="there is a file in its place"):
            pm.sample(trace=RunStore(tmp_path / "file"), **options)
        with pytest.raises(ValueError, match="a variable named 'draw' can't be stored"):
            pm.sample(trace=RunStore(tmp_path / "run"), **options)


def run_on_file(folder, shift=0.0, callback=None):
    """A script whose rows are in a file, written anew each time."""
    folder.mkdir(exist_ok=True)
    path = folder / "y.bin"
    rows = np.random.default_rng(0).normal(size=20_000) + shift
    rows.tofile(path)
    with pm.Model():
        y, mu = pm.Data("y", np.zeros(10)), pm.Normal("mu", 0, 10)
        pm.Normal("obs", mu, 1, observed=y)
        data = {"y": np.memmap(path, float, "r")}
        step = SGHMC(batch_size=20, data=data, compile_kwargs=modes.FAST)
        return pm.sample(
            200, tune=60, chains=1, step=step, random_seed=1, progressbar=False, callback=callback,
            compute_convergence_checks=False, trace=RunStore(folder / "run"),
        )  # fmt: skip


def test_other_data_in_the_same_file_are_refused(tmp_path):
    with pytest.raises(MemoryError):
        run_on_file(tmp_path, callback=stop_at(150))
    with pytest.raises(ValueError, match=r"rows' array 0.*y\.bin.* have other bytes"):
        run_on_file(tmp_path, shift=3.0)
    assert abs(run_on_file(tmp_path).posterior["mu"].mean()) < 0.1  # written anew, but the same


def test_a_chain_that_stopped_goes_on_from_its_last_draw_once_it_can(tmp_path, caplog):
    """What PyMC is handed where a draw can't be made, the last one again, isn't a draw."""

    def cut(trace, draw):
        if draw.draw_idx == 150:
            os.truncate(tmp_path / "cut" / "y.bin", 8)

    stopped = run_on_file(tmp_path / "cut", callback=cut)
    assert stopped.posterior.sizes["draw"] == 91
    assert "has become shorter" in caplog.text
    again, whole = (run_on_file(tmp_path / folder).posterior["mu"] for folder in ("cut", "whole"))
    np.testing.assert_array_equal(again, whole)


def test_another_sampler_is_told_before_its_settings(stopped):
    with other_model():
        step = SGLD(batch_size=20, n_steps=2, compile_kwargs=modes.FAST)
        with pytest.raises(ValueError, match="the step is SGLD, but SGHMC in the stored run"):
            pm.sample(step=step, trace=RunStore(stopped), cores=1, **faults.OPTIONS)


def test_the_same_model_built_again_goes_on(stopped):
    with other_model():
        step = SGHMC(batch_size=np.int64(20), n_steps=2, compile_kwargs=modes.PYTHON)
        idata = pm.sample(step=step, trace=RunStore(stopped), cores=1, **faults.OPTIONS)
    assert faults.difference(idata) == ""


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    for name in ("lock", "thesis.tex", "chapter.unfinished"):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        (folder / name).write_text("x")
        words = re.escape(f"the folder has other things in it, such as {name}.")
        with pytest.raises(ValueError, match=words):
            faults.sample(folder)
        assert contents(folder) == {name: b"x"}
    with pytest.raises(ValueError, match="no run is stored there"):
        RunStore(tmp_path / "nothing").to_inference_data()


def test_what_others_left_unfinished_in_a_run_stays(stopped):
    names = "paper.unfinished", "chain0/paper.unfinished", "old/draws-1-0-0123456789abcdef.npz"
    (stopped / "old").mkdir()
    for name in names:
        (stopped / name).write_text("x")
    own = stopped / "chain0" / "draws-1-0-0123456789abcdef.npz.unfinished"
    own.write_text("x")
    assert faults.rest(stopped) == ""
    assert not own.exists()
    assert all((stopped / name).read_text() == "x" for name in names)


def sample_by_metropolis(folder):
    with faults.model():
        trace = {"trace": RunStore(folder), "draws": 10**6, "cores": 2}
        pm.sample(step=pm.Metropolis(), **faults.OPTIONS | trace)


@pytest.mark.process
def test_workers_of_any_step_end_with_their_parent(tmp_path):
    pid, began = faults.in_a_process(sample_by_metropolis, tmp_path), time.monotonic()
    while len(list(tmp_path.rglob("state-*"))) < 2 and time.monotonic() < began + 60:
        time.sleep(0.05)
    assert faults.killed_alone(pid) == []


def test_a_worker_may_run_a_script_of_its_own(tmp_path, monkeypatch):
    """As where a script that isn't guarded by __main__ is imported by workers: all chains are its own."""
    monkeypatch.setattr(multiprocessing.current_process(), "name", "worker_chain_0")
    assert faults.difference(faults.sample(tmp_path)) == ""


def test_an_earlier_run_of_this_process_does_not_keep_the_folder(tmp_path):
    folders = [run_folder.RunFolder(tmp_path / "run") for _ in range(2)]
    other = FileLock(tmp_path / "run" / run_folder.LOCK, timeout=0)
    for folder in folders:  # as after an error before any draw
        folder.hold()
        with pytest.raises(Timeout):
            other.acquire()
    folders[1].release()
    with other:
        assert other.is_locked  # nothing is held twice
    folders[0].hold()
    with pytest.raises(Timeout):
        other.acquire()


def test_missing_draws_are_noticed(stopped):
    sorted(stopped.rglob("draws-*"))[1].unlink()
    with pytest.raises(files.DamagedFile, match=r"draws .* of chain 0 are missing"):
        faults.sample(stopped)


def _without_states(folder, other):
    for path in folder.rglob("state-*"):
        path.unlink()


def _without_manifest(folder, other):
    for path in folder.glob("run-*"):
        path.unlink()


def _of_two_runs(folder, other):
    shutil.copytree(other, folder, dirs_exist_ok=True)


def _with_a_segment_of_another_run(folder, other):
    shutil.copy(sorted(other.rglob("draws-*"))[0], folder / "chain0")


def _with_chains_exchanged(folder, other):
    for old, new in ("chain0", "there"), ("chain1", "chain0"), ("there", "chain1"):
        (folder / old).rename(folder / new)


def _with_a_state_renamed(folder, other):
    [*_, path] = sorted((folder / "chain0").glob("state-*"))
    earlier = re.sub(r"-\d{9}-", f"-{faults.TUNE:09}-", path.name)
    for other in (folder / "chain0").glob("state-*"):
        other.rename(path.with_name(earlier))


def _with_chains_renamed(folder, other):
    _with_chains_exchanged(folder, other)
    for path in folder.glob("chain*/*.npz"):
        kind, run, _, *numbers = path.name.split("-")
        path.rename(path.with_name("-".join([kind, run, path.parent.name[-1], *numbers])))


def _without_a_chain(folder, other):
    shutil.rmtree(folder / "chain1")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs of one script, which ended with an error in their second chain."""
    folder = tmp_path_factory.mktemp("two")
    for name in "run", "other":
        with pytest.raises(MemoryError):
            faults.sample(folder / name, callback=stop_at(faults.TUNE + 20, chain=1))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_states, "its state is missing"),
        (_without_manifest, "what run they are of is missing"),
        (_of_two_runs, "several runs"),
        (_with_a_segment_of_another_run, "another run, or of another chain"),
        (_with_chains_exchanged, "another run, or of another chain"),
        (_with_a_state_renamed, "checksum is another"),
        (_with_chains_renamed, "checksum is another"),
        (_without_a_chain, "chain 1 has begun, and its state is missing"),
    ],
)
def test_files_that_are_missing_or_of_another_run_are_noticed(two_runs, tmp_path, change, words):
    run, other = tmp_path / "run", two_runs / "other"
    shutil.copytree(two_runs / "run", run)
    change(run, other)
    before = contents(run)
    with pytest.raises(files.DamagedFile, match=words):
        faults.sample(run)
    if change not in (_without_manifest, _with_a_state_renamed):  # reading takes no states
        with pytest.raises(files.DamagedFile, match=words):
            RunStore(run).to_inference_data().load()
    assert contents(run) == before


def test_a_copy_without_the_lock_goes_on(stopped):
    (stopped / run_folder.LOCK).unlink()
    assert faults.difference(faults.sample(stopped)) == ""


def test_a_folder_that_is_gone_is_not_made_again(tmp_path):
    def remove(trace, draw):
        if draw.draw_idx == faults.TUNE:
            (tmp_path / "run").rename(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="can't be written to"):
        faults.sample(tmp_path / "run", callback=remove)
    assert not (tmp_path / "run").exists()
    assert faults.difference(faults.sample(tmp_path / "elsewhere")) == ""


def test_a_run_that_has_been_moved_leaves_another_in_its_place_alone(two_runs, tmp_path):
    run = tmp_path / "run"

    def replace(trace, draw):
        if draw.draw_idx == faults.TUNE:
            run.rename(tmp_path / "elsewhere")
            shutil.copytree(two_runs / "other", run)

    with pytest.raises(OSError, match="the run isn't there any more"):
        faults.sample(run, callback=replace)
    assert contents(run) == contents(two_runs / "other")
    assert faults.difference(faults.sample(tmp_path / "elsewhere")) == ""


@pytest.mark.parametrize("key", [
    np.s_[:, :, 7], np.s_[1, ::-3, 2:5], np.s_[::-1, 5], np.s_[:, 25:35, -1], np.s_[:0], np.s_[0, 3, 4],
], ids=str)  # fmt: skip
def test_parts_of_draws_are_read_alone(monkeypatch, key):
    """Of each segment what is asked for stays, the rest is gone before the next one is read."""
    chains, n, size = 2, 10, 40_000

    def array(start, name):
        return np.repeat(np.arange(start, start + n, dtype=float)[:, None], size, axis=1)

    monkeypatch.setattr(files, "array", array)
    segments = [(start, start + n, start) for start in range(0, 8 * n, n)]
    stored = [SimpleNamespace(chain=k, segments=segments) for k in range(chains)]
    layout = {"variables": {"x": ((size,), "float64", None)}, "stats": []}
    x = datasets(stored, layout, {}, range(5, 8 * n - 5), {})["posterior"]["x"]
    expected = np.broadcast_to(np.arange(5.0, 8 * n - 5)[:, None], (chains, 8 * n - 10, size))
    tracemalloc.start()
    found = x[key].to_numpy()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found, expected[key])
    assert peak < 4 * n * size * 8  # of 14 segments


def test_states_name_no_class_but_those_of_steps():
    arrays = {}
    value = {"a": [1, 2.5, None, "x"], "b": (np.arange(3.0), np.float32(2)), 3: True}
    found = decoded(json.loads(json.dumps(encoded(value, arrays))), arrays)
    np.testing.assert_array_equal(found.pop("b")[0], np.arange(3.0))
    assert found == {"a": [1, 2.5, None, "x"], 3: True}
    for name in "os:system", "pymc.model.core:Model", "builtins:eval", "pymc:sample":
        with pytest.raises(ValueError, match="a stored state is of"):
            decoded({"of": name, "fields": {}}, {})
    with pytest.raises(TypeError, match="can't be stored"):
        encoded(object(), {})


def test_the_longest_rectangle_of_draws():
    assert rectangle([5, 5, 5]) == ([0, 1, 2], 5)
    assert rectangle([10, 0, 4]) == ([0], 10)
    assert rectangle([10, 0, 6]) == ([0, 2], 6)
    assert rectangle([0, 0]) == ([0, 1], 0)


SCRIPT = """
import sys
{first}
import faults
faults.often()
def stop(trace, draw):
    if draw.draw_idx == faults.TUNE + 10 and {stops}:
        raise MemoryError
try:
    print("other: " + faults.difference(faults.sample(sys.argv[1], {cores}, callback=stop)))
except MemoryError:
    pass
"""


def script(folder, **values):
    values = {"first": "", "stops": False, "cores": 1} | values
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tests" / "runs"),
        "PYTHONHASHSEED": "random",
    }
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.format(**values), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.process
def test_a_script_started_again_goes_on_without_zarr(tmp_path):
    without = 'sys.modules["zarr"] = None'
    script(tmp_path / "run", first=without, stops=True, cores=2)
    assert any((tmp_path / "run").rglob("draws-*"))
    assert script(tmp_path / "run", first=without, cores=2) == "other: \n"


def test_a_file_that_is_cut_short_between_draws_is_named(tmp_path, caplog):
    file = np.memmap(tmp_path / "y.bin", float, "w+", shape=(20_000,))
    file[:] = np.random.default_rng(0).normal(size=20_000)

    def cut(trace, draw):
        if draw.draw_idx == 15:
            os.truncate(tmp_path / "y.bin", 800)

    with pm.Model():
        y = pm.Data("y", np.zeros(10))
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("obs", mu, 1, observed=y)
        step = SGHMC(
            batch_size=20, n_steps=1, data={"y": file}, learning_rate=1e-6,
            compile_kwargs={"mode": "FAST_COMPILE"},
        )  # fmt: skip
        with caplog.at_level(logging.ERROR):
            idata = pm.sample(
                30, tune=5, chains=1, step=step, progressbar=False, callback=cut,
                compute_convergence_checks=False, trace=RunStore(tmp_path / "run"),
            )  # fmt: skip
    assert "y.bin has become shorter than the data" in caplog.text
    assert np.isfinite(idata.posterior["mu"]).all()
    assert idata.posterior.sizes["draw"] == 11
