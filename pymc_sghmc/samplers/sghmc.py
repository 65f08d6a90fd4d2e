r"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox & Guestrin 2014), Algorithm 2.

Target: p(θ, r) ∝ exp(−U(θ) − ½ rᵀM⁻¹r).
SDE (eq. 13): dθ = M⁻¹r dt,  dr = −∇U(θ) dt − CM⁻¹r dt + N(0, 2(C − B̂) dt) + N(0, 2B dt).

Eq. 15, with v = εM⁻¹r, η = ε²M⁻¹, α = εM⁻¹C, β̂ = εM⁻¹B̂:

    θ ← θ + v
    v ← v − η ∇Ũ(θ) − α v + N(0, 2(α − β̂) η T)

The gradient is taken at the new θ, with a fresh minibatch at every inner step. On a Gaussian
without gradient noise the variance of θ has a bias of order 2 in ε = √η at fixed friction C.
"""

from typing import Literal, NamedTuple, Unpack

import numpy as np

from pymc_sghmc.checks import check_matrix_size, is_number, whole_steps
from pymc_sghmc.faults import Fault, NonFinite
from pymc_sghmc.samplers import baoab
from pymc_sghmc.step.arguments import SharedArguments
from pymc_sghmc.step.step import StochasticGradientStep
from pymc_sghmc.tuning.budget import (
    UNKNOWN_NOISE,
    critical_friction,
    inflation,
    largest_learning_rate,
    relaxation,
    smallest_friction,
)

__all__ = ["SGHMC", "SGHMCState", "init", "update"]


class SGHMCState(NamedTuple):
    """State of SGHMC."""

    position: np.ndarray  # θ, (d,)
    momentum: np.ndarray  # v, (d,)


def init(position, learning_rate, rng, temperature=1.0):
    """State at ``position`` with fresh momentum v ~ N(0, ηT), that is r ~ N(0, MT)."""
    noise = rng.standard_normal(position.shape, dtype=position.dtype)
    return SGHMCState(position, (learning_rate * temperature) ** 0.5 * noise)


def update(state, gradient, learning_rate, rng, *, friction, noise_estimate=0.0, temperature=1.0):
    """One inner step of Algorithm 2 of Chen et al. (2014) in the form of eq. 15.

    ``noise_estimate`` β̂ is a number, an array of shape (d,) or a matrix of shape (d, d).
    """
    theta, v = state
    eta, alpha, beta_hat, T = learning_rate, friction, noise_estimate, temperature
    theta = theta + v  # eq. 15, line 1
    logp, grad = gradient(theta, gradient.draw_minibatch(rng))  # −∇Ũ(θ), a fresh minibatch
    noise = rng.standard_normal(v.shape, dtype=v.dtype)
    if getattr(beta_hat, "ndim", 0) < 2:
        noise = (2 * (alpha - beta_hat) * eta * T) ** 0.5 * noise
    else:  # a root of the matrix 2(αI − β̂)ηT
        root = np.linalg.cholesky(alpha * np.eye(len(v)) - beta_hat).astype(v.dtype)
        noise = (2 * eta * T) ** 0.5 * (root @ noise)
    v = v + eta * grad - alpha * v + noise  # eq. 15, line 2
    return SGHMCState(theta, v), {"minibatch_logp": logp}


class SGHMC(StochasticGradientStep):
    r"""Stochastic gradient Hamiltonian Monte Carlo.

    With nothing but a ``batch_size``, `pm.sample` finds the settings: it climbs to the mode, takes
    curvature and control variates there, and while tuning chooses the learning rate from the noise
    that the gradient has, so that the bias of the variances stays below ``target_bias``. What it
    chose is logged and is in the statistics. A given setting is never changed. With a learning rate,
    friction and noise estimate by hand, ``gradient="plain"`` and ``integrator="euler"`` the step is
    the paper's algorithm to the letter, eq. 15:

    .. math::
        \theta \leftarrow \theta + v, \qquad
        v \leftarrow v - \eta \nabla \tilde U(\theta) - \alpha v + N(0, 2(\alpha - \hat\beta)\eta T)

    Parameters
    ----------
    vars : list, optional
        Unknowns to sample; default: all continuous ones of the model.
    friction : "auto" or float, default "auto"
        α in (0, 1]; 1 − α is the momentum term of stochastic gradient descent. "auto": critical
        for the slowest direction, 1 − exp(−2√(ηh)) at curvature h, and more where a given learning
        rate needs it to keep ``target_bias``. The paper uses 0.01 to 0.1. At α = 1 every step has
        fresh momentum.
    noise_estimate : "auto", None, float, array of shape (d,), "diag" or "full", default "auto"
        β̂ = ½ηV̂, the share of the friction's noise that the gradient already brings. ``None`` is
        β̂ = 0: variances come out too large by about ηV/(2α) in the preconditioner's units. A number
        or array is β̂ itself, at most α. "auto" measures V while tuning, in the coordinates in which
        the preconditioner is 1, and keeps it; it is 0 without replacement. "diag" and "full" go on
        measuring after tuning, by the empirical Fisher information, once per draw; where β̂ exceeds α
        it is cut to α during tuning and an error afterwards; exact at temperature 1.
    integrator : {"baoab", "euler"}, default "baoab"
        BAOAB has no bias on a Gaussian without gradient noise and allows steps several times as
        long, at one gradient per step; "euler" is the paper's eq. 15.
    resample_momentum_every : int, optional
        Inner steps k ≥ 2 after which the momentum is redrawn from N(0, ηT). The last gradient
        before a redraw is lost, which multiplies the variance by up to k/(k − 1). Default: never,
        the friction is enough.

    Raises
    ------
    ValueError
        If an argument is out of range, or the data can't be cut into independent rows.

    Notes
    -----
    Algorithm 2's settings convert by η = ε²M⁻¹, α = εM⁻¹C, β̂ = εM⁻¹B̂, and its m is ``n_steps``. The
    paper takes η between 0.01/N and 0.1/N for N rows (Appendix G). At temperature 0 the sampler is
    stochastic gradient descent with momentum, the paper's baseline.

    References
    ----------
    .. [1] Chen, Fox & Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo. ICML.
    .. [2] Baker, Fearnhead, Fox & Nemeth (2019), Control variates for stochastic gradient MCMC.
       Statistics and Computing 29.
    .. [3] Leimkuhler & Matthews (2013), Rational construction of stochastic numerical methods for
       molecular sampling. Applied Mathematics Research eXpress.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGHMC
    >>> y = np.random.default_rng(0).normal(3.0, 1.0, size=1000)
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     _ = pm.Normal("y", mu, 1, observed=y)
    ...     step = SGHMC(batch_size=100)
    ...     idata = pm.sample(1000, tune=100, chains=2, step=step, random_seed=1, progressbar=False)
    >>> mu = idata.posterior["mu"]
    >>> bool(abs(mu.mean() - y.mean()) < 0.01), round(float(mu.std()), 2)
    (True, 0.03)
    """

    name = "sghmc"
    init = staticmethod(init)
    _known = (None, None, None)  # V̂, (η, α) and their β̂

    def __init__(
        self,
        vars: list | None = None,
        *,
        friction: Literal["auto"] | float = "auto",
        noise_estimate: Literal["auto", "diag", "full"] | float | np.ndarray | None = "auto",
        integrator: Literal["baoab", "euler"] = "baoab",
        resample_momentum_every: int | None = None,
        **shared: Unpack[SharedArguments],
    ):
        is_auto = isinstance(friction, str) and friction == "auto"
        if not is_auto and not (is_number(friction) and 0 < friction <= 1):
            raise ValueError(
                f'friction={friction!r}: must be "auto" or a number in (0, 1]; 1 − friction is the '
                "momentum term. Without friction gradient noise heats the chain without bound."
            )
        if integrator not in ("euler", "baoab"):
            raise ValueError(f'integrator={integrator!r}: must be "euler" (eq. 15) or "baoab".')
        self.integrator = integrator
        self.update = update if integrator == "euler" else baoab.update
        self.friction = "auto" if is_auto else float(friction)
        self.beta_hat = None
        self.full = isinstance(noise_estimate, str) and noise_estimate == "full"
        self.estimated = isinstance(noise_estimate, str) and noise_estimate in ("diag", "full")
        self.compensates = isinstance(noise_estimate, str) and noise_estimate == "auto"
        if isinstance(noise_estimate, str) and not (self.estimated or self.compensates):
            raise ValueError(
                f"noise_estimate={noise_estimate!r}: pass None, a number, an array of shape (d,), "
                '"auto", "diag" or "full".'
            )
        if not isinstance(noise_estimate, str):
            given = 0.0 if noise_estimate is None else noise_estimate
            self.beta_hat = _checked_noise(given, 1.0 if is_auto else friction)
        if resample_momentum_every is not None:
            resample_momentum_every = whole_steps(
                "resample_momentum_every", resample_momentum_every
            )
            if resample_momentum_every == 1:
                raise ValueError(
                    "resample_momentum_every=1: the gradient acts through the momentum of the next "
                    "step, so that momentum redrawn at every step leaves a random walk without a "
                    "target. Take at least 2; for fresh momentum at every step use SGLD."
                )
        self.restart_every = resample_momentum_every
        own = {
            "friction": self.friction,
            "noise_estimate": noise_estimate,
            "integrator": integrator,
            "resample_momentum_every": resample_momentum_every,
        }
        super().__init__(vars, own=own, **shared)
        if np.ndim(self.beta_hat) == 1:
            if self.beta_hat.shape != (self.d,):
                raise ValueError(
                    f"noise_estimate has shape {self.beta_hat.shape}, but the step samples {self.d} "
                    f"unconstrained unknowns: pass an array of shape ({self.d},)."
                )
            kind = self.preconditioner
            if kind != "diag" if isinstance(kind, str) else np.ndim(kind) == 2:
                raise ValueError(
                    "noise_estimate: an array of d entries has no meaning with a dense "
                    'preconditioner. Pass a number, "auto", "diag" or "full".'
                )
            self.beta_hat = self.beta_hat.astype(self.gradient.dtype)
        if not self.gradient.replace:  # β̂ = ½ηV̂ is for noise that is independent from step to step
            if self.estimated:
                raise ValueError(
                    f"noise_estimate={noise_estimate!r}: minibatches drawn without replacement "
                    "partly cancel each other's noise, so that β̂ would take out too much. Use "
                    'replace=True, or noise_estimate="auto", which is β̂ = 0 here.'
                )
            if self.compensates:
                self.compensates, self.beta_hat = False, 0.0
        if self.full:
            check_matrix_size('noise_estimate="full"', self.d)
        if self.estimated and self.gradient.is_exact:
            raise ValueError(
                "noise_estimate: the gradient uses all data and has no noise. Pass a batch_size, or "
                "noise_estimate=None."
            )
        if self.estimated and 1 in self.gradient.noisy_batch_sizes:
            raise ValueError(
                f"noise_estimate={noise_estimate!r}: needs at least 2 rows in a minibatch to "
                "measure how they differ. Raise batch_size."
            )
        self.measured = noise_estimate is not None
        self.prepare()

    @property
    def is_tuned(self):
        """Whether some setting follows from measurements of this chain."""
        noisy = not self.gradient.is_exact
        return super().is_tuned or self.friction == "auto" or (noisy and self.compensates)

    def choose(self, tuning):
        """Largest η and critical α, or the given ones, that keep the predicted bias in the budget."""
        noise = float(tuning.noise.max()) / (self.temperature or 1.0)
        # An estimate takes out most of the noise; what it misses is left in.
        noise *= UNKNOWN_NOISE if self.estimated or self.compensates else 1.0
        h, slow, budget = self.setup.stiffness, self.setup.slowness, self.target_bias
        given = None if self.friction == "auto" else self.friction
        least = 0.0 if self.beta_hat is None else float(np.max(self.beta_hat))  # α ≥ β̂
        eta = None if self.schedule is None else self.schedule(0)

        def bias(eta, alpha):
            return inflation(self.integrator, eta, alpha, noise, h)

        if eta is None:
            eta = largest_learning_rate(
                lambda eta: bias(eta, given or max(critical_friction(eta, slow), least)),
                budget,
                tuning.limit / h,
            )
        alpha = given or smallest_friction(
            lambda alpha: bias(eta, alpha), budget, max(critical_friction(eta, slow), least)
        )
        rate = relaxation(self.integrator, eta, alpha, slow)
        return tuning._replace(learning_rate=eta, friction=alpha, bias=bias(eta, alpha), rate=rate)

    def begin_draw(self, position):
        """Average V̂ over the draws with weights growing as t³ (κ_t = 4/(t+3) of Ahn et al.)."""
        if not self.estimated:
            return
        if self.factor is not None:
            position = self.target.from_theta(position)
        V = self.quiet.noise_covariance(position, self.rng, full=self.full)
        if not np.isfinite(V).all():
            raise NonFinite(position, V, np.nan)
        old = V if self.noise_covariance is None else self.noise_covariance
        self.noise_covariance = old + (V - old) * 4 / (self.n_tuned + self.n_kept + 4)
        self.largest_noise = float(
            np.linalg.eigvalsh(self.noise_covariance)[-1]
            if self.full
            else self.noise_covariance.max()
        )

    def update_arguments(self, learning_rate):
        """Friction and β̂, with α ≥ β̂."""
        alpha, eta = self._friction, learning_rate
        if self.compensates and self.tuning is None:  # an exact gradient
            return {"friction": alpha, "noise_estimate": 0.0}
        if self.compensates:
            noise, settings, beta_hat = self._known
            if noise is not self.tuning.noise or settings != (eta, alpha):
                # β̂ = ½ηV̂/T: at every temperature exact for eq. 15, and for BAOAB but for a share ηh/4
                V = self.tuning.noise / (self.temperature or 1.0)
                beta_hat = np.minimum(0.5 * eta * V, alpha).astype(self.gradient.dtype)
                self._known = self.tuning.noise, (eta, alpha), beta_hat
            return {"friction": alpha, "noise_estimate": beta_hat}
        if not self.estimated:
            return {"friction": alpha, "noise_estimate": self.beta_hat}
        largest = 0.5 * eta * self.largest_noise
        beta_hat = 0.5 * eta * self.noise_covariance
        if largest > alpha and not self.tune:
            raise Fault(
                f"noise_estimate: β̂ = {largest:.3g} exceeds friction = {alpha:.3g}, so that the "
                f"gradient is noisier than the friction can take up at learning_rate={eta:.3g}. Try "
                + (f"friction={1.5 * largest:.2g}, " if 1.5 * largest <= 1 else "")
                + f"learning_rate={0.5 * eta * alpha / largest:.2g} or a larger batch_size"
            )
        if largest > alpha:
            beta_hat = (
                beta_hat * (0.999 * alpha / largest) if self.full else np.minimum(beta_hat, alpha)
            )
        return {"friction": alpha, "noise_estimate": beta_hat.astype(self.gradient.dtype)}

    @property
    def _friction(self):
        return self.tuning.friction if self.friction == "auto" else self.friction

    def gradient_noise(self, learning_rate):
        """Largest β̂/α over the unknowns; NaN where nothing is known of the noise."""
        if not self.measured:
            return np.nan
        if self.estimated:
            return 0.5 * learning_rate * self.largest_noise / self._friction
        beta_hat = self.update_arguments(learning_rate)["noise_estimate"]
        return float(np.max(beta_hat)) / self._friction


def _checked_noise(noise_estimate, friction):
    beta_hat = np.asarray(noise_estimate)
    if beta_hat.dtype.kind not in "fiu" or beta_hat.ndim > 1:
        raise ValueError(
            f"noise_estimate={noise_estimate!r}: pass None, a number, an array of shape (d,), "
            '"diag" or "full".'
        )
    if not (np.isfinite(beta_hat).all() and (beta_hat >= 0).all()):
        raise ValueError("noise_estimate: β̂ must be finite and not below zero.")
    if (beta_hat > friction).any():
        raise ValueError(
            f"noise_estimate: β̂ = {beta_hat.max():.3g} exceeds friction = {friction:.3g}, which "
            "would need noise of negative variance (the paper's C ⪰ B̂). Raise friction to at "
            f"least {beta_hat.max():.3g} or lower the estimate."
        )
    return beta_hat if beta_hat.ndim else float(beta_hat)
