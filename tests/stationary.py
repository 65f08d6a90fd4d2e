"""The oracle: on a Gaussian target every update is a linear map, so its law is exact.

``x' = A x + B z`` with z standard normal, injected noise and gradient noise alike. The stationary
covariance solves Σ = A Σ Aᵀ + B Bᵀ. `draw_map` reads A and B off the code by unit vectors and a
scripted generator, without a seed; `sghmc_map` and `sgld_map` write them down from the papers.
"""

import numpy as np
import pytensor.tensor as pt

from scipy.linalg import block_diag, solve_discrete_lyapunov

from pymc_sghmc.gradients.coordinates import PreconditionedGradient
from pymc_sghmc.gradients.thermometer import Thermometer

# A correlated target, its gradient noise, and the coordinates in which the laws are tested.
H = np.array([[2.0, 0.6, -0.3], [0.6, 1.0, 0.4], [-0.3, 0.4, 1.5]])
V = np.array([[3.0, 1.0, 0.0], [1.0, 2.0, -0.5], [0.0, -0.5, 4.0]])
P_DIAG = np.array([0.5, 1.0, 0.7])
P_DENSE = np.linalg.inv(H) + 0.1
PRECONDITIONERS = {"none": None, "diag": P_DIAG, "dense": P_DENSE}


class Script:
    """Stands for a generator: hands out prescribed normals, zeros by default, and counts them."""

    def __init__(self, values=None):
        self.values, self.used = values, 0

    def standard_normal(self, shape, dtype=float):
        size = int(np.prod(shape))
        out = np.zeros(size)
        if self.values is not None:
            out = self.values[self.used : self.used + size]
        self.used += size
        return np.array(out, dtype=dtype).reshape(shape)


class NoisyLinear:
    """Gradient of −½ θᵀHθ plus noise N(0, V): the noise is in the gradient and is the minibatch."""

    def __init__(self, H, V):
        self.H, self.d = H, len(H)
        values, vectors = np.linalg.eigh(V)
        self.root = vectors * np.sqrt(np.maximum(values, 0))
        self.dtype = np.dtype(float)
        self.minibatches = []

    def draw_minibatch(self, rng):
        token = self.root @ rng.standard_normal((self.d,))
        self.minibatches.append(token)
        return token

    def __call__(self, position, minibatch):
        return -0.5 * position @ self.H @ position, -self.H @ position - minibatch

    # the same for compiled inner steps
    noisy_batch_sizes, compile_kwargs, has_graph = [], {"mode": "FAST_COMPILE"}, True

    def symbolic(self, position):
        noise = pt.vector("noise")
        return -pt.constant(self.H) @ position - noise, [noise], []

    def fixed_inputs(self):
        return ()

    def draw_minibatches(self, rng, k):
        tokens = rng.standard_normal((k, self.d)) @ self.root.T
        self.minibatches.extend(tokens)
        return (tokens,)

    def minibatch(self, drawn):
        return drawn[0]

    is_exact = likelihood_needs_others = False
    is_noisy = [True]

    def condition_on(self, point):
        pass

    def load_data(self):
        pass

    def noise_covariance(self, position, rng, full=False):
        V = self.root @ self.root.T
        return V if full else np.diag(V)


class NoisePulledBack:
    """Covariance of a gradient's noise in the coordinates of a preconditioner."""

    def __init__(self, gradient, factor):
        self.gradient = gradient
        self.L = np.eye(gradient.d) if factor is None else factor
        self.L = np.diag(self.L) if self.L.ndim == 1 else self.L

    def noise_covariance(self, position, rng, full=False):
        V = self.L.T @ self.gradient.noise_covariance(position, rng, full=True) @ self.L
        return V if full else np.diag(V)


def with_gradient(step, gradient):
    """Put another gradient in the place of the step's own."""

    def use(_):
        step.meter = step.target = Thermometer(gradient)
        step.quiet = NoisePulledBack(gradient, step.factor)
        if step.factor is not None:
            step.target = PreconditionedGradient(step.meter, step.factor)

    step.gradient, step._use, step.loops = gradient, use, {}
    use(gradient)
    return step


