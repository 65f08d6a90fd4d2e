"""The adapter between PyMC's step protocol and the samplers: the only one, for all of them.

Turns ``init`` and ``update`` of a sampler file into a step method: raveled positions, per-chain
reset, the inner loop, statistics, saved states and faults. Contains no formula of a sampler and
no way of estimating a gradient.
"""

import logging
import math
import warnings

from dataclasses import field
from typing import Any, Unpack

import numpy as np

from pymc.exceptions import SamplingError
from pymc.model import modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import Competence, StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.util import get_random_generator

from pymc_sghmc.checks import continuous_variables, starting_point
from pymc_sghmc.compat import ChainSetup, add_end_of_run_check
from pymc_sghmc.diagnostics import temperature_warnings
from pymc_sghmc.faults import Fault, NonFinite, SamplingStopped
from pymc_sghmc.gradients.control_variates import ControlVariates
from pymc_sghmc.gradients.coordinates import checked_preconditioner, preconditioner_factor
from pymc_sghmc.gradients.thermometer import inner
from pymc_sghmc.loops.inner_loop import InnerLoop, Replay, is_update
from pymc_sghmc.loops.normals import MANY, standard_normals
from pymc_sghmc.models.graphs import minibatch_outputs
from pymc_sghmc.models.jumps import jumping_unknowns
from pymc_sghmc.rows.epochs import UniformControlVariates
from pymc_sghmc.rows.streams import minibatch_gradient
from pymc_sghmc.runs.shared_arrays import ByHandle
from pymc_sghmc.step.arguments import (
    SharedArguments,
    checked,
    compared,
    schedule_of,
    show_shared_arguments,
)
from pymc_sghmc.step.progress import make_progressbar_update_functions, progressbar_config
from pymc_sghmc.tuning.automatic import AutomaticSettings
from pymc_sghmc.tuning.setup import unconstrained_point

__all__ = ["StochasticGradientStep"]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

MANY_ROWS = 1000  # more aren't needed to see a jump


@dataclass_state
class StochasticGradientState(StepMethodState):
    """What a chain needs to go on exactly where it was, for all samplers."""

    settings: dict = field(metadata={"frozen": True})  # as given: another step can't go on with it
    n_draws: int
    tune: bool
    state: Any
    n_updates: int
    n_tuned: int
    n_kept: int
    centre: Any
    noise_covariance: Any
    setup_from: Any
    tuning: Any
    place: Any
    fault: Any


