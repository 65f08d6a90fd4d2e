"""What one inner step does on a Gaussian, computed from the sampler's own ``update``.

Along one direction of curvature h, on N(0, 1/h) and with gradient noise of variance V, a rule that
is linear in position and momentum is x' = Ax + Bz with standard normal z. Calls with unit vectors
and prescribed normals give A and B. The stationary covariance S of x solves S = ASAᵀ + BBᵀ. So the
bias and the speed of a sampler are known exactly, without a second formula.

A thermostat, a field of the state after the momentum, moves slowly where there are many parameters.
It is held at the value at which it has no drift. Knows ``update`` and matrices, nothing else.
"""

import inspect
import math

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from scipy.optimize import brentq

from pymc_sghmc.gradients.metric import Array

__all__ = [
    "LinearStep",
    "Rule",
    "contraction_rate",
    "linear_step",
    "resting_thermostats",
    "variance_bias",
]

TOLERANCE = 1e-9  # of the check that a rule is linear
MOST_DOUBLINGS = 30  # of a thermostat's value, in search of the one without drift


class Rule(NamedTuple):
    """An update rule, and the type of its state."""

    update: Callable[..., Any]
    state_type: Any  # a NamedTuple: position, and perhaps momentum and a thermostat

    @property
    def has_friction(self) -> bool:
        """Whether a friction is among the settings of ``update``."""
        return "friction" in _parameters(self.update)

    @property
    def has_noise_estimate(self) -> bool:
        """Whether an estimate of the gradient's noise is among the settings of ``update``."""
        return "noise_estimate" in _parameters(self.update)


