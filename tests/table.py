"""THE table: one row per sampler. A new sampler joins it and is held to every promise."""

from dataclasses import dataclass
from functools import partial

import stationary

from pymc_sghmc import SGHMC, SGLD, SGNHT
from pymc_sghmc.samplers import baoab, sghmc, sgld, sgnht
from pymc_sghmc.tuning.linear_step import Rule

# The papers' algorithms to the letter: a setting that is left out would be found while tuning.
PLAIN = {"gradient": "plain"}
EULER = {"friction": 0.1, "noise_estimate": None, "integrator": "euler", **PLAIN}
PaperSGHMC = partial(SGHMC, **EULER)
PaperSGLD = partial(SGLD, **PLAIN)


@dataclass(frozen=True, eq=False)  # the same row, not an equal one: it can be looked up
class Sampler:
    """A step method, its update rule, its law in matrices, and settings that give the rule."""

    cls: type
    update: object
    linear_map: object  # None for a rule that isn't linear: see its own tests
    settings: dict  # of the step
    letters: dict  # the same settings in the paper's letters

    def __repr__(self):
        return self.cls.__name__ + "_baoab" * (self.update is baoab.update)

    @property
    def rule(self):
        return Rule(self.update, self.cls.state_type)

    @property
    def has_momentum(self):
        return "momentum" in self.cls.state_type._fields


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
    Sampler(SGNHT, sgnht.update, None, {"friction": 0.3, **PLAIN}, {"alpha": 0.3}),
]
LINEAR = [sampler for sampler in SAMPLERS if sampler.linear_map is not None]
