"""The adapter between PyMC's step protocol and the samplers: the only one, for all of them.

Turns ``init`` and ``update`` of a sampler file into a step method: raveled positions, per-chain
reset, the inner loop, statistics, saved states and faults. Contains no formula of a sampler and
no way of estimating a gradient.
"""

import math
import warnings

from functools import partial
from typing import Any

import numpy as np

from pymc.exceptions import SamplingError
from pymc.model import modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import Competence, StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.util import get_random_generator, get_value_vars_from_user_vars

from pymc_sghmc.compat import ChainSetup, add_end_of_run_check
from pymc_sghmc.diagnostics import temperature_warnings
from pymc_sghmc.faults import Fault, NonFinite, SamplingStopped
from pymc_sghmc.gradients import (
    MinibatchGradient,
    PreconditionedGradient,
    preconditioner_factor,
)
from pymc_sghmc.progress import make_progressbar_update_functions, progressbar_config
from pymc_sghmc.rows import minibatch_outputs
from pymc_sghmc.schedules import constant
from pymc_sghmc.thermometer import Thermometer

__all__ = ["StochasticGradientStep", "is_number", "whole_steps"]


@dataclass_state
class StochasticGradientState(StepMethodState):
    """What a chain needs to go on exactly where it was, for all samplers."""

    tune: bool
    state: Any
    n_updates: int
    n_tuned: int
    n_kept: int
    centre: Any
    noise_covariance: Any
    fault: Any


