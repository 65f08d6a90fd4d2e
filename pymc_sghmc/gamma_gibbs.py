"""Gibbs steps for Gamma-distributed unknowns, such as the precisions in the papers' experiments.

An unknown λ > 0 whose full conditional is Gamma has, up to a constant,

    log p(λ | rest) = (a − 1) log λ − bλ        so that        λ ∂/∂λ log p(λ | rest) = (a − 1) − bλ

is a straight line in λ. Two gradients give its shape a and rate b, a third one says whether it is
straight. The gradient is the model's own: nothing is known here of priors and likelihoods.
"""

import logging

from dataclasses import field

import numpy as np

from pymc.exceptions import SamplingError
from pymc.logprob.transforms import LogTransform
from pymc.model import modelcontext
from pymc.step_methods.compound import Competence, StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.util import get_random_generator
from pytensor.graph.traversal import explicit_graph_inputs

from pymc_sghmc.checks import continuous_variables
from pymc_sghmc.compat import ChainSetup
from pymc_sghmc.faults import SamplingStopped
from pymc_sghmc.rows import minibatch_outputs
from pymc_sghmc.shared_arrays import ByHandle

__all__ = ["GammaGibbs"]

# Where the line is looked at, in units of the present value: two points, and a third to check it.
FACTORS = ((0.4, 0.7), (1.5, 2.5), (4.0, 8.0))
FAR = 100  # its points were this far from its mean: look again from there

_log = logging.getLogger(__name__)


@dataclass_state
class GammaGibbsState(StepMethodState):
    """What a chain needs to go on exactly where it was."""

    names: list = field(metadata={"frozen": True})
    n_draws: int


