"""The models that tests and benchmarks share: each is there once, and builds."""

from pathlib import Path

import pytest

from model_collection import ENTRIES, MODELS, Reference, models_of

QUICK = [entry for entry in ENTRIES if not entry.is_of_real_data]


def test_each_name_is_given_once_and_is_found_by_its_collection():
    assert len(MODELS) == len(ENTRIES)
    collections = {name.split("/", 1)[0] for name in MODELS}
    assert sum(len(models_of(collection)) for collection in collections) == len(ENTRIES)
    assert models_of("hard")["counts"] is MODELS["hard/counts"]
    with pytest.raises(KeyError, match="no collection 'soft'"):
        models_of("soft")


def test_every_file_is_a_collection():
    files = {path.stem for path in (Path(__file__).parent / "model_collection").glob("*.py")}
    collections = {name.split("/", 1)[0] for name in MODELS}
    assert files - collections == {"__init__"}
    assert collections - files == {"cuttable_whole"}


def test_models_without_a_reference_are_few():
    assert {entry.name for entry in ENTRIES if entry.reference is Reference.NONE} == {
        "grouped/MovieLens, 20,000, ordered",
        "grouped/MovieLens, 100,000, ordered",
    }


# Models of the collection "cuttable" are built in test_ways_in.
@pytest.mark.parametrize("collection", ["small", "hard", "several_modes", "grouped"])
def test_models_build(collection):
    for entry in QUICK:
        if entry.name.startswith(f"{collection}/"):
            model = entry.build()
            assert model.observed_RVs, entry.name
            assert model.continuous_value_vars, entry.name


def test_models_of_real_data_build(data):
    """One of each collection: the others take the same way."""
    for name in ("real/wells", "posteriordb/nes2000"):
        made = MODELS[name].make(data)
        assert made.model.observed_RVs
        assert made.mean.shape == made.sd.shape == made.error.shape
