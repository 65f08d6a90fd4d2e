"""The oracle: on a Gaussian target every update is a linear map, so its law is exact.

``x' = A x + B z`` with z standard normal, injected noise and gradient noise alike. The stationary
covariance solves Σ = A Σ Aᵀ + B Bᵀ. `draw_map` reads A and B off the code by unit vectors and a
scripted generator, without a seed; `sghmc_map` and `sgld_map` write them down from the papers.
"""

import math

import numpy as np
import pytensor.tensor as pt

from scipy.linalg import block_diag, solve_discrete_lyapunov

from pymc_sghmc.gradients.density import Density
from pymc_sghmc.models.contract import Group
from pymc_sghmc.rows.data import InMemory, Minibatch, Minibatches
from pymc_sghmc.tuning.chain_tuning import ByHand

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


class NoisyRows:
    """Which noise comes up in a minibatch: its rows are rows of an array of noise."""

    independent = True

    def __init__(self, V):
        values, vectors = np.linalg.eigh(V)
        self.root = vectors * np.sqrt(np.maximum(values, 0))
        self.drawn = []

    def draw(self, rng, place, k):
        """Draw ``k`` minibatches of one row, N(0, V)."""
        noise = rng.standard_normal((k, len(self.root))) @ self.root.T
        self.drawn.extend(noise)
        return Minibatches((np.arange(k)[:, None],), (None,), (noise,)), place

    def probe(self, rng):
        """Return a minibatch whose rows tell V exactly: 2d of them, on both sides of zero."""
        n = 2 * len(self.root)
        noise = math.sqrt(n * (n - 1) / 2) * np.vstack([self.root.T, -self.root.T])
        return Minibatch((np.arange(n),), (noise,))


class Quadratic(Density):
    """−½ θᵀHθ, without rows."""

    dtype = weights_dtype = np.dtype(float)
    has_graph = True  # the gradient has one, below
    compile_kwargs = {"mode": "FAST_COMPILE"}

    def __init__(self, H):
        self.H, self.d = H, len(H)

    def __call__(self, position, prior_weight, row_weights, rows, arrays):
        gradient = -self.H @ position
        return prior_weight * position @ gradient / 2, prior_weight * gradient


class NoisyLinear:
    """Gradient of −½ θᵀHθ plus noise N(0, V): the noise is in the gradient and is the minibatch."""

    is_exact = False

    def __init__(self, H, V):
        self.H, self.order = H, NoisyRows(V)
        self.density = Quadratic(H)
        # minibatches of one of two rows, in whose place `order` draws noise
        group = Group(2, 1, [], [None])
        self.data = InMemory([group], [np.zeros((2, len(H)))], np.dtype(float), np.asarray)

    def draw_minibatch(self, rng):
        """Draw a minibatch, for an ``update`` that is called without a step."""
        return self.order.draw(rng, None, 1)[0].one(0)

    def __call__(self, position, minibatch):
        [rows], [noise] = minibatch
        return -0.5 * position @ self.H @ position, -self.H @ position - noise[rows].mean(axis=0)

    def symbolic(self, position, reports=False):
        rows, H, noise = pt.lvector("rows"), pt.matrix("H"), pt.matrix("noise")
        return None, -H @ position - noise[rows].mean(axis=0), [rows], [H, noise]

    def fixed_inputs(self, arrays):
        return (self.H, *arrays)


def with_gradient(step, gradient):
    """Put another gradient in the place of the step's own, from which its targets are made."""
    step.tuner.gradient, step.tuner.gradients = gradient, (gradient, None, None)
    return step


def draw_map(step, d):
    """A and B of one draw of ``step`` (all inner steps) on the state (θ, v), or θ for SGLD."""
    L = step.tuner.target(ByHand()).coordinates.matrix()
    fresh = step.init(np.zeros(d), 1.0, Script())
    size = d * len(fresh)

    def run(x, values):
        step.begin_chain(Script(values))
        step.stop_tuning()
        # the state holds φ and v in the coordinates of the preconditioner
        step.chain.state = type(fresh)(*np.linalg.solve(L, x.reshape(-1, d).T).T)
        point, _ = step.step({"x": x[:d].copy()})
        state = step.chain.state._replace(position=np.linalg.solve(L, point["x"]))
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
