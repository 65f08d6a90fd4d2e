"""The adapter between PyMC's step protocol and samplers with full gradients and a Metropolis test.

Turns ``init`` and ``update`` of a sampler file into a step method: the compiled log-density that
NUTS would use, PyMC's dual averaging, its statistics, its divergences, saved states. Contains no
formula of a sampler.
"""

import math
import time

from dataclasses import field
from typing import Any

import numpy as np

from numpy.linalg import LinAlgError
from pymc.exceptions import SamplingError
from pymc.model import modelcontext
from pymc.stats.convergence import SamplerWarning, WarningType
from pymc.step_methods.arraystep import GradientSharedStep
from pymc.step_methods.compound import Competence, StepMethodState
from pymc.step_methods.state import dataclass_state
from pymc.step_methods.step_sizes import DualAverageAdaptation, StepSizeState
from pymc.util import get_random_generator
from rich.progress import TextColumn
from rich.table import Column

from pymc_sghmc.checks import continuous_variables, is_number, starting_point
from pymc_sghmc.compat import ChainSetup, raveled_function
from pymc_sghmc.interrupts import DelayedInterrupt

__all__ = ["HamiltonianStep"]


@dataclass_state
class HamiltonianState(StepMethodState):
    """What a chain needs to go on exactly where it was."""

    settings: dict = field(metadata={"frozen": True})  # as given
    n_draws: int
    tune: bool
    step_adapt: StepSizeState
    state: Any
    curvature: Any
    iter_count: int
    divergences: int


