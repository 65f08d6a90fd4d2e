"""`resume`: what it takes, and what it refuses. That draws stay the same is in test_run_store."""

import faults
import numpy as np
import pymc as pm
import pytest

from pymc_sghmc import RunStore, resume

QUIET = {"cores": 1, "progressbar": False, "compute_convergence_checks": False}


@pytest.mark.parametrize("as_store", [False, True], ids=["path", "RunStore"])
def test_numbers_of_draws_are_those_of_the_stored_run(tmp_path, as_store):
    def stop(trace, draw):
        if draw.draw_idx == faults.TUNE + 20:
            raise MemoryError

    with pytest.raises(MemoryError):
        faults.sample(tmp_path / "run", callback=stop)
    trace = RunStore(tmp_path / "run") if as_store else tmp_path / "run"
    with faults.model():
        idata = resume(
            trace, step=faults.step(), random_seed=5, discard_tuned_samples=False, **QUIET
        )
    assert faults.difference(idata) == ""


def test_a_chain_that_has_begun_keeps_its_seed(tmp_path):
    """Draws whose state isn't stored are made again, the same, though no seed is given.

    A recorder writes none within the first second.
    """

    def stop(trace, draw):
        if draw.draw_idx == 30:
            raise MemoryError

    with pytest.raises(MemoryError):
        faults.sample(tmp_path, callback=stop, chains=1, random_seed=None)
    made = []
    faults.sample(
        tmp_path, chains=1, random_seed=None,
        callback=lambda trace, draw: made.append(draw.point["beta"].copy()),
    )  # fmt: skip
    stored = RunStore(tmp_path).to_inference_data()
    stored = np.concatenate([stored.warmup_posterior["beta"][0], stored.posterior["beta"][0]])
    np.testing.assert_array_equal(stored, made)


def test_a_zarr_trace_is_refused_with_the_remedy(tmp_path):
    zarr = pytest.importorskip("zarr")
    from pymc.backends.zarr import ZarrTrace

    store = zarr.DirectoryStore(str(tmp_path / "run.zarr"))
    for trace in (ZarrTrace(store), store, tmp_path / "run.zarr", str(tmp_path / "run.zarr")):
        with faults.model(), pytest.raises(TypeError, match=r"resume\(trace.*RunStore\(folder\)"):
            resume(trace, step=faults.step())


@pytest.mark.parametrize("name", [".zgroup", "zarr.json"])
def test_a_folder_of_zarr_is_known_without_zarr(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with faults.model(), pytest.raises(TypeError, match="a zarr store"):
        resume(tmp_path, step=faults.step())


def test_a_folder_without_a_run_is_refused(tmp_path):
    with faults.model(), pytest.raises(ValueError, match="no run is stored there"):
        resume(tmp_path, step=faults.step())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="a list"):
        resume([], step=faults.step(), model=pm.Model())
    with pytest.raises(TypeError, match="a ndarray"):
        resume(np.zeros(3), step=faults.step(), model=pm.Model())