@cache
def _parameters(update: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of an update rule, which are asked for at every draw."""
    return frozenset(inspect.signature(update).parameters)


class LinearStep(NamedTuple):
    """x' = Ax + Bz for x = (θ, v), with all normals of a step in z, and what follows from it."""

    A: Array
    B: Array
    covariance: Array | None  # stationary, of x; None where there is none
    drift: float = math.nan  # mean change of a thermostat in a step


class _PrescribedNormals:
    """Stands for a generator: hands out these normals, then zeros, and counts."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.used = 0

    def standard_normal(self, shape: tuple[int, ...], dtype: Any = float) -> Array:
        size = math.prod(shape)
        normals = np.zeros(size)
        prescribed = self.values[self.used : self.used + size]
        normals[: len(prescribed)] = prescribed
        self.used += size
        return normals.reshape(shape)


class _GaussianGradient:
    """Gradient −hθ + √V z of one parameter; z is the minibatch."""

    def __init__(self, h: float, V: float) -> None:
        self.h = h
        self.root = math.sqrt(V)

    def draw_minibatch(self, rng: Any) -> Array:
        return self.root * rng.standard_normal((1,))

    def __call__(self, position: Array, minibatch: Array) -> tuple[float, Array]:
        return 0.0, minibatch - self.h * position


class _StepOnGaussian:
    """One step of a rule along one direction, in units in which all matrices are of one size."""

    def __init__(
        self,
        rule: Rule,
        eta: float,
        h: float,
        V: float,
        thermostats: Sequence[Array],
        settings: dict[str, Any],
    ) -> None:
        self.rule = rule
        self.eta = eta
        self.gradient = _GaussianGradient(h, V)
        self.thermostats = thermostats
        self.settings = settings
        self.n = len(rule.state_type._fields) - len(thermostats)  # of θ and v
        # standard deviations of θ and of v
        self.units = np.array([1 / math.sqrt(h), math.sqrt(eta)])[: self.n]

    def __call__(self, x: Array, z: Any) -> tuple[Array, Any, int]:
        """Return x', the thermostats after it, and the number of normals that it took."""
        normals = _PrescribedNormals(z)
        old = self.rule.state_type(*(self.units * x)[:, None], *self.thermostats)
        new, _ = self.rule.update(old, self.gradient, self.eta, normals, **self.settings)
        return np.concatenate(new[: self.n]) / self.units, new[self.n :], normals.used

    def matrix(self) -> Array:
        """Return A and B side by side, (n, n + m).

        Raises
        ------
        ValueError
            If the rule isn't linear in position and momentum.
        """
        n = self.n
        constant, _, m = self(np.zeros(n), [])
        AB = np.column_stack([self(e[:n], e[n:])[0] for e in np.eye(n + m)])
        mixed = 1.5 - 0.4 * np.arange(n + m)  # a combination of all columns, of both signs
        new, _, used = self(mixed[:n], mixed[n:])
        error = max(np.abs(constant).max(), np.abs(new - AB @ mixed).max())
        if used != m or not error <= TOLERANCE * np.abs(AB).max():
            update = self.rule.update
            raise ValueError(
                f"{update.__module__}.{update.__qualname__} isn't linear in position and momentum "
                "on a Gaussian. Pass its settings by hand: for such a rule they can't be chosen by "
                "a bias budget, as its stationary covariance can't be computed (with thermostats "
                "held)."
            )
        return AB

    def mean_drift(self, S: Array, n_normals: int) -> float:
        """Mean change of the thermostat over the stationary covariance S."""
        n = self.n
        size = n + n_normals
        # Points of the covariance of (x, z): their mean is that of any quadratic function.
        covariance = np.eye(size)
        covariance[:n, :n] = S
        values, vectors = np.linalg.eigh(covariance)
        points = (vectors * np.sqrt(size * np.maximum(values, 0))).T
        thermostats = [self(x[:n], x[n:])[1] for x in (*points, *-points)]
        return float(np.mean([new[0] for new in thermostats]) - self.thermostats[0])


def linear_step(
    rule: Rule, eta: float, h: float, V: float, thermostats: Sequence[Array] = (), **settings: Any
) -> LinearStep:
    """Return one inner step of ``rule`` along one direction, at temperature 1, as matrices.

    Parameters
    ----------
    rule : Rule
    eta : float
        Learning rate.
    h, V : float
        Curvature of −log p, and variance of the gradient.
    thermostats : tuple
        Values of the state's fields after the momentum, held.
    **settings
        Further arguments of ``rule.update``, such as the friction.

    Raises
    ------
    ValueError
        If the rule isn't linear in position and momentum.
    """
    step = _StepOnGaussian(rule, eta, h, V, thermostats, settings)
    AB = step.matrix()
    n = step.n
    A = AB[:, :n]
    B = AB[:, n:]
    units = step.units
    scale = np.outer(units, 1 / units)
    if not _spectral_radius(A) < 1:
        return LinearStep(A=scale * A, B=units[:, None] * B, covariance=None)
    S = np.linalg.solve(np.eye(n * n) - np.kron(A, A), (B @ B.T).ravel()).reshape(n, n)
    return LinearStep(
        A=scale * A,
        B=units[:, None] * B,
        covariance=np.outer(units, units) * S,
        drift=step.mean_drift(S, B.shape[1]) if thermostats else math.nan,
    )


def _spectral_radius(A: Array) -> float:
    return np.abs(np.linalg.eigvals(A)).max()


def resting_thermostats(
    rule: Rule, eta: float, h: float, V: float, **settings: Any
) -> tuple[Array, ...] | None:
    """Values at which the state's fields after the momentum have no drift, or None.

    None: for no value that the search meets is the step stable and the drift zero. At most one such
    field is understood, a thermostat that rises while the chain is too hot.
    """
    names = rule.state_type._fields[2:]
    if not names:
        return ()
    if len(names) > 1:
        raise ValueError(
            f"{rule.state_type.__name__} has the fields {', '.join(names)} after the momentum. "
            "Pass settings by hand: they can be chosen for one thermostat at most."
        )

    def drift(value: float) -> float:  # where the step is unstable, the thermostat would rise
        step = linear_step(rule, eta, h, V, (np.array(value),), **settings)
        return 1.0 if step.covariance is None else step.drift

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


def variance_bias(
    rule: Rule, eta: float, h: float, V: float, mean_noise: float | None = None, **settings: Any
) -> float:
    """Relative bias of the variance of θ, exact: variance × h − 1, and ∞ where a step is unstable.

    A thermostat is one for all directions and rests where their ``mean_noise`` lets it, by default
    V.
    """
    noise = V if mean_noise is None else mean_noise
    thermostats = resting_thermostats(rule, eta, h, noise, **settings)
    if thermostats is None:
        return math.inf
    covariance = linear_step(rule, eta, h, V, thermostats, **settings).covariance
    return math.inf if covariance is None else float(covariance[0, 0] * h - 1)


def contraction_rate(
    rule: Rule, eta: float, h: float, mean_noise: float = 0.0, **settings: Any
) -> float:
    """Contraction of the mean per inner step: 1 − the spectral radius.

    −∞ where a thermostat has no rest. Noise doesn't matter but to a thermostat.
    """
    thermostats = resting_thermostats(rule, eta, h, mean_noise, **settings)
    if thermostats is None:
        return -math.inf
    return 1 - float(_spectral_radius(linear_step(rule, eta, h, 0.0, thermostats, **settings).A))
