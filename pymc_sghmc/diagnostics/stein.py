"""What draws and the gradients at some of them say about bias. Knows arrays and ArviZ, no models.

Under the posterior p and for any fixed c, Stein's identities hold: E[∇log p(θ)] = 0 and
E[(θ−c) ∇log p(θ)ᵀ] = −I. Draws of another law break them, and on a Gaussian posterior of mean m
and covariance P they say by how much: ∇log p(θ) = −P⁻¹(θ−m), so that draws of mean c and
covariance S give −E[(θ−c)∇log pᵀ] = S P⁻¹ and −P E[∇log p] = c − m.
"""

from typing import NamedTuple

import arviz as az
import numpy as np
import xarray as xr

__all__ = ["Estimate", "SteinEstimates", "stein_estimates"]

DRAWS_PER_UNKNOWN = 5  # effective draws from which a covariance matrix can be estimated


class Estimate(NamedTuple):
    """A mean over draws and its Monte Carlo standard error, one entry per column."""

    mean: np.ndarray
    error: np.ndarray


class SteinEstimates(NamedTuple):
    """Per unknown, then per group of unknowns, then over all of them.

    ``mean_shift`` is (c − m)/sd of the posterior, ``temperature`` −E[(θ_i−c_i) ∂log p/∂θ_i],
    ``log_sd_ratio`` the logarithm of the draws' standard deviation over the posterior's.
    """

    mean_shift: Estimate
    temperature: Estimate
    log_sd_ratio: Estimate
    uses_correlations: bool


def stein_estimates(positions, weights, thinned, gradients, groups=()) -> SteinEstimates:
    """Estimate how far the law of the draws is from that whose gradients are given.

    With enough draws the posterior's covariance is estimated as P = F⁻¹S with
    F = −E[(θ−c)∇log pᵀ]: exact on a Gaussian for draws of any other Gaussian, and P = S on any
    posterior for right draws. Else P_ii = S_ii/F_ii, as if F were diagonal. S and F come from the
    same draws, so that most of their noise cancels; what is left is a mean over draws (the
    influence function of the estimate), with an error like any other.

    Parameters
    ----------
    positions : array of shape (chain, draw, d)
        All draws.
    weights : array of shape (chain, draw)
        Zero leaves a draw out.
    thinned : array of shape (thinned draw,)
        The draws, of each chain, at which there are gradients.
    gradients : array of shape (chain, thinned draw, d)
        Of the log-density.
    groups : sequence of slice
        Unknowns to take means over.

    Returns
    -------
    SteinEstimates
    """
    d = positions.shape[-1]
    w_all = weights
    w = weights[:, thinned]
    theta = positions[:, thinned]  # (chain, thinned draw, d)
    g = gradients
    centre = _mean(positions, w_all)  # (d,)
    u_all = positions - centre
    u = theta - _mean(theta, w)
    g_centred = g - _mean(g, w)
    virial = -u * g_centred
    variance = _mean(u**2, w)

    with np.errstate(divide="ignore", invalid="ignore"):
        effective = np.median(variance / _mcse(u, w) ** 2)
        uses_correlations = bool(effective >= DRAWS_PER_UNKNOWN * d)
        fitted_unknowns = 1.0
        if uses_correlations:
            fitted_unknowns = np.sqrt(effective / (effective - d))  # degrees of freedom
            share = w / w.sum()
            S = np.einsum("cn,cni,cnj->ij", share, u, u)
            F = -np.einsum("cn,cni,cnj->ij", share, u, g_centred)
            inverse = np.linalg.pinv(F)
            P = inverse @ S
            p = np.diag(P)
            rest = u + g_centred @ P  # zero on a Gaussian
            # dP = F⁻¹(dS − dF P), and a draw adds uuᵀ to S and −ugᵀ to F
            dp = (u @ inverse.T) * rest
            log_sd = (np.log(variance / p) + u**2 / variance - 1 - dp / p) / 2
            step = -g @ P + rest * _heat(u, w, S, P)[..., None] / 2  # θ − m
            precision = np.linalg.pinv(P)
            fitted, fitted_all = (x * (x @ precision) for x in (u, u_all))  # virial on a Gaussian
        else:
            p = variance
            step = -g * p
            fitted = u**2 / p
            fitted_all = u_all**2 / p
        sd = np.sqrt(p)
        shift = _helped_mean(
            step / sd, (theta - centre) / sd, u_all / sd, w, w_all, fitted_unknowns
        )
        virial, fitted, fitted_all = (_and_groups(x, groups) for x in (virial, fitted, fitted_all))
        heat = _helped_mean(virial, fitted, fitted_all, w, w_all, fitted_unknowns)
        if uses_correlations:
            variance_all = _mean(u_all**2, w_all)
            log_sd, square, square_all, difference = (
                _and_groups(x, groups)
                for x in (
                    log_sd,
                    u**2 / variance,
                    u_all**2 / variance_all,
                    np.log(variance_all / variance),  # to first order, that of the squares
                )
            )
            log_ratio = _helped_mean(
                log_sd, square, square_all, w, w_all, fitted_unknowns, difference
            )
        else:
            log_ratio = Estimate(np.log(heat.mean) / 2, heat.error / heat.mean / 2)
    return SteinEstimates(shift, heat, log_ratio, uses_correlations)


