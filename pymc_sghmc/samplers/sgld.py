r"""Stochastic gradient Langevin dynamics (Welling & Teh 2011): the first-order limit of SGHMC.

Target: p(θ | D) ∝ exp(−U(θ)).        SDE: dθ = −∇U(θ) dt + N(0, 2T dt).

Eq. 12 of Chen, Fox & Guestrin (2014), with η = dt² M⁻¹:

    θ ← θ − η ∇Ũ(θ) + N(0, 2ηT)

Without gradient noise the variance on a Gaussian of precision λ is (1/λ) T / (1 − ηλ/2), so that
its bias is of order 1 in η. Gradient noise of variance V adds ηV/(2λ) to leading order.
"""

from typing import Any, NamedTuple, Unpack

from pymc_sghmc.protocols import Array, Generator, Gradient
from pymc_sghmc.step.arguments import SharedArguments
from pymc_sghmc.step.step import StochasticGradientStep

__all__ = ["SGLD", "SGLDState", "init", "update"]


class SGLDState(NamedTuple):
    """State of SGLD."""

    position: Array  # θ, (d,)


def init(
    position: Array, learning_rate: float, rng: Generator, temperature: float = 1.0
) -> SGLDState:
    """State at ``position``."""
    return SGLDState(position)


def update(
    state: SGLDState,
    gradient: Gradient,
    learning_rate: float,
    rng: Generator,
    *,
    temperature: float = 1.0,
) -> tuple[SGLDState, dict[str, Any]]:
    """One step of eq. 12 of Chen et al. (2014), eq. 4 of Welling & Teh (2011) with ε = 2η."""
    (theta,) = state
    eta = learning_rate
    T = temperature
    logp, grad = gradient(theta, gradient.draw_minibatch(rng))  # −∇Ũ(θ), a fresh minibatch
    noise = rng.standard_normal(theta.shape, dtype=theta.dtype)
    theta = theta + eta * grad + (2 * eta * T) ** 0.5 * noise  # eq. 12
    return SGLDState(theta), {"minibatch_logp": logp}


class SGLD(StochasticGradientStep):
    r"""Stochastic gradient Langevin dynamics.

    The simplest sampler from minibatches: gradient descent with noise of the right size.

    .. math:: \theta \leftarrow \theta - \eta \nabla \tilde U(\theta) + N(0, 2 \eta T)

    Here θ are the parameters, η is the learning rate, ∇Ũ the gradient of the negative log-density
    from a minibatch, and T the temperature. It chooses its settings as `SGHMC` does. It has no
    momentum, and the bias of its variances is proportional to η, so it needs shorter steps than
    `SGHMC`: several times as many inner steps for as many effective draws. Therefore use `SGHMC`,
    unless you want to compare with SGLD.

    Parameters
    ----------
    vars : variable, or list of variables, optional
        Parameters to sample. Default: all continuous ones of the model.

    Raises
    ------
    ValueError
        If an argument is out of range, or the data cannot be cut into independent rows.
    SamplingError
        While sampling, if the log-density or its gradient is not finite.

    Notes
    -----
    η is half of Welling & Teh's ε. It is the ``step_size`` of blackjax, and ``dt`` in the ``sgld``
    of SGMCMCJax. Automatic settings make full use of ``target_bias``. At temperature 0 the sampler
    is stochastic gradient descent.

    References
    ----------
    .. [1] Welling & Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics. ICML.
    .. [2] Chen, Fox & Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo. ICML.
    .. [3] Baker, Fearnhead, Fox & Nemeth (2019), Control variates for stochastic gradient MCMC.
       Statistics and Computing 29.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGLD
    >>> y = np.random.default_rng(0).normal(3.0, 1.0, size=1000)
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     _ = pm.Normal("y", mu, 1, observed=y)
    ...     step = SGLD(batch_size=100)
    ...     idata = pm.sample(150, tune=50, chains=2, step=step, random_seed=1, progressbar=False)
    >>> mu = idata.posterior["mu"]
    >>> bool(abs(mu.mean() - y.mean()) < 0.01), round(float(mu.std()), 2)
    (True, 0.03)
    """

    name = "sgld"
    state_type = SGLDState
    init = staticmethod(init)
    update = staticmethod(update)

    def __init__(self, vars: Any = None, **shared: Unpack[SharedArguments]) -> None:
        super().__init__(vars, {}, **shared)
