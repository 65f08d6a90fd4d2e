"""HMC-BFGS by ensemble chain adaptation (Zhang & Sutton, NIPS 2011).

Target of K states: p(θ₁ | D) ⋯ p(θ_K | D). Each draw moves the state that has waited longest by one
proposal of HMC whose inverse mass C is the L-BFGS estimate from the K − 1 others:

    C from the pairs between the others, in order of falling U
    p ~ N(0, C⁻¹),  E₀ = U(θ) + pᵀCp/2,  L leapfrog steps of dθ/dt = C p, dp/dt = −∇U(θ)
    accept with probability min{1, exp(E₀ − E₁)}

C doesn't depend on the state that moves, so that the chain of K states is exact without an end of
adaptation: a Metropolis step within Gibbs sampling.
"""

import math

from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from scipy.linalg import LinAlgError

from pymc_sghmc.checks import whole_steps
from pymc_sghmc.exact.leapfrog import leapfrog, metropolis
from pymc_sghmc.exact.quasi_newton import identity, lbfgs
from pymc_sghmc.exact.step import HamiltonianStep

__all__ = ["HMCBFGS", "HMCBFGSState", "init", "inverse_hessian", "update"]


class HMCBFGSState(NamedTuple):
    """K states, the one that has waited longest first and the last draw at the end."""

    positions: np.ndarray  # θ₁ … θ_K, (K, d)
    gradients: np.ndarray  # of log p, (K, d)
    logps: np.ndarray  # (K,)

    @property
    def position(self):
        """θ of the last draw."""
        return self.positions[-1]

    @property
    def gradient(self):
        """∇log p at the last draw."""
        return self.gradients[-1]

    @property
    def logp(self):
        """Log p at the last draw."""
        return float(self.logps[-1])


def init(position, density, n_states=5):
    """K copies of ``position``, which part as they move."""
    logp, gradient = density(position)
    return HMCBFGSState(*(np.stack([part] * n_states) for part in (position, gradient, logp)))


def inverse_hessian(positions, gradients, logps):
    """C from states, and its number of pairs: L-BFGS between successive ones in order of falling U."""
    order = np.argsort(logps, kind="stable")
    pairs = ((positions[j] - positions[i], gradients[i] - gradients[j]) for i, j in pairwise(order))
    pairs = [(s, y) for s, y in pairs if s @ y > 1e-12 * math.sqrt((s @ s) * (y @ y))]
    d = positions.shape[1]
    if pairs:
        try:
            return lbfgs(np.ones(d), *np.stack(pairs, axis=-1)), len(pairs)
        except LinAlgError:  # by round-off
            pass
    return identity(d, dense=False), 0


def update(state, density, step_size, rng, *, n_steps):
    """One draw: a proposal of HMC for the first state, which goes to the end of the queue."""
    theta, grad, logp = (part[0] for part in state)
    epsilon = step_size
    L = n_steps
    C, n_pairs = inverse_hessian(*(part[1:] for part in state))
    z = rng.standard_normal(theta.shape)
    v = C.draw(z)  # C p for p ~ N(0, C⁻¹)
    E0 = -logp + z @ z / 2  # pᵀCp = zᵀz
    points = islice(leapfrog(theta, v, grad, density, epsilon, C, mass=C), L)
    with np.errstate(all="ignore"):
        *_, (q, v, logp_q, grad_q) = points
        E1 = -logp_q + v @ C.inverse_product(v) / 2
    accepted, info = metropolis(E0, E1 if np.isfinite(grad_q).all() else math.inf, rng)
    moved = (q, grad_q, logp_q) if accepted else (theta, grad, logp)
    state = HMCBFGSState(
        *(np.concatenate([old[1:], [new]]) for old, new in zip(state, moved, strict=True))
    )
    smallest, largest = C.extremes()
    return state, info | {
        "n_steps": L,
        "path_length": L * epsilon,
        "model_logp": state.logp,
        "curvature_pairs_kept": n_pairs,
        "curvature_pairs_skipped": len(state.logps) - 2 - n_pairs,
        "smallest_eigval": smallest,
        "largest_eigval": largest,
        "condition": largest / smallest,
    }


class HMCBFGS(HamiltonianStep):
    r"""HMC-BFGS, Hamiltonian Monte Carlo with an ensemble's L-BFGS estimate for its mass.

    The peer of `QNHMC` in its paper, for comparisons; QNHMC needs fewer gradients. It goes on
    adapting and is exact nevertheless: a chain holds ``n_states`` states, and each is moved with
    what the others know. Draws are the states in turn, so that draws ``n_states`` apart are those
    of one state and correlated, while those between are not. Effective sizes and R-hat of all draws
    mislead: take them from every ``n_states``-th draw, ``idata.isel(draw=slice(None, None, 5))``.

    Parameters
    ----------
    n_states : int, default 5
        K, at least 2; 5 is the setting of Zhang & Sutton that Fu et al. (2016) take over. K = 2 has
        no pair, and is HMC with two states.
    step_size : "auto" or float, default "auto"
        ε of a leapfrog step. "auto": PyMC's dual averaging to ``target_accept`` while tuning.
    n_steps : int, default 10
        L, leapfrog steps of a proposal.
    target_accept : float, default 0.8
        Mean acceptance probability for the step size, as NUTS's.
    model : pm.Model, optional
        Default: the model of the context.
    rng : numpy.random.Generator or int, optional
        ``pm.sample(random_seed=...)`` replaces it.
    initial_point : dict, optional
        Gives the shapes of the unknowns; default: the model's initial point.
    compile_kwargs : dict, optional
        Keyword arguments of ``model.logp_dlogp_function``, such as ``{"mode": "NUMBA"}``.

    Raises
    ------
    ValueError
        If an argument is out of range, or the model has discrete unknowns: the ensemble must hold
        all that the density depends on.

    References
    ----------
    .. [1] Zhang & Sutton (2011), Quasi-Newton methods for Markov chain Monte Carlo. NIPS.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from hmc_bfgs import HMCBFGS
    >>> with pm.Model():
    ...     x = pm.Normal("x", 1.0, [0.1, 1.0], shape=2)
    ...     idata = pm.sample(300, tune=300, step=HMCBFGS(), chains=2, random_seed=1, progressbar=False)
    >>> idata.posterior["x"].std(("chain", "draw")).values.round(1)
    array([0.1, 1. ])
    """

    name = "hmc_bfgs"

    def __init__(
        self,
        *,
        n_states=5,
        step_size="auto",
        n_steps=10,
        target_accept=0.8,
        model=None,
        rng=None,
        initial_point=None,
        compile_kwargs=None,
    ):
        self.n_steps = whole_steps("n_steps", n_steps, "leapfrog steps")
        self.n_states = whole_steps("n_states", n_states, "states")
        if self.n_states < 2:
            raise ValueError(f"n_states={n_states!r}: an ensemble has at least 2 states.")
        super().__init__(
            None,
            step_size=step_size,
            target_accept=target_accept,
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=True,
        )
        self.settings |= {"n_steps": n_steps, "n_states": n_states}
        if self.shared:
            raise ValueError(
                f"HMCBFGS: {', '.join(self.shared)} would be left to other steps, and its "
                "ensemble of states holds for fixed values of them only. Use QNHMC."
            )
        self.begin_chain(self.rng)

    def begin(self):
        """Nothing is learnt beside the state."""
        self.curvature = None

    def init(self, position, density):
        """K copies of ``position``."""
        return init(position, density, self.n_states)

    def draw(self, state, step_size):
        """Move one of the states."""
        return update(state, self.density, step_size, self.rng, n_steps=self.n_steps)
