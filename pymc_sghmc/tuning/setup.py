"""What all chains from one starting point share: a Gaussian fit, a metric, and the noise around it.

Deterministic. Knows gradients and fits, no samplers.
"""

import math

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from scipy.linalg import solve_triangular

from pymc_sghmc.gradients.metric import (
    Array,
    Dense,
    Identity,
    LowRank,
    Metric,
    preconditioner_metric,
)
from pymc_sghmc.gradients.passes import Passes
from pymc_sghmc.phases import begin_phase, count_passes
from pymc_sghmc.tuning.all_rows_fit import fit_of_all_rows
from pymc_sghmc.tuning.chain_tuning import MAX_LEARNING_RATE
from pymc_sghmc.tuning.curvature import (
    MAX_DENSE,
    SUBSET_ROWS,
    CountedPasses,
    Curvature,
    extreme_curvatures,
)
from pymc_sghmc.tuning.gaussian_fit import GaussianFit
from pymc_sghmc.tuning.gaussianity import (
    Edge,
    check_gaussianity,
    stable_along_scales,
    stable_for_effects,
)
from pymc_sghmc.tuning.gradient_noise import (
    MOST_FAR_NOISE,
    Anchors,
    Measured,
    Noise,
    TunedGradient,
    measure_noise,
)
from pymc_sghmc.tuning.posterior_fit import fit_posterior
from pymc_sghmc.tuning.setup_request import SetupRequest
from pymc_sghmc.tuning.sizes import (
    RowChoice,
    RowCounts,
    all_rows_cost_little,
    sizes_in_question,
)

__all__ = ["Limits", "Setup", "set_up", "set_up_around"]

FAR_OUT = 1.5  # sds; of effects of n groups less; points there; and a share of them
FAR_OF_GROUPS = 1.4  # over √n, of n together, that their distance is farther than on average
N_FAR_OUT = 8
MOST_POINTS = 0.75
REFITS = 2  # at most, of the curvature by all rows
NOISY = 4  # times the median noise, above which a direction gets a scale of its own


class Limits(NamedTuple):
    """Upper limits of the learning rate."""

    second_order: float = MAX_LEARNING_RATE  # with control variates of second order
    far_out: float = np.inf  # by the curvature where chains come now and then


@dataclass(frozen=True, eq=False)
class Setup:
    """All that the chains of a run share."""

    request: SetupRequest
    fit: GaussianFit
    metric: Metric
    curvature: Curvature
    noise: Noise
    limits: Limits
    anchors: Anchors
    passes: float  # over all data, with and without gradients
    mean_phi: Array | None  # the fit's mean in φ, where φ has unit scale in all directions
    is_gaussian: bool  # whether the posterior is far out as the fit is, where that was checked
    edges: tuple[Edge, ...]  # of parameters whose posteriors are much steeper on one side
    rewrite_states: tuple[Any, ...]  # of the rewrites of the model, see `Rewrite.state`

    @property
    def skewed(self) -> tuple[int, ...]:
        """Places of the parameters that have edges."""
        return tuple(dict.fromkeys(edge.place for edge in self.edges))


def set_up(
    gradient: TunedGradient,
    expansions: Sequence[Any],
    start: Array,
    request: SetupRequest,
    *,
    preconditioner: Any,
    optimise: bool,
    temperature: float,
    row_choice: RowChoice = RowChoice.AS_GIVEN,
) -> Setup:
    """Fit a Gaussian from ``start``, and measure the noise of all gradients around it.

    Parameters
    ----------
    gradient : TunedGradient
    expansions : tuple
        Control variates of first and of second order, or None: they get their reference points
        here, those of first order only where the others don't serve.
    start : array of shape (d,)
    request : SetupRequest
        By which the set-up is known.
    preconditioner : {"auto", "diag", "dense"}, array or None
        An array is M⁻¹.
    optimise : bool
        ``False``: the start is the mean of the fit.
    temperature : float
        The noise is measured at draws from the fit with this temperature.
    row_choice : RowChoice
        How the number of rows in a minibatch is chosen afterwards.
    """
    gradient.data.resize(None)
    begin_phase("fitting a Gaussian to the posterior")
    dense = _is_dense(preconditioner, start.size)
    fit = fit_posterior(
        gradient.passes, start, dense, optimise, request.metric, is_mode=request.is_mode
    )
    return set_up_around(
        fit,
        gradient,
        expansions,
        request,
        preconditioner=preconditioner,
        temperature=temperature,
        row_choice=row_choice,
    )


