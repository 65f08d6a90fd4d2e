r"""BAOAB, an integrator of SGHMC's SDE of higher order (Leimkuhler & Matthews 2013).

The SDE is eq. 13 of Chen, Fox & Guestrin (2014). A step is split into half a kick (B), half a drift
(A), the exact Ornstein-Uhlenbeck step (O), half a drift, and half a kick. The kick that ends a step
and the one that begins the next take the same gradient. Therefore they are made together, and a
step costs one gradient. With v, η, α and β̂ as in eq. 15, where α = 1 − exp(−γε) at friction γ and
step ε = √η:

    θ ← θ + ½v
    v ← (1 − α) v + N(0, α(2 − α) η T − ½(2 − α)² β̂ η T)
    θ ← θ + ½v
    v ← v − η ∇Ũ(θ)

On a Gaussian without gradient noise, θ and v have the exact variances at every η at which the step
is stable: ηh < 4 for curvature h. Gradient noise of variance V that is not compensated multiplies
the variance of θ by 1 + ηV(2 − α)/(α(4 − ηh)).
"""

from typing import Any

import numpy as np

from pymc_sghmc.protocols import Array, Generator, Gradient

__all__ = ["update"]


def update(
    state: Any,
    gradient: Gradient,
    learning_rate: float,
    rng: Generator,
    *,
    friction: float,
    noise_estimate: float | Array = 0.0,
    temperature: float = 1.0,
) -> tuple[Any, dict[str, Any]]:
    """One step of BAOAB with the kick last: the gradient is taken at the new θ.

    ``noise_estimate`` β̂ is a number, an array of shape (d,) or a matrix of shape (d, d).
    """
    theta, v = state
    eta = learning_rate
    alpha = friction
    beta_hat = noise_estimate
    T = temperature
    theta = theta + 0.5 * v  # A
    noise = rng.standard_normal(v.shape, dtype=v.dtype)
    injected = alpha * (2 - alpha)
    estimated = 0.5 * (2 - alpha) ** 2
    if getattr(beta_hat, "ndim", 0) < 2:
        noise = ((injected - estimated * beta_hat) * eta * T) ** 0.5 * noise
    else:  # by a root of the matrix
        root = np.linalg.cholesky(injected * np.eye(len(v)) - estimated * beta_hat).astype(v.dtype)
        noise = (eta * T) ** 0.5 * (root @ noise)
    v = (1 - alpha) * v + noise  # O
    theta = theta + 0.5 * v  # A
    logp, grad = gradient(theta, gradient.draw_minibatch(rng))  # −∇Ũ(θ), a fresh minibatch
    v = v + eta * grad  # B and B
    return type(state)(theta, v), {"minibatch_logp": logp}
