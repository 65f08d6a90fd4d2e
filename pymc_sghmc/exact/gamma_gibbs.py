"""Gibbs steps for Gamma-distributed unknowns, such as the precisions in the papers' experiments.

Knows PyMC's step protocol; what makes a conditional Gamma, and how it is found, is in
`conditional`.
"""

import logging

from dataclasses import field

import numpy as np

from pymc.exceptions import SamplingError
from pymc.model import modelcontext
from pymc.step_methods.compound import Competence, StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.util import get_random_generator

from pymc_sghmc.checks import continuous_variables, starting_point
from pymc_sghmc.compat import ChainSetup
from pymc_sghmc.exact.conditional import Conditional, NotFinite
from pymc_sghmc.faults import SamplingStopped
from pymc_sghmc.runs.shared_arrays import ByHandle

__all__ = ["GammaGibbs"]

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
    section 4 and Appendix H). Shape and rate come from the model itself, from two gradients for
    each unknown, so that any conjugate pair will do: precisions of normal priors and likelihoods,
    rates of Poisson, exponential and Gamma ones, in any parametrisation. At every draw a third
    gradient and the density check that the conditional is Gamma.

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
        there: with a ``SamplingError`` while tuning, later as at an interruption, with an error in
        the log and the draws made so far, which then aren't draws of the posterior.

    Notes
    -----
    Costs four gradients of the terms in which the unknown appears: no rows of the data for the
    precision of a prior. For that of a likelihood it is four passes over all data, and `SGHMC`
    beside it takes plain minibatches, as control variates need a likelihood that only `SGHMC`
    moves: leave such a precision to `SGHMC`.

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
    ...     idata = pm.sample(50, tune=50, chains=2, step=steps, random_seed=1, progressbar=False)
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
        self.conditionals = [Conditional(var, model, compile_kwargs) for var in self.vars]
        self.begin_chain(get_random_generator(rng))
        points = _points_to_check(model, initial_point)
        for conditional in self.conditionals:
            errors = []
            for point in points:
                try:
                    conditional.shape_and_rate(point)
                except NotFinite as error:
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
        n = self.n_draws  # a state saved in the middle of a draw is of no draw
        self.n_draws = -1
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


def _points_to_check(model, initial_point):
    """Return a point near the initial one, with the same signs, and that one: much may be zero there."""
    point = starting_point(model, initial_point)
    rng = np.random.default_rng(0)
    near = {}
    for name, value in point.items():
        value = np.asarray(value)
        if value.dtype.kind == "f":
            normals = rng.normal(size=value.shape)
            factors = rng.uniform(0.5, 1.5, value.shape)
            value = np.where(value == 0, normals, value * factors).astype(value.dtype)
        near[name] = value
    return near, point