class StochasticGradientStep(ChainSetup):
    """A step method made of a sampler's ``init`` and ``update``.

    Subclasses hold a signature, its checks and its documentation, and set ``init`` and ``update``.

    Parameters
    ----------
    vars, batch_size, n_steps, temperature, preconditioner, model, rng, initial_point, \
    compile_kwargs, blocked
        As documented by the samplers.
    learning_rate : float or callable
        η, or a schedule ``t -> η_t``.
    restart_every : int, optional
        Inner steps after which ``init`` is called anew at the present position.
    """

    default_blocked = True
    stats_dtypes_shapes = {
        "learning_rate": (np.float64, []),
        "draw_weight": (np.float64, []),
        "kinetic_temperature": (np.float64, []),
        "configurational_temperature": (np.float64, []),
        "target_temperature": (np.float64, []),
        "gradient_norm": (np.float64, []),
        "gradient_noise": (np.float64, []),
        "minibatch_logp": (np.float64, []),
        "diverging": (bool, []),
        "divergences": (int, []),  # the dtype that NUTS gives it: both may be in one model
        "warning": (SamplerWarning, None),
    }
    _state_class = StochasticGradientState
    _progressbar_config = staticmethod(progressbar_config)
    _make_progressbar_update_functions = staticmethod(make_progressbar_update_functions)

    def __init__(
        self,
        vars,
        *,
        batch_size,
        learning_rate,
        n_steps,
        temperature,
        preconditioner,
        model,
        rng,
        initial_point,
        compile_kwargs,
        blocked,
        restart_every=None,
    ):
        model = modelcontext(model)
        self.n_steps = whole_steps("n_steps", n_steps)
        self.restart_every = restart_every
        if not (is_number(temperature) and math.isfinite(temperature) and temperature >= 0):
            raise ValueError(
                f"temperature={temperature!r}: must be a finite number, 1 for the posterior, "
                "0 for optimisation."
            )
        self.temperature = float(temperature)
        self.schedule = _as_schedule(learning_rate)

        self.vars = _continuous_variables(vars, model, type(self).__name__)
        self.var_names = tuple(var.name for var in self.vars)
        self.blocked = blocked
        point = model.initial_point()
        point |= {name: np.asarray(value) for name, value in (initial_point or {}).items()}
        self.shapes = [np.shape(point[name]) for name in self.var_names]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.d = sum(self.sizes)
        self.factor = None
        if preconditioner is not None:
            self.factor = preconditioner_factor(preconditioner, self.d)

        self.gradient = MinibatchGradient(
            model, self.vars, batch_size, point, compile_kwargs=compile_kwargs
        )
        if blocked and self.gradient.given_types and minibatch_outputs([model.logp()]):
            others = ", ".join(name for name, _ in self.gradient.given_types)
            warnings.warn(
                f"{type(self).__name__} leaves {others} to other steps, and the model has a "
                "pm.Minibatch. PyMC's own steps would sample a density that changes at every call: "
                "give them a stochastic-gradient step, too, or use the model of all data with "
                "batch_size.",
                UserWarning,
                stacklevel=3,
            )
        self.meter = Thermometer(self.gradient)
        self.target = self.meter
        if self.factor is not None:
            self.factor = self.factor.astype(self.gradient.dtype)
            self.target = PreconditionedGradient(self.meter, self.factor)
        self.begin_chain(get_random_generator(rng))
        # Compile for the types that will come, here and not in each worker.
        self.gradient(self._ravel(point), self.gradient.draw_minibatch(np.random.default_rng(0)))
        add_end_of_run_check(temperature_warnings)

    def begin_chain(self, rng):
        """Forget the last chain and read the data anew (``pm.set_data`` may have changed them)."""
        self.rng = rng
        self.tune = True
        self.state = self.centre = self.noise_covariance = self.fault = None
        self.n_updates = self.n_tuned = self.n_kept = 0
        self.gradient.load_data()

    def stop_tuning(self):
        """End of tuning: the centre of the thermometer stays where it is."""
        self.tune = False

    def begin_draw(self, position):
        """Estimate what ``update`` needs once per draw; samplers may override it."""

    def update_arguments(self, learning_rate):
        """Keyword arguments of ``update`` at this learning rate; samplers may override it."""
        return {}

    def step(self, point):
        """Make one draw of ``n_steps`` inner steps."""
        if self.fault is not None:
            raise SamplingStopped(self.fault)
        position = self.start = self._ravel(point)
        self.gradient.condition_on(point)
        if self.centre is None:
            self.centre = position.astype(float)
        self.meter.begin_draw(self.centre)
        weight, kinetic, eta = 0.0, 0.0, math.nan
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                eta = self.schedule(self.n_updates)
                self.begin_draw(position)
                state = self._state_at(position, eta)
                for _ in range(self.n_steps):
                    eta = self.schedule(self.n_updates)
                    if self.restart_every and self.n_updates % self.restart_every == 0:
                        state = self.init(state.position, eta, self.rng, self.temperature)
                    state, info = self.update(
                        state,
                        self.target,
                        eta,
                        self.rng,
                        temperature=self.temperature,
                        **self.update_arguments(eta),
                    )
                    self.n_updates += 1
                    weight += eta
                    if len(state) > 1:
                        kinetic += float(state.momentum.dot(state.momentum)) / eta
                position = state.position
                if self.factor is not None:
                    position = self.target.to_theta(position)
                if not np.isfinite(position).all():
                    raise NonFinite(position, position, info["minibatch_logp"])
        except NonFinite as error:
            return self._stop(point, self._explain(error, eta), eta)
        except Fault as error:
            return self._stop(point, str(error), eta)
        self.state = state
        if self.tune:
            # Mean of the tuning draws with weights growing as t³: it forgets the way from the start.
            self.n_tuned += 1
            self.centre = self.centre + (position - self.centre) * (4 / (self.n_tuned + 3))
        else:
            self.n_kept += 1
        m, meter = self.n_steps, self.meter
        stats = {
            "learning_rate": eta,
            "draw_weight": weight,
            "kinetic_temperature": kinetic / (m * self.d) if len(state) > 1 else np.nan,
            "configurational_temperature": meter.virial / (m * self.d),
            "target_temperature": self.temperature,
            "gradient_norm": math.sqrt(meter.square_norm / m),
            "gradient_noise": self.gradient_noise(eta),
            "minibatch_logp": float(info["minibatch_logp"]),
            "diverging": False,
            "divergences": 0,
            "warning": None,
        }
        return self._unravel(position, point), [stats]

    def gradient_noise(self, learning_rate) -> float:
        """β̂/α where the sampler has an estimate, else NaN."""
        return math.nan

    def _state_at(self, position, eta):
        """Return the chain's state, at the position that PyMC hands over."""
        if self.factor is not None:
            position = self.target.from_theta(position)
        if self.state is None:
            return self.init(position, eta, self.rng, self.temperature)
        return self.state._replace(position=position)

    def _ravel(self, point):
        parts = [np.ravel(point[name]) for name in self.var_names]
        return np.concatenate(parts).astype(self.gradient.dtype)

    def _unravel(self, position, point):
        new, start = dict(point), 0
        for var, shape, size in zip(self.vars, self.shapes, self.sizes, strict=True):
            new[var.name] = position[start : start + size].reshape(shape).astype(var.dtype)
            start += size
        return new

    def _stop(self, point, message, eta):
        """End the chain: with an error where nothing is lost, else keeping what was sampled."""
        name = type(self).__name__
        if self.n_kept == 0:
            raise SamplingError(f"{name} stopped: {message}.")
        self.fault = (
            f"{name} stopped: {message}. {self.n_kept} draws of this chain were made before it, and "
            "PyMC returns what it would after an interruption: of several chains some may be cut "
            "short or left out. A draw marked in sample_stats.diverging repeats the one before it."
        )
        warning = SamplerWarning(WarningType.DIVERGENCE, self.fault, "error", self.n_updates)
        stats = dict.fromkeys(self.stats_dtypes_shapes, math.nan)
        stats.update(
            learning_rate=eta,
            draw_weight=0.0,
            target_temperature=self.temperature,
            diverging=True,
            divergences=1,
            warning=warning,
        )
        return dict(point), [stats]

    def _explain(self, error, eta) -> str:
        t = self.n_updates
        what, bad = "position", error.position
        if np.isfinite(bad).all():
            what, bad = "gradient", error.gradient
        if np.isfinite(bad).all():
            where = f"the log-density of {', '.join(self.var_names)} is {error.logp:.3g}"
        else:
            first = np.flatnonzero(~np.isfinite(np.diag(bad) if np.ndim(bad) == 2 else bad))
            where = f"the {what} of {self._name_of(first[0] if len(first) else 0)} is not finite"
        given = ", ".join(name for name, _ in self.gradient.given_types)
        others = f", or look at the steps that sample {given}" if given else ""
        if error.minibatch is not None and self.gradient.has_missing_values(error.minibatch):
            return f"{where}: these rows of the data have missing values. Drop them"
        if self.state is None and not self._is_finite_at_start():
            return (
                f"{where} at the starting point. Check the model with model.debug(), or pass other "
                f"initvals to pm.sample{others}"
            )
        return (
            f"{where} at inner step {t} (draw {t // self.n_steps} of this chain) with "
            f"learning_rate={eta:.3g}. Try learning_rate={eta / 10:.2g}{others}"
        )

    def _is_finite_at_start(self) -> bool:
        """Whether density and gradient are finite where the draw began, on some rows."""
        minibatch = self.gradient.draw_minibatch(np.random.default_rng(0))
        with np.errstate(all="ignore"):
            logp, grad = self.gradient(self.start, minibatch)
        return bool(np.isfinite(logp) and np.isfinite(grad).all())

    def _name_of(self, index) -> str:
        for name, shape, size in zip(self.var_names, self.shapes, self.sizes, strict=True):
            if index < size:
                entry = ", ".join(map(str, np.unravel_index(index, shape)))
                return f"{name}[{entry}]" if shape else name
            index -= size
        raise IndexError(index)

    def __reduce__(self):
        # BlockedStep pickles its arguments and with them the model and a second copy of the data.
        attributes = self.__dict__.copy()
        attributes.pop("_BlockedStep__newargs", None)
        return _rebuild, (type(self), attributes)

    @staticmethod
    def competence(var, has_grad):
        """Never assigned to a variable by PyMC itself: minibatches are the user's choice."""
        return Competence.INCOMPATIBLE


