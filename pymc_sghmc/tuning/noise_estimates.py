"""Estimates of the gradient's noise, of which update rules inject less: β̂ = ½ηV̂/T.

Three kinds with the same methods: one that is given, one from what tuning has measured, and one
that is measured anew at each draw. Knows gradients and budgets, no samplers.
"""

from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.checks import check_matrix_size
from pymc_sghmc.exceptions import ChainError, NonFinite
from pymc_sghmc.gradients.metric import Array
from pymc_sghmc.tuning.budget import UNKNOWN_NOISE
from pymc_sghmc.tuning.chain_tuning import ByHand, Tuning

__all__ = [
    "GivenNoise",
    "MeasuredNoise",
    "NoiseEstimate",
    "NoiseOfEachDraw",
    "TunedNoise",
    "noise_estimate_of",
]


class MeasuredNoise(NamedTuple):
    """V̂, an average over the draws of a chain."""

    covariance: Array  # (d,) or (d, d)
    largest: float  # eigenvalue


class GivenNoise:
    """β̂ as it was given, 0 for ``None``.

    Parameters
    ----------
    beta_hat : float or array of shape (d,)
    is_known : bool
        Whether it says something of the noise.
    """

    remaining_share = 1.0
    is_tuned = False

    def __init__(self, beta_hat: Any, is_known: bool = True) -> None:
        self._beta_hat = beta_hat
        self._is_known = is_known
        # the least α at which noise needs no negative variance: α ≥ β̂
        self.least_friction = float(np.max(beta_hat))

    def checked(self, gradient: Any, preconditioner: Any) -> "GivenNoise":
        """Return the estimate for this gradient, if it serves there."""
        if np.ndim(self._beta_hat) == 0:
            return self
        d = gradient.density.d
        if self._beta_hat.shape != (d,):
            raise ValueError(
                f"noise_estimate has shape {self._beta_hat.shape}, but the step samples {d} "
                f"unconstrained parameters: pass an array of shape ({d},)."
            )
        kind = preconditioner
        if kind != "diag" if isinstance(kind, str) else np.ndim(kind) == 2:
            raise ValueError(
                "noise_estimate: an array of d entries has no meaning with a dense "
                'preconditioner. Pass a number, "auto", "diag" or "full".'
            )
        return GivenNoise(self._beta_hat.astype(gradient.density.dtype))

    def begin_draw(
        self, old: Any, target: Any, position: Array, rng: np.random.Generator, n_draws: int
    ) -> None:
        """Measure what is measured once per draw: nothing."""

    def beta_hat(
        self,
        eta: float,
        alpha: float,
        tuning: Tuning,
        measured: Any,
        temperature: float,
        is_tuning: bool,
    ) -> Any:
        """β̂ at this learning rate and friction."""
        return self._beta_hat

    def share(self, beta_hat: Any, eta: float, alpha: float, measured: Any) -> float:
        """Largest β̂/α over the parameters; NaN where the noise is not known."""
        return self.least_friction / alpha if self._is_known else np.nan


class _TunedBeta(NamedTuple):
    """β̂ as it was computed last."""

    noise: Array  # V̂
    settings: tuple[float, float]  # η and α
    beta_hat: Array
    largest: float  # of its entries


class TunedNoise:
    """β̂ from the noise that tuning has measured, in each direction."""

    remaining_share = UNKNOWN_NOISE  # an estimate takes out most of the noise
    least_friction = 0.0
    is_tuned = True

    def __init__(self) -> None:
        self._last: _TunedBeta | None = None

    def checked(self, gradient: Any, preconditioner: Any) -> "TunedNoise | GivenNoise":
        """Return the estimate for this gradient: none where its noise lasts over many steps."""
        return self if gradient.order.independent else GivenNoise(0.0)

    def begin_draw(
        self, old: Any, target: Any, position: Array, rng: np.random.Generator, n_draws: int
    ) -> None:
        """Measure what is measured once per draw: nothing, tuning does."""

    def beta_hat(
        self,
        eta: float,
        alpha: float,
        tuning: Tuning,
        measured: Any,
        temperature: float,
        is_tuning: bool,
    ) -> Any:
        """β̂ at this learning rate and friction, at most α."""
        if isinstance(tuning, ByHand):  # an exact gradient
            return 0.0
        last = self._last
        if last is None or last.noise is not tuning.noise or last.settings != (eta, alpha):
            # β̂ = ½ηV̂/T: at every temperature exact for eq. 15, and for BAOAB but for a share ηh/4
            V = tuning.noise / (temperature or 1.0)
            beta_hat = np.minimum(0.5 * eta * V, alpha)
            largest = float(beta_hat.max())
            last = _TunedBeta(tuning.noise, (eta, alpha), beta_hat, largest)
            self._last = last
        return last.beta_hat

    def share(self, beta_hat: Any, eta: float, alpha: float, measured: Any) -> float:
        """Largest β̂/α over the parameters."""
        if self._last is not None and beta_hat is self._last.beta_hat:
            return self._last.largest / alpha
        return float(np.max(beta_hat)) / alpha


