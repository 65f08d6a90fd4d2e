r"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox & Guestrin 2014), Algorithm 2.

Target: p(θ, r) ∝ exp(−U(θ) − ½ rᵀM⁻¹r).
SDE (eq. 13): dθ = M⁻¹r dt,  dr = −∇U(θ) dt − CM⁻¹r dt + N(0, 2(C − B̂) dt) + N(0, 2B dt).

Eq. 15, with v = εM⁻¹r, η = ε²M⁻¹, α = εM⁻¹C, β̂ = εM⁻¹B̂:

    θ ← θ + v
    v ← v − η ∇Ũ(θ) − α v + N(0, 2(α − β̂) η T)

The gradient is taken at the new θ, with a new minibatch at every inner step. On a Gaussian without
gradient noise, the bias of the variance of θ is of order 2 in ε = √η at fixed friction C.
"""

from typing import Any, Literal, NamedTuple, Unpack

import numpy as np

from numpy.typing import ArrayLike

from pymc_sghmc.checks import checked_friction, whole_steps
from pymc_sghmc.protocols import Array, Generator, Gradient
from pymc_sghmc.samplers import baoab
from pymc_sghmc.step.arguments import SharedArguments
from pymc_sghmc.step.step import StochasticGradientStep
from pymc_sghmc.tuning.noise_estimates import noise_estimate_of

__all__ = ["SGHMC", "SGHMCState", "init", "update"]


class SGHMCState(NamedTuple):
    """State of SGHMC."""

    position: Array  # θ, (d,)
    momentum: Array  # v, (d,)


def init(
    position: Array, learning_rate: float, rng: Generator, temperature: float = 1.0
) -> SGHMCState:
    """State at ``position`` with new momentum v ~ N(0, ηT), that is r ~ N(0, MT)."""
    noise = rng.standard_normal(position.shape, dtype=position.dtype)
    return SGHMCState(position, (learning_rate * temperature) ** 0.5 * noise)


def update(
    state: SGHMCState,
    gradient: Gradient,
    learning_rate: float,
    rng: Generator,
    *,
    friction: float,
    noise_estimate: float | Array = 0.0,
    temperature: float = 1.0,
) -> tuple[SGHMCState, dict[str, Any]]:
    """One inner step of Algorithm 2 of Chen et al. (2014) in the form of eq. 15.

    ``noise_estimate`` β̂ is a number, an array of shape (d,) or a matrix of shape (d, d).
    """
    theta, v = state
    eta = learning_rate
    alpha = friction
    beta_hat = noise_estimate
    T = temperature
    theta = theta + v  # eq. 15, line 1
    logp, grad = gradient(theta, gradient.draw_minibatch(rng))  # −∇Ũ(θ), a fresh minibatch
    noise = rng.standard_normal(v.shape, dtype=v.dtype)
    if getattr(beta_hat, "ndim", 0) < 2:
        noise = (2 * (alpha - beta_hat) * eta * T) ** 0.5 * noise
    else:  # by a root of the matrix 2(αI − β̂)ηT
        root = np.linalg.cholesky(alpha * np.eye(len(v)) - beta_hat).astype(v.dtype)
        noise = (2 * eta * T) ** 0.5 * (root @ noise)
    v = v + eta * grad - alpha * v + noise  # eq. 15, line 2
    return SGHMCState(theta, v), {"minibatch_logp": logp}


class SGHMC(StochasticGradientStep):
    r"""Stochastic gradient Hamiltonian Monte Carlo.

    Samples a posterior from minibatches: each step looks at ``batch_size`` rows of the data instead
    of all. A draw of ``pm.sample`` is several such inner steps. ``SGHMC()`` needs no argument. It

    - chooses how many rows a step reads,
    - finds the mode and the curvature of the posterior there,
    - uses them to reduce the noise of gradients from minibatches (control variates), and
    - measures that noise while tuning, and chooses the learning rate so that the bias of the
      posterior's variances stays below ``target_bias``.

    What it chose is logged and is in the statistics. A setting that you give is never changed.

    One inner step with ``integrator="euler"`` is the paper's eq. 15. The default integrator solves
    the same stochastic differential equation more accurately:

    .. math::
        \theta \leftarrow \theta + v, \qquad
        v \leftarrow v - \eta \nabla \tilde U(\theta) - \alpha v + N(0, 2(\alpha - \hat\beta)\eta T)

    Here θ are the parameters, v is their momentum, η the learning rate, ∇Ũ the gradient of the
    negative log-density from a minibatch, α the friction, β̂ the noise estimate and T the
    temperature.

    Parameters
    ----------
    vars : variable, or list of variables, optional
        Parameters to sample. Default: all continuous ones of the model.
    friction : "auto" or float, default "auto"
        α in (0, 1], the part of its momentum that the chain loses in an inner step; 1 − α is the
        momentum term of stochastic gradient descent. "auto" lets the slowest direction of the
        posterior forget its past fastest: 1 − exp(−2√(ηh)) at the smallest curvature h, and less
        where directions may be wider far out and noise allows it. It takes more if a given
        learning rate needs it to keep ``target_bias``. The paper uses 0.01 to 0.1.
        At α = 1 every step has new momentum.
    noise_estimate : "auto", None, float, array of shape (d,), "diag" or "full", default "auto"
        β̂ = ½ηV̂, how much of the noise that the friction calls for comes from the gradient
        already, where V̂ is the variance of the gradient's noise. "auto" measures V̂ while tuning,
        in the preconditioner's coordinates, and keeps it afterwards; it is 0 if rows are drawn
        without replacement. ``None`` is β̂ = 0: then variances are too large by about ηV/(2α) in
        the preconditioner's units. A number or array is β̂ itself, at most α. "diag" and "full"
        also measure after tuning, once per draw, by the empirical Fisher information. If β̂ exceeds
        α, these two cut it to α while tuning, and stop the chain afterwards. They are exact at
        temperature 1.
    integrator : {"baoab", "euler"}, default "baoab"
        How the differential equation is solved. "baoab" has no bias on a Gaussian without gradient
        noise, and allows steps several times as long, at the same cost of one gradient per step.
        "euler" is the paper's eq. 15.
    resample_momentum_every : int, optional
        Number of inner steps k ≥ 2 after which the momentum is drawn anew from N(0, ηT). The last
        gradient before that is lost, which multiplies variances by up to k/(k − 1). Default: never,
        because the friction is enough.

    Raises
    ------
    ValueError
        If an argument is out of range, or the data cannot be cut into independent rows.
    SamplingError
        While sampling, if the log-density or its gradient is not finite.

    Notes
    -----
    To run the paper's algorithm to the letter, give ``learning_rate``, ``friction``,
    ``noise_estimate``, ``gradient="plain"`` and ``integrator="euler"``. The settings of its
    Algorithm 2 convert by η = ε²M⁻¹, α = εM⁻¹C and β̂ = εM⁻¹B̂, and its m is ``n_steps``. The paper
    takes η between 0.01/N and 0.1/N for N rows (Appendix G). At temperature 0 the sampler is
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
    ...     idata = pm.sample(150, tune=50, chains=2, step=step, random_seed=1, progressbar=False)
    >>> mu = idata.posterior["mu"]
    >>> bool(abs(mu.mean() - y.mean()) < 0.01), round(float(mu.std()), 2)
    (True, 0.03)
    """

    name = "sghmc"
    state_type = SGHMCState
    init = staticmethod(init)

    def __init__(
        self,
        vars: Any = None,
        *,
        friction: float | Literal["auto"] = "auto",
        noise_estimate: ArrayLike | Literal["auto", "diag", "full"] | None = "auto",
        integrator: Literal["baoab", "euler"] = "baoab",
        resample_momentum_every: int | None = None,
        **shared: Unpack[SharedArguments],
    ) -> None:
        friction = checked_friction(friction)
        if integrator not in ("euler", "baoab"):
            raise ValueError(
                f'integrator={integrator!r}: must be "baoab" or "euler", the paper\'s eq. 15.'
            )
        self.update = update if integrator == "euler" else baoab.update
        noise = noise_estimate_of(noise_estimate, friction)
        self.restart_every = _checked_redraws(resample_momentum_every)
        own_arguments = {
            "friction": friction,
            "noise_estimate": noise_estimate,
            "integrator": integrator,
            "resample_momentum_every": self.restart_every,
        }
        super().__init__(vars, own_arguments, friction, noise, **shared)


def _checked_redraws(every: Any) -> int | None:
    if every is None:
        return None
    every = whole_steps("resample_momentum_every", every)
    if every == 1:
        raise ValueError(
            "resample_momentum_every=1: take at least 2, or SGLD, which has no momentum. The "
            "gradient acts through the momentum of the next step, so if every step draws new "
            "momentum, the chain is a random walk that ignores the posterior."
        )
    return every