class GammaGibbs(ByHandle, ChainSetup):
    r"""Draw unknowns from their full conditionals, which are Gamma distributions.

    .. math:: \lambda \mid \text{rest} \sim \text{Gamma}(a, b), \qquad
              \lambda \frac{\partial}{\partial \lambda} \log p(\lambda \mid \text{rest})
              = (a - 1) - b \lambda

    Chen et al. (2014) [1]_ alternate it with SGHMC for the precisions of Gaussian priors (their
    section 4 and Appendix H). Shape and rate come from the model itself, from two gradients for each
    unknown, so that any conjugate pair will do: precisions of normal priors and likelihoods, rates of
    Poisson, exponential and Gamma ones, in any parametrisation. A third gradient checks, at every
    draw, that the conditional is Gamma.

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
        there with a ``SamplingError``.

    Notes
    -----
    Costs three gradients of the terms in which the unknown appears: no rows of the data for the
    precision of a prior. For that of a likelihood it is three passes over all data, and `SGHMC`
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
    >>> group, effects = np.repeat(np.arange(50), 1000), rng.normal(0, 0.5, 50)
    >>> y = rng.normal(effects[group], 2.0)
    >>> with pm.Model():
    ...     lam = pm.Gamma("lam", 1.0, 1.0)
    ...     tau = pm.Gamma("tau", 1.0, 1.0)
    ...     effect = pm.Normal("effect", 0.0, tau=lam, shape=50)
    ...     _ = pm.Normal("y", effect[pm.Data("group", group)], tau=tau, observed=y)
    ...     steps = [SGHMC([effect, tau], batch_size=500), GammaGibbs([lam])]
    ...     idata = pm.sample(500, tune=500, chains=2, step=steps, random_seed=1, progressbar=False)
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
        self.is_log = [self._is_log(var, model) for var in self.vars]
        self.gradients = [self._gradient(var, model, compile_kwargs) for var in self.vars]
        self.begin_chain(get_random_generator(rng))
        for point in _points_to_check(model, initial_point):
            for index in range(len(self.vars)):
                try:
                    self._conditional(index, point)
                except _NotFinite:
                    continue  # the chain may start elsewhere
                except SamplingError as error:
                    raise ValueError(str(error)) from None

    def _is_log(self, var, model) -> bool:
        """Whether an unknown is sampled as its logarithm, or as it is."""
        rv = model.values_to_rvs[var]
        transform = model.rvs_to_transforms[rv]
        if transform is not None and not isinstance(transform, LogTransform):
            raise ValueError(
                f"GammaGibbs(vars=...): {rv.name} has the transform {type(transform).__name__}, and "
                "a Gamma-distributed unknown is any number above zero. Give it a Gamma prior, and "
                "leave its transform as it is or set it to None; or sample it with another step."
            )
        return transform is not None

    def _gradient(self, var, model, compile_kwargs):
        """Compile the gradient of the log-density in one unknown, at a point."""
        rv = model.values_to_rvs[var]
        graph = model.dlogp([rv])
        if minibatch_outputs([graph]):
            raise ValueError(
                f"GammaGibbs(vars=...): the full conditional of {rv.name} depends on data in a "
                "pm.Minibatch, and a Gibbs step needs all rows. Put the data into the model as they "
                "are, and pass batch_size to the step that samples the other unknowns."
            )
        inputs = list(dict.fromkeys([var, *explicit_graph_inputs([graph])]))
        function = model.compile_fn(
            graph, inputs=inputs, point_fn=False, on_unused_input="ignore", **(compile_kwargs or {})
        )
        return function, [value.name for value in inputs]

    def begin_chain(self, rng):
        """Start a chain."""
        self.rng = rng
        self.n_draws = 0

    def step(self, point):
        """Draw each unknown given all others, the ones just drawn included."""
        n, self.n_draws = self.n_draws, -1  # a state saved in the middle of a draw is of no draw
        point = dict(point)
        for index, var in enumerate(self.vars):
            try:
                shape, rate = self._conditional(index, point)
            except SamplingError as error:
                if n == 0:
                    raise
                _log.error(f"GammaGibbs stopped at draw {n} of the chain: {error}")
                raise SamplingStopped(str(error)) from None
            # As a logarithm: a draw of small shape may be smaller than the smallest number. If
            # G ~ Gamma(a + 1, 1) and W is uniform, G W^(1/a) ~ Gamma(a, 1).
            uniform = 1 - self.rng.random(shape.shape)  # above zero
            drawn = np.log(self.rng.gamma(shape + 1)) + np.log(uniform) / shape - np.log(rate)
            if not self.is_log[index]:
                drawn = np.exp(drawn)
                drawn = np.maximum(drawn, np.finfo(var.dtype).tiny)
            point[var.name] = np.asarray(drawn, dtype=var.dtype)
        self.n_draws = n + 1
        return point, [{}]

    def _conditional(self, index, point):
        """Shape and rate of the full conditional of an unknown, and the check that there are such."""
        var, is_log = self.vars[index], self.is_log[index]
        function, names = self.gradients[index]
        at = np.asarray(point[var.name], dtype=float)
        rng = np.random.default_rng(0)
        factors = [rng.uniform(*bounds, size=at.shape) for bounds in FACTORS]
        values = [point[name] for name in names]

        def line(x):
            """Return λ ∂/∂λ log p, and λ as the model has it, which may be rounded."""
            values[0] = np.asarray(np.log(x) if is_log else x, dtype=var.dtype)
            gradient = np.reshape(function(*values), at.shape).astype(float)
            x = np.asarray(values[0], dtype=float)
            # In log λ the density has the Jacobian λ, which adds 1 to the line.
            return (gradient - 1, np.exp(x)) if is_log else (gradient * x, x)

        with np.errstate(all="ignore"):
            x = np.exp(at) if is_log else at
            for _ in range(4):
                (h1, x1), (h2, x2), (h3, x3) = (line(x * factor) for factor in factors)
                rate = (h1 - h2) / (x2 - x1)
                shape = 1 + h1 + rate * x1
                mean = shape / rate
                if not np.any((mean > FAR * x) | (mean < x / FAR)):
                    break
                x = np.where(mean > 0, mean, x)
        if not ((x > 0).all() and all(np.isfinite(h).all() for h in (h1, h2, h3))):
            raise _NotFinite(
                f"GammaGibbs: {self._rv_name(index)} isn't above zero, or the gradient of the "
                "log-density in it isn't finite. Check the model with model.debug(), or pass other "
                "initvals to pm.sample."
            )
        tolerance = 1e-6 if var.dtype == "float64" else 1e-4
        error = np.abs(shape - 1 - rate * x3 - h3)
        straight = error <= tolerance * (1 + np.abs(shape) + np.abs(rate) * x3)
        if not (straight & (shape > 0) & (rate > 0)).all():
            raise SamplingError(self._refusal(index, straight.all(), shape, rate))
        return shape, rate

    def _rv_name(self, index) -> str:
        name = self.names[index]
        return name.removesuffix("_log__") if self.is_log[index] else name

    def _refusal(self, index, is_straight, shape, rate) -> str:
        name = self._rv_name(index)
        if is_straight:
            why = (
                f"has shape {np.min(shape):.3g} and rate {np.min(rate):.3g}, and both must be above "
                "zero. Give it a proper Gamma prior"
            )
        else:
            why = (
                "isn't a Gamma distribution, or its entries depend on each other. A precision needs a "
                "Gamma prior and must multiply squares, a rate must multiply sums: "
                'pm.Normal("x", 0, tau=lam) will do, pm.Normal("x", 0, sigma=lam) will not'
            )
        return (
            f"GammaGibbs(vars=...): the full conditional of {name} {why}; or leave {name} to another "
            "step, NUTS say."
        )

    @staticmethod
    def competence(var, has_grad):
        """Never assigned to a variable by PyMC itself."""
        return Competence.INCOMPATIBLE


def _points_to_check(model, initial_point):
    """Return a point near the initial one, with the same signs, and that one: much may be zero there."""
    point = model.initial_point() | (initial_point or {})
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
