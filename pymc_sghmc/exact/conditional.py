"""The full conditional of an unknown that is Gamma, from the model's own density.

An unknown λ > 0 whose full conditional is Gamma has, up to a constant,

    log p(λ | rest) = (a − 1) log λ − bλ        so that        λ ∂/∂λ log p(λ | rest) = (a − 1) − bλ

is a straight line in λ. Two gradients give its shape a and rate b, a third one says whether it is
straight, and the density, there and at the draw, whether it is all of the law: bounds have no
gradient. Both are the model's own: nothing is known here of priors and likelihoods.
"""

import numpy as np
import pytensor.tensor as pt

from pymc.exceptions import SamplingError
from pymc.logprob.transforms import LogTransform
from pymc.pytensorf import rewrite_pregrad
from pytensor.graph.traversal import explicit_graph_inputs

from pymc_sghmc.compat import ancestors
from pymc_sghmc.models.graphs import minibatch_outputs

__all__ = ["Conditional", "NotFinite"]

# Where the line is looked at, in units of the present value: two points, and a third to check it.
FACTORS = ((0.4, 0.7), (1.5, 2.5), (4.0, 8.0))
FAR = 100  # these were so far from the mean: look again from there
LOOKS = 60


class NotFinite(SamplingError):
    """The log-density has no gradient here."""


