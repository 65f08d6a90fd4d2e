"""What one inner step does on a Gaussian, read off the sampler's own ``update``.

Along one direction of curvature h, on N(0, 1/h) and with gradient noise of variance V, a rule that
is linear in position and momentum is x' = Ax + Bz with standard normal z: calls with unit vectors
and prescribed normals give A and B, and Σ = AΣAᵀ + BBᵀ the variances that a chain will have. So a
sampler's bias and its speed are known from the rule itself, exactly and without a second formula.

A thermostat, a field of the state after the momentum, moves slowly where there are many unknowns:
it is held at the value at which it has no drift. Knows ``update`` and matrices, nothing else.
"""

import inspect
import math

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from scipy.optimize import brentq

__all__ = ["Law", "Rule", "at_rest", "inflation", "law", "relaxation"]

TOLERANCE = 1e-9  # of the check that a rule is linear
MOST_DOUBLINGS = 30  # of a thermostat's value, in search of the one at rest


class Rule(NamedTuple):
    """An update rule, and the type of its state."""

    update: Callable
    state_type: type  # a NamedTuple: position, and perhaps momentum and a thermostat

    @property
    def has_friction(self) -> bool:
        """Whether a friction is among the settings of ``update``."""
        return "friction" in _parameters(self.update)

    @property
    def has_noise_estimate(self) -> bool:
        """Whether an estimate of the gradient's noise is among the settings of ``update``."""
        return "noise_estimate" in _parameters(self.update)


@cache
def _parameters(update):
    """Names of the arguments of an update rule, which are asked for at every draw."""
    return frozenset(inspect.signature(update).parameters)


class Law(NamedTuple):
    """x' = Ax + Bz for x = (θ, v), all normals of a step in z, and what follows."""

    A: np.ndarray
    B: np.ndarray
    S: np.ndarray | None  # stationary covariance of x, or None where there is none
    drift: float = math.nan  # mean change of a thermostat in a step


class _Script:
    """Stands for a generator: hands out these normals, then zeros, and counts."""

    def __init__(self, values):
        self.values = values
        self.used = 0

    def standard_normal(self, shape, dtype=float):
        size = math.prod(shape)
        out = np.zeros(size)
        given = self.values[self.used : self.used + size]
        out[: len(given)] = given
        self.used += size
        return out.reshape(shape)


class _Line:
    """Gradient −hθ + √V z of one unknown; z is the minibatch."""

    def __init__(self, h, V):
        self.h = h
        self.root = math.sqrt(V)

    def draw_minibatch(self, rng):
        return self.root * rng.standard_normal((1,))

    def __call__(self, position, minibatch):
        return 0.0, minibatch - self.h * position


def law(rule, eta, h, V, held=(), **settings) -> Law:
    """Law of one inner step of ``rule`` along one direction, at temperature 1.

    Parameters
    ----------
    rule : Rule
    eta : float
        Learning rate.
    h, V : float
        Curvature of −log p, and variance of the gradient.
    held : tuple
        Values of the state's fields after the momentum.
    **settings
        Further arguments of ``rule.update``, such as the friction.

    Raises
    ------
    ValueError
        If the rule isn't linear in position and momentum.
    """
    n = len(rule.state_type._fields) - len(held)
    line = _Line(h, V)
    # In units of a standard deviation of θ and of v all entries of the matrices are of one size.
    units = np.array([1 / math.sqrt(h), math.sqrt(eta)])[:n]

    def run(x, z):
        script = _Script(z)
        old = rule.state_type(*(units * x)[:, None], *held)
        new, _ = rule.update(old, line, eta, script, **settings)
        return np.concatenate(new[:n]) / units, new[n:], script.used

    constant, _, m = run(np.zeros(n), [])
    C = np.column_stack([run(e[:n], e[n:])[0] for e in np.eye(n + m)])
    mixed = 1.5 - 0.4 * np.arange(n + m)  # a combination of all columns, of both signs
    found, _, used = run(mixed[:n], mixed[n:])
    error = max(np.abs(constant).max(), np.abs(found - C @ mixed).max())
    if used != m or not error <= TOLERANCE * np.abs(C).max():
        raise ValueError(
            f"{rule.update.__module__}.{rule.update.__qualname__} isn't linear in position and "
            "momentum on a Gaussian (with thermostats held), so that its law can't be read off it. "
            "Settings can't be found by a bias budget for such a rule: give them by hand."
        )
    A = C[:, :n]
    B = C[:, n:]
    scale = np.outer(units, 1 / units)
    if not _radius(A) < 1:
        return Law(scale * A, units[:, None] * B, None)
    S = np.linalg.solve(np.eye(n * n) - np.kron(A, A), (B @ B.T).ravel()).reshape(n, n)
    drift = math.nan
    if held:
        # Points of the covariance of (x, z): their mean is that of any quadratic function.
        covariance = np.eye(n + m)
        covariance[:n, :n] = S
        values, vectors = np.linalg.eigh(covariance)
        points = (vectors * np.sqrt((n + m) * np.maximum(values, 0))).T
        changed = [run(x[:n], x[n:])[1] for x in (*points, *-points)]
        drift = float(np.mean([new[0] for new in changed]) - held[0])
    return Law(scale * A, units[:, None] * B, np.outer(units, units) * S, drift)


def _radius(A):
    return np.abs(np.linalg.eigvals(A)).max()


def at_rest(rule, eta, h, V, **settings) -> tuple | None:
    """Values at which the state's fields after the momentum have no drift, or None.

    None: for no value that the search meets is the step stable and the drift zero. At most one such
    field is understood, a thermostat that rises while the chain is too hot.
    """
    others = rule.state_type._fields[2:]
    if not others:
        return ()
    if len(others) > 1:
        raise ValueError(
            f"{rule.state_type.__name__} has the fields {', '.join(others)} after the momentum: "
            "settings can be found for one thermostat at most. Give them by hand."
        )

    def drift(value):  # where the step is unstable, the thermostat would rise
        found = law(rule, eta, h, V, (np.array(value),), **settings)
        return 1.0 if found.S is None else found.drift

    near = 0.0  # a thermostat is a friction, too
    far = settings.get("friction", 1.0)
    rises = drift(near) > 0
    far = far if rises else -far
    for _ in range(MOST_DOUBLINGS):
        if (drift(far) > 0) != rises:
            return (np.array(brentq(drift, near, far, xtol=1e-13)),)
        near = far
        far = 2 * far
    return None


def inflation(rule, eta, h, V, mean_noise=None, **settings) -> float:
    """Relative bias of the variance of θ, exact: variance × h − 1, and ∞ where a step is unstable.

    A thermostat is one for all directions and rests where their ``mean_noise`` lets it, by default
    V.
    """
    held = at_rest(rule, eta, h, V if mean_noise is None else mean_noise, **settings)
    S = None if held is None else law(rule, eta, h, V, held, **settings).S
    return math.inf if S is None else float(S[0, 0] * h - 1)


def relaxation(rule, eta, h, mean_noise=0.0, **settings) -> float:
    """Relaxation per inner step of the mean: 1 − the spectral radius; −∞ if a thermostat has no rest.

    Noise doesn't matter but to a thermostat.
    """
    held = at_rest(rule, eta, h, mean_noise, **settings)
    if held is None:
        return -math.inf
    return 1 - float(_radius(law(rule, eta, h, 0.0, held, **settings).A))
