"""The models of tests and benchmarks, in one place: how each is built, and what it is held to.

``MODELS`` has an entry for each, under a name of two parts, ``hard/counts``; ``models_of("hard")``
has those of a collection by the second part. A collection is a file here, with what its entries
make.

What stands elsewhere is no model that two would share: random models come from a seed
(``tests/benchmarks/random_groups.py``), benchmarks of cost make one model in many sizes, and a test
with a question of its own writes the model for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pymc as pm

from data_folder import data_folder

from model_collection import cuttable, grouped, hard, posteriordb, real, several_modes, small

__all__ = ["ENTRIES", "MODELS", "Entry", "Reference", "models_of"]


class Reference(Enum):
    """What a model is held to."""

    CLOSED_FORM = "mean, covariance and noise by formulas beside the model"
    LOG_DENSITY = "the model's own log-density of all rows"
    SECOND_DENSITY = "moments by importance sampling, from a second density in NumPy"
    N_MODES = "the number of modes, by construction"
    STORED = "moments of long runs of NUTS, or exact ones, in a file"
    NONE = "nothing yet: NUTS takes too long"


@dataclass(frozen=True)
class Entry:
    """A model of a collection."""

    name: str  # of two parts: collection/model
    make: Callable[..., Any]  # what the collection makes: a model, or a record that has one
    reference: Reference
    build: Callable[[], pm.Model]  # the model alone, with the data and in the form of a default
    is_of_real_data: bool = False  # which are in `data_folder()`


def _entries(collection, makers, reference, build, of_real_data=False):
    for name, make in makers.items():
        yield Entry(f"{collection}/{name}", make, reference, partial(build, make), of_real_data)


def _grouped_entries():
    with np.load(grouped.REFERENCES) as file:
        stored = {key.split("/")[0] for key in file.files}
    for name, make in grouped.MODELS.items():
        yield Entry(
            f"grouped/{name}",
            make,
            Reference.STORED if name in stored else Reference.NONE,
            partial(make, "non-centred"),
            name.startswith("MovieLens"),
        )


def _by_name(makers):
    return {make.__name__: make for make in makers}


def _small_entries():
    kind = small.GaussianMean
    yield Entry("small/gaussian_mean", kind, Reference.CLOSED_FORM, lambda: kind().model())
    make = small.linear_regression
    yield Entry("small/linear_regression", make, Reference.LOG_DENSITY, make)


ENTRIES = [
    *_small_entries(),
    *_entries(
        "cuttable", _by_name(cuttable.ZOO), Reference.LOG_DENSITY,
        lambda make: cuttable.build(make, cuttable.whole, None),
    ),
    *_entries(
        "cuttable_whole", _by_name(cuttable.WAY_ONE), Reference.LOG_DENSITY, lambda make: make()
    ),
    *_entries("hard", hard.MODELS, Reference.SECOND_DENSITY, lambda make: make().model),
    *_entries("several_modes", several_modes.CASES, Reference.N_MODES, lambda case: case.model()),
    *_grouped_entries(),
    *_entries(
        "real", _by_name((*real.LARGE, real.nes2000)), Reference.STORED,
        lambda make: make(data_folder()).model, of_real_data=True,
    ),
    *_entries(
        "posteriordb", {name: partial(posteriordb.load, name) for name in posteriordb.NAMES},
        Reference.STORED, lambda make: make(data_folder()).model, of_real_data=True,
    ),
]  # fmt: skip
MODELS = {entry.name: entry for entry in ENTRIES}


def models_of(collection):
    """Return the entries of a collection, by the second part of their names."""
    parts = {name: name.split("/", 1) for name in MODELS}
    found = {second: MODELS[name] for name, (first, second) in parts.items() if first == collection}
    if not found:
        collections = sorted({first for first, _ in parts.values()})
        raise KeyError(f"there is no collection {collection!r}; there are {collections}")
    return found
