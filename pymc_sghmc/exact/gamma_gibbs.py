"""Gibbs steps for Gamma-distributed unknowns, such as the precisions in the papers' experiments.

An unknown λ > 0 whose full conditional is Gamma has, up to a constant,

    log p(λ | rest) = (a − 1) log λ − bλ        so that        λ ∂/∂λ log p(λ | rest) = (a − 1) − bλ

is a straight line in λ. Two gradients give its shape a and rate b, a third one says whether it is
straight, and the density, there and at the draw, whether it is all of the law: bounds have no
gradient. Both are the model's own: nothing is known here of priors and likelihoods.
"""

import logging

from dataclasses import field

import numpy as np
import pytensor.tensor as pt

from pymc.exceptions import SamplingError
from pymc.logprob.transforms import LogTransform
from pymc.model import modelcontext
from pymc.pytensorf import rewrite_pregrad
from pymc.step_methods.compound import Competence, StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.util import get_random_generator
from pytensor.graph.traversal import explicit_graph_inputs

from pymc_sghmc.checks import continuous_variables, starting_point
from pymc_sghmc.compat import ChainSetup, ancestors
from pymc_sghmc.faults import SamplingStopped
from pymc_sghmc.models.graphs import minibatch_outputs
from pymc_sghmc.runs.shared_arrays import ByHandle

__all__ = ["GammaGibbs"]

# Where the line is looked at, in units of the present value: two points, and a third to check it.
FACTORS = ((0.4, 0.7), (1.5, 2.5), (4.0, 8.0))
FAR = 100  # these were so far from the mean: look again from there
LOOKS = 60

_log = logging.getLogger(__name__)


@dataclass_state
class GammaGibbsState(StepMethodState):
    """What a chain needs to go on exactly where it was."""

    names: list = field(metadata={"frozen": True})
    n_draws: int
    tune: bool


class GammaGibbs(ByHandle, ChainSetup):
    r"""Draw unknowns from their full conditionals, which are Gamma distributions.

    .. math:: \lambda \mid \text{rest} \sim \text{Gamma}(a, b), \qquad
              \lambda \frac{\partial}{\partial \lambda} \log p(\lambda \mid \text{rest})
              = (a - 1) - b \lambda

    Chen et al. (2014) [1]_ alternate it with SGHMC for the precisions of Gaussian priors (their
    section 4 and Appendix H). Shape and rate come from the model itself, from two gradients for each
    unknown, so that any conjugate pair will do: precisions of normal priors and likelihoods, rates of
    Poisson, exponential and Gamma ones, in any parametrisation. At every draw a third gradient and
    the density check that the conditional is Gamma.

    Parameters
    ----------
    vars : list
        Unknowns to draw, one after another. Vectors and matrices are drawn in one go: their entries
        must be independent, given all else.
    model : pm.Model, optional
        Default: the model of the context.
    rng : numpy.random.Generator or int, optional
        ``pm.sample(random_seed=...)`` replaces it.
    initial_point : dict, optional
        Where the conditionals are checked before sampling; default: the model's initial point.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``{"mode": "NUMBA"}``.
    blocked : bool, default True
        One step for all unknowns. ``False`` makes one step for each, to the same effect.

    Raises
    ------
    ValueError
        If the full conditional of an unknown isn't Gamma, or depends on a minibatch: a Gibbs step
        reads all rows. Where this shows for some values of the other unknowns only, the chain stops
        there: with a ``SamplingError`` while tuning, later as at an interruption, with an error in the
        log and the draws made so far, which then aren't draws of the posterior.

    Notes
    -----
    Costs four gradients of the terms in which the unknown appears: no rows of the data for the
    precision of a prior. For that of a likelihood it is four passes over all data, and `SGHMC`
    beside it takes plain minibatches, as control variates need a likelihood that only `SGHMC` moves:
    leave such a precision to `SGHMC`.

    The conditional is that at temperature 1.

    References
    ----------
    .. [1] Chen, Fox & Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo. ICML.

    Examples
    --------
    The precision of 50 groups' effects; that of the rows is left to `SGHMC`:

    >>> import numpy as np, pymc as pm
    >>> from pymc_sghmc import SGHMC, GammaGibbs
    >>> rng = np.random.default_rng(0)
    >>> group, effects = np.repeat(np.arange(50), 40), rng.normal(0, 0.5, 50)
    >>> y = rng.normal(effects[group], 0.3)
    >>> with pm.Model():
    ...     lam = pm.Gamma("lam", 1.0, 1.0)
    ...     tau = pm.Gamma("tau", 1.0, 1.0)
    ...     effect = pm.Normal("effect", 0.0, tau=lam, shape=50)
    ...     _ = pm.Normal("y", effect[pm.Data("group", group)], tau=tau, observed=y)
    ...     steps = [SGHMC([effect, tau], batch_size=100), GammaGibbs([lam])]
    ...     idata = pm.sample(300, tune=300, chains=2, step=steps, random_seed=1, progressbar=False)
    >>> exact = 26 / (1 + (effects**2).sum() / 2)  # if the effects were known
    >>> bool(abs(idata.posterior["lam"].mean() / exact - 1) < 0.1)
    True
    """

    name = "gamma_gibbs"
    default_blocked = True
    stats_dtypes_shapes = {}
    _state_class = GammaGibbsState

    def __init__(
        self,
        vars,
        *,
        model=None,
        rng=None,
        initial_point=None,
        compile_kwargs=None,
        blocked=True,
    ):
        model = modelcontext(model)
        self.vars = continuous_variables(vars, model, type(self).__name__)
        self.names = [var.name for var in self.vars]
        self.blocked = blocked
        self.conditionals = [_Conditional(var, model, compile_kwargs) for var in self.vars]
        self.begin_chain(get_random_generator(rng))
        points = _points_to_check(model, initial_point)
        for conditional in self.conditionals:
            errors = []
            for point in points:
                try:
                    conditional.shape_and_rate(point)
                except _NotFinite as error:
                    errors.append(error)  # the chain may start elsewhere
                except SamplingError as error:
                    raise ValueError(str(error)) from None
            if len(errors) == len(points):
                raise ValueError(str(errors[-1]))

    def begin_chain(self, rng):
        """Start a chain."""
        self.rng = rng
        self.n_draws = 0
        self.tune = True

    def step(self, point):
        """Draw each unknown given all others, the ones just drawn included."""
        n, self.n_draws = self.n_draws, -1  # a state saved in the middle of a draw is of no draw
        point = dict(point)
        for conditional in self.conditionals:
            try:
                point[conditional.name] = conditional.draw(point, self.rng)
            except SamplingError as error:
                if self.tune or n == 0:
                    raise
                _log.error(f"GammaGibbs stopped at draw {n} of the chain: {error}")
                raise SamplingStopped(str(error)) from None
        self.n_draws = n + 1
        return point, [{}]

    @staticmethod
    def competence(var, has_grad):
        """Never assigned to a variable by PyMC itself."""
        return Competence.INCOMPATIBLE