def _is_dense(preconditioner: Any, d: int) -> bool:
    """Whether a fit has a full covariance."""
    return (isinstance(preconditioner, str) and preconditioner == "dense") or d <= MAX_DENSE


def set_up_around(
    fit: GaussianFit,
    gradient: TunedGradient,
    expansions: Sequence[Any],
    request: SetupRequest,
    *,
    preconditioner: Any,
    temperature: float,
    row_choice: RowChoice,
) -> Setup:
    """Measure the noise of all gradients around a fit that is known. Parameters as of `set_up`."""
    gradient.data.resize(None)
    is_automatic = isinstance(preconditioner, str)
    d = fit.mean.size
    dense = _is_dense(preconditioner, d)
    begin_phase("measuring the noise of gradients")
    look = partial(
        _look_around,
        gradient=gradient,
        expansions=expansions,
        preconditioner=preconditioner,
        dense=dense,
        temperature=temperature,
        most_far_noise=MOST_FAR_NOISE * _most_more_rows(gradient.data, row_choice),
    )
    around = look(fit)
    if max(gradient.data.n_rows, default=0) > SUBSET_ROWS:
        around = _refitted(around, look, expansions[1])
    found = around.found
    fit = around.fit
    metric = around.metric
    curvature = around.curvature
    noise = found.noise
    # where a step takes all rows, no direction is noisy
    may_be_exact = _may_be_exact(noise, expansions[1], row_choice)
    if is_automatic and not (may_be_exact and all_rows_cost_little(gradient.data, d)):
        metric, curvature, noise = _with_noisy_directions_shrunk(metric, curvature, noise)
    has_unit_scale = is_automatic and isinstance(metric, Dense)
    far_limit = np.inf
    if is_automatic and gradient.density.group_coefficients:
        far_limit = _far_limit(gradient.passes, fit, metric)
    far_limit = min(far_limit, found.far_out.largest_step)
    is_gaussian = True
    if is_automatic and gradient.density.has_long_tails and dense:
        check = check_gaussianity(gradient.passes, fit)
        is_gaussian = check.is_gaussian
        far_limit = min(far_limit, check.largest_step)
    return Setup(
        request=request,
        fit=fit,
        metric=metric,
        curvature=curvature,
        noise=noise,
        limits=Limits(second_order=found.limit, far_out=far_limit),
        anchors=found.anchors,
        passes=fit.passes + found.passes,
        mean_phi=metric.from_theta(fit.mean) if has_unit_scale else None,
        is_gaussian=is_gaussian,
        edges=tuple(found.far_out.edges),
        rewrite_states=tuple(rewrite.state for rewrite in gradient.density.rewrites),
    )


class _Around(NamedTuple):
    """A fit, the metric that comes of it, and the noise around it."""

    fit: GaussianFit
    metric: Metric
    curvature: Curvature
    found: Measured


def _look_around(
    fit: GaussianFit,
    *,
    gradient: TunedGradient,
    expansions: Sequence[Any],
    preconditioner: Any,
    dense: bool,
    temperature: float,
    most_far_noise: float,
) -> _Around:
    """Measure the noise of all gradients around a fit."""
    metric, curvature = _metric(gradient.passes, fit, preconditioner, dense)
    metric = metric.astype(gradient.density.dtype)
    found = measure_noise(gradient, expansions, fit, metric, temperature, most_far_noise)
    count_passes(found.passes)
    return _Around(fit, metric, curvature, found)


def _refitted(around: _Around, look: Callable[[GaussianFit], _Around], second: Any) -> _Around:
    """Fit to all rows instead of a subset, by what second-order control variates know of them."""
    for _ in range(REFITS):
        better = fit_of_all_rows(second, around.fit)
        if better is None:
            break
        around = look(replace(better, passes=around.fit.passes + around.found.passes))
    return around


def _most_more_rows(data: RowCounts, row_choice: RowChoice) -> float:
    """How many times as many rows as the noise is measured with minibatches may have."""
    if row_choice is RowChoice.AS_GIVEN:
        return 1.0
    sizes = sizes_in_question(data, 2, row_choice)
    return max(sizes) / sizes[0]


def _may_be_exact(noise: Noise, second: Any, row_choice: RowChoice) -> bool:
    """Whether steps may take all rows, as second-order control variates don't serve."""
    if noise.second_order is not None or row_choice is RowChoice.AS_GIVEN:
        return False
    return row_choice is RowChoice.FREE or second is not None