class Conditional:
    """Full conditional of one unknown, by the density and the gradient of the terms that hold it."""

    def __init__(self, var, model, compile_kwargs):
        rv = model.values_to_rvs[var]
        transform = model.rvs_to_transforms[rv]
        self.name = var.name
        self.rv_name = rv.name
        self.dtype = var.dtype
        self.is_log = isinstance(transform, LogTransform)
        if transform is not None and not self.is_log:
            raise ValueError(
                f"GammaGibbs(vars=...): {rv.name} has the transform {type(transform).__name__}, "
                "and a Gamma-distributed unknown is any number above zero. Give it a Gamma "
                "prior, and leave its transform as it is or set it to None; or sample it with "
                "another step."
            )
        terms = [term.sum() for term in model.logp(sum=False) if var in ancestors([term])]
        if minibatch_outputs(terms):
            raise ValueError(
                f"GammaGibbs(vars=...): the full conditional of {rv.name} depends on data in a "
                "pm.Minibatch, and a Gibbs step needs all rows. Put the data into the model as "
                "they are, and pass batch_size to the step that samples the other unknowns."
            )
        logp = rewrite_pregrad(sum(terms))
        outputs = [logp, pt.grad(logp, var)]
        others = [v for v in explicit_graph_inputs(outputs) if v is not var]
        self.others = [other.name for other in others]
        self.function = model.compile_fn(
            outputs, inputs=[var, *others], point_fn=False, **(compile_kwargs or {})
        )
        # Numbers to look at, and to draw, that leave room for their squares and ratios
        info = np.finfo(var.dtype)
        self.smallest = 1e3 * float(info.tiny)
        self.largest = 1e-3 * float(info.max)
        self.tolerance = 1e-6 if var.dtype == "float64" else 1e-4

    def draw(self, point, rng):
        """Draw the unknown, as the model has it."""
        shape, rate, start = self.shape_and_rate(point)
        # As a logarithm: a draw of small shape may be smaller than the smallest number. If
        # G ~ Gamma(a + 1, 1) and W is uniform, G W^(1/a) ~ Gamma(a, 1).
        uniform = 1 - rng.random(shape.shape)  # above zero
        log = np.log(rng.gamma(shape + 1)) + np.log(uniform) / shape - np.log(rate)
        drawn = np.exp(np.clip(log, np.log(self.smallest), np.log(self.largest)))
        if not self._is_gamma(shape, rate, start, self._look(drawn, point)):
            raise SamplingError(self._refusal())
        return self._value(drawn)

    def shape_and_rate(self, point):
        """Shape and rate, and a place where the density is known; an error if there are no such."""
        at = np.asarray(point[self.name], dtype=float)
        if not (self.is_log or (at > 0).all()):
            raise NotFinite(
                f"GammaGibbs: {self.rv_name} isn't above zero. Pass other initvals to pm.sample, "
                f"or leave {self.rv_name} to another step."
            )
        rng = np.random.default_rng(0)
        factors = [rng.uniform(*bounds, size=at.shape) for bounds in FACTORS]
        with np.errstate(all="ignore"):
            present = x = self._in_range(np.exp(at) if self.is_log else at)
            for _ in range(LOOKS):
                looks = [self._look(x * factor, point) for factor in factors]
                (_, h1, x1), (_, h2, x2), (_, h3, x3) = looks
                rate = (h1 - h2) / (x2 - x1)
                shape = 1 + h1 + rate * x1
                # Far from its mean a − 1 is lost beside bλ, or bλ beside a − 1.
                mean = np.select(
                    [(rate > 0) & (shape > 0), rate > 0], [shape / rate, 1 / rate], np.inf
                )
                nearer = self._in_range(np.minimum(mean, 1e12 * x))
                if not np.any((nearer > FAR * x) | (nearer < x / FAR)):
                    break
                x = nearer
            if not _are_finite(looks):
                if _are_finite([self._look(present, point)]):
                    raise SamplingError(self._refusal())
                raise NotFinite(
                    f"GammaGibbs: the log-density, or its gradient in {self.rv_name}, isn't "
                    "finite. Check the model with model.debug(), or pass other initvals to "
                    "pm.sample."
                )
            error = np.abs(shape - 1 - rate * x3 - h3)
            straight = error <= self.tolerance * (1 + np.abs(shape) + np.abs(rate) * x3)
            if not (straight.all() and self._is_gamma(shape, rate, looks[0], looks[2])):
                raise SamplingError(self._refusal())
            proper = (shape > 0) & (rate > 0)
            if not proper.all():
                worst = np.unravel_index(np.argmin(proper), proper.shape)
                raise SamplingError(self._refusal(shape[worst], rate[worst]))
        return shape, rate, looks[0]

    def _look(self, x, point):
        """Return log p, λ ∂/∂λ log p, and λ as the model has it, which may be rounded."""
        value = self._value(x)
        logp, gradient = self.function(value, *(point[name] for name in self.others))
        value = value.astype(float)
        gradient = np.reshape(gradient, np.shape(x)).astype(float)
        if self.is_log:  # the density of log λ has the Jacobian λ, too
            return float(logp) - value.sum(), gradient - 1, np.exp(value)
        return float(logp), gradient * value, value

    def _is_gamma(self, shape, rate, one, other) -> bool:
        """Whether the density changes from one place to another as a Gamma density does."""
        (p1, _, x1), (p2, _, x2) = one, other
        powers = (shape - 1) * np.log(x2 / x1)
        exponents = rate * (x2 - x1)
        size = 1 + abs(p1) + abs(p2) + np.abs(powers).sum() + np.abs(exponents).sum()
        error = abs(p2 - p1 - (powers - exponents).sum())
        return bool(np.isfinite(error) and error <= self.tolerance * size)

    def _value(self, x):
        """Return λ as the model has it."""
        return np.asarray(np.log(x) if self.is_log else x, dtype=self.dtype)

    def _in_range(self, x):
        return np.clip(x, self.smallest, self.largest)

    def _refusal(self, shape=None, rate=None) -> str:
        if shape is not None:
            why = (
                f"has shape {shape:.3g} and rate {rate:.3g}, and both must be above zero. Give it "
                "a proper Gamma prior"
            )
        else:
            why = (
                "isn't a Gamma distribution, or has other bounds, or its entries depend on each "
                "other. A precision needs a Gamma prior and must multiply squares, a rate must "
                'multiply sums: pm.Normal("x", 0, tau=lam) will do, pm.Normal("x", 0, sigma=lam) '
                "will not"
            )
        return (
            f"GammaGibbs(vars=...): the full conditional of {self.rv_name} {why}; or leave "
            f"{self.rv_name} to another step, NUTS say."
        )


def _are_finite(looks) -> bool:
    return all(np.isfinite(logp) and np.isfinite(line).all() for logp, line, _ in looks)
