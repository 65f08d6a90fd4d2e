"""What a chain has learnt of its gradient while tuning, and the settings that follow from it.

Records of running sums: each is frozen, and takes in a draw by returning a new one. Knows numbers,
no update rule.
"""

import math

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from pymc_sghmc.gradients.metric import Array
from pymc_sghmc.records import ByValue
from pymc_sghmc.tuning.batch_means import BatchMeans
from pymc_sghmc.tuning.setup_request import SetupRequest

__all__ = [
    "MAX_AUTOCORRELATION_TIME",
    "MAX_LEARNING_RATE",
    "MAX_MULTIPLIER",
    "WANTED_AUTOCORRELATION_TIME",
    "ByHand",
    "ChainTuning",
    "TemperatureSums",
    "Tuning",
    "is_power_of_two",
]

MAX_LEARNING_RATE = 0.25  # ε = ½ posterior sd: the curvature may grow 16-fold before BAOAB diverges
MAX_AUTOCORRELATION_TIME = 4.0  # draws that an independent one takes: more are too many, ...
WANTED_AUTOCORRELATION_TIME = 2.5  # ... and so many fine
MAX_MULTIPLIER = 5.0  # of the inner steps in a draw where draws are too much alike
FIRST_CHECK = 32  # tuning draws, and then twice as many, four times as many, ...
N_BATCHES = 8  # of the later half of the draws before a check


def is_power_of_two(n: int) -> bool:
    """Whether it is 1, 2, 4, 8, …."""
    return n > 0 and n & (n - 1) == 0


@dataclass(frozen=True)
class TemperatureSums:
    """Sums of configurational temperatures over eight batches of the later half of the draws.

    The mean is checked after 32, 64, 128, … draws, by the draws since half as many: so the way
    from the start doesn't count. Its error comes from the batches, so chance doesn't count either.
    """

    n: int = 0  # draws so far
    sums: tuple[float, ...] = ()  # over each batch since the last power of two

    def with_draw(self, temperature: float) -> "TemperatureSums":
        """Take in one more."""
        n = self.n + 1
        if n <= FIRST_CHECK // 2:
            return TemperatureSums(n)
        begin = 1 << (self.n.bit_length() - 1)  # the last power of two, at which they began anew
        length = begin // N_BATCHES
        sums = list(self.sums) if self.n > begin else [0.0] * N_BATCHES
        sums[(self.n - begin) // length] += temperature
        return TemperatureSums(n, tuple(sums))

    @property
    def is_complete(self) -> bool:
        """Whether it is time for a check."""
        return self.n >= FIRST_CHECK and is_power_of_two(self.n)

    def excess(self) -> tuple[float, float]:
        """Return how far the mean is above 1, and its standard error; where they are complete."""
        means = np.array(self.sums) / (self.n // (2 * N_BATCHES))
        return float(means.mean() - 1), float(means.std(ddof=1) / math.sqrt(N_BATCHES))


@dataclass(frozen=True)
class ByHand:
    """In place of a `ChainTuning` where all settings are given: nothing is measured or chosen."""

    order: ClassVar[int] = 0  # of the gradient: the plain one
    rows: ClassVar[None] = None  # as given


@dataclass(frozen=True, eq=False, kw_only=True)
class ChainTuning(ByValue):
    """What a chain has measured of its gradient, and the settings that follow from it.

    The noise is that of the gradient in use, in the coordinates of the metric: an average with
    weights growing as t³ over the tuning draws, after what was measured around the fit.
    """

    order: int  # of the gradient in use: 0 plain, 1 control variates, 2 second-order ones
    noise: Array  # diagonal of V̂, (d,)
    request: SetupRequest | None = None  # of the set-up, without its data
    temperatures: TemperatureSums = field(default_factory=TemperatureSums)
    learning_rate: float | None = None  # None before settings are chosen
    friction: float | None = None  # None before that, and for a rule without friction
    bias: float = math.nan  # predicted, of the variances
    rate: float = math.nan  # predicted contraction of the slowest mean per inner step
    limit: float = MAX_LEARNING_RATE  # of the learning rate times the largest curvature
    n_measured: int = 10  # so many draws is the first measurement worth
    n_divergences: int = 0
    rows: int | None = None  # in a minibatch, where their number is chosen; or clusters ...
    rows_of_each: float = 1.0  # ... with so many on average
    positions: BatchMeans | None = None  # of the later half of the tuning draws
    n_steps_multiplier: float = 1.0  # of the inner steps in a draw, where draws are too much alike

    @property
    def made_for(self) -> SetupRequest:
        """The request of the set-up that a chain uses."""
        assert self.request is not None
        return self.request

    def with_noise(self, noise: Array, from_all_rows: Array | None = None) -> "ChainTuning":
        """Take in V̂ of one more draw, unless it overflows on the way from the start.

        With the noise ``from_all_rows``, only the mean over its directions is learnt; where that is
        NaN, each direction on its own.
        """
        if not np.isfinite(noise).all():
            return self
        n = self.n_measured + 1
        noise = self.noise + (noise - self.noise) * 4 / (n + 3)
        if from_all_rows is not None:
            is_of_all = np.isfinite(from_all_rows)
            level = noise[is_of_all].mean() / (from_all_rows[is_of_all].mean() or 1.0)
            noise = np.where(is_of_all, from_all_rows * level, noise)
        return replace(self, n_measured=n, noise=noise)

    def with_temperature(
        self, temperature: float, tolerance: float, largest_curvature: float
    ) -> "ChainTuning":
        """Take in one draw's; half the learning rate is the limit where their mean is too hot."""
        temperatures = self.temperatures.with_draw(temperature)
        limit = self.limit
        if temperatures.is_complete:
            excess, error = temperatures.excess()
            if excess > 2 * tolerance + 4 * error:
                limit = min(limit, (self.learning_rate or math.inf) * largest_curvature) / 2
        return replace(self, temperatures=temperatures, limit=limit)

    def with_position(self, theta: Array, n_tuned: int) -> "ChainTuning":
        """Take in where a tuning draw ended; begin anew after 32, 64, 128, … of them."""
        if n_tuned >= FIRST_CHECK and is_power_of_two(n_tuned):
            return replace(self.with_longer_draws(), positions=BatchMeans.of(n_tuned, theta))
        if self.positions is None:
            return self
        return replace(self, positions=self.positions.with_draw(theta))

    def with_longer_draws(self) -> "ChainTuning":
        """Raise the number of inner steps in a draw if draws were too much alike."""
        time = 1.0 if self.positions is None else self.positions.autocorrelation_time()
        multiplier = self.n_steps_multiplier
        if time > MAX_AUTOCORRELATION_TIME:
            multiplier = min(multiplier * time / WANTED_AUTOCORRELATION_TIME, MAX_MULTIPLIER)
        return replace(self, positions=None, n_steps_multiplier=multiplier)


Tuning = ChainTuning | ByHand