class StochasticGradientStep(AutomaticSettings, ByHandle, ChainSetup):
    """A step method made of a sampler's ``init`` and ``update``.

    Subclasses set ``init`` and ``update`` and hold their own arguments, with checks and documentation;
    a sampler that draws fresh momentum now and then sets ``restart_every`` before ``__init__``.

    Parameters
    ----------
    vars : list or None
        As documented by the samplers.
    own : dict
        The sampler's own arguments as given, by which saved states are compared.
    **shared
        See `SharedArguments`. Signature and docstring of each sampler get them by themselves.
    """

    restart_every = None  # inner steps after which ``init`` is called anew at the present position
    default_blocked = True
    stats_dtypes_shapes = {
        "learning_rate": (np.float64, []),
        "draw_weight": (np.float64, []),
        "kinetic_temperature": (np.float64, []),
        "configurational_temperature": (np.float64, []),
        "target_temperature": (np.float64, []),
        "gradient_norm": (np.float64, []),
        "gradient_noise": (np.float64, []),
        "friction": (np.float64, []),
        "control_variates": (bool, []),
        "minibatch_logp": (np.float64, []),
        "diverging": (bool, []),
        "divergences": (int, []),  # the dtype that NUTS gives it: both may be in one model
        "warning": (SamplerWarning, None),
    }
    _state_class = StochasticGradientState
    _progressbar_config = staticmethod(progressbar_config)
    _make_progressbar_update_functions = staticmethod(make_progressbar_update_functions)

    def __init_subclass__(cls, **kwargs):
        """Put the shared arguments into a sampler's signature and documentation."""
        super().__init_subclass__(**kwargs)
        show_shared_arguments(cls)

    def __init__(self, vars, *, own, **shared: Unpack[SharedArguments]):
        given = checked(shared, own)
        model = modelcontext(given["model"])
        self.settings = compared(given) | own
        self.n_steps, self.temperature = given["n_steps"], given["temperature"]
        self.target_bias = float(given["target_bias"])
        self.schedule = schedule_of(given["learning_rate"])
        self.schedule_varies = callable(given["learning_rate"])
        self.gradient_kind, self.blocked = given["gradient"], given["blocked"]

        self.vars = continuous_variables(vars, model, type(self).__name__)
        self.var_names = tuple(var.name for var in self.vars)
        point = starting_point(model, given["initial_point"])
        self.shapes = [np.shape(point[name]) for name in self.var_names]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.d = sum(self.sizes)
        self.preconditioner = checked_preconditioner(given["preconditioner"], self.d, self.schedule)
        self.factor = None
        if isinstance(self.preconditioner, np.ndarray):
            self.factor = preconditioner_factor(self.preconditioner, self.d)

        self.gradient = minibatch_gradient(
            model,
            self.vars,
            given["batch_size"],
            point,
            given["compile_kwargs"],
            given["data"],
            given["replace"],
        )
        if self.gradient_kind == "control_variates" and self.gradient.is_exact:
            raise ValueError(
                'gradient="control_variates": the gradient uses all data and has no noise. Pass a '
                'batch_size, or gradient="auto".'
            )
        self.control_variates = None
        if self.gradient_kind != "plain" and not self.gradient.is_exact:
            if (
                self.gradient_kind == "control_variates"
                or not self.gradient.likelihood_needs_others
            ):
                kind = ControlVariates if self.gradient.replace else UniformControlVariates
                self.control_variates = kind(self.gradient)
        if self.blocked:
            self._warn_of_other_steps(model, given["data"])
        if self.factor is not None:
            self.factor = self.factor.astype(self.gradient.dtype)
        self.given_centre = None
        if given["centre"] is not None:
            self.given_centre = self._ravel(unconstrained_point(model, given["centre"]))
        self.loops = {}  # compiled inner steps
        self.start_point, self.initial = point, self._ravel(point)
        self.begin_chain(get_random_generator(given["rng"]))
        # Compile for the types that will come, here and not in each worker.
        self.gradient(self.initial, self.gradient.draw_probe(np.random.default_rng(0)))
        self._warn_of_jumps()
        add_end_of_run_check(temperature_warnings)

    def _warn_of_other_steps(self, model, data):
        others = ", ".join(name for name, _ in self.gradient.given_types)
        if others and minibatch_outputs([model.logp()]):
            warnings.warn(
                f"{type(self).__name__} leaves {others} to other steps, and the model has a "
                "pm.Minibatch. Unless these are stochastic-gradient steps, too, they sample a density "
                "that changes at every call, and the posterior is wrong: use the model of all data "
                "with batch_size.",
                UserWarning,
                stacklevel=4,
            )
        if data is not None and self.gradient.likelihood_needs_others:
            needed = ", ".join(self.gradient.needed_by_likelihood)
            warnings.warn(
                f"{type(self).__name__}(data=...) leaves {needed} to other steps. These see only the "
                "rows that the model itself holds, and make the posterior wrong, unless they are "
                "stochastic-gradient steps with the same data.",
                UserWarning,
                stacklevel=4,
            )

    def _warn_of_jumps(self):
        if not self.gradient.conditional:
            return
        rows = self.gradient.draw_probe(np.random.default_rng(0))
        some = tuple(idx[:: 1 + len(idx) // MANY_ROWS] for idx in rows)
        ends = np.cumsum(self.sizes)
        places = {
            name: slice(end - size, end)
            for name, size, end in zip(self.var_names, self.sizes, ends, strict=True)
            if name in self.gradient.conditional
        }
        jumping = jumping_unknowns(
            lambda position: self.gradient(position, some)[0], self.initial, places
        )
        if jumping:
            warnings.warn(
                f"{type(self).__name__}: the log-density jumps where a condition, an index or a rounded "
                f"number changes with {', '.join(jumping)}. Gradients don't see it, so that the "
                "posterior comes out wrong, whatever its temperature. Make the condition smooth, such "
                "as pm.math.sigmoid((x - c) / width) for x > c, or leave these unknowns out of vars "
                "and give them to pm.Slice or pm.Metropolis.",
                UserWarning,
                stacklevel=4,
            )

    def begin_chain(self, rng):
        """Forget the last chain and read the data anew (``pm.set_data`` may have changed them)."""
        self.rng = rng
        self.tune = True
        self.state = self.centre = self.noise_covariance = self.fault = None
        self.setup_from = self.tuning = None
        self.ready_for = None
        self.n_draws = self.n_updates = self.n_tuned = self.n_kept = 0
        self.gradient.load_data()
        self.place = None
        self._use(self.gradient)

    @property
    def place(self):
        """Where the chain is in data that it goes through without replacement."""
        return self.gradient.place

    @place.setter
    def place(self, place):
        self.gradient.place = place

    def stop_tuning(self):
        """End of tuning: settings, and the centre of the thermometer, stay as they are."""
        self.tune = False
        if self.tuning is not None and self.state is not None:
            self._revise(self.state.position)

    def begin_draw(self, position):
        """Estimate what ``update`` needs once per draw; samplers may override it."""

    def update_arguments(self, learning_rate):
        """Keyword arguments of ``update`` at this learning rate; samplers may override it."""
        return {}

    def step(self, point):
        """Make one draw of ``n_steps`` inner steps."""
        if self.fault is not None:
            raise SamplingStopped(self.fault)
        n, self.n_draws = self.n_draws, -1  # a state saved in the middle of a draw is of no draw
        with self.one_blas_thread():
            new = self._draw(point)
        self.n_draws = n + 1
        return new

    def _draw(self, point):
        position = self.start = self._ravel(point)
        self.gradient.condition_on(point)
        try:
            position = self._begin_draw(position)
        except NonFinite as error:
            return self._stop(point, self._explain(error, math.nan), math.nan)
        self.meter.begin_draw(self.centre)
        weight, kinetic, eta = 0.0, 0.0, math.nan
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                eta = self._rate()
                self.begin_draw(position)
                state = self._state_at(position, eta)
                made = 0
                while made < self.n_steps:
                    eta = self._rate()
                    if self.restart_every and self.n_updates % self.restart_every == 0:
                        state = self.init(state.position, eta, self.rng, self.temperature)
                    arguments = self.update_arguments(eta)
                    arguments["temperature"] = self.temperature
                    target, rng, n = self.target, self.rng, self._n_alike(made)
                    loop = self._inner_loop(state, arguments) if n else None
                    if loop is not None:
                        done = loop(
                            state,
                            n,
                            rng,
                            settings={"learning_rate": eta, **arguments},
                            centre=self.centre,
                            factor=self.factor,
                        )
                        state = done.state
                        made, weight = made + done.n_steps, weight + done.n_steps * eta
                        self.n_updates += done.n_steps
                        kinetic += done.kinetic / eta
                        self.meter.add(done.virial, done.square_norm)
                        if done.failed is None:
                            continue
                        target = rng = Replay(self.target, *done.failed)  # it says what is wrong
                    elif self.d >= MANY:  # NumPy's normals would take as long as all else
                        minibatch = self.target.draw_minibatch(rng)
                        [normals] = standard_normals(rng, (1, self.d), self.gradient.dtype)
                        target = rng = Replay(self.target, minibatch, normals)
                    state, info = self.update(state, target, eta, rng, **arguments)
                    self.n_updates += 1
                    made, weight = made + 1, weight + eta
                    if len(state) > 1:
                        kinetic += inner(state.momentum, state.momentum) / eta
                position = state.position
                if self.factor is not None:
                    position = self.target.to_theta(position)
                if not np.isfinite(position).all() or self._is_lost(position):
                    raise NonFinite(position, position, info["minibatch_logp"])
        except NonFinite as error:
            if self._can_slow_down():
                return self._unravel(self._jump(), point), [self._stats_of_fault(eta)]
            return self._stop(point, self._explain(error, eta), eta)
        except Fault as error:
            return self._stop(point, str(error), eta)
        self.state, meter = state, self.meter
        if self.tune:
            # Mean of the tuning draws with weights growing as t³: it forgets the way from the start.
            self.n_tuned += 1
            self.centre = self.centre + (position - self.centre) * (4 / (self.n_tuned + 3))
            if self.tuning is not None and self.is_tuned:
                self._measure(state.position, meter.virial / (self.n_steps * self.d))
        else:
            self.n_kept += 1
        m = self.n_steps
        stats = {
            "learning_rate": eta,
            "draw_weight": weight,
            "kinetic_temperature": kinetic / (m * self.d) if len(state) > 1 else np.nan,
            "configurational_temperature": meter.virial / (m * self.d),
            "target_temperature": self.temperature,
            "gradient_norm": math.sqrt(meter.square_norm / m),
            "gradient_noise": self.gradient_noise(eta),
            "friction": self.update_arguments(eta).get("friction", math.nan),
            "control_variates": self.uses_control_variates,
            "minibatch_logp": float(info["minibatch_logp"]),
            "diverging": False,
            "divergences": 0,
            "warning": self._notice() if self.n_kept == 1 else None,
        }
        return self._unravel(position, point), [stats]

    def _rate(self):
        """η of the next inner step."""
        return self.tuning.learning_rate if self.schedule is None else self.schedule(self.n_updates)

    def _n_alike(self, made) -> int:
        """Inner steps from here with equal settings, but for the last of a draw, which reports."""
        n = self.n_steps - 1 - made
        if self.restart_every:
            n = min(n, self.restart_every - self.n_updates % self.restart_every)
        return min(n, 1) if self.schedule is not None and self.schedule_varies else n

    def _inner_loop(self, state, arguments):
        """Return the compiled loop for these settings, or None where a matrix is among them."""
        ndims = tuple(map(np.ndim, arguments.values()))
        if max(ndims) > 1:
            return None  # roots of matrices are NumPy's
        key = (self.uses_control_variates, *self.gradient.is_noisy, np.ndim(self.factor), ndims)
        if key not in self.loops:
            if not self.gradient.has_graph:
                return None  # in a worker that wasn't forked, after a change of gradient
            gradient, kwargs = self.meter.gradient, self.gradient.compile_kwargs
            loop = InnerLoop(self.update, state, gradient, self.factor, arguments, kwargs)
            self.loops[key] = loop if self._is_right(loop, state, arguments) else None
        return self.loops[key]

    def _is_right(self, loop, state, arguments) -> bool:
        """Check a compiled loop on this model, here, and say so if Python must take its place."""
        place, sums = self.place, (self.meter.virial, self.meter.square_norm)
        try:
            right = is_update(
                loop,
                self.update,
                state,
                self.target,
                settings={"learning_rate": self._rate(), **arguments},
                centre=self.centre,
                factor=self.factor,
            )
        except NonFinite:
            right = True  # nothing to compare; the step itself will say what is wrong
        self.place = place
        self.meter.virial, self.meter.square_norm = sums
        if not right:
            _log.warning(
                f"{type(self).__name__}: the compiled inner step doesn't agree with the gradient of "
                "this model, so that steps are made one by one in Python. Results are right, but "
                "slower. Please report the model."
            )
        return right

    def compile_inner_steps(self):
        """Make three inner steps, so that chains in other processes find them compiled."""
        rng, n_steps, self.n_steps = self.rng, self.n_steps, min(3, self.n_steps)
        try:
            self.begin_chain(np.random.default_rng(0))
            self.step(self._unravel(self.initial, self.start_point))
        except SamplingError:
            pass  # pm.sample may start elsewhere; if not, the first draw says what is wrong
        finally:
            self.n_steps = n_steps
            self.begin_chain(rng)

    def gradient_noise(self, learning_rate) -> float:
        """β̂/α where the sampler has an estimate, else NaN."""
        return math.nan

    def _state_at(self, position, eta):
        """Return the chain's state, at the position that PyMC hands over."""
        if self.factor is not None:
            # as a rule it is where the chain was, and no triangular system needs to be solved
            if self.state is not None and np.array_equal(
                self.target.to_theta(self.state.position), position
            ):
                return self.state
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
        return dict(point), [self._stats_of_fault(eta, warning)]

    def _stats_of_fault(self, eta, warning=None):
        stats = dict.fromkeys(self.stats_dtypes_shapes, math.nan)
        return stats | {
            "learning_rate": eta,
            "draw_weight": 0.0,
            "target_temperature": self.temperature,
            "control_variates": self.uses_control_variates,
            "diverging": True,
            "divergences": 1,
            "warning": warning,
        }

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
        odd = ""
        if np.isfinite(error.position).all():  # else the chain ran away, whatever the data
            odd = self.gradient.odd_values(error.minibatch)
        rows = "the data" if error.minibatch is None else "these rows of the data"
        if odd == "missing values":
            return f"{where}: {rows} have {odd}. Drop such rows"
        if self.state is None and not self._is_finite_at(self.start):
            return (
                f"{where} at the starting point. Check the model with model.debug(), or pass other "
                f"initvals to pm.sample{others}"
            )
        if odd:  # they may be bounds
            return f"{where}: {rows} have {odd}. Drop such rows, if they aren't bounds"
        return (
            f"{where} at inner step {t} (draw {t // self.n_steps} of this chain) with "
            f"learning_rate={eta:.3g}. Try learning_rate={eta / 10:.2g}{others}"
        )

    def _is_finite_at(self, position) -> bool:
        """Whether density and gradient are finite here, on some rows."""
        minibatch = self.gradient.draw_probe(np.random.default_rng(0))
        with np.errstate(all="ignore"):
            logp, grad = self.gradient(position, minibatch)
        return bool(np.isfinite(logp) and np.isfinite(grad).all())

    def _name_of(self, index) -> str:
        for name, shape, size in zip(self.var_names, self.shapes, self.sizes, strict=True):
            if index < size:
                entry = ", ".join(map(str, np.unravel_index(index, shape)))
                return f"{name}[{entry}]" if shape else name
            index -= size
        raise IndexError(index)

    def after_unpickling(self):
        """Warn of temperatures at the end of runs in this process, too."""
        add_end_of_run_check(temperature_warnings)

    @staticmethod
    def competence(var, has_grad):
        """Never assigned to a variable by PyMC itself: minibatches are the user's choice."""
        return Competence.INCOMPATIBLE
