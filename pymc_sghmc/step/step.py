"""The adapter between PyMC's step protocol and the samplers: the only one, for all of them.

Turns ``init`` and ``update`` of a sampler file into a step method: raveled positions, the record of
a chain, the inner steps of a draw, statistics, saved states and errors. Contains no formula of a
sampler.
"""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Unpack

import numpy as np

from pymc.exceptions import SamplingError
from pymc.model import Model, modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.compound import Competence
from pymc.util import get_random_generator
from pytensor import config

from pymc_sghmc.checks import (
    continuous_variables,
    is_start_given,
    starting_point,
    unconstrained_point,
)
from pymc_sghmc.compat import ChainSetup
from pymc_sghmc.diagnostics import temperature_warnings
from pymc_sghmc.diagnostics.divergences import divergence_warnings
from pymc_sghmc.diagnostics.mixing import single_chain_warnings
from pymc_sghmc.diagnostics.stand_ins import log_likelihood_warnings
from pymc_sghmc.exceptions import ChainError, NonFinite, SamplingStopped
from pymc_sghmc.gradients.metric import checked_preconditioner
from pymc_sghmc.hierarchy.rewrites import integrated_effects
from pymc_sghmc.interrupts import DelayedInterrupt
from pymc_sghmc.models.graphs import minibatch_outputs
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.phases import COMPILING
from pymc_sghmc.pymc_hooks import add_end_of_run_check, one_blas_thread
from pymc_sghmc.rows.files import DataFileError, whole_files
from pymc_sghmc.runs.shared_arrays import ByHandle
from pymc_sghmc.step.all_rows import GivenRows
from pymc_sghmc.step.arguments import SharedArguments, checked, compared, schedule_of
from pymc_sghmc.step.chain import Chain, StochasticGradientState
from pymc_sghmc.step.draw import STATISTICS, Draw, DrawLoop
from pymc_sghmc.step.explain import explanation, stop_message
from pymc_sghmc.step.gradients import compile_second_derivatives, gradients
from pymc_sghmc.step.improper import warn_of_improper_posterior
from pymc_sghmc.step.log import log_rows_elsewhere, log_setup, log_windows
from pymc_sghmc.step.progress import make_progressbar_update_functions, progressbar_config
from pymc_sghmc.step.setup_display import shown
from pymc_sghmc.step.signature import show_shared_arguments
from pymc_sghmc.step.warn import (
    draw_warning,
    jumps_around,
    more_rows_warning,
    refuse_odd_values,
    refuse_single_rows,
    slower_gradient_warning,
    warn_of_jumps,
    warn_of_other_steps,
    warn_of_setup,
)
from pymc_sghmc.tuning.linear_step import Rule
from pymc_sghmc.tuning.noise_estimates import GivenNoise
from pymc_sghmc.tuning.settings import Settings
from pymc_sghmc.tuning.sizes import RowChoice
from pymc_sghmc.tuning.tuner import Points, Tuner

__all__ = ["StochasticGradientStep"]

CHECKS_OF_RUNS = (
    divergence_warnings,
    temperature_warnings,
    single_chain_warnings,
    log_likelihood_warnings,
)


