"""The record of one chain: all that sampling changes, and what is saved of it. Knows no step."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from pymc.step_methods.compound import StepMethodState
from pymc.step_methods.state import dataclass_state, equal_dataclass_values

__all__ = ["Chain", "StochasticGradientState"]


@dataclass(eq=False)
class Chain:
    """What a chain needs to go on exactly where it was, for all samplers.

    PyMC compares saved states with ``==``, which arrays don't answer with one word.
    """

    state: Any = None  # the sampler's own, in φ; None before the first draw
    n_updates: int = 0  # inner steps
    n_tuned: int = 0  # tuning draws
    n_kept: int = 0  # draws after them
    mean: np.ndarray | None = None  # of the tuning draws, about which temperatures are taken
    place: Any = None  # in data that the chain goes through without replacement
    tuning: Any = None  # what it has measured, and the settings that follow
    noise: Any = None  # V̂, where it is measured at each draw
    is_far: bool = False  # whether it was so far out that a warning was due
    fault: str | None = None  # why it can't go on

    def __eq__(self, other):
        return type(self) is type(other) and all(
            equal_dataclass_values(getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
        )

    def average(self, theta):
        """Take a tuning draw into their mean, with weights growing as t³: it forgets the start."""
        self.n_tuned += 1
        self.mean = self.mean + (theta - self.mean) * (4 / (self.n_tuned + 3))

    def learn(self, tuner, target, position, temperature, rng):
        """Learn from a tuning draw that ended at θ with this configurational temperature."""
        self.average(position)
        if self.tuning is not None and tuner.is_tuned:
            self.tuning, self.state = tuner.measured(
                self.tuning,
                target,
                self.state,
                temperature=temperature,
                n_tuned=self.n_tuned,
                mean=self.mean,
                rng=rng,
            )
            self.tuning = self.tuning.with_position(position, self.n_tuned)


@dataclass_state
class StochasticGradientState(StepMethodState):
    """What is saved of a chain, for all samplers."""

    settings: dict = field(metadata={"frozen": True})  # as given: another step can't go on with it
    n_draws: int
    tune: bool
    chain: Chain
