"""THE table: one row per sampler. A new sampler joins it and is held to every promise."""

from dataclasses import dataclass

import stationary

from pymc_sghmc import SGHMC, SGLD, sghmc, sgld


@dataclass(frozen=True)
class Sampler:
    """A step method, its file, its law in matrices, and settings that differ from the others'."""

    cls: type
    module: object
    linear_map: object
    settings: dict  # of the step
    letters: dict  # the same settings in the paper's letters

    def __repr__(self):
        return self.cls.__name__


SAMPLERS = [
    Sampler(SGHMC, sghmc, stationary.sghmc_map, {"friction": 0.3}, {"alpha": 0.3}),
    Sampler(SGLD, sgld, stationary.sgld_map, {}, {}),
]