def _heat(u, w, S, P):
    """uᵀS⁻¹(S−P)S⁻¹u without its mean and its part linear in u, shape (chain, draw).

    Of a skewed posterior heat moves the mean, and E[∇log p] can't tell: it stays zero in a
    stationary run with any gradient noise. With K the third derivative of log p, E[∇log p] = 0
    under draws N(c, S) and under the posterior, N(m, P) in second moments, gives
    c − m = P K(S−P)/2, and K(S−P) is the covariance of ∇log p with this quadratic form.
    """
    whitened = u @ np.linalg.pinv(S)
    q = (whitened @ (S - P) * whitened).sum(axis=-1)
    q = q - _mean(q, w)
    return q - whitened @ _mean(u * q[..., None], w)


def _helped_mean(y, x, x_all, w, w_all, correction, difference=None) -> Estimate:
    """Mean of y, known at few draws, with the help of x, known at all (double sampling).

    y = b x + rest by regression at the few draws: the mean of the rest comes from them, that of x
    from all, and their errors add as uncorrelated ones (Cochran 1977, section 12.6). On a Gaussian
    the rest vanishes, and a few gradients do as well as one at each draw. ``correction`` of the
    rest's error is for what was fitted to it before; ``difference`` replaces the means of x over
    all draws less that over the few.
    """
    y_mean = _mean(y, w)
    x_mean = _mean(x, w)
    if difference is None:
        difference = _mean(x_all, w_all) - x_mean
    deviation = x - x_mean
    b = np.nan_to_num(_mean(deviation * (y - y_mean), w) / _mean(deviation**2, w))
    mean = y_mean + b * difference
    error = np.hypot(correction * _mcse(y - b * x, w), b * _mcse(x_all, w_all))
    return Estimate(mean, error)


def _mean(x, w):
    """Weighted mean over chains and draws."""
    return np.einsum("cn,cn...->...", w / w.sum(), x)


def _mcse(x, w):
    """Monte Carlo standard error of the weighted mean, for each column."""
    influence = (w / w.mean())[..., None] * (x - _mean(x, w))
    data = xr.Dataset({"x": (("chain", "draw", "column"), influence)})
    return np.asarray(az.mcse(data)["x"], dtype=float)


def _and_groups(x, groups):
    """Columns of x, their means over each group, and over all."""
    means = [x[..., group].mean(axis=-1, keepdims=True) for group in (*groups, slice(None))]
    return np.concatenate([x, *means], axis=-1)
