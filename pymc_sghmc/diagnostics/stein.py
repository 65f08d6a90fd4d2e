"""Bias, estimated from draws and the gradients at some of them. Knows arrays and ArviZ, no models.

Under the posterior p and for any fixed c, Stein's identities hold: E[∇log p(θ)] = 0 and
E[(θ−c) ∇log p(θ)ᵀ] = −I. Draws of another distribution violate them. On a Gaussian posterior of
mean m and covariance P the violations show the bias: ∇log p(θ) = −P⁻¹(θ−m), so that draws of mean c
and covariance S give −E[(θ−c)∇log pᵀ] = S P⁻¹ and −P E[∇log p] = c − m.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import arviz as az
import numpy as np
import xarray as xr

__all__ = ["Estimate", "SteinEstimates", "stein_estimates"]

DRAWS_PER_PARAMETER = 5  # effective draws from which a covariance matrix can be estimated


class Estimate(NamedTuple):
    """A mean over draws and its Monte Carlo standard error, one entry per column."""

    mean: np.ndarray
    error: np.ndarray


class SteinEstimates(NamedTuple):
    """Per parameter, then per group of parameters, then over all of them.

    ``mean_shift`` is (c − m)/sd of the posterior, ``temperature`` −E[(θ_i−c_i) ∂log p/∂θ_i],
    ``log_sd_ratio`` the logarithm of the draws' standard deviation over the posterior's.
    """

    mean_shift: Estimate
    temperature: Estimate
    log_sd_ratio: Estimate
    uses_correlations: bool


def stein_estimates(
    positions: np.ndarray,
    weights: np.ndarray,
    thinned: np.ndarray,
    gradients: np.ndarray,
    groups: Iterable[slice] = (),
) -> SteinEstimates:
    """Estimate how far the draws are from the distribution whose gradients are given.

    With enough draws the posterior's covariance is estimated as P = F⁻¹S with
    F = −E[(θ−c)∇log pᵀ]: exact on a Gaussian for draws of any other Gaussian, and P = S on any
    posterior for correct draws. With fewer draws P_ii = S_ii/F_ii, as if F were diagonal. S and F
    come from the same draws, so most of their noise cancels. The residual is a mean over draws (the
    influence function of the estimate), and its error is that of a mean.

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
        Parameters to take means over.

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
        uses_correlations = bool(effective >= DRAWS_PER_PARAMETER * d)
        correction = 1.0
        if uses_correlations:
            correction = np.sqrt(effective / (effective - d))  # degrees of freedom
            fit = _fitted_gaussian(u, g, g_centred, w)
            p = fit.variance
            step = fit.step
            # the virial on a Gaussian
            fitted = u * (u @ fit.precision)
            fitted_all = u_all * (u_all @ fit.precision)
            log_sd = (np.log(variance / p) + u**2 / variance - 1 - fit.influence / p) / 2
        else:
            p = variance
            step = -g * p
            fitted = u**2 / p
            fitted_all = u_all**2 / p
        sd = np.sqrt(p)
        shift = _helped_mean(step / sd, (theta - centre) / sd, u_all / sd, w, w_all, correction)
        virial, fitted, fitted_all = (_and_groups(x, groups) for x in (virial, fitted, fitted_all))
        heat = _helped_mean(virial, fitted, fitted_all, w, w_all, correction)
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
            log_ratio = _helped_mean(log_sd, square, square_all, w, w_all, correction, difference)
        else:
            log_ratio = Estimate(np.log(heat.mean) / 2, heat.error / heat.mean / 2)
    return SteinEstimates(shift, heat, log_ratio, uses_correlations)


class _FittedGaussian(NamedTuple):
    """What moments of draws and gradients say of the posterior."""

    variance: np.ndarray  # (d,)
    precision: np.ndarray  # (d, d)
    influence: np.ndarray  # of each draw on the variances, (chain, draw, d)
    step: np.ndarray  # θ − m of each draw, (chain, draw, d)


def _fitted_gaussian(
    u: np.ndarray, g: np.ndarray, g_centred: np.ndarray, w: np.ndarray
) -> _FittedGaussian:
    """Return P = F⁻¹S and what comes of it. See `stein_estimates`."""
    share = w / w.sum()
    S = np.einsum("cn,cni,cnj->ij", share, u, u)
    F = -np.einsum("cn,cni,cnj->ij", share, u, g_centred)
    inverse = np.linalg.pinv(F)
    P = inverse @ S
    rest = u + g_centred @ P  # zero on a Gaussian
    return _FittedGaussian(
        variance=np.diag(P),
        precision=np.linalg.pinv(P),
        # dP = F⁻¹(dS − dF P), and a draw adds uuᵀ to S and −ugᵀ to F
        influence=(u @ inverse.T) * rest,
        step=-g @ P + rest * _heat(u, w, S, P)[..., None] / 2,
    )


def _heat(u: np.ndarray, w: np.ndarray, S: np.ndarray, P: np.ndarray) -> np.ndarray:
    """uᵀS⁻¹(S−P)S⁻¹u without its mean and its part linear in u, shape (chain, draw).

    Heat moves the mean of a skewed posterior, and E[∇log p] does not show it: it stays zero in a
    stationary run with any gradient noise. With K the third derivative of log p, E[∇log p] = 0
    under draws N(c, S) and under the posterior, N(m, P) in second moments, gives
    c − m = P K(S−P)/2, and K(S−P) is the covariance of ∇log p with this quadratic form.
    """
    whitened = u @ np.linalg.pinv(S)
    q = (whitened @ (S - P) * whitened).sum(axis=-1)
    q = q - _mean(q, w)
    return q - whitened @ _mean(u * q[..., None], w)


def _helped_mean(
    y: np.ndarray,
    x: np.ndarray,
    x_all: np.ndarray,
    w: np.ndarray,
    w_all: np.ndarray,
    correction: float,
    difference: np.ndarray | None = None,
) -> Estimate:
    """Return the mean of y, known at few draws, by means of x, known at all (double sampling).

    y = b x + residual by regression at the few draws. The mean of the residual comes from them,
    that of x from all draws, and their errors add as uncorrelated ones (Cochran 1977, section
    12.6). On a Gaussian the residual vanishes, and a few gradients are as good as one at each draw.
    ``correction`` multiplies the residual's error, for the degrees of freedom that were fitted
    before. ``difference`` replaces the mean of x over all draws minus that over the few.
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


def _mean(x: np.ndarray, w: np.ndarray) -> Any:
    """Return the weighted mean over chains and draws."""
    return np.einsum("cn,cn...->...", w / w.sum(), x)


def _mcse(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the Monte Carlo standard error of the weighted mean, for each column."""
    influence = (w / w.mean())[..., None] * (x - _mean(x, w))
    data = xr.Dataset({"x": (("chain", "draw", "column"), influence)})
    return np.asarray(az.mcse(data)["x"], dtype=float)


def _and_groups(x: np.ndarray, groups: Iterable[slice]) -> np.ndarray:
    """Return columns of x, their means over each group, and over all."""
    means = [x[..., group].mean(axis=-1, keepdims=True) for group in (*groups, slice(None))]
    return np.concatenate([x, *means], axis=-1)
