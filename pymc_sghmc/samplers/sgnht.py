r"""Stochastic gradient Nosé-Hoover thermostat (Ding et al. 2014), by a splitting around BAOAB.

Target: p(θ, r, ζ) ∝ exp(−U(θ) − ½ rᵀr − ½ dμ (ζ − A − ½εV)²), whose marginal is the posterior.
SDE: dθ = r dt,  dr = −∇U(θ) dt − ζ r dt + N(0, 2A dt) + N(0, εV dt),  dζ = (rᵀr/d − 1) dt/μ.

V, the variance of the gradient's noise, needn't be known, but must be one number for all directions
and positions: the thermostat ζ, a friction, rises while the chain is hotter than 1. With v = εr,
η = ε², friction α = 1 − exp(−εA), ξ = ε(ζ − A), the friction that the noise needs, and a
temperature T:

    θ  ← θ + ½v                                                          A
    v' = (1 − α) e^(−ξ) v + N(0, α(2 − α) η T)                           O
    θ  ← θ + ½v'                                                         A
    ξ  ← ξ + ¼α² (K/η − T),  K = |½(v + v')|²/d + α(2 − α) η T / (2 + 2(1 − α) e^(−ξ))
    v  ← v' − η ∇Ũ(θ)                                                    B and B

At ξ = 0 that is BAOAB. While ξ is at rest the mean of K/η is that of −θ·∇log p(θ)/d, on any target
and at any η: so E[θ·∇U(θ)]/d = T, exactly, which on a Gaussian is the right variance. ξ moves about
its rest with a variance of order 1/d: at η = ¼ that costs 1 % of the variance at d = 1, .5 % at 2,
.1 % at 10.
"""

from typing import Literal, NamedTuple, Unpack

import numpy as np

from pymc_sghmc.checks import checked_friction
from pymc_sghmc.step.arguments import SharedArguments
from pymc_sghmc.step.step import StochasticGradientStep

__all__ = ["SGNHT", "SGNHTState", "init", "update"]


class SGNHTState(NamedTuple):
    """State of SGNHT."""

    position: np.ndarray  # θ, (d,)
    momentum: np.ndarray  # v, (d,)
    thermostat: np.ndarray  # ξ, ()


def init(position, learning_rate, rng, temperature=1.0):
    """State at ``position`` with fresh momentum v ~ N(0, ηT), as if the gradient had no noise."""
    noise = rng.standard_normal(position.shape, dtype=position.dtype)
    momentum = (learning_rate * temperature) ** 0.5 * noise
    return SGNHTState(position, momentum, np.zeros((), dtype=position.dtype))


def update(state, gradient, learning_rate, rng, *, friction, temperature=1.0):
    """One inner step: BAOAB with the kick last, and with friction beyond α as the thermostat asks."""
    theta, v, xi = state
    eta = learning_rate
    alpha = friction
    T = temperature
    decay = (1 - alpha) * np.exp(-xi)
    injected = alpha * (2 - alpha) * eta * T
    theta = theta + 0.5 * v  # A
    noise = rng.standard_normal(v.shape, dtype=v.dtype)
    before = v  # O
    v = decay * v + injected**0.5 * noise
    theta = theta + 0.5 * v  # A
    K = (0.25 * (before + v) ** 2).mean() + 0.5 * injected / (1 + decay)
    xi = xi + 0.25 * alpha**2 * (K / eta - T)
    logp, grad = gradient(theta, gradient.draw_minibatch(rng))  # −∇Ũ(θ), a fresh minibatch
    v = v + eta * grad  # B and B
    return SGNHTState(theta, v, xi), {"minibatch_logp": logp}


class SGNHT(StochasticGradientStep):
    r"""Stochastic gradient Nosé-Hoover thermostat.

    SGHMC that needs no estimate of the gradient's noise: a thermostat, one more friction, grows
    until the chain has the temperature that it should have.

    .. math::
        d\theta = r\,dt, \quad dr = -\nabla \tilde U(\theta)\,dt - \zeta r\,dt + \sqrt{2A}\,dW,
        \quad d\zeta = (r^\top r/d - 1)\,dt/\mu

    It finds its settings as `SGHMC` does, and takes out of the noise what is the same for all
    directions and at all positions. With control variates and a preconditioner little is left to
    take out; it is made for posteriors where there is no such centre, such as those of neural
    networks.

    Parameters
    ----------
    vars : list, optional
        Unknowns to sample; default: all continuous ones of the model.
    friction : "auto" or float, default "auto"
        α in (0, 1), as that of `SGHMC`: the friction that the injected noise answers to, 1 −
        exp(−√η A) for Ding et al.'s A. The thermostat's own comes on top of it. "auto": critical
        for the slowest direction.

    Raises
    ------
    ValueError
        If an argument is out of range, or the data can't be cut into independent rows.

    Notes
    -----
    The statistic ``thermostat`` is ξ, the friction beyond α in a step, about ½ηV/T at rest; a
    negative one tells that the chain would be too cold without it. With few unknowns it fluctuates,
    at a bias of the variances of 1 % for one unknown and .1 % for ten at the longest steps, η = ¼.
    Ding et al.'s order of a step (kick, drift, thermostat) has a bias of tens of per cent at such
    steps; this is a splitting around BAOAB with none on a Gaussian but for these fluctuations.

    References
    ----------
    .. [1] Ding, Fang, Babbush, Chen, Skeel & Neven (2014), Bayesian sampling using stochastic
           gradient
       thermostats. NIPS.
    .. [2] Leimkuhler & Shang (2016), Adaptive thermostats for noisy gradient systems. SIAM Journal
           on
       Scientific Computing 38.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGNHT
    >>> y = np.random.default_rng(0).normal(3.0, 1.0, size=1000)
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     _ = pm.Normal("y", mu, 1, observed=y)
    ...     step = SGNHT(batch_size=100)
    ...     idata = pm.sample(150, tune=50, chains=2, step=step, random_seed=1, progressbar=False)
    >>> mu = idata.posterior["mu"]
    >>> bool(abs(mu.mean() - y.mean()) < 0.01), round(float(mu.std()), 2)
    (True, 0.03)
    """

    name = "sgnht"
    state_type = SGNHTState
    init = staticmethod(init)
    update = staticmethod(update)
    statistics = {"thermostat": np.float64}

    def __init__(
        self,
        vars: list | None = None,
        *,
        friction: float | Literal["auto"] = "auto",
        **shared: Unpack[SharedArguments],
    ):
        friction = checked_friction(friction)
        if friction == 1.0:
            raise ValueError(
                "friction=1: a thermostat acts on the momentum that a step keeps, and at "
                "friction 1 there is none. Take less than 1; for fresh momentum at every step "
                "use SGLD."
            )
        super().__init__(vars, {"friction": friction}, friction, **shared)
