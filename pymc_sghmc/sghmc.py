r"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox & Guestrin 2014), Algorithm 2.

Target: p(θ, r) ∝ exp(−U(θ) − ½ rᵀM⁻¹r).
SDE (eq. 13): dθ = M⁻¹r dt,  dr = −∇U(θ) dt − CM⁻¹r dt + N(0, 2(C − B̂) dt) + N(0, 2B dt).

Eq. 15, with v = εM⁻¹r, η = ε²M⁻¹, α = εM⁻¹C, β̂ = εM⁻¹B̂:

    θ ← θ + v
    v ← v − η ∇Ũ(θ) − α v + N(0, 2(α − β̂) η T)

The gradient is taken at the new θ, with a fresh minibatch at every inner step. On a Gaussian
without gradient noise the variance of θ has a bias of order 2 in ε = √η at fixed friction C.
"""

from typing import NamedTuple

import numpy as np

from pymc_sghmc.faults import Fault, NonFinite
from pymc_sghmc.step import StochasticGradientStep, is_number, whole_steps

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

    .. math::
        \theta \leftarrow \theta + v, \qquad
        v \leftarrow v - \eta \nabla \tilde U(\theta) - \alpha v + N(0, 2(\alpha - \hat\beta)\eta T)

    Parameters
    ----------
    vars : list, optional
        Unknowns to sample; default: all continuous ones of the model.
    learning_rate : float or callable
        η, in units of squared unconstrained unknowns (with a ``preconditioner``, η multiplies it
        and has no unit), or a schedule ``t -> η_t`` from `pymc_sghmc.schedules`. Required. The
        paper takes η between 0.01/N and 0.1/N (Appendix G). Algorithm 2's settings convert by
        η = ε²M⁻¹, α = εM⁻¹C, β̂ = εM⁻¹B̂.
    batch_size : int or dict of {str: int}, optional
        Rows in a minibatch, drawn with replacement at every inner step. Likelihoods with different
        numbers of rows take a dict that names observed variables, data containers or dims. Default:
        the batches of ``pm.Minibatch``, or all data.
    friction : float, default 0.1
        α in (0, 1]; 1 − α is the momentum term of stochastic gradient descent. The paper uses 0.01
        to 0.1; the larger takes up more gradient noise and forgets a bad start sooner. At α = 1
        every step has fresh momentum: SGLD.
    noise_estimate : None, float, array of shape (d,), "diag" or "full", default None
        β̂ = ½ηV̂, the share of the friction's noise that the gradient already brings. ``None`` is
        β̂ = 0: variances come out too large by about ηV/(2α) in the preconditioner's units. A number
        or array is β̂ itself, at most α. "diag" and "full" estimate V from the empirical Fisher
        information, once per draw, in the coordinates in which the preconditioner is 1; where β̂
        exceeds α it is cut to α during tuning and an error afterwards. Exact at temperature 1.
    preconditioner : array of shape (d,) or (d, d), optional
        M⁻¹, best near the posterior (co)variance of the raveled unconstrained unknowns, in the
        order of ``model.value_vars``: then η = 0.1 is a long and 0.001 a cautious step. Default: 1.
    n_steps : int, default 10
        Inner steps per draw, the paper's m: PyMC's own cost per draw is that of one to three small
        gradients, and ten steps make it small. Draws hold the last position.
    resample_momentum_every : int, optional
        Inner steps k ≥ 2 after which the momentum is redrawn from N(0, ηT). The last gradient
        before a redraw is lost, which multiplies the variance by up to k/(k − 1). Default: never,
        the friction is enough.
    temperature : float, default 1.0
        T: the chain samples exp(−U/T). 1 is the posterior, 0 stochastic gradient descent with
        momentum, the paper's baseline.
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
    .. [1] Chen, Fox & Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo. ICML.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGHMC
    >>> y = np.random.default_rng(0).normal(3.0, 1.0, size=1000)
    >>> with pm.Model():
    ...     mu = pm.Normal("mu", 0, 10)
    ...     _ = pm.Normal("y", mu, 1, observed=y)
    ...     step = SGHMC(
    ...         batch_size=100, learning_rate=0.02, friction=0.5, noise_estimate="diag",
    ...         preconditioner=[1e-3],
    ...     )
    ...     idata = pm.sample(1000, tune=100, chains=2, step=step, random_seed=1, progressbar=False)
    >>> mu = idata.posterior["mu"]
    >>> bool(abs(mu.mean() - y.mean()) < 0.01), round(float(mu.std()), 2)
    (True, 0.03)
    """

    name = "sghmc"
    init = staticmethod(init)
    update = staticmethod(update)

    def __init__(
        self,
        vars=None,
        *,
        learning_rate,
        batch_size=None,
        friction=0.1,
        noise_estimate=None,
        preconditioner=None,
        n_steps=10,
        resample_momentum_every=None,
        temperature=1.0,
        model=None,
        rng=None,
        initial_point=None,
        compile_kwargs=None,
        blocked=True,
    ):
        if not (is_number(friction) and 0 < friction <= 1):
            raise ValueError(
                f"friction={friction!r}: must be a number in (0, 1]; 1 − friction is the momentum "
                "term. Without friction gradient noise heats the chain without bound."
            )
        self.friction = float(friction)
        self.estimated = isinstance(noise_estimate, str)
        if self.estimated:
            if noise_estimate not in ("diag", "full"):
                raise ValueError(
                    f"noise_estimate={noise_estimate!r}: pass None, a number, an array of shape (d,), "
                    '"diag" or "full".'
                )
            self.beta_hat, self.full = None, noise_estimate == "full"
        else:
            self.beta_hat = _checked_noise(
                0.0 if noise_estimate is None else noise_estimate, friction
            )
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
        super().__init__(
            vars,
            batch_size=batch_size,
            learning_rate=learning_rate,
            n_steps=n_steps,
            restart_every=resample_momentum_every,
            temperature=temperature,
            preconditioner=preconditioner,
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=blocked,
        )
        if np.ndim(self.beta_hat) == 1:
            if self.beta_hat.shape != (self.d,):
                raise ValueError(
                    f"noise_estimate has shape {self.beta_hat.shape}, but the step samples {self.d} "
                    f"unconstrained unknowns: pass an array of shape ({self.d},)."
                )
            if np.ndim(self.factor) == 2:
                raise ValueError(
                    "noise_estimate: an array of d entries has no meaning with a dense "
                    'preconditioner. Pass a number, "diag" or "full".'
                )
            self.beta_hat = self.beta_hat.astype(self.gradient.dtype)
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
        self.hyperparameters = {"friction": self.friction, "noise_estimate": self.beta_hat}
        self.measured = noise_estimate is not None

    def begin_draw(self, position):
        """Average V̂ over the draws with weights growing as t³ (κ_t = 4/(t+3) of Ahn et al.)."""
        if not self.estimated:
            return
        dense = np.ndim(self.factor) == 2
        V = self.gradient.noise_covariance(position, self.rng, full=self.full or dense)
        if not np.isfinite(V).all():
            raise NonFinite(position, V, np.nan)
        if dense:
            V = self.factor.T @ V @ self.factor
            V = V if self.full else np.diag(V)
        elif self.factor is not None:
            V = V * (np.outer(self.factor, self.factor) if self.full else self.factor**2)
        old = V if self.noise_covariance is None else self.noise_covariance
        self.noise_covariance = old + (V - old) * 4 / (self.n_tuned + self.n_kept + 4)
        self.largest_noise = float(
            np.linalg.eigvalsh(self.noise_covariance)[-1]
            if self.full
            else self.noise_covariance.max()
        )

    def update_arguments(self, learning_rate):
        """Friction and β̂ = ½ηV̂, with α ≥ β̂."""
        if not self.estimated:
            return self.hyperparameters
        alpha, eta = self.friction, learning_rate
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

    def gradient_noise(self, learning_rate):
        """Largest β̂/α over the unknowns; NaN where nothing is known of the noise."""
        if not self.measured:
            return np.nan
        if self.estimated:
            return 0.5 * learning_rate * self.largest_noise / self.friction
        return float(np.max(self.beta_hat)) / self.friction


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