class StochasticGradientStep(ByHandle, ChainSetup):
    """A step method made of a sampler's ``init`` and ``update``.

    Subclasses set ``init``, ``update`` and ``state_type`` and hold their own arguments, with checks
    and documentation; a sampler that draws fresh momentum now and then sets ``restart_every``
    before ``__init__``. Fields of the state that are reported at each draw stand in ``statistics``.

    Parameters
    ----------
    vars : list or None
        As documented by the samplers.
    own : dict
        The sampler's own arguments as given, by which saved states are compared.
    friction : float or "auto", optional
        α, for a rule that takes one.
    noise : GivenNoise, TunedNoise or NoiseOfEachDraw, optional
        For a rule that takes a ``noise_estimate``.
    **shared
        See `SharedArguments`. Signature and docstring of each sampler get them by themselves.
    """

    restart_every: int | None = (
        None  # inner steps after which ``init`` is called anew at the present position
    )
    statistics = {}
    stats_dtypes_shapes = STATISTICS
    _state_class = StochasticGradientState
    given_rows = None  # of a step in another process
    left_behind = (*ByHandle.left_behind, "given_rows")
    arrays = property(lambda self: self.tuner.gradient.data.fixed)  # by which runs know their data
    is_stopped = property(lambda self: self.chain.fault is not None)  # the last draw was none
    _progressbar_config = staticmethod(progressbar_config)
    _make_progressbar_update_functions = staticmethod(make_progressbar_update_functions)

    def __init_subclass__(cls, **kwargs):
        """Put what all samplers share into a sampler's signature, documentation and statistics."""
        super().__init_subclass__(**kwargs)
        show_shared_arguments(cls)
        own = {name: (dtype, []) for name, dtype in cls.statistics.items()}
        cls.stats_dtypes_shapes = {**cls.stats_dtypes_shapes, **own}

    def __init__(
        self, vars, own, friction="auto", noise=None, /, **shared: Unpack[SharedArguments]
    ):
        given = checked(shared)
        # PyTensor notes where each variable was made, for messages: thousands of them here
        with shown(type(self).__name__) as display, config.change_flags(traceback__limit=0):
            try:
                tuning = self._build(vars, own, friction, noise, given, display)
            except IndexError as error:
                if "out of bounds" not in str(error):
                    raise
                reason = str(error).splitlines()[0]  # PyTensor adds pages to it
                raise ValueError(
                    f"The data have an index that the model has no entry for: {reason}. Numbers of "
                    "groups go from 0 to the number of groups less one, as column.cat.codes gives "
                    "them."
                ) from error
        if tuning is not None:
            self._tell(tuning, display)
        log_rows_elsewhere(type(self).__name__, self.tuner.gradient.density.data_rows)

    def _build(self, vars, own, friction, noise, given, display):
        """Make gradients, set up, and compile inner steps; return the settings of a set-up."""
        name = type(self).__name__
        model = modelcontext(given["model"])
        schedule = schedule_of(given["learning_rate"])
        self.settings = compared(given) | own
        self.blocked = given["blocked"]
        self.vars = continuous_variables(vars, model, name)
        display.begin(f"{COMPILING} the initial point")
        point = starting_point(model, given["initial_point"])
        display.begin("reading the model")
        effects, left = integrated_effects(model, given, point, self.vars)
        unknowns = Unknowns(left, point)
        preconditioner = checked_preconditioner(given["preconditioner"], unknowns.d, schedule)
        gradient, expansions = gradients(model, unknowns, point, given, preconditioner, effects)
        self.given_rows = GivenRows(model, given, gradient.data)
        self.unknowns = gradient.density.unknowns
        initial = gradient.density.from_model(self.unknowns.ravel(point))
        if self.blocked:
            warn_of_other_steps(name, model, gradient.density, given["data"])
        if (centre := given["centre"]) is not None:
            centre = unconstrained_point(model, centre, effects)
            centre = gradient.density.from_model(self.unknowns.ravel(centre))
        gradient(initial, gradient.order.probe(np.random.default_rng(0)))  # to compile it
        places = {
            unknown: self.unknowns.places[unknown] for unknown in gradient.density.conditional
        }
        jumping = jumps_around(gradient, places, initial)
        settings = Settings(
            Rule(self.update, self.state_type),
            schedule=schedule,
            friction=None if friction == "auto" else friction,
            noise=(noise or GivenNoise(0.0, False)).checked(gradient, preconditioner),
            target_bias=float(given["target_bias"]),
            temperature=given["temperature"],
        )
        self.tuner = Tuner(
            gradient,
            expansions,
            settings,
            preconditioner=preconditioner,
            kind=given["gradient"],
            points=Points(
                initial=initial,
                is_initial_given=is_start_given(model, given["initial_point"], self.vars),
                reference=centre,
            ),
            row_choice=_row_choice(model, given),
        )
        varies = callable(given["learning_rate"])
        self.draws = DrawLoop(self, self.tuner, given["n_steps"], schedule, varies)
        for check in CHECKS_OF_RUNS:
            add_end_of_run_check(check)
        self.begin_chain(get_random_generator(given["rng"]))
        tuning = self._prepare(jumping)
        pool = self.tuner.pool_report(tuning)
        if given["pool"] == "auto" and pool is not None and not pool.serves:
            log_windows(name, pool)
            return self._build(vars, own, friction, noise, given | {"pool": None}, display)
        if self.tuner.setup is not None:
            reference = self._point(self.tuner.setup.fit.mean, point)
            warn_of_improper_posterior(name, model, reference, given["data"] is None)
        display.begin(f"{COMPILING} inner steps")
        self._compile_inner_steps(point)
        return tuning

    def _prepare(self, jumping):
        """Set up, and warn of jumps in any case: they may be why there is no fit.

        Matrices are small, or sparse: on several cores BLAS spends more time on waiting for its
        threads than it saves, above all where these aren't idle.
        """
        try:
            with one_blas_thread()():
                return self._set_up() if self.tuner.needs_setup else None
        finally:
            warn_of_jumps(type(self).__name__, self.tuner, jumping)

    def _set_up(self):
        """Set up for chains from the initial point; return their settings, if there are any."""
        tuner = self.tuner
        compile_second_derivatives(tuner.gradient)
        refuse_single_rows(tuner.gradient.data.noisy_batch_sizes)
        try:
            return tuner.prepare()
        except NonFinite:
            refuse_odd_values(tuner.gradient.passes, tuner.initial)
            return None  # pm.sample may start elsewhere; if not, the first draw says what is wrong

    def _tell(self, tuning, display):
        """Say what was found, and how long it took."""
        name = type(self).__name__
        eta = self.draws.phase(tuning, 0).learning_rate
        log_setup(name, self.tuner, tuning, eta, display, self.settings["recover"])
        warn_of_setup(name, self.tuner, tuning)

    def _compile_inner_steps(self, point):
        """Make three inner steps, so that chains in other processes find them compiled."""
        rng = self.rng
        n_steps = self.draws.n_steps
        self.draws.n_steps = 3 if n_steps == "auto" else min(3, n_steps)
        try:
            self.begin_chain(np.random.default_rng(0))
            self.step(self._point(self.tuner.initial, point))
            self._recorded(self.tuner.initial, False)
        except SamplingError:
            pass  # pm.sample may start elsewhere; if not, the first draw says what is wrong
        finally:
            self.draws.n_steps = n_steps
            self.begin_chain(rng)

    def begin_chain(self, rng):
        """Begin a new record; the data are read anew, as ``pm.set_data`` may have changed them."""
        self.rng = rng
        self.tune = True
        self.n_draws = 0
        self.chain = Chain()
        self.tuner.begin_chain()

    def stop_tuning(self):
        """End of tuning: settings, and the centre of the thermometer, stay as they are."""
        self.tune = False
        self.chain.end_tuning(self.tuner, self.rng)

    def step(self, point):
        """Make one draw of ``n_steps`` inner steps."""
        if self.chain.fault is not None:
            raise SamplingStopped(self.chain.fault)
        n = self.n_draws  # a state saved in the middle of a draw is of no draw
        self.n_draws = -1
        with DelayedInterrupt(), self.one_blas_thread():
            try:
                with whole_files(self.tuner.gradient.data.files):
                    new = self._draw(point)
            except DataFileError as error:
                new = self._stop(point, error, Draw(), None)
        self.n_draws = n + 1
        return new

    def _draw(self, point):
        chain = self.chain
        tuner = self.tuner
        draw = Draw()
        density = tuner.gradient.density
        own = self.unknowns.ravel(point)
        density.condition_on(point)
        known = self.draws.known_position(chain.state, own)
        start = position = density.from_model(own) if known is None else known
        try:
            chain.tuning, position = tuner.begin_draw(chain.tuning, position, self.rng)
        except NonFinite as error:
            return self._stop(point, error, draw, start)
        if chain.mean is None:
            chain.mean = tuner.setup.fit.mean if tuner.setup else position.astype(float)
        target = tuner.target(chain.tuning)
        if known is None:
            position = self.draws.where_it_was(chain.state, target, position, own)
        target.begin_draw(chain, chain.mean)
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                position = self.draws(draw, chain, position, target, self.rng, self.tune)
        except NonFinite as error:
            sent_back = self._sent_back_while_tuning if self.tune else self._sent_back
            return sent_back(point, draw) or self._stop(point, error, draw, start)
        except ChainError as error:
            return self._stop(point, error, draw, start)
        statistics = draw.statistics(target, chain, tuner.settings, self.statistics)
        chain.state = draw.state
        warning = None
        if self.tune:
            temperature = statistics["configurational_temperature"]
            before = chain.tuning
            chain.learn(tuner, target, position, temperature, self.rng)
            warning = more_rows_warning(tuner, before, chain.tuning, chain.n_updates)
        else:
            chain.n_kept += 1
        warning = warning or draw_warning(type(self).__name__, tuner, chain, position)
        statistics["warning"] = warning
        in_model = density.to_model(position)
        self.draws.remember(in_model)
        new = self.unknowns.unravel(in_model, point)
        return new | self._recorded(position, self.tune), [statistics]

    def _sent_back_while_tuning(self, point, draw):
        """Begin anew with a shorter or another step; None where that is no help."""
        chain = self.chain
        old = chain.tuning
        slower = self.tuner.chooser.slower(old, self.tuner.initial)
        if not slower:
            return None
        chain.begin_anew(slower)
        new = self._point(self.tuner.setups.start(self.rng), point)
        warning = slower_gradient_warning(old, slower, chain.n_updates)
        warning = warning or more_rows_warning(self.tuner, old, slower, chain.n_updates)
        return new, [draw.statistics_of_fault(self, warning)]

    def _sent_back(self, point, draw):
        """Begin anew with the same step, as settings stay after tuning; None if that is no help."""
        chain = self.chain
        if chain.diverges_often or not self.tuner.departures.may_send_back(chain.tuning):
            return None
        chain.send_back()
        position = self.tuner.setups.start_after_divergence(self.rng, chain.mean)
        new = self._point(position, point) | self._recorded(position, is_tuning=False)
        return new, [draw.statistics_of_fault(self, None)]

    def _recorded(self, position, is_tuning):
        """Return values of further variables, such as effects that are integrated out."""
        gradient = self.tuner.gradient
        values = {}
        for rewrite in gradient.density.rewrites:
            values |= rewrite.recorded(gradient, position, self.rng, is_tuning)
        return values

    def _point(self, position, point):
        """Return ``point`` with the values of a position."""
        return self.unknowns.unravel(self.tuner.gradient.density.to_model(position), point)

    def _stop(self, point, error, draw, start):
        """End the chain: with an error where nothing is lost, else keeping what was sampled."""
        name = type(self).__name__
        chain = self.chain
        message = str(error)
        if isinstance(error, NonFinite):
            message = explanation(error, self.unknowns, self.tuner, chain, start, draw)
        if chain.n_kept == 0:
            raise SamplingError(f"{name} stopped: {message}.") from None
        chain.fault = stop_message(name, message, chain.n_kept)
        warning = SamplerWarning(WarningType.DIVERGENCE, chain.fault, "error", chain.n_updates)
        return dict(point), [draw.statistics_of_fault(self, warning)]

    def after_unpickling(self):
        """Warn of temperatures at the end of runs in this process, too."""
        for check in CHECKS_OF_RUNS:
            add_end_of_run_check(check)

    @staticmethod
    def competence(var, has_grad):
        """Never assigned to a variable by PyMC itself: minibatches are the user's choice."""
        return Competence.INCOMPATIBLE


def _row_choice(model: Model, given: Mapping[str, Any]) -> RowChoice:
    """Say what may be chosen of the number of rows.

    More than given are taken only where all else is left to the step, too: settings by hand are for
    the rows that were given.
    """
    if given["batch_size"] == "auto":
        return RowChoice.AS_GIVEN if _has_minibatches(model) else RowChoice.FREE
    is_number = isinstance(given["batch_size"], Integral)
    is_automatic = given["gradient"] == "auto" and given["learning_rate"] == "auto"
    return RowChoice.AT_LEAST if is_number and is_automatic else RowChoice.AS_GIVEN


def _has_minibatches(model: Model) -> bool:
    """Whether a model says itself how many rows are read, by ``pm.Minibatch``."""
    return bool(minibatch_outputs(model.rvs_to_values[rv] for rv in model.observed_RVs))
