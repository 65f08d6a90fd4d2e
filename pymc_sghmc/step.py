"""The adapter between PyMC's step protocol and the samplers: the only one, for all of them.

Turns ``init`` and ``update`` of a sampler file into a step method: raveled positions, per-chain
reset, the inner loop, statistics, saved states and faults. Contains no formula of a sampler and
no way of estimating a gradient.
"""

import math
import warnings

from collections.abc import Mapping
from typing import Any

import numpy as np

from pymc.exceptions import SamplingError
from pymc.model import modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import Competence, StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.util import get_random_generator, get_value_vars_from_user_vars
from rich.progress import TextColumn
from rich.table import Column

from pymc_sghmc.compat import ChainSetup, add_end_of_run_check
from pymc_sghmc.diagnostics import temperature_warnings
from pymc_sghmc.gradients import (
    MinibatchGradient,
    PreconditionedGradient,
    preconditioner_factor,
)
from pymc_sghmc.rows import minibatch_outputs
from pymc_sghmc.thermometer import Fault, NonFinite, SamplingStopped, Thermometer

__all__ = ["StochasticGradientStep"]


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
    hyperparameters : dict
        Further keyword arguments of ``update``.
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
        hyperparameters=None,
    ):
        model = modelcontext(model)
        self.n_steps = _whole("n_steps", n_steps)
        self.restart_every = None
        if restart_every is not None:
            self.restart_every = _whole("resample_momentum_every", restart_every)
            if self.restart_every == 1:
                raise ValueError(
                    "resample_momentum_every=1: the gradient acts through the momentum of the next "
                    "step, so that momentum redrawn at every step leaves a random walk without a "
                    "target. Take at least 2; for fresh momentum at every step use SGLD."
                )
        if not (_is_number(temperature) and math.isfinite(temperature) and temperature >= 0):
            raise ValueError(
                f"temperature={temperature!r}: must be a finite number, 1 for the posterior, "
                "0 for optimisation."
            )
        self.temperature = float(temperature)
        self.schedule = _as_schedule(learning_rate)
        self.hyperparameters = {} if hyperparameters is None else hyperparameters

        self.vars = _continuous_variables(vars, model, type(self).__name__)
        self.var_names = tuple(var.name for var in self.vars)
        self.blocked = blocked
        point = model.initial_point() if initial_point is None else initial_point
        self.shapes = [np.shape(point[name]) for name in self.var_names]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.d = sum(self.sizes)
        self.factor = None
        if preconditioner is not None:
            self.factor = preconditioner_factor(preconditioner, self.d)

        self.gradient = MinibatchGradient(
            model, self.vars, batch_size, point, compile_kwargs=compile_kwargs
        )
        if self.gradient.given_types and minibatch_outputs([model.logp()]):
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
        return self.hyperparameters

    def step(self, point):
        """Make one draw of ``n_steps`` inner steps."""
        if self.fault is not None:
            raise SamplingStopped(self.fault)
        position = self._ravel(point)
        self.gradient.condition_on(point)
        if self.centre is None:
            self.centre = position.astype(float)
        self.meter.begin_draw(self.centre)
        weight = kinetic = 0.0
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                self.begin_draw(position)
                state = self._state_at(position)
                for _ in range(self.n_steps):
                    eta = self.schedule(self.n_updates)
                    if not (eta > 0 and math.isfinite(eta)):
                        raise Fault(
                            f"learning_rate: the schedule gives {eta!r} at inner step "
                            f"{self.n_updates}; rates must be finite and above zero"
                        )
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
                position = self._theta(state.position)
                if not np.isfinite(position).all():
                    raise NonFinite(position, position, info["minibatch_logp"])
        except NonFinite as error:
            return self._stop(point, self._explain(error), eta)
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

    def _state_at(self, position):
        """Return the chain's state, at the position that PyMC hands over."""
        phi = position
        if self.factor is not None:
            phi = (
                position / self.factor
                if self.factor.ndim == 1
                else np.linalg.solve(self.factor, position)
            )
        if self.state is None:
            return self.init(phi, self.schedule(self.n_updates), self.rng, self.temperature)
        return self.state._replace(position=phi)

    def _theta(self, phi):
        if self.factor is None:
            return phi
        return self.factor * phi if self.factor.ndim == 1 else self.factor @ phi

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
            f"{name} stopped: {message}. The {self.n_kept} draws before it are kept; this last one, "
            "marked in sample_stats.diverging, repeats the position before it."
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

    def _explain(self, error) -> str:
        eta, t = self.schedule(self.n_updates), self.n_updates
        what, bad = "position", error.position
        if np.isfinite(bad).all():
            what, bad = "gradient", error.gradient
        if np.isfinite(bad).all():
            where = f"the log-density is {error.logp} for {', '.join(self.var_names)}"
        else:
            where = (
                f"the {what} of {self._name_of(np.flatnonzero(~np.isfinite(bad))[0])} is not finite"
            )
        when = f"at inner step {t} (draw {t // self.n_steps} of this chain)"
        if t == 0:
            return (
                f"{where} at the starting point. Check the model with model.debug(), or pass other "
                "initvals to pm.sample"
            )
        return f"{where} {when} with learning_rate={eta:.3g}. Try learning_rate={eta / 10:.2g}"

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

    @staticmethod
    def _progressbar_config(n_chains=1):
        columns = [
            TextColumn("{task.fields[divergences]}", table_column=Column("Divergences", ratio=1)),
            TextColumn(
                "{task.fields[learning_rate]}", table_column=Column("Learning rate", ratio=1)
            ),
            TextColumn(
                "{task.fields[temperature]:0.2f}", table_column=Column("Temperature", ratio=1)
            ),
        ]
        start = {"divergences": 0, "learning_rate": "", "temperature": 0.0}
        return columns, {name: [value] * n_chains for name, value in start.items()}

    @staticmethod
    def _make_progressbar_update_functions():
        shown = {"temperature": 1.0}

        def update_stats(stats):
            # One draw's temperature is mostly gradient noise, and far off on the way from the start:
            # show a running mean over the last hundred draws, each bounded.
            new = stats["configurational_temperature"]
            if math.isfinite(new):
                shown["temperature"] += (min(max(new, -10.0), 10.0) - shown["temperature"]) / 100
            return {
                "divergences": stats["divergences"],
                # as text: notebooks show numbers with three decimals
                "learning_rate": f"{stats['learning_rate']:.2e}",
                "temperature": shown["temperature"],
                "failing": stats["divergences"] > 0,
            }

        return (update_stats,)


def _rebuild(cls, attributes):
    step = object.__new__(cls)
    step.__dict__.update(attributes)
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
        return learning_rate
    if isinstance(learning_rate, str | Mapping) or not _is_number(learning_rate):
        raise ValueError(
            f"learning_rate={learning_rate!r}: pass a number above zero or a schedule t -> η_t from "
            "pymc_sghmc.schedules. About 0.01 times the smallest posterior variance is a "
            "cautious start."
        )
    eta = float(learning_rate)
    if not (eta > 0 and math.isfinite(eta)):
        raise ValueError(f"learning_rate={learning_rate!r}: must be finite and above zero.")
    return lambda t: eta


def _is_number(value) -> bool:
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiu"


def _whole(name, value) -> int:
    if not (_is_number(value) and np.asarray(value).dtype.kind in "iu" and value >= 1):
        raise ValueError(f"{name}={value!r}: must be a whole number of inner steps, at least 1.")
    return int(value)
