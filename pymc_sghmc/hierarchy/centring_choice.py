"""How far each effect is centred: by what its rows say of it, beside what its prior says.

Knows passes over the data and a fit of a Gaussian, no models and no samplers.
"""

import math

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scipy.linalg import solve_triangular
from scipy.optimize import minimize
from scipy.sparse import csr_array, diags_array

from pymc_sghmc.gradients.minibatch_gradient import MinibatchGradient
from pymc_sghmc.gradients.rewrite import MeanField
from pymc_sghmc.hierarchy.nested_effects import conditional_laws
from pymc_sghmc.phases import begin_phase
from pymc_sghmc.protocols import Array
from pymc_sghmc.tuning.curvature import MAX_DENSE, CountedPasses
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.variational_fit import Walled, first_scales, mean_field, variational_fit

if TYPE_CHECKING:
    from pymc_sghmc.hierarchy.centring import PartialCentring

__all__ = ["Chosen", "Coordinates", "choose"]

MOST_CLIMB = 50  # iterations of the climb without effects
MOST_OFF = math.log(4)  # of the curvature by which a coordinate was chosen, where the fit is then
STEP = 1e-3  # prior standard deviations, of differences of gradients
N_PAIRS = 4  # of draws ±z from the fit
STRONG = 0.3  # share of a shared parameter's precision that rows tell with effects known alone
MOST_COLUMNS = 10  # shared parameters that coordinates depend on
MOST_NUMBERS = 2**24  # in a matrix of a position's entries and shared parameters


class Coordinates(NamedTuple):
    """What `PartialCentring.set_coordinates` takes."""

    weights: Array  # λ
    information: Array | None = None  # h, the precision of an entry's likelihood
    pull: Array | None = None  # b, that times its mean
    above: Array | None = None  # entries of larger groups, ...
    coupling: Array | None = None  # ... and k
    columns: Array | None = None  # entries of variables that all groups share, ...
    by_shared: Array | None = None  # ... and by how much b falls with them
    whole: float = 0.0  # 1 where a prior's tails and correlation are taken out of coordinates


class Chosen(NamedTuple):
    """Coordinates of all entries of all effects, and the fits that they were chosen by."""

    coordinates: Coordinates
    shares: Array | None = None  # how far entries are centred: h over h and the prior's precision
    independent: MeanField | None = None  # in the coordinates z = u/τ
    start: Array | None = None  # where a fit in the chosen coordinates began, ...
    fit: GaussianFit | None = None  # ... whether it converged or not


def choose(gradient: MinibatchGradient, centring: "PartialCentring", start: Array) -> Chosen:
    """Choose coordinates of all entries of all effects, by the likelihood of each beside its prior.

    Its precision and mean are taken at draws from a Gaussian that is fitted to z = u/τ: in u such
    fits end at scales of zero where the rows say little.

    Parameters
    ----------
    gradient : MinibatchGradient
    centring : PartialCentring
        Whose coordinates are changed on the way.
    start : array of shape (d,)
        Where the fit begins, in the model's own coordinates.
    """
    begin_phase("choosing how far effects are centred")
    density = gradient.density
    counted = CountedPasses(gradient.passes)
    none = np.zeros_like(centring.as_written)
    centring.set_coordinates(none)
    places = list(centring.group_coefficients.values())
    without = _without_effects(counted, density.from_model(start).astype(float), places)
    independent = mean_field(counted, without)
    if independent is None:
        return Chosen(Coordinates(centring.as_written))
    draws = _draws(independent)
    scales = np.array([centring.scales(draw) for draw in draws])
    information = _information(counted, draws, scales, places)
    chosen = _chosen_by(counted, centring, independent, information)
    if start.size > MAX_DENSE:
        return chosen
    own_without = density.to_model(without)
    fitted = _fitted(counted, centring, chosen, start, own_without)
    if fitted is None:
        return chosen
    better = _chosen_by(counted, centring, _independent_around(fitted, centring), information)
    if not _differ(centring, fitted, better):
        return fitted
    again = _fitted(counted, centring, better, start, own_without)
    return again if again is not None and again.fit is not None and again.fit.is_mode else fitted


def _fitted(
    counted: CountedPasses,
    centring: "PartialCentring",
    chosen: Chosen,
    start: Array,
    without: Array,
) -> Chosen | None:
    """Fit a Gaussian in chosen coordinates, which are in use then; None where none is found.

    Parameters
    ----------
    counted : CountedPasses
    centring : PartialCentring
    chosen : Chosen
    start, without : array of shape (d,)
        The initial point, and the same without effects, in the model's own coordinates.
    """
    assert chosen.independent is not None
    density = counted.over.density
    centring.set_coordinates(*chosen.coordinates)
    from_there = density.from_model(without).astype(float)
    fit = variational_fit(counted, from_there, centring.carried(chosen.independent))
    if fit is None:
        return None
    return chosen._replace(start=density.from_model(start).astype(float), fit=fit)


