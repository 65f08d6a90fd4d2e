r"""Stochastic gradient Langevin dynamics (Welling & Teh 2011): the first-order limit of SGHMC.

Target: p(θ | D) ∝ exp(−U(θ)).        SDE: dθ = −∇U(θ) dt + N(0, 2T dt).

Eq. 12 of Chen, Fox & Guestrin (2014), with η = dt² M⁻¹:

    θ ← θ − η ∇Ũ(θ) + N(0, 2ηT)

Without gradient noise the variance on a Gaussian of precision λ is (1/λ) T / (1 − ηλ/2): a bias of
order 1 in η. Gradient noise of covariance V adds ηV/(2λ) to leading order.
"""

from typing import NamedTuple

import numpy as np

from pymc_sghmc.step.step import StochasticGradientStep
from pymc_sghmc.tuning.budget import inflation, largest_learning_rate, relaxation

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

    Finds its settings as `SGHMC` does. Its bias is of first order in η, so that it needs shorter
    steps than SGHMC: several times as many inner steps for as many effective draws.

    Parameters
    ----------
    vars : list, optional
        Unknowns to sample; default: all continuous ones of the model.
    batch_size : int or dict of {str: int}, optional
        Rows in a minibatch, drawn anew at every inner step. Likelihoods with different numbers of
        rows take a dict that names observed variables, data containers or dims. Default: the
        batches of ``pm.Minibatch``, or all data.
    data : dict of {str: array} or loader, optional
        Data too large for the model, which is built with a few of their rows in ``pm.Data``: arrays
        such as ``np.memmap`` by the names of these containers, of which no copy is made, or an
        iterable of blocks of rows, see `pymc_sghmc.loaders`. Blocks are gone through in passes,
        without replacement.
    replace : bool, default True
        Whether a row may come up again before all others have. With ``False``, and with a loader,
        noise of the gradient isn't independent from step to step and is never compensated.
    learning_rate : "auto", float or callable, default "auto"
        η, in units of squared unconstrained unknowns (with a ``preconditioner``, η multiplies it
        and has no unit), or a schedule ``t -> η_t`` from `pymc_sghmc.schedules`. "auto": the
        largest up to 0.25 in units of the posterior's variances whose predicted bias is within
        ``target_bias``. Welling & Teh's ε is 2η; blackjax's ``step_size`` is η, and so is ``dt`` of
        SGMCMCJax's ``sgld``.
    gradient : {"auto", "plain", "control_variates"}, default "auto"
        How minibatches estimate the gradient: see `SGHMC`. "auto" takes what mixes faster at the
        same bias, chain by chain, by the noise measured.
    preconditioner : "auto", None, "diag", "dense" or array of shape (d,) or (d, d), default "auto"
        M⁻¹, best near the posterior (co)variance of the raveled unconstrained unknowns, in the
        order of ``model.value_vars``; ``None`` is 1. "dense" and "diag" take it from the curvature
        at the centre. "auto": dense up to 1,000 unknowns, above that diagonal; and 1 with a given
        learning rate, which then has the unknowns' unit.
    target_bias : float, default 0.05
        Relative bias of the variances that automatic settings may cost: 0.05 is 2.5 % of a standard
        deviation. SGLD uses all of it.
    centre : dict, optional
        Point for control variates and curvature, such as ``pm.find_MAP()`` returns. Default: the
        mode that the step finds, or the mean of the tuning draws where they leave the mode.
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
    ...     step = SGLD(batch_size=100)
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
        batch_size=None,
        data=None,
        replace=True,
        learning_rate="auto",
        gradient="auto",
        preconditioner="auto",
        target_bias=0.05,
        centre=None,
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
            data=data,
            replace=replace,
            learning_rate=learning_rate,
            n_steps=n_steps,
            temperature=temperature,
            preconditioner=preconditioner,
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=blocked,
            gradient=gradient,
            centre=centre,
            target_bias=target_bias,
        )
        self.prepare()

    def choose(self, tuning):
        """Largest η, or the given one, and the bias to expect."""
        noise = float(tuning.noise.max()) / (self.temperature or 1.0)
        h, slow = self.setup.stiffness, self.setup.slowness

        def bias(eta):
            return inflation("sgld", eta, None, noise, h)

        if self.schedule is None:
            eta = largest_learning_rate(bias, self.target_bias, tuning.limit / h)
        else:
            eta = self.schedule(0)
        rate = relaxation("sgld", eta, None, slow)
        return tuning._replace(learning_rate=eta, bias=bias(eta), rate=rate)
