"""The full conditional of a parameter that is Gamma distributed, from the model's own density.

A parameter λ > 0 whose full conditional is a Gamma distribution has, up to a constant,

    log p(λ | rest) = (a − 1) log λ − bλ        so that        λ ∂/∂λ log p(λ | rest) = (a − 1) − bλ

is a straight line in λ. Its values at two points give the shape a and the rate b. A third point
tests whether it is straight. The density itself is compared as well, between these points and at
the draw, because bounds of a distribution do not show in a gradient. Gradients and densities are
those of the model, so that nothing here depends on which prior and which likelihood it has.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pymc.exceptions import SamplingError
from pymc.logprob.transforms import LogTransform
from pymc.model import Model
from pymc.pytensorf import rewrite_pregrad
from pytensor.gradient import grad
from pytensor.graph.traversal import explicit_graph_inputs

from pymc_sghmc.compat import ancestors
from pymc_sghmc.models.graphs import minibatch_outputs
from pymc_sghmc.protocols import Array

__all__ = ["Conditional", "GammaFit", "NotFinite", "Point"]

# Where the line is evaluated, relative to a typical value: two points, and a third to test it.
FACTORS = ((0.4, 0.7), (1.5, 2.5), (4.0, 8.0))
FAR = 100  # factor between the points and the mean from which points nearer to it are taken
MOST_MOVES = 60  # of the points towards the mean

Point = Mapping[str, Array]


class NotFinite(SamplingError):
    """The log-density has no gradient here."""


class Evaluation(NamedTuple):
    """Log-density and slope of a conditional at one value of its parameter."""

    value: Array  # λ, as far as the model's dtype can hold it
    logp: float
    slope: Array  # λ ∂/∂λ log p

    @property
    def is_finite(self) -> bool:
        """Whether log-density and slope are finite."""
        return bool(np.isfinite(self.logp) and np.isfinite(self.slope).all())


class GammaFit(NamedTuple):
    """The Gamma distribution, or one for each entry, whose slope has given values at two points."""

    shape: Array
    rate: Array

    @classmethod
    def through(cls, one: Evaluation, other: Evaluation) -> "GammaFit":
        """Return the distribution whose slope is that of two evaluations."""
        rate = (one.slope - other.slope) / (other.value - one.value)
        return cls(shape=1 + one.slope + rate * one.value, rate=rate)

    @property
    def is_proper(self) -> Array:
        """Whether shape and rate are above zero, for each entry."""
        return (self.shape > 0) & (self.rate > 0)

    @property
    def typical_value(self) -> Array:
        """The mean, or a value of its size if the distribution is improper."""
        means = self.shape / self.rate
        return np.select([self.is_proper, self.rate > 0], [means, 1 / self.rate], np.inf)

    def has_slope_of(self, evaluation: Evaluation, tolerance: float) -> bool:
        """Whether the slope at a third point is on the line."""
        exponent = self.rate * evaluation.value
        error = np.abs(self.shape - 1 - exponent - evaluation.slope)
        scale = 1 + np.abs(self.shape) + np.abs(self.rate) * evaluation.value
        return bool((error <= tolerance * scale).all())

    def has_density_of(self, one: Evaluation, other: Evaluation, tolerance: float) -> bool:
        """Whether the log-density changes between two points as that of the Gamma distribution."""
        powers = (self.shape - 1) * np.log(other.value / one.value)
        exponents = self.rate * (other.value - one.value)
        sizes = np.abs(powers).sum() + np.abs(exponents).sum()
        scale = 1 + abs(one.logp) + abs(other.logp) + sizes
        error = abs(other.logp - one.logp - (powers - exponents).sum())
        return bool(np.isfinite(error) and error <= tolerance * scale)

    def draw_logarithm(self, rng: np.random.Generator) -> Array:
        """Draw the logarithm, since a draw of small shape may be smaller than the smallest number.

        If G ~ Gamma(a + 1, 1) and W is uniform, then G W^(1/a) ~ Gamma(a, 1).
        """
        uniform = 1 - rng.random(self.shape.shape)  # above zero
        gamma = rng.gamma(self.shape + 1)
        return np.log(gamma) + np.log(uniform) / self.shape - np.log(self.rate)


class Conditional:
    """Full conditional of one parameter, from the terms of the log-density that contain it.

    Parameters
    ----------
    var : TensorVariable
        Value variable of the parameter.
    model : pm.Model
        The model that it belongs to.
    compile_kwargs : dict, optional
        Keyword arguments of ``model.compile_fn``.
    """

    def __init__(self, var: Any, model: Model, compile_kwargs: dict[str, Any] | None) -> None:
        rv = model.values_to_rvs[var]
        transform = model.rvs_to_transforms[rv]
        self.name = var.name
        self.rv_name = rv.name
        self.dtype = var.dtype
        self.is_log = isinstance(transform, LogTransform)
        if transform is not None and not self.is_log:
            raise ValueError(
                f"GammaGibbs(vars=...): {rv.name} has the transform {type(transform).__name__}, "
                "so it is not a parameter that can have any value above zero. Give it a Gamma "
                "prior with its default transform or None, or sample it with another step."
            )
        terms = [term.sum() for term in model.logp(sum=False) if var in ancestors([term])]
        if minibatch_outputs(terms):
            raise ValueError(
                f"GammaGibbs(vars=...): the full conditional of {rv.name} depends on data in a "
                "pm.Minibatch, but a Gibbs step needs all rows. Pass the whole data to the model, "
                "and batch_size to the step that samples the other parameters."
            )
        logp = rewrite_pregrad(sum(terms))
        outputs = [logp, grad(logp, var)]
        others = [v for v in explicit_graph_inputs(outputs) if v is not var]
        self.other_names = [str(other.name) for other in others]
        self.function = model.compile_fn(
            outputs, inputs=[var, *others], point_fn=False, **(compile_kwargs or {})
        )
        # The range of values that are evaluated and drawn leaves room for their squares and ratios.
        info = np.finfo(var.dtype)
        self.smallest = 1e3 * float(info.tiny)
        self.largest = 1e-3 * float(info.max)
        self.tolerance = 1e-6 if var.dtype == "float64" else 1e-4

    def draw(self, point: Point, rng: np.random.Generator) -> Array:
        """Draw the parameter, and return it on the model's scale."""
        fit, evaluation = self._fit_and_evaluation(point)
        logarithm = fit.draw_logarithm(rng)
        drawn = np.exp(np.clip(logarithm, np.log(self.smallest), np.log(self.largest)))
        if not fit.has_density_of(evaluation, self._evaluated(drawn, point), self.tolerance):
            raise SamplingError(self._not_gamma())
        return self._to_model(drawn)

    def fit(self, point: Point) -> GammaFit:
        """Return the Gamma distribution, given the values of the other parameters.

        Raises
        ------
        NotFinite
            If the log-density or its gradient is not finite at the point.
        SamplingError
            If the conditional is not a Gamma distribution.
        """
        return self._fit_and_evaluation(point)[0]

    def _fit_and_evaluation(self, point: Point) -> tuple[GammaFit, Evaluation]:
        """Return the fit, and an evaluation from which the density at a draw can be predicted."""
        present = self._present_value(point)
        with np.errstate(all="ignore"):
            evaluations = self._evaluations_around_mean(present, point)
            if not all(evaluation.is_finite for evaluation in evaluations):
                if self._evaluated(present, point).is_finite:
                    raise SamplingError(self._not_gamma())
                raise NotFinite(
                    f"GammaGibbs: the log-density, or its gradient in {self.rv_name}, isn't "
                    "finite. Find the cause with model.debug(), or pass other initvals to "
                    "pm.sample."
                )
            first, second, third = evaluations
            fit = GammaFit.through(first, second)
            is_gamma = fit.has_slope_of(third, self.tolerance)
            if not (is_gamma and fit.has_density_of(first, third, self.tolerance)):
                raise SamplingError(self._not_gamma())
            if not fit.is_proper.all():
                raise SamplingError(self._improper(fit))
        return fit, first

    def _present_value(self, point: Point) -> Array:
        value = np.asarray(point[self.name], dtype=float)
        if not (self.is_log or (value > 0).all()):
            raise NotFinite(
                f"GammaGibbs: {self.rv_name} isn't above zero at this point, where a Gamma "
                "distribution has no density. Pass other initvals to pm.sample, or leave "
                f"{self.rv_name} to another step."
            )
        with np.errstate(all="ignore"):
            return self._in_range(np.exp(value) if self.is_log else value)

    def _evaluations_around_mean(self, start: Array, point: Point) -> list[Evaluation]:
        """Evaluate at three points, moved towards the mean until they are near it.

        Far from the mean, round-off loses one of the terms a − 1 and bλ beside the other.
        """
        rng = np.random.default_rng(0)
        factors = [rng.uniform(low, high, size=start.shape) for low, high in FACTORS]
        x = start
        for _ in range(MOST_MOVES):
            evaluations = [self._evaluated(x * factor, point) for factor in factors]
            typical = GammaFit.through(evaluations[0], evaluations[1]).typical_value
            nearer = self._in_range(np.minimum(typical, 1e12 * x))
            if not np.any((nearer > FAR * x) | (nearer < x / FAR)):
                break
            x = nearer
        return evaluations

    def _evaluated(self, x: Array, point: Point) -> Evaluation:
        """Evaluate the conditional at λ = x, up to rounding to the model's dtype."""
        value = self._to_model(x)
        logp, gradient = self.function(value, *(point[name] for name in self.other_names))
        value = value.astype(float)
        gradient = np.reshape(gradient, np.shape(x)).astype(float)
        if self.is_log:  # the density of log λ has the Jacobian λ as a further factor
            return Evaluation(np.exp(value), float(logp) - value.sum(), gradient - 1)
        return Evaluation(value, float(logp), gradient * value)

    def _to_model(self, x: Array) -> Array:
        """Return λ on the model's scale."""
        return np.asarray(np.log(x) if self.is_log else x, dtype=self.dtype)

    def _in_range(self, x: Array) -> Array:
        return np.clip(x, self.smallest, self.largest)

    def _not_gamma(self) -> str:
        return (
            f"GammaGibbs(vars=...): the full conditional of {self.rv_name} isn't a Gamma "
            f"distribution. Give {self.rv_name} a Gamma prior and use it as a precision or a rate, "
            'as in pm.Normal("x", 0, tau=lam), not in pm.Normal("x", 0, sigma=lam); or leave it '
            "to another step, such as NUTS. Other causes: its conditional has other bounds, or its "
            "entries depend on each other."
        )

    def _improper(self, fit: GammaFit) -> str:
        worst = np.unravel_index(np.argmin(fit.is_proper), fit.is_proper.shape)
        return (
            f"GammaGibbs(vars=...): the full conditional of {self.rv_name} has shape "
            f"{fit.shape[worst]:.3g} and rate {fit.rate[worst]:.3g}, but both must be above zero. "
            f"Give {self.rv_name} a proper Gamma prior, or leave it to another step, such as NUTS."
        )