def _chosen_by(
    counted: CountedPasses, centring: "PartialCentring", independent: MeanField, information: Array
) -> Chosen:
    """Choose coordinates where a fit is, with z = (u − μ)/τ in use."""
    coordinates = _conditional(counted, centring, independent, information)
    ratios = _ratios(centring, coordinates, independent.mean)
    return Chosen(coordinates, shares=ratios / (1 + ratios), independent=independent)


def _ratios(centring: "PartialCentring", coordinates: Coordinates, point: Array) -> Array:
    """Return what rows say of each entry over what its prior says, at a point with z in use."""
    assert coordinates.information is not None
    return coordinates.information * np.square(centring.scales(point))


def _independent_around(fitted: Chosen, centring: "PartialCentring") -> MeanField:
    """Return the Gaussian with independent parameters that a fit is near to, with z in use then.

    Parameters
    ----------
    fitted : Chosen
        With its coordinates in use.
    centring : PartialCentring
    """
    assert fitted.fit is not None
    own_mean = centring.to_model(fitted.fit.mean)
    centring.set_coordinates(np.zeros_like(centring.as_written))
    z = centring.from_model(own_mean).astype(float)
    inverse = solve_triangular(fitted.fit.metric.matrix(), np.eye(z.size), lower=True)
    sds = 1 / np.linalg.norm(inverse, axis=0)
    effects = _entries(centring.group_coefficients.values())
    sds[effects] = 1 / np.sqrt(1 + _ratios(centring, fitted.coordinates, z))
    return MeanField(mean=z, sds=sds)


def _entries(places: Iterable[slice]) -> Array:
    """Numbers in a position of all entries of effects in these places."""
    return np.concatenate([np.r_[place] for place in places])


def _differ(centring: "PartialCentring", chosen: Chosen, better: Chosen) -> bool:
    """Whether some effect's coordinate has quite another scale than it should where a fit is."""
    assert better.independent is not None
    point = better.independent.mean
    has = 1 + _ratios(centring, chosen.coordinates, point)
    should = 1 + _ratios(centring, better.coordinates, point)
    return bool((np.abs(np.log(should / has)) > MOST_OFF).any())


def _without_effects(counted: CountedPasses, start: Array, places: Sequence[slice]) -> Array:
    """Climb in what rows see while all effects z are zero; scales stay where they are.

    From a start far from the data effects would take over what an intercept says, all on one side,
    and scales that are wide enough for them: a fit hardly finds its way back from there. A start at
    which effects aren't zero was chosen, and stays.
    """
    effects = _entries(places)
    is_shared = np.nan_to_num(counted.likelihood(start)) != 0
    is_shared[effects] = False
    if start[effects].any() or not is_shared.any():
        return start
    scales = first_scales(counted, start)[is_shared]
    there = start.copy()

    def energy(phi: Array) -> tuple[float, Array]:
        there[is_shared] = start[is_shared] + scales * phi
        logp, grad = counted(there, counted.subset)
        return -logp, -scales * grad[is_shared]

    phi = np.zeros_like(scales)
    value, _ = energy(phi)
    if not math.isfinite(value):
        return start
    options = {"maxiter": MOST_CLIMB, "gtol": 0.0, "ftol": 1e-2 / max(1.0, abs(value))}
    optimum = minimize(Walled(energy), phi, jac=True, method="L-BFGS-B", options=options)
    there[is_shared] = start[is_shared] + scales * optimum.x
    return there


def _conditional(
    counted: CountedPasses, centring: "PartialCentring", independent: MeanField, information: Array
) -> Coordinates:
    """Choose coordinates in which effects are N(0, 1), given those of larger groups.

    Parameters
    ----------
    counted : CountedPasses
    centring : PartialCentring
        With z = (u − μ)/τ as coordinates.
    independent : MeanField
        At whose mean the likelihood's slope is taken.
    information : array of shape (n,)
        Typical curvature of the likelihood in u.
    """
    point = independent.mean
    names = list(centring.group_coefficients)
    places = list(centring.group_coefficients.values())
    effects = _entries(places)
    ends = np.cumsum([place.stop - place.start for place in places])
    parts = [slice(end - (p.stop - p.start), end) for end, p in zip(ends, places, strict=True)]
    scale = centring.scales(point)
    u = centring.effects(point)[effects]
    z = point[effects]
    typical = information * np.square(scale)
    candidates = centring.shared
    if candidates.size * point.size > MOST_NUMBERS:
        candidates = candidates[:0]
    known = _hessians(counted, point, effects, candidates, typical)
    slope = np.nan_to_num(counted.likelihood(point)[effects])
    found = conditional_laws(known.effects, slope, z, parts, centring.pairs, known.mixed, typical)
    h = found.precision / np.square(scale)
    pull = found.linear / scale + h * (u - scale * z)
    # as with larger groups: what an effect's own mean tells of a parameter isn't counted twice
    means = _by_shared(centring, point, candidates)[effects]
    by_shared = found.shared / scale[:, None] - h[:, None] * means
    coupling = {}
    by_effect = centring.derivatives(point)
    for (i, j), block in found.blocks.items():
        own = parts[i]
        above = parts[j].start + block.above
        share = block.size / scale[own]
        # what an effect's own mean, in its prior, tells of the larger group isn't counted twice
        by_mean = np.where(share != 0, h[own] * by_effect[names[j]][places[i]], 0.0)
        coupling[i, j] = (share - by_mean) / scale[above]
        pull[own] += coupling[i, j] * u[above] - share * z[above]
        by_shared[own] -= coupling[i, j][:, None] * means[above]
    of_shared = known.shared
    if of_shared is None:
        of_shared = 1 / np.square(independent.sds[candidates])
    columns = _strong(by_shared, h + 1 / np.square(scale), of_shared)
    by_shared = np.nan_to_num(by_shared[:, columns])
    pull += by_shared @ point[candidates[columns]]
    none = {pair: np.zeros(parts[pair[0]].stop - parts[pair[0]].start) for pair in centring.pairs}
    entries = {pair: block.above for pair, block in found.blocks.items()}
    return Coordinates(
        weights=np.zeros_like(h),
        information=h,
        pull=np.nan_to_num(pull),
        above=np.concatenate([[], *(none | entries).values()]).astype(np.int64),
        coupling=np.nan_to_num(np.concatenate([[], *(none | coupling).values()])),
        columns=columns,
        by_shared=by_shared,
        whole=1.0,
    )


