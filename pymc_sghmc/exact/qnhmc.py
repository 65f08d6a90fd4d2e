r"""Quasi-Newton Hamiltonian Monte Carlo (Fu, Luo & Zhang, UAI 2016).

Target: p(θ | D) ∝ exp(−U(θ)).        ODE, eq. 7: dθ/dt = C M⁻¹ p,  dp/dt = −C ∇U(θ).

Algorithm 2, with C an estimate of the inverse Hessian of U that is fixed within a proposal:

    p ~ N(0, M),  E₀ = U(θ) + pᵀM⁻¹p/2
    p ← p − ½ε C ∇U(q);  L times: q ← q + ε C M⁻¹ p, p ← p − ε C ∇U(q), the last one halved
    accept q with probability min{1, exp(E₀ − E₁)}

The paper prints exp(E₁ − E₀), with the wrong sign. With p = C p̃ this is HMC with inverse mass
C M⁻¹ C: M = C makes it C, and M = I makes it C². The sampler is exact for any C and M that do not
depend on the chain's position.
"""

import math
import warnings

from collections import deque
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from numpy.typing import ArrayLike
from pymc.model import Model

from pymc_sghmc.checks import positive_root, whole_steps
from pymc_sghmc.exact import curvature as curvatures
from pymc_sghmc.exact import trajectories
from pymc_sghmc.exact.leapfrog import LARGEST_ERROR, Density, leapfrog, metropolis
from pymc_sghmc.exact.quasi_newton import MAX_EXACT, Dense, Matrix, diagonal, identity
from pymc_sghmc.exact.step import HamiltonianStep
from pymc_sghmc.protocols import Array

__all__ = ["QNHMC", "QNHMCState", "init", "update"]

# Number of parameters up to which B is a matrix: its O(d²) product costs less than most gradients.
MAX_DENSE = 1000
# m of limited memory: O(md) stays below a fifth of a gradient of 1 ms at d = 5,000.
MEMORY = 10
# While a C of more than `MAX_EXACT` rows follows each draw, its eigenvalues are computed once in so
# many draws.
MAX_STALE = 20


class QNHMCState(NamedTuple):
    """State of QNHMC."""

    position: Array  # θ, (d,)
    gradient: Array  # ∇log p(θ), (d,)
    logp: float


def init(position: Array, density: Density) -> QNHMCState:
    """State at ``position``; ``density`` gives log p and its gradient."""
    logp, gradient = density(position)
    return QNHMCState(position, gradient, logp)


def update(
    state: QNHMCState,
    density: Density,
    step_size: float,
    rng: np.random.Generator,
    *,
    inverse_hessian: Matrix,
    mass: Matrix,
    n_steps: int,
    path: deque[tuple[Array, Array]] | list[tuple[Array, Array]] | None = None,
    follow: int = 0,
) -> tuple[QNHMCState, dict[str, Any], float | None]:
    """Algorithm 2 of Fu et al. (2016), lines 3 to 23 without those that refresh B.

    Parameters
    ----------
    state : QNHMCState
        The last draw.
    density : callable
        Log p and its gradient at a position.
    step_size, n_steps : float, int
        ε and L.
    rng : numpy.random.Generator
        Draws the momentum and decides on acceptance.
    inverse_hessian, mass : Dense or LowRank
        C and M.
    path : deque or list, optional
        (position, gradient) of each step of the trajectory are appended to it.
    follow : int, default 0
        Further steps at most, which do not change the draw, to see when the trajectory turns back.

    Returns
    -------
    state : QNHMCState
        The next draw.
    statistics : dict
        Statistics of the draw.
    turn : float or None
        Time at which the trajectory turned back, or its whole length if it did not. None if it
        diverged.
    """
    theta, grad, logp = state
    epsilon = step_size
    C = inverse_hessian
    M = mass
    L = n_steps
    z = rng.standard_normal(theta.shape)
    p = M.draw(z)  # line 4
    E0 = float(-logp + z @ z / 2)  # line 5, eq. 2: pᵀM⁻¹p = zᵀz
    new = state
    E1 = math.inf
    turn = None
    points = leapfrog(theta, p, grad, density, epsilon, C, M)  # lines 6 to 15
    for i, (q, p, logp_q, grad_q) in enumerate(islice(points, L + follow), start=1):
        if not (-logp_q - E0 <= LARGEST_ERROR and np.isfinite(grad_q).all()):
            break  # diverged: the kinetic energy is positive and cannot make up for it
        if turn is None and follow and (q - theta) @ C.inverse_product(p) < 0:
            turn = i * epsilon
        if i <= L and path is not None:
            path.append((q, grad_q))
        if i == L:
            new = QNHMCState(q, grad_q, logp_q)
            E1 = float(-logp_q + p @ M.inverse_product(p) / 2)  # line 17
        if i >= L and (not follow or turn is not None):
            break
    accepted, info = metropolis(E0, E1, rng)  # lines 18 to 23
    if turn is None and not info["diverging"]:
        turn = i * epsilon  # or later
    state = new if accepted else state
    info |= {"n_steps": i, "model_logp": state.logp}
    return state, info, turn


