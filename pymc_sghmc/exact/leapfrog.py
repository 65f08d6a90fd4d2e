"""The leapfrog integrator of QNHMC (eq. 7 of Fu, Luo & Zhang 2016), and the Metropolis test."""

import math

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pymc_sghmc.exact.quasi_newton import Matrix
from pymc_sghmc.protocols import Array

__all__ = ["LARGEST_ERROR", "Density", "LeapfrogStep", "leapfrog", "metropolis"]

Density = Callable[[Array], tuple[float, Array]]  # log p and its gradient at a position

LARGEST_ERROR = 1000.0  # of the energy; more is a divergence, as in PyMC's HMC (its Emax)


class LeapfrogStep(NamedTuple):
    """Where a leapfrog step ends."""

    position: Array  # q, (d,)
    momentum: Array  # p, (d,)
    logp: float
    gradient: Array  # of log p, (d,)


def leapfrog(
    position: Array,
    momentum: Array,
    gradient: Array,
    density: Density,
    step_size: float,
    inverse_hessian: Matrix,
    mass: Matrix,
) -> Iterator[LeapfrogStep]:
    r"""Yield one leapfrog step of eq. 7 after another, without end.

        dθ/dt = C M⁻¹ p,        dp/dt = −C ∇U(θ)

    The trajectory starts at ``position`` and ``momentum``, and ``gradient`` is that of log p there.
    It is reversible and preserves volume for any symmetric C that is constant along it. With M = C,
    C M⁻¹ is 1, and a step takes one product with C.
    """
    q = position
    p = momentum
    epsilon = step_size
    C = inverse_hessian
    M = mass
    force = C.product(gradient)
    while True:
        p = p + epsilon / 2 * force  # Algorithm 2, lines 6 and 11
        q = q + epsilon * (p if M is C else C.product(M.inverse_product(p)))  # line 9
        logp, gradient = density(q)
        force = C.product(gradient)
        p = p + epsilon / 2 * force  # lines 11 and 15
        yield LeapfrogStep(q, p, logp, gradient)


def metropolis(E0: float, E1: float, rng: np.random.Generator) -> tuple[bool, dict[str, Any]]:
    """Accept with probability min{1, exp(E₀ − E₁)}, never after a divergence.

    Algorithm 2, line 19, prints exp(E₁ − E₀), with the wrong sign.

    Returns
    -------
    bool
        Whether the proposal is accepted.
    dict
        Statistics of the draw.
    """
    error = E1 - E0
    diverging = not abs(error) <= LARGEST_ERROR
    probability = 0.0 if diverging else math.exp(min(0.0, -error))
    accepted = bool(rng.uniform() < probability)
    return accepted, {
        "accept": probability,
        "accepted": accepted,
        "diverging": diverging,
        "energy": E1 if accepted else E0,
        "energy_error": error,
    }