class NoiseOfEachDraw:
    """β̂ from the empirical Fisher information, once per draw.

    Parameters
    ----------
    full : bool
        All of the matrix, not its diagonal alone.
    """

    remaining_share = UNKNOWN_NOISE
    least_friction = 0.0
    is_tuned = False

    def __init__(self, full: bool) -> None:
        self.full = full
        self._name = "full" if full else "diag"

    def checked(self, gradient: Any, preconditioner: Any) -> "NoiseOfEachDraw":
        """Return the estimate, if it serves for this gradient."""
        # β̂ = ½ηV̂ is for noise that is independent from step to step
        if not gradient.order.independent:
            raise ValueError(
                f"noise_estimate={self._name!r}: minibatches drawn without replacement "
                "partly cancel each other's noise, so that β̂ would take out too much. Use "
                'replace=True, or noise_estimate="auto", which is β̂ = 0 here.'
            )
        if self.full:
            check_matrix_size('noise_estimate="full"', gradient.density.d)
        if gradient.is_exact:
            raise ValueError(
                "noise_estimate: the gradient uses all data and has no noise. Pass a batch_size, "
                "or noise_estimate=None."
            )
        if 1 in gradient.data.noisy_batch_sizes:
            raise ValueError(
                f"noise_estimate={self._name!r}: needs at least 2 rows in a minibatch to "
                "measure how they differ. Raise batch_size."
            )
        return self

    def begin_draw(
        self,
        old: MeasuredNoise | None,
        target: Any,
        position: Array,
        rng: np.random.Generator,
        n_draws: int,
    ) -> MeasuredNoise:
        """Average V̂ over the draws with weights growing as t³ (κ_t = 4/(t+3) of Ahn et al.)."""
        position = target.coordinates.from_theta(position)
        V = target.noise_covariance(position, rng, full=self.full)
        if not np.isfinite(V).all():
            raise NonFinite(position, V, np.nan)
        if old is not None:
            V = old.covariance + (V - old.covariance) * 4 / (n_draws + 4)
        return MeasuredNoise(V, float(np.linalg.eigvalsh(V)[-1] if self.full else V.max()))

    def beta_hat(
        self,
        eta: float,
        alpha: float,
        tuning: Tuning,
        measured: Any,
        temperature: float,
        is_tuning: bool,
    ) -> Any:
        """β̂ at this learning rate and friction: cut to α while tuning, an error afterwards."""
        largest = 0.5 * eta * measured.largest
        beta_hat = 0.5 * eta * measured.covariance
        if largest <= alpha:
            return beta_hat
        if not is_tuning:
            raise ChainError(
                f"noise_estimate: β̂ = {largest:.3g} exceeds friction = {alpha:.3g}, so that the "
                f"gradient is noisier than the friction can take up at learning_rate={eta:.3g}. "
                "Try "
                + (f"friction={1.5 * largest:.2g}, " if 1.5 * largest <= 1 else "")
                + f"learning_rate={0.5 * eta * alpha / largest:.2g} or a larger batch_size"
            )
        return beta_hat * (0.999 * alpha / largest) if self.full else np.minimum(beta_hat, alpha)

    def share(self, beta_hat: Any, eta: float, alpha: float, measured: Any) -> float:
        """Largest β̂/α over the parameters, before it is cut."""
        return 0.5 * eta * measured.largest / alpha


NoiseEstimate = GivenNoise | TunedNoise | NoiseOfEachDraw


def noise_estimate_of(noise_estimate: Any, friction: Any) -> NoiseEstimate:
    """Check the argument ``noise_estimate`` beside ``friction``, and return the estimate."""
    if isinstance(noise_estimate, str):
        if noise_estimate == "auto":
            return TunedNoise()
        if noise_estimate in ("diag", "full"):
            return NoiseOfEachDraw(full=noise_estimate == "full")
        raise ValueError(
            f"noise_estimate={noise_estimate!r}: pass None, a number, an array of shape (d,), "
            '"auto", "diag" or "full".'
        )
    if noise_estimate is None:
        return GivenNoise(0.0, is_known=False)
    beta_hat = np.asarray(noise_estimate)
    if beta_hat.dtype.kind not in "fiu" or beta_hat.ndim > 1:
        raise ValueError(
            f"noise_estimate={noise_estimate!r}: pass None, a number, an array of shape (d,), "
            '"diag" or "full".'
        )
    if not (np.isfinite(beta_hat).all() and (beta_hat >= 0).all()):
        raise ValueError("noise_estimate: β̂ must be finite and not below zero.")
    largest_possible = 1.0 if friction == "auto" else friction
    if (beta_hat > largest_possible).any():
        raise ValueError(
            f"noise_estimate: β̂ = {beta_hat.max():.3g} exceeds friction = "
            f"{largest_possible:.3g}, which would need noise of negative variance (the paper's C "
            f"⪰ B̂). Raise friction to at least {beta_hat.max():.3g} or lower the estimate."
        )
    return GivenNoise(beta_hat if beta_hat.ndim else float(beta_hat))