def _metric(
    passes: Passes, fit: GaussianFit, preconditioner: Any, dense: bool
) -> tuple[Metric, Curvature]:
    """Return the metric that a chain uses, and the extreme curvatures in it."""
    kind = preconditioner if isinstance(preconditioner, str) else None
    if kind == "dense" or (kind == "auto" and dense):
        return fit.metric, Curvature(largest=1.0, smallest=1.0)
    if kind is None:
        d = fit.mean.size
        is_none = preconditioner is None
        metric: Metric = Identity(d) if is_none else preconditioner_metric(preconditioner, d)
        return metric, _curvature(passes, fit, metric)
    has_scales_alone = kind == "diag" or isinstance(fit.metric, Dense)
    metric = fit.metric.diagonal() if has_scales_alone else fit.metric
    largest, smallest = _curvature(passes, fit, metric)
    return metric.shrunk(largest**-0.5), Curvature(largest=1.0, smallest=smallest / largest)


def _with_noisy_directions_shrunk(
    metric: Metric, curvature: Curvature, noise: Noise
) -> tuple[Metric, Curvature, Noise]:
    """Give shorter scales to directions in which the gradient is much noisier than in most.

    They would slow down all of them.
    """
    by_gradient = [V for V in noise[:3] if V is not None]
    least = min(by_gradient, key=np.sum)
    is_low_rank = isinstance(metric, LowRank)
    # of thousands, each measured roughly, the mean is known better than any
    bearable = 2 * least.mean() if is_low_rank else NOISY * np.median(least)
    shrink = np.minimum(1.0, max(bearable, 1.0) / np.maximum(least, 1e-300))
    if not is_low_rank:  # few of thousands don't set the friction of all
        curvature = curvature._replace(smallest=curvature.smallest * float(shrink.min()))
    noise = noise._replace(
        plain=noise.plain * shrink,
        first_order=None if noise.first_order is None else noise.first_order * shrink,
        second_order=None if noise.second_order is None else noise.second_order * shrink,
    )
    return metric.shrunk(np.sqrt(shrink)), curvature, noise


def _curvature(passes: Passes, fit: GaussianFit, metric: Metric) -> Curvature:
    """Extreme eigenvalues of LᵀHL, with H⁻¹ from the fit where that is a matrix."""
    if isinstance(fit.metric, Dense):
        ratio = solve_triangular(fit.metric.factor, metric.matrix(), lower=True)
        scales = np.linalg.svd(ratio, compute_uv=False) ** 2
        return Curvature(largest=float(scales[0]), smallest=float(scales[-1]))
    return extreme_curvatures(CountedPasses(passes), fit.mean, metric)


def _far_limit(passes: Passes, fit: GaussianFit, metric: Metric) -> float:
    """Largest learning rate where chains often are, and along single effects wherever they come.

    A scale and its effects make a funnel, in the neck of which the curvature is many times that at
    the mean.
    """
    points = _points_far_out(fit, passes.density.group_coefficients.values())
    counted = CountedPasses(passes)

    def largest_curvature(x: Array) -> float:
        return extreme_curvatures(counted, x, metric, only_largest=True).largest

    curvatures = [largest_curvature(x) for x in points]
    finite = [curvature for curvature in curvatures if math.isfinite(curvature)]
    limit = float(1 / np.quantile(finite, MOST_POINTS)) if finite else np.inf
    columns = passes.density.group_columns
    scales = passes.density.transformed
    limit = min(limit, stable_along_scales(passes, fit, scales, largest_curvature))
    return min(limit, stable_for_effects(counted.gradient(counted.subset), fit, metric, columns))


def _points_far_out(fit: GaussianFit, effects: Iterable[slice]) -> list[Array]:
    """Draw points as far out as chains often are.

    Hundreds of effects are never 1.5 standard deviations out all at once.
    """
    rng = np.random.default_rng(0)
    far = np.full(fit.mean.size, FAR_OUT)
    for place in effects:
        far[place] = min(FAR_OUT, 1 + FAR_OF_GROUPS / math.sqrt(place.stop - place.start))
    draws = rng.standard_normal((N_FAR_OUT, far.size))
    draws /= np.sqrt(np.square(draws).mean(axis=0))  # few as they are, as wide as they should be
    return [fit.mean + fit.metric.to_theta(far * z) for z in draws]