class _Hessians(NamedTuple):
    """Second derivatives of −log-likelihood at a point, with n effects and m shared parameters."""

    effects: csr_array  # (n, n)
    mixed: Array  # by effects and shared parameters, (n, m)
    shared: Array | None  # by each shared parameter alone, (m,), where it is known


def _hessians(
    counted: CountedPasses, point: Array, effects: Array, shared: Array, typical: Array
) -> _Hessians:
    """Return second derivatives at a point, or the typical ones alone where none are known."""
    whole = counted.likelihood_hessian(point)
    if whole is None:
        none = np.zeros((effects.size, shared.size))
        return _Hessians(diags_array(typical).tocsr(), mixed=none, shared=None)
    of_effects = csr_array(whole[effects])
    return _Hessians(
        effects=of_effects[:, effects],
        mixed=of_effects[:, shared].toarray(),
        shared=whole.diagonal()[shared],
    )


def _by_shared(centring: "PartialCentring", point: Array, shared: Array) -> Array:
    """How effects, in the places of a position, change with shared parameters, (d, m)."""
    here = centring.effects(point)
    columns = np.zeros((point.size, shared.size))
    for column, i in zip(columns.T, shared, strict=True):
        moved = point.copy()
        moved[i] += 1.0
        column[:] = centring.effects(moved) - here
    return columns


def _strong(by_shared: Array, precision: Array, of_shared: Array) -> Array:
    """Numbers of shared parameters much of whose precision is lost without the effects.

    Parameters
    ----------
    by_shared : array of shape (n, m)
    precision : array of shape (n,)
        Of effects, given all else.
    of_shared : array of shape (m,)
        What rows say of shared parameters, given all else. By their second derivatives where these
        are known: standard deviations of a fit to a few draws are off by a factor of two or three.
    """
    with np.errstate(all="ignore"):
        lost = np.nan_to_num((np.square(by_shared) / precision[:, None]).sum(axis=0) / of_shared)
    order = np.argsort(-lost, kind="stable")[:MOST_COLUMNS]
    return np.sort(order[lost[order] > STRONG])


def _draws(independent: MeanField) -> Array:
    """Draw in pairs, with the Gaussian's own spread."""
    mean, sds = independent
    rng = np.random.default_rng(0)
    half = rng.standard_normal((N_PAIRS, mean.size))
    half /= np.sqrt(np.square(half).mean(axis=0))  # their mean square is 1
    return mean + sds * np.concatenate([half, -half])


def _information(
    counted: CountedPasses, draws: Array, scales: Array, places: Sequence[slice]
) -> Array:
    """Curvature of the likelihood in the entries of effects, at typical draws; 0 or more."""
    effects = _entries(places)
    squares = np.square(scales)
    exact = [counted.likelihood_curvatures(draw) for draw in draws]
    with np.errstate(all="ignore"):
        if not any(curvatures is None for curvatures in exact):
            by_draw = np.array(exact)[:, effects] / squares
            typical = np.median(np.nan_to_num(by_draw, posinf=0.0, neginf=0.0), axis=0)
        else:
            rng = np.random.default_rng(0)
            estimates = np.array([_by_signs(counted, draw, places, rng) for draw in draws])
            by_scales = estimates[:, effects].mean(axis=0) / squares.mean(axis=0)
            typical = np.nan_to_num(by_scales, posinf=0.0, neginf=0.0)
    return np.maximum(typical, 0.0)


def _by_signs(
    counted: CountedPasses, point: Array, places: Sequence[slice], rng: np.random.Generator
) -> Array:
    """Estimate curvatures of the likelihood, the diagonal of a matrix.

    Random signs let what entries mean to each other cancel in the mean of many (Hutchinson).
    """
    here = counted.likelihood(point)
    found = np.zeros(point.size)
    for place in places:
        moved = point.copy()
        signs = rng.choice([-1.0, 1.0], size=place.stop - place.start)
        moved[place] += STEP * signs
        found[place] = signs * (here - counted.likelihood(moved))[place] / STEP
    return found
