r"""Stochastic gradient Langevin dynamics (Welling & Teh 2011): the first-order limit of SGHMC.

Target: p(θ | D) ∝ exp(−U(θ)).        SDE: dθ = −∇U(θ) dt + N(0, 2T dt).

Eq. 12 of Chen, Fox & Guestrin (2014), with η = dt² M⁻¹:

    θ ← θ − η ∇Ũ(θ) + N(0, 2ηT)

Without gradient noise the variance on a Gaussian of precision λ is (1/λ) T / (1 − ηλ/2): a bias of
order 1 in η. Gradient noise of covariance V adds ηV/(2λ) to leading order.
"""

from typing import NamedTuple

import numpy as np

from pymc_sghmc.step import StochasticGradientStep

__all__ = ["SGLD", "SGLDState", "init", "update"]


class SGLDState(NamedTuple):
    """State of SGLD."""

    position: np.ndarray  # θ, (d,)


def init(position, learning_rate, rng, temperature=1.0):
    """State at ``position``."""
    return SGLDState(position)


def update(state, gradient, learning_rate, rng, *, temperature=1.0):
    """One step of eq. 12 of Chen et al. (2014), eq. 4 of Welling & Teh (2011) with ε = 2η."""
    (theta,) = state
    eta, T = learning_rate, temperature
    logp, grad = gradient(theta, gradient.draw_minibatch(rng))  # −∇Ũ(θ), a fresh minibatch
    noise = rng.standard_normal(theta.shape, dtype=theta.dtype)
    theta = theta + eta * grad + (2 * eta * T) ** 0.5 * noise  # eq. 12
    return SGLDState(theta), {"minibatch_logp": logp}


class SGLD(StochasticGradientStep):
    r"""Stochastic gradient Langevin dynamics.

    .. math:: \theta \leftarrow \theta - \eta \nabla \tilde U(\theta) + N(0, 2 \eta T)

    Parameters
    ----------
    vars : list, optional
        Unknowns to sample; default: all continuous ones of the model.
    learning_rate : float or callable
        η, in units of squared unconstrained unknowns (with a ``preconditioner``, η multiplies it
        and has no unit), or a schedule ``t -> η_t`` from `pymc_sghmc.schedules`. Required. Welling
        & Teh's ε is 2η; blackjax's ``step_size`` is η, and so is ``dt`` of SGMCMCJax's ``sgld``.
    batch_size : int or dict of {str: int}, optional
        Rows in a minibatch, drawn with replacement at every inner step. Likelihoods with different
        numbers of rows take a dict that names observed variables, data containers or dims. Default:
        the batches of ``pm.Minibatch``, or all data.
    preconditioner : array of shape (d,) or (d, d), optional
        M⁻¹, best near the posterior (co)variance of the raveled unconstrained unknowns, in the
        order of ``model.value_vars``: then η = 0.1 is a long and 0.01 a cautious step. Default: 1.
    n_steps : int, default 10
        Inner steps per draw: PyMC's own cost per draw is that of one to three small gradients, and
        ten steps make it small. Draws hold the last position.
    temperature : float, default 1.0
        T: the chain samples exp(−U/T). 1 is the posterior, 0 stochastic gradient descent.
    model : pm.Model, optional
        Default: the model of the context.
    rng : numpy.random.Generator or int, optional
        ``pm.sample(random_seed=...)`` replaces it.
    initial_point : dict, optional
        Gives the shapes of the unknowns; default: the model's initial point.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``{"mode": "NUMBA"}``.
    blocked : bool, default True
        One step for all unknowns. ``False`` makes one step for each.

    Raises
    ------
    ValueError
        If an argument is out of range, or the data can't be cut into independent rows.

    References
    ----------
    .. [1] Welling & Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics. ICML.
    .. [2] Chen, Fox & Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo. ICML.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGLD
    >>> y = np.random.default_rng(0).normal(3.0, 1.0, size=1000)
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     _ = pm.Normal("y", mu, 1, observed=y)
    ...     step = SGLD(batch_size=100, learning_rate=0.01, preconditioner=[1e-3])
    ...     idata = pm.sample(2000, tune=100, chains=2, step=step, random_seed=1, progressbar=False)
    >>> mu = idata.posterior["mu"]
    >>> bool(abs(mu.mean() - y.mean()) < 0.01), round(float(mu.std()), 2)
    (True, 0.03)
    """

    name = "sgld"
    init = staticmethod(init)
    update = staticmethod(update)

    def __init__(
        self,
        vars=None,
        *,
        learning_rate,
        batch_size=None,
        preconditioner=None,
        n_steps=10,
        temperature=1.0,
        model=None,
        rng=None,
        initial_point=None,
        compile_kwargs=None,
        blocked=True,
    ):
        super().__init__(
            vars,
            batch_size=batch_size,
            learning_rate=learning_rate,
            n_steps=n_steps,
            temperature=temperature,
            preconditioner=preconditioner,
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=blocked,
        )
