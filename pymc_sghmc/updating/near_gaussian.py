"""Whether draws of a posterior are about those of a Gaussian, by the forces on them.

Under N(c, Σ) the force on every draw θ is −Σ⁻¹(θ − c): what forces differ from that has no Monte
Carlo error. Knows positions and gradients; no models, no steps.
"""

from dataclasses import dataclass

import arviz as az
import numpy as np
import xarray as xr

from pymc_sghmc.protocols import Array

__all__ = ["Fit", "refuse_far_from_gaussian", "refuse_other_posterior"]

# Root mean square of what the forces differ by, in standard deviations: that of the log rate of
# about seven events. Twelve such months drift by 0.14 standard deviations (root mean square).
MOST_OFF = 0.3
SD_OFF = 0.1  # relative difference of the draws' standard deviations from the Gaussian's
MEAN_OFF = 0.2  # of the draws' mean from the Gaussian's, in standard deviations
ERRORS = 4.5  # Monte Carlo errors by which a difference must exceed these: 7 in 10⁶ by chance


@dataclass(frozen=True)
class Fit:
    """A Gaussian and the draws that it was made from.

    Attributes
    ----------
    names : list of str
        Of the entries of a position.
    mean : array of shape (d,)
    covariance : array of shape (d, d)
    positions : array of shape (chain, draw, d)
    some : array of shape (k, d)
        Those positions at which gradients were taken.
    gradients : array of shape (k, d)
        ∇log p at some positions.
    """

    names: list[str]
    mean: Array
    covariance: Array
    positions: Array
    some: Array
    gradients: Array

    @property
    def sd(self) -> Array:
        """Standard deviations of the Gaussian, (d,)."""
        return np.sqrt(np.diag(self.covariance))


def refuse_other_posterior(fit: Fit) -> None:
    """Refuse draws whose mean is elsewhere: those of another model, or of other data.

    Raises
    ------
    ValueError
    """
    z = (fit.positions - fit.mean) / fit.sd
    mean = z.mean(axis=(0, 1))
    error = z.std(axis=(0, 1)) / np.sqrt(_effective_draws(z))
    excess = np.abs(mean) - MEAN_OFF - ERRORS * error
    worst = int(np.argmax(excess))
    if excess[worst] > 0:
        raise ValueError(
            f"prior_from: the gradient of all rows puts the mean of {fit.names[worst]} "
            f"{abs(mean[worst]):.2g} standard deviations from that of the draws. Pass the step or "
            "the model that made this run, with the same data (undo pm.set_data), and look at "
            "check_bias."
        )


def refuse_far_from_gaussian(fit: Fit) -> None:
    """Refuse posteriors for which a Gaussian is no good stand-in.

    Raises
    ------
    ValueError
    """
    advice = (
        "A Gaussian would be a wrong prior. Take a smoother or more informative model, sample the "
        "parameter on a scale on which its posterior is symmetric, or run on all data together."
    )
    # Σ∇log p is −(θ − c) for a Gaussian
    off = fit.gradients @ fit.covariance + fit.some - fit.mean
    size = np.sqrt(np.mean(np.square(off / fit.sd), axis=0))
    worst = int(np.argmax(size))
    if size[worst] > MOST_OFF:
        raise ValueError(
            f"prior_from: the posterior of {fit.names[worst]} is far from a Gaussian on the "
            "unconstrained scale: forces on the draws differ from a Gaussian's by "
            f"{size[worst]:.2g} standard deviations (at most {MOST_OFF}). {advice}"
        )
    z = (fit.positions - fit.positions.mean(axis=(0, 1))) / fit.sd
    squares = np.square(z)
    variance = squares.mean(axis=(0, 1))
    ratio = np.sqrt(variance)
    error = squares.std(axis=(0, 1)) / np.sqrt(_effective_draws(squares)) / (2 * ratio)
    excess = np.abs(ratio - 1) - SD_OFF - ERRORS * error
    worst = int(np.argmax(excess))
    if excess[worst] > 0:
        raise ValueError(
            f"prior_from: the draws of {fit.names[worst]} have {ratio[worst]:.2f} ± "
            f"{error[worst]:.2f} times the standard deviation of the Gaussian by the Hessian. "
            "Either the run is biased (check_bias shows it), or its posterior isn't near a "
            f"Gaussian. {advice}"
        )


def _effective_draws(values: Array) -> Array:
    """Effective number of draws for the mean of each entry, (d,)."""
    data = xr.Dataset({"x": (("chain", "draw", "parameter"), values)})
    ess = np.asarray(az.ess(data, method="mean")["x"], dtype=float)
    return np.maximum(np.nan_to_num(ess), 1.0)
