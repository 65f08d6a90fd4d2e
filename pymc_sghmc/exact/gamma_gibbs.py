"""Gibbs steps for Gamma-distributed parameters, such as the precisions in the papers' experiments.

This file has PyMC's step protocol. How a Gamma distribution is recognised is in `conditional`.
"""

import logging

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np

from pymc.exceptions import SamplingError
from pymc.model import Model, modelcontext
from pymc.step_methods.compound import Competence, StepMethodState
from pymc.step_methods.state import dataclass_state

from pymc_sghmc.checks import continuous_variables, generator_of, starting_point
from pymc_sghmc.compat import ChainSetup
from pymc_sghmc.exact.conditional import Conditional, NotFinite, Point
from pymc_sghmc.exceptions import SamplingStopped
from pymc_sghmc.runs.shared_arrays import ByHandle

__all__ = ["GammaGibbs"]

_log = logging.getLogger(__name__)


@dataclass_state
class GammaGibbsState(StepMethodState):
    """What a chain needs to continue exactly where it was."""

    names: list[str] = field(metadata={"frozen": True})
    n_draws: int
    tune: bool


class GammaGibbs(ByHandle, ChainSetup):
    r"""Draw parameters from their full conditionals, which must be Gamma distributions.

    The full conditional of a parameter is its posterior when all other parameters are held fixed.
    If it is a Gamma distribution, this step draws from it directly, so there is nothing to tune:

    .. math:: \lambda \mid \text{rest} \sim \text{Gamma}(a, b), \qquad
              \lambda \frac{\partial}{\partial \lambda} \log p(\lambda \mid \text{rest})
              = (a - 1) - b \lambda

    Typical cases are precisions of normal distributions and rates of Poisson, exponential and Gamma
    distributions, with a Gamma prior, in any parametrisation. The step finds the shape a and the
    rate b from two gradients of the model. At every draw, a third gradient and the density check
    that the conditional is a Gamma distribution. Chen et al. (2014) [1]_ alternate such draws with
    SGHMC for the precisions of Gaussian priors (their section 4 and Appendix H).

    Parameters
    ----------
    vars : variable, or list of variables
        Parameters to draw, one after another. The entries of a vector or matrix are drawn together,
        and must be independent of each other given all other parameters.
    model : pm.Model, optional
        The model to sample. Default: the model whose ``with`` block the step is made in.
    rng : numpy.random.Generator or int, optional
        Source of random numbers, for a step that is used without ``pm.sample``, which replaces it
        by generators from its own ``random_seed``. Default: a new generator.
    initial_point : dict, optional
        Values of parameters on PyMC's unconstrained scale, at which the conditionals are checked
        before sampling. Default: the model's initial point.
    compile_kwargs : dict, optional
        Keyword arguments of ``pymc.pytensorf.compile``, such as ``{"mode": "NUMBA"}``. Default:
        PyMC's.
    blocked : bool, default True
        Whether one step draws all parameters. ``False`` makes one step for each, to the same
        effect.

    Raises
    ------
    ValueError
        If the full conditional of a parameter is not a Gamma distribution, or depends on a
        minibatch: a Gibbs step needs all rows.
    SamplingError
        If this shows only at some values of the other parameters, and such values come up. While
        tuning, the run ends with this error. After tuning, the chain stops as if it were
        interrupted: the error is logged, and the draws made so far are kept, but they are not draws
        of the posterior.

    Notes
    -----
    A draw costs four gradients of those terms of the log-density that contain the parameter. For
    the precision of a prior, these terms have no rows of the data. For the precision of a
    likelihood, a draw is four passes over all data. Moreover, control variates need a likelihood in
    which only `SGHMC` changes a parameter, so that `SGHMC` beside this step has noisier gradients.
    Therefore leave the precision of a likelihood to `SGHMC`.

    The conditional is that at temperature 1, whatever temperature other steps have.

    References
    ----------
    .. [1] Chen, Fox & Guestrin (2014), Stochastic gradient Hamiltonian Monte Carlo. ICML.

    Examples
    --------
    The precision of the effects of 50 groups. That of the rows is left to `SGHMC`:

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
    ...     idata = pm.sample(40, tune=20, chains=2, step=steps, random_seed=1, progressbar=False)
    >>> exact = 26 / (1 + (effects**2).sum() / 2)  # if the effects were known
    >>> bool(abs(idata.posterior["lam"].mean() / exact - 1) < 0.1)
    True
    """

    name = "gamma_gibbs"
    default_blocked = True
    stats_dtypes_shapes: dict[str, Any] = {}
    _state_class = GammaGibbsState

    def __init__(
        self,
        vars: Any,
        *,
        model: Model | None = None,
        rng: np.random.Generator | int | None = None,
        initial_point: dict[str, Any] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        blocked: bool = True,
    ) -> None:
        model = modelcontext(model)
        self.vars = continuous_variables(vars, model, type(self).__name__)
        self.names = [var.name for var in self.vars]
        self.blocked = blocked
        self.conditionals = [Conditional(var, model, compile_kwargs) for var in self.vars]
        self.begin_chain(generator_of("rng", rng))
        points = _points_to_check(model, initial_point)
        for conditional in self.conditionals:
            _check(conditional, points)

    def begin_chain(self, rng: np.random.Generator) -> None:
        """Start a chain."""
        self.rng = rng
        self.n_draws = 0
        self.tune = True

    def step(self, point: Point) -> tuple[Point, list[dict[str, Any]]]:
        """Draw each parameter given all others, including those just drawn."""
        n = self.n_draws  # −1 meanwhile: a state saved in the middle of a draw is of no draw
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
    def competence(var: Any, has_grad: bool) -> Competence:
        """Never assigned to a variable by PyMC itself."""
        return Competence.INCOMPATIBLE


def _check(conditional: Conditional, points: Sequence[Point]) -> None:
    """Raise ``ValueError`` if a conditional is not a Gamma distribution at one of some points."""
    errors = []
    for point in points:
        try:
            conditional.fit(point)
        except NotFinite as error:
            errors.append(error)  # the chain may start elsewhere
        except SamplingError as error:
            raise ValueError(str(error)) from None
    if len(errors) == len(points):
        raise ValueError(str(errors[-1]))


def _points_to_check(model: Model, initial_point: dict[str, Any] | None) -> tuple[Point, Point]:
    """Return a point near the initial one, and that one.

    Many values are zero at the initial point, where conditionals may look like other ones. Values
    of the first point are not, and otherwise they keep their sign.
    """
    point = starting_point(model, initial_point)
    rng = np.random.default_rng(0)
    near = {}
    for name, initial_value in point.items():
        value = np.asarray(initial_value)
        if value.dtype.kind == "f":
            normals = rng.normal(size=value.shape)
            factors = rng.uniform(0.5, 1.5, value.shape)
            value = np.where(value == 0, normals, value * factors).astype(value.dtype)
        near[name] = value
    return near, point