class HamiltonianStep(ChainSetup, GradientSharedStep):
    """A step method made of a sampler's ``init`` and ``update``.

    Subclasses hold a signature, its checks and its documentation, and define ``begin()``, which
    resets what they learn, and ``draw(state, step_size) -> (state, info)``. ``info`` holds
    statistics, and under ``notice`` words for the user.

    Parameters
    ----------
    vars, model, rng, initial_point, compile_kwargs, blocked
        As documented by the samplers.
    step_size : "auto" or float
        ε; "auto" is PyMC's dual averaging to ``target_accept``.
    target_accept : float
        Mean acceptance probability that dual averaging aims at.
    """

    default_blocked = True
    stats_dtypes_shapes = {
        "step_size": (np.float64, []),
        "step_size_bar": (np.float64, []),
        "n_steps": (np.int64, []),
        "path_length": (np.float64, []),
        "accept": (np.float64, []),
        "accepted": (np.float64, []),  # as Metropolis has it, and both may be in one model
        "diverging": (bool, []),
        "divergences": (int, []),  # as NUTS has it, and both may be in one model
        "energy": (np.float64, []),
        "energy_error": (np.float64, []),
        "model_logp": (np.float64, []),
        "process_time_diff": (np.float64, []),
        "perf_counter_diff": (np.float64, []),
        "perf_counter_start": (np.float64, []),
        "curvature_pairs_kept": (np.int64, []),
        "curvature_pairs_skipped": (np.int64, []),
        "largest_eigval": (np.float64, []),
        "smallest_eigval": (np.float64, []),
        "condition": (np.float64, []),
        "warning": (SamplerWarning, None),
    }
    _state_class = HamiltonianState

    def __init__(
        self,
        vars,
        *,
        step_size,
        target_accept,
        model,
        rng,
        initial_point,
        compile_kwargs,
        blocked,
    ):
        name = type(self).__name__
        model = modelcontext(model)
        self.is_auto = isinstance(step_size, str) and step_size == "auto"
        if not self.is_auto and not (
            is_number(step_size) and math.isfinite(step_size) and step_size > 0
        ):
            raise ValueError(
                f'step_size={step_size!r}: pass "auto" or a finite number above zero, the length ε '
                "of a leapfrog step."
            )
        if not (is_number(target_accept) and 0 < target_accept < 1):
            raise ValueError(
                f"target_accept={target_accept!r}: must be a number between 0 and 1, the mean "
                "acceptance probability to aim at."
            )
        point = starting_point(model, initial_point)
        super().__init__(
            continuous_variables(vars, model, name),
            model=model,
            blocked=blocked,
            rng=rng,
            initial_point=point,
            compile_kwargs=compile_kwargs,
        )
        self.function = raveled_function(self._logp_dlogp_func)
        self.dtype = np.dtype(self._logp_dlogp_func.dtype)
        self.d = sum(np.size(point[var_name]) for var_name in self.var_names)
        self.target_accept = float(target_accept)
        self.settings = {"step_size": step_size, "target_accept": target_accept}
        # PyMC's first guess: a quarter of d^(-1/4)
        self.first_step_size = 0.25 / self.d**0.25 if self.is_auto else float(step_size)

    def begin_chain(self, rng):
        """Forget the last chain."""
        self.rng = get_random_generator(rng, copy=False)
        self.tune = True
        self.state = None
        self.n_draws = self.iter_count = self.divergences = 0
        self.step_adapt = DualAverageAdaptation(
            self.first_step_size, self.target_accept, gamma=0.05, k=0.75, t0=10
        )  # PyMC's constants
        self.begin()

    def density(self, position):
        """Return log p and its gradient, in double precision; −∞ where they can't be computed.

        Far out on a trajectory a model may factorise a matrix that isn't positive definite or
        divide by zero. That is a divergence, as in PyMC's HMC, and no reason to lose the run.
        """
        try:
            logp, gradient = self.function(position.astype(self.dtype, copy=False))
        except (LinAlgError, ArithmeticError):
            return -math.inf, np.full(position.shape, math.nan)
        return float(logp), np.asarray(gradient, dtype=float)

    def step(self, point):
        """Make one draw from ``point``, whatever the order of its unknowns."""
        if not self.shared:  # else PyMC picks them by name
            point = {name: point[name] for name in self.var_names}
        with DelayedInterrupt(), self.one_blas_thread():
            return super().step(point)

    def astep(self, q0):
        """Make one draw."""
        wall = time.perf_counter()
        process = time.process_time()
        position = np.asarray(q0.data, dtype=float)
        # The gradient at the last draw is known, unless another step has changed what it depends
        # on.
        if (
            self.state is None
            or self.shared
            or not np.array_equal(self.state.position.astype(self.dtype), q0.data)
        ):
            self.state = self.init(position, self.density)
            self._check_start(q0)
        adapt = self.tune and self.is_auto
        step_size = float(self.step_adapt.current(adapt)) if self.is_auto else self.first_step_size
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self.state, info = self.draw(self.state, step_size)
        if self.is_auto:
            self.step_adapt.update(info["accept"], adapt)
        notice = info.pop("notice", None)
        warning = None
        if notice:
            warning = SamplerWarning(WarningType.BAD_PARAMS, notice, "warn", self.iter_count)
        elif info["diverging"]:
            kind = WarningType.TUNING_DIVERGENCE if self.tune else WarningType.DIVERGENCE
            text = "The energy changed by more than 1,000, or isn't finite, along a trajectory."
            warning = SamplerWarning(kind, text, "debug", self.iter_count)
        self.divergences += info["diverging"] and not self.tune
        self.iter_count += 1
        self.n_draws += 1
        stats = {
            **info,
            "step_size": step_size,
            "step_size_bar": float(self.step_adapt.current(False)) if self.is_auto else step_size,
            "divergences": self.divergences,
            "process_time_diff": time.process_time() - process,
            "perf_counter_diff": time.perf_counter() - wall,
            "perf_counter_start": wall,
            "warning": warning,
        }
        return self.state.position.astype(self.dtype), [stats]

    def _check_start(self, q0):
        if math.isfinite(self.state.logp) and np.isfinite(self.state.gradient).all():
            return
        raise SamplingError(
            f"{type(self).__name__}: the log-density of {', '.join(self.var_names)} is "
            f"{self.state.logp:.3g} at the chain's position, or its gradient isn't finite. Check "
            "the model with model.debug(), or pass other initvals to pm.sample."
        )

    @staticmethod
    def competence(var, has_grad):
        """Never assigned to a variable by PyMC itself: NUTS is its choice."""
        return Competence.INCOMPATIBLE

    @staticmethod
    def _progressbar_config(n_chains=1):
        columns = [
            TextColumn("{task.fields[divergences]}", table_column=Column("Divergences", ratio=1)),
            TextColumn("{task.fields[step_size]:0.3f}", table_column=Column("Step size", ratio=1)),
            TextColumn("{task.fields[n_steps]}", table_column=Column("Grad evals", ratio=1)),
        ]
        start = dict.fromkeys(("divergences", "step_size", "n_steps"), 0)
        return columns, {name: [value] * n_chains for name, value in start.items()}

    @staticmethod
    def _make_progressbar_update_functions():
        def update_stats(stats):
            shown = {key: stats[key] for key in ("divergences", "step_size", "n_steps")}
            return shown | {"failing": stats["divergences"] > 0}

        return (update_stats,)
