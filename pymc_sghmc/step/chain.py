"""The record of one chain: all that sampling changes, and what is saved of it. Knows no step."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pymc.step_methods.compound import StepMethodState
from pymc.step_methods.state import dataclass_state

from pymc_sghmc.gradients.metric import Array
from pymc_sghmc.gradients.target import Target
from pymc_sghmc.records import ByValue
from pymc_sghmc.tuning.chain_tuning import ChainTuning, Tuning
from pymc_sghmc.tuning.tuner import Tuner

__all__ = ["Chain", "StochasticGradientState"]

FEW_SENT_BACK = 10  # times that a chain diverges after tuning before it is stopped, ...
SHARE_SENT_BACK = 0.01  # ... and in so many of its draws


@dataclass(eq=False)
class Chain(ByValue):
    """What a chain needs to go on exactly where it was, for all samplers."""

    state: Any = None  # the sampler's own, in φ; None before the first draw
    n_updates: int = 0  # inner steps
    n_tuned: int = 0  # tuning draws
    n_kept: int = 0  # draws after them
    mean: Any = None  # of the tuning draws, (d,), about which temperatures are taken
    place: Any = None  # in data that the chain goes through without replacement
    tuning: Tuning | None = None  # what it has learnt; None before the first draw
    noise: Any = None  # V̂, where it is measured at each draw
    is_far: bool = False  # whether it was so far out that a warning was due
    n_sent_back: int = 0  # times that it diverged after tuning, and began anew
    fault: str | None = None  # why it can't go on

    @property
    def n_draws(self) -> int:
        """Draws so far."""
        return self.n_tuned + self.n_kept

    @property
    def diverges_often(self) -> bool:
        """Whether one more divergence after tuning ends the chain."""
        return self.n_sent_back >= FEW_SENT_BACK + SHARE_SENT_BACK * self.n_kept

    def average(self, theta: Array) -> None:
        """Take a tuning draw into their mean, with weights growing as t³: it forgets the start."""
        self.n_tuned += 1
        self.mean = self.mean + (theta - self.mean) * (4 / (self.n_tuned + 3))

    def learn(
        self,
        tuner: Tuner,
        target: Target,
        position: Array,
        temperature: float,
        rng: np.random.Generator,
    ) -> None:
        """Learn from a tuning draw that ended at θ with this configurational temperature."""
        self.average(position)
        if not tuner.is_tuned or not isinstance(self.tuning, ChainTuning):
            return
        learnt = tuner.chooser.measured(
            self.tuning,
            target,
            self.state,
            temperature=temperature,
            n_tuned=self.n_tuned,
            mean=self.mean,
            rng=rng,
        )
        self.state = learnt.state
        self.tuning = learnt.tuning.with_position(position, self.n_tuned)

    def end_tuning(self, tuner: Tuner, rng: np.random.Generator) -> None:
        """Choose the settings that stay, by all that was measured."""
        if isinstance(self.tuning, ChainTuning) and self.state is not None:
            tuning = self.tuning.with_longer_draws()
            self.tuning = tuner.chooser.revised(tuning, self.state.position, rng)

    def begin_anew(self, tuning: ChainTuning) -> None:
        """Go on with other settings, from another position."""
        self.tuning = tuning
        self.state = None

    def send_back(self) -> None:
        """Go on from another position, after a divergence that counts."""
        self.n_sent_back += 1
        self.state = None


@dataclass_state
class StochasticGradientState(StepMethodState):
    """What is saved of a chain, for all samplers."""

    # as given: another step can't go on with it
    settings: dict[str, Any] = field(metadata={"frozen": True})
    n_draws: int
    tune: bool
    chain: Chain