class _Conditional:
    """Full conditional of one unknown, by the density and the gradient of the terms that hold it."""

    def __init__(self, var, model, compile_kwargs):
        rv = model.values_to_rvs[var]
        transform = model.rvs_to_transforms[rv]
        self.name, self.rv_name, self.dtype = var.name, rv.name, var.dtype
        self.is_log = isinstance(transform, LogTransform)
        if transform is not None and not self.is_log:
            raise ValueError(
                f"GammaGibbs(vars=...): {rv.name} has the transform {type(transform).__name__}, and "
                "a Gamma-distributed unknown is any number above zero. Give it a Gamma prior, and "
                "leave its transform as it is or set it to None; or sample it with another step."
            )
        terms = [term.sum() for term in model.logp(sum=False) if var in ancestors([term])]
        if minibatch_outputs(terms):
            raise ValueError(
                f"GammaGibbs(vars=...): the full conditional of {rv.name} depends on data in a "
                "pm.Minibatch, and a Gibbs step needs all rows. Put the data into the model as they "
                "are, and pass batch_size to the step that samples the other unknowns."
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
        self.smallest, self.largest = 1e3 * float(info.tiny), 1e-3 * float(info.max)
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
            raise _NotFinite(
                f"GammaGibbs: {self.rv_name} isn't above zero. Pass other initvals to pm.sample, or "
                f"leave {self.rv_name} to another step."
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
                raise _NotFinite(
                    f"GammaGibbs: the log-density, or its gradient in {self.rv_name}, isn't finite. "
                    "Check the model with model.debug(), or pass other initvals to pm.sample."
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
        value, gradient = value.astype(float), np.reshape(gradient, np.shape(x)).astype(float)
        if self.is_log:  # the density of log λ has the Jacobian λ, too
            return float(logp) - value.sum(), gradient - 1, np.exp(value)
        return float(logp), gradient * value, value

    def _is_gamma(self, shape, rate, one, other) -> bool:
        """Whether the density changes from one place to another as a Gamma density does."""
        (p1, _, x1), (p2, _, x2) = one, other
        powers, exponents = (shape - 1) * np.log(x2 / x1), rate * (x2 - x1)
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
                f"has shape {shape:.3g} and rate {rate:.3g}, and both must be above zero. Give it a "
                "proper Gamma prior"
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


def _points_to_check(model, initial_point):
    """Return a point near the initial one, with the same signs, and that one: much may be zero there."""
    point = starting_point(model, initial_point)
    rng, near = np.random.default_rng(0), {}
    for name, value in point.items():
        value = np.asarray(value)
        if value.dtype.kind == "f":
            normals, factors = rng.normal(size=value.shape), rng.uniform(0.5, 1.5, value.shape)
            value = np.where(value == 0, normals, value * factors).astype(value.dtype)
        near[name] = value
    return near, point


class _NotFinite(SamplingError):
    """The log-density has no gradient here."""
