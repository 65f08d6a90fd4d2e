"""THE table: one row per sampler. A new sampler joins it and is held to every promise."""

from dataclasses import dataclass
from functools import partial

import stationary

from pymc_sghmc import SGHMC, SGLD
from pymc_sghmc.samplers import baoab, sghmc, sgld

# The papers' algorithms to the letter: a setting that is left out would be found while tuning.
PLAIN = {"gradient": "plain"}
EULER = {"friction": 0.1, "noise_estimate": None, "integrator": "euler", **PLAIN}
PaperSGHMC = partial(SGHMC, **EULER)
PaperSGLD = partial(SGLD, **PLAIN)


@dataclass(frozen=True)
class Sampler:
    """A step method, its update rule, its law in matrices, and settings that give the rule."""

    cls: type
    update: object
    linear_map: object
    settings: dict  # of the step
    letters: dict  # the same settings in the paper's letters

    def __repr__(self):
        return self.cls.__name__ + "_baoab" * (self.update is baoab.update)

    @property
    def has_momentum(self):
        return self.cls is SGHMC


SAMPLERS = [
    Sampler(SGHMC, sghmc.update, stationary.sghmc_map, {**EULER, "friction": 0.3}, {"alpha": 0.3}),
    Sampler(SGLD, sgld.update, stationary.sgld_map, PLAIN, {}),
    Sampler(
        SGHMC,
        baoab.update,
        stationary.baoab_map,
        {**EULER, "friction": 0.3, "integrator": "baoab"},
        {"alpha": 0.3},
    ),
]
