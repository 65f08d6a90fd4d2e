"""The leapfrog integrator of QNHMC's dynamics, eq. 7 of Fu, Luo & Zhang (2016), and the Metropolis test.

Knows matrices by their products, no PyMC and no samplers.
"""

import math

__all__ = ["LARGEST_ERROR", "leapfrog", "metropolis"]

LARGEST_ERROR = 1000.0  # of the energy; more is a divergence, as in PyMC's HMC (its Emax)


def leapfrog(position, momentum, gradient, density, step_size, inverse_hessian, mass):
    r"""Yield (position, momentum, log p, gradient of log p) after each step of eq. 7.

        dθ/dt = C M⁻¹ p,        dp/dt = −C ∇U(θ)

    from ``position`` and ``momentum``, for ever. Reversible and volume preserving for any symmetric
    C that is constant along the trajectory. ``density`` gives log p and its gradient. With M = C, C
    M⁻¹ is 1 and a step takes one product with C.
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
        yield q, p, logp, gradient


def metropolis(E0, E1, rng):
    """Accept with probability min{1, exp(E₀ − E₁)}, never after a divergence: answer and statistics.

    Algorithm 2, line 19, prints exp(E₁ − E₀).
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
