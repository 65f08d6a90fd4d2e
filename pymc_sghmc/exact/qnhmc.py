r"""Quasi-Newton Hamiltonian Monte Carlo (Fu, Luo & Zhang, UAI 2016).

Target: p(θ | D) ∝ exp(−U(θ)).        ODE, eq. 7: dθ/dt = C M⁻¹ p,  dp/dt = −C ∇U(θ).

Algorithm 2, with C an estimate of the inverse Hessian of U that is fixed within a proposal:

    p ~ N(0, M),  E₀ = U(θ) + pᵀM⁻¹p/2
    p ← p − ½ε C ∇U(q);  L times: q ← q + ε C M⁻¹ p, p ← p − ε C ∇U(q), the last one halved
    accept q with probability min{1, exp(E₀ − E₁)}

The paper prints exp(E₁ − E₀). With p = C p̃ this is HMC of inverse mass C M⁻¹ C: M = C makes it C,
M = I makes it C². Exact for any C and M that don't depend on the chain's position.
"""

import math
import warnings

from collections import deque
from itertools import islice
from typing import NamedTuple

import numpy as np

from pymc_sghmc.checks import positive_root, whole_steps
from pymc_sghmc.exact import curvature as curvatures
from pymc_sghmc.exact import trajectories
from pymc_sghmc.exact.leapfrog import LARGEST_ERROR, leapfrog, metropolis
from pymc_sghmc.exact.quasi_newton import Dense, diagonal, identity
from pymc_sghmc.exact.step import HamiltonianStep

__all__ = ["QNHMC", "QNHMCState", "init", "update"]

# Unknowns up to which B is a matrix: its O(d²) product costs less than most gradients.
MAX_DENSE = 1000
# m of limited memory: O(md) stays below a fifth of a gradient of 1 ms at d = 5,000.
MEMORY = 10
# Unknowns up to which eigenvalues are those of each draw's C; above, of up to so many draws ago.
MAX_EXACT = 200
MAX_STALE = 20


class QNHMCState(NamedTuple):
    """State of QNHMC."""

    position: np.ndarray  # θ, (d,)
    gradient: np.ndarray  # ∇log p(θ), (d,)
    logp: float


def init(position, density):
    """State at ``position``; ``density`` gives log p and its gradient."""
    logp, gradient = density(position)
    return QNHMCState(position, gradient, logp)


def update(state, density, step_size, rng, *, inverse_hessian, mass, n_steps, path=None, follow=0):
    """Algorithm 2 of Fu et al. (2016), lines 3 to 23 without those that refresh B.

    (position, gradient) of the trajectory are appended to ``path``, if there is one. ``follow``
    further steps are taken at most, without a bearing on the draw, to see when the trajectory turns
    back. Returns the state, statistics, and that time.
    """
    theta, grad, logp = state
    epsilon = step_size
    C = inverse_hessian
    M = mass
    L = n_steps
    z = rng.standard_normal(theta.shape)
    p = M.draw(z)  # line 4
    E0 = -logp + z @ z / 2  # line 5, eq. 2: pᵀM⁻¹p = zᵀz
    new = None
    E1 = math.inf
    turn = None
    points = leapfrog(theta, p, grad, density, epsilon, C, M)  # lines 6 to 15
    for i, (q, p, logp_q, grad_q) in enumerate(islice(points, L + follow), start=1):
        if not (-logp_q - E0 <= LARGEST_ERROR and np.isfinite(grad_q).all()):
            break  # diverged; the kinetic energy can't make up for it, as it is positive
        if turn is None and follow and (q - theta) @ C.inverse_product(p) < 0:
            turn = i * epsilon
        if i <= L and path is not None:
            path.append((q, grad_q))
        if i == L:
            new = QNHMCState(q, grad_q, logp_q)
            E1 = -logp_q + p @ M.inverse_product(p) / 2  # line 17
        if i >= L and (not follow or turn is not None):
            break
    accepted, info = metropolis(E0, E1, rng)  # lines 18 to 23
    if turn is None and not info["diverging"]:
        turn = i * epsilon  # and more
    state = new if accepted else state
    info |= {"n_steps": i, "model_logp": state.logp}
    return state, info, turn


