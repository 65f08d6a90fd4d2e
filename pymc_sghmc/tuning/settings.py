"""The settings of an update rule: those that are given, and those that are chosen by the budget.

Knows the rule and noise estimates, no gradients and no chains.
"""

import math

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from pymc_sghmc.schedules import Phase
from pymc_sghmc.tuning.budget import MANY, choose, worst_noise
from pymc_sghmc.tuning.chain_tuning import ChainTuning, Tuning
from pymc_sghmc.tuning.linear_step import Rule
from pymc_sghmc.tuning.noise_estimates import NoiseEstimate
from pymc_sghmc.tuning.setup import Setup

__all__ = ["Settings"]


class Settings:
    """What ``update`` is called with: given settings as they are, the others by a chain's tuning.

    Parameters
    ----------
    rule : Rule
    schedule : callable or None
        Phases by inner step, if a learning rate is given.
    friction : float or None
        What was given; None as well for a rule without friction.
    noise : GivenNoise, TunedNoise or NoiseOfEachDraw
    target_bias, temperature : float
    """

    def __init__(
        self,
        rule: Rule,
        *,
        schedule: Callable[[int], Phase] | None,
        friction: float | None,
        noise: NoiseEstimate,
        target_bias: float,
        temperature: float,
    ) -> None:
        self.rule = rule
        self.schedule = schedule
        self.friction = friction
        self.noise = noise
        self.target_bias = target_bias
        self.temperature = temperature

    @cached_property
    def learning_rate(self) -> float | None:
        """What was given, of a schedule its first; a schedule isn't asked before it is needed."""
        return None if self.schedule is None else self.schedule(0).learning_rate

    @property
    def choose_learning_rate(self) -> bool:
        """Whether the learning rate is left to be chosen."""
        return self.schedule is None

    @property
    def are_free(self) -> bool:
        """Whether some of them are left to be chosen, but for the noise estimate."""
        return self.schedule is None or (self.rule.has_friction and self.friction is None)

    def chosen(self, tuning: ChainTuning, setup: Setup) -> ChainTuning:
        """Choose those that are free by what is known of the noise; return the tuning with them."""
        noise = worst_noise(tuning) / (self.temperature or 1.0)
        remaining_share = self.noise.remaining_share
        if tuning.order == 2:  # grows fast with the distance: none of it counts as taken out
            remaining_share = 1.0
        elif tuning.order and tuning.noise.size > MANY:  # each of them is known within a third
            remaining_share = min(2 * remaining_share, 1.0)
        return choose(
            self.rule,
            tuning,
            noise=noise * remaining_share,
            curvature=setup.curvature,
            budget=self.target_bias,
            learning_rate=self.learning_rate,
            friction=self.friction,
            least_friction=self.noise.least_friction,
        )

    def arguments(
        self, tuning: Tuning, measured: Any, phase: Phase, dtype: Any, is_tuning: bool
    ) -> dict[str, Any]:
        """Return the arguments of ``update`` in a phase.

        Parameters
        ----------
        tuning : ChainTuning or ByHand
        measured : MeasuredNoise or None
            Of this draw.
        phase : Phase
        dtype : numpy.dtype
            Of arrays.
        is_tuning : bool
        """
        eta = phase.learning_rate
        arguments: dict[str, Any] = {"learning_rate": eta}
        if self.rule.has_friction:
            friction = self.friction
            if friction is None:
                assert isinstance(tuning, ChainTuning)
                friction = tuning.friction
            arguments["friction"] = friction
        if self.rule.has_noise_estimate:
            alpha = arguments["friction"]
            T = self.temperature
            beta_hat = self.noise.beta_hat(eta, alpha, tuning, measured, T, is_tuning)
            arguments["noise_estimate"] = (
                beta_hat.astype(dtype, copy=False) if np.ndim(beta_hat) else beta_hat
            )
        return arguments | {"temperature": phase.temperature * self.temperature}

    def noise_share(self, arguments: dict[str, Any], measured: Any) -> float:
        """β̂/α with these arguments where the rule takes an estimate, else NaN."""
        if not self.rule.has_noise_estimate:
            return math.nan
        return self.noise.share(
            arguments["noise_estimate"],
            arguments["learning_rate"],
            arguments["friction"],
            measured,
        )
