"""The leapfrog integrator of QNHMC's dynamics, eq. 7 of Fu, Luo & Zhang (2016).

Knows matrices by their products, no PyMC and no samplers.
"""

__all__ = ["leapfrog"]


def leapfrog(position, momentum, gradient, density, step_size, inverse_hessian, mass):
    r"""Yield (position, momentum, log p, gradient of log p) after each step of eq. 7.

        dθ/dt = C M⁻¹ p,        dp/dt = −C ∇U(θ)

    from ``position`` and ``momentum``, for ever. Reversible and volume preserving for any symmetric
    C that is constant along the trajectory. ``density`` gives log p and its gradient. With M = C, C M⁻¹
    is 1 and a step takes one product with C.
    """
    q, p, epsilon, C, M = position, momentum, step_size, inverse_hessian, mass
    force = C.product(gradient)
    while True:
        p = p + epsilon / 2 * force  # Algorithm 2, lines 6 and 11
        q = q + epsilon * (p if M is C else C.product(M.inverse_product(p)))  # line 9
        logp, gradient = density(q)
        force = C.product(gradient)
        p = p + epsilon / 2 * force  # lines 11 and 15
        yield q, p, logp, gradient