class QNHMC(HamiltonianStep):
    r"""Quasi-Newton Hamiltonian Monte Carlo.

    HMC on all data with a BFGS estimate C of the inverse Hessian learnt while tuning, for
    posteriors that are badly scaled or correlated:

    .. math:: \dot\theta = C M^{-1} p, \qquad \dot p = -C \nabla U(\theta)

    Exact: once tuning stops, C, step size and the law of the number of steps stay as they are.
    Nothing needs to be set.

    Parameters
    ----------
    vars : list, optional
        Unknowns to sample; default: all continuous ones of the model.
    step_size : "auto" or float, default "auto"
        ε of a leapfrog step, in posterior standard deviations if C is right. "auto": PyMC's dual
        averaging to ``target_accept`` while tuning.
    n_steps : "auto", int or pair of int, default "auto"
        L, leapfrog steps of a trajectory. "auto": a random part, .35 to .75, of the time after
        which trajectories turned back while tuning; on a Gaussian that is around a quarter of a
        period, after which a draw forgets the last one. An int is the paper's fixed number, which
        can fall in step with a period of the posterior; a pair (lowest, highest) is drawn
        uniformly.
    mass : "inverse_hessian", "identity" or array of shape (d,) or (d, d), default "inverse_hessian"
        M. "inverse_hessian": M = C, which makes the dynamics those of HMC with inverse mass C and
        takes the condition number out. "identity" is the paper's, with inverse mass C², which
        inverts the condition number instead. An array is constant.
    memory : int, optional
        m: limited-memory BFGS with so many curvature pairs and O(md) per step. Default: dense BFGS
        up to 1,000 unknowns, above that 10 pairs.
    adapt : {"tune", "always"}, default "tune"
        "tune": C is frozen when tuning stops, so that the chain after it is exactly invariant.
        "always" is the paper's Algorithm 2 to the letter, which follows the trajectories for ever.
        Its draws are biased, and a warning says so.
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
    blocked : bool, default True
        One step for all unknowns. ``False`` makes one step for each.

    Raises
    ------
    ValueError
        If an argument is out of range, or there are no continuous unknowns.

    Notes
    -----
    Statistics are those of ``pm.HamiltonianMC`` and ``curvature_pairs_kept``,
    ``curvature_pairs_skipped``, ``condition`` (of C), ``largest_eigval`` and ``smallest_eigval``.

    References
    ----------
    .. [1] Fu, Luo & Zhang (2016), Quasi-Newton Hamiltonian Monte Carlo. UAI.
    .. [2] Nocedal & Wright (2006), Numerical Optimization, chapters 6 and 7.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import QNHMC
    >>> x = np.random.default_rng(0).normal(50.0, 10.0, size=200)  # not centred
    >>> y = 1.0 + 0.2 * x + np.random.default_rng(1).normal(size=200)
    >>> with pm.Model():
    ...     a, b = pm.Normal("a", 0, 10), pm.Normal("b", 0, 10)
    ...     _ = pm.Normal("y", a + b * x, 1, observed=y)
    ...     idata = pm.sample(step=QNHMC(), chains=2, random_seed=1, progressbar=False)
    >>> exact = np.linalg.solve([[200 + 0.01, x.sum()], [x.sum(), x @ x + 0.01]], [y.sum(), x @ y])
    >>> bool(abs(idata.posterior["b"].mean() - exact[1]) < 0.001)
    True
    >>> int(idata.sample_stats["n_steps"].mean()) <= 3  # leapfrog steps of a draw
    True
    """

    name = "qnhmc"
    init = staticmethod(init)

    def __init__(
        self,
        vars=None,
        *,
        step_size="auto",
        n_steps="auto",
        mass="inverse_hessian",
        memory=None,
        adapt="tune",
        target_accept=0.8,
        model=None,
        rng=None,
        initial_point=None,
        compile_kwargs=None,
        blocked=True,
    ):
        self.n_steps = trajectories.checked_steps(n_steps)
        if memory is not None:
            memory = whole_steps("memory", memory, "curvature pairs")
        if adapt not in ("tune", "always"):
            raise ValueError(f'adapt={adapt!r}: must be "tune" or "always".')
        self.adapt = adapt
        super().__init__(
            vars,
            step_size=step_size,
            target_accept=target_accept,
            model=model,
            rng=rng,
            initial_point=initial_point,
            compile_kwargs=compile_kwargs,
            blocked=blocked,
        )
        self.memory = MEMORY if memory is None and self.d > MAX_DENSE else memory
        self.mass = _checked_mass(mass, self.d)
        self.settings |= {"n_steps": n_steps, "memory": memory, "adapt": adapt, "mass": mass}
        if adapt == "always":
            warnings.warn(
                'QNHMC(adapt="always"): the inverse Hessian goes on following the chain, whose '
                "draws are biased for it, however many there are; neither R-hat nor the "
                "acceptance rate "
                'shows that. Use it to compare with the paper, and adapt="tune" for a posterior.',
                UserWarning,
                stacklevel=2,
            )
        self.begin_chain(self.rng)

    def begin(self):
        """Forget what was learnt."""
        self.curvature = curvatures.begin(self.d, self.memory, for_ever=self.adapt == "always")
        self.extremes = (None, (1.0, 1.0))
        self.noticed = False

    def draw(self, state, step_size):
        """One proposal; while adapting, C and the turning time from it."""
        c = self.curvature
        C = c.inverse_hessian
        steps, follow = trajectories.length(self.n_steps, c, step_size, self.rng, self.tune)
        adapting = self.tune or self.adapt == "always"
        path = None
        if adapting and not c.window:
            path = deque([(state.position, state.gradient)], maxlen=c.memory and c.memory + 1)
        state, info, turn = update(
            state,
            self.density,
            step_size,
            self.rng,
            inverse_hessian=C,
            mass=C if self.mass is None else self.mass,
            n_steps=steps,
            path=path,
            follow=follow,
        )
        if path is not None:
            c = curvatures.follow(c, path, info["accepted"])
        elif adapting:
            c = curvatures.gather(
                c,
                state.position,
                state.gradient,
                lambda position: self.density(position)[1],
                turn if follow else None,
            )
        self.curvature = c
        smallest, largest = self._extremes(c)
        return state, info | {
            "path_length": steps * step_size,
            "smallest_eigval": smallest,
            "largest_eigval": largest,
            "condition": largest / smallest if smallest > 0 else math.inf,
            "curvature_pairs_kept": c.kept,
            "curvature_pairs_skipped": c.skipped,
            "notice": self._notice(),
        }

    def _extremes(self, c):
        """Extreme eigenvalues of C; of a large one that follows each draw, of some draws ago."""
        known, extremes = self.extremes
        if known is not c.inverse_hessian:
            if self.d <= MAX_EXACT or c.window or not self.tune or c.n_draws % MAX_STALE == 0:
                extremes = c.inverse_hessian.extremes()
                self.extremes = (c.inverse_hessian, extremes)
        return extremes

    def _notice(self):
        """Words for the first draw, where tuning was too short to learn C."""
        c = self.curvature
        needed = self.d if self.memory is None else self.memory
        if self.tune or c.kept >= needed or self.noticed:
            return None
        self.noticed = True
        return (
            f"QNHMC learnt its inverse Hessian from {c.kept} curvature pairs in {c.n_draws} tuning "
            f"draws, and {self.d} unknowns need {needed} or more. The draws are right but slow to "
            "mix: raise tune."
        )


def _checked_mass(mass, d):
    """M as a matrix with products, or None for C."""
    if isinstance(mass, str):
        if mass not in ("inverse_hessian", "identity"):
            raise ValueError(
                f'mass={mass!r}: pass "inverse_hessian", "identity" or an array of shape ({d},) or '
                f"({d}, {d})."
            )
        return None if mass == "inverse_hessian" else identity(d, dense=False)
    matrix = np.asarray(mass, dtype=float)
    if matrix.shape not in ((d,), (d, d)):
        raise ValueError(f"mass of shape {matrix.shape}: must be ({d},) or ({d}, {d}).")
    root = positive_root(matrix)
    if root is None:
        raise ValueError("mass: must be finite, symmetric and positive definite.")
    return diagonal(root) if matrix.ndim == 1 else Dense.of(matrix)