def _rebuild(cls, attributes):
    step = object.__new__(cls)
    step.__dict__.update(attributes)
    add_end_of_run_check(temperature_warnings)
    return step


def _continuous_variables(vars, model, sampler) -> list:
    """Value variables to sample, in the model's order, which is that of PyMC's points."""
    chosen = (
        model.continuous_value_vars if vars is None else get_value_vars_from_user_vars(vars, model)
    )
    discrete = [var.name for var in chosen if not var.dtype.startswith("float")]
    if discrete:
        raise ValueError(
            f"{sampler}(vars=...): {', '.join(discrete)} is discrete and has no gradient. Leave it "
            "out of vars: PyMC gives it another step method."
        )
    if not chosen:
        raise ValueError(f"{sampler}: the model has no continuous unknowns to sample.")
    return [var for var in model.value_vars if var in set(chosen)]


def _as_schedule(learning_rate):
    if callable(learning_rate):
        return partial(_rate, learning_rate)
    if not is_number(learning_rate):
        raise ValueError(
            f"learning_rate={learning_rate!r}: pass a number above zero or a schedule t -> η_t from "
            "pymc_sghmc.schedules. About 0.01 times the smallest posterior variance is a "
            "cautious start."
        )
    eta = float(learning_rate)
    if not (eta > 0 and math.isfinite(eta)):
        raise ValueError(f"learning_rate={learning_rate!r}: must be finite and above zero.")
    return constant(eta)


def _rate(schedule, t) -> float:
    """η_t as a Python number: NumPy's would turn a float32 chain into float64."""
    eta = schedule(t)
    if not (is_number(eta) and eta > 0 and math.isfinite(eta)):
        raise Fault(
            f"learning_rate: the schedule gives {eta} at inner step {t}; rates must be finite "
            "numbers above zero"
        )
    return float(eta)


def is_number(value) -> bool:
    """Whether ``value`` is one real number, of Python's or NumPy's, and no bool."""
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiu"


def whole_steps(name, value) -> int:
    """Check a number of inner steps."""
    if not (is_number(value) and np.asarray(value).dtype.kind in "iu" and value >= 1):
        raise ValueError(f"{name}={value!r}: must be a whole number of inner steps, at least 1.")
    return int(value)