class QNHMC(HamiltonianStep):
    r"""Quasi-Newton Hamiltonian Monte Carlo.

    Hamiltonian Monte Carlo on all data, for posteriors in which parameters have very different
    scales or are correlated. While tuning it learns C, an estimate of the inverse Hessian of the
    negative log-density: on a Gaussian posterior, that is its covariance. It moves the chain by

    .. math:: \dot\theta = C M^{-1} p, \qquad \dot p = -C \nabla U(\theta)

    After tuning, draws are exact: C, the step size and the distribution of the number of steps no
    longer change, and each proposal is accepted or rejected by a Metropolis test. Nothing needs to
    be set.

    Parameters
    ----------
    vars : variable, or list of variables, optional
        Parameters to sample. Default: all continuous ones of the model.
    step_size : "auto" or float, default "auto"
        ε, the length of a leapfrog step. If C is right, its unit is one posterior standard
        deviation. "auto" is PyMC's dual averaging to ``target_accept`` while tuning.
    n_steps : "auto", int or pair of int, default "auto"
        L, the number of leapfrog steps in a trajectory. "auto" takes a random part, 0.35 to 0.75,
        of the time after which trajectories turned back while tuning. On a Gaussian posterior that
        is about a quarter of a period, after which a draw is independent of the last one. An int is
        the paper's fixed number, with which trajectories can return to where they began, if it
        happens to match a period of the posterior. A pair (lowest, highest) is drawn uniformly.
    mass : "inverse_hessian", "identity" or array of shape (d,) or (d, d), default "inverse_hessian"
        M. "inverse_hessian" is M = C. It makes the dynamics those of HMC with inverse mass C, in
        which all directions of a Gaussian posterior have the same scale. "identity" is the paper's
        choice, with inverse mass C², in which narrow directions become wide and wide ones narrow.
        An array is a constant M, in the order of the model's parameters, on PyMC's unconstrained
        scale.
    memory : int, optional
        m, the number of curvature pairs of limited-memory BFGS, which costs O(md) per step.
        Default: a dense matrix up to 1,000 parameters, and 10 pairs above that. Up to there, a
        product with the matrix costs less than most gradients.
    adapt : {"tune", "always"}, default "tune"
        "tune" keeps C fixed when tuning stops, so that draws are exact. "always" is the paper's
        Algorithm 2 to the letter, in which C follows the chain without end. Its draws are biased,
        and a warning says so.
    target_accept : float, default 0.8
        Mean acceptance probability that the step size aims at, between 0 and 1. The default is that
        of NUTS. With a larger one, steps are shorter, and divergences rarer.
    model : pm.Model, optional
        The model to sample. Default: the model whose ``with`` block the step is made in.
    rng : numpy.random.Generator or int, optional
        Source of random numbers, for a step that is used without ``pm.sample``, which replaces it
        by generators from its own ``random_seed``. Default: a new generator.
    initial_point : dict, optional
        Values of parameters on PyMC's unconstrained scale, which give their shapes. Default: the
        model's initial point. To choose where chains begin, pass ``initvals`` to ``pm.sample``.
    compile_kwargs : dict, optional
        Keyword arguments of ``model.logp_dlogp_function``, such as ``{"mode": "NUMBA"}``. Default:
        PyMC's.
    blocked : bool, default True
        Whether one step samples all parameters. ``False`` makes one step for each, which cannot
        learn correlations between them.

    Raises
    ------
    ValueError
        If an argument is out of range, or there are no continuous parameters.
    SamplingError
        While sampling, if the log-density or its gradient is not finite where a chain starts.

    Notes
    -----
    Statistics are those of ``pm.HamiltonianMC`` and, of C, ``condition`` (largest over smallest
    eigenvalue), ``largest_eigval``, ``smallest_eigval``, ``curvature_pairs_kept`` and
    ``curvature_pairs_skipped``.

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
        vars: Any = None,
        *,
        step_size: float | Literal["auto"] = "auto",
        n_steps: int | tuple[int, int] | Literal["auto"] = "auto",
        mass: ArrayLike | Literal["inverse_hessian", "identity"] = "inverse_hessian",
        memory: int | None = None,
        adapt: Literal["tune", "always"] = "tune",
        target_accept: float = 0.8,
        model: Model | None = None,
        rng: np.random.Generator | int | None = None,
        initial_point: dict[str, Any] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        blocked: bool = True,
    ) -> None:
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
                'QNHMC(adapt="always"): draws are biased, because the inverse Hessian keeps '
                'following the chain. Use adapt="tune" for a posterior, and "always" only to '
                "compare with the paper. More draws do not help, and neither R-hat nor the "
                "acceptance rate shows the bias.",
                UserWarning,
                stacklevel=2,
            )
        self.begin_chain(self.rng)

    def begin(self) -> None:
        """Forget what the last chain has learnt."""
        self.curvature = curvatures.begin(self.d, self.memory, for_ever=self.adapt == "always")
        self.extremes = _Extremes(None, 1.0, 1.0)
        self.has_warned = False

    def draw(self, state: QNHMCState, step_size: float) -> tuple[QNHMCState, dict[str, Any]]:
        """Make one proposal. While adapting, learn C and the turning time from it."""
        c = self.curvature
        C = c.inverse_hessian
        length = trajectories.length(self.n_steps, c, step_size, self.rng, self.tune)
        is_adapting = self.tune or self.adapt == "always"
        path: deque[tuple[Array, Array]] | None = None
        if is_adapting and not c.window:
            n_remembered = None if c.memory is None else c.memory + 1
            path = deque([(state.position, state.gradient)], maxlen=n_remembered)
        state, info, turn = update(
            state,
            self.density,
            step_size,
            self.rng,
            inverse_hessian=C,
            mass=C if self.mass is None else self.mass,
            n_steps=length.n_steps,
            path=path,
            follow=length.n_followed,
        )
        if path is not None:
            c = curvatures.follow(c, path, info["accepted"])
        elif is_adapting:
            c = curvatures.gather(
                c,
                state.position,
                state.gradient,
                lambda position: self.density(position)[1],
                turn if length.n_followed else None,
            )
        self.curvature = c
        extremes = self._extremes(c)
        return state, info | {
            "path_length": length.n_steps * step_size,
            "smallest_eigval": extremes.smallest,
            "largest_eigval": extremes.largest,
            "condition": (
                extremes.largest / extremes.smallest if extremes.smallest > 0 else math.inf
            ),
            "curvature_pairs_kept": c.kept,
            "curvature_pairs_skipped": c.skipped,
            "message": self._message(),
        }

    def _extremes(self, c: curvatures.Curvature) -> "_Extremes":
        """Return extreme eigenvalues of C, or of an earlier one while a large C keeps changing."""
        C = c.inverse_hessian
        follows_each_draw = self.tune and not c.window
        is_due = self.d <= MAX_EXACT or not follows_each_draw or c.n_draws % MAX_STALE == 0
        if self.extremes.matrix is not C and is_due:
            self.extremes = _Extremes(C, *C.extremes())
        return self.extremes

    def _message(self) -> str | None:
        """Return a warning, at the first draw after a tuning that was too short to learn C."""
        c = self.curvature
        needed = self.d if self.memory is None else self.memory
        if self.tune or c.kept >= needed or self.has_warned:
            return None
        self.has_warned = True
        return (
            f"QNHMC learnt its inverse Hessian from {c.kept} curvature pairs in {c.n_draws} tuning "
            f"draws, but {self.d} parameters need {needed} or more: raise tune. The draws are "
            "right, but the chain mixes slowly."
        )


class _Extremes(NamedTuple):
    """Extreme eigenvalues, and the matrix that they belong to."""

    matrix: Matrix | None
    smallest: float
    largest: float


def _checked_mass(mass: Any, d: int) -> Matrix | None:
    """Return M as a matrix with products, or None for C."""
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
