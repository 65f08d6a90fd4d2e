"""The record of a Gaussian fit to the posterior: where it is, and how wide."""

from dataclasses import dataclass

import numpy as np

from pymc_sghmc.gradients.metric import Array, LowRank, Metric
from pymc_sghmc.records import ByValue

__all__ = ["GaussianFit"]


@dataclass(frozen=True, eq=False)
class GaussianFit(ByValue):
    """A Gaussian near the posterior: N(mean, LLᵀ) with the metric L."""

    mean: Array  # (d,)
    metric: Metric
    is_mode: bool  # whether the posterior falls off around the mean as this Gaussian does
    passes: float  # over all data, that it took

    @property
    def is_astray(self) -> bool:
        """Whether a fit of thousands of parameters that depend on each other didn't converge."""
        return isinstance(self.metric, LowRank) and not self.is_mode

    def draw(self, rng: np.random.Generator, scale: float) -> Array:
        """Draw from the Gaussian, wider by ``scale``."""
        z = scale * rng.standard_normal(self.mean.size)
        return self.mean + self.metric.to_theta(z)