def draw_map(step, d):
    """A and B of one draw of ``step`` (all inner steps) on the state (θ, v), or θ for SGLD."""
    L = np.eye(d) if step.factor is None else step.factor
    L = np.diag(L) if L.ndim == 1 else L
    fresh = step.init(np.zeros(d), 1.0, Script())
    size = d * len(fresh)

    def run(x, values):
        step.begin_chain(Script(values))
        step.stop_tuning()
        # the state holds φ and v in the coordinates of the preconditioner
        step.state = type(fresh)(*np.linalg.solve(L, x.reshape(-1, d).T).T)
        point, _ = step.step({"x": x[:d].copy()})
        state = step.state._replace(position=np.linalg.solve(L, point["x"]))
        return np.concatenate([L @ part for part in state]), step.rng.used

    start, n_normals = run(np.zeros(size), None)
    assert not start.any()
    A = np.column_stack([run(e, None)[0] for e in np.eye(size)])
    B = np.column_stack([run(np.zeros(size), e)[0] for e in np.eye(n_normals)])
    return A, B


def stationary_covariance(A, Q):
    assert np.abs(np.linalg.eigvals(A)).max() < 1
    return solve_discrete_lyapunov(A, Q)


def sghmc_map(H, V, *, eta, alpha, beta_hat=0.0, T=1.0, P=None, n_steps=1, redraw=None):
    """Eq. 15 with η M⁻¹ = ηP in matrices. ``redraw`` every that many inner steps, from step 0."""
    d = len(H)
    P = np.eye(d) if P is None else P
    beta_hat = np.asarray(beta_hat)
    beta_hat = beta_hat if beta_hat.ndim == 2 else np.diag(np.broadcast_to(beta_hat, d))
    zero, one = np.zeros((d, d)), np.eye(d)
    A = np.block([[one, one], [-eta * P @ H, (1 - alpha) * one - eta * P @ H]])
    noise = 2 * (alpha * one - beta_hat) @ P * eta * T + eta**2 * P @ V @ P
    Q = block_diag(zero, noise)
    R, RQ = block_diag(one, zero), block_diag(zero, eta * T * P)
    A_draw, Q_draw = np.eye(2 * d), np.zeros((2 * d, 2 * d))
    for t in range(n_steps):
        if redraw and t % redraw == 0:
            A_draw, Q_draw = R @ A_draw, R @ Q_draw @ R.T + RQ
        A_draw, Q_draw = A @ A_draw, A @ Q_draw @ A.T + Q
    return A_draw, Q_draw


def sgld_map(H, V, *, eta, T=1.0, P=None, n_steps=1):
    """Eq. 12 in matrices."""
    d = len(H)
    P = np.eye(d) if P is None else P
    A = np.eye(d) - eta * P @ H
    Q = 2 * eta * T * P + eta**2 * P @ V @ P
    A_draw, Q_draw = np.eye(d), np.zeros((d, d))
    for _ in range(n_steps):
        A_draw, Q_draw = A @ A_draw, A @ Q_draw @ A.T + Q
    return A_draw, Q_draw


def baoab_map(H, V, *, eta, alpha, beta_hat=0.0, T=1.0, P=None, n_steps=1, redraw=None):
    """Half a drift, Ornstein-Uhlenbeck, half a drift, kick, as a product of their matrices."""
    d = len(H)
    P = np.eye(d) if P is None else P
    beta_hat = np.asarray(beta_hat)
    beta_hat = beta_hat if beta_hat.ndim == 2 else np.diag(np.broadcast_to(beta_hat, d))
    zero, one = np.zeros((d, d)), np.eye(d)
    drift = np.block([[one, one / 2], [zero, one]])
    friction = block_diag(one, (1 - alpha) * one)
    kick = np.block([[one, zero], [-eta * P @ H, one]])
    injected = alpha * (2 - alpha) * one - (2 - alpha) ** 2 / 2 * beta_hat
    noise = block_diag(zero, eta * T * injected @ P)
    gradient_noise = block_diag(zero, eta**2 * P @ V @ P)
    A_draw, Q_draw = np.eye(2 * d), np.zeros((2 * d, 2 * d))
    R, RQ = block_diag(one, zero), block_diag(zero, eta * T * P)
    for t in range(n_steps):
        if redraw and t % redraw == 0:
            A_draw, Q_draw = R @ A_draw, R @ Q_draw @ R.T + RQ
        for A, Q in ((drift, 0), (friction, noise), (drift, 0), (kick, gradient_noise)):
            A_draw, Q_draw = A @ A_draw, A @ Q_draw @ A.T + Q
    return A_draw, Q_draw
